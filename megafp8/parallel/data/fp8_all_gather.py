"""FSDP2 for any model, with the weights of its FP8 layers gathered in FP8: half the bytes of a gather in bf16.

Each rank quantizes its rows once after every optimizer step, and torch's own all-gather carries the FP8 data
(`fsdp_pre_all_gather`, `fsdp_post_all_gather`). The layer computes with the gathered data. No rank ever holds a whole
weight in high precision: the parameter that the module sees is `Released`. Columnwise data, for dgrad, is a transposed
copy of the data that backward's gather brings, and lives while that GEMM runs.

The recipe's cast of the transposed weight must therefore be the transpose of the cast:

- With one scale per tensor, the shards need the scale of the whole weight. Delayed scaling knows it; for other recipes,
  one all-reduce computes the amaxes of all weights (`WeightShards`).
- With blocks of 128×128, a shard is quantized separately if it ends with a block, and its scales are gathered with its
  data.
- With a scale per row, or per one-dimensional block, columnwise data is a different quantization of the values. Both
  together would take as many bytes as bf16, so the values are gathered. The values are also gathered for NVFP4, with
  block scales relative to a scale of the whole tensor, and for static scales that have yet to be calibrated in high
  precision.

`megafp8.parallel.data.fsdp` shards megafp8's own models.

Shapes: n outputs, k inputs of a weight, p rows of it on a rank, with padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule

from megafp8.fp8.autocast import Autocast, current
from megafp8.fp8.standalone import StandaloneLinear, begin_step_if_over
from megafp8.linear.state import LinearState
from megafp8.numerics.recipes.base import RecipeQuantizer
from megafp8.numerics.sources import Plain
from megafp8.numerics.tensor import BLOCK_128X128, TENSOR, ScaledTensor
from megafp8.parallel.collectives import as_bytes
from megafp8.parallel.data.fp8_weight_shards import WeightShard, WeightShards
from megafp8.parallel.data.fsdp import Released


def gather_in_fp8(model: nn.Module, group: ProcessGroup | None = None) -> dict[str, str]:
    """Let FSDP2 gather the weights of `model`'s FP8 layers in FP8 from now on.

    Call it once on each rank, after `fully_shard(model)`, which comes after `megafp8.fp8.convert`, and before the first
    forward. The layers can then run only in FP8, with the recipe they were converted with.

    Args:
        model: Model that `fully_shard` has sharded.
        group: The group passed to `megafp8.fp8.autocast`.

    Returns:
        Why other FP8 layers are not gathered in FP8, by name.

    Raises:
        ValueError: If `model` itself is not sharded, or no weight can be gathered in FP8.
    """
    if not isinstance(model, FSDPModule):
        raise ValueError(f"{type(model).__name__} is not sharded; call fully_shard(model) before gather_in_fp8(model)")
    linears = {(id(m), "weight"): (name, m.fp8) for name, m in model.named_modules() if _is_fp8(m)}
    weights, reasons = [], {}
    for param in _fsdp_params(model):
        name, layer = linears.get((id(param._module_info.module), param._module_info.param_name), ("", None))
        if layer is None:
            continue
        context = Autocast(True, None, group)
        state = layer.layers.state_of(layer.site.name, context, param._sharded_local_tensor.device)
        rows = param.padded_sharded_param_size[0]
        reason = _why_not(state, rows, layer)
        if reason:
            reasons[name] = reason
        else:
            weights.append(_Weight(layer, state, param))
    if not weights:
        raise ValueError(
            f"no weight of {type(model).__name__} can be gathered in FP8: "
            + ("; ".join(dict.fromkeys(reasons.values())) or "it has no FP8 layers that fully_shard has sharded")
        )
    gather = _Gather(model, weights)
    model.register_forward_pre_hook(gather.before_forward, prepend=True)
    return reasons


def _is_fp8(module: nn.Module) -> bool:
    """Return whether `module` is a converted FP8 layer."""
    return isinstance(vars(module).get("fp8"), StandaloneLinear)


def _fsdp_params(model: nn.Module) -> list[Any]:
    """Return torch's records of the parameters that it has sharded in `model`."""
    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    return [param for module in modules for group in _param_groups(module) for param in group.fsdp_params]


def _param_groups(module: FSDPModule) -> list[Any]:
    """Return torch's groups of parameters that are gathered together.

    There is at most one group in torch 2.11; later releases have a list.
    """
    state: Any = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def _why_not(state: LinearState, rows: int, layer: StandaloneLinear) -> str:
    """Return why a weight with `rows` on each rank is not gathered in FP8, or an empty string if it is."""
    operands = layer.layers.own_recipe.operands(layer.site.name)
    if operands is not None and any(recipe.calibrates for recipe in operands):
        return "scales are calibrated in high precision"
    if state.precision is None or not state.plan.fp8 or any(state.high_precision[:2]):
        return "fprop or dgrad in high precision needs the high-precision values"
    granularity = _quantizer(state).recipe.granularity("weight")
    if granularity is BLOCK_128X128:
        return f"{rows} rows per rank are not a multiple of 128, the block size" if rows % 128 else ""
    if granularity is not TENSOR:
        return f"columnwise data has separate scales ({granularity.name}), so both are as many bytes as bf16"
    return ""


def _quantizer(state: LinearState) -> RecipeQuantizer:
    """Return the recipe's quantizer of the weight."""
    quantizer = state.own_quantizers.weight
    assert isinstance(quantizer, RecipeQuantizer)
    return quantizer


class _Weight:
    """Weight that is gathered in FP8.

    Attributes:
        data_pk: This rank's rows, quantized.
        scale_inv: Scales of their blocks; None with one scale per tensor.
    """

    def __init__(self, layer: StandaloneLinear, state: LinearState, param: Any) -> None:
        self.layer, self.state, self._param = layer, state, param
        layer.gathered_in_fp8 = True
        self.shape = torch.Size(param._orig_size)
        self.dtype: torch.dtype = param.mp_policy.param_dtype or param.sharded_param.dtype
        (p, k), device = param.padded_sharded_param_size, self.values.device
        self.data_pk = torch.zeros(p, k, dtype=_quantizer(state).fmt.dtype, device=device)
        self.granularity = _quantizer(state).granularity
        self.scale_inv: Tensor | None = None
        if self.granularity is not TENSOR:
            self.scale_inv = torch.ones(self.granularity.grid(p, k), device=device)

    @property
    def values(self) -> Tensor:
        """Rows of this rank, live. torch looks for hooks on this object."""
        values: Tensor = self._param._sharded_local_tensor
        return values

    def set_hooks(self) -> None:
        """Set the hooks that send and receive FP8 data instead of values."""
        values: Any = self.values
        if not hasattr(values, "fsdp_pre_all_gather"):
            values.fsdp_pre_all_gather = self._send
            values.fsdp_post_all_gather = partial(self._receive)

    def quantize_blocks(self) -> None:
        """Quantize this rank's rows by blocks. No block spans two ranks."""
        assert self.scale_inv is not None
        values = self.values.to(self.dtype)
        if len(values):
            quantize = self.state.own_quantizers.weight
            made = quantize(Plain(values), rowwise=True, columnwise=False).required_rowwise
            as_bytes(self.data_pk)[: len(values)].copy_(as_bytes(made.data))
            self.scale_inv[: len(made.scale_inv)].copy_(made.scale_inv)

    # `mesh` is the only parameter: with more parameters, torch expects the byte count of an unevenly sharded weight.

    def _send(self, mesh: Any) -> Any:
        """Return the tensors that torch gathers."""
        data = as_bytes(self.data_pk)
        return ((data,) if self.scale_inv is None else (data, self.scale_inv.view(torch.uint8))), None

    def _receive(
        self, outputs: Sequence[Tensor], metadata: Any, dtype: torch.dtype, *, out: Tensor | None = None
    ) -> Any:
        """Give the layer the gathered FP8 data, and torch a released tensor."""
        n, k = self.shape
        data_nk = outputs[0].view(self.data_pk.dtype).view(-1, k)[:n]
        if self.scale_inv is None:
            self.state.set_gathered_data(data_nk)
        else:
            down, across = self.granularity.grid(n, k)
            scale_inv = outputs[1].view(torch.float32).view(-1, across)[:down]
            self.state.set_gathered_weight(ScaledTensor(data_nk, scale_inv, self.granularity))
        return None if out is not None else (Released(self.shape, dtype, data_nk.device), ())


class _Version(NamedTuple):
    """Value that changes when weights or scales change."""

    layers: tuple[int, ...]
    weights: tuple[int, ...]


class _Gather:
    """Hook that quantizes this rank's rows of `weights` before the first forward after a change."""

    def __init__(self, model: nn.Module, weights: Sequence[_Weight]) -> None:
        self._weights = weights
        self._modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
        self._layers = list(dict.fromkeys(weight.layer.layers for weight in weights))
        self._quantized: _Version | None = None
        whole = [weight for weight in weights if weight.scale_inv is None]
        shards = [WeightShard(w.state, w.data_pk, 0, w.values.reshape(-1), w.dtype) for w in whole]
        group = weights[0]._param.mesh_info.shard_process_group
        self._shards = WeightShards(shards, group, weights[0].values.device) if shards else None
        for weight in weights:
            weight.set_hooks()

    def _version(self) -> _Version:
        """Return the current version of weights and scales."""
        return _Version(
            tuple(layers.changes for layers in self._layers), tuple(weight.values._version for weight in self._weights)
        )

    @torch.no_grad()
    def before_forward(self, module: nn.Module, _: Any) -> None:
        """End the step if it is over, then quantize changed weights with the scales of the next step."""
        context = current()
        if not context.enabled or torch._C._current_graph_task_id() != -1:
            return
        if module.training:
            begin_step_if_over(self._layers)
        if self._version() == self._quantized:
            return
        for sharded in self._modules:  # torch keeps weights gathered by a forward without backward
            sharded.reshard()
        for weight in self._weights:
            weight.set_hooks()
            if weight.scale_inv is not None:
                weight.quantize_blocks()
        if self._shards is not None:
            self._shards.quantize()
            if not any(layers.step_is_over for layers in self._layers):
                self._shards.record_amaxes()
        self._quantized = self._version()
