"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864), with frequency scaling of Llama 3, YaRN or LongRoPE.

Rotated pairs consist of one channel from each half of a head (Hugging Face's "rotate half" layout), so most Hugging
Face weights need no permutation. If only some pairs are rotated, the other pairs have the frequency zero, so that the
same kernels compute them (`megafp8.conversion.huggingface.names` defines the order of their channels). Angles are
computed in float64 and their cosines and sines are stored in fp32. At position 100,000, an fp32 angle is off by up to
0.004 radians and a bf16 angle by whole rotations, and the table is small.

Shapes: s sequence, b micro-batch, a heads, d head width.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from megafp8.config import LongRopeConfig, RopeScaling, RotaryKeys, YarnConfig
from megafp8.layers.context import BuildContext

Scaling = RopeScaling | YarnConfig | LongRopeConfig


def inverse_frequencies(
    d: int, theta: float, scaling: Scaling | None, device: torch.device, *, length: int = 0, width: int | None = None,
    proportional: bool = False,
) -> Tensor:  # fmt: skip
    """Return the frequency of each pair in radians per position, `[d/2]` float64.

    With `scaling` other than LongRoPE, low frequencies are divided by `factor`, high frequencies are unchanged, and
    frequencies between are interpolated: by wavelength as in Llama 3.1's reference code, or by the index of the pair as
    in YaRN's.

    Args:
        d: Number of rotated channels of a head.
        theta: Base of the frequencies.
        scaling: Frequency scaling; None means no scaling.
        device: Device of the result.
        length: Tokens of a sequence, which determine LongRoPE's frequencies.
        width: Width of a head with only d rotated channels. The result is then `[width/2]`, with zeros for the other
            pairs. None means d.
        proportional: Whether the rotated pairs have the frequencies that they would have if all pairs were rotated.
    """
    whole = width if proportional and width is not None else d
    frequencies = theta ** -(torch.arange(0, d, 2, dtype=torch.float64, device=device) / whole)
    return F.pad(_scaled(frequencies, d, theta, scaling, length), (0, 0 if width is None else (width - d) // 2))


def _scaled(frequencies: Tensor, d: int, theta: float, scaling: Scaling | None, length: int) -> Tensor:
    if scaling is None:
        return frequencies
    if isinstance(scaling, LongRopeConfig):
        return frequencies / frequencies.new_tensor(scaling.divisors(length))
    original = scaling.original_max_position_embeddings
    if isinstance(scaling, YarnConfig):
        pairs = torch.arange(d // 2, dtype=torch.float64, device=frequencies.device)
        # Indices of the pairs that make beta_fast and beta_slow rotations in the original context.
        fast, slow = (
            d * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))
            for rotations in (scaling.beta_fast, scaling.beta_slow)
        )
        if scaling.truncate:
            fast, slow = math.floor(fast), math.ceil(slow)
        first, last = max(fast, 0), min(slow, d - 1)
        unscaled = 1 - (pairs - first) / (last - first if last != first else 0.001)
    else:
        wavelengths = 2 * math.pi / frequencies
        ratio = original / wavelengths
        unscaled = (ratio - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    unscaled = unscaled.clamp(0, 1)  # 1: high frequency; 0: low frequency, stretched
    return frequencies * (unscaled + (1 - unscaled) / scaling.factor)


def rotary_table(
    positions: Tensor, frequencies: Tensor, dtype: torch.dtype, factor: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Return `factor` times cos and sin of every angle at `positions` `[s]` or `[b, s]`, each `[s, 1 or b, 1, d/2]`.

    Pairs of frequency zero, which are not rotated, have 1 and 0. The tables are fp32, or float64 if `dtype` is.
    """
    positions_sb = positions.unsqueeze(-1) if positions.dim() == 1 else positions.transpose(0, 1)
    angles = positions_sb[:, :, None, None].double() * frequencies
    table = torch.promote_types(dtype, torch.float32)
    cos, sin = angles.cos(), angles.sin()
    if factor != 1:
        cos, sin = torch.where(frequencies == 0, cos, factor * cos), factor * sin
    return cos.to(table), sin.to(table)


class RotaryEmbedding:
    """Rotary tables of one kind of layer.

    Args:
        keys: Config keys of the rotary embedding.
        channels: Number of rotated channels of a head.
        width: Width of the heads that the tables cover, including channels that are not rotated. None means that the
            tables cover only the rotated channels.
        context: Device and dtype of the tables, and the cache of frequencies.
    """

    def __init__(self, keys: RotaryKeys, channels: int, width: int | None, context: BuildContext) -> None:
        self.keys, self.channels, self.width, self.context = keys, channels, width, context
        self.scaling = keys.yarn or keys.longrope or keys.rope_scaling
        self.key = (
            "rotary", keys.rope_theta, keys.rope_interpolation_factor, repr(self.scaling), channels, width,
            keys.proportional_rope,
        )  # fmt: skip

    def table(self, positions: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Return the `rotary_table` of tokens at `positions`, `[s]` or `[b, s]`, in sequences of `length` tokens."""
        constants, key = self.context.constants, (self.key, length)
        if key not in constants:
            frequencies = inverse_frequencies(
                self.channels, self.keys.rope_theta, self.scaling, self.context.buffer_device, length=length,
                width=self.width, proportional=self.keys.proportional_rope,
            )  # fmt: skip
            constants[key] = frequencies / self.keys.rope_interpolation_factor
        scaled = self.keys.yarn or self.keys.longrope
        factor = 1.0 if scaled is None else scaled.rotated_factor
        return rotary_table(positions, constants[key], self.context.dtype, factor)
