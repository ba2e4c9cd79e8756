"""What a forward pass keeps is freed with its result, also where no backward pass follows."""

from __future__ import annotations

import gc

import pytest
import torch

from megafp8.batch import Batch
from megafp8.inference.load import InferenceLayout, build_model, config_of
from megafp8.parallel.parallel_state import destroy_model_parallel
from megafp8.parallel.tensor.random import initialize_parameters
from tests.training.presets import *  # noqa: F403
from tests.training.presets import config_of as run_of

CASES = {
    "none": QK_NORM | GEMMA, "delayed": DEEPSEEK, "blockwise": NEMOTRON,
}  # fmt: skip


@pytest.mark.parametrize("recipe", CASES)
def test_a_forward_pass_without_backward_is_freed(recipe: str) -> None:
    run = run_of(CASES[recipe], fp8={"recipe": recipe})
    (stage,) = build_model(config_of(run.spec, InferenceLayout(), run.fp8, torch.bfloat16, cuda=False)).stages
    initialize_parameters(stage, seed=0)
    ids = torch.arange(65).unsqueeze(0)
    alive = []
    for _ in range(3):
        assert stage(None, Batch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())).cross_entropy.requires_grad
        gc.collect()
        alive.append(sum(issubclass(type(x), torch.Tensor) for x in gc.get_objects()))
    destroy_model_parallel()
    assert alive[1] == alive[2]
