"""Storage of FP8 moments: decay without gradients, and what the noise depends on."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megafp8.numerics.moments import FIRST, SECOND, MomentFormat, encode
from megafp8.numerics.stochastic_rounding import CastNoise, uniform
from megafp8.optimizer import fp8_moments
from megafp8.optimizer.fp8_moments import Fp8MomentStorage
from tests.tiny_model import flat_shard

FORMATS = {"first": FIRST, "second": SECOND}


@pytest.mark.parametrize(("name", "beta"), [("first", 0.9), ("second", 0.95)])
def test_a_moment_without_gradients_decays(name: str, beta: float) -> None:
    """At the right rate from any value; rounded to nearest, 1.25 would never decay at 0.95."""
    moment = Fp8MomentStorage(flat_shard("weight", 4096), FORMATS[name], seed=0)
    start = torch.linspace(1, 4, 4096)
    moment.store(start, step=0)
    for step in range(1, 101):
        moment.store(moment.load() * beta, step)
        if step in (10, 50, 100):
            ratio = moment.load().double() / (start.double() * beta**step)
            spread = (0.0014 / (1 - beta**2)) ** 0.5
            assert abs(ratio.mean() - 1) < 5 * max(ratio.std(), 0.01) / 64
            assert ratio.std() < 1.5 * spread * (step * (1 - beta**2)) ** 0.5


def test_noise_depends_on_tensor_position_moment_seed_and_step() -> None:
    x = torch.linspace(1, 2, 500)

    def ups(name: str, start: int = 0, seed: int = 0, step: int = 0, moment: MomentFormat = FIRST) -> Tensor:
        """Whether each value was rounded up."""
        found = Fp8MomentStorage(flat_shard(name, 1000, start, start + 500), moment, seed)
        found.store(x, step)
        return (found.load() >= x).int()

    plain = ups("weight")
    assert torch.equal(plain, ups("weight"))
    for other in (ups("norm"), ups("weight", 500), ups("weight", seed=1), ups("weight", step=1),
                  ups("weight", moment=SECOND)):  # fmt: skip
        assert 100 < (other != plain).sum() < 400


@pytest.mark.parametrize("moment", [FIRST, SECOND])
def test_long_shards_are_encoded_in_parts(monkeypatch: pytest.MonkeyPatch, moment: MomentFormat) -> None:
    x = torch.rand(1000)
    found = []
    for part in (256, 1024):
        monkeypatch.setattr(fp8_moments, "_PART", part)
        found.append(Fp8MomentStorage(flat_shard("weight", 1000), moment, seed=0))
        found[-1].store(x, step=3)
    noise = CastNoise(found[0].noise_key, torch.tensor(3), torch.tensor(0))
    expected = encode(x, moment, uniform(1000, 2, noise)[:, [FIRST, SECOND].index(moment)])
    for storage in found:
        assert all(torch.equal(*pair) for pair in zip(storage.tensors, expected, strict=True))
        assert storage.nbytes == 1000 + 8
