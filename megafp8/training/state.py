"""What a checkpoint of a run holds, by global name, and how a run continues from it.

    model.<name>                                   weights, in the model's dtype
    optimizer.{exp_avg,exp_avg_sq}.<name>          Adam's moments, in optimizer.moments_dtype
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
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megafp8.checkpoint import (
    Rectangles,
    clean_incomplete,
    collect,
    collect_fragments,
    latest,
    load,
    read_metadata,
    save,
)
from megafp8.collectives import all_gather_objects
from megafp8.config import Config
from megafp8.parallel_state import ParallelState
from megafp8.training.auto_filter import Choice, kept_choice
from megafp8.training.cuda_graphs import silent
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


def tensors(trainer: Trainer) -> dict[str, Rectangles | Tensor]:
    """Views of all state of this rank, by global name."""
    state: dict[str, Rectangles | Tensor] = {**weights(trainer)}
    for key, fragments in trainer.optimizer.state().items():
        state |= collect_fragments(fragments, f"optimizer.{key}.")
    return state | trainer.fp8.state_dict()


def config_hash(config: Mapping[str, Any]) -> str:
    """SHA-256 of a config as JSON: keys sorted, no spaces, ASCII. Where in a file a key stood makes no difference."""
    return hashlib.sha256(json.dumps(config, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def metadata(
    config: Config, parallel: ParallelState, step: int, optimizer_steps: int, fingerprint: str | None
) -> dict[str, Any]:
    """What metadata.json says besides format, step, date, versions and `contents`."""
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


def contents(state: Mapping[str, Rectangles | Tensor], parallel: ParallelState) -> dict[str, int]:
    """How many tensors all ranks' `state` comes to, and how many bytes. Collective."""
    own = {}
    for name, value in state.items():
        shape = tuple(value.shape) if isinstance(value, Tensor) else value.global_shape
        own[name] = math.prod(shape) * value.dtype.itemsize
    sizes = {name: size for names in all_gather_objects(own, parallel.world.group) for name, size in names.items()}
    return {"tensors": len(sizes), "bytes": sum(sizes.values())}


def save_state(trainer: Trainer, run: Path, step: int, fingerprint: str | None) -> Path:
    """Save everything after `step` steps. Collective."""
    config, state = trainer.config, tensors(trainer)
    about = {
        **contents(state, trainer.parallel),
        **metadata(config, trainer.parallel, step, trainer.optimizer.step_count, fingerprint),
        "fp8_left_out": trainer.auto_filter.layers,
    }
    return save(checkpoint_folder(run), step, state, about, keep_last=config.checkpoint.keep_last)


def check_resume(config: Config, run: Path, fingerprint: str | None) -> None:
    """ValueError where the newest checkpoint of `run` belongs to another run than `config`. Needs no process group.

    What decides the sequence of batches must be as it was: continuing elsewhere in other data is a mistake more often
    than a wish.
    """
    path = latest(checkpoint_folder(run))
    if path is None:
        return
    saved = read_metadata(path)
    then, now = saved["config"], config.model_dump(mode="json")
    for section, key in (("", "seed"), ("training", "seq_length"), ("training", "global_batch_size")):
        old, new = (tree[section][key] if section else tree[key] for tree in (then, now))
        if old != new:
            name = f"{section}.{key}" if section else key
            raise ValueError(
                f"{path} was saved with {name} = {old}, this run has {new}, so its data would not continue where it "
                f"stopped; set {name}={old}, or choose another name for a new run"
            )
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
    layers = all_gather_objects(layers, parallel.world.group)[0]
    return None if layers is None else kept_choice(layers)


def _find(run: Path) -> Path | None:
    """The newest complete checkpoint of `run`; what a killed save left behind is removed."""
    clean_incomplete(checkpoint_folder(run))
    return latest(checkpoint_folder(run))


@torch.no_grad()
def load_latest(trainer: Trainer, run: Path, *, say: Callable[[str], None] = silent) -> int:
    """Continue from the newest complete checkpoint of `run`, if there is one; the steps done. Collective.

    `say` is told which keys of the config are others now.
    """
    # One rank looks and tells the others: on a lagging network file system they might see different folders.
    world = trainer.parallel.world
    path = all_gather_objects(_find(run) if world.is_first else None, world.group)[0]
    if path is None:
        return 0
    saved = load(path, tensors(trainer), optional=lambda name: name.startswith("fp8."))
    trainer.optimizer.copy_masters_to_params()
    trainer.optimizer.step_count = saved["optimizer_steps"]
    trainer.fp8.invalidate_weights()
    trainer.publish_weights()
    changes = changed_keys(saved["config"], trainer.config.model_dump(mode="json"))
    if changes:
        say(f"changed in the config since {path.name}: {'; '.join(changes)}")
    return int(saved["step"])
