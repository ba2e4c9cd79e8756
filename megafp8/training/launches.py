"""What started a run: launches.jsonl in the run folder has one object for each start of its command."""

from __future__ import annotations

import datetime
import json
import shlex
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch

import megafp8
from megafp8.distributed.collectives import gather_objects
from megafp8.parallel_state import ParallelState

LAUNCHES_FILE = "launches.jsonl"


def source_commit() -> str | None:
    """Git commit of the source that runs, with `-dirty` behind it where files were changed; None without git."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def record_launch(folder: Path, parallel: ParallelState, step: int) -> None:
    """Append this start, after `step` steps, to launches.jsonl in `folder`. Collective; rank 0 writes.

    `hosts`: number of ranks on each host, in the order of ranks.
    """
    hosts = gather_objects(socket.gethostname(), parallel.world.group)
    if hosts is None or not parallel.world.is_first:
        return
    launch: dict[str, Any] = {
        "time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "step": step,
        "command": shlex.join(sys.argv),
        "directory": str(Path.cwd()),
        "commit": source_commit(),
        "megafp8_version": megafp8.__version__,
        "torch_version": str(torch.__version__),
        "python": sys.version.split()[0],
        "ranks": parallel.world_size,
        "hosts": dict(Counter(hosts)),
    }
    with (folder / LAUNCHES_FILE).open("a", encoding="utf-8") as file:
        file.write(json.dumps(launch) + "\n")
