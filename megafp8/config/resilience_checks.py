"""Rules of `checks` about the section resilience."""

from __future__ import annotations

from collections.abc import Iterator

from megafp8.config.schema import Config
from megafp8.host.problems import Problem


def layout(config: Config) -> Iterator[Problem]:
    """Check hang limits, checkpoints for rewinds, recompute checks with FSDP, and checkpoints in memory."""
    r = config.resilience
    if r.hang_seconds is not None and r.hang_seconds >= config.timeout_seconds:
        rule = f"a collective already fails after timeout_seconds ({config.timeout_seconds:g}), without naming a rank"
        works = f"try {config.timeout_seconds / 2:g}, or a larger timeout_seconds"
        yield Problem("resilience.hang_seconds", r.hang_seconds, rule, works)
    if r.loss_spike is not None and r.loss_spike.action == "rewind" and not config.checkpoint.interval:
        rule = "there are no checkpoints to go back to (checkpoint.interval is 0)"
        yield Problem("resilience.loss_spike.action", "rewind", rule, "try skip, or set checkpoint.interval")
    if r.recompute_interval and config.parallel.fsdp:
        rule = (
            "parallel.fsdp sums gradients over ranks in the backward pass, so no rank has its own gradient to compare"
        )
        yield Problem("resilience.recompute_interval", r.recompute_interval, rule, "try 0, or parallel.zero=1")
    c = config.checkpoint
    if c.interval and c.memory_interval > c.interval:
        rule = f"the newest checkpoint would be on disk (checkpoint.interval is {c.interval})"
        yield Problem("checkpoint.memory_interval", c.memory_interval, rule, f"try {max(1, c.interval // 10)}, or 0")


def replicas(config: Config, world_size: int) -> Iterator[Problem]:
    """Check that the global batch can be shared by any allowed number of replicas, and reject unsupported settings."""
    r, t, path = config.resilience.replicas, config.training, "resilience.replicas"
    if r is None:
        return
    if r.min > r.count:
        yield Problem(f"{path}.min", r.min, f"there are {r.count} replicas", f"try {r.count}, or fewer")
    hang = config.hang_seconds
    if hang and hang <= 2 * r.exchange_seconds:
        rule = f"a rank may wait for other replicas for twice exchange_seconds ({r.exchange_seconds:g}) without hanging"
        yield Problem("resilience.hang_seconds", hang, rule, f"try {3 * r.exchange_seconds:g}")
    p = config.parallel
    data = world_size // (p.tensor * p.pipeline * p.context)
    shares, rest = divmod(t.global_batch_size, t.micro_batch_size * max(data, 1))
    if not rest and shares < r.count:
        rule = f"a rank of a replica has {shares} micro-batches of the global batch, too few for {r.count} replicas"
        smallest = t.micro_batch_size * max(data, 1) * r.count
        yield Problem("training.global_batch_size", t.global_batch_size, rule, f"try {smallest}, or fewer replicas")
    elif not rest and r.batch == "shrink" and shares % r.count:
        rule = f"with batch: shrink each of {r.count} replicas has the same share of {shares} micro-batches"
        works = f"try {-(-shares // r.count) * r.count * t.micro_batch_size * data}, or batch: keep"
        yield Problem("training.global_batch_size", t.global_batch_size, rule, works)
    spike = config.resilience.loss_spike
    if config.data.packing == "balanced" and r.batch == "shrink":
        rule = f"with {path}, data.packing balanced orders whole global batches"
        yield Problem(f"{path}.batch", r.batch, rule, "try keep")
    unusable = (
        ("checkpoint.memory_interval", config.checkpoint.memory_interval, 0, "a replica copies its state from others"),
        ("checkpoint.resume", config.checkpoint.resume, True, "a restarted replica must continue the run"),
        ("stages", bool(config.stages), False, "a stage begins with new process groups in all replicas at once"),
        ("fp8.auto_filter", config.fp8.auto_filter, "none", "each replica would choose its own layers"),
        ("resilience.loss_spike.action", spike.action if spike else "skip", "skip", "replicas do not go back together"),
        (
            "resilience.recompute_interval",
            config.resilience.recompute_interval,
            0,
            "a replica that rejoins does not run the check",
        ),
    )
    yield from _outer(config)
    for key, value, only, why in unusable:
        if value != only:
            shown = str(only).lower() if isinstance(only, bool) else only
            yield Problem(key, value, f"with {path}, {why}", f"try {shown}")


def _outer(config: Config) -> Iterator[Problem]:
    """Check that no setting needs agreement between replicas between outer steps."""
    r, c = config.resilience.replicas, config.checkpoint
    if r is None or r.outer is None:
        return
    path, steps = "resilience.replicas.outer", r.outer.inner_steps
    if c.interval % steps:
        rule = f"a checkpoint needs equal replicas, and they are equal only every {steps} steps ({path}.inner_steps)"
        yield Problem("checkpoint.interval", c.interval, rule, f"try {-(-c.interval // steps) * steps}")
    if config.optimizer.average_decay is not None:
        rule = f"with {path}, each replica would average different weights between outer steps"
        yield Problem("optimizer.average_decay", config.optimizer.average_decay, rule, "leave it out")
    if config.spec.has_experts:
        rule = f"with {path}, each replica would balance experts only by its own tokens, with its own biases"
        yield Problem("model.moe", "set", rule, f"leave {path} out")


def faults(config: Config, world_size: int) -> Iterator[Problem]:
    """Check that faults happen on existing ranks and have something to break."""
    for i, fault in enumerate(config.resilience.inject):
        path = f"resilience.inject.{i}"
        if fault.rank >= world_size:
            rule = f"the job has ranks 0 to {world_size - 1}"
            yield Problem(f"{path}.rank", fault.rank, rule, f"try {world_size - 1}")
        interval = config.resilience.recompute_interval
        if fault.kind == "flip_gradient" and not interval:
            rule = "the bit is flipped in the check that resilience.recompute_interval turns on"
            yield Problem(f"{path}.kind", fault.kind, rule, "set resilience.recompute_interval")
        elif fault.kind == "flip_gradient" and fault.step % interval:
            rule = f"the bit is flipped in a recomputed step, and only every {interval}th step is recomputed"
            yield Problem(f"{path}.step", fault.step, rule, f"try {-(-fault.step // interval) * interval}")
        if fault.kind == "lose_memory" and not config.checkpoint.memory_interval:
            rule = "there are no checkpoints in memory (checkpoint.memory_interval is 0)"
            yield Problem(f"{path}.kind", fault.kind, rule, "set checkpoint.memory_interval, or try kill")
        if fault.kind == "damage_checkpoint" and config.checkpoint.folder is not None:
            rule = "only a checkpoint in the run folder can be damaged"
            yield Problem(f"{path}.kind", fault.kind, rule, "leave checkpoint.folder out")
