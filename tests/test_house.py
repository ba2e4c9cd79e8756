"""Rules of the house that a linter does not know."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MODULES = sorted((ROOT / "megafp8").rglob("*.py"))
MOST_LINES, MOST_LINES_OF_A_FUNCTION = 420, 70
CALLERS = {"collectives.py", "parallel_state.py"}
COLLECTIVES = {"all_reduce", "all_gather", "broadcast", "reduce_scatter", "isend", "irecv", "send", "recv", "barrier"}


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_a_module_says_what_it_is_for_and_is_small(path: Path) -> None:
    source = path.read_text()
    tree = ast.parse(source)
    assert ast.get_docstring(tree), "no docstring"
    assert len(source.splitlines()) <= MOST_LINES
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            assert node.end_lineno is not None
            assert node.end_lineno - node.lineno < MOST_LINES_OF_A_FUNCTION, node.name


@pytest.mark.parametrize("path", [p for p in MODULES if p.name not in CALLERS], ids=lambda p: p.name)
def test_collectives_are_called_in_one_place(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "dist":
            assert not any(node.attr.startswith(name) for name in COLLECTIVES), f"dist.{node.attr}"
