"""FP8 recipe manager: plans every linear layer of a model and owns the FP8 state of the job.

A model asks for each layer's `LinearState`, and with it the layer's plan, when it constructs the layer. Once the model
is built, `materialize` allocates what the recipe remembers for all layers of this rank together; a training loop then
calls `end_step` after every optimizer step (and `begin_step` before it, where a `Recorder` samples what is quantized).

Names are global ("layers.3.attention.qkv" counts layers over all pipeline stages), so that patterns mean the same
everywhere and state saved under one layout loads under another.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megafp8.fp8.health import ObservedQuantizer, Recorder
from megafp8.gemm.dispatch import Fp8Gemm, GemmBackend
from megafp8.linear.group_state import GroupState
from megafp8.linear.state import LinearState, Quantizers
from megafp8.numerics.quantizers import AmaxRecording, Quantizer, recording_amaxes
from megafp8.numerics.recipes.base import OPERANDS, Fp8Recipe, Fp8Tensor, OperandName, by_recipe, no_match
from megafp8.numerics.step import State
from megafp8.numerics.step import end_step as end_step_of_states
from megafp8.numerics.stochastic_rounding import NoiseClock
from megafp8.numerics.tensor import BLOCK_1X128, TENSOR
from megafp8.plan import LinearPlan, LinearPrecision, LinearSite, PerGemm, Quantization, not_gatherable_weight


def quantization(recipe: Fp8Recipe, operand: OperandName) -> Quantization:
    """What a plan needs to know of how `recipe` quantizes `operand`."""
    capabilities, granularity = recipe.capabilities, recipe.granularity(operand)
    return Quantization(
        recipe.name, granularity is TENSOR, capabilities.shard_alignment, capabilities.per_tensor,
        blocks=granularity is BLOCK_1X128,
    )  # fmt: skip


class ContextGroups(NamedTuple):
    """Where the tokens of a micro-batch are cut over ranks: those that hold the others of the same sequences, and
    together with these all tensor-parallel ranks of each."""

    context: ProcessGroup
    tensor_context: ProcessGroup


class Fp8Manager:
    """Plans linear layers and owns their FP8 state.

    `recipe`: None leaves every layer in high precision. `amax_group`: the ranks that run the same layers (tensor ×
    context × data), over which delayed scaling reduces its amaxes; None for one rank. `include`, `exclude`: shell-style
    patterns of layer names; a layer is FP8 if some of the first and none of the second match. `recorder`: looks at what
    FP8 layers quantize, in the steps it samples. `seed` and `data_parallel`, this rank and how many there are, decide
    the noise of stochastic rounding. `context`: None where each rank has whole sequences; an amax is that of a whole
    micro-batch, however its tokens are cut. `watches_weights`: layers see for themselves whether their weights have
    changed. `batch_invariant`: the model is (`megafp8.numerics.batch_invariance`).
    """

    def __init__(
        self,
        recipe: Fp8Recipe | None,
        *,
        amax_group: ProcessGroup | None,
        include: tuple[str, ...] = ("*",),
        exclude: tuple[str, ...] = (),
        gemm_backend: GemmBackend = "auto",
        gemm_autotune: bool = True,
        recorder: Recorder | None = None,
        seed: int = 0,
        data_parallel: tuple[int, int] = (0, 1),
        context: ContextGroups | None = None,
        watches_weights: bool = False,
        batch_invariant: bool = False,
    ) -> None:
        self.recipe = recipe
        self.amax_group = amax_group
        self.include, self.exclude = include, exclude
        self.gemm_backend, self.gemm_autotune = gemm_backend, gemm_autotune
        self.recorder = recorder
        self.seed, self.data_parallel = seed, data_parallel
        self.context = context
        self._left_out: frozenset[str] = frozenset()
        self._watches_weights, self.batch_invariant = watches_weights, batch_invariant
        self._all_layers: dict[str, LinearState] = {}
        self._layers: dict[str, LinearState] = {}  # those in FP8
        self._groups_of_layers: list[GroupState] = []
        self._amax_groups: dict[str, ProcessGroup] = {}  # of layers that other ranks run than those of `amax_group`
        self._states: list[State] | None = None
        self._recording: list[AmaxRecording] = []

    # --- building ---------------------------------------------------------------------------------------------------

    def linear(
        self,
        site: LinearSite,
        *,
        tp_group: ProcessGroup | None = None,
        amax_group: ProcessGroup | None = None,
        expert_rows: ProcessGroup | None = None,
    ) -> LinearState:
        """The state of the layer at `site`, with its plan; call before `materialize`, once a layer.

        `tp_group`: the ranks over which the layer is sharded. `amax_group`: the ranks that run the layer, where other
        than those of the model. `expert_rows`: of an expert's layer, the ranks that hold other rows of the same
        activations, or other columns of them; None where each rank has all rows.
        """
        assert site.name not in self._all_layers, f"layer {site.name} has its state already"
        reason = site.high_precision or self.why_not(site.name)
        precision = None if reason else self._precision(site.name)
        tokens = expert_rows if site.expert else self.token_group
        sharded = tp_group
        if tp_group is not None:
            sharded = (expert_rows or tp_group) if site.expert else self.sharded_group(tp_group)
        state = LinearState(
            site,
            precision,
            high_reason=reason,
            group=tp_group,
            sharded_group=sharded,
            token_group=tokens,
            watches_weight=self._watches_weights,
            batch_invariant=self.batch_invariant,
        )
        self._all_layers[site.name] = state
        if amax_group is not None:
            self._amax_groups[site.name] = amax_group
        if precision is not None:
            self._layers[site.name] = state
        return state

    def group(self, states: Sequence[LinearState]) -> GroupState:
        """The state of equal layers whose weights are one parameter, from that of each."""
        group = GroupState(states)
        self._groups_of_layers.append(group)
        return group

    def gathers_one_weight(self, names: Iterable[str]) -> bool:
        """Whether the weights of all layers `names`, which are one parameter, can be gathered in FP8."""
        return not any(self.why_not(name) or not_gatherable_weight(self._precision(name)) for name in names)

    def unbuilt(self) -> Fp8Manager:
        """A manager on one rank that plans layers as this one does, and has built none yet."""
        manager = Fp8Manager(
            self.recipe,
            amax_group=None,
            include=self.include,
            exclude=self.exclude,
            gemm_backend=self.gemm_backend,
            batch_invariant=self.batch_invariant,
        )
        manager.leave_out(self._left_out)
        return manager

    @property
    def layers(self) -> Sequence[LinearState]:
        """The states of all layers, in the order in which they were built."""
        return list(self._all_layers.values())

    @property
    def groups(self) -> Sequence[GroupState]:
        """The states of equal layers whose weights are one parameter."""
        return self._groups_of_layers

    @property
    def plans(self) -> list[LinearPlan]:
        """The plans of all layers, in the order in which they were built."""
        return [state.plan for state in self.layers]

    def _precision(self, name: str) -> LinearPrecision:
        """How the recipe has an FP8 layer."""
        assert self.recipe is not None
        operands = self.recipe.operands(name)
        assert operands is not None
        x, w, dy = (quantization(recipe, operand) for recipe, operand in zip(operands, OPERANDS, strict=True))
        high, fast = self.recipe.override_linear_precision, self.recipe.use_fast_accum
        return LinearPrecision(x, w, dy, PerGemm(*high), PerGemm(*fast))

    def _groups(self, state: LinearState) -> dict[str, ProcessGroup | None]:
        """By operand, the ranks over which a layer's tensors are sharded; None where a rank has a whole one."""
        site, sharded, tokens = state.site, state.sharded_group, state.token_group
        several = site.tensor_parallel > 1
        return {
            "input": sharded if several and site.parallel == "row" else tokens,
            "weight": state.group,
            "grad_output": sharded if several and site.parallel == "column" else tokens,
        }

    @property
    def token_group(self) -> ProcessGroup | None:
        """The ranks over which the tokens of whole activations are cut; None where this rank has them all."""
        return None if self.context is None else self.context.context

    def sharded_group(self, tp_group: ProcessGroup) -> ProcessGroup:
        """The ranks that hold slices of an activation which is sharded over `tp_group` and over `token_group`."""
        return tp_group if self.context is None else self.context.tensor_context

    def selects(self, name: str) -> bool:
        """Whether the layer `name` is to be FP8."""
        return not self.why_not(name)

    def why_not(self, name: str) -> str:
        """Why the layer `name` is not to be FP8; empty where it is."""
        if self.recipe is None:
            return "fp8.recipe is none"
        if not any(fnmatchcase(name, pattern) for pattern in self.include):
            return "no pattern of fp8.include matches"
        for pattern in self.exclude:
            if fnmatchcase(name, pattern):
                return f"fp8.exclude has {pattern!r}"
        if name in self._left_out:
            return "fp8.auto_filter: FP8 would be slower"
        return "the recipe names it high precision" if self.recipe.operands(name) is None else ""

    def leave_out(self, names: Collection[str]) -> None:
        """Keep the layers `names` in high precision whatever the patterns say; call before they are constructed."""
        assert not self._layers
        self._left_out = frozenset(names)

    def check_patterns(self, all_layer_names: Sequence[str]) -> None:
        """ValueError unless every pattern, the recipe's too, fits the whole model's layers (of all pipeline stages)."""
        for field, patterns in (("include", self.include), ("exclude", self.exclude)):
            for pattern in patterns:
                if not any(fnmatchcase(name, pattern) for name in all_layer_names):
                    raise ValueError(no_match(field, pattern, all_layer_names))
        if self.recipe is None:
            return
        self.recipe.check_layers(all_layer_names)
        for recipe, tensors in by_recipe(self.recipe, filter(self.selects, all_layer_names)).items():
            recipe.check_tensors([f"{layer}.{operand}" for layer, operand in tensors])

    def materialize(self, device: torch.device) -> None:
        """Allocate the state of all layers on `device` and make them usable. Call once, when the model is built."""
        assert self._states is None, "materialize has been called already"
        self._states = []
        if self.recipe is None:
            return
        quantizers: dict[str, Quantizer] = {}
        clock = NoiseClock(self.seed, *self.data_parallel, device)
        gemm = Fp8Gemm(self.gemm_backend, device, autotune=self.gemm_autotune)
        groups = {name: self._groups(state) for name, state in self._layers.items()}
        for recipe, operands in by_recipe(self.recipe, groups).items():
            tensors = [
                Fp8Tensor(
                    layer,
                    operand,
                    groups[layer][operand],
                    None if operand == "weight" else self._layers[layer].token_group,
                    self._amax_groups.get(layer),
                    self.batch_invariant,
                )
                for layer, operand in operands
            ]
            made, state = recipe.build(tensors, device, clock)
            quantizers |= made
            if state is not None and state not in self._states:
                self._states.append(state)
        for name, layer in self._layers.items():
            x, w, dy = (quantizers[f"{name}.{operand}"] for operand in Quantizers._fields)
            own_quantizers = Quantizers(x, w, dy)
            layer.complete(
                own_quantizers, gemm, None if self.recorder is None else _observed(own_quantizers, self.recorder, name)
            )
            self._recording += [q for q in own_quantizers if isinstance(q, AmaxRecording)]

    @property
    def states(self) -> Sequence[State]:
        """What recipes remember between steps."""
        return self._states or ()

    def replan(self) -> None:
        """Replace the plans of layers whose calibration has ended or begun."""
        for state in self._layers.values():
            state.replan_if_calibrated()

    # --- training ---------------------------------------------------------------------------------------------------

    def begin_step(self, step: int) -> bool:
        """Begin training step `step`, counted from 1; whether the recorder samples it, until its own `end_step`.

        Forgets the FP8 copies of weights that an evaluation may have left: each step quantizes them itself, but for
        frozen ones, which sampled steps quantize.
        """
        sampled = self.recorder is not None and self.recorder.begin_step(step)
        self.forget_weights(frozen=sampled)
        return sampled

    @property
    def calibrating(self) -> bool:
        """Whether a layer still calibrates its static scales, in high precision."""
        return any(plan.calibrating for plan in self.plans)

    def newest_amaxes(self) -> list[Tensor]:
        """Copies of the amaxes that this rank has recorded in the running step, for `end_step`."""
        return [newest.amaxes.clone() for state in self.states for newest in state.newest_amaxes()]

    def end_step(self, of_replicas: Sequence[Tensor] = ()) -> None:
        """End a training step, after the optimizer changed the weights: renew scales, forget the weights' FP8 copies.

        `of_replicas`: `newest_amaxes` before the update, reduced by maximum over other replicas of the model.
        Collective over `amax_group`: one all-reduce with delayed scaling, and with static scaling while it calibrates;
        purely local otherwise.
        """
        end_step([self], of_replicas)

    def discard_step(self) -> None:
        """Forget what a training step has recorded, since it is computed again. Purely local."""
        for state in self._states or ():
            state.discard_step()

    def invalidate_weights(self) -> None:
        """Forget what was derived from weights and scales: call when they changed without a step, as on loading."""
        for state in self.states:
            state.refresh()
        self.replan()
        self.forget_weights()

    def forget_weights(self, *, frozen: bool = True) -> None:
        """Forget the weights' FP8 copies: the next use quantizes them anew. `frozen`: also those of frozen weights."""
        for state in self._layers.values():
            if frozen or not state.frozen_weight:
                state.invalidate_weight()
        for group in self._groups_of_layers:
            group.invalidate_weight()

    @contextmanager
    def recording(self, flag: bool) -> Iterator[None]:
        """Within, amaxes are recorded for later scales (True) or not (False: evaluation).

        Those of weights too: a rank's amax is that of its shard until `end_step` reduces it, and after an evaluation
        the state may be saved, compared between replicas or reported before a step ends.
        """
        with recording_amaxes(self._recording, flag):
            yield

    # --- checkpoints ------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Tensor]:
        """What must be saved, as views that may be read into in place (then call `invalidate_weights`).

        For each FP8 tensor that is scaled by something remembered `fp8.<layer>.<input|weight|grad_output>.<what>`, see
        `DelayedState` and `StaticState`; and `fp8.noise_step` with stochastic rounding. Save after
        `end_step`: the values are then the same on every rank of `amax_group`.
        """
        return {name: tensor for state in self.states for name, tensor in state.state_dict().items()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Copy `state` into this state.

        ValueError, before anything is changed, unless names, dtypes and shapes are ours.
        """
        expected = self.state_dict()
        missing, unexpected = sorted(expected.keys() - state.keys()), sorted(state.keys() - expected.keys())
        if missing or unexpected:
            raise ValueError(
                f"FP8 state does not fit the recipe {self.recipe}: missing {_some(missing)}, unexpected "
                f"{_some(unexpected)}; load it with the recipe and layer patterns it was saved with"
            )
        for name, tensor in expected.items():
            if tensor.dtype != state[name].dtype:
                raise ValueError(f"FP8 state {name} is {state[name].dtype}, and must be {tensor.dtype}")
            if tensor.shape != state[name].shape:
                raise ValueError(
                    f"FP8 state {name} has shape {list(state[name].shape)}, this run's has {list(tensor.shape)}; "
                    "load it with the amax_history_len it was saved with"
                )
        for name, tensor in expected.items():
            tensor.copy_(state[name])
        self.invalidate_weights()


def _observed(quantizers: Quantizers, recorder: Recorder, layer: str) -> Quantizers:
    x, w, dy = (ObservedQuantizer(q, recorder, layer, k) for q, k in zip(quantizers, OPERANDS, strict=True))
    return Quantizers(x, w, dy)


def end_step(managers: Sequence[Fp8Manager], of_replicas: Sequence[Tensor] = ()) -> None:
    """`Fp8Manager.end_step` of several, with one all-reduce for each group."""
    states = [(state, manager.amax_group) for manager in managers for state in manager.states]
    end_step_of_states(states, of_replicas)
    for manager in managers:
        manager.replan()
        manager.forget_weights(frozen=False)


def _some(names: list[str]) -> str:
    if not names:
        return "nothing"
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
