"""Training loop of one stage on one rank: resume, train steps, evaluate, log and save checkpoints."""

from __future__ import annotations

import contextlib
import logging
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

from megafp8.batch import Batch
from megafp8.checkpoint import (
    BackgroundSaver,
    CheckpointReader,
    Destination,
    FolderLock,
    MemoryReader,
    NodeMemory,
    SavedCheckpoint,
)
from megafp8.config import end_of_stage, stage_at
from megafp8.data.loader_processes import describe_overload
from megafp8.fp8 import describe_path
from megafp8.fp8.health import FILE_NAME
from megafp8.host.gpus import peak_flops
from megafp8.host.object_store import AnyPath
from megafp8.host.text_file import DiskErrorsLogged
from megafp8.parallel import activity
from megafp8.parallel.parallel_state import (
    ParallelState,
    host_group,
)
from megafp8.planner.flops import describe_flops, flops_per_token
from megafp8.training import cuda_graphs
from megafp8.training.describe import describe_longrope
from megafp8.training.determinism import describe_determinism
from megafp8.training.divergence import diverged
from megafp8.training.errors import Diverged, TrainingError
from megafp8.training.evaluation import LiveUses, StepSource, TaskEvaluation
from megafp8.training.frozen import open_frozen
from megafp8.training.history import History
from megafp8.training.init_from import load_init
from megafp8.training.inputs import RunInputs, check_ranks_agree, describe_data
from megafp8.training.metrics import memory_gib, read_metrics, utc_now
from megafp8.training.observer import Observer, StepMetrics
from megafp8.training.observers import open_observers
from megafp8.training.plots import plot_loss, print_loss
from megafp8.training.process import StopRequest, garbage_collected_after_steps
from megafp8.training.resilience.faults import Faults
from megafp8.training.resilience.node_memory import free_memory, newest_on_disk
from megafp8.training.resilience.spikes import LossSpikes
from megafp8.training.run_log import RunLog
from megafp8.training.state import (
    begin_save,
    checkpoint_folder,
    find_checkpoint,
    load_state,
    save_state,
    saved_choice,
    tensors,
    tokenizer_copy,
)
from megafp8.training.trainer import RankTrainer
from megafp8.training.validate import run_folder

logger = logging.getLogger(__name__)


class Shared(NamedTuple):
    """Values that all stages of a job share.

    Attributes:
        lock: Lock of the checkpoint folder.
        stop: Request to stop, set by a signal.
        log: Log of this rank.
        folder: Folder of the log and the metrics.
        live: Functions that build evaluations and rollouts of the live model.
    """

    lock: FolderLock
    stop: StopRequest
    log: RunLog
    folder: Path
    live: LiveUses


def _where(reader: CheckpointReader, memory: NodeMemory | None) -> str:
    """Return a text that says whether the checkpoint is in memory or on disk; empty without checkpoints in memory."""
    if memory is None:
        return ""
    return ", in memory" if isinstance(reader, MemoryReader) else ", on disk: memory has no complete newer checkpoint"


def _is_at(interval: int, step: int) -> bool:
    """Return whether `step` is a multiple of `interval`. An interval of 0 means never."""
    return interval > 0 and step % interval == 0


class Job:
    """Training loop of one stage, around a `RankTrainer`.

    Construction is collective: every rank must build its job.

    Args:
        inputs: Tokenizer and data of the stage.
        parallel: Process groups.
        reader: Checkpoint to resume from, or None to start from initial weights.
        shared: Values that all stages share.
        memory: Checkpoint storage in the memory of the nodes, or None.
    """

    def __init__(
        self,
        inputs: RunInputs,
        parallel: ParallelState,
        reader: CheckpointReader | None,
        shared: Shared,
        memory: NodeMemory | None = None,
    ) -> None:
        self.inputs, self.config, self.parallel = inputs, inputs.config, parallel
        self.run_folder, self.lock, self.stop = run_folder(self.config), shared.lock, shared.stop
        self.folder = shared.folder
        self.is_main = parallel.rank == 0
        self.trainer = self._build_trainer(reader)
        self.flops_per_token = flops_per_token(self.config, self.trainer.compared)
        logger.info(f"run folder: {self.folder}")
        self.step, self.history = 0, History()
        self.spikes = LossSpikes(self.config, self.run_folder, parallel.rank, None)
        self.skipped_in_a_row, self.save_postponed, self.saved_step = 0, False, 0
        self.stopped = False  # whether a request stopped the run before its last step
        self.frozen_record: dict[str, str] = {}
        self._begin(reader, memory)
        self.last_step = end_of_stage(inputs.run, self.step)
        in_memory = None if memory is None else memory.folder
        self.faults = Faults(self.folder, self.config.resilience.inject, self.trainer, parallel.rank, in_memory)
        check_ranks_agree(self.inputs, self.spikes.position_of(self.consumed_samples), parallel.world.group)
        self._log_choices()
        self.tasks: TaskEvaluation | None = None
        if self.config.training.evaluate is not None:
            assert shared.live.evaluation is not None
            self.tasks = shared.live.evaluation(self.trainer, self.inputs, self.folder)
        self.rollouts: StepSource | None = None
        if self.config.data.grpo is not None:
            assert shared.live.rollouts is not None
            self.rollouts = shared.live.rollouts(self.trainer, self.inputs, self.folder)
        self.observers: list[Observer] = []  # filled while the loop runs
        self.tokenizer = tokenizer_copy(self.config) if self.is_main else {}
        self.save_seconds = 0.0
        self.saver = self._open_saver()
        self.memory, self.memory_saver = memory, self._open_memory_saver(memory)
        self.savers = [saver for saver in (self.saver, self.memory_saver) if saver is not None]

    def _build_trainer(self, reader: CheckpointReader | None) -> RankTrainer:
        return RankTrainer(self.config, self.parallel, saved_choice(self.config, reader))

    def _begin(self, reader: CheckpointReader | None, memory: NodeMemory | None) -> None:
        """Load the state that this job trains from, and open the frozen model if the loss needs one. Collective."""
        self._begin_with(reader, memory)
        self.frozen_record = open_frozen(self.trainer, self.inputs, None if reader is None else reader.metadata)

    def _begin_with(self, reader: CheckpointReader | None, memory: NodeMemory | None = None) -> None:
        """Load the state from the checkpoint or `checkpoint.init_from`, or keep the random weights. Collective."""
        init = self.config.checkpoint.init_from
        if reader is not None:
            self.saved_step = self.step = load_state(self.trainer, reader)
            if isinstance(reader, MemoryReader):
                self.saved_step = newest_on_disk(self.config, self.run_folder)
            logger.info(f"resumed from step {self.step}{_where(reader, memory)}")
            self._take_position(reader.metadata)
            return
        self.step = self.saved_step = 0
        if init is not None:
            load_init(self.trainer, init)
            logger.info(f"weights from {init}")

    def _open_saver(self) -> BackgroundSaver | None:
        """Return the background saver, or None if checkpoints are saved in the foreground. Collective."""
        keep = self.config.checkpoint
        if not keep.async_save:
            return None
        group, folder = host_group(self.config.timeout_seconds), checkpoint_folder(self.run_folder, keep.folder)
        to = Destination(folder, group, keep.keep_last, keep.keep_every, self.lock, self.tokenizer)
        return BackgroundSaver(to, self.parallel.device, self._log_saved)

    def _take_position(self, saved: Mapping[str, Any]) -> None:
        """Continue at the data position of a saved state, given its metadata."""
        self.history = History.resumed(saved, self.config)
        self.inputs, changes = self.inputs.resumed(saved)
        if changes:
            logger.info(f"data changed since step {self.step}: {'; '.join(changes)}")
        self.spikes.resumed(saved)

    def _open_memory_saver(self, memory: NodeMemory | None) -> BackgroundSaver | None:
        """Return a background saver that writes to `memory`, or None without `memory`. Collective.

        Raises ValueError on all ranks if a node has too little memory for the checkpoints.
        """
        if memory is None:
            return None
        memory.remove_newer(self.step)
        saver = BackgroundSaver(memory, self.parallel.device, lambda saved: None)
        needed = memory.check_space(saver.plan(tensors(self.trainer)))
        interval, nodes = self.config.checkpoint.memory_interval, len(memory.nodes)
        copied = "with a copy on the next node" if nodes > 1 else "without a copy on another node"
        logger.info(
            f"checkpoints in memory: every {interval} steps, {copied}, at most {needed / 2**20:,.1f} MiB on a node, in "
            f"{memory.folder.parent.parent}"
        )
        return saver

    @property
    def consumed_samples(self) -> int:
        """Number of samples read so far, not counting samples left out because of loss spikes since the checkpoint."""
        return self.history.samples_at(self.step, self.config)

    def _log_choices(self) -> None:
        """Log the data sets and the choices made when the trainer was built, such as kernels and FP8 layers."""
        trainer, parallel = self.trainer, self.parallel
        inputs = self.inputs
        if inputs.stage is not None:
            logger.info(f"stage {inputs.stage.name}: steps {inputs.stage.begin + 1} to {self.last_step}")
        samples = self.spikes.consumed(self.history.samples_at(max(self.step, self.last_step), self.config))
        data = describe_data(self.config, inputs.data_sets, inputs.progress, inputs.validation_sets, samples)
        logger.info(f"data:\n{data}")
        if inputs.tokenizer is not None:
            logger.info(f"tokenizer: {inputs.tokenizer.boundaries}")
        crowded = describe_overload(self.config.data.num_workers, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        if crowded is not None and self.is_main:
            logger.warning(crowded)
        for line in describe_longrope(self.config):
            logger.info(line)
        logger.info(f"model FLOPs that MFU is computed from: {describe_flops(self.config, trainer.compared)}")
        logger.info(f"optimizer: {trainer.optimizer.reason}")
        logger.info(cuda_graphs.describe(trainer.why_no_graphs))
        logger.info(describe_path(trainer.fp8.recipe, parallel.device, self.config.fp8.gemm_backend))
        documents, prefix = self.config.data.reset_at_documents, self.config.data.prefix_lm is not None
        mixers = [block.mixer for stage in trainer.stages for block in stage.all_blocks]
        length = self.config.training.seq_length
        kernels = (x.kernels(parallel.device, length, documents=documents, prefix=prefix) for x in mixers)
        for kernel in dict.fromkeys(kernels):
            if kernel is not None:
                logger.info(kernel)
        if memory := trainer.strategy.describe():
            logger.info(memory)
        for reason in trainer.auto_filter.reasons:
            logger.info(reason)
        if self.config.deterministic:
            logger.info(describe_determinism(parallel.device.type))

    def run(self) -> bool:
        """Train from the current step to the end of the stage, and return whether another stage follows.

        All checkpoints are complete on return.
        """
        try:
            follows = self._run()
        except Diverged:  # all ranks are here, and the job is not restarted
            self._free_memory()
            raise
        if not follows:
            self._free_memory()
        return follows

    def _free_memory(self) -> None:
        if self.memory is not None:
            free_memory(self.memory, self.run_folder, self.parallel)

    def _run(self) -> bool:
        t = self.config.training
        with (
            contextlib.closing(self.trainer),
            contextlib.ExitStack() as savers,
            garbage_collected_after_steps(t.gc_interval) as after_step,
        ):
            for saver in self.savers:
                savers.enter_context(saver)
            savers.enter_context(self._taking_part())
            if self.step >= t.last_step:
                self._save(ends=True)  # the checkpoint may exist in memory only
                limit = "training.steps" if t.last_step == t.steps else "training.stop_after"
                logger.info(f"nothing to do: the run has done {self.step} steps, and {limit} is {t.last_step}")
                return False
            with contextlib.ExitStack() as stack:
                self.observers = [stack.enter_context(observer) for observer in self._open_observers()]
                self._train(after_step)
            if self.step < t.last_step and not self.stopped:
                return True
            if self.is_main:
                self._report()
            return False

    def _taking_part(self) -> AbstractContextManager[object]:
        """Return the context around the loop. Subclasses use it to join and leave the run."""
        return contextlib.nullcontext()

    def _open_observers(self) -> list[Observer]:
        trainer, steps = self.trainer, (self.step, self.last_step)
        return open_observers(
            trainer, self.inputs, self.folder, *steps, faults=self.faults, spikes=self.spikes, tasks=self.tasks
        )

    def _train(self, after_step: Callable[[int], None]) -> None:
        """Step until the run ends or is asked to stop."""
        self.stream = self._training_batches()
        while not self.stopped and not self._is_done():
            self._do_step(after_step)

    def _is_done(self) -> bool:
        """Return whether all steps of the stage are done."""
        return self.step >= self.last_step

    def _do_step(self, after_step: Callable[[int], None]) -> None:
        """Train one step, write its metrics, and save a checkpoint if one is due. Collective."""
        metrics = self._one_step()
        after_step(self.step)
        for observer in self.observers:
            observer.write(metrics, self.trainer.fp8_records)
        self._stop_if_diverged(metrics)
        self._poll()
        if self.spikes.rewinds_after(metrics) and self._rewind():
            self.stream = self._training_batches()
        else:
            self._stop_and_save()

    def _stop_and_save(self) -> None:
        """Stop after this step if any rank was asked to, and save a checkpoint if one is due. Collective."""
        if not self.faults.happens("leave_out_collective", self.step):
            self.stopped = self.stop.agreed(self.parallel.world.group)
        ends = self.stopped or self.step == self.last_step
        in_memory = _is_at(self.config.checkpoint.memory_interval, self.step)
        in_memory = in_memory and not ends and not self.skipped_in_a_row
        save_is_due = self._save_is_due(ends)
        if save_is_due or in_memory:
            self._check_state()
        if save_is_due:
            self._save(ends)
        if in_memory:
            self._save_to_memory()

    def _poll(self) -> None:
        for saver in self.savers:
            saver.poll()

    def _training_batches(self) -> Iterator[list[Batch]]:
        """Return an iterator over this rank's micro-batches of each following step."""
        if self.rollouts is not None:
            train, position_of = self.inputs.train, self.spikes.position_of
            return self.rollouts.batches(train, self.step, self.consumed_samples, position_of)
        return self.inputs.batches(self.inputs.train, self.parallel, self.consumed_samples, self.spikes.position_of)

    def _rewind(self) -> bool:
        """Go back to the newest checkpoint and leave out the samples read since then. Collective.

        Returns False if there is no checkpoint. Raises Diverged if the loss jumped too often after the same checkpoint.
        """
        activity.enter("rewind")
        spike, end = self.step, self.spikes.consumed(self.consumed_samples)
        for saver in self.savers:
            saver.finish()
        if self.memory is not None:
            self.memory.remove_newer(-1)
        reader = find_checkpoint(self.inputs.run, self.run_folder, self.parallel, self.inputs.fingerprint)
        if reader is None:
            logger.warning(f"loss spike in step {spike}: there is no checkpoint to go back to; the step was skipped")
            return False
        before = reader.metadata["step"]
        if stage_at(self.inputs.run, before) != self.inputs.stage:
            raise TrainingError(
                f"loss spike in step {spike}: the newest undamaged checkpoint is of step {before}, before the "
                "present stage began; start the run again to continue from it"
            )
        self.step = self.saved_step = load_state(self.trainer, reader)
        self.history = History.resumed(reader.metadata, self.config)
        self.inputs, _ = self.inputs.resumed(reader.metadata)  # may be older than the checkpoint the job resumed from
        self.spikes.resumed(reader.metadata)
        samples = (self.spikes.position_of(self.consumed_samples), end)
        times, limit = self.spikes.leave_out(samples, self.step), self.config.training.max_skipped_steps
        if limit and times > limit:
            raise Diverged(
                f"training has diverged: the loss jumped {times} times after step {self.step}, last in step {spike}, "
                f"although the samples since then were left out each time (training.max_skipped_steps = {limit})"
            )
        logger.warning(
            f"loss spike in step {spike}: back to step {self.step}, without samples {samples[0]} to {samples[1] - 1}"
        )
        self.skipped_in_a_row, self.save_postponed = 0, False
        return True

    def _one_step(self) -> StepMetrics:
        """Train one step on the next batches and return its metrics. Collective."""
        saving, t = self.save_seconds, self.config.training
        for observer in self.observers:
            observer.before_step(self.step + 1)
        start = time.perf_counter()
        batches = next(self.stream)
        # Sampling texts with the model is part of the step, not time spent waiting for data.
        data_seconds = time.perf_counter() - start if self.rollouts is None else 0.0
        checking = time.perf_counter()
        for observer in self.observers if batches else ():
            batches = observer.before_passes(self.step + 1, batches)
        start += time.perf_counter() - checking  # do not count the observers' time as part of the step
        loss, result = self.trainer.train_step(
            self.step, batches, before_update=self._wait_copied, loss_limit=self.spikes.limit
        )
        learning_rate = self.trainer.learning_rate(self.step)
        trained, ranks = self._count_step(batches)
        seconds = time.perf_counter() - start - (self.save_seconds - saving)
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if result.skipped else 0
        observed: dict[str, Any] = {}
        for observer in self.observers:
            observed |= observer.after_step(self.step, loss.mean, result.skipped)
        per_gpu = trained * t.seq_length / seconds / ranks
        all_count = bool(loss.metrics) or loss.tokens >= trained * t.seq_length
        flops = per_gpu * self.flops_per_token
        peak = peak_flops(self.parallel.device, t.precision, fp8=self.config.fp8.recipe != "none")
        save_seconds, self.save_seconds = self.save_seconds, 0.0
        return StepMetrics(
            step=self.step,
            loss=loss.mean,
            grad_norm=result.grad_norm,
            learning_rate=learning_rate,
            tokens=self.history.tokens_at(self.step, self.config),
            tokens_per_second_per_gpu=per_gpu,
            loss_tokens_per_second_per_gpu=None if all_count else loss.tokens / seconds / ranks,
            tflops_per_gpu=flops / 1e12,
            mfu=flops / peak if peak else None,
            memory_gib=memory_gib(self.parallel.device),
            step_seconds=seconds,
            skipped=result.skipped,
            time=utc_now(),
            consumed_samples=self.spikes.consumed(self.consumed_samples),
            data_seconds=data_seconds,
            save_seconds=save_seconds,
            skipped_in_a_row=self.skipped_in_a_row,
            loss_scale=result.loss_scale,
            mtp_loss=None if self.config.spec.head.binary else loss.auxiliary,
            binary_loss=loss.auxiliary if self.config.spec.head.binary else None,
            z_loss=loss.z_loss,
            index_loss=self.trainer.index_loss,
            max_attention_logit=self.trainer.max_attention_logit,
            layer_norms=result.layer_norms,
            objective=loss.metrics if self.rollouts is None else {**self.rollouts.metrics, **loss.metrics},
            **observed,
        )

    def _count_step(self, batches: list[Batch]) -> tuple[int, int]:
        """Count a step after its update is queued, and return the number of samples and of ranks that trained it."""
        t, samples = self.config.training, self.config.training.global_batch_size
        trained = samples
        if self.rollouts is not None:
            trained = len(batches) * t.micro_batch_size * self.parallel.data.size
            self.history = self.history.after(self.step + 1, samples, self.config, trained)
        self.step += 1
        return trained, self.parallel.world_size

    def _stop_if_diverged(self, metrics: StepMetrics) -> None:
        t = self.config.training
        if metrics.loss_scale is not None and metrics.loss_scale > t.loss_scale.min_loss_scale:
            return  # the scaler halves the loss scale first
        if t.max_skipped_steps and metrics.skipped_in_a_row >= t.max_skipped_steps:
            self._check_state()  # a single faulty rank makes the gradients of all ranks wrong
            raise diverged(self.trainer, metrics, self.saved_step)

    def _check_state(self) -> None:
        for observer in self.observers:
            observer.check_state(self.step)

    def _wait_copied(self) -> None:
        """Wait until a save in progress has copied the weights to the host. Call this before weights are updated."""
        if self.savers:
            start = time.perf_counter()
            for saver in self.savers:
                saver.wait_copied()
            self.save_seconds += time.perf_counter() - start

    def _save_is_due(self, ends: bool) -> bool:
        """Return whether to save this step. `ends` is True for the last step of this process, which is always saved.

        Other skipped steps are not saved. Their checkpoint would repeat the weights of an earlier step, and in a run
        that has diverged it would push the last good checkpoint out of `checkpoint.keep_last`. The save is postponed
        to the next step that is not skipped.
        """
        at_interval = _is_at(self.config.checkpoint.interval, self.step)
        if ends or ((at_interval or self.save_postponed) and not self.skipped_in_a_row):
            self.save_postponed = False
            return True
        if at_interval and not self.save_postponed:
            self.save_postponed = True
            if self.is_main:
                logger.warning(
                    f"step {self.step} was skipped and is not saved; the next step that is not skipped will be"
                )
        return False

    def _save(self, ends: bool) -> None:
        """Save this step, in the background if `checkpoint.async_save` is set and the run does not end. Collective."""
        if self.saved_step == self.step:
            return
        self.saved_step = self.step
        activity.enter("save")
        start = time.perf_counter()
        data, metadata = self._records()
        fingerprint = self.inputs.fingerprint
        if self.saver is not None and not ends:
            begin_save(self.trainer, self.saver, self.step, fingerprint, data, self.history, metadata)
        else:
            path = self._write(data, metadata)
            logger.info(f"saved {path} in {time.perf_counter() - start:.1f} s")
        self.save_seconds += time.perf_counter() - start

    def _write(self, data: Mapping[str, Any], metadata: Mapping[str, Any]) -> AnyPath:
        """Write the checkpoint of this step and return its path. Collective."""
        if self.saver is not None:
            self.saver.finish()
        return save_state(
            self.trainer,
            self.run_folder,
            self.step,
            self.inputs.fingerprint,
            self.lock,
            data=data,
            history=self.history,
            files=self.tokenizer,
            keep_all=self.skipped_in_a_row > 0,
            more=metadata,
        )

    def _save_to_memory(self) -> None:
        """Save this step to the memory of the nodes, in the background. Collective."""
        assert self.memory_saver is not None
        activity.enter("save")
        start = time.perf_counter()
        data, metadata = self._records()
        begin_save(self.trainer, self.memory_saver, self.step, self.inputs.fingerprint, data, self.history, metadata)
        self.save_seconds += time.perf_counter() - start

    def _records(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the progress in the data, and further metadata of a checkpoint. Collective.

        The further metadata holds the state of the loss-spike detector and the record of the frozen model.
        """
        samples = self.consumed_samples
        self.inputs.gather_positions(self.parallel.data.group)
        return self.inputs.record(self.spikes.consumed(samples)), self.spikes.metadata(samples) | self.frozen_record

    def _log_saved(self, saved: SavedCheckpoint) -> None:
        logger.info(f"saved {saved.path}: stalled {saved.stalled_seconds:.1f} s, {saved.total_seconds:.1f} s in all")

    def _report(self) -> None:
        """Draw the loss curve, and report why the run ended and where its results are."""
        records: list[dict[str, Any]] = []
        with DiskErrorsLogged("the loss curve"):
            records = read_metrics(self.folder / "metrics.jsonl")
            plot_loss(records, self.folder / "loss.png", self.config.name)
        if self.stopped:
            logger.info(f"stopped on request after step {self.step}; start the same command again to continue")
            return
        if self.step < self.config.training.steps:
            logger.info(
                f"stopped after step {self.step} of {self.config.training.steps} because of training.stop_after; to "
                "continue, start the same command with a larger training.stop_after, or without it"
            )
        if records and (sys.stdout.isatty() or self.config.logging.progress):
            print_loss(records)
        print(f"run folder: {self.folder}\nloss curve: {self.folder / 'loss.png'}")
        report = self.folder / FILE_NAME
        if self.trainer.fp8.recorder is not None and report.exists() and report.stat().st_size:
            print(f"FP8 report: {report}; to read it: megafp8 report {shlex.quote(str(self.folder))}")
