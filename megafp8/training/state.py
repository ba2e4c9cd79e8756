"""What a checkpoint of a run holds, by global name, and how a run continues from it.

    model.<name>                                   weights, in the model's dtype
    optimizer.{exp_avg,exp_avg_sq}.<name>          Adam's moments, in optimizer.moments_dtype; those in FP8 as bf16
    optimizer.master.<name>                        fp32, only where the weight is not
    fp8.<layer>.<operand>.{amax_history,scale}     delayed scaling's state; static's {amax,calibrated_steps}
    fp8.<layer>.input.channel_scale                smooth SwiGLU's, of all channels

The position in the data is a number of samples, and there is no random-number state: order and initial values are
functions of the seed (`data.samples`, `tensor_parallel.random`), which is in the metadata with the config.

A run that resumes with another FP8 recipe, or with other layers in FP8, starts those scales afresh. Which keys of the
config are others than in the checkpoint, the log says.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megafp8.checkpoint import (
    BackgroundSaver,
    DamagedCheckpoint,
    FolderLock,
    Rectangles,
    clean_incomplete,
    collect,
    collect_fragments,
    complete_checkpoints,
    latest,
    load,
    newest_good,
    read_metadata,
    save,
)
from megafp8.collectives import broadcast_object
from megafp8.config import Config
from megafp8.optimizer.adam import State
from megafp8.parallel_state import ParallelState
from megafp8.training.auto_filter import Choice, kept_choice
from megafp8.training.cuda_graphs import silent
from megafp8.training.learning_rate import check_schedule, schedule_change
from megafp8.training.trainer import Trainer


def checkpoint_folder(run: Path) -> Path:
    """Where the checkpoints of the run in folder `run` are."""
    return run / "checkpoints"


def weights(trainer: Trainer) -> dict[str, Rectangles]:
    """Views of this rank's weights; where it has no whole ones, or FP8 codes, of its share of the masters."""
    trainer.wait_for_weights()
    filled = [param for param in trainer.params if param not in trainer.optimizer.hollow]
    values = collect(filled, lambda p: p.detach(), "model.")
    return values | collect_fragments(trainer.optimizer.hollow_values(), "model.")


def tensors(trainer: Trainer, optimizer: State | None = None) -> dict[str, Rectangles | Tensor]:
    """Views of all state of this rank, by global name; the optimizer's is that of `optimizer`, if given."""
    state: dict[str, Rectangles | Tensor] = {**weights(trainer)}
    for key, fragments in (optimizer or trainer.optimizer.state()).items():
        state |= collect_fragments(fragments, f"optimizer.{key}.")
    return state | trainer.fp8.state_dict()


def config_hash(config: Mapping[str, Any]) -> str:
    """SHA-256 of a config as JSON: keys sorted, no spaces, ASCII. Where in a file a key stood makes no difference."""
    return hashlib.sha256(json.dumps(config, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def metadata(
    config: Config, parallel: ParallelState, step: int, optimizer_steps: int, fingerprint: str | None
) -> dict[str, Any]:
    """What metadata.json says besides what `save` itself says."""
    samples = step * config.training.global_batch_size
    settings = config.model_dump(mode="json")
    return {
        "consumed_samples": samples,
        "tokens": samples * config.training.seq_length,
        "optimizer_steps": optimizer_steps,
        "tokenizer_fingerprint": fingerprint,
        "layout": {"ranks": parallel.world_size, "data": parallel.data.size, **settings["parallel"]},
        "config_hash": config_hash(settings),
        "config": settings,
    }


def _about(trainer: Trainer, step: int, fingerprint: str | None) -> dict[str, Any]:
    about = metadata(trainer.config, trainer.parallel, step, trainer.optimizer.step_count, fingerprint)
    return {**about, "fp8_left_out": trainer.auto_filter.layers}


def save_state(
    trainer: Trainer,
    run: Path,
    step: int,
    fingerprint: str | None,
    lock: FolderLock | None = None,
    *,
    keep_all: bool = False,
) -> Path:
    """Save everything after `step` steps. Collective. `keep_all`: remove no older checkpoint."""
    keep = trainer.config.checkpoint
    return save(
        checkpoint_folder(run),
        step,
        tensors(trainer),
        _about(trainer, step, fingerprint),
        keep_last=None if keep_all else keep.keep_last,
        keep_every=keep.keep_every,
        lock=lock,
    )


def begin_save(trainer: Trainer, saver: BackgroundSaver, step: int, fingerprint: str | None) -> None:
    """The same in the background; the next update of the weights has to come after `saver.wait_copied`. Collective."""
    # A forward pass records amaxes; weights, masters and moments change in updates only.
    saver.save(
        step,
        tensors(trainer),
        _about(trainer, step, fingerprint),
        changes_early=lambda name: name.startswith("fp8."),
    )
    if trainer.graphs is not None:
        saver.wait_copied()  # while one thread captures a CUDA graph, the copies of another would break it


def check_resume(config: Config, run: Path, fingerprint: str | None) -> None:
    """ValueError where the newest checkpoint of `run` belongs to another run than `config`. Needs no process group.

    What decides the sequence of batches must be as it was: continuing elsewhere in other data is a mistake more often
    than a wish.
    """
    found = _newest_readable(run)
    if found is None:
        return
    path, saved = found
    then, now = saved["config"], config.model_dump(mode="json")
    if "training" not in then:
        raise ValueError(
            f"{path} was converted from {saved.get('converted_from')}, which is no checkpoint of a run; start "
            f"a run from its weights with checkpoint.init_from={path} and another name"
        )
    for section, key in (("", "seed"), ("training", "seq_length"), ("training", "global_batch_size")):
        old, new = (tree[section][key] if section else tree[key] for tree in (then, now))
        if old != new:
            name = f"{section}.{key}" if section else key
            raise ValueError(
                f"{path} was saved with {name} = {old}, this run has {new}, so its data would not continue where it "
                f"stopped; set {name}={old}, or choose another name for a new run"
            )
    check_schedule(then, config, saved["step"], path)
    if saved["tokenizer_fingerprint"] != fingerprint:
        raise ValueError(
            f"{path} was trained with another vocabulary (fingerprint {saved['tokenizer_fingerprint']}, here "
            f"{fingerprint}); use that run's tokenizer, or choose another name for a new run"
        )


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


def _newest_readable(run: Path) -> tuple[Path, dict[str, Any]] | None:
    """The newest checkpoint of `run` whose metadata can be read, with these; `find_checkpoint` says what is damaged."""
    for _, path in reversed(complete_checkpoints(checkpoint_folder(run))):
        try:
            return path, read_metadata(path)
        except DamagedCheckpoint:
            continue
    return None


def find_checkpoint(config: Config, run: Path, parallel: ParallelState) -> None:
    """Make the newest complete checkpoint of `run` one that is good. Collective; for before anything looks at it.

    What a killed save left behind is removed; damaged checkpoints are set aside, with a warning. Raises
    DamagedCheckpoint where all are damaged.
    """
    folder, group = checkpoint_folder(run), parallel.world.group
    if parallel.world.is_first:
        clean_incomplete(folder)
    newest_good(folder, verify=config.checkpoint.verify, group=group)


def saved_choice(config: Config, parallel: ParallelState, run: Path) -> Choice | None:
    """What fp8.auto_filter chose when `run` began; None where that was never saved, or the fp8 section is another now.

    Collective.
    """
    layers: list[str] | None = None
    path = latest(checkpoint_folder(run)) if parallel.world.is_first else None
    if path is not None:
        saved = read_metadata(path)
        if saved["config"]["fp8"] == config.model_dump(mode="json")["fp8"]:
            layers = saved.get("fp8_left_out")
    layers = broadcast_object(layers, parallel.world.group)
    return None if layers is None else kept_choice(layers)


@torch.no_grad()
def load_latest(trainer: Trainer, run: Path, *, say: Callable[[str], None] = silent) -> int:
    """Continue from the newest complete checkpoint of `run`, if there is one; the steps done. Collective.

    `say` is told which keys of the config are others now. That the checkpoint is good is what `find_checkpoint` saw to.
    """
    # One rank looks and tells the others: on a lagging network file system they might see different folders.
    world = trainer.parallel.world
    path = broadcast_object(latest(checkpoint_folder(run)) if world.is_first else None, world.group)
    if path is None:
        return 0
    state = trainer.optimizer.state()
    saved = load(path, tensors(trainer, state), optional=lambda name: name.startswith("fp8."), verify=False)
    trainer.optimizer.restore(state, saved["optimizer_steps"])
    trainer.fp8.invalidate_weights()
    trainer.publish_weights()
    changes = changed_keys(saved["config"], trainer.config.model_dump(mode="json"))
    if changes:
        say(f"changed in the config since {path.name}: {'; '.join(changes)}")
    rates = schedule_change(saved["config"], trainer.config, saved["step"])
    if rates is not None:
        say(rates)
    return int(saved["step"])
