"""A linear layer under test: its `LinearState`, called as a function of input and weight."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megafp8.fp8.manager import Fp8Manager
from megafp8.ops.fusion import LinearInput
from megafp8.ops.linear import linear
from megafp8.plan import LinearSite


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
