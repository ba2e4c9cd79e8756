"""Bytes that a block saves for its backward pass, tensor by tensor, on one rank and for one micro-batch.

These follow what the autograd Functions of `megafp8.ops` save, each storage once (q, k and v are views of one). Where
the CPU and CUDA differ, this is CUDA. Recompute and offload are those of `megafp8.models.recompute`.

Shapes: m tokens of a micro-batch, m_own of them on this rank between tensor-parallel regions; h hidden, a query and g
key-value heads of width d, f MLP width, all of this rank; e bytes of an element, w of a statistic.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from megafp8.config import Config
from megafp8.config.activations import ACTIVATIONS
from megafp8.fp8 import Fp8Manager
from megafp8.fp8.recipes.base import PerGemm
from megafp8.fp8.tensor import BLOCK_1X16, BLOCK_1X32, BLOCK_1X128, BLOCK_16X16, ROW, TENSOR, Granularity
from megafp8.models.gpt import fp8_layer_names, fp8_layer_sizes
from megafp8.models.recompute import BlockMemory

ELEMENT = {"bf16": 2, "fp32": 4, "fp64": 8}
"""Bytes of an activation, by `training.precision`."""
_SHARD_ALIGNMENT = {TENSOR: 1, ROW: 1, BLOCK_1X128: 128, BLOCK_1X32: 32}
"""Ranks quantize shards of a multiple of so many tokens; others, and NVFP4, are quantized whole."""


@dataclass(frozen=True)
class Sizes:
    """A rank's shard of a block and of a micro-batch; see Shapes."""

    m: int
    m_own: int
    h: int
    a: int
    g: int
    d: int
    f: int
    up: int  # outputs of the MLP's first linear layer
    e: int
    w: int


def sizes(config: Config) -> Sizes:
    model, t, training = config.model, config.parallel.tensor, config.training
    m = training.seq_length // config.parallel.context * training.micro_batch_size
    e = ELEMENT[training.precision]
    return Sizes(
        m=m,
        m_own=m // t if config.parallel.sequence_parallel else m,
        h=model.hidden_size,
        a=model.num_attention_heads // t,
        g=model.query_groups // t,
        d=model.channels,
        f=model.ffn_size // t,
        up=ACTIVATIONS[model.activation].up_width(model.ffn_size) // t,
        e=e,
        w=max(4, e),
    )


class LinearPrecision(NamedTuple):
    """Precision of a linear layer: granularities of input and weight, None in high precision, and GEMMs in it."""

    input: Granularity | None
    weight: Granularity | None
    high: PerGemm

    @property
    def fp8_wgrad(self) -> bool:
        return self.input is not None and not self.high.wgrad

    @property
    def all_fp8(self) -> bool:
        return self.input is not None and not any(self.high)


def precision(fp8: Fp8Manager, layer: str) -> LinearPrecision:
    if fp8.recipe is None or not fp8.selects(layer):
        return LinearPrecision(None, None, PerGemm(True, True, True))
    operands = fp8.recipe.operands(layer)
    assert operands is not None
    high = PerGemm(*fp8.recipe.override_linear_precision)
    return LinearPrecision(operands.input.granularity("input"), operands.weight.granularity("weight"), high)


def fp8_bytes(granularity: Granularity, r: int, c: int) -> int:
    """Bytes of an FP8 matrix `[r, c]` with its scales; NVFP4 has one for the tensor too."""
    tensor_scale = granularity in (BLOCK_1X16, BLOCK_16X16)
    return r * c + 4 * (math.prod(granularity.grid(r, c)) + tensor_scale)


def _gathered_input(layer: LinearPrecision, x: Sizes) -> int:
    """Bytes that qkv or the MLP's first linear layer saves of its input."""
    if not layer.fp8_wgrad:
        return x.m * x.h * x.e
    assert layer.input is not None
    alignment = _SHARD_ALIGNMENT.get(layer.input)
    shard = layer.all_fp8 and layer.input is not TENSOR and alignment is not None and x.m_own % alignment == 0
    return fp8_bytes(layer.input, x.h, x.m_own if shard else x.m)


def saved_by_block(config: Config, fp8: Fp8Manager, index: int, memory: BlockMemory) -> dict[str, int]:
    """Bytes that block `index` saves for its backward pass, offloaded or not."""
    x, model, training = sizes(config), config.model, config.training
    stream = x.m_own * x.h * x.e
    if memory.full:
        return {"block input": stream}
    qkv, proj, up, down = (precision(fp8, layer) for layer in fp8_layer_names(model, range(index, index + 1)))
    activation = ACTIVATIONS[model.activation]
    saved = {
        "residual stream": stream * (1 if model.parallel_block else 2),
        "norm statistics": 2 * x.m_own * x.w * (2 if model.normalization == "layernorm" else 1),
        "qkv input": 0 if memory.norms else _gathered_input(qkv, x),
        "up input": 0 if memory.norms else _gathered_input(up, x),
        "q, k, v": x.m * (x.a + 2 * x.g) * x.d * x.e,
        "up output": x.m * x.up * x.e,
    }
    if not memory.attention or not proj.fp8_wgrad:  # in high precision also the projection's input
        saved["attention output"] = x.m * x.a * x.d * x.e
    if not memory.attention:
        saved["attention log-sums"] = x.m * x.a * x.w
        if model.qk_norm:
            saved["normalized q and k"] = x.m * (x.a + x.g) * (x.d * x.e + x.w)
        masked = model.sliding_window is not None or config.data.reset_at_documents
        if masked and config.parallel.context == 1:  # context-parallel ranks compute masks when needed
            samples = training.micro_batch_size if config.data.reset_at_documents else 1
            saved["attention mask"] = samples * training.seq_length**2 * x.e
    if proj.fp8_wgrad:
        assert proj.input is not None
        saved["proj input"] = fp8_bytes(proj.input, x.a * x.d, x.m)
    if activation.gated and not activation.fused:
        saved["activated gate"] = x.m * x.f * x.e
    if not memory.activation:
        saved["down input"] = x.m * x.f * x.e
        if down.fp8_wgrad:
            assert down.input is not None
            saved["down input"] = fp8_bytes(down.input, x.f, x.m)
    return saved


def block_backward(config: Config, fp8: Fp8Manager, index: int) -> int:
    """Bytes that the backward of block `index` needs at most beside what is saved: in its MLP.

    These are the gradients of the activation's output and input, the latter FP8 in both orientations if it is fused
    with the cast, and of the residual stream, sharded and gathered.
    """
    x, up = sizes(config), ACTIVATIONS[config.model.activation].up_layer
    fused = precision(fp8, f"layers.{index}.mlp.{up}").all_fp8
    return x.m * x.f * x.e + x.m * x.up * (2 if fused else x.e) + x.m_own * x.h * x.e + x.m * x.h * x.e


def deferred_wgrad(config: Config, fp8: Fp8Manager, index: int) -> int:
    """Bytes of the operands of block `index`'s weight gradients, for schedules that compute these separately: of each
    linear layer the input and the output's gradient, columnwise in FP8."""
    x, total = sizes(config), 0
    for name, (k, n) in fp8_layer_sizes(config.model, config.parallel.tensor, range(index, index + 1)).items():
        total += x.m * (k + n) * (1 if precision(fp8, name).fp8_wgrad else x.e)
    return total
