"""Time the overlap of tensor-parallel communication with GEMMs: every mode of `parallel.overlap_tensor`.

    torchrun --nproc-per-node 2 -m benchmarks.bench_overlap torchrun --nproc-per-node 4 -m benchmarks.bench_overlap
    --shapes llama3-70b

Two blocks run forward and backward under tensor and sequence parallelism over all ranks, without their attention core.
"silent" does the same and sends nothing: it takes other ranks' tokens to be this rank's own, and leaves out their part
of sums. The time of a mode above it is its exposed communication.

Every mode starts from the same weights, scales and input. Before it is timed, its outputs and gradients are checked:
two runs must give the same bits (racing copies would not), and those of `none` up to rounding, since other orders of
summation are allowed. How much rounding may change is measured: `none` runs once more with its sums off by one unit in
the last place. In FP8 that is much, because a value that crosses a rounding boundary changes by a sixteenth. More than
twice that difference is marked WRONG.

A mode that fails is reported and the others go on. After `--seconds` the process ends with a traceback of every thread.

Shapes: s sequence, b micro-batch (one sample), h hidden; t ranks.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import statistics
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from benchmarks.blocks import SHAPES, Shape, build_stage
from benchmarks.common import Table, machine, milliseconds, names, new_parser, now, release, write_json
from megafp8.data_parallel.grad_buffer import GradBuffer
from megafp8.distributed.collectives import DONE, all_reduce
from megafp8.distributed.tp_overlap import AllGatherHandle, Collective, Product, ReduceHandle, TPOverlap
from megafp8.fp8 import describe_path
from megafp8.linear.quantized_gather import TPComm
from megafp8.models.attention import AttentionInputs
from megafp8.models.mixer import LayerInputs, NoInputs
from megafp8.models.rotary import inverse_frequencies, rotary_table
from megafp8.numerics.attention_scores import PLAIN
from megafp8.parallel_state import (
    ParallelState,
    destroy_model_parallel,
    initialize_distributed,
    initialize_model_parallel,
)
from megafp8.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megafp8.tensor_parallel.random import initialize_parameters
from megafp8.training.overlap import sum_partials_on

BLOCKS, WARM_UP, STEPS = 2, 4, 4
TOLERANCE = 2.0  # times the change by sums that are off by one unit in the last place


class Silent:
    """Communicates nothing. Gathers this rank's tensors in place of all, once for each shape, and reduces nothing."""

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group
        self._gathered: dict[Any, Tensor] = {}

    def gather(self, own: Sequence[Tensor]) -> AllGatherHandle:
        whole = []
        for x in own:
            key = (x.shape, x.dtype)
            if key not in self._gathered:
                t = self.group.size()
                self._gathered[key] = torch.cat([x.view(torch.uint8)] * t).view(x.dtype)
            whole.append(self._gathered[key])
        return AllGatherHandle(whole, [(slice(0, whole[0].shape[0]), DONE.wait)])

    def sum(self, product: Product) -> ReduceHandle:
        y_mn = product.compute()
        own = y_mn[: y_mn.shape[0] // self.group.size()]
        return ReduceHandle(DONE, lambda: own)


class Perturbed:
    """`none` with sums off by one unit in the last place, up or down at random."""

    def __init__(self, group: ProcessGroup, device: torch.device) -> None:
        self.group = group
        self._exact = Collective(group)
        self._generator = torch.Generator(device).manual_seed(group.rank())

    def gather(self, own: Sequence[Tensor]) -> AllGatherHandle:
        return self._exact.gather(own)

    def sum(self, product: Product) -> ReduceHandle:
        summed = self._exact.sum(product)
        return summed._replace(result=lambda: self._perturbed(summed.result()))

    def _perturbed(self, x: Tensor) -> Tensor:
        up = torch.rand(x.shape, generator=self._generator, device=x.device) < 0.5
        step = torch.finfo(x.dtype).eps
        return (x.double() * torch.where(up, 1 + step, 1 - step)).to(x.dtype)


def _symmetric(group: ProcessGroup, device: torch.device) -> TPOverlap:
    from megafp8.distributed.tp_symmetric import SymmetricMemory

    return SymmetricMemory(group, device, sum_partials_on(device))


MODES: dict[str, Callable[[ProcessGroup, torch.device], TPOverlap]] = {
    "silent": lambda group, _: Silent(group),
    "none": lambda group, _: Collective(group),
    "symmetric": _symmetric,
}


@dataclass
class Result:
    """A row of the table. `note` says why it has no times, or how it differs from `none`."""

    mode: str
    note: str = ""
    forward_ms: list[float] = field(default_factory=list)
    backward_ms: list[float] = field(default_factory=list)

    @property
    def ms(self) -> tuple[float, float]:
        """Forward and backward of one block."""
        return statistics.median(self.forward_ms) / BLOCKS, statistics.median(self.backward_ms) / BLOCKS


# --- what is run -----------------------------------------------------------------------------------------------------


class NoAttention:
    """In the place of attention, which is not measured: gives back the queries."""

    @property
    def tensors(self) -> list[torch.Tensor]:
        return []

    def __call__(self, q_sbad: torch.Tensor, *_: object) -> torch.Tensor:
        return q_sbad


class Blocks:
    """Blocks of a model of `shape` without their attention core, on this rank, with one input and output gradient."""

    def __init__(self, shape: Shape, recipe: str, parallel: ParallelState) -> None:
        device, s = parallel.device, shape.seq_length
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        config, self.manager, self.stage = build_stage(shape, BLOCKS, s, parallel, dtype, recipe=recipe)
        initialize_parameters(self.stage, 1)
        self.manager.materialize(device)
        self.gradients = GradBuffer(
            list(self.stage.parameters()), data_parallel_group=None, bucket_elements=2**25, device=device
        )
        frequencies = inverse_frequencies(config.model.channels, config.model.rope_theta, None, device)
        rotary = rotary_table(torch.arange(s, device=device), frequencies, dtype)
        inputs = AttentionInputs(rotary, NoAttention(), PLAIN)
        blocks = [block.index for block in self.stage.all_blocks]
        self.inputs = LayerInputs(dict.fromkeys(blocks, inputs), dict.fromkeys(blocks, NoInputs()))
        generator = torch.Generator(device).manual_seed(2 + parallel.tensor.rank)
        size = (s // parallel.tensor.size, 1, shape.hidden_size)
        self.x_sbh, self.dy_sbh = (torch.randn(size, generator=generator, device=device).to(dtype) for _ in range(2))

    def use(self, tp_overlap: TPOverlap) -> None:
        for module in self.stage.modules():
            if isinstance(module, ColumnParallelLinear):
                module.comm = TPComm(input=tp_overlap)
            elif isinstance(module, RowParallelLinear):
                module.comm = TPComm(output=tp_overlap)

    def run(self, between: Callable[[], None] = lambda: None) -> tuple[Tensor, Tensor]:
        """y and dx; calls `between` between forward and backward."""
        x = self.x_sbh.detach().requires_grad_()
        x_sbh, branch_sbh = self.stage.run_blocks(x, self.inputs)
        assert branch_sbh is not None
        y = x_sbh + branch_sbh
        between()
        y.backward(self.dy_sbh)
        assert x.grad is not None
        return y.detach(), x.grad

    def results(self) -> list[Tensor]:
        """y, dx and the gradients of all weights."""
        self.gradients.clear()
        return [*self.run(), self.gradients.flat.clone()]


def differences(found: Sequence[Tensor], expected: Sequence[Tensor]) -> list[float]:
    """Relative difference of each tensor, by norms."""
    return [((a.float() - b.float()).norm() / b.float().norm()).item() for a, b in zip(found, expected)]


def compare(
    found: Sequence[Tensor], again: Sequence[Tensor], expected: Sequence[Tensor], allowed: Sequence[float]
) -> str:
    """Verdict on a mode's results and those of a second run, given `none`'s; `allowed`: relative, of y, dx and dw."""
    if not all(torch.equal(a, b) for a, b in zip(found, again)):
        return "WRONG: two runs differ"
    if all(torch.equal(a, b) for a, b in zip(found, expected)):
        return "same bits"
    values = differences(found, expected)
    parts = zip(("y", "dx", "dw"), values, allowed)
    text = ", ".join(f"{name} {value:.1e} of {most:.1e}" for name, value, most in parts)
    passed = all(value <= most for value, most in zip(values, allowed))  # False for NaN
    return text if passed else f"WRONG: {text}"


def time_steps(blocks: Blocks, result: Result, device: torch.device) -> None:
    blocks.run()  # not counted: caches are as the previous mode left them
    marks = []
    for _ in range(STEPS):
        between: list[Any] = []
        start = now(device)
        blocks.run(lambda between=between: between.append(now(device)))  # type: ignore[misc]
        marks.append((start, between[0], now(device)))
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    result.forward_ms += [milliseconds(start, middle) for start, middle, _ in marks]
    result.backward_ms += [milliseconds(middle, end) for _, middle, end in marks]


def check_mode(
    mode: str, blocks: Blocks, expected: list[Tensor], allowed: list[float], parallel: ParallelState
) -> tuple[TPOverlap | None, str]:
    """The mode's implementation, None if it fails on any rank, and a note on its results."""
    tp_overlap, note = None, ""
    try:
        tp_overlap = MODES[mode](parallel.tensor.group, parallel.device)
        blocks.use(tp_overlap)
        blocks.run()
        if mode != "silent":
            note = compare(blocks.results(), blocks.results(), expected, allowed)
        if parallel.device.type == "cuda":
            torch.cuda.synchronize(parallel.device)
    except Exception as error:
        traceback.print_exc()
        tp_overlap, note = None, f"failed: {type(error).__name__}: {error}".splitlines()[0]
    passed = torch.tensor(int(tp_overlap is not None), device=parallel.device)
    if not all_reduce(passed, parallel.tensor.group, "min").item():
        return None, note or "failed on another rank"
    return tp_overlap, note


def measure(blocks: Blocks, modes: list[str], rounds: int, parallel: ParallelState) -> list[Result]:
    """Check every mode, then time in turn those that ran."""
    group, device = parallel.tensor.group, parallel.device
    blocks.use(Collective(group))
    for _ in range(WARM_UP):  # until delayed scaling knows its scales, and GEMMs their algorithms
        blocks.run()
        blocks.manager.end_step()
    expected = blocks.results()
    blocks.use(Perturbed(group, device))
    allowed = [TOLERANCE * value for value in differences(blocks.results(), expected)]
    checked = {mode: check_mode(mode, blocks, expected, allowed, parallel) for mode in modes}
    results = {mode: Result(mode, note) for mode, (_, note) in checked.items()}
    for _ in range(rounds):
        for mode, (tp_overlap, _) in checked.items():
            if tp_overlap is not None:
                blocks.use(tp_overlap)
                time_steps(blocks, results[mode], device)
    return list(results.values())


# --- report ----------------------------------------------------------------------------------------------------------

COLUMNS = {"forward": ".3f", "backward": ".3f", "ms/layer": ".3f", "exposed": ".3f", "hidden": ".0%"}
TABLE = Table("mode", 10, COLUMNS)


def table(results: list[Result]) -> list[str]:
    """Of one shape and precision; "hidden" is the part of `none`'s exposed communication that a mode hides."""
    lines = [TABLE.heading()]
    known = {result.mode: sum(result.ms) for result in results if result.forward_ms}
    silent, none = known.get("silent"), known.get("none")
    for result in results:
        if result.mode not in known:
            lines.append(f"{result.mode:<10}  {result.note}")
            continue
        total, exposed, hidden = known[result.mode], None, None
        if silent is not None and result.mode != "silent":
            exposed = total - silent
            hidden = 1 - exposed / (none - silent) if none is not None and none > silent else None
        lines.append(TABLE.row(result.mode, *result.ms, total, exposed, hidden, note=result.note))
    right = [r.mode for r in results if r.mode in known and r.mode != "silent" and "WRONG" not in r.note]
    if none is not None and right:
        best = min(right, key=known.__getitem__)
        lines.append(f"fastest: {best}, {none / known[best]:.3f} times as fast as none")
    return lines


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = new_parser(__doc__)
    parser.add_argument("--shapes", default="llama3-8b,llama3-70b", help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--recipes", default="none,delayed", help="values of fp8.recipe; none is bf16")
    parser.add_argument("--modes", default=",".join(MODES), help=f"of {', '.join(MODES)}")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=120.0, help="until the process is ended")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    arguments = parser.parse_args(argv)
    try:
        arguments.shapes = names("--shapes", arguments.shapes, SHAPES)
        arguments.modes = names("--modes", arguments.modes, MODES)
    except ValueError as error:
        parser.error(str(error))
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    faulthandler.dump_traceback_later(arguments.seconds, exit=True, file=sys.__stderr__)
    log = print if os.environ.get("RANK", "0") == "0" else lambda *_, **__: None
    device = initialize_distributed(arguments.device, timeout_seconds=arguments.seconds)
    parallel = initialize_model_parallel(torch.distributed.get_world_size(), device=device)
    log(f"{machine(device)} × {parallel.tensor.size}, torch {torch.__version__}", flush=True)
    found: dict[str, list[Result]] = {}
    failed = False
    for name in arguments.shapes:
        for recipe in arguments.recipes.split(","):
            precision = "high precision" if recipe == "none" else f"fp8 {recipe}"
            title = f"{name}, {precision}, tensor {parallel.tensor.size}, s = {SHAPES[name].seq_length}"
            log(f"\n{title}", flush=True)
            try:
                blocks = Blocks(SHAPES[name], recipe, parallel)
                log(f"  {describe_path(blocks.manager.recipe, device, 'auto')}", flush=True)
                found[title] = measure(blocks, arguments.modes, arguments.rounds, parallel)
                log("\n".join(table(found[title])), flush=True)
            except Exception as error:
                traceback.print_exc()
                log(f"failed: {type(error).__name__}: {error}", flush=True)
                failed = True
            blocks = None
            release()
    faulthandler.cancel_dump_traceback_later()
    if parallel.rank == 0:
        write_json(arguments.json, {title: [asdict(result) for result in of] for title, of in found.items()})
    destroy_model_parallel()
    notes = [result.note for results in found.values() for result in results]
    return int(failed or any("WRONG" in note or "failed" in note for note in notes))


if __name__ == "__main__":
    sys.exit(main())
