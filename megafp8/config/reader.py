"""YAML parsing for configs, and parsing of override values by the type of their field.

A plain scalar is null, true, false, an integer, a float, or text. PyYAML follows YAML 1.1, in which `off` and `no` are
booleans, 12:30 is 750, 010 is 8 and 2024-01-01 is a date. Here, all of these are text, and a boolean field still
accepts the texts `on` and `off`. Files written by PyYAML are read back unchanged.

Duplicate keys are an error; anchors, aliases and merge keys (`<<: *base`) work as in PyYAML.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from types import NoneType, UnionType
from typing import Annotated, Any, NamedTuple, Union, get_args, get_origin

import yaml
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from megafp8.section import Section

_TEXT = "tag:yaml.org,2002:str"
_NULL = "tag:yaml.org,2002:null"
_MERGE = "tag:yaml.org,2002:merge"
MAX_BYTES = 1 << 20
_MAX_DEPTH = 50
_MAX_REPEATED = 10_000
"""Maximum number of extra nodes that aliases may add to a document."""
_LONGEST_INTEGER = 100
"""Maximum number of digits; Python refuses to print much longer integers."""


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}
    depth = 0

    def compose_node(self, parent: Node | None, index: Any) -> Node | None:
        """Compose the next node.

        Raises yaml.YAMLError at once if the node is nested too deeply, because the scanner's time grows with the depth.
        """
        if self.depth > _MAX_DEPTH:
            raise yaml.YAMLError(f"nested too deeply: more than {_MAX_DEPTH} levels")
        self.depth += 1
        try:
            return super().compose_node(parent, index)
        finally:
            self.depth -= 1


for _tag, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?(?:0|[1-9][0-9_]*|0x[0-9a-fA-F_]+)", list("-+0123456789")),
    (
        "float",
        r"[-+]?(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*)(?:[eE][-+][0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        list("-+0123456789."),
    ),
    ("merge", r"<<", ["<"]),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"(?:{_pattern})\\Z"), _first)


def compose(text: str) -> Node | None:
    """Return the root node of the single document in `text`, or None if it is empty.

    Raises yaml.YAMLError if the text is not valid YAML, if it is nested more than `_MAX_DEPTH` levels deep, or if
    aliases of aliases make it much larger than the text.
    """
    if len(text) > MAX_BYTES:
        raise yaml.YAMLError(f"{len(text):,} characters, but a config has at most {MAX_BYTES:,}")
    try:
        loader = _Loader(text)
    except yaml.reader.ReaderError as error:  # a character that YAML does not allow
        raise yaml.YAMLError(str(error)) from None
    try:
        node = loader.get_single_node()
        _check_size(node)
        return node
    except RecursionError:
        raise yaml.YAMLError("nested too deeply") from None
    finally:
        loader.dispose()


def _check_size(root: Node | None) -> None:
    """Raise yaml.YAMLError if a document is nested too deeply, contains itself, or is expanded too much by aliases."""
    sizes: dict[int, int] = {}  # by identity, with aliases expanded; 0 while it is computed

    def size(node: Node, depth: int) -> int:
        if depth > _MAX_DEPTH:
            raise yaml.YAMLError(f"nested too deeply: more than {_MAX_DEPTH} levels")
        known = sizes.get(id(node))
        if known is None:
            sizes[id(node)] = 0
            parts = [part for pair in node.value for part in pair] if isinstance(node, MappingNode) else node.value
            inner = 0 if isinstance(node, ScalarNode) else sum(size(part, depth + 1) for part in parts)
            known = sizes[id(node)] = 1 + inner
        elif known == 0:
            raise yaml.YAMLError("an alias inside the value that it refers to")
        return known

    if root is not None and (expanded := size(root, 0)) > len(sizes) + _MAX_REPEATED:
        raise yaml.YAMLError(f"its aliases expand {len(sizes):,} values to {expanded:,}")


def construct(node: Node | None) -> Any:
    """Return the value of `node`. Raises yaml.YAMLError."""
    loader = _Loader("")
    try:
        return None if node is None else loader.construct_document(node)
    except RecursionError:
        raise yaml.YAMLError("nested too deeply") from None
    finally:
        loader.dispose()


def _construct_integer(loader: _Loader, node: ScalarNode) -> int:
    if len(node.value) > _LONGEST_INTEGER:
        problem = f"an integer of {len(node.value)} digits"
        raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
    return int(node.value.replace("_", ""), 0)


_Loader.add_constructor("tag:yaml.org,2002:int", _construct_integer)


class Duplicate(NamedTuple):
    """Key that occurs twice in a mapping: dotted path, second value, and both line numbers, from 1."""

    path: str
    value: Node
    first: int
    second: int


def duplicate_keys(node: Node | None) -> Iterator[Duplicate]:
    """Yield the duplicate keys of all mappings under `node`."""
    seen: set[int] = set()  # aliases refer to the same node again

    def walk(node: Node | None, path: str) -> Iterator[Duplicate]:
        if node is None or id(node) in seen:
            return
        seen.add(id(node))
        if isinstance(node, SequenceNode):
            for i, item in enumerate(node.value):
                yield from walk(item, f"{path}{i}.")
        elif isinstance(node, MappingNode):
            lines: dict[tuple[str, str], int] = {}
            for key, value in node.value:
                if isinstance(key, ScalarNode):
                    line, name = key.start_mark.line + 1, (key.tag, key.value)
                    if name in lines:
                        yield Duplicate(f"{path}{key.value}", value, lines[name], line)
                    lines.setdefault(name, line)
                    yield from walk(value, f"{path}{key.value}.")

    return walk(node, "")


# --- by type --------------------------------------------------------------------------------------------------------


def bare(annotation: Any) -> Any:
    """Return the type inside `Annotated`."""
    while get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    return annotation


def members(annotation: Any) -> list[Any]:
    """Return the members of a union type without None; for any other type, a list of the type itself."""
    annotation = bare(annotation)
    if get_origin(annotation) not in (Union, UnionType):
        return [] if annotation is NoneType else [annotation]
    return [member for of in get_args(annotation) for member in members(of)]


def takes_none(annotation: Any) -> bool:
    """Return whether the type allows null."""
    annotation = bare(annotation)
    return get_origin(annotation) in (Union, UnionType) and NoneType in get_args(annotation)


def section_of(annotation: Any) -> type[Section] | None:
    """Return the section class among the members of the type, or None."""
    return next((m for m in members(annotation) if isinstance(m, type) and issubclass(m, Section)), None)


def section_of_kind(annotation: Any, kind: object) -> type[Section] | None:
    """Return the section class among the members of the type that has this `kind`, or None."""
    sections = [m for m in members(annotation) if isinstance(m, type) and issubclass(m, Section)]
    return next((m for m in sections if "kind" in m.model_fields and m.model_fields["kind"].default == kind), None)


def member_with(annotation: Any, *origins: type) -> Any:
    """Return the first member of the type with an origin (list, tuple, dict) among `origins`, or None."""
    return next((member for member in members(annotation) if get_origin(member) in origins), None)


def override_value(text: str, annotation: Any) -> Any:
    """Return the value of the override `key=text` for a field of type `annotation` (None if unknown).

    A text field gets the text unchanged, without quotes if the whole text is quoted; `null` is null if the field allows
    it. Any other value is YAML; scalars of text type in it are text, whatever they look like.

    Raises yaml.YAMLError.
    """
    takes_text = str in members(annotation)
    try:
        node = compose(text)
        duplicates = list(duplicate_keys(node))
        if duplicates:
            raise yaml.YAMLError(f"it has the key {duplicates[0].path} twice")
    except yaml.YAMLError:
        if not takes_text:
            raise
        return text
    if takes_text and not _is_collection(node, annotation):
        quoted = isinstance(node, ScalarNode) and node.style in ("'", '"')
        null = node is None or node.tag == _NULL
        if not quoted and not (null and takes_none(annotation)):
            return text
    _keep_text(node, annotation)
    return construct(node)


def _is_collection(node: Node | None, annotation: Any) -> bool:
    """Return whether `node` is a list or mapping that the field accepts."""
    if isinstance(node, SequenceNode):
        return member_with(annotation, list, tuple) is not None
    return isinstance(node, MappingNode) and member_with(annotation, dict) is not None


def _keep_text(node: Node | None, annotation: Any) -> None:
    """Tag all scalars under `node` that have text type as text."""
    if isinstance(node, ScalarNode):
        null = node.tag == _NULL and takes_none(annotation)
        if str in members(annotation) and node.style is None and not null:
            node.tag = _TEXT
    elif isinstance(node, SequenceNode):
        items = get_args(member_with(annotation, list, tuple))
        for i, item in enumerate(node.value if items else ()):
            _keep_text(item, items[min(i, len(items) - 1)])
    elif isinstance(node, MappingNode):
        section, types = section_of(annotation), get_args(member_with(annotation, dict))
        for key, value in node.value:
            if key.tag == _MERGE:
                continue
            if section is not None:
                field = section.model_fields.get(str(key.value))
                if field is not None:
                    _keep_text(value, field.annotation)
            elif types:
                _keep_text(key, types[0])
                _keep_text(value, types[1])
