"""What is between the two linear layers of an MLP: the activation, fused with the casts on both sides where it can be.

`ACTIVATION_SOURCES` of `megafp8.numerics.sources` are the activations that kernels compute while they quantize. The
others are PyTorch's ops in the dtype of their input, `unfused`; the layer after them quantizes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from megafp8.layers.activation.op import activation
from megafp8.linear.fusion import LinearInput, Recompute, RecomputedInput
from megafp8.linear.state import LinearState, QuantizedGradHandoff
from megafp8.numerics.batch_invariance import sigmoid
from megafp8.numerics.sources import ACTIVATION_SOURCES, Plain

T = TypeVar("T")
_Function = Callable[[Tensor], Tensor]


def _squared_relu(x: Tensor) -> Tensor:
    return F.relu(x).square()


def _gated(function: _Function) -> _Function:
    def of_gate_times_up(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return function(gate) * up

    return of_gate_times_up


def _unfused_functions(*, batch_invariant: bool) -> dict[str, _Function]:
    logistic = partial(sigmoid, batch_invariant=batch_invariant)

    def quick_gelu(x: Tensor) -> Tensor:
        return x * logistic(1.702 * x)

    return {
        "gelu": F.gelu,
        "qgelu": quick_gelu,
        "silu": F.silu,
        "geglu": _gated(F.gelu),
        "reglu": _gated(F.relu),
        "sreglu": _gated(_squared_relu),
        "qgeglu": _gated(quick_gelu),
        "glu": _gated(logistic),
    }


_UNFUSED = {invariant: _unfused_functions(batch_invariant=invariant) for invariant in (False, True)}
UNFUSED = frozenset(_UNFUSED[False])
"""Activations without a kernel."""


def is_fused(kind: str) -> bool:
    """Whether a kernel computes the activation while it quantizes."""
    return kind in ACTIVATION_SOURCES


def unfused(kind: str, *, batch_invariant: bool) -> _Function:
    """Return what an activation without a kernel computes of x, or of [gate | up]."""
    return _UNFUSED[batch_invariant][kind]


def _unfused_source(x: Tensor, function: _Function) -> Plain:
    return Plain(function(x).flatten(0, -2))


def mlp(
    kind: str,
    up: Callable[[QuantizedGradHandoff | None], tuple[Tensor, Tensor | None]],
    down: Callable[[Tensor | LinearInput], T],
    up_state: LinearState,
    down_state: LinearState,
) -> T:
    """`down(activation(up(handoff)))`.

    `up`: the first layer's output, and the bias that is still to be added to it, which only a fused activation that is
    not gated does.
    """
    form = down_state.input_format
    if is_fused(kind):
        handoff = up_state.grad_handoff()
        y, bias = up(handoff)
        return down(activation(kind, y, bias, form, handoff))
    y, bias = up(None)
    assert bias is None
    function = unfused(kind, batch_invariant=up_state.batch_invariant)
    activated = function(y)
    if form is None or not torch.is_grad_enabled():
        return down(activated)
    how = Recompute(partial(_unfused_source, function=function), None, None)
    return down(LinearInput(activated, None, RecomputedInput((y,), how)))
