"""JSON of files of others: as the standard library reads it, or a ValueError."""

from __future__ import annotations

import json

import pytest

from megafp8.host.strict_json import parse_json


def test_json_is_read() -> None:
    value = {"a": [1, -2.5, 1e300, None, True, "\u00e9"], "b": {"c": [[[]]]}}
    assert parse_json(json.dumps(value)) == parse_json(json.dumps(value).encode()) == value
    assert parse_json("[" * 100 + "]" * 100)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[" * 101 + "]" * 101, "nested too deeply"),
        ("[" * 200_000, "nested too deeply"),
        ('{"a":' * 500 + "1" + "}" * 500, "nested too deeply"),
        ("[NaN]", "NaN is not valid JSON"),
        ("[1e999]", "the number 1e999 is too large"),
        ("9" * 5000, "integer string conversion"),
        ("[1", "delimiter"),
        (b"\xff", "can't decode"),
    ],
)
def test_everything_else_is_refused(text: str | bytes, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        parse_json(text)
