"""Coordinate check of muP: how large activations are in models of several widths, over the first steps of training.

    megafp8 coordinate-check configs/mine.yaml --widths 64,128,256,512 --steps 5 --png coordinates.png

Trains the config's model (keys may be overridden: optimizer.learning_rate=0.01) in each width, once as usual and once
with `model.mup`, on the same random tokens, in one process on this machine's CPU. With the width grow the number of
heads, or with `--widen-heads` their width, ffn_hidden_size, and the ranks of latent attention. The base of muP is the
config's own hidden_size.

Prints and draws the mean absolute value of the embedding's output, of what the last block's attention and MLP add, and
of the logits, before each step. Under muP none of them grows with the width (Yang et al. 2022, arXiv:2203.03466,
appendix D.1); a curve that does is a layer whose initial values, learning rate or scale is wrong.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from megafp8.commands import add_config_flags, parse_with_config
from megafp8.host.arguments import ArgumentParser, at_least
from megafp8.host.tool import run_tool


def _widths(text: str) -> list[int]:
    """The type of --widths."""
    widths = text.split(",")
    if not all(width.isdigit() for width in widths) or len(set(widths)) < 2:
        raise argparse.ArgumentTypeError(f"{text!r} are no widths; give at least two, such as 64,128,256")
    return [int(width) for width in widths]


def make_parser() -> ArgumentParser:
    parser = ArgumentParser(description=__doc__)
    add_config_flags(parser)
    parser.add_argument("--widths", type=_widths, required=True, help="values of model.hidden_size, as 64,128,256")
    parser.add_argument("--steps", type=at_least(1), default=5, help="default: 5")
    parser.add_argument("--widen-heads", action="store_true", help="widen heads instead of having more of them")
    parser.add_argument("--png", type=Path, help="where to draw it")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse_with_config(make_parser(), argv)
    from megafp8.training.coordinate_check import run

    return run_tool(lambda: run(arguments))


if __name__ == "__main__":
    sys.exit(main())
