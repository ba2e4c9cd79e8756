"""Loading of a `Config` from a YAML file and dotted overrides, with precise errors."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from os.path import expanduser
from pathlib import Path
from typing import Any, NamedTuple, get_args

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from megafp8.config.choices import leave_out_options, report
from megafp8.config.files import BASE, Tree, file_of, read_tree
from megafp8.config.key_names import advice
from megafp8.config.reader import compose, member_with, members, override_value, section_of, section_of_kind
from megafp8.config.schema import Config
from megafp8.host.problems import ConfigError, Problem
from megafp8.host.shipped import shipped_configs

Completion = Callable[[dict[str, Any], str], None]
"""Function that completes a tree of sections in place. Its second argument is the file from which the tree was read."""


def config_and_overrides(config: str | None, words: Sequence[str]) -> tuple[str | None, list[str]]:
    """Return the path of the config, or None, and the overrides of a command line.

    Args:
        config: Value of `--config`. If it is None, the first word may be the path instead.
        words: Words of the command line that belong to no option.
    """
    if config is None and words and "=" not in words[0]:
        config, *words = words
    return None if config is None else expanduser(config), list(words)


def load_config(path: str | Path, overrides: Sequence[str] = (), complete: Completion | None = None) -> Config:
    """Read a config file with its bases, apply overrides, complete the tree, and validate it.

    Args:
        path: Config file, or the name of a shipped config such as `llama3-8b` if no file has that name.
        overrides: Dotted overrides such as `parallel.tensor=2`. A value is YAML, or for a text field the text itself
            (`reader.override_value`). An override that chooses another kind, such as `fp8.recipe`, leaves out the
            file's options of the old kind (`choices`).
        complete: Function that completes the tree. It is called if checkpoint.init_from is given.

    Raises:
        ConfigError: A file cannot be read or parsed, a key is given twice, an override is not `key=value`, a key is
            unknown (the message suggests the nearest valid name), or a value has the wrong type or is out of range (the
            message states the rule).
    """
    source = str(file_of(str(path)))
    read = read_tree(source)
    tree = read.values
    before, changes = copy.deepcopy(tree), dict[str, Any]()
    for override in overrides:
        key, value = _apply(tree, override, source)
        section, name = holder_of(changes, key, value, source)
        section[name] = value
    left_out = list(leave_out_options(before, tree, changes, Config))
    checkpoint = tree.get("checkpoint")
    if complete is not None and isinstance(checkpoint, dict) and checkpoint.get("init_from") is not None:
        complete(tree, source)
    try:
        config = Config.model_validate(tree)
    except ValidationError as error:
        problems = explain(error.errors())
        raise ConfigError(source, [replace(p, where=_where(p.path, read, changes, source)) for p in problems]) from None
    for file, options in (*read.left_out, (source, left_out)):
        report(options, config, file)
    return config


def _where(path: str, read: Tree, given: Mapping[str, Any], source: str) -> str:
    """Return the file and line of the value at `path`; an empty string if the overrides in `given` set it."""
    node: Any = given
    for key in path.split("."):
        if not isinstance(node, dict) or key not in node:
            return read.place(path, source) if isinstance(node, dict) else ""
        node = node[key]
    return ""


def _apply(tree: dict[str, Any], override: str, source: str) -> tuple[str, Any]:
    """Apply one dotted override in place, and return its key and value."""
    key, equals, text = override.partition("=")
    if not equals or not key:
        problem = Problem("(override)", override, "an override has the form key=value", "for example parallel.tensor=2")
        raise ConfigError(source, [problem])
    if key == BASE:
        problem = Problem(BASE, text, "only a file can name its base", "give that file as the config")
        raise ConfigError(source, [problem])
    node, leaf = holder_of(tree, key, text, source)
    try:
        node[leaf] = override_value(text, _locate(key.split(".")).annotation)
        return key, node[leaf]
    except yaml.YAMLError as error:
        why = getattr(error, "problem", None) or error
        problem = Problem(key, text, f"the value is not valid YAML: {why}", "quote it, for example name='\"a: b\"'")
        raise ConfigError(source, [problem]) from None


def holder_of(tree: dict[str, Any], key: str, value: object, source: str) -> tuple[dict[str, Any], str]:
    """Return the section of `tree` that holds the dotted `key`, and the key's name in it. Create missing sections.

    Raises ConfigError, which shows `value`, if a parent of the key is not a section.
    """
    *parents, leaf = key.split(".")
    node = tree
    for i, parent in enumerate(parents):
        child = node.setdefault(parent, {})
        if child is None:
            child = node[parent] = {}
        if not isinstance(child, dict):
            where = ".".join(parents[: i + 1])
            problem = Problem(key, value, f"{where} holds the value {child!r}, not a section", f"set {where} itself")
            raise ConfigError(source, [problem])
        node = child
    return node, leaf


class _Place(NamedTuple):
    """Location in the config: keys and indices of its path, and the section and type of the value at this path.

    `section` and `annotation` are None if unknown. `union`: path of the union-typed field that contains the location.
    """

    path: tuple[str, ...]
    section: type[BaseModel] | None
    annotation: Any
    is_key: bool
    union: tuple[str, ...] | None


def _locate(location: Sequence[int | str]) -> _Place:
    """Resolve a location in pydantic's form along the types of the config.

    In addition to keys and indices, such a location contains the union member that was tried, and `[key]` if the key of
    a mapping is wrong, not its value.
    """
    path: list[str] = []
    section: type[BaseModel] | None = None
    annotation: Any = Config
    union = None
    is_key = False
    for part in location:
        if union is None and len(members(annotation)) > 1:
            union = tuple(path)
            kind = {"list": (list,), "tuple": (tuple,), "dict": (dict,)}.get(str(part).partition("[")[0], ())
            annotation = member_with(annotation, *kind) if kind else section_of_kind(annotation, part)
            continue
        if part == "[key]":
            is_key = True
            continue
        path.append(str(part))
        section = section_of(annotation)
        if section is not None:
            field = section.model_fields.get(str(part))
            annotation = None if field is None else field.annotation
        else:
            inner = get_args(member_with(annotation, list, tuple, dict))
            annotation = inner[-1] if inner else None
    return _Place(tuple(path), section, annotation, is_key, union)


_EXAMPLE = "llama3-8b"
"""Shipped config that provides the examples in messages."""
_WRONG_KIND = ("_type", "_parsing", "literal_error")
"""Suffixes of pydantic's error types for a value that has another kind than the type."""


def explain(errors: Sequence[ErrorDetails]) -> list[Problem]:
    """Return pydantic's errors about a tree of sections as Problems.

    For a union, pydantic reports the errors of every member. Only errors of members that have the same kind as the
    value are kept; if no member has, all errors are merged into one Problem.
    """
    placed = [(error, _locate(error["loc"])) for error in errors]
    fitting = {place.union for error, place in placed if place.union is not None and _is_of_kind(error, place)}
    problems: list[Problem] = []
    merged: dict[tuple[str, ...], list[ErrorDetails]] = {}
    for error, place in placed:
        if error["type"] == "missing" and place.union is None:
            problems += _missing(place)
        elif place.union is None or (place.union in fitting and _is_of_kind(error, place)):
            problems.append(_problem(error, place))
        elif place.union not in fitting:
            merged.setdefault(place.union, []).append(error)
    return [*problems, *(_union_problem(path, of) for path, of in merged.items())]


def _is_of_kind(error: ErrorDetails, place: _Place) -> bool:
    return place.path != place.union or not error["type"].endswith(_WRONG_KIND)


def _union_problem(path: tuple[str, ...], errors: Sequence[ErrorDetails]) -> Problem:
    rules = dict.fromkeys(_rule(error) for error in errors)
    return Problem(".".join(path), errors[0]["input"], ", or ".join(rules), _meaning(_locate(path)))


def _rule(error: ErrorDetails) -> str:
    return error["msg"][0].lower() + error["msg"][1:]


def _missing(place: _Place) -> Iterator[Problem]:
    """Yield a problem with an example for a missing key, or for each required key of a missing section."""
    section = section_of(place.annotation)
    if section is not None:
        for name, field in section.model_fields.items():
            if field.is_required():
                yield from _missing(_Place((*place.path, name), section, field.annotation, False, None))
        return
    sections, name = place.path[:-1], place.path[-1]
    example = _example(place.path)
    works = f"add it; {_meaning(place)}"
    if example is not None:
        text = f"{name}: {example}"
        for key in reversed(sections):
            text = f"{key}: {{{text}}}"
        works = f'add "{text}"'
    yield Problem.missing(".".join(place.path), works)


def _example(path: Sequence[str]) -> str | None:
    """Return the value of a key in a shipped config, as YAML; None if no shipped config has the key."""
    configs = shipped_configs()
    for file in (configs[_EXAMPLE], *configs.values()):
        node = compose(file.read_text(encoding="utf-8"))
        for key in path:
            keys = node.value if isinstance(node, yaml.MappingNode) else ()
            node = next((value for name, value in keys if name.value == key), None)
        if node is not None:
            return str(yaml.serialize(node)).removesuffix("...\n").strip()
    return None


def _problem(error: ErrorDetails, place: _Place) -> Problem:
    path, value, kind = ".".join(place.path), error["input"], error["type"]
    names = [] if place.section is None else list(place.section.model_fields)
    if kind == "extra_forbidden" and place.section is not None:
        return Problem(path, value, "there is no such key", advice(path, value, names))
    if kind in ("model_type", "model_attributes_type"):
        section = section_of(place.annotation)
        keys = "" if section is None else f": {', '.join(section.model_fields)}"
        return Problem(path, value, "this is a section, a mapping of keys", f"its keys{keys}")
    if kind == "string_type" and isinstance(value, (bool, int, float)):
        text = str(value).lower() if isinstance(value, bool) else str(value)
        of = "a key here" if place.is_key else "this key"
        return Problem(path, value, f"{of} is text, but YAML reads this value as another type", f'quote it: "{text}"')
    if kind == "string_pattern_mismatch":  # `section.Name` is the only type with a pattern
        rule = "a name consists of letters, digits, '.', '_' and '-', and begins with a letter or digit"
        valid = re.sub("[^A-Za-z0-9._-]+", "-", value).lstrip("._-")
        return Problem(path, value, rule, f"try {valid or 'run-1'}")
    return Problem(path, value, _rule(error), _meaning(place))


def _meaning(place: _Place) -> str:
    """Return a hint from the field's default and the first sentence of its documentation."""
    field = None if place.section is None else place.section.model_fields.get(place.path[-1])
    if field is None or not field.description:
        return "see --print-schema"
    first_sentence = re.split(r"(?<=\.)(?<!e\.g\.) ", " ".join(field.description.split()))[0]
    works = f"its meaning: {first_sentence}"
    if not field.is_required() and field.default is not None:
        works = f"for example {field.default!r}; {works}"
    return works
