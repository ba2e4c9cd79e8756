"""Start of a new run from the weights of another checkpoint (`checkpoint.init_from`), in any supported format.

The folder's config.json or metadata defines the model. The config's model section may be missing or incomplete, and it
must agree with the folder: before the config is validated, the section is completed from the folder and compared with
it. Once the run has its own checkpoints, the newest one replaces the folder, which is no longer needed.

These checks need no process group. Then each rank reads its slices of the weights, in any layout. fp32 masters are read
from the folder too instead of being converted from the weights, so no precision is lost if the folder is more precise
than training.precision.

With checkpoint.init_optimizer, the optimizer state is read too, and weights are converted from the fp32 masters. With
model.moe, a dense model becomes a mixture of experts (`megafp8.conversion.upcycle`). Layers of multi-token prediction
and LoRA adapters keep their initial values if the folder does not have them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from os.path import expanduser
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from megafp8.checkpoint import collect_shards, latest, newest_readable
from megafp8.config import Config, ConfigError, Problem, model_spec
from megafp8.conversion import upcycle
from megafp8.conversion.adapters import adapted_of, lora_of
from megafp8.conversion.base import CheckpointSource, MasterWeights
from megafp8.conversion.flat import differences, flat_keys
from megafp8.conversion.formats import open_source
from megafp8.conversion.huggingface.tokenizer import find_tokenizer
from megafp8.conversion.load import load_weights
from megafp8.conversion.model import is_mtp
from megafp8.conversion.upcycle import UpcycledSource, is_router
from megafp8.data.hub import missing_folder
from megafp8.data.tokenizers import Tokenizer, TokenizerKind, TokenizerSettingError, build_tokenizer
from megafp8.optimizer.mixed_precision import AVERAGE, OUTER_MOMENTUM
from megafp8.parallel.tensor.lora import is_lora
from megafp8.training.state import checkpoint_folder, saved_model, tensor_kinds, weights
from megafp8.training.trainer import RankTrainer

_PROBE = "The 3 quick brown foxes' été: naïve Straße, 東京! def f(x_1):\n\treturn x_1 ** 2 != 0x1F  # ~3.14\n"
_FILES: dict[TokenizerKind, str] = {
    "huggingface": "tokenizer.json",
    "sentencepiece": "tokenizer.model",
    "tiktoken": "tiktoken.model",
}
_NOT_NEEDED = {"master", AVERAGE, OUTER_MOMENTUM}
"""Kinds of optimizer state that can be initialized from the weights."""
_RESOLVED = ("vocab_size", "max_position_embeddings")
"""Keys for which null means the default; the default here is the folder's value."""


def complete_model(tree: dict[str, Any], source: str, *, download: bool = True) -> None:
    """Complete the model section of the config `tree`, in place, if `checkpoint.init_from` is set.

    If the folder has adapters and the run has a section lora, this section is completed too, and the run continues with
    the adapters. If the run already has checkpoints, the sections are completed from the newest checkpoint instead, and
    `state.check_same_run` compares them later.

    Args:
        tree: Config as nested dictionaries, before validation.
        source: Name of the config in error messages.
        download: Whether to download a model of the Hugging Face Hub that is not in the cache. If False, a model that
            is not in the cache is an error.

    Raises:
        ConfigError: With every key of these sections that differs from the folder, or with checkpoint.init_from if the
            folder cannot be read.
    """
    section, model_section = tree.get("checkpoint"), tree.get("model") or {}
    folder = section.get("init_from") if isinstance(section, dict) else None
    if not isinstance(folder, str) or not isinstance(model_section, dict):
        return  # nothing to do, or an error that validation reports
    assert isinstance(section, dict)
    run, elsewhere = Path(expanduser(str(tree.get("run_dir", "runs")))) / str(tree.get("name")), section.get("folder")
    own_checkpoint = newest_readable(checkpoint_folder(run, elsewhere if isinstance(elsewhere, str) else None))
    problems: list[Problem] = []
    if own_checkpoint is None:
        with _as_error_of_init_from(folder, source):
            if not download and (missing := missing_folder(folder)) is not None:
                raise ValueError(missing)
            opened = open_source(folder)
            model = opened.model
            problems += _complete_lora(tree, opened, folder)
    else:
        model = saved_model(own_checkpoint)
        if isinstance(tree.get("lora"), dict):
            tree["lora"] = (own_checkpoint.metadata["config"].get("lora") or {}) | tree["lora"]
    explicit = {key: value for key, value in model_section.items() if key not in _RESOLVED or value is not None}
    tree["model"] = model_keys = dict(model.keys)
    for key, value in explicit.items():  # model.moe may be incomplete too
        both = isinstance(value, dict) and isinstance(model_keys.get(key), dict)
        model_keys[key] = model_keys[key] | value if both else value
    if own_checkpoint is not None:
        return
    try:
        wanted = model_spec(tree["model"])
    except ValidationError:
        return  # validation of the whole config reports it
    ours, theirs = flat_keys(wanted), flat_keys(model)
    rule, works = f"checkpoint.init_from starts from {folder}, where it is", "leave it out, or set"
    upcycles = wanted.has_experts and not model.has_experts
    problems += [
        Problem(f"model.{key}", ours[key], f"{rule} {theirs[key]!r}", f"{works} {theirs[key]!r}")
        for key in differences(wanted, model)
        if not (key == "moe" and upcycles)
    ]
    problems += upcycle.problems(wanted) if upcycles else []
    if problems:
        raise ConfigError(source, problems)


def _complete_lora(tree: dict[str, Any], opened: CheckpointSource, folder: str) -> Iterator[Problem]:
    """Complete the section lora from the adapters of `opened`, and yield a problem for each key that differs."""
    adapted, section = adapted_of(opened), tree.get("lora")
    if adapted is None or not isinstance(section, dict):
        return
    if (tree.get("data") or {}).get("dpo") is not None:
        rule = f"{folder} has adapters that the run continues with, so it would not begin with its reference model"
        merge = f"megafp8 convert --load {folder} --save merged --to hf"
        yield Problem("data.dpo", "set", rule, f"start from the merged model: {merge}")
    lora = lora_of(adapted)
    adapters = {"rank": lora.rank, "alpha": lora.alpha, "targets": sorted(lora.targets)}
    for key, value in section.items():
        if key in adapters and (sorted(value) if isinstance(value, list) else value) != adapters[key]:
            rule = (
                f"the run continues with the adapters of checkpoint.init_from, {folder}, where it is {adapters[key]!r}"
            )
            merge = f"megafp8 convert --load {folder} --save merged --to hf"
            yield Problem(f"lora.{key}", value, rule, f"leave it out, or start from the merged model: {merge}")
    tree["lora"] = adapters | section


def check_init(config: Config, run: Path, tokenizer: Tokenizer | None) -> None:
    """Raise ConfigError if `checkpoint.init_from` cannot be loaded or has another vocabulary. Needs no group."""
    folder = config.checkpoint.init_from
    if folder is None or latest(checkpoint_folder(run, config.checkpoint.folder)) is not None:
        return
    with _as_error_of_init_from(folder):
        opened = _open(config, folder)
    tokenizer_config = config.data.tokenizer
    if tokenizer is None or tokenizer_config is None:
        return
    file = _tokenizer_file(opened, tokenizer_config.kind)
    if file is not None:
        try:
            theirs = build_tokenizer(**tokenizer_config.model_dump() | {"path": str(file)})
            same = theirs.fingerprint == tokenizer.fingerprint or theirs.encode(_PROBE) == tokenizer.encode(_PROBE)
            why = ""
        except TokenizerSettingError as error:  # such as an end token that the source's tokenizer lacks
            same, why = False, f" ({error.rule})"
        if not same:
            rule = f"gives other tokens than {file}, which the weights of checkpoint.init_from were trained with{why}"
            works = f"tokenize the data with that tokenizer, and set data.tokenizer.path={file}"
            raise ConfigError("config", [Problem("data.tokenizer.path", tokenizer_config.path, rule, works)])


def _tokenizer_file(source: CheckpointSource, kind: TokenizerKind) -> str | None:
    """Return the path of the source's tokenizer of a kind, or None. A Hugging Face folder may hold several kinds."""
    files = {path.name: str(path) for path in source.tokenizer_files}
    if _FILES.get(kind) in files:
        return files[_FILES[kind]]
    tokenizer_path = find_tokenizer(source)
    return tokenizer_path["path"] if tokenizer_path is not None and tokenizer_path["kind"] == kind else None


@contextmanager
def _as_error_of_init_from(folder: str, source: str = "config") -> Iterator[None]:
    """Convert errors about the folder to a ConfigError of checkpoint.init_from."""
    try:
        yield
    except ConfigError:
        raise
    except (ValueError, OSError) as error:
        works = "give a folder that megafp8 convert reads, or remove the key to start from random weights"
        raise ConfigError(source, [Problem("checkpoint.init_from", folder, str(error), works)]) from error


@torch.no_grad()
def load_init(trainer: RankTrainer, folder: str) -> None:
    """Load the weights in `folder` into an untrained trainer. Collective if weights are gathered in FP8."""
    state, model = trainer.optimizer.state(), trainer.config.spec
    with _as_error_of_init_from(folder):
        source = _open(trainer.config, folder)
        upcycles = model.has_experts and not source.model.has_experts
        if upcycles:
            source = UpcycledSource(source, model)

        def begins_anew(name: str) -> bool:
            may_lack = is_mtp(model, name) or is_lora(name)
            return (upcycles and is_router(name)) or (may_lack and name not in source.tensors)

        for wanted in (weights(trainer), collect_shards(state.get("master", []), "model.")):
            load_weights(source, {name: x for name, x in wanted.items() if not begins_anew(name)})
        steps = 0
        if trainer.config.checkpoint.init_optimizer:
            steps = source.about["optimizer_steps"]
            for key in sorted(state.keys() - _NOT_NEEDED):
                load_weights(source, collect_shards(state[key], f"optimizer.{key}."))
    trainer.optimizer.restore(state, steps)
    if AVERAGE in state:
        trainer.optimizer.restart_average()
    trainer.fp8.invalidate_weights()
    trainer.strategy.invalidate()


def _open(config: Config, folder: str) -> CheckpointSource:
    """Open the checkpoint that the run starts from. Adapters stay separate if the run trains them further."""
    source = open_source(folder, config.spec.stem.vocab_multiple)
    if config.checkpoint.init_optimizer:
        _check_optimizer(config, source)
        return MasterWeights(source)
    return source if config.lora is None else adapted_of(source) or source


def _check_optimizer(config: Config, source: CheckpointSource) -> None:
    """Raise ConfigError if `source` lacks optimizer state that a run of `config` has."""
    others = tuple(f"optimizer.{key}." for key in _NOT_NEEDED)
    needed = [name for name in tensor_kinds(config) if name.startswith("optimizer.") and not name.startswith(others)]
    lacks = [name for name in needed if name not in source.tensors]
    if lacks or "optimizer_steps" not in source.about:
        rule = source.why_without(lacks[0]) if lacks else f"{source.path} does not record its number of steps"
        works = "leave it out to start with the weights only"
        raise ConfigError("config", [Problem("checkpoint.init_optimizer", True, rule, works)])
