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
        choices: Values of further keys, one of which is drawn for each model. A choice of several keys together has
            their names, separated by spaces, and tuples of their values.
        norms: Mean of the weights of norms: 0 if a norm multiplies by its weight plus one.
    """

    kind: str
    keys: dict[str, Any]
    choices: dict[str, tuple[Any, ...]]
    norms: float = 1.0


SIZES: dict[str, tuple[Any, ...]] = {
    "num_hidden_layers": (2, 3, 4), "hidden_size": (32, 48), "intermediate_size": (48, 40),
    "num_key_value_heads": (1, 2, 4), "tie_word_embeddings": (False, True),
}  # fmt: skip
"""Choices of most families."""
ROPE = {"rope_parameters": ({"rope_type": "default", "rope_theta": 500.0}, {"rope_type": "default", "rope_theta": 1e4})}
LFM2_DENSE = {key: x for key, x in LLAMA.items() if key != "rms_norm_eps"}
MINICPM3 = {key: DEEPSEEK[key] for key in (*LLAMA, "kv_lora_rank", "qk_nope_head_dim")}
AXK1 = {key: x for key, x in DEEPSEEK.items() if key not in ("first_k_dense_replace", "num_nextn_predict_layers")}
DRAWN: dict[str, Family] = {
    "glm4": Family("Glm4", LLAMA | {"head_dim": 8}, SIZES | {"attention_bias": (False, True)}),
    "iquestcoder": Family("IQuestCoder", LLAMA, SIZES | {
        "attention_bias mlp_bias": ((False, False), (True, True)), "head_dim": (8, 16), "rms_norm_eps": (1e-5, 1e-3),
        "hidden_act": ("silu", "gelu"), "rope_parameters": (*ROPE["rope_parameters"], YARN_ROPE),
        "hidden_size": (32, 40),
    }),
    "flex_olmo": Family("FlexOlmo", LLAMA, SIZES | ROPE | {
        "num_experts": (4, 7), "num_experts_per_tok": (1, 3), "norm_topk_prob": (False, True),
        "rms_norm_eps": (1e-6, 1e-3),
    }),
    "hy_v3": Family("HYV3", EXPERTS, SIZES | ROPE | {
        "head_dim": (8, 12), "num_experts": (4, 8), "num_experts_per_tok": (1, 3), "num_shared_experts": (1, 2),
        "router_scaling_factor": (1.0, 2.8), "mlp_layer_types": (None, ["sparse", "dense", "sparse"]),
        "num_hidden_layers": (3,), "enable_moe_fp32_combine": (False, True), "rms_norm_eps": (1e-5, 1e-3),
    }),
    "mellum": Family("Mellum", EXPERTS, SIZES | {
        "head_dim": (8, 12), "num_experts": (4, 8), "num_experts_per_tok": (1, 3), "norm_topk_prob": (False, True),
        "num_hidden_layers": (4,), "sliding_window": (5, 8), "mlp_layer_types": (None, ["sparse", "dense"] * 2),
        "layer_types": (
            None, ["sliding_attention"] * 4, ["sliding_attention", "full_attention"] * 2,
            ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
        ),
        "rope_parameters": (
            None, {"full_attention": YARN_ROPE, "sliding_attention": {"rope_type": "default", "rope_theta": 100.0}},
            {
                "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0},
                "sliding_attention": {"rope_type": "proportional", "rope_theta": 100.0, "partial_rotary_factor": 0.5},
            },
        ),
    }),
    "lfm2": Family("Lfm2", LFM2_DENSE, SIZES | ROPE | {
        "layer_types": (["conv", "full_attention", "conv"], ["full_attention"] * 3, ["conv", "conv", "full_attention"]),
        "num_hidden_layers": (3,), "conv_L_cache": (2, 3, 5), "block_auto_adjust_ff_dim": (False, True),
        "block_multiple_of": (8, 32), "block_ffn_dim_multiplier": (1.0, 1.5), "norm_eps": (1e-5, 1e-3),
        "hidden_size": (24, 32),
    }),
    "lfm3": Family("Lfm3", LFM2_DENSE, SIZES | {
        "layer_types": (
            None, ["conv", "sliding_attention", "full_attention", "conv"], ["full_attention", "sliding_attention"] * 2,
        ),
        "num_hidden_layers": (4,), "conv_L_cache": (2, 7), "sliding_window": (5, 8), "head_dim": (8, 16),
        "use_sandwich_norm": (False, True), "use_attention_gate": (False, True), "norm_eps": (1e-5, 1e-3),
        "rope_parameters": (
            None, {
                "full_attention": {"rope_type": "proportional", "rope_theta": 500.0, "partial_rotary_factor": 0.25},
                "sliding_attention": YARN_ROPE,
            },
        ),
    }),
    "axk1": Family("AXK1", AXK1, SIZES | {
        "num_key_value_heads": (4,), "num_hidden_layers": (3,), "n_group topk_group": ((1, 1), (4, 2)),
        "n_shared_experts": (1, 2), "mlp_layer_types": (None, ["sparse", "dense", "sparse"]),
        "norm_topk_prob": (False, True), "rms_norm_eps": (1e-6, 1e-3), "routed_scaling_factor": (1.0, 2.5),
        "v_head_dim": (6, 12), "rope_parameters": (*ROPE["rope_parameters"], YARN_OF_ALL),
    }),
    "sarvam_moe": Family("SarvamMoE", GLM4_MOE, SIZES | ROPE | {
        "head_dim": (8, 16), "n_routed_experts": (4, 8), "n_shared_experts": (1, 2), "use_qk_norm": (False, True),
        "attention_bias": (False, True), "first_k_dense_replace": (0, 1), "norm_topk_prob": (False, True),
        "partial_rotary_factor": (0.5, 1.0), "n_group": (1, 2), "routed_scaling_factor": (1.0, 1.5),
        "num_hidden_layers": (2, 3),
    }),
    "sarvam_mla": Family("SarvamMLA", DEEPSEEK, SIZES | {
        "num_key_value_heads": (None,), "q_lora_rank": (None, 20), "n_group topk_group": ((1, 1), (4, 2)),
        "n_shared_experts": (1, 2), "first_k_dense_replace": (0, 1), "norm_topk_prob": (False, True),
        "rms_norm_eps": (1e-6, 1e-3), "routed_scaling_factor": (1.0, 2.5), "v_head_dim": (6, 12),
        "rope_parameters": (*ROPE["rope_parameters"], YARN_OF_ALL),
    }),
    "minicpm3": Family("MiniCPM3", MINICPM3, SIZES | {
        "q_lora_rank": (None, 20), "v_head_dim": (None, 6), "qk_rope_head_dim": (4, 8), "scale_emb": (1, 12),
        "num_key_value_heads": (4,), "scale_depth": (None, 1.4), "dim_model_base": (None, 16),
        "rms_norm_eps": (1e-5, 1e-3), "rope_parameters": (*ROPE["rope_parameters"], YARN_OF_ALL),
    }),
}  # fmt: skip
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
