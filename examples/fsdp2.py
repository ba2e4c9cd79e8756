"""FP8 and FSDP2: `torchrun --nproc-per-node 2 examples/fsdp2.py`, on GPUs, or without any on a CPU.

Weights are gathered in FP8. At the end weights and FP8 state are saved, and restored into a model on one rank.
"""

from __future__ import annotations

import os
import tempfile

import torch
from llama import LlamaForCausalLM, counting_batch
from torch import distributed
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from megafp8 import fp8
from megafp8.parallel.data.fp8_all_gather import gather_in_fp8


def main() -> None:
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    distributed.init_process_group("nccl" if on_gpu else "gloo")
    if on_gpu:
        torch.cuda.set_device(device)
    rank = distributed.get_rank()

    torch.manual_seed(0)
    model = LlamaForCausalLM()
    fp8.convert(model, fp8.DelayedScaling())  # first convert, then shard
    precision = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if on_gpu else MixedPrecisionPolicy()
    for layer in model.model.layers:
        fully_shard(layer, mp_policy=precision)
    fully_shard(model, mp_policy=precision)
    gather_in_fp8(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    torch.manual_seed(1 + rank)
    for step in range(1, 101):
        tokens = counting_batch(vocab=256, b=16, s=32, device=device)
        with fp8.autocast():
            loss = model(tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and step % 20 == 0:
            print(f"step {step:3d}  loss {loss.item():.4f}", flush=True)

    fp8.end_step(model)  # on every rank: the scales are then complete, and the same everywhere
    weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0:
        with tempfile.TemporaryFile() as file:  # an example leaves nothing behind
            torch.save({"model": weights, "fp8": fp8.state_dict(model)}, file)
            file.seek(0)
            saved = torch.load(file)
        restored = fp8.convert(LlamaForCausalLM(), fp8.DelayedScaling()).to(device).eval()
        restored.load_state_dict(saved["model"])
        fp8.load_state_dict(restored, saved["fp8"])
        with torch.no_grad(), fp8.autocast():
            loss = restored(counting_batch(vocab=256, b=16, s=32, device=device))
        print(f"restored from a file: loss {loss.item():.4f}", flush=True)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
