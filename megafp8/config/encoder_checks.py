"""Rules between keys of the config that concern bidirectional models; `checks.py` runs them."""

from __future__ import annotations

from collections.abc import Iterator

from megafp8.config.errors import Problem
from megafp8.config.schema import Config, ModelConfig


def model(m: ModelConfig) -> Iterator[Problem]:
    """Rules about the network that hold in any run."""
    if m.architecture == "gpt":
        for key in ("token_types", "binary_head"):
            if value := getattr(m, key):
                rule = "model.architecture is gpt, which has none"
                yield Problem(f"model.{key}", value, rule, f"leave it out, or try model.architecture=bert with {key}")
    else:
        rule = f"model.architecture is {m.architecture}, which attends to all tokens and has no next one"
        for key, default in (("sliding_window", None), ("mtp_num_layers", 0)):
            if (value := getattr(m, key)) != default:
                yield Problem(f"model.{key}", value, rule, "leave it out, or try model.architecture=gpt")
    if m.binary_head and m.token_types < 2:
        rule = "model.binary_head is true, and the two parts of a pair have different token types"
        yield Problem("model.token_types", m.token_types, rule, "try 2, or model.binary_head=false")
    if m.norm_position == "post":
        for key in ("parallel_block", "moe", "latent_attention"):
            if value := getattr(m, key):
                shown = True if value is True else "(a section)"
                rule = "model.norm_position is post, and such blocks have their norms first"
                yield Problem(f"model.{key}", shown, rule, "leave it out, or try model.norm_position=pre")


def data(config: Config) -> Iterator[Problem]:
    """Rules about samples."""
    d, m = config.data, config.model
    pairs = d.packing == "sentences"
    if pairs != m.binary_head:
        rule = f"model.binary_head is {str(m.binary_head).lower()}, and it is what pairs of sentences are for"
        works = "sentences, or model.binary_head=false" if m.binary_head else "concatenate, or model.binary_head=true"
        yield Problem("data.packing", d.packing, rule, f"try {works}")
    if m.architecture == "gpt":
        return
    for key in ("reset_at_documents", "mask_eod_loss"):
        if getattr(d, key):
            rule = f"model.architecture is {m.architecture}, which predicts tokens inside its text"
            yield Problem(f"data.{key}", True, rule, "try false")
    least = 8
    if config.training.seq_length < least:
        rule = "too short for special tokens and text between them"
        yield Problem("training.seq_length", config.training.seq_length, rule, f"try {least} or more")
