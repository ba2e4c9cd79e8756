"""`GroupedLinear`: linear layers of experts, each applied to consecutive rows of the input; padding of these rows.

Shapes: input x `[m, k]`, output y `[m, n]`, e experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from megafp8.fp8.autocast import current
from megafp8.fp8.standalone import StandaloneExperts
from megafp8.linear.grouped_linear import grouped_linear
from megafp8.nn.arguments import divided, refuse, require
from megafp8.nn.base import (
    PARALLEL_MODES,
    Gemm,
    InitMethod,
    Module,
    RngTracker,
    autocast_input,
    check_fp8_dims,
    default_init,
    opaque,
)
from megafp8.numerics.groups import RowGroups


class GroupedLinear(Module):
    """Linear layers of experts: `y = x wᵀ + b` with one weight and bias for each group of consecutive rows of x.

    The weights are the parameters `weight0`, `weight1`, ... `parallel_mode` determines the shapes of this rank's
    weights, but nothing is communicated, as in Transformer Engine.
    """

    def __init__(
        self,
        num_gemms: int,
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
        device: torch.device | str | None = None,
        ub_overlap_rs: bool = False,
        ub_overlap_ag: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        save_original_input: bool = False,
        single_grouped_weight: bool = False,
        single_grouped_bias: bool = False,
        name: str | None = None,
        use_grouped_tensor: bool | None = None,
    ) -> None:
        refuse(self, locals())
        require(self, "parallel_mode", parallel_mode, PARALLEL_MODES)
        super().__init__(
            params_dtype=params_dtype, device=device, tp_group=tp_group, tp_size=tp_size,
            sequence_parallel=sequence_parallel, name=name or ub_name,
        )  # fmt: skip
        if fuse_wgrad_accumulation or save_original_input:
            what = "fuse_wgrad_accumulation" if fuse_wgrad_accumulation else "save_original_input"
            raise ValueError(f"GroupedLinear: {what} is True; one kernel computes all weights' gradients, use False")
        if self.model_init.enabled:
            raise ValueError(
                "GroupedLinear: it cannot be constructed within fp8.model_init, because kernels read the FP8 data of "
                "all experts as one tensor; construct it within fp8.model_init(enabled=False)"
            )
        self.num_gemms, self.use_bias, self.return_bias = num_gemms, bias, return_bias
        if parallel_mode == "column":
            out_features = divided(self, "out_features", out_features, self.tp_size)
        elif parallel_mode == "row":
            in_features = divided(self, "in_features", in_features, self.tp_size)
        self.in_features, self.out_features, self.parallel_mode = in_features, out_features, parallel_mode
        sharded = parallel_mode is not None and self.tp_size > 1
        self.weight_names = self.new_parameters(
            {f"weight{i}": (out_features, in_features) for i in range(num_gemms)}, init_method or default_init,
            tracker=get_rng_state_tracker, tracker_name=rng_tracker_name,
            partition_dim=None if not sharded else 0 if parallel_mode == "column" else 1,
        )  # fmt: skip
        if bias:
            self.new_parameters({f"bias{i}": (out_features,) for i in range(num_gemms)}, nn.init.zeros_)
        else:
            self.set_empty([f"bias{i}" for i in range(num_gemms)])
        for i in range(num_gemms):
            Gemm(self, f"expert{i}", None, expert=True)
        self.finish()
        assert self.fp8_layers is not None
        self.experts = StandaloneExperts(self.fp8_layers, list(self.fp8_layers.layers))

    @opaque
    def forward(
        self,
        inp: Tensor,
        m_splits: Tensor | Sequence[int],
        is_first_microbatch: bool | None = None,
        out: Tensor | None = None,
        dgrad_out: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, list[Tensor]]:
        """Apply each expert to its rows of `inp`.

        Args:
            inp: Rows of all experts, `[..., k]`, with sum(m_splits) rows in total.
            m_splits: Number of rows of each expert.
            is_first_microbatch: True quantizes the weights again, even if they seem unchanged.
            out: Must be None.
            dgrad_out: Must be None.

        Returns:
            y, `[..., n]`, or `(y, biases)` with `return_bias`.
        """
        refuse(self, locals())
        _check_splits(self, self.num_gemms, m_splits)
        with autocast_input(inp) as x, self.experts.running(x.device, training=self.training) as state:
            x_mk = x.reshape(-1, x.shape[-1]).contiguous()
            sizes_e = torch.as_tensor(m_splits, dtype=torch.int32, device=x.device)
            groups = RowGroups.from_ends(sizes_e.cumsum(0, dtype=torch.int32), len(x_mk))
            weight: Any = self.joined_parameters(self.weight_names)
            if state is not None:
                check_fp8_dims(self, "each expert", (self.out_features, self.in_features))
                if is_first_microbatch and torch._C._current_graph_task_id() == -1:  # not in backward's recomputation
                    state.invalidate_weight()
            y = grouped_linear(x_mk, weight, groups, state)
            biases = [getattr(self, f"bias{i}") for i in range(self.num_gemms)]
            if self.use_bias and not self.return_bias:
                rows = torch.repeat_interleave(torch.stack(biases).to(y.dtype), sizes_e, dim=0, output_size=len(y))
                y = y + rows
            y = y.view(*x.shape[:-1], self.out_features)
            return (y, [bias.to(y.dtype) for bias in biases]) if self.return_bias else y


def _check_splits(module: nn.Module, num_gemms: int, m_splits: Tensor | Sequence[int]) -> None:
    """Raise ValueError unless `m_splits` has one number of rows for each weight."""
    if len(m_splits) != num_gemms:
        raise ValueError(
            f"{type(module).__name__}: m_splits has {len(m_splits)} numbers of rows; num_gemms is {num_gemms}"
        )


class _Padded(nn.Module):
    def __init__(self, num_gemms: int, align_size: int | None = None) -> None:
        super().__init__()
        self.num_gemms, self.align_size = num_gemms, align_size

    def padded(self, m_splits: Sequence[int]) -> list[int]:
        """Return the number of rows of each expert, rounded up to a multiple of `align_size`."""
        _check_splits(self, self.num_gemms, m_splits)
        if self.align_size is None:
            recipe = current().recipe
            recipes = [] if recipe is None else [x for operands in recipe.combinations for x in operands]
            self.align_size = max((x.capabilities.row_multiple for x in recipes), default=16)
        return [-(-rows // self.align_size) * self.align_size for rows in m_splits]


class Fp8Padding(_Padded):
    """Padding of each expert's rows with zeros to a multiple of `align_size`.

    By default, `align_size` is the alignment that the recipe of the current `fp8.autocast` needs. megafp8's
    `GroupedLinear` takes any number of rows, so it needs no padding.
    """

    def forward(self, inp: Tensor, m_splits: list[int]) -> tuple[Tensor, list[int]]:
        """Pad `inp`, `[m, c]`; return the padded rows and the padded number of rows of each expert."""
        padded = self.padded(m_splits)
        if padded == list(m_splits):
            return inp, m_splits
        parts = inp.view(-1, inp.shape[-1]).split(list(m_splits))
        return torch.cat([F.pad(x, (0, 0, 0, n - len(x))) for x, n in zip(parts, padded, strict=True)]), padded


class Fp8Unpadding(_Padded):
    """Removal of the rows that `Fp8Padding` added."""

    def forward(self, inp: Tensor, m_splits: list[int]) -> Tensor:
        """Remove the padding rows of `inp`; return `[m, c]`. `m_splits` are the numbers of rows before padding."""
        padded = self.padded(m_splits)
        if padded == list(m_splits):
            return inp
        parts = inp.view(-1, inp.shape[-1]).split(padded)
        return torch.cat([x[:rows] for x, rows in zip(parts, m_splits, strict=True)])
