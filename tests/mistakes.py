"""Mistakes of users, each as a command line, and what each ends with.

`python -m tests.mistakes [FOLDER]` prints a line for each, with its exit code. A mistake that a user must mend ends
with exit code 2 and one message, never with a traceback or in silence. `prepare` makes what the commands find: a
config, text, a data set, and a run of two steps with its checkpoint.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MEGAFP8 = (sys.executable, "-m", "megafp8")

CONFIG = """\
name: first
seed: 1
device: cpu
model: {num_layers: 2, hidden_size: 32, ffn_hidden_size: 64, num_attention_heads: 2, num_query_groups: 2,
  vocab_size: 257}
training: {seq_length: 32, micro_batch_size: 2, global_batch_size: 4, steps: 2, precision: fp32}
optimizer: {learning_rate: 1.0e-3, warmup_steps: 0}
fp8: {recipe: delayed}
data: {train: [data/text], split: "100,0,0", tokenizer: {kind: bytes}, index_cache: cache}
logging: {tensorboard: false}
"""


@dataclass(frozen=True)
class Mistake:
    """A command, what its message must have, and its exit code."""

    command: str
    says: str
    code: int = 2
    files: Mapping[str, str | bytes] | None = None
    """Files that it finds besides those of `prepare`, by path."""


def mine(changes: str, says: str, code: int = 2) -> Mistake:
    """The config with overrides that are wrong, in a run of its own."""
    return Mistake(f"pretrain --config first.yaml name={{name}} {changes}", says, code)


def edited(old: str, new: str, says: str) -> Mistake:
    """The config with a part of its text replaced."""
    assert CONFIG.count(old) == 1, old
    return Mistake("pretrain --config edited.yaml", says, files={"edited.yaml": CONFIG.replace(old, new)})


MISTAKES: Sequence[Mistake] = [
    # Commands and flags.
    Mistake("pretrian", "did you mean pretrain?"),
    Mistake("frobnicate", "no command 'frobnicate'"),
    Mistake("pretrain", "a config is needed"),
    Mistake("pretrain --confg first.yaml", "--confg"),
    Mistake("pretrain --config", "--config"),
    Mistake("pretrain --config first.yaml --world-size two --dry-run", "--world-size"),
    Mistake("pretrain --config first.yaml --world-size 0 --dry-run", "--world-size"),
    Mistake("pretrain --config first.yaml --dry-run --world-size 3 parallel.tensor=2", "3"),
    Mistake("pretrain --config frist.yaml", "did you mean first.yaml?"),
    Mistake("pretrain --config .", "."),
    Mistake("pretrain --config corpus/a.jsonl", "corpus/a.jsonl"),
    Mistake("init --from first.yaml", "no config that megafp8 init --from reads"),
    Mistake("launch", "launch"),
    Mistake("launch --nproc-per-node 2 pretrian --config first.yaml", "pretrian"),
    Mistake("launch --nproc-per-node none pretrain --config first.yaml", "none"),
    Mistake("launch --nproc-per-node 0 pretrain --config first.yaml", "0"),
    Mistake("launch --nproc-per-node 3 pretrain --config first.yaml parallel.tensor=2", "parallel.tensor"),
    Mistake("launch --nproc-per-node 2 pretrain --config frist.yaml", "frist.yaml"),
    # Overrides.
    mine("training.stepz=3", "training.steps"),
    mine("trainig.steps=3", "training"),
    mine("training.steps", "="),
    mine("steps=3", "steps"),
    mine("training=3", "training"),
    mine("training.steps=many", "training.steps"),
    mine("training.steps=-1", "training.steps"),
    mine("training.steps=1.5", "training.steps"),
    mine("training.steps=", "training.steps"),
    mine("=3", "=3"),
    mine("model.num_layers=0", "model.num_layers"),
    mine("model.num_attention_heads=3", "num_attention_heads"),
    mine("model.num_query_groups=3", "num_query_groups"),
    mine("model.hidden_size=33", "hidden_size"),
    mine("model.activation=swigloo", "swiglu"),
    mine("model.vocab_size=100", "vocab_size"),
    mine("model.rope_theta=no", "rope_theta"),
    mine("'model.moe={num_experts: 4, top_k: 5, ffn_hidden_size: 32}'", "top_k"),
    mine("'model.moe={num_experts: 4, topk: 2}'", "topk"),
    mine("'model.moe={num_experts: 4'", "model.moe"),
    mine("fp8.recipe=delaid", "delayed"),
    mine("fp8.recipe=current fp8.amax_history_len=16", "amax_history_len"),
    mine("fp8.report_interval=-1", "report_interval"),
    mine("fp8.exclude=layers.9.*", "fp8.exclude"),
    mine("'fp8.exclude=[layers.9.*]'", "layers.9"),
    mine("optimizer.name=adam", "adamw"),
    mine("optimizer.learning_rate=-1", "learning_rate"),
    mine("optimizer.learning_rate=fast", "learning_rate"),
    mine("optimizer.warmup_steps=5", "warmup_steps"),
    mine("optimizer.min_lr_ratio=2", "optimizer"),
    mine("training.precision=fp8", "precision"),
    mine("training.micro_batch_size=3", "micro_batch_size"),
    mine("training.global_batch_size=5", "global_batch_size"),
    mine("parallel.tensor=2", "1"),
    mine("parallel.pipeline=2", "1"),
    mine("parallel.tensor=0", "parallel.tensor"),
    mine("parallel.schedule=zb-q", "zb"),
    mine("parallel.virtual_pipeline=2", "virtual_pipeline"),
    mine("parallel.schedule=missing.csv", "missing.csv"),
    mine("parallel.schedule=os:nothing", "os"),
    mine("parallel.expert=2", "expert"),
    mine("parallel.context=2 data.reset_at_documents=maybe", "reset_at_documents"),
    mine("checkpoint.interval=-1", "checkpoint.interval"),
    mine("checkpoint.init_from=nowhere", "nowhere"),
    mine("checkpoint.init_from=corpus", "corpus"),
    mine("checkpoint.folder=s3:/bucket/x", "s3://"),
    mine("checkpoint.folder=s4://bucket/x", "s4"),
    mine("logging.metrics_port=99999", "metrics_port"),
    mine("device=gpu", "device"),
    mine("device=cuda", "cuda"),
    mine("seed=abc", "seed"),
    mine("name=a/b", "name"),
    mine("run_dir=first.yaml", "first.yaml"),
    mine("training.seq_length=0", "seq_length"),
    mine("'stages=[{name: a, begin: 5}]'", "begin"),
    mine("'stages=[{name: a, begin: 1, overrides: {model.num_layers: 4}}]'", "num_layers"),
    mine("lora={rank: 0}", "rank"),
    mine("'lora={targets: [nothing]}'", "nothing"),
    # Data.
    mine("data.train=[data/txet]", "data/txet"),
    mine("data.train=[]", "data.train"),
    mine("data.train=[first.yaml]", "first.yaml"),
    mine("'data.train={data/text: -1}'", "data.train"),
    mine("'data.train={data/text: x}'", "data.train"),
    mine("data.split=-1,101", "data.split"),
    mine("data.split=0,100,0", "data.split"),
    mine("data.split=abc", "data.split"),
    mine("data.tokenizer.kind=word", "data.tokenizer.kind"),
    mine("data.tokenizer.kind=sentencepiece", "data.tokenizer.path"),
    mine("data.tokenizer.kind=sentencepiece data.tokenizer.path=none.model", "none.model"),
    mine("data.tokenizer.kind=sentencepiece data.tokenizer.path=first.yaml", "first.yaml"),
    mine("data.packing=tight", "data.packing"),
    mine("data.loss_on=answers", "loss_on"),
    mine("data.fill_in_the_middle.rate=2", "fill_in_the_middle"),
    mine("data.train=[s3:/bucket/text]", "s3://"),
    mine("data.train=[gs://bucket/text]", "gcsfs"),
    Mistake("pretrain --config first.yaml name={name} data.train=[data/cut]", "data/cut",
            files={"data/cut.idx": b"MMIDIDX\x00\x00", "data/cut.bin": b""}),
    Mistake("pretrain --config first.yaml name={name} data.train=[data/other]", "data/other",
            files={"data/other.idx": b"not an index", "data/other.bin": b"12345678"}),
    Mistake("pretrain --config first.yaml name={name} data.train=[data/alone]", "data/alone",
            files={"data/alone.bin": b"12345678"}),
    # YAML.
    edited("seed: 1", "seed: 1\nseed: 2", "seed"),
    edited("seed: 1", "sed: 1", "did you mean seed"),
    edited("model: {", "model: [", ".yaml"),
    edited("name: first", "name: first\n\tx: 1", ".yaml"),
    edited("steps: 2", "steps: two", "training.steps"),
    edited("num_layers: 2, ", "", "num_layers"),
    edited("recipe: delayed", "recipe: {name: delayed}", "fp8.recipe"),
    edited(CONFIG, "", ".yaml"),
    edited(CONFIG, "- a\n- b\n", ".yaml"),
    edited(CONFIG, "a string", ".yaml"),
    edited("device: cpu", "device: &x cpu\nbase_: *y", ".yaml"),
    edited("device: cpu", "device: !!python/object/apply:os.system [id]", ".yaml"),
    Mistake("pretrain --config binary.yaml", "binary.yaml", files={"binary.yaml": b"\xff\xfe\x00\x01"}),
    # Runs and checkpoints.
    Mistake("pretrain --config first.yaml model.num_layers=4", "model.num_layers"),
    Mistake("pretrain --config first.yaml training.steps=1", "training.steps"),
    Mistake("inspect runs/frist", "did you mean runs/first?"),
    Mistake("inspect corpus", "corpus"),
    Mistake("inspect runs/first --tensors nothing.*", "nothing"),
    Mistake("inspect runs/first --diff nowhere", "nowhere"),
    Mistake("compare runs/first runs/secnd", "runs/second"),
    Mistake("compare corpus", "corpus"),
    Mistake("report runs/first", "fp8.report_interval"),
    Mistake("report runs/frist", "did you mean runs/first?"),
    Mistake("report runs/first --worst 0", "--worst"),
    Mistake("plot-run runs/frist", "did you mean runs/first?"),
    Mistake("plot-run corpus", "corpus"),
    Mistake("plot-run runs/first --html nowhere/x.html", "nowhere"),
    Mistake("plot-expert-load runs/first", "expert"),
    Mistake("plot-expert-load runs/frist", "did you mean runs/first?"),
    Mistake("average --load runs/first --last 5 --save averaged", "5"),
    Mistake("average --load runs/frist --save averaged", "did you mean runs/first?"),
    Mistake("average --load runs/first --last 1 --save runs", "--last 1"),
    Mistake("average --load runs/first --moving --save averaged", "average_decay"),
    Mistake("convert --load runs/first", "--save"),
    Mistake("convert --load runs/frist --save x --to hf", "did you mean runs/first?"),
    Mistake("convert --load runs/first --save x --to gguf", "gguf"),
    Mistake("convert --load runs/first --save corpus --to hf", "corpus"),
    Mistake("convert --load runs/first --save x --to megatron --tensor 3", "3"),
    Mistake("convert --load runs/first --save x --to hf --tensor 2", "no such option"),
    Mistake("convert --load runs/first --save x --to peft", "lora"),
    Mistake("convert --load corpus --save x --to native", "corpus"),
    Mistake("generate runs/frist text", "did you mean runs/first?"),
    Mistake("generate corpus text", "corpus"),
    Mistake("generate runs/first text --tensor 2", "2"),
    Mistake("generate runs/first text --temperature -1", "temperature"),
    Mistake("generate runs/first text --top-p 2", "top_p"),
    Mistake("generate runs/first text --max-tokens 0", "max_tokens"),
    Mistake("generate runs/first --file nowhere.txt", "nowhere.txt"),
    Mistake("generate runs/first text --device cuda", "cuda"),
    Mistake("generate runs/first text --weights int3", "int3"),
    Mistake("generate org/absent-model text", "org/absent-model"),
    Mistake("serve runs/frist", "did you mean runs/first?"),
    Mistake("serve runs/first --port 99999", "port"),
    Mistake("serve runs/first --port http", "--port"),
    Mistake("serve runs/first --api-key-env NOT_SET", "NOT_SET"),
    Mistake("evaluate runs/first", "--input"),
    Mistake("evaluate runs/first --input nowhere.jsonl", "nowhere.jsonl"),
    Mistake("evaluate runs/first --data data/txet", "data/txet"),
    Mistake("evaluate runs/first --input corpus/a.jsonl --json-key txt", "txt"),
    # Tools of data.
    Mistake("train-tokenizer --input corpus/a.jsonl", "--output"),
    Mistake("train-tokenizer --input nowhere/*.jsonl --output t.model", "nowhere"),
    Mistake("train-tokenizer --input corpus/a.jsonl --output t.model --vocab-size 0", "vocab-size"),
    Mistake("train-tokenizer --input corpus/a.jsonl --output t.model --vocab-size 90000", "90000"),
    Mistake("preprocess --input corpus/a.jsonl --tokenizer bytes", "--output-prefix"),
    Mistake("preprocess --input corpus/a.jsonl --tokenizer byte --output-prefix x", "byte"),
    Mistake("preprocess --input corpus/a.jsonl --tokenizer bytes --output-prefix data/text", "data/text"),
    Mistake("preprocess --input corpus/none.jsonl --tokenizer bytes --output-prefix x", "none.jsonl"),
    Mistake("preprocess --input corpus/bad.jsonl --tokenizer bytes --output-prefix x", "line 2"),
    Mistake("preprocess --input corpus/a.jsonl --json-key body --tokenizer bytes --output-prefix x", "body"),
    Mistake("preprocess --input corpus/a.jsonl --tokenizer sentencepiece --output-prefix x", "--tokenizer-path"),
    Mistake("preprocess --input corpus/a.jsonl --style chat --tokenizer bytes --output-prefix x", "chat"),
    Mistake("preprocess --input corpus/a.jsonl --workers -1 --tokenizer bytes --output-prefix x", "workers"),
    Mistake("inspect-data data/txet", "data/text"),
    Mistake("inspect-data data/text --documents -1", "documents"),
    # Planning and drawing.
    Mistake("plan --config first.yaml --goodput", "--gpus"),
    Mistake("plan --config first.yaml --gpus 0", "--gpus"),
    Mistake("plan --config first.yaml --gpus 8 --gpu v100", "v100"),
    Mistake("plan --config first.yaml --gpus 8 --gpus-per-node 3", "3"),
    Mistake("plan --config frist.yaml --gpus 8", "did you mean first.yaml?"),
    Mistake("plan --config first.yaml --gpus 1 --gpu h100 model.hidden_size=16384 model.ffn_hidden_size=65536 "
            "model.num_layers=96", "fits", code=1),
    Mistake("prove", "a config is needed"),
    Mistake("prove frist.yaml", "did you mean first.yaml?"),
    Mistake("prove first.yaml --ranks 3", "training.global_batch_size"),
    Mistake("prove first.yaml parallel.tensor=3", "parallel.tensor"),
    Mistake("prove first.yaml --stage later", "no stages"),
    Mistake("prove first.yaml --out data/text.idx", "not a certificate"),
    Mistake("prove first.yaml --out nowhere/x.json", "nowhere"),
    Mistake("card frist.yaml", "did you mean first.yaml?"),
    Mistake("card first.yaml --evidence nowhere", "nowhere"),
    Mistake("plot-schedule 1f2b", "1f1b"),
    Mistake("plot-schedule 1f1b --pipeline 0", "pipeline"),
    Mistake("plot-schedule zb-v --measured none.json", "none.json"),
    Mistake("coordinate-check first.yaml --widths 32,x", "--widths"),
    Mistake("coordinate-check first.yaml --widths 33,66", "33"),
    Mistake("check-cluster --folder nowhere --device cpu", "nowhere"),
    Mistake("check-cluster --warn-below 2", "warn-below"),
]  # fmt: skip


def prepare(folder: Path) -> None:
    """Text, a data set, a config, and a run of it."""
    (folder / "corpus").mkdir(parents=True)
    lines = [json.dumps({"text": f"the {i}th line of some text, " * 9}) for i in range(40)]
    (folder / "corpus" / "a.jsonl").write_text("\n".join(lines))
    (folder / "corpus" / "bad.jsonl").write_text(lines[0] + "\n{\n" + lines[1])
    (folder / "first.yaml").write_text(CONFIG)
    for command in (
        "preprocess --input corpus/a.jsonl --tokenizer bytes --output-prefix data/text --workers 1",
        "pretrain --config first.yaml",
    ):
        code, output = run(command, folder)
        assert code == 0, output
    shutil.copytree(folder / "runs" / "first", folder / "runs" / "second")


def run(command: str, folder: Path) -> tuple[int, str]:
    """Exit code and output of a subcommand."""
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [*MEGAFP8, *shlex.split(command)], cwd=folder, env=variables, stdin=subprocess.DEVNULL, text=True, timeout=300,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    return done.returncode, done.stdout


def problem(mistake: Mistake, code: int, output: str) -> str:
    """What is wrong with how it ended; empty if nothing is."""
    if "Traceback" in output:
        return "traceback"
    if code != mistake.code:
        return f"exit code {code}, wanted {mistake.code}"
    return "" if mistake.says in output else f"does not say {mistake.says!r}"


def attempt(mistake: Mistake, folder: Path, name: str) -> tuple[int, str, str]:
    """Exit code, message and problem of a mistake, made in `folder`; `name` is that of its run and its config."""
    for path, content in (mistake.files or {}).items():
        (folder / path.replace("edited", name)).write_bytes(content.encode() if isinstance(content, str) else content)
    code, output = run(mistake.command.replace("{name}", name).replace("edited", name), folder)
    lines = [line for line in output.strip().splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower()]
    return code, (errors or lines or [""])[0], problem(mistake, code, output)


def results(folder: Path, workers: int = 2) -> Iterator[tuple[Mistake, int, str, str]]:
    """All of them, in order, in a new `folder`."""
    prepare(folder)
    with ThreadPoolExecutor(workers) as pool:
        attempts = pool.map(lambda i: attempt(MISTAKES[i], folder, f"mistake{i}"), range(len(MISTAKES)))
        yield from ((mistake, *result) for mistake, result in zip(MISTAKES, attempts))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", nargs="?", help="a new folder (default: a temporary one)")
    arguments = parser.parse_args()
    folder = Path(arguments.folder or tempfile.mkdtemp(prefix="megafp8-mistakes-")) / "work"
    failed = 0
    for mistake, code, message, wrong in results(folder):
        failed += bool(wrong)
        print(f"{code} {'FAILED: ' + wrong if wrong else 'ok'} | {mistake.command[:90]} | {message[:160]}", flush=True)
    print(f"{len(MISTAKES)} mistakes, {failed} not as wanted")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
