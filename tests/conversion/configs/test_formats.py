"""Configs of other projects: what a reader of each example expects, what has no counterpart, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from megafp8.config import ConfigError, load_config
from megafp8.host.shipped import shipped_configs
from tools.init import main

EXAMPLES = Path(__file__).parent / "examples"


def _without_folder(tree: dict[str, Any], source: str) -> None:
    """Complete the model section, as the folder of checkpoint.init_from would."""
    tree["model"] = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4} | (tree.get("model") or {})


def _imported(name: str, folder: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """Import an example by the command, and return the written config and the lines without counterpart by key."""
    file = folder / "mine.yaml"
    assert main(["--from", str(EXAMPLES / name), str(file)]) == 0
    text = file.read_text()
    filled = file.with_name("filled.yaml")
    filled.write_text(text.replace(": FILL_IN", ": 1"))
    load_config(filled, complete=_without_folder)
    if filled.read_text() != text:
        with pytest.raises(ConfigError, match="FILL_IN"):
            load_config(file, complete=_without_folder)
    comments = text.partition("# Without counterpart:\n")[2].splitlines()
    return yaml.safe_load(text), dict(line.removeprefix("# ").split(" = ", 1) for line in comments)


SCRIPT = {
    "name": "pretrain",
    "model": {
        "num_layers": 24, "hidden_size": 2048, "num_attention_heads": 16, "num_query_groups": 4, "rope_theta": 500000,
        "normalization": "rmsnorm", "max_position_embeddings": 4096, "hidden_dropout": 0.0, "attention_dropout": 0.1,
        "moe": {"num_experts": 16, "top_k": 4, "first_dense_layers": 2, "aux_loss": 0.001},
    },
    "parallel": {"tensor": 2, "zero": 1},
    "fp8": {"recipe": "current", "format": "hybrid"},
    "training": {
        "steps": 1000, "seq_length": 4096, "micro_batch_size": 2, "global_batch_size": 512, "precision": "bf16"},
    "optimizer": {"learning_rate": 3e-4, "min_learning_rate": 3e-5, "schedule": "cosine", "warmup_steps": 10,
                  "weight_decay": 0.01, "beta2": 0.999},
    "data": {"train": {"data/code": 0.3, "data/web": 0.7}, "split": "98,2,0"},
    "logging": {"tensorboard": True},
}  # fmt: skip
BRIDGE = {
    "name": "mla-run",
    "model": {
        "num_layers": 8, "hidden_size": 1024, "num_attention_heads": 8, "normalization": "rmsnorm", "norm_eps": 1e-6,
        "hidden_dropout": 0.0, "attention_dropout": 0.0, "tie_embeddings": True,
        "latent_attention": {"q_rank": None, "kv_rank": 512},
    },
    "parallel": {"recompute": "selective", "recompute_ops": ["attention"]},
    "fp8": {"recipe": "blockwise", "format": "hybrid"},
    "training": {"steps": 1000, "seq_length": 8192, "micro_batch_size": 1, "global_batch_size": 64, "precision": "bf16",
                 "eval_interval": 0},
    "optimizer": {"name": "adamw", "learning_rate": 1e-4, "weight_decay": 0.1, "beta2": 0.999},
    "data": {"train": ["FILL_IN"]},
}  # fmt: skip
NEMO = {
    "name": "nemo_gpt",
    "model": {
        "num_layers": 2, "hidden_size": 128, "num_attention_heads": 4, "max_position_embeddings": 512,
        "position_embedding": "learned", "activation": "gelu_tanh", "normalization": "layernorm",
        "zero_centered_gamma": True, "linear_bias": True, "tie_embeddings": True, "hidden_dropout": 0.0,
        "attention_dropout": 0.1,
    },
    "training": {"steps": 300, "seq_length": 512, "micro_batch_size": 4, "global_batch_size": 8, "precision": "bf16",
                 "eval_interval": 50},
    "optimizer": {"name": "adamw", "learning_rate": 2e-4, "min_learning_rate": 0, "schedule": "cosine",
                  "warmup_steps": 10, "weight_decay": 0.01, "beta1": 0.9, "beta2": 0.98, "clip_grad_norm": 0.5},
    "data": {"train": ["FILL_IN"], "split": "90,5,5"},
}  # fmt: skip
NANOTRON = {
    "name": "tiny-1", "run_dir": "out", "seed": 7,
    "model": {
        "num_layers": 4, "hidden_size": 256, "num_attention_heads": 8, "num_query_groups": 2, "ffn_hidden_size": 704,
        "activation": "swiglu", "vocab_size": 5000, "vocab_multiple": 64, "norm_eps": 1e-6, "tie_embeddings": False,
        "init_std": 0.03,
    },
    "parallel": {"tensor": 2, "pipeline": 2, "sequence_parallel": False, "zero": 1},
    "training": {
        "steps": 100, "seq_length": 128, "micro_batch_size": 2, "global_batch_size": 24, "precision": "bf16"},
    "optimizer": {"name": "adamw", "learning_rate": 0.001, "min_learning_rate": 1e-5, "schedule": "wsd",
                  "warmup_steps": 5, "decay_until": 100, "decay_steps": 20, "weight_decay": 0.01, "beta1": 0.9,
                  "beta2": 0.95, "eps": 1e-8, "clip_grad_norm": 1.0},
    "data": {"train": ["FILL_IN"]},
    "checkpoint": {"interval": 50},
    "logging": {"wandb_project": "speed"},
}  # fmt: skip
AXOLOTL = {
    "name": "axolotl", "run_dir": "./outputs/lora",
    "model": {},
    "parallel": {"recompute": "full"},
    "training": {
        "steps": "FILL_IN", "seq_length": 2048, "micro_batch_size": 2, "global_batch_size": 8, "precision": "bf16"},
    "optimizer": {"name": "adamw", "learning_rate": 1e-4, "schedule": "linear", "warmup_steps": 10, "weight_decay": 0.0,
                  "beta2": 0.999},
    "data": {"train": ["FILL_IN"], "packing": "best_fit", "split": "980,20,0", "reset_at_documents": True,
             "mask_eod_loss": True, "loss_on": "answers"},
    "lora": {"rank": 8, "alpha": 16, "targets": ["q", "v", "proj"]},
    "checkpoint": {"init_from": "org/some-7b"},
}  # fmt: skip
TORCHTITAN = {
    "name": "torchtitan", "run_dir": "./out",
    "model": yaml.safe_load(shipped_configs()["llama3-70b"].read_text())["model"],
    "parallel": {"tensor": 8, "recompute": "full", "fsdp": True, "fsdp_replicas": 2},
    "fp8": {"recipe": "rowwise", "override_linear_precision": [False, False, True]},
    "training": {"steps": 1000, "seq_length": 8192, "micro_batch_size": 2, "global_batch_size": 64},
    "optimizer": {"name": "adamw", "learning_rate": 2e-4, "min_learning_rate": 2e-5, "warmup_steps": 100},
    "data": {"train": ["FILL_IN"], "tokenizer": {"kind": "huggingface", "path": "./assets/llama"}},
    "checkpoint": {"interval": 500, "async_save": False},
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "expected", "left"),
    [
        ("pretrain.sh", SCRIPT, {"frobnicate", "multi_latent_attention_is_unknown", "nproc_per_node", "save",
                                 "fp8_amax_history_len"}),
        ("bridge.yaml", BRIDGE, {"model.pipeline_model_parallel_size", "model.recompute_modules",
                                 "scheduler.lr_decay_style", "scheduler.lr_wsd_decay_iters"}),
        ("nemo.yaml", NEMO, {"trainer.devices", "model.data.data_prefix"}),
        ("nanotron.yaml", NANOTRON, {"data_stages", "model.model_config.unusual_key", "parallelism.pp_engine"}),
        ("axolotl.yml", AXOLOTL, {"datasets", "lora_dropout", "num_epochs", "wandb_watch"}),
        ("torchtitan.toml", TORCHTITAN, {"training.dataset", "lr_scheduler.decay_type",
                                         "float8.enable_fsdp_float8_all_gather"}),
    ],
)  # fmt: skip
def test_an_example_becomes_what_its_reader_expects(
    name: str, expected: dict[str, Any], left: set[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tree, comments = _imported(name, tmp_path)
    assert tree == expected
    assert set(comments) == left
    printed = capsys.readouterr().out
    assert f"{len(left)} without counterpart" in printed
    for key in left:
        assert f"  {key} = " in printed


def test_nothing_is_overwritten_or_executed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("mine")
    script = tmp_path / "run.sh"
    script.write_text(f"X=$(touch {tmp_path}/executed)\n--num-layers 2 --lr `touch {tmp_path}/executed`\n")
    assert main(["--from", str(script), str(file)]) == 2
    assert "mine.yaml exists and is not overwritten" in capsys.readouterr().err
    assert file.read_text() == "mine"
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name: mine\nmodel: {num_layers: 2}\n", "no config that megafp8 init --from reads"),
        ("once upon a time", "no config that megafp8 init --from reads"),
        ("python pretrain_t5.py --num-layers 2", "pretrain_t5.py"),
        ("tokens: {}\nparallelism: {}\nmodel: {model_config: {is_mamba_config: true}}\n", "is_mamba_config"),
    ],
)
def test_other_files_are_refused_by_name(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "source"
    source.write_text(text)
    assert main(["--from", str(source), str(tmp_path / "mine.yaml")]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert str(source) in error
    assert not (tmp_path / "mine.yaml").exists()
