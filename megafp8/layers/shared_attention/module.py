"""Mamba-2 after a transformer that several layers share (Zamba2, Glorioso et al. 2024, arXiv:2411.15242).

With the residual stream x and the embeddings e of the tokens, a layer computes

    a = attention(norm([x, e]))            q, k and v plus the layer's adapters
    m = mlp(norm(a))                       gate and up plus the layer's adapter
    y = mamba2(norm(x + output(m)))        which the block adds to x

The first two lines are a `SharedTransformer`, whose tensors are named after the first layer of its kind. It belongs to
the stage: FSDP gathers it once for all of its uses, and each use adds to the same gradients. Adapters and `output` stay
in training.precision, and read the values of norms and of the MLP.

Shapes: s sequence length, b micro-batch size, h hidden size, n outputs of adapted projections on this rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from megafp8.layers.attention.module import Attention, AttentionInputs
from megafp8.layers.build import PartBuild
from megafp8.layers.context import BuildContext
from megafp8.layers.costs import AttentionWork, KernelWork, MicroBatch, column_sums
from megafp8.layers.mamba2.module import Mamba2
from megafp8.layers.mixer import Tokens
from megafp8.layers.mlp.module import MLP
from megafp8.layers.norm.module import block_norm, normalized
from megafp8.layers.recurrent.op import Recurrence
from megafp8.layers.shared_attention.record import SharedAttentionConfig
from megafp8.layers.whole_linear import WholeLinear
from megafp8.linear.fusion import LinearInput
from megafp8.linear.state import LinearState
from megafp8.parallel.sharding import Init, set_spec, spec_of
from megafp8.parallel.tensor.layers import ColumnParallelLinear
from megafp8.plan import Neighbor
from megafp8.spec import ModelSpec


@dataclass(frozen=True)
class SharedAttentionInputs:
    """Inputs of attention and the recurrence, and embeddings, sharded like the stream, which the stage adds."""

    attention: AttentionInputs
    recurrence: Recurrence
    embedded_sbh: Tensor | None = None

    @property
    def tensors(self) -> list[Tensor]:
        """Tensors among these inputs."""
        return [*self.attention.tensors, *([] if self.embedded_sbh is None else [self.embedded_sbh])]


class Adapter(nn.Module):
    """Low-rank products that a layer adds to shared projections; `groups` has the projections of each product."""

    def __init__(
        self, name: str, inputs: int, rank: int, groups: Mapping[str, Mapping[str, int]], model: ModelSpec,
        context: BuildContext,
    ) -> None:  # fmt: skip
        super().__init__()
        self.inputs, self.down, self.up = inputs, nn.ModuleList(), nn.ModuleList()
        options = context.linear_options() | {"lora": None, "high_precision": "adapters stay in training.precision"}
        options |= {"init": Init("normal", model.hidden_init_std), "site": context.site()}
        for group, sizes in groups.items():
            self.down.append(WholeLinear(f"{name}.{group}.down", inputs, rank, context, model.hidden_init_std))
            parts, n = {f"{name}.{group}.{part}": size for part, size in sizes.items()}, sum(sizes.values())
            self.up.append(ColumnParallelLinear(f"{name}.{group}.up", rank, n, parts=parts, **options))

    def forward(self, x_sbh: Tensor) -> Tensor:
        """Return the term `[s, b, n]` for the input of the projections, which is sharded like the residual stream."""
        return torch.cat([up(down(x_sbh)) for down, up in zip(self.down, self.up)], dim=-1)

    def saved(self, batch: MicroBatch, adapted: LinearState | None) -> dict[str, int]:
        """Return the bytes saved for backward; `adapted` is the state of the projections, which may save the input."""
        read, up = batch.saved_input_beside(adapted, self.inputs), cast(Any, self.up)
        return {"adapters' inputs": read + sum(batch.saved_input(layer.state) for layer in up)}


class SharedTransformer(nn.Module):
    """Attention and MLP, without residual connections, of layer `index` and of all later layers of its kind."""

    def __init__(self, index: int, model: ModelSpec, context: BuildContext) -> None:
        super().__init__()
        in_fp8 = context.param_gather and context.weight_storage != "fsdp"  # FSDP gathers only blocks in FP8
        context = replace(context, lora=None, records_logits=False, param_gather=in_fp8, shares_linears=True)
        name, record = f"layers.{index}.shared_attention.transformer", model.layers[index].mixer
        before = Neighbor("norm", "none", "adapters read the norm's output too")
        attention = PartBuild(f"{name}.attention", record.attention, model, context, before)
        self.norm = block_norm(f"{name}.norm", replace(model, hidden_size=2 * model.hidden_size), context)
        self.attention = Attention(attention, adapted=True)
        self.mlp_norm = block_norm(f"{name}.mlp_norm", model, context)
        self.mlp = MLP(replace(attention, name=f"{name}.mlp", record=record.mlp), adapted=True)
        for param in self.parameters():  # each use delivers some gradients, and autograd sums others over the uses
            set_spec(param, replace(spec_of(param), num_uses=0))

    def forward(
        self, x_sbh: Tensor, inputs: SharedAttentionInputs, adapter: Adapter | None, mlp_adapter: Adapter
    ) -> Tensor:
        """Return the output `[s, b, h]` for the residual stream `x_sbh`."""
        assert inputs.embedded_sbh is not None, "a stage without the embedding"
        x_sbh = normalized(self.norm, torch.cat([x_sbh, inputs.embedded_sbh], dim=-1))
        x_sbh = normalized(self.mlp_norm, self.attention.adapted(x_sbh, inputs.attention, adapter))
        return self.mlp(x_sbh, mlp_adapter)


def shared_transformer(index: int, model: ModelSpec, context: BuildContext) -> SharedTransformer:
    """Return the transformer of layer `index`, which the first call for layers of its kind builds."""
    first, shared = model.kinds[index], context.shared_modules
    if first not in shared:
        shared[first] = SharedTransformer(first, model, context)
    return shared[first]


class SharedAttention(Mamba2):
    """Mamba-2 whose input is the sum of the residual stream and the output of a shared transformer."""

    def __init__(self, build: PartBuild[SharedAttentionConfig]) -> None:
        super().__init__(build)
        name, record, model, context = build.name, build.record, build.model, build.context
        index, h, ranks = int(name.split(".")[1]), model.hidden_size, context.tensor.size()
        transformer = shared_transformer(index, model, context)
        self.transformers = (transformer,)  # a tuple, because the module belongs to the stage
        use = sum(layer.mixer.kind == record.kind for layer in model.layers[:index])
        adapters = f"layers.{model.kinds[index]}.shared_attention.adapters.{use}"
        heads = {part: {"up": width * ranks} for part, width in transformer.attention.split.items()}
        parts = ("gate", "up") if transformer.mlp.activation.gated else ("up",)
        inner = {"gate_up": dict.fromkeys(parts, transformer.mlp.down.state.site.inputs * ranks)}
        options: Any = {"rank": record.adapter_rank, "model": model, "context": context}
        self.adapter = Adapter(adapters, 2 * h, groups=heads, **options) if record.adapt_attention else None
        self.mlp_adapter = Adapter(adapters, h, groups=inner, **options)
        self.output = WholeLinear(f"{name}.output", h, h, context, model.hidden_init_std)
        self.input_norm = block_norm(f"{name}.input_norm", model, context)

    def inputs(self, layer: int, tokens: Tokens) -> Any:
        """Return the inputs of layer `layer` for these tokens, still without their embeddings."""
        return SharedAttentionInputs(self.transformers[0].attention.inputs(layer, tokens), tokens.recurrence(layer))

    def forward(self, x_sbh: Tensor | LinearInput, inputs: Any) -> Tensor:
        """Return the output of Mamba-2 for the residual stream `x_sbh`, which is not normalized."""
        assert isinstance(x_sbh, Tensor)
        y_sbh = self.output(self.transformers[0](x_sbh, inputs, self.adapter, self.mlp_adapter))
        return super().forward(normalized(self.input_norm, x_sbh, y_sbh), inputs)

    @property
    def cache(self) -> tuple[Any, ...]:
        """Layouts of the cached keys and values, and of the state of Mamba-2."""
        return *self.transformers[0].attention.cache, *super().cache

    # --- Memory and compute costs -----------------------------------------------------------------------------------

    def saved(self, batch: MicroBatch) -> dict[str, int]:
        """Return the bytes saved for backward, by tensor. The norms' inputs have 2h, h and h channels."""
        shared, total = self.transformers[0], Counter(super().saved(batch))
        total["inputs of norms and of the output"] = 5 * self._hidden(batch)
        total["norm statistics"] = sum(norm.saved(batch) for norm in (shared.norm, shared.mlp_norm, self.input_norm))
        for part, adapter in ((shared.attention, self.adapter), (shared.mlp, self.mlp_adapter)):
            total.update(part.saved(batch))
            total.update({} if adapter is None else adapter.saved(batch, part.input_linear))
        return total

    def _hidden(self, batch: MicroBatch) -> int:
        return batch.own_tokens * self.output.state.site.inputs * batch.element

    def work(self, batch: MicroBatch) -> KernelWork:
        """Return the work of the parts, of norms and copies of 5h channels, and of adding the adapters."""
        shared = self.transformers[0]
        channels = shared.mlp.up.state.site.outputs
        channels += 0 if self.adapter is None else shared.attention.qkv.state.site.outputs
        moved = 20.0 * self._hidden(batch) + 3.0 * batch.tokens * channels * batch.element
        norms = KernelWork(moved, moved, 10, column_sums(shared, batch))
        return norms + super().work(batch) + shared.attention.work(batch) + shared.mlp.work(batch)

    def attention(self, batch: MicroBatch) -> list[AttentionWork]:
        """Return the size of the softmax attention."""
        return self.transformers[0].attention.attention(batch)

    def keys_and_values(self, batch: MicroBatch) -> int:
        """Return the bytes of this rank's keys and values, and of the maps of the recurrence."""
        return self.transformers[0].attention.keys_and_values(batch) + super().keys_and_values(batch)

    def backward_bytes(self, batch: MicroBatch) -> int:
        """Return the bytes that backward of the MLP or of Mamba-2 allocates."""
        return max(self.transformers[0].mlp.backward_bytes(batch), super().backward_bytes(batch))
