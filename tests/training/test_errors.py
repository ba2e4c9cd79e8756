"""Messages and error files of a rank that fails, and the outcome that the agent derives from them."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from launch.agent import TORCH_LOGGERS, Outcome, hide_torch_messages, outcome_of
from megafp8.checkpoint import DamagedCheckpoint, FolderInUse, SaveFailed
from megafp8.data import DataError
from megafp8.data.samples import split_documents
from megafp8.host.object_store import ObjectStoreError
from megafp8.training.errors import (
    DONE,
    FAILED,
    NO_RESTART,
    Diverged,
    StateDiffers,
    causes,
    lost_connection,
    run_and_report,
)

ROOT = Path(__file__).resolve().parents[2]
CLOSED = RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:16050.")


def raising(error: Exception) -> int:
    """The exit code of a job that raises `error`."""

    def job() -> None:
        raise error

    return run_and_report(job)


@pytest.fixture
def fail(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Run a job that raises `error` as local rank `rank` of a node and return its exit code."""

    def run(rank: int, error: Exception) -> int:
        (tmp_path / str(rank)).mkdir(exist_ok=True)
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / str(rank) / "error.json"))
        return raising(error)

    return run


def failures(folder: Path, exit_codes: dict[int, int]) -> dict[int, ProcessFailure]:
    """The failures as torch's agent reads them."""
    return {
        rank: ProcessFailure(rank, 1000 + rank, code, str(folder / str(rank) / "error.json"))
        for rank, code in exit_codes.items()
    }


def test_exit_codes_and_messages_without_an_agent(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    assert run_and_report(lambda: None) == DONE
    for error in (DataError("a"), FolderInUse("a"), DamagedCheckpoint("a"), Diverged("a"), StateDiffers("a")):
        assert raising(error) == (FAILED if isinstance(error, StateDiffers) else NO_RESTART)
        assert capsys.readouterr().err == "error: a\n"
    for is_transient, code in ((True, FAILED), (False, NO_RESTART)):  # storage may be reached again later
        assert raising(ObjectStoreError("a", is_transient)) == code
        assert capsys.readouterr().err == "error: a\n"
    assert run_and_report(lambda: split_documents(5, "no numbers")) == NO_RESTART  # a ValueError that we raise
    assert capsys.readouterr().err.startswith("error: ")
    assert run_and_report(lambda: json.loads("{")) == FAILED  # one from within a library
    assert "Traceback (most recent call last):" in capsys.readouterr().err
    assert raising(KeyError("b")) == FAILED
    said = capsys.readouterr().err
    assert said.startswith("Traceback (most recent call last):")
    assert said.endswith("KeyError: 'b'\n")


def test_only_the_first_rank_of_a_node_reports(
    fail, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """torchrun's summary ends with the message of the first rank to fail, whatever the order of ranks."""
    assert [fail(rank, DataError("data.train: no such file")) for rank in (2, 0, 1)] == [NO_RESTART] * 3
    assert capsys.readouterr().err == ""  # torchrun prints it
    found = failures(tmp_path, {0: 2, 1: -15, 2: 2})
    assert outcome_of(found) == Outcome(NO_RESTART, "error: data.train: no such file")
    summary = str(ChildFailedError("pretrain_gpt.py", found))
    assert summary.count("data.train: no such file") == 1
    assert summary.splitlines()[-2].endswith("error: data.train: no such file")

    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "1")  # it will restart, and print nothing
    for attempt, said in (("0", "error: again\n"), ("1", "")):
        (tmp_path / "first_error.json").unlink()
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", attempt)
        assert [fail(rank, DataError("again")) for rank in (0, 1)] == [NO_RESTART] * 2
        assert capsys.readouterr().err == said


def test_the_cause_is_distinguished_from_its_consequences(fail, tmp_path: Path) -> None:
    assert fail(0, CLOSED) == FAILED  # before the rank that left is seen by the agent
    assert fail(1, KeyError("c")) == FAILED
    outcome = outcome_of(failures(tmp_path, {0: 1, 1: 1, 2: -15}))
    assert outcome.code == FAILED
    assert not outcome.follows
    assert "rank 1 on " in outcome.message.splitlines()[0]
    assert outcome.message.endswith("KeyError: 'c'")

    killed = outcome_of(failures(tmp_path, {0: 1, 2: -15, 3: -9}))
    assert "rank 3 on " in killed.message
    assert "SIGKILL" in killed.message
    only_followers = outcome_of(failures(tmp_path, {0: 1, 2: -15}))
    assert only_followers.follows
    assert "rank 0 on " in only_followers.message
    assert "lost the connection to another rank" in only_followers.message
    assert "\n" not in only_followers.message


def test_a_rank_that_the_agent_kills_is_not_the_cause(fail, tmp_path: Path) -> None:
    """A rank that does not exit within the grace period is killed, as if by itself."""
    assert fail(2, CLOSED) == FAILED
    found = failures(tmp_path, {0: -9, 1: -15, 2: 1, 3: -9})
    assert "rank 3 on " in outcome_of(found, failed_first=[2, 3]).message
    assert "rank 0 on " in outcome_of(found, failed_first=[0]).message


def test_a_rank_that_the_agent_ends_before_it_exits_is_still_the_cause(fail, tmp_path: Path) -> None:
    """The agent ends all ranks once one has exited, which may be another than the first to fail."""
    fail(1, DataError("d"))
    fail(0, DataError("d"))
    assert outcome_of(failures(tmp_path, {0: 2, 1: -15})) == Outcome(NO_RESTART, "error: d")


def test_lost_connections() -> None:
    chained = RuntimeError("saving failed")
    chained.__cause__ = CLOSED
    lost = dist.DistNetworkError("failed to recv, got 0 bytes. Connection was likely closed. Did the server crash?")
    assert all(map(lost_connection, (CLOSED, chained, lost)))
    others = (ConnectionResetError("Connection reset by peer"), RuntimeError("shapes differ"), KeyError("Broken pipe"))
    assert not any(map(lost_connection, others))


def test_a_signal_prints_where_the_threads_are(capfd: pytest.CaptureFixture[str]) -> None:
    def waits_for_another_rank() -> None:
        os.kill(os.getpid(), signal.SIGUSR2)

    assert run_and_report(waits_for_another_rank) == DONE
    assert "in waits_for_another_rank" in capfd.readouterr().err


def test_causes_that_lead_back_to_themselves_end() -> None:
    """As of an error that was raised from itself, or from what it had caused."""
    error, other = KeyError("a"), KeyError("b")
    error.__cause__ = error
    assert list(causes(error)) == [error]
    error.__cause__, other.__context__ = other, error
    assert list(causes(error)) == [error, other]
    assert not lost_connection(error)
    other.__cause__ = CLOSED
    assert lost_connection(error)


def test_a_full_disk_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    assert run_and_report(lambda: Path("/dev/full").write_text("a")) == FAILED
    assert capsys.readouterr().err == "error: [Errno 28] No space left on device\n"
    assert raising(SaveFailed("saving a failed")) == FAILED
    assert capsys.readouterr().err == "error: saving a failed\n"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", "/dev/null/error.json")  # nor can the agent's file be written
    assert raising(SaveFailed("saving a failed")) == FAILED
    assert capsys.readouterr().err.startswith("error: saving a failed\n/dev/null/error.json cannot be written")


def test_too_many_open_files_are_one_line(tmp_path: Path) -> None:
    """With the limit, and what raises it. The soft limit does not count."""
    job = f"found = [open({str(tmp_path / 'a')!r}, 'a') for _ in range(60)]"
    code = (
        "import resource\nfrom megafp8.training.errors import run_and_report\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))\n"
        f"raise SystemExit(run_and_report(lambda: exec({job!r})))"
    )
    commands = [[sys.executable, "-c", code.format(soft=40, hard=hard)] for hard in (40, 100)]
    found = [subprocess.run(command, capture_output=True, text=True, cwd=ROOT) for command in commands]
    assert [one.returncode for one in found] == [FAILED, DONE]
    assert re.fullmatch(
        r"error: \[Errno 24\] Too many open files: '.*/a': this process may open 40 files; raise the hard limit first, "
        r"e.g. ulimit -n 4096\n",
        found[0].stderr,
    )


def test_a_host_with_too_many_open_files_is_told_from_the_limit_of_a_process(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    cause = OSError(errno.ENFILE, os.strerror(errno.ENFILE))
    error = SaveFailed(f"saving a failed: {cause}")
    error.__cause__ = cause
    for one in (cause, error):
        assert raising(one) == FAILED
        printed = capsys.readouterr().err
        assert "the host has reached its limit of open files" in printed
        assert "this process may open" not in printed


def test_credentials_are_not_printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Neither of a message nor of a traceback."""
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    text = "https://me:hidden@host/x?X-Amz-Signature=hidden wandb.api_key=hidden"
    for error in (DataError(text), RuntimeError(text)):
        raising(error)
        printed = capsys.readouterr().err
        assert "host/x" in printed
        assert "hidden" not in printed


@pytest.mark.parametrize("blocked", ["while True: pass", "import ctypes; ctypes.PyDLL(None).sleep(60)"])
def test_ranks_end_with_an_agent_that_is_killed(blocked: str) -> None:
    """In Python or in native code that holds its lock."""
    job = f"print(1, flush=True)\n{blocked}"
    rank = f"from megafp8.training.errors import run_and_report\nrun_and_report(lambda: exec({job!r}))"
    agent = (
        "import os, subprocess, sys\nos.environ['MEGAFP8_AGENT_PID'] = str(os.getpid())\n"
        f"rank = subprocess.Popen([sys.executable, '-c', {rank!r}], start_new_session=True)\n"
        "print(rank.pid, flush=True)\nrank.wait()"
    )
    process = subprocess.Popen([sys.executable, "-c", agent], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    assert process.stdout.readline() == "1\n"  # the rank is in the job
    process.kill()
    process.wait()
    status = Path(f"/proc/{pid}/status")
    deadline = time.monotonic() + 10
    while status.exists() and "zombie" not in status.read_text():
        assert time.monotonic() < deadline, "the rank lives on"
        time.sleep(0.01)


def test_nothing_is_printed_after_a_rank_was_killed(caplog: pytest.LogCaptureFixture) -> None:
    """Neither by the process that removes its semaphores, nor by torch's agent, whose other messages are shown."""
    rank = (
        "import multiprocessing, os\nfrom megafp8.training.errors import run_and_report\n"
        "def job():\n  kept = multiprocessing.get_context('spawn').Lock()\n  os.kill(os.getpid(), 9)\n"
        "run_and_report(job)"
    )
    done = subprocess.run([sys.executable, "-c", rank], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stderr) == (-signal.SIGKILL, "")
    loggers = [logging.getLogger(f"torch.distributed.{name}") for name in TORCH_LOGGERS]
    with contextlib.ExitStack() as stack:
        for logger in loggers:
            stack.enter_context(mock.patch.object(logger, "filters", []))
            logger.addHandler(caplog.handler)
            stack.callback(logger.removeHandler, caplog.handler)
        hide_torch_messages()
        multiprocessing_logger = logging.getLogger("torch.distributed.elastic.multiprocessing.api")
        for message in (
            "Sending process %s closing signal %s",
            "Unable to shutdown process %s via %s",
            "Process %s is %s",
        ):
            multiprocessing_logger.warning(message, 7, "SIGTERM")
    assert set(caplog.messages) == {"Process 7 is SIGTERM"}
