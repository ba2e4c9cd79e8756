"""Base classes of the modules with weights: parameters laid out as in Transformer Engine, tensor parallelism, FP8.

*Parameters.* Several parameters may form one weight (`parameters_split`). They are created as views of one tensor, and
`joined` returns that tensor without a copy as long as they are still neighbors in memory.

*Tensor parallelism.* `tp_size` determines the shapes. `tp_group`, or a later call of `set_tensor_parallel_group`,
provides the ranks.

*FP8.* A module creates one `Gemm` for each of its linear layers; the `Gemm` knows the names of the layer's parameters.
Outside `fp8.autocast` the layer runs in high precision. Within `fp8.model_init` the weight is constructed as an
`Fp8Weight`.

Shapes: a weight has n outputs and k inputs.
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
"""Function that returns a random-number tracker: its `fork(name)` is a context with a separate random state, as in
Megatron-LM."""

F = TypeVar("F", bound=Callable[..., Any])

PARALLEL_MODES = (None, "column", "row")
INIT_STD = 0.023
FP8_ALIGNMENT = 16  # both dims of a weight are multiples of it: all three FP8 GEMMs read rows in units of 16 bytes


def default_init(weight: Tensor) -> None:
    """Fill `weight` from a normal distribution with mean 0 and standard deviation 0.023."""
    nn.init.normal_(weight, std=INIT_STD)


def default_device() -> torch.device:
    """Return the current GPU, or the CPU if there is no GPU."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def forked(tracker: RngTracker | None, name: str | None = None) -> AbstractContextManager[Any]:
    """Return a context that draws random numbers from the tracker; without a tracker, a context without effect."""
    if tracker is None:
        return nullcontext()
    return tracker().fork() if name is None else tracker().fork(name)


def opaque(forward: F) -> F:
    """Make torch.compile run the decorated `forward` eagerly, with a graph break before and after it."""
    uncompiled = torch._disable_dynamo(forward)

    @wraps(forward)
    def call(*args: Any, **options: Any) -> Any:
        return uncompiled(*args, **options) if torch.compiler.is_compiling() else forward(*args, **options)

    return cast(F, call)


def part_name(name: str | None, part: str) -> str | None:
    """Return the name `name.part` of a submodule, or None if the module has no name."""
    return None if name is None else f"{name}.{part}"


class _Init(NamedTuple):
    """Initialization of a parameter: a function, and the random-number tracker that it draws from."""

    method: InitMethod
    tracker: RngTracker | None = None
    tracker_name: str | None = None

    @torch.no_grad()
    def __call__(self, parameter: nn.Parameter) -> None:
        with forked(self.tracker, self.tracker_name):
            self.method(parameter)


class Composite(nn.Module):
    """Module that consists of other modules, some of them sharded over tensor-parallel ranks."""

    def set_tensor_parallel_group(self, tp_group: ProcessGroup | None) -> None:
        """Set the tensor-parallel group of all submodules, if it was not known when they were constructed."""
        for module in self.children():
            if isinstance(module, Composite) or (isinstance(module, Module) and module.fp8_layers is not None):
                module.set_tensor_parallel_group(tp_group)


class Module(nn.Module):
    """Module that has parameters.

    Args:
        params_dtype: Dtype of the parameters; None means PyTorch's default dtype.
        device: Device of the parameters; None means the current GPU. On "meta" they are not initialized.
        tp_group: Tensor-parallel group.
        tp_size: Number of tensor-parallel ranks; needed only if `tp_group` is set later.
        sequence_parallel: Shard the tokens outside of the sharded layers along the first dim.
        name: Name of the module in log messages and recipes.
    """

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
        self._fp8_formats: dict[str, Fp8WeightFormat] = {}  # only parameters that are `Fp8Weight`s
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
        """Register parameters that are consecutive rows of one tensor, and return their names.

        Args:
            shapes: Shape of each parameter on this rank, by name.
            method: Function that initializes a parameter.
            tracker: Random-number tracker for the initialization.
            tracker_name: Name of the tracker's state; None means the tracker's default state.
            partition_dim: Dim along which the parameters are sharded. Set as an attribute that Megatron-LM reads.
            sequence_parallel: Whether gradients are partial sums, which the optimizer must add up over the
                tensor-parallel group. Set as an attribute that Megatron-LM reads.
            gemm: Linear layer that the parameters are the weight of; its name decides whether they are stored in FP8.
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
        """Raise ValueError unless the parameters of this weight can be constructed in FP8."""
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
        """Initialize all parameters.

        Parameters on the meta device are allocated first: on the module's device, or on the default device if the
        module was constructed on the meta device.
        """
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
        """Quantize `values` into the FP8 weight `old`; return `old`, or a new weight if `old` is not in FP8 yet."""
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
        """Finish construction: create the FP8 state of the linear layers, and initialize parameters unless on meta."""
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
        """Set the attributes `names` to empty tensors, in place of biases that the module does not have."""
        for name in names:
            setattr(self, name, torch.empty(0, dtype=self.params_dtype, device=self.device))

    def joined_parameters(self, names: Sequence[str]) -> Tensor:
        """Return the rows of the parameters `names` as one tensor."""
        if len(names) == 1:
            return self.get_parameter(names[0])
        return joined([self.get_parameter(name) for name in names])

    # --- tensor parallelism -----------------------------------------------------------------------------------------

    def set_tensor_parallel_group(self, tp_group: ProcessGroup | None) -> None:
        """Set the tensor-parallel group, if it was not known when the module was constructed.

        Raises:
            ValueError: The group does not have `tp_size` ranks.
        """
        ranks = 1 if tp_group is None else tp_group.size()
        if ranks != self.tp_size:
            raise ValueError(
                f"{type(self).__name__}: tp_group has {ranks} ranks, and the module was made for {self.tp_size}"
            )
        self.tp_group = tp_group
        self._tell_group()

    def _tell_group(self) -> None:
        """Pass the tensor-parallel group to the FP8 state of the sharded layers."""
        for gemm in self._gemms:
            if gemm.linear is not None and gemm.site.parallel is not None:
                gemm.linear.tp_group = self.tp_group

    def required_group(self) -> ProcessGroup | None:
        """Return the tensor-parallel group, or None if the module is not sharded.

        Raises:
            ValueError: The module is sharded, but its group has not been set.
        """
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
        if name in self.__dict__.get("_inits", ()):  # FSDP2 assigns a parameter whenever it gathers or frees it
            for gemm in self._gemms:
                if gemm.linear is not None:
                    gemm.linear.release_weight()
        if name in self.__dict__.get("_fp8_formats", ()) and type(value) not in (Fp8Weight, nn.Parameter):
            raise ValueError(
                f"{type(self).__name__}: {name} becomes a {type(value).__name__}, and weights of fp8.model_init cannot "
                "be sharded by fully_shard or DTensor; construct the module outside fp8.model_init"
            )
        super().__setattr__(name, value)

    def get_extra_state(self) -> Tensor:
        """Return the FP8 state for `state_dict` as a uint8 tensor; empty if the recipe keeps no state."""
        state = {} if self.fp8_layers is None else self.fp8_layers.snapshot()
        if not state:
            return torch.empty(0, dtype=torch.uint8)
        file = io.BytesIO()
        torch.save({name: tensor.cpu() for name, tensor in state.items()}, file)
        return torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)

    def set_extra_state(self, state: Tensor | None) -> None:
        """Load the FP8 state that `get_extra_state` returned."""
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
    """Return the tensors of a `torch.save` archive, by name.

    `state` holds the bytes of the archive. They are untrusted, and `torch.load` would allocate whatever sizes they
    claim.

    Raises:
        ValueError: The archive contains anything other than tensors by name, or its tensors take more bytes than the
            archive, for example because they share one record.
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
    """Linear layer of a module: its `LinearSite`, communication, FP8 state, and the names of its parameters.

    Args:
        module: Module that owns the parameters.
        name: Name of the layer within the module.
        parallel_mode: "column", "row", or None.
        fuse_wgrad_accumulation: Add the weight gradient to the weight's `main_grad`.
        **site: Further fields of the layer's `LinearSite`.
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
        """Register the parameters `<prefix>weight` and `<prefix>bias` for each prefix in `rows`.

        `rows` maps each prefix to its number of rows on this rank, and `inputs` is the number of columns. Without
        `bias`, `<prefix>bias` is an empty tensor and not a parameter.
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
        """Return the bias, `[n]`, or an empty tensor if the layer has no bias."""
        if not self.has_bias:
            return getattr(self.module, self.bias_names[0])
        return self.module.joined_parameters(self.bias_names)

    def comm(self) -> TPComm:
        """Return the communication before and after the layer's GEMM."""
        parallel = self.site.parallel
        group = None if parallel is None else self.module.required_group()
        if parallel is not None and group is not None and group is not self._group:
            self._group = group
            overlap = default_overlap(group, sequence_parallel=self.site.sequence_parallel)
            self._comm = TPComm.from_overlap(parallel, overlap)
        return self._comm

    @contextmanager
    def running(self, x: Tensor, is_first_microbatch: bool | None) -> Iterator[RunningGemm]:
        """Enter one forward of the layer, and yield the layer as a function of its input.

        Args:
            x: Input of the module; only its device matters.
            is_first_microbatch: Whether to quantize the weight again, even if it seems unchanged.
        """
        module, linear = self.module, self.linear
        assert linear is not None
        if is_first_microbatch and torch._C._current_graph_task_id() == -1:  # not while backward recomputes forward
            linear.release_weight()
        weight = module.joined_parameters(self.weight_names)
        bias = self.bias() if self.site.adds_bias else None
        if in_onnx_export():
            if self.weight_names[0] in module._fp8_formats:
                raise ValueError(
                    f"{type(module).__name__}: weights of fp8.model_init are not exported to ONNX; load the state_dict "
                    "into a module that was constructed outside fp8.model_init, and export that module"
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
    """Linear layer during one forward."""

    weight: Tensor
    bias: Tensor | None  # None if the layer does not add a bias
    state: LinearState
    comm: TPComm
    qdq: QdqLinear | None = None  # only in an export to ONNX with FP8 enabled

    def __call__(self, x: Tensor | LinearInput, handoff: QuantizedGradHandoff | None = None) -> Tensor:
        """Return `x weightᵀ + bias`, `[..., n]`."""
        if self.qdq is not None:
            assert isinstance(x, Tensor)
            return with_bias(self.qdq(x), self.bias)
        return linear(x, self.weight, self.state, bias=self.bias, handoff=handoff, comm=self.comm)  # type: ignore[arg-type]


class MainGradSink:
    """Gradient sink that adds the weight gradient to `main_grad` and reports it to Megatron-LM's data parallelism."""

    wgrads: WgradStore | None = None
    pair: WgradPair | None = None

    def __init__(self, weight: Any) -> None:
        self._weight = weakref.ref(weight)

    @classmethod
    def give(cls, module: nn.Module, weight: Any, *, overwrite: bool) -> None:
        """Attach a sink to `weight` unless it has one; with `overwrite`, set `main_grad` to zero first."""
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
        """The weight's `main_grad`, to which its gradient is added."""
        weight: Any = self._weight()
        return weight.main_grad

    @property
    def is_empty(self) -> bool:
        """False: `main_grad` always has values, to which the gradient must be added."""
        return False

    def added(self) -> None:
        """Set the weight's `grad_added_to_main_grad`, if it has this attribute."""
        weight: Any = self._weight()
        if hasattr(weight, "grad_added_to_main_grad"):
            weight.grad_added_to_main_grad = True


def check_fp8_dims(module: nn.Module, layer: str, shape: tuple[int, ...]) -> None:
    """Raise ValueError if FP8 GEMMs cannot take a weight of this shape."""
    if any(n % FP8_ALIGNMENT for n in shape):
        raise ValueError(
            f"{type(module).__name__}: the weight of {layer} is {list(shape)} on a rank, and FP8 needs multiples of "
            f"{FP8_ALIGNMENT}; run it within fp8.autocast(enabled=False), or pad it"
        )


@contextmanager
def autocast_input(x: Tensor) -> Iterator[Tensor]:
    """Cast x to the dtype of torch.autocast, and turn autocast off within the context."""
    values = in_torch_autocast_dtype(x)
    if not torch.is_autocast_enabled(x.device.type):
        yield values
        return
    with torch.autocast(x.device.type, enabled=False):
        yield values


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate the rows of all `parts`: as a view if they are neighbors in one storage, else as a copy."""
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
