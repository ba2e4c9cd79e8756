"""How evenly the tokens of a step were spread over experts: summed over all ranks, summarized, and written to a file.

expert_load.jsonl in the run folder has one JSON object a sampled step: `{"step": 100, "tokens": {"3": [817, ...]}}`,
by layer the choices of each expert.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megafp8.distributed.collectives import all_reduce
from megafp8.models.router import Router
from megafp8.parallel_state import ParallelState


@dataclass(frozen=True)
class ExpertLoad:
    """The load of a step. `tokens`: by layer, the choices of each expert.

    `aux_loss`, `z_loss`: what the routers added to the loss that is differentiated. `entropy`: of the mean scores of a
    sequence, averaged over sequences and layers; 1 if all experts have the same, 0 if one has all.
    """

    tokens: Mapping[int, Sequence[int]]
    aux_loss: float
    z_loss: float
    entropy: float

    @property
    def imbalance(self) -> float:
        """Tokens of the expert with the most, divided by the mean of its layer; of the worst layer. 1 is even."""
        return max(max(tokens) * len(tokens) / max(sum(tokens), 1) for tokens in self.tokens.values())


class LoadCollector:
    """Sums what the routers of all ranks have added up in a step.

    `routers`: of this rank, by layer; `layers`: all that have experts; `experts`: of each.
    """

    def __init__(
        self, routers: Mapping[int, Router], layers: Sequence[int], experts: int, parallel: ParallelState
    ) -> None:
        self._layers, self._experts, self._parallel = layers, experts, parallel
        self._routers = [(layers.index(layer), router) for layer, router in routers.items()]

    def zero(self) -> None:
        """Begin a step."""
        for _, router in self._routers:
            router.load.zero()

    def sum(self) -> Tensor:
        """What all routers added up, `[layers, experts + 3]` float64 on the device. Collective; does not wait."""
        total = torch.zeros(len(self._layers), self._experts + 3, dtype=torch.float64, device=self._parallel.device)
        for row, router in self._routers:
            total[row] = torch.cat([router.load.tokens, router.load.losses])
        all_reduce(total, self._parallel.amax.group)  # data × context × tensor: all tokens of a layer
        return all_reduce(total, self._parallel.pipeline.group)

    def update_biases(self, total: Tensor) -> None:
        """Move the selection biases of this rank's routers against the load of a step."""
        for row, router in self._routers:
            router.update_bias(total[row, :-3])

    def load(self, total: Tensor) -> ExpertLoad:
        """`total`, on the host, as figures."""
        tokens = {layer: [int(x) for x in row] for layer, row in zip(self._layers, total[:, :-3].tolist())}
        aux, z, _ = total[:, -3:].sum(dim=0).tolist()
        entropy = total[:, -1].mean().item() / math.log(self._experts) if self._experts > 1 else 1.0
        return ExpertLoad(tokens, aux, z, entropy)


FILE_NAME = "expert_load.jsonl"


class ExpertLoadWriter:
    """Appends the load of every `interval`th step to `path`. A resumed run repeats steps that a crash lost."""

    def __init__(self, path: Path, interval: int) -> None:
        self._interval, self._file = interval, path.open("a", encoding="utf-8")

    def write(self, step: int, load: ExpertLoad) -> None:
        if step % self._interval == 0:
            self._file.write(json.dumps({"step": step, "tokens": load.tokens}) + "\n")
            self._file.flush()

    def close(self) -> None:
        self._file.close()


def read_expert_load(path: Path) -> dict[int, dict[int, list[int]]]:
    """By step and layer, the choices of each expert; of a step that was repeated, the later ones.

    Lines that are not complete, as a kill leaves them, are ignored.
    """
    found: dict[int, dict[int, list[int]]] = {}
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue
        found = {step: tokens for step, tokens in found.items() if step < record["step"]}
        found[record["step"]] = {int(layer): tokens for layer, tokens in record["tokens"].items()}
    return found
