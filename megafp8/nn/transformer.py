"""`TransformerLayer`: self-attention, cross-attention in a decoder, and an MLP, each added to the residual stream.

    default                                     x + attention(norm(x)), then x + mlp(norm(x))
    apply_residual_connection_post_layernorm    norm(x) + attention(norm(x)), then norm(x) + mlp(norm(x))
    output_layernorm                            no norm before self-attention, but a norm of the layer's output
    parallel_attention_mlp                      x + attention(norm(x)) + mlp(norm'(x))

`hidden_dropout` applies to the output of each branch, including its bias, before the output is added.

Shapes: s sequence, b micro-batch, h hidden.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from megafp8.fp8.autocast import in_torch_autocast_dtype
from megafp8.nn.arguments import chosen, refuse, require
from megafp8.nn.attention import MaskTensor, Window, mask_type
from megafp8.nn.base import Composite, InitMethod, RngTracker, part_name
from megafp8.nn.layernorm_mlp import LayerNormMLP
from megafp8.nn.multi_head_attention import MultiheadAttention
from megafp8.nn.norm import LayerNorm, RMSNorm


def drop_path(x: Tensor, p: float, batch_dim: int) -> Tensor:
    """Set whole samples to zero with probability p, and multiply the rest by 1 / (1 - p).

    Stochastic depth, arXiv:1603.09382.
    """
    shape = [n if dim == batch_dim else 1 for dim, n in enumerate(x.shape)]
    kept = torch.rand(shape, device=x.device) >= p
    return x * (kept.to(x.dtype) / (1 - p))


class TransformerLayer(Composite):
    """Transformer block.

    The arguments are the same as in Transformer Engine. `docs/from-transformer-engine.md` describes all of them; the
    most important ones are:

    - `layer_type`: "encoder", or "decoder", which also attends to `encoder_output`.
    - `drop_path_rate`: Probability with which a sample skips self-attention or the MLP in training.
    - `attn_input_format`: Layout of the hidden states: "sbhd" for `[s, b, h]`, "bshd" for `[b, s, h]`, or "thd" for
      `[tokens, h]`.
    - `set_parallel_mode`: Shard attention and MLP over `tp_group`.
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        num_attention_heads: int,
        num_gqa_groups: int | None = None,
        layernorm_epsilon: float = 1e-5,
        hidden_dropout: float = 0.1,
        attention_dropout: float = 0.1,
        init_method: InitMethod | None = None,
        output_layer_init_method: InitMethod | None = None,
        layer_number: int | None = None,
        kv_channels: int | None = None,
        self_attn_mask_type: str = "causal",
        window_size: Window | None = None,
        bottom_right_diagonal: bool | None = None,
        softcap: float = 0.0,
        enc_dec_attn_mask_type: str = "no_mask",
        enc_dec_bottom_right_diagonal: bool | None = None,
        enc_dec_window_size: Window | None = None,
        tp_group: ProcessGroup | None = None,
        tp_size: int = 1,
        params_dtype: torch.dtype | None = None,
        get_rng_state_tracker: RngTracker | None = None,
        fuse_wgrad_accumulation: bool = False,
        seq_length: int | None = None,
        micro_batch_size: int | None = None,
        sequence_parallel: bool = False,
        apply_residual_connection_post_layernorm: bool = False,
        output_layernorm: bool = False,
        parallel_attention_mlp: bool = False,
        layer_type: str = "encoder",
        drop_path_rate: float = 0.0,
        set_parallel_mode: bool = False,
        fuse_qkv_params: bool = False,
        rotary_pos_interleaved: bool = False,
        zero_centered_gamma: bool = False,
        qkv_weight_interleaved: bool = True,
        ub_tp_comm_overlap: bool = False,
        ub_overlap_ag: bool = True,
        ub_overlap_rs: bool = True,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = True,
        ub_bulk_wgrad: bool = True,
        bias: bool = True,
        activation: str = "gelu",
        activation_params: dict[str, Any] | None = None,
        normalization: str = "LayerNorm",
        device: torch.device | str | None = None,
        attn_input_format: str = "sbhd",
        name: str | None = None,
        qk_norm_type: str | None = None,
        qk_norm_eps: float = 1e-6,
        qk_norm_before_rope: bool = False,
        softmax_type: str = "vanilla",
    ) -> None:
        super().__init__()
        refuse(self, {"ub_tp_comm_overlap": ub_tp_comm_overlap})  # ub_overlap_ag etc. have no effect without it
        require(self, "layer_type", layer_type, ("encoder", "decoder"))
        for other, enabled in (
            ("layer_type='decoder'", layer_type == "decoder"),
            ("apply_residual_connection_post_layernorm", apply_residual_connection_post_layernorm),
            ("output_layernorm", output_layernorm),
        ):
            if parallel_attention_mlp and enabled:
                raise ValueError(f"TransformerLayer: parallel_attention_mlp is True, which does not go with {other}")
        if drop_path_rate > 0 and attn_input_format == "thd":
            raise ValueError(
                f"TransformerLayer: drop_path_rate is {drop_path_rate}; with attn_input_format thd it must be 0, "
                "because samples can be skipped only where they are a dim, in sbhd and bshd"
            )
        self.tp_size = tp_size if tp_group is None else tp_group.size()
        self.sequence_parallel, self.seq_length = sequence_parallel and self.tp_size > 1, seq_length
        self.layer_type, self.attn_input_format = layer_type, attn_input_format
        self_attn_mask_type, enc_dec_attn_mask_type = (
            mask_type(self, kind) for kind in (self_attn_mask_type, enc_dec_attn_mask_type)
        )
        self.hidden_dropout, self.drop_path_rate = hidden_dropout, drop_path_rate
        self.output_layernorm, self.parallel_attention_mlp = output_layernorm, parallel_attention_mlp

        named = partial(part_name, name)
        common: dict[str, Any] = {
            "init_method": init_method, "output_layer_init_method": output_layer_init_method, "tp_group": tp_group,
            "tp_size": tp_size, "fuse_wgrad_accumulation": fuse_wgrad_accumulation,
            "get_rng_state_tracker": get_rng_state_tracker, "sequence_parallel": sequence_parallel,
            "params_dtype": params_dtype, "return_layernorm_output": apply_residual_connection_post_layernorm,
            "set_parallel_mode": set_parallel_mode, "zero_centered_gamma": zero_centered_gamma, "bias": bias,
            "return_bias": not parallel_attention_mlp, "normalization": normalization, "device": device,
        }  # fmt: skip
        attention: dict[str, Any] = {
            **common, "kv_channels": kv_channels, "attention_dropout": attention_dropout,
            "layernorm_epsilon": layernorm_epsilon, "layer_number": layer_number, "num_gqa_groups": num_gqa_groups,
            "fuse_qkv_params": fuse_qkv_params, "rotary_pos_interleaved": rotary_pos_interleaved,
            "qkv_weight_interleaved": qkv_weight_interleaved, "qkv_format": attn_input_format,
            "qk_norm_type": qk_norm_type, "qk_norm_eps": qk_norm_eps, "qk_norm_before_rope": qk_norm_before_rope,
            "softmax_type": softmax_type, "softcap": softcap,
        }  # fmt: skip
        self.self_attention = MultiheadAttention(
            hidden_size, num_attention_heads, input_layernorm=not output_layernorm, attn_mask_type=self_attn_mask_type,
            window_size=window_size, bottom_right_diagonal=bottom_right_diagonal,
            name=named("self_attention"), **attention,
        )  # fmt: skip
        if layer_type == "decoder":
            self.inter_attention = MultiheadAttention(
                hidden_size, num_attention_heads, input_layernorm=True, attention_type="cross",
                attn_mask_type=enc_dec_attn_mask_type, window_size=enc_dec_window_size,
                bottom_right_diagonal=enc_dec_bottom_right_diagonal, name=named("inter_attention"),
                **attention,
            )  # fmt: skip
        self.layernorm_mlp = LayerNormMLP(
            hidden_size, ffn_hidden_size, eps=layernorm_epsilon, activation=activation,
            activation_params=activation_params, name=named("layernorm_mlp"), **common,
        )  # fmt: skip
        if output_layernorm:
            made = LayerNorm if normalization == "LayerNorm" else RMSNorm
            self.layernorm = made(
                hidden_size, layernorm_epsilon, self.sequence_parallel, params_dtype, zero_centered_gamma, device=device
            )

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: MaskTensor | None = None,
        self_attn_mask_type: str | None = None,
        window_size: Window | None = None,
        bottom_right_diagonal: bool | None = None,
        encoder_output: Tensor | None = None,
        enc_dec_attn_mask: MaskTensor | None = None,
        enc_dec_attn_mask_type: str | None = None,
        enc_dec_window_size: Window | None = None,
        enc_dec_bottom_right_diagonal: bool | None = None,
        is_first_microbatch: bool | None = None,
        checkpoint_core_attention: bool = False,
        inference_params: Any = None,
        rotary_pos_emb: Tensor | tuple[Tensor, Tensor] | None = None,
        core_attention_bias_type: str = "no_bias",
        core_attention_bias: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_kv: Tensor | None = None,
        cu_seqlens_q_padded: Tensor | None = None,
        cu_seqlens_kv_padded: Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
        fast_zero_fill: bool = True,
        pad_between_seqs: bool | None = None,
        thd_attention_policies: Any = None,
        thd_attention_policy_dispatch: str = "auto",
        softcap: float | None = None,
    ) -> Tensor:
        """Apply the block to `hidden_states`, `[s, b, h]` or the layout of `attn_input_format`.

        `encoder_output` and the arguments that start with `enc_dec_` belong to cross-attention. The other arguments
        are the same as in `MultiheadAttention.forward`.

        Returns:
            The new hidden states, in the shape of `hidden_states`.
        """
        length = hidden_states.shape[0] * self.tp_size
        if self.sequence_parallel and length != chosen(self.seq_length, length):
            raise ValueError(
                f"TransformerLayer: hidden_states are {list(hidden_states.shape)}; with sequence_parallel the first "
                f"dim must be seq_length / tp_size = {self.seq_length} / {self.tp_size}"
            )
        x = in_torch_autocast_dtype(hidden_states)
        common: dict[str, Any] = {
            "is_first_microbatch": is_first_microbatch, "checkpoint_core_attention": checkpoint_core_attention,
            "inference_params": inference_params, "rotary_pos_emb": rotary_pos_emb,
            "core_attention_bias_type": core_attention_bias_type, "core_attention_bias": core_attention_bias,
            "alibi_slopes": alibi_slopes, "fast_zero_fill": fast_zero_fill, "pad_between_seqs": pad_between_seqs,
            "thd_attention_policies": thd_attention_policies,
            "thd_attention_policy_dispatch": thd_attention_policy_dispatch, "softcap": softcap,
            "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_q_padded": cu_seqlens_q_padded, "max_seqlen_q": max_seqlen_q,
        }  # fmt: skip
        attended = self.self_attention(
            x, attention_mask, attn_mask_type=self_attn_mask_type, window_size=window_size,
            bottom_right_diagonal=bottom_right_diagonal,
            cu_seqlens_kv=cu_seqlens_q, cu_seqlens_kv_padded=cu_seqlens_q_padded, max_seqlen_kv=max_seqlen_q, **common,
        )  # fmt: skip
        if self.parallel_attention_mlp:
            return self._add(x, attended + self.layernorm_mlp(x, is_first_microbatch), None)
        x = self._add_branch(x, attended)
        if self.layer_type == "decoder":
            attended = self.inter_attention(
                x, enc_dec_attn_mask, encoder_output, attn_mask_type=enc_dec_attn_mask_type,
                window_size=enc_dec_window_size, bottom_right_diagonal=enc_dec_bottom_right_diagonal,
                cu_seqlens_kv=cu_seqlens_kv, cu_seqlens_kv_padded=cu_seqlens_kv_padded, max_seqlen_kv=max_seqlen_kv,
                **common,
            )  # fmt: skip
            x = self._add_branch(x, attended, drops_path=False)
        x = self._add_branch(x, self.layernorm_mlp(x, is_first_microbatch))
        return self.layernorm(x) if self.output_layernorm else x

    def _add_branch(self, x: Tensor, results: tuple[Tensor, ...], *, drops_path: bool = True) -> Tensor:
        """Add the results of a branch to the residual stream x, and return the sum.

        `results` are the branch's output and bias, and optionally the norm's output, which then replaces x.
        """
        output, bias, *normed = results
        return self._add(normed[0] if normed else x, output, bias, drops_path=drops_path)

    def _add(self, residual: Tensor, output: Tensor, bias: Tensor | None, *, drops_path: bool = True) -> Tensor:
        if bias is not None and bias.numel():
            output = output + bias
        if self.hidden_dropout > 0:
            output = F.dropout(output, self.hidden_dropout, self.training)
        if drops_path and self.drop_path_rate > 0 and self.training:
            output = drop_path(output, self.drop_path_rate, 0 if self.attn_input_format == "bshd" else 1)
        return residual + output
