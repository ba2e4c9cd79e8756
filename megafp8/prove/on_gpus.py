"""Proof of the small config on GPUs, in its own precision and with its own kernels, against one CPU rank in float64.

Sums differ by rounding, so differences are root mean squares relative to the reference tensor. Their bound depends on
the precision (`BOUNDS`). If a network amplifies rounding errors, the bound is a multiple of the errors of one CPU rank
in the same precision (`MARGIN`). The reference begins with the same weights, rounded to the precision, reads the same
data, and quantizes with the same recipe. Only the rounding of values and sums, the kernels, CUDA graphs, and NCCL
differ. An FP8 recipe is proven in a second run, so that its rounding does not hide other faults.
"""

from __future__ import annotations

import math
import os
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from megafp8.checkpoint import Rectangles
from megafp8.checkpoint.rectangles import as_rectangles
from megafp8.config import Config, ConfigError, Problem
from megafp8.numerics.dtypes import DTYPES
from megafp8.parallel.sharding import Shape
from megafp8.prove.certificate import CheckResult, Status
from megafp8.prove.layout import MOST_RANKS
from megafp8.prove.local_ranks import LocalRanks, RanksFailed
from megafp8.prove.random_data import write_data
from megafp8.prove.runs import GRADIENTS, STATE, STEPS, Context, Step, TrialRun, begin, read_tensors, write_tensors
from megafp8.prove.shrink import SPECIAL_TOKENS, Small, in_float64, on_cpus, one_rank, shrink
from megafp8.training.cuda_graphs import describe
from megafp8.training.state import tensors, weights

ROUNDING = 1e-12
"""Fraction of the largest gradient below which a gradient's root mean square counts as a rounding error of zero."""
INITIAL = "initial.pt"
"""File with the initial weights of the reference, next to the files of `runs`."""


class Squares(NamedTuple):
    """Comparison of the parts of a tensor that a rank holds.

    `scale`: mean square of the reference, or of the change to which differences are relative. `parts`: sum of squared
    differences from the reference for each part (offset, shape).
    """

    shape: Shape
    scale: float
    parts: Mapping[tuple[Shape, Shape], float]


@dataclass
class GpuRunResult:
    """Result of a run on one rank. `graphs`: whether steps were replayed. `memory`: peak memory of its GPU in GiB."""

    steps: list[Step] = field(default_factory=list)
    initial: Mapping[str, Squares] = field(default_factory=dict)
    gradients: Mapping[str, Squares] = field(default_factory=dict)
    state: Mapping[str, Squares] = field(default_factory=dict)
    graphs: str = ""
    memory: float = 0.0


def squares(
    held: Mapping[str, Rectangles | Tensor], expected: Mapping[str, Tensor], before: Mapping[str, Tensor] | None = None
) -> dict[str, Squares]:
    """Compare the tensors on this rank with the whole tensors of the same names.

    If `before` is given, differences are relative to the change of the reference since these tensors.
    """
    compared = {}
    for name, rectangles in as_rectangles(held).items():
        if name not in expected:
            continue
        whole = expected[name].double()
        scale = whole if before is None else whole - before[name].double()
        parts = {}
        for offset, view in rectangles.parts:
            part = whole[tuple(slice(o, o + n) for o, n in zip(offset, view.shape))]
            apart = (part - view.detach().double().cpu()).square().sum()
            parts[offset, tuple(view.shape)] = float(apart.nan_to_num(nan=math.inf))
        compared[name] = Squares(tuple(whole.shape), float(scale.square().mean()), parts)
    return compared


def reference(config: Config, folder: Path, precision: str, threads: int = 1) -> list[Step]:
    """Train on one rank in float64 from weights rounded to `precision`, and save the results for comparison."""
    torch.set_num_threads(threads)
    run = TrialRun(config, begin(config))
    with torch.no_grad():
        for weight in run.trainer.model.parameters():
            weight.copy_(weight.to(DTYPES[precision]))
    write_tensors(weights(run.trainer), folder / INITIAL)
    run.train(STEPS, lambda: write_tensors(run.gradients(), folder / GRADIENTS))
    write_tensors(weights(run.trainer), folder / STATE)
    return run.record.steps


def compared(config: Config, folder: Path, around: Context = nullcontext, threads: int = 1) -> GpuRunResult:
    """Train on all ranks as `config` specifies, and compare with the files that the reference saved in `folder`."""
    torch.set_num_threads(threads)
    record = GpuRunResult()
    with around():
        run = TrialRun(config, begin(config))
        record.initial = squares(weights(run.trainer), read_tensors(folder / INITIAL))

        def compare_gradients() -> None:
            record.gradients = squares(run.gradients(), read_tensors(folder / GRADIENTS))

        run.train(STEPS, compare_gradients)
        record.state = squares(_masters(run), read_tensors(folder / STATE), read_tensors(folder / INITIAL))
    record.steps, record.graphs = run.record.steps, describe(run.trainer.why_no_graphs)
    if config.device == "cuda":
        record.memory = torch.cuda.max_memory_allocated() / 2**30
    run.trainer.close()
    return record


def _masters(run: TrialRun) -> dict[str, Rectangles | Tensor]:
    """Return this rank's parts of the optimizer's master weights, under the names of the weights."""
    state, prefix = tensors(run.trainer), "optimizer.master."
    if DTYPES[run.config.training.precision].itemsize > 2:
        prefix = "model."
    return {f"model.{name.removeprefix(prefix)}": x for name, x in state.items() if name.startswith(prefix)}


def relative(records: Iterable[Mapping[str, Squares]], names: Iterable[str]) -> dict[str, float]:
    """Return the root mean square of each tensor's differences on all ranks, relative to the reference, by name.

    The value is infinite if the ranks do not hold the whole tensor. If several ranks hold a copy, the one that differs
    most counts.
    """
    squares: dict[str, Squares] = {}
    for record in records:
        for name, x in record.items():
            parts = dict(squares[name].parts) if name in squares else {}
            parts |= {part: max(square, parts.get(part, 0.0)) for part, square in x.parts.items()}
            squares[name] = x._replace(parts=parts)
    return {name: _relative(squares[name]) if name in squares else math.inf for name in names}


def noise_of(gradients: Iterable[Mapping[str, Squares]]) -> set[str]:
    """Return the weights with reference gradients that are rounding errors of zero, such as the biases of keys."""
    scales = {name: x.scale for record in gradients for name, x in record.items()}
    return {name for name, scale in scales.items() if scale <= ROUNDING**2 * max(scales.values())}


def _relative(x: Squares) -> float:
    covered = torch.zeros(x.shape, dtype=torch.bool)
    for offset, shape in x.parts:
        covered[tuple(slice(o, o + n) for o, n in zip(offset, shape))] = True
    if not covered.all():
        return math.inf
    total = sum(x.parts.values()) / max(1, math.prod(x.shape))
    return math.sqrt(total / x.scale) if x.scale else math.inf if total else 0.0


class Bounds(NamedTuple):
    """Largest differences that rounding may cause.

    `losses`: of losses and norms. `gradients`: root mean square of a gradient tensor. `weights`: root mean square of a
    weight, relative to its change.
    """

    losses: float
    gradients: float
    weights: float


BOUNDS = {
    ("fp32", False): Bounds(1e-3, 1e-3, 0.1),
    ("fp32", True): Bounds(1e-3, 0.1, 0.3),
    ("bf16", False): Bounds(2e-2, 0.1, 0.3),
    ("bf16", True): Bounds(2e-2, 0.4, 0.7),
    ("fp8", False): Bounds(4e-2, 0.4, 0.7),
    ("fp8", True): Bounds(4e-2, 0.48, 0.8),
}
"""Bounds by rounding precision, and by whether tokens make choices: rounding changes a choice between similar experts
or keys."""
MARGIN = 2.0
"""Allowed multiple of the difference of one CPU rank in the same precision, if that is above the bound."""
SAME = 1e-3
"""Largest difference of initial weights: on GPUs, the last bit of a logarithm may differ, and so the rounded weight."""


def bounds_of(config: Config) -> Bounds:
    """Return the bounds of a config. fp16 uses the bounds of bf16, although it rounds less."""
    precision = "bf16" if DTYPES[config.training.precision].itemsize == 2 else "fp32"
    chooses = config.spec.has_experts or config.spec.has_indexers
    return BOUNDS["fp8" if config.fp8.recipe != "none" else precision, chooses]


def shrunk(config: Config, ranks: int | None = None) -> Small:
    """Return the small config of `config` on as many of this machine's GPUs as its layout needs. Raises ConfigError."""
    gpus = torch.cuda.device_count()
    if not gpus:
        raise ConfigError(
            "config", [Problem("device", "cuda", "torch sees no CUDA device here", "prove it on the CPU")]
        )
    return shrink(config, ranks, min(gpus, MOST_RANKS), "cuda")


def checks(
    config: Config,
    ranks: int | None = None,
    *,
    local_ranks: LocalRanks,
    timeout: float = 600.0,
    around: Context = nullcontext,
) -> Iterator[CheckResult]:
    """Yield the rows of the certificate as soon as they are known. See `proof.checks` for the options."""
    with tempfile.TemporaryDirectory(prefix="megafp8-prove-") as folder:
        yield from rows(shrunk(config, ranks), Path(folder), local_ranks, timeout, around)


def rows(small: Small, folder: Path, local_ranks: LocalRanks, timeout: float, around: Context) -> Iterator[CheckResult]:
    """Run all checks of a small config on its device, first without FP8 and then with its recipe, and yield their rows.

    `folder` is an empty folder for files.
    """
    config = small.config
    assert config.spec.stem.vocab_size is not None
    samples = STEPS * config.training.global_batch_size
    config = write_data(config, folder / "data", config.spec.stem.vocab_size - SPECIAL_TOKENS, samples)
    plain = config.model_copy(update={"fp8": type(config.fp8)()})
    for subject in [plain] if config.fp8.recipe == "none" else [plain, config]:
        recipe = subject.fp8.recipe
        for row in _Comparison(subject, small.ranks, folder / recipe, local_ranks, timeout, around).rows():
            yield row
            if row.status == "FAILED":
                return


class _Comparison:
    """Checks of a config on `ranks` ranks against the results of one CPU rank."""

    def __init__(
        self, config: Config, ranks: int, folder: Path, processes: LocalRanks, timeout: float, around: Context
    ) -> None:
        self._config, self._ranks, self._folder = config, ranks, folder
        self._processes, self._timeout, self._around = processes, timeout, around
        self._start = time.monotonic()
        self._kind = "" if config.fp8.recipe == "none" else f", FP8 {config.fp8.recipe}"

    def _row(
        self, check: str, how: str, status: Status, difference: float | None = None, where: str = "", details: str = ""
    ) -> CheckResult:
        now = time.monotonic()
        seconds, self._start = now - self._start, now
        return CheckResult(
            check + ("" if not self._kind else ", FP8"), how, status, difference, where, seconds, details
        )

    def _failed(self, check: str, how: str, error: RanksFailed) -> CheckResult:
        return self._row(check, how, "FAILED", None, error.cause, str(error))

    def _within(
        self, check: str, how: str, bound: float, differences: Mapping[str, float], rounding: Mapping[str, float]
    ) -> CheckResult:
        """Return the row of a check with a bound.

        Each of `differences` (by name) may be at most `bound`, or `MARGIN` times the `rounding` of one CPU rank.
        """
        bounds = {name: max(bound, MARGIN * rounding.get(name, 0.0)) for name in differences}
        names = sorted(differences, key=lambda name: -differences[name] / bounds[name])
        beyond = [name for name in names if not differences[name] <= bounds[name]]
        where = ", ".join(beyond[:3]) + (f" and {len(beyond) - 3} more" if len(beyond) > 3 else "")
        status: Status = "DIFFERENT" if beyond else "within"
        how = f"{how}, to {bound:g}"
        wider = [name for name in names if bounds[name] > bound]
        if wider:
            most = max(bounds[name] for name in wider)
            how += f", of {len(wider)} of {len(names)} to {MARGIN:g} times their rounding on a CPU, up to {most:.2g}"
        return self._row(check, how, status, differences[names[0]], where or names[0])

    def rows(self) -> Iterator[CheckResult]:
        """Run all checks and yield each row when it is known."""
        config, folder, precision = self._config, self._folder, self._config.training.precision
        rounded, bounds = f"{precision}{self._kind}", bounds_of(config)
        threads = min(16, len(os.sched_getaffinity(0))) if config.device == "cuda" else 1
        run = partial(self._processes.run, timeout=self._timeout)
        how = f"one CPU rank in float64, and in {rounded}, with the same weights"
        try:
            (expected,) = run(reference, (one_rank(in_float64(config)), folder, precision, threads), 1)
            (on_cpu,) = run(compared, (one_rank(on_cpus(config)), folder, nullcontext, threads), 1)
        except RanksFailed as error:
            yield self._failed("reference", how, error)
            return
        yield self._row("reference", how, "equal", None, f"{STEPS} steps")
        how = f"in {rounded} on {self._ranks} {'rank' if self._ranks == 1 else 'ranks'}"
        try:
            results: list[GpuRunResult] = run(compared, (config, folder, self._around), self._ranks)
        except RanksFailed as error:
            yield self._failed(config.device, how, error)
            return
        memory = max(x.memory for x in results)
        how += f"; {results[0].graphs}"
        yield self._row(config.device, how, "equal", None, f"{memory:.1f} GiB" if memory else "")
        names = [*read_tensors(folder / INITIAL)]
        how = f"rounded to {precision}, root mean square of a tensor"
        initial, cast = (relative([x.initial for x in records], names) for records in (results, [on_cpu]))
        yield self._within("initial weights", how, SAME, initial, cast)
        yield self._within("losses", f"{STEPS} steps, and norms", bounds.losses, _steps(results, expected),
                           _steps([on_cpu] * self._ranks, expected))  # fmt: skip
        noise = noise_of(x.gradients for x in results)
        trained = [name for name in read_tensors(folder / GRADIENTS) if name not in noise]
        without = (
            f"; without {', '.join(sorted(noise))}, with gradients that are zero except for rounding" if noise else ""
        )
        how = f"of the first step, root mean square of a tensor{without}"
        gradients, cast = (relative([x.gradients for x in records], trained) for records in (results, [on_cpu]))
        yield self._within("gradients", how, bounds.gradients, gradients, cast)
        how = f"after {STEPS} steps, root mean square, relative to the change of a tensor"
        names = [f"model.{name}" for name in trained]
        change, cast = (relative([x.state for x in records], names) for records in (results, [on_cpu]))
        yield self._within("weights", how, bounds.weights, change, cast)


def _steps(found: Sequence[GpuRunResult], expected: Sequence[Step]) -> dict[str, float]:
    """Return the relative differences of the losses and norms of all ranks, by name."""
    return {
        f"{name} {number} of rank {rank}": (abs(a - b) / abs(b) if b else abs(a)) if math.isfinite(a) else math.inf
        for number, step in enumerate(expected)
        for rank, record in enumerate(found)
        for name, a, b in zip(("loss", "further loss", "norm"), record.steps[number], step, strict=True)
    }
