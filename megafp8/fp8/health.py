"""Health of FP8: what casting to eight bits loses, for each tensor of each layer, every so many steps.

Loss curves show a failing cast thousands of steps late. The cast itself shows it at once: elements that become zero
(underflow) or are clamped (saturated), and the noise that it adds, as a signal-to-noise ratio. Rounding alone leaves
about 31 dB in E4M3 and 25 in E5M2, whatever the distribution; a tensor well below that is losing something else.

`statistics` is five numbers of one tensor, computed where the tensor is, without waiting for it. A `Recorder` decides
which steps are looked at and gathers the tensors of a step, so that the host waits once, at its end. It sees them
through an `ObservedQuantizer` around each quantizer of each layer, whose codes it leaves as they are; without a
recorder there is none, and nothing to pay. `ReportWriter` and `read_report` keep the figures in the run folder;
`advice` says which tensors want another recipe, and why.

What it costs. `statistics` moves about 68 bytes an element of a bf16 tensor: 2 for the amax, 11 to widen it and its
codes, 13 for what underflows, 20 for dequantizing and the difference, 8 for two norms, 14 for what is clamped; blocks
add 16 for their factors. Llama-3-8B at 8192 tokens quantizes 0.79·10⁹ elements a layer, 25·10⁹ in all: 1.7 TB, or half
a second at 3.3 TB/s. A step of one such micro-batch takes 0.58 s at 14,000 tokens a second, so sampling every 100th
costs 0.9% of the time; with eight micro-batches a step, of which one is looked at, 0.1%. That is arithmetic, not a
measurement. Memory: temporaries are of a band of 2²³ elements at a time, at most 150 MB; beside them the tensor's own
values, whole, in fp32, and what it takes to compute them where a norm or an activation is fused with its cast. In that
model the most is the gradient of [gate | up], 4.2 GB while it is computed; tensor parallelism divides that.

What it gives up: only rows are looked at, not the columns that finer recipes cast a second time; only the first
micro-batch; and under tensor or data parallelism only this rank's slice.

Shapes: r rows, c columns of a matrix.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import takewhile
from pathlib import Path
from statistics import fmean, median
from typing import Literal

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megafp8.fp8.quantize import amax, scale_from_amax
from megafp8.fp8.quantizers import Quantizer
from megafp8.fp8.sources import Source
from megafp8.fp8.tensor import QuantizedTensor, ScaledTensor, expand

FILE_NAME = "fp8_report.jsonl"
OPERANDS = ("input", "weight", "grad_output")

EXACT_DB = 150.0
"""The SNR of a cast without loss, zeros included: just above what fp32 can tell, whose 24 bits are 144 dB."""

_BAND_ELEMENTS = 2**23
_ROUNDING = 1 + 2.0**-20
"""A scale and its inverse are rounded, so `amax · scale` may miss the format's maximum by some 2^-22: not clamping."""


# --- one tensor -----------------------------------------------------------------------------------------------------


@torch.no_grad()
def statistics(x_rc: Tensor, q: ScaledTensor) -> Tensor:
    """`[amax, scale, underflow, saturated, snr_db]`, fp32 `[5]` on x's device, without host synchronisation.

    `x_rc` `[r, c]` bf16 or fp32, not empty; `q` the same matrix quantized, of any granularity.

    amax: largest magnitude, inf where x holds an inf or a NaN. scale: the factor before the cast, of blocks the median.
    underflow: share of the non-zero elements whose code is zero. saturated: share of all elements that were clamped,
    `|x| · scale > format's max` (0 for NVFP4, held in a wider format). snr_db: 10·log10(Σx² / Σ(x - y)²) with y = q
    dequantized, good to 0.01 dB; at most `EXACT_DB`, that of an exact cast (zeros are one); NaN where x is not finite.
    """
    assert x_rc.shape == q.data.shape
    assert x_rc.numel()
    amax_x = amax(x_rc)
    # Squares of gradients leave fp32's range, so sums are in about the cast's units; a power of two keeps all bits.
    unit = scale_from_amax(amax_x, torch.finfo(q.data.dtype).max, power_of_two=True)
    sums = torch.stack([_sums(x_band, q_band, unit) for x_band, q_band in _bands(x_rc, q)]).sum(dim=0)
    signal, noise, nonzero, lost, clamped = sums.unbind()
    snr_db = torch.where(noise == 0, EXACT_DB, 10 * (signal.log10() - noise.log10())).clamp(max=EXACT_DB)
    scale = q.scale_inv.flatten().median().reciprocal()
    return torch.stack([amax_x, scale, lost / nonzero.clamp(min=1), clamped / x_rc.numel(), snr_db]).float()


def _bands(x_rc: Tensor, q: ScaledTensor) -> Iterator[tuple[Tensor, ScaledTensor]]:
    """Both in bands of whole rows of blocks, some `_BAND_ELEMENTS` each."""
    r, c = x_rc.shape
    block = q.granularity.rows or 1
    rows = max(1, _BAND_ELEMENTS // (block * c)) * block
    for i in range(0, r, rows):
        factors = q.scale_inv if q.granularity.rows is None else q.scale_inv[i // block : (i + rows) // block]
        yield x_rc[i : i + rows], ScaledTensor(q.data[i : i + rows], factors, q.granularity)


def _sums(x_rc: Tensor, q: ScaledTensor, unit: Tensor) -> Tensor:
    """Of a band, float64 `[5]`: unit² Σx², unit² Σ(x - y)², elements not zero, of these with code zero, clamped."""
    r, c = x_rc.shape
    values = x_rc * unit.view(1, 1)  # fp32: a factor `[]` would leave bf16 as it is
    factors = q.scale_inv * unit
    # A factor of zero (NVFP4 has them) makes zeros, it does not clamp.
    limits = (factors * (torch.finfo(q.data.dtype).max * _ROUNDING)).masked_fill(factors == 0, torch.inf)
    codes = q.data.float()
    nonzero = x_rc != 0
    lost = nonzero & (codes == 0)
    error = codes.mul_(expand(factors, q.granularity, r, c)).sub_(values)
    signal, noise = (torch.linalg.vector_norm(v).double().square() for v in (values, error))
    clamped = values.abs_() > expand(limits, q.granularity, r, c)
    return torch.stack([signal, noise, *(found.sum().double() for found in (nonzero, lost, clamped))])


# --- a step ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Record:
    """A tensor at a step: `statistics` under their names, rounded to six digits; None where not finite."""

    step: int
    layer: str
    operand: str
    amax: float | None
    scale: float | None
    underflow: float
    saturated: float
    snr_db: float | None


class Recorder:
    """Gathers the statistics of every `interval`-th step, of each tensor's first appearance in it.

    The first is that of the first micro-batch; a forward that is recomputed changes nothing. Steps count as in
    metrics.jsonl: from 1, the step that is running.
    """

    def __init__(self, interval: int) -> None:
        if interval < 1:
            raise ValueError(f"FP8 report: interval is {interval}; it must be at least 1 step, 100 is usual")
        self.interval = interval
        self._step: int | None = None  # None: not sampled
        self._statistics: dict[tuple[str, str], Tensor] = {}

    def begin_step(self, step: int) -> bool:
        """Begin step `step`; whether it is sampled."""
        self._step = step if step % self.interval == 0 else None
        self._statistics = {}
        return self._step is not None

    def wants(self, layer_name: str, operand: str) -> bool:
        """Whether `observe` would look: ask first where x must be computed for it."""
        return self._step is not None and (layer_name, operand) not in self._statistics

    def observe(self, layer_name: str, operand: str, x_rc: Tensor, q: ScaledTensor) -> None:
        """Note `statistics(x_rc, q)` of an operand, one of `OPERANDS`, if it is wanted. No host synchronisation."""
        assert operand in OPERANDS
        if self.wants(layer_name, operand):
            self._statistics[layer_name, operand] = statistics(x_rc, q)

    def end_step(self) -> list[Record]:
        """The step's records in order of appearance, by one copy to the host; none for a step that is not sampled."""
        step, gathered = self._step, self._statistics
        self._step, self._statistics = None, {}
        if step is None or not gathered:
            return []
        rows = torch.stack(list(gathered.values())).tolist()
        return [_record(step, *name, *row) for name, row in zip(gathered, rows)]


class ObservedQuantizer:
    """`quantizer`, with `recorder` looking on where it wants the layer's operand. The operand is the quantizer's own.

    Rows are looked at, so on those occasions they are made also for a layer that asks for columns alone.
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

    def for_sharded_input(self, group: ProcessGroup) -> ObservedQuantizer | None:
        quantizer = self.quantizer.for_sharded_input(group)
        return None if quantizer is None else ObservedQuantizer(quantizer, self.recorder, self.layer_name, self.operand)

    def __call__(self, source: Source, *, rowwise: bool, columnwise: bool) -> QuantizedTensor:
        if not self.recorder.wants(self.layer_name, self.operand):
            return self.quantizer(source, rowwise=rowwise, columnwise=columnwise)
        made = self.quantizer(source, rowwise=True, columnwise=columnwise)
        assert made.rowwise is not None
        self.recorder.observe(self.layer_name, self.operand, source.values(), made.rowwise)
        return made if rowwise else QuantizedTensor(None, made.columnwise)


def _record(
    step: int, layer: str, operand: str, amax_x: float, scale: float, underflow: float, saturated: float, snr_db: float
) -> Record:
    return Record(
        step,
        layer,
        operand,
        amax=_rounded(amax_x) if math.isfinite(amax_x) else None,
        scale=_rounded(scale) if math.isfinite(scale) else None,
        underflow=_rounded(underflow),
        saturated=_rounded(saturated),
        snr_db=_rounded(snr_db) if math.isfinite(snr_db) else None,
    )


def _rounded(value: float) -> float:
    """To six digits, one less than fp32 has: seventeen would triple the file."""
    return float(f"{value:.6g}")


# --- the file -------------------------------------------------------------------------------------------------------


class ReportWriter:
    """Appends to `path` one JSON object a line, those of a step at once, and flushes.

    `step` is where the run stands. A resumed run does steps again that a crash lost, so lines of later steps, and from
    a line on that a kill cut short, are dropped first. ValueError where the file holds something else.
    """

    def __init__(self, path: Path, step: int) -> None:
        if path.exists():
            still_true = takewhile(lambda line: line[1].step <= step, _complete_lines(path))
            os.truncate(path, sum(len(line) for line, _ in still_true))
        self.file = path.open("a", encoding="utf-8")

    def write(self, records: Sequence[Record]) -> None:
        self.file.write("".join(json.dumps(asdict(record)) + "\n" for record in records))
        self.file.flush()

    def close(self) -> None:
        self.file.close()


def read_report(path: Path) -> list[Record]:
    """The records in order; a last line that is still being written is left out. ValueError for any other bad line."""
    return [record for _, record in _complete_lines(path)]


def _complete_lines(path: Path) -> Iterator[tuple[bytes, Record]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            try:
                record = Record(**json.loads(line))
            except (ValueError, TypeError):
                raise ValueError(f"{path}, line {number} is no line of an FP8 report: mend or remove it") from None
            yield line, record


# --- advice ---------------------------------------------------------------------------------------------------------

RECENT_STEPS = 5
"""Advice looks at the latest sampled steps, this many: one odd batch should not decide, nor the start of training."""
SATURATED_SHARE = 1e-3
"""Clamped elements are the largest, and each is wrong by more than rounding. A scale that fits clamps none; one that is
1.5 times too large clamps this share of normally distributed values whose amax is 5σ."""
UNDERFLOW_SHARE = 0.05
"""E4M3 loses what is 2^-19 of the maximum. Of normally distributed values that is one in 10⁵; 5% means that gradients
spread over more octaves than E4M3 has, and these are missing from the sums. E5M2 has 14 octaves more."""
SNR_DROP_DB = 6.0
"""One bit: a tensor this far below its peers has lost one of the three bits of mantissa that E4M3 has."""
FEWEST_PEERS = 4
"""Tensors of the same operand, itself included, whose median means something."""
AMAX_GROWTH = 10.0
"""The inputs of an MLP's second GEMM stay within a few times of their size while training is healthy. SwiGLU multiplies
two projections of one input, whose weights may align late in training; then single channels grow by orders of
magnitude (Fishman et al. 2024, arXiv:2409.12517)."""


@dataclass(frozen=True)
class Advice:
    """A tensor that wants something else, why, and the field of the config's section `fp8` that gives it."""

    layer: str
    operand: str
    reason: str
    field: Literal["exclude", "recipe", "format"]
    value: str


def advice(records: Sequence[Record], *, fp8_format: Literal["hybrid", "e4m3"] | None) -> list[Advice]:
    """What the records of a run, made with `fp8_format`, advise: at most one change a tensor, the first that applies.

    None where another format is no remedy: four bits always lose some tenth of the elements to zero.

    In this order: an outlier that grew (exclude the layer), saturation (recipe current), gradients that underflow in
    E4M3 (format hybrid), an SNR far below the median of the same operand's tensors (exclude).
    """
    histories: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        histories.setdefault((record.layer, record.operand), []).append(record)
    snr_db = {name: _recent_snr_db(history) for name, history in histories.items()}
    found = []
    for name, history in histories.items():
        peers = [snr for (_, operand), snr in snr_db.items() if operand == name[1] and snr is not None]
        advised = (
            _on_growth(history)
            or _on_saturation(history)
            or _on_underflow(history, fp8_format)
            or _on_snr(history, snr_db[name], peers)
        )
        if advised is not None:
            found.append(advised)
    return found


def as_yaml(advised: Sequence[Advice], exclude: Sequence[str] = ()) -> str:
    """The config's section `fp8` that follows all advice; `exclude` are the patterns that the run has already."""
    lines = ["fp8:"]
    for field in ("recipe", "format"):
        values = {a.value for a in advised if a.field == field}
        lines += [f"  {field}: {value}" for value in values]
    layers = [a.value for a in advised if a.field == "exclude"]
    if layers:
        lines.append(f"  exclude: {json.dumps(list(dict.fromkeys([*exclude, *layers])))}")
    return "\n".join(lines)


def _recent_snr_db(history: Sequence[Record]) -> float | None:
    known = [record.snr_db for record in history[-RECENT_STEPS:] if record.snr_db is not None]
    return median(known) if known else None


def _on_growth(history: Sequence[Record]) -> Advice | None:
    last = history[-1]
    sizes = [record.amax for record in history if record.amax]
    window = min(RECENT_STEPS, len(sizes) // 2)
    if not (last.layer.endswith("mlp.down") and last.operand == "input" and window):
        return None
    growth = median(sizes[-window:]) / median(sizes[:window])
    if growth <= AMAX_GROWTH:
        return None
    reason = (
        f"amax grew {growth:.3g} times since step {history[0].step}: SwiGLU's known outlier late in training, "
        "which ends in divergence; keep the layer in bf16, or set fp8.smooth_swiglu"
    )
    return Advice(last.layer, last.operand, reason, "exclude", last.layer)


def _on_saturation(history: Sequence[Record]) -> Advice | None:
    last, share = history[-1], fmean(record.saturated for record in history[-RECENT_STEPS:])
    if share <= SATURATED_SHARE:
        return None
    reason = (
        f"{share:.2%} of the elements are clamped: a scale from earlier steps no longer fits; take it from the tensor "
        "itself (or stay with delayed scaling and raise margin by 1, which leaves room for twice the amax)"
    )
    return Advice(last.layer, last.operand, reason, "recipe", "current")


def _on_underflow(history: Sequence[Record], fp8_format: str | None) -> Advice | None:
    last, share = history[-1], fmean(record.underflow for record in history[-RECENT_STEPS:])
    if last.operand != "grad_output" or fp8_format != "e4m3" or share <= UNDERFLOW_SHARE:
        return None
    reason = f"{share:.1%} of the gradient underflows to zero: E4M3 has too little range; E5M2 has 2^14 times more"
    return Advice(last.layer, last.operand, reason, "format", "hybrid")


def _on_snr(history: Sequence[Record], snr_db: float | None, peers: Sequence[float]) -> Advice | None:
    last = history[-1]
    if snr_db is None or len(peers) < FEWEST_PEERS or snr_db >= median(peers) - SNR_DROP_DB:
        return None
    reason = f"SNR {snr_db:.1f} dB, {median(peers) - snr_db:.1f} below the median of its peers; keep the layer in bf16"
    return Advice(last.layer, last.operand, reason, "exclude", last.layer)
