"""Storage of Adam's moments in FP8 (`megafp8.numerics.moments`).

The noise of their rounding is a function of seed, update, tensor and position in the shard, the same on all ranks that
hold the same shard.

Checkpoints hold the exact values in bf16, so a checkpoint of a run with bf16 moments also loads. Representable values
are stored unchanged for any noise, so resuming in the same layout is exact. In another layout blocks may differ, and a
value may be rounded once more.

Shapes: n elements of a shard, b blocks of 128 elements; the last block may be shorter.
"""

from __future__ import annotations

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

    Attributes:
        noise_key: Key of the noise of the shard's moments.
    """

    def __init__(self, shard: FlatShard, fmt: MomentFormat, seed: int) -> None:
        n, device = len(shard), shard.param.device
        self._data_n = torch.zeros(n, dtype=torch.uint8, device=device)
        self._exponent_b = torch.zeros(-(-n // BLOCK), dtype=torch.int8, device=device)
        self._fmt = fmt
        names = [f"{part.name}{list(part.offset)}" for part in spec_of(shard.param).shards]
        self.noise_key = key_of(seed, *names, shard.start)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """FP8 data, uint8 `[n]`, and exponents of the scales, int8 `[b]`."""
        return self._data_n, self._exponent_b

    def load(self) -> Tensor:
        """Return the decoded values, fp32 `[n]`."""
        return decode(self._data_n, self._exponent_b, self._fmt)

    def store(self, values: Tensor, step: int) -> None:
        """Encode `values` with the noise of update `step`.

        The noise of both moments is a matrix `[n, 2]`: the first column is for the first moment.
        """
        numbers = torch.tensor([step, 0], device=self._data_n.device)
        noise = CastNoise(self.noise_key, numbers[0], numbers[1])
        for start in range(0, len(values), _PART):
            part = slice(start, start + _PART)
            x_n = values[part].float()
            noise_n2 = uniform(len(x_n), 2, noise, first_row=start)
            data_n, exponent_b = encode(x_n, self._fmt, noise_n2[:, int(self._fmt.positive)])
            self._data_n[part] = data_n
            self._exponent_b[start // BLOCK :][: len(exponent_b)] = exponent_b

    def checkpoint_tensor(self) -> Tensor:
        """Return the exact values in bf16 on the host."""
        return self.load().bfloat16().cpu()
