"""launch/replicas.sh with real replicas on this machine, and with fake programs; who may connect to the lighthouse."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megafp8 import commands
from megafp8.parallel.replicas import tunnel
from tests.ports import free_port
from tests.quickstart_data import CONFIG, ROOT, QuickstartData
from tests.test_agent import Launch, Node, descendants
from tests.test_launch import AGENT, SLURM, tools
from tests.test_launch import launch as run_script

__all__ = ["tools"]

OPTIONS = [
    "parallel.tensor=1",
    "parallel.pipeline=1",
    "training.micro_batch_size=1",
    "training.seq_length=32",
    "training.global_batch_size=64",  # a step takes some time, so that a replica rejoins before the last one
    "checkpoint.interval=20",
    "checkpoint.keep_last=2",
    "resilience.replicas.exchange_seconds=10",
    "resilience.replicas.start_seconds=120",
]


class Replicas(Launch):
    """Two replicas of one rank each by launch/replicas.sh."""

    def begin(self, *options: str, **environment: str) -> Node:
        command = ["bash", "launch/replicas.sh", str(CONFIG), *self.options(*OPTIONS, *options)]
        return self.start("replicas", command, REPLICAS="2", HEARTBEAT_SECONDS="1", **environment)

    def ranks(self) -> dict[int, int]:
        """The processes that train, by replica."""
        found = {}
        for pid in descendants(self.nodes[0].process.pid):
            with contextlib.suppress(OSError):
                variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                replica = [x for x in variables if x.startswith(b"MEGAFP8_REPLICA=")]
                if replica and b"LOCAL_RANK=0" in variables:
                    found.setdefault(int(replica[0].partition(b"=")[2]), pid)
        return found

    def records(self, replica: int) -> list[dict[str, Any]]:
        """The lines of a replica's metrics."""
        path = self.folder / "quickstart" / f"replica-{replica}" / "metrics.jsonl"
        if not path.exists():
            return []
        return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]

    def wait_for_steps(self, replica: int, count: int) -> None:
        self.wait_for(f"{count} steps of replica {replica}", lambda: len(self.records(replica)) >= count)


@pytest.fixture
def replicas(tmp_path: Path, quickstart_data: QuickstartData) -> Iterator[Replicas]:
    started = Replicas(tmp_path, quickstart_data)
    yield started
    for node in started.nodes:
        node.kill()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_killed_replica_is_restarted_alone_and_rejoins(replicas: Replicas) -> None:
    run = replicas.begin("training.steps=80")
    replicas.wait_for_steps(0, 5)
    before = replicas.ranks()
    assert sorted(before) == [0, 1], run.said()
    os.kill(before[1], signal.SIGKILL)
    replicas.wait_for("a rejoin", lambda: any("copied from replica 0" in line for line in run.said().splitlines()))
    after = replicas.ranks()
    assert after[0] == before[0]
    assert after[1] != before[1]
    assert run.wait(300) == 0, run.said()
    said = run.said()
    assert "was ended by SIGKILL" in said
    assert all(line.startswith(("[replica ", "[lighthouse]")) for line in said.splitlines()), said
    assert [r["step"] for r in replicas.records(0)] == list(range(1, 81))  # no step was done twice
    assert replicas.records(1)[-1]["step"] == 80
    members = [r["replicas"] for r in replicas.records(0)]
    assert members[0] == members[-1] == [0, 1]
    assert [0] in members
    assert replicas.saved() == [60, 80]
    assert not descendants(run.process.pid)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_killed_agent_a_stop_and_starts_again(replicas: Replicas) -> None:
    """kill -9 of an agent; SIGTERM to the script; the same command again; and again once all steps are done."""
    run = replicas.begin("training.steps=100000")
    replicas.wait_for_steps(0, 5)
    agent = next(pid for pid in descendants(run.process.pid) if replicas.ranks()[1] in descendants(pid)[:1])
    other = replicas.ranks()[0]
    os.kill(agent, signal.SIGKILL)
    replicas.wait_for("a rejoin", lambda: any("copied from replica 0" in line for line in run.said().splitlines()))
    assert "[replica 1] ended by signal 9; restarting, 2 left" in run.said()
    assert replicas.ranks()[0] == other
    run.process.send_signal(signal.SIGTERM)
    assert run.wait(100) == 0, run.said()
    last = max(replicas.saved())
    assert last >= replicas.records(0)[-1]["step"]

    run = replicas.begin("training.steps=100000", f"training.stop_after={last + 4}")
    assert run.wait(200) == 0, run.said()
    assert f"resumed from step {last}" in run.said()
    assert max(replicas.saved()) == last + 4

    run = replicas.begin("training.steps=100000", f"training.stop_after={last + 4}")
    assert run.wait(100) == 0, run.said()
    assert run.said().count("nothing to do") == 2, run.said()


NAMES = ("MEGAFP8_REPLICA", "MEGAFP8_LIGHTHOUSE", "MEGAFP8_LIGHTHOUSE_TOKEN", "CUDA_VISIBLE_DEVICES", "HEAD_PORT")


@pytest.fixture
def fakes(tools: dict[str, str], tmp_path: Path) -> dict[str, str]:
    """Fake programs, of which `python` prints its environment, and runs as the lighthouse until it gets a signal."""
    script = f"""#!/usr/bin/env bash
if [[ $1 == -c ]]; then [[ $2 != *create_server* ]] || echo 4711; exit; fi
if [[ $3 == lighthouse ]]; then trap 'exit 0' TERM; while :; do sleep 0.05; done; fi
for name in {" ".join(NAMES)}; do echo "$name=${{!name:-}}"; done
echo "python $*"
exit "${{CODE:-0}}"
"""
    (tmp_path / "python").write_text(script)
    return tools


def test_replicas_share_gpus_a_token_and_a_lighthouse(fakes: dict[str, str]) -> None:
    done = run_script("replicas.sh", str(CONFIG), "seed=7", REPLICAS="2", MIN_REPLICAS="2", **fakes)
    assert done.returncode == 0, done.stderr
    lines = {i: [x[12:] for x in done.stdout.splitlines() if x.startswith(f"[replica {i}] ")] for i in (0, 1)}
    values = {i: dict(line.split("=", 1) for line in lines[i][:-1]) for i in (0, 1)}
    assert [values[i]["MEGAFP8_REPLICA"] for i in (0, 1)] == ["0", "1"]
    assert [values[i]["CUDA_VISIBLE_DEVICES"] for i in (0, 1)] == ["0,1", "2,3"]
    assert {values[i]["MEGAFP8_LIGHTHOUSE"] for i in (0, 1)} == {"127.0.0.1:4711"}
    (token,) = {values[i]["MEGAFP8_LIGHTHOUSE_TOKEN"] for i in (0, 1)}
    assert len(token) == 32
    command = f"{AGENT} --standalone --nproc-per-node gpu --max-restarts 3 pretrain --config {CONFIG} "
    assert lines[0][-1] == f"{command}resilience.replicas.count=2 resilience.replicas.min=2 seed=7"
    given = {"CUDA_VISIBLE_DEVICES": "5,3", "MEGAFP8_LIGHTHOUSE_TOKEN": "0123456789abcdef"}
    printed = run_script("replicas.sh", str(CONFIG), REPLICAS="2", **given, **fakes).stdout
    assert "[replica 0] CUDA_VISIBLE_DEVICES=5\n" in printed
    assert printed.count("TOKEN=0123456789abcdef") == 2


@pytest.mark.parametrize(
    ("environment", "code", "message"),
    [
        ({"CODE": "2"}, 2, "has ended with exit code 2"),
        ({"CODE": "3"}, 3, "has ended with exit code 3"),
        ({"REPLICAS": "1"}, 2, "REPLICAS is 1; give 2 or more"),
        ({"MIN_REPLICAS": "3"}, 2, "MIN_REPLICAS is 3; give 1 to 2"),
        ({"REPLICAS": "3"}, 2, "4 GPUs cannot be shared equally by 3 replicas"),
    ],
)
def test_exit_codes(fakes: dict[str, str], environment: dict[str, str], code: int, message: str) -> None:
    done = run_script("replicas.sh", str(CONFIG), **{"REPLICAS": "2"} | environment, **fakes)
    assert done.returncode == code, done.stderr
    assert message in done.stderr


ARRAY = SLURM | {
    "SLURM_JOB_NUM_NODES": "1",
    "SLURM_JOB_ID": "90",
    "SLURM_ARRAY_JOB_ID": "90",
    "SLURM_ARRAY_TASK_ID": "3",
}


def test_tasks_of_a_slurm_array_are_replicas(fakes: dict[str, str], tmp_path: Path) -> None:
    """Address and token come from files; a failure queues this task alone again, although it has the array's number."""
    for name in ("launch", "configs"):
        (tmp_path / name).symlink_to(ROOT / name)
    files, array = (
        tmp_path / "files",
        ARRAY | {"SLURM_SUBMIT_DIR": str(tmp_path), "LIGHTHOUSE": str(tmp_path / "files")},
    )
    done = run_script("slurm.sbatch", "configs/quickstart.yaml", LIGHTHOUSE_SECONDS="0", **array, **fakes)
    assert done.returncode == 1
    assert f"no {files}.address after 0 s" in done.stderr
    (tmp_path / "files.address").write_text("node0:29510\n")
    token = tmp_path / "files.token"
    token.write_text("0123456789abcdef")
    token.chmod(0o644)
    done = run_script("slurm.sbatch", "configs/quickstart.yaml", **array, **fakes)
    assert done.returncode == 2
    assert f"others may read {token}" in done.stderr
    token.chmod(0o600)
    done = run_script("slurm.sbatch", "configs/quickstart.yaml", CODE="1", **array, **fakes)
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    values = dict(line.split("=", 1) for line in said if line.partition("=")[0] in NAMES)
    assert values["MEGAFP8_REPLICA"] == "3"
    assert values["MEGAFP8_LIGHTHOUSE"] == "node0:29510"
    assert values["MEGAFP8_LIGHTHOUSE_TOKEN"] == "0123456789abcdef"
    assert values["HEAD_PORT"] == "29403"
    assert said[-1] == "scontrol requeue 90_3"
    done = run_script("slurm.sbatch", "configs/quickstart.yaml", **array, **fakes)
    assert done.returncode == 0
    assert "requeue" not in done.stdout


def test_the_lighthouse_job_writes_its_address_and_a_token(tmp_path: Path) -> None:
    """It opens a port that refuses other tokens, and ends with the array."""
    (tmp_path / "squeue").write_text(f"#!/usr/bin/env bash\n[[ -e {tmp_path}/over ]] || echo task\n")
    (tmp_path / "squeue").chmod(0o755)
    port = free_port()
    environment = {"SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_JOB_ID": "7", "SLURMD_NODENAME": "localhost", "ARRAY": "9"}
    environment |= {"LIGHTHOUSE_PORT": str(port), "POLL_SECONDS": "0.2", "PYTHONPATH": str(ROOT)}
    environment["PATH"] = os.pathsep.join([str(tmp_path), str(Path(sys.executable).parent), os.environ["PATH"]])
    process = subprocess.Popen(["bash", str(ROOT / "launch" / "lighthouse.sbatch")], env=environment)
    try:
        address, token = (tmp_path / f"megafp8-lighthouse.{name}" for name in ("address", "token"))
        deadline = time.monotonic() + 100
        while not address.exists():
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.05)
        assert address.read_text() == f"localhost:{port}\n"
        assert stat.S_IMODE(token.stat().st_mode) == 0o600
        tunnel.close(tunnel.connect(("localhost", port), token.read_text()))
        with pytest.raises(PermissionError, match="refused the token"):
            tunnel.connect(("localhost", port), "another word of the same length")
        (tmp_path / "over").touch()
        assert process.wait(30) == 0
        assert not address.exists()
    finally:
        process.terminate()  # it ends its server
        process.wait(30)


def test_no_port_is_opened_without_a_token(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    port = free_port()
    monkeypatch.delenv("MEGAFP8_LIGHTHOUSE_TOKEN", raising=False)
    monkeypatch.setattr(sys, "argv", sys.argv)  # which the command changes
    assert commands.main(["lighthouse", "--bind", f"127.0.0.1:{port}"]) == 2
    assert "MEGAFP8_LIGHTHOUSE_TOKEN has 0 characters" in capsys.readouterr().err
    with pytest.raises(ConnectionRefusedError):
        tunnel.connect(("127.0.0.1", port), "0123456789abcdef")
