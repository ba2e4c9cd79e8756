"""Evaluate a model: perplexity of texts and data sets, and tasks of lm-evaluation-harness.

    megafp8 evaluate runs/mine --input book.txt 'held-out/*.jsonl.zst'
    megafp8 evaluate runs/mine --data data/code data/web --split 969,30,1
    megafp8 evaluate meta-llama/Llama-3.1-8B --tasks hellaswag arc_easy --num-fewshot 5 --json > scores.json
    torchrun --nproc-per-node 4 tools/evaluate.py runs/mine --tensor 2 --pipeline 2 --tasks mine --include-path tasks

The model is the newest checkpoint of a run, a checkpoint of any format and layout, or a Hugging Face folder.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from os.path import expanduser
from pathlib import Path

from megafp8.data.flags import add_input_flags
from megafp8.host.arguments import ArgumentParser, at_least
from megafp8.host.object_store import as_path
from megafp8.host.tool import run_tool
from megafp8.inference.arguments import add_model_flags


def make_parser() -> ArgumentParser:
    """Return the parser of this command's arguments."""
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=as_path, help="run, checkpoint or Hugging Face folder")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    texts = parser.add_argument_group("texts and data sets")
    add_input_flags(texts)
    texts.add_argument(
        "--data", nargs="+", type=expanduser, default=[], metavar="PREFIX", help="prefixes of .bin/.idx files"
    )
    texts.add_argument("--split", help="evaluate only the validation documents of --data; proportions as in data.split")
    texts.add_argument("--max-documents", type=at_least(1), help="limit per data set, and for all inputs together")
    texts.add_argument("--stride", type=int, help="tokens that each window scores; default: half of its length")
    texts.add_argument("--concatenate", action="store_true", help="evaluate documents as one text, not separately")
    texts.add_argument(
        "--kv-cache-scales", type=Path, metavar="FILE",
        help="write scales for FP8 key-value caches, measured on these texts, for megafp8 convert",
    )  # fmt: skip
    tasks = parser.add_argument_group("tasks of lm-evaluation-harness")
    tasks.add_argument("--tasks", nargs="+", default=[], help="names or patterns of tasks")
    tasks.add_argument("--include-path", type=Path, help="folder with YAML files of tasks")
    tasks.add_argument("--num-fewshot", type=at_least(0), help="examples before a question; default: the task's number")
    tasks.add_argument("--limit", type=at_least(1), help="questions per task, from the first")
    add_model_flags(parser)
    parser.add_argument(
        "--max-batch-tokens", type=int, default=8192, help="tokens per forward pass; default: %(default)s"
    )
    return parser


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the arguments of a command line."""
    return make_parser().parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    arguments = parse_arguments(argv)
    from megafp8.inference.evaluate import run

    return run_tool(lambda: run(arguments))


if __name__ == "__main__":
    sys.exit(main())
