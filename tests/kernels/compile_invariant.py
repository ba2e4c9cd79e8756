"""Compiles the batch-invariant kernels for sm_90, which needs no GPU: prints case, shared memory, registers that spill.

Run by a test in a process without Triton's interpreter, which neither reads nor checks their assembly.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from triton import compile as compile_kernel
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from megafp8.kernels import invariant_gemm
from megafp8.layers.attention import invariant_kernel as invariant_attention
from megafp8.layers.attention.scores import Scores

GPU = GPUTarget("cuda", 90, 32)
PRODUCTS = {  # data, rows, parts, with blocks of scales, fast
    "bf16 8": ("bf16", 8, 4, False, True),
    "bf16 64": ("bf16", 64, 1, False, True),
    "bf16 many": ("bf16", 4096, 1, False, True),
    "bf16 many, parts": ("bf16", 4096, 4, False, True),
    "fp8 16": ("fp8e4nv", 16, 4, False, True),
    "fp8 many": ("fp8e4nv", 4096, 4, False, True),
    "fp8 16, split sums": ("fp8e4nv", 16, 1, False, False),
    "fp8 many, split sums": ("fp8e4nv", 4096, 2, False, False),
    "blocks 16": ("fp8e4nv", 16, 4, True, True),
    "blocks many": ("fp8e4nv", 4096, 4, True, True),
    "fp32 16": ("fp32", 16, 2, False, True),
    "fp32 many": ("fp32", 4096, 2, False, True),
}
HEADS = {"64": (64, 64), "128": (128, 128), "192, 128": (192, 128), "256": (256, 256)}
"""Widths of keys and values."""


def compiled(kernel: Any, pointers: dict[str, str], constants: dict[str, Any], options: dict[str, Any]) -> Any:
    """`pointers`: types of those that are not bf16."""
    signature, values, aligned = {}, {}, {}
    names = kernel.jit.arg_names
    for index, name in enumerate(names):
        if name in constants:
            signature[name], values[index,] = "constexpr", constants[name]
        elif name in pointers:
            signature[name], aligned[index,] = pointers[name], [["tt.divisibility", 16]]
        elif name in ("inner", "outer"):
            signature[name] = "fp32"
        else:
            signature[name] = "i32"
            if name in ("k", "n", "part_length"):
                aligned[index,] = [["tt.divisibility", 16]]
    return compile_kernel(ASTSource(kernel.jit, signature, values, aligned), target=GPU, options=options)


def product(case: str) -> Any:
    data, m, parts, blocks, fast = PRODUCTS[case]
    few, size = m <= 64, {"bf16": 2, "fp8e4nv": 1, "fp32": 4}[data]
    tile, block_k = invariant_gemm.tile_of(m, size, blocks=blocks)
    pointers = {"w_nk": f"*{data}", "x_mk": f"*{data}", "y_mn": "*bf16", "arrived": "*i32"}
    pointers |= dict.fromkeys(("w_scale_inv", "x_scale_inv", "sums_of_parts"), "*fp32")
    constants = {
        "SIDE_BY_SIDE": few, "PARTS": parts, "SCALED": size == 1 and not blocks, "BLOCKS": blocks,
        "W_ROWS": 128 if blocks else 1, "FAST": fast, "WHOLE": True, "INTERPRETED": False, "N": tile.n, "M": tile.m,
        "K": block_k,
    }  # fmt: skip
    options = {"num_warps": tile.warps, "num_stages": tile.stages, "enable_fp_fusion": False}
    return compiled(invariant_gemm._kernel, pointers, constants, options)


def attention(case: str, paged: bool, softcap: bool = False) -> Any:
    d, w = HEADS[case]
    constants = invariant_attention._constants(d, w, Scores(softcap=1.0 if softcap else None), torch.bfloat16)
    options = {name: constants.pop(name) for name in ("num_warps", "num_stages", "enable_fp_fusion")}
    names = ["q_sbad", "k_tbgd", "v_tbgw", "o_sbaw", "q_nad", "keys", "values", "bias_ar"]
    pointers = dict.fromkeys(names, "*bf16") | {
        "lse_sba": "*fp32", "o_nuaw": "*fp32", "largest_nua": "*fp32", "total_nua": "*fp32", "table_nm": "*i32"
    }  # fmt: skip
    pointers |= dict.fromkeys(("first_bs", "end_bs", "origin_bs", "positions_bs", "positions_n"), "*i64")
    kernel = invariant_attention._attend if paged else invariant_attention._forward
    if paged:
        constants |= {"PAGE": 16}
    return compiled(kernel, pointers, constants, options)


def report(name: str, kernel: Any) -> None:
    ptx = kernel.asm["ptx"]
    instructions = sorted(set(re.findall(r"(?:wgmma\.mma_async\.sync\.aligned|mma\.sync\.aligned)[.\w]*", ptx)))
    fused = len(re.findall(r"\bfma\.rn\.f32\b", ptx))
    print(name, instructions, fused, kernel.metadata.shared, sep="; ", flush=True)


def main() -> None:
    for case in PRODUCTS:
        report(f"product {case}", product(case))
    for case in HEADS:
        for paged in (False, True):
            report(f"attention {case} {'paged' if paged else 'whole'}", attention(case, paged))


if __name__ == "__main__":
    main()
