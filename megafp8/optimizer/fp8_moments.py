"""Adam's moments in FP8: one byte an element and a power-of-two scale for every 128 neighbours.

*Range.* Elements of a block may differ by orders of magnitude, and those of the second moment, being squares, by twice
as many. The first moment is E4M3. The second has no sign, so that bit extends the exponent: E5M3, the upper byte of a
positive fp16 number without its sign. Both have four significant bits.

*No zeros.* Adam divides by the root of the second moment, so that is never rounded to zero but to the smallest value:
at worst an update that is too small, of an element whose gradients are 1e-5 of its block's largest.

*Stochastic rounding.* Neighbouring values differ by 1/16 to 1/8, and a second moment decays by 1/20 a step at beta2 =
0.95: rounded to nearest it would soon stop decaying (at 1.25 · 2^i). So both moments are rounded up with the
probability that makes the mean right. The noise is a function of seed, update, tensor and position in the shard
(`megafp8.numerics.stochastic_rounding`), the same on all ranks that hold the same shard.

*The cost* is that noise. A rounding adds about 0.0013 x² to the variance of x (a step is 1/11 of the value in the mean
square, and the mean of f (1 - f) is 1/6), and a moment remembers 1 / (1 - beta²) of them: 11% of noise for the second
moment at beta2 = 0.95, 26% at 0.99, 80% at 0.999. So betas are at most 1 - 1/128. The second moment at 0.95 itself, an
average over some 40 gradients, has a noise of 22%.

*Checkpoints* hold the values in bf16, exactly, so one of a run with bf16 moments loads too. Representable values are
stored unchanged, whatever the noise: resuming in the same layout is exact. In another layout blocks may be others, and
a value may be rounded once more.

Comparison with FP8-LM and COAT, and measurements: docs/decisions/0008-optimizers.md.

Shapes: n elements of a shard, b blocks of 128 of them, the last of which may be shorter.
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
"""Elements that are encoded at a time; noise takes some 100 bytes for each of them."""
LOWEST = -100
"""Least exponent of a scale: so that all values, and 1 / scale, are normal numbers, in bf16 too."""


@dataclass(frozen=True)
class MomentFormat:
    """An eight-bit format with three mantissa bits.

    `largest`: its largest value; `min_exponent`: the exponent of its smallest normal number; `nan`: NaN's byte;
    `unpack`: bytes, uint8, to fp32 values. `positive`: it has no negative values, and no value is rounded to zero.
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
    largest=1.875 * 2**15,  # fp16's infinity and NaNs are above
    min_exponent=-14,
    positive=True,
    nan=0xFF,
    unpack=lambda data: (data.to(torch.int16) << 7).view(torch.float16).float(),
)


def _power_of_two(exponent: Tensor) -> Tensor:
    """2^exponent, int32 within [-126, 127], in fp32; by its bits, so exact on every device."""
    return ((exponent + 127) << 23).view(torch.float32)


def _scale_inv_exponents(amax_b: Tensor, fmt: MomentFormat) -> Tensor:
    """⌈log2(amax / largest)⌉, so that amax / 2^exponent fits: fp32 `[b]` to int32 `[b]`, within int8."""
    largest = torch.tensor(fmt.largest).view(torch.int32).item()
    difference = amax_b.view(torch.int32) - largest  # of exponents, and below them of mantissas
    return ((difference + (1 << 23) - 1) >> 23).clamp(min=LOWEST)


def encode(x_n: Tensor, fmt: MomentFormat, key: Key) -> tuple[Tensor, Tensor]:
    """x, fp32 `[n]`, to data, uint8 `[n]`, and the exponents of the blocks' scale_inv, int8 `[b]`.

    Values that are not representable are rounded with the noise of `key`. What is not finite becomes NaN. The reference
    of `megafp8.kernels.moments`, bit for bit.
    """
    x_bk = F.pad(x_n, (0, -len(x_n) % BLOCK)).view(-1, BLOCK)
    exponent_b1 = _scale_inv_exponents(x_bk.abs().amax(dim=1, keepdim=True), fmt)
    y_bk = x_bk.abs() * _power_of_two(-exponent_b1)
    binade_bk = ((y_bk.view(torch.int32) >> 23) - 127).clamp(min=fmt.min_exponent)
    # Neighbouring values differ by 2^(binade - 3). 20 bits of noise: the sum with a whole number below 16 is exact, so
    # that a whole number stays what it is.
    noise_bk = (words(y_bk.numel() // 4, key, x_n.device) >> 12).float().mul_(2.0**-20).view(y_bk.shape)
    steps_bk = (y_bk * _power_of_two(3 - binade_bk) + noise_bk).int()
    if fmt.positive:
        steps_bk = steps_bk.maximum((x_bk > 0).int())
    # Eight values a binade, of which the lowest begins at zero; sixteen steps are the next one's first.
    data_bk = ((binade_bk - fmt.min_exponent) << 3) + steps_bk
    if not fmt.positive:
        data_bk |= x_bk.signbit().int() << 7
    data_bk = data_bk.masked_fill_(~x_bk.isfinite(), fmt.nan)
    return data_bk.to(torch.uint8).view(-1)[: len(x_n)], exponent_b1.view(-1).to(torch.int8)


def decode(data_n: Tensor, exponent_b: Tensor, fmt: MomentFormat) -> Tensor:
    """The values, fp32 `[n]`, of what `encode` returned; exact in bf16."""
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
    """A moment of `shard`, initially zero. `name` distinguishes it from the shard's other moment."""

    def __init__(self, shard: FlatShard, name: str, fmt: MomentFormat, seed: int) -> None:
        n, device = len(shard), shard.param.device
        self._data_n = torch.zeros(n, dtype=torch.uint8, device=device)
        self._exponent_b = torch.zeros(-(-n // BLOCK), dtype=torch.int8, device=device)
        self._fmt, self._seed = fmt, seed
        names = [f"{part.name}{list(part.offset)}" for part in spec_of(shard.param).shards]
        self._name = "\0".join([*names, str(shard.start), name])

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self._data_n, self._exponent_b

    def load(self) -> Tensor:
        return decode(self._data_n, self._exponent_b, self._fmt)

    def store(self, values: Tensor, step: int) -> None:
        exponents = self._exponent_b.split(_CHUNK // BLOCK)
        for i, (data_n, exponent_b) in enumerate(zip(self._data_n.split(_CHUNK), exponents, strict=True)):
            key = noise_key(self._seed, step, f"{self._name}\0{i}")
            _encode_into(data_n, exponent_b, values[i * _CHUNK :][:_CHUNK].float(), self._fmt, key)

    def checkpoint_tensor(self) -> Tensor:
        return self.load().bfloat16().cpu()
