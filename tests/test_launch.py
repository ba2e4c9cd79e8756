"""The launch scripts with stand-ins for python, srun and friends: the commands they build, and what they refuse."""

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
    """An environment in which the programs the scripts call print how they were called."""
    stand_ins = {
        "python": '[[ $1 == -c ]] || { echo "python $*"; echo "threads $OMP_NUM_THREADS"; env | grep SHUTDOWN; }',
        "scancel": 'echo "scancel $*"',
        "srun": 'echo "srun $1"; shift; exec "$@"',
        "scontrol": 'if [[ $1 == show ]]; then echo node7; echo node8; else echo "scontrol $*"; fi',
        "nvidia-smi": "for i in 0 1 2 3; do echo GPU $i; done",
    }
    for name, body in stand_ins.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    return {"PATH": f"{tmp_path}:{os.environ['PATH']}"}


def launch(script: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", f"launch/{script}", *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=30
    )


def test_single_node_takes_every_gpu(tools: dict[str, str]) -> None:
    done = launch("single_node.sh", CONFIG, "parallel.tensor=2", **tools)
    assert done.returncode == 0, done.stderr
    agent = "python -m launch.agent --standalone --nproc-per-node gpu --max-restarts 0"
    expected = f"{agent} pretrain_gpt.py --config {CONFIG} parallel.tensor=2"
    assert done.stdout.splitlines() == [expected, "threads 8", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT=110"]


def test_single_node_as_the_user_says(tools: dict[str, str]) -> None:
    choice = {"NPROC_PER_NODE": "2", "OMP_NUM_THREADS": "3", "MAX_RESTARTS": "1", "LOG_DIR": "my logs"}
    done = launch("single_node.sh", CONFIG, **choice, **tools)
    assert "--nproc-per-node 2 --max-restarts 1 --log-dir my logs --tee 3 pretrain_gpt.py" in done.stdout
    assert "threads 3" in done.stdout


def test_a_machine_without_gpus(tools: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "nvidia-smi").write_text("#!/usr/bin/env bash\necho No devices were found\nexit 6\n")
    done = launch("single_node.sh", CONFIG, **tools)
    assert "--nproc-per-node 1 " in done.stdout
    assert "threads 1" in done.stdout
    done = launch("multi_node.sh", CONFIG, **MULTI, **tools)
    assert done.returncode == 2
    assert "no GPU found" in done.stderr


MULTI = {"NNODES": "4", "HEAD_NODE": "node0", "RDZV_ID": "run1"}


def test_multi_node(tools: dict[str, str]) -> None:
    done = launch("multi_node.sh", CONFIG, "seed=7", **MULTI, **tools)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == (
        "python -m launch.agent --nnodes 4 --nproc-per-node gpu --rdzv-backend c10d --rdzv-endpoint node0:29400 "
        "--rdzv-id run1 "
        f"--max-restarts 3 pretrain_gpt.py --config {CONFIG} seed=7"
    )


@pytest.mark.parametrize("missing", MULTI)
def test_multi_node_says_what_is_missing(tools: dict[str, str], missing: str) -> None:
    environment = {name: value for name, value in MULTI.items() if name != missing}
    done = launch("multi_node.sh", CONFIG, **environment, **tools)
    assert done.returncode == 2
    assert f"{missing} is not set" in done.stderr


def test_slurm_starts_a_launcher_on_each_node(tools: dict[str, str]) -> None:
    slurm = {"SLURM_SUBMIT_DIR": str(ROOT), "SLURM_JOB_NODELIST": "node[7-8]", "SLURM_JOB_NUM_NODES": "2"}
    done = launch("slurm.sbatch", CONFIG, SLURM_JOB_ID="99", **slurm, **tools)
    assert done.returncode == 0, done.stderr
    assert "srun --kill-on-bad-exit=1" in done.stdout
    assert "--nnodes 2 --nproc-per-node gpu --rdzv-backend c10d --rdzv-endpoint node7:29400 --rdzv-id 99" in done.stdout


def test_slurm_asks_for_a_save_and_queues_again(tools: dict[str, str], tmp_path: Path) -> None:
    """The batch shell gets USR1; the training processes get TERM, by scancel, and finish before the job is requeued."""
    printed = stop_a_batch_job(tools, tmp_path, leaves_with=0)
    assert printed.splitlines()[-3:] == ["scancel --signal=TERM 99", "saved", "scontrol requeue 99"]


def test_slurm_does_not_queue_a_wrong_config_again(tools: dict[str, str], tmp_path: Path) -> None:
    assert "requeue" not in stop_a_batch_job(tools, tmp_path, leaves_with=2)


def stop_a_batch_job(tools: dict[str, str], tmp_path: Path, leaves_with: int) -> str:
    """What a batch job prints that gets USR1 and whose agent then leaves with an exit code."""
    (tmp_path / "python").write_text(
        f"#!/usr/bin/env bash\n[[ $1 == -c ]] && exit\ntrap 'echo saved; exit {leaves_with}' TERM\n"
        f"echo $$ > {tmp_path}/pid\nwhile :; do sleep 0.05; done\n"
    )
    (tmp_path / "scancel").write_text(f'#!/usr/bin/env bash\necho "scancel $*"\nkill -TERM $(cat {tmp_path}/pid)\n')
    slurm = {"SLURM_SUBMIT_DIR": str(ROOT), "SLURM_JOB_NODELIST": "node7", "SLURM_JOB_NUM_NODES": "1"}
    batch = subprocess.Popen(
        ["bash", "launch/slurm.sbatch", CONFIG], cwd=ROOT, env={**slurm, **tools, "SLURM_JOB_ID": "99"},
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


def test_slurm_is_for_sbatch(tools: dict[str, str]) -> None:
    done = launch("slurm.sbatch", CONFIG, **tools)
    assert done.returncode != 0
    assert "this script is for sbatch" in done.stderr


@pytest.mark.parametrize("script", ["single_node.sh", "multi_node.sh"])
def test_a_config_that_is_not_there(tools: dict[str, str], script: str) -> None:
    assert "usage:" in launch(script, **tools).stderr
    done = launch(script, "configs/absent.yaml", **tools)
    assert done.returncode == 2
    assert "no such config: configs/absent.yaml; there are: configs/gpt2-125m.yaml" in done.stderr
