"""The choice of experts, against one made token by token; the selection bias."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megafp8.config import MoeConfig, MoeFfnConfig
from megafp8.config.schema import ModelConfig
from megafp8.fp8 import Fp8Manager
from megafp8.layers.context import BuildContext, PlannedGroup
from megafp8.layers.experts.router import Router, choose, hash_table, weigh
from megafp8.numerics.philox import key_of
from megafp8.parallel.sharding import Init
from tests.models.twin import chosen_experts


def _moe(**keys: Any) -> MoeFfnConfig:
    return MoeFfnConfig(**{"num_experts": 8, "top_k": 2, **keys})


KINDS = [
    {},
    {"top_k": 8, "normalize": False},
    {"score": "sigmoid", "num_groups": 4, "top_groups": 2, "scaling_factor": 2.5},
    {"num_groups": 4, "top_groups": 1},
    {"num_groups": 8, "top_groups": 3, "score": "sigmoid"},  # groups of one expert
    {"num_experts": 5, "zero_experts": 3, "top_k": 6},
]


@given(kind=st.sampled_from(KINDS), data=st.data())
def test_experts_are_chosen_as_token_by_token(kind: dict[str, Any], data: st.DataObject) -> None:
    """Few different scores, so that most are equal to another: of these the first counts."""
    moe = _moe(**kind)
    config = ModelConfig(num_layers=1, hidden_size=8, num_attention_heads=1, moe=MoeConfig(**moe.given))
    scores = [[data.draw(st.sampled_from([0.0, 0.25, 0.5])) for _ in range(8)] for _ in range(3)]
    bias = [data.draw(st.sampled_from([0.0, 0.25])) for _ in range(8)] if data.draw(st.booleans()) else None
    scores_ne = torch.tensor(scores)
    experts = choose(scores_ne, moe, None if bias is None else torch.tensor(bias))
    chosen_weights = weigh(scores_ne, experts, moe)
    assert experts.tolist() == [chosen_experts(row, config, bias or [0.0] * 8) for row in scores]
    weights = scores_ne.gather(1, experts)  # without the bias
    if moe.normalize:
        weights = weights / weights.sum(1, keepdim=True).clamp(min=1e-20)
    torch.testing.assert_close(chosen_weights, weights * moe.scaling_factor)


@pytest.mark.parametrize(("tokens", "experts", "top_k"), [(103, 8, 2), (64, 16, 6), (5, 4, 4)])
def test_a_hash_table_has_different_experts_of_each_token_and_all_equally_often(
    tokens: int, experts: int, top_k: int
) -> None:
    moe = MoeFfnConfig(num_experts=experts, top_k=top_k)
    table = hash_table(tokens, moe, key_of(7, "layers.0.mlp.router.table"), torch.device("cpu"))
    assert all(len(set(row)) == top_k for row in table.tolist())
    counts = table.flatten().bincount(minlength=experts)
    assert counts.max() - counts.min() <= top_k
    other = hash_table(tokens, moe, key_of(7, "layers.1.mlp.router.table"), torch.device("cpu"))
    assert top_k == experts or not torch.equal(table, other)


def _router(**keys: Any) -> Router:
    group: Any = PlannedGroup()
    context = BuildContext(group, Fp8Manager(None, amax_group=None), torch.float32, torch.device("cpu"), False)
    router = Router("router", 4, _moe(**keys), context, Init("normal", 0.02))
    torch.nn.init.normal_(router.weight, generator=torch.Generator().manual_seed(0))
    return router


@pytest.mark.parametrize("zero_experts", [None, 4])
def test_the_bias_moves_against_the_load_until_it_is_even(zero_experts: int | None) -> None:
    """Experts without computation have no bias and get an equal share if the others do."""
    router = _router(selection_bias=True, bias_update_rate=0.002, zero_experts=zero_experts)
    zero = zero_experts or 0
    x = torch.randn(512, 4, generator=torch.Generator().manual_seed(1))

    def load() -> torch.Tensor:
        return router(x, sequences=1).tokens.flatten().double()

    before = load()
    router.update(before)
    assert router.bias is not None
    signs = (before.mean() - before).sign().float() * (torch.arange(8 + zero) < 8)
    assert torch.equal(router.bias, 0.002 * signs)
    for _ in range(300):
        router.update(load())
    assert before.min() < 0.5 * before.mean()
    assert load()[:8].min() > 0.9 * before.mean()
    assert load()[8:].sum() <= 1.1 * zero * before.mean()


def test_without_a_gradient_nothing_is_added_to_the_load() -> None:
    router, x = _router(aux_loss=1.0), torch.randn(6, 4)
    with torch.no_grad():
        router(x, sequences=2)
    assert router.load.tokens.sum() == 0
    for _ in range(2):
        router(x, sequences=2).weights.sum().backward()
    assert router.load.tokens.sum() == 2 * 6 * 2


def test_an_even_load_has_an_aux_loss_of_one() -> None:
    router = _router(aux_loss=1.0, top_k=1)
    with torch.no_grad():
        router.weight.zero_()
        router.weight[:4] = torch.eye(4)
        router.weight[4:] = -torch.eye(4)
    x = 1e-3 * torch.cat([torch.eye(4), -torch.eye(4)])  # each expert once
    router(x, sequences=1).weights.sum().backward()
    assert router.load.losses.tolist() == pytest.approx([1.0, 0.0])
    assert router.load.tokens.tolist() == [1.0] * 8
    assert router.load.scores.tolist() == pytest.approx([1.0] * 8, rel=1e-5)
