"""The goodput simulation against published and measured figures: `python -m benchmarks.goodput_published`.

FT-HSDP (arXiv 2602.00277): 44% with restarts and 80% with replicas, of about 100,000 GPUs. Its abstract has the stalls
of 10 and 3 minutes; a failure every 18 minutes, 12 replicas of 8,192 GPUs, 60 s of detection, and 10 minutes until
a replica is back are from summaries of the paper.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

from megafp8.planner.goodput import LLAMA3, Fault, Job, Rates, Saves, expected_goodput, random_faults, simulate

MINUTE, DAY = 60.0, 86400.0

FT_HSDP_RESTART = Job(step=1.0, saves=Saves(1.0), restart=9 * MINUTE)
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


def random_goodput(job: Job, apart: float) -> float:
    """Goodput where failures of nodes are random, `apart` on average, and detected after 60 s."""
    seconds = 10_000 * apart
    return simulate(job, random_faults({"node": 1 / apart}, seconds, 1, detection=60.0), seconds).goodput


def soak() -> tuple[float, float]:
    """Seconds from faults to next steps of the soak's schedule: simulated, and measured (number times median)."""
    job = Job(SOAK_STEP, Saves(2 * SOAK_STEP), SOAK_RESTART)
    faults, at = [], 0.0
    for kind in SOAK.values():
        for _ in range(kind.number):
            at += 6 * SOAK_STEP
            faults.append(Fault(at, "job", kind.named))
            at += kind.named + SOAK_RESTART
    parts = simulate(job, faults, at).seconds
    return parts["detection"] + parts["startup"], sum(kind.number * kind.next_step for kind in SOAK.values())


def main() -> None:
    """Print all comparisons."""
    jobs = (FT_HSDP_RESTART, FT_HSDP_REPLICAS)

    def evenly(apart: float) -> list[float]:
        return [simulate(job, *even_faults(apart, 2000)).goodput for job in jobs]

    print("FT-HSDP, about 100,000 GPUs (44%, 80%): restart, replicas")
    for name, values in (
        ("a failure every 18 min, evenly", evenly(18 * MINUTE)),
        ("evenly, 17.9 min from 44%", evenly(10 * MINUTE / (1 - 0.44))),
        ("at random, 18 min on average", [random_goodput(job, 18 * MINUTE) for job in jobs]),
        ("at random, 12.2 min from 44%", [random_goodput(job, -10 * MINUTE / math.log(0.44)) for job in jobs]),
    ):
        print(f"  {name:<32} {values[0]:.1%}  {values[1]:.1%}")

    print("Llama 3, 16,384 GPUs (over 90%): restart from disk, detection 60 s, restart 140 s")
    rates = LLAMA3.per_second(16384)
    for minutes in (10, 30):
        job = Job(20.0, Saves(minutes * MINUTE), 140.0, planned=200.0, check=2000.0)
        seconds = 4000 / rates["node"]
        found = simulate(job, random_faults(rates, seconds, 1, detection=60.0), seconds).goodput
        print(f"  a checkpoint every {minutes} min: {found:.1%}, formula {expected_goodput(job, rates, 60.0):.1%}")

    print("ByteRobust, 9,600 GPUs (up to 97%): 155 failures and 20 code changes in 90 days, a checkpoint each step")
    dense = Rates(9600, 90, node=143, job=12, silent=0, planned=20).per_second(9600)
    job = Job(20.0, Saves(20.0, 0.04), 93.0, planned=57.0)
    print(f"  {expected_goodput(job, dense, 60.0):.1%}")

    opt = Rates(992, 60, node=105, job=0, silent=0, planned=0)
    print(f"OPT-175B, 992 GPUs: 105 restarts in 60 days are {opt.mtbf_gpu_hours:,.0f} GPU-hours; ", end="")
    print(f"Llama 3 {LLAMA3.mtbf_gpu_hours:,.0f}, FT-HSDP {98304 * 0.3:,.0f}")
    predicted, measured = soak()
    error = predicted / measured - 1
    print(f"fault soak here, fault to next step: {predicted:,.0f} s, measured {measured:,.0f} ({error:+.0%})")
    for name, kind in SOAK.items():
        print(f"  {name:<22} {kind.named + SOAK_RESTART:>5.1f} s, measured {kind.next_step:>5.1f}")


if __name__ == "__main__":
    main()
