"""Scores of tokens: equal to those of `transformers`, in any layout and batch, with shared contexts and without."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from megafp8.inference.load import InferenceLayout, load_model, open_checkpoint
from megafp8.inference.scoring import Request, Score, Scorer, windows
from tests.conversion.families import THEIRS, make_theirs, tokens
from tests.inference.test_generator import EXPERTS, LAYOUTS, QUICK
from tests.world import World

LENGTH = 16
"""The most tokens of input; some families have a table of as many positions."""
ALL = tokens().flatten().tolist()
REQUESTS = [
    Request(ALL[:5], ALL[5:8]),  # the choices of a question, also with one token and the same twice
    Request(ALL[:5], ALL[9:10]),
    Request(ALL[:5], ALL[10:15]),
    Request(ALL[:5], ALL[9:10]),
    Request(ALL[3:4], ALL[5:6]),
    *windows(ALL, LENGTH, 4),
    Request(ALL[2:20], ALL[:6]),  # loses the beginning of its context
    Request(ALL[2:20], ALL[1:3]),  # less of it
]


def scorer(path: Path, max_length: int = LENGTH, max_batch_tokens: int = 40, **layout: int) -> Scorer:
    model = load_model(open_checkpoint(path, InferenceLayout(**layout), device="cpu"))
    return Scorer(model, max_length=max_length, max_batch_tokens=max_batch_tokens)


def _scores(path: Path, layout: Mapping[str, int], requests: Sequence[Request]) -> list[Score]:
    return list(scorer(path, **layout).score(requests))


@torch.no_grad()
def their_scores(model: Any, requests: Sequence[Request]) -> list[Score]:
    """Each request alone, in a forward pass without a cache."""
    found = []
    for context, continuation in requests:
        ids, labels = [*context, *continuation][-(LENGTH + 1) :], torch.tensor(continuation)
        logits_nv = model(torch.tensor([ids[:-1]]), use_cache=False).logits[0, -len(labels) :]
        logprobs = logits_nv.log_softmax(-1).gather(1, labels[:, None])[:, 0].tolist()
        found.append(Score(logprobs, bool((logits_nv.argmax(-1) == labels).all())))
    return found


@pytest.mark.parametrize("name", [x if x in QUICK else pytest.param(x, marks=pytest.mark.slow) for x in THEIRS])
def test_scores_of_each_family(world2: World, tmp_path: Path, name: str) -> None:
    model = make_theirs(name)
    model.save_pretrained(tmp_path)
    with torch.no_grad():  # the most probable tokens are scored too
        best = model(torch.tensor([ALL[:5]]), use_cache=False).logits[0].argmax(-1).tolist()
    requests = [Request(ALL[:5], best[-1:]), Request(ALL[:5], [best[-1], *ALL[6:8]]), *REQUESTS]
    expected = their_scores(model, requests)
    assert {score.greedy for score in expected} == {True, False}
    layouts = LAYOUTS | (EXPERTS if any("expert" in key for key in THEIRS[name][1]) else {})
    for layout in layouts.values():
        ranks = layout.get("tensor", 1) * layout.get("pipeline", 1)
        of_ranks = world2.run(_scores, tmp_path, layout, requests, ranks=ranks)
        assert all(found == of_ranks[0] for found in of_ranks)
        for ours, theirs in zip(of_ranks[0], expected, strict=True):
            torch.testing.assert_close(torch.tensor(ours.logprobs), torch.tensor(theirs.logprobs), rtol=0, atol=2e-5)
            assert ours.greedy == theirs.greedy


@pytest.mark.parametrize(
    ("count", "length", "stride"), [(2, 4, 1), (5, 4, 4), (6, 4, 4), (30, 7, 3), (30, 7, 7), (1, 4, 2)]
)
def test_windows_score_each_token_once(count: int, length: int, stride: int) -> None:
    """With as much context as there is room for, and no less than `length - stride` tokens once there are so many."""
    found = list(windows(range(count), length, stride))
    assert [token for window in found for token in window.continuation] == list(range(1, count))
    for window in found:
        inputs = [*window.context, *window.continuation][:-1]
        assert inputs == list(range(inputs[0], inputs[-1] + 1))
        assert len(inputs) == min(length, window.continuation[-1])
        assert len(window.context) > min(window.context[-1], length - stride)


def test_windows_of_the_harness() -> None:
    """With a stride of the whole length, those of lm-evaluation-harness."""
    utils = pytest.importorskip("lm_eval.utils")
    for count in (1, 4, 5, 9, 12):
        theirs = utils.get_rolling_token_windows(list(range(1, count + 1)), 0, 4, 1)
        pairs = [utils.make_disjoint_window(window) for window in theirs]
        ours = [(list(x.context), list(x.continuation)) for x in windows(range(count + 1), 4, 4)]
        assert ours == pairs


WRONG = {
    "context": ([[], [1]], "a request has an empty context; give at least one token"),
    "continuation": ([[1], []], "a request has an empty continuation"),
    "long": ([[1], [2] * 17], "a continuation has 17 tokens, but max_length is 16; score it in windows"),
    "foreign": ([[1], [101]], "a request has the token 101, but the model has tokens from 0 to 100"),
}


def _errors(path: Path) -> list[str]:
    """Of requests that only the first rank has; then its good ones are scored, on all."""
    made, found = scorer(path, tensor=2), []
    first = made.model.parallel.world.is_first
    for request, _ in WRONG.values():
        try:
            list(made.score([REQUESTS[0], Request(*request)] if first else ()))
        except ValueError as error:
            found.append(str(error))
    return [*found, str(len(list(made.score(REQUESTS if first else ()))))]


def test_errors_are_those_of_the_first_rank(world2: World, tmp_path: Path) -> None:
    make_theirs("llama2").save_pretrained(tmp_path)
    ours, others = world2.run(_errors, tmp_path)
    assert ours == others
    for found, (_, message) in zip(ours, WRONG.values(), strict=False):
        assert re.search(message, found)
    assert ours[-1] == str(len(REQUESTS))


def test_lengths(tmp_path: Path) -> None:
    make_theirs("gpt2").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="max_length = 17: the model has a table of 16 positions; try 16"):
        scorer(tmp_path, max_length=17)
    with pytest.raises(ValueError, match="max_batch_tokens = 0: must be at least 1"):
        scorer(tmp_path, max_batch_tokens=0)


def test_the_first_request_is_scored_alone(tmp_path: Path) -> None:
    """Progress shows from there on, however many requests a step takes."""
    make_theirs("gpt2").save_pretrained(tmp_path)
    read = []

    def requests() -> Iterator[Request]:
        for i in range(5):
            read.append(i)
            yield Request([1], [2 + i, 3])

    scores = scorer(tmp_path, max_length=16, max_batch_tokens=1000).score(requests())
    next(scores)
    assert read == [0, 1]
    assert len(list(scores)) == 4
