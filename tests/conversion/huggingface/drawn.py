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
from tests.conversion.huggingface.test_logits import compare_gradients, from_folder, weights_of_loss
from tests.world import Ranks, World

MODELS = 10
"""Number of random models of a family."""


class Family(NamedTuple):
    """Small models of a family.

    Attributes:
        kind: Name of the classes in `transformers` without ForCausalLM and Config.
        keys: Keys of config.json that all models have.
        choices: Values of further keys, one of which is drawn for each model. A tuple of keys has tuples of values.
        norms: Mean of the weights of norms: 0 if a norm multiplies by its weight plus one.
    """

    kind: str
    keys: dict[str, Any]
    choices: Mapping[Any, tuple[Any, ...]]
    norms: float = 1.0


SIZES: dict[str, tuple[Any, ...]] = {
    "num_hidden_layers": (2, 3, 4), "hidden_size": (32, 48), "intermediate_size": (48, 40),
    "num_key_value_heads": (1, 2, 4), "tie_word_embeddings": (False, True),
}  # fmt: skip
"""Choices of most families."""
ROPE = {"rope_parameters": ({"rope_type": "default", "rope_theta": 500.0}, {"rope_type": "default", "rope_theta": 1e4})}
BLOCKS: dict[str, tuple[Any, ...]] = SIZES | {
    "num_attention_heads": (4, 8), "hidden_act": ("silu", "gelu_pytorch_tanh"), "rms_norm_eps": (1e-5, 1e-2),
}  # fmt: skip
"""Choices of families like Llama."""
SOME_WINDOWS = {
    "num_hidden_layers": (3,), "sliding_window": (5, 3),
    "layer_types": (
        ["sliding_attention", "full_attention", "sliding_attention"],
        ["full_attention", "sliding_attention", "full_attention"], ["sliding_attention"] * 3, ["full_attention"] * 3,
    ),
}  # fmt: skip
SCALED_YARN = {
    "rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 4,
    "llama_4_scaling_beta": 0.5,
}  # fmt: skip
DRAWN: dict[str, Family] = {
    "glm4": Family("Glm4", LLAMA | {"head_dim": 8}, SIZES | {"attention_bias": (False, True)}),
    "ministral3": Family("Ministral3", LLAMA, BLOCKS | {  # small, because theirs in fp32 is off by 1e-5 in larger ones
        "num_hidden_layers": (2, 3), "hidden_size": (32,), "head_dim": (8, 16), "sliding_window": (None, 5),
        "rope_parameters": (
            SCALED_YARN, SCALED_YARN | {"mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 2.0, "beta_slow": 0.5},
            SCALED_YARN | {"original_max_position_embeddings": 3, "llama_4_scaling_beta": 0.1, "mscale": 1.0},
        ),
    }),
    "seed_oss": Family("SeedOss", LLAMA, BLOCKS | ROPE | {
        "head_dim": (8, 16),
        ("attention_bias", "attention_out_bias", "mlp_bias"): ((False,) * 3, (True,) * 3, (True, False, False)),
    }),
    "exaone4": Family("Exaone4", LLAMA, BLOCKS | ROPE | SOME_WINDOWS),
    "hunyuan_v1_dense": Family("HunYuanDenseV1", LLAMA, BLOCKS | {
        "num_hidden_layers": (2, 3), "hidden_size": (32,), "head_dim": (8, 16),
        "rope_parameters": (
            {"rope_type": "default", "rope_theta": 500.0}, {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0},
            {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 1.0, "alpha": 20.0, "mscale": 1.0, "beta_fast": 32},
        ),
    }),
    "internlm3": Family("InternLM3", LLAMA, BLOCKS | ROPE | {
        "head_dim": (8, 16), ("attention_bias", "mlp_bias"): ((False, False), (True, True)),
    }),
    "granite_swa": Family("GraniteSWA", LLAMA, BLOCKS | ROPE | SOME_WINDOWS | {
        "layer_rope_theta": (None, [500.0, 0, 1e4], [0, 0, 300.0]), "embedding_multiplier": (1.0, 3.0),
        "residual_multiplier": (1.0, 0.4), "attention_multiplier": (0.5, 0.3), "logits_scaling": (1.0, 2.0),
        ("attention_bias", "mlp_bias"): ((False, False), (True, True)),
    }),
    "granitemoeshared": Family("GraniteMoeShared", LLAMA, BLOCKS | ROPE | {
        "num_local_experts": (4, 6), "num_experts_per_tok": (2, 3), "shared_intermediate_size": (0, 40),
        "embedding_multiplier": (1.0, 3.0), "residual_multiplier": (1.0, 0.4), "attention_multiplier": (0.5, 0.3),
        "logits_scaling": (1.0, 2.0),
    }),
    "vaultgemma": Family("VaultGemma", LLAMA, SIZES | ROPE | SOME_WINDOWS | {
        "hidden_activation": ("gelu_pytorch_tanh", "gelu"), "rms_norm_eps": (1e-5, 1e-2), "head_dim": (8, 16),
        "query_pre_attn_scalar": (8, 24), "attn_logit_softcapping": (None, 2.0), "final_logit_softcapping": (None, 3.0),
    }, norms=0.0),
    "ministral": Family("Ministral", LLAMA, BLOCKS | ROPE | SOME_WINDOWS | {"head_dim": (8, 16)}),
}  # fmt: skip
_MAMBA = {"vocab_size": 101, "pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2}
_MAMBA_CHOICES: dict[str, tuple[Any, ...]] = {
    "num_hidden_layers": (2, 3, 4), "hidden_size": (32, 48), "tie_word_embeddings": (False, True), "expand": (1, 2, 3),
    "state_size": (4, 7), "conv_kernel": (2, 4), "use_conv_bias": (False, True), "use_bias": (False, True),
    "time_step_rank": ("auto", 5), "layer_norm_epsilon": (1e-5, 1e-2),
}  # fmt: skip
_FALCON_CHOICES = {"mixer_rms_eps": (1e-6, 1e-2), "expand": (16,), "intermediate_size": (40, 64)}
_JAMBA_CHOICES: dict[str, tuple[Any, ...]] = {
    "num_experts": (1, 4, 6), "num_experts_per_tok": (1, 2), "attn_layer_period": (2, 3), "attn_layer_offset": (0, 1),
    "expert_layer_period": (2, 3), "expert_layer_offset": (0, 1), "mamba_expand": (1, 2), "mamba_d_state": (4, 7),
    "mamba_d_conv": (2, 4), "mamba_conv_bias": (False, True), "mamba_proj_bias": (False, True),
    "mamba_dt_rank": ("auto", 5), "rms_norm_eps": (1e-5, 1e-2),
}  # fmt: skip
DRAWN: dict[str, Family] = {
    "glm4": Family("Glm4", LLAMA | {"head_dim": 8}, SIZES | {"attention_bias": (False, True)}),
    "mamba": Family("Mamba", _MAMBA, _MAMBA_CHOICES),
    "falcon_mamba": Family("FalconMamba", _MAMBA, _MAMBA_CHOICES | _FALCON_CHOICES),
    "jamba": Family("Jamba", LLAMA, SIZES | _JAMBA_CHOICES),
}
"""Families by model_type."""


def drawn_keys(name: str, seed: int) -> dict[str, Any]:
    """Return the keys of config.json of a random model of a family."""
    random, family = Random(f"{name} {seed}"), DRAWN[name]
    drawn = {key: random.choice(values) for key, values in family.choices.items()}
    return family.keys | drawn.pop("", {}) | drawn


class Differences(NamedTuple):
    """Largest differences of a random model from `transformers`.

    Attributes:
        logits: Absolute difference of the logits in fp32.
        gradients: Difference of a weight's gradient, relative to the largest value of the gradient.
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
    weights, gradients, back = folder / "weights", folder / "gradients", folder / "back"
    model.save_pretrained(weights)
    logits = model(tokens()).logits
    theirs = logits.detach()
    assert theirs.std() > 0.1, "logits that say nothing"
    texts = differing_texts(model, weights)
    (logits * weights_of_loss()).sum().backward()
    for x in [*model.parameters(), *model.buffers()]:
        x.data = torch.zeros_like(x) if x.grad is None else x.grad
    model.save_pretrained(gradients)
    (ours,) = world.run(from_folder, weights, 1, 1, ranks=1)
    ((compared, worst),) = world.run(compare_gradients, weights, gradients, ranks=1)
    assert compared > 10
    convert(HfSource(weights), HfSink(back))
    config = type(model.config).from_pretrained(back)
    loaded, report = type(model).from_pretrained(back, config=config, output_loading_info=True)
    assert not any(report[x] for x in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    assert json.loads((back / "config.json").read_text())["model_type"] == name
    with torch.no_grad():
        written = loaded.eval()(tokens()).logits
    return Differences(_worst(ours, theirs), worst, _worst(written, theirs), texts)


def _worst(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max())


def differing_texts(model: Any, folder: Path) -> int:
    """Return how many greedy texts of a folder differ from those of `transformers`, together and alone."""
    prompts = [tokens()[0, :5].tolist(), tokens()[1, :9].tolist(), tokens()[0, 7:8].tolist()]
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": -1}
    expected = [model.generate(torch.tensor([x]), **options)[0, len(x) :].tolist() for x in prompts]
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
