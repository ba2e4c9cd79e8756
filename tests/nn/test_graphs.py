"""Replayed modules train what eager ones train, bit for bit.

On a CPU `TapeCapture` takes the place of CUDA graphs: it runs no Python again, and stays at the same addresses.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megafp8 import fp8, nn
from megafp8.fp8.standalone import layers_of
from megafp8.nn.graphs import Precision, graph
from tests.marks import slow_but
from tests.nn.compare import randomized
from tests.nn.tape import TapeCapture

Modules = Sequence[torch.nn.Module]
Edit = Callable[[int, Modules], None]
S, B, H, F = 8, 2, 32, 64
RECIPES: dict[str, fp8.Fp8Recipe | None] = {
    "none": None,
    "delayed": fp8.DelayedScaling(amax_history_len=3),
    "delayed interval": fp8.DelayedScaling(amax_history_len=3, interval=2),
    "current": fp8.CurrentScaling(),
    "rowwise": fp8.RowwiseScaling(),
    "blockwise": fp8.BlockwiseScaling(),
    "mxfp8": fp8.MXFP8Scaling(),
    "nvfp4": fp8.NVFP4Scaling(),
    "static": fp8.StaticScaling(calibration_steps=2),
    "bf16 wgrad": fp8.CurrentScaling(override_linear_precision=(False, False, True)),
    "bf16 fprop": fp8.DelayedScaling(override_linear_precision=(True, False, False)),
}


class Loop(NamedTuple):
    """A training of modules in a row: `micro` micro-batches a step, and an evaluation after each step.

    `kwargs(seed)`: of each micro-batch. `edit(step, modules)`: before each step. `autocast`: torch's, to bf16. `apart`:
    each module in an `fp8.autocast` of its own.
    """

    recipe: str = "delayed"
    steps: int = 5
    micro: int = 2
    first_microbatch: bool = False
    kwargs: Callable[[int], dict[str, Any]] = lambda seed: {}
    edit: Edit = lambda step, modules: None
    autocast: bool = False
    apart: bool = False
    shape: tuple[int, ...] = (S, B, H)
    dtype: torch.dtype = torch.float32
    device: str = "cpu"

    def batch(self, seed: int) -> Tensor:
        return torch.randn(*self.shape, generator=torch.Generator().manual_seed(seed)).to(self.device, self.dtype)

    @property
    def precision(self) -> Precision:
        return Precision.from_settings(self.recipe != "none", False, RECIPES[self.recipe], None)


def trained(modules: Modules, loop: Loop) -> dict[str, Tensor | None]:
    """What the training computes and leaves behind: outputs, gradients, scales and amaxes, random numbers' state."""
    torch.manual_seed(0)
    parameters = [p for module in modules for p in module.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=0.01)
    found: dict[str, Tensor | None] = {}

    def forward(x: Tensor, **given: Any) -> Tensor:
        values = torch.autocast(loop.device, torch.bfloat16, cache_enabled=False) if loop.autocast else nullcontext()
        with values:
            for together in [[module] for module in modules] if loop.apart else [modules]:
                with fp8.autocast(loop.precision.enabled, loop.precision.recipe):
                    for module in together:
                        y = module(x, **given)
                        x = y["y"] if isinstance(y, dict) else y
        return x

    for step in range(loop.steps):
        loop.edit(step, modules)
        for i in range(loop.micro):
            seed = 10 * step + i
            x = loop.batch(seed).requires_grad_()
            y = forward(x, **loop.kwargs(seed), **({"is_first_microbatch": i == 0} if loop.first_microbatch else {}))
            (0.1 * y.float() * loop.batch(100 + seed)).sum().backward()
            found |= {f"{step}.{i} y": y.detach(), f"{step}.{i} dx": x.grad}
        for n, p in enumerate(parameters):
            main_grad = getattr(p, "main_grad", None)
            if main_grad is not None and hasattr(p, "grad_added_to_main_grad"):
                assert p.grad_added_to_main_grad
                p.grad_added_to_main_grad = False
                p.grad = main_grad.clone()
            found[f"{step} {n} {list(p.shape)}"] = None if p.grad is None else p.grad.clone()
        optimizer.step()
        optimizer.zero_grad()
        for module in modules:
            module.eval()
        with torch.no_grad():
            found[f"{step} evaluation"] = forward(loop.batch(1000), **loop.kwargs(1000))
        for module in modules:
            module.train()
    states = {name: x for module in modules for layers in layers_of(module) for name, x in layers._state().items()}
    found |= {name: x.clone() for name, x in states.items()}
    found["random"] = torch.cuda.get_rng_state() if loop.device == "cuda" else torch.get_rng_state()
    return found


def graphed(modules: Modules, loop: Loop, **options: Any) -> list[int]:
    """Give `modules` graphs, recorded after one pass; how often each is replayed, as they come to be."""
    replays: list[int] = []
    several, sample = len(modules), loop.kwargs(0) | ({"is_first_microbatch": True} if loop.first_microbatch else {})
    graph(
        modules, [(loop.batch(0).requires_grad_(),)] * several, [sample] * several, [loop.precision] * several, 1,
        new_capture=lambda: TapeCapture(replays), **options,
    )  # fmt: skip
    return replays


def assert_same(found: dict[str, Tensor | None], expected: dict[str, Tensor | None]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        other = found[name]
        same = other is None if value is None else other is not None and torch.equal(other, value)
        assert same, f"{name}: {other} instead of {value}"


def assert_replayed_as_eager(make: Callable[[], Modules], loop: Loop, **options: Any) -> list[int]:
    """`make` gives equal modules at each call."""
    eager, modules = trained(make(), loop), make()
    replays = graphed(modules, loop, **options)
    assert_same(trained(modules, loop), eager)
    assert replays
    return replays


# --- models ----------------------------------------------------------------------------------------------------------


class Stock(torch.nn.Module):
    """A model of torch's own layers, three of which take the same input."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (torch.nn.Linear(H, H) for _ in range(3))
        self.out = torch.nn.Linear(H, H, bias=False)
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: Tensor, *, scale: Tensor | None = None) -> dict[str, Tensor]:
        self.steps += 1
        y = self.out(torch.tanh(self.q(x)) * self.k(x) + self.v(x))
        return {"y": y if scale is None else y * scale, "steps": self.steps}


def mlp(**options: Any) -> torch.nn.Module:
    return randomized(nn.LayerNormMLP(H, F, device="cpu", **options))


def block(**options: Any) -> torch.nn.Module:
    return randomized(
        nn.TransformerLayer(H, F, 4, **{"hidden_dropout": 0.0, "attention_dropout": 0.0, "device": "cpu", **options})
    )


def made(model: str, recipe: str) -> Modules:
    """Two modules; converted ones share their FP8 state."""
    if model != "converted":
        return [{"mlp": mlp, "block": block}[model]() for _ in range(2)]
    both = randomized(torch.nn.Sequential(Stock(), Stock()))
    fp8.convert(both, RECIPES[recipe] or fp8.CurrentScaling(), skip=())
    return list(both)


CASES = [(model, recipe) for model in ("mlp", "block", "converted") for recipe in RECIPES]
QUICK = [("block", "delayed")]


@pytest.mark.parametrize(("model", "recipe"), slow_but(CASES, *QUICK))
def test_replayed_training_is_the_eager_one(model: str, recipe: str) -> None:
    assert_replayed_as_eager(lambda: made(model, recipe), Loop(recipe))


def test_how_often_each_graph_is_replayed() -> None:
    """Of two modules: weights, forward of both in turn, then backward in reverse.

    The first step has no scales, the second's first micro-batch is eager, and each step quantizes weights once.
    """
    assert assert_replayed_as_eager(lambda: made("mlp", "delayed"), Loop()) == [4, 7, 4, 7, 7, 7]
    assert assert_replayed_as_eager(lambda: [mlp()], Loop("none")) == [9, 9]


def scaled(seed: int) -> dict[str, Any]:
    return {"scale": torch.full((1,), 1.0 + seed)}


def with_main_grads(module: torch.nn.Module) -> torch.nn.Module:
    for parameter in module.parameters():
        if parameter.dim() > 1:
            parameter.main_grad = torch.zeros_like(parameter)  # type: ignore[attr-defined]
            parameter.grad_added_to_main_grad = False  # type: ignore[attr-defined]
    return module


def frozen(module: torch.nn.Module) -> torch.nn.Module:
    for name, parameter in module.named_parameters():
        parameter.requires_grad_("fc1" not in name)
    return module


def in_own_memory(module: torch.nn.Module) -> torch.nn.Module:
    for parameter in module.parameters():
        parameter.data = parameter.data.clone()
    return module


VARIANTS: dict[str, tuple[Callable[[], torch.nn.Module], Loop]] = {
    "keywords": (lambda: made("converted", "delayed")[0], Loop(kwargs=scaled)),
    "constant": (block, Loop("current", kwargs=lambda _: {"checkpoint_core_attention": True})),
    "dropout": (lambda: block(hidden_dropout=0.1, drop_path_rate=0.3), Loop()),
    "recomputed": (lambda: mlp(checkpoint=True), Loop()),
    "main_grad": (
        lambda: with_main_grads(block(fuse_wgrad_accumulation=True, fuse_qkv_params=True)),
        Loop(first_microbatch=True),
    ),
    "first micro-batch": (mlp, Loop("current", first_microbatch=True)),
    "frozen": (lambda: frozen(mlp()), Loop()),
    "joined of several memories": (lambda: in_own_memory(block()), Loop()),
    "torch.autocast": (mlp, Loop(autocast=True)),
    "one step": (mlp, Loop(steps=3, micro=4)),
}


@pytest.mark.parametrize("variant", slow_but(VARIANTS, "dropout", "main_grad", "recomputed"))
def test_replayed_variants(variant: str) -> None:
    make, loop = VARIANTS[variant]
    assert_replayed_as_eager(lambda: [make()], loop)


def _unfreeze(step: int, modules: Modules) -> None:
    for module in modules:
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(step >= 3 or "fc1" not in name)


def _move(step: int, modules: Modules) -> None:
    if step == 3:
        for module in modules:
            in_own_memory(module)


def _forget_scales(step: int, modules: Modules) -> None:
    if step == 3:
        for layers in (layers for module in modules for layers in layers_of(module)):
            state = layers._state()
            fresh = {name: torch.ones_like(x) if x.dim() == 0 else torch.zeros_like(x) for name, x in state.items()}
            layers.load_state_dict(fresh)


def _change_weights(step: int, modules: Modules) -> None:
    with torch.no_grad():
        for parameter in modules[0].parameters():
            parameter.mul_(1.5)


def _part_in_evaluation(step: int, modules: Modules) -> None:
    modules[0].layernorm_mlp.train(step < 3)  # type: ignore[union-attr,operator]


EDITS: dict[str, tuple[Callable[[], torch.nn.Module], Edit, int]] = {
    "parameters unfrozen": (mlp, _unfreeze, 6),  # graphs in all, three each time
    "memory replaced": (mlp, _move, 6),
    "scales forgotten": (mlp, _forget_scales, 3),
    "weights changed": (mlp, _change_weights, 3),
    "part in evaluation": (
        lambda: block(hidden_dropout=0.5),
        _part_in_evaluation,
        9,
    ),  # its first step is its last recorded one
}


@pytest.mark.parametrize("edit", slow_but(EDITS, "scales forgotten"))
def test_what_changes_between_steps(edit: str) -> None:
    """What graphs depend on has them recorded again."""
    make, change, graphs = EDITS[edit]
    assert len(assert_replayed_as_eager(lambda: [make()], Loop(steps=7, edit=change))) == graphs


@pytest.mark.slow
def test_each_module_in_an_autocast_of_its_own() -> None:
    assert_replayed_as_eager(lambda: made("mlp", "delayed"), Loop(apart=True))
    assert_replayed_as_eager(lambda: made("mlp", "current"), Loop("current", micro=1, apart=True))


def _written_unseen(module: Any) -> bool:
    module.fc1_weight.data.mul_(1.5)
    return True  # what is_first_microbatch is to be


def _released_and_written(module: Any) -> bool:
    module.fc1_weight = module.fc1_weight
    with torch.no_grad():
        module.fc1_weight.mul_(1.5)
    return False


@pytest.mark.parametrize("write", [_written_unseen, _released_and_written])
def test_weights_that_change_within_a_step(write: Callable[[Any], bool]) -> None:
    eager, module, loop = mlp(), mlp(), Loop("current", first_microbatch=True)
    graphed([module], loop)
    for seed in range(4):
        results = []
        for each in (eager, module):
            is_first = seed > 1 and write(each)
            x = loop.batch(seed).requires_grad_()
            with fp8.autocast(recipe=RECIPES["current"]):
                y = each(x, is_first_microbatch=is_first)
            y.sum().backward()
            results.append((y, x.grad))
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_results_may_be_kept() -> None:
    """The next replay does not overwrite them; nor gradients, which add up."""
    module = mlp()
    graphed([module], Loop("none"))
    results: list[Tensor] = []
    for seed in range(5):
        x = Loop().batch(seed).requires_grad_()
        y = module(x)
        results += [y, *torch.autograd.grad(y.sum(), [x, *module.parameters()])]
    kept = [result.detach().clone() for result in results]
    module(x).sum().backward()
    assert all(torch.equal(result, before) for result, before in zip(results, kept, strict=True))


# --- errors ----------------------------------------------------------------------------------------------------------


def replayed(*modules: torch.nn.Module) -> Callable[[int], Tensor]:
    """Replayed forwards of modules in a row, of other inputs."""
    graphed(modules, Loop("none"))

    def forward(seed: int) -> Tensor:
        y = Loop().batch(seed).requires_grad_()
        for module in modules:
            y = module(y)
        return y

    for seed in range(2):
        forward(seed).sum().backward()
    return forward


OVERWRITTEN = "backward needs activations that a later pass has overwritten; CUDA graphs run in the order"


def test_a_second_forward_before_the_first_ones_backward() -> None:
    forward = replayed(mlp())
    y, z = forward(2), forward(3)
    with pytest.raises(ValueError, match=OVERWRITTEN):
        y.sum().backward()
    z.sum().backward(retain_graph=True)
    with pytest.raises(ValueError, match=OVERWRITTEN):
        z.sum().backward()


def test_modules_out_of_order() -> None:
    first, second = mlp(), mlp()
    replayed(first, second)
    x, y = (Loop().batch(seed).requires_grad_() for seed in range(2))
    later = second(y)
    earlier = first(x)
    with pytest.raises(ValueError, match=r"modules\[1\] \(LayerNormMLP\): " + OVERWRITTEN):
        later.sum().backward()
    later = second(y)
    earlier.sum().backward()
    with pytest.raises(ValueError, match=r"modules\[1\] \(LayerNormMLP\): " + OVERWRITTEN):
        later.sum().backward()


def test_calls_that_differ_from_the_sample() -> None:
    module, loop = mlp(), Loop("current")
    graphed([module], loop)
    x = loop.batch(0).requires_grad_()
    with fp8.autocast(recipe=RECIPES["current"]):
        with pytest.raises(ValueError, match=r"float32 \[4, 2, 32\] on cpu with a gradient, but in the sample it is"):
            module(x[:4])
        with pytest.raises(ValueError, match=r"is float32 \[8, 2, 32\] on cpu, but in the sample it is"):
            module(x.detach())
        with pytest.raises(ValueError, match="takes the arguments of its sample"):
            module(x, scale=1)
        with (
            torch.autocast("cpu"),
            pytest.raises(ValueError, match=r"in torch.autocast with a cache, .* cache_enabled=False"),
        ):
            module(x)
        with pytest.raises(ValueError, match="recomputed in backward"):
            checkpoint(module, x, use_reentrant=False).sum().backward()
    with pytest.raises(
        ValueError, match=r"outside fp8\.autocast, but make_graphed_callables was told .* enabled, with"
    ):
        module(x)
    with fp8.autocast(), pytest.raises(ValueError, match="own recipe and all ranks, but make"):
        module(x)
    with pytest.raises(ValueError, match="cannot be copied or pickled after make_graphed_callables"):
        copy.deepcopy(module)


def test_constants_are_those_of_the_sample() -> None:
    module, loop = block(), Loop("none", kwargs=lambda seed: {"self_attn_mask_type": "no_mask"})
    graphed([module], loop)
    with pytest.raises(ValueError, match="an argument is 'causal', but in the sample it is 'no_mask'"):
        module(loop.batch(0).requires_grad_(), self_attn_mask_type="causal")


class Odd(torch.nn.Module):
    """A module that graphs cannot hold, for `reason`."""

    def __init__(self, reason: str) -> None:
        super().__init__()
        self.reason, self.linear, self.other = reason, torch.nn.Linear(H, H), torch.nn.Linear(H, H)
        randomized(self)

    def forward(self, x: Tensor) -> Any:
        y = self.linear(x)
        return (y, 1.0) if self.reason == "number" else y * y.sum().item() if self.reason == "waits" else y


@pytest.mark.parametrize(
    ("reason", "error", "message"),
    [("number", ValueError, r"returns 1\.0; it must return tensors only"),
     ("waits", RuntimeError, r"of .*\(Odd\) failed \(_local_scalar_dense: .*leave it out of make_graphed_callables"),
     ("unused", ValueError, r"float32 \[32, 32\] on cpu, an argument or a parameter, has no effect on the outputs")],
)  # fmt: skip
def test_what_cannot_be_recorded(reason: str, error: type[Exception], message: str) -> None:
    module, loop = Odd(reason), Loop("none", steps=2)
    graphed([module], loop)

    def run(seed: int) -> None:
        y = module(loop.batch(seed).requires_grad_())
        (y[0] if isinstance(y, tuple) else y).sum().backward()

    run(0)
    with pytest.raises(error, match=message):
        run(1)


def test_unused_parameters() -> None:
    assert_replayed_as_eager(lambda: [Odd("unused")], Loop("none"), allow_unused_input=True)


def test_calibration_and_what_needs_no_gradient_are_eager() -> None:
    module, other, loop = mlp(), mlp(), Loop()
    for parameter in other.parameters():
        parameter.requires_grad_(False)
    calibrating = Precision.from_settings(False, True, None, None)
    samples, replays = [(loop.batch(0),), (loop.batch(0).requires_grad_(),)], list[int]()
    graph([module, other], samples, [{}] * 2, [calibrating] * 2, 1, new_capture=lambda: TapeCapture(replays))
    for seed in range(4):
        with fp8.autocast(enabled=False, calibrating=True):
            other(module(loop.batch(seed))).sum().backward()
    assert not replays


def _hooked() -> torch.nn.Module:
    module = block()
    module.layernorm_mlp.register_forward_hook(lambda *_: None)  # type: ignore[union-attr,operator]
    return module


def _fp8_only() -> torch.nn.Module:
    with fp8.model_init(recipe=fp8.CurrentScaling()):
        return nn.Linear(H, H, device="cpu")


def _twice() -> torch.nn.Module:
    module = mlp()
    graphed([module], Loop())
    return module


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [(mlp, {"pool": (0, 1)}, "make_graphed_callables: pool is .* does not offer: graphs of other calls would"),
     (mlp, {"_order": [1, -1]}, "_order is .* one micro-batch at a time"),
     (mlp, {"recipe": fp8.CurrentScaling(), "fp8_recipe": fp8.CurrentScaling()}, "recipe is given under its older"),
     (mlp, {"num_warmup_iters": 0}, "num_warmup_iters is 0"),
     (mlp, {"enabled": (True, False)}, "1 sample_args, 1 sample_kwargs and 2 values of enabled"),
     (mlp, {"sample_args": ()}, "at least one argument must be a tensor"),
     (mlp, {}, r"the module \(LayerNormMLP\) is on cpu, and CUDA graphs need a GPU"),
     (_hooked, {}, "has hooks of layernorm_mlp, which a replay does not run"),
     (_twice, {}, "has graphs already"),
     (_fp8_only, {}, "has weight, a Fp8Weight, and graphs hold plain parameters only"),
     (lambda: nn.GroupedLinear(2, H, H, device="cpu"), {}, "has layers of experts"),
     (lambda: nn.Linear(H, H, parallel_mode="column", tp_size=2, device="cpu"), {}, "is sharded over 2 ranks"),
     (lambda: torch.tanh, {}, "is not an nn.Module")],
)  # fmt: skip
def test_what_is_refused_at_once(make: Callable[[], Any], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        nn.make_graphed_callables(make(), **{"sample_args": (Loop().batch(0),), **options})


# --- with CUDA -------------------------------------------------------------------------------------------------------

LARGER = {"params_dtype": torch.bfloat16, "device": "cuda", "normalization": "RMSNorm", "activation": "swiglu"}
ON_GPU = Loop(shape=(128, 2, 256), dtype=torch.bfloat16, device="cuda", steps=6)


def _blocks(**options: Any) -> Modules:
    dropout = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
    return [randomized(nn.TransformerLayer(256, 512, 4, **{**LARGER, **dropout, **options})) for _ in range(3)]


def _stock_on_gpu() -> Modules:
    first = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.GELU(), torch.nn.Linear(512, 256))
    model = randomized(torch.nn.Sequential(first, torch.nn.Linear(256, 256)).to("cuda", torch.bfloat16))
    fp8.convert(model, fp8.DelayedScaling(), skip=())
    return list(model)


ON_GPUS: dict[str, tuple[Callable[[], Modules], Loop]] = {
    **{recipe: (_blocks, ON_GPU._replace(recipe=recipe)) for recipe in RECIPES},
    "dropout": (lambda: _blocks(hidden_dropout=0.1, attention_dropout=0.1), ON_GPU),
    "recomputed": (lambda: [randomized(nn.LayerNormMLP(256, 512, checkpoint=True, **LARGER))], ON_GPU),
    "main_grad": (
        lambda: [with_main_grads(each) for each in _blocks(fuse_wgrad_accumulation=True, fuse_qkv_params=True)],
        ON_GPU._replace(first_microbatch=True),
    ),
    "joined of several memories": (lambda: [in_own_memory(each) for each in _blocks()], ON_GPU),
    "converted": (_stock_on_gpu, ON_GPU),
}


def _distance(found: dict[str, Tensor | None], expected: dict[str, Tensor | None]) -> float:
    """The largest difference, relative to the largest number of each tensor."""
    assert found.keys() == expected.keys()
    pairs = [(found[name], value) for name, value in expected.items() if value is not None]
    return max(float((a.double() - b.double()).abs().max() / b.double().abs().max().clamp(min=1e-30)) for a, b in pairs)


@pytest.mark.gpu
@pytest.mark.parametrize("case", ON_GPUS)
def test_a_gpu_replays_what_it_would_run(case: str) -> None:
    """To the bit where two eager trainings are the same, as backward passes of attention may not be."""
    make, loop = ON_GPUS[case]
    eager, again, modules = trained(make(), loop), trained(make(), loop), make()
    x, kwargs = loop.batch(0).requires_grad_(), {"is_first_microbatch": True} if loop.first_microbatch else {}
    several = tuple(modules)
    assert nn.make_graphed_callables(
        several, ((x,),) * len(several), num_warmup_iters=1, sample_kwargs=(kwargs,) * len(several),
        enabled=loop.precision.enabled, recipe=loop.precision.recipe,
    ) is several  # fmt: skip
    found = trained(modules, loop)
    assert all(module.forward.together._replays for module in several), "nothing was recorded"  # type: ignore[union-attr]
    noise, distance = _distance(again, eager), _distance(found, eager)
    assert distance <= 3 * noise


def _times_of_a_step(kind: str, recipe: fp8.DelayedScaling) -> tuple[float, float]:
    """Return the host's seconds and all seconds of 20 steps of three small layers, eager or graphed."""
    modules = tuple(_blocks())
    x = ON_GPU.batch(0).requires_grad_()
    if kind == "graphed":
        nn.make_graphed_callables(modules, ((x,),) * len(modules), enabled=True, recipe=recipe)
    optimizer = torch.optim.AdamW([p for module in modules for p in module.parameters()], fused=True)
    for step in range(30):
        if step == 10:
            torch.cuda.synchronize()
            start = time.perf_counter()
        y = x
        with fp8.autocast(recipe=recipe):
            for module in modules:
                y = module(y)
        y.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    issued = time.perf_counter() - start
    torch.cuda.synchronize()
    return issued, time.perf_counter() - start


@pytest.mark.gpu
def test_the_hosts_time_of_a_step(capsys: pytest.CaptureFixture[str]) -> None:
    """Compares the best of five times each, as other processes on the GPU or its host make some of them long."""
    recipe, times = fp8.DelayedScaling(), {}
    for kind in ("eager", "graphed"):
        times[kind] = tuple(map(min, zip(*(_times_of_a_step(kind, recipe) for _ in range(5)))))
    with capsys.disabled():
        for kind, (issued, done) in times.items():
            print(
                f"\n{kind}: {50 * issued:.2f} ms of the host, {50 * done:.2f} ms in all, a step of three small layers"
            )
    assert times["graphed"][0] < times["eager"][0]
