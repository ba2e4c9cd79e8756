"""FP8 and DistributedDataParallel: `torchrun --nproc-per-node 2 examples/ddp.py`, on GPUs, or without any on a CPU."""

from __future__ import annotations

import os

import torch
from llama import LlamaForCausalLM, counting_batch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from megafp8 import fp8


def main() -> None:
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    distributed.init_process_group("nccl" if on_gpu else "gloo")
    rank = distributed.get_rank()

    torch.manual_seed(0)
    model = LlamaForCausalLM()
    fp8.convert(model, fp8.DelayedScaling(), skip=("lm_head",))  # first convert, then wrap
    ddp = DistributedDataParallel(model.to(device))
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=3e-3, fused=True)

    torch.manual_seed(1 + rank)
    for step in range(1, 101):
        tokens = counting_batch(vocab=256, b=16, s=32, device=device)
        with fp8.autocast(), torch.autocast(device.type, torch.bfloat16, enabled=on_gpu):
            loss = ddp(tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and step % 20 == 0:
            print(f"step {step:3d}  loss {loss.item():.4f}", flush=True)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
