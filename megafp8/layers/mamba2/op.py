"""Recurrence of Mamba-2: choice of the kernels, and its autograd function.

On CUDA with 16-bit inputs, our Triton kernels compute the recurrence (`megafp8.layers.mamba2.kernel`). Otherwise the
reference computes it in chunks. Both keep states in fp32 or wider. The kernels save their inputs and the states at the
start of each chunk for backward. If the recurrence is recomputed in backward, these live only until the layer's
backward pass ends.

Shapes: see `megafp8.layers.mamba2.reference`; m chunks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from megafp8.layers.mamba2.reference import in_chunks
from megafp8.numerics.implementations import triton_module

_kernels = triton_module("megafp8.layers.mamba2.kernel")


CHUNK = 64
"""Tokens of a chunk."""
_LONGEST_SIDE, _LARGEST = 256, 128 * 256
"""Longest side of a state for which a program has room, and most numbers, with sides rounded up to powers of 2."""


def state_space(
    x_sbaw: Tensor, step_sba: Tensor, rate_a: Tensor, b_sbgd: Tensor, c_sbgd: Tensor, skip_a: Tensor,
    state_badw: Tensor, starts_sb: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute the recurrence with a kernel if one fits. Differentiable.

    Steps, rate, skip and state are fp32 or wider. See `megafp8.layers.mamba2.reference.recurrence` for the arguments.

    Returns:
        Outputs `[s, b, a, w]` in the dtype of x, and the state after the last token.
    """
    d, w = b_sbgd.shape[-1], x_sbaw.shape[-1]
    if len(x_sbaw) > 1 and missing_kernel(x_sbaw.device, x_sbaw.dtype, d, w) is None:
        result: tuple[Tensor, Tensor] = StateSpace.apply(
            x_sbaw, step_sba, rate_a, b_sbgd, c_sbgd, skip_a, state_badw, starts_sb
        )
        return result
    x, b, c = (t.to(state_badw.dtype) for t in (x_sbaw, b_sbgd, c_sbgd))
    y_sbaw, state_badw = in_chunks(x, step_sba, rate_a, b, c, skip_a, state_badw, starts_sb, CHUNK)
    return y_sbaw.to(x_sbaw.dtype), state_badw


def missing_kernel(device: torch.device, dtype: torch.dtype, d: int, w: int) -> str | None:
    """Return why no kernel can compute heads of w channels with d state numbers per channel; None if one can."""
    if device.type != "cuda":
        return "it needs a GPU"
    if dtype.itemsize != 2:
        return f"it needs bf16 or fp16, not {str(dtype).removeprefix('torch.')}"
    if max(d, w) > _LONGEST_SIDE or (1 << (d - 1).bit_length()) * (1 << (w - 1).bit_length()) > _LARGEST:
        return f"a state has {d} × {w} numbers per head, and at most 128 × 256 fit"
    return None


class StateSpace(Function):
    """Recurrence of Mamba-2 computed by the Triton kernels."""

    @staticmethod
    def forward(
        ctx: Any, x_sbaw: Tensor, step_sba: Tensor, rate_a: Tensor, b_sbgd: Tensor, c_sbgd: Tensor, skip_a: Tensor,
        state_badw: Tensor, starts_sb: Tensor | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Return the outputs `[s, b, a, w]` in the dtype of x, and the state after the last token."""
        module = _kernels()
        inputs = module.StateSpaceInputs.from_tensors(x_sbaw, step_sba, rate_a, b_sbgd, c_sbgd, skip_a, starts_sb)
        y_sbaw, last_badw, states_mbadw = module.forward(inputs, state_badw)
        ctx.save_for_backward(*inputs, states_mbadw)
        return y_sbaw.to(x_sbaw.dtype), last_badw

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_sbaw: Tensor, dlast_badw: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of all inputs except `starts_sb`."""
        module, (*tensors, states_mbadw) = _kernels(), ctx.saved_tensors
        return *module.backward(module.StateSpaceInputs(*tensors), states_mbadw, dy_sbaw, dlast_badw), None
