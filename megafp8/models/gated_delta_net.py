"""Gated DeltaNet (Yang et al. 2024, arXiv:2412.06464): linear attention with a state that decays and is corrected.

A head's state S `[d, w]` maps keys to values. Each token lets it decay, replaces what it has for the token's key by
the token's value, as far as the token says, and reads it with the token's query:

    S ← exp(g) S;    S ← S + k (β (v − Sᵀk))ᵀ;    y = Sᵀq        (`recurrence`, token by token, is the specification)

q, k and v come from one column-parallel product, pass a causal convolution of a few tokens in each channel and SiLU,
and q and k are normalized to length 1. β and the decay g come from a product with few outputs, which all ranks compute
of their own tokens. A head's output is normalized, multiplied by SiLU of a gate, and projected. So it is in Qwen3-Next.

*In chunks.* Token by token the GPU would be idle. Within a chunk of c tokens with sums of decays G, what tokens add to
the state, u, solves a triangular system, and the state is read and written once for each chunk:

    (I + A) u = β (v − exp(G) S₀ᵀk),    A_ij = β_i exp(G_i − G_j) k_i·k_j  for j < i
    y_i = exp(G_i) S₀ᵀq_i + Σ_{j ≤ i} exp(G_i − G_j) (q_i·k_j) u_j
    S_c = exp(G_c) S₀ + Σ_j exp(G_c − G_j) k_j u_jᵀ

These are PyTorch's operations, in fp32 or wider, and backward computes them again. What that costs: a dozen passes over
the tokens' channels in fp32, and a loop of the host over chunks.

A document that begins resets the state: decays over a beginning are 0, and the convolution does not see across it.

Shapes: s sequence, b micro-batch, h hidden; k key heads and a value heads of this rank, d and w channels of keys and of
values; n = 2kd + aw channels of the convolution; c tokens of a chunk, m chunks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from megafp8.config import ModelConfig
from megafp8.config.parts.gated_delta_net import GatedDeltaNetConfig
from megafp8.distributed.sharding import Init, shard_dim, unsharded
from megafp8.linear.fusion import LinearInput
from megafp8.linear.linear import linear
from megafp8.models.attention import ATTENTION
from megafp8.models.context import BuildContext, new_parameter, replicated_parameter
from megafp8.models.costs import MicroBatch, Work
from megafp8.models.mixer import Mixer, RecurrentInputs, State, StateCache, Tokens
from megafp8.models.norms import RMSNorm
from megafp8.models.recompute import KEEP_ALL, BlockMemory, recomputed
from megafp8.plan import LinearSite, Neighbor
from megafp8.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megafp8.tensor_parallel.mappings import copy_to_tensor_parallel, gather_from_sequence_parallel

T = TypeVar("T")

CHUNK = 64
"""Tokens of a chunk."""


class GatedDeltaNet(Mixer):
    """Linear attention by the gated delta rule. It reads the norm's values, whatever `input` could give."""

    def __init__(
        self,
        name: str,
        record: GatedDeltaNetConfig,
        config: ModelConfig,
        context: BuildContext,
        *,
        input: Neighbor,
        memory: BlockMemory = KEEP_ALL,
    ) -> None:
        super().__init__()
        t, rank = context.tensor.size(), context.tensor.rank()
        self.context, h, heads = context, config.hidden_size, record.num_value_heads
        self.d, self.w, self.kernel = record.key_head_dim, record.value_head_dim, record.conv_kernel_size
        self.key_heads, self.value_heads, self.first_head = record.num_key_heads // t, heads // t, rank * (heads // t)
        keys, values = record.num_key_heads * self.d, heads * self.w
        widths = {"q": keys, "k": keys, "v": values}
        common, init = context.linear_options(), Init("normal", config.hidden_init_std)
        before = Neighbor("attention_norm", "none", "the decays are computed from the norm's output too")
        self.projection = ColumnParallelLinear(
            f"{name}.qkvz",
            h,
            2 * keys + 2 * values,
            parts={f"{name}.{part}": width for part, width in (widths | {"z": values}).items()},
            init=init,
            site=context.site(before=before, after=ATTENTION),
            **common,
        )
        shards = [x for part in ("beta", "decay") for x in unsharded(f"{name}.{part}.weight", (heads, h))]
        self.gates = replicated_parameter(context, shards, init)
        reason = "decays are few and stay in training.precision"
        self.gates_state = context.fp8.linear(LinearSite(f"{name}.gates", h, 2 * heads, high_precision=reason))
        of_rank = {"replicated_over_tp": False}
        of_heads = of_rank | {"weight_decay": False}
        # As torch's Conv1d has them; three dims, so that they are no matrices to Muon.
        convolutions = [
            shard_dim(f"{name}.{part}_conv.weight", (width, 1, self.kernel), 0, rank, t)
            for part, width in widths.items()
        ]
        self.convolution = new_parameter(context, convolutions, Init("normal", self.kernel**-0.5), **of_rank)
        log_rate = shard_dim(f"{name}.log_rate.weight", (heads,), 0, rank, t)
        self.log_rate = new_parameter(context, [log_rate], Init("log_uniform", low=1.0, high=16.0), **of_heads)
        bias = shard_dim(f"{name}.decay.bias", (heads,), 0, rank, t)
        self.decay_bias = new_parameter(context, [bias], Init("ones"), **of_heads)
        self.norm = RMSNorm(f"{name}.norm", self.w, context, eps=config.norm_eps, sees_a_slice=t > 1)
        self.proj = RowParallelLinear(
            f"{name}.proj",
            values,
            h,
            init=Init("normal", config.output_init_std),
            site=context.site(before=ATTENTION),
            **common,
        )

    @property
    def _channels(self) -> int:
        """Channels of the convolution on this rank."""
        return 2 * self.key_heads * self.d + self.value_heads * self.w

    def inputs(self, layer: int, tokens: Tokens) -> RecurrentInputs:
        return RecurrentInputs(tokens.recurrence(layer))

    def forward(self, x_sbh: Tensor | LinearInput, inputs: RecurrentInputs) -> Tensor:
        gates = linear(x_sbh, self.gates, self.gates_state)
        # Each rank's heads use it, so its gradient is their sum.
        share = gather_from_sequence_parallel if self.context.sequence_sharded else copy_to_tensor_parallel
        gates_sb2a = share(gates, self.context.tensor).unflatten(-1, (2, -1))
        gates_sb2a = gates_sb2a.narrow(-1, self.first_head, self.value_heads)
        qkv_sbn, z_sbc = self.projection(x_sbh).split([self._channels, self.value_heads * self.w], dim=-1)
        y_sbaw = inputs.recurrence(self._advance, (qkv_sbn, gates_sb2a), self._zeros)
        return self.proj(self._run(self._gated, y_sbaw, z_sbc))

    def _gated(self, y_sbaw: Tensor, z_sbc: Tensor) -> Tensor:
        """The heads' outputs, normalized and gated, `[s, b, a·w]`."""
        return (self.norm(y_sbaw) * F.silu(z_sbc.unflatten(-1, (-1, self.w)))).flatten(-2)

    def _zeros(self, b: int) -> State:
        """The state of sequences at their start."""
        device, dtype = self.convolution.device, self.convolution.dtype
        shapes = zip(*self.cache, strict=True)
        assert dtype == self.cache.dtypes[0]
        return tuple(torch.zeros(b, *shape, dtype=kept, device=device) for shape, kept in shapes)

    @property
    def cache(self) -> StateCache:
        """The convolution's last inputs, and the heads' states."""
        dtype = self.convolution.dtype
        shapes = (self.kernel - 1, self._channels), (self.value_heads, self.d, self.w)
        return StateCache(shapes, (dtype, torch.promote_types(dtype, torch.float32)))

    def _advance(self, xs: tuple[Tensor, ...], state: State, starts_sb: Tensor | None) -> tuple[Tensor, State]:
        """From `[s, b, n]` and gates `[s, b, 2, a]` to `[s, b, a, w]`, as `megafp8.models.mixer.Advance`."""
        (qkv_sbn, gates_sb2a), (last_btn, state_badw) = xs, state
        return self._run(self._compute, qkv_sbn, gates_sb2a, last_btn, state_badw, starts_sb)

    @staticmethod
    def _run(function: Callable[..., T], *inputs: Any) -> T:
        return recomputed(function, *inputs) if torch.is_grad_enabled() else function(*inputs)

    def _compute(
        self, qkv_sbn: Tensor, gates_sb2a: Tensor, last_btn: Tensor, state_badw: Tensor, starts_sb: Tensor | None
    ) -> tuple[Tensor, State]:
        convolved, last_btn = convolve(qkv_sbn, self.convolution[:, 0], last_btn, starts_sb)
        keys, wide = self.key_heads * self.d, state_badw.dtype
        q, k, v = F.silu(convolved).to(wide).split([keys, keys, self.value_heads * self.w], dim=-1)
        q, k = (_of_length_one(x.unflatten(-1, (-1, self.d))) for x in (q, k))
        q, k = (x.repeat_interleave(self.value_heads // self.key_heads, dim=2) for x in (q * self.d**-0.5, k))
        beta_sba, decay_sba = gates_sb2a.to(wide).unbind(2)
        decay_sba = -self.log_rate.to(wide).exp() * F.softplus(decay_sba + self.decay_bias.to(wide))
        v = v.unflatten(-1, (-1, self.w))
        y_sbaw, state_badw = in_chunks(q, k, v, decay_sba, beta_sba.sigmoid(), state_badw, starts_sb)
        return y_sbaw.to(qkv_sbn.dtype), (last_btn, state_badw)

    # --- what it keeps and computes ---------------------------------------------------------------------------------

    def saved(self, batch: MicroBatch) -> dict[str, int]:
        m, e, values, heads = batch.tokens, batch.element, self.value_heads * self.w, self.gates.shape[0]
        high = self.projection.state.plan.saved == "high" and batch.tokens == batch.own_tokens
        return {
            "qkvz input": batch.saved_input(self.projection.state),
            "gates' input": 0 if high else batch.own_tokens * self.gates.shape[1] * e,
            "q, k, v, z": m * (self._channels + values) * e,
            "gates": m * heads * e,
            "states at the start": batch.sequences * (self.value_heads * self.d * self.w * 4 + self._channels * 3 * e),
            "recurrence output": m * values * e,
            "proj input": batch.saved_input(self.proj.state),
        }

    def work(self, batch: MicroBatch) -> Work:
        """Passes over queries, keys, values and chunks' matrices in fp32, and of convolution, norm and gate.

        Backward computes all of it once more, and moves as much again. Kernels are counted in a profile of `_compute`.
        """
        heads, chunks = self.value_heads, -(-batch.length // CHUNK)
        # Reads and writes of a channel: normalization, repetition, padding, copies of the operands of products, decays,
        # and the system of equations of a chunk; `CHUNK` numbers of each token are its row of a chunk's matrices.
        per_token = heads * (34 * self.d + 14 * self.w + 20 * CHUNK) + 14 * self.key_heads * self.d + self._channels
        wide = batch.tokens * per_token * max(4, batch.element)
        convolution = (7 + 5 * (self.kernel - 1)) * self._channels
        moved = wide + batch.tokens * (convolution + 4 * heads * self.w) * batch.element
        return Work(moved, 2 * moved, kernels=60 + 19 * chunks, more_in_backward=100 + 36 * chunks)

    def flops(self, batch: MicroBatch) -> float:
        """Read for the key, write, read for the query, and the convolution."""
        return batch.tokens * (6.0 * self.value_heads * self.d * self.w + 2.0 * self.kernel * self._channels)

    def backward_bytes(self, batch: MicroBatch) -> int:
        """What is recomputed and its gradients: queries, keys, values and their like in fp32, and states of chunks."""
        element, heads = max(4, batch.element), self.value_heads
        chunks = batch.sequences * -(-batch.length // CHUNK)
        return element * (batch.tokens * heads * (10 * self.d + 8 * self.w) + 2 * chunks * heads * self.d * self.w)


def _of_length_one(x: Tensor) -> Tensor:
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


def convolve(x_sbn: Tensor, weight_nk: Tensor, last_btn: Tensor, starts_sb: Tensor | None) -> tuple[Tensor, Tensor]:
    """Causal convolution of each channel, `[s, b, n]`, and the inputs that those after need, `[b, t, n]`, t = k - 1.

    `last_btn`: the inputs before these. `starts_sb`: tokens that see nothing before them.
    """
    s, t = len(x_sbn), weight_nk.shape[1] - 1
    padded = torch.cat([last_btn.transpose(0, 1).to(x_sbn.dtype), x_sbn])
    document = None
    if starts_sb is not None:
        document = F.pad(starts_sb.cumsum(0), (0, 0, t, 0))
    y_sbn = x_sbn * weight_nk[:, t]
    for back in range(1, t + 1):
        earlier = padded[t - back : t - back + s]
        if document is not None:
            earlier = earlier * (document[t - back : t - back + s] == document[t:]).unsqueeze(-1)
        y_sbn = y_sbn + earlier * weight_nk[:, t - back]
    last = padded[s:]
    if document is not None:
        last = last * (document[s:] == document[-1]).unsqueeze(-1)
    return y_sbn, last.transpose(0, 1)


def recurrence(
    q_sbad: Tensor, k_sbad: Tensor, v_sbaw: Tensor, decay_sba: Tensor, beta_sba: Tensor, state_badw: Tensor,
    starts_sb: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The gated delta rule token by token: outputs `[s, b, a, w]` and the state after the last token. Specification."""
    outputs = []
    for i, (q, k, v, decay, beta) in enumerate(zip(q_sbad, k_sbad, v_sbaw, decay_sba, beta_sba, strict=True)):
        if starts_sb is not None:
            state_badw = state_badw * ~starts_sb[i][:, None, None, None]
        state_badw = state_badw * decay.exp()[..., None, None]
        known = torch.einsum("badw,bad->baw", state_badw, k)
        state_badw = state_badw + torch.einsum("bad,baw->badw", k, beta.unsqueeze(-1) * (v - known))
        outputs.append(torch.einsum("badw,bad->baw", state_badw, q))
    return torch.stack(outputs), state_badw


def in_chunks(
    q_sbad: Tensor, k_sbad: Tensor, v_sbaw: Tensor, decay_sba: Tensor, beta_sba: Tensor, state_badw: Tensor,
    starts_sb: Tensor | None = None, chunk: int = CHUNK,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`recurrence`, in chunks of so many tokens. All in one dtype, fp32 or wider."""
    s, b = q_sbad.shape[:2]
    c = min(chunk, s)
    padding = -s % c

    def chunks(x: Tensor) -> Tensor:
        """`[m, b, a, c, ...]`; tokens behind the end are zeros, which leave the state as it is."""
        x = F.pad(x, (0, 0) * (x.dim() - 1) + (0, padding)).unflatten(0, (-1, c))
        return x.movedim(1, 3)

    q, k, v, beta = chunks(q_sbad), chunks(k_sbad), chunks(v_sbaw), chunks(beta_sba).unsqueeze(-1)
    sums = chunks(decay_sba).cumsum(-1)
    within, before, after = (sums.unsqueeze(-1) - sums.unsqueeze(-2)), sums, sums[..., -1:] - sums
    over = sums[..., -1]
    causal = torch.ones(c, c, dtype=torch.bool, device=q.device).tril()
    within = torch.where(causal, within, -torch.inf).exp()
    before, after, over = before.exp(), after.exp(), over.exp()
    if starts_sb is not None:  # decays over the beginning of a document are 0
        document = chunks(starts_sb.unsqueeze(-1).expand(s, b, 1).long()).cumsum(-1)
        within = within * (document.unsqueeze(-1) == document.unsqueeze(-2))
        before, over = before * (document == 0), over * (document[..., -1] == 0)
        after = after * (document == document[..., -1:])
    system = (beta * (k @ k.mT) * within).tril(-1)
    right = torch.cat([beta * v, beta * before.unsqueeze(-1) * k], dim=-1)
    # The diagonal is 1, whatever stands there.
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    added, known = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    scores, q, k = (q @ k.mT) * within, q * before.unsqueeze(-1), k * after.unsqueeze(-1)
    outputs = []
    for q_i, k_i, added_i, known_i, scores_i, over_i in zip(q, k, added, known, scores, over, strict=True):
        u = added_i - known_i @ state_badw
        outputs.append(q_i @ state_badw + scores_i @ u)
        state_badw = over_i[..., None, None] * state_badw + k_i.mT @ u
    return torch.stack(outputs).movedim(3, 1).flatten(0, 1)[:s], state_badw
