"""Inspect a token data set: size, document lengths, documents and samples.

    megafp8 inspect-data data/quickstart/stdlib --png lengths.png
    megafp8 inspect-data data/mine --samples 2 --tokenizer sentencepiece --tokenizer-path tokenizer.model

Without --tokenizer, documents and samples are shown as token ids.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from os.path import expanduser
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megafp8.data.flags import add_tokenizer_flags, tokenizer_errors_name_flags, tokenizer_settings
from megafp8.data.indexed_dataset import IndexedDataset
from megafp8.data.token_text import show, show_answers
from megafp8.data.tokenizers import Tokenizer, TokenizerSettings, build_tokenizer
from megafp8.host.arguments import ArgumentParser, at_least
from megafp8.host.tool import pyplot, run_tool

_WIDTH = 50


def summary(dataset: IndexedDataset) -> str:
    """Return lines with size, dtype, quantiles of document length, and the sidecar."""
    lengths = dataset.document_lengths
    quantiles = np.quantile(lengths, [0, 0.1, 0.5, 0.9, 0.99, 1]) if len(lengths) else np.zeros(6)
    names = ("min", "10%", "median", "90%", "99%", "max")
    lines = [
        f"{dataset.prefix}: {dataset.num_documents:,} documents, {dataset.num_tokens:,} tokens of {dataset.dtype}",
        "document length: " + "  ".join(f"{name} {int(value):,}" for name, value in zip(names, quantiles)),
    ]
    about = dataset.sidecar()
    facts = {key: value for key, value in (about or {}).items() if key not in ("documents", "tokens", "sources")}
    lines.append("sidecar: " + ("  ".join(f"{key} {value}" for key, value in facts.items()) if about else "none"))
    return "\n".join(lines)


def histogram(lengths: NDArray[np.int64]) -> str:
    """Return a text histogram of document lengths in bins of powers of two; empty documents count as length 1."""
    exponents = np.floor(np.log2(np.maximum(lengths, 1))).astype(int)
    counts = np.bincount(exponents)
    first = int(exponents.min())
    return "\n".join(
        f"{2**e:>10,} - {2 ** (e + 1) - 1:<10,} {counts[e]:>8,} {'#' * round(_WIDTH * counts[e] / counts.max())}"
        for e in range(first, len(counts))
    )


def plot(lengths: NDArray[np.int64], path: Path, title: str) -> None:
    """Write a plot of document lengths to a PNG file. Raises ValueError if there are no documents."""
    if not len(lengths):
        raise ValueError(f"{title} has no documents: there is nothing to plot")
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(8, 4), layout="constrained")
    drawn = np.maximum(lengths, 1)  # a logarithmic axis has no 0
    axes.hist(drawn, bins=np.geomspace(drawn.min(), drawn.max() + 1, 50).tolist(), color="tab:blue")
    axes.set_xscale("log")
    axes.set_xlabel("tokens in a document")
    axes.set_ylabel("documents")
    axes.set_title(title)
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def open_tokenizer(dataset: IndexedDataset, settings: TokenizerSettings) -> Tokenizer:
    """Return the tokenizer for decoding. Raises ValueError if the sidecar names another tokenizer."""
    tokenizer = build_tokenizer(*settings)
    made_with = (dataset.sidecar() or {}).get("tokenizer_fingerprint", tokenizer.fingerprint)
    if made_with != tokenizer.fingerprint:
        raise ValueError(
            f"{dataset.prefix} was written with the tokenizer {made_with[:12]}…, but --tokenizer is "
            f"{tokenizer.fingerprint[:12]}…: the text would be wrong; without --tokenizer, ids are shown"
        )
    return tokenizer


def show_documents(dataset: IndexedDataset, count: int, tokenizer: Tokenizer | None) -> None:
    """Print the first documents. With a loss mask, tokens that have a loss are in ⟦ ⟧."""
    mask = dataset.loss_mask() if dataset.has_loss_mask else None
    for index in range(min(count, dataset.num_documents)):
        tokens = dataset.document(index)
        shown = show(tokens, tokenizer) if mask is None else show_answers(tokens, mask.document(index), tokenizer)
        print(f"\n--- document {index}\n{shown}")


def show_samples(dataset: IndexedDataset, count: int, seq_length: int, seed: int, tokenizer: Tokenizer | None) -> None:
    """Print the first samples of all documents, as training with this seed reads them. Leaves no cache."""
    from megafp8.data.samples import PackedDataset

    with tempfile.TemporaryDirectory() as cache:
        packed = PackedDataset(dataset, range(dataset.num_documents), seq_length, seed, cache)
        for index in range(count):
            print(f"\n--- sample {index} of {packed.samples_per_epoch:,}\n{show(packed[index], tokenizer)}")


@tokenizer_errors_name_flags()
def inspect(arguments: argparse.Namespace) -> None:
    """Print and plot the information that the arguments request."""
    dataset = IndexedDataset(arguments.prefix)
    tokenizer = open_tokenizer(dataset, tokenizer_settings(arguments)) if arguments.tokenizer else None
    print(summary(dataset))
    if dataset.num_documents:
        print(histogram(dataset.document_lengths))
    show_documents(dataset, arguments.documents, tokenizer)
    if arguments.samples:
        show_samples(dataset, arguments.samples, arguments.seq_length, arguments.seed, tokenizer)
    if arguments.png:
        plot(dataset.document_lengths, arguments.png, arguments.prefix)
        print(f"\nplot: {arguments.png}")


def make_parser() -> ArgumentParser:
    """Return the parser of this command's arguments."""
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("prefix", type=expanduser, help="path of the data set without .bin or .idx")
    parser.add_argument("--documents", type=at_least(0), default=0, help="number of documents to show")
    parser.add_argument("--samples", type=at_least(0), default=0, help="number of packed samples to show")
    parser.add_argument("--seq-length", type=at_least(1), default=1024, help="tokens of a packed sample")
    parser.add_argument("--seed", type=int, default=1234, help="seed of the order of samples")
    add_tokenizer_flags(parser, required=False)
    parser.add_argument("--png", type=Path, help="plot of document lengths to write")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    arguments = make_parser().parse_args(argv)
    return run_tool(lambda: inspect(arguments))


if __name__ == "__main__":
    sys.exit(main())
