"""Masters in halves: nothing is lost, and the parameter is the nearest there is."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megafp8.optimizer.remainders import SplitMaster, join, split

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def masters() -> torch.Tensor:
    """All kinds of finite fp32 numbers, many of them in the middle of two bf16 numbers or beside it."""
    rng = np.random.default_rng(3)
    bits = rng.integers(0, 2**32, size=100_000, dtype=np.uint64).astype(np.uint32)
    middle = (bits[:30_000] & np.uint32(0xFFFF0000)) + np.uint32(0x8000)
    bits = np.concatenate([bits, middle - np.uint32(1), middle, middle + np.uint32(1), bits & np.uint32(0x8000FFFF)])
    values = torch.from_numpy(bits.view(np.float32).copy())
    edges = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, 3.4028235e38, -1e-45])
    return torch.cat([values[values.isfinite()], edges])


def nearest_bf16(x: np.ndarray) -> np.ndarray:
    """To 8 significant bits, of two equally near away from zero; in float64, for numbers that are normal in fp32."""
    fraction, exponent = np.frexp(x.astype(np.float64))
    return np.ldexp(np.copysign(np.floor(np.abs(fraction) * 256 + 0.5), fraction), exponent - 8)


@pytest.mark.parametrize("device", DEVICES)
def test_halves_are_the_whole(device: str) -> None:
    master = masters().to(device)
    param, remainder = split(master)
    assert (param.dtype, remainder.dtype) == (torch.bfloat16, torch.int16)
    assert torch.equal(join(param, remainder).view(torch.int32), master.view(torch.int32))


def test_the_parameter_is_the_nearest() -> None:
    master = masters()
    master = master[(master.abs() > 1.2e-38) & (master.abs() < 3.38e38)]
    param = split(master)[0]
    np.testing.assert_array_equal(param.double().numpy(), nearest_bf16(master.numpy()))
    others = param != master.bfloat16()  # torch's, where two are equally near
    assert 0.05 < others.float().mean() < 0.1
    assert ((master[others].view(torch.int32) & 0xFFFF) == 0x8000).all()


def test_kept_in_the_parameter() -> None:
    whole = torch.tensor([1.0, 2.0, -3.0, 5.0]).bfloat16()
    kept = SplitMaster(whole[1:])
    assert kept.values().tolist() == [2.0, -3.0, 5.0]
    values = torch.tensor([2.0, -3.001, 5.017])
    kept.keep(values, step=0)
    assert whole.tolist() == [1.0, 2.0, -3.0, 5.03125]
    assert torch.equal(kept.values(), values)
    assert torch.equal(kept.saved(), values)
    assert kept.nbytes == 6
