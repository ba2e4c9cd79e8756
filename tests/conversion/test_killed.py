"""A conversion that is killed at any moment: no target or a complete one, and the same command completes it."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest
import torch

from megafp8.conversion.formats import FORMATS, open_source
from megafp8.conversion.target import JOURNAL_FILE, Journal
from tests.checkpoint.killing import die_before, slow_down, start
from tests.conversion import checkpoints
from tests.marks import slow_but
from tools import convert_checkpoint


def convert_and_die(command: list[str], change: int) -> None:
    Journal.__init__.__kwdefaults__["seconds"] = 0.02
    die_before(change)
    assert convert_checkpoint.main(command) == 0


def convert_slowly(command: list[str]) -> None:
    """Convert in about a second."""
    Journal.__init__.__kwdefaults__["seconds"] = 0.02
    slow_down()
    assert convert_checkpoint.main(command) == 0


def command(folder: Path, format: str) -> list[str]:
    return ["--load", str(folder.parent / "run"), "--save", str(folder / "target"), "--to", format, "--verify"]


def complete(folder: Path, format: str) -> None:
    """Repeat the command, if need be; then there is the target, with every value, and nothing else."""
    target = folder / "target"
    if target.exists():
        FORMATS[format].source(target)  # a visible target is whole
    if not target.exists() or len(list(folder.iterdir())) > 1:
        assert convert_checkpoint.main(command(folder, format)) == 0
    assert [path.name for path in folder.iterdir()] == ["target"]
    found, expected = open_source(target), checkpoints.everything()
    names = checkpoints.weights() if FORMATS[format].weights_only else expected
    assert found.tensors.keys() == names.keys()
    vocabulary = checkpoints.MODEL.stem.vocab_size
    for name in names:
        meaningful = slice(vocabulary if expected[name].dim() == 2 and len(expected[name]) > 100 else None)
        both = (found.read(name), expected[name])
        assert torch.equal(*(one[meaningful] if one.dim() else one for one in both)), name


@pytest.mark.parametrize("format", slow_but(checkpoints.FORMATS, "hf"))
def test_at_changes_of_the_disk(tmp_path: Path, format: str) -> None:
    checkpoints.make(tmp_path / "run")
    killed = 0
    for change in range(0, 1000, 13 if format == "native" else 11):
        folder = tmp_path / str(change)
        process = start(convert_and_die, command(folder, format), change)
        process.join(60)
        complete(folder, format)
        if process.exitcode == 0:
            break
        assert process.exitcode == -9
        killed += 1
    assert process.exitcode == 0, "it was killed at every change, so it never ended"
    assert killed >= 2


def kill_at_random(tmp_path: Path, format: str, cases: int) -> None:
    checkpoints.make(tmp_path / "run")
    begun = 0
    for case in range(cases):
        folder = tmp_path / str(case)
        process = start(convert_slowly, command(folder, format))
        deadline = time.monotonic() + 60
        while not folder.exists() and time.monotonic() < deadline:
            time.sleep(0.005)
        time.sleep(random.uniform(0, 0.8))
        process.kill()
        process.join()
        begun += any(folder.glob(f".target.*/{JOURNAL_FILE}"))
        complete(folder, format)
    assert begun or cases == 1  # or all were killed too early, and nothing was shown


@pytest.mark.parametrize("format", slow_but(checkpoints.FORMATS, *list(checkpoints.FORMATS)[:2]))
def test_at_a_random_moment(tmp_path: Path, format: str) -> None:
    kill_at_random(tmp_path, format, 1)


@pytest.mark.slow
@pytest.mark.parametrize("format", checkpoints.FORMATS)
def test_at_twenty_random_moments(tmp_path: Path, format: str) -> None:
    kill_at_random(tmp_path, format, 20)
