"""Time and memory of FP8 folders of DeepSeek-V3's shape, written and read.

    python -m benchmarks.bench_quantized_folders --folder /scratch
    python -m benchmarks.bench_quantized_folders --folder /scratch --whole --read 50

A model of DeepSeek-V3's widths with few layers and experts is written in block FP8 from random bf16 weights, read
back, and converted to a native checkpoint in bf16, each in a process of its own, whose peak resident memory is
reported. GB count what is stored in FP8 folders: of bf16 that is read or written twice as many bytes move. With
`--whole` a folder of all 61 layers and 256 experts is generated, whose data is zeros in sparse files and whose scales
are ones: the time to open it, and to read the first `--read` GB of it. CPU seconds are those of the process, which
others on the machine do not change much. All files are deleted.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.bench_conversion import Synthetic, leave_page_cache
from benchmarks.common import Table, new_parser, write_json
from megafp8.checkpoint.files import reading_once, write_at
from megafp8.config.schema import ModelConfig
from megafp8.conversion.base import Source, TensorInfo, is_vocabulary
from megafp8.conversion.convert import Selected, convert, keep_freed_memory
from megafp8.conversion.hf_config import FAMILIES, read_config, write_config
from megafp8.conversion.hf_sink import HfSink
from megafp8.conversion.hf_source import HfSource
from megafp8.conversion.native import NativeSink
from megafp8.conversion.safetensors_format import header
from megafp8.training.quantized_export import quantized_export
from megafp8.user_cache import make_own_folder

CONFIG: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048,
    "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128, "n_shared_experts": 1,
    "n_routed_experts": 256, "routed_scaling_factor": 2.5, "kv_lora_rank": 512, "q_lora_rank": 1536,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "qk_nope_head_dim": 128, "n_group": 8, "topk_group": 4,
    "num_experts_per_tok": 8, "first_k_dense_replace": 3, "norm_topk_prob": True, "hidden_act": "silu",
    "max_position_embeddings": 163840, "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "attention_bias": False,
    "num_nextn_predict_layers": 0,
}  # fmt: skip
"""DeepSeek-V3's, without YaRN and multi-token prediction."""
FILE_BYTES = 5 * 10**9


class Figures(NamedTuple):
    """`bytes`: of the FP8 folder, or of what was read of it. Time of all threads, and peak memory, of the process."""

    bytes: int
    seconds: float
    cpu_seconds: float
    peak_bytes: int


def model_of(layers: int, experts: int) -> ModelConfig:
    small = {"num_hidden_layers": layers, "n_routed_experts": experts, "first_k_dense_replace": min(3, layers - 1)}
    return read_config(CONFIG | small)[1]


def write(model: ModelConfig, target: Path) -> None:
    source = Synthetic(model)
    sink = HfSink(target, quantized=quantized_export(source, "fp8-block"))
    convert(source, sink, {})
    sink.publish()


def generate(model: ModelConfig, folder: Path) -> None:
    """A folder of zeros that takes no room, with scales of 1."""
    source = Synthetic(model)
    export = quantized_export(source, "fp8-block")
    names = FAMILIES["deepseek_v3"].names
    shapes = {
        name: (model.vocab_size or 0, *info.shape[1:]) if is_vocabulary(name) else tuple(info.shape)
        for name, info in source.tensors.items()
    }
    locations = {name: names.locate(model, name, shape) for name, shape in shapes.items()}
    quantized = export.plan(locations)
    infos = quantized | {
        x.name: TensorInfo(x.shape, torch.bfloat16) for x in locations.values() if x.name not in quantized
    }
    files: list[dict[str, TensorInfo]] = [{}]
    filled = 0
    for name, info in infos.items():
        if filled + info.nbytes > FILE_BYTES:
            files.append({})
            filled = 0
        files[-1][name] = info
        filled += info.nbytes
    make_own_folder(folder)
    by_name = {}
    for i, tensors in enumerate(files, 1):
        file = f"model-{i:05d}-of-{len(files):05d}.safetensors"
        first, starts = header(tensors)
        with (folder / file).open("w+b", buffering=0) as stream:
            stream.write(first)
            stream.truncate(len(first) + sum(info.nbytes for info in tensors.values()))
            for name, start in starts.items():
                by_name[name] = file
                if name.endswith("_scale_inv"):
                    write_at(stream, start, memoryview(torch.ones(tensors[name].shape).numpy().tobytes()))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": by_name}))
    config = write_config(FAMILIES["deepseek_v3"], model) | {"quantization_config": export.config()}
    (folder / "config.json").write_text(json.dumps(config))


def read(source: Source, most: float) -> int:
    """Read tensors until so many bytes of FP8 and bf16 have been; how many these were."""
    done = 0
    for name, info in source.tensors.items():
        if done >= most:
            break
        source.read(name)
        done += info.nbytes // 4 if info.dtype is torch.float32 else info.nbytes
    return done


def phase(name: str, folder: Path, layers: int, experts: int, most: float) -> Figures:
    """Run one case; each has a process of its own, whose peak memory is that of the case."""
    keep_freed_memory()
    fp8, model = folder / "fp8", model_of(layers, experts)
    start, cpu_start = time.monotonic(), time.process_time()
    done = 0
    if name == "write":
        write(model, fp8)
    elif name == "generate":
        generate(model, fp8)
    elif name == "open":
        HfSource(fp8)
    elif name == "read":
        source = HfSource(fp8)
        start, cpu_start = time.monotonic(), time.process_time()
        with reading_once():
            done = read(source, most)
    else:
        sink = NativeSink(folder / "native")
        convert(Selected(HfSource(fp8), weights_only=True, dtype=torch.bfloat16), sink, {})
        sink.publish()
    seconds = time.monotonic() - start
    size = done or sum(file.stat().st_size for file in fp8.iterdir())
    cpu_seconds = time.process_time() - cpu_start
    return Figures(size, seconds, cpu_seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)


def in_process(name: str, folder: Path, layers: int, experts: int, most: float = 1e30) -> Figures:
    if (folder / "fp8").is_dir() and name != "open":
        leave_page_cache(folder / "fp8")
    read_end, write_end = os.pipe()
    child = os.posix_spawn(
        sys.executable,
        [sys.executable, "-m", "benchmarks.bench_quantized_folders", "--folder", str(folder), "--phase", name,
         "--layers", str(layers), "--experts", str(experts), "--read", str(most / 1e9), "--pipe", str(write_end),
         "--threads", str(torch.get_num_threads())],
        os.environ,
        file_actions=[(os.POSIX_SPAWN_DUP2, write_end, write_end)],
    )  # fmt: skip
    os.close(write_end)
    with os.fdopen(read_end) as stream:
        text = stream.read()
    if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
        raise RuntimeError(f"{name} failed")
    return Figures(*json.loads(text))


COLUMNS = {"GB": ".2f", "seconds": ".1f", "CPU s": ".1f", "GB/s": ".2f", "GB/CPU s": ".2f", "peak RSS GiB": ".2f"}


def main(argv: list[str] | None = None) -> int:
    parser = new_parser(__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="an existing folder on the disk to be measured")
    parser.add_argument("--layers", type=int, default=2, help="the first of them dense")
    parser.add_argument("--experts", type=int, default=32, help="of each layer, a multiple of 16")
    parser.add_argument("--whole", action="store_true", help="all layers and experts, with zeros that take no room")
    parser.add_argument("--read", type=float, default=20, help="GB that are read of the whole folder")
    parser.add_argument("--threads", type=int, default=1, help="of torch in each process")
    parser.add_argument("--phase", help="of a process that another one starts")
    parser.add_argument("--pipe", type=int)
    arguments = parser.parse_args(argv)
    torch.set_num_threads(arguments.threads)
    if arguments.phase:
        found = phase(arguments.phase, arguments.folder, arguments.layers, arguments.experts, arguments.read * 1e9)
        with os.fdopen(arguments.pipe, "w") as stream:
            stream.write(json.dumps(found))
        return 0
    layers, experts = (61, 256) if arguments.whole else (arguments.layers, arguments.experts)
    names = ["generate", "open", "read"] if arguments.whole else ["write", "read", "convert"]
    figures = {}
    with tempfile.TemporaryDirectory(dir=arguments.folder) as temporary:
        for name in names:
            most = arguments.read * 1e9 if arguments.whole else 1e30
            figures[name] = in_process(name, Path(temporary), layers, experts, most)
        shutil.rmtree(temporary)
        Path(temporary).mkdir()
    write_json(arguments.json, {name: x._asdict() for name, x in figures.items()})
    table = Table("", 10, COLUMNS)
    print(table.heading())
    for name, x in figures.items():
        gb = x.bytes / 1e9
        speeds = (gb / x.seconds, gb / x.cpu_seconds)
        print(table.row(name, gb, x.seconds, x.cpu_seconds, *speeds, x.peak_bytes / 2**30))
    return 0


if __name__ == "__main__":
    sys.exit(main())
