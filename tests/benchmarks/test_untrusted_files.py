"""Damaged and crafted files: a part of the trial; and that the trial sees what it looks for."""

from __future__ import annotations

import os
import pathlib
import pickle
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks import untrusted_files
from benchmarks.untrusted_files import Case


def test_a_part_of_the_trial(capsys: pytest.CaptureFixture[str]) -> None:
    assert untrusted_files.main(["--every", "600", "--crafted", "100", "--workers", "1"]) == 0, capsys.readouterr().out
    assert "| crafted pickles | 50 |" in capsys.readouterr().out


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


def test_the_trial_sees_what_it_looks_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pristine = tmp_path / "pristine"
    untrusted_files.make_checkpoints(pristine)
    cases = [Case("crafted x", name, lambda folder: folder / "x", read) for name, (read, _) in BAD.items()]
    results = untrusted_files.run(cases, pristine, tmp_path, 1)
    for case, result in zip(cases, results, strict=True):
        assert re.search(BAD[case.name][1], result["problem"]), (case.name, result)
