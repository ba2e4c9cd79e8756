"""Train a sentencepiece BPE vocabulary that gives every text back exactly.

    python tools/train_tokenizer.py --input 'corpus/*.jsonl' --output tokenizer.model --vocab-size 32000

Nothing is normalised: spaces, tabs and newlines are tokens like any others (runs of spaces, as in source code, become
single tokens), digits stand alone, and what was never seen falls back to bytes. Ids: 0 unknown, 1 beginning, 2 end of
document, 3 padding. The same input gives the same vocabulary.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from megafp8.data.preprocess import Document, find_files, read_documents

_PIECE = 4000  # characters in one of sentencepiece's "sentences"; it limits them to about 4,192 bytes by default


def sentences(documents: Iterable[Document], most_bytes: int) -> Iterator[str]:
    """Pieces of the documents, whole lines together, up to `most_bytes` in all."""
    given = 0
    for document in documents:
        if document.error is not None:
            raise ValueError(f"{document.where}: {document.error}")
        text = document.text or ""
        for start in range(0, len(text), _PIECE):
            piece = text[start : start + _PIECE]
            given += len(piece.encode("utf-8"))
            if given > most_bytes:
                return
            yield piece


def train(pieces: Iterable[str], output: Path, vocab_size: int) -> None:
    """Write the model of `vocab_size` tokens to `output`. ValueError where the text cannot fill the vocabulary."""
    import sentencepiece

    output.parent.mkdir(parents=True, exist_ok=True)
    with output.open("wb") as writer:
        try:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=iter(pieces),
                model_writer=writer,
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
            output.unlink(missing_ok=True)
            raise ValueError(f"sentencepiece could not train {vocab_size} tokens: {error}") from None


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input", nargs="+", default=[], help="files, folders or globs")
    parser.add_argument("--input-list", help="a file with one input path a line")
    parser.add_argument("--text-files", action="store_true", help="every input file is one document")
    parser.add_argument("--json-key", default="text")
    parser.add_argument("--output", required=True, type=Path, help="the .model file to write")
    parser.add_argument("--vocab-size", type=int, default=32000)
    parser.add_argument("--sample-bytes", type=int, default=10_000_000, help="train on this much text at most")
    parser.add_argument("--overwrite", action="store_true")
    arguments = parser.parse_args(argv)
    start = time.monotonic()
    try:
        if arguments.output.exists() and not arguments.overwrite:
            raise ValueError(f"{arguments.output} is there already; --overwrite replaces it")
        inputs = list(arguments.input)
        if arguments.input_list:
            inputs += Path(arguments.input_list).read_text(encoding="utf-8").split("\n")
        files = find_files([item for item in inputs if item], any_text=arguments.text_files)
        documents = read_documents(files, json_key=arguments.json_key, any_text=arguments.text_files)
        print(
            f"training {arguments.vocab_size} tokens on up to {arguments.sample_bytes / 1e6:.0f} MB of text …",
            flush=True,
        )
        train(sentences(documents, arguments.sample_bytes), arguments.output, arguments.vocab_size)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{arguments.output}: {arguments.vocab_size} tokens, {time.monotonic() - start:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
