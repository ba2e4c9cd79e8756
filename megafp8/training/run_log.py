"""Log of a run: messages on the console and in log.txt, and a record of each start in launches.jsonl.

Modules log to `logging.getLogger(__name__)`. Messages about the whole job have level INFO, and only rank 0 shows them.
Warnings and errors concern the rank that logs them, and every rank shows them.
"""

from __future__ import annotations

import contextlib
import datetime
import logging
import shlex
import socket
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from tqdm import tqdm

import megafp8
from megafp8.host.error_causes import no_space
from megafp8.host.messages import printable
from megafp8.host.redaction import redact, redact_arguments
from megafp8.host.shipped import is_checkout
from megafp8.host.text_file import DiskErrorsLogged, JsonLines
from megafp8.parallel.collectives import gather_objects
from megafp8.parallel.parallel_state import ParallelState
from megafp8.training.errors import TrainingError

LOG_FILE = "log.txt"
LAUNCHES_FILE = "launches.jsonl"
FORMAT_VERSION = 1
"""Version of the run folder's JSON lines. Grows when an older reader would misread a key, not for new keys."""
STEPS = "megafp8.steps"
"""Name of the logger of step lines, which can be hidden on the console."""


class _Formatter(logging.Formatter):
    """Formatter of lines such as `[2026-01-31 12:00:00] rank 1: WARNING: message`.

    The rank is shown if it is not 0, and the level from WARNING on.
    """

    def __init__(self, rank: int) -> None:
        super().__init__("[%(asctime)s] %(message)s", "%Y-%m-%d %H:%M:%S")
        self._rank = f"rank {rank}: " if rank else ""

    def formatMessage(self, record: logging.LogRecord) -> str:
        level = f"{record.levelname}: " if record.levelno >= logging.WARNING else ""
        record.message = self._rank + level + record.message
        return super().formatMessage(record)

    def format(self, record: logging.LogRecord) -> str:
        """Return the record's text with its traceback, but without credentials and control characters."""
        return printable(redact(super().format(record)))


class _Console(logging.Handler):
    """Handler that writes to stderr, above the progress bar if there is one."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            tqdm.write(self.format(record), file=sys.stderr)
        except Exception:  # like logging's own handlers: a message that cannot be written does not end the run
            self.handleError(record)


class _LogFile(logging.FileHandler):
    """Handler of log.txt. If the file cannot be written, as on a full disk, `console` reports this once.

    The file then lacks these messages.
    """

    def __init__(self, path: Path, console: logging.Handler) -> None:
        super().__init__(path, encoding="utf-8", delay=True)
        self._console: logging.Handler | None = console

    def emit(self, record: logging.LogRecord) -> None:
        try:
            super().emit(record)
        except OSError:  # the file cannot be opened
            self.handleError(record)

    def handleError(self, record: logging.LogRecord) -> None:
        console, self._console = self._console, None
        if console is not None:
            text = f"{self.baseFilename} cannot be written: {sys.exc_info()[1]}; messages go to the console only"
            console.handle(logging.makeLogRecord({"msg": text, "levelno": logging.WARNING, "levelname": "WARNING"}))

    def close(self) -> None:
        with contextlib.suppress(OSError):
            super().close()


class RunLog:
    """Context manager in which the package's log messages go to the console and, after `open`, to a file.

    Args:
        rank: Global rank of this process.
        show_steps: Whether to show step lines on the console too.
    """

    def __init__(self, rank: int, *, show_steps: bool) -> None:
        self._logger = logging.getLogger("megafp8")
        self._rank = rank
        self._console = _Console()
        self._console.setFormatter(_Formatter(rank))
        self._console.addFilter(lambda record: show_steps or record.name != STEPS)
        self._file: logging.Handler | None = None

    def __enter__(self) -> RunLog:
        self._before = self._logger.level, self._logger.propagate
        self._logger.setLevel(logging.WARNING if self._rank else logging.INFO)
        self._logger.propagate = False  # a library that configures the root logger would print every message twice
        self._logger.addHandler(self._console)
        self._excepthook, threading.excepthook = threading.excepthook, self._report_thread
        return self

    def _report_thread(self, failed: threading.ExceptHookArgs) -> None:
        """Print the traceback of a failed thread, unless the disk is full: the code that writes logs this error."""
        if no_space(failed.exc_value) is None:
            self._excepthook(failed)

    def open(self, folder: Path) -> None:
        """Append messages to log.txt in `folder` from now on. Only rank 0 does this, and only the first call counts."""
        if not self._rank and self._file is None:
            self._file = _LogFile(folder / LOG_FILE, self._console)
            self._file.setFormatter(_Formatter(self._rank))
            self._logger.addHandler(self._file)

    def write_error(self, message: str) -> None:
        """Append an error to log.txt only. Use this if the process ends at once and prints the error by other means."""
        self._write_error(message, None)

    def _write_error(self, message: str, details: Any) -> None:
        if self._file is not None:
            record = self._logger.makeRecord(self._logger.name, logging.ERROR, "", 0, "%s", (message,), details)
            self._file.handle(record)

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._file is not None:
            if error is not None:  # only for the file; the caller that catches the error prints it on the console
                details = None if isinstance(error, TrainingError) else (type(error), error, trace)
                self._write_error(str(error) or type(error).__name__, details)
            self._logger.removeHandler(self._file)
            self._file.close()
        self._logger.removeHandler(self._console)
        threading.excepthook = self._excepthook
        level, self._logger.propagate = self._before
        self._logger.setLevel(level)


def source_commit() -> str | None:
    """Return the git commit of this source, with `-dirty` if files were changed; None without a git checkout."""
    if not is_checkout():  # an installed package may lie inside another repository
        return None
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def record_launch(folder: Path, parallel: ParallelState, step: int) -> None:
    """Append a record of this start, after `step` steps, to launches.jsonl in `folder`. Collective; rank 0 writes.

    The key `hosts` of the record holds the number of ranks on each host, in the order of ranks.
    """
    hosts = gather_objects(socket.gethostname(), parallel.world.group)
    if hosts is None or not parallel.world.is_first:
        return
    launch: dict[str, Any] = {
        "format_version": FORMAT_VERSION,
        "time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "step": step,
        "command": shlex.join(redact_arguments(sys.argv)),
        "directory": str(Path.cwd()),
        "commit": source_commit(),
        "megafp8_version": megafp8.__version__,
        "torch_version": str(torch.__version__),
        "python": sys.version.split()[0],
        "ranks": parallel.world_size,
        "hosts": dict(Counter(hosts)),
    }
    with DiskErrorsLogged(LAUNCHES_FILE), contextlib.closing(JsonLines(folder / LAUNCHES_FILE)) as lines:
        lines.append(launch)
