"""Record the results of many small training runs to the last bit, and compare two recordings.

    python -m benchmarks.bitwise_gate record before.json            # on the commit before a refactoring
    python -m benchmarks.bitwise_gate record after.json             # on the commit after it
    python -m benchmarks.bitwise_gate compare before.json after.json

Most cases run `pretrain_gpt.py` with a tiny model on 1 to 4 CPU processes (gloo): six steps, the last three resumed
from the checkpoint of the first three. Recorded are losses, gradient norms and validation losses as in metrics.jsonl,
a SHA-256 of all tensors of each checkpoint, and texts that `megafp8.Generator` continues with the last one, greedily
and at random. The cases cover every recipe in three layouts, and every schedule, parallel axis, memory option,
optimizer, kind of layer, architecture and objective at least once. Others record the outputs and gradients of each
module of `megafp8.nn` (nn/...), and what the planner predicts for each config of the repository (plan/...).

Only public interfaces are used (the config, metrics.jsonl, the checkpoint format, `megafp8.Generator`, `megafp8.nn`,
tools/plan.py), so recordings stay comparable when modules move.

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
from collections.abc import Callable, Sequence
from functools import partial
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
    "current": ["fp8.recipe=current"],
    "rowwise": ["fp8.recipe=rowwise"],
    "rowwise-wgrad-bf16": [
        "fp8.recipe=rowwise", "fp8.override_linear_precision=[false, false, true]", "fp8.power_of_two_scale=true",
    ],
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
    "tp4-blockwise": (4, ["fp8.recipe=blockwise", "parallel.tensor=4", "model.num_query_groups=4"]),
    "tp2-rowwise": (2, ["fp8.recipe=rowwise", "parallel.tensor=2"]),
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
    "offload": (1, [*DELAYED, "parallel.offload=2"]),
    "reduce-bf16": (2, [*DELAYED, "optimizer.reduce_dtype=bf16"]),
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
MOE = ["model.moe={num_experts: 8, top_k: 3, ffn_hidden_size: 64, aux_loss: 0.1, z_loss: 0.01}"]
DROPPING = ["model.moe={num_experts: 8, top_k: 3, ffn_hidden_size: 64, capacity_factor: 0.8}"]
GLOBAL = ["model.moe={num_experts: 8, top_k: 3, ffn_hidden_size: 64, aux_loss: 0.1, aux_loss_scope: global_batch}"]
DEEPSEEK = [
    "model.moe={num_experts: 8, top_k: 2, ffn_hidden_size: 64, score: sigmoid, scaling_factor: 2.0, num_groups: 4, "
    "top_groups: 2, selection_bias: true, bias_update_rate: 0.05, shared_ffn_hidden_size: 128, first_dense_layers: 1}",
    "model.latent_attention={q_rank: 64, kv_rank: 32, nope_head_dim: 16, rope_head_dim: 8, value_head_dim: 16}",
    "model.num_query_groups=null",
]  # fmt: skip
GPT_OSS = [
    *MOE, "model.linear_bias=true", "model.attention_sinks=true", "model.activation=clamped_swiglu",
    "model.sliding_window=16", "model.full_attention_layers=[1, 3]",
]  # fmt: skip
GEMMA = [
    "model.norm_position=both", "model.zero_centered_gamma=true", "model.embedding_multiplier=8.0",
    "model.activation=geglu_tanh", "model.attention_softcap=5.0", "model.logit_softcap=10.0", "model.sliding_window=16",
    "model.full_attention_layers=[1, 3]", "model.rope_local_theta=100.0", "model.tie_embeddings=true",
]  # fmt: skip
SPECIAL = ["model.vocab_size=384", "data.special_tokens={cls: 260, sep: 261, mask: 262, pad: 263}"]
BERT = [
    *GPT2, *SPECIAL, "model.architecture=bert", "model.norm_position=post", "model.embedding_norm=true",
    "model.activation=gelu", "model.tie_embeddings=true", "model.num_query_groups=null",
]  # fmt: skip
T5 = [
    "model.vocab_size=384", "model.architecture=t5", "model.num_decoder_layers=2", "model.num_query_groups=null",
    "model.position_embedding=relative", "model.activation=geglu_tanh", "training.decoder_seq_length=64",
    "data.special_tokens={sep: 261, pad: 263, sentinels: [" + ", ".join(map(str, range(264, 304))) + "]}",
]  # fmt: skip
LORA = ["lora={rank: 4, alpha: 8.0}"]
MUON = ["optimizer.name=muon", "optimizer.muon={newton_schulz_dtype: fp32}"]
DROPOUT = ["model.hidden_dropout=0.1", "model.attention_dropout=0.1"]
EP2, ZERO, FSDP, TP2 = ["parallel.expert=2"], ["parallel.zero=1"], ["parallel.fsdp=true"], ["parallel.tensor=2"]
KINDS: dict[str, tuple[int, list[str]]] = {
    **{f"moe-{name}": (1, [*MOE, *RECIPES[name]]) for name in ("bf16", "delayed", "current", "rowwise", "blockwise")},
    "moe-tp2-ep2": (2, [*MOE, *DELAYED, *TP2, *EP2]),
    "moe-etp2": (2, [*MOE, *CURRENT, *TP2, "parallel.expert_tensor=2"]),
    "moe-all-to-all": (2, [*MOE, *CURRENT, *EP2, "parallel.expert_dispatch=all_to_all"]),
    "moe-dropping": (2, [*DROPPING, *EP2]),
    "moe-global-balance": (2, [*GLOBAL, *ZERO]),
    "moe-fsdp-ep2": (4, [*MOE, *DELAYED, *FSDP, *EP2]),
    "moe-cp2": (2, [*MOE, *CURRENT, "parallel.context=2"]),
    "moe-zb-v": (2, [*MOE, *CURRENT, *TWO_CHUNKS, "parallel.schedule=zb-v"]),
    "moe-recompute": (1, [*MOE, *DELAYED, *SELECTIVE]),
    "shared-gate": (2, [
        "model.moe={num_experts: 4, top_k: 1, ffn_hidden_size: 64, shared_ffn_hidden_size: 64, shared_gate: true}",
        *FSDP,
    ]),
    "deepseek": (1, [*DEEPSEEK, *DELAYED]),
    "deepseek-tp2-ep2": (2, [*DEEPSEEK, *CURRENT, *TP2, *EP2]),
    "deepseek-mtp-pp2": (2, [*DEEPSEEK, *PP2, "model.mtp_num_layers=1"]),
    "mtp": (2, [*DELAYED, "model.mtp_num_layers=2", *ZERO]),
    "gpt-oss": (2, [*GPT_OSS, *CURRENT, *EP2]),
    "gemma": (2, [*GEMMA, *DELAYED, *PP2]),
    "bloom": (1, [
        *GPT2, *DELAYED, "model.position_embedding=alibi", "model.embedding_norm=true", "model.num_query_groups=null",
    ]),
    "olmo2": (2, ["model.norm_position=output", "model.qk_norm=projection", *TP2]),
    "bert": (2, [*BERT, *CURRENT, *TP2]),
    "bert-dropout": (1, [*BERT, *DROPOUT]),
    "t5": (2, [*T5, *DELAYED, *PP2]),
    "t5-tied-zero": (2, [*T5, *ZERO, "model.tie_embeddings=true", "model.activation=relu"]),
    "lora": (2, [*LORA, *DELAYED, *TP2]),
    "lora-moe-fsdp": (2, [*LORA, *MOE, *FSDP]),
    "muon": (2, [*MUON, *DELAYED, *TP2]),
    "muon-zero-moe": (2, [*MUON, *MOE, *ZERO, *EP2]),
    "average": (2, [*ZERO, "optimizer.average_decay=0.6"]),
    "groups": (1, [
        "optimizer.groups=[{match: [embedding.*], learning_rate_scale: 0.5}, {match: ['*norm*'], weight_decay: 0.1}]",
    ]),
    "mup": (1, ["model.mup={base_hidden_size: 64}"]),
    "prefix": (2, [*DELAYED, "data.prefix_lm={min_length: 2, max_length: 60}", "parallel.context=2"]),
    "dropout": (2, [*DELAYED, *DROPOUT, *TP2]),
    "fp16": (1, ["training.precision=fp16", "training.loss_scale={initial_scale: 16384.0, growth_interval: 2}"]),
    "best-fit": (1, [*DOCUMENTS, "data.packing=best_fit"]),
    "stages": (1, ["stages=[{name: long, begin: 2, overrides: {training.seq_length: 256}}]"]),
    "hsdp": (4, [*CURRENT, *FSDP, "parallel.fsdp_replicas=2"]),
}  # fmt: skip
MODULES: dict[str, Callable[[Any], Any]] = {
    "Linear": lambda nn: nn.Linear(64, 96, device="cpu"),
    "LayerNormLinear": lambda nn: nn.LayerNormLinear(64, 96, device="cpu"),
    "LayerNormMLP": lambda nn: nn.LayerNormMLP(64, 128, activation="swiglu", device="cpu"),
    "LayerNormMLP-gelu": lambda nn: nn.LayerNormMLP(64, 128, device="cpu"),
    "LayerNorm": lambda nn: nn.LayerNorm(64, device="cpu"),
    "RMSNorm": lambda nn: nn.RMSNorm(64, device="cpu"),
    "TransformerLayer": lambda nn: nn.TransformerLayer(
        64, 128, 4, hidden_dropout=0.0, attention_dropout=0.0, device="cpu"
    ),
    "TransformerLayer-llama": lambda nn: nn.TransformerLayer(
        64, 128, 4, num_gqa_groups=2, normalization="RMSNorm", activation="swiglu", bias=False,
        hidden_dropout=0.0, attention_dropout=0.0, device="cpu",
    ),
}  # fmt: skip
"""Functions that build the modules of the cases nn/..., given the package `megafp8.nn`."""
PLANS = {"deepseek-v3": 512, "gemma2-9b": 16, "gpt-oss-20b": 8, "llama3-70b": 64, "llama3-8b": 8,
         "mixtral-8x7b": 32, "olmo2-7b": 8, "qwen3-30b-a3b": 16, "t5-base": 8}  # fmt: skip
"""Numbers of GPUs by config; the others need a tokenizer's file."""
CASES: dict[str, tuple[int, list[str]]] = {
    **{
        f"{recipe}/{layout}": (ranks, [*keys, *more])
        for recipe, keys in RECIPES.items()
        for layout, (ranks, more) in LAYOUTS.items()
    },
    **MORE,
    **{f"kinds/{name}": case for name, case in KINDS.items()},
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


def texts_of(run: Path) -> list[list[int]] | str:
    """Tokens that a finished run's model continues two prompts with; or why it is no model that does."""
    from megafp8 import Generator
    from megafp8.inference import SamplingOptions
    from megafp8.parallel_state import destroy_model_parallel

    options = [SamplingOptions(max_tokens=12, temperature=t, seed=3, ignore_end=True) for t in (0.0, 1.0)]
    try:
        generator = Generator.from_checkpoint(run, device="cpu")
        return [text.tokens for each in options for text in generator.generate([[5, 9, 12, 17], [3] * 20], each)]
    except ValueError as error:
        return f"refused: {str(error).replace(str(run), 'RUN')}"
    finally:
        destroy_model_parallel()


def module_results(name: str, recipe: str | None) -> dict[str, Any]:
    """Hashes of output and gradients of a module in a second step, whose scales follow from the first."""
    from megafp8 import fp8, nn

    recipes = {"delayed": fp8.DelayedScaling(amax_history_len=4), "current": fp8.CurrentScaling()}
    torch.manual_seed(1)
    module, results = MODULES[name](nn), {}
    for _ in range(2):
        module.zero_grad()
        x = torch.randn(32, 2, 64).requires_grad_()
        with fp8.autocast(enabled=recipe is not None, recipe=recipes.get(recipe or "")):
            y = module(x)
        y.square().sum().backward()
        if recipe is not None:
            fp8.end_step(module)
        results = {"y": y.detach(), "x": x.grad, **{key: p.grad for key, p in module.named_parameters()}}
    return {key: _hash(value) for key, value in results.items() if value is not None}


def _hash(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


def plan_of(config: str, gpus: int) -> Any:
    """Run tools/plan.py for the config of that name in configs/, and return the JSON that it prints."""
    command = [sys.executable, "tools/plan.py", "--config", f"configs/{config}.yaml", "--gpus", str(gpus), "--json"]
    return json.loads(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout)


def recorded(run: Path) -> dict[str, Any]:
    """Results of one finished run."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {
        "loss": [line["loss"] for line in lines],
        "grad_norm": [line["grad_norm"] for line in lines],
        "validation": [line["validation_loss"] for line in lines if line.get("validation_loss") is not None],
        "checkpoints": {path.name: checkpoint_hash(path) for path in sorted((run / "checkpoints").glob("step_*"))},
        "texts": texts_of(run),
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
    others: dict[str, Callable[[], Any]] = {
        **{
            f"nn/{name}/{recipe}": partial(module_results, name, recipe)
            for name in MODULES
            for recipe in ((None,) if name in ("LayerNorm", "RMSNorm") else (None, "delayed", "current"))
        },
        **{f"plan/{config}": partial(plan_of, config, gpus) for config, gpus in PLANS.items()},
    }
    for name, result in tqdm({name: x for name, x in others.items() if only in name}.items(), unit="case"):
        try:
            found[name] = {"results": result()}
        except (ValueError, subprocess.CalledProcessError) as error:
            failed.append(name)
            tqdm.write(f"{name}: {error}")
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
