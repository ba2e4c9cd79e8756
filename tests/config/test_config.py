"""Loading and checking configs: accepted values, and the message for each mistake."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from os.path import expanduser
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import pytest
import yaml

from megafp8.config import (
    Config,
    ConfigError,
    TokenizerConfig,
    check_layout,
    config_and_overrides,
    config_at,
    load_config,
    model_spec,
)
from megafp8.conversion.flat import differences
from megafp8.parallel.pipeline.registry import SCHEDULES
from megafp8.section import Section

ROOT = Path(__file__).resolve().parents[2]
MINIMAL: dict[str, Any] = {
    "name": "test",
    "model": {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 8, "vocab_size": 512},
    "training": {"steps": 10, "seq_length": 32, "global_batch_size": 8},
    "optimizer": {"learning_rate": 0.001},
    "data": {"train": ["somewhere/text"]},
}


def write(tmp_path: Path, tree: Any = MINIMAL) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


def messages(path: Path, *overrides: str, world_size: int = 1) -> str:
    """The error message for this config on `world_size` ranks."""
    with pytest.raises(ConfigError) as error:
        check_layout(load_config(path, overrides), world_size, str(path))
    return str(error.value)


def test_defaults_and_overrides(tmp_path: Path) -> None:
    config = load_config(write(tmp_path), ["parallel.tensor=2", "fp8.recipe=current", "data.train={a: 0.7, b: 0.3}"])
    assert (config.parallel.tensor, config.fp8.recipe) == (2, "current")
    assert config.data.train == {"a": 0.7, "b": 0.3}
    assert config.spec.layers[0].mixer.groups == 8
    assert load_config(write(tmp_path), ["parallel.schedule=zb-v"]).parallel.virtual_pipeline == 2
    assert config.spec.layers[0].ffn.width == 256
    check_layout(config, 4)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("parallel.tenor=2", "parallel.tenor = 2: there is no such key; did you mean parallel.tensor?"),
        ("modle.num_layers=2", "modle = {'num_layers': 2}: there is no such key; did you mean model?"),
        ("training.max_steps=2", "training.max_steps = 2: there is no such key; did you mean training.steps?"),
        ("tensor-model-parallel-size=2", "did you mean parallel.tensor?"),
        ("learning_rate=2", "learning_rate = 2: there is no such key; did you mean optimizer.learning_rate?"),
        ("training.interval=2", "did you mean fp8.interval or checkpoint.interval or logging.interval?"),
        ("lr_scheduler.decay_ratio=2", "there is no such key; lr_scheduler.decay_ratio is optimizer.decay_steps here"),
        ("training.frobnicate=2", "training.frobnicate = 2: there is no such key; valid: steps, stop_after"),
        (
            "name=my run/1",
            "name = 'my run/1': a name consists of letters, digits, '.', '_' and '-', and begins with a letter or "
            "digit; try my-run-1",
        ),
        ("training.steps=ten", "training.steps = 'ten': input should be a valid integer"),
        ("training.steps=1.5e0", "training.steps = '1.5e0': input should be a valid integer"),
        ("training.steps=true", "training.steps = True: input should be a number, not a truth value"),
        ("optimizer.learning_rate=true", "optimizer.learning_rate = True: input should be a number, not a truth value"),
        ("optimizer.eps=1e300", "optimizer.eps = '1e300': input should be a number in the range of fp32"),
        ("seed=1e19", "seed = '1e19': input should be an integer of 64 bits"),
        (f"seed={'9' * 5000}", "seed = '9999"),
        ("training.steps=[1", "training.steps = '[1': the value is not valid YAML"),
        ("training.steps=" + "[" * 1000, "nested too deeply"),
        ("training={steps: 1, steps: 2}", "the value is not valid YAML: it has the key steps twice"),
        ("training=5", "training = 5: this is a section, a mapping of keys; its keys: steps, "),
        ("data.train=text", "data.train = 'text': input should be a valid list, or input should be a valid dictionary"),
        ("data.train={a: -1}", "data.train.a = -1: input should be greater than 0"),
        ("parallel.layers_per_stage=[1, x]", "parallel.layers_per_stage.1 = 'x': input should be a valid integer"),
        (
            "parallel.layers_per_stage=even",
            "parallel.layers_per_stage = 'even': input should be a valid list, or input should be 'balanced'",
        ),
        ("optimizer.offload=1.5", "optimizer.offload = 1.5: input should be less than or equal to 1"),
        ("parallel.offload=-1", "parallel.offload = -1: input should be greater than 0"),
        ("fp8.static_amax={a: x}", "fp8.static_amax.a = 'x': input should be a valid number"),
        ("training.steps=0", "training.steps = 0: input should be greater than 0"),
        ("training.steps=2.5", "training.steps = 2.5: input should be a valid integer"),
        (
            "fp8.recipe=delaid",
            "fp8.recipe = 'delaid': input should be 'none', 'delayed', 'current', 'rowwise', 'blockwise', 'static', "
            "'mxfp8', 'nvfp4' or 'custom'",
        ),
        ("optimizer.learning_rate=.nan", "optimizer.learning_rate = nan: input should be"),
        ("name=a/b", "name = 'a/b': a name consists of letters"),
        ("data.train=[]", "data.train"),
        ("parallel.tensor", "an override has the form key=value; for example parallel.tensor=2"),
        ("name.first=2", "name holds the value 'test', not a section"),
    ],
)
def test_wrong_values(tmp_path: Path, override: str, expected: str) -> None:
    assert expected in messages(write(tmp_path), override)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("name=off", "off"),
        ("name=123", "123"),
        ("name=1e3", "1e3"),
        ("name=010", "010"),
        ("name=null", "null"),
        ("name=2024-01-01", "2024-01-01"),
        ("name='quoted'", "quoted"),
        ("run_dir=a: b, {c", "a: b, {c"),
        ("run_dir=@home", "@home"),
        ("run_dir=", ""),
        ("data.split=100,0,0", "100,0,0"),
        ('data.split="100,0,0"', "100,0,0"),
        ("data.index_cache=12:30", "12:30"),
        ("data.index_cache=null", None),
        ("data.index_cache=~", None),
        ("data.index_cache='null'", "null"),
        ("logging.wandb_project=no", "no"),
        ("data.train=[2024, off, 1e3]", ["2024", "off", "1e3"]),
        ("data.train={2024-01-01: 1, no: 1e-1}", {"2024-01-01": 1.0, "no": 0.1}),
        ("fp8.include=[1, '*']", ["1", "*"]),
        ("fp8.static_amax={1.0: 2}", {"1.0": 2.0}),
        ("data.tokenizer={kind: bytes, path: 7}", TokenizerConfig(kind="bytes", path="7")),
        ("data.tokenizer={kind: bytes, path: null}", TokenizerConfig(kind="bytes")),
        ("data.tokenizer={kind: bytes, end_token: off}", TokenizerConfig(kind="bytes", end_token="off")),
        ("training.steps=1e3", 1000),
        ("training.steps=1.5e3", 1500),
        ("training.steps=10.0", 10),
        ("training.steps=1_000", 1000),
        ("training.steps=010", 10),
        ("parallel.offload=1", 1),
        ("parallel.offload=1e0", 1),
        ("parallel.offload=true", True),
        ("parallel.offload=on", True),
        ("parallel.layers_per_stage=[1e0, 3]", [1, 3]),
        ("deterministic=yes", True),
        ("deterministic=off", False),
        ("optimizer.learning_rate=1e-4", 1e-4),
        ("parallel.placement=null", None),
    ],
)
def test_override_values_follow_the_type_of_the_field(tmp_path: Path, override: str, expected: Any) -> None:
    value: Any = load_config(write(tmp_path), [override])
    for key in override.partition("=")[0].split("."):
        value = getattr(value, key)
    assert value == expected
    assert type(value) is type(expected)


def test_paths_begin_with_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(MINIMAL | {"run_dir": "~/runs"}))
    checkpoint = {"folder": "~/saved", "init_from": "s3://bucket/~/model"}
    data = {"train": {"~/a": 1, "s3://bucket/b": 2}, "validation": {"held": "~/c"}}
    stages = [{"name": "late", "begin": 5, "overrides": {"data.train": ["~/d"]}}]
    keys = {"name": "x", "base": "~/base.yaml", "checkpoint": checkpoint, "data": data, "stages": stages}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(keys))
    path, overrides = config_and_overrides(None, ["~/run.yaml", "checkpoint.memory_folder=~/memory"])
    assert path == str(tmp_path / "run.yaml")
    for config in (load_config("~/run.yaml", overrides), load_config(tmp_path / "run.yaml", overrides)):
        assert config.run_dir == f"{tmp_path}/runs"
        assert config.checkpoint.folder == f"{tmp_path}/saved"
        assert config.checkpoint.memory_folder == f"{tmp_path}/memory"
        assert config.checkpoint.init_from == "s3://bucket/~/model"
        assert config.data.train == {f"{tmp_path}/a": 1, "s3://bucket/b": 2}
        assert config.data.validation == {"held": f"{tmp_path}/c"}
        assert config_at(config, 5).data.train == [f"{tmp_path}/d"]
    said = messages(tmp_path / "run.yaml", f"data.train={{~/a: 1, {tmp_path}/a: 2}}")
    assert "data.train = {" in said
    assert "two of its keys are one path, as ~ is the home folder" in said


def paths_in(annotation: Any, metadata: Sequence[object] = ()) -> Iterator[bool]:
    """Yield for each text in a type whether it is a `UserPath`."""
    if annotation is str:
        yield any(getattr(x, "func", None) is expanduser for x in metadata)
    for inner in get_args(annotation)[: 1 if get_origin(annotation) is Annotated else None]:
        yield from paths_in(inner, getattr(annotation, "__metadata__", ()))


def test_every_key_that_holds_text_is_a_path_or_listed_here() -> None:
    sections = [Section]
    for section in sections:
        sections += section.__subclasses__()
    texts = {
        f"{section.__name__}.{name}": any(found)
        for section in sections
        for name, field in section.model_fields.items()
        if section.__module__.startswith("megafp8.") and name in section.__annotations__
        if (found := list(paths_in(field.annotation, field.metadata)))
    }
    assert {key for key, is_path in texts.items() if not is_path} == {
        "Config.name", "Config.base", "StageConfig.name", "StageConfig.overrides", "ModelConfig.pattern",
        "ModelConfig.layer_kinds", "EvaluateConfig.prompts", "EvaluateConfig.tasks", "TokenizerConfig.end_token",
        "TokenizerConfig.pattern", "StreamsConfig.text_key", "GrpoConfig.prompt_key", "DataConfig.split",
        "Fp8Config.include", "Fp8Config.exclude", "Fp8Config.static_amax", "CustomRule.layers", "ParamGroup.match",
        "CheckpointConfig.allow_model_change", "LoggingConfig.wandb_project", "ResilienceConfig.notify",
    }  # fmt: skip
    assert {"Config.run_dir", "DataConfig.train", "TokenizerConfig.path", "GrpoConfig.reward_command"} <= texts.keys()


def test_text_that_looks_like_another_yaml_type_must_be_quoted(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    template = yaml.safe_dump({k: v for k, v in MINIMAL.items() if k not in ("name", "data")})

    def load(name: str, train: str) -> Config:
        path.write_text(f"{template}name: {name}\ndata: {{train: {train}}}\n")
        return load_config(path)

    for text in ("off", "no", "2024-01-01", "1e3", "010", '"123"', "0o17"):
        assert load(text, "[on, 2024-01-01]").name == text.strip('"')
    for text, shown in (("123", "123"), ("1.5", "1.5"), ("true", "True")):
        said = f'name = {shown}: this key is text, but YAML reads this value as another type; quote it: "{text}"'
        with pytest.raises(ConfigError) as error:
            load(text, "[a]")
        assert said in str(error.value)
    for train, said in (
        ("[1]", "data.train.0 = 1: this key is text"),
        ("{1: 2}", "data.train.1 = 1: a key here is text"),
    ):
        with pytest.raises(ConfigError) as error:
            load("a", train)
        assert said in str(error.value)
        assert len(error.value.problems) == 1


def test_written_configs_are_read_back_unchanged(tmp_path: Path) -> None:
    """A run's config.yaml is PyYAML's, which follows YAML 1.1."""
    texts = ["off", "123", "1e3", "010", "08", "0o17", "null", "2024-01-01", "1_000", "0x1F", "1.5", "1:30", "1e-5"]
    overrides = [f"data.train=[{', '.join(texts)}]", "optimizer.learning_rate=1e-5"]
    for text in texts:
        config = load_config(write(tmp_path), [*overrides, f"run_dir={text}"])
        assert (config.data.train, config.run_dir) == (texts, text)
        assert load_config(write(tmp_path, config.model_dump(mode="json"))) == config


def test_duplicate_keys(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    text = (
        yaml.safe_dump(MINIMAL)
        + "fp8:\n  recipe: delayed\n  margin: 1\n  margin: 2\nfp8: {recipe: none}\n'seed': 1\nseed: 1\n"
    )
    path.write_text(text)
    said = messages(path)
    lines = text.splitlines()
    first, margin, last, seed = (
        lines.index(x) + 1 for x in ("fp8:", "  margin: 1", "fp8: {recipe: none}", "'seed': 1")
    )
    assert f"{path}: 3 problems" in said
    assert f"fp8 = {{'recipe': 'none'}}: line {last}: line {first} has this key already; keep one" in said
    assert f"fp8.margin = 2: line {margin + 1}: line {margin} has this key already" in said
    assert f"seed = 1: line {seed + 1}: line {seed} has this key already" in said


def test_anchors_and_merge_keys_work(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    tree = {k: v for k, v in MINIMAL.items() if k != "model"}
    base = "{num_layers: 4, hidden_size: 64, num_attention_heads: 8, vocab_size: 512}"
    # `model` overrides what it merges, and is itself merged again: neither is a duplicate.
    text = (
        f"{yaml.safe_dump(tree)}model: &model\n  <<: {base}\n  num_layers: 2\n"
        "parallel: &again {tensor: 2}\nlogging: {interval: &n 7}\ncheckpoint: {<<: {interval: 3}, interval: *n}\n"
    )
    path.write_text(text)
    config = load_config(path)
    assert (config.model.num_layers, config.model.hidden_size) == (2, 64)
    assert (config.checkpoint.interval, config.logging.interval) == (7, 7)
    path.write_text(text + "optimizer: {<<: {learning_rate: 1.0}, <<: {learning_rate: 2.0}}\n")
    assert "optimizer.<<" in messages(path)  # PyYAML takes the last, and of a list `<<: [a, b]` the first


def test_a_missing_key_and_a_missing_section(tmp_path: Path) -> None:
    tree = {k: v for k, v in MINIMAL.items() if k != "optimizer"} | {"training": {"steps": 10, "seq_length": 32}}
    said = messages(write(tmp_path, tree))
    assert "2 problems" in said
    assert '\n  optimizer.learning_rate is required: add "optimizer: {learning_rate: 3.0e-4}"' in said
    assert '\n  training.global_batch_size is required: add "training: {global_batch_size: 128}"' in said
    assert '\n  data.train is required: add "data: {train: [data/corpus/text]}"' in messages(
        write(tmp_path, {"name": "x"})
    )


def test_files_that_are_not_a_config(tmp_path: Path) -> None:
    path = write(tmp_path)
    assert "No such file" in messages(tmp_path / "absent.yaml")
    assert str(path) in messages(tmp_path / "absent.yaml")
    (tmp_path / "list.yaml").write_text("- 1\n- 2\n")
    assert "must hold a mapping" in messages(tmp_path / "list.yaml")
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"], "hidden_size": 64}')
    for model in (tmp_path, tmp_path / "config.json"):
        said = messages(model)
        assert "this describes a Hugging Face model, not a run of megafp8" in said
        assert f'"checkpoint: {{init_from: {tmp_path}}}"' in said
    (tmp_path / "broken.yaml").write_text("model: {num_layers: 4\n")
    assert "not valid YAML" in messages(tmp_path / "broken.yaml")
    for content, byte in ((b"name: caf\xe9\n", "byte 9 is 0xe9"), ("name: a".encode("utf-16"), "byte 0 is 0xff")):
        (tmp_path / "other.yaml").write_bytes(content)
        assert f"not UTF-8: {byte}; save it as UTF-8" in messages(tmp_path / "other.yaml")
    (tmp_path / "deep.yaml").write_text("model: " + "[" * 1000)
    assert "nested too deeply" in messages(tmp_path / "deep.yaml")
    doubling = "".join(
        f"a{i}: &a{i} [{'*a' + str(i - 1) if i else 'x'}, {'*a' + str(i - 1) if i else 'x'}]\n" for i in range(40)
    )
    (tmp_path / "aliases.yaml").write_text(doubling)
    assert "its aliases expand " in messages(tmp_path / "aliases.yaml")
    (tmp_path / "itself.yaml").write_text("model: &a [*a]\n")
    assert "an alias inside the value that it refers to" in messages(tmp_path / "itself.yaml")
    (tmp_path / "bom.yaml").write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert load_config(tmp_path / "bom.yaml") == load_config(path)


TWO_BY_TWO = ["parallel.pipeline=2", "parallel.virtual_pipeline=2"]


SHARED_ATTENTION = "model.layer_kinds={a: {mixer: {kind: shared_attention, num_heads: 8}}}"
NET = "kind: gated_delta_net, num_key_heads: 2, num_value_heads: 4"
PATTERNS: list[tuple[list[str], int, str]] = [
    (["model.pattern=[a]"], 1, "model.pattern = ['a']: there is no model.layer_kinds; give both, or neither"),
    (["model.layer_kinds={near: {}}", "model.pattern=[nar]"], 1,
     "model.pattern = 'nar': this is none of model.layer_kinds (near), with or without a count; try near, or near * 3"),
    (["model.layer_kinds={a: {}}", "model.pattern=[a * 0]"], 1, "model.pattern = 'a * 0': this is none of"),
    (["model.layer_kinds={a: {}, b: {}}", "model.pattern=[a]"], 1, "model.layer_kinds.b = 'given': model.pattern does"),
    (["model.layer_kinds={a: {}}", "model.pattern=[a]", "model.full_attention_layers=[0]", "model.sliding_window=8"], 1,
     "model.full_attention_layers = [0]: model.pattern already assigns a kind to each layer; leave it out"),
    (["model.layer_kinds={a: {ffn: {kind: moe}}}", "model.pattern=[a]"], 1,
     "model.layer_kinds.a.ffn.kind = 'moe': there is no section model.moe, and the number of experts is not given; "
     "give model.layer_kinds.a.ffn.num_experts, or model.moe"),
    (["model.layer_kinds={a: {}, b: {mixer: {kv_layer: 1}}}", "model.pattern=[a, b]", "model.num_layers=2"], 1,
     "model.layer_kinds.b.mixer.kv_layer = 1: must come before layer 1, which reads it; name an earlier"),
    (["model.layer_kinds={a: {}, b: {mixer: {kv_layer: 0, head_dim: 4}}}", "model.pattern=[a, b]",
      "model.num_layers=2"], 1, "model.layer_kinds.b.mixer.kv_layer = 0: that layer has a different head_dim"),
    (["model.layer_kinds={a: {}, b: {mixer: {kv_layer: 2}}}", "model.pattern=[a * 3, b]", "model.num_layers=4",
      "parallel.pipeline=2", "parallel.layers_per_stage=[3, 1]"], 2,
     "parallel.layers_per_stage = [3, 1]: layer 3 reads keys and values of layer 2, but stages send only the residual"
     " stream; try [2, 2]"),
    (["model.layer_kinds={a: {}, b: {mixer: {kv_layer: 0}}}", "model.pattern=[a, b]", "model.num_layers=2",
      "parallel.pipeline=2"], 2, "parallel.pipeline = 2: layer 1 reads keys and values of layer 0"),
    (["model.per_layer_embedding={}", "parallel.pipeline=2", "model.num_layers=2"], 2,
     "parallel.pipeline = 2: all layers read model.per_layer_embedding"),
    ([SHARED_ATTENTION, "model.pattern=[a]", "model.num_layers=2", "parallel.pipeline=2"], 2,
     "parallel.pipeline = 2: layers of model.layer_kinds.a.mixer share weights and read the embeddings, but stages"),
    ([SHARED_ATTENTION, "model.pattern=[a]", "model.mtp_num_layers=1"], 1,
     "model.mtp_num_layers = 1: layers of model.layer_kinds.a.mixer read the embeddings or share weights"),
    ([SHARED_ATTENTION, "model.pattern=[a]", "model.hyper_connections={}"], 1,
     "model.hyper_connections = '(a section)': layers of model.layer_kinds.a.mixer read the embeddings or share"),
    ([SHARED_ATTENTION, "model.pattern=[a, b]", "model.num_layers=2",
      "model.layer_kinds.b={mixer: {kind: shared_attention, num_heads: 8, adapter_rank: 4}}"], 1,
     "model.layer_kinds.a.mixer.shared_block = 0: two kinds of layers have this number, but only equal layers share"),
    ([SHARED_ATTENTION, "model.pattern=[a]", "model.layer_kinds.a.mixer.attention={kv_layer: 0}"], 1,
     "model.layer_kinds.a.mixer.attention.kv_layer = 0: not supported; leave it out"),
    ([SHARED_ATTENTION, "model.pattern=[a]", "optimizer.qk_clip=100"], 1,
     "optimizer.qk_clip = 100.0: in shared_attention several layers share the weights of queries and keys"),
    ([SHARED_ATTENTION, "model.pattern=[a]", "model.layer_kinds.a.ffn=none", "lora.rank=4"], 1,
     "lora = 'set': no layer of the model has projections that can be adapted"),
    (["model.parallel_block=shared_norm", "model.norm_position=output"], 1,
     "model.parallel_block = 'shared_norm': layers with model.norm_position output have no norm before attention"),
    (["model.parallel_block=shared_norm", "model.norm_position=post"], 1,
     "model.parallel_block = 'shared_norm': model.norm_position is post"),
    (["model.moe={num_experts: 4, latent_size: 16}", "model.linear_bias=mlp"], 1,
     "model.moe.latent_size = 16: model.linear_bias is mlp, and latent projections have no biases; leave"),
    (["model.layer_scalar=true", "model.parallel_block=true"], 1,
     "model.layer_scalar = True: it needs model.architecture=gpt, and layers with sequential parts"),
    (["model.layer_kinds={a: {mixer: {num_query_groups: 3}}}", "model.pattern=[a]"], 1,
     "model.layer_kinds.a.mixer.num_query_groups = 3: model.num_attention_heads"),
    (["model.layer_kinds={a: {mixer: {position_embedding: learned}}}", "model.pattern=[a]"], 1,
     "model.layer_kinds.a.mixer.position_embedding = 'learned': it can only be set for the whole model; try rope"),
    (["model.layer_kinds={a: {ffn: {ffn_hidden_size: 65}}}", "model.pattern=[a]", "parallel.tensor=2"], 2,
     "parallel.tensor = 2: model.layer_kinds.a.ffn.ffn_hidden_size (65) is not a multiple of it"),
    ([f"model.layer_kinds={{a: {{mixer: {{{NET}}}}}}}", "model.pattern=[a]", "parallel.context=2",
      "training.seq_length=8"], 2,
     "training.seq_length = 8: model.layer_kinds.a.mixer needs 3 tokens in each of 4 parts of a sequence; try 16"),
    ([f"model.layer_kinds={{a: {{mixer: {{{NET}}}}}}}", "model.pattern=[a]", "data.prefix_lm={}"], 1,
     "data.prefix_lm = 'set': layers of model.layer_kinds.a.mixer see earlier tokens only"),
    (["model.layer_kinds={a: {mixer: {kind: gated_delta_net, num_key_heads: 3, num_value_heads: 4}}}",
      "model.pattern=[a]"], 1,
     "model.layer_kinds.a.mixer.num_key_heads = 3: model.layer_kinds.a.mixer.num_value_heads (4) is not a multiple"),
    (["model.layer_kinds={a: {mixer: none, ffn: none}}", "model.pattern=[a]"], 1,
     "model.layer_kinds.a = 'mixer: none, ffn: none': it has neither a mixer nor a feed-forward network; give"),
    (["model.moe={num_experts: 4, latent_size: 16}", "model.linear_bias=true"], 1,
     "model.moe.latent_size = 16: model.linear_bias is true, and latent projections have no biases; leave"),
    (["optimizer.qk_clip=100", "model.qk_norm=true"], 1,
     "optimizer.qk_clip = 100.0: with qk_norm: true logits do not depend on the size of query and key weights; leave"),
    (["optimizer.qk_clip=100", f"model.layer_kinds={{a: {{mixer: {{{NET}}}}}}}", "model.pattern=[a]"], 1,
     "optimizer.qk_clip = 100.0: no layer has softmax attention; leave it out"),
    (["model.norm_position=post", "model.layer_kinds={a: {norm_position: output}}", "model.pattern=[a]"], 1,
     "model.layer_kinds.a.norm_position = 'output': model.norm_position is post, for all layers; leave it out, or try"),
    (["model.layer_kinds={a: {mixer: {kind: mamba2, num_heads: 6}, ffn: none}}", "model.pattern=[a]"], 1,
     "model.layer_kinds.a.mixer.num_groups = 8: model.layer_kinds.a.mixer.num_heads (6) is not a multiple of it; try"),
    (["model.layer_kinds={a: {mixer: {kind: mamba2, num_heads: 4, num_groups: 1}}}", "model.pattern=[a]",
      "parallel.tensor=2"], 2,
     "parallel.tensor = 2: model.layer_kinds.a.mixer.num_groups (1) is not a multiple of it; try 1"),
]  # fmt: skip
EIGHT = "model.moe={num_experts: 8}"
EXPERTS: list[tuple[list[str], int, str]] = [
    (["model.moe={num_experts: 4, top_k: 5}"], 1,
     "model.moe.top_k = 5: the experts of a token must be different, and model.moe.num_experts is 4; try 4 or less"),
    (["model.moe={num_experts: 4, zero_experts: 2, num_groups: 2}"], 1,
     "model.moe.zero_experts = 2: model.moe.num_groups is 2, and experts without computation are in no group"),
    (["model.moe={num_experts: 8, first_dense_layers: 4}"], 1,
     "model.moe.first_dense_layers = 4: none of the 4 layers has experts; try 0, or leave model.moe out"),
    (["model.moe={num_experts: 8, layer_interval: 5}"], 1,
     "model.moe.layer_interval = 5: none of the 4 layers has experts; try 1, or leave model.moe out"),
    (["model.moe={num_experts: 8, shared_gate: true}"], 1,
     "model.moe.shared_gate = True: there is no shared expert; set model.moe.shared_ffn_hidden_size, or leave it out"),
    (["model.moe={num_experts: 8, num_groups: 3}"], 1,
     "model.moe.num_groups = 3: model.moe.num_experts (8) is not a multiple of it; try 1 or 2"),
    (["model.moe={num_experts: 8, num_groups: 2, top_groups: 3}"], 1,
     "model.moe.top_groups = 3: model.moe.num_groups is 2; try 2 or less"),
    (["model.moe={num_experts: 8, num_groups: 4, top_groups: 1, top_k: 3}"], 1,
     "model.moe.top_groups = 1: these groups have 2 experts, and model.moe.top_k is 3; try 2 or more"),
    (["model.moe={num_experts: 8, shared_ffn_hidden_size: 33}", "parallel.tensor=2"], 2,
     "parallel.tensor = 2: model.moe.shared_ffn_hidden_size (33) is not a multiple of it"),
    (["parallel.expert=2"], 2, "parallel.expert = 2: the model has no experts; try 1, or set model.moe"),
    ([EIGHT, "parallel.expert=3"], 3,
     "parallel.expert = 3: model.moe.num_experts (8) is not a multiple of it; try 1 or 2"),
    ([EIGHT, "parallel.expert=4"], 2,
     "parallel.expert = 4: it must divide the 2 data-, context- and tensor-parallel ranks of a pipeline stage; start a "
     "multiple of 4 processes, or try 1 or 2"),
    (["data.train=[s3:/bucket/data]"], 2,
     "data.train = 's3:/bucket/data': a URL has two slashes after its protocol; try s3://bucket/data"),
    (["checkpoint.folder=s4://bucket/data"], 2,
     "checkpoint.folder = 's4://bucket/data': fsspec knows no protocol s4://; it knows s3, gs, az, file, memory and"),
    ([EIGHT, "parallel.tensor=2", "parallel.sequence_parallel=false"], 2,
     "parallel.sequence_parallel = False: parallel.tensor is 2, and without it each rank would send the same tokens"),
    ([EIGHT, "model.linear_bias=true", "parallel.expert_tensor=2"], 2, "parallel.expert_tensor = 2: model.linear_bias"),
    (["model.moe={num_experts: 8, ffn_hidden_size: 33}"], 1,
     "model.moe.ffn_hidden_size = 33: grouped GEMMs of experts need bf16 matrices with a multiple of 8 columns; try"),
    ([EIGHT, "parallel.expert=2", "parallel.fsdp=true", "parallel.fsdp_replicas=2"], 2,
     "parallel.fsdp_replicas = 2: the shards of parallel.fsdp are replicated over equal parts of 2 data-parallel "
     "ranks, and the experts' shards over equal parts of the 1 that hold the same experts; try 1"),
    ([EIGHT, "parallel.expert_tensor=3"], 3, "parallel.expert_tensor = 3: the width of an expert"),
    ([EIGHT, "parallel.expert=2", "parallel.expert_tensor=2"], 2,
     "parallel.expert = 2: it must divide the 1 data-, context- and tensor-parallel ranks of a pipeline stage over"),
    ([EIGHT, "parallel.expert_tensor=2", "parallel.expert_dispatch=all_to_all"], 2,
     "it sends a token to one rank for each of its experts, and parallel.expert_tensor splits experts; try all_gather"),
    ([EIGHT, "training.precision=fp32", "training.cuda_graphs=true"], 1,
     "the host reads the number of tokens of each expert, which a graph cannot do, except in bf16; try"),
    (["model.attention_dropout=0.1", "training.precision=fp32", "training.cuda_graphs=true"], 1,
     "the host selects queries of attention with dropout, which a graph cannot do, except in bf16 or fp16 with"),
    (["model.hidden_dropout=1"], 1, "model.hidden_dropout"),
    ([f"model.vocab_size={2**62}"], 1, f"model.vocab_size = {2**62}: with model.hidden_size 64 a matrix has 2.95e+20 "
     "elements; a tensor has 1.15e+18 at most; try fewer"),
]  # fmt: skip
LATENT = "model.latent_attention={q_rank: 32, kv_rank: 16, nope_head_dim: 8, rope_head_dim: 4, value_head_dim: 8}"
PREFIX = "data.prefix_lm={}"
LONGROPE = "model.longrope={short_factor: [1, 1, 1, 1], long_factor: [1, 2, 3, 4], factor: 4}"
SPARSE = "model.sparse_attention={index_heads: 2, index_head_dim: 8, top_k: 4}"
SHARED = "model.layer_kinds={own: {}, shared: {mixer: {kind: sparse_latent_attention, shared_indexer: true}}}"
BLOCKS = ["model.layer_kinds={a: {mixer: {kind: block_sparse_attention}}}", "model.pattern=[a]", "model.qk_norm=true"]
LATENT_ATTENTION: list[tuple[list[str], int, str]] = [
    ([*BLOCKS, "model.sliding_window=8"], 1,
     "model.layer_kinds.a.mixer.sliding_window = 8: block_sparse_attention lacks it; try None"),
    ([*BLOCKS, "model.qk_norm=false"], 1,
     "model.layer_kinds.a.mixer.qk_norm = False: block_sparse_attention lacks it; try True"),
    ([*BLOCKS, "model.attention_dropout=0.1"], 1,
     "model.attention_dropout = 0.1: layers of kind block_sparse_attention lack it; try 0"),
    ([BLOCKS[0].replace("attention}", "attention, top_k: 2, local_blocks: 3}"), *BLOCKS[1:]], 1,
     "model.layer_kinds.a.mixer.local_blocks = 3: above top_k (2), the number of all chosen blocks; try 2 or less"),
    ([*BLOCKS, "data.prefix_lm={}"], 1, "data.prefix_lm = 'set': layers of model.layer_kinds.a.mixer see only earlier"),
    (["model.layer_kinds={a: {mixer: {kind: block_sparse_attention}}, b: {mixer: {kv_layer: 0}}}", "model.num_layers=2",
      "model.pattern=[a, b]", "model.qk_norm=true"], 1,
     "model.layer_kinds.b.mixer.kv_layer = 0: that layer computes no keys and values"),
    ([SPARSE], 1, "model.sparse_attention = 'set': it needs latent attention; give model.latent_att"),
    ([LATENT, SPARSE, "model.latent_attention.q_rank=null"], 1,
     "model.latent_attention.q_rank = None: model.sparse_attention is set, and its indexer reads the query latent"),
    ([LATENT, SPARSE, "model.sparse_attention.index_head_dim=2"], 1,
     "model.sparse_attention.index_head_dim = 2: below model.latent_attention.rope_head_dim (4)"),
    ([LATENT, SPARSE, "model.position_embedding=none"], 1,
     "model.position_embedding = 'none': model.sparse_attention is set, and its heads and indexer have rotary"),
    ([LATENT, SPARSE, "model.sliding_window=8"], 1, "model.sliding_window = 8: model.sparse_attention is set, and it"),
    ([LATENT, SPARSE, "model.attention_dropout=0.1"], 1, "model.attention_dropout = 0.1: model.sparse_attention is"),
    ([LATENT, SPARSE, "data.prefix_lm={}"], 1, "data.prefix_lm = 'set': the indexer of model.sparse_att"),
    (["model.hyper_connections={}", "model.mtp_num_layers=1"], 1,
     "model.mtp_num_layers = 1: model.hyper_connections is set and does not support it; try 0"),
    (["model.hyper_connections={streams: 1}"], 1, "model.hyper_connections.streams = 1"),
    (["model.moe={num_experts: 4}", "model.layer_kinds={a: {ffn: {kind: moe, routing: hash}}}", "model.pattern=[a]",
      "model.mtp_num_layers=1"], 1, "model.layer_kinds.a.ffn.routing = 'hash': multi-token prediction layers copy the"),
    (["model.layer_kinds={a: {mixer: {kind: sparse_latent_attention}}}", "model.pattern=[a]"], 1,
     "model.layer_kinds.a.mixer.kind = 'sparse_latent_attention': there is no section model.sparse_attention, and "
     "the indexer's heads"),
    ([LATENT, SPARSE, SHARED, "model.pattern=[shared, own]"], 1,
     "model.layer_kinds.shared.mixer.shared_indexer = True: no layer before layer 0 has an indexer; give an earlier"),
    ([LATENT, SPARSE, SHARED.replace("true", "true, top_k: 2"), "model.pattern=[own, shared]"], 1,
     "model.layer_kinds.shared.mixer.top_k = 2: shared_indexer is true, and the key belongs to an indexer; leave it"),
    ([LATENT, SPARSE, SHARED, "model.pattern=[own * 3, shared]", "model.num_layers=4", "parallel.pipeline=2",
      "parallel.layers_per_stage=[3, 1]"], 2,
     "parallel.layers_per_stage = [3, 1]: layer 3 reads the chosen tokens of layer 2, but stages send only the "
     "residual stream; try [2, 2]"),
    ([LATENT, "model.head_dim=8"], 1,
     "model.head_dim = 8: model.latent_attention is set, and its heads have the widths nope_head_dim, rope_head_dim "
     "and value_head_dim; try null, or leave model.latent_attention out"),
    ([LATENT, "model.num_query_groups=4"], 1,
     "model.num_query_groups = 4: model.latent_attention is set, and each of its heads has its own key and value; "
     "try null, or leave"),
    ([LATENT, "model.qkv_bias=true"], 1,
     "model.qkv_bias = True: model.latent_attention is set, and its layers have no biases; try false, or leave"),
    ([LATENT, "model.linear_bias=true"], 1, "model.linear_bias = True: model.latent_attention is set, and its layers"),
    ([LATENT, "model.qk_norm=true"], 1,
     "model.qk_norm = True: model.latent_attention is set, and it normalizes the latents instead; try false, or leave"),
    ([LATENT, "model.attention_sinks=true"], 1,
     "model.attention_sinks = True: model.latent_attention is set, and its heads have no sinks; try false, or leave"),
    ([LATENT, "model.position_embedding=learned"], 1,
     "model.position_embedding = 'learned': model.latent_attention is set, and its rope_head_dim channels have rotary "
     "positions or none; try rope, none, or leave model.latent_attention out"),
    ([LATENT, "model.latent_attention.rope_head_dim=5"], 1,
     "model.latent_attention.rope_head_dim = 5: rotary embeddings rotate pairs, so it must be even; try 6"),
    ([LATENT, "model.latent_attention.value_head_dim=13"], 1,
     "model.latent_attention.value_head_dim = 13: wider than keys (nope_head_dim + rope_head_dim = 12), but values "
     "are padded to this width; try 12 or less"),
    ([LATENT, "parallel.context=2"], 2,
     "parallel.context = 2: its attention kernels need heads of a multiple of 8, at most 256, and "
     "model.latent_attention.nope_head_dim + rope_head_dim is 12; try parallel.context=1, or other widths"),
    ([LATENT, "model.rope_scaling={low_freq_factor: 4}"], 1,
     "model.rope_scaling.high_freq_factor = 4.0: not above low_freq_factor (4.0)"),
    (["model.yarn={factor: 4}", "model.rope_scaling={}"], 1, "model.yarn.factor = 4.0: model.rope_scaling scales the"),
    (["model.yarn={factor: 4, beta_slow: 32}"], 1, "model.yarn.beta_fast = 32.0: not above beta_slow (32.0)"),
    (["model.yarn={factor: 4, mscale_all_dim: 1}"], 1, "model.yarn.mscale_all_dim = 1.0: without model.latent_att"),
    (["model.yarn={factor: 4}", "model.rope_theta=1"], 1, "model.rope_theta = 1.0: model.yarn is set, and it needs"),
    (["model.yarn={factor: 4}", "model.rope_interpolation_factor=2"], 1, "model.yarn scales the frequencies already"),
    (["model.yarn={factor: 4}", LONGROPE], 1, "model.longrope.factor = 4.0: model.yarn scales the frequencies already"),
    ([LONGROPE, "model.partial_rotary_factor=0.5"], 1, "model.longrope.long_factor = [1.0, 2.0, 3.0, 4.0]: 4 numbers, "
     "but 2 pairs of channels of a head are rotated; give 2 numbers"),
    ([LONGROPE, "model.max_position_embeddings=64"], 1, "model.max_position_embeddings = 64: not model.longrope's "
     "factor × original_max_position_embeddings (16384); try 16384"),
    ([PREFIX, "model.sliding_window=4"], 1, "model.sliding_window = 4: data.prefix_lm is set, and all tokens must"),
    ([PREFIX, "model.attention_chunk=4"], 1, "model.attention_chunk = 4: data.prefix_lm is set, so all"),
    ([PREFIX, "model.attention_chunk=4", "model.layer_kinds={a: {mixer: {rope_theta: 100.0}}}", "model.pattern=[a]"], 1,
     "model.attention_chunk = 4: data.prefix_lm is set, so all"),
    ([PREFIX, "model.layer_kinds={a: {mixer: {attention_chunk: 4}}}", "model.pattern=[a]"], 1,
     "model.layer_kinds.a.mixer.attention_chunk = 4: data.prefix_lm is set, so all tokens attend to the whole"),
    (["model.attention_chunk=4", "model.sliding_window=2"], 1,
     "model.attention_chunk = 4: model.sliding_window (2) already limits which tokens a token attends to; leave"),
    ([LATENT, "model.attention_chunk=4"], 1, "model.attention_chunk = 4: model.latent_attention is set, and its"),
    (["model.norm_weights=false", "model.normalization=layernorm"], 1,
     "model.normalization = 'layernorm': model.norm_weights is false, and it has learned weights; try rmsnorm"),
    (["model.norm_weights=false", "model.zero_centered_gamma=true"], 1,
     "model.zero_centered_gamma = True: model.norm_weights is false, and it says how weights are stored; try False"),
    ([PREFIX, "model.position_embedding=alibi"], 1, "model.position_embedding = 'alibi': data.prefix_lm is set, and"),
    ([PREFIX, "model.mtp_num_layers=1"], 1, "model.mtp_num_layers = 1: data.prefix_lm is set, and a token of the "
     "prefix would see the embedding of the token that it must predict; try 0, or leave data.prefix_lm out"),
    ([PREFIX, "model.architecture=bert"], 1, "model.architecture = 'bert': data.prefix_lm is set, and a prefix is for"),
    ([PREFIX, "data.reset_at_documents=true"], 1, "data.reset_at_documents = True: data.prefix_lm is set, and"),
    (["data.prefix_lm={max_length: 65}"], 1, "data.prefix_lm.max_length = 65: training.seq_length is 32, and a prefix"),
    (["data.prefix_lm={min_length: 9, max_length: 8}"], 1, "data.prefix_lm.min_length = 9: longer than the longest"),
    (["model.rope_local_theta=5"], 1, "model.rope_local_theta = 5.0: no layer has a window; set model.sliding_window"),
    (["model.head_dim=16", "model.partial_rotary_factor=0.2"], 1,
     "model.partial_rotary_factor = 0.2: rotary embeddings rotate pairs, but it selects 3 of 16 channels"),
    ([LATENT, "model.attention_softcap=5"], 1, "model.attention_softcap = 5.0: model.latent_attention is set, and its"),
    (["checkpoint.allow_model_change=[latent_attention.qrank]"], 1, "did you mean latent_attention.q_rank?"),
]  # fmt: skip
RESILIENCE = [
    (["resilience.hang_seconds=600"], 1, "resilience.hang_seconds = 600.0: a collective already fails after "
     "timeout_seconds (600), without naming a rank; try 300"),
    (["resilience.loss_spike={action: rewind}"], 1, "resilience.loss_spike.action = 'rewind': there are no checkpoint"),
    (["parallel.fsdp=true", "resilience.recompute_interval=5"], 2, "resilience.recompute_interval = 5: parallel."),
    (["resilience.inject=[{kind: kill, rank: 4, step: 1}]"], 4, "resilience.inject.0.rank = 4: the job has ranks 0 to"),
    (["resilience.inject=[{kind: flip_gradient, rank: 0, step: 1}]"], 1, "set resilience.recompute_interval"),
    (["resilience.recompute_interval=2", "resilience.inject=[{kind: flip_gradient, rank: 0, step: 9}]"], 1, "try 10"),
    (["resilience.inject=[{kind: lose_memory, rank: 0, step: 1}]"], 1, "set checkpoint.memory_interval"),
    (["resilience.replicas={count: 2, min: 3}"], 1, "resilience.replicas.min = 3: there are 2 replicas"),
    (["resilience.replicas={count: 4}", "training.global_batch_size=4", "training.micro_batch_size=2"], 1,
     "training.global_batch_size = 4: a rank of a replica has 2 micro-batches of the global batch, too few for 4"),
    (["resilience.replicas={count: 3, batch: shrink}", "training.global_batch_size=8", "training.micro_batch_size=1"],
     1, "each of 3 replicas has the same share of 8 micro-batches; try 9"),
    (["resilience.replicas={count: 2}", "checkpoint.memory_interval=1"], 1, "a replica copies its state from others"),
    (["resilience.replicas={count: 2}", "checkpoint.resume=false"], 1, "a restarted replica must continue the run"),
    (["resilience.replicas={count: 2, batch: shrink}", "data.packing=balanced"], 1,
     "resilience.replicas.batch = 'shrink': with resilience.replicas, data.packing balanced orders whole global"),
    (["resilience.replicas={count: 2}", "resilience.hang_seconds=100"], 1, "a rank may wait for other replicas"),
    (["resilience.replicas={count: 2}", "resilience.loss_spike={action: rewind}", "checkpoint.interval=5"], 1,
     "resilience.loss_spike.action = 'rewind': with resilience.replicas, replicas do not go back together; try skip"),
    (["checkpoint.interval=50", "checkpoint.memory_interval=60"], 1, "checkpoint.memory_interval = 60: the newest"),
]  # fmt: skip
CASES: list[tuple[list[str], int, str]] = [
    *RESILIENCE,
    *EXPERTS,
    *PATTERNS,
    *LATENT_ATTENTION,
    (["parallel.tensor=3"], 3, "parallel.tensor = 3: model.num_attention_heads (8) is not a multiple of it; try"),
    (["parallel.tensor=2"], 3, "the world has 3 ranks, not a multiple of 2; start 4 processes"),
    (["checkpoint.init_optimizer=true"], 4, "init_optimizer = True: there is no checkpoint to take it from; set"),
    (["checkpoint.keep_every=5"], 4, "keep_every = 5: without checkpoint.keep_last every checkpoint is kept; set"),
    (["parallel.pipeline=8"], 8, "parallel.pipeline = 8: a stage would have no layers: model.num_layers is 4"),
    (["parallel.pipeline=2", "parallel.layers_per_stage=[4, 0]"], 2,
     "parallel.layers_per_stage = [4, 0]: stage 1 would have no layers; try [2, 2]"),
    (["parallel.pipeline=2", "parallel.layers_per_stage=[2, 3]"], 2, "it adds up to 5, but model.num_layers is 4"),
    (["parallel.pipeline=2", "parallel.layers_per_stage=[4]"], 2, "1 entries for parallel.pipeline = 2 stages"),
    (["parallel.pipeline=2", "parallel.virtual_pipeline=3", "parallel.schedule=interleaved"], 2,
     "parallel.virtual_pipeline = 3: with parallel.pipeline = 2 this gives 6 stages, and a stage would have no "
     "layers: model.num_layers is 4; try 2 or less"),
    ([*TWO_BY_TWO, "parallel.schedule=interleaved", "parallel.layers_per_stage=[2, 2]"], 2,
     "2 entries for parallel.pipeline = 2 × parallel.virtual_pipeline = 2 stages; try [1, 1, 1, 1]"),
    (["parallel.pipeline=2", "parallel.schedule=zb-v", "parallel.virtual_pipeline=1"], 2,
     "parallel.schedule = 'zb-v': it is for 2 stages per rank, and parallel.virtual_pipeline is 1; try "
     "parallel.virtual_pipeline=2, or parallel.schedule=1f1b"),
    (TWO_BY_TWO, 2,
     "parallel.schedule = '1f1b': it is for 1 stage per rank, and parallel.virtual_pipeline is 2; try "
     "parallel.virtual_pipeline=1, or parallel.schedule=interleaved"),
    (["parallel.pipeline=2", "parallel.schedule=interleaved", "parallel.virtual_pipeline=1"], 2,
     "parallel.schedule = 'interleaved': it is for 2 or more stages per rank"),
    (["parallel.schedule=zbh1"], 1, f"none of {', '.join(SCHEDULES)}, and neither a .csv file nor"),
    (["parallel.schedule=zbh1"], 1, "try zb-h1"),
    ([*TWO_BY_TWO, "parallel.schedule=zb-v", "parallel.placement=loop"], 2,
     "parallel.placement = 'loop': parallel.schedule zb-v needs v; try parallel.placement=v, or leave it out"),
    (["parallel.pipeline=2", "parallel.schedule=mine.csv", "parallel.placement=v"], 2,
     "parallel.placement = 'v': v needs two stages per rank, and parallel.virtual_pipeline is 1"),
    (["parallel.virtual_pipeline=2", "parallel.schedule=interleaved"], 1,
     "parallel.virtual_pipeline = 2: parallel.pipeline is 1, so there is no pipeline bubble to reduce"),
    (["parallel.tensor=2", "training.seq_length=33"], 2,
     "training.seq_length = 33: sequence parallelism splits it into parallel.tensor (2) equal parts; try 34"),
    (["parallel.context=2", "training.seq_length=34"], 2,
     "training.seq_length = 34: context parallelism splits it into two chunks for each of parallel.context (2) "
     "ranks; try 36, or parallel.context=1"),
    (["parallel.context=2", "parallel.tensor=2", "training.seq_length=28"], 4,
     "ranks, and sequence parallelism each rank's shard into parallel.tensor (2) equal parts; try 32"),
    (["model.full_attention_layers=[0]"], 1, "model.full_attention_layers = [0]: no layer has a window; set model."),
    (["model.sliding_window=8", "model.full_attention_layers=[1,0,900]"], 1,
     "model.full_attention_layers = [1, 0, 900]: these are not indices of the"),
    (["parallel.context=2", "model.head_dim=12"], 2,
     "parallel.context = 2: its attention kernels need heads of a multiple of 8, at most 256, and "
     "model.head_dim is 12; try parallel.context=1"),
    (["parallel.context=2", "parallel.tensor=2"], 6,
     "parallel = 'tensor 2 × pipeline 1 × context 2': the world has 6 ranks, not a multiple of 4; start 8"),
    (["parallel.context=2", "training.global_batch_size=6"], 8, "(1) × 4 data-parallel ranks; try 8"),
    (["training.global_batch_size=6"], 4, "training.global_batch_size = 6: not a multiple of"),
    (["model.num_query_groups=3"], 1, "model.num_attention_heads (8) is not a multiple of it; try 1 or 2"),
    (["model.hidden_size=66"], 1, "model.hidden_size = 66: not a multiple of model.num_attention_heads (8)"),
    (["model.hidden_size=72"], 1, "model.head_dim = 9: rotary embeddings rotate pairs"),
    (["model.vocab_multiple=3", "parallel.tensor=2"], 2, "model.vocab_multiple (3) is not a multiple of it"),
    (["model.position_embedding=learned", "model.max_position_embeddings=16"], 1,
     "model.max_position_embeddings = 16: fewer positions than training.seq_length (32); try 32"),
    (["optimizer.warmup_steps=10"], 1, "optimizer.warmup_steps = 10: the run has only training.steps = 10"),
    (["parallel.pipeline=8", "training.seq_length=33", "parallel.tensor=2"], 16, "2 problems"),
    (["optimizer.schedule=constant", "optimizer.decay_until=50"], 1,
     "optimizer.decay_until = 50: optimizer.schedule is constant and never"),
    (["optimizer.warmup_steps=10", "optimizer.decay_until=10"], 1,
     "optimizer.warmup_steps = 10: the schedule has only optimizer.decay_until = 10"),
    (["optimizer.schedule=wsd", "optimizer.warmup_steps=10", "optimizer.decay_until=50", "optimizer.decay_steps=45"],
     1, "longer than optimizer.decay_until (50); try 40 or less"),
    (["training.stop_after=21"], 1, "training.stop_after = 21: later than the end of the run, training.steps (10)"),
    (["data.train={a: 1e-308, b: 1e10}"], 1,
     "data.train.a = 1e-308: its share of the sum of all weights (1e+10) is too small"),
    (["data.train={a: 5e-324, b: 1}"], 1, "data.train.a = 5e-324: its share of the sum of all weights (1) is too"),
    (["checkpoint.allow_model_change=[moe.topk]"], 1, "the model section has no such key; did you mean moe.top_k?"),
    (["checkpoint.allow_model_change=[model.rope_thet]"], 1,
     "checkpoint.allow_model_change = 'model.rope_thet': the model section has no such key; did you mean rope_theta?"),
    (["optimizer.min_learning_rate=1.0"], 1, "larger than optimizer.learning_rate (0.001)"),
    (["parallel.tensor=1e9"], 1, "model.ffn_hidden_size (256) is not a multiple of it; try 64 or 128 or 256"),
    (["parallel.context=524288"], 524288, "524,288 ranks are more than 262,144; try fewer"),
    (["training.global_batch_size=1e12"], 1,
     "training.global_batch_size = 1000000000000: 1,000,000,000,000 micro-batches in a step on each rank are more "
     "than 65,536; try 65536 or less, or a larger training.micro_batch_size"),
    (["model.moe={num_experts: 1073741824, ffn_hidden_size: 64}"], 1,
     "model.moe.num_experts = 1073741824: too many to plan a run for in reasonable time; try 8,192 or fewer"),
    (["parallel.pipeline=10000", "model.num_layers=10000"], 10000, "parallel.pipeline = 10000: too many to plan"),
    ([f"model.layer_kinds={{{', '.join(f'k{i}: {{}}' for i in range(2000))}}}", "model.pattern=[k0]"], 1,
     "model.layer_kinds = 2000: too many to plan a run for in reasonable time; try 256 or fewer"),
    (["training.steps=9e18"], 1, "the run has more tokens than 64 bits count; try 18014398509481984 or less"),
    (["model.rope_scaling={low_freq_factor: 4}"], 1,
     "model.rope_scaling.high_freq_factor = 4.0: not above low_freq_factor (4.0), so there is no band"),
    (["fp8.recipe=custom"], 1, "fp8.custom = []: fp8.recipe custom needs a rule; try [{layers: "),
    (["fp8.recipe=current", "fp8.first_blocks_bf16=3", "fp8.last_blocks_bf16=1"], 1,
     "fp8.first_blocks_bf16 = 3: with fp8.last_blocks_bf16 (1) it covers all of model.num_layers (4), so no block "
     "is left for FP8; try at most 3 blocks in total"),
    (["parallel.overlap_tensor=symmetric", "device=cpu"], 1,
     "parallel.overlap_tensor = 'symmetric': symmetric memory exists on GPUs only, and device is cpu; try "
     "parallel.overlap_tensor=auto, or device=cuda"),
    (["parallel.overlap_tensor=symmetric", "parallel.tensor=2", "parallel.sequence_parallel=false"], 2,
     "parallel.overlap_tensor = 'symmetric': parallel.sequence_parallel is false, so every rank has all tokens and "
     "none are gathered; try parallel.sequence_parallel=true, or parallel.overlap_tensor=none"),
    (["training.cuda_graphs=true", "device=cpu"], 1, "training.cuda_graphs = True: device is cpu, and CUDA graphs"),
    (["optimizer.moments_dtype=bf16", "optimizer.beta2=0.999"], 1,
     "optimizer.beta2 = 0.999: optimizer.moments_dtype is bf16, which has 8 bits of precision, so a change of a "
     "moment by 0.001 of its value would be rounded away; try 0.95, or optimizer.moments_dtype=fp32"),
    (["optimizer.moments_dtype=fp8", "optimizer.beta1=0.995"], 1,
     "optimizer.beta1 = 0.995: optimizer.moments_dtype is fp8, which uses stochastic rounding, and its noise adds "
     "up if a moment changes by 0.005 of its value per step; try 0.95, or optimizer.moments_dtype=fp32"),
    (["optimizer.store_param_remainders=true", "training.precision=fp32"], 1,
     "optimizer.store_param_remainders = True: it is for bf16 weights, and training.precision is fp32; try "
     "training.precision=bf16, or optimizer.store_param_remainders=false"),
    (["optimizer.store_param_remainders=true", "parallel.fsdp=true"], 2,
     "parallel.fsdp stores fp32 masters only, without bf16 weights that would hold their upper half; try "
     "parallel.zero=1 instead of parallel.fsdp"),
    (["optimizer.store_param_remainders=true", "parallel.zero=1", "fp8.param_gather=true", "fp8.recipe=delayed"], 2,
     "fp8.param_gather stores FP8 data and fp32 masters, without bf16 weights that would hold their upper half; try "
     "fp8.param_gather=false"),
    (["fp8.keep_weight_transposes=false"], 1,
     "fp8.keep_weight_transposes = False: fp8.recipe is none, so there are no FP8 copies of weights; leave it out"),
    (["fp8.keep_weight_transposes=false", "fp8.recipe=delayed", "parallel.fsdp=true"], 2,
     "fp8.keep_weight_transposes = False: parallel.fsdp keeps no copies of weights in any case; leave it out"),
    (["fp8.paired_wgrad=true", "fp8.recipe=delayed"], 1,
     "fp8.paired_wgrad = True: it is for weight gradients of experts, and the model has none; try "
     "fp8.paired_wgrad=false"),
    (["optimizer.muon.momentum=0.9"], 1,
     "optimizer.muon = {'momentum': 0.9}: optimizer.name is adamw; leave it out, or try name: muon"),
    (["optimizer.name=muon", "optimizer.moments_dtype=fp8"], 1,
     "optimizer.moments_dtype = 'fp8': optimizer.name is muon, which stores its momentum in fp32 or bf16"),
    (["optimizer.name=muon", "optimizer.store_param_remainders=true"], 1,
     "optimizer.store_param_remainders = True: optimizer.name is muon, which stores fp32 masters"),
    (["optimizer.name=muon", "optimizer.offload=0.5", "optimizer.average_decay=0.9"], 1,
     "optimizer.offload = 0.5: optimizer.name is muon, which updates whole matrices; try 0\n  optimizer.offload = 0.5: "
     "optimizer.average_decay averages masters on the GPU; try 0"),
    (["optimizer.name=muon", "optimizer.moments_dtype=bf16", "optimizer.muon.momentum=0.999"], 1,
     "optimizer.muon.momentum = 0.999: optimizer.moments_dtype is bf16, which has 8 bits of precision"),
    (["model.output_gate_function=softplus"], 1,
     "model.output_gate_function = 'softplus': model.output_gate is false, so there is no gate; try sigmoid"),
    (["model.activation=xielu", "model.moe={num_experts: 4}"], 1,
     "model.activation = 'xielu': experts have no learned activation; try swiglu"),
    (["model.mup.base_hidden_size=16", "model.mtp_num_layers=1"], 1,
     "model.mup = {'base_hidden_size': 16}: the model has multi-token prediction (model.mtp_num_layers), for which"),
    (["model.mup.base_hidden_size=16", "model.moe={num_experts: 4, shared_ffn_hidden_size: 8, separate_norms: yes}"], 1,
     "routers have their own norms (model.moe.separate_norms), for which"),
    (["model.mup.base_hidden_size=16", "model.architecture=t5"], 1, "model.architecture is t5, for which muP is not"),
    (["model.mup={base_hidden_size: 16, base_head_dim: 8}", "model.latent_attention={q_rank: null, kv_rank: 8}"], 1,
     "model.mup.base_head_dim = 8: the heads of latent attention have several widths"),
    (["model.mup.base_hidden_size=16", "model.mup.base_head_dim=8", "model.attention_scale=0.5"], 1,
     "model.mup.base_head_dim = 8: model.attention_scale is given"),
    (["parallel.recompute_blocks=2"], 1,
     "parallel.recompute_blocks = 2: parallel.recompute is none, so no block is recomputed; try"),
    (["parallel.recompute=full", "parallel.recompute_ops=[norms]"], 1,
     "parallel.recompute_ops = ['norms']: parallel.recompute is full, and only selective uses it; try"),
    (["parallel.recompute=selective", "parallel.recompute_ops=[]"], 1, "and nothing is selected; try [norms,"),
    (["parallel.recompute=full", "parallel.recompute_blocks=3", "parallel.pipeline=2"], 2,
     "parallel.recompute_blocks = 3: no stage has more than 2 blocks; try 2 or less"),
    (["parallel.offload=5"], 1, "parallel.offload = 5: no stage has more than 4 blocks; try 4 or less"),
    *(([f"data.packing={packing}", *more], 1,
       f"data.packing = '{packing}': each document attends only to itself and padding has no loss, so it needs two "
       "more keys; try data.reset_at_documents=true data.mask_eod_loss=true, or data.packing=concatenate")
      for packing, *more in (["balanced"], ["best_fit", "data.mask_eod_loss=true"],
                             ["best_fit", "data.reset_at_documents=true"])),
    (["parallel.offload=true", "training.cuda_graphs=true"], 1,
     "training.cuda_graphs = True: parallel.offload copies activations to host memory, which a graph cannot"),
]  # fmt: skip


@pytest.mark.parametrize(("overrides", "world_size", "expected"), CASES)
def test_rules_between_keys(tmp_path: Path, overrides: list[str], world_size: int, expected: str) -> None:
    assert expected in messages(write(tmp_path), *overrides, world_size=world_size)


@pytest.mark.parametrize(
    ("config", "overrides", "world_size"),
    [
        *((None, ["training.cuda_graphs=true", "fp8.recipe=delayed", more], n)
          for n, more in ((1, "parallel.zero=0"), (2, "parallel.tensor=2"), (8, "parallel.fsdp=true"))),
        (None, ["parallel.recompute=selective"], 1),
        (None, [LATENT, "model.hidden_size=66"], 1),  # no multiple of the heads
        *((None, [f"data.packing={packing}", "data.reset_at_documents=true", "data.mask_eod_loss=true",
                  "data.tokenizer.kind=bytes"], 1) for packing in ("best_fit", "balanced")),
        (None, ["parallel.recompute=full", "parallel.recompute_blocks=4", "parallel.offload=1"], 1),
        *((None, ["parallel.recompute=full", "parallel.pipeline=2", f"parallel.layers_per_stage={layers}",
                  "parallel.recompute_blocks=3"], 2) for layers in ("[1, 3]", "balanced")),
        ("quickstart", [], 4), ("gpt2-125m", [], 1), ("gpt2-125m", [], 8), ("llama3-8b", [], 8),
        ("llama3-70b", [], 64), ("llama3-405b", [], 1024), ("mixtral-8x7b", [], 64), ("qwen3-30b-a3b", [], 64),
        ("deepseek-v3", [], 1024), ("deepseek-v3.2", [], 1024), ("deepseek-v4-flash", [], 256), ("olmo2-7b", [], 8),
        ("gemma2-9b", [], 8),
        ("gpt-oss-20b", [], 16), ("llama3-8b-stages", [], 64), ("nemotron-3-nano-30b", [], 64),
        ("kimi-linear-48b-a3b", [], 64),
    ],
)  # fmt: skip
def test_configs_that_can_run(tmp_path: Path, config: str | None, overrides: list[str], world_size: int) -> None:
    path = write(tmp_path) if config is None else ROOT / "configs" / f"{config}.yaml"
    check_layout(load_config(path, overrides), world_size)


def test_every_field_is_documented_in_the_schema() -> None:
    schema = Config.model_json_schema()
    sections = {"Config": schema} | schema["$defs"]
    undocumented = [
        f"{section}.{field}"
        for section, body in sections.items()
        for field, description in body["properties"].items()
        if "description" not in description and "$ref" not in description
    ]
    assert undocumented == []


@pytest.mark.parametrize(
    ("keys", "pattern"),
    [
        ({"sliding_window": 8, "full_attention_layers": [1, 3]},
         {"layer_kinds": {"local": {"mixer": {"sliding_window": 8}}, "full": {}}, "pattern": ["local", "full"]}),
        ({"sliding_window": 8, "full_attention_layers": [3], "rope_local_theta": 100.0, "rope_interpolation_factor": 8},
         {"layer_kinds": {"local": {"mixer": {"sliding_window": 8, "rope_theta": 100, "rope_interpolation_factor": 1}},
                          "full": {"mixer": {"sliding_window": None}}},
          "rope_interpolation_factor": 8, "pattern": ["local * 3", "full"]}),
        ({"moe": {"num_experts": 4, "first_dense_layers": 1}},
         {"layer_kinds": {"dense": {"ffn": {"kind": "mlp"}}, "sparse": {"ffn": {"kind": "moe"}}},
          "moe": {"num_experts": 4}, "pattern": ["dense", "sparse * 3"]}),
    ],
)  # fmt: skip
def test_patterns_that_other_keys_can_say(keys: dict[str, Any], pattern: dict[str, Any]) -> None:
    """The layers are the same, and conversion sees the same model."""
    size = {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 4}
    model, alike = model_spec(size | keys), model_spec(size | pattern)
    assert alike == model
    assert differences(alike, model) == []
    assert model_spec(alike.keys).keys == alike.keys
