"""Profiles of steps: files that their readers open, on the chosen ranks only; a failure ends nothing."""

from __future__ import annotations

import gzip
import json
import logging
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from megafp8.config import ConfigError, ProfileConfig, check_layout
from megafp8.parallel import activity
from megafp8.parallel.parallel_state import initialize_distributed, initialize_model_parallel
from megafp8.training.metrics import read_metrics
from megafp8.training.profiling import Profiler
from tests.ports import free_port
from tests.quickstart_data import QuickstartData
from tests.training.presets import DP2, config_of
from tests.training.test_job import _jobs, log_of, options
from tests.world import World


def test_a_job_with_all_observers_trains_as_one_without(
    world2: World, tmp_path: Path, quickstart_data: QuickstartData
) -> None:
    plain, profiled = (
        options(quickstart_data, tmp_path / name, "training.steps=3", "training.eval_interval=0")
        for name in ("plain", "profiled")
    )
    what = ["profile.steps=[2, 3]", "profile.ranks=[1]", "profile.record=[trace, memory, collectives]"]
    port = free_port()
    what += ["logging.layer_norms_interval=2", f"logging.metrics_port={port}"]
    for job in (plain, [*profiled, *what]):
        assert world2.run(_jobs, [job], {}) == [[None]] * 2
    run = tmp_path / "profiled" / "quickstart"
    folder = run / "profile" / "steps-2-3"
    assert {path.name for path in folder.iterdir()} == {"collectives_rank_00001", "trace_rank_00001.json.gz"}
    with gzip.open(folder / "trace_rank_00001.json.gz") as file:
        events: list[dict[str, Any]] = json.load(file)["traceEvents"]
    for section in ("data", "forward and backward", "update"):
        spans = [e for e in events if e["name"] == section and e.get("cat") == "user_annotation"]
        assert len(spans) == 2, section
        inside = [e for e in events if spans[0]["ts"] <= e["ts"] <= spans[0]["ts"] + spans[0]["dur"]]
        names = {event["name"] for event in inside}
        assert ("aten::embedding" in names) == (section == "forward and backward")
        assert any("adam" in name.lower() for name in names) == (section == "update")
    lines = log_of(run)
    assert f"profile: steps 2 to 3 on ranks 1: trace, memory, collectives; to {run / 'profile'}" in lines
    assert lines.count("profile: no memory snapshot: torch records no allocations on the device cpu") == 1
    entries = pickle.loads((folder / "collectives_rank_00001").read_bytes())["entries"]
    assert {"gloo:all_reduce"} <= {entry["profiling_name"] for entry in entries}
    without, found = (read_metrics(x / "metrics.jsonl") for x in (tmp_path / "plain" / "quickstart", run))
    assert [record["loss"] for record in found] == [record["loss"] for record in without]
    assert [step for step, record in enumerate(found, 1) if "update_norm/layers.1" in record] == [2]
    sections = [{key for key in record if key.startswith("seconds/")} for record in found]
    names = ("data", "forward_and_backward", "update", "after_the_step")
    assert sections == [{f"seconds/{name}" for name in names}] * 3
    assert f"metrics: http://localhost:{port}/metrics" in lines


def test_a_failure_is_a_warning_and_files_are_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    parallel = initialize_model_parallel(device=initialize_distributed("cpu"))
    (tmp_path / "file").write_text("")
    config = ProfileConfig(steps=(1, 3))
    folders = (tmp_path / "file", tmp_path, tmp_path)
    with activity.recorded() as record:
        for folder in folders:
            with Profiler(config, folder, parallel) as profiler:
                for step in range(1, 3):  # ends before the last step
                    profiler.before_step(step)
                    record.enter("update")
                    profiler.after_step(step, 0.0, False)
            assert record.listeners == []
            assert not torch.autograd.profiler._is_profiler_enabled
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert warnings[0].startswith("profile: stopped: NotADirectoryError: ")
    assert sorted(str(path.parent.name) for path in tmp_path.rglob("trace_*")) == ["steps-1-3", "steps-1-3-2"]


def test_nothing_is_done_on_other_ranks_and_in_other_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parallel = initialize_model_parallel(device=initialize_distributed("cpu"))
    monkeypatch.setattr(Profiler, "_start", lambda self: pytest.fail("a profile was started"))
    for config in (None, ProfileConfig(steps=(2, 3), ranks=[1]), ProfileConfig(record=["collectives"])):
        with Profiler(config, tmp_path, parallel) as profiler:
            for step in range(1, 5):
                profiler.before_step(step)
                profiler.after_step(step, 0.0, False)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({}, r"profile.steps = None: profile.record is \['trace'\]; name the first and the last step"),
        ({"steps": (5, 2)}, r"profile.steps = \[5, 2\]: the first step is after the last; try \[2, 5\]"),
        ({"steps": (30, 31)}, r"profile.steps = \[30, 31\]: the run ends with step 20 \(training.steps\); name steps"),
        ({"steps": (1, 2), "ranks": [0, 2]}, r"profile.ranks = \[0, 2\]: the job has ranks 0 to 1; name ranks"),
    ],
)  # fmt: skip
def test_mistakes_in_the_config(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_layout(config_of(DP2, profile=keys), 2)
