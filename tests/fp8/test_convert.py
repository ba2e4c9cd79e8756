"""Converted models against hand-driven layers, float64 products, and one process with the same batch.

Ranks are real; the model is the examples' Llama. Shapes: m tokens, k inputs, n outputs.
"""

from __future__ import annotations

import copy
import gc
import logging
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from examples.llama import LlamaDecoderLayer, LlamaForCausalLM, counting_batch
from megafp8 import fp8
from megafp8.fp8 import E4M3, E5M2
from megafp8.fp8.convert import Fp8LinearModule
from megafp8.fp8.standalone import _alive
from megafp8.numerics.recipes.base import RecipeQuantizer
from tests.fp8.linear_layer import LinearLayer
from tests.fp8.reference import decode, encode, scale_of
from tests.gemm.test_dispatch import needs_cpu_kernel
from tests.marks import slow_but
from tests.world import World

RECIPES = {
    "delayed": fp8.DelayedScaling(amax_history_len=4),
    "current": fp8.CurrentScaling(),
    "rowwise": fp8.RowwiseScaling(),
    "blockwise": fp8.BlockwiseScaling(),
    "static": fp8.StaticScaling(calibration_steps=2),
    "mxfp8": fp8.MXFP8Scaling(),
    "nvfp4": fp8.NVFP4Scaling(),
}
VOCAB = 32
convert_file = sys.modules["megafp8.fp8.convert"]  # `fp8.convert` is the function


def llama(recipe: fp8.Fp8Recipe | None, *, layers: int = 2, **options: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    model = LlamaForCausalLM(vocab=VOCAB, h=32, intermediate=64, layers=layers, heads=2)
    if recipe is not None:
        assert fp8.convert(model, recipe, **options) is model
    return model


def batches(count: int, b: int = 4) -> list[Tensor]:
    torch.manual_seed(1)
    return [counting_batch(VOCAB, b, 15) for _ in range(count)]


def layer_and_input(recipe: fp8.Fp8Recipe, k: int = 32, n: int = 16) -> tuple[nn.Linear, Tensor]:
    torch.manual_seed(0)
    layer = nn.Linear(k, n)
    fp8.convert(layer, recipe, skip=())
    return layer, torch.randn(2, 8, k)


def in_fp8(module: nn.Module, *args: Any) -> Any:
    with fp8.autocast():
        return module(*args)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.5)


def trained(
    model: nn.Module, optimizer: torch.optim.Optimizer, tokens: list[Tensor], loss_of: Callable[..., Any] = in_fp8
) -> list[float]:
    """Losses of a step for each of `tokens`."""
    losses = []
    for batch in tokens:
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def recomputing(model: nn.Module, recompute: bool = True) -> nn.Module:
    """`model`, with its decoder layers recomputed in backward if `recompute`."""
    if recompute:
        apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, LlamaDecoderLayer))
    return model


def assert_same(a: Iterable[Tensor], b: Iterable[Tensor]) -> None:
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def fp8_layers(model: nn.Module) -> set[str]:
    return {name for name, module in model.named_modules() if isinstance(module, Fp8LinearModule)}


def test_parameters_names_and_hooks_stay() -> None:
    model = llama(None)
    parameters, keys = dict(model.named_parameters()), list(model.state_dict())
    attention = model.model.layers[0].self_attn
    q_proj, seen = attention.q_proj, []
    q_proj.register_forward_hook(lambda *_: seen.append(1))
    fp8.convert(model, fp8.CurrentScaling())
    assert attention.q_proj is q_proj
    assert list(model.state_dict()) == keys
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())
    in_fp8(model, batches(1)[0])
    assert seen == [1]


def test_patterns_choose_layers() -> None:
    everything = {name for name, module in llama(None).named_modules() if isinstance(module, nn.Linear)}
    assert len(everything) == 15
    assert fp8_layers(llama(fp8.CurrentScaling())) == everything - {"lm_head"}
    assert fp8_layers(llama(fp8.CurrentScaling(), skip=())) == everything
    chosen = fp8_layers(llama(fp8.CurrentScaling(), skip=("lm_head", "*.layers.1.*", "*.[qkv]_proj")))
    assert chosen == {f"model.layers.0.{part}_proj" for part in ("self_attn.o", "mlp.gate", "mlp.up", "mlp.down")}


def test_a_function_and_the_speed_model_choose_layers(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def only_up(module: nn.Module, name: str) -> bool:
        return isinstance(module, nn.Linear) and name.endswith("up_proj")

    assert fp8_layers(llama(fp8.CurrentScaling(), module_filter_fn=only_up)) == {
        f"model.layers.{i}.mlp.up_proj" for i in range(2)
    }
    monkeypatch.setattr(convert_file, "device_name", lambda device: "NVIDIA H200")
    model = nn.Sequential(nn.Linear(4096, 14336, device="meta"), nn.Linear(14336, 256, device="meta"))
    with caplog.at_level(logging.INFO, "megafp8"):
        fp8.convert(model, fp8.CurrentScaling(), skip=(), speed_filter=8192)
    assert fp8_layers(model) == {"0"}
    assert "1 stays in high precision: FP8 is predicted to be 0." in caplog.text
    assert "(8192x14336x256)" in caplog.text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"speed_filter": 128}, "the speeds of 'cpu' are not known"),
        ({"skip": ("model.layer.0.*",)}, r"skip pattern 'model.layer.0.\*' matches no layer; .* model.layers.0.mlp"),
        ({"skip": ("*",)}, "no nn.Linear to convert: 15 in all, 0 not skipped"),
        ({"gemm_backend": "cutlass"}, "gemm_backend is 'cutlass'.* auto, cublaslt"),
        ({"recipe": "delayed"}, r"recipe is 'delayed'; it must be an Fp8Recipe; try megafp8.fp8.DelayedScaling\(\)"),
        ({"recipe": "fp8"}, r"recipe is 'fp8'; it must be an Fp8Recipe; try megafp8.fp8.CurrentScaling\(\)"),
        ({"recipe": None}, "recipe is None; it must be an Fp8Recipe"),
        ({"recipe": fp8.RowwiseScaling}, r"recipe is <class .*'>; .*; try megafp8.fp8.RowwiseScaling\(\)"),
        ({"recipe": fp8.StaticScaling(amax=(("*.qkv.*", 1.0),))}, r"static_amax pattern '\*.qkv.\*'"),
        ({"skip": "lm_head"}, r"skip is the string 'lm_head'; .* a tuple of patterns, for example \('lm_head',\)"),
    ],
)
def test_mistakes_are_named_and_leave_the_model_alone(options: Any, message: str) -> None:
    model = llama(None)
    with pytest.raises(ValueError, match=message):
        fp8.convert(model, **{"recipe": fp8.CurrentScaling(), **options})
    assert fp8_layers(model) == set()


def test_converting_twice_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="converted before"):
        fp8.convert(llama(fp8.CurrentScaling()), fp8.CurrentScaling())
    with pytest.raises(ValueError, match="no FP8 layers"):
        fp8.end_step(llama(None))


def test_odd_dims_stay_in_high_precision_and_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Linear(32, 24), nn.Linear(24, 16), nn.Linear(16, 16))
    with caplog.at_level(logging.WARNING, "megafp8"):
        fp8.convert(model, fp8.CurrentScaling(), skip=())
    assert fp8_layers(model) == {"2"}
    assert "0 [24, 32], 1 [16, 24]" in caplog.text


def test_subclasses_of_linear_are_left_alone() -> None:
    attention = nn.MultiheadAttention(16, 2)  # reads its out_proj's weight itself
    fp8.convert(nn.Sequential(attention, nn.Linear(16, 16)), fp8.CurrentScaling(), skip=())
    assert fp8_layers(attention) == set()


def test_fp8_only_within_autocast() -> None:
    layer, x = layer_and_input(fp8.CurrentScaling())
    plain = F.linear(x, layer.weight, layer.bias)
    quantized = in_fp8(layer, x)
    assert not torch.equal(quantized, plain)
    assert torch.equal(layer(x), plain)
    with fp8.autocast():
        with fp8.autocast(False):
            assert torch.equal(layer(x), plain)
            assert torch.equal(in_fp8(layer, x), quantized)
        assert torch.equal(layer(x), quantized)
        elsewhere: list[Tensor] = []
        thread = threading.Thread(target=lambda: elsewhere.append(layer(x)))
        thread.start()
        thread.join()
        assert torch.equal(elsewhere[0], plain)


def numbers(x: Tensor, fmt: fp8.Format) -> np.ndarray:
    """What an FP8 copy of x, scaled by its own amax, stands for: float64, written independently of the package."""
    x_np = x.detach().numpy()
    scale = np.float32(scale_of(float(np.abs(x_np).max()), fmt.max))
    data = encode(x_np * scale, fmt)
    return np.vectorize(lambda byte: decode(byte, fmt))(data) * float(np.float32(1) / scale)


def test_a_layers_gradients_are_products_of_the_operands_as_quantized() -> None:
    layer, x = layer_and_input(fp8.CurrentScaling())
    x.requires_grad_()
    dy = torch.randn(2, 8, 16) * 1e-3
    y = in_fp8(layer, x)
    y.backward(dy)
    x8, w8, dy8 = numbers(x, E4M3).reshape(16, 32), numbers(layer.weight, E4M3), numbers(dy, E5M2).reshape(16, 16)
    assert x.grad is not None
    for actual, a, b, plain in (
        (y - layer.bias, x8, w8.T, F.linear(x, layer.weight)),
        (x.grad, dy8, w8, dy @ layer.weight),
        (layer.weight.grad, dy8.T, x8, dy.flatten(0, 1).T @ x.flatten(0, 1)),
    ):
        expected, magnitude = a @ b, np.abs(a) @ np.abs(b)
        error = np.abs(actual.detach().numpy().reshape(expected.shape) - expected)
        assert (error <= 100 * 2.0**-24 * magnitude + 1e-6 * np.abs(expected)).all()
        assert np.abs(plain.detach().numpy().reshape(expected.shape) - expected).max() > 1e-3 * np.abs(expected).max()
    assert layer.bias.grad is not None
    torch.testing.assert_close(layer.bias.grad, dy.sum((0, 1)))


@pytest.mark.parametrize("name", slow_but(RECIPES, "delayed"))
def test_every_recipe_trains_like_the_model_that_was_not_converted(name: str) -> None:
    def losses(recipe: fp8.Fp8Recipe | None) -> list[float]:
        model = llama(recipe)
        return trained(model, torch.optim.AdamW(model.parameters(), lr=1e-2), batches(20))

    plain, converted = losses(None), losses(RECIPES[name])
    assert plain[-1] < 0.5 * plain[0]
    assert converted != plain
    assert sum(converted[-5:]) == pytest.approx(sum(plain[-5:]), rel=0.05)


@pytest.mark.parametrize("backend", ["emulated", pytest.param("scaled_mm", marks=needs_cpu_kernel)])
def test_torch_autocast_chooses_the_dtype(backend: Any) -> None:
    torch.manual_seed(0)
    layer = fp8.convert(nn.Linear(32, 16), fp8.CurrentScaling(), skip=(), gemm_backend=backend)
    x = torch.randn(16, 32, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = in_fp8(layer, x)
    expected = in_fp8(layer, x.bfloat16())
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, expected)
    y.float().sum().backward()
    assert x.grad is not None
    assert (x.grad.dtype, layer.weight.grad.dtype) == (torch.float32, torch.float32)


@pytest.mark.parametrize("name", RECIPES)
def test_no_tokens_at_all(name: str) -> None:
    layer, x = layer_and_input(RECIPES[name])
    y = in_fp8(layer, x[:0].requires_grad_())
    assert y.shape == (0, 8, 16)
    y.sum().backward()
    assert torch.equal(layer.weight.grad, torch.zeros(16, 32))


def multiply_(layer: nn.Linear, factor: float) -> None:
    with torch.no_grad():
        layer.weight.mul_(factor)


def multiply_data(layer: nn.Linear, factor: float) -> None:
    layer.weight.data = layer.weight.data * factor


def replace(layer: nn.Linear, factor: float) -> None:
    layer.weight = nn.Parameter(layer.weight.detach() * factor)


def load(layer: nn.Linear, factor: float, assign: bool = False) -> None:
    layer.load_state_dict({"weight": layer.weight.detach() * factor, "bias": layer.bias.detach()}, assign=assign)


def decay(layer: nn.Linear, factor: float, **options: Any) -> None:
    """A step of weight decay alone: w - lr · decay · w."""
    layer.weight.grad = torch.zeros_like(layer.weight)
    torch.optim.AdamW([layer.weight], lr=1.0, weight_decay=1 - factor, **options).step()


class WritesBehind(torch.optim.Optimizer):
    """An optimizer that writes to `.data`, which no version counter sees."""

    def __init__(self, parameters: list[nn.Parameter], factor: float) -> None:
        super().__init__(parameters, {"factor": factor})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.mul_(group["factor"])


CHANGES: dict[str, Callable[[nn.Linear, float], Any]] = {
    "in place": multiply_,
    "data": multiply_data,
    "replaced": replace,
    "loaded": load,
    "loaded by assignment": partial(load, assign=True),
    "foreach optimizer": partial(decay, foreach=True),
    "fused optimizer": partial(decay, fused=True),
    "optimizer that writes to data": lambda layer, factor: WritesBehind([layer.weight], factor).step(),
}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_weight_is_noticed(change: str, training: bool) -> None:
    layer, x = layer_and_input(fp8.CurrentScaling())
    layer.train(training)
    layer.bias.data.zero_()
    y = in_fp8(layer, x)
    CHANGES[change](layer, 0.5)
    assert torch.equal(in_fp8(layer, x), 0.5 * y)


def test_another_weight_at_the_same_address_is_noticed() -> None:
    layer, x = layer_and_input(fp8.CurrentScaling())
    for factor in (1.0, -2.0, 3.0):  # temporaries, each of which may lie where the last one lay
        weights = {"weight": layer.weight.detach() * factor, "bias": torch.zeros(16)}
        with fp8.autocast():
            y = torch.func.functional_call(layer, weights, (x,))
        fresh, _ = layer_and_input(fp8.CurrentScaling())
        fresh.load_state_dict(weights)
        assert torch.equal(y, in_fp8(fresh, x))


def test_an_unchanged_weight_is_cast_once(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = layer_and_input(fp8.CurrentScaling())
    casts: list[tuple[int, int]] = []
    original = RecipeQuantizer.__call__

    def counted(self: Any, source: Any, **wanted: bool) -> Any:
        casts.append(source.shape)
        return original(self, source, **wanted)

    monkeypatch.setattr(RecipeQuantizer, "__call__", counted)
    for _ in range(3):
        in_fp8(layer, x.clone()).sum().backward()
    assert casts.count((16, 32)) == 4  # three times the input, which has the shape of the weight, and the weight
    pair = fp8.convert(nn.ModuleList(nn.Linear(32, 48) for _ in range(2)), fp8.CurrentScaling(), skip=())
    casts.clear()
    for write in (lambda: x, lambda: x.mul_(2), lambda: x.data.mul_(2)):  # the last as collectives write, unversioned
        write()
        outputs = [in_fp8(each, x) for each in pair]
        count = casts.count((16, 32))
        assert all(torch.equal(y, in_fp8(each, x.clone())) for each, y in zip(pair, outputs, strict=True))
        assert count == 1  # of the same input, as the projections of attention have
        casts.clear()
    for factor in (1.0, -2.0):
        x.data.mul_(factor)
        assert torch.equal(in_fp8(layer, x), in_fp8(layer, x.clone()))


@pytest.mark.parametrize("name", ["current", "delayed"])
def test_a_graph_keeps_the_weight_it_was_computed_with(name: str) -> None:
    """As in adversarial training: an optimizer steps between a forward and its backward. With its scale, which with
    delayed scaling is another one after two steps; without FP8 for wgrad there is no scale of the input to be kept."""
    recipe = fp8.CurrentScaling()
    if name == "delayed":
        recipe = fp8.DelayedScaling(amax_history_len=1, override_linear_precision=(False, False, True))
    gradients = []
    for changed in (False, True):
        layer, x = layer_and_input(recipe)
        for _ in range(2):
            in_fp8(layer, x).sum().backward()
            torch.optim.SGD(layer.parameters(), lr=0.0).step()
        x.requires_grad_()
        y = in_fp8(layer, x)
        for _ in range(2 if changed else 0):
            multiply_(layer, -3.0)
            torch.optim.SGD(layer.parameters(), lr=0.0).step()
            in_fp8(layer, x)
        y.sum().backward()
        gradients.append(x.grad)
    assert torch.equal(gradients[0], gradients[1])


def delayed_by_hand(steps: int, microbatches: int) -> tuple[dict[str, Tensor], Tensor]:
    """A layer driven by the manager directly: what a converted one must do by itself."""
    torch.manual_seed(0)
    linear = nn.Linear(32, 16)
    manager = fp8.Fp8Manager(RECIPES["delayed"], amax_group=None)
    op = LinearLayer(manager, "")
    manager.materialize(torch.device("cpu"))
    optimizer = torch.optim.SGD(linear.parameters(), lr=0.1)
    for x in inputs(steps):
        for part in x.chunk(microbatches):
            op(part, linear.weight, linear.bias).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        manager.end_step()
    return manager.state_dict(), linear.weight


def inputs(steps: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(8, 32, generator=generator) * (1 + step) for step in range(steps)]


def evaluated(layer: nn.Module) -> None:
    layer.eval()
    with torch.no_grad():
        in_fp8(layer, torch.full((16, 32), 1e4))
    layer.train()


@pytest.mark.parametrize("how", ["plain", "by hand", "evaluated", "two optimizers", "checkpointed", "reentrant"])
def test_delayed_scaling_moves_on_once_a_step(how: str) -> None:
    state, weight = delayed_by_hand(steps=4, microbatches=2)
    layer, _ = layer_and_input(RECIPES["delayed"])
    parameters = [[layer.weight], [layer.bias]] if how == "two optimizers" else [[layer.weight, layer.bias]]
    optimizers = [torch.optim.SGD(each, lr=0.1) for each in parameters]
    for x in inputs(4):
        for part in x.chunk(2):
            with fp8.autocast():
                if how in ("checkpointed", "reentrant"):
                    y = checkpoint(layer, part.requires_grad_(), use_reentrant=how == "reentrant")
                else:
                    y = layer(part)
            y.square().sum().backward()
        if how == "evaluated":
            evaluated(layer)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if how == "evaluated":
            evaluated(layer)
        if how == "by hand":
            fp8.end_step(layer)
    if how != "by hand":
        with pytest.raises(ValueError, match="end_step"):
            fp8.state_dict(layer)
        fp8.end_step(layer)
    assert torch.equal(layer.weight, weight)
    mine = fp8.state_dict(layer)
    assert list(mine) == list(state)
    assert_same(mine.values(), state.values())
    assert any(tensor.item() not in (0.0, 1.0) for name, tensor in mine.items() if name.endswith("scale"))


@pytest.mark.parametrize("name", ["delayed", "static"])
@pytest.mark.parametrize("after_a_forward", [False, True])
def test_a_resumed_run_is_the_run(name: str, after_a_forward: bool) -> None:
    tokens = batches(6)
    model = llama(RECIPES[name])
    optimizer = sgd(model)
    trained(model, optimizer, tokens[:3])
    fp8.end_step(model)
    saved = pickle.dumps((model.state_dict(), fp8.state_dict(model)))
    expected = trained(model, optimizer, tokens[3:])

    resumed = llama(RECIPES[name])
    optimizer = sgd(resumed)
    if after_a_forward:
        trained(resumed, optimizer, tokens[:1])
    weights, state = pickle.loads(saved)
    resumed.load_state_dict(weights)
    fp8.load_state_dict(resumed, state)
    assert trained(resumed, optimizer, tokens[3:]) == expected


def test_state_of_another_model_is_refused() -> None:
    layer, x = layer_and_input(RECIPES["delayed"])
    fp8.load_state_dict(layer, {"fp8.other.scale": torch.ones(())})
    with pytest.raises(ValueError, match=r"unexpected fp8\.other\.scale"):
        in_fp8(layer, x)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_goes_its_own_way(copied: Callable[[nn.Module], nn.Module]) -> None:
    tokens = batches(4)
    model = llama(RECIPES["delayed"])
    optimizer = sgd(model)
    trained(model, optimizer, tokens[:2])
    twin = copied(model)
    before = [in_fp8(m.eval(), tokens[2]).item() for m in (model, twin)]
    assert before[0] == before[1]
    trained(model.train(), optimizer, tokens[2:])
    assert in_fp8(twin, tokens[2]).item() == before[1]
    trained(twin.train(), sgd(twin), tokens[2:])
    assert_same(model.parameters(), twin.parameters())


def test_a_model_that_is_gone_leaves_nothing() -> None:
    gc.collect()
    before = len(_alive)
    model = llama(RECIPES["delayed"])
    in_fp8(model, batches(1)[0])
    assert len(_alive) == before + 1
    del model
    gc.collect()
    assert len(_alive) == before


def test_one_device() -> None:
    layer, x = layer_and_input(fp8.CurrentScaling())
    in_fp8(layer, x)
    layer.fp8.layers._device = torch.device("cuda")  # as if that had been there
    with pytest.raises(ValueError, match="runs on cpu, but ran on cuda before"):
        in_fp8(layer, x)


@pytest.mark.parametrize("name", ["delayed", "current", "nvfp4"])
def test_recomputed_layers_give_the_same_gradients(name: str) -> None:
    gradients = []
    for recompute in (False, True):
        model = recomputing(llama(RECIPES[name]), recompute)
        in_fp8(model, batches(1)[0]).backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert_same(*gradients)


def test_optimizers_that_step_within_backward_end_one_step() -> None:
    """Each parameter has its own, and layers below are recomputed after those above have stepped."""

    def step_in_backward(parameter: nn.Parameter) -> None:
        optimizer = torch.optim.SGD([parameter], lr=0.5)

        def step(_: Tensor) -> None:
            optimizer.step()
            optimizer.zero_grad()

        parameter.register_post_accumulate_grad_hook(step)

    results = []
    for recompute in (False, True):
        model = recomputing(llama(RECIPES["delayed"]), recompute)
        for parameter in model.parameters():
            step_in_backward(parameter)
        for tokens in batches(3):
            in_fp8(model, tokens).backward()
        fp8.end_step(model)
        results.append([*model.parameters(), *fp8.state_dict(model).values()])
    assert_same(*results)


@pytest.mark.parametrize(
    ("name", "recompute", "backend"),
    slow_but(
        [
            *((name, False, "aot_eager") for name in RECIPES),
            ("delayed", True, "aot_eager"),
            ("delayed", False, "inductor"),
        ],
        ("delayed", False, "aot_eager"),
    ),
)
def test_torch_compile_in_one_graph(name: str, recompute: bool, backend: str) -> None:
    """The same bits as without: training, evaluation, and outside of autocast. Inductor's own ops round differently."""
    from torch._dynamo.testing import CompileCounterWithBackend

    tokens, results = batches(4), []
    for compiled in (False, True):
        torch._dynamo.reset()
        model = recomputing(llama(RECIPES[name], layers=1), recompute)  # compiled in half the time of two
        counter = CompileCounterWithBackend(backend)
        run = torch.compile(model, backend=counter, fullgraph=True) if compiled else model
        optimizer = sgd(model)
        losses = trained(run, optimizer, tokens[:3])
        compilations = counter.frame_count
        with torch.no_grad():
            losses.append(in_fp8(run.eval(), tokens[3]).item())
            losses.append(run(tokens[3]).item())
        others = counter.frame_count
        losses += trained(run.train(), optimizer, tokens)
        fp8.end_step(run)
        results.append([*losses, *(tensor.sum().item() for tensor in fp8.state_dict(model).values())])
    assert compilations == 1
    assert counter.frame_count == others + (name == "static")  # while its scales are calibrated, and then
    if backend == "aot_eager":
        assert results[1] == results[0]
    else:
        assert results[1] == pytest.approx(results[0], rel=1e-4)


@pytest.mark.slow
def test_layers_that_are_alike_are_compiled_once() -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    model = llama(fp8.CurrentScaling())
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    expected = in_fp8(model, batches(1)[0])
    for layer in model.model.layers:
        layer.compile(backend=counter, fullgraph=True)
    with fp8.autocast(recipe=fp8.CurrentScaling(power_of_two=True)):
        other = model(batches(1)[0])
    assert torch.equal(in_fp8(model, batches(1)[0]), expected)
    assert not torch.equal(other, expected)
    assert counter.frame_count == 2  # for each recipe, not for each layer


def _shard(module: nn.Module, **options: Any) -> None:
    """`fully_shard` over the ranks, on the CPU: a machine of one GPU would get two ranks on it."""
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    fsdp.fully_shard(module, mesh=mesh, **options)


def _trained_on_ranks(wrap: str, name: str, steps: int) -> Any:
    """Losses, parameters, and FP8 scales, of a model trained by two ranks with halves of each batch."""
    rank = torch.distributed.get_rank()
    model = llama(RECIPES[name])
    wrapped: Any = model
    if wrap == "ddp":
        wrapped = DistributedDataParallel(model)
    else:
        recomputing(model, "checkpointed" in wrap)
        for layer in model.model.layers:
            _shard(layer, reshard_after_forward="kept" not in wrap)
        _shard(model)
    optimizer = sgd(model)
    parts = [tokens.chunk(2)[rank] for tokens in batches(steps)]
    losses = trained(wrapped, optimizer, parts)
    fp8.end_step(wrapped)
    parameters = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    return losses, [p.detach().numpy() for p in parameters], _numpy(fp8.state_dict(wrapped))


def _numpy(state: dict[str, Tensor]) -> dict[str, np.ndarray]:
    return {name.replace("_checkpoint_wrapped_module.", ""): tensor.numpy() for name, tensor in state.items()}


def trained_on_one(name: str, steps: int) -> tuple[Any, list[Tensor], dict[str, np.ndarray]]:
    model = llama(RECIPES[name])
    optimizer = sgd(model)
    losses = []
    for tokens in batches(steps):
        parts = [in_fp8(model, part) for part in tokens.chunk(2)]
        for part in parts:
            part.backward()
        for parameter in model.parameters():
            parameter.grad /= 2  # afterwards, as ranks do: before its first update, a delayed scale sees the difference
        optimizer.step()
        optimizer.zero_grad()
        losses.append([part.item() for part in parts])
    fp8.end_step(model)
    return list(zip(*losses, strict=True)), list(model.parameters()), _numpy(fp8.state_dict(model))


WRAPS = ["ddp", "fsdp", "fsdp kept", "fsdp checkpointed"]


ON_RANKS = [*((wrap, name) for wrap in WRAPS for name in ("delayed", "blockwise")), ("ddp", "nvfp4")]


@pytest.mark.parametrize(("wrap", "name"), slow_but(ON_RANKS, ("ddp", "delayed"), ("fsdp checkpointed", "delayed")))
def test_two_ranks_train_like_one(world2: World, wrap: str, name: str) -> None:
    steps = 4
    losses, parameters, state = trained_on_one(name, steps)
    ranks = world2.run(_trained_on_ranks, wrap, name, steps)
    for (rank_losses, rank_parameters, rank_state), one in zip(ranks, losses, strict=True):
        assert rank_losses == pytest.approx(one, rel=1e-5)
        for mine, parameter in zip(rank_parameters, parameters, strict=True):
            np.testing.assert_allclose(mine, parameter.detach().numpy(), atol=2e-5)
        assert rank_state.keys() == state.keys()
        for key, value in state.items():
            np.testing.assert_allclose(rank_state[key], value, rtol=1e-3)
    for key, value in ranks[0][2].items():
        assert np.array_equal(value, ranks[1][2][key])


def _copies_held(reshard: bool) -> list[int]:
    """How many FP8 weights exist before, within and after a backward pass, in evaluation, and after the next step."""
    model = llama(fp8.CurrentScaling())
    for layer in model.model.layers:
        _shard(layer, reshard_after_forward=reshard)
    _shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    shapes = {(32, 32), (64, 32), (32, 64)}

    def weights() -> list[Tensor]:
        gc.collect()
        tensors = [x for x in gc.get_objects() if isinstance(x, Tensor) and x.dtype == torch.float8_e4m3fn]
        return [x for x in tensors if tuple(x.shape) in shapes]

    of_other_cases = weights()  # on these ranks, which live for the session; kept, so that none is freed meanwhile

    def held() -> int:
        return len(weights()) - len(of_other_cases)

    tokens, others = batches(2, b=5)  # 75 tokens, so that no activation has a weight's shape
    loss = in_fp8(model, tokens) + in_fp8(model, others)
    counts = [held()]
    loss.backward()
    counts.append(held())
    optimizer.step()
    with torch.no_grad():
        in_fp8(model, tokens)
    counts.append(held())
    return counts


@pytest.mark.slow
@pytest.mark.parametrize("reshard", [True, False])
def test_a_sharded_model_keeps_no_copies_of_what_fsdp_has_freed(world2: World, reshard: bool) -> None:
    weights, columns = 14, 2
    after_eval = 0 if reshard else weights  # FSDP keeps the weights then, and we their rows
    expected = [0 if reshard else weights * columns, 0, after_eval]
    assert world2.run(_copies_held, reshard) == [expected] * 2


def _converted_too_late() -> str:
    model = llama(None)
    _shard(model)
    with pytest.raises(ValueError, match="before fully_shard") as error:
        fp8.convert(model, fp8.CurrentScaling())
    return str(error.value)


def test_convert_comes_before_fully_shard(world2: World) -> None:
    assert "q_proj.weight is a DTensor" in world2.run(_converted_too_late)[0]


def test_llama_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2,
    )  # fmt: skip
    results = []
    for recompute in (False, True):
        torch.manual_seed(0)
        model = fp8.convert(transformers.LlamaForCausalLM(config), fp8.DelayedScaling())
        assert len(fp8_layers(model)) == 14
        if recompute:
            model.gradient_checkpointing_enable()
        model.train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        loss_of = lambda model, tokens: in_fp8(model, tokens, None, None, None, None, tokens).loss  # noqa: E731
        results.append(trained(model, optimizer, batches(8), loss_of))
    assert results[0] == results[1]
    assert results[0][-1] < 0.8 * results[0][0]


def mixtral() -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    return transformers.MixtralForCausalLM(config)


class ExpertsOneByOne(nn.Module):
    """Experts as `nn.Linear`s, each called with its tokens."""

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        ups, downs = experts.gate_up_proj.detach(), experts.down_proj.detach()
        self.act_fn, linears = experts.act_fn, []
        for weight in (*ups, *downs):
            linears.append(nn.Linear(weight.shape[1], weight.shape[0], bias=False))
            linears[-1].weight.data.copy_(weight)
        self.linears = nn.ModuleList(linears)

    def forward(self, x: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        for e in range(4):
            token, choice = (top_k_index == e).nonzero(as_tuple=True)
            gate, up = self.linears[e](x[token]).chunk(2, dim=-1)
            out = self.linears[4 + e](self.act_fn(gate) * up)
            y = y.index_add(0, token, out * top_k_weights[token, choice, None])
        return y


def _states(experts: Any) -> list[Any]:
    """The FP8 states of all experts' layers."""
    return [state for name in experts.names for state in experts.layers.layers[name].fp8_states]


@pytest.mark.parametrize("name", slow_but([name for name in RECIPES if name != "nvfp4"], "delayed"))
def test_mixtral_of_transformers(name: str) -> None:
    """Against each expert converted as a linear layer; sums over tokens are in another order.

    The noise of nvfp4 depends on the layers' names, which are others there.
    """
    results = []
    for twin in (False, True):
        model = mixtral()
        assert hasattr(model.model.layers[0].mlp.experts, "gate_up_proj")
        if twin:
            model.model.layers[0].mlp.experts = ExpertsOneByOne(model.model.layers[0].mlp.experts)
        fp8.convert(model, RECIPES[name])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        loss_of = lambda model, tokens: in_fp8(model, tokens, None, None, None, None, tokens).loss  # noqa: E731
        losses = trained(model.train(), optimizer, batches(4), loss_of)
        with torch.no_grad():
            losses.append(loss_of(model.eval(), batches(1)[0]).item())
        fp8.end_step(model)
        results.append((losses, sum(tensor.double().sum().item() for tensor in fp8.state_dict(model).values())))
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-4)
    assert results[0][1] == pytest.approx(results[1][1], rel=1e-2)
    expected = mixtral()
    converted = fp8.convert(mixtral(), RECIPES[name])
    tokens = batches(1)[0]
    assert torch.equal(converted(tokens).logits, expected(tokens).logits)
    in_fp8(converted, tokens)
    experts = converted.model.layers[0].mlp.experts
    copies = [state.weight_copies for linear in (experts.fp8_up, experts.fp8_down) for state in _states(linear)]
    assert any(made is not None and made.made is not None for made in copies)
    for weight in ("gate_up_proj", "down_proj"):
        setattr(experts, weight, getattr(experts, weight))  # as FSDP2 does when its memory comes or goes
    assert all(made is None or made.made is None for made in copies)


@pytest.mark.slow
@pytest.mark.parametrize("script", ["ddp", "fsdp2", "compile", "tensor_parallel"])
def test_examples_run_and_learn(script: str, tmp_path: Path) -> None:
    root = Path(__file__).resolve().parents[2]
    launcher = [] if script == "compile" else ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    result = subprocess.run(
        [sys.executable, *launcher, str(root / "examples" / f"{script}.py")],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    losses = [float(line.split()[-1]) for line in result.stdout.splitlines() if line.startswith("step")]
    assert len(losses) == 5
    assert losses[-1] < 0.25
    if script == "fsdp2":
        (restored,) = (line for line in result.stdout.splitlines() if line.startswith("restored"))
        assert float(restored.split()[-1]) < 0.3
    assert list(tmp_path.iterdir()) == [], "an example leaves something behind"
