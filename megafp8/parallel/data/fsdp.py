"""ZeRO stage 3 (`fully_shard`): every rank of a group holds some rows of each weight, its gradient and its state.

torch gathers the weights of a block, in the model's dtype, before its forward and again before its backward, and
gathers the next block's weights while this block computes. It frees the weights afterwards, and reduce-scatters the
block's gradients as soon as they are complete (FSDP2; Rajbhandari et al. 2020, arXiv:1910.02054).

*Rows are parameters.* torch keeps a slice of dim 0. For the optimizer, the norm and checkpoints, a row shard is
therefore a parameter like any other, with a spec that says which rows it has (`sharding.slice_rows`). It is released:
it has the model's dtype and no storage. Its values are in the fp32 tensor that torch gathers from, which Adam updates
in place. The masters are thus the only copy, and nothing is rounded in between. (With several replicas, see below.)

*Frozen weights* (`requires_grad` is False) have no gradients: a rank holds its rows in the model's dtype, and these are
the values of the parameter that represents them.

*Gradients* are reduced after every micro-batch and summed in shards, which takes less memory and more traffic. They are
summed in fp32: `grad_dtype` makes autograd accept weight gradients as the GEMMs produce them. torch adds to an existing
`grad`, so each gradient shard stays in one buffer. Reductions have a separate communicator, so that no gather waits for
them. The reductions of a micro-batch may overlap the next one (`start_overlap`): the gradients of the first blocks, and
of the embedding, which is the largest, are sent while the next micro-batch computes.

*Replicas* (HFSDP). The data-parallel ranks may form several such groups, each with all shards. Within a group weights
are gathered and gradients reduced for each micro-batch; replicas communicate once per step. They divide the optimizer
state as ZeRO stage 1 does, with the shards as parameters. A unit's gradient shard is reduce-scattered after its last
backward (`ReplicaReduction`), at the same time as the gathers and reductions of the units before it. A rank updates a
slice of the shard in fp32 masters, and the updated shard is all-gathered, in the model's dtype or in FP8, while the
next forward pass runs (`ParamBuffer`). So torch must send the gathered values, not fp32 masters: its fp32 shards are
released, and its hooks (below) wait for the values of a unit and send them. Every weight is still rounded once, from
the master.

*Experts* of expert parallelism are held by different ranks than the rest of their block, so a module of a unit may be
an inner unit with its own groups. torch gathers both at the same time (`_gather_inner_too`), because an inner unit is
called late, after tokens have been exchanged, and in a block's backward it is needed first. Weights with all rows on
one rank are left out (`whole`), because torch would cast and copy them, and their gradients, for each pass.

*Weights gathered in FP8* are in `megafp8.parallel.data.fp8_weight_gather`. torch asks the tensor that it shards what to
send and how to convert the result (`fsdp_pre_all_gather`, `fsdp_post_all_gather`). It looks these hooks up again right
before the first forward, so they may be set later.

In a model with dtype float64, all fp32 tensors described here are float64 (`megafp8.numerics.dtypes.sum_dtype`).

Blocks are built on the meta device, and a rank initializes only its rows: no rank ever holds a whole block's values
except while computing with them.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup, ReduceOp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from megafp8.numerics.dtypes import sum_dtype
from megafp8.parallel import collectives
from megafp8.parallel.data.buckets import ALIGN, BufferLayout, packed
from megafp8.parallel.data.grad_buffer import reduce_bucket
from megafp8.parallel.data.param_buffer import ParamBuffer
from megafp8.parallel.sharding import FlatShard, set_spec, slice_rows, spec_of


class Released(Tensor):
    """Tensor with a shape and dtype but no storage; any computation with it raises an error."""

    @staticmethod
    def __new__(cls, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Released:
        """Make a tensor of this shape, dtype and device without storage."""
        return Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Raise RuntimeError for any operation except the ones that make a parameter."""
        if func in (torch.ops.aten.as_strided.default, torch.ops.aten.detach.default):  # needed to make a parameter
            return cls(args[0].shape, args[0].dtype, args[0].device)
        raise RuntimeError(f"{func} on a weight without values: it exists only in FP8")

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Released({tuple(self.shape)}, {self.dtype})"


class RowShard(NamedTuple):
    """Rows of a weight on this rank.

    Attributes:
        param: Parameter that represents the rows.
        values: Values `[m, *rest]` that are gathered: fp32; or the values of `param`, if it is frozen or has replicas.
        sharded: Tensor `[m, *rest]` that torch shards, which may have hooks. Its values are `values`, or released.
        global_shape: Shape of the whole weight.
        ranks: Number of ranks that share the weight.
        padded_rows: Number of rows that each rank sends; on the last ranks, some of them are padding.
        first: Index of this rank's first row in the whole weight.
    """

    param: nn.Parameter
    values: Tensor
    sharded: Tensor
    global_shape: torch.Size
    ranks: int
    padded_rows: int
    first: int

    @property
    def padded_numel(self) -> int:
        """Number of elements that each rank sends."""
        return self.padded_rows * self.global_shape[1:].numel()


class ShardGroups(NamedTuple):
    """Ranks over which a unit is sharded, with one communicator for its gathers and another for its reductions."""

    gather: ProcessGroup
    reduce: ProcessGroup


class Unit(NamedTuple):
    """Module with weights that are gathered together and freed together.

    Modules of `inner` are parts of it with their own groups; they are gathered at the same time.
    """

    module: nn.Module
    groups: ShardGroups
    inner: Sequence[Unit] = ()

    @property
    def parts(self) -> list[Unit]:
        """Inner units and the unit itself."""
        return [*self.inner, self]


# torch 2.13 warns about modules that return views, because a write into a view would drop its hooks. Blocks with
# experts or hyper-connections return views, but nothing writes into them.
warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")


class ShardedStages:
    """Sharded parameters of `stages` and their gradients, with the methods of a `GradBuffer`.

    A stage is a list of units in the order of their calls. The last unit has the module that is called, which contains
    the other units: its remaining weights stay gathered from the beginning of a forward pass to the end of its
    backward. Parameters on the meta device are allocated on `device`, uninitialized.

    Attributes:
        row_shards: Row shard of each parameter that a module had before.
        units: Parameters that one all-gather gathers, with the ranks that gather them.
        params: `RowShard.param`s in order.
        trained: Parameters that are not frozen.
        layout: Layout of the shards of `trained`. A unit is one bucket, or two if some of its weights are FP8.
        flat: Buffer of all gradients.
        owned: Gradients that this rank updates.
        weights: Values of `trained` that replicas gather from each other; None without replicas.

    Args:
        stages: Units of each stage.
        replicate_group: Ranks that hold the same shards.
        own_bucket: Parameters with their own buckets, because several stages share them.
        fp8: Parameters that are gathered in FP8.
        dtype: Dtype of gathered weights and of computation.
        reduce_dtype: Dtype of gradients sent to other ranks.
        device: Device of the parameters.
        whole: Parameters that are not sharded.
    """

    def __init__(
        self,
        stages: Sequence[Sequence[Unit]],
        *,
        replicate_group: ProcessGroup | None = None,
        own_bucket: Sequence[nn.Parameter] = (),
        fp8: AbstractSet[nn.Parameter] = frozenset(),
        dtype: torch.dtype,
        reduce_dtype: torch.dtype,
        device: torch.device,
        whole: AbstractSet[nn.Parameter] = frozenset(),
    ) -> None:
        replicas = collectives.size(replicate_group)
        self.row_shards: dict[nn.Parameter, RowShard] = {}
        self.units: list[tuple[ProcessGroup, list[nn.Parameter]]] = []
        self._modules: list[FSDPModule] = []
        self._roots: dict[FSDPModule, int] = {}  # number of forward passes still to come before `finish`
        sharded: dict[nn.Parameter, DTensor] = {}
        by_need: list[list[nn.Parameter]] = []  # a forward pass needs the weights of the last unit first
        for stage in stages:
            root, first = stage[-1].module, len(self.units)
            before = [param for param in root.parameters() if param not in whole]
            for param in before:
                param.data = param.data.to(sum_dtype(dtype)) if param.requires_grad else param.data
            for part in (part for unit in stage for part in unit.parts):
                local_params = [param for param in part.module.parameters() if not isinstance(param, DTensor)]
                self.units.append((part.groups.gather, [param for param in local_params if param not in whole]))
                self._modules.append(_shard(part, dtype, reduce_dtype, device, whole))
            by_need += [params for _, params in (self.units[-1], *self.units[first:-1])]
            _gather_inner_too(stage)
            self._roots[self._modules[-1]] = 0
            root.register_forward_pre_hook(self._count)
            now = [cast(DTensor, param) for param in root.parameters() if param not in whole]
            for old, new in zip(before, now, strict=True):
                self.row_shards[old] = _row_shard(old, new, dtype, replicated=new.requires_grad and replicas > 1)
                old.data = old.data.new_empty(0)  # only used as a key from here on: free its values
            sharded |= zip(before, now, strict=True)
        self.params = [rows.param for rows in self.row_shards.values()]
        self.trained = [param for param in self.params if param.requires_grad]
        self.layout, members = self._layout(by_need, replicas, set(own_bucket), fp8)
        self.weights: ParamBuffer | None = None
        if replicas > 1 and self.trained:
            self.weights = ParamBuffer(self.trained, self.layout, replicate_group)
            self._replace_values(self.weights)
        self.flat = torch.zeros(self.layout.numel, dtype=sum_dtype(dtype), device=device)
        rank = collectives.rank(replicate_group)
        slices = [self.flat[slot.start : slot.end] for slot in self.layout.owned(rank)]
        self.owned = slices if replicas > 1 and slices else [self.flat]  # empty: nothing is trained
        self.shards = [FlatShard(self.trained[x.param], x.start, x.end) for x in self.layout.shards(rank)]
        buckets = [self.flat[bucket.start : bucket.end] for bucket in self.layout.buckets]
        counts = [len(params) for params in members]
        self._replicas = ReplicaReduction(buckets, slices, counts, replicate_group, reduce_dtype)
        for bucket, params in enumerate(members):
            for index, param in zip(self.layout.buckets[bucket].params, params, strict=True):
                rows, weight, slot = self.row_shards[param], sharded[param], self.layout.slots[index]
                gradient = self.flat[slot.start : slot.end].view(rows.values.shape)
                rows.param.main_grad = gradient  # type: ignore[attr-defined]
                weight.grad = DTensor.from_local(
                    gradient,
                    weight.device_mesh,
                    weight.placements,
                    run_check=False,
                    shape=weight.shape,
                    stride=weight.stride(),
                )
                # torch calls this hook in the stream of the reduction, once the result has been added to `grad`.
                weight.register_post_accumulate_grad_hook(partial(self._replicas.count, bucket))

    def _layout(
        self,
        units: Sequence[Sequence[nn.Parameter]],
        replicas: int,
        own_bucket: AbstractSet[nn.Parameter],
        fp8: AbstractSet[nn.Parameter],
    ) -> tuple[BufferLayout, list[list[nn.Parameter]]]:
        """Return the layout of the trained shards, and the parameters of each bucket.

        Buckets are in the order of backward: the first of `units` in forward is the last.
        """
        members = []
        for unit in reversed(units):
            trained = [param for param in unit if self.row_shards[param].param.requires_grad]
            kinds = [[param] for param in trained if param in own_bucket]
            others = [param for param in trained if param not in own_bucket]
            kinds += [[param for param in others if (param in fp8) == is_fp8] for is_fp8 in (True, False)]
            members += [params for params in kinds if params]
        shards = [rows for rows in self.row_shards.values() if rows.param.requires_grad]
        multiple = ALIGN * replicas
        rooms = [-(-rows.padded_numel // multiple) * multiple for rows in shards]
        index_of = {rows.param: i for i, rows in enumerate(shards)}
        indices = [[index_of[self.row_shards[param].param] for param in params] for params in members]
        return packed([rows.param.numel() for rows in shards], rooms, indices, multiple, replicas), members

    def _replace_values(self, weights: ParamBuffer) -> None:
        """Let torch send the values in `weights`, and free the fp32 shards that it would send."""
        shards = {rows.param: rows for rows in self.row_shards.values()}
        for index, (bucket, memory) in enumerate(zip(self.layout.buckets, weights.buckets, strict=True)):
            for rows, start in ((shards[self.trained[i]], self.layout.slots[i].start) for i in bucket.params):
                values = memory[start - bucket.start :][: rows.padded_numel].view(-1, *rows.global_shape[1:])
                hooks: Any = rows.sharded
                hooks.fsdp_pre_all_gather = partial(_wait_and_send, weights, index, values)
                hooks.fsdp_post_all_gather = _keep_gathered
        self.make_callable()  # torch looks for hooks, and does not copy shards after that
        for rows in (shards[param] for param in self.trained):
            rows.sharded.untyped_storage().resize_(0)

    @property
    def masters(self) -> dict[nn.Parameter, Tensor]:
        """fp32 values of `trained`, flat and live; empty with replicas, because each has masters of other slices."""
        trained = [rows for rows in self.row_shards.values() if rows.param.requires_grad and self.weights is None]
        return {rows.param: rows.values.view(-1) for rows in trained}

    def clear(self) -> None:
        """Zero all gradients. Call this before the first backward pass of a step."""
        self.flat.zero_()

    def complete(self) -> None:
        """Do nothing: `clear` has zeroed all gradients, because torch's reductions add to them."""

    def start_overlap(self, micro_batches: int = 1) -> None:
        """Wait for reductions only after the last of `micro_batches` forward and backward passes of each stage.

        Without this call, reductions are waited for at the end of each backward pass, and `finish` reduces replicas.
        """
        self._replicas.start_overlap(micro_batches)
        for root in self._roots:
            self._roots[root] = micro_batches
            root.set_is_last_backward(False)

    def _count(self, module: nn.Module, _: Any) -> None:
        """Count a stage's forward pass. Several backward passes may follow the last forward pass; all of them wait."""
        root = cast(FSDPModule, module)
        if torch.is_grad_enabled() and self._roots[root]:
            self._roots[root] -= 1
            root.set_is_last_backward(self._roots[root] == 0)

    def finish(self) -> None:
        """Complete the sums over replicas. The last backward pass has waited for the reductions within a group."""
        self._replicas.finish()

    def reshard(self) -> None:
        """Free weights that are still gathered, as after a forward pass without backward: their values have changed."""
        for module in self._modules:
            module.reshard()

    def make_callable(self) -> None:
        """Allow single modules of a stage to be called, as generation does, even before the first call of the stage."""
        for root in self._roots:
            root._get_fsdp_state()._lazy_init()


class ReplicaReduction:
    """Sum of gradient shards over `group`, the ranks that hold the same shards, once per step.

    Each rank gets the sums of its slice of a bucket, in place. Buckets are sent in the order in which backward
    completes them, which is the model's order and so equal on all ranks.

    Args:
        buckets: fp32 gradients of each bucket, flat.
        owned: Slices of the buckets for this rank.
        params: Number of parameters of each bucket.
        group: Ranks that hold the same shards.
        dtype: Dtype in which gradients are sent; if it is not fp32, the copies live until `finish`.
    """

    def __init__(
        self,
        buckets: Sequence[Tensor],
        owned: Sequence[Tensor],
        params: Sequence[int],
        group: ProcessGroup | None,
        dtype: torch.dtype,
    ) -> None:
        self._buckets, self._owned, self._params, self._group, self._dtype = buckets, owned, params, group, dtype
        self._expected: list[int] = []  # per bucket: number of parameter gradients still to come
        self._works: dict[int, collectives.CollectiveWork] = {}

    def start_overlap(self, passes: int) -> None:
        """Start the sum of a bucket after the last of `passes` backward passes has added all of its gradients.

        Without this call, `finish` starts all sums.
        """
        self._expected = [passes * count for count in self._params]

    def count(self, bucket: int, _: Tensor | None = None) -> None:
        """Record that a gradient of a parameter of `bucket` was added on the current stream."""
        if self._expected:
            self._expected[bucket] -= 1
            assert self._expected[bucket] >= 0, (
                "a gradient came after its bucket was sent: more backward passes than announced"
            )
            if self._expected[bucket] == 0:
                self._start(bucket)

    def finish(self) -> None:
        """Wait for all sums on the current stream."""
        for bucket in range(len(self._buckets)):
            if bucket not in self._works:
                self._start(bucket)
        for work in self._works.values():
            work.wait()
        self._works, self._expected = {}, []

    def _start(self, bucket: int) -> None:
        """Start the sum of a bucket."""
        self._works[bucket] = reduce_bucket(self._buckets[bucket], self._owned[bucket], self._group, self._dtype)


class _ReduceScatter:
    """Reduce-scatter for torch's FSDP over a different group than its all-gathers."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate a buffer for torch's FSDP."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """Sum `input_tensor` over the ranks into `output_tensor`."""
        assert op == ReduceOp.SUM
        assert not async_op
        collectives.reduce_scatter_into(output_tensor, input_tensor, self._group)


def _shard(
    unit: Unit, dtype: torch.dtype, reduce_dtype: torch.dtype, device: torch.device, whole: AbstractSet[nn.Parameter]
) -> FSDPModule:
    """Apply `fully_shard` to the unit's module, and return the module.

    Parameters that are already sharded and parameters in `whole` are left out.
    """
    module, groups = unit.module, unit.groups
    on_meta = any(param.is_meta for param in module.parameters())
    if groups.gather.size() == 1:
        reduce_dtype = sum_dtype(dtype)  # a single rank sends nothing
    policy = MixedPrecisionPolicy(dtype, reduce_dtype, cast_forward_inputs=False)
    mesh = DeviceMesh.from_group(groups.gather, device.type)
    fully_shard(module, mesh=mesh, mp_policy=policy, ignored_params=set(whole))
    assert isinstance(module, FSDPModule)
    if on_meta:
        module.to_empty(device=device)
    if groups.gather.size() > 1:  # sums, not means; on a single rank this would cost a pass over all gradients
        module.set_gradient_divide_factor(1.0)
    module.set_force_sum_reduction_for_comms(True)  # otherwise torch multiplies by 1 in the reduction; gloo cannot
    module.set_custom_reduce_scatter(cast(Any, _ReduceScatter(groups.reduce)))
    _set_grad_dtype_before_forward(module, reduce_dtype, whole)
    return module


def _gather_inner_too(stage: Sequence[Unit]) -> None:
    """Let torch gather inner units together with their outer unit. By default, torch gathers only one unit ahead."""
    for unit, following in pairwise(stage):
        if unit.inner:
            module, *inner = (cast(FSDPModule, part.module) for part in (unit, *unit.inner))
            module.set_modules_to_forward_prefetch(inner)
            cast(FSDPModule, following.module).set_modules_to_backward_prefetch([module, *inner])


def _set_grad_dtype_before_forward(module: nn.Module, dtype: torch.dtype, whole: AbstractSet[nn.Parameter]) -> None:
    """Set `grad_dtype` of the gathered parameters, which first exist right before the first forward."""

    def set_grad_dtype(*_: Any) -> None:
        handle.remove()
        for param in module.parameters():
            # A DTensor belongs to another module and is not gathered.
            if param.requires_grad and not isinstance(param, DTensor) and param not in whole:
                param.grad_dtype = dtype

    handle = module.register_forward_pre_hook(set_grad_dtype)


def _wait_and_send(weights: ParamBuffer, bucket: int, values: Tensor, mesh: Any) -> Any:
    """Wait for the replicas' gather of a bucket, and return the values that torch gathers (`fsdp_pre_all_gather`)."""
    weights.wait([bucket])
    return (values,), None


def _keep_gathered(
    outputs: Sequence[Tensor], metadata: Any, dtype: torch.dtype, *, out: Tensor | None = None
) -> tuple[Tensor, tuple[()]] | None:
    """Return the gathered rows, which torch cuts to the shape of the weight (`fsdp_post_all_gather`)."""
    return (outputs[0], ()) if out is None else None


@torch.no_grad()
def _row_shard(old: nn.Parameter, new: DTensor, dtype: torch.dtype, *, replicated: bool) -> RowShard:
    """Return this rank's row shard of `old`, which torch has replaced by `new`.

    If it is `replicated`, its values are not allocated yet.
    """
    sharded = new._local_tensor  # torch looks for hooks on this object; `to_local` may wrap it
    rank, ranks = new.device_mesh.get_local_rank(), new.device_mesh.size()
    padded_rows = -(-old.shape[0] // ranks)
    first = min(rank * padded_rows, old.shape[0])
    assert first + len(sharded) == min(first + padded_rows, old.shape[0]), "torch shards rows in an unexpected way"
    param = nn.Parameter(sharded, requires_grad=False)
    if new.requires_grad:
        param = nn.Parameter(torch.full((), torch.nan, dtype=dtype, device=sharded.device).expand(sharded.shape))
    set_spec(param, slice_rows(spec_of(old), first, first + len(sharded)))
    return RowShard(param, param if replicated else sharded, sharded, old.shape, ranks, padded_rows, first)
