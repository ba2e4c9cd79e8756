"""Config of the frozen model that a loss compares the trained model with (`megafp8.training.frozen`)."""

from __future__ import annotations

from megafp8.config import Config, ConfigError, Problem, check_layout, with_keys
from megafp8.config.frozen import frozen_run
from megafp8.spec import ModelSpec


def frozen_config(config: Config) -> Config | None:
    """Return the config of the frozen model, with the teacher that the config names, or None without one."""
    return frozen_run(config, teacher_of(config))


def live(config: Config) -> Config:
    """Return `config` with a live teacher instead of precomputed logits."""
    assert config.data.distillation is not None
    distillation = config.data.distillation.model_copy(update={"logits": "live"})
    return config.model_copy(update={"data": config.data.model_copy(update={"distillation": distillation})})


def teacher_of(config: Config) -> ModelSpec | None:
    """Return the model of `data.distillation.teacher`, or None without a live teacher.

    Raises ConfigError if the teacher cannot be read or has another vocabulary.
    """
    distillation = config.data.distillation
    if distillation is None or not config.data.compares:
        return None
    from megafp8.conversion.formats import open_source  # a dry run without a teacher needs no format

    key, folder, vocabulary = "data.distillation.teacher", distillation.teacher, config.spec.stem.vocab_size
    try:
        model = open_source(folder, config.spec.stem.vocab_multiple).model
    except ValueError as error:
        raise ConfigError("config", [Problem(key, folder, str(error), "name the folder of a model")]) from error
    if model.architecture != "gpt":
        raise ConfigError("config", [Problem(key, folder, f"is a {model.architecture}", "name a GPT model")])
    if model.stem.vocab_size != vocabulary:
        rule = f"has a vocabulary of {model.stem.vocab_size} tokens, and model.vocab_size is {vocabulary}"
        raise ConfigError("config", [Problem(key, folder, rule, "name a teacher with the vocabulary of the student")])
    return with_keys(model, mtp_num_layers=0, vocab_multiple=config.spec.stem.vocab_multiple)


def check_frozen(config: Config, world_size: int) -> None:
    """Raise ConfigError if the teacher cannot be read, or cannot run in the layout of the run. Needs no group."""
    if config.data.distillation is None or not config.data.compares:
        return
    frozen = frozen_config(config)
    assert frozen is not None
    try:
        check_layout(frozen, world_size)
    except ConfigError as error:
        raise ConfigError(
            f"the teacher, {config.data.distillation.teacher}, in the layout of the run", error.problems
        ) from error
