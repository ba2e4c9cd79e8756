"""Adam's moments in FP8: a byte an element and a power of two for every 128 neighbours.

What a moment needs of a format:

*Range.* Elements of a block may differ by orders of magnitude, and the second moment's, being squares, by twice as
many. The first moment is E4M3. The second has no sign, so that bit goes to the exponent: E5M3, which is the upper byte
of a positive fp16 number without its sign. Both have four significant bits; normal numbers of the second moment span
2^30, those of its root thus 2^15, as those of the first do.

*No zeros.* Adam divides by the root of the second moment. Rounded to zero beside a first moment that is not, it would
make an update of that / eps. So it is never rounded to zero: what lies below the smallest code becomes that, at worst
an update too small, of an element whose gradients are 1e-5 of its block's largest.

*Decay.* Steps between codes are 1/16 to 1/8 of a value. With beta2 = 0.95 a second moment that decays loses 1/20 a
step: rounded to nearest it would soon stay where it is for ever (at 1.25 · 2^i), and since it rises at once with a
large gradient, it would mostly rise. Small changes of a first moment would be lost alike. So both are rounded
stochastically, up with the probability that makes the mean right: noise instead of a bias. It is a function of seed,
update, tensor and place in the fragment (`megafp8.fp8.noise`), the same on all ranks that hold the same fragment.

*The price* is that noise. A rounding adds about 0.0013 x² to the variance of x (a step is 1/11 of the value in the mean
square, and the mean of f (1 - f) is 1/6), and a moment remembers 1 / (1 - beta²) of them: the second moment at beta2 =
0.95 has 11% of noise, its root 6%; at 0.99 it would be 26%, at 0.999 80%. So betas end at 1 - 1/128. What a second
moment at 0.95 has by itself, as an average over some 40 gradients, is 22%.

*Checkpoints.* Four significant bits times a power of two are exact in bf16. So a checkpoint holds the values in bf16,
and one of a run with bf16 moments loads too. What lies on the codes' grid is kept as it is, whatever the noise:
resuming in the same layout is exact. Another layout may cut blocks elsewhere, and a value may be rounded once more.

Compare: FP8-LM (arXiv:2310.18313) has the first moment in FP8, the second in fp16, with one factor a tensor; COAT
(arXiv:2410.19313) both in E4M3, groups of 128 whose range is widened by a power, rounded to nearest.

Shapes: n elements of a fragment, b blocks of 128 of them, the last of which may be shorter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from megafp8.distributed.sharding import FlatShard, spec_of
from megafp8.fp8.formats import E4M3
from megafp8.fp8.noise import noise_key, words
from megafp8.philox import Key

BLOCK = 128
_CHUNK = 1 << 22
"""Elements that are encoded at a time; noise takes some 100 bytes for each of them."""
LOWEST = -100
"""Least exponent of a factor: so that all values, and 1 / factor, are normal numbers, in bf16 too."""


@dataclass(frozen=True)
class MomentFormat:
    """Codes with three bits behind the leading one: the `largest` value; the exponent of the smallest normal number;
    the code of NaN; and from codes, uint8, to fp32 values. `positive`: there are no negative values, and none is
    rounded to zero."""

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
    unpack=lambda code: code.view(E4M3.dtype).float(),
)
SECOND = MomentFormat(
    largest=1.875 * 2**15,  # fp16's infinity and NaNs are above
    min_exponent=-14,
    positive=True,
    nan=0xFF,
    unpack=lambda code: (code.to(torch.int16) << 7).view(torch.float16).float(),
)


def _power_of_two(exponent: Tensor) -> Tensor:
    """2^exponent, int32 within [-126, 127], in fp32; by its bits, so exact on every device."""
    return ((exponent + 127) << 23).view(torch.float32)


def factor_exponents(amax_b: Tensor, fmt: MomentFormat) -> Tensor:
    """⌈log2(amax / largest)⌉, so that amax / 2^exponent fits: fp32 `[b]` to int32 `[b]`, within int8."""
    largest = torch.tensor(fmt.largest).view(torch.int32).item()
    difference = amax_b.view(torch.int32) - largest  # of exponents, and below them of mantissas
    return ((difference + (1 << 23) - 1) >> 23).clamp(min=LOWEST)


def encode(x_n: Tensor, fmt: MomentFormat, key: Key) -> tuple[Tensor, Tensor]:
    """x, fp32 `[n]`, to codes, uint8 `[n]`, and the exponents of blocks' factors, int8 `[b]`; rounded up or down with
    the noise of `key`, where x is not a code's value. What is not finite becomes NaN. `kernels.moments` on GPUs, which
    equals this bit for bit."""
    x_bk = F.pad(x_n, (0, -len(x_n) % BLOCK)).view(-1, BLOCK)
    exponent_b1 = factor_exponents(x_bk.abs().amax(dim=1, keepdim=True), fmt)
    y_bk = x_bk.abs() * _power_of_two(-exponent_b1)
    binade_bk = ((y_bk.view(torch.int32) >> 23) - 127).clamp(min=fmt.min_exponent)
    # Steps between codes are 2^(binade - 3). 20 bits of noise: the sum with a whole number below 16 is exact, so that a
    # whole number stays what it is.
    noise_bk = (words(y_bk.numel() // 4, key, x_n.device) >> 12).float().mul_(2.0**-20).view(y_bk.shape)
    steps_bk = (y_bk * _power_of_two(3 - binade_bk) + noise_bk).int()
    if fmt.positive:
        steps_bk = steps_bk.maximum((x_bk > 0).int())
    # Eight codes a binade, of which the lowest begins at zero; sixteen steps are the next one's first.
    code_bk = ((binade_bk - fmt.min_exponent) << 3) + steps_bk
    if not fmt.positive:
        code_bk |= x_bk.signbit().int() << 7
    code_bk = code_bk.masked_fill_(~x_bk.isfinite(), fmt.nan)
    return code_bk.to(torch.uint8).view(-1)[: len(x_n)], exponent_b1.view(-1).to(torch.int8)


def decode(codes_n: Tensor, exponent_b: Tensor, fmt: MomentFormat) -> Tensor:
    """The values, fp32 `[n]`, of what `encode` made: multiples of powers of two, exact in bf16."""
    factor_n = _power_of_two(exponent_b.int()).repeat_interleave(BLOCK)[: len(codes_n)]
    return fmt.unpack(codes_n) * factor_n


def _encode_into(codes_n: Tensor, exponent_b: Tensor, x_n: Tensor, fmt: MomentFormat, key: Key) -> None:
    if not x_n.is_cuda:
        for kept, new in zip((codes_n, exponent_b), encode(x_n, fmt, key)):
            kept.copy_(new)
        return
    from megafp8.kernels.moments import encode_blocks

    encode_blocks(
        x_n, codes_n, exponent_b, key, largest=fmt.largest, min_exponent=fmt.min_exponent, positive=fmt.positive,
        nan=fmt.nan, lowest=LOWEST,
    )  # fmt: skip


class Fp8Moment:
    """A moment of `fragment`, zero at first. `name` tells it from the fragment's other one."""

    def __init__(self, fragment: FlatShard, name: str, fmt: MomentFormat, seed: int) -> None:
        n, device = len(fragment), fragment.param.device
        self._codes_n = torch.zeros(n, dtype=torch.uint8, device=device)
        self._exponent_b = torch.zeros(-(-n // BLOCK), dtype=torch.int8, device=device)
        self._fmt, self._seed = fmt, seed
        pieces = [f"{piece.name}{list(piece.offset)}" for piece in spec_of(fragment.param).shards]
        self._name = "\0".join([*pieces, str(fragment.start), name])

    @property
    def nbytes(self) -> int:
        return self._codes_n.nbytes + self._exponent_b.nbytes

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self._codes_n, self._exponent_b

    def values(self) -> Tensor:
        return decode(self._codes_n, self._exponent_b, self._fmt)

    def keep(self, values: Tensor, step: int) -> None:
        blocks = self._exponent_b.split(_CHUNK // BLOCK)
        for i, (codes, exponents) in enumerate(zip(self._codes_n.split(_CHUNK), blocks, strict=True)):
            key, part = noise_key(self._seed, step, f"{self._name}\0{i}"), values[i * _CHUNK :][:_CHUNK]
            _encode_into(codes, exponents, part, self._fmt, key)

    def saved(self) -> Tensor:
        return self.values().bfloat16().cpu()
