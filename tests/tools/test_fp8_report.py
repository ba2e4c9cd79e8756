"""tools/fp8_report.py on synthetic run folders: text, heat map and errors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml
from matplotlib.image import imread

from megafp8.fp8.health import EXACT_DB, FILE_NAME, OPERANDS, Fp8Record, ReportWriter
from megafp8.training.fp8_records import grid, ordered_layers
from tools import fp8_report

CONFIG = Path(__file__).resolve().parents[2] / "configs" / "quickstart.yaml"
KINDS = ("attention.qkv", "attention.proj", "mlp.gate_up", "mlp.down")


def healthy(steps: Sequence[int] = (100, 200, 300), layers: int = 3) -> list[Fp8Record]:
    return [
        Fp8Record(
            step,
            f"layers.{i}.{kind}",
            operand,
            amax=2.0,
            scale=224.0,
            underflow=1e-5,
            saturated=0.0,
            snr_db=25.5 if operand == "grad_output" else 31.5,
        )
        for step in steps
        for operand in OPERANDS
        for i in range(layers)
        for kind in KINDS
    ]


def run_folder(path: Path, records: Sequence[Fp8Record], name: str = "config.yaml", **fp8: object) -> Path:
    """A run's folder with the report `records`, started with the section `fp8`."""
    path.mkdir(exist_ok=True)
    writer = ReportWriter(path / FILE_NAME, 0)
    writer.write(records)
    writer.close()
    config = yaml.safe_load(CONFIG.read_text())
    (path / name).write_text(yaml.safe_dump({**config, "fp8": fp8}))
    return path


def with_trouble() -> list[Fp8Record]:
    """Two bad tensors at step 200 and after, a broken one at step 300, an exact one always."""
    found = []
    for r in healthy():
        if (r.layer, r.operand) == ("layers.1.mlp.down", "input") and r.step >= 200:
            r = replace(r, saturated=0.02, snr_db=20.0)
        if (r.layer, r.operand) == ("layers.2.attention.qkv", "grad_output") and r.step >= 200:
            r = replace(r, underflow=0.25, snr_db=24.0)
        if (r.layer, r.operand) == ("layers.0.attention.proj", "input") and r.step == 300:
            r = replace(r, amax=None, snr_db=None)
        if (r.layer, r.operand) == ("layers.0.mlp.gate_up", "weight"):
            r = replace(r, snr_db=EXACT_DB)
        found.append(r)
    return found


def shown(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    assert fp8_report.main([str(argument) for argument in arguments]) == 0
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    assert fp8_report.main([str(argument) for argument in arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    return captured.err


def test_table_summary_and_advice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run_folder(tmp_path / "run", with_trouble(), recipe="delayed", format="e4m3", exclude=["layers.3.*"])
    lines = shown(capsys, folder, "--worst", "4").splitlines()
    assert "step 300: 36 tensors" in lines[0]
    rows = [line.split() for line in lines[3:7]]
    assert rows[0] == ["layers.0.attention.proj", "input", "-", "-", "0.00%", "0.000%", "-", "224"]
    assert rows[1] == ["layers.1.mlp.down", "input", "20.0", "-11.5", "0.00%", "2.000%", "2", "224"]
    assert rows[2] == ["layers.2.attention.qkv", "grad_output", "24.0", "-1.5", "25.00%", "0.000%", "2", "224"]
    assert lines[7] == ""
    assert lines[9].split() == ["input", "12", "31.5", "20.0", "0.00%", "0.167%", "1"]
    assert lines[10].split() == ["weight", "12", "31.5", "31.5", "0.00%", "0.000%", "0"]
    assert lines[11].split() == ["grad_output", "12", "25.5", "24.0", "2.08%", "0.000%", "0"]
    text = "\n".join(lines)
    assert "- layers.1.mlp.down input: 1.33% of the elements are clamped" in text
    assert "- layers.2.attention.qkv grad_output: 16.7% of the gradient underflows" in text
    assert yaml.safe_load(text[text.index("fp8:") :]) == {"fp8": {"recipe": "current", "format": "hybrid"}}


def test_an_earlier_step_is_advised_by_what_was_known_then(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run_folder(tmp_path / "run", with_trouble(), recipe="delayed", format="e4m3")
    text = shown(capsys, folder, "--step", "100")
    assert "step 100: 36 tensors" in text
    assert "Advice: none, all tensors are healthy." in text
    assert len(text.split("\n\n")[1].splitlines()) == 21  # a head and twenty


def test_tensors_that_are_not_finite_are_not_called_healthy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    last = max(record.step for record in healthy())
    broken = [
        replace(r, amax=None, snr_db=None, saturated=0.5) if (r.step, r.operand) == (last, "grad_output") else r
        for r in healthy()
    ]
    text = shown(capsys, run_folder(tmp_path / "run", broken, recipe="delayed"))
    assert f"Advice: none, as 12 tensors are not finite in step {last}, " in text


def test_advice_knows_the_config_that_the_run_was_resumed_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = [replace(r, underflow=0.2) if r.operand == "grad_output" else r for r in healthy()]
    folder = run_folder(tmp_path / "run", records, recipe="blockwise")  # E4M3 by default
    assert "format: hybrid" in shown(capsys, folder)
    for step, recipe in ((200, "blockwise"), (1200, "delayed")):
        run_folder(folder, records, f"config-from-step-{step:08d}.yaml", recipe=recipe)
    assert "Advice: none, all tensors are healthy." in shown(capsys, folder)
    run_folder(folder, records, "config-from-step-00001300.yaml", recipe="none")
    assert "fp8.recipe none" in shown(capsys, folder)


def test_four_bits_are_not_told_to_take_a_format_they_cannot(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = [replace(r, underflow=0.1) for r in healthy()]
    assert "format: hybrid" in shown(capsys, run_folder(tmp_path / "run", records, recipe="mxfp8"))
    assert "Advice: none" in shown(capsys, run_folder(tmp_path / "run4", records, recipe="nvfp4"))


def test_the_grid_puts_a_kind_of_layer_together(tmp_path: Path) -> None:
    records = healthy(steps=(10, 20), layers=11)
    layers = ordered_layers([*records, replace(records[0], layer="output")])
    assert layers[:3] == ["layers.0.attention.qkv", "layers.1.attention.qkv", "layers.2.attention.qkv"]
    assert layers[10:12] == ["layers.10.attention.qkv", "layers.0.attention.proj"]
    assert layers[-2:] == ["layers.10.mlp.down", "output"]
    marked = [
        replace(r, amax=8.0 if r.step == 20 else None, underflow=0.5)
        if (r.layer, r.operand) == ("layers.1.attention.proj", "weight")
        else r
        for r in records
    ]
    amax = grid(marked, "weight", "amax")
    assert amax.shape == (44, 2)
    assert math.isnan(amax[12, 0])
    assert amax[12, 1] == 3
    assert np.nansum(amax == 1) == 86
    assert (grid(marked, "weight", "underflow") == 0.5).sum(axis=1).tolist() == [0] * 12 + [2] + [0] * 31
    assert np.isnan(grid([*records, replace(records[0], layer="output")], "weight", "amax")[-1]).all()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "records",
    [
        pytest.param(healthy(steps=range(10, 500, 10), layers=8), marks=pytest.mark.slow),
        pytest.param(healthy(steps=[7], layers=1)[:1], marks=pytest.mark.slow),
        pytest.param(
            [replace(r, amax=None if r.operand == "input" else 0.0, snr_db=None) for r in healthy(steps=[7])],
            marks=pytest.mark.slow,
        ),
    ],
    ids=["large", "one tensor", "no figures"],
)
def test_heat_map(records: list[Fp8Record], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run_folder(tmp_path / "run", records, recipe="current")
    png = tmp_path / "map.png"
    assert f"heat map: {png}" in shown(capsys, folder, "--png", png)
    image = imread(png)
    assert image.shape[0] > 600
    assert image.shape[1] == 1760
    assert len(np.unique(image.reshape(-1, image.shape[2]), axis=0)) > 50


def test_what_it_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "nowhere; give a run" in refused(capsys, tmp_path / "nowhere")
    (tmp_path / "run").mkdir()
    assert "switch it on with fp8.report_interval=100" in refused(capsys, tmp_path / "run")
    folder = run_folder(tmp_path / "run", [], recipe="current")
    assert "no step has been sampled yet" in refused(capsys, folder)
    run_folder(folder, healthy(), recipe="current")
    assert "there are 3, among them [100, 200, 300]" in refused(capsys, folder, "--step", "250")
    assert "--step first is not a sampled step" in refused(capsys, folder, "--step", "first")
    (folder / FILE_NAME).write_text("loss\n")
    assert "line 1 is not a line of an FP8 report" in refused(capsys, folder)


@pytest.mark.slow
def test_a_png_that_cannot_be_written_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run_folder(tmp_path / "run", healthy(), recipe="current")
    assert fp8_report.main([str(folder), "--png", str(tmp_path / "no" / "map.png")]) == 2
    assert capsys.readouterr().err.startswith("error: ")
