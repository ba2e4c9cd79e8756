"""`LayerNormMLP`: norm, linear layer, activation, linear layer. Norm and activation are fused with quantization.

With a gated activation, the weight rows of the first layer are [gate | up] of this rank.

Shapes: x `[..., h]`; f MLP width of this rank. With sequence parallelism the first dim is the sequence.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils.checkpoint import checkpoint as recomputed

from megafp8.layers.mlp.op import is_fused, mlp
from megafp8.nn.arguments import divided, refuse, require
from megafp8.nn.base import Gemm, InitMethod, Module, RngTracker, autocast_input, opaque
from megafp8.nn.norm import InputNorm
from megafp8.plan import Neighbor

ACTIVATIONS = {
    "gelu": "gelu_tanh",
    "geglu": "geglu_tanh",
    "srelu": "squared_relu",
    **{
        name: name for name in ("swiglu", "clamped_swiglu", "relu", "reglu", "sreglu", "qgelu", "qgeglu", "silu", "glu")
    },
}
"""Activation in `megafp8.layers.mlp.op` for each Transformer Engine name. GELU is the tanh approximation there."""


class LayerNormMLP(Module):
    """Norm and MLP, `fc2(activation(fc1(norm(x))))`.

    The arguments are the same as in Transformer Engine. Most mean the same as in `LayerNormLinear`. In addition:

    - `activation`: One of the names in `ACTIVATIONS`.
    - `set_parallel_mode`: Shard fc1 by columns and fc2 by rows over `tp_group`.
    - `checkpoint`: Save only the input, and run forward again in backward.
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
        refuse(self, locals())
        require(self, "activation", activation, tuple(ACTIVATIONS))
        super().__init__(
            params_dtype=params_dtype, device=device, tp_group=tp_group, tp_size=tp_size,
            sequence_parallel=sequence_parallel, name=name,
        )  # fmt: skip
        self.return_bias, self.checkpoint = return_bias, checkpoint
        self.kind, gated = ACTIVATIONS[activation], "glu" in activation
        fused = is_fused(self.kind)
        self.activation_adds_bias = bias and fused and not gated
        f = divided(self, "ffn_hidden_size", ffn_hidden_size, self.tp_size)

        self.norm = InputNorm(
            self, hidden_size, normalization, eps, zero_centered=zero_centered_gamma, returned=return_layernorm_output,
            gathered=return_layernorm_output_gathered,
        )  # fmt: skip
        neighbor = Neighbor(activation, "any" if fused else "none", f"{activation} has no fused kernel")
        self.fc1 = Gemm(
            self, "fc1", "column" if set_parallel_mode else None, fuse_wgrad_accumulation=fuse_wgrad_accumulation,
            adds_bias=bias and not self.activation_adds_bias,
            before=self.norm.neighbor, after=neighbor,
        )  # fmt: skip
        self.fc2 = Gemm(
            self, "fc2", "row" if set_parallel_mode else None, fuse_wgrad_accumulation=fuse_wgrad_accumulation,
            adds_bias=bias and not return_bias, before=neighbor,
        )  # fmt: skip
        rows, tracker = {"fc1_": 2 * f if gated else f}, get_rng_state_tracker
        self.fc1.new_parameters(rows, hidden_size, init_method, tracker, bias=bias)
        self.fc2.new_parameters({"fc2_": hidden_size}, f, output_layer_init_method, tracker, bias=bias)
        self.finish()

    @opaque
    def forward(self, inp: Tensor, is_first_microbatch: bool | None = None) -> Any:
        """Apply norm and MLP to `inp`, `[..., h]`.

        Args:
            inp: Input, `[..., h]`.
            is_first_microbatch: True quantizes the weights again, even if they seem unchanged. With
                `fuse_wgrad_accumulation` it also starts `main_grad` from zero.

        Returns:
            y, `[..., h]`, or a tuple of y, the bias of fc2 if `return_bias` is set, and the norm's output if
            `return_layernorm_output` is set.
        """
        if not self.checkpoint:
            return self._forward(inp, is_first_microbatch)
        return recomputed(self._forward, inp, is_first_microbatch, use_reentrant=False, preserve_rng_state=False)

    def _forward(self, inp: Tensor, is_first_microbatch: bool | None) -> Any:
        with (
            autocast_input(inp) as x,
            self.fc1.running(x, is_first_microbatch) as fc1,
            self.fc2.running(x, is_first_microbatch) as fc2,
        ):
            normed = self.norm(x, fc1.state.input_format)
            activation_bias = self.fc1.bias() if self.activation_adds_bias else None
            y: Tensor = mlp(
                self.kind, lambda handoff: (fc1(normed, handoff), activation_bias), fc2.__call__, fc1.state, fc2.state
            )
            return self.norm.results(y, self.fc2.bias() if self.return_bias else None, normed, self.fc1.site)
