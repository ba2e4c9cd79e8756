"""Export of a checkpoint to Hugging Face, compared with the same model run by `transformers`."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megafp8.batch import Batch
from megafp8.config import Config
from megafp8.conversion.convert import Selected, convert, verify
from megafp8.conversion.formats import FORMATS
from megafp8.prove.runs import TrialRun, begin, reader_of

SEQUENCES = 2


def why_not(config: Config) -> str | None:
    """Return the known reason why nothing can be compared with `transformers`, or None."""
    if importlib.util.find_spec("transformers") is None:
        return "transformers is not installed"
    if config.lora is not None:
        return "adapters are exported to PEFT, and this run has no base model for them"
    return None


def with_all_keys_chosen(config: Config) -> Config:
    """Return `config` with sparse and compressed attention that select every token; itself if it has neither.

    An indexer with few heads gives equal scores, and any choice among them is valid.
    """
    model, every, changes = config.model, {"top_k": config.training.seq_length}, dict[str, Any]()
    if model.sparse_attention is not None:
        changes["sparse_attention"] = model.sparse_attention.model_copy(update=every)
    for name, kind in model.layer_kinds.items():
        mixer = kind.mixer
        if mixer is not None and getattr(mixer, "top_k", None) is not None:
            chosen = kind.model_copy(update={"mixer": mixer.model_copy(update=every)})
            changes["layer_kinds"] = {**changes.get("layer_kinds", model.layer_kinds), name: chosen}
    return config.model_copy(update={"model": model.model_copy(update=changes)}) if changes else config


def round_trip(config: Config, run: Path, folder: Path) -> str | None:
    """Export the checkpoint in `run` to `folder`, and read it back. Raises ValueError if any bit differs.

    Return the reason why the model has no export, or None.
    """
    to, path = FORMATS["hf"], reader_of(run).path
    selected = Selected(FORMATS["native"].source(path), weights_only=True, dtype=torch.float32, mtp=to.mtp)
    if (chosen := with_all_keys_chosen(config)) is not config:
        selected.model = chosen.spec
    sink = to.sink(folder)
    with contextlib.redirect_stderr(io.StringIO()):  # a progress bar
        try:
            convert(selected, sink, {})
        except ValueError as error:
            return str(error)
        sink.publish()
        verify(selected, to.source(folder))
    return None


def logits_difference(config: Config, run: Path, folder: Path) -> float | str:
    """Compare the logits of the checkpoint in `run` with those that `transformers` computes from its export `folder`.

    Return the largest difference relative to the largest logit, or the reason why there is nothing to compare.
    """
    import transformers

    config = with_all_keys_chosen(config)
    (architecture,) = json.loads((folder / "config.json").read_text(encoding="utf-8"))["architectures"]
    if not hasattr(transformers, architecture):
        return f"transformers has no {architecture}; its code is in the model's own repository"
    size = config.spec.stem.vocab_size
    assert size is not None
    generator = torch.Generator().manual_seed(config.seed)

    def random_ids(length: int) -> Tensor:
        return torch.randint(2, size, (SEQUENCES, length), generator=generator)  # 1 is RoBERTa's padding

    ids = random_ids(config.training.seq_length)
    decoder_ids = None if config.decoder_length is None else random_ids(config.decoder_length)
    ours = _our_logits(config, run, ids, decoder_ids)
    theirs = _their_logits(getattr(transformers, architecture), folder, ids, decoder_ids)
    return float((ours - theirs).abs().max() / theirs.abs().max())


@torch.no_grad()
def _our_logits(config: Config, run: Path, ids: Tensor, decoder_ids: Tensor | None) -> Tensor:
    """Return our logits, `[b, s, v]`; for T5, the decoder's logits."""
    loaded = TrialRun(config, begin(config))
    loaded.load(reader_of(run))
    loaded.trainer.strategy.wait()
    (stage,) = loaded.trainer.stages
    batch = Batch(ids, ids if decoder_ids is None else decoder_ids, decoder_tokens=decoder_ids)
    logits_sbv: Tensor = stage(None, batch, read=lambda logits, _: logits)
    return logits_sbv.transpose(0, 1)[..., : config.spec.stem.vocab_size]


@torch.no_grad()
def _their_logits(architecture: Any, folder: Path, ids: Tensor, decoder_ids: Tensor | None) -> Tensor:
    from transformers import logging

    logging.set_verbosity_error()
    with contextlib.redirect_stderr(io.StringIO()):  # a progress bar
        model = architecture.from_pretrained(folder, dtype=torch.float32).eval()
    output = model(ids) if decoder_ids is None else model(input_ids=ids, decoder_input_ids=decoder_ids)
    logits: Tensor = output.prediction_logits if "prediction_logits" in output else output.logits
    return logits.double()
