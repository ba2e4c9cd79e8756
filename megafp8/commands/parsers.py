"""The parser of a subcommand without importing what the subcommand does: help must not wait for torch."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from megafp8.host.arguments import ArgumentParser

_MAKER = "make_parser"


def make_parser_of(file: Path, module_name: str) -> ArgumentParser:
    """The parser that `make_parser` of a module makes.

    Of the module only `make_parser` is executed, with the imports, functions and constants whose names it needs, so a
    parser is as fast as these imports are.
    """
    tree = ast.parse(file.read_text(encoding="utf-8"))
    kept = _needed(tree.body, _MAKER)
    body = [node for node in tree.body if node in kept or _is_future(node)]
    module = ModuleType(module_name, ast.get_docstring(tree, clean=False))
    module.__package__ = module_name.rpartition(".")[0]
    imported = sys.modules.get(module_name)
    sys.modules[module_name] = module  # where dataclasses look their module up
    try:
        exec(compile(ast.Module(body, []), str(file), "exec"), vars(module))
    finally:
        del sys.modules[module_name]
        if imported is not None:
            sys.modules[module_name] = imported
    parser: ArgumentParser = vars(module)[_MAKER]()
    return parser


def _needed(body: list[ast.stmt], wanted: str) -> list[ast.stmt]:
    """The statements of a module that define the name `wanted`, and the names that these need."""
    by_name = {name: node for node in body for name in _defined(node)}
    statements: list[ast.stmt] = []
    names = [wanted]
    while names:
        node = by_name.get(names.pop())
        if node is not None and node not in statements:
            statements.append(node)
            names += _used(node)
    return statements


def _used(node: ast.stmt) -> set[str]:
    """The names that a statement reads, but for those that a function has of its own."""
    inside = list(ast.walk(node))
    names = [inner for inner in inside if isinstance(inner, ast.Name)]
    read = {name.id for name in names if isinstance(name.ctx, ast.Load)}
    assigned = {name.id for name in names if isinstance(name.ctx, ast.Store)}
    return read - assigned - {inner.arg for inner in inside if isinstance(inner, ast.arg)}


def _defined(node: ast.stmt) -> Iterator[str]:
    """The names that a statement of a module defines."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        for alias in node.names:
            yield alias.asname or alias.name.partition(".")[0]
    elif isinstance(node, ast.FunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.Assign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        for target in targets:
            yield from (inner.id for inner in ast.walk(target) if isinstance(inner, ast.Name))


def _is_future(node: ast.stmt) -> bool:
    return isinstance(node, ast.ImportFrom) and node.module == "__future__"
