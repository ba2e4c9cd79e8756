"""Sharded in full, the model trains what it trains whole: parallel.fsdp on and off; and with its weights gathered as
FP8 codes what it trains with them gathered as values, bit for bit.

Under two data-parallel ranks every sum over ranks has two terms, but gradients are reduced micro-batch by micro-batch,
which is another order than that of the plain run. With one micro-batch there is only one order, and every bit is equal.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megafp8.config import Config, ConfigError, check_layout
from megafp8.data_parallel.fsdp import FullySharded, Released
from megafp8.training.fsdp import report
from megafp8.training.trainer import Trainer
from tests.training.test_cuda_graphs import Curve, batches
from tests.training.test_fp8_param_gather import CURRENT, DELAYED, LAYERNORM, SMALL, STATIC, Changes, _bad_step, _with
from tests.training.test_zero import _contents, _resume, _save, settings, start, steps_of
from tests.world import World

STEPS = 4
TIED: Changes = {"model": {"tie_embeddings": True}}
ONE: Changes = {"training": {"global_batch_size": 4}}  # one micro-batch under two data-parallel ranks


def _train(settings: Config, steps: int = STEPS) -> tuple[Curve, Trainer]:
    """Losses and norms of steps; between them an evaluation, and a step that is skipped."""
    trainer, parallel = start(settings)
    curve = steps_of(trainer, parallel, range(steps - 2))
    curve.append(_bad_step(trainer, parallel, steps - 2))
    curve.append((trainer.evaluate(batches(1000, settings, parallel, False)).mean, 0.0))
    return curve + steps_of(trainer, parallel, range(steps - 1, steps + 1)), trainer


def _case(plain: Config, sharded: Config) -> tuple[Curve, Curve]:
    return _train(plain)[0], _train(sharded)[0]


def _fsdp(changes: Changes, **fp8: Any) -> Config:
    return settings(_with(changes, fp8=fp8), fsdp=True)


CASES: dict[str, tuple[int, Changes]] = {
    "alone": (1, TIED),
    "dp2": (2, {}),
    "dp2-tied": (2, TIED),
    "dp2-biases": (2, {"model": {**LAYERNORM, "position_embedding": "learned"}}),
    "dp2-full": (2, {"parallel": {"recompute": "full"}}),
    "dp2-masked": (2, {"training": {"global_batch_size": 8}}),
    "dp3-uneven": (3, {"training": {"global_batch_size": 6}}),
    "tp2-dp2": (4, {"parallel": {"tensor": 2}}),
    "tp2-dp2-tied": (4, _with(TIED, parallel={"tensor": 2, "sequence_parallel": False})),
    "cp2-dp2": (4, {"parallel": {"context": 2}}),
    "pp2-dp2": (4, {"parallel": {"pipeline": 2}}),
    "pp2-dp2-tied": (4, _with(TIED, parallel={"pipeline": 2})),
    "pp2-vpp2-dp2": (
        4,
        {"parallel": {"pipeline": 2, "virtual_pipeline": 2, "schedule": "interleaved"}, "model": {"num_layers": 4}},
    ),
    "dp2-offload": (2, {"parallel": {"offload": True}}),
}
SLOW = {
    "alone",
    "dp2-tied",
    "pp2-dp2",
    "dp2-biases",
    "dp2-masked",
    "cp2-dp2",
    "pp2-vpp2-dp2",
    "dp2-offload",
    "tp2-dp2-tied",
}


@pytest.mark.parametrize("case", [pytest.param(c, marks=[pytest.mark.slow] * (c in SLOW)) for c in CASES])
def test_shares_train_what_whole_weights_train(world4: World, case: str) -> None:
    ranks, changes = CASES[case]
    for expected, found in world4.run(_case, settings(changes), settings(changes, fsdp=True), ranks=ranks):
        for (a_loss, a_norm), (b_loss, b_norm) in zip(found, expected, strict=True):
            assert a_loss == pytest.approx(b_loss, rel=1e-6)
            assert a_norm == pytest.approx(b_norm, rel=1e-6)
        assert len({loss for loss, _ in found}) == len(found)


EXACT: dict[str, Changes] = {
    "fp32": {},
    "fp64": {"training": {"precision": "fp64"}},
    "delayed": DELAYED,
    "current-tied": _with(CURRENT, **TIED),
    "bf16-delayed": _with(SMALL, **DELAYED),
    "bf16-reduced": _with(SMALL, optimizer={"reduce_dtype": "bf16"}),
    "blockwise": {"fp8": {"recipe": "blockwise"}},
    "rowwise": {"fp8": {"recipe": "rowwise"}},
    "calibrated": {"fp8": {"recipe": "static", "calibration_steps": 1}},
    "selective": _with(CURRENT, parallel={"recompute": "selective"}),
    "wgrad": _with(CURRENT, fp8={"override_linear_precision": (False, False, True)}),
    "dgrad": _with(CURRENT, fp8={"override_linear_precision": (False, True, False)}),
    "fprop": _with(CURRENT, fp8={"override_linear_precision": (True, False, False)}),
}
SLOW_EXACT = {
    "fp32",
    "fp64",
    "blockwise",
    "rowwise",
    "calibrated",
    "selective",
    "wgrad",
    "dgrad",
    "fprop",
    "bf16-reduced",
}


@pytest.mark.parametrize("case", [pytest.param(c, marks=[pytest.mark.slow] * (c in SLOW_EXACT)) for c in EXACT])
def test_with_one_micro_batch_every_bit_is_equal(world4: World, case: str) -> None:
    changes = _with(ONE, **EXACT[case])
    changes["training"].setdefault("global_batch_size", 4)
    for expected, found in world4.run(_case, settings(changes), settings(changes, fsdp=True), ranks=2):
        assert found == expected
        assert len({loss for loss, _ in found}) == len(found)


# --- codes -----------------------------------------------------------------------------------------------------------

CODES: dict[str, tuple[int, Changes]] = {
    "alone": (1, CURRENT),
    "current": (2, CURRENT),
    "delayed-tied": (2, _with(DELAYED, **TIED)),
    "static": (2, STATIC),
    "bf16": (2, _with(SMALL, **DELAYED)),
    "smooth": (2, _with(DELAYED, fp8={"smooth_swiglu": True})),
    "some-layers": (2, _with(CURRENT, fp8={"exclude": ["layers.0.*", "*.mlp.down"]})),
    "uneven": (3, _with(CURRENT, training={"global_batch_size": 6})),
    "full": (2, _with(DELAYED, parallel={"recompute": "full"})),
    "tp2-dp2": (4, _with(CURRENT, parallel={"tensor": 2})),
    "pp2-dp2": (4, _with(DELAYED, parallel={"pipeline": 2})),
}
SLOW_CODES = {"alone", "current", "static", "smooth", "some-layers", "pp2-dp2", "full"}


def _codes_case(changes: Changes) -> tuple[Curve, Curve, bool, list[str]]:
    expected, values = _train(_fsdp(changes))
    found, codes = _train(_fsdp(changes, param_gather=True))
    pairs = zip(values.optimizer.state()["exp_avg"], codes.optimizer.state()["exp_avg"], strict=True)
    same = all(torch.equal(a, b) for (_, a), (_, b) in pairs)
    for block in codes.stages[0].blocks:
        block.unshard()
    released = [name for name, p in codes.stages[0].named_parameters() if isinstance(p, Released)]
    return expected, found, same, released


@pytest.mark.parametrize("case", [pytest.param(c, marks=[pytest.mark.slow] * (c in SLOW_CODES)) for c in CODES])
def test_codes_train_what_values_train_bit_for_bit(world4: World, case: str) -> None:
    ranks, changes = CODES[case]
    layers = {"some-layers": 3, "bf16": 4, "pp2-dp2": 4}.get(case, 8)
    for expected, found, same, released in world4.run(_codes_case, changes, ranks=ranks):
        assert found == expected
        assert same
        assert len(released) == layers
        assert len({loss for loss, _ in found}) == len(found)


# --- memory ----------------------------------------------------------------------------------------------------------


def _storages(tensors: list[Tensor]) -> int:
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t.numel()}.values())


def _held(settings: Config) -> tuple[int, int, int]:
    """Elements of the model; bytes between steps of parameters with gradients, whatever torch holds; of gradients."""
    trainer, parallel = start(settings)
    total = sum(p.numel() for p in trainer.model.parameters())
    steps_of(trainer, parallel, range(1))
    assert isinstance(trainer.gradients, FullySharded)
    groups = [group for m in trainer.gradients._modules for group in _groups(m)]
    held = [p._sharded_param_data for g in groups for p in g.fsdp_params]
    held += [t for g in groups for p in g.fsdp_params for t in (*p.all_gather_outputs, p._unsharded_param)]
    held += [old.data for old in trainer.gradients.row_shards]
    return total, _storages([t for t in held if not isinstance(t, Released)]), trainer.gradients.flat.nbytes


def _groups(module: Any) -> list[Any]:
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    return [state._fsdp_param_group] if groups is None else groups


def test_between_steps_a_rank_holds_its_share(world4: World) -> None:
    for changes in ({}, _with(CURRENT, fp8={"param_gather": True})):
        for total, weights, gradients in world4.run(_held, settings(changes, fsdp=True), ranks=2):
            assert total * 2 <= weights < total * 2.01
            assert total * 2 <= gradients < total * 2.05


def _report(settings: Config) -> str:
    trainer, parallel = start(settings)
    assert trainer.sharded is not None
    return report(trainer.sharded, trainer.released, parallel.data_context.size)


def test_the_log_says_what_is_held_and_received(world4: World) -> None:
    """Of weights of 8 FP8 layers, fp32 and codes; of embedding, output layer and 5 norms, fp32."""
    model = {"hidden_size": 1024, "ffn_hidden_size": 2048}
    coded, others = 2 * (4 * 1024**2 + 3 * 1024 * 2048), 2 * 128 * 1024 + 5 * 1024
    changes = _with(CURRENT, model=model, fp8={"param_gather": True})
    for found in world4.run(_report, settings(changes, fsdp=True), ranks=2):
        numbers = [float(word) for word in re.findall(r"[\d.]+\d", found)]
        gib = [2.5 * coded + 2 * others, coded / 2 + 2 * others, 2 * (coded + others)]
        assert numbers == [round(gib[0] / 2**30, 3), 15, round(gib[1] / 2**30, 3), round(gib[2] / 2**30, 3)], found
        assert "8 of them as FP8 codes" in found


# --- checkpoints -----------------------------------------------------------------------------------------------------


BF16 = _with(SMALL, **DELAYED)


@pytest.mark.parametrize("model", [_with(DELAYED, **TIED), BF16], ids=["fp32", "bf16"])
def test_state_fits_other_layouts_exactly(world4: World, tmp_path: Path, model: Changes) -> None:
    sharded = _fsdp(model, param_gather=True)
    plain = settings(model)
    straight = world4.run(_save, sharded, str(tmp_path / "fsdp"), ranks=2)
    assert world4.run(_resume, sharded, str(tmp_path / "fsdp"), ranks=2) == straight
    world4.run(_resume, plain, str(tmp_path / "fsdp"), str(tmp_path / "plain"), ranks=1)
    world4.run(_resume, settings(_with(model, parallel={"tensor": 2}), fsdp=True), str(tmp_path / "plain"),
               str(tmp_path / "again"), ranks=4)  # fmt: skip
    saved = _contents(tmp_path / "fsdp")
    assert any(tensor.any() for name, tensor in saved.items() if name.startswith("optimizer.exp_avg."))
    for folder in ("plain", "again"):
        found = _contents(tmp_path / folder)
        assert found.keys() == saved.keys()
        assert all(torch.equal(found[key], tensor) for key, tensor in saved.items()), folder


# --- what does not go together ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parallel": {"zero": 1}}, "stage 3, which shares out all that stage 1 does"),
        ({"parallel": {"pipeline": 2, "schedule": "zb-h1"}}, "leaves weight gradients for later"),
        ({"training": {"cuda_graphs": True}}, "gathers weights in every micro-batch"),
        (_with({"fp8": {"recipe": "rowwise"}}, fp8={"param_gather": True}), "finer scales for weights"),
    ],
)
def test_what_cannot_be_sharded_is_refused(changes: Changes, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_layout(settings(changes, fsdp=True), 4)
