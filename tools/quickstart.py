"""From nothing to a trained model in a few minutes: vocabulary, data set, FP8 training on 4 processes, loss curve.

    megafp8 quickstart
    megafp8 quickstart training.steps=20

The text is the Python standard library's own source: real, and on every machine that can run this. Each step is one of
the package's ordinary commands, printed before it runs, so that what you see is what you would type. Everything is
written below the current folder: data/quickstart and runs/quickstart.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

from megafp8.arguments import ArgumentParser

RANKS = 4
DATA = Path("data/quickstart")
CHECKPOINTS = Path("runs/quickstart/checkpoints")
EXCLUDED = ("site-packages", "test", "tests", "idle_test", "lib2to3", "__pycache__", "dist-packages", "ensurepip")


def run(*words: str | Path) -> None:
    """Print and run one command of megafp8; leave with its exit code if it fails."""
    arguments = [str(word) for word in words]
    print(f"\n$ megafp8 {shlex.join(arguments)}", flush=True)
    environment = {"OMP_NUM_THREADS": "1", **os.environ}  # four processes share the cores
    code = subprocess.run([sys.executable, "-m", "megafp8", *arguments], env=environment).returncode
    if code:
        sys.exit(code)


def write_file_list() -> Path:
    """The standard library's modules, one path a line."""
    library = Path(sysconfig.get_paths()["stdlib"])
    files = [p for p in sorted(library.rglob("*.py")) if not set(p.relative_to(library).parts) & set(EXCLUDED)]
    path = DATA / "files.txt"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(map(str, files)) + "\n", encoding="utf-8")
    print(f"{len(files)} files, {sum(p.stat().st_size for p in files) / 1e6:.1f} MB of Python source in {library}")
    return path


def device() -> list[str]:
    """The override by which the ranks share the CPU where there are fewer GPUs than ranks."""
    from torch.cuda import device_count  # help needs no torch

    if not 0 < device_count() < RANKS:
        return []
    print(f"{device_count()} GPU for {RANKS} ranks: they run on the CPU")
    return ["device=cpu"]


def make_parser() -> ArgumentParser:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="keys of the config, e.g. training.steps=20")
    return parser


def main(argv: list[str] | None = None) -> int:
    overrides = make_parser().parse_args(argv).overrides
    start = time.monotonic()
    model, prefix = DATA / "tokenizer.model", DATA / "stdlib"
    files = write_file_list()
    if not model.exists():
        run("train-tokenizer", "--text-files", "--input-list", files, "--output", model, "--vocab-size", "2048")
    if not prefix.with_suffix(".idx").exists():
        run("preprocess", "--text-files", "--input-list", files, "--tokenizer", "sentencepiece",
            "--tokenizer-path", model, "--output-prefix", prefix, "--workers", "2")  # fmt: skip
    run("launch", "--nproc-per-node", str(RANKS), "pretrain", "--config", "quickstart", *device(), *overrides)
    print(f"checkpoint: {max(CHECKPOINTS.glob('step_*'))}")
    print(f"quickstart took {time.monotonic() - start:.0f} s")
    print('next: megafp8 generate runs/quickstart "def main("; megafp8 plot-run runs/quickstart --html run.html')
    return 0


if __name__ == "__main__":
    sys.exit(main())
