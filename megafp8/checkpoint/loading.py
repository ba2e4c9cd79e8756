"""Load a checkpoint on all ranks together, and find the newest one that is intact.

Loading is strict. Before a tensor is read, every file is compared with its checksum, and the names, shapes and dtypes
of the checkpoint with those that all ranks together ask for (under pipeline parallelism each asks for others). A load
that raises at this stage has changed nothing.

Verification reads the files a second time, each on one rank, as many at a time as there are ranks.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from megafp8.checkpoint import dcp, store
from megafp8.checkpoint.errors import (
    DamagedCheckpoint,
    IncompatibleCheckpoint,
    group_or_world,
    on_all_ranks,
    on_rank0,
)
from megafp8.checkpoint.files import CHECKSUMS_FILE, Checksum, find_damage
from megafp8.checkpoint.reader import CheckpointReader, first_intact
from megafp8.checkpoint.rectangles import Rectangles, TensorInfo, as_rectangles
from megafp8.host.messages import MAX_LISTED, join_first
from megafp8.host.object_store import AnyPath, ObjectPath, as_path
from megafp8.parallel import collectives
from megafp8.parallel.sharding import Shape

_REQUESTS = 16
"""Rectangles that a rank reads from object storage at a time."""
_MISSING, _UNEXPECTED = "missing in the checkpoint", "in the checkpoint but not in this model"
_MISMATCH, _INCOMPLETE = "of another shape or dtype", "only partly in the checkpoint"
_PROBLEMS = (_MISSING, _UNEXPECTED, _MISMATCH, _INCOMPLETE)

logger = logging.getLogger(__name__)


def load(
    checkpoint: AnyPath | str | CheckpointReader,
    tensors: Mapping[str, Rectangles | Tensor],
    *,
    optional: Callable[[str], bool] = lambda name: False,
    verify: bool = True,
) -> dict[str, Any]:
    """Load a checkpoint into `tensors`, in place, and return its metadata. Collective.

    `checkpoint`: a folder, whose files are verified first (`verify` false: all but the data files); or one that
    `newest_good` has opened and verified. The layout may differ from that of the save in any way. A name for which
    `optional` is true may be missing in the checkpoint, or be there in another shape or dtype (its tensor then keeps
    its values), or be in the checkpoint alone (it is then not read).

    Raises, on all ranks alike and before a tensor has changed, DamagedCheckpoint (a ValueError) where one of its files
    is not as it was written, IncompatibleCheckpoint (a ValueError) where names, global shapes or dtypes differ, and
    ValueError where there is no such folder. Damage that is found only while reading, as there are no checksums, is a
    ValueError with tensors partly loaded.
    """
    group = group_or_world()
    state = as_rectangles(tensors)
    opened = checkpoint if isinstance(checkpoint, CheckpointReader) else _open(as_path(checkpoint), verify, group)
    path, index = opened.path, opened.index
    infos = {name: TensorInfo(r.global_shape, r.dtype) for name, r in state.items()}
    unexpected = [name for name in _wanted_by_no_rank(state.keys(), index, group) if not optional(name)]
    differences = collectives.all_gather_objects(_differences(infos, index, optional), group)
    problems = _describe([*differences, {_UNEXPECTED: unexpected}])
    if problems:
        raise IncompatibleCheckpoint(f"{path} does not fit: {problems}")

    state = {name: rectangles for name, rectangles in state.items() if _stored_info(index, name) == infos[name]}

    def read() -> None:
        wanted = [(name, offset, view) for name, r in state.items() for offset, view in r.parts]
        read_one = partial(opened.read_into, verify=opened.sums is None)
        if not isinstance(path, ObjectPath):
            for one in wanted:
                read_one(*one)
            return
        _ = opened.rectangles  # found once, before threads ask for it
        with ThreadPoolExecutor(_REQUESTS) as executor:
            for done in [executor.submit(read_one, *one) for one in wanted]:
                done.result()

    opened.prepare(state)
    try:
        on_all_ranks(read, group)
    except ValueError as error:
        raise ValueError(f"{path} could not be read: {error}") from error
    return opened.metadata


def misfits(wanted: Mapping[str, tuple[Shape, torch.dtype]], index: Metadata, optional: Callable[[str], bool]) -> str:
    """What `load` would refuse if all ranks together hold the tensors `wanted`, by name; empty where nothing."""
    unexpected = [name for name in sorted(index.state_dict_metadata) if name not in wanted and not optional(name)]
    return _describe([_differences(wanted, index, optional), {_UNEXPECTED: unexpected}])


def newest_good(
    folder: AnyPath | str, *, verify: bool = True, group: ProcessGroup | None = None
) -> CheckpointReader | None:
    """The newest checkpoint under `folder` that is as it was written, or None where there is none. Collective.

    Damaged newer ones are renamed, with a warning that names the damage, and never deleted. Raises DamagedCheckpoint,
    with nothing renamed, where all are damaged. `verify` false: of data files only presence and size are checked; the
    small files are verified in any case.
    """
    group = group_or_world(group)
    # One rank lists the folder for all: on a lagging network file system they might see different ones.
    checkpoints = on_rank0(lambda: store.complete_checkpoints(folder), group)
    opened, damaged = first_intact([path for _, path in reversed(checkpoints)], lambda path: _open(path, verify, group))
    if opened is not None:
        renamed = on_rank0(lambda: [store.set_aside(bad) for bad, _ in damaged], group)
        for (bad, problem), new in zip(damaged, renamed if collectives.rank(group) == 0 else ()):
            text = "%s is damaged: %s. It is kept as %s; %s is used instead"
            logger.warning(text, bad, problem, new.name, opened.path)
    return opened


def _open(path: AnyPath, verify: bool, group: ProcessGroup | None) -> CheckpointReader:
    """Open a checkpoint on all ranks of `group`; `verify`: verify its data files too. Collective."""
    rank = collectives.rank(group)
    opened = on_all_ranks(lambda: CheckpointReader(path, check_sizes=rank == 0), group)
    if len(set(collectives.all_gather_objects(opened.identity, group))) > 1:
        raise ValueError(f"ranks see different files in {path}; all hosts must share the file system that it is on")
    if opened.sums is None and rank == 0:
        logger.warning("%s has no %s: only the sizes of its files were checked", path, CHECKSUMS_FILE)
    if verify and opened.sums is not None:
        sums = {name: sum_ for name, sum_ in opened.sums.items() if name not in (store.METADATA_FILE, dcp.INDEX_FILE)}
        largest_first = sorted(sums, key=lambda name: (-sums[name].size, name))  # balances the ranks
        files_to_verify = {name: sums[name] for name in largest_first[rank :: collectives.size(group)]}
        on_all_ranks(lambda: _verify_files(path, files_to_verify, opened.index), group)
    return opened


def _verify_files(path: AnyPath, sums: dict[str, Checksum], index: Metadata) -> None:
    """Raise DamagedCheckpoint where one of the files `sums` is not what was written, naming the tensors lost."""
    problems = []
    for name, expected in sums.items():
        problem = find_damage(path / name, expected)
        if problem and (path / name).is_file() and dcp.tensors_in(index, name):
            problem += f"; damaged in it: {join_first(dcp.damaged_tensors(path, index, name))}"
        if problem:
            problems.append(problem)
    if problems:
        raise DamagedCheckpoint("; ".join(problems[:MAX_LISTED]))


def _differences(
    wanted: Mapping[str, tuple[Shape, torch.dtype]], index: Metadata, optional: Callable[[str], bool]
) -> dict[str, list[str]]:
    """What this rank wants and the checkpoint does not have, by problem."""
    differences: dict[str, list[str]] = {}
    for name, info in wanted.items():
        entry, stored = index.state_dict_metadata.get(name), _stored_info(index, name)
        if stored != info and optional(name):
            continue
        if entry is None:
            differences.setdefault(_MISSING, []).append(name)
        elif not isinstance(entry, TensorStorageMetadata) or stored is None:
            differences.setdefault(_MISMATCH, []).append(f"{name} (no tensor in the checkpoint)")
        elif stored != info:
            differences.setdefault(_MISMATCH, []).append(
                f"{name} ({stored} in the checkpoint, {TensorInfo(*info)} here)"
            )
        elif sum(math.prod(chunk.sizes) for chunk in entry.chunks) != math.prod(stored.shape):
            differences.setdefault(_INCOMPLETE, []).append(name)
    return differences


def _stored_info(index: Metadata, name: str) -> TensorInfo | None:
    entry = index.state_dict_metadata.get(name)
    return TensorInfo(tuple(entry.size), entry.properties.dtype) if isinstance(entry, TensorStorageMetadata) else None


def _wanted_by_no_rank(wanted_here: Collection[str], index: Metadata, group: ProcessGroup | None) -> list[str]:
    """Tensors of the checkpoint that no rank asks for. Collective; one byte a tensor is communicated."""
    names = sorted(index.state_dict_metadata)
    asked = torch.tensor([name in wanted_here for name in names], dtype=torch.uint8)
    collectives.all_reduce(asked, group, "max")
    return [name for name, wanted in zip(names, asked.tolist()) if not wanted]


def _describe(differences: list[dict[str, list[str]]]) -> str:
    """Names by problem, of all `differences`, in one line."""
    names = {problem: sorted({name for one in differences for name in one.get(problem, ())}) for problem in _PROBLEMS}
    return "; ".join(
        f"{len(wrong)} {'tensor' if len(wrong) == 1 else 'tensors'} {problem}: {join_first(wrong)}"
        for problem, wrong in names.items()
        if wrong
    )
