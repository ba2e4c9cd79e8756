"""Causal attention and its gradients in float64, exactly or rounded to FP8 where an FP8 kernel rounds.

What a kernel is held against (`tools/bench_attention.py`). Exact, it is the truth. Rounded, it says how much of a
kernel's error is FP8's own: q, k and v, the probabilities, the output, the output's gradient, the gradient of the
scores and the three gradients that come out each pass through eight bits, with one factor for a tensor. A kernel that
is much worse than that has a factor wrong.

The matrix of scores is made for one head at a time, so 8192 tokens need a few GiB. Factors of p, ds and the output are
therefore those of a head; since rounding is relative, that matters only for what underflows.

Shapes: s sequence (i queries, j keys), b batch, a query heads, g key-value heads, d head width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megafp8.fp8.formats import Format


@dataclass(frozen=True)
class Problem:
    """q and the output's gradient do `[s, b, a, d]`, k and v `[s, b, g, d]`, as they lie in the model."""

    q_sbad: Tensor
    k_sbgd: Tensor
    v_sbgd: Tensor
    do_sbad: Tensor


@dataclass(frozen=True)
class Rounding:
    """The formats of a kernel: `values` for the inputs, the probabilities and the output; `do` for the output's
    gradient and that of the scores; `grads` for dq, dk and dv. None: no rounding there."""

    values: Format | None = None
    do: Format | None = None
    grads: Format | None = None


EXACT = Rounding()


@dataclass(frozen=True)
class Coded:
    """What a kernel reads or leaves, `[s, b, a or g, d]`: FP8 codes and the factor `[1]` that takes them back, or the
    values themselves and one."""

    codes: Tensor
    descale: Tensor

    def values(self) -> Tensor:
        return self.codes.double() * self.descale.double()


def factor(x: Tensor, fmt: Format) -> Tensor:
    """What takes the largest magnitude of `x` to that of `fmt`, `[1]` in fp32; 1 for a tensor of zeros."""
    amax = x.abs().amax().float().reshape(1)
    return torch.where(amax > 0, fmt.max / amax, 1.0)


def coded(x: Tensor, fmt: Format) -> Coded:
    scale = factor(x, fmt)
    return Coded((x.float() * scale).clamp(-fmt.max, fmt.max).to(fmt.dtype), scale.reciprocal())


def rounded(x: Tensor, fmt: Format | None) -> Tensor:
    """`x` in float64, having passed through `fmt`."""
    return x.double() if fmt is None else coded(x, fmt).values()


def attention(problem: Problem, rounding: Rounding = EXACT) -> dict[str, Tensor]:
    """The output "o", "dq" `[s, b, a, d]`, "dk" and "dv" `[s, b, g, d]` in float64."""
    q, k, v = (rounded(x, rounding.values) for x in (problem.q_sbad, problem.k_sbgd, problem.v_sbgd))
    do = rounded(problem.do_sbad, rounding.do)
    heads_of_a_group = q.shape[2] // k.shape[2]
    result = {"o": torch.empty_like(q), "dq": torch.empty_like(q)}
    result |= {"dk": torch.zeros_like(k), "dv": torch.zeros_like(v)}
    for b in range(q.shape[1]):
        for a in range(q.shape[2]):
            g = a // heads_of_a_group
            o, dq, dk, dv = _head(q[:, b, a], k[:, b, g], v[:, b, g], do[:, b, a], rounding)
            result["o"][:, b, a], result["dq"][:, b, a] = o, dq
            result["dk"][:, b, g] += dk
            result["dv"][:, b, g] += dv
    for name in ("dq", "dk", "dv"):
        result[name] = rounded(result[name], rounding.grads)
    return result


def _head(
    q_sd: Tensor, k_sd: Tensor, v_sd: Tensor, do_sd: Tensor, rounding: Rounding
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """o, dq, dk, dv of one head, `[s, d]` each."""
    scale = q_sd.shape[1] ** -0.5
    scores_ij = (q_sd @ k_sd.T).mul_(scale)
    future = torch.ones_like(scores_ij, dtype=torch.bool).triu_(1)
    p_ij = scores_ij.masked_fill_(future, float("-inf")).softmax(dim=-1)
    seen_ij = rounded(p_ij, rounding.values)
    o_sd = rounded(seen_ij @ v_sd, rounding.values)
    dv_sd = seen_ij.T @ do_sd
    dp_ij = (do_sd @ v_sd.T).sub_((do_sd * o_sd).sum(dim=-1, keepdim=True))
    ds_ij = rounded(dp_ij.mul_(p_ij).mul_(scale), rounding.do)
    return o_sd, ds_ij @ k_sd, ds_ij.T @ q_sd, dv_sd


def difference(actual: Tensor, expected: Tensor) -> float:
    """|actual - expected| / |expected|."""
    return ((actual.double() - expected).norm() / expected.norm()).item()


def random_problem(s: int, heads: int, groups: int, width: int, outliers: bool, device: torch.device) -> Problem:
    """Standard normal numbers in bf16, batch 1. With `outliers` one number in a thousand has a normal number of
    standard deviation 10 added (Shah et al. 2024, arXiv:2407.08608), and one channel in 32 of k is eightfold, as in
    trained models."""
    generator = torch.Generator(device).manual_seed(3)

    def normal(heads: int, *, channels: bool) -> Tensor:
        x = torch.randn((s, 1, heads, width), generator=generator, device=device)
        if outliers:
            rare = torch.rand(x.shape, generator=generator, device=device) < 1e-3
            x += 10 * torch.randn(x.shape, generator=generator, device=device) * rare
            if channels:
                x[..., ::32] *= 8
        return x.bfloat16()

    return Problem(
        normal(heads, channels=False),
        normal(groups, channels=True),
        normal(groups, channels=False),
        normal(heads, channels=False),
    )
