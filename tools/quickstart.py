"""From nothing to a trained model in a few minutes: vocabulary, data set, FP8 training on 4 processes, loss curve.

The text is the Python standard library's own source: real, and on every machine that can run this. Each step is one of
the project's ordinary commands, printed before it runs, so that what you see is what you would type.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DATA = Path("data/quickstart")
EXCLUDED = ("site-packages", "test", "tests", "idle_test", "lib2to3", "__pycache__", "dist-packages", "ensurepip")


def run(*command: str | Path) -> None:
    """Print and run one command from the repository's root; leave with its exit code if it fails."""
    words = [str(word) for word in command]
    print(f"\n$ {shlex.join(['python' if word == sys.executable else word for word in words])}", flush=True)
    environment = {"OMP_NUM_THREADS": "1", **os.environ}  # four processes share the cores
    code = subprocess.run(words, cwd=ROOT, env=environment).returncode
    if code:
        sys.exit(code)


def write_file_list() -> Path:
    """The standard library's modules, one path a line."""
    library = Path(sysconfig.get_paths()["stdlib"])
    files = [p for p in sorted(library.rglob("*.py")) if not set(p.relative_to(library).parts) & set(EXCLUDED)]
    path = ROOT / DATA / "files.txt"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(map(str, files)) + "\n", encoding="utf-8")
    print(f"{len(files)} files, {sum(p.stat().st_size for p in files) / 1e6:.1f} MB of Python source in {library}")
    return DATA / "files.txt"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="for pretrain_gpt.py, e.g. training.steps=20")
    overrides = parser.parse_args().overrides
    start = time.monotonic()
    python = sys.executable
    model, prefix = DATA / "tokenizer.model", DATA / "stdlib"
    files = write_file_list()
    if not (ROOT / model).exists():
        run(python, "tools/train_tokenizer.py", "--text-files", "--input-list", files, "--output", model,
            "--vocab-size", "2048")  # fmt: skip
    if not (ROOT / prefix).with_suffix(".idx").exists():
        run(python, "tools/preprocess_data.py", "--text-files", "--input-list", files, "--tokenizer", "sentencepiece",
            "--tokenizer-path", model, "--output-prefix", prefix, "--workers", "2")  # fmt: skip
    run(python, "-m", "torch.distributed.run", "--nproc-per-node", "4", "pretrain_gpt.py",
        "--config", "configs/quickstart.yaml", *overrides)  # fmt: skip
    checkpoints = sorted((ROOT / "runs/quickstart/checkpoints").glob("step_*"))
    print(f"checkpoint: {checkpoints[-1].relative_to(ROOT)}")
    print(f"quickstart took {time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
