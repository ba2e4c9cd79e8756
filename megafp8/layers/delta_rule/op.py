"""The gated delta rule: a state that decays, is corrected at each token's key, and is read at its query.

A head's state S `[d, w]` maps keys to values. For each token, with decays exp(g), of the head or of each key channel:

    S ← exp(g) S;    S ← S + k (β (v − Sᵀk))ᵀ;    y = Sᵀq        (`recurrence`, token by token, is the specification)

(Yang et al. 2024, arXiv:2412.06464; with a decay for each channel Kimi Delta Attention, arXiv:2510.26692.)

*In chunks.* Token by token the GPU would be idle. Within a chunk of c tokens with sums of decays G, what tokens add to
the state, u, solves a triangular system, and the state is read and written once for each chunk:

    (I + A) u = β (v − (exp(G) S₀)ᵀk),    A_ij = β_i Σ_d exp(G_i − G_j) k_i k_j  for j < i
    y_i = (exp(G_i) S₀)ᵀq_i + Σ_{j ≤ i} (Σ_d exp(G_i − G_j) q_i k_j) u_j
    S_c = exp(G_c) S₀ + Σ_j exp(G_c − G_j) k_j u_jᵀ

`in_chunks` does so by PyTorch's operations, in the inputs' dtype: exact, but a dozen passes over the tokens' channels
and a loop of the host over chunks.

*Kernels* (docs/decisions/0026-recurrent-mixers.md). `delta_rule` takes FlashQLA's where they are installed and fit:
one decay a head, bf16, widths of 128, on Hopper; else, on any GPU in 16 bits, `megafp8.layers.delta_rule.kernel`, to
which a head's decay is that of each of its channels. Neither knows documents inside a sequence; there a beginning has
the decay exp(-50), which leaves 2e-22 of the state before it, less than fp32 can hold beside anything else.

Shapes: s sequence, b micro-batch; a value heads, g key heads, d and w channels of keys and of values; c tokens of a
chunk, m chunks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from megafp8.host.shipped import install_command

CHUNK = 64
"""Tokens of a chunk."""
CHUNK_OF_CHANNELS = 16
"""Tokens of a chunk where each channel has its decay, as c² products of channels are then computed for each."""
_FORGOTTEN = -50.0
_KERNEL_WIDTH = 128
_WITHOUT_FLASH_QLA = f"flash-qla is not installed ({install_command('recurrent')})"


def recurrence(
    q_sbad: Tensor, k_sbad: Tensor, v_sbaw: Tensor, decay: Tensor, beta_sba: Tensor, state_badw: Tensor,
    starts_sb: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The gated delta rule token by token: outputs `[s, b, a, w]` and the state after the last token. Specification.

    `decay`: g, `[s, b, a]` or `[s, b, a, d]`. `starts_sb`: bool, tokens before which the state is zero.
    """
    decay = decay if decay.dim() == 4 else decay.unsqueeze(-1)
    outputs = []
    for i, (q, k, v, g, beta) in enumerate(zip(q_sbad, k_sbad, v_sbaw, decay, beta_sba, strict=True)):
        if starts_sb is not None:
            state_badw = state_badw * ~starts_sb[i][:, None, None, None]
        state_badw = state_badw * g.exp().unsqueeze(-1)
        known = torch.einsum("badw,bad->baw", state_badw, k)
        state_badw = state_badw + torch.einsum("bad,baw->badw", k, beta.unsqueeze(-1) * (v - known))
        outputs.append(torch.einsum("badw,bad->baw", state_badw, q))
    return torch.stack(outputs), state_badw


def in_chunks(
    q_sbad: Tensor, k_sbad: Tensor, v_sbaw: Tensor, decay: Tensor, beta_sba: Tensor, state_badw: Tensor,
    starts_sb: Tensor | None = None, chunk: int | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`recurrence`, in chunks of so many tokens. All in one dtype, fp32 or wider."""
    s, b = q_sbad.shape[:2]
    by_channel = decay.dim() == 4
    c = min(chunk or (CHUNK_OF_CHANNELS if by_channel else CHUNK), s)
    padding = -s % c

    def chunks(x: Tensor) -> Tensor:
        """`[m, b, a, c, ...]`; tokens behind the end are zeros, which leave the state as it is."""
        x = F.pad(x, (0, 0) * (x.dim() - 1) + (0, padding)).unflatten(0, (-1, c))
        return x.movedim(1, 3)

    q, k, v, beta = chunks(q_sbad), chunks(k_sbad), chunks(v_sbaw), chunks(beta_sba).unsqueeze(-1)
    sums = chunks(decay if by_channel else decay.unsqueeze(-1)).cumsum(3)  # [m, b, a, c, d or 1]
    within, before = sums.unsqueeze(-2) - sums.unsqueeze(-3), sums.exp()
    after, over = (sums[..., -1:, :] - sums).exp(), sums[..., -1, :].exp()
    causal = torch.ones(c, c, dtype=torch.bool, device=q.device).tril().unsqueeze(-1)
    within = torch.where(causal, within, -torch.inf).exp()
    if starts_sb is not None:  # decays over the beginning of a document are 0
        document = chunks(starts_sb.unsqueeze(-1).expand(s, b, 1).long()).cumsum(-1)
        within = within * (document.unsqueeze(-1) == document.unsqueeze(-2)).unsqueeze(-1)
        before, over = before * (document == 0).unsqueeze(-1), over * (document[..., -1:] == 0)
        after = after * (document == document[..., -1:]).unsqueeze(-1)

    def products(x: Tensor) -> Tensor:
        """Of x of each token and the decayed keys of those before it in the chunk, `[m, b, a, c, c]`."""
        if not by_channel:
            return (x @ k.mT) * within[..., 0]
        return ((x.unsqueeze(-2) * k.unsqueeze(-3)) * within).sum(-1)

    system = (beta * products(k)).tril(-1)
    right = torch.cat([beta * v, beta * before * k], dim=-1)
    # The diagonal is 1, whatever stands there.
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    added, known = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    scores, q, k = products(q), q * before, k * after
    outputs = []
    for q_i, k_i, added_i, known_i, scores_i, over_i in zip(q, k, added, known, scores, over, strict=True):
        u = added_i - known_i @ state_badw
        outputs.append(q_i @ state_badw + scores_i @ u)
        state_badw = over_i.unsqueeze(-1) * state_badw + k_i.mT @ u
    return torch.stack(outputs).movedim(3, 1).flatten(0, 1)[:s], state_badw


def delta_rule(
    q_sbgd: Tensor, k_sbgd: Tensor, v_sbaw: Tensor, decay: Tensor, beta_sba: Tensor, state_badw: Tensor,
    starts_sb: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`recurrence` of queries and keys of length 1, those of a key head for a / g value heads, by the fastest kernel.

    q, k and v in the model's dtype, all else in fp32 or wider; so are the state, and the outputs as v. Queries are
    scaled by 1/√d here.
    """
    device, dtype, (d, w), by_channel = (
        q_sbgd.device,
        q_sbgd.dtype,
        (q_sbgd.shape[-1], v_sbaw.shape[-1]),
        decay.dim() == 4,
    )
    if len(q_sbgd) > 1 and _missing_flash_qla(device, dtype, d, w, of_channels=by_channel) is None:
        return _flash_qla(q_sbgd, k_sbgd, v_sbaw, _forgetting(decay, starts_sb), beta_sba, state_badw)
    wide, per_key = state_badw.dtype, v_sbaw.shape[2] // q_sbgd.shape[2]
    q, k = (x if per_key == 1 else x.repeat_interleave(per_key, dim=2) for x in (q_sbgd, k_sbgd))
    if len(q_sbgd) > 1 and _missing_kernel(device, dtype, d, w) is None:
        decay = _forgetting(decay, starts_sb)
        channel_decay = decay if by_channel else decay.unsqueeze(-1).expand(*decay.shape, d)
        return InKernels.apply(q, k, v_sbaw, channel_decay, beta_sba, state_badw)
    q, k = q.to(wide), k.to(wide)
    y, state = in_chunks(q * d**-0.5, k, v_sbaw.to(wide), decay, beta_sba, state_badw, starts_sb)
    return y.to(v_sbaw.dtype), state


def kernel_name(device: torch.device, dtype: torch.dtype, d: int, w: int, *, of_channels: bool) -> str:
    """What computes the rule for such tensors, for users. `of_channels`: each channel has a decay."""
    if (missing := _missing_flash_qla(device, dtype, d, w, of_channels=of_channels)) is None:
        return "FlashQLA"
    if (reason := _missing_kernel(device, dtype, d, w)) is None:
        return "Triton" if of_channels else f"Triton, slower than FlashQLA, as {missing}"
    return f"PyTorch's operations, slow, as no kernel fits: {reason}"


def kernel_passes(element: int, d: int, w: int, *, of_channels: bool) -> tuple[float, float] | None:
    """How often the kernels could read and write the heads' keys and values in the time that they take, forward and in
    backward with a second forward; None where none fits. Measured on an H200, our kernels on an H100 and taken to be 6%
    faster on an H200, as before (docs/measurements/2026-11-26-recurrent).

    `element`: bytes of a number of the model; two are taken to be bf16, and FlashQLA to be installed.
    """
    if element != torch.bfloat16.itemsize or max(d, w) > _KERNEL_WIDTH:
        return None
    flash_qla = not of_channels and (d, w) == (_KERNEL_WIDTH, _KERNEL_WIDTH)
    return (10.0, 26.0) if flash_qla else (28.0, 100.0)


def _missing_kernel(device: torch.device, dtype: torch.dtype, d: int, w: int) -> str | None:
    """Why `megafp8.layers.delta_rule.kernel` does not compute such tensors; None where it does."""
    if device.type != "cuda":
        return f"there is none for {device.type}"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"it computes in bf16 and fp16, not in {str(dtype).removeprefix('torch.')}"
    return f"its heads have {_KERNEL_WIDTH} channels or less, not {d} and {w}" if max(d, w) > _KERNEL_WIDTH else None


def _missing_flash_qla(
    device: torch.device, dtype: torch.dtype, d: int, w: int, *, of_channels: bool
) -> str | None:  # fmt: skip
    """Why FlashQLA does not compute such tensors; None where it does."""
    if of_channels:
        return "it has one decay a head"
    if dtype != torch.bfloat16:
        return f"it computes in bf16, not in {str(dtype).removeprefix('torch.')}"
    if (d, w) != (_KERNEL_WIDTH, _KERNEL_WIDTH):
        return f"its heads have {_KERNEL_WIDTH} channels, not {d} and {w}"
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return "it needs a Hopper GPU"
    return None if _flash_qla_function() is not None else _WITHOUT_FLASH_QLA


def _forgetting(decay: Tensor, starts_sb: Tensor | None) -> Tensor:
    """Decays, of which those of tokens that begin a document leave nothing of the state."""
    if starts_sb is None:
        return decay
    return decay.masked_fill(starts_sb.view(*starts_sb.shape, *(1 for _ in decay.shape[2:])), _FORGOTTEN)


class InKernels(Function):
    """`delta_rule` without documents by `megafp8.layers.delta_rule.kernel`, with a decay for each channel.

    Each value head has its queries and keys.
    """

    @staticmethod
    def forward(
        ctx: Any, q_sbad: Tensor, k_sbad: Tensor, v_sbaw: Tensor, decay_sbad: Tensor, beta_sba: Tensor,
        state_badw: Tensor,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        inputs = _kernels().DeltaRuleInputs.from_tensors(q_sbad, k_sbad, v_sbaw, decay_sbad, beta_sba)
        y_bsaw, last_badw, saved = _kernels().forward(inputs, state_badw)
        ctx.save_for_backward(*inputs, *saved)
        ctx.dtypes = [x.dtype for x in (q_sbad, k_sbad, v_sbaw, decay_sbad, beta_sba)]
        return y_bsaw.transpose(0, 1).to(v_sbaw.dtype), last_badw

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_sbaw: Tensor, dlast_badw: Tensor) -> tuple[Tensor, ...]:
        count, tensors = len(ctx.dtypes), ctx.saved_tensors
        inputs, saved = _kernels().DeltaRuleInputs(*tensors[:count]), _kernels().DeltaRuleSaved(*tensors[count:])
        *grads, dfirst = _kernels().backward(inputs, saved, dy_sbaw.transpose(0, 1), dlast_badw)
        return *(x.transpose(0, 1).to(dtype) for x, dtype in zip(grads, ctx.dtypes, strict=True)), dfirst


@cache
def _kernels() -> ModuleType:
    from megafp8.layers.delta_rule import kernel as delta_rule  # needs Triton, which comes with torch's CUDA builds

    return delta_rule


@cache
def _flash_qla_function() -> Callable[..., tuple[Tensor, Tensor]] | None:
    try:
        from flash_qla import chunk_gated_delta_rule
    except ImportError:
        return None
    return chunk_gated_delta_rule


def _flash_qla(
    q_sbgd: Tensor, k_sbgd: Tensor, v_sbaw: Tensor, decay_sba: Tensor, beta_sba: Tensor, state_badw: Tensor
) -> tuple[Tensor, Tensor]:
    function = _flash_qla_function()
    assert function is not None
    sequences = (x.transpose(0, 1) for x in (q_sbgd, k_sbgd, v_sbaw, decay_sba, beta_sba))
    y_bsaw, state_badw = function(*sequences, initial_state=state_badw, output_final_state=True)
    return y_bsaw.transpose(0, 1), state_badw
