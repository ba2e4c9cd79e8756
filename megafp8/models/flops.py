"""Floating-point operations of a model, by the formula of every published figure of this project."""

from __future__ import annotations

from megafp8.config import Config, ModelConfig
from megafp8.config.activations import ACTIVATIONS

#: Dense peak of H100 and H200 SXM by precision, in FLOP/s (NVIDIA's datasheets).
PEAK_FLOPS = {"bf16": 989e12, "fp16": 989e12, "fp8": 1979e12}


def matmul_parameters(config: ModelConfig) -> int:
    """Weights that every token is multiplied with: the output layer is included, the embedding look-up is not.

    Of experts, those that a token goes to. The output layer once more for each depth of multi-token prediction.
    """
    h, d = config.hidden_size, config.channels
    heads, latent = config.num_attention_heads, config.latent_attention
    attention = h * d * (2 * heads + 2 * config.query_groups)
    if latent is not None:
        down = h * ((latent.q_rank or 0) + latent.kv_rank + latent.rope_head_dim)
        up = (latent.q_rank or h) * d + latent.kv_rank * (latent.nope_head_dim + latent.value_head_dim)
        attention = down + heads * (up + latent.value_head_dim * h)
    mlps, depths = sum(_mlp_parameters(config, layer) for layer in config.layers), config.mtp_num_layers
    outputs = (1 + depths) * h * config.padded_vocab_size
    outputs += h * h * (config.architecture == "bert")  # the head's transform
    attention_layers = len(config.layers) + config.decoder_blocks  # and cross attention
    return attention_layers * attention + mlps + depths * 2 * h * h + outputs


def _mlp_parameters(config: ModelConfig, layer: int) -> int:
    """Of the MLP of a layer, or of its router and those experts that a token goes to."""
    h, up_width, moe = config.hidden_size, ACTIVATIONS[config.activation].up_width, config.moe_of(layer)
    if moe is None:
        return h * (up_width(config.ffn_size) + config.ffn_size)
    f, shared = config.expert_size, moe.shared_ffn_hidden_size or 0
    expert, shared_expert = h * (up_width(f) + f), h * (up_width(shared) + shared + moe.shared_gate)
    return h * moe.num_experts + moe.top_k * expert + shared_expert


def flops_per_token(
    config: ModelConfig, seq_length: int, decoder_length: int | None = None, *, frozen: bool = False
) -> float:
    """Model FLOPs of forward and backward per token: 6·N_matmul + 6·L·s·h_attn, causal attention counted as half;
    twice as many of attention where it is bidirectional.

    h_attn: heads times their width; where keys and values differ in width, the mean of both. A sliding window or
    document boundaries are not subtracted, and recompute is not added. Of T5, of a sample divided by the encoder's
    tokens. `frozen`: the weights have no gradients (LoRA, whose own products are not counted), so it is 4·N_matmul.
    """
    if decoder_length is not None:
        return _t5_flops(config, seq_length, decoder_length) / seq_length
    h_attn = config.num_attention_heads * (config.channels + config.value_channels) / 2
    of_attention = (6.0 if config.causal else 12.0) * len(config.layers) * seq_length * h_attn
    return (4.0 if frozen else 6.0) * matmul_parameters(config) + of_attention


def training_flops_per_token(config: Config) -> float:
    """`flops_per_token` of a run."""
    seq_length = config.training.seq_length
    return flops_per_token(config.model, seq_length, config.decoder_length, frozen=config.lora is not None)


def _t5_flops(config: ModelConfig, s: int, d: int) -> float:
    """Of a sample of s tokens of the encoder and d of the decoder."""
    h, c = config.hidden_size, config.channels
    q, kv = 2 * h * c * config.num_attention_heads, 2 * h * c * config.query_groups
    block = q + kv + _mlp_parameters(config, 0)
    encoder, decoder = config.num_layers, config.decoder_blocks
    of_s = s * (encoder * block + decoder * kv)
    of_d = d * (decoder * (block + q) + h * config.padded_vocab_size)
    pairs = encoder * s * s + decoder * (d * d / 2 + d * s)
    return 6.0 * (of_s + of_d) + 12.0 * pairs * config.num_attention_heads * c


_RELATIVE_RATE = {False: 0.85, True: 1.3}
"""FLOP/s of a block, in bf16 or FP8, relative to the output layer, which is bf16 and has no attention, norms or casts.
On H200 the output layer of Llama-3-8B takes as long as 1.74 blocks in bf16 or 2.7 in FP8."""


def output_layer_in_blocks(config: ModelConfig, seq_length: int, *, fp8: bool) -> float:
    """Time of the output layer, and of multi-token prediction, in units of a block's, approximately."""
    one = {"num_layers": 1, "mtp_num_layers": 0, "architecture": "gpt"}
    block = flops_per_token(config.model_copy(update=one), seq_length)
    output = 6.0 * config.hidden_size * config.padded_vocab_size
    of_output, depths = output / (block - output) * _RELATIVE_RATE[fp8], config.mtp_num_layers
    projection = 12.0 * config.hidden_size**2 / (block - output) * _RELATIVE_RATE[fp8]
    return of_output + depths * (1 + projection + of_output)
