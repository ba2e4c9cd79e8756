"""Verification cards: what counts as evidence, what is outdated, and the evidence of shipped configs in docs/cards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from docs.site import cards as pages
from megafp8.host.shipped import shipped_configs
from megafp8.prove.card import markdown, read_card
from megafp8.prove.certificate import FILES, Certificate, CheckResult, hash_of
from tests.quickstart_data import CONFIG
from tools.card import main

COMMIT = "0123456789abcdef" + "0" * 24
ROWS = [
    CheckResult("loss and gradients", "to 1e-10", "equal", 3e-15),
    CheckResult("conversion", "bit for bit", "equal", 0.0),
    CheckResult("export", "to 0.0001", "skipped", None, "transformers has no MineForCausalLM", details="long"),
]
ROW = {
    "config": "configs/mine.yaml", "date": "2026-11-30", "commit": COMMIT, "gpu": "NVIDIA H200", "gpus": 2,
    "recipe": "delayed", "layout": "expert=2", "sequence_length": 4096, "sequences_per_gpu": 32, "step_ms": 2000.0,
    "tokens_per_second_per_gpu": 15432.1, "spread": 0.004, "model_tflops": 512.3, "mfu": 0.26, "gib": 120.25,
    "predicted_ms": 1900.0, "predicted_gib": 118.0, "first_loss": 9.8, "last_loss": 7.1, "versions": {"torch": "2.11"},
}  # fmt: skip


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "mine.yaml"
    path.write_text(f"# My model. It is small.\nname: mine\nbase: {CONFIG}\n")
    return path


def certify(config: Path, device: str = "cpu", rows: list[CheckResult] = ROWS, **changes: Any) -> None:
    """Write a certificate of the config, as `megafp8 prove` does."""
    values = {"commit": COMMIT, "command": "megafp8 prove mine.yaml", "config_hash": hash_of(config), **changes}
    certificate = Certificate("mine", (8, 4), {"seed": 1}, [], rows, date="2026-11-29", **values)
    (config.parent / f"mine.{FILES[device]}").write_text(certificate.as_json())


def statuses(config: Path) -> dict[str, str]:
    return {claim.topic: claim.status for claim in read_card(str(config), config.parent).claims}


def test_a_card_without_evidence_claims_nothing(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(config)]) == 0
    text = capsys.readouterr().out
    assert text.startswith("# mine\n\nMy model. It is small.\n\n## Not verified\n\n- ")
    assert text.count("\n- ") == len(statuses(config)) == list(statuses(config).values()).count("not verified")


def test_evidence_of_all_kinds(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    certify(config)
    certify(config, "cuda", [CheckResult("cuda", "", "equal"), CheckResult("loss", "", "DIFFERENT", 0.5, "step 2")])
    row = ROW | {"config_hash": hash_of(config)}
    (config.parent / "mine-fp8-2.json").write_text(json.dumps(row))
    for name, content in (("mine-fp8-4", row | {"date": "2026-12-01", "last_loss": 9.9}), ("mine-x", [1]),
                          ("mine-fp8-8", row | {"date": "2026-12-02", "commit": f"{COMMIT}-dirty"}),
                          ("mine-y", {"config": "configs/mine.yaml"}),
                          ("mine-2-fp8-2", ROW | {"config": "configs/mine-2.yaml"})):  # fmt: skip
        (config.parent / f"{name}.json").write_text(json.dumps(content))
    out = config.parent / "card.md"
    assert main([str(config), "--out", str(out)]) == 0
    verified, failed, measured, missing = out.read_text().split("\n## ")[1:]
    source = f"| 2026-11-29 | `{COMMIT[:10]}` |"
    assert f"in float64 | 1 check of 8 ranks on 4, largest difference 3.0e-15 {source}" in verified
    assert f"bit for bit | 1 check, largest difference 0.0e+00 {source}" in verified
    assert "| loss 9.80 → 7.10 on 2 H200, delayed | 2026-11-30 |" in verified, (
        "a row is of changed source, and the loss of another rose"
    )
    assert "| loss: step 2 | 2026-11-29 |" in failed
    table = [line for line in measured.splitlines() if line.startswith("| 2")]
    assert [line[:12] for line in table] == ["| 2026-12-02", "| 2026-12-01", "| 2026-11-30"]
    assert (
        "| 2 H200 | expert=2 | delayed | 32 × 4,096 | 15,432 | 0.4% | 512 | 26.0% | 2,000 (1,900, -5.0%) |" in table[2]
    )
    assert "(transformers has no MineForCausalLM)" in missing
    assert statuses(config)["proven on GPUs"] == "failed"


@pytest.mark.parametrize(
    ("changes", "status"),
    [({}, "verified"), ({"commit": None}, "outdated"), ({"commit": f"{COMMIT}-dirty"}, "outdated"),
     ({"config_hash": None}, "outdated")],
)  # fmt: skip
def test_a_proof_needs_a_commit_and_a_config(config: Path, changes: dict[str, Any], status: str) -> None:
    certify(config, **changes)
    assert statuses(config)["proven"] == status


def test_a_changed_config_outdates_its_proof_and_its_rows(config: Path) -> None:
    certify(config)
    (config.parent / "mine-fp8-2.json").write_text(json.dumps(ROW | {"config_hash": hash_of(config)}))
    config.write_text(f"# Another comment.\nname: mine\nbase: {CONFIG}\n")
    assert statuses(config)["proven"] == statuses(config)["trained"] == "verified"
    config.write_text(f"name: mine\nbase: {CONFIG}\nseed: 2\n")
    assert statuses(config)["proven"] == statuses(config)["trained"] == "outdated"
    text = markdown(read_card(str(config), config.parent))
    assert "| the config had other values |" in text
    assert "## Verified" not in text
    certify(config, config_hash=hash_of(config, ["seed=3"]))
    assert statuses(config)["proven"] == "outdated", "it proves the config with an override"


def test_saved_evidence_makes_the_same_card(config: Path, tmp_path: Path) -> None:
    certify(config)
    (tmp_path / "saved").mkdir()
    assert main([str(config), "--save", str(tmp_path / "saved")]) == 0
    (saved,) = (tmp_path / "saved").iterdir()
    assert not {"config", "changes"} & json.loads(saved.read_text()).keys()
    assert "long" not in saved.read_text()
    assert markdown(read_card(str(config), tmp_path / "saved")) == markdown(read_card(str(config), tmp_path))


@pytest.mark.parametrize(
    ("arguments", "content", "message"),
    [
        (["none.yaml"], "{}", "none.yaml"),
        (["mine.yaml", "--evidence", "nowhere"], "{}", "there is no folder nowhere"),
        (["mine.yaml"], "{", "mine.certificate.json is damaged"),
        (["mine.yaml"], '{"passed": true, "rows": [{}]}', "mine.certificate.json is not a certificate"),
        (["mine.yaml", "--save", "."], None, "save into another folder"),
        (["mine.yaml", "--save", "nowhere"], None, "has no mine.certificate.json: write it with megafp8 prove"),
    ],
)
def test_errors_name_the_file(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str],
    content: str | None, message: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(config.parent)
    if content is not None:
        (config.parent / "mine.certificate.json").write_text(content)
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


def test_the_evidence_of_shipped_configs() -> None:
    """Each file belongs to a shipped config, and a proof of an edited config is outdated."""
    files = {path.name for path in pages.EVIDENCE.glob("*.json")}
    certificates = {f"{name}.{suffix}": name for name in shipped_configs() for suffix in FILES.values()}
    for file in files - certificates.keys():
        name = json.loads((pages.EVIDENCE / file).read_text())["config"].removeprefix("configs/").removesuffix(".yaml")
        assert name in shipped_configs(), file
        assert file.startswith(f"{name}-"), file
    for file in files & certificates.keys():
        proof = json.loads((pages.EVIDENCE / file).read_text())
        is_current = proof["config_hash"] == hash_of(certificates[file]) and not proof["commit"].endswith("-dirty")
        claims = read_card(certificates[file], pages.EVIDENCE).claims
        claim = next(x for x in claims if x.topic == ("proven on GPUs" if "cuda" in file else "proven"))
        assert (claim.status in ("verified", "failed")) == is_current, file
    overview = pages.overview()
    assert [name for name in shipped_configs() if f"| [{name}]({name}.md) |" not in overview] == []
