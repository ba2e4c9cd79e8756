"""Names of other frameworks for keys of a config."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megafp8.config.key_names import OTHER_NAMES, advice, key_paths

DOCS = Path(__file__).resolve().parents[2] / "docs"
LEAVES = {path.rpartition(".")[2] for path in key_paths()}
WITHOUT_A_KEY = {"ckpt_format"}


@pytest.mark.parametrize("name", OTHER_NAMES)
def test_a_name_is_no_key_and_its_counterpart_is_one(name: str) -> None:
    assert OTHER_NAMES[name] in key_paths()
    assert name not in (key_paths() if "." in name else LEAVES), "a key of this name is suggested without the table"
    assert advice(name, 1, ()) == f"did you mean {OTHER_NAMES[name]}?"


def test_every_name_in_the_tables_of_the_documentation_is_known() -> None:
    rows = re.findall(r"^\| (`.*?) \|", (DOCS / "megatron.md").read_text(encoding="utf-8"), re.MULTILINE)
    names = {
        name.lstrip("-").replace("-", "_") for row in rows for name in re.findall(r"(--[\w-]+|\b[a-z]\w+\.\w+\b)", row)
    }
    assert len(names) > 30
    unknown = {name for name in names if advice(name, 1, ()) == "valid: " and name not in key_paths()}
    assert unknown <= WITHOUT_A_KEY
