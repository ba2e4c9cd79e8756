"""Rows travel to the ranks of their experts and back, against what each rank should have by hand."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from megafp8.layers.experts.exchange import plan_dispatch
from tests.world import World


def _counts(rank: int, experts: int, case: str) -> torch.Tensor:
    """How many rows of `rank` are for each expert."""
    generator = torch.Generator().manual_seed(rank)
    counts = torch.randint(0, 4, (experts,), generator=generator)
    if case == "a rank without rows" and rank == 0:
        counts.zero_()
    if case == "experts without rows":
        counts[: experts // 2] = 0
    return counts


def _exchanged(case: str) -> None:
    group, rank, ranks = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    assert group is not None
    experts = 2 * ranks
    everyone = [_counts(r, experts, case) for r in range(ranks)]
    # A row says where it comes from: (rank, expert, which one).
    own = [[rank, e, i] for e in range(experts) for i in range(everyone[rank][e])]
    rows = torch.tensor(own, dtype=torch.float64).view(-1, 3).requires_grad_()
    plan = plan_dispatch(everyone[rank], group)
    arrived = plan.to_experts(rows, None)
    expected = [
        [r, e, i] for e in (2 * rank, 2 * rank + 1) for r in range(ranks) for i in range(everyone[r][e])
    ]  # by expert, then by sender
    assert arrived.tolist() == expected
    assert plan.ends_e.tolist() == [sum(row[1] <= e for row in expected) for e in (2 * rank, 2 * rank + 1)]
    back = plan.to_tokens(arrived * 10)
    assert torch.equal(back, rows * 10)
    weight = torch.arange(back.numel(), dtype=torch.float64).view_as(back) + 100 * rank
    back.backward(weight)
    assert rows.grad is not None
    assert torch.equal(rows.grad, 10 * weight)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("case", ["all", "a rank without rows", "experts without rows"])
def test_rows_arrive_by_expert_and_return(world4: World, case: str, ranks: int) -> None:
    world4.run(_exchanged, case, ranks=ranks)
