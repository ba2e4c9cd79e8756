"""Low-rank adaptation of column- and row-parallel linear layers (LoRA, Hu et al. 2021, arXiv:2106.09685).

    y = x Wᵀ + (alpha / rank) · (x Aᵀ) Bᵀ        W [n, k] is frozen, A [rank, k] and B [n, rank] are trained

A is initialized at random and B with zeros, so y starts as x Wᵀ. Both have the model's precision with fp32 masters,
however W's GEMMs are quantized, and both read the values of x, not its quantized form.

Each projection of a layer that stacks several has its own A and B, named after it: `layers.0.attention.q.lora_a`. The
layer determines how they are sharded, such that only `[tokens, rank]` is communicated in addition to the layer's own
communication:

                     A                              x Aᵀ                              B
    column-parallel  whole on each rank             gathered along s, or the same     sharded along n as W
    row-parallel     sharded along k as W           summed over ranks                 whole on each rank

Shapes: s sequence, b micro-batch, k inputs, n outputs; t tensor-parallel size.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megafp8.parallel.sharding import Init, ParamShard, empty_parameter, shard_dim, spec_of, unsharded
from megafp8.parallel.tensor.mappings import (
    copy_to_tensor_parallel,
    gather_from_sequence_parallel,
    reduce_from_tensor_parallel,
    reduce_scatter_to_sequence_parallel,
)
from megafp8.plan import Neighbor

A, B = "lora_a", "lora_b"
READS_VALUES = Neighbor("LoRA", "none", "LoRA needs the unquantized values")
"""Neighbor of an adapted layer on either side. It prevents exchanging only quantized data with the layer."""


@dataclass(frozen=True)
class Lora:
    """Low-rank adaptation of the projections in `targets`, the last words of their names."""

    rank: int
    alpha: float
    targets: frozenset[str]

    @property
    def scale(self) -> float:
        """Factor of the adaptation: alpha / rank."""
        return self.alpha / self.rank

    def adapted(self, names: Iterable[str]) -> list[str]:
        """Return the names of the projections among `names` that are adapted."""
        return [name for name in names if name.rpartition(".")[2] in self.targets]


def is_lora(name: str) -> bool:
    """Return whether the tensor `name` is an A or a B."""
    return name.rpartition(".")[2] in (A, B)


def freeze(module: nn.Module) -> None:
    """Freeze all parameters except A's and B's."""
    for param in module.parameters():
        param.requires_grad_(is_lora(spec_of(param).shards[0].name))


@contextmanager
def without_adapters(module: nn.Module) -> Iterator[None]:
    """Turn off the adapters of `module` inside the context: linear layers compute x Wᵀ, as before adaptation."""
    adapters = [x for x in module.modules() if isinstance(x, (ColumnLora, RowLora))]
    for adapter in adapters:
        adapter.adds = False
    try:
        yield
    finally:
        for adapter in adapters:
            adapter.adds = True


class AdapterPlacement(NamedTuple):
    """Placement of an adapter's parameters, which follows its layer."""

    group: ProcessGroup
    dtype: torch.dtype
    device: torch.device
    sequence_parallel: bool

    @property
    def sequence_sharded(self) -> bool:
        """Whether a rank has a slice of the tokens outside the layer."""
        return self.sequence_parallel and self.group.size() > 1

    def sharded(self, name: str, shape: tuple[int, int], dim: int) -> ParamShard:
        """Return this rank's shard of a matrix."""
        return shard_dim(name, shape, dim, self.group.rank(), self.group.size())

    def parameter(self, pieces: Sequence[ParamShard], init: Init, *, whole: bool) -> nn.Parameter:
        """Allocate a parameter of `pieces`, stacked along dim 0.

        If it is `whole` on each rank, each rank computes only the gradient of its local tokens.
        """
        reduce = whole and self.sequence_sharded
        return empty_parameter(
            pieces, init, self.dtype, self.device, replicated_over_tp=whole, reduce_over_tp=reduce, matrix=True
        )


def _init_a(inputs: int) -> Init:
    """Return the distribution of A's initial values."""
    return Init("normal", (3 * inputs) ** -0.5)  # the variance of PEFT's uniform distribution


class ColumnLora(nn.Module):
    """Adapter of a column-parallel layer: x `[s, b, k]`, or `[s/t, b, k]`, to `[s, b, n/t]` to add to y.

    x is `[s/t, b, k]` with sequence parallelism. `parts` are the layer's projections and their sizes. Projections that
    are not adapted get zeros. `adds` is False inside `without_adapters`.
    """

    adds = True

    def __init__(self, lora: Lora, parts: Mapping[str, int], inputs: int, place: AdapterPlacement) -> None:
        super().__init__()
        self.lora, self.place = lora, place
        names = lora.adapted(parts)
        a_shards = [shard for name in names for shard in unsharded(f"{name}.{A}", (lora.rank, inputs))]
        self.a = place.parameter(a_shards, _init_a(inputs), whole=True)
        self.b = nn.ParameterList(
            place.parameter([place.sharded(f"{name}.{B}", (parts[name], lora.rank), 0)], Init("zeros"), whole=False)
            for name in names
        )
        self.numbers = {name: i for i, name in enumerate(names)}
        self.widths = {name: size // place.group.size() for name, size in parts.items()}

    def forward(self, x: Tensor) -> Tensor:
        """Return the term to add to y, `[s, b, n/t]`."""
        h = (x @ self.a.t()) * self.lora.scale
        enter = gather_from_sequence_parallel if self.place.sequence_sharded else copy_to_tensor_parallel
        parts = enter(h, self.place.group).split(self.lora.rank, dim=-1)
        lead = parts[0].shape[:-1]
        added = [
            parts[self.numbers[name]] @ self.b[self.numbers[name]].t()
            if name in self.numbers
            else h.new_zeros(*lead, width)
            for name, width in self.widths.items()
        ]
        return torch.cat(added, dim=-1)


class RowLora(nn.Module):
    """Adapter of a row-parallel layer: x `[s, b, k/t]` to `[s, b, n]`, or `[s/t, b, n]`, to add to y.

    `adds` is False inside `without_adapters`.
    """

    adds = True

    def __init__(self, lora: Lora, name: str, inputs: int, outputs: int, place: AdapterPlacement) -> None:
        super().__init__()
        self.lora, self.place = lora, place
        a_shards = [place.sharded(f"{name}.{A}", (lora.rank, inputs), 1)]
        self.a = place.parameter(a_shards, _init_a(inputs), whole=False)
        self.b = place.parameter(unsharded(f"{name}.{B}", (outputs, lora.rank)), Init("zeros"), whole=True)

    def forward(self, x: Tensor) -> Tensor:
        """Return the term to add to y, `[s, b, n]`, or `[s/t, b, n]` sequence-parallel."""
        h = (x @ self.a.t()) * self.lora.scale
        leave = reduce_scatter_to_sequence_parallel if self.place.sequence_sharded else reduce_from_tensor_parallel
        return leave(h, self.place.group) @ self.b.t()
