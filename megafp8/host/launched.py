"""Number of ranks of this job as set by a launcher, and advice if the variables belong to another job.

torchrun, `megafp8 launch` and other launchers set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT. A shell or
container that ran a job may still have these variables. A command started there without a launcher then waits for ranks
that never come.
"""

from __future__ import annotations

import os

_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def launched_ranks() -> int:
    """Return the number of ranks of the job, 1 without a launcher.

    Raises ValueError for a combination of variables that no launcher sets.
    """
    rank, ranks = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
    if rank is None and ranks is None:
        return 1
    if rank is None or ranks is None:
        raise ValueError(f"a launcher sets both RANK and WORLD_SIZE; {unset_advice()}")
    if not (rank.isdecimal() and ranks.isdecimal() and int(rank) < int(ranks)):
        raise ValueError(f"RANK is a number from 0 to WORLD_SIZE - 1; {unset_advice()}")
    return int(ranks)


def unset_advice() -> str:
    """Return the launcher's variables in the environment, and the command that removes them."""
    names = [name for name in _VARIABLES if name in os.environ]
    values = ", ".join(f"{name}={os.environ[name]}" for name in names)
    return f"the environment has {values}; if these are left from another job: unset {' '.join(names)}"


def on_launched_ranks(source: str) -> str:
    """Return the name of a config for messages, with the number of ranks unless a known launcher set it.

    Known launchers are megafp8's and torch's.
    """
    ranks = launched_ranks()
    if ranks == 1 or "TORCHELASTIC_RUN_ID" in os.environ:
        return source
    return f"{source}, on {ranks} ranks ({unset_advice()})"
