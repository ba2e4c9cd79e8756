import os
import torch.distributed as dist
from benchmarks.graph_gate import *
make_deterministic("cuda")
device = initialize_distributed("cuda", 120)
groups = Groups(device)
for variant in ("bf16", "delayed"):
    res = {}
    for layout in ("zero=0", "zero=0 overlap_grad_reduce=false", "fsdp=true", "fsdp=true fsdp_replicas=2", "fsdp=true fsdp_replicas=2 fp8.param_gather=true"):
        if "param_gather" in layout and variant == "bf16": continue
        c = load_config("configs/llama3-8b.yaml", [*SMALL, *layout_overrides(layout), *variant_overrides(variant), "training.cuda_graphs=false", "training.global_batch_size=2"])
        check_layout(c, 2)
        found, ms = train(c, groups.of(c), False)
        losses = [x for x in found if not isinstance(x, (str, list))]
        res[layout] = losses
        if dist.get_rank() == 0: print(variant, layout, losses == res["zero=0"], f"{ms:.1f} ms", losses[-2:], flush=True)
destroy_model_parallel()
