"""Load a checkpoint, all ranks together, and find one that is good.

Loading is strict. Before a tensor is read, every file is held against its checksum, and names, shapes and dtypes of the
checkpoint against those that *all* ranks together ask for (under pipeline parallelism each asks for others). A load
that raises ValueError at this stage has changed nothing.

The checksums cost a second reading of the files, each by one rank, as many at a time as there are ranks; what a rank
has just read is often still in memory when it is loaded.

State is tensors; everything else is in metadata.json, which a person can read.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from megafp8.checkpoint import dcp, store
from megafp8.checkpoint.checksums import CHECKSUMS_FILE, Checksum, find_damage
from megafp8.checkpoint.failures import (
    LISTED,
    DamagedCheckpoint,
    IncompatibleCheckpoint,
    listing,
    on_first,
    rank_in,
    together,
    whole_job,
)
from megafp8.checkpoint.opened import OpenedCheckpoint, all_damaged, open_checkpoint
from megafp8.checkpoint.rectangles import Rectangles, as_rectangles
from megafp8.distributed import collectives
from megafp8.distributed.sharding import Shape

Kind = tuple[Shape, torch.dtype]

_MISSING, _UNWANTED = "missing in the checkpoint", "in the checkpoint but not in this model"
_MISFIT, _HOLES = "of another shape or dtype", "only partly in the checkpoint"
_KINDS = (_MISSING, _UNWANTED, _MISFIT, _HOLES)

_log = logging.getLogger(__name__)


def load(
    checkpoint: str | Path | OpenedCheckpoint,
    tensors: Mapping[str, Rectangles | Tensor],
    *,
    group: ProcessGroup | None = None,
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
    ValueError where there is no such folder. Damage that is found only while reading, for want of checksums, is a
    ValueError with tensors partly loaded.
    """
    group = whole_job(group)
    state = as_rectangles(tensors)
    opened = checkpoint if isinstance(checkpoint, OpenedCheckpoint) else _open(Path(checkpoint), verify, group)
    path, index = opened.path, opened.index
    kinds = {name: (r.global_shape, r.dtype) for name, r in state.items()}
    own = _differences(kinds, index, optional)
    unwanted = [name for name in _wanted_by_nobody(state.keys(), index, group) if not optional(name)]
    found = collectives.all_gather_objects(own, group)
    problems = _describe([*found, {_UNWANTED: unwanted}])
    if problems:
        raise IncompatibleCheckpoint(f"{path} does not fit: {problems}")
    state = {name: rectangles for name, rectangles in state.items() if _is_there(name, kinds[name], index)}
    try:
        dcp.read(path, index, state, group)
    except CheckpointException as error:
        raise ValueError(f"{path} could not be read: {_reasons(error)}") from error
    return opened.metadata


def misfits(wanted: Mapping[str, Kind], index: Metadata, optional: Callable[[str], bool]) -> str:
    """What `load` would refuse where all ranks together hold the tensors `wanted`, by name; empty where nothing."""
    unwanted = [name for name in sorted(index.state_dict_metadata) if name not in wanted and not optional(name)]
    return _describe([_differences(wanted, index, optional), {_UNWANTED: unwanted}])


def _describe(found: list[dict[str, list[str]]]) -> str:
    """Names by kind of problem, of all `found`, in one line."""
    names = {kind: sorted({name for one in found for name in one.get(kind, ())}) for kind in _KINDS}
    return "; ".join(_count(kind, wrong) for kind, wrong in names.items() if wrong)


def _is_there(name: str, kind: Kind, index: Metadata) -> bool:
    """Whether the checkpoint has the tensor `name` in this shape and dtype."""
    entry = index.state_dict_metadata.get(name)
    return isinstance(entry, TensorStorageMetadata) and (tuple(entry.size), entry.properties.dtype) == kind


def newest_good(
    folder: str | Path, *, verify: bool = True, group: ProcessGroup | None = None
) -> OpenedCheckpoint | None:
    """The newest checkpoint under `folder` that is as it was written, or None where there is none. Collective.

    Damaged newer ones are set aside under another name, with a warning that names what is wrong with them, and never
    deleted. Raises DamagedCheckpoint, with nothing renamed, where all are damaged. Where `verify` is false, only the
    presence and the sizes of data files are looked at; the small files are verified in any case.
    """
    group = whole_job(group)
    # One rank looks and tells the others: on a lagging network file system they might see different folders.
    found = on_first(lambda: store.complete_checkpoints(folder), group)
    damaged: list[tuple[Path, str]] = []
    for _, path in reversed(found):
        try:
            opened = _open(path, verify, group)
        except DamagedCheckpoint as error:
            damaged.append((path, str(error)))
            continue
        aside = on_first(lambda: [store.set_aside(bad) for bad, _ in damaged], group)
        if rank_in(group) == 0:
            for (bad, problem), there in zip(damaged, aside):
                _log.warning("%s is damaged: %s. It is kept as %s; %s is used instead", bad, problem, there.name, path)
        return opened
    if damaged:
        raise all_damaged(folder, [problem for _, problem in damaged])
    return None


def _open(path: Path, verify: bool, group: ProcessGroup | None) -> OpenedCheckpoint:
    """Open a checkpoint on all ranks of `group`; `verify`: its data files too are what was written. Collective."""
    rank = rank_in(group)
    opened = together(lambda: open_checkpoint(path, sizes=rank == 0), group)
    if len(set(collectives.all_gather_objects(opened.identity, group))) > 1:
        raise ValueError(f"ranks see different files in {path}; all hosts must share the file system that it is on")
    if opened.sums is None and rank == 0:
        _log.warning("%s has no %s: only the sizes of its files were checked", path, CHECKSUMS_FILE)
    if verify and opened.sums is not None:
        sums = {name: sum_ for name, sum_ in opened.sums.items() if name not in (store.METADATA_FILE, dcp.INDEX_FILE)}
        largest_first = sorted(sums, key=lambda name: (-sums[name].size, name))  # each rank has as much to read
        own = {name: sums[name] for name in largest_first[rank :: collectives.size(group)]}
        together(lambda: _compare(path, own, opened.index), group)
    return opened


def _compare(path: Path, sums: dict[str, Checksum], index: Metadata) -> None:
    """Raise DamagedCheckpoint where one of the files `sums` is not what was written, with the tensors it holds."""
    problems = []
    for name, expected in sums.items():
        problem = find_damage(path / name, expected)
        if problem and (path / name).is_file() and dcp.tensors_in(index, name):
            problem += f"; damaged in it: {listing(dcp.damaged_tensors(path, index, name))}"
        if problem:
            problems.append(problem)
    if problems:
        raise DamagedCheckpoint("; ".join(problems[:LISTED]))


def _differences(wanted: Mapping[str, Kind], index: Metadata, optional: Callable[[str], bool]) -> dict[str, list[str]]:
    """What this rank wants and the checkpoint does not have, by kind of problem; kinds without any are left out."""
    found: dict[str, list[str]] = {}
    for name, (shape, dtype) in wanted.items():
        entry = index.state_dict_metadata.get(name)
        if not _is_there(name, (shape, dtype), index) and optional(name):
            continue
        if entry is None:
            found.setdefault(_MISSING, []).append(name)
        elif not isinstance(entry, TensorStorageMetadata):
            found.setdefault(_MISFIT, []).append(f"{name} (no tensor in the checkpoint)")
        elif (tuple(entry.size), entry.properties.dtype) != (shape, dtype):
            there = f"{_kind(tuple(entry.size), entry.properties.dtype)} in the checkpoint"
            found.setdefault(_MISFIT, []).append(f"{name} ({there}, {_kind(shape, dtype)} here)")
        elif sum(math.prod(chunk.sizes) for chunk in entry.chunks) != math.prod(shape):
            found.setdefault(_HOLES, []).append(name)
    return found


def _wanted_by_nobody(own: Collection[str], index: Metadata, group: ProcessGroup | None) -> list[str]:
    """Tensors of the checkpoint that no rank asks for. Collective; a byte a tensor travels, however many ranks."""
    names = sorted(index.state_dict_metadata)
    asked = torch.tensor([name in own for name in names], dtype=torch.uint8)
    collectives.all_reduce(asked, group, "max")
    return [name for name, wanted in zip(names, asked.tolist()) if not wanted]


def _kind(shape: Shape, dtype: torch.dtype) -> str:
    return f"{list(shape)} {str(dtype).removeprefix('torch.')}"


def _count(what: str, names: list[str]) -> str:
    return f"{len(names)} {'tensor' if len(names) == 1 else 'tensors'} {what}: {listing(names)}"


def _reasons(error: CheckpointException) -> str:
    """DCP's failures without its tracebacks."""
    failures = [f"rank {rank}: {type(cause).__name__}: {cause}" for rank, (cause, _) in sorted(error.failures.items())]
    more = f"; and {len(failures) - LISTED} more ranks" if len(failures) > LISTED else ""
    return "; ".join(failures[:LISTED]) + more
