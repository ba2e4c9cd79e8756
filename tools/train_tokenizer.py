"""Train a lossless sentencepiece BPE vocabulary.

    megafp8 train-tokenizer --input 'corpus/*.jsonl' --output tokenizer.model --vocab-size 32000

Text is not normalized. Spaces, tabs and newlines are tokens (runs of spaces, as in source code, become one token),
digits are separate tokens, and unknown characters fall back to bytes. Special ids: 0 unknown, 1 beginning, 2 end of
document, 3 padding.

All input is read. If it is more than --sample-bytes, the vocabulary is trained on a uniform sample. The same input and
--seed give the same vocabulary.
"""

from __future__ import annotations

import argparse
import heapq
import io
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from tqdm import tqdm

from megafp8.data.documents import Document, check_inputs_stay, read_documents
from megafp8.data.flags import add_input_flags, input_files
from megafp8.host.arguments import ArgumentParser, at_least
from megafp8.host.tool import run_tool, signal_handler

_PIECE = 4000  # characters per sentencepiece "sentence", which by default has at most about 4,192 bytes


def pieces(documents: Iterable[Document], skip_errors: bool) -> Iterator[str]:
    """Yield the texts of documents, cut after every 4,000 characters.

    Raises ValueError for a document that cannot be read. With `skip_errors`, such documents are skipped and counted,
    and the first 100 are printed.
    """
    skipped = 0
    for document in documents:
        if document.error is not None:
            message = f"{document.origin}: {document.error}"
            if not skip_errors:
                raise ValueError(f"{message}; --skip-errors skips such documents")
            skipped += 1
            if skipped <= 100:
                tqdm.write(f"skipped: {message}", file=sys.stderr)
        text = document.text or ""
        for start in range(0, len(text), _PIECE):
            yield text[start : start + _PIECE]
    if skipped:
        tqdm.write(f"{skipped:,} unreadable documents skipped", file=sys.stderr)


def sample(texts: Iterable[str], most_bytes: int, seed: int) -> tuple[list[str], int]:
    """Return a uniform sample of `texts` with at most `most_bytes` of UTF-8, in order, and the bytes of all texts.

    Each text draws a number from [0, 1). The sample consists of the texts with the smallest numbers that fit. Only
    these are held in memory, in a heap.
    """
    draw = random.Random(seed)
    chosen: list[tuple[float, int, str, int]] = []  # negated number, so that the largest is popped; index; text; size
    limit, kept, total = 1.0, 0, 0
    for index, text in enumerate(texts):
        size = len(text.encode("utf-8"))
        total += size
        number = draw.random()
        if number >= limit:
            continue
        heapq.heappush(chosen, (-number, index, text, size))
        kept += size
        while kept > most_bytes:
            popped = heapq.heappop(chosen)
            limit, kept = -popped[0], kept - popped[3]
    return [text for _, _, text, _ in sorted(chosen, key=lambda entry: entry[1])], total


def train(texts: Iterable[str], vocab_size: int) -> bytes:
    """Return a sentencepiece model of `vocab_size` tokens. Raises ValueError if there is too little text."""
    import sentencepiece

    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(texts),
            model_writer=model,
            vocab_size=vocab_size,
            model_type="bpe",
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            allow_whitespace_only_pieces=True,
            split_digits=True,
            byte_fallback=True,
            character_coverage=0.9999,
            user_defined_symbols=["\n", "\t"],
            max_sentence_length=4 * _PIECE + 1,
            unk_id=0,
            bos_id=1,
            eos_id=2,
            pad_id=3,
            num_threads=2,
            minloglevel=2,
        )
    except (RuntimeError, OSError) as error:
        raise ValueError(f"sentencepiece could not train {vocab_size} tokens: {error}") from None
    return model.getvalue()


def check_writable(output: Path, overwrite: bool) -> None:
    """Raise ValueError if `output` exists or its folder cannot be written to. Create the folder."""
    if output.is_dir():
        raise ValueError(f"--output {output}: this is a folder; give the name of a file")
    if output.exists() and not overwrite:
        raise ValueError(f"{output} exists; --overwrite replaces it")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=output.parent):
            pass
    except OSError as error:
        raise ValueError(f"--output {output}: cannot be written: {error}") from None


def write(content: bytes, output: Path) -> None:
    """Write `output` under a temporary name and rename it, so that it is either complete or absent."""
    hidden = output.with_name(f"{output.name}.incomplete-{os.getpid()}")
    try:
        with hidden.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(hidden, output)
    finally:
        hidden.unlink(missing_ok=True)


def make_parser() -> ArgumentParser:
    """Return the parser of this command's arguments."""
    parser = ArgumentParser(description=__doc__)
    add_input_flags(parser)
    parser.add_argument("--output", required=True, type=Path, help=".model file to write")
    parser.add_argument("--vocab-size", type=at_least(1), default=32000, help="number of tokens in the vocabulary")
    parser.add_argument("--sample-bytes", type=at_least(1), default=10_000_000, help="train on at most this much text")
    parser.add_argument("--seed", type=int, default=1234, help="seed of the sample")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing model")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    arguments = make_parser().parse_args(argv)
    return run_tool(lambda: _train(arguments))


def _train(arguments: argparse.Namespace) -> None:
    start = time.monotonic()
    check_writable(arguments.output, arguments.overwrite)
    files = input_files(arguments)
    check_inputs_stay((file.path for file in files), [arguments.output], "--output")
    size = sum(file.path.stat().st_size for file in files)
    with tqdm(total=size, unit="B", unit_scale=True, desc="reading") as bar:
        documents = read_documents(files, on_progress=bar.update)
        texts, total = sample(pieces(documents, arguments.skip_errors), arguments.sample_bytes, arguments.seed)
    total_bytes = sum(len(text.encode("utf-8")) for text in texts)
    if not texts:
        raise ValueError(f"no text in the inputs fits in --sample-bytes {arguments.sample_bytes}")
    print(
        f"training {arguments.vocab_size} tokens on {total_bytes / 1e6:.1f} of {total / 1e6:.1f} MB of text …",
        flush=True,
    )
    # Ctrl-C and SIGTERM end the process at once: Python's handlers would run only after the library's call.
    with signal_handler(signal.SIG_DFL, signal.SIGINT, signal.SIGTERM):
        model = train(texts, arguments.vocab_size)
    write(model, arguments.output)
    print(f"{arguments.output}: {arguments.vocab_size} tokens, {time.monotonic() - start:.1f} s")


if __name__ == "__main__":
    sys.exit(main())
