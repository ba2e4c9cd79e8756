"""Load a checkpoint on all ranks together, and find the newest intact checkpoint.

Loading is strict. Before any tensor is read, every file is compared with its checksum, and the names, shapes and dtypes
in the checkpoint are compared with the tensors that all ranks together request. (Under pipeline parallelism, each rank
requests other tensors.) A load that raises at this stage has changed nothing.

Verification reads the files an additional time. Each file is read by one rank, and the ranks read in parallel.
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
"""Number of rectangles that a rank reads from object storage in parallel."""
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

    The layout may differ from the saving run's layout in any way. Errors are raised on every rank, before any tensor
    has changed. There is one exception: without checksums, damage may only be noticed while tensors are read; this
    raises a ValueError when some tensors have already been loaded.

    Args:
        checkpoint: Folder of the checkpoint, whose files are verified first; or a checkpoint that `newest_good` has
            opened and verified.
        tensors: Tensors to fill, by global name. A plain tensor is not sharded.
        optional: Returns whether a tensor of this name may differ. If it is missing in the checkpoint, or has another
            shape or dtype there, the tensor in `tensors` keeps its values. If it is only in the checkpoint, it is not
            read.
        verify: Whether to verify the content of the data files. The small files are always verified.

    Raises:
        DamagedCheckpoint: A file differs from its checksum, is truncated, or is missing.
        IncompatibleCheckpoint: Names, global shapes or dtypes differ.
        ValueError: The folder does not exist or cannot be read.
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
        _ = opened.rectangles  # computed once, before the threads use it
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
    """Describe why `load` would refuse the checkpoint; return an empty string if it would not.

    `wanted` holds the global shape and dtype of the tensors of all ranks together, by name.
    """
    unexpected = [name for name in sorted(index.state_dict_metadata) if name not in wanted and not optional(name)]
    return _describe([_differences(wanted, index, optional), {_UNEXPECTED: unexpected}])


def newest_good(
    folder: AnyPath | str, *, verify: bool = True, group: ProcessGroup | None = None
) -> CheckpointReader | None:
    """Return the newest intact checkpoint under `folder`, or None if the folder has no checkpoints. Collective.

    Newer checkpoints that are damaged are renamed, with a warning that describes the damage, and never deleted. If all
    checkpoints are damaged, this raises DamagedCheckpoint and renames nothing. If `verify` is False, only the presence
    and size of the data files are checked. The small files are always verified.
    """
    group = group_or_world(group)
    # One rank lists the folder for all ranks: on a lagging network file system, ranks might see different checkpoints.
    checkpoints = on_rank0(lambda: store.complete_checkpoints(folder), group)
    opened, damaged = first_intact([path for _, path in reversed(checkpoints)], lambda path: _open(path, verify, group))
    if opened is not None:
        renamed = on_rank0(lambda: [store.set_aside(bad) for bad, _ in damaged], group)
        for (bad, problem), new in zip(damaged, renamed if collectives.rank(group) == 0 else ()):
            text = "%s is damaged: %s. It is kept as %s; %s is used instead"
            logger.warning(text, bad, problem, new.name, opened.path)
    return opened


def _open(path: AnyPath, verify: bool, group: ProcessGroup | None) -> CheckpointReader:
    """Open a checkpoint on all ranks of `group`. If `verify` is True, verify its data files, too. Collective."""
    rank = collectives.rank(group)
    opened = on_all_ranks(lambda: CheckpointReader(path, check_sizes=rank == 0), group)
    if len(set(collectives.all_gather_objects(opened.identity, group))) > 1:
        raise ValueError(f"ranks see different files in {path}; all hosts must share the file system of this folder")
    if opened.sums is None and rank == 0:
        logger.warning("%s has no %s: only the sizes of its files were checked", path, CHECKSUMS_FILE)
    if verify and opened.sums is not None:
        sums = {name: sum_ for name, sum_ in opened.sums.items() if name not in (store.METADATA_FILE, dcp.INDEX_FILE)}
        largest_first = sorted(sums, key=lambda name: (-sums[name].size, name))  # balances the ranks
        files_to_verify = {name: sums[name] for name in largest_first[rank :: collectives.size(group)]}
        on_all_ranks(lambda: _verify_files(path, files_to_verify, opened.index), group)
    return opened


def _verify_files(path: AnyPath, sums: dict[str, Checksum], index: Metadata) -> None:
    """Raise DamagedCheckpoint, with the names of the lost tensors, if a file differs from its checksum in `sums`."""
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
    """Return the tensors in `wanted` that the checkpoint cannot provide, by problem."""
    differences: dict[str, list[str]] = {}
    for name, info in wanted.items():
        entry, stored = index.state_dict_metadata.get(name), _stored_info(index, name)
        if stored != info and optional(name):
            continue
        if entry is None:
            differences.setdefault(_MISSING, []).append(name)
        elif not isinstance(entry, TensorStorageMetadata) or stored is None:
            differences.setdefault(_MISMATCH, []).append(f"{name} (not a tensor in the checkpoint)")
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
    """Return the tensors of the checkpoint that no rank requests. Collective; it communicates one byte per tensor."""
    names = sorted(index.state_dict_metadata)
    asked = torch.tensor([name in wanted_here for name in names], dtype=torch.uint8)
    collectives.all_reduce(asked, group, "max")
    return [name for name, wanted in zip(names, asked.tolist()) if not wanted]


def _describe(differences: list[dict[str, list[str]]]) -> str:
    """Return one line that lists the tensors of all `differences` by problem."""
    names = {problem: sorted({name for one in differences for name in one.get(problem, ())}) for problem in _PROBLEMS}
    return "; ".join(
        f"{len(wrong)} {'tensor' if len(wrong) == 1 else 'tensors'} {problem}: {join_first(wrong)}"
        for problem, wrong in names.items()
        if wrong
    )
