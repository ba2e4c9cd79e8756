"""What a record of a kind of layer answers, beside its keys.

A record is what YAML says of one part of a layer. It imports no torch; `module` says which module is built from it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from megafp8.config.errors import Problem
from megafp8.section import PartialSection

if TYPE_CHECKING:
    from typing_extensions import Self

ModelSection: TypeAlias = Any
"""`ModelConfig` of `megafp8.config.schema`, which is made of parts and so imports these files."""

RunConfig: TypeAlias = Any
"""`Config` of `megafp8.config.schema`."""


class PartConfig(PartialSection):
    """The record of a mixer or of a feed-forward network. Keys that are not given are those of the model section."""

    module: ClassVar[str]
    """Where its module is, `module:class`; built as `class(name, record, model, context, ...)`."""

    tensor_prefix: ClassVar[str]
    """Its part of the names of its tensors: layers.0.<tensor_prefix>.*."""

    def resolved(self, model: ModelSection) -> Self:
        """The record with a value for each key, as modules read it."""
        return self

    @property
    def shares_context(self) -> bool:
        """Whether sequences that begin alike can share what is computed of their beginning. Of a resolved record."""
        return True

    def widths(self, model: ModelSection) -> Mapping[str, int]:
        """Numbers, by key, that tensor parallelism divides. Only for a resolved record."""
        return {}

    def lora_targets(self, model: ModelSection) -> tuple[str, ...]:
        """Its linear layers that LoRA can adapt."""
        return ()

    def problems(self, model: ModelSection, path: str) -> Iterator[Problem]:
        """Rules that its keys, at `path`, break in any run of the model."""
        return iter(())

    def run_problems(self, config: RunConfig, path: str) -> Iterator[Problem]:
        """Rules between it and the rest of a run."""
        return iter(())
