"""Loss curve of a run, as a PNG and as text in a terminal."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megafp8.host.tool import pyplot


def _curves(
    records: Sequence[Mapping[str, Any]],
) -> tuple[tuple[list[int], list[float]], tuple[list[int], list[float]]]:
    train = [(r["step"], r["loss"]) for r in records if r["loss"] is not None]
    valid = [(r["step"], r["validation_loss"]) for r in records if r.get("validation_loss") is not None]
    return tuple(([s for s, _ in curve], [v for _, v in curve]) for curve in (train, valid))  # type: ignore[return-value]


def draw_loss(axes: Any, records: Sequence[Mapping[str, Any]], *, prefix: str = "", colour: str | None = None) -> None:
    """Draw training and validation loss over steps into matplotlib axes. `prefix` is put before the labels."""
    (steps, losses), (valid_steps, valid_losses) = _curves(records)
    axes.plot(steps, losses, color=colour or "tab:blue", linewidth=1.2, label=f"{prefix}training")
    if valid_steps:
        style: dict[str, Any] = {"color": colour or "tab:orange", "marker": "o", "markersize": 4}
        axes.plot(valid_steps, valid_losses, label=f"{prefix}validation", **style)
    axes.set_ylabel("loss (nats per token)")
    axes.grid(alpha=0.3)


def draw_learning_rate(
    axes: Any, records: Sequence[Mapping[str, Any]], *, label: str | None = None, colour: str = "tab:green"
) -> None:
    """Draw the learning rate over steps into matplotlib axes."""
    steps, rates = [r["step"] for r in records], [r["learning_rate"] for r in records]
    axes.plot(steps, rates, color=colour, linewidth=1.2, label=label)
    axes.set_ylabel("learning rate")
    axes.set_xlabel("step")
    axes.grid(alpha=0.3)


def plot_loss(records: Sequence[Mapping[str, Any]], path: Path, title: str) -> None:
    """Write a PNG of training and validation loss over steps, with the learning rate below."""
    plt = pyplot()
    figure, (top, bottom) = plt.subplots(2, 1, figsize=(8, 6), sharex=True, height_ratios=[3, 1], layout="constrained")
    draw_loss(top, records)
    top.set_title(title)
    top.legend()
    draw_learning_rate(bottom, records)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def print_loss(records: Sequence[Mapping[str, Any]]) -> None:
    """Print the curve in the terminal, or a line of text if no loss is finite."""
    import plotext

    (steps, losses), (valid_steps, valid_losses) = _curves(records)
    if not steps:
        print("no step has a finite loss: there is no curve to draw")
        return
    plotext.clear_figure()
    plotext.theme("clear")
    plotext.plot_size(min(shutil.get_terminal_size((100, 24)).columns, 100), 18)
    plotext.plot(steps, losses, label="training", marker="braille")
    if valid_steps:
        plotext.scatter(valid_steps, valid_losses, label="validation", marker="o")
    plotext.xlabel("step")
    plotext.title("loss (nats per token)")
    print(plotext.uncolorize(plotext.build()))
