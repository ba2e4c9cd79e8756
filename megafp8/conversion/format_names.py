"""Names of checkpoint formats, and of the forms of their FP8 weights. Help texts use them, so torch is not imported."""

from typing import Literal, get_args

FormatName = Literal["native", "hf", "peft", "megatron", "torch_dist", "consolidated"]
FORMAT_NAMES = get_args(FormatName)

FormName = Literal["fp8-block", "fp8-channel", "fp8-tensor"]
FORM_NAMES: tuple[FormName, ...] = get_args(FormName)
Activations = Literal["dynamic", "static"]
ACTIVATIONS: tuple[Activations, ...] = get_args(Activations)
