"""`megafp8 completion`: its scripts, in the shells themselves."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from megafp8.config import json_schema
from tools import completion

ROOT = Path(__file__).resolve().parents[2]
ASK = """
source "$1"
read -ra COMP_WORDS <<< "$2"
[[ $2 == *" " ]] && COMP_WORDS+=("")
COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
_megafp8
printf '%s\\n' "${COMPREPLY[@]}"
"""
CASES = [
    ("megafp8 pl", {"plan", "plot-run", "plot-schedule", "plot-expert-load"}),
    ("megafp8 plan --gpus", {"--gpus", "--gpus-per-node"}),
    ("megafp8 convert --to pe", {"peft"}),
    (
        "megafp8 init llama3-8b-",
        {"llama3-8b-distillation", "llama3-8b-dpo", "llama3-8b-grpo", "llama3-8b-sft", "llama3-8b-stages"},
    ),
    ("megafp8 pretrain llama3-8b parallel.ten", {"parallel.tensor="}),
    ("megafp8 pretrain --config configs/gemma", {"configs/gemma2-9b.yaml"}),
    ("megafp8 plan quick", {"quickstart"}),
    ("megafp8 launch --nproc-per-node 8 pret", {"pretrain", "pretrain_gpt.py"}),
    ("megafp8 launch --nproc-per-node 8 pretrain training.stop", {"training.stop_after="}),
    ("megafp8 inspect doc", {"docs/"}),
    ("megafp8 completion ", {"bash", "zsh"}),
]


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("completion")
    for shell in ("bash", "zsh"):
        (folder / shell).write_text(completion.script(shell))
    return {shell: folder / shell for shell in ("bash", "zsh")}


@pytest.mark.parametrize(("line", "completed"), CASES, ids=[line for line, _ in CASES])
def test_bash(scripts: dict[str, Path], line: str, completed: set[str]) -> None:
    command = ["bash", "--norc", "-c", ASK, "bash", str(scripts["bash"]), line]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30)
    assert (set(done.stdout.split()), done.stderr) == (completed, "")


def test_zsh_reads_its_script(scripts: dict[str, Path]) -> None:
    text = scripts["zsh"].read_text()
    assert text.startswith("#compdef megafp8")
    assert "parallel.tensor=" in text
    zsh = shutil.which("zsh")
    if zsh is not None:
        subprocess.run([zsh, "-n", scripts["zsh"]], check=True)


def test_keys_are_those_of_the_schema() -> None:
    keys = list(completion.keys(json_schema()))
    assert {"parallel.tensor", "checkpoint.init_from", "fp8.recipe", "data.tokenizer.kind"} <= set(keys)
    assert not {"model", "data.tokenizer"} & set(keys)
