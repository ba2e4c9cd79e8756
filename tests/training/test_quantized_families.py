"""FP8 folders of each way in which families store matrices, from folders that are no run's: by the rule `amax`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from megafp8.conversion.convert import verify
from megafp8.conversion.format_names import FORM_NAMES, FormName
from megafp8.conversion.huggingface.names import present_name
from megafp8.conversion.huggingface.quantized_export import Expected
from megafp8.conversion.huggingface.sink import HfSink
from megafp8.conversion.huggingface.source import HfSource
from megafp8.training.quantized_export import quantized_export
from tests.conversion.checkpoints import convert
from tests.conversion.families import make_theirs

FAMILIES = [
    "llama3",
    "phi3",
    "glm4",
    "gpt-neox",
    "bloom",
    "qwen3-moe",
    "deepseek-v3",
    "gemma2",
    "mixtral",
    "kimi-linear",
]
"""Separate matrices; q, k and v, and gate and up, in one; rotated channels in another order; q, k and v by head;
experts; latents; norms of outputs; linear attention."""


def _by_formula(weight: Tensor, form: FormName) -> tuple[Tensor, Tensor]:
    """Data and the inverse scale of each element: 448 / amax of a block or row of a tensor of theirs."""
    n, k = weight.shape
    rows, columns = (128, 128) if form == "fp8-block" else (1, k)
    scale_inv, data = torch.empty(n, k), torch.empty(n, k, dtype=torch.float8_e4m3fn)
    for i in range(0, n, rows):
        for j in range(0, k, columns):
            block = (slice(i, i + rows), slice(j, j + columns))
            scale = torch.tensor(448.0) / weight[block].float().abs().max()
            scale_inv[block] = scale.reciprocal()
            data[block] = (weight[block].float() * scale).to(torch.float8_e4m3fn)
    return data, scale_inv


@pytest.mark.parametrize("form", FORM_NAMES)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_byte_follows_the_rule(tmp_path: Path, family: str, form: FormName) -> None:
    make_theirs(family, torch.bfloat16).save_pretrained(tmp_path / "theirs")
    before = {present_name(name): x for name, x in load_file(tmp_path / "theirs" / "model.safetensors").items()}
    source = HfSource(tmp_path / "theirs", vocab_multiple=16)
    export = quantized_export(source, form)
    folder = convert(source, HfSink(tmp_path / form, quantized=export))
    read = HfSource(folder, vocab_multiple=16)
    verify(Expected(source, export), read)
    after = load_file(folder / "model.safetensors")
    quantized = [name for name, x in after.items() if x.dtype == torch.float8_e4m3fn]
    suffix = "_scale_inv" if form == "fp8-block" else "_scale"
    assert quantized
    assert after.keys() == before.keys() | {name + suffix for name in quantized}
    for name, x in before.items():
        if name not in quantized:
            assert torch.equal(after[name], x)
            continue
        scale = after[name + suffix]
        if form == "fp8-tensor":
            error = (after[name].float() * scale - x.float()).abs()
            assert bool((error <= x.float().abs() / 16 + scale * 2**-10).all())
            assert float(scale) >= float(x.float().abs().max()) / 448 * (1 - 1e-6)
            continue
        data, scale_inv = _by_formula(x, form)
        block = 128 if form == "fp8-block" else 1
        scales = scale.repeat_interleave(block, 0)[: len(x)]
        scales = scales.repeat_interleave(128, 1)[:, : x.shape[1]] if form == "fp8-block" else scales.expand(x.shape)
        assert torch.equal(scales, scale_inv), name
        assert torch.equal(after[name].view(torch.uint8), data.view(torch.uint8)), name
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    left = config["modules_to_not_convert" if form == "fp8-block" else "ignore"]
    assert not {f"{name}.weight" for name in left} & {*quantized}


def test_experts_in_one_tensor_are_refused(tmp_path: Path) -> None:
    make_theirs("gpt-oss", torch.bfloat16).save_pretrained(tmp_path / "theirs")
    source = HfSource(tmp_path / "theirs")
    sink = HfSink(tmp_path / "fp8", quantized=quantized_export(source, "fp8-block"))
    with pytest.raises(ValueError, match=r"gate_up_proj holds all experts of a layer, but the form"):
        sink.begin(source, {})
