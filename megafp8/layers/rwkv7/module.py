"""Time mix of RWKV-7 (arXiv:2503.14456): a recurrence with a diagonal-plus-rank-one transition, without a convolution.

    x_i = x + (x of the previous token − x) · μ_i               i: receptance, key, value, decay, learning rate, gate
    r, k, v = projections(x_r, x_k, x_v)                        column-parallel by heads
    g = −exp(−½) σ(λ + up(tanh(down(x_g))))                     logarithm of the decay of each channel
    a = σ(λ + up(down(x_a)))                                    in-context learning rate of each channel
    κ = ξ·k of length 1;   k ← k (1 + (a − 1) α)                removal key; replacement key
    y = recurrence(r, g, k, v, κ, a)                            `megafp8.layers.rwkv7.op`
    output = projection((norm(y) + (r · ρ k) v) · up(σ(down(x_z))))

The weights μ, ξ, α, ρ and both λ have one number per channel. The output of each head is normalized separately (group
norm), with a weight and a bias. The down projections are replicated over tensor-parallel ranks and stay in
training.precision, because the decays depend on them. The paper also adds a residual from the values of the first
layer. It is left out here, because it would couple layers.

Generation stores the last token's input and S. Backward recomputes the recurrence.

Shapes: s sequence length, b micro-batch size, h hidden size; a heads of d channels on this rank, n = ad.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megafp8.layers.build import PartBuild
from megafp8.layers.context import replicated_parameters, replicated_product, sharded_product
from megafp8.layers.costs import KernelWork, MicroBatch
from megafp8.layers.mixer import RecurrentInputs
from megafp8.layers.recurrent.module import RecurrentMixer
from megafp8.layers.recurrent.op import State, Transition
from megafp8.layers.rwkv7.op import CHUNK, in_chunks
from megafp8.layers.rwkv7.record import Rwkv7Config
from megafp8.layers.short_convolution.op import last_inputs
from megafp8.linear.fusion import LinearInput
from megafp8.linear.linear import linear
from megafp8.parallel import collectives
from megafp8.parallel.sharding import Init
from megafp8.parallel.tensor.mappings import gather_from_sequence_parallel
from megafp8.plan import Neighbor

_BEFORE = Neighbor("attention_norm", "none", "the token shift reads the norm's output")
_REASON = "decays, learning rates and gates are few and stay in training.precision"
_DECAY_SCALE = -math.exp(-0.5)


class LowRankProduct(nn.Module):
    """Two linear layers without an activation, h -> rank -> this rank's heads.

    The first is replicated and runs on each tensor-parallel rank's own tokens. The second is column-parallel and runs
    on all tokens.
    """

    def __init__(self, build: PartBuild[Rwkv7Config], layer: str, rank: int, width: int) -> None:
        super().__init__()
        down, h, context = f"{layer}_down", build.model.hidden_size, build.context
        options: Any = {"init": Init("normal", build.model.hidden_init_std), "reason": _REASON}
        self.down, self.down_state = replicated_product(context, build.name, down, {down: rank}, h, **options)
        self.up, self.up_state = sharded_product(context, f"{build.name}.{layer}_up", rank, width, **options)


class Rwkv7(RecurrentMixer):
    """Time mix of RWKV-7.

    The layer always reads the norm's values, even if `input` could quantize them.
    """

    def __init__(self, build: PartBuild[Rwkv7Config]) -> None:
        super().__init__()
        record, context, width = build.record, build.context, build.record.num_heads * build.record.head_dim
        self.context, self.eps, self.d = context, record.norm_eps, record.head_dim
        self.heads = record.num_heads // context.tensor.size()
        shift = {f"{build.name}.shift.weight": (6, build.model.hidden_size)}
        self.shift = replicated_parameters(context, shift, Init("normal", 0.5), weight_decay=False)
        self.r, self.k, self.v = (build.column(x, {x: width}, before=_BEFORE) for x in "rkv")
        ranks = {"decay": record.decay_rank, "rate": record.rate_rank, "gate": record.gate_rank}
        self.decay, self.rate, self.gate = (LowRankProduct(build, *layer, width) for layer in ranks.items())
        ones, zeros = Init("ones"), Init("zeros")
        self.decay_bias, self.rate_bias = (build.parameter(f"{x}.bias", zeros, width) for x in ("decay", "rate"))
        self.removal, self.replacement = (
            build.parameter(f"{x}.weight", ones, width) for x in ("removal", "replacement")
        )
        self.bonus = build.parameter("bonus.weight", zeros, width)
        self.norm = build.parameter("norm.weight", ones, width)
        self.norm_bias = build.parameter("norm.bias", zeros, width)
        self.proj = build.row(width)

    def forward(self, x_sbh: Tensor | LinearInput, inputs: RecurrentInputs) -> Tensor:
        """Return the output of the mixer in the shape of its input. Collective."""
        assert isinstance(x_sbh, Tensor)
        sharded = self.context.sequence_sharded
        whole_sbh = gather_from_sequence_parallel(x_sbh, self.context.tensor) if sharded else x_sbh
        before_sbh = inputs.recurrence(TokenShift(self), (whole_sbh,))
        if sharded:  # the gather sums the gradient of this view over ranks
            before_sbh = collectives.own_slice(before_sbh, self.context.tensor)
        difference_sbh = before_sbh - x_sbh
        r, k, v, decay, rate, gate = (torch.addcmul(x_sbh, difference_sbh, mu_h) for mu_h in self.shift)
        down = [linear(x, part.down, part.down_state) for x, part in ((decay, self.decay), (rate, self.rate))]
        down = [down[0].tanh(), down[1], linear(gate, self.gate.down, self.gate.down_state).sigmoid()]
        products = zip(down, (self.decay, self.rate, self.gate), strict=True)
        decay_sbn, rate_sbn, gate_sbn = (linear(self.shared(x), part.up, part.up_state) for x, part in products)
        # Only generation reads the last input later.
        last_sbh = x_sbh.new_empty(*whole_sbh.shape[:2], 0) if torch.is_grad_enabled() else whole_sbh
        y_sbn = self.run(inputs, self.r(r), self.k(k), self.v(v), decay_sbn, rate_sbn, last_sbh)
        return self.proj(y_sbn * gate_sbn)

    @property
    def state_shape(self) -> tuple[int, ...]:
        """Shape of the state of one sequence on this rank, `(a, d, d)`."""
        return self.heads, self.d, self.d

    @property
    def last_shape(self) -> tuple[int, ...]:
        """Shape of the last input of one sequence, `(1, h)`."""
        return 1, self.shift.shape[1]

    def advance(self, xs: tuple[Tensor, ...], state: State, starts_sb: Tensor | None) -> tuple[Tensor, State]:
        """Run tokens through the recurrence, the norm and the bonus.

        Args:
            xs: r, k, v, the projections for decays and learning rates, all `[s, b, n]`, and the layer's input.
            state: State before the tokens.
            starts_sb: Tokens that begin a document, bool; None if none does.

        Returns:
            Outputs `[s, b, n]`, and the state after the tokens.
        """
        r, decay, k, v, removal, rate = self._operands(xs)
        y_sbad, state_badd = in_chunks(r, decay, k, v, removal, rate, state[1], starts_sb)
        wide, heads = y_sbad.dtype, (self.heads, self.d)
        weight_ad, bias_ad, bonus_ad = (x.to(wide).view(heads) for x in (self.norm, self.norm_bias, self.bonus))
        y_sbad = F.layer_norm(y_sbad, (self.d,), eps=self.eps) * weight_ad + bias_ad
        y_sbad = y_sbad + (r * k * bonus_ad).sum(-1, keepdim=True) * v
        return y_sbad.flatten(-2).to(xs[0].dtype), (xs[-1][-1:].transpose(0, 1), state_badd)

    def transition(self, xs: tuple[Tensor, ...], state: State, starts_sb: Tensor | None) -> Transition:
        """Return the affine map of S by all these tokens together, with a matrix `[d, d]` per head."""
        r, decay, k, v, removal, rate = self._operands(xs)
        # The map is S -> T S + U. The zero state gives U; the identity state with values of zero gives T.
        _, added = in_chunks(r, decay, k, v, removal, rate, state[1], starts_sb)
        identity = torch.eye(self.d, dtype=r.dtype, device=r.device).expand_as(state[1])
        _, factor = in_chunks(r, decay, k, torch.zeros_like(v), removal, rate, identity, starts_sb)
        return Transition(factor, added)

    def _operands(self, xs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return receptance, log decays, replacement keys, values, removal keys and learning rates, `[s, b, a, d]`."""
        wide = torch.promote_types(xs[0].dtype, torch.float32)
        r, k, v, decay, rate = (x.to(wide).unflatten(-1, (self.heads, self.d)) for x in xs[:5])
        decay_bias, rate_bias, removal_ad, replacement_ad = (
            x.to(wide).view(self.heads, self.d)
            for x in (self.decay_bias, self.rate_bias, self.removal, self.replacement)
        )
        rate = (rate + rate_bias).sigmoid()
        decay = _DECAY_SCALE * (decay + decay_bias).sigmoid()
        removal = F.normalize(k * removal_ad, dim=-1)
        return r, decay, k * (1 + (rate - 1) * replacement_ad), v, removal, rate

    def kernels(self, device: torch.device, length: int, *, documents: bool, prefix: bool) -> str | None:
        """Return a text for users: the recurrence has no kernel."""
        return "RWKV-7: PyTorch's operations, slow, because it has no kernel"

    # --- what it keeps and computes ---------------------------------------------------------------------------------

    def saved(self, batch: MicroBatch) -> dict[str, int]:
        """Return the bytes saved for backward, by tensor."""
        m, local, e, n, h = batch.tokens, batch.own_tokens, batch.element, self.heads * self.d, self.shift.shape[1]
        decay, rate, gate = (part.down.shape[0] for part in (self.decay, self.rate, self.gate))
        return {
            "differences to earlier tokens": local * h * e,
            "r, k and v inputs": sum(batch.saved_input(layer.state) for layer in (self.r, self.k, self.v)),
            "downward inputs": 3 * local * h * e,
            "downward outputs": (m * (decay + rate + gate) + local * (decay + gate) * (m != local)) * e,
            "r, k, v, decays, rates": 5 * m * n * e,
            "gate and recurrence output": 2 * m * n * e,
            "proj input": batch.saved_input(self.proj.state),
        }

    def work(self, batch: MicroBatch) -> KernelWork:
        """Return the work of PyTorch's operations: six shifted inputs, and the products of channels in chunks."""
        shifted = 21 * batch.own_tokens * self.shift.shape[1] * batch.element
        bytes_per_channel = (22 * CHUNK + 60) * max(4, batch.element)
        moved = shifted + batch.tokens * self.heads * self.d * bytes_per_channel
        chunks = -(-batch.length // CHUNK)
        return KernelWork(moved, 2.0 * moved, kernels=70 + 9 * chunks, more_in_backward=100 + 18 * chunks)

    @property
    def rule_flops(self) -> float:
        """Model FLOPs per token: a read with the removal key, a removal, a write, and a read with the receptance."""
        return 8.0 * self.heads * self.d * self.d

    def backward_bytes(self, batch: MicroBatch) -> int:
        """Return the bytes of recomputed tensors and their gradients: products of a chunk's channels, in fp32."""
        return max(4, batch.element) * batch.tokens * self.heads * self.d * (8 * CHUNK + 30)


@dataclass(frozen=True)
class TokenShift:
    """Recurrent rule in which each token reads the previous token's input. S does not change."""

    mixer: Rwkv7

    def zeros(self, b: int) -> State:
        """Return the state of `b` sequences at their start."""
        return self.mixer.zeros(b)

    def advance(self, xs: tuple[Tensor, ...], state: State, starts_sb: Tensor | None) -> tuple[Tensor, State]:
        """Return the previous token's input for each token, `[s, b, h]`, zero at the first token of a document."""
        before_sbh = torch.cat([state[0].transpose(0, 1).to(xs[0].dtype), xs[0][:-1]])
        return before_sbh if starts_sb is None else before_sbh.masked_fill(starts_sb.unsqueeze(-1), 0.0), state

    def last_inputs(self, xs: tuple[Tensor, ...], starts_sb: Tensor | None) -> Tensor:
        """Return the input of the last token, `[b, 1, h]`."""
        return last_inputs(xs[0], 1, xs[0][:0], starts_sb)

    def transition(self, xs: tuple[Tensor, ...], state: State, starts_sb: Tensor | None) -> None:
        """Return None, because the rule has no S, only a last input."""
