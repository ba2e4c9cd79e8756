"""`Linear`, a linear layer that may be sharded over tensor-parallel ranks, and `LayerNormLinear`, a norm before it.

Shapes: input x `[..., k]`, output y `[..., n]`. With sequence parallelism the first dim is the sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megafp8.linear.fusion import LinearInput, Recompute, RecomputedInput, as_matrix
from megafp8.linear.state import LinearState
from megafp8.nn.arguments import divided, refuse
from megafp8.nn.base import Gemm, InitMethod, Module, RngTracker, autocast_input, opaque
from megafp8.nn.norm import InputNorm
from megafp8.numerics.sources import Plain
from megafp8.plan import UNKNOWN, Neighbor


class _LinearBase(Module):
    """Base of modules with one linear layer. Weight and bias may consist of several parameters (`parameters_split`)."""

    def _make_linear(
        self,
        in_features: int,
        out_features: int,
        *,
        init_method: InitMethod | None,
        bias: bool,
        return_bias: bool,
        parallel_mode: str | None,
        parameters_split: Sequence[str] | dict[str, int] | None,
        get_rng_state_tracker: RngTracker | None,
        rng_tracker_name: str | None,
        fuse_wgrad_accumulation: bool,
        before: Neighbor,
        recompute_input: bool = False,
    ) -> None:
        self.gemm = Gemm(
            self, "linear", parallel_mode, fuse_wgrad_accumulation=fuse_wgrad_accumulation,
            adds_bias=bias and not return_bias, before=before, recompute_input=recompute_input,
        )  # fmt: skip
        self.in_features, self.out_features = in_features, out_features
        self.use_bias, self.return_bias, self.parallel_mode = bias, return_bias, parallel_mode
        sizes = self._split(out_features, parameters_split)
        if parallel_mode == "column":
            self.out_features = divided(self, "out_features", out_features, self.tp_size)
            sizes = {name: divided(self, f"the size of {name!r}", n, self.tp_size) for name, n in sizes.items()}
        elif parallel_mode == "row":
            self.in_features = divided(self, "in_features", in_features, self.tp_size)
        self.gemm.new_parameters(
            sizes, self.in_features, init_method, get_rng_state_tracker, rng_tracker_name, bias=bias
        )

    def _split(self, out_features: int, split: Sequence[str] | dict[str, int] | None) -> dict[str, int]:
        """Return the number of rows of each parameter over all ranks, by the prefix of its name."""
        if split is None:
            return {"": out_features}
        names = list(split)
        if not names or not all(isinstance(name, str) for name in names):
            raise ValueError(f"{type(self).__name__}: parameters_split is {split!r}; it must name one part or more")
        if not isinstance(split, dict):
            split = {name: divided(self, "out_features", out_features, len(names)) for name in names}
        if sum(split.values()) != out_features:
            raise ValueError(
                f"{type(self).__name__}: parameters_split is {dict(split)!r}, {sum(split.values())} rows in all, but "
                f"out_features is {out_features}"
            )
        return {f"{name.rstrip('_')}_": n for name, n in split.items()}

    def extra_repr(self) -> str:
        """Return the sizes for `repr`, like `nn.Linear`."""
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.use_bias}"


class Linear(_LinearBase):
    """Linear layer, `y = x wᵀ + b`.

    The arguments are the same as in Transformer Engine. `docs/from-transformer-engine.md` describes all of them; the
    most important ones are:

    - `in_features`, `out_features`: Sizes over all tensor-parallel ranks.
    - `parallel_mode`: "column" or "row" shards the weight over `tp_group`; None keeps it whole.
    - `sequence_parallel`: Shard the tokens outside of the layer along the first dim.
    - `parameters_split`: Names, optionally with numbers of rows, of the parameters that form the weight.
    - `return_bias`: Do not add the bias, but return `(y, bias)`.
    - `save_original_input`: Save x itself for backward, and quantize it again there.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: ProcessGroup | None = None,
        tp_size: int = 1,
        get_rng_state_tracker: RngTracker | None = None,
        rng_tracker_name: str | None = None,
        init_method: InitMethod | None = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        parameters_split: Sequence[str] | dict[str, int] | None = None,
        device: torch.device | str | None = None,
        ub_overlap_ag: bool = False,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        symmetric_ar_type: str | None = None,
        save_original_input: bool = False,
        name: str | None = None,
    ) -> None:
        refuse(self, locals())
        super().__init__(
            params_dtype=params_dtype, device=device, tp_group=tp_group, tp_size=tp_size,
            sequence_parallel=sequence_parallel, name=name or ub_name,
        )  # fmt: skip
        self.save_original_input = save_original_input
        self._make_linear(
            in_features, out_features, init_method=init_method, bias=bias, return_bias=return_bias,
            parallel_mode=parallel_mode, parameters_split=parameters_split,
            get_rng_state_tracker=get_rng_state_tracker, rng_tracker_name=rng_tracker_name,
            fuse_wgrad_accumulation=fuse_wgrad_accumulation, before=UNKNOWN, recompute_input=save_original_input,
        )  # fmt: skip
        self.finish()

    @opaque
    def forward(
        self,
        inp: Tensor,
        is_first_microbatch: bool | None = None,
        fp8_output: bool | None = False,
        fp8_grad: bool | None = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Apply the layer to `inp`.

        Args:
            inp: Input, `[..., k]`.
            is_first_microbatch: True quantizes the weight again, even if it seems unchanged. With
                `fuse_wgrad_accumulation` it also starts `main_grad` from zero.
            fp8_output: Must be False or None.
            fp8_grad: Must be False or None.

        Returns:
            y, `[..., n]`, or `(y, bias)` with `return_bias`.
        """
        refuse(self, locals())
        with autocast_input(inp) as x, self.gemm.running(x, is_first_microbatch) as gemm:
            y = gemm(self._kept(x, gemm.state) if self.save_original_input else x)
            return (y, self.gemm.bias().to(y.dtype)) if self.return_bias else y

    def _kept(self, x: Tensor, state: LinearState) -> Tensor | LinearInput:
        """Return x, marked to be saved itself and quantized again in backward if the layer's plan says so."""
        if state.plan.saved != "recompute":
            return x
        group = self.required_group() if state.plan.gather else None
        return LinearInput(x, None, RecomputedInput((as_matrix(x),), Recompute(Plain, None, group)))


class LayerNormLinear(_LinearBase):
    """Norm followed by a linear layer, `y = norm(x) wᵀ + b`. One kernel normalizes and quantizes.

    The arguments are the same as in `Linear` and `LayerNorm`, and:

    - `return_layernorm_output`: Also return the norm's output. The norm is then not fused with the quantization.
    - `return_layernorm_output_gathered`: Return the norm's output of all tokens, gathered over sequence-parallel ranks.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: ProcessGroup | None = None,
        tp_size: int = 1,
        get_rng_state_tracker: RngTracker | None = None,
        init_method: InitMethod | None = None,
        bias: bool = True,
        normalization: str = "LayerNorm",
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        return_layernorm_output: bool = False,
        return_layernorm_output_gathered: bool = False,
        parameters_split: Sequence[str] | dict[str, int] | None = None,
        zero_centered_gamma: bool = False,
        device: torch.device | str | None = None,
        ub_overlap_ag: bool = False,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        symmetric_ar_type: str | None = None,
        name: str | None = None,
    ) -> None:
        refuse(self, locals())
        super().__init__(
            params_dtype=params_dtype, device=device, tp_group=tp_group, tp_size=tp_size,
            sequence_parallel=sequence_parallel, name=name or ub_name,
        )  # fmt: skip
        self.norm = InputNorm(
            self, in_features, normalization, eps, zero_centered=zero_centered_gamma, returned=return_layernorm_output,
            gathered=return_layernorm_output_gathered,
        )  # fmt: skip
        self._make_linear(
            in_features, out_features, init_method=init_method, bias=bias, return_bias=return_bias,
            parallel_mode=parallel_mode, parameters_split=parameters_split,
            get_rng_state_tracker=get_rng_state_tracker, rng_tracker_name=None,
            fuse_wgrad_accumulation=fuse_wgrad_accumulation,
            before=self.norm.neighbor,
        )  # fmt: skip
        self.finish()

    @opaque
    def forward(
        self,
        inp: Tensor,
        is_first_microbatch: bool | None = None,
        fp8_output: bool | None = False,
        fp8_grad: bool | None = False,
    ) -> Any:
        """Apply norm and linear layer to `inp`, `[..., k]`.

        The other arguments are the same as in `Linear.forward`.

        Returns:
            y, `[..., n]`, or a tuple of y, the bias if `return_bias` is set, and the norm's output, `[..., k]`, if
            `return_layernorm_output` is set.
        """
        refuse(self, locals())
        with autocast_input(inp) as x, self.gemm.running(x, is_first_microbatch) as gemm:
            normed = self.norm(x, gemm.state.input_format)
            returned_bias = self.gemm.bias() if self.return_bias else None
            return self.norm.results(gemm(normed), returned_bias, normed, self.gemm.site)
