"""Norms of gradients, weights and updates by layer, exact in every layout.

The norms of a layer often show a problem before the loss does: a layer that learns nothing, or a layer with updates far
too large for its weights. At an interval, a step is *measured*: its gradients before clipping, the fp32 weights after
the update, and the changes of the weights.

*Exactness.* Ranks hold parts of a layer (tensor parallelism, ZeRO, FSDP, experts) or copies of it. Each rank adds the
squares of the elements that count on it in float64, by the rule of the gradient norm (`OptimizerStep`). One reduction
adds the sums of all layers over ranks. So the squares of a step's gradient norms add up to the square of its global
gradient norm.

*Cost.* The norms of gradients are computed for clipping anyway. For the other norms, weights are copied before the
update, subtracted after it, and read twice. This is 28 bytes of memory traffic for each element that the rank updates.
The update runs in batches of about 64 MB, so that the copies stay small. Adam is elementwise, so its result is bitwise
the same. The host waits for the update, which it does not do in other steps. CUDA graphs are not affected, because they
do not contain updates.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megafp8.parallel.collectives import all_gather_objects
from megafp8.parallel.sharding import FlatShard, ParamSpec, spec_of

GRADIENT, WEIGHT, UPDATE = KINDS = ("grad_norm", "weight_norm", "update_norm")
"""Kinds of norms, as named in metrics: `grad_norm/layers.0`."""

Watch = Callable[[Sequence[tuple[FlatShard, Tensor]]], AbstractContextManager[None]]
"""Function that makes a context, in which the flat fp32 values of these shards or parts of shards are updated."""


def layer_of(spec: ParamSpec) -> str:
    """Return the layer of a parameter: its block (`layers.3`), or the first part of its name (`embedding`)."""
    parts = spec.shards[0].name.split(".")
    return ".".join(parts[:2]) if parts[0] == "layers" else parts[0]


def in_order(layers: Iterable[str]) -> list[str]:
    """Sort layers in the order of the model: embeddings, blocks by number, and the rest."""

    def key(layer: str) -> tuple[int, int, str]:
        if layer.startswith("layers."):
            return 1, int(layer.split(".")[1]), layer
        return 0 if layer.startswith("embedding") else 2, 0, layer

    return sorted(layers, key=key)


def layers_of_model(params: Iterable[nn.Parameter], group: ProcessGroup | None) -> list[str]:
    """Return the layers of the `params` of all ranks, in the order of the model. Collective.

    `group` must have at least one rank of each pipeline stage.
    """
    return in_order(set().union(*all_gather_objects({layer_of(spec_of(param)) for param in params}, group)))


class StepNorms:
    """Norms of one step on this rank. No method waits for the device.

    Args:
        layers: Layers of the whole model.
        counts: Function that returns whether this rank counts a parameter.
        device: Device of the norms.
    """

    def __init__(self, layers: Sequence[str], counts: Callable[[ParamSpec], bool], device: torch.device) -> None:
        self._rows = {(kind, layer): i for i, (kind, layer) in enumerate((k, x) for k in KINDS for x in layers)}
        self._counts, self._device = counts, device
        self._norms: list[Tensor] = []
        self._row_of: list[int] = []

    def add(self, kind: str, shards: Sequence[FlatShard], norms: Sequence[Tensor]) -> None:
        """Add the 2-norms of this rank's tensors of `shards`, float64 scalars."""
        self._norms += norms
        self._row_of += [self._rows[kind, layer_of(spec_of(shard.param))] for shard in shards]

    @contextmanager
    def watch(self, values: Sequence[tuple[FlatShard, Tensor]]) -> Iterator[None]:
        """Measure weights and updates around the update in the context. This is a `Watch`."""
        counted = [(shard, x) for shard, x in values if self._counts(spec_of(shard.param))]
        shards, now = [shard for shard, _ in counted], [x for _, x in counted]
        before = [x.clone() for x in now]
        yield
        if counted:
            self.add(WEIGHT, shards, norms(now))
            torch._foreach_sub_(before, now)
            self.add(UPDATE, shards, norms(before))

    def sums(self) -> Tensor:
        """Return this rank's float64 sums of squares for each kind and layer, which are to be added over ranks."""
        columns, used = [], Counter[int]()
        for row in self._row_of:
            columns.append(used[row])
            used[row] += 1
        squares = torch.zeros(len(self._rows), max(used.values(), default=0), dtype=torch.float64, device=self._device)
        if self._norms:
            at = torch.tensor([self._row_of, columns], device=self._device)
            squares[at[0], at[1]] = torch.stack(self._norms).square()
        return squares.sum(dim=1)

    def by_name(self, sums: Sequence[float], kinds: Sequence[str] = KINDS) -> dict[str, float]:
        """Return norms by kind and layer, and norms of all weights and of the whole update.

        `sums` are the sums of all ranks.
        """
        norms: dict[str, float] = {}
        for kind in kinds:
            layer_sums = {layer: sums[i] for (name, layer), i in self._rows.items() if name == kind}
            norms |= {f"{kind}/{layer}": square**0.5 for layer, square in layer_sums.items()}
            if kind != GRADIENT:
                norms[kind] = sum(layer_sums.values()) ** 0.5
        return norms


def norms(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the 2-norms of tensors as float64 scalars, with squares summed in float64."""
    return list(torch._foreach_norm(list(tensors), 2, torch.float64)) if tensors else []
