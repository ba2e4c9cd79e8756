"""A save that meets the end of the disk at each of many points: one clear error each, and the run continues exactly.

    sudo python benchmarks/full_disk.py --points 200 --folder /tmp/full_disk

Trains a small model on CPU processes (two ranks of data parallelism with ZeRO, so that both write) in a run folder on a
small tmpfs, which needs root. At each point the disk has so much space left when the second save begins that this or
another of its pages does not fit, whichever file it belongs to; logs and metrics are on the same disk. Checked: both
processes end with exit code 1 within a minute, one message names rank, file and error, no traceback is printed, the
checkpoint before is intact, and the same command, once there is space, ends with the losses of an undisturbed run,
equal to the last bit, and the same checkpoint. Saves are in the background at odd points. Exit code 1 if not.

Needs the quickstart's data (`megafp8 quickstart` makes it), or `--data PREFIX --tokenizer MODEL --vocabulary N`.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.context import ForkProcess
from pathlib import Path

import torch.distributed as dist
from tqdm import tqdm

from megafp8.config import check_layout, load_config
from megafp8.training.errors import DONE, FAILED, run_and_report
from megafp8.training.inputs import open_inputs
from megafp8.training.metrics import read_metrics
from megafp8.training.resilience import faults
from megafp8.training.run import train
from megafp8.training.validate import check_run

ROOT = Path(__file__).resolve().parent.parent
RANKS, SAVE_EVERY, STEPS = 2, 2, 5
SECONDS = 60.0
DISK = "32m"
SMALL = [
    "name=run",
    "model.num_layers=2",
    "model.hidden_size=32",
    "model.ffn_hidden_size=64",
    "model.vocab_multiple=128",
    "parallel.tensor=1",
    "parallel.pipeline=1",
    "parallel.zero=1",
    "training.seq_length=16",
    "training.micro_batch_size=1",
    f"training.global_batch_size={RANKS}",
    f"training.steps={STEPS}",
    "training.eval_interval=0",
    "training.evaluate=null",
    "optimizer.warmup_steps=1",
    f"checkpoint.interval={SAVE_EVERY}",
    "fp8.recipe=none",
    "logging.progress=false",
]
ERROR = re.compile(r"error: saving \S+ failed: rank \d+: OSError: \[Errno 28\] No space left on device: '[^']+'")


@dataclass(frozen=True)
class Attempt:
    """How an attempt ended: the exit code of each rank, None for one that was still running; and what was printed."""

    codes: list[int | None]
    text: str


def _rank(rank: int, port: int, options: Sequence[str], output: Path) -> None:
    """A process of the job."""
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    errors = output.parent / "errors" / str(rank)
    errors.mkdir(parents=True, exist_ok=True)
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(RANKS),
        "LOCAL_WORLD_SIZE": str(RANKS),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_ERROR_FILE": str(errors / "error.json"),
        "TORCHELASTIC_MAX_RESTARTS": "1",  # so the rank prints its message
    }
    faults._remove_later = lambda path, seconds: None  # attempts remove it themselves

    def run() -> None:
        config = load_config(str(ROOT / "configs" / "quickstart.yaml"), list(options))
        check_layout(config, RANKS)
        inputs = open_inputs(config, "full_disk")
        check_run(inputs)
        train(inputs)

    code = run_and_report(run)
    if code == DONE and dist.is_initialized():
        dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def attempt(
    options: Sequence[str], output: Path, meanwhile: Callable[[Sequence[ForkProcess]], None] = lambda ranks: None
) -> Attempt:
    """Run the job once, in forks of this process. `meanwhile` is called with its processes when they have started."""
    shutil.rmtree(output.parent / "errors", ignore_errors=True)
    output.unlink(missing_ok=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_rank, args=(rank, port, options, output)) for rank in range(RANKS)]
    for process in processes:
        process.start()
    meanwhile(processes)
    deadline = time.monotonic() + SECONDS
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
        process.join()
    return Attempt(codes, output.read_text())


def losses_of(folder: Path) -> list[tuple[int, float]]:
    return [(record["step"], record["loss"]) for record in read_metrics(folder / "metrics.jsonl")]


def tensors_of(folder: Path) -> dict[str, str]:
    """CRC-32 of the data files of the last checkpoint."""
    path = folder / "checkpoints" / f"step_{STEPS:08d}" / "checksums.json"
    return {name: x["crc32"] for name, x in json.loads(path.read_text())["files"].items() if name.endswith(".distcp")}


def pages_of(folder: Path) -> int:
    """Pages that the files of a folder take."""
    size = os.sysconf("SC_PAGE_SIZE")
    return sum(-(-path.stat().st_size // size) for path in folder.rglob("*") if path.is_file())


def problems(point: int, first: Attempt, again: Attempt, run: Path, expected: Path) -> list[str]:
    """What is not as it should be."""
    found = []
    if None in first.codes:
        found.append("hangs")
    messages = Counter(line for line in first.text.splitlines() if "error: " in line.lower())
    if first.codes != [FAILED] * RANKS:
        found.append(f"exit codes {first.codes}")
    if len([line for line in messages if ERROR.search(line)]) != 1 or sum(messages.values()) != 1:
        found.append(f"messages {list(messages.elements())}")
    if "Traceback" in first.text:
        found.append("a traceback")
    if again.codes != [DONE] * RANKS:
        found.append(f"then exit codes {again.codes}: {again.text[-500:]}")
    elif losses_of(run) != losses_of(expected):
        found.append("other losses")
    elif tensors_of(run) != tensors_of(expected):
        found.append("another checkpoint")
    return found


def add_data_flags(parser: argparse.ArgumentParser) -> None:
    """The data set that the job of `SMALL` trains on; `data_options` gives the overrides."""
    parser.add_argument("--data", default="data/quickstart/stdlib")
    parser.add_argument("--tokenizer", default="data/quickstart/tokenizer.model")
    parser.add_argument("--vocabulary", type=int, default=2048)


def data_options(arguments: argparse.Namespace) -> list[str]:
    """Overrides of the config by the flags of `add_data_flags`."""
    return [
        f"data.train=[{Path(arguments.data).resolve()}]",
        f"data.tokenizer.path={Path(arguments.tokenizer).resolve()}",
        f"model.vocab_size={arguments.vocabulary}",
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", type=int, default=200)
    parser.add_argument("--folder", type=Path, required=True, help="made, and removed in the end")
    add_data_flags(parser)
    arguments = parser.parse_args()
    disk, output = arguments.folder / "disk", arguments.folder / "output.txt"
    disk.mkdir(parents=True)
    options = [*SMALL, *data_options(arguments)]
    expected = arguments.folder / "undisturbed"
    done = attempt([*options, f"run_dir={expected}"], output)
    assert done.codes == [DONE] * RANKS, f"{done.codes}: {done.text}"
    expected /= "run"
    page = os.sysconf("SC_PAGE_SIZE")
    needed = pages_of(expected / "checkpoints" / f"step_{2 * SAVE_EVERY:08d}")
    print(f"a save takes {needed} pages of {page:,} bytes")
    failed = 0
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK}", "none", str(disk)], check=True)
    try:
        for point in tqdm(range(arguments.points), mininterval=5):
            free = point * (needed - 1) // max(arguments.points - 1, 1) * page
            fault = {"kind": "full_disk", "rank": 0, "step": 2 * SAVE_EVERY, "free_bytes": free}
            own = [*options, f"run_dir={disk}", f"checkpoint.async_save={'true' if point % 2 else 'false'}"]
            first = attempt([*own, f"resilience.inject={json.dumps([fault])}"], output)
            (disk / "run" / "filler").unlink(missing_ok=True)
            again = attempt(own, output.with_name("again.txt"))
            wrong = problems(point, first, again, disk / "run", expected)
            if wrong:
                failed += 1
                tqdm.write(f"{free:,} bytes free: {'; '.join(wrong)}\n{first.text[-3000:]}")
            for path in disk.iterdir():
                shutil.rmtree(path)
    finally:
        subprocess.run(["umount", str(disk)], check=True)
        shutil.rmtree(arguments.folder)
    print(f"{arguments.points - failed} of {arguments.points} points: one clear error, and the run continued exactly")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
