"""Training of encoders on text, and what is refused of their configs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from megafp8.config import Config, ConfigError, check_layout
from megafp8.data.indexed_dataset import IndexedDataset
from megafp8.training.inputs import open_inputs
from tests.quickstart_data import VOCABULARY, QuickstartData
from tests.training.presets import BERT_MODEL, T5_MODEL, merged
from tests.training.runs import start, text_batches
from tests.world import World

IDS = {"cls": VOCABULARY, "sep": VOCABULARY + 1, "mask": VOCABULARY + 2, "pad": VOCABULARY + 3}
MASKED_LM = {
    "model": {
        **BERT_MODEL,
        "binary_head": False,
        "token_types": 0,
        "norm_position": "pre",
        "embedding_norm": False,
        "position_embedding": "rope",
    },
    "data": {"special_tokens": IDS},
}
SPANS = {
    "model": {
        **T5_MODEL,
        "num_layers": 1,
        "num_decoder_layers": 1,
        "relative_attention_num_buckets": 32,
        "relative_attention_max_distance": 128,
    },
    "data": {"special_tokens": {"pad": VOCABULARY}},
    "training": {"decoder_seq_length": 16, "steps": 200},
}
SMALL: dict[str, dict[str, Any]] = {
    "model": {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 8, "ffn_hidden_size": 256, "init_std": 0.05},
    "training": {"steps": 500, "seq_length": 64, "micro_batch_size": 16, "global_batch_size": 16, "precision": "fp32"},
    "optimizer": {"learning_rate": 3e-3, "warmup_steps": 40, "schedule": "linear", "weight_decay": 0.01},
}


def _config(data: QuickstartData, *sections: Any) -> Config:
    more = {"model": {"vocab_size": VOCABULARY + 8}}
    return Config.model_validate({"name": "test", "device": "cpu", **merged(SMALL, data.sections, *sections, more)})


def _train(config: Config) -> list[float]:
    trainer, parallel = start(config)
    steps = range(config.training.steps)
    return [trainer.train_step(step, text_batches(step, config, parallel))[0].mean for step in steps]


def _entropy(data: QuickstartData) -> float:
    """Of the distribution of single tokens, in nats: what a model without context can reach."""
    counts = np.bincount(IndexedDataset(data.folder / "stdlib").tokens)
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("sections", [MASKED_LM, SPANS], ids=["masked-lm", "span-corruption"])
def test_what_a_model_learns_from_context(
    world2: World, quickstart_data: QuickstartData, sections: dict[str, Any]
) -> None:
    losses = world2.run(_train, _config(quickstart_data, sections), ranks=1, timeout=580)[0]
    assert losses[0] > _entropy(quickstart_data)
    assert torch.tensor(losses[-20:]).mean() < 0.9 * _entropy(quickstart_data)


MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"model": {"architecture": "gpt"}}, "model.binary_head = True: model.architecture is gpt"),
    ({"model": {"token_types": 1}}, "model.token_types = 1: model.binary_head is true"),
    ({"model": {"mtp_num_layers": 1}}, "model.mtp_num_layers = 1: model.architecture is bert"),
    ({"model": {"parallel_block": True}}, "model.parallel_block = True: model.norm_position is post"),
    ({"model": {"position_embedding": "alibi"}}, "model.position_embedding = 'alibi': model.architecture is bert"),
    ({"data": {"packing": "concatenate"}}, "data.packing = 'concatenate': model.binary_head is true"),
    ({"data": {"reset_at_documents": True}}, "data.reset_at_documents = True: model.architecture is bert"),
]


T5_MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"model": {"position_embedding": "rope"}}, "model.position_embedding = 'rope': model.architecture is t5"),
    ({"model": {"qk_norm": True}}, "model.qk_norm = True: model.architecture is t5"),
    (
        {"model": {"relative_attention_num_buckets": 6}},
        "model.relative_attention_num_buckets = 6: each direction has half",
    ),
    ({"training": {"decoder_seq_length": 9}}, "training.decoder_seq_length = 9: a sample of 64 tokens has 10 in 3"),
    ({"parallel": {"context": 2}}, "parallel.context = 2: model.architecture is t5"),
    ({"parallel": {"offload": True, "tensor": 2}}, "parallel.offload = True: model.architecture is t5"),
    (
        {"data": {"special_tokens": {"sentinels": [519, 518]}}},
        "data.special_tokens.sentinels = [519, 518]: 2 different",
    ),
]


def _open(config: Config) -> None:
    check_layout(config, config.parallel.tensor * config.parallel.context)
    open_inputs(config, "test")


def test_mistakes_are_named(quickstart_data: QuickstartData) -> None:
    given = {"model": BERT_MODEL, "data": {"packing": "sentences", "special_tokens": IDS}}
    check_layout(_config(quickstart_data, given), 1)
    for mistake, expected in MISTAKES:
        with pytest.raises(ConfigError) as error:
            check_layout(_config(quickstart_data, given, mistake), 1)
        assert expected in str(error.value)
        assert "try " in str(error.value) or "leave it out" in str(error.value)
    t5 = _config(quickstart_data, SPANS)
    check_layout(t5, 1)
    assert open_inputs(t5, "test").objective.sentinels == [519, 518, 517]
    for mistake, expected in T5_MISTAKES:
        with pytest.raises(ConfigError) as error:
            _open(_config(quickstart_data, SPANS, mistake))
        assert expected in str(error.value)
    for ids, expected in (
        ({}, "data.special_tokens.mask = None: not given, and data.tokenizer has neither [MASK] nor <mask>"),
        ({"mask": VOCABULARY + 8}, "data.special_tokens.mask = 520: model.vocab_size is 520; try model.vocab_size=521"),
    ):
        config = _config(quickstart_data, MASKED_LM, {"data": {"special_tokens": ids and IDS | ids}})
        with pytest.raises(ConfigError) as error:
            open_inputs(config, "test")
        assert expected in str(error.value)
