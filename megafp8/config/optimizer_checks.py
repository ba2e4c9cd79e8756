"""Rules of `checks` about the optimizer: schedule, dtype of gradient reduction, storage of its state."""

from __future__ import annotations

from collections.abc import Iterator

from megafp8.config.schema import Config
from megafp8.host.problems import Problem
from megafp8.optimizer.base import MatrixUpdate, Update


def schedule(config: Config) -> Iterator[Problem]:
    """Check that warm-up and decay fit into the schedule."""
    o, t = config.optimizer, config.training
    length = "training.steps" if o.decay_until is None else "optimizer.decay_until"
    steps = o.decay_until or t.steps
    if o.decay_until is not None and o.schedule == "constant":
        rule = "optimizer.schedule is constant and never decays"
        yield Problem("optimizer.decay_until", o.decay_until, rule, "leave it out")
    if t.stop_after is not None and t.stop_after > t.steps:
        rule = f"later than the end of the run, training.steps ({t.steps})"
        yield Problem("training.stop_after", t.stop_after, rule, "leave it out")
    if o.min_learning_rate > o.learning_rate:
        rule = f"larger than optimizer.learning_rate ({o.learning_rate})"
        yield Problem("optimizer.min_learning_rate", o.min_learning_rate, rule, f"try {o.learning_rate / 10}")
    if o.warmup_from > o.learning_rate:
        rule = f"larger than optimizer.learning_rate ({o.learning_rate})"
        yield Problem("optimizer.warmup_from", o.warmup_from, rule, f"try {o.learning_rate / 10}")
    if o.schedule_from >= steps:
        rule = f"the schedule ends at {length} = {steps}"
        yield Problem("optimizer.schedule_from", o.schedule_from, rule, f"try less than {steps}")
        return
    steps -= o.schedule_from
    less = f" - optimizer.schedule_from = {steps}" if o.schedule_from else f" = {steps}"
    if o.warmup_steps >= steps and o.warmup_steps > 0:
        whole = "run" if o.decay_until is None else "schedule"
        rule = f"the {whole} has only {length}{less}"
        yield Problem("optimizer.warmup_steps", o.warmup_steps, rule, f"try {steps // 10}")
    elif o.schedule == "wsd" and o.warmup_steps + (o.decay_steps or 0) > steps:
        rule = f"with optimizer.warmup_steps ({o.warmup_steps}) longer than {length} ({steps})"
        yield Problem("optimizer.decay_steps", o.decay_steps, rule, f"try {steps - o.warmup_steps} or less")


def qk_clip(config: Config) -> Iterator[Problem]:
    """Check that attention logits are products of queries and keys with trained weights."""
    threshold, m, off = config.optimizer.qk_clip, config.model, "leave it out"
    if threshold is None:
        return
    reasons = [layer.mixer.no_qk_clip for layer in config.spec.distinct_layers]
    rules = [reason for reason in reasons if reason]
    if m.architecture != "gpt":
        rules = [f"model.architecture is {m.architecture}, and QK-clip is for gpt"]
    elif all(reason is None for reason in reasons):
        rules = ["no layer has softmax attention"]
    elif config.lora is not None:
        rules = ["lora is set, and query and key weights are frozen"]
    if rules:
        yield Problem("optimizer.qk_clip", threshold, rules[0], off)


def average(config: Config) -> Iterator[Problem]:
    """Check that an average of the weights has whole fp32 masters."""
    o = config.optimizer
    if o.average_decay is not None and o.store_param_remainders:
        rule = "optimizer.store_param_remainders keeps no fp32 weights between steps that could be averaged"
        yield Problem("optimizer.average_decay", o.average_decay, rule, "leave one of the two out")


def offload(config: Config) -> Iterator[Problem]:
    """Check that nothing but elementwise updates and checkpoints uses optimizer state that is offloaded."""
    o = config.optimizer
    users = {
        f"optimizer.name is {o.name}, which updates whole matrices": isinstance(o.chosen, MatrixUpdate),
        "optimizer.average_decay averages masters on the GPU": o.average_decay is not None,
        "optimizer.qk_clip changes masters on the GPU": o.qk_clip is not None,
        "resilience.replicas exchange state between GPUs": config.resilience.replicas is not None,
    }
    for rule, uses in users.items():
        if o.offload and uses:
            yield Problem("optimizer.offload", o.offload, rule, "try 0")


def loss_scale(config: Config) -> Iterator[Problem]:
    """Check that a loss scale is used with fp16 only and starts at or above its minimum."""
    t, scale = config.training, config.training.loss_scale
    if t.precision != "fp16" and scale != type(scale)():
        rule = f"training.precision is {t.precision}, which needs no loss scale"
        yield Problem("training.loss_scale", scale.model_dump(), rule, "leave it out, or try training.precision=fp16")
    if scale.initial_scale < scale.min_loss_scale:
        path, rule = "training.loss_scale.initial_scale", f"below min_loss_scale ({scale.min_loss_scale})"
        yield Problem(path, scale.initial_scale, rule, f"try {scale.min_loss_scale}")


_LEAST_DECAY = {
    "bf16": (2**-8, "has 8 bits of precision, so a change of a moment by {:.2g} of its value would be rounded away"),
    "fp8": (
        2**-7,
        "uses stochastic rounding, and its noise adds up if a moment changes by {:.2g} of its value per step",
    ),
}
"""Minimum of 1 - beta for each optimizer.moments_dtype, and the reason."""


def state_storage(config: Config) -> Iterator[Problem]:
    """Check the limits of optimizer state that is stored in less than fp32."""
    o, dtype = config.optimizer, config.optimizer.moments_dtype
    for path, beta in {**o.update(hidden_matrix=False).decay_rates, **o.chosen.decay_rates}.items():
        least, why = _LEAST_DECAY.get(dtype, (0.0, ""))
        if 1 - beta < least:
            rule = f"optimizer.moments_dtype is {dtype}, which {why.format(1 - beta)}"
            yield Problem(path, beta, rule, "try 0.95, or optimizer.moments_dtype=fp32")
    if not o.store_param_remainders:
        return
    path, off = "optimizer.store_param_remainders", "or optimizer.store_param_remainders=false"
    if config.training.precision != "bf16":
        rule = f"it is for bf16 weights, and training.precision is {config.training.precision}"
        yield Problem(path, True, rule, f"try training.precision=bf16, {off}")
    if config.parallel.fsdp:
        rule = "parallel.fsdp stores fp32 masters only, without bf16 weights that would hold their upper half"
        yield Problem(path, True, rule, f"try parallel.zero=1 instead of parallel.fsdp, {off}")
    elif config.fp8.param_gather:
        rule = (
            "fp8.param_gather stores FP8 data and fp32 masters, without bf16 weights that would hold their upper half"
        )
        yield Problem(path, True, rule, f"try fp8.param_gather=false, {off}")


def chosen(config: Config) -> Iterator[Problem]:
    """Check that only the chosen optimizer has options, and that a matrix optimizer has state that it can store."""
    o, adamw = config.optimizer, "or optimizer.name=adamw"
    for name, field in type(o).model_fields.items():
        options = getattr(o, name)
        if isinstance(options, Update) and name != o.name and options != field.default:
            keys = options.model_dump(exclude_defaults=True)
            yield Problem(
                f"optimizer.{name}", keys, f"optimizer.name is {o.name}", f"leave it out, or try name: {name}"
            )
    if not isinstance(o.chosen, MatrixUpdate):
        return
    if o.moments_dtype == "fp8":
        rule = f"optimizer.name is {o.name}, which stores its momentum in fp32 or bf16"
        yield Problem("optimizer.moments_dtype", o.moments_dtype, rule, f"try bf16, {adamw}")
    if o.store_param_remainders:
        rule = f"optimizer.name is {o.name}, which stores fp32 masters"
        yield Problem("optimizer.store_param_remainders", True, rule, f"try false, {adamw}")


def mup(config: Config) -> Iterator[Problem]:
    """Refuse muP for models with parts for which it has no rule."""
    m = config.model
    if m.mup is None:
        return
    keys, off = m.mup.model_dump(exclude_none=True), "leave model.mup out"
    lacks = {
        f"model.architecture is {m.architecture}": m.architecture != "gpt",
        "routers have their own norms (model.moe.separate_norms)": any(
            layer.has_experts and layer.ffn.separate_norms for layer in config.spec.layers
        ),
        "the model has multi-token prediction (model.mtp_num_layers)": m.mtp_num_layers > 0,
        "only adapters are trained (lora)": config.lora is not None,
    }
    for what, lacking in lacks.items():
        if lacking:
            yield Problem("model.mup", keys, f"{what}, for which muP is not supported", off)
    if m.attention_scale is not None and m.mup.base_head_dim is not None:
        rule = "model.attention_scale is given, and both set the scale of attention scores"
        yield Problem("model.mup.base_head_dim", m.mup.base_head_dim, rule, "leave one of them out")
    if m.latent_attention is not None and m.mup.base_head_dim is not None:
        rule = "the heads of latent attention have several widths; add heads instead, without this key"
        yield Problem("model.mup.base_head_dim", m.mup.base_head_dim, rule, "leave it out")
