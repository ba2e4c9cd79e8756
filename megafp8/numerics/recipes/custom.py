"""The recipe that is made of others: for each layer, and each operand in it, any of them.

Models do not fail evenly. The input of an MLP's second product has outliers where others have none; gradients want
range and activations precision. So a rule names layers and says how each of their operands is scaled; the first rule
whose pattern matches a layer counts, and a layer that no rule matches stays in high precision.

An operand takes part in two GEMMs and meets another operand in each, so not every mixture can be computed:

    fprop  input · weight         dgrad  grad_output · weight         wgrad  grad_output · input

Operands whose granularities both are Hopper's must be a pair that its tensor cores compute: one scale per tensor with
the same, one per row with the same, blocks of 128 with blocks of 128. Any other granularity goes with all: two such are
multiplied in bf16, and one with one of Hopper's is emulated. A GEMM in high precision makes no demand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from megafp8.numerics.recipes.base import (
    GEMMS,
    OPERANDS,
    Fp8Recipe,
    OperandName,
    PerOperand,
    fast_accumulation,
    no_match,
    option,
)
from megafp8.numerics.tensor import HOPPER_PAIRS, Granularity, on_hopper


def can_multiply(a: Granularity, b: Granularity) -> bool:
    """Whether a GEMM can have operands of these two, on tensor cores or emulated."""
    return not on_hopper(a) or not on_hopper(b) or (a, b) in HOPPER_PAIRS


@dataclass(frozen=True, kw_only=True)
class Rule:
    """How the operands of `layers`, a shell-style pattern, are scaled.

    Of the operands' recipes counts how they scale; which GEMMs are FP8 and how these accumulate is the custom recipe's.
    """

    layers: str
    input: Fp8Recipe
    weight: Fp8Recipe
    grad_output: Fp8Recipe

    @property
    def operands(self) -> PerOperand[Fp8Recipe]:
        return PerOperand(self.input, self.weight, self.grad_output)


def _read_rules(rules: Iterable[Any], recipe_of: Callable[[str], Fp8Recipe]) -> tuple[Rule, ...]:
    """The rules that the config gives, in which recipes are names."""
    return tuple(Rule(layers=r.layers, **{name: recipe_of(getattr(r, name)) for name in OPERANDS}) for r in rules)


@dataclass(frozen=True, kw_only=True)
class CustomScaling(Fp8Recipe):
    """Scales by the first of `rules` that matches a layer; one that none matches stays in high precision.

    ValueError for a GEMM whose operands cannot be multiplied.
    """

    rules: tuple[Rule, ...] = option((), key="custom", read=_read_rules)
    use_fast_accum: tuple[bool, bool, bool] = fast_accumulation()

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
                    _check_gemm(rule, gemm, a, b)

    @property
    def combinations(self) -> Sequence[PerOperand[Fp8Recipe]]:
        return [rule.operands for rule in self.rules]

    def operands(self, layer: str) -> PerOperand[Fp8Recipe] | None:
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


def _check_gemm(rule: Rule, gemm: str, a: OperandName, b: OperandName) -> None:
    first, second = getattr(rule, a), getattr(rule, b)
    first_unit, second_unit = first.granularity(a), second.granularity(b)
    if not can_multiply(first_unit, second_unit):
        raise ValueError(
            f"FP8 custom rule {rule.layers!r}: no GEMM computes {gemm}, {a} ({first.name}, a scale for each "
            f"{first_unit.name}) times {b} ({second.name}, a scale for each {second_unit.name}); give both operands "
            f"the same recipe, or keep {gemm} in high precision by fp8.override_linear_precision"
        )
