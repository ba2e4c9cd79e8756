"""Runs with LoRA: what is trained, what a checkpoint holds, and the merged model as transformers computes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megafp8.checkpoint import IncompatibleCheckpoint, newest_readable
from megafp8.config import ConfigError, check_layout, load_config
from megafp8.conversion.formats import open_source
from megafp8.conversion.native import NativeSource
from megafp8.linear.state import LinearState
from megafp8.parallel.sharding import spec_of
from megafp8.parallel.tensor.lora import is_lora
from megafp8.training.init_from import complete_model
from megafp8.training.inputs import open_inputs
from megafp8.training.state import check_resume, checkpoint_folder, save_state
from tests.marks import slow_but
from tests.training.latest import load_latest
from tests.training.presets import *  # noqa: F403
from tests.training.presets import Preset, config_of
from tests.training.runs import batches, start, steps_of, text_batches
from tests.training.test_fine_tuning import ALONE, SAMPLES, SFT, loaded, prepare
from tests.world import World
from tools import convert_checkpoint

LORA_OVERRIDES = ["lora={rank: 4, alpha: 16}", "optimizer.learning_rate=1e-2"]


def _values(trainer: Any) -> dict[str, Tensor]:
    return {spec_of(param).shards[0].name: param.detach().clone() for param in trainer.strategy.params}


def _train(preset: Preset) -> tuple[dict[str, bool], set[str], int, int]:
    """By parameter whether it changed in three steps, those with optimizer state, and elements of gradients."""
    trainer, parallel = start(config_of(preset))
    before = _values(trainer)
    steps_of(trainer, parallel, range(3))
    trainer.strategy.wait()
    changed = {name: not torch.equal(values, before[name]) for name, values in _values(trainer).items()}
    with_state = {spec_of(shard.param).shards[0].name for shard in trainer.optimizer.shards}
    elements = sum(param.numel() for param in trainer.strategy.params if param.requires_grad)
    return changed, with_state, trainer.strategy.gradients[0].numel(), elements


ADAPTED = [
    (LORA | DELAYED | TIED, 1), (LORA | PP2 | DP2 | ZERO | TIED, 4), (LORA | DP2 | FSDP, 2), (LORA_Q_DOWN | BF16, 1),
    (LORA | DEEPSEEK | DP2 | EP2, 2),
]  # fmt: skip


@pytest.mark.parametrize(("preset", "ranks"), slow_but(ADAPTED, ADAPTED[0], ADAPTED[2]))
def test_only_adapters_change(world4: World, preset: Preset, ranks: int) -> None:
    """Frozen weights stay bit for bit, and have neither gradients nor optimizer state."""
    for changed, with_state, gradients, elements in world4.run(_train, preset, ranks=ranks):
        assert changed == {name: is_lora(name) for name in changed}
        assert all(is_lora(name) for name in with_state)
        assert elements <= gradients < 1.5 * elements, "more than padding"


def _count_quantizations(preset: Preset) -> list[int]:
    """Of weights, in each of four steps, with an evaluation before the last."""
    trainer, parallel = start(config_of(preset))
    count, made = 0, LinearState.quantize_weight

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        return made(*args, **kwargs)

    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LinearState, "quantize_weight", counted)
        for step in range(4):
            if step == 3:
                trainer.evaluate(batches(9, trainer.config, parallel))
            trainer.train_step(step, batches(step, trainer.config, parallel))
            found.append(count)
            count = 0
    return found


@pytest.mark.parametrize(("preset", "expected"), [
    (LORA | DELAYED, [8, 0, 0, 0]), pytest.param(LORA | BLOCKWISE, [8, 0, 0, 0], marks=pytest.mark.slow),
    (DELAYED, [8, 8, 8, 16]), (LORA | DELAYED | REPORT_2, [8, 8, 0, 8]),
])  # fmt: skip
def test_frozen_weights_are_quantized_once(world2: World, preset: Preset, expected: list[int]) -> None:
    """And in steps that the FP8 report samples; trained ones in every step."""
    assert world2.run(_count_quantizations, preset, ranks=1)[0] == expected


def _save_in_the_middle(preset: Preset, folder: Path) -> list[tuple[float, float]]:
    trainer, parallel = start(config_of(preset))
    steps_of(trainer, parallel, range(2))
    save_state(trainer, folder, 2, None)
    return steps_of(trainer, parallel, range(2, 4))


def _resume(preset: Preset, folder: Path) -> list[tuple[float, float]]:
    trainer, parallel = start(config_of(preset))
    assert load_latest(trainer, folder) == 2
    return steps_of(trainer, parallel, range(2, 4))


@pytest.mark.parametrize("preset", slow_but(
    [LORA | DELAYED | TP2, LORA | BLOCKWISE, LORA | BF16 | CURRENT | DP2 | FSDP], LORA | DELAYED | TP2
))  # fmt: skip
def test_a_resumed_run_in_fp8(world2: World, tmp_path: Path, preset: Preset) -> None:
    """Bit for bit, though it quantizes the frozen weights later than the run that goes on."""
    continued = world2.run(_save_in_the_middle, preset, tmp_path, ranks=preset.ranks)
    assert world2.run(_resume, preset, tmp_path, ranks=preset.ranks) == continued


@pytest.mark.slow
def test_a_run_resumes_in_another_layout(world4: World, tmp_path: Path) -> None:
    """Bit for bit in its own; the checkpoint has optimizer state of adapters only. Another alpha is refused."""
    continued = world4.run(_save_in_the_middle, LORA | TP2, tmp_path, ranks=2)[0]
    assert world4.run(_resume, LORA | TP2, tmp_path, ranks=2)[0] == continued
    for losses in world4.run(_resume, LORA | PP2, tmp_path, ranks=2):
        for step, other in zip(losses, continued, strict=True):
            assert step == pytest.approx(other, rel=1e-5)
    found = newest_readable(checkpoint_folder(tmp_path))
    assert found is not None
    state = [name for name in found.tensors if name.startswith("optimizer.")]
    assert state
    assert all(is_lora(name) for name in state)
    assert check_resume(config_of(LORA), tmp_path, None) is not None
    with pytest.raises(IncompatibleCheckpoint, match=r"was saved with lora = .*'alpha': 8.0.*, this run has .*16.0"):
        check_resume(config_of(LORA, lora={"alpha": 16.0}), tmp_path, None)
    with pytest.raises(IncompatibleCheckpoint, match="so other weights are trained; set lora="):
        check_resume(config_of(LAYERS_4, model={"num_layers": 2}), tmp_path, None)


def _tune(overrides: list[str], run: str) -> tuple[float, float]:
    """Loss of the first batch before and after two steps, which are saved."""
    trainer, parallel = loaded(overrides)
    batches = text_batches(0, trainer.config, parallel)
    before = trainer.evaluate(batches).mean
    for step in range(2):
        trainer.train_step(step, text_batches(step, trainer.config, parallel))
    save_state(trainer, Path(run), 2, None)
    return before, trainer.evaluate(batches).mean


def _evaluate(overrides: list[str]) -> float:
    trainer, parallel = loaded(overrides)
    return trainer.evaluate(text_batches(0, trainer.config, parallel)).mean


def _their_loss(folder: Path, overrides: list[str]) -> float:
    """Mean loss of the answers in the first batch, by `transformers`, one chat at a time."""
    import transformers

    inputs = open_inputs(load_config(SFT, overrides, complete_model), "test")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    total, count = 0.0, 0
    with torch.no_grad():
        for sample in range(SAMPLES):
            for tokens, mask in inputs.train.parts(sample):
                ids = torch.from_numpy(tokens).long()
                labels = ids.where(torch.from_numpy(mask) == 1, -100)[1:]
                logits = model(ids[None]).logits[0, :-1]
                total += torch.nn.functional.cross_entropy(logits, labels, reduction="sum").item()
                count += int(mask[1:].sum())
    return total / count


def test_merged_is_unmerged(world2: World, tmp_path: Path) -> None:
    """The loss of a run is that of transformers on the exported folder, and that of a run that starts from it."""
    overrides, run, exported = [*prepare(tmp_path), *ALONE], tmp_path / "run", tmp_path / "exported"
    plain = world2.run(_evaluate, overrides, ranks=1)[0]
    before, after = world2.run(_tune, [*overrides, *LORA_OVERRIDES], str(run), ranks=1)[0]
    assert before == pytest.approx(plain, rel=1e-7), "adapters begin at zero"
    assert after < before - 0.01
    assert convert_checkpoint.main(["--load", str(run), "--save", str(exported), "--to", "hf"]) == 0
    assert _their_loss(exported, overrides) == pytest.approx(after, rel=1e-6)
    again = [*overrides, f"checkpoint.init_from={exported}"]
    assert world2.run(_evaluate, again, ranks=1)[0] == pytest.approx(after, rel=1e-6)

    source, whole = open_source(run), NativeSource(run)
    name = "model.layers.1.mlp.down.weight"
    a, b = (whole.read(f"model.layers.1.mlp.down.lora_{x}").double() for x in "ab")
    expected = whole.read(name).double() + 16 / 4 * b @ a
    torch.testing.assert_close(source.read(name).double(), expected, rtol=1e-6, atol=1e-7)
    assert torch.equal(source.read_rows(name, 3, 7), source.read(name)[3:7])
    assert not any(is_lora(name) or name.startswith("optimizer.") for name in source.tensors)


REFUSED: list[tuple[Preset, str]] = [
    (
        LORA_GATE | GELU,
        "lora.targets = ['gate']: the model has no gate that can be adapted; try [q, k, v, proj, up,",
    ),
    (LORA_Q_DOWN | MOE, "no down that can be adapted; adapters of experts are not supported; try [q]"),
    (LORA_Q_DOWN | DEEPSEEK, "the model has no down, q that can be adapted"),
    (LORA | MTP, "lora = 'set': the model has model.mtp_num_layers"),
    (LORA | BERT, "lora = 'set': model.architecture is bert"),
    (LORA | DELAYED | ZERO | FP8_GATHER, "fp8.param_gather = True: with lora"),
]


@pytest.mark.parametrize(("preset", "error"), REFUSED)
def test_what_is_refused(preset: Preset, error: str) -> None:
    with pytest.raises(ConfigError) as raised:
        check_layout(config_of(preset), 1)
    assert error in str(raised.value)
