"""Compare predictions of megafp8.planner with published speeds on H100, as a Markdown table. Needs no GPU.

    python -m benchmarks.planner_published
    python -m benchmarks.planner_published --runs Llama-3-8B --explain --search

Reads docs/measurements/2026-11-26-published/published.yaml. The published runs used other implementations, so an error
combines the difference between implementations and the planner's error. The README there separates them as far as
possible.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml

from benchmarks.common import new_parser
from megafp8.config import Config, check_layout, load_config
from megafp8.host.cluster import Cluster
from megafp8.host.gpus import GPUS
from megafp8.planner.outline import model_outline
from megafp8.planner.predict import Prediction, predict
from megafp8.planner.search import search
from megafp8.training.fp8_config import build_fp8

ROOT = Path(__file__).resolve().parent.parent
PUBLISHED = ROOT / "docs/measurements/2026-11-26-published/published.yaml"
GPU = GPUS["h100-80gb"]


@dataclass(frozen=True)
class PublishedRun:
    """Published speed in tokens/s per GPU, and the config that is closest to the published run.

    `stages` are the blocks of each pipeline stage; `2 * 30` means 30 stages of 2. Without it, stages are as even as
    possible.
    """

    model: str
    gpus: int
    precision: str
    source: str
    tokens_per_second: float
    config: str
    overrides: tuple[str, ...]
    stages: tuple[int | str, ...] = ()

    def resolved(self) -> Config:
        """Return the config; raise ConfigError if it cannot run."""
        stages = "null" if not self.stages else str([count for part in self.stages for count in _repeated(part)])
        keys = [*self.overrides, f"parallel.layers_per_stage={stages}"]
        config = load_config(str(ROOT / self.config), keys)
        check_layout(config, self.gpus)
        return config

    def error(self, prediction: Prediction) -> float:
        """Return the error of the predicted speed, relative to the published speed."""
        return prediction.tokens_per_second / self.tokens_per_second - 1


def _repeated(part: int | str) -> list[int]:
    layers, _, times = str(part).partition("*")
    return [int(layers)] * int(times or 1)


def published() -> Iterator[PublishedRun]:
    """Yield all runs of the file, in its order."""
    groups = yaml.safe_load(PUBLISHED.read_text(encoding="utf-8"))
    for group in groups["runs"]:
        names = group.pop("sets", [])
        shared = [key for name in names for key in groups["sets"][name]]
        overrides, stages = (*shared, *group.pop("set")), tuple(group.pop("stages", ()))
        yield PublishedRun(overrides=overrides, stages=stages, **group)


def predicted(run: PublishedRun) -> Prediction:
    """Return the prediction for the published layout."""
    config = run.resolved()
    return predict(model_outline(config, build_fp8(config, None)), Cluster(GPU, run.gpus))


def fastest(run: PublishedRun) -> tuple[Config, Prediction]:
    """Return the fastest layout for the same model, recipe, global batch and GPUs; raise ValueError if none fits."""
    config = run.resolved()
    best = search(config, build_fp8(config, None), Cluster(GPU, run.gpus), keep=1).best
    if not best:
        raise ValueError(f"{run.model}: no layout fits {run.gpus} GPUs")
    return best[0].config, best[0].prediction


def layout(config: Config) -> str:
    """Describe a config's layout in the words of the published tables."""
    p, t = config.parallel, config.training
    sizes = {"TP": p.tensor, "PP": p.pipeline, "VP": p.virtual_pipeline, "CP": p.context, "EP": p.expert}
    sizes["ETP"] = p.expert_tensor
    parts = [f"{name}{size}" for name, size in sizes.items() if size > 1]
    parts += [p.schedule] if p.pipeline > 1 and p.schedule not in ("1f1b", "interleaved") else []
    parts += [f"FSDP×{p.fsdp_replicas}" if p.fsdp_replicas > 1 else "FSDP"] if p.fsdp else []
    parts += [f"recompute {p.recompute}"] if p.recompute != "none" else []
    return f"{' '.join(parts) or 'DP'}, MBS {t.micro_batch_size}, GBS {t.global_batch_size:,}, s {t.seq_length:,}"


def _speed(prediction: Prediction) -> str:
    return f"{prediction.tokens_per_second:,.0f}"


def _memory(prediction: Prediction) -> str:
    return f"{prediction.peak / 2**30:.1f}"


def _row(cells: list[object]) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"


def main() -> int:
    """Print the table, and return the exit code."""
    parser = new_parser(__doc__)
    parser.add_argument("--runs", default="", help="regular expression that model and source must match")
    parser.add_argument("--search", action="store_true", help="also find the fastest layout on the same GPUs")
    parser.add_argument("--explain", action="store_true", help="also print the terms of each prediction")
    arguments = parser.parse_args()
    head = ["model", "GPUs", "layout", "precision", "source", "tokens/s/GPU", "predicted", "error", "GiB"]
    head += ["fastest layout", "predicted", "GiB"] if arguments.search else []
    print(_row([*head]))
    print(_row(["---"] * len(head)))
    terms = []
    for run in published():
        if not re.search(arguments.runs, f"{run.model}, {run.source}"):
            continue
        prediction = predicted(run)
        cells: list[object] = [run.model, run.gpus, layout(run.resolved()), run.precision, run.source]
        cells += [f"{run.tokens_per_second:,}", _speed(prediction), f"{run.error(prediction):+.1%}"]
        cells.append(_memory(prediction))
        if arguments.search:
            config, best = fastest(run)
            cells += [layout(config), _speed(best), _memory(best)]
        print(_row(cells), flush=True)
        shares = sorted(prediction.terms.items(), key=lambda term: -term[1])
        line = ", ".join(f"{name} {value / prediction.seconds:.1%}" for name, value in shares)
        terms.append(f"{run.model}, {run.source}: {prediction.seconds:.2f} s: {line}")
    if arguments.explain:
        print("\n" + "\n".join(terms))
    return 0


if __name__ == "__main__":
    sys.exit(main())
