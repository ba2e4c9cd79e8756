"""Codes that torch's hooks bring: the right ones while a block runs, in two places, whoever carries them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import group as groups

from megafp8.data_parallel.fp8_weight_gather import Carrier, Collective, Fp8Weight, gather_codes
from megafp8.data_parallel.fsdp import FullySharded
from megafp8.data_parallel.symmetric_weight_gather import Pulled
from megafp8.distributed.sharding import Init, ParamSpec, set_spec, unsharded
from tests.distributed.test_symmetric_memory import map_files
from tests.world import World

SHAPES = [(7, 16), (4, 8)]  # of a block's weights, the first of which no number of ranks divides


class _Look(torch.autograd.Function):
    """The identity, which looks at codes in forward and in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, look: Any, *weights: Tensor) -> Tensor:
        ctx.look, ctx.shapes = look, [w.shape for w in weights]
        look()
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        ctx.look()
        return grad, None, *(torch.zeros(shape) for shape in ctx.shapes)


class _Layer(nn.Module):
    """Weights of SHAPES and a norm's, as those of a block. `here`: codes as they are handed over."""

    def __init__(self, seen: list[tuple[list[list[int]], int]]) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.zeros(shape)) for shape in SHAPES])
        self.norm = nn.Parameter(torch.ones(3))
        for param in self.parameters():
            set_spec(param, ParamSpec(unsharded("w", tuple(param.shape)), Init("zeros"), True))
        self.here: list[Tensor] = [torch.empty(0)] * len(SHAPES)
        self.seen = seen

    def forward(self, x: Tensor) -> Tensor:
        return _Look.apply(x * self.norm.sum(), self.look, *self.weights)  # type: ignore[no-any-return, no-untyped-call]

    def look(self) -> None:
        self.seen.append(([codes[:, 0].tolist() for codes in self.here], self.here[0].data_ptr()))


def _carrier(name: str, sizes: Sequence[int], folder: str) -> Carrier:
    group = groups.WORLD
    assert group is not None
    if name == "collective":
        return Collective(sizes, group, torch.device("cpu"))
    map_files(group, folder)
    return Pulled(sizes, group, torch.device("cpu"))


def _case(name: str, folder: str) -> tuple[list[Any], list[Any]]:
    """What two layers see in two steps, between which codes change, and what they should."""
    group = groups.WORLD
    assert group is not None
    t, rank = group.size(), group.rank()
    seen: list[tuple[list[list[int]], int]] = []
    layers = [_Layer(seen) for _ in range(3)]
    model = nn.Sequential(*layers)
    sharded = FullySharded(
        [(model, layers)],
        group=group,
        reduce_group=group,
        dtype=torch.float32,
        reduce_dtype=torch.float32,
        device=torch.device("cpu"),
    )
    blocks = []
    for layer, unit in zip(layers, sharded.units):

        def handed(at: int, layer: _Layer = layer) -> Any:
            return lambda codes_nk: layer.here.__setitem__(at, codes_nk)

        matrices = [param for param in unit if sharded.rows[param].of in SHAPES]
        blocks.append([Fp8Weight(sharded.rows[param], torch.uint8, handed(at)) for at, param in enumerate(matrices)])
    carrier = _carrier(name, [weight.nbytes for block in blocks for weight in block], folder)
    gather_codes(blocks, carrier, t, torch.device("cpu"))
    expected = []
    for step in range(2):
        carrier.settle()
        for i, (own, weight) in enumerate(zip(carrier.own, [weight for block in blocks for weight in block])):
            rows = own.view(weight.rows.sent, -1)
            rows.copy_(torch.arange(weight.rows.sent)[:, None] + weight.rows.sent * rank + 10 * i + 100 * step)
        carrier.settle()
        sharded.zero()
        model(torch.ones(2, requires_grad=True)).sum().backward()
        of = [
            [[row + 10 * (2 * b + i) + 100 * step for row in range(n)] for i, (n, _) in enumerate(SHAPES)]
            for b in range(3)
        ]
        expected += [of[b] for b in (0, 1, 2, 2, 1, 0)]
    assert len({place for _, place in seen}) == 2
    return [codes for codes, _ in seen], expected


@pytest.mark.parametrize("name", ["collective", "pulled"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_layer_finds_the_codes_of_all_ranks(world4: World, name: str, ranks: int, tmp_path: Any) -> None:
    for seen, expected in world4.run(_case, name, str(tmp_path), ranks=ranks):
        assert seen == expected
