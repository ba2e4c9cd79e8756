"""From a YAML file and dotted overrides to a `Config`, or to an error that can be acted upon."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from megafp8.config.errors import ConfigError, Problem
from megafp8.config.tree import Config

Completion = Callable[[dict[str, Any], str], None]
"""Fills in, in place, what a tree of sections leaves out; the second argument is the file that it came from."""


def load_config(path: str | Path, overrides: Sequence[str] = (), complete: Completion | None = None) -> Config:
    """Read `path`, apply overrides such as `parallel.tensor=2` (values are YAML), `complete` the tree, and validate.

    Raises ConfigError for a file that cannot be read or parsed, an override that is not `key=value`, an unknown key
    (with the nearest valid name) and a wrong type or range (with the rule).
    """
    source = str(path)
    try:
        tree = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        nearby = ", ".join(sorted(str(p) for p in Path(path).parent.glob("*.yaml"))[:8]) or "no .yaml file beside it"
        raise ConfigError(source, [Problem("--config", source, f"{error.strerror}", f"there is: {nearby}")]) from None
    except yaml.YAMLError as error:
        raise ConfigError(source, [Problem("(file)", "…", f"not valid YAML: {error}", "mend the line named")]) from None
    if not isinstance(tree, dict):
        problem = Problem(
            "(file)", tree, "the file must hold a mapping of sections", "start from configs/quickstart.yaml"
        )
        raise ConfigError(source, [problem])
    for override in overrides:
        _apply(tree, override, source)
    if complete is not None:
        complete(tree, source)
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(source, [_explain(e) for e in error.errors()]) from None


def _apply(tree: dict[str, Any], override: str, source: str) -> None:
    """Set one dotted override in place."""
    key, equals, text = override.partition("=")
    if not equals or not key:
        problem = Problem("(override)", override, "an override is key=value", "for example parallel.tensor=2")
        raise ConfigError(source, [problem])
    *parents, leaf = key.split(".")
    node = tree
    for i, parent in enumerate(parents):
        child = node.setdefault(parent, {})
        if child is None:
            child = node[parent] = {}
        if not isinstance(child, dict):
            where = ".".join(parents[: i + 1])
            problem = Problem(key, text, f"{where} holds the value {child!r}, not a section", f"set {where} itself")
            raise ConfigError(source, [problem])
        node = child
    try:
        node[leaf] = yaml.safe_load(text)
    except yaml.YAMLError:
        problem = Problem(key, text, "the value is not valid YAML", "quote it, for example name='\"a: b\"'")
        raise ConfigError(source, [problem]) from None


def _section_at(path: tuple[int | str, ...]) -> type[BaseModel] | None:
    """The section class that `path` leads to, walking the annotations."""
    section: type[BaseModel] = Config
    for key in path:
        field = section.model_fields.get(str(key))
        candidates = () if field is None else (field.annotation, *getattr(field.annotation, "__args__", ()))
        found = next((c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)), None)
        if found is None:
            return None
        section = found
    return section


def _explain(error: ErrorDetails) -> Problem:
    """One of pydantic's errors as a Problem."""
    location = error["loc"]
    path = ".".join(str(part) for part in location)
    section = _section_at(location[:-1])
    if error["type"] == "extra_forbidden" and section is not None:
        names = list(section.model_fields)
        near = difflib.get_close_matches(str(location[-1]), names, n=1, cutoff=0.5)
        works = (
            f"did you mean {'.'.join([*map(str, location[:-1]), near[0]])}?" if near else f"valid: {', '.join(names)}"
        )
        return Problem(path, error["input"], "there is no such key", works)
    if error["type"] == "missing":
        return Problem(
            path, None, "this key is required and has no default", "add it; --print-schema says what it means"
        )
    field = section.model_fields.get(str(location[-1])) if section is not None else None
    works = (
        f"its meaning: {field.description.split(chr(10))[0]}"
        if field is not None and field.description
        else "see --print-schema"
    )
    if field is not None and not field.is_required() and field.default is not None:
        works = f"for example {field.default!r}; {works}"
    return Problem(path, error["input"], error["msg"][0].lower() + error["msg"][1:], works)
