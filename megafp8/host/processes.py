"""Programs that run with limits, and detection of processes that still run, by start times and file names.

A process is identified by host, PID namespace (such as a container's), number and start time, because numbers are
reused and are only valid within a namespace.
"""

from __future__ import annotations

import contextlib
import os
import re
import selectors
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

_PART_BYTES = 2**16
_POLL_SECONDS = 0.05


class LimitedRun(NamedTuple):
    """Outcome of a program.

    `code`: exit code, or None if a limit ended the program. `stdout`: its output, longer than the limit if that was
    exceeded. `stderr`: last part of its error output.
    """

    code: int | None
    stdout: bytes
    stderr: bytes


def run_limited(command: Sequence[str], given: bytes, *, seconds: float, most: int) -> LimitedRun:
    """Run a program, and end it with all its children when it exceeds a limit.

    Children that outlive the program are ended, too. Raises OSError if the program cannot be started.

    Args:
        command: Program and its arguments.
        given: Content of its standard input.
        seconds: Time limit.
        most: Limit of its output, in bytes.
    """
    deadline, written, errors = time.monotonic() + seconds, bytearray(), bytearray()
    with tempfile.TemporaryFile() as stdin, selectors.DefaultSelector() as selector:
        stdin.write(given)
        stdin.seek(0)
        pipe = subprocess.PIPE
        # A new session is a new process group.
        child = subprocess.Popen(command, stdin=stdin, stdout=pipe, stderr=pipe, start_new_session=True)
        try:
            for stream, kept in ((child.stdout, written), (child.stderr, errors)):
                assert stream is not None
                selector.register(stream, selectors.EVENT_READ, kept)
            while selector.get_map() and time.monotonic() < deadline and len(written) <= most:
                for key, _ in selector.select(_POLL_SECONDS):
                    if not (part := os.read(key.fd, _PART_BYTES)):
                        selector.unregister(key.fileobj)
                    key.data.extend(part)
                del errors[:-_PART_BYTES]
                if child.poll() is not None:
                    _kill_group(child.pid)  # children that hold the pipes open
            with contextlib.suppress(subprocess.TimeoutExpired):
                if len(written) <= most:
                    child.wait(max(0.0, deadline - time.monotonic()))
            return LimitedRun(child.returncode, bytes(written), bytes(errors))
        finally:
            _kill_group(child.pid)
            child.communicate()


def _kill_group(leader: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def process_start(pid: int | str) -> str | None:
    """Return the start time of process `pid` in kernel ticks, or None if it does not run or there is no /proc."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    state, *fields = text.rpartition(")")[2].split()  # the name in parentheses may hold anything
    return None if state in "ZX" else fields[18]


def pid_namespace() -> str | None:
    """Return the PID namespace of this process, such as `pid:[4026531836]`, or None if there is no /proc."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return None


def incomplete_path(path: Path) -> Path:
    """Return the path under which this process writes the file `path` before it is complete and renamed.

    The name contains host, PID namespace, number and start time of the process.
    """
    return path.with_name(f"{path.name}.incomplete-{_here()}-{os.getpid()}-{process_start('self')}")


def remove_abandoned(path: Path) -> None:
    """Remove the files `incomplete_path(path)` of processes that have ended.

    Files of other hosts and namespaces stay, because their processes may still run.
    """
    pattern = re.compile(rf"{re.escape(path.name)}\.incomplete-{re.escape(_here())}-(\d+)-(\d+)")
    for file in path.parent.iterdir() if path.parent.is_dir() else ():
        match = pattern.fullmatch(file.name)
        if match is not None and process_start(match[1]) != match[2]:
            file.unlink(missing_ok=True)


def _here() -> str:
    """Return the host and PID namespace as part of a file name."""
    return f"{socket.gethostname()}-{''.join(filter(str.isdigit, pid_namespace() or ''))}"
