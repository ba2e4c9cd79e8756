"""DPO: gradients of an own formula in float64, the losses of TRL, any layout, resuming, and what is refused."""

from __future__ import annotations

import json
import math
import pickle
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megafp8.batch import Batch
from megafp8.config import ConfigError, check_layout, load_config
from megafp8.data.indexed_dataset import IndexedDataset
from megafp8.data.samples import PackedDataset
from megafp8.objectives.answers import Answers
from megafp8.training.errors import TrainingError
from megafp8.training.init_from import complete_model, load_init
from megafp8.training.inputs import open_inputs
from megafp8.training.metrics import read_metrics
from megafp8.training.validate import check_run
from megafp8.training.weights_digest import weights_digest
from tests.data.test_chats import CHATML, write_tokenizer
from tests.marks import slow_but
from tests.quickstart_data import ROOT
from tests.training.presets import (
    CP2,
    CURRENT,
    DELAYED,
    DP2,
    DPO,
    FP16,
    FP64,
    FSDP,
    INTERLEAVED,
    LAYERS_4,
    LORA,
    LOSS_PARTS,
    MOE,
    NO_CLIP,
    PP2,
    SAMPLES_2,
    SAMPLES_4,
    TIED,
    TP2,
    ZB_H1,
    ZB_V,
    ZERO,
    Preset,
    config_of,
)
from tests.training.runs import Curve, OneRank, batches, digests, run_job, saved_tensors, start, steps_of
from tests.training.test_fine_tuning import make_model
from tests.world import World
from tools import preprocess_data

CONFIG = ROOT / "configs" / "llama3-8b-dpo.yaml"
SPECIAL_ENDS = (
    CHATML.replace("'\n'", "'<|start_header_id|>'", 1)
    .replace(" + '\n' }}{% endfor", " }}{% endfor")
    .replace("assistant\n", "assistant<|start_header_id|>")
)
ONE_RANK = ["parallel.tensor=1", "parallel.pipeline=1"]
BETA, SMOOTHING = 0.7, 0.1  # of the preset


# --- gradients -------------------------------------------------------------------------------------------------------


def _lone_documents(batch: Batch) -> list[tuple[Tensor, Tensor]]:
    """Tokens of each document of a sample, and which of them count as labels; without padding."""
    (tokens,), (labels,), (counts,) = batch.tokens, batch.labels, batch.loss_mask  # type: ignore[misc]
    bounds = batch.cu_seqlens[0].tolist()  # type: ignore[index]
    found = []
    for first, stop in pairwise(bounds):
        if stop > first and counts[first:stop].any():
            last = labels[stop - 1 : stop] if counts[stop - 1] else tokens[:0]
            text = torch.cat([tokens[first:stop], last])
            found.append((text, torch.cat([torch.zeros(1), counts[first:stop]])[: len(text)]))
    return found


def _log_probability(stage: Any, length: int, text: Tensor, counts: Tensor) -> Tensor:
    """Of the tokens of a lone document that count, from logits."""
    row = Answers(length).row([np.stack([text.numpy(), counts.numpy().astype(np.int64)])], 0)
    batch = replace(Answers(length).batch(torch.from_numpy(row)[None]), padding=None)
    logits_sv = stage(None, replace(batch, labels=None))[:, 0, : stage.model.stem.vocab_size]
    log_probabilities = torch.log_softmax(logits_sv.double(), dim=-1)
    positions = torch.arange(len(text) - 1)
    return (log_probabilities[positions, text[1:]] * counts[1:]).sum()


def _gradients_and_by_hand(preset: Preset) -> tuple[float, float, float, int]:
    """Largest difference of a gradient from that of the formula, relative to the largest; both losses; pairs."""
    trainer, parallel = start(config_of(preset))
    steps_of(trainer, parallel, range(2))  # the model is no longer the reference
    found = batches(2, trainer.config, parallel)
    passes = trainer.run_passes(found)
    pairs = int(passes.report[1])
    scale = trainer.nominal_tokens / pairs
    gradients = torch.cat([x.flatten() for x in trainer.strategy.gradients]) * scale
    reference = trainer.frozen
    assert reference is not None
    trainer.strategy.clear()
    losses, length = [], trainer.config.training.seq_length
    for batch in found:
        documents = _lone_documents(batch)
        assert len(documents) % 2 == 0
        policy = [_log_probability(trainer.stages[0], length, *x) for x in documents]
        with torch.no_grad():
            frozen = [_log_probability(reference.stages[0], length, *x) for x in documents]
        ratios = [a - b for a, b in zip(policy, frozen)]
        for chosen, rejected in zip(ratios[::2], ratios[1::2]):
            p = 1 / (1 + torch.exp(-BETA * (chosen - rejected)))
            losses.append(-(1 - SMOOTHING) * p.log() - SMOOTHING * (1 - p).log())
    mean = torch.stack(losses).mean()
    mean.backward()
    assert len(losses) == pairs
    by_hand = torch.cat([x.flatten() for x in trainer.strategy.gradients])
    difference = float((gradients - by_hand).abs().max() / by_hand.abs().max())
    return difference, float(passes.report[0]) / pairs, float(mean.detach()), pairs


@pytest.mark.parametrize("preset", [FP64 | LOSS_PARTS, FP64 | TIED])
def test_gradients_are_those_of_the_formula(world2: World, preset: Preset) -> None:
    """Of lone documents, from logits, in float64."""
    difference, loss, by_hand, pairs = world2.run(_gradients_and_by_hand, DPO | SAMPLES_4 | preset, ranks=1)[0]
    assert pairs > 4
    assert difference < 1e-10
    assert loss == pytest.approx(by_hand, rel=1e-12)
    assert abs(loss - math.log(2)) > 1e-3


# --- layouts ---------------------------------------------------------------------------------------------------------


def _curve(preset: Preset) -> Curve:
    trainer, parallel = start(config_of(preset))
    curve = steps_of(trainer, parallel, range(2))
    # The rewards of some pairs of other batches are equal, and rounding decides whether they count as right.
    evaluated = trainer.evaluate(batches(3, trainer.config, parallel))
    return [*curve, (evaluated.mean, evaluated.tokens), *((x, 0.0) for x in evaluated.metrics.values())]


@pytest.fixture(scope="module")
def one_rank(world4: World) -> OneRank[Curve]:
    return OneRank(world4, _curve)


LAYOUTS = [  # slow: layouts of one kind, which quick ones combine
    TP2 | CP2, DP2 | ZERO, CP2 | DP2 | FSDP, LAYERS_4 | PP2 | ZB_H1, LAYERS_4 | PP2 | ZB_V, TIED | TP2 | PP2,
    LORA | TP2 | PP2, LORA | DP2 | FSDP, MOE | DP2 | CP2,
]  # fmt: skip
SLOW_LAYOUTS = [
    TP2, PP2, CP2, DP2, DP2 | FSDP, TP2 | DP2 | ZERO, PP2 | DP2, LAYERS_4 | PP2 | INTERLEAVED, LORA | CP2 | DP2,
    LORA | DP2 | ZERO, MOE | TP2,
]  # fmt: skip


@pytest.mark.parametrize("preset", slow_but(LAYOUTS + SLOW_LAYOUTS, *LAYOUTS), ids=str)
def test_layouts_train_alike(world4: World, one_rank: OneRank[Curve], preset: Preset) -> None:
    """In float64: losses, gradient norms, and what an evaluation reports. Two micro-batches on each rank."""
    preset = DPO | FP64 | preset | (SAMPLES_4 if preset.data_ranks == 2 else SAMPLES_2)
    expected = one_rank(preset)
    assert expected[0][0] == pytest.approx(math.log(2), rel=1e-12)
    for found in world4.run(_curve, preset, ranks=preset.ranks):
        np.testing.assert_allclose(found, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("preset", [CURRENT, DELAYED, LORA | CURRENT | TP2, FP16], ids=str)
def test_other_precisions_train(world2: World, preset: Preset) -> None:
    """In FP8 the model differs from the reference by its rounding; both are as in high precision, nearly."""
    (expected,) = world2.run(_curve, DPO | SAMPLES_4 | (LORA if LORA in preset else NO_CLIP), ranks=1)
    found = world2.run(_curve, DPO | SAMPLES_4 | preset, ranks=preset.ranks)[0]
    assert all(math.isfinite(x) for step in found for x in step)
    assert found[0][0] == pytest.approx(expected[0][0], abs=0.1)


def _digest(preset: Preset) -> str:
    trainer, parallel = start(config_of(preset))
    before = weights_digest(trainer)
    steps_of(trainer, parallel, range(1))
    assert weights_digest(trainer) != before
    return before


def test_the_digest_of_weights_is_the_same_in_any_layout(world4: World) -> None:
    (expected,) = world4.run(_digest, DPO | TIED, ranks=1)
    for layout in (TP2 | PP2, DP2 | ZERO, DP2 | FSDP | TP2):
        assert set(world4.run(_digest, DPO | TIED | layout, ranks=layout.ranks)) == {expected}
    assert world4.run(_digest, DPO, ranks=1)[0] != expected


# --- runs ------------------------------------------------------------------------------------------------------------


def make_pairs(count: int) -> list[dict[str, Any]]:
    """Questions with a right and a wrong answer, as lists of messages; each third has an earlier answer too."""
    pairs = []
    for i in range(count):
        prompt = [{"role": "user", "content": f"{i % 7} of {i}?"}]
        if i % 3 == 0:
            prompt = [*prompt, {"role": "assistant", "content": "so?"}, {"role": "user", "content": "again"}]
        right, wrong = ("even", "odd number") if i % 2 == 0 else ("odd number", "even")
        answers = {"chosen": right, "rejected": wrong}
        pairs.append({"prompt": prompt, **{k: [{"role": "assistant", "content": x}] for k, x in answers.items()}})
    return pairs


def prepare(folder: Path, count: int = 40, template: str = CHATML) -> list[str]:
    """A small model of transformers with a tokenizer, pairs as a data set, and what makes the DPO config use them."""
    make_model(folder / "model", 1024)
    tokenizer = write_tokenizer(folder / "model", template)
    (folder / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in make_pairs(count)))
    flags = ["--tokenizer", "huggingface", "--tokenizer-path", str(tokenizer), "--style", "preference"]
    inputs = ["--input", str(folder / "pairs.jsonl"), "--output-prefix", str(folder / "pairs")]
    assert preprocess_data.main([*inputs, *flags]) == 0
    return [
        "name=test", "device=cpu", f"run_dir={folder / 'runs'}", f"data.train=[{folder / 'pairs'}]",
        f"data.tokenizer.path={tokenizer}", f"data.index_cache={folder / 'cache'}", "data.num_workers=0",
        f"checkpoint.init_from={folder / 'model'}", "training.precision=fp32", "fp8.recipe=none",
        "training.seq_length=192", "training.global_batch_size=4", "training.steps=4", "training.eval_interval=4",
        "training.eval_steps=1", "optimizer.warmup_steps=0", "optimizer.learning_rate=1e-3", 'data.split="80,20,0"',
        "parallel.layers_per_stage=null", "checkpoint.interval=2", "logging.progress=false",
    ]  # fmt: skip


PAIRS = 20
SHORT = ["training.steps=2", "training.eval_interval=2", "training.global_batch_size=2", "checkpoint.interval=1"]


def _job(overrides: list[str]) -> list[dict[str, Any]]:
    config = load_config(CONFIG, overrides, complete_model)
    check_layout(config, torch.distributed.get_world_size())
    inputs = open_inputs(config, "test")
    check_run(inputs)
    run_job(inputs)
    return read_metrics(Path(config.run_dir) / config.name / "metrics.jsonl")


def test_the_loss_of_a_run_is_that_of_transformers(world4: World, tmp_path: Path) -> None:
    """By its chat template and model: the first step of a run that begins with another model than its reference."""
    transformers = pytest.importorskip("transformers")
    overrides = prepare(tmp_path, PAIRS)
    live = [*overrides, "name=live", "data.dpo.reference=live", *ONE_RANK]
    precomputed = [*overrides, "name=precomputed", "training.stop_after=2"]
    rows = {"live": world4.run(_job, live, ranks=1)[0], "precomputed": world4.run(_job, precomputed, ranks=4)[0]}
    for step, other in zip(rows["live"][:2], rows["precomputed"], strict=True):
        for key in ("loss", "rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies", "grad_norm"):
            assert step[key] == pytest.approx(other[key], rel=1e-4, abs=1e-5), key
    assert rows["live"][0]["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert rows["live"][3]["loss"] < rows["live"][0]["loss"] - 0.01
    # Log-probabilities of the reference in the file are those of transformers.
    (path,) = tmp_path.glob("pairs.reference-*.npz")
    values = np.load(path)["log_probabilities"]
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path / "model")
    tokenizer.chat_template = CHATML
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float64)
    for pair, of_pair in zip(make_pairs(PAIRS), values, strict=True):
        prompt = tokenizer.apply_chat_template(pair["prompt"], add_generation_prompt=True, return_dict=True)[
            "input_ids"
        ]
        for key, value in zip(("chosen", "rejected"), of_pair):
            whole = tokenizer.apply_chat_template([*pair["prompt"], *pair[key]], return_dict=True)["input_ids"]
            ids = torch.tensor(whole[:-1])  # without the line feed after <|im_end|>
            log_p = torch.log_softmax(model(ids[None]).logits[0, :-1], -1).gather(1, ids[1:, None])[:, 0]
            assert value == pytest.approx(float(log_p[len(prompt) - 1 :].detach().sum()), rel=1e-5)


def _evaluated(overrides: list[str], policy: str, reference: str) -> dict[str, float]:
    """Of one sample, which has all pairs."""
    config = load_config(CONFIG, overrides, complete_model)
    inputs = open_inputs(config, "test")
    trainer, parallel = start(inputs.config)
    load_init(trainer, policy)
    assert trainer.frozen is not None
    load_init(trainer.frozen, reference)
    loss = trainer.evaluate(next(inputs.batches(inputs.train, parallel)))
    return {"loss": loss.mean, "pairs": loss.tokens, **loss.metrics}


def test_an_evaluation_is_that_of_trl(world2: World, tmp_path: Path) -> None:
    """Of another model than the reference. Special tokens begin and end answers: TRL counts white space after an
    answer, and leaves out the end of a prompt that is not the end of a token."""
    trl = pytest.importorskip("trl")
    transformers, datasets = pytest.importorskip("transformers"), pytest.importorskip("datasets")
    overrides = prepare(tmp_path, 8, SPECIAL_ENDS)
    models = [
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32) for _ in range(2)
    ]
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in models[0].parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.02)
    models[0].save_pretrained(tmp_path / "policy")
    keys = ["training.seq_length=1024", "training.global_batch_size=1", 'data.split="1"', "training.eval_interval=0"]
    more = [*ONE_RANK, *keys, "data.dpo.beta=0.3", "data.dpo.reference=live"]
    folders = str(tmp_path / "policy"), str(tmp_path / "model")
    ours = world2.run(_evaluated, [*overrides, *more], *folders, ranks=1)[0]
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path / "model")
    tokenizer.eos_token, tokenizer.pad_token = "<|im_end|>", "<|endoftext|>"
    config = trl.DPOConfig(
        output_dir=str(tmp_path / "trl"), beta=0.3, per_device_train_batch_size=8, max_steps=1, logging_steps=1,
        report_to=[], bf16=False, use_cpu=True, learning_rate=1e-30, max_length=None, save_strategy="no",
    )  # fmt: skip
    trainer = trl.DPOTrainer(
        model=models[0], ref_model=models[1], args=config, processing_class=tokenizer,
        train_dataset=datasets.Dataset.from_list(make_pairs(8)),
    )  # fmt: skip
    trainer.train()
    theirs = trainer.state.log_history[0]
    assert ours.pop("pairs") == 8
    assert abs(ours["loss"] - math.log(2)) > 1e-3
    for key, value in ours.items():
        assert value == pytest.approx(theirs[key], rel=1e-4), key


@pytest.mark.parametrize(
    ("tensor", "more"),
    [
        (2, ["data.dpo.reference=live"]),
        (1, ["data.dpo.reference=precomputed"]),
        (1, ["data.dpo.reference=live", "lora={rank: 4}"]),
    ],
    ids=["live", "precomputed", "lora"],
)
def test_a_run_that_resumes_is_bit_identical(world2: World, tmp_path: Path, tensor: int, more: list[str]) -> None:
    overrides = [*prepare(tmp_path, PAIRS), *SHORT, f"parallel.tensor={tensor}", "parallel.pipeline=1", *more]
    whole = world2.run(_job, [*overrides, "name=whole"], ranks=tensor)[0]
    for stop in (["training.stop_after=1"], []):
        resumed = world2.run(_job, [*overrides, "name=resumed", *stop], ranks=tensor)[0]
    keys = ["loss", "grad_norm", *(key for key in whole[0] if key.startswith("rewards/"))]
    assert len(keys) == 6
    assert [[row[key] for key in keys] for row in whole] == [[row[key] for key in keys] for row in resumed]
    assert whole[-1]["validation_loss"] == resumed[-1]["validation_loss"]
    expected, found = (digests(saved_tensors(tmp_path / "runs" / name, 2)) for name in ("whole", "resumed"))
    assert expected == found


def test_a_run_does_not_resume_with_another_reference(world2: World, tmp_path: Path) -> None:
    base = [*prepare(tmp_path, PAIRS), *SHORT, *ONE_RANK]
    live, precomputed = [*base, "name=live", "data.dpo.reference=live"], [*base, "name=precomputed"]
    stop = ["training.stop_after=1"]
    for overrides in (live, precomputed):
        world2.run(_job, [*overrides, *stop], ranks=1)
    (path,) = tmp_path.glob("pairs.reference-*.npz")
    path.unlink()
    world2.run(_refused, precomputed, "is missing, or belongs to other data: the run began with", ranks=1)
    world2.run(_refused, [*live, "data.dpo.reference=precomputed"], "is missing, or belongs to other data", ranks=1)
    file = tmp_path / "model" / "model.safetensors"
    tensors = load_file(file)
    tensors[sorted(tensors)[0]] = tensors[sorted(tensors)[0]] + 1e-3
    save_file(tensors, file, {"format": "pt"})
    world2.run(_refused, live, "frozen model, .* has changed since the run began", ranks=1)


def _refused(overrides: list[str], message: str) -> None:
    with pytest.raises(TrainingError, match=message):
        _job(overrides)


# --- the config and the data -----------------------------------------------------------------------------------------


def test_pairs_are_documents_of_two_answers(tmp_path: Path) -> None:
    overrides = [*prepare(tmp_path), *ONE_RANK]
    dataset = IndexedDataset(tmp_path / "pairs")
    assert dataset.has_pairs
    assert dataset.num_documents == 40
    inputs = open_inputs(load_config(CONFIG, overrides, complete_model), "test")
    parts = inputs.train.parts(0)
    assert len(parts) % 2 == 0
    assert len(parts) > 2, "nothing is packed"
    for chosen, rejected in zip(parts[::2], parts[1::2]):
        first = np.flatnonzero(chosen[1])[0]
        assert (chosen[0, :first] == rejected[0, :first]).all()
        assert not rejected[1, :first].any()
        assert chosen[1, -2] == 1  # <|im_end|>
    packed = inputs.train.datasets[0]
    assert isinstance(packed, PackedDataset)
    assert packed.reference is not None
    packed.reference.values = np.arange(80.0).reshape(40, 2)
    of_process = pickle.loads(pickle.dumps(packed))  # as loader processes have it
    documents = [x for i in packed.documents_of(0) for x in (2.0 * i, 2.0 * i + 1)]
    assert [part[2].view(np.float64)[0] for part in of_process.parts(0)] == documents
    short = [*overrides, "training.seq_length=110"]
    inputs = open_inputs(load_config(CONFIG, short, complete_model), "test")
    (data_set,) = inputs.data_sets
    lengths = dataset.document_lengths[:32]
    assert data_set.train.left_out == int((lengths > 111).sum())  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"data": {"loss_on": "answers"}}, "data.loss_on = 'answers': data.dpo is set, and its loss is computed"),
        (
            {"data": {"packing": "concatenate"}},
            "data.packing = 'concatenate': data.dpo is set, and its pairs are packed",
        ),
        ({"data": {"prefix_lm": {}}}, "a model has one objective, and data.prefix_lm and data.dpo are set"),
        ({"model": {"mtp_num_layers": 1}}, "model.mtp_num_layers = 1: data.dpo is set"),
        ({"training": {"z_loss": 0.1}}, "training.z_loss = 0.1: data.dpo is set"),
        ({"training": {"cuda_graphs": True}, "device": "cuda"}, "training.cuda_graphs = True: a frozen model computes"),
        ({"data": {"dpo": {"reference": "precomputed"}, "train": ["s3://b/x"]}}, "data.dpo.reference = 'precomputed'"),
    ],
)
def test_what_does_not_go_with_it_is_refused(change: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        check_layout(config_of(DPO, **change), 1)


@pytest.mark.parametrize(
    ("keys", "value"), [("beta", 0), ("label_smoothing", 0.5), ("reference", "frozen"), ("betta", 1)]
)
def test_bad_values_are_refused(keys: str, value: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"data.dpo.{keys}"):
        load_config(CONFIG, [f"data.dpo.{keys}={value}", "model.vocab_size=100"])
