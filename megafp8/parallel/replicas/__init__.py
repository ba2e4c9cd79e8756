"""Replicas of a job: whole copies of the model that train together, and may leave and come back between two steps.

    quorum        which replicas take part in a step, which of them lack its state, and from which peer they copy it
    lighthouse    torchft's lighthouse, which decides who takes part, behind a token
    group         sums, maxima and messages between ranks of different replicas, bounded in time
    membership    one replica's part in all this: the quorum, the exchange of a step's gradients, and the vote on it

Each replica is a job of its own (torchrun, process groups, a launch agent). No process group spans two of them, but for
those of `group`, which are made anew whenever the members change. docs/resilience.md tells how to run them.
"""

from megafp8.parallel.replicas.membership import Membership, ReplicaLost, ReplicaStopped, StopAsked
from megafp8.parallel.replicas.quorum import Member, Quorum, share

__all__ = ["Member", "Membership", "Quorum", "ReplicaLost", "ReplicaStopped", "StopAsked", "share"]
