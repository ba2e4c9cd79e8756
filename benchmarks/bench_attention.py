"""Time masked attention: documents, windows, and their shards: `python -m benchmarks.bench_attention`.

The benchmark measures forward and backward of one layer's attention, in bf16 on a GPU, without projections. Documents
have random lengths with an exponential distribution. "pairs" are pairs of tokens that attend to each other, as a
fraction of the causal triangle. "of share" is the time relative to that fraction of the triangle's time. `--context n`
also times the work of each of n context-parallel ranks, on this one GPU and without communication.

`--scores` measures soft caps, biases, dropout and prefixes instead: with megafp8's kernel, which is first compared with
the reference, and with the kernels of cuDNN, torch's flash attention and FlexAttention if they compute the same.
Forward and backward are separate, in ms and TFLOP/s of the visible pairs (4·d each forward, 10·d backward).

Times are medians of interleaved rounds from a cold L2. On a GPU, replayed CUDA graphs are timed, as in training. "host"
is the time that the host needs to launch the kernels in them.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial

import torch
from torch import Tensor

from benchmarks.attention_scores import CASES, Contender, contenders, use_tiles
from benchmarks.common import (
    Table,
    add_device_flag,
    chosen_device,
    machine,
    new_parser,
    replayed,
    require_positive,
    write_json,
)
from megafp8.data.samples import room_for
from megafp8.fp8.speed_measurement import time_round_robin
from megafp8.layers.attention import op as kernels
from megafp8.layers.attention.context_parallel import AttentionCall, plan
from megafp8.layers.attention.mask import CAUSAL, AttentionMask, causal_mask

TABLE = Table("attention", 44, {"ms": ".3f", "pairs": ".1%", "of share": ".2f", "host ms": ".3f", "peak MiB": ",.0f"})

SCORES_TABLE = Table("scores", 40, {"fwd ms": ".3f", "TFLOP/s": ".0f", "bwd ms": ".3f", " TFLOP/s": ".0f"})


@dataclass(frozen=True)
class Sizes:
    """Sizes of one sample's attention: tokens, heads, and head width."""

    seq_length: int
    heads: int
    groups: int
    head_dim: int


@dataclass(frozen=True)
class Record:
    """Row of the table. `pairs` are the visible pairs of tokens as a fraction of the causal triangle."""

    name: str
    ms: float
    pairs: float
    host_ms: float
    peak_mib: float


def document_offsets(s: int, mean: float, seed: int) -> list[int]:
    """Return the first tokens of documents of random lengths, and s."""
    generator, ends = torch.Generator().manual_seed(seed), [0]
    while ends[-1] < s:
        length = max(1, int(torch.empty(1).exponential_(1 / mean, generator=generator)))
        ends.append(min(s, ends[-1] + length))
    return ends


def bounded(ends: list[int], device: torch.device) -> Tensor:
    """Return `cu_seqlens`, `[1, n + 1]`, with room for more documents, in the data loader's form."""
    return torch.tensor(
        [ends + [ends[-1]] * (room_for(len(ends) - 1) + 1 - len(ends))], dtype=torch.int32, device=device
    )


def visible_pairs(ends: list[int], window: int | None) -> int:
    """Return the number of pairs of a query and a key that it attends to."""
    lengths = [end - start for start, end in itertools.pairwise(ends)]
    widths = [n if window is None else min(n, window) for n in lengths]
    return sum(w * (w + 1) // 2 + (n - w) * w for n, w in zip(lengths, widths, strict=True))


def noise(sizes: Sizes, device: torch.device, tokens: int, heads: int) -> Tensor:
    """Return random heads, `[tokens, 1, heads, d]`."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return torch.randn(tokens, 1, heads, sizes.head_dim, device=device, dtype=dtype)


def self_attention(sizes: Sizes, mask: AttentionMask, device: torch.device) -> Callable[[], object]:
    """Build a run of forward and backward of a whole sequence."""
    s = sizes.seq_length
    q, k, v = (noise(sizes, device, s, n).requires_grad_() for n in (sizes.heads, sizes.groups, sizes.groups))
    do = noise(sizes, device, s, sizes.heads)
    return lambda: torch.autograd.grad(kernels.attention(q, k, v, mask), (q, k, v), do)


def calls_of_a_rank(
    sizes: Sizes, calls: tuple[AttentionCall, ...], ranks: int, device: torch.device
) -> Callable[[], object]:
    """Build a run of a context-parallel rank's kernel calls, forward and backward, with its keys already gathered."""
    runs = []
    for call in calls:
        own = call.rows.stop - call.rows.start
        keys = own if call.keys_tb is None else call.keys_tb.shape[0]
        q, do = (noise(sizes, device, own, sizes.heads) for _ in range(2))
        k, v = (noise(sizes, device, keys, sizes.groups) for _ in range(2))
        runs.append((q, k, v, do, call.mask))

    def run() -> None:
        for q, k, v, do, mask in runs:
            o, lse = kernels.forward(q, k, v, mask)
            kernels.backward(do, q, k, v, o, lse, mask)

    return run


def measure(runs: dict[str, tuple[Callable[[], object], float]], device: torch.device, rounds: int) -> list[Record]:
    """Measure named runs with their fractions of pairs, and return a row for each."""
    timed = [replayed(run) if device.type == "cuda" else run for run, _ in runs.values()]
    times = time_round_robin(timed, device, rounds=rounds)
    records = []
    for (name, (run, pairs)), seconds in zip(runs.items(), times, strict=True):
        peak = 0.0
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            held = torch.cuda.memory_allocated(device)
            torch.cuda.reset_peak_memory_stats(device)
        start = time.perf_counter()
        run()
        host = time.perf_counter() - start
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            peak = (torch.cuda.max_memory_allocated(device) - held) / 2**20
        records.append(Record(name, statistics.median(seconds) * 1e3, pairs, host * 1e3, peak))
    return records


def with_torchs_kernel(run: Callable[[], object]) -> None:
    """Run with torch's flash kernel instead of FlashAttention-4."""
    chosen, kernels._choice = kernels._choice, lambda *_: kernels.KernelChoice("torch", "torch's flash kernel")
    try:
        run()
    finally:
        kernels._choice = chosen


def measure_scores(divisor: int, device: torch.device, rounds: int) -> list[dict[str, object]]:
    """Measure forward and backward of all cases of `benchmarks.attention_scores`; print and return the rows."""
    rows: list[dict[str, object]] = []
    print(f"{machine(device)}, torch {torch.__version__}")
    print(SCORES_TABLE.heading())
    for case in CASES:
        found: list[Contender] = []
        for one in contenders(case, divisor, device):
            if isinstance(one, str):
                print(one)
            else:
                found.append(one)
        runs = [run for one in found for run in (one.forward, one.backward)]
        medians = [statistics.median(x) for x in time_round_robin(runs, device, rounds=rounds)]
        for one, fwd, bwd in zip(found, medians[::2], medians[1::2], strict=True):
            speeds = one.flops / fwd * 1e-12, 2.5 * one.flops / bwd * 1e-12
            print(SCORES_TABLE.row(f"{one.case}: {one.kernel}", fwd * 1e3, speeds[0], bwd * 1e3, speeds[1]))
            rows.append({"case": one.case, "kernel": one.kernel, "fwd_ms": fwd * 1e3, "bwd_ms": bwd * 1e3})
    return rows


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark, print the table, and return the exit code."""
    parser = new_parser(__doc__)
    add_device_flag(parser)
    parser.add_argument("--seq-length", type=int, default=8192)
    parser.add_argument("--document-length", type=int, default=1000, help="mean length of documents")
    parser.add_argument("--window", type=int, default=4096)
    parser.add_argument("--context", type=int, default=1, help="ranks that share the sequence")
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--groups", type=int, default=8, help="key-value heads")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--scores", action="store_true", help="measure soft caps, biases, dropout and prefixes")
    parser.add_argument("--tile", action="append", default=[], help="another tile for --scores, such as dkv=32,128,8,2")
    parser.add_argument("--divisor", type=int, default=1, help="divisor of the sequence lengths of --scores")
    given = parser.parse_args(arguments)
    try:
        require_positive(
            given, "seq_length", "document_length", "window", "context", "heads", "groups", "rounds", "divisor"
        )
        if given.seq_length % (2 * given.context):
            raise ValueError(f"--seq-length: {given.seq_length} is not a multiple of 2 x --context ({given.context})")
        device = chosen_device(given)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if given.scores:
        use_tiles(given.tile)
        write_json(given.json, measure_scores(given.divisor, device, given.rounds))
        return 0
    sizes = Sizes(given.seq_length, given.heads, given.groups, given.head_dim)
    s, window = sizes.seq_length, given.window
    ends = document_offsets(s, given.document_length, given.seed)
    cu_seqlens, causal = bounded(ends, device), visible_pairs([0, s], None)
    masks = {
        "causal": (CAUSAL, [0, s], None),
        "documents": (causal_mask(cu_seqlens, None, s, device), ends, None),
        f"window {window}": (causal_mask(None, window, s, device), [0, s], window),
        f"documents, window {window}": (causal_mask(cu_seqlens, window, s, device), ends, window),
    }
    runs = {}
    for name, (mask, own_ends, own_window) in masks.items():
        run, pairs = self_attention(sizes, mask, device), visible_pairs(own_ends, own_window) / causal
        runs[name] = run, pairs
        if mask.cu_seqlens_q is not None and "Attention-4" in kernels.describe(device, mask):
            runs[f"{name}: torch's flash kernel"] = partial(with_torchs_kernel, run), pairs
    for name, found, own_window in (("documents", cu_seqlens, None), (f"window {window}", None, window)):
        for rank in range(given.context if given.context > 1 else 0):
            calls = plan(s, rank, given.context, window=own_window, cu_seqlens_bm=found, device=device)
            share = masks[name][1:]
            pairs = visible_pairs(*share) / causal / given.context
            runs[f"{name}, rank {rank} of {given.context}"] = (
                calls_of_a_rank(sizes, calls, given.context, device),
                pairs,
            )
    lengths = [end - start for start, end in itertools.pairwise(ends)]
    print(
        f"{machine(device)}, torch {torch.__version__}; {s:,} tokens, {len(lengths)} documents, the longest of "
        f"{max(lengths):,}; {sizes.heads} heads of {sizes.head_dim}, {sizes.groups} groups; forward and backward"
    )
    print(TABLE.heading())
    records = measure(runs, device, given.rounds)
    whole = records[0].ms
    for r in records:
        print(TABLE.row(r.name, r.ms, r.pairs, r.ms / (whole * r.pairs), r.host_ms, r.peak_mib))
    write_json(given.json, [asdict(record) for record in records])
    return 0


if __name__ == "__main__":
    sys.exit(main())
