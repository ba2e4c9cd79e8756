"""Messages of a run, by Python's logging: to the console, and to log.txt in the run folder.

Modules log to `logging.getLogger(__name__)`. What concerns the whole job is logged at level INFO, and rank 0 alone
shows it. Warnings and errors concern the rank that logs them, and are shown wherever that is.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from types import TracebackType

from tqdm import tqdm

from megafp8.training.errors import TrainingError

LOG_FILE = "log.txt"
STEPS = "megafp8.steps"
"""Name of the logger of step lines, which the console need not show."""


class _Formatter(logging.Formatter):
    """`[2026-01-31 12:00:00] message`, with the rank if it is not 0, and the level from WARNING on."""

    def __init__(self, rank: int) -> None:
        super().__init__("[%(asctime)s] %(message)s", "%Y-%m-%d %H:%M:%S")
        self._rank = f"rank {rank}: " if rank else ""

    def formatMessage(self, record: logging.LogRecord) -> str:
        level = f"{record.levelname}: " if record.levelno >= logging.WARNING else ""
        record.message = self._rank + level + record.message
        return super().formatMessage(record)


class _Console(logging.Handler):
    """Writes to stderr, above a progress bar if there is one."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            tqdm.write(self.format(record), file=sys.stderr)
        except Exception:  # as logging's own handlers: a message that cannot be written does not end the run
            self.handleError(record)


class RunLog:
    """Within this context, what modules of megafp8 log goes to the console, and once `open` was called to a file.

    `rank`: this process' global rank. `show_steps`: whether lines of steps are for the console too.
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
        self._logger.propagate = False  # a library that sets up the root logger would show everything twice
        self._logger.addHandler(self._console)
        return self

    def open(self, folder: Path) -> None:
        """On rank 0, write to log.txt in `folder` too, behind what earlier starts of the run wrote."""
        if not self._rank:
            self._file = logging.FileHandler(folder / LOG_FILE, encoding="utf-8")
            self._file.setFormatter(_Formatter(self._rank))
            self._logger.addHandler(self._file)

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._file is not None:
            if error is not None:  # the console gets it from whoever catches it
                details = None if isinstance(error, TrainingError) else (type(error), error, trace)
                record = self._logger.makeRecord(
                    self._logger.name, logging.ERROR, "", 0, "%s", (str(error) or type(error).__name__,), details
                )
                self._file.handle(record)
            self._logger.removeHandler(self._file)
            self._file.close()
        self._logger.removeHandler(self._console)
        level, self._logger.propagate = self._before
        self._logger.setLevel(level)
