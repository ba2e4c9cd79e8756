"""The quickstart's own part: which commands it runs, what it prints last, and how it stops."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

import pytest

from tools import quickstart


def test_the_steps_that_are_left_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    commands: list[str] = []

    def run(*words: str | Path) -> None:
        commands.append(str(words[0]))
        if words[0] == "train-tokenizer":
            quickstart.DATA.joinpath("tokenizer.model").touch()
        elif words[0] == "preprocess":
            quickstart.DATA.joinpath("stdlib.idx").touch()
        else:
            Path("out/mine/checkpoints/step_00000100").mkdir(parents=True, exist_ok=True)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(quickstart, "run", run)
    monkeypatch.setattr(quickstart, "device", list)
    for wrong, message in (
        ("training.stepz=3", "did you mean training.steps?"),
        ("parallel.tensor=3", "parallel.tensor = 3: "),
        ("parallel.pipeline=4", "the world has 4 ranks, not a multiple of 8"),
    ):
        assert quickstart.main([wrong]) == 2
        assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
    mine = ["run_dir=out", "name=mine"]
    for again, expected in ((False, ["train-tokenizer", "preprocess", "launch"]), (True, ["launch"])):
        commands.clear()
        assert quickstart.main(mine) == 0
        assert commands == expected
        checkpoint, took, *done, following = capsys.readouterr().out.splitlines()[-4 if again else -3 :]
        assert checkpoint == "checkpoint: out/mine/checkpoints/step_00000100"
        assert took.startswith("quickstart took ")
        assert done == ["the run was already done; to train another one: megafp8 quickstart name=another"] * again
        assert following == 'next: megafp8 generate out/mine "def main("; megafp8 plot-run out/mine --html run.html'


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_lets_the_command_end_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    command = tmp_path / "command"
    # The terminal would send SIGINT to the command, too.
    ends = "sleep 1" if number == signal.SIGINT else "while :; do sleep 0.05; done"
    command.write_text(f"#!/bin/bash\ntrap 'touch {tmp_path}/saved; exit 0' TERM\n{ends}\ntouch {tmp_path}/saved\n")
    command.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(command))
    threading.Timer(0.3, os.kill, (os.getpid(), number)).start()
    with pytest.raises(SystemExit) as ended:
        quickstart.run("launch")
    assert ended.value.code == 130
    assert (tmp_path / "saved").exists()
