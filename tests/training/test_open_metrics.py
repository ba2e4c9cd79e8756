"""Metrics over HTTP, read by Prometheus' own parser; a port in use, and a run that resumes."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from megafp8.fp8.health import Fp8Record
from megafp8.training.goodput import goodput, read_lines
from megafp8.training.metrics import JsonlWriter
from megafp8.training.observer import StepMetrics
from megafp8.training.open_metrics import HELP, PREFIX, OpenMetricsWriter
from tests.training.test_goodput import at
from tests.training.test_metrics import STEP

FULL = dataclasses.replace(
    STEP,
    step=11,
    time=at(130),
    memory_gib=1.5,
    objective={"rewards/margins": 0.75, "divergence": 0.5},
    evaluations={"valid/books": 4.5, "eval/arc_easy/acc,none": 0.25},
    layer_norms={"grad_norm/layers.0": 0.5, "weight_norm/embedding": 7.0, "update_norm": 0.125},
    section_seconds={"data": 0.01, "forward and backward": 0.0625},
)
RECORDS = [Fp8Record(11, "layers.0.mlp.down", "input", 3.0, scale=1.0, underflow=0.25, saturated=0.0, snr_db=31.0)]


def get(writer: OpenMetricsWriter, path: str = "/metrics") -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{writer.port}{path}", timeout=10) as response:
        assert response.headers["Content-Type"].startswith("application/openmetrics-text; version=1.0.0")
        return response.read().decode()


def samples(text: str) -> dict[str, float]:
    """By name and labels, what Prometheus reads."""
    found = {}
    for family in text_string_to_metric_families(text):
        assert family.documentation
        assert not family.unit or family.name.endswith(family.unit)
        for sample in family.samples:
            labels = ",".join(f"{k}={v}" for k, v in sorted(sample.labels.items()))
            found[sample.name + (f"{{{labels}}}" if labels else "")] = sample.value
    return {name.removeprefix(PREFIX): value for name, value in found.items() if name.startswith(PREFIX)}


def test_metrics_of_a_resumed_run(tmp_path: Path) -> None:
    launches = [{"time": at(0), "step": 0}, {"time": at(120), "step": 10}]
    (tmp_path / "launches.jsonl").write_text("".join(json.dumps(launch) + "\n" for launch in launches))
    jsonl = JsonlWriter(tmp_path / "metrics.jsonl")
    for step in range(1, 14):  # the last three are lost
        jsonl.write(dataclasses.replace(STEP, step=step, time=at(10 + step), step_seconds=1.0))
    writer = OpenMetricsWriter("mine", tmp_path, 0)
    text = get(writer)
    assert samples(text) == {"run_info{name=mine}": 1.0}
    for step, records in ((FULL, RECORDS), (dataclasses.replace(STEP, step=12, loss=math.nan, time=at(131)), [])):
        writer.write(step, records)
        jsonl.write(step, records)
    jsonl.close()
    text = get(writer)
    assert text.endswith("\n# EOF\n")
    found = samples(text)
    assert math.isnan(found.pop("loss"))
    expected = {
        "step": 12,
        "grad_norm": 1.0,
        "memory_bytes": 2**30,
        "skipped": 0.0,
        "valid_loss{data=books}": 4.5,  # of the step before: this one has none
        "objective{metric=rewards/margins}": 0.75,
        "objective{metric=divergence}": 0.5,
        "eval{metric=acc,none,task=arc_easy}": 0.25,
        "layer_grad_norm{layer=layers.0}": 0.5,
        "layer_weight_norm{layer=embedding}": 7.0,
        "update_norm": 0.125,
        "section_seconds{section=forward_and_backward}": 0.0625,
        "fp8_min_snr_db{operand=input}": 31.0,
        "fp8_max_underflow{operand=input}": 0.25,
        "last_step_timestamp_seconds": 1769860931.0,  # 31 January 2026, 12:02:11 UTC
    }
    assert expected.items() <= found.items()
    whole = goodput(read_lines(tmp_path / "metrics.jsonl", "step"), launches)
    assert (whole.repeated_steps, found["wall_seconds{part=repeated}"]) == (3, 3.0)
    assert found["goodput_ratio"] == pytest.approx(whole.fraction)
    assert {
        f"wall_seconds{{part={part}}}": pytest.approx(x) for part, x in whole.seconds.items()
    }.items() <= found.items()
    with pytest.raises(urllib.error.HTTPError, match="404"):
        get(writer, "/")
    writer.close()
    with pytest.raises(urllib.error.URLError):
        get(writer)


def test_every_metric_of_a_step_has_a_description() -> None:
    fields = {field.name for field in dataclasses.fields(StepMetrics)}
    described = {"memory_gib" if name == "memory_bytes" else name for name in HELP}
    assert fields - described == {"time", "evaluations", "layer_norms", "replicas"}, "these are no numbers"


def test_a_port_in_use_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = OpenMetricsWriter("first", tmp_path, 0)
    assert first.port is not None
    second = OpenMetricsWriter("second", tmp_path, first.port)
    assert second.port is None
    second.write(STEP)
    second.close()
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert warnings == [
        f"logging.metrics_port = {first.port}: Address already in use; training continues without this server"
    ]
    assert "first" in get(first)
    first.close()
