"""Activation between the two linear layers of an MLP, fused with the casts on both sides if possible.

Kernels compute the activations in `megafp8.numerics.sources.ACTIVATION_SOURCES` while they quantize. The other
activations (`unfused`) are PyTorch's ops in the dtype of their input, and the next layer quantizes their output.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from megafp8.layers.activation.op import activation, xielu
from megafp8.linear.fusion import LinearInput, Recompute, RecomputedInput
from megafp8.linear.state import LinearState, QuantizedGradHandoff
from megafp8.numerics.batch_invariance import sigmoid
from megafp8.numerics.sources import ACTIVATION_SOURCES, Plain

T = TypeVar("T")
_Function = Callable[..., Tensor]


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
        "xielu": xielu,
    }


_UNFUSED = {invariant: _unfused_functions(batch_invariant=invariant) for invariant in (False, True)}
UNFUSED = frozenset(_UNFUSED[False])
"""Names of the activations without a kernel."""


def is_fused(kind: str) -> bool:
    """Return whether a kernel computes the activation while it quantizes."""
    return kind in ACTIVATION_SOURCES


def unfused(kind: str, *, batch_invariant: bool) -> _Function:
    """Return the function of an activation without a kernel.

    Its arguments are x, or [gate | up] if it is gated, and the numbers that the activation learns.
    """
    return _UNFUSED[batch_invariant][kind]


def _unfused_source(*tensors: Tensor, function: _Function) -> Plain:
    return Plain(function(*tensors).flatten(0, -2))


def mlp(
    kind: str,
    up: Callable[[QuantizedGradHandoff | None], tuple[Tensor, Tensor | None]],
    down: Callable[[Tensor | LinearInput], T],
    up_state: LinearState,
    down_state: LinearState,
    learned: Sequence[Tensor] = (),
) -> T:
    """Compute `down(activation(up(handoff)))`.

    Args:
        kind: Name of the activation.
        up: First linear layer, called with the handoff for its quantized output gradient. It returns its output and a
            bias that is still to be added. Only fused activations that are not gated can add it; otherwise it is None.
        down: Second linear layer, called with the activated values or with their quantized form.
        up_state: Plan and quantizers of the first layer.
        down_state: Plan and quantizers of the second layer.
        learned: Numbers that the activation learns.

    Returns:
        The result of `down`.
    """
    form = down_state.input_format
    if is_fused(kind):
        handoff = up_state.grad_handoff()
        y, bias = up(handoff)
        return down(activation(kind, y, bias, form, handoff))
    y, bias = up(None)
    assert bias is None
    function = unfused(kind, batch_invariant=up_state.batch_invariant)
    activated = function(y, *learned)
    if form is None or not torch.is_grad_enabled():
        return down(activated)
    how = Recompute(partial(_unfused_source, function=function), None, None)
    return down(LinearInput(activated, None, RecomputedInput((y, *learned), how)))
