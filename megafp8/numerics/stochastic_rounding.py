"""Noise for stochastic rounding, a pure function of (seed, step, tensor, micro-batch, shard) and the element's place.

A stateful generator would make a rounding depend on everything drawn before it: a resumed or recomputed step would
round differently, and so would the CPU that checks the GPU. Here the noise of an element is half a word of Philox
(`megafp8.numerics.philox`) keyed by (seed, name), whose counter is the group of eight elements, the step and the
micro-batch. The step is in checkpoints, so a resumed run rounds as the uninterrupted one.

Random bits cost a kernel more than the cast itself, so they are few: 16 an element, where Blackwell's instruction takes
8 (PTX, cvt.rs.satfinite.e2m1x4.f32), and seven rounds of Philox instead of ten, which pass the same tests (Salmon et
al. 2011).

The name says the tensor, the orientation, and the shard of the tensor that this rank has: were ranks to round different
shards alike, their errors would not average out. A micro-batch is numbered as in the global batch, so a step rounds
alike however the batch is split over data-parallel ranks. Each tensor is cast once per micro-batch, in backward, so
counting casts counts micro-batches.

Step and micro-batch are numbers on the device, which kernels read and the device advances: a CUDA graph of a step, or
of a layer, rounds anew whenever it is replayed.

Shapes: r rows, c columns of a matrix.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megafp8.numerics.philox import Key, key_of, philox, philox_of_words
from megafp8.numerics.step import NewestAmaxes

NOISE_ROUNDS = 7
"""Rounds of Philox for `uniform`."""


def noise_key(seed: int, step: int, name: str) -> Key:
    """The key of the noise called `name` in `step` under `seed`."""
    return key_of(seed, step, name)


def words(counters: int, key: Key, device: torch.device) -> Tensor:
    """Philox-4x32-10 of the counters 0, 1, ...: int64 `[counters, 4]`, words in [0, 2^32)."""
    return torch.stack(philox(torch.arange(counters, device=device), key), dim=1)


class CastNoise(NamedTuple):
    """The noise of one cast: its key, and the step and the micro-batch, int64 `[]` on the device, as they are by then.

    Both are below 2^32.
    """

    key: Key
    step: Tensor
    microbatch: Tensor


def uniform(r: int, c: int, noise: CastNoise) -> Tensor:
    """Uniform in [0, 1), fp32 `[r, c]`, multiples of 2^-16.

    Element i, row by row, is the 16 bits i mod 8 of the counter whose 32-bit words are those of ⌊i/8⌋, step and
    micro-batch; the lower half of a word is first.
    """
    key, step, microbatch = noise
    group = torch.arange(-(-r * c // 8), device=step.device)
    word = torch.stack(
        philox_of_words(group & 0xFFFFFFFF, group >> 32, step, microbatch, key, rounds=NOISE_ROUNDS), dim=1
    )
    half = torch.stack([word & 0xFFFF, word >> 16], dim=2)
    return half.flatten()[: r * c].float().mul_(2.0**-16).view(r, c)


class TensorNoise:
    """The noise of one tensor, `name`, rowwise and columnwise, in the micro-batch that is next."""

    def __init__(self, clock: NoiseClock, name: str) -> None:
        self.microbatch = torch.full_like(clock.step, clock.replica)
        self.rowwise, self.columnwise = (
            CastNoise(key_of(clock.seed, name, part), clock.step, self.microbatch) for part in ("rows", "columns")
        )
        self._replicas = clock.replicas

    def advance(self) -> None:
        """Another micro-batch is next."""
        self.microbatch += self._replicas


class NoiseClock:
    """The step that the noise of all tensors follows, on `device`.

    This rank is data-parallel rank `replica` of `replicas`.
    """

    def __init__(self, seed: int, replica: int, replicas: int, device: torch.device) -> None:
        self.seed, self.replica, self.replicas = seed, replica, replicas
        self.step = torch.zeros((), dtype=torch.int64, device=device)
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
        self.discard_step()

    def discard_step(self) -> None:
        """Begin the step again, with the same noise."""
        if self._tensors:
            microbatches = [noise.microbatch for noise in self._tensors]
            torch._foreach_zero_(microbatches)
            torch._foreach_add_(microbatches, self.replica)

    def refresh(self) -> None:
        """Nothing is derived from the step."""

    def state_dict(self) -> dict[str, Tensor]:
        """`fp8.noise_step` `[]`, int64."""
        return {"fp8.noise_step": self.step}
