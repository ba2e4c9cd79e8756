"""Precomputed logits of a teacher (`data.distillation.logits: precomputed`).

The logits are in a file next to the data, `<prefix>.teacher-<digest>.npy`, with a row for each token of the data set:

    ids       int32 [k], the most likely next tokens
    logits    [k], the bits of their logits in training.precision, as the teacher computes them

Rows of tokens that are not an input of any sample are zero. The digest covers everything that logits depend on: the
teacher's weights and config, the data set and the documents in use, the length at which documents are cut
(`training.seq_length`), the precision and k. A file with the right name therefore always fits the run. Temperature and
weight of the distillation may change. If the file does not exist, a new run computes it with forward passes of the
teacher over all samples of an epoch, in the layout of this run. Later runs read it in any layout.

Samples are packed so that a token sees only its own document (`best_fit`). In later epochs a document has different
neighbors in its sample, and the stored logits differ from live logits by rounding.

Shapes: b micro-batch, s sequence, k most likely tokens.
"""

from __future__ import annotations

import gc
import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megafp8.batch import Batch
from megafp8.checkpoint.errors import on_all_ranks, on_rank0
from megafp8.checkpoint.files import allocate
from megafp8.config import Config, ConfigError, check_layout
from megafp8.conversion.formats import open_source
from megafp8.data.samples import PackedDataset
from megafp8.numerics.dtypes import DTYPES, sum_dtype
from megafp8.objectives import Objective
from megafp8.parallel.collectives import gather_objects
from megafp8.training.errors import TrainingError
from megafp8.training.frozen_config import frozen_config, live
from megafp8.training.init_from import load_init
from megafp8.training.inputs import RunInputs
from megafp8.training.trainer import RankTrainer
from megafp8.training.weights_digest import source_digest

logger = logging.getLogger(__name__)

_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def passes(
    trainer: RankTrainer, frozen: RankTrainer, objective: Objective, packed: PackedDataset
) -> Iterator[tuple[list[list[int]], list[Batch], list[Tensor]]]:
    """Run forward passes of `frozen` over all samples of an epoch. Collective.

    Yields:
        For each step, lists over this rank's micro-batches: the numbers of the samples, the tokens, and the reference
        outputs that the loss of `trainer` keeps (empty on ranks without the last stage).
    """
    assert trainer.loss is not None
    data, b, total = trainer.parallel.data, trainer.config.training.micro_batch_size, packed.samples_per_epoch
    together = trainer.num_microbatches * data.size * b
    for start in range(0, total, together):
        firsts = range(start + data.rank * b, start + together, data.size * b)
        samples = [[(first + row) % total for row in range(b)] for first in firsts]
        rows = [[objective.row(packed.parts(i), i) for i in indices] for indices in samples]
        batches = trainer.own_tokens([objective.batch(torch.from_numpy(np.stack(x))) for x in rows])
        yield samples, batches, frozen.references(batches, trainer.loss)


def open_logits(
    trainer: RankTrainer, inputs: RunInputs, members: Mapping[str, Sequence[PackedDataset]], known: str | None
) -> str:
    """Let the loss of `trainer` read the teacher's logits of all data sets, and return the teacher's digest.

    Missing files are computed first. Collective.

    Args:
        trainer: Trainer of this rank.
        inputs: Tokenizer and data of the run.
        members: Samples that the run reads of each data set, by prefix.
        known: Digest of the teacher if the run resumes, else None. A resumed run needs the files but not the teacher.

    Raises:
        TrainingError: If a resumed run lacks a file, or a file cannot be written.
        ValueError: If a file is damaged.
        ConfigError: If the teacher cannot run in this layout.
    """
    config, group = trainer.config, trainer.parallel.world.group
    digest = known or _teacher_digest(trainer)
    paths = {prefix: _path(config, prefix, packed, digest) for prefix, packed in members.items()}
    missing = [prefix for prefix in paths if not on_rank0(paths[prefix].is_file, group)]
    if missing and known is not None:
        raise TrainingError(
            f"{paths[missing[0]]} is missing: the run began with these logits of the teacher, and its name depends on "
            "the data, data.distillation.top_k and training.seq_length; restore them, or choose another name for a new "
            "run"
        )
    if missing:
        teacher = _load_teacher(trainer)
        for prefix in missing:
            _compute(trainer, teacher, inputs.objective, members[prefix], paths[prefix])
        teacher.close()
        del teacher
        gc.collect()
    stored, files = _Format(config), dict[int, NDArray[Any]]()
    for prefix, path in paths.items():
        packed = members[prefix][0]
        assert packed.first_place is not None
        tokens = packed.dataset.num_tokens
        files[packed.first_place] = on_all_ranks(partial(_open, path, stored.row, tokens), group)
    trainer.known_reference = _Logits(stored, files, trainer.parallel.device)
    logger.info(f"logits of the teacher: {', '.join(map(str, paths.values()))}")
    return digest


def _teacher_digest(trainer: RankTrainer) -> str:
    """Return the digest of the teacher's weights and config. Collective."""
    config, distillation = live(trainer.config), trainer.config.data.distillation
    frozen = frozen_config(config)
    assert distillation is not None
    assert frozen is not None
    source, parallel = open_source(distillation.teacher, config.spec.stem.vocab_multiple), trainer.parallel
    weights_digest = source_digest(source, DTYPES[config.training.precision], parallel.device, parallel.world.group)
    return hashlib.sha256(f"{weights_digest} {frozen.model.model_dump_json()}".encode()).hexdigest()


def _path(config: Config, prefix: str, members: Sequence[PackedDataset], digest: str) -> Path:
    distillation, t = config.data.distillation, config.training
    assert distillation is not None
    documents = sorted({(x.documents.start, x.documents.stop) for x in members})
    facts = [digest, members[0].dataset.fingerprint, documents, t.seq_length, t.precision, distillation.top_k]
    return Path(f"{prefix}.teacher-{hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]}.npy")


def _load_teacher(trainer: RankTrainer) -> RankTrainer:
    keys, frozen = trainer.config.data.distillation, frozen_config(live(trainer.config))
    assert keys is not None
    assert frozen is not None
    try:
        check_layout(frozen, trainer.parallel.world_size)
    except ConfigError as error:
        which = f"the teacher, {keys.teacher}, in the layout of the run, which must compute its logits first"
        raise ConfigError(which, error.problems) from error
    teacher = RankTrainer(frozen, trainer.parallel, frozen=True)
    load_init(teacher, keys.teacher)
    return teacher


class _Format:
    """Format of the file's rows, and conversion between rows and the loss's reference outputs."""

    def __init__(self, config: Config) -> None:
        distillation = config.data.distillation
        assert distillation is not None
        self.dtype = DTYPES[config.training.precision]
        self.row = np.dtype(
            [("ids", "<i4", (distillation.top_k,)), ("logits", f"<i{self.dtype.itemsize}", (distillation.top_k,))]
        )

    def rows(self, batch: Batch, output: Tensor) -> tuple[NDArray[np.int64], NDArray[Any]]:
        """Return the places of a micro-batch's tokens in the data sets, and their rows.

        `output` is `[2, s, b, k]`, logits and ids.
        """
        assert batch.places is not None
        logits_bsk, ids_bsk = (x.transpose(0, 1).contiguous() for x in output.unbind(2))
        stored_bsk = logits_bsk.to(self.dtype)
        assert torch.equal(stored_bsk.to(logits_bsk.dtype), logits_bsk), "logits are not in training.precision"
        rows, places = np.empty(batch.places.shape, self.row), batch.places.cpu().numpy()
        rows["ids"] = ids_bsk.to(torch.int32).cpu().numpy()
        rows["logits"] = stored_bsk.view(_INTEGERS[self.dtype.itemsize]).cpu().numpy()
        return places[places >= 0], rows[places >= 0]

    def output(self, rows: NDArray[Any]) -> Tensor:
        """Convert rows `[b, s]` to `[s, b, 2, k]`, logits and ids, on the CPU."""
        logits_bsk = torch.from_numpy(np.ascontiguousarray(rows["logits"])).view(self.dtype)
        ids_bsk, compute = torch.from_numpy(np.ascontiguousarray(rows["ids"])), sum_dtype(self.dtype)
        return torch.stack([x.to(compute).transpose(0, 1) for x in (logits_bsk, ids_bsk)], dim=2)


def _compute(
    trainer: RankTrainer, teacher: RankTrainer, objective: Objective, members: Sequence[PackedDataset], path: Path
) -> None:
    """Compute the logits of a data set and write their file atomically. Collective."""
    logger.info(f"computing the logits of the teacher for {path}")
    group, stored, first_place = trainer.parallel.world.group, _Format(trainer.config), members[0].first_place
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    assert first_place is not None

    def on_first(action: Callable[[], Any]) -> Any:
        """Run `action` on the first rank and return its result there, None on other ranks. Collective."""
        try:
            return on_all_ranks(lambda: action() if trainer.parallel.world.is_first else None, group)
        except RuntimeError as error:
            temporary.unlink(missing_ok=True)
            raise TrainingError(f"{path} cannot be written ({error}); try data.distillation.logits=live") from None

    def create() -> NDArray[Any]:
        file: NDArray[Any] = np.lib.format.open_memmap(temporary, "w+", stored.row, (members[0].dataset.num_tokens,))
        allocate(temporary, temporary.stat().st_size)  # a full disk would kill this process with a signal later
        return file

    def finish() -> None:
        file.flush()
        os.replace(temporary, path)

    file = on_first(create)
    for packed in {(x.documents.start, x.documents.stop): x for x in members}.values():
        for _, batches, outputs in passes(trainer, teacher, objective, packed):
            stored_rows = [stored.rows(batch, output) for batch, output in zip(batches, outputs)]
            for rank_rows in gather_objects(stored_rows if trainer.parallel.tensor.is_first else [], group) or []:
                for places, rows in rank_rows:
                    file[places - first_place] = rows
    on_first(finish)


def _open(path: Path, row: np.dtype[Any], tokens: int) -> NDArray[Any]:
    """Return the rows of a file as a memory map. Raises ValueError if the file is missing or damaged."""
    try:
        file: NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
        if (file.dtype, file.shape) != (row, (tokens,)):
            raise ValueError(f"it has {file.shape} rows of {file.dtype}")
        return file
    except FileNotFoundError:
        raise ValueError(f"{path} exists on the first rank, but not here; copy it next to the data") from None
    except (OSError, ValueError, EOFError) as error:
        raise ValueError(f"{path} is damaged ({error}); remove it, or restore it if a run began with it") from None


class _Logits:
    """Function from a micro-batch to the teacher's logits and ids, `[s, b, 2, k]`, read from the files.

    `files` holds the rows of each data set by the place of their first row.
    """

    def __init__(self, stored: _Format, files: Mapping[int, NDArray[Any]], device: torch.device) -> None:
        self._stored, self._files, self._device = stored, files, device

    def __call__(self, batch: Batch) -> Tensor:
        """Return the stored logits and ids of a micro-batch, `[s, b, 2, k]`, on the device."""
        assert batch.places is not None
        places = batch.places.cpu().numpy()
        rows = np.zeros(places.shape, self._stored.row)
        for first, file in self._files.items():
            inside = (places >= first) & (places < first + len(file))
            rows[inside] = file[places[inside] - first]
        return self._stored.output(rows).to(self._device)
