"""What a run has consumed up to a step, and how its config changed on the way."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from megafp8.config import Config, stage_at


@dataclass(frozen=True)
class History:
    """A run up to `step`, from which its present config holds: samples and tokens that it read before, and changes.

    From `step` on batches have one size, so what was read by a later step follows from that; skipped steps count.
    `samples` is a position in the data. From there samples are counted as if none were left out because of loss spikes
    (`resilience.spikes.LossSpikes.position_of` and `consumed` give positions); `tokens` are without those left out.
    `changes`: for each resumption with another config its `step`, the `stage` that began, if any, `consumed_samples`,
    and `keys`, as `changed_keys` describes them.
    """

    step: int = 0
    samples: int = 0
    tokens: int = 0
    changes: tuple[Mapping[str, Any], ...] = ()

    @classmethod
    def resumed(cls, saved: Mapping[str, Any], config: Config) -> History:
        """The history of a run that goes on with `config` from the checkpoint with metadata `saved`."""
        step, samples, before = saved["step"], saved["consumed_samples"], saved["config"]
        changes, keys = saved.get("changes", ()), changed_keys(before, config.model_dump(mode="json"))
        stage = stage_at(config, step)
        name = None if stage is None else stage.name
        if keys or name != saved.get("stage"):
            changes = (*changes, {"step": step, "stage": name, "consumed_samples": samples, "keys": keys})
        tokens = saved.get("tokens")
        if tokens is None:
            tokens = samples * before["training"]["seq_length"]
        return cls(step, samples, tokens, tuple(changes))

    def samples_at(self, step: int, config: Config) -> int:
        """Samples that the run has read after `step` steps."""
        return self.samples + (step - self.step) * config.training.global_batch_size

    def after(self, step: int, samples: int, config: Config, trained: int | None = None) -> History:
        """The history up to `step`, the next one that is done, in which so many `samples` were read.

        `trained`: samples that the passes had, where they are others.
        """
        tokens = self.tokens_at(step - 1, config) + (trained or samples) * config.training.seq_length
        return History(step, self.samples_at(step - 1, config) + samples, tokens, self.changes)

    def tokens_at(self, step: int, config: Config) -> int:
        """Tokens that the run has read after `step` steps."""
        t = config.training
        return self.tokens + (step - self.step) * t.global_batch_size * t.seq_length


def changed_keys(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The differences of two configs, as `parallel.tensor 1 -> 2`. A key that one of them lacks is `unset` there."""
    old, new = dict(leaves(then)), dict(leaves(now))
    keys = [key for key in {**old, **new} if (key in old, old.get(key)) != (key in new, new.get(key))]
    return [f"{key} {old.get(key, 'unset')} -> {new.get(key, 'unset')}" for key in keys]


def leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The values of a config by dotted key."""
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value
