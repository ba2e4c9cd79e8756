"""AdamW on GPUs in one pass over memory (`megafp8.kernels.adamw`), with the interface of PyTorch's optimizers."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from megafp8.kernels.adamw import AdamWTable, AdamWTensors

PARAM, REMAINDER = "param", "remainder"
"""State names of the parameter into which a master is rounded, and of the remainder of a bf16 parameter."""


class FusedAdamW:
    """AdamW of flat fp32 masters, which updates moments (fp32 or bf16) and masters in their stored form.

    The state of a master has its moments, and may have the tensors `PARAM` and `REMAINDER`. The caller sets the
    attributes before each step.

    Attributes:
        count: Number of the step, counted from 1.
        factor: Factor of the gradients in the update, or None. The gradients themselves do not change.
        skip: Bool scalar on the device, or None. If it is true, nothing changes.
    """

    _step_supports_amp_scaling = True  # PyTorch's name: the device decides whether to skip

    def __init__(self, groups: list[dict[str, Any]], *, betas: tuple[float, float], eps: float) -> None:
        self.param_groups = groups
        self.state: defaultdict[Tensor, dict[str, Tensor]] = defaultdict(dict)
        self.count = 1
        self.factor: Tensor | None = None
        self.skip: Tensor | None = None
        self._betas, self._eps = betas, eps
        self._tables: dict[tuple[tuple[int, ...], ...], list[AdamWTable]] = {}

    @torch.no_grad()
    def step(self) -> None:
        """Update the weights once."""
        for group in self.param_groups:
            for table in self._tables_of(group["params"]):
                table.step(
                    lr=group["lr"], decay=group["weight_decay"], betas=self._betas, eps=self._eps,
                    count=self.count, factor=self.factor, skip=self.skip,
                )  # fmt: skip

    def _tables_of(self, masters: list[Tensor]) -> list[AdamWTable]:
        """Return the tables of these masters, one for each form. Rebuild them if a tensor has moved."""
        from megafp8.kernels.adamw import AdamWTable  # needs Triton, which comes with torch's CUDA builds

        tensors = [self._tensors(master) for master in masters]
        key = tuple(x.addresses for x in tensors)
        if key not in self._tables:
            by_form: dict[Any, list[AdamWTensors]] = {}
            for x in tensors:
                by_form.setdefault(x.form, []).append(x)
            self._tables[key] = [AdamWTable(alike) for alike in by_form.values()]
        return self._tables[key]

    def _tensors(self, master: Tensor) -> AdamWTensors:
        from megafp8.kernels.adamw import AdamWTensors

        state, gradient = self.state[master], master.grad
        assert gradient is not None
        remainder = state.get(REMAINDER)
        fp32_master = None if remainder is not None else master.detach()
        return AdamWTensors(gradient, state["exp_avg"], state["exp_avg_sq"], fp32_master, state.get(PARAM), remainder)
