"""One folder in FP8 for all: its logits by transformers, by our generator and by the model that trained it; and folders
that others' tools quantized.

transformers dequantizes on a CPU, exactly. Our generator dequantizes exactly too, or keeps E4M3 and multiplies by
scales: both agree with transformers within fp32's rounding, 1e-5, and so greedy texts are equal. The model that trained
the folder also rounds the inputs of its layers to E4M3. With that rounding put into transformers' layers
(`_inputs`) the two agree within fp32's rounding again, so it is the whole difference; without it, a
log-probability differs by no more than its gradient allows (`_bounds`).
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megafp8.batch import Batch
from megafp8.checkpoint import latest
from megafp8.config import Config
from megafp8.conversion.convert import Selected
from megafp8.conversion.format_names import FORM_NAMES, FormName
from megafp8.conversion.formats import open_source
from megafp8.conversion.huggingface.sink import HfSink
from megafp8.conversion.huggingface.source import HfSource
from megafp8.inference import Generator, SamplingOptions
from megafp8.inference.kv_cache_scales import KeyValueAmax, Scales, read_scales, write_scales
from megafp8.inference.load import InferenceLayout, load_model, open_checkpoint
from megafp8.inference.scoring import Request, Scorer
from megafp8.linear.weight_format_names import WeightFormatName
from megafp8.training.quantized_export import quantized_export
from megafp8.training.state import checkpoint_folder, save_state
from tests.conversion.checkpoints import convert
from tests.conversion.families import make_theirs
from tests.inference.small_model import llama_with_biases
from tests.training.presets import *  # noqa: F403
from tests.training.presets import Preset, config_of
from tests.training.runs import start, steps_of
from tests.world import World
from tools.convert_checkpoint import main

transformers = pytest.importorskip("transformers")

WHOLE_BLOCKS = {"hidden_size": 256, "num_attention_heads": 2, "num_query_groups": 1, "ffn_hidden_size": 384}
EXPERTS = {"moe": {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 128}}
TOKENS = torch.randint(0, 90, (2, 13), generator=torch.Generator().manual_seed(5))
PROMPTS = [[3, 1, 4, 1, 5, 9], [2, 6]]
NEW = 8
ROUNDING = 1e-5
"""Of log-probabilities in fp32, whose sums are in another order."""
E4M3 = torch.float8_e4m3fn

# --- ours, on a rank --------------------------------------------------------------------------------------------------


def _trained(config: Config, folder: str) -> Tensor:
    """Trains two steps and saves; log-probabilities of `TOKENS` but the first, by the next forward pass."""
    trainer, parallel = start(config)
    steps_of(trainer, parallel, range(2))
    save_state(trainer, Path(folder), 2, None)
    (stage,) = trainer.stages
    with trainer.fp8.recording(False):
        loss_sb: Tensor = stage(None, Batch(TOKENS[:, :-1], TOKENS[:, 1:].contiguous())).cross_entropy
    return -loss_sb.detach().t()


class Texts(NamedTuple):
    """What a generator continues `PROMPTS` with, and its log-probabilities of that and of `TOKENS` but the first."""

    tokens: list[list[int]]
    logprobs: list[list[float]]
    scores: Tensor


def _generated(folder: Path, weights: WeightFormatName | None) -> Texts:
    options = SamplingOptions(max_tokens=NEW, ignore_end=True)
    given: dict[str, Any] = {"device": "cpu", "dtype": torch.float32, "weights": weights, "max_length": 32}
    generator = Generator.from_checkpoint(folder, **given)
    texts = generator.generate(PROMPTS, options)
    scorer = Scorer(generator.model, max_length=32)
    scores = [x.logprobs for x in scorer.score(Request(row[:1], row[1:]) for row in TOKENS.tolist())]
    return Texts([x.tokens for x in texts], [x.logprobs for x in texts], torch.tensor(scores))


# --- theirs -----------------------------------------------------------------------------------------------------------


def _load(folder: Path) -> Any:
    """The folder as transformers loads it on a CPU, by its quantizers: dequantized, in fp32."""
    options: dict[str, Any] = {}
    if json.loads((folder / "config.json").read_text())["quantization_config"]["quant_method"] != "fp8":
        pytest.importorskip("compressed_tensors")
        options["quantization_config"] = transformers.CompressedTensorsConfig(dequantize=True)
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options).eval()


def _logprobs(model: Any, tokens_bs: Tensor) -> Tensor:
    """Of each token but the first."""
    logits: Tensor = model(tokens_bs[:, :-1]).logits
    return logits.log_softmax(-1).gather(-1, tokens_bs[:, 1:, None])[..., 0]


def _continued(model: Any, prompt: list[int]) -> list[int]:
    """The tokens of transformers' greedy generation."""
    ids = torch.tensor([prompt])
    new = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        min_new_tokens=NEW,
        max_new_tokens=NEW,
        pad_token_id=0,
    )
    tokens: list[int] = new[0, len(prompt) :].tolist()
    return tokens


def _compare(model: Any, ours: Texts) -> None:
    """Logits, and texts token for token."""
    with torch.no_grad():
        assert (_logprobs(model, TOKENS) - ours.scores).abs().max() < ROUNDING
        for prompt, tokens, logprobs in zip(PROMPTS, ours.tokens, ours.logprobs, strict=True):
            assert _continued(model, prompt) == tokens
            expected = _logprobs(model, torch.tensor([prompt + tokens]))[0, len(prompt) - 1 :]
            assert (expected - torch.tensor(logprobs)).abs().max() < ROUNDING


# --- folders of ours --------------------------------------------------------------------------------------------------

Scale = Callable[[Tensor, Tensor | None], Tensor]
"""What the elements of a layer's input `[b, s, k]` are multiplied by, from it and the layer's `input_scale`."""


def _of_blocks(x: Tensor, _: Tensor | None) -> Tensor:
    scale = 448 / x.unflatten(-1, (-1, 128)).abs().amax(-1, keepdim=True)
    return torch.exp2(scale.log2().floor()).expand(*scale.shape[:-1], 128).flatten(-2)


def _static(_: Tensor, input_scale: Tensor | None) -> Tensor:
    assert input_scale is not None
    return 1 / input_scale


SCALES: dict[Preset, Scale] = {
    BLOCKWISE: _of_blocks,
    DELAYED: _static,
    STATIC: _static,
    CURRENT: lambda x, _: 448 / x.abs().max(),
    ROWWISE: lambda x, _: 448 / x.abs().amax(-1, keepdim=True),
}
CASES: list[tuple[Preset, FormName]] = [
    (BLOCKWISE, "fp8-block"),
    (DELAYED, "fp8-tensor"),
    (CURRENT, "fp8-block"),
    (STATIC, "fp8-channel"),
    (CURRENT, "fp8-tensor"),
    (ROWWISE, "fp8-channel"),
]


def _export(run: Path, form: FormName) -> Path:
    checkpoint = latest(checkpoint_folder(run))
    assert isinstance(checkpoint, Path)
    whole = open_source(checkpoint)
    export = quantized_export(whole, form)
    assert not any(weight.why_not for weight in export.weights.values()), "data that was not trained with"
    source = Selected(whole, weights_only=True, dtype=None, mtp=False)
    return convert(source, HfSink(run / form, quantized=export))


class _Rounding:
    """Rounding to E4M3. Values that fp32's errors can carry over a boundary of E4M3 are listed, as (input, index).

    A value at a boundary has two right roundings: the nearest one, or the other one if it is in `others`.
    """

    _RELATIVE_ERROR = 4e-6  # of fp32 sums of hundreds of terms, on any processor

    def __init__(self, others: frozenset[tuple[int, int]] = frozenset()) -> None:
        self.others, self.at_boundary = others, list[tuple[int, int]]()

    def __call__(self, number: int, x: Tensor) -> Tensor:
        """Round the input `number` of the model."""
        nearest, below, above = (
            (x * factor).clamp(-448, 448).to(E4M3).float()
            for factor in (1.0, 1.0 - self._RELATIVE_ERROR, 1.0 + self._RELATIVE_ERROR)
        )
        for index in (below != above).flatten().nonzero().flatten().tolist():
            self.at_boundary.append((number, index))
            if (number, index) in self.others:
                nearest.view(-1)[index] = (below + above - nearest).view(-1)[index]
        return nearest


@contextmanager
def _inputs(
    model: Any, folder: Path, scale_of: Scale, rounding: _Rounding | None = None
) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Collect the inputs of the layers that are in FP8 in the folder, each once, with its scale, and round them."""
    stored, inputs = load_file(folder / "model.safetensors"), dict[int, tuple[Tensor, Tensor, Tensor, Tensor]]()

    def hook(name: str) -> Callable[[Any, tuple[Tensor]], Tensor]:
        def of_input(_: Any, args: tuple[Tensor]) -> Tensor:
            (given,) = args
            if id(given) not in inputs:  # q, k and v, and gate and up, have the same
                scale = scale_of(given.detach(), stored.get(f"{name}.input_scale"))
                x = given + 0
                read = x if rounding is None else rounding(len(inputs), x * scale) / scale
                inputs[id(given)] = x, scale.expand(given.shape), read, given
            return inputs[id(given)][2]

        return of_input

    fp8 = [name.removesuffix(".weight") for name, x in stored.items() if x.dtype == E4M3]
    handles = [model.get_submodule(name).register_forward_pre_hook(hook(name)) for name in fp8]
    collected = list[tuple[Tensor, Tensor]]()
    yield collected
    collected += [(x, scale) for x, scale, _, _ in inputs.values()]
    for handle in handles:
        handle.remove()


def _check_rounded(model: Any, folder: Path, scale_of: Scale, trained: Tensor) -> None:
    """Check that the model with rounded inputs gives the run's log-probabilities.

    Which way a value at a boundary of E4M3 is rounded depends on the order of sums, and so on the processor: those that
    bring the log-probabilities closest to the run's are rounded the other way, one after another.
    """

    def error_of(rounding: _Rounding) -> float:
        with torch.no_grad(), _inputs(model, folder, scale_of, rounding) as inputs:
            error = float((_logprobs(model, TOKENS) - trained).abs().max())
        assert len(inputs) == 8
        return error

    rounding = _Rounding()
    error = error_of(rounding)
    while error >= ROUNDING:
        assert len(rounding.at_boundary) < 20
        tried = [_Rounding(rounding.others | {value}) for value in rounding.at_boundary]
        smaller, _, best = min((error_of(other), i, other) for i, other in enumerate(tried))
        assert smaller < error, f"{error} with {rounding.others} of {rounding.at_boundary} rounded the other way"
        rounding, error = best, smaller


def _bounds(logprobs: Tensor, inputs: list[tuple[Tensor, Tensor]]) -> Tensor:
    """How far off each log-probability may be where the inputs of layers are rounded to E4M3.

    Neighbours of x in E4M3 are d apart, at most |x| / 8, or 2^-9 / scale where x is subnormal. So x is rounded by d / 2
    at most, and its errors, spread evenly, have the standard deviation d / √12. To first order a log-probability moves
    by the sum of its gradients times these errors, whose variances add up: five standard deviations are the bound. What
    is cut off beyond 448 / scale is added as it is.
    """
    bounds = torch.zeros_like(logprobs)
    for index in torch.cartesian_prod(*map(torch.arange, logprobs.shape)).tolist():
        grads = torch.autograd.grad(logprobs[tuple(index)], [x for x, _ in inputs], retain_graph=True)
        variance, cut = torch.zeros(()), torch.zeros(())
        for (x, scale), grad in zip(inputs, grads, strict=True):
            size = x.detach().abs()
            variance += (grad * (size / 8).maximum(2**-9 / scale)).square().sum() / 12
            cut += (grad.abs() * (size - 448 / scale).clamp(min=0)).sum()
        bounds[tuple(index)] = 5 * variance.sqrt() + cut
    return bounds


@pytest.mark.parametrize(("preset", "form"), CASES)
def test_a_folder_gives_the_logits_of_transformers_and_of_the_run(
    world2: World, tmp_path: Path, preset: Preset, form: FormName
) -> None:
    (trained,) = world2.run(_trained, config_of(preset, model=WHOLE_BLOCKS), str(tmp_path), ranks=1)
    folder = _export(tmp_path, form)
    model = _load(folder)
    _compare(model, world2.run(_generated, folder, None, ranks=1)[0])
    if form != "fp8-block":
        _compare(model, world2.run(_generated, folder, "fp8", ranks=1)[0])
    _check_rounded(model, folder, SCALES[preset], trained)
    with _inputs(model, folder, SCALES[preset]) as inputs:
        logprobs = _logprobs(model, TOKENS)
    error, bounds = (trained - logprobs.detach()).abs(), _bounds(logprobs, inputs)
    assert error.max() > 10 * ROUNDING
    assert bool((error <= bounds).all())


# --- folders of others' tools -----------------------------------------------------------------------------------------


def _by_compressed_tensors(folder: Path, strategy: str) -> None:
    """A Llama that compressed-tensors quantized, by its own rule for scales. One layer of two that we fuse is not."""
    quantization = pytest.importorskip("compressed_tensors.quantization")
    compressors = pytest.importorskip("compressed_tensors.compressors")
    from compressed_tensors.quantization.utils import calculate_qparams

    number: dict[str, Any] = {"num_bits": 8, "type": "float", "symmetric": True}
    block = {"block_structure": [64, 64]} if strategy == "block" else {}
    inputs = quantization.QuantizationArgs(**number, strategy="tensor", dynamic=False)
    weights = quantization.QuantizationArgs(**number, strategy=strategy, **block)
    scheme = quantization.QuantizationScheme(targets=["Linear"], weights=weights, input_activations=inputs)
    left = ["lm_head", "model.layers.1.mlp.up_proj", "model.layers.0.self_attn.o_proj"]
    config = quantization.QuantizationConfig(config_groups={"group_0": scheme}, ignore=left)
    model = llama_with_biases(tied=False)
    quantization.apply_quantization_config(model, config, show_progress=False)
    for module in model.modules():
        if getattr(module, "quantization_scheme", None) is None:
            continue
        n, k = module.weight_scale.shape if strategy != "tensor" else (1, 1)
        blocks = module.weight.detach().view(n, module.weight.shape[0] // n, k, module.weight.shape[1] // k)
        scale, _ = calculate_qparams(blocks.amin((1, 3)), blocks.amax((1, 3)), weights)
        module.weight_scale.data.copy_(scale.view_as(module.weight_scale))
        module.input_scale.data.fill_(0.03)
    compressor = compressors.ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(folder)


@pytest.mark.parametrize("strategy", ["tensor", "channel", "block"])
def test_folders_of_compressed_tensors(world2: World, tmp_path: Path, strategy: str) -> None:
    _by_compressed_tensors(tmp_path, strategy)
    fp8 = [name for name, x in load_file(tmp_path / "model.safetensors").items() if x.dtype == E4M3]
    assert len(fp8) == 12
    model = _load(tmp_path)
    _compare(model, world2.run(_generated, tmp_path, None, ranks=1)[0])
    if strategy != "block":
        _compare(model, world2.run(_generated, tmp_path, "fp8", ranks=1)[0])


@pytest.mark.parametrize("scales", ["float", "ue8m0"])
def test_folders_of_transformers(world2: World, tmp_path: Path, scales: str) -> None:
    """A Llama that transformers' own operation quantized, which its quantizer calls on GPUs alone."""
    from transformers.integrations.finegrained_fp8 import Fp8Quantize

    config = transformers.FineGrainedFP8Config(weight_block_size=(64, 64), scale_fmt=scales)
    llama_with_biases(tied=False).save_pretrained(tmp_path)
    operation = Fp8Quantize(SimpleNamespace(quantization_config=config))
    stored = load_file(tmp_path / "model.safetensors")
    for name in [name for name in stored if name.endswith("_proj.weight")]:
        stored |= operation.convert({name: stored[name]})
    save_file(stored, tmp_path / "model.safetensors")
    described = json.loads((tmp_path / "config.json").read_text()) | {"quantization_config": config.to_dict()}
    (tmp_path / "config.json").write_text(json.dumps(described, default=list))
    model = _load(tmp_path)
    assert {x.dtype for x in stored.values()} >= {E4M3, torch.float8_e8m0fnu if scales == "ue8m0" else torch.float32}
    _compare(model, world2.run(_generated, tmp_path, None, ranks=1)[0])


# --- scales of caches -------------------------------------------------------------------------------------------------


def _measured(folder: Path, layout: dict[str, int]) -> dict[int, Scales]:
    """What the model in a folder has for keys and values where it reads `TOKENS` but the last."""
    model = load_model(open_checkpoint(folder, InferenceLayout(**layout), device="cpu", dtype=torch.float32))
    amax = KeyValueAmax(model.spec)
    scorer = Scorer(model, max_length=32, on_keys=amax)
    list(scorer.score(Request(row[:1], row[1:]) for row in TOKENS.tolist()))
    return amax.scales(model.parallel)


@pytest.mark.parametrize("form", FORM_NAMES)
def test_scales_of_caches(world2: World, tmp_path: Path, form: FormName) -> None:
    """Those of the keys and values in transformers' own cache, under the names that compressed-tensors has for them."""
    theirs = llama_with_biases(tied=False)
    theirs.save_pretrained(tmp_path / "theirs")
    (measured,) = world2.run(_measured, tmp_path / "theirs", {}, ranks=1)
    for layout in ({"tensor": 2}, {"pipeline": 2}) if form == "fp8-block" else ():
        for of_rank in world2.run(_measured, tmp_path / "theirs", layout):
            assert of_rank.keys() == measured.keys()
            assert all(x == pytest.approx(measured[layer], rel=1e-5) for layer, x in of_rank.items())
    write_scales(tmp_path / "scales.json", measured)
    assert read_scales(tmp_path / "scales.json") == measured
    given = ["--load", str(tmp_path / "theirs"), "--to", "hf", "--quantization", form, "--verify"]
    save = ["--save", str(tmp_path / form), "--kv-cache-scales", str(tmp_path / "scales.json")]
    assert main([*given, *save]) == 0
    stored = load_file(tmp_path / form / "model.safetensors")
    with torch.no_grad():
        cached = theirs(TOKENS[:, :-1], use_cache=True).past_key_values.layers
    for layer, (name, of_cache) in itertools.product(range(2), (("k_scale", "keys"), ("v_scale", "values"))):
        scale = stored[f"model.layers.{layer}.self_attn.{name}"]
        assert scale.shape == (1,)
        assert float(scale) == pytest.approx(float(getattr(cached[layer], of_cache).abs().max()) / 448, rel=1e-5)
    assert len(HfSource(tmp_path / form).tensors) == len(HfSource(tmp_path / "theirs").tensors)
    described = json.loads((tmp_path / form / "config.json").read_text())["quantization_config"]
    if form != "fp8-block":
        quantization = pytest.importorskip("compressed_tensors.quantization")
        scheme = quantization.QuantizationConfig.model_validate(described).kv_cache_scheme
        assert (scheme.num_bits, scheme.type, scheme.strategy, scheme.dynamic) == (8, "float", "tensor", False)
        assert {x.value for x in quantization.KVCacheScaleType} >= {"k_scale", "v_scale"}


def test_scales_that_do_not_fit_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    llama_with_biases(tied=False).save_pretrained(tmp_path / "theirs")
    make_theirs("gpt-neox").save_pretrained(tmp_path / "neox")
    scales = Scales(0.5, 0.25)
    write_scales(tmp_path / "one", {0: scales})
    write_scales(tmp_path / "three", dict.fromkeys(range(3), scales))
    (tmp_path / "zero").write_text('{"kv_cache_scales": {"0": {"k_scale": 0.0, "v_scale": 1.0}}}')
    (tmp_path / "other").write_text("{}")
    for folder, file, message in (
        ("theirs", "one", "the cache has scales for layers [0], but "),
        ("neox", "three", "engines read them in modules self_attn, but this is gpt_neox.layers.0.attention"),
        ("theirs", "zero", "k_scale and v_scale must be above 0"),
        ("theirs", "other", "has no kv_cache_scales by layer"),
    ):
        given = ["--load", str(tmp_path / folder), "--to", "hf", "--quantization", "fp8-tensor"]
        assert main([*given, "--save", str(tmp_path / "fp8"), "--kv-cache-scales", str(tmp_path / file)]) == 2
        assert message in capsys.readouterr().err
    with pytest.raises(ValueError, match="the model has latent_attention; only layers of kind attention"):
        KeyValueAmax(HfSource(_saved(make_theirs("deepseek-v3"), tmp_path / "latent")).model)


def _saved(model: Any, folder: Path) -> Path:
    model.save_pretrained(folder)
    return folder
