"""torchrun with exit codes and clean stops of a training job: `megafp8 launch [options] COMMAND ...`.

    megafp8 launch --nproc-per-node 8 pretrain --config my.yaml parallel.tensor=2
    megafp8 launch --nnodes 4 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HEAD:29400 --rdzv-id JOB COMMAND

Run the second command on each node. COMMAND is a command of megafp8, a script, or a module after `-m`, with its
arguments. The options below are the most useful ones; all options of torchrun are accepted (`torchrun --help`).

Exit codes: 0 done, or stopped cleanly; 2 wrong config, data or checkpoint, never restarted; 3 no progress and 1 another
failure, after its restarts (docs/launching.md).
"""

from __future__ import annotations

import sys
from argparse import REMAINDER

from megafp8.host.arguments import ArgumentParser


def make_parser() -> ArgumentParser:
    """Return the parser for help and completion.

    `launch/agent.py` parses with torchrun's own parser, which takes seconds to import.
    """
    parser = ArgumentParser(description=__doc__)
    node = parser.add_argument_group("this node")
    node.add_argument("--nproc-per-node", default="1", metavar="N", help="processes: a number, or gpu for all GPUs")
    node.add_argument("--max-restarts", type=int, default=0, metavar="N", help="number of restarts after failures")
    node.add_argument("--log-dir", metavar="FOLDER", help="write each rank's output to files below this folder")
    node.add_argument("--tee", default="0", metavar="MODE", help="with --log-dir, 3: print the output too")
    job = parser.add_argument_group("several nodes")
    job.add_argument("--nnodes", default="1:1", metavar="N", help="number of nodes of the job, or MIN:MAX")
    job.add_argument("--rdzv-backend", default="static", metavar="KIND", help="c10d; required for several nodes")
    job.add_argument("--rdzv-endpoint", metavar="HOST:PORT", help="head node, to which all nodes connect")
    job.add_argument("--rdzv-id", default="none", metavar="ID", help="any word that only the nodes of this job use")
    job.add_argument(
        "--local-addr", metavar="ADDRESS", help="address of this node; default: the address of its host name"
    )
    parser.add_argument("-m", "--module", action="store_true", help="COMMAND is a module, as in python -m")
    parser.add_argument(
        "command", nargs=REMAINDER, metavar="COMMAND ...", help="command that the ranks run, with its arguments"
    )
    return parser


def main() -> int:
    """Print the help, or run the agent, and return the exit code."""
    if sys.argv[1:2] in ([], ["-h"], ["--help"]):
        make_parser().print_help()
        return 0 if sys.argv[1:] else 2
    from .agent import main

    return main()


if __name__ == "__main__":
    sys.exit(main())
