"""Goodput under failures against formulas, a simulation second by second, cases by hand and published figures."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import NamedTuple

import pytest

from megafp8.planner.goodput import (
    LLAMA3,
    PARTS,
    Fault,
    Saves,
    SimulatedJob,
    best_interval,
    expected_goodput,
    random_faults,
    simulate,
    spares_needed,
    young_interval,
)

MINUTE, HOUR = 60.0, 3600.0

FT_HSDP_RESTART = SimulatedJob(step=1.0, saves=Saves(1.0), restart=9 * MINUTE)
"""10 minutes, of which 60 s are detection; no steps are lost, as in the paper's arithmetic, (18 - 10) / 18."""
FT_HSDP_REPLICAS = replace(FT_HSDP_RESTART, replicas=12, replica_restart=9 * MINUTE, regroup=2 * MINUTE)
"""3 minutes of stall, in which the failed step is repeated, then 7 without a replica: (8 + 7 * 11 / 12) / 18."""


class SoakFault(NamedTuple):
    """A kind of fault of the soak: number, medians of seconds until it was named and until the next step."""

    number: int
    named: float
    next_step: float


SOAK = {
    "damage_checkpoint": SoakFault(9, 0.2, 9.4),  # named by the next attempt; it ends as `kill` does
    "exception": SoakFault(9, 0.2, 8.5),
    "fail_save": SoakFault(9, 0.2, 10.7),
    "flip_gradient": SoakFault(9, 0.2, 10.8),
    "flip_weight": SoakFault(9, 0.2, 9.5),
    "hang": SoakFault(9, 9.6, 19.4),
    "kill": SoakFault(10, 0.2, 9.4),
    "leave_out_collective": SoakFault(9, 9.6, 17.7),
    "lose_memory": SoakFault(9, 0.2, 9.8),
    "stop": SoakFault(9, 21.2, 30.5),
}
"""docs/measurements/2026-11-23-resilience, without `slow`, which restarts nothing."""
SOAK_RESTART, SOAK_STEP = 8.0, 0.15
"""Seconds of four processes that import torch on two cores, by that page; a step, from what else its 1,347 s had."""


def even_faults(apart: float, number: int, detection: float = 60.0) -> tuple[list[Fault], float]:
    """Failures of nodes at equal distances, of one replica after the other, and the time that they take."""
    return [Fault(apart * (i + 1), "node", detection, 0.37 * i % 1) for i in range(number)], apart * (number + 1)


def soak() -> tuple[float, float]:
    """Seconds from faults to next steps of the soak's schedule: simulated, and measured (number times median)."""
    job = SimulatedJob(SOAK_STEP, Saves(2 * SOAK_STEP), SOAK_RESTART)
    faults, at = [], 0.0
    for kind in SOAK.values():
        for _ in range(kind.number):
            at += 6 * SOAK_STEP
            faults.append(Fault(at, "job", kind.named))
            at += kind.named + SOAK_RESTART
    parts = simulate(job, faults, at).seconds
    return parts["detection"] + parts["startup"], sum(kind.number * kind.next_step for kind in SOAK.values())


@pytest.mark.parametrize(
    ("interval", "stall", "restart", "mtbf"),
    [(600.0, 5.0, 300.0, 2 * HOUR), (60.0, 0.5, 600.0, 1080.0), (1800.0, 30.0, 60.0, 20 * HOUR)],
)
def test_restarts_follow_dalys_formula(interval: float, stall: float, restart: float, mtbf: float) -> None:
    job, rates = SimulatedJob(step=1.0, saves=Saves(interval, stall), restart=restart), {"job": 1 / mtbf}
    found = simulate(job, random_faults(rates, 10_000 * mtbf, 1), 10_000 * mtbf)
    assert found.goodput == pytest.approx(expected_goodput(job, rates), abs=0.005)
    assert sum(found.seconds.values()) == pytest.approx(10_000 * mtbf)


def test_replicas_follow_the_first_order_formula() -> None:
    saves = Saves(200.0, 0.1, 30.0, 5.0)
    job = SimulatedJob(10.0, saves, 100.0, (), 8, 6, 150.0, 10.0, 60.0, check=200.0, planned=300.0)
    rates = {"node": 1 / (5 * HOUR), "job": 1 / (40 * HOUR), "silent": 1 / (200 * HOUR), "planned": 1 / (30 * HOUR)}
    seconds = 20_000 * HOUR
    found = simulate(job, random_faults(rates, seconds, 1, detection=15.0), seconds)
    assert found.goodput == pytest.approx(expected_goodput(job, rates, 15.0), abs=0.001)
    assert found.faults["node"] == pytest.approx(4000, rel=0.05)


def second_by_second(job: SimulatedJob, faults: list[Fault], seconds: int) -> dict[str, float]:
    """The same parts for whole numbers of seconds, without stalls of saves, spares and planned stops."""
    parts, done, newest, stalls = dict.fromkeys(PARTS, 0.0), [], 0, []
    back: dict[int, int] = {}
    finished: dict[int, int] = {}  # checkpoint: when it is complete
    at = {int(fault.at): fault for fault in faults}
    assert len(at) == len(faults)

    def restart(detection: float) -> list[str]:
        nonlocal newest
        newest = max([newest, *(saved for saved, complete in finished.items() if complete <= now)])
        lose(newest)
        return ["detection"] * int(detection) + ["startup"] * int(job.restart)

    def lose(position: int) -> None:
        for part in done[position:]:
            parts["training"] -= part
            parts["repeated"] += part
        del done[position:]
        for saved in [x for x in finished if x > position]:
            del finished[saved]

    for now in range(seconds):
        rejoined = [index for index, then in back.items() if then == now]
        for index in rejoined:
            del back[index]
        if rejoined and "startup" not in stalls:
            stalls += ["regrouping"] * int(job.rejoin)
        if now in at:
            fault = at[now]
            index = int(fault.place * job.replicas)
            if job.replicas == 1 or fault.kind == "job" or "startup" in stalls:
                stalls = restart(fault.detection)
            else:
                away = index in back
                then = now + int(fault.detection + job.replica_restart)
                back[index] = max(back.get(index, 0), then)
                if len(back) == job.replicas:
                    back.clear()
                    stalls = restart(fault.detection)
                elif not away:
                    lose(max(newest, len(done) // int(job.step) * int(job.step)))
                    stalls = ["detection"] * int(fault.detection) + ["regrouping"] * int(job.regroup)
        active = job.replicas - len(back)
        if stalls:
            parts[stalls.pop(0)] += 1
        elif active < job.least_replicas:
            parts["waiting"] += 1
        else:
            done.append(active / job.replicas)
            parts["training"] += done[-1]
            parts["degraded"] += 1 - done[-1]
            if len(done) % int(job.saves.interval) == 0:
                finished[len(done)] = now + 1 + int(job.saves.duration)
    return parts


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("replicas", [1, 3])
def test_it_is_a_simulation_second_by_second(seed: int, replicas: int) -> None:
    draws = random.Random(seed)
    job = SimulatedJob(
        step=7.0,
        saves=Saves(70.0, duration=20.0),
        restart=31.0,
        replicas=replicas,
        least_replicas=2 if replicas > 1 else 1,
        replica_restart=90.0,
        regroup=5.0,
        rejoin=9.0,
    )
    times = sorted(draws.sample(range(1, 20_000), 120))
    kinds = ("node", "node", "node", "job")
    faults = [Fault(float(at), draws.choice(kinds), float(draws.randrange(12)), draws.random()) for at in times]
    if replicas == 1:
        faults = [replace(fault, place=0.0) for fault in faults]
    assert simulate(job, faults, 20_000).seconds == pytest.approx(second_by_second(job, faults, 20_000), abs=1e-6)


def test_corruption_is_found_by_the_next_comparison_and_nothing_since_counts() -> None:
    job = SimulatedJob(step=10.0, saves=Saves(300.0), restart=50.0, check=100.0)
    found = simulate(job, [Fault(420.0, "silent")], 1000.0)  # found at 500, saved at 300
    assert found.seconds["repeated"] == pytest.approx(200.0)
    found = simulate(job, [Fault(560.0, "silent")], 1000.0)  # found at 600, before it is saved
    assert found.seconds["repeated"] == pytest.approx(300.0)
    assert found.seconds["startup"] == 50.0


def test_without_spares_a_job_waits_for_repairs() -> None:
    job = SimulatedJob(step=1.0, saves=Saves(10.0), restart=10.0, spares=1, repair=1000.0)
    faults = [Fault(100.0), Fault(300.0)]  # the second waits until 1100
    found = simulate(job, faults, 2000.0)
    assert found.seconds["waiting"] == pytest.approx(800.0)
    software = [*faults, Fault(700.0, "job", 50.0)]  # the node is missing all the same
    assert simulate(job, software, 2000.0).seconds["waiting"] == pytest.approx(750.0)
    assert simulate(replace(job, spares=2), faults, 2000.0).seconds["waiting"] == 0.0
    assert simulate(replace(job, spares=0), faults[:1], 2000.0).seconds["waiting"] == pytest.approx(1000.0)


def test_spares_needed_is_a_quantile() -> None:
    draws = random.Random(1)
    busy = [sum(draws.random() < 0.01 for _ in range(400)) for _ in range(2000)]  # Poisson with mean 4, nearly
    needed = spares_needed(4.0, 1.0)
    assert 10 <= needed <= 12  # the quantile of 0.999 is 11
    assert sum(x > needed for x in busy) < 8
    assert spares_needed(600.0, 1.0) == pytest.approx(600 + 3.1 * math.sqrt(600), abs=1)


def test_the_best_interval_is_youngs_where_stalls_are_short_and_no_shorter_than_a_save() -> None:
    rates = {"node": 1 / (10 * HOUR)}
    job = SimulatedJob(step=1.0, saves=Saves(1.0, stall=2.0), restart=60.0)
    steps = best_interval(job, rates)
    assert steps == pytest.approx(young_interval(job, rates), rel=0.02)  # 379 s
    shifted = [
        expected_goodput(replace(job, saves=Saves(x, 2.0)), rates) for x in (steps - 5.0, float(steps), steps + 5.0)
    ]
    assert max(shifted) == shifted[1]
    assert best_interval(replace(job, saves=Saves(1.0, 2.0, duration=1000.0)), rates) == 1000
    assert best_interval(replace(job, saves=Saves(1.0)), rates) == 1


def test_rates_are_those_of_llama_3() -> None:
    rates = LLAMA3.per_second(16384)
    unplanned = sum(rates.values()) - rates["planned"]
    assert unplanned * 54 * 86400 == pytest.approx(419)
    assert LLAMA3.mtbf_gpu_hours == pytest.approx(16384 * 54 * 24 / 419)
    half = LLAMA3.per_second(16384, LLAMA3.mtbf_gpu_hours / 2)
    assert half["node"] == pytest.approx(2 * rates["node"])
    assert half["planned"] == rates["planned"] == LLAMA3.per_second(8)["planned"]


def test_ft_hsdp_from_its_stated_times() -> None:
    """44% and 80% at 98,304 GPUs: failures 18 minutes apart, 10 minutes of restart, 3 of stall, 12 replicas."""
    faults, seconds = even_faults(18 * 60.0, 600)
    assert simulate(FT_HSDP_RESTART, faults, seconds).goodput == pytest.approx(8 / 18, abs=0.002)
    assert simulate(FT_HSDP_REPLICAS, faults, seconds).goodput == pytest.approx((8 + 7 * 11 / 12) / 18, abs=0.005)


def test_the_fault_soak_here_within_a_sixth() -> None:
    predicted, measured = soak()
    assert predicted == pytest.approx(measured, rel=1 / 6)
