"""Names of the Hugging Face Hub, with a local HTTP server in its place."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import huggingface_hub.constants
import pytest

from megafp8.conversion.formats import fetched
from megafp8.data import hub as hub_module
from megafp8.data.chats import read_chat_template
from megafp8.data.hub import NotOnThisMachine, cached_folder, is_hub_name, local_folder, missing_folder
from megafp8.data.tokenizers import MissingTokenizer, build_tokenizer
from tests.data.test_chats import CHATML, write_tokenizer
from tests.hub_server import COMMIT, HubServer, hub_server
from tools import evaluate, generate


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubServer]:
    with hub_server(monkeypatch, tmp_path / "cache") as server:
        monkeypatch.chdir(tmp_path)
        yield server


def add(hub: HubServer, name: str, folder: Path, **files: str) -> None:
    """A repository with files, whose names have _ for dots."""
    folder.mkdir(exist_ok=True)
    for file, content in files.items():
        (folder / file.replace("_", ".")).write_text(content)
    hub.repositories[name] = folder


def test_what_is_a_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    (tmp_path / "org" / "model").mkdir(parents=True)
    assert is_hub_name("meta-llama/Llama-3.1-8B")
    assert is_hub_name("a/b@refs/pr/1")
    no_names = ["runs/frist", "org/model", "a", "a/b/c", "/a/b", "./a", "../a", "s3://a/b", "tokenizers/tokenizer.json"]
    assert [name for name in no_names if is_hub_name(name)] == []


def test_what_is_read_is_downloaded_once(hub: HubServer, tmp_path: Path) -> None:
    add(hub, "org/model", tmp_path / "repository", config_json="{}", model_safetensors="x", README_md="no", a_bin="no")
    (tmp_path / "repository" / "original").mkdir()
    (tmp_path / "repository" / "original" / "consolidated.safetensors").write_text("no")
    assert cached_folder("org/model") is None
    assert "no such folder; a start downloads it if the Hugging Face" in (missing_folder("org/model") or "")
    folder = local_folder("org/model")
    assert sorted(file.name for file in folder.iterdir()) == ["config.json", "model.safetensors"]
    assert (cached_folder("org/model"), missing_folder("org/model")) == (folder, None)
    assert local_folder(f"org/model@{COMMIT}") == folder
    files = [path for path in hub.requests if "resolve" in path]
    hub_module._downloaded.cache_clear()
    local_folder("org/model")
    assert [path for path in hub.requests if "resolve" in path] == files


def test_what_cannot_be_downloaded_is_one_line(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(name: str) -> str:
        with pytest.raises(NotOnThisMachine) as error:
            local_folder(name)
        assert "\n" not in str(error.value)
        return str(error.value)

    add(hub, "org/model", tmp_path / "repository", config_json="{}")
    add(hub, "org/gated", tmp_path / "repository")
    hub.gated.add("org/gated")
    assert "gated on the Hugging Face Hub: ask for access at" in refused("org/gated")
    assert "has no repository of that name: check the name; a private repository needs HF_TOKEN" in refused(
        "org/absent"
    )
    assert "no revision v2 of org/model" in refused("org/model@v2")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    offline = refused("org/model")
    assert "not in the Hub's cache, and HF_HUB_OFFLINE is set: run hf download" in offline
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    folder = local_folder("org/model")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    hub_module._downloaded.cache_clear()
    assert local_folder("org/model") == folder
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:1")
    assert "and the Hugging Face Hub cannot be reached" in refused("org/other")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    hub_module._downloaded.cache_clear()
    with pytest.raises(ValueError, match=r"needs the package huggingface_hub, .*pip install"):
        local_folder("org/model")


def test_one_of_several_downloads(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that waited for it ask the Hub for nothing. Threads have locks of their own, as processes have."""
    monkeypatch.setattr(hub_module, "_downloaded", hub_module._downloaded.__wrapped__)
    add(hub, "org/model", tmp_path / "repository", **{f"{i}_safetensors": str(i) for i in range(20)})
    together = threading.Barrier(4)

    def download(_: int) -> Path:
        together.wait()
        return local_folder("org/model")

    with ThreadPoolExecutor(4) as pool:
        (folder,) = set(pool.map(download, range(4)))
    assert len(list(folder.iterdir())) == 20
    assert len([path for path in hub.requests if "resolve" not in path]) == 2, "not one revision and one list of files"


def test_a_tokenizer_of_a_folder_or_of_the_hub(hub: HubServer, tmp_path: Path) -> None:
    path = write_tokenizer(tmp_path / "repository", CHATML)
    hub.repositories["org/model"] = path.parent
    (path.parent / "model.safetensors").write_text("not of the tokenizer")
    expected = build_tokenizer("huggingface", str(path)).fingerprint
    assert build_tokenizer("huggingface", str(path.parent)).fingerprint == expected
    assert build_tokenizer("huggingface", "org/model").fingerprint == expected
    assert read_chat_template("org/model").source == CHATML
    assert not any("model.safetensors" in path for path in hub.requests)
    with pytest.raises(
        MissingTokenizer, match="not a local path, and the Hugging Face Hub has no repository of that name"
    ):
        build_tokenizer("sentencepiece", "org/absent")


def test_a_model_of_the_hub(hub: HubServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """generate, serve, evaluate, convert and checkpoint.init_from open what is downloaded."""
    add(hub, "org/model", tmp_path / "repository", config_json='{"model_type": "none"}')
    assert fetched("org/model") == fetched(Path("org/model")) == local_folder("org/model")
    for tool in (generate.main, evaluate.main):
        assert tool(["org/model", *(["x"] if tool is generate.main else ["--input", __file__])]) == 2
        assert "config.json: model_type = 'none'" in capsys.readouterr().err
        assert tool(["org/absent", *(["x"] if tool is generate.main else ["--input", __file__])]) == 2
        assert (
            "error: org/absent is not a local path, and the Hugging Face Hub has no repository"
            in capsys.readouterr().err
        )
