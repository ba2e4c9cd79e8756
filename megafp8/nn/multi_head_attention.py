"""`MultiheadAttention`: q, k and v projections, rotary embedding, attention, and output projection.

The rows of the qkv weight of a rank are [q heads | k heads | v heads]. With `qkv_weight_interleaved` they are
[query heads of the group | k head | v head] for each key-value head in turn.

Shapes: s sequence, b micro-batch, h hidden, a query heads, g key-value heads of this rank, d head width.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megafp8.nn.arguments import refuse, require
from megafp8.nn.attention import FORMATS, DotProductAttention, MaskTensor, Window, mask_type
from megafp8.nn.base import Composite, InitMethod, RngTracker, part_name
from megafp8.nn.linear import LayerNormLinear, Linear
from megafp8.nn.norm import LayerNorm, RMSNorm
from megafp8.nn.rotary import Rotary, apply_rotary

QK_NORMS = (None, "L2Normalization", "RMSNorm", "LayerNorm")


class L2Normalization(nn.Module):
    """Normalization of the last dim to unit length, `x / √(sum of squares + eps)`, computed in fp32 or wider."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalize x, `[..., d]`, and return the result in x's dtype."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + self.eps)).to(x.dtype)


class MultiheadAttention(Composite):
    """Attention with its input and output projections.

    The arguments are the same as in Transformer Engine. `docs/from-transformer-engine.md` describes all of them; the
    most important ones are:

    - `hidden_size`, `num_attention_heads`, `num_gqa_groups`: Sizes over all tensor-parallel ranks.
    - `attention_type`: "self", or "cross" for keys and values that are computed from `encoder_output`.
    - `input_layernorm`: Normalize the input of the query projection; in self-attention this is also the input of the
      key and value projections.
    - `fuse_qkv_params`: Store q, k and v projections as one parameter.
    - `set_parallel_mode`: Shard heads over `tp_group`.
    """

    def __init__(
        self,
        hidden_size: int,
        num_attention_heads: int,
        kv_channels: int | None = None,
        attention_dropout: float = 0.1,
        layernorm_epsilon: float = 1e-5,
        init_method: InitMethod | None = None,
        output_layer_init_method: InitMethod | None = None,
        layer_number: int | None = None,
        attn_mask_type: str = "causal",
        window_size: Window | None = None,
        bottom_right_diagonal: bool | None = None,
        softcap: float = 0.0,
        tp_group: ProcessGroup | None = None,
        tp_size: int = 1,
        num_gqa_groups: int | None = None,
        fuse_wgrad_accumulation: bool = False,
        get_rng_state_tracker: RngTracker | None = None,
        sequence_parallel: bool = False,
        params_dtype: torch.dtype | None = None,
        return_bias: bool = False,
        return_layernorm_output: bool = False,
        input_layernorm: bool = False,
        attention_type: str = "self",
        set_parallel_mode: bool = False,
        fuse_qkv_params: bool = False,
        zero_centered_gamma: bool = False,
        qkv_weight_interleaved: bool = True,
        rotary_pos_interleaved: bool = False,
        ub_overlap_ag: bool = False,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        bias: bool = True,
        normalization: str = "LayerNorm",
        device: torch.device | str | None = None,
        qkv_format: str = "sbhd",
        name: str | None = None,
        qk_norm_type: str | None = None,
        qk_norm_eps: float = 1e-6,
        qk_norm_before_rope: bool = False,
        seq_length: int | None = None,
        micro_batch_size: int | None = None,
        softmax_type: str = "vanilla",
    ) -> None:
        refuse(self, locals())
        super().__init__()
        require(self, "attention_type", attention_type, ("self", "cross"))
        require(self, "qkv_format", qkv_format, FORMATS)
        require(self, "qk_norm_type", qk_norm_type, QK_NORMS)
        if fuse_wgrad_accumulation and not fuse_qkv_params:
            raise ValueError(
                "MultiheadAttention: fuse_wgrad_accumulation is True, and main_grad must belong to one parameter of q, "
                "k and v; set fuse_qkv_params=True"
            )
        d = kv_channels or hidden_size // num_attention_heads
        groups = num_attention_heads if num_gqa_groups is None else num_gqa_groups
        q_size, kv_size = d * num_attention_heads, d * groups
        ranks = tp_size if tp_group is None else tp_group.size()
        self.attention_type, self.qkv_format, self.d = attention_type, qkv_format, d
        self.input_layernorm, self.return_bias = input_layernorm, return_bias
        self.return_layernorm_output = return_layernorm_output
        self.interleaved = qkv_weight_interleaved and fuse_qkv_params
        self.rotary_pos_interleaved, self.qk_norm_before_rope = rotary_pos_interleaved, qk_norm_before_rope

        named = partial(part_name, name)
        common: dict[str, Any] = {
            "bias": bias, "fuse_wgrad_accumulation": fuse_wgrad_accumulation, "tp_group": tp_group, "tp_size": tp_size,
            "get_rng_state_tracker": get_rng_state_tracker, "sequence_parallel": sequence_parallel,
            "params_dtype": params_dtype, "device": device,
        }  # fmt: skip
        column: dict[str, Any] = {
            **common, "init_method": init_method, "parallel_mode": "column" if set_parallel_mode else None,
        }  # fmt: skip
        normed: dict[str, Any] = {
            **column, "eps": layernorm_epsilon, "return_layernorm_output": return_layernorm_output,
            "zero_centered_gamma": zero_centered_gamma, "normalization": normalization,
        }  # fmt: skip
        if attention_type == "self":
            split = None if fuse_qkv_params else {"query": q_size, "key": kv_size, "value": kv_size}
            size = q_size + 2 * kv_size
            if input_layernorm:
                self.layernorm_qkv = LayerNormLinear(
                    hidden_size, size, parameters_split=split, name=named("layernorm_linear_qkv"), **normed
                )
            else:
                self.qkv = Linear(hidden_size, size, parameters_split=split, name=named("linear_qkv"), **column)
        else:
            split_q, split_kv = (None, None) if fuse_qkv_params else (("query",), ("key", "value"))
            if input_layernorm:
                self.layernorm_query = LayerNormLinear(
                    hidden_size, q_size, parameters_split=split_q, name=named("layernorm_linear_q"), **normed
                )
            else:
                self.query_layer = Linear(hidden_size, q_size, name=named("linear_q"), **column)
            self.key_value = Linear(
                hidden_size, 2 * kv_size, parameters_split=split_kv, name=named("linear_kv"), **column
            )
        self.q_norm, self.k_norm = self._qk_norms(qk_norm_type, qk_norm_eps, params_dtype, device)
        self.core_attention = DotProductAttention(
            num_attention_heads, d, num_gqa_groups=groups, attention_dropout=attention_dropout, qkv_format=qkv_format,
            attn_mask_type=mask_type(self, attn_mask_type), window_size=window_size,
            bottom_right_diagonal=bottom_right_diagonal, softcap=softcap, tp_size=ranks,
            get_rng_state_tracker=get_rng_state_tracker, layer_number=layer_number, attention_type=attention_type,
            softmax_type=softmax_type, name=named("core_attention"),
        )  # fmt: skip
        self.proj = Linear(
            q_size, hidden_size, init_method=output_layer_init_method, return_bias=return_bias,
            parallel_mode="row" if set_parallel_mode else None, name=named("proj"), **common,
        )  # fmt: skip

    def _qk_norms(
        self, kind: str | None, eps: float, dtype: torch.dtype | None, device: torch.device | str | None
    ) -> tuple[nn.Module | None, nn.Module | None]:
        """Create the norms of the query heads and key heads; None for both if `kind` is None."""
        if kind is None:
            return None, None
        if kind == "L2Normalization":
            norm = L2Normalization(eps)
            return norm, norm
        made = RMSNorm if kind == "RMSNorm" else LayerNorm
        return made(self.d, eps, dtype=dtype, device=device), made(self.d, eps, dtype=dtype, device=device)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: MaskTensor | None = None,
        encoder_output: Tensor | None = None,
        attn_mask_type: str | None = None,
        window_size: Window | None = None,
        bottom_right_diagonal: bool | None = None,
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
    ) -> Any:
        """Apply attention to `hidden_states`, `[s, b, h]` or the layout of `qkv_format`.

        The other arguments are the same as in `DotProductAttention.forward`, and:

        - `encoder_output`: Input of keys and values in cross-attention.
        - `is_first_microbatch`: True quantizes the weights again, even if they seem unchanged.
        - `rotary_pos_emb`: Angles of `RotaryPositionEmbedding`, or a pair of angles for q and k.

        Returns:
            The output in the shape of `hidden_states`, or a tuple of the output, the bias if `return_bias` is set, and
            the norm's output if `return_layernorm_output` is set.
        """
        refuse(self, {"inference_params": inference_params, "thd_attention_policies": thd_attention_policies})
        normed: Tensor | None = None
        if self.attention_type == "self":
            layer: Any = self.layernorm_qkv if self.input_layernorm else self.qkv
            packed = layer(hidden_states, is_first_microbatch=is_first_microbatch)
            if self.input_layernorm and self.return_layernorm_output:
                packed, normed = packed
            q, k, v = self._heads(packed, queries=self.core_attention.heads // self.core_attention.groups)
        else:
            if encoder_output is None:
                raise ValueError("MultiheadAttention: attention_type cross needs encoder_output")
            layer = self.layernorm_query if self.input_layernorm else self.query_layer
            q = layer(hidden_states, is_first_microbatch=is_first_microbatch)
            if self.input_layernorm and self.return_layernorm_output:
                q, normed = q
            q = q.unflatten(-1, (-1, self.d))
            _, k, v = self._heads(self.key_value(encoder_output, is_first_microbatch=is_first_microbatch), queries=0)
        if self.q_norm is not None and self.k_norm is not None and self.qk_norm_before_rope:
            q, k = self.q_norm(q), self.k_norm(k)
        if rotary_pos_emb is not None:
            both = rotary_pos_emb if isinstance(rotary_pos_emb, tuple) else (rotary_pos_emb,) * 2
            starts_q, starts_k = (
                (cu_seqlens_q_padded, cu_seqlens_kv_padded) if pad_between_seqs else (cu_seqlens_q, cu_seqlens_kv)
            )
            form = Rotary(self.qkv_format, self.rotary_pos_interleaved)
            q, k = apply_rotary(q, both[0], form, starts_q), apply_rotary(k, both[1], form, starts_k)
        if self.q_norm is not None and self.k_norm is not None and not self.qk_norm_before_rope:
            q, k = self.q_norm(q), self.k_norm(k)
        attended = self.core_attention(
            q, k, v, attention_mask, cu_seqlens_q=cu_seqlens_q, cu_seqlens_kv=cu_seqlens_kv,
            cu_seqlens_q_padded=cu_seqlens_q_padded, cu_seqlens_kv_padded=cu_seqlens_kv_padded,
            max_seqlen_q=max_seqlen_q, max_seqlen_kv=max_seqlen_kv,
            attn_mask_type=attn_mask_type, window_size=window_size, bottom_right_diagonal=bottom_right_diagonal,
            softcap=softcap, checkpoint_core_attention=checkpoint_core_attention,
            core_attention_bias_type=core_attention_bias_type, core_attention_bias=core_attention_bias,
            alibi_slopes=alibi_slopes, fast_zero_fill=fast_zero_fill, pad_between_seqs=pad_between_seqs,
            thd_attention_policy_dispatch=thd_attention_policy_dispatch,
        )  # fmt: skip
        projected = self.proj(attended, is_first_microbatch=is_first_microbatch)
        results = list(projected) if self.return_bias else [projected]
        if normed is not None:
            results.append(normed)
        return results[0] if len(results) == 1 else tuple(results)

    def _heads(self, packed: Tensor, *, queries: int) -> tuple[Tensor, Tensor, Tensor]:
        """Split the output of the projection into q, `[.., a, d]`, and k and v, `[.., g, d]`.

        `queries` is the number of query heads per key-value head, or 0 if `packed` contains only k and v.
        """
        groups = self.core_attention.groups
        if self.interleaved:
            q, k, v = packed.unflatten(-1, (groups, queries + 2, self.d)).split([queries, 1, 1], dim=-2)
            return q.flatten(-3, -2), k.squeeze(-2), v.squeeze(-2)
        q, k, v = packed.unflatten(-1, (-1, self.d)).split([queries * groups, groups, groups], dim=-2)
        return q, k, v
