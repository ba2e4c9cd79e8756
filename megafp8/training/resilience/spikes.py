"""Loss spikes: when the loss of a step counts as one, and which samples a run leaves out after a rewind.

A loss is a spike if it is above mean + sigmas · standard deviation of the losses of the latest `window` steps that were
not skipped; not before half of them are known. OLMo-core's SkipStepOptimizer has the same rule. Losses are means over
all ranks, so all ranks decide alike; the device compares before the update, so the host does not wait.

A skipped step changes no weights. A rewind goes back to the newest checkpoint and leaves out the samples since then, as
in PaLM (Chowdhery et al., 2022, section 5.1). A checkpoint holds the position in the data, which counts samples left
out too. From there on the run counts samples as if it left none out (`History.samples_at`), and `position_of`
maps these numbers to positions.

A resumed run repeats all decisions: checkpoints hold the losses of the window and the ranges of samples left out, and
the run folder has these ranges as soon as the run is rewound.
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
"""Keys that are equal where losses can be compared."""

Range = tuple[int, int]
"""Positions of samples: from the first one, up to and without the second."""


class SpikeLimit:
    """The highest loss that is no spike, from the losses before. `losses`: of the latest steps, as `losses` gave."""

    def __init__(self, config: LossSpikeConfig, losses: Sequence[float] = ()) -> None:
        self._config = config
        self._losses: deque[float] = deque(losses, maxlen=config.window)

    @property
    def losses(self) -> list[float]:
        """The latest losses, oldest first."""
        return list(self._losses)

    def limit(self) -> float | None:
        """The limit for the next step; None while too few losses are known."""
        if len(self._losses) < max(2, self._config.window // 2):
            return None
        return statistics.fmean(self._losses) + self._config.sigmas * statistics.stdev(self._losses)

    def add(self, loss: float) -> None:
        """The loss of a step that was not skipped."""
        if math.isfinite(loss):
            self._losses.append(loss)


def position_of(samples: int, skipped: Sequence[Range], start: int = 0) -> int:
    """The position of a sample that would be `samples` if from position `start` on no range were left out."""
    for first, end in sorted(skipped):
        first = max(first, start)
        if first < end and samples >= first:
            samples += end - first
    return samples


def saved_losses(saved: Mapping[str, Any], config: Config) -> list[float]:
    """The latest losses in `saved`, the metadata of a checkpoint, for a run that goes on from it with `config`.

    None if data, sequence length or batch size have changed: losses of other batches may be higher for that alone.
    """
    now = config.model_dump(mode="json")
    if any(saved["config"][section].get(key) != now[section].get(key) for section, key in _COMPARABLE):
        return []
    return saved.get("losses") or []


def merged(*ranges: Sequence[Range]) -> list[Range]:
    """All ranges in order, those that touch or overlap as one."""
    joined: list[Range] = []
    for start, end in sorted(one for several in ranges for one in several):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined


def skipped_of(metadata: Mapping[str, Any]) -> list[Range]:
    """The ranges that a run leaves out, as the metadata of a checkpoint has them."""
    return merged([(start, end) for start, end in metadata.get("skipped_samples") or []])


def read_skipped(folder: Path, metadata: Mapping[str, Any] | None) -> list[Range]:
    """The ranges that the run in `folder` leaves out: those of its checkpoint, and of its file."""
    path = folder / FILE_NAME
    try:
        written = parse_json(path.read_bytes()) if path.exists() else []
        if not isinstance(written, list) or not all(map(_is_range, written)):
            raise ValueError("it is no list of pairs of positions")
    except ValueError as error:
        works = "restore it; without it the run would train again on samples that it left out"
        raise ValueError(f"{path} is damaged: {error}; {works}") from None
    return merged(skipped_of(metadata or {}), [(start, end) for start, end in written])


def _is_range(pair: Any) -> bool:
    return isinstance(pair, list) and len(pair) == 2 and all(type(at) is int and at >= 0 for at in pair)


def write_skipped(folder: Path, skipped: Sequence[Range]) -> None:
    """Replace the file by one with the ranges `skipped`."""
    replace_text(folder / FILE_NAME, json.dumps(list(skipped)) + "\n")


class LossSpikes(Observer):
    """The losses, samples left out and rewinds of a run. `saved`: metadata of the checkpoint that it resumed from."""

    def __init__(self, config: Config, run: Path, rank: int, saved: Mapping[str, Any] | None) -> None:
        self._config, self._run, self._rank = config, run, rank
        self.skipped: list[Range] = read_skipped(run, saved)
        self._spikes: SpikeLimit | None = None
        self._rewinds = 0
        self._rewound_to = -1
        self.resumed(saved)

    def resumed(self, saved: Mapping[str, Any] | None) -> None:
        """Continue with position, losses and ranges in `saved`, the metadata of a checkpoint."""
        self._start = 0 if saved is None else int(saved["consumed_samples"])
        self.skipped = merged(self.skipped, skipped_of(saved or {}))
        spike = self._config.resilience.loss_spike
        if spike is not None:
            self._spikes = SpikeLimit(spike, [] if saved is None else saved_losses(saved, self._config))

    @property
    def limit(self) -> float | None:
        """The highest loss of the next step that is no spike; None if there is none."""
        return None if self._spikes is None else self._spikes.limit()

    def after_step(self, step: int, loss: float, skipped: bool) -> Mapping[str, Any]:
        limit = self.limit
        if self._spikes is not None and not skipped:
            self._spikes.add(loss)
        return {"loss_limit": limit}

    def position_of(self, samples: int) -> int:
        """The position of the sample that comes after `samples`, counted as `History.samples_at` does."""
        return position_of(samples, self.skipped, self._start)

    def consumed(self, samples: int) -> int:
        """The position after the last of `samples`, before any that are left out next."""
        return self.position_of(samples - 1) + 1 if samples > self._start else samples

    def metadata(self, samples: int) -> dict[str, Any]:
        """Keys for the metadata of a checkpoint after training on `samples`."""
        values: dict[str, Any] = {}
        if self._spikes is not None:
            values["losses"] = self._spikes.losses
        if self.skipped:
            values |= {"skipped_samples": self.skipped, "consumed_samples": self.consumed(samples)}
        return values

    def rewinds_after(self, metrics: StepMetrics) -> bool:
        """Whether the job goes back to its newest checkpoint after a step with `metrics`."""
        spike = self._config.resilience.loss_spike
        return metrics.is_spike and spike is not None and spike.action == "rewind"

    def leave_out(self, samples: Range, step: int) -> int:
        """Leave out the samples of this range of positions from here on; `step`: of the checkpoint that is loaded.

        Returns how often the run has gone back to it. Rank 0 writes the range to the run folder.
        """
        self.skipped = merged(self.skipped, [samples])
        if self._rank == 0:
            write_skipped(self._run, self.skipped)
        self._rewinds = self._rewinds + 1 if step == self._rewound_to else 1
        self._rewound_to = step
        return self._rewinds
