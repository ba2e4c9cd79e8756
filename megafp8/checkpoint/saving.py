"""Save a checkpoint from all ranks, synchronously or in the background.

    plan        assign each rectangle to the rank that writes it; the plan is reused while the tensors stay the same
    stage       copy the rectangles that this rank writes to the host (background saves only)
    write       each rank writes its file, with checksums, and flushes it to disk
    publish     rank 0 writes index and checksums, renames the folder to make it visible, and removes old checkpoints

`save` performs all stages except staging, and then returns. `BackgroundSaver.save` returns after it has planned, and
copied the tensors that change while gradients are computed; a thread does the rest. The optimizer, which changes all
other tensors, calls `wait_copied` first. So on CUDA, the copies overlap with the next forward and backward pass.

A thread is sufficient, because writing, checksums, copies and collectives all release the interpreter's lock. The
thread uses a separate process group (gloo, host objects only), so it does not interfere with training's collectives.
Only one save runs at a time. An error in the thread is raised on all ranks, in the main thread, at the next call of the
saver.

Staging buffer. Training may change a tensor while the thread is still writing it. So the rectangles that this rank
writes, and no others, are copied into one host buffer that all saves reuse. Its size is 14 bytes per parameter (bf16
weights, fp32 masters and moments), divided by the number of ranks. On CUDA, the buffer is pinned, which makes copies
fast (about 50 GB/s over PCIe 5) and asynchronous, and the copies run on a side stream. Optimizer state that is on the
host already is copied like any other, because the next update overwrites it. Each copy is a tensor with its own
storage, because DCP clones a view of a larger storage.
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
from megafp8.host.pinned import pin, unpin
from megafp8.parallel import collectives
from megafp8.parallel.sharding import Shape

_ALIGNMENT = 64
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Destination:
    """Folder in which the checkpoints of a run are saved.

    Attributes:
        folder: Folder of the checkpoints.
        group: Process group of the ranks that save.
        keep_last: Number of complete checkpoints to keep, including the new one. Older ones are removed once the new
            one is visible. None keeps all.
        keep_every: Checkpoints at multiples of this number of steps are never removed. None means no exceptions.
        lock: Lock of the folder, which is checked before the folder is changed.
        files: Small files to store in every checkpoint, by path within it. Rank 0's files are written.
    """

    folder: AnyPath
    group: ProcessGroup | None
    keep_last: int | None = None
    keep_every: int | None = None
    lock: FolderLock | None = None
    files: Mapping[str, bytes] = field(default_factory=dict)

    def write(self, step: int, state: dict[str, Rectangles], plans: dcp.SavePlans, metadata: dict[str, Any]) -> AnyPath:
        """Write the rectangles of this rank's plan, publish the checkpoint, and return its path. Collective."""
        return _write(self, step, state, plans, metadata)

    def __post_init__(self) -> None:
        for name, number in (("keep_last", self.keep_last), ("keep_every", self.keep_every)):
            if number is not None and number < 1:
                raise ValueError(f"{name} is {number}; it must be at least 1, or None")


class Writes(Protocol):
    """Destination of a `BackgroundSaver`: a `Destination` or a `NodeMemory`."""

    @property
    def group(self) -> ProcessGroup | None:
        """Process group of the ranks that save."""
        ...

    def write(self, step: int, state: dict[str, Rectangles], plans: dcp.SavePlans, metadata: dict[str, Any]) -> AnyPath:
        """Write the rectangles of this rank's plan, complete the checkpoint, and return its path. Collective."""
        ...


@dataclass(frozen=True)
class SavedCheckpoint:
    """Checkpoint that was saved in the background."""

    path: AnyPath
    stalled_seconds: float
    """Seconds for which training waited for the save."""
    total_seconds: float
    """Duration of the whole save in seconds."""


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

    A plain tensor is not sharded: every rank that names it must hold the same values. `metadata` must be JSON. Rank 0's
    metadata is written, and format version, step, date, versions, and the number of tensors and bytes are added to it.
    If torch.distributed is not initialized, this process saves alone. `Destination` describes the other options.

    An existing step is never overwritten. If it has the same consumed samples, tokens and tokenizer fingerprint as
    `metadata`, it is the same step of the same run, which resumed there and had nothing left to do. The call then logs
    this and returns.

    Raises:
        ValueError: The step exists and is not the same, or `metadata` is not JSON.
        SaveFailed: Writing failed, for instance because the disk is full. Earlier checkpoints are untouched.
    """
    destination = Destination(as_path(folder), group_or_world(), keep_last, keep_every, lock, files or {})
    state = as_rectangles(tensors)
    plans = dcp.plan_save(dcp.write_items(state), destination.group)
    return _write(destination, step, state, plans, metadata)


class BackgroundSaver:
    """Saver of checkpoints that works while training continues, one save at a time. All methods are collective.

    Every method raises the error of a failed save, as the function `save` would. As a context manager, the saver waits
    for the running save, even if training failed, and then frees its memory.

    Args:
        destination: Where to save. Its process group contains all ranks, has a backend for host objects, and is not
            used for anything else while a save runs.
        device: Device of the tensors.
        report: Function that is called with each saved checkpoint, at the next call of any method after the save.
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
        """Start a save, like the function `save`, once the previous save is done.

        When this returns, the tensors for which `changes_early(name)` is true may change. The other tensors may change
        once `wait_copied` has returned. On CUDA, this means work that is queued on the current stream from then on.
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
        """Plan the save of `tensors`, and return the bytes of each rectangle that this rank writes. Collective."""
        state = as_rectangles(tensors)
        items = [item.index for item in self._plan(state).plan.items]
        return [state[index.fqn].__get_tensor_shard__(index).nbytes for index in items]

    def _plan(self, state: dict[str, Rectangles]) -> dcp.SavePlans:
        """Return the plans of the previous save, or new plans if the tensors of any rank have changed. Collective."""
        items, group = dcp.write_items(state), self._destination.group
        if self._plans is None or not all(collectives.all_gather_objects(items == self._items, group)):
            self._items, self._plans = items, dcp.plan_save(items, group)
        return self._plans

    def wait_copied(self) -> None:
        """Wait until all tensors are copied. Call this before the optimizer changes them."""
        if self._copied is not None:
            start = time.perf_counter()
            self._copied.wait()
            self._copied = None
            self._stalled += time.perf_counter() - start

    def poll(self) -> None:
        """If the running save is done, report it or raise its error."""
        if self._running is not None and self._running.done():
            self.finish()

    def finish(self) -> None:
        """Wait for the running save, and report it or raise its error."""
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
                # All ranks have the same error, so only one logs it. If this rank has lost its connection to another
                # rank, the other rank has most likely ended with this very error, and reports it.
                if collectives.rank(self._destination.group) == 0 and not lost_connection(error):
                    logger.error("%s", another)


def _write(
    to: Destination, step: int, state: dict[str, Rectangles], plans: dcp.SavePlans, metadata: dict[str, Any]
) -> AnyPath:
    """Write the rectangles of this rank's plan, publish the checkpoint, and return its path. Collective."""
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
                logger.warning("%s already exists and holds this same step; it was not changed", final)
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
    """Rectangle at `offset` of the global tensor `name` (`source`), and the host tensor for its copy (`target`)."""

    name: str
    offset: Shape
    source: Tensor
    target: Tensor


class StagingBuffer:
    """Host memory for copies of the rectangles that this rank writes, for one save at a time.

    `device` is the device of the tensors.
    """

    def __init__(self, device: torch.device) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._ready = torch.cuda.Event() if device.type == "cuda" else None

    def assign(self, state: dict[str, Rectangles], plan: SavePlan) -> list[Staged]:
        """Assign a part of the buffer to each rectangle of `plan`. The copies of the previous save are overwritten."""
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
        """Unpin and free the memory."""
        self._resize(0)

    def _resize(self, size: int) -> None:
        if self._memory.numel() == size:
            return
        pinned = self._stream is not None
        if pinned:
            unpin(self._memory)
        self._memory = torch.empty(size, dtype=torch.uint8)
        if pinned:
            pin(self._memory, "saves will stall longer")

    def copy(self, staged: Iterable[Staged]) -> None:
        """Copy on the current stream. Work that is queued on it after this call may change the sources of `staged`."""
        for one in staged:
            one.target.copy_(one.source, non_blocking=True)
        if self._ready is not None:
            self._ready.record()

    def copy_on_side_stream(self, staged: Iterable[Staged]) -> None:
        """Copy on a side stream, and return once these copies and the copies by `copy` are done. For another thread.

        The copies hold the values at the last call of `copy`, unless the sources are changed before this returns.
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
    """Return the staged rectangles of `original`, with the host copies as their views."""
    copies: dict[str, Rectangles] = {}
    for one in staged:
        tensor = original[one.name]
        copies.setdefault(one.name, Rectangles(tensor.global_shape, tensor.dtype)).add(one.offset, one.target)
    return copies


def _with_own_storage(memory: Tensor, like: Tensor) -> Tensor:
    """Return a tensor with the shape and dtype of `like`, with exactly the bytes of `memory` as its storage."""
    if not memory.numel():
        return torch.empty_like(like, device="cpu")
    return torch.frombuffer(memory.numpy().data, dtype=like.dtype).view(like.shape)
