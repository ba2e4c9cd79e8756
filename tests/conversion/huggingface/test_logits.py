"""Our logits against those of `transformers`, for each family, in both directions, in several layouts.

Theirs to ours: a model of theirs is saved by `transformers` itself, and each of our ranks loads its slices from there.
Ours to theirs: our sink writes random weights of ours, and `transformers` loads and runs what it wrote.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor

from megafp8.batch import Batch
from megafp8.checkpoint import Rectangles, collect
from megafp8.config import model_spec
from megafp8.conversion.base import CheckpointSource
from megafp8.conversion.huggingface.sink import HfSink
from megafp8.conversion.huggingface.source import HfSource
from megafp8.conversion.load import load_weights
from megafp8.fp8 import Fp8Manager
from megafp8.layers.context import BuildContext
from megafp8.models.gpt import GPTStage
from megafp8.parallel.collectives import all_gather
from megafp8.parallel.parallel_state import initialize_model_parallel
from megafp8.parallel.tp_overlap import default_overlap
from megafp8.spec import ModelSpec
from tests.conversion.checkpoints import convert
from tests.conversion.families import OURS, SMALL, THEIRS, B, RandomSource, S, V, make_theirs, tokens
from tests.marks import slow_but
from tests.world import World

LAYOUTS = {"tp1": (1, 1), "tp2-sp": (2, 1), "pp2": (1, 2)}
EXPERTS = {"tp2-ep2": (2, 1, 2)}
"""Tensor, pipeline, expert: for models with experts."""


def weights_of_loss() -> Tensor:
    """Those of the logits in a loss, `[b, s, v]`."""
    return torch.randn(B, S, V, generator=torch.Generator().manual_seed(5))


def our_logits(source: CheckpointSource, tp: int, pp: int, ep: int = 1) -> Tensor | None:
    """Logits `[b, s, v]` of `tokens()` by the model in `source` over the ranks of this job; on the last stage."""
    with torch.no_grad():
        return _our_logits(source, tp, pp, ep)[1]


def _our_logits(
    source: CheckpointSource, tp: int, pp: int, ep: int = 1, dtype: torch.dtype = torch.float32
) -> tuple[GPTStage, Tensor | None]:
    """This rank's stage, and the logits on the last one."""
    state = initialize_model_parallel(tp, pp, expert_model_parallel_size=ep)
    model, ids_bs = source.model, tokens()
    context = BuildContext(
        state.tensor.group, Fp8Manager(None, amax_group=None), dtype, state.device, True,
        expert=state.expert.group, expert_overlap=default_overlap(state.expert.group, sequence_parallel=True),
        sequence_group=state.tensor.group,
    )  # fmt: skip
    inside = {cut for reader, source in model.sources.items() for cut in range(source + 1, reader + 1)}
    middle = min({*range(1, model.num_layers)} - inside, key=lambda cut: abs(cut - model.num_layers // 2 - 1))
    stages = [range(model.num_layers)] if pp == 1 else [range(middle), range(middle, model.num_layers)]
    layers, positions = stages[state.pipeline.rank], model.stem.max_position_embeddings or 1
    stage = GPTStage(model, context, layers=layers, positions=positions)
    wanted = collect(stage.parameters(), lambda param: param.detach(), "model.")
    load_weights(source, wanted | {f"model.{name}": Rectangles.whole(x) for name, x in stage.constants.items()})
    b, s = ids_bs.shape
    inputs = stage.layer_inputs(Batch(ids_bs, ids_bs))
    if stage.embedding is not None:
        x_sbh = stage.embedding(ids_bs, None)
        inputs = stage.with_embeddings(inputs, ids_bs, x_sbh)
    else:
        x_sbh = torch.empty(s, b, model.stream_width)
        dist.recv(x_sbh, 0)
    x_sbh, branch_sbh = stage.run_blocks(x_sbh, inputs)
    if stage.head is None:
        dist.send(x_sbh if branch_sbh is None else x_sbh + branch_sbh, 1)
        return stage, None
    logits_sbv = stage.head.logits(x_sbh, branch_sbh)
    logits_sbv = torch.cat(list(all_gather(logits_sbv.unsqueeze(0), state.tensor.group)), -1)
    return stage, logits_sbv.transpose(0, 1)[..., : model.stem.vocab_size].contiguous()


def in_float64(model: Any) -> Any:
    """The model in float64, with experts whose products torch has in this dtype."""
    model.set_experts_implementation("eager")
    return model.double()


def exact_logits(model: Any) -> Tensor:
    """Logits of `tokens()` by a Llama-like model of transformers in float64, also in norms and rotary embedding."""
    config = model.config
    theta, d = config.rope_parameters["rope_theta"], config.hidden_size // config.num_attention_heads
    frequencies = theta ** -(torch.arange(0, d, 2, dtype=torch.float64) / d)

    def rotary(x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        angles = (position_ids[..., None] * frequencies).repeat(1, 1, 2)
        return angles.cos(), angles.sin()

    model.model.rotary_emb.forward = rotary
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            norm = partial(torch.nn.functional.rms_norm, weight=module.weight, eps=config.rms_norm_eps)
            module.forward = partial(norm, normalized_shape=module.weight.shape)
    with torch.no_grad():
        return model(tokens()).logits


def hf_source(path: Path) -> HfSource:
    return HfSource(path, vocab_multiple=8)


def logits_in_float64(path: Path, source: Callable[[Path], CheckpointSource] = hf_source) -> Tensor:
    """Logits `[b, s, v]` of `tokens()` by a folder of the format that `source` opens, in float64 on one rank."""
    with torch.no_grad():
        logits = _our_logits(source(path), 1, 1, dtype=torch.float64)[1]
    assert logits is not None
    return logits


def compare_gradients(weights: Path, gradients: Path) -> tuple[int, float]:
    """Number of our gradients, and the largest difference from those in a folder, relative to a tensor's largest."""
    stage, logits = _our_logits(HfSource(weights, vocab_multiple=8), 1, 1, dtype=torch.float64)
    assert logits is not None
    (logits * weights_of_loss()).sum().backward()
    ours = collect(stage.parameters(), lambda param: param.grad, "model.")
    theirs = collect(stage.parameters(), torch.zeros_like, "model.")
    load_weights(HfSource(gradients, vocab_multiple=8), theirs)
    pairs = [
        (name, mine.view, expected.view)
        for name, shards in theirs.items()
        for mine, expected in zip(ours[name].parts, shards.parts, strict=True)
        if ".index_" not in name  # the indexer of sparse attention, which learns in ours only
    ]
    assert all(expected.any() or ".experts." in name for name, _, expected in pairs), "a weight without a gradient"
    # Gradients of biases of keys without positions are zero but for rounding.
    least = 0.01 * max(expected.abs().max() for _, _, expected in pairs)
    worst = max(
        float((mine - expected).abs().max() / expected.abs().max().clamp(min=least)) for _, mine, expected in pairs
    )
    return len(theirs), worst


def from_folder(path: Path, *layout: int) -> Tensor | None:
    return our_logits(HfSource(path, vocab_multiple=8), *layout)


def _from_random(model: ModelSpec, path: Path, *layout: int) -> Tensor | None:
    return our_logits(RandomSource(model, path), *layout)


def layouts_of(model: ModelSpec, only: str) -> list[tuple[int, ...]]:
    """Return all layouts, or only those of two ranks, which read different slices, if `only` is "several"."""
    in_one_stage = model.stem.per_layer_width or any(x.mixer.kind == "shared_attention" for x in model.layers)
    layouts = [x for x in LAYOUTS.values() if x[1] == 1 or not in_one_stage]
    if model.has_experts:
        layouts = [*layouts, *EXPERTS.values()]
    if only == "several":
        layouts = [x for x in layouts if x != LAYOUTS["tp1"] and (x != LAYOUTS["tp2-sp"] or not model.has_experts)]
    return layouts


def _hold(ours: Tensor, theirs: Tensor) -> None:
    assert theirs.std() > 0.1, "logits that say nothing"
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


GRADIENTS = [
    "olmo-hybrid", "qwen3-next", "qwen3-5", "qwen3-5-35b-a3b",
    "glm4-moe", "olmo3", "smollm3", "minimax-m2", "ernie4-5-moe", "mistral4",
    "gemma4-shared", "gemma4-experts",
    "nanochat", "llama4", "nemotron-h-latents", "deepseek-v32", "deepseek-v4", "glm-moe-dsa", "kimi-linear",
    "lfm2-moe",
]  # fmt: skip
"""Models of theirs whose gradients the quick tests compare."""
ALIKE = {
    "llama2", "llama-biases", "mistral", "qwen2", "qwen3-tied", "qwen2-moe-no-bias", "qwen2-longrope",
    "gemma2-uncapped", "gemma4", "phi3-longrope-short", "gpt-neox-in-turn", "deepseek-v3-tied", "gpt2-untied",
    "llama-tied", "llama-geglu", "qwen2-exact-geglu", "phi3", "deepseek-v2-lite",
    "glm4-moe-plain", "mistral4-no-latent", "nanochat-tied", "llama4-plain", "smollm3-windows", "ernie4-5-moe-untied",
    "kimi-linear-groups", "olmo-hybrid-rope",
    "nemotron-h-dense", "nemotron-h", "bamba", "granite-hybrid-dense", "glm-moe-dsa",
}  # fmt: skip
"""Models of which the quick tests have others that differ from them in little."""


ONE_RANK = {"smollm3", "ernie4-5-moe", "glm4-moe", "minimax-m2", "olmo3", "qwen3-5", "deepseek-v32"}
"""Models whose weights lie in a folder as those of others do; test_gradients compares them, on one rank."""


@pytest.mark.parametrize(
    ("name", "only"),
    slow_but(
        [(name, only) for name in THEIRS for only in ("all", "several")],
        *((name, "several") for name in THEIRS if name not in ALIKE | ONE_RANK),
    ),
)
def test_theirs_to_ours(world2: World, tmp_path: Path, name: str, only: str) -> None:
    model = make_theirs(name)
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        theirs = model(tokens()).logits
    for layout in layouts_of(HfSource(tmp_path, vocab_multiple=8).model, only):
        _hold(world2.run(from_folder, tmp_path, *layout, ranks=layout[0] * layout[1])[-1], theirs)


def _alibi_slopes(heads: int) -> list[float]:
    """As in Baichuan-13B's code: of a power of two, and every second one of the next."""
    first = 2 ** -(2 ** -(math.log2(heads) - 3))
    if math.log2(heads).is_integer():
        return [first ** (i + 1) for i in range(heads)]
    closest = 2 ** math.floor(math.log2(heads))
    return _alibi_slopes(closest) + _alibi_slopes(2 * closest)[0::2][: heads - closest]


def _baichuan_logits(folder: Path, ids_bs: Tensor) -> Tensor:
    """What Baichuan-7B (rope) or 13B (ALiBi) computes from a folder: in float64, from its published code."""
    config = json.loads((folder / "config.json").read_text())
    w = {name: x.double() for file in folder.glob("*.safetensors") for name, x in load_file(file).items()}
    heads, s = config["num_attention_heads"], ids_bs.shape[1]
    causal = torch.full((s, s), -math.inf, dtype=torch.float64).triu(1)
    i_s, d = torch.arange(s).double(), config["hidden_size"] // heads
    bias = causal.expand(heads, s, s)
    if "model_max_length" in config:
        bias = causal + torch.tensor(_alibi_slopes(heads), dtype=torch.float64)[:, None, None] * i_s
    angles = torch.outer(i_s, 10000.0 ** (-torch.arange(0, d, 2).double() / d)).repeat(1, 2)

    def norm(x: Tensor, name: str) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + config["rms_norm_eps"]) * w[f"{name}.weight"]

    def rotated(x: Tensor) -> Tensor:
        turned = torch.cat([-x[..., d // 2 :], x[..., : d // 2]], -1)
        return x if "model_max_length" in config else x * angles.cos() + turned * angles.sin()

    x = w["model.embed_tokens.weight"][ids_bs]
    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}"
        packed = norm(x, f"{name}.input_layernorm") @ w[f"{name}.self_attn.W_pack.weight"].T
        q, k, v = (y.unflatten(-1, (heads, d)).transpose(1, 2) for y in packed.chunk(3, -1))
        scores = rotated(q) @ rotated(k).transpose(-1, -2) / math.sqrt(d) + bias
        attended = (scores.softmax(-1) @ v).transpose(1, 2).flatten(-2)
        x = x + attended @ w[f"{name}.self_attn.o_proj.weight"].T
        normed = norm(x, f"{name}.post_attention_layernorm")
        gate, up = (normed @ w[f"{name}.mlp.{part}_proj.weight"].T for part in ("gate", "up"))
        x = x + (gate * gate.sigmoid() * up) @ w[f"{name}.mlp.down_proj.weight"].T
    return (norm(x, "model.norm") @ w["lm_head.weight"].T).float()


@pytest.mark.parametrize("name", slow_but(THEIRS, *GRADIENTS))
def test_gradients(world2: World, tmp_path: Path, name: str) -> None:
    """Theirs are saved as weights are, so that conversion gives each of ours its own. In float64."""
    model = in_float64(make_theirs(name))
    model.save_pretrained(tmp_path / "weights")
    (model(tokens()).logits * weights_of_loss()).sum().backward()
    for x in [*model.parameters(), *model.buffers()]:
        x.data = torch.zeros_like(x) if x.grad is None else x.grad
    model.save_pretrained(tmp_path / "gradients")
    compared, worst = world2.run(compare_gradients, tmp_path / "weights", tmp_path / "gradients", ranks=1)[0]
    assert compared > 10
    assert worst < 1e-5


WRITTEN = ["llama4", "gpt2", "phi3-longrope"]
"""Families of which the quick tests write a folder for transformers; test_hf_files writes back one of each."""


@pytest.mark.parametrize("position_embedding", ["rope", "alibi"])
def test_baichuan(world2: World, tmp_path: Path, position_embedding: str) -> None:
    """transformers has no such model. The folder of the one with rope is that of a Llama, packed."""
    model = model_spec(OURS["baichuan"][1] | {"position_embedding": position_embedding})
    folder = tmp_path / "theirs"
    convert(RandomSource(model, tmp_path), HfSink(folder))
    if position_embedding == "rope":
        weights = load_file(folder / "model.safetensors")
        for layer in range(model.num_layers):
            parts = [weights.pop(f"model.layers.{layer}.self_attn.{x}_proj.weight") for x in "qkv"]
            weights[f"model.layers.{layer}.self_attn.W_pack.weight"] = torch.cat(parts)
        save_file(weights, folder / "model.safetensors")
        sizes = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
        llama = json.loads((folder / "config.json").read_text())
        kept = {key: llama[key] for key in (*sizes, "rms_norm_eps")}
        named = {"model_type": "baichuan", "architectures": ["BaiChuanForCausalLM"], "max_position_embeddings": 64}
        (folder / "config.json").write_text(json.dumps(kept | named))
    theirs = _baichuan_logits(folder, tokens())
    for layout in LAYOUTS.values():
        _hold(world2.run(from_folder, folder, *layout, ranks=layout[0] * layout[1])[-1], theirs)
    _hold(world2.run(_from_random, model, tmp_path, 1, 1, ranks=1)[-1], theirs)


@pytest.mark.parametrize("name", slow_but([name for name in OURS if name != "baichuan"], *WRITTEN))
def test_ours_to_theirs(world2: World, tmp_path: Path, name: str) -> None:
    import transformers

    family, options = OURS[name]
    model = model_spec(options)
    convert(RandomSource(model, tmp_path), HfSink(tmp_path / "hf", file_bytes=20_000))
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) > 1
    # transformers 5.24 lists no causal language model of mistral4 alone.
    kind = transformers.Mistral4ForCausalLM if family == "mistral4" else transformers.AutoModelForCausalLM
    loaded, report = kind.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert loaded.config.model_type == family
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.no_grad():
        theirs = loaded(tokens()).logits
    assert theirs.shape[-1] == SMALL["vocab_size"]
    for layout in layouts_of(model, "all"):
        _hold(world2.run(_from_random, model, tmp_path, *layout, ranks=layout[0] * layout[1])[-1], theirs)
    prompt = tokens()[:1, :4]
    generated = loaded.generate(prompt, max_new_tokens=3, min_new_tokens=3, do_sample=False)
    with torch.no_grad():  # not theirs[0, 3]: longrope depends on the length
        assert generated[0, 4] == loaded(prompt).logits[0, 3].argmax()
    assert generated.shape == (1, 7)
