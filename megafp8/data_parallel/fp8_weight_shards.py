"""FP8 weights under ZeRO and FSDP: each rank quantizes the shard it updates, and FP8 data is gathered.

Where data-parallel ranks each update a shard of the weights, every rank gathers all of them after the step and then
quantizes all of them. Quantized first, half the bytes travel, each weight is quantized once and not on every rank, and
only the owners of its masters have its values: a weight of 2 bytes and two FP8 copies becomes the two copies.

A shard is a flat run of a weight's elements that begins and ends anywhere in a row. With one scale per tensor that does
not matter: quantization is elementwise once the scale is known. It is known beforehand where it comes from earlier
steps (delayed) or is fixed (static). Where it comes from the tensor itself (current, and delayed in its first step),
each rank takes the amaxes of its shards of all weights, and one all-reduce of that vector over all ranks that run the
same layers makes them those of the weights: tensor-parallel slices and data-parallel shards are both parts of a whole.

Finer scales do not fit. Blocks of 128×128 would straddle shards and need an amax each; with a scale per row or per
block of it, columnwise data is another quantization of the same values, so that twice the data would travel, as many
bytes as in bf16. Those recipes gather values.

The data is bit for bit that of the whole weight quantized: the owner rounds the fp32 master to the model's dtype first,
since that is what would have been gathered. The amax for delayed scaling is recorded likewise, in the step that
computes with the data; `end_step` reduces it over all ranks anyway.

The transposed copy for dgrad is made from the gathered data by the first use (`LinearState.fp8_weight`).

Shapes: t weights; n outputs, k inputs of one; f elements of this rank's shard of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megafp8.distributed.collectives import all_reduce
from megafp8.fp8.health import ObservedQuantizer
from megafp8.linear.state import LinearState
from megafp8.numerics.formats import Format
from megafp8.numerics.quantizers import Quantizer, casts
from megafp8.numerics.recipes.base import RecipeQuantizer
from megafp8.numerics.sources import Plain
from megafp8.numerics.tensor import ScaledTensor


class WeightShard(NamedTuple):
    """This rank's shard of a weight that is gathered in FP8.

    `fp8_data_nk`: the memory of the whole weight's FP8 data; under FSDP that of this rank's rows, gathered elsewhere.
    `master_f`: the fp32 masters, live, of this rank's elements from `start` on, row by row; perhaps none. `dtype`: the
    model's.
    """

    state: LinearState
    fp8_data_nk: Tensor
    start: int
    master_f: Tensor
    dtype: torch.dtype

    def source(self) -> Plain:
        """The shard in the model's dtype, its columns divided where the layer's input is smoothed.

        A matrix because kernels take matrices; its shape means nothing.
        """
        x_f, k = self.master_f.to(self.dtype), self.fp8_data_nk.shape[1]
        if self.state.smoothing is not None:
            before = self.start % k
            rows = -(-(before + len(x_f)) // k)
            column_scale_f = self.state.smoothing.scale_inv_f.repeat(rows)[before : before + len(x_f)]
            x_f = x_f.to(torch.promote_types(x_f.dtype, torch.float32)) * column_scale_f
        return Plain(x_f.view(-1, math.gcd(len(x_f), 1024)))


def per_tensor_quantizer(quantizer: Quantizer) -> RecipeQuantizer | None:
    """The recipe's quantizer, without an observer around it, if it has one scale per tensor."""
    inner = quantizer.quantizer if isinstance(quantizer, ObservedQuantizer) else quantizer
    return inner if isinstance(inner, RecipeQuantizer) and inner.per_tensor else None


def gathered_format(state: LinearState) -> Format | None:
    """The format in which the layer's weight is gathered; None where values are."""
    if state.plan.weight not in ("zero fp8", "fsdp fp8"):
        return None
    quantizer = per_tensor_quantizer(state.quantizers.weight)
    assert quantizer is not None
    return quantizer.fmt


class _Weight(NamedTuple):
    shard: WeightShard
    quantizer: RecipeQuantizer


class WeightShards:
    """This rank's shards of all weights that are gathered in FP8; `group`: all ranks with shards of the same weights.

    From the first `quantize` on the layers compute with the FP8 data, which is to be gathered after each.
    """

    def __init__(self, shards: Sequence[WeightShard], group: ProcessGroup | None, device: torch.device) -> None:
        self._group = group
        self._weights: list[_Weight] = []
        for shard in shards:
            quantizer = per_tensor_quantizer(shard.state.quantizers.weight)
            assert quantizer is not None, "a weight with several scales"
            self._weights.append(_Weight(shard, quantizer))
        # Sorted, so that one call makes the scales of all with one rule.
        self._weights.sort(key=lambda weight: weight.quantizer.rule)
        t = len(shards)
        self._amax_t = torch.zeros(t, device=device)
        self._scale_t = torch.ones(t, device=device)
        # Four apart: cuBLASLt wants a scale at a multiple of 16 bytes.
        self._scale_inv_t = torch.ones(t, 4, device=device)[:, 0]

    @torch.no_grad()
    def quantize(self) -> None:
        """Quantize this rank's shards of the masters as they are. One all-reduce where scales need an amax."""
        self._amax_t.zero_()
        unknown = [i for i, weight in enumerate(self._weights) if weight.quantizer.known_scale is None]
        for i in unknown:
            source = self._weights[i].shard.source()
            self._amax_t[i].copy_(casts(source).amax(source))
        if unknown:
            all_reduce(self._amax_t, self._group, "max")
            self._make_scales()
        for weight, *own, amax in zip(self._weights, self._scale_t, self._scale_inv_t, self._amax_t):
            scale, scale_inv = weight.quantizer.known_scale or own
            shard, source = weight.shard, weight.shard.source()
            made = casts(source).cast_tensor(
                source, scale, scale_inv, weight.quantizer.fmt, rowwise=True, columnwise=False, newest_amax=amax
            )
            f = len(shard.master_f)
            shard.fp8_data_nk.view(torch.uint8).view(-1)[shard.start : shard.start + f] = _bytes(made.required_rowwise)
            shard.state.set_gathered_weight(ScaledTensor(shard.fp8_data_nk, scale_inv))

    def _make_scales(self) -> None:
        """Compute the scales of all weights from their amaxes."""
        start = 0
        for rule, weights in groupby(self._weights, key=lambda weight: weight.quantizer.rule):
            part = slice(start, start := start + len(list(weights)))
            self._scale_t[part] = rule.scale(self._amax_t[part])
        self._scale_inv_t.copy_(self._scale_t.reciprocal())

    @torch.no_grad()
    def record_amaxes(self) -> None:
        """Record the amaxes of the weights of this step for delayed scaling. Call it before `Fp8Manager.end_step`."""
        recorded = [(weight.quantizer.recorded_amax, amax) for weight, amax in zip(self._weights, self._amax_t)]
        pairs = [(newest, amax) for newest, amax in recorded if newest is not None]
        if pairs:
            torch._foreach_maximum_([newest for newest, _ in pairs], [amax for _, amax in pairs])


def _bytes(x: ScaledTensor) -> Tensor:
    return x.data.view(torch.uint8).view(-1)
