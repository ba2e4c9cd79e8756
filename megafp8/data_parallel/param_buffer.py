"""All parameters of a rank in buckets, of which each data-parallel rank updates a share and gathers the rest.

Under ZeRO stage 1 a rank owns a slice of every bucket of gradients (`buckets`), and updates the parameters at the same
elements. So parameters lie in buckets of the same layout, of their own dtype, each being a view of one; then an
all-gather of a bucket, in place, hands everyone the updated weights, with no copy before or after.

Some travel, and stay, as FP8 codes (`codes`): one byte an element, in buckets of their own. Such a parameter is then
*hollow* (`release_fp8_params`): it keeps its shape, dtype and identity, for autograd and for whoever counts, but its values are
in its owners' fp32 masters only. It reads as NaN, so that nobody computes with it unnoticed.

Overlap. The next forward pass needs the first layers first, and those lie in the last buckets. All gathers are started
at once, in that order, and a module waits, right before it runs, for the buckets that its parameters lie in
(`wait_before`); on CUDA its stream waits, not the host. Whoever else reads parameters calls `wait`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megafp8.data_parallel.buckets import BufferLayout
from megafp8.distributed import collectives


class ParamBuffer:
    """Moves `params`, all of one dtype and device, into buckets with the `layout` of their `GradBuffer`.

    Their values and their identity stay; whoever keeps a view of one makes it after this. `group`: who owns the slices.
    `as_codes`: parameters that `layout` keeps apart, and the one-byte dtype that each travels in; they stay where they
    are until `release_fp8_params`. `codes`: what to write those into, shaped like the parameters.
    """

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        layout: BufferLayout,
        group: ProcessGroup | None,
        as_codes: Mapping[nn.Parameter, torch.dtype] | None = None,
    ) -> None:
        dtypes = {param.dtype for param in params}
        assert len(dtypes) == 1, f"parameters of several dtypes: {dtypes}"
        as_codes = as_codes or {}
        self._layout, self._group, self._value_bytes = layout, group, params[0].element_size()
        self._bucket_of = {params[i]: b for b, bucket in enumerate(layout.buckets) for i in bucket.params}
        self._works: dict[int, collectives.Work] = {}
        self.codes: dict[nn.Parameter, Tensor] = {}
        self.buckets: list[Tensor] = []
        for bucket in layout.buckets:
            members = [params[i] for i in bucket.params]
            coded = members[0] in as_codes
            assert all((param in as_codes) == coded for param in members), "codes and values in one bucket"
            dtype = torch.uint8 if coded else members[0].dtype
            flat = torch.zeros(bucket.end - bucket.start, dtype=dtype, device=members[0].device)
            self.buckets.append(flat)
            for param, i in zip(members, bucket.params):
                slot = layout.slots[i]
                place = flat[slot.start - bucket.start : slot.end - bucket.start].view(param.shape)
                if coded:
                    self.codes[param] = place.view(as_codes[param])
                else:
                    param.data = place.copy_(param.detach())

    @property
    def nbytes(self) -> int:
        """Of all buckets, which is what a rank holds; but for its own slices it receives them in every gather."""
        return sum(flat.nbytes for flat in self.buckets)

    @property
    def nbytes_unquantized(self) -> int:
        """What that would be without codes."""
        return sum(flat.numel() for flat in self.buckets) * self._value_bytes

    def release_fp8_params(self) -> None:
        """Free the values of the parameters that travel as codes."""
        for param in self.codes:
            param.data = torch.full((), torch.nan, dtype=param.dtype, device=param.device).expand(param.shape)

    def start_gather(self) -> None:
        """Start to fetch all slices from their owners."""
        assert not self._works, "start_gather() while one is under way: wait() for it first"
        for i in reversed(range(len(self.buckets))):
            self._works[i] = collectives.all_gather_in_place_async(self.buckets[i], self._group)

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
