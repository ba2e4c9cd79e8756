"""Look into a token data set: size, document lengths, documents and samples.

    python tools/inspect_data.py data/quickstart/stdlib --tokenizer sentencepiece \
        --tokenizer-path data/quickstart/tokenizer.model --documents 2 --samples 2 --seq-length 128 --png lengths.png
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megafp8.data.indexed_dataset import IndexedDataset
from megafp8.data.samples import PackedDataset
from megafp8.data.tokenizers import Tokenizer, build_tokenizer

_WIDTH = 50


def summary(dataset: IndexedDataset) -> str:
    """Size, dtype, quantiles of document length, and what the sidecar says."""
    lengths = dataset.document_lengths
    quantiles = np.quantile(lengths, [0, 0.1, 0.5, 0.9, 0.99, 1]) if len(lengths) else np.zeros(6)
    names = ("min", "10%", "median", "90%", "99%", "max")
    lines = [
        f"{dataset.prefix}: {dataset.num_documents:,} documents, {dataset.num_tokens:,} tokens of {dataset.dtype}",
        "document length: " + "  ".join(f"{name} {int(value):,}" for name, value in zip(names, quantiles)),
    ]
    about = dataset.sidecar()
    if about is not None:
        keys = ("tokenizer", "vocab_size", "eod_id", "max_token_id", "tokenizer_fingerprint")
        lines.append("written with: " + "  ".join(f"{key} {about.get(key)}" for key in keys))
    return "\n".join(lines)


def histogram(lengths: NDArray[np.int64]) -> str:
    """Document lengths in bins of powers of two."""
    exponents = np.floor(np.log2(np.maximum(lengths, 1))).astype(int)
    counts = np.bincount(exponents)
    first = int(exponents.min())
    return "\n".join(
        f"{2**e:>10,} - {2 ** (e + 1) - 1:<10,} {counts[e]:>8,} {'#' * round(_WIDTH * counts[e] / counts.max())}"
        for e in range(first, len(counts))
    )


def plot(lengths: NDArray[np.int64], path: Path, title: str) -> None:
    """The same as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4), layout="constrained")
    axes.hist(lengths, bins=np.geomspace(max(1, lengths.min()), lengths.max() + 1, 50), color="tab:blue")
    axes.set_xscale("log")
    axes.set_xlabel("tokens in a document")
    axes.set_ylabel("documents")
    axes.set_title(title)
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def show(tokens: NDArray[np.int64], tokenizer: Tokenizer | None, most: int = 400) -> str:
    """Some of the tokens, as text where there is a tokenizer."""
    ids = [int(i) for i in tokens[:most]]
    more = f" … ({len(tokens) - most:,} more tokens)" if len(tokens) > most else ""
    return (" ".join(map(str, ids)) if tokenizer is None else tokenizer.decode(ids)) + more


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prefix", help="the data set's path without .bin or .idx")
    parser.add_argument("--documents", type=int, default=0, help="show this many documents")
    parser.add_argument("--samples", type=int, default=0, help="show this many packed samples")
    parser.add_argument("--seq-length", type=int, default=1024)
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--tokenizer", choices=["sentencepiece", "huggingface", "tiktoken", "bytes"])
    parser.add_argument("--tokenizer-path")
    parser.add_argument("--png", type=Path, help="plot document lengths into this file")
    arguments = parser.parse_args(argv)
    try:
        dataset = IndexedDataset(arguments.prefix)
        tokenizer = build_tokenizer(arguments.tokenizer, arguments.tokenizer_path) if arguments.tokenizer else None
        print(summary(dataset))
        if dataset.num_documents:
            print(histogram(dataset.document_lengths))
        for index in range(min(arguments.documents, dataset.num_documents)):
            print(f"\n--- document {index}\n{show(dataset.document(index), tokenizer)}")
        if arguments.samples:
            with tempfile.TemporaryDirectory() as cache:
                every = range(dataset.num_documents)
                packed = PackedDataset(dataset, every, arguments.seq_length, arguments.seed, cache)
                for index in range(arguments.samples):
                    print(f"\n--- sample {index} of {packed.samples_per_epoch:,}\n{show(packed[index], tokenizer)}")
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if arguments.png:
        plot(dataset.document_lengths, arguments.png, arguments.prefix)
        print(f"plot: {arguments.png}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
