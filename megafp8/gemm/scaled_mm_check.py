"""Trial whether a device's tensor cores multiply MXFP8 and NVFP4 matrices.

A compute capability promises the instruction, not that this torch and this cuBLAS have a kernel, nor that they read the
layouts as documented; and scales in the wrong place would train, only worse. So where the capability is there, a small
product of each kind is computed by the tensor cores and in float64. Its sizes are such that scales fill more than one
tile both ways and that k, n and the last blocks are padded, and its blocks differ by octaves, so that a scale in the
wrong place shows. A product that is refused or wrong is a reason to dequantize them all, and to multiply in bf16.

Shapes: m, n the result's dims, k the dim summed over.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from megafp8.gemm.scaled_mm import block_scaled_mm
from megafp8.numerics.formats import E5M2
from megafp8.numerics.recipes.mxfp8 import quantize_mxfp8
from megafp8.numerics.recipes.nvfp4 import quantize_nvfp4
from megafp8.numerics.tensor import ScaledTensor

_BLACKWELL = (10, 0)
_M, _N, _K = 160, 136, 330
# Of Σ|a·b|: what a tensor core may lose in summing, and bf16 in holding the result.
_SUM, _BF16 = 2.0**-10, 2.0**-8


def why_not_block_scaled(device: torch.device) -> str | None:
    """Why tensor cores of `device` do not multiply such blocks, in words that follow a colon.

    None where they do. Waits for the device.
    """
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" and not torch.version.hip else None
    if capability is None or capability < _BLACKWELL:
        this_device = device.type if capability is None else f"capability {capability[0]}.{capability[1]}"
        return f"tensor cores for them come with compute capability 10.0, and this is {this_device}"
    for kind, a_mk, b_nk in _problems(device):
        for out_dtype in (torch.bfloat16, torch.float32):
            asked = f"{kind} into {str(out_dtype).removeprefix('torch.')} by scaled_mm of torch {torch.__version__}"
            try:
                y_mn = block_scaled_mm(a_mk, b_nk, out_dtype)
            except (RuntimeError, ValueError) as error:
                reason = (str(error).splitlines() or [type(error).__name__])[0]
                return f"this GPU has tensor cores for them, but {asked} was refused ({reason})"
            if not _right(y_mn, a_mk, b_nk):
                return f"this GPU has tensor cores for them, but {asked} gave a wrong product"
    return None


def _problems(device: torch.device) -> Iterator[tuple[str, ScaledTensor, ScaledTensor]]:
    """A name and the operands of each trial product."""
    a, b = _spread(_M, _K, 0).to(device), _spread(_N, _K, 1).to(device)
    yield "mxfp8", quantize_mxfp8(a), quantize_mxfp8(b)
    yield "mxfp8 of E5M2 and E4M3", quantize_mxfp8(a, E5M2), quantize_mxfp8(b)
    yield "nvfp4", quantize_nvfp4(a, weight=False, stochastic=None), quantize_nvfp4(b, weight=True, stochastic=None)


def _spread(r: int, c: int, seed: int) -> Tensor:
    """Normal values `[r, c]`, every 16 neighbours in units of their own, four octaves apart at most."""
    generator = torch.Generator().manual_seed(seed)
    octaves = torch.randint(-2, 3, (r, -(-c // 16)), generator=generator)
    units = torch.exp2(octaves.float()).repeat_interleave(16, dim=1)[:, :c]
    return torch.randn(r, c, generator=generator) * units


def _right(y_mn: Tensor, a_mk: ScaledTensor, b_nk: ScaledTensor) -> bool:
    a, b = a_mk.dequantize(torch.float64), b_nk.dequantize(torch.float64)
    allowed = (a.abs() @ b.abs().t()) * (_SUM + (_BF16 if y_mn.dtype == torch.bfloat16 else 0))
    return bool(((y_mn.double() - a @ b.t()).abs() <= allowed).all())
