"""Samples and tokens that a run has read up to a step, and the changes of its config until then."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from megafp8.config import Config, stage_at


@dataclass(frozen=True)
class History:
    """History of a run up to `step`. The present config holds from this step on.

    All batches after `step` have the same size, so the numbers at a later step can be computed; skipped steps count.

    Attributes:
        step: Step from which the present config holds.
        samples: Position in the data at `step`. After it, samples are counted as if none were left out because of loss
            spikes; `resilience.spikes.LossSpikes.position_of` and `consumed` convert these counts to positions.
        tokens: Number of tokens read until `step`, without the tokens of samples left out.
        changes: Changes of the config, one for each resumption with a different config: its `step`, the `stage` that
            began or None, `consumed_samples`, and the changed `keys` (`changed_keys`).
    """

    step: int = 0
    samples: int = 0
    tokens: int = 0
    changes: tuple[Mapping[str, Any], ...] = ()

    @classmethod
    def resumed(cls, saved: Mapping[str, Any], config: Config) -> History:
        """Return the history of a run that continues with `config` from the checkpoint with metadata `saved`."""
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
        """Return the number of samples that the run has read after `step` steps."""
        return self.samples + (step - self.step) * config.training.global_batch_size

    def after(self, step: int, samples: int, config: Config, trained: int | None = None) -> History:
        """Return the history after `step`, the next step, which read the given number of `samples`.

        `trained` is the number of samples in the passes, if it differs from `samples`.
        """
        tokens = self.tokens_at(step - 1, config) + (trained or samples) * config.training.seq_length
        return History(step, self.samples_at(step - 1, config) + samples, tokens, self.changes)

    def tokens_at(self, step: int, config: Config) -> int:
        """Return the number of tokens that the run has read after `step` steps."""
        t = config.training
        return self.tokens + (step - self.step) * t.global_batch_size * t.seq_length


def changed_keys(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the differences of two configs, such as `parallel.tensor 1 -> 2`. A missing key is shown as `unset`."""
    old, new = dict(leaves(then)), dict(leaves(now))
    keys = [key for key in {**old, **new} if (key in old, old.get(key)) != (key in new, new.get(key))]
    return [f"{key} {old.get(key, 'unset')} -> {new.get(key, 'unset')}" for key in keys]


def leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of a config with their dotted keys."""
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value
