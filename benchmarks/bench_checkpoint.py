"""Time to save a checkpoint, and for how long training stalls: in the background, synchronously, and by torch.save.

    python -m benchmarks.bench_checkpoint --folder /data/bench --parameters 1.1e9
    python -m benchmarks.bench_checkpoint --folder /lustre/bench --parameters 8e9 --full --device cuda

The tensors are synthetic, with the shapes of a Llama, and saved by the functions that training calls, in one process.
Without --full they are bf16 weights, 2 bytes per parameter; with it also fp32 masters and moments, 14 bytes. Background
saves need as much host memory again. A training step is simulated by matrix products for --step-seconds and the wait
before the optimizer changes the weights, for values that are not copied yet. "disk" writes the same bytes to one file.

Everything is flushed to disk before a clock is stopped. What was written is removed; the folder must not hold a run.
"""

from __future__ import annotations

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

from benchmarks.common import Table, new_parser, timed, write_json
from megafp8.checkpoint import BackgroundSaver, Destination, Saved, load, save

HIDDEN, FFN = 2048, 5632
BLOCK = {"q": (HIDDEN, HIDDEN), "k": (512, HIDDEN), "v": (512, HIDDEN), "proj": (HIDDEN, HIDDEN)}
BLOCK |= {"gate": (FFN, HIDDEN), "up": (FFN, HIDDEN), "down": (HIDDEN, FFN), "norm": (HIDDEN,)}


@dataclass(frozen=True)
class Row:
    """One way to save `bytes`: seconds that training stalled, and seconds until all was on disk.

    `slowdown`: by how much steps were slower during the save, stalls not counted.
    """

    method: str
    stalled: float
    total: float
    bytes: int
    slowdown: float | None = None


def make_state(parameters: float, full: bool, device: torch.device) -> dict[str, Tensor]:
    """Random tensors with at least `parameters` parameters, by global name."""
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
    """Matrix products for `seconds`, then `before_update`; products per second, without that wait."""
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


def write_bytes(file: Path, state: dict[str, Tensor]) -> None:
    """Write the bytes of `state` alone."""
    with file.open("wb", buffering=0) as stream:
        for tensor in state.values():
            view = memoryview(tensor.cpu().view(-1).view(torch.uint8).numpy())
            while len(view):
                view = view[stream.write(view) :]
        os.fsync(stream.fileno())


def torch_save(file: Path, state: dict[str, Tensor]) -> None:
    """torch.save, flushed to disk."""
    with file.open("wb") as stream:
        torch.save(state, stream)
        stream.flush()
        os.fsync(stream.fileno())


def save_in_background(folder: Path, state: dict[str, Tensor], size: int, seconds: float, saves: int) -> list[Row]:
    """One row per save while steps go on."""
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
    names = [f"background, {'first' if i == 0 else 'later'}" for i in range(saves)]
    return [
        Row(name, saved.stalled_seconds, saved.total_seconds, size, undisturbed * len(found) / sum(found) - 1)
        for name, saved, found in zip(names, reports, rates)
    ]


def measure(folder: Path, state: dict[str, Tensor], step_seconds: float, saves: int) -> list[Row]:
    """All rows of one round; removes what it wrote."""
    os.sync()
    size = sum(tensor.nbytes for tensor in state.values())
    file, path = folder / "file", folder / "sync" / "step_00000001"
    methods: dict[str, Callable[[], object]] = {
        "disk": lambda: write_bytes(file, state),
        "torch.save": lambda: torch_save(file, state),
        "synchronous": lambda: save(path.parent, 1, state, {}),
        "load": lambda: load(path, state, verify=False),
        "load, verified": lambda: load(path, state, verify=True),
    }
    rows = []
    for method, run in methods.items():
        seconds, _ = timed(run)
        rows.append(Row(method, seconds, seconds, size))
        file.unlink(missing_ok=True)
    shutil.rmtree(path.parent)
    rows += save_in_background(folder / "background", state, size, step_seconds, saves)
    shutil.rmtree(folder / "background")
    return rows


TABLE = Table(
    "", 20, {"stalled s": ".2f", "total s": ".2f", "least": ".2f", "most": ".2f", "MB/s": ".0f", "step time": "+.0%"}
)


def table(rounds: list[list[Row]]) -> str:
    """Medians over the rounds, and the range of the totals."""
    lines = [TABLE.heading()]
    for rows in zip(*rounds):
        totals = [row.total for row in rows]
        stalled, total = statistics.median(row.stalled for row in rows), statistics.median(totals)
        slowdowns = [row.slowdown for row in rows if row.slowdown is not None]
        slowdown = statistics.median(slowdowns) if slowdowns else None
        rate = rows[0].bytes / total / 1e6
        lines.append(TABLE.row(rows[0].method, stalled, total, min(totals), max(totals), rate, slowdown))
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = new_parser(__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="an empty or new folder on the disk in question")
    parser.add_argument("--parameters", type=float, default=1.1e9)
    parser.add_argument("--full", action="store_true", help="with fp32 masters and moments")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--step-seconds", type=float, default=2.0)
    parser.add_argument("--saves", type=int, default=2, help="in the background; the first allocates the host memory")
    parser.add_argument("--rounds", type=int, default=3, help="the table shows medians")
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
    rounds = [
        measure(arguments.folder, state, arguments.step_seconds, arguments.saves) for _ in range(arguments.rounds)
    ]
    print(table(rounds))
    print(f"peak memory of the process: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB")
    write_json(arguments.json, [[asdict(row) for row in rows] for rows in rounds])
    return 0


if __name__ == "__main__":
    sys.exit(main())
