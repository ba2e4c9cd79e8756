"""Turn text into a Megatron-compatible .bin/.idx data set.

    python tools/preprocess_data.py --input 'corpus/*.jsonl.zst' --tokenizer sentencepiece \
        --tokenizer-path tokenizer.model --output-prefix data/mine/text --workers 16
    python tools/preprocess_data.py --input wiki/ 'code/*.parquet' --json-key text content --tokenizer bytes \
        --output-prefix data/both
    python tools/preprocess_data.py --input src/ --text-files --tokenizer bytes --output-prefix data/src

Reads .json, .jsonl, .ndjson (a JSON object a line), .parquet (a row) and .txt (a document a file), all but parquet also
compressed (.gz, .zst, .bz2, .xz). The text is under --json-key. With --text-files any file is one document. Other files
of a folder are named and not read. The order of documents does not depend on --workers.
"""

from __future__ import annotations

import argparse
import sys
import time

from megafp8.data.arguments import add_input_flags, add_tokenizer_flags, input_files, run, tokenizer_settings
from megafp8.data.documents import read_documents
from megafp8.data.preprocess import preprocess


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_input_flags(parser)
    add_tokenizer_flags(parser, required=True)
    parser.add_argument("--output-prefix", required=True)
    parser.add_argument("--no-append-eod", action="store_true", help="no end-of-document token after each document")
    parser.add_argument("--workers", type=int, default=0, help="processes that tokenize; 0 (default): this one does")
    parser.add_argument("--overwrite", action="store_true", help="replace a data set that is there already")
    arguments = parser.parse_args(argv)
    return run(lambda: _preprocess(arguments))


def _preprocess(arguments: argparse.Namespace) -> None:
    start = time.monotonic()
    files = input_files(arguments)
    summary = preprocess(
        read_documents(files),
        arguments.output_prefix,
        tokenizer=tokenizer_settings(arguments),
        workers=arguments.workers,
        append_eod=not arguments.no_append_eod,
        skip_errors=arguments.skip_errors,
        overwrite=arguments.overwrite,
        sources=[str(file.path) for file in files],
    )
    seconds = time.monotonic() - start
    print(
        f"{arguments.output_prefix}: {summary.documents:,} documents, {summary.tokens:,} tokens, "
        f"{summary.characters / max(1, summary.tokens):.2f} characters a token, {seconds:.1f} s "
        f"({summary.empty} empty and {summary.errors} unreadable documents left out)"
    )
    for message in summary.messages:
        print(f"  left out: {message}")
    if summary.errors > len(summary.messages):
        print(f"  and {summary.errors - len(summary.messages):,} more")


if __name__ == "__main__":
    sys.exit(main())
