"""Attention sinks: a learned score of each head that takes part in its softmax but has no value.

A head with a sink can attend to nothing (Xiao et al. 2023, arXiv:2309.17453; gpt-oss, arXiv:2508.10925). A sink acts
like one more key with the value zero. Its share follows from the log-sum-exp, so kernels of attention need not know it,
and backward needs nothing but the output and the log-sum-exp that include it.

`multiply_by_share` and `sum_gradients` here are plain PyTorch. On CUDA, kernels replace them
(`megafp8.layers.attention.sink_kernel`).

Shapes: s queries, b micro-batch, a heads, d head width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megafp8.linear.grad_sink import deliver, wgrad_dtype
from megafp8.numerics.batch_invariance import sigmoid
from megafp8.numerics.implementations import triton_module

_kernels = triton_module("megafp8.layers.attention.sink_kernel")


def with_sink(
    o_sbad: Tensor, lse_sba: Tensor, sink_a: Tensor, *, batch_invariant: bool = False
) -> tuple[Tensor, Tensor]:
    """Return the output and log-sum-exp including sinks, from the output and log-sum-exp of the keys alone.

    The output is changed in place.
    """
    sink = sink_a.detach().to(lse_sba.dtype)
    if _has_kernel(o_sbad, lse_sba) and not batch_invariant:
        _kernels().multiply_by_share(o_sbad, lse_sba, sink)
    else:
        multiply_by_share(o_sbad, lse_sba, sink, batch_invariant=batch_invariant)
    return o_sbad, torch.logaddexp(lse_sba, sink)


def sink_gradient(do_sbad: Tensor, o_sbad: Tensor, lse_sba: Tensor, sink_a: Tensor) -> Tensor | None:
    """Deliver the gradient of `sink_a` to its gradient sink, or return it; `o_sbad` and `lse_sba` include the sinks."""
    sink = sink_a.detach().to(lse_sba.dtype)
    has_kernel = _has_kernel(o_sbad, lse_sba) and _has_kernel(do_sbad, lse_sba)
    add = _kernels().sum_gradients if has_kernel else sum_gradients
    return deliver(sink_a, add(do_sbad, o_sbad, lse_sba, sink).to(wgrad_dtype(sink_a)))


def multiply_by_share(o_sbad: Tensor, lse_sba: Tensor, sink_a: Tensor, *, batch_invariant: bool = False) -> None:
    """Multiply outputs by the share of the keys in the softmax, in place."""
    o_sbad.mul_(sigmoid(lse_sba - sink_a, batch_invariant=batch_invariant).unsqueeze(-1))


def sum_gradients(do_sbad: Tensor, o_sbad: Tensor, lse_sba: Tensor, sink_a: Tensor) -> Tensor:
    """Return the gradient of sinks `[a]`.

    A higher sink score takes from all keys in proportion: dL/dsink = -Σ exp(sink - lse) · (do · o).
    """
    dots_sba = (do_sbad.to(lse_sba.dtype) * o_sbad).sum(dim=-1)  # a product of two dtypes needs no copy of the second
    return -(torch.exp(sink_a - lse_sba) * dots_sba).sum((0, 1))


def _has_kernel(x_sbad: Tensor, lse_sba: Tensor) -> bool:
    """Return whether kernels compute with these outputs or gradients: on CUDA, unless their scores are float64."""
    return x_sbad.is_cuda and lse_sba.dtype == torch.float32 and x_sbad.stride(-1) == 1
