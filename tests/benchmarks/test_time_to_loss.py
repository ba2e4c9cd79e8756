"""The table of final losses and times to a loss, of runs whose losses are given."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from benchmarks.time_to_loss import interval, plot, read, step_at, table


def write_run(folder: Path, recipe: str, seed: int, losses: dict[int, float], seconds: float) -> Path:
    """A run folder with the files that are read."""
    folder.mkdir()
    (folder / "config.yaml").write_text(f"seed: {seed}\nfp8: {{recipe: {recipe}}}\ntraining: {{steps: 20}}\n")
    lines = [
        {
            "step": i,
            "loss": 9.0 if i < 19 else losses.get(20, 1.0) + i % 2 - 0.5,
            "step_seconds": seconds if i > 1 else 60.0,
            "validation_loss": losses.get(i),
        }
        for i in range(1, 21)
    ]
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return folder


def test_gaps_are_of_the_same_seeds(tmp_path: Path) -> None:
    """Seeds differ by more than recipes, and delayed is 1% above bf16 at each, in the last steps of training too."""
    runs = []
    for seed, offset in ((1, 0.0), (2, 1.0), (3, 2.0)):
        bf16 = {10: 4.0 + offset, 20: 2.0 + offset}
        fp8 = {10: 3.0 + offset, 20: (2.0 + offset) * 1.01}
        runs.append(read(write_run(tmp_path / f"a{seed}", "none", seed, bf16, 0.2)))
        runs.append(read(write_run(tmp_path / f"b{seed}", "delayed", seed, fp8, 0.1)))
    # The mean curve of delayed falls from 4 at step 10 to 3.03 at 20, and does not reach 3.
    assert table(runs).splitlines()[2:] == [
        "| bf16 | 3 | 3.0000 ± 2.4843 |  |  | 200.0 | 4 s, 1.00 of bf16's run |",
        "| delayed | 3 | 3.0300 ± 2.5092 | +1.00% ± 0.00% | +1.00% ± 0.00% | 100.0 | not reached |",
    ]
    plot(runs, tmp_path / "loss.png")
    assert (tmp_path / "loss.png").stat().st_size > 10_000


def test_when_a_curve_is_at_a_loss() -> None:
    curve = {100: 4.0, 200: 3.0, 300: 2.0}
    assert step_at(curve, 2.5) == 250
    assert step_at(curve, 5.0) == 100
    assert math.isinf(step_at(curve, 1.9))


def test_intervals() -> None:
    """Of 1 to 5: standard deviation 1.5811, t 2.776."""
    assert interval([1.0, 2.0, 3.0, 4.0, 5.0]) == pytest.approx(2.776 * 1.5811388 / 5**0.5)
    assert math.isinf(interval([1.0]))


def test_without_a_baseline(tmp_path: Path) -> None:
    run = read(write_run(tmp_path / "a", "delayed", 1, {20: 2.0}, 0.1))
    with pytest.raises(ValueError, match=r"no run has fp8\.recipe none"):
        table([run])
    with pytest.raises(ValueError, match="no validation loss"):
        read(write_run(tmp_path / "b", "none", 1, {}, 0.1))
    with pytest.raises(ValueError, match="after step 10 of 20"):
        read(write_run(tmp_path / "c", "none", 1, {10: 2.0}, 0.1))
