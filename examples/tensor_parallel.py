"""FP8 and tensor parallelism: `torchrun --nproc-per-node 2 examples/tensor_parallel.py`, on GPUs, or without any."""

from __future__ import annotations

import os

import torch
from llama import LlamaForCausalLM, counting_batch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

from megafp8 import fp8
from megafp8.parallel.tensor.dtensor import Fp8ColwiseParallel, Fp8RowwiseParallel


def main() -> None:
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    distributed.init_process_group("nccl" if on_gpu else "gloo")
    if on_gpu:
        torch.cuda.set_device(device)
    rank, ranks = distributed.get_rank(), distributed.get_world_size()

    torch.manual_seed(0)
    model = LlamaForCausalLM().to(device, torch.bfloat16 if on_gpu else torch.float32)
    fp8.convert(model, fp8.DelayedScaling())  # first convert, then shard
    mesh, column, row = init_device_mesh(device.type, (ranks,)), Fp8ColwiseParallel(), Fp8RowwiseParallel()
    for layer in model.model.layers:
        attention = {f"self_attn.{name}_proj": column for name in "qkv"} | {"self_attn.o_proj": row}
        parallelize_module(
            layer, mesh, attention | {"mlp.gate_proj": column, "mlp.up_proj": column, "mlp.down_proj": row}
        )
        layer.self_attn.heads //= ranks
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, foreach=False)

    torch.manual_seed(1)  # all ranks have the same tokens
    for step in range(1, 101):
        tokens = counting_batch(vocab=256, b=16, s=32, device=device)
        with fp8.autocast():
            loss = model(tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and step % 20 == 0:
            print(f"step {step:3d}  loss {loss.item():.4f}", flush=True)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
