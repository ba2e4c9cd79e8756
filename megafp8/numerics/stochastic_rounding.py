"""Noise for stochastic rounding, a pure function of (seed, step, tensor, micro-batch, shard) and the element's place.

A stateful generator would make a rounding depend on everything drawn before it: a resumed or recomputed step would
round differently, and so would the CPU that checks the GPU. Here the noise of an element is a word of Philox
(`megafp8.philox`) keyed by (seed, step, name), whose counter counts groups of four elements. The step is in
checkpoints, so a resumed run rounds as the uninterrupted one.

The name says the tensor, the micro-batch, the orientation, and the shard of the tensor that this rank has: were ranks
to round different shards alike, their errors would not average out. A micro-batch is numbered as in the global batch,
so a step rounds alike however the batch is split over data-parallel ranks. Each tensor is cast once per micro-batch, in
backward, so counting casts counts micro-batches.

Shapes: r rows, c columns of a matrix.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megafp8.numerics.step import NewestAmaxes
from megafp8.philox import Key, key_of, philox


def noise_key(seed: int, step: int, name: str) -> Key:
    """The key of the noise called `name` in `step` under `seed`."""
    return key_of(seed, step, name)


def words(counters: int, key: Key, device: torch.device) -> Tensor:
    """Philox-4x32-10 of the counters 0, 1, ...: int64 `[counters, 4]`, words in [0, 2^32)."""
    return torch.stack(philox(torch.arange(counters, device=device), key), dim=1)


def uniform(r: int, c: int, key: Key, device: torch.device) -> Tensor:
    """Uniform in [0, 1), fp32 `[r, c]`, multiples of 2^-24. Element i, row by row, is word i mod 4 of counter ⌊i/4⌋."""
    word = words(-(-r * c // 4), key, device).flatten()[: r * c]
    return (word >> 8).float().mul_(2.0**-24).view(r, c)


class TensorNoise:
    """The keys of one tensor, `name`."""

    def __init__(self, clock: NoiseClock, name: str) -> None:
        self.clock, self.name = clock, name
        self.microbatch = 0

    def next_keys(self, *, advance: bool) -> tuple[Key, Key]:
        """The rowwise and columnwise keys of the next micro-batch; it stays the next one unless `advance`."""
        clock = self.clock
        number = self.microbatch * clock.replicas + clock.replica
        self.microbatch += advance
        step = int(clock.step.item())
        rows, columns = (noise_key(clock.seed, step, f"{self.name}\0{number}\0{part}") for part in ("rows", "columns"))
        return rows, columns


class NoiseClock:
    """The step that the noise of all tensors follows; this rank is data-parallel rank `replica` of `replicas`."""

    def __init__(self, seed: int, replica: int, replicas: int) -> None:
        self.seed, self.replica, self.replicas = seed, replica, replicas
        self.step = torch.zeros((), dtype=torch.int64)  # on the host, where keys are made
        self._tensors: list[TensorNoise] = []

    def tensor(self, name: str, group: ProcessGroup | None) -> TensorNoise:
        """The noise of the tensor `name`, which `group` holds shards of; None: this rank has all of it."""
        noise = TensorNoise(self, name if group is None or group.size() == 1 else f"{name}\0{group.rank()}")
        self._tensors.append(noise)
        return noise

    def newest_amaxes(self) -> list[NewestAmaxes]:
        return []

    def end_step(self, reduced: Sequence[Tensor]) -> None:
        """Begin the next step."""
        self.step += 1
        for noise in self._tensors:
            noise.microbatch = 0

    def discard_step(self) -> None:
        """Begin the step again, with the same noise."""
        for noise in self._tensors:
            noise.microbatch = 0

    def refresh(self) -> None:
        """Nothing is derived from the step."""

    def state_dict(self) -> dict[str, Tensor]:
        """`fp8.noise_step` `[]`, int64 on the host."""
        return {"fp8.noise_step": self.step}
