"""Translate between `ModelSpec` and Megatron-LM's arguments, which each of its checkpoints contains.

Only arguments that affect the model's results are read. An argument for a feature that megafp8 does not have is refused
by name. Arguments that are not in any table of this module concern the run, and are ignored. Arguments that an old
checkpoint lacks, or that are None, have the value that Megatron-LM used at the time.

A model can be written if the written arguments read back as the same model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch

from megafp8.config import MoeConfig, RopeScaling
from megafp8.conversion.base import refuse
from megafp8.conversion.flat import differences, flat_keys, has_mixed_experts
from megafp8.conversion.huggingface.config import build_model
from megafp8.conversion.keys import MOST_LAYERS, ConfigKey, Fields, Keys, Trait, in_section, same
from megafp8.layers.activation.record import ACTIVATIONS
from megafp8.spec import ModelSpec

Args = Mapping[str, Any]
Implementation = Literal["transformer_engine", "local"]

_ROPE_SCALING = RopeScaling()  # Megatron-LM has all of these numbers in its code, except for the factor
REFUSED = {
    "latent attention": "multi_latent_attention",
    "multi-token prediction": "mtp_num_layers",
    "layers of several kinds": "hybrid_override_pattern hybrid_layer_pattern",
    "layers of several shapes": "heterogeneous_layers_config_path",
    "norms whose weights are stored minus one": "apply_layernorm_1p layernorm_zero_centered_gamma",
    "norms behind the residual connection": "apply_residual_connection_post_layernorm",
    "squared ReLU": "squared_relu",
    "quick GEGLU": "quick_geglu",
    "an L2 norm of queries and keys": "qk_l2_norm",
    "gated attention": "attention_output_gate",
    "interleaved rotary embedding": "rotary_interleaved",
    "rotary embedding of a part of each head": "rotary_percent",
    "interpolated positions": "rotary_seq_len_interpolation_factor",
    "layers without rotary embedding": "no_rope_freq",
    "another softmax": "softmax_type softmax_scale",
    "an offset in SwiGLU": "glu_linear_offset",
    "a clamped activation": "activation_func_clamp_value",
    "maximal-update scaling": "use_mup",
    "experts sharded over tensor and expert parallelism": "moe_extended_tp",
    "experts that drop tokens": "moe_expert_capacity_factor moe_token_dropping",
    "groups of experts by rank": "moe_router_topk_limited_devices",
    "scores applied to the input of experts": "moe_apply_probs_on_input",
    "experts of one weight": "moe_single_grouped_weight",
    "random routing": "moe_router_force_load_balancing",
    "routing by token": "moe_n_hash_layers",
}
"""Features that megafp8 does not have, and the arguments that request them."""
UNUSED = {
    "rotary_percent": (1,), "rotary_seq_len_interpolation_factor": (1,), "moe_expert_capacity_factor": (-1,),
    "softmax_type": ("vanilla", "learnable"),
}  # fmt: skip
"""Truthy values of these arguments that do not request the feature."""
_POSITIONS = {"learned_absolute": "learned", "rope": "rope", "none": "none"}
_BALANCING = {"seq_aux_loss": "sequence", "global_aux_loss": "global_batch", "aux_loss": None, "none": None}
"""Megatron-LM's balancing losses, with the equivalent `moe.aux_loss_scope` or None."""


def _read_positions(args: Args) -> Fields:
    default = "learned_absolute" if args.get("add_position_embedding", True) else "none"
    if "position_embedding_type" not in args and args.get("use_rotary_position_embeddings"):
        default = "rope"
    return {"position_embedding": ConfigKey("position_embedding_type", default, _POSITIONS).read(args)}


def _write_positions(ours: Fields) -> Keys:
    kind, theta = ours["position_embedding"], ours["rope_theta"]
    return {
        "position_embedding_type": next((theirs for theirs, x in _POSITIONS.items() if x == kind), "none"),
        "add_position_embedding": True,  # unused, but compared at load; True is its default
        "use_rotary_position_embeddings": kind == "rope",
        "rotary_base": int(theta) if theta == int(theta) else theta,
        "use_rope_scaling": ours["rope_scaling"] is not None,
        "rope_scaling_factor": (ours["rope_scaling"] or _ROPE_SCALING).factor,
    }


def _read_rope_scaling(args: Args) -> Fields:
    if not args.get("use_rope_scaling"):
        return {}
    factor = float(args.get("rope_scaling_factor") or _ROPE_SCALING.factor)
    return {"rope_scaling": _ROPE_SCALING.model_copy(update={"factor": factor})}


def _read_activation(args: Args) -> Fields:
    swiglu = bool(args.get("swiglu"))
    tanh = (args.get("bias_gelu_fusion", True) and args.get("add_bias_linear", True)) or args.get("openai_gelu")
    chosen = {"swiglu": swiglu, "bias_gelu_fusion": bool(tanh) and not swiglu}
    return {"activation": next(name for name, record in ACTIVATIONS.items() if record.megatron == chosen)}


def _read_windows(args: Args) -> Fields:
    window = tuple(args.get("window_size") or (-1, 0))
    if len(window) != 2 or window[1] not in (0, -1):
        raise ValueError(f"window_size = {window}: megafp8 only has causal windows, (n, 0)")
    per_layer = args.get("window_attn_skip_freq")
    if isinstance(per_layer, int):  # the last layer of each interval of this length has full attention
        per_layer = [int((i + 1) % per_layer != 0) for i in range(args["num_layers"])]
    if window[0] < 0:
        return {}
    full = [i for i, windowed in enumerate(per_layer or []) if not windowed]
    return {"sliding_window": window[0] + 1, "full_attention_layers": full}  # Megatron-LM excludes the token itself


def _write_windows(ours: Fields) -> Keys:
    window, windowed = ours["sliding_window"], [int(x is not None) for x in ours["mixer.sliding_window"]]
    per_layer = windowed if window and not all(windowed) else None
    return {"window_size": window and (window - 1, 0), "window_attn_skip_freq": per_layer}


def _read_groups(args: Args) -> Fields:
    grouped = args.get("group_query_attention")
    return {"num_query_groups": args.get("num_query_groups") if grouped else None}


def _write_groups(ours: Fields) -> Keys:
    groups = ours["num_query_groups"]
    return {"group_query_attention": groups != ours["num_attention_heads"], "num_query_groups": groups}


_MODEL = (
    same(
        num_layers="num_layers", hidden_size="hidden_size", num_attention_heads="num_attention_heads",
        head_dim=("kv_channels", None), ffn_hidden_size=("ffn_hidden_size", None),
        max_position_embeddings=ConfigKey("max_position_embeddings", None, nullable=True),
        rope_theta=("rotary_base", 10000),
        normalization=("normalization", "LayerNorm", {"LayerNorm": "layernorm", "RMSNorm": "rmsnorm"}),
        qkv_bias=("add_qkv_bias", False), qk_norm=("qk_layernorm", False),
        init_std=("init_method_std", 0.02), hidden_dropout=("hidden_dropout", 0.1),
        attention_dropout=("attention_dropout", 0.1),
    ),
    Trait((), lambda args: {"linear_bias": args.get("add_bias_linear", True)},
          lambda ours: {"add_bias_linear": ours["linear_bias"] is True}),
    Trait((), _read_positions, _write_positions),
    Trait((), _read_rope_scaling),
    Trait((), _read_groups, _write_groups),
    Trait((), _read_activation, lambda ours: dict(ACTIVATIONS[ours["activation"]].megatron)),
    Trait((), _read_windows, _write_windows),
    Trait((), lambda args: {"norm_eps": args.get("norm_epsilon") or args.get("layernorm_epsilon") or 1e-5},
          lambda ours: dict.fromkeys(("norm_epsilon", "layernorm_epsilon"), ours["norm_eps"])),
    Trait((), lambda args: {"attention_sinks": args.get("softmax_type") == "learnable"},
          lambda ours: {"softmax_type": "learnable" if ours["attention_sinks"] else "vanilla"}),
    Trait((), lambda args: {"tie_embeddings": not args.get("untie_embeddings_and_output_weights", False)},
          lambda ours: {"untie_embeddings_and_output_weights": not ours["tie_embeddings"]}),
)  # fmt: skip


def _read_router(args: Args) -> Fields:
    top_k, before_choice = args.get("moe_router_topk") or 2, bool(args.get("moe_router_pre_softmax"))
    score = ConfigKey("moe_router_score_function", "softmax", {"softmax": "softmax", "sigmoid": "sigmoid"}).read(args)
    if score == "softmax" and top_k == 1 and not before_choice:
        raise ValueError("moe_router_topk = 1 without moe_router_pre_softmax: the only score would always be 1")
    if score == "softmax" and args.get("moe_router_enable_expert_bias"):
        raise ValueError("moe_router_enable_expert_bias = True with moe_router_score_function = 'softmax'")
    # A softmax over only the chosen logits equals normalized scores.
    normalize = not before_choice if score == "softmax" else top_k > 1
    fields = {"moe.score": score, "moe.top_k": top_k, "moe.normalize": normalize}
    groups, top = args.get("moe_router_num_groups"), args.get("moe_router_group_topk")
    if not top:
        return fields
    # Megatron-LM ranks groups by the sum of their top_k / group_topk largest scores.
    ranked_by, supported = top_k // top, 2 if score == "sigmoid" else 1
    if top != groups and ranked_by != supported:
        raise ValueError(
            f"moe_router_group_topk = {top} with moe_router_topk = {top_k} ranks groups by the sum of their "
            f"{ranked_by} largest scores, but with the score function {score} megafp8 uses {supported}"
        )
    return fields | {"moe.num_groups": groups, "moe.top_groups": top}


def _write_router(ours: Fields) -> Keys:
    chooses = ours["moe.top_groups"] is not None
    return {
        "moe_router_topk": ours["moe.top_k"],
        "moe_router_score_function": ours["moe.score"],
        "moe_router_pre_softmax": ours["moe.score"] == "softmax" and not ours["moe.normalize"],
        "moe_router_topk_scaling_factor": None if ours["moe.scaling_factor"] == 1 else ours["moe.scaling_factor"],
        "moe_router_num_groups": ours["moe.num_groups"] if chooses else None,
        "moe_router_group_topk": ours["moe.top_groups"],
        "moe_router_dtype": "fp32",
    }


def _read_losses(args: Args) -> Fields:
    """Read the weights of the router's losses. The weight of a balancing loss that megafp8 does not have is ignored."""
    balancing = args.get("moe_router_load_balancing_type") or "aux_loss"
    for word in balancing if isinstance(balancing, list) else [balancing]:
        if word not in _BALANCING:
            refuse("moe_router_load_balancing_type", word, ", ".join(_BALANCING))
    scope = _BALANCING[balancing] if isinstance(balancing, str) else None
    balance = {"moe.aux_loss": args.get("moe_aux_loss_coeff") or 0.0, "moe.aux_loss_scope": scope}
    return {"moe.z_loss": args.get("moe_z_loss_coeff") or 0.0} | ({} if scope is None else balance)


def _write_losses(ours: Fields) -> Keys:
    balancing = {scope: name for name, scope in _BALANCING.items()}
    return {
        "moe_router_load_balancing_type": balancing[ours["moe.aux_loss_scope"]] if ours["moe.aux_loss"] else "none",
        "moe_aux_loss_coeff": ours["moe.aux_loss"],
        "moe_z_loss_coeff": ours["moe.z_loss"] or None,
    }


def _read_sparse_layers(args: Args) -> Fields:
    """Read which layers have experts: multiples of a number, or a list of 0 and 1."""
    freq, layers = args.get("moe_layer_freq") or 1, args["num_layers"]
    pattern = list(freq) if isinstance(freq, (list, tuple)) else [int(i % freq == 0) for i in range(layers)]
    sparse = [layer for layer, has_experts in enumerate(pattern) if has_experts]
    if not sparse or len(pattern) != layers:
        refuse("moe_layer_freq", freq, f"experts in some of the {layers} layers")
    interval = sparse[1] - sparse[0] if len(sparse) > 1 else sparse[0] + 1
    fields = {"first_dense_layers": 0 if sparse[0] < interval else sparse[0], "layer_interval": interval}
    as_ours = MoeConfig.model_validate({"num_experts": 1, **fields})
    if sparse != [layer for layer in range(layers) if as_ours.is_sparse(layer)]:
        refuse("moe_layer_freq", freq, "experts in layers n - 1, 2n - 1, ... counted from 0, from some layer on")
    return in_section("moe", fields)


def _write_sparse_layers(ours: Fields) -> Keys:
    sparse = [int(kind == "moe") for kind in ours["ffn.kind"]]
    return {"moe_layer_freq": 1 if all(sparse) else sparse}


_EXPERTS = (
    same(
        "moe", num_experts="num_experts", ffn_hidden_size=("moe_ffn_hidden_size", None),
        shared_ffn_hidden_size=ConfigKey("moe_shared_expert_intermediate_size", None, nullable=True),
        latent_size=ConfigKey("moe_latent_size", None, nullable=True),
        shared_gate=("moe_shared_expert_gate", False), selection_bias=("moe_router_enable_expert_bias", False),
        bias_update_rate=("moe_router_bias_update_rate", 0.001),
    ),
    Trait((), lambda args: {"moe.scaling_factor": args.get("moe_router_topk_scaling_factor") or 1.0}),
    Trait((), _read_router, _write_router),
    Trait((), _read_losses, _write_losses),
    Trait((), _read_sparse_layers, _write_sparse_layers),
)  # fmt: skip


class _Recorder(dict[str, Any]):
    """Arguments that record which of them are read."""

    def __init__(self, args: Args) -> None:
        super().__init__(args)
        self.read: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self.read.add(key)
        return super().get(key, default)

    def __getitem__(self, key: str) -> Any:
        self.read.add(key)
        return super().__getitem__(key)


def model_fields(args: Args, *, whole: bool) -> tuple[Fields, set[str], dict[str, str]]:
    """Return what arguments say about the network, property by property.

    Args:
        args: Arguments of a run.
        whole: Whether the arguments describe a whole network, so that missing ones have Megatron-LM's defaults.
            Otherwise properties of which no argument is given are left out.

    Returns:
        Flat keys of the model, the arguments from which they follow, and reasons by argument that is not supported.
    """
    fields, read, refused = Fields(), set[str](), dict[str, str]()
    for trait in (*_MODEL, *(_EXPERTS if args.get("num_experts") else ())):
        if trait.keys and not whole:  # renamed keys, each of which would get its default
            continue
        recorder = _Recorder(args)
        try:
            properties = trait.read(recorder)
        except (ValueError, KeyError) as error:
            keys = recorder.read & args.keys()
            named = keys & {str(error).split()[0]} if isinstance(error, ValueError) else keys
            refused |= dict.fromkeys(named or keys, str(error) if named else "num_layers is not given")
        else:
            fields |= properties if whole or recorder.read & args.keys() else {}
        read |= recorder.read & args.keys()
    return fields, read, refused


def read_args(args: Args, vocab_size: int, vocab_multiple: int, *, bert: bool = False) -> ModelSpec:
    """Return the model that Megatron-LM's arguments describe.

    Args:
        args: Arguments of the checkpoint.
        vocab_size: Number of tokens before padding.
        vocab_multiple: The vocabulary is padded to a multiple of this number.
        bert: Whether the model comes from pretrain_bert.py; the arguments do not state this.

    Raises:
        ValueError: An argument is missing or not supported. The message names it.
    """
    args = {key: value for key, value in args.items() if value is not None}
    if type(args.get("num_layers")) is int and args["num_layers"] > MOST_LAYERS:  # traits loop over the layers
        refuse("num_layers", args["num_layers"], f"up to {MOST_LAYERS:,}")
    for meaning, keys in REFUSED.items():
        for key in keys.split():
            if args.get(key) and args[key] not in UNUSED.get(key, ()):
                raise ValueError(f"{key} = {args[key]!r}, {meaning}, which megafp8 does not have")
    if args.get("qk_layernorm") and args.get("normalization", "LayerNorm") == "LayerNorm":
        raise ValueError("qk_layernorm with normalization = 'LayerNorm': megafp8 only has RMSNorm of queries and keys")
    if missing := [key for key in ("num_layers", "hidden_size", "num_attention_heads") if key not in args]:
        raise ValueError(f"the arguments have no {missing[0]}")
    fields: dict[str, Any] = {"vocab_size": vocab_size, "vocab_multiple": vocab_multiple}
    for trait in (*_MODEL, *(_EXPERTS if args.get("num_experts") else ())):
        fields |= trait.read(args)
    if bert:  # the head always has exact GELU, independent of the MLP
        binary = bool(args.get("bert_binary_head", True))
        fields |= {"architecture": "bert", "transform_activation": "gelu"}
        fields |= {"binary_head": binary, "token_types": 2 * binary}
    model = build_model(fields)
    if model.has_experts and model.mlp_bias:
        raise ValueError(
            "add_bias_linear = True with num_experts: if experts have biases, megafp8's routers have biases, too"
        )
    return model


def write_args(model: ModelSpec, seq_length: int | None) -> Keys:
    """Return the arguments that describe `model`. Raises ValueError if Megatron-LM has no such model."""
    if (kind := model.architecture) != "gpt":
        raise ValueError(f"model.architecture = {kind!r}: megafp8 only writes Megatron-LM's gpt")
    if others := {spec.mixer.kind for spec in model.distinct_layers} - {"attention", "latent_attention"}:
        raise ValueError(
            f"layers with {' or '.join(sorted(others))}: megafp8 only writes layers with attention to this format"
        )
    fields, vocab_size, multiple = flat_keys(model), model.stem.known_vocab_size, model.stem.vocab_multiple
    if has_mixed_experts(fields):
        raise ValueError("layers have two kinds of experts (model.layer_kinds), but Megatron-LM has no such model")
    args: dict[str, Any] = {
        "encoder_num_layers": model.num_layers, "seq_length": seq_length, "num_experts": None,
        "rotary_percent": 1.0, "rotary_interleaved": False, "apply_layernorm_1p": False, "squared_relu": False,
        "apply_query_key_layer_scaling": False,
        "vocab_size": vocab_size, "make_vocab_size_divisible_by": multiple,
    }  # fmt: skip
    for trait in (*_MODEL, *(_EXPERTS if fields["moe"] is not None else ())):
        args |= trait.write(fields)
    args["qk_layernorm"] = fields["qk_norm"] is True
    if differing := differences(model, read_args(args, vocab_size, multiple)):
        raise ValueError(f"Megatron-LM has no model with {', '.join(f'{key} = {fields[key]!r}' for key in differing)}")
    return args


def layout_args(
    t: int, p: int, e: int, virtual: int, layers_per_stage: int, padded_vocab: int, dtype: torch.dtype,
    implementation: Implementation,
) -> dict[str, Any]:  # fmt: skip
    """Return the arguments that describe how the checkpoint is sharded, and its dtype.

    The parallel sizes are `t` (tensor), `p` (pipeline) and `e` (expert).
    """
    return {
        "tensor_model_parallel_size": t, "pipeline_model_parallel_size": p,
        "virtual_pipeline_model_parallel_size": virtual if virtual > 1 else None,
        "num_layers_per_virtual_pipeline_stage": layers_per_stage if virtual > 1 else None,
        "expert_model_parallel_size": e, "expert_tensor_parallel_size": t,
        "moe_grouped_gemm": implementation == "transformer_engine", "context_parallel_size": 1,
        "world_size": t * p * e, "padded_vocab_size": padded_vocab,
        "params_dtype": dtype, "bf16": dtype == torch.bfloat16, "fp16": dtype == torch.float16,
        "transformer_impl": implementation, "ckpt_format": "torch", "use_dist_ckpt": False,
        "data_parallel_random_init": False,
    }  # fmt: skip
