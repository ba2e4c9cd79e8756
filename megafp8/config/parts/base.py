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
    """Where its module is defined, as `module:class`; `models.mixer.make_part` builds it."""

    tensor_prefix: ClassVar[str]
    """The prefix of its tensors' names within a layer: layers.0.<tensor_prefix>.*."""

    present: ClassVar[bool] = True
    """Whether there is such a part: with a norm, and weights."""

    hugging_face: ClassVar[Mapping[str, str]] = {}
    """Names of its modules, or parameters, in the layers of most Hugging Face families; `conversion.families` has those
    of others. Experts' have a * for the number."""

    megatron: ClassVar[Mapping[str, str]] = {}
    """Names of its modules, or parameters, in Megatron core's layers; several modules may be rows of one tensor."""

    def resolved(self, model: ModelSection) -> Self:
        """The record with a value for each key, as modules read it."""
        return self

    @property
    def shares_context(self) -> bool:
        """Whether sequences that begin alike can share what is computed of their beginning. For a resolved record."""
        return not self.is_recurrent

    @property
    def is_recurrent(self) -> bool:
        """Whether it passes a state from token to token, and attends to none."""
        return False

    @property
    def no_qk_clip(self) -> str | None:
        """Why weights cannot be scaled to lower its attention logits; empty: they can; None: it has no such logits. For
        a resolved record."""
        return None

    def normed(self, model: ModelSection) -> bool:
        """Whether its layer normalizes its input, where model.norm_position says so; else it does so itself."""
        return self.present

    def index_loss(self, model: ModelSection) -> float | None:
        """Weight of the loss of its indexer; None where it has none."""
        return None

    def widths(self, model: ModelSection) -> Mapping[str, int]:
        """Sizes, by key, that tensor parallelism divides between its ranks. For a resolved record."""
        return {}

    def lora_targets(self, model: ModelSection) -> tuple[str, ...]:
        """Names of its linear layers that LoRA can adapt."""
        return ()

    def problems(self, model: ModelSection, path: str) -> Iterator[Problem]:
        """The rules that its keys, which stand at `path`, break whatever else a run has."""
        return iter(())

    def run_problems(self, config: RunConfig, path: str) -> Iterator[Problem]:
        """The rules between its keys, which stand at `path`, and other sections that a run breaks."""
        return iter(())
