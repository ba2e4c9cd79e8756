"""Linear layers sharded over the tensor-parallel group.

    ColumnParallelLinear    y = x Wᵀ, W [n, k] sharded along n: every rank needs the whole x and computes a slice of y
    RowParallelLinear       W [n, k] sharded along k: a rank has a slice of x and computes a partial y; these are summed

A column-parallel layer followed by a row-parallel one needs one collective in forward and one in backward. With
`sequence_parallel` activations between such pairs are sharded along s, so the all-reduce becomes an all-gather before
and a reduce-scatter after: the same bytes, 1/t of the activation memory.

How a layer computes is decided when it is constructed: `Fp8Manager.linear` makes its `LinearState` with an immutable
`LinearPlan` (`megafp8.plan`). The model says through `site` what stands before and after the layer; the layer adds what
it knows itself. In FP8 a sequence-parallel layer gathers quantized data where the plan says so, half the bytes of bf16.

Several projections of the same input (q, k, v; gate, up) are one ColumnParallelLinear whose weight stacks a slice of
each: `parts` gives names and sizes, and each part keeps its own global name.

Shapes: s sequence, b micro-batch, h hidden, k inputs, n outputs; t tensor-parallel size.
"""

from __future__ import annotations

from dataclasses import replace

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
from megafp8.parallel.tensor.mappings import (
    gather_from_tensor_parallel,
    scatter_to_tensor_parallel,
)
from megafp8.parallel.tp_overlap import TPOverlap, default_overlap
from megafp8.plan import LinearSite

ZEROS = Init("zeros")


def _adapted(site: LinearSite) -> LinearSite:
    """The place of a layer with LoRA, which reads the values of its input and of its output's gradient."""
    return replace(site, before=READS_VALUES, after=READS_VALUES, recompute_input=False)


class ColumnParallelLinear(nn.Module):
    """`y = x Wᵀ + b`, W `[n, k]` sharded along n.

    x is `[s, b, k]`, or `[s/t, b, k]` with `sequence_parallel`; y is `[s, b, n/t]`, or `[s, b, n]` with
    `gather_output`. `parts` names the projections stacked in the output, default one part called `name`; under TP a
    rank's output holds its slice of each part in order. `skip_bias_add` returns `(y, bias)` instead of adding.
    `weight`: use this parameter (tied embedding) rather than make one. `high_precision`: why the layer must not be FP8,
    if so. `tp_overlap`: how x is gathered and dx reduced; default one collective each. `site`: the layer's neighbors,
    tokens and where its weight is stored, for its plan. `lora`: adapts those of the parts that are its targets.
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
        gather_output: bool = False,
        sequence_parallel: bool = False,
        skip_bias_add: bool = False,
        parts: dict[str, int] | None = None,
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
        self.group, self.gather_output, self.skip_bias_add = group, gather_output, skip_bias_add
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
            gathers_output=gather_output,
            high_precision=high_precision,
        )
        lora = lora if lora is not None and lora.adapted(parts) else None
        site = site if lora is None else _adapted(site)
        self.state = fp8.linear(site, tp_group=group)
        if weight is None:
            shards = [shard_dim(f"{p}.weight", (n, input_size), 0, rank, t) for p, n in parts.items()]
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
        """`handoff`: `state.grad_handoff()`, given to the operation that uses the output too."""
        bias = None if self.skip_bias_add else self.bias
        y = linear(x, self.weight, self.state, bias=bias, handoff=handoff, comm=self.comm)
        if self.lora is not None and self.lora.adds:
            assert isinstance(x, Tensor)
            y = y + self.lora(x)
        if self.gather_output:
            y = gather_from_tensor_parallel(y, self.group)
        return (y, self.bias) if self.skip_bias_add else y


class RowParallelLinear(nn.Module):
    """`y = x Wᵀ + b`, W `[n, k]` sharded along k.

    x is this rank's `[s, b, k/t]`, or the whole `[s, b, k]` with `input_is_parallel=False`; y is `[s, b, n]`, or
    `[s/t, b, n]` with `sequence_parallel`. The bias is whole on every rank and added after the sum; under sequence
    parallelism each rank sees its slice of s only, so the bias gradient is summed over the group once a step
    (`reduce_over_tp`). `skip_bias_add` returns `(y, bias)`. `tp_overlap`: how y is reduced and dy gathered; default one
    collective each. `high_precision`, `site`, `lora`: as for `ColumnParallelLinear`.
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
        input_is_parallel: bool = True,
        sequence_parallel: bool = False,
        skip_bias_add: bool = False,
        high_precision: str = "",
        tp_overlap: TPOverlap | None = None,
        site: LinearSite | None = None,
        lora: Lora | None = None,
    ) -> None:
        super().__init__()
        t, rank = group.size(), group.rank()
        self.group, self.input_is_parallel, self.skip_bias_add = group, input_is_parallel, skip_bias_add
        self.comm = TPComm(output=tp_overlap or default_overlap(group, sequence_parallel=sequence_parallel))
        site = replace(
            site or LinearSite(),
            name=name,
            inputs=input_size // t,
            outputs=output_size,
            parallel="row",
            tensor_parallel=t,
            sequence_parallel=sequence_parallel,
            scatters_input=not input_is_parallel,
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

    def forward(self, x: Tensor | LinearInput) -> Tensor | tuple[Tensor, Tensor | None]:
        if not self.input_is_parallel:
            assert isinstance(x, Tensor)
            x = scatter_to_tensor_parallel(x, self.group)
        y = linear(x, self.weight, self.state, bias=None if self.skip_bias_add else self.bias, comm=self.comm)
        if self.lora is not None and self.lora.adds:
            assert isinstance(x, Tensor)
            y = y + self.lora(x)
        return (y, self.bias) if self.skip_bias_add else y
