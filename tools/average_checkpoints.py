"""Average the weights of several checkpoints of a run, tensor by tensor, on a CPU; or extract a moving average.

    megafp8 average --load runs/mine --last 5 --save averaged --to hf
    megafp8 average --load runs/mine --moving --save averaged
    megafp8 average --load runs/mine/checkpoints/step_00009000 runs/other --save averaged

The checkpoints may have been saved in different layouts. The result contains only weights: a run starts from it with
checkpoint.init_from, and generation, evaluation and conversion read it. If checkpoints have fp32 masters, these are
averaged; with --moving, the moving averages that a run with optimizer.average_decay saves. The command needs memory for
two of the largest tensors. An interrupted command continues when it is repeated. Nothing is overwritten, and the target
appears when it is complete.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from megafp8.host.arguments import ArgumentParser
from megafp8.host.object_store import AnyPath, as_path
from megafp8.host.suggestions import did_you_mean
from megafp8.host.tool import run_tool


def checkpoints(sources: Sequence[AnyPath], last: int | None, least: int) -> list[Path]:
    """Return the checkpoints to average; those at URLs are copied to local files first.

    Raises ValueError unless there are at least `least` different checkpoints.
    """
    from megafp8.checkpoint import complete_checkpoints
    from megafp8.conversion.formats import fetched

    if last is not None:
        if len(sources) > 1 or last < 2:
            raise ValueError(f"--last {last} with {len(sources)} paths: give one run, and a number of at least 2")
        complete = [
            path for _, path in complete_checkpoints(sources[0] / "checkpoints") or complete_checkpoints(sources[0])
        ]
        if len(complete) < last:
            raise ValueError(f"{sources[0]} has {len(complete)} complete checkpoints, and --last is {last}")
        sources = complete[-last:]
    for path in sources:
        if not path.exists():
            raise ValueError(f"--load {path}: there is no such folder; {did_you_mean(Path(str(path)), 'give a run')}")
    paths = [fetched(path) for path in sources]
    if len(paths) < least:
        raise ValueError(f"{len(paths)} checkpoint to average: give two or more, or a run and --last 5")
    resolved = [path.resolve() for path in paths]
    for path in paths:
        if resolved.count(path.resolve()) > 1:
            raise ValueError(f"{path} is given twice")
    return paths


def average(arguments: argparse.Namespace) -> None:
    """Write the average of the checkpoints that the arguments name."""
    from megafp8.conversion.average import Averaged
    from megafp8.conversion.convert import Selected, convert, verify
    from megafp8.conversion.formats import FORMATS, open_source

    to = FORMATS[arguments.to]
    paths = checkpoints(arguments.load, arguments.last, least=1 if arguments.moving else 2)
    averaged = Averaged([open_source(path) for path in paths], moving=arguments.moving)
    source = Selected(averaged, weights_only=True, dtype=None, mtp=to.mtp)
    sink = to.sink(arguments.save)
    state = {str(file): file.stat().st_mtime_ns for path in source.about["average_of"] for file in Path(path).iterdir()}
    job = {"to": arguments.to, "of": state, "moving": arguments.moving}
    print(f"{sink.path}: mean of {len(paths)} checkpoints: {convert(source, sink, job)}")
    if arguments.verify:
        print(f"{sink.path}: equal to the mean: {verify(source, to.source(sink.hidden))}")
    sink.publish()


def make_parser() -> ArgumentParser:
    """Return the parser of this command's arguments."""
    parser = ArgumentParser(description=__doc__)
    help = "runs (their newest checkpoints), checkpoints, or Hugging Face folders; with --last, one run"
    parser.add_argument("--load", required=True, nargs="+", type=as_path, metavar="PATH", help=help)
    parser.add_argument("--last", type=int, metavar="N", help="average the newest N checkpoints of the run")
    parser.add_argument(
        "--moving", action="store_true", help="average the checkpoints' moving averages; one checkpoint is enough"
    )
    parser.add_argument("--save", required=True, type=Path, metavar="PATH", help="folder to create, or an empty folder")
    parser.add_argument("--to", default="native", choices=("native", "hf", "consolidated"), help="default: native")
    parser.add_argument("--verify", action="store_true", help="read the target back and compare every value")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    arguments = make_parser().parse_args(argv)
    return run_tool(lambda: average(arguments))


if __name__ == "__main__":
    sys.exit(main())
