"""Checks of a single machine that `doctor` and `check-cluster` share, and the table of their findings."""

from __future__ import annotations

import resource
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch

Status = Literal["pass", "warn", "fail"]

OPEN_FILES, SHARED_MEMORY = 4096, 1 << 30
"""Minimum limit of open files (gloo connects each rank to all others), and minimum free bytes of /dev/shm (NCCL)."""
GPU_FIELDS = {
    "driver": "driver_version",
    "ECC errors": "ecc.errors.uncorrected.volatile.total",
    "row remapping pending": "remapped_rows.pending",
    "row remapping failed": "remapped_rows.failure",
    "hardware slowdown": "clocks_event_reasons.hw_slowdown",
    "thermal slowdown": "clocks_event_reasons.sw_thermal_slowdown",
    "temperature": "temperature.gpu",
}
"""Fields of an nvidia-smi query (`nvidia-smi --help-query-gpu`), by the name used here."""


@dataclass(frozen=True)
class Finding:
    """Result of a check. A check that warns or fails has one finding for each fault."""

    check: str
    status: Status
    text: str


def report(found: Sequence[Finding]) -> str:
    """Return a table of findings, failures last, and a line with counts."""
    order: dict[Status, int] = {"pass": 0, "warn": 1, "fail": 2}
    width = max(len(finding.check) for finding in found)
    lines = [f"{f.status}  {f.check:<{width}}  {f.text}" for f in sorted(found, key=lambda f: order[f.status])]
    counts = Counter(finding.status for finding in found)
    return "\n".join([*lines, ", ".join(f"{counts[status]} {status}" for status in order)])


def versions(device: torch.device) -> dict[str, str]:
    """Return the versions that must be equal on all machines of a run, and the name of the GPU."""
    import torch

    from megafp8.training.run_log import source_commit

    result = {"torch": str(torch.__version__), "Python": sys.version.split()[0], "megafp8": source_commit() or "no git"}
    if device.type == "cuda":
        result["CUDA"] = str(torch.version.cuda)
        result["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
        result["GPU"] = torch.cuda.get_device_name(device)
    return result


def ask_gpu(device: torch.device) -> dict[str, str]:
    """Return the values of `GPU_FIELDS` for a GPU; empty for a CPU.

    Raises OSError or ValueError if nvidia-smi is missing or fails.
    """
    if device.type != "cuda":
        return {}
    import torch

    which = f"--id=GPU-{torch.cuda.get_device_properties(device).uuid}"
    query = ["nvidia-smi", which, f"--query-gpu={','.join(GPU_FIELDS.values())}", "--format=csv,noheader,nounits"]
    done = subprocess.run(query, capture_output=True, text=True, timeout=60)
    return parse_gpu(done.stdout if done.returncode == 0 else done.stdout + done.stderr)


def parse_gpu(answer: str) -> dict[str, str]:
    """Return the values of `GPU_FIELDS` in nvidia-smi's CSV line. Raises ValueError if it is not such a line."""
    values = [value.strip() for value in answer.strip().split(",")]
    if len(values) != len(GPU_FIELDS):
        raise ValueError(f"nvidia-smi answers {answer.strip()!r}")
    return dict(zip(GPU_FIELDS, values, strict=True))


def judge_gpu(gpu: Mapping[str, str], name: str) -> Iterator[Finding]:
    """Yield a finding for uncorrectable ECC errors, row remapping and each slowdown of a GPU."""
    errors = gpu.get("ECC errors", "0")
    if errors.isdigit() and int(errors):
        yield Finding("GPUs", "fail", f"{name}: {errors} uncorrectable ECC errors since it was reset")
    if gpu.get("row remapping failed") in ("1", "Yes"):
        yield Finding("GPUs", "fail", f"{name}: row remapping failed; the GPU must be replaced")
    if gpu.get("row remapping pending") in ("1", "Yes"):
        yield Finding("GPUs", "warn", f"{name}: row remapping waits for a reset of the GPU")
    for reason in ("hardware slowdown", "thermal slowdown"):
        if gpu.get(reason) == "Active":
            yield Finding("GPUs", "warn", f"{name}: {reason} at {gpu.get('temperature')} °C")


def limits() -> dict[str, int]:
    """Return the soft limits of this process, and the free bytes of /dev/shm if it exists; -1 means unlimited."""
    open_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    result = {"open files": open_files, "locked memory": -1 if locked == resource.RLIM_INFINITY else locked}
    if Path("/dev/shm").is_dir():
        result["/dev/shm"] = shutil.disk_usage("/dev/shm").free
    return result


def judge_limits(values: Mapping[str, int], whose: str, *, rdma: bool) -> Iterator[Finding]:
    """Yield a finding for each limit that is too small.

    Args:
        values: Result of `limits`.
        whose: Name of the processes in the findings.
        rdma: Whether the machine has InfiniBand or RoCE ports.
    """
    files, locked, memory = (values.get(name, -1) for name in ("open files", "locked memory", "/dev/shm"))
    if 0 <= files < OPEN_FILES:
        yield Finding("limits", "fail", f"{files} open files of {whose}; at least {OPEN_FILES} are needed (ulimit -n)")
    if locked != -1 and rdma:
        text = f"locked memory of {whose} is limited to {locked >> 10} KiB, but RDMA needs it unlimited (ulimit -l)"
        yield Finding("limits", "fail", text)
    if 0 <= memory < SHARED_MEMORY:
        free = f"/dev/shm has {memory >> 20} MiB free for {whose}"
        yield Finding("limits", "warn", f"{free}; NCCL needs up to {SHARED_MEMORY >> 20} MiB")
