"""Each mistake of `tests/mistakes.py` is one message with exit code 2."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mistakes import MISTAKES, Mistake, problem, results


def test_what_is_a_problem() -> None:
    mistake = Mistake("pretrian", "did you mean pretrain?")
    assert len(MISTAKES) >= 142
    assert problem(mistake, 2, "error: no command 'pretrian'; did you mean pretrain?") == ""
    assert "traceback" in problem(mistake, 2, "Traceback (most recent call last)\ndid you mean pretrain?")
    assert "exit code 0" in problem(mistake, 0, "did you mean pretrain?")
    assert "does not say" in problem(mistake, 2, "")


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_each_is_one_message(tmp_path: Path) -> None:
    failed = [f"{m.command}: {wrong}; {message}" for m, _, message, wrong in results(tmp_path / "work") if wrong]
    assert not failed, "\n".join(failed)
