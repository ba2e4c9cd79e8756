"""Kernels against their references: natively on a GPU, in Triton's interpreter elsewhere."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
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

    # It computes whether integers overflow in each operation, and drops the answer, because its option `debug` is off.
    interpreter.interpreter_builder.options = replace(interpreter.interpreter_builder.options, sanitize_overflow=False)

    # The interpreter needs these two in almost every operation, and makes them from scratch.
    _numpy_dtype, _numpy_dtypes = interpreter._get_np_dtype, dict[str, np.dtype]()
    _make_block_type, _block_types = tl.block_type.__init__, dict[tuple[Any, ...], dict[str, Any]]()

    def _numpy_dtype_once(dtype: tl.dtype) -> np.dtype:
        if dtype.name not in _numpy_dtypes:
            _numpy_dtypes[dtype.name] = _numpy_dtype(dtype)
        return _numpy_dtypes[dtype.name]

    def _make_block_type_once(self: tl.block_type, element_ty: tl.dtype, shape: Iterable[Any]) -> None:
        key = (element_ty.name, *(getattr(size, "value", size) for size in shape))
        if type(element_ty) is not tl.dtype:  # names of pointers do not have everything
            _make_block_type(self, element_ty, shape)
        elif key in _block_types:
            self.__dict__.update(_block_types[key])
        else:
            _make_block_type(self, element_ty, shape)
            _block_types[key] = self.__dict__.copy()

    interpreter._get_np_dtype = _numpy_dtype_once
    tl.block_type.__init__ = _make_block_type_once


def noise(*shape: int, scale: float = 1.0, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return (torch.randn(shape, generator=generator) * scale).to(dtype).to(DEVICE)


def every_bf16() -> Tensor:
    """All 65,536 numbers `[256, 256]`: zeros, subnormals, infinities and NaNs among them."""
    return torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).view(256, 256).to(DEVICE)
