"""Lower bounds of dependencies: none admits a version with a known hole that concerns this package."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from megafp8 import __version__
from megafp8.host import shipped
from megafp8.layers.attention import flash_kernel

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

ROOT = Path(__file__).resolve().parents[1]
FIRST_WITHOUT = {
    "h11": ("0.16", "CVE-2025-43859: request smuggling by chunked bodies"),
    "jinja2": ("3.1.6", "CVE-2025-27516: a template leaves the sandbox"),
    "sentencepiece": ("0.2.1", "CVE-2026-1260: memory errors in loading a model file"),
    "starlette": ("0.49.1", "CVE-2025-62727: quadratic time in Range headers; CVE-2025-54121: large forms block"),
    "torch": ("2.6", "CVE-2025-32434: torch.load with weights_only runs code"),
    "tqdm": ("4.66.3", "CVE-2024-34062: arguments of the command line are evaluated"),
}
"""By package the first version without these holes."""


def _requirements() -> dict[str, list[Requirement]]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lists = [project["dependencies"], *project["optional-dependencies"].values()]
    found: dict[str, list[Requirement]] = {}
    for text in (text for own in lists for text in own):
        found.setdefault(canonicalize_name(Requirement(text).name), []).append(Requirement(text))
    return found


@pytest.mark.parametrize("package", FIRST_WITHOUT)
def test_no_version_with_a_known_hole_is_admitted(package: str) -> None:
    least, hole = FIRST_WITHOUT[package]
    requirements = _requirements()[package]
    for requirement in requirements:
        bounds = [Version(x.version) for x in requirement.specifier if x.operator in (">=", "==", "~=")]
        assert bounds, f"{requirement} has no lower bound"
        assert max(bounds) >= Version(least), f"{requirement} admits {hole}"


def _written() -> Iterator[tuple[Path, str]]:
    """Yield what users read, and the package's code."""
    folders = ("megafp8", "tools", "launch", "configs", "examples", "tests")
    paths = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "docs" / "decisions").glob("*.md")]
    paths += [
        path for folder in folders for suffix in ("*.py", "*.yaml", "*.md") for path in (ROOT / folder).rglob(suffix)
    ]
    for path in paths:
        if path.name not in ("LOG.md", "shipped.py", Path(__file__).name):
            yield path, path.read_text(encoding="utf-8")


def test_there_is_one_form_of_installing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Documentation has a checkout, `pip install '.[hf]'`, or its wheel; messages have `install_command`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wheel = re.escape(f"dist/megafp8-{__version__}-py3-none-any.whl")
    line = re.compile(rf"pip install '(?:\.|{wheel})\[([a-z0-9,]+)\]'")
    others, extras = [], set()
    for path, text in _written():
        for found in re.findall(r"pip install[^\n`]*(?:megafp8|\.\[|-e)[^\n`]*|megafp8\[[a-z,]+\]", text):
            match = line.match(found)
            extras.update(match[1].split(",") if match else ())
            others += [] if match else [f"{path.relative_to(ROOT)}: {found}"]
    assert others == []
    assert {"gpu", "hf", "server"} < extras <= set(project["optional-dependencies"])
    assert shipped.install_command("hf,data") == f"pip install -e '{ROOT}[hf,data]'"
    monkeypatch.setattr(shipped, "is_checkout", lambda: False)
    assert shipped.install_command("hf") == "pip install 'megafp8[hf]'"
    assert shipped.install_command() == "pip install megafp8"


def test_images_are_pinned() -> None:
    images = [
        image
        for path in (ROOT / "launch" / "kubernetes").glob("*.yaml")
        for image in re.findall(r"^\s*(?:- )?image:\s*(\S+)", path.read_text(), re.MULTILINE)
    ]
    images += re.findall(r"^ARG BASE=(\S+)", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    assert len(images) >= 3
    for image in images:
        assert re.fullmatch(r"\S+(:\d[\w.-]*|@sha256:[0-9a-f]{64})", image), f"{image} may be another one tomorrow"


def test_flash_attention_has_the_version_that_is_called() -> None:
    assert [str(x.specifier) for x in _requirements()["flash-attn-4"]] == [f"=={flash_kernel.VERSION}"]
