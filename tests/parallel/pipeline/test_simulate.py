"""The simulator against closed forms."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megafp8.parallel.pipeline.actions import loop_placement, v_placement
from megafp8.parallel.pipeline.communication import with_communication
from megafp8.parallel.pipeline.forward_only import forward_only
from megafp8.parallel.pipeline.schedules.dualpipev import dualpipev
from megafp8.parallel.pipeline.schedules.interleaved import interleaved
from megafp8.parallel.pipeline.schedules.one_f_one_b import one_f_one_b
from megafp8.parallel.pipeline.schedules.zb_h1 import zb_h1
from megafp8.parallel.pipeline.schedules.zb_v import zb_v
from megafp8.parallel.pipeline.simulate import StageTimes, mean_times, simulate
from tests.parallel.pipeline.notation import schedule_of

stages = st.integers(1, 8)
microbatches = st.integers(1, 24)
durations = st.sampled_from([0.5, 1.0, 3.0])


@settings(max_examples=40)
@given(p=stages, m=microbatches, f=durations, b=durations, w=durations)
def test_one_f_one_b_meets_its_closed_forms(p: int, m: int, f: float, b: float, w: float) -> None:
    timeline = simulate(one_f_one_b(loop_placement(p), m), loop_placement(p), StageTimes(f, b, w))
    assert timeline.duration == pytest.approx((m + p - 1) * (f + b + w), abs=1e-12)
    assert timeline.bubble_fraction == pytest.approx((p - 1) / (m + p - 1), abs=1e-12)
    assert timeline.peak_in_flight == timeline.peak_saved == [min(m, p - rank) for rank in range(p)]


def test_each_stage_takes_its_own_time() -> None:
    """Drawn by hand: the last of two stages is twice as slow in all it does, and the first waits for it."""
    slow = simulate(
        one_f_one_b(loop_placement(2), 2),
        loop_placement(2),
        [StageTimes(1.0, 1.0, 0.0, p2p=0.5), StageTimes(2.0, 1.0, 1.0)],
    )
    assert [(s.start, s.end) for s in slow.spans[0]] == [(0, 1), (1, 2), (5.5, 6.5), (9.5, 10.5)]
    assert [(s.start, s.end) for s in slow.spans[1]] == [(1.5, 3.5), (3.5, 5.5), (5.5, 7.5), (7.5, 9.5)]


@settings(max_examples=40)
@given(p=stages, v=st.integers(2, 4), n=st.integers(1, 4), f=durations)
def test_interleaving_divides_the_bubble(p: int, v: int, n: int, f: float) -> None:
    """Section 2.2.2 of the paper: (p - 1)(F + B) / v, of stages a v-th as long, where p divides m."""
    placement, m = loop_placement(p, v), n * p
    timeline = simulate(interleaved(placement, m), placement, StageTimes(f, f, f))
    assert timeline.duration == pytest.approx((m * v + p - 1) * 3 * f, abs=1e-12)
    if n > 1:
        assert timeline.peak_in_flight == [2 * (p - r - 1) + (v - 1) * p + 1 for r in range(p)]


@settings(max_examples=40)
@given(p=st.integers(2, 8), more=st.integers(0, 8), w=st.sampled_from([0.5, 1.0]))
def test_zb_h1_has_a_third_of_the_bubble_in_the_memory_of_one_f_one_b(p: int, more: int, w: float) -> None:
    """Table 2 of the paper: (p - 1)(F + B - W), for W no longer than F and B."""
    m = 2 * p + more
    timeline = simulate(zb_h1(loop_placement(p), m), loop_placement(p), StageTimes(1.0, 1.0, w))
    assert timeline.duration == pytest.approx(m * (2 + w) + (p - 1) * (2 - w), abs=1e-12)
    assert timeline.peak_saved == [p] * p


@settings(max_examples=40)
@given(p=stages, more=st.integers(0, 8))
def test_zb_v_only_fills_and_drains(p: int, more: int) -> None:
    """No gap from the first action of a rank to its last; stages are half as long as one of 1F1B's."""
    m = 2 * p - 1 + more
    timeline = simulate(zb_v(v_placement(p), m), v_placement(p))
    assert timeline.duration == 6 * m + p - 1
    for rank, spans in enumerate(timeline.spans):
        assert (spans[0].start, spans[-1].end) == (rank, 6 * m + rank)
    assert max(timeline.peak_saved) <= 2 * p


@settings(max_examples=40)
@given(p=st.integers(2, 8), more=st.integers(0, 8))
def test_dualpipev_is_as_long_as_zb_v(p: int, more: int) -> None:
    m = 2 * p + more
    timeline = simulate(dualpipev(v_placement(p), m), v_placement(p))
    assert timeline.duration == 6 * m + p - 1
    assert max(timeline.peak_saved) <= 2 * p + 1


@settings(max_examples=40)
@given(p=stages, m=microbatches)
def test_an_evaluation_fills_and_drains_once(p: int, m: int) -> None:
    evaluation = with_communication(forward_only(loop_placement(p), m), loop_placement(p))
    timeline = simulate(evaluation, loop_placement(p), StageTimes(forward=2.0))
    assert timeline.duration == (m + p - 1) * 2.0
    assert timeline.peak_in_flight == timeline.peak_saved == [0] * p


@settings(max_examples=40)
@given(p=st.integers(1, 6), v=st.integers(2, 4), n=st.integers(1, 4))
def test_an_evaluation_of_several_chunks_is_as_short_as_the_interleaved_one(p: int, v: int, n: int) -> None:
    timeline = simulate(forward_only(loop_placement(p, v), n * p), loop_placement(p, v))
    assert timeline.duration == n * p * v + p - 1


@settings(max_examples=40)
@given(p=stages)
def test_transfers_of_one_microbatch_are_all_exposed(p: int) -> None:
    assert (
        simulate(one_f_one_b(loop_placement(p), 1), loop_placement(p), StageTimes(p2p=0.25)).duration
        == 3 * p + 2 * (p - 1) * 0.25
    )


def test_the_turn_of_a_v_costs_no_transfer() -> None:
    timeline = simulate(zb_v(v_placement(2), 1), v_placement(2), StageTimes(1.0, 2.0, 4.0, p2p=0.25))
    assert timeline.duration == 4 + 8 + 4 * 0.25 + 3 * 4 - 4


def test_a_split_backward_frees_its_successor() -> None:
    """Rank 1 hands the gradient back before it computes its weights' own; what that needs is held till then."""
    timeline = simulate(schedule_of("F0 B0 W0", "F0 B0 W0"), loop_placement(2), StageTimes(1.0, 2.0, 4.0))
    assert [[(s.start, s.end) for s in spans] for spans in timeline.spans] == [
        [(0, 1), (4, 6), (6, 10)],
        [(1, 2), (2, 4), (4, 8)],
    ]
    apart = simulate(schedule_of("F0 B0 F1 B1 W0 W1"), loop_placement(1))
    assert (apart.peak_in_flight, apart.peak_saved) == ([1], [2])


def test_a_ring_of_compute_is_refused() -> None:
    with pytest.raises(ValueError, match=re.escape("rank 0, position 1, BACKWARD(0): deadlock")):
        simulate(schedule_of("F0 B0 F1 B1", "F0 F1 B0 B1"), loop_placement(2))


def test_mean_times_are_those_that_were_simulated() -> None:
    times = [StageTimes(1.0, 2.0, 4.0), StageTimes(3.0, 1.0, 2.0)]
    placement = v_placement(1)
    assert mean_times(simulate(zb_v(placement, 3), placement, times), placement) == times


def test_backwards_that_were_never_split_count_half_each() -> None:
    placement = loop_placement(2)
    timeline = simulate(one_f_one_b(placement, 2), placement, StageTimes(1.0, 2.0, 4.0))
    assert mean_times(timeline, placement) == [StageTimes(1.0, 3.0, 3.0)] * 2
