"""Collectives and point-to-point messages. Only this module calls torch.distributed for tensors.

This has three advantages. A group of one rank costs nothing: no call, no copy. Functions that torch renames between
releases are named in one place. FP8 tensors, which no backend supports, are sent as bytes.

All functions work along dim 0 and expect contiguous tensors. `group=None` is the same as a group of one rank. The
`*_async` forms return a `CollectiveWork`: the result may be read after `CollectiveWork.wait()`, which makes the current
stream wait on CUDA and blocks on CPU. Tensors passed to these forms must stay alive until then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megafp8.parallel import activity
from megafp8.parallel.activity import CollectiveWork, blocking, started

_ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}

ReduceOp = Literal["sum", "max", "min"]


class WaitFunction(NamedTuple):
    """Function wrapped as a `CollectiveWork`."""

    wait: Callable[[], Any]


DONE: CollectiveWork = WaitFunction(lambda: None)


class WorkList:
    """Several works that are waited for together. Keeps `alive` until then."""

    def __init__(self, works: Sequence[CollectiveWork], alive: Sequence[Tensor] = ()) -> None:
        self._works, self._alive = works, alive

    def wait(self) -> None:
        """Wait for all works."""
        for work in self._works:
            work.wait()
        self._works, self._alive = [], []


def size(group: ProcessGroup | None) -> int:
    """Return the number of ranks in `group`; 1 for None."""
    return 1 if group is None else group.size()


def rank(group: ProcessGroup | None) -> int:
    """Return this rank's index in `group`; 0 for None."""
    return 0 if group is None else group.rank()


def as_bytes(x: Tensor) -> Tensor:
    """Return FP8 tensors as uint8 (no backend sends FP8), and every other tensor unchanged."""
    return x.view(torch.uint8) if x.element_size() == 1 and x.is_floating_point() else x


def own_slice(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """Return this rank's slice of `x`, split evenly along dim 0, as a view."""
    if group is None:
        return x
    length, rest = divmod(x.shape[0], group.size())
    assert rest == 0, f"dim 0 of {tuple(x.shape)} is not a multiple of {group.size()} ranks"
    return x.narrow(0, group.rank() * length, length)


def all_reduce(x: Tensor, group: ProcessGroup | None, op: ReduceOp = "sum") -> Tensor:
    """Reduce `x` over `group` in place and return it."""
    if size(group) > 1:
        all_reduce_async(x, group, op).wait()
    return x


def all_reduce_async(x: Tensor, group: ProcessGroup | None, op: ReduceOp = "sum") -> CollectiveWork:
    """Start reducing `x` over `group` in place."""
    if size(group) == 1:
        return DONE
    return started("all_reduce", group, dist.all_reduce(x, op=_OPS[op], group=group, async_op=True))


def coalesced_all_reduce(tensors: Sequence[Tensor], group: ProcessGroup | None) -> None:
    """Sum several tensors of one dtype in place with a single collective (they are packed and unpacked)."""
    if size(group) == 1 or not tensors:
        return
    flat = torch.cat([t.reshape(-1) for t in tensors])
    all_reduce(flat, group)
    reduced = flat.split([t.numel() for t in tensors])
    torch._foreach_copy_(list(tensors), [x.view_as(t) for x, t in zip(reduced, tensors)])


def _gathered_like(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """Allocate the output of an all-gather of `x`."""
    return torch.empty((x.shape[0] * size(group), *x.shape[1:]), dtype=x.dtype, device=x.device)


def all_gather(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """Concatenate every rank's `x` along dim 0: `[n, ...]` -> `[n * ranks, ...]`."""
    if size(group) == 1:
        return x
    out = _gathered_like(x, group)
    with blocking("all_gather", group):
        _ALL_GATHER(as_bytes(out), as_bytes(x.contiguous()), group=group)
    return out


def all_gather_async(tensors: Sequence[Tensor], group: ProcessGroup | None) -> tuple[list[Tensor], CollectiveWork]:
    """Start an `all_gather` of each tensor, all in one launch, and return the results and the work."""
    if size(group) == 1:
        return list(tensors), DONE
    outs = [_gathered_like(x, group) for x in tensors]
    return outs, all_gather_into_async(outs, [x.contiguous() for x in tensors], group)


def all_gather_into_async(
    outs: Sequence[Tensor], tensors: Sequence[Tensor], group: ProcessGroup | None
) -> CollectiveWork:
    """Start an `all_gather` of each tensor into the corresponding tensor of `outs`; on CUDA, all in one launch.

    With gloo, the gathers are not coalesced: two coalesced gathers of one group that end at the same time would corrupt
    memory (torch 2.13). The two threads of a group assign the name of the completed operation to one std::string
    without a lock (`ProcessGroupGloo::runLoop`), and "ALLGATHER_COALESCED" is longer than 15 characters, the limit up
    to which a string allocates nothing.
    """
    if size(group) == 1:
        for out, x in zip(outs, tensors):
            out.copy_(x)
        return DONE
    # Send bytes, because not every backend supports every dtype.
    pairs = [(out.view(torch.uint8), x.view(torch.uint8)) for out, x in zip(outs, tensors)]
    if not any(x.is_cuda for x in tensors):
        works = [_ALL_GATHER(out, x, group=group, async_op=True) for out, x in pairs]
        return started("all_gather", group, WorkList(works))
    with dist._coalescing_manager(group=group, async_ops=True) as work:
        for out, x in pairs:
            _ALL_GATHER(out, x, group=group)
    return started("all_gather", group, work)


def all_gather_in_place_async(x: Tensor, group: ProcessGroup | None) -> CollectiveWork:
    """Start to fill each rank's slice of `x` from that rank. This rank sends its own slice."""
    if size(group) == 1:
        return DONE
    x = x.view(torch.uint8)  # not every backend supports every dtype
    return started("all_gather", group, _ALL_GATHER(x, own_slice(x, group), group=group, async_op=True))


def reduce_scatter(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """Sum `x` over `group` and keep this rank's slice of dim 0: `[n, ...]` -> `[n / ranks, ...]`."""
    out, work = reduce_scatter_async(x, group)
    work.wait()
    return out


def reduce_scatter_async(x: Tensor, group: ProcessGroup | None) -> tuple[Tensor, CollectiveWork]:
    """Start a `reduce_scatter`, and return the result and the work."""
    if size(group) == 1:
        return x, DONE
    out = torch.empty_like(own_slice(x, group), memory_format=torch.contiguous_format)
    return out, started("reduce_scatter", group, _REDUCE_SCATTER(out, x.contiguous(), group=group, async_op=True))


def reduce_scatter_into(out: Tensor, x: Tensor, group: ProcessGroup) -> None:
    """Sum `x` over `group` and write this rank's slice of dim 0 to `out`; on CUDA, on the current stream."""
    with blocking("reduce_scatter", group):
        _REDUCE_SCATTER(out, x, group=group)


def reduce_scatter_in_place_async(x: Tensor, group: ProcessGroup | None) -> CollectiveWork:
    """Start to sum `x` over `group` into this rank's slice of it. The other slices become undefined."""
    if size(group) == 1:
        return DONE
    return started("reduce_scatter", group, _REDUCE_SCATTER(own_slice(x, group), x, group=group, async_op=True))


def all_to_all_rows(x: Tensor, sent: Sequence[int], received: Sequence[int], group: ProcessGroup) -> Tensor:
    """Send the first `sent[0]` rows of `x` `[m, ...]` to rank 0 of `group`, the next `sent[1]` to rank 1, and so on.

    Return the rows that arrive: first the `received[0]` rows of rank 0, then the rows of rank 1, and so on.
    """
    out = torch.empty((sum(received), *x.shape[1:]), dtype=x.dtype, device=x.device)
    to, source = out.view(torch.uint8), x.contiguous().view(torch.uint8)
    with blocking("all_to_all", group):
        dist.all_to_all_single(to, source, list(received), list(sent), group=group)
    return out


def broadcast(x: Tensor, group: ProcessGroup | None, group_src: int) -> Tensor:
    """Overwrite `x` in place with the tensor of rank `group_src` (an index in the group)."""
    if size(group) > 1:
        with blocking("broadcast", group):
            dist.broadcast(x, group=group, group_src=group_src)
    return x


def broadcast_object(value: Any, group: ProcessGroup | None) -> Any:
    """Return the first rank's picklable `value` on all ranks. For setup and reports, not for every training step."""
    if size(group) == 1:
        return value
    values = [value]
    with blocking("broadcast of an object", group):
        dist.broadcast_object_list(values, group=group, group_src=0)
    return values[0]


def all_gather_objects(value: Any, group: ProcessGroup | None) -> list[Any]:
    """Return every rank's picklable `value`, in group order. For setup and reports, not for every training step."""
    if size(group) == 1:
        return [value]
    values: list[Any] = [None] * size(group)
    with blocking("all_gather of objects", group):
        dist.all_gather_object(values, value, group=group)
    return values


def gather_objects(value: Any, group: ProcessGroup | None) -> list[Any] | None:
    """Return every rank's picklable `value`, in group order, on the first rank of `group`; None on other ranks."""
    if group is None or group.size() == 1:
        return [value]
    values: list[Any] | None = [None] * group.size() if group.rank() == 0 else None
    with blocking("gather of objects", group):
        dist.gather_object(value, values, group=group, group_dst=0)
    return values


def scatter_objects(values: list[Any] | None, group: ProcessGroup | None) -> Any:
    """Return this rank's element of the picklable `values`, in group order. Only the first rank passes `values`."""
    if size(group) == 1:
        assert values is not None
        return values[0]
    received = [None]
    with blocking("scatter of objects", group):
        dist.scatter_object_list(received, values, group=group, group_src=0)
    return received[0]


def barrier(group: ProcessGroup | None) -> None:
    """Wait until every rank of `group` has called this."""
    if size(group) > 1:
        with blocking("barrier", group):
            dist.barrier(group=group)


def send_async(x: Tensor, group: ProcessGroup, group_dst: int) -> CollectiveWork:
    """Start to send `x` to rank `group_dst` of the group."""
    return started("send", group, dist.isend(as_bytes(x), group=group, group_dst=group_dst), group_dst)


def recv_async(x: Tensor, group: ProcessGroup, group_src: int) -> CollectiveWork:
    """Start to receive into `x` from rank `group_src` of the group."""
    return started("receive", group, dist.irecv(as_bytes(x), group=group, group_src=group_src), group_src)


def send_recv_async(
    sent: Sequence[Tensor], group_dst: int, received: Sequence[Tensor], group_src: int, group: ProcessGroup
) -> CollectiveWork:
    """Start to send tensors to one rank of the group and to receive tensors from another, all in one launch.

    All ranks of the group must call it together, so that sends and receives match. `sent` is kept alive.
    """
    outgoing = [as_bytes(x.contiguous()) for x in sent]
    ops = [dist.P2POp(dist.isend, x, group=group, group_peer=group_dst) for x in outgoing]
    ops += [dist.P2POp(dist.irecv, as_bytes(x), group=group, group_peer=group_src) for x in received]
    work = WorkList(dist.batch_isend_irecv(ops), outgoing)
    if activity.record is not None:
        activity.record.begin("send", group, group_dst, sends=True)
    return started("receive", group, work, group_src)
