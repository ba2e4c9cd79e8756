"""`batch_invariant`: log-probabilities of generated tokens are those of the training forward pass, bit for bit."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from megafp8.batch import Batch
from megafp8.inference import Generator, SamplingOptions
from megafp8.inference.options import CacheOptions
from megafp8.inference.scoring import Request, Scorer
from megafp8.numerics.batch_invariance import batch_invariant
from megafp8.parallel_state import destroy_model_parallel
from tests.conversion.families import make_theirs, tokens

FAMILIES = ["llama3", "qwen3-moe", "gemma2", "deepseek-v3", "gpt-oss", "llama4", "bloom"]
BATCHES = (1, 2, 3, 8, 64)
NEW = 6
CACHES = {
    "whole prompts": CacheOptions(page_size=16, cache_tokens=2048),
    "chunks, preemption": CacheOptions(page_size=4, cache_tokens=96, max_batch_tokens=5, max_sequences=12),
}


def prompts(count: int) -> list[list[int]]:
    """Of 1 to 9 tokens."""
    own = random.Random(1)
    ids = tokens().flatten().tolist()
    return [[own.choice(ids) for _ in range(own.randint(1, 9))] for _ in range(count)]


def trained_logprobs(generator: Generator, texts: Sequence[list[int]]) -> list[list[float]]:
    """Log-probabilities of each token but the first, by a training forward pass with gradients; each text alone, and
    several of one length as a micro-batch."""
    (stage,) = generator.model.stages
    found: list[list[float]] = [[] for _ in texts]
    for length in {len(text) for text in texts}:
        rows = [i for i, text in enumerate(texts) if len(text) == length]
        ids = torch.tensor([texts[i] for i in rows])
        with batch_invariant(), generator.model.fp8.recording(False):
            loss_sb = stage(None, Batch(ids[:, :-1], ids[:, 1:].contiguous()))
        assert loss_sb.requires_grad
        for i, logprobs in zip(rows, (-loss_sb.detach()).t().tolist(), strict=True):
            found[i] = logprobs
    return found


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("cache", CACHES)
def test_logprobs_are_those_of_training(tmp_path: Path, name: str, cache: str) -> None:
    make_theirs(name).save_pretrained(tmp_path)
    generator = Generator.from_checkpoint(
        tmp_path, device="cpu", dtype=torch.float32, batch_invariant=True, max_length=16, cache=CACHES[cache]
    )
    options = SamplingOptions(max_tokens=NEW, ignore_end=True, temperature=1.0, seed=3)
    given = prompts(max(BATCHES))
    alone = [generator.generate(prompt, options)[0] for prompt in given[:8]]
    for count in BATCHES:
        order = random.Random(count).sample(range(count), count)
        completions = generator.generate([given[i] for i in order], options)
        texts = [[*given[i], *x.tokens] for i, x in zip(order, completions, strict=True)]
        expected = trained_logprobs(generator, texts)
        for logprobs, completion in zip(expected, completions, strict=True):
            assert logprobs[-NEW:] == completion.logprobs
        if count == 8:
            scored = Scorer(generator.model, max_length=16).score(
                Request(text[:1], text[1:]) for text in texts
            )
            assert [score.logprobs for score in scored] == expected
    for i, completion in enumerate(alone):
        assert trained_logprobs(generator, [[*given[i], *completion.tokens]])[0][-NEW:] == completion.logprobs
    destroy_model_parallel()
