"""Proof of a config: its small copy, in its layout on local ranks, against one rank."""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from megafp8.config import Config, ConfigError, MoeFfnConfig, check_layout
from megafp8.numerics.recipes.base import OPERANDS, Capabilities
from megafp8.planner.outline import linear_sites
from megafp8.prove import export, on_gpus, runs
from megafp8.prove.certificate import Certificate, CheckResult, Status
from megafp8.prove.local_ranks import LocalRanks, RanksFailed
from megafp8.prove.random_data import write_data
from megafp8.prove.runs import Comparison, Context, Microbatch, RunResult, Step
from megafp8.prove.shrink import SPECIAL_TOKENS, STEPS, one_rank, shrink
from megafp8.training.fp8_config import build_fp8

EXACT = 1e-10
"""Largest difference between float64 sums in two orders, relative to a tensor's largest value."""
IN_FP32 = 1e-4
"""Largest difference of logits computed in fp32, relative to the largest logit."""
LEAST_SHARE = 1e-4
"""Smallest scale of relative differences, as a fraction of the largest value of all tensors of the same kind. It
applies to gradients that are zero except for rounding."""
EXPERTS = f"*.{MoeFfnConfig.tensor_prefix}.experts.*"
"""Pattern of the names of experts' linear layers."""
RELATIVE = f"to {EXACT:g} of a tensor's largest value"


def prove(
    config: Config,
    ranks: int | None = None,
    *,
    device: Literal["cpu", "cuda"] = "cpu",
    begun: Callable[[Certificate], None] = lambda certificate: None,
    show: Callable[[CheckResult], None] = lambda row: None,
    local_ranks: LocalRanks | None = None,
    **options: Any,
) -> Certificate:
    """Return the certificate of `config` on `ranks` ranks.

    Args:
        config: Config to prove.
        ranks: Number of ranks. Default: the fewest with data parallelism.
        device: cpu to prove the layout in float64 (`checks`); cuda to prove it on this machine's GPUs, in the config's
            precision (`on_gpus`).
        begun: Called with the certificate before the first check.
        show: Called with each row when it is known.
        local_ranks: Processes to use instead of new ones.
        **options: Options of `checks`.

    Raises:
        ConfigError: The config cannot run on `ranks` ranks, or there are no GPUs.
    """
    start, cpu = time.monotonic(), time.process_time()
    small = on_gpus.shrunk(config, ranks) if device == "cuda" else shrink(config, ranks)
    content = small.config.model_dump(mode="json")
    certificate = Certificate(config.name, (small.original_ranks, small.ranks), content, small.changes)
    begun(certificate)
    processes = local_ranks or LocalRanks(on_gpus=device == "cuda")
    cpu_before = processes.cpu_seconds
    prove_on = on_gpus.checks if device == "cuda" else checks
    try:
        for row in prove_on(config, ranks, local_ranks=processes, **options):
            certificate.rows.append(row)
            show(row)
    finally:
        if local_ranks is None:
            processes.close()
    certificate.seconds = time.monotonic() - start
    certificate.cpu_seconds = time.process_time() - cpu + processes.cpu_seconds - cpu_before
    return certificate


def checks(
    config: Config,
    ranks: int | None = None,
    *,
    local_ranks: LocalRanks,
    timeout: float = 600.0,
    around: Context = nullcontext,
    checkpoints: bool = True,
) -> Iterator[CheckResult]:
    """Yield the rows of the certificate as soon as they are known. The caller need not consume all of them.

    Args:
        config: Config to prove.
        ranks: Number of ranks. Default: the fewest with data parallelism.
        local_ranks: Processes to use.
        timeout: Seconds after which a run on all ranks is ended.
        around: Makes the context in which the layout's runs take place. Tests use it to inject faults.
        checkpoints: Also check checkpoints, and the export of one.
    """
    small = shrink(config, ranks)
    with tempfile.TemporaryDirectory(prefix="megafp8-prove-") as folder:
        yield from _Proof(small.config, small.ranks, Path(folder), local_ranks, timeout, around).rows(checkpoints)


class Fp8Subject(NamedTuple):
    """Config with an FP8 recipe that computes the same on `ranks` ranks as on one.

    `notes` lists the changes that were necessary.
    """

    config: Config
    ranks: int
    notes: list[str]


def _capabilities(config: Config) -> list[Capabilities]:
    """Return the capabilities of the recipes of all operands; an empty list without FP8."""
    recipe = build_fp8(config, None).recipe
    combinations = () if recipe is None else recipe.combinations
    return [operand.capabilities for operands in combinations for operand in operands]


def comparable_fp8(config: Config, ranks: int) -> Fp8Subject:
    """Return `config` on `ranks` ranks, without the axes on which a scale belongs to only a rank's part of a tensor."""
    p, notes = config.parallel, list[str]()
    capabilities = _capabilities(config)
    assert capabilities
    axes = {}
    if not all(x.per_tensor for x in capabilities) and p.tensor > 1:
        axes["tensor"] = 1
        notes.append("without tensor parallelism, which cuts blocks that share a scale")
    if not all(x.per_tensor for x in capabilities) and p.expert_tensor > 1:
        axes["expert_tensor"] = 1
        notes.append("without expert tensor parallelism, which cuts blocks that share a scale")
    if any(x.shard_alignment != 1 for x in capabilities) and p.context > 1:
        axes["context"] = 1
        notes.append("without context parallelism, which cuts blocks that share a scale")
    parallel, fp8 = p.model_copy(update=axes), config.fp8
    ranks //= p.tensor * p.context // (parallel.tensor * parallel.context)
    ranks = p.pipeline * math.lcm(ranks // p.pipeline, parallel.expert_ranks)  # the experts used ranks of these axes
    divides_experts = (parallel.tensor * parallel.context) % parallel.expert_ranks > 0
    has_experts = config.spec.has_experts
    if has_experts and divides_experts and EXPERTS not in fp8.exclude:
        fp8 = fp8.model_copy(update={"exclude": [*fp8.exclude, EXPERTS], "static_amax": _without_experts(config)})
        notes.append("without FP8 in experts, which receive tokens of several micro-batches")
    data = ranks // (parallel.tensor * parallel.context * parallel.pipeline)
    shards = (data * parallel.context, data * parallel.context * parallel.tensor // parallel.expert_ranks)
    parallel = parallel.model_copy(update={"fsdp_replicas": math.gcd(parallel.fsdp_replicas, *shards)})
    batch = math.lcm(config.training.global_batch_size, config.training.micro_batch_size * data)
    training = config.training.model_copy(update={"global_batch_size": batch})
    return Fp8Subject(config.model_copy(update={"parallel": parallel, "fp8": fp8, "training": training}), ranks, notes)


def _without_experts(config: Config) -> dict[str, float]:
    """Return the entries of `fp8.static_amax` that also match tensors outside experts."""
    layers = [name for name, _ in linear_sites(config) if not fnmatchcase(name, EXPERTS)]
    tensors = [f"{name}.{operand}" for name in layers for operand in OPERANDS]
    static_amax = config.fp8.static_amax
    return {pattern: amax for pattern, amax in static_amax.items() if any(fnmatchcase(x, pattern) for x in tensors)}


def with_experts_of_one_microbatch(config: Config) -> Config | None:
    """Return `config` with its experts on tensor-parallel ranks and without data parallelism.

    Return None if it cannot run in this layout, or if tensor parallelism would cut a block of elements that share a
    scale.
    """
    capabilities = _capabilities(config)
    if not capabilities or not all(x.per_tensor for x in capabilities):
        return None
    ranks = config.parallel.expert_ranks
    axes = {"tensor": ranks, "context": 1, "fsdp_replicas": 1}
    changed = config.model_copy(update={"parallel": config.parallel.model_copy(update=axes)})
    try:
        check_layout(changed, ranks * config.parallel.pipeline)
    except ConfigError:
        return None
    return changed


class Difference(NamedTuple):
    """Largest difference, and its place; several differences are reduced to the largest one."""

    value: float
    where: str

    def status(self, limit: float) -> Status:
        """Return whether the difference is within `limit`, as a status."""
        return "equal" if self.value <= limit else "DIFFERENT"


class _Proof:
    """Checks of a small config on `ranks` ranks."""

    def __init__(
        self, small: Config, ranks: int, folder: Path, processes: LocalRanks, timeout: float, around: Context
    ) -> None:
        self._ranks, self._folder, self._timeout = ranks, folder, timeout
        self._processes, self._around = processes, around
        self._start = time.monotonic()
        vocabulary, samples = small.spec.stem.known_vocab_size, STEPS * small.training.global_batch_size
        assert vocabulary is not None
        self._small = write_data(small, folder / "data", vocabulary - SPECIAL_TOKENS, samples)

    def _run(self, function: Callable[..., Any], *args: Any, ranks: int) -> list[Any]:
        return self._processes.run(function, args, ranks, self._timeout)

    def _row(
        self, check: str, how: str, status: Status, difference: float | None = None, where: str = "", details: str = ""
    ) -> CheckResult:
        now = time.monotonic()
        seconds, self._start = now - self._start, now
        return CheckResult(check, how, status, difference, where, seconds, details)

    def _compared(self, check: str, how: str, limit: float, *differences: Difference) -> CheckResult:
        """Return the row of a comparison. It names the place of each difference above `limit`."""
        largest = max(differences, key=lambda x: x.value)
        named = dict.fromkeys(x.where for x in differences if x.value > limit)
        return self._row(check, how, largest.status(limit), largest.value, "; ".join(named) or largest.where)

    def _failed(self, check: str, how: str, error: RanksFailed) -> CheckResult:
        return self._row(check, how, "FAILED", None, error.cause, str(error))

    def rows(self, checkpoints: bool) -> Iterator[CheckResult]:
        """Run all checks and yield each row when it is known. Without `checkpoints`, only check training."""
        small, folder = self._small, self._folder
        plain = small.model_copy(update={"fp8": type(small.fp8)()})
        has_fp8 = small.fp8.recipe != "none"
        alone, layout_folder = folder / "one-rank", folder / "layout"
        p, t = small.parallel, small.training
        microbatches = t.global_batch_size * p.tensor * p.pipeline * p.context // (t.micro_batch_size * self._ranks)
        schedule = f"{p.schedule}: {microbatches} micro-batches through {p.pipeline * p.virtual_pipeline} stages"
        try:
            (expected,) = self._run(runs.reference, one_rank(plain), alone, ranks=1)
        except RanksFailed as error:
            yield self._failed("one rank", "the reference runs", error)
            return
        try:
            saves = layout_folder if checkpoints and not has_fp8 else None
            results = self._run(runs.layout, plain, alone, saves, self._around, ranks=self._ranks)
        except RanksFailed as error:
            yield self._failed("schedule", schedule, error)
            return
        yield self._row("schedule", schedule, "equal", None, f"{self._ranks} ranks finished")
        yield self._data_order("data order", results, expected.batches)
        gradients = worst([x.gradients for x in results], runs.read_tensors(alone / runs.GRADIENTS))
        first = steps_apart(results, expected.steps[:1])
        yield self._compared("loss and gradients", f"one step, equal to one rank's {RELATIVE}", EXACT, first, gradients)
        state = worst([x.state for x in results], runs.read_tensors(alone / runs.STATE))
        curve = steps_apart(results, expected.steps[: runs.STEPS])
        how = f"{runs.STEPS} steps: losses, norms, weights and optimizer state equal to one rank's {RELATIVE}"
        yield self._compared("optimizer steps", how, EXACT, curve, state)
        if has_fp8:
            yield from self._fp8()
        if not checkpoints:
            return
        if has_fp8:
            try:
                results = self._run(runs.layout, small, None, layout_folder, self._around, ranks=self._ranks)
            except RanksFailed as error:
                yield self._failed("checkpoint", "the layout trains in FP8 and saves", error)
                return
        yield from self._checkpoints(layout_folder, results, expected, has_fp8)
        yield from self._export(layout_folder)

    def _data_order(
        self, check: str, found: Sequence[RunResult], expected: Sequence[Sequence[Microbatch]], first: int = 0
    ) -> CheckResult:
        """Return the row that compares the micro-batches of all ranks with the micro-batches of one rank.

        `first` is the index of the first step.
        """
        how = "micro-batches of one rank: each sample once, in its place"
        copies = {x.data_rank: x for x in found}
        for rank, record in enumerate(found):
            if record.batches != copies[record.data_rank].batches:
                return self._row(
                    check, how, "DIFFERENT", None, f"rank {rank} reads different samples than other ranks of its model"
                )
        for step, (read, wanted) in enumerate(zip(runs.microbatches(found), expected), first):
            for microbatch, wanted_microbatch in zip(read, wanted, strict=True):
                if microbatch != wanted_microbatch:
                    where = f"step {step}: samples {microbatch[0]} instead of {wanted_microbatch[0]}"
                    return self._row(check, how, "DIFFERENT", None, where)
        return self._row(check, how, "equal")

    def _fp8(self) -> Iterator[CheckResult]:
        """Yield the rows of the recipe, in the part of the layout in which it computes the same as one rank."""
        small, name = self._small, self._small.fp8.recipe
        subject = comparable_fp8(small, self._ranks)
        yield self._fp8_row(f"FP8, {name}", *subject)
        has_experts = subject.config.fp8.exclude == small.fp8.exclude
        experts = None if has_experts else with_experts_of_one_microbatch(small)
        if experts is not None:
            p = experts.parallel
            notes = [f"experts over {p.tensor} tensor-parallel ranks, which have tokens of one micro-batch"]
            yield self._fp8_row(f"FP8 experts, {name}", experts, p.tensor * p.pipeline, notes)

    def _fp8_row(self, check: str, config: Config, ranks: int, notes: Sequence[str]) -> CheckResult:
        how = f"{runs.STEPS} steps with float64 sums: all comparisons above, and scales"
        how, folder = "; ".join([how, *notes]), self._folder / check
        try:
            (expected,) = self._run(runs.reference, one_rank(config), folder, ranks=1)
            results = self._run(runs.layout, config, folder, None, self._around, ranks=ranks)
        except RanksFailed as error:
            return self._failed(check, how, error)
        return self._compared(
            check, how, EXACT, steps_apart(results, expected.steps[: runs.STEPS]),
            worst([x.gradients for x in results], runs.read_tensors(folder / runs.GRADIENTS)),
            worst([x.state for x in results], runs.read_tensors(folder / runs.STATE)),
        )  # fmt: skip

    def _checkpoints(
        self, own: Path, found: Sequence[RunResult], expected: RunResult, has_fp8: bool
    ) -> Iterator[CheckResult]:
        """Yield the rows of saving and resuming.

        Args:
            own: Folder in which the layout's run saved its checkpoint.
            found: Results of this run.
            expected: Result of one rank without FP8.
            has_fp8: Whether the config has an FP8 recipe.
        """
        names, back = list(runs.reader_of(own).tensors), self._folder / "back"
        written = worst([x.saved for x in found], names)
        how = "the ranks' state equals the saved state; one rank loads it, bit for bit"
        try:
            ((alone,),) = self._run(runs.resume, one_rank(self._small), [own], back, ranks=1)
        except RanksFailed as error:
            yield self._failed("checkpoint", how, error)
            return
        differences = [written, worst([alone.saved], names)]
        yield self._compared("checkpoint", how, 0.0, *differences)
        if not has_fp8 or comparable_fp8(self._small, self._ranks).config == self._small:
            how = f"one rank continues like the layout: losses and norms to {EXACT:g}"
            apart = steps_apart([alone], found[0].steps[runs.STEPS :])
            yield self._compared("resumed on one rank", how, EXACT, apart)
        how = "the layout continues as if it had not stopped, from its own checkpoint and from one rank's, bit for bit"
        try:
            resumed = self._run(runs.resume, self._small, [own, back], None, self._around, ranks=self._ranks)
        except RanksFailed as error:
            yield self._failed("resumed in the layout", how, error)
            return
        resumed_alone = [x[0] for x in resumed]
        yield self._data_order("data after resuming", resumed_alone, expected.batches[runs.STEPS :], runs.STEPS)
        after = found[0].steps[runs.STEPS :]
        differences = [
            difference
            for source in range(2)
            for difference in (
                worst([x[source].saved for x in resumed], names),
                steps_apart([x[source] for x in resumed], after),
            )
        ]
        yield self._compared("resumed in the layout", how, 0.0, *differences)

    def _export(self, own: Path) -> Iterator[CheckResult]:
        """Yield the rows of the export to Hugging Face, unless the model has none."""
        checks = {
            "conversion": ("exported to Hugging Face and read back, bit for bit", export.round_trip, 0.0),
            "export": (
                f"logits of transformers, to {IN_FP32:g} of the largest, in fp32",
                export.logits_difference,
                IN_FP32,
            ),
        }
        plain = one_rank(self._small).model_copy(update={"fp8": type(self._small.fp8)()})
        reason = export.why_not(self._small)
        for check, (how, function, limit) in checks.items():
            difference = reason
            if reason is None:
                try:
                    (difference,) = self._run(function, plain, own, self._folder / "hugging-face", ranks=1)
                except RanksFailed as error:
                    yield self._failed(check, how, error)
                    return
            if isinstance(difference, str):
                reason = difference
                yield self._row(check, how, "skipped", None, reason)
            else:
                yield self._compared(check, how, limit, Difference(difference or 0.0, ""))


def steps_apart(found: Sequence[RunResult], expected: Sequence[Step]) -> Difference:
    """Return the largest relative difference of losses and norms on all ranks.

    Its place is the first one that is larger than a rounding error.
    """
    differences = [Difference(0.0, "")]
    for number, step in enumerate(expected):
        for rank, record in enumerate(found):
            for name, a, b in zip(Step._fields, record.steps[number], step, strict=True):
                apart = 0.0 if a == b else abs(a - b) / abs(b) if b and math.isfinite(a) else math.inf
                what = {"auxiliary": "further loss"}.get(name, name)
                differences.append(Difference(apart, f"{what} {number} of rank {rank}"))
    largest = max(differences, key=lambda x: x.value)
    return Difference(largest.value, next((x.where for x in differences if x.value > EXACT), largest.where))


def _kind(name: str) -> str:
    """Return the kind of a tensor: weights, a moment, an operand's scales, or gradients.

    The largest value of a kind is the scale for differences of its tensors.
    """
    parts = name.split(".")
    if parts[0] == "fp8":
        return ".".join(parts[-2:])
    return ".".join(parts[:2]) if parts[0] == "optimizer" else parts[0] if parts[0] == "model" else ""


def worst(comparisons: Iterable[Comparison], names: Iterable[str]) -> Difference:
    """Return the tensor with the largest relative difference on any rank.

    The difference is infinite if the ranks together do not hold all of a tensor in `names`.
    """
    differences, largest, covered = dict[str, float](), dict[str, float](), dict[str, torch.Tensor]()
    for comparison in comparisons:
        for name, x in comparison.items():
            differences[name] = max(differences.get(name, 0.0), x.difference)
            largest[name] = x.largest
            mask = covered.setdefault(name, torch.zeros(x.shape, dtype=torch.bool))
            for offset, shape in x.parts:
                mask[tuple(slice(o, o + n) for o, n in zip(offset, shape))] = True
    for name in names:
        if name not in covered or not covered[name].all():
            return Difference(math.inf, f"{name} is missing on the ranks, as a whole or in part")
    by_kind: dict[str, float] = {}
    for name, value in largest.items():
        by_kind[_kind(name)] = max(by_kind.get(_kind(name), 0.0), value)
    relative = {
        name: x / max(largest[name], LEAST_SHARE * by_kind[_kind(name)], 1e-300) if x else 0.0
        for name, x in differences.items()
    }
    return _named(relative)


def _named(relative: Mapping[str, float]) -> Difference:
    """Return the largest difference. Its place names the tensor, and others that differ by more than rounding."""
    names = sorted(relative, key=lambda name: -relative[name])
    if not names:
        return Difference(0.0, "")
    others = [name for name in names[1:] if relative[name] > EXACT]
    rest = f", {', '.join(others[:2])}" if others else ""
    count = f" and {len(others) - 2} more" if len(others) > 2 else ""
    return Difference(relative[names[0]], f"{names[0]}{rest}{count}" if relative[names[0]] else "")
