"""torchrun with exit codes and clean stops of a training job: `megafp8 launch [options] COMMAND ...`.

    megafp8 launch --nproc-per-node 8 pretrain --config my.yaml parallel.tensor=2
    megafp8 launch --nnodes 4 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HEAD:29400 --rdzv-id JOB \\
        pretrain --config my.yaml                                      # the same on each node

COMMAND is one of megafp8's, a script, or a module after `-m`. These are the options that are of use here; all of
torchrun's are taken (`torchrun --help`).

Exit codes: 0 done, or stopped cleanly; 2 wrong config, data or checkpoint, never restarted; 3 no progress and 1
another failure, after its restarts (docs/launching.md).
"""

from __future__ import annotations

import sys
from argparse import REMAINDER

from megafp8.host.arguments import ArgumentParser


def make_parser() -> ArgumentParser:
    """For help and completion; `launch/agent.py` parses by torchrun's own, whose import takes seconds."""
    parser = ArgumentParser(description=__doc__)
    node = parser.add_argument_group("this node")
    node.add_argument("--nproc-per-node", default="1", metavar="N", help="processes: a number, or gpu for all GPUs")
    node.add_argument("--max-restarts", type=int, default=0, metavar="N", help="restarts after failures")
    node.add_argument("--log-dir", metavar="FOLDER", help="keep what each rank prints in files below this folder")
    node.add_argument("--tee", default="0", metavar="MODE", help="3: print it too, with --log-dir")
    job = parser.add_argument_group("several nodes")
    job.add_argument("--nnodes", default="1:1", metavar="N", help="nodes of the job, or MIN:MAX")
    job.add_argument("--rdzv-backend", default="static", metavar="KIND", help="c10d; needed for several nodes")
    job.add_argument("--rdzv-endpoint", metavar="HOST:PORT", help="the head node, where all nodes meet")
    job.add_argument("--rdzv-id", default="none", metavar="ID", help="any word that only the nodes of this job have")
    job.add_argument("--local-addr", metavar="ADDRESS", help="of this node; default: that of its host name")
    parser.add_argument("-m", "--module", action="store_true", help="COMMAND is a module, as of python -m")
    parser.add_argument(
        "command", nargs=REMAINDER, metavar="COMMAND ...", help="what the ranks run, with its arguments"
    )
    return parser


def main() -> int:
    if sys.argv[1:2] in ([], ["-h"], ["--help"]):
        make_parser().print_help()
        return 0 if sys.argv[1:] else 2
    from .agent import main

    return main()


if __name__ == "__main__":
    sys.exit(main())
