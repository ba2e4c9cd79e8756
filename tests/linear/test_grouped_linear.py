"""Linear layers of many experts, against one multiplication for each."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megafp8.fp8 import (
    BlockwiseScaling,
    CurrentScaling,
    CustomScaling,
    DelayedScaling,
    Fp8Manager,
    Fp8Recipe,
    MXFP8Scaling,
    RowwiseScaling,
    Rule,
    StaticScaling,
)
from megafp8.kernels import grouped_gemm
from megafp8.layers.activation.op import activation
from megafp8.linear import group_state
from megafp8.linear.deferred_wgrad import Wgrad, WgradStore, run
from megafp8.linear.group_state import GroupState
from megafp8.linear.grouped_linear import grouped_linear
from megafp8.linear.linear import linear
from megafp8.numerics.groups import RowGroups, amax_of_groups
from megafp8.numerics.sources import SwiGLU
from megafp8.numerics.tensor import ScaledTensor
from megafp8.parallel.data.grad_buffer import GradBuffer, main_grad_of
from megafp8.parallel.sharding import Init, ParamSpec, set_spec, unsharded
from megafp8.plan import LinearSite, Neighbor
from tests.marks import slow_but

SIZES = [[3, 0, 5, 1], [0, 0, 9, 0], [0, 0, 0, 0], [4]]
K, N = 6, 8


def _problem(sizes: list[int], dtype: torch.dtype) -> tuple[Tensor, nn.Parameter, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    weight = nn.Parameter(random(len(sizes) * N, K))
    set_spec(weight, ParamSpec(unsharded("w", tuple(weight.shape)), Init("zeros"), replicated_over_tp=False))
    ends = torch.tensor(sizes).cumsum(0, dtype=torch.int32)
    return random(sum(sizes), K).requires_grad_(), weight, ends, random(sum(sizes), N)


def _expected(x: Tensor, weight: Tensor, sizes: list[int], dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """y, dx, dw in float64."""
    x, w, dy = x.detach().double(), weight.detach().double().view(len(sizes), N, K), dy.double()
    y, dx, dw = torch.zeros(len(x), N).double(), torch.zeros_like(x), torch.zeros_like(w)
    start = 0
    for e, size in enumerate(sizes):
        for i in range(start, start + size):
            y[i], dx[i] = w[e] @ x[i], dy[i] @ w[e]
            dw[e] += torch.outer(dy[i], x[i])
        start += size
    return y, dx, dw.view(-1, K)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("sink", ["none", "now", "later"])
def test_output_and_gradients(sizes: list[int], dtype: torch.dtype, rtol: float, sink: str) -> None:
    x, weight, ends, dy = _problem(sizes, dtype)
    store = WgradStore()
    if sink != "none":
        options: Any = {"data_parallel_group": None, "bucket_elements": 1000, "device": torch.device("cpu")}
        buffer = GradBuffer([weight], **options, wgrads=store)
        buffer.clear()
    y = grouped_linear(x, weight, RowGroups.from_ends(ends, len(x)))
    if sink == "later":
        wgrads = deque[Wgrad]()
        with store.collect(wgrads):
            y.backward(dy)
        assert main_grad_of(weight).count_nonzero() == 0
        run(wgrads)
    else:
        y.backward(dy)
    dw = weight.grad if sink == "none" else main_grad_of(weight)
    assert x.grad is not None
    assert dw is not None
    assert (y.dtype, x.grad.dtype) == (dtype, dtype)
    for actual, expected in zip((y, x.grad, dw), _expected(x, weight, sizes, dy), strict=True):
        least = 1e-5 if sink != "none" and dtype == torch.float64 else 0.0  # the sum of gradients is fp32
        torch.testing.assert_close(actual.double(), expected, rtol=max(rtol, least), atol=max(rtol, least))
    assert (weight.grad is None) == (sink != "none")


def _rule(layers: str, recipe: Fp8Recipe) -> Rule:
    return Rule(layers=layers, input=recipe, weight=recipe, grad_output=recipe)


RECIPES: dict[str, Fp8Recipe] = {
    "delayed": DelayedScaling(),
    "current": CurrentScaling(),
    "rowwise": RowwiseScaling(),
    "blockwise": BlockwiseScaling(),
    "mxfp8": MXFP8Scaling(),
    "static": StaticScaling(calibration_steps=1),
    "custom": CustomScaling(rules=(_rule("expert.2", DelayedScaling()), _rule("*", RowwiseScaling()))),
    "two in high precision": CustomScaling(rules=(_rule("expert.[03]", CurrentScaling()),)),
    "fprop high": CurrentScaling(override_linear_precision=(True, False, False)),
    "dgrad high": DelayedScaling(override_linear_precision=(False, True, False)),
    "wgrad high": BlockwiseScaling(override_linear_precision=(False, False, True)),
}  # fmt: skip


def _manager(recipe: Fp8Recipe | None, device: str = "cpu", **site: Any) -> tuple[Fp8Manager, GroupState]:
    manager = Fp8Manager(recipe, amax_group=None)
    states = [manager.linear(LinearSite(f"expert.{e}", expert=True, **site)) for e in range(4)]
    state = manager.group(states)
    manager.materialize(torch.device(device))
    return manager, state


@pytest.mark.parametrize("sink", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
def test_in_fp8_each_expert_is_a_layer_of_its_own(recipe: str, sink: bool) -> None:
    """The same bits as of one `linear` an expert, in three steps with other rows, of which the scales remember."""
    (ours, state), (theirs, single_state) = _manager(RECIPES[recipe]), _manager(RECIPES[recipe])
    for step, sizes in enumerate([[3, 0, 5, 1], [0, 4, 1, 2], [130, 1, 0, 2]]):
        x, weight, ends, dy = _problem(sizes, torch.float32)
        single = [nn.Parameter(w.detach().clone()) for w in weight.chunk(4)]
        if sink:
            options: Any = {"data_parallel_group": None, "bucket_elements": 1000, "device": torch.device("cpu")}
            for param in (weight, *single):
                spec = ParamSpec(unsharded("w", tuple(param.shape)), Init("zeros"), replicated_over_tp=False)
                GradBuffer([set_spec(param, spec)], **options)
        y = grouped_linear(x, weight, RowGroups.from_ends(ends, len(x)), state)
        y.backward(dy)
        parts = [part.detach().requires_grad_() for part in x.split(sizes)]
        for e, (x_e, dy_e) in enumerate(zip(parts, dy.split(sizes), strict=True)):
            if len(x_e):
                y_e = linear(x_e, single[e], single_state.states[e])
                y_e.backward(dy_e)
                assert torch.equal(y.split(sizes)[e], y_e), (step, e)
            elif theirs.calibrating:
                single_state.states[e].record_amax("weight", single[e])
            elif single_state.states[e].plan.fp8:
                single_state.states[e].fp8_weight(single[e], columnwise=False)
        found = [part.grad for part in parts if len(part)]
        assert x.grad is not None
        assert torch.equal(x.grad, torch.cat([grad for grad in found if grad is not None]))
        dw = torch.cat(
            [(main_grad_of(w) if sink else w.grad if w.grad is not None else torch.zeros_like(w)) for w in single]
        )
        assert torch.equal(main_grad_of(weight) if sink else weight.grad, dw)  # type: ignore[arg-type]
        for manager in (ours, theirs):
            manager.end_step()
        for (name, mine), other in zip(ours.state_dict().items(), theirs.state_dict().values(), strict=True):
            assert torch.equal(mine, other), name


JOINT: dict[str, Fp8Recipe | None] = {
    "bf16": None,
    **{name: RECIPES[name] for name in ("delayed", "current", "static")},
    "fprop and wgrad high": DelayedScaling(override_linear_precision=(True, False, True)),
    "dgrad high": DelayedScaling(override_linear_precision=(False, True, False)),
    "rowwise": RowwiseScaling(),
    "blockwise": BlockwiseScaling(),
    "blockwise, wgrad high": BlockwiseScaling(power_of_two=False, override_linear_precision=(False, False, True)),
}


AT_ONCE = [*((name, True) for name in JOINT), ("bf16", False), ("delayed", False)]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(("recipe", "sink"), slow_but(AT_ONCE, AT_ONCE[0], AT_ONCE[7]))
def test_all_experts_at_once(recipe: str, sink: bool, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scales of one `linear` an expert, and its results but for the order of sums; the host does not wait."""
    widths = {"k": 256, "n": 256} if recipe.startswith("blockwise") else {"k": 144, "n": 160}  # more than a tile
    one_by_one, joint = (_Steps(JOINT[recipe], sink, device, **widths) for _ in range(2))
    for step, sizes in enumerate([[3, 0, 5, 1], [130, 1, 0, 3], [0, 0, 0, 0]]):
        monkeypatch.setattr(group_state, "has_kernels", lambda *_: False)
        expected = one_by_one(sizes)
        calibrates = recipe == "static" and step == 0  # one expert after the other
        monkeypatch.setattr(group_state, "has_kernels", lambda *_, at_once=not calibrates: at_once)
        found = joint(sizes, host_waits=calibrates)
        for name, actual in found.items():
            if name.startswith("fp8"):
                assert torch.equal(actual, expected[name]), (step, name)
            else:
                scale = expected[name].abs().amax().item() if actual.numel() else 1.0
                torch.testing.assert_close(actual, expected[name], rtol=1e-2, atol=4e-3 * scale, msg=f"{step} {name}")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("recipe", slow_but(["current", "delayed"], "delayed"))
def test_weights_transposed_in_each_backward_have_the_bits_of_kept_transposes(
    recipe: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The experts' 160 rows are padded to 256 columns."""
    monkeypatch.setattr(group_state, "has_kernels", lambda *_: True)
    kept, transposed = (
        _Steps(JOINT[recipe], False, device, k=144, n=160, keeps_transpose=keeps) for keeps in (True, False)
    )
    for sizes in ([3, 0, 5, 1], [130, 1, 0, 3]):
        expected, found = (steps(sizes, host_waits=False) for steps in (kept, transposed))
        for name, actual in found.items():
            assert torch.equal(actual, expected[name]), name


PAIRED = [
    (recipe, count, known)
    for recipe in ("delayed", "current", "blockwise")
    for count, known in ((1, 1), (2, 1), (3, 3), (3, 1), (3, 0), (4, 2))
]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(("recipe", "count", "known"), slow_but(PAIRED, PAIRED[2], PAIRED[9], PAIRED[16]))
def test_gradients_of_two_micro_batches_at_once(
    recipe: str, count: int, known: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sums of `count` micro-batches one by one, in half as many kernels; the last one alone where they are odd.

    `known`: of how many last micro-batches the buffer is told that they are to come, so that it can send sums early.
    """
    monkeypatch.setattr(group_state, "has_kernels", lambda *_: True)
    launched: list[bool] = []
    sums_over_rows = grouped_gemm.sums_over_rows

    def counted(*args: Any, **options: Any) -> None:
        launched.append(options["earlier"] is not None)
        sums_over_rows(*args, **options)

    monkeypatch.setattr(grouped_gemm, "sums_over_rows", counted)

    # Outputs and gradients of inputs are in no sum; `test_all_experts_at_once` compares them.
    def zeros(a_mk: ScaledTensor, b: ScaledTensor, ends_e: Tensor, n: int, dtype: torch.dtype, **_: bool) -> Tensor:
        return torch.zeros(len(a_mk.data), n, dtype=dtype, device=device)

    monkeypatch.setattr(grouped_gemm, "rows_times_matrices", zeros)
    sizes, k = ([3, 0, 130, 1], [0, 0, 40, 7], [1, 2, 0, 4], [0, 0, 0, 0]), 128
    n = 256 if recipe == "blockwise" or device == "cuda" else 128  # more than a tile
    found = []
    for in_pairs in (False, True):
        manager, state = _manager(JOINT[recipe], device)
        generator = torch.Generator().manual_seed(1)
        weight = nn.Parameter(torch.randn(4 * n, k, generator=generator).to(device, torch.bfloat16))
        set_spec(weight, ParamSpec(unsharded("w", tuple(weight.shape)), Init("zeros"), replicated_over_tp=False))
        buffer = GradBuffer(
            [weight], data_parallel_group=None, bucket_elements=1000, device=torch.device(device), in_pairs=in_pairs
        )
        launched.clear()
        for _ in range(2):  # steps; nothing of one is left to the next
            buffer.clear()
            main_grad_of(weight).fill_(torch.nan)  # the first gradient is written
            for i, of_micro_batch in enumerate(sizes[:count]):
                if known and i == count - known:
                    buffer.start_overlap(known)
                x, dy = (
                    torch.randn(sum(of_micro_batch), width, generator=generator).to(device, torch.bfloat16)
                    for width in (k, n)
                )
                ends = torch.tensor(of_micro_batch, device=device).cumsum(0, dtype=torch.int32)
                grouped_linear(x.requires_grad_(), weight, RowGroups.from_ends(ends, len(x)), state).backward(dy)
            buffer.finish()
            manager.end_step()
            found.append(main_grad_of(weight).clone())
        assert launched == (2 * ([True] * (count // 2) + [False] * (count % 2)) if in_pairs else [False] * 2 * count)
    for expected, actual in zip(found[:2], found[2:], strict=True):
        assert expected.norm() > 0
        assert (actual - expected).norm() <= 1e-6 * expected.norm()


class _Steps:
    """Training steps of a grouped linear layer; calls return what they computed and remember."""

    def __init__(self, recipe: Fp8Recipe | None, sink: bool, device: str, k: int, n: int, **site: Any) -> None:
        self.sink, self.device, self.k, self.n = sink, torch.device(device), k, n
        self.manager, self.state = _manager(recipe, device, **site)
        self.generator = torch.Generator().manual_seed(1)

    def _random(self, rows: int, columns: int, height: int = 1) -> Tensor:
        """Blocks of `height` × 128 have magnitudes of their own."""
        powers = torch.randint(-2, 3, (-(-rows // height), -(-columns // 128)), generator=self.generator)
        powers = powers.repeat_interleave(height, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
        values = torch.randn(rows, columns, generator=self.generator)
        return torch.ldexp(values, powers).to(self.device, torch.bfloat16)

    def __call__(self, sizes: list[int], host_waits: bool = True) -> dict[str, Tensor]:
        x, dy = self._random(sum(sizes), self.k).requires_grad_(), self._random(sum(sizes), self.n)
        weight = nn.Parameter(self._random(len(sizes) * self.n, self.k, height=128))
        if self.sink:
            set_spec(weight, ParamSpec(unsharded("w", tuple(weight.shape)), Init("zeros"), replicated_over_tp=False))
            GradBuffer([weight], data_parallel_group=None, bucket_elements=1000, device=self.device)
            main_grad_of(weight).fill_(0.5)  # gradients are added
        ends = torch.tensor(sizes, device=self.device).cumsum(0, dtype=torch.int32)
        if self.device.type == "cuda" and not host_waits:
            torch.cuda.set_sync_debug_mode("error")
        try:
            y = grouped_linear(x, weight, RowGroups.from_ends(ends, len(x)), self.state)
            y.backward(dy)
        finally:
            if self.device.type == "cuda":
                torch.cuda.set_sync_debug_mode("default")
        at_once = not host_waits and not self.state.high_precision
        assert (self.state.joint_quantizers(x, weight) is not None) == at_once
        self.manager.end_step()
        dw = main_grad_of(weight) if self.sink else weight.grad
        assert x.grad is not None
        assert dw is not None
        found = {"y": y.detach(), "dx": x.grad, "dw": dw.float()} | self.manager.state_dict()
        return {name: value.clone() for name, value in found.items()}


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(
    "recipe", [DelayedScaling(), pytest.param(BlockwiseScaling(), marks=pytest.mark.slow)], ids=["delayed", "blockwise"]
)
def test_the_activation_quantizes_for_both_layers(
    recipe: Fp8Recipe, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two layers of experts and SwiGLU between them, which leaves no values: amaxes are those before rounding to bf16.

    Against float64 the error is that of quantizing values.
    """
    monkeypatch.setattr(group_state, "has_kernels", lambda x, *_: x.dtype == torch.bfloat16)
    sizes, (h, f) = [3, 0, 40, 5], (128, 128) if recipe.name == "blockwise" else (32, 48)
    generator = torch.Generator().manual_seed(2)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, torch.bfloat16)

    x, dout = random(sum(sizes), h), random(sum(sizes), h)
    up, down = (nn.Parameter(random(len(sizes) * n, k) * 0.2) for n, k in ((2 * f, h), (h, f)))
    groups = RowGroups.from_ends(torch.tensor(sizes, device=device).cumsum(0, dtype=torch.int32), sum(sizes))
    between, results = Neighbor("swiglu", "per_tensor or blocks"), []
    for fused in (False, True):
        manager = Fp8Manager(recipe, amax_group=None)
        sites = {"up": {"after": between}, "down": {"before": between}} if fused else {"up": {}, "down": {}}
        states = [
            manager.group([manager.linear(LinearSite(f"{name}.{e}", expert=True, **at)) for e in range(len(sizes))])
            for name, at in sites.items()
        ]
        manager.materialize(torch.device(device))
        x.grad = up.grad = down.grad = None
        x.requires_grad_()
        handoff = states[0].grad_handoff(x, up, groups)
        form = states[1].input_format(x, down, groups)
        assert (form is not None) == (handoff is not None) == fused
        y = grouped_linear(x, up, groups, states[0], handoff)
        out = grouped_linear(activation("swiglu", y, None, form, handoff), down, groups, states[1])
        out.backward(dout)
        if fused and recipe.name == "delayed":
            recorded = [manager.state_dict()[f"fp8.down.{e}.input.amax_history"][0] for e in range(len(sizes))]
            assert torch.equal(torch.stack(recorded), amax_of_groups(SwiGLU(y.detach()), groups))
        results.append([out.detach(), x.grad, up.grad, down.grad])
    exact = _in_float64(x.detach(), up.detach(), down.detach(), dout, sizes)
    for *found, expected in zip(*results, exact, strict=True):
        of_values, of_fused = ((actual.double() - expected).norm() / expected.norm() for actual in found)
        assert of_fused < 1.1 * of_values < 0.15  # E5M2 has steps of a quarter


def _in_float64(x: Tensor, up: Tensor, down: Tensor, dout: Tensor, sizes: list[int]) -> list[Tensor]:
    """Output and gradients of x and both weights, of one expert after the other."""
    x, up, down = (value.double().requires_grad_() for value in (x, up, down))
    weights = zip(up.chunk(len(sizes)), down.chunk(len(sizes)), strict=True)
    parts = []
    for rows, (up_e, down_e) in zip(x.split(sizes), weights, strict=True):
        gate, value = (rows @ up_e.t()).chunk(2, dim=-1)
        parts.append(torch.nn.functional.silu(gate) * value @ down_e.t())
    out = torch.cat(parts)
    return [out, *torch.autograd.grad(out, (x, up, down), dout.double())]
