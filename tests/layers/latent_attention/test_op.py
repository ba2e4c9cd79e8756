"""Heads of latent attention in PyTorch: against complex numbers, and autograd of them, in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megafp8.layers.latent_attention.op import latent_heads
from megafp8.layers.rotary.op import rotated_neighbors
from tests.kernels import noise
from tests.layers.latent_attention.test_kernel import SHAPES, Shape, some_tensors


def by_complex_numbers(
    q_sbc: Tensor, kv_sbc: Tensor, k_rotary_sbr: Tensor, rotary: tuple[Tensor, Tensor] | None, sizes: tuple[int, ...],
    factor: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The formula, one head after the other; rotated pairs are complex numbers."""
    a, n, r, v = sizes

    def rotated(x_sbr: Tensor) -> Tensor:
        if rotary is None:
            return x_sbr
        z = torch.complex(x_sbr[..., 0::2], x_sbr[..., 1::2]) * torch.complex(*rotary).squeeze(2)
        return torch.cat([z.real, z.imag], dim=-1)

    q, k, values = [], [], []
    for of_head in q_sbc.split(n + r, dim=-1):
        q.append(factor * torch.cat([of_head[..., :n], rotated(of_head[..., n:])], dim=-1))
    for of_head in kv_sbc.split(n + v, dim=-1):
        k.append(torch.cat([of_head[..., :n], rotated(k_rotary_sbr)], dim=-1))
        values.append(of_head[..., n:])
    assert len(q) == len(k) == a
    return torch.stack(q, dim=2), torch.stack(k, dim=2), torch.stack(values, dim=2)


def by_operations(
    q_sbc: Tensor, kv_sbc: Tensor, k_rotary_sbr: Tensor, rotary: tuple[Tensor, Tensor] | None, sizes: tuple[int, ...],
    factor: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """PyTorch's operations one by one, whose roundings are autograd's."""
    a, n, r, v = sizes
    q, q_rotary = q_sbc.unflatten(-1, (a, -1)).split([n, r], dim=-1)
    k, values = kv_sbc.unflatten(-1, (a, -1)).split([n, v], dim=-1)
    k_rotary = rotated_neighbors(k_rotary_sbr.unsqueeze(2), rotary).expand(-1, -1, a, -1)
    q, k = torch.cat([q, rotated_neighbors(q_rotary, rotary)], dim=-1), torch.cat([k, k_rotary], dim=-1)
    return (q if factor == 1 else q * factor), k, values


@pytest.mark.parametrize("factor", [1.0, 0.7])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_float64(shape: Shape, factor: float) -> None:
    """Values, and gradients of all three inputs."""
    (inputs, gradients, rotary), sizes = some_tensors(shape, torch.float64), shape[2:6]
    rotary = None if rotary is None else tuple(x.double() for x in rotary)
    found = []
    for function in (latent_heads, by_complex_numbers):
        leaves = [x.clone().requires_grad_() for x in inputs]
        how = sizes[0] if function is latent_heads else sizes
        outputs = function(*leaves, rotary, how, factor)
        found.append([*outputs, *torch.autograd.grad(outputs, leaves, gradients)])
    for x, y in zip(*found, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("factor", [1.0, 0.7])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_roundings_are_those_of_single_operations(shape: Shape, factor: float, dtype: torch.dtype) -> None:
    """All bits but of the sum over heads, whose order autograd leaves to torch's reduction."""
    (inputs, gradients, rotary), sizes = some_tensors(shape, dtype), shape[2:6]
    found = []
    for function in (latent_heads, by_operations):
        leaves = [x.clone().requires_grad_() for x in inputs]
        how = sizes[0] if function is latent_heads else sizes
        outputs = function(*leaves, rotary, how, factor)
        found.append([*outputs, *torch.autograd.grad(outputs, leaves, gradients)])
    (*values, dk_rotary), (*expected, expected_dk_rotary) = found
    for x, y in zip(values, expected, strict=True):
        assert torch.equal(x, y)
    if sizes[0] <= 2:
        assert torch.equal(dk_rotary, expected_dk_rotary)
    tolerance = 2.0**-7 if dtype == torch.bfloat16 else 2.0**-20
    torch.testing.assert_close(dk_rotary, expected_dk_rotary, rtol=tolerance, atol=tolerance * sizes[0] ** 0.5)


def test_nothing_is_kept_but_the_tables() -> None:
    inputs, _, rotary = some_tensors(SHAPES[0], torch.float32)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        latent_heads(*(x.requires_grad_() for x in inputs), rotary, SHAPES[0][2])
    assert rotary is not None
    assert {x.data_ptr() for x in kept} == {x.data_ptr() for x in rotary}


def test_a_gradient_without_k() -> None:
    """Outputs that a loss does not read have no gradient."""
    inputs, _, rotary = some_tensors(SHAPES[0], torch.float64)
    leaves = [x.requires_grad_() for x in inputs]
    q, _, _ = latent_heads(*leaves, rotary, SHAPES[0][2])
    dq = noise(*q.shape, dtype=torch.float64)
    _, dkv, dk_rotary = torch.autograd.grad(q, leaves, dq)
    assert not dkv.any()
    assert not dk_rotary.any()
