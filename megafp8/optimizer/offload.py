"""Optimizer state in pinned host memory, which each step streams through the device (`optimizer.offload`).

*Unit.* A fraction of the elements that a rank updates has its state on the host: the first shards, and the beginning of
one more. So the fraction is exact to `ALIGNMENT` elements, whatever the sizes of the weights.

*Columns.* Each kind of live tensor (masters, first moments, exponents of their scales, ...) is one array on the host,
in which the shards follow each other. A step divides these arrays into pieces of `PIECE` elements. A piece is one copy
for each column, however many shards it covers, and checkpoints see the state of a shard as one tensor for each column.

*Streaming.* A piece is copied to a buffer on the device, updated there by the same optimizer as any other state, and
copied back. The two directions have separate streams, so they overlap with each other and with the update. There are
`BUFFERS` buffers: one is filled, one is updated and one is emptied. Only streams wait, not the host.

    to device     | piece 3 | piece 4 | piece 5 |
    update           | piece 2 | piece 3 | piece 4 |
    to host             | piece 1 | piece 2 | piece 3 |

The update starts once the norm of all gradients is known. The first pieces are copied before that (`prefetch`), while
the backward pass is still running. The last pieces are copied back under the next forward pass. All readers of the
state on the host call `wait` first.

*Bits.* Updates are elementwise, and the noise of FP8 moments depends on the position in the shard
(`StateStorage.part`), so results are the same as without offload, bit for bit.

On a CPU, the same copies are ordinary copies.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from megafp8.host.pinned import pin, unpin
from megafp8.optimizer.state_storage import StateStorage
from megafp8.parallel.sharding import FlatShard

ALIGNMENT = 2048
"""Number of elements at whose multiples shards are divided and begin in columns. Every column then begins at a multiple
of 16 bytes: exponents have one byte for 128 elements."""

PIECE = 1 << 23
"""Number of elements that are copied at a time, a multiple of `ALIGNMENT`: 96 MiB of fp32 masters and moments."""

BUFFERS = 3
"""Number of pieces on the device at a time."""

Form = tuple[tuple[str, tuple[tuple[torch.dtype, int], ...]], ...]
"""Names of state, each with the dtypes and blocks of its live tensors."""


class OffloadedShard(NamedTuple):
    """Elements at the beginning of a shard whose state is on the host.

    Attributes:
        shard: Elements.
        whole: State of the whole shard by name, with live tensors on the meta device.
    """

    shard: FlatShard
    whole: Mapping[str, StateStorage]

    @property
    def form(self) -> Form:
        """Form of the state."""
        return tuple(
            (key, tuple((tensor.dtype, block) for tensor, block in zip(x.tensors, x.blocks, strict=True)))
            for key, x in self.whole.items()
        )

    def storage(self, start: int, end: int, tensors: Mapping[str, Sequence[Tensor]]) -> dict[str, StateStorage]:
        """Return the storage of elements `[start, end)` of `shard` in `tensors`."""
        return {key: x.part(start, end, tensors[key]) for key, x in self.whole.items()}


class Piece(NamedTuple):
    """Elements that are copied together.

    Attributes:
        number: Number of the piece in the order of a step, counted from 0.
        on_host: Columns of the piece on the host.
        on_device: The same columns in a buffer on the device.
        shards: Parts of shards in the piece, with their state in the buffer by name.
    """

    number: int
    on_host: Sequence[Tensor]
    on_device: Sequence[Tensor]
    shards: list[tuple[FlatShard, dict[str, StateStorage]]]


def offloaded_elements(shards: Sequence[FlatShard], fraction: float) -> list[int]:
    """Return the number of elements of each shard, from its start, whose state is on the host."""
    left, counts = round(fraction * sum(map(len, shards))), list[int]()
    for shard in shards:
        whole = len(shard) <= left
        counts.append(len(shard) if whole else left // ALIGNMENT * ALIGNMENT)
        left = left - len(shard) if whole else 0
    return counts


class _Columns:
    """Columns of `elements` elements, a multiple of `ALIGNMENT`, in `memory`, which is uint8."""

    def __init__(self, form: Form, memory: Tensor, elements: int) -> None:
        self._columns: dict[str, list[tuple[Tensor, int]]] = {}
        start = 0
        for key, tensors in form:
            for dtype, block in tensors:
                end = start + elements // block * dtype.itemsize
                self._columns.setdefault(key, []).append((memory[start:end].view(dtype), block))
                start = end

    def part(self, start: int, end: int) -> dict[str, list[Tensor]]:
        """Return the entries of elements `[start, end)` by the name of the state; `start` is a multiple of blocks."""
        return {key: [x[start // block : -(-end // block)] for x, block in xs] for key, xs in self._columns.items()}


def _nbytes(form: Form, elements: int) -> int:
    return sum(elements // block * dtype.itemsize for _, tensors in form for dtype, block in tensors)


class OffloadedState:
    """State of `shards` on the host, initially zero, and the buffers on `device` through which a step streams it.

    A step calls `prefetch` at any time (or never), and enters `on_device` for each of `pieces` in order.

    Attributes:
        storage: State of each shard on the host by name. Call `wait` before using it.
        pieces: Pieces in the order of a step.
    """

    def __init__(self, shards: Sequence[OffloadedShard], device: torch.device) -> None:
        self.storage: dict[FlatShard, dict[str, StateStorage]] = {}
        self.pieces: list[Piece] = []
        by_form: dict[Form, list[OffloadedShard]] = {}
        for shard in shards:
            by_form.setdefault(shard.form, []).append(shard)
        elements = {form: sum(_aligned(len(x.shard)) for x in alike) for form, alike in by_form.items()}
        count = sum(-(-total // PIECE) for total in elements.values())
        largest = max((_nbytes(form, min(total, PIECE)) for form, total in elements.items()), default=0)
        cuda = device.type == "cuda"
        self._buffers = [
            torch.empty(largest, dtype=torch.uint8, device=device) for _ in range(min(BUFFERS, count))
        ]  # fmt: skip
        for form, alike in by_form.items():
            memory = torch.zeros(_nbytes(form, elements[form]), dtype=torch.uint8)
            if cuda:
                pin(memory, "optimizer steps will be slow")
                weakref.finalize(self, unpin, memory).atexit = False
            self._add(form, alike, memory, elements[form])
        self._to_device, self._to_host = (torch.cuda.Stream(device) if cuda else None for _ in range(2))
        if self._to_device is not None:
            self._to_device.wait_stream(torch.cuda.current_stream(device))  # earlier users of the buffers' memory
        self._device = device
        self._fetched = 0  # pieces of this step whose copies to the device have been started
        self._arrived: list[torch.cuda.Event | None] = [None] * len(self._buffers)
        self._emptied: list[torch.cuda.Event | None] = [None] * len(self._buffers)

    def _add(self, form: Form, alike: Sequence[OffloadedShard], memory: Tensor, elements: int) -> None:
        """Add shards with the same form of state, in `memory` on the host, and divide them into pieces."""
        columns, in_buffers, first = _Columns(form, memory, elements), list[_Columns](), len(self.pieces)
        for low in range(0, elements, PIECE):
            high, number = min(low + PIECE, elements), len(self.pieces)
            in_buffers.append(_Columns(form, self._buffers[number % len(self._buffers)], high - low))
            on_host, on_device = (
                [x for xs in tensors.values() for x in xs]
                for tensors in (columns.part(low, high), in_buffers[-1].part(0, high - low))
            )
            self.pieces.append(Piece(number, on_host, on_device, []))
        begin = 0
        for one in alike:
            shard, end = one.shard, begin + len(one.shard)
            self.storage[shard] = one.storage(0, len(shard), columns.part(begin, end))
            for i in range(begin // PIECE, -(-end // PIECE)):
                low, high = max(begin, i * PIECE), min(end, (i + 1) * PIECE)
                tensors = in_buffers[i].part(low - i * PIECE, high - i * PIECE)
                part = FlatShard(shard.param, shard.start + low - begin, shard.start + high - begin)
                self.pieces[first + i].shards.append((part, one.storage(low - begin, high - begin, tensors)))
            begin += _aligned(len(shard))

    def prefetch(self) -> None:
        """Start to copy the first pieces to the device, unless this has been done since the latest step."""
        while self._fetched < len(self._buffers):
            self._fetch()

    def _fetch(self) -> None:
        """Start to copy the next piece to its buffer, once the buffer is empty."""
        piece, at = self.pieces[self._fetched], self._fetched % len(self._buffers)
        emptied = self._emptied[at]
        if self._to_device is not None and emptied is not None:
            self._to_device.wait_event(emptied)
        self._arrived[at] = _copy(zip(piece.on_device, piece.on_host, strict=True), self._to_device)
        self._fetched += 1

    @contextmanager
    def on_device(self, piece: Piece) -> Iterator[None]:
        """Hold a piece in its buffer during the context, in which the current stream updates it."""
        self.prefetch()
        at = piece.number % len(self._buffers)
        arrived = self._arrived[at]
        if arrived is not None:
            torch.cuda.current_stream(self._device).wait_event(arrived)
        yield
        if self._to_host is not None:
            self._to_host.wait_stream(torch.cuda.current_stream(self._device))
        self._emptied[at] = _copy(zip(piece.on_host, piece.on_device, strict=True), self._to_host)
        if self._fetched < len(self.pieces):
            self._fetch()
        elif piece is self.pieces[-1]:
            self._fetched = 0

    def wait(self) -> None:
        """Wait until no copy is running. The state on the host may then be read, or changed before the next step."""
        for stream in (self._to_device, self._to_host):
            if stream is not None:
                stream.synchronize()
        self._fetched = 0  # prefetched pieces may be outdated soon


def _aligned(elements: int) -> int:
    return -(-elements // ALIGNMENT) * ALIGNMENT


def _copy(pairs: Iterable[tuple[Tensor, Tensor]], stream: torch.cuda.Stream | None) -> torch.cuda.Event | None:
    """Copy (target, source) pairs on `stream`, and return the event of their completion; None on a CPU."""
    with nullcontext() if stream is None else torch.cuda.stream(stream):
        for target, source in pairs:
            target.copy_(source, non_blocking=True)
    return None if stream is None else stream.record_event()
