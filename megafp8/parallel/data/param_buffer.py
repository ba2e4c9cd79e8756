"""All parameters of a rank in buckets; each data-parallel rank updates a slice and gathers the other slices.

Under ZeRO stage 1, a rank owns a slice of every bucket of gradients (`buckets`) and updates the parameters at the same
elements. Parameters are views of buckets with the same layout, so an in-place all-gather of a bucket distributes the
updated weights without copies.

Some parameters are gathered and used in FP8 (`fp8_data`), with one byte per element, in separate buckets. Such a
parameter is then *released* (`release_fp8_params`): it keeps its shape, dtype and identity for autograd, but its values
exist only in the fp32 masters of the owning ranks. It reads as NaN, so that accidental use is visible.

*Overlap.* The next forward pass needs the first layers first, and these are in the last buckets. All gathers are
started together in that order, and a module waits, right before it runs, for the buckets of its parameters
(`wait_before`). On CUDA its stream waits, not the host. Any other reader of parameters must call `wait`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megafp8.parallel import collectives
from megafp8.parallel.data.buckets import BufferLayout


class ParamBuffer:
    """Buckets that hold `params`, all of one dtype and device, with the `layout` of their `GradBuffer`.

    The constructor moves the parameters and keeps their values and identity; take views of them only afterwards.

    Attributes:
        fp8_data: Buffers for parameters that are gathered in FP8, shaped like the parameters.
        buckets: Flat buffer of each bucket.

    Args:
        params: Parameters to move.
        layout: Layout of the buckets.
        group: Ranks that own slices.
        fp8_dtypes: Parameters in `layout`'s FP8 buckets, with the dtype in which each is gathered; they are not moved.
    """

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        layout: BufferLayout,
        group: ProcessGroup | None,
        fp8_dtypes: Mapping[nn.Parameter, torch.dtype] | None = None,
    ) -> None:
        dtypes = {param.dtype for param in params}
        assert len(dtypes) == 1, f"parameters of several dtypes: {dtypes}"
        fp8_dtypes = fp8_dtypes or {}
        self._group, self._value_bytes = group, params[0].element_size()
        self._bucket_of = {params[i]: b for b, bucket in enumerate(layout.buckets) for i in bucket.params}
        self._works: dict[int, collectives.CollectiveWork] = {}
        self.fp8_data: dict[nn.Parameter, Tensor] = {}
        self.buckets: list[Tensor] = []
        for bucket in layout.buckets:
            members = [params[i] for i in bucket.params]
            is_fp8 = members[0] in fp8_dtypes
            assert all((param in fp8_dtypes) == is_fp8 for param in members), "FP8 and other parameters in one bucket"
            dtype = torch.uint8 if is_fp8 else members[0].dtype
            flat = torch.zeros(bucket.end - bucket.start, dtype=dtype, device=members[0].device)
            self.buckets.append(flat)
            for param, i in zip(members, bucket.params):
                slot = layout.slots[i]
                view = flat[slot.start - bucket.start : slot.end - bucket.start].view(param.shape)
                if is_fp8:
                    self.fp8_data[param] = view.view(fp8_dtypes[param])
                else:
                    param.data = view.copy_(param.detach())

    @property
    def nbytes(self) -> int:
        """Bytes of all buckets: a rank holds all of them, and receives all except its own slices in every gather."""
        return sum(flat.nbytes for flat in self.buckets)

    @property
    def nbytes_unquantized(self) -> int:
        """Bytes of all buckets if no parameter were gathered in FP8."""
        return sum(flat.numel() for flat in self.buckets) * self._value_bytes

    def release_fp8_params(self) -> None:
        """Free the values of the parameters that are gathered in FP8."""
        _release(self.fp8_data)

    def hold_in_fp8(self, bucket: int, memory: Tensor) -> None:
        """Free the values of a bucket, and gather the FP8 data of its parameters in `memory` instead, one byte each."""
        assert memory.nbytes == self.buckets[bucket].numel()
        self.buckets[bucket] = memory
        _release(param for param, index in self._bucket_of.items() if index == bucket)

    def buckets_of(self, params: Iterable[nn.Parameter]) -> list[int]:
        """Return the buckets that hold some of `params`, in the order in which they are gathered."""
        return sorted({self._bucket_of[param] for param in params if param in self._bucket_of}, reverse=True)

    def start_gather(self) -> None:
        """Start to gather all slices from their owners."""
        assert not self._works, "start_gather() during another gather: wait() for it first"
        for i in reversed(range(len(self.buckets))):
            self._works[i] = collectives.all_gather_in_place_async(self.buckets[i], self._group)

    def wait(self, buckets: Iterable[int] | None = None) -> bool:
        """Wait until these buckets (None means all) have been gathered.

        Return at once if no gather is running, and return whether any was.
        """
        running = [i for i in (list(self._works) if buckets is None else buckets) if i in self._works]
        for i in running:
            self._works.pop(i).wait()
        return bool(running)

    def wait_before(self, modules: Iterable[nn.Module]) -> None:
        """Make each of `modules` wait for its own parameters when it is called.

        Together the modules must have all parameters.
        """
        covered: set[nn.Parameter] = set()
        for module in modules:
            params = {param for param in module.parameters() if param in self._bucket_of}
            covered |= params
            module.register_forward_pre_hook(partial(self._wait_before, self.buckets_of(params)))
        assert covered == self._bucket_of.keys(), "no module would wait for some of the parameters"

    def _wait_before(self, buckets: Sequence[int], *_: Any) -> None:
        """Wait for the buckets of a module that is called."""
        self.wait(buckets)


def _release(params: Iterable[nn.Parameter]) -> None:
    """Free the values of parameters, which then read as NaN."""
    for param in params:
        param.data = torch.full((), torch.nan, dtype=param.dtype, device=param.device).expand(param.shape)
