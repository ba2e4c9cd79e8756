"""The whole model with its sequences cut over ranks against the float64 twin: loss of each token, every gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megafp8.config import ModelConfig
from megafp8.context_parallel.split import shard_sequence
from megafp8.data.samples import Batch
from megafp8.distributed.collectives import all_reduce
from megafp8.distributed.sharding import ParamShard, shards_of, spec_of
from megafp8.fp8 import Fp8Manager
from megafp8.models.context import BuildContext
from megafp8.models.gpt import GPTStage
from megafp8.parallel_state import initialize_model_parallel
from tests.models.test_gpt import MEMORY, MODELS, B, _value
from tests.models.twin import twin_loss
from tests.world import World

S = 16


def _compare(model: dict[str, Any], tp: int, cp: int, documents: bool, recompute: str) -> None:
    config = ModelConfig(**model)
    state = initialize_model_parallel(tp, context_parallel_size=cp)
    manager = Fp8Manager(None, amax_group=None)
    context = BuildContext(state.tensor.group, manager, torch.float64, state.device, True, state.context.group)
    stage = GPTStage(config, context, layers=range(config.num_layers), positions=S, memory=MEMORY[recompute])
    with torch.no_grad():
        for param in stage.parameters():
            for piece, local in shards_of(param, param):
                local.copy_(_value(piece, seed=5))

    generator = torch.Generator().manual_seed(11)
    tokens, labels = (torch.randint(config.vocab_size, (B, S), generator=generator) for _ in range(2))
    weight_bs = torch.rand(B, S, dtype=torch.float64, generator=generator)
    ids = positions = None
    if documents:
        ids = torch.tensor([[0] * 5 + [1] * 8 + [2] * 3, [0] + [1] * 15])
        positions = torch.tensor([[*range(5), *range(8), *range(3)], [0, *range(15)]])
    shard = Batch(tokens, labels, weight_bs, positions, ids).shard(state.context.rank, cp)
    loss_sb = stage(None, shard.tokens, shard.labels, shard.position_ids, shard.document_ids)
    (loss_sb * shard.loss_mask.T).sum().backward()

    pieces = {piece.name: piece for param in stage.parameters() for piece in spec_of(param).shards}
    whole = {
        name: _value(ParamShard(name, p.global_shape, (0,) * len(p.global_shape), p.global_shape), 5).requires_grad_()
        for name, p in pieces.items()
    }
    expected = twin_loss(whole, config, tokens, labels, positions=positions, documents=ids)
    (expected * weight_bs).sum().backward()
    torch.testing.assert_close(
        loss_sb.T, shard_sequence(expected, state.context.rank, cp, dim=1), rtol=1e-11, atol=1e-11
    )
    for param in stage.parameters():
        assert param.grad is not None
        grad = all_reduce(param.grad.clone(), state.context.group)
        if spec_of(param).reduce_over_tp:
            all_reduce(grad, state.tensor.group)
        for piece, local in shards_of(param, grad):
            slices = tuple(slice(o, o + n) for o, n in zip(piece.offset, piece.shape))
            theirs = whole[piece.name].grad[slices]
            torch.testing.assert_close(local, theirs, rtol=1e-10, atol=1e-11, msg=lambda m, n=piece.name: f"{n}: {m}")


@pytest.mark.parametrize(("tp", "cp"), [(1, 2), (1, 4), (2, 2)])
@pytest.mark.parametrize("name", ["llama-gqa-rope-scaling", "gpt2", "qwen", "sliding-window"])
def test_loss_and_gradients_equal_the_twin(world4: World, name: str, tp: int, cp: int) -> None:
    world4.run(_compare, MODELS[name], tp, cp, False, "none", ranks=tp * cp)


@pytest.mark.parametrize("name", ["llama", "gpt2", "sliding-window"])
def test_document_boundaries_and_recompute(world4: World, name: str) -> None:
    world4.run(_compare, MODELS[name], 2, 2, True, "full", ranks=4)
