"""Compare eager and replayed training steps bit for bit, in many layouts, on the GPUs that are here.

    torchrun --nproc-per-node 2 -m benchmarks.graph_gate
    torchrun --nproc-per-node 2 -m benchmarks.graph_gate --layouts "tensor=2" "pipeline=2 schedule=zb-v" --variants bf16

Each case trains a small Llama twice from the same weights, without and with CUDA graphs, and compares the losses and
gradient norms of all steps, the validation loss in between, the records of a sampled step, and the final weights.
Layouts and variants are those of `benchmarks.bench_step`; keys of other sections may be in a layout too. Attention is
deterministic. "eager" and "replayed" are the shortest step of each, in milliseconds.

The exit code is 1 if a case differs.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time

import torch
import torch.distributed as dist

from benchmarks.bench_step import Groups, layout_overrides, random_batches, variant_overrides
from benchmarks.common import Table, machine, new_parser, release, write_json
from megafp8.config import Config, check_layout, load_config
from megafp8.distributed.collectives import all_gather_objects
from megafp8.parallel_state import ParallelState, destroy_model_parallel, initialize_distributed
from megafp8.training.determinism import make_deterministic
from megafp8.training.trainer import Trainer

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
    "pipeline=2 schedule=interleaved virtual_pipeline=2",
    *(f"pipeline=2 virtual_pipeline=2 schedule={name}" for name in ("zb-v", "dualpipev", "zb-v recompute=full")),
]


def train(config: Config, parallel: ParallelState, documents: bool) -> tuple[list[object], float]:
    """All that is compared, of this rank, and the milliseconds of the shortest step."""
    trainer = Trainer(config, parallel)
    found: list[object] = []
    shortest = float("inf")
    batches = random_batches(config, parallel, documents)
    for step in range(STEPS):
        if step == EVALUATED_AFTER:
            found.append(trainer.evaluate(batches))
        start = time.perf_counter()
        loss, result = trainer.train_step(step, batches)
        shortest = min(shortest, time.perf_counter() - start)
        found += [loss, result, trainer.fp8_records]
    assert (trainer.graphs is None) == (config.training.cuda_graphs is False), trainer.why_no_graphs
    trainer.strategy.wait()
    for param in trainer.strategy.params:
        if param not in trainer.strategy.fp8_weights:
            found.append(hashlib.sha256(param.detach().cpu().view(torch.uint8).numpy().tobytes()).hexdigest())
    trainer.close()
    return found, shortest * 1e3


def main() -> int:
    parser = new_parser(__doc__)
    parser.add_argument("--config", default="configs/llama3-8b.yaml")
    parser.add_argument("--layouts", nargs="+", metavar='"key=value ..."')
    parser.add_argument("--variants", default="bf16,delayed,blockwise")
    arguments = parser.parse_args()
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    layouts = arguments.layouts or (ONE_GPU if world_size == 1 else TWO_GPUS)
    make_deterministic("cuda")
    device = initialize_distributed("cuda", 120)
    groups = Groups(device)
    log = print if dist.get_rank() == 0 else lambda *_, **__: None
    table = Table("layout, variant", 78, {"eager ms": ".1f", "replayed ms": ".1f"})
    log(f"{world_size} × {machine(device)}, torch {torch.__version__}\n{table.heading()}")
    rows = []
    for layout in layouts:
        for variant in arguments.variants.split(","):
            overrides = [*SMALL, *layout_overrides(layout), *variant_overrides(variant)]
            runs = []
            try:
                for graphs in ("false", "auto"):
                    config = load_config(arguments.config, [*overrides, f"training.cuda_graphs={graphs}"])
                    check_layout(config, world_size, arguments.config)
                    runs.append(train(config, groups.of(config), "documents" in variant))
            except ValueError as error:
                log(f"{layout} {variant}: {' '.join(str(error).split())}")
                continue
            (eager, eager_ms), (replayed, replayed_ms) = runs
            same = all(all_gather_objects(eager == replayed, groups.of(config).world.group))
            name = f"{layout} {variant}{'' if same else ': DIFFERENT'}"
            rows.append({"name": name, "same": same, "eager ms": eager_ms, "replayed ms": replayed_ms})
            log(table.row(name, eager_ms, replayed_ms), flush=True)
            release()
    different = sum(not row["same"] for row in rows)
    log(f"{len(rows)} cases, {different} different")
    write_json(arguments.json, rows)
    destroy_model_parallel()
    return int(different > 0)


if __name__ == "__main__":
    sys.exit(main())
