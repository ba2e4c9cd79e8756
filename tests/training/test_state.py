"""What metadata.json says of a run's checkpoint, and what a run that resumes says of its config."""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from typing import Any

import pytest

from megafp8.checkpoint import CheckpointReader
from megafp8.config import Config
from megafp8.parallel_state import initialize_distributed, initialize_model_parallel
from megafp8.training.state import changed_keys, config_hash, load_latest, save_state
from megafp8.training.trainer import Trainer
from tests.test_checkpoint_format import is_documented, undocumented_keys
from tests.training.test_any_layout import LAYOUTS, settings
from tests.world import World


def _trainer(config: Config) -> Trainer:
    p = config.parallel
    return Trainer(config, initialize_model_parallel(p.tensor, p.pipeline, device=initialize_distributed("cpu")))


def _save(config: Config, folder: str) -> str:
    return str(save_state(_trainer(config), Path(folder), 3, "abc"))


def _said_on_load(config: Config, folder: str) -> list[str]:
    said: list[str] = []
    assert load_latest(_trainer(config), Path(folder), say=said.append) == 3
    return said


@pytest.mark.parametrize(("model", "layout"), [("delayed", "pp2"), ("bf16", "dp2-zero"), ("llama-tied", "tp2-sp")])
def test_metadata_says_what_is_in_the_checkpoint(world2: World, tmp_path: Path, model: str, layout: str) -> None:
    config, ranks = settings(model, layout, seed=1), LAYOUTS[layout][0]
    source = CheckpointReader(world2.run(_save, config, str(tmp_path), ranks=ranks)[0])
    about, p = source.metadata, config.parallel
    assert undocumented_keys(about) == []
    assert [name for name in source.tensors if not is_documented(name)] == []
    assert about["tensors"] == len(source.tensors)
    assert about["bytes"] == sum(math.prod(shape) * dtype.itemsize for shape, dtype in source.tensors.values())
    assert (about["step"], about["consumed_samples"], about["tokens"]) == (3, 12, 12 * 8)
    assert about["tokenizer_fingerprint"] == "abc"
    assert (about["layout"]["ranks"], about["layout"]["data"]) == (ranks, ranks // (p.tensor * p.pipeline))
    assert about["layout"]["pipeline"] == p.pipeline
    assert Config.model_validate(about["config"]) == config
    text = json.dumps(about["config"], sort_keys=True, separators=(",", ":"))
    assert about["config_hash"] == hashlib.sha256(text.encode()).hexdigest()


def test_a_run_that_resumes_says_what_changed(world2: World, tmp_path: Path) -> None:
    config = settings("delayed", "tp2-sp", seed=1)
    world2.run(_save, config, str(tmp_path), ranks=2)
    assert world2.run(_said_on_load, config, str(tmp_path), ranks=2) == [[], []]
    other = config.model_copy(update={
        "parallel": config.parallel.model_copy(update={"tensor": 1}),
        "fp8": config.fp8.model_copy(update={"recipe": "current"}),
    })  # fmt: skip
    expected = "changed in the config since step_00000003: parallel.tensor 2 -> 1; fp8.recipe delayed -> current"
    assert world2.run(_said_on_load, other, str(tmp_path), ranks=1) == [[expected]]


@pytest.mark.parametrize(
    ("then", "now", "changes"),
    [
        ({"a": {"b": 1, "c": [1]}}, {"a": {"c": [1], "b": 1}}, []),
        ({"a": {"b": 1}, "d": None}, {"a": {"b": 2}, "d": 0}, ["a.b 1 -> 2", "d None -> 0"]),
        ({"a": None}, {"a": {"b": 1}}, ["a None -> unset", "a.b unset -> 1"]),
        ({"a": None}, {}, ["a None -> unset"]),
        ({"a": {}}, {"a": {"*": 1.0}}, ["a {} -> unset", "a.* unset -> 1.0"]),
    ],
)
def test_changed_keys(then: dict[str, Any], now: dict[str, Any], changes: list[str]) -> None:
    assert changed_keys(then, now) == changes
    assert (config_hash(then) == config_hash(now)) == (not changes)


def test_the_hash_of_a_config_is_the_same_tomorrow() -> None:
    assert (
        config_hash({"b": [1, "é"], "a": {"x": 1e-05}})
        == hashlib.sha256(b'{"a":{"x":1e-05},"b":[1,"\\u00e9"]}').hexdigest()
    )
    config = settings("llama", "one", seed=1)
    assert config_hash(config.model_dump(mode="json")) == config_hash(json.loads(config.model_dump_json()))
