"""ZeRO stage 3: parameters, gradients and optimizer state in shares, through torch's `fully_shard`.

Each data-parallel rank has some rows of every weight, in fp32, and nothing else from step to step. Torch gathers the
weights of a block, in the model's dtype, before its forward and again before its backward, the next block's while this
one computes; frees them after; and reduce-scatters the block's gradients as soon as they are there (FSDP2; Rajbhandari
et al. 2020, arXiv:1910.02054).

*Rows are parameters.* What torch keeps is a slice of dim 0, so to the optimizer, the norm and checkpoints a share is a
parameter like any other, whose spec says which rows of what it is (`sharding.rows_of`). It is hollow: it has a dtype,
the model's, and its values are in the fp32 tensor that torch gathers from, which Adam updates in place. So nothing is
rounded on the way, and the masters are the only copy.

*Gradients* are reduced after every micro-batch and summed in shares: memory over traffic, which is what one comes to
this for. They are summed in fp32 like anywhere else here: `grad_dtype` lets autograd have weight gradients as the GEMMs
sum them. Torch adds to a `grad` that is there already, so each share of a gradient lies in one buffer for good.
Reductions have a communicator of their own, so that no gather stands behind them, and nobody waits for those of a
micro-batch before the next one begins (`start_overlap`): the first blocks' gradients, and the embedding's, which is
larger than any, travel while it computes.

*Weights as codes* are in `megafp8.data_parallel.fp8_weight_gather`. Torch asks the tensor that it shards what to
send, and
what becomes of what came (`fsdp_pre_all_gather`, `fsdp_post_all_gather`; it looks for them once more right before the
first forward, so that they may be set later).

Blocks come on the meta device (`BuildContext.blocks_on_meta`), and a rank makes the initial values of its rows alone:
no rank ever has a whole block's values but while it computes with them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup, ReduceOp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from megafp8.distributed.collectives import reduce_scatter_into
from megafp8.distributed.sharding import FlatShard, set_spec, slice_rows, spec_of

_ALIGN = 64  # fp32 elements: 256 bytes


class Released(Tensor):
    """A tensor of some shape and dtype without values; whoever computes with it gets an error."""

    @staticmethod
    def __new__(cls, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Released:
        return Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func in (torch.ops.aten.as_strided.default, torch.ops.aten.detach.default):  # what a parameter is made by
            return cls(args[0].shape, args[0].dtype, args[0].device)
        raise RuntimeError(f"{func} on a weight that is FP8 codes alone")

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Hollow({tuple(self.shape)}, {self.dtype})"


class Rows(NamedTuple):
    """This rank's rows of a weight. `param` stands for them; `values` `[m, *rest]`, fp32, is what torch gathers from;
    `of`: the shape of the whole. Each rank sends `sent` rows; some of the last ranks' mean nothing."""

    param: nn.Parameter
    values: Tensor
    of: torch.Size
    sent: int


class FullySharded:
    """The parameters of `stages` over the ranks of `group`, and their gradients, as `OptimizerStep` wants these.

    A stage is the module that is called, and those of its modules, called one after the other, whose weights come and
    go; the weights of no such module are there from the beginning of a forward pass to the end of its backward. All are
    given memory on `device`, where they are on the meta device, and no values. `dtype`: of what is gathered and
    computed with; `reduce_dtype`: gradients are sent, and summed over ranks, in this, by `reduce_group`, the same ranks
    through another communicator.

    `rows`: by the parameter that the module had; `units`: these by what is gathered at once; `params`: what stands for
    them, in order; `flat`: all gradients.
    """

    def __init__(
        self,
        stages: Sequence[tuple[nn.Module, Iterable[nn.Module]]],
        *,
        group: ProcessGroup,
        reduce_group: ProcessGroup,
        dtype: torch.dtype,
        reduce_dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.rows: dict[nn.Parameter, Rows] = {}
        self.units: list[list[nn.Parameter]] = []
        self._modules: list[FSDPModule] = []
        self._roots: dict[FSDPModule, int] = {}  # with the forward passes that are still to come before `finish`
        mesh = DeviceMesh.from_group(group, device.type)
        policy = MixedPrecisionPolicy(dtype, reduce_dtype, cast_forward_inputs=False)
        sharded: list[DTensor] = []
        for root, units in stages:
            whole = list(root.parameters())
            for param in whole:
                param.data = param.data.float()
            for module in (*units, root):
                self.units.append([param for param in module.parameters() if not isinstance(param, DTensor)])
                self._modules.append(_shard(module, mesh, policy, device, reduce_group))
            self._roots[self._modules[-1]] = 0
            root.register_forward_pre_hook(self._count)
            now = [cast(DTensor, param) for param in root.parameters()]
            for old, new in zip(whole, now, strict=True):
                self.rows[old] = _rows(old, new, group, dtype)
                old.data = old.data.new_empty(0)  # from here on a name for them: its values would stay as long as it
            sharded += now
        self.params = [rows.param for rows in self.rows.values()]
        sizes = [-(-rows.values.numel() // _ALIGN) * _ALIGN for rows in self.rows.values()]
        self.flat = torch.zeros(sum(sizes), dtype=torch.float32, device=device)
        self.owned = [self.flat]
        for place, rows, weight in zip(self.flat.split(sizes), self.rows.values(), sharded, strict=True):
            gradient = place[: rows.values.numel()].view(rows.values.shape)
            rows.param.main_grad = gradient  # type: ignore[attr-defined]
            weight.grad = DTensor.from_local(
                gradient, mesh, (Shard(0),), run_check=False, shape=weight.shape, stride=weight.stride()
            )
        self.shards = [FlatShard(param, 0, param.numel()) for param in self.params if param.numel()]

    @property
    def masters(self) -> dict[nn.Parameter, Tensor]:
        """The fp32 values of `params`, flat, live."""
        return {rows.param: rows.values.view(-1) for rows in self.rows.values()}

    def zero(self) -> None:
        """Forget all gradients; call before the first backward pass of a step."""
        self.flat.zero_()

    def start_overlap(self, passes: int) -> None:
        """Each stage is about to be run forward and backward so many times, and reductions be waited for at the end;
        without this call, at the end of each backward pass."""
        for root in self._roots:
            self._roots[root] = passes
            root.set_is_last_backward(False)

    def _count(self, module: nn.Module, _: Any) -> None:
        """Before a stage's forward pass. Behind the last one there may be several backward passes, which all wait."""
        root = cast(FSDPModule, module)
        if torch.is_grad_enabled() and self._roots[root]:
            self._roots[root] -= 1
            root.set_is_last_backward(self._roots[root] == 0)

    def finish(self) -> None:
        """Nothing is under way: the last backward pass ends with all reductions waited for."""

    def reshard(self) -> None:
        """Free what is still gathered, as after a forward pass without backward: the values have changed."""
        for module in self._modules:
            module.reshard()


class _ReduceScatter:
    """Torch's reduce-scatter, over a group of our own instead of that which it gathers over."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        assert op == ReduceOp.SUM
        assert not async_op
        reduce_scatter_into(output_tensor, input_tensor, self._group)


def _shard(
    module: nn.Module,
    mesh: DeviceMesh,
    policy: MixedPrecisionPolicy,
    device: torch.device,
    reduce_group: ProcessGroup,
) -> FSDPModule:
    """Let torch shard those parameters of `module` that it does not shard yet; the module."""
    on_meta = any(param.is_meta for param in module.parameters())
    fully_shard(module, mesh=mesh, mp_policy=policy)
    assert isinstance(module, FSDPModule)
    if on_meta:
        module.to_empty(device=device)
    module.set_gradient_divide_factor(1.0)
    module.set_force_sum_reduction_for_comms(True)  # else a factor of 1 is multiplied by, which gloo cannot
    module.set_custom_reduce_scatter(cast(Any, _ReduceScatter(reduce_group)))
    assert policy.reduce_dtype is not None
    _want_gradients_in(module, policy.reduce_dtype)
    return module


def _want_gradients_in(module: nn.Module, dtype: torch.dtype) -> None:
    """Tell autograd the dtype of gradients, once the parameters are there that it sees: before the first forward."""

    def tell(*_: Any) -> None:
        handle.remove()
        for param in module.parameters():
            if not isinstance(param, DTensor):  # else another module's, not gathered now
                param.grad_dtype = dtype

    handle = module.register_forward_pre_hook(tell)


@torch.no_grad()
def _rows(old: nn.Parameter, new: DTensor, group: ProcessGroup, dtype: torch.dtype) -> Rows:
    values = new._local_tensor  # the object that torch asks for hooks, which `to_local` may wrap
    sent = -(-old.shape[0] // group.size())
    first = min(group.rank() * sent, old.shape[0])
    assert first + len(values) == min(first + sent, old.shape[0]), "torch cuts in another way than it did"
    param = nn.Parameter(torch.full((), torch.nan, dtype=dtype, device=values.device).expand(values.shape))
    set_spec(param, slice_rows(spec_of(old), first, first + len(values)))
    return Rows(param, values, old.shape, sent)
