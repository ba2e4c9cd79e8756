"""The benchmark of attention: float64 attention, rounding, the table, and that every factor goes where cuDNN wants it.

No cuDNN is needed: `FakeGraph` computes what the front end documents of its FP8 operations, from whatever tensors and
factors it is given, so a factor in the wrong place, or a wrong shape, shows as an error.
"""

from __future__ import annotations

import math
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from megafp8.fp8.formats import E4M3, E5M2
from tools import bench_attention
from tools.attention_variants import Libraries
from tools.bench_attention import Row, prepare, table, tflop
from tools.cudnn_attention import Cudnn, Factors, Graph
from tools.plain_attention import Problem, Rounding, attention, difference, random_problem, rounded

CPU = torch.device("cpu")


@pytest.fixture
def problem() -> Problem:
    return random_problem(s=48, heads=4, groups=2, width=16, outliers=False, device=CPU)


# --- plain attention -------------------------------------------------------------------------------------------------


def test_plain_attention_is_that_of_torch_in_float64(problem: Problem) -> None:
    q, k, v = (x.double().requires_grad_() for x in (problem.q_sbad, problem.k_sbgd, problem.v_sbgd))
    o = F.scaled_dot_product_attention(
        *(x.permute(1, 2, 0, 3) for x in (q, k, v)), is_causal=True, enable_gqa=True
    ).permute(2, 0, 1, 3)
    o.backward(problem.do_sbad.double())
    found = attention(problem)
    for name, expected in (("o", o.detach()), ("dq", q.grad), ("dk", k.grad), ("dv", v.grad)):
        assert expected is not None
        torch.testing.assert_close(found[name], expected, rtol=1e-12, atol=1e-13)


def test_rounding_costs_a_few_percent_and_more_in_coarser_formats(problem: Problem) -> None:
    exact = attention(problem)
    fine, coarse = (attention(problem, Rounding(E4M3, fmt, fmt)) for fmt in (E4M3, E5M2))
    for name in ("dq", "dk", "dv"):
        assert 0.02 < difference(fine[name], exact[name]) < difference(coarse[name], exact[name]) < 0.2
    assert 0.02 < difference(fine["o"], exact["o"]) < 0.1


def test_rounding_keeps_the_largest_and_the_format_bounds_the_error() -> None:
    x = torch.tensor([3.0, -7.0, 1.1])
    assert rounded(x, None).equal(x.double())
    assert rounded(x, E4M3).abs().max() == pytest.approx(7)
    assert (rounded(x, E4M3) / x - 1).abs().max() <= 2**-4 + 1e-6
    assert rounded(torch.zeros(3), E4M3).equal(torch.zeros(3, dtype=torch.float64))


def test_outliers_are_one_in_a_thousand_and_whole_channels_of_k() -> None:
    usual, unusual = (random_problem(256, 8, 2, 64, outliers, CPU) for outliers in (False, True))
    assert usual.q_sbad.abs().max() < 6
    assert 4e-4 < (unusual.q_sbad.abs() > 6).float().mean() < 1e-3  # a normal of σ 10 exceeds 6 in 55% of all cases
    assert unusual.k_sbgd[..., 32].float().std() == pytest.approx(8, rel=0.1)


# --- the kernels' wrappers -------------------------------------------------------------------------------------------


class FakeTensor:
    """A tensor of a graph: set by number, computed at the end."""

    def set_uid(self, uid: int) -> FakeTensor:
        self.uid = uid
        return self

    def set_output(self, is_output: bool) -> FakeTensor:
        assert is_output
        return self

    def set_data_type(self, dtype: Any) -> FakeTensor:
        return self

    def set_dim(self, dim: list[int]) -> FakeTensor:
        self.dim = dim
        return self

    def set_stride(self, stride: list[int]) -> FakeTensor:
        assert len(stride) == 4
        return self


class FakeGraph:
    """What the front end documents of `sdpa_fp8` and `sdpa_fp8_backward`, in float64 and in the order b, x, s, d."""

    def __init__(self) -> None:
        self.outputs: list[FakeTensor] = []

    def tensor(self, dim: list[int], stride: list[int], data_type: Any, uid: int) -> FakeTensor:
        assert len(dim) == len(stride) == 4
        return FakeTensor().set_dim(dim).set_uid(uid)

    def sdpa_fp8(
        self, generate_stats: bool, use_causal_mask: bool, attn_scale: float, **inputs: Any
    ) -> list[FakeTensor]:
        assert generate_stats
        assert use_causal_mask
        return self._operation(self._forward, attn_scale, inputs, 4)

    def sdpa_fp8_backward(self, use_causal_mask: bool, attn_scale: float, **inputs: Any) -> list[FakeTensor]:
        assert use_causal_mask
        return self._operation(self._backward, attn_scale, inputs, 7)

    def _operation(self, compute: Any, attn_scale: float, inputs: dict[str, Any], count: int) -> list[FakeTensor]:
        self.compute, self.attn_scale, self.inputs = compute, attn_scale, inputs
        self.outputs = [FakeTensor() for _ in range(count)]
        return self.outputs

    def run(self, bound: dict[int, Tensor]) -> None:
        values = {name: bound[x.uid].double() for name, x in self.inputs.items()}
        self.ds_dtype = bound[self.inputs["dO"].uid].dtype if "dO" in self.inputs else None
        for x, y in zip(self.outputs, self.compute(values)):
            into = bound[x.uid]
            limit = torch.finfo(into.dtype).max
            into.copy_(y.reshape(into.shape).float().clamp(-limit, limit))

    def _scores(self, x: dict[str, Tensor]) -> Tensor:
        """Scores `[b, a, i, j]`; keeps v and the heads of a group."""
        self.times = x["q"].shape[1] // x["k"].shape[1]
        k = x["k"].repeat_interleave(self.times, 1)
        self.v = x["v"].repeat_interleave(self.times, 1)
        scores = x["q"] @ k.mT * (x["descale_q"] * x["descale_k"] * self.attn_scale)
        return scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -math.inf)

    def _forward(self, x: dict[str, Tensor]) -> list[Tensor]:
        scores = self._scores(x)
        p = scores.softmax(-1)
        codes = (p * x["scale_s"]).to(E4M3.dtype).double()
        o = codes @ self.v * (x["descale_s"] * x["descale_v"])
        return [o * x["scale_o"], scores.logsumexp(-1), p.amax(), o.abs().amax()]

    def _backward(self, x: dict[str, Tensor]) -> list[Tensor]:
        def of_groups(y: Tensor) -> Tensor:
            return y.unflatten(1, (-1, self.times)).sum(2)

        p = (self._scores(x) - x["stats"]).exp()
        codes = (p * x["scale_s"]).to(E4M3.dtype).double()
        dv = of_groups(codes.mT @ x["dO"]) * (x["descale_s"] * x["descale_dO"])
        softmax_sum = (x["dO"] * x["o"]).sum(-1, keepdim=True) * (x["descale_dO"] * x["descale_o"])
        ds = p * (x["dO"] @ self.v.mT * (x["descale_dO"] * x["descale_v"]) - softmax_sum) * self.attn_scale
        ds_codes = (ds * x["scale_dP"]).to(self.ds_dtype).double()
        dq = ds_codes @ x["k"].repeat_interleave(self.times, 1) * (x["descale_dP"] * x["descale_k"])
        dk = of_groups(ds_codes.mT @ x["q"]) * (x["descale_dP"] * x["descale_q"])
        scaled = [dq * x["scale_dQ"], dk * x["scale_dK"], dv * x["scale_dV"]]
        return scaled + [y.abs().amax() for y in (dq, dk, dv, ds)]


class FakeCudnn(Cudnn):
    def __init__(self) -> None:
        kinds = SimpleNamespace(FLOAT=0, BFLOAT16=1, FP8_E4M3=2, FP8_E5M2=3)
        self.api, self.handle = SimpleNamespace(data_type=kinds, __version__="0", backend_version=lambda: 0), 0

    def graph(self, io: Any) -> FakeGraph:
        return FakeGraph()


def flash_attn_func(
    q_bsad: Tensor, k_bsgd: Tensor, v_bsgd: Tensor, causal: bool, return_attn_probs: bool, **descales: Any
):  # type: ignore[no-untyped-def]
    """FlashAttention-3's interface, by torch: a factor for each key-value head, the output in bf16, log-sum-exps."""
    assert causal
    assert return_attn_probs
    groups = k_bsgd.shape[2]
    q, k, v = (
        x.float().unflatten(2, (groups, -1)) * descales[f"{name}_descale"][:, None, :, None, None]
        for name, x in (("q", q_bsad), ("k", k_bsgd), ("v", v_bsgd))
    )
    scores = torch.einsum("bigad,bjgxd->bgaij", q, k) * q_bsad.shape[-1] ** -0.5
    scores.masked_fill_(torch.ones_like(scores, dtype=torch.bool).triu(1), -math.inf)
    o = torch.einsum("bgaij,bjgxd->bigad", scores.softmax(-1), v)
    return o.flatten(2, 3).bfloat16(), scores.logsumexp(-1).flatten(1, 2)


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch) -> Libraries:
    monkeypatch.setattr(Graph, "build", lambda graph: "")
    monkeypatch.setattr(Graph, "run", lambda graph: graph.graph.run(graph.bound))
    monkeypatch.setitem(sys.modules, "fa3_fwd_interface", SimpleNamespace(flash_attn_func=flash_attn_func))
    libraries = Libraries()
    libraries.cudnn = FakeCudnn()
    return libraries


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_every_variant_is_as_wrong_as_its_rounding(libraries: Libraries, groups: int) -> None:
    rows = {row.label: row for row in prepare(random_problem(48, 4, groups, 16, False, CPU), libraries)}
    assert all(row.run is not None for row in rows.values() if row.before != "plain")
    for label, row in rows.items():
        formats = row.name.removeprefix("cudnn ")
        for name, error in row.errors.items():
            if label == "bf16" or label == "bf16 > bf16":
                assert error < 0.01, (label, name)
            elif "/" in formats:
                assert 0.85 < error / rows[f"plain > {formats}"].errors[name] < 1.25, (label, name)
            else:  # FP8 forwards, and the bf16 backward pass after them
                assert 0.005 < error < 0.09, (label, name)


def test_a_forward_pass_gives_the_backward_pass_its_output_and_stats(problem: Problem, libraries: Libraries) -> None:
    """With FA3's output and log-sum-exps put in place of its own, the bf16 backward pass is another."""
    rows = {row.label: row for row in prepare(problem, libraries)}
    own, after = (rows[f"{before} > bf16"].errors["dq"] for before in ("bf16", "fa3"))
    assert after > 4 * own


def test_factors_settle_though_one_amax_needs_another_factor() -> None:
    """As dq's does: what it is made of underflows until it has a factor."""
    factors = Factors({"dp": E5M2, "dq": E5M2}, CPU)

    def run() -> None:
        ds = (torch.tensor([1e-6]) * factors.scale["dp"]).to(E5M2.dtype).float() * factors.descale["dp"]
        factors.amax["dp"].fill_(1e-6)
        factors.amax["dq"].copy_(3 * ds)

    assert "dq 3e-06" in factors.settle(run)
    assert (factors.scale["dq"] * 3e-6).item() == pytest.approx(E5M2.max)
    assert (factors.scale["dq"] * factors.descale["dq"]).item() == pytest.approx(1)
    broken = Factors({"o": E4M3}, CPU)
    with pytest.raises(RuntimeError, match="amax o nan"):
        broken.settle(lambda: broken.amax["o"].fill_(math.nan))


# --- the table -------------------------------------------------------------------------------------------------------


def test_tflop_of_a_llama_layer() -> None:
    assert tflop(8192, 32, 128, 2) == pytest.approx(0.5498, abs=1e-4)  # 622 TFLOP/s are 0.884 ms


def test_table_adds_pairs_and_compares_them_with_bf16() -> None:
    rows = [
        Row("bf16", samples_ms=[2.0, 1.0, 9.0]),
        Row("fp8", samples_ms=[1.0], errors={"o": 0.05}),
        Row("bf16", "bf16", samples_ms=[4.0]),
        Row("fp8", "fp8", samples_ms=[2.0], errors={"dq": 0.125}, note="plan 3"),
        Row("fa3", note="not installed"),
        Row("do", "cast", samples_ms=[0.5]),
    ]
    lines = [line.split() for line in table(rows, s=8192, heads=32, width=128)]
    assert lines[1] == ["bf16", "2.000", "275"]
    assert lines[2] == ["fp8", "1.000", "550", "5.00e-02"]
    assert lines[3] == ["bf16", ">", "bf16", "4.000", "344", "6.000", "1.00"]
    assert lines[4] == ["fp8", ">", "fp8", "2.000", "687", "3.000", "2.00", "1.25e-01", "plan", "3"]
    assert lines[5] == ["fa3", "not", "installed"]
    assert lines[6] == ["cast", ">", "do", "0.500"]


def test_what_is_missing_or_fails_is_a_line(
    problem: Problem, libraries: Libraries, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(graph: Graph) -> str:
        raise RuntimeError("no engine\nlong story")

    monkeypatch.setattr(Graph, "build", refuse)
    monkeypatch.setitem(sys.modules, "fa3_fwd_interface", None)
    notes = {row.label: row.note for row in prepare(problem, libraries)}
    assert notes["cudnn"] == "RuntimeError: no engine long story"
    assert notes["cudnn > cudnn e5m2/e5m2"] == "no forward pass"
    assert "fa3_fwd_interface" in notes["fa3"]
    assert notes["bf16 > cudnn e5m2/e5m2"] == "RuntimeError: no engine long story"
    out = capsys.readouterr().out
    assert "cudnn failed:" in out
    assert "    RuntimeError: no engine" in out


def test_a_run_on_cpu_and_bad_options(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cudnn", None)
    monkeypatch.setitem(sys.modules, "fa3_fwd_interface", None)
    shape = ["--heads", "2", "--groups", "1", "--width", "16", "--lengths", "32"]
    assert bench_attention.main(["--device", "cpu", *shape]) == 0
    out = capsys.readouterr().out
    assert "no cuDNN front end: " in out
    assert "s = 32, 2 heads in 1 groups of 16, standard normal" in out
    assert "with outliers" in out
    assert bench_attention.main(["--device", "cpu", "--heads", "3", "--groups", "2"]) == 2
    assert capsys.readouterr().err == "error: --groups: 2 does not divide 3 heads\n"
