"""The recurrence of the RG-LRU as a scan against the recurrence token by token."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from megafp8.fp8.manager import Fp8Manager
from megafp8.layers.build import PartBuild
from megafp8.layers.context import planning_context
from megafp8.layers.rg_lru.module import RgLru
from megafp8.layers.rg_lru.op import gated_scan, log_decays
from megafp8.parallel.tensor.random import initialize_parameters
from megafp8.plan import Neighbor
from tests.training.presets import Preset, config_of

B, N = 2, 3


def recurrence(
    x_sbn: Tensor, input_sbn: Tensor, recurrence_sbn: Tensor, rate_n: Tensor, state_bn: Tensor, starts_sb: Tensor
) -> tuple[Tensor, Tensor]:
    """Run the recurrence token by token.

    Args:
        x_sbn: Inputs.
        input_sbn: Input gates before the sigmoid.
        recurrence_sbn: Recurrence gates before the sigmoid.
        rate_n: Parameters Λ.
        state_bn: State before the first token.
        starts_sb: Tokens that begin a document or sequence, bool.

    Returns:
        States after each token, `[s, b, n]`, which are the outputs, and the state after the last token.
    """
    outputs = []
    for x, i, r, starts_b in zip(x_sbn, input_sbn, recurrence_sbn, starts_sb, strict=True):
        a = torch.exp(-8 * F.softplus(rate_n) * r.sigmoid())
        gated, starts = i.sigmoid() * x, starts_b.unsqueeze(-1)
        state_bn = torch.where(starts, gated, a * state_bn + (1 - a * a).sqrt() * gated)
        outputs.append(state_bn)
    return torch.stack(outputs), state_bn


@pytest.mark.parametrize("s", [600, 256, 37, 1])
def test_the_scan_is_the_recurrence(s: int) -> None:
    """Outputs, and gradients of everything, also of the state before; 600 tokens are a scan of scans."""
    torch.manual_seed(0)
    shapes = *[(s, B, N)] * 3, (N,), (B, N)
    inputs = [torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    starts, results = torch.rand(s, B) < 0.05, list[tuple[Tensor, ...]]()
    for compute in (recurrence, _scan):
        y, after = compute(*inputs, starts)
        loss = (y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)).sum() + after.square().sum()
        results.append((y, *torch.autograd.grad(loss, inputs)))
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)


def _scan(
    x: Tensor, input_gate: Tensor, recurrence_gate: Tensor, rate: Tensor, state: Tensor, starts: Tensor
) -> tuple[Tensor, Tensor]:
    y = gated_scan(x, input_gate, log_decays(recurrence_gate, rate), state, starts)
    return y, y[-1]


def test_a_gate_that_underflows_has_finite_gradients() -> None:
    """A recurrence gate of 0 gives a decay of 1 in fp32, where the root of 1 − a² has no gradient."""
    inputs = [torch.ones(4, 1, 1), torch.ones(4, 1, 1), torch.full((4, 1, 1), -200.0), torch.ones(1), torch.ones(1, 1)]
    inputs = [x.requires_grad_() for x in inputs]
    y, _ = _scan(*inputs, torch.zeros(4, 1, dtype=torch.bool))
    assert torch.equal(y, torch.ones_like(y))
    assert all(x.isfinite().all() for x in torch.autograd.grad(y.sum(), inputs))


@pytest.mark.parametrize("pieces", [[1, 1, 2, 9, 1, 6], [5, 15]])
def test_tokens_in_pieces_are_the_whole(pieces: list[int]) -> None:
    """Outputs and state of a mixer step by step, of which some are shorter than the convolution."""
    record = {"kind": "rg_lru", "inner_size": 64, "num_heads": 4}
    keys = {"layer_kinds": {"lru": {"mixer": record}}, "pattern": ["lru"]}
    config = config_of(Preset(("rg-lru",), {"model": keys}))
    context = planning_context(config, Fp8Manager(None, amax_group=None))
    context = replace(context, device=torch.device("cpu"), dtype=torch.float64)
    layer = config.spec.layers[0].mixer
    mixer = RgLru(PartBuild("layers.0.rg_lru", layer, config.spec, context, Neighbor("norm", "none", "")))
    initialize_parameters(mixer, seed=1)
    xs = tuple(torch.randn(2, 20, 2, 64, dtype=torch.float64))
    expected, after = mixer.advance(xs, mixer.zeros(2), None)
    state, found = mixer.zeros(2), list[Tensor]()
    for piece in zip(*(x.split(pieces) for x in xs), strict=True):
        y, state = mixer.advance(piece, state, None)
        found.append(y)
    torch.testing.assert_close(torch.cat(found), expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(state, after, rtol=1e-12, atol=1e-12)
