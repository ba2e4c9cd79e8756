"""Time whole training steps: tokens/s, TFLOP/s and MFU of each precision of a config, in one run, interleaved.

    python tools/bench_step.py --config configs/llama3-8b.yaml --variants bf16,current,delayed \
        parallel.tensor=1 parallel.pipeline=1 model.num_layers=4 training.global_batch_size=4
    torchrun --nproc-per-node 4 tools/bench_step.py --config ... parallel.tensor=2 parallel.pipeline=2

The tokens are random: no data set is read. Each variant is built, warmed up and timed in turn, `--rounds` times over,
so that a drift of the clock touches all alike; the table gives the median step. TFLOP/s are model FLOPs,
6·N_matmul + 6·L·s·h_attn per token (causal attention as half, output layer in, embedding look-up out); MFU is against
the dense peak of the precision named, 989 TFLOP/s bf16 and 1979 fp8 on H100 and H200.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import time
from pathlib import Path

import torch

from megafp8.config import Config, check_layout, load_config
from megafp8.data.samples import Batch
from megafp8.models.flops import PEAK_FLOPS, flops_per_token
from megafp8.parallel_state import (
    ParallelState,
    destroy_model_parallel,
    initialize_distributed,
    initialize_model_parallel,
)
from megafp8.training.job import choose_device
from megafp8.training.metrics import memory_gib
from megafp8.training.trainer import Trainer

VARIANTS = {
    "fp32": {"precision": "fp32", "recipe": "none"},
    "bf16": {"precision": "bf16", "recipe": "none"},
    "current": {"precision": "bf16", "recipe": "current"},
    "delayed": {"precision": "bf16", "recipe": "delayed"},
}


def variant_config(config: Config, variant: str) -> Config:
    """`config` in the precision of `variant`."""
    choice = VARIANTS[variant]
    training = config.training.model_copy(update={"precision": choice["precision"]})
    fp8 = config.fp8.model_copy(update={"recipe": choice["recipe"]})
    return config.model_copy(update={"training": training, "fp8": fp8})


def random_batches(config: Config, parallel: ParallelState) -> list[Batch]:
    """One step's micro-batches of random tokens, the same on the ranks that must see the same."""
    t = config.training
    generator = torch.Generator().manual_seed(config.seed + parallel.data.rank)
    count = t.global_batch_size // (t.micro_batch_size * parallel.data.size)
    shape = (t.micro_batch_size, t.seq_length + 1)
    assert config.model.vocab_size is not None
    rows = [torch.randint(config.model.vocab_size, shape, generator=generator) for _ in range(count)]
    return [Batch(tokens=r[:, :-1].contiguous(), labels=r[:, 1:].contiguous()) for r in rows]


def time_steps(config: Config, parallel: ParallelState, warmup: int, steps: int) -> dict[str, list[float] | float]:
    """Build a trainer, run it, and give back the seconds of each timed step, losses and peak memory."""
    if parallel.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(parallel.device)
    trainer = Trainer(config, parallel)
    batches = random_batches(config, parallel)
    seconds, losses = [], []
    for step in range(warmup + steps):
        start = time.perf_counter()
        loss, _ = trainer.train_step(step, batches)  # ends with a host synchronisation
        if step >= warmup:
            seconds.append(time.perf_counter() - start)
        losses.append(loss.mean)
    return {"seconds": seconds, "losses": losses, "memory_gib": memory_gib(parallel.device)}


def release() -> None:
    """Give a finished variant's memory back before the next is built."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def table(config: Config, results: dict[str, dict], world_size: int, device: torch.device) -> list[dict]:
    """One row a variant."""
    t = config.training
    tokens = t.global_batch_size * t.seq_length
    rows = []
    for variant, result in results.items():
        seconds = statistics.median(result["seconds"])
        rate = tokens / seconds / world_size
        flops = rate * flops_per_token(config.model, t.seq_length)
        peak = PEAK_FLOPS["bf16" if variant == "bf16" else "fp8"] if device.type == "cuda" else None
        rows.append(
            {
                "variant": variant,
                "step_ms": seconds * 1e3,
                "tokens_per_second_per_gpu": rate,
                "tflops_per_gpu": flops / 1e12,
                "mfu": flops / peak if peak else None,
                "memory_gib": result["memory_gib"],
                "first_loss": result["losses"][0],
                "last_loss": result["losses"][-1],
            }
        )
    return rows


def print_table(rows: list[dict]) -> None:
    print(f"{'variant':<10}{'step ms':>10}{'tok/s/gpu':>12}{'TFLOP/s':>10}{'MFU':>8}{'peak GiB':>10}{'loss':>20}")
    for row in rows:
        mfu = "-" if row["mfu"] is None else f"{row['mfu']:.1%}"
        loss = f"{row['first_loss']:.4f} -> {row['last_loss']:.4f}"
        print(
            f"{row['variant']:<10}{row['step_ms']:>10.1f}{row['tokens_per_second_per_gpu']:>12,.0f}"
            f"{row['tflops_per_gpu']:>10.1f}{mfu:>8}{row['memory_gib']:>10.2f}{loss:>20}"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True)
    parser.add_argument("--variants", default="bf16,current,delayed", help=f"of {', '.join(VARIANTS)}")
    parser.add_argument("--warmup", type=int, default=4, help="steps before timing, in each round")
    parser.add_argument("--steps", type=int, default=8, help="timed steps in each round")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", type=Path, help="also write the table and all samples here")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    arguments = parser.parse_intermixed_args()
    variants = arguments.variants.split(",")
    unknown = [v for v in variants if v not in VARIANTS]
    if unknown:
        parser.error(f"--variants: {unknown[0]!r} is none of {', '.join(VARIANTS)}")
    try:
        config = load_config(arguments.config, arguments.overrides)
        check_layout(config, int(os.environ.get("WORLD_SIZE", "1")), arguments.config)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    device = initialize_distributed(choose_device(config), config.timeout_seconds)
    p = config.parallel
    parallel = initialize_model_parallel(p.tensor, p.pipeline, context_parallel_size=p.context, device=device)
    results: dict[str, dict] = {}
    for _ in range(arguments.rounds):
        for variant in variants:
            result = time_steps(variant_config(config, variant), parallel, arguments.warmup, arguments.steps)
            results.setdefault(variant, result | {"seconds": []})["seconds"] += result["seconds"]
            release()
    if parallel.rank == 0:
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
        print(
            f"{config.name}: {config.model.num_layers} layers, s = {config.training.seq_length}, "
            f"{parallel.world_size} × {name}, tensor {p.tensor} × context {p.context} × pipeline {p.pipeline} × "
            f"data {parallel.data.size}, torch {torch.__version__}"
        )
        rows = table(config, results, parallel.world_size, device)
        print_table(rows)
        if arguments.json:
            arguments.json.write_text(json.dumps({"rows": rows, "samples": results}, indent=1))
    destroy_model_parallel()
    return 0


if __name__ == "__main__":
    sys.exit(main())
