"""Programs that are run with limits, and which processes still run: their start times, and names of files of theirs.

A process is known by host, PID namespace (such as that of a container), number and start time: numbers are reused, and
are valid within their namespace only.
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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

_PART_BYTES = 2**16
_POLL_SECONDS = 0.05


class LimitedRun(NamedTuple):
    """The end of a program: its exit code, None if it was ended at a limit, and what it wrote.

    `stdout` has more bytes than the limit if that was exceeded; `stderr` is the last part of the errors.
    """

    code: int | None
    stdout: bytes
    stderr: bytes


def run_limited(
    command: Sequence[str], given: bytes, *, seconds: float, most: int, environment: Mapping[str, str] | None = None
) -> LimitedRun:
    """Run a program, and end it with all its children after `seconds`, or when it has written more than `most` bytes.

    Children that outlive the program are ended as well. Raises OSError if it cannot be started.

    Args:
        given: Content of its standard input.
        environment: Its variables. Default: those of this process.
    """
    deadline, written, errors = time.monotonic() + seconds, bytearray(), bytearray()
    with tempfile.TemporaryFile() as stdin, selectors.DefaultSelector() as selector:
        stdin.write(given)
        stdin.seek(0)
        pipe = subprocess.PIPE
        child = subprocess.Popen(
            command, stdin=stdin, stdout=pipe, stderr=pipe, env=environment, start_new_session=True
        )  # a session of its own is a process group
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
