"""Ten tasks of a new user: the page that README.md links for each answers it within five sentences."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TASKS = {
    "train a model from an empty folder": ("docs/tutorial.md", "pip install"),
    "train on my own text": ("docs/own-data.md", "megafp8 preprocess"),
    "resume a run": ("docs/running.md", "continues bit for bit"),
    "use several nodes": ("docs/launching.md", "NNODES=4 HEAD_NODE=node0 RDZV_ID=run1 launch/multi_node.sh"),
    "find the fastest layout for 64 GPUs": ("docs/planning.md", "megafp8 plan --config llama3-70b --gpus 64"),
    "check that a layout computes the right gradients": ("docs/prove.md", "megafp8 prove"),
    "choose an FP8 recipe": ("docs/fp8.md", "fp8.recipe=current"),
    "fix an out-of-memory error": ("docs/out-of-memory.md", "--dry-run"),
    "start from a Hugging Face model": ("docs/huggingface.md", "init_from"),
    "serve a model": ("docs/serving.md", "megafp8 serve"),
}
"""Page of each task, and a text in its answer."""


def sentences_before(page: str, answer: str) -> int:
    """Return the number of sentences of a page that a reader reads before the answer; cells and headings count too."""
    text = page[: page.index(answer)]
    code = r"```.*?(?:```|\Z)"
    prose = re.sub(code, "", text, flags=re.DOTALL)
    rows = [line for line in prose.splitlines() if line.startswith("|")]
    cells = [cell for row in rows for cell in row.strip("| ").split("|")]
    lines = [line for line in prose.splitlines() if line not in rows]
    sentences = [x for x in re.split(r"(?<=[.:!?])\s+|\n\n+|\n(?=[-#*])", "\n".join(lines)) if re.search(r"\w", x)]
    return len(sentences) + sum(bool(re.search(r"\w", cell)) for cell in cells)


@pytest.mark.parametrize("task", TASKS)
def test_the_page_of_a_task_answers_it_within_five_sentences(task: str) -> None:
    path, answer = TASKS[task]
    assert f"({path})" in (ROOT / "README.md").read_text(), "README.md does not link the page"
    assert sentences_before((ROOT / path).read_text(), answer) <= 5


def test_sentences_are_counted() -> None:
    page = "# Title\n\nOne sentence. Two\nlines.\n\n```\ncode\n```\n\n| a | b |\n|---|---|\n| c | the answer |\n"
    assert sentences_before(page, "the answer") == 6
