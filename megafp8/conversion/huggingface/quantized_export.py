"""Write weights in FP8 to a Hugging Face (HF) folder: tensors, data, scales and config.

    fp8-block      DeepSeek-V3's form: X.weight E4M3, X.weight_scale_inv fp32 for each 128×128 block
    fp8-channel    compressed-tensors (float-quantized): X.weight E4M3, X.weight_scale fp32 [n, 1]
    fp8-tensor     compressed-tensors with X.weight_scale fp32 [1]

Only the linear layers that the run computes in FP8 are quantized. A weight is written with the same data and scales as
in training if the form can hold the scales. One scale per tensor fits every form; one scale per row fits fp8-channel;
128×128 blocks fit fp8-block if the blocks of the run's matrices are the blocks of the HF matrices. Otherwise the weight
is cast by the rule `amax`: scale_inv is amax / 448 of the values that share a scale (a block, a row, or a layer's
matrix, so that q, k and v or gate and up share a scale), and data = x / scale_inv, rounded to nearest even.

Shapes: n rows and k columns of an HF weight.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megafp8.conversion.base import CheckpointSource, TensorInfo
from megafp8.conversion.format_names import Activations, FormName
from megafp8.conversion.huggingface.names import Location
from megafp8.conversion.huggingface.weight_casts import (
    LayerCasts,
    LinearMatrix,
    WeightCast,
    amax_cast,
    rows_at_a_time,
)
from megafp8.numerics.formats import E4M3
from megafp8.numerics.quantize import dequantize
from megafp8.numerics.tensor import BLOCK_128X128, ROW, TENSOR, Granularity, ScaledTensor, expand
from megafp8.parallel.sharding import Shape

logger = logging.getLogger(__name__)

_BLOCK = 128
_FORMS: Mapping[FormName, tuple[Granularity, str]] = {
    "fp8-block": (BLOCK_128X128, "weight_scale_inv"),
    "fp8-channel": (ROW, "weight_scale"),
    "fp8-tensor": (TENSOR, "weight_scale"),
}
_INPUT_SCALE = "input_scale"
_KEYS = re.compile(r"model\.layers\.(\d+)\.attention\.k\.weight")


class WeightSlice(NamedTuple):
    """Location of one of our weights in an HF tensor.

    Attributes:
        rows: Rows of the HF tensor that hold the weight, int64.
        cast: Cast of the weight to FP8, or None if it shares scales with other weights in the HF tensor.
    """

    rows: Tensor
    cast: WeightCast | None


class ExportedWeight(NamedTuple):
    """HF tensor to write in FP8, `[n, k]`.

    Attributes:
        name: Name of the HF tensor.
        shape: Shape of the HF tensor.
        pieces: Our weights in the HF tensor, by name.
        why_not: Reason why the data and scales differ from training; empty if they are the same.
        input_scale_inv: Static scale of the layer's input, or None.
    """

    name: str
    shape: Shape
    pieces: Mapping[str, WeightSlice]
    why_not: str
    input_scale_inv: Tensor | None


class Write(NamedTuple):
    """Values to write to an HF tensor: to `rows`, or to all rows if `rows` is None."""

    name: str
    rows: Tensor | None
    values: Tensor


class QuantizedExport:
    """Plan for writing the FP8 layers of a run to an HF folder.

    Args:
        source: Source of the weights.
        layers: FP8 layers of the run.
        form: Form of the FP8 weights.
        activations: `static` writes training's scale for each layer's input; `dynamic` writes none. None means static
            if all layers have such a scale and the form allows it.
        kv_cache: Scales of the keys and values that an engine stores in E4M3, by layer; empty for none.

    Raises:
        ValueError: No layer is FP8, the form does not allow static activations, or a layer has no scale for them.
    """

    def __init__(
        self,
        source: CheckpointSource,
        layers: Sequence[LayerCasts],
        form: FormName,
        activations: Activations | None = None,
        kv_cache: Mapping[int, tuple[float, float]] = MappingProxyType({}),
    ) -> None:
        self.form = form
        self.granularity, self._scale = _FORMS[form]
        self._source = source
        self._layers = {name: layer for layer in layers for name in layer.matrix.weights}
        if not layers:
            raise ValueError(f"{form}: no layer of {source.path} would be FP8: fp8.include and exclude leave none")
        self.activations = self._activations(layers, activations)
        self.weights: dict[str, ExportedWeight] = {}
        self._kv_cache, self.kv_cache_scales = kv_cache, list[Write]()
        self._ignored: list[str] = []

    def _activations(self, layers: Sequence[LayerCasts], wanted: Activations | None) -> Activations:
        without = next((layer.matrix.layer for layer in layers if layer.input_scale_inv is None), None)
        if wanted == "static" and self.granularity is BLOCK_128X128:
            raise ValueError("activations = static: fp8-block only has dynamic; try fp8-tensor or fp8-channel")
        if wanted == "static" and without is not None:
            raise ValueError(
                f"activations = static: {self._source.path} has no scale for the input of {without}, because only the "
                "recipes delayed and static have such scales; try dynamic"
            )
        if wanted is None and self.granularity is not BLOCK_128X128 and without is None:
            return "static"
        return wanted or "dynamic"

    # --- planning ---------------------------------------------------------------------------------------------------

    def plan(self, locations: Mapping[str, Location]) -> dict[str, TensorInfo]:
        """Plan all quantized tensors, and return shape and dtype of the HF tensors that hold them, by HF name.

        `locations` holds the location of each weight of the model. Raises ValueError for a tensor that the form cannot
        hold.
        """
        pieces: dict[str, list[tuple[str, Location]]] = {}
        for name, location in locations.items():
            pieces.setdefault(location.name, []).append((name, location))
        infos: dict[str, TensorInfo] = {}
        for theirs, parts in pieces.items():
            fp8 = [name for name, _ in parts if name in self._layers]
            if not fp8:
                is_table = ".embedding." in f".{parts[0][0].removeprefix('model.')}"  # its rows are looked up
                if len(parts[0][1].shape) == 2 and theirs.endswith(".weight") and not is_table:
                    self._ignored.append(theirs.removesuffix(".weight"))
                continue
            self._check(theirs, parts, fp8)
            self.weights[theirs] = weight = self._weight(theirs, parts)
            infos[theirs] = TensorInfo(weight.shape, E4M3.dtype)
            infos[_of_module(theirs, self._scale)] = TensorInfo(self._scale_shape(weight.shape), torch.float32)
            if self.activations == "static":
                infos[_of_module(theirs, _INPUT_SCALE)] = TensorInfo((1,), torch.float32)
        self.kv_cache_scales = list(self._plan_kv_cache(locations))
        infos |= {write.name: TensorInfo((1,), torch.float32) for write in self.kv_cache_scales}
        reasons = Counter(weight.why_not for weight in self.weights.values())
        logger.info(f"{self.form}: {reasons.pop('', 0)} of {len(self.weights)} tensors have training's data and scales")
        for reason, count in reasons.items():
            logger.info(f"{self.form}: {count} tensors are quantized by the rule amax: {reason}")
        return infos

    def _plan_kv_cache(self, locations: Mapping[str, Location]) -> Iterator[Write]:
        """Yield `k_scale` and `v_scale` of each attention layer, in the module of its projections."""
        layers = {int(match[1]): x.name for name, x in locations.items() if (match := _KEYS.fullmatch(name))}
        if self._kv_cache and layers.keys() != self._kv_cache.keys():
            raise ValueError(
                f"the cache has scales for layers {sorted(self._kv_cache)}, but {self._source.path} has keys "
                f"in layers {sorted(layers)}"
            )
        for layer, scales in self._kv_cache.items():
            module = layers[layer].removesuffix(".weight").rpartition(".")[0]
            if not module.endswith(".self_attn"):
                raise ValueError(f"scales of the cache: engines read them in modules self_attn, but this is {module}")
            for name, scale in zip(("k_scale", "v_scale"), scales, strict=True):
                yield Write(f"{module}.{name}", None, torch.tensor([scale]))

    def _check(self, theirs: str, parts: list[tuple[str, Location]], fp8: list[str]) -> None:
        if len(fp8) < len(parts):
            other = next(name for name, _ in parts if name not in fp8)
            raise ValueError(
                f"{self.form}: {theirs} holds {fp8[0]}, which is FP8, and {other}, which is not; include or exclude "
                "both in section fp8"
            )
        location = parts[0][1]
        if location.transposed or location.outer is not None or location.flat or not theirs.endswith(".weight"):
            how = "the transpose" if location.outer is None else "all experts of a layer"
            raise ValueError(
                f"{self.form}: {theirs} holds {how}, but the form requires single matrices [out, in]; leave out "
                "--quantization for this family"
            )

    def _weight(self, theirs: str, parts: list[tuple[str, Location]]) -> ExportedWeight:
        """Plan the cast of an HF tensor: as in training, by the rule for each part, or by the rule as a whole."""
        layers = [self._layers[name] for name, _ in parts]
        input_scales = [x for layer in layers if (x := layer.input_scale_inv) is not None]
        static = torch.stack(input_scales).amax() if input_scales else None
        casts: Sequence[WeightCast | str] = [layer.trained for layer in layers]
        if why_not := self._why_not(casts, parts):
            casts = [self._by_amax(name, location, layer) for (name, location), layer in zip(parts, layers)]
            if reason := self._why_not(casts, parts):
                casts = [reason] * len(parts)
        pieces = {
            name: WeightSlice(location.rows, None if isinstance(cast, str) else cast)
            for (name, location), cast in zip(parts, casts)
        }
        return ExportedWeight(theirs, parts[0][1].shape, pieces, why_not, static)

    def _by_amax(self, name: str, location: Location, layer: LayerCasts) -> WeightCast:
        matrix = layer.matrix
        if self.granularity is not TENSOR:  # the scale of a row or a block does not depend on other weights
            matrix = LinearMatrix.from_weight(matrix.layer, name, len(location.rows), location.shape[1])
        return amax_cast(self._source.read, matrix, self.granularity)

    def _misfit(self, cast: WeightCast, location: Location) -> str:
        """Return why the scales of a cast do not fit the blocks of the HF tensor; an empty string if they fit."""
        granularity, matrix = cast.granularity, cast.matrix
        if granularity is TENSOR:
            return ""
        if granularity is not self.granularity:
            return f"its recipe has a scale for each {granularity.name}"
        cut_columns = matrix.shard_columns != location.shape[1]
        if granularity is ROW:
            return "tensor-parallel ranks had separate scales for parts of its rows" if cut_columns else ""
        cut_rows = matrix.shard_rows != matrix.rows
        borders = [*matrix.shard_rows[: None if cut_rows else -1], *([matrix.shard_columns] if cut_columns else [])]
        if any(border % _BLOCK for border in borders):
            return "blocks of the run's matrix cross the borders of its weights or shards"
        ours, theirs = torch.arange(len(location.rows)) // _BLOCK, location.rows // _BLOCK
        if not torch.equal(theirs, theirs[ours * _BLOCK]):  # all rows of our block are in the same HF block
            return "its rows are in another order in the folder"
        return ""

    def _why_not(self, casts: Sequence[WeightCast | str], parts: list[tuple[str, Location]]) -> str:
        """Return why an HF tensor cannot have the data and scales of these casts; an empty string if it can.

        A reason, instead of a cast, is returned as it is.
        """
        for cast, (_, location) in zip(casts, parts):
            if reason := cast if isinstance(cast, str) else self._misfit(cast, location):
                return reason
        if len(parts) == 1 or self.granularity is ROW:
            return ""
        scaled_whole = all(isinstance(cast, WeightCast) and cast.granularity is TENSOR for cast in casts)
        weights_of_layer = self._layers[parts[0][0]].matrix.weights
        if scaled_whole and all(name in weights_of_layer for name, _ in parts):
            return ""
        if self.granularity is BLOCK_128X128:
            blocks = [(location.rows // _BLOCK).unique() for _, location in parts]
            if len(torch.cat(blocks).unique()) == sum(map(len, blocks)):
                return ""
        return "it holds several of the run's matrices, which would share a scale in the folder"

    def _scale_shape(self, shape: Shape) -> Shape:
        n, k = shape
        if self.granularity is TENSOR:
            return (1,)
        return (n, 1) if self.granularity is ROW else (-(-n // _BLOCK), -(-k // _BLOCK))

    # --- values -----------------------------------------------------------------------------------------------------

    def writes(self, theirs: str, name: str, w_nk: Tensor) -> Iterator[Write]:
        """Yield the values to write for our weight `name` `w_nk`, which is stored in the HF tensor `theirs`."""
        weight = self.weights[theirs]
        piece, first = weight.pieces[name], name == next(iter(weight.pieces))
        if first and self.activations == "static":
            assert weight.input_scale_inv is not None
            yield Write(_of_module(theirs, _INPUT_SCALE), None, weight.input_scale_inv.view(1))
        if piece.cast is None:
            if first:
                whole = self._whole(weight)
                yield Write(theirs, torch.arange(weight.shape[0]), whole.data)
                scale_inv = whole.scale_inv.view(self._scale_shape(weight.shape))
                yield Write(_of_module(theirs, self._scale), None, scale_inv)
            return
        for rows, part in self._cast(piece, w_nk):
            yield Write(theirs, rows, part.data)
            yield self._scales(theirs, rows, part, w_nk.shape[1])

    def _cast(self, piece: WeightSlice, w_nk: Tensor) -> Iterator[tuple[Tensor, ScaledTensor]]:
        """Yield one of our weights in FP8, in groups of rows: the rows in the HF tensor, and the values."""
        assert piece.cast is not None
        step = rows_at_a_time(w_nk)
        for first in range(0, len(w_nk), step):
            part = w_nk[first : first + step]
            yield piece.rows[first : first + len(part)], piece.cast(part)

    def _scales(self, theirs: str, rows: Tensor, part: ScaledTensor, columns: int) -> Write:
        name, scale_inv = _of_module(theirs, self._scale), part.scale_inv
        if self.granularity is TENSOR:
            return Write(name, None, scale_inv.view(1))
        if self.granularity is ROW:
            return Write(name, rows, scale_inv.reshape(-1, 1).expand(len(rows), 1))
        blocks = rows // _BLOCK
        if part.granularity is TENSOR:
            down = blocks.unique()
            return Write(name, down, scale_inv.expand(len(down), -(-columns // _BLOCK)))
        firsts = torch.arange(0, len(rows), _BLOCK)
        return Write(name, blocks[firsts], scale_inv)

    def _whole(self, weight: ExportedWeight) -> ScaledTensor:
        """Read all parts of an HF tensor, and cast it as a whole by the rule `amax`."""
        parts = [(piece.rows, self._source.read(name)) for name, piece in weight.pieces.items()]
        w_nk = torch.empty(weight.shape, dtype=parts[0][1].dtype)
        for rows, values in parts:
            w_nk[rows] = values
        matrix = LinearMatrix.from_weight("", weight.name, *weight.shape)
        return amax_cast(lambda _: w_nk, matrix, self.granularity)(w_nk)

    def dequantized(self, theirs: str, name: str) -> Tensor:
        """Return the values that our weight `name` has in the folder, in fp32."""
        weight = self.weights[theirs]
        piece = weight.pieces[name]
        if piece.cast is None:
            return self._whole(weight).dequantize()[piece.rows]
        w_nk = self._source.read(name)
        values = [
            dequantize(part.data, expand(part.scale_inv, part.granularity, *part.data.shape))
            for _, part in self._cast(piece, w_nk)
        ]
        return torch.cat(values)

    # --- config.json ------------------------------------------------------------------------------------------------

    def config(self) -> dict[str, Any]:
        """Return the `quantization_config` for config.json."""
        if self.granularity is BLOCK_128X128:
            return {
                "quant_method": "fp8",
                "fmt": "e4m3",
                "activation_scheme": "dynamic",
                "weight_block_size": [_BLOCK, _BLOCK],
                "modules_to_not_convert": self._ignored,
            }
        number = {"num_bits": 8, "type": "float", "symmetric": True}
        dynamic = self.activations == "dynamic"
        per_token = dynamic and self.granularity is ROW
        return {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "quantization_status": "compressed",
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "weights": number
                    | {"strategy": "channel" if self.granularity is ROW else "tensor", "dynamic": False},
                    "input_activations": number | {"strategy": "token" if per_token else "tensor", "dynamic": dynamic},
                    "output_activations": None,
                    "format": "float-quantized",
                }
            },
            "ignore": self._ignored,
            "kv_cache_scheme": number | {"strategy": "tensor", "dynamic": False} if self._kv_cache else None,
        }


class Expected(CheckpointSource):
    """Source with the values that `source` has after the round trip through the quantized folder, for comparison."""

    def __init__(self, source: CheckpointSource, export: QuantizedExport) -> None:
        self._source, self._export = source, export
        self.path, self.model, self.about = source.path, source.model, source.about
        self.tokenizer_files = source.tokenizer_files
        self._theirs = {name: theirs for theirs, weight in export.weights.items() for name in weight.pieces}
        self.tensors = {
            name: TensorInfo(info.shape, torch.float32) if name in self._theirs else info
            for name, info in source.tensors.items()
        }

    def read(self, name: str) -> Tensor:
        """Return the tensor `name`, dequantized if the folder has it in FP8."""
        theirs = self._theirs.get(name)
        return self._source.read(name) if theirs is None else self._export.dequantized(theirs, name)


def _of_module(theirs: str, suffix: str) -> str:
    return f"{theirs.removesuffix('.weight')}.{suffix}"
