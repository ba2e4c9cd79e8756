"""The attention kernels that `tools/bench_attention.py` compares: bf16 as the model calls it, and FP8 as packaged.

A variant is a forward pass or a backward pass. Each is made for one problem, with inputs already in its format, and
`run` is what is timed: the kernel alone, into buffers that it keeps. Casts are timed by themselves, because in training
most of them would ride on kernels that write those tensors anyway.

FlashAttention-3 (the wheel `fa3-fwd`) has an FP8 forward pass with a bf16 output, and no FP8 backward pass at all.

Any forward pass can be followed by any backward pass that takes what it leaves: its output and the log-sum-exp of the
scores. That is how the mixtures work.

Shapes: s sequence, b batch, a query heads, g key-value heads, d head width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from megafp8.fp8.formats import E4M3, E5M2, Format
from megafp8.models.attention import core_attention
from tools.cudnn_attention import Cudnn, CudnnBackward, CudnnForward
from tools.plain_attention import Coded, Problem, coded


class Forward(Protocol):
    """`stats`, the log-sum-exp of each query's scores in fp32, `[b, a, s]`; `note`, what else is worth a word."""

    problem: Problem
    note: str

    @property
    def output(self) -> Coded: ...

    @property
    def stats(self) -> Tensor: ...

    def run(self) -> object: ...


class Backward(Protocol):
    note: str

    def run(self) -> object: ...

    def gradients(self) -> dict[str, Tensor]:
        """dq `[s, b, a, d]`, dk and dv `[s, b, g, d]` in float64."""
        ...


def coded_inputs(problem: Problem) -> tuple[Coded, ...]:
    return tuple(coded(x, E4M3) for x in (problem.q_sbad, problem.k_sbgd, problem.v_sbgd))


# --- bf16 ------------------------------------------------------------------------------------------------------------


class Bf16Forward:
    """`core_attention`, with autograd's record of it kept for the backward pass."""

    note = ""

    def __init__(self, problem: Problem, libraries: Libraries) -> None:
        self.problem = problem
        self.inputs = [x.detach().requires_grad_() for x in (problem.q_sbad, problem.k_sbgd, problem.v_sbgd)]
        self.run()

    def run(self) -> None:
        self.o_sbad = core_attention(*self.inputs, None)

    @property
    def output(self) -> Coded:
        return Coded(self.o_sbad.detach(), torch.ones(1, device=self.o_sbad.device))

    @property
    def saved(self) -> Any:
        """The node of the autograd graph that keeps what the kernel's backward pass needs."""
        permute = self.o_sbad.grad_fn
        assert permute is not None
        node = permute.next_functions[0][0]
        if not hasattr(node, "_saved_logsumexp"):
            raise RuntimeError(f"no log-sum-exp in torch's {type(node).__name__}")
        return node

    @property
    def stats(self) -> Tensor:
        stats: Tensor = self.saved._saved_logsumexp.detach()
        return stats.reshape(stats.shape[:3])


class Bf16Backward:
    """torch's backward pass of `core_attention`; after another forward pass, with that one's output and stats in place
    of its own."""

    def __init__(self, forward: Forward, libraries: Libraries) -> None:
        self.problem = forward.problem
        own = forward if isinstance(forward, Bf16Forward) else Bf16Forward(forward.problem, libraries)
        if own is not forward:  # through `data`, which autograd does not watch
            own.o_sbad.data.copy_(forward.output.values())
            saved = own.saved._saved_logsumexp
            saved.data.copy_(forward.stats.reshape(saved.shape))
        self.forward = own
        self.note = type(own.saved).__name__.removesuffix("Backward0")

    def run(self) -> tuple[Tensor, ...]:
        return torch.autograd.grad(self.forward.o_sbad, self.forward.inputs, self.problem.do_sbad, retain_graph=True)

    def gradients(self) -> dict[str, Tensor]:
        return {name: x.double() for name, x in zip(("dq", "dk", "dv"), self.run())}


# --- cuDNN -----------------------------------------------------------------------------------------------------------


# --- FlashAttention-3 ------------------------------------------------------------------------------------------------


class FlashForward:
    """FlashAttention-3: q, k, v in E4M3, the output in bf16; a factor for each key-value head."""

    def __init__(self, problem: Problem, libraries: Libraries) -> None:
        self.problem, self.attend = problem, libraries.flash_attention
        self.inputs = coded_inputs(problem)
        _, b, g, _ = problem.k_sbgd.shape
        self.options = {f"{name}_descale": x.descale.expand(b, g).contiguous() for name, x in zip("qkv", self.inputs)}
        self.run()
        self.note = f"output in {str(self.o_bsad.dtype).removeprefix('torch.')}"

    @torch.no_grad()
    def run(self) -> None:
        q, k, v = (x.codes.transpose(0, 1) for x in self.inputs)
        self.o_bsad, self.stats = self.attend(q, k, v, causal=True, return_attn_probs=True, **self.options)

    @property
    def output(self) -> Coded:
        return Coded(self.o_bsad.transpose(0, 1), torch.ones(1, device=self.o_bsad.device))


# --- all of them -----------------------------------------------------------------------------------------------------


class Libraries:
    """What is installed, imported when first wanted."""

    @cached_property
    def cudnn(self) -> Cudnn:
        return Cudnn()

    @cached_property
    def flash_attention(self) -> Callable[..., Any]:
        from fa3_fwd_interface import flash_attn_func

        attend: Callable[..., Any] = flash_attn_func
        return attend

    def versions(self) -> Iterator[str]:
        """A line for each library: its version, or why it cannot be used."""
        try:
            api = self.cudnn.api
            yield f"nvidia-cudnn-frontend {api.__version__}, cuDNN {api.backend_version()}"
        except Exception as error:
            yield f"no cuDNN front end: {type(error).__name__}: {error}"
        try:
            yield f"FlashAttention-3 from {self.flash_attention.__module__}"
        except Exception as error:
            yield f"no FlashAttention-3: {type(error).__name__}: {error}"


BASELINE = "bf16"


def forwards() -> dict[str, Callable[[Problem, Libraries], Forward]]:
    return {
        BASELINE: Bf16Forward,
        "cudnn": lambda problem, libraries: CudnnForward(problem, libraries.cudnn),
        "fa3": FlashForward,
        "cudnn repeated": lambda problem, libraries: CudnnForward(problem, libraries.cudnn, repeat=True),
    }


def backwards() -> list[tuple[str, str, Callable[[Forward, Libraries], Backward]]]:
    """The forward pass that goes before, the name with the formats of do and of dq, dk, dv, and how to make it."""
    hybrid, mixed, precise = _cudnn(E5M2, E5M2), _cudnn(E5M2, E4M3), _cudnn(E4M3, E4M3)
    bf16 = BASELINE, Bf16Backward
    return [
        (BASELINE, *bf16),
        ("cudnn", *bf16),
        ("fa3", *bf16),
        ("cudnn", *hybrid),
        ("cudnn", *mixed),
        ("cudnn", *precise),
        ("cudnn repeated", *hybrid),
        (BASELINE, *hybrid),  # with the output in bf16, which cuDNN does not refuse
        ("fa3", *hybrid),
    ]


def _cudnn(do: Format, grads: Format) -> tuple[str, Callable[[Forward, Libraries], Backward]]:
    def build(forward: Forward, libraries: Libraries) -> Backward:
        inputs = forward.inputs if isinstance(forward, CudnnForward) else coded_inputs(forward.problem)
        return CudnnBackward(
            forward.problem, inputs, forward.output, forward.stats, libraries.cudnn, do=do, grads=grads
        )

    return f"cudnn {do.name}/{grads.name}", build
