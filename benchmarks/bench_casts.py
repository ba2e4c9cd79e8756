"""Throughput of the quantize kernels against a copy, on one GPU: `python -m benchmarks.bench_casts [--sweep]`.

Bytes are those that must move: each input once a pass, each output once. `--sweep` tries tiles for each pass of each
cast, the other's left as it is, and prints the best; without it the tiles of `megafp8.kernels.quantize` are
measured. A pass that only reads probably also waits for what the cache held before to be written back: some 10 µs.

Shapes: m tokens; those of a Llama-3-8B layer at 8192 tokens.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

M, H, F = 8192, 4096, 14336
REPEATS, SLEEP = 25, 600_000  # clock cycles, some 0.3 ms


@dataclass(frozen=True)
class Case:
    """A cast on one shape: its source's name in the kernels, its passes over it, and the bytes that must move."""

    name: str
    source: str
    passes: tuple[str, ...]
    run: Callable[[], object]
    bytes: int


def cases() -> list[Case]:
    from megafp8.fp8.formats import E4M3, E5M2
    from megafp8.fp8.sources import GELU, GELUGrad, Normalized, Plain, QKVGrad, Source, SwiGLU, SwiGLUGrad
    from megafp8.kernels import norm as normalization
    from megafp8.kernels import quantize

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16)

    x, dy, weight, bias = noise(M, H), noise(M, H), noise(H), noise(F)
    gate_up, dact = noise(M, 2 * F), noise(M, F)
    w = noise(2 * F, H)
    rstd = torch.rand(M, device="cuda")
    angles = torch.rand(M, 1, 1, 64, device="cuda")
    scale, note = torch.ones((), device="cuda"), torch.zeros((), device="cuda")
    both = {"rowwise": True, "columnwise": True}
    blocks = {"power_of_two": True, "eps": 0.0} | both
    current = {"power_of_two": False, "eps": 0.0} | both
    heads = (noise(M, 1, 32, 128), noise(M, 1, 8, 128), noise(M, 1, 8, 128))
    # Each source, and how many elements it reads and makes.
    sources: dict[str, tuple[Source, int, int]] = {
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
            ("tensor", one, lambda s, f: quantize.cast_tensor(s, scale, scale, f, newest_amax=note, **both), once),
            ("current", one, lambda s, f: quantize.cast_current(s, note, f, **current), once),
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
    """Median time on the GPU, from an L2 cache of other data. The GPU sleeps before each run, so that launches queue up
    and Python's time is not measured."""
    cache = torch.empty(2**28, dtype=torch.int8, device="cuda")
    pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(REPEATS)]
    run()
    for start, end in pairs:
        cache.zero_()
        torch.cuda._sleep(SLEEP)
        start.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return sorted(start.elapsed_time(end) for start, end in pairs)[REPEATS // 2]


def copy_bandwidth() -> float:
    """TB/s of a large copy, counting bytes read and bytes written."""
    a = torch.randn(2**28, device="cuda", dtype=torch.bfloat16)
    b = torch.empty_like(a)
    return 4 * a.numel() / milliseconds(lambda: b.copy_(a)) / 1e9


def tiles_to_try(what: str, source: str) -> list[Any]:
    """Tiles worth measuring for a pass over a source."""
    from megafp8.kernels.quantize import Tile

    if what in ("1x128", "128x128"):
        columns = 64 if source == "qkv_grad" else 128
        return [Tile(128, columns, *rest) for rest in itertools.product((4, 8, 16), (None, 128, 168))]
    widths = (32, 64) if source == "qkv_grad" else (64, 128, 256)
    tiles = [Tile(*tile) for tile in itertools.product((32, 64, 128, 256), widths, (4, 8), (None, 128))]
    return [tile for tile in tiles if 16 <= tile.rows * tile.columns // (32 * tile.warps) <= 128]


def sweep(case: Case) -> list[tuple[float, str]]:
    """Milliseconds and what was tried; each pass is left with its best tile."""
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", action="store_true")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("error: this measures a GPU, and torch sees none", file=sys.stderr)
        return 2
    ceiling = copy_bandwidth()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}: copy {ceiling:.2f} TB/s")
    print(f"{'kernel':<34}{'ms':>8}{'TB/s':>8}{'of copy':>9}  tile")
    for case in cases():
        found = sweep(case) if arguments.sweep and case.passes else [(milliseconds(case.run), "")]
        for ms, tried in found:
            rate = case.bytes / ms / 1e9
            print(f"{case.name:<34}{ms:>8.3f}{rate:>8.2f}{rate / ceiling:>9.1%}  {tried}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
