"""Config keys and rules of hyper-connections, which replace the single residual stream."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field

from megafp8.host.problems import Problem
from megafp8.section import INTEGER, PositiveFloat, PositiveInt, Section
from megafp8.spec import ModelSection


class HyperConnectionsConfig(Section):
    """Manifold-constrained hyper-connections (Xie et al. 2025, arXiv:2512.24880; DeepSeek-V4).

    The model has several residual streams. Each mixer and feed-forward network reads a weighted sum of them. A doubly
    stochastic matrix then mixes the streams, and the output of the part is added to each with a weight. All weights are
    functions of the token's streams.
    """

    streams: Annotated[int, Field(ge=2, le=8), INTEGER] = 4
    """Number of residual streams (hc_mult). Each is hidden_size wide, so the memory that a layer saves for backward and
    the bytes that pipeline stages send grow with it."""
    sinkhorn_iterations: PositiveInt = 20
    """Number of Sinkhorn iterations that make the mixing matrix doubly stochastic (hc_sinkhorn_iters). Each divides the
    rows and then the columns of the matrix by their sums; the first divides only the columns, after a softmax over each
    row."""
    eps: PositiveFloat = 1e-6
    """Number added to weights and sums (hc_eps)."""


def hyper_connections(m: ModelSection) -> Iterator[Problem]:
    """Yield the rules between hyper-connections and the rest of the network that a model breaks."""
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
            rule = "model.hyper_connections is set and does not support it"
            yield Problem(f"model.{key}", value, rule, f"try {works}")
