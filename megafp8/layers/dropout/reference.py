"""Dropout with a mask that is a pure function of (seed, layer, sample, position, channel); reference of the kernels.

Dropout: Srivastava et al. 2014. The mask of a stateful generator depends on earlier draws, so it would change with the
layout, the micro-batch size, the schedule, recompute and a resume. Here the mask comes from words of Philox
(`megafp8.numerics.philox`), keyed by (seed, layer). Channel j of a token is kept if word j mod 4 of the counter

    ⌊j / 4⌋, position of the token in its sample, index of the sample in the run (two words)

is at least p·2^32. So a mask is never stored, and backward recomputes it. Kept elements are multiplied by 1 / (1 - p)
in fp32 or wider.

Shapes: n tokens (all leading dims, sequence before micro-batch), c channels.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megafp8.numerics.philox import Key, key_of, philox_of_words


@dataclass(frozen=True)
class TokenPlaces:
    """Positions of tokens in their samples, and indices of the samples in the run.

    Args:
        position_n: Position of each token in its sample, int64.
        sample_n: Index in the run of each token's sample, int64.
    """

    position_n: Tensor
    sample_n: Tensor

    @classmethod
    def from_positions(cls, position_sb: Tensor, sample_b: Tensor) -> TokenPlaces:
        """Return the places of tokens `[s, b]`. Positions may be `[s, 1]` if they are the same in all samples."""
        shape = (position_sb.shape[0], sample_b.shape[0])
        return cls(position_sb.expand(shape).flatten(), sample_b.expand(shape).flatten())

    @property
    def tensors(self) -> list[Tensor]:
        """Both tensors, in the order in which kernels take them."""
        return [self.position_n, self.sample_n]


@dataclass(frozen=True)
class Dropout:
    """Dropout of given tokens: an element becomes zero with probability p, and is otherwise divided by 1 - p.

    Args:
        p: Probability of zero.
        key: Key of the random stream.
        places: Positions and samples of the tokens.
    """

    p: float
    key: Key
    places: TokenPlaces

    @property
    def threshold(self) -> int:
        """Smallest random word for which an element is kept."""
        return min(round(self.p * 2**32), 2**32 - 1)

    @property
    def scale(self) -> float:
        """Factor of kept elements, 1 / (1 - p)."""
        return 1 / (1 - self.p)


@dataclass(frozen=True)
class DropoutStream:
    """Dropout of one layer of a model, not yet bound to tokens.

    Args:
        p: Probability of zero.
        key: Key of the random stream.
    """

    p: float
    key: Key

    @classmethod
    def from_seed(cls, p: float, seed: int, name: str) -> DropoutStream:
        """Return the dropout of the layer `name` in a run with `seed`."""
        return cls(p, key_of(seed, name, "hidden_dropout"))

    def at(self, places: TokenPlaces | None) -> Dropout | None:
        """Return the dropout of the tokens at `places`, or None for no dropout: without places (evaluation) or p."""
        return None if places is None or not self.p else Dropout(self.p, self.key, places)


def kept(dropout: Dropout, c: int) -> Tensor:
    """Return the mask of kept elements, bool `[n, c]`."""
    position, sample = (x.unsqueeze(1) for x in (dropout.places.position_n, dropout.places.sample_n))
    group = torch.arange(-(-c // 4), device=position.device)
    words = philox_of_words(group, position, sample & 0xFFFFFFFF, sample >> 32, dropout.key)
    return torch.stack(words, dim=-1).flatten(1)[:, :c] >= dropout.threshold


def add(residual: Tensor | None, x: Tensor, dropout: Dropout) -> Tensor:
    """Apply dropout to x `[..., c]`, add `residual` (0 if None), and round the sum once to x's dtype."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    y = torch.where(kept(dropout, x.shape[-1]).view(x.shape), wide * dropout.scale, 0.0)
    return (y if residual is None else residual.to(wide.dtype) + y).to(x.dtype)
