"""The version is in one place, and what repeats it agrees; so does the table of what is supported."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from megafp8 import __version__

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

ROOT = Path(__file__).resolve().parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]


def test_the_version_is_the_same_everywhere() -> None:
    assert PROJECT["dynamic"] == ["version"]
    assert PYPROJECT["tool"]["setuptools"]["dynamic"] == {"version": {"attr": "megafp8.__version__"}}
    assert f"\nversion: {__version__}\n" in (ROOT / "CITATION.cff").read_text()
    changes = re.findall(r"^## (.*)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert changes[0] == "Unreleased"
    assert re.fullmatch(rf"{re.escape(__version__)} - \d{{4}}-\d\d-\d\d", changes[1])
    files = [ROOT / "Dockerfile", *(ROOT / "launch" / "kubernetes").glob("*.yaml")]
    tags = [tag for file in files for tag in re.findall(r"/megafp8:([\w.]+)", file.read_text())]
    assert len(tags) >= 7
    assert set(tags) == {__version__}
    assert (ROOT / "tests" / "formats" / f"{__version__}.tar.xz").exists(), "python -m tests.formats.make writes it"


def test_the_table_of_requirements_is_the_package_s() -> None:
    table = (ROOT / "README.md").read_text().split("### Requirements\n")[1].split("\n## ")[0]
    rows = {
        name: (supported, tested)
        for name, supported, tested in re.findall(r"^\| (\w+) \| (.*) \| (.*) \|$", table, re.M)
    }
    pythons = [x.rpartition(" ")[2] for x in PROJECT["classifiers"] if x.startswith("Programming Language")]
    assert rows["Python"] == (f"{pythons[0]} to {pythons[-1]}", ", ".join(pythons))
    assert PROJECT["requires-python"] == f">={pythons[0]}"
    assert f"least = ({pythons[0].replace('.', ', ')})" in (ROOT / "tools" / "doctor.py").read_text()
    (torch,) = (Requirement(x) for x in PROJECT["dependencies"] if Requirement(x).name == "torch")
    assert rows["torch"][0] == f"{str(torch.specifier).removeprefix('>=')} or newer"
    tested = re.findall(r"\d+\.\d+", rows["torch"][1])
    assert all(version in torch.specifier for version in tested)
    gpu = {Requirement(x).name: Requirement(x) for x in PROJECT["optional-dependencies"]["gpu"]}
    cuda = rows["CUDA"][0]
    assert gpu["nvmath-python"].extras == {f"cu{cuda}"}
    assert gpu["cuda-bindings"].specifier == SpecifierSet(f">={cuda}")
    assert "capability 9.0" in rows["GPU"][0]
    assert "(capability 9.0)" in (ROOT / "tools" / "doctor.py").read_text()
