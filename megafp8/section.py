"""Base classes of config sections, and number types with bounds.

This module imports neither the config nor the packages whose options are sections, so each of them can define its own
sections.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from decimal import Decimal, InvalidOperation
from enum import Enum
from os.path import expanduser
from typing import Annotated, Any, ClassVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    StringConstraints,
    model_serializer,
)
from pydantic_core import PydanticCustomError
from typing_extensions import Self


def _number(value: object) -> object:
    """Reject booleans, which pydantic would convert to 0 or 1."""
    if isinstance(value, bool):
        raise PydanticCustomError("number_type", "Input should be a number, not a truth value")
    return value


def _whole_number(value: object) -> object:
    """Parse a 64-bit integer, and accept text such as 1e3, which YAML does not read as a number."""
    if isinstance(value, str):
        try:
            number = Decimal(value)
        except InvalidOperation:
            return value
        if number.is_finite() and abs(number.adjusted()) < 20 and number == number.to_integral_value():
            value = int(number)
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise PydanticCustomError("integer_range", "Input should be an integer of 64 bits")
    return _number(value)


def _in_fp32(value: float) -> float:
    """Reject floats outside the range of fp32."""
    if abs(value) > 3.4e38:
        raise PydanticCustomError("float_range", "Input should be a number in the range of fp32")
    return value


INTEGER, FLOAT, IN_FP32 = BeforeValidator(_whole_number), BeforeValidator(_number), AfterValidator(_in_fp32)
# Bounds come before the validator, because pydantic omits bounds after a validator from the JSON schema.
Integer = Annotated[int, INTEGER]
Count = Annotated[int, Field(ge=0), INTEGER]
PositiveInt = Annotated[int, Field(gt=0), INTEGER]
NonNegative = Annotated[float, Field(ge=0), FLOAT, IN_FP32]
PositiveFloat = Annotated[float, Field(gt=0), FLOAT, IN_FP32]
Decay = Annotated[float, Field(ge=0, lt=1), FLOAT]
Dropout = Annotated[float, Field(ge=0, lt=1), FLOAT]
UserPath = Annotated[str, AfterValidator(expanduser)]
"""Path or URL as users write it; a leading `~` becomes the home folder."""
Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
"""Part of a file name or of a metric name."""
Pattern = Annotated[
    str, StringConstraints(min_length=1), Field(examples=["*", "layers.0.*", "*.mlp.*", "*.attention.*"])
]


class Quantity(Enum):
    """Kinds of quantities that an integer of a config can count.

    A small model for tests scales all numbers of one quantity in proportion (`megafp8.prove.shrink`). Integers without
    a quantity keep their value.
    """

    CHANNELS = "channels"
    HEADS = "heads"
    EXPERTS = "experts"
    TOKENS = "tokens"
    CHOSEN = "tokens that are chosen of many"
    STEPS = "steps"
    LAYER = "number of a layer"


Channels = Annotated[PositiveInt, Quantity.CHANNELS]
Heads = Annotated[PositiveInt, Quantity.HEADS]
Experts = Annotated[PositiveInt, Quantity.EXPERTS]
Tokens = Annotated[PositiveInt, Quantity.TOKENS]
Chosen = Annotated[PositiveInt, Quantity.CHOSEN]
Steps = Annotated[Count, Quantity.STEPS]


class Section(BaseModel):
    """Section of a config, as an immutable pydantic model."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)
    choices: ClassVar[tuple[str, ...]] = ()
    """Keys of the section that choose a kind. Each kind has options that other kinds lack."""

    @classmethod
    def options(cls, choice: str, values: Mapping[str, Any]) -> Collection[str]:
        """Return the keys that only the kind `values[choice]` has, without the keys that all kinds share."""
        raise NotImplementedError

    def __copy__(self) -> Self:
        """Copy the section without cached properties, which `model_copy` would keep with stale values."""
        copied = super().__copy__()
        for name in copied.__dict__.keys() - type(self).model_fields.keys():
            del copied.__dict__[name]
        return copied


class PartialSection(Section):
    """Section in which fields that are not set take the values of another section.

    Only the fields that are set are written.
    """

    @model_serializer(mode="wrap")
    def _given_fields(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Serialize only the fields that are set."""
        return {name: value for name, value in serialize(self).items() if name in self.model_fields_set}

    @property
    def given(self) -> dict[str, Any]:
        """Fields that are set, by name."""
        return {name: getattr(self, name) for name in self.model_fields_set}
