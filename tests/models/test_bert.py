"""BERT against its unsharded float64 twin: losses and every gradient, in every layout."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from megafp8.batch import Batch
from megafp8.config.schema import ModelConfig
from megafp8.fp8 import Fp8Manager
from megafp8.layers.context import BuildContext
from megafp8.layers.recompute import BlockMemory
from megafp8.models.gpt import GPTStage
from megafp8.parallel.parallel_state import initialize_model_parallel
from tests.marks import slow_but
from tests.models.encoder_twin import bert_loss
from tests.models.twin import Dropouts
from tests.models.weights import gradients, randomize
from tests.world import World

BERT: dict[str, Any] = {
    "architecture": "bert", "num_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "ffn_hidden_size": 24,
    "vocab_size": 29, "vocab_multiple": 8, "position_embedding": "learned", "normalization": "layernorm",
    "norm_position": "post", "embedding_norm": True, "norm_eps": 1e-12, "activation": "gelu", "linear_bias": True,
    "tie_embeddings": True, "token_types": 2, "binary_head": True,
}  # fmt: skip
MODELS = {
    "bert": BERT | {"hidden_dropout": 0.2, "attention_dropout": 0.3},
    "megatron": BERT
    | {"norm_position": "pre", "embedding_norm": False, "activation": "gelu_tanh", "tie_embeddings": False}
    | {"transform_activation": "gelu"},
    "roberta": BERT | {"token_types": 0, "binary_head": False},
}
SEED, SAMPLES = 42, [5, 2**32 + 7]
B, LENGTHS = 2, {8: [5, 8], 16: [11, 16]}
MEMORY = {"none": None, "full": BlockMemory(full=True), "selective": BlockMemory(False, True, True, True)}


def _compare(model: dict[str, Any], tp: int, cp: int, sequence_parallel: bool, recompute: str) -> int:
    config, s = ModelConfig(**model), 8 if cp == 1 else 16
    state = initialize_model_parallel(tp, context_parallel_size=cp)
    context = BuildContext(
        state.tensor.group, Fp8Manager(None, amax_group=None), torch.float64, state.device,
        sequence_parallel=sequence_parallel, context_parallel=state.context.group if cp > 1 else None, seed=SEED,
    )  # fmt: skip
    memory = MEMORY[recompute]
    stage = GPTStage(config.spec, context, layers=config.spec.indices, positions=s, memory=memory and [memory] * 2)
    whole = randomize(stage, lambda piece: 0.3)
    generator = torch.Generator().manual_seed(11)
    tokens, labels = (torch.randint(config.vocab_size, (B, s), generator=generator) for _ in range(2))
    types, swapped = torch.arange(s).expand(B, s) // 5 % 2, torch.tensor([1, 0])
    weight = torch.rand(B, s, dtype=torch.float64, generator=generator)
    ends = torch.tensor([[0, n, s] for n in LENGTHS[s]]).int()
    batch = Batch(
        tokens, labels, weight, position_ids=None, cu_seqlens=ends, samples=torch.tensor(SAMPLES), token_types=types
    )
    if config.binary_head:
        first = (torch.arange(s) == 0).expand(B, s)
        more = torch.cat([weight, first * torch.tensor([[0.7], [0.3]])])
        batch = replace(batch, labels=torch.cat([labels, first * swapped[:, None]]), loss_mask=more)
    shard = batch.shard(state.context.rank, cp)
    found = stage(None, shard).cross_entropy
    (found * shard.loss_mask.T).sum().backward()

    dropouts = Dropouts(config, SEED, SAMPLES)
    loss, of_samples = bert_loss(whole, config, tokens, types, LENGTHS[s], labels, swapped, dropouts)
    ((loss * weight).sum() + (of_samples * torch.tensor([0.7, 0.3])).sum()).backward()
    expected = replace(batch, loss_mask=loss.detach().repeat(len(batch.labels) // B, 1)).shard(state.context.rank, cp)
    torch.testing.assert_close(found[:, :B].T, expected.loss_mask[:B], rtol=1e-11, atol=1e-11)
    if config.binary_head and state.tensor.is_first and state.context.rank == 0:
        torch.testing.assert_close(found[0, B:], of_samples, rtol=1e-11, atol=1e-11)
    compared = 0
    for name, actual, grad in gradients(stage, whole, state.tensor.group, context.context_parallel):
        torch.testing.assert_close(actual, grad, rtol=1e-10, atol=1e-11, msg=lambda m, n=name: f"{n}: {m}")
        compared += 1
    assert compared == len(whole)
    return compared


CASES = [
    *((name, 1, 1, False, "none") for name in MODELS),
    ("bert", 2, 1, True, "none"), ("bert", 2, 1, False, "full"), ("bert", 2, 2, True, "none"),
    ("megatron", 2, 1, True, "selective"), ("megatron", 1, 2, False, "full"), ("roberta", 4, 1, True, "selective"),
    ("bert", 1, 4, False, "selective"), ("bert", 2, 1, True, "selective"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "tp", "cp", "sequence_parallel", "recompute"), slow_but(CASES, *CASES[:2], *CASES[3:5], CASES[6])
)
def test_loss_and_gradients(
    world4: World, name: str, tp: int, cp: int, sequence_parallel: bool, recompute: str
) -> None:
    assert (
        min(
            world4.run(
                _compare,
                MODELS[name],
                tp,
                cp=cp,
                sequence_parallel=sequence_parallel,
                recompute=recompute,
                ranks=tp * cp,
            )
        )
        > 30
    )
