"""Record the results of many small training runs to the last bit, and compare two recordings.

    python -m benchmarks.bitwise_gate record before.json            # on the commit before a refactoring
    python -m benchmarks.bitwise_gate record after.json             # on the commit after it
    python -m benchmarks.bitwise_gate compare before.json after.json

Each case runs `pretrain_gpt.py` with a tiny model on 1 to 4 CPU processes (gloo): six steps, the last three resumed
from the checkpoint of the first three. Recorded are losses, gradient norms and validation losses as in metrics.jsonl,
and a SHA-256 of all tensors of each checkpoint. Only public interfaces are used (the config, metrics.jsonl, the
checkpoint format), so recordings stay comparable when modules move. The cases cover every recipe in three layouts, and
every schedule, parallel axis, memory option, optimizer dtype and model option at least once.

A recording belongs to one machine and one torch version: another CPU may sum in another order.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
import multiprocessing
import os
import platform
import socket
import struct
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
VOCAB_SIZE, END_OF_DOCUMENT = 257, 256  # of the bytes tokenizer
STEPS = 6
CASE_SECONDS = 300

BASE: dict[str, Any] = {
    "device": "cpu", "seed": 7,
    "model": {
        "num_layers": 4, "hidden_size": 128, "num_attention_heads": 4, "num_query_groups": 2, "ffn_hidden_size": 256,
        "vocab_size": VOCAB_SIZE,
    },
    "parallel": {"bucket_mib": 0.25},
    "training": {
        "steps": STEPS, "seq_length": 128, "micro_batch_size": 1, "global_batch_size": 8, "precision": "bf16",
        "eval_interval": 3, "eval_steps": 1,
    },
    # Constant, so that the learning rate of a step does not depend on where the first part of a run ends.
    "optimizer": {"learning_rate": 3e-3, "warmup_steps": 2, "schedule": "constant"},
    "checkpoint": {"interval": 3, "async_save": False},
    "logging": {"progress": False, "tensorboard": False},
}  # fmt: skip

DELAYED = ["fp8.recipe=delayed", "fp8.amax_history_len=4"]
RECIPES: dict[str, list[str]] = {
    "bf16": [],
    "fp32": ["training.precision=fp32"],
    "delayed": DELAYED,
    "delayed-options": [
        *DELAYED, "fp8.margin=1", "fp8.interval=2", "fp8.amax_compute_algo=most_recent", "fp8.format=e4m3",
        "fp8.power_of_two_scale=true",
    ],
    "delayed-smooth": [*DELAYED, "fp8.smooth_swiglu=true"],
    "current": ["fp8.recipe=current"],
    "rowwise": ["fp8.recipe=rowwise"],
    "rowwise-wgrad-bf16": ["fp8.recipe=rowwise", "fp8.wgrad_in_bf16=true", "fp8.power_of_two_scale=true"],
    "blockwise": ["fp8.recipe=blockwise"],
    "static": ["fp8.recipe=static", "fp8.calibration_steps=2"],
    "mxfp8": ["fp8.recipe=mxfp8"],
    "nvfp4": ["fp8.recipe=nvfp4"],
    "custom": [
        "fp8.recipe=custom", "fp8.amax_history_len=4",
        'fp8.custom=[{layers: "*.mlp.down", input: rowwise, weight: rowwise, grad_output: rowwise}, '
        '{layers: "*", input: delayed, weight: current, grad_output: delayed}]',
    ],
}  # fmt: skip
LAYOUTS: dict[str, tuple[int, list[str]]] = {
    "single": (1, []),
    "tp2-pp2": (4, ["parallel.tensor=2", "parallel.pipeline=2"]),
    "dp2-zero": (2, ["parallel.zero=1"]),
}
CURRENT, PP2 = ["fp8.recipe=current"], ["parallel.pipeline=2"]
TWO_CHUNKS = [*PP2, "parallel.virtual_pipeline=2"]
SELECTIVE = ["parallel.recompute=selective", "parallel.recompute_ops=[norms,activation,attention]"]
DOCUMENTS = ["data.mask_eod_loss=true", "data.reset_at_documents=true"]
ROPE_SCALING = "model.rope_scaling={factor: 4.0, original_max_position_embeddings: 64}"
GPT2 = [
    "model.position_embedding=learned", "model.normalization=layernorm", "model.activation=gelu_tanh",
    "model.linear_bias=true",
]  # fmt: skip
MORE: dict[str, tuple[int, list[str]]] = {
    "tp2-whole-sequence": (2, [*DELAYED, "parallel.tensor=2", "parallel.sequence_parallel=false"]),
    "tp2-chunked": (2, [*DELAYED, "parallel.tensor=2", "parallel.overlap_tensor=chunked"]),
    "tp4-blockwise": (4, ["fp8.recipe=blockwise", "parallel.tensor=4", "model.num_query_groups=4"]),
    "tp2-rowwise-chunked": (2, ["fp8.recipe=rowwise", "parallel.tensor=2", "parallel.overlap_tensor=chunked"]),
    "cp2": (2, [*DELAYED, "parallel.context=2"]),
    "cp2-tp2": (4, [*CURRENT, "parallel.context=2", "parallel.tensor=2"]),
    "interleaved": (2, [*DELAYED, *TWO_CHUNKS, "parallel.schedule=interleaved"]),
    "zb-h1": (2, [*DELAYED, *PP2, "parallel.schedule=zb-h1"]),
    "zb-v": (2, [*DELAYED, *TWO_CHUNKS, "parallel.schedule=zb-v"]),
    "zb-v-tp2": (4, [*CURRENT, *TWO_CHUNKS, "parallel.schedule=zb-v", "parallel.tensor=2"]),
    "dualpipev": (2, ["fp8.recipe=blockwise", *TWO_CHUNKS, "parallel.schedule=dualpipev"]),
    "pp2-uneven": (2, [*DELAYED, *PP2, "parallel.layers_per_stage=[3,1]"]),
    "pp4": (4, ["parallel.pipeline=4"]),
    "pp2-dp2-zero": (4, [*DELAYED, *PP2, "parallel.zero=1"]),
    "dp2": (2, [*DELAYED, "parallel.overlap_grad_reduce=false"]),
    "dp4-zero-late": (4, [*DELAYED, "parallel.zero=1", "parallel.overlap_param_gather=false"]),
    "fsdp": (2, [*CURRENT, "parallel.fsdp=true"]),
    "fsdp-param-gather": (2, [*DELAYED, "parallel.fsdp=true", "fp8.param_gather=true"]),
    "fsdp-tp2": (4, ["parallel.fsdp=true", "parallel.tensor=2"]),
    "zero-param-gather": (2, [*DELAYED, "parallel.zero=1", "fp8.param_gather=true"]),
    "zero-param-gather-tp2": (4, [*CURRENT, "parallel.zero=1", "fp8.param_gather=true", "parallel.tensor=2"]),
    "recompute-full": (2, [*DELAYED, *PP2, "parallel.recompute=full"]),
    "recompute-full-one": (1, ["parallel.recompute=full", "parallel.recompute_blocks=1"]),
    "recompute-selective": (2, [*DELAYED, *SELECTIVE, "parallel.tensor=2"]),
    "recompute-selective-blockwise": (1, ["fp8.recipe=blockwise", "parallel.recompute=selective"]),
    "recompute-selective-smooth": (1, [*DELAYED, "fp8.smooth_swiglu=true", "parallel.recompute=selective"]),
    "offload": (1, [*DELAYED, "parallel.offload=2"]),
    "reduce-bf16": (2, [*DELAYED, "optimizer.reduce_dtype=bf16"]),
    "reduce-fp8": (2, ["parallel.zero=1", "optimizer.reduce_dtype=fp8"]),
    "moments-bf16": (2, [*DELAYED, "parallel.zero=1", "optimizer.moments_dtype=bf16"]),
    "moments-fp8": (2, [*DELAYED, "parallel.zero=1", "optimizer.moments_dtype=fp8"]),
    "remainders": (2, [*DELAYED, "parallel.zero=1", "optimizer.store_param_remainders=true"]),
    "gpt2": (1, [*DELAYED, *GPT2]),
    "gpt2-tp2-pp2": (4, [*CURRENT, *GPT2, "model.tie_embeddings=true", "parallel.tensor=2", *PP2]),
    "tied-zb-v": (2, [*DELAYED, "model.tie_embeddings=true", *TWO_CHUNKS, "parallel.schedule=zb-v"]),
    "qwen2-tp2": (2, [*DELAYED, "model.qkv_bias=true", "parallel.tensor=2"]),
    "qwen3-tp2": (2, ["fp8.recipe=rowwise", "model.qk_norm=true", "model.head_dim=64", "parallel.tensor=2"]),
    "window": (1, ["model.sliding_window=16", ROPE_SCALING]),
    "parallel-block-tp2": (2, [*DELAYED, "model.parallel_block=true", "parallel.tensor=2"]),
    "gelu": (1, [*CURRENT, "model.activation=gelu"]),
    "z-loss-tp2": (2, ["training.z_loss=1e-2", "parallel.tensor=2", "training.precision=fp32"]),
    "masked": (2, [*DELAYED, *DOCUMENTS]),
    "masked-cp2": (2, [*DELAYED, *DOCUMENTS, "parallel.context=2"]),
    "some-layers": (1, [*DELAYED, "fp8.exclude=[layers.1.*]", "fp8.first_blocks_bf16=1", "fp8.last_blocks_bf16=1"]),
    "dgrad-bf16": (1, [*CURRENT, "fp8.override_linear_precision=[false, true, false]", "fp8.amax_epsilon=1e-6"]),
    "report": (2, [*DELAYED, *PP2, "fp8.report_interval=2"]),
    "deterministic": (1, [*DELAYED, "deterministic=true", "optimizer.clip_grad_norm=0.1"]),
}  # fmt: skip
CASES: dict[str, tuple[int, list[str]]] = {
    **{
        f"{recipe}/{layout}": (ranks, [*keys, *more])
        for recipe, keys in RECIPES.items()
        for layout, (ranks, more) in LAYOUTS.items()
    },
    **MORE,
}  # fmt: skip


def write_inputs(folder: Path) -> None:
    """Write a Megatron .bin/.idx data set of random documents, and a base config that reads it."""
    generator = np.random.default_rng(0)
    # Random walks with small steps, so that there is something to learn.
    documents = [
        np.append(generator.integers(1, 8, length).cumsum() % END_OF_DOCUMENT, END_OF_DOCUMENT).astype(np.uint16)
        for length in generator.integers(20, 200, 400)
    ]
    sizes = np.array([len(document) for document in documents], np.int32)
    pointers = np.concatenate([[0], np.cumsum(sizes[:-1].astype(np.int64) * 2)]).astype(np.int64)
    (folder / "data.bin").write_bytes(np.concatenate(documents).tobytes())
    header = struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, 8, len(sizes), len(sizes) + 1)
    marks = np.arange(len(sizes) + 1, dtype=np.int64)
    (folder / "data.idx").write_bytes(header + sizes.tobytes() + pointers.tobytes() + marks.tobytes())
    config = {
        **BASE, "name": "gate", "run_dir": str(folder / "runs"),
        "data": {
            "train": {str(folder / "data"): 1.0}, "split": "90,10,0", "tokenizer": {"kind": "bytes"},
            "index_cache": str(folder / "cache"),
        },
    }  # fmt: skip
    (folder / "base.yaml").write_text(yaml.safe_dump(config))


def checkpoint_hash(path: Path) -> str:
    """SHA-256 over names, shapes, dtypes and values of a checkpoint's tensors, in the order of their names."""
    from megafp8.checkpoint import CheckpointReader

    reader, digest = CheckpointReader(path), hashlib.sha256()
    for name in sorted(reader.tensors):
        shape, dtype = reader.tensors[name]
        digest.update(f"{name} {tuple(shape)} {dtype}".encode())
        digest.update(reader.read(name).contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def recorded(run: Path) -> dict[str, Any]:
    """Results of one finished run."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {
        "loss": [line["loss"] for line in lines],
        "grad_norm": [line["grad_norm"] for line in lines],
        "validation": [line["validation_loss"] for line in lines if line.get("validation_loss") is not None],
        "checkpoints": {path.name: checkpoint_hash(path) for path in sorted((run / "checkpoints").glob("step_*"))},
    }


def _serve(pipe: Connection, rank: int) -> None:
    """Main function of one rank: runs each (ranks, port, arguments) received from `pipe`, until None."""
    torch.set_num_threads(1)
    sys.path.insert(0, str(ROOT))
    import pretrain_gpt

    while (task := pipe.recv()) is not None:
        ranks, port, arguments = task
        places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port}
        os.environ.update({key: str(value) for key, value in places.items()}, MASTER_ADDR="127.0.0.1")
        sys.argv = ["pretrain_gpt.py", *arguments]
        output = io.StringIO()
        try:
            with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
                code = pretrain_gpt.main()
        except BaseException:
            code = output.getvalue() + traceback.format_exc()
        pipe.send(None if code == 0 else f"rank {rank} ended with {code}\n{output.getvalue()[-4000:]}")


class Ranks:
    """A pool of processes in which torch stays loaded from case to case."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipes: list[Connection] = []
        self.processes: list[Any] = []
        for rank in range(max(ranks for ranks, _ in CASES.values())):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, rank), daemon=True)
            process.start()
            theirs.close()
            self.processes.append(process)
            self.pipes.append(ours)

    def close(self) -> None:
        """End the processes."""
        for process in self.processes:
            process.kill()
            process.join()

    def run(self, ranks: int, arguments: Sequence[str]) -> None:
        """Run `pretrain_gpt.py`. RuntimeError with the ranks' output if any fails or hangs."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        for pipe in self.pipes[:ranks]:
            pipe.send((ranks, port, list(arguments)))
        failures = [
            pipe.recv() if pipe.poll(CASE_SECONDS) else f"rank {rank} did not finish within {CASE_SECONDS} s"
            for rank, pipe in enumerate(self.pipes[:ranks])
        ]
        if any(failures):
            raise RuntimeError("\n".join(failure for failure in failures if failure))


def record(path: Path, only: str) -> int:
    """Run the cases whose name contains `only`, write their results to `path`, and return how many failed."""
    found: dict[str, Any] = {}
    failed = []
    with tempfile.TemporaryDirectory(prefix="bitwise-gate-") as folder:
        write_inputs(Path(folder))
        pool = Ranks()
        chosen = {name: case for name, case in CASES.items() if only in name}
        for name, (ranks, overrides) in tqdm(chosen.items(), unit="case"):
            run_name = name.replace("/", ".")
            arguments = ["--config", f"{folder}/base.yaml", *overrides, f"name={run_name}"]
            try:
                pool.run(ranks, [*arguments, "training.steps=3"])
                pool.run(ranks, arguments)
                found[name] = recorded(Path(folder) / "runs" / run_name)
            except RuntimeError as error:
                failed.append(name)
                tqdm.write(f"{name}: {error}")
                pool.close()
                pool = Ranks()
        pool.close()
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    about = {
        "commit": commit.stdout.strip(),
        "torch": torch.__version__,
        "processor": platform.processor() or platform.machine(),
    }
    path.write_text(json.dumps({"about": about, "cases": found}, indent=1))
    print(f"{len(found)} cases recorded in {path}, {len(failed)} failed: {', '.join(failed)}")
    return len(failed)


def compare(before: Path, after: Path) -> int:
    """Print every case that differs between two recordings, and return how many do."""
    old, new = (json.loads(path.read_text()) for path in (before, after))
    if old["about"]["torch"] != new["about"]["torch"]:
        print(f"recorded with torch {old['about']['torch']} and {new['about']['torch']}: bits may differ by that alone")
    differing = 0
    for name in sorted(old["cases"].keys() | new["cases"].keys()):
        one, other = old["cases"].get(name), new["cases"].get(name)
        if one == other:
            continue
        differing += 1
        if one is None or other is None:
            print(f"{name}: only {'after' if one is None else 'before'}")
            continue
        for key in one:
            if one[key] != other[key]:
                print(f"{name}: {key} {one[key]} -> {other[key]}")
    same = len(old["cases"].keys() | new["cases"].keys()) - differing
    print(f"{same} cases identical to the last bit, {differing} differ")
    return differing


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record", help="run all cases and write their results")
    recording.add_argument("output", type=Path)
    recording.add_argument("--only", default="", help="cases whose name contains this")
    comparing = commands.add_parser("compare", help="compare two recordings")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    arguments = parser.parse_args()
    if arguments.command == "record":
        return int(record(arguments.output, arguments.only) > 0)
    return int(compare(arguments.before, arguments.after) > 0)


if __name__ == "__main__":
    sys.exit(main())
