"""Custom scaling: a recipe that combines other recipes, by layer and operand.

Tensors of a model differ in their needs. The input of an MLP's second GEMM has outliers that other inputs do not have.
Gradients need range, and activations need precision. A rule therefore selects layers by a pattern and names a recipe
for each operand. The first rule that matches a layer applies. A layer that no rule matches stays in high precision.

Each operand is used in two GEMMs, together with a different operand in each, so not every combination works:

    fprop  input · weight         dgrad  grad_output · weight         wgrad  grad_output · input

If Hopper supports the granularities of both operands, they must be a pair that its tensor cores multiply: one scale per
tensor with one scale per tensor, one per row with one per row, or blocks of 128 with blocks of 128. Other granularities
go with every granularity: two of them are multiplied in bf16, and a combination with one of Hopper's granularities is
emulated. GEMMs in high precision have no restrictions.
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
    """Return whether a GEMM can multiply operands of granularities a and b, on tensor cores or emulated."""
    return not on_hopper(a) or not on_hopper(b) or (a, b) in HOPPER_PAIRS


@dataclass(frozen=True, kw_only=True)
class Rule:
    """Recipes of the operands of all layers that the shell-style pattern `layers` matches.

    The recipes of the operands determine only the scaling. The custom recipe determines which GEMMs are FP8 and how
    they accumulate.
    """

    layers: str
    input: Fp8Recipe
    weight: Fp8Recipe
    grad_output: Fp8Recipe

    @property
    def operands(self) -> PerOperand[Fp8Recipe]:
        """Recipes of the three operands."""
        return PerOperand(self.input, self.weight, self.grad_output)


def _read_rules(rules: Iterable[Any], recipe_of: Callable[[str], Fp8Recipe]) -> tuple[Rule, ...]:
    """Convert the rules of a config, which contain names of recipes, to `Rule` objects."""
    return tuple(Rule(layers=r.layers, **{name: recipe_of(getattr(r, name)) for name in OPERANDS}) for r in rules)


@dataclass(frozen=True, kw_only=True)
class CustomScaling(Fp8Recipe):
    """Recipe that applies the first of `rules` that matches a layer; other layers stay in high precision.

    Raises:
        ValueError: The operands of a GEMM cannot be multiplied.
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
        """Recipes of the three operands, for each rule."""
        return [rule.operands for rule in self.rules]

    def operands(self, layer: str) -> PerOperand[Fp8Recipe] | None:
        """Return the recipes of a layer's operands, or None if no rule matches."""
        return next((rule.operands for rule in self.rules if fnmatchcase(layer, rule.layers)), None)

    def check_layers(self, layers: Sequence[str]) -> None:
        """Raise ValueError if a rule applies to none of `layers`, the layers of the whole model."""
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
