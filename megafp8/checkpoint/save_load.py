"""Save and load, all ranks together.

Both are collective, and both keep one rule: what fails on one rank fails on all, with the same message. Otherwise one
rank would raise while the others wait for it until the time limit. So each stage (look, write, publish) runs on its
ranks, its outcome is gathered, and only then does the next begin; the gathering is the barrier too.

Loading is strict. Before a tensor is read, names, shapes and dtypes of the checkpoint are held against those that *all*
ranks together ask for (under pipeline parallelism each asks for others), and every file against the size that the index
promises. A load that raises ValueError at this stage has changed nothing.

State is tensors; everything else is in metadata.json, which a person can read.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from megafp8 import collectives
from megafp8.checkpoint import dcp, store
from megafp8.checkpoint.rectangles import Rectangles
from megafp8.sharding import Shape

T = TypeVar("T")
Kind = tuple[Shape, torch.dtype]

_LISTED = 5
_log = logging.getLogger(__name__)


def save(
    folder: str | Path,
    step: int,
    tensors: Mapping[str, Rectangles | Tensor],
    metadata: dict[str, Any],
    *,
    group: ProcessGroup | None = None,
    keep_last: int | None = None,
) -> Path:
    """Save `tensors` of all ranks as the checkpoint of `step` under `folder`, and return its path. Collective.

    A plain tensor is one that is not cut: every rank that names it holds the same values. `metadata` must be JSON; rank
    0's is written, with format version, step, date and versions added. `group` None means the whole job, or this
    process where torch.distributed is not initialised. `keep_last`: how many complete checkpoints may stay, this one
    included; older ones are removed once this one is visible.

    A step that is there already is never overwritten. If its consumed samples, tokens and tokenizer fingerprint are
    those of `metadata`, it is the same step of the same run (which resumed there and had nothing more to do): the call
    says so in the log and returns. Otherwise it raises ValueError. RuntimeError where writing fails, for instance on a
    full disk; the earlier checkpoints are untouched.
    """
    if keep_last is not None and keep_last < 1:
        raise ValueError(f"keep_last is {keep_last}; it must be at least 1, or None to keep all checkpoints")
    group = _whole_job(group)
    final, hidden = store.step_folder(folder, step), store.incomplete_folder(folder, step)
    begun = _on_first(lambda: store.begin(folder, step, metadata) is not None, group)
    if not begun:
        if _rank(group) == 0:
            _log.warning("%s is there already, from this same step; it was left as it is", final)
        return final
    try:
        dcp.write(hidden, _as_rectangles(tensors), group)
    except CheckpointException as error:
        raise RuntimeError(f"saving {final} failed: {_reasons(error)}. Earlier checkpoints are untouched") from error
    _on_first(lambda: store.publish(folder, step, keep_last), group)
    return final


def load(
    path: str | Path,
    tensors: Mapping[str, Rectangles | Tensor],
    *,
    group: ProcessGroup | None = None,
    optional: Callable[[str], bool] = lambda name: False,
) -> dict[str, Any]:
    """Load the checkpoint folder `path` into `tensors`, in place, and return its metadata. Collective.

    The layout may differ from that of the save in any way. A name for which `optional` is true may be missing in the
    checkpoint (its tensor then keeps its values) or be in the checkpoint alone (it is then not read).

    Raises ValueError, on all ranks alike, where the folder or one of its files is missing, damaged or truncated, and
    where names, global shapes or dtypes differ; no tensor has changed then. A data file that has its size but is
    damaged inside is found only while reading: ValueError too, with tensors partly loaded.
    """
    path, group = Path(path), _whole_job(group)
    state = _as_rectangles(tensors)
    metadata, index = _together(lambda: _open(path, check_files=_rank(group) == 0), group)
    wanted = collectives.all_gather_objects({name: (r.global_shape, r.dtype) for name, r in state.items()}, group)
    problems = _differences(wanted, index, optional)
    if problems:
        raise ValueError(f"{path} does not fit: " + "; ".join(problems))
    state = {name: rectangles for name, rectangles in state.items() if name in index.state_dict_metadata}
    try:
        dcp.read(path, index, state, group)
    except CheckpointException as error:
        raise ValueError(f"{path} could not be read: {_reasons(error)}") from error
    return metadata


def _open(path: Path, check_files: bool) -> tuple[dict[str, Any], Metadata]:
    metadata, index = store.read_metadata(path), dcp.read_index(path)
    if check_files:
        dcp.check_data_files(path, index)
    return metadata, index


def _differences(wanted_by_rank: list[dict[str, Kind]], index: Metadata, optional: Callable[[str], bool]) -> list[str]:
    """What is wrong between the tensors all ranks want and those of the index, one string a kind of problem."""
    wanted: dict[str, Kind] = {}
    for names in wanted_by_rank:
        wanted.update(names)
    saved = index.state_dict_metadata
    misfits, holes = [], []
    for names in wanted_by_rank:
        for name, (shape, dtype) in names.items():
            entry = saved.get(name)
            if entry is None:
                continue
            if not isinstance(entry, TensorStorageMetadata):
                misfits.append(f"{name} (no tensor in the checkpoint)")
            elif (tuple(entry.size), entry.properties.dtype) != (shape, dtype):
                there = f"{_kind(tuple(entry.size), entry.properties.dtype)} in the checkpoint"
                misfits.append(f"{name} ({there}, {_kind(shape, dtype)} here)")
            elif sum(math.prod(chunk.sizes) for chunk in entry.chunks) != math.prod(shape):
                holes.append(name)
    found = {
        "missing in the checkpoint": [n for n in wanted if n not in saved and not optional(n)],
        "in the checkpoint but not in this model": [n for n in saved if n not in wanted and not optional(n)],
        "of another shape or dtype": misfits,
        "only partly in the checkpoint": holes,
    }
    return [_listing(what, sorted(set(names))) for what, names in found.items() if names]


def _kind(shape: Shape, dtype: torch.dtype) -> str:
    return f"{list(shape)} {str(dtype).removeprefix('torch.')}"


def _listing(what: str, names: list[str]) -> str:
    more = f", and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return f"{len(names)} {'tensor' if len(names) == 1 else 'tensors'} {what}: {', '.join(names[:_LISTED])}{more}"


def _as_rectangles(tensors: Mapping[str, Rectangles | Tensor]) -> dict[str, Rectangles]:
    return {name: Rectangles.whole(value) if isinstance(value, Tensor) else value for name, value in tensors.items()}


def _whole_job(group: ProcessGroup | None) -> ProcessGroup | None:
    """`group`, or everyone there is; None means this process alone."""
    return dist.group.WORLD if group is None and dist.is_initialized() else group


def _rank(group: ProcessGroup | None) -> int:
    return 0 if group is None else group.rank()


def _together(action: Callable[[], T], group: ProcessGroup | None) -> T:
    """Run `action` on every rank and return its value; where it raised on some rank, all ranks raise.

    All ranks raise one message: a ValueError, or a RuntimeError where a rank met anything but a ValueError.
    """
    failure: Exception | None = None
    try:
        value = action()
    except Exception as error:
        failure = error
    text = None if failure is None else str(failure) or type(failure).__name__
    outcomes = collectives.all_gather_objects((text, failure is None or isinstance(failure, ValueError)), group)
    failed = {rank: text for rank, (text, _) in enumerate(outcomes) if text is not None}
    if not failed:
        return value
    texts = list(dict.fromkeys(failed.values()))
    first_ranks = [next(rank for rank, text in failed.items() if text == one) for one in texts[:_LISTED]]
    message = texts[0] if len(texts) == 1 else "; ".join(f"rank {rank}: {failed[rank]}" for rank in first_ranks)
    kind = ValueError if all(harmless for _, harmless in outcomes) else RuntimeError
    raise kind(message) from failure


def _on_first(action: Callable[[], T], group: ProcessGroup | None) -> T:
    """Run `action` on the first rank and return its value (picklable) on all; all raise where it raised."""
    value = _together(lambda: action() if _rank(group) == 0 else None, group)
    return collectives.all_gather_objects(value, group)[0]


def _reasons(error: CheckpointException) -> str:
    """DCP's failures without its tracebacks."""
    failures = [f"rank {rank}: {type(cause).__name__}: {cause}" for rank, (cause, _) in sorted(error.failures.items())]
    more = f"; and {len(failures) - _LISTED} more ranks" if len(failures) > _LISTED else ""
    return "; ".join(failures[:_LISTED]) + more
