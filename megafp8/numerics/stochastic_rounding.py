"""Noise for stochastic rounding: a pure function of seed, step, tensor, micro-batch, shard and element index.

With a stateful generator, a rounding would depend on everything drawn before it: a resumed or recomputed step would
round differently, and a CPU could not reproduce a GPU's results. Here the noise of an element is half a word of Philox
(`megafp8.numerics.philox`). Its key consists of the seed and a name. Its counter consists of the index of a group of
eight elements, the step and the micro-batch. Checkpoints contain the step, so a resumed run rounds like an
uninterrupted one.

Generating random bits costs a kernel more than the cast itself, so there are few of them: 16 per element (Blackwell's
instruction takes 8; PTX, cvt.rs.satfinite.e2m1x4.f32), and seven rounds of Philox instead of ten, which pass the same
tests (Salmon et al. 2011).

The name identifies the tensor, the orientation, and this rank's shard of the tensor. If ranks rounded different shards
with equal noise, the errors would not average out. Micro-batches are numbered within the global batch, so a step rounds
equally however the batch is split over data-parallel ranks. Each tensor is cast once per micro-batch, in backward, so
counting casts counts micro-batches.

Step and micro-batch are numbers on the device: kernels read them, and the device advances them. A CUDA graph of a step
or a layer therefore uses new noise in each replay.

Shapes: r rows, c columns of a matrix.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megafp8.numerics.philox import Key, key_of, philox_of_words
from megafp8.numerics.step import NewestAmaxes

NOISE_ROUNDS = 7
"""Number of Philox rounds in `uniform`."""


class CastNoise(NamedTuple):
    """Noise of one cast: its key, and the step and micro-batch at the time of the cast.

    Step and micro-batch are int64 `[]` on the device, below 2^32.
    """

    key: Key
    step: Tensor
    microbatch: Tensor


def uniform(r: int, c: int, noise: CastNoise, first_row: int = 0) -> Tensor:
    """Return uniform noise in [0, 1), fp32 `[r, c]`, as multiples of 2^-16: rows of a longer matrix from `first_row`.

    The elements before `first_row` must be a multiple of 8.

    Elements are counted row by row. Element i uses the 16-bit half-word i mod 8 of the counter with the 32-bit words
    (low half of ⌊i/8⌋, high half of ⌊i/8⌋, step, micro-batch). The lower half of a word comes first.
    """
    key, step, microbatch = noise
    assert first_row * c % 8 == 0
    group = torch.arange(-(-r * c // 8), device=step.device) + first_row * c // 8
    word = torch.stack(
        philox_of_words(group & 0xFFFFFFFF, group >> 32, step, microbatch, key, rounds=NOISE_ROUNDS), dim=1
    )
    half = torch.stack([word & 0xFFFF, word >> 16], dim=2)
    return half.flatten()[: r * c].float().mul_(2.0**-16).view(r, c)


class TensorNoise:
    """Noise of one tensor, rowwise and columnwise, for the next micro-batch."""

    def __init__(self, clock: NoiseClock, name: str) -> None:
        self.microbatch = torch.full_like(clock.step, clock.replica)
        self.rowwise, self.columnwise = (
            CastNoise(key_of(clock.seed, name, part), clock.step, self.microbatch) for part in ("rows", "columns")
        )
        self._replicas = clock.replicas

    def advance(self) -> None:
        """Go on to the next micro-batch."""
        self.microbatch += self._replicas


class NoiseClock:
    """Step counter for the noise of all tensors.

    Args:
        seed: Seed of the run.
        replica: This data-parallel rank.
        replicas: Number of data-parallel ranks.
        device: Device of the counter.
    """

    def __init__(self, seed: int, replica: int, replicas: int, device: torch.device) -> None:
        self.seed, self.replica, self.replicas = seed, replica, replicas
        self.step = torch.zeros((), dtype=torch.int64, device=device)
        self._tensors: list[TensorNoise] = []

    def tensor(self, name: str, group: ProcessGroup | None) -> TensorNoise:
        """Create the noise of the tensor `name`, which is sharded over `group`, or whole on this rank if None."""
        noise = TensorNoise(self, name if group is None or group.size() == 1 else f"{name}\0{group.rank()}")
        self._tensors.append(noise)
        return noise

    def newest_amaxes(self) -> list[NewestAmaxes]:
        """Return an empty list: there is nothing to reduce."""
        return []

    def end_step(self, reduced: Sequence[Tensor]) -> None:
        """Begin the next step."""
        self.step += 1
        self.discard_step()

    def discard_step(self) -> None:
        """Begin the step again, with equal noise."""
        if self._tensors:
            microbatches = [noise.microbatch for noise in self._tensors]
            torch._foreach_zero_(microbatches)
            torch._foreach_add_(microbatches, self.replica)

    def refresh(self) -> None:
        """Do nothing: no other state is derived from the step."""

    def state_dict(self) -> dict[str, Tensor]:
        """Return the step as `fp8.noise_step`, int64 `[]`."""
        return {"fp8.noise_step": self.step}
