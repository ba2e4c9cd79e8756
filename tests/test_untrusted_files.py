"""Damaged and crafted files: a part of the trial; and that the trial sees what it looks for."""

from __future__ import annotations

import json
import os
import pathlib
import pickle
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import untrusted_files
from tests.untrusted_files import Case

ROOT = Path(__file__).resolve().parents[1]


def _in_a_process(*arguments: str) -> str:
    """What Python prints with these arguments, in a process of its own: the trial forks, which needs one thread."""
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_part_of_the_trial() -> None:
    printed = _in_a_process("-c", "from tests.untrusted_files import failures; print(*failures(600, 100))")
    cases, failed = printed.splitlines()[-1].split(" ", 1)
    assert int(cases) > 150
    assert failed == "[]"


def _patch(_: Path) -> None:
    pathlib.PosixPath.patched = 1  # type: ignore[attr-defined]


def _keep(path: Path) -> None:
    assert len(bytearray(300_000_000)) > 0
    raise ValueError(str(path))


BAD: dict[str, tuple[Any, str]] = {
    "raises": (lambda path: {}["x"], "KeyError"),
    "names no file": (lambda path: int("x"), "the error does not name the file"),
    "memory": (_keep, "MB"),
    "writes": (lambda path: (path.parent / "new").write_text("x"), "effects: .*open .*/new for writing"),
    "unpickles": (lambda path: pickle.loads(pickle.dumps(Path("/"))), "effects: .*pickle.find_class"),
    "runs": (lambda path: os.system("true"), "effects: .*os.system"),
    "patches": (_patch, "effects: .*PosixPath was patched"),
    "ends": (lambda path: os._exit(3), "the process ended: 3"),
}


def trial_of_bad_readers(folder: str) -> None:
    """Print the problem that the trial sees with each reader of `BAD`, as JSON."""
    pristine = Path(folder) / "pristine"
    untrusted_files.make_checkpoints(pristine)
    cases = [Case("crafted x", name, lambda folder: folder / "x", read) for name, (read, _) in BAD.items()]
    print(json.dumps([result["problem"] for result in untrusted_files.run(cases, pristine, Path(folder), 1)]))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_trial_sees_what_it_looks_for(tmp_path: Path) -> None:
    module = "tests.test_untrusted_files"
    printed = _in_a_process("-c", f"import {module} as x; x.trial_of_bad_readers({str(tmp_path)!r})")
    problems = json.loads(printed.splitlines()[-1])
    for (name, (_, expected)), problem in zip(BAD.items(), problems, strict=True):
        assert re.search(expected, problem), (name, problem)
