"""FSDP with two replicas through NCCL against data parallelism: `torchrun --nproc-per-node 2 hsdp.py`, two GPUs.

One micro-batch a rank, so that every sum has two terms; deterministic attention; eager steps.
"""

import torch.distributed as dist

from benchmarks.bench_step import Groups, layout_overrides, variant_overrides
from benchmarks.graph_gate import SMALL, train
from megafp8.config import check_layout, load_config
from megafp8.parallel_state import destroy_model_parallel, initialize_distributed
from megafp8.training.determinism import make_deterministic

BASE = "zero=0"
REPLICAS = "fsdp=true fsdp_replicas=2"
LAYOUTS = [BASE, "zero=0 overlap_grad_reduce=false", "fsdp=true", REPLICAS, f"{REPLICAS} fp8.param_gather=true"]

make_deterministic("cuda")
device = initialize_distributed("cuda", 120)
groups = Groups(device)
for variant in ("bf16", "delayed"):
    expected = None
    for layout in LAYOUTS[: 4 if variant == "bf16" else 5]:
        more = ["training.cuda_graphs=false", "training.global_batch_size=2"]
        overrides = [*SMALL, *layout_overrides(layout), *variant_overrides(variant), *more]
        config = load_config("configs/llama3-8b.yaml", overrides)
        check_layout(config, 2)
        found, shortest = train(config, groups.of(config), False)
        curve = [x for x in found if not isinstance(x, (str, list))]
        expected = expected or curve
        if dist.get_rank() == 0:
            print(variant, layout, curve == expected, f"{shortest:.1f} ms", curve[-2:], flush=True)
destroy_model_parallel()
