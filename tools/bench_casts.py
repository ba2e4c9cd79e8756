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

import torch

M, H, F = 8192, 4096, 14336


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
    from megafp8.fp8.sources import Normalized, Plain, QKVGrad, SwiGLU, SwiGLUGrad

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
    mh, mf, wn = M * H, M * F, w.numel()
    current = {"power_of_two": False, "eps": 0.0} | both
    sources = {
        "plain": (Plain(x), 2 * mh, mh), "rmsnorm": (Normalized(x, rstd, weight), 2 * mh, mh),
        "swiglu": (SwiGLU(gate_up), 4 * mf, mf), "swiglu_grad": (SwiGLUGrad(gate_up, dact), 6 * mf, 2 * mf),
        "weight": (Plain(w), 2 * wn, wn),
        "qkv_grad": (QKVGrad(noise(M, 1, 32, 128), noise(M, 1, 8, 128), noise(M, 1, 8, 128), angles.cos(), angles.sin()),
                     2 * M * 6144, M * 6144),
    }  # fmt: skip
    found = []
    for name, (source, read, out) in sources.items():
        kind = "plain" if name == "weight" else name
        fmt = E5M2 if name.endswith("grad") else E4M3

        def tensor(source=source, fmt=fmt):  # type: ignore[no-untyped-def]
            return quantize.cast_tensor(source, scale, scale, fmt, newest_amax=note, **both)

        found.append(Case(f"{name} ⊕ tensor", kind, tensor, read + 2 * out))
        found.append(
            Case(
                f"{name} ⊕ current",
                kind,
                lambda s=source: quantize.cast_current(s, note, E4M3, **current),
                read + 2 * out,
            )
        )
        found.append(Case(f"{name} amax", "amax", lambda source=source: quantize.amax(source), read))
        if name == "weight":
            found.append(
                Case(
                    f"{name} ⊕ 128x128",
                    "block",
                    lambda s=source: quantize.cast_128x128(s, E4M3, **blocks),
                    read + 2 * out,
                )
            )
        else:
            found.append(
                Case(
                    f"{name} ⊕ 1x128", "block", lambda s=source: quantize.cast_1x128(s, E4M3, **blocks), read + 2 * out
                )
            )
        found.append(
            Case(
                f"{name} ⊕ rows (two passes)",
                kind,
                lambda s=source: quantize.cast_rows(s, E4M3, **blocks),
                2 * read + 2 * out,
            )
        )
        found.append(Case(f"{name} -> bf16", kind, lambda s=source: quantize.materialize(s), read + 2 * out))
    found.append(
        Case("norm statistics + add", "", lambda: normalization.statistics(x, dy, 1e-5, centered=False), 6 * mh)
    )
    found.append(Case("norm backward + add", "", lambda: normalization.backward(dy, x, None, rstd, weight, x), 8 * mh))
    return found


def milliseconds(run: Callable[[], object]) -> float:
    from triton.testing import do_bench

    return float(do_bench(run, warmup=10, rep=40, return_mode="median"))


def copy_bandwidth() -> float:
    """TB/s of a large copy, counting bytes read and bytes written."""
    a = torch.randn(2**28, device="cuda", dtype=torch.bfloat16)
    b = torch.empty_like(a)
    return 4 * a.numel() / milliseconds(lambda: b.copy_(a)) / 1e9


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", action="store_true")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("error: this measures a GPU, and torch sees none", file=sys.stderr)
        return 2
    from megafp8.fp8.kernels import quantize

    ceiling = copy_bandwidth()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}: copy {ceiling:.2f} TB/s")
    print(f"{'kernel':<34}{'ms':>8}{'TB/s':>8}{'of copy':>9}  tile")
    for case in cases():
        found = {}
        tiles = [None]
        if arguments.sweep and case.source in quantize._TILES:
            tiles = [quantize.Tile(*t) for t in itertools.product((32, 64, 128), (32, 64, 128), (4, 8))]
        elif arguments.sweep and case.source == "amax":
            tiles = [
                quantize.Tile(*t)
                for t in itertools.product((4, 8, 16, 32, 64), (128, 256, 1024, 2048), (4, 8))
                if t[0] >= 4 and 2048 <= t[0] * t[1] <= 16384
            ]
        elif arguments.sweep and case.source == "block":
            tiles = [quantize.Tile(128, 128, warps) for warps in (4, 8, 16)]
        for tile in tiles:
            if tile is not None:
                quantize._AMAX_TILE = tile if case.source == "amax" else quantize._AMAX_TILE
                if case.source == "block":
                    quantize._BLOCK_WARPS = dict.fromkeys(quantize._BLOCK_WARPS, tile.warps)
                if case.source in quantize._TILES:
                    quantize._TILES[case.source] = tile
            found[tile] = milliseconds(case.run)
        for tile, ms in sorted(found.items(), key=lambda item: item[1])[:4]:
            rate = case.bytes / ms / 1e9
            print(
                f"{case.name:<34}{ms:>8.3f}{rate:>8.2f}{rate / ceiling:>9.1%}  {tuple(tile) if tile else ''}",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
