"""Train a model from scratch in a few minutes: vocabulary, data set, FP8 training on 4 processes, loss curve.

    megafp8 quickstart
    megafp8 quickstart training.steps=20

The text is the source code of the Python standard library: real text that every machine with Python has. Each step is
an ordinary command of the package. It is printed before it runs, so you see what you would type. All files are written
below the current folder, in data/quickstart and runs/quickstart. If you start it again, it does only the remaining
steps.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Sequence
from pathlib import Path

from megafp8.host.arguments import ArgumentParser
from megafp8.host.tool import run_tool, signal_handler

RANKS = 4
DATA = Path("data/quickstart")
EXCLUDED = ("site-packages", "test", "tests", "idle_test", "lib2to3", "__pycache__", "dist-packages", "ensurepip")
_INTERRUPTED = 130


def run(*words: str | Path) -> None:
    """Print and run one command of megafp8. Exit with its code if it fails, or after it if asked to stop.

    Ctrl-C reaches the command from the terminal, and SIGTERM is passed on. The command then ends by itself; a run saves
    a checkpoint first.
    """
    arguments = [str(word) for word in words]
    print(f"\n$ megafp8 {shlex.join(arguments)}", flush=True)
    environment = {"OMP_NUM_THREADS": "1", **os.environ}  # four processes share the cores
    process = subprocess.Popen([sys.executable, "-m", "megafp8", *arguments], env=environment)
    signals: list[int] = []

    def pass_on(number: int, frame: object) -> None:
        signals.append(number)
        if number == signal.SIGTERM:
            process.send_signal(number)

    with signal_handler(pass_on, signal.SIGINT, signal.SIGTERM):
        code = process.wait()
    if code or signals:
        sys.exit(code or _INTERRUPTED)


def write_file_list(folder: Path) -> Path:
    """Write the paths of the standard library's modules into `folder`, one per line, and return the file."""
    library = Path(sysconfig.get_paths()["stdlib"])
    files = [p for p in sorted(library.rglob("*.py")) if not set(p.relative_to(library).parts) & set(EXCLUDED)]
    path = folder / "files.txt"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(map(str, files)) + "\n", encoding="utf-8")
    print(f"{len(files)} files, {sum(p.stat().st_size for p in files) / 1e6:.1f} MB of Python source in {library}")
    return path


def device() -> list[str]:
    """Return the override that lets the ranks share the CPU if there are fewer GPUs than ranks."""
    if shutil.which("nvidia-smi") is None:  # without a driver there is no GPU, and importing torch takes seconds
        return []
    from torch.cuda import device_count

    if not 0 < device_count() < RANKS:
        return []
    print(f"{device_count()} GPU for {RANKS} ranks: the ranks run on the CPU")
    return ["device=cpu"]


def make_parser() -> ArgumentParser:
    """Return the parser of this command's arguments."""
    parser = ArgumentParser(description=__doc__)
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="overrides of config keys, e.g. training.steps=20"
    )
    return parser


def newest_checkpoint(run_folder: Path) -> Path | None:
    """Return the newest checkpoint of a run, or None."""
    return max((run_folder / "checkpoints").glob("step_*"), default=None)


def quickstart(overrides: Sequence[str]) -> None:
    """Run the remaining steps. Raises ValueError for invalid overrides before the first step."""
    from megafp8.config import check_layout, load_config  # slow to import, so not for help

    start = time.monotonic()
    config = load_config("quickstart", overrides)
    check_layout(config, RANKS, "quickstart")
    run_folder, model, prefix = Path(config.run_dir) / config.name, DATA / "tokenizer.model", DATA / "stdlib"
    before = newest_checkpoint(run_folder)
    files = write_file_list(DATA)
    if not model.exists():
        run("train-tokenizer", "--text-files", "--input-list", files, "--output", model, "--vocab-size", "2048")
    if not prefix.with_suffix(".idx").exists():
        run("preprocess", "--text-files", "--input-list", files, "--tokenizer", "sentencepiece",
            "--tokenizer-path", model, "--output-prefix", prefix, "--workers", "2")  # fmt: skip
    run("launch", "--nproc-per-node", str(RANKS), "pretrain", "--config", "quickstart", *device(), *overrides)
    newest, name = newest_checkpoint(run_folder), shlex.quote(str(run_folder))
    if newest is not None:
        print(f"checkpoint: {newest}")
    print(f"quickstart took {time.monotonic() - start:.0f} s")
    if newest is not None and newest == before:
        print("the run was already done; to train another one: megafp8 quickstart name=another")
    print(f'next: megafp8 generate {name} "def main("; megafp8 plot-run {name} --html run.html')


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    overrides = make_parser().parse_args(argv).overrides
    return run_tool(lambda: quickstart(overrides))


if __name__ == "__main__":
    sys.exit(main())
