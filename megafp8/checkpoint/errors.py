"""Checkpoint errors, and collectives that raise the same error on every rank.

If only one rank raised, the other ranks would wait for it until the collective timeout. So each stage of a save or load
gathers the outcome of every rank before the next stage begins. The gathering also serves as the barrier.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist
from torch.distributed import ProcessGroup

from megafp8.host.messages import join_first
from megafp8.parallel import collectives

T = TypeVar("T")


class DamagedCheckpoint(ValueError):
    """A file of a checkpoint is missing, truncated or altered. A run falls back to an older checkpoint."""


class IncompatibleCheckpoint(ValueError):
    """The checkpoint is intact, but this run cannot continue from it."""


class SaveFailed(RuntimeError):
    """A checkpoint could not be written: the disk is full, the file system raised another error, or a rank failed."""


class FolderInUse(ValueError):
    """Another job is writing to the folder."""


_KINDS = (DamagedCheckpoint, IncompatibleCheckpoint, FolderInUse, ValueError)


def on_all_ranks(action: Callable[[], T], group: ProcessGroup | None) -> T:
    """Run `action` on every rank and return this rank's value. If any rank raised, all ranks raise. Collective.

    All ranks raise the same message. The error has the common type of the failures, or is a RuntimeError if any rank
    raised something other than a ValueError.
    """
    failure: Exception | None = None
    try:
        value = action()
    except Exception as error:
        failure = error
    kind = next((kind for kind in _KINDS if isinstance(failure, kind)), RuntimeError)
    text = str(failure) if kind is not RuntimeError else f"{type(failure).__name__}: {failure}"
    outcomes = collectives.all_gather_objects(None if failure is None else (text, kind), group)
    failed = {rank: outcome for rank, outcome in enumerate(outcomes) if outcome is not None}
    if not failed:
        return value
    first_rank = {text: rank for rank, (text, _) in reversed(failed.items())}
    kinds = {kind for _, kind in failed.values()}
    common = kinds.pop() if len(kinds) == 1 else RuntimeError if RuntimeError in kinds else ValueError
    if len(first_rank) == 1 and common is not RuntimeError:
        raise common(next(iter(first_rank))) from failure
    messages = [f"rank {rank}: {text}" for text, rank in sorted(first_rank.items(), key=lambda one: one[1])]
    raise common(join_first(messages, "; ")) from failure


def on_rank0(action: Callable[[], T], group: ProcessGroup | None) -> T:
    """Run `action` on rank 0 of `group` and return its picklable value on all ranks. If it raises, all ranks raise."""
    value = on_all_ranks(lambda: action() if collectives.rank(group) == 0 else None, group)
    return collectives.broadcast_object(value, group)


def group_or_world(group: ProcessGroup | None = None) -> ProcessGroup | None:
    """Return `group`, or the world group if it is None; None if torch.distributed is not initialized."""
    return dist.group.WORLD if group is None and dist.is_initialized() else group
