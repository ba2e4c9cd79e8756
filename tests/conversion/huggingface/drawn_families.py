"""Small models of Hugging Face families, from which `drawn` draws random ones."""

from __future__ import annotations

from typing import Any, NamedTuple

from tests.conversion.families import (
    DEEPSEEK,
    DEEPSEEK_V32,
    EXPERTS,
    GLM4_MOE,
    GPT2,
    LLAMA,
    LLAMA3_ROPE,
    YARN_OF_ALL,
    YARN_ROPE,
    V,
)


class Family(NamedTuple):
    """Small models of a family.

    Attributes:
        kind: Name of the classes in `transformers` without ForCausalLM and Config.
        keys: Keys of config.json that all models have.
        choices: Values of further keys, one of which is drawn for each model. Values of the key "" are dictionaries of
            keys that are drawn together.
        norms: Mean of the weights of norms: 0 if a norm multiplies by its weight plus one.
    """

    kind: str
    keys: dict[str, Any]
    choices: dict[str, tuple[Any, ...]]
    norms: float = 1.0


SIZES: dict[str, tuple[Any, ...]] = {
    "num_hidden_layers": (2, 3, 4), "hidden_size": (32, 48), "intermediate_size": (48, 40),
    "num_key_value_heads": (1, 2, 4), "tie_word_embeddings": (False, True),
}  # fmt: skip
ROPE = {"rope_parameters": ({"rope_type": "default", "rope_theta": 500.0}, {"rope_type": "default", "rope_theta": 1e4})}
BIASES = tuple({"attention_bias": biased, "mlp_bias": biased} for biased in (False, True))
GROUPS = tuple({"n_group": n, "topk_group": k} for n, k in ((1, 1), (4, 2)))
SCALED_ROPES = (
    *ROPE["rope_parameters"], LLAMA3_ROPE, {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0},
    {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 16},
)  # fmt: skip
WINDOWS: dict[str, tuple[Any, ...]] = {
    "sliding_window": (3, 5), "layer_types": (None, ["sliding_attention", "full_attention"] * 2),
}  # fmt: skip
LAYER_NORM = {key: x for key, x in LLAMA.items() if key != "rms_norm_eps"}
COHERE = {key: x for key, x in SIZES.items() if key != "num_hidden_layers"} | {
    "attention_bias": (False, True), "logit_scale": (0.5, 1.0, 0.3), "layer_norm_eps": (1e-5, 1e-3),
    "hidden_act": ("silu", "gelu"),
}  # fmt: skip
GPTJ = {"vocab_size": V, "n_head": 4, "n_positions": 64, "bos_token_id": 1, "eos_token_id": 2}
GPTJ_CHOICES: dict[str, tuple[Any, ...]] = {
    "n_layer": (2, 3), "n_embd": (32, 48), "n_inner": (None, 40), "rotary_dim": (4, 6, 8),
    "activation_function": ("gelu_new", "gelu", "relu"), "layer_norm_epsilon": (1e-5, 1e-3),
    "tie_word_embeddings": (False, True),
}  # fmt: skip
ROPES = {"rope_parameters": (*ROPE["rope_parameters"], LLAMA3_ROPE, YARN_ROPE)}
BLOCKS: dict[str, tuple[Any, ...]] = SIZES | {
    "num_attention_heads": (4, 8), "hidden_act": ("silu", "gelu_pytorch_tanh"), "rms_norm_eps": (1e-5, 1e-2),
}  # fmt: skip
SOME_WINDOWS = {
    "num_hidden_layers": (3,), "sliding_window": (5, 3),
    "layer_types": (
        ["sliding_attention", "full_attention", "sliding_attention"],
        ["full_attention", "sliding_attention", "full_attention"], ["sliding_attention"] * 3, ["full_attention"] * 3,
    ),
}  # fmt: skip
SCALED_YARN = {
    "rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 4,
    "llama_4_scaling_beta": 0.5,
}  # fmt: skip
ROUTED: dict[str, tuple[Any, ...]] = {
    "num_experts_per_tok": (2, 3), "n_group": (1, 2), "topk_group": (1,), "norm_topk_prob": (False, True),
    "routed_scaling_factor": (1.0, 1.5), "moe_intermediate_size": (24, 16),
}  # fmt: skip
LATENT: dict[str, Any] = LLAMA | {"num_key_value_heads": 4, "n_routed_experts": 8}
LATENT_SIZES: dict[str, tuple[Any, ...]] = {
    "hidden_size": (32, 48), "intermediate_size": (48, 40), "tie_word_embeddings": (False, True),
    "q_lora_rank": (None, 20), "kv_lora_rank": (12, 16), "qk_nope_head_dim": (8, 10), "qk_rope_head_dim": (4, 6),
    "v_head_dim": (6, 12), "rms_norm_eps": (1e-5, 1e-6),
    "rope_parameters": (None, YARN_ROPE | {"mscale": 0.707, "mscale_all_dim": 1.0}),
}  # fmt: skip
MINICPM3 = {key: DEEPSEEK[key] for key in (*LLAMA, "kv_lora_rank", "qk_nope_head_dim")}
AXK1 = {key: x for key, x in DEEPSEEK.items() if key not in ("first_k_dense_replace", "num_nextn_predict_layers")}
_MAMBA = {"vocab_size": 101, "pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2}
_MAMBA_CHOICES: dict[str, tuple[Any, ...]] = {
    "num_hidden_layers": (2, 3, 4), "hidden_size": (32, 48), "tie_word_embeddings": (False, True), "expand": (1, 2, 3),
    "state_size": (4, 7), "conv_kernel": (2, 4), "use_conv_bias": (False, True), "use_bias": (False, True),
    "time_step_rank": ("auto", 5), "layer_norm_epsilon": (1e-5, 1e-2),
}  # fmt: skip
_FALCON_CHOICES = {"mixer_rms_eps": (1e-6, 1e-2), "expand": (16,), "intermediate_size": (40, 64)}
_JAMBA_CHOICES: dict[str, tuple[Any, ...]] = {
    "num_experts": (1, 4, 6), "num_experts_per_tok": (1, 2), "attn_layer_period": (2, 3), "attn_layer_offset": (0, 1),
    "expert_layer_period": (2, 3), "expert_layer_offset": (0, 1), "mamba_expand": (1, 2), "mamba_d_state": (4, 7),
    "mamba_d_conv": (2, 4), "mamba_conv_bias": (False, True), "mamba_proj_bias": (False, True),
    "mamba_dt_rank": ("auto", 5), "rms_norm_eps": (1e-5, 1e-2),
}  # fmt: skip
HUNYUAN: dict[str, tuple[Any, ...]] = {
    "num_hidden_layers": (2, 3), "hidden_size": (32,), "head_dim": (8, 16),
    "rope_parameters": (
        {"rope_type": "default", "rope_theta": 500.0}, {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0},
        {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 1.0, "alpha": 20.0, "mscale": 1.0, "beta_fast": 32},
    ),
}  # fmt: skip

_ZAMBA2 = {
    "vocab_size": V, "num_hidden_layers": 5, "num_attention_heads": 4, "max_position_embeddings": 64,
    "n_mamba_heads": 8, "mamba_d_state": 6, "mamba_d_conv": 3,
}  # fmt: skip
DRAWN: dict[str, Family] = {
    "cohere": Family("Cohere", LAYER_NORM, SIZES | COHERE | {"head_dim": (8, 12), "rope_parameters": SCALED_ROPES}),
    "cohere2": Family(
        "Cohere2",
        LAYER_NORM | {"num_hidden_layers": 4},
        COHERE | ROPE | WINDOWS | {"sliding_window_pattern": (2, 3, 4)},
    ),
    "cohere2_moe": Family(
        "Cohere2Moe",
        LAYER_NORM | {"num_hidden_layers": 4},
        COHERE
        | WINDOWS
        | {
            "head_dim": (8, 12),
            "sliding_window_pattern": (2, 3),
            "prefix_dense_sliding_window_pattern": (1, 2),
            "mlp_layer_types": (None, ["dense", "sparse", "sparse", "dense"]),
            "first_k_dense_replace": (0, 1, 2),
            "prefix_dense_intermediate_size": (None, 56),
            "num_experts": (4, 6),
            "num_experts_per_tok": (2, 3),
            "num_shared_experts": (0, 1, 2),
            "shared_expert_combination_strategy": ("average", "sum"),
            "expert_selection_fn": ("softmax", "sigmoid"),
            "norm_topk_prob": (True, False),
            "rms_norm_eps": (None, 1e-3),
            "rope_theta": (500.0, 1e4),
        },
    ),
    "stablelm": Family("StableLm", LAYER_NORM, SIZES | {
        "hidden_size": (32, 64), "rope_parameters": SCALED_ROPES, "partial_rotary_factor": (0.25, 0.5, 1.0),
        "use_qkv_bias": (False, True), "use_parallel_residual": (False, True), "layer_norm_eps": (1e-5, 1e-3),
        "hidden_act": ("silu", "gelu"),
    }),
    "falcon": Family("Falcon", {
        "vocab_size": V, "num_attention_heads": 4, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2,
    }, {
        "": (
            {"multi_query": True}, {"multi_query": False}, {"new_decoder_architecture": True},
            {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1},
            {"new_decoder_architecture": True, "num_kv_heads": 2},
        ),
        "num_hidden_layers": (2, 3), "hidden_size": (32, 48), "ffn_hidden_size": (None, 40), "bias": (False, True),
        "rope_parameters": SCALED_ROPES, "activation": ("gelu", "gelu_new", "relu"), "layer_norm_epsilon": (1e-5, 1e-3),
        "tie_word_embeddings": (False, True),
    }),
    "llama": Family("Llama", LLAMA, SIZES | {
        "attention_bias": (False, True), "mlp_bias": (False, True), "rope_parameters": SCALED_ROPES,
    }),
    "gptj": Family("GPTJ", GPTJ, GPTJ_CHOICES),
    "codegen": Family("CodeGen", GPTJ, GPTJ_CHOICES),
    "starcoder2": Family("Starcoder2", LAYER_NORM, SIZES | ROPES | {
        "use_bias": (False, True), "sliding_window": (None, 5), "head_dim": (8, 16), "norm_epsilon": (1e-5, 1e-3),
        "hidden_act": ("gelu_pytorch_tanh", "gelu"),
    }),
    "gpt_bigcode": Family("GPTBigCode", GPT2 | {"n_positions": 32}, {
        "n_layer": (2, 3, 4), "n_embd": (32, 48), "n_inner": (None, 40), "multi_query": (False, True),
        "tie_word_embeddings": (False, True), "layer_norm_epsilon": (1e-5, 1e-3),
        "activation_function": ("gelu_pytorch_tanh", "gelu", "relu"),
    }),
    "nemotron": Family("Nemotron", LAYER_NORM, SIZES | {
        "rope_parameters": tuple(x | {"partial_rotary_factor": p} for x in ROPES["rope_parameters"] for p in (0.5, 1)),
        "": BIASES, "head_dim": (8, 16),
        "norm_eps": (1e-5, 1e-3), "hidden_act": ("relu2", "gelu"),
    }, norms=0.0),
    "ernie4_5": Family("Ernie4_5", LLAMA, SIZES | ROPES | {
        "use_bias": (False, True), "head_dim": (8, 16), "hidden_act": ("silu", "gelu"),
    }),
    "helium": Family("Helium", LLAMA, {key: x for key, x in SIZES.items() if key != "hidden_size"} | ROPES | {
        "": ({"hidden_size": 32, "head_dim": 8}, {"hidden_size": 48, "head_dim": 12}), "attention_bias": (False, True),
        "rms_norm_eps": (1e-8, 1e-3),
    }),
    "mpt": Family("Mpt", {"vocab_size": V, "max_seq_len": 64}, {
        "n_layers": (2, 3, 4), "": tuple({"d_model": h, "n_heads": a} for h, a in ((32, 4), (48, 6), (48, 4))),
        "tie_word_embeddings": (False, True),
        "attn_config": ({}, {"softmax_scale": 0.3}), "layer_norm_epsilon": (1e-5, 1e-3),
    }),
    "gpt_neo": Family("GPTNeo", {"vocab_size": V, "num_heads": 4, "max_position_embeddings": 32}, {
        "": (
            {"num_layers": 2, "attention_types": [[["global", "local"], 1]]},
            {"num_layers": 4, "attention_types": [[["global", "local"], 2]]},
            {"num_layers": 3, "attention_types": [[["local"], 2], [["global"], 1]]},
            {"num_layers": 2, "attention_types": [[["global"], 2]]},
        ),
        "hidden_size": (32, 48), "intermediate_size": (None, 40), "tie_word_embeddings": (False, True),
        "window_size": (3, 5), "layer_norm_epsilon": (1e-5, 1e-3), "activation_function": ("gelu_new", "relu"),
    }),
    "ministral3": Family("Ministral3", LLAMA, BLOCKS | {  # small, because theirs in fp32 is off by 1e-5 in larger ones
        "num_hidden_layers": (2, 3), "hidden_size": (32,), "head_dim": (8, 16), "sliding_window": (None, 5),
        "rope_parameters": (
            SCALED_YARN, SCALED_YARN | {"mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 2.0, "beta_slow": 0.5},
            SCALED_YARN | {"original_max_position_embeddings": 3, "llama_4_scaling_beta": 0.1, "mscale": 1.0},
        ),
    }),
    "seed_oss": Family("SeedOss", LLAMA, BLOCKS | ROPE | {
        "head_dim": (8, 16),
        "": tuple(
            {"attention_bias": of_qkv, "attention_out_bias": others, "mlp_bias": others}
            for of_qkv, others in ((False, False), (True, True), (True, False))
        ),
    }),
    "exaone4": Family("Exaone4", LLAMA, BLOCKS | ROPE | SOME_WINDOWS),
    "hunyuan_v1_dense": Family("HunYuanDenseV1", LLAMA, BLOCKS | HUNYUAN),
    "hunyuan_v1_moe": Family("HunYuanMoEV1", LLAMA, BLOCKS | HUNYUAN | {
        "num_experts": (4, 6), "moe_topk": (1, 3, [2] * 3), "num_hidden_layers": (3,),
    }),
    "apertus": Family("Apertus", LLAMA, SIZES | {
        "num_attention_heads": (4, 8), "rms_norm_eps": (1e-5, 1e-2), "attention_bias": (False, True),
        "rope_parameters": (None, *ROPE["rope_parameters"], LLAMA3_ROPE),
    }),
    "laguna": Family("Laguna", EXPERTS, SIZES | {
        "head_dim": (8, 16), "num_experts": (4, 8), "num_experts_per_tok": (2, 3), "num_hidden_layers": (3,),
        "gating": (True, "per-head", "per-element"), "num_attention_heads_per_layer": (None, [4, 8, 4], [4, 4, 8]),
        "mlp_layer_types": (None, ["sparse", "dense", "sparse"]), "shared_expert_intermediate_size": (24, 40),
        "moe_routed_scaling_factor": (1.0, 2.5), "sliding_window": (5, 8), "rms_norm_eps": (1e-5, 1e-3),
        "layer_types": (
            None, ["sliding_attention"] * 3, ["full_attention", "sliding_attention", "sliding_attention"],
        ),
        "rope_parameters": (
            None, {
                "full_attention": YARN_ROPE | {"partial_rotary_factor": 0.5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
        ),
    }),
    "internlm3": Family("InternLM3", LLAMA, BLOCKS | ROPE | {
        "hidden_size": (32,), "head_dim": (8, 16), "": BIASES,
    }),
    "granite_swa": Family("GraniteSWA", LLAMA, BLOCKS | ROPE | SOME_WINDOWS | {
        "layer_rope_theta": (None, [500.0, 0, 1e4], [0, 0, 300.0]), "embedding_multiplier": (1.0, 3.0),
        "residual_multiplier": (1.0, 0.4), "attention_multiplier": (0.5, 0.3), "logits_scaling": (1.0, 2.0),
        "": BIASES,
    }),
    "granitemoeshared": Family("GraniteMoeShared", LLAMA, BLOCKS | ROPE | {
        "num_local_experts": (4, 6), "num_experts_per_tok": (2, 3), "shared_intermediate_size": (0, 40),
        "embedding_multiplier": (1.0, 3.0), "residual_multiplier": (1.0, 0.4), "attention_multiplier": (0.5, 0.3),
        "logits_scaling": (1.0, 2.0),
    }),
    "vaultgemma": Family("VaultGemma", LLAMA, SIZES | ROPE | SOME_WINDOWS | {
        "hidden_activation": ("gelu_pytorch_tanh", "gelu"), "rms_norm_eps": (1e-5, 1e-2), "head_dim": (8, 16),
        "query_pre_attn_scalar": (8, 24), "attn_logit_softcapping": (None, 2.0), "final_logit_softcapping": (None, 3.0),
    }, norms=0.0),
    "ministral": Family("Ministral", LLAMA, BLOCKS | ROPE | SOME_WINDOWS | {"head_dim": (8, 16)}),
    "dots1": Family(
        "Dots1",
        LLAMA | {"n_routed_experts": 8},
        SIZES
        | ROPE
        | ROUTED
        | {
            "num_hidden_layers": (3,),
            "layer_types": (None, ["full_attention"] * 3),
            "head_dim": (8, 12),
            "n_shared_experts": (1, 2),
            "first_k_dense_replace": (0, 1),
            "sliding_window": (None, 5),
            "max_window_layers": (1, 2),
            "rms_norm_eps": (1e-5, 1e-6),
        },
    ),
    "solar_open": Family(
        "SolarOpen",
        {key: x for key, x in LLAMA.items() if key != "intermediate_size"} | {"n_routed_experts": 8},
        {key: x for key, x in SIZES.items() if key != "intermediate_size"}
        | ROUTED
        | {
            "head_dim": (8, 12),
            "n_shared_experts": (1, 2),
            "attention_bias": (False, True),
            "rope_parameters": (None, YARN_ROPE),
        },
    ),
    "exaone_moe": Family(
        "ExaoneMoe",
        LLAMA | {"num_experts": 8},
        SIZES
        | ROPE
        | ROUTED
        | {
            "num_hidden_layers": (3,),
            "head_dim": (8, 12),
            "num_shared_experts": (1, 2),
            "sliding_window": (3, 5),
            "sliding_window_pattern": (2, 3),
            "first_k_dense_replace": (0, 1),
            "layer_types": (None, ["full_attention", "sliding_attention", "sliding_attention"]),
            "mlp_layer_types": (None, ["sparse", "dense", "sparse"]),
        },
    ),
    "glm4_moe_lite": Family(
        "Glm4MoeLite",
        LATENT | {"num_hidden_layers": 2},
        LATENT_SIZES
        | ROUTED
        | {
            "n_shared_experts": (1, 2),
            "mlp_layer_types": (None, ["sparse", "dense"], ["sparse"] * 2),
        },
    ),
    "youtu": Family(
        "Youtu",
        {key: x for key, x in LATENT.items() if key != "n_routed_experts"},
        LATENT_SIZES | {"num_hidden_layers": (2, 3, 4), "initializer_range": (None, 0.1)},
    ),
    "afmoe": Family(
        "Afmoe",
        LLAMA | {"num_experts": 8},
        SIZES
        | ROPE
        | {
            "num_hidden_layers": (3,),
            "head_dim": (8, 12),
            "num_shared_experts": (1, 2),
            "sliding_window": (3, 5),
            "global_attn_every_n_layers": (2, 3),
            "num_dense_layers": (0, 2),
            "route_scale": (1.0, 2.5),
            "layer_types": (None, ["full_attention", "sliding_attention", "sliding_attention"]),
            "mup_enabled": (False, True),
            "num_experts_per_tok": (2, 3),
            "moe_intermediate_size": (24, 16),
        },
    ),
    "iquestcoder": Family("IQuestCoder", LLAMA, SIZES | {
        "": BIASES, "head_dim": (8, 16), "rms_norm_eps": (1e-5, 1e-3),
        "hidden_act": ("silu", "gelu"), "rope_parameters": (*ROPE["rope_parameters"], YARN_ROPE),
        "hidden_size": (32, 40),
    }),
    "flex_olmo": Family("FlexOlmo", LLAMA, SIZES | ROPE | {
        "num_experts": (4, 7), "num_experts_per_tok": (1, 3), "norm_topk_prob": (False, True),
        "rms_norm_eps": (1e-6, 1e-3),
    }),
    "hy_v3": Family("HYV3", EXPERTS, SIZES | ROPE | {
        "head_dim": (8, 12), "num_experts": (4, 8), "num_experts_per_tok": (1, 3), "num_shared_experts": (1, 2),
        "router_scaling_factor": (1.0, 2.8), "mlp_layer_types": (None, ["sparse", "dense", "sparse"]),
        "num_hidden_layers": (3,), "enable_moe_fp32_combine": (False, True), "rms_norm_eps": (1e-5, 1e-3),
    }),
    "mellum": Family("Mellum", EXPERTS, SIZES | {
        "head_dim": (8, 12), "num_experts": (4, 8), "num_experts_per_tok": (1, 3), "norm_topk_prob": (False, True),
        "num_hidden_layers": (4,), "sliding_window": (5, 8), "mlp_layer_types": (None, ["sparse", "dense"] * 2),
        "layer_types": (
            None, ["sliding_attention"] * 4, ["sliding_attention", "full_attention"] * 2,
            ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
        ),
        "rope_parameters": (
            None, {"full_attention": YARN_ROPE, "sliding_attention": {"rope_type": "default", "rope_theta": 100.0}},
            {
                "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0},
                "sliding_attention": {"rope_type": "proportional", "rope_theta": 100.0, "partial_rotary_factor": 0.5},
            },
        ),
    }),
    "lfm2": Family("Lfm2", LAYER_NORM, SIZES | ROPE | {
        "layer_types": (["conv", "full_attention", "conv"], ["full_attention"] * 3, ["conv", "conv", "full_attention"]),
        "num_hidden_layers": (3,), "conv_L_cache": (2, 3, 5), "block_auto_adjust_ff_dim": (False, True),
        "block_multiple_of": (8, 32), "block_ffn_dim_multiplier": (1.0, 1.5), "norm_eps": (1e-5, 1e-3),
        "hidden_size": (24, 32),
    }),
    "lfm3": Family("Lfm3", LAYER_NORM, SIZES | {
        "layer_types": (
            None, ["conv", "sliding_attention", "full_attention", "conv"], ["full_attention", "sliding_attention"] * 2,
        ),
        "num_hidden_layers": (4,), "conv_L_cache": (2, 7), "sliding_window": (5, 8), "head_dim": (8, 16),
        "use_sandwich_norm": (False, True), "use_attention_gate": (False, True), "norm_eps": (1e-5, 1e-3),
        "rope_parameters": (
            None, {
                "full_attention": {"rope_type": "proportional", "rope_theta": 500.0, "partial_rotary_factor": 0.25},
                "sliding_attention": YARN_ROPE,
            },
        ),
    }),
    "axk1": Family("AXK1", AXK1, SIZES | {
        "num_key_value_heads": (4,), "num_hidden_layers": (3,), "": GROUPS,
        "n_shared_experts": (1, 2), "mlp_layer_types": (None, ["sparse", "dense", "sparse"]),
        "norm_topk_prob": (False, True), "rms_norm_eps": (1e-6, 1e-3), "routed_scaling_factor": (1.0, 2.5),
        "v_head_dim": (6, 12), "rope_parameters": (*ROPE["rope_parameters"], YARN_OF_ALL),
    }),
    "sarvam_moe": Family("SarvamMoE", GLM4_MOE, SIZES | ROPE | {
        "head_dim": (8, 16), "n_routed_experts": (4, 8), "n_shared_experts": (1, 2), "use_qk_norm": (False, True),
        "attention_bias": (False, True), "first_k_dense_replace": (0, 1), "norm_topk_prob": (False, True),
        "partial_rotary_factor": (0.5, 1.0), "n_group": (1, 2), "routed_scaling_factor": (1.0, 1.5),
        "num_hidden_layers": (2, 3),
    }),
    "sarvam_mla": Family("SarvamMLA", DEEPSEEK, SIZES | {
        "num_key_value_heads": (None,), "q_lora_rank": (None, 20), "": GROUPS,
        "n_shared_experts": (1, 2), "first_k_dense_replace": (0, 1), "norm_topk_prob": (False, True),
        "rms_norm_eps": (1e-6, 1e-3), "routed_scaling_factor": (1.0, 2.5), "v_head_dim": (6, 12),
        "rope_parameters": (*ROPE["rope_parameters"], YARN_OF_ALL),
    }),
    "minimax_m3_vl_text": Family("MiniMaxM3VL", LLAMA | {"intermediate_size": 24}, {
        "hidden_size": (32, 48), "num_local_experts": (4, 8), "num_experts_per_tok": (2, 3),
        "dense_intermediate_size": (48, 40), "shared_intermediate_size": (24, 40), "tie_word_embeddings": (False, True),
        "mlp_layer_types": (None, ["dense", "sparse", "sparse"]), "routed_scaling_factor": (1.0, 2.0),
        "layer_types": (
            ["minimax_m3_sparse"] * 3, ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
        ),
        "index_block_size": (2, 3), "index_topk_blocks": (2, 3),
        "index_local_blocks": (1, 2), "rms_norm_eps": (1e-5, 1e-3),
        "": tuple(
            {
                "num_key_value_heads": groups, "index_n_heads": groups, "head_dim": width,
                "index_head_dim": width, "rotary_dim": rotated,
                "rope_parameters": ROPE["rope_parameters"][0] | {"partial_rotary_factor": rotated / width},
            }
            for groups in (1, 2, 4) for width, rotated in ((8, 4), (12, 6), (8, 8))
        ),
    }, norms=0.0),
    "minicpm3": Family("MiniCPM3", MINICPM3, SIZES | {
        "q_lora_rank": (None, 20), "v_head_dim": (None, 6), "qk_rope_head_dim": (4, 8), "scale_emb": (1, 12),
        "num_key_value_heads": (4,), "scale_depth": (None, 1.4), "dim_model_base": (None, 16),
        "rms_norm_eps": (1e-5, 1e-3), "rope_parameters": (*ROPE["rope_parameters"], YARN_OF_ALL),
    }),
    "mamba": Family("Mamba", _MAMBA, _MAMBA_CHOICES),
    "falcon_mamba": Family("FalconMamba", _MAMBA, _MAMBA_CHOICES | _FALCON_CHOICES),
    "jamba": Family("Jamba", LLAMA, SIZES | _JAMBA_CHOICES),
    "recurrent_gemma": Family("RecurrentGemma", _MAMBA | {"num_attention_heads": 4}, SIZES | ROPE | {
        "block_types": (["recurrent", "recurrent", "attention"], ["attention", "recurrent"], ["attention"]),
        "num_hidden_layers": (3, 4), "conv1d_width": (2, 4), "attention_window_size": (3, 5, 64),
        "attention_bias": (False, True), "logits_soft_cap": (30.0, 2.0), "rms_norm_eps": (1e-6, 1e-3),
        "partial_rotary_factor": (0.5, 1.0),
    }, norms=0.0),
    "zamba2": Family("Zamba2", _ZAMBA2, ROPE | {
        "": (
            {"use_shared_attention_adapter": True}, {"use_shared_attention_adapter": True, "num_key_value_heads": 4},
            {"num_key_value_heads": 2}, {},
        ),
        "hidden_size": (32, 48), "intermediate_size": (None, 40), "mamba_expand": (2, 3), "mamba_ngroups": (1, 2),
        "num_mem_blocks": (1, 2), "adapter_rank": (4, 6), "use_mem_rope": (False, True),
        "time_step_min": (0.001, 0.01), "hidden_act": ("gelu", "silu"),
        "layers_block_type": (
            ["linear_attention", *["hybrid"] * 4], ["hybrid", "hybrid", "mamba", "hybrid", "mamba"],
        ),
    }),
    "glm_moe_dsa": Family(
        "GlmMoeDsa",
        DEEPSEEK_V32 | {"num_hidden_layers": 4},
        ROPE
        | {
            "indexer_types": (None, None, ["full", "shared", "full", "shared"], ["full", "full", "shared", "shared"]),
            "index_topk_pattern": (None, None, "FSSF", ["full", "full", "shared", "full"]),
            "index_topk_freq": (1, 2, 3),
            "index_skip_topk_offset": (1, 2),
            "index_topk": (3, 5),
            "index_head_dim": (6, 8),
            "index_n_heads": (10, 12),
            "rms_norm_eps": (1e-5, 1e-3),
            "hidden_size": (32, 48),
            "v_head_dim": (6, 12),
            "q_lora_rank": (20, 24),
            "kv_lora_rank": (12, 16),
            "first_k_dense_replace": (1, 2),
            "n_group": (4,),
            "topk_group": (2, 3),
            "n_shared_experts": (1, 2),
            "norm_topk_prob": (False, True),
            "routed_scaling_factor": (1.5, 2.5),
        },
    ),
}  # fmt: skip
"""Families by model_type."""
