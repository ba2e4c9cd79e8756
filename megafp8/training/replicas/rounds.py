"""Rounds of replicas connected by slow links: each replica trains steps alone, then all do an outer step together.

The quorum before the first step of a round determines its members. A replica that joins copies the state of another
replica before this step, and trains in the round like all others. After the last step the members exchange weights. If
a member is lost during the round or the exchange, the others form a new quorum and exchange again without it. The lost
member's samples of the round then have no effect, and no step is repeated. A replica that joins in the new quorum
copies the state of a replica that has trained, including the start of its round. It takes part in the exchange without
contributing weights, and receives the result.

Weights and outer momentum are equal in all replicas between rounds. Moments, FP8 state and the loss scale differ.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from megafp8.config import OuterConfig, ReplicasConfig
from megafp8.parallel.replicas import Membership, ReplicaLost
from megafp8.parallel.replicas.quorum import share
from megafp8.training.replicas.membership import check_peers, micro_batches
from megafp8.training.replicas.trainer import ReplicaTrainer

logger = logging.getLogger(__name__)


class Rounds:
    """Rounds of this replica's training. All methods are collective over the replica's ranks.

    Attributes:
        start: Number of steps before the round.
        running: Whether the round has begun and has not ended. Between two rounds this is False.
    """

    def __init__(
        self, trainer: ReplicaTrainer, membership: Membership, replicas: ReplicasConfig, outer: OuterConfig
    ) -> None:
        assert trainer.outer is not None
        self._trainer, self._outer, self._membership = trainer, trainer.outer, membership
        self._replicas, self._inner_steps = replicas, outer.inner_steps
        self._last_step = 0
        self._members: dict[str, tuple[int, int]] = {}  # index and samples per step by id; empty after a copied state
        self.start, self.running = 0, False

    @property
    def end(self) -> int:
        """Number of steps after the round. The last step of the run ends a round early."""
        return min((self.start // self._inner_steps + 1) * self._inner_steps, self._last_step)

    def state(self) -> Sequence[Any]:
        """Return the state of the round, for a replica that copies this replica's state."""
        return [self.start, self.running, self._last_step]

    def restore(self, state: Sequence[Any]) -> None:
        """Continue with the `state` of a peer's round."""
        self.start, self.running, self._last_step = state
        self._members = {}

    def begin(self, step: int, last_step: int) -> None:
        """Begin the round after `step` steps with all members of the latest quorum. The run ends at `last_step`."""
        quorum = self._membership.quorum = self._membership.quorum.after_copies()
        self.start, self.running, self._last_step = step, True, last_step
        self._outer.begin()
        trainer, count = self._trainer, len(quorum.members)
        shared = micro_batches(self._replicas, trainer.num_microbatches, count)
        samples = trainer.config.training.micro_batch_size * trainer.parallel.data.size
        self._members = {
            member.id: (member.index, len(share(shared, count, rank)) * samples)
            for rank, member in enumerate(quorum.members)
        }  # index and number of samples per step

    def finish(self) -> None:
        """Do the outer step after the last step of the round.

        If the others have done the outer step without this replica, it copies their state and continues with them. In
        this case the next round may have begun on return.
        """
        membership, outer = self._membership, self._outer
        while self.running:
            quorum = membership.quorum
            try:
                outer.sum_weights(lambda tensors: membership.exchange(tensors, []))
            except ReplicaLost:
                membership.begin(self.start)
                if not self.running:
                    if self.start < self._last_step:
                        self.begin(self.start, self._last_step)
                    return
                continue
            outer.step(len(quorum.trainers))
            self._trainer.fp8.invalidate_weights()
            self._trainer.strategy.invalidate()
            self._log_lost({quorum.members[rank].id for rank in quorum.trainers})
            self.start, self.running = self.end, False
            if self._trainer.config.training.consistency_check_interval:
                with suppress(ReplicaLost):  # the next quorum has other members
                    check_peers(self._trainer, membership, self.start)

    def _log_lost(self, trained: set[str]) -> None:
        lost = [x for id, x in self._members.items() if id not in trained]
        if lost:
            indices = ", ".join(str(index) for index, _ in lost)
            samples = (self.end - self.start) * sum(samples for _, samples in lost)
            logger.warning(
                f"steps {self.start + 1} to {self.end}: the outer step does not include replica {indices}, which was "
                f"lost; the {samples} samples of its share had no effect"
            )
