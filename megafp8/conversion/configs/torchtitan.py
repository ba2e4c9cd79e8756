"""Table of torchtitan's `JobConfig`, as in the TOML files of its 2025 releases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

from megafp8.config.key_names import TORCHTITAN
from megafp8.conversion.configs.engine import (
    Foreign,
    Keys,
    Rule,
    Source,
    decay,
    fixed,
    flatten,
    implied,
    same_names,
    when,
    without,
    word,
)
from megafp8.host.shipped import shipped_configs

_MODELS = {
    "llama3 8B": "llama3-8b", "llama3 70B": "llama3-70b", "llama3 405B": "llama3-405b",
    "deepseek_v3 671B": "deepseek-v3", "qwen3 30B-A3B": "qwen3-30b-a3b", "gpt_oss 20b": "gpt-oss-20b",
}  # fmt: skip
"""Shipped configs with the network of a model and flavor."""
_FLOAT8 = ("float8", "quantize.dense.float8", "quantize.linear.float8")
_CHECKPOINT, _VALIDATION = "checkpoint.enable checkpoint.enable_checkpoint", "validation.enable validation.enabled"
"""Switches of sections, in older and newer releases."""
_DTYPES = {"bfloat16": "bf16", "float32": "fp32"}


def _model(value: Any, source: Source) -> Keys:
    model = f"{source.get('model.name')} {source.get('model.flavor')}"
    if model not in _MODELS:
        raise ValueError("no shipped config has this network (megafp8 init lists them)")
    text = shipped_configs()[_MODELS[model]].read_text(encoding="utf-8")
    return {f"model.{key}": x for key, x in yaml.safe_load(text)["model"].items()}


def _decay(value: Any, source: Source) -> Keys:
    steps, warmup = source.get("training.steps", 10000), source.get("lr_scheduler.warmup_steps", 200)
    length = round(steps * source.get("lr_scheduler.decay_ratio", 1))
    return decay(value, warmup, min(length, steps - warmup), steps)


def _float8(value: Any, source: Source) -> Keys:
    names = [name for name in (value if isinstance(value, list) else value.split(",")) if name]
    if any(name not in _FLOAT8 for name in names):
        raise ValueError("fp8.recipe is the counterpart of float8")
    recipe = next((source[key] for section in _FLOAT8 if (key := f"{section}.recipe_name") in source), "tensorwise")
    keys = word("fp8.recipe", tensorwise="current", rowwise="rowwise", rowwise_with_gw_hp="rowwise")(recipe, source)
    wgrad = {"fp8.override_linear_precision": [False, False, True]} if recipe == "rowwise_with_gw_hp" else {}
    return keys | wgrad if names else {}


RULES: Mapping[str, Rule] = {
    **same_names("seq_len max_norm gc_freq local_batch_size seed deterministic", "training."),
    **same_names(
        "tensor_parallel_degree pipeline_parallel_degree context_parallel_degree expert_parallel_degree "
        "pipeline_parallel_microbatch_size data_parallel_replicate_degree", "parallelism."),
    **same_names("log_freq enable_tensorboard", "metrics."), **same_names("train_timeout_seconds", "comm."),
    "job.dump_folder": TORCHTITAN["dump_folder"], "checkpoint.initial_load_path": TORCHTITAN["initial_load_path"],
    "model.name": _model, "model.flavor": _model, "model.converters": _float8,
    **{f"{section}.enable_fsdp_float8_all_gather": when("model.converters", "fp8.param_gather") for section in _FLOAT8},
    **{f"{section}.recipe_name": implied for section in _FLOAT8},
    "training.steps": "training.steps", "training.batch_size": TORCHTITAN["local_batch_size"],
    "training.global_batch_size": lambda value, source: {"training.global_batch_size": value} if value > 0 else {},
    "training.mixed_precision_param": word(TORCHTITAN["mixed_precision_param"], **_DTYPES),
    "training.mixed_precision_reduce": word(TORCHTITAN["mixed_precision_reduce"], **_DTYPES),
    "optimizer.name": word("optimizer.name", adamw="adamw"), "optimizer.lr": "optimizer.learning_rate",
    **{f"optimizer.{key}": f"optimizer.{key}" for key in ("beta1", "beta2", "eps", "weight_decay")},
    "lr_scheduler.warmup_steps": "optimizer.warmup_steps", "lr_scheduler.decay_type": _decay,
    "lr_scheduler.decay_ratio": implied,
    **{f"lr_scheduler.{key}": lambda value, source: {"optimizer.min_learning_rate": value * source["optimizer.lr"]}
       for key in ("lr_min", "min_lr_factor")},
    "parallelism.data_parallel_shard_degree": lambda value, source: {"parallel.fsdp": value != 1},
    "parallelism.expert_tensor_parallel_degree": "parallel.expert_tensor",
    "parallelism.enable_async_tensor_parallel": fixed(parallel__overlap_tensor="symmetric"),
    "parallelism.pipeline_parallel_schedule": lambda value, source: {} if source.get(
        "parallelism.pipeline_parallel_degree", 1) == 1 else word("parallel.schedule", **{
            "1f1b": "1f1b", "interleaved1f1b": "interleaved", "zbvzerobubble": "zb-v", "dualpipev": "dualpipev",
        })(value, source),
    "activation_checkpoint.mode": word("parallel.recompute", none="none", full="full"),
    **dict.fromkeys((*_CHECKPOINT.split(), *_VALIDATION.split()), implied),
    "checkpoint.interval": when(_CHECKPOINT, "checkpoint.interval"),
    "checkpoint.keep_latest_k": when(_CHECKPOINT, TORCHTITAN["keep_latest_k"]),
    "checkpoint.async_mode": lambda value, source: {TORCHTITAN["async_mode"]: value != "disabled"},
    "validation.freq": when(_VALIDATION, "training.eval_interval"),
    "validation.steps": when(_VALIDATION, "training.eval_steps"),
    **dict.fromkeys(("model.hf_assets_path", "model.tokenizer_path"), lambda value, source: {
        "data.tokenizer.kind": "huggingface", "data.tokenizer.path": value}),
    **without({
        "data.train names token files (megafp8 preprocess) or text": "training.dataset training.dataset_path "
        "validation.dataset",
        "megafp8 has fused kernels and CUDA graphs": "training.compile compile.enable compile.components",
        "the output layer is not FP8; see fp8.exclude": " ".join(f"{section}.filter_fqns" for section in _FLOAT8),
        "see the section profile": "profiling.enable_profiling profiling.save_traces_folder profiling.profile_freq",
    }),
}  # fmt: skip


def read_torchtitan(tree: Mapping[str, Any]) -> Foreign:
    """Return the config of a TOML file."""
    return Foreign("torchtitan", flatten(tree), RULES, {"lr_scheduler.decay_type": "linear"})
