"""Notifications: what a command is given, that it can do no harm, and one for each event of real jobs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megafp8.config import Config
from megafp8.training import errors, notify
from megafp8.training.notify import Subscription
from tests.config.test_config import MINIMAL
from tests.ports import free_port

ROOT = Path(__file__).resolve().parents[2]


def subscription(tmp_path: Path, command: str) -> Subscription:
    return Subscription(command, "my-run", str(tmp_path), 10)


def test_facts_are_variables_and_json_and_never_part_of_the_command(tmp_path: Path) -> None:
    command = f"cat >{tmp_path}/stdin; env >{tmp_path}/env"
    reason = "error: $(touch hacked) `touch hacked`; s3://user:secret@host\nsecond line"
    notify.tell(subscription(tmp_path, command), "failure", 7, reason, 3)
    facts = json.loads((tmp_path / "stdin").read_text())
    assert (facts["event"], facts["run"], facts["step"], facts["exit_code"]) == ("failure", "my-run", 7, 3)
    assert "secret" not in facts["reason"]
    assert facts["reason"].endswith("second line")
    variables = (tmp_path / "env").read_text()
    for line in ("EVENT=failure", "RUN=my-run", "STEP=7", "EXIT_CODE=3", f"FOLDER={tmp_path}"):
        assert f"MEGAFP8_{line}\n" in variables
    assert "secret" not in variables
    assert not Path("hacked").exists()


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("echo no such channel >&2; exit 3", "resilience.notify, for finish: exit code 3: no such channel"),
        ("sleep 60 & sleep 60", "resilience.notify, for finish: killed after 0.3 s, because it did not end"),
        ("/no/such/program", "exit code 127"),
        ("exec <&-; true", ""),
    ],
)
def test_a_command_that_fails_or_hangs_is_a_warning(
    tmp_path: Path, command: str, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    begin = time.monotonic()
    notify.tell(subscription(tmp_path, command), "finish", 10, seconds=0.3)
    assert time.monotonic() - begin < 5
    assert said in caplog.text
    assert bool(caplog.text) == bool(said)


def test_what_cannot_even_start_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    notify.tell(subscription(tmp_path, "a\0b"), "finish", 10)
    assert "ValueError: embedded null byte" in caplog.text


def test_without_an_agent_rank_0_tells_of_its_end_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "events"
    section = {"notify": f"echo $MEGAFP8_EVENT $MEGAFP8_STEP $MEGAFP8_EXIT_CODE >>{log}"}
    config = Config.model_validate({**MINIMAL, "run_dir": str(tmp_path), "resilience": section})
    monkeypatch.setattr(os, "environ", {**os.environ})
    monkeypatch.delenv(notify.AGENT_FILE, raising=False)
    monkeypatch.setenv("RANK", "1")
    notify.subscribe(config)
    assert notify.process_subscription() is None
    assert notify.started(0) is None
    monkeypatch.setenv("RANK", "0")
    for restarts in ("0", "1"):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", restarts)
        notify.subscribe(config)
        thread = notify.started(4)
        assert thread is not None
        thread.join()
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    errors.report_failure("error: hung", 3, "")
    (tmp_path / "test").mkdir()
    for step in (5, 10):
        (tmp_path / "test" / "metrics.jsonl").write_text(f'{{"step": {step}}}\n')
        notify.ended(notify.process_subscription(), 0)
    assert log.read_text().splitlines() == ["start 4", "restart 4", "failure 0 3", "stop 5 0", "finish 10 0"]


# A rank of a job that tells of its start and its end, and ends as HOW says once rank 0 has told of its start.
JOB = """
import json, os, signal, sys, time
sys.path.insert(0, os.environ["ROOT"])
from megafp8.config import Config
from megafp8.training import notify
from megafp8.training.errors import run_and_report

def job():
    config = Config.model_validate(json.loads(os.environ["CONFIG"]))
    notify.subscribe(config)
    if (thread := notify.started(0)) is not None:
        thread.join()
    how, attempt = os.environ["HOW"], int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    while not os.path.exists("events") or open("events").read().count("start;") <= attempt:
        time.sleep(0.01)
    if how == "error":
        raise RuntimeError("both ranks raise it")
    if how == "kill":
        if os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)

sys.exit(run_and_report(job))
"""


@pytest.mark.parametrize(
    ("how", "nodes", "code", "events"),
    [
        pytest.param("kill", 1, 1, ["start;", "restart;", "failure;1"], marks=pytest.mark.slow),
        pytest.param("finish", 1, 0, ["start;", "stop;0"], marks=pytest.mark.slow),
        pytest.param("error", 1, 1, ["start;", "restart;", "failure;1"], marks=pytest.mark.slow),
        pytest.param("finish", 2, 0, ["start;", "stop;0"], marks=pytest.mark.slow),
        pytest.param("kill", 2, 1, ["start;", "restart;", "failure;1"], marks=pytest.mark.slow),
    ],
)
def test_under_agents_each_event_is_told_once(
    tmp_path: Path, how: str, nodes: int, code: int, events: list[str]
) -> None:
    (tmp_path / "job.py").write_text(JOB)
    log = tmp_path / "events"
    section = {"notify": f'echo "$MEGAFP8_EVENT;$MEGAFP8_EXIT_CODE;$MEGAFP8_REASON" | head -1 >>{log}'}
    config = json.dumps({**MINIMAL, "run_dir": str(tmp_path), "resilience": section})
    meeting = ["--standalone"]
    if nodes > 1:
        meeting = ["--nnodes", str(nodes), "--rdzv-backend", "c10d", "--rdzv-id", "x"]
        meeting += ["--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--local-addr", "127.0.0.1"]
    command = [sys.executable, "-m", "launch.agent", *meeting, "--nproc-per-node", str(2 // nodes)]
    command += ["--max-restarts", "1", str(tmp_path / "job.py")]
    environment = {**os.environ, "CONFIG": config, "HOW": how, "ROOT": str(ROOT), "PYTHONPATH": str(ROOT)}
    agents = [
        subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True)
        for _ in range(nodes)
    ]
    said = [agent.communicate(timeout=120)[1] for agent in agents]
    assert [agent.returncode for agent in agents] == [code] * nodes, said
    told = [line.split(";", 2) for line in log.read_text().splitlines()]
    assert [f"{event};{ended}" for event, ended, _ in told] == events
    if how == "kill":
        assert told[-1][2].startswith("error: rank 1 on ")
        assert "SIGKILL" in told[-1][2]
