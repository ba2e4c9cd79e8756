"""Gated delta rule: each token decays the state, corrects it at the token's key, and reads it at the token's query.

The state S `[d, w]` of a head maps keys to values. For each token, with decays exp(g) per head or per key channel:

    S ← exp(g) S;    S ← S + k (β (v − Sᵀk))ᵀ;    y = Sᵀq        (`recurrence`, token by token, is the specification)

Papers: Yang et al. 2024, arXiv:2412.06464; with a decay per channel, Kimi Delta Attention, arXiv:2510.26692.

*Two generalizations.* A token may correct the state in n steps, each with its own key, value and β; it decays the state
before the first step and reads it after the last one (Gated DeltaProduct, arXiv:2502.10297). The kernels take the steps
as tokens: a later step decays by exp(0), and the outputs of earlier steps are dropped. A token may also look up the
value to correct with another key e than the key k that it writes to (Gated DeltaNet-2, arXiv:2605.22791):

    S ← S + k (β (v − Sᵀe))ᵀ

*In chunks.* A loop over tokens would leave the GPU idle. Consider a chunk of c tokens, and let G be the running sum of
the decays in it. The additions u of the tokens to the state solve a triangular system, and the state is read and
written only once per chunk:

    (I + A) u = β (v − (exp(G) S₀)ᵀe),    A_ij = β_i Σ_d exp(G_i − G_j) e_i k_j  for j < i
    y_i = (exp(G_i) S₀)ᵀq_i + Σ_{j ≤ i} (Σ_d exp(G_i − G_j) q_i k_j) u_j
    S_c = exp(G_c) S₀ + Σ_j exp(G_c − G_j) k_j u_jᵀ

`in_chunks` computes this with PyTorch's operations in the inputs' dtype. It is exact, but takes a dozen passes over the
channels of the tokens, and the host loops over chunks.

*Kernels* (docs/decisions/0026-recurrent-mixers.md). `delta_rule` uses FlashQLA if it is installed and fits: one decay
per head, bf16, 128 channels, on Hopper. Otherwise it uses `megafp8.layers.delta_rule.kernel` on any GPU with 16-bit
inputs; this kernel takes one decay per channel, so the decay of a head is repeated for each channel. Neither supports
documents inside a sequence. Instead, the first token of a document gets the decay exp(-50). It leaves 2e-22 of the
state before it, which vanishes in fp32 next to any other summand.

Shapes: s sequence length, z = n·s steps of all tokens, b micro-batch size; a value heads, g key heads, d and w channels
of keys and of values; c steps per chunk, m chunks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from megafp8.host.shipped import install_command
from megafp8.numerics.implementations import triton_module

_kernels = triton_module("megafp8.layers.delta_rule.kernel")

CHUNK = 64
"""Tokens of a chunk."""
CHUNK_OF_CHANNELS = 16
"""Tokens of a chunk if each channel has a decay. It is smaller because c² products are computed per channel."""
_FORGOTTEN = -50.0
_KERNEL_WIDTH = 128
_WITHOUT_FLASH_QLA = f"flash-qla is not installed ({install_command('recurrent')})"


def recurrence(
    q_sbad: Tensor, k_zbad: Tensor, v_zbaw: Tensor, decay: Tensor, beta_zba: Tensor, state_badw: Tensor,
    starts_sb: Tensor | None = None, erase_zbad: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute the gated delta rule token by token. This is the specification of the other functions.

    Args:
        q_sbad: Queries.
        k_zbad: Keys of each token's steps; their number says how many steps a token takes.
        v_zbaw: Values.
        decay: Decays g, `[s, b, a]` or `[s, b, a, d]`.
        beta_zba: Fraction β by which each step corrects the state.
        state_badw: State before the first token.
        starts_sb: Tokens that begin a document, before which the state is set to zero, bool.
        erase_zbad: Keys e that look up the values to correct. Default: the keys.

    Returns:
        Outputs `[s, b, a, w]`, and the state after the last token.
    """
    decay = decay if decay.dim() == 4 else decay.unsqueeze(-1)
    erase_zbad, n, outputs = k_zbad if erase_zbad is None else erase_zbad, len(k_zbad) // len(q_sbad), []
    for i, (q, g) in enumerate(zip(q_sbad, decay, strict=True)):
        if starts_sb is not None:
            state_badw = state_badw * ~starts_sb[i][:, None, None, None]
        state_badw = state_badw * g.exp().unsqueeze(-1)
        for step in range(n * i, n * (i + 1)):
            known = torch.einsum("badw,bad->baw", state_badw, erase_zbad[step])
            correction = beta_zba[step].unsqueeze(-1) * (v_zbaw[step] - known)
            state_badw = state_badw + torch.einsum("bad,baw->badw", k_zbad[step], correction)
        outputs.append(torch.einsum("badw,bad->baw", state_badw, q))
    return torch.stack(outputs), state_badw


def in_chunks(
    q_sbad: Tensor, k_zbad: Tensor, v_zbaw: Tensor, decay: Tensor, beta_zba: Tensor, state_badw: Tensor,
    starts_sb: Tensor | None = None, erase_zbad: Tensor | None = None, *, chunk: int | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute `recurrence` in chunks of at most `chunk` steps, with all tensors in one dtype, fp32 or wider.

    The default of `chunk` is `CHUNK`, or `CHUNK_OF_CHANNELS` with a decay per channel.
    """
    (s, b), n = q_sbad.shape[:2], len(k_zbad) // len(q_sbad)
    by_channel = decay.dim() == 4
    tokens = min(max(1, (chunk or (CHUNK_OF_CHANNELS if by_channel else CHUNK)) // n), s)
    c = n * tokens

    def chunks(x: Tensor, c: int = c) -> Tensor:
        """Split `[z, b, a, ...]` into chunks `[m, b, a, c, ...]`, padded with zeros that do not change the state."""
        x = F.pad(x, (0, 0) * (x.dim() - 1) + (0, -len(x) % c)).unflatten(0, (-1, c))
        return x.movedim(1, 3)

    q, k, v, beta = chunks(q_sbad, tokens), chunks(k_zbad), chunks(v_zbaw), chunks(beta_zba).unsqueeze(-1)
    erase = k if erase_zbad is None else chunks(erase_zbad)
    sums = chunks(_at_step(0, decay if by_channel else decay.unsqueeze(-1), n)).cumsum(3)  # [m, b, a, c, d or 1]
    within, before = sums.unsqueeze(-2) - sums.unsqueeze(-3), sums.exp()
    after, over = (sums[..., -1:, :] - sums).exp(), sums[..., -1, :].exp()
    causal = torch.ones(c, c, dtype=torch.bool, device=q.device).tril().unsqueeze(-1)
    within = torch.where(causal, within, -torch.inf).exp()
    if starts_sb is not None:  # decays over the beginning of a document are 0
        starts_zb1 = _at_step(0, starts_sb.unsqueeze(-1).expand(s, b, 1).long(), n)
        document = chunks(starts_zb1).cumsum(-1)
        within = within * (document.unsqueeze(-1) == document.unsqueeze(-2)).unsqueeze(-1)
        before, over = before * (document == 0).unsqueeze(-1), over * (document[..., -1:] == 0)
        after = after * (document == document[..., -1:]).unsqueeze(-1)

    def products(x: Tensor, within: Tensor) -> Tensor:
        """Return the products of x with the decayed keys of its chunk, `[m, b, a, rows of x, c]`."""
        if not by_channel:
            return (x @ k.mT) * within[..., 0]
        return ((x.unsqueeze(-2) * k.unsqueeze(-3)) * within).sum(-1)

    system = (beta * products(erase, within)).tril(-1)
    right = torch.cat([beta * v, beta * before * erase], dim=-1)
    # `unitriangular=True` takes the diagonal as 1 and does not read it.
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    added, known = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    last_steps = slice(n - 1, None, n)
    scores, q, k = products(q, within[..., last_steps, :, :]), q * before[..., last_steps, :], k * after
    outputs = []
    for q_i, k_i, added_i, known_i, scores_i, over_i in zip(q, k, added, known, scores, over, strict=True):
        u = added_i - known_i @ state_badw
        outputs.append(q_i @ state_badw + scores_i @ u)
        state_badw = over_i.unsqueeze(-1) * state_badw + k_i.mT @ u
    outputs[-1] = outputs[-1][:, :, : s - tokens * (len(outputs) - 1)]  # a slice of the result would keep the padding
    return torch.cat([y_bacw.movedim(2, 0) for y_bacw in outputs]), state_badw


def _at_step(step: int, x: Tensor, n: int) -> Tensor:
    """Give tokens' numbers `[s, ...]` to one of their n steps, counted from 0, and zeros to the others, `[z, ...]`."""
    return x if n == 1 else F.pad(x.unsqueeze(1), (0, 0) * (x.dim() - 1) + (step, n - 1 - step)).flatten(0, 1)


def delta_rule(
    q_sbgd: Tensor, k_zbgd: Tensor, v_zbaw: Tensor, decay: Tensor, beta_zba: Tensor, state_badw: Tensor,
    starts_sb: Tensor | None = None, erase_zbad: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute the gated delta rule with the fastest implementation for these tensors.

    Each key head serves a / g value heads. Queries and keys have length 1; this function scales queries by 1/√d. q, k,
    v and e have the model's dtype, and the other inputs are fp32 or wider. See `recurrence` for the arguments.

    Returns:
        Outputs `[s, b, a, w]` in the dtype of v, and the state after the last token, fp32 or wider.
    """
    n, device, dtype, (d, w), by_channel = (
        len(k_zbgd) // len(q_sbgd),
        q_sbgd.device,
        q_sbgd.dtype,
        (q_sbgd.shape[-1], v_zbaw.shape[-1]),
        decay.dim() == 4,
    )
    if len(q_sbgd) > 1 and _missing_flash_qla(device, dtype, d, w, by_channel=by_channel) is None:
        assert erase_zbad is None, "FlashQLA looks up values with the keys"
        decay = _at_step(0, _forgetting(decay, starts_sb), n)
        y, state = _flash_qla(_at_step(n - 1, q_sbgd, n), k_zbgd, v_zbaw, decay, beta_zba, state_badw)
        return _of_last_steps(y, n), state
    wide, per_key = state_badw.dtype, v_zbaw.shape[2] // q_sbgd.shape[2]
    q, k = (x if per_key == 1 else x.repeat_interleave(per_key, dim=2) for x in (q_sbgd, k_zbgd))
    if len(q_sbgd) > 1 and _missing_kernel(device, dtype, d, w, erases=erase_zbad is not None) is None:
        decay = _at_step(0, _forgetting(decay, starts_sb), n)
        channel_decay = decay if by_channel else decay.unsqueeze(-1).expand(*decay.shape, d)
        q = _at_step(n - 1, q, n)
        y, state = InKernels.apply(q, k, v_zbaw, channel_decay, beta_zba, state_badw)
        return _of_last_steps(y, n), state
    q, k, erase = q.to(wide), k.to(wide), None if erase_zbad is None else erase_zbad.to(wide)
    y, state = in_chunks(q * d**-0.5, k, v_zbaw.to(wide), decay, beta_zba, state_badw, starts_sb, erase)
    return y.to(v_zbaw.dtype), state


def _of_last_steps(y_zbaw: Tensor, n: int) -> Tensor:
    """Return the outputs of each token's last step, without keeping the outputs of other steps."""
    return y_zbaw if n == 1 else y_zbaw[n - 1 :: n].contiguous()


def kernel_name(device: torch.device, dtype: torch.dtype, d: int, w: int, *, by_channel: bool, erases: bool) -> str:
    """Return the name of the implementation for such tensors, as a text for users.

    `by_channel` says whether each channel has a decay, and `erases` whether other keys than k look up values.
    """
    if (missing := _missing_flash_qla(device, dtype, d, w, by_channel=by_channel)) is None:
        return "FlashQLA"
    if (reason := _missing_kernel(device, dtype, d, w, erases=erases)) is None:
        return "Triton" if by_channel else f"Triton, slower than FlashQLA, because {missing}"
    return f"PyTorch's operations, slow, because no kernel fits: {reason}"


def kernel_passes(element: int, d: int, w: int, *, by_channel: bool, erases: bool) -> tuple[float, float] | None:
    """Return the kernels' time in units of one pass over the heads' keys and values, or None if no kernel fits.

    The first number is the time of forward, the second the time of backward with a recomputed forward. FlashQLA was
    measured on an H200. Our kernels were measured on an H100 and are assumed to be 6% faster on an H200, as in earlier
    measurements (docs/measurements/2026-11-26-recurrent). `element` is the number of bytes of the model's dtype; two
    bytes are assumed to be bf16, and FlashQLA is assumed to be installed.
    """
    if element != torch.bfloat16.itemsize or max(d, w) > _KERNEL_WIDTH or erases:
        return None
    flash_qla = not by_channel and (d, w) == (_KERNEL_WIDTH, _KERNEL_WIDTH)
    return (10.0, 26.0) if flash_qla else (28.0, 100.0)


def _missing_kernel(device: torch.device, dtype: torch.dtype, d: int, w: int, *, erases: bool) -> str | None:
    """Return why `megafp8.layers.delta_rule.kernel` cannot compute such tensors; None if it can."""
    if device.type != "cuda":
        return f"there is none for {device.type}"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"it needs bf16 or fp16, not {str(dtype).removeprefix('torch.')}"
    if erases:
        return "it looks up values with the keys"
    return f"it needs heads of up to {_KERNEL_WIDTH} channels, not {d} and {w}" if max(d, w) > _KERNEL_WIDTH else None


def _missing_flash_qla(
    device: torch.device, dtype: torch.dtype, d: int, w: int, *, by_channel: bool
) -> str | None:  # fmt: skip
    """Return why FlashQLA cannot compute such tensors; None if it can."""
    if by_channel:
        return "it supports only one decay per head"
    if dtype != torch.bfloat16:
        return f"it needs bf16, not {str(dtype).removeprefix('torch.')}"
    if (d, w) != (_KERNEL_WIDTH, _KERNEL_WIDTH):
        return f"it needs heads of {_KERNEL_WIDTH} channels, not {d} and {w}"
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return "it needs a Hopper GPU"
    return None if _flash_qla_function() is not None else _WITHOUT_FLASH_QLA


def _forgetting(decay: Tensor, starts_sb: Tensor | None) -> Tensor:
    """Return the decays, with decays at the beginnings of documents that erase the state."""
    if starts_sb is None:
        return decay
    return decay.masked_fill(starts_sb.view(*starts_sb.shape, *(1 for _ in decay.shape[2:])), _FORGOTTEN)


class InKernels(Function):
    """Delta rule computed by `megafp8.layers.delta_rule.kernel`, with a decay per channel and without documents.

    The number of key heads equals the number of value heads, and each token takes one step.
    """

    @staticmethod
    def forward(
        ctx: Any, q_sbad: Tensor, k_sbad: Tensor, v_sbaw: Tensor, decay_sbad: Tensor, beta_sba: Tensor,
        state_badw: Tensor,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Return the outputs `[s, b, a, w]` in the dtype of v, and the state after the last token."""
        inputs = _kernels().DeltaRuleInputs.from_tensors(q_sbad, k_sbad, v_sbaw, decay_sbad, beta_sba)
        y_bsaw, last_badw, saved = _kernels().forward(inputs, state_badw)
        ctx.save_for_backward(*inputs, *saved)
        ctx.dtypes = [x.dtype for x in (q_sbad, k_sbad, v_sbaw, decay_sbad, beta_sba)]
        return y_bsaw.transpose(0, 1).to(v_sbaw.dtype), last_badw

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_sbaw: Tensor, dlast_badw: Tensor) -> tuple[Tensor, ...]:
        """Return the gradients of q, k, v, decays, β and the state before the first token."""
        count, tensors = len(ctx.dtypes), ctx.saved_tensors
        inputs, saved = _kernels().DeltaRuleInputs(*tensors[:count]), _kernels().DeltaRuleSaved(*tensors[count:])
        *grads, dfirst = _kernels().backward(inputs, saved, dy_sbaw.transpose(0, 1), dlast_badw)
        return *(x.transpose(0, 1).to(dtype) for x, dtype in zip(grads, ctx.dtypes, strict=True)), dfirst


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
