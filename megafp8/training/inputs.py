"""Tokenizer and data sets of a run, opened and checked before the process groups exist."""

from __future__ import annotations

import hashlib
import json
import os
import socket
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch.distributed import ProcessGroup

from megafp8.batch import Batch
from megafp8.config import Config, ConfigError, Problem, StageConfig, TokenizerConfig, config_at, is_text, stage_at
from megafp8.data import DataError
from megafp8.data.blend import Blend, Segment, shares
from megafp8.data.documents import find_files
from megafp8.data.indexed_dataset import IndexedDataset, bin_path, check_dataset, idx_path
from megafp8.data.packing import BestFit
from megafp8.data.preprocess import check_boundaries
from megafp8.data.progress import (
    Conflict,
    DataSource,
    ListedFiles,
    Progress,
    RecordedSource,
    combine,
    normalized,
    tell_apart,
)
from megafp8.data.prompts import PromptSource
from megafp8.data.sampler import batches as batch_stream
from megafp8.data.samples import PLACES, PackedDataset, split_documents
from megafp8.data.text_source import TextSource
from megafp8.data.text_stream import StreamPositions
from megafp8.data.text_stream import batches as text_batches
from megafp8.data.tokenizers import (
    MissingTokenizer,
    Tokenizer,
    TokenizerSettingError,
    TokenizerSettings,
    build_tokenizer,
)
from megafp8.host.object_store import AnyPath, ObjectPath
from megafp8.host.object_store.cache import ObjectCache, default_cache
from megafp8.objectives import Objective
from megafp8.objectives.registry import objective_of
from megafp8.parallel.collectives import all_gather_objects
from megafp8.parallel.parallel_state import ParallelState
from megafp8.planner.flops import document_flops
from megafp8.training.process import answering_stop


@dataclass(frozen=True)
class DataSet:
    """Tokenized data set of `data.train`.

    Attributes:
        prefix: Path prefix of its files.
        times: Number of times that the config lists the data set.
        dataset: Reader of its files.
        train: Samples for training.
        validation: Samples for validation; None if the data set is not evaluated.
        contents: Identity of its contents in the record of the run's progress (`progress.tell_apart`).
    """

    prefix: str
    times: int
    dataset: IndexedDataset
    train: PackedDataset
    validation: PackedDataset | None
    contents: str

    def source(self, weight: float) -> DataSource:
        """Return the entry of this data set, with its `weight`, for the record of the run's progress."""
        documents, packing, length = self.train.documents, self.train.packing.name, self.train.seq_length
        return DataSource(self.prefix, self.contents, documents, self.dataset.num_documents, weight, packing, length)

    def listed_files(self) -> ListedFiles:
        """Return the files of the data set, for comparison with other data sets."""
        files = () if self.dataset.is_known_in_full else _real_paths([bin_path(self.prefix)])
        return ListedFiles(self.prefix, self.train.fingerprint, files)

    def named(self, contents: str) -> DataSet:
        """Return the same data set with another identity of its contents."""
        return replace(self, contents=contents)

    @property
    def size(self) -> int:
        """Weight of the data set if `data.train` is a list, so that all data sets finish an epoch at the same time."""
        return self.train.samples_per_epoch if isinstance(self.train.packing, BestFit) else self.train.num_tokens


@dataclass(frozen=True)
class TextSet:
    """Text of `data.train` that is tokenized while the run trains. All of it is for training."""

    prefix: str
    train: TextSource
    validation: None = None

    def source(self, weight: float) -> DataSource:
        """Return the entry of this text, with its `weight`, for the record of the run's progress."""
        contents, length = self.train.fingerprint, self.train.seq_length
        return DataSource(self.prefix, contents, range(0), 0, weight, "concatenate", length)

    def listed_files(self) -> ListedFiles:
        """Return the files of the text, for comparison with other texts."""
        files = () if self.train.is_known_in_full else _real_paths([file.path for file in self.train.files])
        return ListedFiles(self.prefix, self.train.contents, files)

    def named(self, contents: str) -> TextSet:
        """Return the same text with another identity of its contents."""
        return replace(self, train=self.train.identified_as(contents))

    def in_streams(self, count: int) -> TextSet:
        """Return the same text, read in `count` canonical streams."""
        return replace(self, train=self.train.in_streams(count))


@dataclass(frozen=True)
class PromptSet:
    """Prompts of `data.train` that the model continues (`data.grpo`). All of them are for training."""

    prefix: str
    train: PromptSource
    validation: None = None

    def source(self, weight: float) -> DataSource:
        """Return the entry of these prompts, with their `weight`, for the record of the run's progress."""
        contents, length = self.train.fingerprint, self.train.seq_length
        return DataSource(self.prefix, contents, range(0), 0, weight, "best_fit", length)


AnySet = DataSet | TextSet | PromptSet


def _real_paths(paths: Sequence[AnyPath]) -> tuple[str, ...]:
    """Return the paths with links resolved. URLs stay unchanged."""
    return tuple(str(path) if isinstance(path, ObjectPath) else os.path.realpath(path) for path in paths)


def _told_apart(data_sets: Sequence[AnySet], recorded: Sequence[RecordedSource] = ()) -> list[AnySet]:
    """Return the data sets with identities that only data sets with the same files share (`progress.tell_apart`)."""
    files = [data_set for data_set in data_sets if not isinstance(data_set, PromptSet)]
    contents = tell_apart([data_set.listed_files() for data_set in files], recorded)
    named = [data_set.named(name) for data_set, name in zip(files, contents)]
    return [*named, *(data_set for data_set in data_sets if isinstance(data_set, PromptSet))]


@dataclass(frozen=True)
class RunInputs:
    """Tokenizer and data of a run in its present stage.

    Attributes:
        config: Config of the present stage.
        run: Config as the user gave it, with all stages.
        stage: Present stage; None if the run has no stages.
        tokenizer: Tokenizer, or None if none is configured.
        data_sets: Data sets of `data.train`, each once.
        progress: Progress in each data set: the progress of a new run, or of a checkpoint after `resumed`.
        train: Mix of the data sets for training, according to `progress`.
        validation: Mix of the documents for validation; None without evaluation or without such documents.
        validation_sets: Data sets of `data.validation` by name.
        objective: Training objective, which makes micro-batches of samples.
        positions: Positions of the canonical streams of `train`, which `batches` advances; None if it has no text.
    """

    config: Config
    run: Config
    stage: StageConfig | None
    tokenizer: Tokenizer | None
    data_sets: Sequence[AnySet]
    progress: Progress
    train: Blend
    validation: Blend | None
    validation_sets: Mapping[str, Blend]
    objective: Objective
    positions: StreamPositions | None = None

    @property
    def fingerprint(self) -> str | None:
        """Fingerprint of the vocabulary; None if no tokenizer is configured."""
        return None if self.tokenizer is None else self.tokenizer.fingerprint

    @property
    def validation_sources(self) -> dict[str, Blend]:
        """Documents for validation of each single data set by name, if data.validation_by_source is set; else empty."""
        if self.validation is None or not self.config.data.validation_by_source:
            return {}
        packed = {x.prefix: x for x in self.validation.datasets}
        names = Counter(prefix.rpartition("/")[2] for prefix in packed)
        names.update(list(self.validation_sets))
        sources = {}
        for prefix, packed_set in packed.items():
            name = prefix.rpartition("/")[2]
            sources[name if names[name] == 1 else prefix] = Blend([packed_set], Segment.fresh([1.0], self.config.seed))
        return sources

    def batches(
        self,
        dataset: Blend,
        parallel: ParallelState,
        consumed_samples: int = 0,
        position_of: Callable[[int], int] = lambda samples: samples,
        num_workers: int | None = None,
        share: range | None = None,
    ) -> Iterator[list[Batch]]:
        """Yield this rank's micro-batches of each step.

        Args:
            dataset: Samples to read.
            parallel: Process groups.
            consumed_samples: Number of samples that earlier steps have read.
            position_of: Function from a sample number to its position in the data, which skips samples left out.
            num_workers: Number of processes that read ahead; None means `data.num_workers`.
            share: Range of the micro-batches of each step that belong to this replica; None means all. Not supported
                for text that is tokenized while the run trains.
        """
        t = self.config.training
        cost = document_flops(self.config) if self.config.data.packing == "balanced" else None
        read: Callable[..., Iterator[list[Batch]]] = partial(batch_stream, dataset, share=share, cost=cost)
        if dataset.has_text:
            tokenizer, streams = self.config.data.tokenizer, self.config.data.streams
            assert tokenizer is not None, "config.checks"
            positions = self.positions if dataset is self.train else None
            read = partial(
                text_batches,
                dataset,
                positions or StreamPositions(_streams_of(dataset)),
                tokenizer=_settings(tokenizer),
                skip_errors=streams.skip_errors,
            )
        stream = read(
            consumed_samples=consumed_samples,
            global_batch_size=t.global_batch_size,
            micro_batch_size=t.micro_batch_size,
            data_parallel_rank=parallel.data.rank,
            data_parallel_size=parallel.data.size,
            num_workers=self.config.data.num_workers if num_workers is None else num_workers,
            objective=self.objective,
            pin_memory=parallel.device.type == "cuda",
            position_of=position_of,
        )
        return answering_stop(stream)

    def at(self, step: int) -> RunInputs:
        """Return the inputs of the stage that follows after `step` steps of the run; open them if they differ."""
        return self if stage_at(self.run, step) == self.stage else open_inputs(self.run, "config", step)

    def resumed(self, saved: Mapping[str, Any]) -> tuple[RunInputs, list[str]]:
        """Return these inputs at the position of a checkpoint, and log lines about changes of the data sets.

        `saved` is the metadata of the checkpoint. Raises ConfigError if a data set that the run has read has changed.
        """
        then: Mapping[str, Any] = saved["config"]["data"]
        self._check_group_size(then, saved["step"])
        if "data" in saved:
            recorded = Progress.from_json(saved["data"])
        else:
            recorded = Progress.from_config(then, _sources(self.config.data.train, self.data_sets, "tokens"))
        named = replace(self, data_sets=_told_apart(self.data_sets, recorded.sources))
        return named._continued(recorded, saved)

    def _continued(self, recorded: Progress, saved: Mapping[str, Any]) -> tuple[RunInputs, list[str]]:
        """Return these inputs after the progress `recorded` in the checkpoint with metadata `saved` (see `resumed`)."""
        data, then = self.config.data, saved["config"]["data"]
        length_then = saved["config"]["training"]["seq_length"]
        training = self.config.training.model_copy(update={"seq_length": length_then})
        recorded = recorded.with_length(self.config.model_copy(update={"training": training}).sample_tokens - 1)
        recorded = recorded.after(saved["consumed_samples"], self.config.seed)
        sources = _sources(data.train, self.data_sets, recorded.list_weights)
        if not data.restart_changed:
            files = saved.get("data", {}).get("streams", {}).get("files", {})
            problems = [
                self._changed_text(conflict, files) or _problem(conflict, self.config, then["split"])
                for conflict in recorded.conflicts(sources)
            ]
            if problems:
                raise ConfigError(f"checkpoint of step {saved['step']}", problems)
        progress, changes = recorded.proceed(sources, saved["consumed_samples"], self.config.seed)
        progress, lengths = self._with_own_lengths(progress, f"checkpoint of step {saved['step']}")
        changes += lengths
        positions, data_sets = self._resumed_positions(saved), self.data_sets
        if positions is not None:
            count = positions.canonical_streams
            data_sets = [x.in_streams(count) if isinstance(x, TextSet) else x for x in data_sets]
        train, validation = _blends(data_sets, progress, self.config.seed)
        resumed = replace(self, data_sets=data_sets, progress=progress, train=train, validation=validation)
        return replace(resumed, positions=positions), changes

    def _check_group_size(self, then: Mapping[str, Any], step: int) -> None:
        """Raise ConfigError if `data.grpo.group_size` has changed, because the run counts texts in such groups."""
        grpo, before = self.config.data.grpo, then.get("grpo")
        if grpo is not None and before is not None and grpo.group_size != before["group_size"]:
            rule = f"the run has counted its texts by groups of {before['group_size']}"
            works = "set it as it was, or choose another name for a new run"
            problem = Problem("data.grpo.group_size", grpo.group_size, rule, works)
            raise ConfigError(f"checkpoint of step {step}", [problem])

    def _changed_text(self, conflict: Conflict, files: Mapping[str, Any]) -> Problem | None:
        """Return the error for text with a changed file, or None if `conflict` is not about text.

        `files` holds the versions of the files that the checkpoint recorded, by fingerprint of the text.
        """
        now = next(
            (x.train for x in self.data_sets if isinstance(x, TextSet) and x.prefix == conflict.source.prefix), None
        )
        then = files.get(conflict.recorded.contents or "")
        if now is None or then is None:
            return None
        before = {normalized(name): version for name, *version in then}
        after = {normalized(name): version for name, *version in now.versions}
        spelled = {normalized(name): name for name, *_ in (*then, *now.versions)}
        changed = [key for key in sorted(spelled) if before.get(key) != after.get(key)]
        key = changed[0] if changed else ""
        name, what = spelled.get(key, now.prefix), "has changed"
        if changed and (key not in after or key not in before):
            what = "is gone" if key not in after else "is new"
        others = f", and {len(changed) - 1} more files differ," if len(changed) > 1 else ""
        rule = f"{name} {what}{others} since the run read {conflict.recorded.consumed:,} samples of this text"
        works = "restore it, list new files as a separate entry, or set data.restart_changed=true to begin it anew"
        return Problem("data.train", now.prefix, rule, works)

    def _resumed_positions(self, saved: Mapping[str, Any]) -> StreamPositions | None:
        """Return the positions of the canonical streams in the checkpoint, or None if the run reads no text.

        Raises ConfigError if the config sets another number of streams.
        """
        recorded = saved.get("data", {}).get("streams")
        if self.positions is None or recorded is None:
            return None if self.positions is None else replace(self.positions, samples=saved["consumed_samples"])
        positions, streams = StreamPositions.from_json(recorded), self.config.data.streams.canonical_streams
        if streams not in (None, positions.canonical_streams):
            rule = f"the run began with {positions.canonical_streams}, which determines the order of its samples"
            problem = Problem("data.streams.canonical_streams", streams, rule, "leave it out")
            raise ConfigError(f"checkpoint of step {saved['step']}", [problem])
        return positions

    def _with_own_lengths(self, progress: Progress, source: str) -> tuple[Progress, list[str]]:
        """Return `progress` converted to this run's sample length, and log lines about the changes.

        Raises ConfigError if a data set cannot continue with another length.
        """
        positions, changes = {}, []
        for entry, data_set in zip(progress.active, _active(self.data_sets, progress)):
            length = data_set.train.seq_length
            if entry.length is None or entry.length == length:
                continue
            if not isinstance(data_set, DataSet):  # positions in text and prompts do not depend on the length
                positions[entry.identity] = entry.position
                changes.append(f"samples of {entry.prefix} have {length:,} tokens instead of {entry.length:,}")
                continue
            kind = "pairs of answers" if data_set.train.pairs else "sentences"
            if (data_set.train.pairs or data_set.train.packing.name == "sentences") and entry.consumed:
                rule = f"the run has read samples of {entry.length} tokens, and {kind} keep this length for an epoch"
                works = "set training.seq_length as it was, or choose another name for a new run"
                raise ConfigError(source, [Problem("training.seq_length", length, rule, works)])
            before = _packed(self.config, data_set.dataset, data_set.train.documents, entry.length)
            positions[entry.identity] = before.at(entry.position).position_after(entry.consumed)
            changes.append(f"samples of {entry.prefix} have {length:,} tokens instead of {entry.length:,}")
        return progress.moved(positions, self.config.sample_tokens - 1), changes

    def record(self, samples: int) -> dict[str, Any]:
        """Return the progress in each data set after `samples` samples, for the metadata of a checkpoint."""
        return self.progress.after(samples, self.config.seed).as_json() | self._record_of_streams()

    def _record_of_streams(self) -> dict[str, Any]:
        """Return the positions of the streams that this process knows, and the versions of their files."""
        if self.positions is None:
            return {}
        texts = [x.train for x in self.data_sets if isinstance(x, TextSet)]
        files = {x.fingerprint: [list(version) for version in x.versions] for x in texts}
        return {"streams": self.positions.as_json() | {"files": files}}

    def gather_positions(self, group: ProcessGroup | None) -> None:
        """Collect the positions of the streams that other ranks of the data-parallel `group` read. Collective."""
        if self.positions is not None:
            self.positions.positions = self.positions.joined(all_gather_objects(self.positions, group)).positions


def open_inputs(config: Config, source: str, step: int = 0) -> RunInputs:
    """Open tokenizer and data sets, resolve `model.vocab_size`, and check that they match.

    Args:
        config: Config of the run with all stages.
        source: Name of the config in error messages.
        step: Number of steps done; the stage that follows is opened.

    Raises:
        ValueError: If inputs are missing or damaged, or do not match (ConfigError if a config key is at fault).
    """
    run, config = config, config_at(config, step, source)
    tokenizer = open_tokenizer(config, source)
    config = _resolve_vocabulary(config, tokenizer, source)
    vocab_size = config.spec.stem.vocab_size
    assert vocab_size is not None, "config.checks: given, or known from the tokenizer"
    run = _resolve_vocabulary(run, tokenizer, source)  # later compared with checkpoints
    objective = objective_of(config, tokenizer, source)
    data_sets = open_data_sets(config, tokenizer)
    for data_set in data_sets:
        if isinstance(data_set, DataSet):
            _check_tokens(data_set.dataset, vocab_size, tokenizer)
    progress = Progress.begin(_sources(config.data.train, data_sets, "tokens"))
    train, validation = _blends(data_sets, progress, config.seed)
    if config.data.validation_by_source and validation is None:
        rule = f"data.split ({config.data.split}) leaves no documents for validation"
        works = 'set data.split, for example to "99,1,0", or leave it out'
        raise ConfigError(source, [Problem("data.validation_by_source", True, rule, works)])
    sets = _validation_sets(config, tokenizer)
    positions = StreamPositions(_streams_of(train)) if train.has_text else None
    stage = stage_at(run, step)
    return RunInputs(config, run, stage, tokenizer, data_sets, progress, train, validation, sets, objective, positions)


def _check_tokens(dataset: IndexedDataset, vocab_size: int, tokenizer: Tokenizer | None) -> None:
    """Raise DataError if a data set has another vocabulary than the run, or other tokens around its documents."""
    check_dataset(dataset, vocab_size, None if tokenizer is None else tokenizer.fingerprint)
    check_boundaries(dataset, tokenizer)


def _text_source(config: Config, path: str, key: str) -> TextSource:
    streams = config.data.streams
    return TextSource(
        path,
        text_key=streams.text_key,
        seq_length=config.sample_tokens - 1,
        seed=config.seed,
        canonical_streams=streams.canonical_streams or config.training.global_batch_size,
        key=key,
    )


def _streams_of(blend: Blend) -> int:
    """Return the number of canonical streams of a blend that has text."""
    return next(x.canonical_streams for x in blend.datasets if isinstance(x, TextSource))


def _open_prompts(config: Config, tokenizer: Tokenizer) -> PromptSet:
    """Open the prompts of `data.train`. Raises ValueError as `open_inputs` does."""
    grpo, length, (path,) = config.data.grpo, config.training.seq_length, config.data.train
    assert grpo is not None
    assert config.data.tokenizer is not None
    source = PromptSource(
        path,
        tokenizer,
        config.data.tokenizer.path,
        key=grpo.prompt_key,
        longest=length - grpo.max_tokens,
        group_size=grpo.group_size,
        seed=config.seed,
        seq_length=length,
    )
    return PromptSet(path, source)


def open_data_sets(config: Config, tokenizer: Tokenizer | None) -> list[AnySet]:
    """Open the data sets of `data.train`, each once. Raises ValueError as `open_inputs` does."""
    if config.data.grpo is not None:
        assert tokenizer is not None, "config.schema"
        return [_open_prompts(config, tokenizer)]
    data_sets: list[AnySet] = []
    for prefix, times in Counter(list(config.data.train)).items():
        if is_text(prefix):
            data_sets.append(TextSet(prefix, _text_source(config, prefix, "data.train")))
            continue
        dataset = IndexedDataset(prefix, cache=object_cache(config))
        train, validation, _ = split_documents(dataset.num_documents, config.data.split)
        if config.training.eval_interval and not len(validation) and not config.data.validation:
            rule = (
                f"training.eval_interval is {config.training.eval_interval}, but {prefix} has no validation documents"
            )
            works = 'try "90,10,0", set data.validation, or set training.eval_interval=0'
            raise ConfigError(prefix, [Problem("data.split", config.data.split, rule, works)])
        parts = [train, validation] if config.training.eval_interval and len(validation) else [train]
        packed = [_packed(config, dataset, documents) for documents in parts]
        held_out = packed[1] if len(packed) > 1 else None
        data_sets.append(DataSet(prefix, times, dataset, packed[0], held_out, packed[0].fingerprint))
    return _told_apart(data_sets)


def object_cache(config: Config) -> ObjectCache:
    """Return the local cache of data sets in object storage."""
    cache = config.data.object_cache
    folder = default_cache() if cache.folder is None else Path(cache.folder)
    return ObjectCache(folder, int(cache.limit_gib * 2**30), max(1, int(cache.block_mib * 2**20)))


def _packed(config: Config, dataset: IndexedDataset, documents: range, length: int | None = None) -> PackedDataset:
    """Return the samples of the given documents of a data set.

    `length` is the number of labels per sample; None means the number that the config implies.
    """
    teacher, prefixes = config.data.distillation, [*config.data.train, *config.data.validation.values()]
    numbers = teacher is not None and teacher.logits == "precomputed"
    return PackedDataset(
        dataset,
        documents,
        length or config.sample_tokens - 1,
        config.seed,
        cache_dir=config.data.index_cache,
        vocab_size=config.spec.stem.vocab_size,
        packing="best_fit" if config.data.packing == "balanced" else config.data.packing,
        loss_mask=_loss_mask(config, dataset),
        context=config.data.mask_eod_loss,
        pairs=config.data.dpo is not None,
        first_place=prefixes.index(dataset.prefix) * PLACES if numbers else None,
    )


def _validation_sets(config: Config, tokenizer: Tokenizer | None) -> dict[str, Blend]:
    """Return the samples of each set of data.validation by name. Raises ValueError as `open_inputs` does."""
    blends: dict[str, Blend] = {}
    assert config.spec.stem.vocab_size is not None
    for name, prefix in config.data.validation.items():
        if is_text(prefix):
            text = _text_source(config, prefix, f"data.validation.{name}")
            blends[name] = Blend([text], Segment.fresh([1.0], config.seed))
            continue
        dataset = IndexedDataset(prefix, cache=object_cache(config))
        _check_tokens(dataset, config.spec.stem.vocab_size, tokenizer)
        packed = _packed(config, dataset, range(dataset.num_documents))
        blends[name] = Blend([packed], Segment.fresh([1.0], config.seed))
    return blends


def _loss_mask(config: Config, dataset: IndexedDataset) -> IndexedDataset | None:
    """Return the loss mask of a data set, or None if neither data.loss_on nor data.dpo is set.

    Raises ConfigError if a required mask is missing, or if the data set needs one of these keys.
    """
    loss_on, pairs = config.data.loss_on, config.data.dpo is not None
    if pairs:
        if not dataset.has_loss_mask or not dataset.has_pairs:
            rule = f"{dataset.prefix} holds no pairs of answers"
            works = "write them with megafp8 preprocess --style preference, or leave data.dpo out"
            raise ConfigError(dataset.prefix, [Problem("data.dpo", "set", rule, works)])
        return dataset.loss_mask()
    if dataset.has_loss_mask and dataset.has_pairs:
        rule = f"{dataset.prefix} holds pairs of a chosen and a rejected answer"
        raise ConfigError(dataset.prefix, [Problem("data.dpo", None, rule, "set data.dpo={}, or list other data")])
    if loss_on is None and dataset.has_loss_mask:
        rule = f"{dataset.prefix} has a loss mask, which marks the tokens of answers"
        works = "set data.loss_on=answers, or data.loss_on=all to learn questions too; both need data.packing=best_fit"
        raise ConfigError(dataset.prefix, [Problem("data.loss_on", None, rule, works)])
    if loss_on is not None and not dataset.has_loss_mask:
        rule = f"{dataset.prefix} has no loss mask, which marks the tokens of answers"
        works = "write it with megafp8 preprocess --style chat or completion, or leave data.loss_on out"
        raise ConfigError(dataset.prefix, [Problem("data.loss_on", loss_on, rule, works)])
    return dataset.loss_mask() if loss_on is not None else None


def _sources(
    train: Sequence[str] | Mapping[str, float], data_sets: Sequence[AnySet], list_weights: str
) -> list[DataSource]:
    """Return the data sets with their weights. Entries with the same files are combined."""
    if isinstance(train, Mapping):
        return combine([data_set.source(train[data_set.prefix]) for data_set in data_sets])
    weights = [
        float(x.times * (x.size if list_weights == "tokens" else 1)) if isinstance(x, DataSet) else 1.0
        for x in data_sets
    ]
    return combine([x.source(weight) for x, weight in zip(data_sets, weights)])


def _active(data_sets: Sequence[AnySet], progress: Progress) -> list[AnySet]:
    """Return the data sets that `progress` mixes, in its order. If several have the same files, use the first."""
    by_identity = {x.source(1.0).identity: x for x in reversed(data_sets)}  # the same with any weight
    return [by_identity[entry.identity] for entry in progress.active]


def _blends(data_sets: Sequence[AnySet], progress: Progress, seed: int) -> tuple[Blend, Blend | None]:
    """Return the training and validation blends of the data sets that are active in `progress`."""
    active = _active(data_sets, progress)
    placed = [x.train.at(e.position) if isinstance(x, DataSet) else x.train for x, e in zip(active, progress.active)]
    train = Blend(placed, progress.segment(seed))
    held_out = [(x.validation, weight) for x, weight in zip(active, train.segment.weights) if x.validation is not None]
    if not held_out:
        return train, None
    validation, weights = zip(*held_out, strict=True)
    return train, Blend(validation, Segment.fresh(weights, seed))


def _problem(conflict: Conflict, config: Config, split_then: str) -> Problem:
    """Return the error for a data set that cannot continue."""
    source, recorded, data = conflict.source, conflict.recorded, config.data
    restart = "data.restart_changed=true counts its samples from 0"
    if conflict.kind == "packing":
        rule = f"the run has read {recorded.consumed:,} samples of {source.prefix} with data.packing={recorded.packing}"
        return Problem("data.packing", data.packing, rule, f"set data.packing={recorded.packing}, or {restart}")
    if conflict.kind == "split":
        start, stop = recorded.documents or (0, 0)
        rule = (
            f"selects the documents {source.documents.start}-{source.documents.stop} of {source.prefix} for training, "
            f"and the run has read {recorded.consumed:,} samples of the documents {start}-{stop}"
        )
        back = f"set data.split={split_then}" if split_then != data.split else "set data.split as it was"
        return Problem("data.split", data.split, rule, f"{back}, or {restart}")
    if conflict.kind == "contents":
        rule = f"its files have changed since the run read {recorded.consumed:,} samples of them"
        return Problem(
            "data.train", source.prefix, rule, f"restore them, list the new ones under a new path, or {restart}"
        )
    rule = (
        f"is not in the config of this checkpoint, which does not record contents, and its {recorded.prefix} is no "
        "longer listed: both may be the same data set"
    )
    works = f"list it as {recorded.prefix} until the next checkpoint is saved, or {restart}"
    return Problem("data.train", source.prefix, rule, works)


def with_vocabulary(config: Config, source: str) -> Config:
    """Return `config` with `model.vocab_size` resolved. Reads only the tokenizer. Raises ValueError if that fails."""
    if config.spec.stem.vocab_size is not None:
        return config
    return _resolve_vocabulary(config, open_tokenizer(config, source), source)


def planned_vocabulary(config: Config, source: str) -> tuple[Config, Tokenizer | None, list[str]]:
    """Return `config` with its vocabulary size resolved, its tokenizer, and lines about missing files.

    The tokenizer may be missing if the config sets the vocabulary size, because only a run needs the tokenizer itself.
    Raises ValueError if the size is unknown or does not match.
    """
    try:
        tokenizer = open_tokenizer(config, source)
        return _resolve_vocabulary(config, tokenizer, source), tokenizer, []
    except ConfigError as error:
        missing = error.__cause__
        if not isinstance(missing, MissingTokenizer):
            raise
        if config.spec.stem.vocab_size is None:
            rule = f"the tokenizer, {missing.value}, is missing, so the size of its vocabulary is not known"
            works = "set data.tokenizer.path to an existing path" if missing.setting == "path" else missing.works
            problem = Problem("model.vocab_size", None, rule, f"set it, or {works}")
            raise ConfigError(source, [problem]) from None
        return config, None, [f"data.tokenizer.{missing.setting} = {missing.value}: {missing.rule}; {missing.works}"]


def open_tokenizer(config: Config, source: str) -> Tokenizer | None:
    """Return the tokenizer of the config, or None. Raises ConfigError if it cannot be built from the config's keys."""
    settings = config.data.tokenizer
    if settings is None:
        return None
    try:
        return build_tokenizer(*_settings(settings))
    except TokenizerSettingError as error:
        problem = Problem(f"data.tokenizer.{error.setting}", error.value, error.rule, error.works)
        raise ConfigError(source, [problem]) from error


def _settings(given: TokenizerConfig) -> TokenizerSettings:
    """Return the arguments of `build_tokenizer` for the section data.tokenizer."""
    return TokenizerSettings(**given.model_dump())


def _resolve_vocabulary(config: Config, tokenizer: Tokenizer | None, source: str) -> Config:
    """Return `config` with `model.vocab_size` and the settings in the tokenizer's files filled in.

    Raises ConfigError if `model.vocab_size` is smaller than the vocabulary of the tokenizer.
    """
    vocab_size = config.spec.stem.vocab_size
    if tokenizer is None:
        return config
    assert config.data.tokenizer is not None
    settings = config.data.tokenizer.model_copy(update=tokenizer.settings._asdict())
    config = config.model_copy(update={"data": config.data.model_copy(update={"tokenizer": settings})})
    if vocab_size is None:
        model = config.model.model_copy(update={"vocab_size": tokenizer.vocab_size})
        return config.model_copy(update={"model": model})
    if vocab_size < tokenizer.vocab_size:
        rule = f"smaller than the {tokenizer.vocab_size} tokens of data.tokenizer ({config.data.tokenizer})"
        problem = Problem("model.vocab_size", vocab_size, rule, f"try {tokenizer.vocab_size}, or leave it out")
        raise ConfigError(source, [problem])
    return config


def check_ranks_agree(inputs: RunInputs, consumed_samples: int, group: ProcessGroup | None) -> None:
    """Raise DataError, with the names of ranks and hosts, if ranks would not read the same data. Collective.

    This compares contents, sample indices of the current epoch, and the position in the data.
    """
    order = json.dumps(inputs.record(consumed_samples), sort_keys=True)
    facts: dict[str, str] = {}
    counts = inputs.train.segment.given(consumed_samples)
    for entry, packed, count in zip(inputs.progress.active, inputs.train.datasets, counts):
        facts[entry.prefix] = packed.fingerprint
        facts[f"the sample index of {entry.prefix}"] = packed.index_checksum(count)
    for packed in inputs.validation.datasets if inputs.validation is not None else []:
        facts[f"the sample index of {packed.prefix} for validation"] = packed.index_checksum(0)
    for name, validation in inputs.validation_sets.items():
        (packed,) = validation.datasets
        facts[f"{packed.prefix} of data.validation.{name}"] = packed.fingerprint
        facts[f"the sample index of data.validation.{name}"] = packed.index_checksum(0)
    facts["the order of the data sets"] = hashlib.sha256(order.encode()).hexdigest()
    everything = hashlib.sha256(json.dumps(facts).encode()).hexdigest()
    if len(set(all_gather_objects(everything, group))) == 1:
        return
    hosts, ranks = zip(*all_gather_objects((socket.gethostname(), facts), group))
    for name in facts:
        values = [rank.get(name) for rank in ranks]
        usual = Counter(values).most_common(1)[0][0]
        others = [f"rank {i} ({host})" for i, host in enumerate(hosts) if values[i] != usual]
        if others:
            remainder = f" and {len(others) - 8} more" if len(others) > 8 else ""
            first = values.index(usual)
            raise DataError(
                f"ranks would not train on the same data: {name} differs on {', '.join(others[:8])}{remainder} from "
                f"rank {first} ({hosts[first]}); copy the data sets there again, and remove the index cache "
                "(data.index_cache) there"
            )
    raise DataError("ranks would not train on the same data: their configs list other data sets")


def missing_data(config: Config) -> list[str]:
    """Return a line for each data set with a missing file. Raises ObjectStoreError if a store cannot be reached."""
    data = config.data
    named = [("data.train", prefix) for prefix in data.train]
    named += [(f"data.validation.{name}", prefix) for name, prefix in data.validation.items()]
    no_text = []
    for key, path in data.text:
        try:
            find_files([path], flag=f"{key},")
        except ValueError as error:
            no_text.append(str(error))
    named = [entry for entry in named if entry not in data.text]
    missing = [
        (key, prefix, [path for path in (bin_path(prefix), idx_path(prefix)) if not path.exists()])
        for key, prefix in dict.fromkeys(named)
    ]
    lines = [f"{key}, {prefix}: no {' and no '.join(map(str, paths))}" for key, prefix, paths in missing if paths]
    return lines + no_text


def _tokens_of(data: PackedDataset | TextSource | PromptSource) -> str:
    """Return the number of tokens, or the size of the files for text that is not tokenized yet."""
    return f"{data.bytes / 2**20:,.1f} MiB" if isinstance(data, TextSource) else f"{data.num_tokens:,}"


def describe_planned_data(config: Config, steps: int | None = None) -> str:
    """Return `describe_data` for a new run. Raises ValueError if a data set is missing or does not fit.

    `steps` is the number of steps; None means training.steps.
    """
    data_sets = open_data_sets(config, None if config.data.grpo is None else open_tokenizer(config, "config"))
    progress = Progress.begin(_sources(config.data.train, data_sets, "tokens"))
    samples = (steps or config.training.steps) * config.training.global_batch_size
    return describe_data(config, data_sets, progress, _validation_sets(config, None), samples)


def _describe_equal_contents(data_sets: Sequence[AnySet]) -> list[str]:
    """Return a line for each data set that is the same as an earlier one, or that seems to be a copy."""
    lines, listed = [], [x.listed_files() for x in data_sets if not isinstance(x, PromptSet)]
    for i, entry in enumerate(listed):
        alike = [x for x in listed[:i] if x.contents == entry.contents]
        same = next((x for x in alike if x.files == entry.files), None)
        if same is not None:
            which = "has the same files as" if entry.files else "is a copy of"
            lines.append(f"{entry.prefix} {which} {same.prefix}: they are one data set, with the sum of both weights")
        elif alike:
            lines.append(
                f"{entry.prefix} has the size of {alike[0].prefix}, and the same content where it is compared: they "
                "count as two data sets; if one is a copy of the other, list only one"
            )
    return lines


def describe_data(
    config: Config,
    data_sets: Sequence[AnySet],
    progress: Progress,
    validation_sets: Mapping[str, Blend],
    samples: int,
) -> str:
    """Return a table of the data sets: tokens, share of the samples, and samples and epochs by the end of the run.

    Lines below the table describe text, prompts, and how well documents fit into samples if they are not cut.
    `samples` is the number of samples that the run reads until its end.
    """
    t, active = config.training, _active(data_sets, progress)
    segment = progress.segment(config.seed)
    counts = segment.given(max(samples, progress.first_sample))
    packed = _blends(data_sets, progress, config.seed)[0].datasets
    rows: list[tuple[str, PackedDataset | TextSource | PromptSource, float, int]] = [
        (x.prefix, packed_set, share, count)
        for x, packed_set, share, count in zip(active, packed, shares(segment.weights), counts)
    ]
    held_out = [(x, weight) for x, weight in zip(active, segment.weights) if x.validation is not None]
    evaluated = t.eval_steps * t.global_batch_size
    if held_out:
        weights = tuple(weight for _, weight in held_out)
        validation_counts = Segment.fresh(weights, config.seed).given(evaluated)
        rows += [
            (f"{x.prefix} (one evaluation)", x.validation, share, count)
            for (x, _), share, count in zip(held_out, shares(weights), validation_counts)
            if x.validation is not None
        ]
    for name, blend in validation_sets.items():
        (packed_set,) = blend.datasets
        rows.append((f"valid/{name}: {packed_set.prefix} (one evaluation)", packed_set, 1.0, evaluated))
    width = max(len("data set"), *(len(name) for name, *_ in rows))
    lines = [f"{'data set':<{width}} {'tokens':>19} {'share':>8} {'samples':>15} {'epochs':>10}"]
    lines += [
        f"{name:<{width}} {_tokens_of(data):>19} {share:>8.2%} {count:>15,} "
        + ("         ?" if isinstance(data, TextSource) else f"{data.epochs(count):>10.3f}")
        for name, data, share, count in rows
    ]
    for x in active:
        if isinstance(x, TextSet):
            text, files = x.train, "file" if len(x.train.files) == 1 else "files"
            lines.append(
                f"{x.prefix}: {len(text.files):,} {files} of text, tokenized while the run trains, in "
                f"{text.canonical_streams} canonical streams (docs/own-data.md)"
            )
        elif isinstance(x, PromptSet):
            lines.append(f"{x.prefix}: {len(x.train.prompts):,} prompts, {x.train.group_size} texts for each")
        elif isinstance(x.train.packing, BestFit):
            lines.append(f"{x.prefix}: {x.train.packing.describe()}")
            if x.train.left_out:
                lines.append(
                    f"{x.prefix}: {x.train.left_out:,} of {len(x.train.documents):,} pairs are left out, as they have "
                    f"more than training.seq_length + 1 = {t.seq_length + 1:,} tokens"
                )
    lines += _describe_equal_contents(data_sets)
    if progress.list_weights == "equal" and not isinstance(config.data.train, Mapping) and len(active) > 1:
        lines.append("Shares are equal, as when this run began; to change them, set {prefix: weight} in data.train.")
    return "\n".join(lines)
