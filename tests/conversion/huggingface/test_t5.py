"""Logits of T5 against those of `transformers`, in both directions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megafp8.batch import Batch
from megafp8.checkpoint import collect
from megafp8.config import model_spec
from megafp8.conversion.base import CheckpointSource
from megafp8.conversion.convert import Selected
from megafp8.conversion.huggingface.sink import HfSink
from megafp8.conversion.huggingface.source import HfSource
from megafp8.conversion.load import load_weights
from megafp8.fp8 import Fp8Manager
from megafp8.layers.context import BuildContext
from megafp8.models.build import build_stage
from megafp8.parallel.collectives import all_gather
from megafp8.parallel.parallel_state import initialize_model_parallel
from megafp8.spec import ModelSpec
from tests.conversion.checkpoints import convert
from tests.conversion.families import B, RandomSource, V, randomize
from tests.world import World

S, D = 28, 20
T5: dict[str, Any] = {
    "vocab_size": V, "d_model": 32, "d_kv": 6, "d_ff": 48, "num_layers": 2, "num_decoder_layers": 3, "num_heads": 4,
    "relative_attention_num_buckets": 8, "relative_attention_max_distance": 16,
}  # fmt: skip
THEIRS = {"v1.0": T5, "flan": T5 | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}}
OURS: dict[str, Any] = {
    "architecture": "t5", "num_layers": 3, "num_decoder_layers": 2, "hidden_size": 32, "num_attention_heads": 4,
    "head_dim": 6, "ffn_hidden_size": 48, "vocab_size": V, "vocab_multiple": 8, "position_embedding": "relative",
    "relative_attention_num_buckets": 12, "relative_attention_max_distance": 20, "activation": "geglu_tanh",
}  # fmt: skip


class SmallQueries(RandomSource):
    """With queries as small as T5's are, whose scores are not divided: a softmax of large ones multiplies errors."""

    def read(self, name: str) -> Tensor:
        return super().read(name) * (0.3 if name.endswith("attention.q.weight") else 1.0)


def tokens(n: int) -> Tensor:
    return torch.randint(V, (B, n), generator=torch.Generator().manual_seed(n))


@torch.no_grad()
def our_logits(source: CheckpointSource, tp: int) -> Tensor:
    """`[b, d, v]`, of a model in two stages, both of which are here."""
    state, model = initialize_model_parallel(tp), source.model
    context = BuildContext(state.tensor.group, Fp8Manager(None, amax_group=None), torch.float32, state.device, tp > 1)
    split = model.num_layers + 1
    stages = nn.ModuleList(
        build_stage(model, context, layers=layers, positions=1)
        for layers in (range(split), range(split, model.num_blocks))
    )
    load_weights(source, collect(stages.parameters(), lambda param: param.detach(), "model."))
    batch = Batch(tokens(S), tokens(D), decoder_tokens=tokens(D))
    logits_dbv = stages[1](stages[0](None, batch), batch, read=lambda x, _: x)
    logits_dbv = torch.cat(list(all_gather(logits_dbv.unsqueeze(0), state.tensor.group)), -1)
    return logits_dbv.transpose(0, 1)[..., : model.stem.vocab_size].contiguous()


def _from_folder(path: Path, tp: int) -> Tensor:
    return our_logits(HfSource(path, vocab_multiple=8), tp)


def _from_random(model: ModelSpec, tp: int) -> Tensor:
    return our_logits(SmallQueries(model), tp)


@torch.no_grad()
def _hold(ours: Tensor, model: Any) -> None:
    theirs = model(input_ids=tokens(S), decoder_input_ids=tokens(D)).logits
    assert theirs.std() > 0.1, "logits that say nothing"
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", THEIRS)
def test_theirs_to_ours(world2: World, tmp_path: Path, name: str) -> None:
    import transformers

    torch.manual_seed(1)
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(**THEIRS[name])).eval()
    if name == "flan":
        model.lm_head.weight = nn.Parameter(torch.empty(V, 32))
    randomize(model)
    with torch.no_grad():
        for key, x in model.named_parameters():
            x *= 0.3 if key.endswith("Attention.q.weight") else 1.0
    model.save_pretrained(tmp_path)
    for tp in (1, 2):
        _hold(world2.run(_from_folder, tmp_path, tp, ranks=tp)[0], model)


@pytest.mark.parametrize("options", [{}, {"activation": "relu", "tie_embeddings": True}], ids=["v1.1", "v1.0"])
def test_ours_to_theirs(world2: World, tmp_path: Path, options: dict[str, Any]) -> None:
    import transformers

    model = model_spec(OURS | options | {"norm_eps": 1e-6})
    source = Selected(SmallQueries(model, tmp_path), weights_only=True, dtype=None, mtp=False)  # as megafp8 convert has
    convert(source, HfSink(tmp_path / "hf", file_bytes=20_000))
    loaded, report = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    _hold(world2.run(_from_random, model, 2)[0], loaded.eval())
