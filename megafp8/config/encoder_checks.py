"""Rules between keys of the config that concern bidirectional models; `checks.py` runs them."""

from __future__ import annotations

from collections.abc import Iterator

from megafp8.config.schema import Config, ModelConfig
from megafp8.host.problems import Problem


def model(m: ModelConfig) -> Iterator[Problem]:
    """Yield the problems of the network that do not depend on the run."""
    if m.architecture == "gpt":
        for key in ("token_types", "binary_head", "transform_activation", "num_decoder_layers"):
            if value := getattr(m, key):
                rule = "model.architecture is gpt, which does not have it"
                wants = "t5" if key == "num_decoder_layers" else "bert"
                yield Problem(f"model.{key}", value, rule, f"leave it out, or try model.architecture={wants}")
    else:
        rule = f"model.architecture is {m.architecture}, which attends to all tokens and predicts no next token"
        for key, default in (("sliding_window", None), ("attention_chunk", None), ("mtp_num_layers", 0)):
            if (value := getattr(m, key)) != default:
                yield Problem(f"model.{key}", value, rule, "leave it out, or try model.architecture=gpt")
    if (m.position_embedding == "relative") != (m.architecture == "t5"):
        rule = f"model.architecture is {m.architecture}, and only t5 has relative position biases"
        works = "relative" if m.architecture == "t5" else "rope"
        yield Problem("model.position_embedding", m.position_embedding, rule, f"try {works}")
    if m.position_embedding == "alibi" and m.architecture == "bert":
        rule = "model.architecture is bert, and ALiBi biases are defined for earlier tokens only"
        yield Problem("model.position_embedding", "alibi", rule, "try learned or rope")
    if m.architecture == "t5":
        yield from _t5(m)
    if m.binary_head and m.token_types < 2:
        rule = "model.binary_head is true, and the two parts of a pair have different token types"
        yield Problem("model.token_types", m.token_types, rule, "try 2, or model.binary_head=false")
    if m.norm_position == "post":
        for key in ("parallel_block", "moe", "latent_attention"):
            if value := getattr(m, key):
                shown = value if isinstance(value, (bool, str)) else "(a section)"
                rule = "model.norm_position is post, and such blocks need their norms first"
                yield Problem(f"model.{key}", shown, rule, "leave it out, or try model.norm_position=pre")


def _t5(m: ModelConfig) -> Iterator[Problem]:
    unused = {
        "norm_position": "pre", "parallel_block": False, "moe": None, "latent_attention": None, "qk_norm": False,
        "value_norm": False, "keys_as_values": False, "attention_sinks": False, "output_gate": False, "token_types": 0,
        "binary_head": False,
        "transform_activation": None,
    }  # fmt: skip
    for key, value in unused.items():
        if getattr(m, key) != value:
            shown = "(a section)" if key in ("moe", "latent_attention") else getattr(m, key)
            yield Problem(f"model.{key}", shown, "model.architecture is t5, which does not support it", "leave it out")
    buckets, distance = m.relative_attention_num_buckets, m.relative_attention_max_distance
    if buckets < 4 or buckets % 4:
        rule = "each direction has half of the buckets, and half of a direction's buckets are for single distances"
        yield Problem("model.relative_attention_num_buckets", buckets, rule, f"try {max(4, buckets // 4 * 4)}")
    elif distance <= buckets // 2:
        rule = (
            f"not above {buckets // 2}, the number of buckets for single distances (half of "
            f"model.relative_attention_num_buckets, {buckets})"
        )
        yield Problem("model.relative_attention_max_distance", distance, rule, f"try {4 * buckets}")


def data(config: Config) -> Iterator[Problem]:
    """Yield the problems of samples."""
    d, m = config.data, config.model
    pairs = d.packing == "sentences"
    if pairs != m.binary_head:
        rule = f"model.binary_head is {str(m.binary_head).lower()}, and pairs of sentences are for this head"
        works = "sentences, or model.binary_head=false" if m.binary_head else "concatenate, or model.binary_head=true"
        yield Problem("data.packing", d.packing, rule, f"try {works}")
    if m.architecture == "gpt":
        return
    for key in ("reset_at_documents", "mask_eod_loss"):
        if getattr(d, key):
            rule = f"model.architecture is {m.architecture}, which predicts tokens inside its text"
            yield Problem(f"data.{key}", True, rule, "try false")
    if m.architecture == "t5":
        yield from _spans(config)
    least = 8
    if config.training.seq_length < least:
        rule = "too short for special tokens and text between them"
        yield Problem("training.seq_length", config.training.seq_length, rule, f"try {least} or more")


def _spans(config: Config) -> Iterator[Problem]:
    """Yield the problems of T5's lengths and layouts."""
    p, t, decoder_length = config.parallel, config.training, config.training.decoder_seq_length
    noise, spans = config.data.span_corruption.lengths(config.sample_tokens)
    parts = p.tensor if p.sequence_parallel else 1
    if decoder_length is not None and decoder_length < noise + spans + 1:
        rule = f"a sample of {t.seq_length} tokens has {noise} in {spans} spans, plus a sentinel per span and an end"
        yield Problem(
            "training.decoder_seq_length", decoder_length, rule, f"try {noise + spans + 1} or more, or leave it out"
        )
    length = config.decoder_length
    if length is not None and length % parts:
        rule = f"sequence parallelism splits it into parallel.tensor ({parts}) equal parts"
        yield Problem("training.decoder_seq_length", length, rule, f"try {-(-length // parts) * parts}")
    if p.context > 1:
        rule = "model.architecture is t5, and its decoder attends to all of the encoder's tokens"
        yield Problem("parallel.context", p.context, rule, "try parallel.context=1, and parallel.tensor for long texts")
    if p.offload:
        rule = "model.architecture is t5, and all decoder layers read the encoder's output"
        yield Problem("parallel.offload", p.offload, rule, "try parallel.offload=false, or parallel.recompute=full")
