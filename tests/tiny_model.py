"""Parameters, a buffer and a very small model for tests, and the same model in plain float64 torch.

Shapes: n tokens, v vocabulary, h hidden. The embedding is tied to the output layer, so it gets one gradient through
autograd and one through its sink.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megafp8.linear.grad_sink import deliver
from megafp8.optimizer.mixed_precision import MixedPrecisionOptimizer
from megafp8.parallel.data.grad_buffer import GradBuffer
from megafp8.parallel.sharding import FlatShard, Init, ParamSpec, set_spec, unsharded

VOCABULARY, HIDDEN = 11, 8
NO_DECAY = ("norm", "bias")
CPU = torch.device("cpu")


def make_param(
    name: str, values: Any, dtype: torch.dtype = torch.float32, device: str = "cpu", **spec: Any
) -> nn.Parameter:
    """A parameter with a spec and a copy of `values`; zeros if `values` is a number of elements."""
    values = np.zeros(values) if isinstance(values, int) else np.asarray(values, dtype=np.float64)
    param = nn.Parameter(torch.tensor(values, dtype=dtype, device=device))
    spec = {"replicated_over_tp": True, "weight_decay": name not in NO_DECAY, **spec}
    return set_spec(param, ParamSpec(unsharded(name, tuple(param.shape)), Init("zeros"), **spec))


def set_specs(module: nn.Module) -> None:
    """Give every parameter of `module` a spec, unsharded under its own name."""
    for name, param in module.named_parameters():
        set_spec(param, ParamSpec(unsharded(name, tuple(param.shape)), Init("zeros"), True))


def make_buffer(params: Any, bucket_elements: int = 1, group: Any = None, **options: Any) -> GradBuffer:
    params = list(params)
    device = params[0].device
    return GradBuffer(params, data_parallel_group=group, bucket_elements=bucket_elements, device=device, **options)


def flat_shard(name: str, n: int, start: int = 0, end: int | None = None) -> FlatShard:
    """Elements `[start, end)`, or all, of a parameter of n zeros."""
    return FlatShard(make_param(name, n), start, n if end is None else end)


def state_of(optimizer: MixedPrecisionOptimizer, param: nn.Parameter) -> dict[str, Tensor]:
    """The flat state of the shard of `param` by name, on the host if it is offloaded or divided."""
    found = {
        key: [x for shard, x in sorted(values, key=lambda value: value[0].start) if shard.param is param]
        for key, values in optimizer.state().items()
    }
    return {key: x[0] if len(x) == 1 else torch.cat([part.cpu() for part in x]) for key, x in found.items() if x}


def initial_values() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(7)
    return {
        "embedding": rng.normal(size=(VOCABULARY, HIDDEN)),
        "weight": rng.normal(size=(HIDDEN, HIDDEN)) / 3,
        "bias": rng.normal(size=HIDDEN) / 10,
        "norm": 1 + rng.normal(size=HIDDEN) / 10,
    }


def batch(step: int, rows: int) -> Tensor:
    """Tokens `[rows, n + 1]`: the same on every rank."""
    return torch.from_numpy(np.random.default_rng(step).integers(0, VOCABULARY, size=(rows, 6)))


class _SinkLinear(torch.autograd.Function):
    """y = x wᵀ, which passes its weight gradient to the sink and returns none to autograd."""

    @staticmethod
    def forward(ctx: Any, x_nh: Tensor, weight: nn.Parameter) -> Tensor:
        ctx.save_for_backward(x_nh)
        ctx.weight = weight
        return x_nh @ weight.t()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        (x_nh,) = ctx.saved_tensors
        deliver(ctx.weight, dy.t() @ x_nh)
        return dy @ ctx.weight, None


def tiny_params() -> dict[str, nn.Parameter]:
    """The tiny model in forward order."""
    uses = {"embedding": 2}
    return {name: make_param(name, value, num_uses=uses.get(name, 1)) for name, value in initial_values().items()}


def loss_sum(p: dict[str, Any], tokens: Tensor, linear: Any = _SinkLinear.apply) -> Tensor:
    """Cross entropy summed over the tokens of one row."""
    x_nh = F.embedding(tokens[:-1], p["embedding"])
    y_nh = torch.tanh(linear(x_nh, p["weight"]) + p["bias"])
    z_nh = (x_nh + y_nh) * p["norm"]
    return F.cross_entropy(linear(z_nh, p["embedding"]), tokens[1:], reduction="sum")


def reference(
    steps: int, rows: int, lr: float, weight_decay: float, max_norm: float
) -> tuple[dict[str, np.ndarray], list[float]]:
    """Weights and gradient norms of plain float64 torch that trains on whole batches."""
    p = {name: torch.tensor(value, requires_grad=True) for name, value in initial_values().items()}
    groups = [
        {"params": [t for name, t in p.items() if (name not in NO_DECAY) is decays], "weight_decay": decay}
        for decays, decay in ((True, weight_decay), (False, 0.0))
    ]
    adam = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), eps=1e-8, fused=False)
    norms = []
    for step in range(steps):
        tokens = batch(step, rows)
        adam.zero_grad()
        total = sum(loss_sum(p, row, F.linear) for row in tokens)
        (total / tokens[:, 1:].numel()).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(p.values(), max_norm)))
        adam.step()
    return {name: t.detach().numpy() for name, t in p.items()}, norms
