"""Make and change a `ModelSpec` through its keys, for packages that have no config: conversion, fine-tuning, tests."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from megafp8.config.checks import network_problems
from megafp8.config.schema import ModelConfig
from megafp8.host.problems import Problem
from megafp8.spec import ModelSpec


def model_spec(keys: Mapping[str, Any]) -> ModelSpec:
    """Return the network that the keys of a model section describe.

    Raises:
        pydantic.ValidationError: A key is unknown, is missing, or has a value of a wrong type.
    """
    return ModelConfig.model_validate(dict(keys)).spec


def with_keys(model: ModelSpec, **keys: Any) -> ModelSpec:
    """Return a copy of the network in which some keys have other values."""
    return model_spec({**model.keys, **keys})


def model_problems(model: ModelSpec) -> Iterator[Problem]:
    """Yield the problems of the network that do not depend on the run."""
    return network_problems(ModelConfig.model_validate(model.keys))
