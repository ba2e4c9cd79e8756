"""Goodput of a planned run under failures: a simulation, a closed form, and the best checkpoint interval.

Goodput is the time of useful steps divided by the wall time. Each step is weighted with the fraction of the GPUs that
take part in it: a step of seven of eight replicas counts for seven eighths of its time. Spare nodes are not GPUs of the
job.

There are three kinds of recovery. The job restarts from disk, or from checkpoints in the memory of its nodes, or it is
divided into replicas. When a replica fails, the others repeat the step without it and continue with a smaller batch
while the failed replica restarts and copies its state from them. A job with replicas restarts (from memory) only after
failures of the whole job, after silent corruption, and when no replica is left. A failure during a restart begins the
restart again; a failure while the replicas are stalled begins the stall again.

The simulation goes from event to event and measures positions in seconds of steps. The stalls of saves are spread
evenly over the time between them. Checkpoints are taken at multiples of their interval, are complete some seconds
later, and contain no silent corruption, because replicas are compared before each checkpoint. Not modeled: the loss of
two neighboring nodes at once (the job would continue from disk), slow ranks, evaluations, and failures of restarts
themselves.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from megafp8.config import Config
from megafp8.host.cluster import Cluster
from megafp8.layers.costs import ELEMENT
from megafp8.planner.memory import least_moment_bytes, sum_bytes
from megafp8.planner.outline import ModelOutline
from megafp8.planner.stages import stages_of

PARTS: Mapping[str, str] = {
    "training": "steps that count, times the part of the GPUs in them",
    "detection": "from a failure to its message",
    "startup": "restart of the job up to its first step",
    "regrouping": "all wait while a replica leaves or rejoins",
    "repeated": "steps lost in a failure and repeated",
    "degraded": "GPUs of replicas that are away while the others train",
    "waiting": "for a spare node, or for enough replicas",
    "saves": "stalls for checkpoints",
    "planned": "planned stops: save, and restart",
}
"""Parts of the wall time. `training`, `repeated`, `saves` and `startup` mean the same as in `megafp8.training.goodput`.
"""

KINDS = ("node", "job", "silent", "planned")
"""Kinds of failures: of one node; of the whole job; silent corruption, found when replicas are compared; planned stops.
"""


@dataclass(frozen=True)
class InterruptionRates:
    """Published interruptions of a run of `days` on `gpus` GPUs, by kind.

    The number of planned interruptions does not grow with the number of GPUs.

    `LLAMA3`: The Llama 3 Herd of Models (arXiv 2407.21783), table 5: 466 interruptions, 47 of them planned. Of the
    other 419, 54 software bugs and 2 dependencies count as failures of the job, 6 as silent corruption, and the rest
    (GPUs 262, network 35, maintenance of hosts 32, hosts 21, watchdog 7) as failures of a node.
    """

    gpus: int
    days: float
    node: int
    job: int
    silent: int
    planned: int

    @property
    def mtbf_gpu_hours(self) -> float:
        """GPU-hours between unplanned interruptions."""
        return self.gpus * self.days * 24 / (self.node + self.job + self.silent)

    def per_second(self, gpus: int, mtbf_gpu_hours: float | None = None) -> dict[str, float]:
        """Return the failures per second by kind in a job of `gpus` GPUs.

        If `mtbf_gpu_hours` is given, unplanned failures are scaled to this mean time between failures.
        """
        scale = gpus / self.gpus * self.mtbf_gpu_hours / (mtbf_gpu_hours or self.mtbf_gpu_hours) / (self.days * 86400)
        return {
            "node": self.node * scale,
            "job": self.job * scale,
            "silent": self.silent * scale,
            "planned": self.planned / (self.days * 86400),
        }


LLAMA3 = InterruptionRates(gpus=16384, days=54, node=357, job=56, silent=6, planned=47)
_FAULTS = 4000  # failures that a forecast simulates


@dataclass(frozen=True)
class Assumptions:
    """Assumptions that no config states, in seconds and bytes per second, with sources.

    `detection`: time to detect a failure with an error message; ByteRobust (arXiv 2509.16293, table 3) 2 to 60 s, a
    lost GPU 10. `hangs`: fraction of failures without a message, detected after `hang_detection`; ByteRobust, table 1:
    5,506 hangs of 44,184 failures. `restart`, `restart_gpu`: restart of processes and process groups, and additional
    time per GPU of the largest group; ByteRobust, table 7: 46 to 65 s; FT-HSDP (arXiv 2602.00277): 600 s, 60 of them
    detection, on 98,304 GPUs. `regroup`: regrouping of gradient groups without a replica; FT-HSDP's expected stall of
    90 s minus 60 s of detection and a step of 20 s. `rejoin`: stall when a replica rejoins; FT-HSDP 100. `repair`:
    repair of a node, assumed. `host_copy`: bandwidth of a rank's copy to the host, assumed. `host_memory`: bandwidth of
    its save to /dev/shm, measured (2026-11-23-h200-faults). `save`: stall of a save in addition to the copy, caused by
    the comparison of replicas, measured (same page). `disk_gpu`: storage bandwidth per GPU of the job; Llama 3's 2 TB/s
    for 16,384 GPUs. `disk_interval`: time between additional saves on disk if checkpoints are in memory, assumed.
    FT-HSDP's times are from summaries of the paper.
    """

    detection: float = 10.0
    hangs: float = 5506 / 44184
    restart: float = 60.0
    restart_gpu: float = 480 / 98304
    regroup: float = 10.0
    rejoin: float = 100.0
    repair: float = 86400.0
    host_copy: float = 20e9
    host_memory: float = 0.9e9
    disk_gpu: float = 2e12 / 16384
    save: float = 0.05
    disk_interval: float = 3600.0


@dataclass(frozen=True)
class Saves:
    """Checkpoints in one place.

    `interval`: seconds of steps between checkpoints. `stall`, `duration`, `load`: seconds of the stall, until a
    checkpoint is complete, and to load one.
    """

    interval: float
    stall: float = 0.0
    duration: float = 0.0
    load: float = 0.0


@dataclass(frozen=True)
class SimulatedJob:
    """Job parameters for the simulation, in seconds.

    `saves`: checkpoints from which the job restarts. `also`: other checkpoints, which only cost stalls. `restart`:
    restart of the whole job. `replica_restart`: restart of one of `replicas`, from its failure's message until it
    rejoins. `least_replicas`: minimum number of replicas that train. `check`: time between comparisons of replicas.
    `spares`: spare nodes; None for an unlimited number.
    """

    step: float
    saves: Saves
    restart: float
    also: Sequence[Saves] = ()
    replicas: int = 1
    least_replicas: int = 1
    replica_restart: float = 0.0
    regroup: float = 0.0
    rejoin: float = 0.0
    check: float = math.inf
    planned: float = 0.0
    spares: int | None = None
    repair: float = 0.0

    @property
    def speed(self) -> float:
        """Seconds of steps per second of training, saves included."""
        return 1 / (1 + sum(saves.stall / saves.interval for saves in (self.saves, *self.also)))


@dataclass(frozen=True)
class Fault:
    """Failure at a point in time.

    `detection` is the seconds until it is detected; `place`, from 0 to 1, selects the replica.
    """

    at: float
    kind: str = "node"
    detection: float = 0.0
    place: float = 0.0


@dataclass(frozen=True)
class SimulatedOutcome:
    """Seconds of each of `PARTS`, which add up to the simulated time, and the number of failures by kind."""

    seconds: Mapping[str, float]
    faults: Mapping[str, int]

    @property
    def goodput(self) -> float:
        """Fraction of the simulated time spent in useful steps."""
        return self.seconds["training"] / sum(self.seconds.values())

    def share(self, part: str) -> float:
        """Return the fraction of the simulated time spent in `part`."""
        return self.seconds[part] / sum(self.seconds.values())


def random_faults(
    rates: Mapping[str, float],
    seconds: float,
    seed: int,
    *,
    detection: float = 0.0,
    hangs: float = 0.0,
    hang: float = 0.0,
) -> Iterator[Fault]:
    """Yield random failures in the order of time.

    Args:
        rates: Failures per second by kind.
        seconds: Length of the simulated time.
        seed: Seed of the random numbers.
        detection: Seconds until a failure with an error message is detected.
        hangs: Fraction of failures that are hangs.
        hang: Seconds until a hang is detected.
    """
    draws, at, kinds = random.Random(seed), 0.0, list(rates)
    total = sum(rates.values())
    while total and (at := at + draws.expovariate(total)) < seconds:
        kind = draws.choices(kinds, [rates[kind] for kind in kinds])[0]
        yield Fault(at, kind, hang if draws.random() < hangs else detection, draws.random())


@dataclass
class _State:
    """State of the simulated job at a point in time. `position` is the seconds of steps done.

    `segments`: steps since the last restart, each segment as (begin position, end position, fraction of the GPUs, start
    time).
    """

    job: SimulatedJob
    time: float = 0.0
    position: float = 0.0
    loaded: float = 0.0
    """Position of the checkpoint from which the job last continued."""
    corrupt: float = math.inf
    """Position at which silent corruption will be found."""
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    segments: list[tuple[float, float, float, float]] = field(default_factory=list)
    stalls: list[tuple[float, str]] = field(default_factory=list)
    """Parts of the wall time that follow next, each with its end."""
    back: dict[int, float] = field(default_factory=dict)
    """Times at which the absent replicas rejoin."""
    repairs: list[float] = field(default_factory=list)
    ready: float = 0.0
    """Time at which there are enough nodes for the whole job."""

    @property
    def starting(self) -> bool:
        """Whether the whole job is restarting."""
        return any(part in ("startup", "planned") for _, part in self.stalls)

    def advance(self, until: float) -> None:
        """Let time pass without failures."""
        job = self.job
        while self.time < until:
            taking_part = job.replicas - len(self.back)
            trains = not self.stalls and taking_part >= job.least_replicas
            detected = self.time + (self.corrupt - self.position) / job.speed if trains else math.inf
            end = min([until, detected, *(at for at, _ in self.stalls[:1]), *self.back.values()])
            passed = max(0.0, end - self.time)
            if trains:
                self._train(passed * job.speed, passed, taking_part / job.replicas)
            else:
                self.seconds[self.stalls[0][1] if self.stalls else "waiting"] += passed
            self.time = end
            self.stalls = [stall for stall in self.stalls if stall[0] > end]
            rejoining = [index for index, at in self.back.items() if at <= end]
            for index in rejoining:
                del self.back[index]
            if rejoining and job.rejoin and not self.starting:
                last = self.stalls[-1][0] if self.stalls else end
                self.stalls.append((last + job.rejoin, "regrouping"))
            if end == detected:
                self._restart(0.0, 0.0, corrupt=True)

    def _train(self, moved: float, passed: float, part: float) -> None:
        self.segments.append((self.position, self.position + moved, part, self.time))
        self.position += moved
        self.seconds["training"] += moved * part
        self.seconds["degraded"] += moved * (1 - part)
        self.seconds["saves"] += passed - moved

    def _stall(self, *parts: tuple[float, str]) -> None:
        """Replace the current stalls of the job."""
        self.stalls, end = [], self.time
        for seconds, part in parts:
            if seconds > 0:
                end += seconds
                self.stalls.append((end, part))

    def _lose(self, position: float) -> None:
        """Go back to a position. The steps done since will be repeated."""
        while self.segments and self.segments[-1][1] > position:
            begin, end, part, began = self.segments.pop()
            lost = end - max(begin, position)
            self.seconds["training"] -= lost * part
            self.seconds["repeated"] += lost * part
            if begin < position:
                self.segments.append((begin, position, part, began))
        self.position = position

    def _restart(self, detection: float, waiting: float, *, corrupt: bool = False) -> None:
        """Restart the whole job from its newest complete checkpoint.

        With `corrupt`, checkpoints taken after the corruption began are not used.
        """
        saves, speed = self.job.saves, self.job.speed
        for begin, end, _, began in reversed(self.segments):
            last = min(end, begin + (self.time - saves.duration - began) * speed)
            if corrupt:
                last = min(last, self.position - saves.interval / 2)
            complete = last // saves.interval * saves.interval
            if complete > begin:
                self.loaded = complete
                break
        self._lose(self.loaded)
        self.segments.clear()  # saved: no failure loses them
        self.corrupt = math.inf
        self.ready = max(self.ready, self.time + waiting)
        waiting = self.ready - self.time - detection
        self._stall((detection, "detection"), (waiting, "waiting"), (self.job.restart + saves.load, "startup"))

    def _spare(self) -> float:
        """Return the seconds until a node replaces one that fails now."""
        job = self.job
        if job.spares is None:
            return 0.0
        self.repairs = [at for at in self.repairs if at > self.time] + [self.time + job.repair]
        missing = len(self.repairs) - 1 - job.spares
        return self.repairs[missing] - self.time if missing >= 0 else 0.0

    def fail(self, fault: Fault) -> None:
        """Apply a failure: lose steps and replicas, and begin the recovery."""
        job = self.job
        if fault.kind == "planned":
            if self.corrupt < math.inf:  # the save compares replicas
                self._restart(0.0, 0.0, corrupt=True)
            self.loaded = self.position
            self.segments.clear()
            self._stall((job.planned, "planned"))
        elif fault.kind == "silent":
            periods = [period for period in (job.check, job.saves.interval) if period < math.inf]
            self.corrupt = min([self.corrupt, *((self.position // period + 1) * period for period in periods)])
        elif fault.kind == "job":
            self._restart(fault.detection, 0.0)
        else:
            self._lose_node(fault)

    def _lose_node(self, fault: Fault) -> None:
        job, waiting = self.job, self._spare()
        if job.replicas == 1 or self.starting:
            self._restart(fault.detection, waiting)
            return
        index = min(int(fault.place * job.replicas), job.replicas - 1)
        away = index in self.back
        rejoins = self.time + max(fault.detection, waiting) + job.replica_restart
        self.back[index] = max(self.back.get(index, 0.0), rejoins)
        if away:
            return
        if len(self.back) == job.replicas:  # no replica has the state
            self.back.clear()
            self._restart(fault.detection, waiting)
            return
        self._lose(max(self.loaded, self.position // job.step * job.step))
        self._stall((fault.detection, "detection"), (job.regroup, "regrouping"))


def simulate(job: SimulatedJob, faults: Iterable[Fault], seconds: float) -> SimulatedOutcome:
    """Return the outcome of the first `seconds` of a job under `faults`, which are in the order of time."""
    state, counts = _State(job), dict.fromkeys(KINDS, 0)
    for fault in faults:
        if fault.at >= seconds:
            break
        state.advance(fault.at)
        state.fail(fault)
        counts[fault.kind] += 1
    state.advance(seconds)
    return SimulatedOutcome(state.seconds, counts)


def _rollbacks(job: SimulatedJob, rates: Mapping[str, float]) -> float:
    """Return the restarts of the whole job per second."""
    return rates.get("job", 0.0) + rates.get("silent", 0.0) + (rates.get("node", 0.0) if job.replicas == 1 else 0.0)


def expected_goodput(job: SimulatedJob, rates: Mapping[str, float], detection: float = 0.0) -> float:
    """Return the goodput by a closed formula.

    Restarts follow Daly's formula; replicas, planned stops and silent corruption are terms of first order. The result
    is exact if all failures are failures of the whole job, there are enough spares, and saves complete at once.

    J. T. Daly, A higher order estimate of the optimum checkpoint interval for restart dumps, 2006: an interval and its
    save take exp(r · restart) · (exp(r · (interval + stall)) - 1) / r seconds, with r restarts per second.
    """
    rate, saves, node = _rollbacks(job, rates), job.saves, rates.get("node", 0.0) if job.replicas > 1 else 0.0
    goodput = job.speed
    if rate:
        growth = math.expm1(min(rate * saves.interval / job.speed, 700.0)) / rate
        goodput = saves.interval / growth * math.exp(-rate * (detection + job.restart + saves.load + saves.duration))
    goodput *= 1 - rates.get("silent", 0.0) * min(job.check, saves.interval) / 2
    stall = detection + job.regroup + job.rejoin + job.step / 2
    away = detection + job.replica_restart
    return (
        goodput
        * math.exp(-node * stall)
        * (1 - node * away / job.replicas)
        * (1 - rates.get("planned", 0.0) * job.planned)
    )


def young_interval(job: SimulatedJob, rates: Mapping[str, float]) -> float:
    """Return J. W. Young's first-order best interval (1974) in seconds of steps: √(2 · stall / restarts per second)."""
    rate = _rollbacks(job, rates)
    return math.sqrt(2 * job.saves.stall / rate) if rate else math.inf


def best_interval(job: SimulatedJob, rates: Mapping[str, float], detection: float = 0.0) -> int:
    """Return the number of steps between saves with the highest `expected_goodput`, at least the duration of a save."""
    least = max(1, math.ceil(job.saves.duration / job.step))
    most = max(least, math.ceil(min(young_interval(job, rates), 1e7 * job.step) * 3 / job.step))

    def goodput(steps: int) -> float:
        return expected_goodput(replace(job, saves=replace(job.saves, interval=steps * job.step)), rates, detection)

    while most - least > 2:  # ternary search, because goodput has a single maximum
        third = (most - least) // 3
        left, right = least + third, most - third
        least, most = (left, most) if goodput(left) < goodput(right) else (least, right)
    return max(range(least, most + 1), key=goodput)


def spares_needed(rate: float, repair: float) -> int:
    """Return the number of spare nodes that suffice for 99.9% of the time.

    The number of nodes in repair is Poisson-distributed.
    """
    mean = rate * repair
    if mean > 500:  # the sum underflows, and a normal approximation is accurate to one node
        return math.ceil(mean + 3.1 * math.sqrt(mean))
    count, probability = 0, math.exp(-mean)
    total = probability
    while total < 0.999:
        count += 1
        probability *= mean / count
        total += probability
    return count


def state_bytes_of(outline: ModelOutline) -> int:
    """Return the bytes of a checkpoint: weights, masters and moments of all parameters."""
    config = outline.config
    each = ELEMENT[config.training.precision] + sum_bytes(config) + least_moment_bytes(config)
    return each * sum(x.in_model for layers in stages_of(config)[1] for x in outline.parameters(layers))


def hang_detection(config: Config) -> float:
    """Return the seconds until a hang is reported.

    With the hang watch, they include up to two polls (docs/resilience.md); without it, they are the timeout of
    collectives.
    """
    return 1.2 * config.hang_seconds or config.timeout_seconds


@dataclass(frozen=True)
class Forecast:
    """Goodput of a config with one kind of recovery, at its best checkpoint interval.

    `young`: interval in steps by Young's formula. `configured`: expected goodput at the config's own interval; None if
    it has none.
    """

    gpus: int
    recovery: str
    interval: int
    step: float
    young: float
    expected: float
    configured: float | None
    outcome: SimulatedOutcome
    spares: int
    mtbf: float

    @property
    def goodput(self) -> float:
        """Simulated goodput."""
        return self.outcome.goodput


def forecasts(
    config: Config,
    cluster: Cluster,
    step: float,
    state: int,
    replicas: tuple[int, int],
    mtbf_gpu_hours: float | None = None,
) -> list[Forecast]:
    """Return the goodput of `config` with restarts from disk, with restarts from memory, and with replicas.

    Args:
        config: Config of the run.
        cluster: GPUs and links.
        step: Predicted seconds per step.
        state: Bytes of a checkpoint.
        replicas: Number of replicas, and the minimum that train.
        mtbf_gpu_hours: Mean time between unplanned failures. Default: the rate of Llama 3.
    """
    assumed, gpus, rank_bytes = Assumptions(), cluster.gpus, state / cluster.gpus
    rates = LLAMA3.per_second(gpus, mtbf_gpu_hours)
    unplanned = sum(rates.values()) - rates["planned"]
    hang = hang_detection(config)
    detection = assumed.detection + assumed.hangs * (hang - assumed.detection)
    stall = assumed.save + rank_bytes / assumed.host_copy
    to_disk = rank_bytes / assumed.disk_gpu
    to_memory = rank_bytes / assumed.host_memory + rank_bytes / cluster.gpu.network
    disk = Saves(max(config.checkpoint.interval, 1) * step, stall, to_disk, to_disk)
    memory = Saves(max(config.checkpoint.memory_interval, 1) * step, stall, to_memory, to_memory)
    spares = spares_needed(rates["node"], assumed.repair)
    count, least = replicas
    results: list[Forecast] = []
    for recovery, saves, number in (
        ("restart, disk", disk, 1),
        ("restart, memory", memory, 1),
        (f"{count} replicas", memory, count),
    ):
        restart = assumed.restart + assumed.restart_gpu * gpus / number
        job = SimulatedJob(
            step=step,
            saves=saves,
            restart=restart,
            replicas=number,
            least_replicas=least if number > 1 else 1,
            replica_restart=restart + rank_bytes * number / cluster.gpu.network,
            regroup=assumed.regroup,
            rejoin=assumed.rejoin,
            check=(config.training.consistency_check_interval or math.inf) * step,
            planned=to_disk + restart + to_disk,
            spares=spares,
            repair=assumed.repair,
        )
        if saves is memory:  # saves on disk are then rare
            job = replace(job, also=(replace(disk, interval=assumed.disk_interval),))
        set_interval = config.checkpoint.interval if saves is disk else config.checkpoint.memory_interval
        configured = expected_goodput(job, rates, detection) if set_interval else None
        steps = best_interval(job, rates, detection)
        best = replace(job, saves=replace(saves, interval=steps * step))
        seconds = _FAULTS / (unplanned + rates["planned"])
        drawn = random_faults(rates, seconds, 0, detection=assumed.detection, hangs=assumed.hangs, hang=hang)
        outcome = simulate(best, drawn, seconds)
        young, expected = young_interval(job, rates) / step, expected_goodput(best, rates, detection)
        results.append(
            Forecast(gpus, recovery, steps, step, young, expected, configured, outcome, spares, 1 / unplanned)
        )
    return results
