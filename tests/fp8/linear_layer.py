"""A linear layer under test, called as a function of input and weight; a gradient sink of its weight."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megafp8.fp8.manager import Fp8Manager
from megafp8.linear.deferred_wgrad import WgradStore
from megafp8.linear.fusion import LinearInput
from megafp8.linear.grad_sink import set_grad_sink
from megafp8.linear.linear import linear
from megafp8.plan import LinearSite


class Sum:
    """Gradient sink of a weight: the sum in fp32, and how many gradients were added."""

    wgrads: WgradStore | None = None
    is_empty = False

    def __init__(self, weight: Tensor) -> None:
        self.main_grad, self.count = torch.zeros_like(weight, dtype=torch.float32), 0
        set_grad_sink(weight, self)

    def added(self) -> None:
        self.count += 1


class LinearLayer:
    """The layer `name` of `manager`; `site`: fields of its `LinearSite`."""

    def __init__(
        self, manager: Fp8Manager, name: str = "layer", *, tp_group: ProcessGroup | None = None, **site: Any
    ) -> None:
        self.state = manager.linear(LinearSite(name, **site), tp_group=tp_group)

    def __call__(
        self, x: Tensor | LinearInput, weight: nn.Parameter, bias: Tensor | None = None, **options: Any
    ) -> Tensor:
        return linear(x, weight, self.state, bias=bias, **options)
