"""The records of activations against the config's values and the sources that compute them."""

from __future__ import annotations

import typing

from megafp8.config.activations import ACTIVATIONS, ActivationName
from megafp8.fp8.sources import ACTIVATION_SOURCES, Gated, GatedGrad


def test_every_value_has_a_record_and_every_fused_record_its_sources() -> None:
    assert set(ACTIVATIONS) == set(typing.get_args(ActivationName))
    assert set(ACTIVATION_SOURCES) == {name for name, record in ACTIVATIONS.items() if record.fused}
    for name, (output, gradient) in ACTIVATION_SOURCES.items():
        assert (output.kind, gradient.kind) == (name, f"{name}_grad")
        assert output.function == gradient.function
        assert issubclass(output, Gated) == issubclass(gradient, GatedGrad) == ACTIVATIONS[name].gated
