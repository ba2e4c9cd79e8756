"""config.json <-> `ModelSpec`: what is read, what is refused and how, and the family a model is written as."""

from __future__ import annotations

import ast
import math
from copy import deepcopy
from typing import Any

import pytest

from docs.site import families as families_page
from megafp8.config import LongRopeConfig, MoeConfig, YarnConfig, load_config, model_spec
from megafp8.conversion.flat import differences, flat_keys
from megafp8.conversion.huggingface.config import FAMILIES, choose, read_config, write_config
from megafp8.conversion.model import is_mtp, model_tensors
from tests.conversion.families import (
    DEEPSEEK,
    DEEPSEEK_V2,
    ERNIE,
    EXPERTS,
    GEMMA,
    GPT2,
    GPT_OSS,
    LATENT,
    LLAMA,
    LLAMA3_ROPE,
    LLAMA4,
    LONGROPE,
    MISTRAL4,
    NEOX,
    OPT,
    OURS,
    SMALL,
    THEIRS,
    TWO_KINDS,
    config_class,
)
from tests.conversion.huggingface.drawn import DRAWN
from tests.marks import slow_but
from tests.quickstart_data import ROOT

L = LLAMA | {"model_type": "llama"}
M, Q2, Q3 = ({**L, "model_type": kind} for kind in ("mistral", "qwen2", "qwen3"))
X = {**L, "model_type": "mixtral", "num_local_experts": 6, "num_experts_per_tok": 2}
E2, E3 = ({**EXPERTS, "model_type": kind} for kind in ("qwen2_moe", "qwen3_moe"))
E1 = {**L, "model_type": "olmoe", "num_experts": 6, "num_experts_per_tok": 2}
D = DEEPSEEK | {"model_type": "deepseek_v3"}
D2 = DEEPSEEK_V2 | {"model_type": "deepseek_v2"}
P3, T, N = (x | {"model_type": kind} for x, kind in ((LLAMA, "phi3"), (OPT, "opt"), (NEOX, "gpt_neox")))
GO = GPT_OSS | {"model_type": "gpt_oss"}
GY = GO | {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}}
BA = {k: v for k, v in L.items() if k not in ("num_key_value_heads", "max_position_embeddings")} | {
    "model_type": "baichuan"
}
M4 = MISTRAL4 | {"model_type": "mistral4"}
L4 = LLAMA4 | {"model_type": "llama4_text"}
G3 = GEMMA | {"model_type": "gemma3_text"}
G = GPT2 | {"model_type": "gpt2"}
ORIGINAL = {key: value for key, value in LLAMA3_ROPE.items() if key != "rope_theta"}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LONG = {"type": "longrope", "short_factor": [1.0, 2.0], "long_factor": [1.5, 3.0]}

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "another family": (
        L | {"model_type": "phi"},
        "model_type = 'phi': .*supported: .*bert, .*deepseek_v2, .*gpt2, .*llama",
    ),
    "a router that samples": (L | {"model_type": "phimoe"}, "model_type = 'phimoe': .*it lacks the sparsemixer router"),
    "another activation of Apertus": (
        L | {"model_type": "apertus", "hidden_act": "relu2", "rope_scaling": ORIGINAL},
        "supported: 'xielu'",
    ),
    "a gate of another kind": (
        EXPERTS | {"model_type": "laguna", "gating": "per-layer"},
        "gating = 'per-layer': .*supported: true, per-head, per-element",
    ),
    "no rope in Apertus": (L | {"model_type": "apertus"}, "rope_scaling = None: .*a dictionary, because releases"),
    "more experts in some layers of Hunyuan": (
        L | {"model_type": "hunyuan_v1_moe", "num_experts": 4, "moe_topk": [2, 3, 2]},
        "the same value in all layers",
    ),
    "two shared experts in Hunyuan": (
        L | {"model_type": "hunyuan_v1_moe", "num_experts": 4, "num_shared_expert": [2] * 3},
        "supported: 1 in all",
    ),
    "pairs of channels that are apart": (D | {"rope_interleave": False}, "rope_interleave = False: .*supported: True"),
    "another epsilon in latents": (
        D | {"rms_norm_eps": 1e-5},
        "rms_norm_eps = 1e-05: .*supported: 1e-06, which transformers always uses for the norms of the latents",
    ),
    "scores scaled without rotated channels": (
        D | {"rope_scaling": YARN | {"mscale_all_dim": 1.0}},
        "rope_scaling.mscale = None: .*a number with mscale_all_dim",
    ),
    "rotated channels scaled alone": (
        D | {"rope_scaling": YARN | {"mscale": 0.7}},
        "mscale = 0.7: .*1 without mscale_",
    ),
    "scores scaled in Llama": (
        L | {"rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}},
        "model.yarn.mscale_all_dim = 1.0: without model.latent_attention",
    ),
    "a given factor of rotated channels": (
        L | {"rope_scaling": YARN | {"attention_factor": 1.2}},
        "rope_scaling.attention_factor = 1.2: .*supported: null",
    ),
    "yarn backwards": (L | {"rope_scaling": YARN | {"beta_fast": 1}}, r"yarn.beta_fast = 1.0: not above beta_slow"),
    "normalized scores in DeepSeek-V2": (D2 | {"norm_topk_prob": True}, "norm_topk_prob = True: .*supported: False"),
    "sigmoid in DeepSeek-V2": (D2 | {"scoring_func": "sigmoid"}, "scoring_func = 'sigmoid': .*supported: 'softmax'"),
    "a choice of groups in DeepSeek-V2": (D2 | {"topk_method": "noaux_tc"}, "supported: greedy, group_limited_greedy"),
    "a rotary width of another name": (D | {"head_dim": 8}, r"head_dim = 8: .*supported: qk_rope_head_dim \(4\)"),
    "an inferred rotary width": (D | {"head_dim": None}, r"head_dim = None: .*supported: qk_rope_head_dim \(4\)"),
    "another width of keys": (D | {"qk_head_dim": 8}, r"qk_nope_head_dim \+ qk_rope_head_dim \(12\)"),
    "grouped queries with latents": (D | {"num_key_value_heads": 2}, r"num_attention_heads \(4\)"),
    "values wider than keys": (D | {"v_head_dim": 13}, r"latent_attention.value_head_dim = 13: wider than keys"),
    "a bias in DeepSeek": (D | {"attention_bias": True}, "attention_bias = True: .*supported: False"),
    "softmax in DeepSeek": (D | {"scoring_func": "softmax"}, "scoring_func = 'softmax': .*supported: 'sigmoid'"),
    "another choice of groups": (D | {"topk_method": "group_limited_greedy"}, "topk_method = .*supported: 'noaux_tc'"),
    "no shared expert in DeepSeek": (D | {"n_shared_experts": 0}, "n_shared_experts = 0: .*supported: 1 or more"),
    "groups of one expert": (D | {"n_group": 8}, r"n_group = 8: .*at least two of the n_routed_experts \(8\)"),
    "more choices than experts in groups": (D | {"num_experts_per_tok": 5}, "top_groups = 2: these groups have 4"),
    "DeepSeek without experts": (D | {"first_k_dense_replace": 3}, "none of the 3 layers has experts"),
    "clipped queries": (E1 | {"clip_qkv": 8.0}, "clip_qkv = 8.0: .*supported: None"),
    "a norm of other channels": (E1 | {"head_dim": 16}, r"head_dim = 16: .*hidden_size / num_attention_heads \(8\)"),
    "no family": (LLAMA, "model_type = None"),
    "a family that needs a missing part": (
        L | {"model_type": "falcon_h1"},
        "model_type = 'falcon_h1': megafp8 has no such model; it lacks Mamba-2 and attention in parallel",
    ),
    "layers of RecurrentGemma": (
        {"model_type": "recurrent_gemma", "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
        | {"vocab_size": 8, "block_types": ["mamba"]},
        "block_types = .*mamba.*supported: a list of recurrent and attention",
    ),
    "bias that is a word": (L | {"mlp_bias": "mlp"}, "mlp_bias = 'mlp'"),
    "bias in Qwen3": (Q3 | {"attention_bias": True}, "attention_bias = True: .*supported: False"),
    "yarn without its original length": (
        Q2 | {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}},
        "rope_parameters has no key original_max_position_embeddings",
    ),
    "dynamic, old name": (L | {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type = 'dynamic'"),
    "scaled rope of windows": (
        G3 | {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
        "no scaling of layers with a window",
    ),
    "another rope of windows": (
        G3 | {"rope_local_base_freq": 5.0, "rope_parameters": {"sliding_attention": {"rope_theta": 7.0}}},
        r"rope_local_base_freq = 5.0: .*the value in rope_parameters \(7.0\)",
    ),
    "a key of llama3": (L | {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "has no key low_freq_factor"),
    "rope by layer": (L | {"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "one rotary embedding"),
    "half a head turned": (L | {"partial_rotary_factor": 0.5}, r"partial_rotary_factor = 0.5: .*supported: 1.0"),
    "relu in Llama": (L | {"hidden_act": "relu"}, "hidden_act = 'relu': .*supported: silu, swish, gelu_pytorch_tanh"),
    "silu in GPT-2": (G | {"activation_function": "silu"}, "activation_function = 'silu': .*supported: gelu_new"),
    "another clamp": (GY | {"swiglu_limit": 5.0}, "swiglu_limit = 5.0: .*supported: 7.0"),
    "gpt-oss without a rope": (GO, "rope_scaling = None: .*releases of transformers differ in its default"),
    "Baichuan 2": (BA | {"model_max_length": 16, "z_loss_weight": 0}, "this is Baichuan 2, whose output layer norm"),
    "two lengths": (BA | {"model_max_length": 16, "max_position_embeddings": 16}, "has max_position_embeddings and mo"),
    "longrope without frequencies": (P3 | {"rope_scaling": {"type": "longrope"}}, "rope_scaling has no key short_fac"),
    "longrope with too few": (
        P3 | {"rope_scaling": LONG, "max_position_embeddings": 8192},
        r"longrope.short_factor = \[1.0, 2.0\]: 2 numbers, but 4 pairs of channels",
    ),
    "longrope with a length that one release reads": (
        Q2 | {"rope_scaling": LONG, "original_max_position_embeddings": 16},
        "rope_scaling has no key original_max_position_embeddings",
    ),
    "longrope without a length": (
        {key: x for key, x in P3.items() if key != "max_position_embeddings"} | {"rope_scaling": LONG},
        "max_position_embeddings = None: .*a number of tokens",
    ),
    "longrope with a factor of scores": (
        P3 | {"rope_scaling": LONG | {"attention_factor": 1.2}},
        "attention_factor = 1.2: .*null, because it follows from the factor",
    ),
    "longrope with another factor": (
        P3 | {"rope_scaling": LONG | {"factor": 3.0}, "max_position_embeddings": 8192},
        r"rope_scaling.factor = 3.0: .*max_position_embeddings / original_max_position_embeddings \(2.0\)",
    ),
    "an original length that transformers does not read": (
        P3 | {"rope_scaling": LONG | {"original_max_position_embeddings": 8}},
        "original_max_position_embeddings = 4096: .*rope_scaling.original_max_position_embeddings",
    ),
    "a scaled rope in Phi-3": (
        P3 | {"rope_scaling": {"type": "linear", "factor": 2.0}},
        "rope_type 'longrope', or nul",
    ),
    "two parts of a head": (
        P3 | {"partial_rotary_factor": 0.5, "rope_parameters": {"partial_rotary_factor": 0.25}},
        r"partial_rotary_factor = 0.25: .*the value of its other copy \(0.5\)",
    ),
    "narrower embeddings": (T | {"word_embed_proj_dim": 16}, r"word_embed_proj_dim = 16: .*hidden_size \(32\)"),
    "norms after the addition": (
        T | {"do_layer_norm_before": False},
        "do_layer_norm_before = False: .*supported: True",
    ),
    "biases of MLPs alone": (N | {"attention_bias": False}, "attention_bias = False: .*supported: True"),
    "the usual name of a base": (N | {"rope_theta": 5.0}, "rope_theta = 5.0: .*does not know this key of gpt_neox"),
    "unscaled attention": (G | {"scale_attn_weights": False}, "scale_attn_weights = False: .*supported: True"),
    "scaled by layer": (G | {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx = True"),
    "mixed layers": (
        M | {"layer_types": ["full_attention", "sliding_attention", "full_attention"]},
        r"layer_types = \['full_attention', 'sliding_attention'\]: .*sliding_attention for all layers, because the win",
    ),
    "layers of another kind": (
        Q3 | {"layer_types": ["chunked_attention"] * 3},
        "layer_types = .*full_attention and sl",
    ),
    "half a layer": (
        Q2 | {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1.5},
        "max_window_layers = 1.5: .*a number of layers",
    ),
    "quantized": (L | {"quantization_config": {"quant_method": "gptq"}}, "quantization_config = 'gptq'"),
    "not causal": (L | {"is_causal": False}, "is_causal = False: .*supported: True"),
    "null is not causal": (G | {"is_causal": None}, "is_causal = None"),
    "an encoder": (L | {"is_encoder_decoder": True}, "is_encoder_decoder = True"),
    "cross attention": (G | {"add_cross_attention": True}, "add_cross_attention = True"),
    "cross attention in Llama": (L | {"add_cross_attention": True}, "add_cross_attention = True"),
    "pruned heads": (G | {"pruned_heads": {"0": [1]}}, "pruned_heads = "),
    "layers of their own": (L | {"per_layer_config": {"0": {"num_key_value_heads": 1}}}, "per_layer_config = "),
    "code in the folder": (L | {"auto_map": {"AutoModelForCausalLM": "modeling.Mine"}}, "auto_map = "),
    "a classifier": (
        L | {"architectures": ["LlamaForSequenceClassification"]},
        r"architectures = \['LlamaForSequenceClassification'\]: .*supported: \['LlamaForCausalLM'\]",
    ),
    "logits with a scale": (
        L | {"logit_scale": 0.5, "final_logit_softcapping": 30.0},
        r"final_logit_softcapping = 30.0, logit_scale = 0.5: megafp8 does not know these keys of llama models",
    ),
    "another scale of attention": (
        Q3 | {"attention_multiplier": 0.1},
        "attention_multiplier = 0.1: .*this key of qwen3",
    ),
    "an unknown key that is null": (L | {"new": None}, "new = None: .*if not, remove new"),
    "a key of another family": (G | {"rope_theta": 500.0}, "rope_theta = 500.0: .*does not know this key of gpt2"),
    "a window in Llama": (L | {"sliding_window": 8}, "sliding_window = 8: .*supported: None"),
    "windows in Llama's layers": (
        L | {"layer_types": ["sliding_attention"] * 3},
        r"layer_types = \['sliding_attention'\]",
    ),
    "too few layer types": (Q2 | {"layer_types": ["full_attention"]}, r"layer_types = .*num_hidden_layers \(3\)"),
    "windows without a size": (
        Q2 | {"layer_types": ["sliding_attention"] * 3},
        r"layer_types = \['sliding_.*supported: full_",
    ),
    "a bias in Mistral": (M | {"attention_bias": True}, "attention_bias = True"),
    "a bias that is no flag": (L | {"attention_bias": "false", "mlp_bias": "false"}, "attention_bias = 'false'"),
    "interleaved": (L | {"rope_interleaved": True}, "rope_interleaved = True"),
    "positions in three dims": (Q2 | {"use_mrope": True}, "use_mrope = True"),
    "hidden size of another name": (G | {"hidden_size": 64}, r"hidden_size = 64: .*value of n_embd \(32\)"),
    "heads do not divide": (
        L | {"num_attention_heads": 6, "head_dim": 6, "num_key_value_heads": 6},
        "hidden_size = 32",
    ),
    "groups do not divide": (M | {"num_key_value_heads": 3}, r"num_query_groups = 3"),
    "an odd head": (M | {"head_dim": 7}, r"head_dim = 7: rotary embeddings rotate pairs"),
    "null for a size": (L | {"vocab_size": None}, "vocab_size = None"),
    "another original length": (
        L | {"rope_scaling": ORIGINAL, "original_max_position_embeddings": 16},
        r"original_max_position_embeddings = 16: .*rope_scaling.original_max_position_embeddings \(8\)",
    ),
    "another theta": (
        L | {"rope_theta": 5.0, "rope_parameters": {"rope_type": "default", "rope_theta": 7.0}},
        r"rope_theta = 5.0: .*rope_parameters.rope_theta \(7.0\)",
    ),
    "another type": (L | {"rope_scaling": {**ORIGINAL, "type": "linear"}}, "rope_scaling.type = 'linear'"),
    "two rope dictionaries": (
        L | {"rope_scaling": ORIGINAL, "rope_parameters": {"rope_type": "default"}},
        "rope_parameters = .*the same as rope_scaling",
    ),
    "a foreign key of rope": (
        L | {"rope_scaling": {"rope_type": "default", "factor": 2.0}},
        "rope_scaling.factor = 2.0",
    ),
    "no experts": (X | {"num_local_experts": 0}, r"moe.num_experts Input should be greater than 0"),
    "no number of experts": ({**L, "model_type": "mixtral", "num_experts_per_tok": 2}, "has no key num_local_experts"),
    "two numbers of experts": (E3 | {"num_local_experts": 4}, r"num_local_experts = 4: .*value of num_experts \(6\)"),
    "a name that transformers ignores": (E2 | {"num_local_experts": 6}, "num_local_experts = 6: .*not know this key"),
    "more choices than experts": (X | {"num_experts_per_tok": 7}, r"model.moe.top_k = 7: .*num_experts is 6"),
    "layers without experts in between": (
        E3 | {"mlp_only_layers": [1]},
        r"mlp_only_layers = \[1\]: .*the first layers of the model, or none",
    ),
    "experts in no layer": (E2 | {"mlp_only_layers": [0, 1, 2]}, "none of the 3 layers has experts"),
    "experts in every half layer": (E2 | {"decoder_sparse_step": 0.5}, "decoder_sparse_step = 0.5"),
    "windows and experts": (E3 | {"use_sliding_window": True}, "use_sliding_window = True: .*false in models with exp"),
    "a bias in Qwen3-MoE": (E3 | {"attention_bias": True}, "attention_bias = True: .*supported: False"),
    "windows of some layers with experts": (
        E2 | {"layer_types": ["full_attention", "sliding_attention", "full_attention"]},
        "layer_types = .*full_attention for all layers",
    ),
    "another rope in Mistral 4": (
        M4 | {"rope_parameters": {"rope_type": "default", "rope_theta": 5.0}},
        "rope_parameters = .*in this family a dictionary with rope_type 'yarn'",
    ),
    "Mistral 4 without a scale of queries": (
        M4 | {"rope_parameters": {k: x for k, x in M4["rope_parameters"].items() if k != "llama_4_scaling_beta"}},
        "rope_parameters.llama_4_scaling_beta = None: .*by which queries are scaled",
    ),
    "mscale of Ministral 3": (
        L | {"model_type": "ministral3", "rope_parameters": M4["rope_parameters"] | {"mscale": 0.5}},
        "mscale = 0.5: .*mscale_all_dim",
    ),
    "a part of a head in Ministral 3": (
        L | {"model_type": "ministral3", "rope_parameters": M4["rope_parameters"] | {"partial_rotary_factor": 0.5}},
        "partial_rotary_factor = 0.5: .*1.0, the rotated part of a head",
    ),
    "biases of Seed-OSS": (
        L | {"model_type": "seed_oss", "attention_out_bias": True},
        "attention_out_bias = True: .*the value of mlp_bias",
    ),
    "windows of EXAONE 4 in letters": (
        L | {"model_type": "exaone4", "sliding_window_pattern": "LLG"},
        "sliding_window_pattern = 'LLG': .*or layer_types",
    ),
    "alpha without a width in Hunyuan": (
        L | {"model_type": "hunyuan_v1_dense", "rope_scaling": {"type": "dynamic", "alpha": 9.0, "factor": 1.0}},
        "head_dim = None: .*rope_scaling.alpha needs",
    ),
    "no alpha in Hunyuan": (
        L | {"model_type": "hunyuan_v1_dense", "rope_scaling": {"type": "dynamic", "factor": 2.0}},
        "rope_type = 'dynamic': .*dynamic equals default for up to max_position_embeddings tokens",
    ),
    "no norms in Hunyuan": (L | {"model_type": "hunyuan_v1_dense", "use_qk_norm": False}, "use_qk_norm = False"),
    "bases of Granite's layers": (
        L | {"model_type": "granite_swa", "layer_rope_theta": [500.0, 0]},
        r"layer_rope_theta = \[500.0, 0\]: .*num_hidden_layers \(3\)",
    ),
    "groups of Mistral 4": (M4 | {"n_group": 2}, "n_group = 2: .*supported: 1"),
    "bases of OLMo 3's windows": (
        L | {"model_type": "olmo3", "rope_theta": 1e4},
        "rope_theta = 10000.0: .*500000, or rope_parameters.sliding_attention",
    ),
    "another factor of rotated channels in OLMo 3": (
        L | {"model_type": "olmo3", "rope_scaling": YARN | {"attention_factor": 1.2}},
        r"attention_factor = 1.2: .*null or 1.138",
    ),
    "chunks without a size": (
        L4 | {"attention_chunk_size": None, "layer_types": ["chunked_attention"] * 3},
        "attention_chunk_size = None: .*because layer_types has chunked_attention",
    ),
    "windows in Llama 4": (
        L4 | {"layer_types": ["sliding_attention"] * 3},
        "layer_types = .*full_attention and chunked_attention",
    ),
    "too few layers without positions": (
        L | {"model_type": "smollm3", "no_rope_layers": [1, 0]},
        r"no_rope_layers = \[1, 0\]: .*num_hidden_layers \(3\)",
    ),
    "a bias in nanochat": (L | {"model_type": "nanochat", "attention_bias": True}, "attention_bias = True"),
    "a bias in ERNIE": (ERNIE | {"model_type": "ernie4_5_moe", "use_bias": True}, "use_bias = True: .*False"),
    "another rotary width of MiniMax": (
        L | {"model_type": "minimax_m2", "rotary_dim": 32, "partial_rotary_factor": 0.5},
        r"rotary_dim = 32: .*partial_rotary_factor × head_dim \(64\)",
    ),
    "no hidden size": ({k: v for k, v in L.items() if k != "hidden_size"}, "has no key hidden_size"),
    "no number": (L | {"hidden_size": "wide"}, "hidden_size"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_unsupported_configs_are_refused(case: str) -> None:
    config, expected = REFUSED[case]
    with pytest.raises(ValueError, match=expected) as caught:
        read_config(config)
    assert "\n" not in str(caught.value)


ACCEPTED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "defaults of Llama 1": ({k: v for k, v in L.items() if k != "num_key_value_heads"}, {"num_query_groups": 4}),
    "Mistral's window by default": (M, {"sliding_window": 4096}),
    "Mistral without one": (M | {"sliding_window": None}, {"sliding_window": None}),
    "Qwen2's is off": (Q2 | {"sliding_window": 8, "max_window_layers": 1}, {"sliding_window": None, "qkv_bias": True}),
    "Qwen2's is in no layer": (
        Q2 | {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 28},
        {"sliding_window": None},
    ),
    "Qwen3's head": (Q3, {"head_dim": 128, "qk_norm": True}),
    "GPT-2's defaults": (
        G | {"attn_pdrop": 0.2},
        {"ffn_hidden_size": 128, "activation": "gelu_tanh", "tie_embeddings": True}
        | {"hidden_dropout": 0.1, "attention_dropout": 0.2},
    ),
    "copies that agree": (
        L
        | {
            "rope_theta": 500.0,
            "rope_scaling": {"type": "llama3", **ORIGINAL},
            "rope_parameters": LLAMA3_ROPE,
            "original_max_position_embeddings": 8,
        },
        {"rope_theta": 500.0},
    ),
    "windows of some layers": (
        Q3
        | {
            "use_sliding_window": True,
            "sliding_window": 8,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        },
        {"sliding_window": 8, "full_attention_layers": [0, 2]},
    ),
    "windows of the last layers": (
        Q2 | {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
        {"sliding_window": 8, "full_attention_layers": [0]},
    ),
    "windows by layer": (
        Q2 | {"use_sliding_window": True, "sliding_window": 8, "layer_types": ["sliding_attention"] * 3},
        {"sliding_window": 8},
    ),
    "what does not matter": (
        Q2 | {"use_mrope": False, "is_causal": True, "pretraining_tp": 2, "temperature": 0.7, "torch_dtype": "float16"},
        {"qkv_bias": True},
    ),
    "GPT-2 as OpenAI's is": (
        G
        | {
            "n_ctx": 16,
            "summary_type": "cls_index",
            "task_specific_params": {"text-generation": {}},
            "reorder_and_upcast_attn": True,
            "hidden_size": 32,
            "architectures": ["GPT2LMHeadModel"],
        },
        {"hidden_size": 32},
    ),
    "Mixtral's defaults": (X | {"router_jitter_noise": 0.1}, {"rope_theta": 1e6, "sliding_window": None}),
    "experts are counted under either name": (
        {**L, "model_type": "qwen3_moe", "moe_intermediate_size": 24, "num_experts_per_tok": 2, "num_local_experts": 5},
        {"moe": MoeConfig(num_experts=5, ffn_hidden_size=24, normalize=False).model_dump()},
    ),
    "a dense layer that decoder_sparse_step leaves out too": (
        E2 | {"decoder_sparse_step": 2, "mlp_only_layers": [2], "router_aux_loss_coef": 0.1},
        {
            "moe": MoeConfig(
                num_experts=6,
                ffn_hidden_size=24,
                shared_ffn_hidden_size=5632,
                shared_gate=True,
                layer_interval=2,
                normalize=False,
            ).model_dump(),
        },
    ),
    "yarn as in DeepSeek-V3": (
        D
        | {
            "rope_scaling": {
                "type": "yarn",
                "factor": 40,
                "original_max_position_embeddings": 4096,
                "beta_fast": 32,
                "beta_slow": 1,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
            },
            "q_lora_rank": None,
        },
        {"yarn": YarnConfig(factor=40, mscale_all_dim=1), "rope_scaling": None},
    ),
    "yarn with defaults": (
        Q3 | {"rope_scaling": YARN | {"beta_fast": None, "attention_factor": None}},
        {"yarn": YarnConfig(factor=4, original_max_position_embeddings=16)},
    ),
    "DeepSeek-V2 chooses from all groups": (D2 | {"topk_method": "greedy", "n_group": 3}, {"num_query_groups": 4}),
    "DeepSeek's other keys": (
        D | {"ep_size": 1, "aux_loss_alpha": 0.001, "seq_aux": True, "scoring_func": "sigmoid", "moe_layer_freq": 1},
        {"head_dim": 12, "latent_attention.rope_head_dim": 4, "latent_attention.value_head_dim": 6, "norm_eps": 1e-6},
    ),
    "Gemma 3's windows and bases, version 4": (
        G3
        | {
            "sliding_window_pattern": 2,
            "rope_theta": 500.0,
            "rope_local_base_freq": 5.0,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        },
        {"full_attention_layers": [1], "rope_theta": 500.0, "rope_local_theta": 5.0, "rope_interpolation_factor": 8.0},
    ),
    "Phi-4-mini, with what its own code reads": (
        P3
        | LONGROPE
        | {"max_position_embeddings": 131072, "original_max_position_embeddings": 4096, "sliding_window": 262144}
        | {"full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": False, "mlp_bias": False},
        {"longrope": LongRopeConfig(short_factor=[1, 1.25, 2], long_factor=[1.5, 3, 6], factor=32), "yarn": None},
    ),
    "su, the first name of longrope": (
        P3 | LONGROPE | {"rope_scaling": LONGROPE["rope_scaling"] | {"type": "su"}, "max_position_embeddings": 8192},
        {"longrope": LongRopeConfig(short_factor=[1, 1.25, 2], long_factor=[1.5, 3, 6], factor=2)},
    ),
    "YaRN's factor of rotated channels as it is": (
        Q2 | {"rope_scaling": YARN | {"attention_factor": 0.1 * math.log(4) + 1}},
        {"yarn": YarnConfig(factor=4, original_max_position_embeddings=16)},
    ),
    "OLMo 3, version 4: YaRN without windows": (
        L | {"model_type": "olmo3", "rope_theta": 5e5, "sliding_window": 8, "rope_scaling": YARN},
        {"sliding_window": 8, "full_attention_layers": [], "pattern": [], "yarn": None},
    ),
    "OLMo 3 with windows in three of four layers": (
        L | {"model_type": "olmo3", "num_hidden_layers": 8, "rope_scaling": YARN},
        {"sliding_window": 4096, "full_attention_layers": [3, 7], "pattern": [], "rope_local_theta": 5e5}
        | {"yarn": YarnConfig(factor=4, original_max_position_embeddings=16)},
    ),
    "SmolLM3's layers without positions": (
        L | {"model_type": "smollm3", "num_hidden_layers": 8},
        {"pattern": ["rope * 3", "no-position_embedding"], "rope_theta": 2e6},
    ),
    "MiniMax's width of rotated channels": (
        L | {"model_type": "minimax_m2", "rotary_dim": 64, "num_local_experts": 4, "num_experts_per_tok": 2},
        {"partial_rotary_factor": 0.5, "head_dim": 128},
    ),
    "ERNIE's layers with experts": (
        L | {"model_type": "ernie4_5_moe", "num_hidden_layers": 6, "moe_layer_interval": 2, "moe_layer_end_index": 3},
        {"pattern": ["mlp", "moe", "mlp", "moe", "mlp"]},
    ),
    "theta, version 4": (L | {"rope_theta": 5e5}, {"rope_theta": 5e5}),
    "theta, version 5": (L | {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, {"rope_theta": 5e5}),
}


@pytest.mark.parametrize("case", ACCEPTED)
def test_supported_configs(case: str) -> None:
    config, expected = ACCEPTED[case]
    _, model = read_config(config)
    keys = flat_keys(model) | {"moe": model.keys["moe"]}
    assert {key: keys[key] for key in expected} == expected


@pytest.mark.parametrize("name", OURS)
def test_our_models_round_trip_through_their_family(name: str) -> None:
    family, options = OURS[name]
    model = model_spec(options)
    chosen = choose(model)
    assert chosen.model_type == family
    assert differences(read_config(write_config(chosen, model))[1], model) == []


@pytest.mark.parametrize("name", [name for name, (_, options) in OURS.items() if options.get("moe")])
def test_experts_are_written_with_the_aux_loss_that_they_trained_with(name: str) -> None:
    """Where transformers has a weight of such a loss for a family, the default of its class does not take its place."""
    from transformers import CONFIG_MAPPING

    options = OURS[name][1]
    for weight in (0.0, 0.03):
        model = model_spec(options | {"moe": options["moe"] | {"aux_loss": weight}})
        written = write_config(choose(model), model)
        kind = written["model_type"]
        theirs = CONFIG_MAPPING[kind](**written).to_dict() if kind in CONFIG_MAPPING else written
        assert theirs.get("router_aux_loss_coef", weight) == weight


@pytest.mark.parametrize("name", THEIRS)
def test_transformers_reads_our_config_as_its_own(name: str) -> None:
    kind, options = THEIRS[name]
    theirs = config_class(kind)(**deepcopy(options)).to_dict()
    family, model = read_config(theirs)
    ours = config_class(kind)(**write_config(family, model)).to_dict()
    ignored = {"architectures", "bos_token_id", "eos_token_id", "pad_token_id", "max_window_layers"}
    ignored.add("router_aux_loss_coef")  # of another loss, so not taken over
    resolved = {"n_inner": 128}  # GPT-2's default in words
    compared = theirs.keys() - ignored
    assert {key: ours[key] for key in compared} == {
        key: resolved[key] if key in resolved else theirs[key] for key in compared
    }
    assert differences(read_config(ours)[1], model) == []


def test_the_activation_of_experts_is_a_difference_where_no_layer_has_an_mlp() -> None:
    kinds = {"a": {"mixer": {"kind": "short_convolution"}, "ffn": "moe"}, "b": {"ffn": "moe"}}
    one, other = (
        model_spec({
            "num_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "vocab_size": 29, "layer_kinds": kinds,
            "pattern": ["a", "b"], "moe": {"num_experts": 4}, "activation": activation,
        })
        for activation in ("swiglu", "geglu")
    )  # fmt: skip
    assert differences(one, other) == ["activation"]


def _experts(**options: Any) -> dict[str, Any]:
    return {"moe": {"num_experts": 4, **options}}


def _deepseek(**options: Any) -> dict[str, Any]:
    return LATENT | {"moe": LATENT["moe"] | options}


PUBLISHED: dict[str, tuple[int, dict[str, Any]]] = {
    "mixtral-8x7b": (
        46_702_792_704,
        {
            "architectures": ["MixtralForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2,
            "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336,
            "max_position_embeddings": 32768, "model_type": "mixtral", "num_attention_heads": 32,
            "num_experts_per_tok": 2, "num_hidden_layers": 32, "num_key_value_heads": 8, "num_local_experts": 8,
            "output_router_logits": False, "rms_norm_eps": 1e-05, "rope_theta": 1000000.0,
            "router_aux_loss_coef": 0.02, "sliding_window": None, "tie_word_embeddings": False,
            "torch_dtype": "bfloat16", "transformers_version": "4.36.0.dev0", "use_cache": True, "vocab_size": 32000,
        },
    ),
    "qwen3-30b-a3b": (
        30_532_122_624,
        {
            "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
            "bos_token_id": 151643, "decoder_sparse_step": 1, "eos_token_id": 151645, "head_dim": 128,
            "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 6144,
            "max_position_embeddings": 40960, "max_window_layers": 48, "mlp_only_layers": [],
            "model_type": "qwen3_moe", "moe_intermediate_size": 768, "norm_topk_prob": True,
            "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48,
            "num_key_value_heads": 4, "output_router_logits": False, "rms_norm_eps": 1e-06, "rope_scaling": None,
            "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001, "sliding_window": None,
            "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.51.0",
            "use_cache": True, "use_sliding_window": False, "vocab_size": 151936,
        },
    ),
    "olmo2-7b": (
        7_298_617_344,
        {
            "architectures": ["Olmo2ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
            "eos_token_id": 100257, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
            "intermediate_size": 11008, "max_position_embeddings": 4096, "model_type": "olmo2",
            "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32, "pad_token_id": 100277,
            "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 500000, "tie_word_embeddings": False,
            "torch_dtype": "float32", "transformers_version": "4.47.0", "use_cache": True, "vocab_size": 100352,
        },
    ),
    "gemma2-9b": (
        9_241_705_984,
        {
            "architectures": ["Gemma2ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
            "attn_logit_softcapping": 50.0, "bos_token_id": 2, "cache_implementation": "hybrid", "eos_token_id": 1,
            "final_logit_softcapping": 30.0, "head_dim": 256, "hidden_act": "gelu_pytorch_tanh",
            "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 3584, "initializer_range": 0.02,
            "intermediate_size": 14336, "max_position_embeddings": 8192, "model_type": "gemma2",
            "num_attention_heads": 16, "num_hidden_layers": 42, "num_key_value_heads": 8, "pad_token_id": 0,
            "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06, "rope_theta": 10000.0, "sliding_window": 4096,
            "sliding_window_size": 4096, "torch_dtype": "float32", "transformers_version": "4.42.0.dev0",
            "use_cache": True, "vocab_size": 256000,
        },
    ),
    # The hub's also has quantization_config (MXFP4).
    "gpt-oss-20b": (
        20_914_757_184,
        {
            "architectures": ["GptOssForCausalLM"], "attention_bias": True, "attention_dropout": 0.0,
            "eos_token_id": 200002, "experts_per_token": 4, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2880,
            "initial_context_length": 4096, "initializer_range": 0.02, "intermediate_size": 2880,
            "layer_types": ["sliding_attention", "full_attention"] * 12, "max_position_embeddings": 131072,
            "model_type": "gpt_oss", "num_attention_heads": 64, "num_experts_per_tok": 4, "num_hidden_layers": 24,
            "num_key_value_heads": 8, "num_local_experts": 32, "output_router_logits": False, "pad_token_id": 199999,
            "rms_norm_eps": 1e-05, "rope_theta": 150000, "router_aux_loss_coef": 0.9, "sliding_window": 128,
            "rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "rope_type": "yarn",
                             "original_max_position_embeddings": 4096, "truncate": False},
            "swiglu_limit": 7.0, "tie_word_embeddings": False, "transformers_version": "4.55.0.dev0",
            "use_cache": True, "vocab_size": 201088,
        },
    ),
    # The hub's also has auto_map and quantization_config (FP8), which are refused. 14,848 of the parameters are biases
    # of routers; those of multi-token prediction (14e9 on the hub with its copies of the embedding and the output
    # layer) are not counted.
    "deepseek-v3": (
        671_026_419_200,
        {
            "architectures": ["DeepseekV3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
            "bos_token_id": 0, "eos_token_id": 1, "ep_size": 1, "first_k_dense_replace": 3, "hidden_act": "silu",
            "hidden_size": 7168, "initializer_range": 0.02, "intermediate_size": 18432, "kv_lora_rank": 512,
            "max_position_embeddings": 163840, "model_type": "deepseek_v3", "moe_intermediate_size": 2048,
            "moe_layer_freq": 1, "n_group": 8, "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": True,
            "num_attention_heads": 128, "num_experts_per_tok": 8, "num_hidden_layers": 61, "num_key_value_heads": 128,
            "num_nextn_predict_layers": 1, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
            "rms_norm_eps": 1e-06, "rope_theta": 10000, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid",
            "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
                             "original_max_position_embeddings": 4096, "type": "yarn"},
            "tie_word_embeddings": False, "topk_group": 4, "topk_method": "noaux_tc", "torch_dtype": "bfloat16",
            "transformers_version": "4.33.1", "use_cache": True, "v_head_dim": 128, "vocab_size": 129280,
        },
    ),
    "nemotron-3-nano-30b": (
        31_577_940_288,
        {
            "architectures": ["NemotronHForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
            "bos_token_id": 1, "chunk_size": 128, "conv_kernel": 4, "eos_token_id": 2, "expand": 2, "head_dim": 128,
            "hidden_dropout": 0.0, "hidden_size": 2688, "initializer_range": 0.02, "intermediate_size": 1856,
            "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
            "layer_norm_epsilon": 1e-05, "mamba_head_dim": 64, "mamba_hidden_act": "silu", "mamba_num_heads": 64,
            "mamba_proj_bias": False, "max_position_embeddings": 262144, "mlp_bias": False, "mlp_hidden_act": "relu2",
            "model_type": "nemotron_h", "moe_intermediate_size": 1856, "moe_shared_expert_intermediate_size": 3712,
            "n_group": 1, "n_groups": 8, "n_routed_experts": 128, "n_shared_experts": 1, "norm_topk_prob": True,
            "num_attention_heads": 32, "num_experts_per_tok": 6, "num_hidden_layers": 52, "num_key_value_heads": 2,
            "num_logits_to_keep": 1, "pad_token_id": 0, "rescale_prenorm_residual": True, "residual_in_fp32": False,
            "routed_scaling_factor": 2.5, "sliding_window": None, "ssm_state_size": 128, "tie_word_embeddings": False,
            "time_step_floor": 0.0001, "time_step_limit": [0.0, {"__float__": "Infinity"}], "time_step_max": 0.1,
            "time_step_min": 0.001, "topk_group": 1, "torch_dtype": "bfloat16", "use_bias": False, "use_cache": True,
            "use_conv_bias": True, "use_mamba_kernels": True, "vocab_size": 131072,
        },
    ),
}  # fmt: skip
PUBLISHED["deepseek-v3.2"] = (
    PUBLISHED["deepseek-v3"][0] + 61 * (1536 * 64 * 128 + 7168 * (128 + 64) + 2 * 128),
    PUBLISHED["deepseek-v3"][1]
    | {"architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32"}
    | {"index_head_dim": 128, "index_n_heads": 64, "index_topk": 2048},
)
"""Parameters and config.json on the hub of models that have a config here."""


@pytest.mark.parametrize(
    "name", slow_but(PUBLISHED, *(name for name in PUBLISHED if not name.startswith("deepseek-v3")))
)
def test_configs_are_the_published_models(name: str) -> None:
    parameters, config = PUBLISHED[name]
    model = load_config(ROOT / "configs" / f"{name}.yaml").spec
    # By a training on longer contexts, after this one.
    extended = ["yarn"] if config.get("rope_scaling") and flat_keys(model)["yarn"] is None else []
    assert differences(read_config(config)[1], model) == extended
    of_names = {name: math.prod(shape) for name, shape in model_tensors(model).items()}
    ahead = sum(count for name, count in of_names.items() if is_mtp(model, name))
    assert sum(of_names.values()) - ahead == parameters
    copies = 2 * model.stem.known_vocab_size * model.hidden_size
    assert model.num_prediction_layers == config.get("num_nextn_predict_layers", 0)
    assert not ahead or ahead + copies == pytest.approx(14e9, rel=0.05)


@pytest.mark.parametrize("scaled", slow_but([False, True], True))
def test_older_keys_of_deepseek_v4_are_read_as_transformers_reads_them(scaled: bool) -> None:
    """Kinds of layers as numbers, and one rotary embedding, which is that of layers with entries."""
    from transformers import DeepseekV4Config

    yarn = {"type": "yarn", "factor": 16, "original_max_position_embeddings": 65536, "beta_fast": 32, "beta_slow": 1}
    older: dict[str, Any] = {
        "architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4", "vocab_size": 129280,
        "hidden_size": 4096, "num_hidden_layers": 43, "num_attention_heads": 64, "head_dim": 512,
        "moe_intermediate_size": 2048, "n_routed_experts": 256, "num_hash_layers": 3, "qk_rope_head_dim": 64,
        "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0], "rope_theta": 10000, "compress_rope_theta": 160000,
        **({"rope_scaling": yarn} if scaled else {}),
    }  # fmt: skip
    model = read_config(older)[1]
    keys = {key: value for key, value in older.items() if key not in ("architectures", "model_type")}
    theirs = DeepseekV4Config(**keys).to_dict() | {"architectures": ["DeepseekV4ForCausalLM"]}
    assert differences(read_config(theirs)[1], model) == []
    ours = load_config(ROOT / "configs/deepseek-v4-flash.yaml").spec
    assert differences(model, ours) == (["yarn", "layer_kinds", "pattern"] if scaled else [])
    assert round(sum(map(math.prod, model_tensors(model).values())) / 1e9) == 284


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"parallel_block": True}, r"nearest, llama, lacks model.parallel_block = True \(there False\)"),
        ({"position_embedding": "none", "qk_norm": True}, "nearest, qwen3, lacks model.position_embedding = 'none'"),
        ({"qkv_bias": True, "qk_norm": True}, "nearest, qwen2, lacks model.qk_norm = True"),
        ({"normalization": "layernorm_no_bias"}, "nearest, llama, lacks model.normalization = 'layernorm_no_bias'"),
        ({"parallel_block": "shared_norm"}, "nearest, llama, lacks model.parallel_block = 'shared_norm'"),
        ({"linear_bias": "mlp", "qkv_bias": True}, "nearest, llama, lacks model.qkv_bias = True"),
        (OURS["glm4_moe"][1] | {"qk_norm": "projection"}, r"nearest, \w+, lacks model.*qk_norm = 'projection'"),
        ({"output_bias": True}, r"nearest, llama, lacks model.output_bias = True \(there False\)"),
        (_experts(score="sigmoid"), r"nearest, mixtral, lacks model.moe.score = 'sigmoid' \(there 'softmax'\)$"),
        (_experts(selection_bias=True) | {"qk_norm": True}, r"nearest, ernie4_5_moe, lacks model.qk_norm = True"),
        (_experts(zero_experts=2), r"nearest, mixtral, lacks model.moe.zero_experts = 2 \(there None\)$"),
        (_experts(scaling_factor=2.5), r"lacks model.moe.scaling_factor = 2.5 \(there 1.0\)$"),
        (_experts(num_groups=2, top_groups=1), r"lacks model.moe.num_groups = 2 \(there 1\), model.moe.top_groups = 1"),
        (_experts() | {"position_embedding": "none"}, r"nearest, mixtral, lacks model.position_embedding = 'none'"),
        (_experts(first_dense_layers=1), r"nearest, mixtral, lacks model.moe.first_dense_layers = 1 \(there 0\)$"),
        (_experts(normalize=False), r"nearest, mixtral, lacks model.moe.normalize = False \(there True\)$"),
        (_deepseek(score="softmax"), r"nearest, deepseek_v3, lacks model.moe.score = 'softmax' \(there 'sigmoid'\)$"),
        (_deepseek(selection_bias=False), r"lacks model.moe.selection_bias = False \(there True\)$"),
        (_deepseek(shared_gate=True), r"lacks model.moe.shared_gate = True \(there False\)$"),
        (_deepseek(shared_ffn_hidden_size=40), r"lacks model.moe.shared_ffn_hidden_size = 40 \(there 24\)$"),
        (_deepseek(shared_ffn_hidden_size=None), r"lacks model.moe.shared_ffn_hidden_size = None \(there 24\)$"),
        (_deepseek(num_groups=8, top_groups=4), "lacks n_group = 8: .*groups of at least two"),
        (LATENT | {"norm_eps": 1e-5}, r"nearest, deepseek_v3, lacks model.norm_eps = 1e-05 \(there 1e-06\)$"),
        (LATENT | {"sliding_window": 5}, r"nearest, deepseek_v3, lacks model.sliding_window = 5 \(there None\)$"),
        (LATENT | {"moe": None, "norm_position": "both"}, "nearest, youtu, lacks model.norm_position = 'both'"),
        (
            LATENT | {"moe": None, "sparse_attention": {"index_heads": 4, "index_head_dim": 8, "top_k": 4}},
            r"^no Hugging Face family has this model: .*latent attention .* selected tokens .* without experts",
        ),
        (LATENT | {"qk_norm": True}, "^model.qk_norm = True: model.latent_attention is set, and it normalizes"),
        (_experts() | TWO_KINDS, "^no Hugging Face family has this model: layers have two kinds of experts"),
        (_experts(top_k=5), r"^model.moe.top_k = 5: .*num_experts is 4"),
    ],
)
def test_a_model_of_no_family_is_refused(options: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        choose(model_spec(SMALL | options))


def test_every_family_is_tested() -> None:
    """Encoders are tested in test_encoders. A model of qwen3_5_moe_text is one of qwen3_next, which is written."""
    tested = {family for family, _ in OURS.values()} | {*DRAWN}
    assert tested | {"qwen3_5_moe_text"} == {name for name, x in FAMILIES.items() if x.kind == "gpt"}


def test_every_family_is_documented() -> None:
    page = families_page.PAGE.read_text()
    assert families_page.page_with_families(page) == page, "run python docs/site/families.py"
    for name, family in FAMILIES.items():
        assert family.about, name
        text = families_page.file_of(name).read_text()
        described = [x for x in ast.walk(ast.parse(text)) if isinstance(x, ast.keyword) and x.arg == "about"]
        descriptions = sum((x.end_lineno or 0) - x.lineno + 2 for x in described)  # each with the closing parenthesis
        assert len(text.splitlines()) - descriptions <= 150, name


def test_the_families_with_fp8_folders() -> None:
    """The table says so of a family if each matrix of its models is a tensor of its own, `[out, in]`."""
    for family, options in OURS.values():
        model, record = model_spec(options), FAMILIES[family]
        shapes = {name: shape for name, shape in model_tensors(model).items() if len(shape) == 2 and ".layers." in name}
        locations = [record.names.locate(model, name, shape) for name, shape in shapes.items()]
        have_one_each = not any(x.transposed or x.outer is not None for x in locations)
        marks = ("✓",) if model.has_experts else ("✓", "without experts")
        assert (families_page.fp8_folder(record) in marks) == have_one_each, family


_FAMILIES = """
    Llama Arcee Mistral Qwen2 Qwen3 GPT2 Olmo2 Gemma2 Gemma3
    Phi3 Granite OPT Bloom Glm Glm4 GPTNeoX
    Qwen3Next Mixtral GraniteMoe GptOss Qwen3Moe Qwen2Moe Olmoe DeepseekV2 DeepseekV3
    Glm4Moe Olmo3 SmolLM3 MiniMaxM2 Ernie4_5_Moe Mistral4 NanoChat Llama4
    Glm4MoeLite Youtu Afmoe ExaoneMoe SolarOpen
    Bert Roberta T5
    Ministral3 SeedOss Exaone4 HunYuanDenseV1 InternLM3 GraniteSWA GraniteMoeShared VaultGemma Ministral
"""


@pytest.mark.parametrize("kind", _FAMILIES.split())
def test_every_key_of_theirs_is_known(kind: str) -> None:
    """A release of `transformers` with a new key, which may change the model, is to be looked at."""
    without_default = {"DeepseekV2": {"num_experts_per_tok": 6}, "Glm4Moe": {"head_dim": 128}}
    config = config_class(kind)(**without_default.get(kind, {}))
    read_config(config.to_dict() | {"model_type": config.model_type})


def test_kinds_of_layers_have_short_names() -> None:
    """Those of their parts, where these are all that differs."""
    model = read_config(PUBLISHED["nemotron-3-nano-30b"][1])[1]
    assert model.keys["pattern"][:6] == ["mamba2", "moe", "mamba2", "moe", "mamba2", "attention"]
