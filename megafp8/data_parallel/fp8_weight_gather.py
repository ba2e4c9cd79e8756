"""Sharded weights as FP8 codes, gathered straight to where they are read.

`fully_shard` gathers all weights of a block at once, rank after rank, and copies them out of that buffer, weight after
weight: every byte is written, read and written again, in each forward and each backward, and all bytes travel through
its communicator, where they wait for gradients to be reduced. Codes need none of it. A layer reads them as bytes and
torch computes nothing with them, so what torch asks for when it gathers (`fsdp_pre_all_gather`) is answered with a
handful of bytes, and the codes of the block are brought beside them, each weight's to a place of its own. When torch
says that its part has come (`fsdp_post_all_gather`), so have they, for its stream waited for ours. The parameter that
the layer sees is `Released`: shape and dtype for autograd, and no memory.

*Who brings them* is a `Carrier`. `Collective`: one all-gather. `megafp8.data_parallel.symmetric_weight_gather`:
copies from the memory
of the other GPUs of the host. Codes change once a step, so that nobody has to be waited for in between.

*Where they lie.* Torch keeps what it gathered until it reshards a block; then it resizes that storage to nothing, and
by this we know that a place is free again. What was queued before may still read it: an event after it, recorded when
the next block's codes arrive, is waited for before others are brought there. In forward and in backward alike that
makes two places, one that is read and one that is filled. They are kept, so allocating never stands in the way.

Torch decides as before what is gathered when, and when it is let go. What is leaned on beyond its documentation: that
storage is resized, and that the weights of a block are gathered together.

Shapes: t ranks; n, k of a weight.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megafp8.data_parallel.fsdp import Released, Rows
from megafp8.distributed.collectives import all_gather_into_async
from megafp8.distributed.symmetric_memory import pieces, starts

_ANSWER = 16  # bytes a weight that torch gathers instead


class Carrier(Protocol):
    """Brings codes of all ranks. `own`: of each weight, this rank's as bytes, to be written between two `settle`s."""

    own: list[Tensor]

    def bring(self, weights: Sequence[int], places: Sequence[Tensor]) -> None:
        """Queue on the current stream: the bytes of some weights, of all ranks, to `places` `[t, bytes]`."""
        ...

    def settle(self) -> None:
        """On the current stream: what all ranks have queued before is done before anything that comes after."""
        ...


class Collective:
    """Codes by all-gather over `group`; `sizes`: of each weight, bytes of a rank."""

    def __init__(self, sizes: Sequence[int], group: ProcessGroup, device: torch.device) -> None:
        self.group = group
        self.own = [torch.zeros(size, dtype=torch.uint8, device=device) for size in sizes]

    def bring(self, weights: Sequence[int], places: Sequence[Tensor]) -> None:
        all_gather_into_async([place.view(-1) for place in places], [self.own[i] for i in weights], self.group).wait()

    def settle(self) -> None:
        """A collective waits for all ranks as it is."""


class Fp8Weight(NamedTuple):
    """A weight that is gathered as codes: its rows, what codes are in, and who is told where they are, `[n, k]`."""

    rows: Rows
    dtype: torch.dtype
    arrived: Callable[[Tensor], None]

    @property
    def nbytes(self) -> int:
        """Of each rank's rows."""
        return self.rows.sent * self.rows.of[1]


class _Place:
    """Memory for a block's codes. `owner`: whose are there, or on their way. `read`: nobody reads it after this."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.memory = torch.empty(size, dtype=torch.uint8, device=device)
        self.owner: _Block | None = None
        self.read = torch.cuda.Event() if device.type == "cuda" else None


class _Places:
    """As many as have been needed at once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._places: list[_Place] = []

    def take(self, size: int, owner: _Block) -> _Place:
        """A free one of `size` bytes or more, for the current stream to write to."""
        free = [place for place in self._places if place.owner is None and len(place.memory) >= size]
        place = min(free, key=lambda place: len(place.memory)) if free else _Place(size, self._device)
        if not free:
            self._places.append(place)
        elif place.read is not None:
            place.read.wait()
        place.owner = owner
        return place

    def look(self) -> None:
        """Find places that have become free. What reads them has been queued on the current stream."""
        for place in self._places:
            if place.owner is not None and place.owner.has_left(place):
                place.owner = None
                if place.read is not None:
                    place.read.record()


class _Block:
    """Weights that torch gathers at the same time: `weights` of the carrier's."""

    def __init__(
        self, coded: Sequence[Fp8Weight], weights: range, carrier: Carrier, places: _Places, ranks: int
    ) -> None:
        self._coded, self._weights, self._carrier, self._places, self._ranks = coded, weights, carrier, places, ranks
        self._sizes = [ranks * weight.nbytes for weight in coded]
        self._coming: _Place | None = None
        self._here: _Place | None = None
        self._answer = torch.zeros(_ANSWER, dtype=torch.uint8, device=coded[0].rows.values.device)
        self._gathered = self._answer  # what torch made of it: has memory for as long as the codes are wanted
        first, *others = (weight.rows.values for weight in coded)
        first.fsdp_pre_all_gather = self._send  # type: ignore[attr-defined]
        for values in others:
            values.fsdp_pre_all_gather = self._have_sent  # type: ignore[attr-defined]
        for at, weight in enumerate(coded):
            weight.rows.values.fsdp_post_all_gather = partial(self._receive, at)  # type: ignore[attr-defined]

    def has_left(self, place: _Place) -> bool:
        """Whether a place of this block's has codes that nobody will ask for any more."""
        if place is self._coming:
            return False
        return place is not self._here or self._gathered.untyped_storage().size() == 0

    def _cut(self, place: _Place) -> list[Tensor]:
        """`[t, bytes]` of each weight."""
        return [piece.view(self._ranks, -1) for piece in pieces(place.memory, self._sizes)]

    # With more parameters than `mesh` torch wants as many bytes as it would gather of an uneven weight.

    def _send(self, mesh: Any) -> Any:
        # Torch lets go of what it gathered for nothing, having guessed the next block wrong, without a word.
        self._coming = self._coming or self._places.take(starts(self._sizes)[-1], self)
        self._carrier.bring(self._weights, self._cut(self._coming))
        return self._have_sent(mesh)

    def _have_sent(self, mesh: Any) -> Any:
        return (self._answer,), None

    def _receive(
        self, at: int, outputs: Sequence[Tensor], metadata: Any, dtype: torch.dtype, *, out: Tensor | None = None
    ) -> Any:
        if at == 0:
            assert self._coming is not None, "torch gathered a weight of the block without the first"
            self._here, self._coming, self._gathered = self._coming, None, outputs[0]
            self._places.look()
            for (rows, code_dtype, arrived), piece in zip(self._coded, self._cut(self._here)):
                arrived(piece.view(code_dtype).view(-1, rows.of[1])[: rows.of[0]])
        rows = self._coded[at].rows
        return None if out is not None else (Released(rows.of, dtype, rows.values.device), ())


def gather_codes(blocks: Sequence[Sequence[Fp8Weight]], carrier: Carrier, ranks: int, device: torch.device) -> None:
    """Let weights be gathered as the codes that `carrier` has of them, in this order; `blocks`: those of each module
    that is sharded as one."""
    places, start = _Places(device), 0
    for coded in blocks:
        if coded:
            _Block(coded, range(start, start := start + len(coded)), carrier, places, ranks)
