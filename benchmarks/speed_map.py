"""Where FP8 pays: the speed of a whole linear layer over bf16 by its size, predicted and measured. For `bench_gemm`."""

from __future__ import annotations

import dataclasses
import gc
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from megafp8.fp8 import Fp8Recipe
from megafp8.fp8.speed_measurement import measure
from megafp8.fp8.speed_model import Ceilings, LinearSeconds, LinearSize, predict

#: torchao's tensorwise recipe on an H100 (pytorch/ao, torchao/float8/README.md).
PUBLISHED = {LinearSize(1024, 2048, 1024): 0.80, LinearSize(4096, 8192, 16384): 1.39}


@dataclass(frozen=True)
class Point:
    """A layer's size and its times; None is what was not asked for, or did not fit into memory."""

    size: LinearSize
    predicted: LinearSeconds | None
    measured: LinearSeconds | None

    def record(self) -> dict[str, Any]:
        """As JSON: times in milliseconds."""
        record: dict[str, Any] = {**self.size._asdict(), "published_speedup": PUBLISHED.get(self.size)}
        for kind, seconds in (("predicted", self.predicted), ("measured", self.measured)):
            record[kind] = None if seconds is None else {
                "bf16_ms": seconds.high_precision * 1e3, "fp8_ms": seconds.fp8 * 1e3, "speedup": seconds.speedup,
            }  # fmt: skip
        return record


def grid(ms: Sequence[int], ks: Sequence[int], ns: Sequence[int]) -> list[LinearSize]:
    return [LinearSize(*size) for size in product(ms, ks, ns)]


def sweep(
    sizes: Sequence[LinearSize],
    recipe: Fp8Recipe,
    device: torch.device | None,
    ceilings: Ceilings | None,
    *,
    micro_batches: int,
    rounds: int,
) -> list[Point]:
    """A point for each size: measured on `device` if one is given, predicted if `ceilings` are."""
    points = []
    for size in tqdm(sizes, desc="sizes", disable=None):
        predicted = None if ceilings is None else predict(size, recipe, ceilings, micro_batches=micro_batches)
        measured = None
        if device is not None:
            try:
                measured = measure(size, recipe, device, micro_batches=micro_batches, rounds=rounds)
            except torch.OutOfMemoryError:
                tqdm.write(f"{size}: out of memory, not measured")
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
        points.append(Point(size, predicted, measured))
    return points


def print_points(points: Sequence[Point]) -> None:
    """Milliseconds of forward and backward as measured, and how many times as fast FP8 is."""
    columns = ("bf16 ms", "fp8 ms", "measured", "predicted", "published")
    print(f"{'m':>7}{'k':>7}{'n':>7}" + "".join(f"{column:>11}" for column in columns))
    for point in points:
        measured, predicted = point.measured, point.predicted
        cells = (
            None if measured is None else f"{measured.high_precision * 1e3:.3f}",
            None if measured is None else f"{measured.fp8 * 1e3:.3f}",
            None if measured is None else f"{measured.speedup:.2f}",
            None if predicted is None else f"{predicted.speedup:.2f}",
            f"{PUBLISHED[point.size]:.2f}" if point.size in PUBLISHED else None,
        )
        print("".join(f"{dim:>7}" for dim in point.size) + "".join(f"{cell or '-':>11}" for cell in cells))


def _speedups(points: Sequence[Point], kind: str, m: int) -> dict[tuple[int, int], float]:
    """By (k, n), those that there are."""
    found = {}
    for point in points:
        seconds = getattr(point, kind)
        if point.size.m == m and seconds is not None:
            found[point.size.k, point.size.n] = seconds.speedup
    return found


def plot(points: Sequence[Point], path: Path, title: str) -> None:
    """Heat maps into a PNG: predicted above measured, numbers of tokens side by side; red loses, blue wins,
    grey is not known."""
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
    bar.set_label("times as fast as bf16")
    lines = (title, "in brackets: published for torchao's tensorwise recipe on an H100")
    figure.suptitle("\n".join(textwrap.fill(line, int(10 * width)) for line in lines), fontsize="medium")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _write(axes: Any, x: int, y: int, value: float, published: float | None) -> None:
    """The number in its cell, with a frame and what was published where something was."""
    dark = value < 0.62 or value > 1.62
    axes.text(
        x, y, f"{value:.2f}" + (f"\n({published:.2f})" if published else ""), ha="center", va="center",
        fontsize=6.5, color="white" if dark else "black",
    )  # fmt: skip
    if published:
        axes.add_patch(_frame(x, y))


def _frame(x: int, y: int) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((x - 0.48, y - 0.48), 0.96, 0.96, fill=False, edgecolor="black", linewidth=1.5)


def records(points: Sequence[Point]) -> list[dict[str, Any]]:
    return [point.record() for point in points]


def ceilings_record(ceilings: Ceilings | None) -> dict[str, Any] | None:
    return None if ceilings is None else dataclasses.asdict(ceilings)
