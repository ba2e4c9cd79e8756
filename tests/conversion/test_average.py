"""Averages of checkpoints, against means in float64 of what was saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megafp8.checkpoint import save
from megafp8.config import Config
from megafp8.conversion.huggingface.source import HfSource
from megafp8.conversion.native import NativeSource
from tests.conversion import checkpoints
from tests.training.presets import SAMPLES_1, TP2, config_of
from tests.training.runs import saved_tensors, train_and_save
from tests.world import World
from tools import average_checkpoints


def make(folder: Path, step: int, *, masters: bool = True, about: dict[str, Any] | None = None) -> dict[str, Tensor]:
    """A checkpoint with values of its own."""
    tensors = {
        name: (torch.randn(tensor.shape, generator=torch.Generator().manual_seed(step)) * step).to(tensor.dtype)
        for name, tensor in checkpoints.everything().items()
        if masters or not name.startswith("optimizer.")
    }
    save(folder / "checkpoints", step, tensors, about or checkpoints.ABOUT)
    return tensors


def average(*arguments: object) -> int:
    return average_checkpoints.main([str(x) for x in arguments])


@pytest.mark.parametrize("masters", [True, False])
def test_the_mean_is_that_of_float64(tmp_path: Path, masters: bool) -> None:
    run = tmp_path / "run"
    saved = [make(run, step, masters=masters) for step in (1, 10, 20, 30)][1:]
    assert average("--load", run, "--last", 3, "--save", tmp_path / "mean", "--verify") == 0
    found = NativeSource(tmp_path / "mean")
    assert found.tensors.keys() == checkpoints.weights().keys()
    for name in found.tensors:
        read = name.replace("model.", "optimizer.master.") if masters else name
        expected = torch.stack([tensors[read].double() for tensors in saved]).mean(0).to(torch.bfloat16)
        assert torch.equal(found.read(name), expected), name
    paths = [str(run / "checkpoints" / f"step_{step:08d}") for step in (10, 20, 30)]
    assert found.about["average_of"] == paths
    assert average("--load", *paths, "--save", tmp_path / "hf", "--to", "hf", "--verify") == 0
    q = "model.layers.1.mlp.gate.weight"
    assert torch.equal(HfSource(tmp_path / "hf").read(q), found.read(q))


def test_what_cannot_be_averaged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, model = tmp_path / "run", dict(checkpoints.MODEL.keys)
    make(run, 10)
    first = run / "checkpoints" / "step_00000010"
    make(tmp_path / "theta", 20, about={**checkpoints.ABOUT, "config": {"model": model | {"rope_theta": 5.0}}})
    make(tmp_path / "words", 20, about={**checkpoints.ABOUT, "tokenizer_fingerprint": "other"})
    for arguments, message in [
        (["--load", run, "--last", 2], "has 1 complete checkpoints, and --last is 2"),
        (["--load", run], "1 checkpoint to average: give two or more"),
        (["--load", first, first], "is given twice"),
        (["--load", first, tmp_path / "theta"], "has a different model than"),
        (["--load", first, tmp_path / "words"], "was trained with a different vocabulary"),
    ]:
        assert average(*arguments, "--save", tmp_path / "mean") == 2
        assert message in capsys.readouterr().err
    assert not (tmp_path / "mean").exists()


def test_a_moving_average(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make(tmp_path / "without", 3)
    state = checkpoints.everything()
    averages = {name: tensor * 2 + 1 for name, tensor in state.items() if name.startswith("optimizer.master.")}
    state |= {name.replace(".master.", ".average."): tensor for name, tensor in averages.items()}
    save(tmp_path / "run" / "checkpoints", 3, state, checkpoints.ABOUT)
    assert average("--load", tmp_path / "run", "--moving", "--save", tmp_path / "mean", "--verify") == 0
    found = NativeSource(tmp_path / "mean")
    assert found.tensors.keys() == checkpoints.weights().keys()
    for name in found.tensors:
        assert torch.equal(found.read(name), averages[name.replace("model.", "optimizer.master.")].bfloat16()), name
    assert average("--load", tmp_path / "without", "--moving", "--save", tmp_path / "none") == 2
    assert "without/checkpoints/step_00000003 has no moving average" in capsys.readouterr().err


def _save(config: Config, folder: str, steps: int) -> None:
    train_and_save(config, None, folder, steps)


def test_checkpoints_of_different_layouts(world2: World, tmp_path: Path) -> None:
    """A run on one rank, and one under tensor parallelism."""
    for preset, steps in ((SAMPLES_1, 1), (TP2 | SAMPLES_1, 2)):
        world2.run(_save, config_of(preset), str(tmp_path / f"{steps}"), steps, ranks=steps)
    one, other = (saved_tensors(tmp_path / f"{steps}", steps) for steps in (1, 2))
    assert average("--load", tmp_path / "1", tmp_path / "2", "--save", tmp_path / "mean") == 0
    mean = NativeSource(tmp_path / "mean")
    for name in mean.tensors:
        assert torch.equal(mean.read(name), ((one[name].double() + other[name].double()) / 2).float())
