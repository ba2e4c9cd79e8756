"""Weights that ZeRO ranks gather, as values and as FP8 data: when they are waited for, what is sent, what is refused.

How it trains: test_layouts.py.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
from torch import Tensor

from megafp8.config import Config, ConfigError
from megafp8.parallel import collectives
from megafp8.parallel.data.strategy import Zero1
from tests.marks import slow_but
from tests.training.presets import *  # noqa: F403
from tests.training.presets import MIXED, Preset, config_of
from tests.training.runs import Curve, Runs, check_config, start, steps_of
from tests.world import World


class _Late:
    """A gather that does nothing before it is waited for."""

    def __init__(self, gather: Any, x: Tensor, group: Any) -> None:
        self.gather = functools.partial(gather, x, group)

    def wait(self) -> None:
        self.gather().wait()


def _late_case(config: Config) -> tuple[Curve, Curve]:
    expected = steps_of(*start(config), range(4))
    gather = collectives.all_gather_in_place_async
    collectives.all_gather_in_place_async = functools.partial(_Late, gather)  # type: ignore[assignment]
    try:
        return expected, steps_of(*start(config), range(4))
    finally:
        collectives.all_gather_in_place_async = gather


LATE = [
    PP2 | DP2 | ZERO | TIED | CURRENT, DP2 | ZERO | CURRENT | FP8_GATHER, DP2 | ZERO | TIED | CURRENT,
    DP2 | ZERO | TIED | CURRENT | FULL,
]  # fmt: skip


@pytest.mark.parametrize("preset", slow_but(LATE, LATE[0]))
def test_nobody_computes_with_weights_that_are_still_on_their_way(world4: World, preset: Preset) -> None:
    for expected, found in world4.run(_late_case, config_of(preset), ranks=preset.ranks):
        assert found == expected


@pytest.mark.slow
def test_the_report_samples_what_is_still_cast_in_the_layers(runs: Runs) -> None:
    values, fp8 = (runs.of(DP2 | ZERO | DELAYED | REPORT | more) for more in (NONE, FP8_GATHER))
    assert fp8.curve == values.curve
    assert {record.operand for record in values.records} == {"input", "weight", "grad_output"}
    assert {record.operand for record in fp8.records} == {"input", "grad_output"}


def _report_case(config: Config) -> tuple[str, int, int, int, int]:
    trainer, _ = start(config)
    strategy = trainer.strategy
    assert isinstance(strategy, Zero1)
    sent: list[int] = []
    gather = collectives.all_gather_in_place_async

    def counted(x: Tensor, group: Any) -> Any:
        sent.append(x.nbytes)
        return gather(x, group)

    collectives.all_gather_in_place_async = counted  # type: ignore[assignment]
    try:
        strategy.invalidate()
        strategy.wait()
    finally:
        collectives.all_gather_in_place_async = gather
    fp8_elements, elements = (sum(p.numel() for p in params) for params in (strategy.fp8_weights, strategy.params))
    (buffer,) = strategy.weights
    return strategy.describe(), sum(sent), buffer.nbytes, fp8_elements, elements


def test_bytes_sent_and_held(world2: World) -> None:
    wide = {"hidden_size": 128, "ffn_hidden_size": 256}
    for text, sent, held, fp8, elements in world2.run(
        _report_case, config_of(DP2 | ZERO | CURRENT | FP8_GATHER, model=wide)
    ):
        assert sent == held
        assert fp8 + 4 * (elements - fp8) <= sent < 1.02 * (fp8 + 4 * (elements - fp8))  # padding
        assert text.startswith("FP8 parameters: 8 weights are gathered in FP8")


def _collectives_case(config: Config) -> list[tuple[int, ...]]:
    """Shapes of what is reduced between the update and the gather of a step."""
    trainer, parallel = start(config)
    steps_of(trainer, parallel, range(2))
    seen: list[tuple[int, ...]] = []
    all_reduce = collectives.dist.all_reduce

    def noted(x: Tensor, *args: Any, **options: Any) -> Any:
        seen.append(tuple(x.shape))
        return all_reduce(x, *args, **options)

    collectives.dist.all_reduce = noted
    try:
        trainer.strategy.invalidate()
        trainer.strategy.gather()
    finally:
        collectives.dist.all_reduce = all_reduce
    trainer.strategy.wait()
    return seen


@pytest.mark.parametrize(
    ("recipe", "reduced"), [(CURRENT, [(8,)]), (DELAYED, []), pytest.param(STATIC, [], marks=pytest.mark.slow)]
)
def test_the_amaxes_of_all_weights_take_one_collective(
    world4: World, recipe: Preset, reduced: list[tuple[int, ...]]
) -> None:
    for seen in world4.run(_collectives_case, config_of(TP2 | DP2 | ZERO | FP8_GATHER | recipe)):
        assert seen == reduced


@pytest.mark.parametrize(
    ("preset", "fp8", "message"),
    [
        (CURRENT, {}, "parallel.zero is 0"),
        (ZERO, {}, "fp8.recipe is none"),
        (ZERO | BLOCKWISE, {}, "finer scales for weights"),
        (ZERO | ROWWISE, {}, "finer scales for weights"),
        (ZERO | CUSTOM, {"custom": MIXED[:1]}, "finer scales for weights"),
        (ZERO | CURRENT | FPROP_BF16, {}, "needs the weight in high precision"),
        (ZERO | STATIC, {"calibration_steps": 2}, "while they calibrate"),
    ],
)
def test_what_needs_values_is_refused(preset: Preset, fp8: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_config(config_of(preset | FP8_GATHER, fp8=fp8), 2)
    check_config(config_of(preset, fp8=fp8), 2)
