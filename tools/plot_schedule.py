"""Plot pipeline schedules, simulated or measured: a PNG, and a trace for https://ui.perfetto.dev or chrome://tracing.

    megafp8 plot-schedule 1f1b zb-h1 zb-v --pipeline 4 --micro-batches 8 --png schedules.png --trace trace.json
    megafp8 plot-schedule interleaved --pipeline 4 --chunks 2 --times 1,1.1,0.9 --p2p 0.1 --png schedule.png
    megafp8 plot-schedule zb-v --measured runs/mine/pipeline_trace.json --png schedule.png

Schedules are given as in `parallel.schedule`: names, .csv files, or module:function. There is one row per rank. Forward
passes are blue, backward passes green, split backward passes light green, and their weight gradients orange. Later
chunks of a rank are darker, with white numbers. For each schedule, the duration of a step, the bubble, and the maximum
number of micro-batches held by a rank are printed, and written above the plot.

`--times` F,B,W: times of one micro-batch on a rank for forward, input gradients and weight gradients, in any unit. They
include all stages of the rank, so that schedules can be compared.

`--measured` draws the step of `logging.pipeline_trace_step`, with the number of ranks of the run. Other given schedules
are simulated with the measured mean times: of each stage if the placement is the same, else of all stages.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from megafp8.host.arguments import ArgumentParser, at_least
from megafp8.host.tool import pyplot, run_tool
from megafp8.parallel.pipeline.actions import Kind, StagePlacement, split_backwards
from megafp8.parallel.pipeline.registry import SCHEDULES, cell, place_stages, training_schedule
from megafp8.parallel.pipeline.simulate import StageTimes, Timeline, mean_times, simulate

COLOURS = {"F": "#6baed6", "whole": "#41ab5d", "B": "#a1d99b", "W": "#fd8d3c"}
LABELLED = 1200  # maximum number of actions that are drawn with their numbers


def summary(name: str, timeline: Timeline, placement: StagePlacement, unit: str) -> str:
    """Return a line with duration, bubble and memory of a schedule."""
    v = placement.num_chunks
    most_held, flight = max(timeline.peak_saved) / v, max(timeline.peak_in_flight) / v
    return (
        f"{name}: {timeline.duration:.4g}{unit}, bubble {timeline.bubble_fraction:.1%}, "
        f"micro-batches held {most_held:g} (until their backward {flight:g})"
    )


def draw(timelines: dict[str, tuple[Timeline, StagePlacement]], titles: dict[str, str], path: Path) -> None:
    """Draw all timelines below each other on one time axis."""
    plt = pyplot()
    rows = [len(timeline.spans) for timeline, _ in timelines.values()]
    figure, axes = plt.subplots(
        len(rows), 1, figsize=(16, 0.9 * len(rows) + 0.42 * sum(rows)), height_ratios=rows, layout="constrained",
        squeeze=False, sharex=True,
    )  # fmt: skip
    for axis, (name, (timeline, placement)) in zip(axes[:, 0], timelines.items()):
        for rank in range(len(timeline.spans)):
            _draw_rank(axis, rank, timeline, placement)
        axis.set_ylim(len(timeline.spans) - 0.5, -0.5)
        axis.set_yticks(range(len(timeline.spans)), [f"rank {rank}" for rank in range(len(timeline.spans))])
        axis.set_title(titles[name], loc="left", fontsize=10)
        axis.spines[["top", "right", "left"]].set_visible(False)
    axes[-1, 0].set_xlabel("time")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _draw_rank(axis: Any, rank: int, timeline: Timeline, placement: StagePlacement) -> None:
    spans = timeline.spans[rank]
    split = split_backwards(span.action for span in spans)
    labelled = sum(len(spans) for spans in timeline.spans) <= LABELLED
    for action, start, end in spans:
        whole = action.kind is Kind.BACKWARD and (action.microbatch, action.chunk) not in split
        name = "whole" if whole else cell(action)[0]
        shade = 1 - 0.45 * action.chunk / max(1, placement.num_chunks - 1)
        colour = tuple(shade * int(COLOURS[name][i : i + 2], 16) / 255 for i in (1, 3, 5))
        left, width = start - timeline.start, end - start
        axis.barh(rank, width, left=left, height=0.86, color=colour, edgecolor="white", linewidth=0.4)
        if labelled:
            text = {"ha": "center", "va": "center", "fontsize": 6, "color": "white" if action.chunk else "black"}
            axis.text(left + width / 2, rank, str(action.microbatch), clip_on=True, **text)


def make_parser() -> ArgumentParser:
    """Return the parser of this command's arguments."""
    parser = ArgumentParser(description=__doc__)
    parser.add_argument(
        "schedules", nargs="*", metavar="schedule", help=f"{', '.join(SCHEDULES)}, *.csv, module:function"
    )
    parser.add_argument("--pipeline", type=at_least(1), default=4, help="number of pipeline ranks")
    parser.add_argument("--micro-batches", type=at_least(1), default=8, help="micro-batches per step")
    parser.add_argument("--chunks", type=at_least(1), default=2, help="stages per rank, if the schedule allows several")
    parser.add_argument("--v", action="store_true", help="place the stages of a custom schedule in a V")
    parser.add_argument("--times", default="1,1,1", help="times F,B,W of a rank for one micro-batch")
    parser.add_argument("--p2p", type=float, default=0.0, help="time of a transfer between ranks")
    parser.add_argument("--measured", type=Path, help="pipeline_trace.json of a run")
    parser.add_argument("--png", type=Path, help="picture to write")
    parser.add_argument("--trace", type=Path, help="trace to write, for Perfetto or chrome://tracing")
    return parser


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Return the arguments of a command line."""
    parser = make_parser()
    options = parser.parse_intermixed_args(arguments)
    if not options.schedules and not options.measured:
        parser.error("name a schedule, or give --measured")
    try:
        options.times = [float(part) for part in options.times.split(",")]
    except ValueError:
        options.times = []
    if len(options.times) != 3 or min(options.times) <= 0:
        parser.error("--times are three positive numbers, such as 1,1,1")
    return options


def timelines(arguments: argparse.Namespace) -> dict[str, tuple[Timeline, StagePlacement]]:
    """Return the timelines to draw, by name."""
    from megafp8.parallel.pipeline.trace import read_timeline

    by_name: dict[str, tuple[Timeline, StagePlacement]] = {}
    pipeline, m, rank_times, p2p = arguments.pipeline, arguments.micro_batches, arguments.times, arguments.p2p
    measured_placement, stages = None, []
    if arguments.measured:
        measured, measured_placement = read_timeline(arguments.measured)
        by_name["measured"] = (measured, measured_placement)
        pipeline = measured_placement.num_ranks
        m = 1 + max(span.action.microbatch for spans in measured.spans for span in spans)
        stages = mean_times(measured, measured_placement)
        by_kind = zip(*((stage.forward, stage.backward, stage.weight) for stage in stages))
        rank_times = [measured_placement.num_chunks * statistics.fmean(times) for times in by_kind]
    for source in arguments.schedules:
        own_chunks = SCHEDULES[source].chunks if source in SCHEDULES else None
        placement = place_stages(source, pipeline, own_chunks or arguments.chunks, "v" if arguments.v else None)
        schedule = training_schedule(source, placement, m)
        equal = StageTimes(*(time / placement.num_chunks for time in rank_times), p2p)
        times = [replace(stage, p2p=p2p) for stage in stages] if placement == measured_placement else equal
        by_name[source] = (simulate(schedule, placement, times), placement)
    return by_name


def show(arguments: argparse.Namespace) -> None:
    """Print the summary of each schedule, and write the plot and the trace."""
    from megafp8.parallel.pipeline.trace import chrome_trace

    shown = timelines(arguments)
    seconds = arguments.measured is not None
    titles = {name: summary(name, *drawn, " s" if seconds else "") for name, drawn in shown.items()}
    print("\n".join(titles.values()))
    if arguments.png:
        draw(shown, titles, arguments.png)
    if arguments.trace:
        unit = 1.0 if seconds else 1e-3  # a simulated time of 1 is shown as a millisecond
        arguments.trace.write_text(json.dumps(chrome_trace(shown, unit=unit)), encoding="utf-8")


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    arguments = parse(argv)
    return run_tool(lambda: show(arguments))


if __name__ == "__main__":
    sys.exit(main())
