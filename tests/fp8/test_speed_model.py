"""The model of a layer's speed against sums done by hand, published points, and common sense."""

from __future__ import annotations

import itertools

import pytest
import torch

from megafp8.fp8 import (
    BlockwiseScaling,
    CurrentScaling,
    CustomScaling,
    DelayedScaling,
    Fp8Recipe,
    MXFP8Scaling,
    NVFP4Scaling,
    RowwiseScaling,
    Rule,
    StaticScaling,
)
from megafp8.fp8.speed_model import LinearSize, predict
from megafp8.host.gpus import CEILINGS, Ceilings, ceilings_of, device_name

H200 = CEILINGS["NVIDIA H200"]
SIZE = LinearSize(2, 3, 5)  # 60 operations a GEMM; x has 6 elements, w 15, dy 10
RECIPES = [DelayedScaling(), StaticScaling(calibration_steps=1), CurrentScaling(), RowwiseScaling(), BlockwiseScaling()]
by_recipe = pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
MIXED = Rule(layers="a", input=RowwiseScaling(), weight=RowwiseScaling(), grad_output=RowwiseScaling())
PLAIN = Rule(layers="*", input=DelayedScaling(), weight=CurrentScaling(), grad_output=DelayedScaling())


def slow(rates: dict[str, float], bandwidth: float, launch: float) -> Ceilings:
    return Ceilings(bf16=60.0, fp8=rates, bandwidth=bandwidth, launch=launch)


ARITHMETIC = slow(
    {"tensor·tensor": 120.0, "row·row": 240.0, "1x128·128x128": 120.0, "1x128·1x128": 60.0}, bandwidth=1e30, launch=0.5
)
MEMORY = Ceilings(bf16=1e30, fp8=dict.fromkeys(ARITHMETIC.fp8, 1e30), bandwidth=1.0, launch=0.0)


@pytest.mark.parametrize(
    ("recipe", "casts_and_gemms"),
    [
        (DelayedScaling(), 3 * 0.5 + 3 * 1.0),
        (StaticScaling(calibration_steps=1), 3 * 0.5 + 3 * 1.0),
        (CurrentScaling(), 6 * 0.5 + 3 * 1.0),  # the amax first, then the cast
        (RowwiseScaling(), 6 * 0.5 + 3 * 0.75),
        (BlockwiseScaling(), 3 * 0.5 + 2 * 1.0 + 1.5),  # wgrad has no square blocks
        (CustomScaling(rules=(PLAIN,)), 4 * 0.5 + 3 * 1.0),
        (DelayedScaling(override_linear_precision=(True, True, False)), 2 * 0.5 + 1.0 + 2 * 1.5),  # w is not cast
    ],
)
def test_where_arithmetic_and_launches_decide(recipe: Fp8Recipe, casts_and_gemms: float) -> None:
    seconds = predict(SIZE, recipe, ARITHMETIC)
    assert seconds.high_precision == pytest.approx(3 * 1.5)
    assert seconds.fp8 == pytest.approx(casts_and_gemms)
    assert seconds.speedup == pytest.approx(4.5 / casts_and_gemms)


@pytest.mark.parametrize(
    ("recipe", "micro_batches", "moved"),
    [
        (DelayedScaling(), 1, 214 + 4 * (6 + 15 + 10)),  # fprop 21 + 20, dgrad 25 + 12, wgrad 16 + 120
        (DelayedScaling(), 5, 214 + 4 * (6 + 3 + 10)),
        (CurrentScaling(), 1, 214 + 6 * (6 + 15 + 10)),
        (RowwiseScaling(override_linear_precision=(False, False, True)), 1, 78 + 152 + 5 * 6 + 6 * 15 + 5 * 10),
    ],
)
def test_where_bytes_decide(recipe: Fp8Recipe, micro_batches: int, moved: int) -> None:
    seconds = predict(SIZE, recipe, MEMORY, micro_batches=micro_batches)
    assert seconds.high_precision == pytest.approx(62 + 62 + 152)
    assert seconds.fp8 == pytest.approx(moved)


def test_a_custom_recipe_is_asked_by_layer() -> None:
    recipe = CustomScaling(rules=(MIXED, PLAIN))
    assert predict(SIZE, recipe, ARITHMETIC, layer="a") == predict(SIZE, RowwiseScaling(), ARITHMETIC)
    assert predict(SIZE, recipe, ARITHMETIC, layer="b") == predict(SIZE, CustomScaling(rules=(PLAIN,)), ARITHMETIC)


def test_a_layer_with_nothing_in_fp8_is_as_fast_as_in_bf16() -> None:
    assert predict(SIZE, CurrentScaling(override_linear_precision=(True,) * 3), H200).speedup == 1.0


# 0.80 and 1.39 were published for torchao's tensorwise recipe on an H100.
@by_recipe
def test_published_points_are_on_the_right_side(recipe: Fp8Recipe) -> None:
    assert predict(LinearSize(1024, 2048, 1024), recipe, H200).speedup < 0.9
    assert 1.3 < predict(LinearSize(4096, 8192, 16384), recipe, H200).speedup < 2.0


@by_recipe
def test_larger_layers_gain_more(recipe: Fp8Recipe) -> None:
    sizes = [2**i for i in range(10, 16)]
    for m, k, n in itertools.product(sizes, repeat=3):
        speedup = predict(LinearSize(m, k, n), recipe, H200).speedup
        for larger in ((2 * m, k, n), (m, 2 * k, n), (m, k, 2 * n)):
            assert predict(LinearSize(*larger), recipe, H200).speedup >= speedup


@by_recipe
def test_more_micro_batches_gain_more(recipe: Fp8Recipe) -> None:
    size = LinearSize(2048, 4096, 4096)
    speedups = [predict(size, recipe, H200, micro_batches=count).speedup for count in (1, 2, 8, 64)]
    assert speedups == sorted(set(speedups))


def test_a_huge_layer_gains_what_its_arithmetic_does() -> None:
    speedup = predict(LinearSize(10**6, 10**6, 10**6), DelayedScaling(), H200).speedup
    assert speedup == pytest.approx(H200.fp8["tensor·tensor"] / H200.bf16, rel=0.01)


@pytest.mark.parametrize("recipe", [MXFP8Scaling(), NVFP4Scaling()])
def test_blocks_of_blackwell_are_not_predicted(recipe: Fp8Recipe) -> None:
    with pytest.raises(ValueError, match=f"the speed of {recipe.name} cannot be predicted: its GEMMs run in bf16"):
        predict(SIZE, recipe, H200)


def test_an_unknown_device() -> None:
    assert ceilings_of("NVIDIA H200") is H200
    with pytest.raises(ValueError, match="the speeds of 'cpu' are not known; known are NVIDIA H200"):
        ceilings_of(device_name(torch.device("cpu")))
