"""The whole model against its unsharded float64 twin: loss and every gradient, under every tensor layout, every option.

Each rank builds its shard of the model, gives every parameter a random value from the layout-independent streams
(norms and biases too, so that none is trivially one or zero), and compares the loss and each gradient's slice with
autograd through the twin. Gradients that are shares by declaration are summed first.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megafp8.config import ModelConfig, RopeScaling
from megafp8.distributed.collectives import all_reduce
from megafp8.distributed.sharding import Init, ParamShard, shards_of, spec_of
from megafp8.fp8 import Fp8Manager
from megafp8.models.context import BuildContext
from megafp8.models.gpt import GPTStage
from megafp8.models.recompute import BlockMemory
from megafp8.parallel_state import initialize_model_parallel
from megafp8.tensor_parallel.random import fill_
from tests.models.twin import twin_loss
from tests.world import World

LLAMA: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "num_query_groups": 4,
    "ffn_hidden_size": 24,
    "vocab_size": 29,
    "vocab_multiple": 8,
}
GPT2: dict[str, Any] = LLAMA | {
    "position_embedding": "learned",
    "normalization": "layernorm",
    "activation": "gelu_tanh",
    "linear_bias": True,
    "tie_embeddings": True,
}
SCALING = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16)
MODELS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "llama-gqa-rope-scaling": LLAMA | {"num_attention_heads": 8, "rope_scaling": SCALING, "head_dim": 6},
    "llama-tied": LLAMA | {"tie_embeddings": True},
    "gpt2": GPT2,
    "gpt2-untied-gelu": GPT2 | {"tie_embeddings": False, "activation": "gelu"},
    "qwen": LLAMA | {"qkv_bias": True, "qk_norm": True},
    "sliding-window": LLAMA | {"sliding_window": 3},
    "parallel-block": LLAMA | {"parallel_block": True, "position_embedding": "none"},
}
B, S = 2, 8
SELECTIVE = BlockMemory(norms=True, activation=True, attention=True)
MEMORY = {
    "none": None,
    "full": [BlockMemory(full=True)] * 2,
    "first": [BlockMemory(full=True), BlockMemory()],
    "selective": [SELECTIVE] * 2,
}


def _value(piece: ParamShard, seed: int) -> Tensor:
    """Random values for any tensor: around one for norm weights, around zero otherwise."""
    centre = 1.0 if "norm.weight" in piece.name else 0.0
    return centre + fill_(torch.empty(piece.shape, dtype=torch.float64), piece, Init("normal", 0.3), seed)


def _stage(config: ModelConfig, tp: int, sequence_parallel: bool, z_loss: float, recompute: str) -> GPTStage:
    state = initialize_model_parallel(tp)
    context = BuildContext(
        state.tensor.group, Fp8Manager(None, amax_group=None), torch.float64, state.device, sequence_parallel
    )
    stage = GPTStage(
        config, context, layers=range(config.num_layers), positions=S, memory=MEMORY[recompute], z_loss=z_loss
    )
    with torch.no_grad():
        for param in stage.parameters():
            for piece, local in shards_of(param, param):
                local.copy_(_value(piece, seed=5))
    return stage


def _compare(model: dict, tp: int, sequence_parallel: bool, documents: bool, z_loss: float, recompute: str) -> int:
    config = ModelConfig(**model)
    stage = _stage(config, tp, sequence_parallel, z_loss, recompute)
    group = stage.context.tensor
    generator = torch.Generator().manual_seed(11)
    tokens, labels = (torch.randint(config.vocab_size, (B, S), generator=generator) for _ in range(2))
    weight_sb = torch.rand(S, B, dtype=torch.float64, generator=generator)
    document_ids = position_ids = None
    if documents:
        document_ids = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2], [0, 1, 1, 1, 1, 1, 2, 2]])
        position_ids = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 0], [0, 0, 1, 2, 3, 4, 0, 1]])
    loss_sb = stage(None, tokens, labels, position_ids, document_ids)
    (loss_sb * weight_sb).sum().backward()

    pieces = {piece.name: piece for param in stage.parameters() for piece in spec_of(param).shards}
    whole = {
        name: _value(ParamShard(name, p.global_shape, (0,) * len(p.global_shape), p.global_shape), 5).requires_grad_()
        for name, p in pieces.items()
    }
    expected = twin_loss(whole, config, tokens, labels, positions=position_ids, documents=document_ids, z_loss=z_loss)
    (expected.T * weight_sb).sum().backward()
    torch.testing.assert_close(loss_sb, expected.T, rtol=1e-11, atol=1e-11)
    compared = 0
    for param in stage.parameters():
        assert param.grad is not None
        grad = all_reduce(param.grad.clone(), group) if spec_of(param).reduce_over_tp else param.grad
        for piece, local in shards_of(param, grad):
            slices = tuple(slice(o, o + n) for o, n in zip(piece.offset, piece.shape))
            torch.testing.assert_close(
                local, whole[piece.name].grad[slices], rtol=1e-10, atol=1e-11, msg=lambda m, n=piece.name: f"{n}: {m}"
            )
            compared += 1
    assert compared == len(pieces)
    return compared


@pytest.mark.parametrize(("tp", "sequence_parallel"), [(1, False), (2, False), (2, True), (4, True)])
@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients_equal_the_twin(world4: World, name: str, tp: int, sequence_parallel: bool) -> None:
    counts = world4.run(_compare, MODELS[name], tp, sequence_parallel, False, 0.0, "none", ranks=tp)
    assert min(counts) > 10


@pytest.mark.parametrize("recompute", ["first", "selective"])
@pytest.mark.parametrize(("tp", "sequence_parallel"), [(1, False), (2, False), (2, True)])
@pytest.mark.parametrize("name", ["llama", "gpt2", "gpt2-untied-gelu", "qwen", "parallel-block"])
def test_recompute(world4: World, name: str, tp: int, sequence_parallel: bool, recompute: str) -> None:
    world4.run(_compare, MODELS[name], tp, sequence_parallel, False, 0.0, recompute, ranks=tp)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize(("tp", "sequence_parallel"), [(1, False), (2, True)])
def test_document_boundaries_z_loss_and_recompute(world4: World, name: str, tp: int, sequence_parallel: bool) -> None:
    world4.run(_compare, MODELS[name], tp, sequence_parallel, True, 0.01, "full", ranks=tp)
