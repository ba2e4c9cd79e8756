"""Perplexity: that of `transformers`, in any layout, of texts as of their data sets."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megafp8.data.documents import find_files
from megafp8.data.indexed_dataset import IndexedDataset, IndexedDatasetWriter
from megafp8.inference.load import InferenceLayout, load_model, open_checkpoint
from megafp8.inference.perplexity import DocumentLoss, documents_of_data_set, documents_of_files, loss_of
from megafp8.inference.scoring import Scorer
from tests.inference.small_model import save_small
from tests.inference.test_generator import LAYOUTS
from tests.marks import slow_but
from tests.world import World
from tools import preprocess_data

LENGTH, STRIDE = 32, 8
BOS, EOD = 256, 257  # <s>, which begins a document, and </s>, which ends it
TEXTS = ("naïve café " * 9 + "!!!", "short", "x y" * 24)
"""Of 120, 5 and 72 tokens, which windows fill: so the last one has no less context than others."""


def write_data(folder: Path) -> tuple[str, str]:
    """The texts as JSON lines, and as a data set."""
    file = folder / "texts.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    tokenizer = ["--tokenizer", "huggingface", "--tokenizer-path", str(folder / "model" / "tokenizer.json")]
    prefix = str(folder / "texts")
    assert preprocess_data.main(["--input", str(file), *tokenizer, "--output-prefix", prefix]) == 0
    return str(file), prefix


def _losses(folder: Path, layout: dict[str, int], file: str, prefix: str) -> dict[str, DocumentLoss]:
    opened = open_checkpoint(folder / "model", InferenceLayout(**layout), device="cpu", dtype=torch.float32)
    tokenizer, vocab_size = opened.tokenizer, opened.source.model.stem.vocab_size
    assert tokenizer is not None
    assert vocab_size is not None
    scorer = Scorer(load_model(opened), max_length=LENGTH, max_batch_tokens=50)
    dataset, masked = IndexedDataset(prefix), IndexedDataset(f"{prefix}-masked")

    def documents(dataset: IndexedDataset, which: range | None = None) -> Any:
        if not scorer.model.parallel.world.is_first:
            return ()
        return documents_of_data_set(dataset, which or range(dataset.num_documents), vocab_size, tokenizer)

    files = documents_of_files(find_files([file])[0], tokenizer)
    start = list(opened.start_tokens)
    seen = list[int]()
    return {
        "file": loss_of(scorer, files, start, STRIDE, progress=seen.append),
        "data set": loss_of(scorer, documents(dataset), start, STRIDE),
        "some": loss_of(scorer, documents(dataset, range(1, 3)), start, STRIDE),
        "concatenated": loss_of(scorer, documents(dataset), start, STRIDE, concatenated_by=[EOD, BOS]),
        "masked": loss_of(scorer, documents(masked), start, STRIDE),
        "progress": DocumentLoss(0, sum(seen), None, None, 0.0),
    }


@torch.no_grad()
def their_nats(model: Any, tokens: Sequence[int], counted: Sequence[bool]) -> float:
    """As the guide of transformers: windows every `STRIDE` tokens, of which those that are new count."""
    nats, before, n = 0.0, 0, len(tokens) - 1
    for begin in range(0, n, STRIDE):
        end = min(begin + LENGTH, n)
        logits = model(torch.tensor([tokens[begin:end]])).logits[0].double()
        for i in range(before, end):
            if counted[i + 1]:
                nats -= float(logits[i - begin].log_softmax(-1)[tokens[i + 1]])
        before = end
        if end == n:
            return nats
    return nats


def write_masked(prefix: str) -> None:
    """Write the first document without its beginning and end, with the tokens from 50 on counted."""
    tokens = np.asarray(IndexedDataset(prefix).document(0)[1:-1], np.uint16)
    writer = IndexedDatasetWriter(f"{prefix}-masked", np.uint16, loss_mask=True)
    writer.add_document(tokens, loss_mask=(np.arange(len(tokens)) >= 50).astype(np.uint8))
    writer.close()


@pytest.mark.parametrize("split", slow_but(LAYOUTS, "tp2"))
def test_losses_are_those_of_transformers(world2: World, tmp_path: Path, split: str) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    save_small(tmp_path / "model", bos=True)
    file, prefix = write_data(tmp_path)
    write_masked(prefix)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    letters = AutoTokenizer.from_pretrained(tmp_path / "model")
    documents = [letters.encode(text) for text in TEXTS]
    assert [len(tokens) for tokens in documents] == [1 + 120, 1 + 5, 1 + 72], "with <s>"
    nats = [their_nats(model, tokens, [True] * len(tokens)) for tokens in documents]
    stream = [token for tokens in documents for token in (*tokens, EOD)]
    together = their_nats(model, stream, [token not in (BOS, EOD) for token in stream])
    of_mask = their_nats(model, documents[0], [i > 50 for i in range(121)])
    words, sizes = (sum(map(count, TEXTS)) for count in (lambda x: len(x.split()), lambda x: len(x.encode())))
    assert abs(together - sum(nats)) > 1
    expected = {
        "file": DocumentLoss(3, 197, words, sizes, sum(nats)),
        "data set": DocumentLoss(3, 197, words, sizes, sum(nats)),
        "some": DocumentLoss(2, 77, 1 + 25, 77, nats[1] + nats[2]),
        "concatenated": DocumentLoss(3, 197, words, sizes, together),
        "masked": DocumentLoss(1, 70, None, None, of_mask),
        "progress": DocumentLoss(0, 197, None, None, 0.0),
    }
    layout = LAYOUTS[split]
    ranks = layout.get("tensor", 1) * layout.get("pipeline", 1)
    found, *others = world2.run(_losses, tmp_path, layout, file, prefix, ranks=ranks)
    assert all({**other, "progress": None} == {**found, "progress": None} for other in others)
    assert found["file"] == found["data set"]
    for name, loss in expected.items():
        assert replace(found[name], nats=0.0) == replace(loss, nats=0.0), name
        assert found[name].nats == pytest.approx(loss.nats, rel=1e-5), name
    loss = expected["file"]
    assert loss.perplexity == pytest.approx(math.exp(sum(nats) / 197))
    assert loss.bits_per_byte == pytest.approx(sum(nats) / 197 / math.log(2)), "a token is a byte here"
    assert replace(loss, nats=1e9).perplexity == math.inf
    assert expected["masked"].bits_per_byte is None
