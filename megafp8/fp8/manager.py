"""FP8 manager: plans every linear layer of a model and owns the model's FP8 state.

When a model constructs a linear layer, it asks the manager for the layer's `LinearState`, which contains the layer's
plan. Once the model is built, `materialize` allocates the state that the recipe keeps between steps, for all layers of
this rank together. A training loop calls `end_step` after every optimizer step. If a `Recorder` samples the quantized
tensors, the loop also calls `begin_step` before each step.

Names are global: "layers.3.attention.qkv" counts layers over all pipeline stages. Patterns therefore mean the same on
every rank, and state that was saved under one layout loads under another.
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
    """Return the properties of `recipe` for `operand` that a layer's plan depends on."""
    capabilities, granularity = recipe.capabilities, recipe.granularity(operand)
    return Quantization(
        recipe.name, granularity is TENSOR, capabilities.shard_alignment, capabilities.per_tensor,
        blocks=granularity is BLOCK_1X128,
    )  # fmt: skip


class ContextGroups(NamedTuple):
    """Process groups of a model that shards the tokens of a sequence over ranks (context parallelism).

    Attributes:
        context: Ranks that hold the tokens of the same sequences.
        tensor_context: All tensor-parallel ranks of these ranks.
    """

    context: ProcessGroup
    tensor_context: ProcessGroup


class Fp8Manager:
    """Planner of linear layers and owner of their FP8 state.

    Args:
        recipe: FP8 recipe; None leaves every layer in high precision.
        amax_group: Ranks that run the same layers (tensor × context × data). Delayed scaling reduces amaxes over them.
            None means one rank.
        include: Shell-style patterns of layer names. A layer is FP8 if at least one of them matches.
        exclude: Patterns of layers that stay in high precision even if `include` matches.
        gemm_backend: Backend of FP8 GEMMs, as `fp8.gemm_backend` in configs.
        gemm_autotune: Whether the backend measures its GEMM algorithms to select the fastest.
        recorder: Recorder of statistics about the quantized tensors, in the steps that it samples.
        seed: Seed of the noise of stochastic rounding.
        data_parallel: This data-parallel rank and the number of data-parallel ranks; they also determine the noise.
        context: Groups of context parallelism, or None if every rank has whole sequences. An amax always covers a
            whole micro-batch, however its tokens are sharded.
        watches_weights: Whether layers detect changes of their weights themselves.
        batch_invariant: Whether the model is batch invariant (`megafp8.numerics.batch_invariance`).
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
        self._layers: dict[str, LinearState] = {}  # only FP8 layers
        self._groups_of_layers: list[GroupState] = []
        self._amax_groups: dict[str, ProcessGroup] = {}  # only layers that reduce over other ranks than `amax_group`
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
        """Return the state of the layer at `site`, including its plan. Call it once per layer, before `materialize`.

        Args:
            site: Description of the layer.
            tp_group: Ranks over which the layer is sharded.
            amax_group: Ranks that run the layer, if they are not the model's `amax_group`.
            expert_rows: For an expert's layer, the ranks that hold other rows or columns of the same activations, or
                None if each rank has all rows.
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
        """Combine the states of equal layers that share one weight parameter (experts) into one state."""
        group = GroupState(states)
        self._groups_of_layers.append(group)
        return group

    def gathers_one_weight(self, names: Iterable[str]) -> bool:
        """Return whether the weights of the layers `names`, which form one parameter, can be gathered in FP8."""
        return not any(self.why_not(name) or not_gatherable_weight(self._precision(name)) for name in names)

    def unbuilt(self) -> Fp8Manager:
        """Return a manager for one rank that makes the same plans as this one, but has no layers yet."""
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
        """States of all layers, in the order in which they were built."""
        return list(self._all_layers.values())

    @property
    def groups(self) -> Sequence[GroupState]:
        """Combined states of equal layers that share one weight parameter."""
        return self._groups_of_layers

    @property
    def plans(self) -> list[LinearPlan]:
        """Plans of all layers, in the order in which they were built."""
        return [state.plan for state in self.layers]

    def _precision(self, name: str) -> LinearPrecision:
        """Return how the recipe quantizes the FP8 layer `name`, and which GEMMs stay in high precision."""
        assert self.recipe is not None
        operands = self.recipe.operands(name)
        assert operands is not None
        x, w, dy = (quantization(recipe, operand) for recipe, operand in zip(operands, OPERANDS, strict=True))
        high, fast = self.recipe.override_linear_precision, self.recipe.use_fast_accum
        return LinearPrecision(x, w, dy, PerGemm(*high), PerGemm(*fast))

    def _groups(self, state: LinearState) -> dict[str, ProcessGroup | None]:
        """Return, by operand, the ranks over which the tensor is sharded; None if every rank has the whole tensor."""
        site, sharded, tokens = state.site, state.sharded_group, state.token_group
        several = site.tensor_parallel > 1
        return {
            "input": sharded if several and site.parallel == "row" else tokens,
            "weight": state.group,
            "grad_output": sharded if several and site.parallel == "column" else tokens,
        }

    @property
    def token_group(self) -> ProcessGroup | None:
        """Ranks over which tokens are sharded by context parallelism, or None if this rank has all tokens."""
        return None if self.context is None else self.context.context

    def sharded_group(self, tp_group: ProcessGroup) -> ProcessGroup:
        """Return the ranks that hold slices of an activation sharded over both `tp_group` and `token_group`."""
        return tp_group if self.context is None else self.context.tensor_context

    def selects(self, name: str) -> bool:
        """Return whether the layer `name` runs in FP8."""
        return not self.why_not(name)

    def why_not(self, name: str) -> str:
        """Return why the layer `name` does not run in FP8; empty if it does."""
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
        """Keep the layers `names` in high precision, whatever the patterns say. Call it before building layers."""
        assert not self._layers
        self._left_out = frozenset(names)

    def check_patterns(self, all_layer_names: Sequence[str]) -> None:
        """Raise ValueError unless every pattern, including the recipe's patterns, matches a layer of the whole model.

        `all_layer_names` are the layers of all pipeline stages.
        """
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
        """Allocate the state of all layers on `device`. Call it once, when all layers have been built."""
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
        """State that the recipes keep between steps."""
        return self._states or ()

    def replan(self) -> None:
        """Update the plans of layers that have ended or begun to calibrate."""
        for state in self._layers.values():
            state.replan_if_calibrated()

    # --- training ---------------------------------------------------------------------------------------------------

    def begin_step(self, step: int) -> bool:
        """Begin training step `step`, counted from 1, and return whether the recorder samples it.

        The recorder samples until its `end_step` is called. This method drops FP8 weight copies that an evaluation may
        have left, so that each step quantizes the weights itself. Copies of frozen weights are dropped only in sampled
        steps.
        """
        sampled = self.recorder is not None and self.recorder.begin_step(step)
        self.forget_weights(frozen=sampled)
        return sampled

    @property
    def calibrating(self) -> bool:
        """Whether a layer still calibrates its static scales, in high precision."""
        return any(plan.calibrating for plan in self.plans)

    def newest_amaxes(self) -> list[Tensor]:
        """Return copies of the amaxes that this rank has recorded in the current step, for `end_step`."""
        return [newest.amaxes.clone() for state in self.states for newest in state.newest_amaxes()]

    def end_step(self, replica_amaxes: Sequence[Tensor] = ()) -> None:
        """End a training step after the optimizer step: update scales, and drop the FP8 copies of weights.

        Delayed scaling, and static scaling while it calibrates, all-reduce amaxes over `amax_group` once; all ranks
        must then call this method. Other recipes do not communicate.

        Args:
            replica_amaxes: Results of `newest_amaxes` before the update, reduced by maximum over other replicas of the
                model.
        """
        end_step([self], replica_amaxes)

    def discard_step(self) -> None:
        """Discard everything that the current step has recorded, because the step is repeated. Does not communicate."""
        for state in self._states or ():
            state.discard_step()

    def invalidate_weights(self) -> None:
        """Drop everything derived from weights and scales. Call it if they changed outside a step, such as on loading.

        Plans and FP8 weight copies are derived again when they are needed.
        """
        for state in self.states:
            state.refresh()
        self.replan()
        self.forget_weights()

    def forget_weights(self, *, frozen: bool = True) -> None:
        """Drop the FP8 copies of all weights, or with `frozen=False` of all weights that are trained.

        The next use quantizes the weights again.
        """
        for state in self._layers.values():
            if frozen or not state.frozen_weight:
                state.invalidate_weight()
        for group in self._groups_of_layers:
            group.invalidate_weight()

    @contextmanager
    def recording(self, flag: bool) -> Iterator[None]:
        """Turn the recording of amaxes for later scales on (True) or off (False, for evaluation) within the context.

        In evaluation, amaxes of weights are not recorded either. A rank's amax covers only its shard until `end_step`
        reduces it, and after an evaluation the state may be saved, compared between replicas or reported before a step
        ends.
        """
        with recording_amaxes(self._recording, flag):
            yield

    # --- checkpoints ------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state to save, as views. They may be overwritten in place; then call `invalidate_weights`.

        The keys are `fp8.<layer>.<input|weight|grad_output>.<field>` for each tensor with delayed or static scales (see
        `DelayedState` and `StaticState`), and `fp8.noise_step` with stochastic rounding. Save after `end_step`: the
        values are then equal on all ranks of `amax_group`.
        """
        return {name: tensor for state in self.states for name, tensor in state.state_dict().items()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Copy the values of `state` into this manager's state.

        Raises:
            ValueError: Names, dtypes or shapes do not match. Nothing has been changed then.
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
                raise ValueError(f"FP8 state {name} is {state[name].dtype}; it must be {tensor.dtype}")
            if tensor.shape != state[name].shape:
                raise ValueError(
                    f"FP8 state {name} has shape {list(state[name].shape)}, but this run needs {list(tensor.shape)}; "
                    "load it with the amax_history_len it was saved with"
                )
        for name, tensor in expected.items():
            tensor.copy_(state[name])
        self.invalidate_weights()


def _observed(quantizers: Quantizers, recorder: Recorder, layer: str) -> Quantizers:
    x, w, dy = (ObservedQuantizer(q, recorder, layer, k) for q, k in zip(quantizers, OPERANDS, strict=True))
    return Quantizers(x, w, dy)


def end_step(managers: Sequence[Fp8Manager], replica_amaxes: Sequence[Tensor] = ()) -> None:
    """End the step of several managers, with one all-reduce for each process group. See `Fp8Manager.end_step`."""
    states = [(state, manager.amax_group) for manager in managers for state in manager.states]
    end_step_of_states(states, replica_amaxes)
    for manager in managers:
        manager.replan()
        manager.forget_weights(frozen=False)


def _some(names: list[str]) -> str:
    if not names:
        return "nothing"
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
