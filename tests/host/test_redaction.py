"""Credentials are removed from commands, logs and configs; keys of the config stay as they are."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megafp8.config.schema import Config
from megafp8.host.redaction import redact, redact_arguments, redact_tree
from megafp8.training.run_log import RunLog, record_launch


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        ("data.train=[s3://key:pa@ss@host/corpus]", "data.train=[s3://REDACTED@host/corpus]"),
        ("https://host/a?x=1&X-Amz-Signature=abc&y=2", "https://host/a?x=1&X-Amz-Signature=REDACTED&y=2"),
        ("https://host/a?sv=1&sig=a%2Bb#f", "https://host/a?sv=1&sig=REDACTED#f"),
        ("https://host/a?X-Amz-Security-Token=abc", "https://host/a?X-Amz-Security-Token=REDACTED"),
        ("storage.secret=a b", "storage.secret=REDACTED"),
        ("logging.wandb_api_key=abc", "logging.wandb_api_key=REDACTED"),
        ("--hf-token=abc", "--hf-token=REDACTED"),
        ("data.tokenizer.path=a/b", "data.tokenizer.path=a/b"),
        ("data.special_tokens.sep=5", "data.special_tokens.sep=5"),
        ("s3://bucket/a@b/c", "s3://bucket/a@b/c"),
        ("https://host/a?alt=media&key=abc", "https://host/a?alt=media&key=REDACTED"),
        ("https://host/a?AWSAccessKeyId=abc&x=1", "https://host/a?AWSAccessKeyId=REDACTED&x=1"),
        ('{"token": "a b", "x": 1}', '{"token": REDACTED, "x": 1}'),
        ("{'api_key': 'abc', 'seed': 1}", "{'api_key': REDACTED, 'seed': 1}"),
        ("api_key: abc", "api_key: REDACTED"),
        ("Authorization: Bearer abc.def", "Authorization: REDACTED"),
        ("'authorization': 'Basic abc=', 'host': 'x'", "'authorization': 'REDACTED', 'host': 'x'"),
        ("sent Bearer abcdefghijklmnopqr", "sent Bearer REDACTED"),
        ("ran tool --hf-token abc --steps 5", "ran tool --hf-token REDACTED --steps 5"),
        ("with hf_abcdefghijklmnopqrstuv there", "with REDACTED there"),
        ('{"eos_token": "</s>", "tokens": 5}', '{"eos_token": "</s>", "tokens": 5}'),
        ("key=value", "key=value"),
        ("the bearer of good tidings", "the bearer of good tidings"),
    ],
)
def test_arguments(argument: str, expected: str) -> None:
    assert redact_arguments([argument]) == [expected]
    assert redact_tree({"a": [{"b": argument}], "c": 1}) == {"a": [{"b": redact(argument)}], "c": 1}


def test_the_value_after_an_option_is_removed() -> None:
    assert redact_arguments(["--token", "abc", "--tokenizer", "x"]) == ["--token", "REDACTED", "--tokenizer", "x"]


def test_no_key_of_the_config_is_taken_for_a_secret() -> None:
    def keys(schema: object) -> list[str]:
        found = list(schema.get("properties", {})) if isinstance(schema, dict) else []
        parts = schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ()
        return found + [key for part in parts for key in keys(part)]

    all_keys = keys(Config.model_json_schema())
    assert len(all_keys) > 100
    assert [key for key in all_keys if redact(f"{key}=1") != f"{key}=1"] == []


def test_the_log_and_the_record_of_a_launch_have_no_credentials(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", "data.train=[s3://key:hidden@host/a]", "--token", "hidden"])
    parallel: Any = SimpleNamespace(world=SimpleNamespace(group=None, is_first=True), world_size=1)
    with RunLog(0, show_steps=True) as log:
        log.open(tmp_path)
        record_launch(tmp_path, parallel, 0)
        logging.getLogger("megafp8.test").info("reading s3://key:hidden@host/a")
        log.write_error("cannot read s3://key:hidden@host/a")
    written = (tmp_path / "log.txt").read_text() + (tmp_path / "launches.jsonl").read_text() + capsys.readouterr().err
    assert "hidden" not in written
    assert written.count("REDACTED") >= 5
