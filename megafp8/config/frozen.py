"""Config of the frozen model with which a loss compares the trained model."""

from __future__ import annotations

from typing import Any

from megafp8.config.schema import Config, Fp8Config, ModelConfig
from megafp8.spec import ModelSpec


def frozen_run(config: Config, teacher: ModelSpec | None = None) -> Config | None:
    """Return the config of the frozen model of a run.

    Return None if the run has no frozen model, or if the frozen model is the trained model without its adapters.

    Args:
        config: Config of the run.
        teacher: Network of the teacher of `data.distillation`, or None if it is not known yet; the result is then None
            for a run with distillation.
    """
    distills = config.data.distillation is not None
    if not config.data.compares or (teacher is None if distills else config.lora is not None):
        return None
    plain: dict[str, Any] = {"zero": 0, "overlap_param_gather": False, "overlap_grad_reduce": False, "offload": False}
    if isinstance(config.parallel.layers_per_stage, list) and distills:
        plain["layers_per_stage"] = None  # it may have another number of layers
    return config.model_copy(
        update={
            "model": config.model if teacher is None else ModelConfig.model_validate(dict(teacher.keys)),
            "parallel": config.parallel.model_copy(update=plain),
            "optimizer": config.optimizer.model_copy(update={"name": "adamw", "qk_clip": None}),
            "checkpoint": config.checkpoint.model_copy(update={"init_optimizer": False}),
            "data": config.data.model_copy(update={"dpo": None, "distillation": None, "grpo": None}),
            "fp8": Fp8Config(),
            "lora": None,
        }
    )
