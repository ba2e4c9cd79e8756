"""`Fp8Weight`: a tensor of a high-precision dtype whose only copy is in FP8, for `fp8.model_init`.

The user owns a parameter: optimizers, checkpoints, DDP, initialization and plain code read and write it, with no call
of ours in between. So it is a tensor (a wrapper subclass), and these rules hold for every operation:

- *Reading.* An operation that is not named below gets the dequantized values, in the tensor's dtype. GEMMs of FP8
  layers read `scaled` instead, the stored data.
- *Writing.* An in-place operation computes in the tensor's dtype, and all values are then cast again: the weight is
  always the cast of what a tensor of its dtype would hold. The scale follows from the amax of these values, also under
  recipes that scale activations by a history: values of a checkpoint or an initialization bear no relation to what the
  history has seen, and would saturate. That costs one more pass over the weight for each write.
- *Views.* Slices, transposes and others write to the weight they are of, as a tensor's do.
- *Copies.* `detach`, `clone`, `deepcopy`, `.to(device)`, pickle and `copy_` from another such weight keep the FP8 bits.
  `.to(dtype)` with another dtype gives a plain tensor, and so does `.float()` always.

A write puts new tensors in the place of data and scale: what an older graph has of them stays as it was.

Blocks of 128×128 and one scale per tensor serve both orientations, so columnwise data is the transposed copy, made
when it is needed. Finer scales would need a second cast, from values that no longer exist.

Shapes: n rows, k columns.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from types import MethodType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd import Function
from torch.utils._pytree import tree_map

from megafp8.numerics.formats import E4M3
from megafp8.numerics.quantize import ScaleRule
from megafp8.numerics.quantizers import casts, implementation
from megafp8.numerics.recipes.base import Fp8Recipe
from megafp8.numerics.recipes.blockwise import cast_128x128
from megafp8.numerics.sources import Plain
from megafp8.numerics.tensor import BLOCK_128X128, TENSOR, Granularity, ScaledTensor

aten = torch.ops.aten


class Fp8WeightFormat(NamedTuple):
    """How values are cast to an `Fp8Weight`: in blocks of 128×128 or with one scale, which follow from amaxes."""

    rule: ScaleRule
    blocks: bool = False

    @classmethod
    def from_recipe(cls, recipe: Fp8Recipe, layer: str) -> Fp8WeightFormat | None:
        """That of a layer's weight under `recipe`; None where the layer stays in high precision.

        ValueError for recipes whose columnwise data is another cast than rowwise.
        """
        operands = recipe.operands(layer)
        if operands is None:
            return None
        chosen = operands.weight
        if chosen.granularity("weight") not in (TENSOR, BLOCK_128X128):
            raise ValueError(
                f"fp8.model_init: {chosen.name} scaling casts a weight once for each orientation, from values that are "
                "not stored; use DelayedScaling, CurrentScaling or BlockwiseScaling"
            )
        return cls(chosen.scale_rule(E4M3), chosen.granularity("weight") is BLOCK_128X128)

    @property
    def granularity(self) -> Granularity:
        """Which elements share a scale."""
        return BLOCK_128X128 if self.blocks else TENSOR

    def cast(self, values_nk: Tensor) -> ScaledTensor:
        """The values in E4M3, rowwise."""
        source, options = Plain(values_nk.detach().contiguous()), {"rowwise": True, "columnwise": False}
        if self.blocks:
            cast, rule = implementation(cast_128x128, source.device), self.rule
            blocks = cast(source, E4M3, **options, power_of_two=rule.power_of_two, eps=rule.eps)
            return blocks.required_rowwise
        scale = self.rule.scale(casts(source).amax(source))
        made = casts(source).cast_tensor(source, scale, scale.reciprocal(), E4M3, **options, newest_amax=None)
        return made.required_rowwise


@dataclass(eq=False)
class _Stored:
    """What a weight and all tensors that alias it share. `dtype`: of the values."""

    dtype: torch.dtype
    format: Fp8WeightFormat
    data: Tensor
    scale_inv: Tensor

    @property
    def scaled(self) -> ScaledTensor:
        return ScaledTensor(self.data, self.scale_inv, self.format.granularity)

    def read(self, dtype: torch.dtype | None = None) -> Tensor:
        """The values `[n, k]`, rounded once, to `dtype`."""
        dtype = dtype or self.dtype
        return self.scaled.dequantize(torch.promote_types(dtype, torch.float32)).to(dtype)

    def write(self, values_nk: Tensor) -> None:
        self.data, self.scale_inv, *_ = self.format.cast(values_nk.to(self.data.device, self.dtype))

    def copy(self, **to: Any) -> _Stored:
        """A copy, with what `to` says to `Tensor.to`."""
        return replace(self, data=self.data.to(**to, copy=True), scale_inv=self.scale_inv.to(**to, copy=True))


class Fp8Weight(torch.Tensor):
    """A tensor of `dtype` that is stored as E4M3 data `[n, k]` and fp32 scales. See the module's docstring.

    Where `fp8.model_init` was to preserve them, `get_high_precision_init_val()` returns the values that it was first
    cast from, on the CPU, and `clear_high_precision_init_val()` frees them; it then returns None.
    """

    _stored: _Stored
    _view: Callable[[Tensor], Tensor] | None  # which view of the values it is; None: all of them

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls, stored: _Stored, view: Callable[[Tensor], Tensor] | None = None, like: Tensor | None = None
    ) -> Fp8Weight:
        """`like`: a tensor of the view's shape, strides and dtype."""
        like = stored.data if like is None else like
        dtype = stored.dtype if view is None else like.dtype
        with torch.inference_mode(False):  # a view of a normal tensor is one, also in inference
            self: Fp8Weight = torch.Tensor._make_wrapper_subclass(
                cls, like.shape, strides=like.stride(), dtype=dtype, device=stored.data.device
            )
        self._stored, self._view = stored, view
        return self

    @classmethod
    def cast(cls, values_nk: Tensor, how: Fp8WeightFormat) -> Fp8Weight:
        """`values_nk` in FP8, of their dtype."""
        data, scale_inv, *_ = how.cast(values_nk)
        return cls(_Stored(values_nk.dtype, how, data, scale_inv))

    # --- reading and writing ----------------------------------------------------------------------------------------

    @property
    def scaled(self) -> ScaledTensor:
        """The stored data and scales, rowwise, as GEMMs take them."""
        return self._stored.scaled

    @property
    def fp8_data(self) -> Tensor:
        """The stored data `[n, k]`, E4M3."""
        return self._stored.data

    @property
    def scale_inv(self) -> Tensor:
        """The inverse scales, fp32: `[]`, or one for each 128×128 block."""
        return self._stored.scale_inv

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The values as a plain tensor of `dtype`, by default the weight's, without gradient."""
        return self._stored.read(dtype) if self._view is None else self._view(self._stored.read()).to(dtype)

    def float(self) -> Tensor:
        """The values as a plain fp32 tensor, also where the weight's dtype is fp32, as for an optimizer's master."""
        return self._converted(torch.float32)

    def double(self) -> Tensor:
        """The values as a plain float64 tensor."""
        return self._converted(torch.float64)

    def half(self) -> Tensor:
        """The values as a plain fp16 tensor."""
        return self._converted(torch.float16)

    def bfloat16(self) -> Tensor:
        """The values as a plain bf16 tensor."""
        return self._converted(torch.bfloat16)

    def _converted(self, dtype: torch.dtype) -> Tensor:
        return self.to(dtype) if _conversion.running else cast(Tensor, _Dequantized.apply(self)).to(dtype)

    def _write(self, values: Tensor) -> None:
        if self._view is not None:
            whole_nk = self._stored.read()
            self._view(whole_nk).copy_(values)
            values = whole_nk
        self._stored.write(values)

    @property
    def data(self) -> Fp8Weight:
        """The weight without its gradient; what is assigned to it is written into the weight."""
        return self.detach()  # type: ignore[return-value]

    @data.setter
    def data(self, values: Tensor) -> None:
        if values.shape != self.shape:
            raise ValueError(
                f"an FP8 weight is {list(self.shape)}, and what is assigned to its data {list(values.shape)}"
            )
        if _conversion.running and isinstance(values, Fp8Weight):
            torch.Tensor.data.__set__(self, values)  # type: ignore[attr-defined]
            self._stored = values._stored
        else:
            self.detach().copy_(values)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Fp8Weight({self.dequantize()!r}, scale_inv={self.scale_inv!r})"

    # --- initial values ---------------------------------------------------------------------------------------------

    def preserve_init_val(self, values: Tensor) -> None:
        """Keep `values`, which it was first cast from, on the CPU."""
        vars(self)["_init_val"] = values.detach().cpu()

    def __getattr__(self, name: str) -> Any:
        # Code for Transformer Engine asks whether a weight has these methods.
        if name in _INIT_VAL_METHODS and "_init_val" in vars(self):
            return MethodType(_INIT_VAL_METHODS[name], self)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    # --- copies -----------------------------------------------------------------------------------------------------

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self._view is not None:
            return self.dequantize().__reduce_ex__(protocol)
        stored = self._stored
        rule, blocks = stored.format
        how = (tuple(rule), blocks)
        return _rebuilt, (stored.data, stored.scale_inv, stored.dtype, how, self.requires_grad, attributes_of(self))

    # --- operations -------------------------------------------------------------------------------------------------

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        handler = _HANDLERS.get(func)
        result = NotImplemented if handler is None else handler(*args, **kwargs)
        if result is not NotImplemented:
            return result
        if _is_view(func):
            return _views(func, *args, **kwargs)
        return _computed(func, args, kwargs)


class _Dequantized(Function):
    @staticmethod
    def forward(ctx: Any, weight: Fp8Weight) -> Tensor:
        return weight.dequantize()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def attributes_of(tensor: Tensor) -> dict[str, Any]:
    """What has been set on a tensor from outside, `nn.Parameter` included."""
    return {name: value for name, value in vars(tensor).items() if name not in ("_stored", "_view")}


def _get_init_val(self: Fp8Weight) -> Tensor | None:
    value: Tensor | None = vars(self)["_init_val"]
    return value


def _clear_init_val(self: Fp8Weight) -> None:
    vars(self)["_init_val"] = None


_INIT_VAL_METHODS: dict[str, Any] = {
    "get_high_precision_init_val": _get_init_val,
    "clear_high_precision_init_val": _clear_init_val,
}


def _rebuilt(
    data: Tensor,
    scale_inv: Tensor,
    dtype: torch.dtype,
    how: tuple[tuple[Any, ...], bool],
    requires_grad: bool,
    attributes: dict[str, Any],
) -> Fp8Weight:
    rule, blocks = how
    weight = Fp8Weight(_Stored(dtype, Fp8WeightFormat(ScaleRule(*rule), blocks), data, scale_inv))
    vars(weight).update(attributes)
    return weight.requires_grad_(requires_grad)  # type: ignore[return-value]


torch.serialization.add_safe_globals([_rebuilt])


class _Conversion(threading.local):
    running = False


_conversion = _Conversion()


@contextmanager
def converting_modules() -> Iterator[None]:
    """Within, `.to(dtype)` of an FP8 weight changes the dtype of its values and not how it is stored."""
    before, _conversion.running = _conversion.running, True
    try:
        yield
    finally:
        _conversion.running = before


@cache
def _is_view(func: Any) -> bool:
    """Whether an operation returns views of its first argument."""
    return any(value.alias_info is not None and not value.alias_info.is_write for value in func._schema.returns)


def _views(func: Any, weight: Fp8Weight, *args: Any, **kwargs: Any) -> Any:
    earlier = weight._view

    def view(whole_nk: Tensor, i: int | None = None) -> Tensor:
        made = func(whole_nk if earlier is None else earlier(whole_nk), *args, **kwargs)
        return made if i is None else made[i]

    likes = func(torch.empty_strided(weight.shape, weight.stride(), dtype=weight.dtype, device="meta"), *args, **kwargs)
    if isinstance(likes, Tensor):
        return Fp8Weight(weight._stored, view, likes)
    return [Fp8Weight(weight._stored, partial(view, i=i), like) for i, like in enumerate(likes)]


def _computed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The operation on dequantized values, which are cast again where it has written to them."""
    read: dict[int, Tensor] = {}

    def values(x: Any) -> Any:
        if not isinstance(x, Fp8Weight):
            return x
        if id(x) not in read:
            read[id(x)] = x.dequantize()
        return read[id(x)]

    result = func(*tree_map(values, args), **tree_map(values, kwargs))
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            for x in value if isinstance(value, (list, tuple)) else [value]:
                if isinstance(x, Fp8Weight):
                    x._write(read[id(x)])
    return result


def _alias(weight: Fp8Weight) -> Fp8Weight:
    return Fp8Weight(weight._stored, weight._view, weight)


def _clone(weight: Fp8Weight, **_: Any) -> Any:
    return NotImplemented if weight._view is not None else Fp8Weight(weight._stored.copy())


def _to_copy(
    weight: Fp8Weight,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    non_blocking: bool = False,
    **_: Any,
) -> Any:
    dtype = dtype or weight.dtype
    if weight._view is not None or not (dtype == weight.dtype or _conversion.running):
        return NotImplemented
    return Fp8Weight(replace(weight._stored.copy(device=device, non_blocking=non_blocking), dtype=dtype))


def _copy(to: Tensor, source: Tensor, non_blocking: bool = False) -> Any:
    if not isinstance(to, Fp8Weight):
        return NotImplemented
    if isinstance(source, Fp8Weight) and _stored_alike(to, source):
        copied = source._stored.copy(device=to.device)
        to._stored.data, to._stored.scale_inv = copied.data, copied.scale_inv
    else:
        to._write((source.dequantize() if isinstance(source, Fp8Weight) else source).expand(to.shape))
    return to


def _stored_alike(a: Fp8Weight, b: Fp8Weight) -> bool:
    return a._view is b._view is None and a.shape == b.shape and a._stored.format.blocks == b._stored.format.blocks


_HANDLERS: dict[Any, Callable[..., Any]] = {
    aten.detach.default: _alias,
    aten.alias.default: _alias,
    aten.clone.default: _clone,
    aten._to_copy.default: _to_copy,
    aten.copy_.default: _copy,
}
