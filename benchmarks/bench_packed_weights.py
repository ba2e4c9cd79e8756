"""Products of few tokens with quantized weights, beside torch's in bf16: `python -m benchmarks.bench_packed_weights`.

Shapes are the linear layers of Llama-3-8B. Each time is that of a product within a CUDA graph of many, each with a copy
of the weight of its own, so that no weight is found in the L2 cache. Bandwidth counts the bytes of the weight, once.
Results are compared with float64 first. `--sweep` tries tiles and lists the fastest; `--kinds` and `--tokens` choose.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import Table, add_device_flag, chosen_device, machine, names, new_parser, replayed, write_json
from megafp8.gpus import H200
from megafp8.linear.quantized_weight import WEIGHT_FORMATS, QuantizedWeight

SHAPES = {
    "qkv": (6144, 4096),
    "proj": (4096, 4096),
    "gate_up": (28672, 4096),
    "down": (4096, 14336),
    "output": (128256, 4096),
}
"""Outputs n and inputs k."""
KINDS = ("bf16", *WEIGHT_FORMATS)
TOKENS = (1, 8, 64)
DISTINCT_BYTES = 300e6
"""Of the copies of a weight: several times an L2 cache."""
ROUNDS = 7
TABLE = Table("layer, tokens, weight", 26, {"us": ".1f", "TB/s": ".2f", "of peak": ".0%", "error": ".1e"})


def random_weight(kind: str, n: int, k: int, device: torch.device) -> Tensor | QuantizedWeight:
    """Values of no meaning, all of which the format has."""
    if kind == "bf16":
        return torch.randn(n, k, device=device, dtype=torch.bfloat16)
    form = WEIGHT_FORMATS[kind]  # type: ignore[index]
    if form.kind != "int4":
        scale_inv = torch.rand(1, n, device=device) + 0.5
        data = torch.randint(-127, 128, (n, k), device=device, dtype=torch.int8)
        return QuantizedWeight(form, data if kind == "int8" else data.float().to(form.dtype), scale_inv)
    assert form.group is not None
    data = torch.randint(0, 256, (n, k // 2), device=device, dtype=torch.uint8)
    scale_inv = (torch.rand(k // form.group, n, device=device) + 0.5).to(torch.bfloat16)
    return QuantizedWeight(form, data, scale_inv, torch.randint(6, 10, scale_inv.shape, device=device).to(torch.uint8))


def values(weight: Tensor | QuantizedWeight) -> Tensor:
    """float64, of the first and the last rows: enough for a check."""
    w = weight if isinstance(weight, Tensor) else weight.dequantize(torch.float32)
    return torch.cat([w[:256], w[-64:]]).double()


def error(found_mn: Tensor, x_mk: Tensor, w: Tensor) -> float:
    """Largest difference from float64, in units of the largest result."""
    found = torch.cat([found_mn[:, :256], found_mn[:, -64:]], dim=1).double()
    expected = x_mk.double() @ w.t()
    return float((found - expected).abs().max() / expected.abs().max())


def microseconds(runs: Sequence[Callable[[], Any]]) -> float:
    """Microseconds of one of `runs`, which follow each other in a CUDA graph."""
    replay = replayed(lambda: [run() for run in runs])
    times = []
    for _ in range(ROUNDS + 1):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(runs))
    return statistics.median(times[1:])


def tiles(kind: str, m: int, n: int, *, sweep: bool) -> list[Any]:
    from megafp8.kernels.packed_weights import Tile, VectorTile, best_tile  # needs Triton

    best = best_tile("bf16" if kind == "bf16" else WEIGHT_FORMATS[kind].kind, m, n)  # type: ignore[index]
    if not sweep:
        return [best]
    found: list[Any] = []
    if m == 1:
        found += [
            VectorTile(rows, warps) for rows, warps in ((1, 4), (2, 4), (4, 1), (4, 2), (4, 4), (8, 1), (8, 2), (2, 1))
        ]
    widths = (64,) if kind.startswith("int4") else (64, 128)
    if m <= 16:
        sizes = ((16, 4, 4), (16, 8, 3), (32, 4, 4), (64, 4, 3), (16, 2, 6))
        found += [Tile(rows, width, warps, stages, True) for width in widths for rows, warps, stages in sizes]
        found += [Tile(rows, widths[-1], 4, stages, False) for rows, stages in ((32, 5), (64, 4))]
    else:
        sizes = ((32, 4, 4), (64, 4, 3), (64, 4, 4), (128, 8, 3), (128, 4, 3))
        found += [Tile(rows, widths[-1], warps, stages, False) for rows, warps, stages in sizes]
        found.append(Tile(16, 64, 4, 2, True))
    return [best, *(tile for tile in found if tile != best)]


def bench(layer: str, kind: str, tokens: Sequence[int], device: torch.device, peak: float, *, sweep: bool) -> list[Any]:
    """A record for each number of tokens and tile, with torch's product where the kind is bf16."""
    from megafp8.kernels import packed_weights

    n, k = SHAPES[layer]
    first = random_weight(kind, n, k, device)
    size = first.nbytes if isinstance(first, Tensor) else first.num_bytes
    weights = [first, *(random_weight(kind, n, k, device) for _ in range(int(DISTINCT_BYTES / size)))]
    packed = [packed_weights.PackedData("bf16", w, k) if isinstance(w, Tensor) else w.packed_data for w in weights]
    checked = values(first)
    records: list[dict[str, Any]] = []

    def record(what: str, m: int, note: str, runs: Sequence[Callable[[], Tensor]]) -> None:
        try:
            wrong, us = error(runs[0](), x, checked), microseconds(runs)
        except RuntimeError as failure:  # a tile needs more shared memory than there is
            print(f"{layer} {m} {what} {note}: {str(failure)[:90]}")
            return
        speed = size / us / 1e6
        print(TABLE.row(f"{layer} {m} {what}", us, speed, speed / peak, wrong, note=note), flush=True)
        records.append({"layer": layer, "tokens": m, "kind": what, "tile": note, "us": us, "error": wrong})

    for m in tokens:
        x = torch.randn(m, k, device=device, dtype=torch.bfloat16)
        if kind == "bf16":
            record("torch", m, "", [partial(torch.nn.functional.linear, x, w) for w in weights])  # type: ignore[arg-type]
        for tile in tiles(kind, m, n, sweep=sweep):
            record(kind, m, str(tile), [partial(packed_weights.multiply, x, w, None, tile) for w in packed])
    return records


def fastest(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each layer, number of tokens and kind."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for record in sorted(records, key=lambda record: -record["us"]):
        found[record["layer"], record["tokens"], record["kind"]] = record
    return sorted(found.values(), key=lambda record: (record["tokens"], list(SHAPES).index(record["layer"])))


def main(argv: list[str] | None = None) -> int:
    parser = new_parser(__doc__)
    add_device_flag(parser)
    parser.add_argument("--kinds", default="bf16,int8,fp8,int4", help="default: %(default)s; or int4-64, int4-32")
    parser.add_argument("--layers", default=",".join(SHAPES))
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)))
    parser.add_argument("--sweep", action="store_true", help="try tiles")
    parser.add_argument(
        "--peak",
        type=float,
        default=H200.memory_bandwidth / 1e12,
        help="TB/s of the GPU's memory; default: an H200's",
    )
    arguments = parser.parse_args(argv)
    try:
        kinds = names("--kinds", arguments.kinds, KINDS)
        layers = names("--layers", arguments.layers, SHAPES)
        device = chosen_device(arguments)
        if device.type != "cuda":
            raise ValueError("the kernels run on GPUs only, and torch sees no CUDA device here")
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    tokens = [int(x) for x in arguments.tokens.split(",")]
    print(machine(device))
    print(TABLE.heading())
    records = []
    for layer in layers:
        for kind in kinds:
            records += bench(layer, kind, tokens, device, arguments.peak, sweep=arguments.sweep)
            torch.cuda.empty_cache()
    if arguments.sweep:
        print("\nfastest")
        for record in fastest(records):
            print(
                f"{record['layer']:8} {record['tokens']:3} {record['kind']:8} {record['us']:8.1f} us  {record['tile']}"
            )
    write_json(arguments.json, records)
    return 0


if __name__ == "__main__":
    sys.exit(main())
