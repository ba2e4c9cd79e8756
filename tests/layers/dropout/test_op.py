"""Dropout's statistics and gradients. The twin of `tests.models` has its masks, from another Philox."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

from megafp8.layers.dropout.op import add
from megafp8.layers.dropout.reference import Dropout, DropoutStream, TokenPlaces, kept
from megafp8.layers.norm.op import norm

P, C = 0.3, 64


def stream(samples: Tensor, s: int = 64, name: str = "layers.0.mlp", seed: int = 1234, p: float = P) -> Dropout:
    dropout = DropoutStream.from_seed(p, seed, name).at(
        TokenPlaces.from_positions(torch.arange(s).unsqueeze(1), samples)
    )
    assert dropout is not None
    return dropout


def test_kept_shares() -> None:
    """Of all elements, and of each channel, position and sample: chi-square with as many degrees of freedom."""
    kept_sbc = kept(stream(torch.arange(50)), C).view(64, 50, C).double()
    for dims in ((0, 1, 2), (0, 1), (1, 2), (0, 2)):
        counts = kept_sbc.sum(dims).flatten()
        n = kept_sbc.numel() / len(counts)
        chi_square = ((counts - n * (1 - P)) ** 2 / (n * P * (1 - P))).sum().item()
        assert abs(chi_square - len(counts)) < 4 * (2 * len(counts)) ** 0.5, dims


def test_masks_are_independent() -> None:
    """Of neighbouring channels, positions and samples, of other layers, seeds, steps, and words of a counter."""
    mask = kept(stream(torch.arange(50)), C).view(64, 50, C)
    others = [kept(stream(torch.arange(50) + 50), C), kept(stream(torch.arange(50), seed=1), C)]
    others += [kept(stream(torch.arange(50), name="layers.1.mlp"), C), kept(stream(torch.arange(50) + 2**32), C)]
    pairs = [(mask, other.view_as(mask)) for other in others]
    pairs += [*((mask, mask.roll(1, dim)) for dim in range(3)), (mask, mask.roll(4, 2))]
    for i, (a, b) in enumerate(pairs):
        joint = torch.stack([(a & b).sum(), (a & ~b).sum(), (~a & b).sum(), (~a & ~b).sum()]).double()
        keep = torch.tensor([(1 - P) ** 2, P * (1 - P), P * (1 - P), P**2], dtype=torch.float64) * a.numel()
        assert ((joint - keep) ** 2 / keep).sum() < 20, i  # 3 degrees of freedom: above once in 5000


def test_masks_stay_what_they_were() -> None:
    """A resumed run continues with them."""
    masks = ["".join(map(str, row)) for row in kept(stream(torch.tensor([7]), 2), 12).int().tolist()]
    assert masks == ["111111111111", "110111111111"]


def test_no_dropout() -> None:
    places = TokenPlaces.from_positions(torch.arange(2).unsqueeze(1), torch.arange(3))
    assert DropoutStream.from_seed(0.0, 1, "x").at(places) is None
    assert DropoutStream.from_seed(0.5, 1, "x").at(None) is None
    x = torch.randn(2, 3, C)
    assert add(None, x, None) is x
    assert not add(None, x, stream(torch.arange(3), 2, p=1 - 1e-12)).any()


@pytest.mark.parametrize("centered", [False, True])
def test_gradients(centered: bool) -> None:
    dropout = stream(torch.tensor([1, 5]), 3)
    x, branch = (torch.randn(3, 2, 6, dtype=torch.float64, requires_grad=True) for _ in range(2))
    weight = torch.rand(6, dtype=torch.float64, requires_grad=True)
    bias = torch.rand(6, dtype=torch.float64, requires_grad=True) if centered else None

    def both(x: Tensor, branch: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        total, y = norm(x, branch, weight, bias, 1e-5, None, dropout=dropout)
        assert isinstance(y, Tensor)
        return total, y, add(x, branch, dropout), add(None, branch, dropout)

    total, _, added, alone = both(x, branch, weight)
    assert torch.equal(total, added)
    torch.testing.assert_close(alone, kept(dropout, 6).view_as(x) * branch / (1 - P), rtol=1e-15, atol=0)
    assert gradcheck(both, (x, branch, weight))
    (only_sum,) = torch.autograd.grad(norm(x, branch, weight, bias, 1e-5, None, dropout=dropout)[0].sum(), branch)
    assert torch.equal(only_sum, torch.autograd.grad(added.sum(), branch)[0])
