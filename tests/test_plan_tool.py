"""tools/plan.py from the command line: text, YAML to paste, JSON and errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from megafp8.config import check_layout, load_config
from tests.quickstart_data import CONFIG
from tools.plan import main

SMALL = [
    "model.num_layers=2",
    "model.num_attention_heads=2",
    "model.num_query_groups=2",
    "model.vocab_size=256",
    "training.global_batch_size=4",
    "training.precision=bf16",
    "device=cuda",
]
COMMAND = [str(CONFIG), *SMALL, "--gpus", "2"]


def test_it_prints_yaml_that_runs(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main([*COMMAND, "--explain"]) == 0
    text = capsys.readouterr().out
    for part in ("terms of the best", "GEMMs", "pipeline rank"):
        assert part in text
    changes = yaml.safe_load(text.split("the best as YAML:\n")[1].split("\n\n")[0])
    tree = yaml.safe_load(Path(CONFIG).read_text(encoding="utf-8"))
    for section, keys in changes.items():
        tree[section] = tree.get(section, {}) | keys
    (tmp_path / "best.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8")
    check_layout(load_config(tmp_path / "best.yaml", SMALL), 2)


def test_json_has_the_terms_that_add_up(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*COMMAND, "--json", "--gpu", "h200-141gb"]) == 0
    found = json.loads(capsys.readouterr().out)
    best = found["best"][0]
    assert sum(best["terms_seconds"].values()) == pytest.approx(best["step_seconds"])
    assert best["peak_bytes"] == max(rank["total"] for rank in best["memory_bytes"]) <= found["limit_bytes"]
    assert all(best["step_seconds"] <= other["step_seconds"] for other in found["best"])


def test_the_exit_code_says_whether_a_layout_fits(capsys: pytest.CaptureFixture[str]) -> None:
    large = ["model.hidden_size=32768", "model.ffn_hidden_size=131072", "model.num_layers=64"]
    assert main([str(CONFIG), *large, "--gpus", "2", "--gpu", "H100"]) == 1
    assert "no layout of" in capsys.readouterr().out


def test_errors_name_what_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--config", "missing.yaml", "--gpus", "2"]) == 2
    assert "missing.yaml" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([*COMMAND, "--nodes", "3"])
    assert "do not divide into 3 nodes" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([*COMMAND, "--gpu", "a100"])
    assert "'a100' is not known; there are h200-141gb, h100-80gb" in capsys.readouterr().err
