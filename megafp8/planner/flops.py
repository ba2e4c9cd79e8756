"""Floating-point operations of a model, by the formula behind every published figure of this project.

The total is 6·N·tokens, forward and backward, for the matrices by which tokens are multiplied, plus attention. N
includes the output layer, once more for each depth of multi-token prediction, and only those experts to which a token
is sent; it excludes the embedding lookup. Causal attention counts half, and a sliding window only counts the visible
pairs. Document boundaries are not subtracted, and recomputation is not added. The sizes come from the model's own
layers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

from megafp8.config import Config
from megafp8.fp8.manager import Fp8Manager
from megafp8.layers.context import planning_context
from megafp8.layers.costs import MicroBatch
from megafp8.layers.recompute import KEEP_ALL
from megafp8.models.block import Block
from megafp8.models.build import build_layer, build_stage


class Flops(NamedTuple):
    """Forward FLOPs of one sample: products with weights, and attention."""

    products: float = 0.0
    attention: float = 0.0

    def __add__(self, other: Flops) -> Flops:  # type: ignore[override]
        return Flops(self.products + other.products, self.attention + other.attention)

    def trained(self, *, frozen: bool = False) -> float:
        """Return the FLOPs of forward and backward.

        With `frozen`, the weights have no gradients (LoRA; products with adapters are not counted).
        """
        return (2 if frozen else 3) * self.products + 3 * self.attention


def layer_flops(config: Config, index: int) -> Flops:
    """Return the forward FLOPs of layer `index` for one sample."""
    linear, block, batch = _planned_layer(config, index)
    return Flops(linear) + _block_flops(block, batch)


def _planned_layer(config: Config, index: int) -> tuple[float, Block, MicroBatch]:
    """Return the forward FLOPs of the linear layers of layer `index` for one sample, its block, and the sample."""
    one, planned = _of_one_sample(config), Fp8Manager(None, amax_group=None)
    block = build_layer(config.spec, planning_context(one, planned), index, KEEP_ALL).block
    batch = MicroBatch.from_config(one, None, decoder=config.spec.layers[index].is_decoder)
    sites = [state.site for state in planned.layers if not state.site.expert]
    products = float(sum(batch.tokens_of(site) * site.inputs * site.outputs for site in sites))
    return 2.0 * products, block, batch


def _block_flops(block: Block, batch: MicroBatch) -> Flops:
    """Return the forward FLOPs of a block outside linear layers."""
    works = block.attentions(batch)
    attention = sum(2 * work.pairs * work.heads * (work.width + work.value_width) for work in works)
    return Flops(block.flops(batch), attention)


def output_flops(config: Config) -> Flops:
    """Return the forward FLOPs of the model's head for one sample.

    They are the output layer at all depths of multi-token prediction, and other products of the head.
    """
    one, planned = _of_one_sample(config), Fp8Manager(None, amax_group=None)
    layers = config.spec.indices
    stage = build_stage(config.spec, planning_context(one, planned), layers=layers, positions=1, blocks=False)
    assert stage.head is not None
    head_flops = stage.head.flops(MicroBatch.from_config(one, None))
    sites = [state.site for state in planned.layers if not state.site.shared]
    weights = sum(site.inputs * site.outputs for site in sites)
    tokens = config.decoder_length or config.training.seq_length
    return Flops(2.0 * tokens * weights * (1 + config.spec.num_prediction_layers) + head_flops)


def model_flops(config: Config) -> Flops:
    """Return the forward FLOPs of the whole model for one sample."""
    known: dict[Any, Flops] = {}
    total = output_flops(config)
    for index in config.spec.indices:
        kind = config.spec.kinds[index]
        if kind not in known:
            known[kind] = layer_flops(config, index)
        total += known[kind]
    return total


def document_flops(config: Config) -> Callable[[int], float]:
    """Return a function from the number of tokens of a document to the forward FLOPs that the model spends on it.

    Linear layers and recurrences are linear in the tokens. Attention, which restarts at each document, is quadratic up
    to its window or chunk.
    """
    kinds = [config.spec.kinds[index] for index in config.spec.indices]
    counts, sample = Counter(kinds), MicroBatch.from_config(_of_one_sample(config), None)
    indices = dict(zip(kinds, config.spec.indices))
    layers = [(counts[kind], *_planned_layer(config, index)[:2]) for kind, index in indices.items()]
    linear = output_flops(config).products + sum(count * products for count, products, _ in layers)

    @cache
    def flops(tokens: int) -> float:
        document = replace(sample, tokens=tokens, own_tokens=tokens, length=tokens)
        blocks = sum(count * sum(_block_flops(block, document)) for count, _, block in layers)
        return linear / sample.length * tokens + blocks

    return flops


def flops_per_token(config: Config, frozen: Config | None = None) -> float:
    """Return the FLOPs of forward and backward per token of a sample, including the forward pass of a `frozen` model.

    For T5, the FLOPs of a sample are divided by the encoder's tokens.
    """
    flops = model_flops(config)
    compared = Flops() if frozen is None else model_flops(frozen)
    total = flops.trained(frozen=config.lora is not None) + compared.products + compared.attention
    return total / config.training.seq_length


def describe_flops(config: Config, frozen: Config | None = None) -> str:
    """Return a text with the FLOPs per token, and which of them the model does not compute."""
    across = "; attention across documents is counted, though masked" if config.data.reset_at_documents else ""
    return f"{flops_per_token(config, frozen) / 1e9:.3f} GFLOP per token{across}"


def matmul_parameters(config: Config) -> int:
    """Return the number of weights by which a token is multiplied."""
    return round(model_flops(config).products / 2 / config.training.seq_length)


_RELATIVE_RATE = {False: 0.85, True: 1.3}
"""FLOP/s of a block, in bf16 or FP8, relative to the output layer, which is bf16 and has no attention, norms or casts.
On H200, the output layer of Llama-3-8B takes as long as 1.74 blocks in bf16 or 2.7 in FP8."""


def output_layer_in_blocks(config: Config) -> float:
    """Return the approximate time of the output layer and of multi-token prediction, in units of one block's time."""
    block, rate = layer_flops(config, 0).trained(), _RELATIVE_RATE[config.fp8.recipe != "none"]
    depths = [layer_flops(config, index).trained() for index in config.spec.indices[config.spec.num_blocks :]]
    # A depth is a block, at the rate of blocks, and a projection, at the rate of the output layer.
    projections = sum(depth - block for depth in depths)
    return len(depths) + (output_flops(config).trained() + projections) * rate / block


def _of_one_sample(config: Config) -> Config:
    """Return the config of a step with one sample on one rank."""
    alone = {"tensor": 1, "context": 1, "expert": 1, "expert_tensor": 1}
    parallel = config.parallel.model_copy(update=alone)
    training = config.training.model_copy(update={"micro_batch_size": 1})
    return config.model_copy(update={"parallel": parallel, "training": training})
