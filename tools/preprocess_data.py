"""Turn text into a Megatron-compatible .bin/.idx data set.

    python tools/preprocess_data.py --input 'corpus/*.jsonl.zst' --tokenizer sentencepiece \
        --tokenizer-path tokenizer.model --output-prefix data/mine/text --workers 16
    python tools/preprocess_data.py --input src/ --text-files --tokenizer bytes --output-prefix data/src

Reads .jsonl, .jsonl.gz, .jsonl.zst, .parquet (a document a line or row, under --json-key) and .txt (a document a file);
with --text-files any file is one document. The order of documents does not depend on --workers.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from megafp8.data.preprocess import find_files, preprocess, read_documents


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input", nargs="+", default=[], help="files, folders or globs")
    parser.add_argument("--input-list", help="a file with one input path a line")
    parser.add_argument("--text-files", action="store_true", help="every input file is one document, whatever its name")
    parser.add_argument("--json-key", default="text", help="key or column that holds the text")
    parser.add_argument("--tokenizer", required=True, choices=["sentencepiece", "huggingface", "tiktoken", "bytes"])
    parser.add_argument("--tokenizer-path", help="model file; for tiktoken also an encoding's name")
    parser.add_argument("--output-prefix", required=True)
    parser.add_argument("--no-append-eod", action="store_true", help="no end-of-document token after each document")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--skip-errors", action="store_true", help="leave out what cannot be read, and count it")
    parser.add_argument("--overwrite", action="store_true")
    arguments = parser.parse_args(argv)
    inputs = list(arguments.input)
    start = time.monotonic()
    try:
        if arguments.input_list:
            inputs += Path(arguments.input_list).read_text(encoding="utf-8").split("\n")
        files = find_files([item for item in inputs if item], any_text=arguments.text_files)
        summary = preprocess(
            read_documents(files, json_key=arguments.json_key, any_text=arguments.text_files),
            arguments.output_prefix,
            kind=arguments.tokenizer,
            path=arguments.tokenizer_path,
            workers=arguments.workers,
            append_eod=not arguments.no_append_eod,
            skip_errors=arguments.skip_errors,
            overwrite=arguments.overwrite,
            sources=[str(file) for file in files],
        )
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    seconds = time.monotonic() - start
    print(
        f"{arguments.output_prefix}: {summary.documents:,} documents, {summary.tokens:,} tokens, "
        f"{summary.characters / max(1, summary.tokens):.2f} characters a token, {seconds:.1f} s "
        f"({summary.empty} empty and {len(summary.errors)} unreadable documents left out)"
    )
    for message in summary.errors[:10]:
        print(f"  left out: {message}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
