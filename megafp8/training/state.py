"""What a checkpoint of a run holds, by global name, and how a run continues from it.

    model.<name>                                   weights, in the model's dtype
    optimizer.{exp_avg,exp_avg_sq}.<name>          Adam's moments, in optimizer.moments_dtype; those in FP8 as bf16
    optimizer.master.<name>                        fp32, only where the weight is not
    fp8.<layer>.<operand>.{amax_history,scale}     delayed scaling's state; static's {amax,calibrated_steps}
    fp8.<layer>.input.channel_scale                smooth SwiGLU's, of all channels

The position in the data is a number of samples for each data set (`data.progress`), and there is no random-number
state: order and initial values are functions of the seed (`data.samples`, `tensor_parallel.random`), which is in the
metadata with the config.

A run that resumes with another FP8 recipe, or with other layers in FP8, starts those scales afresh. It is refused where
the data would not continue where they stopped, where the weights would be those of another model, and where the
checkpoint has other tensors than the run (`check_same_run`). The log lists all other keys of the config that changed.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import yaml
from pydantic import BaseModel, ValidationError
from torch import Tensor

from megafp8 import __version__
from megafp8.checkpoint import (
    BackgroundSaver,
    FolderLock,
    IncompatibleCheckpoint,
    OpenedCheckpoint,
    Rectangles,
    clean_incomplete,
    collect,
    collect_fragments,
    config_hash,
    latest,
    load,
    misfits,
    newest_good,
    newest_readable,
    save,
)
from megafp8.checkpoint.checksums import read_file
from megafp8.checkpoint.failures import together
from megafp8.checkpoint.store import METADATA_FILE
from megafp8.config import Config, ModelConfig
from megafp8.conversion.hf_config import canonical, differences
from megafp8.conversion.target import TOKENIZER_FOLDER, with_companions
from megafp8.distributed.collectives import broadcast_object
from megafp8.distributed.sharding import Shape, spec_of
from megafp8.optimizer.adam import State
from megafp8.parallel_state import ParallelState
from megafp8.training.auto_filter import Choice, kept_choice
from megafp8.training.cuda_graphs import silent
from megafp8.training.describe import planned_stage, position_rows
from megafp8.training.learning_rate import schedule_change, schedule_jump
from megafp8.training.pipeline import stages_of
from megafp8.training.trainer import DTYPES, Trainer


def checkpoint_folder(run: Path) -> Path:
    """Where the checkpoints of the run in folder `run` are."""
    return run / "checkpoints"


def weights(trainer: Trainer) -> dict[str, Rectangles]:
    """Views of this rank's weights; where it has no whole ones, or FP8 codes, of its share of the masters."""
    trainer.wait_for_weights()
    filled = [param for param in trainer.params if param not in trainer.optimizer.released]
    values = collect(filled, lambda p: p.detach(), "model.")
    return values | collect_fragments(trainer.optimizer.released_values(), "model.")


def tensors(trainer: Trainer, optimizer: State | None = None) -> dict[str, Rectangles | Tensor]:
    """Views of all state of this rank, by global name; the optimizer's is that of `optimizer`, if given."""
    state: dict[str, Rectangles | Tensor] = {**weights(trainer)}
    for key, fragments in (optimizer or trainer.optimizer.state()).items():
        state |= collect_fragments(fragments, f"optimizer.{key}.")
    return state | trainer.fp8.state_dict()


def tensor_kinds(config: Config) -> dict[str, tuple[Shape, torch.dtype]]:
    """Global shape and dtype of the tensors of a checkpoint of `config`, by name, but for those of FP8.

    Needs neither memory nor a process group.
    """
    weight, moment = DTYPES[config.training.precision], DTYPES[config.optimizer.moments_dtype]
    dtypes = {"model.": weight}
    dtypes |= dict.fromkeys(
        ("optimizer.exp_avg.", "optimizer.exp_avg_sq."), torch.bfloat16 if moment.itemsize == 1 else moment
    )
    if weight != torch.float32:
        dtypes["optimizer.master."] = torch.float32
    stages = [planned_stage(config, stage) for stage in range(len(stages_of(config)[1]))]
    pieces = [piece for stage in stages for param in stage.parameters() for piece in spec_of(param).shards]
    return {f"{prefix}{p.name}": (p.global_shape, dtype) for p in pieces for prefix, dtype in dtypes.items()}


def tokenizer_copy(config: Config) -> dict[str, bytes]:
    """The files of the run's tokenizer, by their paths in a checkpoint; none where it is no file.

    Raises ValueError where it cannot be read.
    """
    given = config.data.tokenizer
    if given is None or given.path is None or not Path(given.path).is_file():
        return {}  # plain bytes, or an encoding of tiktoken, whose name is in the config
    return {f"{TOKENIZER_FOLDER}/{file.name}": read_file(file) for file in with_companions(Path(given.path))}


def metadata(
    config: Config,
    parallel: ParallelState,
    step: int,
    optimizer_steps: int,
    fingerprint: str | None,
    data: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """What metadata.json says besides what `save` itself says. `data`: how far each data set was read."""
    samples = step * config.training.global_batch_size
    settings = config.model_dump(mode="json")
    return {
        "consumed_samples": samples,
        "tokens": samples * config.training.seq_length,
        **({} if data is None else {"data": data}),
        "optimizer_steps": optimizer_steps,
        "tokenizer_fingerprint": fingerprint,
        "layout": {"ranks": parallel.world_size, "data": parallel.data.size, **settings["parallel"]},
        "config_hash": config_hash(settings),
        "config": settings,
    }


def _about(trainer: Trainer, step: int, fingerprint: str | None, data: Mapping[str, Any] | None) -> dict[str, Any]:
    about = metadata(trainer.config, trainer.parallel, step, trainer.optimizer.step_count, fingerprint, data)
    return {**about, "fp8_left_out": trainer.auto_filter.layers}


def save_state(
    trainer: Trainer,
    run: Path,
    step: int,
    fingerprint: str | None,
    lock: FolderLock | None = None,
    *,
    data: Mapping[str, Any] | None = None,
    files: Mapping[str, bytes] | None = None,
    keep_all: bool = False,
) -> Path:
    """Save everything after `step` steps. Collective.

    `data`: how far each data set was read (`Inputs.record`). `files`: small files that are saved with it. `keep_all`:
    remove no older checkpoint.
    """
    keep = trainer.config.checkpoint
    return save(
        checkpoint_folder(run),
        step,
        tensors(trainer),
        _about(trainer, step, fingerprint, data),
        keep_last=None if keep_all else keep.keep_last,
        keep_every=keep.keep_every,
        lock=lock,
        files=files,
    )


def begin_save(
    trainer: Trainer,
    saver: BackgroundSaver,
    step: int,
    fingerprint: str | None,
    data: Mapping[str, Any] | None = None,
) -> None:
    """The same in the background; the next update of the weights has to come after `saver.wait_copied`. Collective."""
    # A forward pass records amaxes; weights, masters and moments change in updates only.
    saver.save(
        step,
        tensors(trainer),
        _about(trainer, step, fingerprint, data),
        changes_early=lambda name: name.startswith("fp8."),
    )
    if trainer.graphs is not None:
        saver.wait_copied()  # while one thread captures a CUDA graph, the copies of another would break it


def check_resume(config: Config, run: Path, fingerprint: str | None) -> OpenedCheckpoint | None:
    """The newest checkpoint of `run` that can be opened, if there is one. Needs no process group.

    It is the one that `find_checkpoint` will choose, unless the content of a data file is damaged. Raises
    IncompatibleCheckpoint as `check_same_run` does; DamagedCheckpoint where there are checkpoints and all are damaged.
    The data sets are compared by `Inputs.resumed`.
    """
    found = newest_readable(checkpoint_folder(run))
    if found is not None:
        check_same_run(config, fingerprint, found)
    return found


def check_same_run(config: Config, fingerprint: str | None, found: OpenedCheckpoint) -> None:
    """Raise IncompatibleCheckpoint, with all reasons, where a run of `config` cannot continue from `found`.

    What decides the sequence of batches must be as it was: continuing elsewhere in other data is a mistake more often
    than a wish. So must what the model computes from given weights, but for `checkpoint.allow_model_change`; and the
    tensors must be those that the run has.
    """
    path, then = found.path, found.metadata.get("config") or {}
    if "training" not in then:
        raise IncompatibleCheckpoint(
            f"{path} was converted from {found.metadata.get('converted_from')}, which is no checkpoint of a run; start "
            f"a run from its weights with checkpoint.init_from={path} and another name"
        )
    model = saved_model(found)
    try:
        problems = [
            *_changed_data(then, config),
            *_changed_vocabulary(found.metadata["tokenizer_fingerprint"], fingerprint),
            *_changed_dtypes(then, config),
            *_changed_model(model, then["training"]["seq_length"], config, found),
            *_changed_schedule(then, config, found.metadata["step"]),
        ]
        _ = found.metadata["optimizer_steps"]
    except (KeyError, TypeError, AttributeError) as error:
        raise _unknown_config(found, error) from error
    if not problems and (wrong := misfits(tensor_kinds(config), found.index, _is_fp8)):
        problems = [f"does not fit: {wrong}"]
    if problems:
        raise IncompatibleCheckpoint("\n  ".join(f"{path} {problem}" for problem in problems))


def saved_model(found: OpenedCheckpoint) -> ModelConfig:
    """The model section of the config that checkpoint `found` was saved with. Raises IncompatibleCheckpoint."""
    try:
        return ModelConfig.model_validate((found.metadata.get("config") or {})["model"])
    except (KeyError, ValidationError) as error:
        raise _unknown_config(found, error) from error


def _unknown_config(found: OpenedCheckpoint, error: Exception) -> IncompatibleCheckpoint:
    """For a checkpoint whose metadata.json, which is as it was written, has not what this version looks for."""
    wrong = f"there is no {error}" if isinstance(error, KeyError) else " ".join(str(error).split())
    return IncompatibleCheckpoint(
        f"{found.path / METADATA_FILE}, written by megafp8 {found.metadata.get('megafp8_version')}, holds no config of "
        f"a run that megafp8 {__version__} knows: {wrong}"
    )


def _is_fp8(name: str) -> bool:
    """Whether a tensor of a checkpoint is FP8 state, which a run can start afresh."""
    return name.startswith("fp8.")


_ANOTHER = "or choose another name for a new run"


def _changed_data(then: Mapping[str, Any], config: Config) -> Iterator[str]:
    now = config.model_dump(mode="json")
    for section, key in (("", "seed"), ("training", "seq_length"), ("training", "global_batch_size")):
        old, new = (tree[section][key] if section else tree[key] for tree in (then, now))
        if old != new:
            name = f"{section}.{key}" if section else key
            yield (
                f"was saved with {name} = {old}, this run has {new}, so its data would not continue where it stopped; "
                f"set {name}={old}, {_ANOTHER}"
            )


def _changed_vocabulary(then: str | None, now: str | None) -> Iterator[str]:
    if then != now:
        known = f"fingerprint {then}, here {now}"
        yield f"was trained with another vocabulary ({known}); use that run's tokenizer, {_ANOTHER}"


def _changed_schedule(then: Mapping[str, Any], config: Config, step: int) -> Iterator[str]:
    jump = schedule_jump(then, config, step)
    if jump is not None:
        yield jump


def _changed_dtypes(then: Mapping[str, Any], config: Config) -> Iterator[str]:
    precision, moments = then["training"]["precision"], then["optimizer"].get("moments_dtype", "fp32")
    if precision != config.training.precision:
        yield (
            f"was saved with training.precision = {precision}, this run has {config.training.precision}: weights of "
            f"another dtype; set training.precision={precision}, {_ANOTHER}"
        )
    if moments != config.optimizer.moments_dtype and "fp32" in (moments, config.optimizer.moments_dtype):
        yield (
            f"was saved with optimizer.moments_dtype = {moments}, this run has {config.optimizer.moments_dtype}, and "
            f"moments may change between bf16 and fp8 only; set optimizer.moments_dtype={moments}, {_ANOTHER}"
        )


def _changed_model(then: ModelConfig, seq_length: int, config: Config, found: OpenedCheckpoint) -> Iterator[str]:
    """What of the model section would make another function of the weights; `seq_length` is that of the checkpoint."""
    old = then.model_copy(update={"max_position_embeddings": then.max_position_embeddings or seq_length})
    new = config.model.model_copy(update={"max_position_embeddings": position_rows(config)})
    allowed = config.checkpoint.allow_model_change
    keys = [key for key in differences(old, new) if key not in allowed]
    if not keys:
        return
    before, after = canonical(old), canonical(new)
    changes = ", ".join(f"model.{key} {before[key]} -> {after[key]}" for key in keys)
    back = " ".join(shlex.quote(f"model.{key}={_yaml(before[key])}") for key in keys)
    text = f"holds the weights of another model ({changes}); set {back}, {_ANOTHER}"
    if not misfits(tensor_kinds(config), found.index, _is_fp8):
        names = ",".join([*allowed, *keys])
        text += f". Should the same weights go on as this model, set checkpoint.allow_model_change=[{names}]"
    yield text


def _yaml(value: Any) -> str:
    """A value as an override on the command line has it."""
    if isinstance(value, BaseModel):
        value = value.model_dump(mode="json")
    return yaml.safe_dump(value, default_flow_style=True, width=math.inf).removesuffix("\n").removesuffix("\n...")


def changed_keys(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Where two configs differ, as `parallel.tensor 1 -> 2`. A key that one of them does not know is `unset` there."""
    old, new = dict(_leaves(then)), dict(_leaves(now))
    keys = [key for key in {**old, **new} if (key in old, old.get(key)) != (key in new, new.get(key))]
    return [f"{key} {old.get(key, 'unset')} -> {new.get(key, 'unset')}" for key in keys]


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def find_checkpoint(
    config: Config, run: Path, parallel: ParallelState, fingerprint: str | None
) -> OpenedCheckpoint | None:
    """The newest checkpoint of `run` that is good, opened; None where there is none. Collective.

    What a killed save left behind is removed; damaged checkpoints are set aside, with a warning. Raises
    DamagedCheckpoint where all are damaged, and IncompatibleCheckpoint as `check_same_run` does: the checkpoint may be
    an older one than `check_resume` looked at.
    """
    folder, group = checkpoint_folder(run), parallel.world.group
    if parallel.world.is_first:
        clean_incomplete(folder)
    found = newest_good(folder, verify=config.checkpoint.verify, group=group)
    if found is not None:
        together(lambda: check_same_run(config, fingerprint, found), group)
    return found


def saved_choice(config: Config, found: OpenedCheckpoint | None) -> Choice | None:
    """What fp8.auto_filter chose when the run of checkpoint `found` began.

    None where there is no checkpoint, that was never saved, or the fp8 section is another now.
    """
    if found is None or found.metadata["config"].get("fp8") != config.model_dump(mode="json")["fp8"]:
        return None
    layers = found.metadata.get("fp8_left_out")
    return None if layers is None else kept_choice(layers)


def load_latest(trainer: Trainer, run: Path, *, say: Callable[[str], None] = silent) -> int:
    """Continue from the newest complete checkpoint of `run`, if there is one; the steps done. Collective."""
    # One rank looks and tells the others: on a lagging network file system they might see different folders.
    world = trainer.parallel.world
    path = broadcast_object(latest(checkpoint_folder(run)) if world.is_first else None, world.group)
    return 0 if path is None else load_state(trainer, path, say=say)


@torch.no_grad()
def load_state(trainer: Trainer, checkpoint: Path | OpenedCheckpoint, *, say: Callable[[str], None] = silent) -> int:
    """Continue from `checkpoint`; the steps done. Collective.

    `checkpoint`: what `find_checkpoint` returned; or a folder, whose data files are not verified. `say` is told which
    keys of the config are others now.
    """
    state = trainer.optimizer.state()
    saved = load(checkpoint, tensors(trainer, state), optional=_is_fp8, verify=False)
    trainer.optimizer.restore(state, saved["optimizer_steps"])
    trainer.fp8.invalidate_weights()
    trainer.publish_weights()
    changes = changed_keys(saved["config"], trainer.config.model_dump(mode="json"))
    if changes:
        name = checkpoint.name if isinstance(checkpoint, Path) else checkpoint.path.name
        say(f"changed in the config since {name}: {'; '.join(changes)}")
    rates = schedule_change(saved["config"], trainer.config, saved["step"])
    if rates is not None:
        say(rates)
    return int(saved["step"])
