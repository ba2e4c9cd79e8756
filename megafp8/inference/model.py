"""A model with a paged cache: from the chunks of a step to logits, on every layout of ranks.

The modules are those of training, in evaluation: no dropout, no FP8 statistics. A step runs the stages one after the
other, so with a pipeline one rank computes at a time.

Shapes: n tokens of a step, r of them before a token that is to be chosen, h hidden, v vocabulary, t tensor-parallel
size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megafp8.config import ModelConfig
from megafp8.distributed.collectives import all_gather, own_slice, recv_async, send_async
from megafp8.fp8 import Fp8Manager
from megafp8.inference.attention import PackedStep, PagedAttention
from megafp8.inference.decode_graphs import DecodeGraphs
from megafp8.inference.paged_cache import PagedCache
from megafp8.inference.scheduler import Chunk
from megafp8.models.gpt import GPTStage, LayerInputs
from megafp8.parallel_state import ParallelState
from megafp8.pipeline_parallel.actions import Placement

_FP8_ROWS, _FP8_SHARD = 16, 128
"""FP8 GEMMs get a multiple of so many tokens, and ranks that quantize slices of them: the largest `shard_alignment`."""


@dataclass(frozen=True)
class Model:
    """This rank's stages of a model, in the order of its chunks, and the layout they belong to.

    `trained_length`: tokens of the sequences that a run trained it with; 0 where that is not known. `why_eager`: why
    decode steps are not replayed from CUDA graphs; empty where they are.
    """

    config: ModelConfig
    stages: Sequence[GPTStage]
    placement: Placement
    parallel: ParallelState
    fp8: Fp8Manager
    trained_length: int = 0
    why_eager: str = ""

    @property
    def last_rank(self) -> int:
        """The pipeline rank of the last stage, which has the logits."""
        return self.placement.homes[-1][0]


def check_decoder(config: ModelConfig) -> None:
    """ValueError for a model that does not continue a text."""
    if config.architecture != "gpt":
        raise ValueError(f"model.architecture = {config.architecture}: only models of architecture gpt continue a text")


class CachedModel:
    """`model` with a cache of `num_pages` pages, which the sequences of all steps share. Collective: on every rank.

    `longest`: the most tokens of a sequence. `stored`: float8_e4m3fn or int8 to store keys and values so.
    """

    def __init__(
        self,
        model: Model,
        num_pages: int,
        page_size: int,
        *,
        longest: int,
        stored: torch.dtype | None = None,
    ) -> None:
        check_decoder(model.config)
        self.model = model
        config, context = model.config, model.stages[0].context
        groups = config.num_attention_heads if config.latent_attention is not None else config.query_groups
        self.cache = PagedCache(
            [layer for stage in model.stages for layer in stage.layers if layer < config.num_blocks],
            num_pages=num_pages,
            page_size=page_size,
            groups=groups // context.tensor.size(),
            width=config.channels,
            value_width=config.value_channels,
            dtype=context.dtype,
            device=context.device,
            stored=stored,
        )
        self._ranks = context.tensor.size() if context.sequence_sharded else 1
        self._multiple = self._ranks
        if model.fp8.recipe is not None:
            self._multiple *= _FP8_ROWS if self._ranks == 1 else _FP8_SHARD
        self._graphs: DecodeGraphs | None = None
        if self.cache.in_place and not model.why_eager:
            self._graphs = DecodeGraphs(self._run, self.cache, context.device, longest=longest, multiple=self._multiple)

    @torch.no_grad()
    def step(self, batch: Sequence[Chunk]) -> Tensor | None:
        """Run the chunks, and return this rank's logits `[r, v/t]` after those that are `last`, float32.

        None on ranks without the last stage, and where no chunk is the last. Collective: with equal chunks on every
        rank of the model.
        """
        model, pipeline = self.model, self.model.parallel.pipeline
        if self._graphs is not None and all(len(chunk.tokens) == 1 for chunk in batch):
            step, run = self._graphs.fill(batch), self._graphs.run
        else:
            step, run = PackedStep.pack(batch, self.cache, model.parallel.device, self._multiple), self._run
        x_sbh: Tensor | None = None
        with model.fp8.recording(False):
            for index, (home, chunk) in enumerate(model.placement.homes):
                if home != pipeline.rank:
                    continue
                stage = model.stages[chunk]
                if index and (before := model.placement.homes[index - 1][0]) != home:
                    x_sbh = self._empty_stream(stage, step)
                    recv_async(x_sbh, pipeline.group, before).wait()
                x_sbh = run(chunk, x_sbh, step)
                if stage.head is not None:
                    return None if x_sbh is None else x_sbh[: len(batch)]
                if (after := model.placement.homes[index + 1][0]) != home:
                    assert x_sbh is not None
                    send_async(x_sbh.contiguous(), pipeline.group, after).wait()
        return None

    def _empty_stream(self, stage: GPTStage, step: PackedStep) -> Tensor:
        rows = step.tokens_1n.shape[1] // self._ranks
        context = stage.context
        return torch.empty(rows, 1, self.model.config.hidden_size, dtype=context.dtype, device=context.device)

    def _run(self, index: int, x_sbh: Tensor | None, step: PackedStep) -> Tensor | None:
        """The residual stream after a stage; of the last one logits, None if there is nothing to choose."""
        config, stage = self.model.config, self.model.stages[index]
        if stage.embedding is not None:
            x_sbh = stage.embedding(step.tokens_1n, step.positions_1n)
        assert x_sbh is not None
        cores = {
            layer: PagedAttention(step, self.cache, layer, config.window_of(layer))
            for layer in stage.layers
            if layer < config.num_blocks
        }
        inputs = LayerInputs(self._rotary(stage, step), {}, stage.scores(step.keys), layer_cores=cores)
        x_sbh, branch_sbh = stage.run_blocks(x_sbh, inputs)
        if stage.head is None:
            return x_sbh if branch_sbh is None else x_sbh + branch_sbh
        if not len(step.rows_r):
            return None
        streams = [None if x is None else self._rows(x, step.rows_r, stage) for x in (x_sbh, branch_sbh)]
        logits_rbv: Tensor = stage.head(*streams, None)
        return logits_rbv[: len(step.rows_r), 0].float()

    def _rotary(self, stage: GPTStage, step: PackedStep) -> dict[int | None, tuple[Tensor, Tensor]]:
        """Rotary tables by window. With LongRoPE those of long sequences for each that may become long, and for all if
        a run trained the model with long ones."""
        scaling = self.model.config.longrope
        if scaling is None:
            return stage.rotary(step.positions_1n, step.keys)
        longest_short = scaling.original_max_position_embeddings
        short, long = (stage.rotary(step.positions_1n, longest_short + more) for more in (0, 1))
        is_long = (step.lengths_n.clamp(min=self.model.trained_length) > longest_short).view(-1, 1, 1, 1)
        return {
            window: (torch.where(is_long, cos, short[window][0]), torch.where(is_long, sin, short[window][1]))
            for window, (cos, sin) in long.items()
        }

    def _rows(self, x_sbh: Tensor, rows_r: Tensor, stage: GPTStage) -> Tensor:
        """These tokens of the residual stream, sharded as it is, with some of padding then."""
        if not stage.context.sequence_sharded:
            return x_sbh[rows_r]
        group, padding = stage.context.tensor, -len(rows_r) % self._ranks
        rows_r = torch.cat([rows_r, rows_r.new_zeros(padding)])
        return own_slice(all_gather(x_sbh, group)[rows_r], group)
