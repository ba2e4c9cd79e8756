"""Names of checkpoint formats, and of the forms of their FP8 weights. Help texts use them, so torch is not imported."""

from typing import Literal, get_args

FormatName = Literal["native", "hf", "peft", "megatron", "torch_dist", "nanotron", "consolidated"]
FORMAT_NAMES: tuple[FormatName, ...] = get_args(FormatName)
WRITTEN_NAMES = tuple(name for name in FORMAT_NAMES if name != "nanotron")
"""Formats that megafp8 also writes."""

FormName = Literal["fp8-block", "fp8-channel", "fp8-tensor"]
FORM_NAMES: tuple[FormName, ...] = get_args(FormName)
Activations = Literal["dynamic", "static"]
ACTIVATIONS: tuple[Activations, ...] = get_args(Activations)
