"""The tree of knobs. The text under a field is its documentation: it is in the JSON schema, so editors show it.

Each section checks what concerns itself alone; `checks.py` checks sections against each other and against the number
of ranks. Names are those of the field (Megatron-LM, torchtitan, Hugging Face) where these agree. Sections are frozen:
what a run was started with is what it runs with.
"""

from __future__ import annotations

from decimal import Decimal, InvalidOperation
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints
from pydantic_core import PydanticCustomError


def _number(value: object) -> object:
    """No truth value, which pydantic would take for 0 or 1."""
    if isinstance(value, bool):
        raise PydanticCustomError("number_type", "Input should be a number, not a truth value")
    return value


def _whole_number(value: object) -> object:
    """An integer of 64 bits; also of text such as 1e3, which is how YAML reads that."""
    if isinstance(value, str):
        try:
            number = Decimal(value)
        except InvalidOperation:
            return value
        if number.is_finite() and abs(number.adjusted()) < 20 and number == number.to_integral_value():
            value = int(number)
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise PydanticCustomError("integer_range", "Input should be an integer of 64 bits")
    return _number(value)


def _in_fp32(value: float) -> float:
    """A float that tensors of fp32 can be multiplied by."""
    if abs(value) > 3.4e38:
        raise PydanticCustomError("float_range", "Input should be a number in the range of fp32")
    return value


_INTEGER, _FLOAT, _IN_FP32 = BeforeValidator(_whole_number), BeforeValidator(_number), AfterValidator(_in_fp32)
# Their bounds come first: behind a validator pydantic would leave them out of the JSON schema.
Integer = Annotated[int, _INTEGER]
Count = Annotated[int, Field(ge=0), _INTEGER]
PositiveInt = Annotated[int, Field(gt=0), _INTEGER]
NonNegative = Annotated[float, Field(ge=0), _FLOAT, _IN_FP32]
PositiveFloat = Annotated[float, Field(gt=0), _FLOAT, _IN_FP32]
Decay = Annotated[float, Field(ge=0, lt=1), _FLOAT]
Pattern = Annotated[str, StringConstraints(min_length=1)]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)


class RopeScaling(Section):
    """Llama-3's rotary frequency scaling for contexts longer than those first trained on."""

    factor: PositiveFloat = 8.0
    """How much longer the context becomes."""
    low_freq_factor: PositiveFloat = 1.0
    """Wavelengths above original / this are scaled by the whole factor."""
    high_freq_factor: PositiveFloat = 4.0
    """Wavelengths below original / this are left alone; between the two, interpolated."""
    original_max_position_embeddings: PositiveInt = 8192
    """Context length before scaling, in tokens."""


class ModelConfig(Section):
    """The network. The defaults are Llama's choices; GPT-2's and Qwen's are a few fields away."""

    num_layers: Annotated[int, Field(gt=0, le=10_000), _INTEGER]
    """Transformer blocks in the whole model."""
    hidden_size: PositiveInt
    """Width of the residual stream."""
    num_attention_heads: PositiveInt
    """Query heads."""
    num_query_groups: PositiveInt | None = None
    """Key-value heads (grouped-query attention). Default: as many as query heads."""
    head_dim: PositiveInt | None = None
    """Width of one head. Default: hidden_size / num_attention_heads."""
    ffn_hidden_size: PositiveInt | None = None
    """Width inside the MLP. Default: 4 × hidden_size."""
    vocab_size: PositiveInt | None = None
    """Tokens in the vocabulary. Default: the tokenizer's."""
    vocab_multiple: PositiveInt = 128
    """The embedding is padded to a multiple of this; it must be divisible by parallel.tensor. Independent of the
    layout, so that a checkpoint fits every layout."""
    max_position_embeddings: PositiveInt | None = None
    """Rows of the learned position table. Default: training.seq_length. With rope: what a conversion to Hugging Face
    says is the longest context, nothing else."""
    position_embedding: Literal["rope", "learned", "none"] = "rope"
    """rope (Llama), learned (GPT-2) or none."""
    rope_theta: PositiveFloat = 10000.0
    """Base of the rotary frequencies."""
    rope_scaling: RopeScaling | None = None
    """Llama-3 frequency scaling; none by default."""
    normalization: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    """rmsnorm (Llama) or layernorm (GPT-2)."""
    norm_eps: PositiveFloat = 1e-5
    """Added to the variance."""
    activation: Literal["swiglu", "gelu", "gelu_tanh"] = "swiglu"
    """swiglu (Llama), gelu (exact) or gelu_tanh (GPT-2)."""
    linear_bias: bool = False
    """Biases on all linear layers of the blocks (GPT-2)."""
    qkv_bias: bool = False
    """Biases on the query, key and value projections only (Qwen2)."""
    qk_norm: bool = False
    """RMSNorm over each query and key head (Qwen3)."""
    tie_embeddings: bool = False
    """Output layer and embedding share one weight."""
    sliding_window: PositiveInt | None = None
    """A token attends to this many latest tokens, itself included. Default: all before it."""
    parallel_block: bool = False
    """Attention and MLP both read the block's input, and their outputs are added together (GPT-J, PaLM)."""
    init_std: PositiveFloat = 0.02
    """Standard deviation of the initial weights; output projections of a block get init_std / sqrt(2 · num_layers)."""

    @property
    def query_groups(self) -> int:
        return self.num_query_groups or self.num_attention_heads

    @property
    def channels(self) -> int:
        """Width of one head."""
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def ffn_size(self) -> int:
        return self.ffn_hidden_size or 4 * self.hidden_size

    @property
    def padded_vocab_size(self) -> int:
        assert self.vocab_size is not None, "vocab_size is resolved from the tokenizer before the model is built"
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple


V_SCHEDULES = ("zb-v", "dualpipev")
"""Schedules whose stages lie in a V."""


class ParallelConfig(Section):
    """How the model is laid over the ranks. Data parallelism is what remains of the world."""

    tensor: PositiveInt = 1
    """Tensor-parallel size: ranks that share each layer. Keep it inside one NVLink domain."""
    pipeline: PositiveInt = 1
    """Pipeline-parallel size: ranks that share the model's layers."""
    virtual_pipeline: PositiveInt = 1
    """Stages of consecutive layers that each of these ranks holds."""
    schedule: str = "1f1b"
    """Who computes what when. 1f1b (one stage a rank); interleaved (several: less bubble, more memory and
    communication); zb-h1 (one), zb-v (two): fill the bubble with weight gradients; dualpipev (two): DeepSeek's.
    Or the path of a .csv file, a row a rank with cells such as F3, B3, W3, F3.1 for micro-batch 3 and chunk 1; or
    module:function, called with placement and number of micro-batches. tools/plot_schedule.py draws them."""
    placement: Literal["turns", "v"] | None = None
    """Where stage s of S is. turns: on rank s mod pipeline; v: down the ranks and back, so that the last stage is on
    the first rank. Default: what the schedule needs, and turns for one of your own."""
    context: PositiveInt = 1
    """Context-parallel size: ranks that share each sequence, for sequences too long for one. Each has two chunks, one
    from either end, and gathers the others' keys and values; weights are on all of them."""
    sequence_parallel: bool = True
    """Cut activations along the sequence between tensor-parallel regions. Without effect when tensor is 1."""
    overlap_tensor: Literal["auto", "none", "chunked", "symmetric"] = "auto"
    """Hide sequence parallelism's communication behind the layers' GEMMs (Megatron-LM's tp_comm_overlap). none: only
    the sums of input gradients, behind weight gradients. symmetric: all of it, GEMMs cut into up to four parts, which
    travel by the GPUs' copy engines, for GPUs of one host; none, with a line in the log, where that cannot be set
    up. It uses no NVLink multicast. chunked: the same by NCCL (gloo on CPU), which was slower than none on H200. auto:
    symmetric on CUDA. Without effect when tensor is 1."""
    layers_per_stage: list[Integer] | Literal["balanced"] | None = None
    """Layers of each of the pipeline × virtual_pipeline stages, first to last, e.g. [7, 8, 8, 7]. balanced: fewer where
    the output layer is, so that all ranks have as much work. Default: as even as possible."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Less memory for activations, for computing them again in the backward pass. full: keep only a block's input and
    run its forward again; selective: leave out what recompute_ops names."""
    recompute_blocks: PositiveInt | None = None
    """So many blocks of each stage, its first ones. Default: all."""
    recompute_ops: list[Literal["norms", "activation", "attention"]] = ["norms", "activation"]
    """selective: norms (Megatron-LM's layernorm) and activation (moe_act): inputs of linear layers are made again from
    what norms and activations keep anyway, which costs a pass over that. attention (core_attn): its output is made
    again, which costs its forward and pays only in front of an FP8 projection."""
    offload: bool | PositiveInt = False
    """Copy what backward needs to pinned memory of the host and back, beside the computation: of all blocks (true), or
    of so many of each stage, its first ones. The last ones are needed again at once. The host needs room for it."""
    overlap_grad_reduce: bool = True
    """Reduce gradients over data parallelism while the backward pass still runs; with fsdp, while the next micro-batch
    runs as well, which takes memory as large as the embedding's gradient."""
    bucket_mib: Annotated[float, Field(gt=0, le=2**20), _FLOAT] = 160.0
    """Smallest gradient bucket that is reduced at once, in MiB of fp32."""
    zero: Literal[0, 1] = 0
    """ZeRO stage. 1: each data-parallel rank keeps master weights and Adam state of an equal share of the parameters
    alone, updates those and gathers the rest (Megatron-LM's distributed optimizer). The same losses, no more
    traffic; 12 bytes a parameter become 12 / data-parallel size."""
    fsdp: bool = False
    """ZeRO stage 3, through torch's fully_shard: each data-parallel rank keeps a share of the weights and gradients
    too; a block's weights are gathered before its forward and its backward, with fp8.param_gather as FP8 codes, and
    freed after. Instead of zero; without effect on it: bucket_mib and overlap_param_gather. Gradients are reduced
    after each micro-batch, so few large ones are best. Not with zb-h1, zb-v, dualpipev, and CUDA graphs."""
    overlap_param_gather: bool = True
    """With zero 1: gather updated parameters while the next forward pass already runs."""

    @property
    def in_a_v(self) -> bool:
        """Whether stages lie in a V."""
        return self.placement == "v" if self.placement else self.schedule in V_SCHEDULES


OperandRecipe = Literal["delayed", "current", "rowwise", "blockwise", "static", "mxfp8", "nvfp4"]


class CustomRule(Section):
    """How the operands of some layers are scaled."""

    layers: Pattern
    """Over names such as layers.0.attention.qkv; a layer's first match is its rule."""
    input: OperandRecipe
    """Of activations that enter."""
    weight: OperandRecipe
    """Of weights."""
    grad_output: OperandRecipe
    """Of gradients of what leaves."""


class Fp8Config(Section):
    """FP8 of the linear layers in the blocks. Embedding, output layer, norms and softmax keep training.precision.

    An option whose description names recipes is an error under any other, unless it is at its default."""

    recipe: Literal["none", OperandRecipe, "custom"] = "none"
    """none; delayed: scales from the amax history; current: scale from the tensor itself; rowwise: a scale for each row
    of each operand; blockwise: for each 128 neighbours, and each 128 × 128 weights; static: scales given or calibrated;
    mxfp8: a power of two for each 32 neighbours; nvfp4: four bits, a scale for each 16 neighbours; both emulated but on
    Blackwell, where they have not been run yet; custom: by layer and operand."""
    format: Literal["hybrid", "e4m3"] | None = None
    """hybrid: E4M3 forward, E5M2 gradients; e4m3: E4M3 everywhere. Default: hybrid for delayed, current and static,
    else e4m3."""
    custom: list[CustomRule] = []
    """custom: rules such as {layers: "*.mlp.down", input: rowwise, weight: rowwise, grad_output: rowwise}. The first
    that matches a layer counts; a layer that none matches is not FP8. Operands that meet in a GEMM must go together:
    delayed, current and static with each other, rowwise and blockwise each with itself, mxfp8 and nvfp4 with any."""
    static_amax: dict[Pattern, PositiveFloat] = {}
    """static: the largest magnitude a tensor will have, by pattern over names such as layers.0.mlp.down.input (.weight,
    .grad_output); the first match counts."""
    calibration_steps: Count = 0
    """static: steps in which layers with tensors that static_amax does not name run in high precision, to find theirs;
    20 for example."""
    margin: Annotated[int, Field(ge=-64, le=64), _INTEGER] = 0
    """delayed, static: scales are divided by 2^margin."""
    interval: PositiveInt = 1
    """delayed: steps between scale updates."""
    amax_history_len: PositiveInt = 1024
    """delayed: steps of amax that are remembered."""
    amax_compute_algo: Literal["max", "most_recent"] = "max"
    """delayed: which of the history counts."""
    power_of_two_scale: bool | None = None
    """delayed, current, rowwise, blockwise, static: round scales down to a power of two. Default: only blockwise
    does."""
    amax_epsilon: NonNegative = 0.0
    """current, rowwise, blockwise: amaxes below this count as this."""
    smooth_swiglu: bool = False
    """delayed, current, static: multiply each channel of SwiGLU's output by a power of two, made of the last step's
    amaxes, before it is cast, and divide the next weight's columns by it (Fishman et al. 2024, arXiv:2409.12517). For
    runs in which single channels grow until one scale no longer fits all. custom: of layers whose input is cast so."""
    override_linear_precision: tuple[bool, bool, bool] = (False, False, False)
    """Keep (fprop, dgrad, wgrad) in high precision."""
    wgrad_in_bf16: bool = False
    """The same as true for wgrad there; usual with rowwise."""
    fast_accumulation: tuple[bool, bool, bool] = (True, False, False)
    """delayed, current, rowwise, static: Hopper's fast accumulation in (fprop, dgrad, wgrad)."""
    include: list[Pattern] = ["*"]
    """Layers that run in FP8, by pattern over names such as layers.0.attention.qkv."""
    exclude: list[Pattern] = []
    """Layers that do not, e.g. ["layers.0.*", "*.mlp.down"]."""
    first_blocks_bf16: Count = 0
    """So many of the first blocks do not."""
    last_blocks_bf16: Count = 0
    """So many of the last blocks do not."""
    auto_filter: Literal["none", "predicted", "measured"] = "none"
    """Layers that FP8 would slow down, as casts do small ones, stay in training.precision. predicted: by a model of the
    GPU's speeds (H200 only); measured: by running a layer of each size before the first step. What counts is a rank's
    slice, so the choice depends on parallel.tensor; a run that resumes keeps its own."""
    param_gather: bool = False
    """With parallel.zero 1 or fsdp: weights of FP8 layers are cast by the ranks that update them, gathered as codes,
    and exist in FP8 alone (Megatron-LM's fp8-param-gather). Half the bytes travel, and 2 bytes a weight become none.
    The same losses, bit for bit. For recipes with one scale a weight: delayed, current, static; layers of custom with
    another gather values. Weights are then missing in the FP8 report."""
    report_interval: Count = 0
    """Steps between samples of the FP8 health report (what casting loses in each tensor), fp8_report.jsonl in the run
    folder; 100 is usual. 0: never."""
    gemm_backend: Literal["auto", "cublaslt", "scaled_mm", "emulated"] = "auto"
    """auto: on CUDA cublaslt where nvmath-python is installed, else scaled_mm; on CPU emulated: the same FP8 values,
    fp32
    products."""
    gemm_autotune: bool | None = None
    """cublaslt: time the algorithms for each shape once and keep the fastest in the user's cache folder. Runs are
    bit-identical only if they read the same choices. Default: unless deterministic."""


class TrainingConfig(Section):
    """What is trained, and for how long."""

    steps: PositiveInt
    """Optimizer steps in the whole run. Without optimizer.decay_until the learning-rate schedule is as long."""
    stop_after: PositiveInt | None = None
    """Save and stop after this step, counted from the beginning of the run. It changes nothing else: the same command
    without it continues as if there had been no stop. Default: training.steps."""
    seq_length: PositiveInt
    """Tokens in a sample."""
    micro_batch_size: PositiveInt = 1
    """Samples in one forward pass of one rank."""
    global_batch_size: PositiveInt
    """Samples in an optimizer step, over all ranks and micro-batches."""
    precision: Literal["bf16", "fp32", "fp64"] = "bf16"
    """Dtype of weights and activations outside FP8. Master weights, gradients and Adam state are fp32 always. fp64 is
    for holding one layout against another without the noise of summation order."""
    cuda_graphs: bool = False
    """Record a micro-batch's forward and backward as CUDA graphs and replay them: for models so small that the GPU
    waits for the host. The same losses, more memory. Not with tensor, pipeline or context parallelism, nor
    with nvfp4."""
    gc_interval: Count = 100
    """Steps between runs of Python's garbage collector, on all ranks at once so that none waits for another's; 0: as
    Python does it."""
    z_loss: NonNegative = 0.0
    """Weight of log²Z in the loss; 1e-4 is usual."""
    eval_interval: Count = 0
    """Steps between evaluations; 0: none."""
    eval_steps: PositiveInt = 10
    """Global batches in an evaluation."""
    max_skipped_steps: Count = 10
    """A step whose gradients are not finite is skipped: it changes neither weights nor optimizer state. The run ends
    with an error at this many skipped steps in a row. 0: no limit."""
    replica_check_interval: Count = 100
    """Steps between checks that ranks which must hold the same weights, optimizer state and FP8 scales hold the same
    bits; the run ends with an error that names the rank where they differ. Also checked, unless 0 turns it off: before
    the first step, before each save, and when steps are skipped."""

    @property
    def last_step(self) -> int:
        """The step after which the run ends or stops."""
        return min(self.steps, self.stop_after or self.steps)


class OptimizerConfig(Section):
    """AdamW and its learning-rate schedule."""

    learning_rate: PositiveFloat
    """Peak learning rate."""
    min_learning_rate: NonNegative = 0.0
    """Where the schedule ends."""
    schedule: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    """Shape after warm-up; wsd: warm-up, stable, decay."""
    warmup_steps: Count = 0
    """Steps of linear warm-up."""
    decay_until: PositiveInt | None = None
    """The step at which the schedule reaches min_learning_rate, where it stays from then on. Default: training.steps.
    Give it to train longer, or shorter, than was planned, without another schedule."""
    decay_steps: PositiveInt | None = None
    """wsd: steps of the final decay. Default: a tenth of decay_until."""
    weight_decay: NonNegative = 0.1
    """Decoupled weight decay of matrices; norms and biases have none."""
    beta1: Decay = 0.9
    """Decay of Adam's first moment."""
    beta2: Decay = 0.95
    """Decay of Adam's second moment."""
    eps: PositiveFloat = 1e-8
    """Adam's epsilon."""
    clip_grad_norm: NonNegative = 1.0
    """Largest global gradient norm; 0: no clipping."""
    reduce_dtype: Literal["fp32", "bf16", "fp8"] = "fp32"
    """In which gradients travel between data-parallel ranks. bf16: half the traffic, and sums over ranks are rounded to
    8 bits; those over a rank's micro-batches stay fp32. fp8, an experiment: a quarter, rounded to 4 bits before they
    travel, and sums in fp32; needs parallel.zero=1 (docs/decisions/0018-fp8-gradient-reduce.md)."""
    moments_dtype: Literal["fp32", "bf16", "fp8"] = "fp32"
    """How Adam's two moments are kept. bf16: 4 bytes a parameter fewer; fp8: 6 fewer, with factors for blocks of 128
    and stochastic rounding. A run keeps what it began with, but may change between bf16 and fp8."""
    store_param_remainders: bool = False
    """Of the fp32 masters of bf16 weights keep the 16 bits that the weights leave: 2 bytes a parameter fewer, and
    nothing lost. Checkpoints hold fp32 masters either way. Not with fp8.param_gather or parallel.fsdp."""


class TokenizerConfig(Section):
    """The vocabulary the data was written with."""

    kind: Literal["sentencepiece", "huggingface", "tiktoken", "bytes"]
    """Which library reads it."""
    path: str | None = None
    """The model file; for tiktoken an encoding name or a ranks file; none for bytes."""
    end_token: str | None = None
    """The token that ends a document, such as "<|im_end|>". Default: the tokenizer's own: sentencepiece's eos; in
    tokenizer.json the first there is of <|endoftext|>, <|end_of_text|>, </s>, <eos>, <|eot_id|>; in tiktoken
    <|endoftext|>, which is appended to the tokens of a ranks file. Data must be preprocessed with the same."""
    pattern: str | None = None
    """tiktoken ranks files: the regular expression that splits text before tokens are merged. Default: GPT-4's
    (cl100k_base)."""


class DataConfig(Section):
    """Where tokens come from."""

    train: list[str] | dict[str, PositiveFloat] = Field(min_length=1)
    """Prefixes of .bin/.idx files, each weighted by the tokens that it has for training, so that all are used up at the
    same time; or a blend {prefix: weight}, weights being shares of the samples, of any sum. A prefix that is listed
    twice is one data set with twice the weight. Weights may change and data sets come and go when a run resumes: each
    continues with the samples that it has not given."""
    split: str = "969,30,1"
    """Shares of the documents for training, validation and test."""
    restart_changed: bool = False
    """A data set whose files or part of the documents (split) are others than when the run read it is an error on
    resume. true: its samples are counted from 0 instead. Data sets that did not change are never counted anew."""
    tokenizer: TokenizerConfig | None = None
    """Needed where model.vocab_size is not given; otherwise checked against the data."""
    reset_at_documents: bool = False
    """Attention and positions start afresh at each document of a sample."""
    mask_eod_loss: bool = False
    """Do not train on predicting the token after an end of document."""
    num_workers: Annotated[int, Field(ge=0, le=1024), _INTEGER] = 0
    """Loader processes per rank; 0 loads in the training process."""
    index_cache: str | None = None
    """Folder on local disk for sample indices. Default: under the user's cache folder."""


class CheckpointConfig(Section):
    """Saving and resuming."""

    interval: Count = 0
    """Steps between saves; 0: only at the end and on SIGTERM or Ctrl-C. Where a step was skipped, the next one that is
    not is saved instead."""
    keep_last: PositiveInt | None = None
    """Complete checkpoints to keep: so many of the newest. Default: all."""
    keep_every: PositiveInt | None = None
    """Of older checkpoints, keep those of every so many steps. Needs keep_last."""
    async_save: bool = True
    """Copy what is saved to host memory, and write it while training goes on. The copy takes as much host memory as the
    rank writes: 14 bytes a parameter in bf16, over the number of ranks. The last save of a run is written at once."""
    resume: bool = True
    """Continue from the newest complete checkpoint of the run folder, if there is one."""
    init_from: str | None = None
    """A Hugging Face folder, or any other checkpoint that tools/convert_checkpoint.py reads, whose weights a new run
    starts from. The model section may then be left out, in all or in part; what it says must be what is said there."""
    allow_model_change: list[str] = []
    """Keys of the model section, e.g. [rope_theta], that may differ from the checkpoint a run continues from. What the
    weights compute changes with them, so without this a run that resumes with another model is refused. It is for keys
    that leave the tensors' shapes as they are."""
    verify: bool = True
    """Hold data files against their checksums before loading; metadata.json and the index always are. A damaged
    checkpoint is set aside for an older one."""


class LoggingConfig(Section):
    """Where the figures of each step go besides metrics.jsonl in the run folder."""

    interval: PositiveInt = 1
    """Steps between lines of the log, which goes to log.txt in the run folder and, but for what progress says, to the
    console. Steps that were skipped or evaluated have a line always."""
    progress: bool = True
    """Lines of steps on the console too; on a terminal a progress bar instead. Warnings are there in any case."""
    tensorboard: bool = True
    """Event files under the run folder."""
    wandb_project: str | None = None
    """Log to this Weights & Biases project (WANDB_MODE=offline works)."""
    pipeline_trace_step: PositiveInt | None = None
    """The step in which each pipeline rank takes the time of its actions, for pipeline_trace.json in the run folder;
    tools/plot_schedule.py draws it beside the simulation."""


class Config(Section):
    """A run of pretrain_gpt.py."""

    name: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=200)]
    """Name of the run and of its folder."""
    run_dir: str = "runs"
    """Where run folders are made; the run's own is <run_dir>/<name>."""
    seed: Integer = 1234
    """Decides initial weights and the order of the data."""
    deterministic: bool = False
    """Two runs of one layout on the same kind of machine are the same bits, on GPUs too: nothing adds up in an order of
    its own, nothing is chosen by its speed. Slower, in attention above all: docs/decisions/0016-determinism.md."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """auto: CUDA where there is a GPU."""
    timeout_seconds: Annotated[float, Field(gt=0, le=1e9), _FLOAT] = 600.0
    """A collective that takes longer ends the job."""
    model: ModelConfig
    parallel: ParallelConfig = ParallelConfig()
    fp8: Fp8Config = Fp8Config()
    training: TrainingConfig
    optimizer: OptimizerConfig
    data: DataConfig
    checkpoint: CheckpointConfig = CheckpointConfig()
    logging: LoggingConfig = LoggingConfig()

    @property
    def tunes_gemms(self) -> bool:
        """Whether cuBLASLt's algorithms are chosen by their speed."""
        return not self.deterministic if self.fp8.gemm_autotune is None else self.fp8.gemm_autotune
