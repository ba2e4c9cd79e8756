"""What fails on one rank fails on all, with the same message.

Otherwise one rank would raise while the others wait for it until the time limit. So each stage of a save or a load
(look, write, publish) runs on its ranks, its outcome is gathered, and only then does the next begin; the gathering is
the barrier too.

Some failures are told apart because somebody acts on them: a damaged checkpoint makes a run fall back to an older one,
a checkpoint of another run and a folder in use end a job before it has begun.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch.distributed as dist
from torch.distributed import ProcessGroup

from megafp8.distributed import collectives

T = TypeVar("T")

LISTED = 5
"""How many of many things a message names."""


class DamagedCheckpoint(ValueError):
    """A file of a checkpoint is missing, shortened or altered. Another checkpoint may be good."""


class IncompatibleCheckpoint(ValueError):
    """The checkpoint is as it was written, and this run cannot continue from it."""


class FolderInUse(ValueError):
    """Another job writes to the folder."""


_KINDS = (DamagedCheckpoint, IncompatibleCheckpoint, FolderInUse, ValueError)


def together(action: Callable[[], T], group: ProcessGroup | None) -> T:
    """Run `action` on every rank and return its value; where it raised on some rank, all ranks raise.

    All ranks raise one message: of the kind that all failures are, or a RuntimeError where a rank met anything but a
    ValueError.
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
    first = {text: rank for rank, (text, _) in reversed(failed.items())}  # who says it first
    kinds = {kind for _, kind in failed.values()}
    common = kinds.pop() if len(kinds) == 1 else RuntimeError if RuntimeError in kinds else ValueError
    if len(first) == 1 and common is not RuntimeError:
        raise common(next(iter(first))) from failure
    messages = [f"rank {rank}: {text}" for text, rank in sorted(first.items(), key=lambda one: one[1])]
    raise common(listing(messages, "; ")) from failure


def on_first(action: Callable[[], T], group: ProcessGroup | None) -> T:
    """Run `action` on the first rank and return its value (picklable) on all; all raise where it raised."""
    value = together(lambda: action() if rank_in(group) == 0 else None, group)
    return collectives.broadcast_object(value, group)


def whole_job(group: ProcessGroup | None) -> ProcessGroup | None:
    """`group`, or everyone there is; None means this process alone."""
    return dist.group.WORLD if group is None and dist.is_initialized() else group


def rank_in(group: ProcessGroup | None) -> int:
    """This rank's place in `group`; 0 for None."""
    return 0 if group is None else group.rank()


def listing(names: Sequence[str], separator: str = ", ") -> str:
    """The first of `names`, and how many more there are."""
    more = f"{separator}and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return separator.join(names[:LISTED]) + more
