"""The config of the frozen model that a loss compares the trained one with."""

from __future__ import annotations

from typing import Any

from megafp8.config.schema import Config, Fp8Config, ModelConfig
from megafp8.spec import ModelSpec


def frozen_run(config: Config, teacher: ModelSpec | None = None) -> Config | None:
    """The config of the frozen model of a run; None without one, or where that is the trained one without adapters.

    `teacher`: that of `data.distillation`, if it is known; without it there is none.
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
