"""Quorum: the replicas that take part in a step, and their tasks in it. Pure functions of the members."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

NEW = -1
"""Step of a replica that has no state yet."""


@dataclass(frozen=True)
class Member:
    """Replica that takes part in a quorum.

    Attributes:
        id: Unique id of this start of the replica.
        index: Index of the replica, from 0.
        step: Number of steps that its state has completed; `NEW` without a state.
        lineage: Lineage of the state; see `after_step`.
        nonce: Key of its current connections; without connections, a random word.
        writes: Whether it was the member that writes checkpoints.
        store: Host and port of the store through which its ranks can be reached.
    """

    id: str
    index: int
    step: int
    lineage: str
    nonce: str
    writes: bool
    store: str


@dataclass(frozen=True)
class Quorum:
    """Members of a step in the order of their indices, from the view of the member with number `rank`.

    Members with the newest state train: each computes gradients of its share of the global batch. The other members
    copy that state from a peer at the same time and apply the same gradients, so after the step all members have one
    state.
    """

    members: tuple[Member, ...]
    rank: int

    @classmethod
    def from_members(cls, members: Sequence[Member], own_id: str) -> Quorum:
        """Make the quorum of `members`, in any order; raise ValueError if `own_id` is not among them."""
        ordered = tuple(sorted(members, key=lambda member: (member.index, member.id)))
        ranks = [rank for rank, member in enumerate(ordered) if member.id == own_id]
        if not ranks:
            raise ValueError(f"the quorum of {[member.id for member in ordered]} does not contain {own_id}")
        return cls(ordered, ranks[0])

    @property
    def member(self) -> Member:
        """Member with number `rank`."""
        return self.members[self.rank]

    @cached_property
    def step(self) -> int:
        """Number of steps that the newest state has completed; `NEW` if no member has a state."""
        return max(member.step for member in self.members)

    @cached_property
    def lineage(self) -> str:
        """Lineage of the newest state.

        There can be several states of one step, if some replicas completed the step after the other members had given
        them up. The lineage with the most members wins.
        """
        newest = [member.lineage for member in self.members if member.step == self.step]
        return max(dict.fromkeys(newest), key=newest.count)

    @cached_property
    def trainers(self) -> tuple[int, ...]:
        """Ranks of the members with the newest state."""
        newest = (self.step, self.lineage)
        return tuple(rank for rank, member in enumerate(self.members) if (member.step, member.lineage) == newest)

    @property
    def trains(self) -> bool:
        """Whether this member has the newest state."""
        return self.rank in self.trainers

    @cached_property
    def sources(self) -> Mapping[int, int]:
        """Ranks of the members without the newest state, each with the rank from which it copies the state."""
        others = [rank for rank in range(len(self.members)) if rank not in self.trainers]
        return {rank: self.trainers[i % len(self.trainers)] for i, rank in enumerate(others)}

    @cached_property
    def writer(self) -> int:
        """Rank of the member that writes checkpoints. It stays the same as long as that member takes part."""
        return next((rank for rank in self.trainers if self.members[rank].writes), self.trainers[0])

    @property
    def indices(self) -> list[int]:
        """Indices of the replicas that train."""
        return [self.members[rank].index for rank in self.trainers]

    @cached_property
    def key(self) -> str:
        """Name of the connections of these members: the name of their common connections, or a new name."""
        members, nonces = (_digest(getattr(x, name) for x in self.members) for name in ("id", "nonce"))
        connected = {member.nonce for member in self.members}
        if len(connected) == 1 and self.member.nonce.startswith(f"{members}-"):
            return self.member.nonce
        return f"{members}-{nonces}"

    def after_step(self) -> str:
        """Return the lineage of the state after the step of this quorum: a hash of all quorums that led to it.

        Two replicas with one lineage have one state. If two replicas at one step have different lineages, one of them
        completed the step and left before the others knew, and the others repeated the step without it.
        """
        return _digest((self.lineage, str(self.step), self.key))

    def after_copies(self) -> Quorum:
        """Return this quorum once all members have copied the newest state, so that all of them train."""
        have_state = (
            replace(member, step=self.step, lineage=self.lineage, writes=rank == self.writer)
            for rank, member in enumerate(self.members)
        )
        return Quorum(tuple(have_state), self.rank)

    @property
    def store(self) -> str:
        """Address where the members meet: at a replica that has trained before, which need not start first."""
        return self.members[self.trainers[0]].store


def _digest(words: Iterable[str]) -> str:
    """Return a short hash of `words`."""
    return hashlib.sha256(" ".join(words).encode()).hexdigest()[:16]


def share(count: int, members: int, rank: int) -> range:
    """Return the micro-batches that member `rank` of `members` computes, out of `count`.

    The numbers of micro-batches differ by at most one between members. Members take turns, like data-parallel ranks, so
    that the balance of costs holds for them too (`data.sampler.balanced_order`).
    """
    return range(rank, count, members)
