"""Save a checkpoint from all ranks, synchronously or in the background.

    plan        assign each rectangle to the rank that writes it; reused while the tensors stay the same
    stage       copy the rectangles this rank writes to the host (background saves only)
    write       each rank writes its file, with checksums, flushed to disk
    publish     rank 0 writes index and checksums, renames the folder to make it visible, removes old checkpoints

`save` does all but staging, and returns. `BackgroundSaver.save` returns once it has planned and copied what changes
while gradients are computed; a thread does the rest. The optimizer, which changes everything else, calls `wait_copied`
first, so on CUDA the copies overlap with the next forward and backward pass.

A thread suffices: writing, checksums, copies and collectives all release the interpreter's lock. The thread uses a
process group of its own (gloo, host objects only), so it does not interfere with the collectives of training. One save
runs at a time. An error in the thread is raised on all ranks, in the main thread, at the next call of the saver.

Staging buffer. Training may change a tensor while the thread still writes it, so the rectangles that this rank writes,
and no others, are copied into one buffer on the host that all saves reuse: 14 bytes a parameter (bf16 weights, fp32
masters and moments) divided by the number of ranks. On CUDA it is pinned, without which copies are neither fast (about
50 GB/s over PCIe 5) nor asynchronous, and they run on a side stream. It is registered with CUDA after allocation
because torch's pinned allocator rounds up to powers of two. Each copy is a tensor with a storage of its own, because
DCP clones a view of a larger storage.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from megafp8.checkpoint import dcp, store
from megafp8.checkpoint.errors import SaveFailed, group_or_world, on_all_ranks, on_rank0
from megafp8.checkpoint.files import Checksum
from megafp8.checkpoint.lock import FolderLock
from megafp8.checkpoint.rectangles import Rectangles, as_rectangles
from megafp8.host.error_causes import lost_connection
from megafp8.host.object_store import AnyPath, ObjectPath, as_path
from megafp8.parallel import collectives
from megafp8.parallel.sharding import Shape

_ALIGNMENT = 64
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Destination:
    """Where the checkpoints of a run are saved: folder, ranks that take part, how many stay, the folder's lock.

    `keep_last`: how many complete checkpoints may stay, the new one included; older ones are removed once it is
    visible, but for multiples of `keep_every` steps (None: no exceptions). `lock` is checked before the folder is
    changed. `files`: small files that every checkpoint gets, by path within it; rank 0's are written.
    """

    folder: AnyPath
    group: ProcessGroup | None
    keep_last: int | None = None
    keep_every: int | None = None
    lock: FolderLock | None = None
    files: Mapping[str, bytes] = field(default_factory=dict)

    def write(self, step: int, state: dict[str, Rectangles], plans: dcp.SavePlans, metadata: dict[str, Any]) -> AnyPath:
        """Write the rectangles of this rank's plan, and publish the checkpoint. Collective."""
        return _write(self, step, state, plans, metadata)

    def __post_init__(self) -> None:
        for name, number in (("keep_last", self.keep_last), ("keep_every", self.keep_every)):
            if number is not None and number < 1:
                raise ValueError(f"{name} is {number}; it must be at least 1, or None")


class Writes(Protocol):
    """Where a `BackgroundSaver` saves: `Destination`, or `NodeMemory`."""

    @property
    def group(self) -> ProcessGroup | None: ...

    def write(
        self, step: int, state: dict[str, Rectangles], plans: dcp.SavePlans, metadata: dict[str, Any]
    ) -> AnyPath: ...


@dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint saved in the background: for how long training waited, and how long it took in all."""

    path: AnyPath
    stalled_seconds: float
    total_seconds: float


def save(
    folder: AnyPath | str,
    step: int,
    tensors: Mapping[str, Rectangles | Tensor],
    metadata: dict[str, Any],
    *,
    keep_last: int | None = None,
    keep_every: int | None = None,
    lock: FolderLock | None = None,
    files: Mapping[str, bytes] | None = None,
) -> AnyPath:
    """Save `tensors` of all ranks as the checkpoint of `step` under `folder`, and return its path. Collective.

    A plain tensor is not sharded: every rank that names it holds the same values. `metadata` must be JSON; rank 0's is
    written, with format version, step, date, versions, and the number of tensors and bytes added. Where
    torch.distributed is not initialised, this process saves alone. For the other options see `Destination`.

    A step that exists is never overwritten. If its consumed samples, tokens and tokenizer fingerprint are those of
    `metadata`, it is the same step of the same run (which resumed there and had nothing left to do): the call logs
    that and returns. Otherwise it raises ValueError. RuntimeError where writing fails, for instance on a full disk;
    earlier checkpoints are untouched.
    """
    destination = Destination(as_path(folder), group_or_world(), keep_last, keep_every, lock, files or {})
    state = as_rectangles(tensors)
    plans = dcp.plan_save(dcp.write_items(state), destination.group)
    return _write(destination, step, state, plans, metadata)


class BackgroundSaver:
    """Saves checkpoints of tensors on `device` to `destination`, one at a time, while training goes on. Collective.

    `destination.group`: all ranks, not used for anything else while a save runs; its backend takes host objects.
    `report` is called with each checkpoint that was saved, at the next call of any method here. Every method raises
    what failed since, as `save` would have. As a context manager it waits for the running save, also where training
    failed, and gives back its memory.
    """

    def __init__(self, destination: Writes, device: torch.device, report: Callable[[SavedCheckpoint], None]) -> None:
        self._destination, self._report = destination, report
        self._buffer = StagingBuffer(device)
        self._items: list[WriteItem] | None = None
        self._plans: dcp.SavePlans | None = None
        self._copied: threading.Event | None = None
        self._running: Future[SavedCheckpoint] | None = None
        self._thread = threading.Thread()
        self._stalled = 0.0

    def save(
        self,
        step: int,
        tensors: Mapping[str, Rectangles | Tensor],
        metadata: dict[str, Any],
        *,
        changes_early: Callable[[str], bool] = lambda name: False,
    ) -> None:
        """Start a save, like the function `save`, once the previous one is done.

        When this returns, tensors may change whose names `changes_early` is true for; the others once `wait_copied` has
        returned. On CUDA that holds for what is queued on the current stream after that.
        """
        start = time.perf_counter()
        self.finish()
        state = as_rectangles(tensors)
        plans = self._plan(state)
        staged = on_all_ranks(lambda: self._buffer.assign(state, plans.plan), self._destination.group)
        self._buffer.copy([one for one in staged if changes_early(one.name)])
        late = [one for one in staged if not changes_early(one.name)]
        copied, running = threading.Event(), Future[SavedCheckpoint]()

        def work() -> None:
            try:
                try:
                    on_all_ranks(lambda: self._buffer.copy_on_side_stream(late), self._destination.group)
                finally:
                    copied.set()
                path = self._destination.write(step, copied_state(staged, state), plans, metadata)
                running.set_result(SavedCheckpoint(path, 0.0, time.perf_counter() - start))
            except BaseException as error:
                running.set_exception(error)

        self._thread = threading.Thread(target=work, name=f"save of step {step}", daemon=True)
        self._thread.start()
        self._copied, self._running = copied, running
        self._stalled = time.perf_counter() - start

    def plan(self, tensors: Mapping[str, Rectangles | Tensor]) -> list[int]:
        """Plan the save of `tensors`; returns the bytes of each rectangle that this rank writes. Collective."""
        state = as_rectangles(tensors)
        items = [item.index for item in self._plan(state).plan.items]
        return [state[index.fqn].__get_tensor_shard__(index).nbytes for index in items]

    def _plan(self, state: dict[str, Rectangles]) -> dcp.SavePlans:
        """The plans of the previous save, unless some rank's tensors are others now."""
        items, group = dcp.write_items(state), self._destination.group
        if self._plans is None or not all(collectives.all_gather_objects(items == self._items, group)):
            self._items, self._plans = items, dcp.plan_save(items, group)
        return self._plans

    def wait_copied(self) -> None:
        """Wait until all tensors are copied; to be called before the optimizer changes them."""
        if self._copied is not None:
            start = time.perf_counter()
            self._copied.wait()
            self._copied = None
            self._stalled += time.perf_counter() - start

    def poll(self) -> None:
        """Report the running save if it is done, or raise its error."""
        if self._running is not None and self._running.done():
            self.finish()

    def finish(self) -> None:
        """Wait for the running save."""
        if self._running is not None:
            self.wait_copied()
            running, self._running = self._running, None
            self._thread.join()  # a thread that still runs while the interpreter exits can crash the process
            self._report(replace(running.result(), stalled_seconds=self._stalled))

    def __enter__(self) -> BackgroundSaver:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None:
            self.finish()
            self._buffer.release()
        elif isinstance(error, Exception):
            try:
                self.finish()
            except Exception as another:
                # All ranks have the same error, so one logs it. If this rank has lost its connection to another, that
                # one has most likely ended with this very error, and reports it.
                if collectives.rank(self._destination.group) == 0 and not lost_connection(error):
                    logger.error("%s", another)


def _write(
    to: Destination, step: int, state: dict[str, Rectangles], plans: dcp.SavePlans, metadata: dict[str, Any]
) -> AnyPath:
    """Write the rectangles of this rank's plan, and publish the checkpoint. Collective."""
    folder, group = to.folder, to.group
    final, hidden = store.step_folder(folder, step), store.incomplete_folder(folder, step)

    def begin() -> dict[str, Checksum] | None:
        if to.lock is not None:
            to.lock.check()
        return store.begin(folder, step, {**plans.contents(), **metadata}, to.files)

    def publish() -> None:
        assert small is not None
        assert written is not None
        assert plans.index is not None
        sums = small | dcp.write_index(hidden, plans.index, [results for results, _ in written])
        for _, own_sums in written:
            sums |= own_sums
        if to.lock is not None:
            to.lock.check()
        store.publish(folder, step, sums)

    try:
        small = on_rank0(begin, group)
        if small is None:
            if collectives.rank(group) == 0:
                logger.warning("%s exists already, from this same step; it was left as it is", final)
            return final
        sums_of_rank = on_all_ranks(lambda: dcp.write_data(hidden, state, plans.plan), group)
        written = collectives.gather_objects(sums_of_rank, group)
        on_rank0(publish, group)
    except RuntimeError as error:
        if collectives.rank(group) == 0 and (to.lock is None or to.lock.is_ours()):
            store.discard(folder, step)
        is_gone = not isinstance(folder, ObjectPath) and not folder.exists()
        rest = f"{folder} is gone, with earlier checkpoints in it" if is_gone else "Earlier checkpoints are untouched"
        raise SaveFailed(f"saving {final} failed: {error}. {rest}") from error
    on_rank0(lambda: store.remove_older(folder, step, to.keep_last, to.keep_every), group)
    return final


class Staged(NamedTuple):
    """A rectangle at `offset` of the global tensor `name`, and the tensor on the host that it is copied to."""

    name: str
    offset: Shape
    source: Tensor
    target: Tensor


class StagingBuffer:
    """Host memory for the rectangles that this rank writes of tensors on `device`, for one save at a time."""

    def __init__(self, device: torch.device) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._ready = torch.cuda.Event() if device.type == "cuda" else None

    def assign(self, state: dict[str, Rectangles], plan: SavePlan) -> list[Staged]:
        """Assign a place to each rectangle of `plan`; what was there before is overwritten."""
        items = [item.index for item in plan.items]
        views = [state[index.fqn].__get_tensor_shard__(index) for index in items]
        ends = list(itertools.accumulate(-(-view.nbytes // _ALIGNMENT) * _ALIGNMENT for view in views))
        self._resize(ends[-1] if ends else 0)
        staged = []
        for index, view, start in zip(items, views, [0, *ends]):
            target = _with_own_storage(self._memory[start : start + view.nbytes], view)
            staged.append(Staged(index.fqn, tuple(index.offset or ()), view, target))
        return staged

    def release(self) -> None:
        """Give the memory back; torch does not know that it is registered with CUDA."""
        self._resize(0)

    def _resize(self, size: int) -> None:
        if self._memory.numel() == size:
            return
        pinned = self._stream is not None
        if pinned and self._memory.numel():
            torch.cuda.cudart().cudaHostUnregister(self._memory.data_ptr())
        self._memory = torch.empty(size, dtype=torch.uint8)
        if pinned and size:
            error = int(torch.cuda.cudart().cudaHostRegister(self._memory.data_ptr(), size, 0))
            if error:
                logger.warning("%.1f GiB of host memory could not be pinned: saving will stall longer", size / 2**30)

    def copy(self, staged: Iterable[Staged]) -> None:
        """Copy on the current stream. What is queued on it after this call may change the sources, and them alone."""
        for one in staged:
            one.target.copy_(one.source, non_blocking=True)
        if self._ready is not None:
            self._ready.record()

    def copy_on_side_stream(self, staged: Iterable[Staged]) -> None:
        """Copy on a side stream, and return once these copies and those of `copy` are done. For another thread.

        The values are those at the last call of `copy`, unless they are changed before this returns.
        """
        if self._stream is None or self._ready is None:
            for one in staged:
                one.target.copy_(one.source)
            return
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            self._stream.wait_event(self._ready)
            for one in staged:
                one.target.copy_(one.source, non_blocking=True)
            self._stream.synchronize()


def copied_state(staged: Iterable[Staged], original: dict[str, Rectangles]) -> dict[str, Rectangles]:
    """The part of `original` that is staged, with the copies as views."""
    copies: dict[str, Rectangles] = {}
    for one in staged:
        tensor = original[one.name]
        copies.setdefault(one.name, Rectangles(tensor.global_shape, tensor.dtype)).add(one.offset, one.target)
    return copies


def _with_own_storage(memory: Tensor, like: Tensor) -> Tensor:
    """A tensor of the shape and dtype of `like` whose storage is exactly the bytes `memory`."""
    if not memory.numel():
        return torch.empty_like(like, device="cpu")
    return torch.frombuffer(memory.numpy().data, dtype=like.dtype).view(like.shape)
