"""Compiles attention's kernels for sm_90, which needs no GPU: prints name, head width, kind and shared memory of each.

Run by a test in a process without Triton's interpreter.
"""

from __future__ import annotations

import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from megafp8.layers.attention import kernel as attention

KINDS = {
    "plain": {},
    "all": {"SOFTCAP": True, "BIAS": True, "DROPOUT": True, "VISIBLE": True, "POSITIONS": True},
}
POINTERS = {
    "sbad": "*bf16", "tbgd": "*bf16", "bs": "*i32", "bk": "*i32", "visible_bast": "*u8", "sample_b": "*i64",
    "sba": "*fp32", "ar": "*fp32", "bmar": "*fp32", "mba": "*fp32",
}  # fmt: skip
"""By name, or by the shape at its end."""
NUMBERS = {"inner": "fp32", "outer": "fp32", "scale": "fp32", "factor": "fp32"}


def compiled(name: str, d: int, kind: str) -> Any:
    """The compiled kernel `name` of heads `d` wide."""
    kernel, width = getattr(attention, f"{name}_kernel"), max(16, 1 << (d - 1).bit_length())
    tile = getattr(attention._tiles(width, kind == "all"), "forward" if name == "largest" else name)
    constants = dict.fromkeys(("SOFTCAP", "BIAS", "DROPOUT", "VISIBLE", "POSITIONS"), False) | KINDS[kind]
    constants |= {"D": d, "WIDTH": width, "M": tile.m, "N": tile.n}
    signature, values, aligned = {}, {}, {}
    for index, argument in enumerate(kernel.arg_names):
        pointer = POINTERS.get(argument) or POINTERS.get(argument.split("_")[-1])
        if argument in constants:
            signature[argument], values[index,] = "constexpr", constants[argument]
        elif pointer is not None:
            signature[argument], aligned[index,] = pointer, [["tt.divisibility", 16]]
        else:
            signature[argument] = NUMBERS.get(argument, "i32")
    source = ASTSource(kernel, signature, values, aligned)
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


if __name__ == "__main__":
    for name in ("forward", "largest", "dq", "dkv", "bias"):
        print(name, sys.argv[1], sys.argv[2], compiled(name, int(sys.argv[1]), sys.argv[2]).metadata.shared, flush=True)
