"""Names of the formats of quantized weights. Imports no torch, for help texts."""

from typing import Literal

WeightFormatName = Literal["int8", "fp8", "int4", "int4-64", "int4-32"]
