"""Simulation of a schedule: the time of each action, and the number of micro-batches that a rank holds in memory.

This is a model for planning and plots. Stages are equally fast or have individual times. Transfers take a fixed time
and occupy no rank. Memory is counted in micro-batches of one stage: a forward's activations are held until its
backward, or, if the backward is split, until its weight gradients (which hold part of them, the operands of the linear
layers).
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megafp8.parallel.pipeline.actions import (
    COMPUTE,
    RECEIVE_BEFORE,
    Action,
    Kind,
    Schedule,
    StagePlacement,
    split_backwards,
)


@dataclass(frozen=True)
class StageTimes:
    """Durations for one micro-batch on one stage, in any unit.

    Attributes:
        forward: Forward pass.
        backward: Gradient of the input.
        weight: Gradient of the weights. A backward that is not split takes `backward` + `weight`.
        p2p: Transfer to another rank.
    """

    forward: float = 1.0
    backward: float = 1.0
    weight: float = 1.0
    p2p: float = 0.0

    def duration(self, kind: Kind, *, split: bool) -> float:
        """Return the duration of a compute action. `split`: a separate WEIGHT computes the weight gradients."""
        if kind is Kind.BACKWARD:
            return self.backward if split else self.backward + self.weight
        return self.forward if kind is Kind.FORWARD else self.weight


EQUAL_TIMES = StageTimes()


class TimedAction(NamedTuple):
    """Compute action with its start and end."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """Compute actions of each rank in time, simulated or measured."""

    spans: list[list[TimedAction]]

    @property
    def duration(self) -> float:
        """Time from the first start to the last end."""
        return max(span.end for spans in self.spans for span in spans) - self.start

    @property
    def start(self) -> float:
        """Start of the first action."""
        return min(span.start for spans in self.spans for span in spans)

    @property
    def bubble_fraction(self) -> float:
        """Fraction of all ranks' time, from the first start to the last end, without computation."""
        busy = sum(span.end - span.start for spans in self.spans for span in spans)
        return 1.0 - busy / (len(self.spans) * self.duration)

    @property
    def peak_in_flight(self) -> list[int]:
        """Maximum number of micro-batches × stages that each rank holds for their backward; 0 in an evaluation."""
        return [_peak([span.action for span in spans], until_weight=False) for spans in self.spans]

    @property
    def peak_saved(self) -> list[int]:
        """Maximum number of micro-batches × stages that each rank holds for their last gradient; 0 in an evaluation."""
        return [_peak([span.action for span in spans], until_weight=True) for spans in self.spans]


def _peak(actions: list[Action], *, until_weight: bool) -> int:
    """Return the maximum number of micro-batches × stages that a rank with these actions holds."""
    if all(action.kind is Kind.FORWARD for action in actions):
        return 0
    split = split_backwards(actions) if until_weight else set()
    in_flight = peak = 0
    for kind, microbatch, chunk in actions:
        frees = kind is Kind.BACKWARD and (microbatch, chunk) not in split
        in_flight += (kind is Kind.FORWARD) - (frees or (until_weight and kind is Kind.WEIGHT))
        peak = max(peak, in_flight)
    return peak


def simulate(
    schedule: Schedule, placement: StagePlacement, times: StageTimes | Sequence[StageTimes] = EQUAL_TIMES
) -> Timeline:
    """Run every compute action of `schedule` as early as its rank and its input allow; transfers in it are ignored.

    `times` are the times of every stage, or a sequence with the times of each stage.

    Raises:
        ValueError: If compute actions deadlock.
    """
    by_stage = [times] * placement.num_stages if isinstance(times, StageTimes) else times
    compute = [[action for action in actions if action.kind in COMPUTE] for actions in schedule]
    split = [split_backwards(actions) for actions in compute]
    spans: list[list[TimedAction]] = [[] for _ in schedule]
    ends: dict[tuple[int, Action], float] = {}

    def advance(rank: int) -> bool:
        """Run the next actions of `rank` that have their inputs, and return whether there were any."""
        before, rank_spans = len(spans[rank]), spans[rank]
        while len(rank_spans) < len(compute[rank]):
            action = compute[rank][len(rank_spans)]
            start = rank_spans[-1].end if rank_spans else 0.0
            for source in _needed(rank, action, placement):
                if source not in ends:
                    return len(rank_spans) > before
                p2p = by_stage[placement.stages[source[0]][source[1].chunk]].p2p if source[0] != rank else 0.0
                start = max(start, ends[source] + p2p)
            stage = placement.stages[rank][action.chunk]
            is_split = (action.microbatch, action.chunk) in split[rank]
            rank_spans.append(TimedAction(action, start, start + by_stage[stage].duration(action.kind, split=is_split)))
            ends[rank, action] = rank_spans[-1].end
        return len(rank_spans) > before

    while sum(advance(rank) for rank in range(len(schedule))):
        pass
    _raise_if_stuck(compute, [len(done) for done in spans], placement)
    return Timeline(spans)


def mean_times(timeline: Timeline, placement: StagePlacement) -> list[StageTimes]:
    """Return the mean times of each stage's actions.

    A backward that was never split counts half for the input's gradient and half for the weights' gradient.
    """
    spent: dict[tuple[int, str], list[float]] = {}
    for stages, spans in zip(placement.stages, timeline.spans):
        split = split_backwards(span.action for span in spans)
        for (kind, microbatch, chunk), start, end in spans:
            whole = kind is Kind.BACKWARD and (microbatch, chunk) not in split
            spent.setdefault((stages[chunk], "whole" if whole else kind.name), []).append(end - start)
    mean = {key: statistics.fmean(times) for key, times in spent.items()}

    def of(stage: int) -> StageTimes:
        half = mean.get((stage, "whole"), 0.0) / 2
        gradients = [mean.get((stage, kind.name), half) for kind in (Kind.BACKWARD, Kind.WEIGHT)]
        return StageTimes(mean[stage, Kind.FORWARD.name], *gradients)

    return [of(stage) for stage in range(placement.num_stages)]


def _needed(rank: int, action: Action, placement: StagePlacement) -> list[tuple[int, Action]]:
    """Return the compute actions, with their ranks, that must have ended before `action` of `rank`."""
    kind, microbatch, chunk = action
    if kind is Kind.WEIGHT:
        return [(rank, Action(Kind.BACKWARD, microbatch, chunk))]
    needed = [(rank, Action(Kind.FORWARD, microbatch, chunk))] if kind is Kind.BACKWARD else []
    source = placement.neighbour(RECEIVE_BEFORE[kind], rank, chunk)
    return needed if source is None else [*needed, (source[0], Action(kind, microbatch, source[1]))]


def _raise_if_stuck(compute: Schedule, positions: list[int], placement: StagePlacement) -> None:
    """Raise ValueError if a rank has not ended; name a rank that waits for one of its own later actions, if any."""
    waiting: list[tuple[bool, int, int, Action]] = []
    for rank, actions in enumerate(compute):
        if positions[rank] < len(actions):
            for source, awaited in _needed(rank, actions[positions[rank]], placement):
                if awaited not in compute[source][: positions[source]]:
                    waiting.append((source != rank, rank, source, awaited))
    if waiting:
        _, rank, source, awaited = min(waiting, key=lambda entry: entry[:3])
        action, other = (compute[r][positions[r]] for r in (rank, source))
        at = "which comes later" if source == rank else f"and rank {source} never gets past {other}"
        raise schedule_error(rank, positions[rank], action, f"deadlock: waits for {awaited} of rank {source}, {at}")


def schedule_error(rank: int, position: int, action: Action, rule: str) -> ValueError:
    """Return the error for a `rule` that `action`, at `position` of the list of `rank`, breaks."""
    return ValueError(f"rank {rank}, position {position}, {action}: {rule}")
