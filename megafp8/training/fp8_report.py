"""Table and heat map of the FP8 health records of a run."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megafp8.fp8.health import EXACT_DB, FILE_NAME, OPERANDS, Fp8Record, read_report
from megafp8.host.tool import file_of_run, pyplot
from megafp8.training.fp8_records import advice_text, grid, ordered_layers, place, read_config

_MOST_NAMES = 20
_PANELS = (
    ("snr_db", "SNR (dB)", "viridis"),
    ("underflow", "underflow (fraction)", "magma_r"),
    ("saturated", "saturated (fraction)", "magma_r"),
    ("amax", "log2 amax", "cividis"),
)
_SWITCH_ON = "switch it on with fp8.report_interval=100 (a sample every 100 steps)"


def read_run(folder: Path) -> list[Fp8Record]:
    """Return the FP8 records of a run, of at least one step. Raises ValueError if the folder has no report."""
    path = file_of_run(folder, FILE_NAME, _SWITCH_ON)
    records = read_report(path)
    if not records:
        raise ValueError(f"{path} is empty: no step has been sampled yet; every fp8.report_interval-th step is sampled")
    return records


def chosen_step(records: Sequence[Fp8Record], wanted: str) -> int:
    """Return the step for `wanted`, which is "last" or a number. Raises ValueError if it was not sampled."""
    steps = sorted({record.step for record in records})
    if wanted == "last":
        return steps[-1]
    if not wanted.isdecimal() or int(wanted) not in steps:
        nearest = sorted(steps, key=lambda step: abs(step - int(wanted)))[:3] if wanted.isdecimal() else steps[-3:]
        raise ValueError(f"--step {wanted} is not a sampled step: there are {len(steps)}, among them {sorted(nearest)}")
    return int(wanted)


def _figure(value: float | None, form: str) -> str:
    """Return the number in format `form`, or "-" if it was not finite."""
    return "-" if value is None else format(value, form)


def _snr(value: float | None) -> str:
    return "exact" if value == EXACT_DB else _figure(value, ".1f")


def worst_table(records: Sequence[Fp8Record], count: int) -> str:
    """Return a table of the `count` worst tensors: tensors that were not finite first, then by SNR.

    The SNR is compared with the median of the operand, because gradients in E5M2 are about 6 dB below tensors in E4M3.
    """
    known = {
        operand: [r.snr_db for r in records if r.operand == operand and r.snr_db is not None] for operand in OPERANDS
    }
    medians = {operand: median(snr) for operand, snr in known.items() if snr}

    def to_median(record: Fp8Record) -> str:
        return "-" if record.snr_db is None else f"{record.snr_db - medians[record.operand]:+.1f}"

    ranked = sorted(records, key=lambda r: -math.inf if r.snr_db is None else r.snr_db - medians[r.operand])[:count]
    width = max(len(record.layer) for record in ranked) + 2
    lines = [
        f"{'layer':<{width}}{'operand':<12}{'SNR dB':>7}{'to median':>11}{'underflow':>11}{'saturated':>11}"
        f"{'amax':>10}{'scale':>10}"
    ]
    lines += [
        f"{r.layer:<{width}}{r.operand:<12}{_snr(r.snr_db):>7}{to_median(r):>11}"
        f"{r.underflow:>11.2%}{r.saturated:>11.3%}{_figure(r.amax, '.3g'):>10}{_figure(r.scale, '.3g'):>10}"
        for r in ranked
    ]
    return "\n".join(lines)


def summary(records: Sequence[Fp8Record]) -> str:
    """Return a table with a line per operand: SNR, mean fractions, and number of tensors with infinities or NaNs."""
    lines = [
        f"{'operand':<13}{'tensors':>8}{'median SNR':>12}{'worst SNR':>11}{'underflow':>11}{'saturated':>11}"
        f"{'not finite':>12}"
    ]
    for operand in OPERANDS:
        rows = [record for record in records if record.operand == operand]
        if rows:
            snr = [record.snr_db for record in rows if record.snr_db is not None]
            lines.append(
                f"{operand:<13}{len(rows):>8}{_snr(median(snr) if snr else None):>12}{_snr(min(snr, default=None)):>11}"
                f"{fmean(r.underflow for r in rows):>11.2%}{fmean(r.saturated for r in rows):>11.3%}"
                f"{sum(r.amax is None for r in rows):>12}"
            )
    return "\n".join(lines)


def plot(records: Sequence[Fp8Record], path: Path, title: str) -> None:
    """Write a PNG with heat maps of layers × sampled steps: SNR, underflow, saturation and log2 amax per operand."""
    plt = pyplot()
    layers, steps = ordered_layers(records), sorted({record.step for record in records})
    down, across = len(_PANELS), len(OPERANDS)
    height = down * min(max(1.8, 0.8 + 0.13 * len(layers)), 4.5) + 0.8
    figure, panels = plt.subplots(down, across, figsize=(16, height), sharex=True, sharey=True, layout="constrained")
    figure.suptitle(f"{title}: quantization error (grey: not finite, or missing)")
    for line, (field, label, colours) in zip(panels, _PANELS):
        for axes, operand in zip(line, OPERANDS):
            values = grid(records, operand, field)
            cmap = plt.get_cmap(colours).with_extremes(bad="0.75")
            image = axes.imshow(values, aspect="auto", norm=_colour_scale(field, values), cmap=cmap)
            figure.colorbar(image, ax=axes, pad=0.02)
            axes.set_title(f"{operand}: {label}", fontsize="medium")
            _mark_layers(axes, layers)
    ticks = range(len(steps) - 1, -1, -math.ceil(len(steps) / 6))  # from the end, so that the last step is labeled
    for axes in panels[-1]:
        axes.set_xticks(ticks, [str(steps[i]) for i in ticks])
        axes.set_xlabel("step")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _colour_scale(field: str, values: NDArray[np.float64]) -> Any:
    """Return the color norm of a panel.

    Fractions have a logarithmic scale. Other fields have the range of their values without exact casts, at least 12 dB
    or 12 octaves wide, so that the noise of a healthy run stays pale.
    """
    from matplotlib.colors import LogNorm, Normalize

    if field in ("underflow", "saturated"):
        return LogNorm(1e-5, 1, clip=True)
    drawn = values[np.isfinite(values) & (values < EXACT_DB)]
    if not len(drawn):
        return Normalize(0, 1)
    return Normalize(min(drawn.min(), drawn.max() - 12), drawn.max())


def _mark_layers(axes: Any, layers: Sequence[str]) -> None:
    """Label the layers, or groups of layers at the same place in a block if there are many, and separate the groups."""
    kinds = [place(layer)[0] for layer in layers]
    firsts = [i for i, kind in enumerate(kinds) if i == 0 or kind != kinds[i - 1]]
    if len(layers) <= _MOST_NAMES:
        axes.set_yticks(range(len(layers)), layers, fontsize="small")
    else:
        ends = [*firsts[1:], len(layers)]
        labels = [
            f"{kinds[i]}\nblocks {place(layers[i])[1]}-{place(layers[end - 1])[1]}" for i, end in zip(firsts, ends)
        ]
        axes.set_yticks([(i + end - 1) / 2 for i, end in zip(firsts, ends)], labels, fontsize="small")
    for i in firsts[1:]:
        axes.axhline(i - 0.5, color="0.35", linewidth=0.8)


def show(arguments: argparse.Namespace) -> None:
    """Print and draw the report. The whole report is read before anything is printed."""
    records = read_run(arguments.run)
    step = chosen_step(records, arguments.step)
    shown = [record for record in records if record.step == step]
    advised = advice_text([record for record in records if record.step <= step], read_config(arguments.run))
    print(f"{arguments.run}, step {step}: {len(shown)} tensors, the worst by SNR against their operand's median")
    print(f"\n{worst_table(shown, arguments.worst)}\n\n{summary(shown)}\n\n{advised}")
    if arguments.png:
        plot(records, arguments.png, arguments.run.name)
        print(f"\nheat map: {arguments.png}")
