"""All gradients of a rank in one contiguous fp32 buffer, summed over data parallel while backward still runs.

A gradient arrives in one of two ways. A linear layer computes its weight gradient itself and hands it to
`param.grad_sink`, or lets its GEMM accumulate straight into `param.main_grad` and reports that with
`param.grad_sink.added()`. Everything else (norms, biases, embeddings) comes through autograd: a hook moves `param.grad`
into the buffer and drops it, so no second set of gradients lives on. Either way the sum over micro-batches is in fp32,
whatever the dtype of the model.

Overlap. `start_overlap` says how many backward passes are still to come; the buffer then knows how often each
parameter will be handed in, and a bucket whose parameters all were is all-reduced at once, asynchronously. A tied
weight counts once for each layer that uses it (`spec.num_uses`). `finish` starts whatever never became ready (an unused
layer has no gradient and never reports) and waits for everything.

Buckets start strictly in order: bucket i waits for bucket i-1 to be started, even if it is ready first. Collectives
carry no names: the n-th call of one rank meets the n-th call of every other. Should one rank's backward finish two
buckets in another order, or leave a layer unused that its peers use, starting them as they become ready would add up
unrelated gradients. The price is that one late parameter delays the buckets behind it.

Gradients are summed, not averaged: the loss has been divided by the global number of tokens.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megafp8 import collectives
from megafp8.fp8.deferred import WgradStore
from megafp8.optimizer.buckets import bucket_layout
from megafp8.sharding import spec_of


class GradSink:
    """Where a layer hands in the weight gradients that it computes itself.

    Call it with a gradient; or accumulate into `main_grad` in a GEMM and report that with `added()`. `wgrads`: where
    linear layers leave their gradients for later while it is open, if there is a later.
    """

    def __init__(self, main_grad: Tensor, count: Callable[[], None], wgrads: WgradStore | None) -> None:
        self.main_grad = main_grad
        self.added = count
        self.wgrads = wgrads

    def __call__(self, grad: Tensor) -> None:
        """Add `grad`, shaped like the parameter and of any floating dtype, to `main_grad` in fp32."""
        assert grad.shape == self.main_grad.shape, f"a gradient {tuple(grad.shape)} for {tuple(self.main_grad.shape)}"
        self.main_grad.add_(grad.detach())
        self.added()


def main_grad_of(param: nn.Parameter) -> Tensor:
    """The fp32 gradient of a parameter that lives in a `GradBuffer`, shaped like the parameter."""
    grad = getattr(param, "main_grad", None)
    assert isinstance(grad, Tensor), "a parameter without main_grad: build its GradBuffer first"
    return grad


class GradBuffer:
    """The gradients of `params`, given in forward order and all on `device`.

    Gives every parameter `main_grad` (fp32 view of the buffer, shaped like the parameter) and `grad_sink` (`GradSink`).
    `flat` is the whole buffer, padding included. `bucket_elements`: fp32 elements of a bucket (see `bucket_layout`).
    `wgrads`: what the sinks offer linear layers for weight gradients to be computed later.

    One step: `zero`, the backward passes with `start_overlap` at any point among them (or never), `finish`.
    """

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        *,
        data_parallel_group: ProcessGroup | None,
        bucket_elements: int,
        device: torch.device,
        wgrads: WgradStore | None = None,
    ) -> None:
        assert len({id(p) for p in params}) == len(params), "a tied parameter belongs into the list once"
        self.params = list(params)
        self.layout = bucket_layout([p.numel() for p in params], bucket_elements)
        self.flat = torch.zeros(self.layout.numel, dtype=torch.float32, device=device)
        self._group = data_parallel_group
        self._bucket_of = {i: b for b, bucket in enumerate(self.layout.buckets) for i in bucket.params}
        self._works: list[collectives.Work] = []
        self._started = 0  # buckets [0, _started) are being, or have been, reduced
        self._overlap = False
        self._expected: list[int] = []  # per parameter: how often it is still to be handed in
        self._unready: list[int] = []  # per bucket: how many of its parameters are still expected
        for index, param in enumerate(self.params):
            self._attach(index, param, wgrads)

    def _attach(self, index: int, param: nn.Parameter, wgrads: WgradStore | None) -> None:
        slot = self.layout.slots[index]
        buffer = weakref.ref(self)  # a strong one would close a cycle through autograd's hooks, which gc cannot see

        def count() -> None:
            owner = buffer()
            if owner is not None:  # without it nobody reduces, and there is nothing to count for
                owner._count(index)

        sink = GradSink(self.flat[slot.start : slot.end].view(param.shape), count, wgrads)

        def take_autograd_gradient(param: nn.Parameter) -> None:
            if param.grad is not None:  # None: every layer that used it handed its gradient to the sink
                sink(param.grad)
                param.grad = None

        param.main_grad = sink.main_grad  # type: ignore[attr-defined]
        param.grad_sink = sink  # type: ignore[attr-defined]
        param.register_post_accumulate_grad_hook(take_autograd_gradient)

    def zero(self) -> None:
        """Forget all gradients; call before the first backward pass of a step."""
        assert not self._works, "zero() while a reduction is under way: finish() it first"
        self.flat.zero_()
        self._started = 0
        self._overlap = False

    def start_overlap(self, micro_batches: int = 1) -> None:
        """From here on reduce each bucket as soon as it is complete.

        `micro_batches`: how many backward passes each parameter still takes part in. Under a pipeline schedule, where
        the gradients of the last micro-batch may mix with those of earlier ones (interleaved stages, deferred weight
        gradients), call it before the first with the number of all of them.
        """
        assert self._started == 0, "start_overlap() after the reduction began: zero() first"
        self._expected = [spec_of(param).num_uses * micro_batches for param in self.params]
        self._unready = [len(bucket.params) for bucket in self.layout.buckets]
        self._overlap = True

    def finish(self) -> None:
        """Start what is not started yet and wait until `flat` holds the sum over the data-parallel group."""
        while self._started < len(self.layout.buckets):
            self._start_next()
        for work in self._works:
            work.wait()
        self._works = []
        self._overlap = False

    def _count(self, index: int) -> None:
        """Parameter `index` was handed in once more."""
        bucket = self._bucket_of[index]
        name = spec_of(self.params[index]).pieces[0].name
        assert bucket >= self._started, f"a gradient of {name} came after its bucket was reduced"
        if not self._overlap:
            return
        self._expected[index] -= 1
        assert self._expected[index] >= 0, f"{name} was handed in more often than its spec.num_uses says"
        if self._expected[index] == 0:
            self._unready[bucket] -= 1
        while self._started < len(self._unready) and self._unready[self._started] == 0:
            self._start_next()

    def _start_next(self) -> None:
        bucket = self.layout.buckets[self._started]
        self._works.append(collectives.all_reduce_async(self.flat[bucket.start : bucket.end], self._group))
        self._started += 1
