"""Placements of stages."""

from __future__ import annotations

import pytest

from megafp8.parallel.pipeline.actions import Kind, loop_placement, v_placement


def test_placements() -> None:
    loop, v = loop_placement(3, 2), v_placement(3)
    assert loop.stages == ((0, 3), (1, 4), (2, 5))
    assert v.stages == ((0, 5), (1, 4), (2, 3))
    assert v.homes == ((0, 0), (1, 0), (2, 0), (2, 1), (1, 1), (0, 1))
    assert loop.peer(Kind.SEND_FORWARD, 2, 0) == 0
    assert loop.peer(Kind.SEND_FORWARD, 2, 1) is None
    assert v.neighbour(Kind.SEND_FORWARD, 2, 0) == (2, 1)
    assert v.peer(Kind.SEND_FORWARD, 2, 0) is None
    assert v.peer(Kind.SEND_BACKWARD, 1, 1) == 2


@pytest.mark.parametrize("make", [loop_placement, v_placement])
def test_no_ranks_are_refused(make: type) -> None:
    with pytest.raises(ValueError, match="num_ranks is 0"):
        make(0)
