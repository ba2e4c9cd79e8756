"""Attention in bf16 against FP8, on one GPU: time and error of each packaged kernel.

    pip install nvidia-cudnn-frontend==1.19.1 fa3-fwd==0.0.3     # what is missing is a line of the output
    python -m tools.bench_attention                              # a Llama-3-8B layer: 32 heads, 8 groups of 128

Times are of kernels alone, medians over rounds in which all take turns; at short lengths the host's work shows. "pair"
is the backward pass with its forward pass, against bf16's. What FP8 needs besides is timed separately, as kernels of
their own: casts of q, k, v and of the output's gradient, and what comes out in FP8 made bf16 again. Some of them would
ride on kernels that run anyway, so a pair without them is the most that FP8 can win, and with them the least.

TFLOP/s count two products of s² · d a head for the forward pass and five for the backward pass, half of each because of
the causal mask.

Errors are |x - x'| / |x'| against float64 attention of the same bf16 numbers, standard normal ones and ones with
outliers; those of `plain` are what rounding to FP8 alone costs (`tools.plain_attention`).

Shapes: s sequence, a query heads, g key-value heads, d head width; batch 1.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megafp8.fp8.formats import E4M3, E5M2, Format
from megafp8.fp8.kernels import quantize
from megafp8.fp8.sources import Plain
from tools.attention_variants import BASELINE, Backward, Forward, Libraries, backwards, forwards
from tools.plain_attention import Problem, Rounding, attention, difference, random_problem

ROUNDS = 3
ROUNDINGS: list[tuple[Format, Format]] = [(E5M2, E5M2), (E5M2, E4M3), (E4M3, E4M3)]  # of do; of dq, dk, dv


@dataclass
class Row:
    """A pass: what runs it, what came of it; `note` says why it has no figures, or what else is worth a word."""

    name: str
    before: str = ""  # the forward pass, for a backward pass
    run: Callable[[], object] | None = None
    samples_ms: list[float] = field(default_factory=list)
    errors: dict[str, float] = field(default_factory=dict)
    note: str = ""

    @property
    def label(self) -> str:
        return f"{self.before} > {self.name}" if self.before else self.name

    @property
    def ms(self) -> float | None:
        return statistics.median(self.samples_ms) if self.samples_ms else None


def tflop(s: int, heads: int, width: int, products: int) -> float:
    """Of `products` causal products of a head's `[s, d]` and `[s, s]`."""
    return products * 2 * s * s * width * heads / 2 / 1e12


# --- measuring -------------------------------------------------------------------------------------------------------


@contextmanager
def guarded(row: Row) -> Iterator[None]:
    """What goes wrong becomes the row's note, and the end of its traceback is printed; the others go on."""
    try:
        yield
    except ModuleNotFoundError as error:
        row.note = str(error)
    except Exception as error:
        row.run = None
        row.note = f"{type(error).__name__}: {error}".replace("\n", " ")[:300]
        lines = "".join(traceback.format_exception(error)).splitlines()[-8:]
        print("\n".join([f"{row.label} failed:", *(f"    {line[:300]}" for line in lines)]), flush=True)


def milliseconds(run: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        from triton.testing import do_bench

        return float(do_bench(run, warmup=10, rep=40, return_mode="median"))
    start = time.perf_counter()
    run()
    return (time.perf_counter() - start) * 1e3


def prepare(problem: Problem, libraries: Libraries) -> list[Row]:
    """A row for each variant, run once and compared with float64. What needs no library comes first: a kernel that
    breaks the device's context breaks all that follow."""
    exact = attention(problem)
    rounded = [plain(problem, exact, *formats) for formats in ROUNDINGS]
    rows, ready = [], {}
    for name, build in forwards().items():
        row = Row(name)
        rows.append(row)
        with guarded(row):
            forward = build(problem, libraries)
            note_forward(row, forward, exact)
            ready[name] = forward
    for before, name, build_backward in backwards():
        row = Row(name, before)
        rows.append(row)
        if before not in ready:
            row.note = "no forward pass"
            continue
        with guarded(row):
            note_backward(row, build_backward(ready[before], libraries), exact)
    return rows + rounded


def note_forward(row: Row, forward: Forward, exact: dict[str, Tensor]) -> None:
    row.errors["o"] = difference(forward.output.values(), exact["o"])
    row.run, row.note = forward.run, forward.note


def note_backward(row: Row, backward: Backward, exact: dict[str, Tensor]) -> None:
    row.errors = {name: difference(x, exact[name]) for name, x in backward.gradients().items()}
    row.run, row.note = backward.run, backward.note


def plain(problem: Problem, exact: dict[str, Tensor], do: Format, grads: Format) -> Row:
    found = attention(problem, Rounding(E4M3, do, grads))
    return Row(
        f"{do.name}/{grads.name}", "plain", errors={name: difference(x, exact[name]) for name, x in found.items()}
    )


def casts(problem: Problem) -> list[Row]:
    """The engine's own casts, with a known factor; back to bf16 by torch, without one, which moves the same bytes."""
    one, noted = (torch.ones((), device=problem.q_sbad.device) for _ in range(2))

    def encode(xs: tuple[Tensor, ...], fmt: Format) -> Callable[[], object]:
        sources = [Plain(x.flatten(2).flatten(0, 1)) for x in xs]
        return lambda: [
            quantize.cast_tensor(source, one, one, fmt, rows=True, columns=False, newest_amax=noted)
            for source in sources
        ]

    def widen(xs: tuple[Tensor, ...], fmt: Format) -> Callable[[], object]:
        codes = [x.to(fmt.dtype) for x in xs]
        return lambda: [x.to(torch.bfloat16) for x in codes]

    q, k, v, do = problem.q_sbad, problem.k_sbgd, problem.v_sbgd, problem.do_sbad
    return [
        Row("q, k, v to e4m3", "cast", encode((q, k, v), E4M3)),
        Row("do to e5m2", "cast", encode((do,), E5M2)),
        Row("o to bf16", "cast", widen((q,), E4M3)),
        Row("dq, dk, dv to bf16", "cast", widen((q, k, v), E5M2)),
    ]


def time_in_turn(rows: list[Row], device: torch.device) -> None:
    for _ in range(ROUNDS):
        for row in rows:
            with guarded(row):
                if row.run is not None:
                    row.samples_ms.append(milliseconds(row.run, device))


# --- output ----------------------------------------------------------------------------------------------------------


def table(rows: list[Row], s: int, heads: int, width: int) -> list[str]:
    """A line for each row: its time and rate, the time of the pair and the ratio to bf16's, the errors, the note."""
    forward_ms = {row.name: row.ms for row in rows if not row.before}
    own = next((row.ms for row in rows if (row.before, row.name) == (BASELINE, BASELINE)), None)
    bf16_pair = add(forward_ms.get(BASELINE), own)
    lines = [
        f"{'pass':<36}{'ms':>8}{'TFLOP/s':>9}{'pair ms':>9}{'ratio':>7}{'o':>10}{'dq':>10}{'dk':>10}{'dv':>10}  note"
    ]
    for row in rows:
        is_pass = row.before not in ("cast", "plain")
        rate = tflop(s, heads, width, 5 if row.before else 2) / row.ms * 1e3 if row.ms and is_pass else None
        pair = add(forward_ms.get(row.before), row.ms)
        ratio = bf16_pair / pair if pair and bf16_pair else None
        shown = [cell(row.ms, 8, ".3f"), cell(rate, 9, ".0f"), cell(pair, 9, ".3f"), cell(ratio, 7, ".2f")]
        errors = [cell(row.errors.get(name), 10, ".2e") for name in ("o", "dq", "dk", "dv")]
        lines.append(f"{row.label:<36}{''.join(shown + errors)}  {row.note}".rstrip())
    return lines


def add(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a + b


def cell(value: float | None, width: int, form: str) -> str:
    return f"{'' if value is None else format(value, form):>{width}}"


def report(s: int, outliers: bool, arguments: argparse.Namespace, libraries: Libraries) -> None:
    """Prepare, time and print one length; with outliers only the errors are of interest."""
    device = torch.device(arguments.device)
    heads, groups, width = arguments.heads, arguments.groups, arguments.width
    start = time.perf_counter()
    problem = random_problem(s, heads, groups, width, outliers, device)
    cast_rows = casts(problem) if device.type == "cuda" and not outliers else []
    rows = prepare(problem, libraries) + cast_rows
    if not outliers:
        time_in_turn(rows, device)
    data = "with outliers" if outliers else "standard normal"
    print(f"\ns = {s}, {heads} heads in {groups} groups of {width}, {data} ({time.perf_counter() - start:.0f} s)")
    print("\n".join(table(rows, s, heads, width)), flush=True)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", default="8192,2048,4096", help="the first is also run with outliers")
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"], help="cpu: a try, only bf16 runs there")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        print("error: --device: torch sees no CUDA device here; cpu would work", file=sys.stderr)
        return 2
    if options.heads % options.groups:
        print(f"error: --groups: {options.groups} does not divide {options.heads} heads", file=sys.stderr)
        return 2
    libraries = Libraries()
    device = torch.cuda.get_device_name() if options.device == "cuda" else "cpu"
    print(f"{device}, torch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}")
    print("\n".join(libraries.versions()), flush=True)
    lengths = [int(s) for s in options.lengths.split(",")]
    for s, outliers in [(lengths[0], False), (lengths[0], True), *((s, False) for s in lengths[1:])]:
        report(s, outliers, options, libraries)
    return 0


if __name__ == "__main__":
    sys.exit(main())
