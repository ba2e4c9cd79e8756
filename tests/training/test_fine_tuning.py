"""Fine-tuning on chats: the loss and gradients are those of transformers for each chat alone, and of answers only."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megafp8.config import Config, ConfigError, check_layout, load_config
from megafp8.config.schema import ModelConfig
from megafp8.data.indexed_dataset import IndexedDatasetWriter
from megafp8.fp8 import Fp8Manager
from megafp8.layers.context import BuildContext
from megafp8.models.gpt import GPTStage
from megafp8.objectives.answers import Answers
from megafp8.parallel.parallel_state import initialize_distributed, initialize_model_parallel
from megafp8.training.init_from import complete_model, load_init
from megafp8.training.inputs import RunInputs, open_inputs
from megafp8.training.metrics import read_metrics
from megafp8.training.trainer import RankTrainer
from megafp8.training.validate import check_run
from tests.conversion import families
from tests.data.test_chats import CHATML, write_tokenizer
from tests.models.weights import randomize
from tests.quickstart_data import ROOT
from tests.training.presets import (
    ANSWERS,
    BF16,
    COMPRESSED,
    CP2,
    DELAYED,
    DP2,
    MOE,
    MTP,
    SAMPLES_4,
    SPARSE,
    Z_LOSS,
    Preset,
    config_of,
)
from tests.training.runs import batches, run_job, start, text_batches
from tests.world import World
from tools import convert_checkpoint, preprocess_data

SFT = ROOT / "configs" / "llama3-8b-sft.yaml"
S, SAMPLES = 96, 4
VOCABULARY = 340


def make_chats(count: int) -> list[list[dict[str, str]]]:
    """Chats of one to three questions whose answers can be learned; questions alone do not say what follows."""
    rng = random.Random(0)
    chats = []
    for _ in range(count):
        chat: list[dict[str, str]] = []
        for _ in range(rng.randint(1, 3)):
            a, b = rng.randint(0, 9), rng.randint(0, 9)
            chat.append({"role": "user", "content": f"{a} of {b}?"})
            chat.append({"role": "assistant", "content": "even" if a % 2 == 0 else "odd number"})
        chats.append(chat)
    return chats


def make_model(folder: Path, length: int) -> None:
    """A small model of transformers, for the tokenizer of `write_tokenizer` and texts of so many tokens."""
    kind, options = families.THEIRS["llama3"]
    families.THEIRS["here"] = kind, options | {"vocab_size": VOCABULARY, "max_position_embeddings": length}
    families.make_theirs("here").save_pretrained(folder)


def prepare(folder: Path, count: int = 40) -> list[str]:
    """A small model of transformers with a tokenizer, chats as a data set, and what makes the SFT config use them."""
    make_model(folder / "model", S)
    tokenizer = write_tokenizer(folder / "model", CHATML)
    lines = "".join(json.dumps({"messages": chat}) + "\n" for chat in make_chats(count))
    (folder / "chats.jsonl").write_text(lines)
    flags = ["--tokenizer", "huggingface", "--tokenizer-path", str(tokenizer), "--style", "chat"]
    inputs = ["--input", str(folder / "chats.jsonl"), "--output-prefix", str(folder / "chats")]
    assert preprocess_data.main([*inputs, *flags]) == 0
    return [
        "name=test", "device=cpu", f"run_dir={folder / 'runs'}", f"data.train=[{folder / 'chats'}]",
        f"data.tokenizer.path={tokenizer}", f"data.index_cache={folder / 'cache'}", "data.num_workers=0",
        f"checkpoint.init_from={folder / 'model'}", "training.precision=fp32", "fp8.recipe=none",
        f"training.seq_length={S}", f"training.global_batch_size={SAMPLES}", "training.steps=4",
        "training.eval_interval=0", "optimizer.warmup_steps=0", "optimizer.clip_grad_norm=0", 'data.split="1"',
        "parallel.layers_per_stage=null",
    ]  # fmt: skip


ALONE = ["parallel.tensor=1", "parallel.pipeline=1"]


def loaded(overrides: list[str]) -> tuple[RankTrainer, Any]:
    config = load_config(SFT, overrides, complete_model)
    device, p = initialize_distributed("cpu"), config.parallel
    parallel = initialize_model_parallel(p.tensor, p.pipeline, device=device)
    check_layout(config, parallel.world_size)
    trainer = RankTrainer(config, parallel)
    assert config.checkpoint.init_from is not None
    load_init(trainer, config.checkpoint.init_from)
    return trainer, parallel


def _steps(overrides: list[str], steps: int) -> list[tuple[float, int, float]]:
    trainer, parallel = loaded(overrides)
    found = []
    for step in range(steps):
        loss, result = trainer.train_step(step, text_batches(step, trainer.config, parallel))
        found.append((loss.mean, loss.tokens, float(result.grad_norm)))
    return found


def their_loss_and_norm(folder: Path, inputs: RunInputs, samples: int) -> tuple[float, int, float]:
    """Mean loss of the answers in the first samples and the norm of its gradient, chat by chat, by `transformers`.

    The data set is not read: chats are found by the tokens of samples, and tokenized and masked by transformers.
    """
    import transformers

    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder / "model")
    answer = "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    marked = CHATML.replace(
        "message['content'] + '<|im_end|>' + '\n' }}",
        f"'' }}}}{{% if message['role'] == 'assistant' %}}{answer}{{% else %}}"
        "{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}",
    )
    assert marked != CHATML
    by_tokens = {}
    for line in (folder / "chats.jsonl").read_text().splitlines():
        encoded = tokenizer.apply_chat_template(
            json.loads(line)["messages"], chat_template=marked, return_dict=True, return_assistant_tokens_mask=True
        )
        by_tokens[tuple(encoded["input_ids"])] = encoded["assistant_masks"]
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float64)
    total, count = torch.zeros((), dtype=torch.float64), 0
    for sample in range(samples):
        parts = inputs.train.parts(sample)
        assert len(parts) > 1, "nothing is packed"
        for part in parts:
            ids = torch.from_numpy(part[0].astype(np.int64))
            labels = ids.where(torch.tensor(by_tokens[tuple(ids.tolist())]) == 1, -100)
            total = total + torch.nn.functional.cross_entropy(
                model(ids[None]).logits[0, :-1], labels[1:], reduction="sum"
            )
            count += int((labels[1:] != -100).sum())
    mean = total / count
    mean.backward()
    norm = math.sqrt(sum(float(p.grad.square().sum()) for p in model.parameters() if p.grad is not None))
    return mean.item(), count, norm


def test_packed_chats_are_those_of_transformers_one_by_one(world4: World, tmp_path: Path) -> None:
    """Loss, number of answers' tokens and gradient norm, on one rank and on four."""
    overrides = prepare(tmp_path)
    inputs = open_inputs(load_config(SFT, overrides, complete_model), "test")
    expected = their_loss_and_norm(tmp_path, inputs, SAMPLES)
    assert expected[1] < 0.4 * SAMPLES * S
    alone = world4.run(_steps, [*overrides, *ALONE], 2, ranks=1)[0]
    assert alone[0] == pytest.approx(expected, rel=1e-5)
    assert alone[1][0] < alone[0][0]
    for found in world4.run(_steps, [*overrides, "parallel.pipeline=1"], 2, ranks=4):  # tensor 2 × data 2
        for step, other in zip(found, alone, strict=True):
            assert step == pytest.approx(other, rel=1e-5)


# --- masks -----------------------------------------------------------------------------------------------------------


def _gradients(preset: Preset, other_labels: bool) -> tuple[Tensor, Tensor]:
    """All gradients of a step, and its report; with other labels wherever they do not count."""
    trainer, parallel = start(config_of(preset))
    found = batches(0, trainer.config, parallel)
    if other_labels:
        found = [replace(x, labels=(x.labels + (x.loss_mask == 0)) % 16) for x in found]
    passes = trainer.run_passes(found)
    return trainer.strategy.gradients[0].clone(), passes.report


@pytest.mark.parametrize("preset", [ANSWERS, ANSWERS | DELAYED, ANSWERS | BF16])
def test_labels_that_do_not_count_carry_no_gradient(world2: World, preset: Preset) -> None:
    """Bit for bit: with other labels in their places nothing changes."""
    (gradients, report), (others, report_of_others) = (
        world2.run(_gradients, preset, other_labels, ranks=1)[0] for other_labels in (False, True)
    )
    assert gradients.abs().max() > 0
    assert torch.equal(gradients, others)
    assert torch.equal(report, report_of_others)


def _step(preset: Preset) -> tuple[float, ...]:
    """Train a step in small micro-batches; return the loss, the losses of later tokens, the z-loss and the norm."""
    trainer, parallel = start(config_of(preset))
    loss, result = trainer.train_step(0, batches(0, trainer.config, parallel))
    assert loss.auxiliary is not None
    assert loss.z_loss is not None
    return loss.mean, loss.auxiliary, loss.z_loss, result.grad_norm


def _step_by_hand(preset: Preset) -> tuple[float, ...]:
    """Return what `_step` does from one pass over all samples; losses are divided by the number of labels that count.

    Logits are read for the z-loss.
    """
    trainer, parallel = start(config_of(preset))
    (stage,), (whole, *rest) = trainer.stages, batches(0, trainer.config, parallel)
    names = ("tokens", "labels", "loss_mask", "position_ids", "cu_seqlens")
    joined = {name: torch.cat([getattr(x, name) for x in (whole, *rest)]) for name in names}
    batch = replace(whole, samples=None, padding=None, **joined).with_later_labels(2)
    assert batch.loss_mask is not None
    counts = batch.loss_mask[: len(batch.tokens)].sum(1).tolist()
    assert max(counts) > 2 * min(counts) == 0, "micro-batches have about as many labels each"
    logits: list[Tensor] = []
    assert stage.head is not None
    stage.head.output.register_forward_hook(lambda module, inputs, output: logits.append(output.detach()))
    losses_sb = stage(None, batch).cross_entropy
    main, *later = (losses_sb * batch.loss_mask.T).split(len(batch.tokens), dim=1)
    squares_sb = logits[0][..., : trainer.config.model.vocab_size].double().logsumexp(-1).square() * batch.loss_mask.T
    z_main, *z_later = (trainer.config.training.z_loss * x.sum() for x in squares_sb.split(len(batch.tokens), dim=1))
    of_later = [batch.loss_mask[len(batch.tokens) * i :][: len(batch.tokens)].sum() for i in (1, 2)]
    trainer.strategy.clear()
    factor = trainer.config.model.mtp_loss_scaling_factor
    ((main.sum() + factor * (later[0].sum() + later[1].sum()) / 2) / sum(counts)).backward()
    norm = torch.stack([x.double().square().sum() for x in trainer.strategy.gradients]).sum().sqrt()
    more = sum(float(x.detach().sum() / n) for x, n in zip(later, of_later)) / 2
    z_loss = float(z_main + factor * sum(z_later) / 2)
    return float(main.detach().sum()) / sum(counts), more, z_loss / sum(counts), float(norm)


@pytest.mark.parametrize("layout", [SAMPLES_4, DP2 | CP2])
def test_losses_are_means_over_labels_not_over_micro_batches_or_ranks(world4: World, layout: Preset) -> None:
    """Some micro-batches and some parts of sequences have no label, others many.

    https://github.com/NVIDIA/Megatron-LM/issues/7452, findings 3 and 9;
    https://github.com/areal-project/AReaL/pull/1273
    """
    preset = MTP | ANSWERS | Z_LOSS | SAMPLES_4
    (expected,) = world4.run(_step_by_hand, preset, ranks=1)
    for found in world4.run(_step, preset | layout, ranks=layout.ranks):
        assert found == pytest.approx(expected, rel=1e-5)


def _gradients_and_load(preset: Preset, filling: int) -> tuple[Tensor, Tensor]:
    """Gradients of a step, and what routers counted, with this token as padding."""
    trainer, parallel = start(config_of(preset | ANSWERS | SAMPLES_4))
    filled = []
    for x in batches(0, trainer.config, parallel):
        assert x.padding is not None
        assert x.label_padding is not None
        tokens, labels = x.tokens.masked_fill(x.padding, filling), x.labels.masked_fill(x.label_padding, filling)
        filled.append(replace(x, tokens=tokens, labels=labels))
    assert torch.cat([x.padding for x in filled]).float().mean() > 0.1  # type: ignore[misc]
    trainer.run_passes(filled)
    load = None if trainer.load_collector is None else trainer.load_collector.sum()
    return trainer.strategy.gradients[0].clone(), torch.zeros(1) if load is None else load


@pytest.mark.parametrize("preset", [MOE | MTP, SPARSE | MTP, COMPRESSED], ids=str)
def test_padding_moves_neither_routers_nor_indexers(preset: Preset, world2: World) -> None:
    """Whatever token fills up samples, gradients and the load of experts are the same.

    https://github.com/NVIDIA/Megatron-LM/issues/1984, https://github.com/NVIDIA/Megatron-LM/pull/5542
    """
    (gradients, load), (others, other_load) = (
        world2.run(_gradients_and_load, preset, token, ranks=1)[0] for token in (0, 13)
    )
    torch.testing.assert_close(load, other_load, rtol=1e-6, atol=0)
    torch.testing.assert_close(gradients, others, rtol=1e-5, atol=1e-7)


def _step_without_labels() -> tuple[float, float, bool, bool]:
    """Loss and norm of a batch without any answer, whether it was skipped, and whether all weights are finite."""
    trainer, parallel = start(config_of(ANSWERS))
    found = [replace(x, loss_mask=x.loss_mask * 0) for x in batches(0, trainer.config, parallel)]  # type: ignore[operator]
    loss, result = trainer.train_step(0, found)
    finite = all(bool(param.isfinite().all()) for param in trainer.strategy.params)
    return loss.mean, float(result.grad_norm), bool(result.skipped), finite


def test_a_batch_without_answers_changes_nothing(world2: World) -> None:
    assert world2.run(_step_without_labels, ranks=1)[0] == (0.0, 0.0, False, True)


MODEL: dict[str, Any] = {
    "num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_query_groups": 2, "ffn_hidden_size": 48,
    "vocab_size": 29, "vocab_multiple": 8,
}  # fmt: skip


def _packed_and_unpacked(model: dict[str, Any]) -> float:
    """Largest difference of a gradient, relative to the largest element, between packed and lone documents."""
    config, s = ModelConfig(**MODEL, **model), 24
    state = initialize_model_parallel()
    manager = Fp8Manager(None, amax_group=None)
    context = BuildContext(state.tensor.group, manager, torch.float64, state.device, False)
    stage = GPTStage(config.spec, context, layers=config.spec.indices, positions=s)
    randomize(stage, lambda piece: 0.3)
    rng, objective = np.random.default_rng(1), Answers(s)
    parts = [np.stack([rng.integers(0, 29, n), rng.integers(0, 2, n)]) for n in (9, 2, 7, 5)]
    parts[1][1] = 0  # without answers

    def gradients(rows: list[Any]) -> tuple[Tensor, list[Tensor]]:
        batch = objective.batch(torch.from_numpy(np.stack(rows)))
        stage.zero_grad()
        assert batch.loss_mask is not None
        loss = (stage(None, batch).cross_entropy * batch.loss_mask.T).sum() / batch.loss_mask.sum()
        loss.backward()
        return loss.detach(), [param.grad.clone() for param in stage.parameters() if param.grad is not None]

    packed, of_packed = gradients([objective.row(parts, 0)])
    unpacked, of_unpacked = gradients([objective.row([part], 0) for part in parts])
    torch.testing.assert_close(packed, unpacked, rtol=1e-12, atol=0)
    assert len(of_packed) == len(list(stage.parameters()))
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(of_packed, of_unpacked))


@pytest.mark.parametrize(
    "model", [{}, {"position_embedding": "learned", "normalization": "layernorm"}, {"sliding_window": 3}]
)
def test_packed_documents_have_the_gradients_of_lone_ones(world2: World, model: dict[str, Any]) -> None:
    assert world2.run(_packed_and_unpacked, model, ranks=1)[0] < 1e-10


# --- the config and the data set -------------------------------------------------------------------------------------


def masked_dataset(prefix: Path, answers: int, *, loss_mask: bool = True) -> str:
    """100 documents of 10 tokens, whose last ones are the answers."""
    writer = IndexedDatasetWriter(prefix, np.uint16, loss_mask=loss_mask, overwrite=True)
    mask = (np.arange(10) >= 10 - answers).astype(np.uint8)
    for i in range(100):
        writer.add_document((np.arange(10) + i) % 20, loss_mask=mask if loss_mask else None)
    writer.close({"max_token_id": 19})
    return str(prefix)


def config(train: list[str], cache: Path, **data: Any) -> Config:
    data = {"train": train, "tokenizer": {"kind": "bytes"}, "index_cache": str(cache), **PACKED, **data}
    training = {"steps": 10, "seq_length": 32, "global_batch_size": 2}
    model = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 1}
    rest = {"training": training, "optimizer": {"learning_rate": 1, "schedule": "constant"}}
    return Config.model_validate({"name": "t", "model": model, "data": data, **rest})


PACKED = {"packing": "best_fit", "reset_at_documents": True, "mask_eod_loss": True}


def test_whether_a_loss_mask_is_used_is_said(tmp_path: Path) -> None:
    masked, plain = masked_dataset(tmp_path / "a", 3), masked_dataset(tmp_path / "b", 3, loss_mask=False)
    mistakes: list[tuple[list[str], dict[str, Any], str]] = [
        ([masked], {}, "data.loss_on = None: .*a has a loss mask, .*; set data.loss_on=answers, or data.loss_on=all"),
        ([masked, plain], {"loss_on": "answers"}, "data.loss_on = 'answers': .*b has no loss mask"),
    ]
    for prefixes, data, error in mistakes:
        with pytest.raises(ConfigError, match=error):
            open_inputs(config(prefixes, tmp_path, **data), "test")
    with pytest.raises(
        ConfigError, match=r"data.packing = 'concatenate': data.loss_on is answers, and .* try best_fit"
    ):
        check_layout(config([masked], tmp_path, loss_on="answers", packing="concatenate"), 1)
    for loss_on, share in (("answers", 3), ("all", 9)):
        inputs = open_inputs(config([masked], tmp_path, loss_on=loss_on), "test")
        row = inputs.objective.row(inputs.train.parts(0), 0)
        mask = inputs.objective.batch(torch.from_numpy(row)[None]).loss_mask
        assert mask is not None
        assert mask.sum() == 3 * share


def test_another_mask_is_another_data_set(tmp_path: Path) -> None:
    """A run does not continue on it, as on other tokens."""
    prefix = masked_dataset(tmp_path / "a", 3)
    inputs = open_inputs(config([prefix], tmp_path, loss_on="answers"), "test")
    saved = {"step": 2, "consumed_samples": 4, "config": inputs.config.model_dump(), "data": inputs.record(4)}
    everything = open_inputs(config([prefix], tmp_path, loss_on="all"), "test")
    assert everything.resumed(saved)[1] == []
    tokens = (tmp_path / "a.bin").read_bytes()
    masked_dataset(tmp_path / "a", 4)
    assert (tmp_path / "a.bin").read_bytes() == tokens
    with pytest.raises(ConfigError, match=r"data.train = '.*a': its files have changed since the run read 4 samples"):
        open_inputs(config([prefix], tmp_path, loss_on="answers"), "test").resumed(saved)


# --- a whole run -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_answers_are_learned_and_questions_are_not(world2: World, tmp_path: Path) -> None:
    """From the folder of transformers to one that it loads: it then gives the answers, and says when it is done."""
    transformers = pytest.importorskip("transformers")
    overrides = prepare(tmp_path, 400)
    more = [
        "training.steps=150",
        "training.global_batch_size=8",
        "optimizer.learning_rate=3e-3",
        "logging.progress=false",
    ]
    curve = world2.run(_job, [*overrides, *ALONE, *more], ranks=1, timeout=280)[0]
    assert curve[-1] < 0.1 < 1 < curve[0]
    exported = tmp_path / "exported"
    run = ["--load", str(tmp_path / "runs" / "test"), "--save", str(exported), "--to", "hf"]
    assert convert_checkpoint.main(run) == 0
    tokenizer = transformers.AutoTokenizer.from_pretrained(exported)
    model = transformers.AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32)
    end, right = tokenizer.convert_tokens_to_ids("<|im_end|>"), 0
    for chat in make_chats(20):
        prompt = tokenizer.apply_chat_template(chat[:1], add_generation_prompt=True, return_tensors="pt")["input_ids"]
        said = model.generate(prompt, max_new_tokens=20, do_sample=False, eos_token_id=end)[0, prompt.shape[1] :]
        right += tokenizer.decode(said) == chat[1]["content"] + "<|im_end|>"
    assert right >= 18


def _job(overrides: list[str]) -> list[float]:
    run_config = load_config(SFT, overrides, complete_model)
    check_layout(run_config, 1)
    inputs = open_inputs(run_config, "test")
    check_run(inputs)
    run_job(inputs)
    folder = Path(run_config.run_dir) / run_config.name
    return [row["loss"] for row in read_metrics(folder / "metrics.jsonl") if "loss" in row]
