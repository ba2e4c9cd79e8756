"""Smooth SwiGLU: scale the channels of an activation to similar size before the cast to FP8.

SwiGLU multiplies two projections of one input. Late in training their weights may align in a few channels, which then
grow by orders of magnitude (Fishman et al. 2024, arXiv:2409.12517). With one scale per tensor such a channel determines
it, and all others underflow. So channel k of the activation a is multiplied by a power of two s_k before it is cast,
and column k of the weight w is divided by it before that is cast; the product stays the same:

    y  = Q(a · s) Q(w / s)ᵀ
    da = (dy Q(w / s)) · s          dw = (dyᵀ Q(a · s)) / s

This moves range from the activation to the weight, which has some to spare. s_k is the largest channel's amax over
channel k's, at most 2^8, half of the fifteen octaves of E4M3; beyond that small channels stay small in a. The largest
channel has s = 1, so smoothing increases neither amax, and delayed and static scales remain valid.

s is computed at the end of a step from the amaxes recorded in it, and constant in the next step: the weight is
quantized once, and every micro-batch, rank and recomputed forward uses the same. Recording is a maximum, so the order
and number of forwards do not matter. In the first step, and in the first after a calibration, all s_k are 1.

Channels are sharded over the tensor-parallel ranks. Each rank records its own in a buffer of all, zeros elsewhere: one
max all-reduce, over all ranks that run the same layers, joins the shards and the data-parallel ranks' maxima. Each rank
then knows the largest channel, and the state is the same on all ranks, whatever the layout.

Limits: where an outlier has small weights, dividing the other columns shrinks the whole weight; its delayed scale
follows within an amax history, a static one never does. Cost: a second pass over SwiGLU's inputs in forward, and in
backward a weight gradient that is divided by s after the GEMM instead of being accumulated by it.

Shapes: r rows, f channels of this rank; l layers, c channels of all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megafp8.distributed import collectives
from megafp8.numerics.quantize import scale_from_amax
from megafp8.numerics.quantizers import casts
from megafp8.numerics.sources import Source
from megafp8.numerics.step import NewestAmaxes

MOST = 2.0**8
"""The largest s_k."""


class ChannelScales:
    """One layer's s: its input is multiplied by `scale_f`, its weight's columns by `scale_inv_f`.

    `newest_amax_f`: amaxes of the unscaled input in the running step. All fp32, views of the shared state. `recording`
    is False during evaluation.
    """

    def __init__(self, scale_f: Tensor, scale_inv_f: Tensor, newest_amax_f: Tensor) -> None:
        self.scale_f, self.scale_inv_f, self.newest_amax_f = scale_f, scale_inv_f, newest_amax_f
        self.recording = True

    def note(self, source: Source) -> None:
        """Record the channel amaxes of the unscaled input `[r, f]`."""
        if self.recording:
            casts(source).raise_column_amax(source, self.newest_amax_f)


class SmoothingState:
    """s of the inputs of `layers`, each with `channels` channels, sharded over the layer's group."""

    def __init__(self, layers: dict[str, ProcessGroup | None], channels: int, device: torch.device) -> None:
        self.scale_lc = torch.ones(len(layers), channels, device=device)
        self.scale_inv_lc = torch.ones_like(self.scale_lc)
        self.newest_amax_lc = torch.zeros_like(self.scale_lc)
        self.rows = dict(zip(layers, range(len(layers))))
        self.channel_scales: dict[str, ChannelScales] = {}
        for (name, group), row in zip(layers.items(), self.rows.values(), strict=True):
            f = channels // collectives.size(group)
            first = collectives.rank(group) * f
            views = (x_lc[row, first : first + f] for x_lc in (self.scale_lc, self.scale_inv_lc, self.newest_amax_lc))
            self.channel_scales[name] = ChannelScales(*views)

    def newest_amaxes(self) -> list[NewestAmaxes]:
        return [NewestAmaxes(self.newest_amax_lc)]

    @torch.no_grad()
    def end_step(self, reduced: Sequence[Tensor]) -> None:
        """Update s from the step's amaxes."""
        (amax_lc,) = reduced
        self.scale_lc.copy_(smooth(amax_lc, self.scale_lc))
        self.newest_amax_lc.zero_()
        self.refresh()

    def discard_step(self) -> None:
        """Forget the step's amaxes."""
        self.newest_amax_lc.zero_()

    def refresh(self) -> None:
        """Update the reciprocals; to be called after s was loaded from a checkpoint."""
        self.scale_inv_lc.copy_(self.scale_lc.reciprocal())

    def state_dict(self) -> dict[str, Tensor]:
        """`fp8.<layer>.input.channel_scale` `[c]` of each layer, as views: to load, copy into them and `refresh`."""
        return {f"fp8.{name}.input.channel_scale": self.scale_lc[row] for name, row in self.rows.items()}


def smooth(amax_lc: Tensor, previous_lc: Tensor) -> Tensor:
    """Powers of two from 1 to `MOST` that scale all channels to less than one octave below the largest.

    A channel whose amax is zero, infinite or NaN keeps its previous scale and does not count as the largest.
    """
    largest_l1 = torch.where(amax_lc.isfinite(), amax_lc, 0.0).amax(dim=1, keepdim=True)
    return scale_from_amax(amax_lc, largest_l1, power_of_two=True, previous=previous_lc).clamp(max=MOST)
