"""End of a delayed-scaling step for all tensors in one launch: compute new scales, and roll histories by one slot.

References: `megafp8.numerics.quantize.scale_from_amax` and `DelayedState.end_step`, bit for bit; the division rounds to
nearest. If `amax_compute_algo` is a Python function, the reference runs instead of this kernel.

PyTorch needs about fifteen kernels, and their launches cost more than their work. Here a program processes one tensor:
its history fits into registers (1024 steps are 4 KiB), so it is loaded once, reduced, and stored one slot further on.

Rolling in place is safe because a row belongs to one program, with a barrier between its loads and its stores. A second
buffer would have to be copied back, because quantizers and checkpoints have views of the first. A ring buffer would
move nothing, but checkpoints store the history newest first. For the few hundred tensors of a rank, rolling moves one
or two megabytes per step, which takes less time than the launch.

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
    """Update the scale of one tensor and roll its history. `headroom` is 2^-margin; SLOTS is at least `length`."""
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
    tl.debug_barrier()  # wait until all threads have loaded the slots that are overwritten below
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
    """Update `scale_t` if `update`, then roll `history_tl` by one slot and set slot 0 to zero, all in place.

    A scale is `fp8_max · 2^-margin / amax`, limited to fp32's maximum. It does not change if the amax is 0, infinite or
    NaN. An amax in slot 0 that is not finite is dropped.

    Args:
        history_tl: Amaxes, contiguous fp32 `[t, l]`, not negative. Slot 0 is already reduced over ranks.
        scale_t: Scales, contiguous fp32 `[t]`.
        fp8_max_t: Largest magnitudes of the formats, contiguous fp32 `[t]`.
        margin: Powers of two left free above the amax.
        power_of_two: Whether scales are rounded down to powers of two.
        algorithm: Whether the amax is the maximum of the history, or the most recent amax.
        update: Whether to update the scales.
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
