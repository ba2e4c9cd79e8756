"""Configs refused for their size, and that the suggested values fit by the formula."""

from __future__ import annotations

import re

import pytest

from megafp8.config import Config, ConfigError, check_layout, load_config
from megafp8.planner.fits import check_memory
from megafp8.training.describe import check_device_memory, memory_under
from megafp8.training.pipeline import PipelinePlan, num_microbatches, plan_pipeline
from tests.quickstart_data import ROOT

GPU = 141 * 10**9


def planned(name: str, *overrides: str, world_size: int = 1) -> tuple[Config, PipelinePlan]:
    config = load_config(ROOT / "configs" / f"{name}.yaml", overrides)
    check_layout(config, world_size)
    return config, plan_pipeline(config, num_microbatches(config, world_size))


def refusal(name: str, *overrides: str, world_size: int = 1) -> str:
    config, plan = planned(name, *overrides, world_size=world_size)
    with pytest.raises(ConfigError) as error:
        check_memory(config, memory_under(plan, world_size), GPU, "this GPU has", "run.yaml")
    return str(error.value)


ONE_GPU = ["parallel.tensor=1", "parallel.pipeline=1", "model.vocab_size=2048"]


@pytest.mark.parametrize(
    ("key", "value", "term"),
    [
        ("model.vocab_size", 4 * 10**9, "moments"),
        ("model.vocab_multiple", 2**40, "moments"),
        ("model.hidden_size", 2**24, "moments"),
        ("model.ffn_hidden_size", 2**40, "moments"),
        ("model.head_dim", 2**40, "activations"),
        ("training.seq_length", 2**40, "activations"),
        ("fp8.amax_history_len", 2**50, "amax history"),
    ],
)
def test_an_absurd_size_is_named_with_one_that_fits(key: str, value: int, term: str) -> None:
    said = refusal("quickstart", *ONE_GPU, f"{key}={value}")
    assert f"{key} = {value}: by formula a rank needs " in said
    assert f"GiB ({term} " in said
    assert "and this GPU has 131.3 GiB; try" in said
    suggested = re.search(rf"{re.escape(key)}=(\d+)", said)
    assert suggested is not None
    section, name = key.split(".")
    for size, fits in ((int(suggested[1]), True), (2 * int(suggested[1]) + 1, False)):
        config, plan = planned("quickstart", *ONE_GPU)
        changed = getattr(config, section).model_copy(update={name: size})
        (memory,) = memory_under(plan, 1)(config.model_copy(update={section: changed}))
        assert (memory.total <= GPU) is fits


def test_a_suggested_width_is_one_that_ranks_can_divide() -> None:
    said = refusal(
        "quickstart", "parallel.tensor=2", "parallel.pipeline=1", f"model.ffn_hidden_size={10**12}", world_size=2
    )
    suggested = re.search(r"model\.ffn_hidden_size=(\d+)", said)
    assert suggested is not None
    assert int(suggested[1]) % 2 == 0


def test_a_key_that_saves_enough_memory_is_suggested() -> None:
    """Llama 3 8B on 8 data-parallel ranks: 16 bytes a parameter do not fit, with Adam's state sharded they do."""
    layout = ["parallel.tensor=1", "parallel.pipeline=1", "model.vocab_size=128256", "training.global_batch_size=8"]
    small = ["training.seq_length=1024", "fp8.recipe=none"]
    said = refusal("llama3-8b", *layout, *small, "parallel.zero=0", world_size=8)
    assert "try parallel.zero=1, or " in said
    config, plan = planned("llama3-8b", *layout, *small, "parallel.zero=1", world_size=8)
    check_memory(config, memory_under(plan, 8), GPU, "this GPU has", "run.yaml")


def test_state_on_the_host_is_suggested_unless_the_optimizer_needs_it_on_the_gpu() -> None:
    options = ["parallel.pipeline=1", "parallel.expert=2", "fp8.recipe=none", "optimizer.store_param_remainders=true"]
    options += ["parallel.recompute=full", "optimizer.moments_dtype=fp8", "training.seq_length=4096"]
    assert "try optimizer.offload=1.0" in refusal("qwen3-30b-a3b", *options, world_size=2)
    assert "offload" not in refusal(
        "qwen3-30b-a3b",
        *options,
        "optimizer.average_decay=0.99",
        "optimizer.store_param_remainders=false",
        world_size=2,
    )


def test_fewer_replicas_are_suggested() -> None:
    """Llama 3 8B with 100 layers: 6 + 12 / 16 bytes of each of 22.9e9 parameters do not fit, and half of them do."""
    layout = ["parallel.tensor=1", "parallel.pipeline=1", "model.vocab_size=128256", "training.global_batch_size=16"]
    small = ["training.seq_length=1024", "fp8.recipe=none", "parallel.fsdp=true", "model.num_layers=100"]
    said = refusal("llama3-8b", *layout, *small, "parallel.fsdp_replicas=16", world_size=16)
    assert "try parallel.fsdp_replicas=8, or " in said
    for replicas in (1, 8):
        config, plan = planned("llama3-8b", *layout, *small, f"parallel.fsdp_replicas={replicas}", world_size=16)
        check_memory(config, memory_under(plan, 16), GPU, "this GPU has", "run.yaml")


def test_this_machine() -> None:
    config, plan = planned("quickstart", *ONE_GPU)
    check_device_memory(config, plan, 1, "cpu", "run.yaml")
    huge, plan = planned("quickstart", *ONE_GPU, "model.vocab_size=4e9")
    with pytest.raises(ConfigError, match="this host has for it"):
        check_device_memory(huge, plan, 1, "cpu", "run.yaml")
