"""Draw the diagrams of the documentation into docs/images: `python docs/site/diagrams.py`.

Ranks come from the groups of a layout, scales from the granularities of the recipes, and the parts of a checkpoint from
the rectangles of sharded parameters, so the pictures cannot disagree with the code.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.patches import FancyArrowPatch, Rectangle

from megafp8.numerics.tensor import BLOCK_1X128, BLOCK_128X128, ROW, TENSOR, Granularity
from megafp8.parallel.parallel_state import rank_groups
from megafp8.parallel.sharding import shard_dim

IMAGES = Path(__file__).resolve().parent.parent / "images"
COLORS = ["#4c78a8", "#f58518", "#54a24b", "#b279a2", "#e45756", "#72b7b2", "#eeca3b", "#9d755d"]


def draw_layout(pipeline: int = 2, data: int = 4, tensor: int = 2) -> None:
    """Draw the ranks of a layout, its tensor-parallel groups, and the groups of eight ranks that share experts."""
    groups = rank_groups(pipeline * data * tensor, tensor, pipeline, expert_model_parallel_size=data * tensor)
    ranks = np.array(groups["tensor"]).reshape(pipeline, data, tensor)
    assert groups["expert"] == ranks.reshape(pipeline, -1).tolist()  # a dashed box each
    figure, axes = plt.subplots(figsize=(8.4, 3.5))
    for p, d, t in np.ndindex(ranks.shape):
        x, y = d * 2.5 + t, (pipeline - 1 - p) * 1.9
        axes.add_patch(Rectangle((x, y), 0.94, 0.94, color=COLORS[d], alpha=0.9 - 0.35 * t))
        axes.text(x + 0.47, y + 0.47, str(ranks[p, d, t]), ha="center", va="center", color="white", fontsize=13)
    for p in range(pipeline):
        y = (pipeline - 1 - p) * 1.9
        half = "first" if p == 0 else "second"
        axes.text(-0.35, y + 0.47, f"pipeline {p}\n{half} half of the layers", ha="right", va="center")
        axes.add_patch(Rectangle((-0.15, y - 0.17), data * 2.5 - 0.3, 1.28, fill=False, ls="--", ec="#555555"))
    for d in range(data):
        axes.text(d * 2.5 + 0.97, pipeline * 1.9 - 0.62, f"data {d}", ha="center", color=COLORS[d], weight="bold")
    axes.text(
        -2.2,
        -0.62,
        "one color: tensor-parallel ranks, each with half of every layer;  dashed: ranks that share experts",
    )
    axes.set(xlim=(-3.0, data * 2.5), ylim=(-0.9, pipeline * 1.9 - 0.2), aspect="equal")
    axes.set_axis_off()
    figure.tight_layout()
    _save(figure, "layout")


def draw_recipes() -> None:
    """Draw which elements of a 512 × 512 operand share a scale, for granularities of the recipes."""
    kinds: Sequence[tuple[str, Granularity]] = [
        ("delayed, current, static", TENSOR), ("rowwise", ROW), ("blockwise: input", BLOCK_1X128),
        ("blockwise: weight", BLOCK_128X128),
    ]  # fmt: skip
    figure, all_axes = plt.subplots(1, len(kinds), figsize=(10.5, 2.9))
    for axes, (name, granularity) in zip(all_axes, kinds, strict=True):
        rows, columns = granularity.grid(512, 512) or (1, 1)
        shown = min(rows, 16)  # of 512 rows, one line for 32
        colors = np.random.default_rng(4).random((shown, columns))
        axes.imshow(colors, cmap="tab20c", aspect="auto", extent=(0, 512, 512, 0), interpolation="nearest")
        for x in range(1, columns):
            axes.axvline(x * 512 / columns, color="white", lw=1)
        for y in range(1, shown):
            axes.axhline(y * 512 / shown, color="white", lw=0.6)
        axes.set_title(f"{name}\n{rows * columns:,} scale{'s' if rows * columns > 1 else ''}", fontsize=10)
        axes.set_xticks([])
        axes.set_yticks([])
    figure.tight_layout()
    _save(figure, "recipes")


def draw_checkpoint(shape: tuple[int, int] = (8, 6)) -> None:
    """Draw a weight that two ranks save by rows and three ranks load by columns, as rectangles of one global tensor."""
    figure, all_axes = plt.subplots(1, 3, figsize=(9.6, 2.9), gridspec_kw={"wspace": 0.55})
    titles = ["saved: 2 ranks, sharded by rows", "checkpoint: one global tensor", "loaded: 3 ranks, by columns"]
    layouts = [(0, 2), (0, 2), (1, 3)]
    for axes, title, (dim, ranks) in zip(all_axes, titles, layouts, strict=True):
        for rank in range(ranks):
            box = shard_dim("weight", shape, dim, rank, ranks)
            (row, column), (height, width) = box.offset, box.shape
            gap = 0.5 * rank * (axes is not all_axes[1])
            x, y = column + gap * (dim == 1), row + gap * (dim == 0)
            axes.add_patch(Rectangle((x, y), width, height, fc=COLORS[rank + 3 * (dim == 1)], alpha=0.75, ec="white"))
            text = f"offset [{row}, {column}]\n[{height} × {width}]" if axes is all_axes[1] else f"rank {rank}"
            axes.text(x + width / 2, y + height / 2, text, ha="center", va="center", color="white", fontsize=9)
        axes.set(xlim=(-0.2, 7.4), ylim=(9.2, -0.4), xticks=[], yticks=[], title=title)
        axes.title.set_fontsize(10)
        axes.set_frame_on(False)
    for left, right in ((0.345, 0.395), (0.635, 0.685)):
        arrow = FancyArrowPatch((left, 0.48), (right, 0.48), arrowstyle="-|>", mutation_scale=16, color="#555555")
        figure.add_artist(arrow)
    _save(figure, "checkpoint")


def _save(figure: plt.Figure, name: str) -> None:
    figure.savefig(IMAGES / f"{name}.png", dpi=110, bbox_inches="tight")
    plt.close(figure)


if __name__ == "__main__":
    draw_layout()
    draw_recipes()
    draw_checkpoint()
