"""Train whole published models for a few steps on real text, and write a row of the table in docs/performance.md.

    torchrun --nproc-per-node 2 -m benchmarks.records gpt-oss-20b fp8 --rows docs/cards
    torchrun --nproc-per-node 2 -m benchmarks.records gpt-oss-20b fp8 --rows docs/cards --even-load
    torchrun --nproc-per-node 4 -m benchmarks.records qwen3-30b-a3b bf16 --rows docs/cards --set parallel.expert=4
    python -m benchmarks.records --table docs/cards

A row is a model with its full vocabulary, from a config in configs/, on the GPUs that torchrun starts. `RECORDS` holds
the batch and the sequence length of the published runs, their figures with links, and the options with which the model
fits on two H200. Samples are whole: attention crosses documents, as in the published runs. Gradients are clipped.

Routers start from random weights. They choose the experts as in training, so ranks wait for the rank with most rows.
Published runs of models with experts force an even load instead (`moe_router_force_load_balancing` in Megatron Bridge's
performance recipes, `fake_balanced_gate` in NeMo AutoModel's benchmarks). With `--even-load` tokens choose the experts
in turn, which is the load to compare with theirs. Scores still weigh the chosen experts.

The text is the source code of the Python standard library, 3.4 million tokens of a vocabulary with 16,384 entries, and
is read again after its end. Two steps with four micro-batches compile the kernels, one step records the CUDA graphs,
and `--steps` steps are measured by the host's clock. Graphs of experts without room for all rows of a step are recorded
again, and this time counts. The first rank writes `<model>-<precision>-<gpus>.json`, which ends in `-even.json` with an
even load. `spread` is the standard deviation of the steps, as a fraction of their mean. The command fails if the loss
of the last step is not below the loss of the first.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.common import machine, write_json
from megafp8 import __version__
from megafp8.batch import Batch
from megafp8.config import Config, MoeFfnConfig, check_layout, load_config
from megafp8.host.arguments import at_least
from megafp8.host.cluster import Cluster
from megafp8.host.gpus import GPUS, H200, peak_flops
from megafp8.layers.experts import router
from megafp8.parallel.collectives import all_gather_objects
from megafp8.parallel.parallel_state import ParallelState, destroy_model_parallel, initialize_distributed
from megafp8.planner.flops import flops_per_token
from megafp8.planner.outline import model_outline
from megafp8.planner.predict import predict
from megafp8.prove.certificate import hash_of
from megafp8.training.fp8_config import build_fp8, check_recipe
from megafp8.training.inputs import open_inputs
from megafp8.training.metrics import memory_gib
from megafp8.training.parallel import build_parallel
from megafp8.training.process import garbage_collected_after_steps
from megafp8.training.run_log import source_commit
from megafp8.training.trainer import RankTrainer
from megafp8.training.validate import choose_device
from tools.quickstart import run, write_file_list

ROOT = Path(__file__).resolve().parent.parent
EAGER_STEPS, EAGER_MICRO_BATCHES = 2, 4
PRECISIONS = ("bf16", "fp8")
BRIDGE = "https://docs.nvidia.com/nemo/megatron-bridge/latest/performance-summary-archive.html"
AUTOMODEL = "https://docs.nvidia.com/nemo/automodel/performance/performance-summary.md"
SIXTEEN_BIT_STATE = ("optimizer.moments_dtype=fp8", "optimizer.store_param_remainders=true")


@dataclass(frozen=True)
class Published:
    """Published speed of a whole model, in tokens per second on each GPU."""

    tokens_per_second: int
    gpus: str
    precision: str
    seq_length: int
    source: str


@dataclass(frozen=True)
class Record:
    """Row of the table: a shipped config, trained as published runs of the model were.

    Attributes:
        seq_length: Tokens in a sequence.
        sequences: Sequences on each GPU in a step.
        published: Published speeds of the model.
        overrides: Config overrides for any precision.
        bf16: Overrides for bf16, in addition to `overrides`.
        fp8: Overrides for FP8, in addition to `overrides`.
    """

    seq_length: int
    sequences: int
    published: Sequence[Published]
    overrides: Sequence[str]
    bf16: Sequence[str] = ()
    fp8: Sequence[str] = ()

    def overrides_of(self, precision: str) -> list[str]:
        """Return the config overrides for a precision."""
        return [*self.overrides, *(self.bf16 if precision == "bf16" else self.fp8)]

    def config(self, name: str, precision: str, gpus: int, overrides: Sequence[str] = ()) -> Config:
        """Return the config of the row of a model on `gpus` GPUs; raise ValueError if it cannot run."""
        path = str(ROOT / "configs" / f"{name}.yaml")
        config = load_config(path, [
            f"training.seq_length={self.seq_length}", f"training.global_batch_size={self.sequences * gpus}",
            "training.eval_interval=0", "data.reset_at_documents=false",
            *self.overrides_of(precision), *(["fp8.recipe=none"] if precision == "bf16" else []), *overrides,
        ])  # fmt: skip
        check_layout(config, gpus, path)
        check_recipe(config, path)
        return config


RECORDS = {
    "llama3-8b": Record(
        8192,
        16,
        [Published(14_451, "8 H100", "fp8", 8192, BRIDGE)],
        ["parallel.tensor=1", "parallel.sequence_parallel=false", "parallel.pipeline=1", "parallel.zero=1",
         "parallel.layers_per_stage=null", "optimizer.store_param_remainders=true"],
    ),
    "gpt-oss-20b": Record(
        4096,
        32,
        [Published(13_058, "8 H100", "bf16", 4096, AUTOMODEL)],
        ["parallel.expert=2", "fp8.paired_wgrad=false", *SIXTEEN_BIT_STATE],
        fp8=["optimizer.offload=0.35"],
    ),
    "nemotron-3-nano-30b": Record(
        4096,
        64,
        [
            Published(16_789, "8 H100", "bf16", 4096, AUTOMODEL),
            Published(14_719, "16 H100", "fp8", 8192, BRIDGE),
        ],
        ["parallel.expert=2", *SIXTEEN_BIT_STATE],
        bf16=["optimizer.offload=1.0"],
        fp8=["optimizer.offload=1.0", "parallel.recompute=full", "training.micro_batch_size=4"],
    ),
    "qwen3-30b-a3b": Record(
        4096,
        64,
        [
            Published(13_010, "16 H100", "bf16", 4096, BRIDGE),
            Published(12_040, "8 H100", "bf16", 4096, AUTOMODEL),
            Published(8_826, "16 H100", "fp8", 4096, BRIDGE),
        ],
        ["parallel.pipeline=1", "parallel.expert=2", "fp8.paired_wgrad=false", *SIXTEEN_BIT_STATE],
        bf16=["optimizer.offload=1.0"],
        fp8=["optimizer.offload=1.0", "parallel.recompute=full", "training.micro_batch_size=4"],
    ),
}  # fmt: skip


def prepare_text(folder: Path) -> list[str]:
    """Tokenize the standard library's source into `folder`, unless it is there; return overrides that select it."""
    folder.mkdir(parents=True, exist_ok=True)
    model, prefix = folder / "tokenizer.model", folder / "stdlib"
    if dist.get_rank() == 0 and not prefix.with_suffix(".idx").exists():
        files = write_file_list(folder)
        run("train-tokenizer", "--text-files", "--input-list", files, "--output", model, "--vocab-size", "16384")
        run("preprocess", "--text-files", "--input-list", files, "--tokenizer", "sentencepiece", "--tokenizer-path",
            model, "--output-prefix", prefix, "--workers", "2")  # fmt: skip
    dist.barrier()
    return [f"data.train=[{prefix}]", f"data.tokenizer={{kind: sentencepiece, path: {model}}}", "data.split='100,0,0'"]


def micro_batches(config: Config, parallel: ParallelState) -> Iterator[list[Batch]]:
    """Yield this rank's micro-batches of each step."""
    inputs = open_inputs(config, "the record")
    return inputs.batches(inputs.train, parallel)


def in_turn(scores_ne: Tensor, moe: MoeFfnConfig, bias_e: Tensor | None) -> Tensor:
    """Return experts of each token `[n, k]`, whatever its scores, such that all experts have as many tokens."""
    tokens_n1 = torch.arange(len(scores_ne), device=scores_ne.device).unsqueeze(1)
    choices_k = torch.arange(moe.top_k, device=scores_ne.device) * (moe.router_outputs // moe.top_k)
    return (tokens_n1 + choices_k) % moe.router_outputs


@contextmanager
def even_load() -> Iterator[None]:
    """Let tokens choose the experts in turn inside the context."""
    choose, router.choose = router.choose, in_turn
    try:
        yield
    finally:
        router.choose = choose


def timed_steps(
    trainer: RankTrainer, batches: Iterator[list[Batch]], steps: int
) -> tuple[list[float], list[float], list[float]]:
    """Run eager steps, the step that records the graphs, and `steps` more.

    Returns the seconds of the last `steps` steps, the losses of all steps, and the largest load of an expert relative
    to the mean, at the first and last step.
    """
    seconds, losses, imbalances = [], [], []
    for step in range(EAGER_STEPS + 1 + steps):
        start = time.perf_counter()
        microbatches = next(batches)
        if step < EAGER_STEPS:
            microbatches = microbatches[:EAGER_MICRO_BATCHES]
        loss, result = trainer.train_step(step, microbatches)
        if step > EAGER_STEPS:
            seconds.append(time.perf_counter() - start)
        losses.append(loss.mean)
        assert not result.skipped, f"step {step} was skipped"
        if trainer.expert_load is not None:
            imbalances.append(trainer.expert_load.imbalance)
        if dist.get_rank() == 0:
            print(f"step {step}: loss {loss.mean:.4f}, {time.perf_counter() - start:.3f} s", flush=True)
    return seconds, losses, imbalances


def row_of(
    name: str,
    precision: str,
    config: Config,
    parallel: ParallelState,
    steps: int,
    overrides: Sequence[str] = (),
    *,
    even: bool = False,
) -> dict[str, Any]:
    """Train, and return the row. Collective.

    `overrides` are the overrides of the command line. `even` says whether all experts get as many tokens.
    """
    gpus, t, p = parallel.world_size, config.training, config.parallel
    trainer = RankTrainer(config, parallel)
    with garbage_collected_after_steps(t.gc_interval), even_load() if even else nullcontext():
        seconds, losses, imbalances = timed_steps(trainer, micro_batches(config, parallel), steps)
    memory = max(all_gather_objects(memory_gib(parallel.device), parallel.world.group))
    trainer.close()
    rate = t.global_batch_size * t.seq_length / statistics.fmean(seconds) / gpus
    flops = rate * flops_per_token(config)
    peak = peak_flops(parallel.device, t.precision, fp8=precision == "fp8")
    gpu = next((gpu for gpu in GPUS.values() if gpu.chip in machine(parallel.device)), H200)
    outline = model_outline(config, build_fp8(config, None)).with_expert_room(trainer.expert_room)
    prediction = predict(outline, Cluster(gpu, gpus))
    words = [name, precision, *(["--even-load"] if even else []), *(["--set", *overrides] if overrides else [])]
    sizes = {"tensor": p.tensor, "pipeline": p.pipeline, "context": p.context, "expert": p.expert}
    layout = " ".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1) or f"data={gpus}"
    return {
        "model": name,
        "config": f"configs/{name}.yaml",
        "config_hash": hash_of(ROOT / "configs" / f"{name}.yaml"),
        "precision": precision,
        "recipe": config.fp8.recipe,
        "date": date.today().isoformat(),
        "command": f"torchrun --nproc-per-node {gpus} -m benchmarks.records {shlex.join(words)}",
        "commit": os.environ.get("MEGAFP8_COMMIT") or source_commit(),
        "gpu": machine(parallel.device),
        "gpus": gpus,
        "layout": f"{layout}, even load" if even else layout,
        "overrides": [*RECORDS[name].overrides_of(precision), *overrides],
        "sequence_length": t.seq_length,
        "sequences_per_gpu": t.global_batch_size // gpus,
        "step_ms": statistics.fmean(seconds) * 1e3,
        "tokens_per_second_per_gpu": rate,
        "spread": statistics.stdev(seconds) / statistics.fmean(seconds),
        "model_tflops": flops / 1e12,
        "mfu": flops / peak if peak else None,
        "gib": memory,
        "predicted_ms": prediction.seconds * 1e3,
        "predicted_gib": prediction.peak / 2**30,
        "first_loss": losses[0],
        "last_loss": losses[-1],
        "losses": losses,
        "step_seconds": seconds,
        "imbalance": [imbalances[0], imbalances[-1]] if imbalances else None,
        "versions": {"megafp8": __version__, "torch": torch.__version__, "python": sys.version.split()[0]},
    }


def table(folder: Path) -> str:
    """Return the rows in a folder as a Markdown table.

    Beside a row are the speeds that were published for its precision, or else for bf16.
    """
    lines = [
        "| model | precision | GPUs | sequences per GPU and step | tokens/s/GPU | TFLOP/s | spread | GiB (predicted) | "
        "time predicted | published |",
        "|:--|:--|:--|:--|--:|--:|--:|--:|--:|:--|",
    ]
    contents = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))]
    for row in (x for x in contents if "sequences_per_gpu" in x):  # not a certificate
        runs = RECORDS[row["model"]].published
        of_precision, in_bf16 = ([x for x in runs if x.precision == wanted] for wanted in (row["precision"], "bf16"))
        published = "; ".join(
            f"[{x.tokens_per_second:,}]({x.source}) ({x.gpus}, {x.precision}, {x.seq_length:,})"
            for x in of_precision or in_bf16
        )
        error = row["predicted_ms"] / row["step_ms"] - 1
        name = row["model"] + ", even load" * ("even load" in row["layout"])
        lines.append(
            f"| {name} | {row['precision']} | {row['gpus']} {row['gpu'].removeprefix('NVIDIA ')} | "
            f"{row['sequences_per_gpu']} × {row['sequence_length']:,} | **{row['tokens_per_second_per_gpu']:,.0f}** | "
            f"{row['model_tflops']:.0f} | {row['spread']:.1%} | {row['gib']:.1f} ({row['predicted_gib']:.1f}) | "
            f"{error:+.1%} | {published} |"
        )
    return "\n".join(lines)


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=RECORDS, nargs="?")
    parser.add_argument("precision", choices=PRECISIONS, nargs="?", default="fp8")
    parser.add_argument("--rows", type=Path, default=Path("rows"), help="folder for the row (%(default)s)")
    parser.add_argument("--data", type=Path, default=Path("data/records"), help="folder for the text (%(default)s)")
    parser.add_argument("--steps", type=at_least(2), default=10, help="number of measured steps (%(default)s)")
    parser.add_argument("--even-load", action="store_true", help="give all experts as many tokens")
    parser.add_argument("--set", dest="overrides", nargs="+", default=[], metavar="key=value", help="config overrides")
    parser.add_argument("--table", type=Path, metavar="FOLDER", help="print the rows in this folder as a table")
    arguments = parser.parse_args(argv)
    if (arguments.model is None) == (arguments.table is None):
        parser.error("give a model, or --table with a folder of rows")
    return arguments


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark and return the exit code."""
    arguments = parse_arguments(argv)
    if arguments.table is not None:
        print(table(arguments.table))
        return 0
    name, precision, gpus = arguments.model, arguments.precision, int(os.environ.get("WORLD_SIZE", "1"))
    overrides = arguments.overrides
    try:
        config = RECORDS[name].config(name, precision, gpus, overrides)
        if arguments.even_load and not config.spec.has_experts:
            raise ValueError(f"--even-load: {name} has no experts; leave it out")
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    device = initialize_distributed(choose_device(config), config.timeout_seconds)
    config = RECORDS[name].config(name, precision, gpus, [*overrides, *prepare_text(arguments.data)])
    parallel, even = build_parallel(config, device), arguments.even_load
    row = row_of(name, precision, config, parallel, arguments.steps, overrides, even=even)
    if dist.get_rank() == 0:
        arguments.rows.mkdir(parents=True, exist_ok=True)
        write_json(arguments.rows / f"{name}-{precision}-{gpus}{'-even' * even}.json", row)
        print({key: value for key, value in row.items() if key not in ("losses", "step_seconds")}, flush=True)
    destroy_model_parallel()
    return 0 if row["last_loss"] < row["first_loss"] else 1


if __name__ == "__main__":
    sys.exit(main())
