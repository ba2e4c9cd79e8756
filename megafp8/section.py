"""What the sections of a config are made of: their base class, and types of numbers with their bounds.

Below the config and the packages whose options are sections, so that each can define its own.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from decimal import Decimal, InvalidOperation
from enum import Enum
from os.path import expanduser
from typing import Annotated, Any, ClassVar, Self

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


def _number(value: object) -> object:
    """Rejects booleans, which pydantic would take for 0 or 1."""
    if isinstance(value, bool):
        raise PydanticCustomError("number_type", "Input should be a number, not a truth value")
    return value


def _whole_number(value: object) -> object:
    """A 64-bit integer; accepts text such as 1e3, which YAML does not read as a number."""
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
    """Rejects floats outside the range of fp32."""
    if abs(value) > 3.4e38:
        raise PydanticCustomError("float_range", "Input should be a number in the range of fp32")
    return value


INTEGER, FLOAT, IN_FP32 = BeforeValidator(_whole_number), BeforeValidator(_number), AfterValidator(_in_fp32)
# Bounds come before the validator: pydantic leaves bounds behind a validator out of the JSON schema.
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
"""Part of the name of a file or of a metric."""
Pattern = Annotated[
    str, StringConstraints(min_length=1), Field(examples=["*", "layers.0.*", "*.mlp.*", "*.attention.*"])
]


class Quantity(Enum):
    """What an integer of a config counts. A small model for tests has numbers of one quantity in proportion
    (`megafp8.prove.shrink`); what is no quantity has the same value there."""

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
    """A section of a config. `choices`: its keys that choose a kind, which has options that other kinds lack."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)
    choices: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def options(cls, choice: str, values: Mapping[str, Any]) -> Collection[str]:
        """Keys that belong to what the key `choice` has in `values`, without those that all kinds have."""
        raise NotImplementedError

    def __copy__(self) -> Self:
        """A copy without cached properties, which `model_copy` would keep beside the values that it changes."""
        copied = super().__copy__()
        for name in copied.__dict__.keys() - type(self).model_fields.keys():
            del copied.__dict__[name]
        return copied


class PartialSection(Section):
    """A section whose fields have the values of another one where they are not given; only given ones are written."""

    @model_serializer(mode="wrap")
    def _given_fields(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {name: value for name, value in serialize(self).items() if name in self.model_fields_set}

    @property
    def given(self) -> dict[str, Any]:
        """The fields that are given."""
        return {name: getattr(self, name) for name in self.model_fields_set}
