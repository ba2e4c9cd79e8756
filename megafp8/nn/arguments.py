"""Table of the Transformer Engine arguments that these modules do not support, each with the reason.

Every argument is either supported or listed in `REFUSED`. A listed argument raises ValueError, except for the values
that have no effect. `docs/from-transformer-engine.md` lists both kinds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")


class Refusal(NamedTuple):
    """Values of an unsupported argument that are accepted because they have no effect, and why others are refused."""

    accepted: tuple[Any, ...]
    reason: str


_USERBUFFERS = Refusal(
    (False,), "userbuffers are Transformer Engine's own; dx is reduced while wgrad runs, and more overlaps in a job"
)
_PACKED = Refusal((None,), "give query_layer, key_layer and value_layer, which may be views of a packed tensor")
_SCORE_MOD = Refusal((None,), "attention's kernels take no function of the scores; use a mask, a bias or softcap")
_PIPELINE = Refusal((None,), "a module has graphs for one micro-batch at a time; pipelines are a job's")
_WARMUP = Refusal((None,), "modules warm up in the training's own steps")
_CONTEXT = Refusal((None,), "sequences are sharded over ranks in a job only, by parallel.context")

REFUSED: Mapping[str, Refusal] = {
    "ub_tp_comm_overlap": _USERBUFFERS,
    "ub_overlap_ag": _USERBUFFERS,
    "ub_overlap_rs": _USERBUFFERS,
    "ub_overlap_rs_dgrad": _USERBUFFERS,
    "ub_bulk_dgrad": _USERBUFFERS,
    "ub_bulk_wgrad": _USERBUFFERS,
    "delay_wgrad_compute": Refusal((False,), "weight gradients wait in a job's zero-bubble schedules only"),
    "symmetric_ar_type": Refusal((None,), "partial sums are all-reduced by the group's own collective"),
    "fp8_output": Refusal((False, None), "tensors between modules are not quantized"),
    "fp8_grad": Refusal((False, None), "gradients between modules are not quantized"),
    "activation_params": Refusal((None,), "clamped_swiglu has the limit of 7 and slope of 1.702 of gpt-oss"),
    "single_grouped_weight": Refusal((False,), "parameters are weight0, weight1, ..., parts of one tensor"),
    "single_grouped_bias": Refusal((False,), "parameters are bias0, bias1, ..."),
    "use_grouped_tensor": Refusal((None, False), "there is one implementation"),
    "out": Refusal((None,), "the output is a new tensor"),
    "dgrad_out": Refusal((None,), "the input's gradient is a new tensor"),
    "inference_params": Refusal((None,), "there is no cache of keys and values"),
    "cp_group": _CONTEXT,
    "cp_global_ranks": _CONTEXT,
    "cp_stream": _CONTEXT,
    "return_max_logit": Refusal((False, None), "attention's kernels do not return the largest score"),
    "bf16_backward": Refusal((False, None), "attention is computed in the dtype of its input in both directions"),
    "num_splits": Refusal((1, None), "the kernel chooses how it splits keys"),
    "score_mod": _SCORE_MOD,
    "score_mod_bprop": _SCORE_MOD,
    "score_mod_tensors": _SCORE_MOD,
    "score_mod_bprop_tensors": _SCORE_MOD,
    "qkv_layer": _PACKED,
    "kv_layer": _PACKED,
    "thd_attention_policies": Refusal((None,), "all sequences of a batch have the same mask"),
    "_order": _PIPELINE,
    "_num_layers_per_chunk": _PIPELINE,
    "pool": Refusal((None,), "graphs of other calls would overwrite what a backward needs"),
    "retain_graph_in_backward": Refusal((False,), "a backward frees the memory of activations for the next one"),
    "_reuse_graph_input_output_buffers": Refusal((False,), "it takes the order of a pipeline"),
    "clone_param_grads_on_return": Refusal((True,), "the next replay would overwrite gradients"),
    "pre_warmup_hook": _WARMUP,
    "post_warmup_hook": _WARMUP,
    "capture_time_hooks": Refusal((None,), "modules are recorded in a training step, after its hooks have run"),
}  # fmt: skip


def refuse(module: object, arguments: Mapping[str, Any]) -> None:
    """Raise ValueError if one of the `arguments` is in `REFUSED` and its value is not accepted.

    Args:
        module: Module or function that has the arguments; named in the message.
        arguments: Arguments by name. Call `locals()` in the first line of the function to get them.
    """
    for name, value in arguments.items():
        if name not in REFUSED:
            continue
        accepted, reason = REFUSED[name]
        if not any(value is x or (isinstance(value, type(x)) and value == x) for x in accepted):
            shown = type(value).__name__ if hasattr(value, "shape") else repr(value)
            what = getattr(module, "__name__", type(module).__name__)
            raise ValueError(
                f"{what}: {name} is {shown}, which megafp8.nn does not offer: {reason}; {accepted[0]!r} works"
            )


def require(module: object, name: str, value: Any, allowed: tuple[Any, ...]) -> None:
    """Raise ValueError unless `value` is one of `allowed`."""
    if value not in allowed:
        raise ValueError(
            f"{type(module).__name__}: {name} is {value!r}; it must be one of {', '.join(map(repr, allowed))}"
        )


def chosen(given: T | None, default: T) -> T:
    """Return the argument of a call, or the module's `default` if the argument is None."""
    return default if given is None else given


def divided(module: object, name: str, value: int, ranks: int) -> int:
    """Return `value / ranks`, or raise ValueError unless `value` is a multiple of `ranks`."""
    if value % ranks:
        raise ValueError(f"{type(module).__name__}: {name} is {value}; it must be a multiple of the {ranks} tp ranks")
    return value // ranks
