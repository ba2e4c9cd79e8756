"""Weight gradients deferred by a backward pass.

Nothing waits for a weight's gradient before the optimizer step, so a pipeline schedule may compute it where a rank
would otherwise idle. While a `WgradStore` is open, linear layers whose gradient sink has it compute their input's
gradient as usual and put into the store a closure over the operands of wgrad (FP8 data where the layer is in FP8).
Gradients of norms, biases and embeddings are cheap and stay in the backward pass.

A deferred gradient begins and finishes in two calls. Under sequence parallelism it begins by gathering columnwise data
over the tensor-parallel ranks, and `run` begins the next one before it finishes the current one, so that the gather
overlaps with a GEMM. All tensor-parallel ranks run the same schedule, so their gathers match.

*Pairs.* A gradient that is added to an fp32 sum reads and writes all of it, which for experts with few rows takes
longer than the products. With a `WgradPair` operands of a micro-batch are kept until the next one's gradient, and one
kernel adds both. It costs the memory of the operands.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

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


class WgradPair:
    """Operands of one weight's gradient that are kept until those of the next micro-batch come.

    `is_last`: whether no other gradient is known to come.
    """

    def __init__(self, is_last: Callable[[], bool]) -> None:
        self._is_last = is_last
        self._kept: tuple[Any, Callable[[Any], object]] | None = None

    @property
    def is_waiting(self) -> bool:
        """Whether operands are kept."""
        return self._kept is not None

    def put(self, operands: Any, alone: Callable[[Any], object]) -> Sequence[Any]:
        """The operands to compute with now: those kept and `operands`, or `operands` if they are the last.

        Empty if `operands` are kept; where no others come, `alone` is called with them.
        """
        if self._kept is not None:
            (earlier, _), self._kept = self._kept, None
            return [earlier, operands]
        if self._is_last():
            return [operands]
        self._kept = operands, alone
        return []

    @torch.no_grad()
    def flush(self) -> None:
        """Compute with what is kept."""
        if self._kept is not None:
            (operands, alone), self._kept = self._kept, None
            alone(operands)

    def clear(self) -> None:
        """Forget what is kept."""
        self._kept = None


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
