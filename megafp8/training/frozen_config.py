"""The config of the frozen model that a loss compares the trained one with (`megafp8.training.frozen`)."""

from __future__ import annotations

from megafp8.config import Config, Fp8Config


def frozen_config(config: Config) -> Config | None:
    """The config of the frozen model of a run; None without one, or where that is the trained one without adapters."""
    if not config.data.compares or config.lora is not None:
        return None
    plain = {"zero": 0, "overlap_param_gather": False, "overlap_grad_reduce": False, "offload": False}
    return config.model_copy(
        update={
            "parallel": config.parallel.model_copy(update=plain),
            "optimizer": config.optimizer.model_copy(update={"name": "adamw", "qk_clip": None}),
            "checkpoint": config.checkpoint.model_copy(update={"init_optimizer": False}),
            "fp8": Fp8Config(),
            "lora": None,
        }
    )
