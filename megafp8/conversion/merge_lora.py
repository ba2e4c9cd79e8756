"""A checkpoint of a run with LoRA as one of the whole model: W + (alpha / rank) · B A in place of W, A and B.

The product is made in fp32, of the masters where they are saved, and the sum is rounded to W's dtype. Optimizer state,
which is that of A and B, is left out.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from megafp8.checkpoint.rectangles import TensorInfo
from megafp8.conversion.base import Source
from megafp8.tensor_parallel.lora import A, B, is_lora

_MODEL = "model."


def merged(source: Source) -> Source:
    """`source` with A and B merged into the weights, if it is of a run with LoRA; else itself."""
    lora = (source.about.get("config") or {}).get("lora")
    return source if lora is None else MergedSource(source, lora["alpha"] / lora["rank"])


class MergedSource:
    """`source` with `scale` · B A added to the weights that have an A and a B."""

    def __init__(self, source: Source, scale: float) -> None:
        self._source, self._scale = source, scale
        self.path: Path = source.path
        self.model = source.model
        config = {**source.about["config"], "lora": None}
        self.about: Mapping[str, Any] = {**source.about, "config": config}
        self.tokenizer_files: Collection[Path] = source.tokenizer_files
        self.tensors: Mapping[str, TensorInfo] = {
            name: info for name, info in source.tensors.items() if name.startswith(_MODEL) and not is_lora(name)
        }

    def read(self, name: str) -> Tensor:
        return self._merged(name, self._source.read(name), slice(None))

    def read_rows(self, name: str, first: int, last: int) -> Tensor:
        return self._merged(name, self._source.read_rows(name, first, last), slice(first, last))

    def _merged(self, name: str, weight: Tensor, rows: slice) -> Tensor:
        """`weight`, which are `rows` of the tensor `name`, with its part of the product."""
        stem = name.removesuffix(".weight")
        if f"{stem}.{A}" not in self._source.tensors:
            return weight
        a, b = self._most_precise(f"{stem}.{A}"), self._most_precise(f"{stem}.{B}")[rows]
        return (weight.float() + self._scale * (b.float() @ a.float())).to(weight.dtype)

    def _most_precise(self, name: str) -> Tensor:
        master = f"optimizer.master.{name.removeprefix(_MODEL)}"
        return self._source.read(master if master in self._source.tensors else name)
