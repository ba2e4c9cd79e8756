"""Checkpoints of Megatron-LM that are damaged, malicious or of another kind: a clear error, and no code runs."""

from __future__ import annotations

import enum
import os
import shutil
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megafp8.conversion.megatron.source import MegatronSource
from tests.conversion.families import RandomSource
from tests.conversion.megatron.reference import save
from tests.conversion.megatron.test_megatron import ARGS, assert_same, random_source

E = {"num_experts": 8}


class Payload:
    """A pickle of this makes the file `path` when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.path}",)


@pytest.fixture(scope="module")
def truth() -> RandomSource:
    return random_source("llama")


@pytest.fixture(scope="module")
def pristine(truth: RandomSource, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("megatron"), truth, ARGS["llama"], (2, 2, 1))


@pytest.fixture
def folder(pristine: Path, tmp_path: Path) -> Path:
    """A checkpoint to damage, TP2 PP2."""
    return Path(shutil.copytree(pristine, tmp_path / "copy"))


def file_of(folder: Path, name: str = "mp_rank_01_001") -> Path:
    return folder / "iter_0000100" / name / "model_optim_rng.pt"


def change(file: Path, how: Callable[[dict[str, Any]], None]) -> None:
    content = torch.load(file, weights_only=False)
    how(content)
    torch.save(content, file)


def test_classes_that_are_not_installed(truth: RandomSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("megatron_of_someone")
    backend = enum.Enum("AttnBackend", ["flash", "auto"], module="megatron_of_someone")  # type: ignore[misc]
    module.AttnBackend = backend  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "megatron_of_someone", module)
    rng = {"np_rng_state": np.arange(3), "torch_rng_state": torch.get_rng_state(), "bytes": b"\xff\x00"}
    args = ARGS["llama"] | {"attention_backend": backend.auto, "kinds": {backend.flash: 1}}
    save(tmp_path, truth, args, (2, 1, 1), more={"rng_state": [rng], "optimizer": {"param_groups": [{"lr": 0.1}]}})
    monkeypatch.delitem(sys.modules, "megatron_of_someone")
    assert_same(MegatronSource(tmp_path), truth)


@pytest.mark.parametrize("where", ["args", "beside", "as a weight"])
def test_code_in_a_file_does_not_run(where: str, truth: RandomSource, tmp_path: Path) -> None:
    trace = tmp_path / "it ran"
    payload = Payload(Path(f"'{trace}'"))
    args = ARGS["llama"] | ({"attention_backend": payload} if where == "args" else {})
    save(tmp_path / "a", truth, args, (1, 1, 1), more={"rng_state": payload} if where == "beside" else {})
    if where == "as a weight":
        change(file_of(tmp_path / "a", "mp_rank_00"), lambda c: c["model"].update({"output_layer.weight": payload}))
        with pytest.raises(ValueError, match=r"output_layer.weight is <posix.system>, not a plain tensor"):
            MegatronSource(tmp_path / "a")
    else:
        assert_same(MegatronSource(tmp_path / "a"), truth)
    assert not trace.exists()
    torch.load(file_of(tmp_path / "a", "mp_rank_00"), weights_only=False)
    assert trace.exists()  # so it was live


def test_a_file_that_is_no_archive(folder: Path) -> None:
    torch.save({"model": {}}, file_of(folder), _use_new_zipfile_serialization=False)
    with pytest.raises(ValueError, match=r"does not begin as a zip archive \(torch before 1.6"):
        MegatronSource(folder)


def test_missing_and_superfluous_ranks(folder: Path) -> None:
    shutil.rmtree(file_of(folder).parent)
    with pytest.raises(ValueError, match=r"iter_0000100 has no mp_rank_01_001 of 2 × 2 ranks"):
        MegatronSource(folder)
    shutil.rmtree(file_of(folder, "mp_rank_01_000").parent)
    with pytest.raises(ValueError, match="has tensor_model_parallel_size = 2, but there are folders for 1"):
        MegatronSource(folder)
    file_of(folder, "mp_rank_00_000").unlink()
    with pytest.raises(ValueError, match=r"mp_rank_00_000 has no model_optim_rng.pt"):
        MegatronSource(folder)


def test_missing_expert_ranks(tmp_path: Path) -> None:
    save(tmp_path, random_source("mixtral"), ARGS["mixtral"], (1, 2, 1, 4))
    shutil.rmtree(file_of(tmp_path, "mp_rank_00_001_002").parent)
    with pytest.raises(ValueError, match="iter_0000100 has no mp_rank_00_001_002 of 1 × 2 × 4 ranks"):
        MegatronSource(tmp_path)
    for rank in "012":
        shutil.rmtree(file_of(tmp_path, f"mp_rank_00_000_00{rank}").parent)
    for rank in "01":
        shutil.rmtree(file_of(tmp_path, f"mp_rank_00_001_00{rank}").parent)
    with pytest.raises(ValueError, match="has no mp_rank_00_000_000 of 1 × 2 × 4 ranks"):
        MegatronSource(tmp_path)
    shutil.rmtree(tmp_path / "iter_0000100")
    save(tmp_path, random_source("mixtral"), ARGS["mixtral"] | {"num_experts": 3}, (1, 1, 1, 2))
    with pytest.raises(ValueError, match="has folders for 2 expert ranks, but num_experts = 3"):
        MegatronSource(tmp_path)
    shutil.rmtree(file_of(tmp_path, "mp_rank_00_001").parent)
    with pytest.raises(ValueError, match="has expert_model_parallel_size = 2, but there are folders for 1"):
        MegatronSource(tmp_path)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (lambda c: c.update(checkpoint_version=2.0), "checkpoint_version 2.0: before 3.0 the rows of query_key_value"),
        (lambda c: c.pop("checkpoint_version"), "checkpoint_version 0"),
        (lambda c: c.update(iteration=90), "has iteration 90, others have 100"),
        (lambda c: c.pop("args"), "has no arguments"),
        (lambda c: c.pop("model"), "has no weights: it has args, checkpoint_version, iteration, but no model"),
        (lambda c: setattr(c["args"], "num_layers", 5), "num_layers = 5, but another file has 4"),
        (
            lambda c: c["model"].pop("decoder.layers.0.mlp.linear_fc2.weight"),
            "has no tensor decoder.layers.0.mlp.linear",
        ),
        (
            lambda c: c["model"].update({"mtp.weight": torch.ones(1)}),
            "1 tensors that megafp8 does not know: mtp.weight",
        ),
        (
            lambda c: c["model"].update({"decoder.layers.0.mlp.experts.weight1": torch.ones(1)}),
            "experts.weight1 holds all experts of a layer",
        ),
        (
            lambda c: c["model"].update({"decoder.final_layernorm.weight": torch.ones(15)}),
            r"final_layernorm.weight has shape \[15\], but \[16\] by the arguments",
        ),
        (
            lambda c: c["model"].update({"decoder.final_layernorm.weight": torch.ones(16).half()}),
            "torch.float16, and torch.float32 on the first rank",
        ),
        (
            lambda c: c["model"].update(
                {"output_layer.weight": c["model"]["output_layer.weight"].t().contiguous().t()}
            ),
            "output_layer.weight is not contiguous",
        ),
    ],
)
def test_a_file_of_another_checkpoint(how: Callable[[dict[str, Any]], None], message: str, folder: Path) -> None:
    change(file_of(folder), how)
    with pytest.raises(ValueError, match=message):
        MegatronSource(folder)


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        (E | {"moe_router_load_balancing_type": "sinkhorn"}, "moe_router_load_balancing_type = 'sinkhorn'"),
        (E | {"moe_router_topk": 1}, "moe_router_topk = 1 without moe_router_pre_softmax"),
        (E | {"moe_router_num_groups": 4, "moe_router_group_topk": 1}, "sum of their 2 largest scores, but with the"),
        (E | {"moe_layer_freq": 2}, "moe_layer_freq = 2: .*experts in layers n - 1"),
        (E | {"moe_expert_capacity_factor": 1.5}, "moe_expert_capacity_factor = 1.5, experts that drop tokens"),
        (E | {"add_bias_linear": True}, "add_bias_linear = True with num_experts: if exp"),
        (E | {"expert_tensor_parallel_size": 2}, "experts that are sharded like the other layers, over 1"),
        (E, "has no tensor decoder.layers.0.mlp.router.weight"),
        ({"apply_layernorm_1p": True}, "norms whose weights are stored minus one"),
        ({"position_embedding_type": "yarn"}, "position_embedding_type = 'yarn'"),
        ({"rotary_percent": 0.5}, "rotary embedding of a part of each head"),
        ({"normalization": "LayerNorm", "qk_layernorm": True}, "megafp8 only has RMSNorm of queries and keys"),
        ({"window_size": (8, 8)}, "only has causal windows"),
        ({"window_size": 8}, "int"),
        ({"hidden_size": None}, "the arguments have no hidden_size"),
        ({"num_attention_heads": "many"}, "num_attention_heads"),
    ],
)
def test_unsupported_models_are_refused(
    argument: dict[str, Any], message: str, truth: RandomSource, tmp_path: Path
) -> None:
    save(tmp_path, truth, ARGS["llama"] | argument, (1, 1, 1))
    with pytest.raises(ValueError, match=message) as error:
        MegatronSource(tmp_path)
    assert "mp_rank_00/model_optim_rng.pt" in str(error.value)


def test_other_formats_and_wrong_folders(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no latest_checkpointed_iteration.txt and no folders mp_rank_"):
        MegatronSource(tmp_path)
    strange = folder / "iter_0000100" / "mp_rank_00_000_001_000"
    strange.mkdir()
    with pytest.raises(ValueError, match="mp_rank_00_000_001_000: unknown name"):
        MegatronSource(folder)
    strange.rmdir()
    shutil.copytree(file_of(folder).parent, folder / "iter_0000100" / "mp_rank_00_000_001")
    with pytest.raises(ValueError, match="folders of several layouts: mp_rank_00_000, mp_rank_00_000_001"):
        MegatronSource(folder)
    (folder / "iter_0000100" / ".metadata").touch()
    with pytest.raises(ValueError, match=r"distributed checkpoint of Megatron-LM .* --ckpt-convert-format torch "):
        MegatronSource(folder)
    (folder / "latest_checkpointed_iteration.txt").write_text("200")
    with pytest.raises(ValueError, match=r"names 200, but there is no .*iter_0000200"):
        MegatronSource(folder)
    (folder / "latest_checkpointed_iteration.txt").write_text("\x00")
    with pytest.raises(ValueError, match="is damaged: it has"):
        MegatronSource(folder)


def test_tensors_that_share_a_storage(truth: RandomSource, tmp_path: Path) -> None:
    """As the distributed optimizer has it: parameters are views of one buffer."""
    save(tmp_path, truth, ARGS["llama"], (1, 1, 1))

    def share(content: dict[str, Any]) -> None:
        buffer = torch.cat([x.flatten() for x in content["model"].values()])
        sizes = [x.numel() for x in content["model"].values()]
        for (key, x), view in zip(list(content["model"].items()), buffer.split(sizes), strict=True):
            content["model"][key] = torch.nn.Parameter(view.view(x.shape))
        content["model"]["decoder.layers.0.mlp.linear_fc1._extra_state"] = torch.zeros(3, dtype=torch.uint8)

    change(file_of(tmp_path, "mp_rank_00"), share)
    assert_same(MegatronSource(tmp_path), truth)
