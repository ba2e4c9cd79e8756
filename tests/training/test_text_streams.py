"""Runs on text that is tokenized while they train: layouts, kills, changes of the data, and what is refused."""

from __future__ import annotations

import json
import os
import signal
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import zstandard

from megafp8.config import Config, ConfigError, check_layout, load_config
from megafp8.training.inputs import RunInputs, describe_planned_data, missing_data, open_inputs
from megafp8.training.metrics import read_metrics
from megafp8.training.validate import validate
from tests.quickstart_data import CONFIG, QuickstartData
from tests.training.runs import ONE_RANK
from tests.training.test_resume import Job
from tests.world import World


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some modules of the standard library, a chunk of each a record: two files of JSON lines, one compressed."""
    folder = tmp_path_factory.mktemp("text")
    modules = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("[a-d]*.py"))
    chunks = [module.read_text()[at : at + 1500] for module in modules for at in range(0, 9000, 1500)]
    lines = [json.dumps({"body": chunk}) + "\n" for chunk in chunks if chunk]
    (folder / "a.jsonl").write_text("".join(lines[:200]))
    (folder / "b.jsonl.zst").write_bytes(zstandard.ZstdCompressor().compress("".join(lines[200:]).encode()))
    (folder / "held.ndjson").write_text("".join(lines[:20]))
    return folder


def overrides(text: Path) -> list[str]:
    """What comes after the overrides of `QuickstartData`."""
    streams = ["data.streams.text_key=body", "training.eval_interval=5"]
    return [f"data.train=[{text}/*.jsonl*]", f"data.validation={{held: {text}/held.ndjson}}", *streams]


def curve(job: Job) -> list[tuple[float, ...]]:
    return [
        (r["step"], r["loss"], r["grad_norm"], *(r[key] for key in ("valid/held",) if key in r))
        for r in read_metrics(job.run / "metrics.jsonl")
    ]


@pytest.mark.slow
def test_layouts_have_the_same_samples(
    world2: World, tmp_path: Path, quickstart_data: QuickstartData, text: Path
) -> None:
    """A run that changes from two data-parallel ranks to two tensor-parallel ones, against one rank."""
    common = [*overrides(text), "fp8.recipe=none", "training.steps=4", "training.eval_interval=2", "model.num_layers=1"]
    dp2, tp2 = [*common, *ONE_RANK, "training.stop_after=2"], [*common, "parallel.tensor=2", "parallel.pipeline=1"]
    plain = Job(tmp_path / "plain", quickstart_data, 1, [*common, *ONE_RANK])
    plain.finish_in(world2)
    for options in (dp2, tp2):
        both = Job(tmp_path / "both", quickstart_data, 2, options)
        both.finish_in(world2)
    expected, found = curve(plain), curve(both)
    assert [row[0] for row in expected] == list(range(1, 5))
    assert len(expected[1]) == 4, "there was no evaluation"
    assert [len(row) for row in found] == [len(row) for row in expected]
    for row, other in zip(found, expected):
        assert row == pytest.approx(other, rel=2e-5)


@pytest.mark.slow
def test_killed_and_stopped_runs_are_bit_identical(
    world2: World, tmp_path: Path, quickstart_data: QuickstartData, text: Path
) -> None:
    """SIGKILL after a step that is not in the checkpoint, then SIGTERM."""
    options = [*overrides(text), *ONE_RANK, "fp8.recipe=delayed", "data.num_workers=1"]
    straight = Job(tmp_path / "straight", quickstart_data, 1, [*options, "data.num_workers=0"])
    straight.finish_in(world2)
    killed = Job(tmp_path / "killed", quickstart_data, 1, options)
    process = killed.start()
    killed.wait_for_step(6, process)
    killed.wait_for_save(5, process)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    assert killed.saved() == [5]
    process = killed.start()
    killed.wait_for_step(7, process)
    os.killpg(process.pid, signal.SIGTERM)  # as batch systems do: to all processes
    _, errors = process.communicate(timeout=60)
    assert b"stopped on request after step" in errors
    Job(tmp_path / "killed", quickstart_data, 1, [*options, "data.num_workers=0"]).finish_in(world2)
    assert curve(killed) == curve(straight)


SMALL = ["training.global_batch_size=8", "training.micro_batch_size=1", "training.seq_length=32"]


def config_of(quickstart_data: QuickstartData, *more: str) -> Config:
    return load_config(CONFIG, [*quickstart_data.overrides, *ONE_RANK, *SMALL, *more])


def saved(inputs: RunInputs, samples: int) -> dict[str, Any]:
    """The metadata of a checkpoint, as it comes back from a file."""
    config = inputs.config.model_dump(mode="json")
    about = {"step": samples // 8, "consumed_samples": samples, "config": config, "data": inputs.record(samples)}
    found: dict[str, Any] = json.loads(json.dumps(about))
    return found


def test_a_resumed_run_finds_files_that_changed(
    tmp_path: Path, quickstart_data: QuickstartData, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_bytes((text / "a.jsonl").read_bytes())
    config = config_of(quickstart_data, *overrides(text), f"data.train=[{tmp_path}/*.jsonl]")
    metadata = saved(open_inputs(config, "x"), 80)
    resumed, changes = open_inputs(config, "x").resumed(metadata)
    assert (changes, resumed.positions and resumed.positions.canonical_streams) == ([], 8)
    larger = config_of(
        quickstart_data, *overrides(text), f"data.train=[{tmp_path}/*.jsonl]", "training.global_batch_size=16"
    )
    resumed, _ = open_inputs(larger, "x").resumed(metadata)
    assert resumed.positions is not None
    assert resumed.positions.canonical_streams == resumed.train.datasets[0].canonical_streams == 8  # type: ignore[union-attr]
    other = config_of(
        quickstart_data, *overrides(text), f"data.train=[{tmp_path}/*.jsonl]", "data.streams.canonical_streams=16"
    )
    with pytest.raises(ConfigError, match="canonical_streams = 16: the run began with 8"):
        open_inputs(other, "x").resumed(metadata)
    for change, found in (
        (lambda: (tmp_path / "c.jsonl").write_text('{"body": "x"}'), "c.jsonl is new since the run read 80 samples"),
        (lambda: (tmp_path / "c.jsonl").unlink() or (tmp_path / "b.jsonl").unlink(), "b.jsonl is gone since"),
        (
            lambda: (tmp_path / "b.jsonl").write_bytes(b" " + (text / "a.jsonl").read_bytes()),
            "b.jsonl has changed since",
        ),
        (
            lambda: (
                (tmp_path / "b.jsonl").write_bytes((text / "a.jsonl").read_bytes()),
                (tmp_path / "a.jsonl").write_bytes((text / "a.jsonl").read_bytes() + b'{"body": "appended"}\n'),
            ),
            "a.jsonl has changed since the run read 80 samples of this text; restore it, list new files as a",
        ),
    ):
        change()
        with pytest.raises(ConfigError, match=found):
            open_inputs(config, "x").resumed(metadata)
    monkeypatch.chdir(tmp_path.parent)
    other = config_of(quickstart_data, *overrides(text), f"data.train=[{tmp_path.name}/*.jsonl]")
    with pytest.raises(ConfigError, match=f"= '{tmp_path.name}/.*jsonl': {tmp_path.name}/a.jsonl has changed since"):
        open_inputs(other, "x").resumed(metadata)
    monkeypatch.undo()
    again = config.model_copy(update={"data": config.data.model_copy(update={"restart_changed": True})})
    began_anew, changes = open_inputs(again, "x").resumed(metadata)
    assert [change.removeprefix(f"{tmp_path}/*.jsonl ") for change in changes] == [
        "added with a share of 100%, from its sample 0 on",
        "removed after 80 of its samples",
    ]
    assert began_anew.record(80)["sources"][0]["consumed"] == 0


def test_what_does_not_work_with_text_is_refused(quickstart_data: QuickstartData, text: Path) -> None:
    def refused(*more: str, ranks: int = 1) -> str:
        with pytest.raises(ConfigError) as error:
            check_layout(config_of(quickstart_data, *overrides(text), *more), ranks)
        return str(error.value)

    check_layout(config_of(quickstart_data, *overrides(text)), 8)
    best_fit = ["data.packing=best_fit", "data.reset_at_documents=true", "data.mask_eod_loss=true"]
    assert "data.packing = 'best_fit': data.train, " in refused(*best_fit)
    assert "data.loss_on = 'all': data.train, " in refused(*best_fit, "data.loss_on=all")
    assert "data.tokenizer = None: data.train, " in refused("data.tokenizer=null")
    assert "a list is weighted by numbers of tokens" in refused(f"data.train=[{text}/a.jsonl, data/x]")
    assert "so data.split takes no documents from it; give data.validation" in refused("data.validation={}")
    assert "not a multiple of training.micro_batch_size" in refused("data.streams.canonical_streams=12", ranks=8)
    no_text = ["data.train=[data/x]", "data.validation={}", "data.streams.skip_errors=true"]
    assert "data.streams = 'set': it applies to text" in refused(*no_text)


def test_dry_runs_describe_text_and_say_what_is_missing(quickstart_data: QuickstartData, text: Path) -> None:
    config = config_of(quickstart_data, *overrides(text))
    table = describe_planned_data(config)
    assert f"{text}/*.jsonl*: 2 files of text, tokenized while the run trains, in 8 canonical streams" in table
    assert " MiB  100.00%" in table
    absent = config_of(quickstart_data, *overrides(text), "data.train=[absent/*.jsonl]")
    assert [x.partition(";")[0] for x in missing_data(absent)] == [
        "data.train, absent/*.jsonl: no such file, and no file matches it as a pattern"
    ]


def test_streams_that_a_layout_cannot_share_are_refused_before_a_start(
    tmp_path: Path, quickstart_data: QuickstartData, text: Path
) -> None:
    """Also those of a later stage, whose number is that of the first."""
    common = [*overrides(text), f"run_dir={tmp_path}", "device=cpu"]
    assert validate(config_of(quickstart_data, *common), 8, "x").positions is not None
    uneven = ["training.global_batch_size=12", "data.streams.canonical_streams=8"]
    with pytest.raises(ConfigError, match="a rank would not have the same streams in each step; try 9"):
        validate(config_of(quickstart_data, *common, *uneven), 3, "x")
    stage = (
        "stages=[{name: wide, begin: 5, overrides: {training.global_batch_size: %d, training.micro_batch_size: %d}}]"
    )
    assert validate(config_of(quickstart_data, *common, stage % (16, 4)), 2, "x").positions is not None
    with pytest.raises(ConfigError, match=r"canonical_streams = 8: not a multiple of training.micro_batch_size \(6\)"):
        validate(config_of(quickstart_data, *common, stage % (12, 6)), 2, "x")
