"""Groups of parameters: which group a tensor is in, what it changes, and patterns that fit nothing."""

from __future__ import annotations

import pytest
import torch

from megafp8.data_parallel.grad_buffer import main_grad_of
from megafp8.distributed.sharding import Init, ParamSpec, stack_rows, unsharded
from megafp8.optimizer.config import OptimizerConfig
from megafp8.optimizer.mixed_precision import MixedPrecisionOptimizer
from megafp8.optimizer.param_groups import ParamGroup, Rates, check_groups, rates_of
from tests.tiny_model import CPU, make_buffer, make_param


def _spec(*names: str, weight_decay: bool = True) -> ParamSpec:
    pieces = stack_rows([piece for name in names for piece in unsharded(name, (2, 2))])
    return ParamSpec(pieces, Init("zeros"), replicated_over_tp=True, weight_decay=weight_decay)


MODEL = [
    _spec("embedding.word.weight"),
    _spec("layers.0.attention.q.weight", "layers.0.attention.k.weight"),
    _spec("layers.1.attention.q.weight", "layers.1.attention.k.weight"),
    _spec("layers.0.mlp_norm.weight", weight_decay=False),
]


def test_the_first_group_that_fits_counts() -> None:
    groups = [
        ParamGroup(match=["layers.1.*", "embedding.*"], learning_rate_scale=0.5),
        ParamGroup(match=["layers.*"], learning_rate_scale=2.0, weight_decay=0.3),
    ]
    check_groups(MODEL, groups)
    found = [rates_of(spec, 0.1, groups) for spec in MODEL]
    assert found == [Rates(0.5, 0.1), Rates(2.0, 0.3), Rates(0.5, 0.1), Rates(2.0, 0.3)]
    assert [rates_of(spec, 0.1, []) for spec in MODEL] == [Rates(1.0, 0.1)] * 3 + [Rates(1.0, 0.0)]


def test_a_group_without_decay_leaves_norms_without() -> None:
    assert rates_of(MODEL[3], 0.1, [ParamGroup(match=["*norm*"], learning_rate_scale=0.5)]) == Rates(0.5, 0.0)


@pytest.mark.parametrize(
    ("match", "message"),
    [
        (["embedding.*", "layer.0.*"], r"groups\[0\].match has 'layer.0.\*', which no tensor .* names are like embed"),
        (["*.q.weight"], r"groups\[0\] has layers.0.attention.q.weight but not layers.0.attention.k.weight"),
        (["*.k.weight"], r"groups\[0\] has layers.0.attention.k.weight but not layers.0.attention.q.weight"),
    ],
)
def test_patterns_that_do_not_fit(match: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_groups(MODEL, [ParamGroup(match=match)])


def test_learning_rate_and_decay_are_those_of_torch() -> None:
    """Four steps against torch's AdamW with groups of its own."""
    names = ["embedding.word.weight", "weight", "bias"]
    params = [make_param(name, [[1.0, -2.0], [0.5, 3.0]]) for name in names]
    buffer = make_buffer(params)
    groups = [
        ParamGroup(match=["embedding.*"], learning_rate_scale=0.25, weight_decay=0.0),
        ParamGroup(match=["bias"], learning_rate_scale=2.0, weight_decay=0.7),
    ]
    config = OptimizerConfig(learning_rate=1.0, weight_decay=0.1, groups=groups)
    optimizer = MixedPrecisionOptimizer(buffer.shards, config, device=CPU)
    theirs = [torch.nn.Parameter(param.detach().clone()) for param in params]
    rates = [(0.25, 0.0), (1.0, 0.1), (2.0, 0.7)]
    adam = torch.optim.AdamW(
        [{"params": [x], "weight_decay": d} for x, (_, d) in zip(theirs, rates)], betas=(0.9, 0.95)
    )
    for step, lr in enumerate([0.1, 0.05, 0.02, 0.1]):
        for i, (param, x) in enumerate(zip(params, theirs)):
            x.grad = torch.full_like(x, float(step + i) - 1.5)
            main_grad_of(param).copy_(x.grad)
        for group, (scale, _) in zip(adam.param_groups, rates):
            group["lr"] = scale * lr
        optimizer.step(lr)
        adam.step()
    for param, x in zip(params, theirs):
        torch.testing.assert_close(param.detach(), x.detach(), rtol=1e-6, atol=1e-7)
