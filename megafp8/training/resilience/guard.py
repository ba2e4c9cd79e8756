"""What a training job does against faults, at the points of its loop where it has to."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from megafp8.checkpoint import NodeMemory
from megafp8.config import Config
from megafp8.data.samples import Batch
from megafp8.distributed import activity
from megafp8.distributed.activity import Activity
from megafp8.parallel_state import ParallelState
from megafp8.training.metrics import StepMetrics
from megafp8.training.resilience.faults import Faults
from megafp8.training.resilience.hangs import HangWatch
from megafp8.training.resilience.recompute import check_recompute
from megafp8.training.resilience.spikes import (
    Range,
    SpikeLimit,
    merged,
    position_of,
    read_skipped,
    saved_losses,
    write_skipped,
)
from megafp8.training.resilience.stragglers import Slowest, report_stragglers
from megafp8.training.trainer import Trainer

logger = logging.getLogger(__name__)

ELSEWHERE = 0.9
"""Part of timeout_seconds that a rank may spend without progress outside of steps, and in its first one."""


class Guard:
    """The section `resilience` of a running job. `saved`: metadata of the checkpoint that the run resumed from."""

    def __init__(
        self,
        config: Config,
        run: Path,
        parallel: ParallelState,
        saved: Mapping[str, Any] | None,
        memory: NodeMemory | None = None,
    ) -> None:
        self._config, self._run, self._parallel = config, run, parallel
        folder = None if memory is None else memory.folder
        self.faults = Faults(run, config.resilience.inject, parallel.rank, folder)
        self._activity: Activity | None = None
        self.skipped: list[Range] = read_skipped(run, saved)
        self._spikes: SpikeLimit | None = None
        self._slowest: Slowest | None = None
        self._rewinds = 0
        self._rewound_to = -1
        self.resumed(saved)

    def resumed(self, saved: Mapping[str, Any] | None) -> None:
        """Continue with position and losses in `saved`, the metadata of a checkpoint."""
        self._start = 0 if saved is None else int(saved["consumed_samples"])
        spike = self._config.resilience.loss_spike
        if spike is not None:
            self._spikes = SpikeLimit(spike, [] if saved is None else saved_losses(saved, self._config))

    @contextmanager
    def watching(self, step: int, record: Callable[[str], None]) -> Iterator[None]:
        """Context of the training loop after `step` steps: it is watched for progress. Collective.

        `record`: writes the message of a hang to the log.
        """
        with ExitStack() as stack:
            self._activity = stack.enter_context(activity.recorded())
            self._activity.step = step
            if self._config.hang_seconds:
                watch = HangWatch(
                    self._run,
                    self._parallel,
                    self._activity,
                    seconds=self._config.hang_seconds,
                    seconds_elsewhere=ELSEWHERE * self._config.timeout_seconds,
                    record=record,
                )
                stack.enter_context(watch)
            yield

    def begin_step(self, step: int) -> None:
        """Step `step`, counted from 1, begins."""
        if self._activity is not None:
            self._activity.step = step
        activity.enter("data")
        self.faults.at_step(step)

    def check_batches(self, trainer: Trainer, step: int, batches: list[Batch]) -> list[Batch]:
        """The micro-batches of `step`, recomputed if that is due. Collective; raises ComputationDiffers."""
        interval = self._config.resilience.recompute_interval
        if interval and step % interval == 0 and not trainer.fp8.calibrating:
            activity.enter("recompute")
            check_recompute(trainer, step - 1, batches, lambda: self.faults.in_recomputed(step, trainer))
        self.faults.in_gradients(step, trainer)
        return self.faults.in_batches(step, batches)

    @property
    def loss_limit(self) -> float | None:
        """The highest loss of the next step that is no spike; None if there is none."""
        return None if self._spikes is None else self._spikes.limit()

    def end_step(self, step: int, loss: float, skipped: bool) -> Slowest | None:
        """Step `step` is done; on rank 0 the slowest rank, if the ranks are compared after it. Collective."""
        if self._spikes is not None and not skipped:
            self._spikes.add(loss)
        interval = self._config.resilience.straggler_interval
        activity.enter("after the step")
        if interval and step % interval == 0 and self._activity is not None and self._parallel.world_size > 1:
            self._slowest = report_stragglers(self._activity, self._parallel, step, interval, self._slowest)
            return self._slowest
        return None

    def position_of(self, samples: int) -> int:
        """The position of the sample that comes after `samples`, counted as `History.samples_at` does."""
        return position_of(samples, self.skipped, self._start)

    def consumed(self, samples: int) -> int:
        """The position after the last of `samples`, before any that are left out next."""
        return self.position_of(samples - 1) + 1 if samples > self._start else samples

    def metadata(self, samples: int) -> dict[str, Any]:
        """Keys for the metadata of a checkpoint after training on `samples`."""
        found: dict[str, Any] = {}
        if self._spikes is not None:
            found["losses"] = self._spikes.losses
        if self.skipped:
            found |= {"skipped_samples": self.skipped, "consumed_samples": self.consumed(samples)}
        return found

    def rewinds_after(self, metrics: StepMetrics) -> bool:
        """Whether the job goes back to its newest checkpoint after a step with `metrics`."""
        spike = self._config.resilience.loss_spike
        return metrics.is_spike and spike is not None and spike.action == "rewind"

    def leave_out(self, samples: Range, step: int) -> int:
        """From here on leave out the samples of this range of positions; `step`: of the checkpoint that is loaded.

        Returns how often the run has gone back to it. Rank 0 writes the range to the run folder.
        """
        self.skipped = merged(self.skipped, [samples])
        if self._parallel.rank == 0:
            write_skipped(self._run, self.skipped)
        self._rewinds = self._rewinds + 1 if step == self._rewound_to else 1
        self._rewound_to = step
        return self._rewinds
