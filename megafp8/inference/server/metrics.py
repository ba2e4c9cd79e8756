"""Metrics of the server: counters and times, as OpenMetrics text."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.openmetrics.exposition import CONTENT_TYPE_LATEST, generate_latest

from megafp8.inference.generator import Load

_FIRST = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_BETWEEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


def _field(load: Callable[[], Load], name: str) -> float:
    return float(getattr(load(), name))


class Metrics:
    """Metrics of one server, in a separate registry.

    `load` and `weight_version` are functions that return the current values of the generator.
    """

    content_type = CONTENT_TYPE_LATEST

    def __init__(self, load: Callable[[], Load], weight_version: Callable[[], int]) -> None:
        self._registry = registry = CollectorRegistry()
        self.requests = Counter(
            "megafp8_requests",
            "Requests that have ended, by path and HTTP status; 499: the client closed the connection",
            ["path", "status"],
            registry=registry,
        )
        self.prompt_tokens = Counter("megafp8_prompt_tokens", "Tokens of accepted prompts", registry=registry)
        self.generated_tokens = Counter("megafp8_generated_tokens", "Tokens of outputs", registry=registry)
        self.first_token = Histogram(
            "megafp8_time_to_first_token_seconds",
            "Time from the arrival of a request to the first token of any of its texts",
            buckets=_FIRST,
            registry=registry,
        )
        self.between_tokens = Histogram(
            "megafp8_time_between_tokens_seconds",
            "Time between two tokens of a text",
            buckets=_BETWEEN,
            registry=registry,
        )
        for name, text in {
            "running": "Texts in the running batch",
            "waiting": "Texts that wait for a place in the batch or for pages",
            "pages_used": "Used pages of the cache",
            "pages_free": "Free pages of the cache",
        }.items():
            gauge = Gauge(f"megafp8_{name}", text, registry=registry)
            gauge.set_function(partial(_field, load, name))
        version = Gauge("megafp8_weight_version", "Version of the weights", registry=registry)
        version.set_function(weight_version)
        ProcessCollector(registry=registry)

    def text(self) -> bytes:
        """Return all metrics as OpenMetrics text."""
        return generate_latest(self._registry)
