"""Read the model of a checkpoint of Megatron Bridge from the files that it writes next to Megatron core's.

    iter_0000100/run_config.yaml    the run's whole config; its section `model` describes the network
    iter_0000100/train_state.pt     step and consumed samples, each a tensor
    iter_0000100/tokenizer/         files of the tokenizer, by default

common.pt has no arguments then. Tensors have the same names as in Megatron-LM's checkpoints. The files are those of
Megatron Bridge 0.3.1 and its main branch of August 2026 (`training/checkpointing.py`, `save_checkpoint`; the YAML by
`training/utils/config_utils.py`). The section is a provider (`models/gpt_provider.py`), whose fields include the ones
of Megatron core's TransformerConfig, or a config for a builder (`models/gpt/model_config.py`), in which they are the
section `transformer`. All fields are written, with their values. A function is `{_target_: name, _call_: false}`, or in
a builder's config a name.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import yaml

from megafp8.checkpoint.files import read_file
from megafp8.checkpoint.torch_file import StoredTensor, TorchFile
from megafp8.config.reader import compose, construct
from megafp8.conversion.base import refuse

RUN_CONFIG_FILE, TRAIN_STATE_FILE = "run_config.yaml", "train_state.pt"
ARGUMENTS = {
    "num_moe_experts": "num_experts", "layernorm_epsilon": "norm_epsilon", "gated_linear_unit": "swiglu",
    "layernorm_zero_centered_gamma": "apply_layernorm_1p", "rope_scaling": "use_rope_scaling",
}  # fmt: skip
"""Megatron-LM's arguments by the names of these fields in Megatron Bridge, where they differ."""
_ONLY_MODEL = {
    "bias_activation_fusion": "bias_gelu_fusion", "seq_len_interpolation_factor": "rotary_seq_len_interpolation_factor",
    "seq_length": "max_position_embeddings",
}  # fmt: skip
"""Megatron-LM's arguments for fields of the section `model` whose names mean something else in other sections."""
_MODULES = ("gpt_provider", "llama.llama_provider", "qwen.qwen_provider", "mistral.mistral_provider")
_CLASSES = tuple(f"megatron.bridge.models.{name}" for name in (*_MODULES, "gpt.gpt_builder", "gpt.model_config"))
"""Modules whose models are the ones of Megatron core, unless they have other layers."""
_LAYERS = (None, "default_layer_spec", "transformer_engine_layer_spec", "local_layer_spec")


def bridge_args(folder: Path) -> dict[str, Any]:
    """Return Megatron-LM's arguments for the model and the step that Megatron Bridge's files in `folder` describe.

    Raises ValueError, with the name of the file, if a file is damaged or the model is not one of Megatron core's GPTs.
    """
    file = folder / RUN_CONFIG_FILE
    try:
        tree = construct(compose(read_file(file).decode()))
        args = _model_args(tree)
    except (yaml.YAMLError, UnicodeDecodeError, ValueError) as error:
        raise ValueError(f"{file}: {error}") from error
    return args | {"consumed_train_samples": _consumed_samples(folder / TRAIN_STATE_FILE)}


def _model_args(tree: Any) -> dict[str, Any]:
    """Return the arguments for the section `model` of a run's config."""
    model = tree.get("model") if isinstance(tree, Mapping) else None
    if not isinstance(model, Mapping):
        raise ValueError("has no section model")
    module, _, _ = str(model.get("_target_")).rpartition(".")
    if module not in _CLASSES:
        refuse("model._target_", model.get("_target_"), f"classes of {', '.join(_CLASSES)}")
    transformer = model.get("transformer")
    fields = {**model, **(transformer if isinstance(transformer, Mapping) else {})}
    if (layers := _name(fields.get("transformer_layer_spec"))) not in _LAYERS:
        refuse("model.transformer_layer_spec", layers, ", ".join(filter(None, _LAYERS)))
    gated = fields.get("gated_linear_unit")
    if (activation := _name(fields.get("activation_func"))) != ("silu" if gated else "gelu"):
        refuse("model.activation_func", activation, "silu with gated_linear_unit, and gelu without")
    names = ARGUMENTS | _ONLY_MODEL
    args = {names.get(key, key): value for key, value in fields.items()}
    args["untie_embeddings_and_output_weights"] = not fields.get("share_embeddings_and_output_weights")
    return args | {"group_query_attention": True}  # a missing number of groups is the number of heads


def _name(value: Any) -> Any:
    """Return the last word of a function's name. A function with bound arguments has no name."""
    if not isinstance(value, Mapping):
        return value
    return str(value.get("_target_")).rpartition(".")[2] if not value.get("_partial_") else "partial"


def _consumed_samples(file: Path) -> int | None:
    """Return the number of samples in train_state.pt, or None if it does not state it."""
    state = TorchFile(file) if file.is_file() else None
    stored = state.content.get("consumed_train_samples") if state and isinstance(state.content, dict) else None
    if state is None or not isinstance(stored, StoredTensor) or stored.shape != ():
        return None
    count = torch.empty((), dtype=stored.dtype)
    state.read(stored, "consumed_train_samples", (), count)
    return int(count)
