"""Logits of BERT and RoBERTa against those of `transformers`, in both directions, of samples with padding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megafp8.batch import Batch
from megafp8.checkpoint import collect
from megafp8.config import model_spec
from megafp8.conversion.base import CheckpointSource
from megafp8.conversion.convert import verify
from megafp8.conversion.huggingface.sink import HfSink
from megafp8.conversion.huggingface.source import HfSource
from megafp8.conversion.load import load_weights
from megafp8.conversion.megatron.source import MegatronSource
from megafp8.fp8 import Fp8Manager
from megafp8.layers.context import BuildContext
from megafp8.layers.norm.module import normalized
from megafp8.models.gpt import GPTStage
from megafp8.parallel.collectives import all_gather
from megafp8.parallel.parallel_state import initialize_model_parallel
from megafp8.spec import ModelSpec
from tests.conversion.checkpoints import convert
from tests.conversion.families import RandomSource, S, V, randomize
from tests.conversion.families import tokens as any_tokens
from tests.conversion.megatron.reference import BERT as BERT_OF_MEGATRON
from tests.conversion.megatron.reference import save as save_as_megatron
from tests.world import World

LENGTHS = [S, 7]
BERT: dict[str, Any] = {
    "vocab_size": V, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
    "max_position_embeddings": 18,
}  # fmt: skip
THEIRS: dict[str, tuple[str, dict[str, Any]]] = {
    "BertForPreTraining": ("Bert", BERT),
    "BertForMaskedLM": ("Bert", BERT | {"hidden_act": "gelu_new", "type_vocab_size": 3}),
    "RobertaForMaskedLM": ("Roberta", BERT | {"type_vocab_size": 1, "layer_norm_eps": 1e-5, "hidden_act": "gelu_new"}),
}
OURS: dict[str, dict[str, Any]] = {
    "bert": {
        "architecture": "bert", "num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "ffn_hidden_size": 48,
        "vocab_size": V, "vocab_multiple": 8, "position_embedding": "learned", "max_position_embeddings": 16,
        "normalization": "layernorm", "norm_position": "post", "embedding_norm": True, "activation": "gelu",
        "linear_bias": True, "tie_embeddings": True, "token_types": 2, "binary_head": True,
    },
}  # fmt: skip


def tokens() -> Tensor:
    """None is 1, RoBERTa's padding, which it would not count in positions."""
    return any_tokens().clamp(min=2)


def _types() -> Tensor:
    return torch.arange(S).expand(len(LENGTHS), S) // 4 % 2


@torch.no_grad()
def our_logits(source: CheckpointSource, tp: int) -> tuple[Tensor, Tensor | None]:
    """Logits `[b, s, v]` of `tokens()`, and of the binary head."""
    state, model = initialize_model_parallel(tp), source.model
    context = BuildContext(
        state.tensor.group, Fp8Manager(None, amax_group=None), torch.float32, state.device, tp > 1
    )  # fmt: skip
    stage = GPTStage(model, context, layers=range(len(model.layers)), positions=model.stem.max_position_embeddings or 1)
    load_weights(source, collect(stage.parameters(), lambda param: param.detach(), "model."))
    types = _types() if model.stem.token_types > 1 else None
    cu_seqlens = torch.tensor([[0, n, S] for n in LENGTHS]).int()
    assert stage.embedding is not None
    assert stage.head is not None
    inputs = stage.layer_inputs(Batch(tokens(), tokens(), cu_seqlens=cu_seqlens))
    x_sbh, branch_sbh = stage.run_blocks(stage.embedding(tokens(), None, token_types_bs=types), inputs)
    hidden_sbh = x_sbh if stage.head.norm is None else normalized(stage.head.norm, x_sbh, branch_sbh)
    binary = None if stage.head.binary is None else stage.head.binary.logits(hidden_sbh)
    logits_sbv = stage.head.logits(x_sbh, branch_sbh)
    logits_sbv = torch.cat(list(all_gather(logits_sbv.unsqueeze(0), state.tensor.group)), -1)
    return logits_sbv.transpose(0, 1)[..., : model.stem.vocab_size].contiguous(), binary


def _from_folder(path: Path, tp: int) -> tuple[Tensor, Tensor | None]:
    return our_logits(HfSource(path, vocab_multiple=8), tp)


def _from_random(model: ModelSpec, tp: int) -> tuple[Tensor, Tensor | None]:
    return our_logits(RandomSource(model), tp)


def _their_logits(model: Any) -> tuple[Tensor, Tensor | None]:
    mask = (torch.arange(S) < torch.tensor(LENGTHS)[:, None]).long()
    types = _types() if model.config.type_vocab_size > 1 else None
    with torch.no_grad():
        found = model(tokens(), attention_mask=mask, token_type_ids=types)
    return (found.prediction_logits, found.seq_relationship_logits) if "seq_relationship_logits" in found else (
        found.logits, None,
    )  # fmt: skip


def _hold(ours: tuple[Tensor, Tensor | None], theirs: tuple[Tensor, Tensor | None]) -> None:
    for row, length in enumerate(LENGTHS):
        expected = theirs[0][row, :length]
        assert expected.std() > 0.1, "logits that say nothing"
        torch.testing.assert_close(ours[0][row, :length], expected, rtol=0, atol=1e-5)
    assert (ours[1] is None) == (theirs[1] is None)
    if ours[1] is not None:
        torch.testing.assert_close(ours[1], theirs[1], rtol=0, atol=1e-5)


def _make(name: str) -> Any:
    import transformers

    kind, options = THEIRS[name]
    torch.manual_seed(len(name))
    model = getattr(transformers, name)(getattr(transformers, f"{kind}Config")(**options))
    randomize(model)
    return model.eval()


@pytest.mark.parametrize("name", THEIRS)
def test_theirs_to_ours(world2: World, tmp_path: Path, name: str) -> None:
    """The second time as the first releases of BERT wrote their files: other names of norms, a copied output layer."""
    model = _make(name)
    model.save_pretrained(tmp_path)
    theirs = _their_logits(model)
    _hold(world2.run(_from_folder, tmp_path, 1, ranks=1)[0], theirs)
    saved = load_file(tmp_path / "model.safetensors")
    if name != "RobertaForMaskedLM":
        saved["cls.predictions.decoder.weight"] = saved["bert.embeddings.word_embeddings.weight"].clone()
        saved["cls.predictions.decoder.bias"] = saved["cls.predictions.bias"].clone()
        saved["bert.pooler.dense.weight"] = saved.get("bert.pooler.dense.weight", torch.ones(32, 32))
    old = {
        key.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): x
        for key, x in saved.items()
    }
    save_file(old, tmp_path / "model.safetensors", {"format": "pt"})
    _hold(world2.run(_from_folder, tmp_path, 2)[0], theirs)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("BertForPreTraining", {}),
        ("BertForMaskedLM", {"binary_head": False, "activation": "gelu_tanh"}),
        ("RobertaForMaskedLM", {"binary_head": False, "token_types": 1}),
    ],
)
def test_ours_to_theirs(world2: World, tmp_path: Path, name: str, options: dict[str, Any]) -> None:
    import transformers

    model = model_spec(OURS["bert"] | options)
    source = RandomSource(model, tmp_path)
    if name == "RobertaForMaskedLM":  # BERT can express it too
        source.about["huggingface"] = THEIRS_ROBERTA
    convert(source, HfSink(tmp_path / "hf", file_bytes=20_000))
    verify(source, HfSource(tmp_path / "hf"))  # whose weights and biases of the vocabulary are padded
    loaded, report = getattr(transformers, name).from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert loaded.config.architectures == [name]
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    theirs = _their_logits(loaded.eval())
    for tp in (1, 2):
        _hold(world2.run(_from_random, model, tp, ranks=tp)[0], theirs)


THEIRS_ROBERTA = {
    "model_type": "roberta", "architectures": ["RobertaForMaskedLM"], "vocab_size": V, "hidden_size": 32,
    "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "max_position_embeddings": 18,
    "type_vocab_size": 1, "layer_norm_eps": 1e-5, "pad_token_id": 1,
}  # fmt: skip


_OF_LAYER = {
    "attention_norm": "attention.ln", "attention.q": "attention.self.query", "attention.k": "attention.self.key",
    "attention.v": "attention.self.value", "attention.proj": "attention.output.dense", "mlp_norm": "ln",
    "mlp.up": "intermediate.dense", "mlp.down": "output.dense",
}  # fmt: skip
_OUTER = {
    "embedding.word": "bert.embeddings.word_embeddings", "embedding.position": "bert.embeddings.position_embeddings",
    "embedding.token_type": "bert.embeddings.token_type_embeddings", "final_norm": "bert.encoder.ln",
    "pooler": "bert.pooler.dense", "transform": "cls.predictions.transform.dense",
    "transform_norm": "cls.predictions.transform.LayerNorm", "binary_head": "cls.seq_relationship",
    "output": "cls.predictions",
}  # fmt: skip


def _as_megatron_bert(name: str) -> str:
    """The name of our tensor in a MegatronBertForPreTraining of `transformers`."""
    module, _, kind = name.removeprefix("model.").rpartition(".")
    if module in _OUTER:
        return f"{_OUTER[module]}.{kind}"
    _, layer, part = module.split(".", 2)
    return f"bert.encoder.layer.{layer}.{_OF_LAYER[part]}.{kind}"


def _from_megatron(path: Path, tp: int) -> tuple[Tensor, Tensor | None]:
    return our_logits(MegatronSource(path), tp)


def test_megatrons_checkpoint_of_bert(world2: World, tmp_path: Path) -> None:
    """`transformers` has a model for it, whose head has the MLP's GELU, where Megatron-LM's is exact."""
    import transformers

    source = RandomSource(model_spec(BERT_OF_MEGATRON | {"head_dim": 4, "vocab_size": V}))
    sizes = {"hidden_size": 16, "num_attention_heads": 4, "max_position_embeddings": 32, "vocab_size": V}
    args = {"num_layers": 4, "kv_channels": 4, "ffn_hidden_size": 24, "make_vocab_size_divisible_by": 8, **sizes}
    save_as_megatron(tmp_path, source, args, (2, 2, 1))
    options = {"num_hidden_layers": 4, "intermediate_size": 24, "hidden_act": "gelu_new", "layer_norm_eps": 1e-5}
    model = transformers.MegatronBertForPreTraining(transformers.MegatronBertConfig(**sizes, **options)).eval()
    model.cls.predictions.transform.transform_act_fn = torch.nn.GELU()
    weights = {_as_megatron_bert(name): x for name, x in source.whole.items()}
    weights = {key: x[:V] if "word_emb" in key or key == "cls.predictions.bias" else x for key, x in weights.items()}
    weights["cls.predictions.decoder.weight"] = weights["bert.embeddings.word_embeddings.weight"]
    weights["cls.predictions.decoder.bias"] = weights["cls.predictions.bias"]
    model.load_state_dict(weights)
    for tp in (1, 2):
        _hold(world2.run(_from_megatron, tmp_path, tp, ranks=tp)[0], _their_logits(model))
