"""FP8 for the experts of transformers' mixture-of-experts models: Mixtral, Qwen3-MoE and others in the same format.

transformers 5 stores all experts of a block in two parameters, `gate_up_proj` `[e, 2f, h]` and `down_proj` `[e, h, f]`.
Their module is called with the tokens and the chosen experts of each token. The converted module sorts the tokens by
expert and computes each product by one `grouped_linear`: every expert is a separate FP8 layer, and one kernel computes
all experts at once.

Shapes: t tokens, k experts chosen by each, e experts, h hidden, f width of an expert, m = t·k rows.
"""

from __future__ import annotations

from functools import cache
from types import MethodType
from typing import Any, cast

import torch
from torch import Tensor, nn

from megafp8.fp8.autocast import in_torch_autocast_dtype
from megafp8.fp8.standalone import StandaloneExperts
from megafp8.linear.grouped_linear import grouped_linear
from megafp8.numerics.groups import RowGroups


def are_experts(module: nn.Module) -> bool:
    """Return whether `module` stores experts in the format described at the top of this module."""
    up, down = (getattr(module, name, None) for name in ("gate_up_proj", "down_proj"))
    if not isinstance(up, nn.Parameter) or not isinstance(down, nn.Parameter) or up.dim() != 3 or down.dim() != 3:
        return False
    (e, f2, h), ordinary = up.shape, {"has_gate": True, "is_concatenated": True, "is_transposed": False}
    ordinary |= {"has_bias": False, "has_post_expert_norm": False, "_is_expert_parallel": False}
    as_expected = all(getattr(module, name, None) is value for name, value in ordinary.items())
    return as_expected and hasattr(module, "_apply_gate") and down.shape == (e, h, f2 // 2)


def convert_experts(module: nn.Module, up: StandaloneExperts, down: StandaloneExperts) -> None:
    """Make `module` compute with the FP8 layers `up` and `down` within `autocast`; `are_experts(module)` must hold."""
    module.fp8_up, module.fp8_down = up, down  # type: ignore[assignment]
    module.forward = MethodType(_forward, module)
    module.__class__ = _watching(type(module))  # type: ignore[arg-type]


class _Watching(nn.Module):
    """Mixin that frees the FP8 copies of a weight when FSDP2 assigns the weight after gathering or freeing it."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("gate_up_proj", "down_proj"):
            layers: StandaloneExperts = vars(self)["fp8_up" if name == "gate_up_proj" else "fp8_down"]
            layers.release_weight()
        super().__setattr__(name, value)


@cache
def _watching(own_class: type[nn.Module]) -> Any:
    """Return a subclass of `_Watching` and `own_class`, with the name of `own_class`."""
    about = {"__module__": own_class.__module__, "__qualname__": own_class.__qualname__}
    return type(own_class.__name__, (_Watching, own_class), about)


def _forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Apply the chosen experts to each token, and return the weighted sums, `[t, h]`.

    Args:
        self: Converted module.
        hidden_states: Tokens, `[t, h]`.
        top_k_index: Experts of each token, `[t, k]`.
        top_k_weights: Weights of these experts, `[t, k]`.
    """
    device, training = hidden_states.device, self.training
    x_th = in_torch_autocast_dtype(hidden_states)
    order_m = top_k_index.flatten().argsort(stable=True)
    token_m = order_m // top_k_index.shape[1]
    ends_e = torch.bincount(top_k_index.flatten(), minlength=self.num_experts).cumsum(0).to(torch.int32)
    groups = RowGroups.from_ends(ends_e, len(token_m))
    with self.fp8_up.running(device, training=training) as up, self.fp8_down.running(device, training=training) as down:
        if up is None or down is None:
            return cast(Tensor, type(self).forward(self, hidden_states, top_k_index, top_k_weights))
        with torch.autocast(device.type, enabled=False):
            gate_up = grouped_linear(x_th[token_m], self.gate_up_proj.flatten(0, 1), groups, up)
            y_mh = grouped_linear(self._apply_gate(gate_up), self.down_proj.flatten(0, 1), groups, down)
            y_mh = y_mh * top_k_weights.flatten()[order_m, None]
            return torch.zeros_like(hidden_states).index_add_(0, token_m, y_mh.to(hidden_states.dtype))
