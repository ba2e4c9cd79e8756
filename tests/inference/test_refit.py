"""Refit: a live trainer's weights in a generator of another layout are those of its checkpoint, bit for bit."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megafp8.checkpoint import CheckpointReader, latest
from megafp8.config import Config
from megafp8.inference import Generator, SamplingOptions
from megafp8.inference.refit import Holding, RankTensors, plan_refit
from megafp8.inference.staged_weights import tensors_of
from megafp8.linear.state import LinearState
from megafp8.training.state import checkpoint_folder, save_state
from tests.inference.test_checkpoints import CACHE, OPTIONS, PROMPTS, SCALES_OF_BATCHES
from tests.marks import slow_but
from tests.training.presets import *  # noqa: F403
from tests.training.presets import Preset, config_of
from tests.training.runs import start, steps_of
from tests.world import World

Layout = dict[str, int]


def _misfits(generator: Generator, folder: Path) -> list[str]:
    """Names of this rank's tensors that are not those of the newest checkpoint, read without the code of refits."""
    newest = latest(checkpoint_folder(folder))
    assert newest is not None
    reader = CheckpointReader(newest)
    wrong = []
    for name, rectangles in tensors_of(generator.model).items():
        for offset, view in rectangles.parts:
            expected = reader.read(name, offset, tuple(view.shape)).to(view.dtype)
            if not torch.equal(expected, view.detach()):
                wrong.append(name)
    return wrong


def _refitted(config: Config, folder: str, layout: Layout) -> dict[str, Any]:
    trainer, parallel = start(config)
    generator = Generator.from_trainer(trainer, cache=CACHE, **layout)
    assert generator.live is not None
    found: dict[str, Any] = {"misfits": [], "versions": [], "copies": []}
    for step in range(2):
        curve = steps_of(trainer, parallel, [step])
        completions = generator.generate(PROMPTS, OPTIONS[0])
        save_state(trainer, Path(folder) / str(step), step + 1, None)
        found["misfits"] += _misfits(generator, Path(folder) / str(step))
        found["versions"] += [x.weight_versions for x in completions]
        found["copies"].append(generator.live.copies)
        dist.barrier()
    found["texts"], found["curve"] = [x.tokens for x in completions], curve
    return found


def _of_checkpoint(folder: str, layout: Layout) -> list[list[int]]:
    generator = Generator.from_checkpoint(folder, device="cpu", cache=CACHE, **layout)
    return [x.tokens for x in generator.generate(PROMPTS, OPTIONS[0])]


def _curve(config: Config) -> Any:
    return steps_of(*start(config), range(2))[-1:]


CASES: list[tuple[Preset, Layout]] = [
    (DP2, {"tensor": 2}),
    (TP2 | DELAYED, {"tensor": 1}),
    (PP2 | TIED, {"pipeline": 1}),
    (TP2 | DP2 | BLOCKWISE | WIDE, {"tensor": 1}),
]
SLOW: list[tuple[Preset, Layout]] = [
    (ZERO | DP2 | FP8_GATHER | CURRENT, {"tensor": 2}),
    (FSDP | DP2 | GEMMA, {"tensor": 2}),
    (MOE | EP2 | DP2 | ALL_TO_ALL, {"tensor": 2, "expert": 1}),
    (DEEPSEEK | TP2 | EP2, {"tensor": 1, "expert": 1}),
    (TP2 | PP2 | GPT2, {"tensor": 1, "pipeline": 2}),
    (MTP | PP2 | LAYERS_4, {"pipeline": 1}),
    (HYBRID | TP2 | DELAYED, {"tensor": 1}),
    (TP2 | DP2 | BF16, {"tensor": 4}),
    (LORA | DP2, {"tensor": 2}),
    (CALIBRATED | DP2, {"tensor": 2}),
]


@pytest.mark.parametrize(
    ("preset", "layout"), [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)], ids=str
)
def test_another_layout(world4: World, tmp_path: Path, preset: Preset, layout: Layout) -> None:
    """Weights, constants and scales equal those of the checkpoint after each step, and so do texts; training goes on as
    if nothing had been generated."""
    config = config_of(preset)
    of_ranks = world4.run(_refitted, config, str(tmp_path), layout, ranks=preset.ranks)
    assert [found["misfits"] for found in of_ranks] == [[]] * preset.ranks
    assert all(found["versions"] == [[1]] * 3 + [[2]] * 3 for found in of_ranks)
    assert all(found["texts"] == of_ranks[0]["texts"] for found in of_ranks)
    assert world4.run(_curve, config, ranks=preset.ranks)[0] == of_ranks[0]["curve"]
    sizes = [layout.get("tensor", config.parallel.tensor), layout.get("pipeline", config.parallel.pipeline)]
    if config.fp8.recipe not in SCALES_OF_BATCHES:
        read = dict(zip(("tensor", "pipeline"), sizes)) | {"expert": layout.get("expert", 1)}
        ranks = sizes[0] * sizes[1]
        assert world4.run(_of_checkpoint, str(tmp_path / "1"), read, ranks=ranks)[0] == of_ranks[0]["texts"]


def _box(low: int, high: int, columns: tuple[int, int] = (0, 6)) -> tuple[tuple[int, int], tuple[int, int]]:
    return (low, columns[0]), (high - low, columns[1] - columns[0])


def _cuts(generator: random.Random, ranks: int) -> list[list[tuple[tuple[int, int], tuple[int, int]]]]:
    """Rectangles of a tensor of 12 × 6 on each rank: of a random grid, some of them on several ranks."""
    rows, columns = ([0, *sorted(generator.sample(range(1, n), 2)), n] for n in (12, 6))
    held: list[list[tuple[tuple[int, int], tuple[int, int]]]] = [[] for _ in range(ranks)]
    for (a, b), c in itertools.product(itertools.pairwise(rows), itertools.pairwise(columns)):
        for rank in generator.sample(range(ranks), generator.randint(1, ranks)):
            held[rank].append(_box(a, b, c))
    return held


@pytest.mark.parametrize("seed", range(20))
def test_a_plan_fills_each_value_once(seed: int) -> None:
    """Of random rectangles: each wanted value comes once, from the right place, from this rank where it has it."""
    generator = random.Random(seed)
    has, wants = _cuts(generator, 3), _cuts(generator, 3)
    ranks = [
        RankTensors(*({"x": Holding((12, 6), "float32", parts)} if parts else {} for parts in pair))
        for pair in zip(has, wants, strict=True)
    ]
    whole = torch.arange(72.0).view(12, 6)

    def cut(boxes: Any, tensor: torch.Tensor) -> list[torch.Tensor]:
        return [tensor[o[0] : o[0] + n[0], o[1] : o[1] + n[1]].clone() for o, n in boxes]

    sources, targets = [cut(x, whole) for x in has], [cut(x, torch.full_like(whole, -1)) for x in wants]
    for t in plan_refit(ranks):
        of_source, of_target = has[t.sender][t.source][0], wants[t.receiver][t.target][0]
        source, target = (
            x[tuple(slice(b - o, b - o + n) for b, o, n in zip(t.low, offset, t.shape, strict=True))]
            for x, offset in ((sources[t.sender][t.source], of_source), (targets[t.receiver][t.target], of_target))
        )
        assert (target == -1).all()
        target.copy_(source)
        if t.sender != t.receiver:
            assert has[t.sender][t.source] not in has[t.receiver]
    for boxes, tensors in zip(wants, targets, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(cut(boxes, whole), tensors, strict=True))


def test_what_a_plan_refuses() -> None:
    def plan(*has: Holding) -> None:
        wants = {"x": Holding((12, 6), "float32", [_box(0, 12)])}
        plan_refit([RankTensors({}, wants), *(RankTensors({"x": x}, {}) for x in has)])

    with pytest.raises(ValueError, match=r"the model has x \[12, 6\], but the trainer has no such tensor"):
        plan()
    with pytest.raises(ValueError, match=r"but the trainer has shape \[12, 8\]"):
        plan(Holding((12, 8), "float32", []))
    with pytest.raises(ValueError, match="has only 42 of 72 values of x"):
        plan(Holding((12, 6), "float32", [_box(0, 3)]), Holding((12, 6), "float32", [_box(0, 3), _box(4, 8)]))


def _memory(config: Config, layout: Layout) -> dict[str, Any]:
    """Which of a generator's parameters are a trainer's on this rank, and what refits have copied."""
    trainer, parallel = start(config)
    generator = Generator.from_trainer(trainer, cache=CACHE, **layout)
    steps_of(trainer, parallel, range(1))
    generator.generate(PROMPTS, OPTIONS[0])
    assert generator.live is not None
    parameters = [p for stage in generator.model.stages for p in stage.parameters()]
    own = {p.data_ptr() for p in trainer.model.parameters()}
    return {
        "shared": sum(p.numel() for p in parameters if p.data_ptr() in own),
        "all": sum(p.numel() for p in parameters),
        "copies": generator.live.copies,
    }


@pytest.mark.parametrize("layout", [{}, {"tensor": 2}])
def test_nothing_is_copied_in_the_same_layout(world4: World, layout: Layout) -> None:
    for found in world4.run(_memory, config_of(TP2 | DP2 | ZERO | BF16), layout):
        assert found["shared"] == found["all"] > 0
        assert found["copies"] == (0, 0, 0)


def test_only_what_differs_is_copied(world2: World) -> None:
    """Of PP2 to one stage: each rank receives the other's layers."""
    first, second = world2.run(_memory, config_of(PP2), {"pipeline": 1})
    assert first["shared"] + second["shared"] == first["all"] == second["all"]
    for found in (first, second):
        assert found["copies"].local == 0
        assert found["copies"].nbytes == 4 * (found["all"] - found["shared"])


def _rowwise(state: LinearState) -> torch.Tensor:
    """The FP8 data that the layer has computed with last."""
    assert state._copies is not None
    assert state._copies.made is not None
    return state._copies.made.required_rowwise.data


def _fp8_memory(config: Config) -> tuple[list[bool], list[bool]]:
    """Of each FP8 layer, whether generation computes with the FP8 data that the trainer holds: gathered, or frozen."""
    trainer, parallel = start(config)
    steps_of(trainer, parallel, range(1))
    layers = [state for state in trainer.fp8.layers if state.plan.fp8]
    gathered = {s: s.gathered_weight.data for s in layers if s.gathered_weight is not None}
    frozen = {s: _rowwise(s) for s in layers if s.frozen_weight}
    Generator.from_trainer(trainer, cache=CACHE).generate(PROMPTS, OPTIONS[0])
    after = {s: _rowwise(s) for s in layers}
    same = [[after[s].data_ptr() == x.data_ptr() for s, x in before.items()] for before in (gathered, frozen)]
    return same[0], same[1]


def test_fp8_data_of_training_is_what_generates(world2: World) -> None:
    for gathered, _ in world2.run(_fp8_memory, config_of(ZERO | DP2 | FP8_GATHER | CURRENT)):
        assert gathered
        assert all(gathered)
    (_, frozen), *_ = world2.run(_fp8_memory, config_of(LORA | DELAYED), ranks=1)
    assert frozen
    assert all(frozen)


def _two_checkpoints(config: Config, folder: str) -> None:
    trainer, parallel = start(config)
    for steps in (range(2), range(2, 12)):
        steps_of(trainer, parallel, steps)
        save_state(trainer, Path(folder) / str(steps.start), steps.stop, None)


def _greedy(folder: Path, prompt: list[int], tokens: int, **options: Any) -> Any:
    generator = Generator.from_checkpoint(folder, device="cpu", cache=CACHE, **options)
    return generator.generate(prompt, SamplingOptions(max_tokens=tokens, ignore_end=True))[0]


@pytest.mark.parametrize(
    ("preset", "options"),
    slow_but(
        [(NONE, {}), (DELAYED, {}), (BF16, {"weights": "int8"}), (BF16, {}), (HYBRID, {}), (MOE, {}), (TIED, {})],
        *[(NONE, {}), (DELAYED, {}), (BF16, {"weights": "int8"})],
    ),
    ids=str,
)
def test_a_text_that_a_refit_interrupts(world2: World, tmp_path: Path, preset: Preset, options: dict[str, Any]) -> None:
    """Its tokens after the refit are those of the new checkpoint behind the same beginning, as if it had been read by
    that model alone: nothing cached, packed or quantized of the old weights is left."""
    world2.run(_two_checkpoints, config_of(preset), str(tmp_path), ranks=1)
    old, new = tmp_path / "0", tmp_path / "2"
    generator = Generator.from_checkpoint(old, device="cpu", cache=CACHE, **options)
    for round_, folder in enumerate((new, old, new), start=1):
        submission = generator.submit(PROMPTS[0], SamplingOptions(max_tokens=12, ignore_end=True))
        completion = submission.texts[0].completion
        while len(completion.tokens) < 5:
            generator.step()
        before = list(completion.tokens)
        generator.refit(folder)
        while not submission.finished:
            generator.step()
        alone = _greedy(folder, PROMPTS[0] + before, 7, **options)
        assert completion.tokens == before + alone.tokens
        assert completion.logprobs[5:] == pytest.approx(alone.logprobs, abs=2e-2 if preset is BF16 else 1e-5)
        assert completion.weight_versions == [round_ - 1, round_]
        expected = _greedy(folder, PROMPTS[1], 6, **options)
        assert (
            generator.generate(PROMPTS[1], SamplingOptions(max_tokens=6, ignore_end=True))[0].logprobs
            == expected.logprobs
        )


def test_a_refit_that_fails_changes_nothing(world2: World, tmp_path: Path) -> None:
    world2.run(_two_checkpoints, config_of(NONE), str(tmp_path), ranks=1)
    generator = Generator.from_checkpoint(tmp_path / "0", device="cpu", cache=CACHE)
    before = _greedy(tmp_path / "0", PROMPTS[0], 8).logprobs

    def breaks_off(model: Any, tensors: dict[str, Any]) -> None:
        for rectangles in tensors.values():
            for part in rectangles.parts:
                part.view.fill_(1)
        raise ConnectionError("lost")

    with pytest.raises(ValueError, match=r"the weights stay as they are: .*lost"):
        generator.refit(breaks_off)
    assert generator.generate(PROMPTS[0], SamplingOptions(max_tokens=8, ignore_end=True))[0].logprobs == before
    assert generator.weight_version == 0


def _layout_that_does_not_fit(config: Config) -> list[str]:
    trainer, _ = start(config)
    messages = []
    for layout in ({"tensor": 3}, {"tensor": 2, "pipeline": 2}, {"pipeline": 0}):
        try:
            Generator.from_trainer(trainer, **layout)
        except ValueError as error:
            messages.append(str(error))
    return messages


def test_layouts_that_do_not_fit(world2: World) -> None:
    for messages in world2.run(_layout_that_does_not_fit, config_of(TP2)):
        assert len(messages) == 3
        assert (
            messages[0] == "tensor = 3 and pipeline = 1 need 3 ranks, but the job's 2 ranks cannot be divided by that"
        )


def _trained_meanwhile(config: Config, layout: Layout) -> list[Any]:
    """A text during which the trainer makes a step, and the rest of it by a generator that is made after the step."""
    trainer, parallel = start(config)
    steps_of(trainer, parallel, range(1))
    generator = Generator.from_trainer(trainer, cache=CACHE, **layout)
    submission = generator.submit(PROMPTS[0], SamplingOptions(max_tokens=12, ignore_end=True))
    completion = submission.texts[0].completion
    while len(completion.tokens) < 5:
        generator.step()
    before = list(completion.tokens)
    steps_of(trainer, parallel, range(1, 6))
    while not submission.finished:
        generator.step()
    later = Generator.from_trainer(trainer, cache=CACHE, **layout)
    (rest,) = later.generate(PROMPTS[0] + before, SamplingOptions(max_tokens=7, ignore_end=True))
    assert completion.weight_versions == [1, 6]
    assert completion.logprobs[5:] == pytest.approx(rest.logprobs, abs=1e-5)
    return [completion.tokens, before + rest.tokens]


@pytest.mark.parametrize("layout", [{}, {"tensor": 2}])
def test_a_step_of_the_trainer_during_a_text(world2: World, layout: Layout) -> None:
    """Nothing that was cached with the weights before the step is used after it."""
    for text, expected in world2.run(_trained_meanwhile, config_of(DP2), layout):
        assert text == expected
