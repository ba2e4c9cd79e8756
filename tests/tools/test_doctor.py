"""`megafp8 doctor`: a line for what is there, what is missing and what is broken, and its exit code."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megafp8 import nn
from megafp8.host.shipped import install_command
from tools import doctor

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

ROOT = Path(__file__).resolve().parents[2]


def said(capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, str]]:
    """The exit code, and the last line of each check."""
    code = doctor.main([])
    lines = [line for line in capsys.readouterr().out.splitlines() if line[:4] in ("pass", "warn", "fail")]
    return code, {line[6:].split("  ")[0]: line for line in lines}


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes packages look as if they were not installed, or of another version."""

    def pretend(**versions: str | None) -> None:
        real = doctor.installed_version
        monkeypatch.setattr(doctor, "installed_version", lambda name: versions.get(name, real(name)))

    return pretend


def test_every_extra_is_described() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(doctor.EXTRAS) == set(project["optional-dependencies"]) - {"dev", "docs"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine without GPU")
def test_a_machine_without_gpu_is_usable(capsys: pytest.CaptureFixture[str], without: Callable[..., None]) -> None:
    without(**{"flash-qla": None, "nvmath-python": None})
    code, lines = said(capsys)
    assert code == 0
    assert lines["extra gpu"].startswith("pass"), "nothing that needs a GPU is missed"
    assert lines["extra gpu"].endswith("not installed, and useful on GPUs only")
    assert lines["extra recurrent"].startswith("pass")
    assert lines["extra recurrent"].endswith("not installed, and useful on Hopper GPUs only")
    assert lines["torch"] == f"pass  {'torch':<{lines['torch'].index(torch.__version__) - 6}}{torch.__version__}, " + (
        f"CUDA {torch.version.cuda}" if torch.version.cuda else "for CPUs"
    )
    assert lines["GPUs"].startswith("warn")
    assert "differs from bf16 by 3." in lines["FP8 layer"]


def test_missing_packages_are_named_with_what_installs_them(
    capsys: pytest.CaptureFixture[str], without: Callable[..., None]
) -> None:
    without(tiktoken=None, uvicorn="0.1")
    code, lines = said(capsys)
    assert code == 0
    assert lines["extra data"].startswith("warn")
    assert "tiktoken is missing" in lines["extra data"]
    assert install_command("data") in lines["extra data"]
    assert "uvicorn is 0.1, not >=0.34: no megafp8 serve" in lines["extra server"]
    without(pydantic="1.9")
    code, lines = said(capsys)
    assert code == 1
    assert lines["packages"].startswith("fail")
    assert "pydantic is 1.9" in lines["packages"]


def test_torch_that_cannot_be_imported(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    code, lines = said(capsys)
    assert code == 1
    assert "cannot be imported" in lines["torch"]
    assert "packages" in lines


@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine without GPU")
def test_a_driver_whose_gpu_torch_does_not_see(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: "/usr/bin/nvidia-smi" if name == "nvidia-smi" else None)
    code, lines = said(capsys)
    assert code == 1
    assert lines["GPUs"].startswith("fail")
    assert "torch sees no GPU" in lines["GPUs"]


def test_a_layer_that_computes_nonsense_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = nn.Linear.forward, iter((1.5, 1.0))
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: real(self, x) * next(calls))
    assert doctor.compute(torch.device("cpu"), "test").status == "fail"


def test_kernels_need_triton_and_a_compiler(monkeypatch: pytest.MonkeyPatch, without: Callable[..., None]) -> None:
    without(triton="3.6.0")
    assert [finding.status for finding in doctor.check_triton()] == ["pass"]
    monkeypatch.setattr(shutil, "which", lambda name: None)
    (finding,) = doctor.check_triton()
    assert finding.status == "fail"
    assert "C compiler" in finding.text
    without(triton=None)
    assert "missing" in next(doctor.check_triton()).text
