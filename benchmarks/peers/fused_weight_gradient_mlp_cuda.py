"""Stand-in for apex's extension of this name, built on Transformer Engine's GEMM.

Megatron-LM adds weight gradients to its gradient buffer inside the GEMM if it can import this module. Without apex it
would have to give up that fusion in all layers. Transformer Engine's own layers never call this module; the output
layer does. Put this folder on PYTHONPATH where apex is not installed.
"""

from __future__ import annotations

import torch
from transformer_engine.pytorch.cpp_extensions import general_gemm


def wgrad_gemm_accum_fp32(input: torch.Tensor, grad_output: torch.Tensor, main_grad: torch.Tensor) -> None:
    """Add `grad_output.T @ input` to `main_grad` in the GEMM; the buffer's dtype may be fp32 or bf16."""
    general_gemm(input, grad_output, out_dtype=main_grad.dtype, layout="NT", out=main_grad, accumulate=True)


wgrad_gemm_accum_fp16 = wgrad_gemm_accum_fp32
