"""Registry of the checkpoint formats, and functions that recognize and open them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from megafp8.checkpoint import complete_checkpoints, latest
from megafp8.checkpoint.dcp import INDEX_FILE
from megafp8.checkpoint.store import METADATA_FILE
from megafp8.conversion.adapters import open_native
from megafp8.conversion.base import CheckpointSource
from megafp8.conversion.consolidated import WEIGHTS_FILE, ConsolidatedSink, ConsolidatedSource
from megafp8.conversion.huggingface.sink import HfSink
from megafp8.conversion.huggingface.source import CONFIG_FILE, HfSource
from megafp8.conversion.megatron.sink import MegatronSink
from megafp8.conversion.megatron.source import COMMON_FILE, TRACKER, MegatronSource, is_distributed, is_megatron
from megafp8.conversion.megatron.torch_dist_sink import TorchDistSink
from megafp8.conversion.megatron.torch_dist_source import TorchDistSource
from megafp8.conversion.model import check_size_of
from megafp8.conversion.nanotron import CONFIG_FILE as MODEL_CONFIG_FILE
from megafp8.conversion.nanotron import TRACKER as STEP_TRACKER
from megafp8.conversion.nanotron import NanotronSource, is_nanotron
from megafp8.conversion.native import NativeSink, is_checkpoint
from megafp8.conversion.peft.sink import PeftSink
from megafp8.conversion.peft.source import ADAPTER_CONFIG_FILE, open_peft
from megafp8.conversion.target import Sink
from megafp8.data.hub import is_hub_name, local_folder
from megafp8.host.object_store import AnyPath, ObjectPath, as_path, is_transient
from megafp8.host.object_store.cache import ObjectCache, ObjectChanged, default_cache
from megafp8.host.suggestions import did_you_mean


class CheckpointFormat(NamedTuple):
    """Checkpoint format.

    Attributes:
        sign: Description of the files by which the format is recognized.
        has_sign: Returns whether a path has these files.
        source: Constructor of the format's source, which takes a path and options.
        sink: Constructor of the format's sink, which takes a path and options.
        weights_only: Whether the format cannot hold optimizer state.
        mtp: Whether the format can hold the layers of multi-token prediction.
        adapters: Whether the sink writes only A and B of LoRA.
        padded: Whether a vocabulary in this format is already padded. If False, the source takes `vocab_multiple`.
    """

    sign: str
    has_sign: Callable[[Any], bool]
    source: Callable[..., CheckpointSource]
    sink: Callable[..., Sink]
    weights_only: bool = True
    mtp: bool = False
    adapters: bool = False
    padded: bool = True


def _is_native(path: Path) -> bool:
    is_megatron = is_distributed(path)  # torch_dist has an index and a metadata.json, too
    return (is_checkpoint(path) and not is_megatron) or bool(
        complete_checkpoints(path) or complete_checkpoints(path / "checkpoints")
    )


def _has(name: str) -> Callable[[Path], bool]:
    return lambda path: (path / name).is_file()


def _refuse(path: Path) -> NoReturn:
    raise ValueError(f"{path}: megafp8 reads nanotron's format, but does not write it")


_NATIVE_SIGN = f"{METADATA_FILE} and {INDEX_FILE}, or folders step_<number> that contain them"
FORMATS = {
    "native": CheckpointFormat(_NATIVE_SIGN, _is_native, open_native, NativeSink, weights_only=False, mtp=True),
    "hf": CheckpointFormat(CONFIG_FILE, _has(CONFIG_FILE), HfSource, HfSink, padded=False),
    "peft": CheckpointFormat(
        ADAPTER_CONFIG_FILE, _has(ADAPTER_CONFIG_FILE), open_peft, PeftSink, adapters=True, padded=False
    ),
    "megatron": CheckpointFormat(f"{TRACKER} or folders mp_rank_<number>", is_megatron, MegatronSource, MegatronSink),
    "torch_dist": CheckpointFormat(
        f"{COMMON_FILE}, or {TRACKER} of a folder with it", is_distributed, TorchDistSource, TorchDistSink
    ),
    "nanotron": CheckpointFormat(
        f"{MODEL_CONFIG_FILE}, or {STEP_TRACKER} of a folder with it",
        is_nanotron,
        NanotronSource,
        _refuse,
        padded=False,
    ),
    "consolidated": CheckpointFormat(WEIGHTS_FILE, _has(WEIGHTS_FILE), ConsolidatedSource, ConsolidatedSink, mtp=True),
}


def recognize(path: Path) -> str:
    """Return the name of the format of `path`. Raises ValueError if it does not exist or its format is not known."""
    if not path.exists():
        raise ValueError(f"there is no {path}; {did_you_mean(path, 'give a run, a checkpoint or a folder of a model')}")
    matching = [name for name, format in FORMATS.items() if format.has_sign(path)]
    if len(matching) != 1:
        signs = "; ".join(f"{name}: {format.sign}" for name, format in FORMATS.items())
        what = f"might be {' or '.join(matching)}; state the format" if matching else "has no known format"
        raise ValueError(f"{path} {what}. Looked for {signs}")
    return matching[0]


def fetched(path: AnyPath | str) -> Path:
    """Return a local path for `path`, which may also be a URL or a name on the Hugging Face Hub.

    A URL or a name on the Hub is copied to the local cache; if it is a run in object storage, its newest checkpoint is.
    Raises ValueError if `path` cannot be read, and ObjectStoreError if object storage cannot be reached.
    """
    where = as_path(path)
    if isinstance(where, Path):
        return local_folder(str(where)) if is_hub_name(where) else where
    newest = latest(where / "checkpoints") or latest(where) or where
    assert isinstance(newest, ObjectPath)
    try:
        return ObjectCache(default_cache()).whole_folder(newest)
    except FileNotFoundError:
        raise ValueError(f"there is no {path}") from None
    except (OSError, ObjectChanged) as error:
        if is_transient(error):
            raise
        raise ValueError(str(error)) from None


def open_source(path: AnyPath | str, vocab_multiple: int | None = None) -> CheckpointSource:
    """Open the checkpoint at `path`, in any format. Adapters are merged into their base model.

    If the format has no padding, the vocabulary is padded to a multiple of `vocab_multiple`. Raises ValueError if there
    is no checkpoint at `path`, or if it is damaged.
    """
    path = fetched(path)
    format = FORMATS[recognize(path)]
    options = {} if format.padded or vocab_multiple is None else {"vocab_multiple": vocab_multiple}
    source = format.source(path, **options)
    check_size_of(source)
    return source
