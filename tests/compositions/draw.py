"""Random configs that the config's checks accept: a small one in which keys are changed one after another.

A composition is a config file of this folder, overrides as on a command line, and a number of ranks, so that a command
repeats it: `Composition.command`. Keys and values are drawn from the schema (`values`).
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from megafp8.config import Config, ConfigError, Problem, check_layout, fewest_ranks, load_config
from megafp8.config.reader import section_of
from megafp8.section import Section
from megafp8.training.fp8_config import build_fp8, check_recipe
from tests.compositions.values import drawable, value

FOLDER = Path(__file__).parent
BASES = {"gpt": 6, "experts": 4, "latent": 2, "documents": 2, "bert": 1, "pairs": 1, "t5": 1}
"""Config files of this folder, and how often one is drawn among all."""
LARGEST = (2, 4, 4, 8, 8)
"""Ranks of a composition, at most."""
COPIES = (1, 1, 2, 2, 2, 4)
"""Ranks of a composition, by the fewest that its layout runs on."""
SIZES = (2, 2, 2, 3, 4)
"""Ranks, or stages, of an axis that has several."""
SEVERAL = 0.4
"""Probability that an axis is to have several."""
REMEMBERED = 6
"""Changes that were refused and are tried again, after others and together with them."""
NOT_PROVEN = {
    "name", "base", "run_dir", "device", "timeout_seconds", "stages", "checkpoint", "logging", "resilience", "profile",
    "model.architecture", "model.vocab_size", "model.vocab_multiple",
    "training.precision", "training.loss_scale", "training.cuda_graphs", "training.eval_interval",
    "training.eval_steps", "training.evaluate", "training.stop_after", "training.gc_interval",
    "optimizer.reduce_dtype", "optimizer.store_param_remainders",
    "fp8.auto_filter", "fp8.gemm_backend", "fp8.gemm_autotune", "fp8.report_interval",
    "data.tokenizer", "data.validation", "data.validation_by_source", "data.special_tokens", "data.split",
    "data.restart_changed", "data.num_workers", "data.streams", "data.index_cache", "data.object_cache",
    "data.masked_lm.whole_words",
}  # fmt: skip
"""Keys that do not bear on what a proof computes, or that `megafp8.prove` gives values of its own."""


@dataclass(frozen=True)
class Composition:
    """A config file of this folder with changed keys, on some ranks."""

    base: str
    ranks: int
    overrides: Mapping[str, Any]

    @property
    def unchecked(self) -> Config:
        """The config, which may break rules between keys. Raises ConfigError if the schema does not have it."""
        words = [f"{key}={json.dumps(value)}" for key, value in self.overrides.items()]
        return load_config(FOLDER / f"{self.base}.yaml", words)

    @property
    def config(self) -> Config:
        """Raises ConfigError if it cannot run."""
        config = self.unchecked
        check_layout(config, self.ranks)
        check_recipe(config, config.name)
        try:
            build_fp8(config, None)
        except ValueError as error:  # patterns of layers that the model lacks, which a run refuses after its config
            raise ConfigError(config.name, [Problem("fp8", "set", str(error), "leave it out")]) from None
        return config

    @property
    def command(self) -> str:
        """What proves it."""
        file = f"tests/compositions/{self.base}.yaml"
        words = (f"{key}={json.dumps(value)}" for key, value in self.overrides.items())
        return " ".join(["megafp8 prove", file, f"--ranks {self.ranks}", *(f"'{word}'" for word in words)])


class Key(NamedTuple):
    """A key of the config with dots, its declaration, how often it is changed, and whether it chooses what others
    mean."""

    path: str
    field: FieldInfo
    weight: float
    chooses: bool


@cache
def keys() -> list[Key]:
    """The keys that are changed: those of sections that are always there; other sections are drawn whole.

    A key that holds more keys, such as a section that may be absent, is changed more often, and so is one that chooses
    what others mean (`Section.choices`); numbers of ranks have a turn of their own (`axes`).
    """

    def walk(cls: type[BaseModel], prefix: str) -> Iterator[Key]:
        for name, field in drawable(cls).items():
            path, inner = f"{prefix}{name}", section_of(field.annotation)
            if path in NOT_PROVEN:
                continue
            if inner is not None and (isinstance(field.default, Section) or field.is_required()):
                yield from walk(inner, f"{path}.")
                continue
            chooses = issubclass(cls, Section) and name in cls.choices
            yield Key(path, field, math.sqrt(_size(cls) if chooses else _held(field)), chooses)

    return list(walk(Config, ""))


def _held(field: FieldInfo) -> int:
    """Keys of the sections in a field's type, itself among them; examples, if there are more."""
    return max(1 + sum(_size(cls) for cls in _sections(field.annotation)), len(field.examples or ()))


def _size(cls: type[BaseModel]) -> int:
    return sum(_held(field) for field in cls.model_fields.values())


def _sections(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in getattr(annotation, "__args__", ()):
        yield from _sections(inner)


@cache
def axes() -> list[Key]:
    """Numbers of ranks and of stages, which are 1 by default."""
    return [key for key in keys() if key.path.startswith("parallel.") and repr(key.field.default) == "1"]


@cache
def _by_section() -> dict[str, list[Key]]:
    """Keys but for `axes`, by their first section."""
    found: dict[str, list[Key]] = {}
    for key in keys():
        if key not in axes():
            found.setdefault(key.path.partition(".")[0], []).append(key)
    return found


class _Draft:
    """A config being changed, as long as it is accepted."""

    def __init__(self, base: str, copies: int, most: int) -> None:
        self.tree: dict[str, Any] = yaml.safe_load((FOLDER / f"{base}.yaml").read_text())
        self.overrides: dict[str, Any] = {}
        self._limits = copies, most
        self.ranks = _ranks(self.tree, *self._limits) or 1

    def accepts(self, change: Mapping[str, Any]) -> bool:
        """Whether the config is accepted with the change, which then is made."""
        changed = _with(self.tree, change)
        ranks = _ranks(changed, *self._limits)
        if ranks is None:
            return False
        self.tree, self.ranks = changed, ranks
        self.overrides |= change
        return True


def draw(random: Random, base: str | None = None) -> Composition:
    """A composition that the config's checks accept; `base`: its config file, drawn too where none is given."""
    base = base or random.choices([*BASES], [*BASES.values()])[0]
    draft = _Draft(base, random.choice(COPIES), random.choice(LARGEST))
    refused: list[dict[str, Any]] = []
    for change in _changes(random, draft.tree):
        if all(_at(draft.tree, path) == new for path, new in change.items()):
            continue
        if draft.accepts(change):
            refused = [earlier for earlier in refused if not draft.accepts(earlier)]  # they may have needed this one
            continue
        needed = next((earlier for earlier in refused if draft.accepts({**earlier, **change})), None)  # or each other
        refused = [x for x in refused if x is not needed] if needed else [*refused, change][-REMEMBERED:]
    composition = Composition(base, draft.ranks, draft.overrides)
    try:
        _ = composition.config
    except ConfigError:
        return draw(random, base)
    return composition


def _changes(random: Random, tree: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Changes of one key, or of keys that mean nothing alone."""

    def drawn(key: Key) -> Any:
        return value(random, key.field, _at(tree, key.path))

    for key in random.sample(axes(), len(axes())):
        if random.random() < SEVERAL:
            yield {key.path: random.choice(SIZES)}
    chosen = list[Key]()
    for of_section in _by_section().values():
        weights = [key.weight for key in of_section]
        chosen += random.choices(of_section, weights, k=random.randint(0, 2 * round(math.sqrt(sum(weights)))))
    random.shuffle(chosen)
    chosen.sort(key=lambda key: not key.chooses)
    for key in chosen:
        change = {key.path: drawn(key)}
        if key.path == "model.layer_kinds":  # the pattern names them
            names = [name for name in change[key.path] for _ in range(random.randint(1, 2))]
            change["model.pattern"] = random.sample(names, len(names))
        if key.path != "model.pattern":
            yield change


def _with(tree: Mapping[str, Any], change: Mapping[str, Any]) -> dict[str, Any]:
    changed = copy.deepcopy(dict(tree))
    for path, value_ in change.items():
        *parents, leaf = path.split(".")
        node = changed
        for parent in parents:
            node = node.setdefault(parent, {})
        node[leaf] = value_
    return changed


def _at(tree: Mapping[str, Any], path: str) -> Any:
    """The value of a key; the default where none is given."""
    node: Any = tree
    section: Any = Config
    for part in path.split("."):
        field = section.model_fields[part]
        node = node[part] if isinstance(node, dict) and part in node else field.default
        section = section_of(field.annotation)
    return node.model_dump(mode="json") if isinstance(node, BaseModel) else node


def _ranks(tree: dict[str, Any], copies: int, most: int) -> int | None:
    """Ranks of a config: of the numbers up to `copies` times the fewest that it runs on, and up to `most`, the largest
    that it accepts; None if it accepts none."""
    try:
        config = Config.model_validate(tree)
        least = fewest_ranks([config])
    except ValidationError:
        return None
    for ranks in range(copies * least, 0, -least):
        if ranks <= most and _is_accepted(config, ranks):
            return ranks
    return None


def _is_accepted(config: Config, ranks: int) -> bool:
    try:
        check_layout(config, ranks)
        check_recipe(config, config.name)
    except ConfigError:
        return False
    return True
