"""Commands of README.md, AGENTS.md and docs/, run as they stand there, from an installed package in an empty folder.

`python -m tests.documented_commands FOLDER [PAGE ...]` prints a line for each. `inputs` makes what pages assume a user
has: runs, text, models (small ones under the names of large ones). Each page starts from a copy, and its commands run
in order. A job that needs GPUs is described by `--dry-run` instead; what runs elsewhere is listed in `ELSEWHERE`, with
where.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.request import Request, urlopen

ROOT = Path(__file__).resolve().parent.parent
PAGES = (
    "README.md",
    "AGENTS.md",
    *(str(path.relative_to(ROOT)) for path in sorted((ROOT / "docs").glob("*.md")) if path.stem != "tutorial"),
)
"""The tutorial's commands build on its other blocks: tests/test_tutorial.py runs all of them."""
PROGRAM = re.compile(r"(?:\$ )?((?:[A-Z_]+=\S+ )*(?:megafp8 |make |pip |launch/|sbatch |torchrun |kubectl ).*)")

ELSEWHERE = {
    r"make ": "a checkout's; .ci/run",
    r"pip install": "tests/test_commands.py installs a wheel",
    r".*sbatch ": "needs Slurm; tests/test_slurm.py",
    r"launch/": "needs GPUs; tests/test_launch.py",
    r"kubectl ": "needs Kubernetes; tests/test_kubernetes.py",
    r"megafp8 sweep ": "trains many models; tests/tools/test_sweep.py",
    r".*--tasks ": "needs the tasks' data sets; tests/inference/test_harness.py",
    r".*init_from=(adapter|models/)": "starts from weights of 8B; tests/training/test_lora.py, test_init_from.py",
    r".*init_optimizer=true": "continues a run of Megatron-LM; tests/training/test_init_from.py",
}
"""Commands that do not run here, and what runs them."""

CONFIG = """\
name: mine
seed: 1
device: cpu
model: {num_layers: 4, hidden_size: 64, ffn_hidden_size: 128, num_attention_heads: 8, num_query_groups: 4,
  vocab_size: 2048}
training: {seq_length: 64, micro_batch_size: 2, global_batch_size: 8, steps: 10, precision: fp32}
optimizer: {learning_rate: 1.0e-3, warmup_steps: 0, average_decay: 0.9}
fp8: {recipe: delayed}
data: {train: [data/quickstart/stdlib], tokenizer: {kind: sentencepiece, path: data/quickstart/tokenizer.model}}
checkpoint: {interval: 2}
logging: {tensorboard: false}
"""
LORA = """\
name: lora
seed: 1
device: cpu
training: {seq_length: 64, micro_batch_size: 2, global_batch_size: 4, steps: 2, precision: fp32, eval_interval: 0}
optimizer: {learning_rate: 1.0e-3, warmup_steps: 0}
lora: {}
data: {train: [wiki/a.jsonl], tokenizer: {kind: huggingface, path: Llama-3.1-8B/tokenizer.json}}
checkpoint: {init_from: Llama-3.1-8B}
logging: {tensorboard: false}
"""
TEMPLATE = "{% for m in messages %}{{ m.role }}: {% generation %}{{ m.content }}{% endgeneration %}\n{% endfor %}"


@dataclass(frozen=True)
class Command:
    """A command as a page has it, without prompt and comment."""

    page: str
    text: str

    @property
    def elsewhere(self) -> str | None:
        """Why it does not run here."""
        return next((why for pattern, why in ELSEWHERE.items() if re.match(pattern, self.text)), None)


def documented(page: str) -> list[Command]:
    """Of the fenced blocks of a page: lines that start a program, with the lines that continue them."""
    commands = []
    for block in re.findall(r"^```\w*\n(.*?)^```", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL):
        for line in re.sub(r"\\\n\s*", "", block).splitlines():
            if match := PROGRAM.fullmatch(line.strip()):
                text = re.sub(
                    r"\s+\[-.*?\]", "", re.split(r"\s+# ", match[1])[0]
                )  # comments, and options that may be left out
                commands.append(Command(page, text.strip()))
    return commands


def runnable(text: str) -> str:
    """The command that runs here: jobs on more than four processes, or on GPUs, are dry runs of their size."""
    launched = re.match(r"megafp8 launch --nproc-per-node (\d+) (pretrain .*)", text)
    if launched and int(launched[1]) > 4:
        return f"megafp8 {launched[2]} --dry-run --world-size {launched[1]}"
    return text


@dataclass
class Programs:
    """Runs commands with `programs` first on the path, in a folder."""

    programs: Path
    environment: dict[str, str]

    def run(self, text: str, folder: Path, seconds: float = 600) -> tuple[int, str]:
        """Exit code and output. A server is asked for its models and stopped."""
        serves = re.match(r"megafp8 (launch --nproc-per-node \d+ )?serve ", text)
        process = subprocess.Popen(
            ["bash", "-c", text], cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, start_new_session=True,
            env={**os.environ, **self.environment, "PATH": f"{self.programs}:{os.environ['PATH']}"},
        )  # fmt: skip
        try:
            asked = _ask(process, seconds) if serves else ""
            output, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return 124, f"still running after {seconds:.0f} s\n{process.communicate()[0]}"
        return process.returncode, asked + output


def _ask(process: subprocess.Popen[str], seconds: float) -> str:
    """Wait for a server on port 8000, ask it for its models, and end it as Ctrl-C does."""
    deadline, answer = time.monotonic() + seconds, ""
    while process.poll() is None and time.monotonic() < deadline and not answer:
        try:
            key = {"Authorization": f"Bearer {os.environ.get('SERVER_KEY', 'key')}"}
            with urlopen(Request("http://127.0.0.1:8000/v1/models", headers=key), timeout=5) as response:
                answer = response.read().decode()
        except OSError:
            time.sleep(0.5)
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGINT)
    return f"{answer}\n"


def inputs(folder: Path, programs: Programs) -> None:
    """What the pages assume: the quickstart's run, runs of a small model, text, and models of Hugging Face."""
    folder.mkdir(parents=True)

    def run(text: str) -> None:
        code, output = programs.run(text, folder)
        assert code == 0, f"{text}\n{output}"

    run("megafp8 quickstart")
    (folder / "mine.yaml").write_text(CONFIG)
    run("megafp8 launch --nproc-per-node 2 pretrain --config mine.yaml parallel.pipeline=2 parallel.virtual_pipeline=2 "
        "parallel.schedule=zb-v "
        "logging.pipeline_trace_step=3")  # fmt: skip
    experts = "'model.moe={num_experts: 8, ffn_hidden_size: 64, aux_loss: 0.01}' logging.expert_load_interval=1"
    run(f"megafp8 pretrain --config mine.yaml name=moe {experts} training.steps=2")
    run("megafp8 convert --load runs/mine --save runs/megatron --to torch_dist")
    for name in ("a", "b", "llama3-8b-sft"):
        shutil.copytree(folder / "runs" / "mine", folder / "runs" / name)
    shutil.copy(folder / "mine.yaml", folder / "my.yaml")
    (folder / "train_gpt.sh").write_text("torchrun pretrain_gpt.py --num-layers 2 --hidden-size 64 --seq-length 64\n")
    lines = [
        json.dumps({"text": f"Sentence {i} is short. Another one is about {i} things.\n\n" * 8}) for i in range(300)
    ]
    for name in ("corpus", "held-out", "wiki"):
        (folder / name).mkdir()
    (folder / "wiki" / "a.jsonl").write_text("\n".join(lines))
    (folder / "book.txt").write_text("Once upon a time there was a text. " * 50)
    (folder / "prompts.txt").write_text("Once upon a time\nIn the beginning\n")
    chat = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]
    (folder / "chats.jsonl").write_text(f"{json.dumps({'messages': chat})}\n" * 300)
    _compressed(folder)
    for name in ("code", "web"):
        run("megafp8 preprocess --input wiki/a.jsonl --tokenizer sentencepiece --tokenizer-path "
            f"data/quickstart/tokenizer.model --output-prefix data/{name} --workers 1")  # fmt: skip
    _models(folder)
    (folder / "lora.yaml").write_text(LORA)
    run("megafp8 pretrain --config lora.yaml")


def _compressed(folder: Path) -> None:
    """Python's standard library, of which a vocabulary of 32,000 tokens can be trained, and a part of it."""
    import zstandard

    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    texts = [json.dumps({"text": file.read_text(encoding="utf-8")}) for file in files]
    for name, part in (("corpus", texts), ("held-out", texts[:2])):
        (folder / name / "a.jsonl.zst").write_bytes(zstandard.compress("\n".join(part).encode()))


def _models(folder: Path) -> None:
    """A small Llama with a tokenizer and a chat template under names of large ones, and a tokenizer as BERT's."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    from tests.inference.small_model import save_small

    for name in (
        "Llama-3.1-8B",
        "meta-llama/Llama-3.1-8B",
        "meta-llama/Llama-3.1-8B-Instruct",
        "models/Llama-3.1-8B-Instruct",
    ):
        save_small(folder / name, bos=True)
        (folder / name / "chat_template.jinja").write_text(TEMPLATE)
    bert = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    bert.pre_tokenizer = pre_tokenizers.Whitespace()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    bert.train_from_iterator(["Sentence is short. Another one"], trainers.WordPieceTrainer(special_tokens=special))
    (folder / "data" / "bert").mkdir(parents=True)
    bert.save(str(folder / "data" / "bert" / "tokenizer.json"))


@dataclass(frozen=True)
class Result:
    """What ran for a command, its exit code, output and seconds; the reason as output where it runs elsewhere."""

    command: Command
    ran: str
    code: int
    output: str
    seconds: float = 0.0


def results(folder: Path, programs: Programs, pages: Sequence[str] = PAGES) -> Iterator[Result]:
    """Of all commands of the pages, in order."""
    template = folder / "inputs"
    inputs(template, programs)
    for page in pages:
        commands = documented(page)
        here = folder / Path(page).stem
        if any(command.elsewhere is None for command in commands):
            shutil.copytree(template, here, symlinks=True)
        for command in commands:
            if command.elsewhere is not None:
                yield Result(command, "", 0, command.elsewhere)
                continue
            for taken in ("averaged", "llama", "exported"):  # pages show one target in several ways
                shutil.rmtree(here / taken, ignore_errors=True)
            start, text = time.monotonic(), runnable(command.text)
            code, output = programs.run(text, here)
            yield Result(command, text, code, output, time.monotonic() - start)
        shutil.rmtree(here, ignore_errors=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="a new folder")
    parser.add_argument("pages", nargs="*", default=PAGES, help="default: README.md, AGENTS.md and all of docs/")
    parser.add_argument("--programs", type=Path, help="the folder of the command megafp8; default: this checkout's")
    arguments = parser.parse_args()
    environment = {"OMP_NUM_THREADS": "1", "SERVER_KEY": "key", "HF_HUB_OFFLINE": "1"}
    programs = arguments.programs
    if programs is None:
        programs = arguments.folder / "bin"
        programs.mkdir(parents=True)
        (programs / "megafp8").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m megafp8 "$@"\n')
        (programs / "megafp8").chmod(0o755)
        environment["PYTHONPATH"] = str(ROOT)
    failed = count = 0
    for result in results(arguments.folder, Programs(programs.absolute(), environment), arguments.pages):
        count, failed = count + 1, failed + (result.code != 0)
        changed = "" if result.ran == result.command.text else ", as a dry run"
        ended = (
            f"exit code {result.code}, {result.seconds:.0f} s{changed}" if result.ran else f"not here: {result.output}"
        )
        print(f"{result.command.page}: {result.command.text[:110]} | {ended}", flush=True)
        if result.code:
            print(f"    {result.ran}\n" + "\n".join(f"    {line}" for line in result.output.splitlines()[-15:]))
    print(f"{count} commands, {failed} failed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
