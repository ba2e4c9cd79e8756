"""A quorum: the replicas that take part in a step, and what each of them does in it. Pure functions of its members."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

NEW = -1
"""The step of a replica that has no state yet."""


@dataclass(frozen=True)
class Member:
    """A replica that takes part in a quorum.

    `id`: of this start of the replica, unique. `index`: of the replica, from 0. `step`: number of steps that its state
    has done; `NEW` without one. `lineage`: of the state, see `after_step`. `nonce`: the key of the connections that it
    has, or a random word if it has none. `writes`: it has been the one that writes checkpoints. `store`: host and port
    of the store at which its ranks are met.
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
    """The members of a step in the order of their indices, as the member of number `rank` sees it.

    Those with the newest state train: each computes gradients of its share of the global batch. The others copy that
    state from a peer meanwhile and apply the same gradients, so after the step all members have one state.
    """

    members: tuple[Member, ...]
    rank: int

    @classmethod
    def from_members(cls, members: Sequence[Member], own_id: str) -> Quorum:
        """The quorum of `members`, in any order. ValueError if that of `own_id` is not among them."""
        ordered = tuple(sorted(members, key=lambda member: (member.index, member.id)))
        ranks = [rank for rank, member in enumerate(ordered) if member.id == own_id]
        if not ranks:
            raise ValueError(f"the quorum of {[member.id for member in ordered]} is without {own_id}")
        return cls(ordered, ranks[0])

    @property
    def member(self) -> Member:
        return self.members[self.rank]

    @cached_property
    def step(self) -> int:
        """Number of steps that the newest state has done; `NEW` if no member has one."""
        return max(member.step for member in self.members)

    @cached_property
    def lineage(self) -> str:
        """That of the newest state: if there are several of one step, of which all but one are of replicas that had
        left when they did it, that of the most members."""
        newest = [member.lineage for member in self.members if member.step == self.step]
        return max(dict.fromkeys(newest), key=newest.count)

    @cached_property
    def trainers(self) -> tuple[int, ...]:
        """The ranks of the members with that state."""
        newest = (self.step, self.lineage)
        return tuple(rank for rank, member in enumerate(self.members) if (member.step, member.lineage) == newest)

    @property
    def trains(self) -> bool:
        """Whether this member is one of them."""
        return self.rank in self.trainers

    @cached_property
    def sources(self) -> Mapping[int, int]:
        """The ranks of the other members, and of those from which they copy the state."""
        others = [rank for rank in range(len(self.members)) if rank not in self.trainers]
        return {rank: self.trainers[i % len(self.trainers)] for i, rank in enumerate(others)}

    @cached_property
    def writer(self) -> int:
        """The rank of the member that writes checkpoints: it stays the same one as long as that takes part."""
        return next((rank for rank in self.trainers if self.members[rank].writes), self.trainers[0])

    @property
    def indices(self) -> list[int]:
        """The replicas that train, by index."""
        return [self.members[rank].index for rank in self.trainers]

    @cached_property
    def key(self) -> str:
        """Names the connections of these members: those that all of them have, if they have the same, else new ones."""
        members, nonces = (_digest(getattr(x, name) for x in self.members) for name in ("id", "nonce"))
        connected = {member.nonce for member in self.members}
        if len(connected) == 1 and self.member.nonce.startswith(f"{members}-"):
            return self.member.nonce
        return f"{members}-{nonces}"

    def after_step(self) -> str:
        """The lineage of the state after the step of this quorum: a hash of all quorums whose steps it has done.

        Two replicas with one lineage have one state. Two of one step with different lineages: one of them did the step
        and left before the others knew, and these did it again without it.
        """
        return _digest((self.lineage, str(self.step), self.key))

    def after_copies(self) -> Quorum:
        """This quorum once all members have copied the newest state, so that all of them train."""
        have_state = (
            replace(member, step=self.step, lineage=self.lineage, writes=rank == self.writer)
            for rank, member in enumerate(self.members)
        )
        return Quorum(tuple(have_state), self.rank)

    @property
    def store(self) -> str:
        """Where the members meet: at a replica that has trained before, which need not start first."""
        return self.members[self.trainers[0]].store


def _digest(words: Iterable[str]) -> str:
    return hashlib.sha256(" ".join(words).encode()).hexdigest()[:16]


def share(count: int, members: int, rank: int) -> range:
    """Which of `count` micro-batches the member `rank` of `members` computes; numbers differ by at most one."""
    return range(count * rank // members, count * (rank + 1) // members)
