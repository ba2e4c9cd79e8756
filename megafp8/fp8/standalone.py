"""FP8 state of linear layers that no model of megafp8's own was built with: converted ones, and those of `megafp8.nn`.

A model of our own plans its layers together, and its training loop calls `Fp8Manager.end_step`. A standalone layer does
not know its model, and training code calls nothing between steps. So its state is made at the first forward in FP8,
when device, recipe and group are known, and three events are detected here:

- *A weight changed.* Its FP8 copies are valid while its version counter and address stay the same, and are dropped when
  any torch optimizer steps: fused optimizers and writes to `.data` do not change the counter.
- *FSDP2 freed or gathered a weight.* It writes to one tensor without changing its version counter, but also assigns
  that tensor to the module each time; so an assignment to `weight` calls `StandaloneLinear.release_weight`. Backward
  then quantizes the gathered weight again instead of holding the whole model in FP8 on every rank.
- *A step ended.* Scales advance at the first training forward after an optimizer stepped: once per step, however many
  micro-batches, optimizers or recomputed forwards it has. An evaluation in between neither communicates nor changes
  any state.

Layers that ran within the same `autocast` end their step together, with one all-reduce for each group, so all ranks of
a group must run the same layers. Two models that are trained in turn, each within its own `autocast`, end their steps
apart: the graph of one may still need scales when the other begins its next step.

A forward within a backward pass is a recomputation (activation checkpointing). It runs as the layer's last forward did:
backward usually runs outside `autocast`, and in another thread.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim.optimizer import register_optimizer_step_post_hook

from megafp8.fp8.autocast import OUTSIDE, Autocast, current
from megafp8.fp8.manager import Fp8Manager, end_step
from megafp8.gemm.dispatch import GemmBackend
from megafp8.linear.group_state import GroupState
from megafp8.linear.state import LinearState
from megafp8.linear.weight_forms import WeightCopies, parts_of
from megafp8.numerics.onnx_export import in_onnx_export
from megafp8.numerics.quantizers import AmaxRecording, recording_amaxes
from megafp8.numerics.recipes import DelayedScaling, Fp8Recipe
from megafp8.numerics.recipes.base import Fp8Tensor, RecipeQuantizer
from megafp8.numerics.sources import Plain
from megafp8.numerics.tensor import QuantizedTensor, as_cast
from megafp8.plan import LinearSite

_STEP_IS_OVER = "step_is_over"


class StandaloneLinear:
    """One linear layer of `layers`: an attribute of the module that has its weight.

    `gathered_in_fp8`: FSDP2 gathers its weight in FP8, and no rank has its values; it is then no part of a compiled
    graph.
    `last`: the context of its last forward outside a backward pass; `last_state`: its state in its last one in FP8, or
    calibrating. `handle`: a number `[]` by which `layer_of` finds it. By `Autocast.recipe_key`, as far as known:
    `saved_format`, the granularity, by name, in which a forward in FP8 keeps the input for the weight gradient, or
    `VALUES`; `input_key`, by which `input_quantizer` finds what quantizes the input, where that depends on the values
    alone, else empty.
    """

    def __init__(self, layers: StandaloneLayers, site: LinearSite) -> None:
        self.layers, self.site = layers, site
        self.tp_group: ProcessGroup | None = None
        self.gathered_in_fp8 = False
        self.saved_format, self.input_key = dict[str, str](), dict[str, str]()
        self.saved_format[""] = _saved_format_under(layers.own_recipe, site.name)
        self.input_key[""] = self._input_key(layers.own_recipe)
        self._reset()

    def _reset(self) -> None:
        self.last, self.last_state = OUTSIDE, cast(LinearState | None, None)
        self.handle = torch.tensor(next(_handles), device="cpu")
        _by_handle[int(self.handle)] = self

    def __getstate__(self) -> dict[str, Any]:
        return {
            "layers": self.layers,
            "site": self.site,
            "tp_group": self.tp_group,
            "gathered_in_fp8": False,
            "saved_format": dict(self.saved_format),
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, saved_format={}, input_key={})
        self._reset()

    def _input_key(self, recipe: Fp8Recipe) -> str:
        operands = recipe.operands(self.site.name)
        if operands is None or any(recipe.override_linear_precision) or self.tp_group is not None:
            return ""
        input_recipe = operands.input
        if type(input_recipe).build is not Fp8Recipe.build or any(each.calibrates for each in operands):
            return ""
        return _input_keys.setdefault(input_recipe, str(len(_input_keys) + 1))

    @contextmanager
    def running(self, device: torch.device, *, training: bool) -> Iterator[LinearState | None]:
        """Context of one forward of the layer, with its state; None where it is to run in high precision.

        Ends the step first if it is over. Within an `autocast` that calibrates, the state's plan is to calibrate. In
        evaluation (not `training`) amaxes are not recorded, unless it calibrates.
        """
        recomputing = torch._C._current_graph_task_id() != -1
        if not recomputing:
            self.last = current()
        context = self.last
        if not context.enabled and not context.calibrating:
            yield None
            return
        if in_onnx_export():
            raise ValueError(f"{self.site.name}: experts and layers sharded by DTensor cannot be exported to ONNX")
        if training and not recomputing:
            self.layers.begin_forward(context)
        state = self.layers.state_of(self.site.name, context, device)
        if training and not recomputing:
            self.layers.begin_forward(context)
        self.saved_format[context.recipe_key] = _saved_format(state)
        if context.recipe_key not in self.input_key:
            self.input_key[context.recipe_key] = self._input_key(context.recipe or self.layers.own_recipe)
        if state.precision is None:
            self.last_state = None
            yield None
            return
        self.last_state = state
        calibrating = not context.enabled
        with recording_amaxes([] if training or calibrating else _recording(state), False):
            if calibrating:
                state.replan(calibrating=True)
            try:
                yield state
            finally:
                if calibrating:
                    state.replan()

    def shard(self, site: LinearSite, tp_group: ProcessGroup) -> None:
        """The layer is sharded over `tp_group`, as `site` says. ValueError if it has run in FP8 before."""
        if self.layers.states_of(self.site.name):
            raise ValueError(f"{site.name} has run in FP8 before; parallelize the model before its first forward")
        self.site, self.tp_group = site, tp_group
        self.input_key.clear()

    @property
    def fp8_states(self) -> list[LinearState]:
        """Its states in FP8, under all recipes and groups that it has run with."""
        return [state for state in self.layers.states_of(self.site.name) if state.precision is not None]

    def release_weight(self) -> None:
        """Free the FP8 copies of the weight, whose memory comes or goes; where it is an expert's, of all experts'."""
        for state in self.layers.states_of(self.site.name):
            state.release_weight()
        for group in self.layers.groups_with(self.site.name):
            group.release_weight()


class StandaloneExperts:
    """The layers `names` of `layers`, one for each expert, whose weights are one parameter."""

    def __init__(self, layers: StandaloneLayers, names: Sequence[str]) -> None:
        self.layers, self.names = layers, tuple(names)
        self.first = layers.layers[names[0]]

    @contextmanager
    def running(self, device: torch.device, *, training: bool) -> Iterator[GroupState | None]:
        """`StandaloneLinear.running` of all experts."""
        with self.first.running(device, training=training) as state:
            if state is None:
                yield None
                return
            calibrating = not self.first.last.enabled
            group = self.layers.group_of(self.names, self.first.last, device)
            off = (
                []
                if training or calibrating
                else [q for expert_state in group.states[1:] for q in _recording(expert_state)]
            )
            with recording_amaxes(off, False):
                for expert_state in group.states[1:] if calibrating else ():
                    expert_state.replan(calibrating=True)
                group.look_at_plans_again()
                try:
                    yield group
                finally:
                    for expert_state in group.states[1:] if calibrating else ():
                        expert_state.replan()

    def release_weight(self) -> None:
        """Free the FP8 copies of the weight, whose memory comes or goes."""
        for name in self.names:
            self.layers.layers[name].release_weight()


VALUES = "values"
_handles = itertools.count()
_by_handle: weakref.WeakValueDictionary[int, StandaloneLinear] = weakref.WeakValueDictionary()


def layer_of(handle: Tensor) -> StandaloneLinear:
    """The layer whose handle it is."""
    return _by_handle[int(handle)]


_input_keys: dict[Fp8Recipe, str] = {}


def input_quantizer(key: str, device: torch.device) -> RecipeQuantizer:
    """Return what quantizes inputs on `device` of the layers with this `input_key`."""
    (recipe,) = (recipe for recipe, shared_key in _input_keys.items() if shared_key == key)
    return RecipeQuantizer(recipe, Fp8Tensor("", "input", None, None), device)


def _saved_format(state: LinearState) -> str:
    """The granularity of the input that the layer keeps for the weight gradient, or `VALUES`."""
    if not state.plan.fp8 or state.high_precision.wgrad:
        return VALUES
    return cast(RecipeQuantizer, state.own_quantizers.input).granularity.name


def _saved_format_under(recipe: Fp8Recipe, name: str) -> str:
    """`_saved_format` of the layer `name` at its first forward, as far as it is known before."""
    operands = recipe.operands(name)
    if operands is None or recipe.override_linear_precision[2] or any(operand.calibrates for operand in operands):
        return VALUES
    return as_cast(operands.input.granularity("input")).name


def _recording(state: LinearState) -> list[AmaxRecording]:
    """The quantizers of the layer that can record amaxes."""
    return [quantizer for quantizer in state.own_quantizers if isinstance(quantizer, AmaxRecording)]


class _Part(NamedTuple):
    """Layers under one recipe and group."""

    manager: Fp8Manager
    states: dict[str, LinearState]
    groups: dict[tuple[str, ...], GroupState]

    @property
    def fp8_states(self) -> list[LinearState]:
        return [state for state in self.states.values() if state.precision is not None]


class _SharedInput(NamedTuple):
    """An input that has been quantized, and what that depends on. `readers`: the layers that have taken it."""

    x: weakref.ref[Tensor]
    key: tuple[Any, ...]
    quantized: QuantizedTensor
    readers: set[LinearState]


class StandaloneLayers:
    """Layers at `sites` whose state is allocated together. A deep or pickled copy has the same scales.

    `recipe`: where `autocast` names none, by default delayed scaling. `tp_group`: the ranks over which each layer is
    sharded, if any; `StandaloneLinear.shard` may say it later. `step_is_over`: an optimizer has stepped since the last
    end of a step. `changes`: how often weights or scales have changed.
    """

    def __init__(
        self,
        sites: Sequence[LinearSite],
        recipe: Fp8Recipe | None = None,
        *,
        gemm_backend: GemmBackend = "auto",
        tp_group: ProcessGroup | None = None,
    ) -> None:
        self.recipe, self.gemm_backend = recipe, gemm_backend
        self.own_recipe = recipe or DelayedScaling()
        self.layers = {site.name: StandaloneLinear(self, site) for site in sites}
        for layer in self.layers.values():
            layer.tp_group = tp_group
        self._parts: dict[tuple[Fp8Recipe, ProcessGroup | None, str | None], _Part] = {}
        self._loaded: dict[str, Tensor] = {}  # the initial state
        self.step_is_over = False
        self.changes = 0
        self._ran_in = OUTSIDE
        self._shared: _SharedInput | None = None
        self._device: torch.device | None = None
        _alive.add(self)

    def __getstate__(self) -> dict[str, Any]:
        state = {name: tensor.clone() for name, tensor in self._state().items()}
        return {**vars(self), "_parts": {}, "_loaded": state, "_ran_in": OUTSIDE, "_shared": None, "_device": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        _alive.add(self)

    # --- running ----------------------------------------------------------------------------------------------------

    def begin_forward(self, context: Autocast) -> None:
        """Begin a layer's forward in training, which begins the next step if one is over.

        State that was loaded while a step was over is made first, by `state_of`: then it may be begun again.
        """
        begin_step_if_over([self])
        if self._ran_in.ran_together is not context.ran_together:
            context.ran_together.append(weakref.ref(self))
        self._ran_in = context

    def state_of(self, name: str, context: Autocast, device: torch.device) -> LinearState:
        """The state of the layer `name`, made at the first call for the context's recipe and group.

        That of all layers is made at once under their own recipe, and each layer's when it runs under another.
        """
        if self._device is None:
            self._device = device
        if device != self._device:
            raise ValueError(
                f"{name or 'the layer'} runs on {device}, and ran on {self._device} before; all layers that share FP8 "
                "state must be on one device, and be moved there before their first FP8 forward"
            )
        key = self._key(name, context)
        part = self._parts.get(key)
        if part is None:
            names = list(self.layers) if key[2] is None else [name]
            part = self._parts[key] = self._build(*key[:2], names, device)
        return part.states[name]

    def known_state_of(self, name: str, context: Autocast) -> LinearState | None:
        """`state_of`, if it has been made."""
        part = self._parts.get(self._key(name, context))
        return None if part is None else part.states[name]

    def group_of(self, names: tuple[str, ...], context: Autocast, device: torch.device) -> GroupState:
        """The state of the experts `names`, whose weights are one parameter."""
        states = [self.state_of(name, context, device) for name in names]
        part = self._part_of(names[0], context)
        if names not in part.groups:
            part.groups[names] = part.manager.group(states)
        return part.groups[names]

    def _part_of(self, name: str, context: Autocast) -> _Part:
        return self._parts[self._key(name, context)]

    def _key(self, name: str, context: Autocast) -> tuple[Fp8Recipe, ProcessGroup | None, str | None]:
        recipe = context.recipe or self.own_recipe
        is_default = self.recipe is None or recipe == self.recipe
        return recipe, context.amax_group, None if is_default else name

    def states_of(self, name: str) -> list[LinearState]:
        """The states of the layer `name` under all recipes and groups that it has run with."""
        return [part.states[name] for part in self._parts.values() if name in part.states]

    def groups_with(self, name: str) -> list[GroupState]:
        """The states of experts, the layer `name` among them, whose weights are one parameter."""
        return [group for part in self._parts.values() for names, group in part.groups.items() if name in names]

    def _build(
        self, recipe: Fp8Recipe, group: ProcessGroup | None, names: Sequence[str], device: torch.device
    ) -> _Part:
        manager = Fp8Manager(
            recipe,
            amax_group=group,
            gemm_backend=self.gemm_backend,
            data_parallel=(0, 1) if group is None else (group.rank(), group.size()),
            watches_weights=True,
        )
        states = {name: manager.linear(self.layers[name].site, tp_group=self.layers[name].tp_group) for name in names}
        with torch.inference_mode(False):  # training writes to it, also where an evaluation ran first
            manager.materialize(device)
        part = _Part(manager, states, {})
        if self._loaded:
            self._load(part, self._loaded, strict=not self._parts and len(names) == len(self.layers))
        _record_weights(part, not self.step_is_over)
        return part

    def _load(self, part: _Part, state: dict[str, Tensor], *, strict: bool) -> None:
        """Load what is of this part, if all of it is there; `strict`: there must be nothing else."""
        expected = part.manager.state_dict()
        if strict:
            part.manager.load_state_dict(state)
        elif expected.keys() <= state.keys():
            part.manager.load_state_dict({name: state[name] for name in expected})

    def quantized_input(
        self, x: Tensor, state: LinearState, *, dtype: torch.dtype, columnwise: bool
    ) -> QuantizedTensor | None:
        """`x` in `dtype`, quantized for `state`; layers that follow with the same input share it.

        None where they cannot, as the scale does not depend on the values alone. It is kept as long as `x` is, and each
        layer takes it once: collectives and replays of CUDA graphs write new values to an `x` that a layer had before,
        and do not change its version counter.
        """
        quantizer = state.quantizers.input
        if type(quantizer) is not RecipeQuantizer or not state.plan.fp8_only or x.is_inference():
            return None
        key = (quantizer.recipe, quantizer.fmt, x._version, columnwise, dtype)
        shared = self._shared
        if shared is None or shared.x() is not x or shared.key != key or state in shared.readers:
            x_mk = x.detach().to(dtype).reshape(-1, x.shape[-1]).contiguous()
            made = quantizer(Plain(x_mk), rowwise=True, columnwise=columnwise)
            self._shared = shared = _SharedInput(weakref.ref(x, self._drop_shared), key, made, set())
        shared.readers.add(state)
        return shared.quantized

    def _drop_shared(self, x: weakref.ref[Tensor]) -> None:
        if self._shared is not None and self._shared.x is x:
            self._shared = None

    # --- steps ------------------------------------------------------------------------------------------------------

    def optimizer_stepped(self) -> None:
        """Drop the FP8 copies. Amaxes of the new weights are recorded when the next step begins."""
        self.step_is_over = True
        self.changes += 1
        for part in self._parts.values():
            part.manager.forget_weights()
            _record_weights(part, False)

    # --- checkpoints ------------------------------------------------------------------------------------------------

    def _state(self) -> dict[str, Tensor]:
        if not self._parts:
            return self._loaded
        return {name: tensor for part in self._parts.values() for name, tensor in part.manager.state_dict().items()}

    def state_dict(self) -> dict[str, Tensor]:
        """Amaxes and scales by name, where the recipe keeps them between steps; empty before the first FP8 forward.

        The same on all ranks of a group. ValueError if an optimizer has stepped and the step has not ended.
        """
        state = self._state()
        if state and self.step_is_over:
            raise ValueError(
                "the FP8 state is between two steps, as an optimizer has stepped; call megafp8.fp8.end_step(model) on "
                "every rank before megafp8.fp8.state_dict(model)"
            )
        return dict(state)

    def snapshot(self) -> dict[str, Tensor]:
        """`state_dict` of this rank at any time; where a step has not ended, `restore` has that step end."""
        state = dict(self._state())
        return state | {_STEP_IS_OVER: torch.tensor(self.step_is_over)} if state else {}

    def restore(self, state: dict[str, Tensor]) -> None:
        """Load what `snapshot` returned."""
        step_is_over = bool(state[_STEP_IS_OVER])
        self.load_state_dict({name: tensor for name, tensor in state.items() if name != _STEP_IS_OVER})
        if step_is_over:
            self.optimizer_stepped()

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Load what `state_dict` returned, on any device, before or after the first forward.

        ValueError, at the first FP8 forward at the latest, unless names and shapes are those of the layers.
        """
        self.step_is_over = False
        self.changes += 1
        self._loaded = dict(state)
        for part in self._parts.values():
            self._load(part, state, strict=len(self._parts) == 1)
            _record_weights(part, True)


def begin_step_if_over(several: Sequence[StandaloneLayers]) -> None:
    """End the steps that are over of `several` layers and of those that ran with them."""
    refs = [ref for layers in several if layers.step_is_over for ref in layers._ran_in.ran_together]
    together = [layers for ref in refs if (layers := ref()) is not None]
    over = [layers for layers in (*several, *together) if layers.step_is_over and (layers._parts or not layers._loaded)]
    if over:
        end_steps(over)


def end_steps(several: Sequence[StandaloneLayers]) -> None:
    """End a step of all layers, with one all-reduce for each group."""
    unique = list(dict.fromkeys(several))
    for layers in unique:
        layers.step_is_over = False
        layers.changes += 1
    parts = [part for layers in unique for part in layers._parts.values()]
    end_step([part.manager for part in parts])
    for part in parts:
        _record_weights(part, True)


def linears_of(module: nn.Module) -> list[StandaloneLinear | StandaloneExperts]:
    """The FP8 layers of `module` and the modules in it."""
    values = [value for m in module.modules() for value in vars(m).values()]
    return [value for value in values if isinstance(value, StandaloneLinear | StandaloneExperts)]


def layers_of(module: nn.Module) -> list[StandaloneLayers]:
    """What the state of each of `linears_of` is allocated with."""
    return list(dict.fromkeys(linear.layers for linear in linears_of(module)))


def _record_weights(part: _Part, flag: bool) -> None:
    for state in part.fp8_states:
        quantizer = state.own_quantizers.weight
        if isinstance(quantizer, AmaxRecording):
            quantizer.recording = flag


_alive: weakref.WeakSet[StandaloneLayers] = weakref.WeakSet()


def _optimizer_stepped(*_: Any) -> None:
    for layers in _alive:
        layers.optimizer_stepped()


# One for all, which stays: torch iterates over its hooks, and must not find one gone when a model is collected then.
register_optimizer_step_post_hook(_optimizer_stepped)


class FixedWeightCopies:
    """The FP8 copies of a layer's weight at addresses that stay, where a CUDA graph writes and another reads them.

    They have the orientations that `copies` of the layer's state have when this is made. While they are of the weight
    as it is, they are the layer's own, so that eager forwards read them too. `records`: a cast records the weight's
    amax where one of training does now; not of a layer in evaluation.
    """

    def __init__(self, state: LinearState, copies: WeightCopies, *, records: bool) -> None:
        assert copies.made is not None
        self._state, self._records, self._columnwise = state, records, copies.made.columnwise is not None
        self._weight: Any = copies.weight
        parts = parts_of(self._weight)
        if len(parts) > 1:
            self._weight = self._weight.detach()  # without the autograd graph of the forward that joined it
            self._weight.parts = parts
        self._made: QuantizedTensor | None = None
        self._copies: WeightCopies | None = None

    def quantize(self) -> None:
        """Allocate the copies and write them: to be recorded, and replayed to write them again."""
        parts = parts_of(self._weight)
        is_view = self._weight.data_ptr() == parts[0].data_ptr()
        values = self._weight if is_view else torch.cat([part.detach() for part in parts])
        with recording_amaxes([] if self._records else _recording(self._state), False):
            self._made = self._state.quantize_weight(values, rowwise=True, columnwise=self._columnwise)
        self.written()

    def written(self) -> None:
        """Tell the layer that these are the copies of its weight as it is."""
        assert self._made is not None
        self._copies = self._state.take_copies(self._weight, self._made, recorded=self._records)

    def forget(self) -> None:
        """Tell the layer that it has no copies."""
        self._state.invalidate_weight()

    @property
    def current(self) -> bool:
        """Whether these are the copies that the layer uses, of its weight as it is."""
        copies = self._copies
        return copies is not None and self._state.weight_copies is copies and copies.made is self._made
