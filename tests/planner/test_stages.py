"""Layers of stages, as configs say them."""

from __future__ import annotations

import pytest

from megafp8.config import load_config
from megafp8.parallel.pipeline.actions import loop_placement, v_placement
from megafp8.planner.flops import output_layer_in_blocks
from megafp8.planner.stages import layers_of_stages
from tests.quickstart_data import ROOT

LLAMA = ROOT / "configs" / "llama3-8b.yaml"


@pytest.mark.parametrize(
    ("layers", "recipe", "counts"),
    [("null", "delayed", [8, 8, 8, 8]), ("[7, 9, 9, 7]", "delayed", [7, 9, 9, 7]),
     ("balanced", "delayed", [9, 9, 8, 6]), ("balanced", "none", [9, 8, 8, 7])],
)  # fmt: skip
def test_four_stages(layers: str, recipe: str, counts: list[int]) -> None:
    overrides = ["parallel.pipeline=4", f"parallel.layers_per_stage={layers}", f"fp8.recipe={recipe}"]
    found = layers_of_stages(load_config(LLAMA, overrides), loop_placement(4))
    assert [len(stage) for stage in found] == counts
    assert [i for stage in found for i in stage] == list(range(32))


def test_in_a_v_the_first_rank_has_the_output_layer() -> None:
    config = load_config(LLAMA, ["parallel.layers_per_stage=balanced", "parallel.pipeline=2"])
    first, second, third, last = map(len, layers_of_stages(config, v_placement(2)))
    assert first + last < second + third
    mtp = config.model_copy(update={"model": config.model.model_copy(update={"mtp_num_layers": 1})})
    *_, one_before, ends = layers_of_stages(mtp, v_placement(2))
    assert ends.stop == 33
    assert len(ends) < last
    assert one_before.stop == ends.start


def test_output_layer_in_blocks() -> None:
    """Llama-3-8B's as measured; twice the vocabulary is twice the work."""
    config = load_config(LLAMA, ["fp8.recipe=delayed"])
    found = output_layer_in_blocks(config)
    assert found == pytest.approx(2.7, rel=0.05)
    assert output_layer_in_blocks(load_config(LLAMA, ["fp8.recipe=none"])) == pytest.approx(1.74, rel=0.05)
    wide = {"model": config.model.model_copy(update={"vocab_size": 2 * config.spec.stem.rows})}
    assert output_layer_in_blocks(config.model_copy(update=wide)) == pytest.approx(2 * found)
