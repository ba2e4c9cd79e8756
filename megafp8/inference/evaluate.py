"""Evaluation of a model: perplexity of texts and data sets, and tasks of lm-evaluation-harness."""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, NamedTuple

from tqdm import tqdm

from megafp8.data.flags import input_files
from megafp8.data.indexed_dataset import IndexedDataset
from megafp8.data.packages import import_package
from megafp8.data.samples import split_documents
from megafp8.inference import Generator
from megafp8.inference.arguments import bind_to_cores, model_options
from megafp8.inference.kv_cache_scales import KeyValueAmax, write_scales
from megafp8.inference.load import InferenceLayout, Opened, load_model, open_checkpoint
from megafp8.inference.perplexity import (
    DocumentLoss,
    EvaluationDocument,
    documents_of_data_set,
    documents_of_files,
    loss_of,
)
from megafp8.inference.scoring import Scorer
from megafp8.parallel.parallel_state import destroy_model_parallel


class _Texts(NamedTuple):
    """Named documents, which only the first rank reads. `tokens` is their approximate number of tokens, if known."""

    name: str
    documents: Callable[[], Iterable[EvaluationDocument]]
    tokens: int | None


def open_texts(arguments: argparse.Namespace, opened: Opened) -> list[_Texts]:
    """Open the texts and data sets to score. Raises ValueError if one is missing or cannot be used."""
    texts = []
    vocab_size, tokenizer, most = opened.source.model.stem.vocab_size, opened.tokenizer, arguments.max_documents
    assert vocab_size is not None
    if (arguments.input or arguments.input_list) and tokenizer is None:
        raise ValueError(f"{arguments.checkpoint} has no tokenizer to read texts with; give a data set with --data")
    if arguments.input or arguments.input_list:
        files = input_files(arguments)
        name = ", ".join(arguments.input) or arguments.input_list

        def of_files() -> Iterable[EvaluationDocument]:
            assert tokenizer is not None
            return itertools.islice(documents_of_files(files, tokenizer), most)

        texts.append(_Texts(name, of_files, None))
    for prefix in arguments.data:
        dataset = IndexedDataset(prefix)
        documents = range(dataset.num_documents)
        if arguments.split is not None:
            documents = split_documents(dataset.num_documents, arguments.split)[1]
            if not documents:
                raise ValueError(f"--split {arguments.split}: {prefix} has no documents for validation")
        documents = documents[:most]
        read = partial(documents_of_data_set, dataset, documents, vocab_size, tokenizer)
        tokens = int(dataset.document_lengths[documents.start : documents.stop].sum())
        texts.append(_Texts(prefix, read, tokens))
    return texts


class EvaluationRun:
    """Model in its layout, with the texts and tasks to evaluate it on. Collective."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        if not (arguments.input or arguments.input_list or arguments.data or arguments.tasks):
            raise ValueError("there is nothing to evaluate on: give --input, --data or --tasks")
        if arguments.tasks:
            import_package("lm_eval", "--tasks")
        bind_to_cores(arguments)
        layout = InferenceLayout(arguments.tensor, arguments.pipeline, arguments.expert)
        self.opened = open_checkpoint(arguments.checkpoint, layout, **model_options(arguments))
        if arguments.tasks and self.opened.tokenizer is None:
            raise ValueError(f"{arguments.checkpoint} has no tokenizer, which tasks need")
        self.max_length = self.opened.max_length(arguments.max_length)
        self.stride = -(-self.max_length // 2) if arguments.stride is None else arguments.stride
        self.texts = open_texts(arguments, self.opened)
        if arguments.concatenate and self.opened.tokenizer is None:
            raise ValueError(
                f"--concatenate: {arguments.checkpoint} has no tokenizer, so there is no token to put between documents"
            )
        measures = arguments.kv_cache_scales is not None
        self.key_value_amax = KeyValueAmax(self.opened.config.spec) if measures else None
        self.model = load_model(self.opened)
        self.is_first = self.model.parallel.world.is_first
        self.scorer = Scorer(
            self.model,
            max_length=self.max_length,
            max_batch_tokens=arguments.max_batch_tokens,
            on_keys=self.key_value_amax,
        )

    @property
    def start(self) -> list[int]:
        """Tokens before each document. Empty without a tokenizer; the first token of a document is then not scored."""
        return list(self.opened.start_tokens) or ([] if self.opened.bos is None else [self.opened.bos])

    def loss(self, texts: _Texts) -> DocumentLoss:
        """Return the loss of some texts, on all ranks. Collective."""
        tokenizer = self.opened.tokenizer
        by = None
        if self.arguments.concatenate and tokenizer is not None:
            by = [tokenizer.eod_id, *tokenizer.start_ids]
        documents = texts.documents() if self.is_first else ()
        with tqdm(total=texts.tokens, unit="tok", desc=texts.name, disable=None if self.is_first else True) as bar:
            return loss_of(self.scorer, documents, self.start, self.stride, concatenated_by=by, progress=bar.update)

    def tasks(self) -> dict[str, Any] | None:
        """Run the tasks. Return the results of the harness on the first rank, None on the others. Collective."""
        from megafp8.inference.harness import HarnessModel, run_tasks  # its package is optional

        a, opened = self.arguments, self.opened
        assert opened.tokenizer is not None
        assert opened.bos is not None
        assert opened.eos is not None
        model = HarnessModel(
            self.scorer,
            lambda: Generator.from_model(opened, self.model, max_length=self.max_length),
            opened.tokenizer,
            added_tokens=opened.added_tokens,
            bos=opened.bos,
            eos=opened.eos,
        )
        return run_tasks(model, a.tasks, include_path=a.include_path, num_fewshot=a.num_fewshot, limit=a.limit)


def as_dict(name: str, loss: DocumentLoss) -> dict[str, Any]:
    """Return the entry of one text in the output of --json."""
    figures = {
        "nats_per_token": loss.nats_per_token,
        "perplexity": loss.perplexity,
        "bits_per_byte": loss.bits_per_byte,
    }
    return {"name": name, **asdict(loss), **figures}


def table(rows: Sequence[tuple[str, DocumentLoss]]) -> str:
    """Return a table of losses as text, one line for each name."""
    width = max(len("text"), *(len(name) for name, _ in rows))
    heads = ("documents", "tokens", "words", "bytes", "nats/token", "perplexity", "bits/byte")
    lines = [f"{'text':<{width}} " + " ".join(f"{head:>13}" for head in heads)]
    for name, x in rows:
        counts = [f"{'-' if n is None else format(n, ',')}" for n in (x.documents, x.tokens, x.words, x.bytes)]
        bits = "-" if x.bits_per_byte is None else f"{x.bits_per_byte:.5f}"
        cells = [*counts, f"{x.nats_per_token:.5f}", f"{x.perplexity:.4f}", bits]
        lines.append(f"{name:<{width}} " + " ".join(f"{cell:>13}" for cell in cells))
    return "\n".join(lines)


def run(arguments: argparse.Namespace) -> None:
    """Evaluate a checkpoint as the flags of `megafp8 evaluate` say, and print the results. Collective."""
    evaluation = EvaluationRun(arguments)
    try:
        losses = [(texts.name, evaluation.loss(texts)) for texts in evaluation.texts]
        if evaluation.key_value_amax is not None:
            scales = evaluation.key_value_amax.scales(evaluation.model.parallel)
            if evaluation.is_first:
                write_scales(arguments.kv_cache_scales, scales)
        results = evaluation.tasks() if arguments.tasks else None
    finally:
        destroy_model_parallel()
    if not evaluation.is_first:
        return
    how = {
        "max_length": evaluation.max_length,
        "stride": evaluation.stride,
        "documents": "concatenated" if arguments.concatenate else "separate",
        "start": evaluation.start,
    }
    if arguments.json:
        result: dict[str, Any] = {"checkpoint": str(arguments.checkpoint)}
        if losses:
            result |= {**how, "texts": [as_dict(*x) for x in losses]}
        if results is not None:
            result |= {"tasks": results["results"], "num_fewshot": results["n-shot"], "versions": results["versions"]}
        print(json.dumps(result, ensure_ascii=False))
        return
    if arguments.kv_cache_scales is not None:
        print(f"{arguments.kv_cache_scales}: scales of keys and values, for megafp8 convert --quantization")
    if losses:
        print(table(losses))
        print(
            f"windows of {how['max_length']:,} tokens, stride {how['stride']:,}; documents {how['documents']}, "
            f"{'each ' if not arguments.concatenate else ''}after the tokens {how['start']}"
        )
    if results is not None:
        from lm_eval.utils import make_table

        print(make_table(results).rstrip())
