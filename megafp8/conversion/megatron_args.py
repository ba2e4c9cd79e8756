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

from megafp8.config import ModelConfig, RopeScaling
from megafp8.config.activations import ACTIVATIONS
from megafp8.conversion.base import refuse
from megafp8.conversion.hf_config import canonical, differences

Args = Mapping[str, Any]
Implementation = Literal["transformer_engine", "local"]

_ROPE_SCALING = RopeScaling()  # Megatron-LM has these numbers in its code, all but the factor
_REFUSED: dict[str, tuple[str, tuple[Any, ...]]] = {
    "num_experts": ("a mixture of experts", ()),
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
}
"""What megafp8 does not have, by argument, with the true values that mean it is not used."""
_POSITIONS = {"learned_absolute": "learned", "rope": "rope", "none": "none"}
_NORMS = {"LayerNorm": "layernorm", "RMSNorm": "rmsnorm"}
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
}
"""Fields of ours that have an argument of the same meaning, and its default."""


def read_args(args: Args, vocab_size: int, vocab_multiple: int) -> ModelConfig:
    """The model. Raises ValueError naming the argument where it is not supported, or is missing."""
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
    return ModelConfig.model_validate(fields)


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
    assert model.vocab_size is not None
    words = {ours: theirs for table in (_POSITIONS, _NORMS) for theirs, ours in table.items()}
    fields = canonical(model)
    args: dict[str, Any] = {key: fields[field] for field, (key, _) in _SAME.items()} | {
        "encoder_num_layers": model.num_layers,
        "group_query_attention": model.query_groups != model.num_attention_heads,
        "num_query_groups": model.query_groups,
        "seq_length": seq_length,
        "position_embedding_type": words[model.position_embedding],
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
        **ACTIVATIONS[model.activation].megatron,
        "squared_relu": False,
        "untie_embeddings_and_output_weights": not model.tie_embeddings,
        "window_size": None if model.sliding_window is None else (model.sliding_window - 1, 0),
        "window_attn_skip_freq": [int(i not in model.full_attention_layers) for i in range(model.num_layers)]
        if model.full_attention_layers
        else None,
        "softmax_type": "learnable" if model.attention_sinks else "vanilla",
        "apply_query_key_layer_scaling": False,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "num_experts": None,
        "vocab_size": model.vocab_size,
        "make_vocab_size_divisible_by": model.vocab_multiple,
    }
    differing = differences(model, read_args(args, model.vocab_size, model.vocab_multiple))
    if differing:
        raise ValueError(
            f"Megatron-LM has no model with {', '.join(f'{key} = {getattr(model, key)!r}' for key in differing)}"
        )
    return args


def layout_args(
    t: int, p: int, virtual: int, layers_per_stage: int, padded_vocab: int, dtype: torch.dtype, implementation: str
) -> dict[str, Any]:
    """The arguments that describe how the checkpoint is sharded, and its dtype."""
    return {
        "tensor_model_parallel_size": t,
        "pipeline_model_parallel_size": p,
        "virtual_pipeline_model_parallel_size": virtual if virtual > 1 else None,
        "num_layers_per_virtual_pipeline_stage": layers_per_stage if virtual > 1 else None,
        "expert_model_parallel_size": 1,
        "context_parallel_size": 1,
        "world_size": t * p,
        "padded_vocab_size": padded_vocab,
        "params_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "fp16": dtype == torch.float16,
        "transformer_impl": implementation,
        "ckpt_format": "torch",
        "use_dist_ckpt": False,
        "data_parallel_random_init": False,
    }
