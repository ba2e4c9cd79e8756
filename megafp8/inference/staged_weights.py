"""Tensors of a generating model: views that a checkpoint or a trainer fills, and their replacement by new values."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megafp8.checkpoint import Rectangles, collect
from megafp8.conversion.base import CheckpointSource
from megafp8.inference.model import Model
from megafp8.inference.packed_weights import pack_weights
from megafp8.inference.quantized_weights import quantize_stages
from megafp8.parallel.sharding import spec_of
from megafp8.parallel.tensor.layers import ColumnParallelLinear, RowParallelLinear


def tensors_of(model: Model) -> dict[str, Rectangles]:
    """Return views of this rank's weights, of constants without gradients, and of FP8 scales, by global name."""
    return _collected(model, {param: param.detach() for param in _parameters(model)}, _others(model))


def prepare_weights(model: Model, source: CheckpointSource | None = None) -> None:
    """Quantize or pack the weights of a model after they were filled. Collective.

    `model` must not be a model in training, which uses its weights unchanged. `source` is an argument of
    `quantize_stages`.
    """
    model.fp8.invalidate_weights()
    if model.weights is not None:
        quantize_stages(model.stages, model.weights, source, model.stored_fp8)
    if not model.batch_invariant:
        pack_weights(model.stages)


class StagedWeights:
    """New values of all tensors of a model. The old values stay in use until `apply`.

    The new values are on the model's device if they fit, else in host memory. `tensors` are the views to fill, like the
    result of `tensors_of`.
    """

    def __init__(self, model: Model) -> None:
        self._model, self._live = model, _others(model)
        shapes = {
            param: (sum(x.shape[0] for x in spec_of(param).shards), *param.shape[1:]) for param in _parameters(model)
        }
        for layer in _packed_layers(model):  # the parameter of a packed layer may have been freed
            assert layer.state.packed_weight is not None
            shapes[layer.weight] = layer.state.packed_weight.shape
        device = model.parallel.device
        needed = sum(torch.Size(shape).numel() * param.itemsize for param, shape in shapes.items())
        if device.type == "cuda" and torch.cuda.mem_get_info(device)[0] < 1.1 * needed:
            device = torch.device("cpu")
        self._params = {p: torch.empty(shape, dtype=p.dtype, device=device) for p, shape in shapes.items()}
        self._staged = {name: torch.empty_like(x) for name, x in self._live.items()}
        self.tensors = _collected(model, self._params, self._staged)

    @torch.no_grad()
    def apply(self) -> None:
        """Replace the old values by the new ones. Collective."""
        for layer in _packed_layers(self._model):
            layer.state.set_packed_weight(None)
        for param, values in self._params.items():
            if param.shape == values.shape:
                param.copy_(values)
            else:
                param.data = values.to(param.device)
        for name, values in self._staged.items():
            self._live[name].copy_(values)
        self._params.clear()
        prepare_weights(self._model)


def refused_weights(reason: Exception) -> ValueError:
    """Return the error, on one line, of a refit that leaves the old weights in use."""
    return ValueError(f"the weights stay as they are: {' '.join(str(reason).split())}")


def _parameters(model: Model) -> list[nn.Parameter]:
    return list(dict.fromkeys(param for stage in model.stages for param in stage.parameters()))


def _others(model: Model) -> dict[str, Tensor]:
    """Return this rank's tensors that are not parameters, by their name in a checkpoint."""
    constants = {f"model.{name}": x for stage in model.stages for name, x in stage.constants.items()}
    return constants | model.fp8.state_dict()


def _collected(model: Model, params: dict[nn.Parameter, Tensor], others: dict[str, Tensor]) -> dict[str, Rectangles]:
    whole = {name: Rectangles.whole(x) for name, x in others.items()}
    return collect(_parameters(model), lambda param: params[param], "model.") | whole


def _packed_layers(model: Model) -> list[ColumnParallelLinear | RowParallelLinear]:
    kinds = (ColumnParallelLinear, RowParallelLinear)
    layers = [x for stage in model.stages for x in stage.modules() if isinstance(x, kinds)]
    return [layer for layer in layers if layer.state.packed_weight is not None]
