"""Bytes that a block keeps for its backward pass, tensor by tensor, on one rank and for one micro-batch.

These follow the Functions of the model: whatever `megafp8.fp8` and `megafp8.models` save, each storage once (q, k and v
are views of one). Where the CPU and CUDA differ, this is CUDA. Recompute and offload are those of
`megafp8.models.recompute`.

Shapes: m tokens of a micro-batch, m_own of them on this rank between tensor-parallel regions; h hidden, a query and g
key-value heads of width d, f MLP width, all of this rank; e bytes of an element, w of a statistic.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from megafp8.config import Config
from megafp8.fp8 import Fp8Manager
from megafp8.fp8.recipes.base import PerGemm
from megafp8.fp8.tensor import TENSOR, Granularity
from megafp8.models.gpt import fp8_layer_sizes
from megafp8.models.recompute import BlockMemory

ELEMENT = {"bf16": 2, "fp32": 4, "fp64": 8}
"""Bytes of an activation, by `training.precision`."""
FACTOR = 4


@dataclass(frozen=True)
class Sizes:
    """A rank's share of a block, and of a micro-batch."""

    m: int
    m_own: int
    h: int
    a: int
    g: int
    d: int
    f: int
    up: int  # outputs of the MLP's first product
    e: int
    w: int


def sizes(config: Config) -> Sizes:
    """What `config` makes of a block on each rank."""
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
        up=model.ffn_size // t * (2 if model.activation == "swiglu" else 1),
        e=e,
        w=max(4, e),
    )


class LinearPrecision(NamedTuple):
    """How a linear layer computes: `input`, `weight` say what shares a scale, None in high precision.

    `shard_alignment`: the multiple of tokens of which a rank casts its own shard; None where the whole is cast.
    """

    input: Granularity | None
    weight: Granularity | None
    high: PerGemm
    shard_alignment: int | None = None

    @property
    def fp8_wgrad(self) -> bool:
        return self.input is not None and not self.high.wgrad

    @property
    def takes_codes(self) -> bool:
        return self.input is not None and not any(self.high)


def precision(fp8: Fp8Manager, layer: str) -> LinearPrecision:
    """How the layer of this name computes."""
    if fp8.recipe is None or not fp8.selects(layer):
        return LinearPrecision(None, None, PerGemm(True, True, True))
    operands = fp8.recipe.operands(layer)
    assert operands is not None
    high = PerGemm(*fp8.recipe.override_linear_precision)
    alignment = operands.input.capabilities.shard_alignment
    return LinearPrecision(operands.input.granularity("input"), operands.weight.granularity("weight"), high, alignment)


def codes(granularity: Granularity, r: int, c: int) -> int:
    """Bytes of an `[r, c]` matrix of codes with its factors; NVFP4 has one for the tensor too."""
    own = FACTOR if granularity.two_level else 0
    return r * c + FACTOR * math.prod(granularity.grid(r, c)) + own


def _column_parallel_input(layer: LinearPrecision, x: Sizes) -> int:
    """What qkv or the MLP's first product keeps of its input."""
    if not layer.fp8_wgrad:
        return x.m * x.h * x.e
    assert layer.input is not None
    alignment = layer.shard_alignment
    own = layer.takes_codes and layer.input is not TENSOR and alignment is not None and x.m_own % alignment == 0
    return codes(layer.input, x.h, x.m_own if own else x.m)


def block_keeps(config: Config, fp8: Fp8Manager, index: int, memory: BlockMemory) -> dict[str, int]:
    """Bytes that block `index` keeps until its backward pass; offloaded or not."""
    x, model, name = sizes(config), config.model, f"layers.{index}"
    stream = x.m_own * x.h * x.e
    if memory.full:
        return {"block input": stream}
    up_name = "gate_up" if model.activation == "swiglu" else "up"
    qkv, proj, up, down = (
        precision(fp8, f"{name}.{layer}") for layer in ("attention.qkv", "attention.proj", f"mlp.{up_name}", "mlp.down")
    )
    statistics = x.m_own * x.w * (2 if model.normalization == "layernorm" else 1)
    kept = {
        "residual stream": stream * (1 if model.parallel_block else 2),
        "norm statistics": 2 * statistics,
        "qkv input": 0 if memory.norms else _column_parallel_input(qkv, x),
        "up input": 0 if memory.norms else _column_parallel_input(up, x),
    }
    kept |= _attention_keeps(config, proj, memory)
    kept["MLP product"] = x.m * x.up * x.e
    if memory.activation:
        kept["down input"] = 0
    elif down.fp8_wgrad:
        assert down.input is not None
        kept["down input"] = codes(down.input, x.f, x.m)
    else:
        kept["down input"] = x.m * x.f * x.e
    return kept


def _attention_keeps(config: Config, proj: LinearPrecision, memory: BlockMemory) -> dict[str, int]:
    """The projection's input is attention's own output where it is kept as values."""
    x, model, training = sizes(config), config.model, config.training
    output = x.m * x.a * x.d * x.e
    kept = {"q, k, v": x.m * (x.a + 2 * x.g) * x.d * x.e}
    if not memory.attention:
        kept["attention output"] = output
        kept["attention log-sums"] = x.m * x.a * x.w
        if model.qk_norm:
            kept["normed q and k"] = x.m * (x.a + x.g) * (x.d * x.e + x.w)
        masked = model.sliding_window is not None or config.data.reset_at_documents
        if masked and config.parallel.context == 1:  # ranks of one sequence make masks as they need them
            samples = training.micro_batch_size if config.data.reset_at_documents else 1
            kept["attention mask"] = samples * training.seq_length**2 * x.e
    elif not proj.fp8_wgrad:
        kept["attention output"] = output
    if proj.fp8_wgrad:
        assert proj.input is not None
        kept["proj input"] = codes(proj.input, x.a * x.d, x.m)
    return kept


def block_backward(config: Config, fp8: Fp8Manager, index: int) -> int:
    """Bytes that block `index` needs beside what is kept while its backward runs, at most: in the MLP's.

    Where SwiGLU's gradient is cast, there are its input's gradient, the codes it makes in both orientations, and the
    gradients of the residual stream, of which one was gathered; in high precision the product's gradient itself.
    """
    x = sizes(config)
    up_name = "gate_up" if config.model.activation == "swiglu" else "up"
    makes_codes = precision(fp8, f"layers.{index}.mlp.{up_name}").takes_codes
    activation = x.m * x.f * x.e + x.m * x.up * (2 if makes_codes else x.e)
    return activation + x.m_own * x.h * x.e + x.m * x.h * x.e


def block_leaves_for_later(config: Config, fp8: Fp8Manager, index: int) -> int:
    """Bytes of what the weight gradients of block `index` need where a schedule computes them apart: of each linear
    layer its input and its output's gradient, as columns in FP8."""
    x, total = sizes(config), 0
    for name, (k, n) in fp8_layer_sizes(config.model, config.parallel.tensor, range(index, index + 1)).items():
        layer = precision(fp8, name)
        of_element = 1 if layer.fp8_wgrad else x.e
        total += x.m * (k + n) * of_element
    return total
