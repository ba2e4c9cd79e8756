"""Metrics of a run for Prometheus: rank 0 serves the latest metrics over HTTP as OpenMetrics text.

Values and names are the same as in metrics.jsonl, with the prefix `megafp8_train_`. Parts of a name after a slash
become labels, and memory is in bytes. A metric that not every step has, such as a validation loss, keeps its last
value. A separate thread answers each request from the metrics of the last step, so training only has to store them.

Failures of the server, such as a port in use, only log a warning, and training continues.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NamedTuple

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.openmetrics.exposition import CONTENT_TYPE_LATEST, generate_latest

from megafp8.fp8.health import Fp8Record
from megafp8.training.goodput import Goodput, GoodputMeter, read_lines
from megafp8.training.metrics import scalars
from megafp8.training.observer import Observer, StepMetrics
from megafp8.training.run_log import LAUNCHES_FILE

logger = logging.getLogger(__name__)

PREFIX = "megafp8_train_"

HELP: Mapping[str, str] = {
    "step": "Optimizer steps done",
    "loss": "Mean loss of the tokens of the last step, nats",
    "grad_norm": "2-norm of the gradient before clipping",
    "learning_rate": "Learning rate of the last step",
    "tokens": "Tokens trained on since the beginning of the run",
    "tokens_per_second_per_gpu": "Tokens per second per GPU (per process on CPU) in the last step",
    "loss_tokens_per_second_per_gpu": "Tokens in the loss per second per GPU in the last step, if not all are",
    "tflops_per_gpu": "Model TFLOP/s per GPU (per process on CPU) in the last step",
    "mfu": "Model FLOPs utilization of the last step, from 0 to 1",
    "memory_bytes": "Peak memory of rank 0: allocated on the GPU, or resident on the host",
    "step_seconds": "Duration of the last step",
    "skipped": "1 if the last step was skipped",
    "consumed_samples": "Samples read since the beginning of the run",
    "data_seconds": "Time spent waiting for data in the last step",
    "evaluation_seconds": "Duration of the evaluation after the last step",
    "save_seconds": "Time for which checkpoints stalled training before the last step",
    "skipped_in_a_row": "Consecutive skipped steps up to the last step",
    "loss_scale": "Loss scale of fp16",
    "validation_loss": "Loss of the last validation, nats",
    "mtp_loss": "Loss of multi-token prediction, nats",
    "binary_loss": "Loss of the binary head, nats",
    "z_loss": "z-loss of the output layer, scaled as in the gradient",
    "index_loss": "Loss of the indexers of sparse attention, scaled as in the gradient",
    "max_attention_logit": "Largest attention logit of all heads, with QK-clip",
    "router_aux_loss": "Auxiliary loss of routers",
    "router_z_loss": "z-loss of routers",
    "expert_imbalance": "Tokens of the fullest expert over the mean of its layer, in the worst layer",
    "router_entropy": "Entropy of the routers' mean scores, 1 if all experts have equal scores",
    "expert_drop_rate": "Share of choices dropped because an expert was full",
    "loss_limit": "Limit above which a loss is a spike",
    "slowest_rank": "Slowest rank in the last comparison",
    "slowest_ratio": "Step time of the slowest rank over the median of its stage",
    "weight_norm": "2-norm of all weights, when last measured",
    "update_norm": "2-norm of an update of all weights, when last measured",
    "layer_grad_norm": "2-norm of a layer's gradient before clipping, when last measured",
    "layer_weight_norm": "2-norm of a layer's weights, when last measured",
    "layer_update_norm": "2-norm of an update of a layer's weights, when last measured",
    "goodput_ratio": "Share of the wall time since the first launch in steps that count, without waiting for data",
    "wall_seconds": "Wall time from the first launch to the last step, by use",
    "last_step_timestamp_seconds": "Time at which the last step ended",
    "section_seconds": "Time in a section of the training loop since the previous step",
    "valid_loss": "Loss of a data set in its last validation, nats",
    "objective": "Metric of the objective's own loss in the last step (DPO, distillation, GRPO)",
    "eval": "Metric of a task in its last evaluation",
    "fp8_min_snr_db": "Signal-to-noise ratio of the cast to FP8 in the worst layer, when last sampled",
    "fp8_max_underflow": "Largest share of elements of a tensor that became zero in FP8, when last sampled",
    "fp8_max_saturated": "Largest share of elements of a tensor that were clamped in FP8, when last sampled",
}
"""Descriptions of the metrics by name, without the prefix."""


_UNITS = ("seconds", "bytes", "ratio")


class _Server(ThreadingHTTPServer):
    """Server with a thread for each request. The threads do not keep the process alive."""

    daemon_threads = True
    block_on_close = False


def _handler(registry: CollectorRegistry) -> type[BaseHTTPRequestHandler]:
    """Return a request handler that answers GET /metrics."""

    class Handler(BaseHTTPRequestHandler):
        timeout = 10.0  # seconds after which a client that sends nothing is dropped

        def do_GET(self) -> None:
            if self.path.partition("?")[0] != "/metrics":
                self.send_error(404, "only /metrics exists")
                return
            content = generate_latest(registry)
            self.send_response(200)
            self.send_header("Content-Type", CONTENT_TYPE_LATEST)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:
            pass

    return Handler


class Sample(NamedTuple):
    """Value of a metric family, with its labels. `name` is without the prefix."""

    name: str
    labels: tuple[tuple[str, str], ...]
    value: float


def sample_of(key: str, value: float) -> Sample | None:
    """Return a metric as a sample, or None for FP8 metrics of single layers, because there are too many."""
    parts = key.split("/")
    if len(parts) == 1:
        return Sample("memory_bytes", (), value * 2**30) if key == "memory_gib" else Sample(key, (), value)
    first, rest = parts[0], "/".join(parts[1:])
    if first == "valid":
        return Sample("valid_loss", (("data", rest),), value)
    if first == "eval":
        task, _, metric = rest.rpartition("/")
        return Sample("eval", (("task", task), ("metric", metric)), value)
    if first == "objective":
        return Sample("objective", (("metric", rest),), value)
    if first == "seconds":
        return Sample("section_seconds", (("section", rest),), value)
    if first == "fp8":
        return Sample(f"fp8_{parts[2]}", (("operand", parts[1]),), value) if len(parts) == 3 else None
    return Sample(f"layer_{first}", (("layer", rest),), value)


class OpenMetricsWriter(Observer):
    """Observer that serves the metrics of a run at /metrics, on all network interfaces.

    Args:
        name: Name of the run.
        folder: Run folder.
        port: Port to serve on; 0 means any free port.

    Attributes:
        port: Port in use; None if the server could not start.
    """

    def __init__(self, name: str, folder: Path, port: int) -> None:
        self._name = name
        self._latest: tuple[dict[str, float], Goodput] | None = None
        self._meter = GoodputMeter(read_lines(folder / LAUNCHES_FILE, "time", "step"))
        for record in read_lines(folder / "metrics.jsonl", "step", "loss", "time", "step_seconds"):
            self._meter.add(record)
        registry = CollectorRegistry()
        registry.register(self)
        ProcessCollector(registry=registry)
        self._server: ThreadingHTTPServer | None = None
        self.port: int | None = None
        try:
            self._server = _Server(("", port), _handler(registry))
        except OSError as error:
            logger.warning(f"logging.metrics_port = {port}: {error.strerror}; training continues without this server")
            return
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.1,), name="metrics", daemon=True)
        self._thread.start()
        logger.info(f"metrics: http://localhost:{self.port}/metrics")

    def write(self, metrics: StepMetrics, records: Sequence[Fp8Record] = ()) -> None:
        """Store the metrics of a step for later requests."""
        self._meter.add(metrics.as_dict())
        values = {f"objective/{k}" if k in metrics.objective else k: v for k, v in scalars(metrics, records).items()}
        values["step"] = metrics.step
        values["last_step_timestamp_seconds"] = datetime.fromisoformat(metrics.time).timestamp()
        before = {} if self._latest is None else self._latest[0]
        self._latest = before | values, self._meter.result()  # a new object: a thread may be reading the previous one

    def describe(self) -> Iterable[Metric]:
        """Return nothing, because the run determines which metrics exist."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """Return the metric families of the latest step."""
        families: dict[str, GaugeMetricFamily] = {}
        samples: list[Sample | None] = []
        if self._latest is not None:
            values, goodput = self._latest
            samples += [sample_of(key, value) for key, value in values.items()]
            samples.append(Sample("goodput_ratio", (), goodput.fraction))
            samples += [Sample("wall_seconds", (("part", part),), value) for part, value in goodput.seconds.items()]
        for sample in filter(None, samples):
            if sample.name not in families:
                labels = [label for label, _ in sample.labels]
                unit = next((unit for unit in _UNITS if sample.name.endswith(unit)), "")
                family = GaugeMetricFamily(PREFIX + sample.name, HELP[sample.name], labels=labels, unit=unit)
                families[sample.name] = family
            families[sample.name].add_metric([value for _, value in sample.labels], sample.value)
        return [InfoMetricFamily(PREFIX + "run", "The run", {"name": self._name}), *families.values()]

    def close(self) -> None:
        """Stop the server."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()
