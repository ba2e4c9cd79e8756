"""MiniCPM3, with latent attention and scaled embeddings, residual branches and logits, without experts."""

import math

from megafp8.config import LatentMixerConfig
from megafp8.conversion.huggingface import traits
from megafp8.conversion.huggingface.families import Family
from megafp8.conversion.huggingface.families.deepseek import LATENT_HEADS, LATENT_LAYERS, latent_norms, latent_widths
from megafp8.conversion.huggingface.layers import num_layers
from megafp8.conversion.huggingface.names import HfPlace, like_llama, rotated_last, usual
from megafp8.conversion.huggingface.rope import rope
from megafp8.conversion.keys import Fields, HfConfig, Keys, Trait, only, same


def _read_scales(hf: HfConfig) -> Fields:
    width, depth, base = hf["hidden_size"], hf.get("scale_depth", 1.4), hf.get("dim_model_base", 256)
    return {
        "residual_multiplier": 1.0 if depth is None else depth / math.sqrt(num_layers(hf)),
        "logits_scaling": 1.0 if base is None else width / base,
        "latent_attention.value_head_dim": hf.get("v_head_dim") or width // hf["num_attention_heads"],
    }


def _write_scales(ours: Fields) -> Keys:
    root, factor = math.sqrt(ours["num_layers"]), ours["residual_multiplier"]
    depths = (float(f"{factor * root:.12g}"), factor * root, math.nextafter(factor * root, 0))
    return {
        "scale_depth": next((depth for depth in depths if depth / root == factor), depths[1]),
        "dim_model_base": round(ours["hidden_size"] / ours["logits_scaling"]),
    }


_HEADS, _LATENT = rotated_last(lambda mixer, n: mixer.channels), rotated_last(lambda mixer, n: n)
FAMILIES = (
    Family("minicpm3", "MiniCPM3ForCausalLM", (
        *LATENT_LAYERS, traits.TIED, rope(1e4), only(mlp_bias=False), traits.HEADS_DIVIDE,
        same(embedding_multiplier=("scale_emb", 12)), *latent_norms(1e-5),
        latent_widths(q_lora_rank=768, kv_lora_rank=256, qk_nope_head_dim=64, qk_rope_head_dim=32, v_head_dim=None),
        Trait(("scale_depth", "dim_model_base", "v_head_dim"), _read_scales, _write_scales),
        LATENT_HEADS,
    ), like_llama(usual(LatentMixerConfig), {
        "attention.q": HfPlace("self_attn.q_proj", _HEADS), "attention.q_up": HfPlace("self_attn.q_b_proj", _HEADS),
        "attention.kv_down": HfPlace("self_attn.kv_a_proj_with_mqa", _LATENT),
    }), latent=True, rank=6,
        about="MiniCPM3",
    ),
)  # fmt: skip
