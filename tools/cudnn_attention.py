"""cuDNN's FP8 attention, by the graph API of `nvidia-cudnn-frontend`.

On Hopper, with cuDNN 9.19, the head width must be 128 for the backward pass, and what comes out is FP8 too: the output,
dq, dk and dv. So factors are needed before the numbers they belong to exist, those and the one of the scores' gradient:
delayed scaling, from amaxes that the kernels note. Here a first run with factors of one finds the amaxes, and the runs
that count use factors made of them, as if history were perfect.

With fewer key-value heads than query heads the backward pass makes dk and dv for each query head in its workspace and
sums them: 385 MiB at 8192 tokens and 32 heads of 128, where one head for each takes 129.

Shapes: s sequence, b batch, a query heads, g key-value heads, d head width; x heads of either kind. cuDNN takes
dimensions in the order b, x, s, d, with any strides.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megafp8.fp8.formats import E4M3, Format
from tools.plain_attention import Coded, Problem, coded

_GRADIENTS = {"dQ": "dq", "dK": "dk", "dV": "dv", "dP": "dp"}  # cuDNN's names and ours, in the order of its amaxes


class Cudnn:
    """The front end and a handle on torch's current stream."""

    def __init__(self) -> None:
        import cudnn

        self.api: Any = cudnn
        self.handle: int = cudnn.create_handle()
        cudnn.set_stream(handle=self.handle, stream=torch.cuda.current_stream().cuda_stream)

    def graph(self, io: Any) -> Any:
        """A graph that computes in fp32; `io`: the data type of what has none of its own."""
        wide = self.api.data_type.FLOAT
        return self.api.pygraph(
            io_data_type=io, intermediate_data_type=wide, compute_data_type=wide, handle=self.handle
        )


class Graph:
    """A cuDNN graph of one operation and the tensors bound to it, by the numbers that cuDNN knows them by."""

    def __init__(self, cudnn: Cudnn) -> None:
        self.cudnn = cudnn
        types = cudnn.api.data_type
        self.types = {
            torch.float32: types.FLOAT,
            torch.bfloat16: types.BFLOAT16,
            torch.float8_e4m3fn: types.FP8_E4M3,
            torch.float8_e5m2: types.FP8_E5M2,
        }
        self.graph = cudnn.graph(types.FP8_E4M3)
        self.bound: dict[int, Tensor] = {}

    def _bind(self, x: Tensor) -> int:
        self.bound[len(self.bound) + 1] = x
        return len(self.bound)

    def input(self, x_bxsd: Tensor) -> Any:
        return self.graph.tensor(
            dim=list(x_bxsd.shape),
            stride=list(x_bxsd.stride()),
            data_type=self.types[x_bxsd.dtype],
            uid=self._bind(x_bxsd),
        )

    def scalar(self, x: Tensor) -> Any:
        return self.input(x.reshape(1, 1, 1, 1))

    def output(self, tensor: Any, x_bxsd: Tensor) -> None:
        tensor.set_uid(self._bind(x_bxsd)).set_output(True).set_data_type(self.types[x_bxsd.dtype])
        tensor.set_dim(list(x_bxsd.shape)).set_stride(list(x_bxsd.stride()))

    def build(self) -> str:
        """Choose the fastest of cuDNN's plans; gives back their names and times."""
        modes = self.cudnn.api.heur_mode
        self.graph.validate()
        self.graph.build_operation_graph()
        self.graph.create_execution_plans([modes.A, modes.FALLBACK])
        self.graph.check_support()
        found, words = {}, []
        for index in range(self.graph.get_execution_plan_count()):
            name = self.graph.get_plan_name_at_index(index)
            try:
                found[index] = self._milliseconds(index)
                words.append(f"{name} {found[index]:.2f} ms")
            except Exception as error:  # a plan that cannot be built or run is no choice
                words.append(f"{name} fails: {str(error)[:120]}")
        if not found:
            raise RuntimeError(f"no plan: {', '.join(words)}")
        self._use(min(found, key=lambda index: found[index]))
        return f"{', '.join(words)}; workspace {self.workspace.numel() / 2**20:.0f} MiB"

    def _use(self, index: int) -> None:
        self.index = index
        size = self.graph.get_workspace_size_plan_at_index(index)
        self.workspace = torch.empty(max(1, size), dtype=torch.uint8, device=self.bound[1].device)

    def _milliseconds(self, index: int) -> float:
        self.graph.build_plan_at_index(index)
        self._use(index)
        self.run()
        samples = []
        for _ in range(5):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            self.run()
            end.record()
            end.synchronize()
            samples.append(start.elapsed_time(end))
        return statistics.median(samples)

    def run(self) -> None:
        self.graph.execute_plan_at_index(self.bound, self.workspace, self.index, handle=self.cudnn.handle)


class Factors:
    """Factors by name, each `[1]`, fp32 and one until `settle`d; of what a kernel writes, with the amax it notes."""

    def __init__(self, formats: dict[str, Format], device: torch.device) -> None:
        self.formats = formats
        self.scale, self.descale = ({name: torch.ones(1, device=device) for name in formats} for _ in range(2))
        self.amax = {name: torch.zeros(1, device=device) for name in formats}

    def settle(self, run: Callable[[], object]) -> str:
        """Run until factors fit what is written; gives back the amaxes in words. Twice, then once more: dq and dk are
        made of the scores' gradient, which underflows before it has its own factor."""
        for _ in range(2):
            run()
            for name, amax in self.amax.items():
                if 0 < amax.item() < float("inf"):
                    self.scale[name].copy_(self.formats[name].max / amax)
                    self.descale[name].copy_(amax / self.formats[name].max)
        run()
        words = ", ".join(f"{name} {amax.item():.3g}" for name, amax in self.amax.items())
        if not all(0 < amax.item() < float("inf") for amax in self.amax.values()):
            raise RuntimeError(f"amax {words}")
        return f"amax {words}"


def _probability_factors(device: torch.device) -> tuple[Tensor, Tensor]:
    """Factor and its inverse of the probabilities, the largest of which is one."""
    scale = torch.full((1,), E4M3.max, device=device)
    return scale, scale.reciprocal()


def _bxsd(x_sbxd: Tensor) -> Tensor:
    return x_sbxd.permute(1, 2, 0, 3)


class CudnnForward:
    """q, k, v and the output in E4M3. `repeat`: keys and values are repeated for each query head, so that there are as
    many."""

    def __init__(self, problem: Problem, cudnn: Cudnn, repeat: bool = False) -> None:
        self.problem = problem
        device = problem.q_sbad.device
        times = problem.q_sbad.shape[2] // problem.k_sbgd.shape[2] if repeat else 1
        q, k, v = problem.q_sbad, *(x.repeat_interleave(times, dim=2) for x in (problem.k_sbgd, problem.v_sbgd))
        self.inputs = tuple(coded(x, E4M3) for x in (q, k, v))
        s, b, a, d = problem.q_sbad.shape
        self.o_sbad = torch.empty((s, b, a, d), dtype=E4M3.dtype, device=device)
        self.stats_bas1 = torch.empty((b, a, s, 1), device=device)
        self.p_scale, self.p_descale = _probability_factors(device)
        self.factors = Factors({"o": E4M3}, device)
        self.p_amax = torch.zeros(1, device=device)
        self.graph = self._graph(cudnn)
        plans = self.graph.build()
        self.note = f"{plans}; {self.factors.settle(self.run)}, p {self.p_amax.item():.3g}"

    def _graph(self, cudnn: Cudnn) -> Graph:
        graph, (q, k, v) = Graph(cudnn), self.inputs
        o, stats, amax_s, amax_o = graph.graph.sdpa_fp8(
            q=graph.input(_bxsd(q.codes)),
            k=graph.input(_bxsd(k.codes)),
            v=graph.input(_bxsd(v.codes)),
            descale_q=graph.scalar(q.descale),
            descale_k=graph.scalar(k.descale),
            descale_v=graph.scalar(v.descale),
            descale_s=graph.scalar(self.p_descale),
            scale_s=graph.scalar(self.p_scale),
            scale_o=graph.scalar(self.factors.scale["o"]),
            generate_stats=True,
            attn_scale=self.o_sbad.shape[-1] ** -0.5,
            use_causal_mask=True,
        )
        graph.output(o, _bxsd(self.o_sbad))
        graph.output(stats, self.stats_bas1)
        graph.output(amax_s, self.p_amax.reshape(1, 1, 1, 1))
        graph.output(amax_o, self.factors.amax["o"].reshape(1, 1, 1, 1))
        return graph

    @property
    def output(self) -> Coded:
        return Coded(self.o_sbad, self.factors.descale["o"])

    @property
    def stats(self) -> Tensor:
        return self.stats_bas1.squeeze(-1)

    def run(self) -> None:
        self.graph.run()


class CudnnBackward:
    """The output's gradient and that of the scores in `do`; dq, dk and dv in `grads`. `inputs`: q, k and v in E4M3;
    `output`, in any format, and `stats_bas` are what a forward pass left."""

    def __init__(
        self, problem: Problem, inputs: tuple[Coded, ...], output: Coded, stats_bas: Tensor, cudnn: Cudnn,
        do: Format, grads: Format,
    ) -> None:  # fmt: skip
        self.problem, self.inputs, self.output = problem, inputs, output
        device = problem.q_sbad.device
        self.stats_bas1 = stats_bas.contiguous().unsqueeze(-1)
        self.do = coded(problem.do_sbad, do)
        self.dq, self.dk, self.dv = (torch.empty(x.codes.shape, dtype=grads.dtype, device=device) for x in inputs)
        self.p_scale, self.p_descale = _probability_factors(device)
        self.factors = Factors({"dp": do, "dq": grads, "dk": grads, "dv": grads}, device)
        self.graph = self._graph(cudnn)
        plans = self.graph.build()
        self.note = f"{plans}; {self.factors.settle(self.run)}"

    def _graph(self, cudnn: Cudnn) -> Graph:
        graph, (q, k, v) = Graph(cudnn), self.inputs
        scales = {f"scale_{long}": graph.scalar(self.factors.scale[name]) for long, name in _GRADIENTS.items()}
        dq, dk, dv, *amaxes = graph.graph.sdpa_fp8_backward(
            q=graph.input(_bxsd(q.codes)),
            k=graph.input(_bxsd(k.codes)),
            v=graph.input(_bxsd(v.codes)),
            o=graph.input(_bxsd(self.output.codes)),
            dO=graph.input(_bxsd(self.do.codes)),
            stats=graph.input(self.stats_bas1),
            descale_q=graph.scalar(q.descale),
            descale_k=graph.scalar(k.descale),
            descale_v=graph.scalar(v.descale),
            descale_o=graph.scalar(self.output.descale),
            descale_dO=graph.scalar(self.do.descale),
            descale_s=graph.scalar(self.p_descale),
            descale_dP=graph.scalar(self.factors.descale["dp"]),
            scale_s=graph.scalar(self.p_scale),
            **scales,
            attn_scale=self.dq.shape[-1] ** -0.5,
            use_causal_mask=True,
        )
        for tensor, x_sbxd in ((dq, self.dq), (dk, self.dk), (dv, self.dv)):
            graph.output(tensor, _bxsd(x_sbxd))
        for tensor, name in zip(amaxes, _GRADIENTS.values()):
            graph.output(tensor, self.factors.amax[name].reshape(1, 1, 1, 1))
        return graph

    def run(self) -> None:
        self.graph.run()

    def gradients(self) -> dict[str, Tensor]:
        """Of repeated keys and values summed over their repetitions."""
        found = {"dq": Coded(self.dq, self.factors.descale["dq"]).values()}
        groups = self.problem.k_sbgd.shape[2]
        for name, x in (("dk", self.dk), ("dv", self.dv)):
            found[name] = Coded(x, self.factors.descale[name]).values().unflatten(2, (groups, -1)).sum(dim=3)
        return found
