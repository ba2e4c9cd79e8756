"""FP8 health: each statistic against loops over the elements, what is sampled, the file, and the advice."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megafp8.config import Config
from megafp8.fp8 import E4M3, E5M2, Format, health
from megafp8.fp8.health import (
    EXACT_DB,
    Advice,
    Fp8Record,
    Recorder,
    ReportWriter,
    advice,
    as_yaml,
    read_report,
    statistics,
)
from megafp8.numerics.tensor import (
    BLOCK_1X16,
    BLOCK_1X32,
    BLOCK_1X128,
    BLOCK_128X128,
    ROW,
    TENSOR,
    Granularity,
    ScaledTensor,
)
from tests.fp8.reference import decode, encode
from tests.marks import slow_but

GRANULARITIES = [TENSOR, ROW, BLOCK_1X128, BLOCK_128X128, BLOCK_1X32, BLOCK_1X16]
AMAX, _, UNDERFLOW, SATURATED, SNR_DB = range(5)


def blocks_of(granularity: Granularity, r: int, c: int) -> Iterator[tuple[tuple[int, ...], tuple[slice, slice]]]:
    """Each block's index in scale_inv, and its elements."""
    rows, columns = granularity.rows or r, granularity.columns or c
    for i in range(0, r, rows):
        for j in range(0, c, columns):
            place = () if granularity.rows is None else (i // rows, j // columns)
            yield place, (slice(i, i + rows), slice(j, j + columns))


def cast(x: Tensor, fmt: Format, granularity: Granularity, stale: float) -> tuple[ScaledTensor, NDArray[np.float32]]:
    """x quantized by the reference with scales `stale` times those that fit, and the scales."""
    values = x.float().numpy()
    scale = np.ones(granularity.grid(*x.shape), np.float32)
    data = np.zeros(x.shape, np.uint8)
    for place, block in blocks_of(granularity, *x.shape):
        amax = np.abs(values[block]).max()
        if amax > 0:
            scale[place] = np.float32(fmt.max) / amax * np.float32(stale)
        data[block] = encode(values[block] * scale[place], fmt)
    return ScaledTensor(torch.from_numpy(data).view(fmt.dtype), torch.tensor(1 / scale), granularity), scale


def by_hand(x: Tensor, q: ScaledTensor, scale: NDArray[np.float32], fmt: Format) -> list[float]:
    """The five figures, element by element in float64."""
    signal = noise = 0.0
    nonzero = lost = clamped = 0
    data, scale_inv = q.data.view(torch.uint8).numpy(), q.scale_inv.numpy()
    for place, block in blocks_of(q.granularity, *x.shape):
        for value, byte in zip(x[block].flatten().tolist(), data[block].flatten().tolist()):
            rounded = float(np.float32(decode(byte, fmt)) * scale_inv[place])  # dequantized means to fp32
            signal += value**2
            noise += (value - rounded) ** 2
            nonzero += value != 0
            lost += value != 0 and byte & 0x7F == 0
            clamped += abs(value) * float(scale[place]) > fmt.max * (1 + 1e-6)  # scales are rounded to fp32
    amax = max(abs(v) for v in x.flatten().tolist())
    middle = float(np.sort(scale.flatten())[scale.size // 2])
    return [amax, middle, lost / nonzero, clamped / x.numel(), 10 * math.log10(signal / noise)]


def heavy_tailed(r: int, c: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Values over many octaves, some of them zero."""
    generator = torch.Generator().manual_seed(seed)
    normal, spread, kept = (torch.randn(r, c, generator=generator) for _ in range(3))
    return (normal * torch.exp(3 * spread) * (kept > -1.5)).to(dtype)


@pytest.mark.parametrize(
    ("fmt", "dtype"),
    slow_but(
        itertools.product([E4M3, E5M2], [torch.bfloat16, torch.float32]), (E4M3, torch.bfloat16), (E5M2, torch.float32)
    ),
    ids=lambda x: getattr(x, "name", None),
)
@pytest.mark.parametrize("stale", [1.0, 8.0, 2.0**-9], ids=["fits", "saturates", "underflows"])
@pytest.mark.parametrize("granularity", GRANULARITIES, ids=lambda granularity: granularity.name)
def test_statistics_against_loops(
    granularity: Granularity, fmt: Format, stale: float, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = heavy_tailed(131, 137, dtype)
    q, scale = cast(x, fmt, granularity, stale)
    expected = by_hand(x, q, scale, fmt)
    for band in (2**23, 700):  # in one piece, and in bands of a few rows
        monkeypatch.setattr(health, "_BAND_ELEMENTS", band)
        found = statistics(x, q)
        assert found.dtype == torch.float32
        np.testing.assert_allclose(found[:SNR_DB].tolist(), expected[:SNR_DB], rtol=3e-7, atol=0)
        assert found[SNR_DB].item() == pytest.approx(expected[SNR_DB], abs=1e-4, rel=0)  # norms are summed in fp32
    assert (expected[SATURATED] > 0) == (stale > 1)


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda fmt: fmt.name)
def test_rounding_alone_leaves_the_decibels_promised(fmt: Format) -> None:
    x = torch.randn(128, 512, generator=torch.Generator().manual_seed(1))
    q, _ = cast(x, fmt, TENSOR, 1.0)
    assert statistics(x, q)[SNR_DB].item() == pytest.approx({"e4m3": 31, "e5m2": 25}[fmt.name], abs=1)


def scaled(x: Tensor, fmt: Format = E4M3, scale: float = 1.0) -> ScaledTensor:
    data = encode(x.float().numpy() * np.float32(scale), fmt)
    return ScaledTensor(torch.from_numpy(data).view(fmt.dtype), torch.tensor(scale).reciprocal())


def test_saturated_is_beyond_the_maximum_though_it_would_round_to_it() -> None:
    x = torch.tensor([[448.0, -448.0, 450.0, -1e4]])
    assert statistics(x, scaled(x))[SATURATED].item() == 0.5


def test_a_scale_that_fits_never_saturates() -> None:
    amaxes = torch.rand(1000, 1, generator=torch.Generator().manual_seed(0)) * 10
    for dtype in (torch.float32, torch.bfloat16):
        x = amaxes.to(dtype)
        for fmt in (E4M3, E5M2):
            q, _ = cast(x, fmt, ROW, 1.0)
            assert statistics(x, q)[SATURATED].item() == 0


def test_underflow_is_of_the_non_zero_elements_and_starts_at_half_the_least_value() -> None:
    half = 2.0**-10  # E4M3's least is 2^-9; the tie goes to zero
    x = torch.tensor([[half, -half, math.nextafter(half, 1) * (1 + 2**-20), 0.0, -0.0, 1.0]])
    assert statistics(x, scaled(x))[UNDERFLOW].item() == 0.5


def test_exact_casts_zeros_and_total_loss() -> None:
    exact = torch.tensor([[1.0, -0.25, 448.0, 0.0]])
    assert statistics(exact, scaled(exact)).tolist() == [448.0, 1.0, 0.0, 0.0, EXACT_DB]
    zeros = torch.zeros(3, 5, dtype=torch.bfloat16)
    assert statistics(zeros, scaled(zeros)).tolist() == [0.0, 1.0, 0.0, 0.0, EXACT_DB]
    lost = torch.full((2, 2), 1e-6)
    assert statistics(lost, scaled(lost)).tolist()[UNDERFLOW:] == [1.0, 0.0, 0.0]


@pytest.mark.parametrize("power", [-120, -60, 60, 110])
def test_snr_does_not_depend_on_the_size(power: int) -> None:
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(2))
    at_one = statistics(x, scaled(x, scale=64.0))
    moved = statistics(x * 2.0**power, scaled(x * 2.0**power, scale=64.0 * 2.0**-power))
    assert moved[SNR_DB].item() == at_one[SNR_DB].item()
    assert moved[AMAX].item() == at_one[AMAX].item() * 2.0**power


def test_a_scale_inv_of_zero_loses_and_does_not_clamp() -> None:
    x = torch.ones(1, 32)
    data = encode(np.array([[2.0] * 16 + [0.0] * 16], np.float32), E4M3)
    q = ScaledTensor(torch.from_numpy(data).view(E4M3.dtype), torch.tensor([[0.5, 0.0]]), BLOCK_1X16)
    assert statistics(x, q).tolist()[UNDERFLOW : SATURATED + 1] == [0.5, 0]


@pytest.mark.parametrize("broken", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("granularity", [TENSOR, BLOCK_1X16], ids=lambda granularity: granularity.name)
def test_what_is_not_finite_becomes_null(granularity: Granularity, broken: float, tmp_path: Path) -> None:
    x = torch.ones(2, 32)
    x[1, 3] = broken
    recorder = Recorder(1)
    recorder.begin_step(1)
    recorder.observe("a", "input", x, ScaledTensor(scaled(x).data, torch.ones(granularity.grid(2, 32)), granularity))
    (record,) = recorder.end_step()
    saturated = 0.0 if math.isnan(broken) else 0.015625
    assert record == Fp8Record(1, "a", "input", amax=None, scale=1.0, underflow=0.0, saturated=saturated, snr_db=None)
    writer = ReportWriter(tmp_path / "r", 0)
    writer.write([record])
    writer.close()
    line = json.loads((tmp_path / "r").read_text(), parse_constant=pytest.fail)  # NaN and Infinity are no JSON
    assert (line["amax"], line["snr_db"]) == (None, None)


def observe(recorder: Recorder, layer: str, operand: str, amax: float) -> None:
    x = torch.full((2, 4), amax)
    recorder.observe(layer, operand, x, scaled(x))


def test_every_nth_step_and_each_tensors_first_micro_batch() -> None:
    recorder = Recorder(3)
    found = []
    for step in range(1, 8):
        assert recorder.begin_step(step) == (step in (3, 6))
        assert recorder.wants("a", "input") == (step in (3, 6))
        for microbatch in range(3):
            observe(recorder, "b", "input", step + microbatch)
            observe(recorder, "a", "input", 2.0 * step + microbatch)
            observe(recorder, "a", "grad_output", 8.0)
        assert not recorder.wants("a", "input")
        found += recorder.end_step()
        assert not recorder.wants("c", "input")
        observe(recorder, "a", "input", 1.0)  # evaluation, between steps
    assert [(r.step, r.layer, r.operand, r.amax) for r in found] == [
        (3, "b", "input", 3.0), (3, "a", "input", 6.0), (3, "a", "grad_output", 8.0),
        (6, "b", "input", 6.0), (6, "a", "input", 12.0), (6, "a", "grad_output", 8.0),
    ]  # fmt: skip
    assert found[0] == Fp8Record(3, "b", "input", amax=3.0, scale=1.0, underflow=0.0, saturated=0.0, snr_db=EXACT_DB)


def test_figures_have_six_digits() -> None:
    recorder = Recorder(1)
    recorder.begin_step(1)
    observe(recorder, "a", "input", 1.23456789)
    assert recorder.end_step()[0].amax == 1.23457
    with pytest.raises(ValueError, match="interval is 0; it must be at least 1 step"):
        Recorder(0)


class CountsReads(TorchDispatchMode):
    """Counts what waits for a device: `item` and its kin."""

    reads = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        waits = (torch.ops.aten._local_scalar_dense, torch.ops.aten.nonzero, torch.ops.aten.equal)
        self.reads += func.overloadpacket in waits
        return func(*args, **(kwargs or {}))


def test_observing_waits_for_nothing() -> None:
    recorder = Recorder(1)
    recorder.begin_step(1)
    x = heavy_tailed(4, 256, torch.bfloat16)
    casts = [cast(x, E4M3, granularity, 1.0)[0] for granularity in GRANULARITIES]
    with CountsReads() as counter:
        for q in casts:
            recorder.observe(q.granularity.name, "input", x, q)
        assert counter.reads == 0
        x.sum().item()
        assert counter.reads == 1


@pytest.mark.gpu
def test_observing_waits_for_nothing_on_a_gpu_and_finds_the_same() -> None:
    x = heavy_tailed(131, 137, torch.bfloat16)
    for granularity in GRANULARITIES:
        q, _ = cast(x, E4M3, granularity, 8.0)
        on_gpu = x.cuda(), ScaledTensor(q.data.cuda(), q.scale_inv.cuda(), granularity)
        torch.cuda.set_sync_debug_mode("error")
        try:
            found = statistics(*on_gpu)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        np.testing.assert_allclose(found.tolist(), statistics(x, q).tolist(), rtol=3e-7, atol=1e-4)


RECORD = Fp8Record(100, "layers.0.mlp.down", "input", amax=3.5, scale=128.0, underflow=0.01, saturated=0.0, snr_db=31.5)


def write(path: Path, step: int, *records: Fp8Record) -> None:
    writer = ReportWriter(path, step)
    writer.write(records)
    writer.close()


def test_one_object_a_tensor_with_the_names_promised(tmp_path: Path) -> None:
    write(tmp_path / "r", 0, RECORD, replace(RECORD, operand="weight", snr_db=None))
    lines = [json.loads(line) for line in (tmp_path / "r").read_text().splitlines()]
    assert lines[0] == {
        "step": 100, "layer": "layers.0.mlp.down", "operand": "input", "amax": 3.5, "scale": 128.0,
        "underflow": 0.01, "saturated": 0.0, "snr_db": 31.5,
    }  # fmt: skip
    assert read_report(tmp_path / "r") == [RECORD, replace(RECORD, operand="weight", snr_db=None)]


def test_resuming_drops_what_was_lost_and_keeps_the_rest(tmp_path: Path) -> None:
    first = [replace(RECORD, step=step, operand=o) for step in (100, 200, 300, 400) for o in ("input", "weight")]
    write(tmp_path / "r", 0, *first)
    again = replace(RECORD, step=250, amax=9.0)
    write(tmp_path / "r", 200, again)  # with another interval
    assert read_report(tmp_path / "r") == [*first[:4], again]
    write(tmp_path / "r", 250)
    assert read_report(tmp_path / "r") == [*first[:4], again]
    write(tmp_path / "r", 0)
    assert read_report(tmp_path / "r") == []


def test_a_line_cut_short_is_dropped_by_both(tmp_path: Path) -> None:
    path = tmp_path / "r"
    write(path, 0, RECORD, replace(RECORD, step=200))
    whole = path.read_text()
    path.write_text(whole[:-20])
    assert read_report(path) == [RECORD]
    write(path, 500, replace(RECORD, step=600))
    assert read_report(path) == [RECORD, replace(RECORD, step=600)]


@pytest.mark.parametrize(
    "line", ["not json", "[1, 2]", '{"step": 3}', '{"loss": 3.0}', "[" * 10**5], ids=lambda line: line[:9]
)
def test_a_line_of_something_else_is_named(line: str, tmp_path: Path) -> None:
    path = tmp_path / "r"
    write(path, 0, RECORD)
    with path.open("a") as file:
        file.write(line + "\n")
    with pytest.raises(ValueError, match="r, line 2 is not a line of an FP8 report"):
        read_report(path)
    with pytest.raises(ValueError, match="r, line 2 is not a line of an FP8 report"):
        ReportWriter(path, 500)


def healthy(steps: int = 12, layers: int = 4) -> list[Fp8Record]:
    """A report in which nothing is amiss."""
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
        for step in range(100, 100 * steps + 1, 100)
        for i in range(layers)
        for kind in ("attention.qkv", "mlp.down")
        for operand in ("input", "weight", "grad_output")
    ]


def changed(layer: str, operand: str, first_step: int = 0, last_step: int = 10**9, **figures: Any) -> list[Fp8Record]:
    """The healthy report with one tensor's figures replaced in some steps."""
    return [
        replace(r, **figures) if (r.layer, r.operand) == (layer, operand) and first_step <= r.step <= last_step else r
        for r in healthy()
    ]


QKV, DOWN = "layers.3.attention.qkv", "layers.3.mlp.down"


@pytest.mark.parametrize(
    ("layer", "operand", "figures", "fp8_format", "change", "reason"),
    [
        (QKV, "input", {"saturated": 2e-3}, "hybrid", ("recipe", "current"), "0.20% of the elements are clamped"),
        (QKV, "grad_output", {"underflow": 0.06}, "e4m3", ("format", "hybrid"), "6.0% of the gradient underflows"),
        (QKV, "grad_output", {"snr_db": 19.0}, "hybrid", ("exclude", QKV), "SNR 19.0 dB, 6.5 below"),
        (QKV, "input", {"first_step": 1000, "snr_db": 25.0}, "hybrid", ("exclude", QKV), "SNR 25"),  # 3 of the last 5
        (
            DOWN, "input", {"first_step": 800, "amax": 30.0, "saturated": 0.5, "snr_db": 3.0}, "hybrid",
            ("exclude", DOWN), "amax grew 15 times since step 100: SwiGLU's known outlier",
        ),
    ],
    ids=["saturation", "underflow", "snr", "snr-lately", "growth"],
)  # fmt: skip
def test_advice(
    layer: str, operand: str, figures: dict[str, Any], fp8_format: Any, change: tuple[str, str], reason: str
) -> None:
    (a,) = advice(changed(layer, operand, **figures), fp8_format=fp8_format)
    assert (a.layer, a.operand, a.field, a.value) == (layer, operand, *change)
    assert reason in a.reason
    assert a.field != "recipe" or "margin" in a.reason


@pytest.mark.parametrize(
    ("layer", "operand", "figures", "fp8_format"),
    [
        (QKV, "input", {}, "e4m3"),
        (QKV, "input", {"saturated": 1e-3}, "hybrid"),
        (QKV, "input", {"last_step": 700, "saturated": 0.5}, "hybrid"),  # long ago
        (QKV, "input", {"first_step": 1200, "saturated": 4e-3}, "hybrid"),  # 8e-4 of five
        (DOWN, "grad_output", {"underflow": 0.06}, "hybrid"),
        (DOWN, "grad_output", {"underflow": 0.05}, "e4m3"),
        (DOWN, "input", {"underflow": 0.06}, "e4m3"),
        (QKV, "grad_output", {"snr_db": 20.0}, "hybrid"),
        (QKV, "grad_output", {"first_step": 1000, "snr_db": None}, "hybrid"),
        (DOWN, "input", {"first_step": 800, "amax": 20.0}, "hybrid"),  # ten times, no more
        (DOWN, "input", {"first_step": 1100, "amax": 1e4}, "hybrid"),  # two samples
        (DOWN, "weight", {"first_step": 800, "amax": 30.0}, "hybrid"),
        (QKV, "input", {"first_step": 800, "amax": 30.0}, "hybrid"),
        (DOWN, "input", {"first_step": 800, "amax": None}, "hybrid"),
        (DOWN, "input", {"amax": 0.0}, "hybrid"),
        (QKV, "grad_output", {"first_step": 800, "amax": None, "saturated": 0.5, "underflow": 0.5}, "e4m3"),
    ],
)
def test_no_advice(layer: str, operand: str, figures: dict[str, Any], fp8_format: Any) -> None:
    assert advice(changed(layer, operand, **figures), fp8_format=fp8_format) == []


def test_fewer_tensors_than_have_a_median_get_no_advice() -> None:
    few = [r for r in changed(QKV, "input", snr_db=5.0) if r.layer in (QKV, "layers.0.mlp.down")]
    assert advice(few, fp8_format="hybrid") == []
    assert advice([], fp8_format="hybrid") == []


def test_two_samples_are_enough_to_see_growth_and_one_is_not() -> None:
    pair = [replace(RECORD, step=1, amax=1.0), replace(RECORD, step=2, amax=11.0)]
    assert len(advice(pair, fp8_format="hybrid")) == 1
    assert advice(pair[:1], fp8_format="hybrid") == []


def test_the_yaml_is_a_config_section_and_keeps_what_was_excluded() -> None:
    advised = [
        Advice("layers.1.mlp.down", "input", "", "exclude", "layers.1.mlp.down"),
        Advice("layers.1.mlp.down", "weight", "", "exclude", "layers.1.mlp.down"),
        Advice("layers.0.mlp.down", "input", "", "recipe", "current"),
        Advice("layers.2.mlp.down", "input", "", "recipe", "current"),
        Advice("layers.2.mlp.down", "grad_output", "", "format", "hybrid"),
    ]
    section = yaml.safe_load(as_yaml(advised, ["layers.0.*"]))["fp8"]
    assert section == {"recipe": "current", "format": "hybrid", "exclude": ["layers.0.*", "layers.1.mlp.down"]}
    config = Config.model_validate(
        {
            "name": "a", "fp8": section, "model": {"num_layers": 4, "hidden_size": 8, "num_attention_heads": 1},
            "training": {"steps": 1, "seq_length": 1, "global_batch_size": 1},
            "optimizer": {"learning_rate": 1.0}, "data": {"train": ["a"]},
        }
    )  # fmt: skip
    assert config.fp8.exclude == ["layers.0.*", "layers.1.mlp.down"]
    assert yaml.safe_load(as_yaml(advised[2:3], ["layers.0.*"]))["fp8"] == {"recipe": "current"}
