"""Base of mixers that use the delta rule: every token decays and corrects the state of each head.

The state S `[d, w]` of a head maps keys to values. Each token makes the state decay, moves the value stored for the
token's key towards the token's value by a fraction β, and reads the state with its query:

    S ← exp(g) S;    S ← S + k (β (v − Sᵀk))ᵀ;    y = Sᵀq        (`megafp8.layers.delta_rule.op`)

q, k and v first pass a causal convolution over a few tokens in each channel and SiLU; q and k are then normalized to
length 1. There is one decay g = −exp(log rate) softplus(decay + bias) per head, or per key channel. The output of a
head is normalized, multiplied by a function of a gate, and projected. A token may correct the state in several steps,
each with its own k, v and β.

Backward recomputes the recurrence and the convolution. Forward saves q, k and v as they are before the convolution.

Shapes: s sequence length, i steps per token, z = i·s steps, b micro-batch size, h hidden size; k key heads and a value
heads on this rank, d and w channels of keys and of values; n = kd + i(kd + aw) channels of the convolution.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from megafp8.layers.build import PartBuild
from megafp8.layers.costs import KernelWork, MicroBatch
from megafp8.layers.delta_rule.op import CHUNK, delta_rule, kernel_name, kernel_passes
from megafp8.layers.norm.gated_op import gated_norm
from megafp8.layers.norm.module import RMSNormPart
from megafp8.layers.recurrent.module import ConvolvedMixer
from megafp8.layers.recurrent.op import State, Transition
from megafp8.layers.recurrent.record import ConvolvedConfig
from megafp8.layers.short_convolution.op import ChannelGroup, convolve_parts, last_inputs
from megafp8.parallel.sharding import Init, Shape


class DeltaRuleMixer(ConvolvedMixer):
    """Linear attention by the delta rule.

    `run` takes q, k and v `[s, b, n]`, decays `[s, b, a]` or `[s, b, a·d]`, and β `[s, b, i, a]` (`corrections`).

    Args:
        build: Arguments of the constructor of each part.
        key_heads: Number of heads of queries and keys on all ranks.
        value_heads: Number of heads of values on all ranks.
        d: Channels of a key.
        w: Channels of a value.
        decay_shape: Shape of a head's decays: `()` or `(d,)`.
        decay_init: Initialization of the decay biases.
        norm_eps: Number added to the mean square in the norm of outputs.
        most: Largest value of β.
        steps: Number of steps in which a token corrects the state.
    """

    #: Whether the gate of the outputs is SiLU; otherwise it is the sigmoid.
    silu: ClassVar[bool]
    #: Number of gates of single channels per token on this rank (`corrections`).
    channel_gates: int = 0

    def __init__(
        self, build: PartBuild[ConvolvedConfig], *, key_heads: int, value_heads: int, d: int, w: int,
        decay_shape: Shape, decay_init: Init, norm_eps: float, most: float = 1.0, steps: int = 1,
    ) -> None:  # fmt: skip
        super().__init__()
        context = build.context
        t, rank = context.tensor.size(), context.tensor.rank()
        self.context, self.d, self.w, self.decay_shape, self.most = context, d, w, decay_shape, most
        self.steps = steps
        self.key_heads, self.value_heads, self.first_head = key_heads // t, value_heads // t, rank * (value_heads // t)
        self.widths = {"q": key_heads * d}
        for step in step_names(steps):
            self.widths |= {f"k{step}": key_heads * d, f"v{step}": value_heads * w}
        self.add_convolution(build, self.widths)
        self.log_rate = build.parameter("log_rate.weight", Init("log_uniform", low=1.0, high=16.0), value_heads)
        self.decay_bias = build.parameter("decay.bias", decay_init, value_heads * torch.Size(decay_shape).numel())
        self.norm = RMSNormPart(f"{build.name}.norm", w, context, eps=norm_eps, sees_a_slice=t > 1)
        self.proj = build.row(value_heads * w)

    @property
    def _channels(self) -> int:
        """Channels of the convolution on this rank."""
        return self.convolution.shape[0]

    def gated(self, y_sbaw: Tensor, z_sbc: Tensor) -> Tensor:
        """Normalize the outputs of heads and multiply them by the gate of `z_sbc`; return `[s, b, a·w]`."""
        return gated_norm(y_sbaw, z_sbc, self.norm.weight, self.norm.eps, silu=self.silu)

    @property
    def _parts(self) -> tuple[ChannelGroup, ...]:
        """Channel groups of the convolution's output: queries, and keys and values of each step."""
        key = ChannelGroup(self.key_heads, self.d, norm=True)
        return key, *(key, ChannelGroup(self.value_heads, self.w)) * self.steps

    @property
    def state_shape(self) -> tuple[int, ...]:
        """Shape of the state of one sequence on this rank, `(a, d, w)`."""
        return self.value_heads, self.d, self.w

    def advance(self, xs: tuple[Tensor, ...], state: State, starts_sb: Tensor | None) -> tuple[Tensor, State]:
        """Advance convolution and recurrence; return the outputs `[s, b, a, w]` and the new state."""
        last_btn, state_badw = state
        (q, k, v, decay, beta, erase), last_btn = self._operands(xs, last_btn, starts_sb)
        y_sbaw, state_badw = delta_rule(q, k, v, decay, beta, state_badw, starts_sb, erase)
        return y_sbaw, (last_btn, state_badw)

    def transition(self, xs: tuple[Tensor, ...], state: State, starts_sb: Tensor | None) -> Transition:
        """Return the affine map of S by all these tokens together, with a matrix `[d, d]` per head."""
        last_btn, zeros_badw = state
        (q, k, v, decay, beta, erase), _ = self._operands(xs, last_btn, starts_sb)
        # The map is S -> T S + U. The zero state gives U; the identity state with values of zero gives T.
        _, added = delta_rule(q, k, v, decay, beta, zeros_badw, starts_sb, erase)
        identity = torch.eye(self.d, dtype=zeros_badw.dtype, device=q.device).expand(*zeros_badw.shape[:2], -1, -1)
        without = v.new_zeros(*v.shape[:3], self.d)
        _, factor = delta_rule(q, k, without, decay, beta, identity.contiguous(), starts_sb, erase)
        return Transition(factor, added)

    def _operands(
        self, xs: tuple[Tensor, ...], last_btn: Tensor, starts_sb: Tensor | None
    ) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None], Tensor]:
        """Return the inputs of the delta rule (q, k, v, decays, β and e), and the last inputs of the convolution."""
        qkv_sbn, decay, gates = xs
        q, *pairs = convolve_parts(qkv_sbn, self.convolution[:, 0], last_btn, starts_sb, self._parts)
        k, v = _in_order(pairs[::2]), _in_order(pairs[1::2])
        last_btn = last_inputs(qkv_sbn, last_btn.shape[1], last_btn, starts_sb)
        wide = torch.promote_types(qkv_sbn.dtype, torch.float32)
        rate = self.log_rate.to(wide).exp().view(-1, *(1 for _ in self.decay_shape))
        decay = F.softplus(decay.to(wide) + self.decay_bias.to(wide)).unflatten(-1, (-1, *self.decay_shape))
        v, beta, erase = self.corrections(k, v, gates)
        return (q, k, v, -rate * decay, beta, erase), last_btn

    def corrections(self, k_zbgd: Tensor, v_zbaw: Tensor, gates: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return values, β `[z, b, a]`, and the keys that look up values if they are not the keys (`delta_rule`)."""
        wide = torch.promote_types(gates.dtype, torch.float32)
        beta_zba = gates.to(wide).transpose(1, 2).flatten(0, 1).sigmoid()
        return v_zbaw, beta_zba if self.most == 1 else self.most * beta_zba, None

    def kernels(self, device: torch.device, length: int, *, documents: bool, prefix: bool) -> str | None:
        """Return the name of the implementation that computes the delta rule on `device`."""
        by_channel, erases = bool(self.decay_shape), self.channel_gates > 0
        name = kernel_name(device, self.convolution.dtype, self.d, self.w, by_channel=by_channel, erases=erases)
        return f"linear attention: {name}"

    # --- what it keeps and computes ---------------------------------------------------------------------------------

    def saved_by_recurrence(self, batch: MicroBatch) -> dict[str, int]:
        """Return the bytes saved for backward after the recurrence, by tensor, without the recurrence's inputs."""
        return {
            "recurrence output": batch.tokens * self.value_heads * self.w * batch.element,
            "proj input": batch.saved_input(self.proj.state),
        }

    def work(self, batch: MicroBatch) -> KernelWork:
        """Return the work of convolution, norm, gate and the delta rule.

        Backward recomputes all of it, and moves the same bytes again for gradients. The numbers of kernels come from a
        profile of `advance`.
        """
        heads, e, by_channel = self.value_heads, batch.element, bool(self.decay_shape)
        decays = heads * torch.Size(self.decay_shape).numel()
        # Forward reads and writes the channels once. Backward does this again, and reads and writes the gradients.
        around = 2 * self._channels + 3 * heads * self.w + 5 * self.channel_gates
        again = 8 * self._channels + 5 * heads * self.w + 14 * self.channel_gates
        times = kernel_passes(e, self.d, self.w, by_channel=by_channel, erases=self.channel_gates > 0)
        if times is not None:
            rule = heads * (self.d + self.w) * e
            moved = [(self.steps * (passes * rule + n * decays) + other * e) * batch.tokens
                     for passes, other, n in zip(times, (around, again), (32, 80))]  # fmt: skip
            return KernelWork(moved[0], moved[1], kernels=40, more_in_backward=60)
        chunks = -(-self.steps * batch.length // CHUNK)
        # Reads and writes of a channel: normalization, repetition, padding, copies of GEMM operands, decays, and the
        # triangular system of a chunk. Each token has a row of `CHUNK` numbers in each matrix of its chunk.
        per_token = heads * (34 * self.d + 14 * self.w + 20 * CHUNK) + 14 * self.key_heads * self.d
        moved_by_torch = batch.tokens * (self.steps * per_token * max(4, e) + around * e)
        return KernelWork(
            moved_by_torch, 2 * moved_by_torch, kernels=60 + 19 * chunks, more_in_backward=100 + 36 * chunks
        )

    @property
    def rule_flops(self) -> float:
        """Model FLOPs per token: one read with the key and one write per step, and one read with the query."""
        return (4.0 * self.steps + 2.0) * self.value_heads * self.d * self.w

    def backward_bytes(self, batch: MicroBatch) -> int:
        """Return the bytes of recomputed tensors and their gradients: q, k, v and similar in fp32, and chunk states."""
        element, heads = max(4, batch.element), self.value_heads
        chunks = batch.sequences * -(-self.steps * batch.length // CHUNK)
        per_token = self.steps * heads * (10 * self.d + 8 * self.w) + 4 * self.channel_gates
        return element * (batch.tokens * per_token + 2 * chunks * heads * self.d * self.w)


def step_names(steps: int) -> list[str]:
    """Return what the names of the parameters of each step end with: nothing, 2, 3, ..."""
    return ["", *map(str, range(2, steps + 1))]


def _in_order(steps: Sequence[Tensor]) -> Tensor:
    """Interleave the steps of all tokens: tensors `[s, b, ...]` -> `[z, b, ...]`, which is `[b, z, ...]` in memory."""
    if len(steps) == 1:
        return steps[0]
    return torch.stack([x.transpose(0, 1) for x in steps], dim=2).flatten(1, 2).transpose(0, 1)
