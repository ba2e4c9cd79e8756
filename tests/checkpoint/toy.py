"""A toy model that exists whole (the truth) and in slices, for any TP×PP×DP layout.

The slices come from `Tensor.chunk` and `torch.cat` and not from the specs that the checkpoint goes by.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megafp8.checkpoint import Rectangles, collect
from megafp8.parallel.sharding import Init, ParamShard, ParamSpec, set_spec, shard_dim, stack_rows, unsharded

LAYERS = 2
QKV = {"q": (16, 4), "k": (8, 4), "v": (8, 4)}
METADATA = {"consumed_samples": 64, "tokens": 4096, "config": {"model": {"layers": LAYERS}}}


def truth(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """The whole tensor `name`; another name has other values."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randn(shape, generator=generator, dtype=torch.float32).to(dtype)


@dataclass
class Toy:
    """What one rank holds: `params` with their values, a moment of each, and the state that is not cut."""

    params: list[nn.Parameter]
    moments: list[Tensor]
    replicated: dict[str, Tensor]

    def state(self) -> dict[str, Rectangles | Tensor]:
        moments = dict(zip(self.params, self.moments))
        return {
            **collect(self.params, lambda param: param, "model."),
            **collect(self.params, moments.__getitem__, "optimizer.exp_avg."),
            **self.replicated,
        }

    def zeroed(self) -> Toy:
        """The same slices with zeros, ready to be loaded."""
        params = []
        for param in self.params:
            params.append(nn.Parameter(torch.zeros_like(param)))
            params[-1].spec = param.spec
        moments = [torch.zeros_like(moment) for moment in self.moments]
        return Toy(params, moments, {name: torch.zeros_like(value) for name, value in self.replicated.items()})

    def equals(self, other: Toy) -> bool:
        """Bit for bit, and nothing is all zeros."""
        ours, theirs = ([*toy.params, *toy.moments, *toy.replicated.values()] for toy in (self, other))
        return len(ours) == len(theirs) and all(torch.equal(a, b) and bool(a.any()) for a, b in zip(ours, theirs))


def _parameter(values: Tensor, pieces: tuple[ParamShard, ...]) -> nn.Parameter:
    return set_spec(nn.Parameter(values.clone()), ParamSpec(pieces, Init("zeros"), replicated_over_tp=False))


def make(rank: int, tp: int, pp: int, dtype: torch.dtype) -> Toy:
    """The slices of `rank`, counted tensor fastest, then pipeline; ranks beyond tp·pp hold copies."""
    t, stage = rank % tp, rank // tp % pp
    params, replicated = [], {"fp8.step": torch.tensor(7, dtype=torch.int64)}
    if stage in (0, pp - 1):  # tied embedding: first and last stage
        values = truth("embedding", (16, 4), dtype).chunk(tp, 0)[t]
        params.append(_parameter(values, (shard_dim("embedding", (16, 4), 0, t, tp),)))
    for layer in range(stage * LAYERS // pp, (stage + 1) * LAYERS // pp):
        prefix = f"layers.{layer}."
        fused = torch.cat([truth(prefix + n, shape, dtype).chunk(tp, 0)[t] for n, shape in QKV.items()])
        params.append(
            _parameter(fused, stack_rows([shard_dim(prefix + n, shape, 0, t, tp) for n, shape in QKV.items()]))
        )
        values = truth(prefix + "proj", (4, 16), dtype).chunk(tp, 1)[t]
        params.append(_parameter(values, (shard_dim(prefix + "proj", (4, 16), 1, t, tp),)))
        params.append(_parameter(truth(prefix + "norm", (4,), dtype), unsharded(prefix + "norm", (4,))))
        replicated[f"fp8.{prefix}amax_history"] = truth(prefix + "amax_history", (16,), torch.float32)
        replicated[f"fp8.{prefix}scale"] = truth(prefix + "scale", (), torch.float32)
    return Toy(params, [2 * param.detach().float() for param in params], replicated)
