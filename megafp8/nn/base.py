"""What modules with weights have in common: parameters as Transformer Engine makes them, tensor-parallel groups, FP8.

*Parameters.* Several of them may be one weight (`parameters_split`): they are made as views of one tensor, and
`joined` puts them together again without a copy as long as they are.

*Tensor parallelism.* `tp_size` gives the shapes, `tp_group` or later `set_tensor_parallel_group` the ranks.

*FP8.* Each linear layer of a module is a `Gemm`, with the names of its parameters. Outside `fp8.autocast` it runs in
high precision. Within `fp8.model_init` its weight is constructed as an `Fp8Weight`.

Shapes: n outputs, k inputs of a weight.
"""

from __future__ import annotations

import io
import math
import tempfile
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed import ProcessGroup

from megafp8.checkpoint.torch_file import StoredTensor, TorchFile
from megafp8.fp8.autocast import in_torch_autocast_dtype
from megafp8.fp8.model_init import current_model_init
from megafp8.fp8.onnx import QdqLinear, exported
from megafp8.fp8.standalone import StandaloneLayers, StandaloneLinear
from megafp8.fp8.weight import Fp8Weight, Fp8WeightFormat, attributes_of, converting_modules
from megafp8.linear.autograd import once_differentiable
from megafp8.linear.deferred_wgrad import WgradPair, WgradStore
from megafp8.linear.fusion import LinearInput
from megafp8.linear.grad_sink import grad_sink, set_grad_sink
from megafp8.linear.linear import linear, with_bias
from megafp8.linear.quantized_gather import LOCAL_COMM, TPComm
from megafp8.linear.state import LinearState, QuantizedGradHandoff
from megafp8.nn.arguments import require
from megafp8.numerics.onnx_export import in_onnx_export
from megafp8.parallel.tp_overlap import default_overlap
from megafp8.plan import LinearSite

InitMethod = Callable[[Tensor], object]
RngTracker = Callable[[], Any]
"""Returns an object whose `fork(name)` is a context with random numbers of its own, as Megatron-LM's is."""

F = TypeVar("F", bound=Callable[..., Any])

PARALLEL_MODES = (None, "column", "row")
INIT_STD = 0.023
FP8_ALIGNMENT = 16  # of a weight's dims: rows of 16 bytes for each of the three GEMMs


def default_init(weight: Tensor) -> None:
    """Normal with mean 0 and standard deviation 0.023."""
    nn.init.normal_(weight, std=INIT_STD)


def default_device() -> torch.device:
    """The current GPU, or the CPU where there is none."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def forked(tracker: RngTracker | None, name: str | None = None) -> AbstractContextManager[Any]:
    """The context of a tracker's random numbers, if there is a tracker."""
    if tracker is None:
        return nullcontext()
    return tracker().fork() if name is None else tracker().fork(name)


def opaque(forward: F) -> F:
    """Decorator of a module's forward that torch.compile runs as it is, with a graph break on both sides."""
    uncompiled = torch._disable_dynamo(forward)

    @wraps(forward)
    def call(*args: Any, **options: Any) -> Any:
        return uncompiled(*args, **options) if torch.compiler.is_compiling() else forward(*args, **options)

    return cast(F, call)


def part_name(name: str | None, part: str) -> str | None:
    """The name of a part of the module `name`, if that has one."""
    return None if name is None else f"{name}.{part}"


class _Init(NamedTuple):
    """How a parameter is initialized."""

    method: InitMethod
    tracker: RngTracker | None = None
    tracker_name: str | None = None

    @torch.no_grad()
    def __call__(self, parameter: nn.Parameter) -> None:
        with forked(self.tracker, self.tracker_name):
            self.method(parameter)


class Composite(nn.Module):
    """A module of modules, of which some are sharded over tensor-parallel ranks."""

    def set_tensor_parallel_group(self, tp_group: ProcessGroup | None) -> None:
        """The ranks over which the module is sharded, where they were not known when it was made."""
        for module in self.children():
            if isinstance(module, Composite) or (isinstance(module, Module) and module.fp8_layers is not None):
                module.set_tensor_parallel_group(tp_group)


class Module(nn.Module):
    """A module with parameters of its own. `None` for `params_dtype` is torch's default dtype."""

    def __init__(
        self,
        *,
        params_dtype: torch.dtype | None,
        device: torch.device | str | None,
        tp_group: ProcessGroup | None = None,
        tp_size: int = 1,
        sequence_parallel: bool = False,
        name: str | None = None,
    ) -> None:
        super().__init__()
        self.params_dtype = torch.get_default_dtype() if params_dtype is None else params_dtype
        self.device = default_device() if device is None else torch.device(device)
        self.tp_group = tp_group
        self.tp_size = tp_size if tp_group is None else tp_group.size()
        self.sequence_parallel = sequence_parallel and self.tp_size > 1
        self.name = name
        self.model_init = current_model_init()
        self._inits: dict[str, _Init] = {}
        self._fp8_formats: dict[str, Fp8WeightFormat] = {}  # of the parameters that are `Fp8Weight`s
        self._gemms: list[Gemm] = []
        self.fp8_layers: StandaloneLayers | None = None

    # --- parameters -------------------------------------------------------------------------------------------------

    def new_parameters(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        method: InitMethod,
        *,
        tracker: RngTracker | None = None,
        tracker_name: str | None = None,
        partition_dim: int | None = None,
        sequence_parallel: bool = False,
        gemm: Gemm | None = None,
    ) -> tuple[str, ...]:
        """Register parameters, rows of one tensor, and return their names.

        `partition_dim`: along which they are sharded. `sequence_parallel`: their gradients are partial sums, which the
        optimizer's code adds up over the group; both are attributes of the parameters, as Megatron-LM reads them.
        `gemm`: whose weight they are.
        """
        rows = [shape[0] for shape in shapes.values()]
        how = None if gemm is None else self.model_init.weight_format(gemm.site.name)
        if how is not None:
            self._check_fp8_weight(shapes)
            self._fp8_formats |= dict.fromkeys(shapes, how)
        device = self.device if how is None else "meta"  # an FP8 weight is allocated once it has values
        whole = torch.empty(sum(rows), *next(iter(shapes.values()))[1:], dtype=self.params_dtype, device=device)
        for (name, shape), part in zip(shapes.items(), whole.split(rows), strict=True):
            assert part.shape == shape
            parameter: Any = nn.Parameter(part)
            parameter.sequence_parallel = sequence_parallel
            if partition_dim is not None:
                parameter.tensor_model_parallel = True
                parameter.partition_dim, parameter.partition_stride = partition_dim, 1
            self.register_parameter(name, parameter)
            self._inits[name] = _Init(method, tracker, tracker_name)
        return tuple(shapes)

    def _check_fp8_weight(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """ValueError unless these parameters of one weight can be constructed in FP8."""
        kind = type(self).__name__
        if len(shapes) > 1:
            raise ValueError(
                f"{kind}: {', '.join(shapes)} are one weight, and fp8.model_init stores a weight as one parameter with "
                "its scale; leave out parameters_split, which is fuse_qkv_params=True for attention"
            )
        for name, shape in shapes.items():
            if any(n % FP8_ALIGNMENT for n in shape):
                raise ValueError(
                    f"{kind}: {name} is {list(shape)} on a rank, and FP8 needs multiples of {FP8_ALIGNMENT}; pad it, "
                    "or construct the module within fp8.model_init(enabled=False)"
                )

    def reset_parameters(self) -> None:
        """Initialize the parameters; those on the meta device are first allocated, on the default device if need be."""
        for name, init in self._inits.items():
            old, how = self.get_parameter(name), self._fp8_formats.get(name)
            if how is None and not old.is_meta:
                init(old)
                continue
            device = old.device
            if old.is_meta:
                device = default_device() if self.device.type == "meta" else self.device
            values = nn.Parameter(torch.empty(old.shape, dtype=old.dtype, device=device), old.requires_grad)
            vars(values).update(attributes_of(old))
            init(values)
            setattr(self, name, values if how is None else self._fp8_weight(old, values, how))

    def _fp8_weight(self, old: Tensor, values: nn.Parameter, how: Fp8WeightFormat) -> Fp8Weight:
        """The weight `old` with new `values`: the same object where it is in FP8 already."""
        weight: Any = old
        if isinstance(old, Fp8Weight) and not old.is_meta:
            with torch.no_grad():
                weight.copy_(values)
        else:
            weight = nn.Parameter(Fp8Weight.cast(values, how), values.requires_grad)
            vars(weight).update(attributes_of(old))
        if self.model_init.preserve_high_precision_init_val:
            weight.preserve_init_val(values)
        return weight

    def finish(self) -> None:
        """End of the constructor: FP8 state of the linear layers, and initial values unless on the meta device."""
        if self._gemms:
            recipe = self.model_init.recipe if self.model_init.enabled else None
            self.fp8_layers = StandaloneLayers([gemm.site for gemm in self._gemms], recipe)
            for gemm in self._gemms:
                gemm.linear = self.fp8_layers.layers[gemm.site.name]
                setattr(self, gemm.attribute, gemm.linear)
            self._tell_group()
        if self.device.type != "meta":
            self.reset_parameters()

    def set_empty(self, names: Sequence[str]) -> None:
        """Set attributes that stand for biases that the module does not have."""
        for name in names:
            setattr(self, name, torch.empty(0, dtype=self.params_dtype, device=self.device))

    def joined_parameters(self, names: Sequence[str]) -> Tensor:
        """The parameters `names` as one tensor."""
        if len(names) == 1:
            return self.get_parameter(names[0])
        return joined([self.get_parameter(name) for name in names])

    # --- tensor parallelism -----------------------------------------------------------------------------------------

    def set_tensor_parallel_group(self, tp_group: ProcessGroup | None) -> None:
        """The ranks over which the module is sharded, where they were not known when it was made."""
        ranks = 1 if tp_group is None else tp_group.size()
        if ranks != self.tp_size:
            raise ValueError(
                f"{type(self).__name__}: tp_group has {ranks} ranks, and the module was made for {self.tp_size}"
            )
        self.tp_group = tp_group
        self._tell_group()

    def _tell_group(self) -> None:
        """Tell the FP8 state over which ranks weights are sharded."""
        for gemm in self._gemms:
            if gemm.linear is not None and gemm.site.parallel is not None:
                gemm.linear.tp_group = self.tp_group

    def required_group(self) -> ProcessGroup | None:
        """The tensor-parallel group; None where the module is whole."""
        if self.tp_group is None and self.tp_size > 1:
            raise ValueError(
                f"{type(self).__name__} was made for tp_size={self.tp_size} without a tp_group; call "
                "set_tensor_parallel_group before its first forward"
            )
        return self.tp_group if self.tp_size > 1 else None

    # --- state ------------------------------------------------------------------------------------------------------

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        with converting_modules():
            return super()._apply(fn, recurse)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__.get("_inits", ()):  # FSDP2 assigns a parameter when its memory comes or goes
            for gemm in self._gemms:
                if gemm.linear is not None:
                    gemm.linear.release_weight()
        if name in self.__dict__.get("_fp8_formats", ()) and type(value) not in (Fp8Weight, nn.Parameter):
            raise ValueError(
                f"{type(self).__name__}: {name} becomes a {type(value).__name__}, and weights of fp8.model_init cannot "
                "be sharded by fully_shard or DTensor; construct the module outside of it"
            )
        super().__setattr__(name, value)

    def get_extra_state(self) -> Tensor:
        """FP8 state for `state_dict`, as bytes; empty where the recipe remembers nothing."""
        state = {} if self.fp8_layers is None else self.fp8_layers.snapshot()
        if not state:
            return torch.empty(0, dtype=torch.uint8)
        file = io.BytesIO()
        torch.save({name: tensor.cpu() for name, tensor in state.items()}, file)
        return torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)

    def set_extra_state(self, state: Tensor | None) -> None:
        """Load what `get_extra_state` returned."""
        if self.fp8_layers is not None and not (state is None or (isinstance(state, Tensor) and not state.numel())):
            try:
                if not isinstance(state, Tensor) or state.dtype != torch.uint8 or state.layout != torch.strided:
                    raise ValueError("no bytes of an archive")
                self.fp8_layers.restore(_read_state(state))
            except (ValueError, KeyError, RuntimeError) as error:
                raise ValueError(
                    f"{type(self).__name__}: _extra_state is not what megafp8.nn has saved; leave out the keys that "
                    "end with _extra_state of a checkpoint from elsewhere, and load with strict=False"
                ) from error


def _read_state(state: Tensor) -> dict[str, Tensor]:
    """The tensors of an archive of `torch.save`, by name. ValueError where it holds anything else, or tensors that take
    more bytes than the archive, as those that share one record do.

    `state`: its bytes. `torch.load` would allocate what they ask for.
    """
    with tempfile.NamedTemporaryFile() as file:
        file.write(state.cpu().numpy().tobytes())
        file.flush()
        archive, tensors, size = TorchFile(Path(file.name)), dict[str, Tensor](), 0
        if not isinstance(archive.content, dict):
            raise ValueError("no tensors by name")
        for name, stored in archive.content.items():
            if not isinstance(name, str) or not isinstance(stored, StoredTensor) or not stored.is_contiguous:
                raise ValueError("no tensors by name")
            size += math.prod(stored.shape) * stored.dtype.itemsize
            if size > state.numel():
                raise ValueError("more bytes of tensors than the archive has")
            tensors[name] = torch.empty(stored.shape, dtype=stored.dtype)
            archive.read(stored, name, (0,) * len(stored.shape), tensors[name])
        return tensors


class Gemm:
    """One linear layer of a module: where it stands, how it communicates, its FP8 state, and its parameters' names.

    `site`: fields of its `LinearSite`. `fuse_wgrad_accumulation`: wgrad is added to the weight's `main_grad`.
    """

    def __init__(
        self,
        module: Module,
        name: str,
        parallel_mode: str | None,
        *,
        fuse_wgrad_accumulation: bool = False,
        **site: Any,
    ) -> None:
        require(module, "parallel_mode", parallel_mode, PARALLEL_MODES)
        sharded = parallel_mode is not None and module.tp_size > 1
        self.module, self.fuse_wgrad_accumulation = module, fuse_wgrad_accumulation
        self.attribute = f"fp8_{name}"
        self.site = LinearSite(
            ".".join(filter(None, (module.name, name))),
            parallel=parallel_mode if sharded else None,  # type: ignore[arg-type]
            tensor_parallel=module.tp_size if sharded else 1,
            sequence_parallel=sharded and module.sequence_parallel,
            **site,
        )
        self._high_precision = LinearState(self.site, None, high_reason="outside fp8.autocast")
        self.linear: StandaloneLinear | None = None
        self._group: ProcessGroup | None = None
        self._comm = LOCAL_COMM
        self.weight_names, self.bias_names, self.has_bias = tuple[str, ...](), tuple[str, ...](), False
        module._gemms.append(self)

    def new_parameters(
        self,
        rows: Mapping[str, int],
        inputs: int,
        init_method: InitMethod | None,
        tracker: RngTracker | None,
        tracker_name: str | None = None,
        *,
        bias: bool,
    ) -> None:
        """Register weight and bias: `weight` and `bias` behind each prefix in `rows`, with its rows on this rank.

        Without `bias` it is empty, and no parameter.
        """
        module, site = self.module, self.site
        self.weight_names = module.new_parameters(
            {f"{prefix}weight": (n, inputs) for prefix, n in rows.items()}, init_method or default_init,
            tracker=tracker, tracker_name=tracker_name, gemm=self,
            partition_dim={None: None, "column": 0, "row": 1}[site.parallel],
        )  # fmt: skip
        self.bias_names, self.has_bias = tuple(f"{prefix}bias" for prefix in rows), bias
        if not bias:
            module.set_empty(self.bias_names)
            return
        module.new_parameters(
            {name: (n,) for name, n in zip(self.bias_names, rows.values(), strict=True)}, nn.init.zeros_,
            partition_dim=0 if site.parallel == "column" else None,
            sequence_parallel=site.parallel == "row" and site.sequence_parallel,
        )  # fmt: skip

    def bias(self) -> Tensor:
        """The bias; empty where there is none."""
        if not self.has_bias:
            return getattr(self.module, self.bias_names[0])
        return self.module.joined_parameters(self.bias_names)

    def comm(self) -> TPComm:
        """Communication at the layer's ends."""
        parallel = self.site.parallel
        group = None if parallel is None else self.module.required_group()
        if parallel is not None and group is not None and group is not self._group:
            self._group = group
            overlap = default_overlap(group, sequence_parallel=self.site.sequence_parallel)
            self._comm = TPComm.from_overlap(parallel, overlap)
        return self._comm

    @contextmanager
    def running(self, x: Tensor, is_first_microbatch: bool | None) -> Iterator[RunningGemm]:
        """Context of one forward, of an input on x's device."""
        module, linear = self.module, self.linear
        assert linear is not None
        if is_first_microbatch and torch._C._current_graph_task_id() == -1:  # not of a recomputed forward
            linear.release_weight()
        weight = module.joined_parameters(self.weight_names)
        bias = self.bias() if self.site.adds_bias else None
        if in_onnx_export():
            if self.weight_names[0] in module._fp8_formats:
                raise ValueError(
                    f"{type(module).__name__}: weights of fp8.model_init are not exported to ONNX; load the state_dict "
                    "into a module that was constructed outside of it, and export that"
                )
            yield RunningGemm(weight, bias, self._high_precision, self.comm(), exported(linear, x.device))
            return
        if self.fuse_wgrad_accumulation:
            MainGradSink.give(module, weight, overwrite=bool(is_first_microbatch) and module.training)
        with linear.running(x.device, training=module.training) as state:
            if state is not None:
                check_fp8_dims(module, self.site.name, tuple(weight.shape))
            yield RunningGemm(weight, bias, state or self._high_precision, self.comm())


class RunningGemm(NamedTuple):
    """A linear layer in one forward. `bias`: where the layer adds it."""

    weight: Tensor
    bias: Tensor | None
    state: LinearState
    comm: TPComm
    qdq: QdqLinear | None = None  # in FP8, in a forward that is exported to ONNX

    def __call__(self, x: Tensor | LinearInput, handoff: QuantizedGradHandoff | None = None) -> Tensor:
        """`x weightᵀ + bias`."""
        if self.qdq is not None:
            assert isinstance(x, Tensor)
            return with_bias(self.qdq(x), self.bias)
        return linear(x, self.weight, self.state, bias=self.bias, handoff=handoff, comm=self.comm)  # type: ignore[arg-type]


class MainGradSink:
    """Adds wgrad to the weight's `main_grad`, and tells Megatron-LM's data parallelism so."""

    wgrads: WgradStore | None = None
    pair: WgradPair | None = None

    def __init__(self, weight: Any) -> None:
        self._weight = weakref.ref(weight)

    @classmethod
    def give(cls, module: nn.Module, weight: Any, *, overwrite: bool) -> None:
        """Make sure that `weight` has one. `overwrite`: its gradients so far do not count."""
        if getattr(weight, "main_grad", None) is None:
            raise ValueError(
                f"{type(module).__name__}: fuse_wgrad_accumulation needs weight.main_grad, a tensor of the weight's "
                "shape, before the first forward"
            )
        if overwrite and torch._C._current_graph_task_id() == -1:
            weight.main_grad.zero_()
        if not isinstance(grad_sink(weight), cls):
            set_grad_sink(weight, cls(weight))

    @property
    def main_grad(self) -> Tensor:
        weight: Any = self._weight()
        return weight.main_grad

    @property
    def is_empty(self) -> bool:
        return False

    def added(self) -> None:
        """`grad_added_to_main_grad`, where the weight has it, becomes True."""
        weight: Any = self._weight()
        if hasattr(weight, "grad_added_to_main_grad"):
            weight.grad_added_to_main_grad = True


def check_fp8_dims(module: nn.Module, layer: str, shape: tuple[int, ...]) -> None:
    """ValueError for a weight that the GEMMs of FP8 cannot take."""
    if any(n % FP8_ALIGNMENT for n in shape):
        raise ValueError(
            f"{type(module).__name__}: the weight of {layer} is {list(shape)} on a rank, and FP8 needs multiples of "
            f"{FP8_ALIGNMENT}; run it within fp8.autocast(enabled=False), or pad it"
        )


@contextmanager
def autocast_input(x: Tensor) -> Iterator[Tensor]:
    """x as torch.autocast wants it, in a context where autocast reaches no further."""
    values = in_torch_autocast_dtype(x)
    if not torch.is_autocast_enabled(x.device.type):
        yield values
        return
    with torch.autocast(x.device.type, enabled=False):
        yield values


def joined(parts: Sequence[Tensor]) -> Tensor:
    """The rows of all `parts` as one tensor: a view where they are neighbours in one storage, else a copy."""
    if in_onnx_export():
        return torch.cat(list(parts))
    whole = _Joined.apply(*parts)
    whole.parts = tuple(parts)
    return whole


class _Joined(Function):
    @staticmethod
    def forward(ctx: Any, *parts: Tensor) -> Tensor:
        ctx.rows = [len(part) for part in parts]
        first = parts[0]
        if not _are_neighbours(parts):
            return torch.cat(parts)
        whole = torch.empty(0, dtype=first.dtype, device=first.device)
        shape = (sum(ctx.rows), *first.shape[1:])
        return whole.set_(first.untyped_storage(), first.storage_offset(), shape, first.stride())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        return grad.split(ctx.rows)


def _are_neighbours(parts: Sequence[Tensor]) -> bool:
    end, storage = parts[0].storage_offset(), parts[0].untyped_storage().data_ptr()
    for part in parts:
        if part.storage_offset() != end or part.untyped_storage().data_ptr() != storage or not part.is_contiguous():
            return False
        end += part.numel()
    return storage != 0 and type(parts[0].data) is Tensor
