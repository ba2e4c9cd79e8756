"""Config of a run as a tree of pydantic models. The string below a field is its documentation and is shown by editors.

This module checks each field on its own; `checks.py` checks fields against each other and against the number of ranks.
Field names follow Megatron-LM, torchtitan and Hugging Face where these agree. All sections are immutable.
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
from megafp8.host.cluster import gathering_is_faster
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
    """Maximal update parametrization (Yang et al. 2022, arXiv:2203.03466, table 8).

    Hyperparameters that are tuned for a narrow model stay optimal for wider models.
    """

    base_hidden_size: Channels
    """hidden_size of the model on which the hyperparameters were tuned; this section changes nothing for that model.
    With m = hidden_size / base_hidden_size, matrices in the blocks use init_std / √m and AdamW's learning rate / m;
    routers and gates of shared experts use init_std / m and AdamW's learning rate / m; and logits are divided by m.
    ffn_hidden_size, widths of experts and latents, and the ranks of latent attention must scale with hidden_size; the
    number of experts must not (Megatron-LM's mup_base_hidden_size)."""
    base_head_dim: Channels | None = None
    """head_dim of the tuned model, if heads grow with the width: attention scores are multiplied by √base_head_dim /
    head_dim. Default: head_dim, for models that have more heads instead of wider ones (Megatron-LM's
    mup_base_head_dim)."""


class ModelSize(Section):
    """Architecture and size of the network."""

    architecture: Literal["gpt", "bert", "t5"] = "gpt"
    """Model family. gpt: causal language model. bert: bidirectional encoder, trained to predict masked tokens
    (data.masked_lm). t5: encoder and decoder, trained to restore spans of a text (data.span_corruption)."""
    num_layers: Annotated[int, Field(gt=0, le=10_000), INTEGER]
    """Number of transformer blocks; for t5, number of encoder blocks."""
    num_decoder_layers: Annotated[int, Field(gt=0, le=10_000), INTEGER] | None = None
    """Number of decoder blocks of t5. Default: num_layers."""
    hidden_size: Channels
    """Width of the residual stream."""


class ModelConfig(MlpKeys, AttentionKeys, ModelSize):
    """The network. The defaults describe Llama; GPT-2 and Qwen differ in a few keys.

    The attention and MLP keys apply to all layers, unless layer_kinds and pattern override them.
    """

    vocab_size: PositiveInt | None = None
    """Number of tokens in the vocabulary. Default: the vocabulary size of data.tokenizer."""
    vocab_multiple: PositiveInt = 128
    """Multiple to which the vocabulary is padded; must be divisible by parallel.tensor. The padding does not depend on
    the layout, so a checkpoint fits every layout."""
    max_position_embeddings: Tokens | None = None
    """Number of rows in the learned position table. Default: training.seq_length. With rope, it is only written to
    Hugging Face configs as the longest context."""
    relative_attention_num_buckets: PositiveInt = 32
    """Number of distance buckets for position_embedding: relative; each bucket has its own bias."""
    relative_attention_max_distance: PositiveInt = 128
    """Distance from which all tokens share one bias, for position_embedding: relative."""
    embedding_norm: bool = False
    """Normalize the embeddings before the first block (BLOOM, BERT)."""
    embedding_multiplier: PositiveFloat = 1.0
    """Factor by which embeddings are multiplied, rounded to training.precision (Granite; Gemma uses √hidden_size)."""
    rope_local_theta: PositiveFloat | None = None
    """Base of the rotary frequencies in layers with a sliding window, without rope scaling (Gemma 3). Default: these
    layers use the same frequencies as the other layers."""
    normalization: Literal["rmsnorm", "layernorm", "layernorm_no_bias"] = "rmsnorm"
    """Kind of norm: rmsnorm (Llama), layernorm (GPT-2), or layernorm_no_bias, which learns weights only (Cohere)."""
    norm_weights: bool = True
    """Multiply by learned weights in the norms of the residual stream and of sublayer outputs. false: these norms only
    normalize (nanochat); requires normalization: rmsnorm."""
    norm_eps: PositiveFloat = 1e-5
    """Value added to the variance in norms, for numerical stability."""
    norm_position: Literal["pre", "output", "both", "mlp_both", "post"] = "pre"
    """Position of the norms relative to f, the attention or MLP. pre: x + f(norm(x)) (Llama, GPT-2, Megatron-LM's
    BERT). output: x + norm(f(x)), before the addition (OLMo 2). both: x + norm(f(norm(x))), before and after (Gemma 2
    and 3). mlp_both: pre for attention and both for the MLP or experts (A.X-K1). post: norm(x + f(x)), after the
    addition, without a final norm (BERT, RoBERTa; with embedding_norm)."""
    zero_centered_gamma: bool = False
    """Multiply by 1 + weight instead of weight in norms. The stored weights are then close to zero, where bf16 is most
    precise (Gemma; Megatron-LM's apply_layernorm_1p)."""
    linear_bias: bool | Literal["attention", "mlp"] = False
    """Add biases to all linear layers of the blocks (GPT-2), including experts and routers (gpt-oss). attention: only
    to the linear layers of attention. mlp: only to the linear layers of MLPs, experts and routers (GPT-J)."""
    output_bias: bool = False
    """Add a bias to the output layer (GPT-J). bert always has this bias."""
    tie_embeddings: bool = False
    """Use the embedding weight in the output layer, too."""
    token_types: Count = 0
    """Number of token types. Each type has a learned embedding that is added to the token embedding (BERT's
    type_vocab_size: 2, one for each part of a pair of sentences). 0: no token types."""
    binary_head: bool = False
    """Second output head of bert, which predicts from the first token's output whether the two parts of a sentence pair
    are in order (Megatron-LM's bert_binary_head; BERT's next-sentence head; sentence-order prediction, Lan et al. 2019,
    arXiv:1909.11942). Samples are then pairs: data.packing must be sentences, and token_types at least 2."""
    transform_activation: Literal["gelu", "gelu_tanh"] | None = None
    """GELU variant before the output layer of bert. RoBERTa and Megatron-LM use the exact gelu there, whatever
    model.activation is. Default: gelu_tanh if model.activation is gelu_tanh, else gelu."""
    full_attention_layers: list[Annotated[int, Quantity.LAYER]] = []
    """Indices of the layers, from 0, to which sliding_window does not apply (Qwen2, Gemma 2 and 3, gpt-oss)."""
    parallel_block: bool | Literal["shared_norm"] = False
    """Compute attention and MLP from the same block input and add both outputs. true: attention and MLP have a norm
    each (GPT-NeoX). shared_norm: both read the output of one norm (GPT-J, PaLM, Cohere)."""
    residual_multiplier: PositiveFloat = 1.0
    """Factor by which attention and MLP outputs are multiplied before they are added to the residual stream (Granite).
    """
    layer_scalar: bool = False
    """Multiply the residual stream after each layer by a scalar of that layer (Gemma 4). The scalar is stored with the
    weights, starts at 1 and is not trained."""
    logits_scaling: PositiveFloat = 1.0
    """Divisor of the logits (Granite). For t5 with tie_embeddings, logits are also divided by √hidden_size."""
    logit_softcap: PositiveFloat | None = None
    """Soft cap of the logits: they become softcap · tanh(logit / softcap) (Gemma 2's final_logit_softcapping). Default:
    no cap."""
    per_layer_embedding: PerLayerEmbeddingConfig | None = None
    """Token embeddings for each layer. Default: none."""
    latent_attention: LatentAttentionConfig | None = None
    """Multi-head latent attention. Default: ordinary attention."""
    sparse_attention: SparseAttentionConfig | None = None
    """Latent attention to the tokens that an indexer selects. Default: attention to all earlier tokens."""
    hyper_connections: HyperConnectionsConfig | None = None
    """Several residual streams that layers mix. Default: one residual stream."""
    moe: MoeConfig | None = None
    """Experts that replace the MLP in some or all layers. Default: no experts."""
    layer_kinds: dict[str, LayerKind] = {}
    """Layer kinds by name, each with the keys that differ from the model section: {local: {mixer: {sliding_window:
    4096}}, full: {}} (docs/layers.md). Requires pattern."""
    pattern: list[str] = []
    """Sequence of layer_kinds names, from layer 0, repeated up to num_layers. A name may have a count: ["dense * 3",
    "sparse * 58"]. Default: all layers are alike, except for sliding_window and moe."""
    mtp_num_layers: Annotated[int, Field(ge=0, le=64), INTEGER] = 0
    """Number of multi-token prediction depths (DeepSeek-V3). Depth d is one more block, which predicts the token d + 1
    positions ahead. These blocks follow layer num_layers - 1, have the same kind as it, and are used in training only.
    0: none."""
    mtp_loss_scaling_factor: NonNegative = 0.1
    """Weight of the mean multi-token prediction loss in the training loss."""
    hidden_dropout: Dropout = 0.0
    """Dropout probability after the embedding, and on attention and MLP outputs before they are added to the residual
    stream. Applies in training only."""
    attention_dropout: Dropout = 0.0
    """Dropout probability of attention probabilities. Applies in training only."""
    init_std: PositiveFloat = 0.02
    """Standard deviation of the initial weights. Output projections of a block use init_std / sqrt(2 · num_layers)."""
    mup: MupConfig | None = None
    """Initial weights, learning rates and multipliers that carry over to any width. Default: standard parametrization
    (docs/optimizers.md)."""

    @cached_property
    def spec(self) -> ModelSpec:
        """Resolved network that these keys describe."""
        return resolve(self)


class ParallelConfig(Section):
    """Layout of the model over the ranks.

    The data-parallel size is the number of ranks divided by tensor × pipeline × context.
    """

    tensor: PositiveInt = 1
    """Tensor-parallel size: number of ranks over which each layer is split. Keep it within one NVLink domain."""
    pipeline: PositiveInt = 1
    """Pipeline-parallel size: number of ranks over which the blocks of the model are divided."""
    virtual_pipeline: PositiveInt = 1
    """Number of stages per pipeline rank; a stage is a range of consecutive blocks. Default: the fewest that the
    schedule allows."""
    schedule: Annotated[UserPath, Field(examples=[*SCHEDULES])] = "1f1b"
    """Pipeline schedule: the name of a built-in schedule (docs/parallelism.md lists them; each has a file in
    megafp8/parallel/pipeline/schedules), the path of a .csv file, or module:function. A .csv file has one row per rank
    and cells such as F3, B3, W3, F3.1 for micro-batch 3 and chunk 1. A function is called with the placement and the
    number of micro-batches. megafp8 plot-schedule draws schedules."""
    placement: Literal["loop", "v"] | None = None
    """Assignment of stages to pipeline ranks. loop: stage s is on rank s mod pipeline. v: stages go up through the
    ranks and back, so the last stage is on the first rank. Default: the placement of the built-in schedule; loop for
    custom schedules."""
    context: PositiveInt = 1
    """Context-parallel size: number of ranks over which each sequence is split, for sequences that do not fit on one
    rank. Each rank holds two chunks, one from each end of the sequence, and gathers the keys and values of the other
    ranks. Weights are replicated."""
    expert: PositiveInt = 1
    """Expert-parallel size: number of ranks over which the experts of each layer are divided. Tokens are sent to the
    ranks of their experts and back. An expert group consists of adjacent data-, context- and tensor-parallel ranks of
    one pipeline stage, and its size must divide their number. Attention and experts thus have separate layouts on the
    same ranks (Megatron-Core's parallel folding). Experts are not split over parallel.tensor."""
    expert_tensor: PositiveInt = 1
    """Expert tensor-parallel size: number of adjacent ranks over which each expert is split. The experts of a layer
    then occupy expert × expert_tensor ranks, and tokens are gathered. Use it if experts are too wide, or too few, to
    fit in memory with expert alone."""
    expert_dispatch: Literal["auto", "all_gather", "all_to_all"] = "auto"
    """Collective that sends tokens to the ranks of their experts (Megatron-LM's moe_token_dispatcher_type). all_gather:
    each rank gathers all tokens of the expert × expert_tensor ranks, and the results are summed; works in CUDA graphs.
    all_to_all: each token is sent once per selected expert. auto: the faster one by the bandwidth of NVLink and of
    network adapters: all_gather for up to model.moe.top_k ranks of a node, and for more ranks of several nodes, to each
    of which it sends a token once."""
    sequence_parallel: bool = True
    """Split activations along the sequence between tensor-parallel regions. Saves memory at no cost. No effect if
    tensor is 1."""
    overlap_tensor: Literal["auto", "none", "symmetric"] = "auto"
    """Overlap of sequence-parallel communication with the GEMMs of the layers (Megatron-LM's tp_comm_overlap). none:
    only overlap the reduction of input gradients with weight gradients. symmetric: overlap all communication; GEMMs are
    split into up to four parts, which the GPUs' copy engines transfer. symmetric requires GPUs on one host, uses no
    NVLink multicast, and falls back to none with a log message if setup fails. auto: symmetric on CUDA. Also applies to
    tokens that are gathered for experts. No effect if tensor is 1."""
    layers_per_stage: list[Integer] | Literal["balanced"] | None = None
    """Number of blocks in each of the pipeline × virtual_pipeline stages, first to last, e.g. [7, 8, 8, 7]. balanced:
    fewer blocks on the rank with the output layer, so that all ranks have equal work. Default: as even as possible."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activations that backward recomputes to save memory. none: store all activations. selective: recompute the
    outputs of the ops in recompute_ops. full: store only the input of each block and run its forward pass twice."""
    recompute_blocks: PositiveInt | None = None
    """Number of blocks per stage to recompute, from the first block of the stage. Default: all."""
    recompute_ops: list[Literal["norms", "activation", "attention"]] = ["norms", "activation"]
    """Ops to recompute with recompute: selective. norms (Megatron-LM's layernorm) and activation (moe_act): recompute
    the inputs of linear layers from tensors that norms and activations store anyway, at the cost of one elementwise
    pass. attention (core_attn): recompute the attention output, at the cost of its forward pass; useful only if the
    output projection is FP8."""
    offload: bool | PositiveInt = False
    """Copy activations to pinned host memory in forward and back in backward, overlapped with computation. true:
    offload all blocks. A number: offload this many blocks per stage, from the first; leave out the last blocks, because
    their activations are needed again at once. Requires the same amount of host memory."""
    overlap_grad_reduce: bool = True
    """Reduce gradients over data-parallel ranks while backward still runs. With fsdp, the reduction also overlaps with
    the next micro-batch, which takes memory for one more gradient of the size of the embedding, and the reduction
    between fsdp_replicas overlaps with the backward of the last micro-batch."""
    bucket_mib: Annotated[float, Field(gt=0, le=2**20), FLOAT] = 160.0
    """Minimum size of a gradient bucket, in MiB of fp32. Smaller buckets start communication earlier; larger buckets
    communicate more efficiently."""
    zero: Literal[0, 1] = 0
    """ZeRO stage, 0 or 1. 1: each data-parallel rank stores the fp32 master weights and Adam state only of its shard of
    the parameters, updates that shard, and gathers the other shards (Megatron-LM's distributed optimizer). Loss and
    traffic do not change; 12 bytes per parameter become 12 / data-parallel size."""
    fsdp: bool = False
    """Shard weights and gradients over data-parallel ranks, too: ZeRO stage 3, by PyTorch's fully_shard. The weights of
    a block are gathered before its forward and its backward (in FP8 with fp8.param_gather) and freed afterwards.
    Replaces zero; bucket_mib has no effect. Gradients are reduced after each micro-batch, so
    prefer few large micro-batches. Experts are sharded over the ranks that hold the same experts. Cannot be combined
    with schedules that split backward."""
    fsdp_replicas: PositiveInt = 1
    """Number of replicas of the FSDP shards (Megatron-FSDP's HFSDP; torchtitan's data_parallel_replicate_degree).
    Weights and gradients are sharded over data-parallel × context-parallel size / fsdp_replicas adjacent ranks, ideally
    the ranks of one host. These ranks gather weights and reduce gradients in each micro-batch. Optimizer state is
    sharded over all ranks: replicas reduce-scatter gradient shards and all-gather updated weights, once per step. Each
    rank stores fsdp_replicas times as many weights and gradients. Must divide data-parallel × context-parallel size,
    and the number of ranks that hold the same experts."""
    overlap_param_gather: bool = True
    """Gather updated parameters while the next forward pass already runs. Applies to zero: 1, and to the gathers
    between fsdp_replicas."""

    @model_validator(mode="before")
    @classmethod
    def _fewest_stages_of_schedule(cls, keys: Any) -> Any:
        """Set virtual_pipeline to the fewest stages per rank that the schedule allows, unless it is given."""
        schedule = SCHEDULES.get(str(keys.get("schedule"))) if isinstance(keys, dict) else None
        return keys if schedule is None else {"virtual_pipeline": schedule.least_chunks} | keys

    @property
    def expert_ranks(self) -> int:
        """Number of ranks that hold the experts of a layer: expert × expert_tensor."""
        return self.expert * self.expert_tensor


class CustomRule(Section):
    """Recipes of the operands of the layers that match a pattern."""

    layers: Pattern
    """Pattern over layer names such as layers.0.attention.qkv. The first rule that matches a layer applies to it."""
    input: RecipeName
    """Recipe of the input activations."""
    weight: RecipeName
    """Recipe of the weight."""
    grad_output: RecipeName
    """Recipe of the output gradients."""


class Fp8Config(Section):
    """FP8 in the linear layers of the blocks. The embedding, output layer, norms and softmax use training.precision.

    Some descriptions of options begin with names of recipes. With any other recipe, such an option must have its
    default.
    """

    choices: ClassVar[tuple[str, ...]] = ("recipe",)
    recipe: Literal["none", RecipeName, "custom"] = "none"
    """Recipe that determines the scales. none: no FP8. delayed: one scale per tensor, from its amax history. current:
    one scale per tensor, from its current amax. rowwise: one scale per row of each operand. blockwise: one scale per
    128 adjacent elements; for weights, per 128 × 128 block. static: given or calibrated scales. mxfp8: one power-of-two
    scale per 32 adjacent elements. nvfp4: 4-bit data, one scale per 16 adjacent elements. custom: recipes by layer and
    operand. GEMMs of mxfp8 and nvfp4 data run in bf16 with the same values, on Blackwell too, because megafp8 does not
    use its block-scaled tensor cores."""
    format: Literal["hybrid", "e4m3"] | None = None
    """FP8 format. hybrid: E4M3 in forward, E5M2 for gradients. e4m3: E4M3 for both. Default: hybrid for delayed,
    current and static, else e4m3."""
    custom: list[CustomRule] = []
    """custom: list of rules such as {layers: "*.mlp.down", input: rowwise, weight: rowwise, grad_output: rowwise}. The
    first rule that matches a layer applies to it; layers without a matching rule are not FP8. The two operands of a
    GEMM must be compatible: delayed, current and static with each other; rowwise and blockwise only with themselves;
    mxfp8 and nvfp4 with any recipe."""
    static_amax: dict[Pattern, PositiveFloat] = {}
    """static: largest magnitude of a tensor, by pattern over names such as layers.0.mlp.down.input (.weight,
    .grad_output). The first matching pattern applies."""
    calibration_steps: Steps = 0
    """static: number of steps at the start in which layers with tensors missing from static_amax run in high precision
    while their amaxes are measured; 20 is usual."""
    margin: Annotated[int, Field(ge=-64, le=64), INTEGER] = 0
    """delayed, static: headroom as a power of two; scales are divided by 2^margin."""
    interval: PositiveInt = 1
    """delayed: number of steps between updates of the scales."""
    amax_history_len: PositiveInt = 1024
    """delayed: length of the amax history, in steps."""
    amax_compute_algo: Literal["max", "most_recent"] = "max"
    """delayed: amax of the history that determines the scale, either the largest or the most recent."""
    power_of_two_scale: bool | None = None
    """delayed, current, rowwise, blockwise, static: round scales down to a power of two. Default: true for blockwise,
    else false."""
    amax_epsilon: NonNegative = 0.0
    """current, rowwise, blockwise: lower bound for amaxes."""
    override_linear_precision: tuple[bool, bool, bool] = (False, False, False)
    """GEMMs of a linear layer, (fprop, dgrad, wgrad), that run in high precision; [false, false, true] is usual with
    rowwise."""
    fast_accumulation: tuple[bool, bool, bool] = (True, False, False)
    """delayed, current, rowwise, static: use Hopper's fast accumulation in (fprop, dgrad, wgrad). It is faster, with
    fewer bits in the accumulator."""
    include: list[Pattern] = ["*"]
    """Layers that run in FP8: patterns over names such as layers.0.attention.qkv."""
    exclude: list[Pattern] = []
    """Layers that stay in high precision, e.g. ["layers.0.*", "*.mlp.down"]."""
    first_blocks_bf16: Count = 0
    """Number of blocks at the start of the model that stay in high precision."""
    last_blocks_bf16: Count = 0
    """Number of blocks at the end of the model that stay in high precision."""
    auto_filter: Literal["none", "predicted", "measured"] = "none"
    """Selection of layers that FP8 would slow down, because quantization costs more than the GEMMs gain; they stay in
    training.precision. none: no selection. predicted: by a model of the GPU's speed (H200 only). measured: by timing
    one layer of each size before the first step. The selection uses layer sizes on one rank, so it depends on
    parallel.tensor. A resumed run keeps its selection."""
    param_gather: bool = False
    """Gather FP8 data instead of bf16 weights, with parallel.zero 1 or fsdp (Megatron-LM's fp8-param-gather). Each rank
    quantizes the shard of the weights that it updates. This halves the traffic and saves 2 bytes per parameter; losses
    are bit-identical. Applies to recipes with one scale per weight: delayed, current, static. Layers of recipe custom
    with other weight recipes gather bf16, and so do the experts of a layer unless each has one scale per weight. The
    FP8 report then has no weights."""
    keep_weight_transposes: bool = True
    """Keep the transposed FP8 copy of each weight, which the gradient of the input reads, for all micro-batches of a
    step. false: transpose the weight in each backward pass, to the same bits, and save 1 byte per parameter. Applies to
    weights with one scale (recipes delayed, current and static)."""
    paired_wgrad: bool = False
    """Compute weight gradients of FP8 experts for two micro-batches at a time, so that fp32 sums are read and written
    half as often. Applies where one GPU kernel computes all experts of a layer (one scale per tensor, or blockwise),
    unless parallel.fsdp shards the experts' weights. Keeps the FP8 operands of these GEMMs of one more micro-batch in
    memory."""
    report_interval: Count = 0
    """Number of steps between samples for the FP8 health report (quantization error of each tensor), fp8_report.jsonl
    in the run folder; 100 is usual. 0: no report."""
    gemm_backend: Literal["auto", "cublaslt", "scaled_mm", "emulated"] = "auto"
    """FP8 GEMM library. auto: on CUDA, cublaslt if nvmath-python is installed, else scaled_mm; on CPU, emulated, which
    uses the same FP8 values with fp32 products."""
    gemm_autotune: bool | None = None
    """Time the cublaslt algorithms for each shape once and store the fastest in the user's cache folder. Runs are
    bit-identical only if they use the same algorithms. Default: true unless deterministic."""

    @classmethod
    def options(cls, choice: str, values: Mapping[str, Any]) -> Collection[str]:
        """Return the keys that apply to the chosen recipe and to the recipes of its custom rules."""
        from megafp8.numerics.recipes import RECIPES, keys_of, per_tensor_keys_of  # needs torch

        recipe, rules = values.get("recipe", "none"), values.get("custom") or ()
        if recipe == "none":  # the section has no effect
            return cls.model_fields.keys() - per_tensor_keys_of(RECIPES)
        named = [value for rule in rules if isinstance(rule, dict) for value in rule.values()]
        names = {recipe, *(named if recipe == "custom" else ())} & RECIPES.keys()
        return keys_of(names) | per_tensor_keys_of(names)


class LossScaleConfig(Section):
    """Dynamic loss scale of fp16 training, with the same meaning as in Megatron-LM.

    The loss is multiplied by the scale before backward, so that small gradients do not underflow. A step with
    non-finite gradients is skipped.
    """

    initial_scale: PositiveFloat = 2.0**32
    """Loss scale of the first step (initial_loss_scale)."""
    growth_interval: PositiveInt = 1000
    """Number of consecutive steps with finite gradients after which the scale doubles (loss_scale_window)."""
    hysteresis: PositiveInt = 2
    """Number of steps with non-finite gradients that are needed before the scale is halved. Once reached, every further
    such step halves the scale again; the count starts over when the scale doubles."""
    min_loss_scale: PositiveFloat = 1.0
    """Lower limit of the scale. Equal to initial_scale, with a long growth_interval, it makes the scale constant."""


class EvaluateConfig(Section):
    """Sample texts and lm-evaluation-harness tasks, evaluated while a GPT model trains. They do not affect training."""

    interval: PositiveInt
    """Number of steps between evaluations. The last step is evaluated too."""
    prompts: list[str] = []
    """Texts to continue. The continuations are logged and written to samples.jsonl in the run folder. An empty prompt
    begins a document; it is not allowed with data.reset_at_documents, where nothing precedes a document."""
    max_tokens: PositiveInt = 64
    """Maximum number of tokens generated per prompt. Generation also ends when the model runs out of positions."""
    temperature: NonNegative = 0.0
    """Sampling temperature; 0 means greedy."""
    tasks: list[str] = []
    """Names or patterns of lm-evaluation-harness tasks (requires the extra eval). Their metrics are
    eval/<task>/<metric>."""
    include_path: UserPath | None = None
    """Folder with YAML files of additional tasks."""
    limit: PositiveInt | None = None
    """Number of questions per task, from the first. Default: all."""


class TrainingConfig(Section):
    """Length, batch size and precision of training."""

    choices: ClassVar[tuple[str, ...]] = ("precision",)
    steps: Annotated[PositiveInt, Quantity.STEPS]
    """Number of optimizer steps in the whole run. Also the length of the learning-rate schedule, unless
    optimizer.decay_until is given."""
    stop_after: Annotated[PositiveInt, Quantity.STEPS] | None = None
    """Step after which to save and stop, counted from the beginning of the run. Nothing else changes: the same command
    without this key continues as if the run had not stopped. Default: training.steps."""
    seq_length: Tokens
    """Number of tokens in a sample; for t5, in a sample of the encoder."""
    decoder_seq_length: PositiveInt | None = None
    """Number of tokens in a decoder sample of t5. Default: enough for the spans, rounded up to a multiple of 64."""
    micro_batch_size: PositiveInt = 1
    """Number of samples in one forward pass of a rank."""
    global_batch_size: PositiveInt
    """Number of samples in an optimizer step, over all ranks and micro-batches."""
    precision: Literal["bf16", "fp16", "fp32", "fp64"] = "bf16"
    """Dtype of weights and activations outside FP8. Master weights, gradients and Adam state are fp32 (see
    optimizer.moments_dtype). fp16 has 3 more bits of precision than bf16 and a far smaller range, so the loss is scaled
    (loss_scale). fp64 is for comparing layouts without rounding noise: everything that is usually fp32 becomes float64,
    and gradients below 1e-12 of their norm are set to zero."""
    loss_scale: LossScaleConfig = LossScaleConfig()
    """Dynamic loss scale, for precision: fp16."""
    cuda_graphs: bool | Literal["auto"] = "auto"
    """Record the forward and backward passes of a step, including communication, as a CUDA graph and replay it, so that
    the GPU never waits for the host. The loss does not change. auto: use graphs wherever possible; for example not on a
    CPU, with parallel.offload, or if the host must read the token counts of experts; the log states the reason. true:
    raise an error if graphs are not possible (docs/decisions/0011-cuda-graphs.md)."""
    gc_interval: Count = 100
    """Number of steps between runs of Python's garbage collector. All ranks collect after the same step, so that no
    rank waits for another. 0: automatic collection."""
    loss_tokens_at_once: PositiveInt | None = None
    """Largest number of tokens of a micro-batch that have logits at the same time. Their loss and its gradients are
    computed before the logits of the next tokens exist. Default: as many tokens as fit in 2.5 GiB."""
    z_loss: NonNegative = 0.0
    """Weight of log²Z of the output layer in the training loss; 1e-4 is usual. Reported losses exclude this term; it is
    the metric z_loss."""
    eval_interval: Count = 0
    """Number of steps between evaluations of the validation loss. 0: none."""
    eval_steps: PositiveInt = 10
    """Number of global batches per evaluation, also for each data set of data.validation."""
    evaluate: EvaluateConfig | None = None
    """Sample texts and tasks, evaluated during training. Default: none."""
    max_skipped_steps: Count = 10
    """Number of consecutive skipped steps after which the run ends with an error. A step with non-finite gradients is
    skipped: weights and optimizer state stay unchanged. In fp16, the run does not end before the loss scale has fallen
    to loss_scale.min_loss_scale. 0: no limit."""
    consistency_check_interval: Count = 100
    """Number of steps between consistency checks. A check verifies that ranks that must hold identical weights,
    optimizer state and FP8 scales do so, bit for bit; otherwise the run ends with an error that names the rank. Checks
    also run before the first step, before each save, and when steps are skipped. 0: never."""

    @classmethod
    def options(cls, choice: str, values: Mapping[str, Any]) -> Collection[str]:
        """Return loss_scale for fp16; other precisions have no options."""
        return ("loss_scale",) if values.get("precision") == "fp16" else ()

    @property
    def last_step(self) -> int:
        """Step after which the run ends or stops."""
        return min(self.steps, self.stop_after or self.steps)


class TokenizerConfig(Section):
    """Tokenizer with which the data was preprocessed."""

    choices: ClassVar[tuple[str, ...]] = ("kind",)
    kind: Literal["sentencepiece", "huggingface", "tiktoken", "bytes"]
    """Library that reads the tokenizer; bytes is built in and uses the UTF-8 bytes of the text as tokens."""
    path: UserPath | None = None
    """Model file, folder with a model file, or name on the Hugging Face Hub (org/name). For huggingface: a
    tokenizer.json, or a vocab.json with merges.txt in the same folder. For tiktoken: the name of an encoding or a ranks
    file. Not allowed for bytes."""
    end_token: str | None = None
    """Token that ends a document, such as "<|im_end|>". Data must be preprocessed with it. Default: the special token
    that the tokenizer's files define: eos_token of tokenizer_config.json or special_tokens_map.json, else a single
    eos_token_id of generation_config.json, else the eos of a sentencepiece model or <|endoftext|> of a tiktoken
    encoding."""
    pattern: str | None = None
    """Regular expression that splits text before tokens are merged, for a tiktoken ranks file. Default: the value of
    pat_str in tokenization_*.py in the same folder; this file is parsed, not run."""
    add_bos_token: bool | None = None
    """Begin each document with the tokenizer's beginning-of-sequence token. Default: true if the post-processor of
    tokenizer.json adds one before a text, or add_bos_token of tokenizer_config.json is true."""

    @classmethod
    def options(cls, choice: str, values: Mapping[str, Any]) -> Collection[str]:
        """Return the keys that apply to a kind of tokenizer."""
        usual = ("path", "end_token", "add_bos_token")
        by_kind: dict[str, tuple[str, ...]] = {"bytes": (), "tiktoken": (*usual, "pattern")}
        return by_kind.get(values.get(choice, ""), usual)


class SpecialTokens(Section):
    """Ids of special tokens that the data sets do not contain.

    The default of each is the token of this name in data.tokenizer.
    """

    cls: Count | None = None
    """Id of the token that begins a sample. Default: [CLS] or <s>."""
    sep: Count | None = None
    """Id of the token that ends a sample, and each part of a sentence pair. Default: [SEP] or </s>."""
    mask: Count | None = None
    """Id of the token that replaces tokens to be predicted. Default: [MASK] or <mask>."""
    pad: Count | None = None
    """Id of the token that pads a sample, and begins a decoder sample of t5. Default: [PAD] or <pad>."""
    sentinels: list[Count] | None = None
    """Ids of the tokens that mark spans in t5, from the first span on. Default: <extra_id_0>, <extra_id_1> and so on;
    if the tokenizer has none, the unused ids below model.vocab_size, from the highest down."""


class MaskedLmConfig(Section):
    """Masked-token prediction for model.architecture bert (Devlin et al. 2018, arXiv:1810.04805)."""

    probability: Annotated[float, Field(gt=0, lt=1), FLOAT] = 0.15
    """Fraction of a sample's tokens that are predicted (Megatron-LM's mask_prob). 80% of these are replaced by the mask
    token, 10% by a random token, and 10% are left unchanged."""
    whole_words: bool = False
    """Mask either all tokens of a word or none (whole-word masking, as in Megatron-LM). Word boundaries follow the
    tokenizer: no leading ## in WordPiece, a leading ▁ in sentencepiece, a leading space in byte-level BPE."""


class SpanCorruptionConfig(Section):
    """Text spans that a model of architecture t5 restores (Raffel et al. 2019, arXiv:1910.10683)."""

    noise_density: Annotated[float, Field(gt=0, lt=1), FLOAT] = 0.15
    """Fraction of a text's tokens that are in spans."""
    mean_span_length: Annotated[float, Field(ge=1), FLOAT, IN_FP32] = 3.0
    """Mean number of tokens per span."""

    def lengths(self, text: int) -> tuple[int, int]:
        """Return the number of tokens in spans and the number of spans, for a text of `text` tokens."""
        noise = min(max(round(text * self.noise_density), 1), text - 1)
        return noise, min(max(round(noise / self.mean_span_length), 1), text - noise)

    def text_length(self, inputs: int) -> int:
        """Return the length of the longest text that fits in `inputs` tokens (at least 3) after corruption.

        The corrupted form has a sentinel for each span and an end token. This equals `random_spans_helper` of seqio
        (Raffel et al.): a text of `inputs` - 1 tokens always fits, because no span is empty, and the corrupted form of
        a longer text is never shorter.
        """
        text = inputs - 1
        while True:
            noise, spans = self.lengths(text + 1)
            if text + 1 - noise + spans + 1 > inputs:
                return text
            text += 1


class ObjectiveConfig(Section):
    """Training objective other than the default of the architecture (`megafp8.objectives`)."""

    def problems(self, config: Config) -> Iterator[Problem]:
        """Yield the problems of `config`, which contains this section."""
        raise NotImplementedError


class PrefixLmConfig(ObjectiveConfig):
    """Prefix language modeling (Raffel et al. 2019, arXiv:1910.10683; GLM; UL2's S-denoising).

    The first tokens of each sample, its prefix, attend to each other in both directions and are not predicted. The
    length of each prefix is drawn uniformly from min_length to max_length.
    """

    min_length: Tokens = 1
    """Length of the shortest prefix, in tokens. A prefix of 1 token is ordinary next-token prediction."""
    max_length: Tokens | None = None
    """Length of the longest prefix, in tokens; equal to min_length for prefixes of one length. Default:
    training.seq_length, which leaves one token to predict."""

    def problems(self, config: Config) -> Iterator[Problem]:
        """Yield a problem for each setting that cannot be combined with prefixes."""
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
                rule = f"{where} all tokens must attend to the whole prefix, which a window would cut off"
                yield Problem(f"{path}.sliding_window", window, rule, f"leave it out, {off}")
            if getattr(part, "position_embedding", None) == "alibi":
                rule = f"{where} tokens of the prefix attend to later tokens, where ALiBi has no bias"
                yield Problem(f"{path}.position_embedding", "alibi", rule, f"try rope, {off}")
        if m.mtp_num_layers:
            rule = f"{where} a token of the prefix would see the embedding of the token that it must predict"
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
    """Documents rearranged to put a middle span after the text around it (Bavarian et al. 2022, arXiv:2207.14255).

    The position of each span is random. The last three tokens of the suffix are dropped to make room for the three
    marks.
    """

    rate: Annotated[float, Field(gt=0, le=1), FLOAT] = 0.5
    """Fraction of the documents in a sample that are rearranged."""
    spm_rate: Annotated[float, Field(ge=0, le=1), FLOAT] = 0.5
    """Fraction of the rearranged documents that have the suffix before the prefix."""
    prefix: Count | None = None
    """Token id that marks the prefix. Default: <|fim_prefix|>, <fim_prefix> or ▁<PRE> of data.tokenizer."""
    middle: Count | None = None
    """Token id that marks the middle. Default: <|fim_middle|>, <fim_middle> or ▁<MID> of data.tokenizer."""
    suffix: Count | None = None
    """Token id that marks the suffix. Default: <|fim_suffix|>, <fim_suffix> or ▁<SUF> of data.tokenizer."""

    def problems(self, config: Config) -> Iterator[Problem]:
        """Yield a problem for each setting that cannot be combined with rearranged documents."""
        where, off = "data.fill_in_the_middle is set, and", "or leave data.fill_in_the_middle out"
        if config.model.architecture != "gpt":
            rule = f"{where} rearranged documents are for models that predict the next token"
            yield Problem("model.architecture", config.model.architecture, rule, f"try gpt, {off}")
        if config.data.loss_on is not None:
            rule = f"{where} the loss mask is for documents in their original order"
            yield Problem("data.loss_on", config.data.loss_on, rule, f"leave it out, {off}")


class DpoConfig(ObjectiveConfig):
    """Direct preference optimization on pairs of chosen and rejected answers (Rafailov et al. 2023, arXiv:2305.18290).

    megafp8 preprocess --style preference writes such data. The loss of a pair is -log sigmoid(beta · ((log p(chosen) -
    log p_ref(chosen)) - (log p(rejected) - log p_ref(rejected)))), averaged over the pairs of the global batch. p_ref
    is the model with which the run begins. Pairs that are longer than a sample are left out.
    """

    beta: PositiveFloat = 0.1
    """Weight of the difference from the reference model. Larger values keep the model closer to it."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5), FLOAT] = 0.0
    """Assumed probability that a pair has its labels swapped (conservative DPO)."""
    reference: Literal["live", "precomputed"] = "live"
    """Source of the log-probabilities under the reference model. live: compute them in each step. With lora, the
    reference is the model without its adapters; otherwise it is a second, frozen copy of the initial weights in the
    same layout, in training.precision. precomputed: a new run computes the log-probabilities of all pairs and writes
    them next to the data, <prefix>.reference-<digest of the weights>.npz; later runs from the same weights read this
    file."""

    def problems(self, config: Config) -> Iterator[Problem]:
        """Yield a problem for each setting that cannot be combined with DPO."""
        m, d, where = config.model, config.data, "data.dpo is set, and"
        off = "or leave data.dpo out"
        if m.architecture != "gpt":
            rule = f"{where} it needs the probability of each token given the tokens before it"
            yield Problem("model.architecture", m.architecture, rule, f"try gpt, {off}")
            return
        if d.loss_on is not None:
            yield Problem("data.loss_on", d.loss_on, f"{where} its loss is computed on answers only", "leave it out")
        if d.packing != "best_fit":
            rule = f"{where} its pairs are packed by best_fit, which keeps both answers of a pair together"
            yield Problem("data.packing", d.packing, rule, f"try best_fit, {off}")
        yield from plain_loss_problems(config, where)
        if config.stages:
            rule = f"{where} the reference is the model with which the run begins, not a later stage"
            yield Problem("stages", "set", rule, "make each stage a separate run, with checkpoint.init_from")
        remote = next((path for path in (*d.train, *d.validation.values()) if "://" in path), None)
        if self.reference == "precomputed" and remote is not None:
            rule = f"{where} log-probabilities are written next to the data, but {remote} is in object storage"
            yield Problem("data.dpo.reference", self.reference, rule, "try live, or copy the data to a disk")


class DistillationConfig(ObjectiveConfig):
    """Learning from the logits of a larger model, the teacher (Hinton et al. 2015, arXiv:1503.02531).

    The loss of a token is weight · temperature² · KL(teacher ‖ student) + (1 - weight) · cross entropy. Both
    distributions in the divergence are softmax(logits / temperature). The same tokens have a loss as without a teacher
    (loss_on, mask_eod_loss).
    """

    teacher: UserPath
    """Teacher model, with the same vocabulary as the run: a Hugging Face folder, a run folder, or a checkpoint. It is
    loaded as a frozen model in the run's layout, in training.precision."""
    logits: Literal["live", "precomputed"] = "live"
    """Source of the teacher's logits. live: compute them in each step. precomputed: a new run computes the logits of
    all tokens in its own layout and writes the top_k largest next to the data, <prefix>.teacher-<digest>.npy; later
    runs with the same teacher, data and top_k read them, in any layout."""
    weight: Annotated[float, Field(gt=0, le=1), FLOAT] = 1.0
    """Weight of the divergence in the loss; the cross entropy of the labels has weight 1 - weight."""
    temperature: PositiveFloat = 1.0
    """Divisor of the teacher's and student's logits in the divergence."""
    top_k: PositiveInt | None = None
    """Number of most probable tokens to which the teacher's distribution is truncated and renormalized. Default: all
    tokens. The teacher's logits of all micro-batches of a step are kept in memory, for these tokens or for the whole
    vocabulary."""

    def problems(self, config: Config) -> Iterator[Problem]:
        """Yield a problem for each setting that cannot be combined with distillation."""
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
        """Yield a problem for each setting that cannot be combined with precomputed logits.

        A token's logits must be the same in all epochs, and the file must fit next to the data.
        """
        d, where = config.data, "data.distillation.logits is precomputed, and"
        if self.top_k is None:
            rule = f"{where} logits of the whole vocabulary are too large to store"
            yield Problem("data.distillation.top_k", None, rule, "try 64")
        if not d.packs_whole_documents:
            rule = f"{where} any other packing gives a token a different context in each epoch"
            yield Problem("data.packing", d.packing, rule, "try best_fit, or data.distillation.logits=live")
        if config.stages:
            rule = f"{where} a later stage cuts long documents at different places"
            yield Problem("stages", "set", rule, "make each stage a separate run, with checkpoint.init_from")
        path = next((path for path in (*d.train, *d.validation.values()) if "://" in path), None)
        path = d.text[0][1] if path is None and d.text else path
        if path is not None:
            rule = f"{where} logits are written next to the data, but {path} is text or in object storage"
            yield Problem("data.distillation.logits", self.logits, rule, "try live, or preprocessed data on a disk")


class GrpoConfig(ObjectiveConfig):
    """Group relative policy optimization (Shao et al. 2024, arXiv:2402.03300).

    data.train has JSON lines, each with a prompt and the keys that the reward needs. In each step, the model generates
    group_size texts per prompt, and each text gets a reward. Texts with a reward above the mean of their group become
    more likely, the others less likely. training.global_batch_size is the number of texts per step; they are packed
    into at most as many samples.
    """

    reward: UserPath | None = None
    """Python function that rates texts: module:function or path.py:function. Its arguments are lists: prompts (as in
    the data), completions (texts), and, for each other key that all records have, its values. It returns one number per
    text. Give either this key or reward_command."""
    reward_command: list[UserPath] | None = Field(None, min_length=1)
    """Program that rates texts, with its arguments. It reads one JSON line per text from stdin, the record with the
    added key completion, and writes one number per line to stdout. It is started in each step."""
    reward_seconds: PositiveFloat = 600.0
    """Time limit of reward_command, in seconds per step."""
    prompt_key: str = "prompt"
    """Key of a record that holds the prompt: a text, or a list of messages. The tokenizer's chat template renders
    messages up to the start of the assistant's answer."""
    group_size: Annotated[PositiveInt, Field(ge=2)] = 8
    """Number of texts per prompt."""
    max_tokens: PositiveInt = 256
    """Maximum number of generated tokens per text."""
    temperature: Annotated[PositiveFloat, Field(ge=1e-4)] = 1.0
    """Divisor of the logits, in sampling and in the log-probabilities that are trained."""
    beta: NonNegative = 0.0
    """Weight of the KL divergence from the model with which the run begins. 0: no such term, and no reference model in
    memory."""
    clip_low: Annotated[float, Field(gt=0, lt=1), FLOAT] = 0.2
    """Lower clipping range of the probability ratio between training and sampling (PPO's epsilon): ratios below 1 -
    clip_low are clipped."""
    clip_high: PositiveFloat = 0.2
    """Upper clipping range of the probability ratio between training and sampling: ratios above 1 + clip_high are
    clipped."""
    texts_at_once: PositiveInt = 64
    """Number of texts that a model generates at the same time. Memory for the key-value cache grows with it."""

    def problems(self, config: Config) -> Iterator[Problem]:
        """Yield a problem for each setting that cannot be combined with GRPO."""
        m, d, t, where, off = (
            config.model,
            config.data,
            config.training,
            "data.grpo is set, and",
            "or leave data.grpo out",
        )
        if m.architecture != "gpt":
            rule = f"{where} only models of architecture gpt generate text"
            yield Problem("model.architecture", m.architecture, rule, f"try gpt, {off}")
            return
        yield from self._data_problems(d, where, off)
        if t.global_batch_size % self.group_size:
            rule = f"{where} it counts texts and must be a multiple of data.grpo.group_size ({self.group_size})"
            works = f"try {-(-t.global_batch_size // self.group_size) * self.group_size}"
            yield Problem("training.global_batch_size", t.global_batch_size, rule, works)
        if self.max_tokens >= t.seq_length:
            rule = f"leaves no room for a prompt in training.seq_length ({t.seq_length})"
            yield Problem(
                "data.grpo.max_tokens", self.max_tokens, rule, f"try {max(1, t.seq_length // 2)}, or longer samples"
            )
        if (self.reward is None) == (self.reward_command is None):
            rule = "exactly one of data.grpo.reward and data.grpo.reward_command must be given"
            yield Problem("data.grpo.reward", self.reward, rule, "give one of them, such as reward=rewards.py:exact")
        elif self.reward is not None and not re.fullmatch(r".+:[A-Za-z_]\w*", self.reward):
            rule = "names no function"
            yield Problem("data.grpo.reward", self.reward, rule, "try module:function or path.py:function")
        yield from plain_loss_problems(config, where)
        if t.eval_interval:
            rule = f"{where} prompts have no loss to evaluate"
            yield Problem("training.eval_interval", t.eval_interval, rule, "try 0; training.evaluate works")
        if config.resilience.loss_spike is not None:
            rule = f"{where} its loss cannot show a spike, because advantages have a mean of 0"
            yield Problem("resilience.loss_spike", "set", rule, "leave it out")
        if config.parallel.schedule.endswith(".csv"):
            rule = f"{where} the number of micro-batches depends on the texts of a step, but a table has a fixed number"
            yield Problem("parallel.schedule", config.parallel.schedule, rule, "name a schedule, or a function")
        if config.stages:
            yield Problem("stages", "set", f"{where} stages are not supported", "leave them out")

    def _data_problems(self, d: DataConfig, given: str, off: str) -> Iterator[Problem]:
        """Yield a problem for each data setting that cannot be combined with GRPO."""
        if d.tokenizer is None:
            yield Problem("data.tokenizer", None, f"{given} prompts are texts", "set it")
        if d.loss_on is not None:
            yield Problem(
                "data.loss_on", d.loss_on, f"{given} its loss is computed on sampled tokens only", "leave it out"
            )
        if d.packing != "best_fit":
            rule = f"{given} a sample holds several whole texts"
            yield Problem("data.packing", d.packing, rule, f"try best_fit, {off}")
        if len(d.train) > 1:
            rule = f"{given} all prompts come from one entry"
            yield Problem("data.train", [*d.train], rule, "give one: a folder or a pattern names several files")
        for path in d.train:
            if not is_text(path) or "://" in path:
                rule = f"{given} {path} does not name JSON-lines files on disk"
                yield Problem("data.train", path, rule, f"give prompts, such as prompts.jsonl, {off}")
        if d.validation:
            rule = f"{given} prompts have no loss to evaluate"
            yield Problem("data.validation", [*d.validation], rule, "leave it out")


def plain_loss_problems(config: Config, given: str) -> Iterator[Problem]:
    """Yield a problem for each setting that needs cross entropy as the loss; `given` names the other loss."""
    m, t, r = config.model, config.training, config.resilience
    if m.mtp_num_layers:
        rule = f"{given} multi-token prediction adds its own loss"
        yield Problem("model.mtp_num_layers", m.mtp_num_layers, rule, "try 0")
    if t.z_loss:
        yield Problem("training.z_loss", t.z_loss, f"{given} its loss has no z-loss", "try 0")
    if r.replicas is not None:
        yield Problem("resilience.replicas", "set", f"{given} replicas are not supported", "leave it out")


class StreamsConfig(Section):
    """Tokenization of text in data.train and data.validation while the run trains (docs/own-data.md)."""

    text_key: str = "text"
    """Key in JSON lines, or column in parquet files, that holds the text."""
    canonical_streams: PositiveInt | None = None
    """Number of streams to which documents are dealt; sample i comes from stream i mod this number. It determines the
    order of samples, so it cannot change during a run. Must be a multiple of training.micro_batch_size times the
    data-parallel size. Default: training.global_batch_size at the beginning of the run, which works in every layout."""
    skip_errors: bool = False
    """Skip documents that cannot be read or tokenized, and log the first ones and their number. false: the run ends at
    such a document."""


class ObjectCacheConfig(Section):
    """Local cache of data sets in object storage (docs/object-storage.md). Processes and runs may share it."""

    folder: UserPath | None = None
    """Folder on local disk. Default: in the user's cache folder."""
    limit_gib: PositiveFloat = 64.0
    """Maximum total size of cached blocks, in GiB; the least recently used blocks are deleted first. The .idx files are
    not included. If all .bin files fit, each node downloads them once."""
    block_mib: PositiveFloat = 4.0
    """Size of the blocks of .bin files that are downloaded, in MiB. Smaller blocks transfer less if the cache cannot
    hold all data, because shuffled documents use only a part of each block."""


_TEXT_SUFFIXES = (".json", ".jsonl", ".ndjson", ".txt", ".parquet")
_COMPRESSIONS = (".gz", ".zst", ".bz2", ".xz")


def is_text(path: str) -> bool:
    """Return whether an entry of data.train is text, not a prefix of .bin/.idx files.

    The file name decides, or for a path without a known suffix whether it is a folder.
    """
    name = path
    for suffix in _COMPRESSIONS:
        name = name.removesuffix(suffix)
    if name.endswith((*_TEXT_SUFFIXES, "/")) or any(x in path for x in "*?[") or path.startswith("hf://"):
        return True
    return "://" not in path and Path(path).is_dir() and not Path(f"{path}.idx").exists()


class DataConfig(Section):
    """Data sets and their tokenizer."""

    train: list[UserPath] | dict[UserPath, PositiveFloat] = Field(min_length=1)
    """Data sets for training: prefixes of .bin/.idx files, or text that is tokenized while the run trains
    (docs/own-data.md). Text is JSON lines, parquet or plain text, compressed or not, given as files, folders or
    patterns such as corpus/*.jsonl.zst. Both kinds are paths or URLs such as s3://bucket/corpus; text may also be at
    hf://datasets/org/name. A list weights data sets by their number of training tokens (with packing best_fit or
    balanced, of samples), so that all finish an epoch at the same time. A blend {prefix: weight} sets their shares of
    the samples, in any unit. A prefix that is listed twice counts twice. When a run resumes, weights may change and
    data sets may be added or removed; each data set continues with its unused samples."""
    packing: Literal["concatenate", "best_fit", "balanced", "sentences"] = "concatenate"
    """Method that fills samples with documents. concatenate: shuffled documents one after another, cut at the end of a
    sample. best_fit: whole documents by best-fit decreasing; only documents longer than a sample are cut, and the rest
    of a sample is padding without loss. Requires reset_at_documents and mask_eod_loss. With many short documents,
    padding is well below 1%; a run logs this share, and the share of documents cut by either method. balanced: the
    samples of best_fit, ordered within each step by the FLOPs of their documents, so that data-parallel ranks wait less
    for the longest document. A run may change between the two. sentences: consecutive sentences of one document until
    the sample is full, then padding; for data sets of megafp8 preprocess --split-sentences and models with
    model.binary_head."""
    validation: dict[Name, UserPath] = {}
    """Data sets for validation by name, {name: prefix of .bin/.idx files, or text}. All their documents are used, in
    addition to the documents that split takes from training data. The loss of each is the metric valid/<name>. The data
    sets may change when a run resumes."""
    validation_by_source: bool = False
    """Measure the validation loss of each data set of data.train separately, too, on its validation documents (split).
    The metric is valid/<last part of its prefix>, or valid/<prefix> if several data sets share the last part."""
    split: str = "969,30,1"
    """Proportions in which documents of data.train are divided into training, validation and test sets."""
    restart_changed: bool = False
    """Restart data sets from sample 0 if their files, documents (split) or packing have changed when a run resumes.
    false: such a change is an error. Unchanged data sets always continue."""
    tokenizer: TokenizerConfig | None = None
    """Tokenizer of the data. Required if model.vocab_size is not given; otherwise only checked against the data."""
    reset_at_documents: bool = False
    """Reset attention and positions at each document boundary in a sample. The boundaries are those stored in the data
    set; they do not depend on the tokens."""
    mask_eod_loss: bool = False
    """Exclude the first token of each document from the loss."""
    prefix_lm: PrefixLmConfig | None = None
    """Prefix language modeling; model.architecture gpt only. Default: each token attends only to earlier tokens."""
    fill_in_the_middle: FillInTheMiddleConfig | None = None
    """Rearrangement of documents, for models that complete text between other text, such as code; model.architecture
    gpt only. Default: documents are not rearranged."""
    dpo: DpoConfig | None = None
    """Direct preference optimization: learn which of two answers is preferred; model.architecture gpt only. Default:
    next-token prediction."""
    distillation: DistillationConfig | None = None
    """Distillation: learn from the logits of a teacher; model.architecture gpt only. Default: learn from texts alone.
    """
    grpo: GrpoConfig | None = None
    """Reinforcement learning from rewards of texts that the model generates; model.architecture gpt only. Default:
    learn from texts."""
    loss_on: Literal["answers", "all"] | None = None
    """Tokens that have a loss; required for data sets with a loss mask, such as chats. answers: only tokens in the
    mask, which are the answers in chats and the completions of prompts; the loss is their mean over the global batch.
    all: all tokens. Requires packing best_fit or balanced. Default: data sets have no loss mask."""
    special_tokens: SpecialTokens = SpecialTokens()
    """Ids of special tokens that the tokenizer does not define."""
    masked_lm: MaskedLmConfig = MaskedLmConfig()
    """Masked-token prediction, for model.architecture bert."""
    span_corruption: SpanCorruptionConfig = SpanCorruptionConfig()
    """Spans to restore, for model.architecture t5."""
    num_workers: Annotated[int, Field(ge=0, le=1024), INTEGER] = 0
    """Number of loader processes per rank, or of processes that tokenize text. 0: load in the training process, which
    is fast enough for files on local disk. Loader processes help if samples wait for storage or are expensive to
    compute."""
    streams: StreamsConfig = StreamsConfig()
    """Tokenization of text while the run trains."""
    index_cache: UserPath | None = None
    """Folder on local disk for sample indices. Default: in the user's cache folder."""
    object_cache: ObjectCacheConfig = ObjectCacheConfig()
    """Local cache of data sets in object storage."""

    @field_validator("train", mode="wrap")
    @classmethod
    def _keep_every_data_set(cls, train: Any, validate: Callable[[Any], Any]) -> Any:
        """Reject a blend in which two keys become the same path when `~` is expanded."""
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
    def packs_whole_documents(self) -> bool:
        """Whether only documents that are longer than a sample are cut, and samples are padded."""
        return self.packing in ("best_fit", "balanced")

    @property
    def has_loss_mask(self) -> bool:
        """Whether data sets have a loss mask."""
        return self.loss_on is not None or self.dpo is not None

    @property
    def compares(self) -> bool:
        """Whether each step compares the model with a frozen model."""
        sources = (self.distillation and self.distillation.logits, self.dpo and self.dpo.reference)
        return "live" in sources or (self.grpo is not None and self.grpo.beta > 0)

    @property
    def objectives(self) -> dict[str, ObjectiveConfig]:
        """Sections of the given objectives, by key."""
        values = {name: getattr(self, name) for name in type(self).model_fields}
        return {name: value for name, value in values.items() if isinstance(value, ObjectiveConfig)}


LoraTarget = Literal["q", "k", "v", "q_up", "kv_up", "proj", "gate", "up", "down"]


class LoraConfig(Section):
    """Low-rank adaptation (arXiv:2106.09685): y = x Wᵀ + alpha / rank · (x Aᵀ) Bᵀ. Only A and B are trained."""

    rank: PositiveInt = 16
    """Rank of the adapters: number of rows of A and columns of B."""
    alpha: PositiveFloat = 32.0
    """Scale of the adapters: the product of A and B is multiplied by alpha / rank."""
    targets: Annotated[list[LoraTarget], Field(min_length=1)] | None = None
    """Projections in each block that get adapters: q, k, v and proj of attention; with latent attention q_up (q if
    there is no query latent), kv_up and proj; gate, up and down of the MLP. Default: all that the model has; in a model
    with experts, only the attention projections."""


class CheckpointConfig(Section):
    """Saving and resuming."""

    folder: UserPath | None = None
    """Folder of the checkpoints, which are stored in <folder>/<name>: a path, or a URL of object storage such as
    s3://bucket/checkpoints. Default: in the run folder."""
    interval: Count = 0
    """Number of steps between checkpoints. 0: save only at the end and on SIGTERM or Ctrl-C. If the step was skipped,
    the next step that is not skipped is saved instead."""
    keep_last: PositiveInt | None = None
    """Number of newest complete checkpoints to keep. Default: all."""
    keep_every: PositiveInt | None = None
    """Step interval of older checkpoints to keep: those at multiples of this number are never deleted. Requires
    keep_last."""
    async_save: bool = True
    """Copy the state to host memory and write it while training continues. Requires as much host memory as the rank
    writes: 14 bytes per parameter in bf16, divided by the number of ranks. The last checkpoint of a run is written
    synchronously."""
    memory_interval: Count = 0
    """Number of steps between checkpoints in node memory; each node also stores a copy of another node's checkpoint.
    After a restart by its agent, a job continues from these if they are newer than the checkpoints on disk. Each save
    waits for the previous one. 0: none (docs/resilience.md)."""
    memory_folder: UserPath = "/dev/shm"
    """Folder for the checkpoints of memory_interval, in memory or on a disk of each node; environment variables are
    expanded. It must have room for two checkpoints, each with the parts of two nodes."""
    resume: bool = True
    """Continue from the newest complete checkpoint in the run folder, if there is one."""
    init_from: UserPath | None = None
    """Source of the initial weights of a new run: a Hugging Face model folder, a name on the Hub (org/name), or any
    other checkpoint that megafp8 convert reads. The model section may then be omitted or incomplete; given keys must
    agree with the folder. With model.moe and a source without experts, every expert starts as a copy of its layer's MLP
    (upcycling)."""
    init_optimizer: bool = False
    """Load the optimizer state (Adam's moments, fp32 masters, step count) from init_from, too, which must be a
    checkpoint of a run or of Megatron Core. The run still begins at step 0, with the learning rate and data of step 0.
    """
    allow_model_change: list[str] = []
    """Keys of the model section, e.g. [rope_theta], that may differ from the checkpoint from which a run resumes. Any
    other changed key is an error, because the same weights would compute something else. Works only for keys that do
    not change tensor shapes."""
    verify: bool = True
    """Verify the checksums of data files before loading; metadata.json and the index are always verified. If a
    checkpoint is damaged, an older one is used."""


class LossSpikeConfig(Section):
    """Response to a loss spike (docs/resilience.md).

    A loss is a spike if it exceeds the mean of the preceding losses by more than `sigmas` standard deviations.
    """

    action: Literal["skip", "rewind"] = "skip"
    """Action when the loss spikes. skip: leave the weights unchanged, as in a step with non-finite gradients. rewind:
    also go back to the newest checkpoint and leave out the samples since then."""
    sigmas: PositiveFloat = 6.0
    """Threshold of a spike, in standard deviations above the mean."""
    window: Annotated[int, Field(ge=4), INTEGER] = 128
    """Number of latest losses that determine mean and standard deviation. No step is a spike until half of them exist.
    """


class FaultConfig(Section):
    """Fault to inject, once per run."""

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
    """Kind of fault. kill: the rank sends itself SIGKILL. stop: the rank sends itself SIGSTOP. hang: sleep forever.
    leave_out_collective: continue without the collective at the end of the step. exception: raise an exception.
    nan_gradient: set one gradient of the rank to NaN. flip_weight: flip one bit of a weight after the update.
    flip_gradient: flip one bit of a gradient when it is recomputed. slow: sleep before the forward pass in several
    steps, from this step on. loss_spike: set all labels of the rank's samples to 0. fail_save: let writes of large
    files fail. full_disk: fill the disk of the run folder, which may have at most 1 GiB of free space.
    damage_checkpoint: change a byte of the newest checkpoint and of the checkpoint in node memory, then SIGKILL.
    lose_memory: remove the node's checkpoints in memory, then SIGKILL."""
    rank: Count
    """Global rank on which the fault happens."""
    step: PositiveInt
    """Step, counted from 1, in which the fault happens."""
    seconds: PositiveFloat = 1.0
    """slow: time to sleep in each step. full_disk: time until the file is removed."""
    steps: PositiveInt = 10
    """slow: number of steps."""
    free_bytes: Count = 0
    """full_disk: number of bytes that stay free."""


class OuterConfig(Section):
    """Outer optimization steps of replicas joined by slow links (DiLoCo, arXiv:2311.08105; docs/resilience.md).

    Each replica trains alone for a round of `inner_steps` steps. Then SGD with Nesterov momentum updates the shared
    weights by the average change of the replicas' weights.
    """

    inner_steps: PositiveInt = 32
    """Number of steps in a round. The last round ends with the run. The paper uses 500 for a pretrained model."""
    learning_rate: PositiveFloat = 0.7
    """Learning rate of the outer step. With learning rate 1 and momentum 0, the new weights are the average."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Nesterov momentum of the outer step."""


class ReplicasConfig(Section):
    """Replicas of the model, each a separate job, that may leave and rejoin during training (docs/resilience.md).

    `parallel` describes the layout of one replica; the global batch is divided over all replicas.
    """

    count: Annotated[int, Field(ge=2), INTEGER]
    """Number of replicas. A run begins when all are present, or after start_seconds."""
    min: PositiveInt = 1
    """Minimum number of replicas that train. With fewer, the job waits for others."""
    batch: Literal["keep", "shrink"] = "keep"
    """Handling of a missing replica's share of the global batch. keep: the other replicas compute it. shrink: its
    samples are left for later steps, and gradients are means over the remaining tokens."""
    exchange_seconds: PositiveFloat = 60.0
    """Maximum wait for an answer of another replica at the end of a step, in seconds; it must cover the slowest
    replica. After that, the step starts again without the replicas that did not answer."""
    start_seconds: NonNegative = 300.0
    """Time for which the first replicas wait for the others before the first step of a job, in seconds."""
    slow_ratio: Annotated[float, Field(ge=1)] = 2.0
    """Ratio to the median step time above which a replica is logged as slow. Differences below 0.05 s are ignored."""
    slow_steps: Count = 0
    """Number of consecutive slow steps after which a replica leaves, so that it can be restarted. 0: it stays."""
    outer: OuterConfig | None = None
    """Exchange of weights after each round of several steps, for slow links. Membership, exchange_seconds and
    slow_steps then apply to rounds. Default: exchange gradients in each step."""


class ResilienceConfig(Section):
    """Detection of hangs, loss spikes, slow ranks and wrong results (docs/resilience.md)."""

    hang_seconds: NonNegative | None = None
    """Time without progress in a training step, in seconds, after which the job ends for a restart. A message names the
    rank at fault. Must be less than timeout_seconds. Default: half of timeout_seconds. 0: never."""
    loss_spike: LossSpikeConfig | None = None
    """Detection and skipping of loss spikes. Default: no step is skipped because of its loss."""
    straggler_interval: Count = 100
    """Number of steps between comparisons of the compute times of all ranks. The slowest rank goes to the metrics, and
    to the log if it is slow. 0: never."""
    replicas: ReplicasConfig | None = None
    """Replicas that may leave and rejoin. Default: one job, which ends if a rank is lost."""
    recompute_interval: Count = 0
    """Number of steps between checks that each rank computes the same bits twice. Each check costs two forward and
    backward passes. On GPUs, requires deterministic: true. Not available with parallel.fsdp. 0: never."""
    inject: list[FaultConfig] = []
    """Faults to inject, for tests."""
    notify: str | None = None
    """Shell command that runs once each time the run starts, restarts, stops, finishes or fails. It gets the event,
    run, step, reason and exit code in environment variables and as JSON on stdin (docs/resilience.md). Default: none.
    """


class LoggingConfig(Section):
    """Logging of metrics, in addition to metrics.jsonl in the run folder."""

    interval: PositiveInt = 1
    """Number of steps between log lines, which go to log.txt in the run folder and, depending on progress, to the
    console. Steps that were skipped or evaluated always have a log line."""
    progress: bool = True
    """Show step lines on the console, or a progress bar if it is a terminal. Warnings are always shown."""
    tensorboard: bool = True
    """Write TensorBoard event files to the run folder."""
    layer_norms_interval: Count = 100
    """Number of steps between measurements of the norms of gradients, weights and updates, by block and for embedding,
    final norm and output layer: metrics `grad_norm/layers.0`, `weight_norm/...`, `update_norm/...`. 0: none."""
    expert_load_interval: Count = 100
    """Number of steps between records of each expert's token count in expert_load.jsonl in the run folder, with
    model.moe; megafp8 plot-expert-load draws them. 0: none."""
    wandb_project: str | None = None
    """Weights & Biases project to log to; WANDB_MODE=offline is supported. Default: none."""
    metrics_port: Annotated[int, Field(ge=1, le=65535), INTEGER] | None = None
    """Port on which rank 0 serves metrics for Prometheus, at /metrics as OpenMetrics text, to anyone who can reach it
    (docs/watching-runs.md). Default: none."""
    pipeline_trace_step: PositiveInt | None = None
    """Step in which each pipeline rank records the times of its actions to pipeline_trace.json in the run folder;
    megafp8 plot-schedule draws them next to the simulation. Default: none."""


class ProfileConfig(Section):
    """Profiles of some steps, written to the folder profile in the run folder (docs/watching-runs.md).

    The keys may change when a run resumes.
    """

    steps: tuple[PositiveInt, PositiveInt] | None = None
    """First and last profiled step, counted from 1. Default: none, which is only allowed for record: [collectives]; the
    collectives are then written only after a hang."""
    ranks: Annotated[list[Count], Field(min_length=1)] | Literal["all"] = [0]
    """Global ranks that write files."""
    record: Annotated[list[Literal["trace", "memory", "collectives"]], Field(min_length=1)] = ["trace"]
    """Kinds of records. trace: a torch.profiler trace of operators, kernels and sections of a step. memory: GPU
    allocations, with the source lines that made them. collectives: PyTorch's flight recorder with the latest 2,000
    collectives of each rank; after a hang, all ranks write it."""


class InferenceConfig(Section):
    """Forward passes in generation and scoring, from a checkpoint or in the running job."""

    batch_invariant: bool = False
    """Compute forward passes so that a token's numbers do not depend on other sequences in the batch. Log-probabilities
    of generated tokens then equal the ones in training, bit for bit, whatever the batch, its order, and the chunks of
    prompts. Training uses the same forward passes, which are slower; backward passes do not change. Requires tensor,
    context and expert parallelism of 1, and layers of softmax attention (docs/generation.md)."""


class StageConfig(Section):
    """Part of a run with different values of some keys.

    A stage begins as if the run had been stopped and resumed with these values.
    """

    name: Annotated[Name, StringConstraints(max_length=100)]
    """Name of the stage in the log and in checkpoints."""
    begin: Count
    """Number of steps before the stage begins. It ends where the next stage begins, or with the run."""
    overrides: dict[str, Any] = {}
    """Values by dotted keys, as on the command line: {training.seq_length: 8192}. Each value replaces the whole value
    of its key, such as a blend in data.train. Other keys have the values of the run, not of the previous stage."""


class Config(Section):
    """Config of a pretrain_gpt.py run."""

    name: Annotated[Name, StringConstraints(max_length=200)]
    """Name of the run and of its folder."""
    base: str | None = Field(default=None, exclude=True)
    """Base config: another file, relative to this one, or the name of a shipped config. Its keys apply unless this file
    overrides them. Sections are merged key by key; lists and other values replace the base's values. The name is not
    inherited (docs/launching.md)."""
    run_dir: UserPath = "runs"
    """Folder that holds the run folders <run_dir>/<name>."""
    seed: Integer = 1234
    """Random seed for initial weights, the order of the data, and dropout."""
    deterministic: bool = False
    """Make two runs with the same layout on the same kind of machine bit-identical, on GPUs too: sums have a fixed
    order, and no algorithm is chosen by speed. Slower, mostly in attention (docs/decisions/0014-determinism.md)."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """Device to train on. auto: cuda if there is a GPU, else cpu."""
    timeout_seconds: Annotated[float, Field(gt=0, le=1e9), FLOAT] = 600.0
    """Time limit of a collective, in seconds. A collective that takes longer ends the job."""
    model: ModelConfig
    parallel: ParallelConfig = ParallelConfig()
    fp8: Fp8Config = Fp8Config()
    training: TrainingConfig
    optimizer: OptimizerConfig
    data: DataConfig
    lora: LoraConfig | None = None
    """Adapters of linear layers; no other weights are trained. Usually used with checkpoint.init_from. Default: train
    all weights."""
    stages: list[StageConfig] = []
    """Parts of the run that change the sequence length, batch size, data, learning rate, layout, recipe or other keys
    (docs/stages.md)."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    logging: LoggingConfig = LoggingConfig()
    resilience: ResilienceConfig = ResilienceConfig()
    inference: InferenceConfig = InferenceConfig()
    profile: ProfileConfig | None = None
    """Profiles of some steps. Default: none."""

    @field_validator("base")
    @classmethod
    def _read_already(cls, base: str | None) -> None:
        if base is not None:
            raise PydanticCustomError("base", "Only load_config reads a base")

    @property
    def spec(self) -> ModelSpec:
        """Resolved network."""
        return self.model.spec

    @property
    def lora_targets(self) -> Sequence[str]:
        """Projections that get adapters."""
        return () if self.lora is None else self.lora.targets or self.spec.lora_targets

    @property
    def gathers_tokens(self) -> bool:
        """Whether tokens reach their experts by all-gather (parallel.expert_dispatch)."""
        p, chosen = self.parallel, [record.top_k for record in self.spec.expert_records]
        if p.expert_dispatch == "auto":
            return not chosen or p.expert_tensor > 1 or gathering_is_faster(p.expert, min(chosen))
        return p.expert_dispatch == "all_gather"

    @property
    def sample_tokens(self) -> int:
        """Maximum number of document tokens in a sample.

        GPT: one more than the inputs. BERT: without special tokens. T5: before spans are removed.
        """
        s, model = self.training.seq_length, self.model
        if model.architecture == "t5":
            return self.data.span_corruption.text_length(s)
        return s + 1 if model.architecture == "gpt" else s - (3 if model.binary_head else 2)

    @property
    def decoder_length(self) -> int | None:
        """Number of tokens in a decoder sample of t5; None for other architectures."""
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
        """Time without progress after which the job is ended, in seconds; 0 means never."""
        seconds = self.resilience.hang_seconds
        return self.timeout_seconds / 2 if seconds is None else seconds

    @property
    def outer(self) -> OuterConfig | None:
        """Outer steps of the replicas, or None."""
        return None if self.resilience.replicas is None else self.resilience.replicas.outer

    @property
    def tunes_gemms(self) -> bool:
        """Whether cuBLASLt algorithms are chosen by speed."""
        return not self.deterministic if self.fp8.gemm_autotune is None else self.fp8.gemm_autotune
