"""Writer of the timeline of a traced step (`logging.pipeline_trace_step`) to the run folder."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from megafp8.fp8.health import Fp8Record
from megafp8.host.text_file import DiskErrorsLogged
from megafp8.parallel.pipeline.trace import write_timeline
from megafp8.training.observer import Observer, StepMetrics
from megafp8.training.trainer import RankTrainer

logger = logging.getLogger(__name__)


class PipelineTrace(Observer):
    """Observer that writes pipeline_trace.json to `folder` after the traced step."""

    def __init__(self, trainer: RankTrainer, folder: Path) -> None:
        self._trainer, self._path = trainer, folder / "pipeline_trace.json"

    def write(self, metrics: StepMetrics, records: Sequence[Fp8Record] = ()) -> None:
        """Write the timeline on rank 0 if this step was traced."""
        timeline, self._trainer.timeline = self._trainer.timeline, None
        if timeline is not None and self._trainer.parallel.rank == 0:
            with DiskErrorsLogged(self._path.name):
                write_timeline(timeline, self._trainer.plan.placement, self._path)
            draw = f"megafp8 plot-schedule --measured {self._path} --png schedule.png"
            logger.info(f"pipeline trace of step {metrics.step}: {self._path}; to draw it: {draw}")
