"""Save a checkpoint, all ranks together: at once, or in the background.

    share out   who writes which rectangle; kept from save to save while the tensors stay the same
    stage       copy this rank's share to the host (only in the background)
    write       each rank its file, with checksums, flushed to disk
    publish     rank 0: index and checksums, the rename that makes it visible, removal of old checkpoints

`save` does all but staging and returns. `BackgroundSaver.save` returns after the first, and after copying what changes
while gradients are computed; a thread does the rest. The optimizer, which changes all else, first calls `wait_copied`,
so that on CUDA the copies run beside the next forward and backward pass.

A thread is enough: writing, checksums, copies and waiting for others all run without the interpreter's lock, a process
would need its memory shared. The thread talks to the other ranks' threads, so it has a group of its own (gloo: host
objects only); what training sends at the same time does not meet it. One save is under way at a time. What fails in the
thread fails on all ranks, and is raised in the main thread at the next call of this object.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.planner import WriteItem

from megafp8.checkpoint import dcp, store
from megafp8.checkpoint.checksums import Checksum
from megafp8.checkpoint.failures import on_first, rank_in, together, whole_job
from megafp8.checkpoint.lock import FolderLock
from megafp8.checkpoint.rectangles import Rectangles, as_rectangles
from megafp8.checkpoint.staging import HostMemory, copied_state
from megafp8.distributed import collectives

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Destination:
    """Where the checkpoints of a run go, who writes them together, which stay, and what says that we may.

    `files`: small files that every checkpoint gets, by path within it; the first rank's are written.
    """

    folder: Path
    group: ProcessGroup | None
    keep_last: int | None = None
    keep_every: int | None = None
    lock: FolderLock | None = None
    files: Mapping[str, bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, number in (("keep_last", self.keep_last), ("keep_every", self.keep_every)):
            if number is not None and number < 1:
                raise ValueError(f"{name} is {number}; it must be at least 1, or None")


@dataclass(frozen=True)
class Saved:
    """A checkpoint that was saved in the background: for how long training stood still, and how long it took in all."""

    path: Path
    stalled_seconds: float
    total_seconds: float


def save(
    folder: str | Path,
    step: int,
    tensors: Mapping[str, Rectangles | Tensor],
    metadata: dict[str, Any],
    *,
    group: ProcessGroup | None = None,
    keep_last: int | None = None,
    keep_every: int | None = None,
    lock: FolderLock | None = None,
    files: Mapping[str, bytes] | None = None,
) -> Path:
    """Save `tensors` of all ranks as the checkpoint of `step` under `folder`, and return its path. Collective.

    A plain tensor is one that is not cut: every rank that names it holds the same values. `metadata` must be JSON; rank
    0's is written, with format version, step, date, versions, and the number of tensors and bytes added. `group` None
    means the whole job, or this process where torch.distributed is not initialised. `keep_last`: how many complete
    checkpoints may stay, this one included; older ones are removed once this one is visible, but for multiples of
    `keep_every` steps (None: none).
    `lock`: the folder's, which is asked before the folder is changed. `files`: small files that go into the checkpoint
    too, by path within it; rank 0's are written.

    A step that is there already is never overwritten. If its consumed samples, tokens and tokenizer fingerprint are
    those of `metadata`, it is the same step of the same run (which resumed there and had nothing more to do): the call
    says so in the log and returns. Otherwise it raises ValueError. RuntimeError where writing fails, for instance on a
    full disk; the earlier checkpoints are untouched.
    """
    destination = Destination(Path(folder), whole_job(group), keep_last, keep_every, lock, files or {})
    state = as_rectangles(tensors)
    parts = dcp.share_out(dcp.write_items(state), destination.group)
    return _write(destination, step, state, parts, metadata)


class BackgroundSaver:
    """Saves the checkpoints of tensors on `device` to `destination`, one at a time, while training goes on. Collective.

    `destination.group`: all ranks, and nobody else's while a save is under way; its backend takes host objects.
    `report` is told of each checkpoint that was saved, at the next call of any method here. Every method raises what
    failed since, as `save` would have; entering and leaving it as a context waits for what is under way, also where
    training failed.
    """

    def __init__(self, destination: Destination, device: torch.device, report: Callable[[Saved], None]) -> None:
        self._destination, self._report = destination, report
        self._memory = HostMemory(device)
        self._items: list[WriteItem] | None = None
        self._parts: dcp.SaveParts | None = None
        self._copied: threading.Event | None = None
        self._under_way: Future[Saved] | None = None
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
        """Begin to save, like the function `save`, once the last save is done.

        When this returns, tensors may change whose names `changes_early` is true for; the others once `wait_copied` has
        returned. On CUDA that holds for what is queued on the current stream after that.
        """
        start = time.perf_counter()
        self.finish()
        state = as_rectangles(tensors)
        parts = self._share_out(state)
        slots = together(lambda: self._memory.slots(state, parts), self._destination.group)
        self._memory.copy([slot for slot in slots if changes_early(slot.name)])
        late = [slot for slot in slots if not changes_early(slot.name)]
        copied, under_way = threading.Event(), Future[Saved]()

        def work() -> None:
            try:
                try:
                    together(lambda: self._memory.copy_beside(late), self._destination.group)
                finally:
                    copied.set()
                path = _write(self._destination, step, copied_state(slots, state), parts, metadata)
                under_way.set_result(Saved(path, 0.0, time.perf_counter() - start))
            except BaseException as error:
                under_way.set_exception(error)

        self._thread = threading.Thread(target=work, name=f"save of step {step}", daemon=True)
        self._thread.start()
        self._copied, self._under_way = copied, under_way
        self._stalled = time.perf_counter() - start

    def _share_out(self, state: dict[str, Rectangles]) -> dcp.SaveParts:
        """Who writes what: as the last time, where no rank's tensors are others now."""
        items, group = dcp.write_items(state), self._destination.group
        if self._parts is None or not all(collectives.all_gather_objects(items == self._items, group)):
            self._items, self._parts = items, dcp.share_out(items, group)
        return self._parts

    def wait_copied(self) -> None:
        """Wait until all tensors are copied; for before the optimizer changes them."""
        if self._copied is not None:
            start = time.perf_counter()
            self._copied.wait()
            self._copied = None
            self._stalled += time.perf_counter() - start

    def poll(self) -> None:
        """Report a save that is done, or raise why it failed."""
        if self._under_way is not None and self._under_way.done():
            self.finish()

    def finish(self) -> None:
        """Wait until nothing is under way."""
        if self._under_way is not None:
            self.wait_copied()
            under_way, self._under_way = self._under_way, None
            self._thread.join()  # one that still winds up while the interpreter ends can take the process down
            self._report(replace(under_way.result(), stalled_seconds=self._stalled))

    def __enter__(self) -> BackgroundSaver:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None:
            self.finish()
        elif isinstance(error, Exception):
            try:
                self.finish()
            except Exception as another:
                _log.error("%s", another)


def _write(
    to: Destination, step: int, state: dict[str, Rectangles], parts: dcp.SaveParts, metadata: dict[str, Any]
) -> Path:
    """Write this rank's share of `state`, and publish the checkpoint. Collective."""
    folder, group = to.folder, to.group
    final, hidden = store.step_folder(folder, step), store.incomplete_folder(folder, step)

    def begin() -> dict[str, Checksum] | None:
        if to.lock is not None:
            to.lock.check()
        return store.begin(folder, step, {**parts.contents(), **metadata}, to.files)

    def publish() -> None:
        assert small is not None
        assert written is not None
        sums = small | dcp.write_index(hidden, parts, [results for results, _ in written])
        for _, own_sums in written:
            sums |= own_sums
        if to.lock is not None:
            to.lock.check()
        store.publish(folder, step, sums)

    try:
        small = on_first(begin, group)
        if small is None:
            if rank_in(group) == 0:
                _log.warning("%s is there already, from this same step; it was left as it is", final)
            return final
        own = together(lambda: dcp.write_data(hidden, state, parts), group)
        written = collectives.gather_objects(own, group)
        on_first(publish, group)
    except RuntimeError as error:
        if rank_in(group) == 0 and (to.lock is None or to.lock.is_ours()):
            store.give_up(folder, step)
        raise RuntimeError(f"saving {final} failed: {error}. Earlier checkpoints are untouched") from error
    on_first(lambda: store.remove_older(folder, step, to.keep_last, to.keep_every), group)
    return final
