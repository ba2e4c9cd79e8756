"""The unpickler of DCP's index accepts the classes of an index, from all releases of Python, and nothing else."""

from __future__ import annotations

import io
import pickle
from typing import Any

import pytest
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata

from megafp8.checkpoint.dcp import _IndexUnpickler


class Attribute:
    """Pickled as `getattr(owner, name)`, as Python 3.11.2 does members of enumerations."""

    def __init__(self, owner: object, name: str) -> None:
        self.owner, self.name = owner, name

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self.owner, self.name)


def read(value: object) -> object:
    return _IndexUnpickler(io.BytesIO(pickle.dumps(value))).load()


def test_members_of_enumerations_in_both_pickled_forms() -> None:
    member = _MEM_FORMAT_ENCODING.TORCH_CONTIGUOUS_FORMAT
    assert read(member) is member
    assert read(Attribute(_MEM_FORMAT_ENCODING, "TORCH_CONTIGUOUS_FORMAT")) is member


@pytest.mark.parametrize(
    "value",
    [Attribute(Metadata, "__init__"), Attribute(_MEM_FORMAT_ENCODING, "__class__"), print],
    ids=["method", "class", "function"],
)
def test_nothing_else_is_taken_or_called(value: object) -> None:
    with pytest.raises((pickle.UnpicklingError, KeyError)):
        read(value)
