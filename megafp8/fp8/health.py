"""FP8 health: the loss of information in the cast to FP8, for each tensor of each layer, sampled every n steps.

Loss curves show a failing cast thousands of steps late. The cast itself shows the problem at once: elements become zero
(underflow) or are clamped (saturation), and the signal-to-noise ratio is low. Rounding alone leaves an SNR of about
31 dB in E4M3 and 25 dB in E5M2, whatever the distribution. A tensor well below these values loses something else.

`statistics` computes five numbers for one tensor on its device, without synchronization. A `Recorder` decides which
steps are sampled and gathers the numbers of a step, so that the host waits only once, at the end of the step. It sees
the tensors through an `ObservedQuantizer` around each quantizer of each layer, which does not change the FP8 data.
Without a recorder there are no such wrappers, and no cost. `ReportWriter` and `read_report` store the records in the
run folder. `advice` says which tensors need another recipe, and why.

*Cost.* `statistics` moves about 68 bytes per element of a bf16 tensor: 2 for the amax, 11 to widen the tensor and its
FP8 data, 13 for underflow, 20 to dequantize and subtract, 8 for two norms, 14 for saturation; scales per block add 16.
Llama-3-8B at 8192 tokens quantizes 0.79·10⁹ elements per layer and 25·10⁹ in total, which means 1.7 TB, or half a
second at 3.3 TB/s. A step of one such micro-batch takes 0.58 s at 14,000 tokens/s, so sampling every 100th step costs
0.9% of the time, or 0.1% with eight micro-batches per step, because only one of them is sampled. These figures are
computed, not measured.

*Memory.* Temporaries cover a band of 2²³ elements at a time and take at most 150 MB. In addition, the tensor's values
exist in fp32, and so do the intermediate results that compute them if a norm or an activation is fused with the cast.
The largest tensor in that model is the gradient of [gate | up], which takes 4.2 GB while it is computed; tensor
parallelism divides this size.

Limits: only rowwise data is sampled, not the columnwise data that finer recipes cast separately; only the first
micro-batch is sampled; and under tensor or data parallelism only this rank's slice is sampled.

Shapes: r rows, c columns of a matrix.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import takewhile
from pathlib import Path
from statistics import fmean, median
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megafp8.host.text_file import JsonLines
from megafp8.numerics.formats import E4M3
from megafp8.numerics.quantize import amax, scale_from_amax
from megafp8.numerics.quantizers import Quantizer
from megafp8.numerics.sources import MatrixSource
from megafp8.numerics.tensor import DEQUANTIZED, QuantizedTensor, ScaledTensor, expand

FILE_NAME = "fp8_report.jsonl"
OPERANDS = ("input", "weight", "grad_output")

EXACT_DB = 150.0
"""SNR reported for a lossless cast, including a cast of zeros: just above the 144 dB that fp32's 24 bits resolve."""

_BAND_ELEMENTS = 2**23
_ROUNDING = 1 + 2.0**-20
"""Tolerance of the test for clamped elements. A scale and its inverse are rounded, so `amax · scale` may exceed the
format's maximum by a few 2^-22 although nothing is clamped."""


@torch.no_grad()
def statistics(x_rc: Tensor, q: ScaledTensor) -> Tensor:
    """Compute `[amax, scale, underflow, saturated, snr_db]` of a cast, without synchronizing with the host.

    - amax: Largest magnitude; inf if x has an inf or a NaN.
    - scale: Factor that multiplies x before the cast; the median over blocks. For a dequantized matrix, only the scale
      of the whole tensor is known.
    - underflow: Fraction of the non-zero elements that are zero in FP8.
    - saturated: Fraction of all elements that are clamped, `|x| · scale > format's max`. It is 0 for NVFP4 and for
      dequantized data, which are stored in a wider format.
    - snr_db: 10·log10(Σx² / Σ(x - y)²), where y is q dequantized. It is exact to 0.01 dB, at most `EXACT_DB` (a
      lossless cast), and NaN if x is not finite.

    Args:
        x_rc: Matrix `[r, c]`, bf16 or fp32, not empty.
        q: The same matrix quantized, with any granularity.

    Returns:
        The five numbers, fp32 `[5]` on x's device.
    """
    assert x_rc.shape == q.data.shape
    assert x_rc.numel()
    amax_x = amax(x_rc)
    # Squares of gradients leave fp32's range, so the sums use about the units of q.data. A power of two keeps all bits.
    unit = scale_from_amax(amax_x, E4M3.max if q.granularity is DEQUANTIZED else _most(q.data), power_of_two=True)
    sums = torch.stack([_sums(x_band, q_band, unit) for x_band, q_band in _bands(x_rc, q)]).sum(dim=0)
    signal, noise, nonzero, lost, clamped = sums.unbind()
    snr_db = torch.where(noise == 0, EXACT_DB, 10 * (signal.log10() - noise.log10())).clamp(max=EXACT_DB)
    scale_inv = q.scale_inv if q.tensor_scale_inv is None else q.scale_inv * q.tensor_scale_inv
    scale = scale_inv.flatten().median().reciprocal()
    return torch.stack([amax_x, scale, lost / nonzero.clamp(min=1), clamped / x_rc.numel(), snr_db]).float()


def _bands(x_rc: Tensor, q: ScaledTensor) -> Iterator[tuple[Tensor, ScaledTensor]]:
    """Split `x_rc` and `q` into bands that contain whole rows of blocks, of about `_BAND_ELEMENTS` elements each."""
    r, c = x_rc.shape
    block = q.granularity.rows or 1
    rows = max(1, _BAND_ELEMENTS // (block * c)) * block
    for i in range(0, r, rows):
        scale_inv = q.scale_inv if q.granularity.rows is None else q.scale_inv[i // block : (i + rows) // block]
        yield x_rc[i : i + rows], q._replace(data=q.data[i : i + rows], scale_inv=scale_inv)


def _most(data: Tensor) -> float:
    """Return the largest number of the dtype of `data`."""
    return torch.finfo(data.dtype).max


def _sums(x_rc: Tensor, q: ScaledTensor, unit: Tensor) -> Tensor:
    """Return the sums of a band, float64 `[5]`.

    The sums are unit² Σx², unit² Σ(x - y)², and three counts of elements: non-zero, non-zero but zero in FP8, clamped.
    """
    r, c = x_rc.shape
    values = x_rc * unit.view(1, 1)  # fp32; a unit of shape `[]` would leave the product in bf16
    scale_inv = q.scale_inv * (unit if q.tensor_scale_inv is None else q.tensor_scale_inv * unit)
    # A scale_inv of zero, which NVFP4 can have, produces zeros and clamps nothing.
    limits = (scale_inv.double() * (_most(q.data) * _ROUNDING)).masked_fill(scale_inv == 0, torch.inf).float()
    data = q.data.float()
    nonzero = x_rc != 0
    lost = nonzero & (data == 0)
    error = data.mul_(expand(scale_inv, q.granularity, r, c)).sub_(values)
    signal, noise = (torch.linalg.vector_norm(v).double().square() for v in (values, error))
    clamped = values.abs_() > expand(limits, q.granularity, r, c)
    return torch.stack([signal, noise, *(counted.sum().double() for counted in (nonzero, lost, clamped))])


@dataclass(frozen=True, slots=True)
class Fp8Record:
    """`statistics` of one tensor in one step, rounded to six digits; None for values that are not finite."""

    step: int
    layer: str
    operand: str
    amax: float | None
    scale: float | None
    underflow: float
    saturated: float
    snr_db: float | None


Statistics = dict[tuple[str, str], Tensor]
"""Results of `statistics`, by layer and operand."""


class Recorder:
    """Recorder of the statistics of every `interval`-th step.

    Each tensor is recorded when it is first quantized in the step, which is in the first micro-batch. Recomputed
    forwards record nothing. Steps are numbered from 1, as in metrics.jsonl.

    Attributes:
        observed: Statistics of the current step by layer and operand. A replayed CUDA graph adds its results here.
    """

    def __init__(self, interval: int) -> None:
        if interval < 1:
            raise ValueError(f"FP8 report: interval is {interval}; it must be at least 1 step (100 is usual)")
        self.interval = interval
        self._step: int | None = None  # None in a step that is not sampled
        self.observed: Statistics = {}

    def begin_step(self, step: int) -> bool:
        """Begin the step `step`, and return whether it is sampled."""
        self._step = step if step % self.interval == 0 else None
        self.observed = {}
        return self._step is not None

    def wants(self, layer_name: str, operand: str) -> bool:
        """Return whether `observe` would record this operand. Ask before computing its values."""
        return self._step is not None and (layer_name, operand) not in self.observed

    def observe(self, layer_name: str, operand: str, x_rc: Tensor, q: ScaledTensor) -> None:
        """Record `statistics(x_rc, q)` of an operand, one of `OPERANDS`, if it is wanted, without synchronization."""
        assert operand in OPERANDS
        if self.wants(layer_name, operand):
            self.observed[layer_name, operand] = statistics(x_rc, q)

    def end_step(self) -> list[Fp8Record]:
        """End the step, and return its records in order of observation; empty if the step is not sampled.

        The statistics are copied to the host at once.
        """
        step, gathered = self._step, self.observed
        self._step, self.observed = None, {}
        if step is None or not gathered:
            return []
        rows = torch.stack(list(gathered.values())).tolist()
        return [Fp8Record(step, *name, *map(_rounded, row)) for name, row in zip(gathered, rows)]


def _rounded(value: float) -> Any:
    """Round `value` to six digits, or return None if it is not finite.

    fp32 has seven digits. Writing the seventeen digits of a Python float would triple the size of the file.
    """
    return float(f"{value:.6g}") if math.isfinite(value) else None


class ObservedQuantizer:
    """Quantizer of one operand that passes its results to a recorder.

    Rowwise data is recorded. In a sampled step it is computed even if only columnwise data is asked for.
    """

    def __init__(self, quantizer: Quantizer, recorder: Recorder, layer_name: str, operand: str) -> None:
        self.quantizer, self.recorder = quantizer, recorder
        self.layer_name, self.operand = layer_name, operand

    @property
    def per_tensor(self) -> bool:
        """Whether a tensor has one scale."""
        return self.quantizer.per_tensor

    @property
    def shard_alignment(self) -> int:
        """Smallest number of tokens that can be quantized separately."""
        return self.quantizer.shard_alignment

    @property
    def wanted(self) -> bool:
        """Whether the recorder wants the next tensor."""
        return self.recorder.wants(self.layer_name, self.operand)

    def for_sharded_input(self, group: ProcessGroup) -> ObservedQuantizer | None:
        """Return an observed quantizer of inputs sharded over `group`, or None if shards cannot be quantized."""
        quantizer = self.quantizer.for_sharded_input(group)
        return None if quantizer is None else ObservedQuantizer(quantizer, self.recorder, self.layer_name, self.operand)

    def __call__(self, source: MatrixSource, *, rowwise: bool, columnwise: bool) -> QuantizedTensor:
        """Quantize `source` in the given orientations, and record the rowwise data if the recorder wants it."""
        if not self.wanted:
            return self.quantizer(source, rowwise=rowwise, columnwise=columnwise)
        made = self.quantizer(source, rowwise=True, columnwise=columnwise)
        assert made.rowwise is not None
        self.recorder.observe(self.layer_name, self.operand, source.values(), made.rowwise)
        return made if rowwise else QuantizedTensor(None, made.columnwise)


class ReportWriter:
    """Writer of records to a file, one JSON object per line, all records of a step at once.

    A resumed run repeats the steps that a crash lost. The constructor therefore deletes the lines of steps after `step`
    and everything from a truncated line on.

    Args:
        path: File to append to.
        step: Last completed step.

    Raises:
        ValueError: The file has lines that are not records.
    """

    def __init__(self, path: Path, step: int) -> None:
        if path.exists():
            kept = takewhile(lambda line: line[1].step <= step, _complete_lines(path))
            os.truncate(path, sum(len(line) for line, _ in kept))
        self._lines = JsonLines(path)

    def write(self, records: Sequence[Fp8Record]) -> None:
        """Append the records of a step."""
        self._lines.append(*map(asdict, records))

    def close(self) -> None:
        """Close the file."""
        self._lines.close()


def read_report(path: Path) -> list[Fp8Record]:
    """Return the records in order. Skip a last line that is still being written.

    Raises:
        ValueError: Another line is not a record.
    """
    return [record for _, record in _complete_lines(path)]


def _complete_lines(path: Path) -> Iterator[tuple[bytes, Fp8Record]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            try:
                record = Fp8Record(**json.loads(line))
            except (ValueError, TypeError, RecursionError):
                raise ValueError(f"{path}, line {number} is not a line of an FP8 report; fix or remove it") from None
            yield line, record


RECENT_STEPS = 5
"""Number of the latest sampled steps on which advice is based, so that neither one odd batch nor the start of training
decides."""
SATURATED_SHARE = 1e-3
"""Fraction of clamped elements above which a scale does not fit. Clamped elements are the largest ones, and their error
exceeds rounding. A scale that fits clamps none; a scale that is 1.5 times too large clamps this fraction of normally
distributed values with an amax of 5σ."""
UNDERFLOW_SHARE = 0.05
"""Fraction of underflowing elements above which E4M3 has too little range for a gradient. E4M3 loses values below 2^-19
of the maximum: one in 10⁵ of normally distributed values. At 5% the gradient spreads over more octaves than E4M3 has,
and the lost values are missing from the sums. E5M2 has 14 more octaves."""
SNR_DROP_DB = 6.0
"""Drop of the SNR below the peers' median that counts as a problem: one bit of E4M3's three mantissa bits."""
FEWEST_PEERS = 4
"""Smallest number of tensors of one operand for which a median is meaningful."""
AMAX_GROWTH = 10.0
"""Growth of the amax of the input of an MLP's second GEMM that counts as a problem. While training is healthy, this
amax changes by a small factor. SwiGLU multiplies two projections of one input, and their weights may align late in
training; then single channels grow by orders of magnitude (Fishman et al. 2024, arXiv:2409.12517)."""


@dataclass(frozen=True)
class Advice:
    """Advice for one tensor: the reason, and a field of the config section `fp8` with its new value."""

    layer: str
    operand: str
    reason: str
    field: Literal["exclude", "recipe", "format"]
    value: str


def advice(records: Sequence[Fp8Record], *, fp8_format: Literal["hybrid", "e4m3"] | None) -> list[Advice]:
    """Return advice based on the records of a run, at most one change per tensor.

    The checks run in this order: an outlier has grown (exclude the layer); elements are clamped (recipe current);
    gradients underflow in E4M3 (format hybrid); the SNR is far below the median of the same operand's tensors (exclude
    the layer).

    Args:
        records: Records of the run.
        fp8_format: FP8 format of the run, or None if another format does not help: four bits always lose about a tenth
            of the elements to zero.
    """
    histories: dict[tuple[str, str], list[Fp8Record]] = {}
    for record in records:
        histories.setdefault((record.layer, record.operand), []).append(record)
    snr_db = {name: _median_snr(history[-RECENT_STEPS:]) for name, history in histories.items()}
    lines = []
    for name, history in histories.items():
        peers = [snr for (_, operand), snr in snr_db.items() if operand == name[1] and snr is not None]
        lines.append(_advice(history, fp8_format, snr_db[name], peers))
    return [advised for advised in lines if advised is not None]


def _advice(
    history: Sequence[Fp8Record], fp8_format: str | None, snr_db: float | None, peers: Sequence[float]
) -> Advice | None:
    """Return the first change that applies to one tensor, or None."""
    last, recent, growth = history[-1], history[-RECENT_STEPS:], _amax_growth(history)
    finite = [r for r in recent if r.amax is not None]  # any recipe clamps infinities
    saturated, underflow = (fmean([getattr(r, name) for r in finite] or [0]) for name in ("saturated", "underflow"))
    advised = partial(Advice, last.layer, last.operand)
    if last.layer.endswith("mlp.down") and last.operand == "input" and growth > AMAX_GROWTH:
        reason = (
            f"amax grew {growth:.3g} times since step {history[0].step}: SwiGLU's known outlier late in training, "
            "which ends in divergence; keep the layer in bf16"
        )
        return advised(reason, "exclude", last.layer)
    if saturated > SATURATED_SHARE:
        reason = (
            f"{saturated:.2%} of the elements are clamped: a scale from earlier steps no longer fits; take it from the "
            "tensor itself (or stay with delayed scaling and raise margin by 1, which leaves room for twice the amax)"
        )
        return advised(reason, "recipe", "current")
    if last.operand == "grad_output" and fp8_format == "e4m3" and underflow > UNDERFLOW_SHARE:
        reason = (
            f"{underflow:.1%} of the gradient underflows to zero: E4M3 has too little range; E5M2 has 2^14 times more"
        )
        return advised(reason, "format", "hybrid")
    if snr_db is not None and len(peers) >= FEWEST_PEERS and snr_db < median(peers) - SNR_DROP_DB:
        below = median(peers) - snr_db
        reason = f"SNR {snr_db:.1f} dB, {below:.1f} below the median of its peers; keep the layer in bf16"
        return advised(reason, "exclude", last.layer)
    return None


def _median_snr(records: Sequence[Fp8Record]) -> float | None:
    known = [record.snr_db for record in records if record.snr_db is not None]
    return median(known) if known else None


def _amax_growth(history: Sequence[Fp8Record]) -> float:
    """Return the ratio of the latest to the first amaxes (medians of up to `RECENT_STEPS`); 0 if fewer than two."""
    sizes = [record.amax for record in history if record.amax]
    window = min(RECENT_STEPS, len(sizes) // 2)
    return median(sizes[-window:]) / median(sizes[:window]) if window else 0.0


def as_yaml(advised: Sequence[Advice], exclude: Sequence[str] = ()) -> str:
    """Return the config section `fp8` with all advised changes. `exclude` are the patterns that the run already has."""
    lines = ["fp8:"]
    for field in ("recipe", "format"):
        values = {a.value for a in advised if a.field == field}
        lines += [f"  {field}: {value}" for value in values]
    layers = [a.value for a in advised if a.field == "exclude"]
    if layers:
        lines.append(f"  exclude: {json.dumps(list(dict.fromkeys([*exclude, *layers])))}")
    return "\n".join(lines)
