"""Time the linear layers of many experts, and the movement of rows: `python -m benchmarks.bench_experts`.

The benchmark measures the first linear layer of all experts of a rank, forward and backward, in bf16 and with FP8
recipes; then the permutation of rows to their experts and back. Weight gradients are added to an fp32 buffer, as in
training, or returned to autograd in bf16 (`--gradients returned`), as in a user's model. `--products` measures the
products alone, with operands that are cast already, with blocks of 128 and in bf16. Experts have different numbers of
rows, drawn from a Dirichlet distribution. TFLOP/s count 2·m·n·k for each of the three GEMMs. Default: Qwen3-30B-A3B
with 8,192 tokens.

    --experts 8 --top-k 2 --hidden 4096 --width 14336          Mixtral-8x7B
    --experts 8 --tokens 32768 --top-k 1 --hidden 7168 --width 2048   a rank of DeepSeek-V3 with 8 local experts

Times are medians of interleaved rounds from a cold L2; "host" is the host's launch time.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial

import torch
from torch import Tensor, nn

from benchmarks.common import Table, add_device_flag, chosen_device, machine, new_parser, require_positive, write_json
from megafp8.fp8 import RECIPES, Fp8Manager
from megafp8.fp8.speed_measurement import time_round_robin
from megafp8.layers.experts.permute_op import Permutation, by_expert, combine, permute
from megafp8.linear.grouped_linear import grouped_linear
from megafp8.numerics.formats import E4M3
from megafp8.numerics.groups import RowGroups
from megafp8.numerics.sources import Plain
from megafp8.parallel.data.grad_buffer import GradBuffer
from megafp8.parallel.sharding import Init, ParamSpec, set_spec, unsharded
from megafp8.plan import LinearSite

TABLE = Table("", 36, {"ms": ".3f", "TFLOP/s": ",.0f", "host ms": ".3f"})


@dataclass(frozen=True)
class Record:
    """Row of the table. `tflops` is None if nothing is multiplied."""

    name: str
    ms: float
    tflops: float | None
    host_ms: float


def chosen_experts(tokens: int, experts: int, top_k: int, concentration: float, seed: int) -> Tensor:
    """Choose different experts for each token, int64 `[tokens, top_k]`, with Dirichlet-distributed popularities.

    If `concentration` is inf, experts are chosen in turn, equally often.
    """
    if math.isinf(concentration):
        return torch.arange(tokens * top_k).view(tokens, top_k) % experts
    generator = torch.Generator().manual_seed(seed)
    popularity = torch._sample_dirichlet(torch.full((experts,), concentration), generator=generator)
    return torch.multinomial(popularity.expand(tokens, -1), top_k, generator=generator)


def linear_run(x: Tensor, ends: Tensor, n: int, recipe: str, *, backward: bool, returned: bool) -> Callable[[], object]:
    """Build a run of the linear layer of all experts on rows `x`, `[m, k]` to `[m, n]`.

    With `returned`, the weight gradient is returned to autograd.
    """
    experts, k = len(ends), x.shape[1]
    weight = nn.Parameter(torch.randn(experts * n, k, device=x.device).mul_(0.02).to(x.dtype))
    set_spec(weight, ParamSpec(unsharded("weight", (experts * n, k)), Init("zeros"), replicated_over_tp=False))
    if not returned:
        GradBuffer([weight], data_parallel_group=None, bucket_elements=1 << 40, device=x.device)
    manager = Fp8Manager(None if recipe == "bf16" else RECIPES[recipe](), amax_group=None)
    state = manager.group([manager.linear(LinearSite(f"expert.{e}", expert=True)) for e in range(experts)])
    manager.materialize(x.device)
    x = x.detach().requires_grad_()
    dy = torch.randn(len(x), n, device=x.device).to(x.dtype)

    def run() -> None:
        y = grouped_linear(x, weight, RowGroups.from_ends(ends, len(x)), state)
        if backward:
            weight.grad = None
            y.backward(dy)

    for _ in range(2):  # the second step of delayed scaling has scales
        run()
        manager.end_step()
    return run


def rows_run(x: Tensor, permutation: Permutation) -> Callable[[], object]:
    """Build a run that moves tokens `x` to rows by expert and back, forward and backward."""
    x = x.detach().requires_grad_()
    weights = torch.rand(len(x), permutation.top_k, device=x.device, requires_grad=True)

    def run() -> None:
        y = combine(permute(x, permutation), weights, permutation)
        torch.autograd.grad(y, (x, weights), torch.ones_like(y))

    return run


def product_runs(x: Tensor, ends: Tensor, n: int) -> dict[str, tuple[Callable[[], object], float]]:
    """Build runs of each product of the layer, with FLOPs.

    They are blockwise products by megafp8's kernels, and bf16 products as a layer computes them.
    """
    from megafp8.kernels.grouped_cast import cast_groups_1x128  # needs Triton, which only torch's CUDA builds include
    from megafp8.kernels.grouped_gemm import rows_times_matrices, sums_over_rows
    from megafp8.kernels.quantize import cast_128x128

    (m, k), experts, device = x.shape, len(ends), x.device
    groups = RowGroups.from_ends(ends, m)
    dy = torch.randn(m, n, device=device).to(x.dtype)
    weight = torch.randn(experts * n, k, device=device).mul_(0.02).to(x.dtype)
    cast = partial(
        cast_groups_1x128, fmt=E4M3, groups=groups, rowwise=True, columnwise=True, power_of_two=True, eps=0.0
    )
    x8, dy8 = cast(Plain(x)), cast(Plain(dy))
    w8 = cast_128x128(Plain(weight), E4M3, rowwise=True, columnwise=True, power_of_two=True, eps=0.0)
    dw = torch.zeros(experts, n, k, device=device)
    operands = dy8.required_columnwise, x8.required_columnwise, groups.padded_ends_e
    rows = partial(rows_times_matrices, ends_e=ends, out_dtype=x.dtype, fast=False)
    sums, w_enk = partial(sums_over_rows, *operands, dw), weight.view(experts, n, k)
    flops = 2.0 * m * n * k
    runs: dict[str, tuple[Callable[[], object], float]] = {
        "bf16 fprop": (lambda: torch.nn.functional.grouped_mm(x, w_enk.transpose(1, 2), offs=ends), flops),
        "bf16 dgrad": (lambda: torch.nn.functional.grouped_mm(dy, w_enk, offs=ends), flops),
        "bf16 wgrad, added": (partial(sums_over_rows, dy, x, ends, dw, accumulate=True), flops),
        "fprop": (partial(rows, x8.required_rowwise, w8.required_rowwise, n=n, columnwise=False), flops),
        "dgrad": (partial(rows, dy8.required_rowwise, w8.required_columnwise, n=k, columnwise=True), flops),
    }
    for name, accumulate in (("written", False), ("added", True)):
        runs[f"wgrad, {name}"] = partial(sums, accumulate=accumulate), flops
        runs[f"wgrad of two micro-batches, {name}"] = (
            partial(sums, accumulate=accumulate, earlier=operands),
            2.0 * flops,
        )
    return runs


def layer_runs(
    x: Tensor, ends: Tensor, n: int, recipes: Sequence[str], *, returned: bool
) -> dict[str, tuple[Callable[[], object], float]]:
    """Build runs of the layer's forward, and of forward and backward, for each recipe, with FLOPs.

    See `linear_run` for `returned`.
    """
    runs: dict[str, tuple[Callable[[], object], float]] = {}
    gemm = 2.0 * len(x) * x.shape[1] * n
    for recipe in ("bf16", *recipes):
        for name, backward in (("forward", False), ("forward and backward", True)):
            run = linear_run(x, ends, n, recipe, backward=backward, returned=returned)
            runs[f"{recipe}, {name}"] = run, gemm * (3 if backward else 1)
    return runs


def measure(runs: dict[str, tuple[Callable[[], object], float]], device: torch.device, rounds: int) -> list[Record]:
    """Measure named runs, and return a row for each."""
    times = time_round_robin([run for run, _ in runs.values()], device, rounds=rounds)
    records = []
    for (name, (run, flops)), seconds in zip(runs.items(), times, strict=True):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        run()
        host = time.perf_counter() - start
        median = statistics.median(seconds)
        records.append(Record(name, median * 1e3, flops / median / 1e12 if flops else None, host * 1e3))
    return records


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark, print the table, and return the exit code."""
    parser = new_parser(__doc__)
    add_device_flag(parser)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--width", type=int, default=768, help="inner width of an expert")
    parser.add_argument(
        "--concentration", type=float, default=8.0, help="concentration of the Dirichlet distribution; inf: even"
    )
    parser.add_argument("--recipes", nargs="*", default=["delayed", "blockwise"], choices=[*RECIPES])
    parser.add_argument(
        "--products", action="store_true", help="measure the products alone, with blocks of 128 and in bf16"
    )
    parser.add_argument("--gradients", choices=["added", "returned"], default="added", help="weight gradients")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    try:
        require_positive(given, "tokens", "experts", "top_k", "hidden", "width", "concentration", "rounds")
        if given.top_k > given.experts:
            raise ValueError(f"--top-k: {given.top_k} is more than --experts ({given.experts})")
        device = chosen_device(given)
        if given.products and device.type != "cuda":
            raise ValueError("--products: its kernels need a GPU; leave it out, or see --device")
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    experts_nk = chosen_experts(given.tokens, given.experts, given.top_k, given.concentration, given.seed).to(device)
    permutation, _ = by_expert(experts_nk, given.experts)
    counts = torch.bincount(experts_nk.flatten(), minlength=given.experts)
    ends = counts.cumsum(0, dtype=torch.int32)
    x = torch.randn(given.tokens, given.hidden, device=device)
    x = x.to(torch.bfloat16) if device.type == "cuda" else x
    rows, n = permute(x, permutation), 2 * given.width
    if given.products:
        runs = product_runs(rows, ends, n)
    else:
        runs = layer_runs(rows, ends, n, given.recipes, returned=given.gradients == "returned")
        runs["rows to experts and back"] = rows_run(x, permutation), 0.0
    print(
        f"{machine(device)}, torch {torch.__version__}; {given.tokens:,} tokens to {given.top_k} of {given.experts} "
        f"experts, {given.hidden} -> {n}; rows of an expert: {counts.min():,} to {counts.max():,}; weight gradients "
        f"{given.gradients}"
    )
    print(TABLE.heading())
    records = measure(runs, device, given.rounds)
    for record in records:
        print(TABLE.row(record.name, record.ms, record.tflops, record.host_ms))
    write_json(given.json, [asdict(record) for record in records])
    return 0


if __name__ == "__main__":
    sys.exit(main())
