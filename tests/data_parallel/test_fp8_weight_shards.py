"""A weight cast in shares is the weight cast whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megafp8.data_parallel.fp8_weight_shards import WeightShard, WeightShards, gathered_format
from megafp8.fp8 import E4M3, CurrentScaling, DelayedScaling, Fp8Manager, StaticScaling
from megafp8.linear.state import LinearState
from megafp8.numerics.recipes import BlockwiseScaling, Fp8Recipe
from megafp8.parallel_state import initialize_distributed, initialize_model_parallel
from megafp8.plan import LinearSite
from tests.world import World

SHAPES = {"layers.0.a": (48, 32), "layers.1.b": (16, 96), "layers.2.c": (32, 64)}
RECIPES: dict[str, Fp8Recipe] = {
    "current": CurrentScaling(),
    "power-of-two": CurrentScaling(power_of_two=True, amax_epsilon=8.0),
    "delayed": DelayedScaling(amax_history_len=3, margin=1, power_of_two_scale=True),
    "static": StaticScaling(amax=(("*", 3.0),)),
}


def _manager(recipe: Fp8Recipe, group: Any) -> tuple[Fp8Manager, dict[str, LinearState]]:
    manager = Fp8Manager(recipe, amax_group=group)
    states = {name: manager.linear(LinearSite(name, weight_storage="zero", param_gather=True)) for name in SHAPES}
    manager.materialize(torch.device("cpu"))
    return manager, {name: state for name, state in states.items() if state.plan.fp8}


def _weight(name: str, step: int) -> Tensor:
    seed = list(SHAPES).index(name) + 10 * step
    return torch.randn(SHAPES[name], generator=torch.Generator().manual_seed(seed)) * (1 + seed)


def _cuts(numel: int, ranks: int) -> list[int]:
    """Edges of uneven shares that begin within rows; rank 0 has none of the last weight."""
    return [0, *(0 if numel == 32 * 64 and r == 0 else (r + 1) * numel // ranks - 13 for r in range(ranks - 1)), numel]


def _case(recipe: Fp8Recipe, dtype: torch.dtype) -> list[list[bool]]:
    """In each step: whether codes as rows and as columns, factors, and the state after the step are those of a rank
    that casts everything."""
    parallel = initialize_model_parallel(device=initialize_distributed("cpu"))
    group, rank, ranks = parallel.world.group, parallel.rank, parallel.world_size
    reference, whole_ops = _manager(recipe, None)
    manager, ops = _manager(recipe, group)
    shares, masters = [], {}
    for name, op in ops.items():
        edges = _cuts(_weight(name, 0).numel(), ranks)
        masters[name] = torch.empty(edges[rank + 1] - edges[rank])
        codes = torch.zeros(SHAPES[name], dtype=torch.uint8).view(torch.float8_e4m3fn)
        shares.append(WeightShard(op, codes, edges[rank], masters[name], dtype))
    weights = WeightShards(shares, manager.amax_group, torch.device("cpu"))
    found = []
    for step in range(4):
        for name, share in zip(ops, shares, strict=True):
            values = _weight(name, step).view(-1)
            masters[name].copy_(values[share.start : share.start + len(masters[name])])
        weights.quantize()
        for name, share in zip(ops, shares, strict=True):
            gathered = torch.zeros(ranks, share.fp8_data_nk.numel(), dtype=torch.int32)
            gathered[rank, share.start : share.start + len(masters[name])] = 1
            gathered[rank] *= share.fp8_data_nk.view(torch.uint8).view(-1).int()
            torch.distributed.all_reduce(gathered, group=group)
            share.fp8_data_nk.view(torch.uint8).view(-1).copy_(gathered.sum(dim=0))
        same = []
        for name, op in ops.items():
            weight = torch.nn.Parameter(_weight(name, step).to(dtype))
            expected = whole_ops[name].fp8_weight(weight, columnwise=True)
            made = op.fp8_weight(torch.full(SHAPES[name], torch.nan), columnwise=True)
            for a, b in (
                (made.required_rowwise, expected.required_rowwise),
                (made.required_columnwise, expected.required_columnwise),
            ):
                same += [torch.equal(a.data.view(torch.uint8), b.data.view(torch.uint8))]
                same += [torch.equal(a.scale_inv, b.scale_inv)]
        reference.end_step()
        weights.record_amaxes()
        manager.end_step()
        state = reference.state_dict()
        same += [torch.equal(x, state[name]) for name, x in manager.state_dict().items()]
        found.append(same)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("recipe", RECIPES)
def test_shards_are_quantized_as_the_whole(world2: World, recipe: str, dtype: torch.dtype) -> None:
    for steps in world2.run(_case, RECIPES[recipe], dtype):
        assert [all(same) for same in steps] == [True] * 4
        assert len(steps[0]) >= 12


def test_a_weight_that_breaks_shows() -> None:
    """A value that is not finite stays one, as in a cast of the whole; what is below the margin saturates."""
    _, ops = _manager(CurrentScaling(), None)
    codes = torch.zeros(48, 32, dtype=torch.uint8).view(torch.float8_e4m3fn)
    master = torch.ones(48 * 32)
    master[7] = torch.nan
    weights = WeightShards([WeightShard(ops["layers.0.a"], codes, 0, master, torch.float32)], None, torch.device("cpu"))
    weights.quantize()
    assert codes.float().isnan().sum() == 1
    assert codes.float().view(-1)[7].isnan()


def test_which_weights_are_gathered_in_fp8() -> None:
    assert gathered_format(_manager(CurrentScaling(), None)[1]["layers.0.a"]) is E4M3
    assert gathered_format(_manager(BlockwiseScaling(), None)[1]["layers.0.a"]) is None
    dgrad = CurrentScaling(override_linear_precision=(False, True, False))
    assert gathered_format(_manager(dgrad, None)[1]["layers.0.a"]) is None
    wgrad = CurrentScaling(override_linear_precision=(False, False, True))
    assert gathered_format(_manager(wgrad, None)[1]["layers.0.a"]) is not None
