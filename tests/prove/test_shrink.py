"""Small configs: what stays is checked on the shipped configs, what shrinks on numbers of one's own."""

from __future__ import annotations

import math
from itertools import pairwise, product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megafp8.config import Config, ConfigError, check_layout, load_config
from megafp8.config.parts import PARTS
from megafp8.config.resolve import kind_name
from megafp8.conversion.huggingface.config import choose
from megafp8.numerics.dtypes import in_bf16
from megafp8.planner.stages import stages_of
from megafp8.prove.export import with_all_keys_chosen
from megafp8.prove.layers import keep_layers
from megafp8.prove.layout import ProvedLayout, fold
from megafp8.prove.numbers import in_proportion
from megafp8.prove.proof import comparable_fp8
from megafp8.prove.shrink import Change, numbers_of, quantity_of, shrink
from megafp8.section import Quantity
from tests.training.presets import *  # noqa: F403
from tests.training.presets import config, config_of

CONFIGS = sorted(Path("configs").glob("*.yaml"))
MODEL = [f"model.{size}" for size in ("num_layers=4", "hidden_size=64", "num_attention_heads=4", "vocab_size=1000")]
"""Of configs that take theirs from a folder."""


def loaded(path: Path) -> Config:
    try:
        return load_config(path)
    except ConfigError:
        return load_config(path, MODEL)


# --- numbers ---------------------------------------------------------------------------------------------------------


@given(st.sets(st.integers(1, 10_000), max_size=8))
def test_small_numbers_are_in_proportion(values: set[int]) -> None:
    small = in_proportion(values, {}, 2)
    for a in values:
        for b in values:
            assert (a < b) == (small[a] < small[b])
            assert b % a or small[b] % small[a] == 0 or small[b] == b
    assert all(small[value] <= value for value in values)


def test_widths_of_deepseek_v3() -> None:
    widths = [64, 128, 512, 1536, 2048, 7168, 18432]
    small = in_proportion(widths, dict.fromkeys(widths, 4), 8)
    assert [*small.values()] == [8, 16, 32, 64, 96, 160, 192]
    for a in widths:
        for b in widths:
            assert (b % a == 0) == (small[b] % small[a] == 0)


def test_units_and_the_least() -> None:
    assert in_proportion([1, 8, 32], {8: 2, 32: 2}, 2) == {1: 1, 8: 2, 32: 4}
    assert in_proportion([200, 300], {300: 4}, 2) == {200: 2, 300: 4}  # 300 is no multiple of 200, but 4 is of 2
    assert in_proportion([6, 4096, 14336], dict.fromkeys([6, 4096, 14336], 8), 16) == {6: 6, 4096: 16, 14336: 40}


# --- layouts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("original", "folded"),
    [
        (ProvedLayout(2, 1, 2, 2, 1, 1, 1), ProvedLayout(2, 1, 2, 2, 1, 1, 1)),
        (ProvedLayout(8, 1, 16, 8, 1, 1, 1), ProvedLayout(2, 1, 4, 2, 1, 1, 1)),  # a stage in the middle
        (ProvedLayout(1, 1, 8, 128, 64, 1, 1), ProvedLayout(1, 1, 4, 4, 2, 1, 1)),  # copies of experts
        (ProvedLayout(4, 2, 8, 16, 32, 2, 2), ProvedLayout(2, 2, 2, 2, 2, 2, 2)),
        (ProvedLayout(1, 1, 1, 64, 1, 1, 8), ProvedLayout(1, 1, 1, 4, 1, 1, 2)),  # shards, and replicas of them
        (ProvedLayout(1, 1, 3, 1, 1, 1, 1), ProvedLayout(1, 1, 3, 1, 1, 1, 1)),
        (ProvedLayout(1, 1, 1, 1, 1, 1, 1), ProvedLayout(1, 1, 1, 1, 1, 1, 1)),
    ],
)
def test_folded_layouts(original: ProvedLayout, folded: ProvedLayout) -> None:
    assert fold(original) == folded


def test_every_axis_stays() -> None:
    """Of all layouts of these sizes."""
    layouts = [layout for sizes in product([1, 2, 4, 8], repeat=7) if (layout := ProvedLayout(*sizes)).is_possible()]
    assert len(layouts) == 9060
    for original in layouts:
        folded = fold(original)
        assert folded.ranks <= 16
        assert folded.is_possible()
        for name in ("tensor", "context", "pipeline", "data", "expert", "expert_tensor"):
            assert (getattr(folded, name) > 1) == (getattr(original, name) > 1), (name, original)


# --- layers ----------------------------------------------------------------------------------------------------------


def test_kinds_and_their_neighbours_stay() -> None:
    kept = keep_layers(load_config("configs/nemotron-3-nano-30b.yaml"), 1)
    assert kept.layers == [*range(kept.layers[0], kept.layers[0] + len(kept.layers))]
    model = load_config("configs/nemotron-3-nano-30b.yaml").model
    names = [kind_name(model, layer) for layer in range(model.num_layers)]
    pairs = {*pairwise(names)}
    few = [names[layer] for layer in kept.layers]
    assert {*pairwise(few)} == pairs


def test_uneven_stages_stay_uneven() -> None:
    kept = keep_layers(load_config("configs/llama3-405b.yaml"), 4)
    assert kept.per_stage == [1, 2, 2, 1]
    assert kept.layers[0] == 0


def test_layers_whose_keys_others_read_stay() -> None:
    small = shrink(config_of(GEMMA4)).config
    assert small.model.layer_kinds["shared"].mixer is not None
    source = small.spec.layers[small.spec.num_layers - 1].mixer
    assert getattr(source, "kv_layer", None) == 1


def test_layers_whose_indexers_others_use_stay() -> None:
    latent = {"q_rank": 16, "kv_rank": 16, "nope_head_dim": 8, "rope_head_dim": 8, "value_head_dim": 8}
    shared = {"kind": "sparse_latent_attention", "shared_indexer": True}
    model = {
        "num_layers": 12, "num_query_groups": None, "latent_attention": latent,
        "sparse_attention": {"index_heads": 4, "index_head_dim": 8, "top_k": 6},
        "layer_kinds": {"own": {}, "shared": {"mixer": shared}}, "pattern": ["own * 5", "shared"],
    }  # fmt: skip
    whole = config(model=model)
    kept = keep_layers(whole, 1).layers
    assert len({source for reader, source in whole.spec.sources.items() if reader in kept} & {*kept}) > 0
    assert shrink(whole).config.spec.sources


def test_numbers_in_patterns() -> None:
    fp8 = {"recipe": "current", "amax_history_len": 1024, "exclude": ["layers.7.*", "*.mlp.down"]}
    given_config = config(model={"num_layers": 12}, fp8=fp8)
    small = shrink(given_config).config
    kept = keep_layers(given_config, 1)
    assert 7 in kept.layers
    assert small.fp8.exclude == [f"layers.{kept.number(7)}.*", "*.mlp.down"]


# --- configs ---------------------------------------------------------------------------------------------------------


def blocks_of_stages(config: Config) -> list[int]:
    *others, last = map(len, stages_of(config)[1])
    return [*others, last - config.model.mtp_num_layers]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_what_stays_of_a_shipped_config(path: Path) -> None:
    given_config = loaded(path)
    small, ranks, original_ranks, changes = shrink(given_config)
    check_layout(small, ranks)
    assert ranks <= 16
    kinds = {(x.mixer.kind, x.ffn.kind, x.norm_position) for x in given_config.spec.distinct_layers}
    assert {(x.mixer.kind, x.ffn.kind, x.norm_position) for x in small.spec.distinct_layers} == kinds
    before, after = ProvedLayout.from_config(given_config, original_ranks), ProvedLayout.from_config(small, ranks)
    for axis in ("tensor", "context", "pipeline", "data", "expert"):
        assert (getattr(after, axis) > 1) == (getattr(before, axis) > 1), axis
    assert (len({*blocks_of_stages(small)}) > 1) >= (len({*blocks_of_stages(given_config)}) > 1)
    assert max(number.value for number in numbers_of(small)) < 1000
    assert all(change.reason for change in changes)
    for key in ("zero", "fsdp", "schedule", "recompute", "sequence_parallel", "expert_dispatch"):
        assert getattr(small.parallel, key) == getattr(given_config.parallel, key)
    assert small.fp8.recipe == given_config.fp8.recipe
    if small.fp8.recipe != "none":
        comparable = comparable_fp8(small, ranks)
        check_layout(comparable.config, comparable.ranks)
    assert small.optimizer.name == given_config.optimizer.name


def test_a_small_model_keeps_its_family() -> None:
    small = shrink(load_config("configs/deepseek-v4-flash.yaml")).config
    assert choose(small.spec).model_type == "deepseek_v4"
    chosen = {getattr(layer.mixer, "top_k", None) for layer in with_all_keys_chosen(small).spec.layers}
    assert chosen == {None, small.training.seq_length}, "logits of an export depend on no choice among equal scores"


def test_a_token_finds_enough_experts_in_small_groups() -> None:
    moe = {"num_experts": 8, "top_k": 3, "ffn_hidden_size": 32, "score": "sigmoid", "num_groups": 2, "top_groups": 1}
    small = shrink(config_of(DP2 | EP2, model={"moe": moe})).config.model.moe
    assert small is not None
    assert (small.num_experts, small.num_groups, small.top_groups, small.top_k) == (8, 2, 1, 3)


def test_every_change_is_said() -> None:
    given_config = load_config("configs/llama3-8b.yaml")
    small = shrink(given_config)
    assert Change("model.hidden_size", 4096, small.config.model.hidden_size, "channels in proportion") in small.changes
    assert {change.key for change in small.changes} >= {"training.precision", "data.train", "parallel.layers_per_stage"}
    assert not any("rope_theta" in change.key for change in small.changes)


def test_what_depends_on_the_layout_is_left_out() -> None:
    dropping = shrink(config_of(DROPPING | TP2 | DP2), 4)
    assert dropping.config.model.moe is not None
    assert dropping.config.model.moe.capacity_factor is None
    assert any("depends on the layout" in change.reason for change in dropping.changes)
    assert shrink(config_of(FP8_MOMENTS | DP2), 2).config.optimizer.moments_dtype == "fp32"
    assert shrink(config_of(BF16_MOMENTS | DP2), 2).config.optimizer.moments_dtype == "bf16"


def test_the_numbers_of_parts_say_what_they_count() -> None:
    """A number that shrinks names its quantity where it is declared; large defaults without one would stay."""
    for part in PARTS:
        for name, field in part.model_fields.items():
            if isinstance(field.default, int) and not isinstance(field.default, bool) and field.default > 16:
                assert quantity_of(field.annotation, field.metadata) is not None, f"{part.__name__}.{name}"


def test_proportions_of_a_head() -> None:
    """A share of a head's channels is rotated, in pairs: numbers are as large as the checks want them."""
    small = shrink(load_config("configs/deepseek-v4-flash.yaml")).config.model
    assert small.head_dim is not None
    assert int(small.head_dim * small.partial_rotary_factor) % 2 == 0
    assert math.gcd(small.head_dim, 2) == 2


def test_multipliers_of_embeddings_stay_roots() -> None:
    """RecurrentGemma's multiplier is rounded to bf16, and prove must shrink it to what transformers would compute."""
    for multiplier, root in ((2560**0.5, math.sqrt), (50.5, lambda h: in_bf16(math.sqrt(h)))):
        small = shrink(config(model={"hidden_size": 2560, "embedding_multiplier": multiplier})).config.model
        assert small.embedding_multiplier == root(small.hidden_size) != multiplier


def test_quantities() -> None:
    assert quantity_of(int | None) is None
    assert {x.quantity for x in numbers_of(load_config("configs/deepseek-v3.2.yaml"))} >= {
        Quantity.CHANNELS, Quantity.HEADS, Quantity.EXPERTS, Quantity.TOKENS, Quantity.CHOSEN, Quantity.STEPS,
    }  # fmt: skip


def test_a_schedule_in_a_file_keeps_ranks_and_microbatches(tmp_path: Path) -> None:
    rows = [["F0", "F1", "F2", "B0", "B1", "B2"]] * 8
    (tmp_path / "mine.csv").write_text("\n".join(",".join(row) for row in rows) + "\n", encoding="utf-8")
    parallel = {"pipeline": 8, "schedule": str(tmp_path / "mine.csv")}
    small = shrink(config(model={"num_layers": 24}, parallel=parallel, training={"global_batch_size": 3}), 8)
    assert (small.ranks, small.config.parallel.pipeline, small.config.training.global_batch_size) == (8, 8, 3)


def test_a_config_that_cannot_run_is_refused() -> None:
    with pytest.raises(ConfigError, match="parallel"):
        shrink(load_config("configs/llama3-8b.yaml"), 3)


def test_fp8_without_the_axes_that_cut_what_has_one_scale() -> None:
    small = shrink(config_of(MOE | ROWWISE | TP2 | DP2 | EP4, fp8={"amax_history_len": 1024}), 4)
    comparable = comparable_fp8(small.config, small.ranks)
    assert comparable.config.parallel.tensor == 1
    assert "without tensor parallelism" in comparable.notes[0]
    check_layout(comparable.config, comparable.ranks)
    per_tensor = shrink(config_of(DELAYED | TP2 | DP2), 4)
    assert comparable_fp8(per_tensor.config, 4) == (per_tensor.config, 4, [])
