"""Record the results of many small runs to the last bit, and compare two recordings.

    python -m benchmarks.bitwise_gate record before.json                        # on the commit before a refactoring
    python -m benchmarks.bitwise_gate record after.json                         # on the commit after it
    python -m benchmarks.bitwise_gate compare before.json after.json
    python -m benchmarks.bitwise_gate record after.json --only moe plan/ --sample 1/3   # some of them
    python -m benchmarks.bitwise_gate record before.json --add                  # those that the file lacks

Most cases train a tiny model for four steps on 1 to 4 CPU processes (gloo). They record the losses, gradient norms and
other metrics of metrics.jsonl, a SHA-256 of all tensors of each checkpoint, and the tokens and log-probabilities of
texts that the last checkpoint continues, greedily and at random.

| cases | cover |
|---|---|
| <recipe>/<layout> | every FP8 recipe in three layouts; on one rank, the last step is resumed from a checkpoint |
| no prefix | schedules, parallel axes, memory options, optimizers |
| kinds/ | experts, objectives, architectures, options of training |
| families/ | a model of each Hugging Face family, with every kind of mixer and feed-forward network (*) |
| presets/ | every config of configs/ and examples/, with small numbers |
| nn/ | output and gradients of the modules of `megafp8.nn` |
| keys/ | keys that may go, each in a case that one line removes |
| plan/, prove/ | numbers of `megafp8 plan --json` and of the certificates of `megafp8 prove` |

(*) The checkpoint is converted to Hugging Face and to Megatron-LM, and each result is converted back. Each time, a hash
of the tensors and of config.json is recorded.

The gate uses only stable interfaces: config keys, commands, metrics.jsonl, files of checkpoints, `megafp8.nn` and
`megafp8.fp8`. The file can be copied into the tree of an older or newer commit.

A recording belongs to one machine and one torch version: another CPU may sum in another order.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
import multiprocessing
import os
import platform
import re
import runpy
import socket
import struct
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
import yaml
from safetensors.torch import load_file
from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
VOCAB_SIZE, END_OF_DOCUMENT = 257, 256  # of the bytes tokenizer
STEPS = 4
PROCESSES = 4
CASE_SECONDS = 1800

BASE: dict[str, Any] = {
    "name": "gate", "run_dir": "runs", "device": "cpu", "seed": 7,
    "model": {
        "num_layers": 4, "hidden_size": 128, "num_attention_heads": 4, "num_query_groups": 2, "ffn_hidden_size": 256,
        "vocab_size": VOCAB_SIZE,
    },
    "training": {
        "steps": STEPS, "seq_length": 128, "micro_batch_size": 1, "global_batch_size": 4, "precision": "bf16",
        "eval_interval": STEPS, "eval_steps": 1,
    },
    # Constant, so that the learning rate of a step does not depend on where the first part of a run ends.
    "optimizer": {"learning_rate": 3e-3, "warmup_steps": 2, "schedule": "constant"},
    "data": {"train": {"data/text": 1.0}, "split": "90,10,0", "tokenizer": {"kind": "bytes"}, "index_cache": "cache"},
    "checkpoint": {"interval": STEPS, "async_save": False},
    "logging": {"progress": False, "tensorboard": False},
}  # fmt: skip


class Case(NamedTuple):
    """A run of a config in the working folder, with overrides.

    Attributes:
        ranks: Number of processes.
        overrides: Keys of the config as on the command line.
        config: Path of the config.
        parts: Numbers of steps after which the run ends and is started again; the last one is the end.
        converts: Convert the last checkpoint to the other formats and back.
    """

    ranks: int
    overrides: Sequence[str]
    config: str = "base.yaml"
    parts: tuple[int, ...] = (STEPS,)
    converts: bool = False


DELAYED = ["fp8.recipe=delayed", "fp8.amax_history_len=4"]
RECIPES: dict[str, list[str]] = {
    "bf16": [],
    "fp32": ["training.precision=fp32"],
    "delayed": DELAYED,
    "delayed-options": [
        *DELAYED, "fp8.margin=1", "fp8.interval=2", "fp8.amax_compute_algo=most_recent", "fp8.format=e4m3",
        "fp8.power_of_two_scale=true",
    ],
    "current": ["fp8.recipe=current"],
    "rowwise": ["fp8.recipe=rowwise"],
    "rowwise-wgrad-bf16": [
        "fp8.recipe=rowwise", "fp8.override_linear_precision=[false, false, true]", "fp8.power_of_two_scale=true",
    ],
    "blockwise": ["fp8.recipe=blockwise"],
    "mxfp8": ["fp8.recipe=mxfp8"],
    "nvfp4": ["fp8.recipe=nvfp4"],
    "custom": [
        "fp8.recipe=custom", "fp8.amax_history_len=4",
        'fp8.custom=[{layers: "*.mlp.down", input: rowwise, weight: rowwise, grad_output: rowwise}, '
        '{layers: "*", input: delayed, weight: current, grad_output: delayed}]',
    ],
}  # fmt: skip
LAYOUTS: dict[str, tuple[int, list[str]]] = {
    "single": (1, []),
    "tp2-pp2": (4, ["parallel.tensor=2", "parallel.pipeline=2"]),
    "dp2-zero": (2, ["parallel.zero=1"]),
}
CURRENT, PP2 = ["fp8.recipe=current"], ["parallel.pipeline=2"]
TWO_CHUNKS = [*PP2, "parallel.virtual_pipeline=2"]
SELECTIVE = ["parallel.recompute=selective", "parallel.recompute_ops=[norms,activation,attention]"]
DOCUMENTS = ["data.mask_eod_loss=true", "data.reset_at_documents=true"]
ROPE_SCALING = "model.rope_scaling={factor: 4.0, original_max_position_embeddings: 64}"
GPT2 = [
    "model.position_embedding=learned", "model.normalization=layernorm", "model.activation=gelu_tanh",
    "model.linear_bias=true",
]  # fmt: skip
MORE: dict[str, tuple[int, list[str]]] = {
    "tp2-whole-sequence": (2, [*DELAYED, "parallel.tensor=2", "parallel.sequence_parallel=false"]),
    "tp4-blockwise": (4, ["fp8.recipe=blockwise", "parallel.tensor=4", "model.num_query_groups=4"]),
    "tp2-rowwise": (2, ["fp8.recipe=rowwise", "parallel.tensor=2"]),
    "cp2": (2, [*DELAYED, "parallel.context=2"]),
    "cp2-tp2": (4, [*CURRENT, "parallel.context=2", "parallel.tensor=2"]),
    "interleaved": (2, [*DELAYED, *TWO_CHUNKS, "parallel.schedule=interleaved"]),
    "zb-h1": (2, [*DELAYED, *PP2, "parallel.schedule=zb-h1"]),
    "zb-v": (2, [*DELAYED, *TWO_CHUNKS, "parallel.schedule=zb-v"]),
    "zb-v-tp2": (4, [*CURRENT, *TWO_CHUNKS, "parallel.schedule=zb-v", "parallel.tensor=2"]),
    "dualpipev": (2, ["fp8.recipe=blockwise", *TWO_CHUNKS, "parallel.schedule=dualpipev"]),
    "pp2-uneven": (2, [*DELAYED, *PP2, "parallel.layers_per_stage=[3,1]"]),
    "pp4": (4, ["parallel.pipeline=4"]),
    "pp2-dp2-zero": (4, [*DELAYED, *PP2, "parallel.zero=1"]),
    "dp2": (2, [*DELAYED, "parallel.overlap_grad_reduce=false"]),
    "dp4-zero-late": (4, [*DELAYED, "parallel.zero=1", "parallel.overlap_param_gather=false"]),
    "fsdp": (2, [*CURRENT, "parallel.fsdp=true"]),
    "fsdp-param-gather": (2, [*DELAYED, "parallel.fsdp=true", "fp8.param_gather=true"]),
    "fsdp-tp2": (4, ["parallel.fsdp=true", "parallel.tensor=2"]),
    "zero-param-gather": (2, [*DELAYED, "parallel.zero=1", "fp8.param_gather=true"]),
    "zero-param-gather-tp2": (4, [*CURRENT, "parallel.zero=1", "fp8.param_gather=true", "parallel.tensor=2"]),
    "recompute-full": (2, [*DELAYED, *PP2, "parallel.recompute=full"]),
    "recompute-full-one": (1, ["parallel.recompute=full", "parallel.recompute_blocks=1"]),
    "recompute-selective": (2, [*DELAYED, *SELECTIVE, "parallel.tensor=2"]),
    "recompute-selective-blockwise": (1, ["fp8.recipe=blockwise", "parallel.recompute=selective"]),
    "offload": (1, [*DELAYED, "parallel.offload=2"]),
    "reduce-bf16": (2, [*DELAYED, "optimizer.reduce_dtype=bf16"]),
    "moments-bf16": (2, [*DELAYED, "parallel.zero=1", "optimizer.moments_dtype=bf16"]),
    "moments-fp8": (2, [*DELAYED, "parallel.zero=1", "optimizer.moments_dtype=fp8"]),
    "offload-state": (2, [*DELAYED, "parallel.zero=1", "optimizer.offload=0.5"]),
    "remainders": (2, [*DELAYED, "parallel.zero=1", "optimizer.store_param_remainders=true"]),
    "gpt2": (1, [*DELAYED, *GPT2]),
    "gpt2-tp2-pp2": (4, [*CURRENT, *GPT2, "model.tie_embeddings=true", "parallel.tensor=2", *PP2]),
    "tied-zb-v": (2, [*DELAYED, "model.tie_embeddings=true", *TWO_CHUNKS, "parallel.schedule=zb-v"]),
    "qwen2-tp2": (2, [*DELAYED, "model.qkv_bias=true", "parallel.tensor=2"]),
    "qwen3-tp2": (2, ["fp8.recipe=rowwise", "model.qk_norm=true", "model.head_dim=64", "parallel.tensor=2"]),
    "window": (1, ["model.sliding_window=16", ROPE_SCALING]),
    "parallel-block-tp2": (2, [*DELAYED, "model.parallel_block=true", "parallel.tensor=2"]),
    "gelu": (1, [*CURRENT, "model.activation=gelu"]),
    "z-loss-tp2": (2, ["training.z_loss=1e-2", "parallel.tensor=2", "training.precision=fp32"]),
    "masked": (2, [*DELAYED, *DOCUMENTS]),
    "masked-cp2": (2, [*DELAYED, *DOCUMENTS, "parallel.context=2"]),
    "some-layers": (1, [*DELAYED, "fp8.exclude=[layers.1.*]", "fp8.first_blocks_bf16=1", "fp8.last_blocks_bf16=1"]),
    "dgrad-bf16": (1, [*CURRENT, "fp8.override_linear_precision=[false, true, false]"]),
    "report": (2, [*DELAYED, *PP2, "fp8.report_interval=2"]),
    "deterministic": (1, [*DELAYED, "deterministic=true", "optimizer.clip_grad_norm=0.1"]),
}  # fmt: skip
MOE = ["model.moe={num_experts: 8, top_k: 3, ffn_hidden_size: 64, aux_loss: 0.1, z_loss: 0.01}"]
DROPPING = ["model.moe={num_experts: 8, top_k: 3, ffn_hidden_size: 64, capacity_factor: 0.8}"]
GLOBAL = ["model.moe={num_experts: 8, top_k: 3, ffn_hidden_size: 64, aux_loss: 0.1, aux_loss_scope: global_batch}"]
DEEPSEEK = [
    "model.moe={num_experts: 8, top_k: 2, ffn_hidden_size: 64, score: sigmoid, scaling_factor: 2.0, num_groups: 4, "
    "top_groups: 2, selection_bias: true, bias_update_rate: 0.05, shared_ffn_hidden_size: 128, first_dense_layers: 1}",
    "model.latent_attention={q_rank: 64, kv_rank: 32, nope_head_dim: 16, rope_head_dim: 8, value_head_dim: 16}",
    "model.num_query_groups=null",
]  # fmt: skip
GPT_OSS = [
    *MOE, "model.linear_bias=true", "model.attention_sinks=true", "model.activation=clamped_swiglu",
    "model.sliding_window=16", "model.full_attention_layers=[1, 3]",
]  # fmt: skip
GEMMA = [
    "model.norm_position=both", "model.zero_centered_gamma=true", "model.embedding_multiplier=8.0",
    "model.activation=geglu_tanh", "model.attention_softcap=5.0", "model.logit_softcap=10.0", "model.sliding_window=16",
    "model.full_attention_layers=[1, 3]", "model.rope_local_theta=100.0", "model.tie_embeddings=true",
]  # fmt: skip
WORDS = ["model.vocab_size=128", "data.tokenizer={kind: huggingface, path: words.json, end_token: </s>}",
         "data.train=[data/words]"]  # fmt: skip
BERT = [
    *GPT2, *WORDS, "model.architecture=bert", "model.norm_position=post", "model.embedding_norm=true",
    "model.activation=gelu", "model.tie_embeddings=true", "model.num_query_groups=null",
]  # fmt: skip
T5 = [
    *WORDS, "model.architecture=t5", "model.num_decoder_layers=2", "model.num_query_groups=null",
    "model.position_embedding=relative", "model.activation=geglu_tanh", "training.decoder_seq_length=64",
]  # fmt: skip
LORA = ["lora={rank: 4, alpha: 8.0}"]
MUON = ["optimizer.name=muon", "optimizer.muon={newton_schulz_dtype: fp32}"]
DROPOUT = ["model.hidden_dropout=0.1", "model.attention_dropout=0.1"]
EP2, ZERO, FSDP, TP2 = ["parallel.expert=2"], ["parallel.zero=1"], ["parallel.fsdp=true"], ["parallel.tensor=2"]
KINDS: dict[str, tuple[int, list[str]]] = {
    **{f"moe-{name}": (1, [*MOE, *RECIPES[name]]) for name in ("bf16", "delayed", "current", "rowwise", "blockwise")},
    "moe-tp2-ep2": (2, [*MOE, *DELAYED, *TP2, *EP2]),
    "moe-etp2": (2, [*MOE, *CURRENT, *TP2, "parallel.expert_tensor=2"]),
    "moe-all-to-all": (2, [*MOE, *CURRENT, *EP2, "parallel.expert_dispatch=all_to_all"]),
    "moe-dropping": (2, [*DROPPING, *EP2]),
    "moe-global-balance": (2, [*GLOBAL, *ZERO]),
    "moe-fsdp-ep2": (4, [*MOE, *DELAYED, *FSDP, *EP2]),
    "moe-cp2": (2, [*MOE, *CURRENT, "parallel.context=2"]),
    "moe-zb-v": (2, [*MOE, *CURRENT, *TWO_CHUNKS, "parallel.schedule=zb-v"]),
    "moe-recompute": (1, [*MOE, *DELAYED, *SELECTIVE]),
    "shared-gate": (2, [
        "model.moe={num_experts: 4, top_k: 1, ffn_hidden_size: 64, shared_ffn_hidden_size: 64, shared_gate: true}",
        *FSDP,
    ]),
    "deepseek": (1, [*DEEPSEEK, *DELAYED]),
    "deepseek-tp2-ep2": (2, [*DEEPSEEK, *CURRENT, *TP2, *EP2]),
    "deepseek-mtp-pp2": (2, [*DEEPSEEK, *PP2, "model.mtp_num_layers=1"]),
    "mtp": (2, [*DELAYED, "model.mtp_num_layers=2", *ZERO]),
    "gpt-oss": (2, [*GPT_OSS, *CURRENT, *EP2]),
    "gemma": (2, [*GEMMA, *DELAYED, *PP2]),
    "bloom": (1, [
        *GPT2, *DELAYED, "model.position_embedding=alibi", "model.embedding_norm=true", "model.num_query_groups=null",
    ]),
    "olmo2": (2, ["model.norm_position=output", "model.qk_norm=projection", *TP2]),
    "bert": (2, [*BERT, *CURRENT, *TP2]),
    "bert-dropout": (1, [*BERT, *DROPOUT]),
    "t5": (2, [*T5, *DELAYED, *PP2]),
    "t5-tied-zero": (2, [*T5, *ZERO, "model.tie_embeddings=true", "model.activation=relu"]),
    "lora": (2, [*LORA, *DELAYED, *TP2]),
    "lora-moe-fsdp": (2, [*LORA, *MOE, *FSDP]),
    "muon": (2, [*MUON, *DELAYED, *TP2]),
    "muon-zero-moe": (2, [*MUON, *MOE, *ZERO, *EP2]),
    "average": (2, [*ZERO, "optimizer.average_decay=0.6"]),
    "groups": (1, [
        "optimizer.groups=[{match: [embedding.*], learning_rate_scale: 0.5}, {match: ['*norm*'], weight_decay: 0.1}]",
    ]),
    "mup": (1, ["model.mup={base_hidden_size: 64}"]),
    "prefix": (2, [*DELAYED, "data.prefix_lm={min_length: 2, max_length: 60}", "parallel.context=2"]),
    "dropout": (2, [*DELAYED, *DROPOUT, *TP2]),
    "fp16": (1, ["training.precision=fp16", "training.loss_scale={initial_scale: 16384.0, growth_interval: 2}"]),
    "best-fit": (1, [*DOCUMENTS, "data.packing=best_fit"]),
    "stages": (1, ["stages=[{name: long, begin: 2, overrides: {training.seq_length: 256}}]"]),
    "hsdp": (4, [*CURRENT, *FSDP, "parallel.fsdp_replicas=2"]),
}  # fmt: skip
KEYS: dict[str, tuple[int, list[str]]] = {
    "bucket-mib": (2, [*DELAYED, *ZERO, "parallel.bucket_mib=0.25"]),
    "smooth-swiglu": (1, [*DELAYED, "fp8.smooth_swiglu=true"]),
    "smooth-swiglu-tp2-pp2": (4, [*DELAYED, *TP2, *PP2, "fp8.smooth_swiglu=true"]),
    "smooth-swiglu-recompute": (1, [*DELAYED, "fp8.smooth_swiglu=true", "parallel.recompute=selective"]),
    "amax-epsilon": (1, [*CURRENT, "fp8.amax_epsilon=1e-6"]),
    "static-amax": (1, ["fp8.recipe=static", 'fp8.static_amax={"*": 4.0}']),
    "calibration-steps": (1, ["fp8.recipe=static", "fp8.calibration_steps=2"]),
    "special-tokens": (1, [
        "model.architecture=bert", "model.num_query_groups=null", "model.vocab_size=384",
        "data.special_tokens={cls: 260, sep: 261, mask: 262, pad: 263}",
    ]),
}  # fmt: skip
"""Cases of keys that may go, a case each."""
RESUMED = {
    "interleaved", "fsdp", "fsdp-param-gather", "zero-param-gather", "moments-bf16", "moments-fp8", "remainders",
    "masked", "kinds/deepseek", "kinds/mtp", "kinds/bert", "kinds/t5", "kinds/lora", "kinds/muon", "kinds/average",
    "kinds/fp16", "kinds/best-fit", "kinds/stages", "keys/calibration-steps",
} | {f"{recipe}/single" for recipe in RECIPES}  # fmt: skip
"""Cases that resume their last step from a checkpoint."""

FAMILY = {
    "num_layers": 3, "hidden_size": 32, "num_attention_heads": 4, "num_query_groups": 2, "ffn_hidden_size": 48,
    "vocab_multiple": 8,
}  # fmt: skip
"""Keys of the section model of a family's model, which `FAMILIES` changes."""
FAMILIES: dict[str, dict[str, Any]] = yaml.safe_load("""
.shared:
  - &grouped {num_experts: 8, top_k: 3, ffn_hidden_size: 24, shared_ffn_hidden_size: 48, first_dense_layers: 1,
      score: sigmoid, scaling_factor: 2.5, num_groups: 4, top_groups: 2, selection_bias: true}
  - &latent {q_rank: 20, kv_rank: 12, nope_head_dim: 6, rope_head_dim: 6, value_head_dim: 8}
  - &scaling {factor: 4.0, low_freq_factor: 1.0, high_freq_factor: 4.0, original_max_position_embeddings: 8}
  - &compressed {kind: compressed_attention, q_rank: 20, output_groups: 2, output_rank: 12}
  - &mamba {kind: mamba2, num_heads: 8, head_dim: 8, state_size: 6, num_groups: 2}
  - &delta {kind: gated_delta_net, num_key_heads: 2, num_value_heads: 4, key_head_dim: 32, value_head_dim: 24}
rwkv7: {layer_kinds: {a: {mixer: {kind: rwkv7, num_heads: 2, head_dim: 8, decay_rank: 4, rate_rank: 4, gate_rank: 4}}},
  pattern: [a]}
mamba1: {layer_kinds: {a: {mixer: {kind: mamba1, inner_size: 48, step_rank: 4, state_size: 6}, ffn: none}},
  pattern: [a]}
rg-lru: {layer_kinds: {a: {mixer: {kind: rg_lru, inner_size: 48, num_heads: 4}}}, pattern: [a]}
shared-attention: {tie_embeddings: true, pattern: [a], layer_kinds: {a: {mixer: {kind: shared_attention, num_heads: 4,
  head_dim: 16, state_size: 6, num_groups: 2, adapter_rank: 4, adapt_attention: true}, ffn: none}}}
block-sparse: {num_query_groups: 4, qk_norm: true, pattern: [a],
  layer_kinds: {a: {mixer: {kind: block_sparse_attention, top_k: 2, block_size: 3}}}}
no-layer-has-experts: {moe: {num_experts: 4}, layer_kinds: {a: {ffn: {kind: mlp}}}, pattern: [a]}
qwen3-next: {qk_norm: true, output_gate: true, zero_centered_gamma: true, partial_rotary_factor: 0.5, head_dim: 8,
  layer_kinds: {linear: {mixer: *delta}, full: {}}, pattern: [linear, full], moe: {num_experts: 6,
  shared_ffn_hidden_size: 40, shared_gate: true, ffn_hidden_size: 24}}
qwen3-5: {qk_norm: true, output_gate: true, zero_centered_gamma: true, partial_rotary_factor: 0.5, head_dim: 8,
  layer_kinds: {linear: {mixer: *delta}, full: {}}, pattern: [linear, full]}
olmo-hybrid: {qk_norm: projection, position_embedding: none, layer_kinds: {linear: {mixer: {kind: gated_delta_net,
  num_key_heads: 2, num_value_heads: 4, key_head_dim: 16, value_head_dim: 16, allow_neg_eigval: true, norm_eps:
  1.0e-5}}, full: {norm_position: output}}, pattern: [linear, full]}
nemotron-h: {num_layers: 4, activation: squared_relu, position_embedding: none, layer_kinds: {mamba: {mixer: {<<:
  *mamba, min_step: 0.001}, ffn: none}, moe: {mixer: none, ffn: moe}, attention: {ffn: none}}, pattern: [mamba, moe,
  attention, moe], moe: {num_experts: 6, top_k: 2, ffn_hidden_size: 24, shared_ffn_hidden_size: 16, score: sigmoid,
  selection_bias: true}}
bamba: {partial_rotary_factor: 0.5, layer_kinds: {mamba: {mixer: {<<: *mamba, max_step: 0.7}}, attention: {}},
  pattern: [mamba, attention]}
granitemoehybrid: {residual_multiplier: 0.4, layer_kinds: {mamba: {mixer: *mamba}, attention: {mixer:
  {position_embedding: none}}}, pattern: [mamba, attention], moe: {num_experts: 4, ffn_hidden_size: 24,
  shared_ffn_hidden_size: 16}}
granitemoehybrid-attention: {moe: {num_experts: 4, ffn_hidden_size: 24, shared_ffn_hidden_size: 16}}
llama: {rope_scaling: *scaling, rope_theta: 500.0}
llama-tied: {num_query_groups: null, tie_embeddings: true, head_dim: 6}
llama-biases: {linear_bias: true}
llama-geglu: {activation: geglu_tanh}
arcee: {activation: squared_relu}
mistral: {sliding_window: 5}
mistral-no-multiple: {hidden_size: 34, head_dim: 6, init_std: 1.5}
qwen2: {qkv_bias: true}
qwen2-window: {qkv_bias: true, sliding_window: 5, full_attention_layers: [0], tie_embeddings: true}
qwen3: {qk_norm: true, head_dim: 16, sliding_window: 5, full_attention_layers: [1]}
mixtral: {moe: {num_experts: 4, ffn_hidden_size: 24}, sliding_window: 5}
qwen3-moe: {qk_norm: true, head_dim: 16, moe: {num_experts: 12, top_k: 3, ffn_hidden_size: 24, normalize: false,
  first_dense_layers: 1}}
qwen2-moe: {qkv_bias: true, head_dim: 6, moe: {num_experts: 6, shared_ffn_hidden_size: 40, shared_gate: true,
  layer_interval: 2}}
olmoe: {qk_norm: projection, moe: {num_experts: 6, top_k: 3, ffn_hidden_size: 24}}
olmo2: {norm_position: output, qk_norm: projection}
gemma2: {activation: geglu_tanh, norm_position: both, zero_centered_gamma: true, embedding_multiplier: 5.5, head_dim:
  16, sliding_window: 5, full_attention_layers: [1], attention_softcap: 1.5, logit_softcap: 4.0, attention_scale: 0.2}
gemma3: {activation: geglu_tanh, norm_position: both, zero_centered_gamma: true, embedding_multiplier: 5.5, head_dim:
  16, sliding_window: 5, full_attention_layers: [1], qk_norm: true, rope_theta: 10000.0, rope_local_theta: 50.0,
  rope_interpolation_factor: 4.0}
gemma4: {num_layers: 5, activation: geglu_tanh, norm_position: both, embedding_multiplier: 5.5, head_dim: 16,
  sliding_window: null, qk_norm: true, value_norm: true, attention_scale: 1.0, layer_scalar: true,
  per_layer_embedding: {width: 6}, rope_theta: 10000.0, layer_kinds: {local: {mixer: {sliding_window: 5}}, full:
  {mixer: {head_dim: 32, num_query_groups: 4, rope_theta: 1000000.0, partial_rotary_factor: 0.25, proportional_rope:
  true, keys_as_values: true}}, local-shared: {mixer: {sliding_window: 5, kv_layer: 1}, ffn: {ffn_hidden_size: 96}},
  full-shared: {mixer: {head_dim: 32, num_query_groups: 4, rope_theta: 1000000.0, partial_rotary_factor: 0.25,
  proportional_rope: true, kv_layer: 2}, ffn: {ffn_hidden_size: 96}}}, pattern: [local * 2, full, local-shared,
  full-shared]}
gemma4-experts: {activation: geglu_tanh, norm_position: both, embedding_multiplier: 5.5, head_dim: 16, sliding_window:
  5, full_attention_layers: [2], qk_norm: true, value_norm: true, attention_scale: 1.0, layer_scalar: true, moe:
  {num_experts: 4, ffn_hidden_size: 24, shared_ffn_hidden_size: 48, separate_norms: true}}
phi3: {partial_rotary_factor: 0.5, rope_theta: 500.0}
phi3-longrope: {partial_rotary_factor: 0.75, longrope: {short_factor: [1.0, 1.25, 2.0], long_factor: [1.5, 3.0, 6.0],
  factor: 4.0, original_max_position_embeddings: 8}}
llama-longrope: {longrope: {short_factor: [1.0, 1.25, 2.0, 3.0], long_factor: [1.5, 3.0, 6.0, 7.0], factor: 4.0,
  original_max_position_embeddings: 8}}
granite: {embedding_multiplier: 3, residual_multiplier: 0.4, attention_scale: 0.3, logits_scaling: 2}
granitemoe: {residual_multiplier: 0.4, moe: {num_experts: 4, ffn_hidden_size: 24}}
opt: {num_query_groups: null, normalization: layernorm, linear_bias: true, position_embedding: learned, activation:
  relu, tie_embeddings: true}
bloom: {num_query_groups: null, ffn_hidden_size: null, normalization: layernorm, linear_bias: true,
  position_embedding: alibi, activation: gelu_tanh, embedding_norm: true, tie_embeddings: true}
glm: {qkv_bias: true, partial_rotary_factor: 0.5, yarn: {factor: 4.0}}
glm4: {norm_position: both, partial_rotary_factor: 0.5}
gpt-neox: {num_query_groups: null, normalization: layernorm, linear_bias: true, activation: gelu, parallel_block:
  true, partial_rotary_factor: 0.25}
gpt-oss: {activation: clamped_swiglu, linear_bias: true, attention_sinks: true, sliding_window: 5,
  full_attention_layers: [1], moe: {num_experts: 6, top_k: 3, ffn_hidden_size: 24}}
baichuan: {hidden_size: 48, num_attention_heads: 6, num_query_groups: null, position_embedding: alibi}
deepseek-v2: {num_query_groups: null, norm_eps: 1.0e-6, latent_attention: {q_rank: null, kv_rank: 12, nope_head_dim:
  6, rope_head_dim: 6, value_head_dim: 8}, moe: {num_experts: 8, top_k: 3, ffn_hidden_size: 24,
  shared_ffn_hidden_size: 48, first_dense_layers: 1, score: softmax, scaling_factor: 2.5, num_groups: 4, top_groups:
  2, selection_bias: false, normalize: false}, yarn: {factor: 4.0, original_max_position_embeddings: 16,
  mscale_all_dim: 1.0}}
deepseek-v4: {head_dim: 16, partial_rotary_factor: 0.25, sliding_window: 5, activation: limited_swiglu,
  hyper_connections: {streams: 3, sinkhorn_iterations: 5}, moe: {num_experts: 8, top_k: 3, ffn_hidden_size: 24,
  shared_ffn_hidden_size: 24, score: sqrtsoftplus, selection_bias: true, scaling_factor: 1.5}, layer_kinds: {window:
  {mixer: *compressed, ffn: {kind: moe, routing: hash}}, sparse: {mixer: {<<: *compressed, compress_rate: 2, top_k: 2,
  index_heads: 10, index_head_dim: 8, rope_theta: 500.0}, ffn: moe}, heavy: {mixer: {<<: *compressed, compress_rate:
  4, rope_theta: 500.0}, ffn: moe}}, pattern: [window, sparse, heavy]}
deepseek-v32: {num_query_groups: null, norm_eps: 1.0e-6, latent_attention: *latent, moe: *grouped, sparse_attention:
  {index_heads: 10, index_head_dim: 6, top_k: 4}, rope_theta: 500.0}
glm-moe-dsa: {num_query_groups: null, norm_eps: 1.0e-5, latent_attention: {<<: *latent, norm_eps: 1.0e-6}, moe:
  *grouped, sparse_attention: {index_heads: 10, index_head_dim: 8, top_k: 4, index_rope: neighbors}}
deepseek-v3: {num_query_groups: null, norm_eps: 1.0e-6, latent_attention: *latent, moe: *grouped, rope_scaling:
  *scaling, rope_theta: 500.0}
glm4-moe: {qk_norm: true, partial_rotary_factor: 0.5, moe: {num_experts: 8, top_k: 3, ffn_hidden_size: 24,
  shared_ffn_hidden_size: 48, first_dense_layers: 1, score: sigmoid, scaling_factor: 2.5, num_groups: 2, top_groups:
  1, selection_bias: true, normalize: false}}
olmo3: {norm_position: output, qk_norm: projection, sliding_window: 5, full_attention_layers: [1], rope_theta: 500.0,
  rope_local_theta: 500.0, yarn: {factor: 4.0, original_max_position_embeddings: 16}}
smollm3: {layer_kinds: {rotary: {}, plain: {mixer: {position_embedding: none}}, local: {mixer: {sliding_window: 5,
  rope_theta: 10000.0}}}, pattern: [rotary, plain, local]}
lfm2-moe: {qk_norm: true, moe: {num_experts: 6, ffn_hidden_size: 24, score: sigmoid, selection_bias: true},
  layer_kinds: {short: {mixer: {kind: short_convolution}, ffn: {kind: mlp}}, full: {ffn: {kind: moe}}}, pattern:
  [short, full * 2]}
kimi-linear: {num_query_groups: null, norm_eps: 1.0e-5, latent_attention: {<<: *latent, norm_eps: 1.0e-6}, moe:
  {num_experts: 8, top_k: 3, ffn_hidden_size: 24, shared_ffn_hidden_size: 48, score: sigmoid, scaling_factor: 2.5,
  num_groups: 4, top_groups: 2, selection_bias: true}, position_embedding: none, layer_kinds: {linear: {mixer: {kind:
  kimi_delta_attention, num_heads: 4, head_dim: 6}, ffn: {kind: mlp}}, full: {ffn: {kind: moe}}}, pattern: [linear *
  2, full]}
minimax-m2: {qk_norm: projection, partial_rotary_factor: 0.5, moe: {num_experts: 6, top_k: 3, score: sigmoid,
  selection_bias: true, ffn_hidden_size: 24}}
ernie4-5-moe: {layer_kinds: {dense: {ffn: {kind: mlp}}, sparse: {ffn: {kind: moe}}}, pattern: [dense, sparse, dense],
  moe: {num_experts: 6, selection_bias: true, ffn_hidden_size: 24, shared_ffn_hidden_size: 48}}
mistral4: {num_query_groups: null, norm_eps: 1.0e-6, latent_attention: *latent, moe: {num_experts: 8, top_k: 3,
  ffn_hidden_size: 24, shared_ffn_hidden_size: 48}, yarn: {factor: 4.0, original_max_position_embeddings: 16,
  beta_fast: 4.0}, query_scaling: {factor: 0.3, length: 16}}
nanochat: {activation: squared_relu, norm_weights: false, embedding_norm: true, qk_norm: rotated, logit_softcap: 15.0}
llama4: {layer_kinds: {local: {mixer: {attention_chunk: 5, qk_norm: rotated}, ffn: {kind: mlp}}, full: {mixer:
  {position_embedding: none, query_scaling: {factor: 0.3, length: 4, first_position: 1}}, ffn: {kind: moe}}}, pattern:
  [local * 2, full], moe: {num_experts: 4, ffn_hidden_size: 24, shared_ffn_hidden_size: 24, score: sigmoid, normalize:
  false, scale_inputs: true}}
gpt2: {num_query_groups: null, position_embedding: learned, normalization: layernorm, activation: gelu_tanh,
  linear_bias: true, tie_embeddings: true}
nemotron-h-latents: {num_layers: 4, activation: squared_relu, position_embedding: none, layer_kinds: {mamba: {mixer:
  *mamba, ffn: none}, moe: {mixer: none, ffn: moe}, attention: {ffn: none}}, pattern: [mamba, moe, attention, moe],
  moe: {num_experts: 6, top_k: 2, ffn_hidden_size: 24, latent_size: 20, shared_ffn_hidden_size: 16, score: sigmoid,
  selection_bias: true}}
""")
"""A small model of each Hugging Face family: what differs from `FAMILY`."""
del FAMILIES[".shared"]
AXES = {
    "tp2": TP2,
    "cp2": ["parallel.context=2"],
    "pp2": PP2,
    "ep2": EP2,
}
FAMILY_LAYOUTS = {
    "tp2": [
        "qwen3-next", "nemotron-h", "nemotron-h-latents", "kimi-linear", "lfm2-moe", "deepseek-v3", "deepseek-v32",
        "deepseek-v4", "gemma4", "gemma4-experts", "llama4", "qwen3-moe",
    ],
    "cp2": [
        "qwen3-next", "bamba", "kimi-linear", "lfm2-moe", "deepseek-v2", "deepseek-v32", "deepseek-v4", "gemma4",
        "gemma2", "llama4", "smollm3",
    ],
    "pp2": ["nemotron-h", "deepseek-v4", "mistral4", "olmo-hybrid"],
    "ep2": ["nemotron-h-latents", "deepseek-v4", "llama4"],
}  # fmt: skip
"""Families that also train on two ranks, by layout."""

LARGEST = {
    "num_layers": 4, "hidden_size": 128, "ffn_hidden_size": 128, "shared_ffn_hidden_size": 64, "vocab_size": 384,
    "num_attention_heads": 4, "num_query_groups": 2, "head_dim": 32, "sliding_window": 16,
    "q_rank": 64, "kv_rank": 32, "nope_head_dim": 16, "rope_head_dim": 8, "value_head_dim": 16,
    "index_heads": 4, "index_head_dim": 16, "num_experts": 8, "top_k": 4, "num_groups": 4, "top_groups": 2,
    "num_heads": 8, "num_key_heads": 2, "num_value_heads": 4, "state_size": 16, "compress_rate": 8,
    "original_max_position_embeddings": 64,
    "tensor": 2, "pipeline": 2, "context": 2, "expert": 2,
    "steps": 2, "seq_length": 64, "micro_batch_size": 2, "global_batch_size": 4, "eval_interval": 2,
    "eval_steps": 1, "interval": 2, "max_tokens": 8, "group_size": 4, "texts_at_once": 4, "num_workers": 0,
    "warmup_steps": 1, "decay_steps": 1, "decay_until": 4,
}  # fmt: skip
"""Largest numbers of a preset, by the last part of the key."""
WIDTHS: dict[str, dict[str, int]] = {
    "compressed_attention": {"q_rank": 64, "output_groups": 2, "output_rank": 32},
    "gated_delta_net": {"key_head_dim": 32, "value_head_dim": 32},
}
"""Widths of a preset's mixers that it leaves to their defaults, which are large, by kind."""
REPLACED = {
    "init_from": "models/small", "teacher": "models/small", "reward": "rewards.py:exact",
    "tokenizer": {"kind": "bytes"},
}  # fmt: skip
"""Values of a preset that are set, if the preset sets them."""
PRESETS: dict[str, tuple[int, list[str]]] = {
    "configs/bert-base": (2, WORDS),
    "configs/deepseek-v3": (4, []),
    "configs/deepseek-v3.2": (4, []),
    "configs/deepseek-v4-flash": (4, []),
    "configs/gemma2-9b": (4, []),
    "configs/gpt-oss-20b": (2, []),
    "configs/gpt2-125m": (2, []),
    "configs/gpt2-125m-fp16": (1, []),
    "configs/kimi-linear-48b-a3b": (2, []),
    "configs/llama3-405b": (4, []),
    "configs/llama3-70b": (4, []),
    "configs/llama3-8b": (4, []),
    "configs/llama3-8b-distillation": (4, []),
    "configs/llama3-8b-dpo": (4, []),
    "configs/llama3-8b-grpo": (2, ["training.global_batch_size=8"]),
    "configs/llama3-8b-sft": (4, []),
    "configs/llama3-8b-stages": (4, ["training.seq_length=32", "training.steps=4"]),
    "configs/mixtral-8x7b": (4, []),
    "configs/nemotron-3-nano-30b": (2, []),
    "configs/olmo2-7b": (4, []),
    "configs/quickstart": (4, []),
    "configs/qwen3-30b-a3b": (4, []),
    "configs/qwen3-next-80b-a3b": (4, []),
    "configs/t5-base": (2, WORDS),
    "examples/grpo_arithmetic/grpo": (2, ["training.global_batch_size=8"]),
    "examples/grpo_arithmetic/warm_up": (1, []),
}
"""Configs of the repository, each with a number of ranks and overrides of the small copy."""
MODULES: dict[str, Callable[[Any], Any]] = {
    "Linear": lambda nn: nn.Linear(64, 96, device="cpu"),
    "LayerNormLinear": lambda nn: nn.LayerNormLinear(64, 96, device="cpu"),
    "LayerNormMLP": lambda nn: nn.LayerNormMLP(64, 128, activation="swiglu", device="cpu"),
    "LayerNormMLP-gelu": lambda nn: nn.LayerNormMLP(64, 128, device="cpu"),
    "LayerNorm": lambda nn: nn.LayerNorm(64, device="cpu"),
    "RMSNorm": lambda nn: nn.RMSNorm(64, device="cpu"),
    "TransformerLayer": lambda nn: nn.TransformerLayer(
        64, 128, 4, hidden_dropout=0.0, attention_dropout=0.0, device="cpu"
    ),
    "TransformerLayer-llama": lambda nn: nn.TransformerLayer(
        64, 128, 4, num_gqa_groups=2, normalization="RMSNorm", activation="swiglu", bias=False,
        hidden_dropout=0.0, attention_dropout=0.0, device="cpu",
    ),
}  # fmt: skip
"""Functions that build the modules of the cases nn/..., given the package `megafp8.nn`."""
PLANS = {"deepseek-v3": 512, "gemma2-9b": 16, "gpt-oss-20b": 8, "llama3-70b": 64, "llama3-8b": 8,
         "mixtral-8x7b": 32, "olmo2-7b": 8, "qwen3-30b-a3b": 16, "t5-base": 8}  # fmt: skip
"""Numbers of GPUs by config; the others need a tokenizer's file."""
PROOFS: dict[str, tuple[int, list[str]]] = {
    "tp2-cp2": (4, [*DELAYED, *TP2, "parallel.context=2"]),
    "experts-pp2": (4, [*DEEPSEEK, *PP2, *EP2, *ZERO]),
}
"""Compositions that are proven, with their ranks."""


def training_cases() -> dict[str, Case]:
    """Return the cases that train a model, by name."""
    cases = {
        **{f"{r}/{x}": (ranks, [*keys, *y]) for r, keys in RECIPES.items() for x, (ranks, y) in LAYOUTS.items()},
        **MORE,
        **{f"kinds/{name}": case for name, case in KINDS.items()},
        **{f"keys/{name}": case for name, case in KEYS.items()},
    }  # fmt: skip
    families = {name: model_keys(FAMILY | model) for name, model in FAMILIES.items()}
    return {
        **{
            name: Case(
                *case,
                parts=(STEPS - 1, STEPS) if name in RESUMED else (STEPS,),
                converts=name in ("kinds/bert", "kinds/t5"),
            )
            for name, case in cases.items()
        },
        **{f"families/{name}": Case(1, keys, "family.yaml", converts=True) for name, keys in families.items()},
        **{
            f"families/{name}/{layout}": Case(2, [*families[name], *AXES[layout]], "family.yaml")
            for layout, names in FAMILY_LAYOUTS.items()
            for name in names
        },
        **{
            f"presets/{Path(path).name}": Case(ranks, overrides, f"{path}.yaml")
            for path, (ranks, overrides) in PRESETS.items()
        },
    }


def model_keys(model: Mapping[str, Any]) -> list[str]:
    """Return a section model as overrides on the command line."""
    return [f"model.{key}={json.dumps(value)}" for key, value in model.items()]


# --- files that the cases read -------------------------------------------------------------------------------------


def write_inputs(folder: Path) -> None:
    """Write the configs, and the data, tokenizer and model that they name, to `folder`, the working folder."""
    (folder / "base.yaml").write_text(yaml.safe_dump(BASE))
    short = {"training": {"steps": 2, "global_batch_size": 2, "eval_interval": 0}, "optimizer": {"warmup_steps": 1}}
    (folder / "family.yaml").write_text(yaml.safe_dump(merged(BASE, short)))
    (folder / "prompts.txt").write_text("the first of two\nand\n")
    write_words(folder)
    write_texts(folder)
    write_documents(folder / "data/text", np.random.default_rng(0))
    for path, (_, overrides) in PRESETS.items():
        preset = small_preset(ROOT / f"{path}.yaml")
        write_data_of(preset, folder, "data/words" in " ".join(overrides))
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / f"{path}.yaml").write_text(yaml.safe_dump(preset))
    megafp8("pretrain", "--config", "family.yaml", *model_keys(FAMILY), "name=small")
    megafp8("convert", "--load", "runs/small", "--save", "models/small", "--to", "hf")


def write_documents(path: Path, random: np.random.Generator) -> None:
    """Write a Megatron .bin/.idx data set of documents of random bytes, which end with END_OF_DOCUMENT."""
    # Random walks with small steps, so that there is something to learn.
    documents = [
        np.append(random.integers(1, 8, length).cumsum() % END_OF_DOCUMENT, END_OF_DOCUMENT).astype(np.uint16)
        for length in random.integers(20, 200, 400)
    ]
    sizes = np.array([len(document) for document in documents], np.int32)
    pointers = np.concatenate([[0], np.cumsum(sizes[:-1].astype(np.int64) * 2)]).astype(np.int64)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".bin").write_bytes(np.concatenate(documents).tobytes())
    header = struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, 8, len(sizes), len(sizes) + 1)
    marks = np.arange(len(sizes) + 1, dtype=np.int64)
    path.with_suffix(".idx").write_bytes(header + sizes.tobytes() + pointers.tobytes() + marks.tobytes())


def write_words(folder: Path) -> None:
    """Write words.json, a tokenizer with the special tokens of BERT and T5 and with letters as words."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    letters = "abcdefghijklmnopqrstuvwxyz"
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "</s>", *(f"<extra_id_{i}>" for i in range(40))]
    words = [*special, *letters, *(f"##{letter}" for letter in letters), "."]
    tokenizer = Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    tokenizer.save(str(folder / "words.json"))


def write_texts(folder: Path) -> None:
    """Write random texts as JSON lines: documents, answers, pairs of answers and prompts; and a reward of answers."""
    random = np.random.default_rng(1)

    def sentence() -> str:
        return " ".join("".join(map(chr, random.integers(97, 103, n))) for n in random.integers(1, 6, 8)) + "."

    records: dict[str, list[dict[str, Any]]] = {
        "text": [{"text": " ".join(sentence() for _ in range(6))} for _ in range(200)],
        "completion": [{"prompt": sentence()[:12], "completion": sentence()[:20]} for _ in range(200)],
        "preference": [
            {"prompt": sentence()[:12], "chosen": sentence()[:16], "rejected": sentence()[:16]} for _ in range(200)
        ],
        "prompts": [{"prompt": sentence()[:12], "answer": i} for i in range(32)],
    }
    for name, lines in records.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "rewards.py").write_text(
        "def exact(prompts, completions, answer):\n"
        "    return [float(sum(map(ord, x)) % (2 + y % 3)) for x, y in zip(completions, answer)]\n"
    )
    megafp8("preprocess", "--input", "text.jsonl", "--output-prefix", "data/words", *words_flags())


def words_flags() -> list[str]:
    """Return the flags of `megafp8 preprocess` for words.json."""
    return ["--tokenizer", "huggingface", "--tokenizer-path", "words.json", "--tokenizer-end-token", "</s>"]


def write_data_of(preset: Mapping[str, Any], folder: Path, of_words: bool) -> None:
    """Write the data sets that a preset names, of the kind that it reads."""
    data = preset["data"]
    style = "preference" if "dpo" in data else "completion" if "loss_on" in data else "text"
    stages = [stage.get("overrides", {}).get("data.train", ()) for stage in preset.get("stages", ())]
    for i, name in enumerate(dict.fromkeys([*data["train"], *(name for train in stages for name in train)])):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if "grpo" in data:
            path.write_text((folder / "prompts.jsonl").read_text())
        elif style == "text" and not of_words:
            write_documents(path, np.random.default_rng(i))
        elif not path.with_suffix(".idx").exists():
            flags = words_flags() if of_words else ["--tokenizer", "bytes", "--style", style]
            sentences = ["--split-sentences", "--no-append-eod"] if data.get("packing") == "sentences" else []
            megafp8("preprocess", "--input", f"{style}.jsonl", "--output-prefix", name, *flags, *sentences)


def small_preset(path: Path) -> dict[str, Any]:
    """Return the config in a file, with the file that it is based on, with small numbers."""
    text = yaml.safe_load(path.read_text())
    tree = shrunk(text)
    if "base" in tree:
        tree = merged(small_preset(path.parent / tree.pop("base")), tree)
    if "pattern" in (model := tree["model"]):
        model["pattern"] = list(dict.fromkeys(kind.partition(" * ")[0] for kind in model["pattern"]))
    checkpoint = BASE["checkpoint"] | {"interval": LARGEST["interval"]}
    settings = {"device": "cpu", "run_dir": "runs", "logging": BASE["logging"], "checkpoint": checkpoint}
    return merged(tree, settings)


def shrunk(value: Any, key: str = "") -> Any:
    """Return a part of a config, named by the last part of `key`, with small numbers and no files from elsewhere."""
    name = key.rpartition(".")[2]
    if name in REPLACED and value is not None:
        return REPLACED[name]
    if name == "layers_per_stage" and isinstance(value, list):
        return [1, 3]
    if name == "stages":
        return [shrunk(stage) | {"begin": i} for i, stage in enumerate(value)]
    if isinstance(value, dict):
        widths = WIDTHS.get(value.get("kind", ""), {})
        return {**widths, **{inner: shrunk(x, inner) for inner, x in value.items()}}
    if isinstance(value, int) and not isinstance(value, bool):
        return min(value, LARGEST.get(name, value))
    return value


def merged(tree: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config with the keys of another one, section by section."""
    both = {
        key: merged(tree[key], x) if isinstance(x, dict) and isinstance(tree.get(key), dict) else x
        for key, x in changes.items()
    }
    return {**tree, **both}


# --- what a rank runs ------------------------------------------------------------------------------------------------


class Refused(Exception):
    """A command says that what it was asked to do cannot be done."""


def megafp8(*words: str | Path) -> str:
    """Run `python -m megafp8` in this process, where torch stays loaded, and return what it prints.

    Raises:
        Refused: It ended with exit code 2.
        RuntimeError: It failed.
    """
    sys.argv = ["megafp8", *map(str, words)]
    output, errors, code = io.StringIO(), io.StringIO(), None
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        try:
            runpy.run_module("megafp8", run_name="__main__", alter_sys=True)
        except SystemExit as end:
            code = end.code
        except Exception:
            code = traceback.format_exc()
    if code:
        text = f"megafp8 {' '.join(sys.argv[1:])} ended with {code}\n{output.getvalue()}{errors.getvalue()[-4000:]}"
        raise Refused(text) if code == 2 else RuntimeError(text)
    return output.getvalue()


def trained(name: str, case: Case) -> dict[str, Any]:
    """Train on every rank, and return the results on the first one."""
    run_name = name.replace("/", ".")
    for steps, port in zip(case.parts, os.environ["PORTS"].split(), strict=False):
        os.environ["MASTER_PORT"] = port
        parts = [f"training.steps={steps}"] if case.parts != (STEPS,) else []
        megafp8("pretrain", "--config", case.config, *case.overrides, *parts, f"name={run_name}")
    if os.environ["RANK"] != "0":
        return {}
    os.environ |= {"WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}  # what follows runs on this rank alone
    run = Path("runs", run_name)
    return {
        "metrics": metrics_of(run),
        "checkpoints": {path.name: checkpoint_hash(path) for path in sorted((run / "checkpoints").glob("step_*"))},
        "texts": texts_of(run),
        **({"converted": conversions(run)} if case.converts else {}),
    }


UNSTEADY = re.compile("second|time|date|tflops|mfu|memory|slowest")
"""Metrics that differ from run to run."""


def metrics_of(run: Path) -> dict[str, list[Any]]:
    """Return the values of each metric of a run, by step."""
    series: dict[str, list[Any]] = {}
    for line in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()):
        for key, value in line.items():
            if value is not None and not UNSTEADY.search(key):
                series.setdefault(key, []).append(value)
    return series


def texts_of(run: Path) -> list[Any] | str:
    """Return the tokens and log-probabilities with which a run's model continues two prompts."""
    texts: list[Any] = []
    try:
        for temperature in ("0", "1"):
            lines = megafp8(
                "generate", run, "--file", "prompts.txt", "--json", "--max-tokens", "12", "--temperature", temperature,
                "--seed", "3", "--ignore-end", "--device", "cpu",
            )  # fmt: skip
            texts += [[line["tokens"], line["logprobs"]] for line in map(json.loads, lines.splitlines())]
    except Refused:
        return "refused"
    return texts


def conversions(run: Path) -> dict[str, str]:
    """Return hashes of a run's model in the other formats, and of what these are converted back to."""
    hashes: dict[str, str] = {}
    for format in ("hf", "megatron"):
        folder = Path("converted", f"{run.name}.{format}")
        back = folder.with_name(f"{folder.name}.native")
        try:
            megafp8("convert", "--load", run, "--save", folder, "--to", format, "--weights-only")
            hashes[format] = folder_hash(folder)
            megafp8("convert", "--load", folder, "--save", back, "--to", "native")
            hashes[f"{format} to native"] = checkpoint_hash(next(back.rglob(".metadata")).parent)
        except Refused:
            hashes.setdefault(format, "refused")
    return hashes


def checkpoint_hash(path: Path) -> str:
    """Return a hash of the tensors of a checkpoint of ours."""
    reader = dcp.FileSystemReader(path)
    entries = reader.read_metadata().state_dict_metadata
    tensors = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in entries.items()}
    dcp.load(tensors, storage_reader=reader, no_dist=True)
    return tensors_hash(tensors)


def folder_hash(folder: Path) -> str:
    """Return a hash of config.json and the tensors of a checkpoint of Hugging Face or Megatron-LM."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.name == "config.json":
            digest.update(json.dumps(json.loads(path.read_text()), sort_keys=True).encode())
        elif path.suffix == ".safetensors":
            digest.update(tensors_hash(load_file(path)).encode())
        elif path.suffix == ".pt":
            content = torch.load(path, weights_only=False)
            digest.update(tensors_hash(dict(named_tensors(content))).encode())
    return digest.hexdigest()


def named_tensors(tree: Any, prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of nested dicts and lists, each with its path."""
    if isinstance(tree, torch.Tensor):
        yield prefix, tree
    elif isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from named_tensors(value, f"{prefix}.{key}")
    elif isinstance(tree, list | tuple):
        for i, value in enumerate(tree):
            yield from named_tensors(value, f"{prefix}.{i}")


def tensors_hash(tensors: Mapping[str, torch.Tensor]) -> str:
    """Return a SHA-256 of names, shapes, dtypes and values, in the order of the names."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def module_results(name: str, recipe: str | None) -> dict[str, str]:
    """Return hashes of output and gradients of a module in a second step, which uses the scales of the first step."""
    from megafp8 import fp8, nn

    recipes = {"delayed": fp8.DelayedScaling(amax_history_len=4), "current": fp8.CurrentScaling()}
    torch.manual_seed(1)
    module, results = MODULES[name](nn), dict[str, torch.Tensor | None]()
    for _ in range(2):
        module.zero_grad()
        x = torch.randn(32, 2, 64).requires_grad_()
        with fp8.autocast(enabled=recipe is not None, recipe=recipes.get(recipe or "")):
            y = module(x)
        y.square().sum().backward()
        if recipe is not None:
            fp8.end_step(module)
        results = {"y": y.detach(), "x": x.grad, **{key: p.grad for key, p in module.named_parameters()}}
    return {key: tensors_hash({key: value}) for key, value in results.items() if value is not None}


def plan_of(config: str, gpus: int) -> Any:
    """Return what `megafp8 plan` predicts for a config of the repository."""
    return json.loads(megafp8("plan", "--config", ROOT / f"configs/{config}.yaml", "--gpus", str(gpus), "--json"))


def proof_of(name: str, ranks: int, overrides: Sequence[str]) -> list[Any]:
    """Return the rows of the certificate of a composition."""
    path = Path(f"{name}.certificate.json")
    megafp8("prove", "base.yaml", "--ranks", str(ranks), "--out", path, *overrides)
    return [[row[key] for key in ("check", "status", "difference")] for row in json.loads(path.read_text())["rows"]]


# --- processes -------------------------------------------------------------------------------------------------------

Task = tuple[int, Callable[..., Any], tuple[Any, ...]]
"""Number of ranks, function that each of them runs, and its arguments."""


def tasks() -> dict[str, Task]:
    """Return all cases by name."""
    return {
        **{name: (case.ranks, trained, (name, case)) for name, case in training_cases().items()},
        **{
            f"nn/{name}/{recipe}": (1, module_results, (name, recipe))
            for name in MODULES
            for recipe in ((None,) if name in ("LayerNorm", "RMSNorm") else (None, "delayed", "current"))
        },
        **{f"plan/{config}": (1, plan_of, (config, gpus)) for config, gpus in PLANS.items()},
        **{f"prove/{name}": (1, proof_of, (name, *proof)) for name, proof in PROOFS.items()},
    }


def _serve(pipe: Connection, folder: str) -> None:
    """Run the calls that come through the pipe, and send for each whether it succeeded, and its result or why not."""
    from matplotlib.figure import Figure

    Figure.savefig = lambda *_, **__: None  # of loss.png, which takes as long as a step
    os._exit = sys.exit  # type: ignore[assignment]  # so that what a failing command prints is kept
    sys.path.insert(0, str(ROOT))
    os.environ |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    warnings.filterwarnings("ignore", "torch.distributed is disabled")  # checkpoints are read without it
    os.chdir(folder)
    while True:
        rank, ranks, ports, function, arguments = pipe.recv()
        places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
        os.environ.update({key: str(value) for key, value in places.items()}, MASTER_ADDR="127.0.0.1")
        os.environ["PORTS"], os.environ["MASTER_PORT"] = ports, ports.split()[0]
        torch.use_deterministic_algorithms(False)
        torch.set_num_threads(1)  # a case that generates texts may have changed it
        try:
            pipe.send((True, function(*arguments)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))


class Rank:
    """A process in which torch stays loaded from case to case."""

    def __init__(self, folder: str) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, folder))
        self.process.start()
        theirs.close()

    def answer(self) -> tuple[bool, Any]:
        """Return whether the call succeeded, and its result or why it did not."""
        try:
            return self.pipe.recv()
        except (EOFError, ConnectionError):
            return False, "the process died"

    def kill(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.join()


class Team:
    """The ranks that run a case, with their answers so far."""

    def __init__(self, ranks: list[Rank], function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        # A resumed run has its own port: on the first one, a fast rank may still find the store of the first part.
        with socket.socket() as first, socket.socket() as second:
            for probe in (first, second):
                probe.bind(("127.0.0.1", 0))
            ports = f"{first.getsockname()[1]} {second.getsockname()[1]}"
        for i, rank in enumerate(ranks):
            rank.pipe.send((i, len(ranks), ports, function, arguments))
        self.ranks, self.answers = ranks, dict[int, tuple[bool, Any]]()
        self.deadline = time.monotonic() + CASE_SECONDS

    def has_ended(self) -> bool:
        """Take the answers that have arrived. After a failure the other ranks have ten more seconds."""
        for i, rank in enumerate(self.ranks):
            if i not in self.answers and rank.pipe.poll():
                self.answers[i] = rank.answer()
                if not self.answers[i][0]:
                    self.deadline = min(self.deadline, time.monotonic() + 10)
        return len(self.answers) == len(self.ranks) or time.monotonic() > self.deadline

    def result(self) -> Any:
        """Return what the first rank returned. RuntimeError with the output of the ranks that failed or hang."""
        answers = [self.answers.get(i, (False, "did not finish")) for i in range(len(self.ranks))]
        failures = [f"rank {i}: {value}" for i, (succeeded, value) in enumerate(answers) if not succeeded]
        if failures:
            raise RuntimeError("\n".join(failures))
        return answers[0][1]


class Pool:
    """Up to PROCESSES ranks, which start when a case first needs them.

    Args:
        folder: Working folder of the ranks.
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.idle: list[Rank] = []
        self.running: dict[str, Team] = {}

    def results(self, chosen: Mapping[str, Task]) -> Iterator[tuple[str, Any]]:
        """Run cases, several at once and those with many ranks first; yield names and results or RuntimeErrors."""
        waiting = sorted(chosen, key=lambda name: -chosen[name][0])
        while waiting or self.running:
            busy = sum(len(team.ranks) for team in self.running.values())
            if waiting and (ranks := chosen[waiting[0]][0]) <= PROCESSES - busy:
                team = [self.idle.pop() if self.idle else Rank(self.folder) for _ in range(ranks)]
                name = waiting.pop(0)
                self.running[name] = Team(team, *chosen[name][1:])
                continue
            wait([rank.pipe for team in self.running.values() for rank in team.ranks], timeout=0.1)
            for name in [name for name, team in self.running.items() if team.has_ended()]:
                yield name, self.result(self.running.pop(name))

    def result(self, team: Team) -> Any:
        """Return the result of a case that has ended, or the RuntimeError; ranks that failed are replaced."""
        try:
            result = team.result()
        except RuntimeError as error:
            for rank in team.ranks:
                rank.kill()
            return error
        self.idle += team.ranks
        return result

    def close(self) -> None:
        """End the processes."""
        for rank in [*self.idle, *(rank for team in self.running.values() for rank in team.ranks)]:
            rank.kill()


# --- recordings ------------------------------------------------------------------------------------------------------


def chosen_of(names: Iterable[str], only: Sequence[str], sample: str) -> list[str]:
    """Return the names that contain one of `only`, if there are any, and of these the I-th of every N (`sample`)."""
    first, every = map(int, sample.split("/"))
    return [name for name in names if not only or any(pattern in name for pattern in only)][first - 1 :: every]


def record(path: Path, only: Sequence[str], sample: str, add: bool) -> int:
    """Run cases, write their results to `path` after each one, and return how many failed."""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    about = {
        "commit": commit.stdout.strip(),
        "torch": torch.__version__,
        "processor": platform.processor() or platform.machine(),
    }
    cases = json.loads(path.read_text())["cases"] if add and path.exists() else {}
    names = [name for name in chosen_of(tasks(), only, sample) if "failed" in cases.get(name, {"failed": ""})]
    chosen, failed = {name: tasks()[name] for name in names}, list[str]()
    with tempfile.TemporaryDirectory(prefix="bitwise-gate-", ignore_cleanup_errors=True) as folder:
        pool = Pool(folder)
        try:
            for _, inputs in pool.results({"inputs": (1, write_inputs, (Path(folder),))}):
                if isinstance(inputs, RuntimeError):
                    raise inputs
            for name, result in tqdm(pool.results(chosen), total=len(chosen), unit="case"):
                if isinstance(result, RuntimeError):
                    failed.append(name)
                    tqdm.write(f"{name}: {result}")
                cases[name] = {"failed": str(result).strip().splitlines()[-1]} if name in failed else result
                path.write_text(json.dumps({"about": about, "cases": cases}, indent=1))
        finally:
            pool.close()
    print(f"{len(chosen)} cases recorded in {path}, {len(failed)} failed: {', '.join(failed)}")
    return len(failed)


def compare(before: Path, after: Path) -> int:
    """Print every case of both recordings that differs, and return how many do."""
    old, new = (json.loads(path.read_text()) for path in (before, after))
    if old["about"]["torch"] != new["about"]["torch"]:
        print(f"recorded with torch {old['about']['torch']} and {new['about']['torch']}: bits may differ by that alone")
    for where, more, less in (("before", old, new), ("after", new, old)):
        if missing := sorted(more["cases"].keys() - less["cases"].keys()):
            print(f"only {where}: {len(missing)} cases, {', '.join(missing[:10])}{', ...' * (len(missing) > 10)}")
    both = sorted(old["cases"].keys() & new["cases"].keys())
    differing = [name for name in both if old["cases"][name] != new["cases"][name]]
    for name in differing:
        for line in differences(old["cases"][name], new["cases"][name]):
            print(f"{name}{line}")
    print(f"{len(both) - len(differing)} cases identical to the last bit, {len(differing)} differ")
    return len(differing)


def differences(old: Any, new: Any) -> Iterator[str]:
    """Yield each value that differs between two results, with its path."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in dict.fromkeys([*old, *new]):
            yield from (f" {key}{line}" for line in differences(old.get(key), new.get(key)))
    elif old != new:
        yield f": {old} -> {new}"


def main() -> int:
    """Run the command, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record", help="run cases and write their results")
    recording.add_argument("output", type=Path)
    recording.add_argument("--only", nargs="+", default=[], metavar="PART", help="cases whose name contains a part")
    recording.add_argument("--sample", default="1/1", metavar="I/N", help="the I-th of every N of these")
    recording.add_argument("--add", action="store_true", help="run only cases that the file lacks or that failed")
    comparing = commands.add_parser("compare", help="compare two recordings")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    arguments = parser.parse_args()
    if arguments.command == "record":
        return int(record(arguments.output, arguments.only, arguments.sample, arguments.add) > 0)
    return int(compare(arguments.before, arguments.after) > 0)


if __name__ == "__main__":
    sys.exit(main())
