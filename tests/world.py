"""Ranks of tests (`megafp8.prove.local_ranks`): started once a session, they run many cases.

def _case(parallel_size):            # module level, so that it can be pickled; runs on every rank
    ... return value

def test_it(world4):
    values = world4.run(_case, 2, ranks=2)
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from functools import partial
from multiprocessing.context import ForkServerContext
from typing import Any

from megafp8.prove.local_ranks import PRELOADED, LocalRanks

_FOR_TESTS = ["hypothesis", "pytest"]


class Ranks(LocalRanks):
    """The processes of a session, each started when a case first needs it."""

    def __init__(self) -> None:
        super().__init__(_FOR_TESTS)


def fork_server() -> ForkServerContext:
    """Return the context of the session's fork server, for processes that are no ranks of a world.

    The server has imported torch and the package, so its processes start within milliseconds.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOADED, *_FOR_TESTS])  # counts if this starts the server
    return context


class World:
    """The first `size` ranks of a session. Use through the fixtures `world2`, `world4`, `world8`."""

    def __init__(self, ranks: LocalRanks, size: int) -> None:
        self._ranks, self.size = ranks, size

    def run(
        self, function: Callable[..., Any], *args: Any, ranks: int | None = None, timeout: float = 120, **options: Any
    ) -> list[Any]:
        """Run `function(*args, **options)` on the first `ranks` processes and return what each returned, by rank."""
        return self._ranks.run(partial(function, **options), args, ranks or self.size, timeout)
