"""CheckpointReader: any rectangle, in bounded memory. Files of real ranks: tests/training/test_any_layout.py."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megafp8.checkpoint import CheckpointReader, Rectangle, Rectangles, save, torch_file
from tests.checkpoint import toy


def _grid(tensor: torch.Tensor, rows: list[int], columns: list[int]) -> Rectangles:
    """`tensor` cut before these rows and columns."""
    parts = []
    for r, r_end in zip([0, *rows], [*rows, tensor.shape[0]]):
        for c, c_end in zip([0, *columns], [*columns, tensor.shape[1]]):
            parts.append(Rectangle((r, c, 0), tensor[r:r_end, c:c_end]))
    return Rectangles(tuple(tensor.shape), tensor.dtype, parts)


@pytest.fixture(scope="module")
def cut(tmp_path_factory: pytest.TempPathFactory) -> tuple[CheckpointReader, torch.Tensor]:
    tensor = torch.randn(11, 13, 3, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    state = {"w": _grid(tensor, [2, 3, 9], [5, 6]), "t": Rectangles((3, 13, 11), tensor.dtype, [])}
    state["t"].add((0, 0, 0), tensor.permute(2, 1, 0))  # stored with its strides
    return CheckpointReader(save(tmp_path_factory.mktemp("cut"), 1, state, {})), tensor


@given(st.data())
@settings(max_examples=50)
def test_any_rectangle(cut: tuple[CheckpointReader, torch.Tensor], data: st.DataObject) -> None:
    source, tensor = cut
    offset = tuple(data.draw(st.integers(0, n)) for n in tensor.shape)
    shape = tuple(data.draw(st.integers(0, n - o)) for n, o in zip(tensor.shape, offset))
    expected = tensor[tuple(slice(o, o + n) for o, n in zip(offset, shape))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_file, "BLOCK_BYTES", data.draw(st.sampled_from([1, 100, 2**20])))
        assert torch.equal(source.read("w", offset, shape), expected)
        assert torch.equal(source.read("t", offset[::-1], shape[::-1]), expected.permute(2, 1, 0))


def test_layers_are_sorted_by_number(tmp_path: Path) -> None:
    names = ["layers.0.a", "layers.2.a", "layers.2.b", "layers.10.a"]
    path = save(tmp_path, 1, {name: torch.zeros(1) for name in reversed(names)}, {})
    assert list(CheckpointReader(path).tensors) == names


def test_empty_and_single_values(tmp_path: Path) -> None:
    state = {"none": torch.zeros(0, 4), "one": torch.tensor(2.5), "flags": torch.tensor([True, False])}
    source = CheckpointReader(save(tmp_path, 1, dict(state), {}))
    assert all(torch.equal(source.read(name), value) for name, value in state.items())


def test_memory_is_the_result_and_a_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.empty is asked for the result and blocks, Python for no large bytes."""
    tensor = torch.randn(2000, 500)
    source = CheckpointReader(save(tmp_path, 1, {"w": tensor}, {}))
    monkeypatch.setattr(torch_file, "BLOCK_BYTES", 40_000)
    made, empty = [], torch.empty

    def counted(*args: Any, **options: Any) -> torch.Tensor:
        made.append(empty(*args, **options))
        return made[-1]

    monkeypatch.setattr(torch, "empty", counted)
    tracemalloc.start()
    found = source.read("w", (0, 100), (2000, 300))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert torch.equal(found, tensor[:, 100:400])
    assert max(t.nbytes for t in made[1:] if t.device.type == "cpu") == 40_000
    assert made[0] is found
    assert peak < 200_000


def test_errors_name_what_is_wrong(tmp_path: Path) -> None:
    path = save(tmp_path, 3, toy.make(0, 1, 1, torch.float32).state(), toy.METADATA)
    source = CheckpointReader(path)
    with pytest.raises(ValueError, match=r"has no tensor model.layers.0.nor; it has model.layers.0.norm"):
        source.read("model.layers.0.nor")
    with pytest.raises(ValueError, match=r"model.embedding is \[16, 4\]; a rectangle \[16, 4\] at \[1, 0\] is outside"):
        source.read("model.embedding", (1, 0), (16, 4))
    data, place = path / "__0_0.distcp", source.rectangles["model.layers.1.q"][0]
    content = data.read_bytes()
    data.write_bytes(content[: place.start] + bytes(place.length) + content[place.start + place.length :])
    with pytest.raises(
        ValueError, match=rf"{data} is damaged at model.layers.1.q \(which begins at byte {place.start}\)"
    ):
        source.read("model.layers.1.q")
    assert torch.equal(source.read("model.embedding"), toy.truth("embedding", (16, 4), torch.float32))
    data.write_bytes(content[:-1])
    with pytest.raises(ValueError, match="is truncated"):
        CheckpointReader(path)
    with pytest.raises(ValueError, match="there is no checkpoint"):
        CheckpointReader(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"is not a checkpoint: it has no metadata.json"):
        CheckpointReader(tmp_path)


def test_a_tensor_with_holes_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path, 1, toy.make(0, 2, 1, torch.float32).state(), {})  # one of two ranks
    source = CheckpointReader(path)
    with pytest.raises(ValueError, match=r"has only 32 of 64 values of model.embedding"):
        source.read("model.embedding")
    assert source.read("model.embedding", (0, 0), (8, 4)).shape == (8, 4)
