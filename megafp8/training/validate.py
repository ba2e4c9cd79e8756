"""Checks before a run that need torch, data or checkpoints, but no process group.

A rank that fails here exits with a message, so no other rank waits for it in a collective. Rules about the config alone
are in `megafp8.config.checks`.
"""

from __future__ import annotations

import importlib.util
import os
import tempfile
import uuid
from pathlib import Path

import torch

from megafp8.checkpoint import CheckpointReader, newest_readable
from megafp8.config import Config, ConfigError, Problem, canonical_streams_problem, planned_stages
from megafp8.data.samples import default_cache
from megafp8.host.object_store import AnyPath, ObjectPath, is_transient
from megafp8.host.shipped import install_command
from megafp8.parallel.parallel_state import set_cuda_environment
from megafp8.training import auto_filter
from megafp8.training.describe import check_device_memory, check_optimizer
from megafp8.training.determinism import make_deterministic
from megafp8.training.fp8_config import build_fp8
from megafp8.training.frozen_config import check_frozen
from megafp8.training.history import History
from megafp8.training.init_from import check_init
from megafp8.training.inputs import RunInputs, open_inputs
from megafp8.training.pipeline import num_microbatches, plan_pipeline
from megafp8.training.replicas.membership import check_shares, own_place
from megafp8.training.resilience.node_memory import memory_folder
from megafp8.training.state import check_next_stage, check_resume, checkpoint_folder

_PROBE_BYTES = 1 << 16


def validate(config: Config, world_size: int, source: str) -> RunInputs:
    """Open the inputs of a run that passed `check_layout`, and do all other checks before a run.

    With `deterministic`, this also switches the process to deterministic algorithms. Raises ValueError if a check
    fails.
    """
    if config.device != "cpu":
        set_cuda_environment()  # before CUDA is used
    inputs = open_inputs(config, source, newest_step(config))
    check_frozen(inputs.config, world_size)
    plan = plan_pipeline(inputs.config, num_microbatches(config, world_size))
    check_shares(inputs.config, num_microbatches(config, world_size))
    device = choose_device(config)
    if config.deterministic:
        make_deterministic(device)  # before CUDA is used
    check_device_memory(inputs.config, plan, world_size, device, source)
    reader = check_run(inputs)
    _check_streams(inputs if reader is None else inputs.resumed(reader.metadata)[0], world_size, source)
    if inputs.run.stages:
        _check_later_stages(inputs, reader, world_size, device, source)
    return inputs


def _check_streams(inputs: RunInputs, world_size: int, source: str) -> None:
    """Raise ConfigError if a rank would not read the same canonical streams in each step."""
    if inputs.positions is not None:
        problems = [*canonical_streams_problem(inputs.config, world_size, inputs.positions.canonical_streams)]
        if problems:
            raise ConfigError(source, problems)


def newest_step(config: Config) -> int:
    """Return the step of the checkpoint that the run will resume from, or 0 without one.

    Raises ValueError if all checkpoints are damaged.
    """
    folder = checkpoint_folder(run_folder(config), config.checkpoint.folder)
    reader = newest_readable(folder) if config.checkpoint.resume else None
    return 0 if reader is None else int(reader.metadata["step"])


def _check_later_stages(
    inputs: RunInputs, reader: CheckpointReader | None, world_size: int, device: str, source: str
) -> None:
    """Raise ValueError if a later stage cannot begin after the stage before it.

    The data sets of each stage are opened and moved to their positions at the beginning of the stage. `inputs` belong
    to the present stage, which resumes from `reader`.
    """
    history = History()
    if reader is not None:
        history = History.resumed(reader.metadata, inputs.config)
        inputs, _ = inputs.resumed(reader.metadata)
    for stage in planned_stages(inputs.run, source):
        if stage.begin <= (0 if inputs.stage is None else inputs.stage.begin):
            continue
        later = open_inputs(inputs.run, source, stage.begin)
        check_next_stage(inputs.config, later.config, stage.begin, stage.source)
        plan = plan_pipeline(later.config, num_microbatches(later.config, world_size))
        check_device_memory(later.config, plan, world_size, device, stage.source)
        auto_filter.check(later.config, build_fp8(later.config, None), torch.device(device))
        samples = history.samples_at(stage.begin, inputs.config)
        config = inputs.config.model_dump(mode="json")
        saved = {"step": stage.begin, "consumed_samples": samples, "config": config, "data": inputs.record(samples)}
        later = later.resumed(saved)[0]
        _check_streams(later, world_size, stage.source)
        inputs, history = later, History.resumed(saved, later.config)


def choose_device(config: Config) -> str:
    """Return the device type, `cuda` or `cpu`. Raises ConfigError if the config needs CUDA and there is none."""
    has_cuda = torch.cuda.is_available()
    needs_cuda = (
        ("device", config.device, config.device == "cuda", "device=cpu or device=auto"),
        ("training.cuda_graphs", True, config.training.cuda_graphs is True, "training.cuda_graphs=auto"),
        ("parallel.overlap_tensor", "symmetric", config.parallel.overlap_tensor == "symmetric",
         "parallel.overlap_tensor=auto"),
    )  # fmt: skip
    for key, value, needed, works in needs_cuda:
        if needed and not has_cuda:
            raise ConfigError("config", [Problem(key, value, "torch sees no CUDA device here", f"try {works}")])
    interval = config.resilience.recompute_interval
    if interval and config.device != "cpu" and has_cuda and not config.deterministic:
        rule = "two computations of a batch on a GPU may differ in their last bits unless deterministic is true"
        raise ConfigError(
            "config", [Problem("resilience.recompute_interval", interval, rule, "try 0, or deterministic=true")]
        )
    return "cuda" if config.device != "cpu" and has_cuda else "cpu"


def run_folder(config: Config) -> Path:
    """Return the folder with all files of a run."""
    return Path(config.run_dir) / config.name


def check_run(inputs: RunInputs) -> CheckpointReader | None:
    """Check that the run can train and will not damage an earlier run; return the checkpoint that it resumes from.

    Raises ValueError if a check fails. Returns None for a new run.
    """
    config, folder = inputs.config, run_folder(inputs.config)
    needed = (
        ("wandb_project", "wandb", install_command("wandb")),
        ("metrics_port", "prometheus_client", "pip install prometheus-client"),
    )
    for key, package, install in needed:
        value = getattr(config.logging, key)
        if value is not None and importlib.util.find_spec(package) is None:
            works = f"run {install}, or leave it out"
            raise ConfigError("config", [Problem(f"logging.{key}", value, f"{package} is not installed", works)])
    _check_replicas(inputs)
    cache = config.data.index_cache
    works = "name a folder on local disk that can be written to"
    path = default_cache() if cache is None else Path(cache)
    _check_writable(path, "data.index_cache", cache, "sample indices cannot be written to", works)
    auto_filter.check(config, build_fp8(config, None), torch.device(choose_device(config)))
    check_optimizer(config)
    check_init(config, folder, inputs.tokenizer)
    reader = None
    if config.checkpoint.resume:
        reader = check_resume(inputs.run, folder, inputs.fingerprint)
        if reader is not None:
            inputs.resumed(reader.metadata)
    elif (folder / "metrics.jsonl").exists():
        rule = f"{folder} already holds a run, and checkpoint.resume is false"
        raise ConfigError("config", [Problem("name", config.name, rule, "choose another name, or resume it")])
    check_writable(config, folder / "checkpoints")
    if config.checkpoint.folder is not None:
        to = checkpoint_folder(folder, config.checkpoint.folder)
        works = "name a folder, or a prefix of object storage, that this user may write to"
        _check_writable(to, "checkpoint.folder", config.checkpoint.folder, "checkpoints cannot be written to", works)
    if config.checkpoint.memory_interval:
        memory, key = memory_folder(config), config.checkpoint.memory_folder
        if "$" in str(memory) or not memory.is_absolute():
            rule = f"it is not an absolute path on this node: {memory}"
            raise ConfigError("config", [Problem("checkpoint.memory_folder", key, rule, "try /dev/shm")])
        works = "name a folder in the memory of each node, such as /dev/shm"
        _check_writable(memory, "checkpoint.memory_folder", key, "checkpoints cannot be written to", works)
    return reader


def _check_replicas(inputs: RunInputs) -> None:
    """Raise ValueError if the config sets replicas and this process cannot be part of one."""
    replicas = inputs.config.resilience.replicas
    if replicas is None:
        return
    key, value = "resilience.replicas", replicas.model_dump(mode="json")
    if importlib.util.find_spec("torchft") is None:
        works = f"run {install_command('replicas')}, or leave it out"
        raise ConfigError("config", [Problem(key, value, "torchft is not installed", works)])
    if inputs.positions is not None:
        rule = "text is packed while it is read, and only the ranks that read it know the positions"
        works = "pack it first (megafp8 preprocess), or leave resilience.replicas out"
        raise ConfigError("config", [Problem("data.train", list(inputs.config.data.train), rule, works)])
    own_place(inputs.config)


def check_writable(config: Config, folder: Path) -> None:
    """Create `folder` for checkpoints and write to it. Raises ConfigError about run_dir if that fails."""
    works = "set run_dir to a folder that this user may write to, on a disk with space for checkpoints"
    _check_writable(folder, "run_dir", config.run_dir, "the run cannot write to", works)


def _check_writable(folder: AnyPath, key: str, value: object, refusal: str, works: str) -> None:
    try:
        if isinstance(folder, ObjectPath):
            probe = folder / f".probe-{uuid.uuid4().hex}"
            probe.write_bytes(b"")
            probe.unlink()
            return
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".probe-") as file:
            file.write(bytes(_PROBE_BYTES))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        if is_transient(error):
            raise
        rule = f"{refusal} {folder}: {error.strerror}"
        raise ConfigError("config", [Problem(key, value, rule, works)]) from error
