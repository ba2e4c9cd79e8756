"""FP8 health: what the cast to FP8 loses, per tensor of each layer, sampled every n steps.

Loss curves show a failing cast thousands of steps late; the cast itself shows it at once: elements that become zero
(underflow) or are clamped (saturated), and a low signal-to-noise ratio. Rounding alone leaves about 31 dB in E4M3 and
25 in E5M2, whatever the distribution; a tensor well below that loses something else.

`statistics` computes five numbers of one tensor on its device, without synchronization. A `Recorder` decides which
steps are sampled and gathers a step's tensors, so that the host waits once, at its end. It sees them through an
`ObservedQuantizer` around each quantizer of each layer, which does not change the FP8 data; without a recorder there is
none, at no cost. `ReportWriter` and `read_report` store the records in the run folder; `advice` says which tensors need
another recipe, and why.

Cost. `statistics` moves about 68 bytes per element of a bf16 tensor: 2 for the amax, 11 to widen it and its FP8 data,
13 for underflow, 20 to dequantize and subtract, 8 for two norms, 14 for saturation; scales per block add 16. Llama-3-8B
at 8192 tokens quantizes 0.79·10⁹ elements per layer, 25·10⁹ in all: 1.7 TB, or half a second at 3.3 TB/s. A step of one
such micro-batch takes 0.58 s at 14,000 tokens/s, so sampling every 100th step costs 0.9% of the time; with eight
micro-batches per step, of which one is sampled, 0.1%. That is arithmetic, not a measurement. Memory: temporaries are of
a band of 2²³ elements at a time, at most 150 MB; besides, the tensor's own values in fp32, and what computes them where
a norm or an activation is fused with its cast. The largest in that model is the gradient of [gate | up], 4.2 GB while
it is computed; tensor parallelism divides that.

Limits: only rowwise data is sampled, not the columnwise data that finer recipes cast separately; only the first
micro-batch; and under tensor or data parallelism only this rank's slice.

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
"""SNR of a lossless cast (of zeros too): just above what the 24 bits of fp32 can tell, 144 dB."""

_BAND_ELEMENTS = 2**23
_ROUNDING = 1 + 2.0**-20
"""A scale and its inverse are rounded, so `amax · scale` may exceed the format's maximum by some 2^-22: not clamped."""


@torch.no_grad()
def statistics(x_rc: Tensor, q: ScaledTensor) -> Tensor:
    """`[amax, scale, underflow, saturated, snr_db]`, fp32 `[5]` on x's device, without host synchronization.

    `x_rc` `[r, c]` bf16 or fp32, not empty; `q` the same matrix quantized, of any granularity.

    amax: largest magnitude, inf if x has an inf or a NaN. scale: multiplies x before the cast; the median over blocks.
    underflow: fraction of the non-zero elements that are zero in FP8. saturated: fraction of all elements clamped,
    `|x| · scale > format's max` (0 for NVFP4 and what is dequantized, stored in a wider format). snr_db: 10·log10(Σx² /
    Σ(x - y)²) with y = q dequantized, exact to 0.01 dB; at most `EXACT_DB`, that of a lossless cast; NaN where x is not
    finite. Of a dequantized matrix scale is the one that is left for the tensor.
    """
    assert x_rc.shape == q.data.shape
    assert x_rc.numel()
    amax_x = amax(x_rc)
    # Squares of gradients leave fp32's range, so sums are in about the units of q.data; a power of two keeps all bits.
    unit = scale_from_amax(amax_x, E4M3.max if q.granularity is DEQUANTIZED else _most(q.data), power_of_two=True)
    sums = torch.stack([_sums(x_band, q_band, unit) for x_band, q_band in _bands(x_rc, q)]).sum(dim=0)
    signal, noise, nonzero, lost, clamped = sums.unbind()
    snr_db = torch.where(noise == 0, EXACT_DB, 10 * (signal.log10() - noise.log10())).clamp(max=EXACT_DB)
    scale_inv = q.scale_inv if q.tensor_scale_inv is None else q.scale_inv * q.tensor_scale_inv
    scale = scale_inv.flatten().median().reciprocal()
    return torch.stack([amax_x, scale, lost / nonzero.clamp(min=1), clamped / x_rc.numel(), snr_db]).float()


def _bands(x_rc: Tensor, q: ScaledTensor) -> Iterator[tuple[Tensor, ScaledTensor]]:
    """`x_rc` and `q` in bands of whole rows of blocks, about `_BAND_ELEMENTS` each."""
    r, c = x_rc.shape
    block = q.granularity.rows or 1
    rows = max(1, _BAND_ELEMENTS // (block * c)) * block
    for i in range(0, r, rows):
        scale_inv = q.scale_inv if q.granularity.rows is None else q.scale_inv[i // block : (i + rows) // block]
        yield x_rc[i : i + rows], q._replace(data=q.data[i : i + rows], scale_inv=scale_inv)


def _most(data: Tensor) -> float:
    """The largest number of its dtype."""
    return torch.finfo(data.dtype).max


def _sums(x_rc: Tensor, q: ScaledTensor, unit: Tensor) -> Tensor:
    """Float64 `[5]` of a band: unit² Σx², unit² Σ(x - y)², and counts: non-zero, of these zero in FP8, clamped."""
    r, c = x_rc.shape
    values = x_rc * unit.view(1, 1)  # fp32: a unit `[]` would leave bf16 as it is
    scale_inv = q.scale_inv * (unit if q.tensor_scale_inv is None else q.tensor_scale_inv * unit)
    # A scale_inv of zero (NVFP4 has them) makes zeros, it does not clamp.
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
    """The `statistics` of a tensor at a step, rounded to six digits; None where not finite."""

    step: int
    layer: str
    operand: str
    amax: float | None
    scale: float | None
    underflow: float
    saturated: float
    snr_db: float | None


Statistics = dict[tuple[str, str], Tensor]
"""`statistics` of tensors by layer and operand."""


class Recorder:
    """Gathers the statistics of every `interval`-th step, of each tensor when it is first quantized in it.

    That is the first micro-batch; a recomputed forward changes nothing. Steps are numbered from 1, as in metrics.jsonl.
    `observed`: the statistics of the current step by layer and operand; a replayed CUDA graph has computed its own.
    """

    def __init__(self, interval: int) -> None:
        if interval < 1:
            raise ValueError(f"FP8 report: interval is {interval}; it must be at least 1 step, 100 is usual")
        self.interval = interval
        self._step: int | None = None  # None: not sampled
        self.observed: Statistics = {}

    def begin_step(self, step: int) -> bool:
        """Begin step `step`; whether it is sampled."""
        self._step = step if step % self.interval == 0 else None
        self.observed = {}
        return self._step is not None

    def wants(self, layer_name: str, operand: str) -> bool:
        """Whether `observe` would record this operand, before x is computed for it."""
        return self._step is not None and (layer_name, operand) not in self.observed

    def observe(self, layer_name: str, operand: str, x_rc: Tensor, q: ScaledTensor) -> None:
        """Record `statistics(x_rc, q)` of an operand, one of `OPERANDS`, if wanted. No host synchronization."""
        assert operand in OPERANDS
        if self.wants(layer_name, operand):
            self.observed[layer_name, operand] = statistics(x_rc, q)

    def end_step(self) -> list[Fp8Record]:
        """The step's records in order of observation, by one copy to the host; none if the step is not sampled."""
        step, gathered = self._step, self.observed
        self._step, self.observed = None, {}
        if step is None or not gathered:
            return []
        rows = torch.stack(list(gathered.values())).tolist()
        return [Fp8Record(step, *name, *map(_rounded, row)) for name, row in zip(gathered, rows)]


def _rounded(value: float) -> Any:
    """`value` to six digits, one less than fp32 has (seventeen would triple the file); None if not finite."""
    return float(f"{value:.6g}") if math.isfinite(value) else None


class ObservedQuantizer:
    """`quantizer` of a layer's `operand` whose results `recorder` records where it wants them.

    The rowwise data is recorded, and then computed even if only columnwise data is asked for.
    """

    def __init__(self, quantizer: Quantizer, recorder: Recorder, layer_name: str, operand: str) -> None:
        self.quantizer, self.recorder = quantizer, recorder
        self.layer_name, self.operand = layer_name, operand

    @property
    def per_tensor(self) -> bool:
        return self.quantizer.per_tensor

    @property
    def shard_alignment(self) -> int:
        return self.quantizer.shard_alignment

    @property
    def wanted(self) -> bool:
        """Whether the recorder wants what is cast next."""
        return self.recorder.wants(self.layer_name, self.operand)

    def for_sharded_input(self, group: ProcessGroup) -> ObservedQuantizer | None:
        quantizer = self.quantizer.for_sharded_input(group)
        return None if quantizer is None else ObservedQuantizer(quantizer, self.recorder, self.layer_name, self.operand)

    def __call__(self, source: MatrixSource, *, rowwise: bool, columnwise: bool) -> QuantizedTensor:
        if not self.wanted:
            return self.quantizer(source, rowwise=rowwise, columnwise=columnwise)
        made = self.quantizer(source, rowwise=True, columnwise=columnwise)
        assert made.rowwise is not None
        self.recorder.observe(self.layer_name, self.operand, source.values(), made.rowwise)
        return made if rowwise else QuantizedTensor(None, made.columnwise)


class ReportWriter:
    """Appends records to `path`, one JSON object per line, all of a step at once.

    `step` is the last step done. A resumed run repeats steps that a crash lost, so lines of later steps, and from a
    truncated line on, are dropped first. Raises ValueError if the file has other lines.
    """

    def __init__(self, path: Path, step: int) -> None:
        if path.exists():
            kept = takewhile(lambda line: line[1].step <= step, _complete_lines(path))
            os.truncate(path, sum(len(line) for line, _ in kept))
        self._lines = JsonLines(path)

    def write(self, records: Sequence[Fp8Record]) -> None:
        self._lines.append(*map(asdict, records))

    def close(self) -> None:
        self._lines.close()


def read_report(path: Path) -> list[Fp8Record]:
    """The records in order, without a last line still being written. Raises ValueError for any other bad line."""
    return [record for _, record in _complete_lines(path)]


def _complete_lines(path: Path) -> Iterator[tuple[bytes, Fp8Record]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            try:
                record = Fp8Record(**json.loads(line))
            except (ValueError, TypeError, RecursionError):
                raise ValueError(f"{path}, line {number} is no line of an FP8 report: mend or remove it") from None
            yield line, record


RECENT_STEPS = 5
"""Advice is based on this many of the latest sampled steps: neither on one odd batch nor on the start of training."""
SATURATED_SHARE = 1e-3
"""Clamped elements are the largest, and wrong by more than rounding. A scale that fits clamps none; one that is 1.5
times too large clamps this share of normally distributed values whose amax is 5σ."""
UNDERFLOW_SHARE = 0.05
"""E4M3 loses what is below 2^-19 of the maximum: one in 10⁵ of normally distributed values. 5% means that the gradient
spreads over more octaves than E4M3 has, and these are missing from the sums. E5M2 has 14 octaves more."""
SNR_DROP_DB = 6.0
"""One bit: a tensor this far below its peers has lost one of the three bits of mantissa that E4M3 has."""
FEWEST_PEERS = 4
"""The fewest tensors of one operand, itself included, whose median means something."""
AMAX_GROWTH = 10.0
"""The inputs of an MLP's second GEMM stay within a few times of their size while training is healthy. SwiGLU multiplies
two projections of one input, whose weights may align late in training; then single channels grow by orders of
magnitude (Fishman et al. 2024, arXiv:2409.12517)."""


@dataclass(frozen=True)
class Advice:
    """A change advised for a tensor: the reason, and the field of the config's section `fp8` with its new value."""

    layer: str
    operand: str
    reason: str
    field: Literal["exclude", "recipe", "format"]
    value: str


def advice(records: Sequence[Fp8Record], *, fp8_format: Literal["hybrid", "e4m3"] | None) -> list[Advice]:
    """Changes advised by the records of a run made with `fp8_format`, at most one per tensor.

    In this order: an outlier that grew (exclude the layer), saturation (recipe current), gradients that underflow in
    E4M3 (format hybrid), an SNR far below the median of the same operand's tensors (exclude). `fp8_format` is None
    where another format does not help: four bits always lose about a tenth of the elements to zero.
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
    """The first change that applies to one tensor."""
    last, recent, growth = history[-1], history[-RECENT_STEPS:], _amax_growth(history)
    finite = [r for r in recent if r.amax is not None]  # infinities are clamped by any recipe
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
    """The ratio of the latest to the first amaxes, medians of up to `RECENT_STEPS`; 0 for fewer than two."""
    sizes = [record.amax for record in history if record.amax]
    window = min(RECENT_STEPS, len(sizes) // 2)
    return median(sizes[-window:]) / median(sizes[:window]) if window else 0.0


def as_yaml(advised: Sequence[Advice], exclude: Sequence[str] = ()) -> str:
    """The config's section `fp8` with all advised changes; `exclude`: the patterns that the run has already."""
    lines = ["fp8:"]
    for field in ("recipe", "format"):
        values = {a.value for a in advised if a.field == field}
        lines += [f"  {field}: {value}" for value in values]
    layers = [a.value for a in advised if a.field == "exclude"]
    if layers:
        lines.append(f"  exclude: {json.dumps(list(dict.fromkeys([*exclude, *layers])))}")
    return "\n".join(lines)
