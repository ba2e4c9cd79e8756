"""Compiles the kernels of latent attention's heads for sm_90, which needs no GPU: prints names and shared memory.

Run by a test in a process without Triton's interpreter.
"""

from __future__ import annotations

from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from megafp8.kernels.launch import TritonKernel
from megafp8.layers.latent_attention import kernel as kernels


def compiled(kernel: TritonKernel, rotates: bool, scales: bool) -> Any:
    """A kernel for heads of DeepSeek-V3's widths in bf16."""
    constants, jit = kernels.constants(kernel, 128, 64, 128, rotates, scales, False), kernel.jit
    launch = {key: constants.pop(key) for key in ("num_warps", "enable_fp_fusion")}
    signature, values, aligned = {}, {}, {}
    for index, argument in enumerate(jit.arg_names):
        if argument in constants:
            signature[argument], values[index,] = "constexpr", constants[argument]
        elif argument == "factor":
            signature[argument] = "fp32"
        else:
            is_number, is_angle = "stride" in argument or argument in "mba", argument in ("cos", "sin")
            signature[argument] = "i32" if is_number else "*fp32" if is_angle else "*bf16"
            aligned[index,] = [["tt.divisibility", 16]]
    return triton.compile(ASTSource(jit, signature, values, aligned), target=GPUTarget("cuda", 90, 32), options=launch)


if __name__ == "__main__":
    for kernel in (kernels.forward_kernel, kernels.backward_kernel):
        for rotates, scales in ((True, False), (True, True), (False, False)):
            name = f"{kernel.jit.__name__} rotates={rotates} scales={scales}"
            print(name, compiled(kernel, rotates, scales).metadata.shared)
