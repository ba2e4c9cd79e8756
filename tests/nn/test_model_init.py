"""Modules whose weights exist in FP8 only, against the same modules with high-precision weights.

Shapes: x `[s, b, h]`.
"""

from __future__ import annotations

import copy
import gc
import io
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, distributed
from torch.distributed.fsdp import fully_shard
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel

from megafp8 import fp8, nn
from megafp8.fp8 import E4M3, Fp8Weight
from megafp8.fp8.standalone import linears_of
from megafp8.gemm.cublaslt_problem import is_arranged
from megafp8.gemm.dispatch import Fp8Gemm
from megafp8.nn.base import default_device
from megafp8.numerics.tensor import TENSOR
from tests.fp8.reference import bytes_of, decode, encode, scale_of
from tests.marks import slow_but
from tests.nn.compare import CPU64, TIGHT, random, randomized
from tests.world import World

S, B, H, F = 8, 2, 64, 128
CPU: dict[str, Any] = {"device": "cpu"}
DELAYED, CURRENT, BLOCKWISE = fp8.DelayedScaling(amax_history_len=2), fp8.CurrentScaling(), fp8.BlockwiseScaling()


def layer(seed: int = 1, **options: Any) -> nn.TransformerLayer:
    torch.manual_seed(seed)
    dropout = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
    return nn.TransformerLayer(H, F, 4, fuse_qkv_params=True, **{**CPU, **dropout, **options})


def batch(seed: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    return torch.randn(S, B, H, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def masters_of(module: torch.nn.Module) -> list[Tensor]:
    """The fp32 weights of an optimizer."""
    made = []
    for p in module.parameters():
        preserved = hasattr(p, "get_high_precision_init_val")
        values = p.get_high_precision_init_val() if preserved else p.detach()
        made.append(values.to(p.device, torch.float32, copy=True))
        if preserved:
            p.clear_high_precision_init_val()
            assert p.get_high_precision_init_val() is None
    return made


def train(module: torch.nn.Module, recipe: fp8.Fp8Recipe | None, steps: int = 3) -> list[Tensor]:
    """Outputs and gradients of steps with two micro-batches and fp32 masters."""
    parameters, masters, results = list(module.parameters()), masters_of(module), []
    optimizer = torch.optim.AdamW(masters, lr=1e-2)
    for step in range(steps):
        for i in range(2):
            x = batch(2 * step + i, parameters[0].dtype, parameters[0].device.type).requires_grad_()
            with fp8.autocast(recipe=recipe):
                y = module(x)
            y.float().pow(2).mean().backward()
            results += [y.detach(), x.grad]
        results += [p.grad for p in parameters]
        for p, master in zip(parameters, masters, strict=True):
            master.grad = p.grad.float()
        optimizer.step()
        with torch.no_grad():
            for p, master in zip(parameters, masters, strict=True):
                p.copy_(master)
        module.zero_grad()
    return results


def assert_trains_the_same(dtype: torch.dtype, recipe: fp8.Fp8Recipe, weight: fp8.Fp8Recipe, **options: Any) -> None:
    """As with weights of `dtype` that the recipe `weight` casts in each step, bit for bit."""
    with fp8.model_init(recipe=recipe, preserve_high_precision_init_val=True):
        module = layer(params_dtype=dtype, **options)
    assert sum(type(p) is Fp8Weight for p in module.parameters()) == 4
    rule = fp8.Rule(layers="*", input=recipe, weight=weight, grad_output=recipe)
    reference = fp8.CustomScaling(rules=(rule,), use_fast_accum=recipe.use_fast_accum)
    expected = train(layer(params_dtype=dtype, **options), reference)
    for i, (mine, other) in enumerate(zip(train(module, None), expected, strict=True)):
        assert torch.equal(mine, other), f"{i} {list(mine.shape)}: {(mine - other).abs().max()}"


@pytest.mark.parametrize(
    ("recipe", "weight", "dtype"),
    slow_but(
        [
            (*recipes, dtype)
            for recipes in ((DELAYED, CURRENT), (CURRENT, CURRENT), (BLOCKWISE, BLOCKWISE))
            for dtype in (torch.float32, torch.bfloat16)
        ],
        (DELAYED, CURRENT, torch.float32),
        (CURRENT, CURRENT, torch.bfloat16),
        (BLOCKWISE, BLOCKWISE, torch.bfloat16),
    ),
    ids=lambda x: getattr(x, "name", str(x)),
)
def test_training_with_masters_is_that_of_high_precision_weights(
    recipe: fp8.Fp8Recipe, weight: fp8.Fp8Recipe, dtype: torch.dtype
) -> None:
    assert_trains_the_same(dtype, recipe, weight, activation="swiglu", normalization="RMSNorm")


def test_products_against_float64() -> None:
    """Output and gradients of a linear layer, from the stored bytes."""
    with fp8.model_init(recipe=CURRENT):
        module = randomized(nn.Linear(32, 48, bias=False, **CPU64))

    def values(x: Tensor, fmt: fp8.Format) -> Tensor:
        scale = torch.tensor(scale_of(float(x.detach().abs().max()), fmt.max), dtype=torch.float32)
        data = encode((x.float() * scale).detach().numpy(), fmt)
        decoded = torch.tensor([decode(int(code), fmt) for code in data.ravel()], dtype=torch.float64)
        return decoded.view(x.shape) * scale.reciprocal().double()

    x, dy = random(16, 32).requires_grad_(), random(16, 48, seed=1)
    with fp8.autocast():
        y = module(x)
    y.backward(dy)
    data = bytes_of(module.weight.fp8_data)
    w = torch.tensor([decode(int(byte), E4M3) for byte in data.ravel()], dtype=torch.float64).view(48, 32)
    w = w * module.weight.scale_inv.double()
    torch.testing.assert_close(y, values(x, E4M3) @ w.t(), **TIGHT)
    torch.testing.assert_close(x.grad, values(dy, fp8.E5M2) @ w, **TIGHT)
    torch.testing.assert_close(module.weight.grad, values(dy, fp8.E5M2).t() @ values(x, E4M3), **TIGHT)


@pytest.mark.parametrize("recipe", slow_but([DELAYED, BLOCKWISE], DELAYED), ids=lambda x: x.name)
def test_a_weight_takes_a_byte_per_element_and_is_never_cast_again(
    recipe: fp8.Fp8Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    with fp8.model_init(recipe=recipe):
        module = nn.LayerNormMLP(256, 384, bias=False, **CPU)
    gemm_weights = {"fc1_weight": (384, 256), "fc2_weight": (256, 384)}
    for name, (n, k) in gemm_weights.items():
        w = module.get_parameter(name)
        scales = 1 if w.scaled.granularity is TENSOR else 6
        assert (w.fp8_data.nbytes, w.scale_inv.nbytes) == (n * k, 4 * scales)
        assert w.fp8_data.untyped_storage().nbytes() == n * k
    data = [module.get_parameter(name).fp8_data for name in gemm_weights]
    operands: list[Any] = []
    gemm = Fp8Gemm.tn

    def spy(self: Any, a: Any, b: Any, *args: Any, **options: Any) -> Tensor:
        operands.append(b.data)
        return gemm(self, a, b, *args, **options)

    monkeypatch.setattr(Fp8Gemm, "tn", spy)
    with fp8.autocast():
        y = module(torch.randn(64, 256))
    assert all(used is stored for used, stored in zip(operands, data, strict=True))

    def of_a_weights_size() -> list[torch.dtype]:
        gc.collect()
        found = [x for x in gc.get_objects() if issubclass(type(x), Tensor) and x.numel() == 384 * 256]
        return sorted({x.dtype for x in found if not isinstance(x, Fp8Weight)}, key=str)

    assert of_a_weights_size() == [torch.float8_e4m3fn]  # with the graph alive
    y.sum().backward()
    assert module.fc1_weight.grad.dtype == torch.float32
    module.zero_grad()
    operands.clear()
    del y
    assert of_a_weights_size() == [torch.float8_e4m3fn]


def test_initial_values() -> None:
    high = layer()
    with fp8.model_init(recipe=CURRENT, preserve_high_precision_init_val=True):
        module = layer()
    with fp8.model_init(), fp8.model_init(enabled=False):
        assert not any(type(p) is Fp8Weight for p in layer().parameters())
    for (name, p), expected in zip(module.named_parameters(), high.parameters(), strict=True):
        assert type(p) is (Fp8Weight if p.dim() == 2 else Parameter), name
        assert isinstance(p, Parameter)
        if isinstance(p, Fp8Weight):
            assert torch.equal(p.get_high_precision_init_val(), expected)
            assert (p - expected).abs().max() <= expected.abs().max() / 16
        else:
            assert torch.equal(p, expected)


def test_meta_device_and_reset() -> None:
    with fp8.model_init():
        module: Any = nn.Linear(32, 64, device="meta", parallel_mode="column", tp_size=2)
    assert module.weight.is_meta
    device = default_device()
    torch.manual_seed(0)
    module.reset_parameters()
    torch.manual_seed(0)
    expected = torch.empty(32, 32, device=device).normal_(std=0.023)
    w = module.weight
    assert type(w) is Fp8Weight
    assert isinstance(w, Parameter)
    assert w.device == device
    assert (w - expected).abs().max() <= expected.abs().max() / 16
    assert (w.tensor_model_parallel, w.partition_dim) == (True, 0)
    module.reset_parameters()
    assert module.weight is w
    assert (w - expected).abs().max() > expected.abs().max() / 16
    with fp8.model_init():
        module = nn.Linear(32, 64, device="meta")
    module.to_empty(device="cpu")
    module.reset_parameters()
    assert type(module.weight) is Fp8Weight
    assert 0.02 < module.weight.std() < 0.026


def test_outside_autocast_and_with_gemms_in_high_precision() -> None:
    """The dequantized weights, bit for bit."""
    with fp8.model_init():
        module = layer(params_dtype=torch.bfloat16)
    high = layer(params_dtype=torch.bfloat16)
    assert not high.load_state_dict(module.state_dict(), strict=True).missing_keys  # it dequantizes
    no_weight_gemm = fp8.CurrentScaling(override_linear_precision=(True, True, False))
    for recipe in (None, no_weight_gemm):
        results: list[list[Tensor]] = []
        with torch.inference_mode(), fp8.autocast(enabled=recipe is not None, recipe=recipe):
            assert torch.equal(module(batch(0, torch.bfloat16)), high(batch(0, torch.bfloat16)))
        for each in (module, high):
            x = batch(0, torch.bfloat16).requires_grad_()
            with fp8.autocast(enabled=recipe is not None, recipe=recipe):
                y = each(x)
            y.float().pow(2).sum().backward()
            results.append([y, x.grad, *(p.grad for p in each.parameters())])
            each.zero_grad()
        assert all(map(torch.equal, *results))


def test_state_dict_and_copies() -> None:
    with fp8.model_init(recipe=DELAYED):
        module, other = layer(1, params_dtype=torch.bfloat16), layer(2, params_dtype=torch.bfloat16)
    x = batch(0, torch.bfloat16)
    train(module, None, steps=1)
    fp8.end_step(module)

    def output(of: Any) -> Tensor:
        with torch.no_grad(), fp8.autocast():
            return of.eval()(x)

    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))
    whole = io.BytesIO()
    torch.save(module, whole)
    whole.seek(0)
    expected = output(module)
    for each in (other, copy.deepcopy(module), torch.load(whole, weights_only=False)):
        assert torch.equal(output(each), expected)
        weight = each.self_attention.proj.weight
        assert isinstance(weight, Fp8Weight)
        assert isinstance(weight, Parameter)
    high = layer(3, params_dtype=torch.bfloat16)
    module.load_state_dict({k: v for k, v in high.state_dict().items() if not k.endswith("_extra_state")}, strict=False)
    for (name, p), values in zip(module.named_parameters(), high.parameters(), strict=True):
        error = (p.float() - values.float()).abs().max()
        assert error <= (values.abs().max() / 16 if isinstance(p, Fp8Weight) else 0), name


def test_conversion_keeps_the_weights_in_fp8() -> None:
    with fp8.model_init():
        module = layer()
    weight, bytes_before = module.self_attention.proj.weight, module.self_attention.proj.weight.fp8_data.clone()
    y = module(batch(0))
    module.to(torch.bfloat16)
    assert module.self_attention.proj.weight is weight
    assert (weight.dtype, weight.detach().dtype) == (torch.bfloat16, torch.bfloat16)
    assert torch.equal(weight.fp8_data.view(torch.uint8), bytes_before.view(torch.uint8))
    with fp8.autocast():
        converted = module(batch(0, torch.bfloat16))
    assert converted.dtype == torch.bfloat16
    torch.testing.assert_close(converted.float(), y, rtol=0.1, atol=0.3)
    assert module.to("meta").self_attention.proj.weight.fp8_data.is_meta


def test_plain_optimizers_learn_and_lose_small_updates() -> None:
    with fp8.model_init():
        module = nn.LayerNormMLP(H, F, **CPU)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    losses = []
    for _ in range(20):
        with fp8.autocast():
            loss = (module(batch(0)) - batch(1)).pow(2).mean()
        losses.append(float(loss.detach()))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < 0.5 * losses[0]
    before = module.fc1_weight.fp8_data.view(torch.uint8).clone()
    torch.optim.SGD([module.fc1_weight], lr=1e-8).step()
    assert torch.equal(module.fc1_weight.fp8_data.view(torch.uint8), before)


def test_main_grad_and_an_older_graph() -> None:
    """wgrad goes to main_grad; a weight that is written to after forward is in backward what it was."""
    with fp8.model_init(recipe=CURRENT):
        module: Any = nn.Linear(32, 48, bias=False, fuse_wgrad_accumulation=True, **CPU)
    grads = []
    for write in (False, True):
        module.weight.main_grad = torch.zeros(48, 32)
        x = torch.randn(16, 32, generator=torch.Generator().manual_seed(0)).requires_grad_()
        with fp8.autocast():
            y = module(x)
        if write:
            with torch.no_grad():
                module.weight.zero_()
        y.pow(2).sum().backward()
        grads.append([x.grad, module.weight.main_grad])
        assert module.weight.grad is None
    assert all(map(torch.equal, *grads))
    assert grads[0][0].count_nonzero() > 0


def test_errors() -> None:
    cases: list[tuple[Any, str]] = [
        (partial(nn.TransformerLayer, H, F, 4), "query_weight, key_weight, value_weight are one weight"),
        (partial(nn.GroupedLinear, 2, 16, 16), "GroupedLinear: it cannot be constructed within fp8.model_init"),
        (partial(nn.Linear, 24, 16), r"Linear: weight is \[16, 24\] on a rank, and FP8 needs multiples of 16"),
    ]
    for make, message in cases:
        with fp8.model_init(), pytest.raises(ValueError, match=message):
            make(**CPU)
    with (
        fp8.model_init(recipe=fp8.MXFP8Scaling()),
        pytest.raises(ValueError, match="mxfp8 scaling casts a weight"),
    ):
        nn.Linear(32, 32, **CPU)
    wrong: Any = "delayed"
    with pytest.raises(ValueError, match="recipe is 'delayed'"), fp8.model_init(recipe=wrong):
        pass
    with fp8.model_init(recipe=BLOCKWISE):
        module = nn.Linear(32, 32, **CPU)
    message = "stored in FP8 with one scale per 128x128, but current scaling needs one"
    with pytest.raises(ValueError, match=message), fp8.autocast(recipe=CURRENT):
        module(torch.randn(16, 32))


def _data_parallel() -> None:
    """DDP gives all ranks the first one's weights, and they stay alike; FSDP2 is refused."""
    rank = distributed.get_rank()
    with fp8.model_init():
        module = layer(seed=rank)
    first = module.layernorm_mlp.fc1_weight.dequantize()
    distributed.broadcast(first, 0)
    model = DistributedDataParallel(module)
    assert isinstance(module.layernorm_mlp.fc1_weight, Fp8Weight)
    torch.testing.assert_close(module.layernorm_mlp.fc1_weight.dequantize(), first, rtol=1e-6, atol=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(2):
        with fp8.autocast():
            model(batch(2 * step + rank)).pow(2).mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    for p in module.parameters():
        for part in (p.fp8_data.view(torch.uint8), p.scale_inv) if isinstance(p, Fp8Weight) else (p.detach(),):
            other = part.clone()
            distributed.broadcast(other, 0)
            assert torch.equal(other, part)
    with pytest.raises(ValueError, match="becomes a DTensor, and weights"):
        fully_shard(layer_in_fp8())


def layer_in_fp8() -> torch.nn.Module:
    """A linear layer of its own."""
    with fp8.model_init():
        return nn.Linear(32, 32, **CPU)


def _tensor_parallel() -> None:
    """A sharded module against the whole one with the weights that its ranks hold, each scaled by itself."""
    group = distributed.group.WORLD
    with fp8.model_init(recipe=CURRENT):
        sharded = randomized(nn.Linear(32, 64, bias=False, parallel_mode="row", tp_group=group, **CPU64))
    w = sharded.weight.dequantize()
    parts = [torch.empty_like(w) for _ in range(2)]
    distributed.all_gather(parts, w)
    x, rank = random(16, 32), distributed.get_rank()
    mine = x.chunk(2, dim=1)[rank].clone().requires_grad_()
    with fp8.autocast(enabled=False):
        y = sharded(mine)
    torch.testing.assert_close(y, x @ torch.cat(parts, dim=1).t(), **TIGHT)
    with fp8.autocast():
        y8 = sharded(mine)
    scale = torch.tensor(scale_of(float(x.abs().max()), E4M3.max), dtype=torch.float32)
    x8 = (x.float() * scale).to(E4M3.dtype).double() * scale.reciprocal().double()
    torch.testing.assert_close(y8, x8 @ torch.cat(parts, dim=1).t(), **TIGHT)


def test_data_parallel(world2: World) -> None:
    world2.run(_data_parallel)


def test_tensor_parallel(world2: World) -> None:
    world2.run(_tensor_parallel)


def test_scales_of_blocks_lie_as_gemms_read_them() -> None:
    """Also in a copy, and transposed: cuBLASLt wants rows of blocks padded to a multiple of four."""
    with fp8.model_init(recipe=BLOCKWISE):
        module = copy.deepcopy(nn.Linear(640, 384, bias=False, device="cpu"))
    with fp8.autocast(recipe=BLOCKWISE):
        module(torch.randn(16, 640)).sum().backward()
    (linear,) = linears_of(module)
    (state,) = linear.fp8_states
    made = state.fp8_weight(module.weight, columnwise=True)
    assert is_arranged(made.required_rowwise)
    assert is_arranged(made.required_columnwise)
    values = module.weight.dequantize()
    assert torch.equal(made.required_rowwise.dequantize(torch.float32), values)
    assert torch.equal(made.required_columnwise.dequantize(torch.float32), values.t())


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", [DELAYED, CURRENT, BLOCKWISE], ids=lambda x: x.name)
def test_on_a_gpu(recipe: fp8.Fp8Recipe) -> None:
    """Training with masters in bf16, as with bf16 weights; with transposes and casts by kernels."""
    weight = recipe if recipe is BLOCKWISE else CURRENT
    assert_trains_the_same(torch.bfloat16, recipe, weight, device="cuda", activation="swiglu", bias=False)


@pytest.mark.gpu
def test_memory_on_a_gpu() -> None:
    """A module takes a byte per element of its weights, and no more after forward and backward but the gradients."""
    n = 4096

    def allocated() -> int:
        torch.cuda.synchronize()
        gc.collect()
        return torch.cuda.memory_allocated()

    before = allocated()
    with fp8.model_init():
        module = nn.Linear(n, n, bias=False, device="cuda", params_dtype=torch.bfloat16)
    assert n * n <= allocated() - before <= 1.01 * n * n
    x = torch.randn(16, n, device="cuda", dtype=torch.bfloat16)
    with fp8.autocast():
        module(x).sum().backward()  # makes state and workspaces
        module.zero_grad()
        torch.cuda.reset_peak_memory_stats()
        start = allocated()
        y = module(x)
        assert torch.cuda.max_memory_allocated() - start < 0.1 * n * n
    y.sum().backward()
    assert allocated() - start <= 2.1 * n * n  # the bf16 gradient
    module.zero_grad()
    del y
    assert allocated() - start <= 0.01 * n * n
