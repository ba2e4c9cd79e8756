"""GPT-Neo, which is GPT-2 with windows in some layers, unscaled scores, and no biases of queries, keys and values."""

from megafp8.conversion.base import refuse
from megafp8.conversion.huggingface import traits
from megafp8.conversion.huggingface.families import Family
from megafp8.conversion.huggingface.names import TensorNames, in_layers
from megafp8.conversion.keys import Fields, HfConfig, Keys, Trait, aliases, always, same

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
    ), TensorNames({
        "embedding.word": "transformer.wte", "embedding.position": "transformer.wpe",
        "final_norm": "transformer.ln_f", "output": "lm_head", **in_layers("transformer.h.*", _LAYER),
    }), rank=5,
        about="GPT-Neo",
    ),
)  # fmt: skip
