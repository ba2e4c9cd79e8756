"""Mamba-1, a selective state space model (Gu & Dao 2023, arXiv:2312.00752), as in Mamba, Falcon Mamba and Jamba.

The channels are sharded over the tensor-parallel group. All channels share b and c, so the ranks add up their parts of
the projection that computes b, c and the low-rank steps, as after a row-parallel layer:

    x, z = projection(input)
    x = silu(convolution(x))                      in each channel, over the last tokens
    dt, b, c = selection(x)                       row-parallel; b and c have d numbers, dt has `step_rank`
    step = up(norm(dt));  b, c = norm(b), norm(c)
    output = projection(recurrence(x, step, z, b, c))     `megafp8.layers.mamba1.op`

The norms are optional. The selection and the steps stay in training.precision, because the decays depend on them.
Backward recomputes the convolution, the recurrence and the gate.

Shapes: s sequence length, b micro-batch size, h hidden size; n channels on this rank, d state numbers per channel.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from megafp8.layers.build import ATTENTION, PartBuild
from megafp8.layers.context import sharded_product
from megafp8.layers.costs import KernelWork, MicroBatch
from megafp8.layers.mamba1.op import SEGMENT, SelectiveTokens, SelectiveWeights, selective_scan, steps
from megafp8.layers.mamba1.record import Mamba1Config
from megafp8.layers.mixer import RecurrentInputs
from megafp8.layers.norm.module import Norm, RMSNormPart, normalized
from megafp8.layers.recurrent.module import ConvolvedMixer
from megafp8.layers.recurrent.op import State, Transition
from megafp8.layers.recurrent.scan import kernels_of_scan
from megafp8.layers.short_convolution.op import ChannelGroup, convolve_parts, last_inputs
from megafp8.linear.fusion import LinearInput
from megafp8.linear.linear import linear
from megafp8.linear.state import InputFormat
from megafp8.parallel.sharding import Init
from megafp8.parallel.tensor.layers import RowParallelLinear

_REASON = "steps, b and c are few, decays follow from them, and they stay in training.precision"


class Mamba1(ConvolvedMixer):
    """Selective state space model with a decay per channel, state number and token."""

    def __init__(self, build: PartBuild[Mamba1Config]) -> None:
        super().__init__()
        name, record, context, inner = build.name, build.record, build.context, build.record.inner_size
        self.context, self.channels = context, inner // context.tensor.size()
        self.d, self.rank = record.state_size, record.step_rank
        self.projection = build.column("xz", {"x": inner, "z": inner}, bias=record.proj_bias)
        self.selection = RowParallelLinear(
            f"{name}.selection", inner, sum(self._selected), init=Init("normal", build.model.hidden_init_std),
            site=context.site(before=ATTENTION), high_precision=_REASON, **context.linear_options(),
        )  # fmt: skip
        self.norms = nn.ModuleList()
        if record.norms != "none":
            options: dict[str, Any] = {"eps": record.norm_eps, "weighted": record.norms == "weighted"}
            options["sees_a_slice"] = context.sequence_sharded
            names = (f"{name}.{part}_norm" for part in ("step", "b", "c"))
            self.norms.extend(RMSNormPart(part, n, context, **options) for part, n in zip(names, self._selected))
        # Initial values as in the paper's code.
        up_init = Init("normal", (3 * self.rank) ** -0.5)
        self.up, self.up_state = sharded_product(
            context, f"{name}.step", self.rank, inner, init=up_init, reason=_REASON
        )
        self.step_bias = build.parameter("step.bias", Init("inverse_softplus", low=1e-3, high=0.1), inner)
        self.log_rate = build.parameter("log_rate.weight", Init("log_range"), inner, self.d)
        self.skip = build.parameter("skip.weight", Init("ones"), inner)
        self.add_convolution(build, {"x": inner}, bias=record.conv_bias)
        self.proj = build.row(inner, bias=record.proj_bias)

    @property
    def _selected(self) -> list[int]:
        """Widths of the low-rank steps, b and c."""
        return [self.rank, self.d, self.d]

    @property
    def input_format(self) -> InputFormat | None:
        """Input format of the projection; None for values."""
        return self.projection.state.input_format

    def forward(self, x_sbh: Tensor | LinearInput, inputs: RecurrentInputs) -> Tensor:
        """Return the output of the mixer in the shape of its input. Collective."""
        x_sbn, z_sbn = self.projection(x_sbh).chunk(2, dim=-1)
        convolved_sbn = self.run(inputs, x_sbn, rule=Convolution(self))
        selected = self.selection(convolved_sbn)
        if self.norms:
            parts = zip(self.norms, selected.split(self._selected, dim=-1), strict=True)
            selected = torch.cat([normalized(cast(Norm, norm), part.contiguous()) for norm, part in parts], dim=-1)
        dt, b_sbd, c_sbd = self.shared(selected).split(self._selected, dim=-1)
        step_sbn = linear(dt, self.up, self.up_state)
        return self.proj(self.run(inputs, x_sbn, convolved_sbn, step_sbn, z_sbn, b_sbd, c_sbd))

    @property
    def state_shape(self) -> tuple[int, ...]:
        """Shape of the state of one sequence on this rank, `(n, d, 1)`."""
        return self.channels, self.d, 1

    @property
    def factor_shape(self) -> tuple[int, ...]:
        """Shape of the transition factor, a diagonal per channel, `(n, d, 1)`."""
        return self.state_shape

    def last_inputs(self, xs: tuple[Tensor, ...], starts_sb: Tensor | None) -> None:
        """Return None, because the rule `Convolution` returns them."""

    def advance(self, xs: tuple[Tensor, ...], state: State, starts_sb: Tensor | None) -> tuple[Tensor, State]:
        """Advance the recurrence by the tensors of `SelectiveTokens`, after the inputs of the convolution in `xs`.

        Returns:
            Outputs `[s, b, n]`, and the new state.
        """
        (x_sbn, *tokens), (last_btn, state_bnd1) = xs, state
        weights = SelectiveWeights(self.step_bias, self.log_rate, self.skip)
        y_sbn, state_bnd = selective_scan(SelectiveTokens(*tokens), weights, state_bnd1.squeeze(-1), starts_sb)
        return y_sbn, (last_inputs(x_sbn, last_btn.shape[1], last_btn, starts_sb), state_bnd.unsqueeze(-1))

    def transition(self, xs: tuple[Tensor, ...], state: State, starts_sb: Tensor | None) -> Transition:
        """Return the affine map of S by all these tokens together, with a factor per channel and state number."""
        _, (_, added) = self.advance(xs, state, starts_sb)
        total_bn = steps(SelectiveTokens(*xs[1:]).step_sbn, self.step_bias, added.dtype).sum(0)
        factor_bnd = (total_bn.unsqueeze(-1) * -self.log_rate.to(added.dtype).exp()).exp()
        if starts_sb is not None:
            factor_bnd = factor_bnd * ~starts_sb.any(0)[:, None, None]
        return Transition(factor_bnd.unsqueeze(-1), added)

    def kernels(self, device: torch.device, length: int, *, documents: bool, prefix: bool) -> str | None:
        """Return a text for users: the recurrence has no kernel."""
        return "Mamba-1: PyTorch's operations, slow, because it has no kernel"

    # --- what it keeps and computes ---------------------------------------------------------------------------------

    def saved(self, batch: MicroBatch) -> dict[str, int]:
        """Return the bytes saved for backward, by tensor."""
        m, local, e, selected = batch.tokens, batch.own_tokens, batch.element, sum(self._selected)
        channel_bytes = m * self.channels * e
        saved = {
            "xz input": batch.saved_input(self.projection.state),
            "x, z": 2 * channel_bytes,
            "convolution's output": channel_bytes,
            "steps, b, c before the recurrence": m * (selected + self.rank) * e + channel_bytes,
            "proj input": batch.saved_input(self.proj.state),
        }
        if self.norms:
            saved["norms of steps, b, c"] = local * selected * e + len(self.norms) * local * batch.statistic
        return saved

    def work(self, batch: MicroBatch) -> KernelWork:
        """Return the work of the convolution and of three passes over states: forward, and two recomputed in backward.

        A pass of the scan reads and writes about 16 fp32 numbers per state number, and the gradients twice this.
        """
        states = 16 * batch.tokens * self.channels * self.d * max(4, batch.element)
        channels = batch.tokens * self.channels * batch.element
        segments = -(-batch.tokens // (batch.sequences * SEGMENT))
        kernels = 20 + segments * (30 + kernels_of_scan(SEGMENT))
        return KernelWork(8 * channels + states, 20 * channels + 4 * states, kernels, more_in_backward=3 * kernels)

    @property
    def rule_flops(self) -> float:
        """Model FLOPs per token to write to the states and read from them."""
        return 4.0 * self.channels * self.d

    def backward_bytes(self, batch: MicroBatch) -> int:
        """Return the bytes of recomputed tensors and their gradients: states of a segment, outputs of all tokens."""
        segment = min(batch.tokens, batch.sequences * SEGMENT)
        states = 10 * segment * self.channels * self.d * max(4, batch.element)
        return states + 3 * batch.tokens * self.channels * batch.element


@dataclass(frozen=True)
class Convolution:
    """Recurrent rule of the convolution before the recurrence, which is a rule of its own. S does not change."""

    mixer: Mamba1

    def zeros(self, b: int) -> State:
        """Return the state of `b` sequences at their start."""
        return self.mixer.zeros(b)

    def advance(self, xs: tuple[Tensor, ...], state: State, starts_sb: Tensor | None) -> tuple[Tensor, State]:
        """Return SiLU of the convolution, `[s, b, n]`, and the state as it was; the recurrence stores last inputs."""
        width = math.gcd(self.mixer.channels, 64)
        parts = (ChannelGroup(self.mixer.channels // width, width),)
        weight_nk, bias_n = self.mixer.convolution[:, 0], self.mixer.convolution_bias
        (y,) = convolve_parts(xs[0], weight_nk, state[0], starts_sb, parts, bias_n)
        return y.flatten(-2).contiguous(), state

    def last_inputs(self, xs: tuple[Tensor, ...], starts_sb: Tensor | None) -> Tensor | None:
        """Return the last inputs of the convolution, `[b, t, n]`."""
        return ConvolvedMixer.last_inputs(self.mixer, xs, starts_sb)

    def transition(self, xs: tuple[Tensor, ...], state: State, starts_sb: Tensor | None) -> None:
        """Return None, because the convolution has no S."""
