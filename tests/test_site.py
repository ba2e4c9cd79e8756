"""The site: its references have all keys, tables of other programs' keys name keys that exist, and it builds."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megafp8.config import Config

ROOT = Path(__file__).resolve().parent.parent
SITE = ROOT / "docs" / "site"


@pytest.fixture
def reference(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(SITE))
    import reference

    return reference


def schema_keys() -> list[str]:
    """Dotted paths of the leaves and sections of the JSON schema that --print-schema prints."""
    schema = Config.model_json_schema()

    def sections(node: dict[str, Any]) -> Iterator[tuple[str, bool]]:
        """Names of the sections that a value may be or have as items, and whether as items."""
        if "$ref" in node:
            yield node["$ref"].split("/")[-1], False
        for key in ("items", "additionalProperties"):
            if isinstance(node.get(key), dict):
                yield from ((name, True) for name, _ in sections(node[key]))
        for key in ("anyOf", "allOf", "oneOf"):
            for member in node.get(key, []):
                yield from sections(member)

    def walk(node: dict[str, Any], path: str) -> Iterator[str]:
        seen = set()
        for section, is_item in sections(node):
            for name, child in schema["$defs"][section].get("properties", {}).items():
                if name not in seen:
                    seen.add(name)
                    key = f"{path}{'[]' if is_item else ''}.{name}"
                    yield key
                    yield from walk(child, key)

    found = []
    for name, node in schema["properties"].items():
        found += [name, *walk(node, name)]
    return found


def test_the_config_reference_has_every_key(reference: Any) -> None:
    headings = re.findall(r"^#+ `?([\w.\[\]]+)`?$", reference.config(), re.MULTILINE)
    assert sorted(headings) == sorted(schema_keys())
    undescribed = [path for path, field, section in reference.keys() if not (field.description or section)]  # noqa: SIM118
    assert undescribed == []


@pytest.mark.parametrize(
    ("annotation", "name"),
    [(Config.model_fields["device"].annotation, "auto | cuda | cpu"), (list[int] | None, "list of integer or null"),
     (dict[str, float], "mapping of text to number"), (tuple[bool, bool], "list of 2: true or false")],
)  # fmt: skip
def test_types_as_users_of_yaml_read_them(reference: Any, annotation: Any, name: str) -> None:
    assert reference.type_name(annotation) == name


def test_the_references_of_commands_and_modules(reference: Any) -> None:
    from megafp8.commands import COMMANDS

    text = reference.commands()
    assert [name for name in COMMANDS if f"## megafp8 {name}\n" not in text] == []
    text = reference.python()
    assert "### megafp8.Trainer\n\n```python\nTrainer(config: Config)\n```" in text
    assert "device: Device = 'auto'," in text
    assert "0x" not in text, "an address of memory"


def test_tables_name_keys_that_exist() -> None:
    """All in the right column of the tables whose heading is megafp8."""
    known = set(schema_keys())
    tables = re.findall(
        r"^\| [\w-]+ \| megafp8 \|\n(.*?)\n\n", (ROOT / "docs" / "megatron.md").read_text(), re.MULTILINE | re.DOTALL
    )
    words = [w for row in "\n".join(tables).splitlines() for w in re.findall(r"`([a-z0-9_.]+)`", row.split(" | ")[-1])]
    keys = [word for word in words if "." in word and not word.startswith(".")]
    assert len(keys) > 30
    assert [key for key in keys if key not in known] == []


def test_the_index_of_measurements_has_each_with_its_title() -> None:
    folder = ROOT / "docs" / "measurements"
    rows = re.findall(r"^\| ([\d-]+) \| \[(.+)\]\((\S+)\) \| .+ \|$", (folder / "README.md").read_text(), re.MULTILINE)
    pages = sorted(folder.glob("2*/README.md"), reverse=True)
    assert rows == [
        (page.parent.name[:10], page.read_text().splitlines()[0].removeprefix("# "), f"{page.parent.name}/README.md")
        for page in pages
    ]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_it_builds_without_warnings(tmp_path: Path) -> None:
    """Every link leads somewhere."""
    pytest.importorskip("material")
    build = ["-m", "mkdocs", "build", "--strict", "-f", str(SITE / "mkdocs.yml"), "-d", str(tmp_path / "site")]
    done = subprocess.run([sys.executable, *build], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "site" / "megatron.html").read_text()
    assert "<th>Megatron-LM</th>" in page
    assert (tmp_path / "site" / "examples").exists() is False
    entries = json.loads((tmp_path / "site" / "search" / "search_index.json").read_text())["docs"]
    history = ("measurements/", "decisions/", "LOG.html", "changelog.html")
    for entry in entries:
        assert entry.get("boost", 1) == (0.1 if entry["location"].startswith(history) else 1), entry["location"]
    titles = {entry["location"]: entry["title"] for entry in entries}
    assert titles["out-of-memory.html"] == "Out of memory", "what a search for it finds first"
