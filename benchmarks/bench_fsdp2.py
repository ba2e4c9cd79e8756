"""Time training steps of transformers' Llama under FSDP2: bf16, converted by megafp8, and by torchao if installed.

    torchrun --nproc-per-node 2 -m benchmarks.bench_fsdp2 --layers 8

Each layer is a unit of `fully_shard`, compiled by itself, in bf16 with fp32 gradients. A step is forward, backward, and
an AdamW step in fp32 of one micro-batch a rank. `torchao` is its tensorwise recipe with FP8 all-gather and scales
precomputed after each step; `delayed` and `current` are `megafp8.fp8.convert` with `gather_in_fp8`. Variants are built
one after the other; the table has medians, and the tokens a second and GPU of each against bf16's.
"""

from __future__ import annotations

import itertools
import os
import statistics
import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from benchmarks.common import Table, machine, milliseconds, names, new_parser, now, release, write_json
from benchmarks.transformers_llama import SHAPES, fastest_kernels, llama
from megafp8 import fp8
from megafp8.data_parallel.fp8_all_gather import gather_in_fp8

RECIPES: dict[str, fp8.Fp8Recipe] = {
    "delayed": fp8.DelayedScaling(), "current": fp8.CurrentScaling(), "blockwise": fp8.BlockwiseScaling()
}  # fmt: skip
VARIANTS = ["bf16", *RECIPES, "torchao"]


def _convert_by_torchao(model: nn.Module) -> Callable[[], None]:
    """Convert `model`, and return what is to be called after each optimizer step."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training, precompute_float8_dynamic_scale_for_fsdp

    convert_to_float8_training(
        model, config=Float8LinearConfig(enable_fsdp_float8_all_gather=True),
        module_filter_fn=lambda module, name: isinstance(module, nn.Linear),
    )  # fmt: skip
    return lambda: precompute_float8_dynamic_scale_for_fsdp(model)


def _sharded(model: Any, compiled: bool) -> FSDPModule:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.layers:
        if compiled:
            layer.compile()
        fully_shard(layer, mp_policy=policy)
    return fully_shard(model, mp_policy=policy)


def measure(variant: str, shape: str, layers: int, s: int, steps: int, compiled: bool) -> tuple[list[float], float]:
    """Milliseconds of each step, and the peak memory in GiB."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = llama(shape, layers, s, device, torch.float32)
    after_step: Callable[[], None] = lambda: None  # noqa: E731
    if variant in RECIPES:
        fp8.convert(model, RECIPES[variant], skip=())
    elif variant == "torchao":
        after_step = _convert_by_torchao(model)
    sharded = _sharded(model, compiled)
    if variant in RECIPES:
        gather_in_fp8(sharded)  # type: ignore[arg-type]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    torch.manual_seed(distributed.get_rank())
    x, dy = (torch.randn(1, s, SHAPES[shape]["hidden_size"], device=device, dtype=torch.bfloat16) for _ in range(2))
    dy *= 1e-6

    def step() -> Tensor:
        with fp8.autocast() if variant in RECIPES else nullcontext(), fastest_kernels():
            y = model(inputs_embeds=x.detach().requires_grad_(), use_cache=False).last_hidden_state
        y.backward(dy)
        optimizer.step()
        optimizer.zero_grad()
        after_step()
        return y

    for _ in range(4):
        step()
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    distributed.barrier()
    points = [now(device)]
    for _ in range(steps):
        y = step()
        points.append(now(device))
    assert y.isfinite().all(), variant
    if device.type == "cuda":
        torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0.0
    return [milliseconds(start, end) for start, end in itertools.pairwise(points)], peak


def main(arguments: list[str] | None = None) -> int:
    parser = new_parser(__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="llama3-8b")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--seq-length", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--eager", action="store_true", help="do not compile the layers")
    parser.add_argument("--variants", help=f"comma-separated, of {', '.join(VARIANTS)}; default all")
    parsed = parser.parse_args(arguments)
    try:
        variants = names("--variants", parsed.variants or ",".join(VARIANTS), VARIANTS)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    distributed.init_process_group("nccl" if on_gpu else "gloo")
    first = distributed.get_rank() == 0
    table = Table(
        "variant", 12, {"ms": ".1f", "min": ".1f", "max": ".1f", "tokens/s": ".0f", "ratio": ".3f", "GiB": ".1f"}
    )
    if first:
        device = torch.device("cuda" if on_gpu else "cpu")
        print(f"{machine(device)} × {distributed.get_world_size()}, torch {torch.__version__}, {parsed.layers} layers")
        print(table.heading())
    rows: list[dict[str, Any]] = []
    for variant in variants:
        try:
            times, peak = measure(
                variant, parsed.shape, parsed.layers, parsed.seq_length, parsed.steps, not parsed.eager
            )
        except ImportError as error:
            if first:
                print(f"{variant}: {error}")
            continue
        ms = statistics.median(times)
        baseline = next((row["ms"] for row in rows if row["variant"] == "bf16"), None)
        ratio = 1.0 if variant == "bf16" else None if baseline is None else baseline / ms
        rows.append({"variant": variant, "ms": ms, "tokens_per_second": parsed.seq_length / ms * 1e3, "peak_gib": peak})
        if first:
            print(table.row(variant, ms, min(times), max(times), parsed.seq_length / ms * 1e3, ratio, peak), flush=True)
        release()
        torch.compiler.reset()
    if first:
        write_json(parsed.json, {"torch": torch.__version__, "rows": rows})
    distributed.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
