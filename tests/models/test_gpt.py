"""The whole model against its unsharded float64 twin: loss of each token and every gradient, in every layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megafp8.config import ModelConfig, RopeScaling
from megafp8.data.samples import Batch
from megafp8.fp8 import Fp8Manager
from megafp8.models.context import BuildContext
from megafp8.models.gpt import GPTStage
from megafp8.models.recompute import BlockMemory
from megafp8.parallel_state import initialize_model_parallel
from tests.models.twin import twin_loss
from tests.models.weights import gradients, randomize
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
    "geglu": LLAMA | {"activation": "geglu"},
    "geglu-tanh": LLAMA | {"activation": "geglu_tanh", "linear_bias": True},
    "qwen": LLAMA | {"qkv_bias": True, "qk_norm": True, "attention_sinks": True},
    "sliding-window": LLAMA | {"sliding_window": 3, "full_attention_layers": [1]},
    "parallel-block": LLAMA | {"parallel_block": True, "position_embedding": "none"},
}
B = 2
DOCUMENTS = {  # ids of a sample's tokens, by length; a position counts from the start of its document
    8: [[0, 0, 0, 1, 1, 1, 1, 2], [0, 1, 1, 1, 1, 1, 2, 2]],
    16: [[0] * 5 + [1] * 8 + [2] * 3, [0] + [1] * 15],
}
SELECTIVE = BlockMemory(norms=True, activation=True, attention=True)
MEMORY = {
    "none": None,
    "full": [BlockMemory(full=True)] * 2,
    "first": [BlockMemory(full=True), BlockMemory()],
    "selective": [SELECTIVE] * 2,
}


def _compare(
    model: dict[str, Any], tp: int, sequence_parallel: bool, recompute: str = "none", documents: bool = False,
    z_loss: float = 0.0, cp: int = 1,
) -> int:  # fmt: skip
    config, s = ModelConfig(**model), 8 if cp == 1 else 16
    state = initialize_model_parallel(tp, context_parallel_size=cp)
    context = BuildContext(
        state.tensor.group, Fp8Manager(None, amax_group=None), torch.float64, state.device, sequence_parallel,
        state.context.group if cp > 1 else None,
    )  # fmt: skip
    stage = GPTStage(
        config, context, layers=range(config.num_layers), positions=s, memory=MEMORY[recompute], z_loss=z_loss
    )
    whole = randomize(stage, lambda piece: 0.3)
    generator = torch.Generator().manual_seed(11)
    tokens, labels = (torch.randint(config.vocab_size, (B, s), generator=generator) for _ in range(2))
    weight_bs = torch.rand(B, s, dtype=torch.float64, generator=generator)
    ids = torch.tensor(DOCUMENTS[s]) if documents else None
    starts = [[row.index(i) if i in row else s for i in range(4)] for row in DOCUMENTS[s]]
    cu_seqlens = torch.tensor(starts, dtype=torch.int32) if documents else None
    positions = torch.tensor([[row[:i].count(row[i]) for i in range(s)] for row in DOCUMENTS[s]]) if documents else None
    shard = Batch(tokens, labels, weight_bs, positions, cu_seqlens).shard(state.context.rank, cp)
    loss_sb = stage(None, shard.tokens, shard.labels, shard.position_ids, shard.cu_seqlens)
    (loss_sb * shard.loss_mask.T).sum().backward()

    expected = twin_loss(whole, config, tokens, labels, positions=positions, documents=ids, z_loss=z_loss)
    (expected * weight_bs).sum().backward()
    expected_shard = Batch(tokens, labels, expected.detach(), None, cu_seqlens).shard(state.context.rank, cp).loss_mask
    torch.testing.assert_close(loss_sb.T, expected_shard, rtol=1e-11, atol=1e-11)
    compared = 0
    for name, actual, grad in gradients(stage, whole, state.tensor.group, context.context_parallel):
        torch.testing.assert_close(actual, grad, rtol=1e-10, atol=1e-11, msg=lambda m, n=name: f"{n}: {m}")
        compared += 1
    assert compared == len(whole)
    return compared


@pytest.mark.parametrize(("tp", "sequence_parallel"), [(1, False), (2, False), (2, True), (4, True)])
@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients(world4: World, name: str, tp: int, sequence_parallel: bool) -> None:
    assert min(world4.run(_compare, MODELS[name], tp, sequence_parallel, ranks=tp)) > 10


@pytest.mark.parametrize("recompute", ["first", "selective"])
@pytest.mark.parametrize(("tp", "sequence_parallel"), [(1, False), (2, False), (2, True)])
@pytest.mark.parametrize("name", ["llama", "gpt2", "gpt2-untied-gelu", "geglu", "geglu-tanh", "qwen", "parallel-block"])
def test_recompute(world4: World, name: str, tp: int, sequence_parallel: bool, recompute: str) -> None:
    world4.run(_compare, MODELS[name], tp, sequence_parallel, recompute, ranks=tp)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize(("tp", "sequence_parallel"), [(1, False), (2, True)])
def test_document_boundaries_z_loss_and_recompute(world4: World, name: str, tp: int, sequence_parallel: bool) -> None:
    world4.run(_compare, MODELS[name], tp, sequence_parallel, "full", True, 0.01, ranks=tp)


@pytest.mark.parametrize(("tp", "cp"), [(1, 2), (1, 4), (2, 2)])
@pytest.mark.parametrize("name", ["llama-gqa-rope-scaling", "gpt2", "qwen", "sliding-window"])
def test_context_parallel(world4: World, name: str, tp: int, cp: int) -> None:
    world4.run(_compare, MODELS[name], tp, True, "none", False, 0.0, cp, ranks=tp * cp)


@pytest.mark.parametrize("name", ["llama", "gpt2", "sliding-window"])
def test_context_parallel_with_document_boundaries_and_recompute(world4: World, name: str) -> None:
    world4.run(_compare, MODELS[name], 2, True, "full", True, 0.0, 2, ranks=4)
