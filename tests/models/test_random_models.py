"""The trial of random models: what it draws, and that it names what it drew."""

from __future__ import annotations

import random

from megafp8.config.parts import PARTS
from tests.models.random_models import draw, draws, kinds_of, ranks_of


def test_draws_are_those_of_the_seed() -> None:
    found = draws(3, 6, largest=2)
    assert found == draws(3, 6, largest=2)
    assert max(map(ranks_of, found)) <= 2
    assert all(f"tp {d['tp']}" in kinds_of(d) for d in found)


def test_every_kind_of_part_is_drawn() -> None:
    """A new kind belongs into `draw`. Latent attention stands in a section of its own."""
    generator = random.Random(0)
    texts = [str(draw(generator)) for _ in range(300)]
    kinds = {part.model_fields["kind"].default for part in PARTS} - {"attention", "mlp"}
    in_sections = {"sparse_latent_attention": "sparse_attention"}
    missing = [kind for kind in kinds if not any(f"'{in_sections.get(kind, kind)}'" in text for text in texts)]
    assert not missing
