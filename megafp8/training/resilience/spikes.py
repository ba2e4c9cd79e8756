"""Loss spikes: detection of a spike, and the samples that a run leaves out after a rewind.

A loss is a spike if it is above mean + sigmas · standard deviation of the losses of the latest `window` steps that were
not skipped. Detection starts when half of the window is known. OLMo-core's SkipStepOptimizer has the same rule. Losses
are means over all ranks, so all ranks make the same decision. The device compares the loss before the update, so the
host does not wait.

A skipped step changes no weights. A rewind goes back to the newest checkpoint and leaves out the samples read since
then, as in PaLM (Chowdhery et al., 2022, section 5.1). A checkpoint holds the position in the data, which includes
samples left out. After it, the run counts samples as if none were left out (`History.samples_at`), and `position_of`
converts these counts to positions.

A resumed run repeats all decisions. Checkpoints hold the losses of the window and the ranges of samples left out. The
run folder holds these ranges as soon as the run is rewound.
"""

from __future__ import annotations

import json
import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megafp8.config import Config, LossSpikeConfig
from megafp8.host.strict_json import parse_json
from megafp8.host.text_file import replace_text
from megafp8.training.observer import Observer, StepMetrics

FILE_NAME = "skipped_samples.json"

_COMPARABLE = (
    ("data", "train"),
    ("data", "packing"),
    ("data", "loss_on"),
    ("data", "dpo"),
    ("training", "seq_length"),
    ("training", "global_batch_size"),
)
"""Config keys that must be equal for losses to be comparable."""

Range = tuple[int, int]
"""Range of sample positions: the first number is included, the second is excluded."""


class SpikeLimit:
    """Limit above which a loss is a spike, computed from previous losses.

    `losses` initializes the window with the losses of the latest steps, oldest first.
    """

    def __init__(self, config: LossSpikeConfig, losses: Sequence[float] = ()) -> None:
        self._config = config
        self._losses: deque[float] = deque(losses, maxlen=config.window)

    @property
    def losses(self) -> list[float]:
        """Losses in the window, oldest first."""
        return list(self._losses)

    def limit(self) -> float | None:
        """Return the limit for the next step, or None while too few losses are known."""
        if len(self._losses) < max(2, self._config.window // 2):
            return None
        return statistics.fmean(self._losses) + self._config.sigmas * statistics.stdev(self._losses)

    def add(self, loss: float) -> None:
        """Add the loss of a step that was not skipped. Losses that are not finite are ignored."""
        if math.isfinite(loss):
            self._losses.append(loss)


def position_of(samples: int, skipped: Sequence[Range], start: int = 0) -> int:
    """Return the position of the sample with number `samples`.

    The numbers count samples as if the ranges `skipped` after position `start` did not exist.
    """
    for first, end in sorted(skipped):
        first = max(first, start)
        if first < end and samples >= first:
            samples += end - first
    return samples


def saved_losses(saved: Mapping[str, Any], config: Config) -> list[float]:
    """Return the latest losses in `saved`, the metadata of a checkpoint, for a run that continues with `config`.

    The list is empty if data, sequence length or batch size have changed, because losses are then not comparable.
    """
    now = config.model_dump(mode="json")
    if any(saved["config"][section].get(key) != now[section].get(key) for section, key in _COMPARABLE):
        return []
    return saved.get("losses") or []


def merged(*ranges: Sequence[Range]) -> list[Range]:
    """Return all ranges in order. Ranges that touch or overlap are merged."""
    joined: list[Range] = []
    for start, end in sorted(one for several in ranges for one in several):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined


def skipped_of(metadata: Mapping[str, Any]) -> list[Range]:
    """Return the ranges of samples left out, from the metadata of a checkpoint."""
    return merged([(start, end) for start, end in metadata.get("skipped_samples") or []])


def read_skipped(folder: Path, metadata: Mapping[str, Any] | None) -> list[Range]:
    """Return the ranges that the run in `folder` leaves out, from a checkpoint's metadata and the run's file.

    Raises ValueError if the file is damaged.
    """
    path = folder / FILE_NAME
    try:
        written = parse_json(path.read_bytes()) if path.exists() else []
        if not isinstance(written, list) or not all(map(_is_range, written)):
            raise ValueError("it is not a list of pairs of positions")
    except ValueError as error:
        works = "restore it; without it the run would train again on samples that it left out"
        raise ValueError(f"{path} is damaged: {error}; {works}") from None
    return merged(skipped_of(metadata or {}), [(start, end) for start, end in written])


def _is_range(pair: Any) -> bool:
    return isinstance(pair, list) and len(pair) == 2 and all(type(at) is int and at >= 0 for at in pair)


def write_skipped(folder: Path, skipped: Sequence[Range]) -> None:
    """Write the ranges `skipped` to the run's file, replacing it."""
    replace_text(folder / FILE_NAME, json.dumps(list(skipped)) + "\n")


class LossSpikes(Observer):
    """Observer that tracks the losses, the samples left out and the rewinds of a run.

    Args:
        config: Config of the run.
        run: Run folder.
        rank: Global rank.
        saved: Metadata of the checkpoint that the run resumes from, or None.
    """

    def __init__(self, config: Config, run: Path, rank: int, saved: Mapping[str, Any] | None) -> None:
        self._config, self._run, self._rank = config, run, rank
        self.skipped: list[Range] = read_skipped(run, saved)
        self._spikes: SpikeLimit | None = None
        self._rewinds = 0
        self._rewound_to = -1
        self.resumed(saved)

    def resumed(self, saved: Mapping[str, Any] | None) -> None:
        """Continue with the position, losses and ranges in `saved`, the metadata of a checkpoint."""
        self._start = 0 if saved is None else int(saved["consumed_samples"])
        self.skipped = merged(self.skipped, skipped_of(saved or {}))
        spike = self._config.resilience.loss_spike
        if spike is not None:
            self._spikes = SpikeLimit(spike, [] if saved is None else saved_losses(saved, self._config))

    @property
    def limit(self) -> float | None:
        """Highest loss of the next step that is not a spike; None if spikes are not detected, or not yet."""
        return None if self._spikes is None else self._spikes.limit()

    def after_step(self, step: int, loss: float, skipped: bool) -> Mapping[str, Any]:
        """Return the limit of this step, and add its loss to the window unless the step was skipped."""
        limit = self.limit
        if self._spikes is not None and not skipped:
            self._spikes.add(loss)
        return {"loss_limit": limit}

    def position_of(self, samples: int) -> int:
        """Return the position of the sample that follows `samples` samples, counted as in `History.samples_at`."""
        return position_of(samples, self.skipped, self._start)

    def consumed(self, samples: int) -> int:
        """Return the position after the last of `samples`, before any samples that are left out next."""
        return self.position_of(samples - 1) + 1 if samples > self._start else samples

    def metadata(self, samples: int) -> dict[str, Any]:
        """Return metadata keys for a checkpoint after training on `samples` samples."""
        values: dict[str, Any] = {}
        if self._spikes is not None:
            values["losses"] = self._spikes.losses
        if self.skipped:
            values |= {"skipped_samples": self.skipped, "consumed_samples": self.consumed(samples)}
        return values

    def rewinds_after(self, metrics: StepMetrics) -> bool:
        """Return whether the job goes back to its newest checkpoint after a step with `metrics`."""
        spike = self._config.resilience.loss_spike
        return metrics.is_spike and spike is not None and spike.action == "rewind"

    def leave_out(self, samples: Range, step: int) -> int:
        """Leave out a range of sample positions after a rewind to the checkpoint of `step`.

        Rank 0 writes the range to the run folder. Return how often in a row the run has gone back to this checkpoint.
        """
        self.skipped = merged(self.skipped, [samples])
        if self._rank == 0:
            write_skipped(self._run, self.skipped)
        self._rewinds = self._rewinds + 1 if step == self._rewound_to else 1
        self._rewound_to = step
        return self._rewinds
