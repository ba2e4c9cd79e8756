"""Coordinate check of muP: the size of activations in models of several widths, over the first training steps.

    megafp8 coordinate-check configs/mine.yaml --widths 64,128,256,512 --steps 5 --png coordinates.png

The command trains the config's model (keys may be overridden: optimizer.learning_rate=0.01) in each width, once with
the standard parametrization and once with `model.mup`, on the same random tokens, in one process on this machine's CPU.
As the width grows, so do the number of heads (or their width, with `--widen-heads`), ffn_hidden_size, and the ranks of
latent attention. The base of muP is the config's own hidden_size.

It prints and draws the mean absolute value of the embedding's output, of the last block's attention and MLP outputs,
and of the logits, before each step. Under muP none of them grows with the width (Yang et al. 2022, arXiv:2203.03466,
appendix D.1). A growing curve shows a layer with a wrong initial value, learning rate or scale.
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
    """Parse the value of --widths."""
    widths = text.split(",")
    if not all(width.isdigit() for width in widths) or len(set(widths)) < 2:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of widths; give at least two, such as 64,128,256")
    return [int(width) for width in widths]


def make_parser() -> ArgumentParser:
    """Return the parser of this command's arguments."""
    parser = ArgumentParser(description=__doc__)
    add_config_flags(parser)
    parser.add_argument("--widths", type=_widths, required=True, help="values of model.hidden_size, such as 64,128,256")
    parser.add_argument("--steps", type=at_least(1), default=5, help="number of training steps; default: 5")
    parser.add_argument("--widen-heads", action="store_true", help="widen heads instead of adding heads")
    parser.add_argument("--png", type=Path, help="picture to write")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    arguments = parse_with_config(make_parser(), argv)
    from megafp8.training.coordinate_check import run

    return run_tool(lambda: run(arguments))


if __name__ == "__main__":
    sys.exit(main())
