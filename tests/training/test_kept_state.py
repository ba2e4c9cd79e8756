"""Optimizer state that is kept in less than fp32 between steps: what training and checkpoints see of it.

Masters in halves (`optimizer.store_param_remainders`) are no less: losses, weights and checkpoints are those of a run
with fp32 masters bit for bit, where that rounds ties away from zero too; each continues the other's checkpoints.

FP8 moments are noisy, and the noise is repeatable: a run that resumes in the same layout continues bit for bit.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megafp8.config import Config
from megafp8.optimizer.adam import MixedPrecisionAdamW
from megafp8.training.state import load_latest, save_state
from tests.marks import slow_but
from tests.optimizer.test_state_storage import nearest_bf16
from tests.training.test_cuda_graphs import Curve
from tests.training.test_zero import _contents, _resume, _save, settings, start, steps_of
from tests.world import World

SAVED, END = 3, 5  # steps before the save, and in all
BF16: dict[str, dict[str, Any]] = {
    "model": {"hidden_size": 32, "ffn_hidden_size": 64, "tie_embeddings": True},
    "training": {"precision": "bf16", "seq_length": 8, "micro_batch_size": 1, "global_batch_size": 2},
    "parallel": {"bucket_mib": 0.005},
}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "dp2-zero": (2, {"zero": 1}),
    "tp2": (2, {"tensor": 2}),
    "pp2": (2, {"pipeline": 2}),
}


def _round_ties_away(self: MixedPrecisionAdamW) -> None:
    """What fp32 masters are rounded by, in float64."""
    for param, master in zip(self._rounded_params, self._rounded_masters, strict=True):
        param.copy_(torch.from_numpy(nearest_bf16(master.numpy())))


def _kept(config: Config, source: str | None, folder: str) -> tuple[Curve, list[Tensor], int]:
    """Train to the save, or load from `source`; save into `folder`; all steps, final weights, bytes of masters."""
    torch_rounds = MixedPrecisionAdamW._copy_masters_to_params
    MixedPrecisionAdamW._copy_masters_to_params = torch.no_grad()(_round_ties_away)  # type: ignore[method-assign]
    try:
        trainer, parallel = start(config)
        curve = steps_of(trainer, parallel, range(SAVED)) if source is None else []
        if source is not None:
            assert load_latest(trainer, Path(source)) == SAVED
        save_state(trainer, Path(folder), SAVED, None)
        curve += steps_of(trainer, parallel, range(SAVED, END))
        trainer.wait_for_weights()
    finally:
        MixedPrecisionAdamW._copy_masters_to_params = torch_rounds  # type: ignore[method-assign]
    held = sum(parts["master"].nbytes for parts in trainer.optimizer.storage.values())
    return curve, [param.detach().clone() for param in trainer.params], held


@pytest.mark.parametrize("layout", slow_but(LAYOUTS, "dp2-zero"))
def test_masters_in_halves_train_what_whole_ones_train(world2: World, tmp_path: Path, layout: str) -> None:
    ranks, parallel = LAYOUTS[layout]
    model = {**BF16["model"], "num_layers": parallel.get("pipeline", 1)}

    def run(halves: bool, source: str | None, folder: str) -> Any:
        optimizer = {"learning_rate": 0.01, "store_param_remainders": halves}
        changes = {**BF16, "model": model, "optimizer": optimizer}
        path = None if source is None else str(tmp_path / source)
        return world2.run(_kept, settings(changes, **parallel), path, str(tmp_path / folder), ranks=ranks)

    straight = run(False, None, "whole")
    saved = _contents(tmp_path / "whole")
    assert any((t.view(torch.int32) & 0xFFFF).any() for name, t in saved.items() if name.startswith("optimizer.master"))
    cases = [(True, None, "halves"), (True, "whole", "a"), (False, "halves", "b"), (True, "halves", "c")]
    for halves, source, folder in cases:
        found = run(halves, source, folder)
        for (curve, weights, held), (expected, their_weights, whole) in zip(found, straight, strict=True):
            assert curve == (expected if source is None else expected[SAVED:])
            assert all(torch.equal(a, b) for a, b in zip(weights, their_weights, strict=True))
            assert held == whole // (2 if halves else 1)
        contents = _contents(tmp_path / folder)
        assert contents.keys() == saved.keys()
        assert all(torch.equal(contents[name], tensor) for name, tensor in saved.items())


FP8: dict[str, dict[str, Any]] = {"optimizer": {"moments_dtype": "fp8"}}


@pytest.mark.parametrize("layout", slow_but([*LAYOUTS, "dp2-fsdp"], "dp2-zero"))
def test_fp8_moments_resume_bit_for_bit(world2: World, tmp_path: Path, layout: str) -> None:
    ranks, parallel = LAYOUTS.get(layout, (2, {"fsdp": True}))
    straight = world2.run(_save, settings(FP8, **parallel), str(tmp_path), ranks=ranks)
    assert world2.run(_resume, settings(FP8, **parallel), str(tmp_path), None, ranks=ranks) == straight
    moments = {name: t for name, t in _contents(tmp_path).items() if name.startswith("optimizer.exp_avg")}
    assert all(t.dtype == torch.bfloat16 and t.any() for t in moments.values())
    assert all((t.view(torch.int16) & 0xF == 0).all() for t in moments.values()), "more than four significant bits"


def test_fp8_moments_in_another_layout(world2: World, tmp_path: Path) -> None:
    """Rounded once more where blocks are cut elsewhere; by less than a step. Runs with bf16 moments exchange them."""
    straight = world2.run(_save, settings(FP8, zero=1), str(tmp_path / "saved"), ranks=2)[0]
    saved = _contents(tmp_path / "saved")
    for name, moments in {"fp8": FP8, "bf16": {"optimizer": {"moments_dtype": "bf16"}}}.items():
        there = settings(moments, zero=1, bucket_mib=1.0)  # which cuts parameters elsewhere
        found = world2.run(_resume, there, str(tmp_path / "saved"), None, ranks=2)[0]
        assert found[0] == pytest.approx(straight[0], rel=1e-5)  # the same weights; their updates are noisy
        for (loss, _), (expected, _) in zip(found, straight, strict=True):
            assert loss == pytest.approx(expected, rel=1e-2)
        world2.run(_resume, there, str(tmp_path / "saved"), str(tmp_path / name), ranks=2)
        again = _contents(tmp_path / name)
        for key, tensor in saved.items():
            if name == "bf16" or not key.startswith("optimizer.exp_avg"):
                assert torch.equal(again[key], tensor), key
            else:
                torch.testing.assert_close(again[key], tensor, rtol=1 / 8, atol=float(tensor.abs().max()) * 2**-17)
                assert (again[key] == tensor).float().mean() > 0.9
    world2.run(_resume, settings(FP8, zero=1), str(tmp_path / "bf16"), str(tmp_path / "back"), ranks=2)
    back = _contents(tmp_path / "back")
    assert all(torch.equal(back[key], tensor) for key, tensor in saved.items())
