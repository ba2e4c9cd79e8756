"""Modules in FP8: bit for bit what the GPT's layers compute, what is fused, and the state between steps.

Shapes: x `[s, b, h]`.
"""

from __future__ import annotations

import copy
import io
import resource
import zipfile
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megafp8 import fp8, nn
from megafp8.config.schema import ModelConfig
from megafp8.fp8 import E4M3, E5M2
from megafp8.layers.build import PartBuild
from megafp8.layers.context import BuildContext, PlannedGroup
from megafp8.layers.mlp.module import MLP
from megafp8.layers.norm.module import RMSNormPart
from megafp8.nn.base import default_device
from megafp8.numerics.recipes.base import RecipeQuantizer
from megafp8.plan import Neighbor
from tests.fp8.linear_layer import LinearLayer
from tests.fp8.reference import decode, encode, scale_of
from tests.marks import slow_but
from tests.nn.compare import randomized

S, B, H, F = 8, 4, 32, 64
CPU: dict[str, Any] = {"device": "cpu"}
RECIPES = {
    "delayed": fp8.DelayedScaling(amax_history_len=2),
    "current": fp8.CurrentScaling(),
    "rowwise": fp8.RowwiseScaling(),
    "blockwise": fp8.BlockwiseScaling(),
    "mxfp8": fp8.MXFP8Scaling(),
    "bf16 wgrad": fp8.CurrentScaling(override_linear_precision=(False, False, True)),
}


def batch(seed: int, *shape: int) -> Tensor:
    return torch.randn(*(shape or (S, B, H)), generator=torch.Generator().manual_seed(seed))


def trained(
    forward: Callable[[Tensor], Tensor], parameters: list[Tensor], end_step: Callable[[], None]
) -> list[Tensor]:
    """Outputs and gradients of three steps of two micro-batches, with an SGD step between."""
    optimizer, results = torch.optim.SGD(parameters, lr=0.1), []
    for step in range(3):
        for i in range(2):
            x = batch(2 * step + i).requires_grad_()
            y = forward(x)
            y.backward(0.01 * batch(10 + step, *y.shape))
            results += [y.detach(), x.grad]
        results += [p.grad.clone() for p in parameters]
        optimizer.step()
        optimizer.zero_grad()
        end_step()
    return results


def assert_equal(actual: list[Tensor], expected: list[Tensor]) -> None:
    assert len(actual) == len(expected)
    for i, (mine, other) in enumerate(zip(actual, expected, strict=True)):
        assert torch.equal(mine, other), f"{i} {list(mine.shape)}: {(mine - other).abs().max()}"


MLPS = [
    ("delayed", "swiglu", False), ("current", "gelu", True), ("blockwise", "swiglu", True), ("rowwise", "gelu", False),
    ("mxfp8", "swiglu", False), ("bf16 wgrad", "gelu", True),
]  # fmt: skip


@pytest.mark.parametrize(("recipe", "activation", "bias"), slow_but(MLPS, MLPS[0], MLPS[2], MLPS[5]))
def test_layernorm_mlp_is_the_norm_and_mlp_of_a_gpt(recipe: str, activation: str, bias: bool) -> None:
    module = randomized(nn.LayerNormMLP(H, F, activation=activation, bias=bias, normalization="RMSNorm", **CPU))
    kind = {"gelu": "gelu_tanh"}.get(activation, activation)
    config = ModelConfig(
        num_layers=1, hidden_size=H, num_attention_heads=4, ffn_hidden_size=F, activation=kind, linear_bias=bias
    )
    manager = fp8.Fp8Manager(RECIPES[recipe], amax_group=None)
    group = cast(ProcessGroup, PlannedGroup(1))
    context = BuildContext(group, manager, torch.float32, torch.device("cpu"), False)
    norm = RMSNormPart("norm", H, context, eps=1e-5, sees_a_slice=False)
    mlp = MLP(PartBuild("mlp", config.spec.layers[0].ffn, config.spec, context, Neighbor("norm", "any")))
    manager.materialize(torch.device("cpu"))
    pairs = {"layer_norm_weight": norm.weight, "fc1_weight": mlp.up.weight, "fc1_bias": mlp.up.bias,
             "fc2_weight": mlp.down.weight, "fc2_bias": mlp.down.bias}  # fmt: skip
    own = dict(module.named_parameters())
    with torch.no_grad():
        for name, parameter in own.items():
            pairs[name].copy_(parameter)

    def run(x: Tensor) -> Tensor:
        with fp8.autocast(recipe=RECIPES[recipe]):
            return module(x)

    actual = trained(run, list(own.values()), lambda: None)
    expected = trained(
        lambda x: mlp(norm.residual(x, None, mlp.input_format)[1]), [pairs[name] for name in own], manager.end_step
    )
    assert_equal(actual, expected)
    high = module(batch(0))
    assert not torch.equal(high, run(batch(0)))


def test_casts_are_fused_with_norm_and_activation(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds: list[str] = []
    cast_to_fp8 = RecipeQuantizer.__call__

    def spy(self: RecipeQuantizer, source: Any, **options: Any) -> Any:
        kinds.append(f"{self.tensor.name} {source.kind}")
        return cast_to_fp8(self, source, **options)

    monkeypatch.setattr(RecipeQuantizer, "__call__", spy)
    layer = nn.TransformerLayer(
        H, F, 4, bias=False, activation="swiglu", fuse_qkv_params=True, hidden_dropout=0.0, attention_dropout=0.0, **CPU
    )
    with fp8.autocast(recipe=fp8.CurrentScaling()):
        y = layer(batch(0))
    y.sum().backward()
    fused = [kind for kind in kinds if not kind.endswith(" plain")]
    assert fused == [
        "linear.input normalized",
        "fc1.input normalized",
        "fc2.input swiglu",
        "fc1.grad_output swiglu_grad",
    ]
    assert len(kinds) == 3 * 4  # input, weight and output gradient of qkv, proj, fc1 and fc2, once each


def _emulated(x: np.ndarray, fmt: fp8.Format) -> np.ndarray:
    """x rounded to FP8 by one scale, from the formats' definition."""
    scale = np.float32(scale_of(float(np.abs(x).max()), fmt.max))
    codes = encode((x * scale).astype(np.float32), fmt)
    return np.vectorize(lambda code: decode(int(code), fmt))(codes) * (1.0 / scale)


def test_linear_against_the_formats_definition() -> None:
    layer = randomized(nn.Linear(H, F, parameters_split=("a", "b"), **CPU))
    x, dy = batch(0).requires_grad_(), batch(1, S, B, F)
    with fp8.autocast(recipe=fp8.CurrentScaling()):
        y = layer(x)
    y.backward(dy)
    weight = torch.cat([layer.a_weight, layer.b_weight]).detach().numpy()
    bias = torch.cat([layer.a_bias, layer.b_bias]).detach().numpy()
    x8, w8 = _emulated(x.detach().flatten(0, 1).numpy(), E4M3), _emulated(weight, E4M3)
    dy8 = _emulated(dy.flatten(0, 1).numpy(), E5M2)
    dw = torch.cat([layer.a_weight.grad, layer.b_weight.grad]).numpy()
    for actual, expected in (
        (y.detach().flatten(0, 1).numpy(), x8 @ w8.T + bias),
        (x.grad.flatten(0, 1).numpy(), dy8 @ w8),
        (dw, dy8.T @ x8),
    ):
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())


def _runs(layer: Any, recipe: fp8.Fp8Recipe) -> Callable[[Tensor], Tensor]:
    def run(x: Tensor) -> Tensor:
        with fp8.autocast(recipe=recipe):
            return layer(x)

    return run


@pytest.mark.parametrize("recipe", ["delayed", "blockwise"])
def test_variants_of_linear_have_the_same_bits(recipe: str) -> None:
    """One parameter or several, the input kept or quantized again, a layer alone under a manager."""
    whole = randomized(nn.Linear(H, F, bias=False, **CPU))
    names = [{}, {"parameters_split": ("a", "b")}, {"save_original_input": True}]
    results = []
    for options in names:
        layer = nn.Linear(H, F, bias=False, **options, **CPU)
        with torch.no_grad():
            for p, rows in zip(layer.parameters(), whole.weight.chunk(len(list(layer.parameters()))), strict=True):
                p.copy_(rows)
        found = trained(_runs(layer, RECIPES[recipe]), list(layer.parameters()), lambda: None)
        n = len(list(layer.parameters()))
        results.append(found if n == 1 else _rejoined(found, n))
    manager = fp8.Fp8Manager(RECIPES[recipe], amax_group=None)
    linear = LinearLayer(manager)
    manager.materialize(torch.device("cpu"))
    weight = torch.nn.Parameter(whole.weight.detach().clone())
    expected = trained(lambda x: linear(x, weight), [weight], manager.end_step)
    for result in results:
        assert_equal(result, expected)


def _rejoined(results: list[Tensor], parts: int) -> list[Tensor]:
    step = 4 + parts
    joined = []
    for i in range(0, len(results), step):
        joined += [*results[i : i + 4], torch.cat(results[i + 4 : i + step])]
    return joined


def test_weights_are_quantized_once_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those of several parameters; and again when one of these has changed, or a first micro-batch says so."""
    count = 0
    cast_to_fp8 = RecipeQuantizer.__call__

    def counted(self: RecipeQuantizer, source: Any, **options: Any) -> Any:
        nonlocal count
        count += self.tensor.operand == "weight"
        return cast_to_fp8(self, source, **options)

    monkeypatch.setattr(RecipeQuantizer, "__call__", counted)
    for copied in (False, True):
        layer = nn.Linear(H, F, parameters_split=("a", "b"), **CPU)
        layer = copy.deepcopy(layer) if copied else layer
        run = _runs(layer, fp8.CurrentScaling())
        counts = []
        for change in (None, None, "write", None, "assign", "optimizer"):
            if change == "write":
                with torch.no_grad():
                    layer.b_weight.mul_(2)
            elif change == "assign":
                layer.a_weight = torch.nn.Parameter(layer.a_weight.detach() * 3)
            elif change == "optimizer":
                torch.optim.SGD(layer.parameters(), lr=0.1).step()
            count = 0
            y = run(batch(0))
            y.sum().backward()
            counts.append(count)
            layer.zero_grad()
        assert counts == [1, 0, 1, 0, 1, 1]
        count = 0
        with fp8.autocast(recipe=fp8.CurrentScaling()):
            layer(batch(0), is_first_microbatch=True)
            layer(batch(0), is_first_microbatch=False)
        assert count == 1


@pytest.mark.parametrize("recipe", ["delayed", "current", "mxfp8"])
def test_grouped_linear_is_each_expert_alone(recipe: str) -> None:
    grouped = randomized(nn.GroupedLinear(3, H, F, bias=False, **CPU))
    singles = [nn.Linear(H, F, bias=False, **CPU) for _ in range(3)]
    with torch.no_grad():
        for i, single in enumerate(singles):
            single.weight.copy_(getattr(grouped, f"weight{i}"))

    def alone(x: Tensor) -> Tensor:
        parts = x.flatten(0, 1).split([8, 0, 24])
        return torch.cat([single(part) for single, part in zip(singles, parts, strict=True) if len(part)])

    splits = [8, 0, 24]
    found = []
    for layer, parameters in (
        (lambda x: grouped(x.flatten(0, 1), splits), list(grouped.parameters())),
        (alone, [single.weight for single in singles]),
    ):
        for p in parameters:
            p.grad = torch.zeros_like(p)  # of an expert without rows too
        found.append([])
        for step in range(2):
            x = batch(step).requires_grad_()
            with fp8.autocast(recipe=RECIPES[recipe]):
                y = layer(x)
            y.backward(batch(5, *y.shape))
            found[-1] += [y.detach(), x.grad, *(p.grad.clone() for p in parameters)]
            torch.optim.SGD(parameters, lr=0.1).step()
    assert_equal(*found)
    results = []
    with torch.inference_mode(), fp8.autocast(recipe=RECIPES[recipe]):
        for change in (1, -2):  # without an optimizer, as load_state_dict does it
            for i, single in enumerate(singles):
                single.weight.mul_(change)
                getattr(grouped, f"weight{i}").mul_(change)
            results.append((grouped(batch(0).flatten(0, 1), splits), alone(batch(0))))
    for y, expected in results:
        assert torch.equal(y, expected)
    assert not torch.equal(results[0][0], results[1][0])


@pytest.mark.parametrize("ended", [False, True])
def test_state_dict_carries_scales(ended: bool) -> None:
    """Saved right after an optimizer step, or when that step has ended: the next steps are the same."""

    def steps(layer: Any, optimizer: Any, seeds: range) -> list[Tensor]:
        results = []
        for seed in seeds:
            y = _runs(layer, RECIPES["delayed"])(batch(seed))
            y.square().sum().backward()
            results.append(y.detach())
            optimizer.step()
            optimizer.zero_grad()
        return results

    layer = randomized(nn.LayerNormMLP(H, F, **CPU))
    optimizer = torch.optim.SGD(layer.parameters(), lr=1e-4)
    steps(layer, optimizer, range(3))
    if ended:
        fp8.end_step(layer)
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    expected = steps(layer, optimizer, range(3, 6))
    file.seek(0)
    resumed = nn.LayerNormMLP(H, F, **CPU)
    resumed.load_state_dict(torch.load(file, weights_only=True))
    assert_equal(steps(resumed, torch.optim.SGD(resumed.parameters(), lr=1e-4), range(3, 6)), expected)
    fresh = nn.LayerNormMLP(H, F, **CPU)
    assert fresh.state_dict()["_extra_state"].numel() == 0
    fresh.load_state_dict(fresh.state_dict())
    elsewhere = io.BytesIO()
    for foreign in ({"scale": torch.ones(2)}, [torch.ones(2)], object):
        torch.save(foreign, elsewhere)
        with pytest.raises(ValueError, match=r"_extra_state is not what megafp8\.nn has saved"):
            fresh.set_extra_state(torch.frombuffer(bytearray(elsewhere.getvalue()), dtype=torch.uint8))


def test_recomputation_has_the_same_bits() -> None:
    """By `checkpoint` around a layer, within `LayerNormMLP`, and of attention; dropout of a tracker's numbers too."""
    tracker = nn.CudaRNGStatesTracker()
    tracker.add("model-parallel-rng", 7)
    start = randomized(nn.TransformerLayer(H, F, 4, get_rng_state_tracker=lambda: tracker, **CPU))
    results = []
    for how in ("none", "checkpoint", "parts"):
        layer = copy.deepcopy(start)
        layer.self_attention.core_attention.get_rng_state_tracker = lambda: tracker
        layer.layernorm_mlp.checkpoint = how == "parts"
        options = {"checkpoint_core_attention": how == "parts"}

        def run(x: Tensor, layer: Any = layer, how: str = how, options: Any = options) -> Tensor:
            with fp8.autocast(recipe=RECIPES["delayed"]):
                if how == "checkpoint":
                    return nn.checkpoint(layer, x, get_rng_state_tracker=lambda: tracker, rotary_pos_emb=None)
                return layer(x, **options)

        torch.manual_seed(0)
        tracker.reset()
        tracker.add("model-parallel-rng", 7)
        results.append(trained(run, list(layer.parameters()), lambda: None))
        results[-1].append(tracker.get_states()["model-parallel-rng"])
    assert_equal(results[1], results[0])
    assert_equal(results[2], results[0])
    with pytest.raises(ValueError, match="distribute_saved_activations is True"):
        nn.checkpoint(start, batch(0), distribute_saved_activations=True)


def test_a_tracker_has_its_own_numbers() -> None:
    tracker = nn.CudaRNGStatesTracker()
    tracker.add("a", 1)
    tracker.add("b", 2)

    def draw() -> Tensor:
        return torch.rand(2, device=default_device())

    expected = []
    for seed in range(3):
        torch.manual_seed(seed)
        expected.append([draw(), draw()])
    torch.manual_seed(0)
    for i in range(2):
        for seed, name in ((1, "a"), (2, "b")):
            with tracker.fork(name):
                assert torch.equal(draw(), expected[seed][i])
        assert torch.equal(draw(), expected[0][i])
    with pytest.raises(ValueError, match="another state has the seed 1"):
        tracker.add("c", 1)
    with pytest.raises(ValueError, match="no state 'c', only a, b"), tracker.fork("c"):
        pass


def test_calibration_and_evaluation() -> None:
    """Calibration runs in high precision and leaves scales; evaluation leaves nothing."""
    layer = randomized(nn.TransformerLayer(H, F, 4, hidden_dropout=0.0, attention_dropout=0.0, **CPU))
    high = layer(batch(0))
    with fp8.autocast(enabled=False, recipe=RECIPES["delayed"], calibrating=True):
        y = layer(batch(0))
    y.sum().backward()
    assert torch.equal(y, high)
    fp8.end_step(layer)
    calibrated = _scales(layer)
    assert len(calibrated) == 3 * 4
    assert all(tensor != 1 for tensor in calibrated)
    layer.eval()
    with torch.no_grad():
        assert not torch.equal(_runs(layer, RECIPES["delayed"])(batch(1)), layer(batch(1)))
    fp8.end_step(layer)
    assert_equal(_scales(layer), calibrated)


@pytest.mark.parametrize("kind", ["linear layers", "experts"])
def test_an_evaluation_before_the_first_step_leaves_no_amax(kind: str) -> None:
    """Not of weights either: their copies are made anew in training, and the state is then the one without it."""
    experts = kind == "experts"
    module: Any = randomized(nn.GroupedLinear(2, H, H, **CPU) if experts else nn.LayerNormMLP(H, F, **CPU))
    arguments = ([S // 2, S // 2],) if experts else ()
    x, results = batch(0)[:, 0].contiguous(), []
    for each, evaluated in ((module, True), (copy.deepcopy(module), False)):
        with fp8.autocast(recipe=RECIPES["delayed"]):
            if evaluated:
                each.eval()
                with torch.inference_mode():
                    each(x, *arguments)
                amaxes = [tensor for name, tensor in each.fp8_layers.snapshot().items() if "amax" in name]
                assert amaxes
                assert not any(tensor.any() for tensor in amaxes)
                each.train()
            y = each(x, *arguments)
        y.sum().backward()
        fp8.end_step(each)
        results.append([y.detach(), *fp8.state_dict(each).values()])
    assert_equal(*results)
    assert all(tensor.any() for tensor in results[0])


SHARED = torch.ones(1 << 18)
"""A megabyte, which an archive holds once for all names that it has."""


@pytest.mark.parametrize(
    "state",
    [
        None,
        [1],
        {"a": 1},
        {1: torch.ones(2)},
        {"a": torch.ones(1).expand(10**9)},
        dict.fromkeys(map(str, range(500)), SHARED),
        b"\0" * 40,
        "bytearray",
    ],
)
def test_extra_state_that_megafp8_has_not_saved(state: object) -> None:
    """A checkpoint of somebody else: one error, and nothing is allocated that the bytes ask for."""
    layer, file = nn.Linear(H, H, **CPU), io.BytesIO()
    with fp8.autocast(recipe=RECIPES["delayed"]):
        layer(batch(0))
    for foreign in (
        [1],
        "text",
        {"a": 1},
        torch.ones(3),
        torch.ones(3, dtype=torch.bfloat16),
        torch.eye(2).to_sparse(),
    ):
        with pytest.raises(ValueError, match=r"_extra_state is not what megafp8\.nn has saved"):
            layer.set_extra_state(cast(Any, foreign))
    doubled = {
        name: tensor.double()
        for name, tensor in torch.load(io.BytesIO(bytes(layer.get_extra_state().tolist())), weights_only=True).items()
    }
    torch.save(doubled, archive := io.BytesIO())
    with pytest.raises(ValueError, match=r"_extra_state is not what megafp8\.nn has saved"):
        layer.set_extra_state(torch.frombuffer(bytearray(archive.getvalue()), dtype=torch.uint8))
    if state == "bytearray":  # a constructor that torch.load calls
        with zipfile.ZipFile(file, "w") as archive:
            archive.writestr("archive/data.pkl", b"\x80\x02c__builtin__\nbytearray\nJ\x00\x00\x00\x7f\x85R.")
            archive.writestr("archive/byteorder", b"little")
            archive.writestr("archive/version", b"3\n")
    else:
        torch.save(state, file)
    content = torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ValueError, match=r"_extra_state is not what megafp8\.nn has saved"):
        layer.set_extra_state(content)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # KiB


def _scales(layer: torch.nn.Module) -> list[Tensor]:
    states = [m.fp8_layers.state_dict() for m in layer.modules() if getattr(m, "fp8_layers", None) is not None]
    return [tensor.clone() for state in states for name, tensor in state.items() if name.endswith(".scale")]


def test_a_rule_by_a_modules_name() -> None:
    current = fp8.CurrentScaling()
    recipe = fp8.CustomScaling(
        rules=(fp8.Rule(layers="decoder.3.*.fc2", input=current, weight=current, grad_output=current),)
    )
    layer = nn.LayerNormMLP(H, F, name="decoder.3.mlp", **CPU)
    with fp8.autocast(recipe=recipe):
        layer(batch(0))
    plans = [layer.fp8_layers.states_of(f"decoder.3.mlp.{name}")[0].plan.fp8 for name in ("fc1", "fc2")]
    assert plans == [False, True]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [None, "delayed"])
def test_torch_compile(recipe: str | None) -> None:
    """Modules are left as they are, and what is around them is compiled."""
    start = randomized(nn.TransformerLayer(H, F, 4, hidden_dropout=0.0, attention_dropout=0.0, **CPU))
    results = []
    for compiled in (False, True):
        layer = copy.deepcopy(start)
        model = torch.compile(layer, backend="aot_eager") if compiled else layer

        def run(x: Tensor, model: Any = model) -> Tensor:
            with fp8.autocast(enabled=recipe is not None, recipe=RECIPES.get(recipe or "")):
                return model(x)

        results.append(trained(run, list(layer.parameters()), lambda: None))
    assert_equal(*results)
