"""Linear layers and the embedding, cut over the tensor-parallel group.

    ColumnParallelLinear    y = x Wᵀ, W [n, k] cut along n: every rank needs the whole x and makes a slice of y
    RowParallelLinear       W [n, k] cut along k: every rank has a slice of x and makes a share of y; shares are summed
    VocabParallelEmbedding  rows of the table cut over ranks

A column-parallel layer followed by a row-parallel one needs one collective forward and one backward. With
`sequence_parallel` what lies between such pairs is cut along s, so the all-reduce becomes an all-gather before and a
reduce-scatter after: the same bytes, a t-th of the activation memory.

The layers know nothing of precision: each takes a `LinearOp` from `megafp8.fp8`, `op(x, weight) -> y`, and says only
which of its operands are slices (which matters where a scale is taken from the whole tensor). They know the group they
were given and nothing of the job. What comes before a layer may hand it codes instead of values (`input_cast` says how
it wants them), and what comes after may hand back the gradient as codes (`grad_slot`). A sequence-parallel layer then
gathers codes, half the bytes; and a row-parallel one, which is handed values, casts the gradient before gathering it.

Several projections of the same input (q, k, v; gate, up) are one ColumnParallelLinear whose weight stacks a slice of
each: `parts` gives names and sizes, and each part keeps its own global name.

Shapes: s sequence, b micro-batch, h hidden, k inputs, n outputs, v vocabulary; t tensor-parallel size.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megafp8.distributed.sharding import Init, ParamSpec, set_spec, shard_dim, stack_rows, unsharded
from megafp8.distributed.tp_overlap import TPOverlap, default_overlap
from megafp8.fp8 import Fp8Linear, Fp8Manager, Input, InputCast, LinearOp, Quantized, QuantizedGradHandoff, TPComm
from megafp8.fp8.quantizers import Quantizer
from megafp8.ops.embedding import look_up
from megafp8.tensor_parallel.mappings import (
    gather_from_tensor_parallel,
    reduce_from_tensor_parallel,
    reduce_scatter_to_sequence_parallel,
    scatter_to_tensor_parallel,
)

ZEROS = Init("zeros")


def _empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device))


def _input_cast(op: LinearOp) -> InputCast | None:
    return InputCast(op.quantizers.input, smoothing=op.smoothing) if isinstance(op, Fp8Linear) and op.fusible else None


def _grad_slot(op: LinearOp) -> QuantizedGradHandoff | None:
    return QuantizedGradHandoff(op.quantizers.grad_output) if isinstance(op, Fp8Linear) and op.fusible else None


def _apply(
    op: LinearOp, x: Input, weight: nn.Parameter, comm: TPComm, grad_slot: QuantizedGradHandoff | None = None
) -> Tensor:
    if isinstance(op, Fp8Linear):
        return op(x, weight, grad_slot=grad_slot, comm=comm)
    assert not isinstance(x, Quantized), "codes for a layer in high precision"
    return op(x, weight, comm=comm)


class ColumnParallelLinear(nn.Module):
    """`y = x Wᵀ + b`, W `[n, k]` cut along n.

    x is `[s, b, k]`, or `[s/t, b, k]` with `sequence_parallel`; y is `[s, b, n/t]`, or `[s, b, n]` with
    `gather_output`. `parts` names the projections stacked in the output, default one part called `name`; under TP a
    rank's output holds its slice of each part in order. `skip_bias_add` returns `(y, bias)` instead of adding.
    `weight`: use this parameter (tied embedding) rather than make one. `tp_overlap`: how x is gathered and dx summed;
    default one collective each.
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
        high_precision: bool = False,
        weight: nn.Parameter | None = None,
        tp_overlap: TPOverlap | None = None,
    ) -> None:
        super().__init__()
        parts = parts or {name: output_size}
        assert sum(parts.values()) == output_size, f"{name}: parts {parts} do not add up to {output_size}"
        t, rank = group.size(), group.rank()
        self.group, self.gather_output, self.skip_bias_add = group, gather_output, skip_bias_add
        self.sequence_parallel = sequence_parallel and t > 1
        self.tp_overlap = tp_overlap or default_overlap(group, sequence_parallel=sequence_parallel)
        self.slices = fp8.slices(group)
        self.op = fp8.linear_op(
            name,
            tp_group=group,
            input_sharded=False,
            grad_output_sharded=t > 1,
            fp8=not high_precision,
        )
        if weight is None:
            pieces = stack_rows([shard_dim(f"{p}.weight", (n, input_size), 0, rank, t) for p, n in parts.items()])
            weight = _empty((output_size // t, input_size), dtype, device)
            set_spec(weight, ParamSpec(pieces, init, replicated_over_tp=False))
        self.weight = weight
        self.bias: nn.Parameter | None = None
        if bias:
            pieces = stack_rows([shard_dim(f"{p}.bias", (n,), 0, rank, t) for p, n in parts.items()])
            self.bias = _empty((output_size // t,), dtype, device)
            set_spec(self.bias, ParamSpec(pieces, ZEROS, replicated_over_tp=False, weight_decay=False))

    @property
    def input_cast(self) -> InputCast | None:
        """How the layer wants this rank's input quantized; None where it wants values."""
        cast = _input_cast(self.op)
        if cast is None or not self.sequence_parallel:
            return cast
        quantizer = cast.quantizer.for_sharded_input(self.slices)
        if quantizer is None:
            return None
        return InputCast(quantizer, columnwise=not quantizer.per_tensor, shard_alignment=quantizer.shard_alignment)

    def grad_slot(self) -> QuantizedGradHandoff | None:
        """A place for the gradient of the next `forward`'s output as codes; None where the layer wants values."""
        adds_bias = self.bias is not None and not self.skip_bias_add  # whose gradient needs values
        return None if adds_bias or self.gather_output else _grad_slot(self.op)

    def forward(self, x: Input, grad_slot: QuantizedGradHandoff | None = None) -> Tensor | tuple[Tensor, Tensor | None]:
        if self.sequence_parallel and not isinstance(x, Tensor) and x.again is not None:
            x = x._replace(again=x.again.over(self.group))
        y = _apply(self.op, x, self.weight, TPComm(input=self.tp_overlap), grad_slot)
        if self.bias is not None and not self.skip_bias_add:
            y = y + self.bias
        if self.gather_output:
            y = gather_from_tensor_parallel(y, self.group)
        return (y, self.bias) if self.skip_bias_add else y


class RowParallelLinear(nn.Module):
    """`y = x Wᵀ + b`, W `[n, k]` cut along k.

    x is this rank's `[s, b, k/t]`, or the whole `[s, b, k]` with `input_is_parallel=False`; y is `[s, b, n]`, or
    `[s/t, b, n]` with `sequence_parallel`. The bias is whole on every rank and added after the sum; under sequence
    parallelism each rank sees its slice of s only, so the bias gradient is summed over the group once a step
    (`reduce_over_tp`). `skip_bias_add` returns `(y, bias)`. `tp_overlap`: how y is summed and dy gathered; default one
    collective each.
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
        high_precision: bool = False,
        tp_overlap: TPOverlap | None = None,
    ) -> None:
        super().__init__()
        t, rank = group.size(), group.rank()
        self.group, self.input_is_parallel, self.skip_bias_add = group, input_is_parallel, skip_bias_add
        self.sequence_parallel = sequence_parallel and t > 1
        self.tp_overlap = tp_overlap or default_overlap(group, sequence_parallel=sequence_parallel)
        self.slices = fp8.slices(group)
        self.op = fp8.linear_op(
            name, tp_group=group, input_sharded=t > 1, grad_output_sharded=False, fp8=not high_precision
        )
        self.weight = _empty((output_size, input_size // t), dtype, device)
        pieces = (shard_dim(f"{name}.weight", (output_size, input_size), 1, rank, t),)
        set_spec(self.weight, ParamSpec(pieces, init, replicated_over_tp=False))
        self.bias: nn.Parameter | None = None
        if bias:
            self.bias = _empty((output_size,), dtype, device)
            spec = ParamSpec(
                unsharded(f"{name}.bias", (output_size,)),
                ZEROS,
                replicated_over_tp=True,
                reduce_over_tp=self.sequence_parallel,
                weight_decay=False,
            )
            set_spec(self.bias, spec)

    @property
    def input_cast(self) -> InputCast | None:
        """How the layer wants this rank's input quantized; None where it wants values."""
        return _input_cast(self.op) if self.input_is_parallel else None

    @property
    def _grad_cast(self) -> Quantizer | None:
        """Casts this rank's slice of the output's gradient; None where that stays values, or is whole."""
        slot = _grad_slot(self.op) if self.sequence_parallel else None
        return None if slot is None else slot.quantizer.for_sharded_input(self.slices)

    def forward(self, x: Input) -> Tensor | tuple[Tensor, Tensor | None]:
        if not self.input_is_parallel:
            assert isinstance(x, Tensor)
            x = scatter_to_tensor_parallel(x, self.group)
        y = _apply(self.op, x, self.weight, TPComm(output=self.tp_overlap, grad_cast=self._grad_cast))
        if self.skip_bias_add:
            return y, self.bias
        return y if self.bias is None else y + self.bias


class VocabParallelEmbedding(nn.Module):
    """Rows of the table `[v, h]` cut over ranks: tokens `[b, s]` -> `[s, b, h]`, or `[s/t, b, h]` sequence-parallel.

    A rank looks up the tokens it owns, leaves zeros for the others, and the shares are summed. The gradient goes to the
    weight's sink, as that of a linear layer does.
    """

    def __init__(
        self,
        name: str,
        num_embeddings: int,
        embedding_dim: int,
        *,
        group: ProcessGroup,
        init: Init,
        dtype: torch.dtype,
        device: torch.device,
        sequence_parallel: bool = False,
    ) -> None:
        super().__init__()
        t, rank = group.size(), group.rank()
        self.group = group
        self.sequence_parallel = sequence_parallel and t > 1
        rows = num_embeddings // t
        self.first = rank * rows
        self.weight = _empty((rows, embedding_dim), dtype, device)
        pieces = (shard_dim(f"{name}.weight", (num_embeddings, embedding_dim), 0, rank, t),)
        set_spec(self.weight, ParamSpec(pieces, init, replicated_over_tp=False))

    def forward(self, tokens_bs: Tensor) -> Tensor:
        x_sbh = look_up(self.weight, tokens_bs.t() - self.first, partial=self.group.size() > 1)
        if self.sequence_parallel:
            return reduce_scatter_to_sequence_parallel(x_sbh, self.group)
        return reduce_from_tensor_parallel(x_sbh, self.group)
