"""End of a delayed-scaling step for all tensors in one launch: new scales, and histories rolled by one.

References: `megafp8.numerics.quantize.scale_from_amax` and `DelayedState.end_step`, bit for bit; the division rounds to
nearest. An `amax_compute_algo` given as a Python function runs there.

PyTorch takes some fifteen kernels, whose launches cost more than their work. Here a program takes one tensor: its
history fits into registers (1024 steps are 4 KiB), so it is loaded once, reduced, and stored one slot further on.

Rolling in place is safe because a row belongs to one program, with a barrier between its loads and its stores. A second
buffer would have to be copied back, since quantizers and checkpoints hold views of the first. A ring buffer would move
nothing, but checkpoints have the history newest first; and for the few hundred tensors of a rank rolling moves one or
two megabytes a step, less time than the launch.

Shapes: t tensors, l steps of history; slot 0 is the step that ends.
"""

from __future__ import annotations

from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from megafp8.kernels.arithmetic import magnitude, next_power_of_2


@triton.jit
def end_step_kernel(history_tl, scale_t, fp8_max_t, length, headroom, UPDATE: tl.constexpr, MOST_RECENT: tl.constexpr,
                    POWER_OF_TWO: tl.constexpr, SLOTS: tl.constexpr):  # fmt: skip
    """One tensor. `headroom` is 2^-margin; `SLOTS` at least `length`."""
    t = tl.program_id(0)
    row = history_tl + t * length
    i = tl.arange(0, SLOTS)
    history = tl.load(row + i, mask=i < length, other=0.0)
    if UPDATE:
        considered = tl.where(i == 0, history, 0.0) if MOST_RECENT else history
        amax = tl.max(magnitude(considered), axis=0)
        usable = (amax > 0.0) & (amax < float("inf"))
        quotient = tl.div_rn(tl.load(fp8_max_t + t) * headroom, tl.where(usable, amax, 1.0))
        scale = tl.minimum(quotient, 3.4028234663852886e38)
        if POWER_OF_TWO:
            scale = (scale.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        tl.store(scale_t + t, tl.where(usable, scale, tl.load(scale_t + t)))
    bad = (i == 0) & (magnitude(history) == float("inf"))
    tl.debug_barrier()  # another thread has loaded what is overwritten below
    tl.store(row + 1 + i, tl.where(bad, 0.0, history), mask=i + 1 < length)
    tl.store(row, 0.0)


def end_step_(
    history_tl: Tensor,
    scale_t: Tensor,
    fp8_max_t: Tensor,
    *,
    margin: int,
    power_of_two: bool,
    algorithm: Literal["max", "most_recent"],
    update: bool,
) -> None:
    """Update `scale_t` if `update`, then roll `history_tl` by one and zero its slot 0, both in place.

    `history_tl` `[t, l]` contiguous fp32, not negative, slot 0 already reduced over ranks; `scale_t` and `fp8_max_t`
    `[t]` contiguous fp32. The scale is `fp8_max · 2^-margin / amax`, at most fp32's maximum, rounded down to a power of
    two if `power_of_two`; it stays where the amax is 0, infinite or NaN. A slot 0 that is not finite is dropped.
    """
    t, length = history_tl.shape
    assert scale_t.shape == fp8_max_t.shape == (t,)
    assert all(x.dtype == torch.float32 and x.is_contiguous() for x in (history_tl, scale_t, fp8_max_t))
    if not t:
        return
    end_step_kernel[(t,)](
        history_tl, scale_t, fp8_max_t, length, 2.0**-margin, UPDATE=update, MOST_RECENT=algorithm == "most_recent",
        POWER_OF_TWO=power_of_two, SLOTS=next_power_of_2(length), num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
