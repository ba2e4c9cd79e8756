"""Training job as one of several replicas: its place, the state that peers copy, and the check that all are equal.

The state of a replica consists of the tensors of its ranks, the metadata that a checkpoint would have, and some
counters of the training loop. A replica that has copied this state from a peer continues as if it had trained all steps
itself.
"""

from __future__ import annotations

import os
import socket
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from megafp8.config import Config, ConfigError, Problem, ReplicasConfig
from megafp8.fp8.health import Fp8Record
from megafp8.optimizer.mixed_precision import OUTER_MOMENTUM
from megafp8.parallel.collectives import all_gather_objects
from megafp8.parallel.replicas import Membership, ReplicaLost, share
from megafp8.parallel.replicas.lighthouse import ReplicaEndpoint, place_of
from megafp8.parallel.replicas.membership import StateTensors
from megafp8.training.consistency import bit_sums, compared_state, rank_state
from megafp8.training.errors import StateDiffers
from megafp8.training.observer import Observer, StepMetrics
from megafp8.training.pipeline import plan_pipeline
from megafp8.training.replicas.trainer import ReplicaTrainer
from megafp8.training.trainer import RankTrainer


def own_place(config: Config) -> ReplicaEndpoint | None:
    """Return the endpoint of this process among the replicas of `config`, or None without replicas.

    Raises ValueError if the environment variables do not define the endpoint.
    """
    replicas = config.resilience.replicas
    return None if replicas is None else place_of(os.environ, replicas.count)


def check_shares(config: Config, micro_batches: int) -> None:
    """Raise ConfigError if the pipeline cannot run a replica's share of the `micro_batches` of a rank.

    Checks the shares for every number of replicas from `resilience.replicas.min` to `count`.
    """
    r = config.resilience.replicas
    if r is None:
        return
    per_replica = micro_batches // r.count
    for members in range(r.min, r.count + 1):
        count = per_replica * members if r.batch == "shrink" else micro_batches
        for size in {len(share(count, members, rank)) for rank in range(members)}:
            try:
                plan_pipeline(config, size)
            except ConfigError as error:
                problem = error.problems[0]
                rule = f"with {members} replicas some have {size} of {micro_batches} micro-batches: {problem.rule}"
                works = "try a larger training.global_batch_size, resilience.replicas.batch=shrink, or another schedule"
                raise ConfigError("config", [Problem(problem.path, problem.value, rule, works)]) from None


def log_folder(config: Config, run: Path) -> Path:
    """Return the folder of this process's log and metrics: the run folder, or the replica's folder inside it."""
    place = own_place(config)
    return run if place is None else run / f"replica-{place.replica}"


def state_tensors(trainer: ReplicaTrainer) -> StateTensors:
    """Return all tensors that a peer of this rank needs to continue exactly as this rank does. Collective."""
    trainer.strategy.wait()
    state = rank_state(trainer)
    recorded = [x.values for x in state if x.name.startswith("fp8.")]
    start = [] if trainer.outer is None else trainer.outer.start
    return StateTensors([*(x.values for x in state if not x.name.startswith("fp8.")), *start], recorded)


def mark_state_received(trainer: RankTrainer, updates: int) -> None:
    """Invalidate values derived from the state, after `state_tensors` have received the state of a peer.

    `updates` is the number of optimizer steps of the peer.
    """
    trainer.optimizer.step_count = updates
    trainer.fp8.invalidate_weights()
    trainer.strategy.invalidate()


def micro_batches(replicas: ReplicasConfig, count: int, members: int) -> int:
    """Return the number of micro-batches, out of a data-parallel rank's `count`, that `members` replicas share."""
    return count // replicas.count * members if replicas.batch == "shrink" else count


def check_peers(trainer: ReplicaTrainer, membership: Membership, step: int) -> None:
    """Compare the state after `step` steps bitwise with the state of all members of the quorum. Collective.

    Raises:
        StateDiffers: On the ranks of replicas that differ from the majority, or on all replicas if there is no
            majority. These replicas are then restarted and copy the state of another replica.
        ReplicaLost: If a replica does not answer.
    """
    trainer.strategy.wait()
    state = compared_state(trainer)
    if trainer.outer is not None:
        state = [x for x in state if x.name.startswith(_EQUAL_BETWEEN_ROUNDS)]
    sums = bit_sums([x.values for x in state], trainer.parallel.device).cpu()
    rows_mt2 = membership.gather(sums.view(-1)).view(-1, *sums.shape)
    members, rank = membership.quorum.members, membership.quorum.rank
    wrong: list[str] = []
    for i, x in enumerate(state):
        by_member = [tuple(row[i].tolist()) for row in rows_mt2]
        (most, count), *_ = Counter(by_member).most_common()
        if by_member[rank] != most or (count < len(by_member) and 2 * count <= len(by_member)):
            wrong.append(x.name)
    wrong_by_rank = all_gather_objects(wrong, trainer.parallel.world.group)
    if any(wrong_by_rank):
        ranks = [i for i, names in enumerate(wrong_by_rank) if names]
        names = list(dict.fromkeys(name for i in ranks for name in wrong_by_rank[i]))
        others = f" and {len(names) - 3} more" if len(names) > 3 else ""
        raise StateDiffers(
            f"after step {step} replica {members[rank].index} on {socket.gethostname()} holds other bits than most of "
            f"the {len(members)} replicas in {', '.join(names[:3])}{others} on rank {', '.join(map(str, ranks))}. This "
            "state is discarded: the replica restarts and copies the state of another. The cause may be a faulty GPU, "
            "memory or link: test that host (nvidia-smi -q -d ECC; dcgmi diag -r 3)"
        )


_EQUAL_BETWEEN_ROUNDS = ("model.", "optimizer.master.", f"optimizer.{OUTER_MOMENTUM}.")
"""Prefixes of the tensors that replicas with outer steps have in common: weights and outer state."""


class PeerCheck(Observer):
    """Observer that runs `check_peers` every `interval` steps, and before the checkpoint at every `save_interval`."""

    def __init__(self, trainer: ReplicaTrainer, membership: Membership, interval: int, save_interval: int) -> None:
        self._trainer, self._membership = trainer, membership
        self._intervals = [x for x in (interval, save_interval) if x]

    def write(self, metrics: StepMetrics, records: Sequence[Fp8Record] = ()) -> None:
        """Compare the replicas if a check is due. Collective over all replicas."""
        if any(metrics.step % interval == 0 for interval in self._intervals):
            with suppress(ReplicaLost):  # the step is done; the next quorum has other members
                check_peers(self._trainer, self._membership, metrics.step)
