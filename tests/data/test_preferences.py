"""Preference data: texts and chats as pairs of sequences, their masks, and what is refused."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megafp8.data.indexed_dataset import IndexedDataset
from megafp8.data.styles import TokenizedRecord
from megafp8.data.styles.registry import STYLES
from megafp8.data.tokenizers import Tokenizer, build_tokenizer
from tests.data.test_chats import CHATML, write_tokenizer
from tools import preprocess_data


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"), CHATML)


def _tokens(path: Path, record: dict[str, Any]) -> TokenizedRecord:
    style = STYLES["preference"]
    flags = argparse.Namespace(tokenizer_path=str(path), chat_template=None, no_append_eod=False)
    names = style.names(("prompt", "chosen", "rejected"), list(record))
    document = style.document("here", names, [record[name] for name in names])
    if document.error is not None:
        raise ValueError(document.error)
    tokens = style.method(flags).encoder(build_tokenizer("huggingface", str(path)))(document)
    assert tokens is not None
    return tokens


def _answers(path: Path, record: dict[str, Any]) -> tuple[str, str]:
    """The texts of both masks."""
    tokens = _tokens(path, record)
    assert tokens.loss_mask is not None
    tokenizer: Tokenizer = build_tokenizer("huggingface", str(path))
    halves = zip(*(np.split(x, [tokens.sequences[0]]) for x in (tokens.ids, tokens.loss_mask)))
    chosen, rejected = (
        tokenizer.model.decode(ids[mask == 1].tolist(), skip_special_tokens=False) for ids, mask in halves
    )
    return chosen, rejected


def _said(*contents: str, first: str = "user") -> list[dict[str, str]]:
    roles = ("user", "assistant") if first == "user" else ("assistant", "user")
    return [{"role": roles[i % 2], "content": content} for i, content in enumerate(contents)]


def test_texts(path: Path) -> None:
    record = {"prompt": "2 + 2? ", "chosen": "4", "rejected": "five"}
    eod = build_tokenizer("huggingface", str(path)).eod_id
    assert [x.removesuffix("</s>") for x in _answers(path, record)] == ["4", "five"]
    tokens = _tokens(path, record)
    assert sum(tokens.sequences) == len(tokens.ids)
    assert tokens.ids[tokens.sequences[0] - 1] == tokens.ids[-1] == eod


@pytest.mark.parametrize(
    "record",
    [
        {
            "prompt": _said("a?", "b", "c?"),
            "chosen": _said("d", first="assistant"),
            "rejected": _said("e", first="assistant"),
        },
        {"chosen": _said("a?", "b", "c?", "d"), "rejected": _said("a?", "b", "c?", "e")},
        {"prompt": "a?", "chosen": _said("a?", "b", "c?", "d"), "rejected": _said("a?", "b", "c?", "e")},
    ],
)
def test_of_chats_only_what_differs_is_learned(path: Path, record: dict[str, Any]) -> None:
    assert _answers(path, record) == ("d<|im_end|>", "e<|im_end|>")


@pytest.mark.parametrize(
    ("record", "error"),
    [
        (
            {"prompt": "a", "chosen": "b", "rejected": _said("c")},
            "one answer is a text and the other one a list of messages",
        ),
        ({"prompt": _said("a"), "chosen": "b", "rejected": "c"}, "need a prompt that is a text"),
        ({"chosen": "b", "rejected": "c"}, "need a prompt that is a text"),
        (
            {"chosen": _said("a", "b"), "rejected": _said("a", "b")},
            "one answer equals the other, or is the beginning of it",
        ),
        ({"prompt": "a", "chosen": "b", "rejected": ""}, "the completion is empty"),
        ({"prompt": "a", "chosen": 3, "rejected": "c"}, "'chosen' is not a string"),
        ({"prompt": _said("a"), "chosen": _said("b"), "rejected": _said("c")}, "no message of the assistant"),
    ],
)
def test_what_is_no_pair_is_refused(path: Path, record: dict[str, Any], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        _tokens(path, record)


def test_the_tool_writes_documents_of_two_sequences(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = [{"q": f"{i}?", "good": "yes" * (1 + i), "bad": "no"} for i in range(5)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(x) + "\n" for x in records))
    flags = ["--input", str(tmp_path / "a.jsonl"), "--output-prefix", str(tmp_path / "a"), "--style", "preference"]
    tokenizer = ["--tokenizer", "huggingface", "--tokenizer-path", str(path)]
    assert preprocess_data.main([*flags, *tokenizer]) == 2
    assert "has no key 'prompt'" in capsys.readouterr().err
    keys = ["--json-key", "q", "--chosen-key", "good", "--rejected-key", "bad"]
    assert preprocess_data.main([*flags, *tokenizer, *keys]) == 0
    dataset = IndexedDataset(tmp_path / "a")
    assert dataset.has_pairs
    assert len(dataset.sizes) == 2 * dataset.num_documents == 10
    assert dataset.loss_mask().sizes.tolist() == dataset.sizes.tolist()
