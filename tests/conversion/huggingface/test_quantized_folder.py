"""Quantized folders of others: read as an own reader, transformers and compressed-tensors read them; damaged ones.

`FolderOf` writes weights in each form and says what they are, in float64 and element by element.
"""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megafp8.conversion.huggingface.quantized_folder import dequantized, fp8_rows
from megafp8.conversion.huggingface.source import HfSource
from megafp8.conversion.safetensors_format import Entry, read_header, read_rows
from tests.conversion.families import GPT_OSS, YARN_ROPE, make_theirs

E4M3 = torch.float8_e4m3fn


def _codes(generator: torch.Generator, *shape: int) -> Tensor:
    """Random bytes of E4M3 but for its NaNs."""
    bits = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    return torch.where((bits & 127) == 127, bits & 0x80, bits).view(E4M3)


class FolderOf:
    """Tensors of a folder, the config that describes them, and the weights' values by name."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.torch = torch.Generator().manual_seed(seed)
        self.tensors: dict[str, Tensor] = {}
        self.values: dict[str, Tensor] = {}
        self.config: dict[str, Any] = {}
        self.form = self.random.choice(["fp8", "fp8-tensor", "ct-tensor", "ct-channel", "ct-block", "int", "mxfp4"])
        getattr(self, f"_{self.form.split('-')[0]}")()
        plain = torch.randn(3, 5, generator=self.torch).bfloat16()
        self.tensors["plain.weight"], self.values["plain.weight"] = plain, plain

    def _sizes(self) -> tuple[int, int]:
        return self.random.randint(1, 40), self.random.randint(1, 70)

    def _scales(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.torch) * 2 ** torch.randint(-20, 5, shape, generator=self.torch) + 1e-9

    def _scaled(self, name: str, suffix: str, block: tuple[int, int] | None, dtype: torch.dtype) -> None:
        n, k = self._sizes()
        rows, columns = block or (n, k)
        rows, columns = rows or n, columns or k
        codes, scale = _codes(self.torch, n, k), self._scales(-(-n // rows), -(-k // columns)).to(dtype)
        values = torch.empty(n, k, dtype=torch.float64)
        for i in range(n):
            for j in range(k):
                values[i, j] = codes[i, j].double() * scale[i // rows, j // columns].double()
        stored = scale
        if scale.shape == (1, 1) and self.random.random() < 0.5:
            stored = scale.view(self.random.choice([(), (1,)]))
        elif scale.shape[1] == 1 and self.random.random() < 0.3:
            stored = scale.view(-1)
        self.tensors |= {f"{name}.weight": codes, f"{name}.{suffix}": stored}
        self.values[f"{name}.weight"] = values.float()

    def _fp8(self) -> None:
        block = (
            None if self.form == "fp8-tensor" else (self.random.choice([1, 4, 16, 128]), self.random.choice([3, 128]))
        )
        self.config = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "weight_block_size": None if block is None else list(block),
        }
        for i in range(3):
            self._scaled(f"layer.{i}", "weight_scale_inv", block, self.random.choice([torch.float32, torch.bfloat16]))
        self.tensors["layer.0.activation_scale"] = torch.ones(())

    def _ct(self) -> None:
        strategy = self.form.split("-")[1]
        block = {"tensor": (0, 0), "channel": (1, 0), "block": (8, 16)}[strategy]
        weights: dict[str, Any] = {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True}
        weights |= {"block_structure": list(block)} if strategy == "block" else {}
        self.config = {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": weights}}}
        for i in range(3):
            self._scaled(f"layer.{i}", "weight_scale", block, torch.float32)
        self.tensors["layer.0.input_scale"] = torch.ones(1)
        self.tensors["layer.0.k_proj.k_scale"] = torch.ones(1)

    def _int(self) -> None:
        bits, group = self.random.choice([4, 8]), self.random.choice([None, 8, 32])
        symmetric = self.random.random() < 0.5
        strategy = {"strategy": "channel"} if group is None else {"strategy": "group", "group_size": group}
        weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, **strategy}
        self.config = {"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": weights}}}
        for i in range(2):
            n, k = self._sizes()
            name, groups = f"layer.{i}.weight", -(-k // (group or k))
            codes = torch.randint(0, 1 << bits, (n, k), generator=self.torch)
            zeros = torch.randint(0, 1 << bits, (n, groups), generator=self.torch)
            zeros = torch.full_like(zeros, 1 << (bits - 1)) if symmetric else zeros
            scale = self._scales(n, groups).bfloat16()
            values = torch.empty(n, k, dtype=torch.float64)
            for row in range(n):
                for column in range(k):
                    g = column // (group or k)
                    values[row, column] = (codes[row, column] - zeros[row, g]).double() * scale[row, g].double()
            self.tensors |= {f"{name}_packed": _pack(codes, bits), f"{name}_scale": scale}
            self.tensors[f"{name}_shape"] = torch.tensor([n, k])
            if not symmetric:
                self.tensors[f"{name}_zero_point"] = _pack(zeros.t(), bits).t().contiguous()
            self.values[name] = values.float()

    def _mxfp4(self) -> None:
        self.config = {"quant_method": "mxfp4", "modules_to_not_convert": ["plain"]}
        e, n, groups = (self.random.randint(1, 3) for _ in range(3))
        blocks = torch.randint(0, 256, (e, n, groups, 16), generator=self.torch, dtype=torch.uint8)
        scales = torch.randint(0, 200, (e, n, groups), generator=self.torch, dtype=torch.uint8)
        table = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
        values = torch.empty(e, groups * 32, n, dtype=torch.float64)
        for index in torch.cartesian_prod(*(torch.arange(x) for x in (e, n, groups, 16))).tolist():
            for half in range(2):
                code = int(blocks[tuple(index)]) >> 4 * half & 15
                value = table[code & 7] * (-1 if code & 8 else 1) * 2.0 ** (int(scales[tuple(index[:3])]) - 127)
                values[index[0], index[2] * 32 + index[3] * 2 + half, index[1]] = value
        self.tensors |= {"experts.down_blocks": blocks, "experts.down_scales": scales}
        self.values["experts.down"] = values.bfloat16()


def _pack(codes: Tensor, bits: int) -> Tensor:
    """Codes `[n, k]` from 0, the first in the lowest bits of an int32."""
    n, k = codes.shape
    words = torch.zeros(n, -(-k * bits // 32), dtype=torch.int64)
    for j in range(k):
        words[:, j * bits // 32] |= codes[:, j] << (j * bits % 32)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).int()


def _entries(folder: Path, tensors: dict[str, Tensor], config: object) -> dict[str, Entry]:
    save_file(tensors, folder / "model.safetensors")
    return dequantized(folder, config, read_header(folder / "model.safetensors"))


@pytest.mark.parametrize("seed", range(100))
def test_random_folders_read_as_they_are(tmp_path: Path, seed: int) -> None:
    folder = FolderOf(seed)
    entries = _entries(tmp_path, folder.tensors, folder.config)
    assert entries.keys() == folder.values.keys()
    for name, values in folder.values.items():
        entry = entries[name]
        assert entry.shape == values.shape
        read = read_rows(entry, name, 0, entry.shape[0])
        assert read.dtype == values.dtype
        assert torch.equal(read, values)
        first, last = sorted(folder.random.choices(range(len(values) + 1), k=2))
        padded = torch.cat([values[first:last], torch.zeros(1, *values.shape[1:], dtype=values.dtype)])
        assert torch.equal(read_rows(entry, name, first, last, padding=1), padded)
        low = folder.random.randint(first, last)
        assert torch.equal(read_rows(entry.rows(first, last), name, low - first, last - first), values[low:last])
        if len(values):
            element = entry.element(len(values) - 1)
            assert element.values is None or torch.equal(read_rows(element, name, 0, element.shape[0]), values[-1])


def _quantized_by(folder: Path, config: object) -> None:
    """Say in config.json how its weights are quantized."""
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": config}))


# --- their own readers ------------------------------------------------------------------------------------------------


def test_mxfp4_of_a_whole_gpt_oss(tmp_path: Path) -> None:
    """A folder with experts as published, against transformers' own function."""
    from transformers import GptOssConfig, GptOssForCausalLM
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    config = GptOssConfig(**GPT_OSS | {"intermediate_size": 64, "rope_parameters": YARN_ROPE})
    GptOssForCausalLM(config).bfloat16().save_pretrained(tmp_path)
    tensors, expected = load_file(tmp_path / "model.safetensors"), {}
    generator = torch.Generator().manual_seed(0)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        e, k, n = tensors.pop(name).shape
        blocks = torch.randint(0, 256, (e, n, k // 32, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(100, 140, (e, n, k // 32), generator=generator, dtype=torch.uint8)
        expected[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    plain = shutil.copytree(tmp_path, tmp_path.with_name("plain"))
    packed = {name: x for name, x in tensors.items() if name.endswith(("_blocks", "_scales"))}
    save_file({name: x for name, x in tensors.items() if name not in packed} | expected, plain / "model.safetensors")
    save_file(tensors, tmp_path / "model.safetensors")
    _quantized_by(tmp_path, {"quant_method": "mxfp4"})
    ours, theirs = HfSource(tmp_path), HfSource(plain)
    assert ours.tensors == theirs.tensors
    assert all(torch.equal(ours.read(name), theirs.read(name)) for name in ours.tensors)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("bits", "group"), [(4, 16), (4, None), (8, 32)])
def test_packed_integers_of_compressed_tensors(tmp_path: Path, symmetric: bool, bits: int, group: int | None) -> None:
    compressors = pytest.importorskip("compressed_tensors.compressors")
    quantization = pytest.importorskip("compressed_tensors.quantization")
    arguments = {"strategy": "channel"} if group is None else {"strategy": "group", "group_size": group}
    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, **arguments}
    scheme = quantization.QuantizationScheme(targets=["Linear"], weights=quantization.QuantizationArgs(**weights))
    compressor = compressors.BaseCompressor.get_value_from_registry("pack-quantized")
    weight, groups = torch.randn(24, 64), 64 // (group or 64)
    scale = (torch.rand(24, groups) * 0.1 + 0.01).bfloat16().float()
    zero = torch.randint(-4, 4, (24, groups), dtype=torch.int8) if not symmetric else torch.zeros(24, groups).char()
    state = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero}
    packed = compressor.compress(state, scheme)
    expected = compressor.decompress(packed, scheme)["weight"]
    config = {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": weights}}}
    tensors = {f"a.{name}": x.contiguous() for name, x in packed.items()}
    entry = _entries(tmp_path, tensors, config)["a.weight"]
    assert torch.equal(read_rows(entry, "a.weight", 0, 24), expected.float())


# --- damage -----------------------------------------------------------------------------------------------------------

BLOCKS = {"quant_method": "fp8", "weight_block_size": [8, 8]}
GROUP = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 8, "symmetric": True}
INT4 = {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": GROUP}}}
CHANNEL = {"num_bits": 8, "type": "float", "strategy": "channel"}
FLOAT = {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": CHANNEL}}}
MXFP4 = {"quant_method": "mxfp4"}
Tensors = dict[str, Tensor]


def _good(form: str) -> Tensors:
    codes = torch.ones(16, 24).to(E4M3)
    if form == "fp8":
        return {"a.weight": codes, "a.weight_scale_inv": torch.ones(2, 3)}
    if form == "float":
        return {"a.weight": codes, "a.weight_scale": torch.ones(16, 1)}
    if form == "int4":
        shape = {"a.weight_shape": torch.tensor([16, 24]), "a.weight_scale": torch.ones(16, 3)}
        return {"a.weight_packed": torch.ones(16, 3).int(), **shape}
    byte = torch.ones(2, 3, 1).byte()
    return {"a_blocks": torch.ones(2, 3, 1, 16).byte(), "a_scales": byte}


def _with(form: str, **changes: Tensor | None) -> Tensors:
    changed = {key.replace("__", "."): x for key, x in changes.items()}
    return {name: x for name, x in (_good(form) | changed).items() if x is not None}


def _set(x: Tensor, index: tuple[int, ...], value: float) -> Tensor:
    x = x.clone()
    x[index] = value
    return x


def _nan_code() -> Tensor:
    bits = torch.zeros(16, 24, dtype=torch.uint8)
    bits[3, 4] = 0xFF
    return bits.view(E4M3)


ONES = torch.ones(2, 3)
DAMAGE: dict[str, tuple[Tensors, object, str]] = {
    "unknown method": (
        _good("fp8"),
        {"quant_method": "awq"},
        r"config.json: .*quant_method = 'awq' .*fp8, compressed-",
    ),
    "no method": (_good("fp8"), {"bits": 4}, r"quant_method = None"),
    "no object": (_good("fp8"), [1], r"must be an object"),
    "not said": (_good("fp8"), None, r"a\.weight is F8_E4M3, .*config\.json has no quantization_config"),
    "block size": (_good("fp8"), BLOCKS | {"weight_block_size": [8]}, r"weight_block_size = \[8\].*\[128, 128\]"),
    "block of 0": (_good("fp8"), BLOCKS | {"weight_block_size": [8, 0]}, r"weight_block_size = \[8, 0\]"),
    "other block": (
        _good("fp8"),
        BLOCKS | {"weight_block_size": [4, 8]},
        r"a\.weight_scale_inv has shape \[2, 3\].*\[4, 3\]",
    ),
    "format": (_good("fp8"), BLOCKS | {"fmt": "e5m2"}, r"fmt = 'e5m2': supported: e4m3"),
    "no scale": (_with("fp8", a__weight_scale_inv=None), BLOCKS, r"no file has a\.weight_scale_inv"),
    "scale alone": (_with("fp8", a__weight=None), BLOCKS, r"a\.weight_scale_inv, a scale of a\.weight, which is in no"),
    "scale of bf16": (
        _with("fp8", a__weight=torch.ones(16, 24).bfloat16()),
        BLOCKS,
        r"which is BF16 and not quantized",
    ),
    "scale of ints": (_with("fp8", a__weight_scale_inv=ONES.int()), BLOCKS, r"is I32; scales must be F32"),
    "shape": (_with("fp8", a__weight_scale_inv=torch.ones(3, 2)), BLOCKS, r"has shape \[3, 2\].*needs \[2, 3\]"),
    "a vector": (_with("fp8", a__weight=torch.ones(16).to(E4M3)), BLOCKS, r"E4M3 with shape \[16\]; only matrices"),
    "NaN scale": (_with("fp8", a__weight_scale_inv=_set(ONES, (1, 2), torch.nan)), BLOCKS, r"is nan at \[1, 2\]"),
    "inf scale": (_with("fp8", a__weight_scale_inv=_set(ONES, (1, 2), torch.inf)), BLOCKS, r"is inf at \[1, 2\]"),
    "scale 0": (_with("fp8", a__weight_scale_inv=_set(ONES, (0, 1), 0)), BLOCKS, r"is 0\.0 at \[0, 1\]; a scale must"),
    "scale -1": (_with("fp8", a__weight_scale_inv=_set(ONES, (0, 0), -1)), BLOCKS, r"is -1\.0 at \[0, 0\]"),
    "NaN": (_with("fp8", a__weight=_nan_code()), BLOCKS, r"a\.weight has a NaN"),
    "products": (
        _with("fp8", a__weight=torch.full((16, 24), 2.0).to(E4M3), a__weight_scale_inv=_set(ONES, (1, 2), 3e38)),
        BLOCKS,
        r"a\.weight has a weight of inf from a scale of 3e\+38, but the largest bf16 number is 3\.38953e\+38",
    ),
    "products of bf16": (
        _with("float", a__weight_scale=torch.full((16, 1), 3.4e38)),  # in fp32 these are finite
        FLOAT,
        r"a\.weight has a weight of 3\.4e\+38 from",
    ),
    "products of int4": (_with("int4", a__weight_scale=torch.full((16, 3), 1e38)), INT4, r"a weight of inf from"),
    "activations": (_good("fp8"), BLOCKS | {"activation_scheme": 3}, r"activation_scheme = 3: supported: dynamic, st"),
    "sparsity": (_good("float"), FLOAT | {"sparsity_config": 3}, r"sparsity_config = 3: supported"),
    "no groups": (_good("float"), {"quant_method": "compressed-tensors"}, r"config_groups = None"),
    "fp4": (
        _good("float"),
        {**FLOAT, "config_groups": {"g": {"weights": CHANNEL | {"num_bits": 4}}}},
        r"\('float', 4\)",
    ),
    "strategy": (_good("float"), {**FLOAT, "config_groups": {"g": {"weights": CHANNEL | {"strategy": "x"}}}}, r"'x'"),
    "no float": (_good("float"), INT4, r"no group with weights of type float"),
    "zero point": (
        _with("float", a__weight_zero_point=ONES),
        FLOAT,
        r"zero point, a\.weight_zero_point; FP8 must not",
    ),
    "channels": (_with("float", a__weight_scale=torch.ones(15, 1)), FLOAT, r"has shape \[15, 1\].*needs \[16, 1\]"),
    "no int": (_good("int4"), FLOAT, r"no group with weights of type int"),
    "no shape": (_with("int4", a__weight_shape=None), INT4, r"no file has a\.weight_shape"),
    "other shape": (
        _with("int4", a__weight_shape=torch.tensor([1 << 40, 24])),
        INT4,
        r"_shape is \[1099511627776, 24\]; by",
    ),
    "negative": (_with("int4", a__weight_shape=torch.tensor([16, -8])), INT4, r"_shape is \[16, -8\]"),
    "shape of 3": (
        _with("int4", a__weight_shape=torch.tensor([16, 24, 1])),
        INT4,
        r"is I64 \[3\]; it must be I64 \[2\]",
    ),
    "words": (
        _with("int4", a__weight_packed=torch.ones(16, 2).int()),
        INT4,
        r"\[16, 2\], .*a\.weight_packed \[16, 3\]",
    ),
    "floats": (_with("int4", a__weight_packed=torch.ones(16, 3)), INT4, r"is F32 \[16, 3\]; it must be I32"),
    "groups": (_with("int4", a__weight_scale=torch.ones(16, 2)), INT4, r"scales \[16, 2\].*a\.weight_scale \[16, 3\]"),
    "zeros": (_with("int4", a__weight_zero_point=torch.ones(3, 3).int()), INT4, r"zero_point I32 \[2, 3\]"),
    "reordered": (_with("int4", a__weight_g_idx=torch.ones(24).int()), INT4, r"a\.weight_g_idx reorders the columns"),
    "both": (_with("int4", a__weight=torch.ones(16, 24)), INT4, r"both a\.weight_packed and a\.weight"),
    "NaN of int4": (
        _with("int4", a__weight_scale=_set(torch.ones(16, 3), (9, 1), torch.nan)),
        INT4,
        r"is nan at \[9, 1\]",
    ),
    "exponents": (_with("mxfp4", a_scales=None), MXFP4, r"no file has a_scales"),
    "blocks": (_with("mxfp4", a_blocks=None), MXFP4, r"has a_scales, but no file has a_blocks"),
    "width": (
        _with("mxfp4", a_blocks=torch.ones(2, 3, 1, 8).byte()),
        MXFP4,
        r"U8 \[2, 3, 1, 8\].*must be U8 \[experts",
    ),
    "NaN exponent": (_with("mxfp4", a_scales=torch.full((2, 3, 1), 255).byte()), MXFP4, r"contains 255, a NaN"),
    "too large": (_with("mxfp4", a_scales=torch.full((2, 3, 1), 253).byte()), MXFP4, r"contains 253, the exponent 126"),
}


def _read_all(folder: Path, tensors: Tensors, config: object) -> None:
    for name, entry in _entries(folder, tensors, config).items():
        read_rows(entry, name, 0, entry.shape[0])


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_folders_give_one_clear_error(tmp_path: Path, damage: str) -> None:
    tensors, config, message = DAMAGE[damage]
    with pytest.raises(ValueError, match=message) as raised:
        _read_all(tmp_path, tensors, config)
    assert str(tmp_path) in str(raised.value)
    assert "\n" not in str(raised.value)


def test_good_folders_are_what_the_damaged_ones_were_made_of(tmp_path: Path) -> None:
    for form, config in (("fp8", BLOCKS), ("float", FLOAT), ("int4", INT4), ("mxfp4", MXFP4)):
        _read_all(tmp_path, _good(form), config)
    _read_all(tmp_path, _with("fp8", a__weight_scale_inv=_set(ONES, (1, 2), 3e38)), BLOCKS)  # weights are 3e38


def test_rows_that_are_taken_as_stored_have_products_that_bf16_holds(tmp_path: Path) -> None:
    entries = _entries(tmp_path, _with("float", a__weight_scale=_set(torch.ones(16, 1), (5, 0), 3.4e38)), FLOAT)
    assert fp8_rows(entries["a.weight"], 6, 16) is not None
    with pytest.raises(ValueError, match=r"a\.weight has a weight of 3\.4e\+38 from"):
        fp8_rows(entries["a.weight"], 0, 16)


def test_files_that_end_early_or_lie_about_offsets(tmp_path: Path) -> None:
    entries = _entries(tmp_path, _good("fp8"), BLOCKS)
    file = tmp_path / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-100])
    with pytest.raises(ValueError, match=r"truncated in the middle of a\.weight"):
        read_rows(entries["a.weight"], "a.weight", 0, 16)
    with pytest.raises(ValueError, match="is truncated: "):
        read_header(file)
    begin, end = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])["a.weight"]["data_offsets"]
    file.write_bytes(content.replace(f"[{begin},{end}]".encode(), f"[{begin},{end - 1}]".encode()))
    with pytest.raises(ValueError, match=r"a\.weight is F8_E4M3 \[16, 24\], but has 383 bytes"):
        read_header(file)


def test_a_run_starts_from_a_quantized_folder(tmp_path: Path) -> None:
    """The whole way through `HfSource`, with a name of the weight and of the scale in the message."""
    make_theirs("llama2", torch.bfloat16).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    scale = torch.full((1, 1), 0.125)
    quantized = (tensors[name].float() / scale).to(E4M3)
    save_file(tensors | {name: quantized, f"{name}_scale_inv": scale}, tmp_path / "model.safetensors")
    _quantized_by(tmp_path, {"quant_method": "fp8", "weight_block_size": [128, 128]})
    source = HfSource(tmp_path)
    assert "quantization_config" not in source.about["huggingface"]
    read = source.read("model.layers.1.mlp.down.weight")
    assert torch.equal(read, quantized.float() * scale)
    assert source.tensors["model.layers.0.mlp.down.weight"].dtype is torch.bfloat16
