"""Frozen model that a loss compares the trained model with: the reference of `data.dpo` or `data.grpo`, or a teacher.

The frozen model has the layout of the run and computes in `training.precision`, so its results do not depend on the
state of FP8 scaling. It has no gradients, masters or optimizer state. A checkpoint records the digest of its weights,
and a resumed run must find the same weights. With LoRA the frozen model is the trained model without its adapters.

`precomputed` log-probabilities of answers are in a file next to the data, `<prefix>.reference-<digest>.npz`:

    log_probabilities    float64 [documents, 2], chosen and rejected; NaN for pairs that are not used
    data, model          fingerprint of the data set, digest of the weights

A new run computes them by forward passes over all samples of an epoch, unless an earlier run from the same weights has
written the file. `precomputed` logits of a teacher are in another file (`megafp8.training.teacher_logits`).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from megafp8.checkpoint.errors import on_rank0
from megafp8.config import Config
from megafp8.data.samples import PackedDataset
from megafp8.objectives import Objective
from megafp8.parallel.collectives import all_reduce
from megafp8.training.errors import TrainingError
from megafp8.training.init_from import load_init
from megafp8.training.inputs import RunInputs
from megafp8.training.teacher_logits import open_logits, passes
from megafp8.training.trainer import RankTrainer
from megafp8.training.weights_digest import weights_digest

logger = logging.getLogger(__name__)

RECORD = "frozen_model"
"""Metadata key of a checkpoint for the digest of the frozen model's weights."""
LOGITS = "teacher_logits"
"""Metadata key of a checkpoint for the digest of the weights and config of a teacher with `precomputed` logits."""


def open_frozen(trainer: RankTrainer, inputs: RunInputs, saved: Mapping[str, Any] | None) -> dict[str, str]:
    """Load the frozen model or its precomputed outputs, and return its record for checkpoints. Collective.

    The record is empty if the loss compares nothing. `saved` is the metadata of the loaded checkpoint, or None for a
    new run. Raises TrainingError if the frozen model is not the one that the run began with.
    """
    config = inputs.config
    teacher = config.data.distillation
    reads_logits = teacher is not None and teacher.logits == "precomputed"
    record = LOGITS if reads_logits else RECORD
    known = None if saved is None else saved.get(record)
    key = f"data.{next(iter(config.data.objectives), None)}"
    if saved is not None and known is None and (trainer.frozen is not None or _is_precomputed(config)):
        raise TrainingError(
            f"{key}: the run began with another objective, or another reference; set it as it was, or "
            "choose another name for a new run"
        )
    if reads_logits:
        return {LOGITS: open_logits(trainer, inputs, _by_prefix(inputs), known)}
    if trainer.frozen is not None:
        folder = config.checkpoint.init_from if teacher is None else teacher.teacher
        if folder is not None:
            load_init(trainer.frozen, folder)
        digest = weights_digest(trainer.frozen)
        if known not in (None, digest):
            raise TrainingError(
                f"{key}: the frozen model, {folder or 'of the initial weights'}, has changed since the run began: "
                f"its weights have the digest {digest[:16]}, and had {known[:16]}; restore it, or choose another name "
                "for a new run"
            )
        return {RECORD: digest}
    if not _is_precomputed(config):
        return {}
    digest = weights_digest(trainer) if known is None else known
    for prefix, members in _by_prefix(inputs).items():
        values = _of_data_set(trainer, inputs, prefix, members, digest, begins=known is None)
        for packed in members:
            assert packed.reference is not None
            packed.reference.values = values
    return {RECORD: digest}


def _is_precomputed(config: Config) -> bool:
    d = config.data
    return "precomputed" in (d.dpo and d.dpo.reference, d.distillation and d.distillation.logits)


def _by_prefix(inputs: RunInputs) -> dict[str, list[PackedDataset]]:
    """Return all samples that the run reads of each data set, by prefix."""
    members: dict[str, list[PackedDataset]] = {}
    blends = [x for x in (inputs.validation, *inputs.validation_sets.values()) if x is not None]
    datasets = [x.train for x in inputs.data_sets] + [x for blend in (inputs.train, *blends) for x in blend.datasets]
    for packed in datasets:
        assert isinstance(packed, PackedDataset)
        members.setdefault(packed.prefix, []).append(packed)
    return members


def _of_data_set(
    trainer: RankTrainer, inputs: RunInputs, prefix: str, members: list[PackedDataset], digest: str, *, begins: bool
) -> NDArray[np.float64]:
    """Return the log-probabilities of a data set's answers, float64 `[documents, 2]`. Collective.

    They are read from the data set's file, or computed and written to it if the run `begins`.
    """
    path = Path(f"{prefix}.reference-{digest[:16]}.npz")
    about = {"data": members[0].fingerprint, "model": digest}
    group = trainer.parallel.world.group
    values = on_rank0(lambda: _read(path, about), group)
    wanted = {packed.documents: packed for packed in members}
    if values is not None and not any(np.isnan(values[x.used_documents]).any() for x in wanted.values()):
        logger.info(f"log-probabilities of the reference model: {path}")
        return values
    if not begins:
        raise TrainingError(
            f"{path} is missing, or belongs to other data: the run began with these log-probabilities of the reference "
            "model; restore it, or choose another name for a new run"
        )
    logger.info(f"computing the log-probabilities of {prefix} under the reference model")
    values = np.full((members[0].dataset.num_documents, 2), -np.inf)
    for packed in wanted.values():
        _compute(trainer, inputs.objective, packed, values)
    values = all_reduce(torch.from_numpy(values).to(trainer.parallel.device), group, "max").cpu().numpy()
    values[np.isneginf(values)] = np.nan
    on_rank0(lambda: _write(path, values, about), group)
    logger.info(f"wrote {path}")
    return values


def _compute(trainer: RankTrainer, objective: Objective, packed: PackedDataset, values: NDArray[np.float64]) -> None:
    """Compute the log-probabilities of answers in `packed`, and write the ones of this rank to `values`. Collective."""
    for samples, _, outputs in passes(trainer, trainer, objective, packed):
        for indices, output in zip(samples, outputs):
            for i, sample_output in zip(indices, output.cpu().numpy()):
                documents = np.asarray(packed.documents_of(i)) + packed.documents.start
                values[documents] = sample_output[: 2 * len(documents)].reshape(-1, 2)


def _read(path: Path, about: Mapping[str, str]) -> NDArray[np.float64] | None:
    """Return the log-probabilities in a file, or None if the file is missing or is about other data or weights."""
    try:
        with np.load(path, allow_pickle=False) as file:
            if any(str(file[key]) != value for key, value in about.items()):
                return None
            values: NDArray[np.float64] = file["log_probabilities"]
            return values
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, EOFError) as error:
        raise ValueError(f"{path} is damaged ({error}); remove it, or restore it if a run began with it") from None


def _write(path: Path, values: NDArray[np.float64], about: Mapping[str, str]) -> None:
    """Write the log-probabilities to a file atomically."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            np.savez(file, log_probabilities=values, data=np.array(about["data"]), model=np.array(about["model"]))
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise ValueError(f"{path} cannot be written ({error}); try data.dpo.reference=live") from None
