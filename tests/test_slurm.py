"""launch/slurm.sbatch under Slurm's own daemons on this machine: real jobs, killed, out of time, and queued again."""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megafp8.training.metrics import read_metrics
from tests.ports import free_port
from tests.quickstart_data import CONFIG, ROOT, QuickstartData
from tests.test_agent import FOREVER, ONE_RANK, Launch, descendants

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(shutil.which("slurmctld") is None or shutil.which("slurmd") is None, reason="needs Slurm"),
]

# Two nodes, both this machine, under two names that it has. Credentials that end soon (5 s is the least): Slurm waits
# that long before it starts a job again. Empty files as GPUs, so that the script's own request for them is met.
CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port0}
AuthType=auth/none
CredType=cred/none
AuthInfo=cred_expire=5
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
SlurmdParameters=config_overrides
SlurmdTimeout=30
ReturnToService=2
NodeName={host} NodeHostname={host} NodeAddr=127.0.0.1 Port={port1} CPUs=2 Gres=gpu:8 State=UNKNOWN
NodeName=localhost NodeHostname={host} NodeAddr=127.0.0.1 Port={port2} CPUs=2 Gres=gpu:8 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class Slurm:
    """slurmctld and one slurmd a node, with all their files in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.host = folder, socket.gethostname()
        self.environment = os.environ | {"SLURM_CONF": str(folder / "slurm.conf")}
        ports = {f"port{i}": free_port() for i in range(3)}
        text = CONFIGURATION.format(folder=folder, host=self.host, user=getpass.getuser(), **ports)
        (folder / "slurm.conf").write_text(text)
        (folder / "gres.conf").write_text(f"AutoDetect=off\nName=gpu File={folder}/gpu[0-7]\n")
        for i in range(8):
            (folder / f"gpu{i}").touch()
        (folder / "state").mkdir()
        self.checkout = folder / "checkout"  # from which jobs are submitted, and where they write
        self.checkout.mkdir()
        for path in ROOT.glob("[!.]*"):
            (self.checkout / path.name).symlink_to(path)
        self.daemons: dict[str, subprocess.Popen[bytes]] = {}
        self.start("slurmctld", "slurmctld", "-D")
        for node in (self.host, "localhost"):
            self.start_node(node)

    def start(self, name: str, *command: str) -> None:
        with (self.folder / f"{name}.out").open("ab") as out:
            self.daemons[name] = subprocess.Popen(
                command, env=self.environment, stdout=out, stderr=out, start_new_session=True
            )

    def start_node(self, node: str) -> None:
        self.start(node, "slurmd", "-D", "-N", node)

    def run(self, *command: str, **environment: str) -> str:
        done = subprocess.run(
            command, env=self.environment | environment, cwd=self.checkout, capture_output=True, text=True
        )
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout.strip()

    def job(self, number: str, field: str) -> str:
        """A field of `scontrol show job`."""
        words = self.run("scontrol", "show", "job", number, "--oneliner").split()
        return dict(word.split("=", 1) for word in words if "=" in word)[field]

    def processes(self, variable: str, word: bytes = b"") -> list[int]:
        """This cluster's processes with an environment variable, given as NAME=value, and `word` in their command."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                variables = (folder / "environ").read_bytes().split(b"\0")
                own = {f"SLURM_CONF={self.environment['SLURM_CONF']}".encode(), variable.encode()}
                if own <= set(variables) and word in (folder / "cmdline").read_bytes():
                    found.append(int(folder.name))
        return found

    def steps(self) -> list[int]:
        """slurmstepd of all job steps, which outlives slurmd."""
        conf = f"SLURM_CONF={self.environment['SLURM_CONF']}"
        return self.processes(conf, b"slurmstepd")

    def kill(self, pids: list[int]) -> None:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def stop(self) -> None:
        for daemon in self.daemons.values():
            daemon.kill()
            daemon.wait()
        self.kill([*self.steps(), *self.processes("SLURM_CLUSTER_NAME=test")])


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[Slurm]:
    cluster = Slurm(tmp_path)
    try:
        deadline = time.monotonic() + 60
        while "idle" not in (states := nodes_of(cluster)) or states.count("idle") < 2:
            assert time.monotonic() < deadline, f"{states}\n{(tmp_path / 'slurmctld.log').read_text()[-3000:]}"
            time.sleep(0.5)
        yield cluster
    finally:
        cluster.stop()


def nodes_of(cluster: Slurm) -> str:
    done = subprocess.run(["sinfo", "--noheader", "-N", "-o", "%T"], env=cluster.environment, capture_output=True)
    return done.stdout.decode()


FAILURES = ("FAILED", "CANCELLED", "TIMEOUT")


class Job:
    """A job of launch/slurm.sbatch that trains in a run folder."""

    def __init__(self, slurm: Slurm, launch: Launch, *options: str, nodes: int, flags: tuple[str, ...] = ()) -> None:
        self.slurm, self.launch, self.log = slurm, launch, launch.folder / "job.log"
        flags = (f"--nodes={nodes}", f"--output={self.log}", *flags)
        script = ["launch/slurm.sbatch", str(CONFIG.relative_to(ROOT)), *launch.options(*options)]
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        processes = str(2 // nodes)
        self.number = slurm.run(
            "sbatch", "--parsable", *flags, *script,
            NPROC_PER_NODE=processes, HEAD_PORT=launch.port, OMP_NUM_THREADS="1", PATH=path, PYTHONPATH=str(ROOT),
        )  # fmt: skip

    def wait_for(self, what: str, condition: Callable[[], bool], seconds: float = 240) -> None:
        deadline = time.monotonic() + seconds
        while True:
            for _ in range(20):  # without asking Slurm each time
                if condition():
                    return
                time.sleep(0.1)
            text = self.log.read_text() if self.log.exists() else "(no log)"
            state = self.slurm.job(self.number, "JobState")
            assert time.monotonic() < deadline, f"{what} did not come; {state}\n{text}"
            assert state not in FAILURES, f"{state} before {what}:\n{text}"

    def finish(self, seconds: float = 300) -> None:
        deadline = time.monotonic() + seconds
        while (state := self.slurm.job(self.number, "JobState")) != "COMPLETED":
            ended = time.monotonic() > deadline or state in FAILURES
            assert not ended, f"{state}\n{self.log.read_text()}"
            time.sleep(1)

    @property
    def failures(self) -> Path:
        return self.slurm.checkout / f"megafp8-{self.number}.failures"

    @property
    def restarts(self) -> int:
        return int(self.slurm.job(self.number, "Restarts"))


def undisturbed(launch: Launch, *options: str) -> list[tuple[int, float]]:
    """Losses of the same command on one node without Slurm."""
    alone = launch.single(2, *options, "name=undisturbed")
    assert alone.wait(300) == 0, alone.said()
    return [(r["step"], r["loss"]) for r in read_metrics(launch.folder / "undisturbed" / "metrics.jsonl")]


@pytest.fixture
def launch(tmp_path: Path, quickstart_data: QuickstartData) -> Iterator[Launch]:
    (tmp_path / "run").mkdir()
    started = Launch(tmp_path / "run", quickstart_data)
    yield started
    for node in started.nodes:
        node.kill()


TWO = ["parallel.tensor=2", "parallel.pipeline=1"]
STEPS = [*TWO, "training.steps=80"]


@pytest.mark.parametrize("nodes", [1, 2])
def test_killed_processes_are_queued_again(slurm: Slurm, launch: Launch, nodes: int) -> None:
    """kill -9 of the agent and the ranks of the last node, which its step does not survive."""
    job = Job(slurm, launch, *STEPS, nodes=nodes)
    job.wait_for("a checkpoint", lambda: any(step >= 5 for step in launch.saved()))
    agents = slurm.processes(f"SLURM_JOB_ID={job.number}", b"megafp8\0launch")
    assert len(agents) == nodes
    slurm.kill([agents[-1], *descendants(agents[-1])])
    job.finish()
    assert job.restarts == 1
    assert "exit code 137" in job.failures.read_text()
    assert "resumed from step" in job.log.read_text()
    assert launch.curve() == undisturbed(launch, *STEPS)


def test_a_lost_node_is_queued_again(slurm: Slurm, launch: Launch) -> None:
    """Slurm's daemon and all processes of the job are gone, as when a machine loses power; Slurm queues the job."""
    job = Job(slurm, launch, *STEPS, nodes=1, flags=(f"--nodelist={slurm.host}",))
    job.wait_for("a checkpoint", lambda: any(step >= 5 for step in launch.saved()))
    job_processes = slurm.processes(f"SLURM_JOB_ID={job.number}")
    slurm.kill([slurm.daemons[slurm.host].pid, *slurm.steps(), *job_processes])
    slurm.daemons[slurm.host].wait()
    slurm.start_node(slurm.host)
    job.finish()
    assert job.restarts == 1
    assert launch.curve() == undisturbed(launch, *STEPS)


def test_a_job_out_of_time_saves_and_goes_on(slurm: Slurm, launch: Launch) -> None:
    """Slurm's own signal before the time limit. Afterwards a user stops the job, which then is not queued again."""
    forever = [*TWO, "training.steps=1000000", "checkpoint.interval=1000"]
    job = Job(slurm, launch, *forever, nodes=2, flags=("--time=60", "--signal=B:USR1@60"))
    job.wait_for("steps", lambda: launch.metrics.exists() and len(launch.steps()) > 5)
    minutes = int(slurm.run("squeue", "--noheader", "--format=%M", "--job", job.number).split(":")[0])
    slurm.run("scontrol", "update", f"JobId={job.number}", f"TimeLimit={minutes + 2}")
    job.wait_for("another start", lambda: bool(launch.saved()) and job.restarts == 1)
    slurm.run("scontrol", "update", f"JobId={job.number}", "TimeLimit=60")
    job.wait_for("a resume", lambda: "resumed from step" in job.log.read_text())
    text = job.log.read_text().replace(",", "")
    last = int(text.split("stopped on request after step ")[1].split(";")[0])
    assert f"resumed from step {last}" in text
    job.wait_for("more steps", lambda: launch.steps()[-1] > last + 5)
    slurm.run("scancel", "--signal=TERM", job.number)
    job.finish()
    assert job.restarts == 1
    assert not job.failures.exists()
    curve = launch.curve()
    assert curve == undisturbed(launch, *forever, f"training.stop_after={curve[-1][0]}")


def test_a_wrong_config_is_not_queued_again(slurm: Slurm, launch: Launch) -> None:
    job = Job(slurm, launch, *TWO, "training.seq_length=127", nodes=2)
    deadline = time.monotonic() + 120
    while slurm.job(job.number, "JobState") not in ("FAILED", "COMPLETED"):
        assert time.monotonic() < deadline
        time.sleep(0.5)
    assert (slurm.job(job.number, "ExitCode"), job.restarts) == ("2:0", 0)
    assert "training.seq_length = 127" in job.log.read_text()


def test_replicas_are_queued_again_alone(slurm: Slurm, launch: Launch) -> None:
    """An array of two replicas on a node each. The one that is killed has the array's own job number.

    The lighthouse's script runs outside Slurm, as the array has all nodes.
    """
    script = ["bash", "launch/lighthouse.sbatch"]
    options = [*ONE_RANK, FOREVER, "training.global_batch_size=64", "training.micro_batch_size=1"]
    options += ["resilience.replicas={count: 2, start_seconds: 120}", "checkpoint.interval=1000000"]
    flags = ("--nodes=1", "--array=0-1", f"--output={launch.folder}/task-%a.log")
    array = Job(slurm, launch, *options, nodes=2, flags=flags)
    address, token = (slurm.checkout / f"megafp8-lighthouse.{name}" for name in ("address", "token"))
    port = free_port()
    variables = {"SLURM_SUBMIT_DIR": str(slurm.checkout), "SLURM_JOB_ID": "7", "SLURMD_NODENAME": "localhost"}
    variables |= {"ARRAY": array.number, "LIGHTHOUSE_PORT": str(port), "POLL_SECONDS": "1", "PYTHONPATH": str(ROOT)}
    variables["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    lighthouse = subprocess.Popen(script, cwd=ROOT, env=slurm.environment | variables)

    def ranks() -> dict[int, list[int]]:
        found = {i: slurm.processes(f"SLURM_ARRAY_TASK_ID={i}", b"pretrain") for i in (0, 1)}
        return {
            i: [x for x in pids if b"launch" not in Path(f"/proc/{x}/cmdline").read_bytes()]
            for i, pids in found.items()
        }

    def said(i: int) -> str:
        log = launch.folder / f"task-{i}.log"
        return log.read_text() if log.exists() else ""

    def wait_for(what: str, condition: Callable[[], bool], seconds: float = 240) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"{what} did not come\n{said(0)}\n{said(1)}"
            time.sleep(0.5)

    try:
        curves = [launch.folder / "quickstart" / f"replica-{i}" / "metrics.jsonl" for i in (0, 1)]
        wait_for("steps", lambda: all(x.exists() and len(read_metrics(x)) > 3 for x in curves))
        assert address.read_text() == f"localhost:{port}\n"
        assert token.stat().st_mode & 0o777 == 0o600
        whole = set(slurm.processes(f"SLURM_JOB_ID={array.number}", b"megafp8\0launch"))
        lost = next(i for i in (0, 1) if whole & set(slurm.processes(f"SLURM_ARRAY_TASK_ID={i}")))
        others = ranks()[1 - lost]
        (agent,) = whole
        slurm.kill([agent, *descendants(agent)])
        wait_for("a rejoin", lambda: "copied from replica" in said(lost))
        assert ranks()[1 - lost] == others
        assert slurm.job(f"{array.number}_{lost}", "Restarts") == "1"
        assert slurm.job(f"{array.number}_{1 - lost}", "Restarts") == "0"
        slurm.run("scancel", "--signal=TERM", array.number)
        wait_for("the end", lambda: all(slurm.job(f"{array.number}_{i}", "JobState") == "COMPLETED" for i in (0, 1)))
        assert lighthouse.wait(60) == 0
        assert not address.exists()
        assert launch.saved()
    finally:
        lighthouse.terminate()  # it ends its server
        lighthouse.wait(30)
