"""Time `check_replicas` against a training step, for layouts of some Llama-3-8B layers on two GPUs.

torchrun --standalone --nproc-per-node 2 docs/measurements/2026-11-22-h200-replica-check/measure.py
"""

from __future__ import annotations

import gc
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))

from tools.bench_step import Groups, random_batches  # noqa: E402

from megafp8.config import check_layout, load_config  # noqa: E402
from megafp8.parallel_state import initialize_distributed  # noqa: E402
from megafp8.training.errors import ReplicasDiffer  # noqa: E402
from megafp8.training.replicas import check_replicas, replicated_state  # noqa: E402
from megafp8.training.trainer import Trainer  # noqa: E402

LAYOUTS = {
    "DP2": ["parallel.tensor=1"],
    "DP2, ZeRO-1": ["parallel.tensor=1", "parallel.zero=1"],
    "DP2, ZeRO-1, FP8 parameters": ["parallel.tensor=1", "parallel.zero=1", "fp8.param_gather=true"],
    "FSDP2": ["parallel.tensor=1", "parallel.fsdp=true"],
    "TP2·SP": ["parallel.tensor=2"],
}
COMMON = [
    "model.num_layers=8", "parallel.pipeline=1", "fp8.recipe=delayed", "training.micro_batch_size=1",
    "optimizer.warmup_steps=0", "training.cuda_graphs=false",
]  # fmt: skip
CHECKS, STEPS = 10, 3


def seconds_of(run, times: int) -> float:
    """The median of `times` runs, after one; the device is idle before and after each."""
    taken = []
    for _ in range(times + 1):
        torch.cuda.synchronize()
        dist.barrier()
        start = time.perf_counter()
        run()
        torch.cuda.synchronize()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken[1:])


def main() -> None:
    device = initialize_distributed("cuda", 600.0)
    groups = Groups(device)
    report = print if dist.get_rank() == 0 else lambda *_, **__: None
    report(
        f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}; 8 layers of Llama-3-8B, s = 8192, delayed"
    )
    report(
        f"{'layout':<30}{'step ms':>9}{'check ms':>10}{'GB read':>9}{'GB/s':>7}{'% of 100 steps':>16}  a flipped bit"
    )
    for name, keys in LAYOUTS.items():
        data = 1 if "parallel.tensor=2" in keys else 2
        config = load_config(
            ROOT / "configs" / "llama3-8b.yaml", [*COMMON, *keys, f"training.global_batch_size={8 * data}"]
        )
        check_layout(config, 2)
        parallel = groups.of(config)
        trainer = Trainer(config, parallel)
        batches = random_batches(config, parallel)
        steps = iter(range(1000))
        step = seconds_of(
            lambda trainer=trainer, batches=batches, steps=steps: trainer.train_step(next(steps), batches), STEPS
        )
        trainer.wait_for_weights()
        check = seconds_of(lambda trainer=trainer: check_replicas(trainer, 1), CHECKS)
        replicas = replicated_state(trainer)
        read = sum(replica.values.nbytes for replica in replicas if replica.values.is_cuda)
        largest = max((r for r in replicas if r.values.is_cuda), key=lambda r: r.values.nbytes)
        if dist.get_rank() == 1:
            words = largest.values.view(torch.uint8).view(-1)
            words[words.numel() // 2] ^= 16
        try:
            check_replicas(trainer, 1)
            found = "NOT FOUND"
        except ReplicasDiffer as error:
            found = " ".join(str(error).split())[:170]
        report(
            f"{name:<30}{step * 1e3:>9.1f}{check * 1e3:>10.2f}{read / 1e9:>9.2f}{read / check / 1e9:>7.0f}"
            f"{check / step:>16.4f}  {found}",
            flush=True,
        )
        del trainer, replicas, largest, batches
        gc.collect()
        torch.cuda.empty_cache()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
