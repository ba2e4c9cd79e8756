"""Check a cluster before a long run: versions, GPUs, links, clocks, file system, limits, config and data.

    megafp8 launch --nproc-per-node 8 check-cluster
    SCRIPT=check-cluster launch/multi_node.sh configs/llama3-8b.yaml        # like a run on several nodes
    MAX_REQUEUES=0 SCRIPT=check-cluster sbatch --nodes=4 launch/slurm.sbatch configs/llama3-8b.yaml

Every rank is measured by itself, then all nodes are measured together, so that links are shared as in training. The
rates of equal parts are compared with their median, and the slowest part is named. Bandwidths are bus bandwidths as
defined by nccl-tests (doc/PERFORMANCE.md there): they do not depend on the number of ranks, and can be compared with
the speed of the slowest link.

Exit code: 0 on success, also with warnings; 2 if a check fails, after which a launcher does not restart; 1 if the check
itself fails, for example because a rank does not answer within --timeout seconds.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from megafp8.host.arguments import ArgumentParser


def _fraction(text: str) -> float:
    """Parse the value of --warn-below or --fail-below."""
    if not 0 < float(text) <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not a fraction; give more than 0 and at most 1, such as 0.9")
    return float(text)


def make_parser() -> ArgumentParser:
    """Return the parser of this command's arguments."""
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--config", help="also check that all ranks can read its data and write its checkpoints")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="dotted overrides of the config")
    parser.add_argument(
        "--folder", type=Path, help="shared folder to test; default: the run's folder, if a config is given"
    )
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="device to test; auto: GPUs if there are any"
    )
    parser.add_argument("--mebibytes", type=float, help="size of a message in MiB; default: 256 on CUDA, 4 on CPU")
    parser.add_argument("--warn-below", type=_fraction, default=0.9, help="warn below this fraction of the median rate")
    parser.add_argument("--fail-below", type=_fraction, default=0.7, help="fail below this fraction of the median rate")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds that a collective may take")
    return parser


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the arguments of a command line."""
    parser = make_parser()
    arguments = parser.parse_intermixed_args(argv)
    if arguments.overrides and not arguments.config:
        parser.error(f"{arguments.overrides[0]} overrides a config: give --config")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    arguments = parse_arguments(argv)
    from megafp8.parallel.parallel_state import destroy_model_parallel
    from megafp8.training.check_cluster import run
    from megafp8.training.errors import run_and_report

    code = run_and_report(lambda: run(arguments))
    if code == 0:
        destroy_model_parallel()
    return code


if __name__ == "__main__":
    sys.exit(main())
