"""The rows of this rank's experts among the choices of all tokens, and how many rows there is room for.

How many choices fall on a rank's experts is known on the device only. Outside CUDA graphs the host reads it, and room
is made for exactly so many. A graph cannot wait for the host: it has room for `MARGIN` times the most rows that a
layer had before it was recorded, and kernels read on the device how many there are. If there are more, the surplus is
left out, `RowBound.exceeded` says so, and the caller that replays the graph must discard the results and compute them
without it (`megafp8.training.trainer`). So no token is ever dropped, and no room need be configured.

Shapes: n tokens of all ranks, k experts of each.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from megafp8.layers.experts.permute_op import Permutation, by_expert

MARGIN = 1.25
_MULTIPLE = 128  # of rows


class RowBound:
    """How many rows of experts a rank makes room for in a layer.

    `exceeded`: int32 `[]`, how many times a layer had more rows than room since it was last set to zero.
    """

    def __init__(self, device: torch.device) -> None:
        self._largest: dict[str, int] = {}  # by layer
        self._is_fixed = False
        self.exceeded = torch.zeros((), dtype=torch.int32, device=device)

    @contextmanager
    def fixed(self) -> Iterator[None]:
        """Within, the host does not read how many rows there are."""
        self._is_fixed = True
        try:
            yield
        finally:
            self._is_fixed = False

    def room(self, layer: str, rows: Tensor, most: int) -> int:
        """Room for `rows`, int32 `[1]` on the device, of which there can be `most`, in the layer of this name."""
        if not self._is_fixed:
            count = int(rows.item())
            self._largest[layer] = max(self._largest.get(layer, 0), count)
            return count
        room = min(most, -(-int(MARGIN * self._largest[layer]) // _MULTIPLE) * _MULTIPLE)
        self.exceeded += (rows > room).squeeze()
        return room


def own_rows(
    experts_nk: Tensor, num_experts: int, own: range, bound: RowBound, layer: str, *, drops: bool
) -> tuple[Permutation, Tensor]:
    """The choices of the experts `own`, by expert, and where those of each end, int32 `[len(own)]`.

    `experts_nk`: int64 `[n, k]`, of `num_experts` of the layer of this name; with `drops` also `num_experts`, which is
    no expert.
    """
    (n, k), count = experts_nk.shape, len(own)
    if count == num_experts:
        permutation, ends_e = by_expert(experts_nk, count)
        return (permutation._replace(num_rows=ends_e[-1:]) if drops else permutation), ends_e
    is_own = (experts_nk >= own.start) & (experts_nk < own.stop)
    permutation, ends_e = by_expert(torch.where(is_own, experts_nk - own.start, count), count)
    rows = ends_e[-1:]
    room = bound.room(layer, rows, n * min(k, count))
    own_permutation = permutation._replace(order=permutation.order[:room], num_rows=rows.clamp(max=room))
    return own_permutation, ends_e.clamp(max=room)
