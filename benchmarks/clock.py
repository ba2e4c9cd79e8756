"""Moments on the device that computes, for benchmarks: CUDA events, waited for later, or the host's clock."""

from __future__ import annotations

import time
from typing import Any

import torch


def now(device: torch.device) -> Any:
    """The moment at which what is queued on `device` will have been done."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def milliseconds(start: Any, end: Any) -> float:
    """Between two moments of one device, which on CUDA must have been waited for."""
    return (end - start) * 1e3 if isinstance(start, float) else start.elapsed_time(end)
