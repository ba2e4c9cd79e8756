"""The blocks of docs/tutorial.md, run as they stand there, from an empty folder, with fewer steps and text."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SMALLER = {
    "-name '*.py'": "-name '[a-d]*.py'", "--vocab-size 2048": "--vocab-size 512", "vocab_size: 2048": "vocab_size: 512",
    "num_layers: 4": "num_layers: 2", "hidden_size: 192": "hidden_size: 64",
    "ffn_hidden_size: 512": "ffn_hidden_size: 128",
    "steps: 200": "steps: 8", "stop_after: 100": "stop_after: 4", "report_interval: 10": "report_interval: 2",
    "warmup_steps: 10": "warmup_steps: 1", "eval_interval: 50": "eval_interval: 4", "interval: 50": "interval: 2",
    "step_00000200": "step_00000008", "seq_length: 128": "seq_length: 64",
}  # fmt: skip


def blocks() -> list[tuple[str, str]]:
    """Kind and text of each, in small: commands have no kind, and what is not to be run here is `sh`."""
    page = (ROOT / "docs" / "tutorial.md").read_text()
    for given, small in SMALLER.items():
        assert given in page, given
        page = page.replace(given, small)
    return re.findall(r"^```(\w*)\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)


def test_its_commands_exist() -> None:
    from megafp8.commands import COMMANDS

    used = set(re.findall(r"^(?:.* -m )?megafp8 ([\w-]+)", "".join(text for _, text in blocks()), re.MULTILINE))
    assert used <= set(COMMANDS)
    assert len(used) >= 9


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_its_commands_run(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    programs, folder = tmp_path / "bin", tmp_path / "first"
    programs.mkdir()
    folder.mkdir()
    for name, module in (("megafp8", "-m megafp8"), ("python", "")):
        (programs / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {module} "$@"\n')
        (programs / name).chmod(0o755)
    variables = {
        **os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1",
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }  # fmt: skip
    printed: dict[str, str] = {}
    for kind, text in blocks():
        if kind == "yaml":
            (folder / "first.yaml").write_text(text)
            continue
        if kind == "sh":
            continue
        command = ["bash", "-ec", text] if not kind else [sys.executable, "-c", text]
        done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True)
        assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr}"
        printed[text.split()[1]] = done.stdout
    run = folder / "runs" / "first"
    starts = [json.loads(line) for line in (run / "launches.jsonl").read_text().splitlines()]
    assert [(start["step"], start["ranks"]) for start in starts] == [(0, 1), (4, 2)]
    assert (run / "checkpoints" / "step_00000008").is_dir()
    assert (folder / "compared.png").exists()
    assert (folder / "exported" / "model.safetensors").exists()
    assert printed["transformers"].startswith("def __init__(self")
    assert len(printed["generate"]) > 40
