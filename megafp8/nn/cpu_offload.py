"""Activation offloading: keep the activations of a model's first layers in host memory until backward.

    context, synchronize = get_cpu_offload_context(enabled=True, num_layers=2, model_layers=4)
    for layer in layers:
        with context:
            x = layer(x)
        x = synchronize(x)

`megafp8.layers.offload` copies the tensors that autograd saves, and copies them back before backward needs them.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor

from megafp8.layers.offload import ActivationOffload, Forward
from megafp8.nn.base import default_device


class _Layers:
    """Context manager for the forward of each layer, entered `model_layers` times per forward of the model."""

    def __init__(self, num_layers: int, model_layers: int) -> None:
        self.num_layers, self.model_layers = num_layers, model_layers
        self._offload = ActivationOffload(default_device())
        self._forward: Forward | None = None
        self._layer = 0
        self._block: AbstractContextManager[None] = nullcontext()

    def __enter__(self) -> None:
        if self._layer == 0:
            self._forward = self._offload.forward([])
        assert self._forward is not None
        self._block = self._forward.block() if self._layer < self.num_layers else nullcontext()
        self._block.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._layer = 0 if error[0] is not None else (self._layer + 1) % self.model_layers
        self._block.__exit__(*error)


def _unchanged(x: Tensor) -> Tensor:
    return x


def get_cpu_offload_context(
    enabled: bool = False,
    num_layers: int | None = 1,
    model_layers: int = 1,
    offload_activations: bool = True,
    offload_weights: bool = False,
    double_buffering: bool = False,
    manual_synchronization: bool = False,
    retain_pinned_cpu_buffers: bool = False,
    offload_stream: Any = None,
) -> tuple[AbstractContextManager[None], Callable[[Tensor], Tensor]]:
    """Return a context for the forward of each layer, and a function to call on each layer's output.

    The function returns its argument unchanged; it exists because Transformer Engine needs such a call.

    The activations of the first `num_layers` of the model's `model_layers` layers are offloaded. Activations of two
    layers at a time are on the device, and pinned buffers are kept, whatever the values of `double_buffering` and
    `retain_pinned_cpu_buffers`. See the example at the top of this module.
    """
    if not enabled:
        return nullcontext(), _unchanged
    for name, value, refused, reason in (
        ("offload_activations", offload_activations, False, "nothing else is offloaded"),
        ("offload_weights", offload_weights, True, "weights stay on the device"),
        ("manual_synchronization", manual_synchronization, True, "streams wait for copies by themselves"),
    ):
        if value is refused:
            raise ValueError(f"get_cpu_offload_context: {name} is {value}: {reason}; {not refused} works")
    if offload_stream is not None:
        raise ValueError("get_cpu_offload_context: offload_stream is given: copies have their own stream; None works")
    if num_layers is None or not 0 <= num_layers <= model_layers:
        raise ValueError(f"get_cpu_offload_context: num_layers is {num_layers}; it must be 0 to {model_layers=}")
    return _Layers(num_layers, model_layers), _unchanged
