"""Time and memory of a conversion as the model grows, beside a plain copy of the same bytes.

    python -m benchmarks.bench_conversion --folder /scratch --shapes 0.1B 1B 8B --png conversion.png

For each shape it writes a native checkpoint of weights in bf16 into --folder, copies its files with nothing done to
them, and converts it to Hugging Face in a process of its own, whose highest resident memory the system tells. Both
begin with the source out of the page cache and end with the target on the disk. All files are deleted again; twice the
checkpoint's size is needed (8B: 32 GB).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from megafp8.config import ModelConfig
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
"""Of GPT-2 small's size with Llama's layers, Llama-3.2-1B, and Llama-3-8B."""
CONVERTER = Path(__file__).with_name("convert_checkpoint.py")


class Synthetic:
    """A source of weights that look like a model's and cost nothing to make."""

    def __init__(self, model: ModelConfig) -> None:
        self.path, self.model, self.about, self.tokenizer_files = Path("synthetic"), model, {}, []
        self.tensors = {name: TensorInfo(shape, torch.bfloat16) for name, shape in model_tensors(model).items()}
        self._values = torch.randn(1 << 20, generator=torch.Generator().manual_seed(0)).mul_(0.02).bfloat16()

    def read(self, name: str) -> Tensor:
        numel = torch.Size(self.tensors[name].shape).numel()
        return self._values.repeat(-(-numel // len(self._values)))[:numel].view(self.tensors[name].shape)


class Conversion(NamedTuple):
    """Seconds of the whole process, of these without starting Python and torch, and its highest resident memory."""

    seconds: float
    moving_seconds: float
    peak_bytes: int


class Figures(NamedTuple):
    """Of one shape: what it is, and the medians of all rounds."""

    parameters: int
    bytes: int
    largest_tensor_bytes: int
    copy_seconds: float
    conversion: Conversion


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


@contextmanager
def folder_for_a_while(path: Path) -> Iterator[Path]:
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def copy(source: Path, target: Path) -> float:
    """Seconds to copy the files as `dd bs=16M conv=fsync` does."""
    leave_page_cache(source)
    start = time.monotonic()
    target.mkdir()
    for file in source.iterdir():
        with file.open("rb", buffering=0) as read, (target / file.name).open("wb", buffering=0) as write:
            while block := read.read(1 << 24):
                write.write(block)
            os.fsync(write.fileno())
    return time.monotonic() - start


def convert(source: Path, target: Path) -> Conversion:
    """The converter in a process of its own."""
    leave_page_cache(source)
    command = [sys.executable, str(CONVERTER), "--load", str(source), "--save", str(target), "--to", "hf"]
    environment = os.environ | {"PYTHONPATH": str(CONVERTER.parent.parent), "OMP_NUM_THREADS": "1"}
    start = time.monotonic()
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    said = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}")
    moving = re.search(r" in ([\d.]+) s ", said)
    assert moving, said
    return Conversion(time.monotonic() - start, float(moving[1]), usage.ru_maxrss * 1024)


def measure(model: ModelConfig, folder: Path, rounds: int) -> Figures:
    """Copy and convert in turns."""
    copies, conversions = [], []
    sizes = [torch.Size(info.shape).numel() for info in Synthetic(model).tensors.values()]
    with folder_for_a_while(folder / "bench-source") as source:
        write_source(model, source)
        for _ in range(rounds):
            with folder_for_a_while(folder / "bench-copy") as target:
                copies.append(copy(source, target))
            with folder_for_a_while(folder / "bench-hf") as target:
                conversions.append(convert(source, target))
    medians = Conversion(*(statistics.median(values) for values in zip(*conversions)))
    return Figures(sum(sizes), 2 * sum(sizes), 2 * max(sizes), statistics.median(copies), medians)


def read_figures(file: Path | None) -> dict[str, Figures]:
    if file is None or not file.exists():
        return {}
    return {
        shape: Figures(*of, Conversion(*conversion))
        for shape, (*of, conversion) in json.loads(file.read_text()).items()
    }


def table(found: dict[str, Figures]) -> str:
    lines = [
        "| shape | parameters | GB | copy s | copy GB/s | convert s | convert GB/s | with start s | largest tensor GiB "
        "| peak RSS GiB |",
        "|---" * 10 + "|",
    ]
    for shape, f in found.items():
        gb, gib, conversion = f.bytes / 1e9, 2**30, f.conversion
        lines.append(
            f"| {shape} | {f.parameters / 1e9:.2f}e9 | {gb:.2f} | {f.copy_seconds:.1f} | {gb / f.copy_seconds:.2f} "
            f"| {conversion.moving_seconds:.1f} | {gb / conversion.moving_seconds:.2f} | {conversion.seconds:.1f} "
            f"| {f.largest_tensor_bytes / gib:.2f} | {conversion.peak_bytes / gib:.2f} |"
        )
    return "\n".join(lines)


def plot(found: dict[str, Figures], file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    gb = [f.bytes / 1e9 for f in found.values()]
    left.loglog(gb, [f.conversion.moving_seconds for f in found.values()], "o-", label="convert")
    left.loglog(gb, [f.copy_seconds for f in found.values()], "s--", label="copy")
    left.set(ylabel="seconds", title="native to Hugging Face")
    right.semilogx(gb, [f.conversion.peak_bytes / 2**30 for f in found.values()], "o-", label="peak resident memory")
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="where to write, on the disk to be measured")
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=["0.1B", "1B"])
    parser.add_argument("--rounds", type=int, default=1, help="figures are medians over so many")
    parser.add_argument("--json", type=Path, help="keep the figures, beside those of shapes measured before")
    parser.add_argument("--png", type=Path, help="draw the figures")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    found = read_figures(arguments.json)
    for shape in arguments.shapes:
        found[shape] = measure(ModelConfig.model_validate(SHAPES[shape]), arguments.folder, arguments.rounds)
    found = {shape: found[shape] for shape in SHAPES if shape in found}
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")
    print(table(found))
    if arguments.png:
        plot(found, arguments.png)
    return 0


if __name__ == "__main__":
    sys.exit(main())
