"""Hyper-connections and experts by token id against transformers' DeepSeek-V4 in float64, gradients too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as theirs
from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config

from megafp8.config import MoeFfnConfig
from megafp8.fp8 import Fp8Manager
from megafp8.layers.context import BuildContext, PlannedGroup
from megafp8.layers.experts.router import Router
from megafp8.layers.hyper_connections.op import collapse, connect, mix
from megafp8.layers.hyper_connections.reference import HyperConnectionRule
from megafp8.parallel.sharding import Init

N, H, B, S = 4, 6, 2, 5


CONFIG = DeepseekV4Config(
    hidden_size=H, hc_mult=N, hc_sinkhorn_iters=5, hc_eps=1e-3, num_hidden_layers=2, num_experts_per_tok=2,
    n_routed_experts=8, vocab_size=20,
)  # fmt: skip
RULE = HyperConnectionRule(N, 5, 1e-3, CONFIG.rms_norm_eps)


@pytest.fixture(autouse=True)
def _float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let transformers compute in float64 where it would compute in float32."""
    monkeypatch.setattr(Tensor, "float", Tensor.double)


def _randomized(module: Any) -> list[Tensor]:
    """The parameters of a module of theirs in float64, in the order of their names."""
    module.double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(generator=generator)
    return [parameter for _, parameter in sorted(module.named_parameters())]


def _compare(ours: list[Tensor], expected: list[Tensor], inputs: list[Tensor]) -> None:
    seeds = [torch.randn(y.shape, generator=torch.Generator().manual_seed(i)).double() for i, y in enumerate(expected)]
    for found, other in zip(ours, expected, strict=True):
        torch.testing.assert_close(found, other, rtol=1e-10, atol=1e-12)
    gradients = [torch.autograd.grad(ys, inputs, seeds) for ys in (ours, expected)]
    for found, other in zip(*gradients, strict=True):
        torch.testing.assert_close(found, other, rtol=1e-10, atol=1e-12)


def test_a_connection_is_that_of_transformers() -> None:
    module = theirs.DeepseekV4HyperConnection(CONFIG)
    base, fn, scale = _randomized(module)
    x = torch.randn(B, S, N * H, dtype=torch.float64, requires_grad=True)
    y = torch.randn(B, S, H, dtype=torch.float64, requires_grad=True)
    post, comb, read = module(x.unflatten(-1, (N, H)))
    mixed = post.unsqueeze(-1) * y.unsqueeze(-2) + comb.transpose(-1, -2) @ x.unflatten(-1, (N, H))
    passed, own_read, own_post, own_comb = connect(x, fn, base, scale, RULE)
    _compare([own_read, mix(passed, y, own_post, own_comb)], [read, mixed.flatten(2)], [x, y, fn, base, scale])


def test_the_end_of_the_streams_is_that_of_transformers() -> None:
    module = theirs.DeepseekV4HyperHead(CONFIG)
    base, fn, scale = _randomized(module)
    x = torch.randn(B, S, N * H, dtype=torch.float64, requires_grad=True)
    _compare([collapse(x, fn, base, scale, RULE)], [module(x.unflatten(-1, (N, H)))], [x, fn, base, scale])


def test_weights_of_experts_by_token_id_are_those_of_transformers() -> None:
    group: Any = PlannedGroup()
    context = BuildContext(group, Fp8Manager(None, amax_group=None), torch.float64, torch.device("cpu"), False)
    moe = MoeFfnConfig(num_experts=8, top_k=2, score="sqrtsoftplus", scaling_factor=CONFIG.routed_scaling_factor)
    router = Router("router", H, moe, context, Init("normal", 0.02), hashed=20)
    assert router.table is not None
    module = theirs.DeepseekV4HashRouter(CONFIG)
    _randomized(module)
    module.tid2eid.copy_(router.table)
    router.weight = module.weight
    x, ids = torch.randn(B * S, H, dtype=torch.float64, requires_grad=True), torch.randint(20, (B * S,))
    routing = router(x, B, ids)
    _, weights, experts = module(x, ids)
    assert torch.equal(routing.experts, experts)
    _compare([routing.weights], [weights], [x, module.weight])
