"""Table of Megatron-LM's arguments, which Megatron Bridge and NeMo share under other names.

Properties of the network that depend on several arguments, and on the values of missing arguments, come from the traits
that read checkpoints (`megafp8.conversion.megatron.args`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from megafp8.config import Config, MoeConfig
from megafp8.config.key_names import OTHER_NAMES
from megafp8.conversion.configs.engine import (
    UNRESOLVED,
    Foreign,
    Function,
    Keys,
    Rule,
    Source,
    apply,
    fixed,
    implied,
    number,
    refuse,
    same_names,
    when,
    without,
    word,
)
from megafp8.conversion.configs.shell import read_arguments
from megafp8.conversion.megatron.args import REFUSED, UNUSED, model_fields

_DESTINATIONS = {"disable_bias_linear": "add_bias_linear", "no_position_embedding": "add_position_embedding"}
"""Arguments that are stored as the opposite."""
_DEFAULTS = {"lr_decay_style": "linear", "weight_decay": 0.01, "adam_beta2": 0.999}
"""Values of missing arguments of a whole run, where megafp8 has another default."""
_LATENT = "multi_latent_attention"
_OPS = {"core_attn": "attention", "layernorm": "norms", "moe_act": "activation"}
_YARN = {"rotary_scaling_factor": "factor"} | {
    key: key for key in ("mscale", "mscale_all_dim", "beta_fast", "beta_slow", "original_max_position_embeddings")
}
_TOKENIZERS = dict.fromkeys(
    ("sentencepiece", "llama2tokenizer", "sentencepiecetokenizer", "gptsentencepiecetokenizer"), "sentencepiece"
) | {"huggingface": "huggingface", "huggingfacetokenizer": "huggingface", "tiktokenizer": "tiktoken"}


def _steps(key: str) -> Function:
    """Return a rule that turns samples into steps of the global batch."""

    def rule(samples: Any, source: Source) -> Keys:
        if not isinstance(batch := source.get("global_batch_size"), int):
            raise ValueError("in samples; the steps follow from global_batch_size, which is not given")
        return {key: samples // batch}

    return rule


def _warmup_fraction(value: Any, source: Source) -> Keys:
    for name in ("lr_decay_iters", "lr_decay_samples", "train_iters", "train_samples"):
        if name in source:
            length = apply(_steps("") if name.endswith("samples") else "", source[name], source)
            return {"optimizer.warmup_steps": round(value * length[""])}
    raise ValueError("a fraction of an unknown number of steps")


def _load(value: Any, source: Source) -> Keys:
    if not source.get("finetune") and value != source.get("save"):
        raise ValueError("a run resumes from its own folder; checkpoint.init_from starts from other weights")
    return {"checkpoint.init_from": value} if source.get("finetune") else {}


def _save(value: Any, source: Source) -> Keys:
    path = PurePath(str(value))
    return {"run_dir": str(path.parent), "name": source.get("wandb_exp_name", path.name)}


def _data_path(value: Any, source: Source) -> Keys:
    parts = value if isinstance(value, list) else [value]
    blend = all(isinstance(weight, (int, float)) for weight in parts[::2])
    return {"data.train": {str(path): weight for weight, path in zip(parts[::2], parts[1::2])} if blend else parts}


def _tokenizer_model(value: Any, source: Source) -> Keys:
    word("", **_TOKENIZERS)(source.get("tokenizer_type"), source)
    return {"data.tokenizer.path": value}


def _schedule(value: Any, source: Source) -> Keys:
    if str(value).lower() == "wsd" and source.get("lr_wsd_decay_style") != "minus_sqrt":
        raise ValueError("wsd decays by 1 - sqrt here, as with lr_wsd_decay_style minus_sqrt")
    return word("optimizer.schedule", cosine="cosine", linear="linear", constant="constant", wsd="wsd")(value, source)


def _interleaved(chunks: Any, source: Source) -> Keys:
    return {"parallel.virtual_pipeline": chunks, "parallel.schedule": "interleaved"} if chunks > 1 else {}


def _layers_per_chunk(value: Any, source: Source) -> Keys:
    chunks, rest = divmod(source.get("num_layers", 0), value * source.get("pipeline_model_parallel_size", 1))
    return _interleaved(chunks, source) if chunks and not rest else refuse("num_layers is no multiple")(value, source)


def _recompute(value: Any, source: Source) -> Keys:
    modules = source.get("recompute_modules", ["core_attn"])
    ops = [_OPS[name] for name in (modules if isinstance(modules, list) else [modules]) if name in _OPS]
    if value == "selective" and not ops:
        raise ValueError(f"parallel.recompute_ops has none of {modules}")
    return {"parallel.recompute": value} | ({"parallel.recompute_ops": ops} if value == "selective" else {})


def _recompute_modules(value: Any, source: Source) -> Keys:
    if unknown := [str(name) for name in (value if isinstance(value, list) else [value]) if name not in _OPS]:
        raise ValueError(f"parallel.recompute_ops has no {', '.join(unknown)}")
    return {}  # `_recompute` reads it


def _first_last(value: Any, source: Source) -> Keys:
    ends = {"start": "first", "end": "last"}
    return {f"fp8.{ours}_blocks_bf16": source.get(f"num_layers_at_{x}_in_bf16", 1) for x, ours in ends.items()}


def _quick_geglu(value: Any, source: Source) -> Keys:
    if (source.get("glu_linear_offset"), source.get("activation_func_clamp_value")) != (1, 7):
        raise ValueError("megafp8 has it as clamped_swiglu, with glu_linear_offset 1 and activation_func_clamp_value 7")
    return {"model.activation": "clamped_swiglu"}


def _qk_norm(value: Any, source: Source) -> Keys:
    if value and source.get(_LATENT) is not True and source.get("normalization") in (None, "LayerNorm"):
        raise ValueError("megafp8 only has RMSNorm of queries and keys")
    return {} if source.get(_LATENT) else {"model.qk_norm": value}  # latents always have norms


def _aux_loss(value: Any, source: Source) -> Keys:
    if value and source.get("moe_router_load_balancing_type", "aux_loss") in ("aux_loss", "sinkhorn"):
        raise ValueError("megafp8 balances over a sequence or the global batch, not over a micro-batch")
    return {}  # the traits read it


def _unless(switch: str, rule: Rule) -> Function:
    return lambda value, source: {} if source.get(switch) else apply(rule, value, source)


RULES: Mapping[str, Rule] = {
    **same_names(
        "num_layers hidden_size ffn_hidden_size num_attention_heads max_position_embeddings rotary_base rotary_percent "
        "init_method_std hidden_dropout attention_dropout norm_epsilon add_qkv_bias vocab_size mtp_num_layers "
        "make_vocab_size_divisible_by mtp_loss_scaling_factor apply_layernorm_1p tensor_model_parallel_size "
        "sequence_parallel pipeline_model_parallel_size context_parallel_size expert_model_parallel_size "
        "expert_tensor_parallel_size overlap_grad_reduce overlap_param_gather micro_batch_size global_batch_size "
        "seq_length train_iters exit_interval lr min_lr lr_decay_iters lr_warmup_iters lr_wsd_decay_iters weight_decay "
        "adam_beta1 adam_beta2 adam_eps clip_grad split data_cache_path num_workers save_interval async_save "
        "log_interval wandb_project seed deterministic_mode eod_mask_loss mask_prob moe_ffn_hidden_size "
        "moe_shared_expert_intermediate_size moe_router_topk_scaling_factor pretrained_checkpoint recompute_num_layers "
        "moe_router_enable_expert_bias moe_router_bias_update_rate initial_loss_scale loss_scale_window min_loss_scale "
        "hysteresis"
    ),
    **{key: when("fp8_format", OTHER_NAMES[key]) for key in (
        "fp8_margin", "fp8_amax_history_len", "fp8_amax_compute_algo", "fp8_param_gather")},
    **dict.fromkeys((
        _LATENT, "finetune", "data_parallel_sharding_strategy", "manual_gc", "num_layers_at_start_in_bf16",
        "num_layers_at_end_in_bf16", "lr_wsd_decay_style", "use_rotary_position_embeddings", "reset_attention_mask",
    ), implied),
    "wandb_exp_name": "name", "lr_warmup_init": "optimizer.warmup_from", "num_experts": "model.moe.num_experts",
    "moe_apply_probs_on_input": "model.moe.scale_inputs", "moe_expert_capacity_factor": "model.moe.capacity_factor",
    "kv_channels": _unless(_LATENT, "model.head_dim"), "qk_layernorm": _qk_norm, "moe_aux_loss_coeff": _aux_loss,
    "normalization": word("model.normalization", layernorm="layernorm", rmsnorm="rmsnorm"),
    **{name: when(_LATENT, f"model.latent_attention.{ours}") for name, ours in {
        "q_lora_rank": "q_rank", "kv_lora_rank": "kv_rank", "qk_head_dim": "nope_head_dim",
        "qk_pos_emb_head_dim": "rope_head_dim", "v_head_dim": "value_head_dim"}.items()},
    **{name: when(_LATENT, f"model.yarn.{ours}") for name, ours in _YARN.items()},
    "rope_type": _unless(_LATENT, word("", rope=None)),
    "squared_relu": fixed(model__activation="squared_relu"), "quick_geglu": _quick_geglu,
    **{key: when("quick_geglu", implied) for key in ("glu_linear_offset", "activation_func_clamp_value")},
    "bf16": fixed(training__precision="bf16"), "fp16": fixed(training__precision="fp16"),
    "fp32": fixed(training__precision="fp32"),
    "grad_reduce_in_bf16": fixed(optimizer__reduce_dtype="bf16"), "lr_decay_style": _schedule,
    "lr_warmup_fraction": _warmup_fraction, "train_samples": _steps("training.steps"),
    "lr_decay_samples": _steps("optimizer.decay_until"), "lr_warmup_samples": _steps("optimizer.warmup_steps"),
    "optimizer": word("optimizer.name", adam="adamw", adamw="adamw", muon="muon", lion="lion"),
    "eval_interval": lambda value, source: {"training.eval_interval": value if source.get("eval_iters", 1) else 0},
    "eval_iters": lambda value, source: {"training.eval_steps": value} if value else {},
    "manual_gc_interval": lambda value, source: {"training.gc_interval": value} if value else {},
    "save": _save, "load": _load, "data_path": _data_path, "tokenizer_model": _tokenizer_model,
    "tokenizer_type": word("data.tokenizer.kind", **_TOKENIZERS), "tensorboard_dir": fixed(logging__tensorboard=True),
    "distributed_timeout_minutes": lambda value, source: {"timeout_seconds": 60.0 * value},
    "fp8_format": lambda value, source: word("fp8.format", hybrid="hybrid", e4m3="e4m3")(value, source)
    | ({} if "fp8_recipe" in source else {"fp8.recipe": "delayed"}),
    "fp8_recipe": when("fp8_format", word(
        "fp8.recipe", delayed="delayed", tensorwise="current", blockwise="blockwise", mxfp8="mxfp8")),
    "no_fp8_wgrad": fixed(fp8__override_linear_precision=[False, False, True]),
    "first_last_layers_bf16": lambda value, source: _first_last(value, source) if value else {},
    "use_distributed_optimizer": _unless("use_megatron_fsdp", _unless("use_torch_fsdp2", fixed(parallel__zero=1))),
    "use_torch_fsdp2": fixed(parallel__fsdp=True),
    "use_megatron_fsdp": lambda value, source: {"parallel.fsdp": True} if value and source.get(
        "data_parallel_sharding_strategy", "optim_grads_params") == "optim_grads_params" else {},
    "num_layers_per_virtual_pipeline_stage": _layers_per_chunk,
    "num_virtual_stages_per_pipeline_rank": _interleaved, "virtual_pipeline_model_parallel_size": _interleaved,
    "recompute_granularity": _recompute, "recompute_modules": _recompute_modules,
    "recompute_activations": fixed(parallel__recompute="selective", parallel__recompute_ops=["attention"]),
    "moe_token_dispatcher_type": word("parallel.expert_dispatch", alltoall="all_to_all", allgather="all_gather"),
    "reset_position_ids": lambda value, source: {"data.reset_at_documents": value} if value == source.get(
        "reset_attention_mask", False) else refuse("attention and positions are reset together")(value, source),
    **without({
        "megafp8 chooses kernels and buffers itself": "use_mcore_models transformer_impl attention_backend "
        "use_flash_attn masked_softmax_fusion rope_fusion apply_rope_fusion bias_swiglu_fusion bias_dropout_fusion "
        "cross_entropy_loss_fusion cross_entropy_fusion_impl moe_grouped_gemm moe_permute_fusion moe_router_fusion "
        "gradient_accumulation_fusion persist_layer_norm bias_activation_fusion mmap_bin_files "
        "create_attention_mask_in_dataloader empty_unused_memory_level tp_comm_overlap overlap_p2p_comm batch_p2p_comm",
        "megafp8 computes it in fp32": "attention_softmax_in_fp32 accumulate_allreduce_grads_in_fp32 moe_router_dtype "
        "grad_reduce_in_fp32",
        "set model.activation": "activation activation_func",
        "see megafp8 launch": "nproc_per_node nnodes node_rank master_addr master_port",
        "data.tokenizer reads a folder with both files": "vocab_file merge_file",
        "megafp8 has one checkpoint format": "ckpt_format auto_detect_ckpt_format dist_ckpt_strictness",
        "see checkpoint.init_optimizer": "load_optim load_rng no_load_optim no_load_rng",
        "metrics include it": "log_throughput log_params_norm log_num_zeros_in_grad log_timers_to_tensorboard",
        "see the section profile": "profile profile_step_start profile_step_end profile_ranks",
    }),
}  # fmt: skip
"""Rules by argument, as argparse stores it."""


def read_script(text: str) -> Foreign:
    """Return the config of a command line or a shell script."""
    programs = set(re.findall(r"\b(pretrain_\w+)\.py", text))
    if other := programs - {"pretrain_gpt"}:
        raise ValueError(f"it starts {min(other)}.py, but megafp8 init --from reads scripts of pretrain_gpt.py only")
    values: dict[str, Any] = {}
    arguments = read_arguments(text)
    for flag, times in arguments.items():
        words, negated = times[-1], flag in _DESTINATIONS or (flag.startswith("no_") and flag not in RULES)
        name = _DESTINATIONS.get(flag, flag.removeprefix("no_") if negated else flag)
        values[name] = not negated if not words else number(words[0]) if len(words) == 1 else [*map(number, words)]
    several = [flag for flag, times in arguments.items() if any(words != times[-1] for words in times)]
    notes = [f"Given with several values, of which the last counts: {', '.join(several)}."] if several else []
    return describe("Megatron-LM", values, {}, notes)


def describe(project: str, values: Source, names: Mapping[str, str], notes: list[str] | None = None) -> Foreign:
    """Return the config that Megatron-LM's arguments describe; `names` are their names in the file."""
    args = {key: _parsed(key, value) for key, value in values.items() if not UNRESOLVED.search(str(value))}
    whole = all(isinstance(args.get(key), int) for key in ("num_layers", "hidden_size", "num_attention_heads"))
    grouped = {} if project == "Megatron-LM" else {"group_query_attention": True}
    fields, read, refused = model_fields(grouped | args, whole=whole)
    rules = dict.fromkeys(read - RULES.keys(), implied) | dict(RULES)
    for feature, keys in REFUSED.items():
        for key in args.keys() & set(keys.split()) - RULES.keys():
            used = args[key] and args[key] not in UNUSED.get(key, ())
            rules[key] = refuse(f"megafp8 does not have {feature}, or not under this name") if used else implied
    rules |= {key: refuse(reason) for key, reason in refused.items()}
    rules |= dict.fromkeys(_YARN, implied) if args.get("rope_type") == "rope" else {}
    replaced = {f"model.{x}" for x in ("head_dim", "num_query_groups", "qk_norm")} if args.get(_LATENT) else set()
    replaced |= {rule for key in args if isinstance(rule := rules.get(key), str)}
    stated = any(args.get(key) for key in ("squared_relu", "quick_geglu", "activation"))
    if stated or not (whole or "swiglu" in args):
        replaced.add("model.activation")
    sections: dict[str, Any] = {"": Config.model_fields["model"].annotation, "moe.": MoeConfig}
    ours = {f"{at}{x}": y.default for at, section in sections.items() for x, y in section.model_fields.items()}
    added = {f"model.{x}": y for x, y in fields.items() if f"model.{x}" not in replaced and y != ours[x]}
    added |= {"model.latent_attention.q_rank": None} if args.get(_LATENT) else {}
    notes = notes or []
    if whole and not any(args.get(dtype) for dtype in ("bf16", "fp16", "fp32")):
        notes.append("Neither bf16 nor fp16 is given: Megatron-LM would compute in fp32.")
    if fields.get("linear_bias") and args.get("num_experts"):
        notes.append("With linear_bias, routers have biases too, unlike Megatron-LM's.")
    parsed = {key: args.get(key, value) for key, value in values.items()}
    return Foreign(project, parsed, rules, _DEFAULTS if whole else {}, added, names, notes)


def _parsed(key: str, value: Any) -> Any:
    """Return the value of an argument that has a syntax of its own: a pattern `[0]*3+[1]*58`, or a pair `127,0`."""
    if key in ("moe_layer_freq", "window_attn_skip_freq") and isinstance(value, str):
        terms = [re.fullmatch(r"\(?\[([\d, ]+)\]\)?(?:\*(\d+))?", term.strip()) for term in value.split("+")]
        return [int(x) for term in terms if term for _ in range(int(term[2] or 1)) for x in term[1].split(",")]
    if key == "window_size" and isinstance(value, (str, list)):
        return tuple(map(int, value.strip("()").split(",") if isinstance(value, str) else value))
    return value
