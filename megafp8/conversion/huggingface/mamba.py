"""Keys in config.json and tensor names of Mamba layers in Hugging Face's families.

A family's `Kinds` function determines the layers with Mamba. For Mamba-2, Hugging Face stores z, x, B, C and the steps
in one tensor, and the channels of the convolution in another.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from megafp8.conversion.base import refuse
from megafp8.conversion.huggingface.layers import FULL
from megafp8.conversion.huggingface.names import Names, consecutive, fused, usual
from megafp8.conversion.keys import Fields, HfConfig, Keys, Trait, only, unread
from megafp8.layers.mamba2.record import Mamba2Config

LINEAR = "linear_attention"
"""Value for a layer with Mamba in the layer_types of transformers."""
_FORMER = {"mamba": LINEAR, "attention": FULL}
Kinds = Callable[[HfConfig], Sequence[str]]
"""Function that returns the kind of each layer for a config.json."""
INFINITY = {"__float__": "Infinity"}
"""Infinity, which JSON lacks, as transformers writes it."""
NO_LIMIT = (math.inf, INFINITY)
"""Values of an upper limit in config.json that mean no limit."""


def kinds_of(values: object, key: str, known: Sequence[str]) -> list[str]:
    """Return the entries of a list of layer kinds, with former names replaced. Raises ValueError for unknown kinds."""
    if not isinstance(values, list) or not values:
        refuse(key, values, f"a list of {', '.join(known)}")
    kinds = [_FORMER.get(x, str(x)) for x in values]
    if unknown := [x for x in kinds if x not in known]:
        refuse(key, unknown[0], ", ".join(known))
    return kinds


def mixers(kinds: Sequence[str], linear: str = "mamba2") -> Fields:
    """Return the flat key with the mixer of each layer, for layers of these kinds; `linear` is the kind of Mamba."""
    ours = {LINEAR: linear, FULL: "attention"}
    return {"mixer.kind": [ours.get(kind, "none") for kind in kinds]}


def mamba_fields(kinds: Kinds, hf: HfConfig, values: Fields) -> Fields:
    """Return flat keys that set these values of the Mamba record in all layers with Mamba."""
    linear = [kind == LINEAR for kind in kinds(hf)]
    return {f"mixer.{key}": [value if x else None for x in linear] for key, value in values.items()}


def mamba_value(ours: Fields, key: str) -> Any:
    """Return the value of a key of the Mamba record, which is equal in all layers; None without such layers."""
    values = zip(ours["mixer.kind"], ours[f"mixer.{key}"], strict=True)
    return next((value for kind, value in values if kind in ("mamba1", "mamba2", "shared_attention")), None)


def mamba(kinds: Kinds, **keys: tuple[str, Any]) -> Trait:
    """Return a trait for keys of the Mamba record, each given by its name and default in transformers."""

    def write(ours: Fields) -> Keys:
        values = {key: mamba_value(ours, field) for field, (key, _) in keys.items()}
        return {key: value for key, value in values.items() if value is not None}

    return Trait(
        tuple(key for key, _ in keys.values()),
        lambda hf: mamba_fields(kinds, hf, {field: hf.get(key, default) for field, (key, default) in keys.items()}),
        write,
    )


def bamba_like(kinds: Kinds) -> tuple[Trait, ...]:
    """Return the traits of Mamba-2 layers in Bamba and Granite 4, which state the width twice and limit the steps."""

    def read(hf: HfConfig) -> Fields:
        if LINEAR not in kinds(hf):
            return {}
        heads, width = hf.get("mamba_n_heads", 128), hf.get("mamba_expand", 2) * hf["hidden_size"]
        head_dim, limit = hf.get("mamba_d_head", "auto"), hf.get("time_step_limit") or [0.0, INFINITY]
        if width % heads or head_dim not in ("auto", width // heads):
            refuse("mamba_d_head", head_dim, f"mamba_expand × hidden_size / mamba_n_heads ({width / heads:g})")
        most = None if limit[1] in NO_LIMIT else limit[1]
        return mamba_fields(kinds, hf, {"head_dim": width // heads, "min_step": limit[0], "max_step": most})

    def write(ours: Fields) -> Keys:
        head_dim, heads = mamba_value(ours, "head_dim"), mamba_value(ours, "num_heads")
        if head_dim is None:  # transformers also checks these widths if no layer has Mamba-2
            return {"mamba_n_heads": 1, "mamba_d_head": 2 * ours["hidden_size"], "mamba_expand": 2}
        least, most = mamba_value(ours, "min_step"), mamba_value(ours, "max_step")
        written = {"mamba_d_head": head_dim, "mamba_expand": head_dim * heads // ours["hidden_size"]}
        if (least, most) == (0.0, None):
            return written
        return written | {"time_step_limit": [least, INFINITY if most is None else most]}

    return (
        mamba(
            kinds, num_heads=("mamba_n_heads", 128), num_groups=("mamba_n_groups", 1),
            state_size=("mamba_d_state", 256), conv_kernel_size=("mamba_d_conv", 4),
            conv_bias=("mamba_conv_bias", True),
        ),
        Trait(("mamba_d_head", "mamba_expand", "time_step_limit"), read, write),
        only(mamba_proj_bias=False), unread("mamba_chunk_size"),
    )  # fmt: skip


def _channels(m: Mamba2Config) -> list[int]:
    return [m.num_heads * m.head_dim, *[m.num_groups * m.state_size] * 2]


MAMBA_NAMES: Names = {
    **usual(Mamba2Config),
    **fused(
        "mamba.in_proj",
        lambda part: consecutive(part, lambda m: [m.num_heads * m.head_dim, *_channels(m), m.num_heads]),
        tuple(f"mamba2.{part}" for part in ("z", "x", "b", "c", "step")),
    ),
    **fused("mamba.conv1d", lambda part: consecutive(part, _channels), tuple(f"mamba2.{part}_conv" for part in "xbc")),
}
"""Names of the tensors of a layer with Mamba-2."""
