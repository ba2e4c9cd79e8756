"""FP8 state of standalone linear layers: converted layers, and layers of `megafp8.nn`.

A megafp8 model plans its layers together, and its training loop calls `Fp8Manager.end_step`. A standalone layer does
not know its model, and the training code calls nothing between steps. Its state is therefore created at the first FP8
forward, when device, recipe and group are known. This module detects three events:

- *A weight has changed.* The FP8 copies of a weight are valid while the weight's version counter and address stay the
  same. They are also dropped when any torch optimizer steps, because fused optimizers and writes to `.data` do not
  change the counter.
- *FSDP2 has freed or gathered a weight.* FSDP2 writes to one tensor without changing its version counter, but it also
  assigns that tensor to the module each time. An assignment to `weight` therefore calls
  `StandaloneLinear.release_weight`. Backward then quantizes the gathered weight again, so that no rank holds the whole
  model in FP8.
- *A step has ended.* Scales advance at the first training forward after an optimizer step: once per step, whatever the
  number of micro-batches, optimizers or recomputed forwards. An evaluation in between neither communicates nor changes
  any state.

Layers that ran within the same `autocast` end their step together, with one all-reduce for each group, so all ranks of
a group must run the same layers. Two models that are trained in turn, each within a separate `autocast`, end their
steps separately: the graph of one model may still need its scales when the other model begins its next step.

A forward within a backward pass is a recomputation (activation checkpointing). It uses the context of the layer's last
forward, because backward usually runs outside `autocast` and in another thread.
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
    """FP8 side of one linear layer, stored as an attribute of the module that owns the weight.

    Attributes:
        layers: Layers that share state with this one.
        site: Description of the layer.
        tp_group: Ranks over which the layer is sharded, or None.
        gathered_in_fp8: Whether FSDP2 gathers the weight in FP8, so that no rank has its values. Such a layer is not
            part of a compiled graph.
        last: Context of the last forward outside a backward pass.
        last_state: State of the last forward in FP8 or with calibration.
        handle: Number that identifies the layer for `layer_of`, int64 `[]` on the CPU.
        saved_format: By `Autocast.recipe_key`, as far as known: the name of the granularity in which an FP8 forward
            saves the input for the weight gradient, or `VALUES`.
        input_key: By `Autocast.recipe_key`, as far as known: the key for `input_quantizer` if quantization of the input
            depends only on its values, else empty.
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
        """Enter one forward of the layer, and yield its state, or None if it runs in high precision.

        A training forward first ends the previous step if it is over. Within an `autocast` that calibrates, the state
        has a plan for calibration. In evaluation (not `training`), amaxes are recorded only while calibrating.
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
        """Declare that the layer is sharded over `tp_group`, as `site` describes.

        Raises:
            ValueError: The layer has run in FP8 before.
        """
        if self.layers.states_of(self.site.name):
            raise ValueError(f"{site.name} has run in FP8 before; parallelize the model before its first forward")
        self.site, self.tp_group = site, tp_group
        self.input_key.clear()

    @property
    def fp8_states(self) -> list[LinearState]:
        """FP8 states of the layer under all recipes and groups with which it has run."""
        return [state for state in self.layers.states_of(self.site.name) if state.precision is not None]

    def release_weight(self) -> None:
        """Free the FP8 copies of the weight, because FSDP2 has gathered or freed it; for an expert, of all experts."""
        for state in self.layers.states_of(self.site.name):
            state.release_weight()
        for group in self.layers.groups_with(self.site.name):
            group.release_weight()


class StandaloneExperts:
    """FP8 side of the experts of one block: one layer for each expert, with one weight parameter for all."""

    def __init__(self, layers: StandaloneLayers, names: Sequence[str]) -> None:
        self.layers, self.names = layers, tuple(names)
        self.first = layers.layers[names[0]]

    @contextmanager
    def running(self, device: torch.device, *, training: bool) -> Iterator[GroupState | None]:
        """Enter one forward of all experts, and yield their combined state. See `StandaloneLinear.running`."""
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
        """Free the FP8 copies of the weight, because FSDP2 has gathered or freed it."""
        for name in self.names:
            self.layers.layers[name].release_weight()


VALUES = "values"
_handles = itertools.count()
_by_handle: weakref.WeakValueDictionary[int, StandaloneLinear] = weakref.WeakValueDictionary()


def layer_of(handle: Tensor) -> StandaloneLinear:
    """Return the layer with the given `StandaloneLinear.handle`."""
    return _by_handle[int(handle)]


_input_keys: dict[Fp8Recipe, str] = {}


def input_quantizer(key: str, device: torch.device) -> RecipeQuantizer:
    """Return the quantizer of inputs on `device` for layers with the `input_key` `key`."""
    (recipe,) = (recipe for recipe, shared_key in _input_keys.items() if shared_key == key)
    return RecipeQuantizer(recipe, Fp8Tensor("", "input", None, None), device)


def _saved_format(state: LinearState) -> str:
    """Return the name of the granularity in which the layer saves its input for the weight gradient, or `VALUES`."""
    if not state.plan.fp8 or state.high_precision.wgrad:
        return VALUES
    return cast(RecipeQuantizer, state.own_quantizers.input).granularity.name


def _saved_format_under(recipe: Fp8Recipe, name: str) -> str:
    """Predict `_saved_format` of the layer `name` before its first forward; `VALUES` if it is not known yet."""
    operands = recipe.operands(name)
    if operands is None or recipe.override_linear_precision[2] or any(operand.calibrates for operand in operands):
        return VALUES
    return as_cast(operands.input.granularity("input")).name


def _recording(state: LinearState) -> list[AmaxRecording]:
    """Return the quantizers of the layer that can record amaxes."""
    return [quantizer for quantizer in state.own_quantizers if isinstance(quantizer, AmaxRecording)]


class _Part(NamedTuple):
    """States of the layers under one recipe and group."""

    manager: Fp8Manager
    states: dict[str, LinearState]
    groups: dict[tuple[str, ...], GroupState]

    @property
    def fp8_states(self) -> list[LinearState]:
        """States of the layers that are not in high precision."""
        return [state for state in self.states.values() if state.precision is not None]


class _SharedInput(NamedTuple):
    """Quantized input of several layers, what its data depends on (`key`), and the layers that have read it."""

    x: weakref.ref[Tensor]
    key: tuple[Any, ...]
    quantized: QuantizedTensor
    readers: set[LinearState]


class StandaloneLayers:
    """Layers with FP8 state that is allocated together. A deep copy or a pickled copy has the same scales.

    Args:
        sites: Descriptions of the layers.
        recipe: Recipe if `autocast` names none; None means delayed scaling.
        gemm_backend: Backend of FP8 GEMMs.
        tp_group: Ranks over which every layer is sharded, or None. `StandaloneLinear.shard` may set it later.

    Attributes:
        step_is_over: Whether an optimizer has stepped since the FP8 step last ended.
        changes: Number of times that weights or scales have changed.
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
        """Begin a training forward of a layer, and end the previous step if it is over.

        `running` calls this method twice, before and after `state_of`. State that was loaded while a step was over
        exists only after `state_of`, and then the second call ends that step.
        """
        begin_step_if_over([self])
        if self._ran_in.ran_together is not context.ran_together:
            context.ran_together.append(weakref.ref(self))
        self._ran_in = context

    def state_of(self, name: str, context: Autocast, device: torch.device) -> LinearState:
        """Return the state of the layer `name`; the first call for the context's recipe and group creates it.

        Under the layers' default recipe, the states of all layers are created together. Under another recipe, each
        layer's state is created when the layer runs.
        """
        if self._device is None:
            self._device = device
        if device != self._device:
            raise ValueError(
                f"{name or 'the layer'} runs on {device}, but ran on {self._device} before; all layers that share FP8 "
                "state must be on one device, and be moved there before their first FP8 forward"
            )
        key = self._key(name, context)
        part = self._parts.get(key)
        if part is None:
            names = list(self.layers) if key[2] is None else [name]
            part = self._parts[key] = self._build(*key[:2], names, device)
        return part.states[name]

    def known_state_of(self, name: str, context: Autocast) -> LinearState | None:
        """Return the state of the layer `name` if it has been created, else None."""
        part = self._parts.get(self._key(name, context))
        return None if part is None else part.states[name]

    def group_of(self, names: tuple[str, ...], context: Autocast, device: torch.device) -> GroupState:
        """Return the combined state of the experts `names`, which share one weight parameter."""
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
        """Return the states of the layer `name` under all recipes and groups with which it has run."""
        return [part.states[name] for part in self._parts.values() if name in part.states]

    def groups_with(self, name: str) -> list[GroupState]:
        """Return the combined states of experts that include the layer `name`."""
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
        with torch.inference_mode(False):  # training writes to the state later, even if an evaluation runs first
            manager.materialize(device)
        part = _Part(manager, states, {})
        if self._loaded:
            self._load(part, self._loaded, strict=not self._parts and len(names) == len(self.layers))
        _record_weights(part, not self.step_is_over)
        return part

    def _load(self, part: _Part, state: dict[str, Tensor], *, strict: bool) -> None:
        """Load the state of this part if `state` contains all of it. With `strict`, it must contain nothing else."""
        expected = part.manager.state_dict()
        if strict:
            part.manager.load_state_dict(state)
        elif expected.keys() <= state.keys():
            part.manager.load_state_dict({name: state[name] for name in expected})

    def quantized_input(
        self, x: Tensor, state: LinearState, *, dtype: torch.dtype, columnwise: bool
    ) -> QuantizedTensor | None:
        """Cast `x` to `dtype`, quantize it for `state`, and share the result with later layers that have this input.

        The result is kept while `x` exists. Each layer reads it only once: collectives and replayed CUDA graphs write
        new values to an `x` that a layer has read before, without changing the version counter of `x`.

        Returns:
            The quantized input, or None if it cannot be shared because the scale does not depend only on the values.
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
        """Drop the FP8 copies of weights. Amaxes of the new weights are recorded when the next step begins."""
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
        """Return, by name, the amaxes and scales that the recipe keeps between steps.

        The state is equal on all ranks of a group, and empty before the first FP8 forward.

        Raises:
            ValueError: An optimizer has stepped, but the FP8 step has not ended.
        """
        state = self._state()
        if state and self.step_is_over:
            raise ValueError(
                "the FP8 state is between two steps, because an optimizer has stepped; call "
                "megafp8.fp8.end_step(model) on every rank before megafp8.fp8.state_dict(model)"
            )
        return dict(state)

    def snapshot(self) -> dict[str, Tensor]:
        """Return the state of this rank, which may be between two steps; after `restore` that step still ends."""
        state = dict(self._state())
        return state | {_STEP_IS_OVER: torch.tensor(self.step_is_over)} if state else {}

    def restore(self, state: dict[str, Tensor]) -> None:
        """Load the state that `snapshot` returned."""
        step_is_over = bool(state[_STEP_IS_OVER])
        self.load_state_dict({name: tensor for name, tensor in state.items() if name != _STEP_IS_OVER})
        if step_is_over:
            self.optimizer_stepped()

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Load the state that `state_dict` returned, from any device, before or after the first forward.

        Raises:
            ValueError: Names or shapes do not match the layers. If nothing has run in FP8 yet, the first FP8 forward
                raises the error.
        """
        self.step_is_over = False
        self.changes += 1
        self._loaded = dict(state)
        for part in self._parts.values():
            self._load(part, state, strict=len(self._parts) == 1)
            _record_weights(part, True)


def begin_step_if_over(several: Sequence[StandaloneLayers]) -> None:
    """End the steps that are over: of `several`, and of all layers that ran in the same `autocast`."""
    refs = [ref for layers in several if layers.step_is_over for ref in layers._ran_in.ran_together]
    together = [layers for ref in refs if (layers := ref()) is not None]
    over = [layers for layers in (*several, *together) if layers.step_is_over and (layers._parts or not layers._loaded)]
    if over:
        end_steps(over)


def end_steps(several: Sequence[StandaloneLayers]) -> None:
    """End the step of all `several` layers, with one all-reduce for each process group."""
    unique = list(dict.fromkeys(several))
    for layers in unique:
        layers.step_is_over = False
        layers.changes += 1
    parts = [part for layers in unique for part in layers._parts.values()]
    end_step([part.manager for part in parts])
    for part in parts:
        _record_weights(part, True)


def linears_of(module: nn.Module) -> list[StandaloneLinear | StandaloneExperts]:
    """Return the standalone FP8 layers of `module` and its submodules."""
    values = [value for m in module.modules() for value in vars(m).values()]
    return [value for value in values if isinstance(value, StandaloneLinear | StandaloneExperts)]


def layers_of(module: nn.Module) -> list[StandaloneLayers]:
    """Return the `StandaloneLayers` of all FP8 layers in `module`, each once."""
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


# One hook for all models that is never removed: torch iterates over its hooks, and a model may be collected meanwhile.
register_optimizer_step_post_hook(_optimizer_stepped)


class FixedWeightCopies:
    """FP8 copies of a layer's weight at fixed addresses: one CUDA graph writes them, and another graph reads them.

    While the copies are up to date, they are also the layer's current copies, so that eager forwards read them too.

    Args:
        state: State of the layer.
        copies: Current copies of the layer; they determine the orientations.
        records: Whether quantizing records the weight's amax, as in training; False for a layer in evaluation.
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
        """Allocate and write the copies. Record this call in a graph: each replay writes the copies again."""
        parts = parts_of(self._weight)
        is_view = self._weight.data_ptr() == parts[0].data_ptr()
        values = self._weight if is_view else torch.cat([part.detach() for part in parts])
        with recording_amaxes([] if self._records else _recording(self._state), False):
            self._made = self._state.quantize_weight(values, rowwise=True, columnwise=self._columnwise)
        self.written()

    def written(self) -> None:
        """Make these copies the layer's current ones, because they match the weight now."""
        assert self._made is not None
        self._copies = self._state.take_copies(self._weight, self._made, recorded=self._records)

    def forget(self) -> None:
        """Drop the layer's current copies."""
        self._state.invalidate_weight()

    @property
    def current(self) -> bool:
        """Whether the layer uses these copies, and they match its weight."""
        copies = self._copies
        return copies is not None and self._state.weight_copies is copies and copies.made is self._made
