"""Greedy texts of Hugging Face folders against those of `transformers`, for models whose layers keep unlike things."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megafp8.inference import Generator, SamplingOptions
from megafp8.parallel.parallel_state import destroy_model_parallel
from tests.conversion.families import make_theirs, tokens
from tests.marks import slow_but

NAMES = ["kimi-linear", "lfm2-moe", "olmo-hybrid", "gemma4-shared", "deepseek-v4"]


@pytest.mark.parametrize("name", slow_but(NAMES, "gemma4-shared", "deepseek-v4"))
def test_greedy_texts_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    """Prompts of several lengths, together and alone: states do not leak from one text into another."""
    model = make_theirs(name)
    model.save_pretrained(tmp_path)
    prompts = [tokens()[0, :5].tolist(), tokens()[1, :9].tolist(), tokens()[0, 7:8].tolist()]
    expected = [
        model.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False, eos_token_id=-1)[0, len(prompt) :]
        for prompt in prompts
    ]
    generator = Generator.from_checkpoint(tmp_path, device="cpu", dtype=torch.float32)
    options = SamplingOptions(max_tokens=8, ignore_end=True, temperature=0.0)
    together = [x.tokens for x in generator.generate(prompts, options)]
    alone = [generator.generate(prompt, options)[0].tokens for prompt in prompts]
    destroy_model_parallel()
    assert together == alone == [x.tolist() for x in expected]
