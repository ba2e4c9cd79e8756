"""The smallest configs of what `python -m tests.compositions` has found."""

from __future__ import annotations

from typing import Any

import pytest

from megafp8.config import ConfigError
from tests.compositions.draw import Composition
from tests.compositions.trial import PASSED, trial
from tests.marks import slow_but
from tests.world import Ranks

MENDED = [
    # A kind of layer that equals another one was left out of the small pattern, and stayed in layer_kinds.
    Composition("gpt", 1, {"model.layer_kinds": {"a": {}, "b": {}}, "model.pattern": ["b", "b", "a"]}),
    # The small decoder had as many blocks as the encoder.
    Composition("t5", 3, {"parallel.pipeline": 3}),
    # Recipes by operand have no capabilities of their own.
    Composition(
        "gpt", 2,
        {"fp8.recipe": "custom", "fp8.custom": [{"layers": "*", "input": "current", "weight": "delayed",
                                                 "grad_output": "current"}]},
    ),
    # Lion took whole steps in the direction of gradients that were zero but for rounding.
    Composition("bert", 2, {"parallel.context": 2, "optimizer.name": "lion", "model.moe": {"num_experts": 8}}),
    Composition("gpt", 2, {"parallel.tensor": 2, "optimizer.name": "lion", "model.hyper_connections": {}}),
    # Without context parallelism there were fewer samples than ranks that hold experts.
    Composition(
        "experts", 4,
        {"parallel.expert_tensor": 2, "parallel.context": 4, "parallel.expert": 2, "fp8.recipe": "blockwise"},
    ),
    # Only one layer has FP8; the small config had none left, or another one.
    Composition("documents", 1, {"fp8.recipe": "current", "fp8.first_blocks_bf16": 1, "fp8.last_blocks_bf16": 2}),
    # There is a section of experts, which no layer has.
    Composition(
        "experts", 2,
        {"parallel.expert": 2, "fp8.recipe": "rowwise", "model.layer_kinds": {"a": {"ffn": {"kind": "mlp"}}},
         "model.pattern": ["a"]},
    ),
    # Offload copied frozen weights, which autograd saves, when FSDP had freed what it gathered: a segmentation fault.
    Composition("gpt", 2, {"parallel.fsdp": True, "parallel.offload": True, "lora": {}}),
    # Halves of an expert have scales of rows of their own.
    Composition("experts", 2, {"parallel.context": 2, "parallel.expert_tensor": 2, "fp8.recipe": "rowwise"}),
    # Micro-batches without tokens of an expert were not counted, and later ones had other noise.
    Composition(
        "documents", 2,
        {"fp8.recipe": "nvfp4", "model.moe": {"num_experts": 6}, "model.pattern": ["a", "a", "b", "b", "c"],
         "model.layer_kinds": {"a": {"norm_position": "both"},
                               "b": {"mixer": {"kind": "none"}, "norm_position": "output"},
                               "c": {"ffn": {"kind": "none"}, "norm_position": "output"}}},
    ),
    # The last stage had nothing to train, and no gradient whose norm it could take; the others waited for it.
    Composition(
        "gpt", 3,
        {"parallel.pipeline": 3, "lora": {}, "model.pattern": ["a", "b"],
         "model.layer_kinds": {"a": {"mixer": {"kind": "kimi_delta_attention", "num_heads": 1}},
                               "b": {"mixer": {"kind": "kimi_delta_attention", "num_heads": 3},
                                     "ffn": {"kind": "none"}}}},
    ),
    # Without context parallelism there were fewer ranks than replicas of shards.
    Composition(
        "gpt", 8,
        {"parallel.pipeline": 2, "parallel.context": 4, "fp8.recipe": "nvfp4", "parallel.fsdp": True,
         "parallel.fsdp_replicas": 4},
    ),
    # The first stage has nothing to train, so no gradient of its output.
    Composition(
        "documents", 2,
        {"parallel.pipeline": 2, "model.latent_attention": {"q_rank": 48, "kv_rank": 8}, "lora": {"targets": ["q_up"]},
         "model.layer_kinds": {"a": {}, "b": {"mixer": {"kind": "mamba2", "num_heads": 2, "num_groups": 2}}},
         "model.pattern": ["b", "b", "a", "a"]},
    ),
    # Scales of experts were given, which a part of the proof keeps out of FP8.
    Composition(
        "experts", 2,
        {"parallel.expert_tensor": 2, "fp8.recipe": "static",
         "fp8.static_amax": {"*.attention.*": 2.0, "*.mlp.*": 2.0}},
    ),
    # Of one chosen key the probability is 1: the gradient of queries is rounding, and so was the scale compared.
    Composition(
        "latent", 2, {"fp8.recipe": "delayed", "model.sparse_attention": {"index_heads": 6, "top_k": 1}}
    ),
    # The residual stream stays as wide as it is, and was to be cut into three heads instead of four.
    Composition(
        "experts", 1,
        {"model.layer_kinds": {"a": {"mixer": {"kind": "gated_delta_net", "num_key_heads": 1, "num_value_heads": 3,
                                               "key_head_dim": 16},
                                     "ffn": {"kind": "mlp", "ffn_hidden_size": 12}},
                               "b": {}, "c": {}},
         "model.pattern": ["c", "b", "a"]},
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    "composition",
    slow_but(MENDED, *MENDED[2:5], MENDED[-9], MENDED[-4], MENDED[-2]),
    ids=lambda x: x.command.partition("compositions/")[2],
)
def test_mended(rank_processes: Ranks, composition: Composition) -> None:
    found = trial(composition, rank_processes, whole=False)
    assert found.failure == PASSED, found.where


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    # Was ignored, and failed under context parallelism.
    ("bert", {"model.attention_chunk": 8}, "model.attention_chunk"),
    # Was a traceback.
    (
        "gpt",
        {"lora": {}, "model.layer_kinds": {"a": {"mixer": {"kind": "latent_attention"}}}, "model.pattern": ["a"]},
        "model.layer_kinds.a.mixer.kind",
    ),
    # A convolution of one token has no state.
    (
        "documents",
        {
            "model.layer_kinds": {"a": {"mixer": {"kind": "short_convolution", "conv_kernel_size": 1}}},
            "model.pattern": ["a"],
        },
        "model.layer_kinds.a.mixer.conv_kernel_size",
    ),
    # Was a traceback; only a window of all layers was refused.
    (
        "gpt",
        {
            "data.prefix_lm": {}, "model.pattern": ["a", "b"],
            "model.layer_kinds": {"a": {}, "b": {"mixer": {"kind": "attention", "sliding_window": 8}}},
        },
        "model.layer_kinds.b.mixer.sliding_window",
    ),
    # Had nothing to train.
    (
        "gpt",
        {
            "model.layer_kinds": {"c": {"mixer": {"kind": "short_convolution"}, "ffn": {"kind": "none"}}},
            "model.pattern": ["c"], "lora": {},
        },
        "lora",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("base", "overrides", "key"), REFUSED)
def test_refused(base: str, overrides: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as error:
        _ = Composition(base, 1, overrides).config
    assert [problem.path for problem in error.value.problems] == [key]
