"""A pretrained model: perplexity and generated text are those of `transformers`, and a round trip keeps it."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megafp8.batch import Batch
from megafp8.checkpoint import collect
from megafp8.conversion.huggingface.sink import HfSink
from megafp8.conversion.huggingface.source import HfSource
from megafp8.conversion.load import load_weights
from megafp8.data.tokenizers import build_tokenizer
from megafp8.fp8 import Fp8Manager
from megafp8.inference import Completion, Generator, SamplingOptions
from megafp8.layers.context import BuildContext
from megafp8.models.gpt import GPTStage
from megafp8.parallel.parallel_state import initialize_model_parallel
from tests.conversion.checkpoints import convert
from tests.conversion.huggingface import smollm2
from tests.conversion.huggingface.test_files import same_weights
from tests.world import World

B, S, T = 4, 255, 3  # nine heads, three of keys and values: three tensor ranks


def _our_loss(folder: Path, ids_bs: Tensor, tp: int) -> float:
    """Mean loss in nats a token."""
    state, source = initialize_model_parallel(tp), HfSource(folder)
    context = BuildContext(state.tensor.group, Fp8Manager(None, amax_group=None), torch.float32, state.device, True)
    stage = GPTStage(source.model, context, layers=range(source.model.num_layers), positions=1)
    load_weights(source, collect(stage.parameters(), lambda param: param.detach(), "model."))
    with torch.no_grad():
        return float(stage(None, Batch(ids_bs[:, :-1], ids_bs[:, 1:])).cross_entropy.mean())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("smollm2")
    try:
        gguf = smollm2.download(place)
    except OSError as error:
        pytest.skip(str(error))
    smollm2.write_folder(gguf, place / "theirs")
    return place / "theirs"


@pytest.mark.slow
def test_perplexity_on_real_text_is_that_of_transformers(world4: World, folder: Path) -> None:
    import transformers

    tokenizer = build_tokenizer("huggingface", str(folder / "tokenizer.json"))
    text = smollm2.english()
    ids = tokenizer.encode(text)
    assert len(ids) >= B * (S + 1)
    assert len(text) / len(ids) > 2.5, "the tokenizer splits text into single characters"
    ids_bs = torch.tensor(ids[: B * (S + 1)]).view(B, S + 1)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        logits = theirs(ids_bs[:, :-1]).logits
    expected = math.exp(torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids_bs[:, 1:].flatten()))
    ours = math.exp(world4.run(_our_loss, folder, ids_bs, T, ranks=T)[0])
    print(f"perplexity over {B * S} tokens: ours (tensor {T}) {ours:.5f}, transformers {expected:.5f}")
    assert expected < 60, "this model has not learned English: the weights are mixed up"
    assert ours == pytest.approx(expected, rel=1e-3)


@pytest.mark.slow
def test_round_trip_and_generation(folder: Path, tmp_path: Path) -> None:
    import transformers

    convert(HfSource(folder), HfSink(tmp_path / "ours", file_bytes=100_000_000))
    same_weights(folder, tmp_path / "ours")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "ours")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    ids = tokenizer("The capital of France is", return_tensors="pt").input_ids
    said = tokenizer.decode(model.generate(ids, max_new_tokens=8, do_sample=False)[0])
    assert "Paris" in said, said


PROMPTS = ["The capital of France is", "Once upon a time, naïve 東京"]
OPTIONS = SamplingOptions(max_tokens=12)


def _generated(folder: Path, tensor: int) -> list[Completion]:
    generator = Generator.from_checkpoint(folder, device="cpu", tensor=tensor)
    streamed, found = [""] * len(PROMPTS), dict[int, Completion]()
    for piece, completion in generator.stream(PROMPTS, OPTIONS):
        streamed[completion.prompt] += piece
        found[completion.prompt] = completion
    assert [found[i].text for i in range(len(PROMPTS))] == streamed
    return [found[i] for i in range(len(PROMPTS))]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_generated_text_is_that_of_transformers(world4: World, folder: Path) -> None:
    """Text in and out with the folder's tokenizer, to the token that ends it; in two layouts."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    expected = []
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        out = model.generate(ids, max_new_tokens=OPTIONS.max_tokens, do_sample=False, pad_token_id=0)[0, ids.shape[1] :]
        expected.append((out.tolist(), tokenizer.decode(out, skip_special_tokens=True)))
    for tensor in (1, T):
        found = world4.run(_generated, folder, tensor, ranks=tensor)[0]
        assert [(x.tokens, x.text) for x in found] == expected
