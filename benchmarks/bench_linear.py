"""Measure and predict the speedup of whole FP8 linear layers over bf16 by size.

    python -m benchmarks.bench_linear --png speed.png
    python -m benchmarks.bench_linear --predicted-only --ceilings "NVIDIA H200" --png speed.png      # needs no GPU

A layer runs forward and backward: three GEMMs, and in FP8 the casts of x, of dy, and of w once per `--micro-batches`.
Times are medians over `--rounds`, from a cold L2. Predictions come from `megafp8.fp8.speed_model`, which
`fp8.auto_filter: predicted` uses; measurements from `megafp8.fp8.speed_measurement`, which `measured` uses.

Shapes: m tokens, k inputs, n outputs.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from benchmarks.blocks import SHAPES
from benchmarks.common import (
    Table,
    add_device_flag,
    chosen_device,
    machine,
    new_parser,
    release,
    require_positive,
    write_json,
)
from megafp8.fp8 import RECIPES, Fp8Recipe
from megafp8.fp8.speed_measurement import measure
from megafp8.fp8.speed_model import LinearSeconds, LinearSize, predict
from megafp8.host.gpus import CEILINGS, Ceilings, ceilings_of, device_name

SWEPT_RECIPES = ("delayed", "current", "rowwise", "blockwise")
TOKENS, WIDTHS = "1024,2048,4096,8192,16384", "1024,2048,4096,8192,16384,28672"
# torchao's tensorwise recipe on an H100 (pytorch/ao, torchao/float8/README.md).
PUBLISHED = {LinearSize(1024, 2048, 1024): 0.80, LinearSize(4096, 8192, 16384): 1.39}


@dataclass(frozen=True)
class Point:
    """Size of a layer and its times; None if not asked for, or out of memory."""

    size: LinearSize
    predicted: LinearSeconds | None
    measured: LinearSeconds | None

    def record(self) -> dict[str, Any]:
        """Return the point as JSON, with times in milliseconds."""
        record: dict[str, Any] = {**self.size._asdict(), "published_speedup": PUBLISHED.get(self.size)}
        for kind, seconds in (("predicted", self.predicted), ("measured", self.measured)):
            record[kind] = None if seconds is None else {
                "bf16_ms": seconds.high_precision * 1e3, "fp8_ms": seconds.fp8 * 1e3, "speedup": seconds.speedup,
            }  # fmt: skip
        return record


def real_sizes() -> list[LinearSize]:
    """Return the layers of Llama-3-8B, and of one of eight ranks of Llama-3-70B, with their usual numbers of tokens."""
    shapes = [SHAPES["llama3-8b"], SHAPES["llama3-70b-tp8"]]
    return [size for shape in shapes for size in shape.linears(shape.seq_length).values()]


def sweep(
    sizes: Sequence[LinearSize],
    recipe: Fp8Recipe,
    device: torch.device | None,
    ceilings: Ceilings | None,
    *,
    micro_batches: int,
    rounds: int,
) -> list[Point]:
    """Return one point per size: measured if `device` is given, predicted if `ceilings` are given."""
    points = []
    for size in tqdm(sizes, desc="sizes", disable=None):
        predicted = None if ceilings is None else predict(size, recipe, ceilings, micro_batches=micro_batches)
        measured = None
        if device is not None:
            try:
                measured = measure(size, recipe, device, micro_batches=micro_batches, rounds=rounds)
            except torch.OutOfMemoryError:
                tqdm.write(f"{size}: out of memory, not measured")
            release()
        points.append(Point(size, predicted, measured))
    return points


COLUMNS = {"bf16 ms": ".3f", "fp8 ms": ".3f", "measured": ".2f", "predicted": ".2f", "published": ".2f"}
TABLE = Table(f"{'m':>7}{'k':>7}{'n':>7}", 21, COLUMNS)


def print_points(points: Sequence[Point]) -> None:
    """Print the measured milliseconds of forward and backward, and the speedups."""
    print(TABLE.heading())
    for point in points:
        measured, predicted = point.measured, point.predicted
        times = (None, None, None) if measured is None else (
            measured.high_precision * 1e3, measured.fp8 * 1e3, measured.speedup
        )  # fmt: skip
        label = "".join(f"{dim:>7}" for dim in point.size)
        print(TABLE.row(label, *times, predicted and predicted.speedup, PUBLISHED.get(point.size)))


def _speedups(points: Sequence[Point], kind: str, m: int) -> dict[tuple[int, int], float]:
    """Return the known speedups by (k, n)."""
    found = {}
    for point in points:
        seconds = getattr(point, kind)
        if point.size.m == m and seconds is not None:
            found[point.size.k, point.size.n] = seconds.speedup
    return found


def plot(points: Sequence[Point], path: Path, title: str) -> None:
    """Draw heat maps as a PNG: predicted above measured, numbers of tokens side by side.

    Red means that bf16 is faster; blue means that FP8 is faster.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.colors import LogNorm

    kinds = [k for k in ("predicted", "measured") if any(getattr(point, k) is not None for point in points)]
    ms, ks, ns = (sorted({point.size[i] for point in points}) for i in range(3))
    width, height = 1.2 + len(ms) * max(2.4, 0.52 * len(ks)), 1.2 + len(kinds) * max(2.2, 0.42 * len(ns))
    figure, panels = plt.subplots(
        len(kinds), len(ms), figsize=(width, height), squeeze=False, sharex=True, sharey=True, layout="constrained"
    )
    colours, image = plt.get_cmap("RdBu").with_extremes(bad="0.85"), None
    for line, kind in zip(panels, kinds):
        for axes, m in zip(line, ms):
            speedups = _speedups(points, kind, m)
            values = [[speedups.get((k, n), float("nan")) for k in ks] for n in ns]
            image = axes.imshow(values, origin="lower", aspect="auto", cmap=colours, norm=LogNorm(0.5, 2.0, clip=True))
            for (k, n), value in speedups.items():
                _write(axes, ks.index(k), ns.index(n), value, PUBLISHED.get(LinearSize(m, k, n)))
            axes.set_title(f"{kind}, {m} tokens", fontsize="medium")
            axes.set_xticks(range(len(ks)), [str(k) for k in ks], rotation=45, fontsize="small")
            axes.set_yticks(range(len(ns)), [str(n) for n in ns], fontsize="small")
    for axes in panels[-1]:
        axes.set_xlabel("inputs k")
    for line in panels:
        line[0].set_ylabel("outputs n")
    assert image is not None
    bar = figure.colorbar(image, ax=panels, pad=0.01, ticks=[0.5, 0.7, 1.0, 1.4, 2.0], format="%.1f")
    bar.minorticks_off()
    bar.set_label("speedup over bf16")
    lines = (title, "in brackets: published for torchao's tensorwise recipe on an H100")
    figure.suptitle("\n".join(textwrap.fill(line, int(10 * width)) for line in lines), fontsize="medium")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _write(axes: Any, x: int, y: int, value: float, published: float | None) -> None:
    """Write the speedup into its cell, and below it a published speedup, if there is one, with a frame."""
    from matplotlib.patches import Rectangle

    dark = value < 0.62 or value > 1.62
    axes.text(
        x, y, f"{value:.2f}" + (f"\n({published:.2f})" if published else ""), ha="center", va="center",
        fontsize=6.5, color="white" if dark else "black",
    )  # fmt: skip
    if published:
        axes.add_patch(Rectangle((x - 0.48, y - 0.48), 0.96, 0.96, fill=False, edgecolor="black", linewidth=1.5))


def numbers(option: str, text: str) -> list[int]:
    """Parse comma-separated positive whole numbers, or raise ValueError."""
    if not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", text):
        raise ValueError(f"{option}: {text!r} is not a list of positive whole numbers; for example 1024,4096")
    return [int(number) for number in text.split(",")]


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = new_parser(__doc__)
    add_device_flag(parser)
    parser.add_argument("--m", default=TOKENS, help="tokens of the grid")
    parser.add_argument("--k", default=WIDTHS, help="inputs of the grid")
    parser.add_argument("--n", default=WIDTHS, help="outputs of the grid")
    parser.add_argument("--grid-only", action="store_true", help="measure only the grid, without Llama's layers")
    parser.add_argument("--recipe", choices=SWEPT_RECIPES, default="current")
    parser.add_argument("--micro-batches", type=int, default=1, help="micro-batches that share one cast of the weight")
    parser.add_argument("--ceilings", choices=list(CEILINGS), help="GPU to predict for; default: this device")
    parser.add_argument("--predicted-only", action="store_true", help="measure nothing")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--png", type=Path, help="draw heat maps into this file")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark, print the table, and return the exit code."""
    arguments = parse(argv)
    try:
        require_positive(arguments, "rounds", "micro_batches")
        device = chosen_device(arguments)
        name = arguments.ceilings or device_name(device)
        ceilings = ceilings_of(name) if arguments.predicted_only or name in CEILINGS else None
        grid = [LinearSize(*size) for size in product(*(numbers(f"--{o}", getattr(arguments, o)) for o in "mkn"))]
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    where = name if arguments.predicted_only else machine(device)
    print(f"{where}, torch {torch.__version__}: medians of {arguments.rounds} rounds")
    if ceilings is None:
        print(f"left out, prediction: the speeds of {name!r} are not known")
    points = sweep(
        list(dict.fromkeys([*grid, *([] if arguments.grid_only else real_sizes())])),
        RECIPES[arguments.recipe](),
        None if arguments.predicted_only else device,
        ceilings,
        micro_batches=arguments.micro_batches,
        rounds=arguments.rounds,
    )
    print_points(points)
    if arguments.png:
        shared = f", a weight's cast shared by {arguments.micro_batches} micro-batches" * (arguments.micro_batches > 1)
        title = f"Linear layers in FP8 ({arguments.recipe}) over bf16, forward and backward{shared}: {where}"
        plot([point for point in points if point.size in grid], arguments.png, title)
        print(f"heat maps: {arguments.png}")
    report = {
        "torch": torch.__version__,
        "device": machine(device),
        "recipe": arguments.recipe,
        "micro_batches": arguments.micro_batches,
        "ceilings": ceilings and dataclasses.asdict(ceilings),
        "points": [point.record() for point in points],
    }
    write_json(arguments.json, report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
