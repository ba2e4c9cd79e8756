"""RMSNorm and LayerNorm (Zhang & Sennrich 2019, arXiv:1910.07467; Ba et al. 2016, arXiv:1607.06450).

Their weights are replicated over the tensor-parallel group, but their input may be sharded: by sequence under sequence
parallelism, by heads for q- and k-norms. Then each rank computes a partial gradient of the weights, and the group sums
these once a step: the parameters say so in their spec (`reduce_over_tp`).
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megafp8.distributed.sharding import Init, ParamSpec, set_spec, unsharded
from megafp8.fp8.linear_state import InputFormat
from megafp8.models.context import BuildContext
from megafp8.ops.fusion import LinearInput
from megafp8.ops.norm import norm


class Norm(nn.Module):
    """Normalizes the last dim of x (any leading dims), in x's dtype with statistics in fp32 or wider."""

    def __init__(
        self,
        name: str,
        size: int,
        context: BuildContext,
        *,
        kind: Literal["rmsnorm", "layernorm"],
        eps: float,
        sees_a_slice: bool,
    ) -> None:
        super().__init__()
        self.kind, self.eps, self.size = kind, eps, size

        def parameter(name: str, init: Init) -> nn.Parameter:
            spec = ParamSpec(
                unsharded(name, (size,)), init, replicated_over_tp=True, reduce_over_tp=sees_a_slice, weight_decay=False
            )
            return set_spec(nn.Parameter(torch.empty(size, dtype=context.dtype, device=context.device)), spec)

        self.weight = parameter(f"{name}.weight", Init("ones"))
        self.bias = parameter(f"{name}.bias", Init("zeros")) if kind == "layernorm" else None

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "rmsnorm":
            return F.rms_norm(x, (self.size,), self.weight, self.eps)
        return F.layer_norm(x, (self.size,), self.weight, self.bias, self.eps)

    def residual(
        self, x: Tensor, branch: Tensor | None, form: InputFormat | None
    ) -> tuple[Tensor, Tensor | LinearInput]:
        """`x + branch`, and its norm as the layer after it takes its input (`form`), in one pass each way."""
        return norm(x, branch, self.weight, self.bias, self.eps, form)
