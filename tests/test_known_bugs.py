"""docs/known-bugs-elsewhere.md: each row has a verdict, and names tests that there are."""

from __future__ import annotations

import ast
import re
from pathlib import Path

TESTS = Path(__file__).resolve().parent
TABLE = TESTS.parent / "docs" / "known-bugs-elsewhere.md"
VERDICTS = ("right", "**mended**", "does not arise")


def rows() -> list[list[str]]:
    """The cells of all tables, without their heads."""
    lines = [line.strip("| ") for line in TABLE.read_text().splitlines() if line.startswith("| ")]
    return [re.split(r" \| ?", line) for line in lines if not line.startswith("what went wrong")]


def test_each_row_has_a_verdict_and_a_test_unless_the_question_does_not_arise() -> None:
    assert len(rows()) > 30
    for wrong, here, *tests in rows():
        assert here.startswith(VERDICTS), wrong
        assert here.startswith("does not arise") or any(tests), wrong


def test_the_tests_exist() -> None:
    named = {test for row in rows() for test in re.findall(r"`([\w/]+\.py::\w+)`", row[-1])}
    assert len(named) > 15
    for test in named:
        path, name = test.split("::")
        functions = {x.name for x in ast.parse((TESTS / path).read_text()).body if isinstance(x, ast.FunctionDef)}
        assert name in functions, test
