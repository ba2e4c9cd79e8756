"""`batch_invariant` on a GPU: log-probabilities of generated tokens are those of training's forward pass, bit for bit.

Training's passes are of a second model with the same weights: they quantize the weights anew, and recorded decode steps
go on reading the copies that they were recorded with.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from megafp8.batch import Batch
from megafp8.config import Fp8Config, with_keys
from megafp8.inference import Generator, SamplingOptions
from megafp8.inference.load import InferenceLayout, build_model, config_of
from megafp8.inference.model import Model
from megafp8.inference.options import CacheOptions
from megafp8.parallel.parallel_state import destroy_model_parallel
from megafp8.parallel.tensor.random import initialize_parameters
from megafp8.spec import ModelSpec
from tests.training.presets import *  # noqa: F403
from tests.training.presets import Preset
from tests.training.presets import config_of as run_of

WIDTHS = {"hidden_size": 256, "ffn_hidden_size": 384, "init_std": 0.2}
MODELS = {"llama": NONE, "experts": MOE, "gemma": GEMMA, "latent": DEEPSEEK, "sinks": GPT_OSS}
BATCHES = (1, 2, 5, 64)
RECIPES = ("fp32", "bf16", "delayed", "current", "rowwise", "blockwise", "mxfp8")
NEW = 8


def built(model: ModelSpec, recipe: str) -> Model:
    """With random weights, the same each time, and amaxes as after training."""
    fp8 = Fp8Config() if recipe in ("fp32", "bf16") else Fp8Config(recipe=recipe)  # type: ignore[arg-type]
    dtype = torch.float32 if recipe == "fp32" else torch.bfloat16
    made = build_model(config_of(model, InferenceLayout(), fp8, dtype, cuda=True, batch_invariant=True))
    initialize_parameters(made.stages[0], seed=0)
    for history in made.fp8.state_dict().values():
        history.fill_(4.0)
    made.fp8.invalidate_weights()
    return made


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", MODELS)
def test_logprobs_are_those_of_training(name: str, recipe: str) -> None:
    preset: Preset = MODELS[name]
    model = run_of(preset, model=WIDTHS).spec
    if model.has_experts:
        model = with_keys(model, moe=model.keys["moe"] | {"ffn_hidden_size": 128})
    generating, trained = built(model, recipe), built(model, recipe)
    (stage,) = trained.stages
    own = random.Random(0)
    prompts = [[own.randrange(1, 90) for _ in range(own.randint(1, 90))] for _ in range(max(BATCHES))]
    options = SamplingOptions(max_tokens=NEW, temperature=1.0, seed=1, ignore_end=True)
    for why_eager in ("", "without graphs"):
        eager = replace(generating, why_eager=why_eager or generating.why_eager)
        cache = CacheOptions(cache_tokens=1024, max_batch_tokens=50, max_sequences=24)
        generator = Generator(eager, max_length=512, cache=cache)
        for count in BATCHES:
            order = own.sample(range(count), count)
            for completion in generator.generate([prompts[i] for i in order], options):
                text = [*completion.prompt_tokens, *completion.tokens]
                ids = torch.zeros(1, 129, dtype=torch.int64)
                ids[0, : len(text)] = torch.tensor(text)
                ids = ids.cuda()
                with trained.fp8.recording(False):
                    loss_sb = stage(None, Batch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())).cross_entropy
                logprobs = -loss_sb.detach()[len(text) - 1 - NEW : len(text) - 1, 0].double()
                assert logprobs.tolist() == completion.logprobs
    destroy_model_parallel()
