"""Average the weights of several checkpoints of one model, or their moving averages.

The average of a run's last checkpoints is often better than each checkpoint, especially if the learning rate has not
decayed (Izmailov et al. 2018, "Averaging Weights Leads to Wider Optima", arXiv:1803.05407; Sanyal et al. 2023, "Early
Weight Averaging meets High Learning Rates", arXiv:2306.03241).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megafp8.conversion.base import CheckpointSource, is_weight, optimizer_key
from megafp8.conversion.flat import differences
from megafp8.optimizer.mixed_precision import AVERAGE

_OF_A_RUN = (
    "data",
    "consumed_samples",
    "tokens",
    "optimizer_steps",
    "layout",
    "changes",
    "stage",
    "losses",
    "skipped_samples",
)
"""Keys of metadata.json that describe the state of a single run."""


class Averaged(CheckpointSource):
    """Mean weights of several sources of the same model and vocabulary, in any layouts. It has no other state.

    For each weight, the fp32 masters are averaged if all sources have them, otherwise the weights. Sums are computed in
    float64 and rounded once. Two tensors are in memory at a time. Raises ValueError if the sources do not match.

    Args:
        sources: Sources to average.
        moving: Whether to average the moving averages in the sources instead. Weights that are not trained have no
            moving average, so the weights are averaged.
    """

    def __init__(self, sources: Sequence[CheckpointSource], *, moving: bool = False) -> None:
        first, last = sources[0], sources[-1]
        self._key = AVERAGE if moving else "master"
        for source in sources if moving else ():
            if not any(name.startswith(optimizer_key(AVERAGE, "")) for name in source.tensors):
                raise ValueError(f"{source.path} has no moving average: its run did not set optimizer.average_decay")
        for other in sources[1:]:
            if fields := differences(first.model, other.model):
                raise ValueError(f"{other.path} has a different model than {first.path}: {', '.join(fields)}")
            if _weights(other) != _weights(first):
                raise ValueError(f"{other.path} has weights with other names, shapes or dtypes than {first.path}")
            ids = [source.about.get("tokenizer_fingerprint") for source in (first, other)]
            if ids[0] != ids[1]:
                raise ValueError(f"{other.path} was trained with a different vocabulary than {first.path}")
        self._sources = sources
        self.path, self.model, self.tokenizer_files = last.path, last.model, last.tokenizer_files
        self.tensors = _weights(last)
        self.about = {key: value for key, value in last.about.items() if key not in _OF_A_RUN}
        self.about["average_of"] = [str(source.path) for source in sources]

    def read(self, name: str) -> Tensor:
        """Return the mean of a weight, rounded to its dtype. Integers must be equal in all sources."""
        fp32 = optimizer_key(self._key, name)
        read = fp32 if all(fp32 in source.tensors for source in self._sources) else name
        dtype = self.tensors[name].dtype
        if not dtype.is_floating_point:
            first, *others = (source.read(name) for source in self._sources)
            if not all(torch.equal(first, x) for x in others):
                raise ValueError(f"{name} is {dtype}, which has no mean, and differs between the checkpoints")
            return first
        total = torch.zeros(self.tensors[name].shape, dtype=torch.float64)
        for source in self._sources:
            total += source.read(read)
        return (total / len(self._sources)).to(dtype)


def _weights(source: CheckpointSource) -> Mapping[str, Any]:
    return {name: info for name, info in source.tensors.items() if is_weight(name)}
