"""Selection of the rows for this rank's experts from the choices of all tokens, and the sizes of their buffers.

Only the device knows how many choices fall on a rank's experts. Outside CUDA graphs the host reads this number and
allocates exactly that many rows. A graph cannot wait for the host. Its buffers have room for `MARGIN` times the most
rows that a layer had before the graph was recorded, or for more if the GPU has memory to spare, and kernels read the
actual number on the device. If there are more rows than room, the surplus is left out and counted in
`RowBound.surplus`. The caller that replays the graph must then discard the results, call `RowBound.grow`, and record
another graph (`megafp8.training.trainer`). So no token is ever dropped, and users need not configure a buffer size.

Shapes: n tokens of all ranks, k experts per token.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from statistics import fmean
from typing import NamedTuple

import torch
from torch import Tensor

from megafp8.layers.experts.permute_op import Permutation, by_expert

MARGIN = 1.25
"""Room of a CUDA graph as a multiple of the most rows that a layer had before."""
_MULTIPLE = 128  # the room of a buffer is a multiple of this number of rows,
_PART = 8  # and the room of a part that goes to one rank is a multiple of this one
_MOST_LAYERS = 4096  # the memory for their surplus is allocated before the layers are known


class Rooms(NamedTuple):
    """Room for each count of a layer's rows, in rows: on the host, and int64 on the device."""

    counts: list[int]
    on_device: Tensor


class RowBound:
    """Sizes of a rank's expert buffers in each layer, in rows.

    A layer has one count of rows, or one for each pair of ranks that exchange rows.
    """

    def __init__(self, device: torch.device) -> None:
        self._largest: dict[str, list[int]] = {}  # most rows so far, by layer
        self._limits: dict[str, int] = {}  # largest possible number of rows of a count, by layer
        self._even: dict[str, float] = {}  # rows of a count if the load is even, by layer; 0 for pairs of ranks
        self._rooms: dict[str, Rooms] = {}  # room in the newest graph, by layer
        self._kept: list[Tensor] = []  # rooms that graphs read
        self._is_fixed = False
        self.surplus = torch.zeros(_MOST_LAYERS, dtype=torch.int32, device=device)
        """Most rows without room in each layer, in the order of the first forward pass; the caller resets it to zero.
        Graphs write to this memory, so it is never replaced."""

    @contextmanager
    def fixed(self, least: float = MARGIN) -> Iterator[None]:
        """Use fixed row counts inside the context, so that the host never waits for the device.

        `least` is the least room of a layer with one count, as a multiple of its rows if the load is even.
        """
        for layer in self._largest:
            self._make_room(layer, least)
        self._is_fixed = True
        try:
            yield
        finally:
            self._is_fixed = False

    def _make_room(self, layer: str, least: float) -> None:
        """Set the room of a layer. This copies it to the device, which a capture cannot do."""
        largest, limit = self._largest[layer], self._limits[layer]
        multiple = _MULTIPLE if len(largest) == 1 else _PART
        rooms = [int(max(MARGIN * x, least * self._even[layer])) for x in largest]
        counts = [min(limit, -(-x // multiple) * multiple) for x in rooms]
        if layer not in self._rooms or self._rooms[layer].counts != counts:
            self._rooms[layer] = Rooms(counts, torch.tensor(counts, device=self.surplus.device))
            self._kept.append(self._rooms[layer].on_device)

    def rooms(self, layer: str, rows_x: Tensor, limit: int, even: float = 0.0) -> Rooms:
        """Return the number of rows to allocate for each count of a layer.

        Args:
            layer: Name of the layer.
            rows_x: Numbers of rows that the layer has, integers `[x]` on the device.
            limit: Largest possible number of rows of a count.
            even: Rows of the layer's only count if the load is even; 0 if there are several counts.
        """
        self._limits[layer] = max(limit, self._limits.get(layer, 0))  # evaluations may have fewer tokens
        self._even[layer] = max(even, self._even.get(layer, 0.0))
        if not self._is_fixed:
            counts = rows_x.tolist()
            self._largest[layer] = [max(pair) for pair in zip(self._largest.get(layer, counts), counts, strict=True)]
            return Rooms(counts, rows_x.long())
        rooms, index = self._rooms[layer], list(self._largest).index(layer)
        assert index < _MOST_LAYERS
        surplus = self.surplus[index : index + 1]
        torch.maximum(surplus, (rows_x - rooms.on_device).amax().int(), out=surplus)
        return rooms

    def room(self, layer: str, rows: Tensor, limit: int, even: float = 0.0) -> int:
        """Return the number of rows to allocate for a layer with one count, int32 `[1]`."""
        return self.rooms(layer, rows, limit, even).counts[0]

    def grow(self) -> None:
        """Enlarge the rooms after a surplus. Waits for the device.

        A layer with a surplus gets `MARGIN` times the rows that it had. Every other layer gets on average as large a
        fraction of its limit as the fullest layer had, because any layer may be the next one that a router fills.
        """
        surplus = dict(zip(self._largest, self.surplus.tolist()))
        for layer, rooms in self._rooms.items():
            if surplus[layer]:
                self._largest[layer] = [room + surplus[layer] for room in rooms.counts]
        fractions = (fmean(self._largest[layer]) / limit for layer, limit in self._limits.items())
        fullest = max(fractions, default=0.0)
        for layer, limit in self._limits.items():
            self._largest[layer] = [max(x, int(fullest * limit / MARGIN)) for x in self._largest[layer]]


def own_rows(
    experts_nk: Tensor, num_experts: int, own: range, bound: RowBound, layer: str, *, share: float, drops: bool
) -> tuple[Permutation, Tensor]:
    """Select the choices that fall on this rank's experts, sorted by expert.

    Args:
        experts_nk: Experts of each token, int64. With `drops`, `num_experts` marks a choice without a row.
        num_experts: Number of experts of the layer.
        own: Experts of this rank.
        bound: Sizes of the buffers.
        layer: Name of the layer.
        share: Part of all choices that falls on the layer's experts with computation if the load is even.
        drops: Whether choices can have no row.

    Returns:
        Permutation of the choices, and the end of each expert's rows, int32 `[len(own)]`.
    """
    (n, k), count = experts_nk.shape, len(own)
    if count == num_experts:
        permutation, ends_e = by_expert(experts_nk, count)
        return (permutation._replace(num_rows=ends_e[-1:]) if drops else permutation), ends_e
    is_own = (experts_nk >= own.start) & (experts_nk < own.stop)
    permutation, ends_e = by_expert(torch.where(is_own, experts_nk - own.start, count), count)
    rows = ends_e[-1:]
    room = bound.room(layer, rows, n * min(k, count), share * n * k * count / num_experts)
    own_permutation = permutation._replace(order=permutation.order[:room], num_rows=rows.clamp(max=room))
    return own_permutation, ends_e.clamp(max=room)
