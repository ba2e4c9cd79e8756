"""Generated texts: equal to those of `transformers`, and the same in any layout, batch and cache."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from megafp8.inference import Completion, Generator, SamplingOptions
from megafp8.inference.generator import CacheOptions
from tests.conversion.families import THEIRS, make_theirs, tokens
from tests.world import World

LENGTHS, NEW = (7, 1, 3), 9
"""Of prompts, some of them longer than the windows; with 16 positions in all, which some families have as a table."""
LAYOUTS: dict[str, dict[str, int]] = {"tp1": {}, "tp2": {"tensor": 2}, "pp2": {"pipeline": 2}}
EXPERTS = {"tp2-ep2": {"tensor": 2, "expert": 2}}
QUICK = ("llama3",)
SMALL_CACHE = CacheOptions(page_size=4, cache_tokens=36, max_batch_tokens=5, max_sequences=3)
"""Chunks of prompts, and sequences that wait and give their pages back."""
GREEDY = SamplingOptions(max_tokens=NEW, ignore_end=True, logprobs=2)
SAMPLED = [
    SamplingOptions(max_tokens=NEW, ignore_end=True, seed=5, temperature=temperature, **options)
    for temperature, options in (
        (1.0, {}),
        (1.3, {"top_k": 9, "min_p": 0.05}),
        (0.9, {"top_p": 0.7, "repetition_penalty": 1.3}),
    )
]


def prompts() -> list[list[int]]:
    return [tokens().flatten()[i : i + n].tolist() for i, n in enumerate(LENGTHS)]


def generator(path: Path, cache: CacheOptions = SMALL_CACHE, **options: int) -> Generator:
    return Generator.from_checkpoint(path, device="cpu", cache=cache, **options)


def _all_options(path: Path, layout: Mapping[str, int]) -> list[Completion]:
    """All prompts greedily and with all options, in one batch."""
    given = [(prompt, options) for options in (GREEDY, *SAMPLED) for prompt in prompts()]
    return generator(path, max_length=max(LENGTHS) + NEW, **layout).generate(*map(list, zip(*given)))  # type: ignore[arg-type]


@torch.no_grad()
def their_tokens(model: Any, prompt: Sequence[int]) -> list[int]:
    forced = {"max_new_tokens": NEW, "min_new_tokens": NEW, "eos_token_id": None, "pad_token_id": 0}
    out: list[int] = model.generate(torch.tensor([prompt]), do_sample=False, **forced)[0, len(prompt) :].tolist()
    return out


@torch.no_grad()
def their_tokens_at_length(model: Any, prompt: Sequence[int]) -> list[int]:
    """With rotary frequencies that depend on the length of the text, those of the whole text: tokens behind those that
    are known do not matter but for that."""
    out: list[int] = []
    while len(out) < NEW:
        ids = torch.tensor([[*prompt, *out, *[0] * (NEW - len(out))]])
        out.append(int(model(ids, use_cache=False).logits[0, len(prompt) + len(out) - 1].argmax()))
    return out


@torch.no_grad()
def their_logprobs(model: Any, prompt: Sequence[int], output: Sequence[int]) -> torch.Tensor:
    """`[new, v]`, of a whole forward pass without a cache."""
    ids = torch.tensor([[*prompt, *output]])
    found: torch.Tensor = model(ids, use_cache=False).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    return found


@pytest.mark.parametrize("name", [x if x in QUICK else pytest.param(x, marks=pytest.mark.slow) for x in THEIRS])
def test_texts_of_each_family(world2: World, tmp_path: Path, name: str) -> None:
    """Greedy tokens are those of transformers, one prompt at a time with its own cache, and so are log-probabilities;
    sampled tokens are the same in every layout."""
    model = make_theirs(name)
    model.save_pretrained(tmp_path)
    # Step by step, their Mamba-2 does not limit steps of its state, as it does over whole prompts.
    whole = "longrope" in name or {"time_step_limit", "time_step_min"} & THEIRS[name][1].keys()
    generate = their_tokens_at_length if whole else their_tokens
    expected = [generate(model, prompt) for prompt in prompts()]
    logprobs = [their_logprobs(model, *both) for both in zip(prompts(), expected)]
    sampled = None
    layouts = LAYOUTS | (EXPERTS if any("expert" in key and n for key, n in THEIRS[name][1].items()) else {})
    for layout in layouts.values():
        ranks = layout.get("tensor", 1) * layout.get("pipeline", 1)
        of_ranks = world2.run(_all_options, tmp_path, layout, ranks=ranks)
        assert all(found == of_ranks[0] for found in of_ranks)
        greedy, others = of_ranks[0][: len(LENGTHS)], [x.tokens for x in of_ranks[0][len(LENGTHS) :]]
        assert [own.tokens for own in greedy] == expected
        for own, theirs in zip(greedy, logprobs, strict=True):
            chosen = theirs.gather(1, torch.tensor(own.tokens)[:, None])[:, 0]
            torch.testing.assert_close(torch.tensor(own.logprobs), chosen, rtol=0, atol=1e-4)
            top = theirs.topk(2, dim=1)
            assert [[token for token, _ in pairs] for pairs in own.top_logprobs] == top.indices.tolist()
            values = torch.tensor([[x for _, x in pairs] for pairs in own.top_logprobs])
            torch.testing.assert_close(values, top.values, rtol=0, atol=1e-4)
        assert sampled is None or others == sampled
        sampled = others


def _in_caches(path: Path) -> list[list[list[int]]]:
    """Tokens of all prompts, greedy and sampled: each alone, then together in caches of other pages."""
    options = (GREEDY, *SAMPLED)
    alone = generator(path, CacheOptions(page_size=16))
    found = [[alone.generate(prompt, x)[0].tokens for x in options for prompt in prompts()]]
    for cache in (CacheOptions(page_size=1), CacheOptions(page_size=64), CacheOptions(max_sequences=1), SMALL_CACHE):
        together = generator(path, cache)
        given = [(prompt, x) for x in options for prompt in prompts()]
        found.append([x.tokens for x in together.generate(*map(list, zip(*given)))])  # type: ignore[arg-type]
        assert together._allocator.num_free == together._allocator.num_pages
    return found


@pytest.mark.parametrize("name", ["qwen2-window-tied"])
def test_neither_batch_nor_pages_change_a_text(world2: World, tmp_path: Path, name: str) -> None:
    """Pages of one token, one page for all, one sequence at a time, and a cache too small for all."""
    make_theirs(name).save_pretrained(tmp_path)
    alone, *others = world2.run(_in_caches, tmp_path, ranks=1)[0]
    assert len({tuple(x) for x in alone}) > len(alone) // 2, "texts that say nothing"
    for other in others:
        assert other == alone


def _samples(path: Path) -> dict[str, Any]:
    made = generator(path)
    twice = SamplingOptions(max_tokens=6, ignore_end=True, temperature=1.5, num_samples=2, seed=1)
    unseeded = SamplingOptions(max_tokens=6, ignore_end=True, temperature=1.5)
    pieces = list(made.stream(prompts(), twice))
    made.stream(prompts(), twice).close()  # not begun
    left = made.stream(prompts(), twice)
    next(left)
    left.close()
    first = made.generate(prompts()[0], unseeded)[0]
    again = made.generate(prompts()[0], SamplingOptions(**{**vars(unseeded), "seed": first.seed}))[0]
    several = [made.stream(prompts()[i], twice) for i in (1, 2)]
    alternating = [next(stream).completion for stream in several * 12]
    return {
        "twice": made.generate(prompts(), twice),
        "alternating": [x.tokens for x in alternating[-2:]],
        "pieces": len(pieces),
        "free": made._allocator.num_free == made._allocator.num_pages,
        "seeds": (first.seed, made.generate(prompts()[0], unseeded)[0].seed),
        "again": (first.tokens, again.tokens),
    }


def test_samples_and_seeds(world2: World, tmp_path: Path) -> None:
    make_theirs("llama2").save_pretrained(tmp_path)
    found = world2.run(_samples, tmp_path, ranks=1)[0]
    assert [(x.prompt, x.sample) for x in found["twice"]] == [(i, j) for i in range(3) for j in range(2)]
    assert all(a.tokens != b.tokens for a, b in zip(found["twice"][::2], found["twice"][1::2], strict=True))
    assert found["pieces"] == 3 * 2 * 6
    assert all(x in [y.tokens for y in found["twice"]] for x in found["alternating"])
    assert found["free"], "a stream that was left did not give its pages back"
    assert found["seeds"][0] != found["seeds"][1]
    assert found["again"][0] == found["again"][1]


WRONG: dict[str, tuple[Any, dict[str, Any], str]] = {
    "a text without a tokenizer": ("text", {}, "prompt 0 is a text, but there is no tokenizer; give it as tokens"),
    "an empty prompt": ([[3], []], {}, "prompt 1 is empty"),
    "a foreign token": ([[3, 101]], {}, "prompt 0 has the token 101, but the model has tokens from 0 to 100"),
    "too long": (
        [[3] * 60],
        {"max_tokens": 5},
        "60 tokens, or 65 with max_tokens = 5, but max_length is 64; shorten it, or try max_tokens = 4",
    ),
    "a prompt too long": ([[3] * 70], {}, "has 70 tokens, but max_length is 64; shorten it"),
    "larger than the cache": ([[3] * 30], {"max_tokens": 9}, r"the cache holds 36; make it larger \(cache_tokens = 39"),
    "stop without a tokenizer": ([3], {"max_tokens": 1, "stop": ("a",)}, "there is no tokenizer to find it"),
}


def _messages(path: Path) -> dict[str, str]:
    made, found = generator(path), {}
    for name, (given, options, _) in WRONG.items():
        try:
            made.generate(given, SamplingOptions(**{"max_tokens": 1} | options))
        except ValueError as error:
            found[name] = str(error)
    free = made._allocator.num_free == made._allocator.num_pages
    after = made.generate([3], GREEDY)[0].tokens
    return found | {"free": str(free), "none": str(made.generate([])), "after": str(len(after))}


def test_what_does_not_fit_is_named(world2: World, tmp_path: Path) -> None:
    make_theirs("llama2").save_pretrained(tmp_path)
    found = world2.run(_messages, tmp_path, ranks=1)[0]
    for name, (*_, message) in WRONG.items():
        assert re.search(message, found[name]), found[name]
    assert found["free"] == "True"
    assert found["none"] == "[]"
    assert found["after"] == str(NEW)


LAYOUT_ERRORS = {
    "ranks": ({"tensor": 2}, "tensor = 2 and pipeline = 1 need 2 ranks, but the job has 1; start it with torchrun"),
    "stages": ({"pipeline": 4}, "need 4 ranks"),
}


def _sizes_refused(path: Path) -> list[str]:
    found = []
    for cache, length in ((CacheOptions(page_size=0), 16), (CacheOptions(cache_tokens=-1), 16), (CacheOptions(), 17)):
        try:
            generator(path, cache, max_length=length)
        except ValueError as error:
            found.append(str(error))
    return found


def test_sizes_of_the_cache(world2: World, tmp_path: Path) -> None:
    make_theirs("gpt2").save_pretrained(tmp_path)
    assert world2.run(_sizes_refused, tmp_path, ranks=1)[0] == [
        "page_size = 0: must be at least 1",
        "cache_tokens = -1: must be at least 1",
        "max_length = 17: the model has a table of 16 positions; try 16",
    ]


@pytest.mark.parametrize("case", LAYOUT_ERRORS)
def test_a_layout_that_does_not_fit(tmp_path: Path, case: str) -> None:
    make_theirs("llama2").save_pretrained(tmp_path)
    layout, message = LAYOUT_ERRORS[case]
    with pytest.raises(ValueError, match=message):
        generator(tmp_path, **layout)


def test_heads_are_cut_evenly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_theirs("llama3").save_pretrained(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ValueError, match=r"parallel.tensor = 3: model.num_attention_heads \(4\) is not a multiple"):
        generator(tmp_path, tensor=3)


def test_encoders_are_refused(tmp_path: Path) -> None:
    import transformers

    sizes = {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16}
    transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=40, **sizes)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="only the architecture gpt can continue a text"):
        generator(tmp_path)
