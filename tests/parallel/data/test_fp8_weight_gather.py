"""FP8 data gathered through torch's FSDP hooks: the right ones while a block runs, in two buffers, by any transport."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import group as groups

from megafp8.parallel.data.buckets import Slot
from megafp8.parallel.data.fp8_weight_gather import (
    CollectiveTransport,
    Fp8WeightGather,
    GatheredWeight,
    SymmetricTransport,
)
from megafp8.parallel.data.fsdp import ShardedStages, ShardGroups, Unit
from megafp8.parallel.symmetric_memory import offsets
from tests.parallel.test_symmetric_memory import map_files
from tests.tiny_model import CPU, set_specs
from tests.world import World

SHAPES = [(7, 16), (4, 8)]  # of a block's weights, the first of which no number of ranks divides


class _Observe(torch.autograd.Function):
    """The identity, which calls a function in forward and in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, observe: Any, *weights: Tensor) -> Tensor:
        ctx.observe, ctx.shapes = observe, [w.shape for w in weights]
        observe()
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        ctx.observe()
        return grad, None, *(torch.zeros(shape) for shape in ctx.shapes)


class _Layer(nn.Module):
    """Weights of SHAPES and a norm's. `gathered`: their FP8 data, whose columns and address are noted in `seen`."""

    def __init__(self, seen: list[tuple[list[list[int]], int]]) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.zeros(shape)) for shape in SHAPES])
        self.norm = nn.Parameter(torch.ones(3))
        set_specs(self)
        self.gathered: list[Tensor] = [torch.empty(0)] * len(SHAPES)
        self.seen = seen

    def forward(self, x: Tensor) -> Tensor:
        return _Observe.apply(x * self.norm.sum(), self.observe, *self.weights)  # type: ignore[no-any-return, no-untyped-call]

    def observe(self) -> None:
        self.seen.append(([data[:, 0].tolist() for data in self.gathered], self.gathered[0].data_ptr()))


def _case(name: str, folder: str, late: bool) -> tuple[list[Any], list[Any]]:
    """Return what three layers see in two steps, between which the data change, and what they should see.

    `late`: a block's data comes, as from replicas, once the block is gathered."""
    group = groups.WORLD
    assert group is not None
    seen: list[tuple[list[list[int]], int]] = []
    layers = [_Layer(seen) for _ in range(3)]
    model = nn.Sequential(*layers)
    stage = [Unit(module, ShardGroups(group, group)) for module in (*layers, model)]
    sharded = ShardedStages([stage], dtype=torch.float32, reduce_dtype=torch.float32, device=CPU)
    blocks = []
    for layer, (_, unit) in zip(layers, sharded.units):

        def set_gathered(i: int, layer: _Layer = layer) -> Any:
            return lambda data_nk: layer.gathered.__setitem__(i, data_nk)

        shards = [sharded.row_shards[param] for param in unit]
        matrices = [shard for shard in shards if shard.global_shape in SHAPES]
        blocks.append([GatheredWeight(shard, torch.uint8, set_gathered(i)) for i, shard in enumerate(matrices)])
    weights = [weight for block in blocks for weight in block]
    map_files(group, folder)
    starts = offsets([w.nbytes for w in weights])
    slots = [Slot(start, start + w.nbytes) for start, w in zip(starts, weights)]
    transport = {"collective": CollectiveTransport, "symmetric": SymmetricTransport}[name](
        slots, starts[-1], group, CPU
    )
    step, missing = 0, set[int]()

    def arrive(block: int) -> bool:
        if block not in missing:
            return False
        missing.remove(block)
        for i in (2 * block, 2 * block + 1):
            m = weights[i].rows.padded_rows
            values = torch.arange(m)[:, None] + m * group.rank() + 10 * i + 100 * step
            gather.shards[i].view(m, -1).copy_(values)
        return True

    gather = Fp8WeightGather(blocks, transport, group.size(), CPU, [partial(arrive, block) for block in range(3)])
    expected = []
    for step in range(2):
        gather.synchronize()
        missing |= {0, 1, 2}
        if not late:
            gather.arrive()
        gather.synchronize()
        sharded.clear()
        model(torch.ones(2, requires_grad=True)).sum().backward()
        of = [
            [[row + 10 * (2 * b + i) + 100 * step for row in range(n)] for i, (n, _) in enumerate(SHAPES)]
            for b in range(3)
        ]
        expected += [of[b] for b in (0, 1, 2, 2, 1, 0)]
    assert len({address for _, address in seen}) == 2
    return [data for data, _ in seen], expected


@pytest.mark.parametrize("name", ["collective", "symmetric"])
@pytest.mark.parametrize(("ranks", "late"), [(2, True), (3, False)])
def test_a_layer_finds_the_data_of_all_ranks(world4: World, name: str, ranks: int, late: bool, tmp_path: Any) -> None:
    for seen, expected in world4.run(_case, name, str(tmp_path), late, ranks=ranks):
        assert seen == expected
