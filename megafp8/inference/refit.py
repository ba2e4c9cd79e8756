"""Refit: transfer of the tensors of a live trainer to a generator in another layout, without a file.

Trainer and generator describe each rank's tensors as rectangles of global tensors, like checkpoints
(`megafp8.checkpoint.rectangles`). A plan says which rank sends which part of which rectangle to which rank. It follows
from the descriptions alone, so every rank computes the same plan. The plan is computed once, and each refit runs it. A
rank that already has a tensor that it wants copies it, or does nothing if both are the same memory.

Transfers run one by one in the plan's order, which is the same on all ranks. Both ranks of the first unfinished
transfer always wait for that transfer, so there is no deadlock. Only one message at a time is in memory. Messages have
the receiver's dtype, so values are rounded once, as in loading from a checkpoint.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megafp8.checkpoint import Rectangle, Rectangles
from megafp8.parallel.collectives import all_gather_objects, rank, recv_async, send_async
from megafp8.parallel.sharding import Shape

_PART = 1 << 28
"""Largest size of a message in bytes."""


class Holding(NamedTuple):
    """Rectangles of a global tensor that a rank has or wants.

    `dtype` is a torch dtype's name, such as "bfloat16". `parts` has the offset and shape of each rectangle.
    """

    global_shape: Shape
    dtype: str
    parts: Sequence[tuple[Shape, Shape]]


class RankTensors(NamedTuple):
    """Tensors that a rank has, and tensors that it wants, by global name."""

    has: Mapping[str, Holding]
    wants: Mapping[str, Holding]


class RectangleTransfer(NamedTuple):
    """Transfer of a rectangle of a tensor from one rank to another, or to the same rank.

    Attributes:
        name: Global name of the tensor.
        low: Index of the rectangle's first element in the global tensor.
        shape: Shape of the rectangle.
        dtype: Dtype of the message.
        sender: Rank that sends.
        source: Number of the sender's rectangle that contains the transferred one.
        receiver: Rank that receives.
        target: Number of the receiver's rectangle that contains the transferred one.
    """

    name: str
    low: Shape
    shape: Shape
    dtype: str
    sender: int
    source: int
    receiver: int
    target: int


class Copies(NamedTuple):
    """Counts of a refit on this rank: copies within its memory, messages received, and bytes of both."""

    local: int
    received: int
    nbytes: int


def described(tensors: Mapping[str, Rectangles]) -> dict[str, Holding]:
    """Return the descriptions of `tensors`, without values."""
    return {
        name: Holding(
            x.global_shape,
            str(x.dtype).removeprefix("torch."),
            [(part.offset, tuple(part.view.shape)) for part in x.parts],
        )
        for name, x in tensors.items()
    }


def plan_refit(ranks: Sequence[RankTensors]) -> list[RectangleTransfer]:
    """Return the transfers that give all ranks the tensors that they want.

    If the receiver has the values, it is also the sender. Otherwise, the rank that sends least so far is chosen. The
    rectangles of a tensor are equal or disjoint, as in a checkpoint. Raises ValueError if no rank has a tensor, or if
    the ranks have it in another shape or only partly.
    """
    transfers: list[RectangleTransfer] = []
    sent = Counter[int]()
    for name in dict.fromkeys(name for x in ranks for name in x.wants):
        has = {i: x.has[name] for i, x in enumerate(ranks) if name in x.has}
        holders: dict[tuple[Shape, Shape], dict[int, int]] = {}  # number of the part, by rank
        for i, holding in has.items():
            for number, part in enumerate(holding.parts):
                holders.setdefault(part, {}).setdefault(i, number)
        for receiver, wants in ((i, x.wants[name]) for i, x in enumerate(ranks) if name in x.wants):
            shapes = {x.global_shape for x in has.values()}
            if shapes != {wants.global_shape}:
                actual = " and ".join(f"shape {list(shape)}" for shape in sorted(shapes)) or "no such tensor"
                raise ValueError(
                    f"the trainer does not fit: the model has {name} {list(wants.global_shape)}, but the trainer has "
                    f"{actual}"
                )
            for target, (offset, shape) in enumerate(wants.parts):
                missing = math.prod(shape)
                for (low, size), numbers in holders.items():
                    begin = tuple(map(max, offset, low))
                    end = tuple(min(o + n, r + m) for o, n, r, m in zip(offset, shape, low, size))
                    if any(b >= e for b, e in zip(begin, end)):
                        continue
                    sender = receiver if receiver in numbers else min(numbers, key=lambda i: (sent[i], i))
                    common = tuple(e - b for b, e in zip(begin, end))
                    if sender != receiver:
                        sent[sender] += math.prod(common)
                    to = (sender, numbers[sender], receiver, target)
                    transfers.append(RectangleTransfer(name, begin, common, wants.dtype, *to))
                    missing -= math.prod(common)
                if missing > 0:
                    whole = math.prod(shape)
                    raise ValueError(f"the trainer has only {whole - missing} of {whole} values of {name}")
    return transfers


class Peers(Protocol):
    """Ranks that take part in a refit. `rank` is this rank's number among them."""

    rank: int

    def exchange(self, own: RankTensors) -> Sequence[RankTensors]:
        """Return the tensors that each rank has and wants. Collective."""
        ...

    def send(self, x: Tensor, to: int) -> None:
        """Send `x`, a tensor of bytes, and wait until it may be freed."""
        ...

    def receive(self, x: Tensor, sender: int) -> None:
        """Fill `x`, a tensor of bytes."""
        ...


class JobPeers:
    """Peers that are the ranks of a process group of the job."""

    def __init__(self, group: ProcessGroup | None) -> None:
        self.rank, self._group = rank(group), group

    def exchange(self, own: RankTensors) -> Sequence[RankTensors]:
        """Gather the tensors that each rank of the group has and wants. Collective."""
        return all_gather_objects(own, self._group)

    def send(self, x: Tensor, to: int) -> None:
        """Send `x` to another rank of the group, and wait until it is sent."""
        assert self._group is not None
        send_async(x, self._group, to).wait()

    def receive(self, x: Tensor, sender: int) -> None:
        """Receive `x` from another rank of the group, and wait until it has arrived."""
        assert self._group is not None
        recv_async(x, self._group, sender).wait()


class Refit:
    """Plan that sends tensors between `peers`, from ranks that have them to ranks that want them. Collective.

    `has` and `wants` are the tensors of this rank, by global name. Their layout must be the same in all calls of `run`.
    Raises ValueError, on all ranks, if a wanted tensor is missing or has another shape.
    """

    def __init__(self, has: Mapping[str, Rectangles], wants: Mapping[str, Rectangles], peers: Peers) -> None:
        self._peers = peers
        transfers = plan_refit(peers.exchange(RankTensors(described(has), described(wants))))
        self.transfers = [x for x in transfers if peers.rank in (x.sender, x.receiver)]

    @torch.no_grad()
    def run(self, has: Mapping[str, Rectangles], wants: Mapping[str, Rectangles]) -> Copies:
        """Fill the views of `wants` from the views of `has` on all ranks, and return this rank's counts. Collective."""
        me, local, received, nbytes = self._peers.rank, 0, 0, 0
        for transfer in self.transfers:
            name, number = transfer.name, transfer.source
            source = _within(has[name].parts[number], transfer) if transfer.sender == me else None
            if transfer.receiver != me:
                assert source is not None
                self._send(source.to(getattr(torch, transfer.dtype)), transfer.receiver)
                continue
            target = _within(wants[name].parts[transfer.target], transfer)
            if source is None:
                self._receive(target, transfer.sender)
                received, nbytes = received + 1, nbytes + target.nbytes
            elif not _same_memory(source, target):
                target.copy_(source)
                local, nbytes = local + 1, nbytes + target.nbytes
        return Copies(local, received, nbytes)

    def _send(self, x: Tensor, to: int) -> None:
        for part in _parts(x.contiguous()):
            self._peers.send(part, to)

    def _receive(self, target: Tensor, sender: int) -> None:
        x = target if target.is_contiguous() else torch.empty_like(target, memory_format=torch.contiguous_format)
        for part in _parts(x):
            self._peers.receive(part, sender)
        if x is not target:
            target.copy_(x)


def _within(rectangle: Rectangle, transfer: RectangleTransfer) -> Tensor:
    """Return the transfer's rectangle as a view of the rectangle that contains it."""
    slices = (slice(b - o, b - o + n) for b, o, n in zip(transfer.low, rectangle.offset, transfer.shape))
    return rectangle.view[tuple(slices)]


def _same_memory(x: Tensor, y: Tensor) -> bool:
    return x.data_ptr() == y.data_ptr() and x.stride() == y.stride() and x.dtype == y.dtype and x.device == y.device


def _parts(x: Tensor) -> Iterator[Tensor]:
    """Yield the bytes of a contiguous tensor in parts, as views."""
    yield from x.view(-1).view(torch.uint8).split(_PART)
