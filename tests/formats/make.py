"""Write the files of a release that later versions must read: `python -m tests.formats.make`, at the release, once.

They go to `tests/formats/<version>.tar.xz`, which never changes afterwards:

    run.yaml, tokenizer/, text.*, answers.*    what a user prepares; answers has a loss mask
    runs/exact/     checkpoint of step 2 of two ranks with ZeRO 1, FP8 with float64 sums, and the run's JSON lines
    runs/mixed/     checkpoint of step 2 in bf16, with master weights and FP8 moments
    consolidated/   weights of runs/mixed
    certificate.json, keys.txt    of `megafp8 prove`; every config key
    expected.json   hashes of the data sets and tensors; steps 3 and 4 of runs/exact on one rank
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import yaml

import megafp8
from megafp8.checkpoint import CheckpointReader
from megafp8.checkpoint.torch_file import as_bytes
from megafp8.config.key_names import key_paths
from megafp8.data.indexed_dataset import IndexedDataset
from megafp8.training.metrics import read_metrics

FOLDER = Path(__file__).resolve().parent
WORDS = [f"w{i}" for i in range(30)]
CONFIG: dict[str, Any] = {
    "name": "exact",
    "model": {
        "num_layers": 1, "hidden_size": 16, "num_attention_heads": 1, "ffn_hidden_size": 16, "vocab_size": 32,
        "vocab_multiple": 32, "tie_embeddings": True,
    },
    "parallel": {"zero": 1, "bucket_mib": 0.01},
    "fp8": {"recipe": "delayed", "amax_history_len": 4, "report_interval": 1},
    "training": {
        "steps": 4, "stop_after": 2, "seq_length": 16, "micro_batch_size": 2, "global_batch_size": 4,
        "precision": "fp64", "eval_interval": 0,
    },
    "optimizer": {"learning_rate": 0.01, "schedule": "cosine", "warmup_steps": 1},
    "data": {
        "train": ["text"], "split": "100,0,0", "index_cache": "cache",
        "tokenizer": {"kind": "huggingface", "path": "tokenizer"},
    },
    "logging": {"tensorboard": False, "progress": False},
}  # fmt: skip
MIXED = ["name=mixed", "fp8.recipe=current", "training.precision=bf16", "fp8.report_interval=0",
         "optimizer.moments_dtype=fp8"]  # fmt: skip
KEPT = ("metrics.jsonl", "launches.jsonl", "fp8_report.jsonl", "config.yaml", "checkpoints")
"""Files of a run folder that later versions read."""
CHECKPOINT = "checkpoints/step_00000002"
NUMBERS = ("step", "loss", "grad_norm", "learning_rate", "tokens", "consumed_samples")


def curve(run: Path, first: int) -> list[list[float]]:
    """Numbers of the steps from `first` on."""
    return [
        [record[key] for key in NUMBERS] for record in read_metrics(run / "metrics.jsonl") if record["step"] >= first
    ]


def digest(*arrays: Any) -> str:
    """Hash of the bytes of arrays."""
    return hashlib.sha256(b"".join(np.ascontiguousarray(x).tobytes() for x in arrays)).hexdigest()


def data_digest(prefix: Path) -> str:
    """Hash of all documents of a data set, each with its loss mask, if any."""
    dataset = IndexedDataset(prefix)
    mask = dataset.loss_mask() if dataset.has_loss_mask else None
    documents = range(dataset.num_documents)
    return digest(*(x.document(i).astype(np.int64) for x in (dataset, mask) if x is not None for i in documents))


def tensor_digests(path: Path) -> dict[str, str]:
    """Hash of dtype, shape and bytes of each tensor of a checkpoint."""
    reader = CheckpointReader(path)
    tensors = {name: reader.read(name, verify=True) for name in sorted(reader.tensors)}
    about = {name: f"{x.dtype} {tuple(x.shape)} " for name, x in tensors.items()}
    return {name: about[name] + hashlib.sha256(as_bytes(x)).hexdigest()[:16] for name, x in tensors.items()}


def _tokenizer(folder: Path) -> None:
    import tokenizers
    from tokenizers import models, pre_tokenizers

    vocabulary = {word: i for i, word in enumerate(["</s>", "<unk>", *WORDS])}
    library = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    library.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    library.add_special_tokens(["</s>", "<unk>"])
    folder.mkdir()
    library.save(str(folder / "tokenizer.json"), pretty=False)
    (folder / "tokenizer_config.json").write_text('{"eos_token": "</s>"}\n')


def _megafp8(*arguments: str) -> None:
    root = str(FOLDER.parent.parent)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": root}
    subprocess.run([sys.executable, "-m", "megafp8", *arguments], check=True, env=environment)


def main() -> None:
    """Write the archive of this version. It must not exist."""
    archive = FOLDER / f"{megafp8.__version__}.tar.xz"
    if archive.exists():
        sys.exit(f"{archive} exists, and a release's files never change")
    os.chdir(tempfile.mkdtemp())
    random.seed(1)
    _tokenizer(Path("tokenizer"))
    texts = [" ".join(random.choices(WORDS, k=random.randint(5, 40))) for _ in range(16)]
    Path("text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    pairs = [{"prompt": text[:8], "completion": text[8:]} for text in texts[:4]]
    Path("answers.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    tokenizer = ["--tokenizer", "huggingface", "--tokenizer-path", "tokenizer", "--workers", "0"]
    _megafp8("preprocess", "--input", "text.jsonl", "--output-prefix", "text", *tokenizer)
    _megafp8(
        "preprocess", "--input", "answers.jsonl", "--style", "completion", "--output-prefix", "answers", *tokenizer
    )
    Path("run.yaml").write_text(yaml.safe_dump(CONFIG, sort_keys=False))
    _megafp8("launch", "--nproc-per-node", "2", "pretrain", "--config", "run.yaml")
    _megafp8("pretrain", "--config", "run.yaml", *MIXED)
    _megafp8("convert", "--load", "runs/mixed", "--save", "consolidated", "--to", "consolidated")
    _megafp8("prove", "run.yaml", "--out", "certificate.json")
    shutil.copytree("runs", "files/runs")
    _megafp8("pretrain", "--config", "run.yaml", "training.stop_after=null")
    for run in Path("files/runs").iterdir():
        for path in run.iterdir():
            if path.name not in KEPT:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        lines = (run / "launches.jsonl").read_text()
        (run / "launches.jsonl").write_text(lines.replace(os.uname().nodename, "host").replace(os.getcwd(), "/run"))
    for name in ("run.yaml", "tokenizer", "consolidated", *map(str, [*Path().glob("*.bin"), *Path().glob("*.idx")]),
                 "text.json", "answers.json", "certificate.json"):  # fmt: skip
        (shutil.copytree if Path(name).is_dir() else shutil.copy)(name, f"files/{name}")
    Path("files/keys.txt").write_text("\n".join(key_paths()) + "\n")
    expected = {
        "data": {name: data_digest(Path(name)) for name in ("text", "answers")},
        "tensors": {run: tensor_digests(Path("files/runs", run, CHECKPOINT)) for run in ("exact", "mixed")},
        "steps": curve(Path("runs/exact"), 3),
    }
    Path("files/expected.json").write_text(json.dumps(expected, indent=1) + "\n")
    shutil.make_archive(str(archive).removesuffix(".tar.xz"), "xztar", "files")


if __name__ == "__main__":
    main()
