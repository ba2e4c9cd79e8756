"""Dropout whose mask is a pure function of (seed, layer, sample, position, channel): the reference of its kernels.

(Srivastava et al. 2014.) A stateful generator's mask depends on what was drawn before it, so it would change with the
layout, the micro-batch size, the schedule, recompute and a resume. Here it is made of words of Philox
(`megafp8.numerics.philox`), keyed by (seed, layer): channel j of a token is kept where word j mod 4 of the counter

    ⌊j / 4⌋, position of the token in its sample, index of the sample in the run (two words)

is at least p·2^32. So a mask is never stored: backward computes it again. What is kept is multiplied by 1 / (1 - p), in
fp32 or wider.

Shapes: n tokens (all leading dims, the sequence before the micro-batch), c channels.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megafp8.numerics.philox import Key, key_of, philox_of_words


@dataclass(frozen=True)
class TokenPlaces:
    """Each token's position in its sample, int64 `[n]`, and the index of the sample in the run."""

    position_n: Tensor
    sample_n: Tensor

    @classmethod
    def from_positions(cls, position_sb: Tensor, sample_b: Tensor) -> TokenPlaces:
        """The places of tokens `[s, b]`; positions may be `[s, 1]` where they are the same in all samples."""
        shape = (position_sb.shape[0], sample_b.shape[0])
        return cls(position_sb.expand(shape).flatten(), sample_b.expand(shape).flatten())

    @property
    def tensors(self) -> list[Tensor]:
        return [self.position_n, self.sample_n]


@dataclass(frozen=True)
class Dropout:
    """Zero an element with probability `p`, else divide it by 1 - p; `key`: of the random stream."""

    p: float
    key: Key
    places: TokenPlaces

    @property
    def threshold(self) -> int:
        """Words from it on are kept."""
        return min(round(self.p * 2**32), 2**32 - 1)

    @property
    def scale(self) -> float:
        return 1 / (1 - self.p)


@dataclass(frozen=True)
class DropoutStream:
    """The dropout of one place in a model, whatever the tokens."""

    p: float
    key: Key

    @classmethod
    def from_seed(cls, p: float, seed: int, name: str) -> DropoutStream:
        """Dropout of the layer `name` of a run with `seed`."""
        return cls(p, key_of(seed, name, "hidden_dropout"))

    def at(self, places: TokenPlaces | None) -> Dropout | None:
        """The dropout of the tokens at `places`; None: no dropout, as in evaluation."""
        return None if places is None or not self.p else Dropout(self.p, self.key, places)


def kept(dropout: Dropout, c: int) -> Tensor:
    """Which elements of `[n, c]` are kept, bool."""
    position, sample = (x.unsqueeze(1) for x in (dropout.places.position_n, dropout.places.sample_n))
    group = torch.arange(-(-c // 4), device=position.device)
    words = philox_of_words(group, position, sample & 0xFFFFFFFF, sample >> 32, dropout.key)
    return torch.stack(words, dim=-1).flatten(1)[:, :c] >= dropout.threshold


def add(residual: Tensor | None, x: Tensor, dropout: Dropout) -> Tensor:
    """`residual` (0 if None) + dropout of x, `[..., c]`, rounded once to x's dtype."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    y = torch.where(kept(dropout, x.shape[-1]).view(x.shape), wide * dropout.scale, 0.0)
    return (y if residual is None else residual.to(wide.dtype) + y).to(x.dtype)
