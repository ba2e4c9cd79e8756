"""Models for generation from checkpoints of any format and layout. Each rank reads its slices of the weights."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from megafp8.checkpoint import Rectangles
from megafp8.checkpoint.files import parse_object, read_file
from megafp8.checkpoint.rectangles import as_rectangles
from megafp8.config import Config, Fp8Config, with_keys
from megafp8.config.checks import check_layout
from megafp8.conversion.adapters import MergedSource
from megafp8.conversion.base import CheckpointSource
from megafp8.conversion.flat import differences
from megafp8.conversion.formats import open_source
from megafp8.conversion.huggingface.source import CONFIG_FILE, HfSource
from megafp8.conversion.huggingface.tokenizer import find_tokenizer
from megafp8.conversion.load import load_scales, load_weights
from megafp8.data.tokenizer_files import GENERATION_FILE, token_ids
from megafp8.data.tokenizers import Tokenizer, build_tokenizer
from megafp8.host.launched import launched_ranks, on_launched_ranks
from megafp8.inference.model import Model, check_decoder
from megafp8.inference.quantized_weights import check_stages, stored_fp8, weight_format
from megafp8.inference.refit import Copies, JobPeers, Refit
from megafp8.inference.staged_weights import prepare_weights, tensors_of
from megafp8.layers.context import BuildContext, lora_of
from megafp8.linear.quantized_weight import QuantizedWeightFormat
from megafp8.models.build import build_stage
from megafp8.numerics.dtypes import DTYPES
from megafp8.parallel.parallel_state import initialize_distributed, initialize_model_parallel
from megafp8.parallel.sharding import spec_of
from megafp8.parallel.tp_overlap import default_overlap
from megafp8.planner.stages import stages_of
from megafp8.spec import ModelSpec
from megafp8.training.cuda_graphs import why_not
from megafp8.training.fp8_config import build_fp8
from megafp8.training.quantized_export import config_of_run
from megafp8.training.state import weights
from megafp8.training.trainer import RankTrainer

logger = logging.getLogger(__name__)

Device = Literal["auto", "cuda", "cpu"]


class InferenceLayout(NamedTuple):
    """Sizes of tensor, pipeline and expert parallelism; the job has tensor · pipeline ranks."""

    tensor: int = 1
    pipeline: int = 1
    expert: int = 1


class Opened(NamedTuple):
    """Opened checkpoint, which `open_checkpoint` returns.

    Attributes:
        source: Checkpoint.
        config: Config of the model in the layout for generation.
        left_out: Layers that do not compute in FP8 although the model does.
        tokenizer: Tokenizer of the checkpoint, if it has one.
        start_tokens: Tokens before each prompt that is a text.
        end_tokens: Tokens that end a text.
        bos: Token from which the first token of a scored text is predicted.
        eos: Token that ends a scored text.
        added_tokens: Tokens that the tokenizer puts before each text (`Tokenizer.start_ids`).
        trained_length: Length of the training sequences, as in `Model`.
        weights: Format that weights are quantized to; None: not quantized.
    """

    source: CheckpointSource
    config: Config
    left_out: Sequence[str]
    tokenizer: Tokenizer | None
    start_tokens: Sequence[int]
    end_tokens: Sequence[int]
    bos: int | None
    eos: int | None
    added_tokens: Sequence[int]
    trained_length: int
    weights: QuantizedWeightFormat | None = None

    def max_length(self, given: int | None = None) -> int:
        """Return the largest number of tokens of a sequence: `given`, or else the number of positions in training.

        Raises ValueError if neither is known, or if `given` is less than 1.
        """
        if given is not None and given < 1:
            raise ValueError(f"max_length = {given}: must be at least 1")
        length = self.source.model.stem.max_position_embeddings if given is None else given
        if length is None:
            raise ValueError(f"{self.source.path} does not say how long a text may be; give max_length, such as 2048")
        return length


def open_checkpoint(
    path: str | Path,
    layout: InferenceLayout,
    *,
    device: Device = "auto",
    dtype: torch.dtype | None = None,
    fp8: bool = True,
    weights: str | None = None,
    batch_invariant: bool | None = None,
) -> Opened:
    """Read the description of a checkpoint, and check that the model fits the layout and the job.

    Needs no process group. The arguments are explained in `Generator.from_checkpoint`. Raises ValueError if the
    checkpoint does not fit.
    """
    source = open_source(path)
    if isinstance(source, HfSource):  # its vocabulary is not padded, so it fits any number of ranks
        source = type(source)(source.path, math.lcm(128, layout.tensor))
    check_decoder(source.model)
    form = None if weights is None else weight_format(weights, experts=source.model.has_experts)
    run = config_of_run(source)
    cuda = device == "cuda" or (device == "auto" and torch.cuda.is_available())
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device = cuda: torch sees no CUDA device here; try cpu")
    if dtype is None:
        stored = source.tensors["model.embedding.word.weight"].dtype
        dtype = stored if run is None else DTYPES[run.training.precision]
    trained = run is not None and not isinstance(source, MergedSource)  # merged weights have no scales
    fp8_config = run.fp8 if run is not None and trained and fp8 and form is None else Fp8Config()
    if batch_invariant is None:
        batch_invariant = run is not None and run.inference.batch_invariant
    if batch_invariant and form is not None:
        raise ValueError(
            f"weights = {weights}: with batch_invariant the model computes as in training, without quantized weights; "
            "leave one of the two out"
        )
    config = config_of(source.model, layout, fp8_config, dtype, cuda=cuda, batch_invariant=batch_invariant)
    if fp8_config.recipe != "none" and os.environ.get("RANK", "0") == "0":
        precision = config.training.precision
        logger.warning(
            f"{source.path}: the model computes in FP8 ({fp8_config.recipe}), as in training, so log-probabilities "
            f"differ from an exported folder; --no-fp8 (fp8=False in Python) computes in {precision}"
        )
    world_size = launched_ranks()
    ranks = layout.tensor * layout.pipeline
    if ranks != world_size:
        raise ValueError(
            f"tensor = {layout.tensor} and pipeline = {layout.pipeline} need {ranks} ranks, but "
            f"{on_launched_ranks('the job')} has {world_size}; start it with torchrun --nproc-per-node {ranks}"
        )
    check_layout(config, world_size, str(source.path))
    tokenizer_path = find_tokenizer(source)
    tokenizer: Tokenizer | None = None
    start, added, ends = list[int](), list[int](), _end_tokens(source)
    bos: int | None = None
    eos: int | None = None
    if tokenizer_path is not None:
        tokenizer = build_tokenizer(**tokenizer_path)
        added = list(tokenizer.start_ids)
        start, bos = added if run is None else start_of_documents(run, tokenizer), begin_of_text(run, tokenizer)
        ends.add(eos := tokenizer.eod_id)
    left_out = source.about.get("fp8_left_out") or []
    trained_length = 0 if run is None else run.training.seq_length
    return Opened(source, config, left_out, tokenizer, start, sorted(ends), bos, eos, added, trained_length, form)


def load_model(opened: Opened) -> Model:
    """Join the job, build this rank's stages, and read their weights. Collective."""
    source = opened.source
    model = build_model(opened.config, opened.left_out, opened.trained_length)
    if opened.weights is not None:
        model = replace(model, weights=opened.weights, stored_fp8=stored_fp8(source, opened.weights))
        check_stages(model.stages, opened.weights, model.parallel.world.group)
    _read_tensors(source, tensors_of(model))
    prepare_weights(model, source)
    return model


def read_weights(path: str | Path, model: Model, tensors: Mapping[str, Rectangles]) -> None:
    """Fill `tensors`, which belong to `model`, from another checkpoint of the same model, of any format and layout.

    Raises ValueError if the checkpoint is of another model. After an error, only some tensors may be filled.
    """
    source = open_source(path)
    if isinstance(source, HfSource):
        source = type(source)(source.path, math.lcm(128, model.parallel.tensor.size))
    if fields := differences(_for_generation(source.model), model.spec):
        raise ValueError(f"{source.path} is a checkpoint of another model: {', '.join(fields)} differ")
    _read_tensors(source, tensors)


def _read_tensors(source: CheckpointSource, tensors: Mapping[str, Rectangles]) -> None:
    """Fill this rank's weights and FP8 scales from a checkpoint."""
    scales = {name: x for name, x in tensors.items() if name.startswith("fp8.")}
    load_weights(source, {name: x for name, x in tensors.items() if name not in scales})
    advice = "; give the run's own checkpoint, or fp8=False to compute in high precision"
    load_scales(source, {name: x.parts[0].view for name, x in scales.items()}, advice)


def build_model(config: Config, left_out: Sequence[str] = (), trained_length: int = 0) -> Model:
    """Join the job and build this rank's stages, with uninitialized weights. Collective."""
    p = config.parallel
    device = initialize_distributed("cpu" if config.device == "cpu" else "cuda")
    parallel = initialize_model_parallel(p.tensor, p.pipeline, expert_model_parallel_size=p.expert, device=device)
    fp8 = build_fp8(config, parallel)
    fp8.leave_out(left_out)
    context = BuildContext(
        parallel.tensor.group,
        fp8,
        DTYPES[config.training.precision],
        device,
        p.sequence_parallel,
        expert=parallel.expert.group,
        expert_tensor=parallel.expert_tensor.group,
        expert_amax=parallel.expert_amax.group,
        expert_rows=parallel.expert_rows.group,
        gathers_tokens=config.gathers_tokens,
        expert_overlap=default_overlap(parallel.expert.group, sequence_parallel=True),
        sequence_group=parallel.tensor.group,
        lora=lora_of(config),
    )
    placement, layers = stages_of(config)
    stages = [
        build_stage(config.spec, context, layers=layers[stage], positions=config.position_rows)
        for stage in placement.stages[parallel.pipeline.rank]
    ]
    fp8.materialize(device)
    return Model(config.spec, stages, placement, parallel, fp8, trained_length, _why_eager(config))


def _why_eager(config: Config) -> str:
    """Return why decode steps are not replayed from CUDA graphs, or an empty string if they are."""
    if config.spec.has_experts and config.parallel.tensor > 1:
        return "the host reads how many tokens the experts of each rank have"
    return why_not(config, config.device)


def live_model(
    trainer: RankTrainer, layout: InferenceLayout | None = None, *, own_texts: bool = False
) -> tuple[Model, LiveWeights]:
    """Return the model of a running job, and the object that updates its weights after a step. Both are collective.

    Args:
        trainer: Trainer of the job.
        layout: Layout of the model. If it differs from the trainer's layout, the model is built a second time, and all
            its data-parallel ranks have the same weights. Weights that a rank has in both layouts share memory.
        own_texts: Each group of ranks `parallel.model` generates different texts, if it can compute without other
            ranks.

    Raises:
        ValueError: The layout does not fit.
    """
    config = trainer.config
    length, placement, p = config.training.seq_length, trainer.plan.placement, config.parallel
    if layout is None or layout == (p.tensor, p.pipeline, p.expert):
        why_eager = "copies of weights, which change, have other addresses after each step"
        shared = (config.spec, trainer.stages, placement, trainer.parallel, trainer.fp8, length, why_eager)
        own_texts = own_texts and _computes_alone(trainer)
        model = Model(*shared, in_training=True, own_texts=own_texts)
        return model, LiveWeights(trainer)
    check_decoder(config.spec)
    world_size, ranks = trainer.parallel.world_size, layout.tensor * layout.pipeline
    if min(layout) < 1 or world_size % ranks:
        sizes = f"tensor = {layout.tensor} and pipeline = {layout.pipeline} need {ranks} ranks"
        raise ValueError(f"{sizes}, but the job's {world_size} ranks cannot be divided by that")
    described = with_keys(config.spec, max_position_embeddings=config.position_rows)
    cuda, dtype = trainer.parallel.device.type == "cuda", DTYPES[config.training.precision]
    invariant = config.inference.batch_invariant
    live_config = config_of(described, layout, config.fp8, dtype, cuda=cuda, batch_invariant=invariant)
    live_config = live_config.model_copy(update={"lora": config.lora})
    check_layout(live_config, ranks, "the generator's layout")
    model = build_model(live_config, trainer.auto_filter.layers, length)
    return (live := replace(model, in_training=True, own_texts=own_texts)), LiveWeights(trainer, live)


def _computes_alone(trainer: RankTrainer) -> bool:
    """Return whether the ranks of a pipeline and its tensor-parallel groups can run forward passes without other ranks.

    They cannot if other ranks have shards of the weights or the amaxes of experts.
    """
    config, parallel = trainer.config, trainer.parallel
    experts = config.spec.has_experts and (parallel.expert.size > 1 or config.fp8.recipe != "none")
    return not (config.parallel.fsdp or experts)


class LiveWeights:
    """Updater that gives a generating model the weights of the trainer's latest step.

    The generating model is the trainer's model, or `model` in another layout. Built and called on all ranks
    (collective). `copies` counts the copies of the last call.
    """

    def __init__(self, trainer: RankTrainer, model: Model | None = None) -> None:
        self._trainer, self._model = trainer, model
        self._done: int | None = None
        self.copies = Copies(0, 0, 0)
        if model is not None:
            _share_parameters(trainer, model)
            self._wants = tensors_of(model)
            self._refit = Refit(self._has(), self._wants, JobPeers(trainer.parallel.world.group))

    @property
    def version(self) -> int:
        """Number of optimizer steps, without skipped steps."""
        return self._trainer.optimizer.step_count

    def __call__(self, *, always: bool = False) -> None:
        """Update the weights.

        `always` copies them even if the trainer made no step since the last call, for example after loading a
        checkpoint.
        """
        if self._model is None:
            self._trainer.strategy.wait()
            # FP8 copies may be in the memory of a CUDA graph. Copies of frozen weights are kept if there is no graph.
            self._trainer.fp8.forget_weights(frozen=False)
        elif always or self._done != self.version:
            self.copies = self._refit.run(self._has(), self._wants)
            self._model.fp8.invalidate_weights()
            self._done = self.version

    def _has(self) -> dict[str, Rectangles]:
        return weights(self._trainer) | as_rectangles(self._trainer.fp8.state_dict())


def _share_parameters(trainer: RankTrainer, model: Model) -> None:
    """Make parameters of `model` share memory with the trainer's parameters that have the same shards on this rank."""
    kept = [param for param in trainer.strategy.params if param not in trainer.optimizer.released and param.numel()]
    by_shards = {spec_of(param).shards: param for param in kept}
    for param in (param for stage in model.stages for param in stage.parameters()):
        same = by_shards.get(spec_of(param).shards)
        if same is not None and (same.dtype, same.device) == (param.dtype, param.device):
            param.data = same.data


def config_of(
    model: ModelSpec,
    layout: InferenceLayout,
    fp8: Fp8Config,
    dtype: torch.dtype,
    *,
    cuda: bool,
    batch_invariant: bool = False,
) -> Config:
    """Return a config of `model` in this layout and dtype. Its training keys have no meaning."""
    model = _for_generation(model)
    precision = next(name for name, each in DTYPES.items() if each == dtype)
    sections = {
        "name": "generation",
        "device": "cuda" if cuda else "cpu",
        "parallel": {
            "tensor": layout.tensor,
            "pipeline": layout.pipeline,
            "expert": layout.expert,
            # Off by default, because a step has any number of tokens. With experts, each rank needs different tokens.
            "sequence_parallel": model.has_experts,
        },
        "training": {"steps": 1, "seq_length": layout.tensor, "global_batch_size": 1, "precision": precision},
        "optimizer": {"learning_rate": 1.0},
        "data": {"train": ["none"]},
        "inference": {"batch_invariant": batch_invariant},
    }
    fp8 = fp8.model_copy(update={"param_gather": False, "report_interval": 0, "auto_filter": "none"})
    return Config.model_validate(sections | {"model": dict(model.keys), "fp8": fp8})


def _for_generation(model: ModelSpec) -> ModelSpec:
    """Return the model without the parts that only training uses."""
    changes: dict[str, Any] = {"mtp_num_layers": 0, "hidden_dropout": 0.0, "attention_dropout": 0.0}
    if model.keys["moe"] is not None:
        changes["moe"] = model.keys["moe"] | {"capacity_factor": None}
    if model.stem.position_embedding != "learned":
        changes["max_position_embeddings"] = None  # in a run's checkpoint, this is the sequence length of training
    return with_keys(model, **changes)


def start_of_documents(run: Config, tokenizer: Tokenizer) -> list[int]:
    """Return the tokens before a document's text in a run: beginning tokens, or else the end token of another document.

    With `data.reset_at_documents` and no beginning tokens, the result is empty.
    """
    return list(tokenizer.start_ids) or ([] if run.data.reset_at_documents else [tokenizer.eod_id])


def begin_of_text(run: Config | None, tokenizer: Tokenizer) -> int:
    """Return the token from which the first token of a scored text is predicted.

    This is the beginning token of documents. If there is none, it is the beginning token in the tokenizer's files,
    unless the model is from a `run`, or else the end-of-document token.
    """
    if tokenizer.start_ids:
        return tokenizer.start_ids[0]
    return tokenizer.eod_id if run is not None or tokenizer.bos_id is None else tokenizer.bos_id


def _end_tokens(source: CheckpointSource) -> set[int]:
    """Return the tokens that end a text according to the files of a Hugging Face folder."""
    file = source.path / GENERATION_FILE
    ids = parse_object(file, read_file(file)).get("eos_token_id") if file.is_file() else None
    if ids is None:
        file, ids = source.path / CONFIG_FILE, source.about.get("huggingface", {}).get("eos_token_id")
    return set(token_ids(ids, f"{file}: eos_token_id"))
