"""Outer steps: the formula, one replica as plain training, two against a twin in float64, replicas that are lost."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from megafp8.checkpoint import CheckpointReader
from megafp8.config import Config, ConfigError, check_layout
from megafp8.optimizer.outer import nesterov_
from megafp8.parallel.parallel_state import ParallelState
from megafp8.parallel.replicas import Membership, ReplicaLost
from megafp8.parallel.replicas.quorum import Member, Quorum
from megafp8.training.replicas.rounds import Rounds
from megafp8.training.replicas.trainer import ReplicaTrainer
from megafp8.training.state import tensor_kinds, tensors
from megafp8.training.trainer import RankTrainer
from tests.quickstart_data import ROOT, QuickstartData
from tests.training.presets import (
    BF16,
    DELAYED,
    DP2,
    FP8_GATHER,
    FP64,
    FSDP,
    MASKED,
    MUON,
    NONE,
    SAMPLES_4,
    ZERO,
    Preset,
    config_of,
)
from tests.training.runs import batches, start
from tests.world import World

RATE, MOMENTUM, INNER_STEPS = 0.7, 0.9, 3


def _with_outer(config: Config, **outer: float) -> Config:
    replicas = {"count": 2, "outer": {"inner_steps": INNER_STEPS, "learning_rate": RATE, "momentum": MOMENTUM, **outer}}
    settings = config.model_dump()
    settings["resilience"] |= {"replicas": replicas}
    settings["checkpoint"] |= {"interval": 0}
    return Config.model_validate(settings)


def _start_replica(config: Config) -> tuple[ReplicaTrainer, ParallelState]:
    """Build a trainer of a replica that has no others."""
    trainer, parallel = start(config, lambda config, parallel: ReplicaTrainer(config, parallel, lambda *_: None))
    assert isinstance(trainer, ReplicaTrainer)
    return trainer, parallel


def _masters(trainer: RankTrainer) -> list[Tensor]:
    trainer.strategy.wait()
    return [trainer.optimizer.load_master(shard).clone() for shard in trainer.optimizer.shards]


def test_outer_step_is_sgd_with_nesterov_momentum() -> None:
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(50, generator=generator, dtype=torch.float64)
    expected = torch.nn.Parameter(weights.clone())
    sgd = torch.optim.SGD([expected], lr=RATE, momentum=MOMENTUM, nesterov=True)
    found, momentum = weights.float(), torch.zeros(50)
    for _ in range(10):
        change = 0.1 * torch.randn(50, generator=generator, dtype=torch.float64)
        expected.grad = change
        nesterov_(found, momentum, found - change.float(), RATE, MOMENTUM)
        sgd.step()
        torch.testing.assert_close(found.double(), expected.detach(), rtol=1e-5, atol=1e-6)


def _train_one(config: Config, outer: bool) -> list[Any]:
    """Losses of four steps, each followed by an outer step of one replica; then the weights."""
    settings = _with_outer(config, inner_steps=1, learning_rate=1.0, momentum=0.0)
    trainer, parallel = _start_replica(settings) if outer else start(config)
    losses: list[Any] = []
    for step in range(4):
        if isinstance(trainer, ReplicaTrainer):
            assert trainer.outer is not None
            trainer.outer.begin()
        loss, result = trainer.train_step(step, batches(step, config, parallel))
        losses.append((loss.mean, result.grad_norm))
        if isinstance(trainer, ReplicaTrainer):
            assert trainer.outer is not None
            trainer.outer.sum_weights(lambda tensors: None)
            trainer.outer.step(1)
            trainer.fp8.invalidate_weights()
            trainer.strategy.invalidate()
    return [losses, [x.cpu() for x in _masters(trainer)]]


ONE = [NONE, BF16 | DELAYED, DP2 | ZERO | BF16 | DELAYED | FP8_GATHER, DP2 | FSDP | BF16, MUON | DP2 | ZERO]


@pytest.mark.parametrize("preset", ONE)
def test_one_replica_with_plain_averages_is_plain_training(world2: World, preset: Preset) -> None:
    config = config_of(SAMPLES_4 | preset)
    plain, outer = (world2.run(_train_one, config, outer, ranks=preset.ranks) for outer in (False, True))
    for a, b in zip(plain, outer, strict=True):
        assert a[0] == b[0]
        assert all(torch.equal(x, y) for x, y in zip(a[1], b[1], strict=True))


def _two_replicas(config: Config, shares: Sequence[int], rounds: int) -> tuple[list[Tensor], list[Tensor], bool]:
    """Weights of two replicas after outer steps, those of a twin that has none in it, and whether both are equal."""
    replicas = [_start_replica(_with_outer(config))[0] for _ in shares]
    alone = []
    for count in shares:
        training = config.training.model_copy(update={"global_batch_size": count})
        twin, parallel = start(config.model_copy(update={"training": training}))
        alone.append(twin)
    start_weights = _masters(alone[0])
    momentum = [torch.zeros_like(x) for x in start_weights]
    for number in range(rounds):
        for replica in replicas:
            assert replica.outer is not None
            replica.outer.begin()
        for step in range(INNER_STEPS * number, INNER_STEPS * (number + 1)):
            whole, begin = batches(step, config, parallel), 0
            for count, replica, twin in zip(shares, replicas, alone):
                own = whole[begin : begin + count]
                begin += count
                loss, expected = replica.train_step(step, own)[0], twin.train_step(step, own)[0]
                assert loss.mean == pytest.approx(expected.mean, rel=1e-12)
        summed: list[Sequence[Tensor]] = []
        for replica in replicas:
            assert replica.outer is not None
            replica.outer.sum_weights(summed.append)
        for own_sums in zip(*summed):
            total = own_sums[0] + own_sums[1]
            for x in own_sums:
                x.copy_(total)
        for replica in replicas:
            assert replica.outer is not None
            replica.outer.step(2)
        ends = [_masters(twin) for twin in alone]
        for i, (x, y) in enumerate(zip(*ends)):
            gradient = start_weights[i] - (x + y) / 2
            momentum[i] = MOMENTUM * momentum[i] + gradient
            start_weights[i] = start_weights[i] - RATE * (gradient + MOMENTUM * momentum[i])
            for twin in alone:
                twin.optimizer.store_master(twin.optimizer.shards[i], start_weights[i])
    first, second = (_masters(replica) for replica in replicas)
    return first, start_weights, all(torch.equal(x, y) for x, y in zip(first, second))


@pytest.mark.parametrize("shares", [(2, 2), (3, 1)])
@pytest.mark.parametrize("preset", [FP64, FP64 | MASKED])
def test_two_replicas_are_two_models_that_are_averaged(world2: World, preset: Preset, shares: Sequence[int]) -> None:
    ((found, expected, equal),) = world2.run(_two_replicas, config_of(SAMPLES_4 | preset), shares, 3, ranks=1)
    assert equal
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-12)


class _Unreliable:
    """A membership of two replicas, the other one of which is lost in the first exchange."""

    def __init__(self) -> None:
        own, other = (Member(f"{i}:x", i, 0, "", "", False, "") for i in range(2))
        self.quorum, self.exchanges, self._own = Quorum((own, other), 0), 0, own

    def exchange(self, sums: Sequence[Tensor], maxima: Sequence[Tensor]) -> None:
        self.exchanges += 1
        if len(self.quorum.members) == 2:
            for x in sums:
                x.fill_(torch.nan)
            raise ReplicaLost

    def begin(self, step: int) -> Quorum:
        assert step == 0
        self.quorum = Quorum((self._own,), 0)
        return self.quorum

    def gather(self, row: Tensor) -> Tensor:
        return row.unsqueeze(0)


def _lose_one(config: Config) -> tuple[list[str], bool, tuple[int, bool, int]]:
    config = _with_outer(config, learning_rate=1.0, momentum=0.0)
    trainer, parallel = _start_replica(config)
    replicas, outer, fake = config.resilience.replicas, config.outer, _Unreliable()
    assert replicas is not None
    assert outer is not None
    rounds = Rounds(trainer, cast(Membership, fake), replicas, outer)
    rounds.begin(0, 20)
    for step in range(rounds.end):
        trainer.train_step(step, batches(step, config, parallel)[:2])
    own, messages = _masters(trainer), list[str]()
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("megafp8").addHandler(handler)
    rounds.finish()
    logging.getLogger("megafp8").removeHandler(handler)
    kept = all(torch.equal(x, y) for x, y in zip(own, _masters(trainer)))
    return messages, kept, (rounds.start, rounds.running, fake.exchanges)


def test_the_exchange_is_made_again_without_a_lost_replica(world2: World) -> None:
    ((messages, kept, state),) = world2.run(_lose_one, config_of(SAMPLES_4), ranks=1)
    assert kept
    assert state == (INNER_STEPS, False, 2)
    assert messages == [
        "steps 1 to 3: the outer step does not include replica 1, which was lost; the 6 samples of its share had no "
        "effect"
    ]


def _copy_instead(config: Config) -> tuple[int, bool, int]:
    """The others have made the outer step without this replica, which learns it when it asks for a new quorum."""
    config = _with_outer(config)
    trainer, _ = _start_replica(config)
    replicas, outer, fake = config.resilience.replicas, config.outer, _Unreliable()
    assert replicas is not None
    assert outer is not None
    rounds = Rounds(trainer, cast(Membership, fake), replicas, outer)
    rounds.begin(0, 20)
    begin = fake.begin

    def copy(step: int) -> Quorum:
        rounds.restore([INNER_STEPS, False, 20])  # as the job does with the metadata of a peer
        return begin(step)

    fake.begin = copy  # type: ignore[method-assign]
    rounds.finish()
    return rounds.start, rounds.running, fake.exchanges


def test_a_replica_that_copies_the_result_goes_on_with_the_next_round(world2: World) -> None:
    assert world2.run(_copy_instead, config_of(SAMPLES_4), ranks=1) == [(INNER_STEPS, True, 1)]


def _saved(config: Config) -> tuple[list[str], list[str]]:
    trainer, _ = start(config)
    return sorted(name for name in tensors(trainer) if not name.startswith("fp8.")), sorted(tensor_kinds(config))


def test_a_checkpoint_holds_the_outer_momentum(world2: World) -> None:
    ((found, expected),) = world2.run(_saved, _with_outer(config_of(SAMPLES_4 | BF16)), ranks=1)
    assert found == expected
    assert sum(name.startswith("optimizer.outer_momentum.") for name in found) == sum(
        name.startswith("optimizer.master.") for name in found
    )


@pytest.mark.parametrize(
    ("section", "key", "value", "message"),
    [
        ("checkpoint", "interval", 100, "try 102"),
        ("optimizer", "average_decay", 0.9, "different weights"),
        ("model", "moe", {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 32}, "balance experts"),
    ],
)
def test_what_rounds_cannot_have_is_refused(section: str, key: str, value: object, message: str) -> None:
    settings = _with_outer(config_of(SAMPLES_4)).model_dump()
    settings[section] |= {key: value}
    with pytest.raises(ConfigError, match=message):
        check_layout(Config.model_validate(settings), 1)


def test_members_that_have_copied_train_and_the_writer_stays() -> None:
    new, old = Member("0:a", 0, -1, "", "", False, "x"), Member("1:b", 1, 8, "l", "", False, "y")
    quorum = Quorum((new, old), 1)
    assert (quorum.trainers, quorum.writer) == ((1,), 1)
    copied = quorum.after_copies()
    assert (copied.trainers, copied.writer, copied.step) == ((0, 1), 1, 8)
    assert copied.after_step() == quorum.after_step()
    assert replace(old, writes=True) in copied.members


def lose_a_replica(folder: str, data: str) -> None:
    """Rounds of three replicas, one of which is killed within a round, and what each of them has done."""
    from tests.parallel.replicas.cluster import SMALL, Cluster

    root = Path(folder)
    layout = ["parallel.tensor=1", "parallel.pipeline=1", "parallel.sequence_parallel=false", "fp8.recipe=delayed"]
    steps = ["training.steps=1000000", "checkpoint.interval=16", "optimizer.learning_rate=1e-4"]
    steps += ["optimizer.min_learning_rate=1e-4"]
    arguments = [*SMALL, *QuickstartData(Path(data)).overrides, *layout, *steps, "timeout_seconds=60"]
    cluster = Cluster(root, arguments, 3, 1, delay=0.05, options="outer: {inner_steps: 8}", exchange_seconds=5)
    try:
        for i in range(3):
            cluster.start(i)
        cluster.wait(lambda: all(cluster.newest(i)["step"] >= 8 for i in range(3)), 60, "the first round")
        others, pids = (0, 2), [cluster.pids(i) for i in range(3)]
        cluster.wait(lambda: cluster.newest(1)["step"] % 8 == 4, 60, "the middle of a round")
        struck = cluster.newest(1)["step"]
        os.kill(pids[1][0], signal.SIGKILL)
        cluster.wait(
            lambda: all(
                1 in cluster.newest(i)["replicas"] and cluster.newest(i)["step"] > struck + 8 for i in range(3)
            ),
            90,
            "all replicas again",
        )
        again = cluster.newest(0)["step"]
        cluster.wait(lambda: all(cluster.newest(i)["step"] >= again + 20 for i in range(3)), 60, "more rounds")
        # A stop that not all hear of before the same outer step is no fault of rounds.
        cluster.wait(lambda: all(2 <= cluster.newest(i)["step"] % 8 <= 4 for i in range(3)), 60, "a round")
        assert [cluster.pids(i) for i in others] == [pids[i] for i in others]
        cluster.stop()
        last = [cluster.newest(i)["step"] for i in range(3)]
        assert all(step % 8 == 0 for step in last), "a stop is at the end of a round"
        cluster.restart_lighthouse()
        for i in range(3):
            cluster.start(i)
        cluster.wait(lambda: all(cluster.newest(i)["step"] >= max(last) + 8 for i in range(3)), 60, "a resumed round")
    finally:
        cluster.kill()
    for i in others:
        records = [x for x in cluster.steps(i) if x["pid"] == pids[i][0]]
        assert [x["step"] for x in records] == list(range(1, len(records) + 1)), "a step was repeated or left out"
        for record in records:
            first = 8 * (record["step"] - 1)  # the share of the batch that the members of the round have
            members = record["replicas"]
            share = range(8 * members.index(i) // len(members), 8 * (members.index(i) + 1) // len(members))
            assert record["samples"] == [first + x for x in share]
        log = (root / f"replica-{i}.log").read_text()
        assert "the outer step does not include replica 1, which was lost" in log
        assert "holds other bits" not in log
    assert "copied from replica" in (root / "replica-1.log").read_text()
    for path in (root / "quickstart" / "checkpoints").glob("step_*"):
        assert int(path.name.removeprefix("step_")) % 8 == 0
        assert any(name.startswith("optimizer.outer_momentum.") for name in CheckpointReader(path).tensors)


@pytest.mark.slow
def test_rounds_go_on_without_a_killed_replica_until_it_is_back(
    tmp_path: Path, quickstart_data: QuickstartData
) -> None:
    # In a process of its own: it forks, and must have started no threads.
    code = "import sys; from tests.parallel.replicas.test_outer import lose_a_replica; lose_a_replica(*sys.argv[1:])"
    command = [sys.executable, "-c", code, str(tmp_path), str(quickstart_data.folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-6000:]
