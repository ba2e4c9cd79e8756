"""FP8 and torch.compile: `python examples/compile.py`, on a GPU, or without one on the CPU.

FP8 layers are ops of the one graph; those between them are fused by the compiler.
"""

from __future__ import annotations

import torch
from llama import LlamaForCausalLM, counting_batch

from megafp8 import fp8


def main() -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32

    torch.manual_seed(0)
    model = LlamaForCausalLM().to(device, dtype)
    fp8.convert(model, fp8.CurrentScaling(), skip=("lm_head", "model.layers.0.*"))  # the first block stays as it is
    compiled = torch.compile(model, fullgraph=True)
    optimizer = torch.optim.AdamW(compiled.parameters(), lr=3e-3)

    for step in range(1, 101):
        tokens = counting_batch(vocab=256, b=16, s=32, device=device)
        with fp8.autocast():
            loss = compiled(tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0:
            print(f"step {step:3d}  loss {loss.item():.4f}", flush=True)


if __name__ == "__main__":
    main()
