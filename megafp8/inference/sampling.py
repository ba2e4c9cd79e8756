"""Sampling of the next token from logits that are sharded over the vocabulary, with the same result in every layout.

Logits are never gathered. Ranks exchange candidates. A candidate is a 64-bit number made of the value and the index,
ordered by value and then by the lower index (`_keys`). So ties between equal logits, which are common in bf16, are
resolved in the same way for every division of the vocabulary. Greedy choice exchanges one candidate per rank.

*Noise.* A sample is the largest of logit / temperature + Gumbel noise (Gumbel 1954; Maddison et al. 2014,
arXiv:1411.0030). The noise of a token is a Philox word, a function of (seed, prompt, number of the sample, position,
token). So a text depends neither on the batch nor on the layout, and there is no random-number state.

*top_k and top_p.* Each rank sends its largest candidates, and the log-sum-exp of all its logits. A candidate is
certainly among the largest of all if it is at least as large as the smallest candidate that each rank has sent. While
the sum of the probabilities of these candidates does not reach top_p, ranks send four times as many.

The order is the same as in `transformers`: repetition penalty, temperature, top_k, top_p of the tokens that top_k
leaves, min_p. Log-probabilities are computed from the model's logits, or with `tempered_logprobs` from the logits
divided by the temperature.

Shapes: n sequences, v this rank's slice of the vocabulary, t tensor-parallel size, c candidates.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megafp8.inference.options import SamplingOptions
from megafp8.numerics.implementations import triton_module
from megafp8.numerics.philox import Key, key_of, philox_of_words
from megafp8.parallel.collectives import all_gather, rank

_kernels = triton_module("megafp8.kernels.sampling")

_CANDIDATES = 64
"""Number of candidates that a rank sends first, for top_p."""
_MASK = 0xFFFFFFFF


GREEDY = SamplingOptions()


class SamplingRow(NamedTuple):
    """Inputs of the choice of a sequence's next token: options, random stream (`stream_of`), and all tokens so far."""

    options: SamplingOptions
    stream: Key
    tokens: Sequence[int]


def stream_of(seed: int, prompt: Sequence[int], sample: int) -> Key:
    """Return the key of a sequence's stream of random numbers."""
    return key_of("sampling", seed, sample, *prompt)


class Chosen(NamedTuple):
    """Tokens chosen for all rows, with log-probabilities.

    Attributes:
        tokens: Token of each row, int64 `[n]`.
        logprobs: Log-probability of each token, `[n]`.
        top_tokens: Most probable tokens of each row, `[n, k]`, for the largest `logprobs` option k of all rows.
        top_logprobs: Log-probabilities of these tokens, `[n, k]`.
    """

    tokens: Tensor
    logprobs: Tensor
    top_tokens: Tensor
    top_logprobs: Tensor


class VocabShard:
    """Logits of this rank's slice of the vocabulary, float32 `[n, v]`.

    Tokens from `vocab_size` on are padding. `group` has the ranks with the other slices.
    """

    def __init__(self, logits_nv: Tensor, vocab_size: int, group: ProcessGroup | None) -> None:
        self.group, self.columns = group, logits_nv.shape[1]
        self.first = rank(group) * self.columns
        self.vocab_size = vocab_size
        self.by_kernel = logits_nv.is_cuda
        self.logits = self.without(vocab_size, logits_nv)

    def without(self, count: int, x_nv: Tensor) -> Tensor:
        """Return `x_nv` with -inf for all tokens from `count` on, so that they cannot be chosen."""
        valid = min(max(count - self.first, 0), self.columns)
        if valid == self.columns:
            return x_nv
        return torch.cat([x_nv[:, :valid], torch.full_like(x_nv[:, valid:], -math.inf)], dim=1)

    def gather(self, x_nc: Tensor) -> Tensor:
        """Gather the `[n, c]` of all ranks, and return `[n, t, c]`."""
        return all_gather(x_nc.contiguous().unsqueeze(0), self.group).transpose(0, 1)

    def logsumexp(self, x_nv: Tensor) -> Tensor:
        """Return the log-sum-exp of each row over all slices, `[n]`."""
        shard_n = _kernels().log_sum_exp(x_nv) if self.by_kernel else x_nv.logsumexp(1)
        return self.gather(shard_n.unsqueeze(1)).flatten(1).logsumexp(1)

    def at(self, x_nv: Tensor, tokens_nc: Tensor) -> Tensor:
        """Return the values of `x_nv` at these tokens, `[n, c]`, from the ranks that have them."""
        local = tokens_nc - self.first
        foreign = (local < 0) | (local >= self.columns)
        values = x_nv.gather(1, local.masked_fill(foreign, 0)).masked_fill(foreign, -math.inf)
        return self.gather(values).amax(1)

    def most_probable(self, x_nv: Tensor) -> Tensor:
        """Return the token with the largest value of each row, int64 `[n]`; the lowest token of equal values."""
        best = _kernels().best(x_nv, self.first) if self.by_kernel else _first_of_largest(self, x_nv)
        return _of_candidates(self, *best)

    def largest(self, x_nv: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Return the keys of candidates in descending order, `[n, c]`, and how many are the largest of all, `[n]`.

        The number of each row is at least `count`, or all tokens.
        """
        index = torch.arange(self.first, self.first + self.columns, device=x_nv.device)
        keys_nv, own_count = _keys(x_nv, index), min(count, self.columns)
        keys_ntc = self.gather(keys_nv.topk(own_count, dim=1).values)
        keys_nc = keys_ntc.flatten(1).sort(dim=1, descending=True).values
        if own_count == self.columns:
            return keys_nc, torch.full_like(keys_nc[:, 0], keys_nc.shape[1])
        return keys_nc, (keys_nc >= keys_ntc[..., -1].amax(1, keepdim=True)).sum(1)


def _keys(x: Tensor, index: Tensor) -> Tensor:
    """Return int64 keys that are ordered like the values, and by the lower index for equal values."""
    bits = (x + 0.0).view(torch.int32)  # turns -0 into 0
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    return (ordered << 32) | (_MASK - index)


def _values(keys: Tensor) -> Tensor:
    ordered = (keys >> 32).int()
    return torch.where(ordered < 0, ordered ^ 0x7FFFFFFF, ordered).view(torch.float32)


def _tokens(keys: Tensor) -> Tensor:
    return _MASK - (keys & _MASK)


def choose(shard: VocabShard, rows: Sequence[SamplingRow], num_tokens: int | None = None) -> Chosen:
    """Choose the next token of each row. The result is the same on all ranks of the shard's group. Collective.

    Tokens from `num_tokens` on are never chosen.
    """
    x_nv = _penalized(shard, rows)
    if num_tokens is not None:
        x_nv = shard.without(num_tokens, x_nv)
    kinds = [_kind(row.options) for row in rows]
    tokens_n = None
    for kind, choice in ((_GREEDY, _greedy), (_ALL, _of_all), (_SOME, _of_some)):
        rows_of_kind = [i for i, k in enumerate(kinds) if k == kind]
        if len(rows_of_kind) == len(rows):
            tokens_n = choice(shard, x_nv, rows)
        elif rows_of_kind:
            index = torch.tensor(rows_of_kind).to(x_nv.device, non_blocking=True)
            tokens_n = x_nv.new_zeros(len(rows), dtype=torch.int64) if tokens_n is None else tokens_n
            tokens_n[index] = choice(shard, x_nv[index], [rows[i] for i in rows_of_kind])
    assert tokens_n is not None
    logits_nv = shard.logits
    if any(row.options.tempered_logprobs for row in rows):
        logits_nv = logits_nv / logits_nv.new_tensor([[divisor_of(row.options)] for row in rows])
    lse_n1 = shard.logsumexp(logits_nv).unsqueeze(1)
    logprobs_n = (shard.at(logits_nv, tokens_n.unsqueeze(1)) - lse_n1).squeeze(1)
    top = min(max(row.options.logprobs for row in rows), shard.vocab_size)
    keys_nc = shard.largest(logits_nv, top)[0][:, :top] if top else tokens_n.new_zeros(len(rows), 0)
    return Chosen(tokens_n, logprobs_n, _tokens(keys_nc), _values(keys_nc) - lse_n1)


def divisor_of(options: SamplingOptions) -> float:
    """Return the number by which logits are divided before log-probabilities are computed."""
    return options.temperature if options.tempered_logprobs else 1.0


_GREEDY, _ALL, _SOME = range(3)


def _kind(options: SamplingOptions) -> int:
    if options.temperature == 0:
        return _GREEDY
    return _SOME if options.top_k or options.top_p < 1 else _ALL


class _Parameters(NamedTuple):
    """Options of all rows as tensors `[n, 1]`.

    `position` is the position of the token that is chosen. `stream` has the two words of each row's random stream.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    log_min_p: Tensor
    position: Tensor
    stream: tuple[Tensor, Tensor]

    @classmethod
    def from_rows(cls, rows: Sequence[SamplingRow], device: torch.device) -> _Parameters:
        """Copy the options of rows to the device."""
        options = [row.options for row in rows]
        reals = [(x.temperature, x.top_p, math.log(x.min_p) if x.min_p else -math.inf) for x in options]
        integers = [(x.options.top_k or 2**62, len(x.tokens), *x.stream) for x in rows]
        # Without waiting for the device, which may still compute the logits.
        reals_n3 = torch.tensor(reals, dtype=torch.float64).to(device, non_blocking=True)
        integers_n4 = torch.tensor(integers).to(device, non_blocking=True)
        temperature, top_p, log_min_p = reals_n3.split(1, dim=1)
        top_k, position, *stream = integers_n4.split(1, dim=1)
        return cls(temperature.float(), top_k, top_p, log_min_p.float(), position, (stream[0], stream[1]))


def _penalized(shard: VocabShard, rows: Sequence[SamplingRow]) -> Tensor:
    if all(row.options.repetition_penalty == 1 for row in rows):
        return shard.logits
    x_nv = shard.logits.clone()
    for x_v, row in zip(x_nv, rows, strict=True):
        used_here = {token - shard.first for token in row.tokens}
        columns = torch.tensor(
            sorted(c for c in used_here if 0 <= c < shard.columns), dtype=torch.int64, device=x_nv.device
        )
        values, penalty = x_v[columns], row.options.repetition_penalty
        x_v[columns] = torch.where(values > 0, values / penalty, values * penalty)
    return x_nv


def _greedy(shard: VocabShard, x_nv: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    return shard.most_probable(x_nv)


def _of_all(shard: VocabShard, x_nv: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Sample one of all tokens, or of the tokens that min_p leaves."""
    by = _Parameters.from_rows(rows, x_nv.device)
    top_n1 = shard.gather(x_nv.amax(1, keepdim=True) / by.temperature).amax(1)
    least_n1 = top_n1 + by.log_min_p
    if shard.by_kernel:
        noise = _kernels().SamplingNoise(by.temperature, least_n1, by.position, by.stream, _KEY)
        return _of_candidates(shard, *_kernels().best(x_nv, shard.first, noise))
    x_nv = x_nv / by.temperature
    groups = torch.arange(shard.first // 4, -(-(shard.first + shard.columns) // 4), device=x_nv.device)
    noise_ng4 = torch.stack(_noise(groups, by), dim=-1)
    noise_nv = noise_ng4.flatten(1)[:, shard.first % 4 :][:, : shard.columns]
    noisy_nv = (x_nv + noise_nv).float().masked_fill(x_nv < least_n1, -math.inf)
    return _of_candidates(shard, *_first_of_largest(shard, noisy_nv))


def _first_of_largest(shard: VocabShard, x_nv: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest value of each row, and its token, `[n, 1]`; the lowest token of equal values."""
    top_n1 = x_nv.amax(1, keepdim=True)
    columns = torch.arange(shard.columns, dtype=torch.int32, device=x_nv.device)
    first_n1 = torch.where(x_nv == top_n1, columns, shard.columns).amin(1, keepdim=True)
    return top_n1, shard.first + first_n1.long()


def _of_candidates(shard: VocabShard, values_nc: Tensor, tokens_nc: Tensor) -> Tensor:
    """Return the token with the largest value over the candidates of all ranks, `[n]`."""
    return _tokens(shard.gather(_keys(values_nc, tokens_nc).amax(1, keepdim=True)).flatten(1).amax(1))


def _of_some(shard: VocabShard, x_nv: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Sample one of the tokens that top_k, top_p and min_p leave."""
    by = _Parameters.from_rows(rows, x_nv.device)
    x_nv = x_nv / by.temperature
    lse_n1 = shard.logsumexp(x_nv).unsqueeze(1).double()
    has_k = by.top_k < 2**62
    count = max(_CANDIDATES, *(row.options.top_k for row in rows))
    while True:
        keys_nc, known_n = shard.largest(x_nv, count)
        values_nc = _values(keys_nc).double()
        place_c = torch.arange(keys_nc.shape[1], device=x_nv.device)
        left_nc = (place_c < by.top_k) & (place_c < known_n.unsqueeze(1))
        among_n1 = values_nc.masked_fill(~left_nc, -math.inf).logsumexp(1, keepdim=True)
        p_nc = (values_nc - torch.where(has_k, among_n1, lse_n1)).exp().masked_fill(~left_nc, 0.0)
        reached_nc = p_nc.cpu().cumsum(1).to(p_nc.device)  # torch.use_deterministic_algorithms forbids it on GPUs
        if bool((has_k | (by.top_p >= 1) | (reached_nc[:, -1:] >= by.top_p)).all()) or count >= shard.columns:
            break
        count *= 4
    before_nc = torch.nn.functional.pad(reached_nc[:, :-1], (1, 0))
    left_nc = left_nc & (before_nc < by.top_p) & (values_nc >= values_nc[:, :1] + by.log_min_p)
    tokens_nc = _tokens(keys_nc)
    words = torch.stack(_noise(tokens_nc // 4, by), dim=-1)
    noise_nc = words.gather(-1, (tokens_nc % 4).unsqueeze(-1)).squeeze(-1)
    best_n1 = (values_nc + noise_nc).masked_fill(~left_nc, -math.inf).argmax(1, keepdim=True)
    return tokens_nc.gather(1, best_n1).squeeze(1)


def _noise(groups: Tensor, by: _Parameters) -> tuple[Tensor, ...]:
    """Return the Gumbel noise of the four tokens of each of `groups`, `[g]` or `[n, g]`: four float64 `[n, g]`."""
    words = philox_of_words(groups, by.position, *by.stream, _KEY)
    return tuple(-(-((word.double() + 0.5) / 2.0**32).log()).log() for word in words)


_KEY = key_of("sampling")
