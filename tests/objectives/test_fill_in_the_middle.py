"""Fill in the middle: a rearranged document has all its tokens but three, in its length, and its end at the end."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from megafp8.config import Config, ConfigError, check_layout
from megafp8.objectives.fill_in_the_middle import FillInTheMiddle
from megafp8.objectives.next_token import NextToken
from megafp8.objectives.registry import objective_of
from tests.config.test_config import MINIMAL

S, END, PRE, MID, SUF = 40, 0, 100, 101, 102
NEXT = NextToken(S)
TEXT = np.arange(1, S + 1)


def _row(index: int, text: NDArray[Any] = TEXT, **options: Any) -> list[int]:
    options = {"rate": 1.0, "spm_rate": 0.5} | options
    objective = FillInTheMiddle(NEXT, 5, prefix=PRE, middle=MID, suffix=SUF, eod_id=END, **options)
    return objective.row([np.append(text, END)], index).tolist()


def _restored(row: list[int]) -> tuple[list[int], bool]:
    """The document without the end of its suffix, and whether the suffix came first."""
    assert row[0] == PRE
    suf, mid = row.index(SUF), row.index(MID)
    assert suf < mid
    prefix, suffix, rest = row[1:suf], row[suf + 1 : mid], row[mid + 1 : -1]
    if suf > 1:
        return [*prefix, *rest, *suffix], False
    return [*rest, *suffix], True  # the prefix, if there is one, and the middle are side by side


def test_a_rearranged_document_is_the_document() -> None:
    found = [_row(i) for i in range(300)]
    rearranged = [row for row in found if PRE in row]
    assert len(rearranged) > 230  # a suffix of at least three tokens
    for row in found:
        assert len(row) == S + 1
        assert row[-1] == END
        if row not in rearranged:
            assert row[:-1] == TEXT.tolist()
            continue
        text, _ = _restored(row)
        assert text == TEXT[:-3].tolist()
    assert [_row(i) for i in range(300)] == found
    assert len({tuple(row) for row in rearranged}) > 130  # SPM tells only where the suffix begins


@pytest.mark.parametrize("rate", [0.0, 0.25, 1.0])
@pytest.mark.parametrize("spm_rate", [0.0, 0.7, 1.0])
def test_shares(rate: float, spm_rate: float) -> None:
    rows = [_row(i, rate=rate, spm_rate=spm_rate) for i in range(600)]
    rearranged = [row for row in rows if PRE in row]
    possible = ((S - 2) / (S + 1)) ** 2  # the suffix has room for the marks
    assert len(rearranged) / 600 == pytest.approx(rate * possible, abs=0.06)
    if rate:
        no_prefix = 1 - ((S - 3) / (S - 2)) ** 2  # both forms are the same then
        suffix_first = np.mean([_restored(row)[1] for row in rearranged])
        assert suffix_first == pytest.approx(spm_rate + (1 - spm_rate) * no_prefix, abs=0.1)


def test_the_middle_is_drawn_uniformly() -> None:
    rows = [row for row in (_row(i, spm_rate=0.0) for i in range(2000)) if PRE in row]
    starts = np.array([row.index(SUF) - 1 for row in rows])
    lengths = np.array([S - row.index(MID) - 1 for row in rows])
    pairs = [(a, b) for a in range(S + 1) for b in range(S + 1) if S - max(a, b) >= 3]
    assert starts.mean() == pytest.approx(np.mean([min(p) for p in pairs]), abs=0.8)
    assert lengths.mean() == pytest.approx(np.mean([abs(a - b) for a, b in pairs]), abs=0.8)


def test_documents_are_rearranged_one_by_one_and_keep_their_places() -> None:
    parts = [np.append(np.full(12, 7), END), np.append(np.full(20, 8), END), np.full(7, 9)]
    objective = FillInTheMiddle(
        NextToken(S, mask_eod_loss=True), seed=5, rate=1.0, spm_rate=0.5, prefix=PRE, middle=MID, suffix=SUF, eod_id=END
    )
    for i in range(50):
        tokens, documents = objective.row(parts, i)
        assert documents.tolist() == [0] * 13 + [1] * 21 + [2] * 7
        for number, token in enumerate((7, 8, 9)):
            own = set(tokens[documents == number].tolist())
            assert token in own
            assert own <= {token, END, PRE, MID, SUF}


def test_the_beginning_of_a_document_stays_in_its_place() -> None:
    start = (50, 51)
    for i in range(20):
        row = _row(i, np.concatenate([start, TEXT[: S - 2]]), start_ids=start)
        assert row[:2] == list(start)
        assert [*row[2:], -1, -1] == _row(i, TEXT[: S - 2])  # which is padded


def test_a_short_document_stays_as_it_is() -> None:
    for n in range(3):
        objective = FillInTheMiddle(
            NextToken(n), seed=5, rate=1.0, spm_rate=0.5, prefix=PRE, middle=MID, suffix=SUF, eod_id=END
        )
        assert all(objective.row([np.append(TEXT[:n], END)], i).tolist() == [*TEXT[:n], END] for i in range(20))


def _config(**sections: Any) -> Config:
    tree = {**MINIMAL, **{name: {**MINIMAL.get(name, {}), **keys} for name, keys in sections.items()}}
    return Config.model_validate(tree)


def test_it_is_what_the_config_says() -> None:
    keys = {"rate": 0.9, "prefix": 5, "middle": 6, "suffix": 7}
    config = _config(data={"fill_in_the_middle": keys})
    check_layout(config, 1)
    found = objective_of(config, None, "test")
    next_token = NextToken(config.training.seq_length)
    assert found == FillInTheMiddle(next_token, config.seed, 0.9, 0.5, prefix=5, middle=6, suffix=7)


def _checked(config: Config) -> None:
    check_layout(config, 1)
    objective_of(config, None, "test")


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"data": {"fill_in_the_middle": {}}}, "data.fill_in_the_middle.prefix = None: not given, and data.tokenizer"),
        (
            {"data": {"fill_in_the_middle": {"prefix": 10**6, "middle": 1, "suffix": 2}}},
            "prefix = 1000000: model.vocab",
        ),
        (
            {"data": {"fill_in_the_middle": {}}, "model": {"architecture": "bert"}},
            "model.architecture = 'bert': data.fill",
        ),
        (
            {"data": {"fill_in_the_middle": {}, "loss_on": "all"}},
            "data.loss_on = 'all': data.fill_in_the_middle is set",
        ),
        ({"data": {"fill_in_the_middle": {}, "prefix_lm": {}}}, "a model has one objective, and data.prefix_lm and"),
    ],
)
def test_what_is_refused(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        _checked(_config(**sections))
    assert message in str(error.value)
