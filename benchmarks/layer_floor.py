"""The floor of a layer's time: its GEMMs and attention kernels alone, with nothing in between.

Everything else that a layer does (casts, norms, activations, rotations) could at best be free. What is left is recorded
from one micro-batch of the layers themselves: each product with its operands, each attention with its own, in their
order. Replayed, they draw the power that the chip draws in training, so the floor is that of a chip at its power limit
and not of one that has rested.

Operands stay in memory, so a floor holds what its layers keep for backward, and the quantized gradients too. Replayed
sums pile up in the gradient buffer, as over micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import sdpa_kernel

from benchmarks.layers import Layers
from megafp8.fp8.gemm.dispatch import Fp8Gemm
from megafp8.models.attention import CUDA_BACKENDS

Call = Callable[[], object]


def _attention(calls: list[Call], attend: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`attend`, which notes itself in `calls`, and its backward when that comes."""

    def again(*inputs: Tensor, **options: Any) -> Tensor:
        if not inputs[0].is_cuda:
            return attend(*inputs, **options)
        with sdpa_kernel(CUDA_BACKENDS, set_priority=True):
            return attend(*inputs, **options)

    def call(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        y = attend(q, k, v, **options)
        inputs = [x.detach().requires_grad_() for x in (q, k, v)]
        outputs: list[Tensor] = []

        def forward() -> None:
            outputs[:] = [again(*inputs, **options)]

        def note_backward(dy: Tensor) -> None:
            calls.append(lambda: torch.autograd.grad(outputs, inputs, dy))

        calls.append(forward)
        y.register_hook(note_backward)
        return y

    return call


@contextmanager
def recorded() -> Iterator[list[Call]]:
    """FP8 products and attention that run within, as calls that do the same again."""
    calls: list[Call] = []
    originals = {name: getattr(Fp8Gemm, name) for name in ("tn", "accumulate_tn")}
    attend = F.scaled_dot_product_attention

    within: list[bool] = []  # a product may be made of another

    def noted(product: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            if not within:
                calls.append(lambda: product(*args, **options))
            within.append(True)
            try:
                return product(*args, **options)
            finally:
                within.pop()

        return call

    try:
        for name, product in originals.items():
            setattr(Fp8Gemm, name, noted(product))
        F.scaled_dot_product_attention = _attention(calls, attend)
        yield calls
    finally:
        for name, product in originals.items():
            setattr(Fp8Gemm, name, product)
        F.scaled_dot_product_attention = attend


@dataclass(frozen=True)
class LayersAlone(Layers):
    """Layers that are checked as they are, and timed by their products and attention alone."""

    def to_time(self, x_sbh: Tensor, dy_sbh: Tensor) -> Layers:
        with recorded() as calls:
            dx_sbh = self.micro_batch(x_sbh, dy_sbh, True)
        return _Replay(self.forward, self.parameters, self.zero_grad, calls=tuple(calls), dx_sbh=dx_sbh)


@dataclass(frozen=True, kw_only=True)
class _Replay(Layers):
    calls: tuple[Call, ...]
    dx_sbh: Tensor

    def micro_batch(self, x_sbh: Tensor, dy_sbh: Tensor, first: bool) -> Tensor:
        for call in self.calls:
            call()
        return self.dx_sbh
