"""Check that the memory a config needs exists, before anything is allocated.

The memory formula describes CUDA runs and excludes CUDA's context and fragmentation. A rejected config does not fit; an
accepted one may still run out of memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

from megafp8.config import Config, ConfigError, Problem
from megafp8.config.checks import split_widths
from megafp8.config.optimizer_checks import offload
from megafp8.planner.memory import RankMemory, size_text

NO_DEVICE_HAS = 2**50
"""Limit in bytes (1 PiB) if the device is not known."""
_USUAL = {
    "model.vocab_size": 2**19,
    "model.vocab_multiple": 2**14,
    "model.hidden_size": 2**15,
    "model.ffn_hidden_size": 2**17,
    "model.head_dim": 2**9,
    "model.max_position_embeddings": 2**20,
    "training.seq_length": 2**20,
    "training.micro_batch_size": 2**8,
    "fp8.amax_history_len": 2**14,
}
"""Largest values in use today. If a config does not fit, a key with a larger value is probably the mistake."""
_SAVING = {
    "parallel.zero": (0, 1),
    "fp8.keep_weight_transposes": (True, False),
    "parallel.recompute": ("none", "full"),
    "optimizer.moments_dtype": ("fp32", "bf16"),
    "optimizer.offload": (0.0, 1.0),
}
"""Keys that save memory without changing the model or the layout: default, and value that saves memory."""


def check_memory(
    config: Config, plan: Callable[[Config], Sequence[RankMemory]], limit: int, who_has: str, source: str
) -> None:
    """Raise ConfigError if a pipeline rank needs more than `limit` bytes.

    The error names the largest terms, the key that is out of proportion, and changes that would fit by the same
    formula.

    Args:
        config: Config to check.
        plan: Function that returns the memory of each pipeline rank under a config.
        limit: Available bytes.
        who_has: Owner of the memory with its verb, e.g. "this GPU has".
        source: File of the config, for the message.
    """

    def total(key: str, value: Any) -> float:
        changed = _with(config, key, value)
        divided = (width // changed.parallel.tensor for width in split_widths(changed.model).values())
        possible = min(changed.spec.hidden_size, *changed.spec.attention_widths, *divided) > 0
        return max(memory.total for memory in plan(changed)) if possible else math.inf

    most = max(plan(config), key=lambda memory: memory.total)
    if most.total <= limit:
        return
    terms = {field.name: getattr(most, field.name) for field in fields(most) if field.name != "host"}
    largest = [name for name in sorted(terms, key=lambda name: -terms[name])[:3] if 100 * terms[name] > most.total]
    shown = ", ".join(f"{name.replace('_', ' ')} {size_text(terms[name])}" for name in largest)
    unusual = [key for key, usual in _USUAL.items() if (_get(config, key) or 0) > usual]
    key = min(unusual, key=lambda key: total(key, _USUAL[key]), default=_scaling_key(config, largest[0]))
    works = [
        f"{saving}={str(value).lower()}"
        for saving, (default, value) in _SAVING.items()
        if _get(config, saving) == default and not config.parallel.fsdp and total(saving, value) <= limit
        if not any(offload(_with(config, saving, value)))
    ][:1]
    replicas = config.parallel.fsdp_replicas
    fewer = (n for n in range(replicas // 2, 0, -1) if replicas % n == 0)
    fitting = next((n for n in fewer if total("parallel.fsdp_replicas", n) <= limit), None)
    if fitting is not None:
        works.append(f"parallel.fsdp_replicas={fitting}")
    value = smaller = _get(config, key)
    # Widths stay multiples of the ranks that divide them.
    step = config.parallel.tensor if key in ("model.ffn_hidden_size", "model.vocab_multiple") else 1
    least = step if key in _USUAL else value
    while smaller > least and total(key, smaller) > limit:
        smaller = max(smaller // 2 // step * step, least)
    if total(key, smaller) <= limit:
        works.append(f"{key}={smaller}")
    works.append("more ranks by parallel.tensor or parallel.pipeline")
    rule = f"by formula a rank needs {size_text(most.total)} ({shown}), and {who_has} {size_text(limit)}"
    raise ConfigError(source, [Problem(key, value, rule, f"try {', or '.join(works)}")])


def _scaling_key(config: Config, term: str) -> str:
    """Return the key to which `term` is proportional."""
    if term in ("activations", "loss", "backward", "communication"):
        return "training.micro_batch_size" if config.training.micro_batch_size > 1 else "training.seq_length"
    return "model.num_layers"


def _get(config: Config, key: str) -> Any:
    section, name = key.split(".")
    return getattr(getattr(config, section), name)


def _with(config: Config, key: str, value: Any) -> Config:
    section, name = key.split(".")
    return config.model_copy(update={section: getattr(config, section).model_copy(update={name: value})})
