"""Adapter folders against PEFT itself: what we write it runs, and what it writes we merge and continue from."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from torch import Tensor

from megafp8.config import Config, ConfigError, load_config
from megafp8.conversion.adapters import adapted_of
from megafp8.conversion.formats import open_source
from megafp8.inference import Generator, SamplingOptions
from megafp8.parallel.parallel_state import initialize_distributed, initialize_model_parallel
from megafp8.parallel.sharding import shards_of
from megafp8.parallel.tensor.lora import is_lora
from megafp8.training.init_from import complete_model, load_init
from megafp8.training.state import save_state
from megafp8.training.trainer import RankTrainer
from tests.conversion.families import make_theirs, tokens
from tests.conversion.huggingface.test_logits import our_logits
from tests.marks import slow_but
from tests.training.runs import batches
from tests.world import World
from tools import convert_checkpoint

# Imported where it is used: peft imports most of transformers, and every worker of a parallel run imports this module.
pytestmark = pytest.mark.skipif(find_spec("peft") is None, reason="needs peft")

ATTENTION = ["q", "k", "v", "proj"]
ALL = [*ATTENTION, "gate", "up", "down"]
RANK, ALPHA = 3, 5.0


def _config(
    folder: Path, start: Path, tp: int = 1, lora: dict[str, Any] | None = None, name: str = "run", recipe: str = "none"
) -> Config:
    """A run in `folder` that starts from the weights in `start`."""
    sections = {
        "name": name, "run_dir": str(folder), "device": "cpu", "lora": lora, "fp8": {"recipe": recipe},
        "parallel": {"tensor": tp, "sequence_parallel": tp > 1},
        "training": {"steps": 9, "seq_length": 12, "micro_batch_size": 2, "global_batch_size": 4, "precision": "fp32"},
        "optimizer": {"learning_rate": 3e-2, "clip_grad_norm": 0.0}, "data": {"train": ["none"]},
        "checkpoint": {"init_from": str(start)},
    }  # fmt: skip
    file = folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump(sections))
    return load_config(file, [], complete_model)


def _trainer(config: Config) -> tuple[RankTrainer, Any]:
    parallel = initialize_model_parallel(config.parallel.tensor, device=initialize_distributed("cpu"))
    trainer = RankTrainer(config, parallel)
    assert config.checkpoint.init_from is not None
    load_init(trainer, config.checkpoint.init_from)
    return trainer, parallel


def _train(config: Config) -> None:
    """Three steps, which are saved."""
    trainer, parallel = _trainer(config)
    for step in range(3):
        trainer.train_step(step, batches(step, config, parallel))
    save_state(trainer, Path(config.run_dir) / config.name, 3, None)


def _our_logits(path: Path, tp: int) -> Tensor | None:
    return our_logits(open_source(path, 8), tp, 1)


def _convert(*arguments: Any) -> None:
    assert convert_checkpoint.main([str(argument) for argument in arguments]) == 0


def _close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


@torch.no_grad()
def _their_logits(base: Path, adapter: Path | None = None) -> tuple[Any, Tensor]:
    import peft
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    model = model if adapter is None else peft.PeftModel.from_pretrained(model, adapter)
    return model, model(tokens()).logits


FAMILIES = [
    ("llama3", ALL, 1), ("llama3", ALL, 2), ("llama3", ["v", "down"], 1), ("qwen2", ATTENTION, 2), ("phi3", ALL, 2),
    ("phi3", ["q", "v", "up"], 1), ("gpt-neox", ["q", "k", "v", "up", "down"], 1), ("gpt-neox", ["k", "proj"], 2),
    ("gpt2", ["q", "v", "proj"], 1), ("gpt2", ["up", "down"], 2), ("bloom", ["q", "k", "v"], 1), ("glm4", ALL, 2),
    ("deepseek-v2", ["q_up", "kv_up", "proj"], 2), ("deepseek-v2-lite", ["q", "kv_up"], 1), ("mixtral", ["q", "v"], 1),
    ("qwen3-moe", ["k", "proj"], 1), ("opt", ["q", "v", "up"], 1), ("granite", ALL, 1), ("gemma2", ALL, 1),
]  # fmt: skip
QUICK = [("qwen2", ATTENTION, 2)]


@pytest.mark.parametrize(("family", "targets", "tp"), slow_but(FAMILIES, *QUICK))
def test_written_adapters(world2: World, tmp_path: Path, family: str, targets: Sequence[str], tp: int) -> None:
    """PEFT computes the logits of the run on the base model, and merges to the exported model. Read again, the folder
    has the run's A and B bit for bit."""
    base, adapter, exported = (tmp_path / name for name in ("base", "adapter", "exported"))
    make_theirs(family).save_pretrained(base)
    config = _config(tmp_path, base, tp, {"rank": RANK, "alpha": ALPHA, "targets": list(targets)})
    world2.run(_train, config, ranks=tp)
    run = tmp_path / "run"
    _convert("--load", run, "--save", adapter, "--to", "peft", "--verify")
    logits = world2.run(_our_logits, run, tp, ranks=tp)[-1]
    model, theirs = _their_logits(base, adapter)
    _close(logits, theirs)
    assert (logits - _their_logits(base)[1]).abs().max() > 0.01, "adapters that say nothing"
    _convert("--load", run, "--save", exported, "--to", "hf")
    model.merge_and_unload().save_pretrained(tmp_path / "merged")
    merged, ours = (load_file(folder / "model.safetensors") for folder in (tmp_path / "merged", exported))
    assert ours.keys() <= merged.keys() | {"lm_head.weight"}
    for name in merged.keys() & ours.keys():
        torch.testing.assert_close(merged[name], ours[name], rtol=1e-5, atol=1e-6)
    read, trained = adapted_of(open_source(adapter)), adapted_of(open_source(run))
    assert read is not None
    assert trained is not None
    names = {name for name in trained.tensors if is_lora(name)}
    assert names == {name for name in read.tensors if is_lora(name)}
    assert all(torch.equal(read.read(name), trained.read(name)) for name in names)


def _their_adapter(base: Path, folder: Path, **options: Any) -> Tensor:
    """An adapter with random A and B, made and saved by PEFT; its logits."""
    import peft

    model, _ = _their_logits(base)
    torch.manual_seed(3)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=RANK, task_type="CAUSAL_LM", **options))
    with torch.no_grad():
        for name, param in adapted.named_parameters():
            if "lora_" in name:
                param.normal_(0, 0.1)
        adapted.save_pretrained(folder)
        return adapted.eval()(tokens()).logits


THEIRS = [
    ("llama3", {"target_modules": "all-linear", "lora_alpha": 8}),
    ("llama3", {"target_modules": ["q_proj", "o_proj"], "use_rslora": True, "layers_to_transform": [1]}),
    ("phi3", {"target_modules": ["qkv_proj", "down_proj"], "rank_pattern": {"qkv_proj": 9}}),
    ("gpt2", {"target_modules": ["c_attn"], "alpha_pattern": {"h.1.attn.c_attn": 2}, "fan_in_fan_out": True}),
]


@pytest.mark.parametrize(("family", "options"), slow_but(THEIRS, *THEIRS[1:]))
def test_their_adapters_are_merged(world2: World, tmp_path: Path, family: str, options: dict[str, Any]) -> None:
    """A folder that PEFT wrote is a model for `open_source`: here for logits, and the merged one is written."""
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    make_theirs(family).save_pretrained(base)
    theirs = _their_adapter(base, adapter, **options)
    _close(world2.run(_our_logits, adapter, 1, ranks=1)[0], theirs)
    _convert("--load", adapter, "--save", tmp_path / "merged", "--to", "hf")
    _close(_their_logits(tmp_path / "merged")[1], theirs)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"target_modules": ["q_proj", "lm_head"]}, "has a tensor base_model.model.lm_head.base_layer.weight"),
    ({"target_modules": ["q_proj"], "use_dora": True}, "use_dora = True: this adapter does more"),
    ({"target_modules": ["q_proj"], "bias": "all"}, "bias = 'all': this adapter does more"),
    ({"target_modules": ["q_proj"], "modules_to_save": ["norm"]}, r"modules_to_save = \['norm'\]: this adapter"),
    ({"target_modules": ["q_proj"], "init_lora_weights": "pissa"}, "init_lora_weights = 'pissa': this adapter"),
]


@pytest.mark.parametrize(("options", "error"), REFUSED)
def test_adapters_that_are_refused(tmp_path: Path, options: dict[str, Any], error: str) -> None:
    make_theirs("llama3").save_pretrained(tmp_path / "base")
    _their_adapter(tmp_path / "base", tmp_path / "adapter", **options)
    with pytest.raises(ValueError, match=error):
        open_source(tmp_path / "adapter")


def test_folders_that_do_not_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    make_theirs("llama3").save_pretrained(base)
    _their_adapter(base, adapter, target_modules=["down_proj"])
    file = adapter / "adapter_model.safetensors"
    tensors = load_file(file)
    name = "base_model.model.model.layers.0.mlp.down_proj.lora_"
    for wrong, error in (
        (tensors | {f"{name}B.weight": torch.ones(33, 3)}, r"A \[3, 48\] and B \[33, 3\] of .* do not fit"),
        (tensors | {f"{name}A.weight": torch.ones(4, 48)}, r"A \[4, 48\] and B \[32, 3\]"),
        ({key: x for key, x in tensors.items() if key != f"{name}A.weight"}, "only one of lora_A and lora_B of"),
        ({key.replace("layers.0", "layers.7"): x for key, x in tensors.items()}, "adapts model.layers.7.mlp.down_proj"),
    ):
        save_file(wrong, file)
        with pytest.raises(ValueError, match=error):
            open_source(adapter)
    save_file(tensors, file)
    assert convert_checkpoint.main(["--load", str(base), "--save", str(tmp_path / "x"), "--to", "peft"]) == 2
    assert f"{base} has no adapters" in capsys.readouterr().err
    other = tmp_path / "other"
    make_theirs("qwen2").save_pretrained(other)
    save = ["--load", str(adapter), "--save", str(tmp_path / "x"), "--to", "peft"]
    assert convert_checkpoint.main([*save, "--base", str(other)]) == 2
    assert "describes a different model than" in capsys.readouterr().err
    base.rename(tmp_path / "elsewhere")
    with pytest.raises(
        ValueError, match=r"base_model_name_or_path = '.*base' is not a folder on this machine; set it to the folder of"
    ):
        open_source(adapter)


def _adapters_at_start(config: Config) -> dict[str, Tensor]:
    trainer, _ = _trainer(config)
    assert all(torch.equal(shard.view(shard.param), x) for shard, x in trainer.optimizer.state().get("master", []))
    trained = trainer.strategy.trained
    return {piece.name: x.clone() for param in trained for piece, x in shards_of(param, param.detach())}


def test_a_run_continues_with_adapters(world2: World, tmp_path: Path) -> None:
    """A and B of a folder of PEFT, or of a run, are trained further, and written for the same base model; without the
    section lora they are merged."""
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    make_theirs("qwen2").save_pretrained(base)
    theirs = _their_adapter(base, adapter, target_modules=["q_proj", "up_proj"], lora_alpha=6)
    config = _config(tmp_path, adapter, lora={})
    assert config.lora is not None
    assert (config.lora.rank, config.lora.alpha, sorted(config.lora.targets)) == (RANK, 6.0, ["q", "up"])
    stored = load_file(adapter / "adapter_model.safetensors")
    found = world2.run(_adapters_at_start, config, ranks=1)[0]
    of_up = "base_model.model.model.layers.2.mlp.up_proj.lora_"
    for x in "ab":
        assert torch.equal(found[f"layers.2.mlp.up.lora_{x}"], stored[f"{of_up}{x.upper()}.weight"])
    assert len(found) == len(stored) == 12
    world2.run(_train, config, ranks=1)
    again = _config(tmp_path, tmp_path / "run", lora={"alpha": 6}, name="again")
    world2.run(_train, again, ranks=1)
    _convert("--load", tmp_path / "again", "--save", tmp_path / "further", "--to", "peft")
    written = json.loads((tmp_path / "further" / "adapter_config.json").read_text())
    assert written["base_model_name_or_path"] == str(base)
    _, after = _their_logits(base, tmp_path / "further")
    _close(world2.run(_our_logits, tmp_path / "again", 1, ranks=1)[0], after)
    assert (after - theirs).abs().max() > 0.01
    with pytest.raises(ConfigError, match=r"lora.rank = 4: the run continues with the adapters .* where it is 3"):
        _config(tmp_path, adapter, lora={"rank": 4}, name="other")
    assert _config(tmp_path, adapter, name="merged").lora is None


def _generate(path: Path, tp: int) -> list[int]:
    generator = Generator.from_checkpoint(path, device="cpu", tensor=tp)
    options = SamplingOptions(max_tokens=8, ignore_end=True)
    return list(generator.generate([tokens()[0, :5].tolist()], [options])[0].tokens)


@torch.no_grad()
def test_generation(world2: World, tmp_path: Path) -> None:
    """Greedy texts of a run with LoRA, in FP8, and of its adapter folder are those of PEFT, in high precision."""
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    make_theirs("llama3").save_pretrained(base)
    world2.run(_train, _config(tmp_path, base, lora={"rank": RANK, "alpha": ALPHA}, recipe="delayed"), ranks=1)
    _convert("--load", tmp_path / "run", "--save", adapter, "--to", "peft")
    model, _ = _their_logits(base, adapter)
    options = {"max_new_tokens": 8, "min_new_tokens": 8, "eos_token_id": None, "pad_token_id": 0, "do_sample": False}
    theirs = model.generate(tokens()[:1, :5], **options)[0, 5:].tolist()
    plain = _their_logits(base)[0].generate(tokens()[:1, :5], **options)[0, 5:].tolist()
    assert theirs != plain
    assert world2.run(_generate, tmp_path / "run", 2, ranks=2)[0] == theirs
    assert world2.run(_generate, adapter, 1, ranks=1)[0] == theirs
