"""End of a model: final norm, output layer and loss. BERT adds a transform and an optional binary head.

Shapes: s sequence, b micro-batch, h hidden, v vocabulary, t tensor-parallel size.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from megafp8.layers.context import BuildContext
from megafp8.layers.costs import MicroBatch
from megafp8.layers.dropout.reference import Dropout
from megafp8.layers.head.bert import BinaryHead, HeadTransform
from megafp8.layers.head.op import LabelLosses, vocab_parallel_losses
from megafp8.layers.hyper_connections.module import StreamCollapse
from megafp8.layers.norm.module import block_norm, normalized
from megafp8.parallel.sharding import Init
from megafp8.parallel.tensor.layers import ColumnParallelLinear
from megafp8.spec import ModelSpec


class Head(nn.Module):
    """Final norm, output layer and loss of the last stage. BERT adds a transform and an optional binary head."""

    def __init__(self, model: ModelSpec, context: BuildContext, tied: nn.Parameter | None, z_loss: float) -> None:
        super().__init__()
        self.context, self.vocab_size, self.z_loss = context, model.stem.known_vocab_size, z_loss
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
        logits_sbv = self._uncapped(self._hidden(x_sbh, branch_sbh, dropout))
        return logits_sbv if self.softcap is None or not capped else self.softcap * (logits_sbv / self.softcap).tanh()

    def _uncapped(self, hidden_sbh: Tensor) -> Tensor:
        """Return the logits before the soft cap. Their input, which is smaller, is scaled; an output bias is not."""
        x_sbh = hidden_sbh if self.transform is None else self.transform(hidden_sbh)
        logits_sbv: Tensor = self.output(x_sbh if self.scaling == 1 else x_sbh / self.scaling)
        return logits_sbv

    def forward(
        self,
        x_sbh: Tensor,
        branch_sbh: Tensor | None,
        labels_bs: Tensor | None,
        look_ahead: Callable[[Tensor], Tensor] | None = None,
        dropout: Dropout | None = None,
        *,
        capped: bool = True,
    ) -> Tensor | LabelLosses:
        """Return the losses of each token, or without labels this rank's `logits` `[s, b, v/t]`.

        Losses are `[s, b]`. With the binary head they are `[s, 2b]`, with the losses of the samples in the first row.

        Args:
            x_sbh: Residual stream.
            branch_sbh: Output of the last sublayer, which is added to `x_sbh`; None if it is already added.
            labels_bs: Labels; None returns logits. With the binary head, the labels of the samples follow the labels of
                the tokens.
            look_ahead: Function that maps the main model's input of the output layer to the inputs of all depths of
                multi-token prediction.
            dropout: Dropout of the branch.
            capped: Whether returned logits have the soft cap.
        """
        if labels_bs is None:
            return self.logits(x_sbh, branch_sbh, dropout, capped=capped)
        assert self.vocab_size is not None
        hidden_sbh = self._hidden(x_sbh, branch_sbh, dropout)
        b = hidden_sbh.shape[1]
        token_labels_bs = labels_bs if self.binary is None else labels_bs[:b]
        losses = vocab_parallel_losses(
            self._uncapped(hidden_sbh if look_ahead is None else look_ahead(hidden_sbh)),
            token_labels_bs.transpose(0, 1).contiguous(),
            self.context.tensor,
            vocab_size=self.vocab_size,
            z_loss=self.z_loss,
            softcap=self.softcap,
        )
        if self.binary is None:
            return losses
        loss_sb, z_loss_sb = losses
        samples_1b = self.binary(hidden_sbh, labels_bs[b:, 0]).to(loss_sb.dtype).unsqueeze(0)
        samples_sb = nn.functional.pad(samples_1b, (0, 0, 0, len(loss_sb) - 1))
        return LabelLosses(torch.cat([loss_sb, samples_sb], dim=1), nn.functional.pad(z_loss_sb, (0, b)))
