"""Reproduce training's FP8 casts: which layers a run computes in FP8, and the data and scales of their weights.

`weight_casts` builds the model on torch's meta device in the same way as a run, with the run's FP8 manager. So the
model's parts and the run's patterns determine the FP8 layers, and each layer's quantizer casts its weights, with the
scales in the checkpoint. A weight is cast a few rows at a time.

A layer's matrix may consist of several weights, one below the other (q, k and v; gate and up). If the whole matrix has
one scale, all its weights are read to compute the amax.

Shapes: n rows and k columns of a weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor, nn

from megafp8.conversion.base import CheckpointSource
from megafp8.conversion.load import load_scales
from megafp8.conversion.model import build_on_meta
from megafp8.fp8 import BlockwiseScaling, CurrentScaling, Fp8Manager, RowwiseScaling
from megafp8.layers.linear_weights import linear_weights
from megafp8.linear.group_state import states_of
from megafp8.linear.state import LinearState
from megafp8.numerics import reference
from megafp8.numerics.formats import E4M3
from megafp8.numerics.quantize import amax
from megafp8.numerics.quantizers import Quantizer
from megafp8.numerics.recipes.base import Fp8Recipe, Fp8Tensor, RecipeQuantizer
from megafp8.numerics.sources import Plain
from megafp8.numerics.tensor import BLOCK_128X128, ROW, TENSOR, Granularity, ScaledTensor
from megafp8.parallel.sharding import spec_of
from megafp8.spec import ModelSpec

_CACHED_BYTES = 1 << 22


class LinearMatrix(NamedTuple):
    """Matrix of a linear layer, which consists of one or more weights, one below the other.

    Attributes:
        layer: Name of the layer.
        weights: Names of the weights, from top to bottom.
        rows: Rows of each weight.
        shard_rows: Rows of each weight on one tensor-parallel rank; the rank's shards are one below the other, too.
        shard_columns: Columns of the matrix on one tensor-parallel rank.
    """

    layer: str
    weights: tuple[str, ...]
    rows: tuple[int, ...]
    shard_rows: tuple[int, ...]
    shard_columns: int

    @classmethod
    def from_weight(cls, layer: str, weight: str, n: int, k: int) -> LinearMatrix:
        """Return the matrix of a layer that has a single weight `[n, k]`, on one rank."""
        return cls(layer, (weight,), (n,), (n,), k)


@dataclass(frozen=True)
class WeightCast:
    """Cast of a weight of `matrix` by `quantizer`.

    `scale` returns the scale of the matrix, if there is one scale for all of it. If necessary, it reads the checkpoint
    to compute the amax.
    """

    matrix: LinearMatrix
    quantizer: RecipeQuantizer
    scale: Callable[[], Tensor]

    @property
    def granularity(self) -> Granularity:
        """Granularity of the scales of the weight."""
        return self.quantizer.recipe.granularity("weight")

    def __call__(self, w_nk: Tensor) -> ScaledTensor:
        """Cast rows of the weight to E4M3. With block scales, the first row must be a multiple of 128."""
        if self.granularity is not TENSOR:
            return self.quantizer(Plain(w_nk.contiguous()), rowwise=True, columnwise=False).required_rowwise
        scale = self.scale()
        made = reference.cast_tensor(
            Plain(w_nk), scale, scale.reciprocal(), E4M3, rowwise=True, columnwise=False, newest_amax=None
        )
        return made.required_rowwise


@dataclass(frozen=True)
class LayerCasts:
    """Casts of a linear layer that is computed in FP8.

    Attributes:
        matrix: Matrix of the layer.
        trained: Cast of its weights in training, or the reason why it is unknown.
        input_scale_inv: Scale of the layer's input, if the recipe knows it before the input; otherwise None.
    """

    matrix: LinearMatrix
    trained: WeightCast | str
    input_scale_inv: Tensor | None = None


AMAX_RECIPES: Mapping[Granularity, Fp8Recipe] = {
    TENSOR: CurrentScaling(),
    ROW: RowwiseScaling(),
    BLOCK_128X128: BlockwiseScaling(power_of_two=False),
}
"""Recipes of the rule `amax`, by granularity. A scale is 448 / amax of the values that share it."""


def amax_cast(read: Callable[[str], Tensor], matrix: LinearMatrix, granularity: Granularity) -> WeightCast:
    """Return the cast of a weight of `matrix` by the rule `amax`. `read` returns a weight by its name."""
    tensor = Fp8Tensor(matrix.layer, "weight", None, None)
    return _cast(read, matrix, RecipeQuantizer(AMAX_RECIPES[granularity], tensor, torch.device("cpu")))


def weight_casts(
    source: CheckpointSource,
    model: ModelSpec,
    fp8: Fp8Manager,
    *,
    trained: str = "",
    tensor: int = 1,
    expert_tensor: int = 1,
) -> list[LayerCasts]:
    """Return the casts of the layers that the patterns and the recipe of `fp8` make FP8.

    Args:
        source: Checkpoint with the weights and scales.
        model: Config of the network.
        fp8: FP8 manager with which no layer has been built yet.
        trained: Reason why the recipe differs from the run's recipe; empty if it is the run's recipe, and `source` has
            its scales.
        tensor: Number of tensor-parallel ranks of the run.
        expert_tensor: Number of tensor-parallel ranks for the run's experts.

    Raises:
        ValueError: Scales are missing in `source`.
    """
    layers = [*_layers(build_on_meta(model, fp8, torch.float32, tensor, expert_tensor))]
    if not trained:
        fp8.materialize(torch.device("cpu"))
        # Scales of gradients are not needed.
        scales = {name: x for name, x in fp8.state_dict().items() if ".grad_output." not in name}
        load_scales(source, scales, ", so its FP8 weights are unknown; use the run's own checkpoint")
        fp8.invalidate_weights()
    casts = []
    for matrix, state in layers:
        if state.precision is not None:
            reason = trained or _why_unknown(state)
            cast = reason or _cast(source.read, matrix, state.own_quantizers.weight)
            casts.append(LayerCasts(matrix, cast, _input_scale_inv(state, trained)))
    return casts


def _layers(stage: nn.Module) -> Iterator[tuple[LinearMatrix, LinearState]]:
    """Yield the matrix and the state of each linear layer. Each expert has its own layers."""
    for weight, state in linear_weights(stage):
        states, shards = states_of(state), spec_of(weight).shards
        rows = weight.shape[0] // len(states)
        for i, layer in enumerate(states):
            parts = [shard for shard in shards if i * rows <= shard.row < (i + 1) * rows]
            yield (
                LinearMatrix(
                    layer.site.name,
                    tuple(f"model.{shard.name}" for shard in parts),
                    tuple(shard.global_shape[0] for shard in parts),
                    tuple(shard.shape[0] for shard in parts),
                    weight.shape[1],
                ),
                layer,
            )


def _why_unknown(state: LinearState) -> str:
    """Return why training's cast of a layer's weight is unknown; an empty string if it is known."""
    if state.plan.calibrating:
        return "its static scales are still being calibrated"
    quantizer = state.own_quantizers.weight
    if not isinstance(quantizer, RecipeQuantizer):
        return "the format cannot hold the scales of its recipe"
    granularity = quantizer.recipe.granularity("weight")
    if granularity not in AMAX_RECIPES:
        return f"its recipe has a scale for each {granularity.name}, which the format cannot hold"
    return ""


def _input_scale_inv(state: LinearState, trained: str) -> Tensor | None:
    if trained or state.plan.calibrating:
        return None
    quantizer = state.own_quantizers.input
    known = quantizer.known_scale if isinstance(quantizer, RecipeQuantizer) else None
    return None if known is None else known[1].clone()


def _cast(read: Callable[[str], Tensor], matrix: LinearMatrix, quantizer: Quantizer) -> WeightCast:
    assert isinstance(quantizer, RecipeQuantizer)
    quantizer = replace(quantizer, tensor=replace(quantizer.tensor, group=None))  # this process has the whole tensor

    @cache
    def scale() -> Tensor:
        if quantizer.known_scale is not None:
            return quantizer.known_scale[0]
        weights = map(read, matrix.weights)
        largest = [amax(rows) for w_nk in weights for rows in w_nk.split(rows_at_a_time(w_nk))]
        return quantizer.rule.scale(torch.stack(largest).amax())

    return WeightCast(matrix, quantizer, scale)


def rows_at_a_time(w_nk: Tensor) -> int:
    """Return a number of rows, a multiple of 128, such that their fp32 values fit into a processor's cache."""
    return max(1, _CACHED_BYTES // (512 * max(w_nk.shape[1], 1))) * 128
