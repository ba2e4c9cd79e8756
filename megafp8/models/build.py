"""The stage of a model and its layers, whatever its architecture."""

from __future__ import annotations

from typing import Any

from megafp8.config import ModelConfig
from megafp8.models.block import Block, PredictionLayer
from megafp8.models.context import BuildContext
from megafp8.models.gpt import GPTStage
from megafp8.models.recompute import BlockMemory
from megafp8.models.t5 import T5Stage


def build_stage(config: ModelConfig, context: BuildContext, **options: Any) -> GPTStage:
    """`options`: those of `GPTStage`."""
    return _stage_type(config)(config, context, **options)


def build_layer(config: ModelConfig, context: BuildContext, index: int, memory: BlockMemory) -> Block | PredictionLayer:
    """Layer `index` alone."""
    return _stage_type(config).make_layer(index, config, context, memory)


def _stage_type(config: ModelConfig) -> type[GPTStage]:
    return T5Stage if config.architecture == "t5" else GPTStage
