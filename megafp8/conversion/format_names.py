"""Names of the formats of checkpoints. Imports no torch, for help texts."""

from typing import Literal, get_args

FormatName = Literal["native", "hf", "peft", "megatron", "torch_dist", "consolidated"]
FORMAT_NAMES = get_args(FormatName)
