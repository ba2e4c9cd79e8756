"""`DotProductAttention`: softmax attention with Transformer Engine's masks and layouts.

Every mask type of Transformer Engine becomes an `AttentionMask`:

    no_mask                      every query attends to every key
    causal                       query i attends to keys 0 to i (the diagonal starts at the top left)
    causal_bottom_right          the last query attends to all keys, each query before it to one key less
    padding                      samples may be shorter than the tensors; each sample is a segment
    padding_causal               combination of padding and causal
    padding_causal_bottom_right  combination of padding and causal_bottom_right
    arbitrary                    a boolean mask, true where a query must not attend

The kernels compute masks that are a range of keys for each query. Other masks are materialized as a boolean tensor
`[.., s, t]`: windows that extend to different distances on both sides, and masks that start at the top left if the
numbers of queries and keys differ.

Layouts: "sbhd", "bshd", and "thd". In "thd", sequences of different lengths follow each other and `cu_seqlens` holds
their first positions. The output of a query without any key, such as padding, is 0.

Shapes: s queries, t keys, b micro-batch, a query heads, g key-value heads of this rank, d head width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint as recomputed

from megafp8.layers.attention.mask import AttentionMask, segments_of
from megafp8.layers.attention.op import attention
from megafp8.layers.attention.scores import AttentionDropout, Scores, alibi_slopes
from megafp8.nn.arguments import chosen, divided, refuse, require
from megafp8.nn.base import RngTracker, default_device, forked, opaque
from megafp8.numerics.onnx_export import in_onnx_export
from megafp8.numerics.philox import key_of

Window = tuple[int, int]
MaskTensor = Tensor | tuple[Tensor, Tensor]
FORMATS = ("sbhd", "bshd", "thd")
MASK_TYPES = (
    "no_mask",
    "padding",
    "causal",
    "padding_causal",
    "causal_bottom_right",
    "padding_causal_bottom_right",
    "arbitrary",
)
_SAME = {"padding,causal": "padding_causal", "causal,padding": "padding_causal"}


def mask_type(module: object, name: str) -> str:
    """Return the canonical name of a mask type, or raise ValueError if `name` is unknown."""
    name = _SAME.get(name, name)
    require(module, "attn_mask_type", name, MASK_TYPES)
    return name


def check_window(module: object, window: Window | None, causal: bool) -> Window:
    """Return the window as (left, right): the numbers of keys visible before and after the diagonal, -1 for no limit.

    For a causal mask, right is 0. Negative numbers other than -1 raise ValueError.
    """
    if window is None:
        return (-1, 0) if causal else (-1, -1)
    left, right = window
    if left < -1 or right < -1:
        raise ValueError(f"{type(module).__name__}: window_size is {window}; it must be (left, right), each -1 or more")
    if causal:
        return left, 0
    return (-1, -1) if (left, right) == (-1, 0) else (left, right)


class DotProductAttention(nn.Module):
    """Softmax attention, `softmax(q·kᵀ · scale)·v`, without parameters unless `softmax_type` is "learnable".

    The arguments are the same as in Transformer Engine. `docs/from-transformer-engine.md` describes all of them; the
    most important ones are:

    - `num_attention_heads`, `num_gqa_groups`: Numbers of query and key-value heads over all tensor-parallel ranks.
    - `kv_channels`: Head width, or a pair of the widths of keys and values.
    - `softmax_type`: "off-by-one" and "learnable" add a key without a value to the softmax. Its score is 0, or the
      parameter `softmax_offset`.
    """

    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int | tuple[int, int],
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        qkv_format: str = "sbhd",
        attn_mask_type: str = "causal",
        window_size: Window | None = None,
        bottom_right_diagonal: bool | None = None,
        softcap: float = 0.0,
        sequence_parallel: bool = False,
        tp_size: int = 1,
        get_rng_state_tracker: RngTracker | None = None,
        tp_group: ProcessGroup | None = None,
        layer_number: int | None = None,
        attention_type: str = "self",
        cp_group: Any = None,
        cp_global_ranks: Any = None,
        cp_stream: Any = None,
        cp_comm_type: str = "p2p",
        softmax_scale: float | None = None,
        softmax_type: str = "vanilla",
        return_max_logit: bool | None = False,
        name: str | None = None,
    ) -> None:
        refuse(self, locals())
        super().__init__()
        require(self, "qkv_format", qkv_format, FORMATS)
        require(self, "attention_type", attention_type, ("self", "cross"))
        require(self, "softmax_type", softmax_type, ("vanilla", "off-by-one", "learnable"))
        ranks = tp_size if tp_group is None else tp_group.size()
        groups = num_attention_heads if num_gqa_groups is None else num_gqa_groups
        divided(self, "num_attention_heads", num_attention_heads, groups)
        self.heads = divided(self, "num_attention_heads", num_attention_heads, ranks)
        self.groups = divided(self, "num_gqa_groups", groups, ranks)
        self.k_channels, self.v_channels = (kv_channels, kv_channels) if isinstance(kv_channels, int) else kv_channels
        self.qkv_format, self.attention_type = qkv_format, attention_type
        self.attn_mask_type = mask_type(self, attn_mask_type)
        self.window_size, self.bottom_right_diagonal, self.softcap = window_size, bottom_right_diagonal, softcap
        self.attention_dropout, self.get_rng_state_tracker = attention_dropout, get_rng_state_tracker
        self.layer_number, self.name = layer_number, name
        self.softmax_scale = self.k_channels**-0.5 if softmax_scale is None else softmax_scale
        self.softmax_type = softmax_type
        self.softmax_offset: Tensor | None = None
        if softmax_type == "learnable":
            self.softmax_offset = nn.Parameter(torch.zeros(self.heads, device=default_device()))

    @opaque
    def forward(
        self,
        query_layer: Tensor | None = None,
        key_layer: Tensor | None = None,
        value_layer: Tensor | None = None,
        attention_mask: MaskTensor | None = None,
        qkv_format: str | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_kv: Tensor | None = None,
        cu_seqlens_q_padded: Tensor | None = None,
        cu_seqlens_kv_padded: Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
        attn_mask_type: str | None = None,
        window_size: Window | None = None,
        bottom_right_diagonal: bool | None = None,
        softcap: float | None = None,
        checkpoint_core_attention: bool = False,
        core_attention_bias_type: str = "no_bias",
        core_attention_bias: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        fast_zero_fill: bool = True,
        inference_params: Any = None,
        pad_between_seqs: bool | None = None,
        fp8_output: bool | None = False,
        bf16_backward: bool | None = False,
        num_splits: int | None = 1,
        score_mod: Callable[..., Any] | None = None,
        score_mod_bprop: Callable[..., Any] | None = None,
        score_mod_tensors: dict[str, Tensor] | None = None,
        score_mod_bprop_tensors: dict[str, Tensor] | None = None,
        qkv_layer: Tensor | None = None,
        kv_layer: Tensor | None = None,
        qkv_interleave_dim: int = -3,
        thd_attention_policies: Any = None,
        thd_attention_policy_dispatch: str = "auto",
    ) -> Tensor:
        """Compute attention.

        Shapes are given for the format "sbhd". In "bshd" the first two dims are swapped; in "thd" they are one dim.
        Padding masks need either `attention_mask` or `cu_seqlens_q` and `cu_seqlens_kv`. The other arguments, described
        in `docs/from-transformer-engine.md`, override the arguments of the constructor.

        - `query_layer`: `[s, b, a, d]`.
        - `key_layer`, `value_layer`: `[t, b, g, d]`.
        - `attention_mask`: Boolean, true where a query must not attend. With "padding" `[b, 1, 1, s]`, or a pair of
          such masks for queries and keys if their lengths differ.
        - `cu_seqlens_q`, `cu_seqlens_kv`: Cumulative lengths of the samples, `[b + 1]`.

        Returns:
            Output of all heads of this rank, `[s, b, a·d]`.
        """
        refuse(self, locals())
        if query_layer is None or key_layer is None or value_layer is None:
            raise ValueError("DotProductAttention: give query_layer, key_layer and value_layer")
        form = chosen(qkv_format, self.qkv_format)
        require(self, "qkv_format", form, FORMATS)
        if query_layer.shape[-2] != self.heads or key_layer.shape[-2] != self.groups:
            raise ValueError(
                f"DotProductAttention: query_layer {list(query_layer.shape)} and key_layer {list(key_layer.shape)} do "
                f"not have the {self.heads} and {self.groups} heads of this rank"
            )
        q, k, v = (sequence_first(x, form) for x in (query_layer, key_layer, value_layer))
        arguments = _Given(
            module=self,
            kind=mask_type(self, chosen(attn_mask_type, self.attn_mask_type)),
            window=chosen(window_size, self.window_size),
            bottom_right=chosen(bottom_right_diagonal, self.bottom_right_diagonal),
            mask=attention_mask,
            packed=form == "thd",
            cu_q=cu_seqlens_q,
            cu_k=cu_seqlens_kv,
            cu_q_padded=cu_seqlens_q_padded if pad_between_seqs is not False else None,
            cu_k_padded=cu_seqlens_kv_padded if pad_between_seqs is not False else None,
        )
        (s, b), t = q.shape[:2], k.shape[0]  # len() would become a constant in an exported graph
        mask = arguments.attention_mask(s, t, b, q.device)
        bias = self._bias(core_attention_bias_type, core_attention_bias, alibi_slopes, arguments, s, t, q)
        scores = Scores(
            scale=self.softmax_scale,
            softcap=chosen(softcap, self.softcap) or None,
            distance_bias_ar=bias,
            dropout=self._dropout(q),
        )
        sink = self.softmax_offset
        if self.softmax_type == "off-by-one":
            sink = torch.zeros(self.heads, device=q.device)
        if in_onnx_export() and (arguments.packed or scores.dropout is not None):
            what = "attention_dropout" if scores.dropout is not None else "qkv_format thd"
            raise ValueError(
                f"DotProductAttention: {what} cannot be exported to ONNX; a model in evaluation, with sbhd or bshd, can"
            )
        if checkpoint_core_attention and torch.is_grad_enabled():
            y = recomputed(_core, q, k, v, mask, sink, scores, use_reentrant=False, preserve_rng_state=False)
        else:
            y = _core(q, k, v, mask, sink, scores)
        return in_format(arguments.without_padding(y), form).flatten(-2)

    def _dropout(self, q_sbad: Tensor) -> AttentionDropout | None:
        """Return the dropout of this call, with one seed per sample.

        The seeds come from the device's generator, so that CUDA graphs draw new ones in each replay.
        """
        if self.attention_dropout == 0 or not self.training:
            return None
        with forked(self.get_rng_state_tracker):
            sample_b = torch.randint(2**32, (q_sbad.shape[1],), device=q_sbad.device)
        return AttentionDropout(self.attention_dropout, key_of("attention", self.layer_number or 0), sample_b)

    def _bias(
        self, kind: str, bias: Tensor | None, slopes: Tensor | None, given: _Given, s: int, t: int, q: Tensor
    ) -> Tensor | None:
        """Return the bias of the scores by distance, `[a, s + t - 1]`, or None.

        ALiBi is the only bias (Press et al. 2021, arXiv:2108.12409).
        """
        if kind not in ("no_bias", "alibi") or bias is not None:
            raise ValueError(
                f"DotProductAttention: core_attention_bias_type is {kind!r}; biases of single pairs are not offered; "
                "'no_bias' and 'alibi' work"
            )
        if kind == "no_bias":
            return None
        if given.packed or "padding" in given.kind:
            raise ValueError("DotProductAttention: alibi needs samples of one length, in sbhd or bshd without padding")
        if slopes is None:
            slopes = _alibi_slopes(self.heads, q.device)
        if slopes.dim() != 1:
            raise ValueError(
                f"DotProductAttention: alibi_slopes is {list(slopes.shape)}; it must have one value per head"
            )
        distance = torch.arange(1 - s, t, device=q.device)  # position of the key minus position of the query
        shift = t - s if given.is_bottom_right else 0
        wide = torch.promote_types(q.dtype, torch.float32)
        return -slopes.to(wide)[:, None] * (distance - shift).abs()


@cache
def _alibi_slopes(heads: int, device: torch.device) -> Tensor:
    """Return the ALiBi slopes, `[a]`, fp32. They are copied to the device once, because a CUDA graph must not copy."""
    return torch.tensor(alibi_slopes(heads), device=device)


def sequence_first(x: Tensor, form: str) -> Tensor:
    """Convert heads in the format `form` to `[s, b, a, d]`. In "thd", all tokens become one sample."""
    return x.unsqueeze(1) if form == "thd" else x.transpose(0, 1) if form == "bshd" else x


def in_format(x_sbad: Tensor, form: str) -> Tensor:
    """Convert heads `[s, b, a, d]` to the format `form`. Inverse of `sequence_first`."""
    return x_sbad.squeeze(1) if form == "thd" else x_sbad.transpose(0, 1) if form == "bshd" else x_sbad


def _core(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, sink: Tensor | None, scores: Scores) -> Tensor:
    """Compute attention. Values may be wider or narrower than keys: the kernels need values that are not wider."""
    wider = v.shape[-1] - k.shape[-1]
    if wider > 0:
        q, k = (F.pad(x, (0, wider)) for x in (q, k))
    return attention(q, k, v, mask, sink, scores)


@dataclass
class _Given:
    """Mask arguments of one call, from which `attention_mask` builds the mask. `packed` means the format "thd"."""

    module: DotProductAttention
    kind: str
    window: Window | None
    bottom_right: bool | None
    mask: MaskTensor | None
    packed: bool
    cu_q: Tensor | None
    cu_k: Tensor | None
    cu_q_padded: Tensor | None
    cu_k_padded: Tensor | None

    def __post_init__(self) -> None:
        if self.packed and self.cu_q is None:
            raise ValueError("DotProductAttention: qkv_format thd needs cu_seqlens_q")
        if self.packed and "padding" not in self.kind:
            raise ValueError(
                f"DotProductAttention: attn_mask_type is {self.kind!r}; with thd it must be padding, padding_causal or "
                "padding_causal_bottom_right"
            )
        if self.kind == "arbitrary" and not isinstance(self.mask, Tensor):
            raise ValueError("DotProductAttention: attn_mask_type arbitrary needs an attention_mask, one tensor")
        if "padding" in self.kind and self.cu_q is None and self.mask is None:
            raise ValueError(
                f"DotProductAttention: {self.kind} needs an attention_mask, or cu_seqlens_q and cu_seqlens_kv"
            )

    @property
    def causal(self) -> bool:
        """Whether a query must not attend to keys after it."""
        return "causal" in self.kind

    @property
    def is_bottom_right(self) -> bool:
        """Whether the diagonal ends at the last query and last key; otherwise it starts at the first query and key."""
        if self.bottom_right is not None:
            return self.bottom_right
        return self.kind not in ("causal", "padding_causal")

    def attention_mask(self, s: int, t: int, b: int, device: torch.device) -> AttentionMask:
        """Return the mask of s queries and t keys in each of b samples."""
        left, right = check_window(self.module, self.window, self.causal)
        cu_q, cu_k = self._segments(b)
        square = cu_q is cu_k and (cu_q is not None or s == t)  # equal numbers of queries and keys
        visible = self._given_mask() if self.kind == "arbitrary" else None
        # The kernels count a range of keys from the last query and key. A range must be symmetric or causal, and a
        # causal one needs equal numbers of queries and keys, which is unknown here if samples differ in length.
        from_last = square or self.is_bottom_right
        if self.causal:
            is_range = from_last and (square or (cu_q is None and s <= t))
        else:
            is_range = (left, right) == (-1, -1) or (from_last and left == right)
        if not is_range:
            band = self._band(cu_q, cu_k, s, t, left, right, device)
            return AttentionMask(cu_q, cu_k, causal=False, visible=band if visible is None else band & visible)
        reaches_all = left < 0 or (cu_q is None and left + 1 >= max(s, t))
        window = None if reaches_all else left + 1
        return AttentionMask(cu_q, cu_k, causal=self.causal, window=window, visible=visible)

    def _given_mask(self) -> Tensor:
        assert isinstance(self.mask, Tensor)
        return ~self.mask[(None,) * (4 - self.mask.dim())]

    def _band(
        self, cu_q: Tensor | None, cu_k: Tensor | None, s: int, t: int, left: int, right: int, device: torch.device
    ) -> Tensor:
        """Return which pairs are in the window around the diagonal of their segment, bool `[1 or b, 1, s, t]`."""
        i, j = torch.arange(s, device=device)[None], torch.arange(t, device=device)[None]
        diagonal: Tensor | int = t - s if self.is_bottom_right else 0
        if cu_q is not None and cu_k is not None:
            segment = segments_of(i.expand(cu_q.shape[0], -1), cu_q[:, 1:])
            segment = segment.clamp(max=cu_q.shape[1] - 2)
            at = segment + 1 if self.is_bottom_right else segment
            diagonal = (cu_k.gather(1, at) - cu_q.gather(1, at)).unsqueeze(-1)
        distance = j.unsqueeze(1) - i.unsqueeze(-1) - diagonal
        band = torch.ones_like(distance, dtype=torch.bool)
        if left >= 0:
            band &= distance >= -left
        if right >= 0:
            band &= distance <= right
        return band.unsqueeze(1)

    def _segments(self, b: int) -> tuple[Tensor | None, Tensor | None]:
        """Return `cu_seqlens` of queries and keys, `[1 or b, n + 1]`: the same tensor twice if they are equal."""
        if "padding" not in self.kind:
            return None, None
        if self.packed:
            q = _with_gaps(self.cu_q, self.cu_q_padded)
            if self.cu_k is None or (self.cu_k is self.cu_q and self.cu_k_padded is self.cu_q_padded):
                return q, q
            return q, _with_gaps(self.cu_k, self.cu_k_padded)
        if self.cu_q is not None:
            q = _from_lengths(self.cu_q.diff())
            return (q, q) if self.cu_k is None or self.cu_k is self.cu_q else (q, _from_lengths(self.cu_k.diff()))
        if isinstance(self.mask, Tensor):
            q = _from_lengths(_lengths(self.mask, b))
            return q, q
        assert self.mask is not None
        q_mask, k_mask = self.mask
        return _from_lengths(_lengths(q_mask, b)), _from_lengths(_lengths(k_mask, b))

    def without_padding(self, y_sbad: Tensor) -> Tensor:
        """Set the output of padding tokens between sequences to zero ("thd" with gaps)."""
        if not self.packed or self.cu_q_padded is None:
            return y_sbad
        cu = _with_gaps(self.cu_q, self.cu_q_padded)[0]
        i = torch.arange(len(y_sbad), device=y_sbad.device)
        gap = torch.searchsorted(cu[1:].contiguous(), i, right=True) % 2 == 1
        return y_sbad.masked_fill(gap[:, None, None, None], 0)


def _lengths(mask_b11s: Tensor, b: int) -> Tensor:
    """Return the number of unmasked tokens of each sample, `[b]`. They must come before the masked tokens."""
    return (~mask_b11s.reshape(b, -1)).sum(-1)


def _from_lengths(lengths_b: Tensor) -> Tensor:
    return F.pad(lengths_b[:, None], (1, 0)).to(torch.int32)


def _with_gaps(cu: Tensor | None, padded: Tensor | None) -> Tensor:
    """Return the boundaries of segments, int32 `[1, n + 1]`.

    `padded` holds the positions where sequences start if there are gaps between them. Each gap is then a separate
    segment.
    """
    assert cu is not None
    if padded is None:
        return cu[None].to(torch.int32)
    starts = padded[:-1]
    ends = starts + cu.diff()
    return torch.cat([torch.stack([starts, ends], -1).flatten(), padded[-1:]])[None].to(torch.int32)
