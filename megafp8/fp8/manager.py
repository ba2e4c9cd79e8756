"""From a recipe to the operation of every linear layer, and the FP8 state of the job.

A model asks the manager for each layer's `LinearOp` by the layer's global name and never learns the precision. Once the
model is built, `materialize` allocates what the recipe remembers for all layers of this rank together; a training loop
then calls `end_step` after every optimizer step, and nothing else.

Names are global ("layers.3.attention.qkv" counts layers over all pipeline stages), so that patterns mean the same
everywhere and state saved under one layout loads under another.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megafp8.fp8.delayed import DelayedState
from megafp8.fp8.formats import Format
from megafp8.fp8.gemm import Fp8Gemm, GemmBackend
from megafp8.fp8.linear import Fp8Linear, LinearOp, Quantizers, high_precision_linear
from megafp8.fp8.quantizers import BlockQuantizer, CurrentQuantizer, DelayedQuantizer, RowQuantizer
from megafp8.fp8.recipe import (
    BlockwiseScaling,
    CurrentScaling,
    DelayedScaling,
    Fp8Recipe,
    PerGemm,
    RowwiseScaling,
)


@dataclass(frozen=True)
class _Layer:
    """An FP8 layer and the groups over which its operands are sharded; None where an operand is whole."""

    op: Fp8Linear
    input_group: ProcessGroup | None
    weight_group: ProcessGroup | None
    grad_output_group: ProcessGroup | None


class Fp8Manager:
    """Hands out linear operations and owns their FP8 state.

    `recipe`: None leaves every layer in high precision. `amax_group`: the ranks that run the same layers
    (tensor × context × data), over which delayed scaling reduces its amaxes; None for one rank. `include`, `exclude`:
    shell-style patterns of layer names; a layer is FP8 if some of the first and none of the second match.
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
    ) -> None:
        self.recipe = recipe
        self.amax_group = amax_group
        self.include, self.exclude = include, exclude
        self.gemm_backend, self.gemm_autotune = gemm_backend, gemm_autotune
        self._layers: dict[str, _Layer] = {}
        self._delayed: DelayedState | None = None
        self._recorders: list[DelayedQuantizer] = []  # of activations and gradients

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
        if self.recipe is None or not fp8 or not self._selected(name):
            return high_precision_linear
        op = Fp8Linear(
            high_precision=PerGemm(*self.recipe.override_linear_precision),
            fast_accum=PerGemm(*self.recipe.use_fast_accum),
        )
        self._layers[name] = _Layer(
            op,
            input_group=tp_group if input_sharded else None,
            weight_group=tp_group,
            grad_output_group=tp_group if grad_output_sharded else None,
        )
        return op

    def _selected(self, name: str) -> bool:
        included = any(fnmatchcase(name, pattern) for pattern in self.include)
        return included and not any(fnmatchcase(name, pattern) for pattern in self.exclude)

    def check_patterns(self, all_layer_names: Sequence[str]) -> None:
        """ValueError if a pattern matches none of the whole model's layer names (of all pipeline stages)."""
        for field, patterns in (("include", self.include), ("exclude", self.exclude)):
            for pattern in patterns:
                if not any(fnmatchcase(name, pattern) for name in all_layer_names):
                    raise ValueError(_no_match(field, pattern, all_layer_names))

    def materialize(self, device: torch.device) -> None:
        """Allocate the state of all layers on `device` and make them usable. Call once, when the model is built."""
        assert self._delayed is None, "materialize has been called already"
        recipe = self.recipe
        if recipe is None:
            return
        gemm = Fp8Gemm(self.gemm_backend, device, autotune=self.gemm_autotune)
        if isinstance(recipe, DelayedScaling):
            self._delayed = DelayedState(recipe, _tensor_formats(recipe, self._layers), device)
            quantizers = self._delayed.quantizers()
            for name, layer in self._layers.items():
                x, w, dy = (quantizers[f"{name}.{operand}"] for operand in Quantizers._fields)
                layer.op.set_up(Quantizers(x, w, dy), gemm)
                self._recorders += [x, dy]
        else:
            for layer in self._layers.values():
                layer.op.set_up(_stateless_quantizers(recipe, layer), gemm)

    # --- training ---------------------------------------------------------------------------------------------------

    def end_step(self) -> None:
        """End a training step, after the optimizer changed the weights: renew scales, forget the weights' FP8 copies.

        Collective over `amax_group` (one all-reduce) with delayed scaling; purely local otherwise.
        """
        if self._delayed is not None:
            self._delayed.end_step(self.amax_group)
        self.invalidate_weights()

    def invalidate_weights(self) -> None:
        """Forget what was derived from weights and scales: call when they changed without a step, as on loading."""
        if self._delayed is not None:
            self._delayed.invert_scales()
        for layer in self._layers.values():
            layer.op.invalidate_weight()

    @contextmanager
    def recording(self, flag: bool) -> Iterator[None]:
        """Within, amaxes of activations and gradients are noted for later scales (True) or not (False: evaluation).

        A weight's amax is noted either way: whoever quantizes it first in a step sees the same weight.
        """
        before = [quantizer.recording for quantizer in self._recorders]
        for quantizer in self._recorders:
            quantizer.recording = flag
        try:
            yield
        finally:
            for quantizer, value in zip(self._recorders, before, strict=True):
                quantizer.recording = value

    # --- checkpoints ------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Tensor]:
        """What must be saved, as views that may be read into in place (then call `invalidate_weights`).

        For each FP8 tensor `fp8.<layer>.<input|weight|grad_output>.amax_history` and `.scale`; empty unless scaling is
        delayed. Save after `end_step`: the values are then the same on every rank of `amax_group`.
        """
        return {} if self._delayed is None else self._delayed.state_dict()

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


def _tensor_formats(recipe: DelayedScaling, layers: Iterable[str]) -> dict[str, Format]:
    forward, gradient = recipe.forward_format, recipe.gradient_format
    operands = Quantizers._fields
    return {
        f"{layer}.{operand}": gradient if operand == "grad_output" else forward
        for layer in layers
        for operand in operands
    }


def _stateless_quantizers(recipe: Fp8Recipe, layer: _Layer) -> Quantizers:
    """Quantizers that need nothing but the tensor at hand."""
    forward, gradient = recipe.forward_format, recipe.gradient_format
    if isinstance(recipe, CurrentScaling):
        current: dict[str, Any] = {"eps": recipe.amax_epsilon, "power_of_two": recipe.power_of_two}
        return Quantizers(
            CurrentQuantizer(forward, layer.input_group, **current),
            CurrentQuantizer(forward, layer.weight_group, **current),
            CurrentQuantizer(gradient, layer.grad_output_group, **current),
        )
    if isinstance(recipe, RowwiseScaling):
        rowwise: dict[str, Any] = {"eps": recipe.amax_epsilon, "power_of_two": recipe.power_of_two}
        x_and_w = RowQuantizer(forward, **rowwise)
        return Quantizers(x_and_w, x_and_w, RowQuantizer(gradient, **rowwise))
    assert isinstance(recipe, BlockwiseScaling)
    blocks: dict[str, Any] = {"eps": recipe.amax_epsilon, "power_of_two": recipe.power_of_two}
    return Quantizers(
        BlockQuantizer(forward, square=False, **blocks),
        BlockQuantizer(forward, square=True, **blocks),
        BlockQuantizer(gradient, square=False, **blocks),
    )


def _no_match(field: str, pattern: str, names: Sequence[str]) -> str:
    nearest = difflib.get_close_matches(pattern, names, n=3, cutoff=0.0)
    if not nearest:
        return f"FP8 {field} pattern {pattern!r} matches no layer: the model has no linear layers"
    example = re.sub(r"(?<=\.)\d+(?=\.)", "*", nearest[0])
    return (
        f"FP8 {field} pattern {pattern!r} matches no layer; the nearest names are {', '.join(nearest)}, and "
        f"{example!r} would work"
    )


def _some(names: list[str]) -> str:
    if not names:
        return "nothing"
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
