"""Which processes still run: their start times, and names of files that tell which process wrote them.

A process is known by host, PID namespace (such as that of a container), number and start time: numbers are reused, and
are valid within their namespace only.
"""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path


def process_start(pid: int | str) -> str | None:
    """Start time of process `pid` in kernel ticks; None where it does not run, or there is no /proc."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    state, *fields = text.rpartition(")")[2].split()  # the name in parentheses may hold anything
    return None if state in "ZX" else fields[18]


def pid_namespace() -> str | None:
    """The PID namespace of this process, such as `pid:[4026531836]`; None where there is no /proc."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return None


def incomplete_path(path: Path) -> Path:
    """The path under which this process writes the file `path` until it is complete and is renamed.

    It names host, PID namespace, number and start time of the process.
    """
    return path.with_name(f"{path.name}.incomplete-{_here()}-{os.getpid()}-{process_start('self')}")


def remove_abandoned(path: Path) -> None:
    """Remove the files that processes which have ended left under their names `incomplete_path(path)`.

    Files of other hosts and namespaces stay: their processes may run.
    """
    pattern = re.compile(rf"{re.escape(path.name)}\.incomplete-{re.escape(_here())}-(\d+)-(\d+)")
    for file in path.parent.iterdir() if path.parent.is_dir() else ():
        match = pattern.fullmatch(file.name)
        if match is not None and process_start(match[1]) != match[2]:
            file.unlink(missing_ok=True)


def _here() -> str:
    """Host and PID namespace."""
    return f"{socket.gethostname()}-{''.join(filter(str.isdigit, pid_namespace() or ''))}"
