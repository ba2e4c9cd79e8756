"""The stage of a model, whatever its architecture."""

from __future__ import annotations

from typing import Any

from megafp8.config import ModelConfig
from megafp8.models.context import BuildContext
from megafp8.models.gpt import GPTStage
from megafp8.models.t5 import T5Stage


def build_stage(config: ModelConfig, context: BuildContext, **options: Any) -> GPTStage:
    """`options`: those of `GPTStage`."""
    return (T5Stage if config.architecture == "t5" else GPTStage)(config, context, **options)
