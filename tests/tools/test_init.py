"""`megafp8 init`: shipped configs and launch scripts in a folder of the user's."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest
import yaml

from megafp8.config import ConfigError, load_config
from megafp8.host.shipped import shipped_configs
from tools.init import SCHEMA, introduction, main

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_the_shipped_configs_are_listed_with_what_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    text = capsys.readouterr().out.split("\n\n")[0]
    names = {path.stem for path in (ROOT / "configs").glob("*.yaml")}
    assert {line.split()[0] for line in text.splitlines() if line[0] != " "} == {*names, "launch"}
    shown = " ".join(text.split())
    for name in names:
        assert introduction(ROOT / "configs" / f"{name}.yaml") in shown, "whole sentences"
    assert not [line for line in text.splitlines() if len(line) > 80]


def test_a_config_is_written_with_comments_and_a_schema_for_editors(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["llama3-8b"]) == 0
    first, *rest = Path("llama3-8b.yaml").read_text().splitlines()
    shipped = (ROOT / "configs" / "llama3-8b.yaml").read_text()
    assert first == f"# yaml-language-server: $schema={SCHEMA}"
    assert rest == shipped.replace("configs/llama3-8b.yaml", "llama3-8b.yaml").splitlines()
    assert load_config("llama3-8b.yaml") == load_config(ROOT / "configs" / "llama3-8b.yaml")


@pytest.mark.parametrize("name", shipped_configs())
def test_the_schema_knows_what_is_right_and_what_is_wrong(name: str) -> None:
    """By an independent validator, as an editor's."""
    assert main([name, "sub/mine.yaml"]) == 0
    tree = yaml.safe_load(Path("sub/mine.yaml").read_text())
    validator = jsonschema.Draft202012Validator(json.loads(Path("sub", SCHEMA).read_text()))
    validator.validate(tree)
    if "base" in tree and tree["base"] != "llama3-8b-sft.yaml":  # written beside it; that one's model is in a folder
        assert load_config("sub/mine.yaml") == load_config(name)
    tree.setdefault("training", {})["stepps"] = 1
    assert "stepps" in str(list(validator.iter_errors(tree)))
    del tree["name"]
    assert "'name' is a required property" in str(list(validator.iter_errors(tree)))


def test_nothing_is_overwritten(capsys: pytest.CaptureFixture[str]) -> None:
    Path("quickstart.yaml").write_text("mine")
    assert main(["quickstart"]) == 2
    assert Path("quickstart.yaml").read_text() == "mine"
    assert "quickstart.yaml exists and is not overwritten" in capsys.readouterr().err
    Path(SCHEMA).write_text("{}")
    assert main(["quickstart", "other.yaml"]) == 2
    assert f"{SCHEMA} exists and was not made by megafp8 init" in capsys.readouterr().err
    assert (Path(SCHEMA).read_text(), Path("other.yaml").exists()) == ("{}", False)


def test_a_schema_of_another_version_is_replaced(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["quickstart"]) == 0
    content = Path(SCHEMA).read_text()
    Path(SCHEMA).write_text(content[:150] + "\n}")
    assert main(["quickstart", "second.yaml"]) == 0
    assert Path(SCHEMA).read_text() == content
    assert main(["quickstart", "third.yaml"]) == 0
    assert f"{SCHEMA}: exists already" in capsys.readouterr().out


def test_launch_scripts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch"]) == 0
    for script in ("launch/multi_node.sh", "launch/single_node.sh", "launch/slurm.sbatch"):
        assert Path(script).read_text() == (ROOT / script).read_text()
        assert Path(script).stat().st_mode & 0o100
    assert Path("launch/kubernetes/jobset.yaml").exists()
    assert not list(Path("launch").glob("*.py"))
    assert main(["launch"]) == 2
    assert "launch exists" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "advice"),
    [
        ("configs/llama3-8b.yaml", "megafp8 init llama3-8b writes the shipped config"),
        ("lama3-8b", "did you mean llama3-8b?"),
        ("mime.yaml", "did you mean mine.yaml?"),
        ("zzz.yaml", "there is: mine.yaml"),
    ],
)
def test_a_config_that_does_not_exist(given: str, advice: str) -> None:
    Path("mine.yaml").write_text("name: mine")
    with pytest.raises(ConfigError, match="No such file") as raised:
        load_config(given)
    assert advice in str(raised.value)


def test_a_shipped_config_by_name_unless_a_file_has_it() -> None:
    assert load_config("gpt2-125m", ["seed=7"]).model.num_layers == 12
    Path("gpt2-125m").write_text("nam: mine")
    with pytest.raises(ConfigError, match="did you mean name"):
        load_config("gpt2-125m")
    assert main(["lama3-8b"]) == 2
