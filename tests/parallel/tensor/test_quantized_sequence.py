"""Norm, column-parallel, SwiGLU, row-parallel under sequence parallelism in FP8: gathering codes changes no bit.

What it is held to is the way through values, spelt out with the plain mappings: gather, then let the layer's operation
cast the whole. That holds too where products are cut into the ranks' parts, which travel one by one. And, where factors
do not depend on how features are cut, to one rank alone with float64 sums.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.utils.checkpoint import checkpoint

from megafp8.fp8 import (
    BlockwiseScaling,
    CurrentScaling,
    DelayedScaling,
    Fp8Manager,
    Fp8Recipe,
    MXFP8Scaling,
    NVFP4Scaling,
    RowwiseScaling,
)
from megafp8.layers.activation.op import activation
from megafp8.layers.norm.op import norm
from megafp8.linear.fusion import LinearInput
from megafp8.linear.linear import linear
from megafp8.parallel import collectives
from megafp8.parallel.parallel_state import initialize_model_parallel
from megafp8.parallel.sharding import Init
from megafp8.parallel.tensor.layers import ColumnParallelLinear, RowParallelLinear
from megafp8.parallel.tensor.mappings import (
    gather_from_sequence_parallel,
    reduce_scatter_to_sequence_parallel,
)
from megafp8.parallel.tensor.random import initialize_parameters
from megafp8.parallel.tp_overlap import Collective
from megafp8.plan import LinearSite, Neighbor
from tests.marks import slow_but
from tests.parallel.chunks import InChunks
from tests.world import World

H, F = 128, 256
RECIPES: dict[str, Fp8Recipe] = {
    "rowwise": RowwiseScaling(),
    "rowwise-pow2": RowwiseScaling(power_of_two=True),
    "rowwise-wgrad": RowwiseScaling(override_linear_precision=(False, False, True)),
    "blockwise": BlockwiseScaling(),
    "mxfp8": MXFP8Scaling(),
    "nvfp4": NVFP4Scaling(),
    "current": CurrentScaling(),
    "delayed": DelayedScaling(amax_history_len=2),
}


class Pair(nn.Module):
    """The two layers on this rank; `codes=False` goes through values."""

    def __init__(
        self,
        recipe: Fp8Recipe,
        group: ProcessGroup,
        dtype: torch.dtype,
        tokens: int,
        *,
        codes: bool,
        chunked: bool = False,
    ) -> None:
        super().__init__()
        self.group, self.codes = group, codes
        self.fp8 = Fp8Manager(recipe, amax_group=group)
        common: dict[str, Any] = {
            "group": group, "fp8": self.fp8, "init": Init("normal", 0.1), "dtype": dtype,
            "device": torch.device("cpu"), "sequence_parallel": codes,
            "tp_overlap": InChunks(group) if chunked else Collective(group),
        }  # fmt: skip
        self.norm_weight = nn.Parameter(torch.linspace(0.5, 1.5, H, dtype=dtype))
        parts = {"gate": F, "up": F}
        norm, activation = Neighbor("norm", "any" if codes else "none"), Neighbor("swiglu", "any")
        up = LinearSite(tokens=tokens, before=norm, after=activation)
        self.up = ColumnParallelLinear("gate_up", H, 2 * F, parts=parts, site=up, **common)
        down = LinearSite(tokens=tokens, before=activation)
        self.down = RowParallelLinear("down", F, H, site=down, **common)
        initialize_parameters(nn.ModuleList([self.up, self.down]), seed=3)
        self.fp8.materialize(torch.device("cpu"))

    def forward(self, x_sbh: Tensor) -> Tensor:
        up, down = self.up.state, self.down.state
        handoff = up.grad_handoff()
        _, normed = norm(x_sbh, None, self.norm_weight, None, 1e-5, up.input_format)
        self.handed_codes = isinstance(normed, LinearInput)
        if self.codes:
            return self.down(activation("swiglu", self.up(normed, handoff), None, down.input_format, handoff))
        assert isinstance(normed, Tensor)
        gate_up = linear(gather_from_sequence_parallel(normed, self.group), self.up.weight, up, handoff=handoff)
        y = linear(activation("swiglu", gate_up, None, down.input_format, handoff), self.down.weight, down)
        return reduce_scatter_to_sequence_parallel(y, self.group)


@contextmanager
def gathered_bytes() -> Iterator[list[int]]:
    """The sizes of what all-gathers give while it is open."""
    sizes: list[int] = []
    original = collectives._ALL_GATHER

    def gather(out: Tensor, x: Tensor, **options: Any) -> Any:
        sizes.append(out.numel() * out.element_size())
        return original(out, x, **options)

    collectives._ALL_GATHER = gather
    try:
        yield sizes
    finally:
        collectives._ALL_GATHER = original


def _run(pair: Pair, x: Tensor, dy: Tensor, recompute: bool) -> tuple[list[Tensor], list[list[int]]]:
    """y, gradients and FP8 state of a second step; and bytes gathered forward and backward."""
    pair(x).mul(dy).sum().backward()  # of which delayed scaling learns scales
    pair.fp8.end_step()
    pair.zero_grad()
    x = x.clone().requires_grad_()
    with gathered_bytes() as forward:
        y = checkpoint(pair, x, use_reentrant=False) if recompute else pair(x)
    with gathered_bytes() as backward:
        y.backward(dy)
    with torch.no_grad():
        assert torch.equal(pair(x), y)  # rows alone
    params = (pair.norm_weight, pair.up.weight, pair.down.weight)
    grads = [t.grad for t in (x, *params)]
    assert all(grad is not None for grad in grads)
    pair.fp8.end_step()  # ranks agree on amaxes
    return [y.detach(), *grads, *pair.fp8.state_dict().values()], [forward, backward]  # type: ignore[list-item]


def _slices(s: int, b: int, group: ProcessGroup, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    x, dy = (torch.randn(s, b, H, dtype=dtype) for _ in range(2))
    x[0, 0, 5], dy[-1, -1, 7] = 30, -20  # so that ranks have other amaxes
    rank, t = group.rank(), group.size()
    return x.chunk(t)[rank].contiguous(), dy.chunk(t)[rank].contiguous()


def _against_values(name: str, s: int, b: int, recompute: bool) -> tuple[bool, list[list[int]]]:
    group = initialize_model_parallel(torch.distributed.get_world_size()).tensor.group
    x, dy = _slices(s, b, group, torch.float32)
    codes, values = (
        Pair(RECIPES[name], group, torch.float32, x.shape[:2].numel(), codes=codes) for codes in (True, False)
    )
    found, sizes = _run(codes, x, dy, recompute)
    expected, _ = _run(values, x, dy, False)
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)
    return codes.handed_codes, sizes


@pytest.mark.parametrize("recompute", slow_but([False, True], False))
@pytest.mark.parametrize(
    ("name", "s", "b", "ranks", "hands_codes"),
    [
        ("rowwise", 6, 1, 2, True),
        pytest.param(*("rowwise", 32, 2, 4, True), marks=pytest.mark.slow),
        pytest.param(*("rowwise-pow2", 32, 2, 2, True), marks=pytest.mark.slow),
        ("rowwise-wgrad", 16, 1, 2, False),
        ("blockwise", 256, 1, 2, True),
        pytest.param(*("blockwise", 128, 2, 2, True), marks=pytest.mark.slow),
        ("blockwise", 128, 1, 2, False),
        pytest.param(*("blockwise", 512, 1, 4, True), marks=pytest.mark.slow),
        ("mxfp8", 64, 1, 2, True),
        ("mxfp8", 24, 2, 2, False),
        ("nvfp4", 32, 1, 2, False),
        ("current", 6, 1, 2, True),
        ("delayed", 10, 2, 2, True),
    ],
)
def test_codes_give_what_values_give(
    world4: World, name: str, s: int, b: int, ranks: int, hands_codes: bool, recompute: bool
) -> None:
    for handed, (forward, backward) in world4.run(_against_values, name, s, b, recompute, ranks=ranks):
        assert handed == hands_codes
        if recompute or not hands_codes:
            continue
        elements = s * b * H
        per_token, per_block = {
            "rowwise": (4 / H, 0.0), "rowwise-pow2": (4 / H, 0.0), "blockwise": (4 / 128, 4 / 128),
            "mxfp8": (1.0, 1.0), "current": (0.0, 0.0), "delayed": (0.0, 0.0),
        }[name]  # fmt: skip
        assert sum(forward) == elements * (1 + per_token)  # dequantized to bf16, mxfp8 has two bytes an element
        rows, columns = elements * (1 + per_token), 2 * elements * (1 + per_block)  # dy's rows; dy's and x's columns
        assert sum(backward) == (rows if name in ("current", "delayed") else rows + columns)


def _in_chunks(name: str, s: int, b: int, recompute: bool) -> None:
    """Sums of float64 products of few bits are nearly exact, so no value crosses a rounding boundary of FP8."""
    group = initialize_model_parallel(torch.distributed.get_world_size()).tensor.group
    x, dy = _slices(s, b, group, torch.float64)
    chunked = Pair(RECIPES[name], group, torch.float64, x.shape[:2].numel(), codes=True, chunked=True)
    found, sizes = _run(chunked, x, dy, recompute)
    expected, _ = _run(Pair(RECIPES[name], group, torch.float64, x.shape[:2].numel(), codes=False), x, dy, False)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    assert sizes[0] == [], "codes were gathered at once"


CHUNKS = [
    ("rowwise", 32, 2, 4), ("rowwise-wgrad", 16, 1, 2), ("blockwise", 512, 1, 4), ("blockwise", 128, 1, 2),
    ("mxfp8", 64, 1, 2), ("nvfp4", 32, 1, 2), ("current", 6, 1, 2), ("delayed", 32, 2, 4),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "s", "b", "ranks", "recompute"),
    slow_but(
        [(*case, recompute) for case in CHUNKS for recompute in (False, True)],
        *((*case, i % 2 == 0) for i, case in enumerate(CHUNKS) if case[1] != 512),
    ),
)
def test_chunks_give_what_the_whole_gives(
    world4: World, name: str, s: int, b: int, ranks: int, recompute: bool
) -> None:
    world4.run(_in_chunks, name, s, b, recompute, ranks=ranks)


def _kept(name: str) -> int:
    """Bytes of FP8 that the pair keeps for backward."""
    group = initialize_model_parallel(torch.distributed.get_world_size()).tensor.group
    x, _ = _slices(256, 1, group, torch.float32)
    pair = Pair(RECIPES[name], group, torch.float32, x.shape[:2].numel(), codes=True)
    kept: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel() if tensor.element_size() == 1 else 0)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        pair(x.requires_grad_())
    return sum(kept)


@pytest.mark.parametrize("name", ["rowwise", "blockwise"])
def test_a_rank_keeps_its_own_tokens(world2: World, name: str) -> None:
    assert world2.run(_kept, name) == [256 * H // 2 + 256 * F // 2] * 2


def _in_float64(name: str, s: int, b: int) -> list[Tensor]:
    group = initialize_model_parallel(torch.distributed.get_world_size()).tensor.group
    x, dy = _slices(s, b, group, torch.float64)
    pair = Pair(RECIPES[name], group, torch.float64, x.shape[:2].numel(), codes=True)
    return _run(pair, x, dy, False)[0]


WHOLE = [(name, *shape) for name in ("blockwise", "mxfp8", "current") for shape in ((256, 1), (128, 2), (40, 1))]


@pytest.mark.parametrize(("name", "s", "b"), slow_but(WHOLE, WHOLE[0], WHOLE[2], WHOLE[4], WHOLE[5], WHOLE[8]))
def test_two_ranks_compute_what_one_computes(world2: World, name: str, s: int, b: int) -> None:
    """Also where a slice is no multiple of a block, and values are gathered."""
    (alone,) = world2.run(_in_float64, name, s, b, ranks=1)
    first, second = world2.run(_in_float64, name, s, b, ranks=2)
    (gate, up), (gate2, up2) = first[3].chunk(2), second[3].chunk(2)
    y, dx = (torch.cat([first[i], second[i]]) for i in (0, 1))
    found = [y, dx, first[2] + second[2], torch.cat([gate, gate2, up, up2]), torch.cat([first[4], second[4]], dim=1)]
    for ours, theirs in zip(found, alone, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
