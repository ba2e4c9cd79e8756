"""Remainders of masters: nothing is lost, and the parameter is the nearest bf16 number."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megafp8.optimizer.state_storage import PlainStorage, RemainderStorage, join_master, split_master


def masters() -> torch.Tensor:
    """All kinds of finite fp32 numbers, many of them at or beside the middle of two bf16 numbers."""
    rng = np.random.default_rng(3)
    bits = rng.integers(0, 2**32, size=100_000, dtype=np.uint64).astype(np.uint32)
    middle = (bits[:30_000] & np.uint32(0xFFFF0000)) + np.uint32(0x8000)
    bits = np.concatenate([bits, middle - np.uint32(1), middle, middle + np.uint32(1), bits & np.uint32(0x8000FFFF)])
    values = torch.from_numpy(bits.view(np.float32).copy())
    edges = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, 3.4028235e38, -1e-45])
    return torch.cat([values[values.isfinite()], edges])


def nearest_bf16(x: np.ndarray) -> np.ndarray:
    """To 8 significant bits, ties away from zero; in float64, for numbers that are normal in fp32."""
    fraction, exponent = np.frexp(x.astype(np.float64))
    return np.ldexp(np.copysign(np.floor(np.abs(fraction) * 256 + 0.5), fraction), exponent - 8)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_joining_restores_the_master(device: str) -> None:
    master = masters().to(device)
    param, remainder = split_master(master)
    assert (param.dtype, remainder.dtype) == (torch.bfloat16, torch.int16)
    assert torch.equal(join_master(param, remainder).view(torch.int32), master.view(torch.int32))


def test_the_parameter_is_the_nearest() -> None:
    master = masters()
    master = master[(master.abs() > 1.2e-38) & (master.abs() < 3.38e38)]
    param = split_master(master)[0]
    np.testing.assert_array_equal(param.double().numpy(), nearest_bf16(master.numpy()))
    others = param != master.bfloat16()  # torch's, at ties
    assert 0.05 < others.float().mean() < 0.1
    assert ((master[others].view(torch.int32) & 0xFFFF) == 0x8000).all()


def test_remainders_with_their_parameter() -> None:
    param = torch.tensor([1.0, 2.0, -3.0, 5.0]).bfloat16()
    storage = RemainderStorage(param[1:])
    assert storage.load().tolist() == [2.0, -3.0, 5.0]
    values = torch.tensor([2.0, -3.001, 5.017])
    storage.store(values, step=0)
    assert param.tolist() == [1.0, 2.0, -3.0, 5.03125]
    assert torch.equal(storage.load(), values)
    assert torch.equal(storage.checkpoint_tensor(), values)
    assert storage.nbytes == 6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_plain_storage_rounds_to_its_dtype(dtype: torch.dtype) -> None:
    storage = PlainStorage(torch.zeros(2, dtype=dtype))
    storage.store(torch.tensor([1.0, 1.001]), step=0)
    assert torch.equal(storage.load(), torch.tensor([1.0, 1.001]).to(dtype).float())
    assert storage.checkpoint_tensor().dtype == dtype
    assert storage.nbytes == 2 * dtype.itemsize
