"""All gradients of a rank in one contiguous fp32 buffer, summed over data parallel while backward still runs.

A gradient arrives in one of two ways. A linear layer computes its weight gradient itself and hands it to
`param.grad_sink`, or lets its GEMM accumulate straight into `param.main_grad` and reports that with
`param.grad_sink.added()`; so does the embedding with the rows that it looked up. Everything else (norms, biases,
learned positions) comes through autograd: a hook moves `param.grad` into the buffer and drops it, so no second set of
gradients lives on. Either way the sum over micro-batches is in fp32,
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

*Sharded* (ZeRO stage 1, Rajbhandari et al. 2020, arXiv:1910.02054; Megatron-LM's distributed optimizer). A rank that
updates only a share of the parameters needs only that share of the sums. Then each bucket is reduce-scattered, half the
traffic, in place: the sum lands in the rank's own slice of the bucket (`owned`; in terms of parameters `fragments`),
and the other slices keep what is of no more use. Unsharded is the same with one slice, the bucket.

*Travelling in bf16* (`reduce_dtype`) halves the traffic again. Micro-batches are still summed in fp32; a bucket is
rounded once when it leaves, and with each addition on its way. The rounded copies live until `finish`, 2 bytes a
parameter at the end of the backward pass, where activations have gone.

*In FP8*, sharded only, it is an all-to-all instead (`megafp8.data_parallel.fp8_reduce`): each rank is sent its share
of a bucket as
codes, and adds in fp32 what came, at `finish`. Sums are not rounded then, gradients once and coarsely. What is sent and
what is received live until `finish`, some 2 bytes a parameter together.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megafp8.data_parallel.buckets import bucket_layout
from megafp8.data_parallel.fp8_reduce import add_up, pack
from megafp8.distributed import collectives
from megafp8.distributed.sharding import FlatShard, spec_of
from megafp8.fp8.formats import E4M3
from megafp8.ops.deferred_wgrad import WgradStore


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


def gradient_of(fragment: FlatShard) -> Tensor:
    """The fp32 gradient of a fragment, flat."""
    return fragment.of(main_grad_of(fragment.param))


class _Widening:
    """A reduction in another dtype, whose result goes into the buffer once it is there."""

    def __init__(self, work: collectives.Work, result: Tensor, into: Tensor) -> None:
        self.work, self.result, self.into = work, result, into

    def wait(self) -> None:
        self.work.wait()
        self.into.copy_(self.result)


class _Messages:
    """A bucket's shares on their way to their owners as FP8 messages; the sum is made once they are there."""

    def __init__(self, bucket: Tensor, group: ProcessGroup) -> None:
        slices = bucket.view(group.size(), -1)
        self._rank, self._own = group.rank(), slices[group.rank()]
        self._sent = pack(slices, self._rank)
        self._received, self._work = collectives.all_to_all_async(self._sent, group)

    def wait(self) -> None:
        self._work.wait()
        add_up(self._own, self._received, self._rank)


class GradBuffer:
    """The gradients of `params`, given in forward order and all on `device`.

    Gives every parameter `main_grad` (fp32 view of the buffer, shaped like the parameter) and `grad_sink` (`GradSink`).
    `flat` is the whole buffer, padding included. `bucket_elements`: fp32 elements of a bucket (see `bucket_layout`).
    `wgrads`: what the sinks offer linear layers for weight gradients to be computed later.

    `sharded`: each rank of the group gets its share of the sums alone. `alone`: parameters that lie in buckets of their
    own; `apart`: those that share buckets with each other only. `reduce_dtype`: in which gradients travel,
    fp32, bf16 or, if `sharded`, E4M3. `owned`: the views of `flat` that hold sums after `finish`; `fragments`: which
    elements of which parameters.

    One step: `zero`, the backward passes with `start_overlap` at any point among them (or never), `finish`.
    """

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        *,
        data_parallel_group: ProcessGroup | None,
        bucket_elements: int,
        device: torch.device,
        sharded: bool = False,
        alone: Sequence[nn.Parameter] = (),
        apart: AbstractSet[nn.Parameter] = frozenset(),
        reduce_dtype: torch.dtype = torch.float32,
        wgrads: WgradStore | None = None,
    ) -> None:
        assert len({id(p) for p in params}) == len(params), "a tied parameter belongs into the list once"
        self.params = list(params)
        self.layout = bucket_layout(
            [p.numel() for p in params],
            bucket_elements,
            ranks=collectives.size(data_parallel_group) if sharded else 1,
            own_bucket=[i for i, param in enumerate(params) if any(param is other for other in alone)],
            fp8_bucket=[i for i, param in enumerate(params) if param in apart],
        )
        self.flat = torch.zeros(self.layout.numel, dtype=torch.float32, device=device)
        self._group = data_parallel_group
        self._reduce_dtype = reduce_dtype if collectives.size(data_parallel_group) > 1 else torch.float32
        assert sharded or self._reduce_dtype != E4M3.dtype, "FP8 goes to the owner of a share"
        self._rank = data_parallel_group.rank() if data_parallel_group is not None and self.layout.ranks > 1 else 0
        self.owned = [self.flat[own.start : own.end] for own in self.layout.owned(self._rank)]
        self.shards = [FlatShard(self.params[r.param], r.start, r.end) for r in self.layout.runs(self._rank)]
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
        """Start what is not started yet and wait until `owned` holds the sums over the data-parallel group."""
        while self._started < len(self.layout.buckets):
            self._start_next()
        for work in self._works:
            work.wait()
        self._works = []
        self._overlap = False

    def _count(self, index: int) -> None:
        """Parameter `index` was handed in once more."""
        bucket = self._bucket_of[index]
        name = spec_of(self.params[index]).shards[0].name
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
        self._works.append(self._reduce(self.flat[bucket.start : bucket.end], self.owned[self._started]))
        self._started += 1

    def _reduce(self, bucket: Tensor, own: Tensor) -> collectives.Work:
        """Start summing `bucket` into `own`, a part of it or all."""
        if self._reduce_dtype == E4M3.dtype:
            assert self._group is not None
            return _Messages(bucket, self._group)
        sent, sharded = bucket.to(self._reduce_dtype), self.layout.ranks > 1
        if sharded:
            work = collectives.reduce_scatter_in_place_async(sent, self._group)
        else:
            work = collectives.all_reduce_async(sent, self._group)
        if sent.dtype == bucket.dtype:
            return work
        return _Widening(work, collectives.own_slice(sent, self._group) if sharded else sent, own)
