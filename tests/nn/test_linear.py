"""Linear, norms, LayerNormLinear, LayerNormMLP and GroupedLinear in high precision, against float64 formulas."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from megafp8 import nn
from megafp8.fp8 import autocast
from tests.nn import twin
from tests.nn.compare import CPU64, TIGHT, assert_same, random, randomized

K, N = 6, 9
SPLITS: list[Any] = [None, ("a", "b_", "c"), {"q": 5, "kv_": 4}]


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("return_bias", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_linear(bias: bool, return_bias: bool, split: Any) -> None:
    module = randomized(nn.Linear(K, N, bias=bias, return_bias=return_bias, parameters_split=split, **CPU64))
    prefixes = [""] if split is None else [f"{name.rstrip('_')}_" for name in split]
    assert [name for name, _ in module.named_parameters()] == [
        f"{prefix}{kind}" for kind in ["weight", "bias"][: 1 + bias] for prefix in prefixes
    ]

    def run(x: Tensor) -> Tensor:
        if not return_bias:
            return module(x)
        y, returned = module(x)
        assert returned.numel() == (N if bias else 0)
        return y + returned if bias else y

    def expected(p: twin.Params, x: Tensor) -> Tensor:
        return torch.cat([twin.linear(x, p, prefix) for prefix in prefixes], -1)

    assert_same(module, run, expected, [random(2, 3, K)])
    moved = copy.deepcopy(module).float().double()  # its parameters are no neighbours any more
    moved.load_state_dict(module.state_dict())
    assert_same(moved, moved if not return_bias else lambda x: sum(y for y in moved(x) if y.numel()), expected,
                [random(4, K)])  # fmt: skip


@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
def test_norms(kind: str, zero_centered: bool) -> None:
    for shape in (K, (2, K)):
        module = getattr(nn, kind)(shape, 1e-3, zero_centered_gamma=zero_centered, dtype=torch.float64, device="cpu")
        assert (module.weight == (0 if zero_centered else 1)).all()

        def expected(p: twin.Params, x: Tensor, shape: Any = shape) -> Tensor:
            flat = {name: value.flatten() for name, value in p.items()}
            dims = 1 if isinstance(shape, int) else 2
            return twin.norm(x.flatten(-dims), flat, "", 1e-3, zero_centered).view(x.shape)

        assert_same(randomized(module), module, expected, [random(5, 2, K)])
    with pytest.raises(ValueError, match=r"must end with \[2, 6\]"):
        module(random(3, K))


@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
def test_zero_centered_norms_of_16_bits_in_inference_mode(kind: str) -> None:
    """PyTorch's ops compute them there, of 1 + weight in fp32 as in training."""
    module = randomized(getattr(nn, kind)(K, zero_centered_gamma=True, dtype=torch.bfloat16, device="cpu"))
    x = random(5, K).bfloat16()
    with torch.inference_mode():
        y = module(x)
    torch.testing.assert_close(y, module(x).detach())


@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("split", SPLITS[:2])
def test_layernorm_linear(normalization: str, split: Any) -> None:
    module = randomized(
        nn.LayerNormLinear(
            K, N, normalization=normalization, parameters_split=split, return_layernorm_output=True,
            zero_centered_gamma=True, return_bias=True, **CPU64,
        )
    )  # fmt: skip
    prefixes = [""] if split is None else [f"{name.rstrip('_')}_" for name in split]

    def run(x: Tensor) -> Any:
        y, bias, normed = module(x)
        return y + bias, normed

    def expected(p: twin.Params, x: Tensor) -> Any:
        normed = twin.norm(x, p, "layer_norm_", 1e-5, True)
        return torch.cat([twin.linear(normed, p, prefix) for prefix in prefixes], -1), normed

    assert_same(module, run, expected, [random(2, 3, K)])


ACTIVATIONS = [
    "gelu",
    "geglu",
    "swiglu",
    "clamped_swiglu",
    "relu",
    "reglu",
    "srelu",
    "sreglu",
    "qgelu",
    "qgeglu",
    "silu",
    "glu",
]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_layernorm_mlp(activation: str, bias: bool) -> None:
    module = randomized(
        nn.LayerNormMLP(K, 8, activation=activation, bias=bias, normalization="RMSNorm", checkpoint=bias, **CPU64)
    )
    assert_same(module, module, lambda p, x: twin.mlp(x, p, activation)[0], [random(2, 3, K)])


@pytest.mark.parametrize("return_bias", [False, True])
def test_grouped_linear(return_bias: bool) -> None:
    """An expert may have no rows."""
    splits = [3, 0, 2]
    module = randomized(nn.GroupedLinear(3, K, N, return_bias=return_bias, **CPU64))

    def run(x: Tensor) -> Tensor:
        if not return_bias:
            return module(x, splits)
        y, biases = module(x, torch.tensor(splits))
        return torch.cat([part + bias for part, bias in zip(y.split(splits), biases, strict=True)])

    def expected(p: twin.Params, x: Tensor) -> Tensor:
        parts = [part @ p[f"weight{i}"].T + p[f"bias{i}"] for i, part in enumerate(x.split(splits))]
        return torch.cat(parts)

    assert_same(module, run, expected, [random(5, K)])


def test_padding() -> None:
    x, splits = random(7, K).requires_grad_(), [3, 4, 0]
    pad, unpad = nn.Fp8Padding(3, 4), nn.Fp8Unpadding(3, 4)
    padded, sizes = pad(x, splits)
    assert sizes == [4, 4, 0]
    torch.testing.assert_close(padded[[0, 1, 2, 4, 5, 6, 7]], x)
    assert not padded[3].any()
    y = unpad(padded, splits)
    assert torch.equal(y, x)
    y.backward(dy := random(7, K, seed=1))
    assert torch.equal(x.grad, dy)
    assert pad(x, [4, 0, 0])[0] is x
    assert nn.Fp8Padding(1)(x, [7])[1] == [16]


def test_wgrad_is_added_to_main_grad() -> None:
    """Two micro-batches; the first of the next step starts anew; autograd sees no gradient of weights."""
    module = randomized(nn.LayerNormMLP(K, 8, fuse_wgrad_accumulation=True, **CPU64))
    with pytest.raises(ValueError, match=r"needs weight\.main_grad"):
        module(random(4, K))
    plain = nn.LayerNormMLP(K, 8, **CPU64)
    plain.load_state_dict(module.state_dict())
    for name in ("fc1_weight", "fc2_weight"):
        weight = getattr(module, name)
        weight.main_grad, weight.grad_added_to_main_grad = torch.full_like(weight, 7.0), False
    for step in range(2):
        plain.zero_grad()
        for i in range(2):
            for layer, options in ((module, {"is_first_microbatch": i == 0}), (plain, {})):
                layer(random(4, K, seed=2 * step + i), **options).square().sum().backward()
        for name in ("fc1_weight", "fc2_weight"):
            weight = getattr(module, name)
            torch.testing.assert_close(weight.main_grad, getattr(plain, name).grad, **TIGHT)
            assert weight.grad is None
            assert weight.grad_added_to_main_grad
    before = module.fc1_weight.main_grad.clone()
    module.eval()(random(4, K), is_first_microbatch=True)
    assert torch.equal(module.fc1_weight.main_grad, before)


def test_initial_values_and_what_parameters_say_of_themselves() -> None:
    names: list[str] = []

    class Tracker:
        def fork(self, name: str = "model-parallel-rng") -> Any:
            names.append(name)
            return torch.random.fork_rng(devices=[])

    torch.manual_seed(0)
    layer = nn.Linear(64, 512, tp_size=2, parallel_mode="column", sequence_parallel=True, device="cpu",
                      get_rng_state_tracker=Tracker, rng_tracker_name="own")  # fmt: skip
    assert names == ["own"]
    assert layer.weight.shape == (256, 64)
    assert layer.weight.std().item() == pytest.approx(0.023, rel=0.05)
    assert not layer.bias.any()
    assert (layer.weight.tensor_model_parallel, layer.weight.partition_dim, layer.bias.partition_dim) == (True, 0, 0)
    row = nn.Linear(64, 8, tp_size=2, parallel_mode="row", sequence_parallel=True, init_method=torch.nn.init.ones_,
                    device="cpu")  # fmt: skip
    assert (row.weight.shape, row.weight.partition_dim) == ((8, 32), 1)
    assert (row.weight == 1).all()
    assert (row.bias.sequence_parallel, row.weight.sequence_parallel) == (True, False)
    with pytest.raises(ValueError, match="call set_tensor_parallel_group"):
        row(torch.zeros(2, 32))
    lazy = nn.LayerNormMLP(64, 128, device="meta")
    assert lazy.fc1_weight.is_meta
    lazy.reset_parameters()
    assert lazy.fc1_weight.std().item() == pytest.approx(0.023, rel=0.05)
    assert (lazy.layer_norm_weight == 1).all()


def test_torch_autocast_casts_the_input() -> None:
    layer = nn.LayerNormLinear(16, 16, device="cpu")
    x = torch.randn(4, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(x)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, layer(x.bfloat16()))


@pytest.mark.parametrize(
    ("module", "options", "says"),
    [
        ("Linear", {"ub_overlap_ag": True}, "Linear: ub_overlap_ag is True, which megafp8.nn does not offer"),
        ("Linear", {"parallel_mode": "diagonal"}, "parallel_mode is 'diagonal'; it must be one of None"),
        ("Linear", {"parameters_split": ()}, "must name one part or more"),
        ("Linear", {"parameters_split": {"a": 3}}, "3 rows in all, but out_features is 16"),
        ("Linear", {"parameters_split": ("a", "b", "c")}, "multiple of the 3"),
        ("Linear", {"tp_size": 3, "parallel_mode": "column"}, "out_features is 16; it must be a multiple of the 3"),
        ("LayerNormLinear", {"normalization": "BatchNorm"}, "normalization is 'BatchNorm'"),
        ("LayerNormMLP", {"activation": "softplus"}, "activation is 'softplus'"),
        ("LayerNormMLP", {"delay_wgrad_compute": True}, "delay_wgrad_compute is True"),
    ],
)
def test_what_is_refused(module: str, options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        getattr(nn, module)(16, 16, device="cpu", **options)


def test_dims_that_fp8_cannot_have() -> None:
    with (
        pytest.raises(ValueError, match=r"weight of linear is \[9, 16\] on a rank, and FP8 needs multiples of 16"),
        autocast(),
    ):
        nn.Linear(16, 9, device="cpu")(torch.zeros(4, 16))
