"""Recurrent block of Griffin with the RG-LRU (De et al. 2024, arXiv:2402.19427), as in RecurrentGemma.

Heads are sharded over the tensor-parallel group:

    x, z = projection(input)
    x = convolution(x)                            in each channel, over the last tokens
    i, r = gates(x)                               a matrix per head for each gate
    output = projection(recurrence(x, i, r) · gelu(z))          `megafp8.layers.rg_lru.op`

The gates stay in training.precision, because the decays depend on them. Backward recomputes everything between the
projections.

The first token of a sequence is not scaled like later ones. So the last inputs of the convolution have one more
channel, which is 1 after any token and 0 before the first one.

Shapes: s sequence length, b micro-batch size, h hidden size; a heads of w channels on this rank, n = aw; k tokens that
the convolution sees, t = k - 1 tokens before the current one.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megafp8.layers.build import PartBuild
from megafp8.layers.costs import KernelWork, MicroBatch
from megafp8.layers.mixer import RecurrentInputs
from megafp8.layers.recurrent.module import ConvolvedMixer
from megafp8.layers.recurrent.op import State, Transition
from megafp8.layers.recurrent.scan import kernels_of_scan
from megafp8.layers.rg_lru.op import gated_scan, log_decays
from megafp8.layers.rg_lru.record import RgLruConfig
from megafp8.layers.short_convolution.op import convolve, last_inputs
from megafp8.linear.fusion import LinearInput
from megafp8.parallel.sharding import Init


class RgLru(ConvolvedMixer):
    """Gated linear recurrence with one number per channel, between a convolution and an output gate."""

    def __init__(self, build: PartBuild[RgLruConfig]) -> None:
        super().__init__()
        record, inner, heads = build.record, build.record.inner_size, build.record.num_heads
        self.context, self.heads, self.w = build.context, heads // build.context.tensor.size(), inner // heads
        self.projection = build.column("xz", {"x": inner, "z": inner}, bias=record.proj_bias)
        self.input_linear = self.projection.state
        # Initial values as in the paper.
        gates, matrix, weights = ("input_gate", "recurrence_gate"), (self.w, self.w), Init("normal", self.w**-0.5)
        self.gates = nn.ParameterList(
            build.parameter(f"{x}.weight", weights, heads, *matrix, matrix=True) for x in gates
        )
        self.gate_biases = nn.ParameterList(build.parameter(f"{x}.bias", Init("zeros"), heads, self.w) for x in gates)
        self.rate = build.parameter("rate.weight", Init("inverse_softplus", low=1e-3, high=0.1), inner)
        self.add_convolution(build, {"x": inner}, bias=record.conv_bias)
        self.proj = build.row(inner, bias=record.proj_bias)

    def forward(self, x_sbh: Tensor | LinearInput, inputs: RecurrentInputs) -> Tensor:
        """Return the output of the mixer in the shape of its input. Collective."""
        return self.proj(self.run(inputs, *self.projection(x_sbh).chunk(2, dim=-1)))

    @property
    def state_shape(self) -> tuple[int, ...]:
        """Shape of the state of one sequence on this rank, `(n, 1)`."""
        return self.heads * self.w, 1

    @property
    def factor_shape(self) -> tuple[int, ...]:
        """Shape of the transition factor, a diagonal, `(n, 1)`."""
        return self.state_shape

    @property
    def last_shape(self) -> tuple[int, ...]:
        """Shape of the last inputs of the convolution and of their marks, `(t, n + 1)`."""
        t, n = super().last_shape
        return t, n + 1

    def last_inputs(self, xs: tuple[Tensor, ...], starts_sb: Tensor | None) -> Tensor:
        """Return the last inputs of the convolution with their marks, `[b, t, n + 1]`."""
        return _last_inputs(xs[0], self.zeros(xs[0].shape[1])[0], starts_sb)

    def advance(self, xs: tuple[Tensor, ...], state: State, starts_sb: Tensor | None) -> tuple[Tensor, State]:
        """Advance convolution and recurrence by x and z `[s, b, n]`; return the gated outputs and the new state."""
        x_sbn, z_sbn = xs
        states_sbn, _, _ = self._recurrence(x_sbn, state, starts_sb)
        y_sbn = states_sbn * F.gelu(z_sbn.to(states_sbn.dtype), approximate="tanh")
        last_btm = _last_inputs(x_sbn, state[0], starts_sb)
        return y_sbn.to(x_sbn.dtype), (last_btm, states_sbn[-1].unsqueeze(-1).clone())  # a view would keep all states

    def transition(self, xs: tuple[Tensor, ...], state: State, starts_sb: Tensor | None) -> Transition:
        """Return the affine map of S by all these tokens together, with a factor per channel."""
        states_sbn, log_decay_sbn, starts_sb = self._recurrence(xs[0], state, starts_sb)
        factor_bn = log_decay_sbn.sum(0).exp() * ~starts_sb.any(0).unsqueeze(-1)
        return Transition(factor_bn.unsqueeze(-1), states_sbn[-1].unsqueeze(-1).clone())

    def _recurrence(self, x_sbn: Tensor, state: State, starts_sb: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return the states after each token, the logarithms of decays, and the tokens that begin a document."""
        last_btm, state_bn1 = state
        wide, s = state_bn1.dtype, len(x_sbn)
        x = convolve(x_sbn, self.convolution[:, 0], last_btm[..., :-1], starts_sb, self.convolution_bias)
        gates = torch.einsum("sbai,aij->sbaj", x.unflatten(-1, (self.heads, self.w)), torch.cat([*self.gates], -1))
        input_sbn, recurrence_sbn = (
            (gate.to(wide) + bias.to(wide)).flatten(-2)
            for gate, bias in zip(gates.chunk(2, dim=-1), self.gate_biases, strict=True)
        )
        # The first token begins a sequence if no token is before it.
        begins_sb = (last_btm[:, -1, -1] == 0) & (torch.arange(s, device=x.device) == 0).unsqueeze(-1)
        starts_sb = begins_sb if starts_sb is None else begins_sb | starts_sb
        log_decay_sbn = log_decays(recurrence_sbn, self.rate.to(wide))
        states_sbn = gated_scan(x.to(wide), input_sbn, log_decay_sbn, state_bn1.squeeze(-1), starts_sb)
        return states_sbn, log_decay_sbn, starts_sb

    def kernels(self, device: torch.device, length: int, *, documents: bool, prefix: bool) -> str | None:
        """Return a text for users: the recurrence has no kernel."""
        return "RG-LRU: PyTorch's operations, slow, because it has no kernel"

    # --- what it keeps and computes ---------------------------------------------------------------------------------

    def saved(self, batch: MicroBatch) -> dict[str, int]:
        """Return the bytes saved for backward, by tensor."""
        return {
            "xz input": batch.saved_input(self.projection.state),
            "x, z": 2 * batch.tokens * self.heads * self.w * batch.element,
            "proj input": batch.saved_input(self.proj.state),
        }

    def work(self, batch: MicroBatch) -> KernelWork:
        """Return the work of the convolution, the gates, the scan and the output gate, which backward recomputes.

        The passes read and write 80 and 210 fp32 numbers per channel and token, as measured.
        """
        numbers = batch.tokens * self.heads * self.w * max(4, batch.element)
        kernels = 50 + kernels_of_scan(batch.tokens // batch.sequences)
        return KernelWork(80 * numbers, 210 * numbers, kernels, more_in_backward=kernels + 30)

    @property
    def rule_flops(self) -> float:
        """Model FLOPs per token of the gates' matrices."""
        return 4.0 * self.heads * self.w * self.w

    def backward_bytes(self, batch: MicroBatch) -> int:
        """Return the bytes of recomputed tensors and their gradients, 19 fp32 numbers per channel and token."""
        return 19 * batch.tokens * self.heads * self.w * max(4, batch.element)


def _last_inputs(x_sbn: Tensor, last_btm: Tensor, starts_sb: Tensor | None) -> Tensor:
    last_btn = last_inputs(x_sbn, last_btm.shape[1], last_btm[..., :-1], starts_sb)
    return F.pad(last_btn, (0, 1), value=1.0)
