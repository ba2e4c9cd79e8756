"""Decode steps that are replayed, against eager ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megafp8.inference import Generator, SamplingOptions
from megafp8.inference.attention import PackedStep
from megafp8.inference.decode_graphs import DecodeGraphs, padded_size
from megafp8.inference.generator import CacheOptions
from megafp8.inference.load import InferenceLayout, load_model, open_checkpoint
from megafp8.inference.paged_cache import PagedCache
from megafp8.inference.scheduler import Chunk, GrowingSequence
from megafp8.parallel.parallel_state import destroy_model_parallel
from tests.conversion.families import make_theirs, tokens

FAMILIES = ("llama3", "gemma2", "gpt-oss", "bloom", "deepseek-v3", "mixtral")


class Recording:
    """In place of a CUDA graph: runs the work again into the tensors of the recording."""

    def __init__(self) -> None:
        self.recorded = 0

    def __call__(self, work: Any) -> Any:
        self.recorded += 1
        result = work()

        def replay() -> Any:
            return result.copy_(work())

        return replay


def test_steps_of_any_size() -> None:
    """Each stage of each size runs eagerly once and is recorded once; what it reads never moves."""
    cache = PagedCache({}, num_pages=9, page_size=4, dtype=torch.float32, device=torch.device("cpu"))
    recording, pointers = Recording(), set()

    def run(index: int, x: Tensor | None, step: PackedStep) -> Tensor:
        pointers.add((index, step.tokens_1n.data_ptr(), step.positions_1n.data_ptr(), 0 if x is None else x.data_ptr()))
        return step.tokens_1n[0] * 10.0 + step.positions_1n[0] if x is None else x + step.slots_n

    graphs = DecodeGraphs(run, cache, torch.device("cpu"), longest=12, multiple=1, new_capture=lambda: recording)
    for count in (3, 2, 4, 3, 2, 4):
        batch = [Chunk(GrowingSequence([], 12), [i + count], 4 + i, [8, 2 + i], last=True) for i in range(count)]
        step = graphs.fill(batch)
        first = graphs.run(0, None, step)
        assert first is not None
        found = graphs.run(1, first.clone(), step)
        assert found is not None
        assert found[:count].tolist() == [(i + count) * 10 + 4 + i + (2 + i) * 4 + i for i in range(count)]
    assert recording.recorded == 4
    assert len(pointers) == 2 * 3  # the eager runs of the second stage had an input of their own


@pytest.mark.parametrize(("count", "multiple", "size"), [(1, 1, 1), (3, 1, 4), (64, 1, 64), (65, 1, 128), (3, 16, 16)])
def test_sizes(count: int, multiple: int, size: int) -> None:
    assert padded_size(count, multiple) == size


@pytest.mark.gpu
@pytest.mark.parametrize("stored", [None, "fp8"])
@pytest.mark.parametrize("name", FAMILIES)
def test_equals_eager_steps(tmp_path: Path, name: str, stored: Any) -> None:
    """Of four texts, a number for which steps of both have the same shapes."""
    make_theirs(name).save_pretrained(tmp_path)
    model = load_model(open_checkpoint(tmp_path, InferenceLayout(), device="cuda", dtype=torch.bfloat16))
    options = [
        SamplingOptions(max_tokens=9, ignore_end=True, temperature=temperature, seed=3, top_k=top_k)
        for temperature, top_k in ((0.0, 0), (1.0, 0), (0.8, 5), (0.0, 0))
    ]
    prompts = [tokens().flatten()[i : i + 5].tolist() for i in range(4)]
    found = []
    for why_eager in ("", "for comparison"):
        own = replace(model, why_eager=why_eager)
        generator = Generator(own, max_length=16, cache=CacheOptions(dtype=stored))
        found += [[x.tokens for x in generator.generate(prompts, options)] for _ in range(2)]
        assert (generator._cached._graphs is None) == bool(why_eager)
    destroy_model_parallel()
    assert found[1:] == found[:-1]
