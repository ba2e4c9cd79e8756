"""The whole model against its unsharded float64 twin: loss of each token and every gradient, in every layout."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from megafp8.batch import Batch
from megafp8.config import RopeScaling
from megafp8.config.schema import ModelConfig
from megafp8.fp8 import Fp8Manager
from megafp8.layers.context import BuildContext
from megafp8.layers.head.op import LabelLosses
from megafp8.layers.recompute import BlockMemory
from megafp8.models.gpt import GPTStage
from megafp8.parallel.collectives import all_reduce
from megafp8.parallel.parallel_state import Group, initialize_model_parallel
from megafp8.parallel.tp_overlap import default_overlap
from tests.marks import slow_but
from tests.models.twin import shares_of_the_step_before, twin_loss
from tests.models.weights import gradients, randomize
from tests.world import World

LLAMA: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "num_query_groups": 4,
    "ffn_hidden_size": 24,
    "vocab_size": 29,
    "vocab_multiple": 8,
}
GPT2: dict[str, Any] = LLAMA | {
    "position_embedding": "learned",
    "normalization": "layernorm",
    "activation": "gelu_tanh",
    "linear_bias": True,
    "tie_embeddings": True,
}
DROPOUT = {"hidden_dropout": 0.2, "attention_dropout": 0.3}
SCALING = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16)
YARN = {"factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 4.0, "truncate": False}
LONGROPE = {
    "short_factor": [1.0, 2.0],
    "long_factor": [1.5, 7.0],
    "factor": 8.0,
    "original_max_position_embeddings": 12,  # sequences of test_context_parallel are longer
}
LATENT = {"q_rank": 10, "kv_rank": 6, "nope_head_dim": 4, "rope_head_dim": 4, "value_head_dim": 3}
SPARSE = {"index_heads": 3, "index_head_dim": 6, "top_k": 3}
SHARED_INDEXER = {"kind": "sparse_latent_attention", "shared_indexer": True}
DELTA_NET = {
    "kind": "gated_delta_net", "num_key_heads": 4, "num_value_heads": 8, "key_head_dim": 4, "value_head_dim": 3,
    "conv_kernel_size": 3,
}  # fmt: skip
DELTA_PRODUCT = DELTA_NET | {"householder_steps": 2, "allow_neg_eigval": True}
KIMI_DELTA = {"kind": "kimi_delta_attention", "num_heads": 4, "head_dim": 4, "conv_kernel_size": 3}
DELTA_NET_2 = KIMI_DELTA | {"erase_and_write_gates": True}
RWKV7 = {
    "kind": "rwkv7", "num_heads": 4, "head_dim": 4, "decay_rank": 3, "rate_rank": 5, "gate_rank": 2,
}  # fmt: skip
MAMBA1 = {"kind": "mamba1", "inner_size": 24, "step_rank": 3, "state_size": 5, "conv_kernel_size": 3}
RG_LRU = {"kind": "rg_lru", "inner_size": 24, "num_heads": 4, "conv_kernel_size": 3}
MAMBA2 = {
    "kind": "mamba2", "num_heads": 8, "head_dim": 3, "state_size": 5, "num_groups": 4, "conv_kernel_size": 3,
    "min_step": 0.5, "max_step": 1.0,
}  # fmt: skip
SHARED_ATTENTION = MAMBA2 | {"kind": "shared_attention", "adapter_rank": 3}
FULL_KEYS = {
    "num_attention_heads": 8, "num_query_groups": 4, "head_dim": 8, "partial_rotary_factor": 0.5,
    "proportional_rope": True,
}  # fmt: skip
COMPRESSED = {"kind": "compressed_attention", "q_rank": 10, "output_groups": 4, "output_rank": 3, "index_heads": 3,
              "index_head_dim": 6}  # fmt: skip
COMPRESSED_MODEL = LLAMA | {"head_dim": 6, "partial_rotary_factor": 2 / 3, "sliding_window": 3}
BLOCK_SPARSE = {"kind": "block_sparse_attention", "block_size": 2, "top_k": 2, "kl_loss": 0.3}
CSA = {
    "mixer": COMPRESSED
    | {"compress_rate": 2, "top_k": 2, "kl_loss": 0.3, "rope_theta": 100.0, "yarn": YARN | {"mscale": 0}}
}
HCA = {"mixer": COMPRESSED | {"compress_rate": 3}}
MODELS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "llama-gqa-rope-scaling": LLAMA
    | {
        "num_attention_heads": 8,
        "rope_scaling": SCALING,
        "head_dim": 8,
        "partial_rotary_factor": 0.5,
        "logits_scaling": 3,
    },
    "tied-mtp": LLAMA | {"tie_embeddings": True, "mtp_num_layers": 1, "head_dim": 12, "yarn": YARN},
    "gpt2": GPT2 | DROPOUT,
    "gpt2-untied-gelu": GPT2 | {"tie_embeddings": False, "activation": "gelu"},
    "geglu": LLAMA | {"activation": "geglu"},
    "gemma": LLAMA
    | DROPOUT
    | {
        "activation": "geglu_tanh",
        "linear_bias": True,
        "norm_position": "both",
        "zero_centered_gamma": True,
        "embedding_multiplier": 4.0,
        "attention_scale": 0.4,
        "attention_softcap": 1.5,
        "logit_softcap": 2.0,
        "sliding_window": 3,
        "full_attention_layers": [1],
        "rope_local_theta": 100.0,
        "rope_interpolation_factor": 8.0,
        "tie_embeddings": True,
    },
    "qwen": LLAMA
    | DROPOUT
    | {"qkv_bias": True, "qk_norm": True, "attention_sinks": True, "activation": "clamped_swiglu"}
    | {"proj_bias": True}
    | {"longrope": LONGROPE},
    "olmo-window-mtp": LLAMA
    | DROPOUT
    | {
        "norm_position": "output",
        "qk_norm": "projection",
        "zero_centered_gamma": True,
        "sliding_window": 3,
        "full_attention_layers": [1],
        "mtp_num_layers": 2,
    },
    "parallel-block": LLAMA
    | DROPOUT
    | {
        "parallel_block": True,
        "position_embedding": "none",
        "qk_norm": "projection",
        "residual_multiplier": 0.3,
        "activation": "xielu",
    },
    "shared-norm": LLAMA
    | DROPOUT
    | {
        "parallel_block": "shared_norm",
        "normalization": "layernorm_no_bias",
        "linear_bias": "mlp",
        "output_bias": True,
        "logits_scaling": 3,
    },
    "shared-norm-both": LLAMA
    | {
        "parallel_block": "shared_norm",
        "norm_position": "both",
        "normalization": "layernorm_no_bias",
        "zero_centered_gamma": True,
        "linear_bias": "attention",
        "tie_embeddings": True,
        "output_bias": True,
    },
    "bloom": GPT2
    | {
        "position_embedding": "alibi",
        "embedding_norm": True,
        "num_attention_heads": 12,
        "head_dim": 2,
        "activation": "relu",
    },
    "pattern": LLAMA
    | {
        "layer_kinds": {
            "local": {"mixer": {"sliding_window": 3, "rope_theta": 100.0, "head_dim": 8}},
            "full": {"mixer": {"position_embedding": "none"}, "ffn": {"ffn_hidden_size": 32, "activation": "gelu"}},
        },
        "pattern": ["local", "full"],
    },
    "shared-keys": LLAMA
    | {
        "num_layers": 4,
        "norm_position": "both",
        "activation": "geglu_tanh",
        "qk_norm": True,
        "value_norm": True,
        "attention_scale": 1.0,
        "layer_scalar": True,
        "per_layer_embedding": {"width": 6},
        "layer_kinds": {
            "local": {"mixer": {"sliding_window": 3, "rope_theta": 100.0, "head_dim": 6}},
            "full": {"mixer": FULL_KEYS | {"keys_as_values": True}},
            "local-shared": {
                "mixer": {"sliding_window": 3, "rope_theta": 100.0, "head_dim": 6, "kv_layer": 0},
                "ffn": {"ffn_hidden_size": 32},
            },
            "full-shared": {"mixer": FULL_KEYS | {"kv_layer": 1}},
        },
        "pattern": ["local", "full", "local-shared", "full-shared"],
    },
    "shared-keys-of-a-stage": LLAMA
    | {
        "num_layers": 4,
        "value_norm": True,
        "layer_scalar": True,
        "tie_embeddings": True,
        "layer_kinds": {"own": {"mixer": FULL_KEYS}, "shared": {"mixer": FULL_KEYS | {"kv_layer": 2}}},
        "pattern": ["own", "own", "own", "shared"],
    },
    "hybrid": LLAMA
    | DROPOUT
    | {
        "output_gate": True,
        "layer_kinds": {
            "linear": {"mixer": DELTA_NET | {"allow_neg_eigval": True, "norm_eps": 0.1}},
            "local": {"norm_position": "output", "mixer": {"sliding_window": 3, "rope_theta": 100.0, "head_dim": 8}},
        },
        "pattern": ["linear", "local"],
    },
    "gated-heads": LLAMA
    | {"output_gate": "head", "output_gate_function": "softplus", "qk_norm": True, "norm_position": "mlp_both"},
    "short-convolution": LLAMA
    | {
        "layer_kinds": {"short": {"mixer": {"kind": "short_convolution", "conv_kernel_size": 3}}, "full": {}},
        "pattern": ["short", "full"],
    },
    "rwkv7": LLAMA | {"layer_kinds": {"linear": {"mixer": RWKV7}, "full": {}}, "pattern": ["linear", "full"]},
    "mamba1": LLAMA
    | {
        "layer_kinds": {
            "mamba": {"mixer": MAMBA1 | {"proj_bias": True}, "ffn": "none"},
            "normed": {"mixer": MAMBA1 | {"norms": "weighted", "norm_eps": 0.1, "conv_bias": False}},
        },
        "pattern": ["mamba", "normed"],
    },
    "rg-lru": LLAMA
    | {
        "layer_kinds": {
            "gated": {"mixer": RG_LRU | {"inner_size": 40}},
            "plain": {"mixer": RG_LRU | {"conv_bias": False, "proj_bias": False}},
        },
        "pattern": ["gated", "plain"],
    },
    "kimi-delta": LLAMA
    | {
        "layer_kinds": {"linear": {"mixer": KIMI_DELTA}, "full": {}},
        "pattern": ["linear", "full"],
        "latent_attention": LATENT | {"norm_eps": 0.1},
        "position_embedding": "none",
    },
    "delta-product": LLAMA
    | {
        "layer_kinds": {"product": {"mixer": DELTA_PRODUCT}, "gates": {"mixer": DELTA_NET_2}},
        "pattern": ["product", "gates"],
    },
    "latent": LLAMA
    | {
        "latent_attention": LATENT,
        "yarn": YARN | {"mscale": 0.7, "mscale_all_dim": 1.2},
        "query_scaling": {"factor": 0.5, "length": 3},
    },
    "chunks": LLAMA
    | {
        "norm_weights": False,
        "embedding_norm": True,
        "qk_norm": "rotated",
        "attention_chunk": 3,
        "query_scaling": {"factor": 0.5, "length": 3, "first_position": 1},
    },
    "norms-after-rotation": LLAMA | {"qk_norm": "after_rotation", "yarn": YARN},
    "one-part": LLAMA
    | DROPOUT
    | {
        "layer_kinds": {
            "mamba": {"mixer": MAMBA2, "ffn": "none"},
            "mlp": {"mixer": "none", "ffn": {"activation": "squared_relu"}},
        },
        "pattern": ["mamba", "mlp"],
        "residual_multiplier": 0.3,
    },
    "hyper": LLAMA
    | DROPOUT
    | {
        "hyper_connections": {"streams": 3, "sinkhorn_iterations": 4, "eps": 1e-3},
        "layer_kinds": {"short": {"mixer": {"kind": "short_convolution"}, "ffn": "none"}, "full": {}},
        "pattern": ["short", "full"],
    },
    "sparse": LLAMA | {"latent_attention": LATENT, "sparse_attention": SPARSE},
    "sparse-neighbors": LLAMA
    | {
        "latent_attention": LATENT | {"norm_eps": 1e-2},
        "sparse_attention": SPARSE | {"index_rope": "neighbors", "kl_loss": 0.3},
        "yarn": YARN | {"mscale": 0.7, "mscale_all_dim": 1.2},
        "mtp_num_layers": 1,
    },
    "sparse-hybrid": LLAMA
    | {
        "latent_attention": LATENT,
        "sparse_attention": SPARSE,
        "layer_kinds": {"linear": {"mixer": DELTA_NET}, "sparse": {}},
        "pattern": ["linear", "sparse"],
    },
    "shared-indexer": LLAMA
    | {
        "num_layers": 4,
        "latent_attention": LATENT,
        "sparse_attention": SPARSE,
        "layer_kinds": {"own": {}, "shared": {"mixer": SHARED_INDEXER}},
        "pattern": ["own", "shared"],
        "mtp_num_layers": 1,
    },
    "shared-indexer-warmup": LLAMA
    | {
        "latent_attention": LATENT,
        "sparse_attention": SPARSE,
        "layer_kinds": {
            "own": {"mixer": {"kind": "sparse_latent_attention", "warmup": True}},
            "shared": {"mixer": SHARED_INDEXER},
        },
        "pattern": ["own", "shared"],
    },
    "block-sparse": LLAMA
    | {
        "num_attention_heads": 8,
        "num_query_groups": 4,
        "head_dim": 6,
        "partial_rotary_factor": 2 / 3,
        "zero_centered_gamma": True,
        "qk_norm": True,
        "layer_kinds": {
            "sparse": {"mixer": BLOCK_SPARSE},
            "local": {"mixer": BLOCK_SPARSE | {"block_size": 3, "local_blocks": 2}},
        },
        "pattern": ["sparse", "local"],
    },
    "compressed": COMPRESSED_MODEL | {"layer_kinds": {"sparse": CSA, "heavy": HCA}, "pattern": ["sparse", "heavy"]},
    "compressed-heavy": COMPRESSED_MODEL | {"layer_kinds": {"heavy": HCA}, "pattern": ["heavy"]},
    "compressed-window": COMPRESSED_MODEL
    | {"layer_kinds": {"window": {"mixer": COMPRESSED}, "sparse": CSA}, "pattern": ["window", "sparse"]},
    "shared-attention": LLAMA
    | {
        "num_layers": 5,
        "hidden_dropout": 0.2,
        "residual_multiplier": 0.1,
        "head_dim": 8,
        "activation": "geglu",
        "linear_bias": "mlp",
        "layer_kinds": {
            "mamba": {"mixer": MAMBA2, "ffn": "none"},
            "first": {"mixer": SHARED_ATTENTION | {"adapt_attention": True}, "ffn": "none"},
            "second": {"mixer": SHARED_ATTENTION | {"shared_block": 1}},
        },
        "pattern": ["mamba", "first", "second", "first", "second"],
    },
    "sparse-warmup": LLAMA | {"latent_attention": LATENT, "sparse_attention": SPARSE | {"warmup": True}},
}
MIXTRAL = LLAMA | {"moe": {"num_experts": 4, "top_k": 2, "aux_loss": 0.3, "z_loss": 0.1}}
QWEN_MOE: dict[str, Any] = {
    "num_experts": 8, "top_k": 3, "ffn_hidden_size": 12, "normalize": False, "shared_ffn_hidden_size": 16,
    "shared_gate": True, "layer_interval": 2,
}  # fmt: skip
DEEPSEEK: dict[str, Any] = {
    "num_experts": 16, "top_k": 4, "ffn_hidden_size": 8, "score": "sigmoid", "scaling_factor": 2.5, "num_groups": 4,
    "top_groups": 2, "shared_ffn_hidden_size": 8, "selection_bias": True, "first_dense_layers": 1, "aux_loss": 0.3,
}  # fmt: skip
MOE_MODELS = {
    "zero-experts": LLAMA
    | {
        "moe": {
            "num_experts": 4,
            "zero_experts": 3,
            "top_k": 3,
            "ffn_hidden_size": 12,
            "selection_bias": True,
            "aux_loss": 0.3,
            "normalize": False,
            "scaling_factor": 2.5,
        },
        "layer_kinds": {"plain": {}, "latents": {"ffn": {"kind": "moe", "latent_size": 10, "scale_inputs": True}}},
        "pattern": ["plain", "latents"],
    },
    "nemotron": LLAMA
    | {
        "num_layers": 4,
        "activation": "squared_relu",
        "layer_kinds": {
            "mamba": {"mixer": MAMBA2 | {"num_groups": 2, "conv_bias": False}, "ffn": "none"},
            "attention": {"mixer": {"position_embedding": "none"}, "ffn": "none"},
            "mlp": {"mixer": "none", "ffn": {"ffn_hidden_size": 32}},
            "moe": {"mixer": "none", "ffn": "moe"},
        },
        "pattern": ["mamba", "moe", "attention", "mlp"],
        "moe": {
            "num_experts": 4,
            "top_k": 2,
            "ffn_hidden_size": 12,
            "score": "sigmoid",
            "selection_bias": True,
            "scaling_factor": 2.5,
            "shared_ffn_hidden_size": 16,
            "latent_size": 10,
        },
    },
    "hash": LLAMA
    | {
        "activation": "limited_swiglu",
        "hyper_connections": {"sinkhorn_iterations": 3},
        "moe": {
            "num_experts": 4,
            "top_k": 2,
            "ffn_hidden_size": 12,
            "score": "sqrtsoftplus",
            "scaling_factor": 1.5,
            "selection_bias": True,
            "aux_loss": 0.3,
        },
        "layer_kinds": {"hash": {"ffn": {"kind": "moe", "routing": "hash"}}, "top_k": {"ffn": "moe"}},
        "pattern": ["hash", "top_k"],
    },
    "two-kinds": LLAMA
    | {
        "num_layers": 3,
        "layer_kinds": {
            "few": {"ffn": {"kind": "moe", "shared_ffn_hidden_size": 16}},
            "many": {
                "ffn": {
                    "kind": "moe",
                    "num_experts": 8,
                    "top_k": 3,
                    "ffn_hidden_size": 12,
                    "score": "sigmoid",
                    "activation": "gelu",
                    "aux_loss": 0.2,
                },
            },
        },
        "pattern": ["few", "many"],
        "moe": {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 20, "z_loss": 0.1},
    },
    "mixtral": MIXTRAL,
    "qwen-moe": LLAMA | {"qk_norm": True, "moe": QWEN_MOE},
    "deepseek": LLAMA | DROPOUT | {"moe": DEEPSEEK, "latent_attention": LATENT | {"q_rank": None}, "mtp_num_layers": 1},
    "groups-softmax": LLAMA
    | {"moe": DEEPSEEK | {"score": "softmax", "first_dense_layers": 0, "selection_bias": False}},
    "ungated": LLAMA | {"activation": "gelu", "moe": {"num_experts": 5, "top_k": 1, "normalize": False}},
    "gpt-oss": LLAMA
    | {
        "linear_bias": True,
        "attention_sinks": True,
        "activation": "clamped_swiglu",
        "sliding_window": 3,
        "full_attention_layers": [1],
        "yarn": YARN,
        "moe": {"num_experts": 4, "top_k": 2, "z_loss": 0.1},
    },
    "llama4": LLAMA
    | {
        "layer_kinds": {
            "local": {"mixer": {"attention_chunk": 3}, "ffn": {"kind": "mlp"}},
            "full": {
                "mixer": {"position_embedding": "none", "query_scaling": {"factor": 0.5, "length": 3}},
                "ffn": {"kind": "moe"},
            },
        },
        "pattern": ["local", "full"],
        "moe": {
            "num_experts": 4,
            "top_k": 2,
            "ffn_hidden_size": 12,
            "shared_ffn_hidden_size": 12,
            "score": "sigmoid",
            "normalize": False,
            "scale_inputs": True,
            "aux_loss": 0.3,
        },
    },
    "separate-norms": LLAMA
    | {
        "norm_position": "both",
        "activation": "geglu_tanh",
        "moe": {
            "num_experts": 4,
            "top_k": 2,
            "ffn_hidden_size": 12,
            "shared_ffn_hidden_size": 24,
            "shared_scaling_factor": 0.5,
            "separate_norms": True,
            "aux_loss": 0.3,
        },
    },
    "capacity": LLAMA
    | {
        "moe": {"num_experts": 4, "top_k": 2, "aux_loss": 0.3, "capacity_factor": 0.75},
        "layer_kinds": {"plain": {}, "zero": {"ffn": {"kind": "moe", "zero_experts": 3, "capacity_factor": 0.5}}},
        "pattern": ["plain", "zero"],
    },
    "all-experts": LLAMA
    | {
        "parallel_block": False,
        "moe": {"num_experts": 3, "top_k": 3, "aux_loss": 0.1, "aux_loss_scope": "global_batch"},
    },
}
B, SEED, SAMPLES = 2, 1234, [3, 2**33 + 5]
DOCUMENTS = {  # ids of a sample's tokens, by length; a position counts from the start of its document
    8: [[0, 0, 0, 1, 1, 1, 1, 2], [0, 1, 1, 1, 1, 1, 2, 2]],
    16: [[0] * 5 + [1] * 8 + [2] * 3, [0] + [1] * 15],
}
SELECTIVE = BlockMemory(norms=True, activation=True, attention=True)
MEMORY = {  # of the first layers of a stage, again and again
    "none": [BlockMemory()],
    "full": [BlockMemory(full=True)],
    "first": [BlockMemory(full=True), BlockMemory()],
    "selective": [SELECTIVE],
}


def compare(
    model: dict[str, Any], tp: int, sequence_parallel: bool, recompute: str = "none", documents: bool = False,
    z_loss: float = 0.0, cp: int = 1, ep: int = 1, etp: int = 1, gathers_tokens: bool = True,
    prefix: list[int] | None = None, pp: int = 1, padding: bool = False,
) -> int:  # fmt: skip
    """Compare this rank's losses and gradients with the twin's; how many gradients. `pp`: stages of as many layers.

    `padding`: the last document of a sample is none.
    """
    config, s = ModelConfig(**model), 8 if cp == 1 else 16
    state = initialize_model_parallel(
        tp, pp, context_parallel_size=cp, expert_model_parallel_size=ep, expert_tensor_parallel_size=etp
    )
    exchanges: list[None] = []
    context = BuildContext(
        state.tensor.group, Fp8Manager(None, amax_group=None), torch.float64, state.device,
        sequence_parallel=sequence_parallel, context_parallel=state.context.group if cp > 1 else None,
        expert=state.expert.group,
        expert_tensor=state.expert_tensor.group, gathers_tokens=gathers_tokens,
        expert_overlap=default_overlap(state.expert.group, sequence_parallel=True),
        during_exchange=lambda: exchanges.append(None),
        sequence_group=state.tensor_context.group, global_batch=B, global_tokens=B * s, seed=SEED,
    )  # fmt: skip
    stages, whole, size = list[GPTStage](), dict[str, Tensor](), config.num_layers // pp
    for first in range(0, config.num_layers, size):
        stop = first + size if first + size < config.num_layers else len(config.spec.layers)
        memory = MEMORY[recompute] * (stop - first)
        stage = GPTStage(
            config.spec, context, layers=range(first, stop), positions=s, memory=memory[: stop - first], z_loss=z_loss
        )
        whole |= randomize(stage, lambda piece: 0.3, config.spec)
        for name, values in stage.constants.items():
            if name.endswith(".bias"):
                values.copy_(torch.linspace(-0.2, 0.2, len(values)))
            elif name.endswith("layer_scalar"):
                values.fill_(0.8)
            whole[name] = values.double()
        for shares in stage.router_shares.values():
            shares.copy_(shares_of_the_step_before(len(shares)))
        stages.append(stage)
    stage = stages[state.pipeline.rank]
    generator = torch.Generator().manual_seed(11)
    tokens, labels = (torch.randint(config.vocab_size, (B, s), generator=generator) for _ in range(2))
    ids = torch.tensor(DOCUMENTS[s]) if documents else None
    starts = [[row.index(i) if i in row else s for i in range(4)] for row in DOCUMENTS[s]]
    cu_seqlens = torch.tensor(starts, dtype=torch.int32) if documents else None
    positions = torch.tensor([[row[:i].count(row[i]) for i in range(s)] for row in DOCUMENTS[s]]) if documents else None
    padding_bs = torch.tensor(DOCUMENTS[s]) == 2 if padding else None
    label_padding_bs = None if padding_bs is None else F.pad(padding_bs[:, 1:], (0, 1), value=True)
    counted = torch.ones(B, s, dtype=torch.float64) if padding_bs is None else (~padding_bs).double()
    prefix_b = None if prefix is None else torch.tensor(prefix)
    batch = Batch(
        tokens, labels, counted, position_ids=positions, cu_seqlens=cu_seqlens, samples=torch.tensor(SAMPLES),
        prefix=prefix_b, padding=padding_bs, label_padding=label_padding_bs,
    )  # fmt: skip
    batch = batch.with_later_labels(config.mtp_num_layers)
    weight_bs = torch.rand(batch.labels.shape, dtype=torch.float64, generator=generator)
    shard = replace(batch, loss_mask=weight_bs * batch.loss_mask).shard(
        state.context.rank, cp, cuts_documents=config.spec.cuts_documents
    )
    losses = _forward_and_backward(stage, shard, state.pipeline)
    assert len(exchanges) == 2 * len(stage.routers) * (ep * etp > 1 and gathers_tokens)
    if pp > 1 and stage.shared_weight is not None:
        assert state.embedding is not None
        assert stage.shared_weight.grad is not None
        all_reduce(stage.shared_weight.grad, state.embedding.group)

    of_routers = [torch.zeros(())]
    expected = twin_loss(
        whole, config, tokens, labels, positions=positions, documents=ids, z_loss=z_loss, router_losses=of_routers,
        seed=SEED, samples=SAMPLES, prefix=prefix, padding=padding_bs,
        label_padding=label_padding_bs,
    )  # fmt: skip
    ((expected * weight_bs * batch.loss_mask).sum() + sum(of_routers)).backward()
    expected_batch = replace(batch, loss_mask=expected.detach() * batch.loss_mask)
    expected_shard = expected_batch.shard(state.context.rank, cp, cuts_documents=config.spec.cuts_documents).loss_mask
    if losses is not None:
        found_bs = (losses.cross_entropy + losses.z_loss).T * (shard.loss_mask > 0)
        torch.testing.assert_close(found_bs, expected_shard, rtol=1e-11, atol=1e-11)
    compared = 0
    for name, actual, grad in gradients(
        stage, whole, state.tensor.group, context.context_parallel, state.expert_data.group
    ):
        torch.testing.assert_close(actual, grad, rtol=1e-10, atol=1e-11, msg=lambda m, n=name: f"{n}: {m}")
        compared += 1
    if ep == pp == 1:
        assert compared == len(whole) - len(stage.constants)
    added = torch.stack([router.load.losses for router in stage.routers.values()] or [torch.zeros(2).double()])
    added = torch.stack([added.sum(), *(loss.sum() for loss in stage.index_losses.values())]).sum()
    all_reduce(added, state.amax.group)
    all_reduce(added, state.pipeline.group)
    torch.testing.assert_close(added, sum(of_routers).detach().double())
    return compared


def _forward_and_backward(stage: GPTStage, shard: Batch, pipeline: Group) -> LabelLosses | None:
    """Run one stage after the other, then back; return the losses of each token, or None before the last rank."""
    before = None if pipeline.rank == 0 else pipeline.ranks[pipeline.rank - 1]
    after = None if pipeline.rank == pipeline.size - 1 else pipeline.ranks[pipeline.rank + 1]
    x = None if before is None else _receive(before).requires_grad_()
    y = stage(x, shard)
    if after is None:
        (y.cross_entropy * shard.loss_mask.T).sum().backward()
    else:
        _send(y.detach(), after)
        y.backward(_receive(after))
    if x is not None and before is not None:
        assert x.grad is not None
        _send(x.grad, before)
    return y if after is None else None


def _send(x: Tensor, rank: int) -> None:
    dist.send_object_list([x], rank)


def _receive(rank: int) -> Tensor:
    found: list[Any] = [None]
    dist.recv_object_list(found, rank)
    return found[0]


WITHOUT_SEQUENCE = {"hybrid", "kimi-delta", "delta-product", "qwen", "shared-keys", "latent"}
"""Models with norms of heads, whose gradients are sums over tensor-parallel ranks also where these have all tokens.

Tests of recomputation and of context parallelism have them with sequence parallelism.
"""
BY_TENSOR = [(name, *tp) for name in MODELS for tp in ((1, False), (2, False), (2, True), (4, True))]
COVERED = {
    *("geglu", "gpt2-untied-gelu"),  # by recomputation
    *("tied-mtp", "pattern", "shared-keys", "shared-keys-of-a-stage", "hybrid", "short-convolution", "kimi-delta"),
    *("one-part", "hyper", "sparse-hybrid", "compressed-window", "shared-indexer"),  # by pipeline stages
    *("qwen", "sparse-neighbors"),  # by context parallelism
    "shared-attention",  # by recomputation
    *("compressed-heavy", "sparse-warmup", "shared-indexer-warmup"),  # in part by "compressed" and "sparse"
}
"""Models that other quick tests compare."""


@pytest.mark.parametrize(
    ("name", "tp", "sequence_parallel"),
    slow_but(
        BY_TENSOR,
        *[
            case
            for case in BY_TENSOR
            if (case[1:] == (2, False) and case[0] in WITHOUT_SEQUENCE)
            or (case[1:] == (2, True) and case[0] not in WITHOUT_SEQUENCE | COVERED)
            or case[0] == "llama"
        ],
    ),
)
def test_loss_and_gradients(world4: World, name: str, tp: int, sequence_parallel: bool) -> None:
    """Of norms of heads too: https://github.com/NVIDIA/Megatron-LM/issues/7452, finding 11."""
    assert min(world4.run(compare, MODELS[name], tp, sequence_parallel, ranks=tp)) > 10


@pytest.mark.parametrize("recompute", slow_but(["first", "selective"], "selective"))
@pytest.mark.parametrize(("tp", "sequence_parallel"), slow_but([(1, False), (2, False), (2, True)], (2, True)))
@pytest.mark.parametrize(
    "name",
    slow_but(
        [
            *("llama", "gpt2", "gpt2-untied-gelu", "geglu", "gemma", "qwen", "parallel-block", "latent", "hybrid"),
            *("shared-norm", "one-part", "kimi-delta", "shared-keys", "sparse", "compressed", "shared-indexer"),
            *("delta-product", "block-sparse", "shared-attention"),
        ],
        *("gpt2-untied-gelu", "geglu", "gemma", "qwen", "parallel-block", "one-part", "shared-keys"),
        *("hybrid", "kimi-delta", "shared-indexer", "delta-product", "block-sparse", "shared-attention"),
    ),
)
def test_recompute(world4: World, name: str, tp: int, sequence_parallel: bool, recompute: str) -> None:
    world4.run(compare, MODELS[name], tp, sequence_parallel, recompute, ranks=tp)


@pytest.mark.parametrize(
    "name",
    slow_but(
        ["llama", "gpt2", "hybrid", "chunks", "one-part", "sparse", "compressed", "kimi-delta", "delta-product"],
        *("llama", "gpt2", "sparse"),  # of the others some are compared under context parallelism
    ),
)
@pytest.mark.parametrize(("tp", "sequence_parallel"), slow_but([(1, False), (2, True)], (2, True)))
def test_document_boundaries_z_loss_and_recompute(world4: World, name: str, tp: int, sequence_parallel: bool) -> None:
    world4.run(
        compare, MODELS[name], tp, sequence_parallel=sequence_parallel, recompute="full", documents=True, z_loss=0.01,
        ranks=tp,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "tp", "cp", "recompute"),
    [
        ("llama", 2, 1, "none"),
        ("qwen", 1, 1, "full"),  # dropout and sinks
        ("latent", 2, 1, "selective"),
        ("gpt2", 1, 2, "none"),
        pytest.param("gpt2", 2, 2, "none", marks=pytest.mark.slow),
        pytest.param("parallel-block", 1, 2, "full", marks=pytest.mark.slow),
        pytest.param("llama-gqa-rope-scaling", 1, 4, "none", marks=pytest.mark.slow),
    ],
)
def test_a_prefix_that_all_tokens_see(world4: World, name: str, tp: int, cp: int, recompute: str) -> None:
    """Of another length in each sample, one of them the whole of it."""
    prefix = [3, 8] if cp == 1 else [11, 16]
    world4.run(
        compare, MODELS[name], tp, sequence_parallel=True, recompute=recompute, cp=cp, prefix=prefix, ranks=tp * cp
    )


@pytest.mark.parametrize(("tp", "cp"), slow_but([(1, 2), (1, 4), (2, 2)], (1, 2)))  # the next test has both
@pytest.mark.parametrize(
    "name",
    slow_but(
        [
            *("llama-gqa-rope-scaling", "gpt2", "qwen", "olmo-window-mtp", "latent", "gemma", "bloom", "hybrid"),
            *("one-part", "sparse-neighbors", "kimi-delta", "short-convolution", "compressed", "shared-indexer"),
            "delta-product",
        ],
        *("llama-gqa-rope-scaling", "qwen", "latent", "bloom", "sparse-neighbors"),
    ),
)
def test_context_parallel(world4: World, name: str, tp: int, cp: int) -> None:
    model = MODELS[name]
    if name == "compressed" and cp == 4:  # parts of two tokens, which is one less than overlapping entries need
        model = MODELS["compressed-heavy"]
    world4.run(compare, model, tp, sequence_parallel=True, cp=cp, ranks=tp * cp)


RECOMPUTED = [
    *("llama", "gpt2", "olmo-window-mtp", "bloom", "hybrid", "chunks", "one-part", "sparse", "sparse-hybrid", "rg-lru"),
    *("kimi-delta", "rwkv7", "mamba1", "short-convolution", "shared-keys", "hyper", "compressed", "shared-indexer"),
    *("delta-product", "block-sparse", "shared-attention"),
]


@pytest.mark.parametrize(
    ("name", "tp"),
    slow_but(
        [(name, tp) for name in RECOMPUTED for tp in (1, 2)],
        ("olmo-window-mtp", 2),
        *((name, 1) for name in ("chunks", "one-part", "sparse-hybrid", "shared-keys", "hyper", "compressed", "rwkv7")),
        *((name, 1) for name in ("mamba1", "rg-lru", "shared-indexer", "delta-product", "shared-attention")),
        ("block-sparse", 2),
    ),
)
def test_context_parallel_with_document_boundaries_and_recompute(world4: World, name: str, tp: int) -> None:
    """One also recomputes layers of multi-token prediction on other tensor-parallel ranks than the first ones.

    https://github.com/NVIDIA/Megatron-LM/issues/7452, finding 4
    """
    world4.run(
        compare, MODELS[name], tp, sequence_parallel=True, recompute="full", documents=True, z_loss=0.0, cp=2,
        ranks=2 * tp,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "tp", "cp"),
    [
        *(("hybrid", 1, 2), ("kimi-delta", 1, 1), ("one-part", 1, 1), ("sparse-hybrid", 1, 1), ("tied-mtp", 1, 1)),
        *(("short-convolution", 1, 2), ("pattern", 2, 1), ("shared-keys-of-a-stage", 1, 1), ("hyper", 1, 1)),
        *(("compressed-window", 1, 2), ("shared-indexer", 1, 1), ("block-sparse", 1, 1)),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("kimi-delta", 2, 1),
                ("delta-product", 2, 1),
                ("rwkv7", 1, 2),
                ("mamba1", 1, 2),
                ("rg-lru", 1, 2),
                ("shared-keys-of-a-stage", 2, 1),
                ("hyper", 1, 2),
            )
        ),
    ],
)
def test_pipeline_stages(world4: World, name: str, tp: int, cp: int) -> None:
    world4.run(compare, MODELS[name], tp, sequence_parallel=True, cp=cp, pp=2, ranks=2 * tp * cp)


@pytest.mark.parametrize(
    ("name", "tp", "cp", "ep", "etp", "dispatch", "recompute"),
    [
        *slow_but(
            [(name, 1, 1, 1, 1, "all_gather", "none") for name in MOE_MODELS],
            *((name, 1, 1, 1, 1, "all_gather", "none") for name in ("groups-softmax", "capacity", "all-experts")),
        ),
        pytest.param("mixtral", 2, 1, 1, 1, "all_gather", "none", marks=pytest.mark.slow),
        ("zero-experts", 2, 1, 2, 1, "all_gather", "selective"),
        ("zero-experts", 1, 2, 2, 1, "all_to_all", "full"),
        pytest.param("zero-experts", 2, 2, 2, 2, "all_gather", "none", marks=pytest.mark.slow),
        ("mixtral", 1, 2, 2, 1, "all_to_all", "none"),
        pytest.param("mixtral", 2, 2, 4, 1, "all_to_all", "full", marks=pytest.mark.slow),
        ("qwen-moe", 2, 1, 2, 1, "all_gather", "selective"),
        ("ungated", 1, 2, 1, 2, "all_gather", "none"),
        ("all-experts", 2, 2, 1, 1, "all_gather", "none"),
        pytest.param("gpt-oss", 2, 1, 2, 1, "all_gather", "selective", marks=pytest.mark.slow),
        ("gpt-oss", 1, 2, 2, 1, "all_to_all", "none"),
        pytest.param("deepseek", 4, 1, 4, 1, "all_gather", "none", marks=pytest.mark.slow),
        ("deepseek", 2, 1, 2, 1, "all_gather", "selective"),
        pytest.param("deepseek", 2, 2, 2, 2, "all_gather", "selective", marks=pytest.mark.slow),
        ("llama4", 2, 2, 4, 1, "all_to_all", "none"),
        pytest.param("llama4", 2, 1, 2, 1, "all_gather", "selective", marks=pytest.mark.slow),
        pytest.param("groups-softmax", 1, 4, 2, 1, "all_to_all", "none", marks=pytest.mark.slow),
        ("nemotron", 2, 1, 2, 1, "all_gather", "none"),
        pytest.param("nemotron", 2, 2, 2, 1, "all_gather", "none", marks=pytest.mark.slow),
        pytest.param("nemotron", 1, 2, 2, 1, "all_to_all", "none", marks=pytest.mark.slow),
        ("separate-norms", 2, 1, 2, 1, "all_gather", "selective"),
        ("hash", 1, 2, 2, 1, "all_to_all", "full"),
        ("two-kinds", 2, 1, 2, 1, "all_gather", "none"),
        pytest.param("two-kinds", 2, 2, 4, 1, "all_to_all", "selective", marks=pytest.mark.slow),
        pytest.param("hash", 2, 2, 2, 1, "all_to_all", "full", marks=pytest.mark.slow),
    ],
)
def test_experts(world4: World, name: str, tp: int, cp: int, ep: int, etp: int, dispatch: str, recompute: str) -> None:
    gathers = dispatch == "all_gather"
    world4.run(
        compare, MOE_MODELS[name], tp, sequence_parallel=tp > 1, recompute=recompute, z_loss=0.01, cp=cp, ep=ep,
        etp=etp, gathers_tokens=gathers, ranks=tp * cp,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "depths", "tp", "cp", "ep"),
    [
        ("mixtral", 2, 2, 2, 2),
        ("capacity", 1, 1, 1, 1),
        pytest.param("all-experts", 0, 1, 2, 1, marks=pytest.mark.slow),
        pytest.param("deepseek", 1, 2, 1, 2, marks=pytest.mark.slow),
    ],
)
def test_routers_do_not_count_padding(world4: World, name: str, depths: int, tp: int, cp: int, ep: int) -> None:
    """A layer of multi-token prediction does not count a token if it reads the embedding of padding."""
    model = MOE_MODELS[name] | {"mtp_num_layers": depths}
    world4.run(
        compare, model, tp, sequence_parallel=True, documents=True, cp=cp, ep=ep, padding=True, ranks=tp * cp,
    )  # fmt: skip
