"""cuBLASLt's products against float64 on a Hopper GPU; its file of algorithms anywhere."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megafp8.gemm.cublaslt import AlgorithmFile, CublasLt, available
from megafp8.gemm.cublaslt_problem import GemmProblem, arranged
from megafp8.numerics.tensor import BLOCK_1X128, BLOCK_128X128, ROW, TENSOR, Granularity, ScaledTensor

E4M3, E5M2, BF16, FP32 = torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16, torch.float32
# Error of one sum as a share of Σ|a·b|: a Hopper tensor core aligns the terms of a block to the largest and keeps 13
# bits below it. bf16 products are summed in fp32.
FP8_SUM, BF16_SUM = 2.0**-11, 2.0**-18


def operand(r: int, c: int, dtype: torch.dtype, granularity: Granularity, device: str, seed: int) -> ScaledTensor:
    """Random data and scales, no two scales alike."""
    generator = torch.Generator().manual_seed(seed)
    data = (torch.randn(r, c, generator=generator) * 20).to(dtype)
    scale_inv = torch.rand(granularity.grid(r, c), generator=generator) + 0.5
    return arranged(ScaledTensor(data.to(device), scale_inv.to(device), granularity))


def test_not_available_on_cpu() -> None:
    assert not available(torch.device("cpu"))


def algorithm(i: int) -> bytes:
    return bytes([i]) * 64


def test_the_first_choice_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "algorithms.json"
    here, there = AlgorithmFile(path, "H200"), AlgorithmFile(path, "H100")
    assert here.find("p") is None
    assert here.store_first("p", algorithm(1)) == algorithm(1)
    assert here.store_first("p", algorithm(2)) == algorithm(1)
    assert here.store_first("q", algorithm(3)) == algorithm(3)
    assert there.find("p") is None
    assert there.store_first("p", algorithm(4)) == algorithm(4)
    assert [here.find("p"), here.find("q"), there.find("p")] == [algorithm(1), algorithm(3), algorithm(4)]
    assert {p.name for p in path.parent.iterdir()} == {path.name, path.name + ".lock"}


def test_many_at_once_agree_and_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "algorithms.json"

    def store(i: int) -> tuple[bytes, bytes]:
        file = AlgorithmFile(path, "H200")
        return file.store_first("shared", algorithm(i)), file.store_first(f"own {i}", algorithm(i))

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(store, range(32)))
    assert len({shared for shared, _ in results}) == 1
    file = AlgorithmFile(path, "H200")
    assert [file.find(f"own {i}") for i in range(32)] == [algorithm(i) for i in range(32)]


@pytest.mark.parametrize("text", ["{", "[]", '{"H200": []}', '{"H200": {"p": "00"}}', '{"H200": {"p": 1}}'])
def test_a_damaged_file_is_named_and_left_alone(tmp_path: Path, text: str) -> None:
    path = tmp_path / "algorithms.json"
    path.write_text(text)
    file = AlgorithmFile(path, "H200")
    for use in (lambda: file.find("p"), lambda: file.store_first("p", algorithm(1))):
        with pytest.raises(ValueError, match=r"algorithms\.json"):
            use()
    assert path.read_text() == text


# -- on Hopper --------------------------------------------------------------------------------------------------------

needs_hopper = pytest.mark.skipif(not available(torch.device("cuda")), reason="needs a Hopper GPU and nvmath-python")
PAIRS = [
    (TENSOR, TENSOR),
    (ROW, ROW),
    (BLOCK_1X128, BLOCK_1X128),
    (BLOCK_1X128, BLOCK_128X128),
    (BLOCK_128X128, BLOCK_1X128),
]


@pytest.fixture(scope="module")
def lt() -> CublasLt:
    return CublasLt(torch.device("cuda"), autotune=False, cache_file=None)


def initial(m: int, n: int, dtype: torch.dtype) -> Tensor:
    return (torch.randn(m, n, generator=torch.Generator().manual_seed(9)) * 100).to("cuda", dtype)


def check(out: Tensor, start: Tensor | None, a64: Tensor, b64: Tensor, share: float) -> None:
    """`out = start + a · b`, every element within `share` of Σ|a·b|, the product and the sum rounded to out's dtype."""
    product = a64 @ b64
    expected = product if start is None else start.double() + product
    rounded = expected.abs() if start is None else expected.abs() + product.abs()
    unit = 2.0**-8 if out.dtype == BF16 else 2.0**-24  # half a step of each
    assert ((out.double() - expected).abs() <= share * (a64.abs() @ b64.abs()) + unit * rounded).all()


def check_tn(lt: CublasLt, a: ScaledTensor, b: ScaledTensor, dtype: torch.dtype, accumulate: bool, fast: bool) -> None:
    start = initial(a.data.shape[0], b.data.shape[0], dtype)
    out = start.clone()
    lt.matmul_tn(a, b, out, accumulate=accumulate, use_fast_accum=fast)
    check(out, start if accumulate else None, a.dequantize(torch.float64), b.dequantize(torch.float64).t(), FP8_SUM)


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("fast", [False, True], ids=["split", "fast"])
@pytest.mark.parametrize("accumulate", [False, True], ids=["=", "+="])
@pytest.mark.parametrize("out_dtype", [BF16, FP32])
@pytest.mark.parametrize("dtypes", [(E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2)])
@pytest.mark.parametrize("pair", PAIRS, ids=lambda p: f"{p[0].name}·{p[1].name}")
def test_fp8_against_float64(
    lt: CublasLt,
    pair: tuple[Granularity, Granularity],
    dtypes: tuple[torch.dtype, torch.dtype],
    out_dtype: torch.dtype,
    accumulate: bool,
    fast: bool,
) -> None:
    a, b = (operand(r, 384, dtypes[i], pair[i], "cuda", i) for i, r in enumerate((256, 640)))
    check_tn(lt, a, b, out_dtype, accumulate, fast)


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("dtypes", [(E4M3, E4M3), (E4M3, E5M2)])
@pytest.mark.parametrize("out_dtype", [BF16, torch.float16])
@pytest.mark.parametrize("shape", [(256, 640, 384), (7, 48, 144)])
def test_a_bias_is_added_before_rounding(
    lt: CublasLt, shape: tuple[int, int, int], out_dtype: torch.dtype, dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    m, n, k = shape
    a, b = (operand(r, k, dtypes[i], TENSOR, "cuda", i) for i, r in enumerate((m, n)))
    for seed in range(2):  # the second by the first's plan, with another pointer
        bias = (torch.randn(n, generator=torch.Generator().manual_seed(seed)) * 30).to("cuda", out_dtype)
        out = torch.empty(m, n, dtype=out_dtype, device="cuda")
        lt.matmul_tn(a, b, out, accumulate=False, use_fast_accum=False, bias=bias)
        a64, b64 = a.dequantize(torch.float64), b.dequantize(torch.float64).t()
        expected = a64 @ b64 + bias.double()
        unit = 2.0**-8 if out_dtype == BF16 else 2.0**-11
        bound = FP8_SUM * (a64.abs() @ b64.abs()) + unit * expected.abs() + 2.0**-24
        assert ((out.double() - expected).abs() <= bound).all()


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("shape", [(16, 16, 16), (80, 144, 272), (1, 16, 32), (7, 48, 144), (144, 16, 1040)])
@pytest.mark.parametrize("pair", PAIRS, ids=lambda p: f"{p[0].name}·{p[1].name}")
def test_uneven_shapes(lt: CublasLt, pair: tuple[Granularity, Granularity], shape: tuple[int, int, int]) -> None:
    m, n, k = shape
    m = m if pair[0] is not BLOCK_1X128 else 4 * m
    check_tn(lt, operand(m, k, E4M3, pair[0], "cuda", 0), operand(n, k, E4M3, pair[1], "cuda", 1), FP32, True, False)


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("accumulate", [False, True], ids=["=", "+="])
@pytest.mark.parametrize("out_dtype", [BF16, FP32])
@pytest.mark.parametrize("b_transposed", [False, True])
@pytest.mark.parametrize("a_transposed", [False, True])
def test_bf16_against_float64(
    lt: CublasLt, a_transposed: bool, b_transposed: bool, out_dtype: torch.dtype, accumulate: bool
) -> None:
    generator = torch.Generator().manual_seed(3)
    a, b = (torch.randn(shape, generator=generator).to("cuda", BF16) for shape in ((96, 256), (256, 160)))
    a = a.t().contiguous().t() if a_transposed else a
    b = b.t().contiguous().t() if b_transposed else b
    start = initial(96, 160, out_dtype)
    out = start.clone()
    lt.matmul(a, b, out, accumulate=accumulate)
    check(out, start if accumulate else None, a.double(), b.double(), BF16_SUM)


@pytest.mark.gpu
@needs_hopper
def test_tuning_adds_once_and_is_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "algorithms.json"
    a, b = operand(512, 1024, E5M2, TENSOR, "cuda", 0), operand(768, 1024, E4M3, TENSOR, "cuda", 1)
    tuned = CublasLt(torch.device("cuda"), autotune=True, cache_file=path)
    check_tn(tuned, a, b, FP32, True, True)
    stored = path.read_bytes()
    monkeypatch.setattr(CublasLt, "_fastest", lambda *_: pytest.fail("timed again"))
    check_tn(CublasLt(torch.device("cuda"), autotune=True, cache_file=path), a, b, FP32, True, True)
    assert path.read_bytes() == stored
    problem = GemmProblem(
        512, 768, 1024, a_dtype=E5M2, a_order="mk", a_scaling="tensor", b_dtype=E4M3, b_order="nk", b_scaling="tensor",
        out_dtype=FP32, accumulate=True, fast=True,
    )  # fmt: skip
    kept = AlgorithmFile(path, tuned.machine).find(str(problem))
    assert kept is not None
    assert [plan.algorithm.tobytes() for plan in tuned._plans.values()] == [kept]


@pytest.mark.gpu
@needs_hopper
def test_an_algorithm_the_library_refuses_is_an_error(tmp_path: Path) -> None:
    lt = CublasLt(torch.device("cuda"), autotune=True, cache_file=tmp_path / "algorithms.json")
    problem = GemmProblem(
        64, 64, 64, a_dtype=E4M3, a_order="mk", a_scaling="tensor", b_dtype=E4M3, b_order="nk", b_scaling="tensor",
        out_dtype=BF16, accumulate=False, fast=False,
    )  # fmt: skip
    AlgorithmFile(tmp_path / "algorithms.json", lt.machine).store_first(str(problem), algorithm(255))
    a = operand(64, 64, E4M3, TENSOR, "cuda", 0)
    with pytest.raises(ValueError, match="delete the file"):
        lt.matmul_tn(a, a, initial(64, 64, BF16), accumulate=False, use_fast_accum=False)


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("granularity", [TENSOR, BLOCK_1X128], ids=lambda g: g.name)
def test_replayed_in_a_cuda_graph(lt: CublasLt, granularity: Granularity) -> None:
    a, b = (operand(128, 256, E4M3, granularity, "cuda", seed) for seed in (0, 1))
    out, eager = torch.zeros(128, 128, device="cuda"), torch.zeros(128, 128, device="cuda")
    lt.matmul_tn(a, b, out, accumulate=True, use_fast_accum=False)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        lt.matmul_tn(a, b, out, accumulate=True, use_fast_accum=False)
    a.data.copy_(operand(128, 256, E4M3, granularity, "cuda", 2).data)
    a.scale_inv.mul_(3.0)
    out.zero_()
    for _ in range(2):
        graph.replay()
        lt.matmul_tn(a, b, eager, accumulate=True, use_fast_accum=False)
    torch.cuda.synchronize()
    check(out, None, 2 * a.dequantize(torch.float64), b.dequantize(torch.float64).t(), FP8_SUM)
    assert torch.equal(out, eager)


@pytest.mark.gpu
@needs_hopper
def test_on_a_side_stream(lt: CublasLt) -> None:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        check_tn(lt, operand(64, 64, E4M3, ROW, "cuda", 0), operand(32, 64, E4M3, ROW, "cuda", 1), BF16, False, False)
    torch.cuda.current_stream().wait_stream(stream)


@pytest.mark.gpu
@needs_hopper
def test_every_layout_has_its_own_plan(lt: CublasLt) -> None:
    """Calls that differ in nothing but how an operand lies in memory must not share descriptors."""
    x = torch.randn(64, 64, device="cuda").bfloat16()
    out = torch.zeros(64, 64, device="cuda")
    for a, b in ((x, x), (x.t(), x), (x, x.t()), (x.t(), x.t())):
        lt.matmul(a, b, out, accumulate=False)
        check(out, None, a.double(), b.double(), BF16_SUM)


@pytest.mark.gpu
@needs_hopper
def test_a_shape_that_wants_padding_is_an_error(lt: CublasLt) -> None:
    a, b = operand(16, 24, E4M3, TENSOR, "cuda", 0), operand(16, 24, E4M3, TENSOR, "cuda", 1)
    with pytest.raises(ValueError, match="multiples of 16"):
        lt.matmul_tn(a, b, initial(16, 16, BF16), accumulate=False, use_fast_accum=False)
