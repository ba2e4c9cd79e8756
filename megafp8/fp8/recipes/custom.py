"""The recipe that is made of others: for each layer, and each operand in it, any of them.

Models do not fail evenly. The input of an MLP's second product has outliers where others have none; gradients want
range and activations precision. So a rule names layers and says how each of their operands is scaled; the first rule
whose pattern matches a layer is its rule, and a layer that no rule matches stays in high precision.

An operand takes part in two GEMMs and meets another operand in each, so not every mixture can be computed:

    fprop  input · weight         dgrad  grad_output · weight         wgrad  grad_output · input

    one factor a tensor (delayed, current, static) meets its like
    one a row (rowwise) meets its like
    blocks of 128 (blockwise) meet their like
    finer blocks (mxfp8, nvfp4) meet anything: that GEMM is emulated, unless they meet their like on Blackwell

A GEMM that runs in high precision makes no demand.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import ClassVar

from megafp8.fp8.patterns import no_match
from megafp8.fp8.recipes.base import Fp8Recipe, OperandName, OperandRecipes
from megafp8.fp8.tensor import BLOCK_1X128, BLOCK_128X128, ROW, TENSOR, Granularity

GEMMS: dict[str, tuple[OperandName, OperandName]] = {
    "fprop": ("input", "weight"),
    "dgrad": ("grad_output", "weight"),
    "wgrad": ("grad_output", "input"),
}
# Those that Hopper's GEMMs take, by whom they can meet; all others are emulated there.
_HARDWARE = {TENSOR: {TENSOR}, ROW: {ROW}, BLOCK_1X128: {BLOCK_1X128, BLOCK_128X128}, BLOCK_128X128: {BLOCK_1X128}}


def needs_blackwell(granularity: Granularity) -> bool:
    """Whether only Blackwell's tensor cores have GEMMs for it, so that others emulate them."""
    return granularity not in _HARDWARE


def can_meet(a: Granularity, b: Granularity) -> bool:
    """Whether a GEMM can have operands of these two."""
    return needs_blackwell(a) or needs_blackwell(b) or b in _HARDWARE[a]


@dataclass(frozen=True, kw_only=True)
class Rule:
    """How the operands of `layers`, a shell-style pattern, are scaled.

    Of their recipes counts how they scale; which GEMMs are FP8 and how these sum is the custom recipe's to say.
    """

    layers: str
    input: Fp8Recipe
    weight: Fp8Recipe
    grad_output: Fp8Recipe

    @property
    def operands(self) -> OperandRecipes:
        return OperandRecipes(self.input, self.weight, self.grad_output)


@dataclass(frozen=True, kw_only=True)
class CustomScaling(Fp8Recipe):
    """By the first of `rules` that matches a layer; a layer that none matches stays in high precision.

    ValueError for a GEMM whose operands cannot meet.
    """

    name: ClassVar[str] = "custom"

    rules: tuple[Rule, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.rules:
            raise ValueError(
                "FP8 recipe custom has no rules; give fp8.custom one, for example "
                '{layers: "*", input: delayed, weight: current, grad_output: delayed}'
            )
        for rule in self.rules:
            for (gemm, (a, b)), high in zip(GEMMS.items(), self.override_linear_precision, strict=True):
                if not high:
                    _check_meeting(rule, gemm, a, b)

    def operands(self, layer: str) -> OperandRecipes | None:
        return next((rule.operands for rule in self.rules if fnmatchcase(layer, rule.layers)), None)

    def check_layers(self, layers: Sequence[str]) -> None:
        left = list(layers)
        for i, rule in enumerate(self.rules):
            mine = [layer for layer in left if fnmatchcase(layer, rule.layers)]
            if not mine:
                if any(fnmatchcase(layer, rule.layers) for layer in layers):
                    raise ValueError(
                        f"FP8 custom rule {i} never applies: rules before it take all layers that {rule.layers!r} "
                        "matches, and the first match counts; move it up"
                    )
                raise ValueError(no_match("custom", rule.layers, layers))
            left = [layer for layer in left if layer not in mine]


def _check_meeting(rule: Rule, gemm: str, a: OperandName, b: OperandName) -> None:
    first, second = getattr(rule, a), getattr(rule, b)
    of_first, of_second = first.granularity(a), second.granularity(b)
    if not can_meet(of_first, of_second):
        raise ValueError(
            f"FP8 custom rule {rule.layers!r}: no GEMM computes {gemm}, {a} ({first.name}, a factor for each "
            f"{of_first.name}) times {b} ({second.name}, a factor for each {of_second.name}); delayed, current and "
            f"static go together, rowwise with rowwise, blockwise with blockwise, mxfp8 and nvfp4 with any; or keep "
            f"{gemm} in high precision by fp8.override_linear_precision"
        )
