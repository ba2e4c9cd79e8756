"""Check this machine and environment: versions, GPUs, missing packages, what is slow without them, how to install them.

    megafp8 doctor

The command prints a line for each check, failures last. It computes an FP8 layer forward and backward on each GPU, or
on the CPU. `megafp8 check-cluster` compares the machines of a cluster, and measures GEMMs and links.

Exit code: 0 if the machine is usable, also with warnings; 1 if something necessary is missing or broken.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import shutil
import sys
import time
from collections.abc import Collection, Iterator
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import TYPE_CHECKING

from megafp8 import __version__
from megafp8.host.arguments import ArgumentParser
from megafp8.host.shipped import PACKAGE, install_command, is_checkout
from megafp8.host.user_cache import user_cache
from megafp8.training.machine import Finding, ask_gpu, judge_gpu, judge_limits, limits, report

if TYPE_CHECKING:
    import torch

EXTRAS = {
    "gpu": "FP8 GEMMs use torch's scaled_mm, which is slower and cannot accumulate in place; attention uses torch's "
    "kernels; blockwise experts use Triton kernels",
    "recurrent": "linear attention uses slower kernels (Gated DeltaNet has FlashQLA for Hopper)",
    "hf": "no tokenizers of kind huggingface, no chat templates, no adapters with alpha_pattern",
    "data": "no Parquet files, no tokenizers of kind tiktoken",
    "s3": "no data sets or checkpoints at s3:// URLs",
    "server": "no megafp8 serve",
    "eval": "no megafp8 evaluate --tasks",
    "replicas": "no resilience.replicas",
    "wandb": "no logging.wandb",
    "onnx": "no export to ONNX",
}
"""Consequences of a missing extra of pyproject.toml, by extra."""
_GPUS_OF = {"gpu": "GPUs", "recurrent": "Hopper GPUs"}
"""GPUs that an extra requires, by extra."""
_MODULES = {
    "nvmath-python": "nvmath.bindings.cublasLt",
    "cuda-bindings": "cuda.bindings.nvrtc",
    "flash-attn-4": "flash_attn.cute",
}
"""Modules to import in order to check packages that may be installed without working, by package."""


def check_python() -> Iterator[Finding]:
    """Check the versions of megafp8 and Python."""
    where = "a checkout" if is_checkout() else "installed"
    yield Finding("megafp8", "pass", f"{__version__}, {where} in {PACKAGE}")
    least = (3, 10)
    text = f"{sys.version.split()[0]}, {sys.executable}"
    if sys.version_info < least:
        yield Finding("Python", "fail", f"{text}; at least {'.'.join(map(str, least))} is needed")
    else:
        yield Finding("Python", "pass", text)


def installed_version(package: str) -> str | None:
    """Return the version of an installed package, or None."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def check_packages(usable: Collection[str]) -> Iterator[Finding]:
    """Check the versions of declared dependencies, and of the packages of each extra.

    Args:
        usable: Extras of `_GPUS_OF` for which this machine has the GPUs.
    """
    try:
        declared = requires("megafp8") or []
    except PackageNotFoundError:
        yield Finding("packages", "warn", f"megafp8 is not installed, so versions are not known: {install_command()}")
        return
    from packaging.requirements import Requirement  # a dependency of matplotlib

    wrong: dict[str, list[str]] = {"": [], **{extra: [] for extra in EXTRAS}}
    for requirement in map(Requirement, declared):
        extra = next((e for e in EXTRAS if requirement.marker and requirement.marker.evaluate({"extra": e})), "")
        if not extra and requirement.marker and not requirement.marker.evaluate({"extra": ""}):
            continue  # it belongs to another extra or another system
        version = installed_version(requirement.name)
        if version is None:
            wrong[extra].append(f"{requirement.name} is missing")
        elif not requirement.specifier.contains(version, prereleases=True):
            wrong[extra].append(f"{requirement.name} is {version}, not {requirement.specifier}")
        elif module := _MODULES.get(requirement.name):
            try:
                importlib.import_module(module)
            except Exception as error:  # for example because a shared library is missing
                wrong[extra].append(f"{requirement.name} cannot be imported: {_first_line(error)}")
    needed = wrong.pop("")
    if needed:
        yield Finding("packages", "fail", f"{'; '.join(needed)}: {install_command()}")
    else:
        yield Finding("packages", "pass", "all that megafp8 needs")
    for extra, problems in wrong.items():
        name = f"extra {extra}"
        if not problems:
            yield Finding(name, "pass", "installed")
        elif extra in _GPUS_OF and extra not in usable:
            yield Finding(name, "pass", f"not installed, and useful on {_GPUS_OF[extra]} only")
        else:
            text = f"{', '.join(problems)}: {EXTRAS[extra]}; {install_command(extra)}"
            yield Finding(name, "warn", text)


def check_torch() -> Iterator[Finding]:
    """Check that torch can be imported and finds the GPU if there is one."""
    try:
        import torch
    except Exception as error:
        yield Finding("torch", "fail", f"cannot be imported: {_first_line(error)}; pip install --force-reinstall torch")
        return
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "for CPUs"
    yield Finding("torch", "pass", f"{torch.__version__}, {build}")
    if torch.cuda.is_available():
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        text = f"NCCL {nccl}, cuDNN {torch.backends.cudnn.version()}, cuBLASLt {cublaslt_version(torch.version.cuda)}"
        yield Finding("libraries", "pass", text)
    elif Path("/dev/nvidiactl").exists() or shutil.which("nvidia-smi"):
        if torch.version.cuda is None:
            works = "this torch is built for CPUs; install one for CUDA: pip install --force-reinstall torch"
        else:
            works = f"a driver for CUDA {torch.version.cuda} is needed, and /dev/nvidia* must exist (nvidia-smi)"
        yield Finding("GPUs", "fail", f"the machine has an NVIDIA driver, but torch sees no GPU: {works}")
    else:
        yield Finding("GPUs", "warn", "none: FP8 is emulated on the CPU with the same values, for trials and tests")


def cublaslt_version(cuda: str | None) -> str:
    """Return the version of the cuBLASLt library that torch has loaded, as in CUDA's release notes."""
    try:
        number = ctypes.CDLL(f"libcublasLt.so.{(cuda or '').partition('.')[0]}").cublasLtGetVersion()
    except (OSError, AttributeError):
        return "of unknown version"
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}" if number >= 100000 else str(number)


def check_gpu(index: int) -> Iterator[Finding]:
    """Check one GPU: its name and memory, its faults, and whether it computes an FP8 layer."""
    import torch

    from megafp8.gemm.cublaslt import available

    device = torch.device("cuda", index)
    memory = torch.cuda.get_device_properties(device).total_memory
    major, minor = torch.cuda.get_device_capability(device)
    name = f"GPU {index}"
    text = f"{torch.cuda.get_device_name(device)}, {memory / 2**30:.0f} GiB, capability {major}.{minor}"
    try:
        answer = ask_gpu(device)
        yield Finding(name, "pass", f"{text}, driver {answer['driver']}")
        yield from judge_gpu(answer, name)
    except (OSError, ValueError) as error:
        yield Finding(name, "pass", text)
        yield Finding("GPUs", "warn", f"{name} could not be asked for errors: {_first_line(error)}")
    if (major, minor) < (9, 0):
        yield Finding(
            name, "warn", "FP8 training is for H100 and newer (capability 9.0); fp8.recipe=none trains in bf16"
        )
    else:
        yield compute(device, "cuBLASLt" if available(device) else "scaled_mm")


def check_triton() -> Iterator[Finding]:
    """Check that Triton, which compiles the kernels, and a C compiler for its launchers are installed."""
    version = installed_version("triton")
    if version is None:
        yield Finding("Triton", "fail", "missing: kernels on GPUs are written in it; pip install triton")
        return
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CC", ""), "gcc", "clang", "cc"))), None)
    if compiler is None:
        yield Finding(
            "Triton", "fail", f"{version} needs a C compiler, but none is installed: apt-get install gcc, or set CC"
        )
    else:
        yield Finding("Triton", "pass", f"{version}, with {compiler}")


def compute(device: torch.device, how: str) -> Finding:
    """Compute an FP8 layer on `device`, forward and backward, and compare it with bf16."""
    import torch

    from megafp8 import fp8, nn

    start = time.monotonic()
    name = "FP8 layer" if device.type == "cpu" else f"FP8 layer on {device}"
    try:
        torch.manual_seed(0)
        layer = nn.Linear(256, 256, params_dtype=torch.bfloat16, device=device)
        x = torch.randn(128, 256, dtype=torch.bfloat16, device=device, requires_grad=True)
        with fp8.autocast(enabled=True):
            y = layer(x)
        y.sum().backward()
        expected = layer(x)  # in bf16
        error = ((y - expected).norm() / expected.norm()).item()
        gradient = x.grad
    except Exception as problem:  # any failure is the result of this check
        return Finding(name, "fail", f"{type(problem).__name__}: {_first_line(problem)}")
    if gradient is None or not gradient.isfinite().all() or not error < 0.1:
        return Finding(name, "fail", f"differs from bf16 by {error:.1%}, or its gradient is not finite")
    seconds = time.monotonic() - start
    return Finding(name, "pass", f"by {how}, differs from bf16 by {error:.1%} ({seconds:.1f} s)")


def check_machine(*, gpu: bool) -> Iterator[Finding]:
    """Check process limits, and the folder for tuning results."""
    rdma = Path("/sys/class/infiniband").is_dir() and any(Path("/sys/class/infiniband").iterdir())
    findings = list(judge_limits(limits(), "this process", rdma=rdma and gpu))
    yield from findings or [Finding("limits", "pass", "open files, locked memory, shared memory")]
    folder = user_cache()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        writable = os.access(folder, os.W_OK)
    except OSError:
        writable = False
    if writable:
        yield Finding("cache", "pass", str(folder))
    else:
        works = "set XDG_CACHE_HOME to a writable folder"
        yield Finding("cache", "warn", f"{folder} cannot be written: GEMMs are tuned again in each run; {works}")


def check() -> list[Finding]:
    """Return the findings of all checks."""
    findings = [*check_python(), *check_torch()]
    if any(finding.check == "torch" and finding.status == "fail" for finding in findings):
        return [*findings, *check_packages(())]
    import torch

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    has_hopper = any(torch.cuda.get_device_capability(index) == (9, 0) for index in range(gpus))
    usable = ["gpu"] * (gpus > 0) + ["recurrent"] * has_hopper
    findings += [*check_packages(usable), *check_machine(gpu=gpus > 0)]
    if gpus:
        findings += check_triton()
        for index in range(gpus):
            findings += check_gpu(index)
    else:
        findings.append(compute(torch.device("cpu"), "emulation on the CPU"))
    return findings


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def make_parser() -> ArgumentParser:
    """Return the parser of this command's arguments."""
    return ArgumentParser(description=__doc__)


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    make_parser().parse_args(argv)
    findings = check()
    print(report(findings))
    return int(any(finding.status == "fail" for finding in findings))


if __name__ == "__main__":
    sys.exit(main())
