"""`Fp8Weight` against a plain tensor with the same values, cast by NumPy from the formats' definition.

Shapes: n rows, k columns.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from megafp8 import fp8
from megafp8.fp8 import E4M3, Fp8Weight
from megafp8.fp8.weight import Fp8WeightFormat, converting_modules
from megafp8.numerics.tensor import BLOCK_128X128, TENSOR
from tests.fp8.reference import bytes_of, decode, encode, scale_of, spread

N, K = 144, 160
RECIPES: dict[str, tuple[fp8.Fp8Recipe, dict[str, Any]]] = {
    "current": (fp8.CurrentScaling(), {}),
    "epsilon": (fp8.CurrentScaling(amax_epsilon=1e4, power_of_two=True), {"eps": 1e4, "power_of_two": True}),
    "delayed": (fp8.DelayedScaling(margin=2), {"margin": 2}),
    "static": (fp8.StaticScaling(margin=1, power_of_two=True), {"margin": 1, "power_of_two": True}),
    "blockwise": (fp8.BlockwiseScaling(), {"power_of_two": True}),
    "fp32 blocks": (fp8.BlockwiseScaling(power_of_two=False, amax_epsilon=0.5), {"eps": 0.5}),
}
DECODED = np.array([decode(code, E4M3) for code in range(256)])


def weight(name: str = "current", dtype: torch.dtype = torch.float32, seed: int = 0) -> Any:
    how = Fp8WeightFormat.from_recipe(RECIPES[name][0], "layer")
    assert how is not None
    return nn.Parameter(Fp8Weight.cast(spread(N, K, seed).to(dtype), how))


def expected(values_nk: Tensor, name: str) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Bytes and inverse scales of values of any dtype."""
    recipe, options = RECIPES[name]
    x = values_nk.detach().float().numpy()
    rows, columns = (128, 128) if isinstance(recipe, fp8.BlockwiseScaling) else (N, K)
    data = np.empty(x.shape, np.uint8)
    scale_inv = np.empty((-(-N // rows), -(-K // columns)), np.float32)
    for i, j in np.ndindex(scale_inv.shape):
        block = np.s_[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns]
        scale = np.float32(scale_of(float(np.abs(x[block]).max()), E4M3.max, **options))
        data[block] = encode(x[block] * scale, E4M3)
        scale_inv[i, j] = np.float32(1) / scale
    return data, scale_inv if isinstance(recipe, fp8.BlockwiseScaling) else scale_inv.reshape(())


def assert_cast_of(weight: Fp8Weight, values: Tensor, name: str = "current") -> None:
    data, scale_inv = expected(values, name)
    np.testing.assert_array_equal(weight.scale_inv.numpy(), scale_inv)
    np.testing.assert_array_equal(bytes_of(weight.fp8_data), data)


def same_bits(a: Fp8Weight, b: Fp8Weight) -> bool:
    return torch.equal(a.fp8_data.view(torch.uint8), b.fp8_data.view(torch.uint8)) and torch.equal(
        a.scale_inv, b.scale_inv
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", RECIPES)
def test_cast_and_values(name: str, dtype: torch.dtype) -> None:
    w = weight(name, dtype)
    assert_cast_of(w, spread(N, K, 0).to(dtype), name)
    assert w.scaled.granularity is (BLOCK_128X128 if w.scale_inv.dim() else TENSOR)
    scale_inv = w.scale_inv.double().numpy()
    if scale_inv.ndim:
        scale_inv = scale_inv.repeat(128, 0)[:N].repeat(128, 1)[:, :K]
    exact = torch.from_numpy(DECODED[bytes_of(w.fp8_data)] * scale_inv)
    assert torch.equal(w.dequantize(torch.float64), exact)
    assert torch.equal(w.detach() * 1, exact.float().to(dtype))
    assert (w.dtype, w.shape, w.grad) == (dtype, (N, K), None)
    assert w.requires_grad
    assert isinstance(w, nn.Parameter)


def _assign_data(w: Any) -> None:
    w.data = spread(N, K, 7).to(w.dtype)


def _init(w: Any) -> None:
    nn.init.normal_(w, generator=torch.Generator().manual_seed(3))


def _chunks(w: Any) -> None:
    for i, part in enumerate(w.chunk(3)):
        part.mul_(i)


def _vector(w: Any) -> None:
    nn.utils.vector_to_parameters(torch.arange(N * K, dtype=w.dtype), [w])


WRITES: dict[str, Callable[[Any], Any]] = {
    "copy_": lambda w: w.copy_(spread(N, K, 5)),
    "copy_ of a row": lambda w: w.copy_(torch.arange(K)),
    "mul_": lambda w: w.mul_(-3),
    "lerp_": lambda w: w.lerp_(spread(N, K, 6).to(w.dtype), 0.25),
    "two at once": lambda w: torch._foreach_add_([w, torch.zeros(3)], 1.0),
    "out": lambda w: torch.mul(w, 2, out=w),
    "rows": lambda w: w[:16].zero_(),
    "rows by index": lambda w: w.__setitem__(slice(3, 40), 7.0),
    "all by index": lambda w: w.__setitem__(slice(None), spread(N, K, 4)),
    "column": lambda w: w.data.t()[2].fill_(1e4),
    "flat": lambda w: w.view(-1).add_(1.0),
    "slice of a slice": lambda w: w.data[10:60].t()[4:8].mul_(100),
    "mask": lambda w: w.masked_fill_(torch.eye(N, K, dtype=torch.bool), 5.0),
    "index_copy_": lambda w: w.index_copy_(0, torch.tensor([3]), torch.ones(1, K, dtype=w.dtype)),
    "data": _assign_data,
    "init": _init,
    "chunks": _chunks,
    "vector": _vector,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("write", WRITES)
def test_writes(write: str, dtype: torch.dtype) -> None:
    """The weight is afterwards the cast of what a tensor of its dtype holds; _chunks writes, and so casts, thrice."""
    w = weight(dtype=dtype)
    alias, twin, earlier = w.detach(), w.dequantize(), w.fp8_data
    bytes_before = earlier.view(torch.uint8).clone()
    with torch.no_grad():
        WRITES[write](twin)
        returned = WRITES[write](w)
    if write == "chunks":
        assert (w.dequantize() - twin).abs().max() <= twin.abs().max() / 8
        assert w[: N // 3].count_nonzero() == 0
        assert w[N // 3 :].count_nonzero() > 0
    else:
        assert_cast_of(w, twin)
    assert returned is w or write not in ("copy_", "mul_", "lerp_", "out")
    assert same_bits(alias, w)  # it has the same storage
    assert torch.equal(earlier.view(torch.uint8), bytes_before)  # as a graph that has the data still needs it


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("kind", ["SGD", "AdamW"])
def test_torch_optimizers(kind: str, foreach: bool, fused: bool) -> None:
    """With one in-place operation on the weight a step, bit for bit: dequantize, update, cast."""
    if foreach and fused:
        return
    options: dict[str, Any] = {"foreach": foreach, "fused": fused, "lr": 0.125}
    options |= {"momentum": 0.5} if kind == "SGD" else {"weight_decay": 0.0}
    w = weight()
    twin = nn.Parameter(w.dequantize())
    mine, theirs = (getattr(torch.optim, kind)([p], **options) for p in (w, twin))
    for step in range(3):
        w.grad = spread(N, K, 20 + step)
        twin.grad = w.grad.clone()
        norms = [nn.utils.clip_grad_norm_([p], 1.0) for p in (w, twin)]
        assert torch.equal(*norms)
        mine.step()
        theirs.step()
        assert_cast_of(w, twin)
        twin.data.copy_(w.dequantize())
    assert all(type(value) is Tensor and value.dtype == torch.float32 for value in mine.state[w].values())


def test_gradients_are_those_of_the_values() -> None:
    w = weight(dtype=torch.bfloat16)
    twin = nn.Parameter(w.dequantize())
    for p in (w, twin):
        (p.pow(2).sum() + p.float()[3].sum() + p[2:4].t().mean() + (p @ torch.ones(K, 2).bfloat16()).sum()).backward()
    assert type(w.grad) is Tensor
    assert w.grad.dtype == torch.bfloat16
    assert torch.equal(w.grad, twin.grad)


def test_in_inference_mode() -> None:
    w = weight(dtype=torch.bfloat16)
    twin = w.dequantize()
    with torch.inference_mode():
        assert torch.equal(torch.ones(2, K).bfloat16() @ w.t()[:, 4:], torch.ones(2, K).bfloat16() @ twin.t()[:, 4:])
        for each in (w, twin):
            each[:4].fill_(2.0)
        assert w.mul_(2) is w
        twin.mul_(2)
    assert_cast_of(w, twin)


def _saved(x: Any, weights_only: bool = True) -> Any:
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    return torch.load(file, weights_only=weights_only)


COPIES: dict[str, Callable[[Any], Any]] = {
    "clone": lambda w: w.clone(),
    "deepcopy": copy.deepcopy,
    "to": lambda w: w.to("cpu", copy=True),
    "saved": _saved,
    "saved in a dict": lambda w: _saved({"weight": w.detach()})["weight"],
    "copy_": lambda w: weight("delayed", torch.float32, 9).detach().copy_(w),
}


@pytest.mark.parametrize("how", COPIES)
def test_copies_have_the_same_bits(how: str) -> None:
    w = weight("blockwise" if how != "copy_" else "current", torch.bfloat16)
    w.partition_dim = 1
    made = COPIES[how](w)
    assert isinstance(made, Fp8Weight)
    assert same_bits(made, w)
    assert made.dtype == (torch.float32 if how == "copy_" else torch.bfloat16)
    of_parameter = how in ("deepcopy", "saved")
    assert hasattr(made, "partition_dim") == isinstance(made, nn.Parameter) == of_parameter
    with torch.no_grad():
        made.add_(1.0)
        assert not same_bits(made, w)
        twin = w.dequantize(made.dtype).add_(1.0)
    assert_cast_of(made, twin, "blockwise" if how != "copy_" else "delayed")


def test_conversions_give_plain_tensors_but_within_a_module() -> None:
    w = weight()
    converted = {torch.float32: w.float(), torch.bfloat16: w.to(torch.bfloat16), torch.float64: w.double()}
    for dtype, made in converted.items():
        assert type(made) is Tensor
        assert made.dtype == dtype
        assert torch.equal(made, w.dequantize().to(dtype))
    plain = torch.empty(N, K, dtype=torch.float64).copy_(w)
    assert torch.equal(plain, w.dequantize().double())
    master = w.detach().float()
    master.add_(1e-6)
    assert not torch.equal(master, w.dequantize())
    with converting_modules():
        made = w.bfloat16()
        assert isinstance(made, Fp8Weight)
        assert made.dtype == torch.bfloat16
        assert same_bits(made, w)


def test_errors() -> None:
    for recipe in (fp8.RowwiseScaling(), fp8.MXFP8Scaling(), fp8.NVFP4Scaling()):
        with pytest.raises(ValueError, match=rf"{recipe.name} scaling casts a weight once for each orientation"):
            Fp8WeightFormat.from_recipe(recipe, "layer")
    w = weight()
    with pytest.raises(ValueError, match=r"has shape \[144, 160\], but the tensor assigned to its data \[2, 2\]"):
        w.data = torch.zeros(2, 2)
    for name in ("get_high_precision_init_val", "clear_high_precision_init_val", "nothing"):
        assert not hasattr(w, name)
