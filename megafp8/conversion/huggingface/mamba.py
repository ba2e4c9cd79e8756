"""Mamba-2 layers in Hugging Face's families: keys of config.json, and names of tensors.

Which layers have Mamba-2, a family's `Kinds` says. z, x, B, C and steps lie in one tensor of theirs, and so do the
channels of the convolution.
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
"""The value in layer_types of transformers for a layer with Mamba-2."""
_FORMER = {"mamba": LINEAR, "attention": FULL}
Kinds = Callable[[HfConfig], Sequence[str]]
"""From config.json what each layer is."""
INFINITY = {"__float__": "Infinity"}
"""As transformers writes the number, which JSON lacks."""
NO_LIMIT = (math.inf, INFINITY)
"""Values of an upper limit in config.json that stand for no limit."""


def kinds_of(values: object, key: str, known: Sequence[str]) -> list[str]:
    """The entries of a list of kinds, whose former names are replaced. Raises ValueError for unknown ones."""
    if not isinstance(values, list) or not values:
        refuse(key, values, f"a list of {', '.join(known)}")
    kinds = [_FORMER.get(x, str(x)) for x in values]
    if unknown := [x for x in kinds if x not in known]:
        refuse(key, unknown[0], ", ".join(known))
    return kinds


def mixers(kinds: Sequence[str]) -> Fields:
    """The mixers of layers of these kinds."""
    ours = {LINEAR: "mamba2", FULL: "attention"}
    return {"mixer.kind": [ours.get(kind, "none") for kind in kinds]}


def mamba_fields(kinds: Kinds, hf: HfConfig, values: Fields) -> Fields:
    """Values of keys of the Mamba-2 record, for the layers that have one."""
    linear = [kind == LINEAR for kind in kinds(hf)]
    return {f"mixer.{key}": [value if x else None for x in linear] for key, value in values.items()}


def mamba_value(ours: Fields, key: str) -> Any:
    """The value of a key of the Mamba-2 record, of which all layers have one; None without such layers."""
    kinds = ours["mixer.kind"]
    return ours[f"mixer.{key}"][kinds.index("mamba2")] if "mamba2" in kinds else None


def mamba(kinds: Kinds, **keys: tuple[str, Any]) -> Trait:
    """Keys of the Mamba-2 record, each with its name and default in transformers."""

    def write(ours: Fields) -> Keys:
        values = {key: mamba_value(ours, field) for field, (key, _) in keys.items()}
        return {key: value for key, value in values.items() if value is not None}

    return Trait(
        tuple(key for key, _ in keys.values()),
        lambda hf: mamba_fields(kinds, hf, {field: hf.get(key, default) for field, (key, default) in keys.items()}),
        write,
    )


def bamba_like(kinds: Kinds) -> tuple[Trait, ...]:
    """Keys of Mamba-2 layers of Bamba and Granite 4, which say the width twice and limit steps on both sides."""

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
        if head_dim is None:  # transformers checks the widths of layers that are not there, too
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
"""Names of a layer's tensors."""
