"""Weight gradients deferred by a backward pass.

Nothing waits for a weight's gradient before the optimizer step, so a pipeline schedule may compute it where a rank
would otherwise idle. While a `WgradStore` is open, linear layers whose gradient sink has it compute their input's
gradient as usual and put into the store a closure over the operands of wgrad (FP8 data where the layer is in FP8).
Gradients of norms, biases and embeddings are cheap and stay in the backward pass.

A deferred gradient begins and finishes in two calls. Under sequence parallelism it begins by gathering columnwise data
over the tensor-parallel ranks, and `run` begins the next one before it finishes the current one, so that the gather
overlaps with a GEMM. All tensor-parallel ranks run the same schedule, so their gathers match.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

Wgrad = Callable[[], Callable[[], object]]
"""Begins a weight gradient; what it returns computes it and adds it to the weight's sink."""


class WgradStore:
    """Deferred weight gradients of linear layers, collected while it is open. One for all layers of a rank."""

    def __init__(self) -> None:
        self._open: deque[Wgrad] | None = None

    @property
    def is_open(self) -> bool:
        return self._open is not None

    @contextmanager
    def collect(self) -> Iterator[deque[Wgrad]]:
        """Open the store; the weight gradients of the backward passes within, for `run`."""
        assert self._open is None, "the store is open already"
        self._open = wgrads = deque[Wgrad]()
        try:
            yield wgrads
        finally:
            self._open = None

    def put(self, wgrad: Wgrad) -> None:
        """Defer a weight gradient."""
        assert self._open is not None
        self._open.append(wgrad)


@torch.no_grad()
def run(wgrads: deque[Wgrad]) -> None:
    """Compute `wgrads` in order; each is taken out, so that its operands are freed."""
    finish: Callable[[], object] | None = None
    while wgrads:
        following = wgrads.popleft()()
        if finish is not None:
            finish()
        finish = following
    if finish is not None:
        finish()
