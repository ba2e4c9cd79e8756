"""Figures of a step: what metrics.jsonl holds, and that a torn line or a repeated step harms nobody."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import math
import re
import shutil
import struct
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megafp8.config import load_config
from megafp8.fp8.health import Fp8Record, read_report
from megafp8.host.text_file import last_integer
from megafp8.optimizer.layer_norms import KINDS
from megafp8.planner.flops import flops_per_token, matmul_parameters
from megafp8.training.errors import TrainingError
from megafp8.training.metrics import (
    METRICS,
    Fp8ReportWriter,
    JsonlWriter,
    LogWriter,
    ReopenedToRepeat,
    TensorBoardWriter,
    WandbWriter,
    read_metrics,
    short_number,
    wandb_id,
)
from megafp8.training.observer import StepMetrics
from megafp8.training.plots import plot_loss, print_loss
from megafp8.training.run_log import RunLog
from tests.quickstart_data import ROOT

STEP = StepMetrics(
    1, loss=5.0, grad_norm=1.0, learning_rate=1e-3, tokens=128, tokens_per_second_per_gpu=10.0, tflops_per_gpu=0.5,
    mfu=None, memory_gib=1.0, step_seconds=0.1, skipped=False, time="2026-01-31T12:00:00.000+00:00",
    consumed_samples=4, data_seconds=0.01,
)  # fmt: skip


def write(path: Path, *steps: StepMetrics) -> None:
    writer = JsonlWriter(path)
    for step in steps:
        writer.write(step)
    writer.close()


def test_one_object_a_step_with_the_names_promised(tmp_path: Path) -> None:
    write(tmp_path / "m", STEP)
    record = json.loads((tmp_path / "m").read_text())
    promised = (
        "step loss grad_norm learning_rate tokens tokens_per_second_per_gpu tflops_per_gpu mfu memory_gib step_seconds "
        "time consumed_samples data_seconds evaluation_seconds save_seconds skipped validation_loss"
    )
    assert set(promised.split()) <= record.keys()


def test_a_torn_line_and_a_repeated_step(tmp_path: Path) -> None:
    path = tmp_path / "m"
    write(path, STEP, dataclasses.replace(STEP, step=2, loss=4.0))
    path.write_text(path.read_text()[:-20])
    write(path, dataclasses.replace(STEP, step=2, loss=3.0), dataclasses.replace(STEP, step=3, loss=math.nan))
    assert [(r["step"], r["loss"]) for r in read_metrics(path)] == [(1, 5.0), (2, 3.0), (3, None)]
    path.write_bytes(b"\0\0\0\n12\n[1]\n{}\n\xff\n" + b"[" * 10**5 + b"\n" + path.read_bytes())
    assert [r["step"] for r in read_metrics(path)] == [1, 2, 3]
    write(path, dataclasses.replace(STEP, step=2, loss=6.0))
    assert [(r["step"], r["loss"]) for r in read_metrics(path)] == [(1, 5.0), (2, 6.0)], (
        "what the crash undid is left out"
    )
    assert last_integer(path, "step") == last_integer(path, "step", 2000) == 2
    path.write_bytes(b"")
    assert read_metrics(path) == []
    assert last_integer(path, "step") == last_integer(tmp_path / "none", "step") == 0


def test_a_step_that_ran_again_after_a_crash_is_once_in_tensorboard(tmp_path: Path) -> None:
    for first, steps in ((0, range(1, 8)), (5, range(6, 9))):  # killed after step 7, resumed from step 5
        writer = TensorBoardWriter(tmp_path, first)
        for step in steps:
            writer.write(dataclasses.replace(STEP, step=step, loss=10 * first + step))
        writer.close()
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [
        *((step, step) for step in range(1, 6)), (6, 56), (7, 57), (8, 58)
    ]  # fmt: skip
    assert "time" not in events.Tags()["scalars"]


def wandb_records(path: Path) -> tuple[list[dict[str, float]], dict[str, Any], dict[str, Any]]:
    """Return the steps, the config and the run record of a file of wandb's, a log in LevelDB's format."""
    from wandb.proto import wandb_internal_pb2

    content, at, data = path.read_bytes(), 7, b""
    steps: list[dict[str, float]] = []
    settings: dict[str, Any] = {}
    run: dict[str, Any] = {}
    assert content.startswith(b":W&B")
    while at < len(content):
        if -at % 32768 < 7:  # the rest of a block that is too short for a header
            at += -at % 32768
        length, kind = struct.unpack_from("<HB", content, at + 4)
        data += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind not in (1, 4):  # neither whole nor a last part
            continue
        record = wandb_internal_pb2.Record.FromString(data)
        data = b""
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            steps.append({i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in items})
        for item in record.run.config.update:
            settings[item.key] = json.loads(item.value_json)
        if record.WhichOneof("record_type") == "run":
            run = {"id": record.run.run_id, "branch": (record.run.branch_point.run, record.run.branch_point.value)}
    return steps, settings, run


def test_all_writers_have_the_same_names_and_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read metrics.jsonl, TensorBoard and wandb as other programs do. The last two have curves of FP8 health too.

    A step that is repeated counts as it was the second time.
    """
    records = [
        Fp8Record(1, "layers.0.mlp.down", "input", amax=3.0, scale=1.0, underflow=0.25, saturated=0.0, snr_db=31.0),
        Fp8Record(1, "layers.1.mlp.down", "input", amax=2.0, scale=1.0, underflow=0.125, saturated=0.5, snr_db=20.0),
        Fp8Record(1, "layers.0.mlp.down", "grad_output", None, scale=1.0, underflow=0.0, saturated=0.0, snr_db=None),
    ]
    fp8 = {
        "fp8/input/min_snr_db": 20.0,
        "fp8/input/max_underflow": 0.25,
        "fp8/input/max_saturated": 0.5,
        "fp8/grad_output/max_underflow": 0.0,
        "fp8/grad_output/max_saturated": 0.0,
        "fp8/layers.0.mlp.down/input/snr_db": 31.0,
        "fp8/layers.0.mlp.down/input/amax": 3.0,
        "fp8/layers.1.mlp.down/input/snr_db": 20.0,
        "fp8/layers.1.mlp.down/input/amax": 2.0,
    }
    layer_norms = {f"{kind}/{layer}": 0.5 for kind in KINDS for layer in ("embedding", "layers.10", "final_norm")}
    first = dataclasses.replace(
        STEP,
        validation_loss=5.25,
        evaluations={"valid/books.v2": 4.5, "eval/arc_easy/acc,none": 0.25},
        layer_norms=layer_norms | {"weight_norm": 30.0, "update_norm": 0.01},
        section_seconds={"data": 0.01, "forward and backward": 0.0625, "update": 0.02},
    )
    second = dataclasses.replace(STEP, step=2, loss=4.0, skipped=True)
    steps = [(first, records), (dataclasses.replace(second, loss=99.0), []), (second, [])]
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    writers = [
        JsonlWriter(tmp_path / "metrics.jsonl"),
        ReopenedToRepeat(partial(TensorBoardWriter, tmp_path / "tensorboard"), 0),
        ReopenedToRepeat(partial(WandbWriter, "project", "name", tmp_path, {"seed": 7}), 0),
    ]
    for step, own in steps:
        for writer in writers:
            writer.write(step, own)
    for writer in writers:
        writer.close()
    import wandb

    wandb.teardown()  # its own process writes the file, and is waited for here
    lines = read_metrics(tmp_path / "metrics.jsonl")
    assert {"loss": 5.0, "seconds/forward_and_backward": 0.0625, "valid/books.v2": 4.5}.items() <= lines[0].items()
    assert layer_norms.items() <= lines[0].items()
    assert not any(isinstance(value, dict) for value in lines[0].values())
    expected = [{k: float(v) for k, v in line.items() if k != "step" and isinstance(v, (int, float))} for line in lines]
    expected[0] |= fp8
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    in_tensorboard: list[dict[str, float]] = [{}, {}]
    for tag in events.Tags()["scalars"]:
        for event in events.Scalars(tag):
            in_tensorboard[event.step - 1][tag] = event.value
    assert in_tensorboard == [pytest.approx(values, rel=1e-7) for values in expected]  # it has fp32
    found = [wandb_records(path) for path in sorted(tmp_path.glob("wandb/offline-run-*/run-*.wandb"))]
    in_wandb = {step["step"]: step for steps, *_ in found for step in steps}
    assert [in_wandb[step].pop("_step") for step in (1, 2)] == [1, 2]
    own_keys = ("step", "_runtime", "_timestamp")
    assert [{k: v for k, v in in_wandb[step].items() if k not in own_keys} for step in (1, 2)] == expected
    assert [settings["seed"] for _, settings, _ in found] == [7, 7]
    run_id = wandb_id(tmp_path, "name")
    assert [run for *_, run in found] == [{"id": run_id, "branch": ("", 0)}, {"id": run_id, "branch": (run_id, 1)}]


def test_wandb_gets_every_step_from_a_server_that_cannot_remove_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It gets them with increasing steps of its own. A run that resumes asks for it where steps are repeated alone."""
    begun: list[dict[str, Any]] = []
    logged: list[tuple[int, int]] = []

    class Refused(Exception):
        pass

    def begin(**options: Any) -> Any:
        begun.append({k: v for k, v in options.items() if k in ("id", "resume", "resume_from")})
        if "resume_from" in options:
            raise Refused("no such feature")
        last = max([-1, *(step for step, _ in logged)])
        return SimpleNamespace(
            starting_step=last + 1, define_metric=lambda *_, **__: None, finish=lambda: None,
            log=lambda values, step: logged.append((step, values["step"])),
        )  # fmt: skip

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=begin, Error=Refused))
    for first, steps in ((0, (1, 2, 3, 2, 3)), (2, (3, 4)), (4, (5,))):  # a loss spike, a kill after step 3, an end
        lines = JsonlWriter(tmp_path / METRICS)
        writer = ReopenedToRepeat(partial(WandbWriter, "project", "name", tmp_path, {}), first)
        for step in steps:
            for one in (lines, writer):
                one.write(dataclasses.replace(STEP, step=step))
    run_id = wandb_id(tmp_path, "name")
    again = {"id": run_id, "resume": "allow"}
    assert begun == [
        again,
        {"resume_from": f"{run_id}?_step=1"},
        again,
        {"resume_from": f"{run_id}?_step=2"},
        again,
        again,
    ]
    assert logged == [(1, 1), (2, 2), (3, 3), (4, 2), (5, 3), (6, 3), (7, 4), (8, 5)]
    assert "wandb shows steps after 1 twice, since it cannot remove the first ones: no such feature" in caplog.messages


def test_fp8_records_of_repeated_steps_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "fp8_report.jsonl"
    writer = ReopenedToRepeat(partial(Fp8ReportWriter, path), 0)
    for step in (1, 2, 3, 2):
        record = Fp8Record(
            step, "layers.0.mlp.down", "input", 3.0, scale=1.0, underflow=0.25, saturated=0.0, snr_db=31.0
        )
        writer.write(dataclasses.replace(STEP, step=step), [record])
    writer.close()
    assert [record.step for record in read_report(path)] == [1, 2]


def test_runs_with_one_name_have_different_ids_in_wandb(tmp_path: Path) -> None:
    folders = [tmp_path / sweep / "learning_rate-1e-3" for sweep in ("small", "large", "before")]
    for folder in folders:
        folder.mkdir(parents=True)
    (folders[2] / "wandb/run-1").mkdir(parents=True)
    ids = [wandb_id(folder, folder.name) for folder in folders]
    assert len({*ids}) == 3
    assert ids[2] == folders[2].name, "the id that the run began with"
    assert [wandb_id(folder, folder.name) for folder in folders] == ids
    copy = shutil.copytree(folders[0], tmp_path / "copy")
    assert wandb_id(copy, "copy") not in (*ids, "copy")


def test_curves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = [
        dataclasses.asdict(dataclasses.replace(STEP, step=i, loss=1 / i, validation_loss=0.5 if i == 4 else None))
        for i in range(1, 9)
    ]
    plot_loss(records, tmp_path / "loss.png", "test")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    print_loss(records)
    shown = capsys.readouterr().out
    assert "loss (nats per token)" in shown
    assert "\x1b" not in shown
    for nothing in ([], [{**records[0], "loss": None}]):
        plot_loss(nothing, tmp_path / "nothing.png", "test")
        print_loss(nothing)
        assert capsys.readouterr().out == "no step has a finite loss: there is no curve to draw\n"


def test_flops_of_llama3_8b_by_hand() -> None:
    llama = load_config(ROOT / "configs/llama3-8b.yaml", ["model.vocab_size=128256", "training.seq_length=8192"])
    block = 4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 14336
    assert matmul_parameters(llama) == 32 * block + 4096 * 128256
    flops = flops_per_token(llama)
    frozen = load_config(ROOT / "configs/llama3-8b.yaml", ["model.vocab_size=128256", "lora.rank=4"])
    assert flops_per_token(frozen) == flops - 2 * matmul_parameters(llama)
    assert flops == 6 * (32 * block + 4096 * 128256) + 6 * 32 * 8192 * 4096
    ahead = block + 2 * 4096**2 + 4096 * 128256
    mtp = llama.model_copy(update={"model": llama.model.model_copy(update={"mtp_num_layers": 1})})
    assert flops_per_token(mtp) == flops + 6 * ahead + 6 * 8192 * 4096


def test_numbers_are_short() -> None:
    numbers = [0, 7, 999, 1000, 1234, 99_999, 1_000_000, 262_144_000, 999_999_999_999, 15_000_000_000_000]
    expected = ["0", "7", "999", "1.000K", "1.234K", "100.0K", "1.000M", "262.1M", "1.000T", "15.00T"]
    assert [short_number(number) for number in numbers] == expected


def steps(*changes: dict[str, Any]) -> list[StepMetrics]:
    """Steps from 1 on, of 0.5 s with 64 tokens a process each, two processes."""
    found = []
    for i, change in enumerate(changes):
        seconds = change.get("step_seconds", 0.5)
        values = {"step_seconds": seconds, "tokens_per_second_per_gpu": 64 / seconds, "tokens": 128 * (i + 1), **change}
        found.append(dataclasses.replace(STEP, step=i + 1, **values))
    return found


def test_lines_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """Every figure by hand; ordinary lines at the interval, the others at their step."""
    skipped = {"skipped": True, "loss": math.nan, "grad_norm": math.nan}
    run = steps(
        {"step_seconds": 8.0}, {}, {"validation_loss": 5.25}, {"step_seconds": 1.5}, {**skipped, "skipped_in_a_row": 1},
        {**skipped, "skipped_in_a_row": 2}, {"loss_tokens_per_second_per_gpu": 0.0},
        {"mfu": 0.25, "loss_tokens_per_second_per_gpu": 128.0},
        {"step_seconds": 1.5, "mfu": 0.5, "z_loss": 0.0125, "loss_tokens_per_second_per_gpu": 12.0},
    )  # fmt: skip
    ends = iter([10.0, 10.5, 13.0, 14.5, 15.0, 15.5, 16.0, 16.5, 18.0])  # evaluating after step 3 took 2 s
    caplog.set_level(logging.INFO, "megafp8")
    writer = LogWriter(0, 3600, 4, per="process", clock=lambda: next(ends))
    for step in run:
        writer.write(step)
    head = "loss 5.0000  grad norm 1.000  lr 1.00e-03"
    nothing = "loss nan  grad norm nan  lr 1.00e-03"
    expected = [
        # 3597 steps left at the mean of 0.5 and 2.5 s; 9 s and 192 tokens a process in 3 steps
        ("megafp8.training.metrics", "INFO", f"step      3/3600  {head}  3.000 s/step  21 tok/s/process  384 tokens  "
         "ETA 1:29:56  validation 5.2500"),
        ("megafp8.steps", "INFO", f"step      4/3600  {head}  1.500 s/step  43 tok/s/process  512 tokens  ETA 1:29:54"),
        ("megafp8.training.metrics", "WARNING", f"step      5/3600  {nothing}  0.500 s/step  128 tok/s/process  "
         "640 tokens  ETA 1:14:54  SKIPPED: gradients not finite"),
        ("megafp8.training.metrics", "WARNING", f"step      6/3600  {nothing}  0.500 s/step  128 tok/s/process  "
         "768 tokens  ETA 1:05:53  SKIPPED, 2 in a row: gradients not finite"),
        ("megafp8.steps", "INFO", f"step      8/3600  {head}  0.500 s/step  128 tok/s/process (64 in the loss)  "
         "mfu 12.5%  "
         "1.024K tokens  ETA 0:55:35"),
    ]  # fmt: skip
    assert [(r.name, r.levelname, r.getMessage()) for r in caplog.records] == expected
    caplog.clear()
    writer = LogWriter(8, 9, 4, per="gpu", clock=lambda: 0.0)  # a new process, whose only step is the last
    writer.write(dataclasses.replace(run[-1], data_seconds=1.2))
    head = head.replace("  grad", "  z-loss 0.0125  grad")
    assert caplog.messages == [
        "the first step waited for data for 1.2 of its 1.5 s",
        f"step      9/9  {head}  1.500 s/step  43 tok/s/gpu (12 in the loss)  80% waiting for data  mfu 50.0%  "
        "1.152K tokens",
    ]


@pytest.mark.parametrize("rank", [0, 3])
def test_the_log_goes_to_the_console_and_to_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], rank: int
) -> None:
    logger, step_lines = logging.getLogger("megafp8.somewhere"), logging.getLogger("megafp8.steps")
    for message in ("one", "two"):
        with contextlib.suppress(TrainingError), RunLog(rank, show_steps=False) as log:
            logger.info("before there is a folder")
            log.open(tmp_path)
            logger.info(message)
            step_lines.info("step 1")
            logger.warning("careful")
            raise TrainingError("cannot go on")
    logger.info("not there")
    clock = r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\] "
    if rank:
        assert re.fullmatch(f"({clock}rank 3: WARNING: careful\n){{2}}", capsys.readouterr().err)
        assert not list(tmp_path.iterdir())
        return
    before, careful = f"{clock}before there is a folder\n", f"{clock}WARNING: careful\n"
    assert re.fullmatch(f"{before}{clock}one\n{careful}{before}{clock}two\n{careful}", capsys.readouterr().err)
    rest = f"{clock}step 1\n{careful}{clock}ERROR: cannot go on\n"
    assert re.fullmatch(f"{clock}one\n{rest}{clock}two\n{rest}", (tmp_path / "log.txt").read_text())
