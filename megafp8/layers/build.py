"""Arguments with which the parts of a layer are built, and the linear layers and parameters that most parts have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from torch import nn

from megafp8.layers.context import BuildContext, sharded_parameters
from megafp8.layers.recompute import KEEP_ALL, BlockMemory
from megafp8.parallel.sharding import Init
from megafp8.parallel.tensor.layers import ColumnParallelLinear, RowParallelLinear
from megafp8.plan import Neighbor
from megafp8.spec import ModelSpec, PartRecord

ATTENTION = Neighbor("attention", "none", "attention kernels read and write bf16")
Record = TypeVar("Record", bound=PartRecord, covariant=True)


@dataclass(frozen=True)
class PartBuild(Generic[Record]):
    """Arguments of the constructor of a part.

    Attributes:
        name: Name of the module in the model.
        record: Resolved config record of the part.
        model: Spec of the whole model.
        context: Process groups, FP8 manager, dtype and device.
        input: The preceding norm.
        memory: Operations that are recomputed in backward.
    """

    name: str
    record: Record
    model: ModelSpec
    context: BuildContext
    input: Neighbor
    memory: BlockMemory = KEEP_ALL

    def column(
        self, layer: str, parts: Mapping[str, int], *, before: Neighbor | None = None, after: Neighbor = ATTENTION,
        inputs: int | None = None, **options: Any,
    ) -> ColumnParallelLinear:  # fmt: skip
        """Return the column-parallel layer `layer` that computes `parts` from the part's input.

        Args:
            layer: Name of the layer within the part.
            parts: Number of outputs of each projection on all ranks. Their weights are named after them.
            before: The preceding operation; by default the norm `input`.
            after: The following operation.
            inputs: Number of inputs, by default the hidden size.
            **options: Further arguments of `ColumnParallelLinear`.
        """
        before = before or self.input
        recompute = self.memory.norms and before.fuses != "none"
        site = self.context.site(before=before, after=after, recompute_input=recompute)
        return ColumnParallelLinear(
            f"{self.name}.{layer}", inputs or self.model.hidden_size, sum(parts.values()),
            parts={f"{self.name}.{part}": width for part, width in parts.items()},
            init=Init("normal", self.model.hidden_init_std), site=site, **self.context.linear_options(), **options,
        )  # fmt: skip

    def row(
        self, inputs: int, layer: str = "proj", *, before: Neighbor = ATTENTION, recompute_input: bool = False,
        bias: bool = False,
    ) -> RowParallelLinear:  # fmt: skip
        """Return the row-parallel layer `layer` from `inputs` channels on all ranks to the residual stream."""
        site = self.context.site(before=before, recompute_input=recompute_input)
        return RowParallelLinear(
            f"{self.name}.{layer}", inputs, self.model.hidden_size, bias=bias, site=site,
            init=Init("normal", self.model.output_init_std), **self.context.linear_options(),
        )  # fmt: skip

    def parameter(self, which: str, init: Init, *shape: int, matrix: bool = False) -> nn.Parameter:
        """Return the parameter `<name>.<which>`, of which each rank holds a slice of the first dim.

        Only a `matrix` has weight decay. `shape` is the shape on all ranks.
        """
        spec = {"matrix": True} if matrix else {"weight_decay": False}
        return sharded_parameters(self.context, {f"{self.name}.{which}": shape}, init, **spec)
