"""Norms of gradients, weights and updates by layer, exact in every layout.

A layer that learns nothing, or whose updates are far larger for its weights than those of others, often shows in the
norms of its tensors before it shows in the loss. At an interval a step is *measured*: its gradients before clipping,
the fp32 weights after the update, and the difference that the update made to these.

*Exact.* Ranks hold parts of a layer (tensor parallelism, ZeRO, FSDP, experts) or copies of it. Each adds the squares of
the elements that count on it, by the rule of the gradient norm (`OptimizerStep`), in float64; the sums of all layers
are added over ranks at once. So the squares of a step's gradient norms add up to that of its global gradient norm.

*Cost.* The norms of gradients are computed for clipping anyway. For the others, weights are copied before the update,
subtracted after it, and read twice: 28 bytes of memory traffic for each element that the rank updates. Updates are made
in batches of some 64 MB, so that the copies stay small; Adam is elementwise, so the bits are the same. The host waits
for the update, which it does not in other steps. CUDA graphs do not matter: updates are not in them.
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
"""What is measured, as named in metrics: `grad_norm/layers.0`."""

Watch = Callable[[Sequence[tuple[FlatShard, Tensor]]], AbstractContextManager[None]]
"""Makes a context in which the flat fp32 values of these shards, or of parts of them, are updated."""


def layer_of(spec: ParamSpec) -> str:
    """The layer of a parameter: its block, as `layers.3`; else the first part of its name, as `embedding`."""
    parts = spec.shards[0].name.split(".")
    return ".".join(parts[:2]) if parts[0] == "layers" else parts[0]


def in_order(layers: Iterable[str]) -> list[str]:
    """Layers in the order of the model: embeddings, blocks by number, and the others."""

    def key(layer: str) -> tuple[int, int, str]:
        if layer.startswith("layers."):
            return 1, int(layer.split(".")[1]), layer
        return 0 if layer.startswith("embedding") else 2, 0, layer

    return sorted(layers, key=key)


def layers_of_model(params: Iterable[nn.Parameter], group: ProcessGroup | None) -> list[str]:
    """The layers of the `params` of all ranks, in order; `group`: of one rank of each stage at least. Collective."""
    return in_order(set().union(*all_gather_objects({layer_of(spec_of(param)) for param in params}, group)))


class StepNorms:
    """The norms of one step of this rank. `layers`: of the whole model; `counts`: whether this rank counts a parameter.

    Nothing here waits for the device.
    """

    def __init__(self, layers: Sequence[str], counts: Callable[[ParamSpec], bool], device: torch.device) -> None:
        self._rows = {(kind, layer): i for i, (kind, layer) in enumerate((k, x) for k in KINDS for x in layers)}
        self._counts, self._device = counts, device
        self._norms: list[Tensor] = []
        self._row_of: list[int] = []

    def add(self, kind: str, shards: Sequence[FlatShard], norms: Sequence[Tensor]) -> None:
        """Add the 2-norms, float64 scalars, of what this rank has of each of `shards`."""
        self._norms += norms
        self._row_of += [self._rows[kind, layer_of(spec_of(shard.param))] for shard in shards]

    @contextmanager
    def watch(self, values: Sequence[tuple[FlatShard, Tensor]]) -> Iterator[None]:
        """A `Watch`: measures weights and updates."""
        counted = [(shard, x) for shard, x in values if self._counts(spec_of(shard.param))]
        shards, now = [shard for shard, _ in counted], [x for _, x in counted]
        before = [x.clone() for x in now]
        yield
        if counted:
            self.add(WEIGHT, shards, norms(now))
            torch._foreach_sub_(before, now)
            self.add(UPDATE, shards, norms(before))

    def sums(self) -> Tensor:
        """This rank's sums of squares, float64, of each kind and layer; to be added over ranks."""
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
        """Norms by kind and layer, and those of all weights and of the whole update, from the `sums` of all ranks."""
        norms: dict[str, float] = {}
        for kind in kinds:
            layer_sums = {layer: sums[i] for (name, layer), i in self._rows.items() if name == kind}
            norms |= {f"{kind}/{layer}": square**0.5 for layer, square in layer_sums.items()}
            if kind != GRADIENT:
                norms[kind] = sum(layer_sums.values()) ** 0.5
        return norms


def norms(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The 2-norms of tensors, float64 scalars whose squares are summed in float64."""
    return list(torch._foreach_norm(list(tensors), 2, torch.float64)) if tensors else []
