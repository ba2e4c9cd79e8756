"""Baseline for training steps in plain torch: fp32 weights, bf16 autocast, `torch.compile`, AdamW.

This is a typical training loop for one GPU: the loss of a micro-batch is one compiled graph with its backward,
gradients accumulate in `.grad`, and torch's fused AdamW updates the weights after clipping. Every rank trains alone.

Shapes: s sequence, b micro-batch, h hidden, v vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import sdpa_kernel

from benchmarks.blocks import ATTENTION_BACKENDS, EPSILON, ReferenceLayers, Shape
from megafp8.batch import Batch
from megafp8.config import Config
from megafp8.optimizer.step import StepResult
from megafp8.parallel.parallel_state import ParallelState
from megafp8.training.loss import BatchLoss

SIZES = {
    *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "head_dim"),
    *("vocab_size", "vocab_multiple", "tie_embeddings", "init_std"),
}
"""Keys of the config section model that the baseline supports."""
WITHOUT_COST = {"max_position_embeddings", "rope_theta", "rope_scaling", "rope_interpolation_factor", "norm_eps"}
"""Keys of the section that do not affect the time of a step."""


def why_not(config: Config) -> str:
    """Return why the baseline cannot build the config's model; empty if it can."""
    given = config.model.model_dump(exclude_defaults=True).keys() - SIZES - WITHOUT_COST
    if not given:
        return ""
    keys = ", ".join(f"model.{key} = {getattr(config.model, key)!r}" for key in sorted(given))
    return f"the compiled baseline has RMSNorm, SwiGLU, rotary positions and no biases, and not {keys}"


class Model(nn.Module):
    """GPT with RMSNorm, SwiGLU and rotary positions, including the loss."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        m, s = config.model, config.training.seq_length
        mixer, rows = config.spec.layers[0].mixer, config.spec.stem.rows
        assert not why_not(config)
        shape = Shape(
            m.hidden_size, config.spec.layers[0].ffn.width, mixer.num_attention_heads, mixer.groups, mixer.channels, s
        )
        self.embedding = nn.Embedding(rows, m.hidden_size)
        self.layers = ReferenceLayers(shape, m.num_layers, s).float()
        self.norm = nn.RMSNorm(m.hidden_size, EPSILON)
        self.output = nn.Linear(m.hidden_size, rows, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                residual = name.endswith(("proj.weight", "down.weight"))
                nn.init.normal_(parameter, std=m.init_std / (math.sqrt(2 * m.num_layers) if residual else 1.0))
        if m.tie_embeddings:
            self.output.weight = self.embedding.weight

    def forward(self, tokens_bs: Tensor, labels_bs: Tensor) -> Tensor:
        """Return the sum of the losses, fp32 `[]`, of tokens and labels, `[b, s]`."""
        x_sbh = self.layers(self.embedding(tokens_bs.t()))
        logits_sbv = self.output(self.norm(x_sbh))
        return F.cross_entropy(logits_sbv.flatten(0, 1).float(), labels_bs.t().flatten(), reduction="sum")


class CompiledTrainer:
    """Trainer of `Model` with the interface of `megafp8.training.trainer.RankTrainer` that `bench_step` uses."""

    timeline = None

    def __init__(self, config: Config, parallel: ParallelState) -> None:
        self.config, self.parallel = config, parallel
        o = config.optimizer
        with parallel.device:
            self.model = Model(config)
        decaying = [p for p in self.model.parameters() if p.dim() == 2]
        others = [p for p in self.model.parameters() if p.dim() != 2]
        groups = [{"params": decaying, "weight_decay": o.weight_decay}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=o.learning_rate, betas=(o.beta1, o.beta2), eps=o.eps, fused=True)
        self.loss = torch.compile(self.model, fullgraph=True, dynamic=False)

    def train_step(self, step: int, batches: Sequence[Batch]) -> tuple[BatchLoss, StepResult]:
        """Run one optimizer step on this rank's micro-batches; return its loss and its result."""
        device = self.parallel.device
        tokens = sum(batch.tokens.numel() for batch in batches)
        losses = []
        for batch in batches:
            on_device = batch.to(device)
            with sdpa_kernel(ATTENTION_BACKENDS, set_priority=True), torch.autocast(device.type, torch.bfloat16):
                loss = self.loss(on_device.tokens, on_device.labels)
            (loss / tokens).backward()
            losses.append(loss.detach())
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.config.optimizer.clip_grad_norm, foreach=True)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return BatchLoss((torch.stack(losses).sum() / tokens).item(), tokens), StepResult(norm.item(), skipped=False)

    def close(self) -> None:
        """Free the compiled graphs."""
        torch.compiler.reset()
