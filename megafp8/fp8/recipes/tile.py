"""Tile scaling: one power-of-two scale for each `tile_width` neighbours, 64 by default. GEMMs are emulated."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal

from megafp8.fp8.quantize import quantize_blocks
from megafp8.fp8.recipes.base import Capabilities, Fp8Recipe, Fp8Tensor, PerOperand, format_option, option
from megafp8.fp8.sources import Source
from megafp8.fp8.tensor import Granularity, QuantizedTensor

TILE = Granularity("1x64", 1, 64)


@dataclass(frozen=True, kw_only=True)
class TileScaling(Fp8Recipe):
    """One power of two for each 64 neighbours. `tile_epsilon`: the least amax a scale is made from."""

    name: ClassVar[str] = "tile"
    capabilities: ClassVar[Capabilities] = Capabilities(granularity=PerOperand(TILE, TILE, TILE), shard_alignment=64)

    fp8_format: Literal["hybrid", "e4m3"] = format_option("e4m3")
    tile_epsilon: float = option(0.0, "0 or more", lambda value: value >= 0)

    def cast(self, source: Source, tensor: Fp8Tensor, *, rowwise: bool, columnwise: bool) -> QuantizedTensor:
        fmt = self.format_of(tensor.operand)
        tiles = partial(quantize_blocks, fmt=fmt, granularity=TILE, power_of_two=True, eps=self.tile_epsilon)
        return QuantizedTensor.cast_both(source.values(), tiles, rowwise=rowwise, columnwise=columnwise)
