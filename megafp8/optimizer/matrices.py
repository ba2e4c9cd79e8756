"""Updates of whole matrices that are sharded over ranks, by a function of their momentum.

*Matrices.* A matrix is one tensor of a checkpoint. The q, k and v of a fused weight are three matrices, gate and up are
two, and each expert has separate matrices. A tensor with three dims is a stack of matrices. If q and v were transformed
as one matrix, they would share one spectrum, and the result would depend on how they are fused. With `per_head`, each
attention head also has separate matrices.

*Sharded matrices.* Unlike Adam's update, this update is not elementwise. It needs the whole matrix, but a rank may hold
only some rows (FSDP), some columns (tensor parallelism), or a flat range (ZeRO). So each matrix has one *owner* among
the ranks that hold parts of it. In a step, the other ranks send their parts of the momentum to the owner. The owner
computes the result and sends each holder its part. This takes two all-to-alls per batch of matrices. Owners are chosen
so that all ranks have about the same work. Copies of a part (data parallelism without ZeRO) are sent only once; all
holders receive the result, so copies stay bitwise equal.

*Cost.* The momentum is rounded to the dtype of the exchange before it is used (for Muon bf16, as in PyTorch and in the
authors' code), and the result has this dtype. So ranks send parts in it without further loss. With ZeRO or FSDP, a rank
sends and receives 2 bytes per element of its shards, twice. Memory is 2 or 4 bytes per element for the momentum, in
addition to the master, and the buffers of one batch during a step. Matrices of the same shape in a batch are
transformed together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from megafp8.optimizer.base import MatrixUpdate
from megafp8.optimizer.layer_norms import Watch
from megafp8.parallel import collectives
from megafp8.parallel.sharding import Box, FlatShard, Shape, boxes_of

BATCH = 1 << 26
"""Number of matrix elements that a rank transforms between two exchanges. A larger matrix is one batch."""

(MOMENTUM,) = MatrixUpdate.moments


class MatrixPart(NamedTuple):
    """Rectangle of the matrix `name`."""

    name: str
    offset: Shape
    shape: Shape

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def view(self, x_nm: Tensor) -> Tensor:
        """Return this rectangle of the whole matrix `x_nm` as a view."""
        (row, column), (rows, columns) = self.offset, self.shape
        return x_nm[row : row + rows, column : column + columns]


class OwnedMatrix(NamedTuple):
    """Matrix with the rank that transforms it, and the ranks that hold each of its parts."""

    name: str
    shape: Shape
    owner: int
    holders: Mapping[MatrixPart, Sequence[int]]

    def sender(self, part: MatrixPart) -> int:
        """Return the rank that sends a part to the owner: the owner itself if it holds the part."""
        ranks = self.holders[part]
        return self.owner if self.owner in ranks else ranks[self.owner % len(ranks)]


def matrix_parts(box: Box, *, per_head: bool) -> Iterator[tuple[MatrixPart, Shape, int]]:
    """Yield the parts of matrices that make up a box.

    Each comes with the shape of the whole matrix and its first element in the flat shard.
    """
    piece, first = box.piece, box.offset[0]
    for rows in piece.matrix_rows(per_head=per_head):
        low, high = max(rows.start, first), min(rows.stop, first + box.shape[0])
        if low < high:
            name = piece.name if len(rows) == piece.global_shape[0] else f"{piece.name}[{rows.start}:{rows.stop}]"
            offset, shape = (low - rows.start, *box.offset[1:]), (high - low, *box.shape[1:])
            whole, start = (len(rows), *piece.global_shape[1:]), box.start + (low - first) * math.prod(box.shape[1:])
            yield MatrixPart(name, offset[-2:], shape[-2:]), whole[-2:], start


Held = Sequence[tuple[MatrixPart, Shape]]
"""Parts that a rank holds, with the shapes of the whole matrices."""


def assign_owners(held: Sequence[Held], cost: Callable[[Shape], int]) -> list[OwnedMatrix]:
    """Choose the owner of each matrix, so that all ranks have about the same work.

    Args:
        held: Parts that each rank holds, the same on all ranks.
        cost: Function that returns the work for a matrix of a shape.

    Returns:
        All matrices, those with the most work first, then by shape.
    """
    shapes: dict[str, Shape] = {}
    holders: dict[str, dict[MatrixPart, list[int]]] = {}
    for rank, parts in enumerate(held):
        for part, shape in parts:
            assert shapes.setdefault(part.name, shape) == shape, f"{part.name}: two global shapes"
            ranks = holders.setdefault(part.name, {}).setdefault(part, [])
            assert rank not in ranks, f"{part.name}: rank {rank} holds a part twice"
            ranks.append(rank)
    load = [0] * len(held)
    matrices = []
    for name in sorted(shapes, key=lambda name: (-cost(shapes[name]), shapes[name], name)):
        parts_of, shape = holders[name], shapes[name]
        assert sum(part.numel for part in parts_of) == math.prod(shape), f"{name}: parts do not add up to the matrix"
        owner = min({rank for ranks in parts_of.values() for rank in ranks}, key=lambda rank: (load[rank], rank))
        load[owner] += cost(shape)
        matrices.append(OwnedMatrix(name, shape, owner, parts_of))
    return matrices


def batches(matrices: Sequence[OwnedMatrix], ranks: int, elements: int) -> list[list[OwnedMatrix]]:
    """Divide `matrices` into batches, in which each rank owns up to `elements` elements or one larger matrix."""
    result: list[list[OwnedMatrix]] = []
    current, owned = [0] * ranks, [0] * ranks
    for matrix in matrices:
        size, owner = math.prod(matrix.shape), matrix.owner
        if owned[owner] and owned[owner] + size > elements:
            current[owner] += 1
            owned[owner] = 0
        owned[owner] += size
        if current[owner] == len(result):
            result.append([])
        result[current[owner]].append(matrix)
    return result


Transfers = Sequence[tuple[int, MatrixPart]]
"""Parts with their receivers or senders, in the order of these ranks."""


class MatrixExchange(NamedTuple):
    """Transfers of one rank for a batch of matrices. `owned` are the matrices that the rank transforms."""

    owned: Mapping[str, Shape]
    to_owners: Transfers
    from_senders: Transfers
    to_holders: Transfers
    from_owners: Transfers


def matrix_exchange(batch: Sequence[OwnedMatrix], rank: int) -> MatrixExchange:
    """Return the transfers of `rank` for a batch. Sender and receiver list the parts between them in the same order."""
    own_matrices = [matrix for matrix in batch if matrix.owner == rank]

    def by_rank(transfers: Iterable[tuple[int, MatrixPart]]) -> Transfers:
        return sorted(transfers, key=lambda transfer: transfer[0])  # the sort is stable

    return MatrixExchange(
        {matrix.name: matrix.shape for matrix in own_matrices},
        by_rank((m.owner, part) for m in batch for part in m.holders if m.sender(part) == rank),
        by_rank((m.sender(part), part) for m in own_matrices for part in m.holders),
        by_rank((holder, part) for m in own_matrices for part, holders in m.holders.items() for holder in holders),
        by_rank((m.owner, part) for m in batch for part, holders in m.holders.items() if rank in holders),
    )


class _Place(NamedTuple):
    """Location of a part of a matrix on this rank.

    Args:
        shard: Shard that contains the part.
        master: Master of the shard.
        start: First element of the part in the master.
        end: End of the part in the master.
        group: Parameter group of the master.
        scale: Factor of updates of the matrix.
    """

    shard: FlatShard
    master: Tensor
    start: int
    end: int
    group: dict[str, Any]
    scale: float


class MatrixOptimizer(Optimizer):
    """Optimizer of flat masters of this rank's shards of matrices.

    With momentum M, gradients G and decay μ, a step computes

        M ← μ M + (1 - μ) G        W ← (1 - lr · weight_decay) W - lr · scale · transform(direction of M and G)

    The state of a master is `MOMENTUM`, fp32 or bf16 and flat; the caller sets it before the first step.

    Args:
        update: Update rule.
        groups: PyTorch parameter groups, each with a `weight_decay`. The caller sets `lr` before every step.
        shards: Shard of each master.
        group: Ranks that together hold all parts of this rank's matrices. All of them must construct the optimizer and
            call `step` at the same time.
        device: Device of the masters.

    Attributes:
        matrices: Matrices of all ranks of `group`.
        found_inf: Scalar on the device. If it is set and not zero, a step changes nothing, as in PyTorch's fused
            optimizers.
    """

    _step_supports_amp_scaling = True  # PyTorch's name for support of `found_inf`
    found_inf: Tensor | None = None

    def __init__(
        self,
        update: MatrixUpdate,
        groups: Sequence[dict[str, Any]],
        shards: Mapping[Tensor, FlatShard],
        group: ProcessGroup | None,
        device: torch.device,
    ) -> None:
        super().__init__(list(groups), {"lr": 0.0})
        self._rule, self._group, self._device = update, group, device
        self._places: dict[MatrixPart, _Place] = {}
        parts_held: list[tuple[MatrixPart, Shape]] = []
        for param_group in self.param_groups:
            for master in param_group["params"]:
                for box in boxes_of(shards[master]):
                    for part, shape, start in matrix_parts(box, per_head=update.per_head):
                        end, scale = start + part.numel, update.scale(shape)
                        self._places[part] = _Place(shards[master], master, start, end, param_group, scale)
                        parts_held.append((part, shape))
        masters = {master.dtype for master in shards}
        gathered = collectives.all_gather_objects((parts_held, masters), group)
        self.matrices = assign_owners([parts for parts, _ in gathered], update.flops)
        (dtype,) = set[torch.dtype]().union(*(dtypes for _, dtypes in gathered)) or {torch.float32}
        self._dtype = update.exchange_dtype(dtype)
        rank, ranks = collectives.rank(group), collectives.size(group)
        self._exchanges = [matrix_exchange(batch, rank) for batch in batches(self.matrices, ranks, BATCH)]

    @torch.no_grad()
    def step(self, closure: None = None, *, watch: Watch | None = None) -> None:  # type: ignore[override]
        """Update the weights once. `watch` makes a context for the update of each batch."""
        skip = None if self.found_inf is None else self.found_inf != 0
        for exchange in self._exchanges:
            self._update(exchange, skip, watch)

    def _update(self, exchange: MatrixExchange, skip: Tensor | None, watch: Watch | None) -> None:
        """Update the momentum of this rank's parts of a batch, transform the owned matrices, and update the parts."""
        directions = self._empty(sum(part.numel for _, part in exchange.to_owners))
        sent = dict(_divided(directions, exchange.to_owners))
        for _, part in exchange.from_owners:  # all parts that this rank holds
            place = self._places[part]
            elements = slice(place.start, place.end)
            assert place.master.grad is not None
            momentum, gradient = self.state[place.master][MOMENTUM][elements], place.master.grad[elements]
            self._rule.accumulate(momentum, gradient, sent.get(part), skip)
        whole = self._transform(exchange, self._send(directions, exchange.to_owners, exchange.from_senders))
        parts = [part.view(whole[part.name]).reshape(-1) for _, part in exchange.to_holders]
        if self._alone:
            updates = list(zip((part for _, part in exchange.from_owners), parts, strict=True))
        else:
            results = self._send(torch.cat([self._empty(0), *parts]), exchange.to_holders, exchange.from_owners)
            updates = _divided(results, exchange.from_owners)
        places = [self._places[part] for part, _ in updates]
        values = [place.master[place.start : place.end] for place in places]
        watched = list(zip((place.shard for place in places), values))
        with nullcontext() if watch is None else watch(watched):
            for place, x_n, (_, update_n) in zip(places, values, updates):
                lr, decay = place.group["lr"], place.group["weight_decay"]
                _decayed_add_(x_n, update_n, 1 - lr * decay, -lr * place.scale, skip)

    def _transform(self, exchange: MatrixExchange, received: Tensor) -> dict[str, Tensor]:
        """Return the updates of the matrices that this rank owns, from the received parts of their directions."""
        if [part.name for _, part in exchange.from_senders] == list(exchange.owned):  # whole matrices in order
            flat = received
        else:
            flat = self._empty(sum(map(math.prod, exchange.owned.values())))
            sizes = map(math.prod, exchange.owned.values())
            whole = {name: x.view(exchange.owned[name]) for name, x in zip(exchange.owned, flat.split(list(sizes)))}
            for part, direction in _divided(received, exchange.from_senders):
                part.view(whole[part.name]).copy_(direction.view(part.shape))
        updates: dict[str, Tensor] = {}
        start = 0
        for shape, matrices in groupby(exchange.owned.items(), key=lambda matrix: matrix[1]):
            names = [name for name, _ in matrices]
            end = start + len(names) * math.prod(shape)
            updates |= zip(names, self._rule.transform(flat[start:end].view(-1, *shape)), strict=True)
            start = end
        return updates

    @property
    def _alone(self) -> bool:
        return self._group is None or self._group.size() == 1

    def _empty(self, elements: int) -> Tensor:
        return torch.empty(elements, dtype=self._dtype, device=self._device)

    def _send(self, flat: Tensor, parts: Transfers, expected: Transfers) -> Tensor:
        """Send the parts in `flat`, which are sorted by receiver, and return the received parts, flat."""
        if self._alone:
            return flat
        assert self._group is not None
        sent, received = [0] * self._group.size(), [0] * self._group.size()
        for rank, part in parts:
            sent[rank] += part.numel
        for rank, part in expected:
            received[rank] += part.numel
        return collectives.all_to_all_rows(flat.unsqueeze(1), sent, received, self._group).squeeze(1)


def _divided(flat: Tensor, parts: Transfers) -> list[tuple[MatrixPart, Tensor]]:
    """Return the parts with their elements in `flat`, which concatenates them."""
    elements = flat.split([part.numel for _, part in parts])
    return [(part, x) for (_, part), x in zip(parts, elements, strict=True)]


def _decayed_add_(x_n: Tensor, update_n: Tensor, shrink: float, factor: float, skip: Tensor | None) -> None:
    """Compute x ← shrink · x + factor · update, unless `skip`, a bool scalar on the device, is true."""
    if x_n.is_cuda and x_n.itemsize == 4:
        from megafp8.kernels import momentum  # needs Triton, which comes with torch's CUDA builds

        momentum.decayed_add_(x_n, update_n, shrink, factor, skip=skip)
    elif skip is None or not skip:
        x_n.mul_(shrink).add_(update_n, alpha=factor)
