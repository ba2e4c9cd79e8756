"""Rounds of a replica joined to others by slow links: steps by itself, then an outer step with the others.

The members of a round are those of the quorum that is asked for before its first step. A replica that has joined copies
the state of another before it, and trains in the round as all do. After the last step the members exchange weights. If
one is lost before or meanwhile, the others ask for a new quorum and exchange again without it: its samples of the round
have trained nothing, and no step is repeated. A replica that joins in that quorum copies the state of one that has
trained, with the start of its round, takes part in the exchange without weights of its own, and has the result.

Weights and outer momentum are equal in all replicas between rounds. Moments, FP8 state and the loss scale are each
replica's own.
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
    """The rounds of this replica's training. Collective over its ranks.

    Attributes: `start`: number of steps before the round. `running`: the round has its members, and has not ended; if
    it is false, the next one has not begun.
    """

    def __init__(
        self, trainer: ReplicaTrainer, membership: Membership, replicas: ReplicasConfig, outer: OuterConfig
    ) -> None:
        assert trainer.outer is not None
        self._trainer, self._outer, self._membership = trainer, trainer.outer, membership
        self._replicas, self._inner_steps = replicas, outer.inner_steps
        self._last_step = 0
        self._members: dict[str, tuple[int, int]] = {}  # of a round that this replica has trained: see `begin`
        self.start, self.running = 0, False

    @property
    def end(self) -> int:
        """Number of steps after the round, which the last step of the run ends early."""
        return min((self.start // self._inner_steps + 1) * self._inner_steps, self._last_step)

    def state(self) -> Sequence[Any]:
        """Return what a replica that copies this one's state must know of its round."""
        return [self.start, self.running, self._last_step]

    def restore(self, state: Sequence[Any]) -> None:
        """Take over the `state` of a peer."""
        self.start, self.running, self._last_step = state
        self._members = {}

    def begin(self, step: int, last_step: int) -> None:
        """Begin the round after `step` steps of `last_step`, with all members of the latest quorum."""
        quorum = self._membership.quorum = self._membership.quorum.after_copies()
        self.start, self.running, self._last_step = step, True, last_step
        self._outer.begin()
        trainer, count = self._trainer, len(quorum.members)
        shared = micro_batches(self._replicas, trainer.num_microbatches, count)
        samples = trainer.config.training.micro_batch_size * trainer.parallel.data.size
        self._members = {
            member.id: (member.index, len(share(shared, count, rank)) * samples)
            for rank, member in enumerate(quorum.members)
        }  # index and samples of a step

    def finish(self) -> None:
        """The outer step after the last step of the round. Another round may have begun when this returns: where the
        others have made the outer step without this replica, it copies their state and goes on with them."""
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
                with suppress(ReplicaLost):  # the members of the next round are others
                    check_peers(self._trainer, membership, self.start)

    def _log_lost(self, trained: set[str]) -> None:
        lost = [x for id, x in self._members.items() if id not in trained]
        if lost:
            indices = ", ".join(str(index) for index, _ in lost)
            samples = (self.end - self.start) * sum(samples for _, samples in lost)
            logger.warning(
                f"steps {self.start + 1} to {self.end}: the outer step is without replica {indices}, which was lost; "
                f"the {samples} samples of its share have trained nothing"
            )
