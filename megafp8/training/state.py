"""State of a run in a checkpoint: tensors by global name, metadata, and the checks when a run resumes.

    model.<name>                                   weights, in the model's dtype
    optimizer.<moment>.<name>                      moments of the weight's update (`Update.moments`; exp_avg and
                                                   exp_avg_sq for AdamW), in optimizer.moments_dtype; FP8 saved as bf16
    optimizer.master.<name>                        fp32 master weight, unless the weight itself is fp32
    optimizer.average.<name>                       fp32 moving average of the weight, with optimizer.average_decay
    optimizer.outer_momentum.<name>                fp32, with resilience.replicas.outer
    fp8.<layer>.<operand>.{amax_history,scale}     state of delayed scaling; {amax,calibrated_steps} for static scaling
    <router>.shares                                shares of the previous step's choices, with
                                                   moe.aux_loss_scope: global_batch
    loss_scale.{scale,growth_tracker,hysteresis_tracker}    fp32, with training.precision fp16

The position in the data is a number of samples for each data set (`data.progress`). There is no random-number state:
data order, initial values and dropout are functions of the seed (`data.samples`, `parallel.tensor.random`,
`layers.dropout.reference`), and the metadata holds the config with the seed.

A run may resume with another FP8 recipe, or with other layers in FP8; their scales then start anew. Resuming is refused
if the data would not continue where it stopped, if the weights belong to another model, or if the tensors of the
checkpoint and of the run differ (`check_same_run`). The log lists all other config keys that changed.
"""

from __future__ import annotations

import logging
import math
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import yaml
from pydantic import BaseModel, ValidationError
from torch import Tensor

from megafp8 import __version__
from megafp8.checkpoint import (
    BackgroundSaver,
    CheckpointReader,
    FolderLock,
    IncompatibleCheckpoint,
    Rectangles,
    clean_incomplete,
    collect,
    collect_shards,
    config_hash,
    load,
    misfits,
    newest_good,
    newest_readable,
    save,
)
from megafp8.checkpoint.errors import join_first, on_all_ranks
from megafp8.checkpoint.files import read_file
from megafp8.checkpoint.store import METADATA_FILE
from megafp8.config import Config, ConfigError, PlannedStage, Problem, config_at, model_spec, stage_at, with_keys
from megafp8.conversion.flat import differences, flat_keys
from megafp8.conversion.target import TOKENIZER_FOLDER, with_companions
from megafp8.data.tokenizers import tokenizer_file
from megafp8.host.object_store import AnyPath, as_path
from megafp8.numerics.dtypes import DTYPES, state_dtype, sum_dtype
from megafp8.optimizer.loss_scale import LossScaler
from megafp8.optimizer.mixed_precision import AVERAGE, OUTER_MOMENTUM, State
from megafp8.optimizer.param_groups import is_hidden_matrix
from megafp8.parallel.parallel_state import ParallelState
from megafp8.parallel.sharding import Shape, spec_of
from megafp8.planner.stages import stages_of
from megafp8.spec import ModelSpec
from megafp8.training.auto_filter import FilterChoice, kept_choice
from megafp8.training.describe import planned_stage
from megafp8.training.history import History, changed_keys, leaves
from megafp8.training.inputs import planned_vocabulary
from megafp8.training.learning_rate import schedule_change, schedule_jump
from megafp8.training.trainer import RankTrainer

logger = logging.getLogger(__name__)


def checkpoint_folder(run: Path, elsewhere: str | None = None) -> AnyPath:
    """Return the checkpoint folder of the run in folder `run`. `elsewhere` is the config's `checkpoint.folder`."""
    return run / "checkpoints" if elsewhere is None else as_path(elsewhere) / run.name


def weights(trainer: RankTrainer) -> dict[str, Rectangles]:
    """Return views of this rank's weights by global name.

    If weights are sharded or exist only in FP8, the views are of this rank's shard of the master weights.
    """
    trainer.strategy.wait()
    filled = [param for param in trainer.strategy.params if param not in trainer.optimizer.released]
    values = collect(filled, lambda p: p.detach(), "model.")
    values |= {f"model.{name}": Rectangles.whole(x) for name, x in trainer.constants.items()}
    return values | collect_shards(trainer.optimizer.released_values(), "model.")


def tensors(trainer: RankTrainer, optimizer: State | None = None) -> dict[str, Rectangles | Tensor]:
    """Return views of all state of this rank by global name. Pass the optimizer's state if it is already at hand."""
    state: dict[str, Rectangles | Tensor] = {**weights(trainer)}
    for key, shards in (optimizer or trainer.optimizer.state()).items():
        state |= collect_shards(shards, f"optimizer.{key}.")
    return state | trainer.router_shares | trainer.loss_scale | trainer.fp8.state_dict()


def tensor_kinds(config: Config) -> dict[str, tuple[Shape, torch.dtype]]:
    """Return the global shape and dtype of each tensor in a checkpoint of `config`, by name, without FP8 state.

    This needs neither memory nor a process group.
    """
    weight = DTYPES[config.training.precision]
    master, moment = sum_dtype(weight), state_dtype(config.optimizer.moments_dtype, weight)
    moment = torch.bfloat16 if moment.itemsize == 1 else moment
    dtypes = {"model.": weight}
    if weight != master:
        dtypes["optimizer.master."] = master
    if config.optimizer.average_decay is not None:
        dtypes[f"optimizer.{AVERAGE}."] = master
    if config.outer is not None:
        dtypes[f"optimizer.{OUTER_MOMENTUM}."] = master
    by_kind = {
        hidden: {
            **dtypes,
            **{f"optimizer.{key}.": moment for key in config.optimizer.update(hidden_matrix=hidden).moments},
        }
        for hidden in (False, True)
    }
    # A planned stage holds only the experts of its first rank. One expert-parallel rank holds all experts.
    whole = config.model_copy(update={"parallel": config.parallel.model_copy(update={"expert": 1})})
    stages = [planned_stage(whole, stage) for stage in range(len(stages_of(config)[1]))]
    kinds = {
        f"{prefix}{shard.name}": (shard.global_shape, dtype)
        for stage in stages
        for param in stage.parameters()
        for shard in spec_of(param).shards
        for prefix, dtype in by_kind[is_hidden_matrix(spec_of(param))].items()
        if param.requires_grad or prefix == "model."
    }
    constants = {f"model.{name}": values for stage in stages for name, values in stage.constants.items()}
    constants |= {name: values for stage in stages for name, values in stage.router_shares.items()}
    if config.training.precision == "fp16":
        constants |= LossScaler(torch.device("meta"), **config.training.loss_scale.model_dump()).state_dict()
    return kinds | {name: (tuple(values.shape), values.dtype) for name, values in constants.items()}


def tokenizer_copy(config: Config) -> dict[str, bytes]:
    """Return the contents of the tokenizer's files by path in a checkpoint; empty if the tokenizer has no file.

    Raises ValueError if a file cannot be read.
    """
    tokenizer = config.data.tokenizer
    if tokenizer is None or tokenizer.path is None:
        return {}
    path = Path(tokenizer_file(tokenizer.kind, tokenizer.path))
    if not path.is_file():
        return {}  # a tiktoken encoding; the config has its name
    return {f"{TOKENIZER_FOLDER}/{file.name}": read_file(file) for file in with_companions(path)}


def metadata_of(
    trainer: RankTrainer,
    step: int,
    fingerprint: str | None,
    data: Mapping[str, Any] | None,
    history: History,
    more: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Return the content of metadata.json, without the keys that `save` itself adds.

    Args:
        trainer: Trainer of this rank.
        step: Number of steps done.
        fingerprint: Fingerprint of the vocabulary, or None.
        data: Progress in each data set (`RunInputs.record`), or None.
        history: Samples and tokens read, and earlier changes of the config.
        more: Keys to add or replace.
    """
    config, parallel = trainer.config, trainer.parallel
    settings, stage = config.model_dump(mode="json"), stage_at(config, history.step)
    return {
        "consumed_samples": history.samples_at(step, config),
        "tokens": history.tokens_at(step, config),
        **({} if data is None else {"data": data}),
        "stage": None if stage is None else stage.name,
        "changes": list(history.changes),
        "optimizer_steps": trainer.optimizer.step_count,
        "tokenizer_fingerprint": fingerprint,
        "layout": {"ranks": parallel.world_size, "data": parallel.data.size, **settings["parallel"]},
        "config_hash": config_hash(settings),
        "config": settings,
        "fp8_left_out": trainer.auto_filter.layers,
        **(more or {}),
    }


def save_state(
    trainer: RankTrainer,
    run: Path,
    step: int,
    fingerprint: str | None,
    lock: FolderLock | None = None,
    *,
    data: Mapping[str, Any] | None = None,
    history: History = History(),  # noqa: B008 - immutable
    files: Mapping[str, bytes] | None = None,
    keep_all: bool = False,
    more: Mapping[str, Any] | None = None,
) -> AnyPath:
    """Save a checkpoint after `step` steps and return its path. Collective.

    Args:
        trainer: Trainer of this rank.
        run: Run folder.
        step: Number of steps done.
        fingerprint: Fingerprint of the vocabulary, or None.
        lock: Lock of the checkpoint folder.
        data: Progress in each data set (`RunInputs.record`).
        history: Samples and tokens read, and earlier changes of the config.
        files: Contents of small files to save with the checkpoint, by path in the checkpoint.
        keep_all: Remove no older checkpoint.
        more: Metadata keys to add or replace.
    """
    keep = trainer.config.checkpoint
    return save(
        checkpoint_folder(run, keep.folder),
        step,
        tensors(trainer),
        metadata_of(trainer, step, fingerprint, data, history, more),
        keep_last=None if keep_all else keep.keep_last,
        keep_every=keep.keep_every,
        lock=lock,
        files=files,
    )


def begin_save(
    trainer: RankTrainer,
    saver: BackgroundSaver,
    step: int,
    fingerprint: str | None,
    data: Mapping[str, Any] | None = None,
    history: History = History(),  # noqa: B008 - immutable
    more: Mapping[str, Any] | None = None,
) -> None:
    """Begin a save in the background. Call `saver.wait_copied` before the next update of the weights. Collective."""
    # The next forward pass already records amaxes. Weights, masters and moments change only in optimizer steps.
    saver.save(
        step,
        tensors(trainer),
        metadata_of(trainer, step, fingerprint, data, history, more),
        changes_early=lambda name: name.startswith("fp8."),
    )


def check_resume(config: Config, run: Path, fingerprint: str | None) -> CheckpointReader | None:
    """Return the newest checkpoint of `run` that can be opened, or None. Needs no process group.

    `find_checkpoint` will choose the same checkpoint unless the content of a data file is damaged. Data sets are
    compared later, by `RunInputs.resumed`.

    Raises:
        IncompatibleCheckpoint: If the run cannot continue from the checkpoint (`check_same_run`).
        DamagedCheckpoint: If there are checkpoints and all are damaged.
    """
    reader = newest_readable(checkpoint_folder(run, config.checkpoint.folder))
    if reader is not None:
        check_same_run(config, fingerprint, reader)
    return reader


def check_same_run(config: Config, fingerprint: str | None, reader: CheckpointReader) -> None:
    """Raise IncompatibleCheckpoint, with all reasons, if a run of `config` cannot continue from `reader`.

    Keys that determine the weights and the order of the data must be unchanged. Keys that change what the model
    computes from the same weights must be unchanged too, unless `checkpoint.allow_model_change` lists them. The
    checkpoint must have the tensors of the run. For a run with stages, the config at the checkpoint's step is checked.
    """
    path, then = reader.path, reader.metadata.get("config") or {}
    if "training" not in then:
        raise IncompatibleCheckpoint(
            f"{path} was converted from {reader.metadata.get('converted_from')}, which is not a checkpoint of a run; "
            f"start a run from its weights with checkpoint.init_from={path} and another name"
        )
    model = saved_model(reader)
    config = config_at(config, reader.metadata["step"])

    def fits() -> str:
        return misfits(tensor_kinds(config), reader.index, _can_lack(config, reader))

    try:
        vocabulary = reader.metadata["tokenizer_fingerprint"]
        problems = _changes(then, model, config, reader.metadata["step"], fits)
        if vocabulary != fingerprint:
            known = f"fingerprint {vocabulary}, here {fingerprint}"
            problems.append(f"was trained with another vocabulary ({known}); use that run's tokenizer, {_ANOTHER}")
        _ = reader.metadata["optimizer_steps"]
    except (KeyError, TypeError, AttributeError) as error:
        raise _unknown_config(reader, error) from error
    if not problems and (wrong := fits()):
        problems = [f"does not fit: {wrong}"]
    if problems:
        raise IncompatibleCheckpoint("\n  ".join(f"{path} {problem}" for problem in problems))


def check_next_stage(before: Config, now: Config, step: int, source: str) -> None:
    """Raise ConfigError, with all reasons, if a run of config `before` cannot continue with `now` after `step` steps.

    The rules are the same as in `check_same_run`, applied to the checkpoint of that step.
    """
    kinds_before, kinds_now = tensor_kinds(before), tensor_kinds(now)
    wrong = "" if kinds_before == kinds_now else "the stage's tensors have other names, shapes or dtypes"
    reasons = _changes(before.model_dump(mode="json"), before.spec, now, step, lambda: wrong)
    if not reasons and wrong:
        reasons = [f"does not fit: {wrong}"]
    stage = stage_at(now, step)
    if reasons and stage is not None:
        rule = f"the stage cannot begin, since the checkpoint of step {step} "
        works = "change the stage's overrides"
        raise ConfigError(source, [Problem("overrides", stage.overrides, rule + why, works) for why in reasons])


def check_stages(stages: Sequence[PlannedStage]) -> None:
    """Raise ConfigError if a stage changes something that the previous stage's checkpoint fixes, such as the model."""
    resolved = [stage._replace(config=planned_vocabulary(stage.config, stage.source)[0]) for stage in stages]
    for before, stage in pairwise(resolved):
        check_next_stage(before.config, stage.config, stage.begin, stage.source)


def _changes(
    then: Mapping[str, Any], model: ModelSpec, config: Config, step: int, fits: Callable[[], str]
) -> list[str]:
    """Return the reasons why a run of `config` cannot continue a run of config `then` and `model`.

    `fits` returns a text that names the tensors that do not fit, or an empty text if all fit.
    """
    problems = [
        *_changed_fixed_keys(then, config),
        *_changed_model(model, then["training"]["seq_length"], config, fits),
        *_changed_lora(then.get("lora"), config.model_dump(mode="json")["lora"]),
    ]
    jump = schedule_jump(then, config, step)
    return problems if jump is None else [*problems, jump]


def saved_model(reader: CheckpointReader) -> ModelSpec:
    """Return the model in the config of checkpoint `reader`. Raises IncompatibleCheckpoint if it is not valid."""
    try:
        return model_spec((reader.metadata.get("config") or {})["model"])
    except (KeyError, ValidationError) as error:
        raise _unknown_config(reader, error) from error


def _unknown_config(reader: CheckpointReader, error: Exception) -> IncompatibleCheckpoint:
    """Return the error for a checkpoint with an undamaged metadata.json that lacks a key this version needs."""
    wrong = f"there is no {error}" if isinstance(error, KeyError) else " ".join(str(error).split())
    return IncompatibleCheckpoint(
        f"{reader.path / METADATA_FILE}, written by megafp8 {reader.metadata.get('megafp8_version')}, holds no config "
        f"of a run that megafp8 {__version__} knows: {wrong}"
    )


_AVERAGES, _OUTER_MOMENTA = (f"optimizer.{key}." for key in (AVERAGE, OUTER_MOMENTUM))


def _can_lack(config: Config, reader: CheckpointReader) -> Callable[[str], bool]:
    """Return a function that tells whether a tensor may be missing in `reader`. A missing tensor starts anew.

    FP8 state, moving averages and outer momenta may be missing. The moments of a weight may be missing too if another
    rule updated this weight in the saved run: whether AdamW or Muon updates a weight may depend on the version.
    """
    updates = {frozenset(config.optimizer.update(hidden_matrix=hidden).moments) for hidden in (False, True)}
    saved = reader.index.state_dict_metadata

    def can_lack(name: str) -> bool:
        if name.startswith(("fp8.", _AVERAGES, _OUTER_MOMENTA)):
            return True
        kind, _, rest = name.partition(".")
        key, _, weight = rest.partition(".")
        if kind != "optimizer" or len(updates) == 1 or not any(key in moments for moments in updates):
            return False
        return sum(all(f"optimizer.{key}.{weight}" in saved for key in moments) for moments in updates) == 1

    return can_lack


_ANOTHER = "or choose another name for a new run"


_FIXED_KEYS = {
    "seed": "so its data would not continue where it stopped",
    "training.precision": "so its weights have another dtype",
}


def _changed_fixed_keys(then: Mapping[str, Any], config: Config) -> Iterator[str]:
    old, new = dict(leaves(then)), dict(leaves(config.model_dump(mode="json")))
    for key, why in _FIXED_KEYS.items():
        if old[key] != new[key]:
            yield f"was saved with {key} = {old[key]}, this run has {new[key]}, {why}; set {key}={old[key]}, {_ANOTHER}"
    optimizer, name = old.get("optimizer.name", "adamw"), config.optimizer.name
    if optimizer != name:
        yield (
            f"was saved with optimizer.name = {optimizer}, this run has {name}, so weights have another optimizer "
            f"state; set optimizer.name={optimizer}, {_ANOTHER}"
        )
    end = "data.tokenizer.end_token"
    if old.get(end) not in (None, new.get(end)):
        yield f"was saved with {end} = {old[end]}, this run has {new.get(end)}; set {end}={old[end]}, {_ANOTHER}"
    begin = "data.tokenizer.add_bos_token"
    before, now = (bool(values.get(begin)) for values in (old, new))
    if before != now:
        yield f"was saved with {begin} = {before}, this run has {now}; set {begin}={str(before).lower()}, {_ANOTHER}"
    moments, ours = old.get("optimizer.moments_dtype", "fp32"), config.optimizer.moments_dtype
    if moments != ours and "fp32" in (moments, ours):
        yield (
            f"was saved with optimizer.moments_dtype = {moments}, this run has {ours}, and moments may change between "
            f"bf16 and fp8 only; set optimizer.moments_dtype={moments}, {_ANOTHER}"
        )


def _changed_lora(old: Mapping[str, Any] | None, new: Mapping[str, Any] | None) -> Iterator[str]:
    """Yield a reason if the section lora has changed. `old` is None in checkpoints written before LoRA existed."""
    if old != new:
        back = "leave the section lora out" if old is None else f"set lora={_yaml(dict(old))}"
        yield f"was saved with lora = {old}, this run has {new}, so other weights are trained; {back}, {_ANOTHER}"


def _changed_model(then: ModelSpec, seq_length: int, config: Config, fits: Callable[[], str]) -> Iterator[str]:
    """Yield a reason if changed keys of the model section make the same weights compute different results.

    Args:
        then: Model of the run that saved the checkpoint.
        seq_length: Sequence length of that run.
        config: Config of this run.
        fits: Function that names the tensors that do not fit, or returns an empty text.
    """
    old = with_keys(then, max_position_embeddings=then.stem.max_position_embeddings or seq_length)
    new = with_keys(config.spec, max_position_embeddings=config.position_rows)
    allowed = config.checkpoint.allow_model_change
    keys = [key for key in differences(old, new) if key not in allowed]
    if not keys:
        return
    before, after = flat_keys(old), flat_keys(new)
    changes = ", ".join(f"model.{key} {before[key]} -> {after[key]}" for key in keys)
    back = " ".join(shlex.quote(f"model.{key}={_yaml(before[key])}") for key in keys)
    text = f"holds the weights of another model ({changes}); set {back}, {_ANOTHER}"
    if not fits():
        names = ",".join([*allowed, *keys])
        text += f". To continue the same weights as this model, set checkpoint.allow_model_change=[{names}]"
    yield text


def _yaml(value: Any) -> str:
    """Return a value in the form of an override on the command line."""
    if isinstance(value, BaseModel):
        value = value.model_dump(mode="json")
    return yaml.safe_dump(value, default_flow_style=True, width=math.inf).removesuffix("\n").removesuffix("\n...")


def find_checkpoint(
    config: Config, run: Path, parallel: ParallelState, fingerprint: str | None
) -> CheckpointReader | None:
    """Open the newest undamaged checkpoint of `run`; return None if there are no checkpoints. Collective.

    Files that a killed save left behind are removed. Damaged checkpoints are renamed, with a warning, so the result
    may be older than the checkpoint that `check_resume` returned. `config` is the config of the run with all stages.

    Raises:
        DamagedCheckpoint: If all checkpoints are damaged.
        IncompatibleCheckpoint: If the run cannot continue from the checkpoint (`check_same_run`).
    """
    folder, group = checkpoint_folder(run, config.checkpoint.folder), parallel.world.group
    if parallel.world.is_first:
        clean_incomplete(folder)
    reader = newest_good(folder, verify=config.checkpoint.verify, group=group)
    if reader is not None:
        on_all_ranks(lambda: check_same_run(config, fingerprint, reader), group)
    return reader


def saved_choice(config: Config, reader: CheckpointReader | None) -> FilterChoice | None:
    """Return the choice of fp8.auto_filter that checkpoint `reader` holds.

    Return None if there is no checkpoint, if it holds no choice, or if a key of the section fp8 has changed.
    """
    if reader is None:
        return None
    saved = reader.metadata["config"]["fp8"]
    if any(saved.get(key) != value for key, value in config.model_dump(mode="json")["fp8"].items()):
        return None
    layers = reader.metadata.get("fp8_left_out")
    return None if layers is None else kept_choice(layers)


@torch.no_grad()
def load_state(trainer: RankTrainer, reader: CheckpointReader) -> int:
    """Load a checkpoint, log the config keys that changed since, and return its number of steps. Collective."""
    state = trainer.optimizer.state()
    wanted = tensors(trainer, state)
    saved = load(reader, wanted, optional=_can_lack(trainer.config, reader), verify=False)
    trainer.optimizer.restore(state, saved["optimizer_steps"])
    if AVERAGE in state and not any(name.startswith(_AVERAGES) for name in reader.tensors):
        trainer.optimizer.restart_average()
    lacking = sorted(wanted.keys() - reader.tensors.keys())
    if moments := [name for name in lacking if not name.startswith(("fp8.", _AVERAGES, _OUTER_MOMENTA))]:
        logger.info(f"moments that start at 0, since another rule updated their weights: {join_first(moments)}")
    trainer.fp8.invalidate_weights()
    trainer.strategy.invalidate()
    changes = changed_keys(saved["config"], trainer.config.model_dump(mode="json"))
    if changes:
        logger.info(f"changed in the config since {reader.path.name}: {'; '.join(changes)}")
    rates = schedule_change(saved["config"], trainer.config, saved["step"])
    if rates is not None:
        logger.info(rates)
    return int(saved["step"])
