"""Coordinate check: sizes of activations by model width, with and without muP."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megafp8.batch import Batch
from megafp8.config import Config, ParallelConfig, load_config
from megafp8.host.tool import pyplot
from megafp8.models.block import Block
from megafp8.parallel.parallel_state import (
    ParallelState,
    destroy_model_parallel,
    initialize_distributed,
    initialize_model_parallel,
)
from megafp8.training.trainer import RankTrainer

Sizes = dict[str, list[float]]
"""Mean absolute value of each activation in the forward pass of each step.

The activations are embedding, attention, mlp, logits, and with experts router: the logits of the last router.
"""


def widened(config: Config, width: int, *, mup: bool, widen_heads: bool = False) -> Config:
    """Return `config` with another width, for a single process.

    Args:
        config: Config of the base width.
        width: New hidden size.
        mup: Use muP with the base width of `config`.
        widen_heads: Scale the head dimension instead of the number of heads.

    Raises:
        ValueError: If a scaled size is not a whole number.
    """
    model, mixer, ffn = config.model, config.spec.layers[0].mixer, config.spec.layers[0].ffn
    base, channels = model.hidden_size, mixer.channels

    def scaled(size: int, key: str) -> int:
        if size * width % base:
            raise ValueError(f"--widths {width}: {key} {size} · {width} / {base} is not a whole number")
        return size * width // base

    fields: dict[str, Any] = {"hidden_size": width, "ffn_hidden_size": scaled(ffn.width, "model.ffn_hidden_size")}
    if model.moe is not None:
        sizes = {key: getattr(model.moe, key) for key in ("ffn_hidden_size", "shared_ffn_hidden_size", "latent_size")}
        scaled_sizes = {key: scaled(size, f"model.moe.{key}") for key, size in sizes.items() if size is not None}
        fields["moe"] = model.moe.model_dump() | scaled_sizes
    latent = model.latent_attention
    if latent is not None:
        if widen_heads:
            raise ValueError("--widen-heads: latent attention has heads of several widths")
        fields["num_attention_heads"] = scaled(model.num_attention_heads, "model.num_attention_heads")
        ranks = {key: rank for key in ("q_rank", "kv_rank") if (rank := getattr(latent, key)) is not None}
        scaled_ranks = {key: scaled(rank, f"model.latent_attention.{key}") for key, rank in ranks.items()}
        fields["latent_attention"] = latent.model_dump() | scaled_ranks
    elif widen_heads:
        fields["head_dim"] = scaled(channels, "model.head_dim")
    else:
        fields["head_dim"] = channels
        fields["num_attention_heads"] = scaled(model.num_attention_heads, "model.num_attention_heads")
        fields["num_query_groups"] = scaled(mixer.groups, "model.num_query_groups")
    if mup:
        fields["mup"] = {"base_hidden_size": base, "base_head_dim": channels if latent is None else None}
    sections = config.model_dump()
    sections["model"] |= {"mup": None, **fields}
    sections["parallel"] = ParallelConfig().model_dump()
    sections["training"] |= {"global_batch_size": config.training.micro_batch_size}
    return Config.model_validate(sections)


def activation_sizes(config: Config, parallel: ParallelState, steps: int) -> Sizes:
    """Train a model of `config` on random tokens for some steps, and return the sizes of its activations.

    `parallel` belongs to a job with a single process.
    """
    assert config.model.vocab_size is not None
    trainer = RankTrainer(config, parallel)
    (stage,) = trainer.stages
    assert stage.embedding is not None
    assert stage.head is not None
    block = stage.blocks[-1]
    assert isinstance(block, Block)
    modules = {"embedding": stage.embedding, "attention": block.mixer, "mlp": block.ffn, "logits": stage.head.output}
    sizes: Sizes = {name: [] for name in modules}
    for name, module in modules.items():
        module.register_forward_hook(lambda _, __, y, name=name: sizes[name].append(_mean_size(y)))
    if block.ffn.routers:
        sizes["router"] = []
        block.ffn.routers[0].register_forward_hook(
            lambda router, inputs, _: sizes["router"].append(_mean_size(inputs[0] @ router.weight.t()))
        )
    shape = config.training.micro_batch_size, config.training.seq_length + 1
    tokens = torch.randint(config.model.vocab_size, shape, generator=torch.Generator().manual_seed(config.seed))
    batch = Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
    for step in range(steps):
        trainer.train_step(step, [batch])
    trainer.close()
    return sizes


def _mean_size(y: Tensor | tuple[Tensor, ...]) -> float:
    values = y[0] if isinstance(y, tuple) else y
    return float(values.detach().float().abs().mean())


def _measured(found: Mapping[str, Mapping[int, Sizes]]) -> list[str]:
    """Return the names of the measured activations."""
    by_width = next(iter(found.values()))
    return list(next(iter(by_width.values())))


def growth(by_width: Mapping[int, Sizes], name: str) -> float:
    """Return the ratio of an activation's size in the widest model to its size in the narrowest, in the last step."""
    return by_width[max(by_width)][name][-1] / by_width[min(by_width)][name][-1]


def draw(found: Mapping[str, Mapping[int, Sizes]], path: Path) -> None:
    """Draw a PNG with a row per parametrization, a column per activation, and a line over the width per step."""
    plt, measured = pyplot(), _measured(found)
    figure, axes = plt.subplots(
        len(found), len(measured), figsize=(4 * len(measured), 3.2 * len(found)), layout="constrained", squeeze=False,
        sharex=True,
    )  # fmt: skip
    for row, (title, by_width) in zip(axes, found.items()):
        widths = sorted(by_width)
        for axis, name in zip(row, measured):
            steps = len(by_width[widths[0]][name])
            for step in range(steps):
                colour = plt.get_cmap("viridis")(step / max(1, steps - 1) * 0.9)
                sizes = [by_width[width][name][step] for width in widths]
                axis.plot(widths, sizes, marker="o", color=colour, label=f"step {step + 1}")
            axis.set_xscale("log", base=2)
            axis.set_yscale("log", base=2)
            axis.set_xticks(widths, [str(width) for width in widths])
            axis.set_title(f"{title}: {name}")
            axis.set_xlabel("hidden_size")
            axis.grid(alpha=0.3)
    for column in axes.T:  # use the same range for all charts in a column
        low, high = min(axis.get_ylim()[0] for axis in column), max(axis.get_ylim()[1] for axis in column)
        for axis in column:
            axis.set_ylim(low, high)
    axes[0, 0].set_ylabel("mean absolute value")
    axes[0, -1].legend(fontsize="small")
    figure.savefig(path, dpi=100)
    plt.close(figure)


def table(found: Mapping[str, Mapping[int, Sizes]]) -> str:
    """Return a table with the growth of each activation from the narrowest to the widest model in the last step."""
    measured = _measured(found)
    rows: list[tuple[str, ...]] = [("", *measured)]
    rows += [(title, *(f"{growth(sizes, name):.2f}" for name in measured)) for title, sizes in found.items()]
    return "\n".join(f"{title:<10}" + "".join(f"{value:>12}" for value in values) for title, *values in rows)


def run(arguments: argparse.Namespace) -> None:
    """Train a config in several widths, with and without muP, and print the growth of its activations."""
    widths = arguments.widths
    config = load_config(arguments.config, ["device=cpu", "fp8.recipe=none", *arguments.overrides])
    if config.model.vocab_size is None:
        raise ValueError(f"{arguments.config}: model.vocab_size is not set; add model.vocab_size=1024")
    configs = {
        title: {width: widened(config, width, mup=mup, widen_heads=arguments.widen_heads) for width in widths}
        for title, mup in (("standard", False), ("muP", True))
    }
    device = initialize_distributed("cpu")
    parallel = initialize_model_parallel(device=device)
    sizes = {
        title: {
            width: activation_sizes(wide_config, parallel, arguments.steps) for width, wide_config in by_width.items()
        }
        for title, by_width in configs.items()
    }
    destroy_model_parallel()
    print(f"activation sizes in width {max(widths)} relative to width {min(widths)}, before step {arguments.steps}:")
    print(table(sizes))
    if arguments.png is not None:
        draw(sizes, arguments.png)
