"""A run that was killed, stopped or interrupted continues bit for bit.

Real processes through torchrun, killed from outside with SIGKILL once metrics.jsonl shows that they are past a save.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import pretrain_gpt
from megafp8.checkpoint import complete_checkpoints
from megafp8.conversion.native import NativeSource
from megafp8.training.metrics import read_metrics
from tests.marks import slow_but
from tests.quickstart_data import CONFIG, ROOT, QuickstartData
from tests.training.runs import ONE_RANK, train_job
from tests.world import World

SMALL = [
    "model.num_layers=2",
    "model.hidden_size=64",
    "model.ffn_hidden_size=128",
    "training.seq_length=32",
    "training.micro_batch_size=2",
    "training.global_batch_size=8",
    "training.steps=10",
    "optimizer.warmup_steps=1",
    "training.eval_interval=4",
    "training.eval_steps=1",
    "checkpoint.interval=5",
    "checkpoint.keep_last=1",
    "fp8.amax_history_len=4",
]
CASES = {
    "fp32": (1, [*ONE_RANK, "fp8.recipe=none"]),
    "delayed": (1, [*ONE_RANK, "fp8.recipe=delayed"]),
    "delayed-dp2-zero": (2, [*ONE_RANK, "fp8.recipe=delayed", "parallel.zero=1", "parallel.bucket_mib=0.1"]),
    "fp8-moments": (1, [*ONE_RANK, "fp8.recipe=none", "optimizer.moments_dtype=fp8", "optimizer.offload=0.5"]),
    "delayed-tp2-pp2": (4, ["parallel.tensor=2", "parallel.pipeline=2", "fp8.recipe=delayed", "fp8.interval=3"]),
}


def family(pid: int) -> list[int]:
    """`pid` and all its descendants; torchrun's workers have sessions of their own, so a group is not enough."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(member for child in children for member in family(int(child)))]


class Job:
    """One run folder and the command that works in it."""

    patience = 120.0
    """Seconds that a wait may take."""

    def __init__(self, folder: Path, data: QuickstartData, processes: int, options: list[str]) -> None:
        self.run, self.processes = folder / "quickstart", processes
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
        self.overrides = [*SMALL, *data.overrides, *options, f"run_dir={folder}"]
        self.arguments = ["pretrain_gpt.py", "--config", str(CONFIG), *self.overrides]
        self.command = [sys.executable, *(launcher if processes > 1 else []), *self.arguments]

    def finish_in(self, world: World) -> None:
        """Run to the end on ranks that are there already, which takes a second instead of several."""
        world.run(train_job, self.overrides, ranks=self.processes)

    def start(self, *more: str) -> subprocess.Popen[bytes]:
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        pipes = {"stderr": subprocess.PIPE, "stdout": subprocess.PIPE}
        return subprocess.Popen([*self.command, *more], cwd=ROOT, env=environment, start_new_session=True, **pipes)

    def finish(self) -> str:
        """Run to the end in processes of its own; its log."""
        process = self.start()
        _, errors = process.communicate(timeout=self.patience + 30)
        assert process.returncode == 0, errors.decode()
        return errors.decode()

    def wait_for_step(self, step: int, process: subprocess.Popen[bytes]) -> None:
        """Until metrics.jsonl has `step`."""
        deadline = time.monotonic() + self.patience
        while time.monotonic() < deadline:
            if f'"step": {step},' in self.lines():
                return
            assert process.poll() is None, f"the run ended before step {step}"
            time.sleep(0.01)
        raise AssertionError(f"step {step} did not come")

    def wait_for_save(self, step: int, process: subprocess.Popen[bytes]) -> None:
        """Until the checkpoint of `step`, written in the background, is visible."""
        deadline = time.monotonic() + self.patience
        while step not in self.saved():
            assert time.monotonic() < deadline
            assert process.poll() is None, f"the run ended before step {step} was saved"
            time.sleep(0.002)

    def be_killed(self) -> None:
        """Run until step 5 is saved and step 6 done, and be killed with all processes."""
        process = self.start("resilience.inject=[{kind: slow, rank: 0, step: 7}]")  # or it might come to its end
        self.wait_for_step(6, process)
        self.wait_for_save(5, process)
        for pid in reversed(family(process.pid)):
            os.kill(pid, signal.SIGKILL)
        process.communicate()
        assert self.saved() == [5]

    def check_resumed(self) -> None:
        """After `be_killed`, it has resumed from step 5."""
        steps = [json.loads(line)["step"] for line in self.lines().splitlines() if line.endswith("}")]
        assert steps.count(6) == 2

    def lines(self) -> str:
        path = self.run / "metrics.jsonl"
        return path.read_text() if path.exists() else ""

    def curve(self) -> list[tuple[float, ...]]:
        return [
            (r["step"], r["loss"], r["grad_norm"], r["validation_loss"])
            for r in read_metrics(self.run / "metrics.jsonl")
        ]

    def saved(self) -> list[int]:
        return [step for step, _ in complete_checkpoints(self.run / "checkpoints")]


@pytest.mark.slow
def test_killed_by_a_fault_and_resumed_is_bit_identical(
    world2: World, tmp_path: Path, quickstart_data: QuickstartData
) -> None:
    """As below, but on a rank that is there already, which sends SIGKILL to itself."""
    straight, killed = (
        Job(tmp_path / name, quickstart_data, 1, [*CASES["delayed"][1], f"checkpoint.interval={interval}"])
        for name, interval in (("straight", 0), ("killed", 5))
    )
    straight.finish_in(world2)
    faults = "[{kind: slow, rank: 0, step: 6, steps: 1}, {kind: kill, rank: 0, step: 7}]"  # step 5 is saved meanwhile
    with pytest.raises(AssertionError, match="rank 0 failed:\nprocess died, exit code -9"):
        world2.run(train_job, [*killed.overrides, f"resilience.inject={faults}"], ranks=1)
    assert killed.saved() == [5]
    killed.finish_in(world2)
    killed.check_resumed()
    assert killed.curve() == straight.curve()
    assert killed.saved() == [10]


@pytest.mark.slow  # a process of its own imports all for ten seconds
@pytest.mark.parametrize("case", CASES)
def test_killed_and_resumed_is_bit_identical(
    world4: World, tmp_path: Path, quickstart_data: QuickstartData, case: str
) -> None:
    processes, options = CASES[case]
    straight = Job(tmp_path / "straight", quickstart_data, processes, [*options, "checkpoint.interval=0"])
    straight.finish_in(world4)

    killed = Job(tmp_path / "killed", quickstart_data, processes, options)
    killed.be_killed()
    killed.finish_in(world4)
    killed.check_resumed()
    assert [row[0] for row in straight.curve()] == list(range(1, 11))
    assert killed.curve() == straight.curve()
    assert killed.saved() == [10]


@pytest.mark.parametrize(("processes", "number"), slow_but([(1, signal.SIGTERM), (2, signal.SIGINT)]))
def test_a_signal_saves_and_exits(
    world2: World, tmp_path: Path, quickstart_data: QuickstartData, processes: int, number: int
) -> None:
    options = [f"parallel.tensor={processes}", "parallel.pipeline=1"]
    straight = Job(tmp_path / "straight", quickstart_data, processes, [*options, "checkpoint.interval=0"])
    straight.finish_in(world2)
    stopped = Job(tmp_path / "stopped", quickstart_data, processes, [*options, "checkpoint.interval=1"])
    process = stopped.start()
    stopped.wait_for_step(3, process)
    os.killpg(process.pid, number)
    _, errors = process.communicate(timeout=120)
    if processes == 1:
        assert process.returncode == 0
    assert b"stopped on request after step" in errors
    (step,) = stopped.saved()
    assert 3 <= step < 10
    stopped.finish_in(world2)
    assert stopped.curve() == straight.curve()


@pytest.mark.slow
def test_one_job_at_a_time_and_a_damaged_checkpoint_is_set_aside(
    world2: World, tmp_path: Path, quickstart_data: QuickstartData
) -> None:
    options = [*ONE_RANK, "fp8.recipe=delayed", "checkpoint.interval=4", "checkpoint.keep_last=2"]
    job = Job(tmp_path, quickstart_data, 1, options)
    first = job.start()
    job.wait_for_step(1, first)
    os.kill(first.pid, signal.SIGSTOP)  # or it might be done before the second has begun
    second = job.start()
    _, errors = second.communicate(timeout=120)
    os.kill(first.pid, signal.SIGCONT)
    assert second.returncode == 2
    assert f"error: {job.run}/checkpoints is in use by another job: process {first.pid} on " in errors.decode()
    assert "Traceback" not in errors.decode()
    _, errors = first.communicate(timeout=120)
    assert first.returncode == 0
    assert re.search(r"saved .*/step_00000004: stalled \d+\.\d s, \d+\.\d s in all", errors.decode())
    assert job.saved() == [8, 10]
    curve, newest = job.curve(), job.run / "checkpoints" / "step_00000010"
    data = newest / "__0_0.distcp"
    damaged = bytearray(data.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    data.write_bytes(damaged)
    job.finish_in(world2)
    log = (job.run / "log.txt").read_text()
    assert f"{newest} is damaged: {data} is damaged: its CRC-32 is" in log
    assert "resumed from step 8" in log
    assert job.curve() == curve
    assert [json.loads(line)["step"] for line in job.lines().splitlines()].count(9) == 2
    assert job.saved() == [8, 10]
    assert (newest.with_name("step_00000010.damaged") / data.name).read_bytes() == damaged
    assert not (job.run / "checkpoints" / ".lock").exists()


def test_a_run_that_is_done_has_nothing_to_do(world2: World, tmp_path: Path, quickstart_data: QuickstartData) -> None:
    job = Job(tmp_path, quickstart_data, 1, [*ONE_RANK, "training.steps=2", "fp8.recipe=delayed"])
    job.finish_in(world2)
    copy = job.run / "checkpoints" / "step_00000002" / "tokenizer" / "tokenizer.model"
    assert copy.read_bytes() == (quickstart_data.folder / "tokenizer.model").read_bytes()
    assert NativeSource(job.run).tokenizer_files == [copy]
    before = job.lines()
    job.finish_in(world2)
    assert job.lines() == before


@pytest.fixture(scope="module")
def done(world2: World, tmp_path_factory: pytest.TempPathFactory, quickstart_data: QuickstartData) -> Job:
    """A run of three steps."""
    options = [*ONE_RANK, "training.steps=3", "fp8.recipe=none"]
    job = Job(tmp_path_factory.mktemp("done"), quickstart_data, 1, options)
    job.finish_in(world2)
    return job


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("seed=7", "was saved with seed = 1234, this run has 7"),
        ("training.steps=4", "was saved with training.steps = 3, this run has 4, and without optimizer.decay_until"),
        ("checkpoint.resume=false", "already holds a run, and checkpoint.resume is false"),
        ("model.rope_theta=5e5", "holds the weights of another model (model.rope_theta 10000.0 -> 500000.0)"),
    ],
)
def test_another_run_in_the_same_folder_is_refused(
    done: Job, change: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [*done.arguments, change])
    assert pretrain_gpt.main() == 2
    errors = capsys.readouterr().err
    assert message in errors
    assert "Traceback" not in errors
