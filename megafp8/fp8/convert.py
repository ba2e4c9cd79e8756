"""FP8 for any PyTorch model: `convert` turns every `nn.Linear` into a layer that runs in FP8 within `autocast`.

A converted layer is the same module with another class. Its parameters, hooks and names stay, so `state_dict` is
unchanged, and a later wrapper (DDP, FSDP2, torch.compile) sees an `nn.Linear`. Its FP8 state is a `StandaloneLinear`.
The states of all layers of one `convert` call are allocated together (`megafp8.fp8.standalone`).

Limits: casts are not fused with the norms and activations around the layers, and weight gradients return through
autograd in the weight's dtype instead of being accumulated by the GEMM. Models built from megafp8's layers have neither
limit.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any, cast, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megafp8.fp8.autocast import in_torch_autocast_dtype
from megafp8.fp8.compiled_linear import compiled_linear
from megafp8.fp8.converted_experts import are_experts, convert_experts
from megafp8.fp8.manager import Fp8Manager
from megafp8.fp8.onnx import exported
from megafp8.fp8.speed_model import LinearSize, predict
from megafp8.fp8.standalone import StandaloneExperts, StandaloneLayers, StandaloneLinear, end_steps, layers_of
from megafp8.gemm.dispatch import GemmBackend
from megafp8.host.gpus import ceilings_of, device_name
from megafp8.linear.fusion import LinearInput
from megafp8.linear.linear import linear
from megafp8.numerics.onnx_export import in_onnx_export
from megafp8.numerics.recipes import RECIPES, CurrentScaling, Fp8Recipe
from megafp8.numerics.recipes.base import no_match
from megafp8.plan import LinearSite

logger = logging.getLogger(__name__)

_ALIGNMENT = 16


def convert(
    model: nn.Module,
    recipe: Fp8Recipe,
    *,
    skip: tuple[str, ...] = ("lm_head",),
    module_filter_fn: Callable[[nn.Module, str], bool] | None = None,
    speed_filter: int | None = None,
    gemm_backend: GemmBackend = "auto",
) -> nn.Module:
    """Convert every `nn.Linear` of `model` that matches no pattern in `skip` to an FP8 layer.

    Converted layers run in FP8 within `autocast`. Experts of transformers' mixture-of-experts models are converted too
    (`megafp8.fp8.converted_experts`). Layers with dims that are not multiples of 16 are left out with a warning;
    subclasses of `nn.Linear` are left out without a warning. Convert the model before DDP, `fully_shard` or
    `torch.compile`. The model may be on any device, including "meta".

    Args:
        model: Model to convert in place.
        recipe: Default recipe of the converted layers, for example `DelayedScaling()`.
        skip: Shell-style patterns of layer names (`model.named_modules()`) to leave out. `*` also matches dots.
        module_filter_fn: Function of a layer and its name; layers for which it returns False are left out.
        speed_filter: Number of tokens that one rank runs through a layer at once. Layers that FP8 is predicted to slow
            down on this GPU are left out, and named in the log. None converts them too.
        gemm_backend: Backend of FP8 GEMMs, as `fp8.gemm_backend` in configs.

    Returns:
        `model`.

    Raises:
        ValueError: `recipe` is not an `Fp8Recipe`, a pattern of `skip` or of the recipe matches no layer, there is
            nothing to convert, or a layer is sharded already. With `speed_filter`, also if the speeds of this device or
            recipe are not known. The model is unchanged then.
    """
    if not isinstance(recipe, Fp8Recipe):
        meant = recipe if isinstance(recipe, type) else RECIPES.get(str(recipe), CurrentScaling)
        raise ValueError(f"recipe is {recipe!r}; it must be an Fp8Recipe; try megafp8.fp8.{meant.__name__}()")
    if isinstance(skip, str):
        raise ValueError(f"skip is the string {skip!r}; it must be a tuple of patterns, for example ({skip!r},)")
    if gemm_backend not in get_args(GemmBackend):
        raise ValueError(f"gemm_backend is {gemm_backend!r}; it must be one of {', '.join(get_args(GemmBackend))}")
    modules: dict[str, nn.Module] = {
        name: module
        for name, module in model.named_modules()
        if type(module) is nn.Linear or ("fp8_up" not in vars(module) and are_experts(module))
    }
    for pattern in skip:
        if not any(fnmatchcase(name, pattern) for name in modules):
            raise ValueError(f"{no_match('skip', pattern, list(modules))}; skip=() skips none")
    chosen = {name: m for name, m in modules.items() if not any(fnmatchcase(name, pattern) for pattern in skip)}
    if module_filter_fn is not None:
        chosen = {name: module for name, module in chosen.items() if module_filter_fn(module, name)}
    unfit = {name: _dims(m) for name, m in chosen.items() if any(dim % _ALIGNMENT for dim in _dims(m))}
    fitting = {name: m for name, m in chosen.items() if name not in unfit}
    if not fitting:
        raise ValueError(
            f"{type(model).__name__} has no nn.Linear to convert: {len(modules)} in all, {len(chosen)} not skipped, "
            f"and none of these with dims that are multiples of {_ALIGNMENT}; has it been converted before?"
        )
    for name, module in fitting.items():
        for weight_name, weight in module.named_parameters():
            if type(weight) is not nn.Parameter:
                raise ValueError(
                    f"{name}.{weight_name} is a {type(weight).__name__} already; convert the model before "
                    "fully_shard, parallelize_module or anything else that replaces parameters"
                )
    sites = {name: _site_names(name, module) for name, module in fitting.items()}
    Fp8Manager(recipe, amax_group=None).check_patterns([site for names in sites.values() for site in names])
    if speed_filter is not None:
        slow = _slowed_down(fitting, sites, recipe, speed_filter)
        fitting = {name: module for name, module in fitting.items() if name not in slow}
        sites = {name: sites[name] for name in fitting}
    every = [LinearSite(site) for names in sites.values() for site in names]
    layers = StandaloneLayers(every, recipe, gemm_backend=gemm_backend)
    for name, module in fitting.items():
        if isinstance(module, nn.Linear):
            module.__class__ = Fp8LinearModule
            module.fp8 = layers.layers[name]  # type: ignore[assignment]
        else:
            half = len(sites[name]) // 2
            up, down = (StandaloneExperts(layers, part) for part in (sites[name][:half], sites[name][half:]))
            convert_experts(module, up, down)
    if unfit:
        layer_dims = ", ".join(f"{name} {dims}" for name, dims in unfit.items())
        logger.warning("left in high precision, as dims are not multiples of %d: %s", _ALIGNMENT, layer_dims)
    logger.info("%s: %d of %d linear layers in FP8", type(recipe).__name__, len(fitting), len(modules))
    return model


def _dims(module: nn.Module) -> list[int]:
    """Return the dims of a linear layer's weight. Both layers of an expert have the same two dims, returned once."""
    if isinstance(module, nn.Linear):
        return list(module.weight.shape)
    _, f2, h = cast(Tensor, module.gate_up_proj).shape
    return [f2 // 2, h]


def _site_names(name: str, module: nn.Module) -> list[str]:
    """Return the names of a module's linear layers.

    For experts, these are the gate/up projections of all experts, followed by the down projections of all experts.
    """
    if isinstance(module, nn.Linear):
        return [name]
    experts = range(len(cast(Tensor, module.gate_up_proj)))
    return [f"{name}.{e}.{part}" for part in ("gate_up_proj", "down_proj") for e in experts]


def _slowed_down(
    modules: Mapping[str, nn.Module], sites: Mapping[str, list[str]], recipe: Fp8Recipe, tokens: int
) -> set[str]:
    """Return the names of the linear layers that FP8 is predicted to slow down, and log each. Experts are skipped."""
    ceilings = ceilings_of(device_name(torch.device("cuda" if torch.cuda.is_available() else "cpu")))
    slow = set()
    for name, module in modules.items():
        if not isinstance(module, nn.Linear) or recipe.operands(name) is None:
            continue
        size = LinearSize(tokens, module.in_features, module.out_features)
        speedup = predict(size, recipe, ceilings, layer=name).speedup
        if speedup <= 1:
            slow.add(name)
            logger.info(
                "%s stays in high precision: FP8 is predicted to be %.2f times as fast (%s)", name, speedup, size
            )
    return slow


def end_step(model: nn.Module) -> None:
    """End a training step now instead of at the next training forward.

    Call it before `state_dict`, and after an optimizer that is not a `torch.optim.Optimizer`. With delayed scaling it
    is a collective over the group of `autocast`.

    Args:
        model: Converted model, which may be wrapped, or a model with modules of `megafp8.nn`.

    Raises:
        ValueError: The model has no FP8 layers.
    """
    layers = layers_of(model)
    if not layers:
        raise ValueError(f"{type(model).__name__} has no FP8 layers; convert it first (megafp8.fp8.convert)")
    end_steps(layers)


def state_dict(model: nn.Module) -> dict[str, Tensor]:
    """Return the FP8 state of a converted model by name: amaxes and scales that the recipe keeps between steps.

    `model.state_dict()` does not contain this state, so save both. The state is equal on all ranks, and empty before
    the first FP8 forward.

    Raises:
        ValueError: An optimizer has stepped, but the FP8 step has not ended. Call `end_step` on every rank first.
    """
    return _converted_layers(model).state_dict()


def load_state_dict(model: nn.Module, state: dict[str, Tensor]) -> None:
    """Load the FP8 state that `state_dict` returned. The tensors may be on any device.

    The state may be loaded before or after the first forward.

    Raises:
        ValueError: Names or shapes do not match `model` and its recipe. If nothing has run in FP8 yet, the first FP8
            forward raises the error.
    """
    _converted_layers(model).load_state_dict(state)


class Fp8LinearModule(nn.Linear):
    """`nn.Linear` that runs in FP8 within `autocast`. `convert` changes the class of a layer to this class."""

    fp8: StandaloneLinear

    def forward(self, input: Tensor) -> Tensor:
        """Return `input wᵀ + bias`, `[..., out_features]`, in the dtype of `input` or of torch.autocast."""
        if in_onnx_export() and (product := exported(self.fp8, input.device)):
            y = product(input)
            return y if self.bias is None else y + self.bias.to(y.dtype)
        if torch.compiler.is_compiling() and not self.fp8.gathered_in_fp8:
            return compiled_linear(input, self.weight, self.bias, self.fp8, self.training)
        return _forward(self, input)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "weight":
            self.fp8.release_weight()
        super().__setattr__(name, value)


@torch._disable_dynamo  # the public torch.compiler.disable would import all of Dynamo here, which takes a second
def _forward(layer: Fp8LinearModule, x: Tensor) -> Tensor:
    with layer.fp8.running(x.device, training=layer.training) as state:
        if state is None or x.numel() == 0:  # an expert may have no tokens, and a GEMM no rows
            return F.linear(x, layer.weight, layer.bias)
        weight, values = cast(nn.Parameter, layer.weight), in_torch_autocast_dtype(x)
        columnwise = weight.requires_grad and torch.is_grad_enabled()
        x8 = layer.fp8.layers.quantized_input(x, state, dtype=values.dtype, columnwise=columnwise)
        fused = LinearInput(values, x8, None)
        if not torch.is_autocast_enabled(x.device.type):
            return linear(fused, weight, state, bias=layer.bias)
        with torch.autocast(x.device.type, enabled=False):  # autocast would affect the emulated GEMM
            return linear(fused, weight, state, bias=layer.bias)


def _converted_layers(model: nn.Module) -> StandaloneLayers:
    known = layers_of(model)
    if len(known) != 1:
        raise ValueError(
            f"{type(model).__name__} has layers from {len(known)} calls of megafp8.fp8.convert, but there must be one; "
            "if there are several, pass each converted submodule separately"
        )
    return known[0]
