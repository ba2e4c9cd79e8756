"""The quickstart's data in small: some modules of the standard library, tokenized by the project's own tools."""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools import preprocess_data, train_tokenizer

ROOT = Path(__file__).resolve().parent.parent
CONFIG = ROOT / "configs" / "quickstart.yaml"
VOCABULARY = 512


@dataclass(frozen=True)
class QuickstartData:
    """Where vocabulary, token files and sample indices are."""

    folder: Path

    @property
    def sections(self) -> dict[str, dict[str, Any]]:
        """The keys of a config that point to this data."""
        return {
            "data": {
                "train": [str(self.folder / "stdlib")],
                "tokenizer": {"kind": "sentencepiece", "path": str(self.folder / "tokenizer.model")},
                "index_cache": str(self.folder / "cache"),
            },
            "model": {"vocab_size": VOCABULARY, "vocab_multiple": 128},
        }

    @property
    def overrides(self) -> list[str]:
        """What points the quickstart's config to this data."""
        return [
            f"data.train=[{self.folder / 'stdlib'}]",
            f"data.tokenizer.path={self.folder / 'tokenizer.model'}",
            f"data.index_cache={self.folder / 'cache'}",
            f"model.vocab_size={VOCABULARY}",
            "model.vocab_multiple=128",
            "logging.progress=false",
            "logging.tensorboard=false",
            "training.evaluate=null",
        ]


def make_quickstart_data(folder: Path) -> QuickstartData:
    """Build it with the command-line tools' own `main`."""
    modules = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("[a-d]*.py"))
    listing = folder / "files.txt"
    listing.write_text("\n".join(map(str, modules)))
    inputs = ["--text-files", "--input-list", str(listing)]
    model, prefix = str(folder / "tokenizer.model"), str(folder / "stdlib")
    assert train_tokenizer.main([*inputs, "--output", model, "--vocab-size", str(VOCABULARY)]) == 0
    tokenizer = ["--tokenizer", "sentencepiece", "--tokenizer-path", model]
    assert preprocess_data.main([*inputs, *tokenizer, "--output-prefix", prefix, "--workers", "1"]) == 0
    return QuickstartData(folder)
