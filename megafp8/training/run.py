"""Training job on one rank: set up process groups, lock the run folder, and train one stage after the other."""

from __future__ import annotations

import contextlib
import gc
import os
import sys

import torch

from megafp8.checkpoint import FolderLock
from megafp8.config import stage_at
from megafp8.parallel import flight_recorder
from megafp8.parallel.parallel_state import ParallelState, destroy_model_parallel, initialize_distributed, rejoin
from megafp8.parallel.replicas.lighthouse import ReplicaEndpoint
from megafp8.training import notify
from megafp8.training.errors import TrainingError
from megafp8.training.evaluation import LiveUses
from megafp8.training.inputs import RunInputs
from megafp8.training.job import Job, Shared
from megafp8.training.parallel import build_parallel
from megafp8.training.process import StopRequest
from megafp8.training.replicas.job import ReplicaJob
from megafp8.training.replicas.membership import log_folder, own_place
from megafp8.training.resilience.hangs import progress_watched
from megafp8.training.resilience.node_memory import find_newest, open_memory
from megafp8.training.run_log import RunLog, record_launch
from megafp8.training.state import checkpoint_folder
from megafp8.training.validate import choose_device, run_folder


def train(inputs: RunInputs, live: LiveUses = LiveUses()) -> None:  # noqa: B008 - immutable
    """Run the job until its last step or a clean stop. Call `validate.check_run` first.

    A stage ends with a checkpoint. The next stage resumes from it with new process groups and a new trainer.

    Args:
        inputs: Inputs of the stage that the newest checkpoint belongs to.
        live: Functions that build the evaluation and the rollouts of the live model.

    Raises:
        FolderInUse: If another job uses the run folder. Nothing in the folder has been changed then.
        TrainingError: On all ranks, if training cannot continue.
    """
    config = inputs.config
    show_steps = config.logging.progress and not sys.stderr.isatty()
    with RunLog(int(os.environ.get("RANK", "0")), show_steps=show_steps) as log:
        if config.profile is not None and "collectives" in config.profile.record:
            flight_recorder.turn_on()
        device = initialize_distributed(choose_device(config), config.timeout_seconds)
        try:
            run, elsewhere, place = run_folder(config), config.checkpoint.folder, own_place(config)
            logs = log_folder(config, run)
            # With several replicas, only one writes checkpoints, and it locks the checkpoint folder when it does.
            locked = checkpoint_folder(run) if place is None else logs
            with FolderLock(locked, takes_over=place is not None) as lock, contextlib.ExitStack() as stack:
                if elsewhere is not None and place is None:
                    lock = stack.enter_context(FolderLock(checkpoint_folder(run, elsewhere)))
                shared = Shared(lock, StopRequest(), log, logs, live)
                shared.stop.install()
                log.open(logs)
                following = _train_stage(inputs, shared, place, device, first=True)
                while following is not None:
                    gc.collect()  # models are part of reference cycles
                    if device.type == "cuda":
                        torch.cuda.empty_cache()
                    rejoin(device.type, config.timeout_seconds)
                    following = _train_stage(following, shared, place, device, first=False)
        except TrainingError:
            destroy_model_parallel()  # all ranks raise together, so this collective call is safe
            raise
    destroy_model_parallel()


def _train_stage(
    inputs: RunInputs, shared: Shared, place: ReplicaEndpoint | None, device: torch.device, *, first: bool
) -> RunInputs | None:
    """Train the stage of `inputs` and return the inputs of the next stage, or None if the job ends. Collective.

    If the newest checkpoint is damaged, the job resumes from an older checkpoint. If this checkpoint belongs to an
    earlier stage, the inputs of that stage are returned without training.

    Args:
        inputs: Inputs of the stage.
        shared: Values that all stages share.
        place: Endpoint of this replica, or None without replicas.
        device: Device of this rank.
        first: Whether this is the first stage that this job trains.
    """
    config = inputs.config
    parallel = build_parallel(config, device)
    with progress_watched(config, shared.folder, parallel, shared.log.write_error):
        return _train_watched_stage(inputs, shared, place, parallel, first=first)


def _train_watched_stage(
    inputs: RunInputs, shared: Shared, place: ReplicaEndpoint | None, parallel: ParallelState, *, first: bool
) -> RunInputs | None:
    """Train the stage of `inputs` on the process groups of `parallel`, as `_train_stage` says. Collective."""
    config = inputs.config
    reader, memory = None, open_memory(config, run_folder(config), parallel, first=first)
    if (config.checkpoint.resume or not first) and place is None:
        reader = find_newest(inputs.run, run_folder(config), parallel, inputs.fingerprint, memory)
    step = 0 if reader is None else int(reader.metadata["step"])
    if stage_at(inputs.run, step) != inputs.stage:
        return inputs.at(step)
    if first:
        record_launch(shared.folder, parallel, step)
        notify.started(step)
    if place is None:
        job = Job(inputs, parallel, reader, shared, memory)
    else:
        job = ReplicaJob(inputs, parallel, shared, place)
    return job.inputs.at(job.step) if job.run() else None
