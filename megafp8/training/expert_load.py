"""How evenly the tokens of a step were spread over experts: summed over all ranks, summarized, and written to a file.

expert_load.jsonl in the run folder has one JSON object a sampled step: `{"step": 100, "tokens": {"3": [817, ...]}}`,
by layer the choices of each expert.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megafp8.distributed.collectives import all_reduce
from megafp8.models.router import Router
from megafp8.parallel_state import ParallelState
from megafp8.text_file import DiskErrorsLogged, JsonLines
from megafp8.training.metrics import read_steps
from megafp8.training.observer import Observer


@dataclass(frozen=True)
class ExpertLoad:
    """The load of a step. `tokens`: by layer, the choices of each expert.

    `aux_loss`, `z_loss`: what the routers added to the loss that is differentiated. `entropy`: of the mean scores of
    all tokens, averaged over layers; 1 if all experts have the same, 0 if one has all. `drop_rate`: the share of all
    choices that were beyond the capacity of experts.
    """

    tokens: Mapping[int, Sequence[int]]
    aux_loss: float
    z_loss: float
    entropy: float
    drop_rate: float = 0.0

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

    @property
    def own_sums(self) -> list[Tensor]:
        """What this rank's routers have added up, live."""
        return [router.load.sums for _, router in self._routers]

    def sum(self) -> Tensor:
        """What all routers added up, `[layers, 2 · experts + 3]` float64 on the device. Collective; does not wait.

        In a row the choices of each expert, the sums of its scores, aux loss, z-loss and dropped choices.
        """
        shape = len(self._layers), 2 * self._experts + 3
        total = torch.zeros(shape, dtype=torch.float64, device=self._parallel.device)
        for row, router in self._routers:
            total[row] = router.load.sums
        all_reduce(total, self._parallel.amax.group)  # data × context × tensor: all tokens of a layer
        return all_reduce(total, self._parallel.pipeline.group)

    def update_routers(self, total: Tensor) -> None:
        """Let this rank's routers know the load of a step."""
        for row, router in self._routers:
            router.update(total[row, : self._experts])

    def load(self, total: Tensor) -> ExpertLoad:
        """`total`, on the host, as figures."""
        tokens_le, scores_le, losses_l2, dropped_l1 = total.split([self._experts, self._experts, 2, 1], dim=1)
        tokens = {layer: [int(x) for x in row] for layer, row in zip(self._layers, tokens_le.tolist())}
        mean_le = scores_le / scores_le.sum(dim=1, keepdim=True)
        entropy = torch.special.entr(mean_le).sum(dim=1).mean().item() / math.log(max(self._experts, 2))
        aux, z = losses_l2.sum(dim=0).tolist()
        return ExpertLoad(tokens, aux, z, entropy, (dropped_l1.sum() / tokens_le.sum().clamp(min=1)).item())


FILE_NAME = "expert_load.jsonl"


class ExpertLoadMetrics(Observer):
    """The load in the metrics of a step, which is the `latest`; of every `interval`th step it is appended to `path`.

    A resumed run repeats steps that a crash lost.
    """

    def __init__(self, latest: Callable[[], ExpertLoad | None], path: Path | None = None, interval: int = 1) -> None:
        self._latest, self._interval = latest, interval
        self._lines = None if path is None else JsonLines(path)
        self._errors_logged = DiskErrorsLogged(FILE_NAME)

    def after_step(self, step: int, loss: float, skipped: bool) -> Mapping[str, Any]:
        load = self._latest()
        if load is None:
            return {}
        if self._lines is not None and step % self._interval == 0:
            with self._errors_logged:
                self._lines.append({"step": step, "tokens": load.tokens})
        return {
            "router_aux_loss": load.aux_loss,
            "router_z_loss": load.z_loss,
            "expert_imbalance": load.imbalance,
            "router_entropy": load.entropy,
            "expert_drop_rate": load.drop_rate,
        }

    def close(self) -> None:
        if self._lines is not None:
            with self._errors_logged:
                self._lines.close()


def read_expert_load(path: Path) -> dict[int, dict[int, list[int]]]:
    """The choices of each expert by step and layer, the later ones of a step that was repeated.

    Lines that are not complete, as a kill leaves them, are ignored.
    """
    return {
        record["step"]: {int(layer): tokens for layer, tokens in record["tokens"].items()}
        for record in read_steps(path, "tokens")
    }


Load = Mapping[int, Sequence[int]]
"""The choices of each expert, by layer."""


def relative(load: Load) -> NDArray[np.float64]:
    """`[layers, experts]`: tokens relative to the mean of the layer."""
    tokens = np.array(list(load.values()), dtype=np.float64)
    return tokens / np.maximum(tokens.mean(axis=1, keepdims=True), 1e-30)
