"""Measure the throughput of the quantize kernels relative to a copy: `python -m benchmarks.bench_casts [--sweep]`.

Bytes are the bytes that must move: each input once per pass, each output once. `--sweep` tries tiles for each pass of
each cast, with the tile of the other pass fixed, and prints the best. Without it, the tiles of
`megafp8.kernels.quantize` are measured. Times are medians from a cold L2. A pass that only reads seems to wait until
the previous content of the cache is written back, for about 10 µs.

Shapes: m tokens; the layer of Llama-3-8B at 8192 tokens.
"""

from __future__ import annotations

import itertools
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from benchmarks.common import Table, machine, new_parser, write_json
from megafp8.fp8.speed_measurement import time_round_robin

M, H, F = 8192, 4096, 14336
ROUNDS = 25
TABLE = Table("kernel", 34, {"ms": ".3f", "TB/s": ".2f", "of copy": ".1%"})


@dataclass(frozen=True)
class Case:
    """Cast of one shape: the name of its source in the kernels, its passes, and the bytes that must move."""

    name: str
    source: str
    passes: tuple[str, ...]
    run: Callable[[], object]
    bytes: int


def cases() -> list[Case]:
    """Return all casts to measure."""
    from megafp8.kernels import quantize
    from megafp8.layers.norm import kernel as normalization
    from megafp8.numerics.formats import E4M3, E5M2
    from megafp8.numerics.sources import GELU, GELUGrad, MatrixSource, Normalized, Plain, QKVGrad, SwiGLU, SwiGLUGrad

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16)

    x, dy, weight, bias = noise(M, H), noise(M, H), noise(H), noise(F)
    gate_up, dact = noise(M, 2 * F), noise(M, F)
    w = noise(2 * F, H)
    rstd = torch.rand(M, device="cuda")
    angles = torch.rand(M, 1, 1, 64, device="cuda")
    scale, newest = torch.ones((), device="cuda"), torch.zeros((), device="cuda")
    both = {"rowwise": True, "columnwise": True}
    blocks = {"power_of_two": True, "eps": 0.0} | both
    current = {"power_of_two": False, "eps": 0.0} | both
    heads = (noise(M, 1, 32, 128), noise(M, 1, 8, 128), noise(M, 1, 8, 128))
    # Each source, and the number of elements that it reads and computes.
    sources: dict[str, tuple[MatrixSource, int, int]] = {
        "plain": (Plain(x), M * H, M * H),
        "rmsnorm": (Normalized(x, rstd, weight), M * H, M * H),
        "swiglu": (SwiGLU(gate_up), 2 * M * F, M * F),
        "swiglu_grad": (SwiGLUGrad(gate_up, dact), 3 * M * F, 2 * M * F),
        "gelu": (GELU(dact, bias), M * F, M * F),
        "gelu_grad": (GELUGrad(noise(M, F), dact, bias), 2 * M * F, M * F),
        "qkv_grad": (QKVGrad(*heads, angles.cos(), angles.sin()), M * 6144, M * 6144),
        "weight": (Plain(w), w.numel(), w.numel()),
    }
    found = []
    for name, (source, reads, writes) in sources.items():
        fmt = E5M2 if name.endswith("grad") else E4M3
        kind = quantize.tile_group(source)
        once, twice = 2 * reads + 2 * writes, 4 * reads + 2 * writes  # bytes: bf16 in, rows and columns out
        one = ("per_tensor",)
        casts: list[tuple[str, tuple[str, ...], Callable[..., object], int]] = [
            ("tensor", one, lambda s, f: quantize.cast_tensor(s, scale, scale, f, newest_amax=newest, **both), once),
            ("current", one, lambda s, f: quantize.cast_current(s, newest, f, **current), once),
            ("amax", ("amax",), lambda s, f: quantize.amax(s), 2 * reads),
            ("rows (two passes)", ("vector_amax", "vectors"), lambda s, f: quantize.cast_rows(s, f, **blocks), twice),
            ("bf16", one, lambda s, f: quantize.materialize(s), 2 * reads + 2 * writes),
            ("1x128", ("1x128",), lambda s, f: quantize.cast_1x128(s, f, **blocks), once),
        ]
        if name == "weight":
            casts.append(("128x128", ("128x128",), lambda s, f: quantize.cast_128x128(s, f, **blocks), once))
        for what, passes, cast, moved in casts:
            found.append(Case(f"{name} -> {what}", kind, passes, partial(cast, source, fmt), moved))
    add = partial(normalization.statistics, x, dy, 1e-5, centered=False)
    found.append(Case("norm statistics + add", "", (), add, 6 * M * H))
    backward = partial(normalization.backward, dy, x, None, rstd, weight, x)
    found.append(Case("norm backward + add", "", (), backward, 8 * M * H))
    return found


def milliseconds(run: Callable[[], object]) -> float:
    """Return the median time on the GPU."""
    (seconds,) = time_round_robin([run], torch.device("cuda"), rounds=ROUNDS, warm_up=1)
    return statistics.median(seconds) * 1e3


def copy_bandwidth() -> float:
    """Return the TB/s of a large copy, counting bytes read and bytes written."""
    a = torch.randn(2**28, device="cuda", dtype=torch.bfloat16)
    b = torch.empty_like(a)
    return 4 * a.numel() / milliseconds(lambda: b.copy_(a)) / 1e9


def tiles_to_try(what: str, source: str) -> list[Any]:
    """Return candidate tiles for a pass over a source."""
    from megafp8.kernels.quantize import CastTile

    if what in ("1x128", "128x128"):
        columns = 64 if source == "qkv_grad" else 128
        return [CastTile(128, columns, *rest) for rest in itertools.product((4, 8, 16), (None, 128, 168))]
    widths = (32, 64) if source == "qkv_grad" else (64, 128, 256)
    tiles = [CastTile(*tile) for tile in itertools.product((32, 64, 128, 256), widths, (4, 8), (None, 128))]
    return [tile for tile in tiles if 16 <= tile.rows * tile.columns // (32 * tile.warps) <= 128]


def sweep(case: Case) -> list[tuple[float, str]]:
    """Return the milliseconds of the best tiles of each pass, and keep the best in `quantize.TILES`."""
    from megafp8.kernels.quantize import TILES

    found = []
    for what in case.passes:
        times = {}
        for tile in tiles_to_try(what, case.source):
            TILES[what][case.source] = tile
            times[tile] = milliseconds(case.run)
        best = sorted(times, key=times.__getitem__)[:4]
        TILES[what][case.source] = best[0]
        found += [(times[tile], f"{what}: {tuple(tile)}") for tile in best]
    return found


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark, print the table, and return the exit code."""
    parser = new_parser(__doc__)
    parser.add_argument("--sweep", action="store_true", help="try tiles")
    arguments = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("error: this benchmark needs a GPU, and torch sees none", file=sys.stderr)
        return 2
    ceiling, records = copy_bandwidth(), []
    print(f"{machine(torch.device('cuda'))}, torch {torch.__version__}: copy {ceiling:.2f} TB/s")
    print(TABLE.heading())
    for case in cases():
        found = sweep(case) if arguments.sweep and case.passes else [(milliseconds(case.run), "")]
        for ms, tile in found:
            rate = case.bytes / ms / 1e9
            print(TABLE.row(case.name, ms, rate, rate / ceiling, note=tile), flush=True)
            records.append({"kernel": case.name, "tile": tile, "bytes": case.bytes, "ms": ms, "tb_per_s": rate,
                            "of_copy": rate / ceiling})  # fmt: skip
    write_json(arguments.json, records)
    return 0


if __name__ == "__main__":
    sys.exit(main())
