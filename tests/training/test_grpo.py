"""GRPO: gradients of an own formula in float64, any layout, rollouts with the numbers of training, resuming, errors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megafp8.batch import Batch
from megafp8.config import Config, ConfigError, TokenizerConfig, check_layout
from megafp8.data import DataError
from megafp8.host.processes import process_start
from megafp8.inference import live
from megafp8.objectives.answers import Answers
from megafp8.training.errors import TrainingError
from megafp8.training.inputs import open_inputs
from megafp8.training.metrics import read_metrics
from megafp8.training.validate import check_run
from tests.marks import slow_but
from tests.quickstart_data import ROOT
from tests.training.presets import (
    CP2,
    CURRENT,
    DELAYED,
    DP2,
    DP4,
    FP64,
    FSDP,
    GRPO,
    INTERLEAVED,
    LAYERS_4,
    LAYERS_8,
    LORA,
    LOSS_PARTS,
    MOE,
    NO_CLIP,
    NONE,
    PP2,
    SAMPLES_2,
    SAMPLES_4,
    SAMPLES_8,
    TIED,
    TP2,
    ZB_V,
    ZERO,
    Preset,
    config_of,
    merged,
    without_execution,
)
from tests.training.runs import Curve, OneRank, batches, digests, run_job, saved_tensors, start, steps_of
from tests.world import World

LOW = HIGH = 0.2
TEMPERATURE, BETA = 0.7, 0.3  # of the preset


# --- gradients -------------------------------------------------------------------------------------------------------


def _texts(batch: Batch) -> Iterator[tuple[Tensor, int, Tensor, float]]:
    """Of each text of a micro-batch of one sample: tokens, those of the prompt, log-probabilities, and advantage."""
    (tokens,), (labels,), (counts,), (values,) = batch.tokens, batch.labels, batch.loss_mask, batch.sampled  # type: ignore[misc]
    for first, stop in pairwise(batch.cu_seqlens[0].tolist()):  # type: ignore[index]
        own = counts[first:stop] > 0
        if own.any():
            last = first + int(own.nonzero().max())
            text = torch.cat([tokens[first : last + 1], labels[last : last + 1]])
            sampled = values[first:stop][own]
            yield text, len(text) - int(own.sum()), sampled[:, 0], float(sampled[0, 1])


def _logprobs(stage: Any, length: int, text: Tensor, prompt: int) -> Tensor:
    """Of the tokens after the prompt, of a text that is alone, from logits."""
    row = Answers(length).row([np.stack([text.numpy(), np.ones(len(text), np.int64)])], 0)
    batch = Answers(length).batch(torch.from_numpy(row)[None])
    logits_sv = stage(None, Batch(**{**vars(batch), "labels": None, "padding": None}))[
        :, 0, : stage.model.stem.vocab_size
    ]
    places = torch.arange(prompt - 1, len(text) - 1)
    return torch.log_softmax(logits_sv.double() / TEMPERATURE, dim=-1)[places, text[places + 1]]


def _gradients_and_by_hand(preset: Preset) -> tuple[float, float, float, int, float]:
    """Largest difference of a gradient from that of the formula, relative to the largest; both losses; texts, and the
    share of tokens that are clipped."""
    trainer, parallel = start(config_of(preset))
    steps_of(trainer, parallel, range(2))  # the model is no longer the reference
    found = batches(2, trainer.config, parallel)
    passes = trainer.run_passes(found)
    count, length = int(passes.report[1]), trainer.config.training.seq_length
    gradients = torch.cat([x.flatten() for x in trainer.strategy.gradients]) * (trainer.nominal_tokens / count)
    assert trainer.frozen is not None
    trainer.strategy.clear()
    losses = []
    for batch in found:
        for text, prompt, sampled, advantage in _texts(batch):
            logprobs = _logprobs(trainer.stages[0], length, text, prompt)
            with torch.no_grad():
                q = (_logprobs(trainer.frozen.stages[0], length, text, prompt) - logprobs).exp()
            q = q.detach() * (logprobs.detach() - logprobs).exp()
            ratio = logprobs.exp() / sampled.exp()
            clipped = torch.where(ratio > 1 + HIGH, 1 + HIGH, torch.where(ratio < 1 - LOW, 1 - LOW, ratio))
            gain = torch.where(ratio * advantage < clipped * advantage, ratio * advantage, clipped * advantage)
            losses.append((-gain + BETA * (q - q.log() - 1)).mean())
    mean = torch.stack(losses).mean()
    mean.backward()
    assert len(losses) == count
    by_hand = torch.cat([x.flatten() for x in trainer.strategy.gradients])
    difference = float((gradients - by_hand).abs().max() / by_hand.abs().max())
    return difference, float(passes.report[0]) / count, float(mean.detach()), count, float(passes.report[2]) / count


@pytest.mark.parametrize("preset", slow_but([FP64 | LOSS_PARTS, FP64 | TIED], FP64 | LOSS_PARTS))
def test_gradients_are_those_of_the_formula(world2: World, preset: Preset) -> None:
    """Of lone texts, from logits, in float64: clipped ratios, reference and temperature."""
    difference, loss, by_hand, count, clipped = world2.run(_gradients_and_by_hand, GRPO | SAMPLES_4 | preset, ranks=1)[
        0
    ]
    assert count > 4
    assert 0 < clipped < 1
    assert difference < 1e-10
    assert loss == pytest.approx(by_hand, rel=1e-12)


# --- layouts ---------------------------------------------------------------------------------------------------------


def _curve(preset: Preset) -> Curve:
    trainer, parallel = start(config_of(preset))
    curve = steps_of(trainer, parallel, range(2))
    evaluated = trainer.evaluate(batches(9, trainer.config, parallel))
    return [*curve, (evaluated.mean, evaluated.tokens), *((x, 0.0) for x in evaluated.metrics.values())]


LAYOUTS = [
    TP2, PP2, CP2, DP2, DP2 | ZERO, DP2 | FSDP, TP2 | CP2, TP2 | DP2 | ZERO, PP2 | DP2, CP2 | DP2 | FSDP,
    LAYERS_4 | PP2 | INTERLEAVED, LAYERS_8 | PP2 | ZB_V, TIED | TP2 | PP2, LORA | TP2 | PP2, LORA | DP2 | ZERO,
    MOE | TP2, MOE | DP2 | CP2,
]  # fmt: skip


@pytest.fixture(scope="module")
def one_rank(world4: World) -> OneRank[Curve]:
    return OneRank(world4, _curve)


@pytest.mark.parametrize("preset", slow_but(LAYOUTS, TP2 | CP2, LORA | TP2 | PP2), ids=str)
def test_layouts_train_alike(world4: World, one_rank: OneRank[Curve], preset: Preset) -> None:
    """In float64: losses, gradient norms, and what is reported. Two micro-batches on each rank."""
    preset = GRPO | FP64 | preset | (SAMPLES_4 if preset.data_ranks == 2 else SAMPLES_2)
    expected = one_rank(preset)
    assert expected[-1][0] > 0, "no divergence from the reference"
    for found in world4.run(_curve, preset, ranks=preset.ranks):
        np.testing.assert_allclose(found, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("preset", [CURRENT, DELAYED | DP2, LORA | CURRENT | TP2], ids=str)
def test_other_precisions_train(world2: World, preset: Preset) -> None:
    found = world2.run(_curve, GRPO | SAMPLES_4 | preset, ranks=preset.ranks)[0]
    assert np.isfinite(found).all()


def _norm_of_few(preset: Preset) -> tuple[float, float]:
    """Loss and gradient norm of a step of four samples."""
    trainer, parallel = start(config_of(preset))
    four = batches(0, config_of(GRPO | SAMPLES_4 | FP64 | MOE), parallel)
    loss, result = trainer.train_step(0, four)
    return loss.mean, result.grad_norm


def test_auxiliary_losses_are_means_over_the_samples_there_are(world2: World) -> None:
    """As if the batch had been made for as many samples as the texts fill."""
    of_four, of_eight = (
        world2.run(_norm_of_few, GRPO | x | FP64 | MOE | NO_CLIP, ranks=1)[0] for x in (SAMPLES_4, SAMPLES_8)
    )
    assert of_eight == pytest.approx(of_four, rel=1e-12)


# --- runs ------------------------------------------------------------------------------------------------------------

REWARDS = '''
import sys

def low(prompts, completions, goal):
    """The share of bytes below the goal: some of any text."""
    return [sum(ord(c) < g for c in text) / 12 for text, g in zip(completions, goal, strict=True)]

def raises(prompts, completions, goal):
    return 1 / 0

def exits(prompts, completions, goal):
    yield sys.exit(0)
'''
PROGRAM = """
import json, sys
for line in sys.stdin:
    record = json.loads(line)
    print(sum(ord(c) < record["goal"] for c in record["completion"]) / 12)
"""


def _write(folder: Path, prompts: int = 6) -> None:
    (folder / "rewards.py").write_text(REWARDS)
    (folder / "program.py").write_text(PROGRAM)
    records = [{"prompt": f"{i}+{i % 3}=", "goal": 100 + i} for i in range(prompts)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


def _config(folder: Path, preset: Preset = NONE, *, name: str = "run", reward: str = "low", **more: Any) -> Config:
    """A run with a bytes tokenizer, of eight texts a step."""
    grpo = {"reward": f"{folder / 'rewards.py'}:{reward}", "group_size": 4, "max_tokens": 12, **more.pop("grpo", {})}
    data = {
        "train": [str(folder / "prompts.jsonl")], "packing": "best_fit", "mask_eod_loss": True,
        "reset_at_documents": True, "tokenizer": {"kind": "bytes"}, "grpo": grpo,
    }  # fmt: skip
    sections = {
        "model": {"vocab_size": None}, "training": {"steps": 4, "global_batch_size": 8}, "data": data,
        "checkpoint": {"interval": 2, "async_save": False},
        "logging": {"progress": False, "tensorboard": False, "interval": 2},
    }  # fmt: skip
    config = config_of(preset, **merged(preset.sections, sections, more))
    return config.model_copy(update={"name": name, "run_dir": str(folder / "runs")})


def _job(config: Config) -> list[dict[str, Any]]:
    check_layout(config, torch.distributed.get_world_size())
    inputs = open_inputs(config, "test")
    check_run(inputs)
    run_job(inputs, live.uses(inputs))
    return read_metrics(Path(config.run_dir) / config.name / "metrics.jsonl")


KEYS = (
    "loss", "grad_norm", "reward", "reward_std", "frac_reward_zero_std", "completions/mean_length",
    "completions/clipped_ratio", "clip_ratio", "rollout_kl", "rollout_difference",
)  # fmt: skip


def _values(rows: list[dict[str, Any]], keys: tuple[str, ...] = KEYS) -> list[list[float]]:
    return [[row[key] for key in keys] for row in rows]


INVARIANT = {"inference": {"batch_invariant": True}}


@pytest.mark.parametrize("preset", slow_but([NONE, PP2, DP2 | ZERO, PP2 | DP2], PP2), ids=str)
def test_rollouts_have_the_numbers_of_training(world4: World, tmp_path: Path, preset: Preset) -> None:
    """In fp32: the divergence of training from sampling is 0, also at a temperature; without batch invariance not."""
    _write(tmp_path)
    warm: dict[str, Any] = {"grpo": {"temperature": 0.7}, "training": {"steps": 2}}
    configs = [
        _config(tmp_path, preset, name="plain", **INVARIANT),
        _config(tmp_path, preset, name="warm", **INVARIANT, **warm),
        _config(tmp_path, preset, name="other", **warm | {"training": {"steps": 1}}),
    ]
    plain, tempered, other = (world4.run(_job, config, ranks=preset.ranks)[0] for config in configs)
    for rows in (plain, tempered):
        assert all((x["rollout_kl"], x["rollout_difference"], x["clip_ratio"]) == (0.0, 0.0, 0.0) for x in rows)
        assert all(x["grad_norm"] > 0 and x["reward_std"] > 0 for x in rows)
    assert all(0 < x["rollout_difference"] < 1e-5 for x in other)
    samples = [json.loads(line) for line in (tmp_path / "runs" / "plain" / "samples.jsonl").read_text().splitlines()]
    assert [x["step"] for x in samples] == [step for step in (1, 2, 4) for _ in range(4)]
    for x in samples:
        assert x["reward"] == sum(ord(c) < 100 + int(x["prompt"][0]) for c in x["text"]) / 12


@pytest.mark.parametrize(
    "preset", slow_but([DP2, DP4, TP2, CP2, PP2, DP2 | FSDP, MOE | DP2, TP2 | DP2, LORA | DP2], TP2 | DP2), ids=str
)
def test_rollouts_are_the_same_in_any_layout(world4: World, tmp_path: Path, preset: Preset) -> None:
    """In float64, with a reference: texts, rewards and gradients; and of a program's rewards."""
    _write(tmp_path)
    with_reference: dict[str, Any] = {"grpo": {"beta": 0.1}, "training": {"steps": 2}}
    program = {"reward": None, "reward_command": ["python3", str(tmp_path / "program.py")], "beta": 0.1}
    plain = Preset(("one",), without_execution(FP64 | preset))
    (expected,) = world4.run(_job, _config(tmp_path, plain, name="one", **with_reference), ranks=1)
    several = _config(tmp_path, FP64 | preset, name="several", **with_reference | {"grpo": program})
    found = world4.run(_job, several, ranks=preset.ranks)[0]
    keys = (*(key for key in KEYS if not key.startswith("rollout")), "kl")  # sampled in float32
    np.testing.assert_allclose(_values(found, keys), _values(expected, keys), rtol=1e-6, atol=1e-7)
    assert expected[0]["kl"] == 0
    assert expected[1]["kl"] > 0


@pytest.mark.slow
def test_rewards_of_the_example_rise(tmp_path: Path) -> None:
    """From about one right answer in four to most of them, with fewer steps."""
    command = [sys.executable, str(ROOT / "examples" / "grpo_arithmetic" / "run.py"), "training.steps=60"]
    subprocess.run(command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True, capture_output=True)
    rows = read_metrics(tmp_path / "runs" / "arithmetic-grpo" / "metrics.jsonl")
    first, last = (np.mean([row["reward"] for row in part]) for part in (rows[:3], rows[-10:]))
    assert first < 0.4
    assert last > 0.7
    assert {row["rollout_kl"] for row in rows} == {0.0}


def test_a_run_that_resumes_is_bit_identical(world2: World, tmp_path: Path) -> None:
    """Through an epoch's end, with a reference."""
    _write(tmp_path, prompts=3)
    more = {"grpo": {"beta": 0.1}, "training": {"steps": 2}, "checkpoint": {"interval": 1}, **INVARIANT}
    whole, resumed = (_config(tmp_path, DP2 | ZERO, name=name, **more) for name in ("whole", "resumed"))
    stopped = resumed.model_copy(update={"training": resumed.training.model_copy(update={"stop_after": 1})})
    rows, _, found = (world2.run(_job, config)[0] for config in (whole, stopped, resumed))
    assert _values(rows, (*KEYS, "kl", "tokens")) == _values(found, (*KEYS, "kl", "tokens"))
    expected, after = (digests(saved_tensors(tmp_path / "runs" / name, 2)) for name in ("whole", "resumed"))
    assert expected == after
    texts = [(tmp_path / "runs" / name / "samples.jsonl").read_text() for name in ("whole", "resumed")]
    assert texts[0] == texts[1]


def _refused(config: Config, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        _job(config)


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        ("raises", "raises: raised ZeroDivisionError: division by zero .*rewards.py, line 9"),
        ("exits", "exits: raised SystemExit: 0 .*; it must return a number for every text"),
    ],
)
def test_a_reward_that_fails_ends_all_ranks_with_one_error(
    world2: World, tmp_path: Path, reward: str, message: str
) -> None:
    _write(tmp_path)
    world2.run(_refused, _config(tmp_path, DP2, reward=reward), TrainingError, message)


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("import sys; sys.exit('no such model')", "ended with code 1: no such model"),
        ("import time; time.sleep(60)", "did not end within data.grpo.reward_seconds = 0.5 for 4 texts"),
        ("print('good')", "wrote 1 rewards for 4 texts"),
        ("[print('good') for _ in range(4)]", "wrote 'good' for the text"),
        ("[print(1) for _ in range(9)]", "wrote more than 4 rewards for 4 texts"),
        ("import sys; sys.stdout.buffer.write(bytes([255]))", "can't decode byte 0xff"),
        (
            "while True: print('1' * 10**5)",
            "wrote more than 16,777,216 bytes for 4 texts; it must write one number per text",
        ),
        ("import sys\nfor i in range(10**5): print(i, file=sys.stderr)\nsys.exit(3)", "code 3: \\d+\n(.*\n)*99999$"),
    ],
)
def test_a_program_that_fails(tmp_path: Path, program: str, message: str) -> None:
    seconds = 0.5 if "sleep" in program else 60  # Python starts slowly on a busy machine
    command = {"reward": None, "reward_command": ["python3", "-S", "-c", program], "reward_seconds": seconds}
    with pytest.raises(ValueError, match=message):
        _rewards_of(tmp_path, command)


@pytest.mark.parametrize(("ends", "error"), [("wait", "did not end within"), ("exit 0", "wrote 0 rewards")])
def test_a_program_leaves_no_children(tmp_path: Path, ends: str, error: str) -> None:
    """At its limit and at its own end, also of children that hold its output open."""
    script = f"sleep 1000 & echo $! > {tmp_path}/pid; {ends}"
    seconds = 1.0 if ends == "wait" else 60.0
    began = time.monotonic()
    with pytest.raises(ValueError, match=error):
        _rewards_of(tmp_path, {"reward": None, "reward_command": ["sh", "-c", script], "reward_seconds": seconds})
    assert time.monotonic() - began < 30
    pid = (tmp_path / "pid").read_text().strip()
    while process_start(pid) is not None:
        assert time.monotonic() - began < 30, "the child runs on"
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return [10**400] * 4", "returned 1000*.* for the text 'b'; a reward must be a finite number"),
        ("return [10**5000] * 4", "returned a int for the text 'b'; a reward must be a finite number"),
        ("return [Bad()] * 4", "returned a Bad for the text 'b'; a reward must be a finite number"),
        ("return Bad()", "raised ZeroDivisionError: .* it must return a number for every text"),
        ("return itertools.repeat(1.0)", "returned more than 4 rewards for 4 texts"),
        ("return (1 / x for x in (1, 0))", "raised ZeroDivisionError: .* it must return a number for every text"),
        ("return [1.0]", "returned 1 rewards for 4 texts; it must give one for each"),
        ('return [float("nan")] * 4', "returned nan for the text 'b'; a reward must be a finite number"),
        ("return None", "returned a NoneType; it must return a list"),
        ("return 3.0", "returned a float; it must return a list with a number for each text"),
    ],
)
def test_a_function_that_returns_what_is_no_reward(tmp_path: Path, body: str, message: str) -> None:
    bad = "class Bad:\n    def __float__(self): 1 / 0\n    __iter__ = __repr__ = __float__\n"
    (tmp_path / "bad.py").write_text(f"import itertools\n{bad}def bad(prompts, completions):\n    {body}\n")
    with pytest.raises(ValueError, match=message):
        _rewards_of(tmp_path, {"reward": f"{tmp_path}/bad.py:bad"})


def _rewards_of(folder: Path, grpo: dict[str, Any]) -> list[float]:
    """Rewards of four texts by the reward that `data.grpo` names."""
    from megafp8.data.prompts import Prompt
    from megafp8.inference.rewards import open_reward

    given = _config(folder, grpo=grpo).data.grpo
    assert given is not None
    return open_reward(given, [])([Prompt("a", [1], {"prompt": "a"})] * 4, ["b"] * 4)


# --- config and data -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("records", "message"),
    [
        (['{"prompt": "' + "a" * 21 + '", "goal": 1}'], "prompts.jsonl, line 1: the prompt has 21 tokens, but tr"),
        (['{"prompt": "a", "goal": 1}', '{"question": "a"}'], "line 2: has no key 'prompt' .question.; data.grpo.pr"),
        (['{"prompt": ""}'], "line 1: the prompt is empty"),
        (['{"prompt": 3}'], "line 1: 'prompt' is not a string"),
        (["[1"], "line 1: not JSON"),
        (['{"prompt": "a", "completion": "b"}'], "line 1: has the key completion, completions or prompt"),
        (['{"prompt": [{"role": "user", "content": "a"}]}'], "line 1: .* has no chat template"),
        ([], "has no prompts"),
    ],
)  # fmt: skip
def test_a_prompt_that_cannot_be_used_is_named(tmp_path: Path, records: list[str], message: str) -> None:
    _write(tmp_path)
    (tmp_path / "prompts.jsonl").write_text("\n".join(records))
    with pytest.raises(DataError, match=message):
        open_inputs(_config(tmp_path), "test")


def test_a_prompt_that_is_too_long_to_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megafp8.data.documents.MAX_RECORD_BYTES", 100)
    _write(tmp_path)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a", "goal": 1}\n{"prompt": "' + "a" * 100 + '"}\n')
    with pytest.raises(DataError, match=r"prompts\.jsonl, line 2: has more than 100 bytes, the most that a line may"):
        open_inputs(_config(tmp_path), "test")


def test_prompts_are_shuffled_in_each_epoch(tmp_path: Path) -> None:
    _write(tmp_path)
    source = open_inputs(_config(tmp_path), "test").train.datasets[0]
    numbers, prompts = zip(*(source.prompt_at(index) for index in range(0, 48, 4)))  # type: ignore[union-attr]
    assert numbers == tuple(range(12))
    first, second = ([prompt.text for prompt in prompts[i : i + 6]] for i in (0, 6))
    assert sorted(first) == sorted(second)
    assert first != second
    assert source.prompt_at(5) == (1, prompts[1])  # type: ignore[union-attr]


def test_messages_are_rendered_by_the_chat_template(tmp_path: Path) -> None:
    from tests.data.test_chats import CHATML, write_tokenizer

    _write(tmp_path)
    path = write_tokenizer(tmp_path, CHATML)
    messages = [{"role": "user", "content": "2 + 2?"}]
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"question": messages, "goal": 1}))
    config = _config(tmp_path, grpo={"prompt_key": "question"}, training={"seq_length": 128})
    tokenizer = {"kind": "huggingface", "path": str(path)}
    config = config.model_copy(
        update={"data": config.data.model_copy(update={"tokenizer": TokenizerConfig(**tokenizer)})}
    )
    inputs = open_inputs(config, "test")
    assert inputs.tokenizer is not None
    _, prompt = inputs.train.datasets[0].prompt_at(0)  # type: ignore[union-attr]
    assert prompt.text == messages
    assert inputs.tokenizer.decode(prompt.tokens).endswith("assistant\n")


def test_another_group_size_does_not_resume(world2: World, tmp_path: Path) -> None:
    _write(tmp_path)
    config = _config(tmp_path)
    short = config.model_copy(update={"training": config.training.model_copy(update={"stop_after": 1})})
    world2.run(_job, short, ranks=1)
    error = r"data.grpo.group_size = 8: the run has counted its texts by groups of 4"
    world2.run(_refused, _config(tmp_path, grpo={"group_size": 8}), ConfigError, error, ranks=1)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"data": {"loss_on": "answers"}}, "data.loss_on = 'answers': data.grpo is set, and its loss is computed"),
        ({"data": {"packing": "concatenate"}}, "data.packing = 'concatenate': data.grpo is set, and a sample holds"),
        ({"data": {"tokenizer": None}}, "data.tokenizer = None: data.grpo is set, and prompts are texts"),
        ({"data": {"train": ["a.jsonl", "b.jsonl"]}}, "data.grpo is set, and all prompts come from one entry"),
        ({"data": {"train": ["prefix"]}}, "data.grpo is set, and prefix does not name JSON-lines files"),
        ({"data": {"validation": {"a": "b.jsonl"}}}, "data.validation = .'a'.: data.grpo is set"),
        ({"data": {"dpo": {}}}, "a model has one objective, and data.dpo and data.grpo are set"),
        ({"training": {"global_batch_size": 3}}, "training.global_batch_size = 3: data.grpo is set, and it counts"),
        ({"training": {"seq_length": 12}}, "data.grpo.max_tokens = 12: leaves no room for a prompt"),
        ({"training": {"eval_interval": 2}}, "training.eval_interval = 2: data.grpo is set, and prompts have no loss"),
        ({"training": {"cuda_graphs": True}, "device": "cuda"}, "training.cuda_graphs = True: texts are sampled bef"),
        ({"training": {"z_loss": 0.1}}, "training.z_loss = 0.1: data.grpo is set"),
        ({"model": {"mtp_num_layers": 1}}, "model.mtp_num_layers = 1: data.grpo is set"),
        ({"parallel": {"schedule": "mine.csv"}}, "parallel.schedule = 'mine.csv': data.grpo is set"),
        ({"resilience": {"loss_spike": {}}}, "resilience.loss_spike = 'set': data.grpo is set, and its loss cannot"),
    ],
)  # fmt: skip
def test_what_does_not_go_with_it_is_refused(change: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        check_layout(config_of(GRPO, **change), 1)


@pytest.mark.parametrize(
    ("grpo", "error"),
    [
        ({"reward_command": ["a"]}, "exactly one of data.grpo.reward"),
        ({"reward": None}, "exactly one of data.grpo.reward"),
        ({"reward": "rewards.py"}, "data.grpo.reward = 'rewards.py': names no function"),
    ],
)
def test_rewards_that_nothing_names(grpo: dict[str, Any], error: str) -> None:
    config = config_of(GRPO)
    given = config.data.grpo
    assert given is not None
    data = config.data.model_copy(update={"grpo": given.model_copy(update=grpo)})
    with pytest.raises(ConfigError, match=error):
        check_layout(config.model_copy(update={"data": data}), 1)


@pytest.mark.parametrize(
    ("grpo", "error"),
    [
        ({"reward": "no_such_module:f"}, "data.grpo.reward = 'no_such_module:f': ModuleNotFoundError"),
        ({"reward": "json:no_such_function"}, "AttributeError"),
        ({"reward": "json:__name__"}, "TypeError: __name__ is a str"),
        ({"reward": None, "reward_command": ["no-such-program"]}, "no such program"),
    ],
)
def test_rewards_are_opened_before_anything_runs(tmp_path: Path, grpo: dict[str, Any], error: str) -> None:
    _write(tmp_path)
    inputs = open_inputs(_config(tmp_path, grpo=grpo), "test")
    with pytest.raises(ConfigError, match=error):
        live.uses(inputs)
