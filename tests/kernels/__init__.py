"""Kernels against their references: natively on a GPU, in Triton's interpreter elsewhere."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    def _exp2(x: np.ndarray) -> np.ndarray:
        return np.exp2(x.astype(np.float64)).astype(x.dtype)

    # NumPy's fp32 exponential differs from torch's in the last bit; through float64 both are right. On a GPU both are
    # the hardware's.
    interpreter.InterpreterBuilder.create_exp2 = lambda self, x: self.unary_op(x, _exp2)

    _patch_language = interpreter._patch_lang

    def _patch_language_once(function: Any) -> Any:
        """Patch the modules of Triton's language that a function uses, unless they are patched already.

        Triton does so again in each call of a device function, which takes a fifth of the interpreter's time.
        """
        used = [module for module in (tl, tl.core) if module in function.__globals__.values()]
        if any(tl.core.is_builtin(module.load) for module in used):
            return _patch_language(function)
        return interpreter._LangPatchScope()

    interpreter._patch_lang = _patch_language_once


def noise(*shape: int, scale: float = 1.0, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return (torch.randn(shape, generator=generator) * scale).to(dtype).to(DEVICE)


def every_bf16() -> Tensor:
    """All 65,536 numbers `[256, 256]`: zeros, subnormals, infinities and NaNs among them."""
    return torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).view(256, 256).to(DEVICE)
