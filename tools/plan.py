"""Predict memory and step time of a config on a cluster, and search for a faster layout.

    megafp8 plan --config configs/llama3-70b.yaml --gpus 64 --gpu h100-80gb
    megafp8 plan --config configs/llama3-70b.yaml --gpus 16384 --explain training.global_batch_size=16384
    megafp8 plan --config configs/llama3-8b.yaml --gpus 256 --tokens 15T --price 2.5
    megafp8 plan --config configs/llama3-405b.yaml --gpus 1024,16384,100000 --goodput

Needs neither GPUs nor data; seconds on a laptop. Prints the config's own layout, the fastest layouts that fit, the best
of them as YAML to paste (the keys that differ) and as a command, its tokens a day, what the run's tokens (or
`--tokens`) take in days, GPU-hours and, at `--price`, money, and why the others lose. How the model
works, and its errors for every recorded run: docs/planning.md.

`--goodput` prints no layouts but what failures cost the config's own layout on each number of GPUs, with restarts from
disk, from memory, and with replicas that go on, and the best checkpoint interval of each (megafp8/planner/goodput.py).

`--measure`, on a machine with the GPU, replaces the rates of GEMMs and copies by measured ones. A prediction takes the
load of experts as even and ignores document boundaries; CUDA's context, NCCL's buffers and fragmentation are the
4 GiB that the limit leaves free.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # started as a file
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import yaml

from megafp8.commands import add_config_flags, parse_with_config
from megafp8.config import Config, ConfigError, check_layout, fewest_ranks, load_config, planned_stages
from megafp8.config.frozen import frozen_run
from megafp8.host.arguments import ArgumentParser, at_least
from megafp8.host.gpus import GPUS, Gpu
from megafp8.host.tool import run_tool, text_table
from megafp8.planner.budget import Budget, budget, mfu, tokens_per_day
from megafp8.planner.flops import flops_per_token
from megafp8.planner.goodput import PARTS, Assumptions, Forecast, forecasts, hang_detection, state_bytes_of
from megafp8.planner.hardware import Cluster
from megafp8.planner.memory import memory_table, size_text
from megafp8.planner.outline import model_outline
from megafp8.planner.predict import Prediction, predict
from megafp8.planner.search import Candidate, Found, changed_keys, search
from megafp8.training.fp8_config import build_fp8
from megafp8.training.frozen_config import check_frozen, teacher_of
from megafp8.training.inputs import with_vocabulary


def _gpu(name: str) -> str:
    """The type of --gpu: the name in `GPUS`."""
    known = next((known for known in GPUS if name.lower() in (known, GPUS[known].chip.lower())), None)
    if known is None:
        raise argparse.ArgumentTypeError(f"{name!r} is not known; there are {', '.join(GPUS)}")
    return known


def _tokens(text: str) -> int:
    """The type of --tokens."""
    from megafp8.planner.budget import number_of_tokens  # help needs no torch

    try:
        return number_of_tokens(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _price(text: str) -> float:
    """The type of --price."""
    try:
        price = float(text)
    except ValueError:
        price = math.nan
    if not 0 <= price < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no price, such as 2.5")
    return price


def _gpu_counts(text: str) -> list[int]:
    """The type of --gpus."""
    try:
        return [at_least(1)(count) for count in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number, nor several such as 1024,16384") from None


def _replicas(text: str) -> tuple[int, int]:
    """The type of --replicas: number and least number."""
    match = re.fullmatch(r"(\d+):(\d+)", text)
    if match is None or not 1 <= int(match[2]) <= int(match[1]) or int(match[1]) < 2:
        raise argparse.ArgumentTypeError(f"{text!r} is not number:least, such as 8:6")
    return int(match[1]), int(match[2])


def _hours(text: str) -> float:
    """The type of --mtbf-gpu-hours."""
    try:
        hours = float(text)
    except ValueError:
        hours = math.nan
    if not 0 < hours < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of hours, such as 50000")
    return hours


def make_parser() -> ArgumentParser:
    parser = ArgumentParser(description=__doc__)
    add_config_flags(parser)
    parser.add_argument(
        "--gpus",
        type=_gpu_counts,
        help="number of GPUs in all, by default the fewest that the config runs on; several with --goodput: 1024,16384",
    )
    names = ", ".join(GPUS)
    parser.add_argument(
        "--gpu", type=_gpu, default="h100-80gb", help=f"{names}, or the chip's name; default: %(default)s"
    )
    nodes = parser.add_mutually_exclusive_group()
    nodes.add_argument("--gpus-per-node", type=at_least(1), default=8, help="GPUs of each node, which NVLink connects")
    nodes.add_argument("--nodes", type=at_least(1), help="instead of --gpus-per-node")
    parser.add_argument("--top", type=at_least(1), default=5, help="layouts to print")
    parser.add_argument("--tokens", type=_tokens, help="15T, 300B, 2e12: how long they take; default: those of the run")
    parser.add_argument("--price", type=_price, help="of a GPU for an hour, for the cost of the tokens")
    parser.add_argument("--explain", action="store_true", help="print every term of the best prediction")
    parser.add_argument("--measure", action="store_true", help="measure the rates of the GPU in this machine first")
    parser.add_argument("--goodput", action="store_true", help="print the goodput under failures instead of layouts")
    parser.add_argument(
        "--replicas", type=_replicas, help="with --goodput: number and least number (resilience.replicas, or 8:6)"
    )
    parser.add_argument("--mtbf-gpu-hours", type=_hours, help="with --goodput: between failures; default: Llama 3's")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    return parser


def parse(argv: list[str] | None = None) -> argparse.Namespace:
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


def cluster_of(arguments: argparse.Namespace, config: Config, gpu: Gpu) -> Cluster:
    """Return the cluster that is planned for, by default of the fewest GPUs that the config and its stages run on.

    Raises ValueError if the GPUs do not fill whole nodes.
    """
    stages = planned_stages(config, arguments.config)
    gpus = arguments.gpus[0] if arguments.gpus else fewest_ranks([stage.config for stage in stages])
    nodes, gpus_per_node = arguments.nodes, arguments.gpus_per_node
    if nodes is not None:
        if gpus % nodes:
            raise ValueError(f"--nodes: {gpus} GPUs do not divide into {nodes} nodes; give --gpus {gpus * nodes}")
        gpus_per_node = gpus // nodes
    if gpus % min(gpus, gpus_per_node):
        whole = -(-gpus // gpus_per_node) * gpus_per_node
        raise ValueError(f"--gpus: {gpus} are no whole nodes of --gpus-per-node {gpus_per_node}; give --gpus {whole}")
    return Cluster(gpu, gpus, gpus_per_node)


@dataclass(frozen=True)
class Question:
    """What is planned: the config before any change, on which cluster, and what is asked of each prediction."""

    config: Config
    cluster: Cluster
    flops_per_token: float
    tokens: int | None
    price: float | None

    def mfu(self, prediction: Prediction) -> float | None:
        fp8 = self.config.fp8.recipe != "none"
        return mfu(prediction, self.flops_per_token, self.cluster.gpu, self.config.training.precision, fp8=fp8)

    def budget(self, prediction: Prediction) -> Budget | None:
        return None if self.tokens is None else budget(prediction, self.tokens, self.price)


def record(prediction: Prediction, question: Question) -> dict[str, Any]:
    """A prediction for --json."""
    costs = question.budget(prediction)
    return {
        "step_seconds": prediction.seconds,
        "tokens_per_second_per_gpu": prediction.tokens_per_second,
        "mfu": question.mfu(prediction),
        "tokens_per_day": tokens_per_day(prediction),
        "budget": None if costs is None else asdict(costs),
        "peak_bytes": prediction.peak,
        "terms_seconds": prediction.terms,
        "memory_bytes": [asdict(memory) | {"total": memory.total} for memory in prediction.memory],
    }


def line(prediction: Prediction, question: Question) -> str:
    rate, share, peak = prediction.tokens_per_second, question.mfu(prediction), size_text(prediction.peak)
    utilization = "" if share is None else f"  {share:>5.1%} MFU"
    return f"{prediction.seconds * 1e3:>10,.0f} ms  {rate:>9,.0f} tokens/s/GPU{utilization}  {peak:>11}"


def budget_lines(prediction: Prediction, question: Question) -> list[str]:
    """Tokens a day, and what the tokens take."""
    lines = [f"{tokens_per_day(prediction) / 1e9:,.3f} billion tokens a day"]
    costs = question.budget(prediction)
    if costs is not None:
        cost = "" if costs.cost is None else f", {costs.cost:,.0f} at {question.price:g} per GPU-hour"
        lines.append(f"{costs.tokens:,} tokens: {costs.days:,.2f} days, {costs.gpu_hours:,.0f} GPU-hours{cost}")
    return lines


def commands(config: str, overrides: Sequence[str], keys: Mapping[str, Mapping[str, Any]], cluster: Cluster) -> str:
    """Commands that start the run with the values of `keys`, by section, in place of those of `overrides`."""
    changes = {f"{section}.{key}": value for section, of in keys.items() for key, value in of.items()}
    words = [word for word in overrides if word.partition("=")[0] not in changes]
    words += [f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in changes.items()]
    arguments = shlex.join([config, *words])
    nodes, node_ranks = -(-cluster.gpus // cluster.gpus_per_node), min(cluster.gpus, cluster.gpus_per_node)
    if nodes == 1:
        return f"megafp8 launch --nproc-per-node {node_ranks} pretrain --config {arguments}"
    meeting = "--rdzv-backend c10d --rdzv-endpoint HEAD:29400 --rdzv-id RUN"
    return (
        f"megafp8 launch --nnodes {nodes} --nproc-per-node {node_ranks} {meeting} pretrain --config {arguments}\n"
        f"or, under Slurm:\nsbatch --nodes={nodes} --gpus-per-node={node_ranks} launch/slurm.sbatch {arguments}"
    )


def terms_table(prediction: Prediction) -> str:
    """The terms of a step, largest first."""
    rows = sorted(prediction.terms.items(), key=lambda term: -term[1])
    return "\n".join(
        f"{seconds * 1e3:>10,.1f} ms  {seconds / prediction.seconds:>6.1%}  {term}" for term, seconds in rows
    )


def described(candidate: Candidate) -> str:
    """A layout in one line."""
    x = candidate.layout
    sharding = "FSDP" if x.fsdp else "ZeRO 1" if candidate.config.parallel.zero else "no ZeRO"
    sharding += f" × {x.fsdp_replicas}" if x.fsdp_replicas > 1 else ""
    schedule = f"{x.schedule}{f' v{x.virtual_pipeline}' if x.virtual_pipeline > 1 else ''}, " if x.pipeline > 1 else ""
    return f"{x.group}, {schedule}{sharding}, micro-batch {x.micro_batch_size}, recompute {x.recompute}"


def text(own: Prediction | str, found: Found, arguments: argparse.Namespace, question: Question, seconds: float) -> str:
    limit = question.cluster.memory
    gpus = question.cluster.gpus
    fewest = "" if arguments.gpus else ", the fewest that this config runs on; --gpus N plans for others"
    lines = [f"{gpus:,} GPU{'s' if gpus > 1 else ''} ({question.cluster.gpu.chip}){fewest}", ""]
    lines += ["the config's own layout:", own if isinstance(own, str) else line(own, question), ""]
    if not found.best:
        return "\n".join([*lines, f"no layout of {found.layouts:,} fits {size_text(limit)}"])
    lines += [f"the fastest of {found.layouts:,} layouts that fit {size_text(limit)}:"]
    lines += [f"{line(candidate.prediction, question)}  {described(candidate)}" for candidate in found.best]
    best = found.best[0]
    changes = changed_keys(question.config, best.config)
    lines += ["", "the best as YAML:" if changes else "the config has the best layout already"]
    lines += [yaml.safe_dump(changes, sort_keys=False).rstrip()] if changes else []
    lines += ["", "as a command:", commands(arguments.config, arguments.overrides, changes, question.cluster)]
    lines += [
        "",
        "in this layout, without interruptions:",
        *(f"  {line}" for line in budget_lines(best.prediction, question)),
    ]
    lines += ["", "why others lose:", *(f"  {name}: {why}" for name, why in found.losers)]
    if arguments.explain:
        lines += ["", "terms of the best, means over the pipeline ranks:", terms_table(best.prediction)]
        lines += ["", memory_table(best.prediction.memory)]
    lines += ["", f"{found.predicted:,} predicted whole, {seconds:.1f} s"]
    return "\n".join(lines)


def whole_replicas(config: Config, gpus: int, gpus_per_node: int, replicas: int) -> tuple[int, int]:
    """The most GPUs that make so many equal replicas of whole nodes, and the config's batch rounded up for them.

    ValueError if there are too few.
    """
    p, t = config.parallel, config.training
    model_ranks = p.tensor * p.pipeline * p.context
    unit = math.lcm(model_ranks, gpus_per_node) * replicas
    if gpus < unit:
        raise ValueError(f"{gpus:,} GPUs are too few for {replicas} replicas of whole nodes and models; give {unit:,}")
    used = gpus // unit * unit
    samples = t.micro_batch_size * used // model_ranks
    return used, -(-t.global_batch_size // samples) * samples


def goodput(arguments: argparse.Namespace) -> bool:
    """Print the goodput of the config's own layout on each number of GPUs."""
    results: list[Forecast] = []
    for gpus in arguments.gpus:
        config = with_vocabulary(load_config(arguments.config, arguments.overrides), arguments.config)
        replicas_keys = config.resilience.replicas
        replicas = arguments.replicas or ((8, 6) if replicas_keys is None else (replicas_keys.count, replicas_keys.min))
        used, batch = whole_replicas(config, gpus, arguments.gpus_per_node, replicas[0])
        overrides = [*arguments.overrides, f"training.global_batch_size={batch}", "resilience.replicas=null"]
        config = with_vocabulary(load_config(arguments.config, overrides), arguments.config)
        check_layout(config, used, arguments.config)
        cluster = Cluster(GPUS[arguments.gpu], used, arguments.gpus_per_node)
        outline = model_outline(config, build_fp8(config, None), teacher_of(config))
        step, state = predict(outline, cluster).seconds, state_bytes_of(outline)
        results += forecasts(config, cluster, step, state, replicas, arguments.mtbf_gpu_hours)
    assumed = asdict(Assumptions())
    if arguments.json:
        records = [asdict(x) | {"goodput": x.goodput} for x in results]
        print(json.dumps({"goodput": records, "state_bytes": state, "assumptions": assumed}))
        return True
    print(goodput_text(results, state, hang_detection(config)))
    return True


def goodput_text(found: Sequence[Forecast], state: int, hang: float) -> str:
    """The table of forecasts, what is in it, and its assumptions."""
    assumed, losses = Assumptions(), [part for part in PARTS if part != "training"]
    rows = [
        [
            f"{x.gpus:,}",
            x.recovery,
            f"{x.goodput:.1%}",
            f"{x.expected:.1%}",
            "" if x.configured is None else f"{x.configured:.1%}",
            f"{x.interval:,} ({x.young:,.1f})",
            *(f"{x.outcome.share(part):.2%}" for part in losses),
        ]
        for x in found
    ]
    heading = ["GPUs", "recovery", "goodput", "formula", "config's", "interval (Young)", *losses]
    counts = {x.gpus: x for x in found}.values()
    return "\n".join(
        [
            "goodput: time of steps that count x GPUs in them, over wall time x GPUs of the job, without spares",
            "formula: closed form; config's: the same at its own checkpoint interval; interval: the best one, in steps",
            "",
            text_table(heading, rows, left=2),
            "",
            *(
                f"{x.gpus:,} GPUs: a failure every {x.mtbf / 60:,.0f} min, steps of {x.step:,.3g} s, {x.spares} spares"
                for x in counts
            ),
            f"state {state / 1e12:,.2f} TB. Failures by cause: Llama 3's (arXiv 2407.21783, table 5). Detected after "
            f"{assumed.detection:g} s, {assumed.hangs:.1%} of them after {hang:g} s.",
            f"Restart: {assumed.restart:g} s + {assumed.restart_gpu * 1e3:.1f} s per 1,000 GPUs, of a replica if any. "
            f"Replicas: {assumed.regroup:g} s to go on without one, {assumed.rejoin:g} s when it rejoins.",
            f"Repair of a node: {assumed.repair / 3600:g} h. Storage: {assumed.disk_gpu / 1e9:.2f} GB/s for each GPU; "
            f"memory: {assumed.host_memory / 1e9:g} GB/s a rank. Sources, and what is left out: docs/planning.md",
        ]
    )


def plan(arguments: argparse.Namespace) -> bool:
    """Print the plan; returns whether a layout fits."""
    config = with_vocabulary(load_config(arguments.config, arguments.overrides), arguments.config)
    gpu = GPUS[arguments.gpu]
    if arguments.measure:
        from megafp8.planner.measure import measured, on_cuda

        gpu = measured(gpu, *on_cuda())
    cluster = cluster_of(arguments, config, gpu)
    start, fp8, teacher = time.perf_counter(), build_fp8(config, None), teacher_of(config)
    own_prediction: Prediction | str
    try:
        check_layout(config, cluster.gpus, arguments.config)
        check_frozen(config, cluster.gpus)
        own_prediction = predict(model_outline(config, fp8, teacher), cluster)
    except ConfigError as error:
        own_prediction = str(error)
    result = search(config, fp8, cluster, arguments.top, teacher)
    seconds = time.perf_counter() - start
    t = config.training
    run_tokens = None if config.stages else t.steps * t.global_batch_size * t.seq_length
    flops = flops_per_token(config, frozen_run(config, teacher))
    question = Question(config, cluster, flops, arguments.tokens or run_tokens, arguments.price)
    if not arguments.json:
        print(text(own_prediction, result, arguments, question, seconds))
        return bool(result.best)
    best = [record(c.prediction, question) | {"keys": changed_keys(config, c.config)} for c in result.best]
    start_best = commands(arguments.config, arguments.overrides, best[0]["keys"], cluster) if best else None
    print(json.dumps({
        "config": own_prediction if isinstance(own_prediction, str) else record(own_prediction, question),
        "flops_per_token": question.flops_per_token,
        "command": start_best,
        "limit_bytes": cluster.memory,
        "best": best,
        "losers": dict(result.losers),
        "layouts": result.layouts,
        "seconds": seconds,
        "rates": asdict(replace(gpu)),
    }))  # fmt: skip
    return bool(result.best)


def main(argv: list[str] | None = None) -> int:
    """Exit code 0; 1 if no layout fits; 2 for wrong arguments or a wrong config."""
    arguments = parse(argv)
    fits: list[bool] = []
    code = run_tool(lambda: fits.append((goodput if arguments.goodput else plan)(arguments)))
    return code or int(not fits[0])


if __name__ == "__main__":
    sys.exit(main())
