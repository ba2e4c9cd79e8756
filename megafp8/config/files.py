"""Config files as trees of sections: a single file, or a file that extends another one (`base: other.yaml`).

A file with a base inherits the base's keys and overrides them with its own. Sections are merged key by key; any other
value, a list or a mapping such as the blend in `data.train`, replaces the base's value. If the file chooses another
kind, the base's options of the old kind are left out (`choices`). `name` is not inherited, because each run has its own
folder.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from os.path import expanduser
from pathlib import Path
from typing import Any

import yaml
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from megafp8.config.choices import LeftOut, leave_out_options, type_of
from megafp8.config.reader import MAX_BYTES, compose, construct, duplicate_keys, section_of
from megafp8.config.schema import Config
from megafp8.host.problems import ConfigError, Problem
from megafp8.host.shipped import shipped_configs
from megafp8.host.suggestions import did_you_mean, near_name

BASE = "base"
_HUGGING_FACE = "config.json"
_MAX_BASES = 20
_MAX_PATH_BYTES, _MAX_NAME_BYTES = 4095, 255
"""Linux limits on the length of a path and of a name in it."""


@dataclass
class Tree:
    """Sections of a file, merged with its bases.

    `lines`: the file and line in which each key was given last, by dotted path. `left_out`: options of bases that were
    left out, by file.
    """

    values: dict[str, Any]
    lines: dict[str, tuple[str, int]]
    left_out: list[tuple[str, list[LeftOut]]] = field(default_factory=list)

    def place(self, path: str, source: str) -> str:
        """Return the location of the value at a dotted path as the beginning of a message, or "" if no file gives it.

        The location is the line, preceded by the file unless the file is `source`.
        """
        if path not in self.lines:
            return ""
        file, line = self.lines[path]
        return f"line {line}: " if file == source else f"{file}, line {line}: "


def file_of(source: str) -> Path:
    """Return the file at the path `source`, or else the shipped config of that name.

    Raises ConfigError for a name that no file can have.
    """
    path = Path(expanduser(source))
    if rule := _name_problem(path):
        raise ConfigError("config", [Problem("--config", source, rule, "give the path of a YAML file")])
    return path if os.path.exists(path) else shipped_configs().get(source, path)


def _name_problem(path: Path) -> str:
    """Return the reason why no file can have this path; an empty string if one can."""
    name = os.fsencode(str(path))
    if b"\0" in name:
        return "no file has a name with a NUL character"
    longest = max(map(len, name.split(b"/")))
    if longest > _MAX_NAME_BYTES or len(name) > _MAX_PATH_BYTES:
        limits = f"a name has at most {_MAX_NAME_BYTES} bytes, and a path {_MAX_PATH_BYTES:,}"
        return f"no file has a path of {len(name):,} bytes with a name of {longest:,}: {limits}"
    return ""


def _where_it_is(path: Path) -> str:
    """Return a suggestion for a config that does not exist."""
    configs = shipped_configs()
    if path.stem in configs:
        return f"megafp8 init {path.stem} writes the shipped config, and --config {path.stem} uses it unchanged"
    near = None if path.suffix else near_name(path.name, configs)
    if near is not None:
        return f"did you mean {near}?"
    nearby = ", ".join(sorted(str(p) for p in path.parent.glob("*.yaml"))[:8])
    return did_you_mean(path, f"there is: {nearby}" if nearby else "megafp8 init lists shipped configs and writes them")


def read_tree(source: str) -> Tree:
    """Read the file `source` and its bases. Raises ConfigError, which names the file, if one cannot be read."""
    return _read(source, [], None)


def _read(source: str, chain: list[tuple[str, Path]], naming: tuple[str, str] | None) -> Tree:
    """Read a file and its bases.

    Args:
        source: Path of the file.
        chain: Files that led to this one, each as it was named and as a resolved path.
        naming: File that names this one as its base, and the line; None for the first file.
    """
    content = _read_file(source, naming)
    chain = [*chain, (source, Path(source).resolve())]
    if BASE not in content.values:
        return content
    base = content.values.pop(BASE)
    where = content.place(BASE, source)
    problem = _base_problem(base, source, chain)
    if problem is not None:
        raise ConfigError(source, [replace(problem, where=where)])
    if "name" not in content.values:
        rule = f"not inherited from {BASE}, because each run has its own folder"
        raise ConfigError(source, [Problem("name", None, rule, "add it")])
    path = str(_base_path(source, base))
    inherited = _read(path, chain, (source, where))
    values = _merged(inherited.values, content.values, Config)
    left_out = list(leave_out_options(inherited.values, values, content.values, Config))
    lines = inherited.lines | content.lines
    return Tree(values, lines, [*inherited.left_out, (path, left_out)])


def _base_path(source: str, base: str) -> Path:
    """Return the file that `source` names as its base: a path relative to `source`, or else a shipped config."""
    path = Path(source).parent / expanduser(base)
    return path if os.path.exists(path) else shipped_configs().get(base, path)


def _base_problem(base: object, source: str, chain: list[tuple[str, Path]]) -> Problem | None:
    """Return the problem of a base that cannot be read, or None."""
    if not isinstance(base, str) or not base:
        return Problem(BASE, base, "this is the path of another config", "for example base: llama3-8b.yaml")
    if "://" in base:
        return Problem(BASE, base, "configs are read from local files", "copy it to this file's folder")
    if rule := _name_problem(Path(source).parent / base):
        return Problem(BASE, base, rule, "for example base: llama3-8b.yaml")
    path = _base_path(source, base)
    names = [name for name, _ in chain]
    if path.resolve() in [resolved for _, resolved in chain]:
        rule = f"a file cannot be its own base: {' -> '.join([*names, str(path)])}"
        return Problem(BASE, base, rule, "name another file, or leave it out")
    if len(chain) > _MAX_BASES:
        rule = f"this is base number {len(chain)} of {names[0]}, and a config has at most {_MAX_BASES}"
        return Problem(BASE, base, rule, "merge some of the files")
    if os.path.exists(path) and not os.path.isfile(path):
        return Problem(BASE, base, f"{path} is not a regular file", "name the YAML file of a config")
    return None


def _merged(base: Mapping[str, Any], own: Mapping[str, Any], annotation: Any) -> dict[str, Any]:
    """Return the section `base` updated with the keys of `own`, recursively for sections."""
    section, merged = section_of(annotation), dict(base)
    for key, value in own.items():
        inner, before = type_of(annotation, section, key), base.get(key)
        if isinstance(before, dict) and isinstance(value, dict) and section_of(inner) is not None:
            merged[key] = _merged(before, value, inner)
        else:
            merged[key] = value
    return merged


def _read_file(source: str, naming: tuple[str, str] | None) -> Tree:
    """Return the sections of one file.

    No message quotes a base that is not a YAML mapping: it may be any file of the user.

    Args:
        source: Path of the file.
        naming: File that names this one as its base, and the line, for messages; None for the first file.
    """
    path = Path(source)
    if (path / _HUGGING_FACE).is_file():
        path = path / _HUGGING_FACE
    try:
        with path.open("rb") as stream:
            content = stream.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            rule = f"it is larger than {MAX_BYTES:,} bytes, the limit for a config"
            raise ConfigError(source, [Problem("(file)", "…", rule, "give the YAML file of a config")])
        text = content.decode()
    except OSError as error:
        named, key, where = (source, "--config", "") if naming is None else (naming[0], BASE, naming[1])
        problem = Problem(key, source, f"{error.strerror}", _where_it_is(path), where)
        raise ConfigError(named, [problem]) from None
    except UnicodeDecodeError as error:
        rule = f"not UTF-8: byte {error.start} is 0x{error.object[error.start]:02x}"
        raise ConfigError(source, [Problem("(file)", "…", rule, "save it as UTF-8")]) from None
    try:
        node = compose(text)
        duplicates = []
        for d in list(duplicate_keys(node)):  # list all, before merge keys are resolved in place
            rule = f"line {d.second}: line {d.first} has this key already"
            duplicates.append(Problem(d.path, construct(d.value), rule, "keep one of them"))
        tree = construct(node)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f": {error}"
        if naming is not None and mark is not None:
            where = f" at line {mark.line + 1}, column {mark.column + 1}"
        raise ConfigError(source, [Problem("(file)", "…", f"not valid YAML{where}", "correct that line")]) from None
    if duplicates:
        raise ConfigError(source, duplicates)
    if not isinstance(tree, dict):
        rule = "the file must hold a mapping of sections"
        raise ConfigError(source, [Problem("(file)", "…", rule, "start from a shipped config: megafp8 init")])
    if "model_type" in tree or "architectures" in tree:
        raise ConfigError(source, [_model_of_hugging_face(path)])
    return Tree(tree, {name: (source, line) for name, line in _lines(node, "")})


def _model_of_hugging_face(path: Path) -> Problem:
    """Return the problem for a Hugging Face model that is given as the config of a run."""
    folder = path.parent
    train = f'to train it, write a config with "checkpoint: {{init_from: {folder}}}", which needs no model section'
    use = f"megafp8 generate {folder} and megafp8 evaluate {folder} use it directly, and megafp8 convert converts it"
    return Problem("(file)", str(path), "this describes a Hugging Face model, not a run of megafp8", f"{train}; {use}")


def _lines(node: Node | None, path: str) -> Iterator[tuple[str, int]]:
    """Yield the dotted path and the line, counted from 1, of each key and each list item."""
    pairs: list[tuple[object, Node, Node]] = []
    if isinstance(node, MappingNode):
        pairs = [(key.value, key, value) for key, value in node.value if isinstance(key, ScalarNode)]
    elif isinstance(node, SequenceNode):
        pairs = [(i, item, item) for i, item in enumerate(node.value)]
    for name, marked, value in pairs:
        yield f"{path}{name}", marked.start_mark.line + 1
        yield from _lines(value, f"{path}{name}.")
