"""Time forward and backward of megafp8.nn's modules on one GPU, beside Transformer Engine's where it is installed.

    python -m benchmarks.bench_nn                                   # LayerNormMLP and TransformerLayer of Llama-3-8B
    python -m benchmarks.bench_nn --modules LayerNormMLP --recipes bf16,delayed --tokens 8192 --json nn.json

An iteration is forward and backward of one micro-batch and an optimizer step that changes nothing, so that FP8 copies
of weights are made anew. Modules are built and warmed up first, then timed in turn, `--rounds` times; the table has
medians. "peak" is the most memory that an iteration allocates above what was allocated before it.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import nn

from benchmarks.common import (
    Table,
    add_device_flag,
    chosen_device,
    machine,
    milliseconds,
    names,
    new_parser,
    now,
    release,
    require_positive,
    write_json,
)
from megafp8 import fp8
from megafp8 import nn as ours

H, F, HEADS, GROUPS = 4096, 14336, 32, 8
RECIPES: dict[str, Any] = {
    "bf16": None,
    "delayed": fp8.DelayedScaling(),
    "current": fp8.CurrentScaling(),
    "blockwise": fp8.BlockwiseScaling(),
}
MODULES = ("LayerNormMLP", "TransformerLayer")
WARM_UP = 4  # delayed scaling needs three
Context = Callable[[str], AbstractContextManager[Any]]


def _build(package: ModuleType, module: str, scale: int, device: torch.device) -> nn.Module:
    """The module of Llama-3-8B, its sizes divided by `scale`."""
    common: dict[str, Any] = {
        "bias": False, "normalization": "RMSNorm", "activation": "swiglu", "params_dtype": torch.bfloat16,
        "device": device,
    }  # fmt: skip
    if module == "LayerNormMLP":
        return package.LayerNormMLP(H // scale, F // scale, **common)
    return package.TransformerLayer(
        H // scale, F // scale, HEADS, num_gqa_groups=GROUPS, fuse_qkv_params=True, hidden_dropout=0.0,
        attention_dropout=0.0, **common,
    )  # fmt: skip


def _engine() -> ModuleType | None:
    try:
        import transformer_engine.pytorch as engine
    except ImportError as error:
        print(f"without Transformer Engine: {error}", file=sys.stderr)
        return None
    return engine


def _engine_context(recipe: str) -> AbstractContextManager[Any]:
    """Transformer Engine's autocast with its recipe of the same kind."""
    if recipe == "bf16":
        return nullcontext()
    import transformer_engine.pytorch as engine
    from transformer_engine.common import recipe as recipes

    made = {"delayed": "DelayedScaling", "current": "Float8CurrentScaling", "blockwise": "Float8BlockScaling"}
    return engine.fp8_autocast(enabled=True, fp8_recipe=getattr(recipes, made[recipe])())


def _own_context(recipe: str) -> AbstractContextManager[Any]:
    return fp8.autocast(enabled=recipe != "bf16", recipe=RECIPES[recipe])


def _iteration(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    context: Callable[[], AbstractContextManager[Any]],
    x: torch.Tensor,
    dy: torch.Tensor,
) -> None:
    with context():
        y = module(x)
    y.backward(dy)
    optimizer.step()
    optimizer.zero_grad()
    x.grad = None


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; 0, or 2 for an argument that cannot be."""
    parser = new_parser(__doc__)
    parser.add_argument("--modules", default=",".join(MODULES))
    parser.add_argument("--recipes", default=",".join(RECIPES))
    parser.add_argument("--tokens", type=int, default=8192, help="length of the sequence, of one sample")
    parser.add_argument("--scale", type=int, default=1, help="divide the sizes of Llama-3-8B by this")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=5)
    add_device_flag(parser)
    options = parser.parse_args(arguments)
    try:
        require_positive(options, "tokens", "scale", "steps", "rounds")
        modules = names("--modules", options.modules, MODULES)
        recipes = names("--recipes", options.recipes, RECIPES)
        device = chosen_device(options)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    engine = _engine() if device.type == "cuda" else None
    packages: list[tuple[str, ModuleType, Context]] = [("megafp8", ours, _own_context)]
    if engine is not None:
        packages.append(("transformer_engine", engine, _engine_context))
    print(machine(device))
    table = Table("module, recipe, package", 56, {"ms": ".3f", "peak MiB": ".0f"})
    print(table.heading())
    records = []
    for module in modules:
        for recipe in recipes:
            for record in _measured(module, recipe, packages, options, device):
                print(table.row(record["name"], record["ms"], record["peak_mib"]), flush=True)
                records.append(record)
            release()
    write_json(options.json, records)
    return 0


def _measured(
    module: str,
    recipe: str,
    packages: list[tuple[str, ModuleType, Context]],
    options: argparse.Namespace,
    device: torch.device,
) -> list[dict[str, Any]]:
    """A record of each package."""
    x = torch.randn(options.tokens, 1, H // options.scale, device=device, dtype=torch.bfloat16).requires_grad_()
    dy = torch.randn_like(x)
    runs: dict[str, Callable[[], None]] = {}
    for name, package, context in packages:
        built = _build(package, module, options.scale, device)
        optimizer = torch.optim.SGD(built.parameters(), lr=0.0)
        runs[name] = partial(_iteration, built, optimizer, partial(context, recipe), x, dy)
        for _ in range(WARM_UP):
            runs[name]()
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(options.rounds):
        for name, run in runs.items():
            start = now(device)
            for _ in range(options.steps):
                run()
            end = now(device)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            times[name].append(milliseconds(start, end) / options.steps)
    return [
        {
            "name": f"{module}, {recipe}, {name}",
            "ms": statistics.median(times[name]),
            "peak_mib": _peak_mib(run, device),
        }
        for name, run in runs.items()
    ]


def _peak_mib(run: Callable[[], None], device: torch.device) -> float | None:
    """The most that a run allocates above what is allocated before; None on a CPU."""
    if device.type != "cuda":
        return None
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    run()
    return (torch.cuda.max_memory_allocated(device) - before) / 2**20


if __name__ == "__main__":
    sys.exit(main())
