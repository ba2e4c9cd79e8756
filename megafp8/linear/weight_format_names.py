"""Names of the formats of quantized weights. Help texts read them, so this module does not import torch."""

from typing import Literal

WeightFormatName = Literal["int8", "fp8", "int4", "int4-64", "int4-32"]
