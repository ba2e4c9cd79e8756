"""Error that ends a run after too many skipped steps, with the names of the tensors that are not finite."""

from __future__ import annotations

import torch
from torch import Tensor

from megafp8.parallel.collectives import all_gather_objects
from megafp8.parallel.data.grad_buffer import gradient_of
from megafp8.parallel.sharding import FlatShard, spec_of
from megafp8.training.errors import Diverged
from megafp8.training.observer import StepMetrics
from megafp8.training.trainer import RankTrainer

_LISTED = 5


def _not_finite(trainer: RankTrainer, tensors: list[tuple[FlatShard, Tensor]]) -> str:
    """Return the names of the tensors of all ranks that have an infinity or NaN, as a text. Collective."""
    finite = torch.stack([x.isfinite().all() for _, x in tensors]).tolist() if tensors else []
    bad = [shard for (shard, _), is_finite in zip(tensors, finite) if not is_finite]
    bad_names = [" + ".join(part.name for part in spec_of(shard.param).shards) for shard in bad]
    names = list(
        dict.fromkeys(name for rank in all_gather_objects(bad_names, trainer.parallel.world.group) for name in rank)
    )
    remainder = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + remainder if names else "none"


def diverged(trainer: RankTrainer, metrics: StepMetrics, saved_step: int) -> Diverged:
    """Return the error for too many skipped steps in a row. Collective.

    Args:
        trainer: Trainer of this rank. The gradients of the last skipped step are still in its buffer.
        metrics: Metrics of the last skipped step.
        saved_step: Step of the newest checkpoint, or 0 if there is none.
    """
    step, skipped = metrics.step, metrics.skipped_in_a_row
    shards, config = trainer.optimizer.shards, trainer.config
    trainer.strategy.wait()
    masters = set(trainer.optimizer.released)
    values = [(f, trainer.optimizer.master_of(f) if f.param in masters else f.view(f.param.detach())) for f in shards]
    weights = _not_finite(trainer, values)
    gradients = _not_finite(trainer, [(f, gradient_of(f)) for f in shards])
    older = "" if weights == "none" else ", one from before the weights stopped being finite,"
    spike = f" ({metrics.why_skipped})" if metrics.is_spike else ""
    limit = config.optimizer.clip_grad_norm
    clip = f"a lower optimizer.clip_grad_norm (now {limit})" if limit else "optimizer.clip_grad_norm=1.0 (now off)"
    fp8 = "" if config.fp8.recipe == "none" else ", or fp8.report_interval=10 to see which layers' casts fail"
    return Diverged(
        f"training has diverged: all {skipped} steps from {step - skipped + 1} to {step} were skipped "
        f"(training.max_skipped_steps = {config.training.max_skipped_steps}). In the last one the loss was "
        f"{metrics.loss} and the gradient norm {metrics.grad_norm}{spike}.\n"
        f"Not finite: weights: {weights}; gradients: {gradients}.\n"
        f"The newest checkpoint is {f'of step {saved_step}' if saved_step else 'none'}; it was not replaced. Continue "
        f"from a checkpoint{older} with a lower optimizer.learning_rate (now {config.optimizer.learning_rate}), more "
        f"optimizer.warmup_steps (now {config.optimizer.warmup_steps}) or {clip}{fp8}. "
        "training.max_skipped_steps=0 removes the limit."
    )
