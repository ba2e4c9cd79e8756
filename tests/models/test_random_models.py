"""The trial of random models: what it draws, and that it names what it drew."""

from __future__ import annotations

from tests.models.random_models import draws, kinds_of, ranks_of


def test_draws_are_those_of_the_seed() -> None:
    found = draws(3, 2, largest=2)
    assert found == draws(3, 2, largest=2)
    assert max(map(ranks_of, found)) <= 2
    assert all(f"tp {d['tp']}" in kinds_of(d) for d in found)
