"""Shared code of the tools: exit codes and errors, signals, tables, plots, run folders."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from megafp8.host.messages import print_error
from megafp8.host.suggestions import did_you_mean

_INTERRUPTED, _FAILED = 130, 2


def pyplot() -> ModuleType:
    """Return matplotlib.pyplot, set up to draw without a display."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot

    return matplotlib.pyplot


def text_table(heading: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """Return a table as text. Columns are as wide as their longest cell; the first `left` columns are left-aligned."""
    widths = [max(len(row[i]) for row in (heading, *rows)) for i in range(len(heading))]
    lines = (
        "  ".join(f"{cell:{'<' if i < left else '>'}{widths[i]}}" for i, cell in enumerate(row))
        for row in (heading, *rows)
    )
    return "\n".join(line.rstrip() for line in lines)


def file_of_run(folder: Path, name: str, advice: str) -> Path:
    """Return a file in the folder of a run, which may also be given by one of its checkpoints.

    Raises ValueError if the folder does not exist, or, with `advice`, if the run has not written the file.
    """
    if not folder.is_dir():
        raise ValueError(f"there is no folder {folder}; {did_you_mean(folder, 'give a run, <run_dir>/<name>')}")
    run_file = (
        folder.parent if folder.name == "checkpoints" else folder.parents[1] if folder.name[:5] == "step_" else folder
    )
    if not (run_file / name).exists():
        raise ValueError(f"{run_file} has no {name}: {advice}")
    return run_file / name


def names_of(folders: Sequence[Path]) -> list[str]:
    """Return a unique name for each folder. Raises ValueError if a folder is given twice."""
    paths = [folder.resolve() for folder in folders]
    for i, path in enumerate(paths):
        if path in paths[:i]:
            raise ValueError(f"{folders[i]} is given twice")
    return ["/".join(path.parts[-_parts_needed(path, paths) :]) for path in paths]


def _parts_needed(path: Path, paths: Sequence[Path]) -> int:
    """Return the number of last parts of `path` that distinguish it from all other `paths`."""
    for count in range(1, len(path.parts)):
        if sum(other.parts[-count:] == path.parts[-count:] for other in paths) == 1:
            return count
    return len(path.parts)


def _missing(error: FileNotFoundError) -> str:
    """Return a message that names the missing file, or the missing folder of a file to be written."""
    if not isinstance(error.filename, str):
        return str(error)
    path = Path(error.filename)
    if not path.parent.is_dir():
        return f"{path}: there is no folder {path.parent}; {did_you_mean(path.parent, 'make it first')}"
    return f"there is no {path}; {did_you_mean(path, 'give a file that exists')}"


def run_tool(tool: Callable[[], None]) -> int:
    """Run a tool and return its exit code: 0, 2 after printing an error, or 130 after Ctrl-C or SIGTERM."""
    try:
        # SIGTERM, which batch systems send, is handled like Ctrl-C, so that files are cleaned up.
        with signal_handler(signal.default_int_handler, signal.SIGTERM):
            tool()
    except FileNotFoundError as error:
        print_error(_missing(error))
        return _FAILED
    except (ValueError, OSError) as error:
        print_error(error)
        return _FAILED
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return _INTERRUPTED
    return 0


@contextmanager
def signal_handler(handler: Any, *numbers: signal.Signals) -> Iterator[None]:
    """Handle signals with `handler` within the context.

    Has no effect outside the main thread, because Python sets handlers only there.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)
