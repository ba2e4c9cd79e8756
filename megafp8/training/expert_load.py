"""Load of the experts in a step: summed over all ranks, summarized in metrics, and written to a file.

expert_load.jsonl in the run folder has one JSON object per sampled step. It holds the number of tokens that chose each
expert, by layer: `{"step": 100, "tokens": {"3": [817, ...]}}`.
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

from megafp8.host.text_file import DiskErrorsLogged, JsonLines
from megafp8.layers.experts.router import Router
from megafp8.parallel.collectives import all_reduce
from megafp8.parallel.parallel_state import ParallelState
from megafp8.training.metrics import read_steps
from megafp8.training.observer import Observer


@dataclass(frozen=True)
class ExpertLoad:
    """Load of the experts in one step.

    Attributes:
        tokens: Number of tokens that chose each expert, by layer.
        aux_loss: Auxiliary loss of the routers, scaled as in the differentiated loss.
        z_loss: z-loss of the routers, scaled as in the differentiated loss.
        entropy: Entropy of the mean scores of all tokens, averaged over layers: 1 if all experts have equal scores, 0
            if one expert has the whole score.
        drop_rate: Share of choices that exceeded the capacity of experts and were dropped.
    """

    tokens: Mapping[int, Sequence[int]]
    aux_loss: float
    z_loss: float
    entropy: float
    drop_rate: float = 0.0

    @property
    def imbalance(self) -> float:
        """Tokens of the fullest expert divided by the mean of its layer, in the worst layer. 1 is even."""
        return max(max(tokens) * len(tokens) / max(sum(tokens), 1) for tokens in self.tokens.values())


class LoadCollector:
    """Collector of the loads that the routers of all ranks accumulate in a step.

    Args:
        routers: Routers of this rank, by layer.
        experts: Number of experts in every layer of the model with experts, by layer.
        parallel: Process groups.
    """

    def __init__(self, routers: Mapping[int, Router], experts: Mapping[int, int], parallel: ParallelState) -> None:
        self._experts, self._parallel = experts, parallel
        self._sizes = [2 * count + 3 for count in experts.values()]
        numbers = {layer: number for number, layer in enumerate(experts)}
        self._routers = [(numbers[layer], router) for layer, router in routers.items()]

    def zero(self) -> None:
        """Zero the loads of this rank's routers at the beginning of a step."""
        for _, router in self._routers:
            router.load.zero()

    @property
    def own_sums(self) -> list[Tensor]:
        """Tensors in which this rank's routers accumulate their loads."""
        return [router.load.sums for _, router in self._routers]

    def sum(self) -> Tensor:
        """Return the sum of the loads of all routers. Collective; does not wait for the device.

        Returns:
            Flat float64 tensor on the device. For each layer it holds the number of choices of each expert, the sum of
            each expert's scores, the auxiliary loss, the z-loss and the number of dropped choices.
        """
        total = torch.zeros(sum(self._sizes), dtype=torch.float64, device=self._parallel.device)
        rows = total.split(self._sizes)
        for number, router in self._routers:
            rows[number].copy_(router.load.sums)
        all_reduce(total, self._parallel.amax.group)  # data × context × tensor: all tokens of a layer
        return all_reduce(total, self._parallel.pipeline.group)

    def update_routers(self, total: Tensor) -> None:
        """Update this rank's routers, such as their balancing biases, with the result of `sum`."""
        rows = total.split(self._sizes)
        for number, router in self._routers:
            router.update(rows[number][: len(router.load.tokens)])

    def load(self, total: Tensor) -> ExpertLoad:
        """Convert the result of `sum`, after it was copied to the host, to an `ExpertLoad`."""
        rows = [row.split([n, n, 2, 1]) for row, n in zip(total.split(self._sizes), self._experts.values())]
        tokens = {layer: [int(x) for x in row[0].tolist()] for layer, row in zip(self._experts, rows)}
        means = [scores / scores.sum() for _, scores, _, _ in rows]
        entropy = torch.stack([torch.special.entr(x).sum() / math.log(max(len(x), 2)) for x in means]).mean().item()
        aux, z = torch.stack([losses for _, _, losses, _ in rows]).sum(dim=0).tolist()
        dropped, routed = sum(row[3].item() for row in rows), sum(row[0].sum().item() for row in rows)
        return ExpertLoad(tokens, aux, z, entropy, dropped / max(routed, 1))


FILE_NAME = "expert_load.jsonl"


class ExpertLoadMetrics(Observer):
    """Observer that adds the expert load to the metrics, and appends the load of every `interval`-th step to a file.

    A resumed run appends the repeated steps again.

    Args:
        latest: Function that returns the load of the latest step, or None.
        path: File to append to, or None to write no file.
        interval: Number of steps between loads in the file.
    """

    def __init__(self, latest: Callable[[], ExpertLoad | None], path: Path | None = None, interval: int = 1) -> None:
        self._latest, self._interval = latest, interval
        self._lines = None if path is None else JsonLines(path)
        self._errors_logged = DiskErrorsLogged(FILE_NAME)

    def after_step(self, step: int, loss: float, skipped: bool) -> Mapping[str, Any]:
        """Return the metrics of the latest load, and append the load to the file if that is due."""
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
        """Close the file."""
        if self._lines is not None:
            with self._errors_logged:
                self._lines.close()


def read_expert_load(path: Path) -> dict[int, dict[int, list[int]]]:
    """Return the number of tokens that chose each expert, by step and layer. A repeated step has its later values.

    Incomplete lines, which a kill may leave, are ignored.
    """
    return {
        record["step"]: {int(layer): tokens for layer, tokens in record["tokens"].items()}
        for record in read_steps(path, "tokens")
    }


Load = Mapping[int, Sequence[int]]
"""Number of tokens that chose each expert, by layer."""


def relative(load: Load) -> NDArray[np.float64]:
    """Return each expert's tokens divided by the mean of its layer, float64 `[layers, experts]`."""
    tokens = np.array(list(load.values()), dtype=np.float64)
    return tokens / np.maximum(tokens.mean(axis=1, keepdims=True), 1e-30)
