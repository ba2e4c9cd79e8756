"""Command-line flags for tools that read text or need a tokenizer."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from os.path import expanduser
from pathlib import Path
from typing import get_args

from megafp8.data.documents import InputFile, SkippedFile, find_files
from megafp8.data.styles.registry import STYLES
from megafp8.data.tokenizers import TokenizerKind, TokenizerSettingError, TokenizerSettings


def add_input_flags(parser: argparse._ActionsContainer) -> None:
    """Add the flags that name text files to read."""
    parser.add_argument("--input", nargs="+", type=expanduser, default=[], help="files, folders or globs")
    parser.add_argument("--input-list", type=expanduser, help="file with one input path per line")
    parser.add_argument("--text-files", action="store_true", help="read every input file as one document")
    parser.add_argument(
        "--json-key",
        nargs="+",
        help="key or column that holds the text (default: text): one for all inputs, or one for each input, in order",
    )
    parser.add_argument("--skip-errors", action="store_true", help="skip and count documents that cannot be read")


def input_files(arguments: argparse.Namespace, style: str = "text", more_keys: Sequence[str] = ()) -> list[InputFile]:
    """Return the files that the input flags name.

    Prints a warning about skipped files to stderr. Raises ValueError if the flags name no input.

    Args:
        arguments: Parsed flags of `add_input_flags`.
        style: Name of the style that says which keys a record has.
        more_keys: Names of the keys of the style after the first one, which --json-key names.
    """
    inputs = list(arguments.input)
    if arguments.input_list:
        inputs += Path(arguments.input_list).read_text(encoding="utf-8").splitlines()
    inputs = [item for item in inputs if item]
    if not inputs:
        raise ValueError("no inputs: give --input or --input-list")
    files, skipped = find_files(
        inputs,
        json_keys=arguments.json_key or [STYLES[style].keys[0].name],
        any_text=arguments.text_files,
        style=style,
        more_keys=more_keys,
    )
    if skipped:
        print(_describe_skipped(skipped), file=sys.stderr)
    return files


def _describe_skipped(skipped: list[SkippedFile]) -> str:
    """Return one line for each reason, with the first ten files."""
    paths: dict[str, list[str]] = {}
    for file in skipped:
        paths.setdefault(file.reason, []).append(str(file.path))
    return "\n".join(
        f"warning: not read ({reason}): {', '.join(files[:10])}"
        + (f", and {len(files) - 10:,} more" if files[10:] else "")
        for reason, files in paths.items()
    )


def add_tokenizer_flags(parser: argparse.ArgumentParser, *, required: bool) -> None:
    """Add the flags for the settings of the config section data.tokenizer."""
    parser.add_argument(
        "--tokenizer", required=required, choices=get_args(TokenizerKind), help="data.tokenizer.kind of the config"
    )
    parser.add_argument(
        "--tokenizer-path",
        type=expanduser,
        help="model file (vocab.json needs merges.txt in the same folder); for tiktoken also the name of an encoding",
    )
    help = "token that ends a document. Default: the eos_token in the tokenizer's files"
    parser.add_argument("--tokenizer-end-token", help=help)
    help = "regular expression that splits text, for tiktoken ranks files. Default: pat_str of the code in its folder"
    parser.add_argument("--tokenizer-pattern", help=help)
    help = "whether each document begins with the beginning token. Default: as the tokenizer's files say"
    parser.add_argument("--tokenizer-add-bos-token", action=argparse.BooleanOptionalAction, help=help)


def tokenizer_settings(arguments: argparse.Namespace) -> TokenizerSettings:
    """Return the settings that the flags of `add_tokenizer_flags` give."""
    return TokenizerSettings(
        arguments.tokenizer,
        arguments.tokenizer_path,
        arguments.tokenizer_end_token,
        arguments.tokenizer_pattern,
        arguments.tokenizer_add_bos_token,
    )


@contextmanager
def tokenizer_errors_name_flags() -> Iterator[None]:
    """Context manager in which the error of an unusable tokenizer names the flag instead of the config key."""
    try:
        yield
    except TokenizerSettingError as error:
        flag = f"--tokenizer-{error.setting.replace('_', '-')}"
        value = "" if error.value is None else f" {error.value}"
        raise ValueError(f"{flag}{value}: {error.rule}; {error.works}") from None
