"""All parameters of a rank in one buffer, of which each data-parallel rank updates a share and gathers the rest.

Under ZeRO stage 1 a rank owns a slice of every bucket of gradients (`buckets`), and updates the parameters at the same
elements. So parameters lie in a buffer of the same layout, of their own dtype, each being a view of it; then an
all-gather of a bucket, in place, hands everyone the updated weights, with no copy before or after.

Overlap. The next forward pass needs the first layers first, and those lie in the last buckets. All gathers are started
at once, in that order, and a module waits, right before it runs, for the buckets that its parameters lie in
(`wait_before`); on CUDA its stream waits, not the host. Whoever else reads parameters calls `wait`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn
from torch.distributed import ProcessGroup

from megafp8 import collectives
from megafp8.optimizer.buckets import BufferLayout


class ParamBuffer:
    """Moves `params`, all of one dtype and device, into a buffer with the `layout` of their `GradBuffer`.

    Their values and their identity stay; whoever keeps a view of one makes it after this. `group`: who owns the slices.
    """

    def __init__(self, params: Sequence[nn.Parameter], layout: BufferLayout, group: ProcessGroup | None) -> None:
        dtypes = {param.dtype for param in params}
        assert len(dtypes) == 1, f"parameters of several dtypes: {dtypes}"
        self.flat = torch.zeros(layout.numel, dtype=params[0].dtype, device=params[0].device)
        self._layout, self._group = layout, group
        self._bucket_of = {params[i]: b for b, bucket in enumerate(layout.buckets) for i in bucket.params}
        self._works: dict[int, collectives.Work] = {}
        for param, slot in zip(params, layout.slots, strict=True):
            place = self.flat[slot.start : slot.end].view(param.shape)
            param.data = place.copy_(param.detach())

    def start_gather(self) -> None:
        """Start to fetch all slices from their owners."""
        assert not self._works, "start_gather() while one is under way: wait() for it first"
        for i in reversed(range(len(self._layout.buckets))):
            bucket = self._layout.buckets[i]
            self._works[i] = collectives.all_gather_in_place_async(self.flat[bucket.start : bucket.end], self._group)

    def wait(self, buckets: Iterable[int] | None = None) -> None:
        """Wait until these buckets (None: all) hold what was gathered; nothing to do where nothing is under way."""
        for i in list(self._works) if buckets is None else buckets:
            if i in self._works:
                self._works.pop(i).wait()

    def wait_before(self, modules: Iterable[nn.Module]) -> None:
        """Let each of `modules` wait for its own parameters whenever it is called. Together they have all there are."""
        covered: set[nn.Parameter] = set()
        for module in modules:
            covered |= set(module.parameters())
            buckets = sorted({self._bucket_of[param] for param in module.parameters()}, reverse=True)
            module.register_forward_pre_hook(lambda *_, buckets=buckets: self.wait(buckets))
        assert covered == self._bucket_of.keys(), "a parameter that nobody would wait for"
