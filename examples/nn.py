"""A Transformer Engine model in FP8 without Transformer Engine: only the imports differ.

python examples/nn.py

import transformer_engine.pytorch as te            from megafp8 import nn as te
from transformer_engine.common import recipe       from megafp8 import fp8
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megafp8 import fp8
from megafp8 import nn as te

VOCAB, HIDDEN, LENGTH = 32, 64, 16
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Model(nn.Module):
    """A small decoder-only transformer: tokens `[b, s]` -> logits `[s, b, v]`."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, HIDDEN, device=DEVICE)
        self.rotary = te.RotaryPositionEmbedding(HIDDEN // 4)
        self.layers = nn.ModuleList(
            te.TransformerLayer(
                HIDDEN, 2 * HIDDEN, num_attention_heads=4, num_gqa_groups=2, layer_number=i + 1, bias=False,
                normalization="RMSNorm", activation="swiglu", fuse_qkv_params=True, hidden_dropout=0.0,
                attention_dropout=0.0,
            )
            for i in range(layers)
        )  # fmt: skip
        self.head = te.LayerNormLinear(HIDDEN, VOCAB, normalization="RMSNorm", bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens.t())
        angles = self.rotary(len(x))
        for layer in self.layers:
            x = layer(x, rotary_pos_emb=angles)
        return self.head(x)


def main() -> None:
    torch.manual_seed(0)
    model = Model(layers=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    recipe = fp8.DelayedScaling(amax_history_len=16)
    for step in range(1, 21):
        first = torch.randint(VOCAB, (4, 1), device=DEVICE)
        tokens = (first + torch.arange(LENGTH + 1, device=DEVICE)) % VOCAB  # each counts up from a random number
        with fp8.autocast(recipe=recipe):
            logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].t().flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 5 == 0:
            print(f"step {step} loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
