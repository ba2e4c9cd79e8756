"""bench_overlap on two CPU ranks, its check of results, and its table."""

from __future__ import annotations

import contextlib
import io

import pytest
import torch

from benchmarks.bench_overlap import BLOCKS, MODES, Result, compare, main, table
from megafp8.distributed.collectives import DONE
from megafp8.distributed.tp_overlap import Collective, Product, ReduceHandle
from tests.distributed.chunks import InChunks
from tests.world import World


def _bench(mode: str) -> tuple[int, str]:
    options = ["--device", "cpu", "--shapes", "tiny", "--rounds", "1", "--modes", f"silent,none,{mode}"]
    with contextlib.redirect_stdout(io.StringIO()) as out:
        code = main(options)
    return code, out.getvalue()


def _in_chunks() -> tuple[int, str]:
    MODES["chunks"] = InChunks
    return _bench("chunks")


@pytest.mark.slow
def test_on_two_ranks(world2: World) -> None:
    (code, text), (other_code, nothing) = world2.run(_in_chunks)
    assert (code, other_code, nothing) == (0, 0, "")
    assert text.count("fastest: ") == 2
    assert "tiny, fp8 delayed, tensor 2" in text
    rows = [line.split() for line in text.splitlines() if line.startswith("chunks")]
    assert len(rows) == 2
    for _, forward, backward, both, *_ in rows:
        assert float(both) > max(float(forward), float(backward)) > 0


def test_wrong_results_are_told_from_rounding() -> None:
    x = torch.linspace(1, 2, 64)
    assert compare([x], [x], [x], [0.0]) == "same bits"
    assert compare([x * 1.001], [x * 1.001], [x], [0.002]) == "y 1.0e-03 of 2.0e-03"
    assert compare([x], [x * 1.001], [x], [1.0]) == "WRONG: two runs differ"
    assert compare([x * 1.1], [x * 1.1], [x], [0.02]) == "WRONG: y 1.0e-01 of 2.0e-02"
    nan = torch.full((64,), torch.nan)
    assert compare([nan], [nan], [x], [1.0]).startswith("WRONG")


class _Forgetful(Collective):
    """Doubles this rank's part of the sum instead of adding the others'."""

    def sum(self, product: Product) -> ReduceHandle:
        y_mn = product.compute()
        return ReduceHandle(DONE, lambda: y_mn[: y_mn.shape[0] // self.group.size()] * 2)


def _wrong() -> tuple[int, str]:
    MODES["forgetful"] = lambda group, _: _Forgetful(group)
    return _bench("forgetful")


@pytest.mark.slow
def test_a_wrong_mode_is_found(world2: World) -> None:
    for recipe in world2.run(_wrong)[0][1].split("fastest")[:2]:
        assert "WRONG: y" in recipe


def test_the_table() -> None:
    n = BLOCKS
    results = [
        Result("silent", "", [1.0 * n], [2.0 * n]),
        Result("none", "same bits", [1.5 * n, 1.5 * n, 9.0 * n], [2.5 * n] * 3),
        Result("chunks", "WRONG: y 1.0e-01", [1.0 * n], [2.1 * n]),
        Result("symmetric", "y 1.0e-03", [1.1 * n], [2.15 * n]),
        Result("other", "failed: no"),
    ]
    lines = [line.split() for line in table(results)]
    assert lines[1] == ["silent", "1.000", "2.000", "3.000", "-", "-"]
    assert lines[2] == ["none", "1.500", "2.500", "4.000", "1.000", "0%", "same", "bits"]
    assert lines[4] == ["symmetric", "1.100", "2.150", "3.250", "0.250", "75%", "y", "1.0e-03"]
    assert lines[5] == ["other", "failed:", "no"]
    assert lines[6] == ["fastest:", "symmetric,", "1.231", "times", "as", "fast", "as", "none"]
