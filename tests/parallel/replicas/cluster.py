"""A job of several replicas on this machine, whose ranks are forked, so that a start takes no imports.

Each replica has an agent, a process that starts its ranks, ends them all when one has ended, and starts them anew, as
launch/agent.py does. Ranks write down what they have done, by hooks that are independent of the package's own records:
audit-<replica>-<rank>.jsonl has for each step that counted its time, process, loss, norm and samples.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tests.ports import free_port
from tools import lighthouse

TOKEN = "a token of tests, not of users"
SLOW_SECONDS = 6.0
"""Longest delay of a step on a rank that received SIGRTMIN. The delay grows by one second per step, because one second
alone is not slow compared with ranks whose steps take half a second on a busy machine."""
CHECK_INTERVAL = 5
"""Steps between comparisons of replicas."""
SMALL = [
    "model.num_layers=2",
    "model.hidden_size=32",
    "model.ffn_hidden_size=64",
    "training.seq_length=16",
    "training.micro_batch_size=1",
    "training.global_batch_size=8",
    "training.eval_interval=0",
    "optimizer.warmup_steps=1",
    "fp8.report_interval=0",
    "resilience.straggler_interval=0",
    f"training.consistency_check_interval={CHECK_INTERVAL}",
]


def fork(action: Callable[[], int], log: Path, end_with_parent: bool) -> int:
    """Run `action` in a child process, whose output goes to `log`; returns its number."""
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        if end_with_parent:
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)
            if os.getppid() != parent:
                os._exit(1)
        with log.open("ab") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
        sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        code = action()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def audit(folder: Path, replica: int, rank: int, delay: float = 0.0) -> None:
    """Let this process write down its steps. `delay`: seconds that each step takes longer."""
    from megafp8.training import job
    from megafp8.training.replicas.job import ReplicaJob
    from megafp8.training.replicas.trainer import ReplicaTrainer

    file = (folder / f"audit-{replica}-{rank}.jsonl").open("a", buffering=1)
    train_step, one_step = ReplicaTrainer.train_step, ReplicaJob._one_step
    samples: list[int] = []
    flips: list[int] = []
    slower: list[float] = []
    signal.signal(signal.SIGUSR1, lambda *_: flips.append(1))
    signal.signal(signal.SIGRTMIN, lambda *_: slower.append(1.0))

    def step_with_samples(self: ReplicaTrainer, step: int, batches: Sequence[Any], **options: Any) -> Any:
        samples[:] = [x for batch in batches for x in batch.samples.tolist()]
        if slower:
            slower.append(min(slower[-1] + 1.0, SLOW_SECONDS))
        time.sleep(sum(slower[-1:], delay))
        return train_step(self, step, batches, **options)

    def audited(self: ReplicaJob) -> Any:
        metrics = one_step(self)
        record = {
            "time": time.time(),
            "pid": os.getpid(),
            "step": metrics.step,
            "loss": float(metrics.loss).hex(),
            "norm": float(metrics.grad_norm).hex(),
            "replicas": metrics.replicas,
            "samples": samples,
        }
        file.write(json.dumps(record) + "\n")
        if flips and metrics.step % CHECK_INTERVAL == 0:  # so the comparison finds it before it spoils a gradient
            flips.clear()
            flip_bit(self.trainer)
        return metrics

    job.plot_loss = lambda *_: None  # each replica would import matplotlib, which takes longer than its steps
    ReplicaTrainer.train_step = step_with_samples  # type: ignore[method-assign]
    ReplicaJob._one_step = audited  # type: ignore[method-assign]


def flip_bit(trainer: Any) -> None:
    """Change one bit of a master weight, and of the weight that is made of it."""
    import torch

    shard = trainer.optimizer.shards[0]
    master = trainer.optimizer.master_of(shard)
    master.view(torch.int32)[3] ^= 1 << 20
    if shard.param not in trainer.optimizer.released:
        shard.view(shard.param.detach())[3] = master[3]


def run_lighthouse(address: str, min_replicas: int) -> int:
    """Serve a lighthouse in this process, by its command."""
    os.environ["MEGAFP8_LIGHTHOUSE_TOKEN"] = TOKEN
    sys.argv = ["lighthouse", "--bind", address, "--min", str(min_replicas)]
    sys.argv += ["--join-seconds", "5", "--heartbeat-seconds", "1"]
    return lighthouse.main()


class Cluster:
    """Replicas of `ranks` processes each, in `folder`. `overrides`: of the quickstart's config. `options`: more of
    `resilience.replicas`, as YAML."""

    def __init__(
        self,
        folder: Path,
        overrides: Sequence[str],
        count: int,
        ranks: int,
        *,
        min_replicas: int = 1,
        delay: float = 0.0,
        options: str = "",
        exchange_seconds: float = 2.0,
    ) -> None:
        os.environ.setdefault("RUST_LOG", "warn")
        # Before forks: what a rank would import.
        import torch._dynamo  # noqa: F401 - torch.optim imports it
        import torchft.coordination  # noqa: F401

        import megafp8.inference.live
        import megafp8.training.run  # noqa: F401
        from megafp8.training import command_line  # noqa: F401

        gc.collect()
        gc.freeze()  # ranks collect nothing that is shared
        self.folder, self.count, self.ranks, self._delay = folder, count, ranks, delay
        replicas = f"count: {count}, min: {min_replicas}, exchange_seconds: {exchange_seconds}, start_seconds: 60"
        replicas = f"resilience.replicas={{{replicas}{options and f', {options}'}}}"
        self.arguments = ["--config", "quickstart", *overrides, f"run_dir={folder}", replicas]
        self._min, self.address = min_replicas, f"127.0.0.1:{free_port()}"
        self.agents: dict[int, int] = {}
        self._start_lighthouse()

    def _start_lighthouse(self) -> None:
        serve, log = partial(run_lighthouse, self.address, self._min), self.folder / "lighthouse.log"
        self._lighthouse = fork(serve, log, True)

    def start(self, replica: int) -> None:
        """Start the agent of a replica."""
        self.agents[replica] = fork(lambda: self._run_agent(replica), self.folder / f"replica-{replica}.log", True)

    def _run_agent(self, replica: int) -> int:
        environment = {
            "MEGAFP8_LIGHTHOUSE": self.address,
            "MEGAFP8_LIGHTHOUSE_TOKEN": TOKEN,
            "MEGAFP8_REPLICA": str(replica),
            "WORLD_SIZE": str(self.ranks),
            "LOCAL_WORLD_SIZE": str(self.ranks),
            "MASTER_ADDR": "127.0.0.1",
            "OMP_NUM_THREADS": "1",
        }
        os.environ.update(environment)
        log = self.folder / f"replica-{replica}.log"
        stopping = False

        def stop(number: int, frame: object) -> None:
            nonlocal stopping
            stopping = True
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)

        signal.signal(signal.SIGTERM, stop)
        while True:
            os.environ["MASTER_PORT"] = str(free_port())
            pids = [fork(lambda rank=rank: self._run_rank(replica, rank), log, True) for rank in range(self.ranks)]
            text = json.dumps(pids)
            file = self.folder / f"pids-{replica}.json"
            file.with_suffix(".new").write_text(text)
            file.with_suffix(".new").rename(file)
            codes = []
            left = set(pids)
            while left:
                pid, status = os.wait()
                left.discard(pid)
                codes.append(os.waitstatus_to_exitcode(status))
                if codes[-1]:
                    for other in left:
                        with contextlib.suppress(ProcessLookupError):
                            os.kill(other, signal.SIGKILL)
            if stopping or not any(codes):
                return max(map(abs, codes))
            if 2 in codes:
                return 2

    def _run_rank(self, replica: int, rank: int) -> int:
        import torch

        from megafp8.training import command_line
        from tools.pretrain import live_uses

        torch.set_num_threads(1)  # OMP_NUM_THREADS is read when torch is imported
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        sys.argv = ["pretrain", *self.arguments]
        audit(self.folder, replica, rank, self._delay)
        return command_line.main(None, live_uses)

    def pids(self, replica: int) -> list[int]:
        """The processes of a replica's ranks; empty before they have been started."""
        try:
            return list(json.loads((self.folder / f"pids-{replica}.json").read_text()))
        except FileNotFoundError:
            return []

    def steps(self, replica: int, rank: int = 0) -> list[dict[str, Any]]:
        """What a rank has written down."""
        path = self.folder / f"audit-{replica}-{rank}.jsonl"
        if not path.exists():
            return []
        return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]

    def latest(self, replica: int, count: int) -> list[dict[str, Any]]:
        """The latest steps of a replica, up to `count` of them."""
        path = self.folder / f"audit-{replica}-0.jsonl"
        if not path.exists():
            return []
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 256 * count))
            lines = [x for x in file.read().split(b"\n") if x.endswith(b"}") and x.startswith(b"{")]
        return [json.loads(x) for x in lines]

    def restart_lighthouse(self) -> None:
        """Kill the lighthouse, and start it again at its address."""
        self._kill_lighthouse()
        self._start_lighthouse()

    def _kill_lighthouse(self) -> None:
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(self._lighthouse, signal.SIGKILL)
            os.waitpid(self._lighthouse, 0)

    def newest(self, replica: int) -> dict[str, Any]:
        """The latest step of a replica; its number is 0 without one."""
        path = self.folder / f"audit-{replica}-0.jsonl"
        if not path.exists():
            return {"step": 0, "time": 0.0, "pid": 0}
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 4096))
            lines = [line for line in file.read().split(b"\n") if line.endswith(b"}") and line.startswith(b"{")]
        return dict(json.loads(lines[-1])) if lines else {"step": 0, "time": 0.0, "pid": 0}

    def wait(self, condition: Callable[[], bool], seconds: float, what: str) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                logs = "\n".join(  # of each replica
                    f"--- replica {i}\n" + (self.folder / f"replica-{i}.log").read_text()[-6000:]
                    for i in range(self.count)
                    if (self.folder / f"replica-{i}.log").exists()
                )
                raise AssertionError(f"{what}: not within {seconds:g} s\n{logs}")
            time.sleep(0.02)

    def stop(self, seconds: float = 60.0) -> None:
        """Ask all replicas to stop, and wait for them."""
        for agent in self.agents.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(agent, signal.SIGTERM)
        deadline = time.monotonic() + seconds
        for agent in self.agents.values():
            while time.monotonic() < deadline:
                with contextlib.suppress(ChildProcessError):
                    if os.waitpid(agent, os.WNOHANG)[0] == 0:
                        time.sleep(0.05)
                        continue
                break
        self.kill()

    def kill(self) -> None:
        for replica, agent in self.agents.items():
            for pid in (agent, *self.pids(replica)):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(agent, 0)
        self.agents.clear()
        self._kill_lighthouse()
