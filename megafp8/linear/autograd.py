"""`once_differentiable` for Functions that run many times a step."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch.autograd import function


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """torch's decorator of that name; without its cost where no second derivative is wanted (`create_graph`)."""
    checked = function.once_differentiable(backward)

    @wraps(backward)
    def call(ctx: Any, *grads: Any) -> Any:
        return checked(ctx, *grads) if torch.is_grad_enabled() else backward(ctx, *grads)

    return call
