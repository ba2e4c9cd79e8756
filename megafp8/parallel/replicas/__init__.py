"""Replicas of a job: whole copies of the model that train together, and may leave and come back between two steps.

    quorum        replicas that take part in a step, replicas without the current state, and the peers they copy it from
    lighthouse    torchft's lighthouse, which decides who takes part, protected by a token
    group         sums, maxima and messages between ranks of different replicas, with time limits
    membership    one replica's part in this: the quorum, the exchange of a step's gradients, and the vote on the step

Each replica is a separate job (torchrun, process groups, a launch agent). Process groups do not span replicas, except
the groups of `group`, which are rebuilt whenever the members change. docs/resilience.md explains how to run replicas.
"""

from megafp8.parallel.replicas.membership import Membership, ReplicaLost, ReplicaStopped, StopAsked
from megafp8.parallel.replicas.quorum import Member, Quorum, share

__all__ = ["Member", "Membership", "Quorum", "ReplicaLost", "ReplicaStopped", "StopAsked", "share"]
