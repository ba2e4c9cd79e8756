"""Keys and values of past tokens, in pages (`megafp8.inference.pages`).

Shapes: n tokens of a step, b sequences, p pages of each, t = p · page size slots, g key-value heads of this rank, d
head width, w width of values.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F


class _Layer(NamedTuple):
    """`[pages + 1, page size, g, d]` and `[..., w]`; the last page is never read."""

    keys: Tensor
    values: Tensor


class PagedCache:
    """The pages of some layers of a model, on this rank.

    `groups`: key-value heads of this rank. `width`, `value_width`: of keys and of values. Kernels want values as wide
    as keys: narrower ones come and go padded with zeros, and are stored without.
    """

    def __init__(
        self,
        layers: Iterable[int],
        *,
        num_pages: int,
        page_size: int,
        groups: int,
        width: int,
        value_width: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_pages, self.page_size, self.value_width = num_pages, page_size, value_width
        shape = (num_pages + 1, page_size, groups)
        self._layers = {
            # Zeros: slots behind the end of a sequence have the probability 0, and 0 · NaN would be NaN.
            layer: _Layer(*(torch.zeros(*shape, d, dtype=dtype, device=device) for d in (width, value_width)))
            for layer in layers
        }

    @property
    def unread_slot(self) -> int:
        """A slot for tokens that no sequence has."""
        return self.num_pages * self.page_size

    def append(self, layer: int, k_ngd: Tensor, v_ngd: Tensor, slots_n: Tensor) -> None:
        """Store keys and values of tokens. `slots_n`: int64, page · page size + place in the page, of each."""
        own = self._layers[layer]
        own.keys.flatten(0, 1).index_copy_(0, slots_n, k_ngd)
        own.values.flatten(0, 1).index_copy_(0, slots_n, v_ngd[..., : self.value_width])

    def slots(self, pages_bp: Tensor) -> Tensor:
        """The slots of the pages of b sequences, int64 both, in the order of their tokens: `[t, b]`."""
        places = torch.arange(self.page_size, device=pages_bp.device)
        return (pages_bp.unsqueeze(-1) * self.page_size + places).flatten(1).t().contiguous()

    def read(self, layer: int, slots_tb: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values `[t, b, g, d]` in these slots."""
        own = self._layers[layer]
        k, v = (x.flatten(0, 1)[slots_tb] for x in own)
        return k, v if v.shape == k.shape else F.pad(v, (0, k.shape[-1] - v.shape[-1]))
