"""Gemma 2 and 3, and VaultGemma, which is Gemma 2 without norms of the outputs of attention and MLP."""

from megafp8.conversion.huggingface import traits
from megafp8.conversion.huggingface.families import Family
from megafp8.conversion.huggingface.layers import full_every, windows
from megafp8.conversion.huggingface.names import OUTPUT_NORMS, like_llama
from megafp8.conversion.huggingface.rope import rope, ropes_by_type
from megafp8.conversion.keys import ConfigKey, Fields, HfConfig, Trait, aliases, always, only, same


def _read_embedding_multiplier(hf: HfConfig) -> Fields:
    hidden = hf.get("hidden_size")  # another trait refuses it if it is not a number
    return {"embedding_multiplier": hidden**0.5} if isinstance(hidden, int) else {}


def _softcaps(attention: float | None, logits: float | None) -> Trait:
    return same(
        attention_softcap=ConfigKey("attn_logit_softcapping", attention, nullable=True),
        logit_softcap=ConfigKey("final_logit_softcapping", logits, nullable=True),
    )


EMBEDDING_MULTIPLIER = Trait((), _read_embedding_multiplier)
_GEMMA = (
    *traits.RMSNORM_MODEL,
    traits.POSITIONS,
    traits.TIED,
    traits.activation("hidden_activation", "gelu_pytorch_tanh"),
    same(num_query_groups=("num_key_value_heads", 4), head_dim=("head_dim", 256), norm_eps=("rms_norm_eps", 1e-6)),
    aliases(hidden_act="hidden_activation"),
    always(norm_position="both", zero_centered_gamma=True),
    EMBEDDING_MULTIPLIER,
    Trait(
        ("query_pre_attn_scalar",),
        lambda hf: {"attention_scale": hf.get("query_pre_attn_scalar", 256) ** -0.5},
        lambda ours: {"query_pre_attn_scalar": round(ours["attention_scale"] ** -2)},
    ),
    only(attention_bias=False),
    traits.HEADS_DIVIDE,
)
_GEMMA3_INTERVAL = ("sliding_window_pattern", "_sliding_window_pattern")
_GEMMA3_LAYERS = full_every(6, *_GEMMA3_INTERVAL)
_MLP_NORM = {"mlp_norm": "pre_feedforward_layernorm"}
_NAMES = like_llama(OUTPUT_NORMS, _MLP_NORM)
FAMILIES = (
    Family("gemma2", "Gemma2ForCausalLM", (
        *_GEMMA, rope(1e4), _softcaps(50.0, 30.0), windows(4096, full_every(2)),
        aliases(sliding_window_size="sliding_window"), only(written=False, use_bidirectional_attention=None),
    ), _NAMES, rank=2,
        about="Gemma 2, with or without soft caps",
    ),
    Family("gemma3_text", "Gemma3ForCausalLM", (
        *_GEMMA, ropes_by_type(_GEMMA3_LAYERS, 1e6, "rope_local_base_freq", nested=False), always(qk_norm=True),
        _softcaps(None, None), windows(4096, _GEMMA3_LAYERS, *_GEMMA3_INTERVAL),
        only(written=False, use_bidirectional_attention=False),
    ), _NAMES, rank=2,
        about="Gemma 3; `gemma3`, with images, is refused",
    ),
    Family("vaultgemma", "VaultGemmaForCausalLM", (
        *_GEMMA, always(norm_position="pre"), rope(1e4), _softcaps(50.0, 30.0), windows(4096, full_every(2)),
    ), like_llama(_MLP_NORM), rank=4,
        about="VaultGemma",
    ),
)  # fmt: skip
