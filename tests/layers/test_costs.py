"""What parts of the network say that they keep, against what is alive after their forward pass on a CPU.

Parts are found in the schema: kinds of mixers and feed-forward networks, and every value of a key of the model section
that chooses, norms and activations among them. A new kind is measured as soon as a config can name it. Other keys of
its config are drawn, with a seed.
"""

from __future__ import annotations

import gc
import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from random import Random
from typing import Any, NamedTuple, get_args
from weakref import WeakKeyDictionary

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from megafp8.batch import Batch
from megafp8.config import ConfigError, check_layout, load_config
from megafp8.config.parts import Ffn, Mixer
from megafp8.config.schema import ModelConfig
from megafp8.layers.costs import pairs_of
from megafp8.layers.mixer import LayerInputs, RecurrentInputs
from megafp8.layers.recompute import block_memory
from megafp8.layers.recurrent.module import RecurrentMixer
from megafp8.models.gpt import GPTStage
from megafp8.models.t5 import DecoderInputs, StackTokens, T5Stage
from megafp8.parallel.parallel_state import initialize_model_parallel
from megafp8.planner.outline import ModelOutline, model_outline
from megafp8.section import Section
from megafp8.training.trainer import RankTrainer
from tests.compositions.draw import FOLDER
from tests.compositions.values import choices_of, drawable, section, type_of
from tests.marks import slow_but
from tests.world import World

Keys = dict[str, Any]
"""Keys of the model section."""
_CPU = torch.device("cpu")
_KEYS = drawable(ModelConfig)
_SIZES = {"seq_length": (16, 24, 32), "micro_batch_size": (1, 2)}
_BASES = {"architecture=bert": "bert"}
OPTIONS_OF_KINDS: dict[str, tuple[Keys, ...]] = {
    "gated_delta_net": ({"householder_steps": 2},),
    "kimi_delta_attention": ({"erase_and_write_gates": True},),
    "moe": ({"zero_experts": 3},),
}
"""Options of kinds that are measured in addition to drawn ones, because they change what the kind computes."""


def _choices() -> Iterator[tuple[str, Callable[[Random], Keys]]]:
    """What a model may choose, by name, and keys of the model section that choose it."""
    for key, field in _KEYS.items():
        for bare in choices_of(type_of(field.annotation).bare):
            if isinstance(bare, type) and issubclass(bare, Section):
                yield key, lambda random, key=key, bare=bare: {key: section(random, bare)}
            elif bare not in (field.default, "t5"):  # whose decoder reads the encoder
                yield f"{key}={bare}", lambda _, key=key, bare=bare: {key: bare}
    for which, union in (("mixer", Mixer), ("ffn", Ffn)):
        for part in get_args(union):
            kind = part.model_fields["kind"].default
            for options in ({}, *OPTIONS_OF_KINDS.get(kind, ())):
                name = " ".join([f"{which}={kind}", *options])
                yield name, lambda random, which=which, part=part, options=options: {
                    "layer_kinds": {"drawn": {which: section(random, part) | options}}, "pattern": ["drawn"]
                }  # fmt: skip


CHOICES = dict(_choices())


@cache
def drawn(name: str, seed: int = 0) -> tuple[str, ...] | None:
    """A config that the checks accept with a choice, and with others that are drawn: its file and overrides; None if
    four hundred draws break a rule."""
    random, needed = Random(f"{name} {seed}"), dict[str, None]()
    for count in range(400):
        keys: Keys = {"num_layers": 2}
        for other in (*needed, *random.sample([*CHOICES], random.randint(0, 4 - count // 100))):
            keys |= CHOICES[other](random)
        keys |= CHOICES[name](random)
        words = [f"model.{key}={json.dumps(x)}" for key, x in keys.items()]
        if "capacity_factor" in str(keys):  # formulas count all tokens; which are dropped is not known beforehand
            continue
        words += [f"training.{key}={random.choice(x)}" for key, x in _SIZES.items()]
        file = _BASES.get(name, "gpt")
        try:
            check_layout(load_config(FOLDER / f"{file}.yaml", words), 1)
        except ConfigError as error:
            needed |= dict.fromkeys(x for x in CHOICES if f"there is no section model.{x}" in str(error))
            continue
        return (file, *words)
    return None


class _Made(TorchDispatchMode):
    """Storages that operations make, each with what made it."""

    def __init__(self) -> None:
        super().__init__()
        self.made: WeakKeyDictionary[Any, str] = WeakKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **(kwargs or {}))
        given = {x.untyped_storage() for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        for x in tree_leaves(outputs):
            if isinstance(x, Tensor) and (storage := x.untyped_storage()) not in given:
                self.made[storage] = f"{func} {list(x.shape)} {x.dtype}"
        return outputs


_PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "_scaled_dot_product_flash_attention_for_cpu"}


class _Moved(TorchDispatchMode):
    """Bytes that operations other than products read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **(kwargs or {}))
        if not func.is_view and func.overloadpacket.__name__ not in _PRODUCTS:
            self.total += sum(x.nbytes for x in tree_leaves((args, kwargs, outputs)) if isinstance(x, Tensor))
        return outputs


def kept(stage: GPTStage, batch: Batch, dtype: torch.dtype) -> Counter[str]:
    """Bytes that are alive for the backward pass of a stage's blocks, by what made them.

    Whatever keeps them: autograd, an attribute of a Function's context, a closure. Not counted are parameters,
    constants, and what a micro-batch has once for all layers (rotary tables, token ids).
    """
    inputs = stage.layer_inputs(batch)
    t = stage.context.tensor.size() if stage.context.sequence_sharded else 1
    b, s = batch.tokens.shape
    leaf = torch.randn(s // t, b, stage.model.stream_width, dtype=dtype, requires_grad=True)
    embedded = leaf * 1.0
    ids = f"aten.sub.Tensor {[s, b]} torch.int64"  # of per-layer embeddings
    alive = _alive(stage, [*inputs.tensors, embedded], lambda: _blocks(stage, batch, inputs, leaf, embedded))
    return Counter({made: size for made, size in alive.items() if made != ids})


def _alive(stage: GPTStage, shared: Sequence[Tensor], run: Callable[[], list[Any]]) -> Counter[str]:
    """Return the bytes that are alive while the result of `run` is, by what made them.

    Parameters, constants, and the tensors `shared` are not counted.
    """
    tensors = (*shared, *stage.context.constants.values(), *stage.parameters())
    ours = {x.untyped_storage() for x in tensors}
    saved: WeakKeyDictionary[Any, int] = WeakKeyDictionary()

    def pack(x: Tensor) -> Tensor:
        # A scale is one of a larger storage.
        size = x.untyped_storage().nbytes() if x.numel() != 1 else x.element_size()
        saved[x.untyped_storage()] = max(size, saved.get(x.untyped_storage(), 0))
        return x

    gc.collect()
    with _Made() as mode, torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        backward = run()
    assert backward
    gc.collect()
    bytes_: Counter[str] = Counter()
    for storage, size in {**{x: x.nbytes() for x in [*mode.made]}, **saved}.items():
        if storage not in ours:
            bytes_[mode.made.get(storage, "made before")] += size
    return bytes_


def _blocks(stage: GPTStage, batch: Batch, inputs: LayerInputs, leaf: Tensor, embedded: Tensor) -> list[Any]:
    """Run a stage without its ends and return the functions of its backward pass, which keep what that needs.

    Args:
        leaf: Residual stream before the first block.
        embedded: Equal to it; per-layer embeddings, which no layer owns, are computed from this copy.
    """
    x_sbh = leaf * 1.0
    inputs = stage.with_embeddings(inputs, batch.tokens, embedded)
    y_sbh, branch_sbh = stage.run_blocks(x_sbh, inputs)
    if stage.mtp:
        labels_bs = torch.ones(2 * len(batch.tokens), batch.tokens.shape[1], dtype=torch.int64)
        y_sbh = stage.look_ahead(labels_bs, inputs, None, y_sbh if branch_sbh is None else y_sbh + branch_sbh)
        branch_sbh = None
    return [x.grad_fn for x in (y_sbh, branch_sbh) if x is not None and x.requires_grad]


class Measured(NamedTuple):
    """Costs of the blocks of a stage, as they are and as they say.

    `kept`, `said`: bytes that are kept for backward, by what made them and by tensor. `products`, `expected`: model
    FLOPs of a forward pass. `sent`: bytes of the map of a recurrence over two slots with last inputs, `token`: FLOPs of
    a token of it, each as they are and as the mixers say. `moved`, `work`: bytes that operations other than products
    read and write in a forward pass on a CPU, and that the kernels of a GPU do.
    """

    kept: Counter[str]
    said: Counter[str]
    products: int
    expected: float
    moved: int
    work: float
    sent: list[tuple[int, int]]
    token: list[tuple[int, float]]

    @property
    def torch_norm(self) -> bool:
        """Whether a norm of torch ran, which on a CPU keeps copies in fp32 of what is in bf16."""
        return any("rsqrt" in made or "layer_norm" in made for made in self.kept)


def measured(cases: list[tuple[str, ...]]) -> list[Measured]:
    found = []
    for file, *words in cases:
        config = load_config(FOLDER / f"{file}.yaml", words)
        p, t = config.parallel, config.training
        parallel = initialize_model_parallel(p.tensor, p.pipeline, context_parallel_size=p.context, device=_CPU)
        trainer = RankTrainer(config, parallel)
        (stage,) = trainer.stages
        samples = torch.arange(t.micro_batch_size)
        tokens = torch.arange(len(samples) * t.seq_length).view(len(samples), -1) % config.spec.stem.rows
        batch, dtype = Batch(tokens, tokens, samples=samples), trainer.strategy.params[0].dtype
        for _ in range(2):  # casts of weights are made once
            alive = kept(stage, batch, dtype)
        outline = model_outline(config, trainer.fp8)
        said: Counter[str] = Counter()
        for index, memory in zip(config.spec.indices, block_memory(p, len(config.spec.layers)), strict=True):
            layer, of_layer = outline.layers[index].module, outline.batch_of(index)
            said.update(layer.input_bytes(of_layer) if memory.full else layer.saved(of_layer))
        found.append(
            Measured(alive, said, *_products(stage, outline, batch, dtype), *_recurrences(stage, outline, batch, dtype))
        )
    return found


def _flash_flops(q: torch.Size, k: torch.Size, v: torch.Size, *_: Any, **options: Any) -> int:
    """Return the FLOPs of torch's flash attention on a CPU, which torch does not count: of all pairs."""
    b, heads, s, d = q
    return int(2 * b * heads * s * k[2] * (d + v[3]))


def _products(
    stage: GPTStage, outline: ModelOutline, batch: Batch, dtype: torch.dtype
) -> tuple[int, float, int, float]:
    """Return `Measured.products`, `expected`, `moved` and `work`.

    A CPU computes all pairs of a query and a key. Recurrences, and attention to some of the keys, are computed in other
    ways than their formulas count: of these the products of linear layers.
    """
    inputs, s, whole = stage.layer_inputs(batch), batch.tokens.shape[1], True
    leaf = torch.randn(s, len(batch.tokens), stage.model.stream_width, dtype=dtype)
    inputs = stage.with_embeddings(inputs, batch.tokens, leaf)
    expected = 0.0
    for index in stage.layers:
        layer, of_layer = outline.layers[index], outline.batch_of(index)
        block, works = layer.block, layer.block.attentions(of_layer)
        linears = [x.site for x in layer.linears if not x.site.expert]
        expected += sum(2.0 * of_layer.tokens_of(x) * x.inputs * x.outputs for x in linears) + block.flops(of_layer)
        causal = all(work.pairs == pairs_of(s, None, causal=True) for work in works)
        mixes_streams = stage.model.hyper_connections is not None  # by products on a CPU
        if isinstance(block.mixer, RecurrentMixer) or not causal or block.mixer.flops(of_layer) or mixes_streams:
            whole, expected = False, expected - block.mixer.flops(of_layer)
        else:
            pairs = len(batch.tokens) * s * s
            expected += sum(2.0 * pairs * work.heads * (work.width + work.value_width) for work in works)
    flash = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _flash_flops}
    with torch.no_grad(), _Moved() as mode, FlopCounterMode(display=False, custom_mapping=flash) as counter:
        stage.run_blocks(leaf * 1.0, inputs)
    work = sum(outline.layers[i].block.work(outline.batch_of(i)).forward for i in stage.layers)
    counts = counter.get_flop_counts()["Global"]
    aten = torch.ops.aten
    products = counter.get_total_flops() if whole else counts[aten.mm] + counts.get(aten.addmm, 0)
    return products, expected, mode.total, work


def _recurrences(
    stage: GPTStage, outline: ModelOutline, batch: Batch, dtype: torch.dtype
) -> tuple[list[tuple[int, int]], list[tuple[int, float]]]:
    """`Measured.sent` and `Measured.token` of the stage's recurrent mixers."""
    runs = list[tuple[Any, tuple[Tensor, ...]]]()

    def recurrence(rule: Any, xs: tuple[Tensor, ...]) -> Tensor:
        runs.append((rule, xs))
        return rule.advance(xs, rule.zeros(xs[0].shape[1]), None)[0]

    inputs, b = stage.layer_inputs(batch), len(batch.tokens)
    mixers = {i: RecurrentInputs(recurrence) if isinstance(x, RecurrentInputs) else x for i, x in inputs.mixers.items()}
    leaf = torch.randn(batch.tokens.shape[1], b, stage.model.stream_width, dtype=dtype)
    sent, token = dict[Any, int](), list[tuple[int, float]]()
    with torch.no_grad():
        stage.run_blocks(leaf, stage.with_embeddings(replace(inputs, mixers=mixers), batch.tokens, leaf))
        for rule, xs in runs:
            mixer = getattr(rule, "mixer", rule)  # of a rule for its last inputs only
            tensors = [rule.last_inputs(xs, None), *(rule.transition(xs, rule.zeros(b), None) or ())]
            sent[mixer] = sent.get(mixer, 0) + 2 * sum(x.nbytes for x in tensors if x is not None)
            if rule is mixer:
                with FlopCounterMode(display=False) as counter:
                    rule.advance(tuple(x[:1] for x in xs), rule.zeros(b), None)
                token.append((counter.get_total_flops(), b * rule.rule_flops))
    said = [stage.all_blocks[0].mixer.keys_and_values(outline.batch_of(stage.layers[0])) for _ in sent]
    return list(zip(sent.values(), said, strict=True)), token


MODES = {
    "plain": [],
    "selective": ["parallel.recompute=selective", "parallel.recompute_ops=[norms, activation, attention]"],
    "full": ["parallel.recompute=full"],
}
PRECISIONS = {
    "fp32": ["training.precision=fp32", "fp8.recipe=none"],
    "bf16": ["training.precision=bf16", "training.cuda_graphs=false", "fp8.recipe=none"],
    "delayed": ["training.precision=bf16", "training.cuda_graphs=false", "fp8.recipe=delayed"],
    "delayed fp32": ["training.precision=fp32", "fp8.recipe=delayed"],
}
_KINDS = [name for name in CHOICES if name.startswith(("mixer=", "ffn=", "normalization="))]
_QUICK = [*_KINDS, "hyper_connections", "per_layer_embedding", "norm_position=both"]


@pytest.mark.parametrize(
    ("name", "precision"),
    slow_but(
        itertools.product(CHOICES, PRECISIONS),
        *((name, "fp32" if "zero_experts" in name else "delayed fp32") for name in _QUICK),
    ),
)
def test_parts_say_what_they_cost(world2: World, name: str, precision: str) -> None:
    words = drawn(name)
    if words is None:
        assert name not in _QUICK, "no config with it was drawn"
        pytest.skip("needs keys that are not drawn together")
    computes_some = "zero_experts" in str(words)
    if computes_some and "delayed" in precision:
        pytest.skip("a CPU quantizes the rows that there are, and formulas count their mean")
    cases = [(*words, *PRECISIONS[precision], *options) for options in MODES.values()]
    (found,) = world2.run(measured, cases, ranks=1)
    for mode, costs in zip(MODES, found, strict=True):
        if "fp32" in precision or not costs.torch_norm:
            assert costs.kept.total() == costs.said.total(), f"{mode}: {words}\nkept {costs.kept}\nsaid {costs.said}"
        if mode == "plain" and "fp32" in precision:
            if not computes_some:
                assert costs.products == pytest.approx(costs.expected), words
            # On a CPU, every operation writes its result, and attention and FP8 casts count: up to 94 times the bytes.
            assert costs.work <= costs.moved <= 128 * costs.work, (costs.work, costs.moved, words)
            assert all(actual == said for actual, said in costs.sent), (costs.sent, words)
            for counted, said in costs.token:  # products among a chunk's tokens are counted too, here of one
                assert said <= counted <= 1.25 * said, words


def _t5_blocks(
    stage: T5Stage, stacks: Sequence[StackTokens], x_sbh: Tensor, x_dbh: Tensor, encoder_sbh: Tensor
) -> list[Any]:
    """Run the encoder's blocks on `x_sbh`, and the decoder's on `x_dbh` and the encoder's output `encoder_sbh`.

    Return the functions of their backward pass.
    """
    backward = list[Any]()
    for is_decoder, (tokens, stack_sbh) in enumerate(zip(stacks, (x_sbh, x_dbh), strict=True)):
        places = stage._places(len(stack_sbh), tokens.samples_b)
        blocks = slice(stage.encoder_blocks, None) if is_decoder else slice(stage.encoder_blocks)
        inputs = stage.inputs_of(tokens, places, blocks)
        if is_decoder:
            encoder_sbh = encoder_sbh * 1.0
            inputs = DecoderInputs(
                inputs.mixers, inputs.ffns, places, encoder_sbh=encoder_sbh, samples_b=tokens.samples_b
            )
        results = stage._run_blocks(stack_sbh * 1.0, inputs, None, blocks)
        backward += [x.grad_fn for x in results if x is not None and x.requires_grad]
    return backward


def measured_t5(cases: list[list[str]]) -> list[tuple[Counter[str], Counter[str], int, float]]:
    """Bytes kept and said, and model FLOPs of a forward pass, counted and said, of two encoder blocks and a decoder
    block: several decoder blocks save one output of the encoder in high precision, which each of them counts."""
    found = []
    for words in cases:
        config = load_config(FOLDER / "t5.yaml", ["model.num_layers=2", "model.num_decoder_layers=1", *words])
        trainer = RankTrainer(config, initialize_model_parallel(device=_CPU))
        (stage,) = trainer.stages
        assert isinstance(stage, T5Stage)
        t, d, dtype = config.training, config.decoder_length, trainer.strategy.params[0].dtype
        assert d is not None
        assert stage.biases is not None
        samples, lengths = torch.arange(t.micro_batch_size), (t.seq_length, d, t.seq_length)
        stacks = [
            stage._tokens(table.detach(), length, samples, bidirectional=not is_decoder)
            for is_decoder, (table, length) in enumerate(zip(stage.biases(), lengths))
        ]
        shape = t.micro_batch_size, config.spec.hidden_size
        xs = [torch.randn(length, *shape, dtype=dtype, requires_grad=True) for length in lengths]
        shared = [x.distance_bias_ar for x in stacks if x.distance_bias_ar is not None]
        for _ in range(2):  # casts of weights are made once
            alive = _alive(stage, shared, partial(_t5_blocks, stage, stacks, *xs))
        outline, said, expected = model_outline(config, trainer.fp8), Counter[str](), 0.0
        for index, memory in zip(config.spec.indices, block_memory(config.parallel, 3), strict=True):
            layer, of_layer = outline.layers[index], outline.batch_of(index)
            said.update(layer.module.input_bytes(of_layer) if memory.full else layer.module.saved(of_layer))
            if memory.full and index == 2:  # kept once for all blocks of the decoder, so no block counts it
                said["encoder output"] = xs[2].nbytes
            linears = [x.site for x in layer.linears]
            expected += sum(2.0 * of_layer.tokens_of(x) * x.inputs * x.outputs for x in linears)
            works = layer.block.attentions(of_layer)
            all_keys = [t.seq_length] if index < 2 else [d, t.seq_length]  # a CPU computes all pairs
            for work, keys in zip(works, all_keys, strict=True):
                pairs = t.micro_batch_size * (t.seq_length if index < 2 else d) * keys
                expected += 2.0 * pairs * work.heads * (work.width + work.value_width)
        flash = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _flash_flops}
        with torch.no_grad(), FlopCounterMode(display=False, custom_mapping=flash) as counter:
            _t5_blocks(stage, stacks, *xs)
        found.append((alive, said, counter.get_total_flops(), expected))
    return found


@pytest.mark.parametrize("precision", ["fp32", "delayed fp32"])
def test_encoder_and_decoder_say_what_they_cost(world2: World, precision: str) -> None:
    (found,) = world2.run(measured_t5, [[*PRECISIONS[precision], *options] for options in MODES.values()], ranks=1)
    for mode, (alive, said, products, expected) in zip(MODES, found, strict=True):
        assert alive.total() == said.total(), f"{mode}: kept {alive}\nsaid {said}"
        assert products == pytest.approx(expected), mode
