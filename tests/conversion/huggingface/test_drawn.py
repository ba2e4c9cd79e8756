"""Ten random models of a family: logits, gradients, files and greedy texts are those of `transformers`."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch

from megafp8.conversion.flat import differences as differing
from megafp8.conversion.huggingface.config import FAMILIES, read_config, write_config
from megafp8.conversion.huggingface.source import HfSource
from tests.conversion.families import config_class, make_model, tokens
from tests.conversion.huggingface.drawn import DRAWN, MODELS, differences, drawn_keys
from tests.conversion.huggingface.test_logits import from_folder, layouts_of
from tests.marks import slow_but
from tests.world import World


@pytest.mark.parametrize(
    ("name", "seed"), slow_but(itertools.product(DRAWN, range(MODELS)), *((name, 0) for name in DRAWN))
)
def test_random_models_equal_those_of_transformers(world2: World, tmp_path: Path, name: str, seed: int) -> None:
    found = differences(world2, tmp_path, name, seed)
    assert max(found.logits, found.gradients, found.written) <= 1e-5, (found, drawn_keys(name, seed))
    assert found.texts == 0, drawn_keys(name, seed)


@pytest.mark.parametrize("name", DRAWN)
def test_our_config_describes_the_models(name: str) -> None:
    """`transformers` computes the same logits with the config.json that we write for a model of ours."""
    kind, norms = DRAWN[name].kind, DRAWN[name].norms
    for seed in range(MODELS):
        theirs = make_model(kind, drawn_keys(name, seed), seed, norms)
        model = read_config(theirs.config.to_dict() | {"model_type": name})[1]
        written = write_config(FAMILIES[name], model)
        assert differing(read_config(written)[1], model) == [], written
        again = type(theirs)(config_class(kind)(**json.loads(json.dumps(written)))).eval()
        again.load_state_dict(theirs.state_dict())
        with torch.no_grad():
            torch.testing.assert_close(again(tokens()).logits, theirs(tokens()).logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", slow_but(DRAWN))
def test_ranks_load_their_slices(world2: World, tmp_path: Path, name: str) -> None:
    kind, norms = DRAWN[name].kind, DRAWN[name].norms
    groups = ("num_key_value_heads", "mamba_ngroups")
    seed = next(x for x in range(MODELS) if all(drawn_keys(name, x).get(key) != 1 for key in groups))  # by tensor 2
    model = make_model(kind, drawn_keys(name, seed), seed, norms)
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        theirs = model(tokens()).logits
    for layout in layouts_of(HfSource(tmp_path, vocab_multiple=8).model, "several"):
        ours = world2.run(from_folder, tmp_path, *layout, ranks=layout[0] * layout[1])[-1]
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
