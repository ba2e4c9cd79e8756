"""Floating-point operations of a model, by the formula that every published figure of this project uses."""

from __future__ import annotations

from megafp8.config import ModelConfig
from megafp8.config.activations import ACTIVATIONS

#: Dense peak of H100 and H200 SXM by precision, in FLOP/s (NVIDIA's datasheets).
PEAK_FLOPS = {"bf16": 989e12, "fp8": 1979e12}


def matmul_parameters(config: ModelConfig) -> int:
    """Weights that take part in a matrix product for every token: output layer in, embedding look-up out."""
    h, d = config.hidden_size, config.channels
    attention = h * d * (2 * config.num_attention_heads + 2 * config.query_groups)
    mlp = h * (ACTIVATIONS[config.activation].up_width(config.ffn_size) + config.ffn_size)
    return config.num_layers * (attention + mlp) + h * config.padded_vocab_size


def flops_per_token(config: ModelConfig, seq_length: int) -> float:
    """Model FLOPs of forward and backward per token: 6·N_matmul + 6·L·s·h_attn, causal attention counted as half.

    A sliding window or document boundaries are not subtracted, and recompute is not added: it is the useful work.
    """
    h_attn = config.num_attention_heads * config.channels
    return 6.0 * matmul_parameters(config) + 6.0 * config.num_layers * seq_length * h_attn


_RATE = {False: 0.85, True: 1.3}
"""FLOP/s of a block, in bf16 or FP8, against those of the output layer, which is bf16: attention, norms and casts are
in one and not in the other. Llama-3-8B on H200: 1.74 blocks of bf16 and 2.7 of FP8 take as long as the output layer."""


def output_layer_in_blocks(config: ModelConfig, seq_length: int, *, fp8: bool) -> float:
    """How many blocks take as long as the output layer, about."""
    block = flops_per_token(config.model_copy(update={"num_layers": 1}), seq_length)
    output = 6.0 * config.hidden_size * config.padded_vocab_size
    return output / (block - output) * _RATE[fp8]
