"""The bitwise gate: it misses no preset and no kind of layer, and a comparison finds a changed bit."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from benchmarks import bitwise_gate as gate
from megafp8.config import load_config
from megafp8.config.parts import PARTS
from megafp8.host.shipped import PACKAGE

ROOT = PACKAGE.parent


def test_every_preset_and_kind_of_layer_has_a_case(tmp_path: Path) -> None:
    presets = [*(ROOT / "configs").glob("*.yaml"), *(ROOT / "examples").rglob("*.yaml")]
    assert {f"{ROOT / path}.yaml" for path in gate.PRESETS} == {str(path) for path in presets}
    families = {**gate.FAMILY, "layer_kinds": [model.get("layer_kinds") for model in gate.FAMILIES.values()]}
    kinds = {part.model_fields["kind"].default for part in PARTS} - {"attention", "latent_attention"}  # are defaults
    assert not [kind for kind in kinds - {"sparse_latent_attention"} if f'"{kind}"' not in json.dumps(families)]
    assert {"latent_attention", "sparse_attention"} < {key for model in gate.FAMILIES.values() for key in model}


@pytest.mark.parametrize("path", ["configs/llama3-8b-stages", "configs/deepseek-v4-flash"])
def test_a_preset_with_small_numbers_is_a_config(path: str, tmp_path: Path) -> None:
    file = tmp_path / "small.yaml"
    file.write_text(json.dumps(gate.small_preset(ROOT / f"{path}.yaml")))
    config = load_config(str(file), gate.PRESETS[path][1])
    assert config.model.hidden_size == 128
    assert config.parallel.tensor * config.parallel.pipeline <= gate.PRESETS[path][0] <= gate.PROCESSES


def test_a_comparison_finds_the_last_bit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loss = 5.25
    for name, value in (("before", loss), ("same", loss), ("after", math.nextafter(loss, 6.0))):
        cases = {"moe": {"metrics": {"loss": [1.5, value]}, "texts": "refused"}, name: {}}
        (tmp_path / f"{name}.json").write_text(json.dumps({"about": {"torch": "2"}, "cases": cases}))
    assert gate.compare(tmp_path / "before.json", tmp_path / "same.json") == 0
    assert gate.compare(tmp_path / "before.json", tmp_path / "after.json") == 1
    printed = capsys.readouterr().out
    assert "only before: 1 cases, before" in printed
    assert "moe metrics loss: [1.5, 5.25] -> [1.5, 5.250000000000001]" in printed


def test_cases_are_chosen_by_parts_of_names_and_sampled() -> None:
    names = ["bf16/single", "moe", "moe-tp2", "kinds/moe", "plan/t5"]
    assert gate.chosen_of(names, [], "1/1") == names
    assert gate.chosen_of(names, ["moe", "plan/"], "2/2") == ["moe-tp2", "plan/t5"]
