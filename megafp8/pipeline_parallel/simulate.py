"""When each action of a schedule runs, and what it holds in memory meanwhile, without a process group.

A model for planning and plots: stages that are alike, or each with times of its own, and transfers that take a fixed
time and occupy nobody. What is held is counted in micro-batches of one stage: a forward's activations live until the
backward, and where that leaves weight gradients for later, a part of them (the operands of the linear layers) until
these are done.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from megafp8.pipeline_parallel.schedules import COMPUTE, RECEIVE_BEFORE, Action, Kind, Placement, Schedule, splits


@dataclass(frozen=True)
class Times:
    """Durations for one micro-batch on one stage, in any one unit: of a forward, of the gradient of its input, of those
    of its weights; and of sending one tensor to another rank. A backward that is not split takes the last two."""

    forward: float = 1.0
    backward: float = 1.0
    weight: float = 1.0
    p2p: float = 0.0


@dataclass(frozen=True)
class Span:
    """One compute action and when it runs."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """For each rank its compute actions in time, simulated or measured, and what they hold in memory.

    `peak_in_flight` counts, for each rank, the most micro-batches × stages held for their backward, and `peak_held`
    those held for their last gradient: the same unless backwards are split. Both are 0 in an evaluation.
    """

    spans: list[list[Span]]

    @property
    def duration(self) -> float:
        return max(span.end for spans in self.spans for span in spans) - self.start

    @property
    def start(self) -> float:
        return min(span.start for spans in self.spans for span in spans)

    @property
    def bubble_fraction(self) -> float:
        """The part of all ranks' time, from the first start to the last end, in which they compute nothing."""
        busy = sum(span.end - span.start for spans in self.spans for span in spans)
        return 1.0 - busy / (len(self.spans) * self.duration)

    @property
    def peak_in_flight(self) -> list[int]:
        return [_peak(actions, whole=False) for actions in self._actions()]

    @property
    def peak_held(self) -> list[int]:
        return [_peak(actions, whole=True) for actions in self._actions()]

    def _actions(self) -> list[list[Action]]:
        return [[span.action for span in spans] for spans in self.spans]


def _peak(actions: list[Action], *, whole: bool) -> int:
    if all(action.kind is Kind.FORWARD for action in actions):
        return 0
    later = splits(actions) if whole else set()
    held = peak = 0
    for action in actions:
        ends = action.kind is Kind.BACKWARD and (action.microbatch, action.chunk) not in later
        held += (action.kind is Kind.FORWARD) - (ends or (whole and action.kind is Kind.WEIGHT))
        peak = max(peak, held)
    return peak


def simulate(schedule: Schedule, placement: Placement, times: Times | Sequence[Times] | None = None) -> Timeline:
    """When every compute action of `schedule` runs, each as early as its rank and its input allow.

    `times`: of every stage, or a sequence with those of each. Communication actions are not needed and not looked at.
    Raises ValueError where compute actions wait for one another
    for ever.
    """
    by_stage = [times or Times()] * placement.num_stages if times is None or isinstance(times, Times) else times
    compute = [[action for action in actions if action.kind in COMPUTE] for actions in schedule]
    durations = [
        _durations(actions, [by_stage[stage] for stage in placement.stages[rank]])
        for rank, actions in enumerate(compute)
    ]
    spans: list[list[Span]] = [[] for _ in schedule]
    ends: dict[tuple[int, Action], float] = {}

    def arrival(rank: int, action: Action) -> float | None:
        """When the action's input is there; None while nobody has made it."""
        needed = _needed(rank, action, placement)
        if any(other not in ends for other in needed):
            return None
        sent = {(r, a): by_stage[placement.stages[r][a.chunk]].p2p if r != rank else 0.0 for r, a in needed}
        return max((ends[other] + sent[other] for other in needed), default=0.0)

    def advance(rank: int) -> bool:
        done, own = len(spans[rank]), spans[rank]
        while len(own) < len(compute[rank]):
            action, duration = compute[rank][len(own)], durations[rank][len(own)]
            arrived = arrival(rank, action)
            if arrived is None:
                break
            start = max(arrived, own[-1].end if own else 0.0)
            own.append(Span(action, start, start + duration))
            ends[rank, action] = start + duration
        return len(own) > done

    while sum(advance(rank) for rank in range(len(schedule))):
        pass
    _raise_where_stuck(compute, [len(done) for done in spans], placement)
    return Timeline(spans)


def mean_times(timeline: Timeline, placement: Placement) -> list[Times]:
    """Of each stage, means of what its actions took in `timeline`. Backwards that were never split count as halves of
    two."""
    spent: dict[tuple[int, str], list[float]] = {}
    for rank, spans in enumerate(timeline.spans):
        later = splits(span.action for span in spans)
        for span in spans:
            action = span.action
            whole = action.kind is Kind.BACKWARD and (action.microbatch, action.chunk) not in later
            key = placement.stages[rank][action.chunk], "whole" if whole else action.kind.name
            spent.setdefault(key, []).append(span.end - span.start)
    mean = {key: statistics.fmean(times) for key, times in spent.items()}

    def of(stage: int) -> Times:
        half = mean.get((stage, "whole"), 0.0) / 2
        gradients = [mean.get((stage, kind.name), half) for kind in (Kind.BACKWARD, Kind.WEIGHT)]
        return Times(mean[stage, Kind.FORWARD.name], *gradients)

    return [of(stage) for stage in range(placement.num_stages)]


def _needed(rank: int, action: Action, placement: Placement) -> list[tuple[int, Action]]:
    """The compute actions, with their ranks, that must have ended before `action` of `rank`."""
    microbatch, chunk = action.microbatch, action.chunk
    if action.kind is Kind.WEIGHT:
        return [(rank, Action(Kind.BACKWARD, microbatch, chunk))]
    needed = [(rank, Action(Kind.FORWARD, microbatch, chunk))] if action.kind is Kind.BACKWARD else []
    source = placement.neighbour(RECEIVE_BEFORE[action.kind], rank, chunk)
    return needed if source is None else [*needed, (source[0], Action(action.kind, microbatch, source[1]))]


def _raise_where_stuck(compute: Schedule, positions: list[int], placement: Placement) -> None:
    """ValueError where a rank has not come to its end; about one that waits for what stands later in its own list, if
    there is one: that is surely wrong."""
    stuck = [rank for rank, actions in enumerate(compute) if positions[rank] < len(actions)]
    found: list[tuple[bool, int, int, Action]] = []
    for rank in stuck:
        for source, awaited in _needed(rank, compute[rank][positions[rank]], placement):
            if awaited not in compute[source][: positions[source]]:
                found.append((source != rank, rank, source, awaited))
    if found:
        _, rank, source, awaited = min(found, key=lambda entry: entry[:3])
        action, other = (compute[r][positions[r]] for r in (rank, source))
        at = "which comes later" if source == rank else f"and rank {source} never gets beyond {other}"
        raise schedule_error(rank, positions[rank], action, f"deadlock: waits for {awaited} of rank {source}, {at}")


def _durations(actions: list[Action], by_chunk: list[Times]) -> list[float]:
    later = splits(actions)
    found = []
    for action in actions:
        times = by_chunk[action.chunk]
        if action.kind is Kind.FORWARD:
            found.append(times.forward)
        elif action.kind is Kind.WEIGHT:
            found.append(times.weight)
        else:
            apart = (action.microbatch, action.chunk) in later
            found.append(times.backward if apart else times.backward + times.weight)
    return found


def schedule_error(rank: int, position: int, action: Action, rule: str) -> ValueError:
    """`rule` is broken by `action`, the one at `position` of the list of `rank`."""
    return ValueError(f"rank {rank}, position {position}, {action}: {rule}")
