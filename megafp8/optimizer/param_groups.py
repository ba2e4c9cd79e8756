"""Parameters whose learning rate and weight decay differ from the others', by the names of their tensors.

Names are those of checkpoints: `layers.0.attention.q.weight`. A fused parameter (q, k, v; gate and up; the experts of a
rank) has several names and is updated as one tensor, so all of them must be in the same group.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Annotated, NamedTuple

from pydantic import Field

from megafp8.section import NonNegative, Pattern, Section

if TYPE_CHECKING:  # configs are read without torch
    from megafp8.parallel.sharding import ParamSpec


class ParamGroup(Section):
    """Weights with a learning rate or weight decay of their own."""

    match: Annotated[list[Pattern], Field(min_length=1)]
    """Patterns of names of tensors, as in a checkpoint: "embedding.*", "layers.0.*", "*_norm.weight"; * matches any
    text. A tensor is in the first group that matches it. It is an error if a pattern matches nothing."""
    learning_rate_scale: NonNegative = 1.0
    """Multiplies the learning rate of every step. 0: these weights stay as they are."""
    weight_decay: NonNegative | None = None
    """Their weight decay, norms and biases included. Default: optimizer.weight_decay for matrices, none for others."""


class ParamRates(NamedTuple):
    """What the learning rate of a parameter is multiplied by, and its weight decay."""

    learning_rate_scale: float
    weight_decay: float


def is_hidden_matrix(spec: ParamSpec) -> bool:
    """Return whether Muon updates a parameter, and muP scales its learning rate: a matrix of a block (`ParamSpec`).

    Not a matrix before or after the blocks, such as the output layer, and not a matrix of one row or column.
    """
    return spec.matrix and all(
        piece.name.startswith("layers.") and min(piece.global_shape) > 1 for piece in spec.shards
    )


def rates_of(
    spec: ParamSpec, weight_decay: float, groups: Sequence[ParamGroup], hidden_learning_rate_scale: float = 1.0
) -> ParamRates:
    """The rates of a parameter: of the first group it is in, if any.

    `weight_decay`: of matrices in no group. `hidden_learning_rate_scale`: of all hidden matrices, beside their group's.
    """
    decay = weight_decay if spec.weight_decay else 0.0
    scale = hidden_learning_rate_scale if is_hidden_matrix(spec) else 1.0
    index = _group_of(spec.shards[0].name, groups)
    if index is None:
        return ParamRates(scale, decay)
    group = groups[index]
    return ParamRates(scale * group.learning_rate_scale, decay if group.weight_decay is None else group.weight_decay)


def check_groups(specs: Iterable[ParamSpec], groups: Sequence[ParamGroup]) -> None:
    """ValueError unless each pattern fits a tensor of the whole model, and each parameter is in one group or none."""
    specs = list(specs)
    names = [piece.name for spec in specs for piece in spec.shards]
    for i, group in enumerate(groups):
        for pattern in group.match:
            if not any(fnmatchcase(name, pattern) for name in names):
                raise ValueError(
                    f"optimizer.groups[{i}].match has {pattern!r}, which no tensor of the model fits; names are like "
                    f"{', '.join(_examples(names))}"
                )
    for spec in specs:
        first, *others = [piece.name for piece in spec.shards]
        first_group = _group_of(first, groups)
        for other in others:
            if (other_group := _group_of(other, groups)) != first_group:
                inside, outside = (first, other) if other_group is None else (other, first)
                index = first_group if other_group is None else other_group
                raise ValueError(
                    f"optimizer.groups[{index}] has {inside} but not {outside}, and both are parts of one parameter, "
                    f"which has one learning rate and weight decay; match all of its tensors or none"
                )


def _group_of(name: str, groups: Sequence[ParamGroup]) -> int | None:
    matches = (i for i, group in enumerate(groups) if any(fnmatchcase(name, pattern) for pattern in group.match))
    return next(matches, None)


def _examples(names: Sequence[str]) -> list[str]:
    """One name of each kind: of tensors whose names differ in numbers only, the first."""
    kinds: dict[tuple[str, ...], str] = {}
    for name in names:
        kinds.setdefault(tuple(part for part in name.split(".") if not part.isdigit()), name)
    return list(kinds.values())[:12]
