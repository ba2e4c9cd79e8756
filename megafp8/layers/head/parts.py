"""Loss of a micro-batch in parts, so that the logits of only some tokens exist at a time.

All logits of a micro-batch together are often the largest tensor of a step: for 131,072 tokens and 151,936 columns they
take 40 GB in bf16. So parts of the tokens are computed one after another in the forward pass, each with its gradients:
the logits, the loss, the gradient of the logits, which overwrites them, and from it the gradients of the hidden states
and of the output layer. Backward only returns these gradients, so the loss must be differentiated with the gradient 1.

A part is a run of rows of each tensor-parallel rank's shard of the sequence. The output layer then gathers a part's
tokens, and sums the gradients of its hidden states over the ranks, exactly as it does for all tokens.

Shapes: s sequence, b micro-batch, with the labels of all depths of multi-token prediction; h hidden, v vocabulary, t
tensor-parallel size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from megafp8.layers.head.op import LabelLosses
from megafp8.linear.grad_sink import one_gradient

_ALIGN = 128
"""Rows of a part are a multiple of this if there are as many: GEMMs are slower with odd numbers of tokens."""


class TokenPart(NamedTuple):
    """Rows `start` to `stop` of each of `shards` equal shards of a sequence."""

    start: int
    stop: int
    shards: int

    def of(self, x: Tensor, dim: int) -> Tensor:
        """Return the part's elements of x, in which `dim` is the whole sequence."""
        sharded = x.unflatten(dim, (self.shards, -1)).narrow(dim + 1, self.start, self.stop - self.start)
        return sharded.flatten(dim, dim + 1)


def rows_of_part(rows: int, b: int, *, shards: int, at_once: int) -> int:
    """Return the number of rows in a part if `rows` rows of b tokens in each shard are divided.

    A part has at most about `at_once` tokens. The parts are as even as alignment allows.
    """
    size = -(-rows // -(-(rows * shards * b) // at_once))
    return size if size <= _ALIGN else min(rows, -(-size // _ALIGN) * _ALIGN)


def token_parts(rows: int, b: int, *, shards: int, at_once: int) -> list[TokenPart]:
    """Divide `rows` rows of b tokens in each shard into parts of `rows_of_part` rows; the last may have fewer."""
    size = rows_of_part(rows, b, shards=shards, at_once=at_once)
    return [TokenPart(start, min(start + size, rows), shards) for start in range(0, rows, size)]


def joined(outputs: Sequence[Tensor], parts: Sequence[TokenPart]) -> Tensor:
    """Return the tensor of the whole sequence `[s, ...]` from its parts."""
    if len(outputs) == 1:
        return outputs[0]
    sharded = [x.unflatten(0, (part.shards, -1)) for x, part in zip(outputs, parts, strict=True)]
    return torch.cat(sharded, dim=1).flatten(0, 1)


class SummedLoss(NamedTuple):
    """Loss of a micro-batch.

    Attributes:
        value: Sum of the losses, `[]`, which is differentiable with the gradient 1.
        report: Values for the log, which add up over parts.
    """

    value: Tensor
    report: Tensor


class PartLoss(NamedTuple):
    """Loss of a micro-batch, computed part by part.

    Attributes:
        compute: Function that returns the loss and the report of a part, from the logits or label losses of its tokens.
        reads_logits: Whether it reads this rank's logits `[s, b, v/t]` instead of the losses of labels.
        adds_up: Whether the loss and the report of the micro-batch are the sums over its parts.
    """

    compute: Callable[[Tensor | LabelLosses, TokenPart], tuple[Tensor, Tensor]]
    reads_logits: bool
    adds_up: bool


class _Differentiated(Function):
    """The identity for a loss whose gradients have been computed."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, gradients: Sequence[Tensor | None], *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*gradients)
        return value.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        torch._assert_async(dloss == 1)  # the gradients of the output layer have already been added
        return None, None, *ctx.saved_tensors


Output = Callable[..., Any]
"""Function of a part, the part of the output layer's input, and other inputs, which returns logits or label losses."""


def label_losses(output: Output, parts: Sequence[TokenPart], x_sbh: Tensor, others: Sequence[Tensor]) -> LabelLosses:
    """Return the losses of all labels, computed part by part."""
    losses = [output(part, x_sbh[part.start : part.stop], *others) for part in parts]
    return LabelLosses(*(joined(values, parts) for values in zip(*losses, strict=True)))


def summed_loss(
    loss: PartLoss,
    output: Output,
    parts: Sequence[TokenPart],
    layer: nn.Module,
    x_sbh: Tensor,
    others: Sequence[Tensor] = (),
) -> SummedLoss:
    """Return the loss of a micro-batch, with its gradients if they are enabled.

    Args:
        loss: Loss of the micro-batch.
        output: Function that returns the output for a part.
        parts: Parts of the sequence.
        layer: Output layer. The gradients of its parameters are added right away, in the forward pass.
        x_sbh: Input of the output layer, or this rank's shard of it.
        others: Other inputs of `output`.
    """
    trains = torch.is_grad_enabled() and any(x.requires_grad for x in (*layer.parameters(), x_sbh, *others))
    if loss.adds_up or len(parts) == 1:

        def compute(part: TokenPart, *inputs: Tensor) -> tuple[Tensor, Tensor]:
            return loss.compute(output(part, *inputs), part)

        if trains:
            return _with_gradients(compute, parts, layer, x_sbh, others)
        return _total([compute(part, x_sbh[part.start : part.stop], *others) for part in parts])

    # The gradient of a token's loss depends on the losses of all tokens, so the logits are computed twice.
    with torch.no_grad():
        entropy_sb, z_loss_sb = label_losses(output, parts, x_sbh, others)
    entropy_sb.requires_grad_(trains)
    all_tokens = TokenPart(0, len(x_sbh), parts[0].shards)
    known = SummedLoss(*loss.compute(LabelLosses(entropy_sb, z_loss_sb), all_tokens))
    if not trains:
        return known
    (weight_sb,) = torch.autograd.grad(known.value, entropy_sb)

    def weighted(part: TokenPart, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        return (output(part, *inputs).cross_entropy * part.of(weight_sb, 0)).sum(), known.report

    return _with_gradients(weighted, parts, layer, x_sbh, others, known)


def _with_gradients(
    compute: Callable[..., tuple[Tensor, Tensor]],
    parts: Sequence[TokenPart],
    layer: nn.Module,
    x_sbh: Tensor,
    others: Sequence[Tensor],
    known: SummedLoss | None = None,
) -> SummedLoss:
    """Return the sum of `compute` over parts, or `known`. The gradients of the parameters are added right away."""
    own_others = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in others]
    dx: list[Tensor] = []
    results = []
    # As in the engine: stay in this thread, where the Python code of Functions is faster.
    with torch.enable_grad(), torch.autograd.set_multithreading_enabled(False), ExitStack() as context:
        if len(parts) > 1:
            context.enter_context(one_gradient(layer.parameters()))
        for part in parts:
            x_part = x_sbh.detach()[part.start : part.stop].requires_grad_(x_sbh.requires_grad)
            value, report = compute(part, x_part, *own_others)
            value.backward()
            dx += [] if x_part.grad is None else [x_part.grad]
            results.append((value.detach(), report))
            del x_part, value, report  # the next part needs their memory
    value, report = _total(results) if known is None else known
    whole_dx = torch.cat(dx) if len(dx) > 1 else next(iter(dx), None)
    gradients = [whole_dx, *(leaf.grad for leaf in own_others)]
    return SummedLoss(_Differentiated.apply(value.detach(), gradients, x_sbh, *others), report)


def _total(results: Sequence[tuple[Tensor, Tensor]]) -> SummedLoss:
    """Return the sums of losses and reports."""
    if len(results) == 1:
        return SummedLoss(*results[0])
    return SummedLoss(*(torch.stack(values).sum(0) for values in zip(*results, strict=True)))
