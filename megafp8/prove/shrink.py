"""A small config with all features of a large one, computed by a pure function.

The small config keeps every kind of layer, pipeline stages with different numbers of layers, every axis of the layout,
and every option. Numbers shrink in proportion (`numbers`) to other numbers of the same quantity, which their
declaration names (`megafp8.section.Quantity`). Layers (`layers`), the layout (`layout`) and batches shrink, too: a step
has as many micro-batches as fill the pipeline. Features that a CPU does not have, sources of rounding, and contents of
other files are replaced. Each change is recorded with its reason.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

from pydantic import BaseModel

from megafp8.config import Config, ConfigError, check_layout, fewest_ranks
from megafp8.numerics.dtypes import in_bf16
from megafp8.prove.layers import keep_layers, layer_keys, patterns_of, renumbered
from megafp8.prove.layout import MOST_RANKS, ProvedLayout, fold
from megafp8.prove.numbers import in_proportion
from megafp8.section import Quantity, Section
from megafp8.spec import PartRecord
from megafp8.training.fp8_config import check_recipe
from megafp8.training.pipeline import num_microbatches, plan_pipeline

STEPS = 8
"""Number of steps of the run; only the first ones are executed."""
UNKNOWN_VOCABULARY = 2**15
"""Assumed size of a vocabulary that only the tokenizer knows."""
SPECIAL_TOKENS = 16
"""Number of ids at the end of the vocabulary that the data does not contain."""


class Sizes(NamedTuple):
    """Target sizes of a small config. Numbers become about as large as these, unless they are smaller in the config.

    `unit`: channels are multiples of this, times the ranks that divide them. `kept`: channels up to this number stay
    unchanged, because kernels are compiled for them. `tokens`: tokens of a sample. `chosen`: tokens selected out of
    many. `vocabulary`: size of the vocabulary.
    """

    unit: int
    kept: int
    tokens: int
    chosen: int
    vocabulary: int


SIZES = {"cpu": Sizes(4, 0, 32, 3, 96), "cuda": Sizes(128, 512, 256, 64, 512)}
"""Target sizes by device. GPU kernels need widths that are multiples of their tiles, and sequences of several tiles."""


@dataclass(frozen=True)
class Change:
    """Changed key of the config, with its value before and after, and the reason."""

    key: str
    before: Any
    after: Any
    reason: str


class Small(NamedTuple):
    """Small config, the number of ranks for it and for the original, and the changes."""

    config: Config
    ranks: int
    original_ranks: int
    changes: list[Change]


class Number(NamedTuple):
    """Integer of a config: its dotted key, quantity and value."""

    key: str
    quantity: Quantity
    value: int


def shrink(
    config: Config, ranks: int | None = None, most_ranks: int = MOST_RANKS, device: Literal["cpu", "cuda"] = "cpu"
) -> Small:
    """Return the small config of `config`.

    Args:
        config: Config to shrink.
        ranks: Number of ranks of the config. Default: the fewest on which it runs, or twice as many if data parallelism
            would have only one rank.
        most_ranks: Maximum number of ranks of the small config.
        device: cpu for sums in float64; cuda for the precision, kernels and CUDA graphs of the config.

    Raises:
        ConfigError: The config cannot run on `ranks` ranks.
    """
    ranks = ranks or default_ranks(config)
    check_layout(config, ranks)
    check_recipe(config, config.name)
    if config.spec.stem.vocab_size is None:  # only the tokenizer knows it, which need not be available
        config = config.model_copy(update={"model": config.model.model_copy(update={"vocab_size": UNKNOWN_VOCABULARY})})
    original, sizes = ProvedLayout.from_config(config, ranks), SIZES[device]
    layout = fold(original, most_ranks, keeps_pipeline=_is_file(config.parallel.schedule) and device == "cpu")
    scale = 1
    while True:
        edit = _Edit(config)
        _execution(edit)
        if device == "cuda":
            edit.set("device", device, "the ranks are GPUs")
        else:
            _in_float64(edit)
        _data(layout, sizes, edit)
        _layout(original, layout, edit)
        _batch(original, layout, edit)
        _layers(layout, edit)
        _numbers(layout, sizes, scale, edit)
        try:
            small = edit.config()
            check_layout(small, layout.ranks)
            check_recipe(small, small.name)
            plan_pipeline(small, num_microbatches(small, layout.ranks))
            return Small(small, layout.ranks, original.ranks, edit.changes(original, layout))
        except ConfigError:
            # Larger numbers allow products and fractions of others: a part of a head, groups of groups.
            if scale == 16:
                raise
            scale *= 2


def _is_file(schedule: str) -> bool:
    """Return whether a schedule is a table, which is for one number of ranks and micro-batches."""
    return schedule.endswith(".csv")


def default_ranks(config: Config) -> int:
    """Return the number of ranks for a config if none is given."""
    ranks = fewest_ranks([config])
    if ProvedLayout.from_config(config, ranks).data == 1:
        try:
            check_layout(config, 2 * ranks)
            return 2 * ranks
        except ConfigError:
            pass
    return ranks


class _Edit:
    """Config that is being changed. `set` replaces a value and records the reason."""

    def __init__(self, config: Config) -> None:
        self.before = config
        self._tree: dict[str, Any] = config.model_dump(mode="json")
        self._original = dict(_leaves(config.model_dump(mode="json")))
        self._reasons: dict[str, str] = {}

    def set(self, key: str, value: Any, reason: str, *, default: Any = None) -> None:
        """Set a key. `default` is its value before, if the config does not write the key."""
        self._original.setdefault(key, default)
        *sections, name = key.split(".")
        section = self._tree
        for part in sections:
            section = section[part]
        section[name] = value
        self._reasons[key] = reason

    def set_all(self, values: Mapping[str, Any], reason: str) -> None:
        """Set several keys for the same reason."""
        for key, value in values.items():
            self.set(key, value, reason)

    def get(self, key: str) -> Any:
        """Return the current value of a dotted key, or None."""
        value: Any = self._tree
        for part in key.split("."):
            value = None if value is None else value.get(part)
        return value

    def config(self) -> Config:
        """Return the changed config."""
        return Config.model_validate(self._tree)

    def changes(self, original: ProvedLayout, layout: ProvedLayout) -> list[Change]:
        """Return the keys that changed, with reasons."""
        now = dict(_leaves(self._tree))
        changes = [
            Change(key, self._original.get(key), now.get(key), self._reason(key))
            for key in dict.fromkeys([*self._original, *now])
            if self._original.get(key) != now.get(key)
        ]
        if original.data != layout.data:
            changes.insert(0, Change("data-parallel ranks", original.data, layout.data, "fewer ranks"))
        return changes

    def _reason(self, key: str) -> str:
        known = [name for name in self._reasons if key == name or key.startswith(f"{name}.")]
        return self._reasons[max(known, key=len)]


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted keys and values of a tree, without sections."""
    for name, value in tree.items():
        if isinstance(value, Mapping) and value and not prefix.startswith("data.train"):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


# --- keys that are not numbers ---------------------------------------------------------------------------------------


def in_float64(config: Config) -> Config:
    """Return a config of the same computation on CPUs in float64."""
    edit = _Edit(config)
    _in_float64(edit)
    return edit.config()


def on_cpus(config: Config) -> Config:
    """Return a config of the same computation on CPUs in the config's precision."""
    edit = _Edit(config)
    _on_cpus(edit)
    return edit.config()


def one_rank(config: Config) -> Config:
    """Return a config of the same computation on one rank."""
    fp8 = config.fp8.model_copy(update={"param_gather": False})
    optimizer = config.optimizer.model_copy(update={"offload": 0.0})
    return config.model_copy(update={"parallel": type(config.parallel)(), "fp8": fp8, "optimizer": optimizer})


def _on_cpus(edit: _Edit) -> None:
    """Replace features that a CPU does not have."""
    edit.set("device", "cpu", "the ranks are processes on CPUs")
    edit.set_all({"training.cuda_graphs": False, "fp8.gemm_backend": "auto", "fp8.gemm_autotune": None}, _GPUS)
    if edit.before.parallel.overlap_tensor == "symmetric":
        edit.set("parallel.overlap_tensor", "auto", _GPUS)


def _in_float64(edit: _Edit) -> None:
    """Replace features that a CPU does not have, and sources of rounding."""
    config = edit.before
    _on_cpus(edit)
    edit.set("training.precision", "fp64", "sums in any order are equal to 1e-10")
    why = "it applies to 16-bit precisions only"
    edit.set("training.loss_scale", _defaults(config.training.loss_scale), why)
    edit.set("optimizer.store_param_remainders", False, why)
    edit.set("optimizer.reduce_dtype", "fp32", "rounded sums depend on their order")
    if config.optimizer.moments_dtype == "fp8":
        edit.set("optimizer.moments_dtype", "fp32", "the noise of FP8 moments depends on how they are sharded")


def _execution(edit: _Edit) -> None:
    """Turn off features that depend on speed or on the layout, or that do not affect the computation."""
    config = edit.before
    edit.set("fp8.auto_filter", "none", "it selects layers by the speed of a GPU")
    drops = any(record.capacity_factor is not None for record in config.spec.expert_records)
    if drops and config.parallel.tensor * config.parallel.context > 1:
        reason = "the capacity of an expert applies to a rank's tokens, so token dropping depends on the layout"
        edit.set("model.moe.capacity_factor", None, reason)
    watching: dict[str, Any] = {
        "logging": _defaults(config.logging), "resilience": _defaults(config.resilience), "profile": None,
        "training.eval_interval": 0, "training.evaluate": None, "data.validation": {},
        "data.validation_by_source": False,
    }  # fmt: skip
    edit.set_all(watching, "it only watches a run and does not change the computation")
    edit.set("stages", [], "one stage of a run is proven at a time")
    places = {"checkpoint": _defaults(config.checkpoint), "run_dir": "runs"}
    edit.set_all(places, "checkpoints are in a temporary folder, and weights are random")


_GPUS = "it applies to GPUs only"


def _defaults(section: Section) -> dict[str, Any]:
    return type(section)().model_dump(mode="json")


def _data(layout: ProvedLayout, sizes: Sizes, edit: _Edit) -> None:
    """Replace the data by random tokens of a small vocabulary, with up to three data sets."""
    config, reason = edit.before, "the data is random, with a small vocabulary"
    data, model = config.data, config.model
    multiple = max(8, sizes.unit) * layout.tensor
    padded = -(-sizes.vocabulary // multiple) * multiple
    assert model.vocab_size is not None
    size = padded if model.vocab_size % model.vocab_multiple == 0 else padded - 3
    edit.set_all({"model.vocab_multiple": multiple, "model.vocab_size": size}, reason)
    sets = [f"set-{i}" for i in range(min(3, len(data.train)))]
    weights = [*data.train.values()] if isinstance(data.train, dict) else None
    train = {
        "train": sets if weights is None else dict(zip(sets, weights)), "split": "1,0,0", "restart_changed": False,
        "tokenizer": None, "streams": _defaults(data.streams), "num_workers": 0, "index_cache": None,
        "object_cache": _defaults(data.object_cache),
    }  # fmt: skip
    edit.set_all({f"data.{key}": value for key, value in train.items()}, reason)
    special = [*range(size - SPECIAL_TOKENS, size)]
    used = {"gpt": (), "bert": ("cls", "sep", "mask", "pad"), "t5": ("sep", "pad")}[model.architecture]
    ids: dict[str, Any] = {name: special[i] for i, name in enumerate(used)}
    if model.architecture == "t5":
        ids["sentinels"] = special[:3:-1]
    edit.set("data.special_tokens", _defaults(data.special_tokens) | ids, reason)
    edit.set("training.decoder_seq_length", None, "the spans determine the number of tokens")
    edit.set("data.masked_lm.whole_words", False, "only a tokenizer knows where words begin")
    edit.set("data.distillation", None, "a teacher is another model")
    edit.set("data.grpo", None, "sampled texts are not in a data set")
    if data.dpo is not None:
        edit.set("data.dpo.reference", "live", "the data is new")
    if data.fill_in_the_middle is not None:
        marks = dict(zip(("prefix", "middle", "suffix"), special))
        edit.set_all({f"data.fill_in_the_middle.{name}": mark for name, mark in marks.items()}, reason)


def _layout(original: ProvedLayout, layout: ProvedLayout, edit: _Edit) -> None:
    """Set the sizes of the parallel axes."""
    names = {"tensor": "tensor", "context": "context", "pipeline": "pipeline", "expert": "expert",
             "expert_tensor": "expert_tensor", "fsdp_replicas": "replicas"}  # fmt: skip
    lost = any(getattr(layout, name) == 1 < getattr(original, name) for name in names.values())
    reason = f"{layout.ranks} of {original.ranks} ranks" + ("" if lost else ", with every axis")
    for key, name in names.items():
        edit.set(f"parallel.{key}", getattr(layout, name), reason)
    if layout.pipeline == 1 and not isinstance(edit.before.parallel.layers_per_stage, str):
        edit.set("parallel.layers_per_stage", type(edit.before.parallel)().layers_per_stage, reason)
    edit.set("parallel.virtual_pipeline", min(2, edit.before.parallel.virtual_pipeline), reason)
    edit.set("parallel.bucket_mib", min(0.01, edit.before.parallel.bucket_mib), "to have several buckets")


def _batch(original: ProvedLayout, layout: ProvedLayout, edit: _Edit) -> None:
    """Set the batch to two micro-batches more than fill the pipeline.

    If ranks have several stages, the number of micro-batches is a multiple of the pipeline's ranks.
    """
    t = edit.before.training
    count = t.global_batch_size // (t.micro_batch_size * original.data)
    factor = 2 if edit.before.parallel.virtual_pipeline == 1 and layout.pipeline > 1 else layout.pipeline
    few = max(2, layout.pipeline + (factor if count > original.pipeline else 0))
    small = count if _is_file(edit.before.parallel.schedule) else min(count, few)
    size, reason = min(2, t.micro_batch_size), "just enough micro-batches to fill the pipeline"
    edit.set("training.micro_batch_size", size, reason)
    edit.set("training.global_batch_size", small * size * layout.data, reason)


def _layers(layout: ProvedLayout, edit: _Edit) -> None:
    """Keep a few layers, and renumber the keys that refer to layers."""
    config = edit.before
    kept = keep_layers(config, layout.pipeline * min(2, config.parallel.virtual_pipeline))
    reason = f"layers {', '.join(map(str, kept.layers))} of {config.spec.num_blocks}: every kind, in uneven stages too"
    for key, value in layer_keys(config, kept):
        edit.set(key, value, reason)
    for number in numbers_of(config):
        if number.quantity is Quantity.LAYER:  # lists of them are in layer_keys
            edit.set(number.key, kept.number(number.value), reason)
    if any(renumbered(pattern, kept) != pattern for pattern in patterns_of(config)):
        _renumber(edit, partial(renumbered, kept=kept), reason)


def _renumber(edit: _Edit, new: Callable[[str], str], reason: str) -> None:
    """Renumber the patterns that refer to layers by index."""
    f = edit.before.fp8
    edit.set("fp8.include", [*map(new, f.include)], reason)
    edit.set("fp8.exclude", [*map(new, f.exclude)], reason)
    edit.set("fp8.static_amax", {new(name): value for name, value in f.static_amax.items()}, reason)
    edit.set("fp8.custom", [rule.model_dump() | {"layers": new(rule.layers)} for rule in f.custom], reason)
    groups = [x.model_dump(mode="json") | {"match": [*map(new, x.match)]} for x in edit.before.optimizer.groups]
    edit.set("optimizer.groups", groups, reason)


# --- numbers ---------------------------------------------------------------------------------------------------------


def quantity_of(annotation: Any, metadata: Any = ()) -> Quantity | None:
    """Return the quantity that a field's type names, or None."""
    for annotated in (*metadata, *get_args(annotation)):
        if isinstance(annotated, Quantity):
            return annotated
        if get_args(annotated) and (inside := quantity_of(annotated)) is not None:
            return inside
    return None


def numbers_of(config: Config) -> list[Number]:
    """Return the numbers of a config that have a quantity. Numbers that a layer part inherits are not repeated."""

    def walk(section: BaseModel, prefix: str) -> Iterator[Number]:
        resolved = section.resolved(config.model) if isinstance(section, PartRecord) else section
        for name, field in type(section).model_fields.items():
            value, key = getattr(section, name), f"{prefix}{name}"
            quantity = quantity_of(field.annotation, field.metadata)
            inherits = isinstance(section, PartRecord) and name not in section.given
            if inherits and (field.default is None or getattr(resolved, name) != field.default):
                continue
            if isinstance(value, BaseModel):
                yield from walk(value, f"{key}.")
            elif isinstance(value, dict):
                for inner, item in value.items():
                    if isinstance(item, BaseModel):
                        yield from walk(item, f"{key}.{inner}.")
            elif quantity is not None and isinstance(value, int):
                yield Number(key, quantity, value)

    return [*walk(config, "")]


def _numbers(layout: ProvedLayout, sizes: Sizes, scale: int, edit: _Edit) -> None:
    """Shrink the numbers in proportion. `scale` makes them larger than the minimum."""
    config = edit.before
    numbers = [x for x in numbers_of(config) if edit.get(x.key.rpartition(".")[0]) is not None]
    values = {quantity: sorted({x.value for x in numbers if x.quantity is quantity}) for quantity in Quantity}
    heads = _heads(values[Quantity.HEADS], config, layout)
    channels = _channels(values[Quantity.CHANNELS], config, layout, sizes, scale, heads)
    if channels.get(config.spec.hidden_size, 0) >= config.spec.hidden_size:  # an unchanged width keeps its heads
        heads = dict(zip(values[Quantity.HEADS], values[Quantity.HEADS]))
    small = {
        Quantity.HEADS: heads,
        Quantity.EXPERTS: _experts(values[Quantity.EXPERTS], config, layout, scale),
        Quantity.CHANNELS: channels,
        Quantity.TOKENS: _tokens(values[Quantity.TOKENS], config, layout, sizes, scale),
        Quantity.CHOSEN: {value: min(value, sizes.chosen) for value in values[Quantity.CHOSEN]},
        Quantity.STEPS: {value: STEPS // 4 * 4**i for i, value in enumerate(x for x in values[Quantity.STEPS] if x)},
    }
    if sizes.kept and config.model.head_dim is None and config.model.latent_attention is None:
        edit.set("model.head_dim", config.spec.attention_widths[0], "heads keep their width")
    for number in numbers:
        if number.value in small.get(number.quantity, {}):
            value = min(number.value, small[number.quantity][number.value])
            edit.set(number.key, value, f"{number.quantity.value} in proportion", default=number.value)
    _functions_of_widths(edit)


def _heads(values: list[int], config: Config, layout: ProvedLayout) -> dict[int, int]:
    units = {value: layout.tensor for value in values if value % config.parallel.tensor == 0}
    return in_proportion(values, units, 2)


def _experts(values: list[int], config: Config, layout: ProvedLayout, scale: int) -> dict[int, int]:
    """Return small numbers of experts. Ranks have several experts each if they do in the config."""
    counts = {record.num_experts for record in config.spec.expert_records}
    units = {count: layout.expert * (1 + (count > config.parallel.expert)) for count in counts}
    return in_proportion(values, units, 2 * scale)


def _channels(
    values: list[int], config: Config, layout: ProvedLayout, sizes: Sizes, scale: int, heads: Mapping[int, int]
) -> dict[int, int]:
    model, unit = config.model, sizes.unit * max(layout.tensor, layout.expert_tensor) * scale
    if sizes.kept:  # larger values become the next multiples, in order
        large = [value for value in values if value > sizes.kept]
        return {value: (sizes.kept // unit + 1 + i) * unit for i, value in enumerate(large)}
    units = dict.fromkeys(values, unit)
    if model.head_dim is None and model.latent_attention is None:
        units[model.hidden_size] = unit * heads[model.num_attention_heads]
    return in_proportion(values, units, 2 * unit)


def _tokens(values: list[int], config: Config, layout: ProvedLayout, sizes: Sizes, scale: int) -> dict[int, int]:
    """Return small lengths: a sample that all axes can divide, and shorter and longer lengths in proportion."""
    length, p = config.training.seq_length, config.parallel
    parts = 2 * layout.context * (layout.tensor if p.sequence_parallel else 1)
    small = -(-sizes.tokens * scale // parts) * parts
    shorter = in_proportion([value for value in values if value < length], {}, sizes.tokens // 8)
    longer = [value for value in values if value > length]
    return shorter | {length: small} | {value: small * (2 + i) for i, value in enumerate(longer)}


def _functions_of_widths(edit: _Edit) -> None:
    """Set keys that are not widths but depend on them."""
    model = edit.before.model
    hidden, heads = edit.get("model.hidden_size"), edit.get("model.num_attention_heads")
    before, root = math.sqrt(model.hidden_size), math.sqrt(hidden)
    if math.isclose(model.embedding_multiplier, before, rel_tol=1e-4):
        edit.set("model.embedding_multiplier", root, "it is √model.hidden_size")
    elif model.embedding_multiplier == in_bf16(before):
        edit.set("model.embedding_multiplier", in_bf16(root), "it is √model.hidden_size in bf16")
    if model.head_dim is not None and model.attention_scale == (model.head_dim / 2) ** -0.5:
        edit.set("model.attention_scale", (edit.get("model.head_dim") / 2) ** -0.5, "it is √(2 / model.head_dim)")
    if model.longrope is not None:
        pairs = int((edit.get("model.head_dim") or hidden // heads) * model.partial_rotary_factor) // 2
        longrope = model.longrope.with_pairs(pairs)
        for key in ("short_factor", "long_factor"):
            edit.set(f"model.longrope.{key}", getattr(longrope, key), "it has one value per pair of channels")
