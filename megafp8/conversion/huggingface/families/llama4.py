"""Llama 4's language model."""

from megafp8.conversion.base import refuse
from megafp8.conversion.huggingface import traits
from megafp8.conversion.huggingface.families import Family
from megafp8.conversion.huggingface.layers import FULL, layer_types, num_layers, without_rotary
from megafp8.conversion.huggingface.names import like_llama, stacked_experts
from megafp8.conversion.huggingface.rope import rope
from megafp8.conversion.keys import Fields, HfConfig, Keys, Trait, always, flag, only, same, unread

CHUNKED = "chunked_attention"
_NO_ROPE = without_rotary(4)
_QUERY_SCALING = ("attn_temperature_tuning", "floor_scale", "attn_scale")


def _read_chunks(hf: HfConfig) -> Fields:
    """Read the attention chunk of each layer. Without layer_types, layers with rotary embedding have chunks."""
    chunk, types = hf.get("attention_chunk_size", 8192), layer_types(hf, (FULL, CHUNKED))
    if types is None:
        positions = _NO_ROPE.read(hf)["mixer.position_embedding"]
        types = [CHUNKED if x == "rope" and chunk is not None else FULL for x in positions]
    elif chunk is None and CHUNKED in types:
        refuse("attention_chunk_size", None, f"a number of tokens, because layer_types has {CHUNKED}")
    return {"mixer.attention_chunk": [chunk if kind == CHUNKED else None for kind in types]}


def _write_chunks(ours: Fields) -> Keys:
    chunks = ours["mixer.attention_chunk"]
    written = {"attention_chunk_size": next((x for x in chunks if x is not None), None)}
    return written | {"layer_types": [FULL if x is None else CHUNKED for x in chunks]}


def _read_heads(hf: HfConfig) -> Fields:
    """Read norms of queries and keys, in layers with rotary embedding, and the scaling of queries in other layers."""
    rotates = [x == "rope" for x in _NO_ROPE.read(hf)["mixer.position_embedding"]]
    normed, scaled = flag(hf, "use_qk_norm", default=True), flag(hf, "attn_temperature_tuning", default=True)
    scaling = {"factor": hf.get("attn_scale", 0.1), "length": hf.get("floor_scale", 8192), "first_position": 1}
    return {
        "mixer.qk_norm": ["rotated" if normed and x else False for x in rotates],
        "mixer.query_scaling": [scaling if scaled and not x else None for x in rotates],
    }


def _write_heads(ours: Fields) -> Keys:
    scaling = next((x for x in ours["mixer.query_scaling"] if x is not None), None)
    tuning = (True, scaling.length, scaling.factor) if scaling is not None else (False,)
    return {"use_qk_norm": "rotated" in ours["mixer.qk_norm"], **dict(zip(_QUERY_SCALING, tuning, strict=False))}


def _read_layers(hf: HfConfig) -> Fields:
    """Read which layers have experts: the layers in moe_layers, or multiples of interleave_moe_layer_step."""
    layers, step, moe_layers = num_layers(hf), hf.get("interleave_moe_layer_step", 1), hf.get("moe_layers")
    if moe_layers is None and (not isinstance(step, int) or step < 1):
        refuse("interleave_moe_layer_step", step, "a number of layers from 1 on")
    sparse = range(step - 1, layers, step) if moe_layers is None else moe_layers
    return {"ffn.kind": ["moe" if i in sparse else "mlp" for i in range(layers)]}


def _read_widths(hf: HfConfig) -> Fields:
    """Read the width of experts, including shared experts, and the width of MLPs."""
    width = hf.get("intermediate_size", 8192)
    experts = {"moe.ffn_hidden_size": width, "moe.shared_ffn_hidden_size": width}
    return {**experts, "ffn_hidden_size": hf.get("intermediate_size_mlp", 16384)}


def _write_widths(ours: Fields) -> Keys:
    return {"intermediate_size": ours["moe.ffn_hidden_size"], "intermediate_size_mlp": ours["ffn_hidden_size"]}


_NAMES = {"mlp.router": "feed_forward.router"} | {
    f"mlp.{ours}{x}": f"feed_forward.{theirs}{x}_proj"
    for ours, theirs in (("", ""), ("shared.", "shared_expert."))
    for x in ("gate", "up", "down")
}
FAMILIES = (
    Family("llama4_text", "Llama4ForCausalLM", (
        *traits.llama_like(8, 128, 1e-5, rope(5e5)), _NO_ROPE, only(attention_bias=False),
        Trait(("attention_chunk_size", "layer_types"), _read_chunks, _write_chunks),
        Trait(("use_qk_norm", *_QUERY_SCALING), _read_heads, _write_heads),
        Trait(("moe_layers", "interleave_moe_layer_step"), _read_layers,
              lambda ours: {"moe_layers": [i for i, kind in enumerate(ours["ffn.kind"]) if kind == "moe"]}),
        same("moe", num_experts=("num_local_experts", 16), top_k=("num_experts_per_tok", 1)),
        Trait(("intermediate_size", "intermediate_size_mlp"), _read_widths, _write_widths),
        always("moe", score="sigmoid", normalize=False, scale_inputs=True),
        traits.AUX_LOSS, unread("for_llm_compressor"),
    ), like_llama(
        _NAMES, stacked_experts("feed_forward.experts", transposed=True), rotation="neighbors"
    ), moe=True, rank=4,
        about="Llama 4's language model",
    ),
)  # fmt: skip
