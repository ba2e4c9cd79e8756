"""Weight gradients deferred by a backward pass.

Nothing reads a weight's gradient before the optimizer step, so a pipeline schedule may compute it when a rank would
otherwise be idle. While a `WgradStore` is open, linear layers that have the store in their gradient sink compute their
input's gradient as usual, and put into the store a closure over the operands of wgrad (FP8 data if the layer runs in
FP8). Gradients of norms, biases and embeddings are cheap and stay in the backward pass.

A deferred gradient takes two calls: begin and finish. Under sequence parallelism, it begins by gathering columnwise
data over the tensor-parallel ranks. `run` begins the next gradient before it finishes the current one, so the gather
overlaps with a GEMM. All tensor-parallel ranks run the same schedule, so their gathers match.

*Exchanges.* A rank with some of the experts waits in each layer's backward, once for the gradients of its experts'
outputs and once for the gradients of its tokens. A store can be opened for exchanges: each exchange, once it is under
way, calls `compute_during_exchange`, and the gradients that were deferred before it are computed while it runs. These
are the gradients of the layers between two exchanges, so few operands are held.

*Pairs.* Adding a gradient to an fp32 sum reads and writes the whole sum. For experts with few rows, this takes longer
than the product itself. A `WgradPair` keeps the operands of one micro-batch until the next micro-batch's gradient, and
one kernel adds both. The cost is the memory of the operands.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

Wgrad = Callable[[], Callable[[], object]]
"""Function that begins a weight gradient, and returns a function that computes it and adds it to the weight's sink."""


class WgradStore:
    """Store that collects deferred weight gradients while it is open. All layers of a rank share one store."""

    def __init__(self) -> None:
        self._open: deque[Wgrad] | None = None
        self._for_exchanges = False

    @property
    def is_open(self) -> bool:
        """Whether the store collects gradients."""
        return self._open is not None

    @contextmanager
    def collect(self, wgrads: deque[Wgrad], *, for_exchanges: bool = False) -> Iterator[None]:
        """Open the store: weight gradients that backward passes inside the context defer go to `wgrads`, for `run`.

        If the store is opened `for_exchanges`, exchanges compute the gradients that they find there.
        """
        assert self._open is None, "the store is open already"
        self._open, self._for_exchanges = wgrads, for_exchanges
        try:
            yield
        finally:
            self._open, self._for_exchanges = None, False

    def compute_during_exchange(self) -> None:
        """Compute the gradients deferred so far if the store is open for exchanges. Call this when one is under way."""
        if self._for_exchanges:
            assert self._open is not None
            run(self._open)

    def put(self, wgrad: Wgrad) -> None:
        """Defer a weight gradient."""
        assert self._open is not None
        self._open.append(wgrad)


class WgradPair:
    """Operands of one weight's gradient, kept until the operands of the next micro-batch arrive.

    `is_last` returns whether no further gradient is expected.
    """

    def __init__(self, is_last: Callable[[], bool]) -> None:
        self._is_last = is_last
        self._kept: tuple[Any, Callable[[Any], object]] | None = None

    @property
    def is_waiting(self) -> bool:
        """Whether operands are kept."""
        return self._kept is not None

    def put(self, operands: Any, alone: Callable[[Any], object]) -> Sequence[Any]:
        """Return the operands to compute with now: the kept ones and `operands`, or `operands` if they are the last.

        Return an empty sequence if `operands` are kept. If no further operands arrive, `flush` calls `alone` with them.
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
        """Compute the gradient of the kept operands, if any."""
        if self._kept is not None:
            (operands, alone), self._kept = self._kept, None
            alone(operands)

    def clear(self) -> None:
        """Drop the kept operands."""
        self._kept = None


@torch.no_grad()
def run(wgrads: deque[Wgrad]) -> None:
    """Compute `wgrads` in order, and remove each from the queue so that its operands are freed."""
    finish: Callable[[], object] | None = None
    while wgrads:
        following = wgrads.popleft()()
        if finish is not None:
            finish()
        finish = following
    if finish is not None:
        finish()
