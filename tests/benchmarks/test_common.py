"""Tables and JSON of the benchmarks."""

from __future__ import annotations

import json
import math
from pathlib import Path

from benchmarks.common import Table, write_json


def test_a_table_has_one_width_per_column() -> None:
    table = Table("name", 8, {"ms": ".1f", "a long heading": ".0%"})
    assert table.heading() == "name            ms  a long heading"
    assert table.row("x", 1.25, 0.5) == "x              1.2             50%"
    assert table.row("y", None, None, note="why") == "y                -               -  why"


def test_json_has_no_nan(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"a": math.nan, "b": [math.inf, 1]})
    text = (tmp_path / "a.json").read_text()
    assert json.loads(text, parse_constant=lambda name: name) == {"a": None, "b": [None, 1]}
    write_json(None, {})
