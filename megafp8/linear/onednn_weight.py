"""Linear layer weights in the layout of oneDNN's CPU kernels: a `PackedWeight` in bf16 or fp32, and one in int8.

If a weight is row-major, oneDNN copies it into blocks in each product, which for a few tokens takes longer than the
product itself. Here it is copied once. oneDNN chooses the best blocks for the processor (AVX-512, AMX).

*int8.* Processors multiply unsigned by signed bytes (VNNI; AMX also supports signed by signed), so activations, which
are quantized at run time with one scale per token, are stored with the zero point 128. Some values of a token are a
thousand times larger than the others, and a single int8 digit would round the small values to zero. Each activation is
therefore stored as two digits, which are as precise as bf16:

    x[m, k] ≈ x_scale[m] · (q[m, k] + r[m, k] / 254)      x_scale[m] = max |x[m, :]| / 127
    w[n, k] = scale_inv[n] · data[n, k]
    y[m, n] = x_scale[m] · scale_inv[n] · (Σ q · data + Σ r · data / 254)

Both sums are exact in int32. One product of twice as many tokens computes both, so the weight is read once. A token's
result does not depend on other tokens.

Shapes: m tokens, n outputs, k inputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

_TOKENS = 1
"""Number of tokens that the weight layout is optimized for: a product of one token does little but read weights."""
_LARGEST, _ZERO_POINT, _SECOND = 127.0, 128, 254.0
_LEAST_SCALE = 1e-30
"""Smallest scale of a token; avoids a division by zero for tokens of zeros."""


def packs(dtype: torch.dtype) -> bool:
    """Return whether oneDNN has fast kernels for weights of this dtype on this machine."""
    if not torch.backends.mkldnn.is_available():
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def packs_int8() -> bool:
    """Return whether the processor accumulates products of bytes in int32 (VNNI, AMX).

    Other processors saturate in int16, which gives wrong results.
    """
    return torch.cpu._is_vnni_supported() or torch.cpu._is_amx_tile_supported()


class OneDnnWeight:
    """Weight `[n, k]` of a dtype that `packs` accepts.

    With `keeps_rows`, the row-major weight is kept too, for products with one token by PyTorch's own kernel, which
    reads bf16 weights 1.2 to 1.5 times as fast.
    """

    def __init__(self, w_nk: Tensor, *, keeps_rows: bool = False) -> None:
        self.shape = (w_nk.shape[0], w_nk.shape[1])
        self.rows = w_nk.detach() if keeps_rows else None
        self._packed = torch.ops.mkldnn._reorder_linear_weight(w_nk.detach(), _TOKENS)

    def product(self, x_mk: Tensor, bias_n: Tensor | None = None) -> Tensor:
        """Return `x wᵀ + bias`, `[m, n]`. x must have the weight's dtype."""
        bias_n = None if bias_n is None else bias_n.to(x_mk.dtype)
        if len(x_mk) == 1 and self.rows is not None:
            return _vector_product(x_mk, self.rows, bias_n)
        y_mn: Tensor = torch.ops.mkldnn._linear_pointwise(x_mk, self._packed, bias_n, "none", [], "")
        return y_mn


def _vector_product(x_1k: Tensor, w_nk: Tensor, bias_n: Tensor | None) -> Tensor:
    """Return `F.linear` by PyTorch's own kernel, which PyTorch uses when oneDNN is turned off."""
    before = torch.backends.mkldnn.set_flags(False)
    try:
        return torch.nn.functional.linear(x_1k, w_nk, bias_n)
    finally:
        torch.backends.mkldnn.set_flags(*before)


class OneDnnInt8Weight:
    """Weight as `data_nk` int8 `[n, k]` times `scale_inv_n` float32 `[n]`.

    The other operand is quantized to two int8 digits.
    """

    def __init__(self, data_nk: Tensor, scale_inv_n: Tensor) -> None:
        n, k = data_nk.shape
        self.shape = (n, k)
        self._packed = torch.ops.onednn.qlinear_prepack(data_nk, [_TOKENS, k])
        self._scale_inv_n = scale_inv_n.contiguous()
        self._no_zero_points = torch.zeros(n, dtype=torch.int64)

    def product(self, x_mk: Tensor, bias_n: Tensor | None = None) -> Tensor:
        """Return `x wᵀ + bias`, `[m, n]` in x's dtype."""
        scale_m1 = x_mk.abs().amax(1, keepdim=True).float().clamp_(min=_LEAST_SCALE).div_(_LARGEST)
        scaled_mk = x_mk * scale_m1.reciprocal()
        first_mk = scaled_mk.round()
        second_mk = scaled_mk.sub_(first_mk).mul_(_SECOND)
        # Truncation rounds to nearest, because all values are positive and a half has been added.
        digits_mk = torch.cat([first_mk, second_mk]).add_(_ZERO_POINT + 0.5).to(torch.uint8)
        sums_mn: Tensor = torch.ops.onednn.qlinear_pointwise(
            digits_mk, 1.0, _ZERO_POINT, self._packed, self._scale_inv_n, self._no_zero_points,
            None, 1.0, 0, torch.float32, "none", [], "",
        )  # fmt: skip
        high_mn, low_mn = sums_mn.chunk(2)
        y_mn = high_mn.add_(low_mn, alpha=1 / _SECOND)
        y_mn = y_mn.mul_(scale_m1) if bias_n is None else torch.addcmul(bias_n.float(), y_mn, scale_m1)
        return y_mn.to(x_mk.dtype)
