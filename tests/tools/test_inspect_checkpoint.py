"""tools/inspect_checkpoint.py: its figures against torch's on the tensors that were saved."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megafp8.checkpoint import Rectangle, Rectangles, save
from tests.conversion import checkpoints
from tools import convert_checkpoint, inspect_checkpoint

CONFIG = {"model": {"num_layers": 12}, "seed": 1}


def _tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    state = {
        "model.layers.2.w": torch.randn(40, 30, generator=generator).bfloat16(),
        "model.layers.10.w": torch.randn(7, 5, 3, generator=generator),
        "optimizer.exp_avg.layers.2.w": torch.randn(40, 30, generator=generator),
        "fp8.scale": torch.tensor(2.5),
        "fp8.step": torch.tensor(3),
        "fp8.flags": torch.tensor([True, False]),
        "none": torch.zeros(0, 4),
    }
    state["model.layers.10.w"][1, 2, 0] = math.nan
    return state


def _save(folder: Path, state: dict[str, Tensor], **about: Any) -> str:
    """With one tensor in four rectangles."""
    w = state["model.layers.2.w"]
    cut = [Rectangle((r, c), w[r : r + 20, c : c + 15]) for r in (0, 20) for c in (0, 15)]
    whole: dict[str, Any] = {**state, "model.layers.2.w": Rectangles((40, 30), w.dtype, cut)}
    metadata = {"tokens": 4096, "layout": {"ranks": 4, "tensor": 2, "pipeline": 2}, "config": CONFIG, **about}
    return str(save(folder, 3, whole, metadata))


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megafp8.training.inspect_checkpoint._BLOCK", 100)


def _json(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    code = inspect_checkpoint.main([*arguments, "--json"])
    captured = capsys.readouterr()
    assert captured.err == ""
    return code, json.loads(captured.out, parse_constant=lambda text: pytest.fail(f"{text} is no JSON"))


def test_norms_are_those_of_the_tensors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = _tensors()
    code, found = _json(capsys, _save(tmp_path, state), "--norms")
    assert code == 0
    records = {record["name"]: record for record in found["tensors"]}
    assert records.keys() == state.keys()
    assert [name for name in records if name.startswith("model")] == ["model.layers.2.w", "model.layers.10.w"]
    for name, tensor in state.items():
        record, values = records[name], tensor.double()[~tensor.double().isnan()]
        assert (record["shape"], record["dtype"]) == (list(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        assert record["nan"] == tensor.isnan().sum().item() == (name == "model.layers.10.w")
        assert record["norm"] == pytest.approx(torch.linalg.vector_norm(values).item(), rel=1e-12)
        if len(values.flatten()):
            assert (record["min"], record["max"]) == (values.min().item(), values.max().item())
    assert records["none"]["min"] == "inf"
    assert records["model.layers.2.w"]["rectangles"] == 4
    assert found["groups"]["optimizer.exp_avg"] == {"tensors": 1, "bytes": 4800}
    assert found["groups"]["model"] == {"tensors": 2, "bytes": 2400 + 420}
    assert found["metadata"]["tokens"] == 4096


def test_what_a_person_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = _save(tmp_path, _tensors())
    assert inspect_checkpoint.main([path, "--tensors", "model.*"]) == 0
    text = capsys.readouterr().out
    assert "step 3, 4,096 tokens" in text
    assert "layout: 4 ranks  tensor 2  pipeline 2" in text
    rows = [line.split() for line in text.splitlines() if line.startswith("model.layers")]
    assert rows == [["model.layers.2.w", "40×30", "bfloat16", "4"], ["model.layers.10.w", "7×5×3", "float32", "1"]]
    assert inspect_checkpoint.main([path, "--norms"]) == 0
    assert "scalar  float32            1          2.5          2.5          2.5       0" in capsys.readouterr().out


def test_equal_checkpoints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = _tensors()
    paths = _save(tmp_path / "a", state), _save(tmp_path / "b", state, config={"model": {"num_layers": 12}, "seed": 2})
    code, found = _json(capsys, paths[0], "--diff", paths[1])
    assert code == 0
    assert found["difference"] == {
        "only_here": [], "only_there": [], "shape_or_dtype": {}, "values": {}, "equal": 7, "config": ["seed 1 -> 2"],
    }  # fmt: skip
    assert inspect_checkpoint.main([paths[0], "--diff", paths[1]]) == 0
    assert "equal tensors: 7\nconfig:\n  seed 1 -> 2\n" in capsys.readouterr().out


def test_differences(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    here, there = _tensors(), _tensors()
    here["model.layers.2.w"][33, 29] += 1
    here["fp8.new"] = torch.tensor(0.0)
    there["optimizer.old"] = torch.tensor(0.0)
    there["fp8.flags"] = torch.tensor([1.0, 0.0])
    here["optimizer.exp_avg.layers.2.w"][5, 5] = math.nan
    paths = _save(tmp_path / "a", here), _save(tmp_path / "b", there)
    code, found = _json(capsys, paths[0], "--diff", paths[1])
    assert code == 1
    a, b = here["model.layers.2.w"].double(), there["model.layers.2.w"].double()
    difference = found["difference"]
    assert difference["values"] == {
        "model.layers.2.w": {
            "max_abs": (a - b).abs().max().item(), "relative": pytest.approx(((a - b).norm() / b.norm()).item()),
        },
        "optimizer.exp_avg.layers.2.w": {"max_abs": "nan", "relative": "nan"},
    }  # fmt: skip
    assert (difference["only_here"], difference["only_there"]) == (["fp8.new"], ["optimizer.old"])
    assert difference["shape_or_dtype"] == {"fp8.flags": ["[2] bool", "[2] float32"]}
    assert difference["equal"] == 4
    assert inspect_checkpoint.main([paths[0], "--diff", paths[1]]) == 1
    text = capsys.readouterr().out
    assert f"only in {paths[1]}: 1\n  optimizer.old\n" in text
    assert "fp8.flags  [2] bool -> [2] float32" in text
    assert inspect_checkpoint.main([paths[0], "--diff", paths[1], "--tensors", "*.10.*"]) == 0


@pytest.mark.parametrize(
    ("path", "arguments", "message"),
    [
        ("elsewhere", [], "there is no checkpoint "),
        ("step_0000003", [], "step_00000003?"),
        ("step_00000003", ["--tensors", "nothing"], "no tensor is called nothing; the first is fp8.flags"),
        ("step_00000003", ["--diff", "/dev"], "/dev is not a checkpoint: it has no metadata.json"),
    ],
)
def test_errors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], path: str, arguments: list[str], message: str
) -> None:
    _save(tmp_path, _tensors())
    assert inspect_checkpoint.main([str(tmp_path / path), *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert message in captured.err


def test_a_run_and_a_model_of_hugging_face(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a run the newest checkpoint; a converted model has the tensors of its checkpoint, by our names."""
    run = tmp_path / "run"
    _save(run / "checkpoints", _tensors())
    assert inspect_checkpoint.main([str(run)]) == 0
    assert str(run / "checkpoints" / "step_00000003") in capsys.readouterr().out
    model = checkpoints.make(tmp_path / "native", checkpoints.weights())
    assert convert_checkpoint.main(["--load", str(model), "--save", str(tmp_path / "hf"), "--to", "hf"]) == 0
    capsys.readouterr()
    assert inspect_checkpoint.main([str(tmp_path / "hf"), "--norms"]) == 0
    assert "format hf, a model of type " in capsys.readouterr().out
    assert inspect_checkpoint.main([str(model), "--diff", str(tmp_path / "hf"), "--tensors", "model.layers.*"]) == 0
