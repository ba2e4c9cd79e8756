"""Data of a run folder for plots: curves of metrics, FP8 health, expert load, events, texts and goodput.

`read_run` reads a folder into a `RunData`, which `megafp8 plot-run` draws.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import yaml

from megafp8.config.reader import compose, construct
from megafp8.fp8.health import FILE_NAME as FP8_FILE
from megafp8.fp8.health import OPERANDS, Fp8Record, read_report
from megafp8.host.tool import file_of_run
from megafp8.optimizer.layer_norms import GRADIENT, UPDATE, WEIGHT, in_order
from megafp8.training.expert_load import FILE_NAME as EXPERT_LOAD_FILE
from megafp8.training.expert_load import read_expert_load, relative
from megafp8.training.fp8_records import advice_text, grid, ordered_layers, read_config
from megafp8.training.goodput import Goodput, goodput, read_lines
from megafp8.training.history import changed_keys
from megafp8.training.metrics import counting, fp8_scalars, short_number
from megafp8.training.run_log import FORMAT_VERSION, LAUNCHES_FILE, LOG_FILE

BUCKETS = 750
"""Number of buckets to which long curves are reduced."""
_COLUMNS = 100
"""Maximum number of columns of a heat map."""
_MOST_LOG_LINES = 200
_SAVED = re.compile(r"^\[[^]]*\] saved .*step_(\d+)(?::| in )(.*)$")
_TROUBLE = re.compile(r"^\[([^]]*)\] (?:rank \d+: )?(?:WARNING|ERROR): (?!step +\d+/)")


@dataclass(frozen=True)
class Curve:
    """Curve of a metric over steps.

    Attributes:
        label: Label in the legend.
        steps: Steps.
        values: Values at the steps; None if not finite.
        sparse: Whether to draw a marker at each value.
    """

    label: str
    steps: Sequence[int]
    values: Sequence[float | None]
    sparse: bool = False


@dataclass(frozen=True)
class Panel:
    """Chart with the curves that `RunData.curves` holds under its key.

    Attributes:
        key: Key of the chart.
        title: Title.
        unit: Unit of the values.
        log: Whether the scale is logarithmic at first.
    """

    key: str
    title: str
    unit: str
    log: bool = False


PANELS = (
    Panel("loss", "Loss", "nats per token"),
    Panel("rewards", "Rewards of answers (DPO)", "beta times log p / p_ref"),
    Panel("accuracy", "Pairs whose chosen answer has the higher reward", "%"),
    Panel("divergence", "Divergence from the teacher (distillation)", "nats per token"),
    Panel("reward", "Rewards of sampled texts (GRPO)", ""),
    Panel("sampled", "Sampled texts (GRPO)", "%"),
    Panel("sampled_length", "Length of sampled texts (GRPO)", "tokens"),
    Panel("sampled_kl", "Divergence of training from sampling, and from the reference (GRPO)", "nats per token"),
    Panel("learning_rate", "Learning rate", ""),
    Panel("grad_norm", "Gradient norm", "before clipping"),
    Panel("norms", "Norms of weights and updates", "whole model", log=True),
    Panel("throughput", "Throughput", "tokens/s per GPU (per process on CPU)"),
    Panel("tflops", "Model FLOPs", "TFLOP/s per GPU"),
    Panel("mfu", "Model FLOPs utilization", "% of the peak, samples counted as one document"),
    Panel("seconds", "Step time and its parts", "seconds", log=True),
    Panel("sections", "Time by section of the training loop", "seconds a step", log=True),
    Panel("memory", "Peak memory", "GiB"),
    Panel("loss_scale", "Loss scale", "fp16", log=True),
    Panel("skipped", "Skipped steps", "in a row"),
    Panel("tasks", "Tasks", "metric"),
    Panel("fp8_snr", "FP8: worst signal-to-noise ratio", "dB, over all layers"),
    Panel("fp8_underflow", "FP8: largest underflow", "% of a tensor's elements"),
    Panel("fp8_saturated", "FP8: largest saturation", "% of a tensor's elements"),
    Panel("attention_logit", "Largest attention logit", ""),
    Panel("regularizers", "Regularizers: output layer, routers, indexers", ""),
    Panel("imbalance", "Experts: largest load", "times the mean of the layer"),
    Panel("entropy", "Experts: entropy of scores", "1 is even"),
    Panel("dropped", "Experts: dropped choices", "%"),
)

_METRICS: tuple[tuple[str, str, str, float], ...] = (
    ("loss", "loss", "training", 1),
    ("loss", "mtp_loss", "multi-token prediction", 1),
    ("loss", "binary_loss", "binary head", 1),
    ("rewards", "rewards/chosen", "chosen", 1),
    ("rewards", "rewards/rejected", "rejected", 1),
    ("rewards", "rewards/margins", "margin", 1),
    ("accuracy", "rewards/accuracies", "training", 100),
    ("divergence", "divergence", "KL(teacher, student)", 1),
    ("divergence", "cross_entropy", "cross entropy", 1),
    ("reward", "reward", "mean", 1),
    ("reward", "reward_std", "standard deviation in a group", 1),
    ("sampled", "frac_reward_zero_std", "groups with equal rewards", 100),
    ("sampled", "completions/clipped_ratio", "cut by max_tokens", 100),
    ("sampled", "clip_ratio", "tokens with a clipped ratio", 100),
    ("sampled_length", "completions/mean_length", "mean", 1),
    ("sampled_kl", "rollout_kl", "sampling", 1),
    ("sampled_kl", "kl", "reference", 1),
    ("learning_rate", "learning_rate", "learning rate", 1),
    ("grad_norm", "grad_norm", "gradient norm", 1),
    ("norms", "weight_norm", "weights", 1),
    ("norms", "update_norm", "update", 1),
    ("throughput", "tokens_per_second_per_gpu", "tokens/s", 1),
    ("tflops", "tflops_per_gpu", "TFLOP/s", 1),
    ("mfu", "mfu", "MFU", 100),
    ("seconds", "step_seconds", "step", 1),
    ("seconds", "data_seconds", "of it waiting for data", 1),
    ("memory", "memory_gib", "memory", 1),
    ("loss_scale", "loss_scale", "loss scale", 1),
    ("regularizers", "z_loss", "z-loss of the output layer", 1),
    ("regularizers", "router_aux_loss", "auxiliary loss of routers", 1),
    ("regularizers", "router_z_loss", "z-loss of routers", 1),
    ("regularizers", "index_loss", "indexers", 1),
    ("attention_logit", "max_attention_logit", "largest of all heads", 1),
    ("imbalance", "expert_imbalance", "worst layer", 1),
    ("entropy", "router_entropy", "mean of layers", 1),
    ("dropped", "expert_drop_rate", "dropped", 100),
)
"""Metrics that are shown for every step: panel, key in metrics.jsonl, label, and factor to the panel's unit."""

KINDS: Mapping[str, str] = {
    "launch": "launches",
    "change": "changes of config and stages",
    "skipped": "skipped steps",
    "hang": "hangs",
    "checkpoint": "checkpoints",
}
"""Kinds of events with their descriptions."""


@dataclass(frozen=True)
class Event:
    """Event of a run.

    Attributes:
        kind: Kind of the event, a key of `KINDS`.
        step: Number of steps done before the event.
        text: Description.
        time: UTC in ISO 8601, or None if unknown.
    """

    kind: str
    step: int
    text: str
    time: str | None = None


@dataclass(frozen=True)
class HeatMap:
    """Heat map of values over rows and steps.

    Attributes:
        title: Title.
        unit: Unit of the values.
        rows: Labels of the rows.
        steps: Steps of the columns.
        values: Values `[rows, steps]`; NaN if missing or not finite.
        low_is_bad: Whether small values are dark; otherwise large values are dark.
        base: Beginning of the scale if `low_is_bad` is False; None means the smallest value.
    """

    title: str
    unit: str
    rows: Sequence[str]
    steps: Sequence[int]
    values: np.ndarray
    low_is_bad: bool
    base: float | None = None


@dataclass(frozen=True)
class RunData:
    """Data of a run.

    Attributes:
        name: Name of the run.
        folder: Run folder.
        records: Records of metrics.jsonl that count.
        curves: Curves by key of `PANELS`.
        heat_maps: Heat maps.
        events: Events in the order of steps.
        samples: Records of samples.jsonl.
        goodput: Goodput of the run.
        launches: Records of launches.jsonl.
        advice: Advice of the FP8 report, or None without a report.
        trouble: Latest warnings and errors in log.txt.
    """

    name: str
    folder: Path
    records: Sequence[Mapping[str, Any]]
    curves: Mapping[str, Sequence[Curve]]
    heat_maps: Sequence[HeatMap]
    events: Sequence[Event]
    samples: Sequence[Mapping[str, Any]]
    goodput: Goodput
    launches: Sequence[Mapping[str, Any]]
    advice: str | None
    trouble: Sequence[str]


def read_run(folder: Path, name: str) -> RunData:
    """Read the run in `folder`. Raises ValueError if it has no step, or a file cannot be read."""
    path = file_of_run(folder, "metrics.jsonl", "it is not a run folder, or no step has ended yet")
    everything = [r for r in read_lines(path, "step", "loss", "time", "step_seconds") if isinstance(r["step"], int)]
    if not everything:
        raise ValueError(f"{path} has no step")
    flags = counting([record["step"] for record in everything])
    records = [record for record, counts in zip(everything, flags) if counts]
    launches = read_lines(folder / LAUNCHES_FILE, "time", "step")
    versions = [launch.get("format_version") for launch in launches]
    if newer := [version for version in versions if isinstance(version, int) and version > FORMAT_VERSION]:
        where = f"{folder / LAUNCHES_FILE}: the run has format version {max(newer)}"
        raise ValueError(f"{where}; this megafp8 reads up to {FORMAT_VERSION}: use a newer version")
    report = read_report(folder / FP8_FILE) if (folder / FP8_FILE).exists() else []
    log = _lines(folder / LOG_FILE)
    return RunData(
        name,
        folder,
        records,
        _curves(records) | _fp8_curves(report),
        [*_norm_heat_maps(records), *_fp8_heat_maps(report), *_expert_heat_maps(folder)],
        sorted(_events(folder, records, launches, log), key=lambda event: event.step),
        read_lines(folder / "samples.jsonl", "step", "prompt", "text"),
        goodput(everything, launches),
        launches,
        _advice(folder, report),
        [line for line in log if _TROUBLE.match(line)][-_MOST_LOG_LINES:],
    )


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []


def curve(
    records: Sequence[Mapping[str, Any]], key: str, label: str, unit: float = 1, *, sparse: bool = False
) -> Curve:
    """Return the curve of a metric over the records that have it.

    Args:
        records: Records of metrics.jsonl.
        key: Key of the metric.
        label: Label in the legend.
        unit: Factor by which values are multiplied.
        sparse: Keep only records in which the value is a number, and draw a marker at each.
    """
    points = [(r["step"], r[key]) for r in records if key in r and not (sparse and r[key] is None)]
    return Curve(label, [step for step, _ in points], [None if v is None else v * unit for _, v in points], sparse)


def _curves(records: Sequence[Mapping[str, Any]]) -> dict[str, Sequence[Curve]]:
    """Return the curves of metrics.jsonl that have at least one number, by panel."""
    curves_of_panel: dict[str, list[Curve]] = {panel.key: [] for panel in PANELS}
    for panel, key, label, unit in _METRICS:
        curves_of_panel[panel].append(curve(records, key, label, unit, sparse=panel == "norms"))
    keys = {key: None for record in records for key in record}
    validations = {"validation_loss": "validation"} | {k: k[6:] for k in keys if k.startswith("valid/")}
    curves_of_panel["loss"][1:1] = [curve(records, key, label, sparse=True) for key, label in validations.items()]
    curves_of_panel["tasks"] = [curve(records, key, key[5:], sparse=True) for key in keys if key.startswith("eval/")]
    sections = [key for key in keys if key.startswith("seconds/")]
    curves_of_panel["sections"] = [curve(records, key, key[8:].replace("_", " ")) for key in sections]
    for key, label in (("evaluation_seconds", "evaluation"), ("save_seconds", "stalled for saves")):
        some = [record for record in records if (record.get(key) or 0) >= 1e-3]  # leave out polls of a running save
        curves_of_panel["seconds"].append(curve(some, key, label, sparse=True))
    if any(record.get("skipped_in_a_row") for record in records):
        curves_of_panel["skipped"] = [curve(records, "skipped_in_a_row", "skipped in a row")]
    return {
        key: curves
        for key, all_curves in curves_of_panel.items()
        if (curves := [c for c in all_curves if any(v is not None for v in c.values)])
    }


def _by_step(report: Sequence[Fp8Record]) -> dict[int, list[Fp8Record]]:
    records_of_step: dict[int, list[Fp8Record]] = {}
    for record in report:
        records_of_step.setdefault(record.step, []).append(record)
    return records_of_step


def _fp8_curves(report: Sequence[Fp8Record]) -> dict[str, Sequence[Curve]]:
    scalars = [{"step": step} | fp8_scalars(records) for step, records in _by_step(report).items()]
    panels = (
        ("fp8_snr", "min_snr_db", 1),
        ("fp8_underflow", "max_underflow", 100),
        ("fp8_saturated", "max_saturated", 100),
    )
    if not scalars:
        return {}
    return {panel: [curve(scalars, f"fp8/{o}/{key}", o, unit) for o in OPERANDS] for panel, key, unit in panels}


def reduce_columns(
    values: np.ndarray, steps: Sequence[int], worst: Callable[..., np.ndarray]
) -> tuple[np.ndarray, list[int]]:
    """Reduce `values` `[rows, steps]` to at most `_COLUMNS` columns; return the values and steps of the columns.

    A column has the `worst` (`np.fmin` or `np.fmax`) of neighboring steps, and the last of these steps.
    """
    edges = np.linspace(0, len(steps), min(len(steps), _COLUMNS) + 1).astype(int)
    columns = [worst.reduce(values[:, a:b], axis=1) for a, b in pairwise(edges)]  # type: ignore[attr-defined]
    return np.stack(columns, axis=1), [steps[end - 1] for end in edges[1:]]


def _norm_heat_maps(records: Sequence[Mapping[str, Any]]) -> Iterator[HeatMap]:
    """Yield heat maps of the norms by layer: gradients, weights, and updates divided by weights."""
    layers = in_order({key.partition("/")[2] for record in records for key in record if key.startswith(f"{GRADIENT}/")})
    measured = [record for record in records if layers and f"{GRADIENT}/{layers[0]}" in record]
    if not measured:
        return
    steps = [record["step"] for record in measured]

    def values(kind: str) -> np.ndarray:
        return np.array([[record.get(f"{kind}/{layer}") or math.nan for record in measured] for layer in layers])

    for title, norms in (
        ("Norm of gradients, before clipping", values(GRADIENT)),
        ("Norm of weights", values(WEIGHT)),
        ("Norm of updates, divided by norm of weights", values(UPDATE) / values(WEIGHT)),
    ):
        shown, columns = reduce_columns(np.log10(norms), steps, np.fmax)
        yield HeatMap(title, "log₁₀", layers, columns, shown, low_is_bad=False)


def _fp8_heat_maps(report: Sequence[Fp8Record]) -> Iterator[HeatMap]:
    steps = sorted({record.step for record in report})
    for operand in OPERANDS if report else ():
        values, columns = reduce_columns(grid(report, operand, "snr_db"), steps, np.fmin)
        yield HeatMap(f"FP8: SNR of {operand}", "dB", ordered_layers(report), columns, values, low_is_bad=True)


def _expert_heat_maps(folder: Path) -> Iterator[HeatMap]:
    path = folder / EXPERT_LOAD_FILE
    loads = read_expert_load(path) if path.exists() else {}
    if loads:
        layers = sorted({layer for load in loads.values() for layer in load})
        worst = np.array([relative(load).max(axis=1) for load in loads.values()]).T
        values, columns = reduce_columns(worst, list(loads), np.fmax)
        rows = [f"layer {layer}" for layer in layers]
        yield HeatMap("Experts: the one with the most tokens", "× mean of the layer", rows, columns, values, False, 1.0)


def _advice(folder: Path, report: Sequence[Fp8Record]) -> str | None:
    if not report:
        return None
    try:
        return advice_text(report, read_config(folder))
    except (ValueError, OSError) as error:
        return f"Advice: none, because the run's config does not load: {error}"


def _events(
    folder: Path, records: Sequence[Mapping[str, Any]], launches: Sequence[Mapping[str, Any]], log: Sequence[str]
) -> Iterator[Event]:
    for number, launch in enumerate(launches, start=1):
        yield Event("launch", launch["step"], _describe_launch(number, launch), launch["time"])
    yield from _changes(folder)
    yield from _skipped(records)
    for path in sorted(folder.glob("hangs/*/verdict.txt")):
        text = path.read_text(encoding="utf-8", errors="replace")
        place = re.search(r"\bstep (\d+)", text)
        when = re.sub(r"T(\d\d)-(\d\d)-(\d\d)$", r"T\1:\2:\3", path.parent.name)
        yield Event("hang", int(place[1]) if place else records[-1]["step"], text.strip(), when)
    for step, text in {int(m[1]): m[2] for line in log if (m := _SAVED.match(line))}.items():
        exists = (folder / "checkpoints" / f"step_{step:08d}").is_dir()
        yield Event("checkpoint", step, f"saved: {text.strip()}{'' if exists else '; not in the folder any more'}")


def _describe_launch(number: int, launch: Mapping[str, Any]) -> str:
    begins = f"resumes after step {launch['step']}" if launch["step"] else "begins the run"
    hosts = launch.get("hosts") or {}
    place = next(iter(hosts)) if len(hosts) == 1 else f"{len(hosts)} hosts"
    where = f"{launch.get('ranks', '?')} {'rank' if launch.get('ranks') == 1 else 'ranks'} on {place}"
    commit = f", commit {launch['commit'][:10]}" if launch.get("commit") else ""
    return f"launch {number} {begins}: {where}{commit}, torch {launch.get('torch_version', '?')}"


def _changes(folder: Path) -> Iterator[Event]:
    """Yield the changes of the config from each start to the next, read from the files that each start wrote."""
    before = _yaml(folder / "config.yaml")
    for path in sorted(folder.glob("config-from-step-*.yaml")):
        config = _yaml(path)
        step = int(path.stem.rpartition("-")[2])
        keys = changed_keys(before, config)
        if keys:
            stage = next((s["name"] for s in reversed(config.get("stages") or []) if s["begin"] == step), None)
            remainder = f"; and {len(keys) - 12} more" if len(keys) > 12 else ""
            yield Event("change", step, f"{f'stage {stage}: ' if stage else ''}{'; '.join(keys[:12])}{remainder}")
        before = config


def _yaml(path: Path) -> dict[str, Any]:
    try:
        content = construct(compose(path.read_text(encoding="utf-8"))) if path.exists() else {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    return content if isinstance(content, dict) else {}


def _skipped(records: Sequence[Mapping[str, Any]]) -> Iterator[Event]:
    """Yield an event for each row of consecutive skipped steps."""
    row: list[int] = []
    for record in [*records, {}]:
        if record.get("skipped"):
            row.append(record["step"])
        elif row:
            which = f"step {row[0]}" if len(row) == 1 else f"steps {row[0]} to {row[-1]}"
            yield Event("skipped", row[0], f"{which} skipped: gradients not finite, or a loss spike")
            row = []


@dataclass(frozen=True)
class Points:
    """Points of a curve for drawing.

    Attributes:
        x: Steps of the points.
        y: Values of the points; None if not finite.
        mean_x: Mean steps of the buckets; empty if the curve was not reduced.
        mean_y: Mean values of the buckets; None if a bucket has no finite value.
    """

    x: Sequence[float]
    y: Sequence[float | None]
    mean_x: Sequence[float] = ()
    mean_y: Sequence[float | None] = ()


def downsample(curve: Curve) -> Points:
    """Reduce a curve to the smallest and the largest value in each of `BUCKETS` buckets of equal numbers of steps.

    The first and the last point are kept, and so is the first value of each bucket that is not finite. Curves of up to
    2 · `BUCKETS` points stay unchanged.
    """
    n = len(curve.steps)
    if n <= 2 * BUCKETS:
        return Points(curve.steps, curve.values)
    values = np.array([math.nan if v is None else v for v in curve.values], dtype=np.float64)
    edges = np.linspace(0, n, BUCKETS + 1).astype(int)
    kept, mean_x, mean_y = {0, n - 1}, [], []
    for a, b in pairwise(edges):
        part = values[a:b]
        finite = np.isfinite(part)
        if finite.any():
            kept |= {int(a + np.nanargmin(part)), int(a + np.nanargmax(part))}
        if not finite.all():
            kept.add(int(a + np.argmin(finite)))
        mean_x.append(float(np.mean(curve.steps[a:b])))
        mean_y.append(float(part[finite].mean()) if finite.any() else None)
    order = sorted(kept)
    return Points([curve.steps[i] for i in order], [curve.values[i] for i in order], mean_x, mean_y)


def summary(run: RunData) -> dict[str, str]:
    """Return the summary figures of a run as texts by name."""
    records, last = run.records, run.records[-1]
    recent = [r["loss"] for r in records[-max(1, len(records) // 100) :] if r["loss"] is not None]
    config = _yaml([run.folder / "config.yaml", *sorted(run.folder.glob("config-from-step-*.yaml"))][-1])
    steps = (config.get("training") or {}).get("steps")
    summary_values = {
        "steps": f"{last['step']:,}" + (f" of {steps:,}" if steps else ""),
        "tokens": short_number(last["tokens"]) if last.get("tokens") else "-",
        "last loss": f"{recent[-1]:.4f}" if recent else "not finite",
    }
    valid = [(r["validation_loss"], r["step"]) for r in records if r.get("validation_loss") is not None]
    if valid:
        summary_values["best validation loss"] = f"{min(valid)[0]:.4f} at step {min(valid)[1]:,}"

    def typical(key: str, form: str) -> None:
        values = [r[key] for r in records if r.get(key) is not None]
        if values:
            summary_values[f"median {_NAMES[key]}"] = format(median(values), form)

    for key, form in (("tokens_per_second_per_gpu", ",.0f"), ("tflops_per_gpu", ",.3g"), ("mfu", ".1%")):
        typical(key, form)
    summary_values["peak memory"] = f"{max((r.get('memory_gib') or 0) for r in records):.2f} GiB"
    summary_values["skipped steps"] = f"{run.goodput.skipped_steps:,}"
    summary_values["launches"] = f"{run.goodput.launches:,}"
    summary_values["wall time"] = duration(run.goodput.wall_seconds)
    summary_values["goodput"] = f"{run.goodput.fraction:.1%}"
    return summary_values


_NAMES = {"tokens_per_second_per_gpu": "tokens/s per GPU", "tflops_per_gpu": "TFLOP/s per GPU", "mfu": "MFU"}


def duration(seconds: float) -> str:
    """Return a duration as text, such as `3.2 s`, `4 min 10 s`, `5 h 20 min` or `12 d 3 h`."""
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, hours = round(seconds) // 60, round(seconds / 60) // 60
    if minutes < 60:
        return f"{minutes} min {round(seconds) % 60} s"
    if hours < 48:
        return f"{hours} h {round(seconds / 60) % 60} min"
    return f"{round(seconds / 3600) // 24} d {round(seconds / 3600) % 24} h"
