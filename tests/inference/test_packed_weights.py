"""Generation on CPUs: packed weights and PyTorch's own ops against the parameters and the references of kernels."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megafp8.batch import Batch
from megafp8.inference import Generator, SamplingOptions, staged_weights
from megafp8.inference.load import InferenceLayout, load_model, open_checkpoint
from megafp8.layers.activation.op import activation
from megafp8.layers.norm.op import norm
from megafp8.layers.rotary.op import rotate_and_split, rotate_heads
from megafp8.linear.onednn_weight import OneDnnInt8Weight, OneDnnWeight, packs, packs_int8
from megafp8.numerics.sources import ACTIVATION_SOURCES
from megafp8.parallel.tensor.layers import ColumnParallelLinear, RowParallelLinear
from tests.conversion.huggingface import smollm2
from tests.conversion.huggingface.test_smollm2 import folder as smollm2_folder
from tests.inference.small_model import llama_with_biases
from tests.world import World

PROMPTS = [[3, 1, 4, 1, 5], [9, 2]]
GREEDY = SamplingOptions(max_tokens=8, ignore_end=True)


@pytest.mark.parametrize("kind", ACTIVATION_SOURCES)
def test_activations(kind: str) -> None:
    """In float64, so that it is the same function."""
    x = 4 * torch.randn(5, 12, dtype=torch.float64)
    expected = activation(kind, x, None, None, None)
    with torch.inference_mode():
        found = activation(kind, x, None, None, None)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("branch", [False, True])
@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_norms(bias: bool, zero_centered: bool, branch: bool) -> None:
    x, other, weight, own_bias = (torch.randn(*size, dtype=torch.float64) for size in ((5, 12), (5, 12), (12,), (12,)))
    given: Any = (x, other if branch else None, weight, own_bias if bias else None, 1e-3, None)
    expected = norm(*given, zero_centered=zero_centered)
    with torch.inference_mode():
        found = norm(*given, zero_centered=zero_centered)
    torch.testing.assert_close(found, expected)


def test_rotary() -> None:
    qkv, angles = torch.randn(5, 1, 8 * 6, dtype=torch.float64), torch.randn(5, 1, 1, 3, dtype=torch.float64)
    tables = angles.cos(), angles.sin()
    q, k, v = qkv.view(5, 1, 8, 6).split([4, 2, 2], dim=2)
    expected = rotate_heads(q, *tables), rotate_heads(k, *tables), v.clone()
    with torch.inference_mode():
        found = rotate_and_split(qkv.clone(), 4, 2, *tables, None)
    for own, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(own, theirs)


def _save_llama(folder: Path, *, tied: bool = False) -> None:
    llama_with_biases(tied=tied).save_pretrained(folder)


@pytest.mark.parametrize("in_training", [False, True])
def test_no_gradients(world2: World, tmp_path: Path, in_training: bool) -> None:
    _save_llama(tmp_path)
    world2.run(_check_gradients, tmp_path, in_training, ranks=1)


def _check_gradients(folder: Path, in_training: bool) -> None:
    model = load_model(open_checkpoint(folder, InferenceLayout(), device="cpu"))
    model = replace(model, in_training=in_training)
    seen: list[bool] = []
    model.stages[0].blocks[0].register_forward_pre_hook(lambda *_: seen.append(torch.is_grad_enabled()))
    Generator(model, max_length=16).generate(PROMPTS, GREEDY)
    assert set(seen) == {False}


def _texts(
    folder: Path, dtype: torch.dtype, weights: Any, tensor: int, packed: bool
) -> list[tuple[list[int], list[float]]]:
    pack_weights = staged_weights.pack_weights
    try:
        if not packed:
            staged_weights.pack_weights = lambda model: None
        generator = Generator.from_checkpoint(folder, device="cpu", dtype=dtype, weights=weights, tensor=tensor)
    finally:
        staged_weights.pack_weights = pack_weights
    return [(own.tokens, own.logprobs) for own in generator.generate(PROMPTS, GREEDY)]


@pytest.mark.parametrize(
    ("dtype", "weights"),
    [
        (torch.float32, None),
        pytest.param(torch.bfloat16, None, marks=pytest.mark.slow),
        (torch.bfloat16, "int8"),
    ],
)
def test_texts(world2: World, tmp_path: Path, dtype: torch.dtype, weights: str | None) -> None:
    """In every layout those of parameters that are not packed, up to a tie, which ends the comparison; in bf16 and int8
    with the log-probabilities of fp32, roughly."""
    _save_llama(tmp_path)
    expected = world2.run(_texts, tmp_path, torch.float32, weights=None, tensor=1, packed=False, ranks=1)[0]
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 0.4}[dtype]  # of weights much larger than trained ones
    for tensor in (1, 2):
        for found in world2.run(_texts, tmp_path, dtype, weights=weights, tensor=tensor, packed=True, ranks=tensor):
            for (tokens, logprobs), (their_tokens, their_logprobs) in zip(found, expected, strict=True):
                pairs = zip(tokens, their_tokens, strict=True)
                same = next((i for i, (a, b) in enumerate(pairs) if a != b), len(tokens))
                assert same == len(tokens) or dtype == torch.bfloat16
                assert same > 0
                assert logprobs[:same] == pytest.approx(their_logprobs[:same], abs=tolerance)


def _linear_layers(folder: Path, dtype: torch.dtype, weights: Any) -> list[tuple[str, int, int]]:
    """The kind of weight of each linear layer, the elements of its parameter, and those of the embedding."""
    opened = open_checkpoint(folder, InferenceLayout(), device="cpu", dtype=dtype, weights=weights)
    (stage,) = load_model(opened).stages
    layers = [m for m in stage.modules() if isinstance(m, ColumnParallelLinear | RowParallelLinear)]
    assert stage.embedding is not None
    embedded = stage.embedding.word.weight.numel()
    return [(type(x.state.packed_weight).__name__, x.weight.numel(), embedded) for x in layers]


@pytest.mark.parametrize("weights", [None, "int8", "fp8"])
def test_parameters_are_freed(world2: World, tmp_path: Path, weights: str | None) -> None:
    """But the embedding, of a model whose output layer is tied to it."""
    if not packs(torch.bfloat16) or not packs_int8():
        pytest.skip("oneDNN has no kernels for such weights here")
    _save_llama(tmp_path, tied=True)
    found = world2.run(_linear_layers, tmp_path, torch.bfloat16, weights, ranks=1)[0]
    of_blocks = OneDnnInt8Weight if weights == "int8" else OneDnnWeight
    output = OneDnnWeight if weights is None else OneDnnInt8Weight
    assert sorted(name for name, _, _ in found) == sorted([*[of_blocks.__name__] * 8, output.__name__])
    assert sorted(left for _, left, _ in found) == [0] * 8 + [128 * 128]
    assert {embedded for _, _, embedded in found} == {128 * 128}


def _perplexity(folder: Path, dtype: torch.dtype, weights: Any, ids_bs: Tensor) -> float:
    (stage,) = load_model(open_checkpoint(folder, InferenceLayout(), device="cpu", dtype=dtype, weights=weights)).stages
    with torch.inference_mode():
        return math.exp(float(stage(None, Batch(ids_bs[:, :-1], ids_bs[:, 1:])).cross_entropy.mean()))


folder = smollm2_folder


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_perplexity_of_a_pretrained_model(world2: World, folder: Path) -> None:
    """SmolLM2-135M's, in int8 with activations in int8 digits. bf16 alone changes it by 0.6 %, int8 by no more."""
    ids_bs = smollm2.english_tokens(folder, 8, 256)
    exact, bf16, int8 = (
        world2.run(_perplexity, folder, dtype, weights, ids_bs, ranks=1)[0]
        for dtype, weights in ((torch.float32, None), (torch.bfloat16, None), (torch.bfloat16, "int8"))
    )
    print(f"fp32 {exact:.4f}, bf16 {bf16:.4f}, int8 {int8:.4f}")
    assert bf16 == pytest.approx(exact, rel=0.01)
    assert int8 == pytest.approx(exact, rel=0.01)
