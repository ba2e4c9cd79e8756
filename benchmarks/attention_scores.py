"""Cases of `bench_attention --scores`: attention with scores other than q·k/√d, compared with other kernels.

Each case has megafp8's kernel, which is first compared with the reference, and the kernels of cuDNN, flash attention
and FlexAttention that compute the same. Other kernels draw other random numbers for dropout, so only their time is
comparable.

Shapes: s sequence, b micro-batch, a query heads, g key-value heads of width d; r distances.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from megafp8.layers.attention import reference as attention_reference
from megafp8.layers.attention.mask import CAUSAL, AttentionMask, key_ranges
from megafp8.layers.attention.scores import AttentionDropout, Scores

OTHERS = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "torch's flash": SDPBackend.FLASH_ATTENTION}


@dataclass(frozen=True)
class Case:
    """Case with functions that build `mask` and `scores` from b, s, a and a device.

    `others` lists the options of torch's kernels that compute the same.
    """

    name: str
    s: int
    b: int
    a: int
    g: int
    d: int
    mask: Callable[[int, int, torch.device], AttentionMask]
    scores: Callable[[int, int, int, torch.device], Scores]
    others: dict[str, Any] | None = None


def _alibi(b: int, s: int, a: int, device: torch.device) -> Scores:
    slopes = 2.0 ** (-8 * torch.arange(1, a + 1, device=device) / a)
    return Scores(distance_bias_ar=slopes[:, None] * torch.arange(1 - s, s, device=device))


def _learned(b: int, s: int, a: int, device: torch.device) -> Scores:
    return Scores(scale=1.0, distance_bias_ar=torch.randn(a, 2 * s - 1, device=device, requires_grad=True))


def _dropout(b: int, s: int, a: int, device: torch.device) -> Scores:
    return Scores(dropout=AttentionDropout(0.1, (1, 2), torch.arange(b, device=device)))


def _plain(b: int, s: int, a: int, device: torch.device) -> Scores:
    return Scores()


def _causal(b: int, s: int, device: torch.device) -> AttentionMask:
    return CAUSAL


def _prefix(b: int, s: int, device: torch.device) -> AttentionMask:
    return AttentionMask(prefix_b=torch.full((b,), s // 4, device=device))


CASES = [
    Case("causal", 8192, 1, 32, 8, 128, _causal, _plain, {"is_causal": True}),
    Case(
        "soft cap, window 4096", 8192, 1, 16, 8, 256, lambda b, s, _: AttentionMask(window=s // 2),
        lambda *_: Scores(scale=256**-0.5, softcap=50.0),
    ),
    Case("ALiBi", 4096, 1, 32, 32, 128, _causal, _alibi),
    Case("T5, learned bias", 512, 64, 12, 12, 64, lambda *_: AttentionMask(causal=False), _learned),
    Case("dropout 0.1", 4096, 1, 32, 32, 128, _causal, _dropout, {"is_causal": True, "dropout_p": 0.1}),
    Case("prefix of a quarter", 8192, 1, 32, 8, 128, _prefix, _plain),
]  # fmt: skip


@dataclass(frozen=True)
class Contender:
    """Kernel of a case. `flops` are the FLOPs of forward, computed from the visible pairs."""

    case: str
    kernel: str
    forward: Callable[[], object]
    backward: Callable[[], object]
    flops: float


def contenders(case: Case, divisor: int, device: torch.device) -> Iterator[Contender | str]:
    """Yield the kernels of a case, with its sequence divided by `divisor`, and lines about results and failures."""
    s, b, a, d = case.s // divisor, case.b, case.a, case.d
    mask, scores = case.mask(b, s, device), case.scores(b, s, a, device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    q, k, v, do = (torch.randn(s, b, n, d, device=device, dtype=dtype) for n in (a, case.g, case.g, a))
    first_bs, end_bs = key_ranges(mask, s, s, device)
    flops = 4.0 * d * a * (end_bs - first_bs).expand(b, -1).sum().item()
    module = _own_kernel(device)
    bias_grad = scores.distance_bias_ar is not None and scores.distance_bias_ar.requires_grad
    o, lse = module.forward(q, k, v, mask, scores)
    gradients = module.backward(do, q, k, v, o, lse, mask, scores, bias_grad)
    yield f"{case.name}: relative errors against the reference: " + _errors(
        (o, *gradients), (q, k, v, do), mask, scores, bias_grad
    )
    yield Contender(
        case.name, "ours", lambda: module.forward(q, k, v, mask, scores),
        lambda: module.backward(do, q, k, v, o, lse, mask, scores, bias_grad), flops,
    )  # fmt: skip
    functions: dict[str, Callable[..., Tensor]] = {}
    if case.others is not None:
        functions |= {name: _sdpa(backend, case.others) for name, backend in OTHERS.items()}
    if device.type == "cuda" and scores.dropout is None:
        functions["FlexAttention"] = _flex(mask, scores, s, b, device)
    leaves = [x.detach().permute(1, 2, 0, 3).requires_grad_() for x in (q, k, v)]
    do_basd = do.permute(1, 2, 0, 3)
    for name, function in functions.items():
        try:
            y = function(*leaves)
            inputs = [*leaves, scores.distance_bias_ar] if bias_grad and name == "FlexAttention" else leaves
            torch.autograd.grad(y, inputs, do_basd, retain_graph=True)
        except Exception as error:  # this kernel does not support the case, but the others are still measured
            yield f"{case.name}: {name} does not run: {str(error).strip().splitlines()[-1][:100]}"
            continue
        yield Contender(
            case.name, name, lambda f=function: f(*leaves),  # type: ignore[misc]
            lambda y=y, x=inputs: torch.autograd.grad(y, x, do_basd, retain_graph=True), flops,  # type: ignore[misc]
        )  # fmt: skip


def use_tiles(given: list[str]) -> None:
    """Use other tiles in megafp8's kernels, given as kernel=queries,keys,warps,stages."""
    if not given:
        return
    from megafp8.layers.attention import kernel as attention

    found = attention._tiles
    tiles = {
        name: attention._Tile(*map(int, numbers.split(","))) for name, _, numbers in (x.partition("=") for x in given)
    }
    attention._tiles = lambda *arguments: found(*arguments)._replace(**tiles)


def _own_kernel(device: torch.device) -> Any:
    if device.type != "cuda":
        return attention_reference
    from megafp8.layers.attention import kernel as attention

    return attention


def _errors(
    found: tuple[Tensor | None, ...], tensors: tuple[Tensor, ...], mask: AttentionMask, scores: Scores, bias_grad: bool
) -> str:
    """Describe |actual - expected| / |expected| of the output and all gradients. The reference runs in fp32."""
    q, k, v, do = (x.float() for x in tensors)
    o, lse = attention_reference.forward(q, k, v, mask, scores)
    expected = o, *attention_reference.backward(do, q, k, v, o, lse, mask, scores, bias_grad)
    return ", ".join(
        f"{name} {((x.float() - y).norm() / y.norm()).item():.1e}"
        for name, x, y in zip(("o", "dq", "dk", "dv", "dbias"), found, expected, strict=True)
        if x is not None and y is not None
    )


def _sdpa(backend: SDPBackend, options: dict[str, Any]) -> Callable[..., Tensor]:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend if q.is_cuda else SDPBackend.MATH):
            return F.scaled_dot_product_attention(q, k, v, enable_gqa=q.shape[1] != k.shape[1], **options)

    return run


def _flex(mask: AttentionMask, scores: Scores, s: int, b: int, device: torch.device) -> Callable[..., Tensor]:
    """Build FlexAttention with the same mask and scores, compiled."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    first_bs, end_bs = (x.expand(b, -1).contiguous() for x in key_ranges(mask, s, s, device))
    blocks = create_block_mask(
        lambda sample, _, i, j: (j >= first_bs[sample, i]) & (j < end_bs[sample, i]), b, None, s, s, device=device
    )
    cap, bias_ar = scores.softcap, scores.distance_bias_ar

    def score(x: Tensor, _: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
        if cap is not None:
            x = cap * torch.tanh(x / cap)
        return x if bias_ar is None else x + bias_ar[head, j - i + s - 1]

    compiled = torch.compile(flex_attention, dynamic=False)
    plain = cap is None and bias_ar is None
    return lambda q, k, v: compiled(
        q, k, v, score_mod=None if plain else score, block_mask=blocks, scale=scores.scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )  # fmt: skip
