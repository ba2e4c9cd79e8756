"""Groups of parameters with a separate learning rate or weight decay, chosen by tensor name.

Names are the names in checkpoints, such as `layers.0.attention.q.weight`. A fused parameter (q, k, v; gate and up; the
experts of a rank) has several names and is updated as one tensor, so all its names must be in the same group.
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
    """Group of weights with a separate learning rate or weight decay."""

    match: Annotated[list[Pattern], Field(min_length=1)]
    """Patterns of tensor names, as in a checkpoint: "embedding.*", "layers.0.*", "*_norm.weight". * matches any text. A
    tensor belongs to the first group that matches it. A pattern that matches nothing is an error."""
    learning_rate_scale: NonNegative = 1.0
    """Factor of the learning rate of every step. 0 keeps the weights constant."""
    weight_decay: NonNegative | None = None
    """Weight decay of the group, including its norms and biases. Default: optimizer.weight_decay for matrices, none for
    other weights."""


class ParamRates(NamedTuple):
    """Learning-rate factor and weight decay of a parameter."""

    learning_rate_scale: float
    weight_decay: float


def is_hidden_matrix(spec: ParamSpec) -> bool:
    """Return whether a parameter is a matrix of a block.

    Muon updates these matrices, and muP scales their learning rate. Matrices before or after the blocks, such as the
    output layer, are not hidden matrices. Neither are matrices with one row or one column.
    """
    return spec.matrix and all(
        shard.name.startswith("layers.") and min(shard.global_shape[-2:]) > 1 for shard in spec.shards
    )


def rates_of(
    spec: ParamSpec,
    weight_decay: float,
    groups: Sequence[ParamGroup],
    hidden_learning_rate_scale: float = 1.0,
    score_learning_rate_scale: float = 1.0,
) -> ParamRates:
    """Return the rates of a parameter from the first group that matches it, if any.

    Args:
        spec: Parameter.
        weight_decay: Weight decay of matrices outside all groups.
        groups: Groups of the config.
        hidden_learning_rate_scale: Additional learning-rate factor of all hidden matrices.
        score_learning_rate_scale: Additional learning-rate factor of routers and gates (`ParamSpec.scores`).
    """
    decay = weight_decay if spec.weight_decay else 0.0
    scale = score_learning_rate_scale if spec.scores else 1.0
    if is_hidden_matrix(spec):
        scale = hidden_learning_rate_scale
    index = _group_of(spec.shards[0].name, groups)
    if index is None:
        return ParamRates(scale, decay)
    group = groups[index]
    return ParamRates(scale * group.learning_rate_scale, decay if group.weight_decay is None else group.weight_decay)


def check_groups(specs: Iterable[ParamSpec], groups: Sequence[ParamGroup]) -> None:
    """Check the groups against the parameters of the whole model.

    Raises:
        ValueError: A pattern matches no tensor, or the tensors of one parameter are in different groups.
    """
    specs = list(specs)
    names = [shard.name for spec in specs for shard in spec.shards]
    for i, group in enumerate(groups):
        for pattern in group.match:
            if not any(fnmatchcase(name, pattern) for name in names):
                raise ValueError(
                    f"optimizer.groups[{i}].match has {pattern!r}, which no tensor of the model fits; names are like "
                    f"{', '.join(_examples(names))}"
                )
    for spec in specs:
        first, *others = [shard.name for shard in spec.shards]
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
    """Return one name of each kind. Names of one kind differ only in their numbers."""
    kinds: dict[tuple[str, ...], str] = {}
    for name in names:
        kinds.setdefault(tuple(part for part in name.split(".") if not part.isdigit()), name)
    return list(kinds.values())[:12]
