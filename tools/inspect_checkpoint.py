"""Inspect a checkpoint: origin, tensors and their statistics, and differences from another checkpoint.

    megafp8 inspect runs/quickstart/checkpoints/step_00000150 --tensors 'model.layers.0.*' --norms
    megafp8 inspect .../step_00000100 --diff .../step_00000150

The command runs in one process and reads values in blocks of rows, so its memory does not depend on the model. Exit
code: 0; with --diff, 1 if tensors differ (different configs are listed, but do not count); 2 for an error.
"""

from __future__ import annotations

import sys

from megafp8.host.arguments import ArgumentParser
from megafp8.host.messages import print_error
from megafp8.host.object_store import as_path


def make_parser() -> ArgumentParser:
    """Return the parser of this command's arguments."""
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("path", type=as_path, metavar="PATH", help="run, checkpoint or Hugging Face folder")
    parser.add_argument(
        "--tensors", default="*", metavar="PATTERN", help="show only tensors with matching names, e.g. 'model.*'"
    )
    parser.add_argument(
        "--norms", action="store_true", help="also show the L2 norm, min, max and NaN count of each tensor"
    )
    parser.add_argument("--diff", type=as_path, metavar="OTHER", help="compare with this checkpoint instead")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    arguments = make_parser().parse_args(argv)
    if arguments.norms and arguments.diff:
        make_parser().error("--norms is for one checkpoint, --diff for two: choose one of them")
    from megafp8.training.inspect_checkpoint import inspect

    try:
        return inspect(arguments)
    except (ValueError, OSError) as error:
        print_error(error)
        return 2


if __name__ == "__main__":
    sys.exit(main())
