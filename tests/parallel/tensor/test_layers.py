"""Each parallel layer against its unsharded torch twin in float64: outputs and every gradient, on real ranks.

A case runs on all ranks of a tensor-parallel group: it makes the sharded layer, runs it on this rank's part of the
input with this rank's part of the output gradient, and compares with the slice of what plain torch computes from the
whole weight. Gradients that the layer declares to be shares (`reduce_over_tp`) are summed first, as the optimizer does.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megafp8.fp8 import Fp8Manager
from megafp8.layers.embedding.vocab_parallel import VocabParallelEmbedding
from megafp8.parallel.collectives import all_reduce
from megafp8.parallel.parallel_state import Group, initialize_model_parallel
from megafp8.parallel.sharding import Init, ParamShard, spec_of
from megafp8.parallel.tensor.layers import ColumnParallelLinear, RowParallelLinear
from megafp8.parallel.tensor.random import fill_, initialize_parameters
from tests.parallel.chunks import InChunks
from tests.world import World

S, B, K, N, V = 8, 3, 16, 24, 32
CLOSE = {"rtol": 1e-12, "atol": 1e-12}
INIT = Init("normal", 0.5)


def setup_module_case(tp: int) -> tuple[Group, dict]:
    state = initialize_model_parallel(tp)
    common = {"group": state.tensor.group, "dtype": torch.float64, "device": torch.device("cpu")}
    return state.tensor, common


def truth(name: str, shape: tuple[int, ...]) -> Tensor:
    """The whole tensor `name` as one rank alone would initialise it."""
    piece = ParamShard(name, shape, (0,) * len(shape), shape)
    return fill_(torch.empty(shape, dtype=torch.float64), piece, INIT, seed=7).requires_grad_()


def part(x: Tensor, tp: Group, dim: int) -> Tensor:
    return x.chunk(tp.size, dim)[tp.rank]


def assert_gradient(param: nn.Parameter, expected: Tensor, tp: Group) -> None:
    """`param.grad` is its slice of the twin's gradient."""
    spec = spec_of(param)
    assert param.grad is not None
    grad = all_reduce(param.grad.clone(), tp.group) if spec.reduce_over_tp else param.grad
    slices = [
        expected[tuple(slice(o, o + n) for o, n in zip(piece.offset, piece.shape))]
        for piece in spec.shards
        if piece.global_shape == tuple(expected.shape)
    ]
    torch.testing.assert_close(grad, torch.cat(slices), **CLOSE)


def _column(tp_size: int, sequence_parallel: bool, skip: bool, chunked: bool = False) -> None:
    tp, common = setup_module_case(tp_size)
    common["tp_overlap"] = InChunks(tp.group) if chunked else None
    fp8 = Fp8Manager(None, amax_group=None)
    layer = ColumnParallelLinear(
        "lin", K, N, fp8=fp8, init=INIT, bias=True, sequence_parallel=sequence_parallel, skip_bias_add=skip, **common
    )
    initialize_parameters(layer, seed=7)
    weight, bias = truth("lin.weight", (N, K)), torch.randn(N, dtype=torch.float64, requires_grad=True)
    with torch.no_grad():
        layer.bias.copy_(part(bias, tp, 0))
    x, dy = (torch.randn(S, B, d, dtype=torch.float64) for d in (K, N))
    whole_x = x.clone().requires_grad_()
    y = F.linear(whole_x, weight, bias)
    y.backward(dy)

    own_x = (part(x, tp, 0) if sequence_parallel else x).clone().requires_grad_()
    out = layer(own_x)
    if skip:
        out = out[0] + out[1]
    torch.testing.assert_close(out, part(y, tp, 2), **CLOSE)
    out.backward(part(dy, tp, 2))
    torch.testing.assert_close(own_x.grad, part(whole_x.grad, tp, 0) if sequence_parallel else whole_x.grad, **CLOSE)
    assert torch.equal(layer.weight, part(weight, tp, 0))
    assert_gradient(layer.weight, weight.grad, tp)
    assert_gradient(layer.bias, bias.grad, tp)


@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize(("tp", "sequence_parallel"), [(1, False), (2, False), (2, True), (4, True)])
def test_column_parallel(world4: World, tp: int, sequence_parallel: bool, skip: bool) -> None:
    world4.run(_column, tp, sequence_parallel, skip, ranks=tp)


@pytest.mark.parametrize("tp", [2, 4])
def test_chunks_of_a_column_parallel_product(world4: World, tp: int) -> None:
    world4.run(_column, tp, True, skip=False, chunked=True, ranks=tp)


def _fused(tp_size: int) -> None:
    """Three projections in one weight: each keeps its own global tensor, cut on its own."""
    tp, common = setup_module_case(tp_size)
    parts = {"a.q": 16, "a.k": 8, "a.v": 8}
    layer = ColumnParallelLinear(
        "a.qkv", K, 32, fp8=Fp8Manager(None, amax_group=None), init=INIT, parts=parts, **common
    )
    initialize_parameters(layer, seed=7)
    weights = [truth(f"{name}.weight", (n, K)) for name, n in parts.items()]
    x = torch.randn(S, B, K, dtype=torch.float64)
    expected = [part(F.linear(x, w), tp, 2) for w in weights]
    out = layer(x)
    torch.testing.assert_close(out, torch.cat(expected, -1), **CLOSE)
    sum(
        (i + 1) * y.square().sum() for i, y in enumerate(out.split([n // tp.size for n in parts.values()], -1))
    ).backward()
    sum((i + 1) * F.linear(x, w).square().sum() for i, w in enumerate(weights)).backward()
    torch.testing.assert_close(layer.weight.grad, torch.cat([part(w.grad, tp, 0) for w in weights]), **CLOSE)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_fused_projections(world4: World, tp: int) -> None:
    world4.run(_fused, tp, ranks=tp)


def _row(tp_size: int, sequence_parallel: bool, chunked: bool = False) -> None:
    tp, common = setup_module_case(tp_size)
    common["tp_overlap"] = InChunks(tp.group) if chunked else None
    layer = RowParallelLinear(
        "row", K, N, fp8=Fp8Manager(None, amax_group=None), init=INIT, bias=True, sequence_parallel=sequence_parallel,
        **common,
    )  # fmt: skip
    initialize_parameters(layer, seed=7)
    weight, bias = truth("row.weight", (N, K)), torch.randn(N, dtype=torch.float64, requires_grad=True)
    with torch.no_grad():
        layer.bias.copy_(bias)
    x, dy = (torch.randn(S, B, d, dtype=torch.float64) for d in (K, N))
    whole_x = x.clone().requires_grad_()
    y = F.linear(whole_x, weight, bias)
    y.backward(dy)

    own_x = part(x, tp, 2).clone().requires_grad_()
    out = layer(own_x)
    torch.testing.assert_close(out, part(y, tp, 0) if sequence_parallel else y, **CLOSE)
    out.backward(part(dy, tp, 0) if sequence_parallel else dy)
    torch.testing.assert_close(own_x.grad, part(whole_x.grad, tp, 2), **CLOSE)
    assert torch.equal(layer.weight, part(weight, tp, 1))
    assert_gradient(layer.weight, weight.grad, tp)
    assert_gradient(layer.bias, bias.grad, tp)


@pytest.mark.parametrize(("tp", "sequence_parallel"), [(1, False), (2, False), (2, True), (4, True)])
def test_row_parallel(world4: World, tp: int, sequence_parallel: bool) -> None:
    world4.run(_row, tp, sequence_parallel, ranks=tp)


@pytest.mark.parametrize("tp", [2, 4])
def test_chunks_of_a_row_parallel_product(world4: World, tp: int) -> None:
    world4.run(_row, tp, True, chunked=True, ranks=tp)


def _embedding(tp_size: int, sequence_parallel: bool) -> None:
    tp, common = setup_module_case(tp_size)
    layer = VocabParallelEmbedding("emb", V, K, init=INIT, sequence_parallel=sequence_parallel, **common)
    initialize_parameters(layer, seed=7)
    weight = truth("emb.weight", (V, K))
    tokens = torch.randint(V, (B, S))
    dy = torch.randn(S, B, K, dtype=torch.float64)
    y = F.embedding(tokens, weight).transpose(0, 1)
    y.backward(dy)
    out = layer(tokens)
    torch.testing.assert_close(out, part(y, tp, 0) if sequence_parallel else y, rtol=0, atol=0)
    out.backward(part(dy, tp, 0) if sequence_parallel else dy)
    assert_gradient(layer.weight, weight.grad, tp)


@pytest.mark.parametrize(("tp", "sequence_parallel"), [(1, False), (2, False), (2, True), (4, True)])
def test_vocab_parallel_embedding(world4: World, tp: int, sequence_parallel: bool) -> None:
    world4.run(_embedding, tp, sequence_parallel, ranks=tp)
