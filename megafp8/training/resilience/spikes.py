"""Loss spikes: when the loss of a step counts as one, and which samples a run leaves out after a rewind.

A loss is a spike if it is above mean + sigmas · standard deviation of the losses of the latest `window` steps that were
not skipped; not before half of them are known. OLMo-core's SkipStepOptimizer has the same rule. Losses are means over
all ranks, so all ranks decide alike; the device compares before the update, so the host does not wait.

A skipped step changes no weights. A rewind goes back to the newest checkpoint and leaves out the samples since then, as
in PaLM (Chowdhery et al., 2022, section 5.1). A checkpoint holds the position in the data, which counts samples left
out too. From there on the run counts samples as if it left none out (`training.history.samples_at`), and `position_of`
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
from megafp8.strict_json import parse_json
from megafp8.text_file import replace_text

FILE_NAME = "skipped_samples.json"

_COMPARABLE = (
    ("data", "train"),
    ("data", "packing"),
    ("data", "loss_on"),
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
    found: list[Range] = []
    for start, end in sorted(one for several in ranges for one in several):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return found


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
