"""Weights gathered as FP8 codes train what weights gathered as values train: fp8.param_gather on and off.

The codes are those that each rank would have cast, so losses, norms and weights are the same bit for bit.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megafp8.config import Config, ConfigError, check_layout
from megafp8.distributed import collectives
from megafp8.parallel_state import ParallelState
from megafp8.training import fp8_param_gather as fp8_parameters
from megafp8.training.cuda_graphs import MicrobatchGraphs
from megafp8.training.state import load_latest, save_state
from megafp8.training.trainer import Trainer
from tests.training.test_cuda_graphs import Curve, HighPrecisionFallback, batches
from tests.training.test_zero import _contents, _Late, settings, start, steps_of
from tests.world import World

Changes = dict[str, dict[str, Any]]

STEPS = 6
CURRENT: Changes = {"fp8": {"recipe": "current"}}
DELAYED: Changes = {"fp8": {"recipe": "delayed", "amax_history_len": 4}}
STATIC: Changes = {"fp8": {"recipe": "static", "static_amax": {"*.weight": 0.2, "*.input": 8.0, "*.grad_output": 1e-3}}}
MIXED = [
    {"layers": "*.mlp.down", "input": "rowwise", "weight": "rowwise", "grad_output": "rowwise"},
    {"layers": "*.attention.*", "input": "current", "weight": "delayed", "grad_output": "current"},
    {"layers": "*", "input": "delayed", "weight": "current", "grad_output": "delayed"},
]
LAYERNORM = {"linear_bias": True, "normalization": "layernorm", "activation": "gelu_tanh"}
SMALL: Changes = {
    "model": {"num_layers": 1, "hidden_size": 32, "ffn_hidden_size": 64},
    "training": {"precision": "bf16", "seq_length": 8, "micro_batch_size": 1, "global_batch_size": 2},
    "parallel": {"bucket_mib": 0.005},
}


def _with(changes: Changes, **sections: dict[str, Any]) -> Changes:
    return {name: {**changes.get(name, {}), **sections.get(name, {})} for name in changes.keys() | sections.keys()}


CASES: dict[str, tuple[int, Changes]] = {
    "alone": (1, CURRENT),
    "current": (2, _with(CURRENT, model={"tie_embeddings": True})),
    "delayed": (2, _with(DELAYED, model=LAYERNORM)),
    "delayed-every-other": (2, _with(DELAYED, fp8={"interval": 2, "amax_compute_algo": "most_recent"})),
    "static": (2, STATIC),
    "custom": (2, {"fp8": {"recipe": "custom", "custom": MIXED, "amax_history_len": 4}}),
    "wgrad": (2, _with(CURRENT, fp8={"wgrad_in_bf16": True, "power_of_two_scale": True})),
    "some-layers": (2, _with(DELAYED, fp8={"exclude": ["*.proj"], "first_blocks_bf16": 1})),
    "smooth-current": (2, _with(CURRENT, fp8={"smooth_swiglu": True})),
    "smooth-delayed": (2, _with(DELAYED, fp8={"smooth_swiglu": True})),
    "fp64": (2, _with(DELAYED, training={"precision": "fp64"})),
    "bf16": (2, _with(DELAYED, **SMALL)),
    "bf16-current": (2, _with(CURRENT, **SMALL, optimizer={"moments_dtype": "bf16"})),
    "waiting": (2, _with(CURRENT, parallel={"overlap_param_gather": False, "overlap_grad_reduce": False})),
    "recompute": (2, _with(DELAYED, parallel={"recompute": "full"})),
    "cp2": (2, _with(CURRENT, parallel={"context": 2})),
    "tp2-sp": (4, _with(CURRENT, parallel={"tensor": 2})),
    "tp2": (4, _with(DELAYED, parallel={"tensor": 2, "sequence_parallel": False}, fp8={"smooth_swiglu": True})),
    "pp2": (4, _with(DELAYED, parallel={"pipeline": 2}, model={"tie_embeddings": True})),
    "pp2-v": (
        4,
        _with(CURRENT, parallel={"pipeline": 2, "schedule": "zb-v", "virtual_pipeline": 2}, model={"num_layers": 4}),
    ),
}


SLOW = {"delayed-every-other", "static", "wgrad", "smooth-current", "fp64", "bf16-current", "recompute", "cp2", "pp2"}
"""A run or two away from others."""


def _pair(changes: Changes, **parallel: Any) -> tuple[Config, Config]:
    """Weights gathered as values, and as codes."""
    coded = _with(changes, fp8={"param_gather": True})
    return settings(changes, zero=1, **parallel), settings(coded, zero=1, **parallel)


def _train(settings: Config) -> tuple[Curve, Trainer]:
    """Losses and norms of steps with an evaluation after each, one of which finds a gradient that is not finite."""
    trainer, parallel = start(settings)
    curve = steps_of(trainer, parallel, range(STEPS - 2))
    curve.append(_bad_step(trainer, parallel, STEPS - 2))
    for step in (STEPS - 1, STEPS):
        curve.append((trainer.evaluate(batches(1000, settings, parallel, False)).mean, 0.0))
        curve += steps_of(trainer, parallel, range(step, step + 1))
    trainer.wait_for_weights()
    return curve, trainer


def _bad_step(trainer: Trainer, parallel: ParallelState, step: int) -> tuple[float, float]:
    """A step that is skipped; its loss."""
    update = trainer.update
    trainer.update = lambda lr, grad_scale: update(lr, grad_scale=torch.tensor(math.nan))  # type: ignore[assignment]
    loss, result = trainer.train_step(step, batches(step, trainer.config, parallel, False))
    trainer.update = update
    assert result.skipped
    return loss.mean, 0.0


def _same_weights(values: Trainer, codes: Trainer) -> bool:
    """Whether both have the same weights, those that are codes as far as this rank owns them."""
    whole = dict(zip(codes.params, values.params, strict=True))
    owned = [
        torch.equal(flat, fragment.view(whole[fragment.param].detach()))
        for fragment, flat in codes.optimizer.released_values()
    ]
    rest = [torch.equal(p, whole[p]) for p in codes.params if p not in codes.released]
    return all(owned + rest)


def _case(changes: Changes) -> tuple[Curve, Curve, bool, int, int, list[int]]:
    plain, coded = _pair(changes)
    expected, values = _train(plain)
    found, codes = _train(coded)
    assert codes.weights is not None
    released = [param.untyped_storage().nbytes() // param.element_size() for param in codes.released]
    elements = sum(param.numel() for param in codes.released)
    return expected, found, _same_weights(values, codes), len(codes.released), elements, released


@pytest.mark.parametrize("case", [pytest.param(c, marks=[pytest.mark.slow] * (c in SLOW)) for c in CASES])
def test_codes_train_what_values_train_bit_for_bit(world4: World, case: str) -> None:
    ranks, changes = CASES[case]
    layers = {"custom": 6, "some-layers": 3, "bf16": 4, "bf16-current": 4, "pp2": 4}.get(case, 8)
    for expected, found, same, count, _, storage in world4.run(_case, changes, ranks=ranks):
        assert found == expected
        assert same
        assert count == layers
        assert storage == [1] * layers  # nothing of the values is left
        assert len({loss for loss, _ in found}) == len(found)


def _late_case(coded: Config) -> tuple[Curve, Curve]:
    trainer, parallel = start(coded)
    expected = steps_of(trainer, parallel, range(4))
    gather = collectives.all_gather_in_place_async
    collectives.all_gather_in_place_async = lambda *x: _Late(gather, *x)  # type: ignore[assignment]
    try:
        trainer, parallel = start(coded)
        return expected, steps_of(trainer, parallel, range(4))
    finally:
        collectives.all_gather_in_place_async = gather


def test_nobody_computes_with_codes_that_are_still_on_their_way(world4: World) -> None:
    for expected, found in world4.run(_late_case, _pair(CURRENT)[1], ranks=2):
        assert found == expected


def _graphs_case(coded: Config) -> tuple[Curve, Curve, int]:
    trainer, parallel = start(coded)
    expected = steps_of(trainer, parallel, range(4))
    trainer, parallel = start(coded)
    fallback = HighPrecisionFallback()
    trainer.graphs = MicrobatchGraphs(trainer.fp8, parallel.device, eager_steps=1, capture=fallback)
    return expected, steps_of(trainer, parallel, range(4)), fallback.replays


@pytest.mark.parametrize(
    "changes", [DELAYED, pytest.param(CURRENT, marks=pytest.mark.slow)], ids=["delayed", "current"]
)
def test_graphs_of_micro_batches(world4: World, changes: Changes) -> None:
    for expected, found, replays in world4.run(_graphs_case, _pair(changes)[1], ranks=2):
        assert found == expected
        assert replays == 3


def _recorded_case(changes: Changes) -> tuple[Curve, Curve, set[str], set[str]]:
    curves, operands = [], []
    for settings_ in _pair(changes):
        trainer, parallel = start(settings_)
        seen: set[str] = set()
        curves.append([])
        for step in range(3):
            curves[-1] += steps_of(trainer, parallel, range(step, step + 1))
            seen |= {record.operand for record in trainer.fp8_records}
        operands.append(seen)
    return curves[0], curves[1], operands[0], operands[1]


def test_the_report_samples_what_is_still_cast_in_the_layers(world4: World) -> None:
    sampled = _with(DELAYED, fp8={"report_interval": 1})
    (expected, found, whole, rest), *_ = world4.run(_recorded_case, sampled, ranks=2)
    assert found == expected
    assert whole == {"input", "weight", "grad_output"}
    assert rest == {"input", "grad_output"}


# --- what it saves ---------------------------------------------------------------------------------------------------


def _report_case(coded: Config) -> tuple[str, int, int, int, int]:
    trainer, parallel = start(coded)
    assert trainer.weights is not None
    sent: list[int] = []
    gather = collectives.all_gather_in_place_async

    def counted(x: Tensor, group: Any) -> Any:
        sent.append(x.nbytes)
        return gather(x, group)

    collectives.all_gather_in_place_async = counted  # type: ignore[assignment]
    try:
        trainer.publish_weights()
        trainer.wait_for_weights()
    finally:
        collectives.all_gather_in_place_async = gather
    text = fp8_parameters.report(trainer.weights, parallel.data_context.size)
    coded_elements = sum(param.numel() for param in trainer.released)
    return text, sum(sent), trainer.weights.nbytes, coded_elements, sum(param.numel() for param in trainer.params)


def test_bytes_moved_and_kept(world4: World) -> None:
    for text, moved, held, coded, elements in world4.run(_report_case, _pair(CURRENT)[1], ranks=2):
        assert moved == held
        assert coded + 4 * (elements - coded) <= moved < 1.02 * (coded + 4 * (elements - coded))  # padding
        assert text.startswith("FP8 parameters: 8 weights are codes")


def _collectives_case(changes: Changes) -> list[tuple[str, tuple[int, ...]]]:
    """What is reduced between the update and the gather of a step."""
    trainer, parallel = start(_pair(changes)[1])
    steps_of(trainer, parallel, range(2))
    seen: list[tuple[str, tuple[int, ...]]] = []
    all_reduce = collectives.dist.all_reduce

    def noted(x: Tensor, *args: Any, **options: Any) -> Any:
        seen.append((str(options["op"]), tuple(x.shape)))
        return all_reduce(x, *args, **options)

    collectives.dist.all_reduce = noted
    try:
        trainer.publish_weights()
    finally:
        collectives.dist.all_reduce = all_reduce
    trainer.wait_for_weights()
    return seen


@pytest.mark.parametrize(("changes", "reduced"), [(CURRENT, [(8,)]), (DELAYED, []), (STATIC, [])])
def test_the_amaxes_of_all_weights_take_one_collective(
    world4: World, changes: Changes, reduced: list[tuple[int, ...]]
) -> None:
    for seen in world4.run(_collectives_case, _with(changes, parallel={"tensor": 2})):
        assert [shape for _, shape in seen] == reduced


# --- checkpoints -----------------------------------------------------------------------------------------------------


def _save(settings: Config, folder: str) -> Curve:
    """Save after three steps; the three steps after that."""
    trainer, parallel = start(settings)
    steps_of(trainer, parallel, range(3))
    save_state(trainer, Path(folder), 3, None)
    return steps_of(trainer, parallel, range(3, 6))


def _resume(settings: Config, folder: str, again: str) -> Curve:
    """Load, save `again`, and train three more steps."""
    trainer, parallel = start(settings)
    assert load_latest(trainer, Path(folder)) == 3
    save_state(trainer, Path(again), 3, None)
    return steps_of(trainer, parallel, range(3, 6))


@pytest.mark.parametrize(
    "changes", [pytest.param(DELAYED, marks=pytest.mark.slow), _with(CURRENT, **SMALL)], ids=["delayed", "bf16"]
)
def test_a_checkpoint_of_either_is_the_same_and_loads_into_the_other(
    world4: World, tmp_path: Path, changes: Changes
) -> None:
    plain, coded = _pair(changes)
    straight = world4.run(_save, plain, str(tmp_path / "values"), ranks=2)
    assert world4.run(_save, coded, str(tmp_path / "codes"), ranks=2) == straight
    for saved, loaded in (("values", coded), ("codes", plain), ("codes", coded)):
        again = tmp_path / f"{saved}-again"
        assert world4.run(_resume, loaded, str(tmp_path / saved), str(again), ranks=2) == straight
        expected, found = _contents(tmp_path / "values"), _contents(again)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.slow
def test_codes_load_into_another_layout(world4: World, tmp_path: Path) -> None:
    _, coded = _pair(DELAYED)
    world4.run(_save, coded, str(tmp_path / "saved"), ranks=2)
    expected = _contents(tmp_path / "saved")
    for name, ranks, parallel in (("tp2-dp2", 4, {"tensor": 2}), ("dp1", 1, {})):
        other = _pair(DELAYED, **parallel)[1]
        world4.run(_resume, other, str(tmp_path / "saved"), str(tmp_path / name), ranks=ranks)
        found = _contents(tmp_path / name)
        assert all(torch.equal(found[key], tensor) for key, tensor in expected.items())


# --- what cannot be --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "zero", "message"),
    [
        (CURRENT, 0, "parallel.zero is 0"),
        ({}, 1, "fp8.recipe is none"),
        ({"fp8": {"recipe": "blockwise"}}, 1, "finer scales for weights"),
        ({"fp8": {"recipe": "rowwise"}}, 1, "finer scales for weights"),
        ({"fp8": {"recipe": "custom", "custom": MIXED[:1]}}, 1, "finer scales for weights"),
        (_with(CURRENT, fp8={"override_linear_precision": (True, False, False)}), 1, "weight's values"),
        (_with(STATIC, fp8={"calibration_steps": 2}), 1, "layers that calibrate"),
    ],
)
def test_what_needs_values_is_refused(changes: Changes, zero: int, message: str) -> None:
    refused = settings(_with(changes, fp8={"param_gather": True}), zero=zero)
    with pytest.raises(ConfigError, match=message):
        check_layout(refused, 2)
    check_layout(settings(changes, zero=zero), 2)
