"""Cheap `once_differentiable` for autograd Functions that run many times per step."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch.autograd import function


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate `backward` like torch's `once_differentiable`.

    Unlike torch's decorator, it costs nothing unless second derivatives are requested (`create_graph`).
    """
    checked = function.once_differentiable(backward)

    @wraps(backward)
    def call(ctx: Any, *grads: Any) -> Any:
        return checked(ctx, *grads) if torch.is_grad_enabled() else backward(ctx, *grads)

    return call
