"""Checks of a cluster before a run: each rank reports facts about its machine, and rank 0 judges the differences."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import socket
import statistics
import subprocess
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megafp8.config import Config, check_layout, load_config
from megafp8.parallel.collectives import (
    all_gather,
    all_gather_objects,
    all_reduce,
    barrier,
    broadcast_object,
    gather_objects,
    recv_async,
    send_async,
    send_recv_async,
)
from megafp8.parallel.parallel_state import initialize_distributed
from megafp8.training import machine
from megafp8.training.errors import NO_RESTART, TrainingError
from megafp8.training.machine import Finding, Status, judge_gpu, report
from megafp8.training.machine import judge_limits as machine_limits
from megafp8.training.validate import run_folder, validate

CLOCK_WARN, CLOCK_FAIL = 0.5, 5.0
"""Seconds between the clocks of two nodes. The rendezvous compares heartbeats of 5 s with the nodes' own clocks."""
SEEN_WARN, SEEN_FAIL = 1.0, 30.0
"""Seconds until all ranks see a file that one rank has written."""
GPU_MEMORY = 0.97
"""Minimum free fraction of a GPU's memory. If less is free, another process uses the GPU."""
_VARIABLES = re.compile(
    r"(NCCL|TORCH_NCCL|UCX|GLOO)_\w*|PYTORCH\w*ALLOC_CONF|CUDA_DEVICE_MAX_CONNECTIONS|OMP_NUM_THREADS"
)
"""Environment variables that should be equal on all ranks."""


class ClusterFault(TrainingError):
    """A check of the cluster has failed."""

    exit_code: ClassVar[int] = NO_RESTART


@dataclass(frozen=True)
class Facts:
    """Facts that a rank reports about itself and its machine.

    Attributes:
        rank: Global rank.
        local_rank: Rank on its node.
        node: Number of the node.
        host: Host name, with the number of the node if several nodes have this name.
        versions: Versions that must be equal on all ranks.
        environment: Environment variables of NCCL, torch and OpenMP.
        gpu: Answer of nvidia-smi (`machine.GPU_FIELDS`); empty on CPU.
        gpu_error: Reason why nvidia-smi did not answer, or empty.
        free_memory: Free fraction of the GPU's memory.
        xid: Last GPU error (Xid) in the kernel's log, or empty.
        limits: Limits of the process (`machine.limits`).
        ports: State and rate of each InfiniBand or RoCE port.
        config_error: Reason why the rank cannot train the given config, or empty.
    """

    rank: int
    local_rank: int
    node: int
    host: str
    versions: Mapping[str, str]
    environment: Mapping[str, str]
    gpu: Mapping[str, str] = field(default_factory=dict)
    gpu_error: str = ""
    free_memory: float = 1.0
    xid: str = ""
    limits: Mapping[str, int] = field(default_factory=dict)
    ports: Mapping[str, str] = field(default_factory=dict)
    config_error: str = ""

    @property
    def name(self) -> str:
        """Rank and host as text."""
        return f"rank {self.rank} on {self.host}"


class Probe:
    """Queries to the machine of a rank. Tests replace single answers."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def versions(self) -> dict[str, str]:
        """Return the versions of software and GPU (`machine.versions`)."""
        return machine.versions(self.device)

    def gpu(self) -> dict[str, str]:
        """Return the answer of nvidia-smi for this rank's GPU (`machine.ask_gpu`)."""
        return machine.ask_gpu(self.device)

    def xid(self) -> str:
        """Return the last GPU error (Xid) in the kernel's log; empty if there is none or the log cannot be read."""
        if self.device.type != "cuda" or shutil.which("dmesg") is None:
            return ""
        done = subprocess.run(["dmesg", "--ctime"], capture_output=True, text=True, timeout=60)
        return next((line for line in reversed(done.stdout.splitlines()) if "NVRM: Xid" in line), "")

    def free_memory(self) -> float:
        """Return the free fraction of this rank's GPU memory."""
        if self.device.type != "cuda":
            return 1.0
        free, total = torch.cuda.mem_get_info(self.device)
        return free / total

    def limits(self) -> dict[str, int]:
        """Return the limits of this process (`machine.limits`)."""
        return machine.limits()

    def ports(self) -> dict[str, str]:
        """Return state and rate of each InfiniBand or RoCE port, such as `4: ACTIVE, 400 Gb/sec (4X NDR)`."""
        ports = sorted(Path("/sys/class/infiniband").glob("*/ports/*"))
        return {
            f"{port.parent.parent.name}:{port.name}": ", ".join(
                (port / name).read_text().strip() for name in ("state", "rate")
            )
            for port in ports
        }

    def now(self) -> float:
        """Return this machine's time in seconds since the epoch."""
        return time.time()

    def folder(self, path: Path) -> Path:
        """Return the path of the shared folder `path` on this machine."""
        return path

    def matmul_rate(self) -> float:
        """Return the FLOP/s of square GEMMs: bf16 for about 2 s on CUDA, fp32 on CPU."""
        x, repeats = self._matrix()
        return 2 * len(x) ** 3 / seconds_of(lambda: x @ x, repeats, self.device)

    def gpu_under_load(self) -> dict[str, str]:
        """Return the answer of `gpu` while GEMMs run, because slowdowns show only under load."""
        if self.device.type != "cuda":
            return {}
        x, repeats = self._matrix()
        for _ in range(repeats):
            x @ x
        gpu = self.gpu()
        torch.cuda.synchronize(self.device)
        return gpu

    def _matrix(self) -> tuple[Tensor, int]:
        """Return a square matrix, and the number of times to multiply it."""
        cuda = self.device.type == "cuda"
        n, dtype, repeats = (8192, torch.bfloat16, 1200) if cuda else (512, torch.float32, 4)
        return torch.randn(n, n, dtype=dtype, device=self.device), repeats


def seconds_of(call: Callable[[], object], repeats: int, device: torch.device) -> float:
    """Return the mean seconds of `call` over `repeats` calls, after one warm-up call."""
    call()
    _synchronize(device)
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    _synchronize(device)
    return (time.perf_counter() - start) / repeats


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# --- judging on rank 0: pure functions of the ranks' answers ----------------------------------------------------------


def ranges(numbers: Sequence[int]) -> str:
    """Return sorted numbers as text, such as `0-3, 8`."""
    starts = [n for n in numbers if n - 1 not in numbers]
    ends = [n for n in numbers if n + 1 not in numbers]
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends))


def where(facts: Sequence[Facts]) -> str:
    """Return the ranks and their hosts as text."""
    hosts = list(dict.fromkeys(fact.host for fact in facts))
    shown = ", ".join(hosts[:8]) + (f" and {len(hosts) - 8} more" if hosts[8:] else "")
    numbers = [fact.rank for fact in facts]
    return f"rank{'s' if numbers[1:] else ''} {ranges(numbers)} on {shown}"


def _by_value(facts: Sequence[Facts], values: Iterable[Hashable]) -> list[tuple[Any, list[Facts]]]:
    """Return the distinct values, each with the facts of its ranks, the most frequent value first.

    `values` holds one value for each of `facts`.
    """
    groups: dict[Hashable, list[Facts]] = defaultdict(list)
    for fact, value in zip(facts, values, strict=True):
        groups[value].append(fact)
    return sorted(groups.items(), key=lambda item: -len(item[1]))


def judge_equal(facts: Sequence[Facts]) -> list[Finding]:
    """Check that versions and environment variables are equal on all ranks.

    Different versions fail. Different variables that NCCL, torch or OpenMP read are a warning.
    """
    findings = []
    usual: list[str] = []
    for name in dict.fromkeys(name for fact in facts for name in fact.versions):
        (common, _), *others = _by_value(facts, [fact.versions.get(name) for fact in facts])
        usual.append(f"{name} {common}")
        findings += [
            Finding("versions", "fail", f"{name} is {value} on {where(some)}, {common} elsewhere")
            for value, some in others
        ]
    findings = findings or [Finding("versions", "pass", ", ".join(usual))]
    variables = sorted({name for fact in facts for name in fact.environment})
    differing = []
    for name in variables:
        (common, _), *others = _by_value(facts, [fact.environment.get(name, "(unset)") for fact in facts])
        differing += [
            Finding("environment", "warn", f"{name}={value} on {where(some)}, {common} elsewhere")
            for value, some in others
        ]
    return findings + (differing or [Finding("environment", "pass", f"{len(variables)} variables, equal on all ranks")])


def judge_gpus(facts: Sequence[Facts]) -> list[Finding]:
    """Check each GPU for ECC errors, row remapping, slowdowns and memory in use, and each node for Xid errors."""
    findings: list[Finding] = []
    for fact in facts:
        gpu, name = fact.gpu, f"GPU {fact.local_rank} of {fact.host}"
        findings += judge_gpu(gpu, name)
        if fact.free_memory < GPU_MEMORY:
            used = f"{1 - fact.free_memory:.0%} of its memory is in use by another process"
            findings.append(Finding("GPUs", "fail", f"{name}: {used}"))
        if fact.gpu_error:
            findings.append(Finding("GPUs", "warn", f"{name} was not checked: {fact.gpu_error}"))
        if fact.xid and fact.local_rank == 0:
            findings.append(Finding("GPUs", "warn", f"{fact.host}: in the kernel's log: {fact.xid}"))
    count = sum(bool(fact.gpu) for fact in facts)
    return findings or [Finding("GPUs", "pass", f"{count} GPUs without errors" if count else "none, CPUs are checked")]


def judge_limits(facts: Sequence[Facts]) -> list[Finding]:
    """Check the limits of processes and shared memory, and the ports of the network."""
    findings: list[Finding] = []
    answers = [(*fact.limits.items(), bool(fact.ports)) for fact in facts]
    for (*values, rdma), some in _by_value(facts, answers):
        findings += machine_limits(dict(values), where(some), rdma=rdma)
    findings = findings or [Finding("limits", "pass", "open files, locked memory, shared memory")]
    first = [fact for fact in facts if fact.local_rank == 0]
    (usual, _), *others = _by_value(first, [tuple(sorted(fact.ports.items())) for fact in first])
    network = [
        Finding("ports", "warn", f"{where(some)} has {dict(value)}, elsewhere {dict(usual)}") for value, some in others
    ]
    network += [
        Finding("ports", "warn", f"{port} of {fact.host} is {state}")
        for fact in first
        for port, state in fact.ports.items()
        if "ACTIVE" not in state
    ]
    return findings + (network or [Finding("ports", "pass", f"InfiniBand and RoCE: {len(usual)} a node")])


def judge_config(facts: Sequence[Facts], given: bool) -> list[Finding]:
    """Check that all ranks can read the config's data and write its checkpoints."""
    findings = [
        Finding("config", "fail", f"{where(some)}: {error}")
        for error, some in _by_value(facts, [fact.config_error for fact in facts])
        if error
    ]
    return findings or [Finding("config", "pass", "data can be read, checkpoints written" if given else "none given")]


def judge_clocks(offsets: Mapping[str, tuple[float, float]]) -> list[Finding]:
    """Check the clocks of the nodes.

    `offsets` holds for each node except the first the seconds by which its clock is ahead of the first node's clock,
    and the error of this number.
    """
    findings = []
    for name, (offset, error) in offsets.items():
        apart = abs(offset) - error
        status: Status = "fail" if apart > CLOCK_FAIL else "warn" if apart > CLOCK_WARN else "pass"
        if status != "pass":
            text = f"{name} is {abs(offset):.3f} s {'ahead of' if offset > 0 else 'behind'} the first node"
            findings.append(Finding("clocks", status, text))
    worst = max((abs(offset) for offset, _ in offsets.values()), default=0.0)
    text = f"{len(offsets) + 1} nodes, at most {worst * 1e3:.1f} ms apart" if offsets else "one node"
    return findings or [Finding("clocks", "pass", text)]


def judge_file(latencies: Mapping[str, float | None], folder: Path) -> list[Finding]:
    """Check that `folder` is shared by all ranks, and how fast.

    `latencies` holds for each rank the seconds until it saw a file that rank 0 wrote, or None if it never saw the file.
    """
    missing = [name for name, latency in latencies.items() if latency is None]
    if missing:
        text = f"{folder} is not shared: {', '.join(missing[:8])}{' and others' if missing[8:] else ''}"
        return [Finding("file system", "fail", f"{text} did not see a file of rank 0 within {SEEN_FAIL:.0f} s")]
    name, slowest = max(latencies.items(), key=lambda item: item[1] or 0.0)
    status: Status = "warn" if (slowest or 0.0) > SEEN_WARN else "pass"
    text = f"{folder}: all saw a file of rank 0, the last after {slowest:.3f} s ({name})"
    return [Finding("file system", status, text)]


def judge_rates(check: str, rates: Mapping[str, float], unit: str, scale: float, options: Thresholds) -> list[Finding]:
    """Compare the rates of parts that should be equal with their median.

    Args:
        check: Name of the check.
        rates: Rate of each part by name.
        unit: Unit in which rates are shown.
        scale: Divisor that converts a rate to this unit.
        options: Thresholds for warnings and failures.
    """
    if not rates:
        return []
    median = statistics.median(rates.values())
    slowest = min(rates, key=lambda name: rates[name])
    findings = []
    for name, rate in sorted(rates.items(), key=lambda item: item[1]):
        if rate < options.warn_below * median:
            status: Status = "fail" if rate < options.fail_below * median else "warn"
            text = f"{name}: {rate / scale:.4g} {unit}, {rate / median:.0%} of the median, {median / scale:.4g}"
            findings.append(Finding(check, status, text))
    text = f"median {median / scale:.4g} {unit}, slowest {rates[slowest] / scale:.4g} ({slowest})"
    return findings or [Finding(check, "pass", text)]


# --- measuring together -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Thresholds:
    """Fractions of the median rate below which a part is reported."""

    warn_below: float
    fail_below: float


def link_rounds(count: int) -> list[list[tuple[int, int]]]:
    """Return the pairs of neighbors in a ring of `count` members, in rounds in which pairs are disjoint."""
    if count < 2:
        return []
    if count == 2:
        return [[(0, 1)]]
    edges = [(i, (i + 1) % count) for i in range(count)]
    rounds = [edges[0 : count - 1 : 2], edges[1:count:2]]
    return rounds if count % 2 == 0 else [*rounds[:1], edges[1 : count - 1 : 2], edges[count - 1 :]]


def _clock_offsets(
    probe: Probe, leaders: Sequence[Facts], rank: int, group: ProcessGroup
) -> dict[str, tuple[float, float]]:
    """Return for each node the seconds by which its clock is ahead of rank 0's clock, and the error of this number.

    The error is half of the shortest round trip. Only rank 0 gets meaningful values. Collective.
    """
    offsets = {}
    x = torch.zeros(1, dtype=torch.float64)
    for leader in leaders[1:]:
        best = (0.0, float("inf"))
        for _ in range(8):
            if rank == 0:
                before = probe.now()
                send_async(x, group, leader.rank).wait()
                recv_async(x, group, leader.rank).wait()
                after = probe.now()
                best = min(best, (x.item() - (before + after) / 2, (after - before) / 2), key=lambda pair: pair[1])
            elif rank == leader.rank:
                recv_async(x, group, 0).wait()
                x[0] = probe.now()
                send_async(x, group, 0).wait()
        offsets[leader.host] = best
    return offsets


def _file_latency(path: Path, content: str) -> float | None:
    """Return the seconds until `path` has `content`, or None if it does not have it after `SEEN_FAIL` seconds."""
    start = time.monotonic()
    while time.monotonic() - start < SEEN_FAIL:
        try:
            if path.read_text() == content:
                return time.monotonic() - start
        except OSError:
            pass
        time.sleep(0.01)
    return None


def _check_file(
    probe: Probe, facts: Sequence[Facts], rank: int, folder: Path, makes: bool, group: ProcessGroup
) -> list[Finding]:
    """Check how fast all ranks see a file that rank 0 writes to `folder`. Collective; rank 0 returns the findings.

    If `makes` is True, rank 0 creates the folder if it does not exist.
    """
    token = broadcast_object(uuid.uuid4().hex, group)
    path = probe.folder(folder) / f".check-cluster-{token}"
    error = ""
    if rank == 0:
        try:
            if makes:
                path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("w") as file:
                file.write(token)
                file.flush()
                os.fsync(file.fileno())
        except OSError as problem:
            error = f"rank 0 cannot write to {folder}: {problem.strerror}"
    error = broadcast_object(error, group)
    if error:
        return [Finding("file system", "fail", error)]
    seen = gather_objects(_file_latency(path, token), group)
    if rank != 0 or seen is None:
        return []
    path.unlink()
    return judge_file({fact.name: latency for fact, latency in zip(facts, seen, strict=True)}, folder)


def _bandwidths(group: ProcessGroup, size: int, device: torch.device) -> dict[str, float]:
    """Return the bus bandwidth of a group's all-reduce and all-gather of `size` bytes, in bytes/s as in nccl-tests."""
    ranks = group.size()
    x = torch.zeros(size // 2, dtype=torch.bfloat16, device=device)
    part = x[: x.numel() // ranks]
    ring = (ranks - 1) / ranks
    return {
        "all-reduce": size * 2 * ring / seconds_of(lambda: all_reduce(x, group), 5, device),
        "all-gather": size * ring / seconds_of(lambda: all_gather(part, group), 5, device),
    }


def _group_bandwidths(
    facts: Sequence[Facts], members: Sequence[Sequence[Facts]], rank: int, size: int, device: torch.device
) -> list[tuple[Sequence[Facts], dict[str, float]]]:
    """Return the bandwidths of each group of `members`, measured in all groups at the same time. Collective.

    The bandwidth of a group is the bandwidth of its slowest rank. Only rank 0 gets results.
    """
    mine = next(([fact.rank for fact in group] for group in members if rank in [fact.rank for fact in group]), [rank])
    world = dist.group.WORLD
    assert world is not None
    group = world if len(mine) == len(facts) else None
    if 1 < len(mine) < len(facts):
        # Only the members call this, as in parallel_state. torch names such a group by its members, and cannot create
        # it a second time.
        group = dist.new_group(mine, use_local_synchronization=True)
    barrier(world)
    bandwidths = {} if group is None or len(mine) == 1 else _bandwidths(group, size, device)
    every = gather_objects(bandwidths, world) or []
    at = {fact.rank: i for i, fact in enumerate(facts)}
    return [
        (some, {name: min(every[at[fact.rank]][name] for fact in some) for name in every[at[some[0].rank]]})
        for some in members
        if every and len(some) > 1
    ]


def _exchange(sent: Tensor, received: Tensor, peer: int, group: ProcessGroup) -> None:
    send_recv_async([sent], peer, [received], peer, group).wait()


def _link_bandwidths(rings: Sequence[Sequence[Facts]], rank: int, size: int, device: torch.device) -> dict[str, float]:
    """Return the bandwidth between neighbors of each ring, per direction, with both directions in use. Collective.

    Only rank 0 gets results.
    """
    world = dist.group.WORLD
    assert world is not None
    sent = torch.zeros(size, dtype=torch.uint8, device=device)
    received = torch.empty_like(sent)
    all_reduce(torch.zeros(1, device=device), world)  # connects all ranks, which the pairs below cannot do alone
    measured: dict[tuple[int, int], float] = {}
    for number in range(max((len(link_rounds(len(ring))) for ring in rings), default=0)):
        pairs = [
            (ring[a].rank, ring[b].rank)
            for ring in rings
            if len(rounds := link_rounds(len(ring))) > number
            for a, b in rounds[number]
        ]
        barrier(world)
        for pair in pairs:
            if rank in pair:
                peer = pair[1] if rank == pair[0] else pair[0]
                measured[pair] = size / seconds_of(partial(_exchange, sent, received, peer, world), 5, device)
    name = {fact.rank: fact.name for ring in rings for fact in ring}
    every = gather_objects(measured, world) or []
    rates: dict[tuple[int, int], float] = {}
    for bandwidths in every:
        for pair, rate in bandwidths.items():
            rates[pair] = min(rate, rates.get(pair, rate))
    return {f"{name[a]} and {name[b]}": rate for (a, b), rate in sorted(rates.items())}


def _check_bandwidth(
    facts: Sequence[Facts], rank: int, size: int, device: torch.device, options: Thresholds
) -> list[Finding]:
    nodes = [some for _, some in sorted(_by_value(facts, [fact.node for fact in facts]), key=lambda item: item[0])]
    across = [some for _, some in _by_value(facts, [fact.local_rank for fact in facts])] if len(nodes) > 1 else []
    findings = []
    for kind, members in (("within nodes", nodes), ("across nodes", across)):
        measured = _group_bandwidths(facts, members, rank, size, device)
        for name in ("all-reduce", "all-gather"):
            rates = {where(some): bandwidths[name] for some, bandwidths in measured}
            findings += judge_rates(f"{name} {kind}", rates, "GB/s", 1e9, options)
    if len(nodes) > 1:
        for name, rate in next(iter(_group_bandwidths(facts, [facts], rank, size, device)), ((), {}))[1].items():
            findings.append(Finding(f"{name} of all", "pass", f"{rate / 1e9:.4g} GB/s"))
    for kind, rings in (("within nodes", nodes), ("across nodes", across)):
        findings += judge_rates(f"links {kind}", _link_bandwidths(rings, rank, size, device), "GB/s", 1e9, options)
    return findings


# --- the check --------------------------------------------------------------------------------------------------------


def _config_error(config: Config, world_size: int, source: str) -> str:
    """Return the reason why this rank could not train `config`, or an empty text if it could."""
    try:
        check_layout(config, world_size, source)
        validate(config, world_size, source)
    except (ValueError, OSError) as error:
        return str(error)
    return ""


def gather_facts(probe: Probe, rank: int, config_error: str) -> list[Facts]:
    """Return the facts of all ranks, in the order of ranks. Collective."""
    gpu, gpu_error = _answer(probe.gpu)
    versions = probe.versions() | ({"driver": gpu["driver"]} if gpu else {})
    own_facts = Facts(
        rank=rank,
        local_rank=int(os.environ.get("LOCAL_RANK", "0")),
        node=int(os.environ.get("GROUP_RANK", "0")),
        host=socket.gethostname(),
        versions=versions,
        environment={name: value for name, value in os.environ.items() if _VARIABLES.fullmatch(name)},
        gpu=gpu,
        gpu_error=gpu_error,
        free_memory=probe.free_memory(),
        xid=probe.xid(),
        limits=probe.limits(),
        ports=probe.ports(),
        config_error=config_error,
    )
    facts = all_gather_objects(own_facts, dist.group.WORLD)
    nodes = Counter(fact.host for fact in facts if fact.local_rank == 0)
    return [_named(fact, nodes[fact.host] > 1) for fact in facts]


def _named(fact: Facts, ambiguous: bool) -> Facts:
    """Return `fact`, with the number of the node in its host name if the name is `ambiguous`."""
    return replace(fact, host=f"{fact.host} (node {fact.node})") if ambiguous else fact


def check(probe: Probe, arguments: argparse.Namespace) -> list[Finding]:
    """Run all checks. Collective; rank 0 returns the findings, other ranks an empty list."""
    world = dist.group.WORLD
    assert world is not None
    rank, config, error = dist.get_rank(), None, ""
    if arguments.config:
        try:
            config = load_config(arguments.config, arguments.overrides)
            error = _config_error(config, dist.get_world_size(), arguments.config)
        except (ValueError, OSError) as problem:
            error = str(problem)
    options = Thresholds(arguments.warn_below, arguments.fail_below)
    facts = gather_facts(probe, rank, error)
    rates = gather_objects((probe.matmul_rate(), _answer(probe.gpu_under_load)[0]), world)
    findings: list[Finding] = []
    if rates is not None and rank == 0:
        loaded = [replace(fact, gpu=gpu or fact.gpu) for fact, (_, gpu) in zip(facts, rates, strict=True)]
        findings += judge_equal(facts) + judge_gpus(loaded) + judge_limits(facts)
        findings += judge_config(facts, arguments.config is not None)
        speed = {fact.name: rate for fact, (rate, _) in zip(facts, rates, strict=True)}
        findings += judge_rates("GEMMs", speed, "TFLOP/s", 1e12, options)
    offsets = _clock_offsets(probe, [fact for fact in facts if fact.local_rank == 0], rank, world)
    findings += judge_clocks(offsets) if rank == 0 else []
    folder = broadcast_object(arguments.folder or (config and run_folder(config)), world)
    if folder is not None:
        findings += _check_file(probe, facts, rank, Path(folder), arguments.folder is None, world)
    size = int(arguments.mebibytes * 2**20)
    findings += _check_bandwidth(facts, rank, size, probe.device, options)
    return findings if rank == 0 else []


def _answer(ask: Callable[[], dict[str, str]]) -> tuple[dict[str, str], str]:
    """Return the answer of nvidia-smi and an empty text, or no answer and the reason."""
    try:
        return ask(), ""
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        return {}, str(error)


def proof_command(arguments: argparse.Namespace, device: str) -> str:
    """Return the command that proves the config on a node's devices. It takes a minute or two (docs/prove.md)."""
    return shlex.join(["megafp8", "prove", arguments.config, *arguments.overrides, "--device", device])


def run(arguments: argparse.Namespace, make_probe: Callable[[torch.device], Probe] = Probe) -> None:
    """Check the cluster and print a table on rank 0. Raises ClusterFault on all ranks if a check fails."""
    kind = arguments.device
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    arguments.mebibytes = arguments.mebibytes or (256 if kind == "cuda" else 4)
    device = initialize_distributed(kind, arguments.timeout)
    findings = check(make_probe(device), arguments)
    if findings:
        print(report(findings), flush=True)
        if arguments.config and not any(finding.status == "fail" for finding in findings):
            print(f"next, on one node: {proof_command(arguments, kind)}", flush=True)
    failed = broadcast_object([finding.text for finding in findings if finding.status == "fail"], dist.group.WORLD)
    if failed:
        count = "1 check has" if len(failed) == 1 else f"{len(failed)} checks have"
        raise ClusterFault("\n  ".join([f"{count} failed:", *failed]))
