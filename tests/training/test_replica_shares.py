"""A global batch that replicas compute in shares: weights and state are those of one trainer that computes it whole."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch

from megafp8.batch import Batch
from megafp8.parallel.replicas import ReplicaLost, share
from megafp8.training.consistency import rank_state
from megafp8.training.replicas.trainer import ReplicaTrainer
from megafp8.training.trainer import RankTrainer
from tests.parallel.replicas.twin import SharesInTurn
from tests.training.presets import (
    DEEPSEEK,
    DELAYED,
    FP64,
    GLOBAL_BALANCE,
    MTP,
    QK_CLIP,
    Preset,
    config_of,
)
from tests.training.runs import batches, start
from tests.world import World

MEMBERS = [3, 2, 1, 4]
"""Replicas that train each step."""


def _started(preset: Preset) -> tuple[ReplicaTrainer, SharesInTurn, RankTrainer, list[list[Batch]]]:
    """A trainer of shares with its exchange, a trainer of whole batches, and these."""
    config = config_of(preset, training={"global_batch_size": 4})
    whole, parallel = start(config)
    exchange = SharesInTurn()
    return ReplicaTrainer(config, parallel, exchange), exchange, whole, [batches(i, config, parallel) for i in range(4)]


def _compare(preset: Preset, present: int = 4) -> None:
    """`present`: how many micro-batches of the batch of four are there to be trained on."""
    shared, exchange, whole, global_batches = _started(preset)
    if present < 4:  # whose batches are of so many
        whole, _ = start(config_of(preset, training={"global_batch_size": present}))
    for step, (members, batch) in enumerate(zip(MEMBERS, (x[:present] for x in global_batches))):
        parts = [[batch[i] for i in share(present, members, rank)] for rank in range(members)]
        loss, result = exchange.step(shared, step, parts)
        expected_loss, expected = whole.train_step(step, batch)
        assert loss.tokens == expected_loss.tokens
        ours = [loss.mean, loss.auxiliary or 0.0, result.grad_norm, shared.max_attention_logit or 0.0]
        theirs = [
            expected_loss.mean,
            expected_loss.auxiliary or 0.0,
            expected.grad_norm,
            whole.max_attention_logit or 0.0,
        ]
        assert ours == pytest.approx(theirs, rel=1e-11)
        if whole.expert_load is not None:
            assert shared.expert_load is not None
            assert shared.expert_load.tokens == whole.expert_load.tokens
    for a, b in zip(rank_state(shared), rank_state(whole), strict=True):
        assert a.name == b.name
        assert torch.allclose(a.values.double(), b.values.double(), rtol=1e-9, atol=1e-12), a.name


@pytest.mark.parametrize(
    "preset",
    [FP64 | DELAYED, FP64 | DEEPSEEK | DELAYED, FP64 | GLOBAL_BALANCE, FP64 | QK_CLIP, FP64 | MTP],
    ids=str,
)
def test_shares_of_changing_numbers_of_replicas_add_up_to_the_whole(world2: World, preset: Preset) -> None:
    world2.run(_compare, preset, ranks=1)


# Without FP8: gradients are rounded before they are scaled to the tokens that were there.
@pytest.mark.parametrize("preset", [FP64 | DEEPSEEK, FP64 | GLOBAL_BALANCE, FP64 | MTP], ids=str)
def test_batches_that_shrink_are_those_of_a_smaller_batch(world2: World, preset: Preset) -> None:
    world2.run(_compare, preset, 3, ranks=1)


def _without_micro_batches() -> None:
    shared, exchange, whole, global_batches = _started(FP64 | DEEPSEEK | DELAYED)
    for step, batch in enumerate(global_batches):
        loss, _ = exchange.step(shared, step, [batch, []])
        assert loss == whole.train_step(step, batch)[0]
    for a, b in zip(rank_state(shared), rank_state(whole), strict=True):
        assert torch.equal(a.values, b.values), a.name


def test_a_replica_without_micro_batches_gets_the_same_state(world2: World) -> None:
    world2.run(_without_micro_batches, ranks=1)


def _lost() -> None:
    shared, exchange, _, (batch, *_) = _started(FP64 | DEEPSEEK | DELAYED)
    before = [x.values.clone() for x in rank_state(shared)]
    with patch.object(shared, "_exchange", side_effect=ReplicaLost), pytest.raises(ReplicaLost):
        shared.train_step(0, batch)
    for x, values in zip(rank_state(shared), before, strict=True):
        assert torch.equal(x.values, values), x.name
    exchange.step(shared, 0, [batch])
    assert shared.optimizer.step_count == 1


def test_a_step_that_does_not_count_changes_nothing(world2: World) -> None:
    world2.run(_lost, ranks=1)
