"""Throughput of the quantize kernels against a copy, on one GPU: `python -m tools.bench_casts [--sweep]`.

Bytes are those that must move: each input once, each output once. `--sweep` tries tiles for each kernel and prints the
best; without it the tiles of `megafp8.fp8.kernels.quantize` are measured.

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
    """A kernel on one shape: what it does, and the bytes that must move."""

    name: str
    source: str
    run: Callable[[], object]
    bytes: int


def cases() -> list[Case]:
    from megafp8.fp8.formats import E4M3, E5M2
    from megafp8.fp8.kernels import normalization, quantize
    from megafp8.fp8.sources import Normalized, Plain, QKVGrad, Source, SwiGLU, SwiGLUGrad

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16)

    x, dy, weight = noise(M, H), noise(M, H), noise(H)
    gate_up, dact = noise(M, 2 * F), noise(M, F)
    w = noise(2 * F, H)
    rstd = torch.rand(M, device="cuda")
    angles = torch.rand(M, 1, 1, 64, device="cuda")
    scale, note = torch.ones((), device="cuda"), torch.zeros((), device="cuda")
    both = {"rows": True, "columns": True}
    blocks = {"power_of_two": True, "eps": 0.0} | both
    current = {"power_of_two": False, "eps": 0.0} | both
    heads = (noise(M, 1, 32, 128), noise(M, 1, 8, 128), noise(M, 1, 8, 128))
    # Each source, and how many elements it reads and makes.
    sources: dict[str, tuple[Source, int, int]] = {
        "plain": (Plain(x), M * H, M * H),
        "rmsnorm": (Normalized(x, rstd, weight), M * H, M * H),
        "swiglu": (SwiGLU(gate_up), 2 * M * F, M * F),
        "swiglu_grad": (SwiGLUGrad(gate_up, dact), 3 * M * F, 2 * M * F),
        "qkv_grad": (QKVGrad(*heads, angles.cos(), angles.sin()), M * 6144, M * 6144),
        "weight": (Plain(w), w.numel(), w.numel()),
    }
    found = []
    for name, (source, reads, writes) in sources.items():
        fmt = E5M2 if name.endswith("grad") else E4M3
        kind = "plain" if name == "weight" else name
        once, twice = 2 * reads + 2 * writes, 4 * reads + 2 * writes  # bytes: bf16 in, rows and columns out
        casts: list[tuple[str, str, Callable[..., object], int]] = [
            ("tensor", kind, lambda s, f: quantize.cast_tensor(s, scale, scale, f, newest_amax=note, **both), once),
            ("current", kind, lambda s, f: quantize.cast_current(s, note, f, **current), once),
            ("amax", "amax", lambda s, f: quantize.amax(s), 2 * reads),
            ("rows (two passes)", kind, lambda s, f: quantize.cast_rows(s, f, **blocks), twice),
            ("bf16", kind, lambda s, f: quantize.materialize(s), once),
        ]
        if name == "weight":
            casts.append(("128x128", "block", lambda s, f: quantize.cast_128x128(s, f, **blocks), once))
        elif name != "qkv_grad":
            casts.append(("1x128", "block", lambda s, f: quantize.cast_1x128(s, f, **blocks), once))
        for what, tile, cast, moved in casts:
            found.append(Case(f"{name} -> {what}", tile, partial(cast, source, fmt), moved))
    add = partial(normalization.statistics, x, dy, 1e-5, centered=False)
    found.append(Case("norm statistics + add", "", add, 6 * M * H))
    found.append(
        Case("norm backward + add", "", partial(normalization.backward, dy, x, None, rstd, weight, x), 8 * M * H)
    )
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


def tiles_to_try(source: str) -> list[Any]:
    """Tiles worth measuring; [None] where there is nothing to choose."""
    from megafp8.fp8.kernels.quantize import Tile

    if source in ("", "qkv_grad"):
        return [None]
    if source == "block":
        return [Tile(128, 128, warps) for warps in (4, 8, 16)]
    if source == "amax":
        shapes = itertools.product((4, 8, 16, 32, 64), (128, 256, 1024, 2048), (4, 8))
        return [Tile(*shape) for shape in shapes if 2048 <= shape[0] * shape[1] <= 16384]
    return [Tile(*shape) for shape in itertools.product((32, 64, 128), (32, 64, 128), (4, 8))]


def use(source: str, tile: Any) -> None:
    """Let the kernel for `source` use `tile` from now on."""
    from megafp8.fp8.kernels import quantize

    if source == "amax":
        quantize._AMAX_TILE = tile
    elif source == "block":
        quantize._BLOCK_WARPS.update(dict.fromkeys(quantize._BLOCK_WARPS, tile.warps))
    else:
        quantize._TILES[source] = tile


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
        found = {}
        for tile in tiles_to_try(case.source) if arguments.sweep else [None]:
            if tile is not None:
                use(case.source, tile)
            found[tile] = milliseconds(case.run)
        for tile, ms in sorted(found.items(), key=lambda item: item[1])[:4]:
            rate = case.bytes / ms / 1e9
            shown = "" if tile is None else tuple(tile)
            print(f"{case.name:<34}{ms:>8.3f}{rate:>8.2f}{rate / ceiling:>9.1%}  {shown}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
