"""Tensor parallelism for any model's FP8 layers: styles for `torch.distributed.tensor.parallel.parallelize_module`.

    tp = init_device_mesh("cuda", (8,))
    fp8.convert(model, fp8.CurrentScaling())
    parallelize_module(block, tp, {
        "attention": PrepareFp8ModuleInput(),          # tokens sharded along s, gathered in FP8
        "attention.q_proj": Fp8ColwiseParallel(),
        "attention.o_proj": Fp8RowwiseParallel(output_layouts=Shard(1)),
    })

Parameters become DTensors, as with torch's styles, so optimizers and checkpoints work as usual. Activations are local
tensors. A layer computes like a layer of `megafp8.parallel.tensor.layers`: the scale of a whole tensor is computed from
the amax over the ranks that hold its shards, so every number equals the result of a single rank, up to the order of
sums. A row-parallel layer gathers its output gradient in FP8.

Shapes: b sequences, s positions, k inputs, n outputs; t ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle
from torch.distributed.tensor.placement_types import Placement
from torch.nn import functional as F

from megafp8.fp8.autocast import in_torch_autocast_dtype
from megafp8.fp8.convert import Fp8LinearModule
from megafp8.fp8.standalone import StandaloneLinear
from megafp8.linear.autograd import once_differentiable
from megafp8.linear.fusion import LinearInput
from megafp8.linear.linear import linear, with_bias
from megafp8.linear.quantized_gather import TPComm
from megafp8.linear.state import LinearState
from megafp8.numerics.quantizers import AmaxRecording
from megafp8.numerics.recipes.base import RecipeQuantizer
from megafp8.numerics.sources import Plain
from megafp8.numerics.tensor import QuantizedTensor
from megafp8.parallel import collectives
from megafp8.parallel.tensor import mappings
from megafp8.parallel.tp_overlap import default_overlap


class Fp8ColwiseParallel(ParallelStyle):
    """Style that shards an FP8 layer's outputs.

    x is whole on each rank, or comes from `PrepareFp8ModuleInput`; y is `[..., n/t]`.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _shard(module, device_mesh, {"weight": Shard(0), "bias": Shard(0)}, "column", sequence_parallel=False)
        module.__class__ = _Colwise
        return module


class Fp8RowwiseParallel(ParallelStyle):
    """Style that shards an FP8 layer's inputs.

    x is `[..., k/t]`; y is whole on each rank, or `[b, s/t, n]` with `output_layouts=Shard(1)`.
    """

    def __init__(self, *, output_layouts: Placement | None = None) -> None:
        if output_layouts not in (None, Replicate(), Shard(1)):
            raise ValueError(f"output_layouts is {output_layouts}; it must be Replicate() or Shard(1), the sequence")
        self.sequence_parallel = output_layouts == Shard(1)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        layouts: dict[str, Placement] = {"weight": Shard(1), "bias": Replicate()}
        _shard(module, device_mesh, layouts, "row", sequence_parallel=self.sequence_parallel)
        module.__class__ = _Rowwise
        module.sequence_parallel = self.sequence_parallel  # type: ignore[assignment]
        return module


class PrepareFp8ModuleInput(ParallelStyle):
    """Style that gathers a module's first argument along the sequence, in FP8 for column-parallel layers.

    The argument is `[b, s/t, k]` on each rank. Only column-parallel layers may read it: other readers see NaNs. It is
    gathered in high precision if one of the layers has a finer scale than one per tensor, or runs in high precision.
    `argument` is the name of the argument if it is passed by name.
    """

    def __init__(self, argument: str = "hidden_states") -> None:
        self.argument = argument

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        hook = partial(_prepare, group=device_mesh.get_group(), argument=self.argument)
        module.register_forward_pre_hook(hook, with_kwargs=True)
        return module


def _shard(
    module: nn.Module,
    mesh: DeviceMesh,
    layouts: dict[str, Placement],
    parallel: Literal["column", "row"],
    *,
    sequence_parallel: bool,
) -> None:
    """Convert the parameters of an FP8 layer to DTensors, and tell the layer and its state how ranks communicate."""
    if type(module) is not Fp8LinearModule:
        raise ValueError(
            f"{type(module).__name__} is not a converted nn.Linear; call megafp8.fp8.convert before "
            "parallelize_module, and use torch's own styles for layers that stay in high precision"
        )
    group, fp8 = mesh.get_group(), module.fp8
    for name, param in list(module.named_parameters()):
        sharded = distribute_tensor(param.detach(), mesh, [layouts[name]])
        module.register_parameter(name, nn.Parameter(sharded, requires_grad=param.requires_grad))
    site = replace(fp8.site, parallel=parallel, tensor_parallel=group.size(), sequence_parallel=sequence_parallel)
    fp8.shard(site, group)
    module.comm = TPComm.from_overlap(parallel, default_overlap(group, sequence_parallel=sequence_parallel))


def _local(param: nn.Parameter | Tensor | None, *, partial_grad: bool = False) -> Any:
    """Return the local shard of a DTensor. `partial_grad` declares its gradient as a partial sum."""
    if not isinstance(param, DTensor):
        return param
    return param.to_local(grad_placements=[Partial()] if partial_grad else None)


class _Parallel(Fp8LinearModule):
    """FP8 layer that is sharded over the ranks."""

    comm: TPComm

    def _run(self, x: Tensor, bias: Tensor | None, fallback: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """Run the layer in FP8, or as `fallback(x, weight)`, and add the bias."""
        device, weight = x.device, _local(self.weight)
        if getattr(x, "gathered", None) is None:
            x = in_torch_autocast_dtype(x)
        with torch.autocast(device.type, enabled=False), self.fp8.running(device, training=self.training) as state:
            if state is None:
                y = fallback(x, weight.to(x.dtype))
            else:
                y = self._linear(x, weight, state)
        return with_bias(y, bias)

    def _linear(self, x: Tensor, weight: Any, state: LinearState) -> Tensor:
        """Run the layer in FP8."""
        return linear(x, weight, state, comm=self.comm)


class _Colwise(_Parallel):
    """FP8 layer with sharded outputs."""

    def forward(self, input: Tensor) -> Tensor:
        """Map `[b, s, k]` to `[b, s, n/t]`."""

        def fallback(x: Tensor, weight: Tensor) -> Tensor:
            return F.linear(mappings.copy_to_tensor_parallel(x, _group(self.fp8)), weight)

        return self._run(input, _local(self.bias), fallback)

    def _linear(self, x: Tensor, weight: Any, state: LinearState) -> Tensor:
        gathered = getattr(x, "gathered", None)
        if gathered is None:
            return super()._linear(x, weight, state)
        _share_amax(gathered.state, state)
        return linear(LinearInput(x, gathered.quantized, None), weight, state)


class _Rowwise(_Parallel):
    """FP8 layer with sharded inputs."""

    sequence_parallel: bool

    def forward(self, input: Tensor) -> Tensor:
        """Map `[b, s, k/t]` to `[b, s, n]`, or to `[b, s/t, n]`."""
        group = _group(self.fp8)
        bias = _local(self.bias, partial_grad=self.sequence_parallel)
        if not self.sequence_parallel:
            return self._run(input, bias, lambda x, w: mappings.reduce_from_tensor_parallel(F.linear(x, w), group))
        to = mappings.reduce_scatter_to_sequence_parallel
        return self._run(input.transpose(0, 1), bias, lambda x, w: to(F.linear(x, w), group)).transpose(0, 1)


def _group(fp8: StandaloneLinear) -> ProcessGroup:
    """Return the tensor-parallel group of a layer."""
    assert fp8.tp_group is not None
    return fp8.tp_group


class _Gathered:
    """Input that `PrepareFp8ModuleInput` has gathered, quantized for `state`."""

    def __init__(self, quantized: QuantizedTensor, state: LinearState) -> None:
        self.quantized, self.state = quantized, state


def _prepare(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, group: ProcessGroup, argument: str
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Replace the first argument of a module, or the argument named `argument`, by the gathered one."""
    x: Tensor = args[0] if args else kwargs[argument]
    whole = _gather(module, x, group)
    return ((whole, *args[1:]), kwargs) if args else (args, {**kwargs, argument: whole})


def _gather(module: nn.Module, x: Tensor, group: ProcessGroup) -> Tensor:
    """Gather `[b, s/t, k]` to `[b, s, k]`, in FP8 if all column-parallel layers of `module` support it."""
    layers = [m.fp8 for m in module.modules() if isinstance(m, _Colwise)]
    x = in_torch_autocast_dtype(x)
    if layers:
        with layers[0].running(x.device, training=module.training) as state:
            context, pool = layers[0].last, layers[0].layers
            if state is not None and context.enabled:
                states = [pool.state_of(layer.site.name, context, x.device) for layer in layers if layer.layers is pool]
                if len(states) == len(layers) and all(_takes_gathered(linear_layer, state) for linear_layer in states):
                    whole, quantized = _GatherQuantized.apply(x, state, group, torch.is_grad_enabled())
                    whole.gathered = _Gathered(quantized.tensor, state)
                    return cast(Tensor, whole)
    return _GatherValues.apply(x, group)


def _takes_gathered(state: LinearState, first: LinearState) -> bool:
    """Return whether the layer can read the input that `first` quantizes.

    This needs the same recipe, one scale per tensor, and all GEMMs in FP8.
    """
    if (
        state.precision is None
        or state.plan.calibrating
        or any(state.high_precision)
        or not state.quantizers.input.per_tensor
    ):
        return False
    quantizer, other = state.own_quantizers.input, first.own_quantizers.input
    return (
        isinstance(quantizer, RecipeQuantizer)
        and isinstance(other, RecipeQuantizer)
        and quantizer.recipe == other.recipe
    )


def _share_amax(first: LinearState, state: LinearState) -> None:
    """Copy the amax that the quantizer of `first` has recorded, because the input is the same."""
    quantizer, other = state.own_quantizers.input, first.own_quantizers.input
    assert isinstance(quantizer, RecipeQuantizer)
    assert isinstance(other, RecipeQuantizer)
    recording = isinstance(quantizer, AmaxRecording) and quantizer.recording
    if recording and quantizer.recorded_amax is not None and other.recorded_amax is not None:
        quantizer.recorded_amax.copy_(torch.maximum(quantizer.recorded_amax, other.recorded_amax))


class _Box:
    """Wrapper around a result of an autograd Function that is not a tensor."""

    def __init__(self, tensor: QuantizedTensor) -> None:
        self.tensor = tensor


class _GatherQuantized(Function):
    """Autograd Function that quantizes this rank's tokens and gathers them; backward reduce-scatters.

    It returns NaNs without memory in place of the values.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, state: LinearState, group: ProcessGroup, grad_enabled: bool
    ) -> tuple[Tensor, _Box]:
        b, s, k = x.shape
        t = group.size()
        quantizer = state.quantizers.input.for_sharded_input(group)
        assert quantizer is not None
        shard = quantizer(Plain(x.reshape(-1, k).contiguous()), rowwise=True, columnwise=False).required_rowwise
        data = collectives.all_gather(shard.data, group).view(torch.uint8)
        data = data.view(t, b, s, k).transpose(0, 1).reshape(-1, k).view(shard.data.dtype)
        rowwise = shard._replace(data=data)
        ctx.group = group
        quantized = QuantizedTensor(rowwise, rowwise.t() if grad_enabled else None)
        return x.new_full((1,), torch.nan).expand(b, t * s, k), _Box(quantized)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx: Tensor, _: Any) -> tuple[Tensor, None, None, None]:
        return _reduce_scatter(dx, ctx.group), None, None, None


def _reduce_scatter(dx: Tensor, group: ProcessGroup) -> Tensor:
    """Sum `[b, s, k]` over the ranks, and return this rank's `[b, s/t, k]`."""
    return collectives.reduce_scatter(dx.transpose(0, 1).contiguous(), group).transpose(0, 1)


class _GatherValues(Function):
    """Autograd Function that gathers tokens in high precision.

    Each reader's gradient is whole on every rank, so backward takes a slice.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return collectives.all_gather(x.transpose(0, 1).contiguous(), group).transpose(0, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None]:
        return dx.chunk(ctx.group.size(), dim=1)[ctx.group.rank()], None
