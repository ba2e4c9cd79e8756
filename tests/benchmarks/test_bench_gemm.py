"""The benchmark of GEMMs and of layer sizes: what it counts, that it sees a wrong GEMM, and what it says."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import bench_casts, bench_gemm, speed_map
from benchmarks.bench_gemm import Result, linears, prepare
from benchmarks.gemm_variants import BASELINE, Operands, operands_of, variants
from benchmarks.reference_layers import SHAPES
from benchmarks.speed_map import PUBLISHED, Point
from megafp8.fp8 import CurrentScaling
from megafp8.fp8.speed_model import CEILINGS, LinearSeconds, LinearSize, predict
from megafp8.fp8.tensor import ROW, TENSOR

CPU = torch.device("cpu")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SIZE = LinearSize(32, 64, 48)


def bench(tmp_path: Path, *options: str) -> tuple[int, dict[str, Any]]:
    """Exit code and JSON of a short run."""
    path = tmp_path / "bench.json"
    code = bench_gemm.main(["--device", "cpu", "--rounds", "2", "--json", str(path), *options])
    return code, json.loads(path.read_text())


# --- GEMMs -----------------------------------------------------------------------------------------------------------


def test_the_linears_of_a_shape_are_its_matmul_parameters() -> None:
    for shape in SHAPES.values():
        sizes = linears(shape, 7).values()
        assert sum(size.k * size.n for size in sizes) == shape.matmul_parameters
        assert {size.m for size in sizes} == {7}


def test_operands_are_those_of_the_three_gemms() -> None:
    m, k, n = SIZE
    fprop, dgrad, wgrad = operands_of(SIZE, CPU)
    for operands, dims in ((fprop, (m, k, n)), (dgrad, (m, n, k)), (wgrad, (n, m, k))):
        assert (*operands.a_rs.shape, operands.b_sc.shape[1]) == dims
        assert operands.flops == 2 * m * k * n
    assert torch.equal(fprop.b_sc.t(), dgrad.b_sc), "one weight"
    assert torch.equal(fprop.a_rs, wgrad.b_sc), "one input"
    assert torch.equal(dgrad.a_rs.t(), wgrad.a_rs), "one gradient"
    with pytest.raises(ValueError, match="33x64x48: FP8 GEMMs take multiples of 16"):
        operands_of(LinearSize(33, 64, 48), CPU)


@pytest.mark.parametrize("device", DEVICES)
def test_variants_compute_the_product(device: str) -> None:
    """Against float64, within what rounding the operands costs; wgrad adds to what is there."""
    known, _ = variants(torch.device(device))
    assert next(iter(known)) == BASELINE
    for operands in operands_of(LinearSize(256, 384, 128), torch.device(device)):
        expected = operands.a_rs.double() @ operands.b_sc.double()
        for name, variant in known.items():
            try:
                run = variant(operands)
                run()
            except (RuntimeError, ValueError, NotImplementedError):
                assert name.startswith("scaled_mm"), "torch has not all of them, neither on CPU nor on CUDA"
                continue
            times = 2 if operands.accumulates else 1
            y = run()
            assert y.dtype == (torch.float32 if operands.accumulates else torch.bfloat16)
            difference = (y.double() - times * expected).norm() / (times * expected).norm()
            assert difference < (0.003 if name.startswith("bf16") else 0.1), name
            if not name.startswith("bf16"):
                assert difference > 0.01, f"{name} is no FP8"


def test_gradients_are_e5m2_with_one_factor_a_tensor() -> None:
    for operands in operands_of(SIZE, CPU):
        wide = torch.float8_e5m2 if operands.gemm != "fprop" else torch.float8_e4m3fn
        assert operands.quantized("a", TENSOR).data.dtype == wide
        assert operands.quantized("b", TENSOR).data.dtype == torch.float8_e4m3fn
        assert operands.quantized("a", ROW).data.dtype == torch.float8_e4m3fn


def test_a_wrong_gemm_is_seen_and_a_failing_one_noted() -> None:
    def wrong(operands: Operands) -> Any:
        return lambda: 1.2 * (operands.a_rs @ operands.b_sc)

    def broken(operands: Operands) -> Any:
        raise RuntimeError("no such kernel\nsecond line")

    def nan(operands: Operands) -> Any:
        return lambda: (operands.a_rs @ operands.b_sc) * float("nan")

    known = {BASELINE: variants(CPU)[0][BASELINE], "wrong": wrong, "broken": broken, "nan": nan}
    operands = operands_of(SIZE, CPU)[0]
    results = [Result("l", SIZE, "fprop", name, 1.0) for name in known]
    ready = prepare(operands, results, known)
    assert [result.variant for result, _ in ready] == [BASELINE, "wrong", "nan"]
    assert [result.wrong for result in results] == [False, True, False, True]
    assert results[1].difference == pytest.approx(0.2, abs=0.01)
    assert results[2].note == "RuntimeError: no such kernel"


def test_a_run_on_a_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, report = bench(tmp_path, "--shapes", "tiny,32x64x48", "--tokens", "16")
    printed = capsys.readouterr().out
    assert code == 0
    assert report["casts"] == []
    assert "left out, quantize kernels" in printed
    assert "left out, cublaslt tuned: " in printed
    assert "tiny: all 12 GEMMs" in printed
    records = [r for r in report["gemms"] if r["variant"] == "emulated tensor split"]
    assert [r["gemm"] for r in records] == ["fprop", "dgrad", "wgrad"] * 5
    assert [r["size"] for r in records[::3]] == [[16, *size[1:]] for size in linears(SHAPES["tiny"], 0).values()] + [
        list(SIZE)
    ]
    for record in records:
        assert len(record["samples_ms"]) == 2
        assert record["tflops"] == pytest.approx(record["flops"] / record["ms"] / 1e9)


def result(gemm: str, variant: str, *samples: float, layer: str = "qkv") -> Result:
    return Result(layer, SIZE, gemm, variant, flops=2e12, samples_ms=list(samples))


def test_tables_add_medians(capsys: pytest.CaptureFixture[str]) -> None:
    results = [result(gemm, BASELINE, 9.0, 4.0, 1.0, layer=layer) for gemm in bench_gemm.GEMMS for layer in "ab"]
    results += [result(gemm, "fast", 1.0, layer=layer) for gemm in bench_gemm.GEMMS for layer in "ab"]
    results += [Result("a", SIZE, "fprop", "some", 1.0, note="Error: why")]
    results += [result("dgrad", "some", 5.0, layer="a"), result("wgrad", "some", 8.0, layer="a")]
    bench_gemm.print_layer(results, "title")
    torch_row, fast, some, note = (re.split(r"\s{2,}", line) for line in capsys.readouterr().out.splitlines()[3:])
    assert torch_row == [BASELINE, "8.000", "500", "8.000", "500", "8.000", "500", "24.000", "500", "1.00"]
    assert (fast[0], *fast[-3:]) == ("fast", "6.000", "2e+03", "4.00")
    assert some == ["some", "-", "-", "5.000", "400", "8.000", "250", "-", "-", "-"]
    assert note == ["some", "left out, fprop: Error: why"]


def test_what_adding_in_place_is_worth(capsys: pytest.CaptureFixture[str]) -> None:
    results = [
        result("wgrad", "scaled_mm tensor split", 3.0), result("wgrad", "cublaslt tuned tensor split", 2.0),
        result("wgrad", "scaled_mm tensor split", 6.0, layer="down"),
        result("wgrad", "cublaslt tuned tensor split", 5.0, layer="down"),
        result("dgrad", "scaled_mm tensor split", 99.0), Result("qkv", SIZE, "wgrad", "cublaslt row fast", 1.0),
    ]  # fmt: skip
    bench_gemm.print_wgrad_gain(results)
    assert capsys.readouterr().out == (
        "wgrad, tensor split: cublaslt tuned in place over scaled_mm + add_ 1.29x (qkv 1.50, down 1.20)\n"
    )


def test_casts_are_held_against_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels need a GPU; what is made of their times does not."""
    case = bench_casts.Case("plain -> tensor", "plain", ("one factor",), lambda: None, bytes=4 * 10**9)
    monkeypatch.setattr(bench_casts, "cases", lambda: [case])
    monkeypatch.setattr(bench_casts, "milliseconds", lambda run: 2.0)
    monkeypatch.setattr(bench_casts, "copy_bandwidth", lambda: 4.0)
    (record,) = bench_gemm.bench_quantize(torch.device("cuda"))
    assert record == {"kernel": case.name, "bytes": case.bytes, "ms": 2.0, "tb_per_s": 2.0, "of_copy": 0.5}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--shapes", "llama9"], "--shapes: 'llama9' is none of llama3-8b, llama3-70b-tp8, small, tiny, nor a size"),
        (["--shapes", "16x16x17", "--parts", "gemms"], "16x16x17: FP8 GEMMs take multiples of 16"),
        (["--parts", "gemm"], "--parts: 'gemm' is neither gemms nor casts"),
        (["--rounds", "0"], "--rounds: 0 is too few"),
        (["--sweep", "--m", "1k"], "--m: '1k' is no list of positive whole numbers"),
        (["--sweep", "--predicted-only"], "the speeds of 'cpu' are not known, only those of NVIDIA H200"),
    ],
)
def test_mistakes_are_named(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_gemm.main(["--device", "cpu", *options]) == 2
    assert f"error: {message}" in capsys.readouterr().err


# --- sweep -----------------------------------------------------------------------------------------------------------


def test_a_sweep_on_a_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    png = tmp_path / "speed.png"
    options = ["--sweep", "--grid-only", "--m", "16", "--k", "16,32", "--n", "16,48", "--png", str(png)]
    code, report = bench(tmp_path, *options, "--recipe", "delayed", "--micro-batches", "3")
    assert code == 0
    assert "left out, prediction: the speeds of 'cpu' are not known" in capsys.readouterr().out
    points = report["sweep"]["points"]
    assert [(p["m"], p["k"], p["n"]) for p in points] == [(16, 16, 16), (16, 16, 48), (16, 32, 16), (16, 32, 48)]
    for point in points:
        measured = point["measured"]
        assert measured["speedup"] == pytest.approx(measured["bf16_ms"] / measured["fp8_ms"])
        assert point["predicted"] is None
    assert png.read_bytes().startswith(b"\x89PNG")


def test_predictions_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    png = tmp_path / "speed.png"
    options = ["--m", "1024,4096", "--k", "2048,8192", "--n", "1024,16384", "--png", str(png)]
    code, report = bench(tmp_path, "--sweep", "--predicted-only", "--ceilings", "NVIDIA H200", *options)
    assert code == 0
    points = report["sweep"]["points"]
    assert len(points) == 8 + 8, "the grid, and Llama's layers"
    found = {LinearSize(p["m"], p["k"], p["n"]): p for p in points if p["published_speedup"]}
    assert {size: p["published_speedup"] for size, p in found.items()} == PUBLISHED
    for size, point in found.items():
        expected = predict(size, CurrentScaling(), CEILINGS["NVIDIA H200"])
        assert point["predicted"]["speedup"] == expected.speedup
        assert point["predicted"]["fp8_ms"] == pytest.approx(expected.fp8 * 1e3)
        assert point["measured"] is None
    row = next(line for line in capsys.readouterr().out.splitlines() if line.split()[:3] == ["4096", "8192", "16384"])
    assert row.split()[-1] == "1.39"
    assert png.stat().st_size > 0


def test_what_does_not_fit_into_memory_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(size: LinearSize, *_: Any, **__: Any) -> LinearSeconds:
        if size.k == 32:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return LinearSeconds(2.0, 1.0)

    monkeypatch.setattr(speed_map, "measure", measure)
    sizes = speed_map.grid([16], [16, 32], [16])
    points = speed_map.sweep(sizes, CurrentScaling(), CPU, None, micro_batches=1, rounds=1)
    assert points == [Point(sizes[0], None, LinearSeconds(2.0, 1.0)), Point(sizes[1], None, None)]


def test_the_map_shows_each_speedup_where_it_belongs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Rows of a panel are outputs n, columns are inputs k; a value that is not known stays empty."""
    import matplotlib.axes

    drawn: list[Tensor] = []
    original = matplotlib.axes.Axes.imshow

    def imshow(self: Any, values: Any, **options: Any) -> Any:
        drawn.append(torch.tensor(values))
        return original(self, values, **options)

    monkeypatch.setattr(matplotlib.axes.Axes, "imshow", imshow)
    seconds = {(16, 32): 1.5, (64, 32): 0.5, (64, 48): 1.25}
    points = [Point(LinearSize(8, k, n), None, LinearSeconds(value, 1.0)) for (k, n), value in seconds.items()]
    speed_map.plot(points, tmp_path / "map.png", "title")
    (panel,) = drawn
    assert torch.equal(panel.nan_to_num(-1.0), torch.tensor([[1.5, 0.5], [-1.0, 1.25]]))
