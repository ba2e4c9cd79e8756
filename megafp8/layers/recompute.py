"""Tensors that each block of a stage keeps for backward, and operations that it recomputes.

A Llama block with FP8 linear layers keeps these bytes per token on one rank (h hidden, a·d query and g·d key-value
channels, f MLP width; bf16 has two bytes per element):

    residual stream before each norm         2 × 2h      the norms' backward
    columnwise input of qkv and gate_up      2 × h       their wgrad
    q, k, v                            2(a + 2g)d        attention's backward
    attention's output, its log-sums       2ad + 4a      attention's backward
    columnwise input of proj                     ad      its wgrad
    gate and up                            2 × 2f        SwiGLU's backward
    columnwise input of down                      f      its wgrad

`full` keeps half of the first line, 2h, and runs the whole forward again. `selective` drops the outputs of single
operations and recomputes them when backward needs them. It offers these operations (Megatron-LM's names in
parentheses):

    norms        (layernorm)        Saves 2h, or 4h in high-precision layers; the norms' inputs are read once more. With
                                    one scale per tensor, and in high precision, tensor-parallel ranks keep the input of
                                    all tokens, so it saves 2h (4h) of the whole sequence. Backward then gathers it once
                                    more, while dgrad runs.
    activation   (moe_act)          Saves f, or 2f in high precision; gate and up are read once more.
    attention    (core_attn)        Saves 2ad + 4a; the forward of attention runs once more. In high precision it saves
                                    only 4a, because the projection keeps the output. With norms over heads, only the
                                    inputs of these norms are kept.

Recomputed values are the same bit for bit, and so are losses and gradients (`megafp8.linear.fusion`). No random number
depends on a generator's state: dropout is keyed by sample and position (`megafp8.layers.dropout.op`), and nvfp4's
stochastic rounding of gradients by position.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from torch.utils.checkpoint import checkpoint

from megafp8.config import ParallelConfig

T = TypeVar("T")


@dataclass(frozen=True)
class BlockMemory:
    """Ways in which one block saves memory.

    Attributes:
        full: Recompute the whole block in backward.
        norms: Recompute the outputs of norms.
        activation: Recompute the output of the MLP's activation.
        attention: Recompute attention.
        offload: Keep saved tensors in host memory.
    """

    full: bool = False
    norms: bool = False
    activation: bool = False
    attention: bool = False
    offload: bool = False


KEEP_ALL = BlockMemory()


def recomputed(function: Callable[..., T], *inputs: Any) -> T:
    """Return `function(*inputs)`, saving only the inputs; backward runs the function again."""
    return checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False)


def block_memory(parallel: ParallelConfig, blocks: int) -> list[BlockMemory]:
    """Return the memory settings of each of a stage's `blocks`, in order."""
    p = parallel
    recomputed = 0 if p.recompute == "none" else blocks if p.recompute_blocks is None else p.recompute_blocks
    offloaded = blocks if p.offload is True else int(p.offload)
    selected = p.recompute_ops if p.recompute == "selective" else ()
    return [
        BlockMemory(
            full=p.recompute == "full" and i < recomputed,
            norms="norms" in selected and i < recomputed,
            activation="activation" in selected and i < recomputed,
            attention="attention" in selected and i < recomputed,
            offload=i < offloaded,
        )
        for i in range(blocks)
    ]
