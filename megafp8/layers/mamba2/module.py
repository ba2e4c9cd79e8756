"""Mamba-2, a state space model with one decay per head and token (Dao & Gu 2024, arXiv:2405.21060), as in Nemotron-H.

Heads, and the groups of heads that share b and c, are sharded over the tensor-parallel group. Each rank computes a
smaller model with fewer heads:

    x, b, c, z = projection(input)                step = softplus of a projection, one number per token and head
    x, b, c = silu(convolution(x, b, c))          in each channel, over the last tokens
    y = recurrence(x, step, b, c)                 `megafp8.layers.mamba2.reference`
    output = projection(norm(y · silu(z)))        each group of channels is normalized separately

The projection of the steps is replicated and stays in training.precision, because the decays depend on it.
`megafp8.layers.mamba2.op` chooses the kernels of the recurrence. Backward recomputes convolution, recurrence, norm and
gate.

Shapes: s sequence length, b micro-batch size, h hidden size; a heads of w channels on this rank, g groups, d state
numbers per channel; n = aw + 2gd channels of the convolution.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from megafp8.layers.build import PartBuild
from megafp8.layers.context import replicated_product
from megafp8.layers.costs import KernelWork, MicroBatch
from megafp8.layers.mamba2.op import CHUNK, missing_kernel, state_space
from megafp8.layers.mamba2.record import Mamba2Config
from megafp8.layers.mixer import RecurrentInputs
from megafp8.layers.norm.gated_op import gated_norm
from megafp8.layers.recurrent.module import BEFORE_DECAYS, ConvolvedMixer
from megafp8.layers.recurrent.op import State, Transition
from megafp8.layers.short_convolution.op import ChannelGroup, convolve_parts, last_inputs
from megafp8.linear.fusion import LinearInput
from megafp8.linear.linear import linear
from megafp8.parallel.sharding import Init


class Mamba2(ConvolvedMixer):
    """State space model with one decay per head and token.

    The layer always reads the norm's values, even if `input` could quantize them.
    """

    def __init__(self, build: PartBuild[Mamba2Config]) -> None:
        super().__init__()
        record, model, context = build.record, build.model, build.context
        t, rank = context.tensor.size(), context.tensor.rank()
        self.context, self.record, self.eps = context, record, model.norm.eps
        self.d, self.w, heads = record.state_size, record.head_dim, record.num_heads
        self.heads, self.groups, self.first_head = heads // t, record.num_groups // t, rank * (heads // t)
        inner, shared = heads * self.w, record.num_groups * self.d
        widths = {"x": inner, "b": shared, "c": shared}
        self.projection = build.column("xbcz", widths | {"z": inner}, before=BEFORE_DECAYS)
        self.steps, self.steps_state = replicated_product(
            context, build.name, "step", {"step": heads}, model.hidden_size,
            init=Init("normal", model.hidden_init_std),
            reason="steps are few, decays follow from them, and they stay in training.precision",
        )  # fmt: skip
        self.add_convolution(build, widths, bias=record.conv_bias)
        # Initial decays and steps as in the paper's code.
        self.log_rate = build.parameter("log_rate.weight", Init("log_uniform", low=1.0, high=16.0), heads)
        self.step_bias = build.parameter("step.bias", Init("inverse_softplus", low=1e-3, high=0.1), heads)
        self.skip = build.parameter("skip.weight", Init("ones"), heads)
        self.norm = build.parameter("norm.weight", Init("ones"), inner)
        self.proj = build.row(inner)

    @property
    def _channels(self) -> int:
        """Channels of the convolution on this rank."""
        return self.heads * self.w + 2 * self.groups * self.d

    def forward(self, x_sbh: Tensor | LinearInput, inputs: RecurrentInputs) -> Tensor:
        """Return the output of the mixer in the shape of its input. Collective."""
        steps = linear(x_sbh, self.steps, self.steps_state)
        steps_sba = self.shared(steps).narrow(-1, self.first_head, self.heads)
        xbc_sbn, z_sbc = self.projection(x_sbh).split([self._channels, self.heads * self.w], dim=-1)
        y_sbaw = self.run(inputs, xbc_sbn, steps_sba)
        y_sbgc, weight_gc = y_sbaw.flatten(-2).unflatten(-1, (self.groups, -1)), self.norm.view(self.groups, -1)
        return self.proj(gated_norm(y_sbgc, z_sbc, weight_gc, self.eps, gate_first=True))

    @property
    def state_shape(self) -> tuple[int, ...]:
        """Shape of the state of one sequence on this rank, `(a, d, w)`."""
        return self.heads, self.d, self.w

    @property
    def factor_shape(self) -> tuple[int, ...]:
        """Shape of the transition factor, one number per head, `(a, 1, 1)`."""
        return self.heads, 1, 1

    def advance(self, xs: tuple[Tensor, ...], state: State, starts_sb: Tensor | None) -> tuple[Tensor, State]:
        """Advance convolution and recurrence by x, b and c `[s, b, n]` and steps `[s, b, a]`.

        Returns:
            Outputs `[s, b, a, w]`, and the new state.
        """
        last_btn, state_badw = state
        (x, step, rate, b, c), last_btn = self._operands(xs, last_btn, starts_sb)
        y_sbaw, state_badw = state_space(x, step, rate, b, c, self.skip.to(step.dtype), state_badw, starts_sb)
        return y_sbaw, (last_btn, state_badw)

    def transition(self, xs: tuple[Tensor, ...], state: State, starts_sb: Tensor | None) -> Transition:
        """Return the affine map of S by all these tokens together, with one factor per head."""
        last_btn, zeros_badw = state
        (x, step, rate, b, c), _ = self._operands(xs, last_btn, starts_sb)
        _, added = state_space(x, step, rate, b, c, self.skip.to(step.dtype), zeros_badw, starts_sb)
        kept_ba = (rate * step).sum(0).exp()  # product of all decays
        if starts_sb is not None:
            kept_ba = kept_ba * ~starts_sb.any(0).unsqueeze(-1)
        return Transition(kept_ba[..., None, None], added)

    def _operands(
        self, xs: tuple[Tensor, ...], last_btn: Tensor, starts_sb: Tensor | None
    ) -> tuple[tuple[Tensor, ...], Tensor]:
        """Return x, steps, decay rates, b and c of the recurrence, and the last inputs of the convolution."""
        xbc_sbn, steps_sba = xs
        shared, wide = ChannelGroup(self.groups, self.d), torch.promote_types(xbc_sbn.dtype, torch.float32)
        parts, weight_nk = (ChannelGroup(self.heads, self.w), shared, shared), self.convolution[:, 0]
        x, b, c = convolve_parts(xbc_sbn, weight_nk, last_btn, starts_sb, parts, self.convolution_bias)
        last_btn = last_inputs(xbc_sbn, last_btn.shape[1], last_btn, starts_sb)
        step_sba = F.softplus(steps_sba.to(wide) + self.step_bias.to(wide))
        step_sba = step_sba.clamp(self.record.min_step, self.record.max_step)
        return (x, step_sba, -self.log_rate.to(wide).exp(), b, c), last_btn

    def kernels(self, device: torch.device, length: int, *, documents: bool, prefix: bool) -> str | None:
        """Return a text for users if no kernel computes the recurrence on `device`; otherwise None."""
        missing = missing_kernel(device, self.convolution.dtype, self.d, self.w)
        return None if missing is None else f"Mamba-2: PyTorch's operations, slow, because no kernel fits: {missing}"

    # --- what it keeps and computes ---------------------------------------------------------------------------------

    def saved(self, batch: MicroBatch) -> dict[str, int]:
        """Return the bytes saved for backward, by tensor."""
        m, e, inner, heads = batch.tokens, batch.element, self.heads * self.w, self.steps.shape[0]
        return {
            "xbcz input": batch.saved_input(self.projection.state),
            "steps' input": batch.saved_input_beside(self.projection.state, self.steps.shape[1]),
            "x, b, c, z": m * (self._channels + inner) * e,
            "steps": m * heads * e,
            "recurrence output": m * inner * e,
            "proj input": batch.saved_input(self.proj.state),
        }

    def work(self, batch: MicroBatch) -> KernelWork:
        """Return the work of the convolution, the states and outputs of chunks, and the gated norm.

        Backward recomputes all of it except the norm, then computes the gradients, and reads the states twice.
        """
        inner, states = self.heads * self.w, self._states_of_a_token
        forward = 4 * self._channels + 4 * inner + 2 * states
        backward = 11 * self._channels + 9 * inner + 7 * states
        moved = batch.tokens * batch.element
        return KernelWork(moved * forward, moved * backward, kernels=20, more_in_backward=30)

    @property
    def _states_of_a_token(self) -> float:
        """Number of values per token in the states at the start of chunks."""
        return self.heads * self.d * self.w / CHUNK

    @property
    def rule_flops(self) -> float:
        """Model FLOPs per token to write to the states and read from them."""
        return 4.0 * self.heads * self.d * self.w

    def backward_bytes(self, batch: MicroBatch) -> int:
        """Return the bytes of recomputed tensors and their gradients.

        These are the outputs of the convolution, the outputs of the heads, and the states of chunks.
        """
        token_values = 2 * self._channels + 2 * self.heads * self.w + 2 * self._states_of_a_token
        return round(batch.tokens * token_values * batch.element)
