"""Random faults in a job of replicas, and the proof that nothing was lost by them.

    python -m tests.parallel.replicas.soak --faults 1000 --out soak.json

Faults, each of one replica or of two at once:

    kill_rank         SIGKILL of a rank
    stop_rank         SIGSTOP of a rank
    pause_rank        SIGSTOP of a rank, and SIGCONT once the others have gone on
    kill_node         SIGKILL of the agent and all ranks; the agent is started again after a while
    twice             kill_rank of two replicas at once
    during_save       SIGKILL of a rank of the replica that is writing a checkpoint
    during_rejoin     SIGKILL of a rank while another replica, which was killed before, comes back
    flip_weight       one bit of a weight of one rank, found by the comparison with other replicas
    kill_lighthouse   SIGKILL of the lighthouse, which is started again
    slow_rank         a rank becomes slow, so that its replica leaves by rule (`slow_steps`)

For each fault: the time from it until the others have done a step without the lost replica, whether their processes are
the same as before, the time until it takes part again, and the longest step of the others until then. At the end:
every step was done, its samples are those of the batch, each once, all replicas agree on its loss, and a twin without
replicas has the same losses, bit for bit.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.parallel.replicas.cluster import SLOW_SECONDS, SMALL, Cluster
from tests.parallel.replicas.twin import run_twin
from tests.quickstart_data import ROOT, QuickstartData

KINDS = {
    "kill_rank": 4,
    "stop_rank": 1,
    "pause_rank": 1,
    "kill_node": 2,
    "twice": 2,
    "during_save": 2,
    "during_rejoin": 2,
    "flip_weight": 1,
    "kill_lighthouse": 1,
    "slow_rank": 1,
}
"""Kinds of faults, and how often each happens."""
SAVE_INTERVAL = 25
PATIENCE = 180.0


class Soak:
    """Faults in a running `cluster`, and what was measured of each."""

    def __init__(self, cluster: Cluster, seed: int) -> None:
        self.cluster, self.random = cluster, random.Random(seed)
        self.results: list[dict[str, Any]] = []

    def inject(self, kind: str) -> None:
        """One fault, and the wait until all replicas take part again."""
        cluster, everybody = self.cluster, list(range(self.cluster.count))
        victims = self.random.sample(everybody, 2 if kind in ("twice", "during_rejoin") else 1)
        if kind == "during_save":
            victims = [self._writer()]
        if kind == "kill_lighthouse":
            victims = []
        others = [i for i in everybody if i not in victims]
        before = {i: cluster.pids(i) for i in everybody}
        seen = max(cluster.newest(i)["step"] for i in everybody)
        began = self._strike(kind, victims)
        lost = set(victims[1:] if kind == "during_rejoin" else victims)
        # The quorum of the next step, and of one more, may have been there before a lighthouse is lost.
        least = seen + (3 if kind == "kill_lighthouse" else 1)

        def counts(record: dict[str, Any]) -> bool:
            """Whether a step is one that was begun after the fault."""
            # A replica may be back before the others have done a step; its vote for the running one may have come.
            without = not lost & set(record["replicas"]) or record["step"] > least
            return record["time"] > began and record["step"] >= least and without

        outcome: dict[str, Any] = {"kind": kind, "victims": victims, "step": seen}
        cluster.wait(lambda: all(counts(cluster.newest(i)) for i in others), PATIENCE, kind)
        outcome["seconds"] = max(self._first(i, counts) for i in others) - began
        if kind == "pause_rank":
            for pid in before[victims[0]]:
                _signal(pid, signal.SIGCONT)
        back = time.time()
        if kind == "kill_node":
            cluster.start(victims[0])

        def rejoined() -> bool:
            return all(
                (x := cluster.newest(i))["time"] > back and x["pid"] in cluster.pids(i) and len(x["replicas"]) == count
                for i in everybody
            )

        count = cluster.count
        cluster.wait(rejoined, PATIENCE, f"{kind}: all replicas again")
        outcome["rejoined"] = time.time() - (back if kind == "kill_node" else began)
        outcome["same_processes"] = all(cluster.pids(i) == before[i] for i in others)
        outcome["stall"] = max(self._longest_step(i, began + outcome["seconds"]) for i in others)
        self.results.append(outcome)

    def _writer(self) -> int:
        """The replica that writes checkpoints, once it is doing so."""
        folder = self.cluster.folder / "quickstart" / "checkpoints"

        def saves() -> bool:
            return any(path.name.startswith(".") and path.is_dir() for path in folder.iterdir())

        self.cluster.wait(saves, PATIENCE, "a save")
        return self._lock_holder(folder)

    def _lock_holder(self, folder: Path) -> int:
        owner = json.loads((folder / ".lock").read_text())["pid"]
        return next(i for i in range(self.cluster.count) if owner in self.cluster.pids(i))

    def _strike(self, kind: str, victims: Sequence[int]) -> float:
        """Let the fault happen; returns when it did."""
        cluster = self.cluster
        dead = cluster.pids(victims[0]) if victims else []
        began = time.time()
        for victim in victims[:1] if kind == "during_rejoin" else victims:
            pids = cluster.pids(victim)
            pid = self.random.choice(pids)
            if kind == "kill_node":
                for process in (cluster.agents[victim], *pids):
                    _signal(process, signal.SIGKILL)
                os.waitpid(cluster.agents[victim], 0)
            elif kind in ("stop_rank", "pause_rank"):
                _signal(pid, signal.SIGSTOP)
            elif kind in ("flip_weight", "slow_rank"):
                _signal(pid, signal.SIGUSR1 if kind == "flip_weight" else signal.SIGRTMIN)
            else:
                _signal(pid, signal.SIGKILL)
        if kind == "during_rejoin":
            first, second = victims
            cluster.wait(lambda: cluster.pids(first) != dead, PATIENCE, "a restart")
            time.sleep(self.random.uniform(0.0, 3.0))
            began = time.time()
            _signal(self.random.choice(cluster.pids(second)), signal.SIGKILL)
        if kind == "kill_lighthouse":
            cluster.restart_lighthouse()
        if kind in ("flip_weight", "slow_rank"):  # found after the next comparison, or some steps
            cluster.wait(lambda: not set(dead) & set(cluster.pids(victims[0])), PATIENCE, f"{kind}: to be found")
            began = time.time()
        return began

    def _first(self, replica: int, counts: Callable[[dict[str, Any]], bool]) -> float:
        """When a replica had done its first step that `counts`."""
        return float(next(x["time"] for x in self.cluster.latest(replica, 400) if counts(x)))

    def _longest_step(self, replica: int, since: float) -> float:
        """Seconds of the longest step of a replica that began after a time: that of a rejoin is among them."""
        times = [x["time"] for x in self.cluster.latest(replica, 400) if x["time"] >= since]
        return max((b - a for a, b in itertools.pairwise(times)), default=0.0)


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def check(cluster: Cluster, samples: int, data_ranks: int, shrinks: bool) -> tuple[list[dict[str, Any]], int]:
    """What the run has done step by step, and how many steps were done again by others than those that did them first.

    AssertionError if a step is missing, replicas disagree on it, or its samples are not those of its batch, each once.
    `samples`: of a step of all replicas. `data_ranks`: ranks of a replica that read samples of their own. `shrinks`:
    the batch, with the number of members.
    """
    records = {(i, rank): cluster.steps(i, rank) for i in range(cluster.count) for rank in range(cluster.ranks)}
    by_step: dict[int, list[tuple[int, int, dict[str, Any]]]] = {}
    for (i, rank), steps in records.items():
        for record in steps:
            by_step.setdefault(record["step"], []).append((i, rank, record))
    last = max(by_step) - 1  # the stop may have come in the middle of the last one
    assert sorted(by_step)[:last] == list(range(1, last + 1)), "steps are missing"
    repeated, kept, start = 0, [], 0
    for step in range(1, last + 1):
        # Of two versions that of most replicas stays, as their lineages say; of as many, the later one.
        count = Counter(_version(x) for *_, x in by_step[step])
        newest = max((x for *_, x in by_step[step]), key=lambda x: (count[_version(x)], x["time"]))
        repeated += len(count) - 1
        size = samples // cluster.count * len(newest["replicas"]) if shrinks else samples
        written = {(i, rank): x["samples"] for i, rank, x in by_step[step] if _version(x) == _version(newest)}
        seen: list[int] = []
        for place, i in enumerate(newest["replicas"]):
            own = [written.get((i, rank)) for rank in range(data_ranks)]
            if None in own:  # it was lost after its vote, before it could write: its share is what others have not
                own = [_share_of(start, size, len(newest["replicas"]), place, data_ranks)]
            seen += [x for samples in own for x in samples or ()]
        assert sorted(seen) == list(range(start, start + size)), f"step {step}: samples {sorted(seen)}"
        start += size
        kept.append(newest)
    return kept, repeated


def _version(record: dict[str, Any]) -> tuple[str, str, tuple[int, ...]]:
    return record["loss"], record["norm"], tuple(record["replicas"])


def _share_of(start: int, size: int, members: int, place: int, data_ranks: int) -> list[int]:
    rounds = size // data_ranks
    bounds = (start + data_ranks * (rounds * x // members) for x in (place, place + 1))
    return list(range(*bounds))


def overrides(data: QuickstartData, layout: Sequence[str]) -> list[str]:
    """The config of a soak, without replicas."""
    return [
        *SMALL,
        *data.overrides,
        *layout,
        "training.steps=1000000",
        f"checkpoint.interval={SAVE_INTERVAL}",
        "checkpoint.keep_last=2",
        "fp8.recipe=delayed",
        "optimizer.learning_rate=1e-4",
        "optimizer.min_learning_rate=1e-4",
        "logging.layer_norms_interval=0",
        "timeout_seconds=60",
    ]


TP2 = ["parallel.tensor=2", "parallel.pipeline=1", "parallel.zero=0"]
FSDP2 = ["parallel.tensor=1", "parallel.pipeline=1", "parallel.fsdp=true"]


def run(
    folder: Path,
    data: QuickstartData,
    layout: Sequence[str],
    kinds: Sequence[str],
    seed: int,
    twin_steps: int,
    replicas: int = 4,
    delay: float = 0.0,
    batch: str = "keep",
    samples: int = 8,
) -> dict[str, Any]:
    """Faults of `kinds`, one after the other; returns what was measured, with counts of what must not be.

    `delay`: seconds that each step takes longer, for several of these beside each other. `batch`: that of
    `resilience.replicas`. `samples`: of a step, of one a micro-batch.
    """
    has_slow = "slow_rank" in kinds
    # A slow rank must be found by the rule, not be lost because it answers late.
    seconds = 2 * SLOW_SECONDS if has_slow else 2.0
    arguments = [*overrides(data, layout), f"training.global_batch_size={samples}"]
    arguments += [f"resilience.hang_seconds={4 * seconds:g}"]
    # Cores are shared: only where a rank is made slow on purpose may one be found to be.
    options = f"batch: {batch}, slow_ratio: 4, slow_steps: {3 if has_slow else 0}"
    cluster = Cluster(folder, arguments, replicas, 2, delay=delay, options=options, exchange_seconds=seconds)
    soak = Soak(cluster, seed)
    began = time.time()
    try:
        for i in range(replicas):
            cluster.start(i)
        cluster.wait(lambda: all(cluster.newest(i)["step"] >= 3 for i in range(replicas)), PATIENCE, "first steps")
        for number, kind in enumerate(kinds):
            soak.inject(kind)
            result = soak.results[-1]
            print(
                f"{number + 1:5} {kind:16} {result['seconds']:6.2f} {result['rejoined']:6.2f} "
                f"{'' if result['same_processes'] else 'OTHERS RESTARTED'}",
                flush=True,
            )
        cluster.stop()
    finally:
        cluster.kill()
    steps, repeated = check(cluster, samples, 2 if layout == FSDP2 else 1, batch == "shrink")
    members = [x["replicas"] for x in steps[:twin_steps]]
    shrink_from = replicas if batch == "shrink" else None
    config = ["--config", "quickstart", *arguments, f"run_dir={folder / 'twin'}"]
    twin = run_twin(folder, config, 2, members, shrink_from)
    different = [i + 1 for i, (a, b) in enumerate(zip(steps, twin)) if (a["loss"], a["norm"]) != (b["loss"], b["norm"])]
    return {
        "seconds": time.time() - began,
        "steps": len(steps),
        "done_twice": repeated,
        "twin_steps": len(twin),
        "twin_differs": different,
        "faults": soak.results,
    }


def table(faults: Sequence[dict[str, Any]]) -> str:
    """Figures by kind: number, seconds until the next step of the others and until all take part, others restarted."""
    lines = [
        f"{'kind':16} {'faults':>6} {'next step: median':>18} {'p99':>6} {'max':>6} {'all again':>10} "
        f"{'longest step':>13} {'restarted':>9}"
    ]
    for kind in dict.fromkeys(x["kind"] for x in faults):
        own = [x for x in faults if x["kind"] == kind]
        seconds = sorted(x["seconds"] for x in own)
        p99 = seconds[min(len(seconds) - 1, int(0.99 * len(seconds)))]
        back = statistics.median(x["rejoined"] for x in own)
        lines.append(
            f"{kind:16} {len(own):6} {statistics.median(seconds):18.2f} {p99:6.2f} {seconds[-1]:6.2f} {back:10.2f} "
            f"{statistics.median(x['stall'] for x in own):6.2f} {max(x['stall'] for x in own):6.2f} "
            f"{sum(not x['same_processes'] for x in own):9}"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--layout", choices=["tp2", "fsdp2"], default="tp2")
    parser.add_argument("--twin-steps", type=int, default=1000000)
    parser.add_argument("--kinds", nargs="*")
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--batch", choices=["keep", "shrink"], default="keep")
    parser.add_argument("--delay", type=float, default=0.0)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--folder", type=Path, help="a new folder for data, logs and checkpoints, which stays")
    options = parser.parse_args()
    rng = random.Random(options.seed)
    kinds = options.kinds or rng.choices(list(KINDS), list(KINDS.values()), k=options.faults)
    with contextlib.ExitStack() as stack:
        root = options.folder or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="megafp8-soak-")))
        for name in ("data", "run"):
            (root / name).mkdir(parents=True)
        # In a process of its own: this one forks, and must have started no threads.
        script = "import sys, pathlib, tests.quickstart_data as q; q.make_quickstart_data(pathlib.Path(sys.argv[1]))"
        subprocess.run([sys.executable, "-c", script, root / "data"], cwd=ROOT, check=True, capture_output=True)
        data, layout = QuickstartData(root / "data"), TP2 if options.layout == "tp2" else FSDP2
        more = (options.replicas, options.delay, options.batch)
        result = run(root / "run", data, layout, kinds, options.seed, options.twin_steps, *more)
    print(table(result["faults"]))
    print({key: value for key, value in result.items() if key != "faults"})
    if options.out:
        options.out.write_text(json.dumps(result))
    return int(bool(result["twin_differs"]))


if __name__ == "__main__":
    sys.exit(main())
