"""Time and memory of a checkpoint conversion by model size, compared with a copy of the same files.

    python -m benchmarks.bench_conversion --folder /scratch --shapes 0.1B 1B 8B --png conversion.png

For each shape, writes a native checkpoint of bf16 weights into --folder, copies its files, and converts it to Hugging
Face in a process of its own, whose peak resident memory is reported. Both start with the source out of the page cache
and end with the target on disk. All files are deleted; twice the checkpoint's size is needed (8B: 32 GB).
"""

from __future__ import annotations

import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.common import Table, new_parser, write_json
from megafp8.config.schema import ModelConfig
from megafp8.conversion.base import TensorInfo
from megafp8.conversion.model import model_tensors
from megafp8.conversion.native import NativeSink

LLAMA3 = {"vocab_size": 128256, "rope_theta": 500000.0, "max_position_embeddings": 8192, "num_attention_heads": 32}
SHAPES = {
    "0.1B": {"num_layers": 12, "hidden_size": 768, "ffn_hidden_size": 2048, "num_query_groups": 12}
    | LLAMA3
    | {"num_attention_heads": 12, "vocab_size": 32000},
    "1B": {"num_layers": 16, "hidden_size": 2048, "ffn_hidden_size": 8192, "num_query_groups": 8, **LLAMA3}
    | {"tie_embeddings": True},
    "8B": {"num_layers": 32, "hidden_size": 4096, "ffn_hidden_size": 14336, "num_query_groups": 8, **LLAMA3},
}
# GPT-2 small with Llama's layers, Llama-3.2-1B, Llama-3-8B
ROOT = Path(__file__).resolve().parent.parent


class Synthetic:
    """A conversion source of random weights."""

    def __init__(self, model: ModelConfig) -> None:
        self.path, self.model, self.about, self.tokenizer_files = Path("synthetic"), model, {}, []
        self.tensors = {name: TensorInfo(shape, torch.bfloat16) for name, shape in model_tensors(model).items()}
        self._values = torch.randn(1 << 20, generator=torch.Generator().manual_seed(0)).mul_(0.02).bfloat16()

    def read(self, name: str) -> Tensor:
        numel = torch.Size(self.tensors[name].shape).numel()
        return self._values.repeat(-(-numel // len(self._values)))[:numel].view(self.tensors[name].shape)


class Figures(NamedTuple):
    """Sizes of one shape, and medians of all rounds.

    `process_seconds` include starting Python and torch, `converting_seconds` do not.
    """

    parameters: int
    bytes: int
    largest_tensor_bytes: int
    copy_seconds: float
    process_seconds: float
    converting_seconds: float
    peak_bytes: float


def write_source(model: ModelConfig, path: Path) -> None:
    source, sink = Synthetic(model), NativeSink(path)
    for name in sink.begin(source, {}):
        sink.write(name, source.read(name))
    sink.finish()
    sink.publish()


def leave_page_cache(path: Path) -> None:
    for file in path.iterdir():
        with file.open("rb") as stream:
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def copy(source: Path, target: Path) -> float:
    """Seconds to copy the files and flush them to disk."""
    leave_page_cache(source)
    start = time.monotonic()
    target.mkdir()
    for file in source.iterdir():
        with file.open("rb", buffering=0) as read, (target / file.name).open("wb", buffering=0) as write:
            shutil.copyfileobj(read, write, 1 << 24)
            os.fsync(write.fileno())
    return time.monotonic() - start


def convert(source: Path, target: Path) -> tuple[float, float, int]:
    """Seconds of the process, seconds of the conversion in it, and its peak resident memory."""
    leave_page_cache(source)
    command = [sys.executable, "-m", "tools.convert_checkpoint", "--load", source, "--save", target, "--to", "hf"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    start = time.monotonic()
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    output = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    seconds, process.returncode = time.monotonic() - start, os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"{command} ended with {process.returncode}")
    converting = re.search(r" in ([\d.]+) s ", output)
    assert converting, output
    return seconds, float(converting[1]), usage.ru_maxrss * 1024


def measure(model: ModelConfig, folder: Path, rounds: int) -> Figures:
    """Copy and convert in turns, `rounds` times."""
    copies, conversions = [], []
    sizes = [torch.Size(info.shape).numel() for info in Synthetic(model).tensors.values()]
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        source, target = Path(temporary) / "source", Path(temporary) / "target"
        write_source(model, source)
        for _ in range(rounds):
            for run, found in ((copy, copies), (convert, conversions)):
                found.append(run(source.resolve(), target.resolve()))
                shutil.rmtree(target)
    medians = (statistics.median(values) for values in zip(*conversions))
    return Figures(sum(sizes), 2 * sum(sizes), 2 * max(sizes), statistics.median(copies), *medians)


COLUMNS = {
    "parameters": ".3g", "GB": ".2f", "copy s": ".1f", "copy GB/s": ".2f", "convert s": ".1f", "convert GB/s": ".2f",
    "process s": ".1f", "largest tensor GiB": ".2f", "peak RSS GiB": ".2f",
}  # fmt: skip


def table(found: dict[str, Figures]) -> str:
    table = Table("shape", 8, COLUMNS)
    lines = [table.heading()]
    for shape, f in found.items():
        gb, gib, seconds = f.bytes / 1e9, 2**30, f.converting_seconds
        speeds = (f.copy_seconds, gb / f.copy_seconds, seconds, gb / seconds, f.process_seconds)
        lines.append(table.row(shape, f.parameters, gb, *speeds, f.largest_tensor_bytes / gib, f.peak_bytes / gib))
    return "\n".join(lines)


def plot(found: dict[str, Figures], file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    gb = [f.bytes / 1e9 for f in found.values()]
    left.loglog(gb, [f.converting_seconds for f in found.values()], "o-", label="convert")
    left.loglog(gb, [f.copy_seconds for f in found.values()], "s--", label="copy")
    left.set(ylabel="seconds", title="native to Hugging Face")
    right.semilogx(gb, [f.peak_bytes / 2**30 for f in found.values()], "o-", label="peak resident memory")
    right.semilogx(gb, [f.largest_tensor_bytes / 2**30 for f in found.values()], "s--", label="largest tensor")
    right.set(ylabel="GiB", ylim=(0, None), title="memory")
    for axes in (left, right):
        axes.set(xlabel="checkpoint, GB")
        axes.set_xticks(gb, [f"{shape}\n{size:.1f}" for shape, size in zip(found, gb)], minor=False)
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(file, dpi=120)


def main(argv: list[str] | None = None) -> int:
    parser = new_parser(__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="an existing folder on the disk to be measured")
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=["0.1B", "1B"])
    parser.add_argument("--rounds", type=int, default=1, help="figures are medians over them")
    parser.add_argument("--png", type=Path, help="draw the figures into this file")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    found = {
        shape: measure(ModelConfig.model_validate(SHAPES[shape]), arguments.folder, arguments.rounds)
        for shape in arguments.shapes
    }
    write_json(arguments.json, {shape: figures._asdict() for shape, figures in found.items()})
    print(table(found))
    if arguments.png:
        plot(found, arguments.png)
    return 0


if __name__ == "__main__":
    sys.exit(main())
