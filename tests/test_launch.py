"""The launch scripts with fake python, srun and so on: the commands they run, and their errors."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CONFIG = "configs/quickstart.yaml"


@pytest.fixture
def tools(tmp_path: Path) -> dict[str, str]:
    """An environment with fake programs that print how they were called."""
    fakes = {
        "python": '[[ $1 == -c ]] || { echo "python $*"; echo "threads $OMP_NUM_THREADS"; env | grep SHUTDOWN; }',
        "scancel": 'echo "scancel $*"',
        "srun": 'while [[ $1 == --* ]]; do args+=" $1"; shift; done; echo "srun$args"; exec "$@"',
        "scontrol": 'if [[ $1 == show ]]; then echo node7; echo node8; else echo "scontrol $*"; fi',
        "nvidia-smi": "for i in 0 1 2 3; do echo GPU $i; done",
    }
    for name, body in fakes.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    return {"PATH": f"{tmp_path}:{os.environ['PATH']}"}


def launch(script: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", f"launch/{script}", *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=30
    )


AGENT = "python -m megafp8 launch"
MULTI = {"NNODES": "4", "HEAD_NODE": "node0", "RDZV_ID": "run1"}
SLURM = {"SLURM_SUBMIT_DIR": str(ROOT), "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_ID": "99", "SLURM_JOB_NODELIST": "x"}


@pytest.mark.parametrize(
    ("script", "environment", "expected", "threads"),
    [
        ("single_node.sh", {}, f"{AGENT} --standalone --nproc-per-node gpu --max-restarts 0", 8),
        ("single_node.sh", {"NPROC_PER_NODE": "2", "OMP_NUM_THREADS": "3", "MAX_RESTARTS": "1", "LOG_DIR": "my logs"},
         f"{AGENT} --standalone --nproc-per-node 2 --max-restarts 1 --log-dir my logs --tee 3", 3),
        ("multi_node.sh", MULTI, f"{AGENT} --nnodes 4 --nproc-per-node gpu --rdzv-backend c10d --rdzv-endpoint "
         "node0:29400 --rdzv-id run1 --max-restarts 3", 8),
        ("slurm.sbatch", SLURM, f"{AGENT} --nnodes 2 --nproc-per-node gpu --rdzv-backend c10d --rdzv-endpoint "
         "node7:29400 --rdzv-id 99-0 --max-restarts 3", 8),
        ("multi_node.sh", MULTI | {"SCRIPT": "check-cluster", "LOCAL_ADDR": "10.0.0.7"},
         f"{AGENT} --nnodes 4 --nproc-per-node gpu --rdzv-backend c10d --rdzv-endpoint node0:29400 --rdzv-id run1 "
         "--max-restarts 3 --local-addr 10.0.0.7", 8),
    ],
)  # fmt: skip
def test_commands(tools: dict[str, str], script: str, environment: dict[str, str], expected: str, threads: int) -> None:
    done = launch(script, CONFIG, "seed=7", **environment, **tools)
    assert done.returncode == 0, done.stderr
    command = f"{expected} {environment.get('SCRIPT', 'pretrain')} --config {CONFIG} seed=7"
    srun = ["srun --kill-on-bad-exit=0 --wait=60 --cpu-bind=none"] if script == "slurm.sbatch" else []
    assert done.stdout.splitlines() == [*srun, command, f"threads {threads}", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT=110"]


def test_a_machine_without_gpus(tools: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "nvidia-smi").write_text("#!/usr/bin/env bash\necho No devices were found\nexit 6\n")
    done = launch("single_node.sh", CONFIG, **tools)
    assert "--nproc-per-node 1 " in done.stdout
    assert "threads 1" in done.stdout
    done = launch("multi_node.sh", CONFIG, **MULTI, **tools)
    assert done.returncode == 2
    assert "no GPU found" in done.stderr


@pytest.mark.parametrize("missing", MULTI)
def test_multi_node_says_what_is_missing(tools: dict[str, str], missing: str) -> None:
    environment = {name: value for name, value in MULTI.items() if name != missing}
    done = launch("multi_node.sh", CONFIG, **environment, **tools)
    assert done.returncode == 2
    assert f"{missing} is not set" in done.stderr


@pytest.mark.parametrize("code", [0, 2])
def test_slurm_asks_for_a_save_and_queues_again_unless_the_config_is_wrong(
    tools: dict[str, str], tmp_path: Path, code: int
) -> None:
    """The batch shell gets USR1; the training processes get TERM, by scancel, and finish before the job is requeued."""
    printed = stop_a_batch_job(tools, tmp_path, leaves_with=code)
    after = ["scontrol requeue 99"] if code == 0 else []
    assert printed.splitlines()[-2 - len(after) :] == ["scancel --signal=TERM 99", "saved", *after]


def stop_a_batch_job(tools: dict[str, str], tmp_path: Path, leaves_with: int) -> str:
    """The output of a batch job that gets USR1 and whose agent then exits with code `leaves_with`."""
    (tmp_path / "python").write_text(
        f"#!/usr/bin/env bash\n[[ $1 == -c ]] && exit\ntrap 'echo saved; exit {leaves_with}' TERM\n"
        f"echo $$ > {tmp_path}/pid\nwhile :; do sleep 0.05; done\n"
    )
    (tmp_path / "scancel").write_text(f'#!/usr/bin/env bash\necho "scancel $*"\nkill -TERM $(cat {tmp_path}/pid)\n')
    batch = subprocess.Popen(
        ["bash", "launch/slurm.sbatch", CONFIG], cwd=ROOT, env=SLURM | {"SLURM_JOB_NUM_NODES": "1"} | tools,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 20
        while not (tmp_path / "pid").exists():
            assert time.monotonic() < deadline, "the agent was not started"
            time.sleep(0.05)
        batch.send_signal(signal.SIGUSR1)
        printed, _ = batch.communicate(timeout=20)
    finally:
        batch.kill()
    return printed


@pytest.mark.parametrize(("code", "left", "requeued"), [(1, 1, True), (1, 0, False), (137, 1, True), (2, 1, False)])
def test_slurm_queues_failed_jobs_again(
    tools: dict[str, str], tmp_path: Path, code: int, left: int, requeued: bool
) -> None:
    (tmp_path / "srun").write_text(f"#!/usr/bin/env bash\nexit {code}\n")
    for name in ("launch", "configs"):
        (tmp_path / name).symlink_to(ROOT / name)
    folder = {"SLURM_SUBMIT_DIR": str(tmp_path), "MAX_REQUEUES": str(left)}
    done = launch("slurm.sbatch", CONFIG, **SLURM | folder, **tools)
    assert ("scontrol requeue 99" in done.stdout) == requeued
    assert done.returncode == (0 if requeued else code)
    failures = tmp_path / "megafp8-99.failures"
    if code == 2:
        assert not failures.exists()
    else:
        assert f"exit code {code} on x" in failures.read_text()
        assert ("not queued again" in done.stderr) == (not requeued)


def test_slurm_is_for_sbatch(tools: dict[str, str]) -> None:
    done = launch("slurm.sbatch", CONFIG, **tools)
    assert done.returncode != 0
    assert "this script is for sbatch" in done.stderr


@pytest.mark.parametrize("script", ["single_node.sh", "multi_node.sh"])
def test_a_config_that_is_not_there(tools: dict[str, str], script: str) -> None:
    assert "usage:" in launch(script, **tools).stderr
    done = launch(script, "configs/absent.yaml", **tools)
    assert done.returncode == 2
    assert "no such config: configs/absent.yaml; there are: configs/bert-base.yaml configs/deepseek" in done.stderr
