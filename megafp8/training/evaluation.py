"""What a job asks of its live model: the loss on documents for validation, what `training.evaluate` says, and the texts
that it trains on with `data.grpo`."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from megafp8.batch import Batch
from megafp8.data.blend import Blend
from megafp8.parallel import activity
from megafp8.training.inputs import RunInputs
from megafp8.training.observer import Observer
from megafp8.training.trainer import RankTrainer

TaskEvaluation = Callable[[int], Mapping[str, float]]
"""What `training.evaluate` asks for, after a step: its metrics by name. Collective."""
MakeEvaluation = Callable[[RankTrainer, RunInputs, Path], TaskEvaluation]
"""The evaluation of a trainer's live model, whose files go to the run folder."""


class StepSource(Protocol):
    """Makes the micro-batches of steps by the live model. `metrics`: of the latest step, by name."""

    @property
    def metrics(self) -> Mapping[str, float]: ...

    def batches(
        self, train: Blend, step: int, consumed_samples: int, position_of: Callable[[int], int]
    ) -> Iterator[list[Batch]]:
        """This rank's micro-batches of each step after the first `step`, which have read `consumed_samples` of
        `train`. `position_of`: as of `RunInputs.batches`. Collective."""
        ...


class LiveUses(NamedTuple):
    """Functions that make the evaluation and the rollouts of a job from its trainer, inputs and run folder; None for
    what the config does not ask for."""

    evaluation: MakeEvaluation | None = None
    rollouts: Callable[[RankTrainer, RunInputs, Path], StepSource] | None = None


class Evaluation(Observer):
    """Evaluates after the steps that the config names, and after `last_step`. `tasks`: as `training.evaluate` says."""

    def __init__(self, trainer: RankTrainer, inputs: RunInputs, last_step: int, tasks: TaskEvaluation | None) -> None:
        self._trainer, self._inputs, self._last_step, self._tasks = trainer, inputs, last_step, tasks

    def after_step(self, step: int, loss: float, skipped: bool) -> Mapping[str, Any]:
        t, inputs, last = self._inputs.config.training, self._inputs, step == self._last_step
        validates = t.eval_interval > 0 and (last or step % t.eval_interval == 0)
        evaluates = t.evaluate is not None and (last or step % t.evaluate.interval == 0)
        if not (validates or evaluates):
            return {}
        activity.enter("evaluation")
        start, evaluations, fields = time.perf_counter(), dict[str, float](), dict[str, Any]()
        if validates:
            if inputs.validation is not None:
                fields["validation_loss"] = self._loss(inputs.validation)
            sets = {**inputs.validation_sources, **inputs.validation_sets}
            evaluations |= {f"valid/{name}": self._loss(samples) for name, samples in sets.items()}
        if evaluates and self._tasks is not None:
            evaluations |= self._tasks(step)
        activity.enter("after the step")
        return fields | {"evaluations": evaluations, "evaluation_seconds": time.perf_counter() - start}

    def _loss(self, samples: Blend) -> float:
        """Mean loss over the first of `samples`, the same ones in every evaluation."""
        # Few samples are read, and each evaluation would wait seconds for new processes to start.
        stream = self._inputs.batches(samples, self._trainer.parallel, num_workers=0)
        losses = [self._trainer.evaluate(next(stream)) for _ in range(self._inputs.config.training.eval_steps)]
        return math.fsum(x.mean * x.tokens for x in losses) / max(1, sum(x.tokens for x in losses))
