"""Saved in layout A, loaded in layout B: the same values bit for bit, and A → B → A is as if nothing had happened.

The truth is put together from what each rank of A holds, without the code that loads (`runs.assembled`). Each model
that loads begins with another seed, so a value that was not loaded is a wrong one. Then B trains on. Its losses are
those of A within the tolerance of `test_layouts`; those of A, back from B, are A's own bit for bit.
"""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from torch import Tensor

from megafp8.checkpoint import CheckpointReader
from megafp8.checkpoint.store import step_folder
from megafp8.training.state import checkpoint_folder
from tests.marks import slow_but
from tests.training.runs import Curve, Runs, Saved, saved_tensors

SAVED = 2  # the step
QUICK = [
    ("delayed tied", "tp2 dp2 zero", "dp4 zero"),
    ("delayed tied", "dp2 fsdp fp8-gather", "tp2 dp2 fsdp"),
    ("deepseek delayed", "dp4 ep4 zero", "tp2 pp2 ep2"),
    ("muon moe tied average", "tp2 dp2 ep2 zero", "dp4 ep2 fsdp"),
    ("few-rows delayed", "dp4 fsdp", ""),
]
SLOW = [
    ("hybrid delayed", "tp2 pp2", "dp2 fsdp"),
    ("hybrid", "dp2 zero", "tp2"),
    ("4-layers no-clip delayed tied", "pp2 interleaved", "pp2 zb-v"),
    ("delayed smooth", "", "tp2 dp2 zero"),
    ("muon bf16 delayed", "tp2 pp2", "dp2 zero fp8-gather"),
    ("muon deepseek", "dp4 hsdp", "tp2 ep2"),
    ("delayed fp64", "tp2 cp2", "cp4"),
    ("gpt2 tied mtp", "tp2 pp2", "pp2 dp2 zero"),
    ("4-layers delayed gpt2 tied", "pp2 zb-v", "tp2"),
    ("deepseek mtp delayed", "dp4 ep4 zero", "tp2 pp2 ep2"),
    ("moe", "", "dp4 ep4"),
    ("gemma delayed tied", "tp2 pp2", "dp2 fsdp fp8-gather"),
    ("gpt-oss delayed", "dp4 ep2 fsdp", "tp2 pp2 ep2"),
    ("gpt-oss", "dp4 ep4 zero", "cp2"),
    ("bloom", "cp2 dp2 zero", "tp2 pp2"),
    ("moe bf16", "dp2 fsdp", "cp2 dp2 ep2 zero"),
    ("moe", "dp4 ep2 fsdp", "dp4 ep2 zero"),
    ("deepseek tied", "tp2 dp2 ep2 fsdp", "pp2 dp2 fsdp"),
    ("moe delayed", "dp2 ep2 zero", "tp2 dp4 ep2 hsdp fp8-gather"),
    ("4-layers deepseek", "pp2 dp2 ep2 zb-v", "tp2 ep2"),
    ("4-layers tied mtp", "pp2 zb-v", "tp2 dp2 fsdp"),
    ("bert delayed", "dp4 fsdp", "tp2 pp2"),
    ("few-rows bf16 average", "dp4 hsdp", "dp4 fsdp"),
    ("muon few-rows", "dp4 ep2 fsdp", "tp2 dp2 zero"),
    ("few-rows fp8-moments", "tp2 dp4 fsdp", "dp4 fsdp"),
    ("t5", "dp4 fsdp", "tp2"),
    ("deepseek mtp delayed", "dp4 fsdp", "dp4 ep4 zero"),
    ("t5-tied delayed", "pp4 4-samples zero", "tp2 dp2 fsdp"),
    ("t5", "tp2 dp2 zero", "pp2 1+3 zb-h1"),
    ("", "", "tp2 pp2"),
    ("bf16 delayed average", "dp2 fsdp fp8-gather", ""),
    ("bf16 current", "dp2 zero", "dp2 zero fp8-gather"),
    ("delayed tied", "dp2 zero", "pp2 dp2 zero"),
    ("", "cp2 dp2 zero", "tp2 cp2"),
    ("4-layers", "", "pp2 interleaved dp2 zero"),
    ("", "tp2 pp2", "dp4 zero"),
    ("4-layers", "tp4", "pp4"),
    ("4-layers tied", "pp2 zb-v", "tp4 no-sp"),
    ("4-layers tied", "pp2 dp2 zero", "tp2 pp2 interleaved"),
    ("4-layers tied", "pp4", "tp2 dp2 zero"),
    ("4-layers gpt2 tied", "tp2 no-sp", "pp2 3+1"),
    ("4-layers gpt2", "tp2 no-sp", "pp2 interleaved"),
    ("4-layers qk-norm", "tp2", "pp2 zb-v"),
    ("qk-norm", "cp2", "tp4"),
    ("delayed smooth", "tp2 pp2", "dp2 zero"),
    ("4-layers delayed smooth", "pp2 interleaved dp2 zero", "tp2 no-sp pp2 1+3"),
    ("bf16-moments", "tp2 dp2 zero", "pp2"),
    ("bf16", "tp2 pp2", "dp2 zero"),
    ("bf16 bf16-moments", "pp2 dp2 zero", "tp2 no-sp"),
    *(("delayed tied", "tp2 dp2 zero", there) for there in ("", "dp2", "dp2 zero large-buckets", "tp2 pp2")),
    ("delayed tied", "dp2", "pp2 dp2 zero"),
    ("delayed tied", "dp2 zero", "dp2 zero large-buckets"),
    ("delayed", "dp2 zero fp8-gather", "dp2 zero"),
    ("delayed", "dp2 zero fp8-gather", "tp2 dp2 zero fp8-gather"),
    ("delayed", "dp2 zero fp8-gather", ""),
    ("delayed fp64", "tp2 cp2", ""),
    ("4-layers no-clip delayed", "pp2", "pp2 interleaved"),
    ("4-layers no-clip delayed", "pp2 zb-v", "pp2"),
    ("4-layers gpt2 tied", "dp2 zero", "tp2 no-sp pp2 1+3"),
    ("4-layers bf16", "dp4 zero", "pp2 interleaved"),
    ("4-layers gpt2", "tp2 dp2", "pp4"),
    ("tied", "tp2 pp2 dp2 zero", "tp4 pp2"),
    ("4-layers delayed smooth", "pp2 3+1", "tp4"),
    *(("delayed tied", "dp4 hsdp fp8-gather", there) for there in ("", "dp4 fsdp", "tp2 dp4 hsdp", "pp2 dp2 zero")),
    ("delayed tied", "dp4 hsdp", "dp2 zero"),
    ("bf16 delayed", "", "dp4 hsdp fp8-gather"),
    ("gpt2 tied", "pp2 dp4 hsdp", "tp2 dp2 fsdp"),
    ("bf16-moments", "cp2 dp2 hsdp", "dp4 zero"),
    ("4-layers gpt2", "tp4 no-sp", "pp2 interleaved"),
    ("delayed smooth", "tp4 pp2", "tp2 pp2 dp2 zero"),
    ("gpt2 tied", "", "tp2 pp2 dp2 zero"),
    ("bf16 bf16-moments", "tp2 pp2 dp2 zero", "cp2 dp2 zero"),
    *((model, "tp2 pp2", "cp2 dp2 zero") for model in (
        "", "tied", "gpt2 tied", "gpt2", "qk-norm", "delayed smooth", "delayed gpt2 tied", "bf16-moments", "bf16",
        "bf16 bf16-moments",
    )),
]  # fmt: skip


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


def assert_training_goes_on(found: Curve, expected: Curve, model: list[str]) -> None:
    """Steps of another layout, as `test_layouts` compares them. Those of pipelines that do not clip have the same
    bits."""
    if "no-clip" in model:
        assert [loss for loss, _ in found] == [loss for loss, _ in expected]
    if "fp64" in model:
        assert found[0][0] == pytest.approx(expected[0][0], rel=1e-8)
    rounded = {"delayed", "current", "bf16", "bf16-moments"} & set(model)
    for (a_loss, a_norm), (b_loss, b_norm) in zip(found, expected, strict=True):
        assert a_loss == pytest.approx(b_loss, rel=2e-3 if rounded else 1e-5)
        if not rounded:
            assert a_norm == pytest.approx(b_norm, rel=1e-5)


def saved_by(runs: Runs, model: str, layout: str) -> Saved:
    return runs.saved(f"4-samples {model} {layout}")


@pytest.mark.parametrize(("model", "a", "b"), slow_but(QUICK + SLOW, *QUICK))
def test_there_and_back(runs: Runs, model: str, a: str, b: str) -> None:
    saved = saved_by(runs, model, a)
    moments = Counter(
        name.split(".")[1] for name, x in saved.tensors.items() if name.startswith("optimizer.") and x.any()
    )
    trained = [name for name in saved.tensors if name.startswith("model.") and not name.endswith("router.bias")]
    assert moments["exp_avg"] == moments["exp_avg_sq"] == len(trained) - moments["momentum_buffer"]
    assert bool(moments["momentum_buffer"]) == ("muon" in model.split())
    assert moments["average"] == ("average" in model.split()) * len(trained)
    masters = any(name.startswith("optimizer.master.") for name in saved.tensors)
    assert masters == bool({"bf16", "fp64"} & {*model.split()})
    there = runs.saved(f"4-samples {model} {b}", saved.folder)
    assert_same(there.tensors, saved.tensors)
    assert_training_goes_on(there.curve, saved.curve, model.split())
    back = runs.saved(f"4-samples {model} {a}", there.folder)
    assert_same(back.tensors, saved.tensors)
    for outcome in (saved, back):
        assert_same(saved_tensors(outcome.folder, SAVED), saved.tensors)
    assert back.curve == saved.curve
    assert all(math.isfinite(loss) for loss, _ in back.curve)


@pytest.mark.parametrize("layout", slow_but(["tp2 dp2 zero", "dp4 hsdp"], "tp2 dp2 zero"))
def test_a_checkpoint_of_shards_has_each_element_once(runs: Runs, layout: str) -> None:
    saved = saved_by(runs, "delayed tied", layout)
    index = CheckpointReader(step_folder(checkpoint_folder(saved.folder), SAVED)).index
    for name, entry in index.state_dict_metadata.items():
        assert sum(math.prod(chunk.sizes) for chunk in entry.chunks) == math.prod(entry.size), name
