"""Names of the formats of checkpoints, and of the forms of FP8 weights in them. Imports no torch, for help texts."""

from typing import Literal, get_args

FormatName = Literal["native", "hf", "peft", "megatron", "torch_dist", "consolidated"]
FORMAT_NAMES = get_args(FormatName)

FormName = Literal["fp8-block", "fp8-channel", "fp8-tensor"]
FORM_NAMES: tuple[FormName, ...] = get_args(FormName)
Activations = Literal["dynamic", "static"]
ACTIVATIONS: tuple[Activations, ...] = get_args(Activations)
