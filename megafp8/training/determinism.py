"""Settings with which two runs of one layout compute the same bits.

Most of a step is deterministic without them. Our kernels use atomics for maxima, whose order does not matter, and never
for sums; gradients are summed over micro-batches in the schedule's order; tokens are sorted before the gradient of an
embedding is summed; data and initial weights are functions of the seed. What remains:

    attention    cuDNN's backward sums dq in the order in which blocks finish. torch's flash and memory-efficient
                 kernels have a deterministic mode, used under `torch.use_deterministic_algorithms`, which also makes
                 torch refuse operations that have none (`layers.attention.op` excludes cuDNN)
    cuBLAS       may choose its kernel by the workspace that is free, unless CUBLAS_WORKSPACE_CONFIG fixes it
    cuBLASLt     times its algorithms: the config turns that off, and the first suggested algorithm is used
    NCCL         reduction in switches (NVLS) has no fixed order, so NCCL_ALGO is Ring, whose order follows the ranks
    auto_filter  measures speeds: refused by `config.checks`

Libraries read the environment when they start, so call `make_deterministic` before CUDA is used. torch would also fill
every new tensor, so that reading it before writing it is deterministic; no code here does that, so the fill is off.

Not guaranteed: the same bits on other GPUs or library releases, or if NCCL builds other rings, as on nodes with another
topology. Cost: docs/decisions/0014-determinism.md.
"""

from __future__ import annotations

import os

import torch

_WORKSPACES = (":4096:8", ":16:8")
_ENVIRONMENT = {"CUBLAS_WORKSPACE_CONFIG": _WORKSPACES, "NCCL_ALGO": ("Ring",)}
"""Allowed values of environment variables; the first is set if the variable is unset."""


def make_deterministic(device_type: str) -> None:
    """Make this process deterministic. Raises ValueError if the environment contradicts, or CUDA has started."""
    if device_type == "cuda":
        for name, values in _ENVIRONMENT.items():
            _set_variable(name, values)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def _set_variable(name: str, values: tuple[str, ...]) -> None:
    value = os.environ.get(name)
    if value in values:
        return
    if value is not None:
        raise ValueError(
            f"deterministic: the environment has {name}={value}, under which two runs may differ; unset it, or try "
            f"{name}={values[0]}"
        )
    if torch.cuda.is_initialized():
        raise ValueError(
            f"deterministic: CUDA has started without {name}; call make_deterministic before, or start the process "
            f"with {name}={values[0]}"
        )
    os.environ[name] = values[0]


def describe_determinism(device_type: str) -> str:
    """The settings, as a line for the log."""
    line = "deterministic: torch's deterministic algorithms"
    if device_type != "cuda":
        return f"{line}; nothing else varies on a {device_type}"
    environment = ", ".join(f"{name}={os.environ.get(name)}" for name in _ENVIRONMENT)
    return f"{line}, attention without cuDNN, cuBLASLt's first algorithm untimed, {environment}"
