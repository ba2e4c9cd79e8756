"""Times of blocks against the FLOPs of published figures, and against sums done by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megafp8.config import Config, load_config
from megafp8.host.cluster import Cluster
from megafp8.host.gpus import GPUS, Ceilings, Gpu
from megafp8.layers.recompute import KEEP_ALL, BlockMemory
from megafp8.planner.block_time import Phases, block_costs, summed
from megafp8.planner.flops import flops_per_token, matmul_parameters
from megafp8.planner.outline import model_outline
from megafp8.planner.predict import stage_costs
from megafp8.training.fp8_config import build_fp8
from tests.quickstart_data import CONFIG

RATE, MUCH = 1e12, 1e40
FLOPS_ONLY = Gpu(
    "one rate",
    "one chip",
    memory=0,
    memory_bandwidth=MUCH,
    peaks={},
    ceilings=Ceilings(bf16=RATE, fp8={}, bandwidth=MUCH, launch=0.0),
    nvlink=MUCH,
    network=MUCH,
    host_link=MUCH,
    load_bf16=1.0,
    attention_tile=64,
    attention_forward=RATE,
    attention_backward=RATE,
    narrow_heads=1.0,
    small_kernel=0.0,
    nvlink_latency=0.0,
    network_latency=0.0,
)
TINY = [
    "model.num_layers=4",
    "training.precision=bf16",
    "device=cuda",
    "fp8.recipe=none",
    "parallel.tensor=1",
    "parallel.pipeline=1",
]
EXPERTS = "model.moe={num_experts: 8, top_k: 2, ffn_hidden_size: 48}"
LATENT = "model.latent_attention={q_rank: 48, kv_rank: 32, nope_head_dim: 16, rope_head_dim: 8, value_head_dim: 12}"


def config_of(*overrides: str) -> Config:
    return load_config(CONFIG, [*TINY, *overrides])


def costs_of(config: Config, gpu: Gpu, gpus: int = 1) -> dict[str, Phases]:
    outline = model_outline(config, build_fp8(config, None))
    return summed(stage_costs(outline, Cluster(gpu, gpus)))


@pytest.mark.parametrize(
    "overrides",
    [(), ("model.activation=gelu_tanh",), (LATENT, "model.num_query_groups=null"), ("model.tie_embeddings=true",)],
)
def test_gemms_are_those_of_the_published_formula(overrides: tuple[str, ...]) -> None:
    config = config_of(*overrides)
    costs, t = costs_of(config, FLOPS_ONLY), config.training
    seconds = costs["GEMMs"].total + costs["output layer"].total
    assert seconds * RATE == pytest.approx(6 * matmul_parameters(config) * t.micro_batch_size * t.seq_length)


def test_attention_is_that_of_the_published_formula_and_half_tiles() -> None:
    config = config_of("training.seq_length=8192", "model.max_position_embeddings=8192")
    t = config.training
    whole = flops_per_token(config) - 6 * matmul_parameters(config)
    tiles = 1 + 2 * 64 / t.seq_length
    expected = whole * tiles * t.micro_batch_size * t.seq_length
    assert costs_of(config, FLOPS_ONLY)["attention"].total * RATE == pytest.approx(expected)


def test_ranks_divide_the_work() -> None:
    alone = costs_of(config_of("parallel.tensor=1", "parallel.pipeline=1"), FLOPS_ONLY)
    shared = costs_of(config_of("parallel.tensor=2", "parallel.pipeline=1", "model.vocab_multiple=2"), FLOPS_ONLY, 2)
    for term in ("GEMMs", "attention"):
        assert shared[term].total == pytest.approx(alone[term].total / 2)


def test_experts_compute_their_tokens() -> None:
    """Rows of top_k experts each, and half a tile of 128 of each expert more."""
    config = config_of(EXPERTS)
    model, t = config.model, config.training
    rows = t.seq_length * t.micro_batch_size * 2 + 8 * 64
    weights = sum(3 * model.hidden_size * 48 for _ in config.spec.layers)
    assert costs_of(config, FLOPS_ONLY)["experts"].total * RATE == pytest.approx(6 * rows * weights)


@pytest.mark.parametrize(("dispatch", "copies"), [("all_gather", 3.0), ("all_to_all", 1.25 * 2 * 3 / 4)])
def test_experts_exchange_tokens(dispatch: str, copies: float) -> None:
    """Four ranks send all tokens to all others, or two copies of each, of which every fourth stays; and back.

    The copies go to places with a quarter more room, as in a CUDA graph.
    """
    exchange = f"parallel.expert_dispatch={dispatch}", "parallel.overlap_tensor=none"
    config, gpu = config_of(EXPERTS, "parallel.expert=4", *exchange), replace(FLOPS_ONLY, nvlink=1e9)
    values = config.training.micro_batch_size * config.training.seq_length * config.model.hidden_size * 2
    costs = block_costs(model_outline(config, build_fp8(config, None)), Cluster(gpu, 4), 1, KEEP_ALL)
    assert costs["expert"].forward == pytest.approx(2 * copies * values / 1e9)
    assert "expert" not in costs_of(config_of(EXPERTS), gpu)


def test_full_recompute_runs_forward_again() -> None:
    config, gpu = config_of(), GPUS["h200-141gb"]
    outline = model_outline(config, build_fp8(config, None))
    kept, again = (block_costs(outline, Cluster(gpu, 1), 1, memory) for memory in (KEEP_ALL, BlockMemory(full=True)))
    forward = sum(phases.forward for phases in kept.values())
    assert again.pop("recompute").backward == pytest.approx(forward)
    assert again == kept


@pytest.mark.parametrize("overlap", ["none", "symmetric"])
def test_tensor_parallel_ranks_exchange_shards(overlap: str) -> None:
    """Two gathers and two reduce-scatters forward, of half of the values each."""
    config = config_of(
        "parallel.tensor=2", "parallel.pipeline=1", "model.vocab_multiple=2", f"parallel.overlap_tensor={overlap}"
    )
    t, gpu = config.training, replace(FLOPS_ONLY, nvlink=1e9, hidden_copies=0.25)
    values = t.micro_batch_size * t.seq_length * config.model.hidden_size * 2
    expected = 4 * values / 2 / 1e9 * (1.0 if overlap == "none" else 0.25)
    outline = model_outline(config, build_fp8(config, None))
    costs = block_costs(outline, Cluster(gpu, 2), 1, KEEP_ALL)
    assert costs["tensor"].forward == pytest.approx(expected)
    across_hosts = block_costs(outline, Cluster(replace(gpu, network=1e8), 2, 1), 1, KEEP_ALL)["tensor"]
    assert across_hosts.forward == pytest.approx(4 * values / 2 / 1e8)  # copy engines reach one host only


@pytest.mark.parametrize(("recipe", "passes"), [("mxfp8", 1), ("nvfp4", 2)])
def test_blocks_of_blackwell_are_dequantized(recipe: str, passes: int) -> None:
    """GEMMs are those of bf16. Casts write bf16 twice, once where the operation before would have written it."""
    gpu = replace(FLOPS_ONLY, ceilings=Ceilings(bf16=RATE, fp8={}, bandwidth=1e9, launch=0.0), fine_casts=0.5)
    config = config_of(f"fp8.recipe={recipe}")
    found, high = costs_of(config, gpu), costs_of(config_of(), gpu)
    assert found["GEMMs"] == high["GEMMs"]
    fused = 2 * 192 + 512 + 2 * 512  # two norms, SwiGLU, its gradient
    alone = 3 * 192 + 16 * 24  # attention's output, the gradients of both outputs of a block and of q, k and v
    read_and_written = fused * (2 * (passes - 1) + 2) + alone * (2 * passes + 4)
    seconds, t = found["elementwise"].total - high["elementwise"].total, config.training
    assert seconds * 1e9 * 0.5 == pytest.approx(4 * read_and_written * t.micro_batch_size * t.seq_length)
