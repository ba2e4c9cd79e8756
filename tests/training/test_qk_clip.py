"""QK-clip against dense logits: the weights after an update are those without it, but for rows of clipped heads."""

from __future__ import annotations

import itertools
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from megafp8.layers.attention.op import SelfAttention
from tests.training.presets import (
    BF16,
    DEEPSEEK,
    DP2,
    HYBRID,
    QK_CLIP,
    QKV_BIAS,
    REMAINDERS,
    ZERO,
    Preset,
    config_of,
)
from tests.training.runs import Runs, assembled, batches, shards_of, start
from tests.world import World


def _dense_logits(attention: Any, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, scores: Any) -> Tensor:
    """The largest logit of each head, `[a]`, of causal attention."""
    k = k.repeat_interleave(q.shape[2] // k.shape[2], dim=2)
    logits = torch.einsum("sbad,tbad->bast", q.double(), k.double()) / q.shape[-1] ** 0.5
    return logits.masked_fill(torch.ones(logits.shape[-2:]).triu(1).bool(), -torch.inf).amax((0, 2, 3)).detach()


def _weights_after_a_step(
    preset: Preset, qk_clip: float | None
) -> tuple[dict[str, Tensor], list[Tensor], float | None]:
    """Of one rank: state by name, dense logits of the calls of attention in order, and the metric."""
    config = config_of(preset, optimizer={"qk_clip": qk_clip})
    trainer, parallel = start(config)
    calls: list[Tensor] = []
    attend = SelfAttention.__call__

    def recorded(self: SelfAttention, *inputs: Any) -> Tensor:
        calls.append(_dense_logits(self, *inputs))
        return attend(self, *inputs)

    with patch.object(SelfAttention, "__call__", recorded):
        _, result = trainer.train_step(0, batches(0, config, parallel))
    assert not result.skipped
    return assembled([shards_of(trainer)]), calls, trainer.max_attention_logit


def _compare(preset: Preset) -> int:
    """Number of tensors that were clipped."""
    plain, calls, no_metric = _weights_after_a_step(preset, None)
    config = config_of(preset)
    m = config.model
    layers = [i for i in range(m.num_layers) if "attention" in config.spec.layers[i].mixer.kind]
    largest = [torch.stack(calls[i :: len(layers)]).amax(0) for i in range(len(layers))]
    threshold = float(torch.cat(largest).median())  # so that some heads are clipped
    clipped, same_calls, metric = _weights_after_a_step(preset, threshold)
    assert no_metric is None
    assert metric == pytest.approx(max(float(x.max()) for x in largest), rel=1e-6)
    assert all(torch.equal(a, b) for a, b in zip(calls, same_calls, strict=True))
    changed = 0
    for layer, largest_a in zip(layers, largest, strict=True):
        factor = [min(1.0, threshold / x) for x in largest_a.tolist()]
        rows: dict[str, list[float]] = {}
        if m.latent_attention is not None:
            latent = m.latent_attention
            n, r, v = latent.nope_head_dim, latent.rope_head_dim, latent.value_head_dim
            rows["q_up"] = [y for x in factor for y in [x**0.5] * n + [x] * r]
            rows["kv_up"] = [y for x in factor for y in [x**0.5] * n + [1.0] * v]
        else:
            mixer = config.spec.layers[layer].mixer
            d, shared = mixer.channels, mixer.num_attention_heads // mixer.groups
            groups = [min(factor[i : i + shared]) for i in range(0, len(factor), shared)]
            rows["q"] = [x**0.5 for x in groups for _ in range(shared * d)]
            rows["k"] = [x**0.5 for x in groups for _ in range(d)]
        for part, factors in rows.items():
            for kind, prefix in itertools.product(("weight", "bias"), ("model.", "optimizer.master.")):
                name = f"{prefix}layers.{layer}.attention.{part}.{kind}"
                if name in plain:
                    before, after = plain.pop(name), clipped.pop(name)
                    expected = before.double() * torch.tensor(factors).view(-1, *[1] * (before.dim() - 1))
                    precise = after.dtype != torch.bfloat16
                    torch.testing.assert_close(after.double(), expected, rtol=1e-6 if precise else 2**-7, atol=0)
                    changed += 1
    assert all(torch.equal(plain[name], clipped[name]) for name in plain)
    return changed


@pytest.mark.parametrize(
    ("preset", "changed"),
    [(QKV_BIAS, 8), (DEEPSEEK, 4), (HYBRID, 2), (BF16 | REMAINDERS, 8)],
    ids=str,
)
def test_rows_of_clipped_heads_are_scaled(world2: World, preset: Preset, changed: int) -> None:
    assert world2.run(_compare, preset, ranks=1) == [changed]


@pytest.mark.slow
def test_a_resumed_run_continues_bit_for_bit(runs: Runs) -> None:
    first = runs.saved(QK_CLIP | DP2 | ZERO)
    again = runs.saved(QK_CLIP | DP2 | ZERO, first.folder)
    assert again.curve == first.curve
