"""The frozen model that a loss compares the trained one with, such as the reference of `data.dpo`.

It has the layout of the run and is computed in `training.precision`, so its results do not depend on the state of FP8
scaling. It has no gradients, masters or optimizer state.
"""

from __future__ import annotations

from megafp8.config import Config, Fp8Config


def frozen_config(config: Config) -> Config | None:
    """The config of the frozen model of a run; None without one, or where that is the trained one without adapters."""
    if not config.data.compares or config.lora is not None:
        return None
    parallel = config.parallel.model_copy(
        update={"zero": 0, "overlap_param_gather": False, "overlap_grad_reduce": False, "offload": False}
    )
    optimizer = config.optimizer.model_copy(update={"name": "adamw", "qk_clip": None})
    return config.model_copy(
        update={"parallel": parallel, "optimizer": optimizer, "fp8": Fp8Config(), "lora": None}
    )
