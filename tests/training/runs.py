"""Small models trained on real ranks in any layout: what the tests of training share.

A run is described by words, each of which sets a few keys of the config: "tp2 pp2 zb-h1 delayed" (`WORDS`). `train` is
what every run does: two steps, one that is skipped, an evaluation, and more steps. A run is computed once a session
(`Runs.of`) for all tests.
"""

from __future__ import annotations

import functools
import hashlib
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._pytree import tree_map_

from megafp8.batch import Batch
from megafp8.checkpoint import CheckpointReader
from megafp8.checkpoint.store import step_folder
from megafp8.config import Config, check_layout, load_config
from megafp8.data import sampler
from megafp8.data.samples import PADDING
from megafp8.distributed import tp_symmetric
from megafp8.distributed.sharding import FlatShard, spec_of
from megafp8.objectives import Objective
from megafp8.objectives.answers import Answers
from megafp8.objectives.masked_lm import MaskedLM, SpecialIds
from megafp8.objectives.next_token import NextToken
from megafp8.objectives.prefix_lm import PrefixLM
from megafp8.objectives.span_corruption import SpanCorruption
from megafp8.parallel_state import ParallelState, initialize_distributed
from megafp8.training import job
from megafp8.training.cuda_graphs import Graphs
from megafp8.training.fp8_config import check_recipe
from megafp8.training.inputs import open_inputs
from megafp8.training.parallel import build_parallel
from megafp8.training.state import checkpoint_folder, save_state
from megafp8.training.trainer import Trainer
from megafp8.training.validate import check_run
from tests.distributed.chunks import InChunks
from tests.quickstart_data import CONFIG, QuickstartData
from tests.training.latest import load_latest
from tests.world import World

Sections = Mapping[str, Mapping[str, Any]]
"""Keys of a config by section."""

# --- configs ---------------------------------------------------------------------------------------------------------

VOCABULARY = 100  # padded to 128
BASE: Sections = {
    "model": {
        "num_layers": 2, "hidden_size": 64, "num_attention_heads": 8, "num_query_groups": 4, "ffn_hidden_size": 128,
        "vocab_size": VOCABULARY, "vocab_multiple": 64,
    },
    "training": {"steps": 20, "seq_length": 32, "micro_batch_size": 1, "global_batch_size": 2, "precision": "fp32"},
    "parallel": {"bucket_mib": 0.05},  # some ten buckets
    "fp8": {"amax_history_len": 3},
    "optimizer": {"learning_rate": 1e-3},
    "data": {"train": ["none"]},
}  # fmt: skip


def merged(*sections: Sections) -> dict[str, dict[str, Any]]:
    """All keys; of those that are given twice, the later value."""
    names = dict.fromkeys(name for given in sections for name in given)
    return {name: {k: v for given in sections for k, v in given.get(name, {}).items()} for name in names}


def config(*, seed: int = 1234, device: str = "cpu", **sections: Mapping[str, Any]) -> Config:
    """The small model with some keys changed."""
    return Config.model_validate({"name": "test", "seed": seed, "device": device, **merged(BASE, sections)})


def _fp8(recipe: str, **keys: Any) -> Sections:
    return {"fp8": {"recipe": recipe, **keys}}


def _recompute(*ops: str) -> Sections:
    return {"parallel": {"recompute": "selective", "recompute_ops": list(ops)}}


_GPT2 = {"position_embedding": "learned", "normalization": "layernorm", "activation": "gelu_tanh", "linear_bias": True}
MIXED = [
    {"layers": "*.mlp.down", "input": "rowwise", "weight": "rowwise", "grad_output": "rowwise"},
    {"layers": "*.attention.*", "input": "current", "weight": "delayed", "grad_output": "current"},
    {"layers": "*", "input": "delayed", "weight": "current", "grad_output": "delayed"},
]
STATIC_AMAX = {"*.weight": 0.2, "*.input": 8.0, "*.grad_output": 1e-3}
DEEPSEEK = {
    "num_experts": 8, "top_k": 2, "ffn_hidden_size": 32, "score": "sigmoid", "scaling_factor": 2.0, "num_groups": 4,
    "top_groups": 2, "selection_bias": True, "bias_update_rate": 0.05, "shared_ffn_hidden_size": 64,
    "first_dense_layers": 1,
}  # fmt: skip
BERT = {
    **_GPT2, "architecture": "bert", "norm_position": "post", "embedding_norm": True, "activation": "gelu",
    "tie_embeddings": True, "num_query_groups": None, "token_types": 2, "binary_head": True,
}  # fmt: skip
T5 = {
    "architecture": "t5", "num_decoder_layers": 2, "num_query_groups": None, "position_embedding": "relative",
    "relative_attention_num_buckets": 8, "relative_attention_max_distance": 20, "activation": "geglu_tanh",
}  # fmt: skip
LATENT = {"q_rank": 32, "kv_rank": 16, "nope_head_dim": 8, "rope_head_dim": 4, "value_head_dim": 8}
DELTA_NET = {
    "kind": "gated_delta_net", "num_key_heads": 4, "num_value_heads": 8, "key_head_dim": 8, "value_head_dim": 8,
}  # fmt: skip
WORDS: dict[str, Sections] = {
    # models
    "4-layers": {"model": {"num_layers": 4}},
    "8-layers": {"model": {"num_layers": 8}},
    "wide": {"model": {"hidden_size": 128, "ffn_hidden_size": 128, "num_query_groups": 8}},  # blocks of FP8 are whole
    "tied": {"model": {"tie_embeddings": True}},
    "gpt2": {"model": {**_GPT2, "num_query_groups": 8}},
    "gelu": {"model": {"activation": "gelu"}},
    "qkv-bias": {"model": {"qkv_bias": True}},
    "qk-norm": {"model": {"qkv_bias": True, "qk_norm": True, "attention_sinks": True}},
    "parallel-block": {"model": {"parallel_block": True, "qk_norm": "projection"}},
    "mtp": {"model": {"mtp_num_layers": 2}},
    "window": {"model": {"sliding_window": 7}},
    "dropout": {"model": {"hidden_dropout": 0.1, "attention_dropout": 0.1}},
    "moe": {"model": {"moe": {"num_experts": 8, "top_k": 3, "ffn_hidden_size": 32, "aux_loss": 0.1, "z_loss": 0.01}}},
    "global-balance": {"model": {"moe": {"num_experts": 8, "top_k": 3, "ffn_hidden_size": 32, "aux_loss": 0.1,
                                         "aux_loss_scope": "global_batch"}}},
    "dropping": {"model": {"moe": {"num_experts": 8, "top_k": 3, "ffn_hidden_size": 32, "capacity_factor": 0.8}}},
    "gemma": {"model": {"norm_position": "both", "zero_centered_gamma": True, "embedding_multiplier": 8.0,
                        "activation": "geglu_tanh", "attention_softcap": 5.0, "logit_softcap": 10.0,
                        "sliding_window": 7, "full_attention_layers": [1], "rope_local_theta": 100.0}},
    "hybrid": {"model": {"layer_kinds": {"linear": {"mixer": DELTA_NET}, "full": {}}, "pattern": ["linear", "full"]}},
    "bloom": {"model": {**_GPT2, "num_query_groups": 8, "position_embedding": "alibi", "embedding_norm": True}},
    "gpt-oss": {"model": {"moe": {"num_experts": 8, "top_k": 3, "ffn_hidden_size": 32, "aux_loss": 0.1},
                          "linear_bias": True, "attention_sinks": True, "activation": "clamped_swiglu",
                          "norm_position": "output"}},
    # parameters of one and two rows: vectors of two heads, two channels and two experts, and a gate of one output
    "few-rows": {"model": {"num_attention_heads": 2, "num_query_groups": 2, "head_dim": 2, "qk_norm": True,
                           "qkv_bias": True, "attention_sinks": True,
                           "moe": {"num_experts": 2, "top_k": 1, "ffn_hidden_size": 32, "aux_loss": 0.1,
                                   "shared_ffn_hidden_size": 32, "shared_gate": True}}},
    "deepseek": {"model": {"moe": DEEPSEEK, "latent_attention": LATENT, "num_query_groups": None}},
    "bert": {"model": BERT, "data": {"packing": "sentences"}},
    "bert-pre": {"model": {**BERT, "norm_position": "pre", "embedding_norm": False, "activation": "gelu_tanh",
                           "tie_embeddings": False, "binary_head": False}},
    "t5": {"model": T5, "training": {"decoder_seq_length": 16}},
    "t5-tied": {"model": {**T5, "activation": "relu", "tie_embeddings": True}, "training": {"decoder_seq_length": 16}},
    "lora": {"lora": {"rank": 4, "alpha": 8.0}, "optimizer": {"learning_rate": 1e-2}},
    "lora-q-down": {"lora": {"rank": 3, "alpha": 8.0, "targets": ["q", "down"]}, "optimizer": {"learning_rate": 1e-2}},
    "lora-2": {"lora": {"rank": 2, "alpha": 8.0}, "optimizer": {"learning_rate": 1e-2}},
    "lora-gate": {"lora": {"targets": ["gate"]}},
    # precision; a CPU is slow at bf16
    "fp64": {"training": {"precision": "fp64"}},
    "bf16": {
        "training": {"precision": "bf16"},
        "model": {"hidden_size": 32, "num_attention_heads": 4, "ffn_hidden_size": 64},
        "parallel": {"bucket_mib": 0.01},
    },
    "fp16": {
        "training": {"precision": "fp16", "loss_scale": {"initial_scale": 2.0**14, "growth_interval": 2}},
        "model": {"hidden_size": 32, "num_attention_heads": 4, "ffn_hidden_size": 64},
        "parallel": {"bucket_mib": 0.01},
    },
    # batches
    "micro2": {"training": {"micro_batch_size": 2}},
    "seq256": {"training": {"seq_length": 256}},
    "1-sample": {"training": {"global_batch_size": 1}},
    "2-samples": {"training": {"global_batch_size": 2}},
    "3-samples": {"training": {"global_batch_size": 3}},
    "4-samples": {"training": {"global_batch_size": 4}},
    "8-samples": {"training": {"global_batch_size": 8}},
    "masked": {"data": {"mask_eod_loss": True}},
    "documents": {"data": {"mask_eod_loss": True, "reset_at_documents": True}, "training": {"z_loss": 1e-4}},
    "best-fit": {"data": {"packing": "best_fit", "mask_eod_loss": True, "reset_at_documents": True}},
    "prefix": {"data": {"prefix_lm": {"min_length": 2, "max_length": 20}}},
    "answers": {"data": {"packing": "best_fit", "mask_eod_loss": True, "reset_at_documents": True,
                         "loss_on": "answers"}},
    "text": {},  # the quickstart's; `Runs` knows where it is
    # FP8
    "delayed": _fp8("delayed"),
    "delayed-2": _fp8("delayed", interval=2, amax_compute_algo="most_recent"),
    "current": _fp8("current"),
    "rowwise": _fp8("rowwise"),
    "blockwise": _fp8("blockwise"),
    "mxfp8": _fp8("mxfp8"),
    "nvfp4": _fp8("nvfp4"),
    "calibrated": _fp8("static", calibration_steps=1),
    "static": _fp8("static", static_amax=STATIC_AMAX),
    "custom": _fp8("custom", custom=MIXED),
    "smooth": {"fp8": {"smooth_swiglu": True}},
    "fprop-bf16": {"fp8": {"override_linear_precision": (True, False, False)}},
    "dgrad-bf16": {"fp8": {"override_linear_precision": (False, True, False)}},
    "wgrad-bf16": {"fp8": {"override_linear_precision": (False, False, True)}},
    "power-of-two": {"fp8": {"power_of_two_scale": True}},
    "some-layers": {"fp8": {"exclude": ["layers.0.*", "*.mlp.down"]}},
    "report": {"fp8": {"report_interval": 1}},
    "report-2": {"fp8": {"report_interval": 2}},
    "report-3": {"fp8": {"report_interval": 3}},
    "fp8-gather": {"fp8": {"param_gather": True}},
    # optimizer
    "no-clip": {"optimizer": {"clip_grad_norm": 0.0}},
    "clip": {"optimizer": {"clip_grad_norm": 0.1}},
    "bf16-moments": {"optimizer": {"moments_dtype": "bf16"}},
    "fp8-moments": {"optimizer": {"moments_dtype": "fp8"}},
    "remainders": {"optimizer": {"store_param_remainders": True}},
    "bf16-reduce": {"optimizer": {"reduce_dtype": "bf16"}},
    "muon": {"optimizer": {"name": "muon", "muon": {"newton_schulz_dtype": "fp32"}}},
    "average": {"optimizer": {"average_decay": 0.6}},
    "groups": {"optimizer": {"groups": [{"match": ["embedding.*", "*.attention.*"], "learning_rate_scale": 0.5},
                                        {"match": ["*norm*"], "weight_decay": 0.1}]}},
    # layouts
    "tp2": {"parallel": {"tensor": 2}},
    "tp4": {"parallel": {"tensor": 4}},
    "no-sp": {"parallel": {"sequence_parallel": False}},
    "chunks": {"parallel": {"overlap_tensor": "symmetric"}},  # `start` gives it `InChunks`
    "ep2": {"parallel": {"expert": 2}},
    "ep4": {"parallel": {"expert": 4}},
    "etp2": {"parallel": {"expert_tensor": 2}},
    "all-to-all": {"parallel": {"expert_dispatch": "all_to_all"}},
    "cp2": {"parallel": {"context": 2}},
    "cp4": {"parallel": {"context": 4}},
    "pp2": {"parallel": {"pipeline": 2}},
    "pp4": {"parallel": {"pipeline": 4}},
    "1+3": {"parallel": {"layers_per_stage": [1, 3]}},
    "3+1": {"parallel": {"layers_per_stage": [3, 1]}},
    "1+3+3+1": {"parallel": {"layers_per_stage": [1, 3, 3, 1]}},
    "dp2": {"training": {"global_batch_size": 4}},
    "dp3": {"training": {"global_batch_size": 6}},
    "dp4": {"training": {"global_batch_size": 4}},
    "interleaved": {"parallel": {"schedule": "interleaved", "virtual_pipeline": 2}},
    "zb-h1": {"parallel": {"schedule": "zb-h1"}},
    "zb-v": {"parallel": {"schedule": "zb-v", "virtual_pipeline": 2}},
    "dualpipev": {"parallel": {"schedule": "dualpipev", "virtual_pipeline": 2}},
    "late-reduce": {"parallel": {"overlap_grad_reduce": False}},
    "large-buckets": {"parallel": {"bucket_mib": 100.0}},
    "zero": {"parallel": {"zero": 1}},
    "late-gather": {"parallel": {"overlap_param_gather": False}},
    "fsdp": {"parallel": {"fsdp": True}},
    "hsdp": {"parallel": {"fsdp": True, "fsdp_replicas": 2}},
    # memory and launches
    "full": {"parallel": {"recompute": "full"}},
    "full-first": {"parallel": {"recompute": "full", "recompute_blocks": 1}},
    "norms": _recompute("norms"),
    "activation": _recompute("activation"),
    "attention": _recompute("attention"),
    "selective": _recompute("norms", "activation", "attention"),
    "offload": {"parallel": {"offload": True}},
    "offload-1": {"parallel": {"offload": 1}},
    "graphs": {"training": {"cuda_graphs": True}},
}  # fmt: skip
EXECUTION = {
    "training": {"cuda_graphs", "micro_batch_size"},
    "fp8": {"param_gather", "report_interval"},
    "optimizer": {"store_param_remainders", "reduce_dtype"},
}
"""Keys beside `parallel` that say how a run is executed and not what it computes."""


def sections_of(words: str) -> dict[str, dict[str, Any]]:
    """The keys that `words` set; of a key that several set, the last one's value."""
    return merged(*(WORDS[word] for word in words.split()))


def config_of(words: str, *, seed: int = 1234, device: str = "cpu", **more: Mapping[str, Any]) -> Config:
    """The config of a run that is described by `words`, with `more` keys by section."""
    return config(seed=seed, device=device, **merged(sections_of(words), more))


def without_execution(words: str) -> dict[str, dict[str, Any]]:
    """What `words` say of the model and its training, for the run of one rank that others are compared with."""
    return {
        section: {key: value for key, value in given.items() if key not in EXECUTION.get(section, ())}
        for section, given in sections_of(words).items()
        if section != "parallel"
    }


def ranks_of(words: str) -> int:
    p = config_of(words).parallel
    data = max([1, *(int(word[2:]) for word in words.split() if word in ("dp2", "dp3", "dp4"))])
    return p.tensor * p.pipeline * p.context * data


# --- on the ranks ----------------------------------------------------------------------------------------------------

Curve = list[tuple[float, float]]
"""(loss, gradient norm) of each step; of a skipped one (loss, 0), of an evaluation (loss, tokens)."""


T = TypeVar("T")


class RerunCapture:
    """Stands in for a CUDA graph's capture: a replay runs the work again, on the memory that it was captured with, and
    leaves the result in the memory that it had at first. Counts captures and replays. `capturing`: as for a capture."""

    def __init__(self) -> None:
        self.captures = self.replays = 0
        self.capturing: Callable[[], AbstractContextManager[None]] = nullcontext

    def __call__(self, work: Callable[[], T]) -> Callable[[], T]:
        self.captures += 1
        results: list[T] = []

        def replay() -> T:
            self.replays += 1
            with self.capturing():
                results.append(work())
            if len(results) > 1:
                tree_map_(lambda old, new: old.copy_(new), results[0], results.pop())
            return results[0]

        return replay


@dataclass
class LoggedCapture:
    """Stands in for a capture: the work runs when it is captured, and replays are written to `log`."""

    log: list[Any]

    def __call__(self, work: Callable[[], T]) -> Callable[[], T]:
        result = work()

        def replay() -> T:
            self.log.append("replay")
            return result

        return replay


class RerunGraphs(Graphs):
    """Graphs on a CPU, after one eager step."""

    def __init__(self) -> None:
        self.rerun = RerunCapture()
        super().__init__(torch.device("cpu"), new_capture=lambda: self.rerun)

    def run(self, *args: Any, **options: Any) -> Any:
        self.rerun.capturing = options.pop("capturing")
        return super().run(*args, **options | {"eager_runs": 1})


def check_config(config: Config, ranks: int) -> None:
    """Raise ConfigError where a run of `config` on `ranks` ranks is refused.

    But for what only runs of this module have: a short history under every recipe.
    """
    fp8 = config.fp8.model_copy(update={"amax_history_len": 1024})
    checked = config.model_copy(update={"fp8": fp8})
    check_layout(checked, ranks)
    check_recipe(checked, "config")


def start(config: Config) -> tuple[Trainer, ParallelState]:
    """A trainer on the ranks that are here, with stand-ins for what needs CUDA; it offloads activations of any size.

    Its CUDA graphs are `RerunGraphs`, its overlap by symmetric memory is `InChunks`.
    """
    graphs, ranks = config.training.cuda_graphs is True, dist.get_world_size()
    needs_cuda = graphs or config.parallel.overlap_tensor == "symmetric"
    check_config(config.model_copy(update={"device": "auto"}) if needs_cuda else config, ranks)
    if graphs:
        config = config.model_copy(update={"training": config.training.model_copy(update={"cuda_graphs": False})})
    device = initialize_distributed("cpu")
    parallel = build_parallel(config, device)
    one_host = patch.dict(os.environ, LOCAL_WORLD_SIZE=str(ranks))
    with one_host, patch.object(tp_symmetric, "SymmetricMemory", InChunks):
        trainer = Trainer(config, parallel)
    if graphs:
        trainer.graphs = RerunGraphs()
    for stage in trainer.stages:
        if stage.offload is not None:
            stage.offload.smallest = 0
    return trainer, parallel


def batches(step: int, config: Config, parallel: ParallelState) -> list[Batch]:
    """This rank's micro-batches of a global batch that is the same in every layout.

    Tokens count in strides modulo 16, which is soon learnt; 0 ends a document. Under best_fit, each sample ends with
    padding from a random token on. Or those of `data.train`.
    """
    t, d, data = config.training, config.data, parallel.data
    if d.train != ["none"]:
        return text_batches(step, config, parallel)
    generator = torch.Generator().manual_seed(step)
    first, stride = (torch.randint(1, 16, (t.global_batch_size, 1), generator=generator) for _ in range(2))
    tokens = (first + stride * torch.arange(t.seq_length + 1)) % 16
    if d.packing == "best_fit":
        end = torch.randint(t.seq_length // 2, t.seq_length + 2, first.shape, generator=generator)
        tokens[torch.arange(t.seq_length + 1) >= end] = PADDING
    samples = torch.arange(step * t.global_batch_size, (step + 1) * t.global_batch_size)
    if config.model.architecture != "gpt":
        return _encoder_batches(config, parallel, tokens, samples)
    if d.loss_on is not None:
        return _answer_batches(config, parallel, tokens, samples)
    objective: Objective = NextToken(t.seq_length, d.reset_at_documents, d.mask_eod_loss)
    if d.prefix_lm is not None:
        assert d.prefix_lm.max_length is not None
        objective = PrefixLM(objective, 1234, d.prefix_lm.min_length, d.prefix_lm.max_length)
    rows = torch.stack([torch.from_numpy(objective.row(_documents(x), i)) for i, x in zip(samples.tolist(), tokens)])
    own = zip(*(x.split(t.micro_batch_size)[data.rank :: data.size] for x in (rows, samples)))
    return [replace(objective.batch(x), samples=indices) for x, indices in own]


def _documents(sample: Tensor) -> list[NDArray[np.int64]]:
    """The documents of a sample, each of which ends with 0; without padding."""
    text = sample[sample != PADDING].numpy()
    return [part for part in np.split(text, np.flatnonzero(text == 0) + 1) if len(part)]


def _answer_batches(config: Config, parallel: ParallelState, tokens: Tensor, indices: Tensor) -> list[Batch]:
    """The same with a loss mask: samples have three documents, of which none to a half of the tokens are answers."""
    t, data, objective = config.training, parallel.data, Answers(config.training.seq_length)
    rows = []
    for index, sample in zip(indices.tolist(), tokens):
        text = sample[sample != PADDING]
        mask = (torch.arange(len(text)) % (index % 4 + 1) == 0) & (index % 4 != 0)
        parts = torch.stack([text, mask]).numpy()
        rows.append(torch.from_numpy(objective.row(np.split(parts, [4, 11], axis=1), index)))
    own = zip(*(x.split(t.micro_batch_size)[data.rank :: data.size] for x in (torch.stack(rows), indices)))
    return [replace(objective.batch(x), samples=numbers) for x, numbers in own]


def _encoder_batches(config: Config, parallel: ParallelState, tokens: Tensor, indices: Tensor) -> list[Batch]:
    """The same for other objectives, which take samples as pieces; some are shorter than others."""
    t, data, pairs = config.training, parallel.data, config.model.binary_head
    objective: Objective = MaskedLM(t.seq_length, 1234, SpecialIds(96, 97, 98, 99), VOCABULARY, pairs=pairs)
    samples = tokens.numpy()
    if config.decoder_length is not None:
        lengths = config.data.span_corruption.lengths(config.sample_tokens)
        sentinels = [98, 97, 96, 95, 94]
        objective = SpanCorruption(t.seq_length, config.decoder_length, 1234, *lengths, sentinels, 1, 99)
        samples = np.concatenate([samples, samples], axis=1)
    rows = []
    for i, (index, sample) in enumerate(zip(indices.tolist(), samples)):
        text = sample[: config.sample_tokens - 5 * (i % 3) * pairs]
        rows.append(torch.from_numpy(objective.row(np.split(text, [4, 11]), index)))
    own = zip(*(x.split(t.micro_batch_size)[data.rank :: data.size] for x in (torch.stack(rows), indices)))
    return [replace(objective.batch(x), samples=numbers) for x, numbers in own]


def text_batches(step: int, config: Config, parallel: ParallelState) -> list[Batch]:
    """The same of real data, through the sampler."""
    t, data = config.training, parallel.data
    inputs = _open(config.model_dump_json())
    stream = sampler.batches(
        inputs.train, consumed_samples=step * t.global_batch_size, global_batch_size=t.global_batch_size,
        micro_batch_size=t.micro_batch_size, data_parallel_rank=data.rank, data_parallel_size=data.size, num_workers=0,
        objective=inputs.objective, pin_memory=False,
    )  # fmt: skip
    return next(stream)


@functools.lru_cache(maxsize=1)
def _open(config: str) -> Any:
    return open_inputs(Config.model_validate_json(config), "test")


def steps_of(trainer: Trainer, parallel: ParallelState, steps: Iterable[int]) -> Curve:
    """Loss, with that of multi-token prediction, and gradient norm of each step."""
    curve = []
    for step in steps:
        loss, result = trainer.train_step(step, batches(step, trainer.config, parallel))
        assert not result.skipped
        curve.append((loss.mean + (loss.more or 0.0), result.grad_norm))
    return curve


def skipped_step(trainer: Trainer, parallel: ParallelState, step: int) -> tuple[float, float]:
    """A step whose gradients are not finite."""
    update = trainer.update
    trainer.update = lambda lr, grad_scale, measure: update(lr, grad_scale=torch.tensor(math.nan))  # type: ignore[assignment]
    loss, result = trainer.train_step(step, batches(step, trainer.config, parallel))
    trainer.update = update
    assert result.skipped
    return loss.mean, 0.0


SKIPPED, EVALUATED = 2, 1000
STEPS = 2
"""Steps of a run after the one that is skipped."""


def train(trainer: Trainer, parallel: ParallelState, steps: int = STEPS) -> Curve:
    curve = steps_of(trainer, parallel, range(SKIPPED))
    curve.append(skipped_step(trainer, parallel, SKIPPED))
    evaluated = trainer.evaluate(batches(EVALUATED, trainer.config, parallel))
    curve.append((evaluated.mean, evaluated.tokens))
    return curve + steps_of(trainer, parallel, range(SKIPPED + 1, SKIPPED + 1 + steps))


def curve(overrides: list[str], steps: int) -> Curve:
    """Of a run of the quickstart with these overrides, on the ranks that are here."""
    trainer, parallel = start(_open(load_config(CONFIG, overrides).model_dump_json()).config)
    return steps_of(trainer, parallel, range(steps))


def train_job(overrides: list[str]) -> None:
    """What pretrain_gpt.py does with the quickstart's config, on a rank that is in a job already."""
    config = load_config(CONFIG, overrides)
    check_layout(config, dist.get_world_size())
    inputs = open_inputs(config, "test")
    check_run(inputs)
    job.train(inputs)


Shard = tuple[str, tuple[int, ...], Tensor, Tensor]
"""Name and shape of a global tensor; positions of elements in it, counted row by row; their values."""


def _located(prefix: str, shard: FlatShard, values: Tensor) -> Iterator[Shard]:
    """Which elements of which global tensors the flat `values` of `shard` are."""
    positions, owners = [], []
    pieces = spec_of(shard.param).shards
    for i, piece in enumerate(pieces):
        position = torch.arange(math.prod(piece.global_shape), dtype=torch.int32).view(piece.global_shape)
        own = position[tuple(slice(o, o + n) for o, n in zip(piece.offset, piece.shape))].flatten()
        positions.append(own)
        owners.append(torch.full_like(own, i))
    position, owner = (torch.cat(x)[shard.start : shard.end] for x in (positions, owners))
    assert position.shape == values.shape
    for i, piece in enumerate(pieces):
        yield prefix + piece.name, piece.global_shape, position[owner == i], values[owner == i].clone()


def shards_of(trainer: Trainer) -> list[Shard]:
    """All state of this rank: weights, optimizer and FP8. Made without the code that saves and loads checkpoints."""
    trainer.strategy.wait()
    released = trainer.optimizer.released
    whole = [FlatShard(p, 0, p.numel()) for p in trainer.strategy.params if p not in released]
    flat = [("model.", [(shard, shard.view(shard.param.detach())) for shard in whole])]
    flat.append(("model.", trainer.optimizer.released_values()))
    flat += [(f"optimizer.{key}.", found) for key, found in trainer.optimizer.state().items()]
    shards = [located for prefix, found in flat for item in found for located in _located(prefix, *item)]
    constants = {f"model.{name}": values for name, values in trainer.constants.items()}
    for name, tensor in {**constants, **trainer.loss_scale, **trainer.fp8.state_dict()}.items():
        shards.append((name, tuple(tensor.shape), torch.arange(tensor.numel()), tensor.flatten().clone()))
    return shards


@dataclass
class RankResult:
    """What one rank hands back of a run."""

    curve: Curve
    shards: list[Shard]
    elements: dict[str, int]
    """How many this rank has, of the model: in optimizer state by key, in `weights`, `gradients`, and storage of the
    `released` weights; how many of these there are; and graphs' captures and replays."""
    records: list[Any] = field(default_factory=list)
    """FP8 health of the last step."""


def result_of(trainer: Trainer, curve: Curve) -> RankResult:
    elements = {key: sum(t.numel() for _, t in found) for key, found in trainer.optimizer.state().items()}
    elements["weights"] = sum(p.numel() for p in trainer.strategy.params)
    elements["gradients"] = sum(buffer.numel() for buffer in trainer.strategy.gradients)
    released = trainer.strategy.fp8_weights
    elements["released"] = len(released)
    elements["released storage"] = sum(p.untyped_storage().nbytes() // p.element_size() for p in released)
    if isinstance(trainer.graphs, RerunGraphs):
        elements |= {"captures": trainer.graphs.rerun.captures, "replays": trainer.graphs.rerun.replays}
    return RankResult(curve, shards_of(trainer), elements, trainer.fp8_records)


def _train(config: Config, steps: int) -> RankResult:
    trainer, parallel = start(config)
    return result_of(trainer, train(trainer, parallel, steps))


def train_and_save(config: Config, source: str | None, folder: str, steps: int = 2) -> tuple[Trainer, RankResult]:
    """Train `steps` steps, or load the checkpoint after them from `source`; save; as many more steps.

    The result has the state in the checkpoint, and the curve of the steps after it.
    """
    trainer, parallel = start(config)
    if source is None:
        steps_of(trainer, parallel, range(steps))
    else:
        assert load_latest(trainer, Path(source)) == steps
    save_state(trainer, Path(folder), steps, None)
    result = result_of(trainer, [])
    result.curve = steps_of(trainer, parallel, range(steps, 2 * steps))
    return trainer, result


def _saved_result(config: Config, source: str | None, folder: str) -> RankResult:
    return train_and_save(config, source, folder)[1]


# --- in the test's process -------------------------------------------------------------------------------------------


def assembled(shards: Iterable[list[Shard]]) -> dict[str, Tensor]:
    """The whole tensors from all ranks' shards. Where several ranks hold an element, they must hold the same bits."""
    whole: dict[str, Tensor] = {}
    filled: dict[str, Tensor] = {}
    for name, shape, position, values in (shard for found in shards for shard in found):
        if name not in whole:
            whole[name] = torch.zeros(math.prod(shape), dtype=values.dtype).view(shape)
            filled[name] = torch.zeros(math.prod(shape), dtype=torch.bool)
        assert whole[name].shape == shape
        there = filled[name][position]
        assert torch.equal(whole[name].view(-1)[position][there], values[there]), f"two values of {name}"
        whole[name].view(-1)[position] = values
        filled[name][position] = True
    holes = [name for name, mask in filled.items() if not mask.all()]
    assert not holes, f"no rank has all of {holes}"
    return whole


def digests(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Of dtype, shape and bits of each tensor."""
    return {name: _digest(t) for name, t in tensors.items()}


def _digest(tensor: Tensor) -> str:
    content = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
    return f"{tensor.dtype} {tuple(tensor.shape)} {hashlib.sha256(content).hexdigest()[:16]}"


def saved_tensors(folder: Path, step: int) -> dict[str, Tensor]:
    """All tensors of a checkpoint."""
    source = CheckpointReader(step_folder(checkpoint_folder(folder), step))
    return {name: source.read(name) for name in source.tensors}


@dataclass(frozen=True)
class Outcome:
    """What is known of a run: its curve, digests of its final state by name, and what each rank held."""

    curve: Curve
    state: dict[str, str]
    elements: list[dict[str, int]]
    records: list[Any]

    @classmethod
    def of(cls, ranks: list[RankResult]) -> Outcome:
        assert all(rank.curve == ranks[0].curve for rank in ranks), "ranks report different losses"
        state = digests(assembled(rank.shards for rank in ranks))
        return cls(ranks[0].curve, state, [rank.elements for rank in ranks], ranks[0].records)


@dataclass(frozen=True)
class Saved:
    """A run that left a checkpoint in `folder`: all its tensors at that point, and the steps after it."""

    folder: Path
    tensors: dict[str, Tensor]
    curve: Curve


class Runs:
    """Runs of a session, each computed once. Use through the fixture `runs`."""

    def __init__(self, world: World, data: QuickstartData, folder: Path) -> None:
        self.world, self.data, self.folder = world, data, folder
        self.count = 0
        self._outcome = functools.lru_cache(maxsize=None)(self._run)
        self.saved = functools.lru_cache(maxsize=None)(self._save)

    def of(self, words: str, steps: int = STEPS, **more: Mapping[str, Any]) -> Outcome:
        """The run that `words` describe, with `more` keys by section."""
        settings = self._config(words, merged(sections_of(words), more))
        return self._outcome(settings.model_dump_json(), ranks_of(words), steps)

    def one_rank(self, words: str, steps: int = STEPS) -> Outcome:
        """The same computation on one rank, in the plainest way."""
        return self._outcome(self._config(words, without_execution(words)).model_dump_json(), 1, steps)

    def _config(self, words: str, sections: Sections) -> Config:
        return config(**merged(sections, self.data.sections if "text" in words.split() else {}))

    def _run(self, settings: str, ranks: int, steps: int) -> Outcome:
        return Outcome.of(self.world.run(_train, Config.model_validate_json(settings), steps, ranks=ranks))

    def _save(self, words: str, source: Path | None = None) -> Saved:
        """Trained two steps, or loaded from `source`, which has another seed; saved, and two more steps."""
        self.count += 1
        folder = self.folder / str(self.count)
        settings, path = config_of(words, seed=1 if source is None else 7), None if source is None else str(source)
        results = self.world.run(_saved_result, settings, path, str(folder), ranks=ranks_of(words))
        assert all(result.curve == results[0].curve for result in results), "ranks report different losses"
        return Saved(folder, assembled(result.shards for result in results), results[0].curve)


# --- the quickstart's config -----------------------------------------------------------------------------------------

ONE_RANK = ["parallel.tensor=1", "parallel.pipeline=1"]
LAYOUTS = {
    "tp2-sp": (2, ["parallel.tensor=2", "parallel.pipeline=1"]),
    "pp2": (2, ["parallel.tensor=1", "parallel.pipeline=2"]),
    "dp2": (2, ONE_RANK),
}
SMALL = [
    "model.hidden_size=64",
    "model.ffn_hidden_size=128",
    "training.seq_length=32",
    "training.micro_batch_size=2",
    "training.global_batch_size=8",
    "training.eval_interval=0",
    "fp8.amax_history_len=4",
    # At 3e-3 so small a model trains at the edge of stability, where a last-bit difference grows tenfold a step.
    "optimizer.learning_rate=1.0e-3",
    "optimizer.min_learning_rate=1.0e-4",
]
