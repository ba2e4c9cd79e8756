"""Search an exception and its causes for a lost connection to another rank, a full disk, or any OSError.

This module must not import torch, because `megafp8.training.errors` works without it.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator

# Messages of gloo, NCCL and the TCP store on a rank after the process of its peer has ended.
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
    """Yield `error` and its causes, each once, even if a chain of causes forms a cycle."""
    seen: list[BaseException] = []
    while error is not None and not any(error is one for one in seen):
        seen.append(error)
        yield error
        error = error.__cause__ or error.__context__


def lost_connection(error: BaseException | None) -> bool:
    """Return whether `error` or one of its causes is a lost connection to another rank.

    The original failure is then on that rank.
    """
    return any(
        isinstance(one, RuntimeError) and any(phrase in str(one) for phrase in _LOST_CONNECTION)
        for one in causes(error)
    )


def no_space(error: BaseException | None) -> OSError | None:
    """Return the error of a full disk, quota or file size limit among `error` and its causes, or None."""
    return os_error(error, errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def os_error(error: BaseException | None, *numbers: int) -> OSError | None:
    """Return the OSError with one of these error numbers among `error` and its causes, or None."""
    return next((one for one in causes(error) if isinstance(one, OSError) and one.errno in numbers), None)
