"""What each block of a stage keeps for its backward pass, and what it recomputes.

Bytes that a Llama block with FP8 linear layers keeps per token, on one rank (h hidden, a·d query and g·d key-value
channels, f MLP width; two bytes per element in bf16):

    residual stream before each norm         2 × 2h      the norms' backward
    columnwise input of qkv and gate_up      2 × h       their wgrad
    q, k, v                            2(a + 2g)d        attention's backward
    attention's output, its log-sums       2ad + 4a      attention's backward
    columnwise input of proj                     ad      its wgrad
    gate and up                            2 × 2f        SwiGLU's backward
    columnwise input of down                      f      its wgrad

`full` keeps half of the first line, 2h, and runs the whole forward again. `selective` drops the outputs of single
operations and recomputes them when backward needs them. Megatron-LM's names are in brackets.

    norms        (layernorm)        2h less, for a pass over the norms' inputs. In layers of high precision 4h. With one
                                    scale per tensor, and in high precision, tensor-parallel ranks keep the input of all
                                    tokens, so that is 2h (4h) of the whole sequence; it is then gathered once more in
                                    backward, while dgrad runs.
    activation   (moe_act)          f less, for a pass over gate and up. In high precision 2f.
    attention    (core_attn)        2ad + 4a less, for a forward of attention. In high precision only 4a, because the
                                    projection keeps the output. With norms over heads, only their inputs are kept.

What is recomputed is the same bit for bit, and with it losses and gradients (`megafp8.linear.fusion`). No random number
has a state: dropout is keyed by sample and position (`megafp8.layers.dropout.op`), nvfp4's rounding of gradients by
position.
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
    """How a block saves memory: recomputed whole (`full`) or by operation, saved tensors on the host (`offload`)."""

    full: bool = False
    norms: bool = False
    activation: bool = False
    attention: bool = False
    offload: bool = False


KEEP_ALL = BlockMemory()


def recomputed(function: Callable[..., T], *inputs: Any) -> T:
    """`function(*inputs)`, of which only the inputs are kept; it runs again in backward."""
    return checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False)


def block_memory(parallel: ParallelConfig, blocks: int) -> list[BlockMemory]:
    """For each of a stage's `blocks`, first to last."""
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
