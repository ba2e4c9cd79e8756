"""Tokenize text, or chats for fine-tuning, into a Megatron-compatible .bin/.idx data set.

    megafp8 preprocess --input corpus/ --output-prefix data/mine --tokenizer sentencepiece --tokenizer-path my.model
    megafp8 preprocess --input wiki/ 'code/*.parquet' --json-key text content --output-prefix both --tokenizer bytes
    megafp8 preprocess --input src/ --text-files --tokenizer bytes --output-prefix data/src --workers 16
    megafp8 preprocess --input chats/ --style chat --output-prefix chats --tokenizer huggingface --tokenizer-path llama

The command reads .json, .jsonl, .ndjson (one JSON object per line), .parquet (rows) and .txt (one document per file).
All except parquet may be compressed (.gz, .zst, .bz2, .xz). --json-key names the key of the text. With --text-files,
every file is one document. Other files in a folder are reported and not read. The order of documents does not depend on
--workers.

--style chat reads lists of messages with role and content (--json-key, default messages), or ShareGPT's conversations,
and renders them with the tokenizer's chat template. --style completion reads a prompt (--json-key, default prompt) and
a completion (--completion-key). Both write a loss mask for data.loss_on, <prefix>.loss_mask.bin and .idx, with 1 for
tokens of answers. --style preference reads a prompt (--json-key, default prompt) and two answers, --chosen-key and
--rejected-key, as texts or lists of messages, for data.dpo; it writes a loss mask, too.
"""

from __future__ import annotations

import argparse
import sys
import time
from os.path import expanduser
from typing import Any

from megafp8.data.documents import read_documents
from megafp8.data.flags import (
    add_input_flags,
    add_tokenizer_flags,
    input_files,
    tokenizer_errors_name_flags,
    tokenizer_settings,
)
from megafp8.data.indexed_dataset import IndexedDataset
from megafp8.data.preprocess import preprocess
from megafp8.data.styles import Method
from megafp8.data.styles.registry import STYLES
from megafp8.data.token_text import example
from megafp8.data.tokenizers import build_tokenizer
from megafp8.host.arguments import ArgumentParser, at_least
from megafp8.host.tool import run_tool


def make_parser() -> ArgumentParser:
    """Return the parser of this command's arguments."""
    parser = ArgumentParser(description=__doc__)
    add_input_flags(parser)
    add_tokenizer_flags(parser, required=True)
    parser.add_argument(
        "--output-prefix", required=True, type=expanduser, help="path of the data set to write, without .bin and .idx"
    )
    parser.add_argument(
        "--no-append-eod", action="store_true", help="do not add an end-of-document token after each document"
    )
    help = (
        "content of a record: a text (default), a list of messages, a prompt and its completion, or a prompt and two "
    )
    help += "answers"
    parser.add_argument("--style", choices=sorted(STYLES), default="text", help=help)
    parser.add_argument("--completion-key", help="key or column of the completion; default: completion")
    parser.add_argument("--chosen-key", help="key or column of the preferred answer; default: chosen")
    parser.add_argument("--rejected-key", help="key or column of the other answer; default: rejected")
    parser.add_argument(
        "--chat-template", type=expanduser, help="file with a chat template; default: the one next to --tokenizer-path"
    )
    help = "store each sentence of a document as a sequence, for data.packing sentences"
    parser.add_argument("--split-sentences", action="store_true", help=help)
    parser.add_argument(
        "--workers", type=at_least(0), default=0, help="number of processes that tokenize; 0: this process"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace an existing data set")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    arguments = make_parser().parse_args(argv)
    return run_tool(lambda: _preprocess(arguments))


@tokenizer_errors_name_flags()
def _preprocess(arguments: argparse.Namespace) -> None:
    start = time.monotonic()
    method = _method(arguments)
    keys = STYLES[arguments.style].keys[1:]
    more_keys = [key.name if (name := _value(arguments, key.flag)) is None else name for key in keys]
    files = input_files(arguments, arguments.style, more_keys)
    summary = preprocess(
        read_documents(files),
        arguments.output_prefix,
        tokenizer=tokenizer_settings(arguments),
        method=method,
        workers=arguments.workers,
        skip_errors=arguments.skip_errors,
        overwrite=arguments.overwrite,
        sources=[str(file.path) for file in files],
    )
    seconds = time.monotonic() - start
    print(
        f"{arguments.output_prefix}: {summary.documents:,} documents, {summary.tokens:,} tokens, "
        f"{summary.characters / max(1, summary.tokens):.2f} characters per token, {seconds:.1f} s "
        f"({summary.empty} empty and {summary.errors} unreadable documents skipped)"
    )
    print(f"  tokenizer: {summary.boundaries}")
    if method.has_loss_mask:
        share = summary.learned / summary.tokens
        print(f"  loss mask: {summary.learned:,} tokens of answers, {share:.1%} of all")
        shown = example(IndexedDataset(arguments.output_prefix), build_tokenizer(*tokenizer_settings(arguments)))
        print(f"  the first document, with learned tokens in ⟦ ⟧: {shown}")
    for warning in summary.warnings:
        print(f"  warning: {warning}")
    for message in summary.messages:
        print(f"  skipped: {message}")
    if summary.errors > len(summary.messages):
        print(f"  and {summary.errors - len(summary.messages):,} more")


def _method(arguments: argparse.Namespace) -> Method:
    """Return the method that the arguments select. Raises ValueError for arguments that do not apply to the style."""
    style = STYLES[arguments.style]
    flags = {*style.flags, *(key.flag for key in style.keys)}
    for flag in sorted({flag for each in STYLES.values() for flag in (*each.flags, *(key.flag for key in each.keys))}):
        if _value(arguments, flag) and flag not in flags:
            raise ValueError(f"{flag} does not apply to --style {style.name}: leave it out")
    return style.method(arguments)


def _value(arguments: argparse.Namespace, flag: str) -> Any:
    return getattr(arguments, flag[2:].replace("-", "_"))


if __name__ == "__main__":
    sys.exit(main())
