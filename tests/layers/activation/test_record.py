"""The records of activations against the config's values and the sources that compute them."""

from __future__ import annotations

import typing

from megafp8.layers.activation.record import ACTIVATIONS, ActivationName
from megafp8.layers.mlp.op import UNFUSED, is_fused
from megafp8.nn.layernorm_mlp import ACTIVATIONS as TRANSFORMER_ENGINES
from megafp8.numerics.sources import ACTIVATION_SOURCES, Gated, GatedGrad


def test_an_activation_has_a_kernel_or_a_function_and_not_both() -> None:
    named = {*ACTIVATIONS, *TRANSFORMER_ENGINES.values()}
    assert named == ACTIVATION_SOURCES.keys() | UNFUSED
    assert not ACTIVATION_SOURCES.keys() & UNFUSED
    assert {name for name in ACTIVATIONS if is_fused(name)} == {x for x, record in ACTIVATIONS.items() if record.fused}


def test_every_value_has_a_record_and_every_fused_record_its_sources() -> None:
    assert set(ACTIVATIONS) == set(typing.get_args(ActivationName))
    for name, (output, gradient) in ACTIVATION_SOURCES.items():
        assert (output.kind, gradient.kind) == (name, f"{name}_grad")
        assert output.function == gradient.function
        assert issubclass(output, Gated) == issubclass(gradient, GatedGrad) == ACTIVATIONS[name].gated
