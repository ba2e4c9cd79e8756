"""A save that meets the end of the disk at any of its writes: one clear error, and the run continues exactly.

A small model trains on two ranks with ZeRO, so that both write, in a run folder on a small tmpfs, which needs root. At
each point so much space is left when the second save begins that another of its pages does not fit, whichever file it
belongs to; logs and metrics are on the same disk.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
import torch.distributed as dist

from megafp8.config import check_layout, load_config
from megafp8.training import job
from megafp8.training.errors import DONE, FAILED, run_and_report
from megafp8.training.inputs import open_inputs
from megafp8.training.metrics import read_metrics
from megafp8.training.resilience import faults
from megafp8.training.validate import check_run
from tests.ports import free_port
from tests.quickstart_data import QuickstartData

ROOT = Path(__file__).resolve().parents[2]
RANKS, SAVE_EVERY, STEPS = 2, 2, 5
SECONDS = 180.0
SMALL = [
    "name=run", "model.num_layers=2", "model.hidden_size=32", "model.ffn_hidden_size=64", "model.vocab_multiple=128",
    "parallel.tensor=1", "parallel.pipeline=1", "parallel.zero=1", "training.seq_length=16",
    "training.micro_batch_size=1", f"training.global_batch_size={RANKS}", f"training.steps={STEPS}",
    "training.eval_interval=0", "training.evaluate=null", "optimizer.warmup_steps=1",
    f"checkpoint.interval={SAVE_EVERY}", "fp8.recipe=none", "logging.progress=false",
]  # fmt: skip
ERROR = re.compile(r"error: saving \S+ failed: rank \d+: OSError: \[Errno 28\] No space left on device: '[^']+'")


class Attempt(NamedTuple):
    """Exit code of each rank, None for one that was still running; and what they printed."""

    codes: list[int | None]
    text: str


def _rank(rank: int, port: int, options: Sequence[str], output: Path) -> None:
    """Run a rank of the job, and end its process."""
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    errors = output.parent / "errors" / str(rank)
    errors.mkdir(parents=True, exist_ok=True)
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": RANKS, "LOCAL_WORLD_SIZE": RANKS, "MASTER_PORT": port}
    os.environ |= {key: str(value) for key, value in places.items()} | {
        "MASTER_ADDR": "127.0.0.1",
        "TORCHELASTIC_ERROR_FILE": str(errors / "error.json"),
        "TORCHELASTIC_MAX_RESTARTS": "1",  # so the rank prints its message
    }
    faults._remove_later = lambda path, seconds: None  # attempts remove it themselves

    def run() -> None:
        config = load_config(str(ROOT / "configs" / "quickstart.yaml"), list(options))
        check_layout(config, RANKS)
        inputs = open_inputs(config, "full_disk")
        check_run(inputs)
        job.train(inputs)

    code = run_and_report(run)
    if code == DONE and dist.is_initialized():
        dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def attempt(options: Sequence[str], output: Path) -> Attempt:
    """Run the job once, in forks of this process."""
    shutil.rmtree(output.parent / "errors", ignore_errors=True)
    output.unlink(missing_ok=True)
    context, port = multiprocessing.get_context("fork"), free_port()
    processes = [context.Process(target=_rank, args=(rank, port, options, output)) for rank in range(RANKS)]
    for process in processes:
        process.start()
    deadline = time.monotonic() + SECONDS
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
        process.join()
    return Attempt(codes, output.read_text())


def losses_of(run: Path) -> list[tuple[int, float]]:
    return [(record["step"], record["loss"]) for record in read_metrics(run / "metrics.jsonl")]


def checksums_of(run: Path) -> dict[str, str]:
    """Return the CRC-32 of each data file of the last checkpoint."""
    path = run / "checkpoints" / f"step_{STEPS:08d}" / "checksums.json"
    return {name: x["crc32"] for name, x in json.loads(path.read_text())["files"].items() if name.endswith(".distcp")}


def problems(first: Attempt, again: Attempt, run: Path, expected: Path) -> list[str]:
    """Return what is wrong with an attempt on the full disk, and with the next one."""
    messages = Counter(line for line in first.text.splitlines() if "error: " in line.lower())
    found = [] if first.codes == [FAILED] * RANKS else [f"exit codes {first.codes}"]
    if len([line for line in messages if ERROR.search(line)]) != 1 or sum(messages.values()) != 1:
        found.append(f"messages {list(messages.elements())}")
    if "Traceback" in first.text:
        found.append("a traceback")
    if again.codes != [DONE] * RANKS:
        found.append(f"then exit codes {again.codes}: {again.text[-500:]}")
    elif losses_of(run) != losses_of(expected):
        found.append("other losses")
    elif checksums_of(run) != checksums_of(expected):
        found.append("another checkpoint")
    return found


def trial(folder: Path, disk: Path, points: int, options: Sequence[str]) -> list[str]:
    """Return what is wrong at each of `points`; `disk` is empty. Saves are in the background at odd points."""
    output = folder / "output.txt"
    done = attempt([*SMALL, *options, f"run_dir={folder / 'undisturbed'}"], output)
    assert done.codes == [DONE] * RANKS, f"{done.codes}: {done.text}"
    expected, page = folder / "undisturbed" / "run", os.sysconf("SC_PAGE_SIZE")
    saved = (expected / "checkpoints" / f"step_{2 * SAVE_EVERY:08d}").rglob("*")
    needed = sum(-(-path.stat().st_size // page) for path in saved if path.is_file())
    wrong = []
    for point in range(points):
        free = point * (needed - 1) // (points - 1) * page
        fault = {"kind": "full_disk", "rank": 0, "step": 2 * SAVE_EVERY, "free_bytes": free}
        own = [*SMALL, *options, f"run_dir={disk}", f"checkpoint.async_save={'true' if point % 2 else 'false'}"]
        first = attempt([*own, f"resilience.inject={json.dumps([fault])}"], output)
        (disk / "run" / "filler").unlink(missing_ok=True)
        again = attempt(own, folder / "again.txt")
        if found := problems(first, again, disk / "run", expected):
            wrong.append(f"{free:,} bytes free: {'; '.join(found)}\n{first.text[-3000:]}")
        for path in disk.iterdir():
            shutil.rmtree(path)
    return wrong


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_saves_on_a_full_disk(quickstart_data: QuickstartData, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=32m", "none", str(disk)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("needs root, to mount a small disk")
    try:  # the trial forks, which needs a process with one thread
        call = f"x.trial(x.Path({str(tmp_path)!r}), x.Path({str(disk)!r}), 8, {quickstart_data.overrides!r})"
        command = [sys.executable, "-c", f"import tests.checkpoint.test_full_disk as x; print({call})"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    finally:
        subprocess.run(["umount", str(disk)], check=True)
    assert done.stdout.splitlines()[-1:] == ["[]"], done.stdout + done.stderr
