"""Smooth SwiGLU: the channels of an activation are brought to one size before they are cast.

SwiGLU multiplies two projections of one input. Late in training their weights may align in a few channels, which then
grow by orders of magnitude (Fishman et al. 2024, arXiv:2409.12517). With one factor for the tensor such a channel
decides it, and all others fall below what FP8 can hold. So channel k of the activation a is multiplied by a power of
two s_k before it is cast, and column k of the weight w divided by it before that is cast, which changes no product:

    y  = Q(a · s) Q(w / s)ᵀ
    da = (dy Q(w / s)) · s          dw = (dyᵀ Q(a · s)) / s

What range the activation needs no longer, the weight needs more, and weights have range to spare. They share at most:
s_k goes up to 2^8, half of the fifteen octaves that E4M3 has, and beyond that small channels stay small in a.

s_k is the largest channel's amax over channel k's. The largest channel has s = 1, so neither a's amax nor w's grows by
smoothing, and scales from earlier steps (delayed) or given once (static) fit as they did.

The factors are made at the end of a step from the amaxes noted in it, and stay for the whole next step: the weight's
copies are made once, and every micro-batch, rank and recomputed forward sees the same. Noting is a maximum, so the
order and number of forwards do not matter. In the first step, and in the first after a calibration, all are 1.

Channels are cut over the tensor-parallel ranks. Each rank notes its own in a buffer of all, zeros elsewhere: then one
all-reduce, over everyone who runs the same layers, joins the slices and the data-parallel ranks' maxima, each rank
knows the largest channel, and the state is the same on all, whatever the layout.

What it gives up: where an outlier has small weights, dividing the others' shrinks the whole weight; its delayed scale
takes a history's length to follow, and a static one never does. It costs a second pass over SwiGLU's inputs in
forward, and in backward a weight gradient that is divided by s apart from the GEMM instead of being summed by it.

Shapes: r rows, f channels of this rank; l layers, c channels of all ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megafp8.distributed import collectives
from megafp8.fp8.quantize import scale_from_amax
from megafp8.fp8.quantizers import casts
from megafp8.fp8.sources import Source

MOST = 2.0**8


class ChannelScales:
    """What a layer's input is multiplied by, `scale_f`, and its weight's columns, `scale_inv_f`.

    `newest_amax_f` are the amaxes of the input before that, in the step that runs. All fp32, views of the shared state.
    `recording` is switched off during evaluation.
    """

    def __init__(self, scale_f: Tensor, scale_inv_f: Tensor, newest_amax_f: Tensor) -> None:
        self.scale_f, self.scale_inv_f, self.newest_amax_f = scale_f, scale_inv_f, newest_amax_f
        self.recording = True

    def note(self, source: Source) -> None:
        """Note the channels' amaxes of the input `[r, f]`, not yet multiplied."""
        if self.recording:
            casts(source).raise_column_amax(source, self.newest_amax_f)


class SmoothingState:
    """The factors of the inputs of `layers`, all of `channels` channels, which are cut over the group of each."""

    def __init__(self, layers: dict[str, ProcessGroup | None], channels: int, device: torch.device) -> None:
        self.scale_lc = torch.ones(len(layers), channels, device=device)
        self.scale_inv_lc = torch.ones_like(self.scale_lc)
        self.newest_amax_lc = torch.zeros_like(self.scale_lc)
        self.rows = dict(zip(layers, range(len(layers))))
        self.channel_scales: dict[str, ChannelScales] = {}
        for (name, group), row in zip(layers.items(), self.rows.values(), strict=True):
            f = channels // collectives.size(group)
            first = 0 if group is None else group.rank() * f
            own = (x_lc[row, first : first + f] for x_lc in (self.scale_lc, self.scale_inv_lc, self.newest_amax_lc))
            self.channel_scales[name] = ChannelScales(*own)

    @torch.no_grad()
    def end_step(self, group: ProcessGroup | None) -> None:
        """Renew the factors from the step's amaxes, reduced over `group` (one collective)."""
        amax_lc = collectives.all_reduce(self.newest_amax_lc, group, "max")
        self.scale_lc.copy_(smooth(amax_lc, self.scale_lc))
        self.newest_amax_lc.zero_()
        self.refresh()

    def refresh(self) -> None:
        """Renew the reciprocals: to be called when factors were read from a checkpoint."""
        self.scale_inv_lc.copy_(self.scale_lc.reciprocal())

    def state_dict(self) -> dict[str, Tensor]:
        """Of each layer `fp8.<layer>.input.channel_scale` `[c]`, as a view: reading into it and `refresh` loads it."""
        return {f"fp8.{name}.input.channel_scale": self.scale_lc[row] for name, row in self.rows.items()}


def smooth(amax_lc: Tensor, previous_lc: Tensor) -> Tensor:
    """Powers of two from 1 to `MOST` that bring all channels to the amax of the largest, or less than one octave below.

    A channel whose amax is zero, infinite or NaN keeps its previous factor and does not count as the largest.
    """
    largest_l1 = torch.where(amax_lc.isfinite(), amax_lc, 0.0).amax(dim=1, keepdim=True)
    return scale_from_amax(amax_lc, largest_l1, power_of_two=True, previous=previous_lc).clamp(max=MOST)
