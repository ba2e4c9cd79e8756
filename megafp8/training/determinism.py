"""Two runs of one layout, the same bits: what has to be switched for that, and when.

Most of a step is deterministic as it is. Our kernels note maxima by atomics (whose order does not matter) and never add
by them; gradients are summed over micro-batches in the schedule's order; tokens are sorted before the gradient of an
embedding is added up; data and initial weights are functions of the seed. What remains:

    attention    cuDNN's backward adds up dq in the order in which blocks finish. torch's flash kernel has an ordered
                 form, as has the memory-efficient one; they run under `torch.use_deterministic_algorithms`, which also
                 makes torch refuse what has no such form (`models.attention` leaves cuDNN out)
    cuBLAS       may choose its kernel by the workspace that is free just now, unless CUBLAS_WORKSPACE_CONFIG fixes it
    cuBLASLt     its algorithms are chosen by their times: `config` turns that off, and its first guess is taken
    NCCL         switches that add up (NVLS) do so in any order, so NCCL_ALGO is Ring: an order given by the ranks
    auto_filter  measures: refused by `config.checks`, as is context parallelism with cuDNN's kernels

Libraries read the environment when they start, so `make_deterministic` comes before CUDA does. torch would also fill
every new tensor, so that reading one before writing it gives the same in each run; nothing here does that, and the fill
is turned off.

What it does not promise: the same bits on other GPUs or library releases, or where NCCL finds its rings otherwise, as
on nodes that are wired differently. What it costs: docs/decisions/0016-determinism.md.
"""

from __future__ import annotations

import os

import torch

_WORKSPACES = (":4096:8", ":16:8")
_ENVIRONMENT = {"CUBLAS_WORKSPACE_CONFIG": _WORKSPACES, "NCCL_ALGO": ("Ring",)}
"""What variables must be: the first, unless it is another of these already."""


def make_deterministic(device_type: str) -> None:
    """Switch this process, before CUDA starts. Raises ValueError where the environment says otherwise, or too late."""
    if device_type == "cuda":
        for name, values in _ENVIRONMENT.items():
            _fix(name, values)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def _fix(name: str, values: tuple[str, ...]) -> None:
    found = os.environ.get(name)
    if found in values:
        return
    if found is not None:
        raise ValueError(
            f"deterministic: the environment has {name}={found}, under which two runs may differ; unset it, or try "
            f"{name}={values[0]}"
        )
    if torch.cuda.is_initialized():
        raise ValueError(
            f"deterministic: CUDA has started without {name}; call make_deterministic before, or start the process "
            f"with {name}={values[0]}"
        )
    os.environ[name] = values[0]


def describe_determinism(device_type: str) -> str:
    """A line for the log: what is switched."""
    line = "deterministic: torch's deterministic algorithms"
    if device_type != "cuda":
        return f"{line}; nothing else varies on a {device_type}"
    environment = ", ".join(f"{name}={os.environ.get(name)}" for name in _ENVIRONMENT)
    return f"{line}, attention without cuDNN, cuBLASLt's first algorithm untimed, {environment}"
