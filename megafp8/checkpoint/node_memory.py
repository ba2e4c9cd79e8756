"""Checkpoints of a run in the memory of its nodes, with each file on two nodes.

Problem: a job that loses a rank or a node repeats all steps since the newest checkpoint on disk. Saves to memory take
little time and can be made often, but the memory of a lost node is lost, too.

    <root>/megafp8-<run>/<token>/        on each node, in a file system in its memory
        node                             a random name; ranks that read the same name share the folder
        step_00000010/                   a checkpoint: small files, and the data files of this and the previous node
        .step_00000015.incomplete/       a running or interrupted save
        loading/step_00000010/           a checkpoint being loaded: links to this node's files, and parts of other files

Save. Rectangles are assigned to ranks as for a checkpoint on disk (`saving`), and each rank writes the same files into
its node's folder. Each rank then sends its files to a rank of the next node. Every node has metadata.json, the index
and checksums.json of the whole checkpoint. A save is complete on a node once its hidden folder is renamed. All nodes
rename before any node removes the previous checkpoint. So at any time, there is a step for which all nodes have all
their files.

Load. The folder outlives the rank and its agent. Ranks verify the checksums of the files on their nodes, and agree on
the newest checkpoint that still has all data files. Each rank lists the rectangles that it needs and that are not on
its node. The bytes of these rectangles are sent, and written at their position in otherwise empty files, which are
sparse and so need no further memory. The reader for files on disk then reads them, in any layout.

Memory: each node holds one checkpoint, or two while a save runs, each with the files of two nodes.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import uuid
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from logging import getLogger
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.storage import WriteResult

from megafp8.checkpoint import dcp, store
from megafp8.checkpoint.errors import DamagedCheckpoint, SaveFailed, on_all_ranks, on_rank0
from megafp8.checkpoint.files import (
    CHECKSUMS_FILE,
    Checksum,
    allocate,
    find_damage,
    rename_synced,
    write_checksums,
    write_file,
)
from megafp8.checkpoint.reader import CheckpointReader
from megafp8.checkpoint.rectangles import Rectangles
from megafp8.host.messages import join_first
from megafp8.host.user_cache import make_own_folder
from megafp8.parallel import collectives
from megafp8.parallel.activity import CollectiveWork
from megafp8.parallel.sharding import Shape

NODE_FILE = "node"
LOADING = "loading"
GENERATIONS = 2
_ARCHIVE_BYTES = 2048
"""Upper bound of the bytes that a rectangle's archive needs in addition to its values."""
_SMALL_FILES = (store.METADATA_FILE, dcp.INDEX_FILE, CHECKSUMS_FILE)
_BLOCK_BYTES = 1 << 26
_AT_ONCE = 256  # blocks

logger = getLogger(__name__)


class FileTransfer(NamedTuple):
    """Byte range `[start, start + length)` of the file `name`, which rank `source` sends to rank `target`."""

    source: int
    target: int
    name: str
    start: int
    length: int


class NodeMemory:
    """Checkpoints of a run in the memory of its nodes; a destination of `BackgroundSaver`. All methods are collective.

    Args:
        root: Folder that exists on each node, in a file system in memory.
        run: Name of the run.
        token: Name of this job. Folders of the run with another token are removed.
        group: Process group of all ranks, on the host. Nothing else may use it while a save runs.
    """

    group: ProcessGroup | None
    folder: Path
    nodes: list[list[int]]
    """Ranks of each node (ranks that share a folder are one node), in the order of the nodes' first ranks."""

    def __init__(self, root: Path, run: str, token: str, group: ProcessGroup | None) -> None:
        self.group, self.folder = group, root / f"megafp8-{run}" / token
        names = collectives.all_gather_objects(on_all_ranks(self._open, group), group)
        self.nodes = [[rank for rank, other in enumerate(names) if other == name] for name in dict.fromkeys(names)]
        self._rank = collectives.rank(group)
        self._node = next(i for i, ranks in enumerate(self.nodes) if self._rank in ranks)
        self._local_rank = self.nodes[self._node].index(self._rank)

    def _open(self) -> str:
        """Create the folder, and return the name of the node."""
        for path in (self.folder.parent, self.folder):
            make_own_folder(path, private=True)
        for other in self.folder.parent.iterdir():
            if other != self.folder:
                shutil.rmtree(other, ignore_errors=True)
        with tempfile.NamedTemporaryFile("w", dir=self.folder, prefix=".node-") as file:
            file.write(uuid.uuid4().hex)
            file.flush()
            with contextlib.suppress(FileExistsError):
                os.link(file.name, self.folder / NODE_FILE)
        return (self.folder / NODE_FILE).read_text()

    def _on_node(self, action: Callable[[], object]) -> None:
        """Run `action` on the first rank of each node. If it raises on any, all ranks raise. Collective."""
        on_all_ranks(lambda: action() if not self._local_rank else None, self.group)

    # --- save ---

    def check_space(self, rectangles: Sequence[int]) -> int:
        """Return the bytes that checkpoints need on this rank's node; raise ValueError if a node has too little memory.

        `rectangles` holds the bytes of each rectangle that this rank writes. The error is raised on all ranks.
        """
        sizes = collectives.all_gather_objects(sum(rectangles) + _ARCHIVE_BYTES * len(rectangles), self.group)
        before = self.nodes[self._node - 1] if len(self.nodes) > 1 else []
        needed = GENERATIONS * sum(sizes[rank] for rank in (*self.nodes[self._node], *before))

        def check() -> None:
            free = _free_bytes(self.folder) + sum(path.stat().st_size for path in self.folder.glob("step_*/*"))
            if free < needed:
                raise ValueError(
                    f"{self.folder.parent.parent} on {os.uname().nodename} has {free / 2**20:,.0f} MiB of free memory, "
                    f"but {GENERATIONS} checkpoints of the files of this node and the previous one need "
                    f"{needed / 2**20:,.0f} MiB; make it larger (containers: --shm-size), set another folder, or set "
                    "no interval for checkpoints in memory"
                )

        self._on_node(check)
        return needed

    def write(self, step: int, state: dict[str, Rectangles], plans: dcp.SavePlans, metadata: dict[str, Any]) -> Path:
        """Write the rectangles of this rank's plan, send them to the next node, and remove the previous checkpoint."""
        final, hidden = (place(self.folder, step) for place in (store.step_folder, store.incomplete_folder))

        def begin() -> None:
            store.clean_incomplete(self.folder)
            hidden.mkdir()

        def describe() -> dict[str, bytes]:
            assert results is not None
            return self._describe(hidden, step, plans, metadata, results, sums)

        def add_others() -> None:
            self._reserve(hidden, transfers)
            if not self._local_rank and self._rank:
                for name, content in small.items():
                    write_file(hidden / name, content)

        try:
            self._on_node(begin)
            written, own_sums = on_all_ranks(lambda: dcp.write_data(hidden, state, plans.plan), self.group)
            results = collectives.gather_objects(written, self.group)
            sums = collectives.all_gather_objects(own_sums, self.group)
            small = on_rank0(describe, self.group)
            transfers = list(self._copies(sums))
            on_all_ranks(add_others, self.group)
            on_all_ranks(lambda: _exchange(transfers, hidden, self.group), self.group)
            self._on_node(lambda: rename_synced(hidden, final))
        except RuntimeError as error:
            if not self._local_rank:
                store.discard(self.folder, step)
            raise SaveFailed(f"saving {final} in memory failed: {error}") from error
        self._on_node(lambda: store.remove_older(self.folder, step, 1, None))
        return final

    def _describe(
        self,
        folder: Path,
        step: int,
        plans: dcp.SavePlans,
        metadata: dict[str, Any],
        results: list[list[WriteResult]],
        sums: Sequence[Mapping[str, Checksum]],
    ) -> dict[str, bytes]:
        """Write the small files of the checkpoint to `folder`, and return their contents by name. Rank 0 only."""
        assert plans.index is not None
        content = store.metadata_json(store.step_folder(self.folder, step), step, {**plans.contents(), **metadata})
        all_sums = {name: checksum for one in sums for name, checksum in one.items()}
        all_sums[store.METADATA_FILE] = write_file(folder / store.METADATA_FILE, content)
        write_checksums(folder, all_sums | dcp.write_index(folder, plans.index, results))
        return {name: (folder / name).read_bytes() for name in _SMALL_FILES}

    def _copies(self, sums: Sequence[Mapping[str, Checksum]]) -> Iterator[FileTransfer]:
        """Yield the transfers of all files to the next node. `sums` holds the checksums of the files of each rank."""
        if len(self.nodes) == 1:
            return
        for ranks, targets in zip(self.nodes, [*self.nodes[1:], self.nodes[0]]):
            for i, rank in enumerate(ranks):
                for name, checksum in sums[rank].items():
                    yield from _blocks(rank, targets[i % len(targets)], name, 0, checksum.size)

    def _reserve(self, folder: Path, transfers: Sequence[FileTransfer]) -> None:
        """Reserve space for the data that this rank receives.

        Without space, writing to the memory map of a file would kill the process.
        """
        for transfer in transfers:
            if transfer.target == self._rank:
                (folder / transfer.name).touch()
                allocate(folder / transfer.name, transfer.length, transfer.start)

    # --- load ---

    def find(self, at_least: int, accepts: Callable[[Mapping[str, Any]], bool]) -> MemoryReader | None:
        """Return the newest checkpoint, of step `at_least` or later, that has all its data files, or None.

        `accepts` returns whether a checkpoint with the given metadata may be loaded.
        """
        own_checkpoints = on_all_ranks(lambda: self._own(at_least, accepts), self.group)
        listed = collectives.all_gather_objects(list(own_checkpoints), self.group)
        for key in sorted({key for keys in listed for key in keys}, reverse=True):
            holder = next(rank for rank, keys in enumerate(listed) if key in keys)
            reader = self._assemble(key, own_checkpoints.get(key), holder)
            if reader is not None:
                return reader
        return None

    def _own(self, at_least: int, accepts: Callable[[Mapping[str, Any]], bool]) -> dict[tuple[int, int], Path]:
        """Return the checkpoints on this node by step and by a checksum of all files' checksums."""
        checkpoints = {}
        for step, path in store.complete_checkpoints(self.folder):
            try:
                opened = CheckpointReader(path, check_sizes=False) if step >= at_least else None
            except DamagedCheckpoint as error:
                if not self._local_rank:
                    logger.warning("%s", error)
                continue
            if opened is not None and opened.sums is not None and accepts(opened.metadata):
                checkpoints[step, zlib.crc32(repr(sorted(opened.sums.items())).encode())] = path
        return checkpoints

    def _assemble(self, key: tuple[int, int], path: Path | None, holder: int) -> MemoryReader | None:
        """Open the checkpoint `key`, or return None if one of its data files is lost.

        This node has files of the checkpoint in `path` (None: it has no files), and rank `holder` has the small files.
        """

        def describe() -> tuple[dict[str, bytes], list[str]]:
            assert path is not None
            index = CheckpointReader(path, check_sizes=False).index
            files = sorted({stored.relative_path for stored in index.storage_data.values()})
            return {name: (path / name).read_bytes() for name in _SMALL_FILES}, files

        description = on_all_ranks(lambda: describe() if self._rank == holder else None, self.group)
        small, files = collectives.all_gather_objects(description, self.group)[holder]
        good = on_all_ranks(lambda: [] if path is None else self._good_files(path), self.group)
        files_of_ranks = collectives.all_gather_objects(good, self.group)
        holders = {
            name: [i for i, ranks in enumerate(self.nodes) if any(name in files_of_ranks[rank] for rank in ranks)]
            for name in files
        }
        lost = [name for name in files if not holders[name]]
        if lost:
            if not self._rank:
                text = "the checkpoint of step %d in memory cannot be used: %d of %d files are lost or damaged: %s"
                logger.warning(text, key[0], len(lost), len(files), join_first(lost))
            return None
        loading = store.step_folder(self.folder / LOADING, key[0])

        def link() -> None:
            shutil.rmtree(loading.parent, ignore_errors=True)
            loading.mkdir(parents=True)
            for name, content in small.items():
                write_file(loading / name, content)
            for name in files:
                if self._node in holders[name]:
                    assert path is not None
                    os.link(path / name, loading / name)

        self._on_node(link)
        return on_all_ranks(lambda: MemoryReader(loading, self, holders), self.group)

    def _good_files(self, path: Path) -> list[str]:
        """Verify this rank's part of the data files in `path`, and return the names of the intact files."""
        sums = CheckpointReader(path, check_sizes=False).sums
        assert sums is not None
        present = sorted(name for name in sums if name not in _SMALL_FILES and (path / name).exists())
        good = []
        for name in present[self._local_rank :: len(self.nodes[self._node])]:
            problem = find_damage(path / name, sums[name])
            if problem is None:
                good.append(name)
            else:
                logger.warning("%s", problem)
        return good

    def fetch(self, reader: MemoryReader, state: Mapping[str, Rectangles]) -> None:
        """Get the bytes of `reader` that are needed to load `state` and are only on other nodes."""
        needed = {
            (rectangle.file.name, rectangle.start, rectangle.start + rectangle.length)
            for name, rectangles in state.items()
            for offset, view in rectangles.parts
            for rectangle in reader.overlapping(name, offset, tuple(view.shape))
            if self._node not in reader.holders[rectangle.file.name]
        }
        every = collectives.all_gather_objects(needed, self.group)
        transfers = list(self._fetches(reader.holders, every))
        on_all_ranks(lambda: self._reserve(reader.folder, transfers), self.group)
        on_all_ranks(lambda: _exchange(transfers, reader.folder, self.group), self.group)

    def _fetches(
        self, holders: Mapping[str, Sequence[int]], needed: Sequence[set[tuple[str, int, int]]]
    ) -> Iterator[FileTransfer]:
        """Yield transfers of the byte ranges that each node needs.

        The transfers are spread over the ranks of the nodes that have the data and over the ranks of the receiving
        node.
        """
        number = 0
        for ranks in self.nodes:
            wanted = sorted(set().union(*(needed[rank] for rank in ranks)))
            for name, ranges in groupby(wanted, key=lambda one: one[0]):
                for start, end in _joined([(start, end) for _, start, end in ranges]):
                    for block in _blocks(0, 0, name, start, end - start):
                        sources = self.nodes[holders[name][number % len(holders[name])]]
                        source, target = (one[number % len(one)] for one in (sources, ranks))
                        yield block._replace(source=source, target=target)
                        number += 1

    # --- remove ---

    def remove_newer(self, step: int) -> None:
        """Remove the checkpoints of steps later than `step`, and the files of an interrupted save or a load."""

        def remove() -> None:
            store.clean_incomplete(self.folder)
            shutil.rmtree(self.folder / LOADING, ignore_errors=True)
            for other, path in store.complete_checkpoints(self.folder):
                if other > step:
                    store.remove(path)

        self._on_node(remove)

    def close(self) -> None:
        """Free the memory by removing the folder. Call this after the last save is done."""
        if not self._local_rank:
            shutil.rmtree(self.folder.parent, ignore_errors=True)


class MemoryReader(CheckpointReader):
    """Checkpoint in the memory of several nodes, read from a folder with the files of this node.

    `holders` maps each data file to the nodes that have it. `prepare` gets the missing data from other nodes.
    """

    def __init__(self, path: Path, memory: NodeMemory, holders: Mapping[str, Sequence[int]]) -> None:
        super().__init__(path, check_sizes=False)
        self.folder, self.holders, self._memory = path, holders, memory

    def prepare(self, state: Mapping[str, Rectangles]) -> None:
        """Get the data for `state` that is only on other nodes. Collective."""
        self._memory.fetch(self, state)

    def read_into(self, name: str, low: Shape, target: Tensor, *, verify: bool = True) -> None:
        """Fill `target` like `CheckpointReader.read_into`, but always compare checksums: parts of files were sent."""
        super().read_into(name, low, target, verify=True)


def _joined(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Merge overlapping and adjacent ranges of a sorted list."""
    joined: list[tuple[int, int]] = []
    for start, end in ranges:
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined


def _blocks(source: int, target: int, name: str, start: int, length: int) -> Iterator[FileTransfer]:
    """Split a transfer into blocks of at most `_BLOCK_BYTES`."""
    for at in range(0, length, _BLOCK_BYTES):
        yield FileTransfer(source, target, name, start + at, min(_BLOCK_BYTES, length - at))


def _exchange(transfers: Sequence[FileTransfer], folder: Path, group: ProcessGroup | None) -> None:
    """Send and receive bytes between files in the folder of each rank. Space must have been reserved. Collective.

    `transfers` holds the transfers of all ranks, in the same order on every rank.
    """
    me = collectives.rank(group)
    for first in range(0, len(transfers), _AT_ONCE):
        assert group is not None
        works: list[CollectiveWork] = []
        blocks: list[Tensor] = []
        for one in transfers[first : first + _AT_ONCE]:
            if one.source == me:
                blocks.append(_mapped(folder, one, "c"))
                works.append(collectives.send_async(blocks[-1], group, one.target))
            elif one.target == me:
                blocks.append(_mapped(folder, one, "r+"))
                works.append(collectives.recv_async(blocks[-1], group, one.source))
        collectives.WorkList(works, blocks).wait()


def _mapped(folder: Path, where: FileTransfer, mode: Literal["c", "r+"]) -> Tensor:
    """Map a byte range of a file in `folder` as a uint8 tensor. Writing to it changes the file only in mode `r+`."""
    return torch.from_numpy(np.memmap(folder / where.name, np.uint8, mode, where.start, (where.length,)))


def _free_bytes(folder: Path) -> int:
    """Return the bytes that can be written to `folder`; at most the host's free memory if the folder is in memory."""
    free = shutil.disk_usage(folder).free
    with contextlib.suppress(OSError):
        mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
        around = [(len(point), kind) for point, kind in mounts if folder.resolve().is_relative_to(point)]
        if max(around)[1] in ("tmpfs", "ramfs"):
            lines = Path("/proc/meminfo").read_text().splitlines()
            available = next(line for line in lines if line.startswith("MemAvailable:"))
            return min(free, 1024 * int(available.split()[1]))
    return free
