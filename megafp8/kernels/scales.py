"""The end of a delayed-scaling step, for all tensors in one launch: new scales, and the histories moved on by one.

Plain PyTorch does it in some fifteen kernels and as many passes over the histories, small ones whose launches cost more
than their work. Here a program takes one tensor: its history fits into registers whole (1024 steps are 4 KiB), so it
loads it once, takes the maximum, and stores it again one slot further on.

Moving in place is safe because nothing is stored before everything is loaded: a row belongs to one program, and a
barrier stands between its loads and its stores. A second buffer would need no barrier, but quantizers and checkpoints
hold views of the first, so it would have to be copied back. A ring with an index would not move anything, but the
history is also what a checkpoint holds, newest first; and for the few hundred tensors of a rank moving is one or two
megabytes a step, which take less time than the launch.

The twins are `megafp8.fp8.quantize` and `DelayedState.end_step`, equal bit for bit; the division rounds to nearest. An
`amax_compute_algo` given as a Python function stays with them.

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
    tl.debug_barrier()  # what is stored below another thread loaded above
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
    """Renew `scale_t` if `update`, then roll `history_tl` by one and zero its slot 0, both in place.

    `history_tl` `[t, l]` contiguous fp32, not negative, slot 0 already reduced over ranks; `scale_t` and `fp8_max_t`
    `[t]` contiguous fp32. The scale is `fp8_max · 2^-margin / amax`, at most fp32's maximum, rounded down to a power
    of two if `power_of_two`; where the amax is 0, infinite or NaN it stays. A slot 0 that is not finite is forgotten.
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
