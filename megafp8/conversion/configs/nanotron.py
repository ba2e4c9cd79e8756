"""Table of nanotron's YAML."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megafp8.config.key_names import HUGGING_FACE
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

_MODEL, _LR, _ADAM = "model.model_config.", "optimizer.learning_rate_scheduler.", "optimizer.optimizer_factory."


def _decay_style(value: Any, source: Source) -> Keys:
    warmup = source.get(f"{_LR}lr_warmup_steps", 0)
    start = source.get(f"{_LR}lr_decay_starting_step", warmup)
    length = source.get(f"{_LR}lr_decay_steps", source["tokens.train_steps"] - start)
    schedule = decay("sqrt" if value == "1-sqrt" else value, warmup, length, start + length)
    return schedule | {"optimizer.decay_until": start + length}


RULES: Mapping[str, Rule] = {
    **{f"{_MODEL}{key}": HUGGING_FACE[key] for key in (
        "intermediate_size", "num_hidden_layers", "num_key_value_heads", "rms_norm_eps", "tie_word_embeddings")},
    **same_names("hidden_size num_attention_heads max_position_embeddings rope_theta vocab_size", _MODEL),
    **same_names("micro_batch_size", "tokens."), **same_names("seed", "general."),
    **same_names("weight_decay clip_grad", "optimizer."),
    **same_names("adam_beta1 adam_beta2 adam_eps", _ADAM), **same_names("adam_beta1 adam_beta2 adam_eps", "optimizer."),
    **same_names("expert_parallel_size context_parallel_size", "parallelism."),
    f"{_MODEL}hidden_act": word("model.activation", silu="swiglu"), f"{_MODEL}attention_bias": "model.qkv_bias",
    f"{_MODEL}sliding_window_size": "model.sliding_window", "model.init_method.std": "model.init_std",
    f"{_MODEL}moe_config.num_experts": "model.moe.num_experts", f"{_MODEL}moe_config.top_k": "model.moe.top_k",
    f"{_MODEL}z_loss_coefficient": when(f"{_MODEL}z_loss_enabled", "training.z_loss"),
    f"{_MODEL}z_loss_enabled": implied, f"{_MODEL}rope_interleaved": word("", false=None),
    "model.make_vocab_size_divisible_by": "model.vocab_multiple",
    "model.dtype": word("training.precision", bfloat16="bf16", float16="fp16", float32="fp32"),
    "checkpoints.checkpoint_interval": "checkpoint.interval", "checkpoints.checkpoints_path": "run_dir",
    "general.run": "name", "general.project": "logging.wandb_project", "optimizer.zero_stage": "parallel.zero",
    "logging.iteration_step_info_interval": "logging.interval", "optimizer.accumulate_grad_in_fp32": implied,
    f"{_ADAM}name": word("optimizer.name", adamw="adamw"), f"{_LR}learning_rate": "optimizer.learning_rate",
    f"{_LR}min_decay_lr": "optimizer.min_learning_rate", f"{_LR}lr_warmup_steps": "optimizer.warmup_steps",
    f"{_LR}lr_decay_style": _decay_style, f"{_LR}lr_warmup_style": word("", linear=None),
    "parallelism.pp": "parallel.pipeline", "parallelism.tp": "parallel.tensor",
    "parallelism.pp_engine": word("parallel.schedule", **{"1f1b": "1f1b"}),
    "parallelism.tp_mode": word("parallel.sequence_parallel", reduce_scatter=True, all_reduce=False),
    "parallelism.recompute_layer": fixed(parallel__recompute="full"),
    "tokenizer.tokenizer_name_or_path": lambda value, source: {
        "data.tokenizer.kind": "huggingface", "data.tokenizer.path": value},
    "tokens.sequence_length": "training.seq_length", "tokens.train_steps": "training.steps",
    "tokens.batch_accumulation_per_replica": lambda value, source: {
        "training.global_batch_size": value * source["tokens.micro_batch_size"] * source["parallelism.dp"]},
    "tokens.val_check_interval": lambda value, source: {"training.eval_interval": max(value, 0)},
    "tokens.limit_val_batches": lambda value, source: {"training.eval_steps": value} if value else {},
    **dict.fromkeys((f"{_LR}lr_decay_steps", f"{_LR}lr_decay_starting_step", "parallelism.dp"), implied),
    **dict.fromkeys((f"{_MODEL}is_llama_config", f"{_MODEL}is_qwen2_config", f"{_MODEL}initializer_range"), implied),
    **without({
        "data.train names token files (megafp8 preprocess) or text; see also docs/stages.md": "data_stages",
        "see checkpoint.init_from": "checkpoints.resume_checkpoint_path",
    }),
}  # fmt: skip


def read_nanotron(tree: Mapping[str, Any]) -> Foreign:
    """Return the config of a run of nanotron's Llama or Qwen2, whose defaults are megafp8's except for norm_eps."""
    values = flatten(tree)
    networks = {key.removeprefix(_MODEL) for key in values if key.startswith(f"{_MODEL}is_")}
    if other := networks - {"is_llama_config", "is_qwen2_config"}:
        raise ValueError(f"{_MODEL}{min(other)}: megafp8 init --from reads is_llama_config and is_qwen2_config")
    return Foreign("nanotron", values, RULES, {f"{_MODEL}rms_norm_eps": 1e-6})
