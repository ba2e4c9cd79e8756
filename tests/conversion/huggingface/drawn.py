"""Random models of Hugging Face families, and their differences from ours: logits, gradients, files and greedy texts.

python -m tests.conversion.huggingface.drawn               # a table of all families, ten models each
python -m tests.conversion.huggingface.drawn helium mpt    # of some families
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor
from tqdm import tqdm

from megafp8.conversion.huggingface import families
from megafp8.conversion.huggingface.sink import HfSink
from megafp8.conversion.huggingface.source import HfSource
from megafp8.inference import Generator, SamplingOptions
from megafp8.parallel.parallel_state import destroy_model_parallel
from tests.conversion.checkpoints import convert
from tests.conversion.families import make_model, tokens
from tests.conversion.huggingface.drawn_families import DRAWN
from tests.conversion.huggingface.test_logits import compare_gradients, in_float64, logits_in_float64, weights_of_loss
from tests.world import Ranks, World

CONSTANTS = ("act_fn.beta", "act_fn.eps")
"""Buffers that folders store although no model has other values."""
MODELS = 10
"""Number of random models of a family."""


def drawn_keys(name: str, seed: int) -> dict[str, Any]:
    """Return the keys of config.json of a random model of a family."""
    random, family = Random(f"{name} {seed}"), DRAWN[name]
    drawn = {key: random.choice(values) for key, values in family.choices.items()}
    return family.keys | drawn.pop("", {}) | drawn


class Differences(NamedTuple):
    """Largest differences of a random model from `transformers`.

    Attributes:
        logits: Absolute difference of the logits in float64.
        gradients: Difference of a weight's gradient in float64, relative to the largest value of the gradient.
        written: Absolute difference of the logits of the folder that we write from theirs.
        texts: Number of greedy texts that differ, together or alone.
    """

    logits: float
    gradients: float
    written: float
    texts: int


def differences(world: World, folder: Path, name: str, seed: int) -> Differences:
    """Compare a random model of `transformers` with ours, in both directions."""
    kind, norms = DRAWN[name].kind, DRAWN[name].norms
    model = make_model(kind, drawn_keys(name, seed), seed, norms)
    weights, precise, gradients, back = (folder / x for x in ("weights", "precise", "gradients", "back"))
    model.save_pretrained(weights)
    theirs = model(tokens()).logits.detach()
    assert theirs.std() > 0.1, "logits that say nothing"
    texts = differing_texts(model, weights)
    in_float64(model).save_pretrained(precise)
    logits = model(tokens()).logits
    (logits * weights_of_loss()).sum().backward()
    for key, x in [*model.named_parameters(), *model.named_buffers()]:
        if not key.endswith(CONSTANTS):
            x.data = torch.zeros_like(x) if x.grad is None else x.grad
    model.save_pretrained(gradients)
    (ours,) = world.run(logits_in_float64, precise, ranks=1)
    ((compared, worst),) = world.run(compare_gradients, precise, gradients, ranks=1)
    assert compared > 10
    convert(HfSource(weights), HfSink(back))
    config = type(model.config).from_pretrained(back)
    loaded, report = type(model).from_pretrained(back, config=config, output_loading_info=True)
    assert not any(report[x] for x in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    assert json.loads((back / "config.json").read_text())["model_type"] == name
    with torch.no_grad():
        written = loaded.eval()(tokens()).logits
    return Differences(_worst(ours, logits), worst, _worst(written, theirs), texts)


def _worst(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max())


def differing_texts(model: Any, folder: Path) -> int:
    """Return how many greedy texts of a folder differ from those of `transformers`, together and alone."""
    prompts = [tokens()[0, :5].tolist(), tokens()[1, :9].tolist(), tokens()[0, 7:8].tolist()]
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": -1}
    expected = []
    for x in prompts:  # a new model each: the layers of some families keep states of earlier texts
        new = type(model).from_pretrained(folder)
        expected.append(new.generate(torch.tensor([x]), **options)[0, len(x) :].tolist())
    generator = Generator.from_checkpoint(folder, device="cpu", dtype=torch.float32, max_length=24)
    sampling = SamplingOptions(max_tokens=8, ignore_end=True, temperature=0.0)
    together = [x.tokens for x in generator.generate(prompts, sampling)]
    alone = [generator.generate(prompt, sampling)[0].tokens for prompt in prompts]
    destroy_model_parallel()
    return sum(a != x for texts in (together, alone) for a, x in zip(texts, expected, strict=True))


def lines_of(name: str) -> int:
    """Return the number of lines of the file that holds a family's record."""
    file = next(path for path in Path(families.__file__).parent.glob("*.py") if f'Family("{name}"' in path.read_text())
    return len(file.read_text().splitlines())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="FAMILY")
    parser.add_argument("--models", type=int, default=MODELS)
    options = parser.parse_args()
    names = options.names or [*DRAWN]
    print("| family | lines of its file | logits | gradients | written | differing texts |\n|---|---|---|---|---|---|")
    ranks = Ranks()
    for name in names:
        found = []
        for seed in tqdm(range(options.models), desc=name, unit="model", leave=False):
            with tempfile.TemporaryDirectory() as folder:
                found.append(differences(World(ranks, 1), Path(folder), name, seed))
        logits, gradients, written, texts = map(max, zip(*found, strict=True))
        tqdm.write(f"| {name} | {lines_of(name)} | {logits:.1e} | {gradients:.1e} | {written:.1e} | {texts} |")
    ranks.close()


if __name__ == "__main__":
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    main()
