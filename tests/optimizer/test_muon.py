"""Muon against torch.optim.Muon and a float64 singular value decomposition; matrices in parts against whole ones."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megafp8.optimizer import matrices as matrix_optimizer
from megafp8.optimizer.config import OptimizerConfig
from megafp8.optimizer.matrices import MatrixPart, assign_owners, batches
from megafp8.optimizer.mixed_precision import MixedPrecisionOptimizer
from megafp8.optimizer.muon import Muon, newton_schulz
from megafp8.optimizer.param_groups import is_hidden_matrix
from megafp8.parallel.data.grad_buffer import main_grad_of
from megafp8.parallel.sharding import FlatShard, Init, ParamShard, ParamSpec, set_spec, shard_dim, stack_rows
from megafp8.parallel.sharding import unsharded as whole
from tests.marks import slow_but
from tests.tiny_model import CPU, state_of
from tests.world import World

DECAY, BETAS, EPS = 0.1, (0.9, 0.95), 1e-8
STORED = {"fp32": torch.float64, "bf16": torch.bfloat16}
SHAPES = {
    "layers.0.attention.q.weight": (16, 12),
    "layers.0.attention.k.weight": (8, 12),
    "layers.0.attention.v.weight": (8, 12),
    "layers.0.attention.proj.weight": (12, 16),
    "layers.0.mlp.gate.weight": (32, 12),
    "layers.0.mlp.up.weight": (32, 12),
    "layers.0.mlp.down.weight": (12, 32),
    "layers.1.mlp.router.weight": (4, 12),
    "layers.0.mlp_norm.weight": (12,),
    "embedding.word.weight": (20, 12),
    "output.weight": (20, 12),
}
HEADS = {f"layers.0.attention.{x}.weight": rows for x, rows in (("q", (4,)), ("k", (4,)), ("v", (3, 1)))}
"""Rows of the matrices of a head; that of v has two."""
FUSED = [
    ["embedding.word.weight"],
    ["layers.0.attention.q.weight", "layers.0.attention.k.weight", "layers.0.attention.v.weight"],
    ["layers.0.attention.proj.weight"],
    ["layers.0.mlp_norm.weight"],
    ["layers.0.mlp.gate.weight", "layers.0.mlp.up.weight"],
    ["layers.0.mlp.down.weight"],
    ["layers.1.mlp.router.weight"],
    ["output.weight"],
]
"""The tensors of each parameter."""
ROWS = {"layers.0.attention.proj.weight", "layers.0.mlp.down.weight"}
"""Those that tensor parallelism divides along dim 1."""


def _values(name: str, step: int) -> Tensor:
    """Initial values (step 0) or a gradient of a tensor: columns of very different size, as gradients have."""
    rng = np.random.default_rng([step, *name.encode()])
    x = rng.normal(size=SHAPES[name]).astype(np.float32)
    return torch.from_numpy(x * np.exp(rng.normal(size=x.shape[-1])).astype(np.float32))


def _polynomial_of_singular_values(x: np.ndarray) -> np.ndarray:
    """What Newton-Schulz computes, by a singular value decomposition in float64."""
    u, s, vt = np.linalg.svd(x.astype(np.float64), full_matrices=False)
    s = s / np.linalg.norm(x.astype(np.float64))
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return (u * s) @ vt


@pytest.mark.parametrize("shape", [(6, 6), (5, 17), (24, 7), (1, 4)])
def test_newton_schulz_is_a_polynomial_of_the_singular_values(shape: tuple[int, int]) -> None:
    x = np.random.default_rng(3).normal(size=shape)
    expected = _polynomial_of_singular_values(x)
    np.testing.assert_allclose(newton_schulz(torch.from_numpy(x)).numpy(), expected, rtol=1e-10, atol=1e-12)
    in_fp32 = newton_schulz(torch.from_numpy(x).float()).numpy()
    np.testing.assert_allclose(in_fp32, expected, rtol=1e-4, atol=1e-5)
    before, after = (np.linalg.svd(matrix, compute_uv=False) for matrix in (x / np.linalg.norm(x), expected))
    after = after[: (before > 0.003).sum()]
    assert 0.68 < after.min() <= after.max() < 1.21


def test_a_matrix_of_zeros_stays_finite() -> None:
    assert not newton_schulz(torch.zeros(4, 6)).any()


def _params(dtype: torch.dtype, cut: Any = whole) -> dict[str, nn.Parameter]:
    """The model's parameters with initial values and a gradient buffer; `cut`: gives the shards of a tensor."""
    params = {}
    for names in FUSED:
        cuts = [replace(shard, heads=HEADS.get(name, ())) for name in names for shard in cut(name, SHAPES[name])]
        pieces = stack_rows(cuts)
        if not pieces:
            continue
        local = torch.cat([_part(piece, _values(piece.name, 0)) for piece in pieces])
        decays = len(SHAPES[names[0]]) == 2
        linear = decays and not any(part in names[0] for part in ("embedding", "router"))
        spec = ParamSpec(pieces, Init("zeros"), replicated_over_tp=False, matrix=linear, weight_decay=decays)
        param = set_spec(nn.Parameter(local.to(dtype)), spec)
        param.main_grad = torch.zeros(local.shape)  # type: ignore[attr-defined]
        params[names[0]] = param
    return params


def _part(piece: ParamShard, x: Tensor) -> Tensor:
    return x[tuple(slice(o, o + n) for o, n in zip(piece.offset, piece.shape))]


def _set_gradients(params: dict[str, nn.Parameter], step: int) -> None:
    for param in params.values():
        for piece in param.spec.shards:  # type: ignore[attr-defined]
            piece.view(main_grad_of(param)).copy_(_part(piece, _values(piece.name, step)))


def _optimizer(
    shards: list[FlatShard], muon: Muon, moments: Literal["fp32", "bf16"] = "fp32", **options: Any
) -> MixedPrecisionOptimizer:
    config = OptimizerConfig(
        name="muon", muon=muon, learning_rate=1.0, weight_decay=DECAY, beta1=BETAS[0], beta2=BETAS[1], eps=EPS,
        moments_dtype=moments,
    )  # fmt: skip
    return MixedPrecisionOptimizer(shards, config, device=CPU, **options)


def _pieces(optimizer: MixedPrecisionOptimizer, params: dict[str, nn.Parameter], key: str) -> dict[str, Tensor]:
    """By tensor, the masters (of fp32 parameters: these) or another state; of whole parameters."""
    found = {}
    for param in params.values():
        state = state_of(optimizer, param)
        flat = state.get(key, param.detach().flatten()) if key == "master" else state.get(key)
        if flat is not None:
            found |= {piece.name: piece.view(flat.view(param.shape)) for piece in param.spec.shards}  # type: ignore[attr-defined]
    return found


def test_what_muon_updates() -> None:
    params = _params(torch.float32)
    found = {name for name, param in params.items() if is_hidden_matrix(param.spec)}  # type: ignore[arg-type]
    assert found == {f"layers.0.{x}.weight" for x in ("attention.q", "attention.proj", "mlp.gate", "mlp.down")}


@pytest.mark.parametrize(
    ("dtype", "scaling", "nesterov"),
    slow_but(
        itertools.product([torch.float32, torch.bfloat16], ["match_rms_adamw", "original"], [True, False]),
        (torch.float32, "match_rms_adamw", True), (torch.bfloat16, "original", False),
    ),
)  # fmt: skip
def test_equals_torch(dtype: torch.dtype, scaling: Any, nesterov: bool) -> None:
    settings = Muon(learning_rate=3.0, momentum=0.9, nesterov=nesterov, scaling=scaling)
    params = _params(dtype)
    shards = [FlatShard(p, 0, p.numel()) for p in params.values()]
    optimizer = _optimizer(shards, settings)
    expected = {name: nn.Parameter(x.to(dtype).float().clone()) for name, x in _initial().items()}
    hidden = {name for name in expected if name.startswith("layers.0") and "norm" not in name}
    theirs = torch.optim.Muon(
        [expected[name] for name in hidden],
        lr=1.0, weight_decay=DECAY, momentum=0.9, nesterov=nesterov, adjust_lr_fn=scaling,
    )  # fmt: skip
    others = [
        {"params": [x for name, x in expected.items() if name not in hidden and x.dim() == dim], "weight_decay": decay}
        for dim, decay in ((2, DECAY), (1, 0.0))
    ]
    adam = torch.optim.AdamW(others, betas=BETAS, eps=EPS)
    for step, lr in enumerate([0.02, 0.01, 0.03, 0.02, 0.01], start=1):
        _set_gradients(params, step)
        for name, x in expected.items():
            x.grad = _values(name, step)
        for group in theirs.param_groups:
            group["lr"] = 3.0 * lr
        for group in adam.param_groups:
            group["lr"] = lr
        optimizer.step(lr)
        theirs.step()
        adam.step()
        for name, master in _pieces(optimizer, params, "master").items():
            torch.testing.assert_close(master, expected[name].detach(), rtol=1e-6, atol=1e-6)
    assert not any(torch.equal(x.detach(), _values(name, 0).to(dtype).float()) for name, x in expected.items())
    momentum = _pieces(optimizer, params, "momentum_buffer")
    assert momentum.keys() == hidden
    for name, found in momentum.items():
        torch.testing.assert_close(found, theirs.state[expected[name]]["momentum_buffer"], rtol=1e-6, atol=1e-6)
    assert _pieces(optimizer, params, "exp_avg_sq").keys() == expected.keys() - hidden
    for param in params.values():
        master = state_of(optimizer, param).get("master", param.detach().flatten())
        assert torch.equal(param.detach().flatten(), master.to(dtype))


def _initial() -> dict[str, Tensor]:
    return {name: _values(name, 0) for names in FUSED for name in names}


@pytest.mark.parametrize(("per_head", "moments"), [(False, "fp32"), (True, "fp32"), (False, "bf16")])
def test_equals_the_formulas_in_float64(per_head: bool, moments: Literal["fp32", "bf16"]) -> None:
    """Nesterov momentum, decay and scale by hand, the orthogonalization by a singular value decomposition."""
    params = _params(torch.float32)
    muon = Muon(newton_schulz_dtype="fp32", per_head=per_head)
    optimizer = _optimizer([FlatShard(p, 0, p.numel()) for p in params.values()], muon, moments)
    starts = {"q": [4, 8, 12], "k": [4], "v": [3, 4, 7]} if per_head else {}
    names = [name for name in SHAPES if name.startswith("layers.0") and "norm" not in name]
    w = {name: _values(name, 0).double().numpy() for name in names}
    m = {name: np.zeros(SHAPES[name]) for name in names}
    for step, lr in enumerate([0.02, 0.01, 0.03], start=1):
        _set_gradients(params, step)
        optimizer.step(lr)
        for name in names:
            g = _values(name, step).double().numpy()
            m[name] = 0.95 * m[name] + 0.05 * g
            matrices = np.split(0.05 * g + 0.95 * m[name], starts.get(name.split(".")[-2], []))
            update = np.concatenate([math.sqrt(max(x.shape)) * _polynomial_of_singular_values(x) for x in matrices])
            w[name] = (1 - lr * DECAY) * w[name] - lr * 0.2 * update
            m[name] = torch.from_numpy(m[name]).to(STORED[moments]).double().numpy()
    for name, master in _pieces(optimizer, params, "master").items():
        if name in names:
            np.testing.assert_allclose(master.double().numpy(), w[name], rtol=2e-5, atol=2e-6, err_msg=name)


def test_a_step_that_the_device_skips_changes_nothing() -> None:
    params = _params(torch.bfloat16)
    optimizer = _optimizer([FlatShard(p, 0, p.numel()) for p in params.values()], Muon())
    keys = ("master", "momentum_buffer")
    for step, skip in enumerate([False, True, False], start=1):
        before = [x.clone() for key in keys for x in _pieces(optimizer, params, key).values()]
        _set_gradients(params, step)
        if skip:
            for param in params.values():
                main_grad_of(param).fill_(math.nan)
        optimizer.step(0.02, skip=torch.tensor(skip))
        after = [x for key in keys for x in _pieces(optimizer, params, key).values()]
        assert all(torch.equal(*pair) == skip for pair in zip(before, after, strict=True))


# --- matrices in parts -----------------------------------------------------------------------------------------------


def _cut(layout: str, tensor: int) -> Any:
    """Gives a rank's shards of a tensor. In `expert`, attention is on tensor-parallel rank 0 only, the MLP on 1."""

    def cut(name: str, shape: tuple[int, ...]) -> tuple[ParamShard, ...]:
        if layout == "tensor" and len(shape) == 2:
            return (shard_dim(name, shape, int(name in ROWS), tensor, 2),)
        if layout == "expert" and name.startswith("layers.0") and ("attention" in name) != (tensor == 0):
            return ()
        return whole(name, shape)

    return cut


def _flat_shards(params: dict[str, nn.Parameter], data: int) -> list[FlatShard]:
    """Odd parts of parameters on two data-parallel ranks, one of which has nothing of some."""
    found = []
    for i, param in enumerate(params.values()):
        end = [param.numel() * 3 // 7, 0, param.numel(), 5][i % 4]
        shard = FlatShard(param, 0, end) if data == 0 else FlatShard(param, end, param.numel())
        found += [shard] if len(shard) else []
    return found


def _train_in_parts(
    layout: str, sharded: bool, muon: Muon, batch: int
) -> list[tuple[str, tuple[int, ...], Tensor, Tensor]]:
    """On one of 2 × 2 ranks: what it holds after three steps, with the indices in the whole tensors."""
    matrix_optimizer.BATCH = batch
    rank = dist.get_rank()
    data, tensor = divmod(rank, 2)
    params = _params(torch.bfloat16, _cut(layout, tensor))
    shards = _flat_shards(params, data) if sharded else [FlatShard(p, 0, p.numel()) for p in params.values()]
    optimizer = _optimizer(shards, muon, matrix_group=dist.group.WORLD)
    for step in range(1, 4):
        _set_gradients(params, step)
        optimizer.step(0.02)
    found = []
    for shard in shards:
        state = state_of(optimizer, shard.param)
        index = [
            _part(piece, torch.arange(math.prod(piece.global_shape)).view(piece.global_shape)).flatten()
            for piece in shard.param.spec.shards  # type: ignore[attr-defined]
        ]
        owner = torch.cat([torch.full_like(own, i) for i, own in enumerate(index)])[shard.start : shard.end]
        flat = torch.cat(index)[shard.start : shard.end]
        for i, piece in enumerate(shard.param.spec.shards):  # type: ignore[attr-defined]
            for key in ("master", "momentum_buffer"):
                if key in state:
                    found.append((f"{key} {piece.name}", piece.global_shape, flat[owner == i], state[key][owner == i]))
    return found


@pytest.mark.parametrize(
    ("layout", "sharded", "per_head"),
    slow_but(
        itertools.product(["", "tensor", "expert"], [False, True], [False, True]),
        ("", True, True), ("tensor", False, True), ("expert", True, False),
    ),
)  # fmt: skip
def test_parts_are_updated_as_the_whole(world4: World, layout: str, sharded: bool, per_head: bool) -> None:
    """Bit for bit: the same matrix is orthogonalized, wherever its parts are."""
    params, muon = _params(torch.bfloat16), Muon(per_head=per_head)
    optimizer = _optimizer([FlatShard(p, 0, p.numel()) for p in params.values()], muon)
    for step in range(1, 4):
        _set_gradients(params, step)
        optimizer.step(0.02)
    expected = {
        f"{key} {name}": x
        for key in ("master", "momentum_buffer")
        for name, x in _pieces(optimizer, params, key).items()
    }
    seen = {name: torch.zeros(x.numel(), dtype=torch.bool) for name, x in expected.items()}
    batch = 400 if sharded else matrix_optimizer.BATCH  # some matrices are larger, some are two in a batch
    for rank, found in enumerate(world4.run(_train_in_parts, layout, sharded, muon, batch)):
        for name, _, index, values in found:
            assert torch.equal(values, expected[name].flatten()[index]), f"{name} on rank {rank}"
            seen[name][index] = True
    assert all(mask.all() for mask in seen.values())


def test_owners_hold_parts_and_have_equal_work() -> None:
    rows = [[(MatrixPart(f"m{i}", (r * 4, 0), (4, 8)), (16, 8)) for i in range(8)] for r in range(4)]
    matrices = assign_owners(rows, math.prod)
    assert [sum(m.owner == rank for m in matrices) for rank in range(4)] == [2, 2, 2, 2]
    assert all(m.sender(part) == ranks[0] for m in matrices for part, ranks in m.holders.items())
    of_one = assign_owners(
        [[], [(MatrixPart("m", (0, 0), (2, 2)), (2, 2))], [(MatrixPart("m", (0, 0), (2, 2)), (2, 2))]], math.prod
    )
    assert of_one[0].owner == of_one[0].sender(MatrixPart("m", (0, 0), (2, 2))) == 1
    assert [[m.name for m in batch] for batch in batches(matrices, 4, 128)] == [
        ["m0", "m1", "m2", "m3"],
        ["m4", "m5", "m6", "m7"],
    ]
    assert len(batches(matrices, 4, 256)) == 1
    assert len(batches(matrices, 4, 1)) == 2  # one matrix at least


def test_parts_that_leave_a_hole_are_an_error() -> None:
    with pytest.raises(AssertionError, match="m: parts do not add up"):
        assign_owners([[(MatrixPart("m", (0, 0), (2, 4)), (4, 4))]], math.prod)


def test_the_matrices_of_a_stack_are_separate() -> None:
    """Bit for bit as three parameters, also if one rank holds the stack in two parts that cut a matrix."""
    values = [torch.randn(3, 6, 4, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]

    def trained(shapes: dict[str, tuple[int, ...]], cuts: list[int]) -> Tensor:
        params = [
            set_spec(
                nn.Parameter(x.view(shape).clone()),
                ParamSpec(whole(name, shape), Init("zeros"), replicated_over_tp=False, matrix=True),
            )
            for (name, shape), x in zip(shapes.items(), values[0].chunk(len(shapes)), strict=True)
        ]
        assert all(is_hidden_matrix(param.spec) for param in params)  # type: ignore[arg-type]
        shards = [FlatShard(p, a, b) for p in params for a, b in itertools.pairwise([0, *cuts, p.numel()])]
        for param in params:
            param.main_grad = torch.zeros(param.shape)  # type: ignore[attr-defined]
        optimizer = _optimizer(shards, Muon())
        for gradient in values[1:]:
            for param, x in zip(params, gradient.chunk(len(params)), strict=True):
                main_grad_of(param).copy_(x.view(param.shape))
            optimizer.step(0.02)
        return torch.cat([param.detach().flatten() for param in params])

    separate = trained({f"layers.0.{i}.weight": (6, 4) for i in range(3)}, [])
    assert not torch.equal(separate, values[0].flatten())
    for cuts in ([], [31]):
        assert torch.equal(trained({"layers.0.stack.weight": (3, 6, 4)}, cuts), separate)
