"""Products of many experts in FP8, against those of dequantized operands in float64."""

from __future__ import annotations

import random
import shutil
import subprocess
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megafp8.kernels import grouped_gemm_cuda
from megafp8.kernels.grouped_cast import cast_groups, cast_groups_1x128
from megafp8.kernels.grouped_gemm import rows_times_matrices, sums_over_rows
from megafp8.kernels.grouped_gemm_cuda import CudaKernel, Variant
from megafp8.kernels.quantize import cast_128x128
from megafp8.numerics.formats import E4M3, E5M2, Format
from megafp8.numerics.groups import RowGroups, row_slices
from megafp8.numerics.sources import Plain
from megafp8.numerics.tensor import BLOCK_1X128, TENSOR, Granularity, QuantizedTensor, ScaledTensor


def _cast(x: Tensor, fmt: Format, groups: RowGroups) -> tuple[QuantizedTensor, Tensor]:
    """The cast of rows, and their values in float64."""
    quantized = cast_groups_1x128(Plain(x), fmt, groups, rowwise=True, columnwise=True, power_of_two=False, eps=0.0)
    data, scale_inv, *_ = quantized.required_rowwise
    starts = [0, *groups.padded_ends_e.tolist()]
    scales = [
        scale_inv[start : start + rows.stop - rows.start] for rows, start in zip(row_slices(groups.ends_e), starts)
    ]
    return quantized, data.double() * torch.cat(scales).double().repeat_interleave(128, 1)


def _columnwise(x: ScaledTensor, groups: RowGroups) -> list[Tensor]:
    """The values of each expert `[c, rows]`, in float64."""
    values, ends = x.dequantize(torch.float64), groups.padded_ends_e.tolist()
    return [values[:, start:end] for start, end in zip([0, *ends], ends)]


def _assert_close(found: Tensor, expected: Tensor, tolerance: float) -> None:
    """In root mean square: Hopper adds the products of a block in 14 bits."""
    assert (found.double() - expected).norm() <= tolerance * expected.norm()


def _columnwise_operand(x: Tensor, groups: RowGroups, granularity: Granularity) -> ScaledTensor:
    """The columnwise cast of `x` with scales of experts or blocks."""
    if granularity is BLOCK_1X128:
        return _cast(x, E4M3, groups)[0].required_columnwise
    scale_e = torch.rand(len(groups.ends_e), device=x.device) + 0.5
    newest_amax_e = torch.zeros_like(scale_e)
    made = cast_groups(
        Plain(x), scale_e, scale_e.reciprocal(), E4M3, groups, rowwise=False, columnwise=True,
        newest_amax_e=newest_amax_e,
    )  # fmt: skip
    return made.required_columnwise


def _dequantized(x: ScaledTensor, groups: RowGroups) -> list[Tensor]:
    """The values of each expert `[c, rows]`, in float64."""
    if x.granularity is BLOCK_1X128:
        return _columnwise(x, groups)
    ends = groups.padded_ends_e.tolist()
    parts = [x.data[:, start:end] for start, end in zip([0, *ends], ends)]
    return [part.double() * scale_inv.double() for part, scale_inv in zip(parts, x.scale_inv)]


def _check_pair(granularity: Granularity, sizes: Sequence[Sequence[int]], p: int, q: int, device: str) -> None:
    torch.manual_seed(sum(map(sum, sizes)))
    operands, expected = [], torch.zeros(len(sizes[0]), p, q, dtype=torch.float64, device=device)
    for of_micro_batch in sizes:
        ends = torch.tensor(of_micro_batch, device=device).cumsum(0, dtype=torch.int32)
        groups, m = RowGroups.from_ends(ends, sum(of_micro_batch)), sum(of_micro_batch)
        a, b = (
            _columnwise_operand(torch.randn(m, width, device=device).bfloat16(), groups, granularity)
            for width in (p, q)
        )
        pairs = zip(_dequantized(a, groups), _dequantized(b, groups), strict=True)
        expected += torch.stack([x @ y.t() for x, y in pairs])
        operands.append((a, b, groups.padded_ends_e))
    earlier, (a, b, ends_e) = operands
    for accumulate in (False, True):
        dw = torch.full(expected.shape, 3.0, device=device)
        sums_over_rows(a, b, ends_e, dw, accumulate=accumulate, earlier=earlier)
        _assert_close(dw - 3.0 * accumulate, expected, 1e-3 if device == "cuda" else 1e-6)


PAIRS = {
    "uneven": [[3, 0, 130, 0, 16], [140, 0, 1, 200, 0]],
    "one is empty": [[0, 0, 0], [5, 0, 128]],
    "the other is empty": [[5, 0, 128], [0, 0, 0]],
}


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("granularity", [TENSOR, BLOCK_1X128], ids=lambda x: x.name)
def test_sums_of_two_micro_batches(granularity: Granularity, name: str) -> None:
    """With other rows and other scales of each expert."""
    _check_pair(granularity, PAIRS[name], 128, 128, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("granularity", [TENSOR, BLOCK_1X128], ids=lambda x: x.name)
@pytest.mark.parametrize("sizes", [*PAIRS.values(), [[40] * 70, [300, 7] * 35]], ids=[*PAIRS, "many experts"])
def test_sums_of_two_micro_batches_on_a_gpu(granularity: Granularity, sizes: Sequence[Sequence[int]]) -> None:
    _check_pair(granularity, sizes, 384, 256, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("sizes", "k", "n", "fmt"),
    [
        ([3, 0, 130, 16], 256, 384, E4M3),
        ([1, 257, 0, 128, 7], 128, 128, E5M2),
        ([0, 900, 64], 896, 640, E4M3),
        ([40] * 70, 384, 256, E5M2),
    ],
    ids=["uneven", "E5M2", "more blocks", "many experts"],
)
def test_products_of_blocks(sizes: list[int], k: int, n: int, fmt: Format) -> None:
    """All three, with more and fewer tiles than multiprocessors; wgrad added and written, also without rows."""
    torch.manual_seed(len(sizes))
    ends = torch.tensor(sizes, device="cuda").cumsum(0, dtype=torch.int32)
    groups, e, m = RowGroups.from_ends(ends, sum(sizes)), len(sizes), sum(sizes)
    x8, x = _cast(torch.randn(m, k, device="cuda").bfloat16(), E4M3, groups)
    dy8, dy = _cast(torch.randn(m, n, device="cuda").bfloat16(), fmt, groups)
    w8 = cast_128x128(
        Plain(torch.randn(e * n, k, device="cuda").bfloat16()), E4M3, rowwise=True, columnwise=True, power_of_two=False,
        eps=0.0,
    )  # fmt: skip
    w_enk = w8.required_rowwise.dequantize(torch.float64).view(e, n, k)
    y = rows_times_matrices(
        x8.required_rowwise, w8.required_rowwise, ends, n, torch.bfloat16, columnwise=False, fast=False
    )
    dx = rows_times_matrices(
        dy8.required_rowwise, w8.required_columnwise, ends, k, torch.bfloat16, columnwise=True, fast=False
    )
    for rows, w in zip(row_slices(ends), w_enk):
        _assert_close(y[rows], x[rows] @ w.t(), 4e-3)
        _assert_close(dx[rows], dy[rows] @ w, 4e-3)
    operands = (_columnwise(q.required_columnwise, groups) for q in (dy8, x8))
    expected = torch.stack([a @ b.t() for a, b in zip(*operands, strict=True)])
    for accumulate, dtype in ((False, torch.float32), (True, torch.float32), (False, torch.bfloat16)):
        dw = torch.full((e, n, k), 3.0, dtype=dtype, device="cuda")
        sums_over_rows(dy8.required_columnwise, x8.required_columnwise, groups.padded_ends_e, dw, accumulate=accumulate)
        _assert_close(dw - 3.0 * accumulate, expected, 4e-3 if dtype == torch.bfloat16 else 1e-3)


def _cast_experts(x: Tensor, fmt: Format, groups: RowGroups) -> QuantizedTensor:
    """With one scale an expert. These lie apart, as those of the experts of a layer do."""
    scale = torch.empty(len(groups.ends_e), 4, device="cuda").uniform_(10.0, 90.0)
    return cast_groups(
        Plain(x), scale[:, 1], scale.reciprocal()[:, 1], fmt, groups, rowwise=True, columnwise=True,
        newest_amax_e=None,
    )  # fmt: skip


def _by_triton(run: Callable[[], Tensor], monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """The result of `run` where the kernels for Hopper are not taken."""
    with monkeypatch.context() as patch:
        patch.setattr(grouped_gemm_cuda, "takes", lambda device: False)
        return run()


def _set_tiles(monkeypatch: pytest.MonkeyPatch, *, narrow: bool) -> None:
    """Choose narrow or wide tiles for sums over rows, whatever the number of rows."""
    monkeypatch.setattr(grouped_gemm_cuda, "_FEW_ROWS", dict.fromkeys(("blocks", "experts"), 1 << 30 if narrow else 0))


def _same_as_triton(run: Callable[[], Tensor], monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """The result of `run`, after a check that Triton's kernels give the same bits."""
    found = run()
    assert torch.equal(found, _by_triton(run, monkeypatch))
    return found


EXPERTS = [300, 0, 1, 64, 65, 129, 1000, 63]


@pytest.mark.gpu
@pytest.mark.parametrize("fast", [False, True], ids=["precise", "fast"])
@pytest.mark.parametrize(
    ("sizes", "k", "n"),
    [(EXPERTS, 512, 4096), (EXPERTS, 272, 336), (EXPERTS, 1040, 144), ([5, 0, 0], 16, 16), ([40] * 70, 384, 256)],
    ids=["more tiles than multiprocessors", "ragged", "more blocks", "least", "many experts"],
)
def test_rows_of_experts_with_one_scale(
    sizes: list[int], k: int, n: int, fast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """fprop and dgrad, in bf16 and fp32, where rows behind the last expert's are reserved."""
    torch.manual_seed(k)
    ends, m, e = torch.tensor(sizes, device="cuda").cumsum(0, dtype=torch.int32), sum(sizes), len(sizes)
    groups = RowGroups.from_ends(ends, m + 30)
    x8, dy8 = (
        _cast_experts(torch.randn(m + 30, width, device="cuda").bfloat16(), fmt, groups)
        for width, fmt in ((k, E4M3), (n, E5M2))
    )
    matrices = torch.randn(e * n, k, device="cuda").bfloat16()
    w8 = _cast_experts(matrices, E4M3, RowGroups.equal(e, n, torch.device("cuda")))
    w, w_scale_inv = w8.required_rowwise.data.double().view(e, n, k), w8.required_rowwise.scale_inv.double()
    for columnwise, rows, matrix, columns in (
        (False, x8.required_rowwise, w8.required_rowwise, n), (True, dy8.required_rowwise, w8.required_columnwise, k),
    ):  # fmt: skip
        expected = torch.zeros(m, columns, dtype=torch.float64, device="cuda")
        for i, own in enumerate(row_slices(ends)):
            product = rows.data[own].double() @ (w[i] if columnwise else w[i].t())
            expected[own] = product * rows.scale_inv[i].double() * w_scale_inv[i]
        for dtype in (torch.bfloat16, torch.float32):
            found = _same_as_triton(
                lambda: rows_times_matrices(
                    rows, matrix, ends, columns, dtype, columnwise=columnwise, fast=fast  # noqa: B023 -- called at once
                )[:m],
                monkeypatch,
            )  # fmt: skip
            _assert_close(found, expected, 1e-3 if dtype == torch.float32 and not fast else 4e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("fast", [False, True], ids=["precise", "fast"])
@pytest.mark.parametrize(("p", "q"), [(384, 2048), (256, 272), (128, 16), (144, 256)])
@pytest.mark.parametrize(
    ("sizes", "earlier_sizes"),
    [(EXPERTS, [0, 200, 0, 1, 700, 64, 0, 128]), ([0, 0, 3, 0], [0, 129, 0, 300]), ([400, 0, 256, 3], None)],
    ids=["pair", "pair with empty experts", "one"],
)
@pytest.mark.parametrize("narrow", [False, True], ids=["wide", "narrow"])
def test_sums_of_experts_with_one_scale(
    narrow: bool, sizes: list[int], earlier_sizes: list[int] | None, p: int, q: int, fast: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Written and added, of one and of two micro-batches; an expert without rows is left as it is where added to."""
    _set_tiles(monkeypatch, narrow=narrow)
    torch.manual_seed(p + q)
    before = torch.randn(len(sizes), p, q, device="cuda")
    expected, made = torch.zeros_like(before, dtype=torch.float64), []
    for own in filter(None, (earlier_sizes, sizes)):
        groups = RowGroups.from_ends(torch.tensor(own, device="cuda").cumsum(0, dtype=torch.int32), sum(own))
        a, b = (
            _cast_experts(torch.randn(sum(own), width, device="cuda").bfloat16(), fmt, groups).required_columnwise
            for width, fmt in ((p, E5M2), (q, E4M3))
        )
        expected += torch.stack([x @ y.t() for x, y in zip(_dequantized(a, groups), _dequantized(b, groups))])
        made.append((a, b, groups.padded_ends_e))
    *earlier, (a, b, ends_e) = made
    for accumulate in (False, True):

        def summed(accumulate: bool = accumulate) -> Tensor:
            out = before.clone()
            pair = earlier[0] if earlier else None
            sums_over_rows(a, b, ends_e, out, accumulate=accumulate, earlier=pair, fast=fast)
            return out

        found = _same_as_triton(summed, monkeypatch)
        _assert_close(found, expected + before.double() * accumulate, 4e-3 if fast else 1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("fast", [False, True], ids=["precise", "fast"])
def test_experts_with_one_scale_in_a_graph(fast: bool) -> None:
    """A replay reads the ends that are there, and computes a row's bits whatever rows other experts have."""
    torch.manual_seed(0)
    ends, m, k, n = torch.tensor([300, 300, 640], dtype=torch.int32, device="cuda"), 640, 400, 528
    groups = RowGroups.from_ends(ends, m)
    x8 = _cast_experts(torch.randn(m, k, device="cuda").bfloat16(), E4M3, groups).required_rowwise
    matrices = torch.randn(3 * n, k, device="cuda").bfloat16()
    w8 = _cast_experts(matrices, E4M3, RowGroups.equal(3, n, torch.device("cuda"))).required_rowwise

    def multiplied() -> Tensor:
        return rows_times_matrices(x8, w8, ends, n, torch.bfloat16, columnwise=False, fast=fast)

    first, graph = multiplied(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = multiplied()
    graph.replay()
    assert torch.equal(replayed, first)
    ends.copy_(torch.tensor([300, 471, 640]))
    graph.replay()
    assert torch.equal(replayed, multiplied())
    assert torch.equal(replayed[:300], first[:300])
    assert torch.equal(replayed[471:], first[471:])


EDGES = [0, 1, 63, 64, 65, 127, 128, 129, 191, 192, 193, 255, 256, 257, 320, 448, 449]
"""Rows of experts at which tiles, halves of tiles and pairs of them end."""


def _operands(sizes: Sequence[int], k: int, n: int, *, columnwise: bool) -> tuple[ScaledTensor, ScaledTensor, Tensor]:
    """Rows and matrices with scales that are powers of two and differ from block to block, and ends of experts."""
    ends = torch.tensor(sizes, device="cuda").cumsum(0, dtype=torch.int32)
    groups, e, m = RowGroups.from_ends(ends, sum(sizes)), len(sizes), sum(sizes)
    rows, columns = (k, n) if columnwise else (n, k)
    x = torch.randn(m, k, device="cuda") * torch.randn(m, k // 128, device="cuda").exp2().repeat_interleave(128, 1)
    blocks = torch.randn(e * rows // 128, columns // 128, device="cuda").exp2()
    w = torch.randn(e * rows, columns, device="cuda") * blocks.repeat_interleave(128, 0).repeat_interleave(128, 1)
    x8 = cast_groups_1x128(
        Plain(x.bfloat16()), E4M3, groups, rowwise=True, columnwise=False, power_of_two=True, eps=0.0
    )
    w8 = cast_128x128(Plain(w.bfloat16()), E4M3, rowwise=True, columnwise=True, power_of_two=True, eps=0.0)
    return x8.required_rowwise, w8.required_columnwise if columnwise else w8.required_rowwise, ends


needs_cuda_kernel = pytest.mark.skipif(
    not (torch.cuda.is_available() and grouped_gemm_cuda.takes(torch.device("cuda"))), reason="needs Hopper and NVRTC"
)


@pytest.mark.gpu
@needs_cuda_kernel
@pytest.mark.parametrize("columnwise", [False, True], ids=["fprop", "dgrad"])
@pytest.mark.parametrize("n", [128, 256, 384, 512, 640, 1152, 2048])
@pytest.mark.parametrize("k", [128, 640])
def test_cuda_kernel_has_the_bits_of_triton(k: int, n: int, columnwise: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """At all sizes where tiles are cut otherwise; rows behind the last expert's are not written."""
    torch.manual_seed(n + k)
    for sizes in (EDGES, [300], [5], [0, 0, 2000, 0], [(37 * i) % 200 for i in range(96)]):
        a, b, ends = _operands(sizes, k, n, columnwise=columnwise)
        multiplied = partial(rows_times_matrices, a, b, ends, n, torch.bfloat16, columnwise=columnwise, fast=False)
        expected = _by_triton(multiplied, monkeypatch)
        y = torch.full((len(expected) + 256, n), 7.0, dtype=torch.bfloat16, device="cuda")
        steps = (0, b.data.shape[1] // len(sizes)) if columnwise else (n, 0)
        for _ in range(3):
            grouped_gemm_cuda.rows_times_matrices(a, b, ends, y[:-256], *steps, fast=False)
            assert torch.equal(y[:-256], expected)
            assert (y[-256:] == 7.0).all()
            y[:-256] = 3.0


@pytest.mark.gpu
@needs_cuda_kernel
def test_cuda_kernel_in_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each replay reads how many rows the experts have."""
    torch.manual_seed(0)
    n = 1024
    a, b, ends = _operands([300, 0, 500, 1224], 512, n, columnwise=False)
    multiplied = partial(rows_times_matrices, a, b, ends, n, torch.bfloat16, columnwise=False, fast=False)
    multiplied()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = multiplied()
    a.scale_inv.copy_(torch.randint(-3, 4, a.scale_inv.shape).float().exp2())  # also where other sizes have padding
    for changed in ([300, 300, 800, 2024], [0, 128, 130, 2000]):
        ends.copy_(torch.tensor(changed, dtype=torch.int32))
        graph.replay()
        expected = _by_triton(multiplied, monkeypatch)
        assert torch.equal(y[: changed[-1]], expected[: changed[-1]])


def _sums_operands(sizes: Sequence[int], p: int, q: int) -> tuple[ScaledTensor, ScaledTensor, Tensor]:
    """Columnwise operands with scales that are powers of two and differ from block to block, and padded ends."""
    ends = torch.tensor(sizes, device="cuda").cumsum(0, dtype=torch.int32)
    groups, m = RowGroups.from_ends(ends, sum(sizes)), sum(sizes)
    values = [torch.randn(m, c, device="cuda") * torch.randn(m, c, device="cuda").exp2() for c in (p, q)]
    a, b = (
        cast_groups_1x128(
            Plain(x.bfloat16()), E4M3, groups, rowwise=False, columnwise=True, power_of_two=True, eps=0.0
        ).required_columnwise
        for x in values
    )
    return a, b, groups.padded_ends_e


@pytest.mark.gpu
@needs_cuda_kernel
@pytest.mark.parametrize(
    ("accumulate", "dtype"),
    [(False, torch.float32), (True, torch.float32), (False, torch.bfloat16)],
    ids=["written", "added", "bf16"],
)
@pytest.mark.parametrize("narrow", [False, True], ids=["wide", "narrow"])
@pytest.mark.parametrize("p", [128, 256, 640])
@pytest.mark.parametrize("q", [128, 256, 384, 640, 2048])
def test_cuda_sums_have_the_bits_of_triton(
    p: int, q: int, narrow: bool, accumulate: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At all sizes where tiles are cut otherwise. The last expert has no rows; what is behind it is not written."""
    _set_tiles(monkeypatch, narrow=narrow)
    torch.manual_seed(p + q)
    earlier_sizes = [0, 300, 0, 129, 1, 0, 700, 0, 0]
    for sizes, earlier in (
        ([300, 0, 1, 127, 128, 129, 900, 640, 0], None),
        ([300, 0, 1, 127, 128, 129, 0, 640, 0], earlier_sizes),
        ([(37 * i) % 200 for i in range(40)], [(53 * i) % 300 for i in range(40)]),
        ([0, 0, 5], [130, 0, 0]),
    ):
        operands = _sums_operands(sizes, p, q)
        pair = None if earlier is None else _sums_operands(earlier, p, q)
        before = torch.randn(len(sizes) + 1, p, q, device="cuda", dtype=dtype)
        expected = before.clone()
        with monkeypatch.context() as patched:
            patched.setattr(grouped_gemm_cuda, "takes", lambda device: False)
            sums_over_rows(*operands, expected[:-1], accumulate=accumulate, earlier=pair)
        for _ in range(3):
            dw = before.clone()
            grouped_gemm_cuda.sums_over_rows(*operands, dw[:-1], accumulate=accumulate, fast=False, earlier=pair)
            assert torch.equal(dw, expected)


@pytest.mark.gpu
@needs_cuda_kernel
def test_cuda_sums_in_a_graph() -> None:
    """Each replay reads how many rows the experts have."""
    torch.manual_seed(0)
    a, b, ends = _sums_operands([300, 0, 500, 1224], 384, 640)
    for x in (a, b):
        x.scale_inv.copy_(torch.randint(-3, 4, x.scale_inv.shape).float().exp2_())  # also where others have padding
    dw = torch.zeros(4, 384, 640, device="cuda")
    sums_over_rows(a, b, ends, dw, accumulate=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sums_over_rows(a, b, ends, dw, accumulate=True)
    for changed in ([384, 384, 896, 2176], [0, 128, 128, 2048]):
        ends.copy_(torch.tensor(changed, dtype=torch.int32))
        dw.normal_()
        expected = dw.clone()
        graph.replay()
        sums_over_rows(a, b, ends, expected, accumulate=True)
        assert torch.equal(dw, expected)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("scales", ["blocks", "experts", "experts, fast"])
@pytest.mark.parametrize(
    ("kernel", "formats"),
    [
        ("ROWS", ("e4m3", "e4m3", "bf16")),
        ("ROWS", ("e5m2", "e4m3", "f16")),
        ("SUMS", ("e5m2", "e4m3", "f32")),
        ("SUMS", ("e4m3", "e4m3", "bf16")),
        ("NARROW_SUMS", ("e4m3", "e4m3", "f32")),
        ("NARROW_SUMS", ("e5m2", "e4m3", "bf16")),
    ],
)
def test_cuda_kernel_compiles(kernel: str, formats: tuple[str, str, str], scales: str) -> None:
    """Without registers in memory, and without waits that the compiler adds between products."""
    nvrtc = pytest.importorskip("cuda.bindings.nvrtc")
    try:
        nvrtc.nvrtcVersion()
    except RuntimeError as error:
        pytest.skip(str(error))
    variant = Variant(*formats, block_scales=scales == "blocks", fast="fast" in scales)
    code, log = grouped_gemm_cuda.compiled(getattr(grouped_gemm_cuda, kernel), variant)
    assert code.startswith(b"\x7fELF")
    assert "0 bytes spill stores, 0 bytes spill loads" in log
    assert "C75" not in log  # "wgmma serialized"


def _counted_units(kernel: CudaKernel, checks: str, lines: Sequence[str], folder: Path) -> list[list[int]]:
    """Numbers that the C++ program `checks`, compiled with the part of a kernel's source that deals tiles out, prints
    for each of `lines`."""
    source = kernel.source
    part = source[source.index("constexpr int BLOCK") : source.index("// --- producer")]
    part = "\n".join(line for line in part.splitlines() if not line.startswith("static_assert"))
    macros = "#include <algorithm>\nusing std::min;\n#define __device__\ntypedef unsigned u32;\nstruct TensorMap {};\n"
    macros += f"#define B_BOX_ROWS {kernel.b_box_rows}\n#define BLOCK_SCALES 1\n"
    program = folder / "units"
    program.with_suffix(".cpp").write_text(macros + part + Path(__file__).with_name(checks).read_text())
    subprocess.run(["c++", "-std=c++17", "-O1", program.with_suffix(".cpp"), "-o", program], check=True)
    done = subprocess.run([program], input="\n".join(lines), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-200:]
    counts = [list(map(int, line.split())) for line in done.stdout.splitlines()]
    assert len(counts) == len(lines)
    return counts


@pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")
def test_cuda_kernel_computes_each_tile_once(tmp_path: Path) -> None:
    """`grouped_gemm_units.cpp` with the part of the source that deals tiles to multiprocessors."""
    draw = random.Random(0)
    cases = [(n, 66, [2048] * 8) for n in (1536, 4096)]
    for _ in range(500):
        sizes = [draw.choice([*EDGES, draw.randint(0, 1500)]) for _ in range(draw.randint(1, 12))]
        cases.append((128 * draw.randint(1, 12), draw.choice([1, 2, 3, 20, 65]), sizes))
    lines = [f"{n} {clusters} {len(sizes)} {' '.join(map(str, sizes))}" for n, clusters, sizes in cases]
    counts = _counted_units(grouped_gemm_cuda.ROWS, "grouped_gemm_units.cpp", lines, tmp_path)
    assert counts[:2] == [[512, 8], [1408, 22]]
    assert all(most == -(-units // clusters) for (units, most), (_, clusters, _) in zip(counts, cases, strict=True))


@pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")
@pytest.mark.parametrize(
    ("kernel", "units"),
    [
        (grouped_gemm_cuda.SUMS, [[8 * 16 * 38, 74], [128 * 6 * 11, 128]]),
        (grouped_gemm_cuda.NARROW_SUMS, [[8 * 16 * 56, 109], [128 * 6 * 16, 187]]),
    ],
    ids=["wide", "narrow"],
)
def test_cuda_sums_compute_each_tile_once(kernel: CudaKernel, units: list[list[int]], tmp_path: Path) -> None:
    """The same of sums over rows, with `grouped_sums_units.cpp`."""
    draw = random.Random(0)
    cases = [(4096, 7168, 66, 1, [0] * 8, [32] * 8), (1536, 2048, 66, 0, [4] * 128, [4] * 128)]
    for _ in range(500):
        experts = draw.randint(1, 12)
        earlier, blocks = ([draw.choice([0, 0, 1, 2, 9]) for _ in range(experts)] for _ in range(2))
        p, q = 16 * draw.randint(1, 96), 128 * draw.randint(1, 12)
        cases.append((p, q, draw.choice([1, 2, 3, 20, 65]), draw.randint(0, 1), earlier, blocks))
    lines = [f"{' '.join(map(str, sizes))} {len(x)} {' '.join(map(str, x + y))}" for *sizes, x, y in cases]
    counts = _counted_units(kernel, "grouped_sums_units.cpp", lines, tmp_path)
    assert counts[:2] == units
