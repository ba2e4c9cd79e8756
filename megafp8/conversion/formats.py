"""The formats by name, and which of them a path is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from megafp8.checkpoint import complete_checkpoints
from megafp8.conversion import consolidated, hf_source
from megafp8.conversion.base import Sink, Source
from megafp8.conversion.consolidated import ConsolidatedSink, ConsolidatedSource
from megafp8.conversion.hf_sink import HfSink
from megafp8.conversion.hf_source import HfSource
from megafp8.conversion.native import NativeSink, NativeSource


class Format(NamedTuple):
    """How a format is recognised, in words and as a function, read and written."""

    sign: str
    has_sign: Callable[[Path], bool]
    source: Callable[[Path], Source]
    sink: Callable[[Path], Sink]
    weights_only: bool
    """It has no place for optimizer state."""


def _is_native(path: Path) -> bool:
    is_one = (path / ".metadata").is_file() or (path / "metadata.json").is_file()
    return is_one or bool(complete_checkpoints(path) or complete_checkpoints(path / "checkpoints"))


FORMATS = {
    "native": Format(
        "metadata.json and .metadata, or folders step_<number> of these", _is_native, NativeSource, NativeSink, False
    ),
    "hf": Format("config.json", lambda path: (path / hf_source.CONFIG_FILE).is_file(), HfSource, HfSink, True),
    "consolidated": Format(
        consolidated.WEIGHTS_FILE,
        lambda path: (path / consolidated.WEIGHTS_FILE).is_file(),
        ConsolidatedSource,
        ConsolidatedSink,
        True,
    ),
}


def open_source(path: str | Path, format: str | None = None) -> Source:
    """The checkpoint at `path`, of the format of that name or, None, of the one that is recognised.

    Raises ValueError where there is nothing, or nothing that is recognised, and where it is damaged.
    """
    path = Path(path)
    if not path.exists():
        raise ValueError(f"there is no {path}")
    if format is not None:
        return FORMATS[format].source(path)
    found = [name for name, one in FORMATS.items() if one.has_sign(path)]
    if len(found) != 1:
        signs = "; ".join(f"{name}: {one.sign}" for name, one in FORMATS.items())
        what = f"might be {' or '.join(found)}; say which" if found else "is of no format that is known"
        raise ValueError(f"{path} {what}. Looked for {signs}")
    return FORMATS[found[0]].source(path)
