"""Linear layers sharded over the tensor-parallel group.

    ColumnParallelLinear    y = x Wᵀ, W [n, k] sharded along n: every rank needs the whole x and computes a slice of y
    RowParallelLinear       W [n, k] sharded along k: a rank has a slice of x and computes a partial y; these are summed

A column-parallel layer followed by a row-parallel layer needs one collective in forward and one in backward. With
`sequence_parallel`, activations between such pairs are sharded along s, so the all-reduce becomes an all-gather before
and a reduce-scatter after: the same number of bytes, with 1/t of the activation memory.

The way a layer computes is decided when it is constructed: `Fp8Manager.linear` makes its `LinearState` with an
immutable `LinearPlan` (`megafp8.plan`). Through `site`, the model describes the operations before and after the layer;
the layer adds its own properties. In FP8, a sequence-parallel layer gathers quantized data if its plan says so, half
the bytes of bf16.

Several projections of the same input (q, k, v; gate, up) are one ColumnParallelLinear with a weight that stacks a slice
of each. `parts` gives names and sizes, and each part keeps its own global name.

Shapes: s sequence, b micro-batch, h hidden, k inputs, n outputs; t tensor-parallel size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megafp8.fp8.manager import Fp8Manager
from megafp8.linear.fusion import LinearInput
from megafp8.linear.linear import linear
from megafp8.linear.quantized_gather import TPComm
from megafp8.linear.state import QuantizedGradHandoff
from megafp8.parallel.sharding import Init, empty_parameter, shard_dim, unsharded
from megafp8.parallel.tensor.lora import READS_VALUES, AdapterPlacement, ColumnLora, Lora, RowLora
from megafp8.parallel.tp_overlap import TPOverlap, default_overlap
from megafp8.plan import LinearSite

ZEROS = Init("zeros")


def _adapted(site: LinearSite) -> LinearSite:
    """Return the site of a layer with LoRA, which reads the values of its input and of its output gradient."""
    return replace(site, before=READS_VALUES, after=READS_VALUES, recompute_input=False)


class ColumnParallelLinear(nn.Module):
    """Linear layer `y = x Wᵀ + b` with W `[n, k]` sharded along n.

    x is `[s, b, k]`, or `[s/t, b, k]` with `sequence_parallel`; y is `[s, b, n/t]`.

    Args:
        name: Global name of the layer.
        input_size, output_size: Sizes k and n of the whole weight.
        group: Tensor-parallel group.
        fp8: Manager that makes the layer's state.
        init: Distribution of the weight's initial values.
        dtype, device: Dtype and device of the parameters.
        bias: Whether the layer has a bias.
        sequence_parallel: x is sharded along s.
        skip_bias_add: Return `(y, bias)` instead of adding the bias.
        parts: Names and sizes of the projections stacked in the output; by default one part called `name`. With tensor
            parallelism, a rank's output holds its slice of each part in order.
        heads: Rows of the matrices of an attention head, by part (`ParamShard.heads`).
        high_precision: Reason why the layer must not run in FP8; empty if it may.
        weight: Parameter to use (tied embedding) instead of a new one.
        tp_overlap: Overlap that gathers x and reduces dx; by default one collective each.
        site: Neighbors and tokens of the layer and storage of its weight, for its plan.
        lora: Adapts the parts that are its targets.
    """

    def __init__(
        self,
        name: str,
        input_size: int,
        output_size: int,
        *,
        group: ProcessGroup,
        fp8: Fp8Manager,
        init: Init,
        dtype: torch.dtype,
        device: torch.device,
        bias: bool = False,
        sequence_parallel: bool = False,
        skip_bias_add: bool = False,
        parts: dict[str, int] | None = None,
        heads: Mapping[str, tuple[int, ...]] = MappingProxyType({}),
        high_precision: str = "",
        weight: nn.Parameter | None = None,
        tp_overlap: TPOverlap | None = None,
        site: LinearSite | None = None,
        lora: Lora | None = None,
    ) -> None:
        super().__init__()
        parts = parts or {name: output_size}
        assert sum(parts.values()) == output_size, f"{name}: parts {parts} do not add up to {output_size}"
        t, rank = group.size(), group.rank()
        self.skip_bias_add = skip_bias_add
        self.comm = TPComm(input=tp_overlap or default_overlap(group, sequence_parallel=sequence_parallel))
        site = replace(
            site or LinearSite(),
            name=name,
            inputs=input_size,
            outputs=output_size // t,
            parallel="column",
            tensor_parallel=t,
            sequence_parallel=sequence_parallel,
            adds_bias=bias and not skip_bias_add,
            high_precision=high_precision,
        )
        lora = lora if lora is not None and lora.adapted(parts) else None
        site = site if lora is None else _adapted(site)
        self.state = fp8.linear(site, tp_group=group)
        if weight is None:
            whole = {part: shard_dim(f"{part}.weight", (n, input_size), 0, rank, t) for part, n in parts.items()}
            shards = [replace(shard, heads=heads.get(part, ())) for part, shard in whole.items()]
            weight = empty_parameter(shards, init, dtype, device, replicated_over_tp=False, matrix=True)
        self.weight = weight
        self.bias: nn.Parameter | None = None
        if bias:
            shards = [shard_dim(f"{p}.bias", (n,), 0, rank, t) for p, n in parts.items()]
            self.bias = empty_parameter(shards, ZEROS, dtype, device, replicated_over_tp=False, weight_decay=False)
        self.lora: ColumnLora | None = None
        if lora is not None:
            self.lora = ColumnLora(lora, parts, input_size, AdapterPlacement(group, dtype, device, sequence_parallel))

    def forward(
        self, x: Tensor | LinearInput, handoff: QuantizedGradHandoff | None = None
    ) -> Tensor | tuple[Tensor, Tensor | None]:
        """Return y, or `(y, bias)` with `skip_bias_add`.

        `handoff` is `state.grad_handoff()`, which the operation that reads the output also gets.
        """
        bias = None if self.skip_bias_add else self.bias
        y = linear(x, self.weight, self.state, bias=bias, handoff=handoff, comm=self.comm)
        if self.lora is not None and self.lora.adds:
            assert isinstance(x, Tensor)
            y = y + self.lora(x)
        return (y, self.bias) if self.skip_bias_add else y


class RowParallelLinear(nn.Module):
    """Linear layer `y = x Wᵀ + b` with W `[n, k]` sharded along k.

    x is this rank's `[s, b, k/t]`; y is `[s, b, n]`, or `[s/t, b, n]` with `sequence_parallel`. The bias is replicated
    and added after the sum. Under sequence parallelism each rank sees only its slice of s, so the bias gradient is
    summed over the group once per step (`reduce_over_tp`).

    `tp_overlap` reduces y and gathers dy; by default with one collective each. The other arguments have the same
    meaning as in `ColumnParallelLinear`.
    """

    def __init__(
        self,
        name: str,
        input_size: int,
        output_size: int,
        *,
        group: ProcessGroup,
        fp8: Fp8Manager,
        init: Init,
        dtype: torch.dtype,
        device: torch.device,
        bias: bool = False,
        sequence_parallel: bool = False,
        high_precision: str = "",
        tp_overlap: TPOverlap | None = None,
        site: LinearSite | None = None,
        lora: Lora | None = None,
    ) -> None:
        super().__init__()
        t, rank = group.size(), group.rank()
        self.group = group
        self.comm = TPComm(output=tp_overlap or default_overlap(group, sequence_parallel=sequence_parallel))
        site = replace(
            site or LinearSite(),
            name=name,
            inputs=input_size // t,
            outputs=output_size,
            parallel="row",
            tensor_parallel=t,
            sequence_parallel=sequence_parallel,
            high_precision=high_precision,
        )
        lora = lora if lora is not None and lora.adapted([name]) else None
        site = site if lora is None else _adapted(site)
        self.state = fp8.linear(site, tp_group=group)
        shard = shard_dim(f"{name}.weight", (output_size, input_size), 1, rank, t)
        self.weight = empty_parameter([shard], init, dtype, device, replicated_over_tp=False, matrix=True)
        self.bias: nn.Parameter | None = None
        if bias:
            self.bias = empty_parameter(
                unsharded(f"{name}.bias", (output_size,)), ZEROS, dtype, device, replicated_over_tp=True,
                reduce_over_tp=sequence_parallel and t > 1, weight_decay=False,
            )  # fmt: skip
        self.lora: RowLora | None = None
        if lora is not None:
            place = AdapterPlacement(group, dtype, device, sequence_parallel)
            self.lora = RowLora(lora, name, input_size, output_size, place)

    def forward(self, x: Tensor | LinearInput) -> Tensor:
        """Return y."""
        y = linear(x, self.weight, self.state, bias=self.bias, comm=self.comm)
        if self.lora is not None and self.lora.adds:
            assert isinstance(x, Tensor)
            y = y + self.lora(x)
        return y
