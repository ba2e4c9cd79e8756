"""RMSNorm and LayerNorm (Zhang & Sennrich 2019, arXiv:1910.07467; Ba et al. 2016, arXiv:1607.06450).

Their weights are whole on every rank, and what they see may not be: a slice of the sequence under sequence
parallelism, a slice of the heads for q- and k-norms. Then each rank computes only its share of the weight's gradient,
which is summed over the tensor group once a step: the parameters say so in their spec (`reduce_over_tp`).
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megafp8.distributed.sharding import Init, ParamSpec, set_spec, unsharded
from megafp8.fp8 import Input, InputCast
from megafp8.models.context import BuildContext
from megafp8.ops.norm import norm


class Norm(nn.Module):
    """Normalise the last dim of x (any leading dims), in x's dtype with statistics in fp32 or better."""

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
        self.weight = self._parameter(f"{name}.weight", Init("ones"), context, sees_a_slice)
        self.bias = (
            self._parameter(f"{name}.bias", Init("zeros"), context, sees_a_slice) if kind == "layernorm" else None
        )

    def _parameter(self, name: str, init: Init, context: BuildContext, sees_a_slice: bool) -> nn.Parameter:
        spec = ParamSpec(
            unsharded(name, (self.size,)),
            init,
            replicated_over_tp=True,
            reduce_over_tp=sees_a_slice,
            weight_decay=False,
        )
        return set_spec(nn.Parameter(torch.empty(self.size, dtype=context.dtype, device=context.device)), spec)

    def forward(self, x: Tensor) -> Tensor:
        """The norm's values."""
        if self.kind == "rmsnorm":
            return F.rms_norm(x, (self.size,), self.weight, self.eps)
        return F.layer_norm(x, (self.size,), self.weight, self.bias, self.eps)

    def residual(
        self, x: Tensor, branch: Tensor | None, cast: InputCast | None, *, remade: bool = False
    ) -> tuple[Tensor, Input]:
        """`x + branch`, and its norm as the layer behind it wants it: all in one pass, in both directions.

        `remade`: that layer does not keep its input, and makes it again in backward.
        """
        return norm(x, branch, self.weight, self.bias, self.eps, cast, remade=remade)
