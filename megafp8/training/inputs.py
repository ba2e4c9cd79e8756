"""Tokenizer and data of a run: opened and checked before any process group exists, so that bad input hangs nobody."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megafp8.config import Config, ConfigError, Problem
from megafp8.data.blend import Blend
from megafp8.data.indexed_dataset import IndexedDataset, check_dataset
from megafp8.data.samples import PackedDataset, split_documents
from megafp8.data.tokenizers import Tokenizer, TokenizerSettingError, build_tokenizer


@dataclass(frozen=True)
class Inputs:
    """What a run reads. `validation` is None where the split leaves none."""

    config: Config
    tokenizer: Tokenizer | None
    train: Blend
    validation: Blend | None

    @property
    def fingerprint(self) -> str | None:
        """Identity of the vocabulary, None where no tokenizer is configured."""
        return None if self.tokenizer is None else self.tokenizer.fingerprint

    @property
    def eod_id(self) -> int | None:
        return None if self.tokenizer is None else self.tokenizer.eod_id


def open_inputs(config: Config, source: str) -> Inputs:
    """Open tokenizer and data sets, resolve `model.vocab_size`, and check one against the other.

    Raises ValueError (ConfigError where a key of the config is at fault) for a missing, damaged or mismatched input.
    """
    tokenizer = open_tokenizer(config, source)
    config = _resolve_vocabulary(config, tokenizer, source)
    needs_eod = config.data.reset_at_documents or config.data.mask_eod_loss
    if needs_eod and tokenizer is None:
        key = "data.reset_at_documents" if config.data.reset_at_documents else "data.mask_eod_loss"
        problem = Problem(key, True, "needs the end-of-document token, which a tokenizer knows", "set data.tokenizer")
        raise ConfigError(source, [problem])
    vocab_size = config.model.vocab_size
    assert vocab_size is not None
    prefixes = config.data.train if isinstance(config.data.train, dict) else dict.fromkeys(config.data.train, 1.0)
    for prefix in prefixes:
        check_dataset(prefix, vocab_size, tokenizer.fingerprint if tokenizer else None)
    train, validation = _build(config, prefixes)
    return Inputs(config, tokenizer, train, validation)


def with_vocabulary(config: Config, source: str) -> Config:
    """`config` with `model.vocab_size` resolved, of all inputs reading the tokenizer only. Raises ValueError."""
    if config.model.vocab_size is not None:
        return config
    return _resolve_vocabulary(config, open_tokenizer(config, source), source)


def open_tokenizer(config: Config, source: str) -> Tokenizer | None:
    """The tokenizer of the config, None where it has none. Raises ConfigError for a key that cannot be used."""
    given = config.data.tokenizer
    if given is None:
        return None
    try:
        return build_tokenizer(given.kind, given.path, given.end_token, given.pattern)
    except TokenizerSettingError as error:
        problem = Problem(f"data.tokenizer.{error.setting}", error.value, error.rule, error.works)
        raise ConfigError(source, [problem]) from None


def _resolve_vocabulary(config: Config, tokenizer: Tokenizer | None, source: str) -> Config:
    given = config.model.vocab_size
    if tokenizer is None:
        if given is None:
            problem = Problem(
                "model.vocab_size", None, "not given, and no data.tokenizer to take it from", "set either"
            )
            raise ConfigError(source, [problem])
        return config
    if given is None:
        model = config.model.model_copy(update={"vocab_size": tokenizer.vocab_size})
        return config.model_copy(update={"model": model})
    if given < tokenizer.vocab_size:
        rule = f"smaller than the {tokenizer.vocab_size} tokens of data.tokenizer ({config.data.tokenizer})"
        problem = Problem("model.vocab_size", given, rule, f"try {tokenizer.vocab_size}, or leave it out")
        raise ConfigError(source, [problem])
    return config


def _build(config: Config, prefixes: dict[str, float]) -> tuple[Blend, Blend | None]:
    train: list[PackedDataset] = []
    validation: list[tuple[PackedDataset, float]] = []
    for prefix, weight in prefixes.items():
        dataset = IndexedDataset(prefix)
        ranges = split_documents(dataset.num_documents, config.data.split)

        def packed(documents: range, dataset: IndexedDataset = dataset) -> PackedDataset:
            return PackedDataset(
                dataset, documents, config.training.seq_length, config.seed, cache_dir=config.data.index_cache
            )

        train.append(packed(ranges[0]))
        if config.training.eval_interval:
            if not len(ranges[1]):
                rule = (
                    f"training.eval_interval is {config.training.eval_interval}, but {prefix} keeps no documents for it"
                )
                problem = Problem("data.split", config.data.split, rule, 'try "90,10,0", or training.eval_interval=0')
                raise ConfigError(str(Path(prefix)), [problem])
            validation.append((packed(ranges[1]), weight))
    valid_blend = Blend([d for d, _ in validation], [w for _, w in validation], config.seed) if validation else None
    return Blend(train, list(prefixes.values()), config.seed), valid_blend
