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
from tests.training.presets import *  # noqa: F403
from tests.training.presets import Preset
from tests.training.runs import Curve, Runs, Saved, saved_tensors

SAVED = 2  # the step
QUICK = [
    (DELAYED | TIED, DP2 | ZERO, TP2 | PP2),
    (MUON | MOE | TIED | AVERAGE, DP2 | EP2 | ZERO, DP2 | FSDP),
]
SLOW = [
    (DELAYED | TIED, TP2 | DP2 | ZERO, PP2 | DP2 | ZERO),
    (DELAYED | TIED, TP2 | DP2 | ZERO, DP4 | ZERO),
    (NONE, NONE, TP2 | PP2),
    (MUON | MOE | TIED | AVERAGE, TP2 | DP2 | EP2 | ZERO, DP4 | EP2 | FSDP),
    (DELAYED | TIED, DP2 | FSDP | FP8_GATHER, TP2 | DP2 | FSDP),
    (DEEPSEEK | DELAYED, DP4 | EP4 | ZERO, TP2 | PP2 | EP2),
    (FEW_ROWS | DELAYED, DP4 | FSDP, NONE),
    (HYBRID | DELAYED, TP2 | PP2, DP2 | FSDP),
    (HYBRID, DP2 | ZERO, TP2),
    (SHARED_ATTENTION | DELAYED, TP2, DP2 | FSDP),
    (HYPER | DELAYED, TP2 | PP2, DP2 | EP2 | FSDP),
    (COMPRESSED | DELAYED, TP2 | PP2, DP2 | FSDP),
    (NEMOTRON | DELAYED, TP2 | PP2, DP2 | EP2 | FSDP),
    (LAYERS_4 | NO_CLIP | DELAYED | TIED, PP2 | INTERLEAVED, PP2 | ZB_V),
    (DELAYED, NONE, TP2 | DP2 | ZERO),
    (MUON | BF16 | DELAYED, TP2 | PP2, DP2 | ZERO | FP8_GATHER),
    (MUON | DEEPSEEK, DP4 | HSDP, TP2 | EP2),
    (DELAYED | FP64, TP2 | CP2, CP4),
    (GPT2 | TIED | MTP, TP2 | PP2, PP2 | DP2 | ZERO),
    (LAYERS_4 | DELAYED | GPT2 | TIED, PP2 | ZB_V, TP2),
    (DEEPSEEK | MTP | DELAYED, DP4 | EP4 | ZERO, TP2 | PP2 | EP2),
    (MOE, NONE, DP4 | EP4),
    (GEMMA | DELAYED | TIED, TP2 | PP2, DP2 | FSDP | FP8_GATHER),
    (GPT_OSS | DELAYED, DP4 | EP2 | FSDP, TP2 | PP2 | EP2),
    (GPT_OSS, DP4 | EP4 | ZERO, CP2),
    (BLOOM, CP2 | DP2 | ZERO, TP2 | PP2),
    (MOE | BF16, DP2 | FSDP, CP2 | DP2 | EP2 | ZERO),
    (MOE, DP4 | EP2 | FSDP, DP4 | EP2 | ZERO),
    (DEEPSEEK | TIED, TP2 | DP2 | EP2 | FSDP, PP2 | DP2 | FSDP),
    (MOE | DELAYED, DP2 | EP2 | ZERO, TP2 | DP4 | EP2 | HSDP | FP8_GATHER),
    (LAYERS_4 | DEEPSEEK, PP2 | DP2 | EP2 | ZB_V, TP2 | EP2),
    (LAYERS_4 | TIED | MTP, PP2 | ZB_V, TP2 | DP2 | FSDP),
    (BERT | DELAYED, DP4 | FSDP, TP2 | PP2),
    (FEW_ROWS | BF16 | AVERAGE, DP4 | HSDP, DP4 | FSDP),
    (MUON | FEW_ROWS, DP4 | EP2 | FSDP, TP2 | DP2 | ZERO),
    (FEW_ROWS | FP8_MOMENTS, TP2 | DP4 | FSDP, DP4 | FSDP),
    (T5, DP4 | FSDP, TP2),
    (DEEPSEEK | MTP | DELAYED, DP4 | FSDP, DP4 | EP4 | ZERO),
    (T5_TIED | DELAYED, PP4 | SAMPLES_4 | ZERO, TP2 | DP2 | FSDP),
    (T5, TP2 | DP2 | ZERO, PP2 | STAGES_1_3 | ZB_H1),
    (BF16 | DELAYED | AVERAGE, DP2 | FSDP | FP8_GATHER, NONE),
    (BF16 | CURRENT, DP2 | ZERO, DP2 | ZERO | FP8_GATHER),
    (BF16 | MOE_6 | DELAYED, DP4 | EP2 | FSDP | FP8_GATHER, TP2 | DP2 | EP2 | ZERO | FP8_GATHER),
    (DELAYED | TIED, DP2 | ZERO, PP2 | DP2 | ZERO),
    (NONE, CP2 | DP2 | ZERO, TP2 | CP2),
    (LAYERS_4, NONE, PP2 | INTERLEAVED | DP2 | ZERO),
    (NONE, TP2 | PP2, DP4 | ZERO),
    (LAYERS_4, TP4, PP4),
    (LAYERS_4 | TIED, PP2 | ZB_V, TP4 | NO_SP),
    (LAYERS_4 | TIED, PP2 | DP2 | ZERO, TP2 | PP2 | INTERLEAVED),
    (LAYERS_4 | TIED, PP4, TP2 | DP2 | ZERO),
    (LAYERS_4 | GPT2 | TIED, TP2 | NO_SP, PP2 | STAGES_3_1),
    (LAYERS_4 | GPT2, TP2 | NO_SP, PP2 | INTERLEAVED),
    (LAYERS_4 | QK_NORM, TP2, PP2 | ZB_V),
    (QK_NORM, CP2, TP4),
    (DELAYED, TP2 | PP2, DP2 | ZERO),
    (LAYERS_4 | DELAYED, PP2 | INTERLEAVED | DP2 | ZERO, TP2 | NO_SP | PP2 | STAGES_1_3),
    (BF16_MOMENTS, TP2 | DP2 | ZERO, PP2),
    (BF16, TP2 | PP2, DP2 | ZERO),
    (BF16 | BF16_MOMENTS, PP2 | DP2 | ZERO, TP2 | NO_SP),
    *((DELAYED | TIED, TP2 | DP2 | ZERO, there) for there in (NONE, DP2, DP2 | ZERO | LARGE_BUCKETS, TP2 | PP2)),
    (DELAYED | TIED, DP2, PP2 | DP2 | ZERO),
    (DELAYED | TIED, DP2 | ZERO, DP2 | ZERO | LARGE_BUCKETS),
    (DELAYED, DP2 | ZERO | FP8_GATHER, DP2 | ZERO),
    (DELAYED, DP2 | ZERO | FP8_GATHER, TP2 | DP2 | ZERO | FP8_GATHER),
    (DELAYED, DP2 | ZERO | FP8_GATHER, NONE),
    (DELAYED | FP64, TP2 | CP2, NONE),
    (LAYERS_4 | NO_CLIP | DELAYED, PP2, PP2 | INTERLEAVED),
    (LAYERS_4 | NO_CLIP | DELAYED, PP2 | ZB_V, PP2),
    (LAYERS_4 | GPT2 | TIED, DP2 | ZERO, TP2 | NO_SP | PP2 | STAGES_1_3),
    (LAYERS_4 | BF16, DP4 | ZERO, PP2 | INTERLEAVED),
    (LAYERS_4 | GPT2, TP2 | DP2, PP4),
    (TIED, TP2 | PP2 | DP2 | ZERO, TP4 | PP2),
    (LAYERS_4 | DELAYED, PP2 | STAGES_3_1, TP4),
    *((DELAYED | TIED, DP4 | HSDP | FP8_GATHER, there) for there in (NONE, DP4 | FSDP, TP2 | DP4 | HSDP,
        PP2 | DP2 | ZERO)),
    (DELAYED | TIED, DP4 | HSDP, DP2 | ZERO),
    (BF16 | DELAYED, NONE, DP4 | HSDP | FP8_GATHER),
    (GPT2 | TIED, PP2 | DP4 | HSDP, TP2 | DP2 | FSDP),
    (BF16_MOMENTS, CP2 | DP2 | HSDP, DP4 | ZERO),
    (LAYERS_4 | GPT2, TP4 | NO_SP, PP2 | INTERLEAVED),
    (DELAYED, TP4 | PP2, TP2 | PP2 | DP2 | ZERO),
    (GPT2 | TIED, NONE, TP2 | PP2 | DP2 | ZERO),
    (BF16 | BF16_MOMENTS, TP2 | PP2 | DP2 | ZERO, CP2 | DP2 | ZERO),
    *((model, TP2 | PP2, CP2 | DP2 | ZERO) for model in (
        NONE, TIED, GPT2 | TIED, GPT2, QK_NORM, DELAYED, DELAYED | GPT2 | TIED, BF16_MOMENTS, BF16,
        BF16 | BF16_MOMENTS,
    )),
]  # fmt: skip


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


def assert_training_goes_on(found: Curve, expected: Curve, model: Preset) -> None:
    """Steps of another layout, as `test_layouts` compares them. Those of pipelines that do not clip have the same
    bits."""
    if NO_CLIP in model:
        assert [loss for loss, _ in found] == [loss for loss, _ in expected]
    if FP64 in model:
        assert found[0][0] == pytest.approx(expected[0][0], rel=1e-11)
    rounded = {DELAYED, CURRENT, BF16, BF16_MOMENTS} & {*model.parts}
    for (a_loss, a_norm), (b_loss, b_norm) in zip(found, expected, strict=True):
        assert a_loss == pytest.approx(b_loss, rel=2e-3 if rounded else 1e-5)
        if not rounded:
            assert a_norm == pytest.approx(b_norm, rel=1e-5)


def saved_by(runs: Runs, model: Preset, layout: Preset) -> Saved:
    return runs.saved(SAMPLES_4 | model | layout)


@pytest.mark.parametrize(("model", "a", "b"), slow_but(QUICK + SLOW, *QUICK))
def test_there_and_back(runs: Runs, model: Preset, a: Preset, b: Preset) -> None:
    saved = saved_by(runs, model, a)
    moments = Counter(
        name.split(".")[1] for name, x in saved.tensors.items() if name.startswith("optimizer.") and x.any()
    )
    constants = "router.bias", "router.table"
    trained = [name for name in saved.tensors if name.startswith("model.") and not name.endswith(constants)]
    assert moments["exp_avg"] == moments["exp_avg_sq"] == len(trained) - moments["momentum_buffer"]
    assert bool(moments["momentum_buffer"]) == (MUON in model)
    assert moments["average"] == (AVERAGE in model) * len(trained)
    masters = any(name.startswith("optimizer.master.") for name in saved.tensors)
    assert masters == (BF16 in model)
    there = runs.saved(SAMPLES_4 | model | b, saved.folder)
    assert_same(there.tensors, saved.tensors)
    assert_training_goes_on(there.curve, saved.curve, model)
    back = runs.saved(SAMPLES_4 | model | a, there.folder)
    assert_same(back.tensors, saved.tensors)
    for outcome in (saved, back):
        assert_same(saved_tensors(outcome.folder, SAVED), saved.tensors)
    assert back.curve == saved.curve
    assert all(math.isfinite(loss) for loss, _ in back.curve)


@pytest.mark.parametrize("layout", slow_but([DP2 | ZERO, TP2 | DP2 | ZERO, DP4 | HSDP], DP2 | ZERO))
def test_a_checkpoint_of_shards_has_each_element_once(runs: Runs, layout: Preset) -> None:
    saved = saved_by(runs, DELAYED | TIED, layout)
    index = CheckpointReader(step_folder(checkpoint_folder(saved.folder), SAVED)).index
    for name, entry in index.state_dict_metadata.items():
        assert sum(math.prod(chunk.sizes) for chunk in entry.chunks) == math.prod(entry.size), name
