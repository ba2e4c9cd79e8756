"""Draw how evenly a run's tokens were distributed over experts, in one step and over the run.

    megafp8 plot-expert-load runs/mixtral-8x7b --png load.png [--step 4000]

A run with experts records the load every logging.expert_load_interval steps. The left plot is a heat map of one step,
by default the last one, with a row for each layer. The right plot shows each layer's expert with the most tokens over
the steps. All values are relative to the mean of the layer, so 1 means an even load.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from megafp8.host.arguments import ArgumentParser
from megafp8.host.tool import file_of_run, pyplot, run_tool

if TYPE_CHECKING:
    from megafp8.training.expert_load import Load


def read_run(folder: Path) -> dict[int, dict[int, list[int]]]:
    """Return the loads of a run by step. Raises ValueError if it has none."""
    from megafp8.training.expert_load import FILE_NAME, read_expert_load

    path = file_of_run(folder, FILE_NAME, "runs with model.moe and logging.expert_load_interval write it")
    loads = read_expert_load(path)
    if not loads:
        raise ValueError(f"{path} is empty: no step has been recorded yet")
    return loads


def plot(loads: Mapping[int, Load], step: int, path: Path, title: str) -> None:
    """Write the heat map of `step` and the curves of all steps to `path`."""
    from megafp8.training.expert_load import relative

    plt = pyplot()
    figure, (heat, course) = plt.subplots(1, 2, figsize=(13, 5), layout="constrained")
    layers, values = list(loads[step]), relative(loads[step])
    top = max(2.0, float(values.max()))
    image = heat.imshow(values, aspect="auto", cmap="RdBu_r", vmin=2 - top, vmax=top, interpolation="nearest")
    heat.set(title=f"step {step}", xlabel="expert", ylabel="layer")
    shown = range(0, len(layers), max(1, len(layers) // 16))
    heat.set_yticks(list(shown), [str(layers[i]) for i in shown])
    figure.colorbar(image, ax=heat, label="tokens / mean of the layer")
    worst = np.array([relative(load).max(axis=1) for load in loads.values()])
    for i, layer in enumerate(layers):
        color = plt.get_cmap("viridis")(i / max(1, len(layers) - 1))
        course.plot(list(loads), worst[:, i], color=color, linewidth=1, marker="." if len(loads) == 1 else None)
        if i in (0, len(layers) - 1):
            course.plot([], [], color=color, label=f"layer {layer}")
    course.axhline(1, color="grey", linewidth=0.8)
    course.set(title="expert with the most tokens", xlabel="step", ylabel="tokens / mean of the layer")
    course.legend()
    figure.suptitle(title)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def show(arguments: argparse.Namespace) -> None:
    """Write the plot for the run that the arguments name, and print its largest imbalance."""
    from megafp8.training.expert_load import relative

    loads = read_run(arguments.run)
    step = max(loads) if arguments.step is None else arguments.step
    if step not in loads:
        raise ValueError(f"--step {step}: the run recorded {len(loads)} steps from {min(loads)} to {max(loads)}")
    plot(loads, step, arguments.png, arguments.run.name)
    worst = relative(loads[step]).max(axis=1)
    layer = list(loads[step])[int(worst.argmax())]
    print(
        f"step {step}: in layer {layer} one expert has {worst.max():.2f} times the mean load; picture: {arguments.png}"
    )


def make_parser() -> ArgumentParser:
    """Return the parser of this command's arguments."""
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, metavar="RUN_FOLDER", help="run of a model with experts")
    parser.add_argument("--step", type=int, metavar="N", help="recorded step to show (default: the last)")
    parser.add_argument("--png", type=Path, default=Path("expert_load.png"), metavar="FILE", help="picture to write")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    arguments = make_parser().parse_args(argv)
    return run_tool(lambda: show(arguments))


if __name__ == "__main__":
    sys.exit(main())
