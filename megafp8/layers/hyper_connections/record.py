"""Hyper-connections instead of one residual stream: their keys and their rules."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field

from megafp8.host.problems import Problem
from megafp8.section import INTEGER, PositiveFloat, PositiveInt, Section
from megafp8.spec import ModelSection


class HyperConnectionsConfig(Section):
    """Manifold-constrained hyper-connections (Xie et al. 2025, arXiv:2512.24880; DeepSeek-V4): the residual is several
    streams. Each mixer and feed-forward network reads a weighted sum of them; its output is added to each with a
    weight, and the streams are mixed by a doubly stochastic matrix. The weights are functions of the token's streams.
    """

    streams: Annotated[int, Field(ge=2, le=8), INTEGER] = 4
    """Number of streams (hc_mult). Each is hidden_size wide: what a layer keeps for its backward pass, and what
    pipeline stages send, grows with it."""
    sinkhorn_iterations: PositiveInt = 20
    """Times that the columns of a token's matrix, and between them its rows, are divided by their sums
    (hc_sinkhorn_iters)."""
    eps: PositiveFloat = 1e-6
    """Added to weights and sums (hc_eps)."""


def hyper_connections(m: ModelSection) -> Iterator[Problem]:
    """Rules between hyper-connections and the rest of the network."""
    if m.hyper_connections is None:
        return
    for key, value, works in (
        ("architecture", m.architecture != "gpt" and m.architecture, "gpt"),
        ("norm_position", m.norm_position == "post" and "post", "pre"),
        ("parallel_block", m.parallel_block, "false"),
        ("mtp_num_layers", m.mtp_num_layers, "0"),
        ("layer_scalar", m.layer_scalar, "false"),
        ("per_layer_embedding", m.per_layer_embedding is not None and "set", "null"),
    ):
        if value:
            rule = "model.hyper_connections is set, and with it this is not offered"
            yield Problem(f"model.{key}", value, rule, f"try {works}")
