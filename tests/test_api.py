"""The names at the top level of the package, as a notebook uses them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

import megafp8
from tests.quickstart_data import ROOT, QuickstartData

NOTEBOOK = ROOT / "examples" / "quickstart.ipynb"
CHECKS = """
import signal, sys
from megafp8 import ConfigError
assert [step["step"] for step in read_metrics(trainer.run_folder)] == [1, 2, 3, 4]
again = [*data, *layout, "name=notebook", "run_dir=../runs", "training.steps=5", "optimizer.decay_until=4"]
longer = Trainer(load_config("../configs/quickstart.yaml", again))
longer.train()
assert longer.run_folder == trainer.run_folder
assert len(read_metrics(trainer.run_folder)) == 5
assert 0 < len(generator.generate("def ", SamplingOptions(max_tokens=32))[0].tokens) <= 32
assert signal.getsignal(signal.SIGINT) in (signal.default_int_handler, signal.SIG_IGN)  # ignored in a background job
try:
    Trainer(load_config("../configs/quickstart.yaml", [*again, "parallel.tensor=2"]))
except ConfigError as error:
    assert "parallel.tensor" in str(error)
else:
    sys.exit("a layout of 2 ranks is accepted in one process")
"""


def code_of_notebook() -> str:
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    assert all(not cell["outputs"] and cell["execution_count"] is None for cell in cells if cell["cell_type"] == "code")
    return "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")


def test_ten_lines_are_those_of_the_page() -> None:
    """The page runs in the checkout, the notebook in examples/."""
    code = [line for line in code_of_notebook().splitlines() if line]
    page = (ROOT / "docs" / "python.md").read_text().partition("```python\n")[2].partition("```")[0]
    assert len(code) <= 10
    shared = [line for line in code if not line.startswith(("data =", "config ="))]
    assert shared == [line for line in page.splitlines() if line in shared]


def test_the_page_has_every_metric() -> None:
    from megafp8.training.observer import StepMetrics

    page = (ROOT / "docs" / "python.md").read_text().partition("## Metrics")[2]
    mappings = {"objective", "evaluations", "layer_norms", "section_seconds"}
    keys = {field.name for field in fields(StepMetrics)} - mappings
    keys |= {"weight_norm", "update_norm", "divergence", "cross_entropy"}
    assert set(re.findall(r"`(\w+)`", page.replace("metrics.jsonl", ""))) == keys


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_notebook(quickstart_data: QuickstartData, tmp_path: Path) -> None:
    """It trains, reads the metrics and generates; then more: resuming, the generator after it, signals, an error."""
    small = [*quickstart_data.overrides, "training.steps=4", "model.num_layers=2", "training.global_batch_size=4",
             "training.eval_steps=1", "training.seq_length=64", "optimizer.warmup_steps=0"]  # fmt: skip
    code = code_of_notebook().replace("layout = [", f"layout = [*{small}, ")
    (tmp_path / "examples").mkdir()
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    done = subprocess.run(
        [sys.executable, "-c", code + CHECKS],
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"},
        cwd=tmp_path / "examples", capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    losses = next(line for line in done.stdout.splitlines() if line.startswith("[(1, "))
    assert 5 < float(losses.split()[1].strip(")],")) < 7, "the loss of the first step, ln 512 = 6.2"


def test_import_is_light_and_names_are_there() -> None:
    code = "import sys, megafp8; print('torch' in sys.modules, 'pydantic' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "False False\n"
    for name in megafp8.__all__:
        assert getattr(megafp8, name).__name__ == name
        assert name in dir(megafp8)
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        getattr(megafp8, "trian")  # noqa: B009


def test_a_folder_without_metrics(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no metrics\.jsonl"):
        megafp8.read_metrics(tmp_path)
