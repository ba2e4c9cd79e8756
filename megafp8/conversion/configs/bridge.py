"""Names of Megatron-LM's arguments in the YAML of Megatron Bridge and of NeMo 1."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from megafp8.conversion.configs.engine import Foreign, flatten
from megafp8.conversion.configs.megatron import describe
from megafp8.conversion.megatron.run_config import ARGUMENTS

_COMMON = ARGUMENTS | {
    "path_to_cache": "data_cache_path", "random_seed": "seed", "fp8": "fp8_format", "blend": "data_path",
    "sequence_length": "seq_length",
}  # fmt: skip
"""Arguments by their names in Megatron Bridge, where these differ."""
_LAST = ("comm_overlap", "mixed_precision")
"""Sections of Megatron Bridge that override the section model."""
_NEMO = {
    "name": "wandb_exp_name", "exp_manager.name": "wandb_exp_name", "trainer.max_steps": "train_iters",
    "trainer.log_every_n_steps": "log_interval", "trainer.val_check_interval": "eval_interval",
    "trainer.limit_val_batches": "eval_iters", "trainer.gradient_clip_val": "clip_grad",
    "exp_manager.wandb_logger_kwargs.project": "wandb_project", "restore_from_path": "pretrained_checkpoint",
    "model.encoder_seq_length": "seq_length", "model.data.seq_length": "seq_length", "model.bias": "add_bias_linear",
    "model.layernorm_epsilon": "norm_epsilon", "model.rotary_percentage": "rotary_percent",
    "model.native_amp_init_scale": "initial_loss_scale", "model.native_amp_growth_interval": "loss_scale_window",
    "model.activations_checkpoint_granularity": "recompute_granularity", "model.num_moe_experts": "num_experts",
    "model.activations_checkpoint_num_layers": "recompute_num_layers", "model.data.data_prefix": "data_path",
    "model.data.splits_string": "split", "model.data.index_mapping_dir": "data_cache_path",
    "model.optim.sched.min_lr": "min_lr", "model.optim.sched.warmup_steps": "lr_warmup_iters",
    "model.tokenizer.model": "tokenizer_model", "model.tokenizer.library": "tokenizer_type",
}  # fmt: skip
"""Arguments by NeMo's keys, where the last word differs."""
_NEMO_SECTIONS = ("model", "model.data", "model.optim")
_NEMO_WORDS: Mapping[tuple[str, str], dict[str, Any]] = {
    ("activation", "gelu"): {"swiglu": False}, ("activation", "swiglu"): {"swiglu": True},
    ("activation", "fast-swiglu"): {"swiglu": True}, ("normalization", "rmsnorm"): {"normalization": "RMSNorm"},
    ("normalization", "layernorm"): {"normalization": "LayerNorm"}, ("precision", "16"): {"fp16": True},
    ("normalization", "layernorm1p"): {"normalization": "LayerNorm", "apply_layernorm_1p": True},
    ("precision", "32"): {"fp32": True}, ("precision", "16-mixed"): {"fp16": True},
    ("precision", "bf16"): {"bf16": True},
    ("precision", "bf16-mixed"): {"bf16": True}, ("fp8_hybrid", "true"): {"fp8_format": "hybrid"},
    ("fp8_e4m3", "true"): {"fp8_format": "e4m3"},
}  # fmt: skip
"""Arguments by the last word of a key of NeMo, and its value."""


def read_bridge(tree: Mapping[str, Any]) -> Foreign:
    """Return the config of Megatron Bridge, whose sections are called `model` or, in older versions, `model_config`."""
    values, names = dict[str, Any](), dict[str, str]()
    for section in sorted(tree, key=lambda name: name.removesuffix("_config") in _LAST):
        for path, value in flatten({section: tree[section]}).items():
            key = path.partition(".")[2].removeprefix("transformer.")
            if not key or path.endswith("_"):  # `_target_` and `_call_` are for Hydra
                continue
            values[_COMMON.get(key, key)], names[_COMMON.get(key, key)] = value, path
    return _describe("Megatron Bridge", values, names)


def read_nemo(tree: Mapping[str, Any]) -> Foreign:
    """Return the config of NeMo 1, with references such as ${model.encoder_seq_length} resolved."""
    values, names, flat = dict[str, Any](), dict[str, str](), flatten(tree)
    for path, value in flat.items():
        section, _, name = path.rpartition(".")
        if reference := re.fullmatch(r"\$\{(\.?)([\w.]+)\}", str(value)):
            value = flat.get(f"{section}.{reference[2]}" if reference[1] else reference[2], value)
        key = _NEMO.get(path, name if section in _NEMO_SECTIONS else path)
        new: dict[str, Any] = _NEMO_WORDS.get((name, str(value).lower()), {key: value})
        if path == "model.optim.betas":
            new = dict(zip(("adam_beta1", "adam_beta2"), value))
        elif path == "model.optim.name" and "adam" in str(value):
            new = {"optimizer": "adam"}
        elif path == "model.optim.sched.name" and value == "CosineAnnealing":
            new = {"lr_decay_style": "cosine"}
        elif name.startswith("fp8") and not flat.get("model.fp8"):
            continue  # FP8 is off
        values |= new
        names |= dict.fromkeys(new, path)
    return _describe("NeMo", values, names)


def _describe(project: str, values: dict[str, Any], names: dict[str, str]) -> Foreign:
    if (tied := values.pop("share_embeddings_and_output_weights", None)) is not None:
        values["untie_embeddings_and_output_weights"] = not tied
        names["untie_embeddings_and_output_weights"] = names["share_embeddings_and_output_weights"]
    return describe(project, values, names)
