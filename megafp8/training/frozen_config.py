"""The config of the frozen model that a loss compares the trained one with (`megafp8.training.frozen`)."""

from __future__ import annotations

from typing import Any

from megafp8.config import Config, ConfigError, Fp8Config, ModelConfig, Problem, check_layout
from megafp8.conversion.formats import open_source


def frozen_config(config: Config) -> Config | None:
    """The config of the frozen model of a run; None without one, or where that is the trained one without adapters."""
    teacher = config.data.distillation
    if not config.data.compares or (teacher is None and config.lora is not None):
        return None
    model = config.model if teacher is None else _model_of(config, teacher.teacher)
    plain: dict[str, Any] = {"zero": 0, "overlap_param_gather": False, "overlap_grad_reduce": False, "offload": False}
    if isinstance(config.parallel.layers_per_stage, list) and teacher is not None:
        plain["layers_per_stage"] = None  # it may have another number of layers
    return config.model_copy(
        update={
            "model": model,
            "parallel": config.parallel.model_copy(update=plain),
            "optimizer": config.optimizer.model_copy(update={"name": "adamw", "qk_clip": None}),
            "checkpoint": config.checkpoint.model_copy(update={"init_optimizer": False}),
            "data": config.data.model_copy(update={"dpo": None, "distillation": None, "grpo": None}),
            "fp8": Fp8Config(),
            "lora": None,
        }
    )


def _model_of(config: Config, folder: str) -> ModelConfig:
    """The teacher in `folder`. Raises ConfigError if it cannot be read, or has another vocabulary."""
    key, vocabulary = "data.distillation.teacher", config.model.vocab_size
    try:
        model = open_source(folder, config.model.vocab_multiple).model
    except ValueError as error:
        raise ConfigError("config", [Problem(key, folder, str(error), "name the folder of a model")]) from error
    if model.architecture != "gpt":
        raise ConfigError("config", [Problem(key, folder, f"is a {model.architecture}", "name a model of GPT")])
    if model.vocab_size != vocabulary:
        rule = f"has a vocabulary of {model.vocab_size} tokens, and model.vocab_size is {vocabulary}"
        raise ConfigError("config", [Problem(key, folder, rule, "name a teacher with the vocabulary of the student")])
    return model.model_copy(update={"mtp_num_layers": 0, "vocab_multiple": config.model.vocab_multiple})


def check_frozen(config: Config, world_size: int) -> None:
    """Raise ConfigError if the teacher cannot be read, or not be run in the layout of the run. Needs no group."""
    if config.data.distillation is None:
        return
    frozen = frozen_config(config)
    assert frozen is not None
    try:
        check_layout(frozen, world_size)
    except ConfigError as error:
        raise ConfigError(
            f"the teacher, {config.data.distillation.teacher}, in the layout of the run", error.problems
        ) from error
