"""Compare training steps with two values of a config key bit for bit, in many layouts, on the available GPUs.

    torchrun --nproc-per-node 2 -m benchmarks.graph_gate
    torchrun --nproc-per-node 2 -m benchmarks.graph_gate --layouts "tensor=2" "pipeline=2 schedule=zb-v" --variants bf16
    torchrun --nproc-per-node 2 -m benchmarks.graph_gate --compare fp8.param_gather=false fp8.param_gather=true \
        --layouts "fsdp=true model.moe.num_experts=33" --variants delayed,current

Each case trains a small Llama twice from the same weights, without and with CUDA graphs (or with each override of
`--compare`). It compares the losses and gradient norms of all steps, the validation loss in between, the records of a
sampled step, and the final weights that have values in both runs. Layouts and variants are the same as in
`benchmarks.bench_step`; a layout may also contain keys of other sections. Attention is deterministic. "first" and
"second" are the shortest steps of the two runs, in milliseconds.

Gradients are not clipped if a key other than CUDA graphs is compared. A norm is a sum over shards, and the boundaries
of shards may differ, so norms may differ by rounding. Such a difference is reported, but it is not a failure.

The exit code is 1 if a case differs.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from benchmarks.bench_step import Groups, layout_overrides, random_batches, variant_overrides
from benchmarks.common import Table, machine, new_parser, release, write_json
from megafp8.config import Config, check_layout, load_config
from megafp8.parallel.collectives import all_gather_objects
from megafp8.parallel.parallel_state import ParallelState, destroy_model_parallel, initialize_distributed
from megafp8.training.determinism import make_deterministic
from megafp8.training.fp8_config import check_recipe
from megafp8.training.trainer import RankTrainer

STEPS, EVALUATED_AFTER = 9, 6
SMALL = [
    *("model.num_layers=4", "model.hidden_size=256", "model.num_attention_heads=4", "model.num_query_groups=2"),
    *("model.ffn_hidden_size=512", "model.vocab_size=1024", "training.seq_length=256", "training.global_batch_size=8"),
    *("optimizer.warmup_steps=0", "deterministic=true", "fp8.gemm_autotune=false", "parallel.bucket_mib=1"),
    *("parallel.tensor=1", "parallel.pipeline=1", "parallel.layers_per_stage=null"),
]
EXPERTS = "model.moe.num_experts=8 model.moe.top_k=2 model.moe.aux_loss=0.01"
ONE_GPU = [
    "",
    "recompute=full",
    "model.tie_embeddings=true",
    "fp8.report_interval=3",
    "zero=1",
    EXPERTS,
    "model.mtp_num_layers=2",
]
TWO_GPUS = [
    *("tensor=2", "tensor=2 sequence_parallel=false", "tensor=2 overlap_tensor=none"),
    *("tensor=2 recompute=full", "tensor=2 fp8.report_interval=3"),
    *("zero=0", "zero=1", "zero=1 overlap_param_gather=false overlap_grad_reduce=false"),
    *("zero=1 fp8.param_gather=true", "zero=1 optimizer.reduce_dtype=bf16"),
    *("fsdp=true", "fsdp=true recompute=full", "fsdp=true fp8.param_gather=true", "fsdp=true fsdp_replicas=2"),
    *("context=2", "pipeline=2 model.tie_embeddings=true", "pipeline=2 schedule=zb-h1"),
    *(f"pipeline=2 schedule=zb-h1 {EXPERTS}", f"zero=1 {EXPERTS}"),
    *(f"zero=1 expert=2 expert_dispatch={dispatch} {EXPERTS}" for dispatch in ("all_gather", "all_to_all")),
    "pipeline=2 schedule=interleaved virtual_pipeline=2",
    *(f"pipeline=2 virtual_pipeline=2 schedule={name}" for name in ("zb-v", "dualpipev", "zb-v recompute=full")),
]


GRAPHS = ["training.cuda_graphs=false", "training.cuda_graphs=auto"]


@dataclass
class Run:
    """Results of this rank to compare. `weights` are hashes of the weights that have values, by number."""

    losses: list[object] = field(default_factory=list)
    norms: list[object] = field(default_factory=list)
    records: list[object] = field(default_factory=list)
    weights: dict[int, str] = field(default_factory=dict)
    shortest_ms: float = float("inf")
    has_graphs: bool = False

    def differences(self, other: Run) -> list[str]:
        """Return the names of the results that are not equal."""
        common = self.weights.keys() & other.weights.keys()
        found = [name for name in ("losses", "norms", "records") if getattr(self, name) != getattr(other, name)]
        return found + ["weights"] * any(self.weights[i] != other.weights[i] for i in common)


def train(config: Config, parallel: ParallelState, documents: bool) -> Run:
    """Train and evaluate the model of `config`."""
    trainer = RankTrainer(config, parallel)
    run, batches = Run(), random_batches(config, parallel, documents)
    for step in range(STEPS):
        if step == EVALUATED_AFTER:
            run.losses.append(trainer.evaluate(batches))
        start = time.perf_counter()
        loss, result = trainer.train_step(step, batches)
        run.shortest_ms = min(run.shortest_ms, (time.perf_counter() - start) * 1e3)
        run.losses.append(loss)
        run.norms.append(result)
        run.records.append(trainer.fp8_records)
    run.has_graphs = trainer.graphs is not None
    assert run.has_graphs == (not trainer.why_no_graphs), trainer.why_no_graphs
    trainer.strategy.wait()
    for i, param in enumerate(trainer.strategy.params):
        if param not in trainer.strategy.released:
            run.weights[i] = hashlib.sha256(param.detach().cpu().view(torch.uint8).numpy().tobytes()).hexdigest()
    trainer.close()
    return run


def main() -> int:
    """Run all cases, print the table, and return the exit code."""
    parser = new_parser(__doc__)
    parser.add_argument("--config", default="configs/llama3-8b.yaml")
    parser.add_argument("--layouts", nargs="+", metavar='"key=value ..."')
    parser.add_argument("--variants", default="bf16,delayed,blockwise")
    parser.add_argument("--compare", nargs=2, default=GRAPHS, metavar="key=value", help="default: CUDA graphs")
    arguments = parser.parse_args()
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    layouts = arguments.layouts or (ONE_GPU if world_size == 1 else TWO_GPUS)
    of_graphs = arguments.compare == GRAPHS
    name_of_device = "cuda" if torch.cuda.is_available() else "cpu"
    make_deterministic(name_of_device)
    device = initialize_distributed(name_of_device, 120)
    groups = Groups(device)
    log = print if dist.get_rank() == 0 else lambda *_, **__: None
    table = Table("layout, variant", 78, {"first ms": ".1f", "second ms": ".1f"})
    log(f"{world_size} × {machine(device)}, torch {torch.__version__}; {' against '.join(arguments.compare)}")
    log(table.heading())
    rows = []
    for layout in layouts:
        for variant in arguments.variants.split(","):
            overrides = [*SMALL, *layout_overrides(layout), *variant_overrides(variant)]
            overrides += [] if of_graphs else ["optimizer.clip_grad_norm=0"]
            runs = []
            try:
                for override in arguments.compare:
                    config = load_config(arguments.config, [*overrides, override])
                    check_layout(config, world_size, arguments.config)
                    check_recipe(config, arguments.config)
                    runs.append(train(config, groups.of(config), "documents" in variant))
            except ValueError as error:
                log(f"{layout} {variant}: {' '.join(str(error).split())}")
                continue
            first, second = runs
            assert not of_graphs or (first.has_graphs, second.has_graphs) == (False, True), "no CUDA graphs"
            of_ranks = all_gather_objects(first.differences(second), groups.of(config).world.group)
            different = sorted({name for of_rank in of_ranks for name in of_rank})
            same = not different or (different == ["norms"] and not of_graphs)
            marks = ["DIFFERENT"] * (not same) + different + ["graphs"] * (second.has_graphs and not of_graphs)
            name = ": ".join([f"{layout} {variant}", *filter(None, [", ".join(marks)])])
            rows.append(
                {"name": name, "same": same, "different": different, "first ms": first.shortest_ms,
                 "second ms": second.shortest_ms, "losses": [str(loss) for loss in first.losses]}
            )  # fmt: skip
            log(table.row(name, first.shortest_ms, second.shortest_ms), flush=True)
            release()
    different_cases = sum(not row["same"] for row in rows)
    log(f"{len(rows)} cases, {different_cases} different")
    write_json(arguments.json, rows)
    destroy_model_parallel()
    return int(different_cases > 0)


if __name__ == "__main__":
    sys.exit(main())
