"""A run that starts from a Hugging Face model: the first loss is the model's, as `transformers` computes it."""

from __future__ import annotations

import itertools
import json
import math
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megafp8.config import Config, ConfigError, check_layout, load_config, model_spec
from megafp8.conversion.huggingface.source import HfSource
from megafp8.data.sampler import batches
from megafp8.data.tokenizers import build_tokenizer
from megafp8.parallel.parallel_state import initialize_distributed, initialize_model_parallel
from megafp8.parallel.sharding import shards_of, spec_of
from megafp8.training.init_from import _tokenizer_file, check_init, complete_model, load_init
from megafp8.training.inputs import open_inputs
from megafp8.training.metrics import read_metrics
from megafp8.training.state import save_state
from megafp8.training.trainer import RankTrainer
from tests.conversion import families
from tests.conversion.huggingface.test_tokenizer_families import FAMILIES, write_family
from tests.marks import slow_but
from tests.quickstart_data import CONFIG, ROOT, VOCABULARY, QuickstartData
from tests.world import World
from tools import convert_checkpoint

SMALL = [
    "training.seq_length=16",
    "training.micro_batch_size=2",
    "training.global_batch_size=4",
    "training.eval_interval=0",
    "training.steps=4",
    "optimizer.warmup_steps=0",
    "fp8.recipe=none",
]
LAYOUTS = {
    "tp2-sp-pp2": (4, ["parallel.tensor=2", "parallel.pipeline=2"]),
    "tp2-dp2-fsdp": (4, ["parallel.tensor=2", "parallel.pipeline=1", "parallel.fsdp=true"]),
    "tp2-dp2-zero": (4, ["parallel.tensor=2", "parallel.pipeline=1", "parallel.zero=1", "parallel.bucket_mib=0.02"]),
}
ALONE = ["parallel.tensor=1", "parallel.pipeline=1"]


def save_model(folder: Path, name: str, **changes: Any) -> None:
    """A tiny model of family `name` with the quickstart's vocabulary."""
    kind, options = families.THEIRS[name]
    families.THEIRS["here"] = kind, options | {"vocab_size": VOCABULARY, **changes}
    families.make_theirs("here").save_pretrained(folder)


def overrides(data: QuickstartData, folder: Path, *more: str) -> list[str]:
    """The quickstart's config without model section but for the vocabulary."""
    runs = f"run_dir={folder}-runs"  # not where a developer may have a run of the same name
    return ["model={}", *data.overrides, f"checkpoint.init_from={folder}", runs, *SMALL, *more]


def _stream(config: Config, rank: int = 0, ranks: int = 1) -> Any:
    t = config.training
    inputs = open_inputs(config, "test")
    return batches(
        inputs.train,
        consumed_samples=0,
        global_batch_size=t.global_batch_size,
        micro_batch_size=t.micro_batch_size,
        data_parallel_rank=rank,
        data_parallel_size=ranks,
        num_workers=0,
        objective=inputs.objective,
        pin_memory=False,
    )


def _trainer(options: list[str]) -> RankTrainer:
    config = load_config(CONFIG, options, complete_model)
    device = initialize_distributed("cpu")
    p = config.parallel
    parallel = initialize_model_parallel(p.tensor, p.pipeline, expert_model_parallel_size=p.expert, device=device)
    check_layout(config, parallel.world_size)
    trainer = RankTrainer(config, parallel)
    assert config.checkpoint.init_from is not None
    load_init(trainer, config.checkpoint.init_from)
    return trainer


def _losses(options: list[str]) -> list[float]:
    """Losses of two steps; the weights of the second come from the masters."""
    trainer = _trainer(options)
    data = trainer.parallel.data
    stream = _stream(trainer.config, data.rank, data.size)
    return [trainer.train_step(step, next(stream))[0].mean for step in range(2)]


def their_loss(folder: Path, config: Config) -> float:
    """Mean loss over the first global batch, by `transformers`."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    found = []
    with torch.no_grad():
        for batch in next(_stream(config)):
            logits = model(batch.tokens).logits
            found.append(torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.labels.flatten()))
    return float(torch.stack(found).mean())


@pytest.mark.parametrize(
    ("name", "layout"),
    slow_but(itertools.product(["llama3", "gpt2", "qwen2-window-tied"], LAYOUTS), ("llama3", "tp2-sp-pp2")),
)
def test_the_first_loss_is_theirs_in_any_layout(
    world4: World, tmp_path: Path, quickstart_data: QuickstartData, name: str, layout: str
) -> None:
    save_model(tmp_path, name)
    # GPT-2 is trained with dropout unless its config says otherwise.
    options = overrides(quickstart_data, tmp_path, "model.hidden_dropout=0", "model.attention_dropout=0")
    expected = their_loss(tmp_path, load_config(CONFIG, options, complete_model))
    alone = world4.run(_losses, [*options, *ALONE], ranks=1)[0]
    assert alone[0] == pytest.approx(expected, rel=1e-6)
    assert alone[1] != pytest.approx(alone[0], rel=1e-3), "the step changed nothing"
    ranks, more = LAYOUTS[layout]
    for losses in world4.run(_losses, [*options, *more], ranks=ranks):
        assert losses == pytest.approx(alone, rel=1e-5)


def test_a_dense_model_becomes_a_mixture_of_experts(
    world4: World, tmp_path: Path, quickstart_data: QuickstartData
) -> None:
    """Its first loss is the dense model's, whatever the routers choose, and what else predicts further tokens."""
    save_model(tmp_path, "llama3")
    options = overrides(quickstart_data, tmp_path)
    dense = world4.run(_losses, [*options, *ALONE], ranks=1)[0]
    options += ["model.moe={num_experts: 4, top_k: 2, first_dense_layers: 1}", "model.mtp_num_layers=1"]
    alone = world4.run(_losses, [*options, *ALONE], ranks=1)[0]
    assert alone[0] == pytest.approx(dense[0], rel=1e-6)
    for losses in world4.run(_losses, [*options, *LAYOUTS["tp2-dp2-zero"][1], "parallel.expert=4"], ranks=4):
        assert losses[0] == pytest.approx(alone[0], rel=1e-5)
        # While experts are equal, a router's gradient is zero but for rounding, of which Adam makes steps of full size.
        assert losses[1] == pytest.approx(alone[1], rel=1e-4)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("ffn_hidden_size", "8", "model.moe.ffn_hidden_size = 8: an expert starts as a copy of the MLP of"),
        ("normalize", "false", "model.moe.normalize = False: the experts of a token must add up to the MLP of"),
        ("scaling_factor", "2.0", "model.moe.scaling_factor = 2.0: the experts of a token must add up to the MLP"),
        ("shared_ffn_hidden_size", "8", "model.moe.shared_ffn_hidden_size = 8: the experts of a token must add up"),
    ],
)
def test_experts_that_are_not_copies_of_the_mlp(
    tmp_path: Path, quickstart_data: QuickstartData, key: str, value: str, message: str
) -> None:
    save_model(tmp_path, "llama3")
    options = overrides(quickstart_data, tmp_path, f"model.moe={{num_experts: 4, {key}: {value}}}")
    with pytest.raises(ConfigError) as error:
        load_config(CONFIG, options, complete_model)
    assert message in str(error.value)


def test_weights_gathered_in_fp8_start_from_it_too(
    world4: World, tmp_path: Path, quickstart_data: QuickstartData
) -> None:
    save_model(tmp_path, "llama3")
    options = overrides(quickstart_data, tmp_path, *ALONE, "parallel.zero=1", "fp8.recipe=current")
    values = world4.run(_losses, options, ranks=2)
    assert world4.run(_losses, [*options, "fp8.param_gather=true"], ranks=2) == values


def _masters_and_weights(options: list[str], folder: Path) -> int:
    """Compare both with the folder's tensors, bit for bit; return how many master elements this rank has."""
    trainer = _trainer(options)
    source = HfSource(folder)
    expected = {}
    for param in trainer.strategy.params:
        expected[param] = torch.empty(param.shape)
        for piece, view in shards_of(param, expected[param]):
            box = tuple(slice(o, o + n) for o, n in zip(piece.offset, piece.shape))
            view.copy_(source.read(f"model.{piece.name}")[box])
        assert torch.equal(param, expected[param].bfloat16()), spec_of(param).shards[0].name
    masters = trainer.optimizer.state()["master"]
    for shard, master in masters:
        assert torch.equal(master, shard.view(expected[shard.param]))
    return sum(master.numel() for _, master in masters)


def test_masters_have_all_the_precision_there_is(
    world4: World, tmp_path: Path, quickstart_data: QuickstartData
) -> None:
    save_model(tmp_path, "llama-tied")
    options = overrides(quickstart_data, tmp_path, "training.precision=bf16", *LAYOUTS["tp2-dp2-zero"][1])
    counts = world4.run(_masters_and_weights, options, tmp_path)
    assert sum(counts) > sum(math.prod(info.shape) for info in HfSource(tmp_path).tensors.values())


def _last_losses(options: list[str], first: int, run: Path) -> tuple[list[float], int]:
    """Losses of the steps from `first` to 3, and the number of updates; the state after two steps is saved."""
    trainer = _trainer(options)
    stream = _stream(trainer.config, trainer.parallel.data.rank, trainer.parallel.data.size)
    losses = []
    for step in range(4):
        batch = next(stream)
        if step >= first:
            losses.append(trainer.train_step(step, batch)[0].mean)
        if step == 1 and not first:
            save_state(trainer, run, 2, None)
    return losses, trainer.optimizer.step_count


@pytest.mark.slow
def test_the_optimizers_state_too(world2: World, tmp_path: Path, quickstart_data: QuickstartData) -> None:
    """Later steps are bit for bit those of the trainer whose state it is, also where its weights were rounded."""
    save_model(tmp_path / "model", "llama3")
    common = "training.precision=bf16", "parallel.zero=1", *ALONE
    options = overrides(quickstart_data, tmp_path / "model", *common)
    expected, updates = world2.run(_last_losses, options, 0, tmp_path)[0]
    assert updates == 4
    saved = overrides(quickstart_data, tmp_path / "checkpoints" / "step_00000002", *common)
    kept = world2.run(_last_losses, [*saved, "checkpoint.init_optimizer=true"], 2, tmp_path)[0]
    assert kept == (expected[2:], 4)
    anew, updates = world2.run(_last_losses, saved, 2, tmp_path)[0]
    assert anew[1] != expected[3]
    assert updates == 2


def test_a_folder_without_the_optimizers_state(tmp_path: Path, quickstart_data: QuickstartData) -> None:
    save_model(tmp_path, "llama3")
    options = overrides(quickstart_data, tmp_path, *ALONE, "checkpoint.init_optimizer=true")
    config = load_config(CONFIG, options, complete_model)
    with pytest.raises(ConfigError, match=r"init_optimizer = True: .* has no optimizer\.exp_avg\.\S+; leave it out"):
        check_init(config, tmp_path, None)


def _train(*options: str) -> str:
    """Run one process and return its stderr."""
    command = [sys.executable, "pretrain_gpt.py", "--config", str(CONFIG), *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.mark.slow
def test_a_run_starts_from_it_and_then_goes_on_from_its_own(tmp_path: Path, quickstart_data: QuickstartData) -> None:
    folder = tmp_path / "model"
    save_model(folder, "llama3")
    options = overrides(quickstart_data, folder, *ALONE, f"run_dir={tmp_path}")
    expected = their_loss(folder, load_config(CONFIG, options, complete_model))
    assert f"weights from {folder}" in _train(*options, "training.steps=3", "training.stop_after=2")
    shutil.rmtree(folder)  # what the run has saved is enough
    said = _train(*options, "training.steps=3")
    assert "resumed from step 2" in said
    assert "weights from" not in said
    metrics = read_metrics(tmp_path / "quickstart" / "metrics.jsonl")
    assert [line["step"] for line in metrics] == [1, 2, 3]
    assert metrics[0]["loss"] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("format", slow_but(["native", "consolidated"], "native"))
def test_converted_weights_are_the_same(
    world4: World, tmp_path: Path, quickstart_data: QuickstartData, format: str
) -> None:
    save_model(tmp_path / "theirs", "llama-tied")
    command = ["--load", str(tmp_path / "theirs"), "--save", str(tmp_path / "converted"), "--to", format]
    assert convert_checkpoint.main(command) == 0
    options = [
        overrides(quickstart_data, tmp_path / name, *LAYOUTS["tp2-sp-pp2"][1]) for name in ("theirs", "converted")
    ]
    configs = [load_config(CONFIG, one, complete_model) for one in options]
    assert configs[0].model == configs[1].model
    check_init(configs[1], tmp_path, None)
    assert world4.run(_losses, options[0]) == world4.run(_losses, options[1])


def test_the_model_section_must_agree_with_the_folder(tmp_path: Path, quickstart_data: QuickstartData) -> None:
    save_model(tmp_path, "llama3")
    said = ["model.hidden_size=64", "model.rope_theta=1e6", "model.sliding_window=8", "model.num_layers=3"]
    with pytest.raises(ConfigError) as caught:
        load_config(CONFIG, overrides(quickstart_data, tmp_path, *said), complete_model)
    problems = {problem.path: str(problem) for problem in caught.value.problems}
    assert problems.keys() == {"model.hidden_size", "model.rope_theta", "model.sliding_window"}
    expected = f"checkpoint.init_from starts from {tmp_path}, where it is 32; leave it out, or set 32"
    assert problems["model.hidden_size"] == f"model.hidden_size = 64: {expected}"


def test_the_section_of_experts_may_be_incomplete_too(tmp_path: Path, quickstart_data: QuickstartData) -> None:
    save_model(tmp_path, "mixtral")
    options = overrides(quickstart_data, tmp_path, "model.moe.aux_loss=0.01")
    moe = load_config(CONFIG, options, complete_model).model.moe
    assert moe is not None
    assert (moe.num_experts, moe.aux_loss) == (4, 0.01)
    with pytest.raises(ConfigError, match=r"model\.moe\.top_k = 3: .*where it is 2; leave it out, or set 2"):
        load_config(CONFIG, [*options, "model.moe.top_k=3"], complete_model)


def test_null_means_the_folders_value_only_for_keys_whose_default_is_derived(
    tmp_path: Path, quickstart_data: QuickstartData
) -> None:
    save_model(tmp_path, "mistral")
    options = overrides(quickstart_data, tmp_path, "model.vocab_size=null", "model.max_position_embeddings=null")
    config = load_config(CONFIG, options, complete_model)
    assert (config.model.vocab_size, config.model.sliding_window) == (VOCABULARY, 5)
    for wrong, message in (
        ([*options, "model.sliding_window=null"], r"model\.sliding_window = None: .*where it is 5"),
        ([*options, "model.hidden_sise=32"], r"did you mean model\.hidden_size"),
        (["model={}"], r"model\.num_layers is required: add"),  # without init_from
    ):
        with pytest.raises(ConfigError, match=message):
            load_config(CONFIG, wrong, complete_model)


def test_errors_about_the_folder_name_the_key(tmp_path: Path, quickstart_data: QuickstartData) -> None:
    folder = tmp_path / "model"
    options = overrides(quickstart_data, folder)

    def refused(message: str) -> None:
        with pytest.raises(ConfigError, match=rf"checkpoint\.init_from = .*{message}") as caught:
            load_config(CONFIG, options, complete_model)
        assert [problem.path for problem in caught.value.problems] == ["checkpoint.init_from"]

    refused("model': there is no .*model; give a folder")
    save_model(folder, "llama3")
    config = load_config(CONFIG, options, complete_model)
    (folder / "model.safetensors").write_bytes(b"")  # after the config was read
    with pytest.raises(ConfigError, match=r"checkpoint\.init_from = .*is damaged or not a safetensors file"):
        check_init(config, tmp_path, None)
    refused("is damaged or not a safetensors file")
    save_model(folder, "llama3")
    changed = json.loads((folder / "config.json").read_text()) | {"is_causal": False}
    (folder / "config.json").write_text(json.dumps(changed))
    refused(r"config\.json: is_causal = False")


def test_a_folder_with_a_tiktoken_tokenizer(tmp_path: Path) -> None:
    """Its file is compared with the run's, and not taken for a sentencepiece model."""
    folder = write_family(tmp_path, FAMILIES["kimi-tiktoken"])
    source = families.RandomSource(model_spec(families.SMALL))
    source.tokenizer_files = list(folder.iterdir())
    assert _tokenizer_file(source, "tiktoken") == str(folder / "tiktoken.model")
    assert _tokenizer_file(source, "sentencepiece") is None


def test_another_tokenizer(tmp_path: Path, quickstart_data: QuickstartData) -> None:
    save_model(tmp_path, "llama3")
    config = load_config(CONFIG, overrides(quickstart_data, tmp_path), complete_model)
    mine = quickstart_data.folder / "tokenizer.model"
    tokenizer = build_tokenizer("sentencepiece", str(mine))
    check_init(config, tmp_path, tokenizer)  # a folder without one
    shutil.copy(mine, tmp_path / "tokenizer.model")
    check_init(config, tmp_path, tokenizer)

    from sentencepiece import SentencePieceTrainer

    text = quickstart_data.folder / "other.txt"
    text.write_text("\n".join(f"some {i} other words {i * i} to learn from" for i in range(200)))
    SentencePieceTrainer.train(
        input=str(text), model_prefix=str(tmp_path / "tokenizer"), vocab_size=80, minloglevel=2, hard_vocab_limit=False
    )
    with pytest.raises(ConfigError, match=r"gives other tokens than .*tokenizer\.model, which the weights"):
        check_init(config, tmp_path, tokenizer)
