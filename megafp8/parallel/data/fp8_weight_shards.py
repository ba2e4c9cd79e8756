"""FP8 weights under ZeRO and FSDP: each rank quantizes the shard that it updates, and FP8 data is gathered.

If data-parallel ranks each update a shard of the weights, every rank gathers all weights after the step and then
quantizes all of them. If the shards are quantized first, half the bytes are sent, each weight is quantized once instead
of on every rank, and only the owners of its masters hold its values: instead of a weight of 2 bytes per element and two
FP8 copies, a rank holds only the two copies.

A shard is a flat run of a weight's elements that begins and ends anywhere in a row. With one scale per tensor this does
not matter: quantization is elementwise once the scale is known. The scale is known beforehand if it comes from earlier
steps (delayed) or is fixed (static). If it comes from the tensor itself (current, and delayed in its first step), each
rank computes the amaxes of its shards of all weights, and one all-reduce of that vector, over all ranks that run the
same layers, gives the amaxes of the weights: tensor-parallel slices and data-parallel shards are both parts of a whole
weight.

Finer scales are not supported. Blocks of 128×128 would span shards and need an amax each. With a scale per row or per
block of a row, columnwise data is a different quantization of the same values, so twice the data would be sent, as many
bytes as in bf16. Those recipes gather values.

*Experts* of a layer are one weight `[e·n, k]` with one scale per expert, and a shard may begin and end in any of them.
Its whole rows are cast together with the scales of their experts (`megafp8.numerics.groups`); a partial row at either
end is cast separately. The amaxes are reduced over the ranks that have the same experts.

The data is bitwise equal to the quantized whole weight: the owner first rounds the fp32 master to the model's dtype,
since this is the value that would have been gathered. The amax for delayed scaling is also recorded, in the step that
computes with the data; `end_step` reduces it over all ranks in any case.

At its first use, the gathered data is transposed for dgrad (`LinearState.fp8_weight`).

Shapes: t scales, one per weight or e for a weight of e experts; n outputs, k inputs; f elements of this rank's shard.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from itertools import groupby, pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megafp8.fp8.health import ObservedQuantizer
from megafp8.linear.group_state import GroupState, states_of
from megafp8.linear.state import LinearState
from megafp8.numerics.formats import Format
from megafp8.numerics.group_quantizer import ALIGNMENTS, joined_view
from megafp8.numerics.groups import RowGroups, amax_of_groups, cast_groups
from megafp8.numerics.quantizers import Quantizer, casts, implementation
from megafp8.numerics.recipes.base import RecipeQuantizer
from megafp8.numerics.sources import Plain
from megafp8.numerics.tensor import TENSOR, ScaledTensor
from megafp8.parallel.collectives import all_reduce


class WeightShard(NamedTuple):
    """Shard of this rank of a weight that is gathered in FP8.

    Attributes:
        state: State of the layer, or of the layers of all experts.
        fp8_data_nk: Memory of the whole weight's FP8 data; under FSDP, of this rank's rows, which are gathered
            elsewhere.
        start: Index of the shard's first element in that memory.
        master_f: fp32 masters of the shard's elements, live, row by row; may be empty.
        dtype: Dtype of the model.
        rows_before: Number of rows of the weight that come before the memory.
    """

    state: LinearState | GroupState
    fp8_data_nk: Tensor
    start: int
    master_f: Tensor
    dtype: torch.dtype
    rows_before: int = 0

    def source(self) -> Plain:
        """Return the shard in the model's dtype.

        It is a matrix because kernels take matrices; its shape has no meaning.
        """
        x_f = self.master_f.to(self.dtype)
        return Plain(x_f.view(-1, math.gcd(len(x_f), 1024)))

    def parts(self) -> list[_Part]:
        """Split the shard into the fewest parts that can be cast at once.

        Each part is in one layer, or consists of rows of several experts.
        """
        states, k = states_of(self.state), self.fp8_data_nk.shape[1]
        if len(states) == 1:
            return [_Part(self, range(1))]
        n, before = states[0].site.outputs, self.rows_before * k
        assert n > 0, f"{states[0].site.name}: the number of outputs is not known"
        first, last = before + self.start, before + self.start + len(self.master_f)
        edges = [first, last]
        if k % ALIGNMENTS[TENSOR]:
            edges += range(-(-first // (n * k)) * n * k, last, n * k)
        else:
            edges += [edge for edge in (-(-first // k) * k, last // k * k) if first < edge < last]
        edges = sorted(set(edges))
        parts = []
        for start, stop in pairwise(edges):
            experts = range(start // (n * k), -(-stop // (n * k)))
            part = self._replace(start=start - before, master_f=self.master_f[start - first : stop - first])
            ends = [min((e + 1) * n, stop // k) - start // k for e in experts]
            parts.append(_Part(part, experts, ends))
        return parts


class _Part:
    """Part of a shard in one layer, or rows of `experts`, which end at `ends`."""

    def __init__(self, shard: WeightShard, experts: range, ends: Sequence[int] = ()) -> None:
        self.experts = experts
        self._shard, self._groups = shard, None
        if len(experts) > 1:
            device = shard.master_f.device
            self._groups = RowGroups.from_ends(torch.tensor(ends, dtype=torch.int32, device=device), ends[-1])
            assert len(self._groups.padded_ends_e) == len(experts)  # compute this here, not within a CUDA graph

    def source(self) -> Plain:
        """Return the part in the model's dtype; as rows if it has several experts."""
        source = self._shard.source()
        return source if self._groups is None else Plain(source.x_rc.view(-1, self._shard.fp8_data_nk.shape[1]))

    def raise_amax(self, amax_t: Tensor) -> None:
        """Raise `amax_t` to the amaxes of the part's experts."""
        source = self.source()
        if self._groups is None:
            amax_e = casts(source).amax(source).view(1)
        else:
            amax_e = implementation(amax_of_groups, source.device, "grouped_cast")(source, self._groups)
        torch.maximum(amax_t, amax_e, out=amax_t)

    def cast(self, scale_e: Tensor, scale_inv_e: Tensor, fmt: Format, newest_amax_e: Tensor) -> None:
        """Write the part's FP8 data to the shard's memory, and raise `newest_amax_e` to the amaxes of its experts."""
        source = self.source()
        if self._groups is None:
            made = casts(source).cast_tensor(
                source, scale_e[0], scale_inv_e[0], fmt, rowwise=True, columnwise=False, newest_amax=newest_amax_e[0]
            )
        else:
            made = implementation(cast_groups, source.device, "grouped_cast")(
                source, scale_e, scale_inv_e, fmt, self._groups, rowwise=True, columnwise=False,
                newest_amax_e=newest_amax_e,
            )  # fmt: skip
        start, f = self._shard.start, len(self._shard.master_f)
        self._shard.fp8_data_nk.view(torch.uint8).view(-1)[start : start + f] = _bytes(made.required_rowwise)


def per_tensor_quantizer(quantizer: Quantizer) -> RecipeQuantizer | None:
    """Return the recipe's quantizer, without an observer around it, if it has one scale per tensor; else None."""
    inner = quantizer.quantizer if isinstance(quantizer, ObservedQuantizer) else quantizer
    return inner if isinstance(inner, RecipeQuantizer) and inner.per_tensor else None


def gathered_format(state: LinearState | GroupState) -> Format | None:
    """Return the format in which the layer's weight is gathered; None if values are gathered.

    All experts of a layer have the same format.
    """
    first, *others = states_of(state)
    assert all(other.plan.weight == first.plan.weight for other in others), f"experts of {first.site.name} differ"
    if first.plan.weight not in ("zero fp8", "fsdp fp8"):
        return None
    quantizer = per_tensor_quantizer(first.quantizers.weight)
    assert quantizer is not None
    return quantizer.fmt


class _Weight:
    """Shard with its quantizers. `scales` is the slice of its layers' scales among all scales."""

    def __init__(self, shard: WeightShard) -> None:
        self.shard, self.parts = shard, shard.parts()
        quantizers = [per_tensor_quantizer(state.quantizers.weight) for state in states_of(shard.state)]
        self.quantizers = [quantizer for quantizer in quantizers if quantizer is not None]
        assert len(self.quantizers) == len(quantizers), "a weight with several scales"
        self.fmt, self.scales = self.quantizers[0].fmt, slice(0, 0)
        assert all(quantizer.fmt == self.fmt for quantizer in self.quantizers)

    @property
    def is_known(self) -> bool:
        """Whether all scales are known without reading the weight."""
        return all(quantizer.known_scale is not None for quantizer in self.quantizers)

    def scales_of(self, scale_e: Tensor, scale_inv_e: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weight's scales and their reciprocals: known scales where they exist, otherwise the given ones."""
        if self.is_known and self._joined_scales is not None:
            return self._joined_scales
        for i, quantizer in enumerate(self.quantizers):
            if quantizer.known_scale is not None:
                scale_e[i], scale_inv_e[i] = quantizer.known_scale
        return scale_e, scale_inv_e

    @cached_property
    def _joined_scales(self) -> tuple[Tensor, Tensor] | None:
        """Known scales and their reciprocals as one tensor each; None if they are not adjacent in memory."""
        known = [quantizer.known_scale for quantizer in self.quantizers]
        scale_e, scale_inv_e = (joined_view([x[i] for x in known if x is not None]) for i in (0, 1))
        return None if scale_e is None or scale_inv_e is None else (scale_e, scale_inv_e)

    @cached_property
    def recorded(self) -> list[tuple[Tensor, slice]]:
        """Recorded amaxes of the quantizers, each with the slice of the weight's amaxes that it is raised to."""
        amaxes = [quantizer.recorded_amax for quantizer in self.quantizers]
        pairs = [(amax.view(1), slice(i, i + 1)) for i, amax in enumerate(amaxes) if amax is not None]
        joined = joined_view([amax[0] for amax, _ in pairs]) if len(pairs) == len(amaxes) else None
        return pairs if joined is None else [(joined, slice(len(amaxes)))]


class WeightShards:
    """Shards of this rank of all weights that are gathered in FP8.

    `group` are all ranks with shards of the same weights; amaxes of experts are reduced over the ranks that have the
    same experts. From the first `quantize` on, the layers compute with the FP8 data, which must be gathered after each
    `quantize`.
    """

    def __init__(self, shards: Sequence[WeightShard], group: ProcessGroup | None, device: torch.device) -> None:
        self._weights = [_Weight(shard) for shard in shards]
        groups = [weight.quantizers[0].tensor.amax_group or group for weight in self._weights]
        in_order = list(dict.fromkeys(sorted(groups, key=lambda x: x is not group)))  # the same on all ranks
        # Sort, so that one call reduces the amaxes of a group, and one call computes the scales of each rule.
        keys = [(in_order.index(group), weight.quantizers[0].rule) for group, weight in zip(groups, self._weights)]
        order = sorted(range(len(keys)), key=keys.__getitem__)
        self._weights, t = [self._weights[i] for i in order], 0
        for weight in self._weights:
            weight.scales = slice(t, t := t + len(weight.quantizers))
        by_group = groupby(zip(order, self._weights), key=lambda item: groups[item[0]])
        self._groups = [(group, [weight for _, weight in items]) for group, items in by_group]
        self._rules = [quantizer.rule for weight in self._weights for quantizer in weight.quantizers]
        self._amax_t = torch.zeros(t, device=device)
        self._scale_t = torch.ones(t, device=device)
        # Scales are four elements apart, because cuBLASLt needs each at a multiple of 16 bytes.
        self._scale_inv_t = torch.ones(t, 4, device=device)[:, 0]

    @torch.no_grad()
    def quantize(self) -> None:
        """Quantize this rank's shards of the current masters. One all-reduce per group if scales need an amax."""
        self._amax_t.zero_()
        for group, weights in self._groups:
            unknown = [weight for weight in weights if not weight.is_known]
            for weight in unknown:
                for part in weight.parts:
                    part.raise_amax(self._amax_t[weight.scales][_slice(part.experts)])
            if unknown:
                scales = slice(weights[0].scales.start, weights[-1].scales.stop)
                all_reduce(self._amax_t[scales], group, "max")
        if not all(weight.is_known for weight in self._weights):
            self._make_scales()
        for weight in self._weights:
            amax_e = self._amax_t[weight.scales]
            scale_e, scale_inv_e = weight.scales_of(self._scale_t[weight.scales], self._scale_inv_t[weight.scales])
            for part in weight.parts:
                experts = _slice(part.experts)
                part.cast(scale_e[experts], scale_inv_e[experts], weight.fmt, amax_e[experts])
            state, data = weight.shard.state, weight.shard.fp8_data_nk
            if isinstance(state, GroupState):
                state.set_gathered_weight(ScaledTensor(data, scale_inv_e))
            else:
                state.set_gathered_weight(ScaledTensor(data, scale_inv_e[0]))

    def _make_scales(self) -> None:
        """Compute the scales of all weights from their amaxes."""
        start = 0
        for rule, same in groupby(self._rules):
            part = slice(start, start := start + len(list(same)))
            self._scale_t[part] = rule.scale(self._amax_t[part])
        self._scale_inv_t.copy_(self._scale_t.reciprocal())

    @torch.no_grad()
    def record_amaxes(self) -> None:
        """Record the amaxes of this step's weights for delayed scaling. Call this before `Fp8Manager.end_step`."""
        pairs = [(x, self._amax_t[w.scales][rows]) for w in self._weights for x, rows in w.recorded]
        if pairs:
            torch._foreach_maximum_([newest for newest, _ in pairs], [amax for _, amax in pairs])


def _slice(experts: range) -> slice:
    return slice(experts.start, experts.stop)


def _bytes(x: ScaledTensor) -> Tensor:
    return x.data.view(torch.uint8).view(-1)
