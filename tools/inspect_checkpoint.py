"""Inspect a checkpoint: origin, tensors and their statistics, and differences from another checkpoint.

    megafp8 inspect runs/quickstart/checkpoints/step_00000150 --tensors 'model.layers.0.*' --norms
    megafp8 inspect .../step_00000100 --diff .../step_00000150

Runs in one process. Values are read in blocks of rows, so memory does not depend on the model. Exit code: 0; with
--diff 1 where tensors differ (differing configs are listed, but do not count); 2 for an error.
"""

from __future__ import annotations

import sys

from megafp8.host.arguments import ArgumentParser
from megafp8.host.messages import print_error
from megafp8.host.object_store import as_path


def make_parser() -> ArgumentParser:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("path", type=as_path, metavar="PATH", help="run, checkpoint or folder of Hugging Face")
    parser.add_argument("--tensors", default="*", metavar="PATTERN", help="only tensors of such names, e.g. 'model.*'")
    parser.add_argument(
        "--norms", action="store_true", help="read the values: L2 norm, min, max and NaN of each tensor"
    )
    parser.add_argument("--diff", type=as_path, metavar="OTHER", help="compare with this one instead")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    return parser


def main(argv: list[str] | None = None) -> int:
    arguments = make_parser().parse_args(argv)
    if arguments.norms and arguments.diff:
        make_parser().error("--norms is of one checkpoint, --diff of two: choose one of them")
    from megafp8.training.inspect_checkpoint import inspect

    try:
        return inspect(arguments)
    except (ValueError, OSError) as error:
        print_error(error)
        return 2


if __name__ == "__main__":
    sys.exit(main())
