"""Sparse upcycling: read a dense model as a mixture of experts, in which every expert is a copy of the layer's MLP.

Komatsuzaki et al. 2022, arXiv:2212.05055. If the router's weights add up to 1, the experts chosen for a token together
compute the same result as the MLP, so training continues at the loss of the dense model. The dense model has no
routers. They are initialized randomly, and the copies diverge because they get different tokens.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from megafp8.config import Problem
from megafp8.conversion.base import CheckpointSource, RenamedSource
from megafp8.conversion.flat import flat_keys
from megafp8.spec import ModelSpec


def problems(model: ModelSpec) -> Iterator[Problem]:
    """Yield the keys of `model` that prevent its experts from being copies of a dense model's MLPs."""
    width = flat_keys(model)["ffn_hidden_size"]
    rule = f"an expert starts as a copy of the MLP of checkpoint.init_from, which has a width of {width}"
    same = "the experts of a token must add up to the MLP of checkpoint.init_from from which they are copied"
    for x in model.expert_records:
        for key, value, as_mlp, reason, works in (
            ("ffn_hidden_size", x.width, width, rule, "leave it out"),
            ("normalize", x.normalize, True, same, "try true"),
            ("scaling_factor", x.scaling_factor, 1.0, same, "try 1.0"),
            ("latent_size", x.latent_size, None, same, "leave it out"),
            ("shared_ffn_hidden_size", x.shared_ffn_hidden_size, None, same, "leave it out"),
        ):
            if value != as_mlp:
                yield Problem(f"model.moe.{key}", value, reason, works)


def is_router(name: str) -> bool:
    """Return whether the tensor `name` belongs to a router, which no dense model has."""
    return ".mlp.router." in name


class UpcycledSource(RenamedSource):
    """Source that provides the MLPs of `dense` as the experts of `model`. It has no routers."""

    def __init__(self, dense: CheckpointSource, model: ModelSpec) -> None:
        dense_names: dict[str, str] = {}
        for name in dense.tensors:
            copies = [name]
            if (number := re.search(r"\.layers\.(\d+)\.mlp\.", name)) and model.layers[int(number[1])].has_experts:
                count = model.layers[int(number[1])].ffn.num_experts
                copies = [name.replace(".mlp.", f".mlp.experts.{e}.") for e in range(count)]
            dense_names |= dict.fromkeys(copies, name)
        super().__init__(dense, dense_names)
        self.model = model
