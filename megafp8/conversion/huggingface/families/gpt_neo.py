"""GPT-Neo, GPT-J and CodeGen, which have GPT-2's names of tensors outside the layers.

GPT-Neo is GPT-2 with windows in some layers, unscaled scores, and no biases of queries, keys and values. GPT-J and
CodeGen have attention and MLP in parallel with one norm, and biases in MLPs and in the output layer.
"""

import torch

from megafp8.conversion.base import refuse
from megafp8.conversion.huggingface import traits
from megafp8.conversion.huggingface.families import Family
from megafp8.conversion.huggingface.families.gpt2 import gpt2_like, gpt2_names
from megafp8.conversion.huggingface.names import Names, Rows, TensorNames, fused
from megafp8.conversion.huggingface.rope import rotary_fraction
from megafp8.conversion.keys import Fields, HfConfig, Keys, Trait, aliases, always, check, only, same

_TYPES, _LAYERS, _WINDOW = "attention_types", "attention_layers", "window_size"


def _read_windows(hf: HfConfig) -> Fields:
    """Read the kinds of layers, which are given as lists of kinds with the number of times that each list repeats."""
    runs, layers = hf.get(_TYPES) or [[["global", "local"], 12]], hf.get("num_layers")
    if sum(len(kinds) * max(count, 0) for kinds, count in runs) != layers:
        refuse(_TYPES, runs, f"one kind for each of num_layers ({layers})")
    kinds = [kind for kinds, count in runs for _ in range(count) for kind in kinds]
    if not {*kinds} <= {"global", "local"}:
        refuse(_TYPES, runs, "global, local")
    if hf.get(_LAYERS, kinds) != kinds:
        refuse(_LAYERS, hf[_LAYERS], f"the kinds in {_TYPES}")
    return {"mixer.sliding_window": [hf.get(_WINDOW, 256) if kind == "local" else None for kind in kinds]}


def _write_windows(ours: Fields) -> Keys:
    windows = ours["mixer.sliding_window"]
    kinds = ["global" if window is None else "local" for window in windows]
    return {_TYPES: [[kinds, 1]], _WINDOW: max((x for x in windows if x is not None), default=256)}


_LAYER = {
    "attention_norm": "ln_1", **{f"attention.{x}": f"attn.attention.{x}_proj" for x in "qkv"}, "mlp_norm": "ln_2",
    "attention.proj": "attn.attention.out_proj", "mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj",
}  # fmt: skip


def _read_rotary(hf: HfConfig) -> Fields:
    dim, width = hf.get("rotary_dim", 64), hf["n_embd"] // hf["n_head"]
    if not isinstance(dim, int) or not 0 < dim <= width:
        refuse("rotary_dim", dim, f"a number of channels of a head ({width})")
    return {"partial_rotary_factor": rotary_fraction(dim, width)}


def _check_width(hf: HfConfig) -> None:
    if hf["n_embd"] % 4:
        refuse("n_embd", hf["n_embd"], "a multiple of 4, the number of parts in which q, k and v are stored")


def _by_quarter(part: int) -> Rows:
    """Return the rows of a part, if each quarter of the queries is stored before a quarter of values and of keys."""
    return lambda mixer, n: (torch.arange(3 * n).view(4, 3, -1)[:, part].flatten(), 3 * n)


_GPTJ = (
    *gpt2_like(2048, dropout=0.0), traits.UNTIED,
    always(normalization="layernorm", parallel_block="shared_norm", linear_bias="mlp", output_bias=True),
    Trait(
        ("rotary_dim",), _read_rotary,
        lambda ours: {"rotary_dim": round(ours["head_dim"] * ours["partial_rotary_factor"])},
    ),
    only(written=False, rotary=True, scale_attn_weights=True),
)  # fmt: skip


def _gptj_names(qkv: Names) -> TensorNames:
    layer = {"attention.proj": "attn.out_proj", "mlp.up": "mlp.fc_in", "mlp.down": "mlp.fc_out", "shared_norm": "ln_1"}
    return gpt2_names(qkv, layer, rotation="neighbors")


_QVK = ("attention.q", "attention.v", "attention.k")

FAMILIES = (
    Family("gpt_neo", "GPTNeoForCausalLM", (
        same(
            num_layers="num_layers", hidden_size="hidden_size", num_attention_heads="num_heads",
            ffn_hidden_size=("intermediate_size", None), vocab_size="vocab_size",
            max_position_embeddings=("max_position_embeddings", 2048), norm_eps=("layer_norm_epsilon", 1e-5),
            attention_dropout=("attention_dropout", 0.0), hidden_dropout=("resid_dropout", 0.0),
        ),
        Trait(("embed_dropout",), write=lambda ours: {"embed_dropout": ours["hidden_dropout"]}),
        aliases(num_hidden_layers="num_layers", num_attention_heads="num_heads"),
        Trait((_TYPES, _LAYERS, _WINDOW), _read_windows, _write_windows),
        traits.TIED, traits.INIT_STD, traits.activation("activation_function", "gelu_new", gated=False),
        always(position_embedding="learned", normalization="layernorm", attention_scale=1.0),
        always(linear_bias="mlp", proj_bias=True),
    ), gpt2_names(_LAYER), rank=5,
        about="GPT-Neo",
    ),
    Family("gptj", "GPTJForCausalLM", _GPTJ, _gptj_names({f"attention.{x}": f"attn.{x}_proj" for x in "qkv"}),
        about="GPT-J",
    ),
    Family("codegen", "CodeGenForCausalLM", (*_GPTJ, check(_check_width)),
           _gptj_names(fused("attn.qkv_proj", _by_quarter, _QVK)),
        about="CodeGen",
    ),
)  # fmt: skip
