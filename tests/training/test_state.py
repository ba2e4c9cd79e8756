"""metadata.json of a run's checkpoint, and which changes of the config a resumed run accepts."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import re
from logging.handlers import BufferingHandler
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from megafp8.checkpoint import CheckpointReader, IncompatibleCheckpoint
from megafp8.checkpoint.loading import misfits
from megafp8.checkpoint.store import step_folder
from megafp8.config import Config, ConfigError
from megafp8.optimizer import mixed_precision
from megafp8.optimizer.param_groups import is_hidden_matrix
from megafp8.parallel.parallel_state import initialize_distributed, initialize_model_parallel
from megafp8.parallel.sharding import ParamSpec, spec_of
from megafp8.training.state import (
    _can_lack,
    _changed_fixed_keys,
    changed_keys,
    check_next_stage,
    check_resume,
    checkpoint_folder,
    config_hash,
    find_checkpoint,
    save_state,
    tensor_kinds,
)
from megafp8.training.trainer import RankTrainer
from megafp8.training.validate import check_writable
from tests.test_checkpoint_format import is_documented, undocumented_keys
from tests.tiny_model import state_of
from tests.training.latest import load_latest
from tests.training.presets import *  # noqa: F403
from tests.training.presets import Preset, config_of
from tests.training.runs import batches, start
from tests.world import World


def _trainer(config: Config) -> RankTrainer:
    p = config.parallel
    return RankTrainer(config, initialize_model_parallel(p.tensor, p.pipeline, device=initialize_distributed("cpu")))


def _save(config: Config, folder: str) -> str:
    return str(save_state(_trainer(config), Path(folder), 3, "abc"))


def _logged_on_load(config: Config, folder: str) -> list[str]:
    trainer, handler = _trainer(config), BufferingHandler(100)
    logger = logging.getLogger("megafp8.training.state")
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    assert load_latest(trainer, Path(folder)) == 3
    logger.removeHandler(handler)
    return [record.getMessage() for record in handler.buffer]


@pytest.mark.parametrize("preset", [DELAYED | PP2, BF16 | DP2 | ZERO, TIED | TP2, MOE | EP2 | DP2])
def test_metadata_says_what_is_in_the_checkpoint(world2: World, tmp_path: Path, preset: Preset) -> None:
    config, ranks = config_of(preset | SAMPLES_4, seed=1), preset.ranks
    source = CheckpointReader(world2.run(_save, config, str(tmp_path), ranks=ranks)[0])
    about, p = source.metadata, config.parallel
    assert undocumented_keys(about) == []
    # The page names routers beside its tables, and says that experts have the names of an MLP with their number.
    names = {re.sub(r"\.mlp\.experts\.\d+\.", ".mlp.", name) for name in source.tensors}
    assert [name for name in names if not is_documented(name) and ".mlp.router.weight" not in name] == []
    assert any(".mlp.experts." in name for name in source.tensors) == (MOE in preset)
    assert about["tensors"] == len(source.tensors)
    not_fp8 = {name: kind for name, kind in source.tensors.items() if not name.startswith("fp8.")}
    assert not_fp8 == tensor_kinds(config)
    assert check_resume(config, tmp_path, "abc") is not None
    assert about["bytes"] == sum(math.prod(shape) * dtype.itemsize for shape, dtype in source.tensors.values())
    assert (about["step"], about["consumed_samples"], about["tokens"]) == (3, 12, 12 * 32)
    assert about["tokenizer_fingerprint"] == "abc"
    assert (about["layout"]["ranks"], about["layout"]["data"]) == (ranks, ranks // (p.tensor * p.pipeline))
    assert about["layout"]["pipeline"] == p.pipeline
    assert Config.model_validate(about["config"]) == config
    text = json.dumps(about["config"], sort_keys=True, separators=(",", ":"))
    assert about["config_hash"] == hashlib.sha256(text.encode()).hexdigest()


def test_a_run_that_resumes_says_what_changed(world2: World, tmp_path: Path) -> None:
    config = config_of(DELAYED | TP2, seed=1)
    world2.run(_save, config, str(tmp_path), ranks=2)
    assert world2.run(_logged_on_load, config, str(tmp_path), ranks=2) == [[], []]
    other = config.model_copy(update={
        "parallel": config.parallel.model_copy(update={"tensor": 1}),
        "fp8": config.fp8.model_copy(update={"recipe": "current"}),
        "resilience": config.resilience.model_copy(update={"hang_seconds": 77.0}),
    })  # fmt: skip
    expected = (
        "changed in the config since step_00000003: parallel.tensor 2 -> 1; fp8.recipe delayed -> current; "
        "resilience.hang_seconds None -> 77.0"
    )
    assert world2.run(_logged_on_load, other, str(tmp_path), ranks=1) == [[expected]]


def changed(config: Config, **sections: Any) -> Config:
    """`config` with changed keys of sections, or changed top-level keys, validated."""
    tree = config.model_dump(mode="json")
    for name, value in sections.items():
        tree[name] = {**tree[name], **value} if isinstance(value, dict) else value
    return Config.model_validate(tree)


SAME: list[dict[str, Any]] = [
    {},
    {"model": {"num_query_groups": 4, "head_dim": 8, "ffn_hidden_size": 128, "max_position_embeddings": 8}},
    {"model": {"max_position_embeddings": 4096, "init_std": 0.5, "qkv_bias": False, "rope_scaling": None}},
    {"model": {"vocab_multiple": 128}},  # 100 tokens are padded to 128 with 64 too
    {"parallel": {"zero": 1}, "optimizer": {"beta1": 0.8}, "logging": {"interval": 7}},
    {"fp8": {"recipe": "delayed"}},
    {"optimizer": {"groups": [{"match": ["*"], "learning_rate_scale": 0.5}]}},
    {"model": {"rope_theta": 5e5, "norm_eps": 1e-6}, "checkpoint": {"allow_model_change": ["norm_eps", "rope_theta"]}},
]
OTHER: list[tuple[dict[str, Any], str]] = [
    ({"model": {"rope_theta": 500000.0}},
     r"step_00000003 holds the weights of another model \(model.rope_theta 10000.0 -> 500000.0\); set "
     r"model.rope_theta=10000.0, or choose another name .* set checkpoint.allow_model_change=\[rope_theta\]$"),
    ({"model": {"num_attention_heads": 4, "num_query_groups": 2, "head_dim": 16}},
     "model.num_attention_heads 8 -> 4"),
    ({"model": {"norm_eps": 1e-06}}, "set model.norm_eps=1.0e-05, or"),
    ({"model": {"sliding_window": 4}}, r"\(model.sliding_window None -> 4\); set model.sliding_window=null, or"),
    ({"model": {"parallel_block": True}}, "set model.parallel_block=false, or"),
    ({"model": {"position_embedding": "none"}}, "model.position_embedding rope -> none"),
    ({"model": {"rope_scaling": {"factor": 2.0}}},
     r"model.rope_scaling None -> .*allow_model_change=\[rope_scaling\]$"),
    ({"model": {"vocab_size": 99}}, "model.vocab_size 100 -> 99"),
    ({"model": {"hidden_size": 128, "norm_eps": 1e-06}},
     r"\(model.hidden_size 64 -> 128, model.head_dim 8 -> 16, model.norm_eps 1e-05 -> 1e-06\)(?!.*allow)"),
    ({"model": {"num_layers": 5}}, r"\(model.num_layers 4 -> 5\)(?!.*allow)"),
    ({"model": {"num_layers": 5}, "checkpoint": {"allow_model_change": ["num_layers"]}},
     "step_00000003 does not fit: 27 tensors missing in the checkpoint: model.layers.4.attention.k.weight"),
    ({"model": {"vocab_multiple": 256}},
     r"does not fit: 6 tensors of .*weight \(\[128, 64\] float32 in the checkpoint"),
    ({"training": {"precision": "bf16"}},
     "training.precision = fp32, this run has bf16, .* set training.precision=fp32"),
    ({"optimizer": {"moments_dtype": "bf16"}},
     "optimizer.moments_dtype = fp32, this run has bf16, .* bf16 and fp8 only"),
    ({"optimizer": {"name": "muon"}}, "optimizer.name = adamw, this run has muon, .* set optimizer.name=adamw, or"),
    ({"data": {"tokenizer": {"kind": "huggingface", "path": "x", "add_bos_token": True}}},
     "add_bos_token = False, this run has True; set data.tokenizer.add_bos_token=false, or"),
    ({"seed": 2, "model": {"rope_theta": 5.0}},
     r"seed = 1, this run has 2, (.|\n)*step_00000003 holds the weights of"),
]  # fmt: skip


def test_what_a_run_may_change_when_it_resumes(world2: World, tmp_path: Path) -> None:
    config = config_of(LAYERS_4, seed=1)
    world2.run(_save, config, str(tmp_path), ranks=1)
    for change in SAME:
        check_resume(changed(config, **change), tmp_path, "abc")
    for change, message in OTHER:
        with pytest.raises(IncompatibleCheckpoint, match=message):
            check_resume(changed(config, **change), tmp_path, "abc")
    with pytest.raises(IncompatibleCheckpoint, match=r"another vocabulary \(fingerprint abc, here None\)"):
        check_resume(config, tmp_path, None)


def test_the_end_of_documents_stays_when_a_run_resumes() -> None:
    """Checkpoints that do not record the token, since it was not set, do not fix it."""
    config = config_of(LAYERS_4, seed=1)
    before, now, unset = (
        changed(config, data={"tokenizer": {"kind": "huggingface", "path": "x", "end_token": token}})
        for token in ("</s>", "<eos>", None)
    )
    check_next_stage(before, before, 1, "a.yaml")
    check_next_stage(unset, now, 1, "a.yaml")
    then = before.model_dump(mode="json")
    assert list(_changed_fixed_keys(then, now)) == [
        "was saved with data.tokenizer.end_token = </s>, this run has <eos>; set data.tokenizer.end_token=</s>, or "
        "choose another name for a new run"
    ]


def test_another_number_of_experts(world2: World, tmp_path: Path) -> None:
    config = config_of(MOE, seed=1)
    assert config.model.moe is not None
    world2.run(_save, config, str(tmp_path), ranks=1)
    check_resume(config, tmp_path, "abc")
    more = config.model.moe.model_copy(update={"num_experts": 2 * config.model.moe.num_experts})
    with pytest.raises(IncompatibleCheckpoint, match=r"another model \(model.moe.num_experts \d+ -> \d+\)(?!.*allow)"):
        check_resume(changed(config, model={"moe": more.model_dump(mode="json")}), tmp_path, "abc")


@pytest.mark.parametrize(("moments", "other"), [("bf16", "fp8"), ("fp8", "bf16")])
def test_moments_may_change_between_bf16_and_fp8(world2: World, tmp_path: Path, moments: str, other: str) -> None:
    config = changed(config_of(BF16, seed=1), optimizer={"moments_dtype": moments})
    source = CheckpointReader(world2.run(_save, config, str(tmp_path / moments), ranks=1)[0])
    assert source.tensors == tensor_kinds(config) == tensor_kinds(changed(config, optimizer={"moments_dtype": other}))
    check_resume(changed(config, optimizer={"moments_dtype": other}), tmp_path / moments, "abc")
    with pytest.raises(IncompatibleCheckpoint, match=f"moments_dtype = {moments}, this run has fp32"):
        check_resume(changed(config, optimizer={"moments_dtype": "fp32"}), tmp_path / moments, "abc")


def _restarted_average(config: Config, folder: str) -> bool:
    trainer = _trainer(config)
    load_latest(trainer, Path(folder))
    state = trainer.optimizer.state()
    return all(torch.equal(average, master) for (_, average), (_, master) in zip(state["average"], state["master"]))


def test_a_moving_average_may_begin_and_end_when_a_run_resumes(world2: World, tmp_path: Path) -> None:
    without, moving = (config_of(preset, seed=1) for preset in (BF16 | DP2 | ZERO, BF16 | DP2 | ZERO | AVERAGE))
    for name, config in (("without", without), ("with", moving)):
        source = CheckpointReader(world2.run(_save, config, str(tmp_path / name), ranks=2)[0])
        assert source.tensors == tensor_kinds(config)
    check_resume(moving, tmp_path / "without", "abc")
    other_seed = config_of(BF16 | DP2 | ZERO | AVERAGE, seed=2)
    assert all(world2.run(_restarted_average, other_seed, str(tmp_path / "without"), ranks=2))
    check_resume(without, tmp_path / "with", "abc")
    world2.run(_logged_on_load, without, str(tmp_path / "with"), ranks=2)


def _save_with_muon_for_positions(config: Config, folder: str) -> None:
    """Train and save a run whose learned positions of compressed attention Muon updates, as it once did."""

    def two_dims(spec: ParamSpec) -> bool:
        return is_hidden_matrix(spec) or spec.shards[0].name.endswith("_position.weight")

    with patch.object(mixed_precision, "is_hidden_matrix", two_dims):
        trainer, parallel = start(config)
        trainer.train_step(0, batches(0, trainer.config, parallel))
        save_state(trainer, Path(folder), 1, "abc")


def _resume_with_adamw_for_positions(config: Config, folder: str) -> tuple[dict[str, bool], bool]:
    """Resume; return whether the moments of each weight start at 0, and whether the next step is made."""
    trainer, parallel = start(config)
    assert load_latest(trainer, Path(folder)) == 1
    zero = {}
    for shard in trainer.optimizer.shards:
        tensors = state_of(trainer.optimizer, shard.param)
        zero[spec_of(shard.param).shards[0].name] = not any(x.any() for key, x in tensors.items() if key != "master")
    _, result = trainer.train_step(1, batches(1, trainer.config, parallel))
    return zero, result.skipped


def test_a_weight_that_another_rule_updated_starts_with_new_moments(world2: World, tmp_path: Path) -> None:
    config = config_of(COMPRESSED | MUON)
    world2.run(_save_with_muon_for_positions, config, str(tmp_path), ranks=1)
    check_resume(config, tmp_path, "abc")
    ((zero, skipped),) = world2.run(_resume_with_adamw_for_positions, config, str(tmp_path), ranks=1)
    assert [name for name in zero if zero[name]] == [name for name in zero if name.endswith("_position.weight")]
    assert not skipped
    reader = CheckpointReader(step_folder(checkpoint_folder(tmp_path), 1))
    gone = "optimizer.momentum_buffer.layers.0.compressed_attention.q_down.weight"
    del reader.index.state_dict_metadata[gone]
    assert f"missing in the checkpoint: {gone}" in misfits(
        tensor_kinds(config), reader.index, _can_lack(config, reader)
    )


def test_another_length_of_the_amax_history_starts_afresh(world2: World, tmp_path: Path) -> None:
    config = config_of(DELAYED, seed=1)
    world2.run(_save, config, str(tmp_path), ranks=1)
    longer = changed(config, fp8={"amax_history_len": 5})
    check_resume(longer, tmp_path, "abc")
    expected = "changed in the config since step_00000003: fp8.amax_history_len 3 -> 5"
    assert world2.run(_logged_on_load, longer, str(tmp_path), ranks=1) == [[expected]]


def _save_two(config: Config, folder: str) -> None:
    trainer = _trainer(config)
    save_state(trainer, Path(folder), 2, "abc")
    trainer.config = changed(config, seed=7)
    save_state(trainer, Path(folder), 3, "abc")


def _find(config: Config, folder: str) -> str:
    parallel = initialize_model_parallel(device=initialize_distributed("cpu"))
    try:
        found = find_checkpoint(config, Path(folder), parallel, "abc")
    except IncompatibleCheckpoint as error:
        return str(error)
    return "none" if found is None else found.path.name


def test_an_older_checkpoint_that_is_used_instead_is_checked_too(world2: World, tmp_path: Path) -> None:
    """The newest one fits and its tensors are damaged, which nobody sees before there are process groups."""
    config = changed(config_of(NONE, seed=1), seed=7)
    world2.run(_save_two, config_of(NONE, seed=1), str(tmp_path), ranks=1)
    assert world2.run(_find, config, str(tmp_path)) == ["step_00000003"] * 2
    data = step_folder(checkpoint_folder(tmp_path), 3) / "__0_0.distcp"
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    check_resume(config, tmp_path, "abc")
    (message,) = set(world2.run(_find, config, str(tmp_path)))
    assert "step_00000002 was saved with seed = 1, this run has 7" in message


def test_a_run_folder_that_cannot_be_written_to_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for run_dir, reason in ((tmp_path / "file", "Not a directory"), (Path("/proc/runs"), "No such file or directory")):
        config = changed(config_of(NONE, seed=1), run_dir=str(run_dir))
        expected = rf"run_dir = '{run_dir}': the run cannot write to {run_dir}/r/checkpoints: {reason}; set run_dir to"
        with pytest.raises(ConfigError, match=expected):
            check_writable(config, run_dir / "r" / "checkpoints")
    check_writable(config, tmp_path / "r" / "checkpoints")
    assert list((tmp_path / "r" / "checkpoints").iterdir()) == []


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


def test_the_hash_of_a_config_is_stable() -> None:
    assert (
        config_hash({"b": [1, "é"], "a": {"x": 1e-05}})
        == hashlib.sha256(b'{"a":{"x":1e-05},"b":[1,"\\u00e9"]}').hexdigest()
    )
    config = config_of(NONE, seed=1)
    assert config_hash(config.model_dump(mode="json")) == config_hash(json.loads(config.model_dump_json()))
