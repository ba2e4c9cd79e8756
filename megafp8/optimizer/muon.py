"""Muon for matrices that are divided over ranks: momentum, orthogonalized by Newton-Schulz iterations.

Muon (Jordan et al. 2024, kellerjordan.github.io/posts/muon) replaces the momentum M = U S Vᵀ of a matrix by about U Vᵀ,
so that all directions of an update are equally large. With μ the momentum's decay, η the learning rate, λ the decay:

    M ← μ M + (1 - μ) G        N = (1 - μ) G + μ M (Nesterov), or M
    W ← (1 - η λ) W - η · scale · newton_schulz(N)

Scale is 0.2 √max(rows, columns), with which updates have the RMS of AdamW's, so that its learning rate and decay serve
Muon too ("match_rms_adamw": Liu et al. 2025, Moonlight, arXiv:2502.16982, equation 4), or √max(1, rows / columns)
("original"). The arithmetic is that of `torch.optim.Muon`.

*What is a matrix.* A tensor of a checkpoint: q, k and v of a fused weight are three, gate and up two, and so are those
of each expert. Orthogonalized as one, q and v would share one spectrum, and the result would depend on how they are
fused.

*Matrices in parts.* Unlike Adam this is not elementwise: it needs the whole matrix, of which a rank may have some rows
(FSDP), columns (tensor parallelism), or a flat range (ZeRO). So each matrix has one *owner* among the ranks that hold
parts of it. In a step the others send their parts of N to it, it orthogonalizes, and sends each holder its part of the
result: two all-to-alls for each batch of matrices. Owners are chosen so that all have about the same work. Copies of a
part (data parallelism without ZeRO) are sent once; all receive the result, so copies stay equal bit for bit.

*Cost.* N is rounded to `dtype` (bf16 in torch and by the authors) before it is used at all, and the result is in it. So
parts travel in it without further loss: with ZeRO or FSDP a rank sends and receives 2 bytes of each of its elements,
twice. Memory: 4 bytes an element for M, beside the master; in a step as much as a batch needs.

Shapes: n rows, m columns of a matrix.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from megafp8.distributed import collectives
from megafp8.distributed.sharding import FlatShard, Shape, boxes_of
from megafp8.optimizer.layer_norms import Watch

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of x, x³ and x⁵: each iteration maps a singular value s to their sum."""
ITERATIONS = 5
EPS = 1e-7
"""Least norm that a matrix is divided by."""

BATCH = 1 << 24
"""Elements of matrices that a rank orthogonalizes between two exchanges; or one matrix, if it has more."""

MOMENTUM = "momentum_buffer"
"""Name of M in optimizer state, as torch has it."""

Scaling = Literal["match_rms_adamw", "original"]


@dataclass(frozen=True)
class MuonSettings:
    """`dtype`: of Newton-Schulz."""

    momentum: float = 0.95
    nesterov: bool = True
    scaling: Scaling = "match_rms_adamw"
    dtype: torch.dtype = torch.bfloat16


def newton_schulz(x_nm: Tensor) -> Tensor:
    """About U Vᵀ of x = U S Vᵀ, in the dtype of x. Singular values that are more than 0.003 of the norm of x, and so
    most, become values between 0.68 and 1.21."""
    a, b, c = COEFFICIENTS
    tall = x_nm.shape[0] > x_nm.shape[1]
    x = x_nm.mT if tall else x_nm
    x = x / x.norm().clamp(min=EPS)
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def update_scale(scaling: Scaling, shape: Shape) -> float:
    """What the orthogonalized momentum of a whole matrix of `shape` is multiplied by."""
    rows, columns = shape
    return 0.2 * math.sqrt(max(rows, columns)) if scaling == "match_rms_adamw" else math.sqrt(max(1.0, rows / columns))


class Part(NamedTuple):
    """A rectangle of the matrix `name`."""

    name: str
    offset: Shape
    shape: Shape

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def view(self, x_nm: Tensor) -> Tensor:
        """This rectangle of the whole matrix."""
        (row, column), (rows, columns) = self.offset, self.shape
        return x_nm[row : row + rows, column : column + columns]


class Matrix(NamedTuple):
    """A matrix, the rank that orthogonalizes it, and the ranks that hold each of its parts."""

    name: str
    shape: Shape
    owner: int
    holders: Mapping[Part, Sequence[int]]

    def sender(self, part: Part) -> int:
        """The rank that sends a part to the owner: the owner itself, if it has it."""
        ranks = self.holders[part]
        return self.owner if self.owner in ranks else ranks[self.owner % len(ranks)]


Held = Sequence[tuple[Part, Shape]]
"""The parts that a rank holds, with the shapes of the whole matrices."""


def assign_owners(held: Sequence[Held]) -> list[Matrix]:
    """All matrices of which the ranks hold `held`, those with most work first. Needs the same input on all ranks."""
    shapes: dict[str, Shape] = {}
    holders: dict[str, dict[Part, list[int]]] = {}
    for rank, parts in enumerate(held):
        for part, shape in parts:
            assert shapes.setdefault(part.name, shape) == shape, f"{part.name}: two global shapes"
            ranks = holders.setdefault(part.name, {}).setdefault(part, [])
            assert rank not in ranks, f"{part.name}: rank {rank} holds a part twice"
            ranks.append(rank)
    load = [0] * len(held)
    matrices = []
    for name in sorted(shapes, key=lambda name: (-multiplications(shapes[name]), name)):
        parts_of, shape = holders[name], shapes[name]
        assert sum(part.numel for part in parts_of) == math.prod(shape), f"{name}: parts do not add up to the matrix"
        owner = min({rank for ranks in parts_of.values() for rank in ranks}, key=lambda rank: (load[rank], rank))
        load[owner] += multiplications(shape)
        matrices.append(Matrix(name, shape, owner, parts_of))
    return matrices


def multiplications(shape: Shape) -> int:
    """Of `newton_schulz` for a matrix of `shape`."""
    short, long = sorted(shape)
    return ITERATIONS * (2 * short * short * long + short**3)


def batches(matrices: Sequence[Matrix], ranks: int, elements: int) -> list[list[Matrix]]:
    """`matrices` in lists, in each of which a rank owns up to `elements` elements, or one matrix."""
    found: list[list[Matrix]] = []
    current, owned = [0] * ranks, [0] * ranks
    for matrix in matrices:
        size, owner = math.prod(matrix.shape), matrix.owner
        if owned[owner] and owned[owner] + size > elements:
            current[owner] += 1
            owned[owner] = 0
        owned[owner] += size
        if current[owner] == len(found):
            found.append([])
        found[current[owner]].append(matrix)
    return found


Transfers = Sequence[tuple[int, Part]]
"""Parts with the ranks that they are sent to, or come from, in the order of the ranks."""


class Exchange(NamedTuple):
    """What one rank sends and receives for a batch of matrices, of which it owns `own`."""

    own: Mapping[str, Shape]
    to_owners: Transfers
    from_senders: Transfers
    to_holders: Transfers
    from_owners: Transfers


def exchange_of(batch: Sequence[Matrix], rank: int) -> Exchange:
    """The part of `rank` in a batch. Two ranks that are each other's in a transfer have its parts in the same order."""
    own = [matrix for matrix in batch if matrix.owner == rank]

    def by_rank(transfers: Iterable[tuple[int, Part]]) -> Transfers:
        return sorted(transfers, key=lambda transfer: transfer[0])  # stable

    return Exchange(
        {matrix.name: matrix.shape for matrix in own},
        by_rank((m.owner, part) for m in batch for part in m.holders if m.sender(part) == rank),
        by_rank((m.sender(part), part) for m in own for part in m.holders),
        by_rank((holder, part) for m in own for part, holders in m.holders.items() for holder in holders),
        by_rank((m.owner, part) for m in batch for part, holders in m.holders.items() if rank in holders),
    )


class _Place(NamedTuple):
    """Where a part of a matrix is: elements `[start, end)` of `master`, that of `shard`, which is in the group `group`.

    `scale`: of updates of the matrix.
    """

    shard: FlatShard
    master: Tensor
    start: int
    end: int
    group: dict[str, Any]
    scale: float


class Muon(Optimizer):
    """Muon over this rank's shards of the hidden matrices: an optimizer of flat fp32 masters, whose `grad` are set.

    `groups`: torch's parameter groups, each with its `weight_decay`; the `lr` of each is set before every step.
    `shards`: by master. `group`: ranks which together hold all parts of the matrices that this rank has parts of; all
    of them construct it, and call `step`, at the same time. State: `MOMENTUM`, fp32 and flat, to be set before the
    first step. `matrices`: those of all ranks of `group`.
    """

    def __init__(
        self,
        groups: Sequence[dict[str, Any]],
        shards: Mapping[Tensor, FlatShard],
        settings: MuonSettings,
        group: ProcessGroup | None,
        device: torch.device,
    ) -> None:
        super().__init__(list(groups), {"lr": 0.0})
        self.settings, self._group, self._device = settings, group, device
        self._places: dict[Part, _Place] = {}
        held: list[tuple[Part, Shape]] = []
        for param_group in self.param_groups:
            for master in param_group["params"]:
                for box in boxes_of(shards[master]):
                    part, shape = Part(box.piece.name, box.offset, box.shape), box.piece.global_shape
                    scale = update_scale(settings.scaling, shape)
                    self._places[part] = _Place(shards[master], master, box.start, box.end, param_group, scale)
                    held.append((part, shape))
        self.matrices = assign_owners(collectives.all_gather_objects(held, group))
        rank, ranks = collectives.rank(group), collectives.size(group)
        self._exchanges = [exchange_of(batch, rank) for batch in batches(self.matrices, ranks, BATCH)]

    @torch.no_grad()
    def step(self, closure: None = None, *, watch: Watch | None = None) -> None:  # type: ignore[override]
        """One update. `watch`: makes a context for the update of each batch."""
        for group in self.param_groups:
            for master in group["params"]:
                assert master.grad is not None
                self.state[master][MOMENTUM].lerp_(master.grad, 1 - self.settings.momentum)
        for exchange in self._exchanges:
            self._update(exchange, watch)

    def _update(self, exchange: Exchange, watch: Watch | None) -> None:
        """Orthogonalize the matrices of a batch that this rank owns, and update its parts of all."""
        directions = [(owner, self._direction(part)) for owner, part in exchange.to_owners]
        whole = {name: self._empty(shape) for name, shape in exchange.own.items()}
        for part, direction in self._send(directions, exchange.from_senders):
            part.view(whole[part.name]).copy_(direction)
        for name, matrix in whole.items():
            whole[name] = newton_schulz(matrix)
        results = [(holder, part.view(whole[part.name])) for holder, part in exchange.to_holders]
        received = self._send(results, exchange.from_owners)
        places = [self._places[part] for part, _ in received]
        values = [place.master[place.start : place.end] for place in places]
        watched = list(zip((place.shard for place in places), values))
        with nullcontext() if watch is None else watch(watched):
            for place, x, (part, update) in zip(places, values, received):
                lr, decay = place.group["lr"], place.group["weight_decay"]
                x.mul_(1 - lr * decay).view(part.shape).add_(update, alpha=-lr * place.scale)

    def _empty(self, shape: Shape) -> Tensor:
        return torch.empty(shape, dtype=self.settings.dtype, device=self._device)

    def _direction(self, part: Part) -> Tensor:
        """This rank's part of what is orthogonalized, shaped like the part, in the dtype of Newton-Schulz."""
        place = self._places[part]
        direction = self.state[place.master][MOMENTUM][place.start : place.end]
        if self.settings.nesterov:
            assert place.master.grad is not None
            direction = place.master.grad[place.start : place.end].lerp(direction, self.settings.momentum)
        return direction.to(self.settings.dtype).view(part.shape)

    def _send(self, parts: Sequence[tuple[int, Tensor]], expected: Transfers) -> list[tuple[Part, Tensor]]:
        """Send parts, in the order of the ranks they are for; returns those that come."""
        flat = torch.cat([self._empty((0,)), *(values.reshape(-1) for _, values in parts)])
        if self._group is not None and self._group.size() > 1:
            sent, received = [0] * self._group.size(), [0] * self._group.size()
            for rank, values in parts:
                sent[rank] += values.numel()
            for rank, part in expected:
                received[rank] += part.numel
            flat = collectives.all_to_all_rows(flat.unsqueeze(1), sent, received, self._group).squeeze(1)
        values_of = flat.split([part.numel for _, part in expected])
        return [(part, values.view(part.shape)) for (_, part), values in zip(expected, values_of, strict=True)]
