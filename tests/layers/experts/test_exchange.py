"""Rows travel to the ranks of their experts and back, against what each rank should have by hand."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from megafp8.layers.experts.exchange import plan_dispatch
from megafp8.layers.experts.own_rows import RowBound
from megafp8.layers.experts.permute_op import combine, permute
from tests.world import World

N, K = 7, 2


def _choices(rank: int, experts: int, case: str) -> torch.Tensor:
    """Experts of each of `rank`'s tokens; `experts` marks a choice without a row."""
    generator = torch.Generator().manual_seed(rank)
    chosen = torch.rand(N, experts, generator=generator).argsort(dim=1)[:, :K]
    if case == "a rank without rows" and rank == 0:
        return torch.full_like(chosen, experts)
    if case == "experts without rows":
        return torch.rand(N, experts // 2, generator=generator).argsort(dim=1)[:, :K] + experts // 2
    if case == "dropped choices":
        return torch.where(torch.rand(N, K, generator=generator) < 0.4, experts, chosen)
    return chosen


def _check(case: str, bound: RowBound, everyone: list[torch.Tensor], *, places: str) -> None:
    """Dispatch rows that say where they come from (rank, token), and return ten times each."""
    group, rank, ranks = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    assert group is not None
    experts, chosen = 2 * ranks, everyone[rank]
    x = torch.tensor([[rank + 1, i + 1] for i in range(N)], dtype=torch.float64).requires_grad_()
    plan = plan_dispatch(chosen, experts, group, bound, "a")
    arrived = plan.to_experts(permute(x, plan.by_rank), None)
    own = (2 * rank, 2 * rank + 1)
    expected = [[r + 1, i + 1] for e in own for r in range(ranks) for i in range(N) if e in everyone[r][i]]
    assert plan.ends_e.tolist() == [sum(int((x == e).sum()) for x in everyone for e in own[: i + 1]) for i in range(2)]
    assert arrived[: len(expected)].tolist() == expected  # by expert, then by sender
    assert len(arrived) == len(expected) or (places == "spare" and len(arrived) > len(expected))
    results = torch.where(torch.arange(len(arrived)).unsqueeze(1) < len(expected), arrived * 10, torch.nan)
    weights = torch.rand(N, K, dtype=torch.float64, generator=torch.Generator().manual_seed(rank)).requires_grad_()
    y = combine(plan.to_tokens(results), weights, plan.by_rank)
    total_n1 = (weights * (chosen < experts)).sum(dim=1, keepdim=True)
    torch.testing.assert_close(y, 10 * x * total_n1)
    dy = torch.randn(N, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(9))
    found = torch.autograd.grad(y, (x, weights), dy)
    theirs = torch.autograd.grad(10 * x * total_n1, (x, weights), dy)
    torch.testing.assert_close(found, theirs)


def _dispatched(case: str) -> None:
    ranks = dist.get_world_size()
    bound, everyone = RowBound(torch.device("cpu")), [_choices(r, 2 * ranks, case) for r in range(ranks)]
    _check(case, bound, everyone, places="exact")
    with bound.fixed():
        _check(case, bound, everyone, places="spare")
        assert not bound.surplus.any()


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("case", ["all", "a rank without rows", "experts without rows", "dropped choices"])
def test_rows_arrive_by_expert_and_return(world4: World, case: str, ranks: int) -> None:
    """Dispatch to exactly as many places as there are rows, and to more, whose rows are NaN on the way back."""
    world4.run(_dispatched, case, ranks=ranks)


def _surplus() -> tuple[int, list[int], list[int]]:
    """The largest surplus of a pair of ranks, and the rooms before and after growing."""
    group, rank, ranks = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    assert group is not None
    bound = RowBound(torch.device("cpu"))
    few = torch.full((40, 1), 2 * ranks)
    few[0], few[1] = 0, 2 * ranks - 1
    plan_dispatch(few, 2 * ranks, group, bound, "a")
    many = torch.full((40, 1), 1 if rank == 1 else 2 * ranks - 1)  # 40 rows from rank 1 to rank 0
    with bound.fixed():
        before = plan_dispatch(many, 2 * ranks, group, bound, "a")
        arrived = before.to_experts(permute(torch.ones(40, 1, dtype=torch.float64), before.by_rank), None)
        assert len(arrived) == sum(before.received)
    surplus = int(bound.surplus[0])
    bound.grow()
    with bound.fixed():
        after = plan_dispatch(many, 2 * ranks, group, bound, "a")
    assert int(bound.surplus[0]) == surplus, "nothing more"
    return surplus, before.sent, after.sent


def test_all_ranks_see_a_surplus_and_agree_on_larger_rooms(world2: World) -> None:
    """Rooms are multiples of 8 rows; a layer with a surplus gets a margin for each pair."""
    for surplus, before, after in world2.run(_surplus):
        assert surplus == 32
        assert before == [8, 8]
        assert after == [40, 40], "not more than a rank's tokens"
