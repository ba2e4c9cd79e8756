"""Matching of patterns without backtracking: as `re` does, in bounded time."""

from __future__ import annotations

import random
import re
import sys
import time

import pytest

from megafp8.conversion.peft.patterns import matches_end


def _random_pattern(r: random.Random, depth: int = 0) -> str:
    kind = r.random()
    if kind < 0.4 or depth > 2:
        return r.choice(["a", "b", ".", r"\.", "[ab]", "[^a]", r"\d", "1", "^", "$"])
    if kind < 0.6:
        return _random_pattern(r, depth + 1) + _random_pattern(r, depth + 1)
    if kind < 0.75:
        return f"({_random_pattern(r, depth + 1)}|{_random_pattern(r, depth + 1)})"
    return f"(?:{_random_pattern(r, 3)}){r.choice(['*', '+', '?', '{2}', '{1,3}', '{2,}', '*?'])}"


def test_random_patterns_match_as_in_peft() -> None:
    r = random.Random(0)
    outcomes = set()
    for _ in range(3000):
        pattern, text = _random_pattern(r), "".join(r.choice("ab1.") for _ in range(r.randrange(9)))
        expected = re.match(rf"(.*\.)?({pattern})$", text) is not None
        assert matches_end(pattern, text) == expected, (pattern, text)
        outcomes.add(expected)
    assert outcomes == {True, False}


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        ("q_proj", "q_proj"),
        (r"layers\.(0|1)\.self_attn\.[qk]_proj", "layers.1.self_attn.k_proj"),
        (r".*\.layers\.\d+\.mlp\..*", "model.layers.17.mlp.up_proj"),
    ],
)
def test_patterns_of_adapters(pattern: str, text: str) -> None:
    assert matches_end(pattern, text)
    assert matches_end(pattern, f"model.{text}")
    assert not matches_end(pattern, text + "x.y") or pattern.endswith(".*")


@pytest.mark.parametrize("pattern", ["(a+)+b", "(a|a)*b", ".*.*.*.*.*.*b", "((a+)+)+b"])
def test_patterns_in_which_re_does_not_end(pattern: str) -> None:
    start = time.process_time()
    assert not matches_end(pattern, "a" * 500)
    assert time.process_time() - start < 2


@pytest.mark.parametrize(
    "pattern",
    [
        r"(?=a)a", r"(a)\2", "(?i)a", "(a{1,50}){1,50}b", "[", "a" * 1001, "a{,3}",
        "[[:alpha:]]", "\udc80",
    ],
)  # fmt: skip
def test_patterns_that_are_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match=r"cannot be matched|more than 1000 characters"):
        matches_end(pattern, "aa")


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "re2", None)
    with pytest.raises(ValueError, match=r"patterns need google-re2, which is not installed: pip install .*hf"):
        matches_end("a", "a")
