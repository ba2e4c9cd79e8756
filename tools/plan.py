"""Predict memory and step time of a config on a cluster, and search for a faster layout.

    megafp8 plan --config configs/llama3-70b.yaml --gpus 64 --gpu h100-80gb
    megafp8 plan --config configs/llama3-70b.yaml --gpus 16384 --explain training.global_batch_size=16384
    megafp8 plan --config configs/llama3-8b.yaml --gpus 256 --tokens 15T --price 2.5
    megafp8 plan --config configs/llama3-405b.yaml --gpus 1024,16384,100000 --goodput

The command needs neither GPUs nor data, and takes seconds on a laptop. It prints the config's own layout, the fastest
layouts that fit, and the reasons why others lose. The best layout is printed as YAML to paste (the keys that differ)
and as a command, with its tokens per day, and with the days, GPU-hours and, given `--price`, cost of the run's tokens
(or of `--tokens`). docs/planning.md explains the model and shows its error for every recorded run.

`--goodput` prints the cost of failures instead of layouts: the goodput of the config's own layout on each number of
GPUs, with restarts from disk, with restarts from memory, and with replicas that continue, and the best checkpoint
interval of each (megafp8/planner/goodput.py).

`--measure`, on a machine with the GPU, replaces the recorded rates of GEMMs and copies by measured ones. A prediction
assumes that experts have equal loads and ignores document boundaries. The limit leaves 4 GiB free for CUDA's context,
NCCL's buffers and fragmentation.
"""

from __future__ import annotations

import argparse
import math
import re
import sys

from megafp8.commands import add_config_flags, parse_with_config
from megafp8.host.arguments import ArgumentParser, at_least
from megafp8.host.gpus import GPUS
from megafp8.host.tool import run_tool


def _gpu(name: str) -> str:
    """Parse the value of --gpu into a name in `GPUS`."""
    known = next((known for known in GPUS if name.lower() in (known, GPUS[known].chip.lower())), None)
    if known is None:
        raise argparse.ArgumentTypeError(f"{name!r} is not known; known are {', '.join(GPUS)}")
    return known


def _tokens(text: str) -> int:
    """Parse the value of --tokens."""
    from megafp8.planner.budget import number_of_tokens  # needs torch, unlike help

    try:
        return number_of_tokens(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _price(text: str) -> float:
    """Parse the value of --price."""
    try:
        price = float(text)
    except ValueError:
        price = math.nan
    if not 0 <= price < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a price, such as 2.5")
    return price


def _gpu_counts(text: str) -> list[int]:
    """Parse the value of --gpus."""
    try:
        return [at_least(1)(count) for count in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a whole number nor a list such as 1024,16384") from None


def _replicas(text: str) -> tuple[int, int]:
    """Parse the value of --replicas into the number of replicas and the minimum that train."""
    match = re.fullmatch(r"(\d+):(\d+)", text)
    if match is None or not 1 <= int(match[2]) <= int(match[1]) or int(match[1]) < 2:
        raise argparse.ArgumentTypeError(f"{text!r} is not NUMBER:MINIMUM, such as 8:6")
    return int(match[1]), int(match[2])


def _hours(text: str) -> float:
    """Parse the value of --mtbf-gpu-hours."""
    try:
        hours = float(text)
    except ValueError:
        hours = math.nan
    if not 0 < hours < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of hours, such as 50000")
    return hours


def make_parser() -> ArgumentParser:
    """Return the parser of this command's arguments."""
    parser = ArgumentParser(description=__doc__)
    add_config_flags(parser)
    parser.add_argument(
        "--gpus",
        type=_gpu_counts,
        help="total number of GPUs, by default the fewest on which the config runs; with --goodput a list: 1024,16384",
    )
    names = ", ".join(GPUS)
    parser.add_argument(
        "--gpu", type=_gpu, default="h100-80gb", help=f"{names}, or the chip's name; default: %(default)s"
    )
    nodes = parser.add_mutually_exclusive_group()
    nodes.add_argument("--gpus-per-node", type=at_least(1), default=8, help="GPUs per node, connected by NVLink")
    nodes.add_argument("--nodes", type=at_least(1), help="number of nodes, instead of --gpus-per-node")
    parser.add_argument("--top", type=at_least(1), default=5, help="number of layouts to print")
    parser.add_argument(
        "--tokens", type=_tokens, help="tokens to train on, e.g. 15T, 300B, 2e12; default: the run's tokens"
    )
    parser.add_argument("--price", type=_price, help="price of a GPU-hour, to print the cost")
    parser.add_argument("--explain", action="store_true", help="print every term of the best prediction")
    parser.add_argument("--measure", action="store_true", help="measure the rates of the GPU in this machine first")
    parser.add_argument("--goodput", action="store_true", help="print the goodput under failures instead of layouts")
    parser.add_argument(
        "--replicas",
        type=_replicas,
        help="with --goodput: NUMBER:MINIMUM of replicas; default: resilience.replicas, or 8:6",
    )
    parser.add_argument(
        "--mtbf-gpu-hours", type=_hours, help="with --goodput: GPU-hours between failures; default: Llama 3's"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    return parser


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Return the arguments of a command line."""
    parser = make_parser()
    arguments = parse_with_config(parser, argv)
    if arguments.goodput:
        if arguments.gpus is None:
            parser.error("--goodput: give numbers of GPUs by --gpus, such as 1024,16384")
        if arguments.nodes is not None:
            parser.error("--nodes: give --gpus-per-node with --goodput")
        return arguments
    if arguments.gpus is not None and len(arguments.gpus) > 1:
        parser.error("--gpus: several numbers are for --goodput; give one")
    return arguments


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code: 0; 1 if no layout fits; 2 for wrong arguments or a wrong config."""
    arguments = parse(argv)
    fits: list[bool] = []
    from megafp8.training.plan_layouts import goodput, plan

    code = run_tool(lambda: fits.append((goodput if arguments.goodput else plan)(arguments)))
    return code or int(not fits[0])


if __name__ == "__main__":
    sys.exit(main())
