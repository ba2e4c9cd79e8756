"""`LayerNormMLP`: norm, linear layer, activation, linear layer; casts are fused with the norm and the activation.

Weight rows of a gated activation's first layer are [gate | up] of this rank.

Shapes: x `[..., h]`, the first dim being the sequence where it is sharded; f MLP width of this rank.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.utils.checkpoint import checkpoint as recomputed

from megafp8.linear.fusion import LinearInput
from megafp8.linear.state import QuantizedGradHandoff
from megafp8.nn.arguments import divided, refuse, require
from megafp8.nn.base import (
    Gemm,
    InitMethod,
    Module,
    RngTracker,
    RunningGemm,
    autocast_input,
    default_init,
    opaque,
)
from megafp8.nn.norm import InputNorm
from megafp8.ops.mlp import is_fused, mlp
from megafp8.plan import Neighbor
from megafp8.tensor_parallel.mappings import gather_from_sequence_parallel

ACTIVATIONS = {
    "gelu": "gelu_tanh",
    "geglu": "geglu_tanh",
    "srelu": "squared_relu",
    **{
        name: name for name in ("swiglu", "clamped_swiglu", "relu", "reglu", "sreglu", "qgelu", "qgeglu", "silu", "glu")
    },
}
"""The activation of `megafp8.ops.mlp` for each name of Transformer Engine's, whose GELU is the tanh form."""


class LayerNormMLP(Module):
    """`fc2(activation(fc1(norm(x))))`. The arguments are Transformer Engine's.

    `set_parallel_mode`: shard fc1 by columns and fc2 by rows over `tp_group`. `checkpoint`: keep the input only, and
    run forward again in backward. Other arguments as those of `LayerNormLinear`.
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        eps: float = 1e-5,
        sequence_parallel: bool = False,
        return_bias: bool = False,
        get_rng_state_tracker: RngTracker | None = None,
        tp_group: ProcessGroup | None = None,
        tp_size: int = 1,
        init_method: InitMethod | None = None,
        bias: bool = True,
        normalization: str = "LayerNorm",
        activation: str = "gelu",
        activation_params: dict[str, Any] | None = None,
        output_layer_init_method: InitMethod | None = None,
        fuse_wgrad_accumulation: bool = False,
        params_dtype: torch.dtype | None = None,
        return_layernorm_output: bool = False,
        return_layernorm_output_gathered: bool = False,
        seq_length: int | None = None,
        micro_batch_size: int | None = None,
        set_parallel_mode: bool = False,
        zero_centered_gamma: bool = False,
        device: torch.device | str | None = None,
        ub_overlap_ag: bool = False,
        name: str | None = None,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        delay_wgrad_compute: bool = False,
        symmetric_ar_type: str | None = None,
        checkpoint: bool = False,
    ) -> None:
        refuse(
            self, activation_params=activation_params, ub_overlap_ag=ub_overlap_ag, ub_overlap_rs=ub_overlap_rs,
            ub_overlap_rs_dgrad=ub_overlap_rs_dgrad, ub_bulk_dgrad=ub_bulk_dgrad, ub_bulk_wgrad=ub_bulk_wgrad,
            delay_wgrad_compute=delay_wgrad_compute, symmetric_ar_type=symmetric_ar_type,
        )  # fmt: skip
        require(self, "activation", activation, tuple(ACTIVATIONS))
        super().__init__(
            params_dtype=params_dtype, device=device, tp_group=tp_group, tp_size=tp_size,
            sequence_parallel=sequence_parallel, name=name,
        )  # fmt: skip
        self.use_bias, self.return_bias, self.set_parallel_mode = bias, return_bias, set_parallel_mode
        self.return_layernorm_output = return_layernorm_output
        self.return_layernorm_output_gathered = return_layernorm_output_gathered
        self.checkpoint = checkpoint
        self.kind, gated = ACTIVATIONS[activation], "glu" in activation
        fused = is_fused(self.kind)
        self.activation_adds_bias = bias and fused and not gated
        f = divided(self, "ffn_hidden_size", ffn_hidden_size, self.tp_size)
        fc1_size = 2 * f if gated else f

        self.norm = InputNorm(self, hidden_size, normalization, eps, zero_centered_gamma)
        neighbor = Neighbor(activation, "any" if fused else "none", f"{activation} has no fused kernel")
        self.fc1 = Gemm(
            self, "fc1", "column" if set_parallel_mode else None, fuse_wgrad_accumulation=fuse_wgrad_accumulation,
            adds_bias=bias and not self.activation_adds_bias,
            before=self.norm.neighbor(values_needed=return_layernorm_output), after=neighbor,
        )  # fmt: skip
        self.fc2 = Gemm(
            self, "fc2", "row" if set_parallel_mode else None, fuse_wgrad_accumulation=fuse_wgrad_accumulation,
            adds_bias=bias and not return_bias, before=neighbor,
        )  # fmt: skip
        sharded = set_parallel_mode and self.tp_size > 1
        for layer, gemm, shape, method, dim in (
            ("fc1", self.fc1, (fc1_size, hidden_size), init_method, 0),
            ("fc2", self.fc2, (hidden_size, f), output_layer_init_method, 1),
        ):
            self.new_parameters(
                {f"{layer}_weight": shape}, method or default_init, tracker=get_rng_state_tracker,
                partition_dim=dim if sharded else None, gemm=gemm,
            )  # fmt: skip
            if bias:
                self.new_parameters(
                    {f"{layer}_bias": shape[:1]}, nn.init.zeros_, partition_dim=0 if sharded and dim == 0 else None,
                    sequence_parallel=sharded and dim == 1 and self.sequence_parallel,
                )  # fmt: skip
            else:
                setattr(self, f"{layer}_bias", torch.empty(0, dtype=self.params_dtype, device=self.device))
        self.finish()

    @opaque
    def forward(self, inp: Tensor, is_first_microbatch: bool | None = None) -> Any:
        """`[..., h]` -> the same; then the bias with `return_bias`; then the norm's output, if it is returned."""
        if not self.checkpoint:
            return self._forward(inp, is_first_microbatch)
        return recomputed(self._forward, inp, is_first_microbatch, use_reentrant=False, preserve_rng_state=False)

    def bias_of(self, layer: str) -> Tensor:
        """The bias of "fc1" or "fc2"; empty where there is none."""
        return getattr(self, f"{layer}_bias")

    def _forward(self, inp: Tensor, is_first_microbatch: bool | None) -> Any:
        with (
            autocast_input(inp) as x,
            self.fc1.running(x, ["fc1_weight"], is_first_microbatch) as fc1,
            self.fc2.running(x, ["fc2_weight"], is_first_microbatch) as fc2,
        ):
            normed = self.norm(x, fc1.state.input_format)
            down = partial(fc2.__call__, bias=self.bias_of("fc2") if self.use_bias and not self.return_bias else None)
            y: Tensor = mlp(self.kind, partial(self._fc1, fc1, normed), down, fc1.state, fc2.state)
            results: list[Any] = [y]
            if self.return_bias:
                results.append(self.bias_of("fc2").to(y.dtype))
            if self.return_layernorm_output:
                assert isinstance(normed, Tensor)
                gathered = self.return_layernorm_output_gathered and self.fc1.site.sequence_parallel
                results.append(gather_from_sequence_parallel(normed, self.required_group()) if gathered else normed)
            return y if len(results) == 1 else tuple(results)

    def _fc1(
        self, fc1: RunningGemm, x: Tensor | LinearInput, handoff: QuantizedGradHandoff | None
    ) -> tuple[Tensor, Tensor | None]:
        bias = self.bias_of("fc1") if self.use_bias else None
        if self.activation_adds_bias:
            return fc1(x, handoff), bias
        return fc1(x, handoff, bias), None
