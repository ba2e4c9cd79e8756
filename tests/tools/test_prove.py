"""tools/prove.py from the command line: what is printed and written, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megafp8.config import Config
from megafp8.prove import proof as engine
from megafp8.prove.certificate import Certificate, CheckResult, hash_of
from megafp8.prove.shrink import Change
from tests.quickstart_data import CONFIG
from tools.prove import main

PASSED = CheckResult("schedule", "1f1b", "equal", None, "4 ranks finished", 1.5)
DIFFERENT = CheckResult("loss and gradients", "to 1e-10", "DIFFERENT", 0.25, "layers.0.attention_norm.weight", 0.1)
HUNG = CheckResult("schedule", "1f1b", "FAILED", None, "rank 3 did not finish", 9.0, "rank 3 stood at: recv")


def proving(*rows: CheckResult) -> Callable[..., Certificate]:
    """Stands in for `prove`."""

    def prove(config: Config, ranks: int | None, *, device: str, timeout: float, begun: Any, show: Any) -> Certificate:
        certificate = Certificate(config.name, (ranks or 4, 4), {"name": config.name}, [Change("a.b", 8, 2, "why")])
        begun(certificate)
        for row in rows:
            show(row)
            certificate.rows.append(row)
        return certificate

    return prove


@pytest.mark.parametrize(
    ("rows", "code", "last"),
    [((PASSED,), 0, "nothing differs"), ((PASSED, DIFFERENT), 1, "NOT PROVEN"), ((HUNG,), 1, "NOT PROVEN")],
)
def test_table_file_and_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, rows: tuple[CheckResult, ...],
    code: int, last: str,
) -> None:  # fmt: skip
    monkeypatch.setattr(engine, "prove", proving(*rows))
    out = tmp_path / "x.json"
    arguments = [str(CONFIG), "--ranks", "8", "--out", str(out), "training.steps=20"]
    assert main(arguments) == code
    text, errors = capsys.readouterr()
    assert "why: a.b 8 -> 2" in text
    assert last in text.splitlines()[-1]
    for row in rows:
        assert any(row.check in line and row.status in line and row.where in line for line in text.splitlines())
    assert ("rank 3 stood at: recv" in errors) == (HUNG in rows)
    written = json.loads(out.read_text(encoding="utf-8"))
    assert written["passed"] == (code == 0)
    assert [row["where"] for row in written["rows"]] == [row.where for row in rows]
    assert main(arguments) == code  # a certificate may be replaced


def test_the_hash_is_of_the_values_that_are_proven(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config = tmp_path / "mine.yaml"
    config.write_text(f"name: mine\nbase: {CONFIG}\n")
    expected = hash_of(config)

    def prove_while_the_file_is_edited(*arguments: Any, **options: Any) -> Certificate:
        config.write_text(f"name: mine\nbase: {CONFIG}\nseed: 7\n")
        return proving(PASSED)(*arguments, **options)

    monkeypatch.setattr(engine, "prove", prove_while_the_file_is_edited)
    assert main([str(config)]) == 0
    assert json.loads((tmp_path / "mine.certificate.json").read_text())["config_hash"] == expected


def test_numbers_that_json_does_not_have() -> None:
    row = CheckResult("x", "y", "DIFFERENT", float("inf"))
    assert json.loads(Certificate("a", (1, 1), {}, [], [row]).as_json())["rows"][0]["difference"] == "inf"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--out", "other.json"], "other.json exists and is not a certificate"),
        (["--out", "nowhere/x.json"], "there is no folder nowhere"),
        (["--ranks", "3"], "not a multiple"),
        (["--stage", "later"], "no stages"),
        (["parallel.tensor=3"], "parallel.tensor"),
    ],
)
def test_bad_input(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, arguments: list[str],
    message: str,
) -> None:  # fmt: skip
    config = Path(CONFIG).resolve()
    monkeypatch.chdir(tmp_path)
    Path("other.json").write_text("[1]", encoding="utf-8")
    Path("mine.yaml").write_text(config.read_text(encoding="utf-8"), encoding="utf-8")
    assert main(["mine.yaml", *arguments]) == 2
    assert message in capsys.readouterr().err
    assert Path("other.json").read_text(encoding="utf-8") == "[1]"
    assert not list(tmp_path.glob("*.certificate.json"))
