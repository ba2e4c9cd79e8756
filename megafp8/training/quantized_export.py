"""Export of a run's checkpoint to FP8 forms for other inference engines."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from pydantic import ValidationError

from megafp8.config import Config
from megafp8.conversion.adapters import MergedSource
from megafp8.conversion.base import CheckpointSource, is_weight
from megafp8.conversion.format_names import Activations, FormName
from megafp8.conversion.huggingface.quantized_export import QuantizedExport
from megafp8.conversion.huggingface.weight_casts import weight_casts
from megafp8.conversion.model import without_mtp
from megafp8.fp8 import CurrentScaling, Fp8Manager
from megafp8.numerics.dtypes import DTYPES
from megafp8.training.fp8_config import build_fp8


def quantized_export(
    source: CheckpointSource,
    form: FormName,
    activations: Activations | None = None,
    kv_cache: Mapping[int, tuple[float, float]] = MappingProxyType({}),
) -> QuantizedExport:
    """Return the export of the weights of `source` in `form`.

    The exported FP8 layers are the layers that the run trains in FP8. For a bf16 run, or for a checkpoint in another
    format, they are all layers that support FP8. `activations` and `kv_cache` are arguments of `QuantizedExport`.
    Raises ValueError if scales of the run are missing or the form does not support the run's recipe.
    """
    config, model = config_of_run(source), without_mtp(source)
    if config is None or config.fp8.recipe == "none":
        why = "it is not from a run" if config is None else "fp8.recipe is none"
        layers = weight_casts(source, model, Fp8Manager(CurrentScaling(), amax_group=None), trained=why)
        return QuantizedExport(source, layers, form, activations, kv_cache)
    fp8 = build_fp8(config, None)
    fp8.leave_out(source.about.get("fp8_left_out") or [])
    layout = {"tensor": config.parallel.tensor, "expert_tensor": config.parallel.expert_tensor}
    layout |= {key: x for key, x in (source.about.get("layout") or {}).items() if key in layout and type(x) is int}
    changed = "adapters are merged into the weights" if isinstance(source, MergedSource) else ""
    kinds = {info.dtype for name, info in source.tensors.items() if is_weight(name) and info.dtype.is_floating_point}
    if DTYPES[config.training.precision] not in kinds:
        changed = changed or "the weights of the checkpoint are not in training.precision"
    layers = weight_casts(source, model, fp8, trained=changed, **layout)
    return QuantizedExport(source, layers, form, activations, kv_cache)


def config_of_run(source: CheckpointSource) -> Config | None:
    """Return the config of the run that saved the source, without keys that no longer exist, or None if unknown."""
    settings = source.about.get("config") or {}
    if "training" not in settings:
        return None
    try:
        return Config.model_validate(settings, extra="ignore")
    except ValidationError as error:
        wrong = " ".join(str(error).split())
        raise ValueError(f"{source.path} holds no config of a run that this version knows: {wrong}") from None
