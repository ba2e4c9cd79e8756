"""The export of a checkpoint to Hugging Face, run by `transformers`."""

from __future__ import annotations

import contextlib
import importlib.util
import io
from pathlib import Path

import torch
from torch import Tensor

from megafp8.batch import Batch
from megafp8.config import Config
from megafp8.conversion.convert import Selected, convert
from megafp8.conversion.formats import FORMATS
from megafp8.prove.runs import Run, begin, reader_of

SEQUENCES = 2


def why_not(config: Config) -> str | None:
    """Why nothing is compared with `transformers`, as far as it is known without an attempt."""
    if importlib.util.find_spec("transformers") is None:
        return "transformers is not installed"
    if config.model.architecture != "gpt":
        return f"logits of architecture {config.model.architecture} are not compared"
    if config.lora is not None:
        return "adapters are exported to PEFT, whose base this run does not have"
    return None


def logits_difference(config: Config, run: Path, folder: Path) -> float | str:
    """Export the checkpoint in `run` to `folder`: the difference of the logits of `transformers`, relative to the
    largest; or why the model has no export. On one rank."""
    to = FORMATS["hf"]
    native = FORMATS["native"].source(reader_of(run).path)
    selected = Selected(native, weights_only=True, dtype=torch.float32, mtp=to.mtp)
    sink = to.sink(folder)
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # a progress bar
            convert(selected, sink, {})
    except ValueError as error:
        return str(error)
    sink.publish()
    model = config.model
    assert model.vocab_size is not None
    generator = torch.Generator().manual_seed(config.seed)
    ids = torch.randint(1, model.vocab_size, (SEQUENCES, config.training.seq_length), generator=generator)
    ours, theirs = _our_logits(config, run, ids), _their_logits(folder, ids)
    return float((ours - theirs).abs().max() / theirs.abs().max())


@torch.no_grad()
def _our_logits(config: Config, run: Path, ids_bs: Tensor) -> Tensor:
    loaded = Run(config, begin(config))
    loaded.load(reader_of(run))
    (stage,) = loaded.trainer.stages
    assert stage.embedding is not None
    assert stage.head is not None
    loaded.trainer.strategy.wait()
    inputs = stage.layer_inputs(Batch(ids_bs, ids_bs))
    x_sbh = stage.embedding(ids_bs, None)
    inputs = stage.with_per_layer(inputs, ids_bs, x_sbh)
    logits_sbv = stage.head.logits(*stage.run_blocks(x_sbh, inputs))
    return logits_sbv.transpose(0, 1)[..., : config.model.vocab_size]


@torch.no_grad()
def _their_logits(folder: Path, ids_bs: Tensor) -> Tensor:
    from transformers import AutoModelForCausalLM

    with contextlib.redirect_stderr(io.StringIO()):  # a progress bar
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return model(ids_bs).logits.double()
