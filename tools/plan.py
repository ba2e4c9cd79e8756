"""Predict memory and step time of a config on a cluster, and search for a faster layout.

    megafp8 plan --config configs/llama3-70b.yaml --gpus 64 --gpu h100-80gb
    megafp8 plan --config configs/llama3-70b.yaml --gpus 16384 --explain training.global_batch_size=16384

Needs neither GPUs nor data; seconds on a laptop. Prints the config's own layout, the fastest layouts that fit, the best
of them as YAML to paste (the keys that differ), and why the others lose. How the model works, and its errors for every
recorded run: docs/planning.md.

`--measure`, on a machine with the GPU, replaces the rates of GEMMs and copies by measured ones. A prediction takes the
load of experts as even and ignores document boundaries; CUDA's context, NCCL's buffers and fragmentation are the
4 GiB that the limit leaves free.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # started as a file
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import yaml

from megafp8.arguments import ArgumentParser
from megafp8.commands.common import add_config_flags, parse_with_config, run_tool
from megafp8.config import Config, ConfigError, check_layout, load_config
from megafp8.gpus import GPUS
from megafp8.planner.hardware import Cluster
from megafp8.planner.memory import memory_table
from megafp8.planner.outline import model_outline
from megafp8.planner.predict import Prediction, predict
from megafp8.planner.search import Candidate, Found, changed_keys, search
from megafp8.training.fp8_config import build_fp8
from megafp8.training.inputs import with_vocabulary


def _gpu(name: str) -> str:
    """The type of --gpu: the name in `GPUS`."""
    known = next((known for known in GPUS if name.lower() in (known, GPUS[known].chip.lower())), None)
    if known is None:
        raise argparse.ArgumentTypeError(f"{name!r} is not known; there are {', '.join(GPUS)}")
    return known


def make_parser() -> ArgumentParser:
    parser = ArgumentParser(description=__doc__)
    add_config_flags(parser)
    parser.add_argument("--gpus", type=int, required=True, help="number of GPUs in all")
    names = ", ".join(GPUS)
    parser.add_argument(
        "--gpu", type=_gpu, default="h100-80gb", help=f"{names}, or the chip's name; default: %(default)s"
    )
    nodes = parser.add_mutually_exclusive_group()
    nodes.add_argument("--gpus-per-node", type=int, default=8, help="GPUs of each node, which NVLink connects")
    nodes.add_argument("--nodes", type=int, help="instead of --gpus-per-node")
    parser.add_argument("--top", type=int, default=5, help="layouts to print")
    parser.add_argument("--explain", action="store_true", help="print every term of the best prediction")
    parser.add_argument("--measure", action="store_true", help="measure the rates of the GPU in this machine first")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    return parser


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = make_parser()
    found = parse_with_config(parser, argv)
    if found.gpus < 1 or found.gpus_per_node < 1 or found.top < 1 or (found.nodes or 1) < 1:
        parser.error("--gpus, --gpus-per-node, --nodes and --top are at least 1")
    if found.nodes is not None:
        if found.gpus % found.nodes:
            parser.error(f"--nodes: {found.gpus} GPUs do not divide into {found.nodes} nodes")
        found.gpus_per_node = found.gpus // found.nodes
    return found


def record(prediction: Prediction) -> dict[str, Any]:
    """A prediction for --json."""
    return {
        "step_seconds": prediction.seconds,
        "tokens_per_second_per_gpu": prediction.tokens_per_second,
        "peak_bytes": prediction.peak,
        "terms_seconds": prediction.terms,
        "memory_bytes": [asdict(memory) | {"total": memory.total} for memory in prediction.memory],
    }


def line(prediction: Prediction) -> str:
    rate, peak = prediction.tokens_per_second, prediction.peak / 2**30
    return f"{prediction.seconds * 1e3:>10,.0f} ms  {rate:>9,.0f} tokens/s/GPU  {peak:>7.1f} GiB"


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


def text(
    own: Prediction | str, found: Found, arguments: argparse.Namespace, before: Config, limit: int, seconds: float
) -> str:
    lines = ["the config's own layout:", own if isinstance(own, str) else line(own), ""]
    if not found.best:
        return "\n".join([*lines, f"no layout of {found.layouts:,} fits {limit / 2**30:.1f} GiB"])
    lines += [f"the fastest of {found.layouts:,} layouts that fit {limit / 2**30:.1f} GiB:"]
    lines += [f"{line(candidate.prediction)}  {described(candidate)}" for candidate in found.best]
    best = found.best[0]
    changes = changed_keys(before, best.config)
    lines += ["", "the best as YAML:" if changes else "the config has the best layout already"]
    lines += [yaml.safe_dump(changes, sort_keys=False).rstrip()] if changes else []
    lines += ["", "why others lose:", *(f"  {name}: {why}" for name, why in found.losers)]
    if arguments.explain:
        lines += ["", "terms of the best, means over the pipeline ranks:", terms_table(best.prediction)]
        lines += ["", memory_table(best.prediction.memory)]
    lines += ["", f"{found.predicted:,} predicted whole, {seconds:.1f} s"]
    return "\n".join(lines)


def plan(arguments: argparse.Namespace) -> bool:
    """Print the plan; returns whether a layout fits."""
    config = with_vocabulary(load_config(arguments.config, arguments.overrides), arguments.config)
    gpu = GPUS[arguments.gpu]
    if arguments.measure:
        from megafp8.planner.measure import measured, on_cuda

        gpu = measured(gpu, *on_cuda())
    cluster = Cluster(gpu, arguments.gpus, arguments.gpus_per_node)
    start, fp8 = time.perf_counter(), build_fp8(config, None)
    own: Prediction | str
    try:
        check_layout(config, cluster.gpus, arguments.config)
        own = predict(model_outline(config, fp8), cluster)
    except ConfigError as error:
        own = str(error)
    found = search(config, fp8, cluster, arguments.top)
    seconds = time.perf_counter() - start
    if not arguments.json:
        print(text(own, found, arguments, config, cluster.memory, seconds))
        return bool(found.best)
    best = [record(c.prediction) | {"keys": changed_keys(config, c.config)} for c in found.best]
    print(json.dumps({
        "config": own if isinstance(own, str) else record(own),
        "limit_bytes": cluster.memory,
        "best": best,
        "losers": dict(found.losers),
        "layouts": found.layouts,
        "seconds": seconds,
        "rates": asdict(replace(gpu)),
    }))  # fmt: skip
    return bool(found.best)


def main(argv: list[str] | None = None) -> int:
    """Exit code 0; 1 if no layout fits; 2 for wrong arguments or a wrong config."""
    arguments = parse(argv)
    fits: list[bool] = []
    code = run_tool(lambda: fits.append(plan(arguments)))
    return code or int(not fits[0])


if __name__ == "__main__":
    sys.exit(main())
