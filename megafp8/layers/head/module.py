"""End of a model: final norm, output layer and loss. BERT adds a transform and an optional binary head.

Shapes: s sequence, b micro-batch, h hidden, v vocabulary, t tensor-parallel size.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from megafp8.layers.context import BuildContext
from megafp8.layers.costs import MicroBatch
from megafp8.layers.dropout.reference import Dropout
from megafp8.layers.head.bert import BinaryHead, HeadTransform
from megafp8.layers.head.op import LabelLosses, vocab_parallel_losses
from megafp8.layers.head.parts import (
    Output,
    PartLoss,
    SummedLoss,
    TokenPart,
    joined,
    label_losses,
    summed_loss,
    token_parts,
)
from megafp8.layers.hyper_connections.module import StreamCollapse
from megafp8.layers.norm.module import block_norm, normalized
from megafp8.parallel.sharding import Init
from megafp8.parallel.tensor.layers import ColumnParallelLinear
from megafp8.spec import ModelSpec


class Head(nn.Module):
    """Final norm, output layer and loss of the last stage. BERT adds a transform and an optional binary head.

    `tied` is the weight of the output layer if the embedding has it too. `z_loss` is the weight of the z-loss. At most
    about `tokens_at_once` tokens of a micro-batch have logits at the same time.
    """

    def __init__(
        self,
        model: ModelSpec,
        context: BuildContext,
        tied: nn.Parameter | None,
        *,
        z_loss: float = 0.0,
        tokens_at_once: int = sys.maxsize,
    ) -> None:
        super().__init__()
        self.context, self.vocab_size, self.z_loss = context, model.stem.known_vocab_size, z_loss
        self.tokens_at_once = tokens_at_once
        self.scaling, self.softcap = model.head.logits_divisor, model.head.logit_softcap
        if model.architecture == "t5" and model.head.tied:
            self.scaling *= math.sqrt(model.hidden_size)
        self.collapse: StreamCollapse | None = None
        if model.hyper_connections is not None:
            self.collapse = StreamCollapse("final_connection", model, context)
        self.norm = block_norm("final_norm", model, context) if model.head.normalizes else None
        transforms = model.head.activation is not None
        self.transform = HeadTransform(model, context) if transforms else None
        self.binary = BinaryHead(model, context) if model.head.binary else None
        self.output = ColumnParallelLinear(
            "output",
            model.hidden_size,
            model.stem.rows,
            init=Init("normal", model.init_std),
            high_precision="the output layer stays in training.precision",
            weight=tied,
            bias=model.head.biased,
            site=context.site(),
            **context.linear_options(),
        )

    def flops(self, batch: MicroBatch) -> float:
        """Return the model FLOPs of the forward pass, excluding linear layers."""
        return 0.0 if self.collapse is None else self.collapse.flops(batch)

    def _hidden(self, x_sbh: Tensor, branch_sbh: Tensor | None, dropout: Dropout | None = None) -> Tensor:
        """Return the model's hidden states after the final norm."""
        if self.collapse is not None:
            assert branch_sbh is None
            x_sbh = self.collapse(x_sbh)
        if self.norm is None:
            assert branch_sbh is None
            return x_sbh
        return normalized(self.norm, x_sbh, branch_sbh, dropout)

    def logits(
        self, x_sbh: Tensor, branch_sbh: Tensor | None, dropout: Dropout | None = None, *, capped: bool = True
    ) -> Tensor:
        """Return this rank's logits `[s, b, v/t]`.

        With `capped=False` they have no soft cap, as the loss expects, because it applies the soft cap in fp32.
        """
        return self._logits(self._transformed(self._hidden(x_sbh, branch_sbh, dropout)), capped=capped)

    def _transformed(self, hidden_sbh: Tensor) -> Tensor:
        """Return the input of the output layer. It is scaled instead of the logits; an output bias is not scaled."""
        x_sbh = hidden_sbh if self.transform is None else self.transform(hidden_sbh)
        return x_sbh if self.scaling == 1 else x_sbh / self.scaling

    def _logits(self, x_sbh: Tensor, *, capped: bool) -> Tensor:
        """Return the logits for an input of the output layer."""
        logits_sbv: Tensor = self.output(x_sbh)
        return logits_sbv if self.softcap is None or not capped else self.softcap * (logits_sbv / self.softcap).tanh()

    def forward(
        self,
        x_sbh: Tensor,
        branch_sbh: Tensor | None,
        labels_bs: Tensor | None,
        look_ahead: Callable[[Tensor], Tensor] | None = None,
        dropout: Dropout | None = None,
        *,
        capped: bool = True,
        loss: PartLoss | None = None,
        read: Callable[[Tensor, TokenPart], Tensor] | None = None,
    ) -> Tensor | LabelLosses | SummedLoss:
        """Return the losses of each token, a micro-batch's `loss`, or something about this rank's `logits`.

        Losses of tokens are `[s, b]`. With the binary head they are `[s, 2b]`, with the losses of the samples in the
        first row. They are differentiable, and then all logits exist at the same time; with `loss`, or without
        gradients, the logits of only some tokens do.

        Args:
            x_sbh: Residual stream.
            branch_sbh: Output of the last sublayer, which is added to `x_sbh`; None if it is already added.
            labels_bs: Labels; None returns logits. With the binary head, the labels of the samples follow the labels of
                the tokens.
            look_ahead: Function that maps the main model's input of the output layer to the inputs of all depths of
                multi-token prediction.
            dropout: Dropout of the branch.
            capped: Whether returned logits have the soft cap.
            loss: Loss to return with its gradients.
            read: Function that maps the logits `[n, b, v/t]` of a part of the tokens to a tensor `[n, ...]`. The tensor
                for all tokens is returned, without gradients.
        """
        if labels_bs is None:
            return self.logits(x_sbh, branch_sbh, dropout, capped=capped)
        hidden_sbh = self._hidden(x_sbh, branch_sbh, dropout)
        binary: list[Tensor] = []
        output: Output = self._logits_of_part
        if read is None and (loss is None or not loss.reads_logits):
            output = partial(self._losses_of_part, labels_bs)
            if self.binary is not None:
                binary = [self.binary(hidden_sbh, labels_bs[hidden_sbh.shape[1] :, 0])]
            hidden_sbh = hidden_sbh if look_ahead is None else look_ahead(hidden_sbh)
        x_sbh = self._transformed(hidden_sbh)
        shards = self.context.tensor.size() if self.context.sequence_sharded else 1
        parts = token_parts(len(x_sbh), x_sbh.shape[1], shards=shards, at_once=self.tokens_at_once)
        if loss is not None:
            return summed_loss(loss, output, parts, self.output, x_sbh, binary)
        if read is not None:
            results = [read(output(part, x_sbh[part.start : part.stop]), part) for part in parts]
            return joined(results, parts)
        if torch.is_grad_enabled():  # backward needs all logits
            parts = [TokenPart(0, len(x_sbh), shards)]
        return label_losses(output, parts, x_sbh, binary)

    def _logits_of_part(self, _: TokenPart, x_sbh: Tensor) -> Tensor:
        """Return the logits of a part from its input of the output layer."""
        return self._logits(x_sbh, capped=True)

    def _losses_of_part(
        self, labels_bs: Tensor, part: TokenPart, x_sbh: Tensor, binary_b: Tensor | None = None
    ) -> LabelLosses:
        """Return the losses of a part, from its input of the output layer and the losses of the binary head."""
        assert self.vocab_size is not None
        own_labels_bs = part.of(labels_bs, 1)[: x_sbh.shape[1]]
        losses = vocab_parallel_losses(
            self._logits(x_sbh, capped=False),
            own_labels_bs.transpose(0, 1).contiguous(),
            self.context.tensor,
            vocab_size=self.vocab_size,
            z_loss=self.z_loss,
            softcap=self.softcap,
        )
        if binary_b is None:
            return losses
        loss_sb, z_loss_sb = losses
        samples_1b = binary_b.to(loss_sb.dtype).unsqueeze(0) * float(part.start == 0)
        samples_sb = nn.functional.pad(samples_1b, (0, 0, 0, len(loss_sb) - 1))
        return LabelLosses(torch.cat([loss_sb, samples_sb], dim=1), nn.functional.pad(z_loss_sb, (0, len(binary_b))))
