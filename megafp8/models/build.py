"""Constructors of a pipeline stage and of a single layer for any architecture."""

from __future__ import annotations

from typing import Any

from megafp8.layers.context import BuildContext
from megafp8.layers.recompute import BlockMemory
from megafp8.models.block import Block, PredictionLayer
from megafp8.models.gpt import GPTStage
from megafp8.models.t5 import T5Stage
from megafp8.spec import ModelSpec


def build_stage(model: ModelSpec, context: BuildContext, **options: Any) -> GPTStage:
    """Construct a stage of the model. `options` are the keyword arguments of `GPTStage`."""
    return _stage_type(model)(model, context, **options)


def build_layer(model: ModelSpec, context: BuildContext, index: int, memory: BlockMemory) -> Block | PredictionLayer:
    """Construct layer `index` of the model without the rest of its stage."""
    return _stage_type(model).make_layer(index, model, context, memory)


def _stage_type(model: ModelSpec) -> type[GPTStage]:
    """Return the stage class of the model's architecture."""
    return T5Stage if model.architecture == "t5" else GPTStage
