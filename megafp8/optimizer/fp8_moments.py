"""Storage of Adam's moments in FP8 (`megafp8.numerics.moments`).

The noise of their rounding is a function of seed, update, tensor and position in the shard, the same on all ranks that
hold the same shard.

Checkpoints hold the exact values in bf16, so a checkpoint of a run with bf16 moments also loads. Representable values
are stored unchanged for any noise, so resuming in the same layout is exact. In another layout blocks may differ, and a
value may be rounded once more.

Shapes: n elements of a shard, b blocks of 128 elements; the last block may be shorter.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor

from megafp8.numerics.moments import BLOCK, MomentFormat, decode, encode
from megafp8.numerics.philox import key_of
from megafp8.numerics.stochastic_rounding import CastNoise, uniform
from megafp8.optimizer.state_storage import StateStorage
from megafp8.parallel.sharding import FlatShard, spec_of

_PART = 1 << 22
"""Number of elements encoded at a time. The noise takes about 100 bytes per element."""


class Fp8MomentStorage(StateStorage):
    """Moment of a shard in FP8, initially zero.

    Args:
        shard: Shard.
        fmt: FP8 format.
        seed: Seed of the noise.
        memory: Device of the live tensors. Default: the parameter's device, which computes the values.

    Attributes:
        noise_key: Key of the noise of the shard's moments.
        first: Index in the shard of the first element of this storage (`part`), for the noise.
    """

    def __init__(self, shard: FlatShard, fmt: MomentFormat, seed: int, memory: torch.device | None = None) -> None:
        n, self._device = len(shard), shard.param.device
        memory = self._device if memory is None else memory
        self._data_n = torch.zeros(n, dtype=torch.uint8, device=memory)
        self._exponent_b = torch.zeros(-(-n // BLOCK), dtype=torch.int8, device=memory)
        self._fmt, self.first = fmt, 0
        names = [f"{part.name}{list(part.offset)}" for part in spec_of(shard.param).shards]
        self.noise_key = key_of(seed, *names, shard.start)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """FP8 data, uint8 `[n]`, and exponents of the scales, int8 `[b]`."""
        return self._data_n, self._exponent_b

    @property
    def blocks(self) -> tuple[int, ...]:
        """Number of elements that share an entry: one for data, and a block for exponents."""
        return 1, BLOCK

    def part(self, start: int, end: int, tensors: Sequence[Tensor]) -> Fp8MomentStorage:
        """Return the storage of some elements, with the same noise for each of them."""
        part = copy.copy(self)
        part._data_n, part._exponent_b = tensors
        part.first += start
        return part

    def load(self) -> Tensor:
        """Return the decoded values, fp32 `[n]`."""
        return decode(self._data_n.to(self._device), self._exponent_b.to(self._device), self._fmt)

    def store(self, values: Tensor, step: int) -> None:
        """Encode `values` with the noise of update `step`.

        The noise of both moments is a matrix `[n, 2]`: the first column is for the first moment.
        """
        numbers = torch.tensor([step, 0], device=self._device)
        noise = CastNoise(self.noise_key, numbers[0], numbers[1])
        for start in range(0, len(values), _PART):
            part = slice(start, start + _PART)
            x_n = values[part].to(self._device, torch.float32)
            noise_n2 = uniform(len(x_n), 2, noise, first_row=self.first + start)
            data_n, exponent_b = encode(x_n, self._fmt, noise_n2[:, int(self._fmt.positive)])
            self._data_n[part].copy_(data_n)
            self._exponent_b[start // BLOCK :][: len(exponent_b)].copy_(exponent_b)

    def checkpoint_tensor(self) -> Tensor:
        """Return the exact values in bf16 on the host."""
        return self.load().bfloat16().cpu()
