"""A dense model read as a mixture of experts: every expert is a copy of the layer's MLP (sparse upcycling).

Komatsuzaki et al. 2022, arXiv:2212.05055. With weights that add up to 1, the experts chosen for a token together
compute what the MLP did, so training continues at the loss of the dense model. Routers are not in the dense model: they
begin at random, and different tokens then make the copies differ.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from megafp8.checkpoint.rectangles import TensorInfo
from megafp8.config import ModelConfig, Problem
from megafp8.conversion.base import Source

_EXPERT = re.compile(r"(\.mlp)\.experts\.\d+\.")


def problems(model: ModelConfig) -> Iterator[Problem]:
    """Why a model of experts cannot begin as copies of a dense model's MLPs."""
    moe = model.moe
    assert moe is not None
    if model.expert_size != model.ffn_size:
        rule = f"an expert begins as a copy of the MLP of checkpoint.init_from, which is {model.ffn_size} wide"
        yield Problem("model.moe.ffn_hidden_size", moe.ffn_hidden_size, rule, "leave it out")
    same = "the experts of a token must add up to the MLP of checkpoint.init_from that they begin as"
    if not moe.normalize:
        yield Problem("model.moe.normalize", False, same, "try true")
    if moe.scaling_factor != 1.0:
        yield Problem("model.moe.scaling_factor", moe.scaling_factor, same, "try 1.0")
    if moe.latent_size is not None:
        yield Problem("model.moe.latent_size", moe.latent_size, same, "leave it out")
    if moe.shared_ffn_hidden_size is not None:
        yield Problem("model.moe.shared_ffn_hidden_size", moe.shared_ffn_hidden_size, same, "leave it out")


def is_router(name: str) -> bool:
    """Whether the tensor `name` belongs to a router, which no dense model has."""
    return ".mlp.router." in name


class UpcycledSource(Source):
    """`dense` with its MLPs as the experts of `model`; without routers."""

    def __init__(self, dense: Source, model: ModelConfig) -> None:
        assert model.moe is not None
        self._dense = dense
        self.path: Path = dense.path
        self.model = model
        self.about: Mapping[str, Any] = dense.about
        self.tokenizer_files: Collection[Path] = dense.tokenizer_files
        tensors: dict[str, TensorInfo] = {}
        for name, info in dense.tensors.items():
            copies = [name]
            if (layer := re.search(r"\.layers\.(\d+)\.mlp\.", name)) and model.moe_of(int(layer[1])) is not None:
                copies = [name.replace(".mlp.", f".mlp.experts.{e}.") for e in range(model.moe.num_experts)]
            tensors |= dict.fromkeys(copies, info)
        self.tensors: Mapping[str, TensorInfo] = tensors

    def read(self, name: str) -> Tensor:
        return self._dense.read(_EXPERT.sub(r"\1.", name))

    def read_rows(self, name: str, first: int, last: int) -> Tensor:
        return self._dense.read_rows(_EXPERT.sub(r"\1.", name), first, last)
