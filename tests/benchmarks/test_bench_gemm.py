"""bench_gemm: operands, every variant against float64, detection of wrong GEMMs, tables and arguments."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import bench_gemm
from benchmarks.bench_gemm import BASELINE, Operands, Result, operands_of, prepare, variants
from benchmarks.blocks import SHAPES
from megafp8.fp8.speed_model import LinearSize
from megafp8.numerics.tensor import ROW, TENSOR

CPU = torch.device("cpu")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SIZE = LinearSize(32, 64, 48)


def bench(tmp_path: Path, *options: str) -> tuple[int, dict[str, Any]]:
    """Exit code and JSON of a short run."""
    path = tmp_path / "bench.json"
    code = bench_gemm.main(["--device", "cpu", "--rounds", "2", "--json", str(path), *options])
    return code, json.loads(path.read_text())


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


def test_gradients_are_e5m2_with_one_scale_per_tensor() -> None:
    for operands in operands_of(SIZE, CPU):
        wide = torch.float8_e5m2 if operands.gemm != "fprop" else torch.float8_e4m3fn
        assert operands.quantized("a", TENSOR).data.dtype == wide
        assert operands.quantized("b", TENSOR).data.dtype == torch.float8_e4m3fn
        assert operands.quantized("a", ROW).data.dtype == torch.float8_e4m3fn


def test_wrong_and_failing_gemms_are_reported() -> None:
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
    assert "left out, cublaslt tuned: " in printed
    assert "tiny: all 12 GEMMs" in printed
    records = [r for r in report["gemms"] if r["variant"] == "emulated tensor split"]
    assert [r["gemm"] for r in records] == ["fprop", "dgrad", "wgrad"] * 5
    assert [r["size"] for r in records[::3]] == [[16, *size[1:]] for size in SHAPES["tiny"].linears(0).values()] + [
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


def test_speedup_of_accumulating_in_place(capsys: pytest.CaptureFixture[str]) -> None:
    results = [
        result("wgrad", "scaled_mm tensor split", 3.0), result("wgrad", "cublaslt tuned tensor split", 2.0),
        result("wgrad", "scaled_mm tensor split", 6.0, layer="down"),
        result("wgrad", "cublaslt tuned tensor split", 5.0, layer="down"),
        result("dgrad", "scaled_mm tensor split", 99.0), Result("qkv", SIZE, "wgrad", "cublaslt row fast", 1.0),
    ]  # fmt: skip
    bench_gemm.print_wgrad_speedup(results)
    assert capsys.readouterr().out == (
        "wgrad, tensor split: cublaslt tuned in place over scaled_mm + add_ 1.29x (qkv 1.50, down 1.20)\n"
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--shapes", "llama9"],
            f"--shapes: 'llama9' is none of {', '.join(SHAPES)}, nor a size",
        ),
        (["--shapes", "16x16x17"], "16x16x17: FP8 GEMMs take multiples of 16"),
        (["--rounds", "0"], "--rounds: 0 is too few"),
    ],
)
def test_bad_arguments(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_gemm.main(["--device", "cpu", *options]) == 2
    assert f"error: {message}" in capsys.readouterr().err
