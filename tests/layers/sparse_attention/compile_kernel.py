"""Compiles a kernel of sparse attention for sm_90, which needs no GPU: prints its name, shared memory and registers.

Run by a test in a process without Triton's interpreter.
"""

from __future__ import annotations

import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from megafp8.layers.sparse_attention import hopper_kernel as sparse_attention_hopper
from megafp8.layers.sparse_attention import kernel as sparse_attention

LATENT: dict[str, Any] = {"V": 512, "R": 64, "WR": 64}
CONSTANTS: dict[str, dict[str, Any]] = {
    "scores": {"D": 128, "WIDTH": 128},
    "block_maxima": {"WIDTH": 128},
    "choose": {"BINS": 256},
    "index_loss": {"D": 128, "WIDTH": 128, "M": 64, "ATOMIC": True},
    "attend": LATENT | {"WV": 512},
    "scores_backward": LATENT | {"WV": 512},
    "queries_backward": {"C": 576},
    "keys_backward": {"V": 512, "R": 64, "ATOMIC": True},
}
HOPPER = {"hopper_attend": "_attend", "hopper_queries_backward": "_queries_backward"}
BF16 = {"q_bsid", "k_btd", "q_bsac", "kv_btc", "do_bsav", "o_bsav", "dq_bsid", "dq_bsac", "p_bsak",
        "ds_bsak"}  # fmt: skip
INT32 = {"first_bs", "stop_bs", "chosen_bsk", "count_bs"}


def compiled(name: str, **options: Any) -> Any:
    """The compiled kernel `name`. `options`: in place of its own."""
    if name in HOPPER:
        kernel = getattr(sparse_attention_hopper, HOPPER[name]).jit
        given = {"V": 512, "R": 64} | sparse_attention_hopper.OPTIONS | options
    else:
        kernel = getattr(sparse_attention, f"_{name}").jit
        given = CONSTANTS[name] | getattr(sparse_attention, name.upper()) | options
    launch = {key: given.pop(key) for key in ("num_warps", "num_stages") if key in given}
    signature, values, aligned = {}, {}, {}
    for index, argument in enumerate(kernel.arg_names):
        if argument in given:
            signature[argument], values[index,] = "constexpr", given[argument]
        elif argument in ("scale", "scale2"):
            signature[argument] = "fp32"
        elif argument in ("s", "t", "k", "a", "n", "size", "heads"):
            signature[argument], aligned[index,] = "i32", [["tt.divisibility", 16]]
        else:
            pointer = "*bf16" if argument in BF16 else "*i32" if argument in INT32 else "*fp32"
            signature[argument], aligned[index,] = pointer, [["tt.divisibility", 16]]
    source = (GluonASTSource if name in HOPPER else ASTSource)(kernel, signature, values, aligned)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=launch)


if __name__ == "__main__":
    kernel = compiled(sys.argv[1])
    print(sys.argv[1], kernel.metadata.shared)
