"""cuDNN's variable-length attention through its front end, which computes any documents and windows in one kernel.

A graph is built for each combination of shape, kind of mask and number of segments, and then reused. Starts and lengths
of segments are tensors, so a captured CUDA graph can be replayed with other documents. Segments are located in tensors
`[s, b, heads, d]` by the offsets of their first elements ("ragged offsets"); the last offset is not read. No tensor is
copied or padded.

Front end: https://docs.nvidia.com/deeplearning/cudnn/frontend/latest/operations/Attention.html

Shapes: s queries, t keys, b micro-batch, a query heads, g key-value heads, d width of queries and keys, w of values and
outputs; n segments of a sample.
"""

from __future__ import annotations

import functools
import importlib.util
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megafp8.layers.attention.mask import AttentionMask


@functools.cache
def is_available() -> bool:
    """Return whether the front end is installed; the extra `gpu` includes it."""
    return importlib.util.find_spec("cudnn") is not None


class _Shape(NamedTuple):
    """Key of a graph: device, dtype, sizes, kind of mask and scale."""

    device: torch.device
    dtype: torch.dtype
    s: int
    t: int
    b: int
    a: int
    g: int
    d: int
    w: int
    n: int
    causal: bool
    square: bool
    window: int | None
    scale: float


def forward(
    q_sbad: Tensor, k_tbgd: Tensor, v_tbgd: Tensor, mask: AttentionMask, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Return the output and log-sum-exps as `layers.attention.op.forward` does, in bf16 or fp16.

    `mask` must have segments.
    """
    shape = _shape(q_sbad, k_tbgd, v_tbgd, mask, scale)
    lse_sba = q_sbad.new_empty(q_sbad.shape[:3], dtype=torch.float32)
    o_sbad = q_sbad.new_empty(*q_sbad.shape[:3], shape.w)
    if mask.cu_seqlens_q is not mask.cu_seqlens_k:  # the kernel does not write the outputs of queries without keys
        o_sbad.zero_()
        lse_sba.fill_(-torch.inf)
    tensors = {"q": q_sbad, "k": k_tbgd, "v": v_tbgd, "o": o_sbad, "lse": lse_sba}
    _graph(shape, False).run({**_segments(shape, mask), **tensors})
    return o_sbad, lse_sba


def backward(
    do_sbad: Tensor, q_sbad: Tensor, k_tbgd: Tensor, v_tbgd: Tensor, o_sbad: Tensor, lse_sba: Tensor,
    mask: AttentionMask, scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return dq, dk and dv as `layers.attention.op.backward` does, in bf16 or fp16."""
    shape = _shape(q_sbad, k_tbgd, v_tbgd, mask, scale)
    # The kernel does not write the gradients of keys without queries.
    make = torch.empty_like if mask.cu_seqlens_q is mask.cu_seqlens_k else torch.zeros_like
    dq, dk, dv = make(q_sbad), make(k_tbgd), make(v_tbgd)
    tensors = {
        "q": q_sbad, "k": k_tbgd, "v": v_tbgd, "o": o_sbad, "do": do_sbad, "lse": lse_sba, "dq": dq, "dk": dk, "dv": dv,
    }  # fmt: skip
    _graph(shape, True).run({**_segments(shape, mask), **tensors})
    return dq, dk, dv


def _shape(q_sbad: Tensor, k_tbgd: Tensor, v_tbgd: Tensor, mask: AttentionMask, scale: float | None) -> _Shape:
    s, b, a, d = q_sbad.shape
    t, _, g, _ = k_tbgd.shape
    assert mask.cu_seqlens_q is not None
    n = mask.cu_seqlens_q.shape[1] - 1
    scale = d**-0.5 if scale is None else scale
    w, how = v_tbgd.shape[-1], (mask.causal, mask.square, mask.window)
    return _Shape(q_sbad.device, q_sbad.dtype, s, t, b, a, g, d, w, n, *how, scale)


def _segments(shape: _Shape, mask: AttentionMask) -> dict[str, Tensor]:
    """Return lengths `[b·n]` int32 and offsets `[b·n + 1]` int64, in elements of each kind of tensor.

    The kernel computes segments in the order returned here. The longest segment comes first, because it would compute
    alone if it came last.
    """
    b, a, g, d, w = key = shape.b, shape.a, shape.g, shape.d, shape.w
    if key not in mask.derived:
        assert mask.cu_seqlens_q is not None
        assert mask.cu_seqlens_k is not None
        length_q, row_q = _lengths_and_rows(mask.cu_seqlens_q, b)
        length_k, row_k = _lengths_and_rows(mask.cu_seqlens_k, b)
        order = length_k.argsort(descending=True, stable=True)
        row_q, row_k = (torch.nn.functional.pad(row[order], (0, 1)) for row in (row_q, row_k))
        mask.derived[key] = {
            "length_q": length_q[order], "length_k": length_k[order],
            "offset_q": row_q * (a * d), "offset_k": row_k * (g * d), "offset_lse": row_q * a,
            "offset_v": row_k * (g * w), "offset_o": row_q * (a * w),
        }  # fmt: skip
    return mask.derived[key]


def _lengths_and_rows(cu_seqlens_bn: Tensor, b: int) -> tuple[Tensor, Tensor]:
    """Return the length of each segment, and the index of its first row in `[s·b]`."""
    ends_bn = cu_seqlens_bn.expand(b, -1)
    lengths = ends_bn.diff(dim=1).flatten()
    sample = torch.arange(b, device=ends_bn.device)[:, None]
    rows = (ends_bn[:, :-1].long() * b + sample).flatten()
    return lengths, rows


class _Graph:
    """Graph of the front end, with its tensors by name."""

    def __init__(self, shape: _Shape, backward: bool) -> None:
        import cudnn

        self._cudnn, self._device = cudnn, shape.device
        self._handle = _handle(shape.device)
        io = {torch.bfloat16: cudnn.data_type.BFLOAT16, torch.float16: cudnn.data_type.HALF}[shape.dtype]
        fp32 = cudnn.data_type.FLOAT
        graph = cudnn.pygraph(io_data_type=io, intermediate_data_type=fp32, compute_data_type=fp32, handle=self._handle)
        segments, b, d, w = shape.b * shape.n, shape.b, shape.d, shape.w
        layouts = {
            "offset_q": (shape.a, shape.s, d),
            "offset_k": (shape.g, shape.t, d),
            "offset_v": (shape.g, shape.t, w),
            "offset_o": (shape.a, shape.s, w),
            "offset_lse": (shape.a, shape.s, 1),
        }
        tensors: dict[str, Any] = {}

        def vector(name: str, size: int, dtype: Any) -> None:
            tensors[name] = graph.tensor(name=name, dim=[size, 1, 1, 1], stride=[1, 1, 1, 1], data_type=dtype)

        def heads(name: str, offset: str, tensor: Any = None) -> Any:
            """Declare an input, or an operation's result `tensor`, with segments that begin at `offset`."""
            count, longest, width = layouts[offset]
            dim, stride = [segments, count, longest, width], [longest * b * count * width, width, b * count * width, 1]
            dtype = fp32 if name == "lse" else io
            if tensor is None:
                tensor = graph.tensor(name=name, dim=dim, stride=stride, data_type=dtype)
            else:
                tensor.set_output(True).set_dim(dim).set_stride(stride).set_data_type(dtype)
            tensors[name] = tensor.set_ragged_offset(tensors[offset])
            return tensor

        for name in ("length_q", "length_k"):
            vector(name, segments, cudnn.data_type.INT32)
        for name in ("offset_q", "offset_k", "offset_v", "offset_o", "offset_lse"):
            vector(name, segments + 1, cudnn.data_type.INT64)
        q, k, v = heads("q", "offset_q"), heads("k", "offset_k"), heads("v", "offset_v")
        common: dict[str, Any] = {
            "attn_scale": shape.scale, "use_padding_mask": True,
            "seq_len_q": tensors["length_q"], "seq_len_kv": tensors["length_k"],
        }  # fmt: skip
        if shape.causal:
            # Aligning at the ends of segments takes 1.5 times as long, and skips no keys before a window.
            align = cudnn.diagonal_alignment
            common["diagonal_alignment"] = align.TOP_LEFT if shape.square else align.BOTTOM_RIGHT
            common["diagonal_band_right_bound"] = 0
        if shape.window is not None:
            common["diagonal_band_left_bound"] = shape.window
        if not backward:
            o, lse = graph.sdpa(name="attention", q=q, k=k, v=v, generate_stats=True, **common)
            heads("o", "offset_o", o)
            heads("lse", "offset_lse", lse)
        else:
            o, do, lse = heads("o", "offset_o"), heads("do", "offset_o"), heads("lse", "offset_lse")
            dq, dk, dv = graph.sdpa_backward(
                name="attention_backward", q=q, k=k, v=v, o=o, dO=do, stats=lse,
                max_total_seq_len_q=shape.s * b, max_total_seq_len_kv=shape.t * b, **common,
            )  # fmt: skip
            heads("dq", "offset_q", dq)
            heads("dk", "offset_k", dk)
            heads("dv", "offset_v", dv)
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([cudnn.heur_mode.A])
        graph.check_support()
        graph.build_plans()
        self._graph, self._tensors = graph, tensors
        self._workspace = max(1, graph.get_workspace_size())

    def run(self, tensors: dict[str, Tensor]) -> None:
        """Queue the graph on the current stream; `tensors` holds inputs and outputs by name."""
        self._cudnn.set_stream(handle=self._handle, stream=torch.cuda.current_stream(self._device).cuda_stream)
        workspace = torch.empty(self._workspace, dtype=torch.uint8, device=self._device)
        self._graph.execute({self._tensors[name]: x for name, x in tensors.items()}, workspace, handle=self._handle)


@functools.cache
def _handle(device: torch.device) -> Any:
    import cudnn

    with torch.cuda.device(device):
        return cudnn.create_handle()


@functools.cache
def _graph(shape: _Shape, backward: bool) -> _Graph:
    with torch.cuda.device(shape.device):
        return _Graph(shape, backward)
