"""Rules between keys of the config, and between the config and the number of ranks.

A rule is a function that yields Problems; `check_layout` runs all rules and raises one error with all problems. Rules
need neither torch, nor a device, nor a process group, so `--dry-run` checks a 16,384-GPU job on a laptop.
"""

from __future__ import annotations

import difflib
import math
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace

from megafp8.config import encoder_checks, optimizer_checks, resilience_checks
from megafp8.config.resolve import kind_name
from megafp8.config.schema import Config, ModelConfig, Section
from megafp8.host.problems import ConfigError, Problem, divisors
from megafp8.kernels.limits import LARGEST_HEAD
from megafp8.layers.attention.record import attention_heads, attention_keys, shared_keys
from megafp8.layers.experts.record import MoeConfig, expert_layout, expert_ranks, experts
from megafp8.layers.hyper_connections.record import HyperConnectionsConfig, hyper_connections
from megafp8.layers.latent_attention.record import LatentAttentionConfig, latent_attention
from megafp8.layers.per_layer_embedding.record import (
    PerLayerEmbeddingConfig,
    per_layer_embedding,
    per_layer_embedding_layout,
)
from megafp8.layers.sparse_attention.record import SparseAttentionConfig, sparse_attention
from megafp8.parallel.pipeline.registry import SCHEDULES, unsplit_schedule
from megafp8.spec import PartRecord


def check_layout(config: Config, world_size: int, source: str = "config") -> None:
    """Raise ConfigError with every rule that `config` breaks on `world_size` ranks."""
    rules = (
        _model,
        _matrices,
        _windows,
        _layer_kinds,
        expert_layout,
        _tensor,
        _stages,
        shared_keys,
        per_layer_embedding_layout,
        _schedule,
        _recompute,
        _sequence,
        optimizer_checks.schedule,
        optimizer_checks.state_storage,
        optimizer_checks.loss_scale,
        optimizer_checks.chosen,
        optimizer_checks.qk_clip,
        optimizer_checks.average,
        optimizer_checks.offload,
        optimizer_checks.mup,
        _fp8,
        _overlap,
        _fsdp,
        _param_gather,
        _keep_weight_transposes,
        _paired_wgrad,
        _checkpoint,
        _lora,
        _tokenizer,
        _packing,
        _text,
        _objective,
        encoder_checks.data,
        _blend,
        _urls,
        _object_cache,
        _evaluation,
        _deterministic,
        _batch_invariant,
        _cuda_graphs,
        resilience_checks.layout,
        _profile,
    )
    if problems := [*_pattern(config.model), *_sizes(config)]:
        raise ConfigError(source, problems)
    problems = [problem for rule in rules for problem in rule(config)]
    problems += _problems_on_ranks(config, world_size)
    if problems:
        raise ConfigError(source, problems)


def fewest_ranks(configs: Sequence[Config]) -> int:
    """Return the smallest number of ranks on which all `configs`, the stages of a run, can run.

    If no number works, return one that every model-parallel size divides; `check_layout` then reports the problems.
    """
    least = 1
    for p in (config.parallel for config in configs):
        least = math.lcm(least, p.pipeline * math.lcm(p.tensor * p.context, p.expert_ranks))
    most = max(config.training.global_batch_size for config in configs) * least
    for ranks in range(least, min(most, _MOST_RANKS) + 1, least):
        divide = all(not [*_batch(config, ranks)] for config in configs)  # a cheap rule that rejects most numbers
        if divide and not any(problem for config in configs for problem in _problems_on_ranks(config, ranks)):
            return ranks
    return least


def _problems_on_ranks(config: Config, world_size: int) -> list[Problem]:
    """Return the problems that depend on the number of ranks."""
    rules = (
        _counts,
        _batch,
        _fsdp_replicas,
        expert_ranks,
        resilience_checks.faults,
        resilience_checks.replicas,
        _profiled_ranks,
        _streams_of_ranks,
    )
    return [problem for rule in rules for problem in rule(config, world_size)]


def _profile(config: Config) -> Iterator[Problem]:
    p = config.profile
    if p is None:
        return
    if p.steps is None:
        if set(p.record) != {"collectives"}:
            yield Problem("profile.steps", None, f"profile.record is {p.record}", "name the first and the last step")
        return
    first, last = p.steps
    if first > last:
        yield Problem("profile.steps", [first, last], "the first step is after the last", f"try [{last}, {first}]")
    if first > config.training.steps:
        rule = f"the run ends with step {config.training.steps} (training.steps)"
        yield Problem("profile.steps", [first, last], rule, "name steps of the run")


def _profiled_ranks(config: Config, world_size: int) -> Iterator[Problem]:
    p = config.profile
    if p is not None and p.ranks != "all" and max(p.ranks) >= world_size:
        yield Problem("profile.ranks", p.ranks, f"the job has ranks 0 to {world_size - 1}", "name ranks of the job")


def _lora(config: Config) -> Iterator[Problem]:
    if config.lora is None:
        return
    m = config.model
    without = "LoRA does not support it; leave the section lora out"
    if m.architecture != "gpt":
        yield Problem("lora", "set", f"model.architecture is {m.architecture}", without)
    if m.mtp_num_layers > 0:
        yield Problem("lora", "set", "the model has model.mtp_num_layers", without)
    if not config.spec.lora_targets:
        yield Problem("lora", "set", "no layer of the model has projections that can be adapted", without)
    elif unknown := sorted({*config.lora_targets} - {*config.spec.lora_targets}):
        rule = f"the model has no {', '.join(unknown)} that can be adapted"
        rule += "" if m.moe is None else "; adapters of experts are not supported"
        known = [x for x in config.spec.lora_targets if x in config.lora_targets] or list(config.spec.lora_targets)
        yield Problem("lora.targets", list(config.lora_targets), rule, f"try [{', '.join(known)}]")
    if config.fp8.param_gather:
        yield Problem("fp8.param_gather", True, "with lora, weights are frozen and not gathered", "try false")


def _tokenizer(config: Config) -> Iterator[Problem]:
    if config.data.tokenizer is None and config.model.vocab_size is None:
        yield Problem(
            "model.vocab_size",
            None,
            "it is not given, and there is no data.tokenizer from which to take it",
            "set either",
        )


def _packing(config: Config) -> Iterator[Problem]:
    d = config.data
    if d.loss_on is not None and config.model.architecture != "gpt":
        rule = f"model.architecture is {config.model.architecture}, which is not trained to predict the next token"
        yield Problem("data.loss_on", d.loss_on, rule, "leave it out")
    elif d.loss_on is not None and not d.packs_whole_documents:
        rule = f"data.loss_on is {d.loss_on}, and only best_fit and balanced keep answers with their prompts"
        yield Problem("data.packing", d.packing, rule, "try best_fit")
    if not d.packs_whole_documents or (d.reset_at_documents and d.mask_eod_loss):
        return
    rule = "each document attends only to itself and padding has no loss, so it needs two more keys"
    works = "try data.reset_at_documents=true data.mask_eod_loss=true, or data.packing=concatenate"
    yield Problem("data.packing", d.packing, rule, works)


def _text(config: Config) -> Iterator[Problem]:
    """Yield a problem for each setting that cannot be combined with text that is tokenized while the run trains."""
    d, text = config.data, config.data.text
    if d.grpo is not None:  # its prompts are not training text
        return
    if not text:
        if d.streams != type(d.streams)():
            rule = "it applies to text, but data.train and data.validation have none"
            yield Problem("data.streams", "set", rule, "leave it out")
        return
    key, path = text[0]
    where = f"{key}, {path}, is text that is tokenized while the run trains"
    if d.tokenizer is None:
        yield Problem("data.tokenizer", None, where, "set it, or write .bin/.idx files with megafp8 preprocess")
    if d.packing != "concatenate":
        rule = f"{where}, so the lengths of its documents are not known in advance"
        yield Problem(
            "data.packing", d.packing, rule, "try concatenate, or write .bin/.idx files with megafp8 preprocess"
        )
    if d.has_loss_mask:
        key, value = ("data.dpo", "set") if d.loss_on is None else ("data.loss_on", d.loss_on)
        rule = f"{where}, without a loss mask"
        yield Problem(key, value, rule, "leave it out, or write .bin/.idx files with megafp8 preprocess")
    in_train = [path for key, path in text if key == "data.train"]
    if in_train and len(d.train) > 1 and not isinstance(d.train, dict):
        rule = f"a list is weighted by numbers of tokens, but the number of {in_train[0]} is not known"
        yield Problem("data.train", d.train, rule, "give shares of the samples: {path: weight}")
    if config.training.eval_interval and len(in_train) == len(set(d.train)) and not d.validation:
        rule = f"{where}, so data.split takes no documents from it"
        yield Problem("training.eval_interval", config.training.eval_interval, rule, "give data.validation, or try 0")


def _streams_of_ranks(config: Config, world_size: int) -> Iterator[Problem]:
    """Check that each data-parallel rank always reads the same canonical streams."""
    count = config.data.streams.canonical_streams
    if config.data.text and count is not None and config.data.grpo is None:
        yield from canonical_streams_problem(config, world_size, count)


def canonical_streams_problem(config: Config, world_size: int, count: int) -> Iterator[Problem]:
    """Yield a problem if the data-parallel ranks cannot read `count` canonical streams evenly."""
    t, p = config.training, config.parallel
    ranks = world_size // (p.tensor * p.pipeline * p.context)
    together = t.micro_batch_size * ranks
    if together and count % together:
        rule = (
            f"not a multiple of training.micro_batch_size ({t.micro_batch_size}) times {ranks} data-parallel ranks, so "
            "a rank would not have the same streams in each step"
        )
        yield Problem("data.streams.canonical_streams", count, rule, f"try {-(-count // together) * together}")


def _objective(config: Config) -> Iterator[Problem]:
    objectives = config.data.objectives
    if len(objectives) > 1:
        rule = f"a model has one objective, and {' and '.join(f'data.{name}' for name in objectives)} are set"
        yield Problem(f"data.{[*objectives][1]}", "(a section)", rule, "leave out all but one")
    for section in objectives.values():
        yield from section.problems(config)


def _blend(config: Config) -> Iterator[Problem]:
    weights = config.data.train
    if not isinstance(weights, dict):
        return
    total = sum(weights.values())
    works = "give weights of ordinary size, such as numbers of tokens or shares of 1"
    for prefix, weight in weights.items():
        if weight / total < sys.float_info.min:
            rule = f"its share of the sum of all weights ({total:g}) is too small for a float"
            yield Problem(f"data.train.{prefix}", weight, rule, f"{works}, or leave the data set out")


_FEWEST_BLOCKS = 64


def _urls(config: Config) -> Iterator[Problem]:
    """Check paths that may be URLs, without contacting a storage."""
    data, checkpoint = config.data, config.checkpoint
    paths: list[tuple[str, str | None]] = [("data.train", path) for path in data.train]
    paths += [(f"data.validation.{name}", path) for name, path in data.validation.items()]
    paths += [("checkpoint.folder", checkpoint.folder), ("checkpoint.init_from", checkpoint.init_from)]
    urls = [(key, path) for key, path in paths if path is not None and ":/" in path]
    if urls:
        from megafp8.host.object_store import url_problem  # loads fsspec, which most configs do not need

        for key, path in urls:
            if (problem := url_problem(path)) is not None:
                yield Problem(key, path, *problem)


def _object_cache(config: Config) -> Iterator[Problem]:
    cache = config.data.object_cache
    fewest = _FEWEST_BLOCKS * cache.block_mib / 1024
    if cache.limit_gib < fewest:
        rule = f"it holds fewer than {_FEWEST_BLOCKS} blocks of {cache.block_mib:g} MiB; unread blocks would be deleted"
        yield Problem("data.object_cache.limit_gib", cache.limit_gib, rule, f"try {fewest:g}, or smaller blocks")


def _evaluation(config: Config) -> Iterator[Problem]:
    t, e = config.training, config.training.evaluate
    if config.data.validation and not t.eval_interval:
        rule = "data.validation is given, but no interval for its evaluation"
        yield Problem("training.eval_interval", 0, rule, "set a number of steps, or leave data.validation out")
    if config.data.validation_by_source and not t.eval_interval:
        rule = "there is no interval for evaluations"
        yield Problem("data.validation_by_source", True, rule, "set training.eval_interval, or leave it out")
    if e is None:
        return
    if config.model.architecture != "gpt":
        rule = f"model.architecture is {config.model.architecture}, and only models of architecture gpt generate text"
        yield Problem("training.evaluate", "set", rule, "leave it out")
    if not e.prompts and not e.tasks:
        yield Problem("training.evaluate", "set", "it has neither prompts nor tasks", "give either, or leave it out")
    if config.data.tokenizer is None:
        yield Problem("training.evaluate", "set", "texts need a tokenizer", "set data.tokenizer, or leave it out")
    for key, value in (("include_path", e.include_path), ("limit", e.limit)):
        if value is not None and not e.tasks:
            yield Problem(f"training.evaluate.{key}", value, "there are no tasks", "leave it out, or give tasks")


def _matrices(config: Config) -> Iterator[Problem]:
    m, most = config.model, 2**60
    ffn = m.ffn_hidden_size or 4 * m.hidden_size
    widths = {"hidden_size": m.hidden_size, "ffn_hidden_size": 2 * ffn, "head_dim": attention_keys(m).channels}
    if m.vocab_size is not None:
        widths["vocab_multiple" if m.vocab_multiple > m.vocab_size else "vocab_size"] = config.spec.stem.rows
    heads = m.num_attention_heads + 2 * (m.num_query_groups or m.num_attention_heads)
    for key, width in widths.items():
        others = m.hidden_size * (heads if key == "head_dim" else 1)
        if others * width > most:
            rule = f"with model.hidden_size {m.hidden_size} a matrix has {others * width:.3g} elements"
            yield Problem(f"model.{key}", getattr(m, key), f"{rule}; a tensor has {most:.3g} at most", "try fewer")


def _windows(config: Config) -> Iterator[Problem]:
    full, layers = config.model.full_attention_layers, config.model.num_layers
    if full and config.model.sliding_window is None:
        works = "set model.sliding_window, or leave it out"
        yield Problem("model.full_attention_layers", full, "no layer has a window", works)
    if full != sorted(set(full) & set(range(layers))):
        works = f"try numbers from 0 to {layers - 1}, each once, in ascending order"
        yield Problem(
            "model.full_attention_layers",
            full,
            f"these are not indices of the {layers} layers in ascending order",
            works,
        )


def _pattern(m: ModelConfig) -> Iterator[Problem]:
    """Yield the problems of the names in model.pattern, which must be valid before other rules can look at layers."""
    if bool(m.layer_kinds) != bool(m.pattern):
        key, other = ("layer_kinds", "pattern") if m.layer_kinds else ("pattern", "layer_kinds")
        yield Problem(f"model.{key}", [*getattr(m, key)], f"there is no model.{other}", "give both, or neither")
        return
    for entry in m.pattern:
        match = re.fullmatch(r"\s*([^\s*]+)\s*(\*\s*[1-9]\d{0,4}\s*)?", entry)
        if match is None or match[1] not in m.layer_kinds:
            near = difflib.get_close_matches(entry, m.layer_kinds, n=1) or [*m.layer_kinds]
            rule = f"this is none of model.layer_kinds ({', '.join(m.layer_kinds)}), with or without a count"
            yield Problem("model.pattern", entry, rule, f"try {near[0]}, or {near[0]} * 3")


def _layer_kinds(config: Config) -> Iterator[Problem]:
    m = config.model
    if not m.pattern:
        return
    if m.architecture != "gpt":
        rule = f"model.architecture is {m.architecture}, and only gpt has several kinds of layers"
        yield Problem("model.pattern", m.pattern, rule, "leave it out, with model.layer_kinds")
        return
    named = {entry.partition("*")[0].strip() for entry in m.pattern}
    if unused := [name for name in m.layer_kinds if name not in named]:
        rule = "model.pattern does not name it"
        yield Problem(f"model.layer_kinds.{unused[0]}", "given", rule, "name it there, or leave it out")
    say = "model.pattern already assigns a kind to each layer"
    for path, value in (
        ("full_attention_layers", m.full_attention_layers),
        ("rope_local_theta", m.rope_local_theta),
        ("moe.first_dense_layers", m.moe is not None and m.moe.first_dense_layers),
        ("moe.layer_interval", m.moe is not None and m.moe.layer_interval > 1 and m.moe.layer_interval),
    ):
        if value:
            yield Problem(f"model.{path}", value, say, "leave it out")
    for name, kind in m.layer_kinds.items():
        if not any(part is None or part.present for part in (kind.mixer, kind.ffn)):
            rule = "it has neither a mixer nor a feed-forward network"
            yield Problem(f"model.layer_kinds.{name}", "mixer: none, ffn: none", rule, "give one of them")
        if m.norm_position == "post" and kind.norm_position is not None:
            path, rule = f"model.layer_kinds.{name}.norm_position", "model.norm_position is post, for all layers"
            yield Problem(path, kind.norm_position, rule, "leave it out, or try model.norm_position=pre")


def _records(m: ModelConfig) -> Iterator[tuple[str, PartRecord]]:
    """Yield the records in model.layer_kinds, with their paths."""
    for name, kind in m.layer_kinds.items():
        for part, record in (("mixer", kind.mixer), ("ffn", kind.ffn)):
            if record is not None:
                yield f"model.layer_kinds.{name}.{part}", record


def _part_problems(config: Config) -> Iterator[Problem]:
    """Yield the problems between parts of layers and other sections.

    A key that a layer kind does not set is reported as a key of the model section.
    """
    m = config.model
    for path, record in _records(m):
        for problem in record.resolved(m).run_problems(config, path):
            key = problem.path.removeprefix(f"{path}.")
            inherited = key in type(record).model_fields and key not in record.given
            yield replace(problem, path=f"model.{key}") if inherited else problem
    for index, layer in enumerate(m.spec.layers[: m.num_layers]):
        kind = m.layer_kinds.get(kind_name(m, index))
        if kind is None or kind.mixer is None:
            yield from layer.mixer.run_problems(config, "model")


def split_widths(m: ModelConfig) -> dict[str, int]:
    """Return the sizes that tensor parallelism divides, by the path of their key."""
    widths: dict[str, int] = {}
    for index, layer in enumerate(m.spec.layers[: m.num_layers]):
        name = kind_name(m, index)
        for part, record in (("mixer", layer.mixer), ("ffn", layer.ffn)):
            section = getattr(m.layer_kinds[name], part) if name else None
            for key, value in record.widths(m).items():
                is_set = section is not None and key in section.given
                widths[f"model.layer_kinds.{name}.{part}.{key}" if is_set else f"model.{key}"] = value
    return widths


def network_problems(m: ModelConfig) -> Iterator[Problem]:
    """Yield the problems of the network that do not depend on the run."""
    for rule in (
        attention_heads, latent_attention, sparse_attention, hyper_connections, experts, encoder_checks.model,
        _norm_weights, _shared_norm, per_layer_embedding,
    ):  # fmt: skip
        yield from rule(m)
    for path, record in _records(m):
        yield from record.problems(m, path)


def _norm_weights(m: ModelConfig) -> Iterator[Problem]:
    """Yield a problem for each key that cannot be combined with norms without weights."""
    if m.norm_weights:
        return
    for key, value, why in (
        ("normalization", m.normalization != "rmsnorm" and m.normalization, "it has learned weights"),
        ("zero_centered_gamma", m.zero_centered_gamma, "it says how weights are stored"),
        ("architecture", m.architecture != "gpt" and m.architecture, "its norms have weights"),
    ):
        if value:
            works = f"try {ModelConfig.model_fields[key].default if key != 'normalization' else 'rmsnorm'}"
            yield Problem(f"model.{key}", value, f"model.norm_weights is false, and {why}", works)


def _shared_norm(m: ModelConfig) -> Iterator[Problem]:
    """Yield the broken rule that attention and MLP can only share a norm of their inputs."""
    if m.parallel_block == "shared_norm" and any(layer.norm_position == "output" for layer in m.spec.layers):
        rule = "layers with model.norm_position output have no norm before attention and MLP"
        yield Problem("model.parallel_block", m.parallel_block, rule, "try true, or model.norm_position=pre")


def _model(config: Config) -> Iterator[Problem]:
    m, s = config.model, config.training.seq_length
    yield from network_problems(m)
    yield from {str(problem): problem for problem in _part_problems(config)}.values()
    rows = m.max_position_embeddings
    if m.position_embedding == "learned" and rows is not None and rows < s:
        rule = f"fewer positions than training.seq_length ({s})"
        yield Problem("model.max_position_embeddings", rows, rule, f"try {s}")


def _tensor(config: Config) -> Iterator[Problem]:
    m, t = config.model, config.parallel.tensor
    for path, value in {**split_widths(m), "model.vocab_multiple": m.vocab_multiple}.items():
        if value % t:
            yield Problem("parallel.tensor", t, f"{path} ({value}) is not a multiple of it", divisors(value, t))


def _stages(config: Config) -> Iterator[Problem]:
    p, layers = config.parallel, config.spec.num_blocks
    name = "model.num_layers + model.num_decoder_layers" if config.model.architecture == "t5" else "model.num_layers"
    stages, explicit = p.pipeline * p.virtual_pipeline, p.layers_per_stage
    if p.pipeline > layers:
        rule = f"a stage would have no layers: {name} is {layers}"
        yield Problem("parallel.pipeline", p.pipeline, rule, f"try {layers} or less")
    elif stages > layers:
        rule = f"with parallel.pipeline = {p.pipeline} this gives {stages} stages, and a stage would have no layers"
        works = f"try {layers // p.pipeline} or less"
        yield Problem("parallel.virtual_pipeline", p.virtual_pipeline, f"{rule}: {name} is {layers}", works)
    elif isinstance(explicit, list):
        base, rest = divmod(layers, stages)
        works = f"try {[base + (i < rest) for i in range(stages)]}"
        if len(explicit) != stages:
            times = f" × parallel.virtual_pipeline = {p.virtual_pipeline}" if p.virtual_pipeline > 1 else ""
            rule = f"{len(explicit)} entries for parallel.pipeline = {p.pipeline}{times} stages"
        elif min(explicit) < 1:
            rule = f"stage {explicit.index(min(explicit))} would have no layers"
        elif sum(explicit) != layers:
            rule = f"it adds up to {sum(explicit)}, but {name} is {layers}"
        else:
            return
        yield Problem("parallel.layers_per_stage", explicit, rule, works)


def _schedule(config: Config) -> Iterator[Problem]:
    p, path, chunks = config.parallel, "parallel.schedule", config.parallel.virtual_pipeline
    if p.schedule in SCHEDULES:
        record = SCHEDULES[p.schedule]
        if not record.allows(chunks):
            wanted = f"{record.chunks or '2 or more'} stage{'' if record.chunks == 1 else 's'}"
            yield Problem(
                path, p.schedule, f"it is for {wanted} per rank, and parallel.virtual_pipeline is {chunks}",
                f"try parallel.virtual_pipeline={record.least_chunks}, or {path}={unsplit_schedule(chunks)}",
            )  # fmt: skip
        if p.placement not in (None, record.placement):
            yield Problem(
                "parallel.placement", p.placement, f"{path} {p.schedule} needs {record.placement}",
                f"try parallel.placement={record.placement}, or leave it out",
            )  # fmt: skip
    elif not p.schedule.endswith(".csv") and not re.fullmatch(r"[\w.]+:\w+", p.schedule):
        near = difflib.get_close_matches(p.schedule, SCHEDULES, n=1)
        yield Problem(
            path, p.schedule, f"none of {', '.join(SCHEDULES)}, and neither a .csv file nor module:function",
            f"try {near[0] if near else unsplit_schedule(1)}",
        )  # fmt: skip
    elif p.placement == "v" and chunks != 2:
        yield Problem(
            "parallel.placement", "v", f"v needs two stages per rank, and parallel.virtual_pipeline is {chunks}",
            "try parallel.virtual_pipeline=2",
        )  # fmt: skip
    if p.pipeline == 1 and chunks > 1:
        yield Problem(
            "parallel.virtual_pipeline", chunks, "parallel.pipeline is 1, so there is no pipeline bubble to reduce",
            f"try parallel.virtual_pipeline=1 and {path}={unsplit_schedule(1)}, or parallel.pipeline=2",
        )  # fmt: skip


def _recompute(config: Config) -> Iterator[Problem]:
    p, layers = config.parallel, config.spec.num_blocks
    stages, split = p.pipeline * p.virtual_pipeline, p.layers_per_stage
    most = layers - stages + 1 if split == "balanced" else -(-layers // stages)
    largest = (max(split) if isinstance(split, list) and split else most) + config.model.mtp_num_layers
    if p.recompute == "none" and p.recompute_blocks is not None:
        rule = "parallel.recompute is none, so no block is recomputed"
        yield Problem("parallel.recompute_blocks", p.recompute_blocks, rule, "try parallel.recompute=full")
    if p.recompute != "selective" and p.recompute_ops != type(p)().recompute_ops:
        rule = f"parallel.recompute is {p.recompute}, and only selective uses it"
        yield Problem("parallel.recompute_ops", p.recompute_ops, rule, "try parallel.recompute=selective")
    if p.recompute == "selective" and not p.recompute_ops:
        rule = "parallel.recompute is selective, and nothing is selected"
        yield Problem("parallel.recompute_ops", [], rule, "try [norms, activation], or parallel.recompute=none")
    for path, value in (("recompute_blocks", p.recompute_blocks or 0), ("offload", int(p.offload))):
        if value > largest:
            rule = f"no stage has more than {largest} blocks"
            yield Problem(f"parallel.{path}", value, rule, f"try {largest} or less")


def _sequence(config: Config) -> Iterator[Problem]:
    p, m, s = config.parallel, config.model, config.training.seq_length
    t = p.tensor if p.sequence_parallel else 1
    if p.context > 1 and s % (2 * p.context * t):
        shards = f"context parallelism splits it into two chunks for each of parallel.context ({p.context}) ranks"
        sharded = (
            f", and sequence parallelism each rank's shard into parallel.tensor ({t}) equal parts" if t > 1 else ""
        )
        parts = 2 * p.context * t
        yield Problem(
            "training.seq_length", s, shards + sharded, f"try {-(-s // parts) * parts}, or parallel.context=1"
        )
    elif s % t:
        rule = f"sequence parallelism splits it into parallel.tensor ({t}) equal parts"
        yield Problem("training.seq_length", s, rule, f"try {-(-s // t) * t}, or parallel.sequence_parallel=false")
    on_gpu = config.device != "cpu" and config.training.precision in ("bf16", "fp16")
    wrong = [width for width in config.spec.attention_widths if width % 8 or width > LARGEST_HEAD]
    if p.context > 1 and on_gpu and wrong:
        key = "model.head_dim" if m.latent_attention is None else "model.latent_attention.nope_head_dim + rope_head_dim"
        rule = f"its attention kernels need heads of a multiple of 8, at most {LARGEST_HEAD}, and {key} is {wrong[0]}"
        works = f"try parallel.context=1, or {'model.head_dim=128' if m.latent_attention is None else 'other widths'}"
        yield Problem("parallel.context", p.context, rule, works)


def _overlap(config: Config) -> Iterator[Problem]:
    p, path = config.parallel, "parallel.overlap_tensor"
    if p.overlap_tensor == "symmetric" and p.tensor > 1 and not p.sequence_parallel:
        rule = "parallel.sequence_parallel is false, so every rank has all tokens and none are gathered"
        yield Problem(path, p.overlap_tensor, rule, f"try parallel.sequence_parallel=true, or {path}=none")
    if p.overlap_tensor == "symmetric" and config.device == "cpu":
        rule = "symmetric memory exists on GPUs only, and device is cpu"
        yield Problem(path, p.overlap_tensor, rule, f"try {path}=auto, or device=cuda")


def _fp8(config: Config) -> Iterator[Problem]:
    f, layers = config.fp8, config.spec.num_blocks
    kept = f.first_blocks_bf16 + f.last_blocks_bf16
    if f.recipe != "none" and kept >= layers:
        yield Problem(
            "fp8.first_blocks_bf16", f.first_blocks_bf16,
            f"with fp8.last_blocks_bf16 ({f.last_blocks_bf16}) it covers all of model.num_layers ({layers}), so no "
            "block is left for FP8", f"try at most {layers - 1} blocks in total, or fp8.recipe=none",
        )  # fmt: skip
    if f.recipe != "none" and f.auto_filter == "predicted" and config.training.precision != "bf16":
        yield Problem(
            "fp8.auto_filter", f.auto_filter,
            f"it compares FP8 with bf16, and training.precision is {config.training.precision}",
            "try fp8.auto_filter=measured or none",
        )  # fmt: skip
    if f.recipe == "custom" and not f.custom:
        yield Problem(
            "fp8.custom", f.custom, "fp8.recipe custom needs a rule",
            'try [{layers: "*", input: delayed, weight: current, grad_output: delayed}]',
        )  # fmt: skip


def _fsdp(config: Config) -> Iterator[Problem]:
    p, off = config.parallel, "or parallel.fsdp=false"
    if not p.fsdp:
        if p.fsdp_replicas > 1:
            rule = "parallel.fsdp is false, so there are no shards to replicate"
            works = "try parallel.fsdp=true, or parallel.fsdp_replicas=1"
            yield Problem("parallel.fsdp_replicas", p.fsdp_replicas, rule, works)
        return
    if p.zero:
        rule = "parallel.fsdp is ZeRO stage 3, which already shards everything that stage 1 shards"
        yield Problem("parallel.zero", p.zero, rule, f"try parallel.zero=0, {off}")
    if p.schedule in SCHEDULES and SCHEDULES[p.schedule].splits_wgrad:
        rule = "it delays weight gradients until parallel.fsdp has already freed the block and reduced its gradients"
        works = unsplit_schedule(p.virtual_pipeline)
        yield Problem("parallel.schedule", p.schedule, rule, f"try parallel.schedule={works}, {off}")


def _param_gather(config: Config) -> Iterator[Problem]:
    f, zero = config.fp8, config.parallel.zero
    path, off = "fp8.param_gather", "or fp8.param_gather=false"
    if not f.param_gather:
        return
    if zero != 1 and not config.parallel.fsdp:
        rule = f"parallel.zero is {zero}: each rank updates all weights itself, so no weights are gathered"
        yield Problem(path, True, rule, f"try parallel.zero=1 or parallel.fsdp=true, {off}")
    if f.recipe == "none":
        rule = "fp8.recipe is none, so there are no FP8 weights to gather"
        yield Problem(path, True, rule, f"try fp8.recipe=delayed, {off}")
    if f.override_linear_precision[0] or f.override_linear_precision[1]:
        yield Problem(
            "fp8.override_linear_precision", f.override_linear_precision,
            "fprop or dgrad in high precision needs the weight in high precision, but with fp8.param_gather only its "
            "FP8 data exists", f"try [false, false, {str(f.override_linear_precision[2]).lower()}], {off}",
        )  # fmt: skip
    if f.calibration_steps:
        yield Problem(
            "fp8.calibration_steps", f.calibration_steps,
            "layers run in high precision while they calibrate, but with fp8.param_gather only their FP8 data exists",
            f"try fp8.calibration_steps=0 and fp8.static_amax, {off}",
        )  # fmt: skip


def _keep_weight_transposes(config: Config) -> Iterator[Problem]:
    if config.fp8.keep_weight_transposes:
        return
    path, works = "fp8.keep_weight_transposes", "leave it out"
    if config.fp8.recipe == "none":
        yield Problem(path, False, "fp8.recipe is none, so there are no FP8 copies of weights", works)
    elif config.parallel.fsdp:
        yield Problem(path, False, "parallel.fsdp keeps no copies of weights in any case", works)


def _paired_wgrad(config: Config) -> Iterator[Problem]:
    if config.fp8.paired_wgrad and not config.spec.has_experts:
        rule = "it is for weight gradients of experts, and the model has none"
        yield Problem("fp8.paired_wgrad", True, rule, "try fp8.paired_wgrad=false")


def _checkpoint(config: Config) -> Iterator[Problem]:
    c = config.checkpoint
    if c.keep_every is not None and c.keep_last is None:
        rule = "without checkpoint.keep_last every checkpoint is kept"
        yield Problem("checkpoint.keep_every", c.keep_every, rule, "set checkpoint.keep_last too, for example to 2")
    if c.init_optimizer and c.init_from is None:
        rule = "there is no checkpoint to take it from"
        yield Problem("checkpoint.init_optimizer", True, rule, "set checkpoint.init_from, or leave it out")
    sections: dict[str, type[Section]] = {
        "moe": MoeConfig, "latent_attention": LatentAttentionConfig, "sparse_attention": SparseAttentionConfig,
        "per_layer_embedding": PerLayerEmbeddingConfig,
        "hyper_connections": HyperConnectionsConfig,
    }  # fmt: skip
    keys = [*ModelConfig.model_fields, *(f"{name}.{key}" for name, x in sections.items() for key in x.model_fields)]
    for key in c.allow_model_change:
        if key not in keys:
            near = difflib.get_close_matches(key.removeprefix("model."), keys, n=1)
            works = f"did you mean {near[0]}?" if near else "name keys without their section, for example rope_theta"
            yield Problem("checkpoint.allow_model_change", key, "the model section has no such key", works)


def _deterministic(config: Config) -> Iterator[Problem]:
    f, off = config.fp8, "or deterministic=false"
    if not config.deterministic:
        return
    if f.auto_filter == "measured":
        rule = "deterministic is true, but the next run may measure other layers to be faster in FP8"
        yield Problem("fp8.auto_filter", f.auto_filter, rule, f"try fp8.auto_filter=predicted, {off}")
    if f.gemm_autotune:
        rule = "deterministic is true, but in the next run another algorithm with other rounding may be the fastest"
        yield Problem("fp8.gemm_autotune", True, rule, f"leave it out, {off}")


def _batch_invariant(config: Config) -> Iterator[Problem]:
    if not config.inference.batch_invariant:
        return
    p, model, off = config.parallel, config.model, "or inference.batch_invariant=false"
    for axis in ("tensor", "context", "expert"):
        if (ranks := getattr(p, axis)) > 1:
            rule = "inference.batch_invariant is true, but sums over ranks depend on the rest of the batch"
            yield Problem(f"parallel.{axis}", ranks, rule, f"try parallel.{axis}=1, {off}")
    off = "set inference.batch_invariant=false"
    for kind in dict.fromkeys(layer.mixer.kind for layer in config.spec.distinct_layers):
        if kind not in ("attention", "latent_attention", "none"):
            rule = "inference.batch_invariant supports only softmax attention to all tokens or to the latest ones"
            yield Problem("model.mixer.kind", kind, rule, off)
    if model.architecture != "gpt":
        rule = "inference.batch_invariant is for models that generate text"
        yield Problem("model.architecture", model.architecture, rule, off)
    if model.hyper_connections is not None:
        rule = "inference.batch_invariant is true, but they have no batch-invariant kernel"
        yield Problem("model.hyper_connections", "given", rule, off)
    if model.attention_dropout:
        rule = "inference.batch_invariant is true, but no batch-invariant attention kernel has dropout"
        yield Problem("model.attention_dropout", model.attention_dropout, rule, f"try 0, {off}")
    for record in config.spec.expert_records:
        if record.capacity_factor is not None:
            rule = "inference.batch_invariant is true, but the tokens that an expert drops depend on the other tokens"
            yield Problem("model.moe.capacity_factor", record.capacity_factor, rule, f"leave it out, {off}")
    recipes = {config.fp8.recipe} if config.fp8.recipe != "custom" else {
        recipe for rule in config.fp8.custom for recipe in (rule.input, rule.weight, rule.grad_output)
    }  # fmt: skip
    if "nvfp4" in recipes:
        rule = "inference.batch_invariant is true, but the per-tensor scale of nvfp4 depends on all tokens"
        yield Problem("fp8.recipe", config.fp8.recipe, rule, f"try blockwise or mxfp8, {off}")
    if config.data.prefix_lm:
        rule = "inference.batch_invariant is true, but no batch-invariant kernel attends to later tokens"
        yield Problem("data.prefix_lm", True, rule, off)


_MOST_RANKS = 2**18
_MOST_MICROBATCHES = 2**16
"""Limit per step and rank. A schedule is a list that contains every micro-batch."""
_MOST_PIPELINE_RANKS, _MOST_LAYER_KINDS, _MOST_EXPERTS = 256, 256, 2**13


def _sizes(config: Config) -> Iterator[Problem]:
    """Yield a problem for sizes of the model and its pipeline that would take too long to plan."""
    kinds = config.model.layer_kinds.values()
    sections = (config.model.moe, *(kind.ffn for kind in kinds))
    experts, zero_experts = (
        max(getattr(x, key, None) or 0 for x in sections) for key in ("num_experts", "zero_experts")
    )
    for key, value, most in (
        ("parallel.pipeline", config.parallel.pipeline, _MOST_PIPELINE_RANKS),
        ("model.layer_kinds", len(config.model.layer_kinds), _MOST_LAYER_KINDS),
        ("model.moe.num_experts", experts, _MOST_EXPERTS),
        ("model.moe.zero_experts", zero_experts, _MOST_EXPERTS),
    ):
        if value > most:
            yield Problem(key, value, "too many to plan a run for in reasonable time", f"try {most:,} or fewer")


def _counts(config: Config, world_size: int) -> Iterator[Problem]:
    """Yield a problem for counts that would take too long to plan or would overflow 64 bits."""
    p, t = config.parallel, config.training
    if world_size > _MOST_RANKS:
        rule = f"{world_size:,} ranks are more than {_MOST_RANKS:,}"
        yield Problem("parallel", f"tensor {p.tensor} × pipeline {p.pipeline} × context {p.context}", rule, "try fewer")
    data = max(1, world_size // (p.tensor * p.pipeline * p.context))
    count = t.global_batch_size // (t.micro_batch_size * data)
    if count > _MOST_MICROBATCHES:
        rule = f"{count:,} micro-batches in a step on each rank are more than {_MOST_MICROBATCHES:,}"
        most = _MOST_MICROBATCHES * t.micro_batch_size * data
        works = f"try {most} or less, or a larger training.micro_batch_size"
        yield Problem("training.global_batch_size", t.global_batch_size, rule, works)
    per_step = t.global_batch_size * t.seq_length
    if t.steps * per_step >= 2**63:
        rule = f"with {per_step} tokens per step the run has more tokens than 64 bits count"
        yield Problem("training.steps", t.steps, rule, f"try {2**62 // per_step} or less")


def _batch(config: Config, world_size: int) -> Iterator[Problem]:
    p, training = config.parallel, config.training
    model_ranks = p.tensor * p.pipeline * p.context
    if world_size % model_ranks:
        layout = f"tensor {p.tensor} × pipeline {p.pipeline} × context {p.context}"
        works = (
            f"start {model_ranks * max(1, -(-world_size // model_ranks))} processes, or set parallel.tensor, "
            f"parallel.pipeline and parallel.context so that their product divides {world_size}"
        )
        yield Problem("parallel", layout, f"the world has {world_size} ranks, not a multiple of {model_ranks}", works)
        return
    data, batch = world_size // model_ranks, training.global_batch_size
    multiple = training.micro_batch_size * data
    if batch % multiple:
        rule = f"not a multiple of training.micro_batch_size ({training.micro_batch_size}) × {data} data-parallel ranks"
        yield Problem("training.global_batch_size", batch, rule, f"try {-(-batch // multiple) * multiple}")


def _fsdp_replicas(config: Config, world_size: int) -> Iterator[Problem]:
    p = config.parallel
    ranks, rest = divmod(world_size, p.tensor * p.pipeline)
    expert_replicas, uneven = divmod(ranks * p.tensor, p.expert_ranks)
    if not p.fsdp or rest or ranks % p.context or uneven:
        return
    possible = math.gcd(ranks, expert_replicas)
    if possible % p.fsdp_replicas == 0:
        return
    names = "data-parallel" if p.context == 1 else "data- and context-parallel"
    rule = f"the shards of parallel.fsdp are replicated over equal parts of {ranks} {names} ranks"
    if ranks % p.fsdp_replicas == 0:
        rule += f", and the experts' shards over equal parts of the {expert_replicas} that hold the same experts"
    yield Problem("parallel.fsdp_replicas", p.fsdp_replicas, rule, divisors(possible, p.fsdp_replicas))


def _cuda_graphs(config: Config) -> Iterator[Problem]:
    return cuda_graph_problems(config) if config.training.cuda_graphs is True else iter(())


def cuda_graph_problems(config: Config) -> Iterator[Problem]:
    """Yield the reasons why a step's forward and backward passes cannot be captured in a CUDA graph.

    The result does not depend on the value of `training.cuda_graphs`. `megafp8.training.fp8_config` adds one more
    reason, for recipes.
    """
    p = config.parallel
    reads = "the host reads the number of tokens of each expert, which a graph cannot do,"
    slow_experts = config.spec.has_experts and config.training.precision != "bf16"
    kernel = (
        config.training.precision in ("bf16", "fp16") and max(config.spec.attention_widths, default=0) <= LARGEST_HEAD
    )
    slow_attention = config.model.attention_dropout > 0 and not kernel
    choices = "the host selects queries of attention with dropout, which a graph cannot do,"
    choices += f" except in bf16 or fp16 with heads up to {LARGEST_HEAD} wide"
    frozen = "a frozen model computes before each step, outside of a graph"
    divergence = "the loss of distillation is not captured in a graph"
    offload = "parallel.offload copies activations to host memory, which a graph cannot allocate"
    rules = (
        (config.device == "cpu", "device is cpu, and CUDA graphs need a GPU", "device=cuda"),
        (bool(p.offload), offload, "parallel.offload=false"),
        (config.data.grpo is not None, "texts are sampled before each step, outside of a graph", "leave data.grpo out"),
        (config.data.compares, frozen, "leave data.dpo.reference=live and data.distillation out"),
        (config.data.distillation is not None, divergence, "leave data.distillation out"),
        (slow_experts, f"{reads} except in bf16", "training.precision=bf16"),
        (slow_attention, choices, "training.precision=bf16"),
    )
    for applies, rule, works in rules:
        if applies:
            yield Problem("training.cuda_graphs", True, rule, f"try training.cuda_graphs=auto, or {works}")
