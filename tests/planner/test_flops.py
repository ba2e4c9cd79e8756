"""FLOPs of models: by hand, by torch's counter, and by looking at each pair of a query and a key."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megafp8.batch import Batch
from megafp8.config import Config, load_config
from megafp8.layers.costs import pairs_of
from megafp8.parallel.parallel_state import ParallelState, destroy_model_parallel
from megafp8.planner.flops import describe_flops, document_flops, flops_per_token, model_flops
from megafp8.training.parallel import build_parallel
from megafp8.training.trainer import RankTrainer
from tests.config.test_config import MINIMAL
from tests.training.presets import DELTA_NET, KIMI_DELTA, MAMBA2

ROOT = Path(__file__).resolve().parents[2]


def test_gemma2_9b_by_hand() -> None:
    config = load_config(ROOT / "configs/gemma2-9b.yaml")
    s, window, width = 8192, 4096, 16 * 256
    block = 3584 * (16 + 2 * 8) * 256 + 16 * 256 * 3584 + 3 * 3584 * 14336
    products = 6 * (42 * block + 3584 * 256000)
    near = window * (window + 1) / 2 + (s - window) * window  # pairs of 21 layers; the others have s² / 2
    expected = products + 21 * 12 * (near + s * s / 2) * width / s
    assert flops_per_token(config) == pytest.approx(expected, rel=1e-12)
    full = products + 42 * 12 * (s * s / 2) * width / s
    assert full / expected - 1 == pytest.approx(0.017, abs=0.0005)  # what full attention in all layers would count


@pytest.mark.parametrize("window", [1, 3, 15])
def test_pairs_of_a_window_are_those_that_the_counter_sees(window: int) -> None:
    s, d = 16, 8
    q_sd, k_sd = torch.randn(2, s, d)
    with FlopCounterMode(display=False) as counter:
        for i in range(s):
            q_sd[i : i + 1] @ k_sd[max(0, i - window + 1) : i + 1].T
    assert counter.get_total_flops() == 2 * d * pairs_of(s, window, causal=True)


def test_pairs_of_chunks() -> None:
    assert pairs_of(16, None, causal=True, chunk=6) == (6 * 6 + 6 * 6 + 4 * 4) / 2
    assert pairs_of(16, None, causal=True, chunk=16) == pairs_of(16, None, causal=True)


@pytest.fixture
def alone() -> Iterator[ParallelState]:
    from megafp8.parallel.parallel_state import initialize_distributed

    config = Config.model_validate(MINIMAL)
    yield build_parallel(config, initialize_distributed("cpu"))
    destroy_model_parallel()


HYBRID = {"layer_kinds": {"linear": {"mixer": DELTA_NET}, "full": {}}, "pattern": ["linear", "full"]}
PRODUCT = {"layer_kinds": {"linear": {"mixer": DELTA_NET | {"householder_steps": 3}}}, "pattern": ["linear"]}
KIMI = {"layer_kinds": {"linear": {"mixer": KIMI_DELTA}}, "pattern": ["linear"]}
ONE_PART = {
    "pattern": ["mamba", "mlp"],
    "layer_kinds": {"mamba": {"mixer": MAMBA2, "ffn": "none"}, "mlp": {"mixer": "none"}},
}
SHARED_ATTENTION = {
    "pattern": ["shared"],
    "layer_kinds": {"shared": {"mixer": MAMBA2 | {"kind": "shared_attention", "adapt_attention": True}, "ffn": "none"}},
}
LATENT_EXPERTS = {"num_experts": 4, "ffn_hidden_size": 32, "latent_size": 24, "shared_ffn_hidden_size": 48}
SHARED_KEYS = {
    "layer_kinds": {
        "own": {"mixer": {"num_query_groups": 2, "head_dim": 32, "keys_as_values": True}},
        "shared": {"mixer": {"num_query_groups": 2, "head_dim": 32, "kv_layer": 0}},
    },
    "pattern": ["own", "shared"],
    "per_layer_embedding": {"width": 8},
}
WINDOW_MTP = {"sliding_window": 8, "num_query_groups": 2, "mtp_num_layers": 1}


@pytest.mark.parametrize(
    ("model", "recurrences"),
    [
        ({}, 0),
        (WINDOW_MTP, 0),
        (SHARED_KEYS, 0),
        (HYBRID, 2 * 32 * (6 * 8 * 8 * 8 + 2 * 4 * 128)),
        (PRODUCT, 4 * 32 * (14 * 8 * 8 * 8 + 2 * 4 * (32 + 3 * 96))),
        (KIMI, 4 * 32 * (6 * 8 * 8 * 8 + 2 * 4 * 192)),
        (ONE_PART, 2 * 32 * (4 * 8 * 8 * 8 + 2 * 4 * 128)),
        (SHARED_ATTENTION, 4 * 32 * (4 * 8 * 8 * 8 + 2 * 4 * 128)),
        ({"moe": LATENT_EXPERTS}, 0),
        ({"hyper_connections": {"streams": 2, "sinkhorn_iterations": 1}}, 0),
    ],
    ids=[
        *("plain", "window-mtp", "shared-keys", "hybrid", "product", "kimi", "one-part", "shared-attention"),
        *("latent-experts", "hyper"),
    ],
)
def test_products_of_a_step_are_those_that_the_counter_sees(
    model: dict[str, Any], recurrences: int, alone: ParallelState
) -> None:
    training = {**MINIMAL["training"], "global_batch_size": 1, "precision": "fp32"}
    config = Config.model_validate({**MINIMAL, "model": {**MINIMAL["model"], **model}, "training": training})
    trainer = RankTrainer(config, alone)
    tokens = torch.randint(512, (1, 33 + config.model.mtp_num_layers))
    labels = tokens[:, 1:33].contiguous()
    with FlopCounterMode(display=False) as counter:
        trainer.train_step(0, [Batch(tokens[:, :32].contiguous(), labels)])
    trainer.close()
    counted = counter.get_flop_counts()["Global"]
    products = sum(counted.get(op, 0) for op in (torch.ops.aten.mm, torch.ops.aten.addmm))
    assert products == 3 * (model_flops(config).products - recurrences)


def test_a_linear_attention_by_hand() -> None:
    """A state of 8 × 8 numbers for each of 8 heads is read for the key, written, and read for the query."""
    full = Config.model_validate(MINIMAL)
    hybrid = Config.model_validate({**MINIMAL, "model": {**MINIMAL["model"], **HYBRID}})
    s, h = full.training.seq_length, full.model.hidden_size
    heads, keys, d = 8, 4, 8
    channels = (2 * keys + heads) * d
    linear = 6 * (h * (channels + heads * d + 2 * heads) + heads * d * h) + 3 * (6 * heads * d * d + 2 * 4 * channels)
    attention = 6 * 4 * h * h + 12 * (s / 2) * h
    layers = full.model.num_layers
    assert flops_per_token(hybrid) - flops_per_token(full) == pytest.approx(layers / 2 * (linear - attention), rel=1e-9)


def test_a_document_costs_what_a_sample_of_its_length_costs() -> None:
    window = {**MINIMAL["model"], **HYBRID, "sliding_window": 5}
    for model in (MINIMAL["model"], window):
        cost = document_flops(Config.model_validate({**MINIMAL, "model": model}))
        for length in (1, 5, 24, 32):
            training = {**MINIMAL["training"], "seq_length": length}
            assert cost(length) == pytest.approx(sum(model_flops(Config.model_validate(
                {**MINIMAL, "model": model, "training": training}))), rel=1e-12)  # fmt: skip
    assert cost(24) - 2 * cost(12) == pytest.approx(cost(32) - 2 * cost(16)), "the window does not limit attention"


def test_documents_are_said_where_they_count() -> None:
    config = Config.model_validate(MINIMAL)
    assert "across documents" not in describe_flops(config)
    documents = {**MINIMAL, "data": {**MINIMAL["data"], "reset_at_documents": True}}
    said = describe_flops(Config.model_validate(documents))
    assert said.endswith("GFLOP per token; attention across documents is counted, though masked")
