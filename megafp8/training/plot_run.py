"""HTML page and PNG of runs: losses, rates, events, FP8 health and expert load."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from megafp8.host.tool import names_of, pyplot
from megafp8.training.goodput import PARTS
from megafp8.training.plots import draw_learning_rate, draw_loss
from megafp8.training.run_data import (
    KINDS,
    PANELS,
    Curve,
    HeatMap,
    Panel,
    Points,
    RunData,
    downsample,
    duration,
    read_run,
    summary,
)

_PAGE = Path(__file__).with_suffix(".html")
_AXIS_POINTS = 1000
_EVENT_COLOURS = {"launch": "0.5", "change": "tab:purple", "skipped": "tab:red", "hang": "tab:red"}


def _digits(value: float | None) -> float | int | None:
    """Return `value` with seven digits, or None if it is not finite, because JSON has no such numbers."""
    if value is None or not math.isfinite(value):
        return None
    return int(value) if float(value).is_integer() and abs(value) < 1e15 else float(f"{value:.7g}")


def _numbers(values: Sequence[float | None]) -> list[float | int | None]:
    return [_digits(value) for value in values]


def _curve(curve: Curve) -> dict[str, Any]:
    points: Points = downsample(curve)
    curve_dict = {"label": curve.label, "sparse": curve.sparse, "x": _numbers(points.x), "y": _numbers(points.y)}
    return curve_dict | ({"mx": _numbers(points.mean_x), "my": _numbers(points.mean_y)} if points.mean_x else {})


def _axis(run: RunData) -> dict[str, Any]:
    """Return tokens and hours since the first launch at selected steps, including the steps around launches."""
    records = run.records
    starts = {event.step for event in run.events if event.kind == "launch"}
    chosen = {int(i) for i in np.linspace(0, len(records) - 1, min(len(records), _AXIS_POINTS))}
    chosen |= {i + d for i, r in enumerate(records) if r["step"] in starts for d in (0, 1) if i + d < len(records)}
    shown = [records[i] for i in sorted(chosen)]
    times = [datetime.fromisoformat(record["time"]).timestamp() for record in shown]
    end = datetime.fromisoformat(records[-1]["time"]).timestamp()
    begin = end - run.goodput.wall_seconds
    return {
        "step": [record["step"] for record in shown],
        "tokens": [record.get("tokens") or 0 for record in shown],
        "hours": _numbers([(time - begin) / 3600 for time in times]),
    }


def _heat_map(heat: HeatMap) -> dict[str, Any]:
    values = [[None if not math.isfinite(v) else float(f"{v:.4g}") for v in row] for row in heat.values.tolist()]
    shown = {"title": heat.title, "unit": heat.unit, "rows": list(heat.rows), "steps": list(heat.steps)}
    return shown | {"values": values, "low_is_bad": heat.low_is_bad, "base": heat.base}


def page_data(runs: Sequence[RunData]) -> dict[str, Any]:
    """Return the content of the page as a JSON object."""
    panels = [p for p in PANELS if any(p.key in run.curves for run in runs)]
    return {
        "panels": [{"key": p.key, "title": p.title, "unit": p.unit, "log": p.log} for p in panels],
        "kinds": KINDS,
        "parts": PARTS,
        "runs": [
            {
                "name": run.name,
                "summary": summary(run),
                "axis": _axis(run),
                "curves": {key: [_curve(curve) for curve in curves] for key, curves in run.curves.items()},
                "heat_maps": [_heat_map(heat) for heat in run.heat_maps],
                "events": [vars(event) for event in run.events],
                "samples": [
                    {key: sample[key] for key in ("step", "prompt", "text", "reward") if key in sample}
                    for sample in run.samples
                ],
                "goodput": {
                    "wall": run.goodput.wall_seconds,
                    "fraction": run.goodput.fraction,
                    "seconds": run.goodput.seconds,
                    "text": {part: duration(seconds) for part, seconds in run.goodput.seconds.items()},
                    "repeated_steps": run.goodput.repeated_steps,
                },
                "advice": run.advice,
                "trouble": run.trouble,
            }
            for run in runs
        ],
    }


def page(runs: Sequence[RunData]) -> str:
    """Return the HTML page. Texts of runs are data in the page: they cannot end the script or become markup."""
    data = json.dumps(page_data(runs), separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return _PAGE.read_text(encoding="utf-8").replace("@DATA@", data)


def plot(runs: Sequence[RunData], path: Path) -> None:
    """Write a PNG with the charts of the page, without its tables."""
    plt = pyplot()
    panels = [p for p in PANELS if any(p.key in run.curves for run in runs)]
    across = 3
    down = math.ceil((len(panels) + 1) / across)
    figure, grid = plt.subplots(down, across, figsize=(5.2 * across, 3.1 * down), layout="constrained", squeeze=False)
    figure.suptitle(", ".join(run.name for run in runs))
    for axes, panel in zip(grid.flat, panels):
        _draw_panel(axes, panel, runs)
    _draw_goodput(grid.flat[len(panels)], runs)
    for axes in grid.flat[len(panels) + 1 :]:
        axes.set_axis_off()
    figure.savefig(path, dpi=100)
    plt.close(figure)


def _draw_panel(axes: Any, panel: Panel, runs: Sequence[RunData]) -> None:
    several = len(runs) > 1
    for number, run in enumerate(runs):
        _draw_curves(axes, panel, run, f"C{number}" if several else None)
        for event in () if several else run.events:
            if event.kind in _EVENT_COLOURS and event.step:
                axes.axvline(event.step, color=_EVENT_COLOURS[event.kind], linewidth=0.8, linestyle=":")
    axes.set_title(panel.title, fontsize="medium")
    axes.set_ylabel(panel.unit, fontsize="small")
    axes.set_xlabel("step", fontsize="small")
    axes.grid(alpha=0.3)
    if panel.log:
        axes.set_yscale("log")
    labels = axes.get_legend_handles_labels()[1]
    if len(labels) > 1 or (several and labels):
        outside = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.2), "ncols": 2} if len(labels) > 6 else {}
        axes.legend(fontsize="x-small", framealpha=0.6, **outside)


def _draw_curves(axes: Any, panel: Panel, run: RunData, colour: str | None) -> None:
    """Draw the curves of a run, in different colors if `colour` is None, else in different styles of this color."""
    curves = run.curves.get(panel.key, ())
    if panel.key == "learning_rate":
        draw_learning_rate(axes, run.records, label=run.name, colour=colour or "tab:green")
        return
    if panel.key == "loss":
        draw_loss(axes, run.records, prefix=f"{run.name}: " if colour else "", colour=colour)
    for i, curve in enumerate(curves):
        if panel.key == "loss" and curve.label in ("training", "validation"):
            continue
        points = downsample(curve)
        y = [math.nan if value is None else value for value in points.y]
        style: dict[str, Any] = {"marker": "o", "markersize": 3} if curve.sparse else {}
        style["linestyle"] = ("-", "--", ":", "-.")[i % 4] if colour else "-"
        if not colour:
            style["label"] = curve.label
        elif panel.key == "loss" or len(curves) > 1:
            style["label"] = f"{run.name}: {curve.label}"
        else:
            style["label"] = run.name
        axes.plot(points.x, y, linewidth=1, color=colour or f"C{i}", **style)


def _draw_goodput(axes: Any, runs: Sequence[RunData]) -> None:
    left = np.zeros(len(runs))
    for number, part in enumerate(PARTS):
        share = np.array([100 * run.goodput.seconds[part] / run.goodput.wall_seconds for run in runs])
        if share.max() >= 0.05:
            axes.barh(range(len(runs)), share, 0.5, left, label=f"{part} {share[0]:.1f}%" if len(runs) == 1 else part,
                      color=f"C{number}" if number < 7 else ("0.4", "0.7")[number - 7])  # fmt: skip
        left += share
    axes.set_yticks(range(len(runs)), [run.name if len(runs) > 1 else "" for run in runs], fontsize="small")
    axes.set_ylim(len(runs) - 0.5, -0.5)
    axes.set_title("Goodput: where the wall time went", fontsize="medium")
    axes.set_xlabel("% of the wall time since the first launch", fontsize="small")
    axes.legend(fontsize="x-small", ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.2))


def show(arguments: argparse.Namespace) -> None:
    """Read all runs, print their summaries, and write the page and the PNG."""
    runs = [read_run(folder, name) for folder, name in zip(arguments.runs, names_of(arguments.runs))]
    html, png = arguments.html, arguments.png
    if html is None and png is None:
        if len(runs) > 1:
            raise ValueError(f"{len(runs)} runs: name the file to write with --html FILE, --png FILE or both")
        html, png = runs[0].folder / "run.html", runs[0].folder / "run.png"
    for run in runs:
        print(f"{run.name}: {_line(summary(run))}")
    if html is not None:
        html.write_text(page(runs), encoding="utf-8")
        print(f"page: {html}")
    if png is not None:
        plot(runs, png)
        print(f"picture: {png}")


def _line(figures: Mapping[str, str]) -> str:
    shown = ("steps", "tokens", "last loss", "skipped steps", "launches", "wall time", "goodput")
    return "  ".join(f"{name} {figures[name]}" for name in shown)
