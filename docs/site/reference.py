"""Pages of reference as Markdown, made from what they describe: the config's schema, and docstrings."""

from __future__ import annotations

import argparse
import ast
import inspect
import re
import textwrap
import types
from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from megafp8 import commands as command_table
from megafp8.config import Config

MODULES = ("megafp8", "megafp8.inference", "megafp8.fp8", "megafp8.nn")
"""Modules whose `__all__` is documented."""


class Key(NamedTuple):
    """A key of the config: its dotted path, with `[]` behind lists of sections, and the field."""

    path: str
    field: FieldInfo
    section: type[BaseModel] | None


def keys(sections: Sequence[type[BaseModel]] = (Config,), prefix: str = "") -> Iterator[Key]:
    """All keys of `sections`, each once, those that are sections last; a section comes before what it holds."""
    fields = {name: field for section in reversed(sections) for name, field in section.model_fields.items()}
    for name, field in sorted(fields.items(), key=lambda item: bool(_sections(item[1].annotation)[0])):
        inner, is_item = _sections(field.annotation)
        path = f"{prefix}{name}"
        yield Key(path, field, inner[0] if inner else None)
        if inner:
            yield from keys(inner, f"{path}[]." if is_item else f"{path}.")


def _sections(annotation: Any) -> tuple[list[type[BaseModel]], bool]:
    """The sections that a value of a type may be or have as items, and whether as items of a list or mapping."""
    if inspect.isclass(annotation) and issubclass(annotation, BaseModel):
        return [annotation], False
    sections: list[type[BaseModel]] = []
    are_items = False
    for argument in get_args(annotation):
        inner, is_item = _sections(argument)
        sections += inner
        are_items |= bool(inner) and (is_item or get_origin(annotation) in (list, dict))
    return sections, are_items


def type_name(annotation: Any, metadata: Any = ()) -> str:
    """A type as a user of YAML reads it: `auto | cuda | cpu`, `list of int`, with its bounds."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return type_name(arguments[0], arguments[1:])
    if origin in (Union, types.UnionType):
        name = " or ".join(dict.fromkeys(type_name(a) for a in arguments))
    elif origin is Literal:
        name = " | ".join("null" if a is None else str(a).lower() if isinstance(a, bool) else str(a) for a in arguments)
    elif origin is list:
        name = f"list of {type_name(arguments[0])}"
    elif origin is tuple:
        name = f"list of {len(arguments)}: {type_name(arguments[0])}"
    elif origin is dict:
        name = f"mapping of {type_name(arguments[0])} to {type_name(arguments[1])}"
    elif annotation is type(None):
        name = "null"
    elif inspect.isclass(annotation) and issubclass(annotation, BaseModel):
        name = "section"
    else:
        names = {str: "text", bool: "true or false", int: "integer", float: "number", Any: "any value"}
        name = names.get(annotation) or getattr(annotation, "__name__", str(annotation))
    return name + "".join(_bounds(metadata))


def _bounds(metadata: Any) -> Iterator[str]:
    for item in metadata:
        for inner in getattr(item, "metadata", [item]):
            for name, sign in (("ge", "≥"), ("gt", ">"), ("le", "≤"), ("lt", "<")):
                if getattr(inner, name, None) is not None:
                    yield f", {sign} {getattr(inner, name):g}"


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.default
    if isinstance(value, BaseModel):
        return ""
    return f"default {_yaml(value)}"


def _yaml(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_yaml, value))}]"
    return f"{value:g}" if isinstance(value, float) else str(value) or '""'


def config() -> str:
    """Every key of the config with its type, default and description."""
    lines = [
        "# Config reference", "",
        "Every key of a run's YAML file, in the order of the schema. A section that is left out has its defaults; "
        "`key=value` on the command line overrides any key by its dotted path. `--print-schema` gives the same as a "
        "JSON schema, for editors.", "",
        "## Top level", "",
    ]  # fmt: skip
    for path, field, section in keys():
        depth = path.count(".")
        if section is not None:
            text = " ".join(filter(None, [field.description, inspect.cleandoc(section.__doc__ or "")]))
            lines += [f"{'#' * min(depth + 2, 4)} {path}", "", _paragraph(text), ""]
            if not isinstance(field.default, BaseModel):
                lines += [f"*{type_name(field.annotation, field.metadata)}; {_default(field)}*", ""]
        else:
            kind = "; ".join(filter(None, [type_name(field.annotation, field.metadata), _default(field)]))
            lines += [f"{'#' * min(depth + 3, 5)} `{path}`", "", f"*{kind}*".replace("|", "\\|"), ""]
            lines += [_paragraph(field.description or ""), ""]
    return "\n".join(lines)


def _paragraph(text: str) -> str:
    """Text of a docstring as Markdown, in which `*` and `<name>` are text, and pages of the site are linked."""
    text = " ".join(text.split()).replace("*", "\\*").replace("<", "&lt;")
    return re.sub(r"docs/([\w/-]+\.md)", r"[docs/\1](../\1)", text)


def commands() -> str:
    """The subcommands of `megafp8`, with the documentation of their modules and a table of their arguments."""
    lines = ["# Commands", "", "`megafp8 COMMAND` runs from any folder once the package is installed; in a checkout "
             "`python -m megafp8 COMMAND` does the same. `megafp8 COMMAND --help` says what is here.", ""]  # fmt: skip
    for name in command_table.COMMANDS:
        file = command_table.file_of(name)
        text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
        where = file.relative_to(command_table.PACKAGE.parent).as_posix()
        parser = command_table.module_of(name).make_parser()
        lines += [f"## megafp8 {name}", "", f"`{where}`", "", _docstring(text), "", *_arguments(parser), ""]
    return "\n".join(lines)


def _arguments(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Rows of a table: what is written, what it does, its default."""
    actions = [action for action in parser._actions if action.dest != "help" and action.help != argparse.SUPPRESS]
    if actions:
        yield from ("| argument | |", "|---|---|")
    formatter = parser._get_formatter()
    for action in actions:
        names = list(dict.fromkeys(option.replace("_", "-") for option in action.option_strings))
        value = formatter._format_args(action, _metavar(action)) if action.nargs != 0 else ""
        written = f"{', '.join(names)} {value}".strip() if names else str(action.metavar or action.dest)
        text = formatter._expand_help(action).replace("|", "\\|")
        yield f"| `{written}` | {text} |"


def _metavar(action: argparse.Action) -> str:
    return action.dest.upper() if action.option_strings else action.dest


def _docstring(text: str) -> str:
    """A docstring, whose indented examples become blocks, and sections such as `Args:` lists."""
    return "\n\n".join(map(_block, text.strip().split("\n\n")))


def _block(paragraph: str) -> str:
    """A paragraph of a docstring as Markdown."""
    head, _, body = paragraph.partition("\n")
    if head.endswith(":") and head[:-1] in ("Args", "Attributes", "Returns", "Raises", "Yields") and body:
        entries = [" ".join(entry.split()) for entry in re.split(r"\n(?! )", textwrap.dedent(body))]
        if head in ("Returns:", "Yields:"):
            return f"**{head}** {' '.join(entries)}"
        items = [re.sub(r"^([\w*.]+(?:, [\w*.]+)*): ", r"- `\1`: ", entry) for entry in entries]
        return "\n".join([f"**{head}**", "", *items])
    return f"```\n{inspect.cleandoc(paragraph)}\n```" if paragraph.startswith("    ") else paragraph


def python() -> str:
    """The public names of `MODULES`, with signatures and docstrings."""
    also = "[From Python](../python.md) and [FP8 in any model](../fp8-any-model.md) say how to use them."
    lines = ["# Python reference", "", f"The public names of these modules. {also}", ""]
    seen: set[int] = set()
    for module_name in MODULES:
        module = import_module(module_name)
        lines += [f"## {module_name}", "", (inspect.getdoc(module) or "").split("\n\n")[0], ""]
        for name in module.__all__:
            value = getattr(module, name)
            if id(value) not in seen:
                lines += _member(f"{module_name}.{name}", value)
            seen.add(id(value))
    return "\n".join(lines)


def _member(path: str, value: Any) -> Iterator[str]:
    yield from (f"### {path}", "")
    if inspect.isclass(value) and issubclass(value, BaseModel):
        yield from ("A section of the config: [its keys](config.md).", "")
        return
    if not callable(value):
        yield from (f"`{type(value).__name__}`", "")
        return
    yield from ("```python", f"{path.rpartition('.')[2]}{_signature(value)}", "```", "")
    yield from (_docstring(inspect.getdoc(value) or ""), "")
    for name, method in vars(value).items() if inspect.isclass(value) else ():
        function = getattr(method, "__func__", method)
        if not name.startswith("_") and inspect.isfunction(function):
            yield from (
                f"#### {path.rpartition('.')[2]}.{name}",
                "",
                "```python",
                f"{name}{_signature(function)}",
                "```",
            )
            yield from ("", _docstring(inspect.getdoc(function) or ""), "")


def _signature(value: Any) -> str:
    """The parameters, one a line if they are many."""
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        return "(...)"
    parameters, only_by_name = [], False
    for p in signature.parameters.values():
        if p.kind == p.VAR_POSITIONAL:
            only_by_name = True
        elif p.kind == p.KEYWORD_ONLY and not only_by_name:
            parameters.append("*")
            only_by_name = True
        stars = {p.VAR_POSITIONAL: "*", p.VAR_KEYWORD: "**"}.get(p.kind, "")
        kind = "" if p.annotation is p.empty else f": {_annotation(p.annotation)}"
        default = "" if p.default is p.empty else f" = {_value(p.default)}"
        parameters.append(f"{stars}{p.name}{kind}{default}")
    result = signature.return_annotation
    end = "" if result is signature.empty or inspect.isclass(value) else f" -> {_annotation(result)}"
    text = f"({', '.join(parameters)}){end}"
    return text if len(text) < 80 else "(\n" + "".join(f"    {p},\n" for p in parameters) + f"){end}"


def _annotation(annotation: Any) -> str:
    return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)


def _value(default: Any) -> str:
    """A default value, if it is short and its text is Python; else an ellipsis."""
    text = repr(default)
    return text if len(text) <= 40 and "<" not in text else "..."
