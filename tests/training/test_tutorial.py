"""The commands of docs/fine-tuning.md, run as they stand there, from an empty folder with a tiny model on CPU."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.data.test_chats import CHATML, write_tokenizer
from tests.quickstart_data import ROOT
from tests.training.test_fine_tuning import make_chats, make_model

MODEL = "models/Llama-3.1-8B-Instruct"
SMALL = [
    "device=cpu", "training.seq_length=256", "training.steps=2", "training.global_batch_size=4",
    "training.eval_interval=2", "training.eval_steps=1", "optimizer.warmup_steps=0", "data.num_workers=0",
    "data.index_cache=cache", "parallel.pipeline=1", "parallel.layers_per_stage=null",
]  # fmt: skip


def _commands() -> list[list[str]]:
    """Those of all blocks that have some, as lists of words."""
    text = (ROOT / "docs" / "fine-tuning.md").read_text()
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    lines = [line for kind, block in blocks if not kind for line in block.replace("\\\n", " ").splitlines()]
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def _on_cpu(words: list[str]) -> list[str]:
    """With this Python and this checkout, on two ranks instead of eight and with a small config."""
    words = [str(ROOT / word) if (ROOT / word).is_file() else word for word in words]
    assert words[0] == "megafp8"
    if words[1] == "launch":
        words = [*words, *SMALL]
        words[words.index("8")] = "2"
    return [sys.executable, "-m", *words]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_commands_of_the_tutorial(tmp_path: Path) -> None:
    import transformers

    peft = pytest.importorskip("peft")
    make_model(tmp_path / MODEL, 256)
    write_tokenizer(tmp_path / MODEL, CHATML)
    chats = "".join(json.dumps({"messages": chat}) + "\n" for chat in make_chats(120))
    (tmp_path / "chats.jsonl").write_text(chats)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    commands = _commands()
    assert [words[1] for words in commands].count("launch") == 3
    for words in commands:
        done = subprocess.run(_on_cpu(words), cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, f"{shlex.join(words)}\n{done.stdout}\n{done.stderr}"
        if words[1] == "inspect-data":
            assert "⟦even<|im_end|>⟧" in done.stdout
    tuned = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "tuned")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "tuned")
    asked = tokenizer.apply_chat_template([{"role": "user", "content": "2 + 2?"}], tokenize=False)
    assert "2 + 2?<|im_end|>" in asked
    assert peft.PeftModel.from_pretrained(tuned, tmp_path / "adapter").peft_config["default"].r == 16
    for run in ("llama3-8b-sft", "lora", "further"):
        assert (tmp_path / "runs" / run / "checkpoints" / "step_00000002").is_dir()
