"""LoRA on sharded layers against float64 code on whole weights: outputs and the gradients of A, B and x."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megafp8.fp8 import Fp8Manager
from megafp8.parallel.collectives import all_reduce
from megafp8.parallel.parallel_state import initialize_model_parallel
from megafp8.parallel.sharding import Init, shards_of, spec_of
from megafp8.parallel.tensor.layers import ColumnParallelLinear, RowParallelLinear
from megafp8.parallel.tensor.lora import Lora, freeze
from tests.models.weights import randomize
from tests.world import World

S, SAMPLES, K = 8, 2, 12
PARTS = {"layers.0.attention.q": 16, "layers.0.attention.k": 8, "layers.0.attention.v": 8}
DOWN = "layers.0.mlp.down"
LORA = Lora(3, 6.0, frozenset(["q", "v", "down"]))


def _compare(tp: int, sequence_parallel: bool) -> int:
    """The number of gradients that were compared."""
    state = initialize_model_parallel(tp)
    group, rank = state.tensor.group, state.tensor.rank
    common: dict[str, Any] = {
        "group": group, "fp8": Fp8Manager(None, amax_group=None), "init": Init("zeros"), "dtype": torch.float64,
        "device": torch.device("cpu"), "sequence_parallel": sequence_parallel, "lora": LORA,
    }  # fmt: skip
    n = sum(PARTS.values())
    column = ColumnParallelLinear("layers.0.attention.qkv", K, n, parts=PARTS, **common)
    row = RowParallelLinear(DOWN, n, K, **common)
    layers = torch.nn.ModuleList([column, row])
    whole = randomize(layers, lambda piece: 0.4)
    freeze(layers)
    generator = torch.Generator().manual_seed(1)
    x, dy = (torch.randn(S, SAMPLES, K, dtype=torch.float64, generator=generator) for _ in range(2))
    own = (lambda y: y.chunk(tp)[rank]) if sequence_parallel else (lambda y: y)
    own_x = own(x).clone().requires_grad_()
    found = row(torch.tanh(column(own_x)))
    found.backward(own(dy))

    def merged(name: str) -> Tensor:
        if f"{name}.lora_a" not in whole:
            return whole[f"{name}.weight"]
        return whole[f"{name}.weight"] + 6.0 / 3 * whole[f"{name}.lora_b"] @ whole[f"{name}.lora_a"]

    whole_x = x.clone().requires_grad_()
    parts = [whole_x @ merged(name).t() for name in PARTS]
    if tp > 1:  # a rank has a slice of each part in order, and so has the row-parallel layer of its inputs
        parts = [torch.cat([p.chunk(tp, -1)[r] for p in parts], -1) for r in range(tp)]
    expected = torch.tanh(torch.cat(parts, -1)) @ merged(DOWN).t()
    expected.backward(dy)
    torch.testing.assert_close(found, own(expected), rtol=1e-11, atol=1e-11)
    assert whole_x.grad is not None
    torch.testing.assert_close(own_x.grad, own(whole_x.grad), rtol=1e-10, atol=1e-11)
    compared = 0
    for param in layers.parameters():
        names = [piece.name for piece in spec_of(param).shards]
        if not param.requires_grad:
            assert param.grad is None, names
            continue
        assert param.grad is not None, names
        grad = all_reduce(param.grad.clone(), group) if spec_of(param).reduce_over_tp else param.grad
        for piece, local in shards_of(param, grad):
            of_whole = whole[piece.name].grad
            assert of_whole is not None
            where = tuple(slice(o, o + m) for o, m in zip(piece.offset, piece.shape))
            torch.testing.assert_close(local, of_whole[where], rtol=1e-10, atol=1e-11)
            compared += 1
    return compared


@pytest.mark.parametrize(("tp", "sequence_parallel"), [(1, False), (2, False), (2, True), (4, True)])
def test_outputs_and_gradients(world4: World, tp: int, sequence_parallel: bool) -> None:
    assert world4.run(_compare, tp, sequence_parallel, ranks=tp) == [6] * tp
