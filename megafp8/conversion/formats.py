"""The checkpoint formats by name, and how to recognize them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from megafp8.checkpoint import complete_checkpoints
from megafp8.checkpoint.dcp import INDEX_FILE
from megafp8.checkpoint.store import METADATA_FILE
from megafp8.conversion.base import Source
from megafp8.conversion.consolidated import WEIGHTS_FILE, ConsolidatedSink, ConsolidatedSource
from megafp8.conversion.hf_sink import HfSink
from megafp8.conversion.hf_source import CONFIG_FILE, HfSource
from megafp8.conversion.megatron_sink import MegatronSink
from megafp8.conversion.megatron_source import TRACKER, MegatronSource, is_megatron
from megafp8.conversion.merge_lora import merged
from megafp8.conversion.native import NativeSink, NativeSource, is_checkpoint
from megafp8.conversion.target import Sink


class Format(NamedTuple):
    """A format: the files it is recognized by, as text and as a function, its source and its sink.

    Source and sink take a path and options of the format. `weights_only`: it has no place for optimizer state; `mtp`:
    it has one for multi-token prediction.
    """

    sign: str
    has_sign: Callable[[Path], bool]
    source: Callable[..., Source]
    sink: Callable[..., Sink]
    weights_only: bool = True
    mtp: bool = False


def _is_native(path: Path) -> bool:
    return is_checkpoint(path) or bool(complete_checkpoints(path) or complete_checkpoints(path / "checkpoints"))


def _has(name: str) -> Callable[[Path], bool]:
    return lambda path: (path / name).is_file()


def _open_native(path: str | Path) -> Source:
    """A native checkpoint; one with LoRA as the whole model."""
    return merged(NativeSource(path))


_NATIVE_SIGN = f"{METADATA_FILE} and {INDEX_FILE}, or folders step_<number> of these"
FORMATS = {
    "native": Format(_NATIVE_SIGN, _is_native, _open_native, NativeSink, weights_only=False, mtp=True),
    "hf": Format(CONFIG_FILE, _has(CONFIG_FILE), HfSource, HfSink),
    "megatron": Format(f"{TRACKER} or folders mp_rank_<number>", is_megatron, MegatronSource, MegatronSink),
    "consolidated": Format(WEIGHTS_FILE, _has(WEIGHTS_FILE), ConsolidatedSource, ConsolidatedSink, mtp=True),
}


def recognize(path: Path) -> str:
    """The name of the format of `path`. Raises ValueError where there is nothing, or nothing that is known."""
    if not path.exists():
        raise ValueError(f"there is no {path}")
    found = [name for name, format in FORMATS.items() if format.has_sign(path)]
    if len(found) != 1:
        signs = "; ".join(f"{name}: {format.sign}" for name, format in FORMATS.items())
        what = f"might be {' or '.join(found)}, so say which" if found else "is of no format that is known"
        raise ValueError(f"{path} {what}. Looked for {signs}")
    return found[0]


def open_source(path: str | Path) -> Source:
    """The checkpoint at `path`, of any format. Raises ValueError where there is none, and where it is damaged."""
    return FORMATS[recognize(Path(path))].source(path)
