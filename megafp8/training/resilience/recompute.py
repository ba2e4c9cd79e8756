"""Check that a rank computes the same bits if it repeats the forward and backward passes of a step.

Problem: a faulty core, GPU or memory occasionally computes a wrong product. The wrong gradient is summed over all
ranks, so all ranks stay equal, and the consistency check (`training.consistency`) does not notice it.

Idea: at an interval each rank runs the passes of its micro-batches twice, without summing gradients over data-parallel
ranks, and compares the loss and the bit sums of all its gradients. Both runs start from the same weights and FP8
scales, and each run quantizes the weights again. Ranks of the same model (tensor, pipeline and context parallelism)
compute with each other's activations, so a wrong value may show on several ranks; the error then names all of them.

The computation must be deterministic; on CUDA this needs `deterministic: true`. FSDP is not supported, because it sums
gradients over ranks within the backward pass (`config.checks`). A fault that occurs in both runs is not found.

Cost: two forward and backward passes per check.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence

import torch

from megafp8.batch import Batch
from megafp8.parallel import activity
from megafp8.parallel.collectives import all_gather_objects, all_reduce
from megafp8.training.consistency import bit_sums
from megafp8.training.errors import ComputationDiffers
from megafp8.training.observer import Observer
from megafp8.training.resilience.faults import Faults
from megafp8.training.trainer import RankTrainer


def check_recompute(
    trainer: RankTrainer, step: int, batches: Sequence[Batch], after_second: Callable[[], None] = lambda: None
) -> None:
    """Compute the passes of `step`, counted from 0, twice, and compare them. Collective.

    Call this before the training step. Raises ComputationDiffers on all ranks, with the names of ranks and hosts, if
    any bit of a loss or gradient differs. Tests inject faults with `after_second`, which is called after the second
    passes.
    """
    parallel = trainer.parallel
    first = _passes(trainer, step, batches)
    second = _passes(trainer, step, batches, after_second)
    losses = torch.equal(first[0], second[0])
    gradients = torch.equal(first[1], second[1])
    what = " and ".join([*([] if losses else ["losses"]), *([] if gradients else ["gradients"])])
    differs = torch.tensor([float(bool(what))])
    if not all_reduce(differs, parallel.world.group, "max").item():
        return
    report = (parallel.rank, socket.gethostname(), what, (parallel.data.rank, parallel.context.rank))
    reports = [one for one in all_gather_objects(report, parallel.world.group) if one[2]]
    named = "\n".join(f"rank {rank} on {host}: different {what}" for rank, host, what, _ in reports)
    several = len(reports) > 1 and len({replica for *_, replica in reports}) == 1
    shared = " These ranks compute with each other's activations: one of them is at fault." if several else ""
    raise ComputationDiffers(
        f"before step {step + 1} ranks computed different bits from the same micro-batches and weights when they "
        f"repeated the computation:\n{named}\n"
        f"The cause may be a faulty GPU, core or memory, or an operation that is not deterministic.{shared} Test that "
        "host (nvidia-smi -q -d ECC; dcgmi diag -r 3) or exclude it, and start the same command again: it continues "
        "from the newest checkpoint."
    )


class RecomputeCheck(Observer):
    """Observer that runs `check_recompute` every `interval` steps, except while FP8 scales calibrate.

    `faults` injects a fault into the second computation.
    """

    def __init__(self, trainer: RankTrainer, interval: int, faults: Faults) -> None:
        self._trainer, self._interval, self._faults = trainer, interval, faults

    def before_passes(self, step: int, batches: list[Batch]) -> list[Batch]:
        """Return `batches` unchanged, after checking the computation if it is due."""
        if step % self._interval == 0 and not self._trainer.fp8.calibrating:
            activity.enter("recompute")
            check_recompute(self._trainer, step - 1, batches, lambda: self._faults.in_recomputed(step))
        return batches


def _passes(
    trainer: RankTrainer, step: int, batches: Sequence[Batch], corrupt: Callable[[], None] = lambda: None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run this rank's passes; return the bits of the report and the bit sums of the gradients, int64 on the host."""
    report, gradients = trainer.local_passes(step, batches)
    corrupt()
    return report.cpu().view(torch.int64), bit_sums(gradients, trainer.parallel.device).cpu()
