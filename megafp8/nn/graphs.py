"""`make_graphed_callables`: replay the forward and backward passes of modules from CUDA graphs during training.

Launching the kernels of a small layer takes the host longer than the GPU needs to run them. Replaying a graph is one
launch. Each module has three graphs:

    weights     quantizes the weights into FP8 copies at fixed addresses; replayed after the weights have changed
    forward     reads arguments and writes outputs at fixed addresses
    backward    reads the gradients of the outputs, and writes the gradients of arguments and parameters

*Per-step work on the host stays outside the graphs.* Before a forward is replayed, the previous FP8 step ends if it is
over, and the weight graph is replayed if an optimizer, or anything else, has changed the weights. Graphs and eager
modules therefore have the same amaxes, scales and FP8 weights, whatever the number of micro-batches per step.

*Recording happens late.* Delayed scales are known only after the first step, and kernels must be compiled before they
can be captured. So modules train eagerly until all scales are known and each module has run forward and backward
`num_warmup_iters` times. There are no extra warmup passes, and nothing changes amaxes, gradients or random numbers. The
next call records all modules. They are recorded again if something changes that the graphs depend on: the memory of a
parameter or of its `main_grad`, `requires_grad`, or training and evaluation mode.

*Gradients.* Modules are recorded with aliases of their parameters. Autograd's leaves remember the stream on which they
were created, and a leaf that an eager graph still refers to would pull that stream into the capture. Outputs and
gradients that leave a graph are copied. Otherwise the next replay would overwrite them, and code that still uses them
would get wrong values without an error.

*Memory.* Forward and backward graphs share one memory pool, so the intermediate results of one graph may use memory
that held the activations of an earlier one. Modules must therefore run forward in the given order and backward in
reverse order. A backward pass raises an error if its activations have been overwritten. A weight graph may run anywhere
within this order, and its results must survive the passes of the step, so each weight graph has a separate pool.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.graph import register_multi_grad_hook
from torch.distributed import ProcessGroup
from torch.func import functional_call
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from megafp8.fp8.autocast import autocast, current
from megafp8.fp8.standalone import FixedWeightCopies, StandaloneLinear, linears_of
from megafp8.linear.autograd import once_differentiable
from megafp8.linear.capture import Capture, CudaCapture
from megafp8.linear.grad_sink import grad_sink
from megafp8.linear.state import LinearState
from megafp8.nn.arguments import refuse
from megafp8.nn.base import MainGradSink, opaque
from megafp8.numerics.recipes import Fp8Recipe
from megafp8.numerics.recipes.base import RecipeQuantizer

logger = logging.getLogger(__name__)
FIRST_MICROBATCH = "is_first_microbatch"


def make_graphed_callables(
    modules: nn.Module | tuple[nn.Module, ...],
    sample_args: tuple[Any, ...],
    num_warmup_iters: int = 3,
    allow_unused_input: bool = False,
    sample_kwargs: dict[str, Any] | tuple[dict[str, Any], ...] | None = None,
    fp8_enabled: bool | tuple[bool, ...] | None = None,
    fp8_calibrating: bool | None = None,
    fp8_recipe: Fp8Recipe | None = None,
    fp8_group: ProcessGroup | None = None,
    fp8_weight_caching: bool | None = None,
    enabled: bool | tuple[bool, ...] | None = None,
    calibrating: bool | None = None,
    recipe: Fp8Recipe | None = None,
    amax_reduction_group: ProcessGroup | None = None,
    cache_quantized_params: bool | None = None,
    _order: list[int] | None = None,
    _num_layers_per_chunk: list[int] | None = None,
    pool: Any = None,
    retain_graph_in_backward: bool = False,
    _reuse_graph_input_output_buffers: bool = False,
    clone_param_grads_on_return: bool = True,
    pre_warmup_hook: Callable[[], None] | None = None,
    post_warmup_hook: Callable[[], None] | None = None,
    capture_time_hooks: list[Any] | None = None,
) -> Any:
    """Replay the forward and backward passes of `modules` from CUDA graphs during training.

    Modules run eagerly until FP8 scales are known and each module has run forward and backward `num_warmup_iters`
    times. In evaluation and under `torch.no_grad` they always run eagerly. Graphs and eager modules compute bitwise
    equal results. Call the modules in the given order, and run the backward of a micro-batch before the next forward.

    The arguments `fp8_enabled`, `fp8_calibrating`, `fp8_recipe`, `fp8_group` and `fp8_weight_caching` are older names
    of `enabled`, `calibrating`, `recipe`, `amax_reduction_group` and `cache_quantized_params`. The remaining arguments,
    from `_order` on, accept only their defaults.

    - `modules`: A module, or a tuple of modules in the order in which they run: modules of `megafp8.nn`, converted
      modules, or any others.
    - `sample_args`: Arguments of a call of each module. Every later call must pass tensors of the same shape, dtype,
      device and `requires_grad`, and equal values for all other arguments. The values of the tensors are not read.
    - `num_warmup_iters`: Number of eager training passes of each module before it is recorded, 1 or more.
    - `allow_unused_input`: Allow arguments and parameters that have no effect on the outputs. They get no gradient.
    - `sample_kwargs`: Keyword arguments of a call of each module. `is_first_microbatch` may differ from call to call.
    - `enabled`, `calibrating`, `recipe`, `amax_reduction_group`: Arguments of the `fp8.autocast` in which the training
      calls the modules. `enabled` may be a tuple with one value for each module. Modules run eagerly while
      `calibrating`.
    - `cache_quantized_params`: Has no effect: weights are always quantized once after they have changed.

    Returns:
        `modules`. Their `forward` is replaced.

    Raises:
        ValueError: Graphs cannot represent the modules: they are on a CPU, contain layers of experts, are sharded over
            ranks, or contain modules with hooks. A call or a backward pass raises ValueError if passes run in another
            order, or with other arguments or another context than given here.
    """
    refuse(make_graphed_callables, locals())
    several = modules if isinstance(modules, tuple) else (modules,)
    if not isinstance(modules, tuple):
        sample_args, sample_kwargs = (sample_args,), None if sample_kwargs is None else (sample_kwargs,)  # type: ignore[assignment]
    on = _either("enabled", enabled, fp8_enabled) or False
    options = (
        _either("calibrating", calibrating, fp8_calibrating) or False,
        _either("recipe", recipe, fp8_recipe),
        _either("amax_reduction_group", amax_reduction_group, fp8_group),
    )
    _either("cache_quantized_params", cache_quantized_params, fp8_weight_caching)
    graph(
        several,
        sample_args,
        ({},) * len(several) if sample_kwargs is None else sample_kwargs,  # type: ignore[arg-type]
        [Precision.from_settings(each, *options) for each in (on if isinstance(on, tuple) else (on,) * len(several))],
        num_warmup_iters,
        allow_unused_input=allow_unused_input,
    )
    return modules


def _either(name: str, value: Any, older: Any) -> Any:
    """Return the value of an argument that has an older name, and raise ValueError if both are given."""
    if value is not None and older is not None:
        raise ValueError(f"make_graphed_callables: {name} is given under its older name too; leave out one of them")
    return older if value is None else value


def graph(
    modules: Sequence[nn.Module],
    sample_args: Sequence[tuple[Any, ...]],
    sample_kwargs: Sequence[Mapping[str, Any]],
    precisions: Sequence[Precision],
    warmup_passes: int,
    *,
    allow_unused_input: bool = False,
    new_capture: Callable[[], Capture] = CudaCapture,
) -> None:
    """Replace the forward of all `modules`, with one sample and one precision for each.

    See `make_graphed_callables`. Each `Capture` that `new_capture` returns records into a separate memory pool.
    """
    what = "make_graphed_callables"
    lengths = {len(values) for values in (modules, sample_args, sample_kwargs, precisions)}
    if lengths != {len(modules)} or not modules:
        raise ValueError(
            f"{what}: for {len(modules)} modules there are {len(sample_args)} sample_args, {len(sample_kwargs)} "
            f"sample_kwargs and {len(precisions)} values of enabled; there must be one for each"
        )
    if warmup_passes < 1:
        raise ValueError(
            f"{what}: num_warmup_iters is {warmup_passes}; it must be at least 1, because a capture cannot compile"
        )
    graphed = []
    for i, (module, args, kwargs, precision) in enumerate(
        zip(modules, sample_args, sample_kwargs, precisions, strict=True)
    ):
        name = f"{what}: {'the module' if len(modules) == 1 else f'modules[{i}]'} ({type(module).__name__})"
        problem = _why_not(module, args)
        if problem:
            raise ValueError(f"{name} {problem}")
        sample = Arguments(args, kwargs)
        devices = {str(x.device) for x in (*sample.tensors, *module.parameters(), *module.buffers())}
        if not sample.tensors or len(devices) != 1:
            where = ", ".join(sorted(devices))
            raise ValueError(
                f"{name} has tensors on {where}; all must be on one GPU, and at least one argument must be a tensor"
            )
        if new_capture is CudaCapture and sample.tensors[0].device.type != "cuda":
            raise ValueError(f"{name} is on {devices.pop()}, and CUDA graphs need a GPU; train without them there")
        graphed.append(GraphedModule(module, name, sample, precision))
        graphed[-1].takes_first_microbatch = FIRST_MICROBATCH in kwargs
    GraphedModules(graphed, warmup_passes, new_capture, allow_unused_input=allow_unused_input)


def _why_not(module: Any, args: Any) -> str:
    """Return why `module` cannot be recorded, as the end of an error message; empty if it can."""
    if not isinstance(module, nn.Module):
        return "is not an nn.Module; make it one, so that its parameters are known"
    if not isinstance(args, tuple):
        return f"has sample_args {type(args).__name__}; they must be a tuple of its arguments"
    if isinstance(vars(module).get("forward"), GraphedModule):
        return "has graphs already"
    if any(not isinstance(linear, StandaloneLinear) for linear in linears_of(module)):
        return "has layers of experts, and their numbers of rows differ from step to step; leave these layers out"
    for name, parameter in module.named_parameters():
        if type(parameter) is not nn.Parameter:
            return f"has {name}, a {type(parameter).__name__}, and graphs hold plain parameters only; leave it out"
    for name, each in module.named_modules():
        if getattr(each, "tp_size", 1) > 1:
            return f"is sharded over {each.tp_size} ranks; graphs of collectives are a job's (training.cuda_graphs)"
        if each is not module and any(getattr(each, hooks) for hooks in _HOOKS):
            return f"has hooks of {name}, which a replay does not run; remove them, or hook the module itself"
    if any(buffer.requires_grad for buffer in module.buffers()):
        return "has a buffer that requires a gradient; make it a parameter"
    return ""


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class Precision(NamedTuple):
    """Arguments of the `fp8.autocast` in which a module is called."""

    enabled: bool
    calibrating: bool
    recipe: Fp8Recipe | None
    group: ProcessGroup | None

    @classmethod
    def from_settings(
        cls, enabled: bool, calibrating: bool, recipe: Fp8Recipe | None, group: ProcessGroup | None
    ) -> Precision:
        """Build the precision, leaving out settings that have no effect."""
        if not (enabled or calibrating):
            return cls(False, False, None, None)
        return cls(enabled, calibrating and not enabled, recipe, group)

    @classmethod
    def now(cls) -> Precision:
        """Return the precision of the current `fp8.autocast`."""
        context = current()
        return cls.from_settings(context.enabled, context.calibrating, context.recipe, context.group)

    def __str__(self) -> str:
        if not (self.enabled or self.calibrating):
            return "outside fp8.autocast"
        what = "enabled" if self.enabled else "calibrating"
        recipe = "the layers' own recipe" if self.recipe is None else self.recipe
        return f"in fp8.autocast, {what}, with {recipe} and {'all ranks' if self.group is None else self.group}"


class Arguments:
    """Arguments of a call: tensors, and other values, which are constants of a graph."""

    def __init__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        leaves, self.spec = tree_flatten((args, {k: kwargs[k] for k in sorted(kwargs) if k != FIRST_MICROBATCH}))
        self.tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        self._kinds = [
            (tuple(x.shape), x.dtype, x.device, x.requires_grad) if isinstance(x, Tensor) else (type(x), x)
            for x in leaves
        ]
        self._leaves = leaves

    def check(self, given: Arguments, name: str) -> None:
        """Raise ValueError unless a graph recorded with these arguments can be replayed with `given`."""
        if given.spec != self.spec:
            raise ValueError(f"{name}: it takes the arguments of its sample, {self.spec}, but was given {given.spec}")
        for kind, other in zip(self._kinds, given._kinds, strict=True):
            if kind is not other and kind != other:
                raise ValueError(
                    f"{name}: an argument is {_described(other)}, but in the sample it is {_described(kind)}; CUDA "
                    "graphs need the shapes, dtypes, device and requires_grad of the sample's tensors, and equal "
                    "values of its other arguments"
                )

    def with_tensors(self, tensors: Sequence[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the positional and keyword arguments, with `tensors` in place of this call's tensors."""
        rest = iter(tensors)
        leaves = [next(rest) if isinstance(leaf, Tensor) else leaf for leaf in self._leaves]
        return tree_unflatten(leaves, self.spec)


def _described(kind: tuple[Any, ...]) -> str:
    if len(kind) == 2:
        return repr(kind[1])
    shape, dtype, device, requires_grad = kind
    return f"{str(dtype).removeprefix('torch.')} {list(shape)} on {device}{' with a gradient' * requires_grad}"


class GraphedModule:
    """Replacement of a module's forward: eager at first and in evaluation, replayed from graphs in training."""

    def __init__(self, module: nn.Module, name: str, sample: Arguments, precision: Precision) -> None:
        self.module, self.name, self.sample, self.precision = module, name, sample, precision
        self.takes_first_microbatch = False
        self.eager = _OwnForward(module)
        self.modules = list(module.modules())
        self.linears = [
            (each, linear)
            for each in self.modules
            for linear in vars(each).values()
            if isinstance(linear, StandaloneLinear)
        ]
        self.weights: list[FixedWeightCopies] = []
        self.warm_passes = 0
        self._warmed_with: Any = None
        self._device_type = sample.tensors[0].device.type
        self._autocast_dtype: torch.dtype | None = None
        self.together: GraphedModules

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ValueError(f"{self.name} cannot be copied or pickled after make_graphed_callables; do it before")

    @opaque
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward: replay its graph if possible, else run it eagerly."""
        arguments = Arguments(args, kwargs)
        trains = self.module.training and torch.is_grad_enabled()
        if not (trains and any(x.requires_grad for x in chain(arguments.tensors, self.parameters()))):
            return self.eager(*args, **kwargs)
        if torch._C._current_graph_task_id() != -1:
            raise ValueError(
                f"{self.name} is recomputed in backward, but a graph cannot be; checkpoint parts within the module"
            )
        self.sample.check(arguments, self.name)
        self._check_context()
        self.begin_forward()
        replays = self.together.replays_of(self) if self.settled else None
        if replays is None:
            return self._run_eagerly(args, kwargs)
        outputs = _Replay.apply(replays, kwargs.get(FIRST_MICROBATCH), *arguments.tensors, *replays.parameters)
        return tree_unflatten(list(outputs), replays.output_spec)

    def begin_forward(self) -> None:
        """End the previous FP8 step, if it is over, for the layers in training mode."""
        if self.precision.enabled:
            for layers in dict.fromkeys(linear.layers for module, linear in self.linears if module.training):
                layers.begin_forward(current())

    def _check_context(self) -> None:
        if Precision.now() != self.precision:
            raise ValueError(
                f"{self.name} is called {Precision.now()}, but make_graphed_callables was told that it would be "
                f"{self.precision}; give both the same enabled, calibrating, recipe and amax_reduction_group"
            )
        enabled = torch.is_autocast_enabled(self._device_type)
        if enabled and torch.is_autocast_cache_enabled():
            raise ValueError(
                f"{self.name} is called in torch.autocast with a cache, and a graph would read the parameters of "
                "older steps from this cache; use torch.autocast(..., cache_enabled=False)"
            )
        self._autocast_dtype = torch.get_autocast_dtype(self._device_type) if enabled else None

    def _run_eagerly(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        outputs = self.eager(*args, **kwargs)
        key = self.key()
        if key != self._warmed_with:
            self.warm_passes, self._warmed_with = 0, key
        if self.settled:
            self.weights = self.copies()
            with_grad = [y for y in tree_flatten(outputs)[0] if isinstance(y, Tensor) and y.requires_grad]
            if with_grad:
                register_multi_grad_hook(with_grad, self._count_pass, mode="any")
        return outputs

    def _count_pass(self, grad: Tensor) -> None:
        self.warm_passes += 1

    @property
    def states(self) -> list[LinearState]:
        """States of the FP8 layers that have run."""
        return [state for _, linear in self.linears for state in linear.fp8_states]

    def copies(self) -> list[FixedWeightCopies]:
        """Return new FP8 copies, at fixed addresses, of each weight that has been quantized since it changed."""
        return [
            FixedWeightCopies(state, state.weight_copies, records=module.training)
            for module, linear in self.linears
            for state in linear.fp8_states
            if state.weight_copies is not None
        ]

    @property
    def settled(self) -> bool:
        """Whether all scales are known and nothing calibrates, so that the host has nothing to decide in a forward."""
        quantizers = [quantizer for state in self.states for quantizer in state.own_quantizers]
        unsettled = any(isinstance(quantizer, RecipeQuantizer) and not quantizer.settled for quantizer in quantizers)
        return not (self.precision.calibrating or unsettled)

    def is_warm(self, passes: int) -> bool:
        """Return whether `passes` eager passes have run under the conditions that would be recorded now."""
        return self.warm_passes >= passes and self.key() == self._warmed_with

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters of the module and its submodules. Shared parameters appear more than once."""
        return (p for module in self.modules for p in module._parameters.values() if p is not None)

    def key(self) -> Any:
        """Return everything that a recording depends on, except arguments and `precision`; comparable with `==`."""
        return (
            self._autocast_dtype,
            [module.training for module in self.modules],
            [
                (id(p), p.data_ptr(), p.requires_grad, _address(getattr(p, "main_grad", None)))
                for p in self.parameters()
            ],
            [_address(buffer) for module in self.modules for buffer in module._buffers.values()],
            [getattr(state.own_quantizers.weight, "recording", True) for state in self.states],
        )

    def without_autocast(self) -> AbstractContextManager[Any]:
        """Return a context that turns torch.autocast off."""
        return torch.autocast(self._device_type, enabled=False)

    @contextmanager
    def context(self) -> Iterator[None]:
        """Enter the torch.autocast and fp8.autocast in which the module is called."""
        enabled, calibrating, recipe, group = self.precision
        dtype = self._autocast_dtype
        values = torch.autocast(self._device_type, dtype, enabled=dtype is not None, cache_enabled=False)
        with values, autocast(enabled, recipe, group, calibrating):
            yield


def _address(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


class _OwnForward(nn.Module):
    """Original forward of a module, wrapped so that `functional_call` can replace its parameters."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module, self.run = module, module.forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the original forward."""
        return self.run(*args, **kwargs)


class GraphedModules:
    """Modules that are recorded together. Each `Capture` from `new_capture` records into a separate memory pool."""

    def __init__(
        self,
        modules: Sequence[GraphedModule],
        warmup_passes: int,
        new_capture: Callable[[], Capture],
        *,
        allow_unused_input: bool = False,
    ) -> None:
        self.modules, self.warmup_passes = modules, warmup_passes
        self._new_capture, self._allow_unused_input = new_capture, allow_unused_input
        self._replays: dict[GraphedModule, Replays] = {}
        for module in modules:
            module.together = self
            module.module.forward = module

    def replays_of(self, module: GraphedModule) -> Replays | None:
        """Return the graphs of `module`, recording all modules now if they are ready; None means to run eagerly."""
        replays = self._replays.get(module)
        if replays is not None and replays.key != module.key():
            logger.info(f"CUDA graphs: {module.name} has changed; its graphs and those recorded with it are dropped")
            self._replays = {}
            for each in self.modules:
                each.warm_passes = 0
        if not self._replays and all(each.is_warm(self.warmup_passes) for each in self.modules):
            self._record()
        return self._replays.get(module)

    def _record(self) -> None:
        start, weights = time.perf_counter(), [copies for module in self.modules for copies in module.weights]
        for module in self.modules:
            with module.context():
                module.begin_forward()  # which must not end a step in a capture
        recorded: list[Replays] = []
        under_way: list[object] = []
        capture, name = self._new_capture(), ""
        try:
            for module in self.modules:
                name = module.name
                recorded.append(Replays(module, capture, under_way))
                recorded[-1].record_weights(self._new_capture)
                recorded[-1].record_forward()
            for replays in reversed(recorded):
                name = replays.module.name
                replays.record_backward(allow_unused_input=self._allow_unused_input)
        except (torch.cuda.OutOfMemoryError, ValueError):
            raise
        except Exception as error:
            raise RuntimeError(
                f"recording CUDA graphs of {name} failed ({error}); leave it out of make_graphed_callables"
            ) from error
        finally:
            for copies in weights:  # recording has not written any values yet
                copies.forget()
        self._replays = dict(zip(self.modules, recorded, strict=True))
        seconds = time.perf_counter() - start
        logger.info(f"CUDA graphs: {len(recorded)} modules recorded in {seconds:.2f} s; replayed from here on")


class Replays:
    """Graphs of one module.

    Args:
        module: Module to record.
        capture: Recorder, shared by all modules that are recorded together.
        under_way: Shared list with one entry per recorded module; this object appends the entry of its module. An entry
            is a token of the forward that left its activations in memory, or None if a later pass may have overwritten
            them.
    """

    def __init__(self, module: GraphedModule, capture: Capture, under_way: list[object]) -> None:
        self.module, self._capture, self._under_way = module, capture, under_way
        self._index = len(under_way)
        under_way.append(None)
        self.key, self._weights = module.key(), module.weights
        self.parameters = list(dict.fromkeys(module.parameters()))
        self._aliases = [_alias(parameter) for parameter in self.parameters]
        self._inputs = [torch.empty_like(x, requires_grad=False) for x in module.sample.tensors]
        self._write_weights: Callable[[], None] | None = None
        self._forward: Callable[[], None]
        self._backward: Callable[[], None]
        self._outputs: list[Tensor] = []
        self.output_spec: TreeSpec

    # --- recording --------------------------------------------------------------------------------------------------

    def record_weights(self, new_capture: Callable[[], Capture]) -> None:
        """Record the quantization of the weights, if any are in FP8."""

        def quantize() -> None:
            with self.module.without_autocast():
                for copies in self._weights:
                    copies.quantize()

        if self._weights:
            self._write_weights = new_capture()(quantize)

    def record_forward(self) -> None:
        """Record the forward pass."""
        module = self.module
        names = {p: name for name, p in module.eager.named_parameters()}
        aliases: dict[str, Tensor] = {names[p]: alias for p, alias in zip(self.parameters, self._aliases, strict=True)}

        def forward() -> None:
            self._leaves = [
                buffer.detach().requires_grad_(x.requires_grad)
                for buffer, x in zip(self._inputs, module.sample.tensors, strict=True)
            ]
            args, kwargs = module.sample.with_tensors(self._leaves)
            if module.takes_first_microbatch:
                kwargs[FIRST_MICROBATCH] = False
            outputs, self.output_spec = tree_flatten(functional_call(module.eager, aliases, args, kwargs))
            for output in outputs:
                if not isinstance(output, Tensor):
                    raise ValueError(f"{module.name} returns {output!r}; it must return tensors only")
            self._outputs = outputs

        with module.context():
            self._forward = self._capture(forward)
        assert all(copies.current for copies in self._weights), "quantized in the forward's graph"
        assert len(module.copies()) == len(self._weights), "there are weights that no eager forward has quantized"
        self.differentiable = [y.requires_grad for y in self._outputs]
        self._grad_outputs = [torch.empty_like(y, requires_grad=False) for y in self._outputs if y.requires_grad]

    def record_backward(self, *, allow_unused_input: bool) -> None:
        """Record the backward pass."""
        wanted = [x for x in (*self._leaves, *self._aliases) if x.requires_grad]
        grads: list[Tensor | None] = []

        def backward() -> None:
            outputs = [y for y in self._outputs if y.requires_grad]
            with self.module.without_autocast():  # as training calls backward
                grads.extend(torch.autograd.grad(outputs, wanted, self._grad_outputs, allow_unused=True))

        self._backward = self._capture(backward)
        rest = iter(grads)
        self._grads = [next(rest) if x.requires_grad else None for x in (*self._leaves, *self._aliases)]
        self._sinks: list[Any] = []
        for x, grad in zip((*self._leaves, *self._aliases), self._grads, strict=True):
            sink = grad_sink(x)
            if grad is None and sink is not None:
                self._sinks.append(sink)
            elif grad is None and x.requires_grad and not allow_unused_input:
                raise ValueError(
                    f"{self.module.name}: {_described((x.shape, x.dtype, x.device, False))}, an argument or a "
                    "parameter, has no effect on the outputs; allow_unused_input=True gives it no gradient"
                )
        self._outputs = [y.detach() for y in self._outputs]
        del self._leaves, self._aliases

    # --- replaying --------------------------------------------------------------------------------------------------

    def forward(self, tensors: Sequence[Tensor], first_microbatch: bool | None) -> tuple[object, list[Tensor]]:
        """Replay the forward pass.

        Args:
            tensors: Tensors among the arguments.
            first_microbatch: True quantizes the weights again, and sets each `main_grad` that is accumulated to zero.

        Returns:
            A token of this forward, which `backward` needs, and copies of the outputs.
        """
        self._overwrite_activations()
        begun = self._under_way[self._index] = object()
        if first_microbatch:
            for parameter in self.parameters:
                if isinstance(sink := grad_sink(parameter), MainGradSink):
                    sink.main_grad.zero_()
        if self._write_weights and (first_microbatch or not all(copies.current for copies in self._weights)):
            self._write_weights()
            for copies in self._weights:
                copies.written()
        _copy(self._inputs, tensors)
        self._forward()
        return begun, _copied(self._outputs)

    def _overwrite_activations(self) -> None:
        """Mark the activations of this module and of later ones as lost: the graphs share their memory."""
        self._under_way[self._index :] = [None] * (len(self._under_way) - self._index)

    def backward(self, begun: object, grad_outputs: Sequence[Tensor]) -> list[Tensor | None]:
        """Replay the backward pass of the forward with the token `begun`.

        Returns:
            Copies of the gradients of argument tensors and parameters; None for those without a gradient.
        """
        if self._under_way[self._index] is not begun:
            raise ValueError(
                f"{self.module.name}: backward needs activations that a later pass has overwritten; CUDA graphs run in "
                "the order in which modules were given, backward in reverse and once, one micro-batch after the other"
            )
        self._overwrite_activations()
        _copy(self._grad_outputs, [g for g, needed in zip(grad_outputs, self.differentiable, strict=True) if needed])
        self._backward()
        for sink in self._sinks:
            sink.added()
        copied = iter(_copied([grad for grad in self._grads if grad is not None]))
        return [None if grad is None else next(copied) for grad in self._grads]


class _Replay(Function):
    @staticmethod
    def forward(ctx: Any, replays: Replays, first_microbatch: bool | None, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.replays, arguments = replays, tensors[: len(tensors) - len(replays.parameters)]
        ctx.begun, outputs = replays.forward(arguments, first_microbatch)
        ctx.mark_non_differentiable(
            *(y for y, needed in zip(outputs, replays.differentiable, strict=True) if not needed)
        )
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *ctx.replays.backward(ctx.begun, grads)


def _alias(parameter: nn.Parameter) -> nn.Parameter:
    """Return a new leaf that shares the parameter's memory and attributes."""
    alias = nn.Parameter(parameter.detach(), parameter.requires_grad)
    vars(alias).update(vars(parameter))
    if parameter.requires_grad:
        alias.grad_dtype = parameter.grad_dtype
    return alias


def _copy(to: list[Tensor], tensors: Sequence[Tensor]) -> None:
    if to:
        torch._foreach_copy_(to, list(tensors))


def _copied(tensors: Sequence[Tensor]) -> list[Tensor]:
    copies = [torch.empty_like(x) for x in tensors]
    _copy(copies, tensors)
    return copies
