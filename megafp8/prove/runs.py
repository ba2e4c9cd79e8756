"""Functions that ranks run to prove a config: train a few steps, compare with one rank, save, resume, export.

They run on every rank (`local_ranks`) and return plain values. One rank writes its gradients and its state to files of
whole tensors. The ranks of a layout compare the rectangles that they hold with these tensors.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from megafp8.batch import Batch
from megafp8.checkpoint import CheckpointReader, Rectangles, collect_shards, newest_readable
from megafp8.checkpoint.rectangles import as_rectangles
from megafp8.config import Config
from megafp8.optimizer.step import clip_factor
from megafp8.parallel.data.grad_buffer import gradient_of
from megafp8.parallel.parallel_state import ParallelState, initialize_distributed
from megafp8.parallel.sharding import Shape
from megafp8.training.history import History
from megafp8.training.inputs import open_inputs
from megafp8.training.parallel import build_parallel
from megafp8.training.state import checkpoint_folder, load_state, save_state, tensors
from megafp8.training.trainer import RankTrainer

STEPS, CONTINUED = 3, 2
"""Number of steps before the checkpoint, and after it."""

GRADIENTS, STATE = "gradients.pt", "state.pt"
"""Files that one rank writes (`write_tensors`)."""

Context = Callable[[], AbstractContextManager[None]]
"""Function that makes the context manager in which a run takes place. Tests use it to inject faults."""


class Step(NamedTuple):
    """Loss with the z-loss, loss of multi-token prediction or of the binary head, and gradient norm of a step."""

    loss: float
    auxiliary: float
    norm: float


class Compared(NamedTuple):
    """Comparison of the parts of a tensor that a rank holds.

    `difference`: largest difference from the reference; infinite if a value is not finite. `largest`: largest magnitude
    of the reference. `parts`: offset and shape of each part.
    """

    difference: float
    largest: float
    shape: Shape
    parts: tuple[tuple[Shape, Shape], ...]


Comparison = Mapping[str, Compared]
Microbatch = tuple[tuple[int, ...], str]
"""Indices of the samples of a micro-batch, and a hash of its tensors."""


@dataclass
class RunResult:
    """Result of a run on one rank. `batches`: micro-batches by step."""

    data_rank: int
    steps: list[Step] = field(default_factory=list)
    batches: list[list[Microbatch]] = field(default_factory=list)
    gradients: Comparison = field(default_factory=dict)
    state: Comparison = field(default_factory=dict)
    saved: Comparison = field(default_factory=dict)


class TrialRun:
    """Trainer on the ranks of this call, with its data."""

    def __init__(self, config: Config, parallel: ParallelState) -> None:
        self.config, self.parallel = config, parallel
        self.inputs = open_inputs(config, "config")
        self.trainer = RankTrainer(self.inputs.config, parallel)
        for stage in self.trainer.stages:
            if stage.offload is not None:
                stage.offload.smallest = 0
        self.history, self.step = History(), 0
        self.record = RunResult(parallel.data.rank)
        self._stream: Iterator[list[Batch]] | None = None

    def train(self, steps: int, after_first: Callable[[], object] = lambda: None) -> None:
        """Train for a number of steps. Call `after_first` after the first step of the run."""
        for batches in self.read(steps):
            loss, result = self.trainer.train_step(self.step, batches)
            assert not result.skipped, f"gradients of step {self.step} are not finite"
            self.record.steps.append(Step(loss.mean + (loss.z_loss or 0.0), loss.auxiliary or 0.0, result.grad_norm))
            if not self.step:
                after_first()
            self.step += 1

    def read(self, steps: int) -> list[list[Batch]]:
        """Return the micro-batches of the next steps."""
        if self._stream is None:
            samples = self.history.samples_at(self.step, self.config)
            self._stream = self.inputs.batches(self.inputs.train, self.parallel, samples)
        read_batches = list(itertools.islice(self._stream, steps))
        self.record.batches += [[_described(batch) for batch in batches] for batches in read_batches]
        return read_batches

    def gradients(self) -> dict[str, Rectangles]:
        """Return the clipped gradients of the latest step with which this rank updates weights."""
        shards, update = self.trainer.strategy.shards, self.trainer.update
        clip = 1.0 if update.max_norm is None or not update.optimizer.takes_factor else self._clip(update.max_norm)
        return collect_shards([(shard, gradient_of(shard) * clip) for shard in shards], "")

    def _clip(self, max_norm: float) -> float:
        return clip_factor(torch.tensor(self.record.steps[-1].norm), max_norm).item()

    def save(self, folder: Path) -> None:
        """Save a checkpoint in `folder`. Collective."""
        samples = self.history.samples_at(self.step, self.config)
        save_state(self.trainer, folder, self.step, None, data=self.inputs.record(samples), history=self.history)

    @torch.no_grad()
    def load(self, reader: CheckpointReader) -> None:
        """Resume from a checkpoint. Values that it lacks become NaN."""
        for rectangles in as_rectangles(tensors(self.trainer)).values():
            for part in rectangles.parts:
                if part.view.is_floating_point():
                    part.view.fill_(math.nan)
        self.step = load_state(self.trainer, reader)
        self.history = History.resumed(reader.metadata, self.config)
        self.inputs, _ = self.inputs.resumed(reader.metadata)


def _described(batch: Batch) -> Microbatch:
    assert batch.samples is not None
    content = b"".join(x.contiguous().numpy().tobytes() for x in batch.tensors)
    return tuple(batch.samples.tolist()), hashlib.sha256(content).hexdigest()[:16]


def begin(config: Config) -> ParallelState:
    """Return the parallel state of the ranks of this call. Collective."""
    return build_parallel(config, initialize_distributed(config.device))


def reader_of(folder: Path) -> CheckpointReader:
    """Return the checkpoint that a run saved in `folder`."""
    reader = newest_readable(checkpoint_folder(folder))
    assert reader is not None, f"no checkpoint in {folder}"
    return reader


def saved_tensors(folder: Path, names: Iterable[str]) -> dict[str, Tensor]:
    """Return the tensors `names` that exist in the checkpoint that a run saved in `folder`."""
    reader = reader_of(folder)
    return {name: reader.read(name) for name in names if name in reader.tensors}


def write_tensors(held: Mapping[str, Rectangles | Tensor], file: Path) -> None:
    """Write the tensors of one rank, which holds all of them, to a file that is faster to read than a checkpoint."""
    whole = {}
    for name, rectangles in as_rectangles(held).items():
        whole[name] = torch.zeros(rectangles.global_shape, dtype=rectangles.dtype)
        for offset, view in rectangles.parts:
            whole[name][tuple(slice(o, o + n) for o, n in zip(offset, view.shape))] = view.cpu()
    file.parent.mkdir(parents=True, exist_ok=True)
    torch.save(whole, file)


def read_tensors(file: Path) -> dict[str, Tensor]:
    """Return the tensors that `write_tensors` wrote."""
    return torch.load(file, weights_only=False, mmap=True)  # this process wrote the file; safe loading is slow


def compare(found: Mapping[str, Rectangles | Tensor], expected: Mapping[str, Tensor]) -> Comparison:
    """Compare the tensors on this rank with the whole tensors of the same names."""
    compared = {}
    for name, rectangles in as_rectangles(found).items():
        known = name in expected
        whole = _values(name, expected[name]) if known else torch.full(rectangles.global_shape, math.nan)
        difference = 0.0 if known else math.inf
        for offset, view in rectangles.parts:
            part = whole[tuple(slice(o, o + n) for o, n in zip(offset, view.shape))]
            difference = max(difference, _largest(part - _values(name, view)))
        parts = tuple((offset, tuple(view.shape)) for offset, view in rectangles.parts)
        compared[name] = Compared(difference, _largest(whole), tuple(whole.shape), parts)
    return compared


def _values(name: str, x: Tensor) -> Tensor:
    """Return a tensor's values in float64; for FP8 scales, their reciprocals, which are proportional to amaxes.

    Tensors that are zero except for rounding may have any amax. The reciprocals of their scales are as small as the
    tensors themselves.
    """
    is_scale = name.startswith("fp8.") and name.endswith(".scale")
    return x.double().reciprocal() if is_scale else x.double()


def _largest(x: Tensor) -> float:
    """Return the largest magnitude; infinite if a value is not finite."""
    return float(x.abs().nan_to_num(nan=math.inf).max()) if x.numel() else 0.0


def reference(config: Config, folder: Path) -> RunResult:
    """Train on one rank, write the first gradients and the final state, and read the data of the next steps."""
    run = TrialRun(config, begin(config))
    run.train(STEPS, lambda: write_tensors(run.gradients(), folder / GRADIENTS))
    write_tensors(tensors(run.trainer), folder / STATE)
    run.read(CONTINUED)
    return run.record


def layout(config: Config, one_rank: Path | None, own: Path | None, around: Context = nullcontext) -> RunResult:
    """Train on the ranks of a layout and compare with the files of one rank in `one_rank`.

    If `own` is given, save a checkpoint there and continue training.
    """
    with around():
        run = TrialRun(config, begin(config))

        def compare_gradients() -> None:
            if one_rank is not None:
                run.record.gradients = compare(run.gradients(), read_tensors(one_rank / GRADIENTS))

        run.train(STEPS, compare_gradients)
        state = tensors(run.trainer)
        if one_rank is not None:
            run.record.state = compare(state, read_tensors(one_rank / STATE))
        if own is not None:
            run.save(own)
            run.record.saved = compare(state, saved_tensors(own, state))
            run.train(CONTINUED)
    return run.record


def resume(
    config: Config, sources: Iterable[Path], back: Path | None, around: Context = nullcontext
) -> list[RunResult]:
    """Resume from the checkpoint in each of `sources`, compare with it bit for bit, and continue training.

    If `back` is given, save a checkpoint there before continuing.
    """
    records = []
    with around():
        parallel = begin(config)
        for source in sources:
            reader, run = reader_of(source), TrialRun(config, parallel)
            run.load(reader)
            state = tensors(run.trainer)
            run.record.saved = compare(state, saved_tensors(source, state))
            if back is not None:
                run.save(back)
            run.train(CONTINUED)
            records.append(run.record)
    return records


def microbatches(records: Sequence[RunResult]) -> list[list[Microbatch]]:
    """Return the micro-batches of all data-parallel ranks by step, in the order of the samples."""
    ranks = {record.data_rank: record.batches for record in records}
    steps = zip(*(ranks[rank] for rank in sorted(ranks)), strict=True)
    return [list(itertools.chain.from_iterable(zip(*step, strict=True))) for step in steps]
