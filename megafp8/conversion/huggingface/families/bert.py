"""BERT and RoBERTa."""

from megafp8.conversion.base import refuse
from megafp8.conversion.huggingface import traits
from megafp8.conversion.huggingface.families import Family
from megafp8.conversion.huggingface.names import HfPlace, Names, TensorNames, after, in_layers
from megafp8.conversion.keys import Fields, HfConfig, Keys, Trait, always, expect, only, same, unread

_CLASSES = {"BertForPreTraining": True, "BertForMaskedLM": False}
"""Classes, with whether they have the pooler and the binary head."""
_ROBERTA_OFFSET = 2
"""Number of rows in RoBERTa's position table before the row of the first token."""


def _read_class(hf: HfConfig) -> Fields:
    """Read from the class whether there is a binary head. Folders of BertForMaskedLM may have its tensors anyway."""
    named = hf.get("architectures") or ["BertForMaskedLM"]
    if len(named) != 1 or named[0] not in _CLASSES:
        refuse("architectures", named, " or ".join(repr([name]) for name in _CLASSES))
    return {"binary_head": _CLASSES[named[0]]}


def _write_class(ours: Fields) -> Keys:
    return {"architectures": [name for name, binary in _CLASSES.items() if binary == ours["binary_head"]]}


def _read_roberta_positions(hf: HfConfig) -> Fields:
    rows = hf.get("max_position_embeddings", 512)
    if not isinstance(rows, int) or rows <= _ROBERTA_OFFSET:
        refuse("max_position_embeddings", rows, f"more than {_ROBERTA_OFFSET}, the rows before the first token's row")
    expect(hf, "pad_token_id", 1, "1, because positions begin after it")
    return {"max_position_embeddings": rows - _ROBERTA_OFFSET}


def _write_roberta_positions(ours: Fields) -> Keys:
    return {"max_position_embeddings": (ours["max_position_embeddings"] or 0) + _ROBERTA_OFFSET, "pad_token_id": 1}


_GELUS = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}
_BERT = (
    traits.SIZES, traits.INIT_STD,
    same(
        token_types=("type_vocab_size", 2), activation=("hidden_act", "gelu", _GELUS),
        norm_eps=("layer_norm_eps", 1e-12), attention_dropout=("attention_probs_dropout_prob", 0.1),
        hidden_dropout=("hidden_dropout_prob", 0.1),
    ),
    always(architecture="bert", position_embedding="learned", normalization="layernorm", norm_position="post"),
    always(embedding_norm=True, linear_bias=True, tie_embeddings=True),
    only(tie_word_embeddings=True, why="because the head's bias is shared like its weight"),
    only(written=False, position_embedding_type="absolute", is_decoder=False),
    # The pooler of multilingual releases; no class reads these keys.
    unread("directionality", "pooler_fc_size", "pooler_num_attention_heads", "pooler_num_fc_layers"),
    unread("pooler_size_per_head", "pooler_type"),
)  # fmt: skip
_EMBEDDINGS = {
    "embedding.word": "word_embeddings", "embedding.position": "position_embeddings",
    "embedding.token_type": "token_type_embeddings", "embedding_norm": "LayerNorm",
}  # fmt: skip
_LAYER = {
    "attention.q": "attention.self.query", "attention.k": "attention.self.key", "attention.v": "attention.self.value",
    "attention.proj": "attention.output.dense", "attention_norm": "attention.output.LayerNorm",
    "mlp.up": "intermediate.dense", "mlp.down": "output.dense", "mlp_norm": "output.LayerNorm",
}  # fmt: skip


def _blocks(prefix: str) -> Names:
    embeddings = {ours: f"{prefix}.embeddings.{theirs}" for ours, theirs in _EMBEDDINGS.items()}
    return embeddings | in_layers(f"{prefix}.encoder.layer.*", _LAYER)


def _head(transform: str, norm: str, output: str) -> Names:
    names = {"transform": transform, "transform_norm": norm, "output": f"{output}.decoder"}
    return {**names, "output.bias": f"{output}.bias"}


FAMILIES = (
    Family("bert", "BertForPreTraining", (
        *_BERT, same(max_position_embeddings=("max_position_embeddings", 512)),
        Trait(("architectures",), _read_class, _write_class),
    ), TensorNames(
        {
            **_blocks("bert"), "pooler": "bert.pooler.dense", "binary_head": "cls.seq_relationship",
            **_head("cls.predictions.transform.dense", "cls.predictions.transform.LayerNorm", "cls.predictions"),
        },
        copies={"cls.predictions.decoder.bias": "cls.predictions.bias"},
        other_heads=r"(bert\.pooler|cls\.seq_relationship)\..*",
    ), kind="bert",
        about="BERT: `BertForPreTraining`, `BertForMaskedLM`; `gelu` or `gelu_new`",
    ),
    Family("roberta", "RobertaForMaskedLM", (
        *_BERT, always(transform_activation="gelu"),
        Trait(("max_position_embeddings", "pad_token_id"), _read_roberta_positions, _write_roberta_positions),
    ), TensorNames(
        {
            **_blocks("roberta"), **_head("lm_head.dense", "lm_head.layer_norm", "lm_head"),
            "embedding.position": HfPlace("roberta.embeddings.position_embeddings", after(_ROBERTA_OFFSET)),
        },
        copies={"lm_head.decoder.bias": "lm_head.bias"}, other_heads=r"roberta\.pooler\..*",
    ), kind="bert",
        about="RoBERTa: `RobertaForMaskedLM`; `gelu` or `gelu_new`",
    ),
)  # fmt: skip
