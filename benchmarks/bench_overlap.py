"""What hiding tensor parallelism's communication gains: the linear layers of a block on real ranks, every way of
exchanging tokens (`parallel.overlap_tensor`) against none at all.

    torchrun --nproc-per-node 2 -m benchmarks.bench_overlap
    torchrun --nproc-per-node 4 -m benchmarks.bench_overlap --shapes llama3-70b

Two blocks run forward and backward under tensor and sequence parallelism over all ranks, with everything but attention
itself, which is left out. "silent" does all of that and sends nothing: tokens of others are this rank's own, shares of
others are forgotten. What a mode takes longer is its exposed communication.

Every mode starts from the same weights, scales and input. First it is checked: run twice it must give the same bits
(copies that race would not), and outputs and gradients must be those of `none`, to the last bit or about: shares are
added in another order. What that may come to is measured, not guessed: `none` runs again with its sums off by a unit in
the last place. In FP8 that is much, for a value that crosses a rounding boundary moves by a sixteenth of itself. WRONG
marks more than twice as much.

A mode that fails says why and the others go on. What hangs is ended by a watchdog, with the tables so far printed.

Shapes: s sequence, b micro-batch (one sample), h hidden; t ranks.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import statistics
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from benchmarks.clock import milliseconds, now
from megafp8.config import Config
from megafp8.data_parallel.grad_buffer import GradBuffer
from megafp8.distributed.collectives import DONE, all_reduce
from megafp8.distributed.tp_overlap import AllGatherHandle, Collective, P2PRing, Product, ReduceHandle, TPOverlap
from megafp8.fp8 import describe_path
from megafp8.models.context import BuildContext
from megafp8.models.gpt import GPTStage, LayerInputs
from megafp8.models.rotary import inverse_frequencies, rotary_table
from megafp8.parallel_state import (
    ParallelState,
    destroy_model_parallel,
    initialize_distributed,
    initialize_model_parallel,
)
from megafp8.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megafp8.tensor_parallel.random import initialize_parameters
from megafp8.training.fp8_config import build_fp8
from megafp8.training.overlap import sum_partials_on

BLOCKS, WARM_UP, STEPS = 2, 4, 4
ALLOWED = 2.0  # times what sums that are off by a unit in the last place change


class Shape(NamedTuple):
    hidden_size: int
    ffn_hidden_size: int
    heads: int
    groups: int
    seq_length: int


SHAPES = {
    "llama3-8b": Shape(4096, 14336, 32, 8, 8192),
    "llama3-70b": Shape(8192, 28672, 64, 8, 8192),
    "tiny": Shape(64, 128, 4, 4, 32),
}


class Silent:
    """The exchange of one rank that plays all of `group`. What it gathered for a shape once it gathers again."""

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


class Nudged:
    """`none` with sums off by a unit in the last place, up or down at random."""

    def __init__(self, group: ProcessGroup, device: torch.device) -> None:
        self.group = group
        self._at_once = Collective(group)
        self._generator = torch.Generator(device).manual_seed(group.rank())

    def gather(self, own: Sequence[Tensor]) -> AllGatherHandle:
        return self._at_once.gather(own)

    def sum(self, product: Product) -> ReduceHandle:
        summed = self._at_once.sum(product)
        return summed._replace(result=lambda: self._nudged(summed.result()))

    def _nudged(self, x: Tensor) -> Tensor:
        up = torch.rand(x.shape, generator=self._generator, device=x.device) < 0.5
        step = torch.finfo(x.dtype).eps
        return (x.double() * torch.where(up, 1 + step, 1 - step)).to(x.dtype)


def _symmetric(group: ProcessGroup, device: torch.device) -> TPOverlap:
    from megafp8.distributed.tp_symmetric import SymmetricMemory

    return SymmetricMemory(group, device, sum_partials_on(device))


MODES: dict[str, Callable[[ProcessGroup, torch.device], TPOverlap]] = {
    "silent": lambda group, _: Silent(group),
    "none": lambda group, _: Collective(group),
    "chunked": lambda group, device: P2PRing(group, sum_partials=sum_partials_on(device)),
    "symmetric": _symmetric,
}


@dataclass
class Result:
    """A row of the table. `note` says why it has no figures, or how it differs from `none`."""

    mode: str
    note: str = ""
    forward_ms: list[float] = field(default_factory=list)
    backward_ms: list[float] = field(default_factory=list)

    @property
    def ms(self) -> tuple[float, float]:
        """Forward and backward of a layer."""
        return statistics.median(self.forward_ms) / BLOCKS, statistics.median(self.backward_ms) / BLOCKS


# --- what is run -----------------------------------------------------------------------------------------------------


class Blocks:
    """Blocks of a model of `shape` without their attention, on this rank, and one input and output gradient."""

    def __init__(self, shape: Shape, recipe: str, parallel: ParallelState) -> None:
        device, t = parallel.device, parallel.tensor.size
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.config = Config.model_validate(
            {
                "name": "bench-overlap",
                "model": {
                    "num_layers": BLOCKS + 2,
                    "hidden_size": shape.hidden_size,
                    "ffn_hidden_size": shape.ffn_hidden_size,
                    "num_attention_heads": shape.heads,
                    "num_query_groups": shape.groups,
                },
                "fp8": {"recipe": recipe},
                "training": {"steps": 1, "seq_length": shape.seq_length, "global_batch_size": 1},
                "optimizer": {"learning_rate": 1.0},
                "data": {"train": ["none"]},
            }
        )
        self.manager = build_fp8(self.config, parallel)
        context = BuildContext(parallel.tensor.group, self.manager, dtype, device, sequence_parallel=True)
        self.stage = GPTStage(self.config.model, context, layers=range(1, BLOCKS + 1), positions=0)
        initialize_parameters(self.stage, 1)
        self.manager.materialize(device)
        self.gradients = GradBuffer(
            list(self.stage.parameters()), data_parallel_group=None, bucket_elements=2**25, device=device
        )
        model = self.config.model
        frequencies = inverse_frequencies(model.channels, model.rope_theta, None, device)
        rotary = rotary_table(torch.arange(shape.seq_length, device=device), frequencies, dtype)
        self.inputs = LayerInputs(rotary, lambda q, k, v: q)
        generator = torch.Generator(device).manual_seed(2 + parallel.tensor.rank)
        size = (shape.seq_length // t, 1, shape.hidden_size)
        self.x_sbh, self.dy_sbh = (torch.randn(size, generator=generator, device=device).to(dtype) for _ in range(2))

    def use(self, tp_overlap: TPOverlap) -> None:
        for module in self.stage.modules():
            if isinstance(module, (ColumnParallelLinear, RowParallelLinear)):
                module.tp_overlap = tp_overlap

    def run(self, between: Callable[[], None] = lambda: None) -> tuple[Tensor, Tensor]:
        """y and dx; `between` forward and backward."""
        x = self.x_sbh.detach().requires_grad_()
        x_sbh, branch_sbh = self.stage.run_blocks(x, self.inputs)
        assert branch_sbh is not None
        y = x_sbh + branch_sbh
        between()
        y.backward(self.dy_sbh)
        assert x.grad is not None
        return y.detach(), x.grad

    def results(self) -> list[Tensor]:
        """y, dx and all weights' gradients."""
        self.gradients.zero()
        return [*self.run(), self.gradients.flat.clone()]


def differences(found: Sequence[Tensor], expected: Sequence[Tensor]) -> list[float]:
    """Of each tensor's norm."""
    return [((a.float() - b.float()).norm() / b.float().norm()).item() for a, b in zip(found, expected)]


def compare(
    found: Sequence[Tensor], again: Sequence[Tensor], expected: Sequence[Tensor], allowed: Sequence[float]
) -> str:
    """What to say of a mode's results, of a second run's and of `none`'s; `allowed`: relative, of y, dx and dw."""
    if not all(torch.equal(a, b) for a, b in zip(found, again)):
        return "WRONG: two runs differ"
    if all(torch.equal(a, b) for a, b in zip(found, expected)):
        return "same bits"
    values = differences(found, expected)
    parts = zip(("y", "dx", "dw"), values, allowed)
    text = ", ".join(f"{name} {value:.1e} of {most:.1e}" for name, value, most in parts)
    fine = all(value <= most for value, most in zip(values, allowed))  # false of a NaN
    return text if fine else f"WRONG: {text}"


def time_steps(blocks: Blocks, result: Result, device: torch.device) -> None:
    blocks.run()  # what the mode before left in caches is not this one's
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


def measure(
    blocks: Blocks, modes: list[str], rounds: int, parallel: ParallelState, say: Callable[..., None]
) -> list[Result]:
    """Check every mode, then time those that passed in turn."""
    group, device = parallel.tensor.group, parallel.device
    blocks.use(Collective(group))
    for _ in range(WARM_UP):  # until delayed scaling knows its scales, and GEMMs their algorithms
        blocks.run()
        blocks.manager.end_step()
    expected = blocks.results()
    blocks.use(Nudged(group, device))
    allowed = [ALLOWED * value for value in differences(blocks.results(), expected)]
    results, exchanges = [Result(mode) for mode in modes], {}
    for result in results:
        say(f"  checking {result.mode}")
        try:
            exchanges[result.mode] = tp_overlap = MODES[result.mode](group, device)
            blocks.use(tp_overlap)
            blocks.run()
            if result.mode != "silent":
                result.note = compare(blocks.results(), blocks.results(), expected, allowed)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        except Exception as error:
            traceback.print_exc()
            exchanges.pop(result.mode, None)
            result.note = f"failed: {type(error).__name__}: {error}".splitlines()[0]
        if not _all_agree(result.mode in exchanges, parallel):
            exchanges.pop(result.mode, None)
            result.note = result.note or "failed on another rank"
    for _ in range(rounds):
        for result in results:
            if result.mode in exchanges:
                blocks.use(exchanges[result.mode])
                time_steps(blocks, result, device)
    return results


def _all_agree(fine: bool, parallel: ParallelState) -> bool:
    return bool(all_reduce(torch.tensor(int(fine), device=parallel.device), parallel.tensor.group, "min").item())


# --- report ----------------------------------------------------------------------------------------------------------


def table(results: list[Result]) -> list[str]:
    """Of one shape and precision; the last line is the verdict."""
    lines = [f"{'':<10}{'forward':>9}{'backward':>9}{'ms/layer':>9}{'exposed':>9}{'hidden':>8}  against none"]
    known = {result.mode: sum(result.ms) for result in results if result.forward_ms}
    silent, none = known.get("silent"), known.get("none")
    for result in results:
        if result.mode not in known:
            lines.append(f"{result.mode:<10}  {result.note}")
            continue
        forward, backward = result.ms
        cells = f"{result.mode:<10}{forward:>9.3f}{backward:>9.3f}{forward + backward:>9.3f}"
        if silent is not None and result.mode != "silent":
            exposed = forward + backward - silent
            cells += f"{exposed:>9.3f}"
            if none is not None and none > silent:
                cells += f"{1 - exposed / (none - silent):>8.0%}"
        lines.append(f"{cells}  {result.note}".rstrip())
    right = {
        result.mode: known[result.mode] for result in results if result.mode in known and "WRONG" not in result.note
    }
    right.pop("silent", None)
    if none is not None and right:
        best = min(right, key=right.__getitem__)
        lines.append(f"verdict: {best}, {none / right[best]:.3f} times as fast as none")
    return lines


class Watchdog:
    """Ends the process once `seconds` are over, saying where it stood."""

    def __init__(self, seconds: float, say: Callable[..., None]) -> None:
        self.doing = "starting"
        self._timer = threading.Timer(seconds, self._end, (seconds, say))
        self._timer.daemon = True
        self._timer.start()

    def _end(self, seconds: float, say: Callable[..., None]) -> None:
        say(f"stopped after {seconds:.0f} s, at {self.doing}")
        faulthandler.dump_traceback(file=sys.stderr)
        sys.stdout.flush()
        os._exit(3)

    def stop(self) -> None:
        self._timer.cancel()


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="llama3-8b,llama3-70b", help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--recipes", default="none,delayed", help="of fp8.recipe's; none is bf16")
    parser.add_argument("--modes", default=",".join(MODES), help=f"of {', '.join(MODES)}")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=120.0, help="after which the watchdog ends it all")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    arguments = parser.parse_args(argv)
    for option, known in (("shapes", SHAPES), ("modes", MODES)):
        values = getattr(arguments, option).split(",")
        if unknown := [value for value in values if value not in known]:
            parser.error(f"--{option}: {unknown[0]} is none of {', '.join(known)}")
        setattr(arguments, option, values)
    arguments.recipes = arguments.recipes.split(",")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    is_main = os.environ.get("RANK", "0") == "0"

    def say(text: str, always: bool = False) -> None:
        if is_main or always:
            print(text, flush=True)

    watchdog = Watchdog(arguments.seconds, say)
    device = initialize_distributed(arguments.device, timeout_seconds=arguments.seconds)
    parallel = initialize_model_parallel(torch.distributed.get_world_size(), device=device)
    t = parallel.tensor.size
    say(f"{torch.cuda.get_device_name(device) if device.type == 'cuda' else 'CPU'} × {t}, torch {torch.__version__}")
    wrong = False
    for name in arguments.shapes:
        for recipe in arguments.recipes:
            precision = "in high precision" if recipe == "none" else f"fp8 {recipe}"
            title = f"{name}, {precision}, tensor {t}, sequence-parallel, s = {SHAPES[name].seq_length}"
            say(f"\n{title}")
            watchdog.doing = title
            try:
                blocks = Blocks(SHAPES[name], recipe, parallel)
                say(f"  {describe_path(blocks.manager.recipe, device, 'auto')}")
                results = measure(blocks, arguments.modes, arguments.rounds, parallel, say)
            except Exception as error:
                traceback.print_exc()
                say(f"failed: {type(error).__name__}: {error}")
                wrong = True
                continue
            for line in table(results):
                say(line)
            wrong = wrong or any("WRONG" in result.note or "failed" in result.note for result in results)
            del blocks
            if device.type == "cuda":
                torch.cuda.empty_cache()
    watchdog.stop()
    destroy_model_parallel()
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
