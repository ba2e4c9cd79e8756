"""Rows travel to the ranks of their experts and back, against what each rank should have by hand."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from megafp8.expert_parallel.exchange import exchange, in_parts
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


def _exchanged(case: str, parts: int) -> None:
    group, rank, ranks = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    assert group is not None
    own, experts = 2 * parts, 2 * parts * ranks
    places = in_parts(experts, ranks, parts, torch.device("cpu")).tolist()
    everyone = [_counts(r, experts, case) for r in range(ranks)]
    # A row says where it comes from: (rank, expert, which one).
    named = [[rank, e, i] for e in sorted(range(experts), key=places.__getitem__) for i in range(everyone[rank][e])]
    rows = torch.tensor(named, dtype=torch.float64).view(-1, 3).requires_grad_()
    plan = exchange(everyone[rank].view(ranks, parts, 2).transpose(0, 1), group)
    returned = []
    for part, arriving in enumerate(plan.dispatch(rows)):
        arrived, first = plan.arrived(arriving, part), own * rank + 2 * part
        expected = [[r, e, i] for e in (first, first + 1) for r in range(ranks) for i in range(everyone[r][e])]
        assert arrived.tolist() == expected  # by expert, then by sender
        assert plan.ends_pe[part].tolist() == [sum(row[1] <= e for row in expected) for e in (first, first + 1)]
        returned.append(plan.return_part(arrived * 10, part))
    back = plan.collect(returned)
    assert torch.equal(back, rows * 10)
    weight = torch.arange(back.numel(), dtype=torch.float64).view_as(back) + 100 * rank
    back.backward(weight)
    assert rows.grad is not None
    assert torch.equal(rows.grad, 10 * weight)


@pytest.mark.parametrize(("ranks", "parts"), [(2, 1), (2, 3), (4, 2)])
@pytest.mark.parametrize("case", ["all", "a rank without rows", "experts without rows"])
def test_rows_arrive_by_expert_and_return(world4: World, case: str, ranks: int, parts: int) -> None:
    world4.run(_exchanged, case, parts, ranks=ranks)
