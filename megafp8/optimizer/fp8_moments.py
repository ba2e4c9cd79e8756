"""Adam's moments in FP8: one byte per element, and a power-of-two scale per block of 128 neighbors.

*Range.* Elements of a block may differ by orders of magnitude; elements of the second moment, which are squares, differ
by twice as many. The first moment is E4M3. The second moment has no sign, so the sign bit extends the exponent. The
result is E5M3, the upper byte of a positive fp16 number without its sign. Both formats have four significant bits.

*No zeros.* Adam divides by the root of the second moment. So the second moment is never rounded to zero, but to the
smallest value. At worst, this makes the update too small for an element with gradients of 1e-5 of the largest in its
block.

*Stochastic rounding.* Neighboring values differ by 1/16 to 1/8, and at beta2 = 0.95 a second moment decays by 1/20 per
step. Rounded to nearest, it would soon stop decaying (at 1.25 · 2^i). So both moments are rounded up with the
probability that keeps the mean exact. The noise is a function of seed, update, tensor and position in the shard
(`megafp8.numerics.stochastic_rounding`), the same on all ranks that hold the same shard.

*Cost.* The cost is noise. Each rounding adds about 0.0013 x² to the variance of x: a step is 1/11 of the value in the
mean square, and the mean of f (1 - f) is 1/6. A moment remembers 1 / (1 - beta²) roundings, which gives the second
moment a noise of 11% at beta2 = 0.95, 26% at 0.99, and 80% at 0.999. So betas are at most 1 - 1/128. For comparison,
the second moment at 0.95 is an average over about 40 gradients and has a noise of 22% anyway.

*Checkpoints* hold the exact values in bf16, so a checkpoint of a run with bf16 moments also loads. Representable values
are stored unchanged for any noise, so resuming in the same layout is exact. In another layout blocks may differ, and a
value may be rounded once more.

docs/decisions/0008-optimizers.md has a comparison with FP8-LM and COAT, and measurements.

Shapes: n elements of a shard, b blocks of 128 elements; the last block may be shorter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from megafp8.numerics.formats import E4M3
from megafp8.numerics.philox import Key
from megafp8.numerics.stochastic_rounding import noise_key, words
from megafp8.optimizer.state_storage import StateStorage
from megafp8.parallel.sharding import FlatShard, spec_of

BLOCK = 128
_CHUNK = 1 << 22
"""Number of elements encoded at a time. The noise takes about 100 bytes per element."""
LOWEST = -100
"""Smallest exponent of a scale, for which all values and 1 / scale are still normal numbers, also in bf16."""


@dataclass(frozen=True)
class MomentFormat:
    """Eight-bit format with three mantissa bits.

    Args:
        largest: Largest value.
        min_exponent: Exponent of the smallest normal number.
        positive: Whether the format has no negative values and rounds no positive value to zero.
        nan: Byte of NaN.
        unpack: Function that converts bytes, uint8, to fp32 values.
    """

    largest: float
    min_exponent: int
    positive: bool
    nan: int
    unpack: Callable[[Tensor], Tensor]


FIRST = MomentFormat(
    largest=E4M3.max,
    min_exponent=-6,
    positive=False,
    nan=0x7F,
    unpack=lambda data: data.view(E4M3.dtype).float(),
)
SECOND = MomentFormat(
    largest=1.875 * 2**15,  # fp16's infinity and NaNs come after it
    min_exponent=-14,
    positive=True,
    nan=0xFF,
    unpack=lambda data: (data.to(torch.int16) << 7).view(torch.float16).float(),
)


def _power_of_two(exponent: Tensor) -> Tensor:
    """Return 2^exponent in fp32, for int32 exponents in [-126, 127]. It sets bits, so it is exact on every device."""
    return ((exponent + 127) << 23).view(torch.float32)


def _scale_inv_exponents(amax_b: Tensor, fmt: MomentFormat) -> Tensor:
    """Return ⌈log2(amax / largest)⌉, int32 `[b]` in the range of int8, so that amax / 2^exponent fits the format."""
    largest = torch.tensor(fmt.largest).view(torch.int32).item()
    difference = amax_b.view(torch.int32) - largest  # exponents in the upper bits, mantissas below
    return ((difference + (1 << 23) - 1) >> 23).clamp(min=LOWEST)


def encode(x_n: Tensor, fmt: MomentFormat, key: Key) -> tuple[Tensor, Tensor]:
    """Encode x, fp32 `[n]`, as data, uint8 `[n]`, and exponents of the blocks' scale_inv, int8 `[b]`.

    Values that are not representable are rounded with the noise of `key`. Non-finite values become NaN. This is the
    bitwise reference of `megafp8.kernels.moments`.
    """
    x_bk = F.pad(x_n, (0, -len(x_n) % BLOCK)).view(-1, BLOCK)
    exponent_b1 = _scale_inv_exponents(x_bk.abs().amax(dim=1, keepdim=True), fmt)
    y_bk = x_bk.abs() * _power_of_two(-exponent_b1)
    binade_bk = ((y_bk.view(torch.int32) >> 23) - 127).clamp(min=fmt.min_exponent)
    # Neighboring values differ by 2^(binade - 3). The noise has 20 bits, so its sum with an integer below 16 is exact
    # and integers do not change.
    noise_bk = (words(y_bk.numel() // 4, key, x_n.device) >> 12).float().mul_(2.0**-20).view(y_bk.shape)
    steps_bk = (y_bk * _power_of_two(3 - binade_bk) + noise_bk).int()
    if fmt.positive:
        steps_bk = steps_bk.maximum((x_bk > 0).int())
    # A binade has eight values, and the lowest binade begins at zero. Sixteen steps are the first of the next binade.
    data_bk = ((binade_bk - fmt.min_exponent) << 3) + steps_bk
    if not fmt.positive:
        data_bk |= x_bk.signbit().int() << 7
    data_bk = data_bk.masked_fill_(~x_bk.isfinite(), fmt.nan)
    return data_bk.to(torch.uint8).view(-1)[: len(x_n)], exponent_b1.view(-1).to(torch.int8)


def decode(data_n: Tensor, exponent_b: Tensor, fmt: MomentFormat) -> Tensor:
    """Return the values, fp32 `[n]`, of the results of `encode`. They are exact in bf16."""
    scale_inv_n = _power_of_two(exponent_b.int()).repeat_interleave(BLOCK)[: len(data_n)]
    return fmt.unpack(data_n) * scale_inv_n


def _encode_into(data_n: Tensor, exponent_b: Tensor, x_n: Tensor, fmt: MomentFormat, key: Key) -> None:
    if not x_n.is_cuda:
        for out, new in zip((data_n, exponent_b), encode(x_n, fmt, key)):
            out.copy_(new)
        return
    from megafp8.kernels.moments import encode_blocks

    encode_blocks(
        x_n, data_n, exponent_b, key, largest=fmt.largest, min_exponent=fmt.min_exponent, positive=fmt.positive,
        nan=fmt.nan, lowest=LOWEST,
    )  # fmt: skip


class Fp8MomentStorage(StateStorage):
    """Moment of a shard in FP8, initially zero.

    Args:
        shard: Shard.
        name: Name of the moment, which distinguishes the noise of the shard's two moments.
        fmt: FP8 format.
        seed: Seed of the noise.
    """

    def __init__(self, shard: FlatShard, name: str, fmt: MomentFormat, seed: int) -> None:
        n, device = len(shard), shard.param.device
        self._data_n = torch.zeros(n, dtype=torch.uint8, device=device)
        self._exponent_b = torch.zeros(-(-n // BLOCK), dtype=torch.int8, device=device)
        self._fmt, self._seed = fmt, seed
        names = [f"{part.name}{list(part.offset)}" for part in spec_of(shard.param).shards]
        self._name = "\0".join([*names, str(shard.start), name])

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """FP8 data, uint8 `[n]`, and exponents of the scales, int8 `[b]`."""
        return self._data_n, self._exponent_b

    def load(self) -> Tensor:
        """Return the decoded values, fp32 `[n]`."""
        return decode(self._data_n, self._exponent_b, self._fmt)

    def store(self, values: Tensor, step: int) -> None:
        """Encode `values` with the noise of update `step`."""
        exponents = self._exponent_b.split(_CHUNK // BLOCK)
        for i, (data_n, exponent_b) in enumerate(zip(self._data_n.split(_CHUNK), exponents, strict=True)):
            key = noise_key(self._seed, step, f"{self._name}\0{i}")
            _encode_into(data_n, exponent_b, values[i * _CHUNK :][:_CHUNK].float(), self._fmt, key)

    def checkpoint_tensor(self) -> Tensor:
        """Return the exact values in bf16 on the host."""
        return self.load().bfloat16().cpu()
