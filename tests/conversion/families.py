"""Tiny models of each Hugging Face family with random weights, and sources of random tensors of ours."""

from __future__ import annotations

import re
from copy import deepcopy
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megafp8.config import RopeScaling
from megafp8.conversion.base import CheckpointSource, TensorInfo
from megafp8.conversion.model import model_tensors
from megafp8.parallel.sharding import Init, ParamShard
from megafp8.parallel.tensor.random import fill_
from megafp8.spec import ModelSpec

V, S, B = 101, 12, 2

LLAMA: dict[str, Any] = {
    "vocab_size": V,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
TWO_KINDS: dict[str, Any] = {
    "layer_kinds": {str(n): {"ffn": {"kind": "moe", "num_experts": n}} for n in (4, 8)}, "pattern": ["4", "8"],
}  # fmt: skip
"""Keys of a model with two kinds of experts, which only native formats have."""
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8,
}
EXPERTS: dict[str, Any] = LLAMA | {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
LINEAR: dict[str, Any] = LLAMA | {
    "rms_norm_eps": 1e-6, "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 32, "linear_value_head_dim": 24,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}  # fmt: skip
OLMO_HYBRID: dict[str, Any] = {key: x for key, x in LINEAR.items() if key != "head_dim"} | {"linear_key_head_dim": 64}
LINEAR_KINDS = ("Qwen3Next", "Qwen3_5")
LINEAR_EXPERTS = {
    "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40,
}  # fmt: skip
DEEPSEEK: dict[str, Any] = LLAMA | {
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-6,
    "q_lora_rank": 20,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 0,
}
DEEPSEEK_V2: dict[str, Any] = {key: x for key, x in DEEPSEEK.items() if key != "num_nextn_predict_layers"}
KIMI_LINEAR: dict[str, Any] = {
    key: x for key, x in DEEPSEEK_V2.items() if key not in ("n_routed_experts", "first_k_dense_replace", "rms_norm_eps")
} | {
    "num_local_experts": 8, "q_lora_rank": None, "n_group": 1, "topk_group": 1, "linear_num_heads": 2,
    "linear_head_dim": 16, "linear_conv_kernel_dim": 3,
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
}  # fmt: skip
LFM2: dict[str, Any] = {key: x for key, x in EXPERTS.items() if key != "rms_norm_eps"} | {
    "num_dense_layers": 1, "layer_types": ["conv", "full_attention", "conv"], "routed_scaling_factor": 1.5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
}  # fmt: skip
DEEPSEEK_V32: dict[str, Any] = DEEPSEEK_V2 | {"index_n_heads": 10, "index_head_dim": 6, "index_topk": 4}
DEEPSEEK_V4: dict[str, Any] = {
    key: x for key, x in LLAMA.items() if key not in ("intermediate_size", "num_key_value_heads", "rms_norm_eps")
} | {
    "moe_intermediate_size": 24, "head_dim": 16, "partial_rotary_factor": 0.25, "num_nextn_predict_layers": 0,
    "q_lora_rank": 20, "num_experts_per_tok": 3, "n_routed_experts": 8, "sliding_window": 5, "o_groups": 2,
    "o_lora_rank": 12, "index_n_heads": 10, "index_head_dim": 8, "index_topk": 2,
    "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
    "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
    "mlp_layer_types": ["hash_moe", "moe", "moe"],
}  # fmt: skip
GEMMA: dict[str, Any] = LLAMA | {"head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 5}
GEMMA4: dict[str, Any] = LLAMA | {
    "num_hidden_layers": 5, "head_dim": 8, "global_head_dim": 16, "num_global_key_value_heads": 2,
    "num_key_value_heads": 4, "attention_k_eq_v": True, "sliding_window": 5, "hidden_size_per_layer_input": 0,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    "final_logit_softcapping": 3.0,
}  # fmt: skip
GEMMA4_SHARED: dict[str, Any] = GEMMA4 | {
    "num_kv_shared_layers": 2, "use_double_wide_mlp": True, "hidden_size_per_layer_input": 6,
    "vocab_size_per_layer_input": V,
}  # fmt: skip
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 2.0,
    "beta_slow": 0.5,
}
YARN_OF_ALL = YARN_ROPE | {"mscale": 0.707, "mscale_all_dim": 1.5}
GPT2: dict[str, Any] = {
    "vocab_size": V,
    "n_embd": 32,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 16,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GRANITE = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.4,
    "attention_multiplier": 0.3,
    "logits_scaling": 2.0,
}
OPT: dict[str, Any] = {
    "vocab_size": V,
    "hidden_size": 32,
    "ffn_dim": 48,
    "pad_token_id": None,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 16,
}
NEOX: dict[str, Any] = {
    "vocab_size": V,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}
GPT_OSS: dict[str, Any] = LLAMA | {
    "head_dim": 16,
    "sliding_window": 5,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
LONGROPE: dict[str, Any] = {
    "rope_scaling": {"type": "longrope", "short_factor": [1.0, 1.25, 2.0], "long_factor": [1.5, 3.0, 6.0]},
    "partial_rotary_factor": 0.75,
}
GLM4_MOE: dict[str, Any] = LLAMA | {
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "routed_scaling_factor": 2.5,
    "num_mtp_layers": 0,
}
ERNIE: dict[str, Any] = LLAMA | {"moe_num_experts": 6, "moe_k": 3, "moe_intermediate_size": 24}
MISTRAL4: dict[str, Any] = {
    key: x for key, x in DEEPSEEK_V2.items() if key not in ("n_group", "topk_group", "first_k_dense_replace")
} | {
    "rope_parameters": YARN_ROPE
    | {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.5, "original_max_position_embeddings": 4},
}
LLAMA4: dict[str, Any] = LLAMA | {
    "intermediate_size": 24,
    "intermediate_size_mlp": 40,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "head_dim": 16,
    "no_rope_layers": [1, 0, 1],
    "moe_layers": [1, 2],
    "attention_chunk_size": 5,
    "floor_scale": 4,
    "attn_scale": 0.5,
}
NEMOTRON: dict[str, Any] = {
    "vocab_size": V, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 12, "mamba_num_heads": 8, "mamba_head_dim": 6, "n_groups": 2, "ssm_state_size": 8,
    "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "routed_scaling_factor": 2.5,
    "moe_shared_expert_intermediate_size": 16,
    "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
}  # fmt: skip
MAMBA: dict[str, Any] = {
    "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 2, "mamba_d_state": 6, "mamba_d_conv": 3,
}  # fmt: skip
GRANITE_HYBRID: dict[str, Any] = LLAMA | GRANITE | MAMBA | {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"], "num_local_experts": 4,
    "num_experts_per_tok": 2, "shared_intermediate_size": 40,
}  # fmt: skip
THEIRS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-next": (
        "Qwen3Next",
        LINEAR
        | LINEAR_EXPERTS
        | {"mlp_only_layers": [0], "layer_types": ["linear_attention", "full_attention", "full_attention"]},
    ),
    "qwen3-5": ("Qwen3_5", LINEAR),
    "qwen3-5-35b-a3b": ("Qwen3_5Moe", LINEAR | LINEAR_EXPERTS | {"layer_types": None, "full_attention_interval": 3}),
    "olmo-hybrid": ("OlmoHybrid", OLMO_HYBRID | {"rope_parameters": {"rope_type": "default", "rope_theta": None}}),
    "olmo-hybrid-rope": (
        "OlmoHybrid",
        OLMO_HYBRID | {"linear_value_head_dim": 48, "linear_allow_neg_eigval": False, "rope_parameters": YARN_ROPE},
    ),
    "llama2": ("Llama", LLAMA | {"num_key_value_heads": 4}),
    "llama3": ("Llama", LLAMA | {"rope_parameters": LLAMA3_ROPE}),
    "llama-tied": ("Llama", LLAMA | {"tie_word_embeddings": True}),
    "llama-biases": ("Llama", LLAMA | {"attention_bias": True, "mlp_bias": True}),
    "llama-geglu": ("Llama", LLAMA | {"hidden_act": "gelu_pytorch_tanh"}),
    "qwen2-exact-geglu": ("Qwen2", LLAMA | {"hidden_act": "gelu", "rope_parameters": YARN_ROPE}),
    "arcee": ("Arcee", LLAMA | {"rope_parameters": YARN_ROPE}),
    "mistral": ("Mistral", LLAMA | {"sliding_window": 5, "head_dim": 16}),
    "qwen2": ("Qwen2", LLAMA),
    "qwen2-window-tied": (
        "Qwen2",
        LLAMA | {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1, "tie_word_embeddings": True},
    ),
    "qwen3": ("Qwen3", LLAMA | {"head_dim": 16}),
    "qwen3-tied": ("Qwen3", LLAMA | {"head_dim": 8, "tie_word_embeddings": True}),
    "mixtral": ("Mixtral", LLAMA | {"num_local_experts": 4, "sliding_window": 5, "head_dim": 16}),
    "qwen3-moe": (
        "Qwen3Moe",
        EXPERTS | {"head_dim": 16, "norm_topk_prob": True, "mlp_only_layers": [0], "tie_word_embeddings": True},
    ),
    "qwen2-moe": ("Qwen2Moe", EXPERTS | {"shared_expert_intermediate_size": 40, "decoder_sparse_step": 2}),
    "qwen2-moe-no-bias": (
        "Qwen2Moe",
        EXPERTS | {"shared_expert_intermediate_size": 8, "qkv_bias": False, "norm_topk_prob": True},
    ),
    "olmoe": ("Olmoe", LLAMA | {"num_experts": 6, "num_experts_per_tok": 2}),
    "olmo2": ("Olmo2", LLAMA),
    "gemma2": ("Gemma2", GEMMA | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}),
    "gemma2-uncapped": (
        "Gemma2",
        GEMMA
        | {"attn_logit_softcapping": None, "final_logit_softcapping": None, "layer_types": ["full_attention"] * 3}
        | {"tie_word_embeddings": False, "sliding_window": 4096},
    ),
    "gemma3": (
        "Gemma3",
        GEMMA
        | {
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 500.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
        },
    ),
    "gemma4": ("Gemma4", GEMMA4),
    "gemma4-shared": ("Gemma4", GEMMA4_SHARED),
    "gemma4-experts": (
        "Gemma4",
        GEMMA4 | {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 24},
    ),
    "phi3": ("Phi3", LLAMA | {"sliding_window": 5, "partial_rotary_factor": 0.5}),
    # Sequences of S tokens are longer than the original ones, and shorter.
    "phi3-longrope": ("Phi3", LLAMA | LONGROPE | {"original_max_position_embeddings": 8}),
    "phi3-longrope-short": ("Phi3", LLAMA | LONGROPE | {"original_max_position_embeddings": 16}),
    "qwen2-longrope": (
        "Qwen2",
        LLAMA
        | {
            "rope_scaling": {
                "rope_type": "longrope",
                "short_factor": [1.0] * 4,
                "long_factor": [1.5, 3.0, 6.0, 6.5],
                "original_max_position_embeddings": 8,
            },
        },
    ),
    "granite": ("Granite", LLAMA | GRANITE | {"attention_bias": True, "mlp_bias": True}),
    "granite-moe": ("GraniteMoe", LLAMA | GRANITE | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "opt": ("OPT", OPT),
    "bloom": ("Bloom", {"vocab_size": V, "hidden_size": 48, "n_layer": 3, "n_head": 6}),
    "glm": ("Glm", LLAMA | {"head_dim": 16}),
    "glm4": ("Glm4", LLAMA | {"head_dim": 16, "rms_norm_eps": 1e-6, "attention_bias": True}),
    "gpt-neox": ("GPTNeoX", NEOX),
    "gpt-neox-in-turn": (
        "GPTNeoX",
        NEOX | {"use_parallel_residual": False, "rotary_pct": 1.0, "rotary_emb_base": 500, "hidden_act": "gelu_new"},
    ),
    "gpt-oss": ("GptOss", GPT_OSS | {"rope_parameters": YARN_ROPE | {"truncate": False}}),
    "deepseek-v3": ("DeepseekV3", DEEPSEEK),
    "deepseek-v3-tied": (
        "DeepseekV3",
        DEEPSEEK
        | {"tie_word_embeddings": True, "rope_parameters": YARN_OF_ALL, "norm_topk_prob": False, "v_head_dim": 12},
    ),
    "deepseek-v2": (
        "DeepseekV2",
        DEEPSEEK_V2
        | {"topk_method": "group_limited_greedy", "rope_parameters": YARN_OF_ALL, "routed_scaling_factor": 16.0},
    ),
    "deepseek-v2-lite": ("DeepseekV2", DEEPSEEK_V2 | {"q_lora_rank": None, "n_group": 1, "topk_group": 1}),
    "glm4-moe": (
        "Glm4Moe",
        GLM4_MOE | {"head_dim": 16, "use_qk_norm": True, "attention_bias": True, "n_group": 2, "topk_group": 1},
    ),
    "glm4-moe-plain": (
        "Glm4Moe",
        GLM4_MOE | {"partial_rotary_factor": 1.0, "norm_topk_prob": False, "routed_scaling_factor": 1.0},
    ),
    "olmo3": (
        "Olmo3",
        LLAMA
        | {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
        | {
            "rope_parameters": {
                "full_attention": YARN_ROPE,
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            }
        },
    ),
    "smollm3": ("SmolLM3", LLAMA | {"no_rope_layers": [1, 0, 1], "rope_parameters": YARN_ROPE}),
    "smollm3-windows": (
        "SmolLM3",
        LLAMA
        | {"use_sliding_window": True, "sliding_window": 5, "num_hidden_layers": 4, "attention_bias": True}
        | {"mlp_bias": True, "tie_word_embeddings": False},
    ),
    "lfm2-moe": ("Lfm2Moe", LFM2),
    "kimi-linear": ("KimiLinear", KIMI_LINEAR),
    "kimi-linear-groups": (
        "KimiLinear",
        KIMI_LINEAR
        | {
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "q_lora_rank": 10,
            "n_group": 4,
            "topk_group": 2,
            "norm_topk_prob": False,
        },
    ),
    "minimax-m2": (
        "MiniMaxM2",
        LLAMA | {"num_local_experts": 6, "num_experts_per_tok": 3, "head_dim": 12, "partial_rotary_factor": 0.5},
    ),
    "ernie4-5-moe": ("Ernie4_5_Moe", ERNIE | {"moe_layer_start_index": 1, "moe_layer_end_index": 1}),
    "ernie4-5-moe-untied": (
        "Ernie4_5_Moe",
        ERNIE
        | {"moe_num_shared_experts": 0, "moe_layer_interval": 2, "tie_word_embeddings": False, "num_hidden_layers": 4},
    ),
    "mistral4": ("Mistral4", MISTRAL4),
    "mistral4-no-latent": (
        "Mistral4",
        MISTRAL4 | {"q_lora_rank": None, "norm_topk_prob": False, "first_k_dense_replace": 1},
    ),
    "nanochat": ("NanoChat", LLAMA | {"final_logit_softcapping": 2.0}),
    "nanochat-tied": ("NanoChat", LLAMA | {"final_logit_softcapping": None, "tie_word_embeddings": True}),
    "llama4": ("Llama4", LLAMA4),
    "llama4-plain": (
        "Llama4",
        LLAMA4
        | {"moe_layers": [0, 1, 2], "use_qk_norm": False, "attn_temperature_tuning": False, "num_experts_per_tok": 1}
        | {"floor_scale": 8192, "attn_scale": 0.1},
    ),
    "nemotron-h": ("NemotronH", NEMOTRON),
    "nemotron-h-latents": ("NemotronH", NEMOTRON | {"moe_latent_size": 20}),
    "nemotron-h-dense": (
        "NemotronH",
        {key: x for key, x in NEMOTRON.items() if not re.search("expert|moe|routed", key)}
        | {"layers_block_type": ["linear_attention", "mlp", "full_attention"], "use_conv_bias": False}
        | {"time_step_min": 0.8, "mlp_hidden_act": "gelu"},
    ),
    "bamba": ("Bamba", LLAMA | MAMBA | {"attn_layer_indices": [1], "time_step_limit": (0.5, 1.0)}),
    "granite-hybrid": ("GraniteMoeHybrid", GRANITE_HYBRID),
    "granite-hybrid-dense": (
        "GraniteMoeHybrid",
        {key: x for key, x in GRANITE_HYBRID.items() if "expert" not in key}
        | {
            "num_local_experts": 0,
            "intermediate_size": 40,
            "position_embedding_type": "rope",
            "mamba_conv_bias": False,
        },
    ),
    "deepseek-v4": ("DeepseekV4", DEEPSEEK_V4 | {"rope_parameters": YARN_ROPE}),
    "deepseek-v32": ("DeepseekV32", DEEPSEEK_V32 | {"rope_parameters": YARN_OF_ALL}),
    "glm-moe-dsa": (
        "GlmMoeDsa",
        DEEPSEEK_V32 | {"rms_norm_eps": 1e-5, "n_group": 1, "topk_group": 1, "v_head_dim": 12},
    ),
    "gpt2": ("GPT2", GPT2),
    "gpt2-untied": ("GPT2", GPT2 | {"tie_word_embeddings": False, "activation_function": "gelu"}),
}
"""Class prefix and config of `transformers`."""

SMALL: dict[str, Any] = {
    "num_layers": 3,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "ffn_hidden_size": 48,
    "vocab_size": V,
    "vocab_multiple": 8,
}
COMPRESSED: dict[str, Any] = {"kind": "compressed_attention", "q_rank": 20, "output_groups": 2, "output_rank": 12}
GEMMA_OF_OURS: dict[str, Any] = SMALL | {
    "activation": "geglu_tanh",
    "norm_position": "both",
    "zero_centered_gamma": True,
    "embedding_multiplier": 32**0.5,
    "head_dim": 16,
    "sliding_window": 5,
    "full_attention_layers": [1],
}
GEMMA4_FULL = {
    "head_dim": 32, "num_query_groups": 4, "rope_theta": 1e6, "partial_rotary_factor": 0.25, "proportional_rope": True,
}  # fmt: skip
SCALING = RopeScaling(factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8)
GROUPED_EXPERTS: dict[str, Any] = {
    "num_experts": 8,
    "top_k": 3,
    "ffn_hidden_size": 24,
    "shared_ffn_hidden_size": 48,
    "first_dense_layers": 1,
    "score": "sigmoid",
    "scaling_factor": 2.5,
    "num_groups": 4,
    "top_groups": 2,
    "selection_bias": True,
}
LATENT: dict[str, Any] = SMALL | {
    "num_query_groups": None,
    "norm_eps": 1e-6,
    "latent_attention": {"q_rank": 20, "kv_rank": 12, "nope_head_dim": 6, "rope_head_dim": 6, "value_head_dim": 8},
    "moe": GROUPED_EXPERTS,
}
BIASED: dict[str, Any] = {"num_query_groups": None, "normalization": "layernorm", "linear_bias": True}
MAMBA2 = {"kind": "mamba2", "num_heads": 8, "head_dim": 8, "state_size": 6, "num_groups": 2}
HYBRID: dict[str, Any] = SMALL | {
    "qk_norm": True, "output_gate": True, "zero_centered_gamma": True, "partial_rotary_factor": 0.5, "head_dim": 8,
    "layer_kinds": {"linear": {"mixer": {
        "kind": "gated_delta_net", "num_key_heads": 2, "num_value_heads": 4, "key_head_dim": 32, "value_head_dim": 24,
    }}, "full": {}},
    "pattern": ["linear", "full"],
}  # fmt: skip
HYBRID_EXPERTS = {"num_experts": 6, "shared_ffn_hidden_size": 40, "shared_gate": True, "ffn_hidden_size": 24}
ROTATED_WINDOWS: dict[str, Any] = {
    "layer_kinds": {
        "dense": {"mixer": {"position_embedding": "none"}, "ffn": {"kind": "mlp"}},
        "local": {"mixer": {"sliding_window": 5}, "ffn": {"kind": "moe"}},
        "full": {"mixer": {"position_embedding": "none"}, "ffn": {"kind": "moe"}},
    },
    "pattern": ["dense", "local", "full"],
    "moe": {key: x for key, x in GROUPED_EXPERTS.items() if "group" not in key and key != "first_dense_layers"},
}
"""Keys of a model in which only layers with a window have a rotary embedding."""
OURS: dict[str, tuple[str, dict[str, Any]]] = {
    "experts that no layer has": (
        "llama",
        SMALL | {"moe": {"num_experts": 4}, "layer_kinds": {"a": {"ffn": {"kind": "mlp"}}}, "pattern": ["a"]},
    ),
    "qwen3_next": ("qwen3_next", HYBRID | {"moe": HYBRID_EXPERTS}),
    "qwen3_5_text": ("qwen3_5_text", HYBRID),
    "olmo_hybrid": (
        "olmo_hybrid",
        SMALL
        | {
            "qk_norm": "projection",
            "position_embedding": "none",
            "layer_kinds": {
                "linear": {
                    "mixer": HYBRID["layer_kinds"]["linear"]["mixer"]
                    | {"allow_neg_eigval": True, "key_head_dim": 16, "value_head_dim": 16, "norm_eps": 1e-5}
                },
                "full": {"norm_position": "output"},
            },
            "pattern": ["linear", "full"],
        },
    ),
    "nemotron_h": (
        "nemotron_h",
        SMALL
        | {
            "num_layers": 4,
            "activation": "squared_relu",
            "position_embedding": "none",
            "layer_kinds": {
                "mamba": {"mixer": MAMBA2 | {"min_step": 0.001}, "ffn": "none"},
                "moe": {"mixer": "none", "ffn": "moe"},
                "attention": {"ffn": "none"},
            },
            "pattern": ["mamba", "moe", "attention", "moe"],
            "moe": {
                "num_experts": 6,
                "top_k": 2,
                "ffn_hidden_size": 24,
                "shared_ffn_hidden_size": 16,
                "score": "sigmoid",
                "selection_bias": True,
            },
        },
    ),
    "bamba": (
        "bamba",
        SMALL
        | {
            "partial_rotary_factor": 0.5,
            "layer_kinds": {"mamba": {"mixer": MAMBA2 | {"max_step": 0.7}}, "attention": {}},
            "pattern": ["mamba", "attention"],
        },
    ),
    "granitemoehybrid": (
        "granitemoehybrid",
        SMALL
        | {
            "residual_multiplier": 0.4,
            "layer_kinds": {"mamba": {"mixer": MAMBA2}, "attention": {"mixer": {"position_embedding": "none"}}},
            "pattern": ["mamba", "attention"],
            "moe": {"num_experts": 4, "ffn_hidden_size": 24, "shared_ffn_hidden_size": 16},
        },
    ),
    "granitemoehybrid-attention": (
        "granitemoehybrid",
        SMALL | {"moe": {"num_experts": 4, "ffn_hidden_size": 24, "shared_ffn_hidden_size": 16}},
    ),
    "llama": ("llama", SMALL | {"rope_scaling": SCALING, "rope_theta": 500.0}),
    "llama-tied": ("llama", SMALL | {"tie_embeddings": True, "num_query_groups": None, "head_dim": 6}),
    "llama-biases": ("llama", SMALL | {"linear_bias": True}),
    "llama-geglu": ("llama", SMALL | {"activation": "geglu_tanh"}),
    "arcee": ("arcee", SMALL | {"activation": "squared_relu"}),
    "mistral": ("mistral", SMALL | {"sliding_window": 5}),
    "mistral-no-multiple": ("mistral", SMALL | {"hidden_size": 34, "head_dim": 6, "init_std": 1.5}),
    "qwen2": ("qwen2", SMALL | {"qkv_bias": True}),
    "qwen2-window": (
        "qwen2",
        SMALL | {"qkv_bias": True, "sliding_window": 5, "full_attention_layers": [0], "tie_embeddings": True},
    ),
    "qwen3": (
        "qwen3",
        SMALL | {"qk_norm": True, "head_dim": 16, "sliding_window": 5, "full_attention_layers": [1]},
    ),
    "mixtral": ("mixtral", SMALL | {"moe": {"num_experts": 4, "ffn_hidden_size": 24}, "sliding_window": 5}),
    "qwen3_moe": (
        "qwen3_moe",
        SMALL
        | {
            "qk_norm": True,
            "head_dim": 16,
            "moe": {"num_experts": 12, "top_k": 3, "ffn_hidden_size": 24, "normalize": False, "first_dense_layers": 1},
        },
    ),
    "qwen2_moe": (
        "qwen2_moe",
        SMALL
        | {
            "qkv_bias": True,
            "head_dim": 6,
            "moe": {"num_experts": 6, "shared_ffn_hidden_size": 40, "shared_gate": True, "layer_interval": 2},
        },
    ),
    "olmoe": (
        "olmoe",
        SMALL | {"qk_norm": "projection", "moe": {"num_experts": 6, "top_k": 3, "ffn_hidden_size": 24}},
    ),
    "olmo2": ("olmo2", SMALL | {"norm_position": "output", "qk_norm": "projection"}),
    "gemma2": ("gemma2", GEMMA_OF_OURS | {"attention_softcap": 1.5, "logit_softcap": 4.0, "attention_scale": 24**-0.5}),
    "gemma3_text": (
        "gemma3_text",
        GEMMA_OF_OURS
        | {"qk_norm": True, "rope_theta": 1e4, "rope_local_theta": 50.0, "rope_interpolation_factor": 4.0},
    ),
    "gemma4_text": (
        "gemma4_text",
        {key: x for key, x in GEMMA_OF_OURS.items() if key not in ("full_attention_layers", "zero_centered_gamma")}
        | {
            "num_layers": 5,
            "sliding_window": None,
            "qk_norm": True,
            "value_norm": True,
            "attention_scale": 1.0,
            "layer_scalar": True,
            "per_layer_embedding": {"width": 6},
            "rope_theta": 1e4,
            "layer_kinds": {
                "local": {"mixer": {"sliding_window": 5}},
                "full": {"mixer": GEMMA4_FULL | {"keys_as_values": True}},
                "local-shared": {"mixer": {"sliding_window": 5, "kv_layer": 1}, "ffn": {"ffn_hidden_size": 96}},
                "full-shared": {"mixer": GEMMA4_FULL | {"kv_layer": 2}, "ffn": {"ffn_hidden_size": 96}},
            },
            "pattern": ["local * 2", "full", "local-shared", "full-shared"],
        },
    ),
    "gemma4-experts": (
        "gemma4_text",
        {key: x for key, x in GEMMA_OF_OURS.items() if key not in ("full_attention_layers", "zero_centered_gamma")}
        | {
            "full_attention_layers": [2],
            "qk_norm": True,
            "value_norm": True,
            "attention_scale": 1.0,
            "layer_scalar": True,
            "moe": {
                "num_experts": 4,
                "ffn_hidden_size": 24,
                "shared_ffn_hidden_size": 48,
                "separate_norms": True,
            },
        },
    ),
    "phi3": ("phi3", SMALL | {"partial_rotary_factor": 0.5, "rope_theta": 500.0}),
    "phi3-longrope": (
        "phi3",
        SMALL
        | {
            "partial_rotary_factor": 0.75,
            "longrope": {
                "short_factor": [1.0, 1.25, 2.0],
                "long_factor": [1.5, 3.0, 6.0],
                "factor": 4.0,
                "original_max_position_embeddings": 8,
            },
        },
    ),
    "llama-longrope": (
        "llama",
        SMALL
        | {
            "longrope": {
                "short_factor": [1.0, 1.25, 2.0, 3.0],
                "long_factor": [1.5, 3.0, 6.0, 7.0],
                "factor": 4.0,
                "original_max_position_embeddings": 8,
            },
        },
    ),
    "granite": (
        "granite",
        SMALL | {"embedding_multiplier": 3, "residual_multiplier": 0.4, "attention_scale": 0.3, "logits_scaling": 2},
    ),
    "granitemoe": (
        "granitemoe",
        SMALL | {"residual_multiplier": 0.4, "moe": {"num_experts": 4, "ffn_hidden_size": 24}},
    ),
    "opt": (
        "opt",
        SMALL
        | BIASED
        | {
            "position_embedding": "learned",
            "max_position_embeddings": 16,
            "activation": "relu",
            "tie_embeddings": True,
        },
    ),
    "bloom": (
        "bloom",
        SMALL
        | BIASED
        | {
            "position_embedding": "alibi",
            "activation": "gelu_tanh",
            "embedding_norm": True,
            "ffn_hidden_size": None,
            "tie_embeddings": True,
        },
    ),
    "glm": ("glm", SMALL | {"qkv_bias": True, "partial_rotary_factor": 0.5, "yarn": {"factor": 4.0}}),
    "glm4": ("glm4", SMALL | {"norm_position": "both", "partial_rotary_factor": 0.5}),
    "gpt_neox": (
        "gpt_neox",
        SMALL | BIASED | {"activation": "gelu", "parallel_block": True, "partial_rotary_factor": 0.25},
    ),
    "gpt_oss": (
        "gpt_oss",
        SMALL
        | {
            "activation": "clamped_swiglu",
            "linear_bias": True,
            "attention_sinks": True,
            "sliding_window": 5,
            "full_attention_layers": [1],
            "moe": {"num_experts": 6, "top_k": 3, "ffn_hidden_size": 24},
        },
    ),
    "baichuan": (
        "baichuan",
        SMALL | {"num_query_groups": None, "position_embedding": "alibi", "num_attention_heads": 6, "hidden_size": 48},
    ),
    "deepseek_v2": (
        "deepseek_v2",
        LATENT
        | {
            "latent_attention": LATENT["latent_attention"] | {"q_rank": None},
            "moe": LATENT["moe"] | {"score": "softmax", "normalize": False, "selection_bias": False},
            "yarn": {"factor": 4.0, "original_max_position_embeddings": 16, "mscale_all_dim": 1.0},
        },
    ),
    "deepseek_v4": (
        "deepseek_v4",
        {key: x for key, x in SMALL.items() if key != "num_query_groups"}
        | {
            "head_dim": 16,
            "partial_rotary_factor": 0.25,
            "sliding_window": 5,
            "activation": "limited_swiglu",
            "hyper_connections": {"streams": 3, "sinkhorn_iterations": 5},
            "moe": {
                "num_experts": 8,
                "top_k": 3,
                "ffn_hidden_size": 24,
                "shared_ffn_hidden_size": 24,
                "score": "sqrtsoftplus",
                "selection_bias": True,
                "scaling_factor": 1.5,
            },
            "layer_kinds": {
                "window": {"mixer": COMPRESSED, "ffn": {"kind": "moe", "routing": "hash"}},
                "sparse": {
                    "mixer": COMPRESSED
                    | {"compress_rate": 2, "top_k": 2, "index_heads": 10, "index_head_dim": 8, "rope_theta": 500.0},
                    "ffn": "moe",
                },
                "heavy": {"mixer": COMPRESSED | {"compress_rate": 4, "rope_theta": 500.0}, "ffn": "moe"},
            },
            "pattern": ["window", "sparse", "heavy"],
        },
    ),
    "deepseek_v32": (
        "deepseek_v32",
        LATENT | {"sparse_attention": {"index_heads": 10, "index_head_dim": 6, "top_k": 4}, "rope_theta": 500.0},
    ),
    "glm_moe_dsa": (
        "glm_moe_dsa",
        LATENT
        | {
            "norm_eps": 1e-5,
            "latent_attention": LATENT["latent_attention"] | {"norm_eps": 1e-6},
            "sparse_attention": {"index_heads": 10, "index_head_dim": 8, "top_k": 4, "index_rope": "neighbors"},
        },
    ),
    "deepseek_v3": ("deepseek_v3", LATENT | {"rope_scaling": SCALING, "rope_theta": 500.0}),
    "glm4_moe": (
        "glm4_moe",
        SMALL
        | {
            "qk_norm": True,
            "partial_rotary_factor": 0.5,
            "moe": GROUPED_EXPERTS | {"normalize": False, "num_groups": 2, "top_groups": 1},
        },
    ),
    "olmo3": (
        "olmo3",
        SMALL
        | {
            "norm_position": "output",
            "qk_norm": "projection",
            "sliding_window": 5,
            "full_attention_layers": [1],
            "rope_theta": 500.0,
            "rope_local_theta": 500.0,
            "yarn": {"factor": 4.0, "original_max_position_embeddings": 16},
        },
    ),
    "smollm3": (
        "smollm3",
        SMALL
        | {
            "layer_kinds": {
                "rotary": {},
                "plain": {"mixer": {"position_embedding": "none"}},
                "local": {"mixer": {"sliding_window": 5, "rope_theta": 10000.0}},
            },
            "pattern": ["rotary", "plain", "local"],
        },
    ),
    "lfm2_moe": (
        "lfm2_moe",
        SMALL
        | {
            "qk_norm": True,
            "moe": {"num_experts": 6, "ffn_hidden_size": 24, "score": "sigmoid", "selection_bias": True},
            "layer_kinds": {
                "short": {"mixer": {"kind": "short_convolution"}, "ffn": {"kind": "mlp"}},
                "full": {"ffn": {"kind": "moe"}},
            },
            "pattern": ["short", "full * 2"],
        },
    ),
    "kimi_linear": (
        "kimi_linear",
        LATENT
        | {
            "norm_eps": 1e-5,
            "position_embedding": "none",
            "latent_attention": LATENT["latent_attention"] | {"norm_eps": 1e-6},
            "moe": {key: x for key, x in GROUPED_EXPERTS.items() if key != "first_dense_layers"},
            "layer_kinds": {
                "linear": {
                    "mixer": {"kind": "kimi_delta_attention", "num_heads": 4, "head_dim": 6},
                    "ffn": {"kind": "mlp"},
                },
                "full": {"ffn": {"kind": "moe"}},
            },
            "pattern": ["linear * 2", "full"],
        },
    ),
    "minimax_m2": (
        "minimax_m2",
        SMALL
        | {
            "qk_norm": "projection",
            "partial_rotary_factor": 0.5,
            "moe": {"num_experts": 6, "top_k": 3, "score": "sigmoid", "selection_bias": True, "ffn_hidden_size": 24},
        },
    ),
    "ernie4_5_moe": (
        "ernie4_5_moe",
        SMALL
        | {
            "layer_kinds": {"dense": {"ffn": {"kind": "mlp"}}, "sparse": {"ffn": {"kind": "moe"}}},
            "pattern": ["dense", "sparse", "dense"],
            "moe": {"num_experts": 6, "selection_bias": True, "ffn_hidden_size": 24, "shared_ffn_hidden_size": 48},
        },
    ),
    "mistral4": (
        "mistral4",
        LATENT
        | {
            "moe": {"num_experts": 8, "top_k": 3, "ffn_hidden_size": 24, "shared_ffn_hidden_size": 48},
            "yarn": {"factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 4.0},
            "query_scaling": {"factor": 0.3, "length": 16},
        },
    ),
    "nanochat": (
        "nanochat",
        SMALL
        | {
            "activation": "squared_relu",
            "norm_weights": False,
            "embedding_norm": True,
            "qk_norm": "rotated",
            "logit_softcap": 15.0,
        },
    ),
    "llama4": (
        "llama4_text",
        SMALL
        | {
            "layer_kinds": {
                "local": {"mixer": {"attention_chunk": 5, "qk_norm": "rotated"}, "ffn": {"kind": "mlp"}},
                "full": {
                    "mixer": {
                        "position_embedding": "none",
                        "query_scaling": {"factor": 0.3, "length": 4, "first_position": 1},
                    },
                    "ffn": {"kind": "moe"},
                },
            },
            "pattern": ["local * 2", "full"],
            "moe": {
                "num_experts": 4,
                "ffn_hidden_size": 24,
                "shared_ffn_hidden_size": 24,
                "score": "sigmoid",
                "normalize": False,
                "scale_inputs": True,
            },
        },
    ),
    "gpt2": (
        "gpt2",
        SMALL
        | {
            "num_query_groups": None,
            "position_embedding": "learned",
            "max_position_embeddings": 16,
            "normalization": "layernorm",
            "activation": "gelu_tanh",
            "linear_bias": True,
            "tie_embeddings": True,
        },
    ),
    "dots1": (
        "dots1",
        SMALL
        | {
            "qk_norm": True,
            "sliding_window": 5,
            "full_attention_layers": [0],
            "moe": GROUPED_EXPERTS | {"num_groups": 1, "top_groups": None},
        },
    ),
    "exaone_moe": ("exaone_moe", SMALL | {"qk_norm": True, **ROTATED_WINDOWS}),
    "glm4_moe_lite": (
        "glm4_moe_lite",
        LATENT | {"norm_eps": 1e-5, "latent_attention": LATENT["latent_attention"] | {"norm_eps": 1e-6}},
    ),
    "youtu": ("youtu", LATENT | {"moe": None}),
    "afmoe": (
        "afmoe",
        SMALL
        | {
            "qk_norm": True,
            "output_gate": True,
            "norm_position": "both",
            "embedding_multiplier": 32**0.5,
            **ROTATED_WINDOWS,
        },
    ),
}
"""The family that each is written as, and our config."""


_SEEDS = {"qwen3-5": 2}
"""Seeds of models in which rounding errors of fp32 grow less than with the default seed; the processor matters, too."""


def make_theirs(name: str, dtype: torch.dtype = torch.float32) -> Any:
    """Return a model of `transformers` in which no weight is trivially zero or one."""
    kind, options = THEIRS[name]
    zero_centered = kind.startswith(("Gemma2", "Gemma3", *LINEAR_KINDS))
    return make_model(kind, options, _SEEDS.get(name, len(name)), 0.0 if zero_centered else 1.0, dtype)


def make_model(
    kind: str, options: dict[str, Any], seed: int, norms: float = 1.0, dtype: torch.dtype = torch.float32
) -> Any:
    """Return a model of `transformers` with random weights.

    Args:
        kind: Name of its classes without ForCausalLM and Config.
        options: Keys of its config.
        seed: Seed of the weights.
        norms: Mean of the weights of norms.
        dtype: Type of the weights.
    """
    import transformers

    torch.manual_seed(seed)
    name = _OTHER_CLASSES.get(kind, f"{kind}ForCausalLM")
    # Some families are configs of another family's class.
    make = getattr(transformers, name, None) or transformers.AutoModelForCausalLM.from_config
    model = make(config_class(kind)(**deepcopy(options)))  # which it changes
    randomize(model, norms)
    if kind == "OPT":
        model.model.decoder.embed_positions.weight.data[:2] = 0.0  # of padding, which ours does not have
    return model.to(dtype).eval()


_OTHER_CLASSES = {"GPT2": "GPT2LMHeadModel", "InternLM3": "LlamaForCausalLM"}
_TEXT_KINDS = ("Gemma3", "Gemma4", "Llama4", "MiniMaxM3VL", "Qwen3_5", "Qwen3_5Moe")


def config_class(kind: str) -> Any:
    """The class of `transformers` that reads config.json."""
    import transformers

    return getattr(transformers, f"{kind}{'TextConfig' if kind in _TEXT_KINDS else 'Config'}")


_STORED = ("e_score_correction_bias", "expert_bias", "layer_scalar")
"""Buffers that are saved with the weights."""


@torch.no_grad()
def randomize(model: Any, norms: float = 1.0) -> None:
    """Random values for all that a model of `transformers` stores. `norms`: the mean of norms' weights."""
    linear = type(model).__name__.startswith(
        (*LINEAR_KINDS, "OlmoHybrid")
    )  # whose rounding in fp32 is several times that of others
    sharp = type(model).__name__.startswith("Gemma4")  # scores are not divided by the root of a head's width
    # Mamba-1 multiplies four projections of its input with each other, so its rounding is several times that of others.
    # A hybrid layer of Zamba2 has three parts in a row.
    selective = type(model).__name__.startswith(("MambaFor", "FalconMamba", "Jamba", "Zamba2"))
    biases = [(key, x) for key, x in model.named_buffers() if key.endswith(_STORED)]
    for key, x in [*model.named_parameters(), *biases]:
        mean = norms if "norm" in key and key.endswith("weight") else 0.0
        mean = 1.0 if "linear_attn.norm" in key or "scal" in key else mean
        mean = 0.3 if "q_norm" in key and sharp else mean
        std = 0.5 if "conv1d" in key and linear else 0.1 if "lm_head" in key and linear else 0.2
        std = 0.1 if selective and re.search(r"(mixer|mamba)\.(in|x|out)_proj|experts|shared_transformer", key) else std
        x.copy_(mean + std * torch.randn(x.shape))
    for key, x in model.named_buffers():
        if key.endswith("tid2eid"):
            x.copy_(torch.rand(len(x), model.config.n_routed_experts).argsort(1)[:, : x.shape[1]])


def tokens() -> Tensor:
    """`[b, s]`."""
    return torch.randint(V, (B, S), generator=torch.Generator().manual_seed(3))


class RandomSource(CheckpointSource):
    """A model of ours with random weights that depend on their names only."""

    def __init__(self, model: ModelSpec, path: Path = Path("random"), dtype: torch.dtype = torch.float32) -> None:
        self.model, self.path, self.dtype = model, path, dtype
        self.about: dict[str, Any] = {}
        self.tokenizer_files: list[Path] = []
        self.tensors = {
            name: TensorInfo(shape, torch.int64 if name.endswith(".table") else dtype)
            for name, shape in model_tensors(model).items()
        }

    @cached_property
    def whole(self) -> dict[str, Tensor]:
        return {name: self.read(name) for name in self.tensors}

    def read(self, name: str) -> Tensor:
        shape = self.tensors[name].shape
        centre = 1.0 if "norm.weight" in name and not self.model.norm.zero_centered else 0.0
        scale = self.model.keys["attention_scale"]
        centre = 0.3 if "q_norm" in name and scale == 1 else 1.0 if "scal" in name else centre
        piece = ParamShard(name, shape, (0,) * len(shape), shape)
        if name.endswith(".table"):  # of experts, all different
            experts = self.model.expert_records[0].num_experts
            scores = torch.rand(shape[0], experts, generator=torch.Generator().manual_seed(7))
            return scores.argsort(1)[:, : shape[1]]
        return (centre + fill_(torch.empty(shape), piece, Init("normal", 0.2), 7)).to(self.dtype)
