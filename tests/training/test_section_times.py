"""Times by section: by the host's clock, and those of a device whose events pass late."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from megafp8.parallel import activity
from megafp8.training.section_times import SectionTimer


def test_sections_add_up_to_the_time() -> None:
    timer = SectionTimer(torch.device("cpu"))
    with activity.recorded(), timer:
        begin = time.perf_counter()
        for section, seconds in (("data", 0.02), ("update", 0.05), ("data", 0.01), ("save", 0.0)):
            activity.enter(section)
            time.sleep(seconds)
        end = time.perf_counter()
    found = timer.take()
    assert set(found) == {"data", "update"}  # the last one has not ended
    assert 0.03 <= found["data"] < 0.05 <= found["update"]
    assert sum(found.values()) == pytest.approx(end - begin, abs=0.02)
    assert timer.take() == {}


class Event:
    """An event of a device on which it is `now`; it is recorded when the host is at `host`, and passes then."""

    now = host = 0.0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at = Event.host

    def query(self) -> bool:
        return self.at <= Event.now

    def elapsed_time(self, end: Event) -> float:
        return 1000 * (end.at - self.at)


def test_events_are_read_when_they_have_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    timer = SectionTimer(torch.device("cuda"))
    taken: list[Any] = []
    for Event.host, Event.now, section in (
        (0, 0, "data"),
        (1, 0, "passes"),
        (5, 2, "update"),
        (6, 5, "data"),
        (8, 9, "passes"),
    ):
        timer.enter(section)
        taken.append(timer.take())
    assert taken == [{}, {}, {"data": 1.0}, {"passes": 4.0}, {"update": 1.0, "data": 2.0}]
