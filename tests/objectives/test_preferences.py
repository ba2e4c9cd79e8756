"""The loss of pairs: the numbers of TRL, and what pads samples counts nowhere."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megafp8.batch import Batch
from megafp8.objectives.answers import Answers
from megafp8.objectives.preferences import PreferenceLoss, Preferences
from megafp8.parallel.parallel_state import initialize_model_parallel
from tests.world import World

TRL = [
    (-36.28446578979492, -73.81187438964844, 0.7754471302032471, 0.1937507688999176, 0.4440121352672577),
    (-75.40402221679688, -36.762718200683594, 0.23968735337257385, 0.763801634311676, 0.9891552925109863),
    (-36.043357849121094, -72.15294647216797, 0.08104705810546875, 0.060289766639471054, 0.6828224062919617),
    (-71.88815307617188, -34.331321716308594, -0.5513877868652344, 0.3876045346260071, 1.2690308094024658),
]
"""Of TRL 1.16.0's DPOTrainer with beta 0.3, one pair a step: log-probabilities of the chosen and the rejected answer,
both rewards, and the loss. `tests/training/test_preferences.py` runs it where it is installed."""
BETA = 0.3


def _batch(room: int = 0) -> tuple[Batch, torch.Tensor]:
    """A sample of all pairs, whose answers have two tokens, and losses of its tokens that are those of TRL."""
    length, objective = 63, Preferences(Answers(63))
    parts, losses = [], []
    for chosen, rejected, *_ in TRL:
        for log_p in (chosen, rejected):
            parts.append(np.array([[5, 6, 7, 8], [0, 0, 1, 1]]))
            losses += [100.0, -log_p * 0.25, -log_p * 0.75, 100.0]  # of a label: the next token
    batch = objective.batch(torch.from_numpy(objective.row(parts, 0))[None]).with_room(room)
    losses += [100.0] * (length - len(losses))
    return batch, torch.tensor(losses, dtype=torch.float64).unsqueeze(1)


def _loss_of_trl(label_smoothing: float, room: int) -> tuple[list[float], float]:
    loss = PreferenceLoss(BETA, label_smoothing, initialize_model_parallel())
    batch, losses_sb = _batch(room)
    reference = torch.zeros(1, batch.room, dtype=torch.float64)
    reference[0, :8] = torch.tensor([(c - rc / BETA, r - rr / BETA) for c, r, rc, rr, _ in TRL]).flatten()
    total, report = loss(losses_sb, Batch(**{**vars(batch), "reference": reference}))
    assert loss.count(batch) == 4
    assert float(total) == float(report[0])
    return report.tolist(), float(total)


@pytest.mark.parametrize("room", [0, 128])
def test_losses_and_rewards_are_those_of_trl(world2: World, room: int) -> None:
    report, _ = world2.run(_loss_of_trl, 0.0, room, ranks=1)[0]
    _, _, chosen, rejected, losses = (np.array(x) for x in zip(*TRL))
    expected = [losses.sum(), 4, chosen.sum(), rejected.sum(), (chosen - rejected).sum(), 2]
    np.testing.assert_allclose(report, expected, rtol=1e-5)


def test_smoothed_labels(world2: World) -> None:
    """Conservative DPO: the formula of TRL's options before 1.0."""
    _, loss = world2.run(_loss_of_trl, 0.2, 0, ranks=1)[0]
    margins = np.array([chosen - rejected for _, _, chosen, rejected, _ in TRL])
    by_hand = 0.8 * np.log1p(np.exp(-margins)) + 0.2 * np.log1p(np.exp(margins))
    assert loss == pytest.approx(by_hand.sum(), rel=1e-5)


def test_log_probabilities_of_the_data_are_those_of_its_documents() -> None:
    """The bits of float64 go through rows of integers."""
    values, objective = np.array([-1.25, 3e-300, -np.pi, 0.0]), Preferences(Answers(31))
    parts = [np.stack([np.array([1, 2, 3]), np.array([0, 1, 1]), np.full(3, bits)]) for bits in values.view(np.int64)]
    batch = objective.batch(torch.from_numpy(objective.row(parts, 0))[None])
    assert batch.reference is not None
    assert batch.reference.shape == (1, batch.room)
    assert batch.reference[0, :4].tolist() == values.tolist()
    assert not batch.reference[0, 4:].any()
