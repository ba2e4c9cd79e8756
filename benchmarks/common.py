"""Timing, text tables, JSON reports and command-line arguments that the benchmarks share."""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

# --- timing ----------------------------------------------------------------------------------------------------------


def now(device: torch.device) -> Any:
    """Return a point in time on `device`: on CUDA an event after all queued work, on a CPU the host's clock."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def milliseconds(start: Any, end: Any) -> float:
    """Return the time between two results of `now`. CUDA must have been synchronized in between."""
    return (end - start) * 1e3 if isinstance(start, float) else start.elapsed_time(end)


def timed(function: Callable[[], Any]) -> tuple[float, Any]:
    """Call a function; return the seconds by the host's clock, and its result."""
    start = time.perf_counter()
    value = function()
    return time.perf_counter() - start, value


def replayed(run: Callable[[], Any]) -> Callable[[], None]:
    """Record the launches of `run` in a CUDA graph, and return a function that replays it, as in training.

    `run` is called once before the recording, so that everything is compiled.
    """
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph, stream=stream):
        run()
    return graph.replay


def release() -> None:
    """Free the memory of the last measurement before something else is built."""
    gc.collect()
    gc.collect()  # objects that FSDP refers to through tensor hooks become garbage only after the first collection
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


# --- reports ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Table:
    """Text table that is printed row by row.

    `columns` maps headings to formats, such as ".3f". None is shown as "-".
    """

    label: str
    label_width: int
    columns: dict[str, str]

    def heading(self) -> str:
        """Return the line with the headings."""
        return f"{self.label:<{self.label_width}}" + "".join(f"{name:>{_width(name)}}" for name in self.columns)

    def row(self, label: str, *values: float | None, note: str = "") -> str:
        """Return the line of a row, with an optional note at the end."""
        cells = (
            f"{'-' if value is None else format(value, spec):>{_width(name)}}"
            for (name, spec), value in zip(self.columns.items(), values, strict=True)
        )
        return f"{label:<{self.label_width}}{''.join(cells)}  {note}".rstrip()


def _width(heading: str) -> int:
    return max(len(heading) + 2, 10)


def machine(device: torch.device) -> str:
    """Return the name of the GPU, or "CPU"."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def write_json(path: Path | None, report: Any) -> None:
    """Write `report` to `path`, if it is not None. NaN and infinities, which JSON lacks, become null."""
    if path is not None:
        strict = json.loads(json.dumps(report), parse_constant=lambda _: None)
        path.write_text(json.dumps(strict, indent=1) + "\n", encoding="utf-8")


# --- arguments -------------------------------------------------------------------------------------------------------


def new_parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the benchmark's docstring as help text, and the flag --json."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    return parser


def add_device_flag(parser: argparse.ArgumentParser) -> None:
    """Add the flag --device to a parser."""
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")


def chosen_device(arguments: argparse.Namespace) -> torch.device:
    """Return the device that --device names, or raise ValueError if it does not exist."""
    has_cuda = torch.cuda.is_available()
    if arguments.device == "cuda" and not has_cuda:
        raise ValueError("--device: torch sees no CUDA device here; cpu would work")
    return torch.device("cuda", 0) if has_cuda and arguments.device != "cpu" else torch.device("cpu")


def require_positive(arguments: argparse.Namespace, *options: str) -> None:
    """Raise ValueError if one of the options is given and less than 1."""
    for option in options:
        value = getattr(arguments, option)
        if value is not None and value < 1:
            raise ValueError(f"--{option.replace('_', '-')}: {value} is too few; 1 or more would work")


def names(option: str, wanted: str, known: Iterable[str]) -> list[str]:
    """Return the comma-separated names in `wanted`, each once; raise ValueError for a name that is not in `known`."""
    known = list(known)
    found = wanted.split(",")
    for name in found:
        if name not in known:
            raise ValueError(f"{option}: {name!r} is none of {', '.join(known)}")
    return list(dict.fromkeys(found))
