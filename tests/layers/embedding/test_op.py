"""The gradient of an embedding, in the gradient buffer or in autograd, against torch's dense gradient in float64."""

from __future__ import annotations

from dataclasses import replace
from typing import cast
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megafp8.fp8 import Fp8Manager
from megafp8.layers.embedding.op import look_up
from megafp8.layers.embedding.vocab_parallel import VocabParallelEmbedding
from megafp8.parallel.data.grad_buffer import main_grad_of
from megafp8.parallel.parallel_state import initialize_model_parallel
from megafp8.parallel.sharding import Init, set_spec, spec_of
from megafp8.parallel.tensor.layers import ColumnParallelLinear
from megafp8.parallel.tensor.random import initialize_parameters
from tests.tiny_model import CPU, make_buffer
from tests.world import World

S, B, H, V = 48, 3, 16, 32
TOKENS = {
    "some often": torch.randint(V, (B, S), generator=torch.Generator().manual_seed(1)) // 3 * 2,
    "all equal": torch.full((B, S), V - 1),
    "all of one rank": torch.randint(V // 4, (B, S), generator=torch.Generator().manual_seed(2)),
}


def gradients(micro_batches: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(micro_batches, S, B, H, generator=torch.Generator().manual_seed(3)).to(dtype)


def dense(tokens_bs: Tensor, dy_sbh: Tensor) -> Tensor:
    """The table's gradient by torch, in float64."""
    table_vh = torch.zeros(V, H, dtype=torch.float64, requires_grad=True)
    F.embedding(tokens_bs.t(), table_vh).backward(dy_sbh.double())
    assert table_vh.grad is not None
    return table_vh.grad


def _buffered_case(tp_size: int, sequence_parallel: bool, which: str, dtype: torch.dtype) -> None:
    tp = initialize_model_parallel(tp_size).tensor
    layer = VocabParallelEmbedding(
        "emb", V, H, group=tp.group, init=Init("normal", 0.5), dtype=dtype, device=CPU,
        sequence_parallel=sequence_parallel,
    )  # fmt: skip
    initialize_parameters(layer, seed=7)
    buffer = make_buffer([layer.weight])
    tokens_bs, dy = TOKENS[which], gradients(2, dtype)
    buffer.start_overlap(micro_batches=len(dy))
    for dy_sbh in dy:
        out = layer(tokens_bs)
        out.backward(dy_sbh.chunk(tp.size)[tp.rank] if sequence_parallel else dy_sbh)
        assert layer.weight.grad is None
    buffer.finish()
    expected_vh = sum(dense(tokens_bs, dy_sbh) for dy_sbh in dy).chunk(tp.size)[tp.rank]  # type: ignore[union-attr]
    torch.testing.assert_close(main_grad_of(layer.weight).double(), expected_vh, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("which", TOKENS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("tp", "sequence_parallel"), [(1, False), (2, False), (4, True)])
def test_rows_are_added_to_the_buffer(
    world4: World, tp: int, sequence_parallel: bool, which: str, dtype: torch.dtype
) -> None:
    """Nothing is rounded to bf16: half a step of that would be a thousand times the tolerance."""
    world4.run(_buffered_case, tp, sequence_parallel, which, dtype, ranks=tp)


def _tied(tp_size: int) -> None:
    """Two uses of one weight: the bucket is reduced after both, and not before."""
    tp = initialize_model_parallel(tp_size).tensor
    common = {"group": tp.group, "init": Init("normal", 0.5), "dtype": torch.float32, "device": CPU}
    embedding = VocabParallelEmbedding("emb", V, H, **common)  # type: ignore[arg-type]
    weight = set_spec(embedding.weight, replace(spec_of(embedding.weight), num_uses=2))
    head = ColumnParallelLinear("out", H, V, fp8=Fp8Manager(None, amax_group=None), weight=weight, **common)  # type: ignore[arg-type]
    initialize_parameters(embedding, seed=7)
    buffer = make_buffer([weight])
    with mock.patch.object(buffer, "_start_next", wraps=buffer._start_next) as reduced:
        buffer.start_overlap()
        middle_sbh = embedding(TOKENS["some often"])
        leaf_sbh = middle_sbh.detach().requires_grad_()
        dlogits_sbv = torch.randn(S, B, V, generator=torch.Generator().manual_seed(4)).chunk(tp.size, -1)[tp.rank]
        cast(Tensor, head(leaf_sbh)).backward(dlogits_sbv)
        reduced.assert_not_called()
        middle_sbh.backward(leaf_sbh.grad)
        reduced.assert_called_once()
    assert weight.grad is None
    assert leaf_sbh.grad is not None
    of_output_vh = dlogits_sbv.flatten(0, 1).double().t() @ leaf_sbh.detach().flatten(0, 1).double()
    expected_vh = dense(TOKENS["some often"], leaf_sbh.grad).chunk(tp.size)[tp.rank] + of_output_vh
    torch.testing.assert_close(main_grad_of(weight).double(), expected_vh, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("tp", [1, 2])
def test_a_tied_weight_counts_two_gradients(world4: World, tp: int) -> None:
    world4.run(_tied, tp, ranks=tp)


def table(dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(torch.randn(V, H, generator=torch.Generator().manual_seed(5)).to(dtype))


@pytest.mark.parametrize("grad_dtype", [torch.bfloat16, torch.float32], ids=str)
def test_without_a_buffer_autograd_gets_it_in_grad_dtype(grad_dtype: torch.dtype) -> None:
    weight_vh, tokens_bs, (dy_sbh,) = table(torch.bfloat16), TOKENS["some often"], gradients(1, torch.bfloat16)
    weight_vh.grad_dtype = grad_dtype
    look_up(weight_vh, tokens_bs.t(), partial=False).backward(dy_sbh)
    assert weight_vh.grad is not None
    assert weight_vh.grad.dtype == grad_dtype
    rounding = torch.finfo(grad_dtype).eps
    torch.testing.assert_close(
        weight_vh.grad.double(), dense(tokens_bs, dy_sbh), rtol=rounding, atol=32 * torch.finfo(torch.float32).eps
    )


def test_rows_that_were_not_looked_up_are_unchanged() -> None:
    weight_vh = table(torch.float32)
    make_buffer([weight_vh])
    before_vh = main_grad_of(weight_vh).normal_(generator=torch.Generator().manual_seed(6)).clone()
    look_up(weight_vh, torch.tensor([[4], [-1], [V], [4]]), partial=True).sum().backward()
    changed = torch.tensor([row == 4 for row in range(V)])
    assert torch.equal(main_grad_of(weight_vh)[~changed], before_vh[~changed])
    assert torch.equal(main_grad_of(weight_vh)[changed], before_vh[changed] + 2.0)


def test_a_token_outside_the_whole_table_is_an_error() -> None:
    with pytest.raises(IndexError):
        look_up(table(torch.float32), torch.tensor([[V]]), partial=False)


def test_the_layout_of_the_gradient_does_not_matter() -> None:
    """As that of a view of the output, or one element expanded."""
    found = []
    for lay in (lambda dy: dy, lambda dy: dy.transpose(0, 1).contiguous().transpose(0, 1)):
        weight_vh = table(torch.float32)
        make_buffer([weight_vh])
        look_up(weight_vh, TOKENS["some often"].t(), partial=False).backward(lay(gradients(1, torch.float32)[0]))
        found.append(main_grad_of(weight_vh))
    assert torch.equal(*found)
