"""The config as a tree of pydantic models. The text under a field is its documentation, shown by editors.

Here, each field is checked by itself; `checks.py` checks fields against each other and against the number of ranks.
Names are those of Megatron-LM, torchtitan and Hugging Face, as far as these agree. All sections are immutable.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, StringConstraints, field_validator, model_validator
from pydantic_core import PydanticCustomError

from megafp8.config.parts import LayerKind
from megafp8.config.resolve import resolve
from megafp8.host.problems import Problem
from megafp8.layers.attention.record import AttentionKeys
from megafp8.layers.experts.record import MoeConfig
from megafp8.layers.hyper_connections.record import HyperConnectionsConfig
from megafp8.layers.latent_attention.record import LatentAttentionConfig
from megafp8.layers.mlp.record import MlpKeys
from megafp8.layers.per_layer_embedding.record import PerLayerEmbeddingConfig
from megafp8.layers.sparse_attention.record import SparseAttentionConfig
from megafp8.numerics.recipe_names import RecipeName
from megafp8.optimizer.config import OptimizerConfig
from megafp8.parallel.pipeline.registry import SCHEDULES
from megafp8.section import (
    FLOAT,
    IN_FP32,
    INTEGER,
    Channels,
    Count,
    Dropout,
    Integer,
    Name,
    NonNegative,
    Pattern,
    PositiveFloat,
    PositiveInt,
    Quantity,
    Section,
    Steps,
    Tokens,
    UserPath,
)
from megafp8.spec import ModelSpec


class MupConfig(Section):
    """Maximal update parametrization (Yang et al. 2022, arXiv:2203.03466, table 8): hyperparameters that are best for a
    narrow model are so for wide ones."""

    base_hidden_size: Channels
    """hidden_size of the model that the hyperparameters were chosen with, for which this section changes nothing. With
    m = hidden_size / base_hidden_size, matrices of blocks have init_std / √m and AdamW's learning rate / m, and logits
    are divided by m. ffn_hidden_size and the ranks of latent attention must have grown with hidden_size (Megatron-LM's
    mup_base_hidden_size)."""
    base_head_dim: Channels | None = None
    """head_dim of that model, if heads were widened: scores are multiplied by √base_head_dim / head_dim. Default:
    head_dim, for models that have more heads instead (Megatron-LM's mup_base_head_dim)."""


class ModelSize(Section):
    """The size of the network."""

    architecture: Literal["gpt", "bert", "t5"] = "gpt"
    """gpt: causal language model. bert: bidirectional encoder, trained to predict masked tokens (data.masked_lm).
    t5: encoder and decoder, trained to restore spans of a text (data.span_corruption)."""
    num_layers: Annotated[int, Field(gt=0, le=10_000), INTEGER]
    """Number of transformer blocks, in t5 of the encoder."""
    num_decoder_layers: Annotated[int, Field(gt=0, le=10_000), INTEGER] | None = None
    """t5: number of blocks of the decoder. Default: num_layers."""
    hidden_size: Channels
    """Width of the residual stream."""


class ModelConfig(MlpKeys, AttentionKeys, ModelSize):
    """The network. The defaults are those of Llama; GPT-2 and Qwen differ in a few fields.

    The keys of attention and MLP are those of all layers, but for what layer_kinds and pattern say."""

    vocab_size: PositiveInt | None = None
    """Number of tokens in the vocabulary. Default: that of data.tokenizer."""
    vocab_multiple: PositiveInt = 128
    """The vocabulary is padded to a multiple of this, which must be divisible by parallel.tensor. It does not depend on
    the layout, so a checkpoint fits every layout."""
    max_position_embeddings: Tokens | None = None
    """Rows of the learned position table. Default: training.seq_length. With rope it has no effect but as the longest
    context in a conversion to Hugging Face."""
    relative_attention_num_buckets: PositiveInt = 32
    """relative: number of ranges of distances with a bias of their own."""
    relative_attention_max_distance: PositiveInt = 128
    """relative: distances from this on share a bias."""
    embedding_norm: bool = False
    """Normalize the embeddings before the first block (BLOOM, BERT)."""
    embedding_multiplier: PositiveFloat = 1.0
    """Embeddings are multiplied by this, rounded to training.precision (Granite; Gemma: √hidden_size)."""
    rope_local_theta: PositiveFloat | None = None
    """Base of the rotary frequencies in layers with a sliding window, which are not scaled (Gemma 3). Default: those of
    the other layers."""
    normalization: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    """rmsnorm (Llama) or layernorm (GPT-2)."""
    norm_weights: bool = True
    """Norms of the residual stream and of outputs multiply by learned weights. false: they only normalize (nanochat),
    with normalization: rmsnorm."""
    norm_eps: PositiveFloat = 1e-5
    """Added to the variance in norms."""
    norm_position: Literal["pre", "output", "both", "post"] = "pre"
    """Where attention and MLP, f, have their norms. pre: x + f(norm(x)) (Llama, GPT-2, Megatron-LM's BERT). output: x +
    norm(f(x)), before the addition (OLMo 2). both: x + norm(f(norm(x))), a sandwich (Gemma 2 and 3). post: norm(x +
    f(x)), after the addition, and no final norm (BERT, RoBERTa, with embedding_norm)."""
    zero_centered_gamma: bool = False
    """Norms multiply by 1 + weight instead of weight, so that weights are around zero, where bf16 is finest (Gemma;
    Megatron-LM's apply_layernorm_1p)."""
    linear_bias: bool = False
    """Add biases to all linear layers of the blocks (GPT-2), also to those of experts and routers (gpt-oss)."""
    tie_embeddings: bool = False
    """Share one weight between the output layer and the embedding."""
    token_types: Count = 0
    """Number of token types, each with a learned embedding that is added to the token's (type_vocab_size of BERT: 2,
    for the two parts of a pair of sentences)."""
    binary_head: bool = False
    """bert: also predict whether the two parts of a pair of sentences are in order, from the first token's output
    (Megatron-LM's bert_binary_head; BERT's next-sentence head; sentence-order prediction, Lan et al. 2019,
    arXiv:1909.11942). Samples are then pairs: data.packing must be sentences, and token_types at least 2."""
    transform_activation: Literal["gelu", "gelu_tanh"] | None = None
    """bert: the GELU before the output layer. RoBERTa and Megatron-LM have gelu, the exact one, beside any
    model.activation. Default: gelu_tanh with that model.activation, gelu with others."""
    full_attention_layers: list[Annotated[int, Quantity.LAYER]] = []
    """Layers, counted from 0, to which sliding_window does not apply (Qwen2, Gemma 2 and 3, gpt-oss)."""
    parallel_block: bool = False
    """Attention and MLP both read the block's input, and their outputs are added (GPT-J, PaLM)."""
    residual_multiplier: PositiveFloat = 1.0
    """What attention and MLP add to the residual stream is multiplied by this (Granite)."""
    layer_scalar: bool = False
    """Multiply the residual stream after each layer by a number of the layer, which belongs to the weights and is not
    trained (Gemma 4). It begins as 1."""
    logits_scaling: PositiveFloat = 1.0
    """Logits are divided by this (Granite); in t5 with tie_embeddings by √hidden_size besides."""
    logit_softcap: PositiveFloat | None = None
    """Logits become softcap · tanh(logit / softcap) (Gemma 2's final_logit_softcapping). Default: they do not."""
    per_layer_embedding: PerLayerEmbeddingConfig | None = None
    """Embeddings of tokens for each layer. Default: none."""
    latent_attention: LatentAttentionConfig | None = None
    """Multi-head latent attention. Default: none."""
    sparse_attention: SparseAttentionConfig | None = None
    """Latent attention to tokens that an indexer chooses. Default: to all earlier ones."""
    hyper_connections: HyperConnectionsConfig | None = None
    """Several residual streams, which layers mix. Default: one stream, to which layers add."""
    moe: MoeConfig | None = None
    """Experts instead of the MLP in some or all layers. Default: none."""
    layer_kinds: dict[str, LayerKind] = {}
    """Kinds of layers by name, each with the keys that differ from those of this section: {local: {mixer:
    {sliding_window: 4096}}, full: {}} (docs/layers.md). Needs pattern."""
    pattern: list[str] = []
    """Names of layer_kinds, of layer 0 and those after it, repeated up to num_layers. A name may have a count: ["dense
    * 3", "sparse * 58"]. Default: layers are alike but for sliding_window and moe."""
    mtp_num_layers: Annotated[int, Field(ge=0, le=64), INTEGER] = 0
    """Depths of multi-token prediction (DeepSeek-V3): depth d is one more block, which predicts the token d + 1 places
    ahead. They are the layers from num_layers on, like the last layer, and only train the model. 0: none."""
    mtp_loss_scaling_factor: NonNegative = 0.1
    """Weight of the mean of their losses in the loss that is differentiated."""
    hidden_dropout: Dropout = 0.0
    """Probability of dropout after the embedding, and on the output of attention and MLP before it is added to the
    residual stream, in training."""
    attention_dropout: Dropout = 0.0
    """Probability of dropout on attention probabilities, in training."""
    init_std: PositiveFloat = 0.02
    """Standard deviation of the initial weights. The output projections of a block use init_std / sqrt(2 ·
    num_layers)."""
    mup: MupConfig | None = None
    """Initial weights, learning rates and scales that suit any width. Default: the usual ones (docs/optimizers.md)."""

    @cached_property
    def spec(self) -> ModelSpec:
        """The network that these keys describe."""
        return resolve(self)


class ParallelConfig(Section):
    """Layout of the model over the ranks.

    The data-parallel size is the number of ranks divided by tensor × pipeline × context.
    """

    tensor: PositiveInt = 1
    """Tensor-parallel size: number of ranks over which each layer is split. Keep it within one NVLink domain."""
    pipeline: PositiveInt = 1
    """Pipeline-parallel size: number of ranks over which the model's blocks are divided."""
    virtual_pipeline: PositiveInt = 1
    """Number of stages (of consecutive blocks) that each pipeline rank holds. Default: the fewest that the schedule
    allows."""
    schedule: Annotated[UserPath, Field(examples=[*SCHEDULES])] = "1f1b"
    """Pipeline schedule: a built-in one (README has a table; one file each in megafp8/parallel/pipeline/schedules), the
    path of a .csv file with one row per rank and cells such as F3, B3, W3, F3.1 for micro-batch 3 and chunk 1, or
    module:function, called with placement and number of micro-batches. megafp8 plot-schedule draws them."""
    placement: Literal["loop", "v"] | None = None
    """Rank of each stage. loop: stage s is on rank s mod pipeline; v: down the ranks and back, so that the last stage
    is on the first rank. Default: that of the schedule, and loop for one of your own."""
    context: PositiveInt = 1
    """Context-parallel size: number of ranks over which each sequence is split, for sequences too long for one rank.
    Each rank holds two chunks, one from either end, and gathers the keys and values of the others. Weights are
    replicated."""
    expert: PositiveInt = 1
    """Expert-parallel size: number of ranks over which the experts of each layer are divided. Tokens travel to the
    ranks of their experts and back. These are neighbours among the data-, context- and tensor-parallel ranks of a
    pipeline stage, whose number it must divide (Megatron-Core's parallel folding): attention and experts have layouts
    of their own over the same ranks. Experts are not split over parallel.tensor."""
    expert_tensor: PositiveInt = 1
    """Expert tensor-parallel size: number of neighbouring ranks over which each expert is split. The experts of a layer
    are on expert × expert_tensor ranks, and tokens are gathered. For experts so wide, or so few, that expert alone does
    not fit the memory."""
    expert_dispatch: Literal["auto", "all_gather", "all_to_all"] = "auto"
    """How tokens get to the ranks of their experts (Megatron-LM's moe_token_dispatcher_type). all_gather: each rank
    gets all tokens of the expert × expert_tensor ranks, and their results are summed; CUDA graphs can hold it.
    all_to_all: a token is sent once for each of its experts. auto: all_gather for up to model.moe.top_k ranks, where it
    moves no more bytes."""
    sequence_parallel: bool = True
    """Split activations along the sequence between tensor-parallel regions. Saves memory at no cost. No effect if
    tensor is 1."""
    overlap_tensor: Literal["auto", "none", "symmetric"] = "auto"
    """Overlap of sequence-parallel communication with the layers' GEMMs (Megatron-LM's tp_comm_overlap). none: overlap
    only the reduction of input gradients with weight gradients. symmetric: overlap everything; GEMMs are split into up
    to four parts, which the GPUs' copy engines transfer. It needs GPUs of one host, falls back to none with a log
    message if it cannot be set up, and uses no NVLink multicast. auto: symmetric on CUDA. No effect if tensor is 1.
    Tokens that are gathered for experts travel likewise."""
    layers_per_stage: list[Integer] | Literal["balanced"] | None = None
    """Number of blocks in each of the pipeline × virtual_pipeline stages, first to last, e.g. [7, 8, 8, 7]. balanced:
    fewer blocks on the rank with the output layer, so that all ranks have equal work. Default: as even as possible."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Save activation memory by recomputing activations in backward. selective: recompute the outputs of the ops in
    recompute_ops. full: store only the input of each block and run its forward twice."""
    recompute_blocks: PositiveInt | None = None
    """Number of blocks per stage to recompute, starting from the first. Default: all."""
    recompute_ops: list[Literal["norms", "activation", "attention"]] = ["norms", "activation"]
    """Ops that selective recomputes. norms (Megatron-LM's layernorm) and activation (moe_act): inputs of linear layers
    are recomputed from tensors that norms and activations store anyway, at the cost of one elementwise pass. attention
    (core_attn): the attention output is recomputed, at the cost of its forward; useful only if the output projection is
    FP8."""
    offload: bool | PositiveInt = False
    """Copy activations to pinned host memory in forward and back in backward, overlapped with computation: of all
    blocks (true), or of this many blocks per stage, starting from the first. The last blocks are needed again at once,
    so leave them out. Needs as much host memory."""
    overlap_grad_reduce: bool = True
    """Reduce gradients over data-parallel ranks while backward still runs. With fsdp the reduction also overlaps with
    the next micro-batch, which takes memory for one more gradient of the size of the embedding; that between replicas
    overlaps with the last one's backward."""
    bucket_mib: Annotated[float, Field(gt=0, le=2**20), FLOAT] = 160.0
    """Minimum size of a gradient bucket, in MiB of fp32. Smaller buckets overlap earlier, larger ones communicate more
    efficiently."""
    zero: Literal[0, 1] = 0
    """ZeRO stage, 0 or 1. 1: each data-parallel rank stores the fp32 master weights and Adam state of its shard of the
    parameters only, updates that shard and gathers the others (Megatron-LM's distributed optimizer). The loss and the
    traffic are the same; 12 bytes per parameter become 12 / data-parallel size."""
    fsdp: bool = False
    """ZeRO stage 3, by torch's fully_shard: weights and gradients are sharded over data-parallel ranks too. The weights
    of a block are gathered before its forward and its backward, in FP8 with fp8.param_gather, and freed afterwards.
    Replaces zero; bucket_mib and overlap_param_gather have no effect. Gradients are reduced after each micro-batch, so
    prefer few large micro-batches. Experts are sharded over the ranks that hold the same ones. Not supported with CUDA
    graphs and schedules that split backwards."""
    fsdp_replicas: PositiveInt = 1
    """With fsdp: number of replicas of the shards (HSDP; torchtitan's data_parallel_replicate_degree). Weights,
    gradients and optimizer state are sharded over data-parallel × context-parallel size / fsdp_replicas neighbouring
    ranks, best those of one host, which gather weights and reduce gradients in each micro-batch. Between replicas only
    the sums of gradient shards travel, once a step. A rank holds fsdp_replicas times as much. Must divide
    data-parallel × context-parallel size, and the number of ranks that hold the same experts."""
    overlap_param_gather: bool = True
    """With zero 1: gather updated parameters while the next forward pass already runs."""

    @model_validator(mode="before")
    @classmethod
    def _fewest_stages_of_schedule(cls, keys: Any) -> Any:
        """Add virtual_pipeline where it is not given and the schedule needs several stages per rank."""
        schedule = SCHEDULES.get(str(keys.get("schedule"))) if isinstance(keys, dict) else None
        return keys if schedule is None else {"virtual_pipeline": schedule.least_chunks} | keys

    @property
    def expert_ranks(self) -> int:
        """Number of ranks over which the experts of a layer are divided, and each of them."""
        return self.expert * self.expert_tensor


class CustomRule(Section):
    """Recipes of the operands of some layers."""

    layers: Pattern
    """Pattern over layer names such as layers.0.attention.qkv. The first rule that matches a layer applies."""
    input: RecipeName
    """Recipe of the input activations."""
    weight: RecipeName
    """Recipe of the weight."""
    grad_output: RecipeName
    """Recipe of the output gradients."""


class Fp8Config(Section):
    """FP8 in the linear layers of the blocks. Embedding, output layer, norms and softmax use training.precision.

    Options whose description begins with names of recipes are errors with any other recipe, unless left at the default.
    """

    choices: ClassVar[tuple[str, ...]] = ("recipe",)
    recipe: Literal["none", RecipeName, "custom"] = "none"
    """How scales are computed. none: no FP8. delayed: one scale per tensor from its amax history. current: one scale
    per tensor from its current amax. rowwise: one scale per row of each operand. blockwise: one scale per 128
    neighbours, per 128 × 128 block of weights. static: given or calibrated scales. mxfp8: a power of two per 32
    neighbours. nvfp4: 4 bits, a scale per 16 neighbours. mxfp8 and nvfp4 are multiplied in bf16 with the same
    values, also on Blackwell, since megafp8 does not use its tensor cores for them. custom: by layer and operand."""
    format: Literal["hybrid", "e4m3"] | None = None
    """hybrid: E4M3 in forward, E5M2 for gradients. e4m3: E4M3 for both. Default: hybrid for delayed, current and
    static, else e4m3."""
    custom: list[CustomRule] = []
    """custom: list of rules such as {layers: "*.mlp.down", input: rowwise, weight: rowwise, grad_output: rowwise}. The
    first rule that matches a layer applies; layers that no rule matches are not FP8. The two operands of a GEMM must be
    compatible: delayed, current and static with each other, rowwise and blockwise each with itself only, mxfp8 and
    nvfp4 with any."""
    static_amax: dict[Pattern, PositiveFloat] = {}
    """static: the largest magnitude of a tensor, by pattern over names such as layers.0.mlp.down.input (.weight,
    .grad_output). The first match applies."""
    calibration_steps: Steps = 0
    """static: number of first steps in which layers with tensors that static_amax does not name run in high precision,
    to measure their amaxes; 20 is usual."""
    margin: Annotated[int, Field(ge=-64, le=64), INTEGER] = 0
    """delayed, static: divide scales by 2^margin, as headroom."""
    interval: PositiveInt = 1
    """delayed: steps between updates of the scales."""
    amax_history_len: PositiveInt = 1024
    """delayed: length of the amax history, in steps."""
    amax_compute_algo: Literal["max", "most_recent"] = "max"
    """delayed: which amax of the history determines the scale: the largest or the most recent."""
    power_of_two_scale: bool | None = None
    """delayed, current, rowwise, blockwise, static: round scales down to a power of two. Default: true for blockwise,
    else false."""
    amax_epsilon: NonNegative = 0.0
    """current, rowwise, blockwise: lower bound for amaxes."""
    override_linear_precision: tuple[bool, bool, bool] = (False, False, False)
    """Run (fprop, dgrad, wgrad) in high precision; [false, false, true] is usual with rowwise."""
    fast_accumulation: tuple[bool, bool, bool] = (True, False, False)
    """delayed, current, rowwise, static: use Hopper's fast accumulation in (fprop, dgrad, wgrad): faster, with fewer
    bits in the accumulator."""
    include: list[Pattern] = ["*"]
    """Layers that run in FP8: patterns over names such as layers.0.attention.qkv."""
    exclude: list[Pattern] = []
    """Layers that stay in high precision, e.g. ["layers.0.*", "*.mlp.down"]."""
    first_blocks_bf16: Count = 0
    """Number of blocks at the start of the model that stay in high precision."""
    last_blocks_bf16: Count = 0
    """Number of blocks at the end of the model that stay in high precision."""
    auto_filter: Literal["none", "predicted", "measured"] = "none"
    """Keep layers in training.precision that FP8 would slow down, because quantization costs more than the GEMMs gain.
    predicted: by a model of the GPU's speed (H200 only). measured: by timing a layer of each size before the first
    step. The size on one rank counts, so the choice depends on parallel.tensor. A resumed run keeps its choice."""
    param_gather: bool = False
    """With parallel.zero 1 or fsdp: each rank quantizes the shard of the weights that it updates, and ranks gather FP8
    data (Megatron-LM's fp8-param-gather). Halves the traffic and saves 2 bytes per parameter, with bit-identical
    losses. For recipes with one scale per weight: delayed, current, static; layers of custom with another recipe gather
    bf16, and so do the experts of a layer unless all have one scale per weight. The FP8 report then has no weights."""
    paired_wgrad: bool = False
    """Compute weight gradients of FP8 experts for two micro-batches at a time, where one kernel on a GPU computes all
    experts of a layer (one scale per tensor, or blockwise): fp32 sums are read and written half as often. Keeps one
    more micro-batch's operands of these GEMMs, in FP8. Experts whose weights parallel.fsdp shards are not affected."""
    report_interval: Count = 0
    """Steps between samples for the FP8 health report (quantization error of each tensor), fp8_report.jsonl in the run
    folder; 100 is usual. 0: no report."""
    gemm_backend: Literal["auto", "cublaslt", "scaled_mm", "emulated"] = "auto"
    """FP8 GEMM library. auto: on CUDA cublaslt if nvmath-python is installed, else scaled_mm; on CPU emulated, with the
    same FP8 values and fp32 products."""
    gemm_autotune: bool | None = None
    """cublaslt: time the algorithms for each shape once and store the fastest in the user's cache folder. Runs are
    bit-identical only if they use the same choices. Default: true unless deterministic."""

    @classmethod
    def options(cls, choice: str, values: Mapping[str, Any]) -> Collection[str]:
        from megafp8.numerics.recipes import RECIPES, keys_of, per_tensor_keys_of  # needs torch

        recipe, rules = values.get("recipe", "none"), values.get("custom") or ()
        if recipe == "none":  # the section is off, whatever is in it
            return cls.model_fields.keys() - per_tensor_keys_of(RECIPES)
        named = [value for rule in rules if isinstance(rule, dict) for value in rule.values()]
        names = {recipe, *(named if recipe == "custom" else ())} & RECIPES.keys()
        return keys_of(names) | per_tensor_keys_of(names)


class LossScaleConfig(Section):
    """Dynamic loss scale of fp16 training, with Megatron-LM's meaning. The loss is multiplied by it before backward, so
    that small gradients are not lost. A step with gradients that are not finite is skipped."""

    initial_scale: PositiveFloat = 2.0**32
    """Scale of the first step (initial_loss_scale)."""
    growth_interval: PositiveInt = 1000
    """The scale is doubled after so many consecutive steps with finite gradients (loss_scale_window)."""
    hysteresis: PositiveInt = 2
    """Number of steps with gradients that are not finite, since the scale was doubled last, before it is halved in each
    of them."""
    min_loss_scale: PositiveFloat = 1.0
    """The scale is never halved to less than this. Equal to initial_scale, with a long growth_interval: a constant
    scale."""


class EvaluateConfig(Section):
    """Sample texts and tasks of lm-evaluation-harness by a GPT model while it trains. They do not change the
    training."""

    interval: PositiveInt
    """Steps between evaluations; the last step is evaluated too."""
    prompts: list[str] = []
    """Texts to continue, which go to the log and to samples.jsonl in the run folder. An empty one begins a document;
    not with data.reset_at_documents, where nothing is before a document."""
    max_tokens: PositiveInt = 64
    """Tokens that continue a prompt, at most. A text ends where the model has no more positions, too."""
    temperature: NonNegative = 0.0
    """Of the choice of tokens. 0: the most probable one."""
    tasks: list[str] = []
    """Names or patterns of tasks of lm-evaluation-harness (extra eval). Their metrics are
    eval/<task>/<metric>."""
    include_path: UserPath | None = None
    """Folder with YAML files of more tasks."""
    limit: PositiveInt | None = None
    """Questions of each task, from the first. Default: all."""


class TrainingConfig(Section):
    """Length, batch size and precision of the training."""

    choices: ClassVar[tuple[str, ...]] = ("precision",)
    steps: Annotated[PositiveInt, Quantity.STEPS]
    """Number of optimizer steps in the whole run. Also the length of the learning-rate schedule, unless
    optimizer.decay_until is given."""
    stop_after: Annotated[PositiveInt, Quantity.STEPS] | None = None
    """Save and stop after this step, counted from the beginning of the run. Changes nothing else: the same command
    without it continues as if the run had not stopped. Default: training.steps."""
    seq_length: Tokens
    """Number of tokens in a sample, in t5 of the encoder's."""
    decoder_seq_length: PositiveInt | None = None
    """t5: number of tokens of the decoder's samples. Default: as many as the spans need, rounded up to a multiple of
    64."""
    micro_batch_size: PositiveInt = 1
    """Number of samples in one forward pass of a rank."""
    global_batch_size: PositiveInt
    """Number of samples in an optimizer step, over all ranks and micro-batches."""
    precision: Literal["bf16", "fp16", "fp32", "fp64"] = "bf16"
    """Dtype of weights and activations outside FP8. Master weights, gradients and Adam state are fp32 (see
    optimizer.moments_dtype). fp16 has 3 more bits than bf16 and a far smaller range, so the loss is scaled
    (loss_scale). fp64 is for comparing layouts without rounding noise: what is fp32 otherwise is float64 then, and
    gradients below 1e-12 of their norm are zero."""
    loss_scale: LossScaleConfig = LossScaleConfig()
    """Dynamic loss scale, with precision fp16."""
    cuda_graphs: bool | Literal["auto"] = "auto"
    """Record the forward and backward passes of a step, with their communication, as a CUDA graph and replay it, so
    that the GPU never waits for the host. The loss is the same. auto: wherever a graph can hold them; not on a CPU, nor
    with parallel.offload or experts whose sizes the host reads. true: an error there
    (docs/decisions/0011-cuda-graphs.md)."""
    gc_interval: Count = 100
    """Steps between runs of Python's garbage collector, which all ranks run after the same step so that none waits for
    another. 0: automatic collection."""
    z_loss: NonNegative = 0.0
    """Weight of log²Z of the output layer in the loss that is differentiated; 1e-4 is usual. Reported losses do not
    contain it: it is the metric z_loss."""
    eval_interval: Count = 0
    """Steps between evaluations of the loss on data for validation. 0: none."""
    eval_steps: PositiveInt = 10
    """Number of global batches in an evaluation, of each set of data.validation too."""
    evaluate: EvaluateConfig | None = None
    """Sample texts and tasks while training. Default: none."""
    max_skipped_steps: Count = 10
    """End the run with an error after this many consecutive skipped steps. A step is skipped if its gradients are not
    finite: weights and optimizer state stay unchanged. In fp16, not before the loss scale is loss_scale.min_loss_scale.
    0: no limit."""
    consistency_check_interval: Count = 100
    """Steps between checks that ranks which must hold equal weights, optimizer state and FP8 scales do, bit for bit; if
    they do not, the run ends with an error that names the rank. Also checked before the first step, before each save,
    and when steps are skipped. 0: never."""

    @classmethod
    def options(cls, choice: str, values: Mapping[str, Any]) -> Collection[str]:
        return ("loss_scale",) if values.get("precision") == "fp16" else ()

    @property
    def last_step(self) -> int:
        """The step after which the run ends or stops."""
        return min(self.steps, self.stop_after or self.steps)


class TokenizerConfig(Section):
    """The tokenizer that the data was preprocessed with."""

    choices: ClassVar[tuple[str, ...]] = ("kind",)
    kind: Literal["sentencepiece", "huggingface", "tiktoken", "bytes"]
    """Library that reads it."""
    path: UserPath | None = None
    """Model file, a folder with one, or a name of the Hugging Face Hub (org/name); for huggingface a tokenizer.json, or
    a vocab.json with merges.txt beside it; for tiktoken the name of an encoding or a ranks file; none for bytes."""
    end_token: str | None = None
    """Token that ends a document, such as "<|im_end|>". Default: the special token that the tokenizer's files state:
    eos_token of tokenizer_config.json or special_tokens_map.json, else a single eos_token_id of generation_config.json,
    else the eos of a sentencepiece model or <|endoftext|> of a tiktoken encoding. Data must be preprocessed with it."""
    pattern: str | None = None
    """Regular expression that splits text before tokens are merged, for a tiktoken ranks file. Default: the value of
    pat_str in tokenization_*.py in the same folder, which is parsed and not run."""
    add_bos_token: bool | None = None
    """Whether each document begins with the tokenizer's beginning token. Default: true if the post-processor of
    tokenizer.json puts one before a text, or add_bos_token of tokenizer_config.json is true."""

    @classmethod
    def options(cls, choice: str, values: Mapping[str, Any]) -> Collection[str]:
        usual = ("path", "end_token", "add_bos_token")
        by_kind: dict[str, tuple[str, ...]] = {"bytes": (), "tiktoken": (*usual, "pattern")}
        return by_kind.get(values.get(choice, ""), usual)


class SpecialTokens(Section):
    """Ids of tokens that the data sets do not contain. Default of each: the token of that name of data.tokenizer."""

    cls: Count | None = None
    """Begins a sample. Default: [CLS] or <s>."""
    sep: Count | None = None
    """Ends a sample, and each part of a pair of sentences. Default: [SEP] or </s>."""
    mask: Count | None = None
    """Replaces tokens that are to be predicted. Default: [MASK] or <mask>."""
    pad: Count | None = None
    """Fills a sample up, and begins that of t5's decoder. Default: [PAD] or <pad>."""
    sentinels: list[Count] | None = None
    """t5: ids of the tokens that mark spans, from the first span on. Default: <extra_id_0>, <extra_id_1> and so on; if
    the tokenizer has none, the last ids below model.vocab_size that it does not use, from the end."""


class MaskedLmConfig(Section):
    """Masked tokens of a model whose architecture is bert (Devlin et al. 2018, arXiv:1810.04805)."""

    probability: Annotated[float, Field(gt=0, lt=1), FLOAT] = 0.15
    """Share of a sample's tokens that are predicted (Megatron-LM's mask_prob). Of these 80% are replaced by the mask
    token, 10% by a random token, and 10% are left as they are."""
    whole_words: bool = False
    """Choose all tokens of a word or none (whole-word masking; Megatron-LM masks so). Words begin where the pieces of
    the tokenizer say so: no ## in WordPiece, a leading ▁ in sentencepiece, a leading space in byte-level BPE."""


class SpanCorruptionConfig(Section):
    """Spans of a text that a model whose architecture is t5 restores (Raffel et al. 2019, arXiv:1910.10683)."""

    noise_density: Annotated[float, Field(gt=0, lt=1), FLOAT] = 0.15
    """Share of a text's tokens that are in spans."""
    mean_span_length: Annotated[float, Field(ge=1), FLOAT, IN_FP32] = 3.0
    """Mean number of tokens of a span."""

    def lengths(self, text: int) -> tuple[int, int]:
        """Tokens in spans, and number of spans, of a text."""
        noise = min(max(round(text * self.noise_density), 1), text - 1)
        return noise, min(max(round(noise / self.mean_span_length), 1), text - noise)

    def text_length(self, inputs: int) -> int:
        """Tokens of the longest text whose corrupted form, with a sentinel for each span and an end, fits `inputs`.

        `inputs` is at least 3. As `random_spans_helper` of seqio (Raffel et al.): a text of `inputs` - 1 tokens always
        fits, since no span is empty, and the corrupted form of a longer text is never shorter.
        """
        text = inputs - 1
        while True:
            noise, spans = self.lengths(text + 1)
            if text + 1 - noise + spans + 1 > inputs:
                return text
            text += 1


class ObjectiveConfig(Section):
    """What a model is trained to predict (`megafp8.objectives`), where it is not what its architecture says."""

    def problems(self, config: Config) -> Iterator[Problem]:
        """The rules that `config`, which has this section, breaks."""
        raise NotImplementedError


class PrefixLmConfig(ObjectiveConfig):
    """Prefixes of samples: tokens that see each other in both directions, and that the model does not predict (Raffel
    et al. 2019, arXiv:1910.10683; GLM; UL2's S-denoising). The length of a sample's prefix is drawn at random, all
    lengths from min_length to max_length being equally likely."""

    min_length: Tokens = 1
    """Tokens of the shortest prefix. 1: that sample is one of plain next-token prediction."""
    max_length: Tokens | None = None
    """Tokens of the longest prefix; that of min_length for prefixes of one length. Default: training.seq_length, of
    which only the token after it is predicted."""

    def problems(self, config: Config) -> Iterator[Problem]:
        m, d, s = config.model, config.data, config.training.seq_length
        where, off = "data.prefix_lm is set, and", "or leave data.prefix_lm out"
        if m.architecture != "gpt":
            rule = f"{where} a prefix is for models that predict the next token"
            yield Problem("model.architecture", m.architecture, rule, f"try gpt, {off}")
            return
        mixers = {f"model.layer_kinds.{name}.mixer": kind.mixer for name, kind in m.layer_kinds.items()}
        for path, part in {"model": m, **mixers}.items():
            window = getattr(part, "sliding_window", None)
            if window is not None:
                rule = f"{where} all tokens attend to the whole prefix, which a window would not show them"
                yield Problem(f"{path}.sliding_window", window, rule, f"leave it out, {off}")
            if getattr(part, "position_embedding", None) == "alibi":
                rule = (
                    f"{where} its tokens attend to later ones, while scores of ALiBi fall with the distance to earlier "
                    "ones"
                )
                yield Problem(f"{path}.position_embedding", "alibi", rule, f"try rope, {off}")
        if m.mtp_num_layers:
            rule = f"{where} a token of the prefix would see the embedding of a token that it is to predict"
            yield Problem("model.mtp_num_layers", m.mtp_num_layers, rule, f"try 0, {off}")
        if d.reset_at_documents:
            rule = f"{where} a sample has one prefix, which only its first documents would see"
            yield Problem("data.reset_at_documents", True, rule, f"try false, {off}")
        longest = self.max_length or s
        if longest > s:
            rule = f"training.seq_length is {s}, and a prefix leaves at least one label to predict"
            yield Problem("data.prefix_lm.max_length", longest, rule, f"try {s} or less")
        if self.min_length > longest:
            rule = f"longer than the longest prefix ({longest})"
            yield Problem("data.prefix_lm.min_length", self.min_length, rule, f"try {min(longest, s)} or less")


class FillInTheMiddleConfig(ObjectiveConfig):
    """Documents rearranged so that a span comes after what is on both of its sides (Bavarian et al. 2022,
    arXiv:2207.14255), each at a place drawn at random. Three tokens of a document give way to the marks."""

    rate: Annotated[float, Field(gt=0, le=1), FLOAT] = 0.5
    """Share of the documents of a sample that are rearranged."""
    spm_rate: Annotated[float, Field(ge=0, le=1), FLOAT] = 0.5
    """Share of these whose suffix comes before their prefix."""
    prefix: Count | None = None
    """Id of the mark before the prefix. Default: <|fim_prefix|>, <fim_prefix> or ▁<PRE> of data.tokenizer."""
    middle: Count | None = None
    """Id of the mark before the middle. Default: likewise, <|fim_middle|>, <fim_middle> or ▁<MID>."""
    suffix: Count | None = None
    """Id of the mark before the suffix. Default: likewise, <|fim_suffix|>, <fim_suffix> or ▁<SUF>."""

    def problems(self, config: Config) -> Iterator[Problem]:
        where, off = "data.fill_in_the_middle is set, and", "or leave data.fill_in_the_middle out"
        if config.model.architecture != "gpt":
            rule = f"{where} rearranged documents are for models that predict the next token"
            yield Problem("model.architecture", config.model.architecture, rule, f"try gpt, {off}")
        if config.data.loss_on is not None:
            rule = f"{where} the loss mask is of documents as they are"
            yield Problem("data.loss_on", config.data.loss_on, rule, f"leave it out, {off}")


class DpoConfig(ObjectiveConfig):
    """Direct preference optimization (Rafailov et al. 2023, arXiv:2305.18290) of pairs of answers, of which one is
    preferred, as megafp8 preprocess --style preference writes them. The loss of a pair is
    -log sigmoid(beta · ((log p(chosen) - log p_ref(chosen)) - (log p(rejected) - log p_ref(rejected)))), its mean is
    over the pairs of the global batch, and p_ref is the model that the run begins with. Pairs that are longer than a
    sample are left out."""

    beta: PositiveFloat = 0.1
    """How much a difference from the reference model counts; the larger, the closer the model stays to it."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5), FLOAT] = 0.0
    """Probability that a pair is labelled the wrong way round (conservative DPO)."""
    reference: Literal["live", "precomputed"] = "live"
    """Where log-probabilities under the reference model come from. live: each step computes them, with lora by the
    model without its adapters, else by a second, frozen copy of the initial weights in the same layout, in
    training.precision. precomputed: a run that begins computes those of all pairs and writes them beside the data,
    <prefix>.reference-<digest of the weights>.npz; a later run from the same weights reads them."""

    def problems(self, config: Config) -> Iterator[Problem]:
        m, d, where = config.model, config.data, "data.dpo is set, and"
        off = "or leave data.dpo out"
        if m.architecture != "gpt":
            rule = f"{where} it needs the probability of each token after those before it"
            yield Problem("model.architecture", m.architecture, rule, f"try gpt, {off}")
            return
        if d.loss_on is not None:
            yield Problem("data.loss_on", d.loss_on, f"{where} its loss is on answers alone", "leave it out")
        if d.packing != "best_fit":
            rule = f"{where} other ways to pack part the answers of a pair"
            yield Problem("data.packing", d.packing, rule, f"try best_fit, {off}")
        yield from plain_loss_problems(config, where)
        if config.stages:
            rule = f"{where} the reference is the model that the run begins with, not a later stage"
            yield Problem("stages", "set", rule, "make each stage a run of its own, by checkpoint.init_from")
        remote = next((path for path in (*d.train, *d.validation.values()) if "://" in path), None)
        if self.reference == "precomputed" and remote is not None:
            rule = f"{where} log-probabilities are written beside the data, but {remote} is in object storage"
            yield Problem("data.dpo.reference", self.reference, rule, "try live, or copy the data to a disk")


class DistillationConfig(ObjectiveConfig):
    """Learn the distribution of the next token that a larger model, the teacher, gives (Hinton et al. 2015,
    arXiv:1503.02531), from its logits in each step. The loss of a token is
    weight · temperature² · KL(teacher ‖ student) + (1 - weight) · cross entropy, both distributions of the divergence
    being softmax(logits / temperature). Which tokens count is as without a teacher (loss_on, mask_eod_loss)."""

    teacher: UserPath
    """Model with the vocabulary of the run: a Hugging Face folder, the folder of a run, or a checkpoint. It is loaded
    as a frozen model in the run's layout, in training.precision."""
    logits: Literal["live", "precomputed"] = "live"
    """Where the teacher's logits come from. live: each step computes them. precomputed: a run that begins computes
    those of all tokens, in its own layout, and writes the top_k largest beside the data,
    <prefix>.teacher-<digest>.npy; later runs with the same teacher, data and top_k read them, in any layout."""
    weight: Annotated[float, Field(gt=0, le=1), FLOAT] = 1.0
    """Share of the divergence in the loss; the rest is that of the cross entropy of labels."""
    temperature: PositiveFloat = 1.0
    """Divides logits of teacher and student in the divergence."""
    top_k: PositiveInt | None = None
    """Tokens that the teacher's distribution is cut to, its likeliest ones, and normalized again. Default: all tokens.
    Logits of all micro-batches of a step are held, of the whole vocabulary or of these tokens."""

    def problems(self, config: Config) -> Iterator[Problem]:
        m, where, off = config.model, "data.distillation is set, and", "or leave data.distillation out"
        if m.architecture != "gpt":
            rule = f"{where} its teacher predicts the next token"
            yield Problem("model.architecture", m.architecture, rule, f"try gpt, {off}")
            return
        if self.top_k is not None and m.vocab_size is not None and self.top_k > m.vocab_size:
            rule = f"model.vocab_size is {m.vocab_size}"
            yield Problem("data.distillation.top_k", self.top_k, rule, "leave it out, for the whole vocabulary")
        yield from plain_loss_problems(config, where)
        if self.logits == "precomputed":
            yield from self._precomputed_problems(config)

    def _precomputed_problems(self, config: Config) -> Iterator[Problem]:
        """A token's logits must be the same in all epochs, and have a place beside the data."""
        d, where = config.data, "data.distillation.logits is precomputed, and"
        if self.top_k is None:
            rule = f"{where} logits of the whole vocabulary are too many to keep"
            yield Problem("data.distillation.top_k", None, rule, "try 64")
        if d.packing != "best_fit":
            rule = f"{where} other ways to pack give a token another context in each epoch"
            yield Problem("data.packing", d.packing, rule, "try best_fit, or data.distillation.logits=live")
        if config.stages:
            rule = f"{where} a later stage cuts long documents at other places"
            yield Problem("stages", "set", rule, "make each stage a run of its own, by checkpoint.init_from")
        path = next((path for path in (*d.train, *d.validation.values()) if "://" in path), None)
        path = d.text[0][1] if path is None and d.text else path
        if path is not None:
            rule = f"{where} logits are written beside the data, but {path} is text, or in object storage"
            yield Problem("data.distillation.logits", self.logits, rule, "try live, or preprocessed data on a disk")


class GrpoConfig(ObjectiveConfig):
    """Group relative policy optimization (Shao et al. 2024, arXiv:2402.03300). In each step the model continues prompts
    of data.train, JSON lines with a prompt and what the reward needs, group_size texts of each; each text gets a
    reward, and becomes more likely if that is above the mean of its group, less likely if it is below.
    training.global_batch_size is the number of texts; as many samples as they fill are trained, at most so many."""

    reward: UserPath | None = None
    """Python function that rates texts, module:function or path.py:function. It is called with prompts, as the data has
    them, and completions, which are texts, both lists, and with a list of each other key of their records that all of
    them have; it returns a number for each. Either this or reward_command."""
    reward_command: list[UserPath] | None = Field(None, min_length=1)
    """Program that rates texts, with its arguments. It reads a JSON line of each text from stdin, the record with
    completion, and writes a number for each to stdout, one a line. It is started in each step."""
    reward_seconds: PositiveFloat = 600.0
    """The longest time of reward_command in a step."""
    prompt_key: str = "prompt"
    """Key of a record that has the prompt: a text, or a list of messages, which the tokenizer's chat template renders
    up to where the assistant answers."""
    group_size: Annotated[PositiveInt, Field(ge=2)] = 8
    """Texts of each prompt."""
    max_tokens: PositiveInt = 256
    """The most tokens of a text after its prompt."""
    temperature: Annotated[PositiveFloat, Field(ge=1e-4)] = 1.0
    """Divides logits, in sampling and in the log-probabilities that are trained."""
    beta: NonNegative = 0.0
    """Weight of the divergence from the model that the run begins with. 0: none, and no such model in memory."""
    clip_low: Annotated[float, Field(gt=0, lt=1), FLOAT] = 0.2
    """How far below 1 the ratio of a token's probability in training to that in sampling counts."""
    clip_high: PositiveFloat = 0.2
    """How far above 1 it counts."""
    texts_at_once: PositiveInt = 64
    """Texts that a model generates at once; their cache is in memory while it does."""

    def problems(self, config: Config) -> Iterator[Problem]:
        m, d, t, where, off = (
            config.model,
            config.data,
            config.training,
            "data.grpo is set, and",
            "or leave data.grpo out",
        )
        if m.architecture != "gpt":
            rule = f"{where} only models of architecture gpt continue a text"
            yield Problem("model.architecture", m.architecture, rule, f"try gpt, {off}")
            return
        yield from self._data_problems(d, where, off)
        if t.global_batch_size % self.group_size:
            rule = f"{where} it is a number of texts, not a multiple of data.grpo.group_size ({self.group_size})"
            works = f"try {-(-t.global_batch_size // self.group_size) * self.group_size}"
            yield Problem("training.global_batch_size", t.global_batch_size, rule, works)
        if self.max_tokens >= t.seq_length:
            rule = f"leaves no room for a prompt in training.seq_length ({t.seq_length})"
            yield Problem(
                "data.grpo.max_tokens", self.max_tokens, rule, f"try {max(1, t.seq_length // 2)}, or longer samples"
            )
        if (self.reward is None) == (self.reward_command is None):
            rule = "texts get their rewards from either of data.grpo.reward and data.grpo.reward_command"
            yield Problem("data.grpo.reward", self.reward, rule, "give one of them, such as reward=rewards.py:exact")
        elif self.reward is not None and not re.fullmatch(r".+:[A-Za-z_]\w*", self.reward):
            rule = "names no function"
            yield Problem("data.grpo.reward", self.reward, rule, "try module:function or path.py:function")
        yield from plain_loss_problems(config, where)
        if t.eval_interval:
            rule = f"{where} prompts have no loss to evaluate"
            yield Problem("training.eval_interval", t.eval_interval, rule, "try 0; training.evaluate works")
        if config.resilience.loss_spike is not None:
            rule = f"{where} its loss says nothing about a step: that of advantages is 0 in the mean"
            yield Problem("resilience.loss_spike", "set", rule, "leave it out")
        if config.parallel.schedule.endswith(".csv"):
            rule = f"{where} steps have as many micro-batches as their texts fill, and a table is for one number"
            yield Problem("parallel.schedule", config.parallel.schedule, rule, "name a schedule, or a function")
        if config.stages:
            yield Problem("stages", "set", f"{where} stages are not offered for it", "leave them out")

    def _data_problems(self, d: DataConfig, given: str, off: str) -> Iterator[Problem]:
        if d.tokenizer is None:
            yield Problem("data.tokenizer", None, f"{given} prompts are texts", "set it")
        if d.loss_on is not None:
            yield Problem("data.loss_on", d.loss_on, f"{given} its loss is on sampled tokens alone", "leave it out")
        if d.packing != "best_fit":
            rule = f"{given} texts are whole, several a sample"
            yield Problem("data.packing", d.packing, rule, f"try best_fit, {off}")
        if len(d.train) > 1:
            rule = f"{given} prompts are of one entry"
            yield Problem("data.train", [*d.train], rule, "give one: a folder or a pattern names several files")
        for path in d.train:
            if not is_text(path) or "://" in path:
                rule = f"{given} {path} names no files of JSON lines on disk"
                yield Problem("data.train", path, rule, f"give prompts, such as prompts.jsonl, {off}")
        if d.validation:
            rule = f"{given} prompts have no loss to evaluate"
            yield Problem("data.validation", [*d.validation], rule, "leave it out")


def plain_loss_problems(config: Config, given: str) -> Iterator[Problem]:
    """Refuse settings that need the cross entropy of labels as the loss; `given`: what makes the loss another."""
    m, t, r = config.model, config.training, config.resilience
    if m.mtp_num_layers:
        rule = f"{given} multi-token prediction has a loss of its own"
        yield Problem("model.mtp_num_layers", m.mtp_num_layers, rule, "try 0")
    if t.z_loss:
        yield Problem("training.z_loss", t.z_loss, f"{given} its loss has no z-loss", "try 0")
    if r.replicas is not None:
        yield Problem("resilience.replicas", "set", f"{given} replicas are not offered for it", "leave it out")


class StreamsConfig(Section):
    """Text of data.train and data.validation that is tokenized while the run trains (docs/own-data.md)."""

    text_key: str = "text"
    """Key of JSON lines, or column of parquet, that holds the text."""
    canonical_streams: PositiveInt | None = None
    """Number of streams that documents are dealt to; sample i is of stream i mod this number. It decides the order of
    samples, so it stays as it was when the run began. A multiple of training.micro_batch_size times the data-parallel
    size. Default: training.global_batch_size when the run began, which is one in every layout."""
    skip_errors: bool = False
    """Leave out documents that cannot be read or tokenized, and log the first ones and their number. Default: False,
    so that the run ends at such a document."""


class ObjectCacheConfig(Section):
    """Local cache of data sets in object storage (docs/object-storage.md), which processes and runs may share."""

    folder: UserPath | None = None
    """Folder on local disk. Default: in the user's cache folder."""
    limit_gib: PositiveFloat = 64.0
    """Largest size of all blocks in it; those that were not read for the longest time are deleted. The .idx files come
    on top. If there is room for all .bin files, each node downloads them once."""
    block_mib: PositiveFloat = 4.0
    """Size of the blocks of .bin files that are downloaded. Smaller ones cost less where the cache has no room for all
    of the data, as shuffled documents use only a part of each."""


_TEXT_SUFFIXES = (".json", ".jsonl", ".ndjson", ".txt", ".parquet")
_COMPRESSIONS = (".gz", ".zst", ".bz2", ".xz")


def is_text(path: str) -> bool:
    """Whether an entry of data.train is text, and no prefix of .bin/.idx files: by its name, or as it is a folder."""
    name = path
    for suffix in _COMPRESSIONS:
        name = name.removesuffix(suffix)
    if name.endswith((*_TEXT_SUFFIXES, "/")) or any(x in path for x in "*?[") or path.startswith("hf://"):
        return True
    return "://" not in path and Path(path).is_dir() and not Path(f"{path}.idx").exists()


class DataConfig(Section):
    """Data sets and their tokenizer."""

    train: list[UserPath] | dict[UserPath, PositiveFloat] = Field(min_length=1)
    """Prefixes of .bin/.idx files, or text that is tokenized while the run trains (docs/own-data.md): JSON lines,
    parquet and plain text, compressed or not, folders and patterns of these such as corpus/*.jsonl.zst. Both are paths
    or URLs such as s3://bucket/corpus; text may be at hf://datasets/org/name. A list weights data sets by their number
    of training tokens (of samples if packing is best_fit), so that all finish an epoch at the same time; a blend
    {prefix: weight} sets their shares of the samples, in any unit. A prefix that is listed twice counts twice. When a
    run resumes, weights may change and data sets may be added or removed: each continues with the samples that it has
    not given."""
    packing: Literal["concatenate", "best_fit", "sentences"] = "concatenate"
    """How documents fill samples. concatenate: shuffled documents one after the other, cut where a sample ends.
    best_fit: each document whole in one sample, by best-fit decreasing; only those longer than a sample are cut, and
    the rest of a sample is padding without loss. A run logs the share of padding, well below 1% with many short
    documents, and the share of documents that are cut in either way. Requires reset_at_documents and mask_eod_loss.
    sentences: a run of sentences of one document, as many as fit, the rest padding; for data sets of
    megafp8 preprocess --split-sentences, and models with model.binary_head."""
    validation: dict[Name, UserPath] = {}
    """Data sets for validation by name, {name: prefix of .bin/.idx files, or text}: all their documents, apart from
    those that split takes from training data. The loss of each is the metric valid/<name>. They may change when a run
    resumes."""
    validation_by_source: bool = False
    """Also measure the validation loss of each data set of data.train, on its documents for validation (split): the
    metric valid/<the last part of its prefix>, or valid/<prefix> where several have the same."""
    split: str = "969,30,1"
    """Proportions of the documents of data.train for training, validation and test."""
    restart_changed: bool = False
    """When a run resumes, a data set whose files, documents (split) or packing have changed is an error. true: count
    its samples from 0 instead. Unchanged data sets always continue."""
    tokenizer: TokenizerConfig | None = None
    """Required if model.vocab_size is not given; otherwise only checked against the data."""
    reset_at_documents: bool = False
    """Reset attention and positions at each document boundary in a sample. Documents are those of the data set,
    whatever tokens they end with or hold."""
    mask_eod_loss: bool = False
    """Exclude the first token of each document from the loss."""
    prefix_lm: PrefixLmConfig | None = None
    """With model.architecture gpt: train as a prefix language model. Default: each token sees earlier ones only."""
    fill_in_the_middle: FillInTheMiddleConfig | None = None
    """With model.architecture gpt: rearrange documents, for models that complete text between other text, such as code.
    Default: documents are as they are."""
    dpo: DpoConfig | None = None
    """With model.architecture gpt: learn which of two answers is preferred. Default: learn what texts say."""
    distillation: DistillationConfig | None = None
    """With model.architecture gpt: learn from the logits of a teacher. Default: learn from texts alone."""
    grpo: GrpoConfig | None = None
    """With model.architecture gpt: learn from rewards of texts that the model samples. Default: learn from texts."""
    loss_on: Literal["answers", "all"] | None = None
    """Required for data sets with a loss mask, such as chats. answers: only tokens that the mask names are learned, the
    answers of chats and completions of prompts; the loss is their mean over the global batch. all: all tokens are.
    Requires packing best_fit. Default: data sets have no loss mask."""
    special_tokens: SpecialTokens = SpecialTokens()
    """Ids of special tokens, where the tokenizer does not define them."""
    masked_lm: MaskedLmConfig = MaskedLmConfig()
    """Masked tokens, with model.architecture bert."""
    span_corruption: SpanCorruptionConfig = SpanCorruptionConfig()
    """Spans to restore, with model.architecture t5."""
    num_workers: Annotated[int, Field(ge=0, le=1024), INTEGER] = 0
    """Number of loader processes per rank, or of processes that tokenize text. 0 loads in the training process.

    0 is enough for files on local disk. Loader processes pay where samples wait for storage or take work to make.
    """
    streams: StreamsConfig = StreamsConfig()
    """Text that is tokenized while the run trains."""
    index_cache: UserPath | None = None
    """Folder on local disk for sample indices. Default: in the user's cache folder."""
    object_cache: ObjectCacheConfig = ObjectCacheConfig()
    """Where data sets in object storage are kept on local disk."""

    @field_validator("train", mode="wrap")
    @classmethod
    def _keep_every_data_set(cls, train: Any, validate: Callable[[Any], Any]) -> Any:
        """Refuse a blend of which two keys become one path when `~` is replaced."""
        validated = validate(train)
        if len(validated) < len(train):
            raise PydanticCustomError("one_path", "Two of its keys are one path, as ~ is the home folder")
        return validated

    @property
    def text(self) -> list[tuple[str, str]]:
        """Key and path of each data set that is tokenized while the run trains."""
        named = [("data.train", path) for path in self.train]
        named += [(f"data.validation.{name}", path) for name, path in self.validation.items()]
        return [(key, path) for key, path in named if is_text(path)]

    @property
    def has_loss_mask(self) -> bool:
        """Whether data sets have a loss mask."""
        return self.loss_on is not None or self.dpo is not None

    @property
    def compares(self) -> bool:
        """Whether each step compares the model with a frozen one."""
        sources = (self.distillation and self.distillation.logits, self.dpo and self.dpo.reference)
        return "live" in sources or (self.grpo is not None and self.grpo.beta > 0)

    @property
    def objectives(self) -> dict[str, ObjectiveConfig]:
        """By key, the sections of objectives that are given."""
        values = {name: getattr(self, name) for name in type(self).model_fields}
        return {name: value for name, value in values.items() if isinstance(value, ObjectiveConfig)}


LoraTarget = Literal["q", "k", "v", "q_up", "kv_up", "proj", "gate", "up", "down"]


class LoraConfig(Section):
    """Low-rank adaptation (arXiv:2106.09685): y = x Wᵀ + alpha / rank · (x Aᵀ) Bᵀ; only A and B are trained."""

    rank: PositiveInt = 16
    """Rows of A, and columns of B."""
    alpha: PositiveFloat = 32.0
    """The product of A and B is multiplied by alpha / rank."""
    targets: Annotated[list[LoraTarget], Field(min_length=1)] | None = None
    """Projections of each block that are adapted: queries, keys, values and output of attention, or with latent
    attention q_up (q without a query latent), kv_up and proj; gate, up and down of the MLP. Default: all that the model
    has. Of a model with experts those of attention only."""


class CheckpointConfig(Section):
    """Saving and resuming."""

    folder: UserPath | None = None
    """Checkpoints are in <folder>/<name>; a path, or a URL of object storage such as s3://bucket/checkpoints. Default:
    in the run folder."""
    interval: Count = 0
    """Steps between checkpoints. 0: save only at the end and on SIGTERM or Ctrl-C. If a step was skipped, the next step
    that is not is saved instead."""
    keep_last: PositiveInt | None = None
    """Number of newest complete checkpoints to keep. Default: all."""
    keep_every: PositiveInt | None = None
    """Of older checkpoints, also keep those at multiples of this many steps. Needs keep_last."""
    async_save: bool = True
    """Copy the state to host memory and write it while training continues. Needs as much host memory as the rank
    writes: 14 bytes per parameter in bf16, divided by the number of ranks. The last checkpoint of a run is written
    synchronously."""
    memory_interval: Count = 0
    """Steps between checkpoints in the memory of the nodes, each with a copy on the next node, from which a job that
    its agent restarts continues if they are newer than those on disk. 0: none. Each save stalls until the one before is
    done (docs/resilience.md)."""
    memory_folder: UserPath = "/dev/shm"
    """Folder for these, in the memory or on a disk of each node; environment variables are replaced. It must hold two
    checkpoints, each with the part of two nodes."""
    resume: bool = True
    """Continue from the newest complete checkpoint in the run folder, if there is one."""
    init_from: UserPath | None = None
    """Folder of a Hugging Face model, its name on the Hub (org/name), or any other checkpoint that megafp8 convert
    reads, from whose weights a new run starts. The model section may then be left out or be incomplete; keys that are
    given must agree with the folder. With model.moe and a folder without experts, every expert starts as a copy of its
    layer's MLP (upcycling)."""
    init_optimizer: bool = False
    """Take the optimizer's state (Adam's moments, fp32 masters, count of steps) from init_from as well: a checkpoint of
    a run, or one of Megatron core. The run still begins with step 0, so learning rates and data are those of a
    beginning."""
    allow_model_change: list[str] = []
    """Keys of the model section, e.g. [rope_theta], that may differ from the checkpoint that a run resumes from.
    Without this, a changed key is an error, because the same weights would compute something else. Only for keys that
    do not change the shapes of tensors."""
    verify: bool = True
    """Verify the checksums of data files before loading; metadata.json and the index are always verified. If a
    checkpoint is damaged, an older one is used."""


class LossSpikeConfig(Section):
    """What happens when the loss of a step is far above those before. A loss is a spike if it exceeds their mean by
    `sigmas` standard deviations (docs/resilience.md)."""

    action: Literal["skip", "rewind"] = "skip"
    """skip: leave the weights as they are, as in a step whose gradients are not finite. rewind: also go back to the
    newest checkpoint and leave out the samples since then."""
    sigmas: PositiveFloat = 6.0
    """Standard deviations above the mean."""
    window: Annotated[int, Field(ge=4), INTEGER] = 128
    """Number of latest steps whose losses count. No step is a spike before half of them are done."""


class FaultConfig(Section):
    """A fault to inject, once in a run."""

    kind: Literal[
        "kill",
        "stop",
        "hang",
        "leave_out_collective",
        "exception",
        "nan_gradient",
        "flip_weight",
        "flip_gradient",
        "slow",
        "loss_spike",
        "fail_save",
        "full_disk",
        "damage_checkpoint",
        "lose_memory",
    ]
    """kill: SIGKILL to itself. stop: SIGSTOP to itself. hang: sleep without end. leave_out_collective: go on without
    the collective at the end of the step. exception: raise one. nan_gradient: one gradient of the rank is NaN.
    flip_weight: one bit of a weight, after the update. flip_gradient: one bit of a gradient, when it is recomputed.
    slow: sleep in each of the steps from this one on, before the forward pass. loss_spike: all labels of the rank's
    samples are 0. fail_save: no large file can be written. full_disk: a file fills the disk of the run folder, of which
    at most 1 GiB may be free. damage_checkpoint: change a byte of the newest checkpoint,
    and of that in the node's memory, then SIGKILL. lose_memory: remove the node's checkpoints in memory, then
    SIGKILL."""
    rank: Count
    """Global rank."""
    step: PositiveInt
    """Step, counted from 1, in which it happens."""
    seconds: PositiveFloat = 1.0
    """slow: time to sleep in each step. full_disk: until the file is removed."""
    steps: PositiveInt = 10
    """slow: number of steps."""
    free_bytes: Count = 0
    """full_disk: bytes that stay free."""


class OuterConfig(Section):
    """Outer steps of replicas joined by slow links (DiLoCo, arXiv:2311.08105): each replica trains by itself for a
    round of `inner_steps` steps, then SGD with Nesterov momentum updates the weights of all by what they have changed,
    on average (docs/resilience.md)."""

    inner_steps: PositiveInt = 32
    """Steps of a round; the last one ends with the run. The paper has 500 for a model that was trained before."""
    learning_rate: PositiveFloat = 0.7
    """Of the outer step. With 1, and momentum 0, the new weights are the average."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Nesterov momentum of the outer step."""


class ReplicasConfig(Section):
    """Replicas of the whole model, each a job of its own, that may leave and come back while the others train
    (docs/resilience.md). The ranks of a replica are laid out as `parallel` says; the global batch is that of all."""

    count: Annotated[int, Field(ge=2), INTEGER]
    """Number of replicas. A run begins once all are there, or after start_seconds."""
    min: PositiveInt = 1
    """Fewest replicas that train; with fewer the job waits for others."""
    batch: Literal["keep", "shrink"] = "keep"
    """What becomes of the share of the global batch of a replica that is gone. keep: the others compute it. shrink: it
    is left for later steps; gradients are means over the tokens that there are."""
    exchange_seconds: PositiveFloat = 60.0
    """Longest wait for an answer of another replica at the end of a step, so for the slowest one; then the step is
    begun again without those that do not answer."""
    start_seconds: NonNegative = 300.0
    """Time for which the first replicas wait for the others before the first step of a job."""
    slow_ratio: Annotated[float, Field(ge=1)] = 2.0
    """A replica is named in the log whose time in a step is more than so many times the median of all."""
    slow_steps: Count = 0
    """Number of such steps in a row after which a slow replica leaves, to be started anew. 0: it stays."""
    outer: OuterConfig | None = None
    """Exchange weights after each round of steps, for slow links. Members, exchange_seconds and slow_steps are those of
    rounds then. Default: gradients are exchanged in each step."""


class ResilienceConfig(Section):
    """Detection of hangs, loss spikes, slow ranks and wrong results (docs/resilience.md)."""

    hang_seconds: NonNegative | None = None
    """Time without progress in a training step after which the job is ended for a restart, with a message that names
    the rank at fault. Default: half of timeout_seconds. 0: never."""
    loss_spike: LossSpikeConfig | None = None
    """Detect loss spikes, and skip them. Default: no step is skipped for its loss."""
    straggler_interval: Count = 100
    """Steps between comparisons of the ranks' own times, of which the slowest goes to the metrics, and to the log if it
    is slow. 0: never."""
    replicas: ReplicasConfig | None = None
    """Train with replicas that may leave and rejoin. Default: the job is one, which ends if a rank is lost."""
    recompute_interval: Count = 0
    """Steps between checks that each rank computes the same bits twice; costs two forward and backward passes each. On
    GPUs with deterministic: true only. 0: never."""
    inject: list[FaultConfig] = []
    """Faults, for tests."""
    notify: str | None = None
    """Command that a shell runs when the run starts, restarts, stops, finishes or fails, once each, with event, run,
    step, reason and exit code in variables and as JSON on stdin (docs/resilience.md). Default: none."""


class LoggingConfig(Section):
    """Logging of metrics, in addition to metrics.jsonl in the run folder."""

    interval: PositiveInt = 1
    """Steps between log lines, which go to log.txt in the run folder and, depending on progress, to the console. Steps
    that were skipped or evaluated always have a line."""
    progress: bool = True
    """Show step lines on the console, or a progress bar if it is a terminal. Warnings are always shown."""
    tensorboard: bool = True
    """Write TensorBoard event files to the run folder."""
    layer_norms_interval: Count = 100
    """Steps between measurements of the norms of gradients, weights and updates, by block and for embedding, final norm
    and output layer: metrics `grad_norm/layers.0`, `weight_norm/...`, `update_norm/...`. 0: none."""
    expert_load_interval: Count = 100
    """With model.moe: steps between records of each expert's tokens in expert_load.jsonl in the run folder, which
    megafp8 plot-expert-load draws. 0: none."""
    wandb_project: str | None = None
    """Log to this Weights & Biases project; WANDB_MODE=offline is supported."""
    metrics_port: Annotated[int, Field(ge=1, le=65535), INTEGER] | None = None
    """Port on which rank 0 serves metrics for Prometheus, at /metrics, as OpenMetrics text, to anybody who can reach it
    (docs/watching-runs.md). Default: none."""
    pipeline_trace_step: PositiveInt | None = None
    """Step in which each pipeline rank times its actions, for pipeline_trace.json in the run folder.
    megafp8 plot-schedule draws it next to the simulation."""


class ProfileConfig(Section):
    """Profiles of some steps, in the folder profile of the run folder (docs/watching-runs.md). Keys may change when a
    run resumes."""

    steps: tuple[PositiveInt, PositiveInt] | None = None
    """First and last step, counted from 1. Default: none, for record: [collectives], which then are written after a
    hang only."""
    ranks: Annotated[list[Count], Field(min_length=1)] | Literal["all"] = [0]
    """Global ranks that write files."""
    record: Annotated[list[Literal["trace", "memory", "collectives"]], Field(min_length=1)] = ["trace"]
    """trace: torch.profiler's, of operators, kernels and sections of a step. memory: allocations on the GPU, with the
    lines that made them. collectives: torch's flight recorder, the latest 2,000 collectives of each rank, which is then
    also written by all ranks after a hang."""


class InferenceConfig(Section):
    """The model's forward passes in generation and scoring, of a checkpoint or of the running job."""

    batch_invariant: bool = False
    """Forward passes whose numbers for a token do not depend on what is computed beside it: log-probabilities of
    generated tokens are those of training, bit for bit, whatever the batch, its order and chunks of prompts. Training
    computes its forward passes so, too, which is slower; backward passes are as they were. On one rank or with
    parallel.pipeline, for layers of softmax attention (docs/generation.md)."""


class StageConfig(Section):
    """A part of a run in which some keys have other values. It begins as if the run had been stopped and resumed with
    these."""

    name: Annotated[Name, StringConstraints(max_length=100)]
    """Name in the log and in checkpoints."""
    begin: Count
    """Number of steps of the run before it. It ends where the next stage begins, or with the run."""
    overrides: dict[str, Any] = {}
    """Values by dotted keys, as on the command line: {training.seq_length: 8192}. A value replaces the whole value of
    its key, such as a blend in data.train. Other keys are those of the run, not those of the stage before."""


class Config(Section):
    """The config of a run of pretrain_gpt.py."""

    name: Annotated[Name, StringConstraints(max_length=200)]
    """Name of the run and of its folder."""
    base: str | None = Field(default=None, exclude=True)
    """Another config file, relative to this one, or the name of a shipped config, whose keys hold where this file does
    not give its own. Sections are merged key by key; lists and other values replace those of the base. Its name is not
    inherited (docs/launching.md)."""
    run_dir: UserPath = "runs"
    """Folder that holds the run folders <run_dir>/<name>."""
    seed: Integer = 1234
    """Determines initial weights, the order of the data and what dropout drops."""
    deterministic: bool = False
    """Make two runs of one layout on the same kind of machine bit-identical, on GPUs too: sums have a fixed order, and
    no algorithm is chosen by its speed. Slower, mostly in attention: docs/decisions/0014-determinism.md."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """auto: cuda if there is a GPU, else cpu."""
    timeout_seconds: Annotated[float, Field(gt=0, le=1e9), FLOAT] = 600.0
    """Time limit of a collective, in seconds; one that takes longer ends the job."""
    model: ModelConfig
    parallel: ParallelConfig = ParallelConfig()
    fp8: Fp8Config = Fp8Config()
    training: TrainingConfig
    optimizer: OptimizerConfig
    data: DataConfig
    lora: LoraConfig | None = None
    """Train adapters of linear layers, and no other weight; usually of checkpoint.init_from. Default: train all."""
    stages: list[StageConfig] = []
    """Parts of the run that change sequence length, batch size, data, learning rate, layout, recipe or other keys
    (docs/stages.md)."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    logging: LoggingConfig = LoggingConfig()
    resilience: ResilienceConfig = ResilienceConfig()
    inference: InferenceConfig = InferenceConfig()
    profile: ProfileConfig | None = None
    """Profile some steps. Default: none."""

    @field_validator("base")
    @classmethod
    def _read_already(cls, base: str | None) -> None:
        if base is not None:
            raise PydanticCustomError("base", "Only load_config reads a base")

    @property
    def spec(self) -> ModelSpec:
        """The network, resolved."""
        return self.model.spec

    @property
    def lora_targets(self) -> Sequence[str]:
        """Projections that are adapted."""
        return () if self.lora is None else self.lora.targets or self.spec.lora_targets

    @property
    def gathers_tokens(self) -> bool:
        """Whether tokens get to their experts by parallel.expert_dispatch all_gather."""
        p, chosen = self.parallel, [record.top_k for record in self.spec.expert_records]
        if p.expert_dispatch == "auto":
            return not chosen or p.expert_tensor > 1 or p.expert <= min(chosen)
        return p.expert_dispatch == "all_gather"

    @property
    def sample_tokens(self) -> int:
        """Tokens of documents in a sample, at most: of GPT one more than inputs, of BERT without special tokens, of T5
        before its spans are taken out."""
        s, model = self.training.seq_length, self.model
        if model.architecture == "t5":
            return self.data.span_corruption.text_length(s)
        return s + 1 if model.architecture == "gpt" else s - (3 if model.binary_head else 2)

    @property
    def decoder_length(self) -> int | None:
        """Tokens of a sample of t5's decoder; None without one."""
        if self.model.architecture != "t5":
            return None
        noise, spans = self.data.span_corruption.lengths(self.sample_tokens)
        return self.training.decoder_seq_length or -(-(noise + spans + 1) // 64) * 64

    @property
    def position_rows(self) -> int:
        """Rows of the learned position table."""
        return self.model.max_position_embeddings or self.training.seq_length

    @property
    def hang_seconds(self) -> float:
        """Time without progress after which the job is ended; 0 for none."""
        seconds = self.resilience.hang_seconds
        return self.timeout_seconds / 2 if seconds is None else seconds

    @property
    def outer(self) -> OuterConfig | None:
        """The outer steps of replicas, if there are any."""
        return None if self.resilience.replicas is None else self.resilience.replicas.outer

    @property
    def tunes_gemms(self) -> bool:
        """Whether cuBLASLt's algorithms are chosen by their speed."""
        return not self.deterministic if self.fp8.gemm_autotune is None else self.fp8.gemm_autotune
