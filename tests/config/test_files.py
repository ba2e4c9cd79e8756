"""Configs that begin with the keys of another file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from megafp8.config import Config, ConfigError, load_config
from tests.config.test_config import MINIMAL

ROOT = Path(__file__).resolve().parents[2]


def write(folder: Path, name: str, text: str) -> str:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return str(path)


@pytest.fixture
def base(tmp_path: Path) -> str:
    sections: dict[str, Any] = {
        **MINIMAL,
        "fp8": {"recipe": "delayed", "margin": 2, "exclude": ["layers.0.*", "layers.1.*"]},
        "data": {"train": {"web": 0.5, "code": 0.5}},
    }
    return write(tmp_path, "base.yaml", yaml.safe_dump(sections, sort_keys=False))


def error_of(path: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as error:
        load_config(path, overrides)
    return str(error.value)


def test_a_chain_merges_sections_and_replaces_other_values(base: str, tmp_path: Path) -> None:
    write(tmp_path, "middle.yaml", "name: middle\nbase: base.yaml\ntraining: {steps: 20}\ndata: {train: {books: 1}}\n")
    text = "name: last\nbase: ../middle.yaml\ntraining: {seq_length: 64}\nfp8: {exclude: [layers.2.*], margin: 3}\n"
    config = load_config(write(tmp_path, "sub/last.yaml", text), ["training.global_batch_size=16"])
    training, fp8 = config.training, config.fp8
    assert (config.name, training.steps, training.seq_length, training.global_batch_size) == ("last", 20, 64, 16)
    assert config.data.train == {"books": 1.0}  # not mixed with the base's blend
    assert (fp8.recipe, fp8.margin, fp8.exclude) == ("delayed", 3, ["layers.2.*"])
    assert config.model == load_config(base).model
    dumped = config.model_dump(mode="json")  # a run's config.yaml stands alone
    assert "base" not in dumped
    assert Config.model_validate(dumped) == config


def test_a_shipped_config_as_a_base(tmp_path: Path) -> None:
    path = write(tmp_path, "mine.yaml", "name: mine\nbase: llama3-8b\n")
    shipped = load_config(ROOT / "configs" / "llama3-8b.yaml", ["name=mine"])
    assert load_config(path) == shipped
    write(tmp_path, "llama3-8b", "name: own\nbase: mine.yaml\n")  # a file comes first
    assert "a file cannot be its own base" in error_of(path)


def test_a_kind_leaves_out_options_of_the_base(base: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write(tmp_path, "other.yaml", "name: other\nbase: base.yaml\nfp8: {recipe: current, amax_epsilon: 0.5}\n")
    fp8 = load_config(path).fp8
    assert (fp8.recipe, fp8.margin, fp8.amax_epsilon, len(fp8.exclude)) == ("current", 0, 0.5, 2)
    assert caplog.messages == [f"{base}: left out, because fp8.recipe current has no fp8.margin = 2"]
    assert load_config(path, ["fp8.recipe=delayed"]).fp8.amax_epsilon == 0.0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("base: absent.yaml\nname: a\n", "line 1: base = '{folder}/absent.yaml': No such file or directory; "),
        ("base: base.yaml\n", "name = None: not inherited from base, because each run has its own folder; add it"),
        ("name: a\nbase: 3\n", "line 2: base = 3: this is the path of another config; for example base: "),
        ("name: a\nbase: s3://bucket/a.yaml\n", "line 2: base = 's3://bucket/a.yaml': configs are read from local"),
        ("name: a\nbase: last.yaml\n", "line 2: base = 'last.yaml': a file cannot be its own base: {path} -> {path};"),
        ("name: a\nbase: ring.yaml\n",
         "ring.yaml: 1 problem\n  line 2: base = 'last.yaml': a file cannot be its own base: {path} -> "
         "{folder}/ring.yaml -> {folder}/last.yaml; name another file"),
        ("name: a\nbase: wrong.yaml\n", "{path}: 1 problem\n  {folder}/wrong.yaml, line 4: fp8.marge = 1: there is"),
        ("name: a\nbase: base.yaml\nfp8:\n  marge: 1\n", "{path}: 1 problem\n  line 4: fp8.marge = 1: there is no"),
        ("name: a\nbase: base.yaml\nfp8:\n  exclude:\n  - 1\n", "line 5: fp8.exclude.0 = 1: this key is text"),
    ],
)  # fmt: skip
def test_mistakes_name_file_and_line(base: str, tmp_path: Path, text: str, said: str) -> None:
    write(tmp_path, "ring.yaml", "name: ring\nbase: last.yaml\n")
    write(tmp_path, "wrong.yaml", "name: wrong\nbase: base.yaml\nfp8:\n  marge: 1\n")
    path = write(tmp_path, "last.yaml", text)
    assert said.format(path=path, folder=tmp_path) in error_of(path)


@pytest.mark.parametrize(
    ("named", "said"),
    [
        ("/dev/zero", "line 2: base = '/dev/zero': /dev/zero is not a regular file; name the YAML file of a config"),
        ("pipe", "pipe is not a regular file"),
        (".", " is not a regular file"),
        ('"a\\0b"', r"base = 'a\x00b': no file has a name with a NUL character"),
        ("x" * 5000, "no file has a path of 5,0"),
        ("y" * 300, "a name of 300: a name has at most 255 bytes"),
        ("large", "large: 1 problem\n  (file) = '…': it is larger than 1,048,576 bytes, the limit for a config"),
        ("secret.txt", "secret.txt: 1 problem\n  (file) = '…': the file must hold a mapping of sections"),
        (
            "secret.yaml",
            "secret.yaml: 1 problem\n  (file) = '…': not valid YAML at line 2, column 1; correct that line",
        ),
        ("0.yaml", "base = '20.yaml': this is base number 21 of {path}, and a config has at most 20; merge some"),
    ],
)
def test_a_base_may_name_any_file(tmp_path: Path, named: str, said: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    with (tmp_path / "large").open("wb") as large:
        large.truncate(1 << 40)
    write(tmp_path, "secret.txt", "root:$6$hunter2")
    write(tmp_path, "secret.yaml", 'hunter2: [hunter2, {a: "hunter2\n')
    for i in range(30):
        write(tmp_path, f"{i}.yaml", f"name: a\nbase: {i + 1}.yaml\n")
    path = write(tmp_path, "last.yaml", f"name: a\nbase: {named}\n")
    error = error_of(path)
    assert said.format(path=path) in error
    assert "hunter2" not in error


def test_a_path_of_a_config_that_no_file_can_have(tmp_path: Path) -> None:
    assert "no file has a path of 300 bytes with a name of 300" in error_of("x" * 300)
    assert "larger than 1,048,576 bytes" in error_of("/dev/zero")


def test_a_base_is_named_in_a_file_only(base: str) -> None:
    assert "base = 'x.yaml': only a file can name its base; give that file" in error_of(base, "base=x.yaml")
    assert f"{base}: 1 problem\n  fp8.marge = 1" in error_of(base, "fp8.marge=1")  # no line: it is an override
    with pytest.raises(ValueError, match="Only load_config reads a base"):
        Config.model_validate({**MINIMAL, "base": "x.yaml"})
