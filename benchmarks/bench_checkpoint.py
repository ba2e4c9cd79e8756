"""How long saving takes, and for how long training stands still: in the background, at once, and torch.save.

    python benchmarks/bench_checkpoint.py --folder /data/bench --parameters 1.1e9
    python benchmarks/bench_checkpoint.py --folder /lustre/bench --parameters 8e9 --full --device cuda

The tensors are synthetic, shaped like those of a Llama, and saved by the functions that training calls, in one process.
Without --full they are bf16 weights, 2 bytes a parameter; with it fp32 masters and moments too, 14 bytes. Saves in the
background take as much host memory again. A "step" is matrix products for --step-seconds, then the moment at which the
optimizer would change the weights, which waits for what is not yet copied. Disk: the same bytes, written as they are.

Everything is flushed to disk before a clock is stopped. What was written is removed; the folder must not hold a run.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from megafp8.checkpoint import BackgroundSaver, Destination, Saved, load, save

HIDDEN, FFN = 2048, 5632
BLOCK = {"q": (HIDDEN, HIDDEN), "k": (512, HIDDEN), "v": (512, HIDDEN), "proj": (HIDDEN, HIDDEN)}
BLOCK |= {"gate": (FFN, HIDDEN), "up": (FFN, HIDDEN), "down": (HIDDEN, FFN), "norm": (HIDDEN,)}


@dataclass(frozen=True)
class Row:
    """One way to save: seconds training stood still, seconds until all was on disk, of `bytes`."""

    how: str
    stalled: float
    total: float
    bytes: int
    slowdown: float | None = None
    """By how much steps took longer while the save was under way, stalls not counted."""


def make_state(parameters: float, full: bool, device: torch.device) -> dict[str, Tensor]:
    """Tensors of at least so many parameters, by global name, with random values."""
    kinds = {"model": torch.bfloat16}
    if full:
        kinds |= {f"optimizer.{key}": torch.float32 for key in ("master", "exp_avg", "exp_avg_sq")}
    state: dict[str, Tensor] = {}
    made = layer = 0
    while made < parameters:
        for name, shape in BLOCK.items():
            for kind, dtype in kinds.items():
                tensor = torch.empty(shape, dtype=dtype, device=device).normal_()
                state[f"{kind}.layers.{layer}.{name}"] = tensor
            made += tensor.numel()
        layer += 1
    return state


def steps(seconds: float, device: torch.device, before_update: Callable[[], None]) -> float:
    """Products for `seconds`, then the update's wait; products a second, without the wait."""
    a = torch.randn(512, 512, device=device)
    start, count = time.perf_counter(), 0
    while time.perf_counter() - start < seconds:
        a = (a @ a).clamp_(-1, 1)
        count += 1
        if device.type == "cuda":
            torch.cuda.synchronize()
    rate = count / (time.perf_counter() - start)
    before_update()
    return rate


def timed(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def write_plainly(file: Path, state: dict[str, Tensor]) -> None:
    """The bytes of `state`, and nothing else."""
    with file.open("wb", buffering=0) as stream:
        for tensor in state.values():
            view = memoryview(tensor.cpu().view(-1).view(torch.uint8).numpy())
            while len(view):
                view = view[stream.write(view) :]
        os.fsync(stream.fileno())


def torch_save(file: Path, state: dict[str, Tensor]) -> None:
    """What a script does, and the flush that it forgets."""
    with file.open("wb") as stream:
        torch.save(state, stream)
        stream.flush()
        os.fsync(stream.fileno())


def in_the_background(folder: Path, state: dict[str, Tensor], size: int, seconds: float, saves: int) -> list[Row]:
    """Rows of saves while steps go on."""
    device = next(iter(state.values())).device
    undisturbed = steps(4 * seconds, device, lambda: None)
    reports: list[Saved] = []
    rates: list[list[float]] = []
    with BackgroundSaver(Destination(folder, None, keep_last=1), device, reports.append) as saver:
        for step in range(1, saves + 1):
            saver.save(step, state, {})
            rates.append([])
            while len(reports) < step:
                rates[-1].append(steps(seconds, device, saver.wait_copied))
                saver.poll()
    names = [f"in the background, {'first' if i == 0 else 'again'}" for i in range(saves)]
    return [
        Row(name, saved.stalled_seconds, saved.total_seconds, size, undisturbed * len(found) / sum(found) - 1)
        for name, saved, found in zip(names, reports, rates)
    ]


def measure(folder: Path, state: dict[str, Tensor], seconds: float, saves: int) -> list[Row]:
    """All rows once; removes what it wrote."""
    os.sync()
    size = sum(tensor.nbytes for tensor in state.values())
    rows = []
    for how, write in (("the disk", write_plainly), ("torch.save", torch_save)):
        spent = timed(lambda: write(folder / "file", state))  # noqa: B023
        rows.append(Row(how, spent, spent, size))
        (folder / "file").unlink()
    spent = timed(lambda: save(folder / "at-once", 1, state, {}))
    rows.append(Row("at once", spent, spent, size))
    path = folder / "at-once" / "step_00000001"
    for verify in (False, True):
        spent = timed(lambda: load(path, state, verify=verify))  # noqa: B023
        rows.append(Row(f"load{', verified' if verify else ''}", spent, spent, size))
    shutil.rmtree(folder / "at-once")
    rows += in_the_background(folder / "background", state, size, seconds, saves)
    shutil.rmtree(folder / "background")
    return rows


def table(rounds: list[list[Row]]) -> str:
    """The rows for people: medians, and of the totals the range."""
    lines = [f"{'':26} {'stalled s':>9} {'in all s':>9} {'(range)':>14} {'MB/s':>6}  steps meanwhile"]
    for rows in zip(*rounds):
        stalled, total = (statistics.median(getattr(row, key) for row in rows) for key in ("stalled", "total"))
        slowdowns = [row.slowdown for row in rows if row.slowdown is not None]
        slower = f"{statistics.median(slowdowns):+.0%} time" if slowdowns else ""
        span = f"({min(row.total for row in rows):.2f}-{max(row.total for row in rows):.2f})"
        rate = rows[0].bytes / total / 1e6
        lines.append(f"{rows[0].how:26} {stalled:9.2f} {total:9.2f} {span:>14} {rate:6.0f}  {slower}".rstrip())
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="an empty or new folder on the disk in question")
    parser.add_argument("--parameters", type=float, default=1.1e9)
    parser.add_argument("--full", action="store_true", help="with fp32 masters and moments")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--step-seconds", type=float, default=2.0)
    parser.add_argument("--saves", type=int, default=2, help="in the background; the first makes the host memory")
    parser.add_argument("--rounds", type=int, default=3, help="of everything; the table has medians")
    parser.add_argument("--json", type=Path, help="write the rows of each round here too")
    arguments = parser.parse_args(argv)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    if any(arguments.folder.iterdir()):
        print(f"error: {arguments.folder} is not empty", file=sys.stderr)
        return 2
    torch.set_num_threads(1)
    state = make_state(arguments.parameters, arguments.full, torch.device(arguments.device))
    size = sum(tensor.nbytes for tensor in state.values())
    parameters = sum(tensor.numel() for name, tensor in state.items() if name.startswith("model."))
    print(f"{parameters / 1e9:.2f}B parameters, {len(state)} tensors, {size / 1e9:.2f} GB, torch {torch.__version__}")
    rounds = []
    for _ in range(arguments.rounds):
        rounds.append(measure(arguments.folder, state, arguments.step_seconds, arguments.saves))
    print(table(rounds))
    print(f"peak memory of the process: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB")
    if arguments.json:
        arguments.json.write_text(
            json.dumps([[asdict(row) for row in rows] for rows in rounds]) + "\n", encoding="utf-8"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
