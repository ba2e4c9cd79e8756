"""bench_layer: FLOPs, timing, detection of wrong layers, and agreement of all variants with the reference."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import bench_layer, layer_variants
from benchmarks.bench_layer import Result, Work, difference, rows, time_iterations
from benchmarks.blocks import SHAPES, ReferenceLayers, random_weights
from benchmarks.layer_variants import GraphedLayers, Layers, Problem, build_eager, floor_of, variants
from megafp8.parallel.parallel_state import destroy_model_parallel, initialize_distributed, initialize_model_parallel
from megafp8.training.cuda_graphs import Graphs
from tests.marks import slow_but
from tests.training.runs import LoggedCapture

CPU = torch.device("cpu")
TINY = SHAPES["tiny"]


def bench(tmp_path: Path, *options: str) -> tuple[int, dict[str, Any]]:
    """Exit code and the JSON of a short run at the tiny shape."""
    path = tmp_path / "bench.json"
    arguments = ["--shapes", "tiny", "--layers", "2", "--rounds", "2", "--steps", "2", "--device", "cpu", *options]
    code = bench_layer.main([*arguments, "--json", str(path)])
    (report,) = json.loads(path.read_text())
    return code, report


# --- what is counted -------------------------------------------------------------------------------------------------


def test_flops_of_four_llama_layers() -> None:
    assert SHAPES["llama3-8b"].flops(layers=4, seq_length=8192) / 1e12 == pytest.approx(49.5, abs=0.05)


def test_a_rank_of_eight_does_an_eighth_of_a_70b_layer() -> None:
    h, f, d, kv, s = 8192, 28672, 128, 8, 8192
    layer = 6 * s * (2 * h * h + 2 * h * kv * d + 3 * h * f) + 6 * s * s * h
    assert SHAPES["llama3-70b-tp8"].flops(layers=1, seq_length=s) == layer / 8


def test_matmul_flops_are_those_that_torch_counts() -> None:
    layers = ReferenceLayers(TINY, 2, TINY.seq_length)
    x = torch.randn(TINY.seq_length, 1, TINY.hidden_size).bfloat16().requires_grad_()
    with FlopCounterMode(display=False) as counter:
        layers(x).sum().backward()
    counted = counter.get_flop_counts()["Global"]
    assert counted[torch.ops.aten.mm] == 6 * 2 * TINY.matmul_parameters * TINY.seq_length


def test_figures_that_follow_from_the_samples() -> None:
    results = [
        Result("compiled", samples_ms=[30.0, 10.0, 20.0], dx_difference=0.0, dw_difference=0.0),
        Result("fast", samples_ms=[5.0, 4.0, 3.0], dx_difference=0.1, dw_difference=0.1),
        Result("absent", note="not installed"),
    ]
    compiled, fast, absent = rows(results, flops=2e12, layers=1)
    assert (compiled["ms"], compiled["ms_min"], compiled["ms_max"], compiled["ratio"]) == (20.0, 10.0, 30.0, 1.0)
    assert (fast["ms"], fast["ratio"], fast["tflops"], fast["wrong"]) == (4.0, 5.0, 500.0, False)
    assert "ms" not in absent
    assert rows(results[1:], flops=2e12, layers=1)[0]["ratio"] is None


# --- how it is run ---------------------------------------------------------------------------------------------------


def stub_layers(log: list[Any]) -> tuple[Layers, Work]:
    """Layers that note how they are called, and work for them."""
    weight = nn.Parameter(torch.ones(3))

    def forward(x: Tensor, first: bool) -> Tensor:
        log.append(first)
        return x * weight

    ones = torch.ones(2, 1, 3)
    layers = Layers(forward, {"w": weight}, lambda: log.append("zero"), lambda: log.append("end"))
    return layers, Work(ones, ones, 3, ones, {"w": torch.ones(3)})


def test_weights_change_once_an_iteration() -> None:
    log: list[Any] = []
    layers, work = stub_layers(log)
    dx = layers.iteration(work.x_sbh, 2 * work.dy_sbh, 3)
    assert log == [True, False, False, "end"]
    assert torch.equal(dx, torch.full((2, 1, 3), 2.0)), "of one micro-batch, not summed over all"


def test_times_are_per_micro_batch_and_without_zeroing(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 6.0, 10.0, 19.0])
    monkeypatch.setattr(bench_layer.time, "perf_counter", lambda: next(clock))
    layers, work = stub_layers([])
    assert time_iterations(layers, work, 2) == [2000.0, 3000.0]


def test_graphed_layers_are_replayed_after_the_first_steps() -> None:
    log: list[Any] = []
    layers, work = stub_layers(log)
    replays: list[str] = []
    graphs = Graphs(CPU, new_capture=lambda: LoggedCapture(replays))
    graphed = GraphedLayers(layers.forward, layers.parameters, layers.zero_grad, layers.end_step, graphs=graphs)
    for _ in range(4):
        dx = graphed.iteration(work.x_sbh, 2 * work.dy_sbh, 3)
        assert torch.equal(dx, torch.full((2, 1, 3), 2.0))
    assert log == [*3 * [True, False, False, "end"], "end"], "eager twice, captured, neither"
    assert len(replays) == 2


# --- whether it can be trusted ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [math.nan, math.inf, 0.31])  # the limit is 0.15 · √4
@pytest.mark.parametrize("which", ["dx_difference", "dw_difference"])
def test_a_row_with_a_large_difference_is_wrong(value: float, which: str) -> None:
    good = {"dx_difference": 0.1, "dw_difference": 0.1}
    assert not Result("v", **good).wrong(layers=4)
    assert Result("v", **(good | {which: value})).wrong(layers=4)
    assert Result("v").wrong(layers=4), "unchecked"


def test_difference() -> None:
    expected = torch.tensor([3.0, 4.0]).bfloat16()
    assert difference(torch.tensor([3.0, 4.5]), expected) == pytest.approx(0.1)
    assert difference(None, expected) == math.inf
    assert math.isnan(difference(torch.tensor([3.0, math.nan]), expected))


def broken(part: str, factor: float) -> Callable[[Problem], Layers]:
    """A builder whose first block has one weight multiplied."""

    def build(problem: Problem) -> Layers:
        layers = build_eager(problem)
        with torch.no_grad():
            layers.parameters[f"blocks.0.{part}.weight"].mul_(factor)
        return layers

    return build


PARTS = ["attention_norm", "mixer.qkv", "mixer.proj", "mlp_norm", "ffn.up", "ffn.down"]


@pytest.mark.parametrize(
    ("part", "factor"),
    slow_but([*itertools.product(PARTS, [0.0, math.nan])], ("mlp_norm", math.nan)),
)
def test_a_wrong_layer_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str, factor: float, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench_layer, "variants", lambda: {"good": build_eager, "bad": broken(part, factor)})
    code, report = bench(tmp_path)
    assert code == 1
    assert [row["wrong"] for row in report["rows"]] == [False, True]
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines() if line.endswith("WRONG")] == ["bad"]


def test_a_variant_that_fails_is_a_row_and_the_others_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(problem: Problem) -> Layers:
        raise RuntimeError("no kernel\nlong story")

    monkeypatch.setattr(bench_layer, "variants", lambda: {"bad": fails, "good": build_eager})
    code, report = bench(tmp_path)
    bad, good = report["rows"]
    assert (code, bad["note"], bad["samples_ms"]) == (1, "RuntimeError: no kernel", [])
    assert len(good["samples_ms"]) == 4


def test_ours_and_what_is_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(layer_variants.importlib.util, "find_spec", lambda name: None)
    ours = ["megafp8:bf16", "megafp8:delayed"]
    names = [*ours, "torchao:rowwise", "te:current"]
    code, report = bench(tmp_path, "--variants", ",".join(names), "--micro-batches", "2", "--profile", "megafp8:bf16")
    by_name = {row["variant"]: row for row in report["rows"]}
    assert code == 0
    assert list(by_name) == names
    for name in ours:
        limit = 0.02 if name == "megafp8:bf16" else 0.2  # bf16 keeps 8 bits of a number, E4M3 4 and E5M2 3
        assert max(by_name[name]["dx_difference"], by_name[name]["dw_difference"]) < limit
    assert by_name["megafp8:delayed"]["dx_difference"] > 0.05, "delayed did not run in FP8"
    assert by_name["torchao:rowwise"]["note"] == "torchao is not installed"
    assert by_name["te:current"]["note"] == "transformer_engine is not installed"
    assert report["kernels"].keys() == {"megafp8:bf16"}
    assert {"name", "count", "microseconds"} == report["kernels"]["megafp8:bf16"][0].keys()
    out, err = capsys.readouterr()
    assert "share  count  name" in out
    assert "round 2 of 2" in err


# --- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--variants", "eager,compild"], "--variants: 'compild' is none of eager, compiled, megafp8:bf16, "),
        (["--shapes", "llama3"], "--shapes: 'llama3' is none of llama3-8b, llama3-70b, llama3-70b-tp8, small, tiny"),
        (["--profile", "te:none"], "--variants: 'te:none' is none of eager, "),
        (["--variants", "eager", "--profile", "compiled"], "--profile: 'compiled' is none of eager"),
        (["--micro-batches", "0"], "--micro-batches: 0 is too few; 1 or more would work"),
        (
            ["--device", "cpu", "--variants", "megafp8:bf16+graph"],
            "--variants: a CPU has no CUDA graphs; the same without",
        ),
    ],
)
def test_bad_options_are_one_line(options: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_layer.main(options) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"error: {line}")
    assert err.count("\n") == 1


def test_no_cuda_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert bench_layer.main(["--device", "cuda"]) == 2
    assert capsys.readouterr().err == "error: --device: torch sees no CUDA device here; cpu would work\n"


# --- what takes a compiler or a GPU ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_compiled_is_the_baseline(tmp_path: Path) -> None:
    code, report = bench(tmp_path, "--variants", "eager,compiled")
    eager, compiled = report["rows"]
    assert code == 0
    assert compiled["ratio"] == 1.0
    assert eager["ratio"] == pytest.approx(compiled["ms"] / eager["ms"])


@pytest.mark.gpu
def test_memory_and_kernels_on_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ours = ["megafp8:current", "megafp8:current+graph"]
    options = ["--device", "cuda", "--seq-length", "512", "--variants", ",".join(["eager", *ours])]
    code, report = bench(tmp_path, *options, "--profile", ",".join(["eager", *ours]), "--micro-batches", "2")
    assert code == 0
    least = 512 * (3 * TINY.hidden_size + 3 * TINY.ffn_hidden_size) / 2**30  # what GEMMs and SwiGLU read, a byte each
    for row in report["rows"]:
        assert row["saved_gib_per_layer"] > least
        assert row["peak_gib"] > row["saved_gib_per_layer"]
    assert sum(kernel["microseconds"] for kernel in report["kernels"]["eager"]) > 0
    kernels, replayed = (sum(kernel["count"] for kernel in report["kernels"][name]) for name in ours)
    assert replayed == pytest.approx(kernels, rel=0.1), "the profiler sees kernels inside graphs"
    assert capsys.readouterr().out.count("GPU busy") == 3


@pytest.fixture
def problem() -> Iterator[Problem]:
    device = initialize_distributed("cpu")
    try:
        parallel = initialize_model_parallel(device=device)
        yield Problem(TINY, 2, TINY.seq_length, random_weights(TINY, 2, device), parallel)
    finally:
        destroy_model_parallel()


def test_a_floor_is_the_products_and_attention_alone(problem: Problem) -> None:
    layers = variants()["megafp8:current+floor"](problem)
    x, dy = (torch.randn(problem.seq_length, 1, TINY.hidden_size).bfloat16() for _ in range(2))
    layers.zero_grad()
    floor = floor_of(layers, x, dy)
    assert len(floor.calls) == problem.layers * (4 * 3 + 2)  # type: ignore[attr-defined]
    once = {name: grad.clone() for name, grad in layers.gradients().items() if grad is not None}
    layers.zero_grad()
    floor.micro_batch(x, dy, True)  # the same products again: the same weight gradients
    for name, grad in layers.gradients().items():
        if grad is not None and grad.dim() == 2:
            torch.testing.assert_close(grad, once[name], rtol=0, atol=0)
