"""A rank's host code costs the same among eight ranks and among a thousand: by counts and memory, not by clocks."""

from __future__ import annotations

import sys

import pytest

from benchmarks.bench_scale import costs, main


@pytest.mark.slow
def test_a_rank_does_not_notice_the_size_of_the_world() -> None:
    small, large = costs([8, 1024], steps=1)
    # With more ranks each owns fewer parameters of the optimizer's, so that calls become fewer.
    assert 0.95 * small.calls_of_a_step < large.calls_of_a_step <= small.calls_of_a_step
    assert large.calls_of_start_up <= 1.02 * small.calls_of_start_up
    assert large.groups_built == small.groups_built <= 12
    assert large.rss_mib < small.rss_mib + 8


def test_a_world_that_does_not_fit(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["bench_scale", "--worlds", "6"])
    with pytest.raises(SystemExit):
        main()
    assert "--worlds: 6 is not a multiple of tensor 2 × pipeline 2 = 4 ranks" in capsys.readouterr().err
