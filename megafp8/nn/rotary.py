"""Rotary position embedding in the format of Transformer Engine: a module that computes angles, and the rotation.

Angles are fp32, `[s, 1, 1, r]`, for the first r channels of a head. Both channels of a pair have the same angle. A pair
consists of the channels (i, i + r/2), or (2i, 2i + 1) if `interleaved`.

Shapes: s sequence, b micro-batch, a heads, d head width, r rotated channels, t tokens of all sequences.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from megafp8.layers.rotary.op import rotate_heads
from megafp8.nn.attention import in_format, sequence_first
from megafp8.nn.base import default_device


class RotaryPositionEmbedding(nn.Module):
    """Module that computes rotary angles for `rotary_pos_emb` (Su et al. 2021, arXiv:2104.09864).

    Args:
        dim: Head width.
        rotary_percent: Fraction of the head width that is rotated.
        seq_len_interpolation_factor: Factor by which positions are divided (arXiv:2306.15595). It has an effect only
            together with `pretrained_max_position_embeddings`.
        pretrained_max_position_embeddings: Sequence length of the pretraining. If a sequence is longer than this length
            times the factor, its positions are divided by a larger factor, so that they fit into this length.
        rotary_base: Base of the geometric sequence of frequencies.
        interleaved: Whether pairs are neighboring channels.
    """

    inv_freq: Tensor

    def __init__(
        self,
        dim: int,
        rotary_percent: float = 1.0,
        seq_len_interpolation_factor: int | None = None,
        pretrained_max_position_embeddings: int | None = None,
        rotary_base: float = 10000.0,
        interleaved: bool = False,
    ) -> None:
        super().__init__()
        r = int(dim * rotary_percent)
        self.factor, self.pretrained = seq_len_interpolation_factor, pretrained_max_position_embeddings
        self.interleaved = interleaved
        exponents = torch.arange(0, r, 2, dtype=torch.float32, device=default_device()) / r
        self.register_buffer("inv_freq", 1.0 / rotary_base**exponents)

    def forward(self, max_seq_len: int, offset: int = 0) -> Tensor:
        """Return the angles of `max_seq_len` positions from `offset` on, fp32 `[s, 1, 1, r]`."""
        positions = torch.arange(max_seq_len, dtype=torch.float32, device=self.inv_freq.device) + offset
        if self.factor is not None and self.pretrained is not None:
            positions = positions / max(self.factor, max_seq_len / self.pretrained)
        angles = positions[:, None] * self.inv_freq.float()
        both = angles.repeat_interleave(2, dim=-1) if self.interleaved else torch.cat([angles, angles], dim=-1)
        return both[:, None, None]


class Rotary(NamedTuple):
    """Format of the heads ("sbhd", "bshd" or "thd"), and whether pairs are neighboring channels."""

    qkv_format: str
    interleaved: bool


def apply_rotary(x: Tensor, angles: Tensor, form: Rotary, cu_seqlens: Tensor | None = None) -> Tensor:
    """Rotate the first r channels of the heads x.

    Args:
        x: Heads in the format `form`.
        angles: Angles of the positions, `[s, 1, 1, r]`.
        form: Format of the heads and of the pairs.
        cu_seqlens: First positions of the sequences, required for "thd". Positions are counted from the start of each
            sequence.
    """
    x_sbad = sequence_first(x, form.qkv_format)
    r = angles.shape[-1]
    if r > x.shape[-1]:
        raise ValueError(f"rotary_pos_emb has {r} channels, but a head has only {x.shape[-1]}; it must not have more")
    half = (angles[..., ::2] if form.interleaved else angles[..., : r // 2]).to(
        torch.promote_types(x.dtype, torch.float32)
    )
    if form.qkv_format == "thd":
        if cu_seqlens is None:
            raise ValueError("rotary_pos_emb with qkv_format thd needs cu_seqlens_q and cu_seqlens_kv")
        i = torch.arange(len(x), device=x.device, dtype=cu_seqlens.dtype)
        sequence = torch.searchsorted(cu_seqlens[1:].contiguous(), i, right=True).clamp(max=len(cu_seqlens) - 2)
        half = half[(i - cu_seqlens[sequence]).clamp(max=len(half) - 1)]  # larger positions belong to padding
    elif len(x_sbad) > len(half):
        raise ValueError(f"rotary_pos_emb has {len(half)} positions, but the sequence has {len(x_sbad)}")
    else:
        half = half[: len(x_sbad)]
    cos, sin = half.cos(), half.sin()
    rotated = x_sbad[..., :r]
    if form.interleaved:
        rotated = rotated.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
    rotated = rotate_heads(rotated, cos, sin)
    if form.interleaved:
        rotated = rotated.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
    y = rotated if r == x.shape[-1] else torch.cat([rotated, x_sbad[..., r:]], dim=-1)
    return in_format(y, form.qkv_format)
