"""Optimizers that update weights and state in one pass over memory (`megafp8.kernels.weight_update`)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megafp8.optimizer.fp8_moments import Fp8MomentStorage
from megafp8.optimizer.state_storage import StateStorage

if TYPE_CHECKING:
    from megafp8.kernels.weight_update import UpdateTable, WeightTensors

PARAM, REMAINDER = "param", "remainder"
"""State names of the parameter into which a master is rounded, and of the remainder of a bf16 parameter."""


class FusedOptimizer:
    """Optimizer of flat fp32 masters that updates moments (fp32, bf16 or FP8) and masters in their stored form.

    It has the interface of PyTorch's optimizers. The state of a master has the storage of its moments, and may have the
    tensors `PARAM` and `REMAINDER`. The caller sets the attributes before each step.

    Args:
        groups: Parameter groups of masters.
        moments: Names of the moments, one or two.
        update: Function that updates the tensors of a table. It gets the table and, by name, `lr`, `decay`, `count`,
            `factor` and `skip` (`UpdateTable.adamw`).

    Attributes:
        count: Number of the step, counted from 1.
        factor: Factor of the gradients in the update, or None. The gradients themselves do not change.
        skip: Bool scalar on the device, or None. If it is true, nothing changes.
    """

    _step_supports_amp_scaling = True  # PyTorch's name: the device decides whether to skip

    def __init__(self, groups: list[dict[str, Any]], moments: tuple[str, ...], update: Callable[..., None]) -> None:
        self.param_groups = groups
        self.state: defaultdict[Tensor, dict[str, Any]] = defaultdict(dict)
        self.count = 1
        self.factor: Tensor | None = None
        self.skip: Tensor | None = None
        self._moments, self._update = moments, update
        self._tables: dict[tuple[tuple[int, ...], ...], list[UpdateTable]] = {}

    @torch.no_grad()
    def step(self) -> None:
        """Update the weights once."""
        for group in self.param_groups:
            for table in self._tables_of(group["params"]):
                self._update(
                    table, lr=group["lr"], decay=group["weight_decay"], count=self.count, factor=self.factor,
                    skip=self.skip,
                )  # fmt: skip

    def _tables_of(self, masters: list[Tensor]) -> list[UpdateTable]:
        """Return the tables of these masters, one for each form. Rebuild them if a tensor has moved."""
        from megafp8.kernels.weight_update import UpdateTable  # needs Triton, which comes with torch's CUDA builds

        weights = [self._tensors(master) for master in masters]
        key = tuple(x.addresses for x in weights)
        if key not in self._tables:
            by_form: dict[Any, list[WeightTensors]] = {}
            for x in weights:
                by_form.setdefault(x.form, []).append(x)
            self._tables[key] = [UpdateTable(alike) for alike in by_form.values()]
        return self._tables[key]

    def _tensors(self, master: Tensor) -> WeightTensors:
        from megafp8.kernels.weight_update import WeightTensors

        state, gradient = self.state[master], master.grad
        assert gradient is not None
        storages: list[StateStorage] = [state[name] for name in self._moments]
        parts = [(*storage.tensors, None)[:2] for storage in storages] + [(None, None)]
        (first, first_exponent), (second, second_exponent) = parts[:2]
        assert first is not None
        remainder = state.get(REMAINDER)
        fp8 = storages[0]
        noise = (fp8.noise_key, fp8.first) if isinstance(fp8, Fp8MomentStorage) else ((0, 0), 0)
        return WeightTensors(
            gradient, first, second, first_exponent, second_exponent,
            master.detach() if remainder is None else None, state.get(PARAM), remainder, *noise,
        )  # fmt: skip
