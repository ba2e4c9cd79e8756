"""Training loop of one of several replicas, with a quorum before each step or before each round of steps."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from megafp8.batch import Batch
from megafp8.checkpoint import BackgroundSaver, CheckpointReader, FolderLock, NodeMemory, clean_incomplete
from megafp8.checkpoint.errors import SaveFailed, on_rank0
from megafp8.host.object_store import AnyPath
from megafp8.parallel.parallel_state import ParallelState
from megafp8.parallel.replicas import Membership, Quorum, ReplicaLost, StopAsked
from megafp8.parallel.replicas.lighthouse import ReplicaEndpoint
from megafp8.parallel.replicas.membership import ReplicaLimits
from megafp8.parallel.replicas.quorum import NEW
from megafp8.parallel.replicas.quorum import share as share_of
from megafp8.training.inputs import RunInputs
from megafp8.training.job import Job, Shared
from megafp8.training.observer import Observer, StepMetrics
from megafp8.training.replicas.membership import (
    PeerCheck,
    mark_state_received,
    micro_batches,
    state_tensors,
)
from megafp8.training.replicas.rounds import Rounds
from megafp8.training.replicas.trainer import ReplicaTrainer
from megafp8.training.resilience.node_memory import find_newest, newest_on_disk
from megafp8.training.state import checkpoint_folder, metadata_of

logger = logging.getLogger(__name__)

_LOOP_STATE = ("skipped_in_a_row", "save_postponed", "saved_step")
"""Attributes of a `Job` that a rejoining replica copies from a peer, in addition to `step`."""


class ReplicaJob(Job):
    """Training loop of one replica.

    Construction is collective: every rank of the replica must build its job.

    Attributes:
        membership: Membership of this replica in quorums and exchanges.
        rounds: Rounds between outer steps; None if replicas exchange gradients in each step.
        writes: Whether this replica writes the checkpoints.
    """

    trainer: ReplicaTrainer

    def __init__(self, inputs: RunInputs, parallel: ParallelState, shared: Shared, place: ReplicaEndpoint) -> None:
        replicas = inputs.config.resilience.replicas
        assert replicas is not None
        self.replicas = replicas
        self.rounds: Rounds | None = None
        self.writes, self.entered = False, False
        limits = ReplicaLimits(
            replicas.exchange_seconds, inputs.config.timeout_seconds, replicas.slow_ratio, replicas.slow_steps
        )
        self.membership = Membership(
            place,
            parallel.world.is_first,
            parallel.device,
            limits,
            state=lambda: state_tensors(self.trainer),
            metadata=self._as_metadata,
            restore=self._restore,
            stops=lambda: self.stop.signal is not None,
        )
        super().__init__(inputs, parallel, None, shared)
        if replicas.outer is not None:
            self.rounds = Rounds(self.trainer, self.membership, replicas, replicas.outer)

    def _build_trainer(self, reader: CheckpointReader | None) -> ReplicaTrainer:
        return ReplicaTrainer(self.config, self.parallel, self.membership.exchange)

    def _begin(self, reader: CheckpointReader | None, memory: NodeMemory | None) -> None:
        # A preliminary value: `_enter` asks the other replicas, and one of them may be saving a newer step now.
        self.step = on_rank0(lambda: newest_on_disk(self.config, self.run_folder), self.parallel.world.group)

    @contextlib.contextmanager
    def _taking_part(self) -> Iterator[None]:
        with contextlib.ExitStack() as self.writing:
            try:
                yield
            finally:
                self.membership.close()

    def _open_observers(self) -> list[Observer]:
        observers, interval = super()._open_observers(), self.config.training.consistency_check_interval
        if interval and self.rounds is None:
            observers.append(PeerCheck(self.trainer, self.membership, interval, self.config.checkpoint.interval))
        return observers

    # --- the loop -----------------------------------------------------------------------------------------------------

    def _is_done(self) -> bool:
        try:
            return self._has_done_all()
        except StopAsked:  # there are too few replicas to continue
            self._save(ends=True)
            self.stopped = True
            return True

    def _has_done_all(self) -> bool:
        """Begin the next quorum unless a round is running, and return whether all steps are done. Collective."""
        if self.rounds is not None and self.rounds.running:
            return False
        quorum = self.membership.begin(self.step) if self.entered else self._enter()
        self.entered = True
        if self.rounds is not None and self.rounds.running:  # the state was copied from a peer at the end of its round
            self._end_round()
            return self._has_done_all()
        while self.step >= self.last_step and quorum.sources:  # a replica still copies the state
            self.membership.wait_copied()
            quorum = self.membership.begin(self.step)
        self._choose_writer(quorum)
        if self.step >= self.last_step and self.writes:  # the previous writer may have been lost while saving this step
            self.saved_step = on_rank0(lambda: newest_on_disk(self.config, self.run_folder), self.parallel.world.group)
            self._save(ends=True)
        if self.rounds is not None and self.step < self.last_step:
            self.rounds.begin(self.step, self.last_step)
        return self.step >= self.last_step

    def _enter(self) -> Quorum:
        """Join the first quorum: copy the state of training replicas, or load a checkpoint if all replicas start.

        This is collective over all replicas that start together.
        """
        membership, r, began = self.membership, self.replicas, time.monotonic()
        quorum = membership.begin(NEW)
        while quorum.step == NEW and len(quorum.members) < r.count and time.monotonic() - began < r.start_seconds:
            time.sleep(0.2)
            quorum = membership.begin(NEW)
        if quorum.step != NEW:
            return quorum
        reader = None
        for first in (True, False):  # the first member repairs the folder before the others read it
            if (quorum.rank == 0) == first:
                reader = find_newest(self.inputs.run, self.run_folder, self.parallel, self.inputs.fingerprint, None)
            with contextlib.suppress(ReplicaLost):
                membership.gather(torch.zeros(1))
        self._begin_with(reader)
        return membership.begin(self.step)

    def _training_batches(self) -> Iterator[list[Batch]]:
        """Yield this replica's share of the micro-batches of each following step.

        The share is empty in a step in which the replica still copies the state of a peer.
        """
        share, position = None, -1
        stream: Iterator[list[Batch]] = iter(())
        while True:
            quorum, count = self.membership.quorum, self.trainer.num_microbatches
            if not quorum.trains:
                yield []
                continue
            rank, members = quorum.trainers.index(quorum.rank), len(quorum.trainers)
            count = micro_batches(self.replicas, count, members)
            if self.consumed_samples != position or share != share_of(count, members, rank):
                share, position = share_of(count, members, rank), self.consumed_samples
                # Read in this process: members may change at any step, and loader processes take seconds to start.
                stream = self.inputs.batches(
                    self.inputs.train, self.parallel, self.consumed_samples, self.spikes.position_of, 0, share
                )
            position += self.config.training.global_batch_size
            yield next(stream)

    def _do_step(self, after_step: Callable[[int], None]) -> None:
        with contextlib.suppress(ReplicaLost):  # the step does not count; the next quorum repeats it
            super()._do_step(after_step)

    def _one_step(self) -> StepMetrics:
        metrics = super()._one_step()
        return replace(metrics, replicas=self.trained_by)

    def _count_step(self, batches: list[Batch]) -> tuple[int, int]:
        self.trained_by = self.membership.quorum.indices
        members, samples = len(self.trained_by), self.config.training.global_batch_size
        if self.replicas.batch == "shrink":
            samples = samples // self.replicas.count * members
            self.history = self.history.after(self.step + 1, samples, self.config)
        _, ranks = super()._count_step(batches)
        if self.rounds is not None and self.step == self.rounds.end:
            self._end_round()
        return samples, ranks * members

    def _wait_copied(self) -> None:
        if self.rounds is not None:  # without rounds, the exchange of the step has already waited
            self.membership.wait_copied()
        super()._wait_copied()

    @property
    def _in_round(self) -> bool:
        """Whether this replica has trained steps since the latest outer step."""
        return self.rounds is not None and self.rounds.running and self.step > self.rounds.start

    def _end_round(self) -> None:
        """Do the outer step with the other replicas, and choose the writer of checkpoints. Collective."""
        assert self.rounds is not None
        self.rounds.finish()
        self._choose_writer(self.membership.quorum)

    def _stop_and_save(self) -> None:
        if not self._in_round:
            self._unless_replaced(super()._stop_and_save)

    # --- the state that a peer copies ---------------------------------------------------------------------------------

    def _as_metadata(self) -> dict[str, Any]:
        """Return the state that a peer needs in addition to the tensors: progress, counters and round. Collective."""
        data, metadata = self._records()
        saved = metadata_of(self.trainer, self.step, self.inputs.fingerprint, data, self.history, metadata)
        loop = {name: getattr(self, name) for name in ("step", *_LOOP_STATE)}
        updates, rounds = self.trainer.optimizer.step_count, None if self.rounds is None else self.rounds.state()
        return {"saved": saved | {"step": self.step}, "updates": updates, "loop": loop, "round": rounds}

    def _restore(self, metadata: Mapping[str, Any]) -> None:
        """Continue with the state of a peer, after its tensors have been received. Collective."""
        mark_state_received(self.trainer, metadata["updates"])
        for name, value in metadata["loop"].items():
            setattr(self, name, value)
        if self.rounds is not None:
            self.rounds.restore(metadata["round"])
        self._take_position(metadata["saved"])

    # --- checkpoints, which one replica writes ------------------------------------------------------------------------

    def _choose_writer(self, quorum: Quorum) -> None:
        """Start or stop writing checkpoints according to `quorum`. Collective over this replica."""
        writes = quorum.writer == quorum.rank
        if writes == self.writes:
            return
        self.writes = writes
        if not writes:  # this replica was lost for a while, and another replica has replaced it
            self._cease_to_write()
            return
        folder = checkpoint_folder(self.run_folder, self.config.checkpoint.folder)
        self.lock = self.writing.enter_context(FolderLock(folder, takes_over=True))
        on_rank0(lambda: clean_incomplete(folder), self.parallel.world.group)
        self.saver = self._open_saver()
        if self.saver is not None:
            self.savers = [self.writing.enter_context(self.saver)]
        logger.info(f"this replica writes the checkpoints from step {self.step} on")

    def _open_saver(self) -> BackgroundSaver | None:
        return super()._open_saver() if self.writes else None

    def _cease_to_write(self) -> None:
        """Stop writing checkpoints, because another replica writes them now."""
        self.writes, self.savers, self.saver = False, [], None
        with contextlib.suppress(RuntimeError):  # another replica holds the lock of the folder now
            self.writing.close()

    def _unless_replaced(self, write: Callable[[], None]) -> None:
        """Call `write`. If it fails because another replica writes the checkpoints now, stop writing. Collective.

        Other replicas can replace this replica without its knowledge if the lighthouse was lost too and heard from the
        other replicas first after its restart.
        """
        try:
            write()
        except SaveFailed as error:
            if on_rank0(self.lock.is_ours, self.parallel.world.group):
                raise
            logger.warning(f"another replica writes the checkpoints now: {error}")
            self._cease_to_write()

    def _poll(self) -> None:
        self._unless_replaced(super()._poll)

    def _save(self, ends: bool) -> None:
        if self.writes:
            super()._save(ends)
        else:
            self.saved_step = self.step

    def _write(self, data: Mapping[str, Any], metadata: Mapping[str, Any]) -> AnyPath:
        with self.lock.busy():  # the other replicas may continue without this replica and choose another writer
            return super()._write(data, metadata)
