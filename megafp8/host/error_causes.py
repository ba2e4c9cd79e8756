"""Search of an exception and its chain of causes: for a lost connection to another rank, a full disk, any OSError.

This module must not import torch: `megafp8.training.errors` does without it.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator

# Messages of gloo, NCCL and the TCP store on a rank whose peer has ended its process.
_LOST_CONNECTION = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Connection refused",
    "Broken pipe",
    "Connection was likely closed",
    "recvValue failed",
    "remote process exited",
)


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """`error` and what caused it, each once: a chain of causes may lead back to an exception that it began with."""
    seen: list[BaseException] = []
    while error is not None and not any(error is one for one in seen):
        seen.append(error)
        yield error
        error = error.__cause__ or error.__context__


def lost_connection(error: BaseException | None) -> bool:
    """Whether `error`, or what caused it, is a lost connection to another rank, so that the cause is elsewhere."""
    return any(
        isinstance(one, RuntimeError) and any(phrase in str(one) for phrase in _LOST_CONNECTION)
        for one in causes(error)
    )


def no_space(error: BaseException | None) -> OSError | None:
    """The error of a full disk, quota or file size limit that `error` is or was caused by, if there is one."""
    return os_error(error, errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def os_error(error: BaseException | None, *numbers: int) -> OSError | None:
    """The OSError with one of these numbers that `error` is or was caused by, if there is one."""
    return next((one for one in causes(error) if isinstance(one, OSError) and one.errno in numbers), None)
