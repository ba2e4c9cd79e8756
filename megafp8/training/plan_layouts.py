"""Text and JSON of a plan: the fastest layouts of a config on a cluster, and the goodput on many GPUs."""

from __future__ import annotations

import argparse
import json
import math
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import yaml

from megafp8.config import Config, ConfigError, check_layout, fewest_ranks, load_config, planned_stages
from megafp8.config.frozen import frozen_run
from megafp8.host.cluster import Cluster
from megafp8.host.gpus import GPUS, Gpu
from megafp8.host.tool import text_table
from megafp8.planner.budget import Budget, budget, mfu, tokens_per_day
from megafp8.planner.flops import flops_per_token
from megafp8.planner.goodput import PARTS, Assumptions, Forecast, forecasts, hang_detection, state_bytes_of
from megafp8.planner.memory import memory_table, size_text
from megafp8.planner.outline import model_outline
from megafp8.planner.predict import Prediction, predict
from megafp8.planner.search import Candidate, Found, changed_keys, search
from megafp8.training.fp8_config import build_fp8
from megafp8.training.frozen_config import check_frozen, teacher_of
from megafp8.training.inputs import with_vocabulary


def cluster_of(arguments: argparse.Namespace, config: Config, gpu: Gpu) -> Cluster:
    """Return the cluster to plan for. By default it has the fewest GPUs that the config and its stages run on.

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
        raise ValueError(f"--gpus: {gpus} do not fill nodes of --gpus-per-node {gpus_per_node}; give --gpus {whole}")
    return Cluster(gpu, gpus, gpus_per_node)


@dataclass(frozen=True)
class Question:
    """Question that a plan answers.

    Attributes:
        config: Config before any change.
        cluster: Cluster to plan for.
        flops_per_token: Model FLOPs per token.
        tokens: Number of tokens to budget for, or None.
        price: Price of a GPU-hour, or None.
    """

    config: Config
    cluster: Cluster
    flops_per_token: float
    tokens: int | None
    price: float | None

    def mfu(self, prediction: Prediction) -> float | None:
        """Return the model FLOPs utilization of a prediction, or None if the peak of the GPU is unknown."""
        fp8 = self.config.fp8.recipe != "none"
        return mfu(prediction, self.flops_per_token, self.cluster.gpu, self.config.training.precision, fp8=fp8)

    def budget(self, prediction: Prediction) -> Budget | None:
        """Return the time and the cost of training on `tokens`, or None without `tokens`."""
        return None if self.tokens is None else budget(prediction, self.tokens, self.price)


def record(prediction: Prediction, question: Question) -> dict[str, Any]:
    """Return a prediction as a record for --json."""
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
    """Return a line with the step time, rate, MFU and peak memory of a prediction."""
    rate, share, peak = prediction.tokens_per_second, question.mfu(prediction), size_text(prediction.peak)
    utilization = "" if share is None else f"  {share:>5.1%} MFU"
    return f"{prediction.seconds * 1e3:>10,.0f} ms  {rate:>9,.0f} tokens/s/GPU{utilization}  {peak:>11}"


def budget_lines(prediction: Prediction, question: Question) -> list[str]:
    """Return lines with the tokens per day, and with the time and cost of the question's tokens."""
    lines = [f"{tokens_per_day(prediction) / 1e9:,.3f} billion tokens a day"]
    costs = question.budget(prediction)
    if costs is not None:
        cost = "" if costs.cost is None else f", {costs.cost:,.0f} at {question.price:g} per GPU-hour"
        lines.append(f"{costs.tokens:,} tokens: {costs.days:,.2f} days, {costs.gpu_hours:,.0f} GPU-hours{cost}")
    return lines


def commands(config: str, overrides: Sequence[str], keys: Mapping[str, Mapping[str, Any]], cluster: Cluster) -> str:
    """Return the commands that start the run with changed keys.

    Args:
        config: Path or name of the config.
        overrides: Overrides of the user. Overrides of changed keys are replaced.
        keys: Values of the changed keys by section.
        cluster: Cluster to start the run on.
    """
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
    """Return a table of the terms of a predicted step time, largest first."""
    rows = sorted(prediction.terms.items(), key=lambda term: -term[1])
    return "\n".join(
        f"{seconds * 1e3:>10,.1f} ms  {seconds / prediction.seconds:>6.1%}  {term}" for term, seconds in rows
    )


def described(candidate: Candidate) -> str:
    """Return a description of a layout in one line."""
    x = candidate.layout
    sharding = "FSDP" if x.fsdp else "ZeRO 1" if candidate.config.parallel.zero else "no ZeRO"
    sharding += f" × {x.fsdp_replicas}" if x.fsdp_replicas > 1 else ""
    schedule = f"{x.schedule}{f' v{x.virtual_pipeline}' if x.virtual_pipeline > 1 else ''}, " if x.pipeline > 1 else ""
    return f"{x.group}, {schedule}{sharding}, micro-batch {x.micro_batch_size}, recompute {x.recompute}"


def text(own: Prediction | str, found: Found, arguments: argparse.Namespace, question: Question, seconds: float) -> str:
    """Return the text of a plan.

    Args:
        own: Prediction for the config's own layout, or the reason why it cannot run.
        found: Result of the search.
        arguments: Command line.
        question: Question that the plan answers.
        seconds: Duration of the search.
    """
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
    """Return the number of usable GPUs out of `gpus`, and the config's global batch rounded up for them.

    Usable GPUs form `replicas` equal replicas of whole nodes. Raises ValueError if there are too few GPUs.
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
    """Print the goodput of the config's own layout for each number of GPUs, and return True."""
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
    """Return a table of forecasts with explanations and assumptions.

    Args:
        found: Forecasts.
        state: Bytes of the training state.
        hang: Seconds until a hang is detected.
    """
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
    """Print the plan and return whether a layout fits."""
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
