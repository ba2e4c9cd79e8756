"""Tokenize text into a Megatron-compatible .bin/.idx data set.

    python tools/preprocess_data.py --input 'corpus/*.jsonl.zst' --tokenizer sentencepiece \
        --tokenizer-path tokenizer.model --output-prefix data/mine/text --workers 16
    python tools/preprocess_data.py --input wiki/ 'code/*.parquet' --json-key text content --tokenizer bytes \
        --output-prefix data/both
    python tools/preprocess_data.py --input src/ --text-files --tokenizer bytes --output-prefix data/src

Reads .json, .jsonl, .ndjson (one JSON object per line), .parquet (rows) and .txt (one document per file), all but
parquet also compressed (.gz, .zst, .bz2, .xz). The text is under --json-key. With --text-files every file is one
document. Other files of a folder are reported and not read. The order of documents does not depend on --workers.
"""

from __future__ import annotations

import argparse
import sys
import time

from megafp8.data.documents import read_documents
from megafp8.data.preprocess import preprocess
from tools.common import add_input_flags, add_tokenizer_flags, input_files, new_parser, run_tool, tokenizer_settings


def main(argv: list[str] | None = None) -> int:
    parser = new_parser(__doc__)
    add_input_flags(parser)
    add_tokenizer_flags(parser, required=True)
    parser.add_argument("--output-prefix", required=True)
    parser.add_argument("--no-append-eod", action="store_true", help="add no end-of-document token after each document")
    help = "store each sentence of a document as a sequence, for data.packing sentences"
    parser.add_argument("--split-sentences", action="store_true", help=help)
    parser.add_argument("--workers", type=int, default=0, help="processes that tokenize; 0 (default): this process")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing data set")
    arguments = parser.parse_args(argv)
    return run_tool(lambda: _preprocess(arguments))


def _preprocess(arguments: argparse.Namespace) -> None:
    start = time.monotonic()
    files = input_files(arguments)
    summary = preprocess(
        read_documents(files),
        arguments.output_prefix,
        tokenizer=tokenizer_settings(arguments),
        workers=arguments.workers,
        append_eod=not arguments.no_append_eod,
        sentences=arguments.split_sentences,
        skip_errors=arguments.skip_errors,
        overwrite=arguments.overwrite,
        sources=[str(file.path) for file in files],
    )
    seconds = time.monotonic() - start
    print(
        f"{arguments.output_prefix}: {summary.documents:,} documents, {summary.tokens:,} tokens, "
        f"{summary.characters / max(1, summary.tokens):.2f} characters a token, {seconds:.1f} s "
        f"({summary.empty} empty and {summary.errors} unreadable documents skipped)"
    )
    for message in summary.messages:
        print(f"  skipped: {message}")
    if summary.errors > len(summary.messages):
        print(f"  and {summary.errors - len(summary.messages):,} more")


if __name__ == "__main__":
    sys.exit(main())
