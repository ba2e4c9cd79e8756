"""Table of axolotl's YAML: fine-tuning of a model in a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megafp8.config.key_names import HUGGING_FACE
from megafp8.conversion.configs.engine import (
    Foreign,
    Keys,
    Rule,
    Source,
    fixed,
    implied,
    number,
    refuse,
    same_names,
    when,
    without,
    word,
)

_TARGETS = {f"{name}_proj": name for name in ("q", "k", "v", "gate", "up", "down")} | {"o_proj": "proj"}
_PACKING = {"data.packing": "best_fit", "data.reset_at_documents": True, "data.mask_eod_loss": True}
_DEFAULTS = {"lr_scheduler": "cosine", "weight_decay": 0.0, "adam_beta2": 0.999, "train_on_inputs": False}
"""Values of missing keys, where megafp8 has another default."""


def _warmup_ratio(value: Any, source: Source) -> Keys:
    if "max_steps" not in source:
        raise ValueError("a fraction of an unknown number of steps; set optimizer.warmup_steps")
    return {"optimizer.warmup_steps": round(value * source["max_steps"])}


def _targets(value: Any, source: Source) -> Keys:
    if unknown := [name for name in value if name not in _TARGETS]:
        raise ValueError(f"lora.targets has no {', '.join(unknown)}")
    return {"lora.targets": [_TARGETS[name] for name in value]}


def _validation(value: Any, source: Source) -> Keys:
    if value >= 1:
        raise ValueError("a number of samples; data.split has proportions of documents")
    return {"data.split": f"{1000 - round(1000 * value)},{round(1000 * value)},0"}


def _answers(value: Any, source: Source) -> Keys:
    if "pretraining_dataset" in source or "rl" in source:
        return {}
    return {"data.loss_on": "all" if value else "answers"} | _PACKING


def _optimizer(value: Any, source: Source) -> Keys:
    if "adamw" in str(value):
        return {"optimizer.name": "adamw"} | ({"optimizer.moments_dtype": "fp8"} if "8bit" in value else {})
    return word("optimizer.name", muon="muon", lion="lion")(value, source)


RULES: Mapping[str, Rule] = {
    **same_names(
        "base_model sequence_len logging_steps max_steps output_dir wandb_name save_total_limit save_steps "
        "max_grad_norm adam_epsilon dataloader_num_workers context_parallel_size tensor_parallel_size micro_batch_size "
        "warmup_steps weight_decay adam_beta1 adam_beta2 wandb_project seed"
    ),
    "learning_rate": "optimizer.learning_rate", "eval_steps": "training.eval_interval",
    "dp_shard_size": lambda value, source: {"parallel.fsdp": value != 1},
    "dp_replicate_size": HUGGING_FACE["dp_replicate_size"],
    "fsdp": fixed(parallel__fsdp=True), "fsdp_version": fixed(parallel__fsdp=True),
    "gradient_accumulation_steps": lambda value, source: {
        "training.global_batch_size": value * source.get("micro_batch_size", 1)},
    "warmup_ratio": _warmup_ratio, "optimizer": _optimizer, "train_on_inputs": _answers, "val_set_size": _validation,
    "lr_scheduler": word("optimizer.schedule", cosine="cosine", linear="linear", constant="constant",
                         constant_with_warmup="constant"),
    "cosine_min_lr_ratio": lambda value, source: {"optimizer.min_learning_rate": value * source["learning_rate"]},
    "bf16": fixed(training__precision="bf16"),
    "fp16": lambda value, source: {"training.precision": "fp16"} if value is True else {},
    "gradient_checkpointing": fixed(parallel__recompute="full"), "fp8": fixed(fp8__recipe="current"),
    "fp8_enable_fsdp_float8_all_gather": when("fp8", "fp8.param_gather"),
    "adapter": word("lora", lora={}, qlora={}), "lora_r": when("adapter", "lora.rank"),
    "lora_alpha": when("adapter", "lora.alpha"), "lora_target_modules": when("adapter", _targets),
    "lora_dropout": lambda value, source: refuse("adapters have no dropout here")(value, source) if value else {},
    "rl": lambda value, source: word("data.dpo", dpo={})(value, source) | _PACKING,
    **dict.fromkeys(("lora_target_linear", "sample_packing", "eval_sample_packing", "pad_to_sequence_len"), implied),
    **without({
        "prepare the data with megafp8 preprocess and set data.train": "datasets pretraining_dataset test_datasets",
        "set training.steps: the steps of an epoch follow from the data": "num_epochs",
        "set an interval in steps": "evals_per_epoch saves_per_epoch",
        "frozen weights keep their precision": "load_in_8bit load_in_4bit",
        "megafp8 chooses kernels itself": "flash_attention attn_implementation tf32 torch_compile",
        "the folder of the model defines it": "model_type tokenizer_type special_tokens chat_template",
        "only adapters are trained": "lora_modules_to_save",
        "see parallel.fsdp, parallel.offload and optimizer.offload": "fsdp_config deepspeed",
    }),
}  # fmt: skip


def read_axolotl(tree: Mapping[str, Any]) -> Foreign:
    """Return the config of a YAML file, with its sections as values."""
    notes = [
        "global_batch_size is for one data-parallel rank: multiply it by their number.",
        "checkpoint.init_from must be the folder of the model, or its name on the Hub. It completes the model section; "
        "megafp8 pretrain FILE --dry-run shows the result (docs/huggingface.md).",
    ]
    values = {key: number(value) for key, value in tree.items() if value is not None}
    return Foreign("axolotl", values, RULES, _DEFAULTS, notes=notes)
