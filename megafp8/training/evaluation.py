"""Uses of the live model in a job: validation loss, the tasks of `training.evaluate`, and rollouts of `data.grpo`."""

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
"""Function that runs the tasks of `training.evaluate` after a step and returns their metrics by name. Collective."""
MakeEvaluation = Callable[[RankTrainer, RunInputs, Path], TaskEvaluation]
"""Function that builds the evaluation of a trainer's live model, which writes its files to the run folder."""


class StepSource(Protocol):
    """Source of micro-batches that the live model generates."""

    @property
    def metrics(self) -> Mapping[str, float]:
        """Metrics of the latest step by name."""

    def batches(
        self, train: Blend, step: int, consumed_samples: int, position_of: Callable[[int], int]
    ) -> Iterator[list[Batch]]:
        """Yield this rank's micro-batches of each step. Collective.

        Args:
            train: Samples with the prompts.
            step: Number of steps done before.
            consumed_samples: Number of samples of `train` that these steps have read.
            position_of: Function from a sample number to a position in the data, as in `RunInputs.batches`.
        """
        ...


class LiveUses(NamedTuple):
    """Functions that build the evaluation and the rollouts of a job from its trainer, inputs and run folder.

    A function is None if the config does not use it.
    """

    evaluation: MakeEvaluation | None = None
    rollouts: Callable[[RankTrainer, RunInputs, Path], StepSource] | None = None


class Evaluation(Observer):
    """Observer that evaluates the model at the intervals of the config and after `last_step`.

    Args:
        trainer: Trainer of this rank.
        inputs: Tokenizer and data of the stage.
        last_step: Last step of the loop.
        tasks: Evaluation that `training.evaluate` configures, or None.
    """

    def __init__(self, trainer: RankTrainer, inputs: RunInputs, last_step: int, tasks: TaskEvaluation | None) -> None:
        self._trainer, self._inputs, self._last_step, self._tasks = trainer, inputs, last_step, tasks

    def after_step(self, step: int, loss: float, skipped: bool) -> Mapping[str, Any]:
        """Return the validation losses and task metrics if `step` is evaluated, else nothing. Collective."""
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
        """Return the mean loss over the first `eval_steps` batches of `samples`, the same in every evaluation."""
        # Few samples are read, so starting loader processes, which takes seconds, would not pay off.
        stream = self._inputs.batches(samples, self._trainer.parallel, num_workers=0)
        losses = [self._trainer.evaluate(next(stream)) for _ in range(self._inputs.config.training.eval_steps)]
        return math.fsum(x.mean * x.tokens for x in losses) / max(1, sum(x.tokens for x in losses))
