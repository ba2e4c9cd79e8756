"""FP8 for any PyTorch model: `convert` makes its `nn.Linear`s FP8 layers, which run in FP8 within `autocast`.

A converted layer is the same module with another class: its parameters, hooks and names stay, so `state_dict` is
unchanged and a later wrapper (DDP, FSDP2, torch.compile) sees an `nn.Linear`. All layers of one `convert` share a
`_Conversion` with the recipe and, from the first FP8 forward on, when the device is known, the `Fp8Manager`.

Training code calls nothing between steps; three events are detected here:

- *A weight changed.* Its FP8 copies are valid while its version counter and address stay the same, and are dropped when
  any torch optimizer steps: fused optimizers and writes to `.data` do not change the counter.
- *FSDP2 freed or gathered a weight.* It writes to one tensor without changing its version counter, but also assigns
that
  tensor to the module each time; so an assignment to `weight` frees the copies. Backward then quantizes the gathered
  weight again instead of holding the whole model in FP8 on every rank.
- *A step ended.* Delayed scaling advances at the first training forward after an optimizer stepped: once per step,
however
  many micro-batches, optimizers or recomputed forwards it has. Its amaxes are then reduced over the default process
  group, so all ranks must run the same layers. An evaluation in between neither communicates nor changes any state.

A forward within a backward pass is a recomputation (activation checkpointing). It runs in FP8 if the layer's last
forward did: backward usually runs outside `autocast`, and in another thread.

Limits: the layers are opaque to torch.compile (a graph break each), casts are not fused with the norms and activations
around them, and gradients return through autograd in the weight's dtype instead of being accumulated by the GEMM.
Models built from megafp8's own layers have none of these limits.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from fnmatch import fnmatchcase
from typing import Any, cast, get_args

import torch
from torch import Tensor, distributed, nn
from torch.nn import functional as F
from torch.optim.optimizer import register_optimizer_step_post_hook

from megafp8.fp8.gemm.dispatch import GemmBackend
from megafp8.fp8.linear_state import LinearState
from megafp8.fp8.manager import Fp8Manager
from megafp8.fp8.quantizers import AmaxRecording, Quantizer
from megafp8.fp8.recipes import RECIPES, CurrentScaling, Fp8Recipe
from megafp8.fp8.recipes.base import no_match
from megafp8.fp8.sources import Plain
from megafp8.fp8.tensor import QuantizedTensor, ScaledTensor
from megafp8.plan import LinearSite

logger = logging.getLogger(__name__)

_ALIGNMENT = 16
_enabled: ContextVar[bool] = ContextVar("megafp8.fp8.autocast", default=False)


def convert(
    model: nn.Module,
    recipe: Fp8Recipe,
    *,
    skip: tuple[str, ...] = ("lm_head",),
    gemm_backend: GemmBackend = "auto",
) -> nn.Module:
    """Make every `nn.Linear` of `model` that matches no pattern in `skip` an FP8 layer, and return `model`.

    `skip`: shell-style patterns of qualified names (`model.named_modules()`), where `*` matches dots too. Layers with
    dims that are not multiples of 16 are skipped with a warning, subclasses of `nn.Linear` without. Converted layers
    run in FP8 within `autocast`. Convert before DDP, `fully_shard` or `torch.compile`; on any device, "meta" too.

    Raises ValueError, with the model unchanged, if `recipe` is not an Fp8Recipe (but its name, say), a pattern of
    `skip` or the recipe matches nothing, there is nothing to convert, or a layer is sharded already.
    """
    if not isinstance(recipe, Fp8Recipe):
        meant = recipe if isinstance(recipe, type) else RECIPES.get(str(recipe), CurrentScaling)
        raise ValueError(f"recipe is {recipe!r}; it must be an Fp8Recipe, try megafp8.fp8.{meant.__name__}()")
    if isinstance(skip, str):
        raise ValueError(f"skip is the string {skip!r}; it must be a tuple of patterns, for example ({skip!r},)")
    if gemm_backend not in get_args(GemmBackend):
        raise ValueError(f"gemm_backend is {gemm_backend!r}; it must be one of {', '.join(get_args(GemmBackend))}")
    linears = {name: module for name, module in model.named_modules() if type(module) is nn.Linear}
    for pattern in skip:
        if not any(fnmatchcase(name, pattern) for name in linears):
            raise ValueError(f"{no_match('skip', pattern, list(linears))}; skip=() skips none")
    chosen = {name: m for name, m in linears.items() if not any(fnmatchcase(name, pattern) for pattern in skip)}
    fitting = {name: m for name, m in chosen.items() if m.in_features % _ALIGNMENT == m.out_features % _ALIGNMENT == 0}
    if not fitting:
        raise ValueError(
            f"{type(model).__name__} has no nn.Linear to convert: {len(linears)} in all, {len(chosen)} not skipped, "
            f"and none of these with dims that are multiples of {_ALIGNMENT}; has it been converted before?"
        )
    for name, module in fitting.items():
        if type(module.weight) is not nn.Parameter:
            raise ValueError(
                f"{name}.weight is a {type(module.weight).__name__} already; convert the model before fully_shard, "
                "parallelize_module or anything else that replaces parameters"
            )
    Fp8Manager(recipe, amax_group=None).check_patterns(list(fitting))
    conversion = _Conversion(recipe, gemm_backend, tuple(fitting))
    for name, module in fitting.items():
        module.__class__ = Fp8LinearModule
        module.conversion, module.fp8_name, module.ran_in_fp8 = conversion, name, False  # type: ignore[assignment]
    unfit = ", ".join(f"{name} {list(m.weight.shape)}" for name, m in chosen.items() if name not in fitting)
    if unfit:
        logger.warning("left in high precision, as dims are not multiples of %d: %s", _ALIGNMENT, unfit)
    logger.info("%s: %d of %d linear layers in FP8", type(recipe).__name__, len(fitting), len(linears))
    return model


@contextmanager
def autocast(enabled: bool = True) -> Iterator[None]:
    """Context in which converted layers run in FP8 (or not, with `enabled=False`); without it they are `nn.Linear`s.

    Can be nested; local to the thread or asyncio task. Only the forward has to run within.
    """
    token = _enabled.set(enabled)
    try:
        yield
    finally:
        _enabled.reset(token)


def end_step(model: nn.Module) -> None:
    """End a training step now instead of at the next training forward.

    Needed before `state_dict`, and after an optimizer that is not a `torch.optim.Optimizer`. With delayed scaling a
    collective over the default process group, if any. Raises ValueError unless `model`, possibly wrapped, is converted.
    """
    _conversion_of(model).end_step()


def state_dict(model: nn.Module) -> dict[str, Tensor]:
    """The FP8 state of `model`'s layers by name: amaxes and scales, where the recipe keeps them between steps.

    Not in `model.state_dict()`: save it as well. The same on every rank, and empty before the first FP8 forward. Raises
    ValueError if an optimizer has stepped and the step has not ended: call `end_step` on every rank.
    """
    return _conversion_of(model).state_dict()


def load_state_dict(model: nn.Module, state: dict[str, Tensor]) -> None:
    """Load what `state_dict` returned, on any device, before or after the first forward.

    Raises ValueError, at the first FP8 forward at the latest, if names or shapes do not match `model` and its recipe.
    """
    _conversion_of(model).load_state_dict(state)


class Fp8LinearModule(nn.Linear):
    """An `nn.Linear` that runs in FP8 within `autocast`; made by `convert`."""

    conversion: _Conversion
    fp8_name: str
    ran_in_fp8: bool  # in its last forward outside a backward pass

    def forward(self, input: Tensor) -> Tensor:
        """`input wᵀ + bias`: input `[..., in_features]` -> `[..., out_features]` in its dtype, or torch.autocast's."""
        return _forward(self, input)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "weight":
            self.conversion.release_weight(self.fp8_name)
        super().__setattr__(name, value)


@torch._disable_dynamo  # the public torch.compiler.disable would import all of it here, which takes a second
def _forward(layer: Fp8LinearModule, x: Tensor) -> Tensor:
    recomputing = torch._C._current_graph_task_id() != -1
    if not recomputing:
        layer.ran_in_fp8 = _enabled.get()
    if not layer.ran_in_fp8 or x.numel() == 0:  # an expert may have no tokens, and a GEMM no rows
        return F.linear(x, layer.weight, layer.bias)
    conversion, device = layer.conversion, x.device.type
    if layer.training and not recomputing:
        conversion.end_step_if_over()
    if not torch.is_autocast_enabled(device):
        return conversion.linear(layer, x)
    with torch.autocast(device, enabled=False):  # it would reach into the emulated GEMM
        return conversion.linear(layer, x.to(torch.get_autocast_dtype(device)))


class _Conversion:
    """State shared by the layers of one `convert`. A deep or pickled copy has the same scales and is independent."""

    def __init__(self, recipe: Fp8Recipe, gemm_backend: GemmBackend, names: tuple[str, ...]) -> None:
        self.recipe, self.gemm_backend, self.names = recipe, gemm_backend, names
        self._loaded: dict[str, Tensor] = {}  # the initial state
        self._step_is_over = False
        self._manager: Fp8Manager | None = None
        self._device: torch.device | None = None
        self._layers: dict[str, LinearState] = {}
        _call_after_optimizer_steps(self)

    def __reduce__(self) -> tuple[Any, ...]:
        state = {name: tensor.clone() for name, tensor in self._state().items()}
        return _Conversion, (self.recipe, self.gemm_backend, self.names), (state, self._step_is_over)

    def __setstate__(self, state: tuple[dict[str, Tensor], bool]) -> None:
        self._loaded, self._step_is_over = state

    def linear(self, layer: Fp8LinearModule, x: Tensor) -> Tensor:
        """Run the layer in FP8. In evaluation mode its amaxes are not recorded."""
        from megafp8.ops.linear import linear  # which imports this package

        if self._manager is None:
            self._manager = self._build(x.device)
        if x.device != self._device:
            raise ValueError(
                f"{layer.fp8_name} runs on {x.device}, and the converted model ran on {self._device} before; it must "
                "be on one device, and be moved there before its first FP8 forward"
            )
        state, weight = self._layers[layer.fp8_name], cast(nn.Parameter, layer.weight)
        if layer.training:
            return linear(x, weight, state, bias=layer.bias)
        with self._manager.recording(False):
            return linear(x, weight, state, bias=layer.bias)

    def _build(self, device: torch.device) -> Fp8Manager:
        group = _world()
        manager = Fp8Manager(
            self.recipe,
            amax_group=group,
            gemm_backend=self.gemm_backend,
            data_parallel=(0, 1) if group is None else (group.rank(), group.size()),
            state_type=_WatchingState,
        )
        self._layers = {name: manager.linear(LinearSite(name)) for name in self.names}
        manager.materialize(device)
        if self._loaded:
            manager.load_state_dict(self._loaded)
        self._note_weights(not self._step_is_over)
        self._device = device
        return manager

    def optimizer_stepped(self) -> None:
        """Drop the FP8 copies. Amaxes of the new weights are recorded when the next step begins."""
        self._step_is_over = True
        for state in self._fp8_layers():
            state.invalidate_weight()
        self._note_weights(False)

    def end_step_if_over(self) -> None:
        if self._step_is_over:
            self.end_step()

    def end_step(self) -> None:
        self._step_is_over = False
        if self._manager is not None:
            self._manager.end_step()
            self._note_weights(True)

    def release_weight(self, name: str) -> None:
        """Free the copies of a weight whose memory comes or goes."""
        state = self._layers.get(name)
        if isinstance(state, _WatchingState):
            state.release_weight()

    def _fp8_layers(self) -> list[LinearState]:
        return [state for state in self._layers.values() if state.precision is not None]

    def _note_weights(self, flag: bool) -> None:
        for state in self._fp8_layers():
            if isinstance(state.quantizers.weight, AmaxRecording):
                state.quantizers.weight.recording = flag

    def _state(self) -> dict[str, Tensor]:
        return self._loaded if self._manager is None else self._manager.state_dict()

    def state_dict(self) -> dict[str, Tensor]:
        state = self._state()
        if state and self._step_is_over:
            raise ValueError(
                "the FP8 state is between two steps, as an optimizer has stepped; call megafp8.fp8.end_step(model) on "
                "every rank before megafp8.fp8.state_dict(model)"
            )
        return dict(state)

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self._step_is_over = False
        if self._manager is None:
            self._loaded = dict(state)
        else:
            self._manager.load_state_dict(state)
            self._note_weights(True)


def _call_after_optimizer_steps(conversion: _Conversion) -> None:
    """Call `conversion.optimizer_stepped` after every optimizer step, without keeping it alive."""
    reference = weakref.ref(conversion)

    def stepped(*_: Any) -> None:
        alive = reference()
        if alive is not None:
            alive.optimizer_stepped()

    weakref.finalize(conversion, register_optimizer_step_post_hook(stepped).remove)


class _WatchingState(LinearState):
    """A `LinearState` that sees for itself whether its weight has changed."""

    _copies: _WeightCopies | None = None

    def fp8_weight(self, weight: Tensor, *, columnwise: bool) -> QuantizedTensor:
        if self._copies is None or not self._copies.are_of(weight):
            self._copies = _WeightCopies(weight, self.quantizers.weight)
        self._copies.make(columnwise=columnwise)
        return cast(QuantizedTensor, self._copies)  # it has the same interface

    def invalidate_weight(self) -> None:
        self._copies = None

    def release_weight(self) -> None:
        if self._copies is not None:
            self._copies.release()


class _WeightCopies:
    """A weight in FP8 with the interface of `QuantizedTensor`, which can be released and is then quantized again.

    Layer and graph share it while the weight is unchanged. When the weight changes, the layer gets a new one, and an
    older graph keeps the values it was computed with. When FSDP2 frees the weight, this is released for both, and the
    next access quantizes the weight as gathered by then.
    """

    def __init__(self, weight: Tensor, quantizer: Quantizer) -> None:
        self._weight, self._quantizer = weight, quantizer
        self._made: QuantizedTensor | None = None
        self._made_from: tuple[int, int] | None = None

    def are_of(self, weight: Tensor) -> bool:
        return self._weight is weight and (self._made is None or self._made_from == _stamp(weight))

    def make(self, *, columnwise: bool) -> QuantizedTensor:
        if self._made is None or (columnwise and self._made.columnwise is None):
            self._made_from = _stamp(self._weight)
            self._made = self._quantizer(Plain(self._weight.detach()), rowwise=True, columnwise=columnwise)
        return self._made

    def release(self) -> None:
        self._made = None

    @property
    def required_rowwise(self) -> ScaledTensor:
        return self.make(columnwise=False).required_rowwise

    @property
    def required_columnwise(self) -> ScaledTensor:
        return self.make(columnwise=True).required_columnwise


def _stamp(weight: Tensor) -> tuple[int, int]:
    """A value that changes when the tensor is written to or its memory is replaced."""
    return weight._version, weight.data_ptr()


def _world() -> distributed.ProcessGroup | None:
    return distributed.group.WORLD if distributed.is_available() and distributed.is_initialized() else None


def _conversion_of(model: nn.Module) -> _Conversion:
    found = {id(m.conversion): m.conversion for m in model.modules() if isinstance(m, Fp8LinearModule)}
    if len(found) != 1:
        raise ValueError(
            f"{type(model).__name__} has layers from {len(found)} calls of megafp8.fp8.convert, and there must be one; "
            "for several, name the converted submodules one at a time"
        )
    return next(iter(found.values()))
