"""All gradients of a rank in one contiguous fp32 buffer, summed over data parallelism while backward still runs.

In a model with dtype float64, all fp32 tensors described here are float64 (`megafp8.numerics.dtypes.sum_dtype`).

A gradient arrives in one of two ways. A linear layer adds its weight gradient to the sink of the weight, or lets its
GEMM do so (`megafp8.linear.grad_sink`); the embedding does the same. All other gradients (norms, biases, learned
positions) come from autograd: a hook moves `param.grad` into the buffer and frees it. Either way the sum over
micro-batches is in fp32, whatever the dtype of the model. A parameter's first gradient in a step is written, not added,
so the buffer is not zeroed; only parameters without a gradient in a step are zeroed. Gradients are summed, not
averaged: the loss has been divided by the global number of tokens.

*Overlap.* `start_overlap` gets the number of remaining backward passes, so the buffer knows how often each parameter
will receive a gradient (a tied weight once for each layer that uses it, `spec.num_uses`). When all parameters of a
bucket have received their gradients, the bucket is reduced asynchronously. `finish` starts the remaining buckets (an
unused layer has no gradient) and waits for all.

Buckets are started strictly in order. Collectives carry no names: the n-th call of one rank matches the n-th call of
every other rank. If one rank's backward completed two buckets in another order, or skipped a layer that other ranks
use, starting buckets when they complete would add unrelated gradients. The cost is that one late parameter delays later
buckets.

*Sharded* (ZeRO stage 1, Rajbhandari et al. 2020, arXiv:1910.02054; Megatron-LM's distributed optimizer). A rank that
updates a shard of the parameters needs only that shard of the sums. Each bucket is reduce-scattered in place, half the
traffic: the sum is written to the rank's own slice (`owned`; as parameters: `shards`), and the other slices become
undefined. The unsharded case is the same with one slice, the whole bucket.

*Reduced in bf16* (`reduce_dtype`): half the traffic again. Micro-batches are still summed in fp32; a bucket is rounded
once when it is sent, and with each addition of the collective. The bf16 copies live until `finish`: 2 bytes per
parameter at the end of the backward pass, when activations have been freed.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megafp8.linear.deferred_wgrad import WgradPair, WgradStore
from megafp8.linear.grad_sink import deliver, set_grad_sink
from megafp8.parallel import collectives
from megafp8.parallel.data.buckets import bucket_layout
from megafp8.parallel.sharding import FlatShard, spec_of


@dataclass(eq=False)
class BufferSink:
    """`GradSink` of parameter `index` of a `buffer`, which counts gradients. The sum is fp32."""

    main_grad: Tensor
    buffer: weakref.ref[GradBuffer]
    index: int
    wgrads: WgradStore | None
    pair: WgradPair | None
    is_empty: bool = False

    def added(self) -> None:
        """Report to the buffer that a gradient has been added."""
        self.is_empty = False
        buffer = self.buffer()
        if buffer is not None:
            buffer.count(self.index)

    def clear(self) -> None:
        """Discard the sum and the operands kept for a pair."""
        self.is_empty = True
        if self.pair is not None:
            self.pair.clear()

    def complete(self) -> None:
        """Add the gradient of operands kept for a pair, and zero the sum if there is no gradient."""
        if self.pair is not None:
            self.pair.flush()
        if self.is_empty:
            self.main_grad.zero_()
            self.is_empty = False


def main_grad_of(param: nn.Parameter) -> Tensor:
    """Return the fp32 gradient of a parameter of a `GradBuffer`, shaped like the parameter."""
    grad = getattr(param, "main_grad", None)
    assert isinstance(grad, Tensor), "a parameter without main_grad: build its GradBuffer first"
    return grad


def gradient_of(shard: FlatShard) -> Tensor:
    """Return the fp32 gradient of a shard, flat."""
    return shard.view(main_grad_of(shard.param))


class GradBuffer:
    """Gradients of `params`, given in forward order and all on `device`.

    Every parameter gets `main_grad`, an fp32 view of the buffer that is shaped like the parameter, and a `GradSink` for
    it.

    One step calls `clear`, then the backward passes, with `start_overlap` at any point between them (or never), then
    `finish`.

    Attributes:
        flat: Whole buffer, including padding.
        owned: Views of `flat` that hold sums after `finish`.
        shards: Parts of parameters in `owned`.

    Args:
        params: Parameters.
        data_parallel_group: Ranks over which gradients are summed.
        bucket_elements: Number of fp32 elements of a bucket (see `bucket_layout`).
        device: Device of the buffer.
        sharded: Give each rank of the group only its shard of the sums.
        own_bucket: Parameters with their own buckets.
        fp8_bucket: Parameters that share buckets only with each other.
        dtype: Dtype of the buffer.
        reduce_dtype: Dtype in which gradients are sent; the buffer's dtype by default.
        wgrads: Store of the sinks for deferred weight gradients.
        in_pairs: Compute weight gradients for two micro-batches together if kernels support it.
    """

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        *,
        data_parallel_group: ProcessGroup | None,
        bucket_elements: int,
        device: torch.device,
        sharded: bool = False,
        own_bucket: Sequence[nn.Parameter] = (),
        fp8_bucket: AbstractSet[nn.Parameter] = frozenset(),
        dtype: torch.dtype = torch.float32,
        reduce_dtype: torch.dtype | None = None,
        wgrads: WgradStore | None = None,
        in_pairs: bool = False,
    ) -> None:
        assert len({id(p) for p in params}) == len(params), "a tied parameter must be in the list only once"
        ranks = collectives.size(data_parallel_group)
        self.params = list(params)
        self.layout = bucket_layout(
            [p.numel() for p in params],
            bucket_elements,
            ranks=ranks if sharded else 1,
            own_bucket=[i for i, param in enumerate(params) if any(param is other for other in own_bucket)],
            fp8_bucket=[i for i, param in enumerate(params) if param in fp8_bucket],
        )
        self.flat = torch.zeros(self.layout.numel, dtype=dtype, device=device)
        self.group = data_parallel_group
        self._reduce_dtype = reduce_dtype or dtype
        rank = data_parallel_group.rank() if data_parallel_group is not None and self.layout.ranks > 1 else 0
        owned = [self.flat[shard.start : shard.end] for shard in self.layout.owned(rank)]
        self.owned = owned or [self.flat]  # empty: a stage may have nothing to train (LoRA)
        self.shards = [FlatShard(self.params[s.param], s.start, s.end) for s in self.layout.shards(rank)]
        self._bucket_of = {i: b for b, bucket in enumerate(self.layout.buckets) for i in bucket.params}
        self._sinks: list[BufferSink] = []
        self._works: list[collectives.CollectiveWork] = []
        self._started = 0  # buckets [0, _started) are being, or have been, reduced
        self._overlap = False
        self._expected: list[float] = []  # per parameter: gradients still to come
        self._incomplete: list[int] = []  # per bucket: parameters that still expect gradients
        for index, param in enumerate(self.params):
            self._attach(index, param, wgrads, in_pairs)
        # After a reduce-scatter, slices of other ranks are undefined, and padding between parameters is sent again.
        gaps = self.layout.gaps if self.layout.ranks > 1 else []
        self._padding = [self.flat[gap.start : gap.end] for gap in gaps]

    def _attach(self, index: int, param: nn.Parameter, wgrads: WgradStore | None, in_pairs: bool) -> None:
        """Give a parameter its sink, `main_grad` and the hook that takes autograd's gradient."""
        slot = self.layout.slots[index]
        buffer = weakref.ref(self)  # a strong reference would form a cycle through autograd hooks, invisible to gc

        def is_last() -> bool:
            owner = buffer()
            return owner is not None and owner._overlap and owner._expected[index] <= 1

        pair = WgradPair(is_last) if in_pairs else None
        sink = BufferSink(self.flat[slot.start : slot.end].view(param.shape), buffer, index, wgrads, pair)

        def take_autograd_gradient(param: nn.Parameter) -> None:
            if param.grad is not None:  # None if every layer that used it passed its gradient to the sink
                deliver(param, param.grad)
                param.grad = None

        self._sinks.append(sink)
        param.main_grad = sink.main_grad  # type: ignore[attr-defined]
        set_grad_sink(param, sink)
        param.register_post_accumulate_grad_hook(take_autograd_gradient)

    def clear(self) -> None:
        """Discard all gradients; their memory is then undefined. Call this before the first backward pass of a step."""
        assert not self._works, "clear() during a reduction: finish() it first"
        for sink in self._sinks:
            sink.clear()
        for padding in self._padding:
            padding.zero_()
        self._started = 0
        self._overlap = False

    def complete(self) -> None:
        """Set the gradients of parameters that got none in this step to zero. `finish` also does this."""
        for sink in self._sinks:
            sink.complete()

    def start_overlap(self, micro_batches: int = 1) -> None:
        """Reduce each bucket from now on as soon as it is complete.

        `micro_batches` is the number of remaining backward passes for each parameter. Under a pipeline schedule in
        which the gradients of the last micro-batch may mix with earlier ones (interleaved stages, deferred weight
        gradients), call this before the first backward pass with the total number.
        """
        assert self._started == 0, "start_overlap() after the reduction began: clear() first"
        self._expected = [
            (spec_of(param).num_uses or math.inf) * micro_batches + (sink.pair is not None and sink.pair.is_waiting)
            for param, sink in zip(self.params, self._sinks, strict=True)
        ]
        self._incomplete = [len(bucket.params) for bucket in self.layout.buckets]
        self._overlap = True

    def finish(self) -> None:
        """Start the remaining buckets, and wait until `owned` holds the sums over the data-parallel group."""
        while self._started < len(self.layout.buckets):
            self._start_next()
        for work in self._works:
            work.wait()
        self._works = []
        self._overlap = False

    def count(self, index: int) -> None:
        """Record that parameter `index` received a gradient."""
        bucket = self._bucket_of[index]
        assert bucket >= self._started, f"a gradient of {self._name(index)} came after its bucket was reduced"
        if not self._overlap:
            return
        self._expected[index] -= 1
        assert self._expected[index] >= 0, f"{self._name(index)} received more gradients than its spec.num_uses says"
        if self._expected[index] == 0:
            self._incomplete[bucket] -= 1
        while self._started < len(self._incomplete) and self._incomplete[self._started] == 0:
            self._start_next()

    def _name(self, index: int) -> str:
        """Return the global name of a parameter."""
        return spec_of(self.params[index]).shards[0].name

    def _start_next(self) -> None:
        """Complete the next bucket and start to reduce it."""
        bucket = self.layout.buckets[self._started]
        for index in bucket.params:
            self._sinks[index].complete()
        gradients, owned = self.flat[bucket.start : bucket.end], self.owned[self._started]
        self._works.append(reduce_bucket(gradients, owned, self.group, self._reduce_dtype))
        self._started += 1


def reduce_bucket(
    bucket: Tensor, owned: Tensor, group: ProcessGroup | None, dtype: torch.dtype
) -> collectives.CollectiveWork:
    """Start to sum `bucket` over `group` into `owned`, which is this rank's slice of the bucket or the whole bucket.

    Gradients are sent in `dtype`.
    """
    sent = bucket if collectives.size(group) == 1 else bucket.to(dtype)
    sharded = owned.numel() < bucket.numel()
    reduce = collectives.reduce_scatter_in_place_async if sharded else collectives.all_reduce_async
    work = reduce(sent, group)
    if sent.dtype == bucket.dtype:
        return work

    def wait() -> None:
        work.wait()
        owned.copy_(collectives.own_slice(sent, group) if sharded else sent)

    return collectives.WaitFunction(wait)
