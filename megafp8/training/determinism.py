"""Settings that make two runs of the same layout compute the same bits.

Most of a step is deterministic without these settings. Our kernels use atomics only for maxima, which do not depend on
the order, and never for sums. Gradients are summed over micro-batches in the schedule's order. Tokens are sorted before
the gradient of an embedding is summed. Data and initial weights are functions of the seed. The rest is:

    attention    sums dq in the order in which blocks of keys finish. `torch.use_deterministic_algorithms` turns
                 on the deterministic mode of flash kernels, `layers.attention.op` excludes cuDNN, which has none, and
                 torch refuses operations without such a mode
    cuBLAS       may choose its kernel by the free workspace, unless CUBLAS_WORKSPACE_CONFIG fixes the workspace
    cuBLASLt     times its algorithms; the config turns this off, and the first suggested algorithm is used
    NCCL         reductions in switches (NVLS) have no fixed order, so NCCL_ALGO is Ring, which sums in rank order
    auto_filter  measures speeds; `config.checks` refuses it

Libraries read the environment when they start, so call `make_deterministic` before CUDA is used. In deterministic mode
torch would also fill every new tensor, so that reading uninitialized memory is deterministic. No code here reads such
memory, so the fill is turned off.

The bits may differ on other GPUs or with other library releases, and if NCCL builds other rings, as on nodes with
another topology. Cost: docs/decisions/0014-determinism.md.
"""

from __future__ import annotations

import os

import torch

_WORKSPACES = (":4096:8", ":16:8")
_ENVIRONMENT = {"CUBLAS_WORKSPACE_CONFIG": _WORKSPACES, "NCCL_ALGO": ("Ring",)}
"""Allowed values of environment variables; the first is set if the variable is unset."""


def make_deterministic(device_type: str) -> None:
    """Make this process deterministic.

    Raises ValueError if an environment variable has a conflicting value, or if CUDA has already started without one.
    """
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
    """Return a log line with the deterministic settings."""
    line = "deterministic: torch's deterministic algorithms"
    if device_type != "cuda":
        return f"{line}; nothing else varies on a {device_type}"
    environment = ", ".join(f"{name}={os.environ.get(name)}" for name in _ENVIRONMENT)
    return f"{line}, attention in a fixed order, cuBLASLt's first algorithm untimed, {environment}"
