"""Verification cards: a page about a config that states only what commands have verified, and lists what they have not.

The evidence of a config NAME.yaml is JSON in one folder: certificates of `megafp8 prove` (NAME.certificate.json and
NAME.cuda.certificate.json) and rows of `python -m benchmarks.records` (NAME-*.json). Evidence counts only if it comes
from committed source, and a certificate only if the config file has the same values today.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from glob import escape
from pathlib import Path
from typing import Any, Literal, NamedTuple

from megafp8.config.files import file_of
from megafp8.host.shipped import PACKAGE, introduction, is_checkout, shipped_configs
from megafp8.host.suggestions import did_you_mean
from megafp8.prove.certificate import FILES, hash_of, read_certificate, read_evidence

Evidence = Mapping[str, Any]
Status = Literal["verified", "outdated", "failed", "not verified"]
_LEFT_OUT = {"config", "changes"}
_NO_RECORD = "no command records it for cards yet"


class Claim(NamedTuple):
    """Statement about a config.

    Attributes:
        topic: Heading of the claim in a table of all configs.
        text: The statement.
        command: Command that produces evidence.
        status: Whether there is evidence.
        evidence: Contents of the evidence, or the reason why there is none.
        source: Certificate or row that has the evidence, or None.
    """

    topic: str
    text: str
    command: str
    status: Status = "not verified"
    evidence: str = ""
    source: Evidence | None = None


class Card(NamedTuple):
    """Evidence about a config.

    Attributes:
        config: Config file.
        claims: All claims, with or without evidence.
        rows: Rows that were measured on GPUs, the newest first.
    """

    config: Path
    claims: Sequence[Claim]
    rows: Sequence[Evidence]

    @property
    def name(self) -> str:
        """Name of the config file without its suffix."""
        return _name(self.config)

    def with_status(self, *statuses: Status) -> list[Claim]:
        """Return the claims that have one of these statuses."""
        return [claim for claim in self.claims if claim.status in statuses]


def evidence_folder(config: str) -> Path:
    """Return the default folder of the evidence.

    For a shipped config, this is docs/cards in a checkout and the current folder without one. For any other config, it
    is the folder of the config.
    """
    file = file_of(config)
    if file.resolve() not in shipped_configs().values():
        return file.parent
    return PACKAGE.parent / "docs" / "cards" if is_checkout() else Path()


def read_card(config: str, folder: Path) -> Card:
    """Return the card of a config file or shipped config, with the evidence in `folder`.

    Raises ValueError if the config or the folder does not exist, or if a file of evidence is damaged.
    """
    file, config_hash = file_of(config), hash_of(config)
    if not folder.is_dir():
        raise ValueError(f"there is no folder {folder}; {did_you_mean(folder, 'give the folder of the certificates')}")
    name = _name(file)
    on_cpu, on_gpus = (read_certificate(folder / f"{name}.{suffix}") for suffix in FILES.values())
    prove = f"megafp8 prove {name if file in shipped_configs().values() else file}"
    measured = [x for x in map(read_evidence, sorted(folder.glob(f"{escape(name)}-*.json"))) if _is_row(x, name)]
    rows = sorted(measured, key=lambda row: str(row["date"]), reverse=True)
    proof = prove, on_cpu, config_hash
    claims = [
        _proof("proven", "In its layout, a small copy computes what one rank computes, in float64", *proof),
        _proof("converted", "The small copy, exported to Hugging Face, reads back bit for bit", *proof),
        _proof("logits", "transformers computes the logits of the small copy from its export", *proof),
        _proof("proven on GPUs", "On GPUs, a small copy computes what one CPU rank computes", f"{prove} --device cuda",
               on_gpus, config_hash),
        _training(rows, config_hash),
        Claim("trained whole", "A run reached its last step", "megafp8 pretrain", evidence=_NO_RECORD),
        Claim("generated", "Trained weights generated text", "megafp8 generate", evidence=_NO_RECORD),
        Claim("served", "Trained weights were served", "megafp8 serve", evidence=_NO_RECORD),
    ]  # fmt: skip
    return Card(file, claims, rows)


def save_evidence(config: str, source: Path, target: Path) -> list[Path]:
    """Copy the certificates of a config from one folder to another, without the small config, and return the files."""
    name, files = _name(file_of(config)), []
    if target.resolve() == source.resolve():
        raise ValueError(f"{target} has the whole certificates, which would be replaced; save into another folder")
    for suffix in FILES.values():
        certificate = read_certificate(source / f"{name}.{suffix}")
        if certificate is not None:
            rows = [{key: value for key, value in row.items() if key != "details"} for row in certificate["rows"]]
            content = {key: value for key, value in certificate.items() if key not in _LEFT_OUT} | {"rows": rows}
            files.append(target / f"{name}.{suffix}")
            files[-1].write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    if not files:
        raise ValueError(f"{source} has no {name}.{FILES['cpu']}: write it with megafp8 prove {config}")
    return files


def markdown(card: Card) -> str:
    """Return the page of a card."""
    verified, refuted = card.with_status("verified"), card.with_status("outdated", "failed")
    lines = [f"# {card.name}", "", introduction(card.config), ""]
    for heading, claims in (("Verified", verified), ("Failed or outdated", refuted)):
        if claims:
            lines += [
                f"## {heading}",
                "",
                "| claim | evidence | date | commit | versions | command |",
                "|---" * 6 + "|",
            ]
            lines += [*map(_claim_line, claims), ""]
    if card.rows:
        lines += ["## Measured on GPUs", "", "The numbers in parentheses are the planner's predictions.", ""]
        lines += [
            "| date | commit | GPUs | layout | recipe | sequences per GPU | tokens/s/GPU | spread | TFLOP/s | MFU "
            "| ms per step | GiB | loss |",
            "|---" * 13 + "|",
        ]
        lines += [*map(_row_line, card.rows), ""]
    lines += ["## Not verified", ""]
    for claim in card.with_status("not verified", "outdated", "failed"):
        reason = f" ({claim.evidence})" if claim.evidence and claim.status == "not verified" else ""
        lines.append(f"- {claim.text}: `{claim.command}`{reason}")
    return "\n".join(lines) + "\n"


def _name(file: Path) -> str:
    return file.name.removesuffix(".yaml").removesuffix(".yml")


def _is_row(content: Any, name: str) -> bool:
    """Return whether the content of a file is a measured row of the config called `name`."""
    is_row = isinstance(content, dict) and {"config", "tokens_per_second_per_gpu"} <= content.keys()
    return is_row and _name(Path(content["config"])) == name


def _why_outdated(evidence: Evidence, config_hash: str) -> str:
    """Return why a certificate or row is no evidence for the current config; empty if it is evidence."""
    if evidence.get("config_hash") != config_hash:
        return "the config had other values"
    return "" if _is_committed(evidence) else "the source was not committed"


def _is_committed(evidence: Evidence) -> bool:
    """Return whether the source that produced the evidence is a commit."""
    commit = str(evidence.get("commit") or "")
    return commit != "" and not commit.endswith("-dirty")


def _proof(topic: str, text: str, command: str, certificate: Evidence | None, config_hash: str) -> Claim:
    """Return a claim with the rows of a certificate that prove it: one row if it is about the export."""
    claim = Claim(topic, text, command)
    if certificate is None:
        return claim
    row_of_topic = {"converted": "conversion", "logits": "export"}
    rows = [
        row for row in certificate["rows"]
        if (row["check"] == row_of_topic[topic] if topic in row_of_topic else row["check"] not in row_of_topic.values())
    ]  # fmt: skip
    done = [row for row in rows if row["status"] != "skipped"]
    failed = [row for row in done if row["status"] not in ("equal", "within")]
    if not done:
        reason = rows[0]["where"] if rows else "the proof ended before this check"
        return claim._replace(evidence=reason)
    if reason := _why_outdated(certificate, config_hash):
        return claim._replace(status="outdated", evidence=reason, source=certificate)
    if failed:
        reason = "; ".join(f"{row['check']}: {row['where'] or row['status']}" for row in failed)
        return claim._replace(status="failed", evidence=reason, source=certificate)
    differences = [float(row["difference"]) for row in done if row["difference"] is not None]
    largest = f", largest difference {max(differences):.1e}" if differences else ""
    before, after = certificate["ranks"]
    checks = "1 check" if len(done) == 1 else f"{len(done)} checks"
    shrunk = "" if topic in row_of_topic else f" of {before} ranks on {after}"
    return claim._replace(status="verified", evidence=f"{checks}{shrunk}{largest}", source=certificate)


def _training(rows: Sequence[Evidence], config_hash: str) -> Claim:
    """Return the claim that the loss fell in a measured run."""
    text = "The whole model trains on GPUs, and its loss falls"
    claim = Claim("trained", text, "python -m benchmarks.records", evidence="for the models that it lists")
    row = next((row for row in rows if row["last_loss"] < row["first_loss"] and _is_committed(row)), None)
    if row is None:
        return claim
    if reason := _why_outdated(row, config_hash):
        return claim._replace(status="outdated", evidence=reason, source=row)
    evidence = f"loss {row['first_loss']:.2f} → {row['last_loss']:.2f} on {_gpus(row)}, {_recipe(row)}"
    return claim._replace(status="verified", evidence=evidence, source=row)


def _claim_line(claim: Claim) -> str:
    source = claim.source or {}
    versions = ", ".join(f"{name} {version}" for name, version in source.get("versions", {}).items())
    command = source.get("command") or claim.command
    cells = (claim.text, claim.evidence, source.get("date", "?"), _commit(source), versions, f"`{command}`")
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _row_line(row: Evidence) -> str:
    error = row["predicted_ms"] / row["step_ms"] - 1
    cells = (
        row["date"], _commit(row), _gpus(row), row["layout"], _recipe(row),
        f"{row['sequences_per_gpu']} × {row['sequence_length']:,}", f"{row['tokens_per_second_per_gpu']:,.0f}",
        f"{row['spread']:.1%}", f"{row['model_tflops']:.0f}", "" if row["mfu"] is None else f"{row['mfu']:.1%}",
        f"{row['step_ms']:,.0f} ({row['predicted_ms']:,.0f}, {error:+.1%})",
        f"{row['gib']:.1f} ({row['predicted_gib']:.1f})", f"{row['first_loss']:.2f} → {row['last_loss']:.2f}",
    )  # fmt: skip
    return f"| {' | '.join(cells)} |"


def _commit(source: Evidence) -> str:
    """Return a commit as text, shortened."""
    commit = source.get("commit") or "?"
    return f"`{commit[:10]}{'-dirty' if commit.endswith('-dirty') else ''}`"


def _gpus(row: Evidence) -> str:
    return f"{row['gpus']} {row['gpu'].removeprefix('NVIDIA ')}"


def _recipe(row: Evidence) -> str:
    return "bf16" if row["recipe"] == "none" else str(row["recipe"])
