"""The choice of tokens: against the processors of `transformers`, exact distributions, and on sharded vocabularies."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megafp8.inference.sampling import Chosen, SamplingOptions, SamplingRow, VocabShard, choose, stream_of
from tests.marks import slow_but
from tests.world import World

V = 600
ALL = SamplingOptions(temperature=1.0)
KINDS = {
    "temperature": replace(ALL, temperature=1.7),
    "top_k": replace(ALL, top_k=7),
    "top_k of a shard": replace(ALL, top_k=333),
    "top_p": replace(ALL, top_p=0.8),
    "most of top_p": replace(ALL, top_p=0.999),
    "min_p": replace(ALL, min_p=0.1),
    "all three": replace(ALL, temperature=0.8, top_k=20, top_p=0.9, min_p=0.05),
    "penalty": replace(ALL, repetition_penalty=1.4, top_k=30),
}
TOKENS = [3, 3, 17, 599, 0, 250]


def logits(n: int, v: int = V, dtype: torch.dtype = torch.float32) -> Tensor:
    """`[n, v]`; in bf16 many are equal."""
    return (3 * torch.randn(n, v, generator=torch.Generator().manual_seed(v))).to(dtype).float()


def rows(options: Sequence[SamplingOptions], seed: int = 0) -> list[SamplingRow]:
    return [SamplingRow(x, stream_of(seed, [i], 0), TOKENS) for i, x in enumerate(options)]


def their_probabilities(options: SamplingOptions, logits_v: Tensor) -> Tensor:
    """By the processors and warpers of transformers, in their order."""
    from transformers import generation as g

    steps: list[Any] = [g.RepetitionPenaltyLogitsProcessor(options.repetition_penalty)]
    steps += [g.TemperatureLogitsWarper(options.temperature)]
    steps += [g.TopKLogitsWarper(options.top_k)] if options.top_k else []
    steps += [g.TopPLogitsWarper(options.top_p)] if options.top_p < 1 else []
    steps += [g.MinPLogitsWarper(options.min_p)] if options.min_p else []
    x_1v = logits_v[None].double()
    for process in steps:
        x_1v = process(torch.tensor([TOKENS]), x_1v)
    return x_1v[0].softmax(-1)


def chi_square_p_value(statistic: float, degrees: int) -> float:
    """Upper tail by the regularized incomplete gamma function."""
    return float(torch.special.gammaincc(torch.tensor(degrees / 2.0).double(), torch.tensor(statistic / 2.0).double()))


@pytest.mark.parametrize("kind", slow_but(KINDS, "top_k of a shard", "all three"))
def test_distributions(kind: str) -> None:
    """10,000 samples, each of a seed of its own, against the probabilities; rare tokens are one class."""
    options, n = KINDS[kind], 10_000
    logits_v = logits(1)[0]
    p = their_probabilities(options, logits_v)
    counts = torch.zeros(V, dtype=torch.float64)
    for start in range(0, n, 2000):
        own = [SamplingRow(options, stream_of(start + i, [], 0), TOKENS) for i in range(2000)]
        chosen = choose(VocabShard(logits_v.expand(2000, -1), V, None), own).tokens
        counts += torch.bincount(chosen, minlength=V)
    assert counts[p == 0].sum() == 0, "a token that was to be left out"
    common = p * n >= 5
    expected = torch.cat([p[common], p[~common].sum()[None]]) * n
    found = torch.cat([counts[common], counts[~common].sum()[None]])
    there = expected > 0
    statistic = float(((found - expected).square() / expected)[there].sum())
    assert chi_square_p_value(statistic, int(there.sum()) - 1) > 1e-3


def _rank_choices(logits_nv: Tensor, given: Sequence[SamplingRow], vocab_size: int) -> Chosen:
    group = dist.group.WORLD
    own = logits_nv.chunk(dist.get_world_size(), dim=1)[dist.get_rank()]
    return choose(VocabShard(own, vocab_size, group), given, vocab_size - 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_shards_of_the_vocabulary(world2: World, dtype: torch.dtype) -> None:
    """The same tokens and log-probabilities on two ranks; with equal logits, and with padding in the last slice."""
    options = [SamplingOptions(logprobs=5), *KINDS.values()] * 12
    logits_nv, given, vocab_size = logits(len(options), dtype=dtype), rows(options), V - 7
    whole = choose(VocabShard(logits_nv, vocab_size, None), given, vocab_size - 3)
    for found in world2.run(_rank_choices, logits_nv, given, vocab_size):
        assert torch.equal(found.tokens, whole.tokens)
        assert torch.equal(found.top_tokens, whole.top_tokens)
        torch.testing.assert_close(found.logprobs, whole.logprobs, rtol=0, atol=1e-5)
        torch.testing.assert_close(found.top_logprobs, whole.top_logprobs, rtol=0, atol=1e-5)
    assert int(whole.tokens.max()) < vocab_size - 3
    logprobs = logits_nv[:, :vocab_size].double().log_softmax(1)
    torch.testing.assert_close(
        whole.logprobs.double(), logprobs.gather(1, whole.tokens[:, None])[:, 0], rtol=0, atol=1e-5
    )
    torch.testing.assert_close(whole.top_logprobs.double(), logprobs.topk(5).values, rtol=0, atol=1e-5)
    greedy = logits_nv[::9, : vocab_size - 3].argmax(1)
    assert torch.equal(whole.tokens[::9], greedy)


def test_a_row_does_not_depend_on_the_others() -> None:
    options = list(KINDS.values())
    logits_nv, given = logits(len(options)), rows(options)
    together = choose(VocabShard(logits_nv, V, None), given).tokens
    for i, row in enumerate(given):
        assert choose(VocabShard(logits_nv[i : i + 1], V, None), [row]).tokens == together[i]


def test_noise_differs_by_all_that_it_is_a_function_of() -> None:
    """Of equal probabilities each choice is another, with the odds of 1 : 600 that they are equal."""
    flat = torch.zeros(1, V)
    streams = [stream_of(0, [1], 0), stream_of(1, [1], 0), stream_of(0, [2], 0), stream_of(0, [1], 1)]
    given = [SamplingRow(ALL, stream, TOKENS) for stream in streams] + [SamplingRow(ALL, streams[0], [*TOKENS, 1])]
    found = [int(choose(VocabShard(flat, V, None), [row]).tokens) for row in given]
    assert len(set(found)) == len(found)


def test_equal_logits_are_decided_by_the_lower_index() -> None:
    x = torch.tensor([[-math.inf, 1.0, 2.0, 2.0, -0.0, 0.0]])
    assert int(choose(VocabShard(x, 6, None), rows([SamplingOptions()])).tokens) == 2
    assert int(choose(VocabShard(x, 2, None), rows([replace(ALL, top_k=1)])).tokens) == 1
    keys, known = VocabShard(x, 6, None).largest(x, 6)
    assert ((0xFFFFFFFF - (keys & 0xFFFFFFFF)).tolist(), int(known)) == ([[2, 3, 1, 4, 5, 0]], 6)


WRONG: dict[str, dict[str, Any]] = {
    "max_tokens = 0: must be from 1 to 2147483647": {"max_tokens": 0},
    "top_k = -1: must be from 0 to 2147483647": {"top_k": -1},
    "top_k = 9223372036854775808: must be from 0 to 2147483647": {"top_k": 2**63},
    "max_tokens = a number of 100001 bits: must be from 1": {"max_tokens": 1 << 100000},
    "seed = 9223372036854775808: must be a signed 64-bit integer": {"seed": 2**63},
    "temperature = -0.5: must be 0": {"temperature": -0.5},
    "temperature = 1e-05: must be 0, .* or at least 0.0001": {"temperature": 1e-5},
    "top_p = 0: must be above 0": {"top_p": 0},
    "min_p = 1.5: must be between 0": {"min_p": 1.5},
    "repetition_penalty = 0: must be from 0.0001 to 10000": {"repetition_penalty": 0},
    r"repetition_penalty = 1e.300: must be from 0.0001": {"repetition_penalty": 1e300},
    "stop = 'x': must be non-empty strings": {"stop": "x"},
    r"stop = \('',\): must be non-empty strings": {"stop": ("",)},
}


@pytest.mark.parametrize("message", WRONG)
def test_options_out_of_range(message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingOptions(**WRONG[message])
