"""tools/plot_run.py on made run folders: numbers, events, size, and the page in a headless browser."""

from __future__ import annotations

import datetime
import html
import json
import math
import random
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from matplotlib.image import imread

from megafp8.fp8.health import OPERANDS, Fp8Record, ReportWriter
from megafp8.training import run_data
from megafp8.training.goodput import PARTS
from megafp8.training.plot_run import page as html_page
from megafp8.training.run_data import Curve, downsample
from tools import plot_run

CONFIG = Path(__file__).resolve().parents[2] / "configs" / "quickstart.yaml"
NOON = datetime.datetime(2026, 1, 31, 12, tzinfo=datetime.timezone.utc)
LAYERS = ("embedding", "layers.2", "layers.10", "final_norm")
NORMS = {"grad_norm": 0.01, "weight_norm": 100.0, "update_norm": 0.1}
HOSTILE = "</script><script>document.title = 'broken'</script><img src=x onerror=alert(1)> & \u2028"


def at(seconds: float) -> str:
    return (NOON + datetime.timedelta(seconds=seconds)).isoformat(timespec="milliseconds")


def step_record(step: int, time: float, **more: Any) -> dict[str, Any]:
    found = {
        "step": step, "loss": 8 / step + 0.1 * math.sin(step), "grad_norm": 1.0, "learning_rate": 1e-3 / step,
        "tokens": 1024 * step, "tokens_per_second_per_gpu": 1000.0 + step, "tflops_per_gpu": 400.0, "mfu": 0.4,
        "memory_gib": 60.0, "step_seconds": 0.9, "skipped": False, "time": at(time), "consumed_samples": 8 * step,
        "data_seconds": 0.01, "evaluation_seconds": 0.0, "save_seconds": 0.0, "skipped_in_a_row": 0, "loss_scale": None,
        "validation_loss": None, "seconds/forward_and_backward": 0.7,
    }  # fmt: skip
    return found | more


def write_lines(path: Path, records: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def make_run(folder: Path, steps: int = 40) -> list[dict[str, Any]]:
    """A run that crashes after step 25, resumes from 20 with another recipe, and skips steps 31 and 32.

    Returns the records that count.
    """
    folder.mkdir()
    first = [step_record(step, 10 + step) for step in range(1, 26)]
    second = [step_record(step, 300 + step, loss_scale=2.0**16) for step in range(21, steps + 1)]
    for record in second[10:12]:
        record |= {"skipped": True, "loss": None, "grad_norm": None, "skipped_in_a_row": record["step"] - 30}
    second[-1] |= {"validation_loss": 1.5, "valid/books": 1.75, "evaluation_seconds": 0.05, "eval/task/acc": 0.5}
    for record in (first[9], second[-1]):
        record |= {f"{kind}/{layer}": norm for kind, norm in NORMS.items() for layer in LAYERS}
    second[11] |= {"grad_norm/embedding": 0.1, "grad_norm/layers.10": None}  # measured, and skipped
    write_lines(folder / "metrics.jsonl", first + second)
    launches = [{"time": at(0), "step": 0, "ranks": 8, "hosts": {"a": 8}}, {"time": at(310), "step": 20, "ranks": 8}]
    write_lines(folder / "launches.jsonl", launches)
    config = yaml.safe_load(CONFIG.read_text())
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    stage = {"name": "long", "begin": 20, "overrides": {}}
    changed = {**config, "fp8": {"recipe": "current"}, "stages": [stage]}
    (folder / "config-from-step-00000020.yaml").write_text(yaml.safe_dump(changed))
    (folder / "hangs" / "2026-01-31T12-05-00").mkdir(parents=True)
    (folder / "hangs" / "2026-01-31T12-05-00" / "verdict.txt").write_text("no progress for 9 s in step 26\nrank 3")
    (folder / "checkpoints" / "step_00000020").mkdir(parents=True)
    (folder / "log.txt").write_text(
        "[2026-01-31 12:00:10] saved runs/my run/checkpoints/step_00000010: stalled 0.1 s, 0.5 s in all\n"
        "[2026-01-31 12:00:20] saved runs/my run/checkpoints/step_00000020 in 1.2 s\n"
        "[2026-01-31 12:00:26] rank 3: ERROR: connection lost\n"
        "[2026-01-31 12:05:31] WARNING: step     31/40  loss nan  SKIPPED: gradients not finite\n"
    )
    write_lines(folder / "samples.jsonl", [{"step": 20, "prompt": "def", "text": HOSTILE, "finish_reason": "stop"}])
    writer = ReportWriter(folder / "fp8_report.jsonl", 0)
    layers = ("layers.0.mlp.down", "layers.1.mlp.down")
    kinds = [(operand, layer) for operand in OPERANDS for layer in layers]
    for step in (10, 20, 30):
        snr = [None if (step, kind) == (20, kinds[0]) else 30.0 - i - step / 100 for i, kind in enumerate(kinds)]
        writer.write(
            [Fp8Record(step, layer, operand, amax=1.0, scale=2.0, underflow=0.01, saturated=0.0, snr_db=x) for (operand,
            layer), x in zip(kinds, snr)],
        )  # fmt: skip
    writer.close()
    write_lines(folder / "expert_load.jsonl", [{"step": 10, "tokens": {"1": [30, 10], "3": [20, 20]}}])
    return first[:20] + second


def data_of(page: Path) -> dict[str, Any]:
    text = page.read_text(encoding="utf-8")
    return json.loads(text.split('<script type="application/json" id="data">')[1].split("</script>")[0])


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], Path]:
    """The records that count of a made run, and its page."""
    folder = tmp_path_factory.mktemp("runs") / "made"
    kept = make_run(folder)
    page = folder.parent / "page.html"
    assert plot_run.main([str(folder), "--html", str(page)]) == 0
    return kept, page


def test_numbers_of_the_page_are_those_of_the_metrics(made: tuple[list[dict[str, Any]], Path]) -> None:
    kept, page = made
    run = data_of(page)["runs"][0]

    def check(panel: str, label: str, expected: list[tuple[int, float | None]]) -> None:
        curve = next(c for c in run["curves"][panel] if c["label"] == label)
        assert curve["x"] == [step for step, _ in expected]
        assert [v is None for v in curve["y"]] == [v is None for _, v in expected]
        numbers = [v for _, v in expected if v is not None]
        assert [v for v in curve["y"] if v is not None] == pytest.approx(numbers, rel=1e-6)

    for panel, label, key, unit in (
        ("loss", "training", "loss", 1),
        ("learning_rate", "learning rate", "learning_rate", 1),
        ("grad_norm", "gradient norm", "grad_norm", 1),
        ("throughput", "tokens/s", "tokens_per_second_per_gpu", 1),
        ("mfu", "MFU", "mfu", 100),
        ("seconds", "step", "step_seconds", 1),
        ("sections", "forward and backward", "seconds/forward_and_backward", 1),
        ("skipped", "skipped in a row", "skipped_in_a_row", 1),
    ):
        check(panel, label, [(r["step"], None if r[key] is None else r[key] * unit) for r in kept])
    check("loss", "validation", [(40, 1.5)])
    check("loss", "books", [(40, 1.75)])
    check("tasks", "task/acc", [(40, 0.5)])
    check("seconds", "evaluation", [(40, 0.05)])
    check("fp8_snr", "input", [(10, 28.9), (20, 28.8), (30, 28.7)])
    check("fp8_underflow", "weight", [(10, 1.0), (20, 1.0), (30, 1.0)])
    heat = {heat["title"]: heat for heat in run["heat_maps"]}
    assert heat["FP8: SNR of input"]["values"] == [[29.9, None, 29.7], [28.9, 28.8, 28.7]]
    assert heat["Experts: the one with the most tokens"]["values"] == [[1.5], [1.0]]
    assert heat["Norm of gradients, before clipping"]["rows"] == list(LAYERS)
    assert heat["Norm of gradients, before clipping"]["steps"] == [10, 32, 40]
    assert heat["Norm of gradients, before clipping"]["values"] == [[-2, -1, -2], *[[-2, None, -2]] * 3]
    assert heat["Norm of updates, divided by norm of weights"]["values"] == [[-3, None, -3]] * 4
    assert run["axis"]["tokens"] == [r["tokens"] for r in kept]
    assert run["axis"]["hours"] == pytest.approx([(r["step"] + (10 if r["step"] < 21 else 300)) / 3600 for r in kept])


def test_events_goodput_and_texts(made: tuple[list[dict[str, Any]], Path]) -> None:
    run = data_of(made[1])["runs"][0]
    assert [(event["kind"], event["step"]) for event in run["events"]] == [
        ("launch", 0), ("checkpoint", 10), ("launch", 20), ("change", 20), ("checkpoint", 20),
        ("hang", 26), ("skipped", 31),
    ]  # fmt: skip
    texts = [event["text"] for event in run["events"]]
    assert texts[1] == "saved: stalled 0.1 s, 0.5 s in all; not in the folder any more"
    assert (
        texts[3]
        == "stage long: fp8.recipe delayed -> current; stages unset -> [{'begin': 20, 'name': 'long', 'overrides': {}}]"
    )
    assert texts[4] == "saved: 1.2 s"
    assert texts[6] == "steps 31 to 32 skipped: gradients not finite, or a loss spike"
    assert run["events"][5]["time"] == "2026-01-31T12:05:00"
    assert run["trouble"] == ["[2026-01-31 12:00:26] rank 3: ERROR: connection lost"]
    assert run["samples"] == [{"step": 20, "prompt": "def", "text": HOSTILE}]
    assert list(run["goodput"]["seconds"]) == list(PARTS)
    seconds = run["goodput"]["seconds"]
    assert seconds["training"] == pytest.approx(38 * 0.89)
    assert seconds["repeated"] == pytest.approx(5 * 0.9)
    assert seconds["down"] == pytest.approx(310 - 35)
    assert sum(seconds.values()) == pytest.approx(run["goodput"]["wall"]) == pytest.approx(340)
    assert run["summary"]["goodput"] == f"{38 * 0.89 / 340:.1%}"
    assert "Advice" in run["advice"]


def test_downsampling_keeps_extremes_and_gaps() -> None:
    draw = random.Random(0)
    values: list[float | None] = [draw.gauss(0, 1) for _ in range(75_000)]
    values[777], values[50_000], values[70_000:70_003] = 1e6, -1e6, [None, None, None]
    curve = Curve("", range(1, 75_001), values)
    points = downsample(curve)
    assert len(points.x) <= 3 * run_data.BUCKETS + 2
    assert all(values[int(step) - 1] == y for step, y in zip(points.x, points.y))
    assert list(points.x) == sorted(points.x)
    assert (points.x[0], points.x[-1]) == (1, 75_000)
    assert {778: 1e6, 50_001: -1e6, 70_001: None}.items() <= dict(zip(points.x, points.y)).items()
    by_bucket = np.array([math.nan if v is None else v for v in values]).reshape(run_data.BUCKETS, 100)
    assert points.mean_y == pytest.approx(np.nanmean(by_bucket, axis=1).tolist())
    assert points.mean_x[:2] == [50.5, 150.5]
    short = Curve("", range(1500), [1.0] * 1500)
    assert downsample(short).x == short.steps
    assert not downsample(short).mean_x


@pytest.mark.slow
def test_a_long_run_makes_a_small_page(tmp_path: Path) -> None:
    draw = random.Random(0)
    line = json.dumps(step_record(1, 0, loss=0.125))
    with (tmp_path / "metrics.jsonl").open("w") as file:
        for step in range(1, 20_001):
            file.write(line.replace('"step": 1,', f'"step": {step},').replace("0.125", str(draw.random())) + "\n")
    page = html_page([run_data.read_run(tmp_path, "long")])
    assert len(page) < 500_000


def test_the_picture_and_several_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path / "a")
    make_run(tmp_path / "b", steps=33)
    for name in "ab":
        (tmp_path / name / "fp8_report.jsonl").unlink()  # fewer charts take less time
    files = ["--html", str(tmp_path / "two.html"), "--png", str(tmp_path / "two.png")]
    assert plot_run.main([str(tmp_path / "a"), str(tmp_path / "b"), *files]) == 0
    assert [run["name"] for run in data_of(tmp_path / "two.html")["runs"]] == ["a", "b"]
    picture = imread(tmp_path / "two.png")
    assert picture.shape[1] == 1560
    assert picture[..., :3].std() > 0.05
    assert plot_run.main([str(tmp_path / "a"), str(tmp_path / "b")]) == 2
    assert "--html FILE" in capsys.readouterr().err
    assert plot_run.main([str(tmp_path / "missing")]) == 2
    assert "missing; give a run" in capsys.readouterr().err


BROWSER = shutil.which("chromium") or shutil.which("google-chrome")


@pytest.mark.skipif(BROWSER is None, reason="no chromium: apt-get install chromium")
def test_in_a_browser(made: tuple[list[dict[str, Any]], Path], tmp_path: Path) -> None:
    """All charts are drawn, without an error or a request, and texts of the run stay texts."""
    kept, page = made
    command = [str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}"]
    command += [
        "--enable-logging=stderr",
        "--v=0",
        "--virtual-time-budget=2000",
        "--window-size=1400,900",
        "--dump-dom",
    ]
    done = subprocess.run([*command, page.as_uri()], capture_output=True, text=True, timeout=60)
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    assert console == []
    panels = [panel["key"] for panel in data_of(page)["panels"]]
    assert f'data-drawn="{len(panels)}"' in done.stdout
    assert "<title>made</title>" in done.stdout
    charts = dict(re.findall(r'id="chart-(\w+)".*?<svg height="230"(.*?)</svg>', done.stdout, re.DOTALL))
    assert list(charts) == panels
    drawn = re.findall(r'class="curve" d="([^"]*)"', charts["loss"])
    assert drawn[0].count("M") == 2  # a gap for the skipped steps
    assert drawn[0].count("M") + drawn[0].count("L") == len(kept) - 2
    assert charts["loss"].count("<circle") == 2
    assert 'class="event-hang"' in charts["loss"]
    assert html.escape(HOSTILE, quote=False) in done.stdout
