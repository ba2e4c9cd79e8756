"""Suggestions for keys that do not exist: names of other frameworks, and keys of other sections."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from functools import cache

from megafp8.config.reader import section_of
from megafp8.config.schema import Config
from megafp8.section import Section

HUGGING_FACE = {  # names of TrainingArguments, config.json, and axolotl, which uses many of them
    "adam_epsilon": "optimizer.eps",
    "adapter": "lora",
    "base_model": "checkpoint.init_from",
    "bf16": "training.precision",
    "context_parallel_size": "parallel.context",
    "dataloader_num_workers": "data.num_workers",
    "datasets": "data.train",
    "ddp_timeout": "timeout_seconds",
    "dp_replicate_size": "parallel.fsdp_replicas",
    "dp_shard_size": "parallel.fsdp",
    "expert_parallel_size": "parallel.expert",
    "final_logit_softcapping": "model.logit_softcap",
    "fp16": "training.precision",
    "gradient_accumulation_steps": "training.global_batch_size",
    "gradient_checkpointing": "parallel.recompute",
    "hidden_act": "model.activation",
    "initializer_range": "model.init_std",
    "intermediate_size": "model.ffn_hidden_size",
    "kd_temperature": "data.distillation.temperature",
    "layer_norm_eps": "model.norm_eps",
    "logging_steps": "logging.interval",
    "lora_alpha": "lora.alpha",
    "lora_model_dir": "checkpoint.init_from",
    "lora_r": "lora.rank",
    "lora_target_modules": "lora.targets",
    "lr_scheduler": "optimizer.schedule",
    "lr_scheduler_type": "optimizer.schedule",
    "max_completion_length": "data.grpo.max_tokens",
    "max_grad_norm": "optimizer.clip_grad_norm",
    "max_seq_length": "training.seq_length",
    "max_steps": "training.steps",
    "model_name_or_path": "checkpoint.init_from",
    "moe_intermediate_size": "model.moe.ffn_hidden_size",
    "n_embd": "model.hidden_size",
    "n_head": "model.num_attention_heads",
    "n_layer": "model.num_layers",
    "n_positions": "model.max_position_embeddings",
    "num_epochs": "training.steps",
    "num_experts_per_tok": "model.moe.top_k",
    "num_generations": "data.grpo.group_size",
    "num_hidden_layers": "model.num_layers",
    "num_key_value_heads": "model.num_query_groups",
    "num_local_experts": "model.moe.num_experts",
    "num_train_epochs": "training.steps",
    "optim": "optimizer.name",
    "output_dir": "run_dir",
    "per_device_train_batch_size": "training.micro_batch_size",
    "pipeline_parallel_size": "parallel.pipeline",
    "report_to": "logging.wandb_project",
    "resume_from_checkpoint": "checkpoint.resume",
    "rms_norm_eps": "model.norm_eps",
    "rope_parameters": "model.rope_scaling",
    "run_name": "name",
    "sample_packing": "data.packing",
    "save_steps": "checkpoint.interval",
    "save_total_limit": "checkpoint.keep_last",
    "sequence_len": "training.seq_length",
    "tensor_parallel_size": "parallel.tensor",
    "tie_word_embeddings": "model.tie_embeddings",
    "tokenizer_config": "data.tokenizer.path",
    "torch_dtype": "training.precision",
    "train_on_inputs": "data.loss_on",
    "type_vocab_size": "model.token_types",
    "val_set_size": "data.split",
    "wandb_name": "name",
    "warmup_ratio": "optimizer.warmup_steps",
}
_MEGATRON = {
    "adam_beta1": "optimizer.beta1",
    "adam_beta2": "optimizer.beta2",
    "adam_eps": "optimizer.eps",
    "add_qkv_bias": "model.qkv_bias",
    "apply_layernorm_1p": "model.zero_centered_gamma",
    "clip_grad": "optimizer.clip_grad_norm",
    "context_parallel_size": "parallel.context",
    "data_cache_path": "data.index_cache",
    "data_path": "data.train",
    "deterministic_mode": "deterministic",
    "disable_bias_linear": "model.linear_bias",
    "distributed_timeout_minutes": "timeout_seconds",
    "eod_mask_loss": "data.mask_eod_loss",
    "eval_iters": "training.eval_steps",
    "exit_interval": "training.stop_after",
    "expert_model_parallel_size": "parallel.expert",
    "expert_tensor_parallel_size": "parallel.expert_tensor",
    "finetune": "checkpoint.init_from",
    "first_last_layers_bf16": "fp8.first_blocks_bf16",
    "fp8_amax_compute_algo": "fp8.amax_compute_algo",
    "fp8_amax_history_len": "fp8.amax_history_len",
    "fp8_format": "fp8.format",
    "fp8_margin": "fp8.margin",
    "fp8_param_gather": "fp8.param_gather",
    "fp8_recipe": "fp8.recipe",
    "group_query_attention": "model.num_query_groups",
    "init_method_std": "model.init_std",
    "initial_loss_scale": "training.loss_scale.initial_scale",
    "keep_fp8_transpose_cache": "fp8.keep_weight_transposes",
    "keep_fp8_weight_transpose_cache": "fp8.keep_weight_transposes",
    "kv_channels": "model.head_dim",
    "load": "checkpoint.resume",
    "log_interval": "logging.interval",
    "loss_scale_window": "training.loss_scale.growth_interval",
    "lr": "optimizer.learning_rate",
    "lr_decay_iters": "optimizer.decay_until",
    "lr_decay_style": "optimizer.schedule",
    "lr_warmup_iters": "optimizer.warmup_steps",
    "lr_wsd_decay_iters": "optimizer.decay_steps",
    "make_vocab_size_divisible_by": "model.vocab_multiple",
    "mask_prob": "data.masked_lm.probability",
    "min_lr": "optimizer.min_learning_rate",
    "moe_aux_loss_coeff": "model.moe.aux_loss",
    "moe_ffn_hidden_size": "model.moe.ffn_hidden_size",
    "moe_router_bias_update_rate": "model.moe.bias_update_rate",
    "moe_router_enable_expert_bias": "model.moe.selection_bias",
    "moe_router_score_function": "model.moe.score",
    "moe_router_topk": "model.moe.top_k",
    "moe_router_topk_scaling_factor": "model.moe.scaling_factor",
    "moe_shared_expert_intermediate_size": "model.moe.shared_ffn_hidden_size",
    "moe_token_dispatcher_type": "parallel.expert_dispatch",
    "moe_z_loss_coeff": "model.moe.z_loss",
    "no_fp8_wgrad": "fp8.override_linear_precision",
    "norm_epsilon": "model.norm_eps",
    "num_distributed_optimizer_instances": "parallel.fsdp_replicas",
    "num_layers_at_end_in_bf16": "fp8.last_blocks_bf16",
    "num_layers_at_start_in_bf16": "fp8.first_blocks_bf16",
    "num_layers_per_virtual_pipeline_stage": "parallel.virtual_pipeline",
    "num_virtual_stages_per_pipeline_rank": "parallel.virtual_pipeline",
    "optimizer_cpu_offload": "optimizer.offload",
    "optimizer_offload_fraction": "optimizer.offload",
    "pipeline_model_parallel_size": "parallel.pipeline",
    "position_embedding_type": "model.position_embedding",
    "pretrained_checkpoint": "checkpoint.init_from",
    "qk_layernorm": "model.qk_norm",
    "recompute_granularity": "parallel.recompute",
    "recompute_modules": "parallel.recompute_ops",
    "recompute_num_layers": "parallel.recompute_blocks",
    "reset_attention_mask": "data.reset_at_documents",
    "reset_position_ids": "data.reset_at_documents",
    "rotary_base": "model.rope_theta",
    "rotary_percent": "model.partial_rotary_factor",
    "save": "run_dir",
    "save_interval": "checkpoint.interval",
    "squared_relu": "model.activation",
    "swiglu": "model.activation",
    "tensor_model_parallel_size": "parallel.tensor",
    "tensorboard_dir": "logging.tensorboard",
    "tokenizer_model": "data.tokenizer.path",
    "tokenizer_type": "data.tokenizer.kind",
    "tp_comm_overlap": "parallel.overlap_tensor",
    "train_iters": "training.steps",
    "untie_embeddings_and_output_weights": "model.tie_embeddings",
    "use_distributed_optimizer": "parallel.zero",
    "use_torch_fsdp2": "parallel.fsdp",
}
TORCHTITAN = {
    "activation_checkpoint.mode": "parallel.recompute",
    "async_mode": "checkpoint.async_save",
    "context_parallel_degree": "parallel.context",
    "data_parallel_replicate_degree": "parallel.fsdp_replicas",
    "data_parallel_shard_degree": "parallel.fsdp",
    "dataset": "data.train",
    "dataset_path": "data.train",
    "decay_ratio": "optimizer.decay_steps",
    "decay_type": "optimizer.schedule",
    "dump_folder": "run_dir",
    "enable_async_tensor_parallel": "parallel.overlap_tensor",
    "enable_fsdp_float8_all_gather": "fp8.param_gather",
    "enable_tensorboard": "logging.tensorboard",
    "enable_wandb": "logging.wandb_project",
    "expert_parallel_degree": "parallel.expert",
    "filter_fqns": "fp8.exclude",
    "gc_freq": "training.gc_interval",
    "initial_load_path": "checkpoint.init_from",
    "keep_latest_k": "checkpoint.keep_last",
    "local_batch_size": "training.micro_batch_size",
    "log_freq": "logging.interval",
    "lr_min": "optimizer.min_learning_rate",
    "max_norm": "optimizer.clip_grad_norm",
    "mixed_precision_param": "training.precision",
    "mixed_precision_reduce": "optimizer.reduce_dtype",
    "pipeline_parallel_degree": "parallel.pipeline",
    "pipeline_parallel_layers_per_stage": "parallel.layers_per_stage",
    "pipeline_parallel_microbatch_size": "training.micro_batch_size",
    "pipeline_parallel_schedule": "parallel.schedule",
    "pipeline_parallel_schedule_csv": "parallel.schedule",
    "recipe_name": "fp8.recipe",
    "seq_len": "training.seq_length",
    "tensor_parallel_degree": "parallel.tensor",
    "tokenizer_path": "data.tokenizer.path",
    "train_timeout_seconds": "timeout_seconds",
    "validation.freq": "training.eval_interval",
    "validation.steps": "training.eval_steps",
}
OTHER_NAMES: Mapping[str, str] = HUGGING_FACE | _MEGATRON | TORCHTITAN
"""Keys of a config by their names in other frameworks; a name with a dot counts in that section only."""
_MOST = 3
"""Maximum number of suggestions in one message."""


@cache
def key_paths() -> tuple[str, ...]:
    """Return the dotted paths of all keys, sections included."""

    def walk(section: type[Section], prefix: str) -> Iterator[str]:
        for name, field in section.model_fields.items():
            yield prefix + name
            if (inner := section_of(field.annotation)) is not None:
                yield from walk(inner, f"{prefix}{name}.")

    return tuple(walk(Config, ""))


def advice(path: str, value: object, siblings: Sequence[str]) -> str:
    """Return a suggestion of what to write instead of a key that does not exist.

    Args:
        path: Dotted path of the key.
        value: Value of the key. If it is a section, its keys are looked up too.
        siblings: Valid keys of the same section.
    """
    keys, inner = _suggested(path, siblings), list(value) if isinstance(value, dict) else []
    if not all(f"{key}.{name}" in key_paths() for key in keys for name in inner) or not keys:
        names = {name: _suggested(f"{path}.{name}", ()) for name in inner}
        if renamed := [f"{path}.{name} is {names[name][0]} here" for name in inner if names[name]]:
            return ", ".join(renamed)
    return f"did you mean {' or '.join(keys)}?" if keys else f"valid: {', '.join(siblings)}"


def _suggested(path: str, siblings: Sequence[str]) -> list[str]:
    """Return the dotted paths of existing keys that a nonexistent key may refer to.

    Args:
        path: Dotted path of the nonexistent key.
        siblings: Valid keys of the same section.
    """
    path = path.lstrip("-").replace("-", "_")
    section, _, name = path.rpartition(".")
    if other := OTHER_NAMES.get(path) or OTHER_NAMES.get(name):
        return [other]
    namesakes = [key for key in key_paths() if key.rpartition(".")[2] == name]
    least = min((key.count(".") for key in namesakes), default=0)
    near = difflib.get_close_matches(name, siblings, n=1, cutoff=0.5)
    keys = [key for key in namesakes if key.count(".") == least]
    return keys[:_MOST] or [f"{section}.{sibling}" if section else sibling for sibling in near]
