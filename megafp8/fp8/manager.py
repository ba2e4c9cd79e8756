"""From a recipe to the operation of every linear layer, and the FP8 state of the job.

A model asks the manager for each layer's `LinearOp` by the layer's global name and never learns the precision. Once the
model is built, `materialize` allocates what the recipe remembers for all layers of this rank together; a training loop
then calls `end_step` after every optimizer step, and nothing else (and `begin_step` before it, where a `Recorder` is to
see what the layers quantize).

Names are global ("layers.3.attention.qkv" counts layers over all pipeline stages), so that patterns mean the same
everywhere and state saved under one layout loads under another.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megafp8.data_parallel.fp8_weight_shards import WeightShard, WeightShards
from megafp8.fp8.calibration import Calibration
from megafp8.fp8.gemm.dispatch import Fp8Gemm, GemmBackend
from megafp8.fp8.health import Recorder
from megafp8.fp8.quantizers import AmaxRecording, Calibrating, Quantizer
from megafp8.fp8.recipes.base import Fp8Recipe, Fp8Tensor, PerGemm, State, by_recipe, no_match
from megafp8.fp8.smoothing import SmoothingState
from megafp8.fp8.stochastic_rounding import NoiseClock
from megafp8.fp8.tensor import TENSOR, QuantizedTensor
from megafp8.ops.linear import Fp8Linear, LinearOp, Quantizers, high_precision_linear


@dataclass(frozen=True)
class _Layer:
    """An FP8 layer and, by operand, the groups over which it is sharded; None where an operand is whole."""

    op: Fp8Linear
    groups: dict[str, ProcessGroup | None]


class ContextGroups(NamedTuple):
    """Where the tokens of a micro-batch are cut over ranks: those that hold the others of the same sequences, and
    together with these all tensor-parallel ranks of each."""

    context: ProcessGroup
    tensor_context: ProcessGroup


class Fp8Manager:
    """Hands out linear operations and owns their FP8 state.

    `recipe`: None leaves every layer in high precision. `amax_group`: the ranks that run the same layers
    (tensor × context × data), over which delayed scaling reduces its amaxes; None for one rank. `include`, `exclude`:
    shell-style patterns of layer names; a layer is FP8 if some of the first and none of the second match. `recorder`:
    looks at what FP8 layers quantize, in the steps it samples. `seed` and `data_parallel`, this rank and how many there
    are, decide the noise of stochastic rounding. `context`: None where each rank has whole sequences; an amax is that
    of a whole micro-batch, however its tokens are cut.
    `smooth_swiglu`: smooth the inputs that `smooth_input` names (`megafp8.fp8.smoothing`).
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
        smooth_swiglu: bool = False,
    ) -> None:
        self.recipe = recipe
        self.amax_group = amax_group
        self.include, self.exclude = include, exclude
        self.gemm_backend, self.gemm_autotune = gemm_backend, gemm_autotune
        self.recorder = recorder
        self.seed, self.data_parallel = seed, data_parallel
        self.context = context
        self._left_out: frozenset[str] = frozenset()
        self.smooth_swiglu = smooth_swiglu
        self._layers: dict[str, _Layer] = {}
        self._smoothed: dict[str, int] = {}  # layers, and the channels of their input over all ranks
        self._states: list[State] | None = None
        self._noting: list[AmaxRecording] = []  # quantizers of activations and gradients
        self._shares: WeightShards | None = None

    # --- building ---------------------------------------------------------------------------------------------------

    def linear_op(
        self,
        name: str,
        *,
        tp_group: ProcessGroup | None,
        input_sharded: bool,
        grad_output_sharded: bool,
        fp8: bool = True,
    ) -> LinearOp:
        """The operation of the layer `name`; call before `materialize`, once a layer.

        `input_sharded`, `grad_output_sharded`: this rank holds only its slice, over `tp_group`, of what is one tensor.
        A weight always is a slice where the group has several ranks. `fp8=False` asks for high precision.
        """
        assert name not in self._layers, f"layer {name} has its linear_op already"
        if self.recipe is None or not fp8 or not self.selects(name):
            return high_precision_linear
        op = Fp8Linear(
            high_precision=PerGemm(*self.recipe.override_linear_precision),
            fast_accum=PerGemm(*self.recipe.use_fast_accum),
        )
        slices = None if tp_group is None else self.slices(tp_group)
        self._layers[name] = _Layer(
            op,
            {
                "input": slices if input_sharded else self.token_group,
                "weight": tp_group,
                "grad_output": slices if grad_output_sharded else self.token_group,
            },
        )
        return op

    @property
    def token_group(self) -> ProcessGroup | None:
        """The ranks over which the tokens of whole activations are cut; None where this rank has them all."""
        return None if self.context is None else self.context.context

    def slices(self, tp_group: ProcessGroup) -> ProcessGroup:
        """The ranks that hold slices of an activation which is cut over `tp_group`, and over `token_group`."""
        return tp_group if self.context is None else self.context.tensor_context

    def smooth_input(self, name: str, channels: int) -> None:
        """Let SwiGLU in front of the layer `name`, the only one to make its input, smooth it; `channels` of all ranks.

        Call after `linear_op` and before `materialize`. Without effect unless `smooth_swiglu`, for layers in high
        precision, and where factors are finer than the tensor: outliers harm only their neighbours there.
        """
        if not self.smooth_swiglu or self.recipe is None or name not in self._layers:
            return
        operands = self.recipe.operands(name)
        if operands is not None and operands.input.granularity("input") is TENSOR:
            self._smoothed[name] = channels

    def selects(self, name: str) -> bool:
        """Whether the layer `name` is to be FP8."""
        included = any(fnmatchcase(name, pattern) for pattern in self.include)
        excluded = any(fnmatchcase(name, pattern) for pattern in self.exclude)
        chosen = included and not excluded and name not in self._left_out
        return chosen and self.recipe is not None and self.recipe.operands(name) is not None

    def leave_out(self, names: Collection[str]) -> None:
        """Keep the layers `names` in high precision whatever the patterns say; call before their `linear_op`."""
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
        clock = NoiseClock(self.seed, *self.data_parallel)
        for recipe, operands in by_recipe(self.recipe, self._layers).items():
            tensors = [
                Fp8Tensor(
                    layer,
                    operand,
                    self._layers[layer].groups[operand],
                    None if operand == "weight" else self.token_group,
                )
                for layer, operand in operands
            ]
            made, state = recipe.build(tensors, device, clock)
            quantizers |= made
            if state is not None and state not in self._states:
                self._states.append(state)
        gemm = Fp8Gemm(self.gemm_backend, device, autotune=self.gemm_autotune)
        for name, layer in self._layers.items():
            x, w, dy = (quantizers[f"{name}.{operand}"] for operand in Quantizers._fields)
            layer.op.set_up(Quantizers(x, w, dy), gemm)
            self._noting += [q for q in (x, dy) if isinstance(q, AmaxRecording)]
            if any(isinstance(q, Calibrating) for q in (x, w, dy)):
                layer.op.fallback = Calibration(layer.op.quantizers)
        if self._smoothed:
            self._states.append(self._smoothing(device))
        if self.recorder is not None:
            for name, layer in self._layers.items():
                layer.op.show_to(self.recorder, name)

    def _smoothing(self, device: torch.device) -> SmoothingState:
        """The state of the layers whose input is smoothed, which are told."""
        (channels,) = set(self._smoothed.values())
        state = SmoothingState({name: self._layers[name].groups["weight"] for name in self._smoothed}, channels, device)
        for name, scales in state.channel_scales.items():
            self._layers[name].op.smoothing = scales
            self._noting.append(scales)
        return state

    def shard_weights(self, shares: Sequence[WeightShard], device: torch.device) -> None:
        """Let the weights of `shares` be codes that ranks cast in shares, by `cast_weights`, and gather."""
        self._shares = WeightShards(shares, self.amax_group, device)

    # --- training ---------------------------------------------------------------------------------------------------

    def begin_step(self, step: int) -> bool:
        """Begin training step `step`, counted from 1; whether the recorder samples it, until its own `end_step`."""
        sampled = self.recorder is not None and self.recorder.begin_step(step)
        if sampled:  # an evaluation may have left copies of the weights, and then nobody would quantize them
            self.forget_weights()
        return sampled

    def end_step(self) -> None:
        """End a training step, after the optimizer changed the weights: renew scales, forget the weights' FP8 copies.

        Collective over `amax_group`: one all-reduce with delayed scaling, with static scaling while it calibrates, and
        for smoothing; purely local otherwise.
        """
        if self._shares is not None:
            self._shares.note_amaxes()
        for state in self._states or ():
            state.end_step(self.amax_group)
        self.forget_weights()

    def cast_weights(self) -> None:
        """Cast this rank's shares of the weights, where they are shared; they are to be gathered then.

        Call it when weights or scales have changed: after `end_step`, or `invalidate_weights`. Collective over
        `amax_group`: one all-reduce where a recipe scales weights by their own amax.
        """
        if self._shares is not None:
            self._shares.cast()

    def invalidate_weights(self) -> None:
        """Forget what was derived from weights and scales: call when they changed without a step, as on loading."""
        for state in self._states or ():
            state.refresh()
        self.forget_weights()

    def forget_weights(self) -> None:
        """Forget the weights' FP8 copies: whoever needs them next quantizes anew."""
        for layer in self._layers.values():
            layer.op.invalidate_weight()

    @property
    def kept_weights(self) -> list[QuantizedTensor | None]:
        """The weights' FP8 copies as the layers hold them now, None where there are none.

        Settable, for who has copies of the weights as they are: a CUDA graph has its own.
        """
        return [layer.op.kept_weight for layer in self._layers.values()]

    @kept_weights.setter
    def kept_weights(self, copies: Sequence[QuantizedTensor | None]) -> None:
        for layer, copy in zip(self._layers.values(), copies, strict=True):
            layer.op.kept_weight = copy

    @contextmanager
    def recording(self, flag: bool) -> Iterator[None]:
        """Within, amaxes of activations and gradients are noted for later scales (True) or not (False: evaluation).

        A weight's amax is noted either way: whoever quantizes it first in a step sees the same weight.
        """
        before = [quantizer.recording for quantizer in self._noting]
        for quantizer in self._noting:
            quantizer.recording = flag
        try:
            yield
        finally:
            for quantizer, value in zip(self._noting, before, strict=True):
                quantizer.recording = value

    # --- checkpoints ------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Tensor]:
        """What must be saved, as views that may be read into in place (then call `invalidate_weights`).

        For each FP8 tensor that is scaled by something remembered `fp8.<layer>.<input|weight|grad_output>.<what>`, see
        `DelayedState`, `StaticState` and `SmoothingState`; and `fp8.noise_step` with stochastic rounding. Save after
        `end_step`: the values are then the same on every rank of `amax_group`.
        """
        return {name: tensor for state in self._states or () for name, tensor in state.state_dict().items()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Copy `state` into this state. ValueError, before anything is changed, unless names and shapes are ours."""
        own = self.state_dict()
        missing, unexpected = sorted(own.keys() - state.keys()), sorted(state.keys() - own.keys())
        if missing or unexpected:
            raise ValueError(
                f"FP8 state does not fit the recipe {self.recipe}: missing {_some(missing)}, unexpected "
                f"{_some(unexpected)}; load it with the recipe and layer patterns it was saved with"
            )
        for name, tensor in own.items():
            if tensor.shape != state[name].shape:
                raise ValueError(
                    f"FP8 state {name} has shape {list(state[name].shape)}, this run's has {list(tensor.shape)}; "
                    "load it with the amax_history_len it was saved with"
                )
        for name, tensor in own.items():
            tensor.copy_(state[name])
        self.invalidate_weights()


def _some(names: list[str]) -> str:
    if not names:
        return "nothing"
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
