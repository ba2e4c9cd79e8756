"""Megatron-LM's arguments, which every checkpoint of it holds <-> ModelConfig.

Reading takes the arguments that decide what a model computes. One that asks for something megafp8 does not have is
refused by name; arguments in no table here concern the run, and are ignored. Arguments that an old checkpoint lacks
have the value that Megatron-LM used then.

A model can be written if what is written reads back as the same model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch

from megafp8.config import ModelConfig, MoeConfig, RopeScaling
from megafp8.config.activations import ACTIVATIONS
from megafp8.conversion.base import refuse
from megafp8.conversion.hf_config import canonical, check_model, differences

Args = Mapping[str, Any]
Implementation = Literal["transformer_engine", "local"]

_ROPE_SCALING = RopeScaling()  # Megatron-LM has these numbers in its code, all but the factor
_REFUSED: dict[str, tuple[str, tuple[Any, ...]]] = {
    "multi_latent_attention": ("latent attention", ()),
    "mtp_num_layers": ("multi-token prediction", ()),
    "hybrid_override_pattern": ("layers of several kinds", ()),
    "hybrid_layer_pattern": ("layers of several kinds", ()),
    "heterogeneous_layers_config_path": ("layers of several shapes", ()),
    "apply_layernorm_1p": ("norms whose weights are stored minus one", ()),
    "layernorm_zero_centered_gamma": ("norms whose weights are stored minus one", ()),
    "apply_residual_connection_post_layernorm": ("norms behind the residual connection", ()),
    "squared_relu": ("squared ReLU", ()),
    "quick_geglu": ("quick GEGLU", ()),
    "qk_l2_norm": ("an L2 norm of queries and keys", ()),
    "attention_output_gate": ("gated attention", ()),
    "rotary_interleaved": ("interleaved rotary embedding", ()),
    "rotary_percent": ("rotary embedding of a part of each head", (1,)),
    "rotary_seq_len_interpolation_factor": ("interpolated positions", (1,)),
    "no_rope_freq": ("layers without rotary embedding", ()),
    "softmax_type": ("another softmax", ("vanilla", "learnable")),
    "glu_linear_offset": ("an offset in SwiGLU", ()),
    "activation_func_clamp_value": ("a clamped activation", ()),
    "use_mup": ("maximal-update scaling", ()),
    "moe_extended_tp": ("experts sharded over tensor and expert parallelism", ()),
    "moe_expert_capacity_factor": ("experts that drop tokens", (-1,)),
    "moe_token_dropping": ("experts that drop tokens", ()),
    "moe_router_topk_limited_devices": ("groups of experts by rank", ()),
    "moe_apply_probs_on_input": ("scores applied to the input of experts", ()),
    "moe_latent_size": ("experts of another width than the residual stream", ()),
    "moe_single_grouped_weight": ("experts of one weight", ()),
    "moe_router_force_load_balancing": ("random routing", ()),
    "moe_n_hash_layers": ("routing by token", ()),
}
"""What megafp8 does not have, by argument, with the true values that mean it is not used."""
_POSITIONS = {"learned_absolute": "learned", "rope": "rope", "none": "none"}
_NORMS = {"LayerNorm": "layernorm", "RMSNorm": "rmsnorm"}
_SCORES = {"softmax": "softmax", "sigmoid": "sigmoid"}
_BALANCING = {"seq_aux_loss": "sequence", "global_aux_loss": "global_batch", "aux_loss": None, "none": None}
"""Their balancing losses, and the `moe.aux_loss_scope` of those that are ours."""
_MOST_LAYERS = 10_000
_REQUIRED: Any = object()
_SAME: dict[str, tuple[str, Any]] = {
    "num_layers": ("num_layers", _REQUIRED),
    "hidden_size": ("hidden_size", _REQUIRED),
    "num_attention_heads": ("num_attention_heads", _REQUIRED),
    "head_dim": ("kv_channels", None),
    "ffn_hidden_size": ("ffn_hidden_size", None),
    "max_position_embeddings": ("max_position_embeddings", None),
    "rope_theta": ("rotary_base", 10000),
    "linear_bias": ("add_bias_linear", True),
    "qkv_bias": ("add_qkv_bias", False),
    "qk_norm": ("qk_layernorm", False),
    "init_std": ("init_method_std", 0.02),
    "hidden_dropout": ("hidden_dropout", 0.1),
    "attention_dropout": ("attention_dropout", 0.1),
}
"""Fields of ours that have an argument of the same meaning, and its default."""


def read_args(args: Args, vocab_size: int, vocab_multiple: int, *, bert: bool = False) -> ModelConfig:
    """The model. `bert`: of Megatron-LM's pretrain_bert.py, which no argument says.

    Raises ValueError naming the argument where it is not supported, or is missing.
    """
    if type(args.get("num_layers")) is int and args["num_layers"] > _MOST_LAYERS:  # which are counted below
        refuse("num_layers", args["num_layers"], f"up to {_MOST_LAYERS:,}")
    for key, (meaning, harmless) in _REFUSED.items():
        value = args.get(key)
        if value and value not in harmless:
            raise ValueError(f"{key} = {value!r}, {meaning}, which megafp8 does not have")
    norm = _word(args, "normalization", "LayerNorm", _NORMS)
    if args.get("qk_layernorm") and norm != "rmsnorm":
        raise ValueError("qk_layernorm with normalization = 'LayerNorm': megafp8 has RMSNorm of queries and keys only")
    window = tuple(args.get("window_size") or (-1, 0))
    if len(window) != 2 or window[1] not in (0, -1):
        raise ValueError(f"window_size = {window}: megafp8 has causal windows only, (n, 0)")
    per_layer = args.get("window_attn_skip_freq")
    if isinstance(per_layer, int):  # every so many layers one attends to everything
        per_layer = [int((i + 1) % per_layer != 0) for i in range(args["num_layers"])]
    fields = {
        "num_query_groups": args.get("num_query_groups") if args.get("group_query_attention") else None,
        "vocab_size": vocab_size,
        "vocab_multiple": vocab_multiple,
        "position_embedding": _positions(args),
        "rope_scaling": _rope_scaling(args),
        "normalization": norm,
        "norm_eps": args.get("norm_epsilon") or args.get("layernorm_epsilon") or 1e-5,
        "activation": _activation(args),
        "attention_sinks": args.get("softmax_type") == "learnable",
        "tie_embeddings": not args.get("untie_embeddings_and_output_weights", False),
        "sliding_window": None if window[0] < 0 else window[0] + 1,  # theirs does not count the token itself
        "full_attention_layers": [i for i, windowed in enumerate(per_layer or []) if not windowed and window[0] >= 0],
    }
    for field, (key, default) in _SAME.items():
        fields[field] = default if args.get(key) is None else args[key]
        if fields[field] is _REQUIRED:
            raise ValueError(f"the arguments have no {key}")
    model = ModelConfig.model_validate(fields | {"moe": _moe(args)} | (_bert(args) if bert else {}))
    check_model(model)
    if model.moe is not None and model.linear_bias:
        raise ValueError(
            "add_bias_linear = True with num_experts: where experts have biases, megafp8's routers have too"
        )
    return model


def _bert(args: Args) -> dict[str, Any]:
    """Fields of BertModel; the GELU of its head is exact whatever that of the MLP is."""
    binary = bool(args.get("bert_binary_head", True))
    of_head = {"binary_head": binary, "token_types": 2 * binary, "transform_activation": "gelu"}
    return {"architecture": "bert", **of_head}


def _moe(args: Args) -> dict[str, Any] | None:
    """The section model.moe."""
    if not args.get("num_experts"):
        return None
    top_k, score = args.get("moe_router_topk") or 2, _word(args, "moe_router_score_function", "softmax", _SCORES)
    before_choice = bool(args.get("moe_router_pre_softmax"))
    if score == "softmax" and top_k == 1 and not before_choice:
        raise ValueError("moe_router_topk = 1 without moe_router_pre_softmax: the only score would always be 1")
    bias = bool(args.get("moe_router_enable_expert_bias"))
    if score == "softmax" and bias:
        raise ValueError("moe_router_enable_expert_bias = True with moe_router_score_function = 'softmax'")
    balancing = args.get("moe_router_load_balancing_type") or "aux_loss"
    for word in balancing if isinstance(balancing, list) else [balancing]:
        if word not in _BALANCING:
            refuse("moe_router_load_balancing_type", word, ", ".join(_BALANCING))
    return {
        "num_experts": args["num_experts"],
        "top_k": top_k,
        "ffn_hidden_size": args.get("moe_ffn_hidden_size"),
        "shared_ffn_hidden_size": args.get("moe_shared_expert_intermediate_size"),
        "shared_gate": bool(args.get("moe_shared_expert_gate")),
        "score": score,
        # Softmax of the chosen logits alone is what normalizing the scores gives.
        "normalize": not before_choice if score == "softmax" else top_k > 1,
        "scaling_factor": args.get("moe_router_topk_scaling_factor") or 1.0,
        "selection_bias": bias,
        "bias_update_rate": args.get("moe_router_bias_update_rate", 0.001),
        **_balance(args, balancing),
        "z_loss": args.get("moe_z_loss_coeff") or 0.0,
        **_groups(args, top_k, score),
        **_sparse_layers(args),
    }


def _balance(args: Args, balancing: Any) -> dict[str, Any]:
    """The balancing loss; of losses that ours is not, the weight is not read."""
    scope = _BALANCING.get(balancing) if isinstance(balancing, str) else None
    return {} if scope is None else {"aux_loss": args.get("moe_aux_loss_coeff") or 0.0, "aux_loss_scope": scope}


def _groups(args: Args, top_k: int, score: str) -> dict[str, Any]:
    """Groups of experts, which Megatron-LM ranks by the sum of their top_k / group_topk largest scores."""
    groups, top = args.get("moe_router_num_groups"), args.get("moe_router_group_topk")
    if not top:
        return {}
    ranked_by, ours = top_k // top, 2 if score == "sigmoid" else 1
    if top != groups and ranked_by != ours:
        raise ValueError(
            f"moe_router_group_topk = {top} with moe_router_topk = {top_k} ranks groups by the sum of their "
            f"{ranked_by} largest scores, and with the score function {score} megafp8 takes {ours}"
        )
    return {"num_groups": groups, "top_groups": top}


def _sparse_layers(args: Args) -> dict[str, int]:
    """Layers with experts: all at multiples of a number, or a list of 0 and 1."""
    freq, layers = args.get("moe_layer_freq") or 1, args["num_layers"]
    pattern = list(freq) if isinstance(freq, (list, tuple)) else [int(i % freq == 0) for i in range(layers)]
    sparse = [layer for layer, has_experts in enumerate(pattern) if has_experts]
    if not sparse or len(pattern) != layers:
        refuse("moe_layer_freq", freq, f"experts in some of the {layers} layers")
    interval = sparse[1] - sparse[0] if len(sparse) > 1 else sparse[0] + 1
    found = {"first_dense_layers": 0 if sparse[0] < interval else sparse[0], "layer_interval": interval}
    as_ours = MoeConfig.model_validate({"num_experts": 1, **found})
    if sparse != [layer for layer in range(layers) if as_ours.is_sparse(layer)]:
        refuse("moe_layer_freq", freq, "experts in every layer, or every n-th counted from the first n, from some on")
    return found


def _word(args: Args, key: str, default: str, words: Mapping[str, str]) -> str:
    value = args.get(key) or default
    if value not in words:
        refuse(key, value, ", ".join(words))
    return words[value]


def _positions(args: Args) -> str:
    if "position_embedding_type" not in args and args.get("use_rotary_position_embeddings"):
        return "rope"
    default = "learned_absolute" if args.get("add_position_embedding", True) else "none"
    return _word(args, "position_embedding_type", default, _POSITIONS)


def _rope_scaling(args: Args) -> RopeScaling | None:
    if not args.get("use_rope_scaling"):
        return None
    return _ROPE_SCALING.model_copy(update={"factor": float(args.get("rope_scaling_factor") or _ROPE_SCALING.factor)})


def _activation(args: Args) -> str:
    swiglu = bool(args.get("swiglu"))
    tanh = (args.get("bias_gelu_fusion", True) and args.get("add_bias_linear", True)) or args.get("openai_gelu")
    chosen = {"swiglu": swiglu, "bias_gelu_fusion": bool(tanh) and not swiglu}
    return next(name for name, activation in ACTIVATIONS.items() if activation.megatron == chosen)


def write_args(model: ModelConfig, seq_length: int | None) -> dict[str, Any]:
    """The arguments that describe `model`. Raises ValueError where Megatron-LM has no such model."""
    if (kind := model.architecture) != "gpt":
        raise ValueError(f"model.architecture = {kind!r}: of Megatron-LM's models megafp8 writes gpt only")
    assert model.vocab_size is not None
    words = {ours: theirs for table in (_POSITIONS, _NORMS) for theirs, ours in table.items()}
    fields = canonical(model)
    args: dict[str, Any] = {key: fields[field] for field, (key, _) in _SAME.items()} | {
        "encoder_num_layers": model.num_layers,
        "group_query_attention": model.query_groups != model.num_attention_heads,
        "num_query_groups": model.query_groups,
        "seq_length": seq_length,
        "position_embedding_type": words.get(model.position_embedding, "none"),
        "add_position_embedding": True,  # unused, but compared at load: True is its default
        "use_rotary_position_embeddings": model.position_embedding == "rope",
        "rotary_base": int(model.rope_theta) if model.rope_theta == int(model.rope_theta) else model.rope_theta,
        "rotary_percent": 1.0,
        "rotary_interleaved": False,
        "use_rope_scaling": model.rope_scaling is not None,
        "rope_scaling_factor": (model.rope_scaling or _ROPE_SCALING).factor,
        "normalization": words[model.normalization],
        "norm_epsilon": model.norm_eps,
        "layernorm_epsilon": model.norm_eps,
        "apply_layernorm_1p": False,
        "qk_layernorm": model.qk_norm is True,
        **ACTIVATIONS[model.activation].megatron,
        "squared_relu": False,
        "untie_embeddings_and_output_weights": not model.tie_embeddings,
        "window_size": None if model.sliding_window is None else (model.sliding_window - 1, 0),
        "window_attn_skip_freq": [int(i not in model.full_attention_layers) for i in range(model.num_layers)]
        if model.full_attention_layers
        else None,
        "softmax_type": "learnable" if model.attention_sinks else "vanilla",
        "apply_query_key_layer_scaling": False,
        **_moe_args(model),
        "vocab_size": model.vocab_size,
        "make_vocab_size_divisible_by": model.vocab_multiple,
    }
    differing = differences(model, read_args(args, model.vocab_size, model.vocab_multiple))
    if differing:
        raise ValueError(f"Megatron-LM has no model with {', '.join(f'{key} = {fields[key]!r}' for key in differing)}")
    return args


def _moe_args(model: ModelConfig) -> dict[str, Any]:
    moe = model.moe
    if moe is None:
        return {"num_experts": None}
    sparse = [int(moe.is_sparse(layer)) for layer in range(model.num_layers)]
    chooses, balancing = moe.top_groups is not None, {scope: name for name, scope in _BALANCING.items()}
    return {
        "num_experts": moe.num_experts,
        "moe_router_topk": moe.top_k,
        "moe_ffn_hidden_size": model.expert_size,
        "moe_shared_expert_intermediate_size": moe.shared_ffn_hidden_size,
        "moe_shared_expert_gate": moe.shared_gate,
        "moe_layer_freq": 1 if all(sparse) else sparse,
        "moe_router_score_function": moe.score,
        "moe_router_pre_softmax": moe.score == "softmax" and not moe.normalize,
        "moe_router_topk_scaling_factor": None if moe.scaling_factor == 1 else moe.scaling_factor,
        "moe_router_num_groups": moe.num_groups if chooses else None,
        "moe_router_group_topk": moe.top_groups if chooses else None,
        "moe_router_enable_expert_bias": moe.selection_bias,
        "moe_router_bias_update_rate": moe.bias_update_rate,
        "moe_router_load_balancing_type": balancing[moe.aux_loss_scope] if moe.aux_loss else "none",
        "moe_aux_loss_coeff": moe.aux_loss,
        "moe_z_loss_coeff": moe.z_loss or None,
        "moe_router_dtype": "fp32",
    }


def layout_args(
    t: int,
    p: int,
    e: int,
    virtual: int,
    layers_per_stage: int,
    padded_vocab: int,
    dtype: torch.dtype,
    implementation: Implementation,
) -> dict[str, Any]:
    """The arguments that describe how the checkpoint is sharded, and its dtype."""
    return {
        "tensor_model_parallel_size": t,
        "pipeline_model_parallel_size": p,
        "virtual_pipeline_model_parallel_size": virtual if virtual > 1 else None,
        "num_layers_per_virtual_pipeline_stage": layers_per_stage if virtual > 1 else None,
        "expert_model_parallel_size": e,
        "expert_tensor_parallel_size": t,
        "moe_grouped_gemm": implementation == "transformer_engine",
        "context_parallel_size": 1,
        "world_size": t * p * e,
        "padded_vocab_size": padded_vocab,
        "params_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "fp16": dtype == torch.float16,
        "transformer_impl": implementation,
        "ckpt_format": "torch",
        "use_dist_ckpt": False,
        "data_parallel_random_init": False,
    }
