"""What each block of a stage keeps for its backward pass, and what it makes again.

Bytes that a Llama block with FP8 linear layers keeps a token, on one rank (h hidden, a·d query and g·d key-value
channels, f MLP width; two bytes an element in bf16):

    residual stream before each norm         2 × 2h      the norms' backward
    columns of the norms' outputs            2 × h       wgrad of qkv and of gate and up
    q, k, v                            2(a + 2g)d        attention's backward
    attention's output, its log-sums       2ad + 4a      attention's backward
    columns of that output                       ad      wgrad of the projection
    gate and up                            2 × 2f        SwiGLU's backward
    columns of SwiGLU's output                    f      wgrad of the down projection

`full` keeps the first line's first half, 2h, and runs the whole forward again. `selective` leaves out what single
operations make, and makes that again when backward needs it. Megatron-LM's names are in brackets.

    norms        (layernorm)        2h less, for a pass over the norms' inputs. In layers of high precision 4h. With one
                                    factor for the tensor, and in high precision, tensor-parallel ranks keep the columns
                                    of all tokens, so that is 2h (4h) of the whole sequence; they are then gathered once
                                    more in backward, while dgrad runs.
    activation   (moe_act)          f less, for a pass over gate and up. In high precision 2f.
    attention    (core_attn)        2ad + 4a less, for a forward of attention. In high precision only 4a, for there the
                                    projection keeps the output. With norms over heads, only their inputs are kept.

The codes that are made again are the same, and with them losses and gradients, bit for bit (`megafp8.ops.fusion`).
There is no dropout, so nothing depends on random numbers but nvfp4's rounding of gradients, which is keyed by place.
"""

from __future__ import annotations

from dataclasses import dataclass

from megafp8.config import ParallelConfig


@dataclass(frozen=True)
class BlockMemory:
    """How a block spares memory: made again as a whole (`full`) or by operation, saved tensors on the host
    (`offload`)."""

    full: bool = False
    norms: bool = False
    activation: bool = False
    attention: bool = False
    offload: bool = False


KEEP_ALL = BlockMemory()


def block_memory(parallel: ParallelConfig, blocks: int) -> list[BlockMemory]:
    """For each of a stage's `blocks`, first to last."""
    p = parallel
    made_again = 0 if p.recompute == "none" else blocks if p.recompute_blocks is None else p.recompute_blocks
    offloaded = blocks if p.offload is True else int(p.offload)
    selected = p.recompute_ops if p.recompute == "selective" else ()
    return [
        BlockMemory(
            full=p.recompute == "full" and i < made_again,
            norms="norms" in selected and i < made_again,
            activation="activation" in selected and i < made_again,
            attention="attention" in selected and i < made_again,
            offload=i < offloaded,
        )
        for i in range(blocks)
    ]
