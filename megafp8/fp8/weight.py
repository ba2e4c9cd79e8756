"""`Fp8Weight`: a tensor with a high-precision dtype that is stored only in FP8, for `fp8.model_init`.

Optimizers, checkpoints, DDP, initialization and user code read and write a parameter directly, without calling
megafp8. `Fp8Weight` is therefore a tensor (a wrapper subclass), and these rules hold for every operation:

- *Reading.* An operation that is not named below reads the dequantized values in the tensor's dtype. GEMMs of FP8
  layers read the stored data, `scaled`, instead.
- *Writing.* An in-place operation computes in the tensor's dtype, and all values are then cast again. The weight is
  always the cast of the values that a plain tensor would hold. The scale is computed from the amax of these values,
  even if the recipe scales activations by a history: the values of a checkpoint or an initialization have nothing to do
  with the history, and would saturate. The amax costs one more pass over the weight for each write.
- *Views.* Writing to a slice, a transpose or another view writes to the weight, as with plain tensors.
- *Copies.* `detach`, `clone`, `deepcopy`, `.to(device)`, pickle, and `copy_` from another FP8 weight keep the FP8 bits.
  `.to(dtype)` with another dtype returns a plain tensor. `.float()` always returns a plain tensor.

A write replaces the data and scale tensors by new ones, so tensors that an older autograd graph refers to keep their
values.

Blocks of 128×128 and one scale per tensor serve both orientations: columnwise data is a transposed copy, created when
it is needed. Finer scales would need a second cast, from values that no longer exist.

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
    """Format of an `Fp8Weight`: one scale per tensor or per 128×128 block, computed from the amax by `rule`."""

    rule: ScaleRule
    blocks: bool = False

    @classmethod
    def from_recipe(cls, recipe: Fp8Recipe, layer: str) -> Fp8WeightFormat | None:
        """Return the format of a layer's weight under `recipe`, or None if the layer stays in high precision.

        Raises:
            ValueError: The recipe casts a weight separately for each orientation.
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
        """Elements that share a scale."""
        return BLOCK_128X128 if self.blocks else TENSOR

    def cast(self, values_nk: Tensor) -> ScaledTensor:
        """Cast the values `[n, k]` to E4M3, rowwise."""
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
    """Storage that a weight shares with all its aliases and views."""

    dtype: torch.dtype  # of the dequantized values
    format: Fp8WeightFormat
    data: Tensor
    scale_inv: Tensor

    @property
    def scaled(self) -> ScaledTensor:
        """Stored data and scales, rowwise."""
        return ScaledTensor(self.data, self.scale_inv, self.format.granularity)

    def read(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return the dequantized values, `[n, k]`, rounded once, to `dtype` (default: the weight's dtype)."""
        dtype = dtype or self.dtype
        return self.scaled.dequantize(torch.promote_types(dtype, torch.float32)).to(dtype)

    def write(self, values_nk: Tensor) -> None:
        """Round the values to the weight's dtype, cast them to FP8, and store the result in new tensors."""
        self.data, self.scale_inv, *_ = self.format.cast(values_nk.to(self.data.device, self.dtype))

    def copy(self, **to: Any) -> _Stored:
        """Return a copy. `to` are arguments of `Tensor.to`."""
        return replace(self, data=self.data.to(**to, copy=True), scale_inv=self.scale_inv.to(**to, copy=True))


class Fp8Weight(torch.Tensor):
    """Tensor of a high-precision dtype that is stored as E4M3 data `[n, k]` and fp32 scales.

    The rules for operations are at the top of this module.

    If `fp8.model_init` was told to preserve initial values, `get_high_precision_init_val()` returns them on the CPU,
    and `clear_high_precision_init_val()` frees them. Afterwards `get_high_precision_init_val()` returns None.
    """

    _stored: _Stored
    _view: Callable[[Tensor], Tensor] | None  # function that takes this view of the values; None for the whole weight

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls, stored: _Stored, view: Callable[[Tensor], Tensor] | None = None, like: Tensor | None = None
    ) -> Fp8Weight:
        """Create a tensor on the storage `stored`, or a view of it with the shape, strides and dtype of `like`."""
        like = stored.data if like is None else like
        dtype = stored.dtype if view is None else like.dtype
        with torch.inference_mode(False):  # a view of a normal tensor is a normal tensor, even in inference mode
            self: Fp8Weight = torch.Tensor._make_wrapper_subclass(
                cls, like.shape, strides=like.stride(), dtype=dtype, device=stored.data.device
            )
        self._stored, self._view = stored, view
        return self

    @classmethod
    def cast(cls, values_nk: Tensor, how: Fp8WeightFormat) -> Fp8Weight:
        """Return an FP8 weight with the values and the dtype of `values_nk`."""
        data, scale_inv, *_ = how.cast(values_nk)
        return cls(_Stored(values_nk.dtype, how, data, scale_inv))

    # --- reading and writing ----------------------------------------------------------------------------------------

    @property
    def scaled(self) -> ScaledTensor:
        """Stored data and scales, rowwise, as GEMMs read them."""
        return self._stored.scaled

    @property
    def fp8_data(self) -> Tensor:
        """Stored data, `[n, k]`, E4M3."""
        return self._stored.data

    @property
    def scale_inv(self) -> Tensor:
        """Inverse scales, fp32: `[]`, or one value for each 128×128 block."""
        return self._stored.scale_inv

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return the values as a plain tensor of `dtype` (default: the weight's dtype), without gradient."""
        return self._stored.read(dtype) if self._view is None else self._view(self._stored.read()).to(dtype)

    def float(self) -> Tensor:
        """Return the values as a plain fp32 tensor, even if the weight's dtype is fp32.

        Optimizers create their masters with it.
        """
        return self._converted(torch.float32)

    def double(self) -> Tensor:
        """Return the values as a plain float64 tensor."""
        return self._converted(torch.float64)

    def half(self) -> Tensor:
        """Return the values as a plain fp16 tensor."""
        return self._converted(torch.float16)

    def bfloat16(self) -> Tensor:
        """Return the values as a plain bf16 tensor."""
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
        """Weight without its gradient. Assigning a tensor writes the tensor's values into the weight."""
        return self.detach()  # type: ignore[return-value]

    @data.setter
    def data(self, values: Tensor) -> None:
        if values.shape != self.shape:
            raise ValueError(
                f"an FP8 weight has shape {list(self.shape)}, but the tensor assigned to its data {list(values.shape)}"
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
        """Keep a CPU copy of `values`, the initial values that the weight was cast from."""
        vars(self)["_init_val"] = values.detach().cpu()

    def __getattr__(self, name: str) -> Any:
        # Code written for Transformer Engine checks whether a weight has these methods.
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
    """Return the attributes that other code, including `nn.Parameter`, has set on a tensor."""
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
    """Make `.to(dtype)` of an FP8 weight change only the dtype of its values, and not the storage."""
    before, _conversion.running = _conversion.running, True
    try:
        yield
    finally:
        _conversion.running = before


@cache
def _is_view(func: Any) -> bool:
    """Return whether an operation returns views of its first argument."""
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
    """Run an operation on dequantized values, and cast the values again that it has written to."""
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
