"""Cache of the keys and values of past tokens, in pages (`megafp8.inference.pages`).

Shapes: n tokens of a step, b sequences, p or m pages of each sequence, t = p · page size slots, a query heads and g
key-value heads of this rank, d head width, w width of values.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from megafp8.kernels.limits import LARGEST_HEAD
from megafp8.layers.attention.scores import Scores
from megafp8.layers.attention.sink_op import with_sink
from megafp8.layers.mixer import TokenCache
from megafp8.numerics.formats import E4M3

_LARGEST = {torch.float8_e4m3fn: E4M3.max, torch.int8: 127.0}
"""Largest value of each quantized dtype, to which the amax of a head of a token is scaled."""


class _Layer(NamedTuple):
    """Cache of one layer. The last page is never read.

    Attributes:
        keys: Keys, `[pages + 1, page size, g, d]`.
        values: Values, `[pages + 1, page size / tokens_of_value, g, w]`.
        scales: Scales of quantized keys and values, by which data is multiplied, float32, shaped like `keys` and
            `values` without the last dim. None if they are not quantized.
        every: Number of tokens per value. Only the last of every few tokens of a sequence has a value.
        tokens_of_value: Number of tokens per value slot of a page, a divisor of `every` and of the page size.
    """

    keys: Tensor
    values: Tensor
    scales: tuple[Tensor, Tensor] | None
    every: int
    tokens_of_value: int


class PagedCache:
    """Pages of the attention layers of a model on this rank.

    Args:
        layers: Sizes of the keys and values of each layer. Values may be narrower than keys.
        num_pages: Number of pages.
        page_size: Number of tokens of a page.
        dtype: Dtype of keys and values in the model.
        device: Device of the pages.
        stored: Dtype in which keys and values are stored quantized, with a scale for each head of each token:
            float8_e4m3fn or int8. None: not quantized.
    """

    def __init__(
        self,
        layers: Mapping[int, TokenCache],
        *,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
        stored: torch.dtype | None = None,
    ) -> None:
        self.num_pages, self.page_size = num_pages, page_size
        self.dtype, self._largest = dtype, _LARGEST[stored] if stored is not None else None
        self.in_place = device.type == "cuda" and dtype in (torch.bfloat16, torch.float16)
        self.in_place = self.in_place and all(
            cache.value_width <= cache.width <= LARGEST_HEAD and cache.every == 1 for cache in layers.values()
        )
        """Whether kernels write and read pages in place."""

        def layer(cache: TokenCache) -> _Layer:
            def zeros(tokens: int, *of_head: int, dtype: torch.dtype) -> Tensor:
                # Zeros, because slots after the end of a sequence have probability 0, and 0 · NaN would be NaN.
                places = page_size // tokens
                return torch.zeros(num_pages + 1, places, cache.groups, *of_head, dtype=dtype, device=device)

            tokens = 1, math.gcd(page_size, cache.every)
            widths = cache.width, cache.value_width
            keys, values = (zeros(n, d, dtype=stored or dtype) for n, d in zip(tokens, widths, strict=True))
            scales = None if stored is None else (zeros(1, dtype=torch.float32), zeros(tokens[1], dtype=torch.float32))
            return _Layer(keys, values, scales, cache.every, tokens[1])

        self._layers = {index: layer(cache) for index, cache in layers.items()}

    @property
    def unread_slot(self) -> int:
        """Slot for padding tokens, which no sequence reads."""
        return self.num_pages * self.page_size

    def append(self, layer: int, k_ngd: Tensor, v_ngd: Tensor, slots_n: Tensor, positions_n: Tensor) -> None:
        """Store the keys and values of tokens. The slot of a token is page · page size + place in the page, int64."""
        cached = self._layers[layer]
        if self.in_place:
            from megafp8.layers.attention import (
                paged_kernel as paged_attention,
            )  # needs Triton, which comes with torch's CUDA builds

            paged_attention.append(k_ngd, v_ngd, slots_n, cached.keys, cached.values, cached.scales)
            return
        value_slots_n = slots_n
        if cached.every > 1:
            has_value_n = (positions_n + 1) % cached.every == 0
            value_slots_n = torch.where(has_value_n, slots_n, self.unread_slot) // cached.tokens_of_value
        keys, values = (cached.keys, k_ngd), (cached.values, v_ngd)
        for i, ((stored, x_ngd), own_n) in enumerate(((keys, slots_n), (values, value_slots_n))):
            data = x_ngd
            if cached.scales is not None:
                assert self._largest is not None
                amax_ng = x_ngd.float().abs().amax(-1)
                scale_inv_ng = torch.where(amax_ng == 0, 1.0, amax_ng / self._largest)
                cached.scales[i].flatten(0, 1).index_copy_(0, own_n, scale_inv_ng)
                data = x_ngd.float() / scale_inv_ng.unsqueeze(-1)
                data = data.round() if stored.dtype == torch.int8 else data
                stored, data = stored.view(torch.int8), data.to(stored.dtype).view(torch.int8)  # FP8 has no index_copy_
            stored.flatten(0, 1).index_copy_(0, own_n, data)

    def attend(
        self, layer: int, q_nad: Tensor, table_nm: Tensor, positions_n: Tensor, window: int | None,
        chunk: int | None, sink_a: Tensor | None, scores: Scores,
    ) -> Tensor:  # fmt: skip
        """Compute the attention of one query of each sequence to its pages. Only for a cache that is `in_place`.

        The kernel is `layers.attention.paged_kernel.attend`; batch-invariant models use
        `layers.attention.invariant_kernel`.
        """
        if scores.batch_invariant:
            return self._attend_invariant(layer, q_nad, table_nm, positions_n, window, chunk, sink_a, scores)
        from megafp8.layers.attention import (
            paged_kernel as paged_attention,
        )  # needs Triton, which comes with torch's CUDA builds

        cached = self._layers[layer]
        return paged_attention.attend(
            q_nad, cached.keys, cached.values, cached.scales, table_nm, positions_n, window, chunk, sink_a, scores
        )

    def _attend_invariant(
        self, layer: int, q_nad: Tensor, table_nm: Tensor, positions_n: Tensor, window: int | None,
        chunk: int | None, sink_a: Tensor | None, scores: Scores,
    ) -> Tensor:  # fmt: skip
        from megafp8.layers.attention import (
            invariant_kernel as invariant_attention,
        )  # needs Triton, which comes with torch's CUDA builds

        cached = self._layers[layer]
        assert cached.scales is None
        o_naw, lse_na = invariant_attention.attend(
            q_nad, cached.keys, cached.values, table_nm, positions_n, window, chunk, scores
        )
        if sink_a is None:
            return o_naw
        return with_sink(o_naw.unsqueeze(1), lse_na.unsqueeze(1), sink_a, batch_invariant=True)[0].squeeze(1)

    def read(self, layer: int, table_bp: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys `[t, b, g, d]` and values `[t / every, b, g, w]` in the pages `table_bp` of b sequences.

        The results are transposed views of tensors `[b, t, ...]`. The table is int32 or int64.
        """
        cached, (b, p) = self._layers[layer], table_bp.shape

        def gathered(pages: Tensor) -> Tensor:
            raw = pages.view(torch.int8) if pages.dtype == torch.float8_e4m3fn else pages  # FP8 has no index_select
            chosen = raw.index_select(0, table_bp.flatten()).view(pages.dtype)
            return chosen.view(b, p * pages.shape[1], *pages.shape[2:]).transpose(0, 1)

        k, v = gathered(cached.keys), gathered(cached.values)
        if cached.scales is not None:
            k_scales, v_scales = (gathered(x).unsqueeze(-1) for x in cached.scales)
            k, v = (k.float() * k_scales).to(self.dtype), (v.float() * v_scales).to(self.dtype)
        step = cached.every // cached.tokens_of_value
        return k, v[step - 1 :: step]
