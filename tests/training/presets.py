"""Small models and ways to run them, as presets: values that set a few keys of a config, and may be joined.

`TP2 | PP2 | ZB_H1 | DELAYED` is a small model in FP8 on four ranks. The name of a preset, "tp2 pp2 zb-h1 delayed", is
the id of the test that runs it.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from megafp8.config import Config

Sections = Mapping[str, Mapping[str, Any]]
"""Keys of a config by section."""

VOCABULARY = 100  # padded to 128
BASE: Sections = {
    "model": {
        "num_layers": 2, "hidden_size": 64, "num_attention_heads": 8, "num_query_groups": 4, "ffn_hidden_size": 128,
        "vocab_size": VOCABULARY, "vocab_multiple": 64,
    },
    "training": {"steps": 20, "seq_length": 32, "micro_batch_size": 1, "global_batch_size": 2, "precision": "fp32"},
    "parallel": {"bucket_mib": 0.05},  # some ten buckets
    "fp8": {"amax_history_len": 3},
    "optimizer": {"learning_rate": 1e-3},
    "data": {"train": ["none"]},
}  # fmt: skip


def merged(*sections: Sections) -> dict[str, dict[str, Any]]:
    """All keys; of those that are given twice, the later value."""
    names = dict.fromkeys(name for given in sections for name in given)
    return {name: {k: v for given in sections for k, v in given.get(name, {}).items()} for name in names}


def config(*, seed: int = 1234, device: str = "cpu", **sections: Mapping[str, Any]) -> Config:
    """The small model with some keys changed."""
    return Config.model_validate({"name": "test", "seed": seed, "device": device, **merged(BASE, sections)})


@dataclass(frozen=True)
class Preset:
    """Some keys of a config, by section. Presets with the same names are equal.

    `a | b` sets the keys of both; of a key that both set, b's value counts. `a in b`: b was joined of a, and perhaps of
    others. `data_ranks`: data-parallel ranks, which no key says.
    """

    names: tuple[str, ...] = ()
    sections: Sections = field(default_factory=dict, compare=False, repr=False)
    data_ranks: int = field(default=1, compare=False, repr=False)

    def __or__(self, other: Preset) -> Preset:
        ranks = max(self.data_ranks, other.data_ranks)
        return Preset(self.names + other.names, merged(self.sections, other.sections), ranks)

    def __contains__(self, other: Preset) -> bool:
        return {*other.names} <= {*self.names}

    def __str__(self) -> str:
        return " ".join(self.names)

    @property
    def parts(self) -> list[Preset]:
        """The presets that it was joined of, in order."""
        return [PRESETS[name] for name in self.names]

    @property
    def ranks(self) -> int:
        """Ranks that run it."""
        p = config_of(self).parallel
        return p.tensor * p.pipeline * p.context * self.data_ranks


NONE = Preset()
PRESETS: dict[str, Preset] = {}
"""Those that are not joined, by name."""


def joined(presets: Iterable[Preset]) -> Preset:
    """All of them, one after the other."""
    return functools.reduce(operator.or_, presets, NONE)


def config_of(preset: Preset, *, seed: int = 1234, device: str = "cpu", **more: Mapping[str, Any]) -> Config:
    """The config of a run, with `more` keys by section."""
    return config(seed=seed, device=device, **merged(preset.sections, more))


EXECUTION = {
    "training": {"cuda_graphs", "loss_tokens_at_once", "micro_batch_size"},
    "fp8": {"param_gather", "report_interval", "paired_wgrad", "keep_weight_transposes"},
    "optimizer": {"store_param_remainders", "reduce_dtype", "offload"},
}
"""Keys beside `parallel` that say how a run is executed and not what it computes."""


def without_execution(preset: Preset) -> dict[str, dict[str, Any]]:
    """What a preset says of the model and its training, for the run of one rank that others are compared with."""
    return {
        section: {
            key: "best_fit" if value == "balanced" else value
            for key, value in given.items()
            if key not in EXECUTION.get(section, ())
        }
        for section, given in preset.sections.items()
        if section != "parallel"
    }


def _preset(name: str, data_ranks: int = 1, **sections: Mapping[str, Any]) -> Preset:
    PRESETS[name] = Preset((name,), sections, data_ranks)
    return PRESETS[name]


_GPT2 = {"position_embedding": "learned", "normalization": "layernorm", "activation": "gelu_tanh", "linear_bias": True}
MIXED = [
    {"layers": "*.mlp.down", "input": "rowwise", "weight": "rowwise", "grad_output": "rowwise"},
    {"layers": "*.attention.*", "input": "current", "weight": "delayed", "grad_output": "current"},
    {"layers": "*", "input": "delayed", "weight": "current", "grad_output": "delayed"},
]
STATIC_AMAX = {"*.weight": 0.2, "*.input": 8.0, "*.grad_output": 1e-3}
DEEPSEEK_EXPERTS = {
    "num_experts": 8, "top_k": 2, "ffn_hidden_size": 32, "score": "sigmoid", "scaling_factor": 2.0, "num_groups": 4,
    "top_groups": 2, "selection_bias": True, "bias_update_rate": 0.05, "shared_ffn_hidden_size": 64,
    "first_dense_layers": 1,
}  # fmt: skip
BERT_MODEL = {
    **_GPT2, "architecture": "bert", "norm_position": "post", "embedding_norm": True, "activation": "gelu",
    "tie_embeddings": True, "num_query_groups": None, "token_types": 2, "binary_head": True,
}  # fmt: skip
T5_MODEL = {
    "architecture": "t5", "num_decoder_layers": 2, "num_query_groups": None, "position_embedding": "relative",
    "relative_attention_num_buckets": 8, "relative_attention_max_distance": 20, "activation": "geglu_tanh",
}  # fmt: skip
LATENT = {"q_rank": 32, "kv_rank": 16, "nope_head_dim": 8, "rope_head_dim": 4, "value_head_dim": 8}
DELTA_NET = {
    "kind": "gated_delta_net", "num_key_heads": 4, "num_value_heads": 8, "key_head_dim": 8, "value_head_dim": 8,
}  # fmt: skip
KIMI_DELTA = {"kind": "kimi_delta_attention", "num_heads": 8, "head_dim": 8}
COMPRESSED_ATTENTION = {
    "kind": "compressed_attention", "q_rank": 32, "output_groups": 4, "output_rank": 16, "index_heads": 4,
    "index_head_dim": 8,
}  # fmt: skip
MAMBA2 = {"kind": "mamba2", "num_heads": 8, "head_dim": 8, "state_size": 8, "num_groups": 4}

# models
LAYERS_1 = _preset("1-layer", model={"num_layers": 1})
LAYERS_4 = _preset("4-layers", model={"num_layers": 4})
LAYERS_8 = _preset("8-layers", model={"num_layers": 8})
# blocks of FP8 are whole
WIDE = _preset("wide", model={"hidden_size": 128, "ffn_hidden_size": 128, "num_query_groups": 8})
TIED = _preset("tied", model={"tie_embeddings": True})
GPT2 = _preset("gpt2", model={**_GPT2, "num_query_groups": 8})
GELU = _preset("gelu", model={"activation": "gelu"})
QKV_BIAS = _preset("qkv-bias", model={"qkv_bias": True})
QK_NORM = _preset("qk-norm", model={"qkv_bias": True, "qk_norm": True, "attention_sinks": True})
PARALLEL_BLOCK = _preset("parallel-block", model={"parallel_block": True, "qk_norm": "projection"})
MTP = _preset("mtp", model={"mtp_num_layers": 2})
WINDOW = _preset("window", model={"sliding_window": 7})
DROPOUT = _preset("dropout", model={"hidden_dropout": 0.1, "attention_dropout": 0.1})
MOE = _preset(
    "moe", model={"moe": {"num_experts": 8, "top_k": 3, "ffn_hidden_size": 32, "aux_loss": 0.1, "z_loss": 0.01}}
)
# over two expert-parallel ranks three each, which two ranks share
MOE_6 = _preset("moe-6", model={"moe": {"num_experts": 6, "top_k": 2, "ffn_hidden_size": 32, "aux_loss": 0.1}})
GLOBAL_BALANCE = _preset(
    "global-balance", model={"moe": {"num_experts": 8, "top_k": 3, "ffn_hidden_size": 32, "aux_loss": 0.1,
    "aux_loss_scope": "global_batch"}},
)  # fmt: skip
DROPPING = _preset(
    "dropping", model={"moe": {"num_experts": 8, "top_k": 3, "ffn_hidden_size": 32, "capacity_factor": 0.8}}
)
ZERO_EXPERTS = _preset(
    "zero-experts", model={"moe": {"num_experts": 8, "zero_experts": 4, "top_k": 3, "ffn_hidden_size": 32,
    "aux_loss": 0.1, "selection_bias": True, "bias_update_rate": 0.05}},
)  # fmt: skip
GEMMA = _preset(
    "gemma", model={"norm_position": "both", "zero_centered_gamma": True, "embedding_multiplier": 8.0,
    "activation": "geglu_tanh", "attention_softcap": 5.0, "logit_softcap": 10.0, "sliding_window": 7,
    "full_attention_layers": [1], "rope_local_theta": 100.0},
)  # fmt: skip
FULL_KEYS = {"num_query_groups": 2, "head_dim": 16, "partial_rotary_factor": 0.5, "proportional_rope": True}
GEMMA4 = _preset(
    "gemma4", model={"num_layers": 4, "norm_position": "both", "activation": "geglu_tanh", "qk_norm": True,
    "value_norm": True, "layer_scalar": True, "tie_embeddings": True, "layer_kinds": {
    "local": {"mixer": {"sliding_window": 7}}, "full": {"mixer": {**FULL_KEYS, "keys_as_values": True}},
    "shared": {"mixer": {**FULL_KEYS, "kv_layer": 1}}}, "pattern": ["local", "full", "shared * 2"]},
)  # fmt: skip
PER_LAYER = _preset("per-layer", model={"per_layer_embedding": {"width": 8}})
SEPARATE_NORMS = _preset(
    "separate-norms", model={"moe": {"num_experts": 8, "top_k": 3, "ffn_hidden_size": 32, "shared_ffn_hidden_size": 64,
    "separate_norms": True}},
)  # fmt: skip
HYBRID = _preset(
    "hybrid", model={"layer_kinds": {"linear": {"mixer": DELTA_NET}, "full": {}}, "pattern": ["linear", "full"]}
)
KIMI = _preset(
    "kimi", model={"layer_kinds": {"linear": {"mixer": KIMI_DELTA}, "full": {}}, "pattern": ["linear", "full"]}
)
DELTA_PRODUCT = _preset(
    "delta-product", model={"layer_kinds": {"product": {"mixer": DELTA_NET | {"householder_steps": 2}}, "gates": {
    "mixer": KIMI_DELTA | {"erase_and_write_gates": True}}}, "pattern": ["product", "gates"]},
)  # fmt: skip
COMPRESSED = _preset(
    "compressed", model={"head_dim": 16, "partial_rotary_factor": 0.25, "sliding_window": 8, "pattern": ["csa", "hca"],
    "layer_kinds": {"csa": {"mixer": COMPRESSED_ATTENTION | {"compress_rate": 2, "top_k": 3, "rope_theta": 500.0}},
    "hca": {"mixer": COMPRESSED_ATTENTION | {"compress_rate": 4}}}},
)  # fmt: skip
NEMOTRON = _preset(
    "nemotron", model={"num_layers": 4, "activation": "squared_relu", "position_embedding": "none",
    "layer_kinds": {"mamba": {"mixer": MAMBA2, "ffn": "none"}, "attention": {"ffn": "none"},
    "mlp": {"mixer": "none"}, "moe": {"mixer": "none", "ffn": "moe"}}, "pattern": ["mamba", "moe", "attention", "mlp"],
    "moe": {"num_experts": 8, "top_k": 3, "ffn_hidden_size": 32, "shared_ffn_hidden_size": 32, "aux_loss": 0.1,
    "latent_size": 32}},
)  # fmt: skip
SHARED_ATTENTION = _preset(
    "shared-attention", model={"num_layers": 4, "head_dim": 16, "activation": "geglu",
    "pattern": ["mamba", "shared * 3"], "layer_kinds": {"mamba": {"mixer": MAMBA2, "ffn": "none"}, "shared": {
    "mixer": MAMBA2 | {"kind": "shared_attention", "adapter_rank": 8, "adapt_attention": True}}}},
)  # fmt: skip
BLOOM = _preset(
    "bloom", model={**_GPT2, "num_query_groups": 8, "position_embedding": "alibi", "embedding_norm": True,
    "activation": "xielu"},
)  # fmt: skip
GPT_OSS = _preset(
    "gpt-oss", model={"moe": {"num_experts": 8, "top_k": 3, "ffn_hidden_size": 32, "aux_loss": 0.1},
    "linear_bias": True, "attention_sinks": True, "activation": "clamped_swiglu", "norm_position": "output"},
)  # fmt: skip
# parameters of one and two rows: vectors of two heads, two channels and two experts, and a gate of one output
FEW_ROWS = _preset(
    "few-rows", model={"num_attention_heads": 2, "num_query_groups": 2, "head_dim": 2, "qk_norm": True,
    "qkv_bias": True, "attention_sinks": True, "moe": {"num_experts": 2, "top_k": 1, "ffn_hidden_size": 32,
    "aux_loss": 0.1, "shared_ffn_hidden_size": 32, "shared_gate": True}},
)  # fmt: skip
DEEPSEEK = _preset("deepseek", model={"moe": DEEPSEEK_EXPERTS, "latent_attention": LATENT, "num_query_groups": None})
SPARSE = _preset(
    "sparse", model={"latent_attention": LATENT, "num_query_groups": None,
    "sparse_attention": {"index_heads": 4, "index_head_dim": 8, "top_k": 6}},
)  # fmt: skip
BLOCK_SPARSE = _preset(
    "block-sparse", model={"num_query_groups": 4, "qk_norm": True, "pattern": ["sparse"], "layer_kinds":
    {"sparse": {"mixer": {"kind": "block_sparse_attention", "top_k": 2, "block_size": 3}}}},
)  # fmt: skip
HYPER = _preset(
    "hyper", model={"hyper_connections": {"streams": 3, "sinkhorn_iterations": 3}, "activation": "limited_swiglu",
    "moe": {"num_experts": 8, "top_k": 2, "ffn_hidden_size": 32, "score": "sqrtsoftplus", "aux_loss": 0.1},
    "layer_kinds": {"hash": {"ffn": {"kind": "moe", "routing": "hash"}}, "top_k": {"ffn": "moe"}},
    "pattern": ["hash", "top_k"]},
)  # fmt: skip
BERT = _preset("bert", model=BERT_MODEL, data={"packing": "sentences"})
BERT_PRE = _preset(
    "bert-pre", model={**BERT_MODEL, "norm_position": "pre", "embedding_norm": False, "activation": "gelu_tanh",
    "tie_embeddings": False, "binary_head": False},
)  # fmt: skip
T5 = _preset("t5", model=T5_MODEL, training={"decoder_seq_length": 16})
T5_TIED = _preset(
    "t5-tied", model={**T5_MODEL, "activation": "relu", "tie_embeddings": True}, training={"decoder_seq_length": 16}
)
LORA = _preset("lora", lora={"rank": 4, "alpha": 8.0}, optimizer={"learning_rate": 1e-2})
LORA_Q_DOWN = _preset(
    "lora-q-down", lora={"rank": 3, "alpha": 8.0, "targets": ["q", "down"]}, optimizer={"learning_rate": 1e-2}
)
LORA_2 = _preset("lora-2", lora={"rank": 2, "alpha": 8.0}, optimizer={"learning_rate": 1e-2})
LORA_GATE = _preset("lora-gate", lora={"targets": ["gate"]})

# precision; a CPU is slow at bf16
FP64 = _preset("fp64", training={"precision": "fp64"})
BF16 = _preset(
    "bf16", training={"precision": "bf16"}, model={"hidden_size": 32, "num_attention_heads": 4, "ffn_hidden_size": 64},
    parallel={"bucket_mib": 0.01},
)  # fmt: skip
FP16 = _preset(
    "fp16", training={"precision": "fp16", "loss_scale": {"initial_scale": 2.0**14, "growth_interval": 2}},
    model={"hidden_size": 32, "num_attention_heads": 4, "ffn_hidden_size": 64}, parallel={"bucket_mib": 0.01},
)  # fmt: skip

# batches
MICRO2 = _preset("micro2", training={"micro_batch_size": 2})
SEQ256 = _preset("seq256", training={"seq_length": 256})
SAMPLES_1 = _preset("1-sample", training={"global_batch_size": 1})
SAMPLES_2 = _preset("2-samples", training={"global_batch_size": 2})
SAMPLES_3 = _preset("3-samples", training={"global_batch_size": 3})
SAMPLES_4 = _preset("4-samples", training={"global_batch_size": 4})
SAMPLES_8 = _preset("8-samples", training={"global_batch_size": 8})
MASKED = _preset("masked", data={"mask_eod_loss": True})
LOSS_PARTS = _preset("loss-parts", training={"loss_tokens_at_once": 10})
Z_LOSS = _preset("z-loss", training={"z_loss": 0.1})
DOCUMENTS = _preset("documents", data={"mask_eod_loss": True, "reset_at_documents": True}, training={"z_loss": 1e-4})
BEST_FIT = _preset("best-fit", data={"packing": "best_fit", "mask_eod_loss": True, "reset_at_documents": True})
BALANCED = _preset("balanced", data={**BEST_FIT.sections["data"], "packing": "balanced"})
PREFIX = _preset("prefix", data={"prefix_lm": {"min_length": 2, "max_length": 20}})
ANSWERS = _preset(
    "answers", data={"packing": "best_fit", "mask_eod_loss": True, "reset_at_documents": True, "loss_on": "answers"}
)
_PAIRS = {"packing": "best_fit", "mask_eod_loss": True, "reset_at_documents": True}
DPO = _preset("dpo", data={**_PAIRS, "dpo": {"beta": 0.7, "label_smoothing": 0.1}})
GRPO = _preset(
    "grpo",
    data={
        **_PAIRS, "train": ["none.jsonl"], "tokenizer": {"kind": "bytes"},
        "grpo": {"reward": "rewards:none", "group_size": 2, "max_tokens": 12, "temperature": 0.7, "beta": 0.3},
    },
)  # fmt: skip
TEXT = _preset("text")  # the quickstart's; `Runs` knows where it is

# FP8
DELAYED = _preset("delayed", fp8={"recipe": "delayed"})
DELAYED_2 = _preset("delayed-2", fp8={"recipe": "delayed", "interval": 2, "amax_compute_algo": "most_recent"})
CURRENT = _preset("current", fp8={"recipe": "current"})
ROWWISE = _preset("rowwise", fp8={"recipe": "rowwise"})
BLOCKWISE = _preset("blockwise", fp8={"recipe": "blockwise"})
MXFP8 = _preset("mxfp8", fp8={"recipe": "mxfp8"})
NVFP4 = _preset("nvfp4", fp8={"recipe": "nvfp4"})
CALIBRATED = _preset("calibrated", fp8={"recipe": "static", "calibration_steps": 1})
STATIC = _preset("static", fp8={"recipe": "static", "static_amax": STATIC_AMAX})
CUSTOM = _preset("custom", fp8={"recipe": "custom", "custom": MIXED})
FPROP_BF16 = _preset("fprop-bf16", fp8={"override_linear_precision": (True, False, False)})
DGRAD_BF16 = _preset("dgrad-bf16", fp8={"override_linear_precision": (False, True, False)})
WGRAD_BF16 = _preset("wgrad-bf16", fp8={"override_linear_precision": (False, False, True)})
POWER_OF_TWO = _preset("power-of-two", fp8={"power_of_two_scale": True})
SOME_LAYERS = _preset("some-layers", fp8={"exclude": ["layers.0.*", "*.mlp.down"]})
SOME_EXPERTS = _preset("some-experts", fp8={"exclude": ["layers.0.mlp.experts.1.gate_up"]})
REPORT = _preset("report", fp8={"report_interval": 1})
REPORT_2 = _preset("report-2", fp8={"report_interval": 2})
REPORT_3 = _preset("report-3", fp8={"report_interval": 3})
FP8_GATHER = _preset("fp8-gather", fp8={"param_gather": True})
NO_TRANSPOSES = _preset("no-transposes", fp8={"keep_weight_transposes": False})

# optimizer
NO_CLIP = _preset("no-clip", optimizer={"clip_grad_norm": 0.0})
CLIP = _preset("clip", optimizer={"clip_grad_norm": 0.1})
BF16_MOMENTS = _preset("bf16-moments", optimizer={"moments_dtype": "bf16"})
FP8_MOMENTS = _preset("fp8-moments", optimizer={"moments_dtype": "fp8"})
QK_CLIP = _preset("qk-clip", optimizer={"qk_clip": 0.02})
REMAINDERS = _preset("remainders", optimizer={"store_param_remainders": True})
OFFLOAD_STATE = _preset("offload-state", optimizer={"offload": 0.6})
BF16_REDUCE = _preset("bf16-reduce", optimizer={"reduce_dtype": "bf16"})
MUON = _preset("muon", optimizer={"name": "muon", "muon": {"newton_schulz_dtype": "fp32"}})
AVERAGE = _preset("average", optimizer={"average_decay": 0.6})
GROUPS = _preset(
    "groups", optimizer={"groups": [{"match": ["embedding.*", "*.attention.*"], "learning_rate_scale": 0.5},
    {"match": ["*norm*"], "weight_decay": 0.1}]},
)  # fmt: skip

# layouts
TP2 = _preset("tp2", parallel={"tensor": 2})
TP4 = _preset("tp4", parallel={"tensor": 4})
NO_SP = _preset("no-sp", parallel={"sequence_parallel": False})
CHUNKS = _preset("chunks", parallel={"overlap_tensor": "symmetric"})  # `runs.start` gives it `InChunks`
EP2 = _preset("ep2", parallel={"expert": 2})
EP4 = _preset("ep4", parallel={"expert": 4})
ETP2 = _preset("etp2", parallel={"expert_tensor": 2})
ALL_TO_ALL = _preset("all-to-all", parallel={"expert_dispatch": "all_to_all"})
CP2 = _preset("cp2", parallel={"context": 2})
CP4 = _preset("cp4", parallel={"context": 4})
PP2 = _preset("pp2", parallel={"pipeline": 2})
PP4 = _preset("pp4", parallel={"pipeline": 4})
STAGES_1_3 = _preset("1+3", parallel={"layers_per_stage": [1, 3]})
STAGES_3_1 = _preset("3+1", parallel={"layers_per_stage": [3, 1]})
STAGES_1_3_3_1 = _preset("1+3+3+1", parallel={"layers_per_stage": [1, 3, 3, 1]})
DP2 = _preset("dp2", data_ranks=2, training={"global_batch_size": 4})
DP3 = _preset("dp3", data_ranks=3, training={"global_batch_size": 6})
DP4 = _preset("dp4", data_ranks=4, training={"global_batch_size": 4})
INTERLEAVED = _preset("interleaved", parallel={"schedule": "interleaved", "virtual_pipeline": 2})
ZB_H1 = _preset("zb-h1", parallel={"schedule": "zb-h1"})
ZB_V = _preset("zb-v", parallel={"schedule": "zb-v", "virtual_pipeline": 2})
DUALPIPEV = _preset("dualpipev", parallel={"schedule": "dualpipev", "virtual_pipeline": 2})
LATE_REDUCE = _preset("late-reduce", parallel={"overlap_grad_reduce": False})
LARGE_BUCKETS = _preset("large-buckets", parallel={"bucket_mib": 100.0})
ZERO = _preset("zero", parallel={"zero": 1})
LATE_GATHER = _preset("late-gather", parallel={"overlap_param_gather": False})
FSDP = _preset("fsdp", parallel={"fsdp": True})
HSDP = _preset("hsdp", parallel={"fsdp": True, "fsdp_replicas": 2})
ONE_SHARD = _preset("one-shard", parallel={"fsdp": True, "fsdp_replicas": 4})

# memory and launches
FULL = _preset("full", parallel={"recompute": "full"})
FULL_FIRST = _preset("full-first", parallel={"recompute": "full", "recompute_blocks": 1})
NORMS = _preset("norms", parallel={"recompute": "selective", "recompute_ops": ["norms"]})
ACTIVATION = _preset("activation", parallel={"recompute": "selective", "recompute_ops": ["activation"]})
ATTENTION = _preset("attention", parallel={"recompute": "selective", "recompute_ops": ["attention"]})
SELECTIVE = _preset(
    "selective", parallel={"recompute": "selective", "recompute_ops": ["norms", "activation", "attention"]}
)
OFFLOAD = _preset("offload", parallel={"offload": True})
OFFLOAD_1 = _preset("offload-1", parallel={"offload": 1})
GRAPHS = _preset("graphs", training={"cuda_graphs": True})

__all__ = ["NONE", *(name for name, value in tuple(globals().items()) if value in PRESETS.values())]  # the presets
