"""A weight cast in shares is the weight cast whole."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megafp8.fp8 import E4M3, CurrentScaling, CustomScaling, DelayedScaling, Fp8Manager, Rule, StaticScaling
from megafp8.linear import group_state
from megafp8.linear.group_state import GroupState
from megafp8.linear.grouped_linear import grouped_linear
from megafp8.linear.state import LinearState
from megafp8.numerics.groups import RowGroups
from megafp8.numerics.recipes import BlockwiseScaling, Fp8Recipe
from megafp8.parallel.data.fp8_weight_shards import WeightShard, WeightShards, gathered_format
from megafp8.parallel.data.fsdp import Released
from megafp8.parallel.parallel_state import initialize_distributed, initialize_model_parallel
from megafp8.plan import LinearSite
from tests.marks import slow_but
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


# Experts, outputs and inputs of weights; rows of 24 bytes are not cast for several experts at once.
EXPERTS = {
    "layers.0.up": (3, 40, 32),
    "layers.0.down": (3, 8, 160),
    "layers.1.up": (5, 8, 24),
    "layers.1.down": (1, 8, 16),
}
MIXED = CustomScaling(
    rules=tuple(
        Rule(layers=layers, input=recipe, weight=recipe, grad_output=recipe)
        for layers, recipe in (
            ("*.1", DelayedScaling(margin=1)), ("*.2", CurrentScaling(power_of_two=True)), ("*", DelayedScaling()),
        )
    )
)  # fmt: skip


def _experts(recipe: Fp8Recipe, group: Any, amax_group: Any, **site: Any) -> tuple[Fp8Manager, dict[str, GroupState]]:
    manager, states = Fp8Manager(recipe, amax_group=group), {}
    for name, (experts, n, k) in EXPERTS.items():
        sites = [LinearSite(f"{name}.{e}", k, n, expert=True, **site) for e in range(experts)]
        states[name] = manager.group([manager.linear(x, amax_group=amax_group) for x in sites])
    manager.materialize(torch.device("cpu"))
    return manager, states


def _weight_of_experts(name: str, step: int) -> Tensor:
    """Experts have magnitudes of their own."""
    (experts, n, k), seed = EXPERTS[name], 10 * step + len(name)
    values = torch.randn(experts, n, k, generator=torch.Generator().manual_seed(seed))
    return (values * (1 + torch.arange(experts)[:, None, None])).view(-1, k)


def _experts_case(recipe: Fp8Recipe, dtype: torch.dtype, by_rows: bool) -> list[list[bool]]:
    """As `_case`, for shards that begin and end within experts; amaxes are reduced over another group."""
    parallel = initialize_model_parallel(device=initialize_distributed("cpu"))
    group, rank, ranks = parallel.world.group, parallel.rank, parallel.world_size
    alone = torch.distributed.new_subgroups(1)[0]
    reference, whole = _experts(recipe, None, None)
    manager, states = _experts(recipe, alone, group, weight_storage="fsdp", param_gather=True)
    shards, spans = [], []
    for name, state in states.items():
        (rows, k), numel = _weight_of_experts(name, 0).shape, _weight_of_experts(name, 0).numel()
        padded = -(-rows // ranks)
        first, last = min(rank * padded, rows), min((rank + 1) * padded, rows)
        start, stop = (first * k, last * k) if by_rows else (_cuts(numel, ranks)[rank], _cuts(numel, ranks)[rank + 1])
        memory = torch.zeros(padded if by_rows else rows, k, dtype=torch.uint8).view(torch.float8_e4m3fn)
        at, before = (0, first) if by_rows else (start, 0)
        shards.append(WeightShard(state, memory, at, torch.empty(stop - start), dtype, before))
        spans.append((start, stop))
    weights, found = WeightShards(shards, alone, torch.device("cpu")), []
    for step in range(4):
        for name, shard, (start, stop) in zip(states, shards, spans, strict=True):
            shard.master_f.copy_(_weight_of_experts(name, step).view(-1)[start:stop])
        weights.quantize()
        same = []
        for name, shard, (start, stop) in zip(states, shards, spans, strict=True):
            own = shard.fp8_data_nk.view(torch.uint8).view(-1)[shard.start :][: stop - start]
            gathered = torch.zeros(_weight_of_experts(name, 0).numel(), dtype=torch.int32)
            gathered[start:stop] = own.int()
            torch.distributed.all_reduce(gathered, group=group)
            values = _weight_of_experts(name, step).to(dtype)
            states[name].set_gathered_data(gathered.to(torch.uint8).view(torch.float8_e4m3fn).view(values.shape))
            scale_inv = states[name].quantize_weight(values, rowwise=True, columnwise=False).required_rowwise.scale_inv
            for e, (state, w) in enumerate(zip(whole[name].states, values.chunk(EXPERTS[name][0]))):
                expected = state.quantize_weight(w, rowwise=True, columnwise=True)
                made = states[name].states[e].quantize_weight(torch.empty(0), rowwise=True, columnwise=True)
                for a, b in zip(made, expected):
                    assert a is not None
                    assert b is not None
                    same += [torch.equal(a.data.view(torch.uint8), b.data.view(torch.uint8))]
                    same += [torch.equal(a.scale_inv, b.scale_inv), torch.equal(scale_inv[e], b.scale_inv)]
        reference.end_step()
        weights.record_amaxes()
        manager.end_step()
        state_dict = reference.state_dict()
        same += [torch.equal(x, state_dict[name]) for name, x in manager.state_dict().items()]
        found.append(same)
    return found


OF_EXPERTS = {**RECIPES, "mixed": MIXED}
BY_EXPERTS = [*itertools.product(OF_EXPERTS, [torch.float32, torch.bfloat16], [False, True])]


@pytest.mark.parametrize(
    ("recipe", "dtype", "by_rows"),
    slow_but(BY_EXPERTS, ("delayed", torch.bfloat16, True), ("mixed", torch.float32, False)),
    ids=str,
)
def test_shards_of_experts_are_quantized_as_each_whole_expert(
    world2: World, recipe: str, dtype: torch.dtype, by_rows: bool
) -> None:
    for steps in world2.run(_experts_case, OF_EXPERTS[recipe], dtype, by_rows):
        assert [all(same) for same in steps] == [True] * 4
        assert len(steps[0]) >= 72


@pytest.mark.parametrize(
    ("recipe", "at_once", "rows"),
    slow_but(
        itertools.product(["delayed", "current"], [False, True], [144, 128]), ("delayed", True, 144),
        ("current", False, 144),
    ),
)  # fmt: skip
def test_experts_compute_with_what_was_gathered(
    recipe: str, at_once: bool, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same bits as with the values, which nothing reads: output, gradients and FP8 state, at once or one by one."""
    monkeypatch.setattr(group_state, "has_kernels", lambda *_: at_once)
    k, sizes = 32, [3, 0, 20]
    ends = torch.tensor(sizes).cumsum(0, dtype=torch.int32)
    managers = [Fp8Manager(RECIPES[recipe], amax_group=None) for _ in range(2)]
    states = []
    for manager, gathered in zip(managers, (False, True)):
        sites = [
            LinearSite(f"expert.{e}", k, rows, expert=True, weight_storage="fsdp", param_gather=gathered)
            for e in range(len(sizes))
        ]
        states.append(manager.group([manager.linear(site) for site in sites]))
        manager.materialize(torch.device("cpu"))
    master = torch.empty(len(sizes) * rows, k)
    data = torch.empty(master.shape, dtype=torch.float8_e4m3fn)
    shards = [WeightShard(states[1], data, 0, master.view(-1), torch.bfloat16)]
    weights = WeightShards(shards, None, torch.device("cpu"))
    for step in range(3):
        torch.manual_seed(step)
        master.copy_(torch.randn(master.shape) * (1 + torch.arange(len(master)) // rows)[:, None])
        x, dy = (torch.randn(sum(sizes), width, dtype=torch.bfloat16) for width in (k, rows))
        weights.quantize()
        found = []
        for state, weight in zip(
            states, (master.to(torch.bfloat16), Released(master.shape, torch.bfloat16, torch.device("cpu")))
        ):
            inputs = x.clone().requires_grad_(), nn.Parameter(weight)
            y = grouped_linear(inputs[0], inputs[1], RowGroups.from_ends(ends, len(x)), state)
            assert (state.joint_quantizers(*inputs) is not None) == at_once
            found.append([y.detach(), *torch.autograd.grad(y, inputs, dy)])
        weights.record_amaxes()
        for manager in managers:
            manager.end_step()
        for values, fp8 in zip(*found, strict=True):
            assert torch.equal(values, fp8)
        for name, value in managers[0].state_dict().items():
            assert torch.equal(value, managers[1].state_dict()[name]), (step, name)
