"""`make_graphed_callables`: modules whose forward and backward passes in training are replayed from CUDA graphs.

A small layer's launches cost the host more time than the GPU; a replay is one launch. Each module has three graphs:

    weights     quantizes its weights into FP8 copies at fixed addresses; replayed when they have changed
    forward     reads arguments and writes outputs at fixed addresses
    backward    reads the outputs' gradients, and writes those of arguments and parameters

*What the host does in every step stays outside.* Before a forward is replayed, the FP8 step that is over ends, and the
weights' graph is replayed if an optimizer, or anything else, has changed them. So amaxes, scales and FP8 weights are
those of eager modules, however many micro-batches a step has.

*Capture is late.* Delayed scales are known only after the first step, and a capture needs kernels that are compiled. So
modules run eagerly, as they would train anyway, until scales are known and each of them has been forward and backward
`num_warmup_iters` times. There are no passes but those of the training, which therefore leave no trace in amaxes,
gradients or random numbers. The next call records all modules. It records them again when something has changed
that graphs depend on: the memory of a parameter or of its `main_grad`, what requires gradients, what is in evaluation.

*Gradients.* Modules are recorded with aliases of their parameters, because autograd's leaves remember the stream on
which they were created, and a leaf that an eager graph still holds would draw that stream into the capture. Outputs and
gradients that leave a graph are copied: what was overwritten by the next replay would be a wrong gradient, without an
error, for everyone who keeps them.

*Memory.* Forward and backward graphs share one pool, so the intermediate results of one may lie where the activations
of another lay that was done before. Hence modules must run in the order in which they were given, and backward in the
reverse order; a backward whose activations have been overwritten is an error. A weights' graph runs anywhere within
this order, and its result outlives the step's passes, so it has a pool of its own.
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
    """Replay the forward and backward passes of `modules` from CUDA graphs, in training; returns the same modules.

    They run eagerly until FP8 scales are known and each has been forward and backward `num_warmup_iters` times; and
    always in evaluation and under `torch.no_grad`. Results have the bits of eager modules. Call the modules in the
    order in which they are given, a micro-batch's backward before the next one's forward.

    Args:
        modules: A module, or a tuple of modules that run in this order: of `megafp8.nn`, converted ones, any others.
        sample_args: For each module the arguments of its calls: tensors of the same shape, dtype, device and
            `requires_grad`; and what is no tensor, which must be equal in every call. Their values are not read.
        num_warmup_iters: Eager passes of each module in the training before it is recorded, 1 or more.
        allow_unused_input: Arguments and parameters may be without effect on the outputs; they get no gradient.
        sample_kwargs: Keyword arguments, likewise. `is_first_microbatch` may differ from call to call.
        enabled, calibrating, recipe, amax_reduction_group: The `fp8.autocast` in which training calls the modules;
            `enabled` may have one value for each. While they are `calibrating` modules run eagerly.
        cache_quantized_params: No effect: weights are quantized once after they have changed.
        fp8_enabled, fp8_calibrating, fp8_recipe, fp8_group, fp8_weight_caching: Older names of these.

    ValueError, here, at a call or in backward, for what graphs cannot hold: modules on a CPU, layers of experts, layers
    sharded over ranks, hooks of modules within a module, another order of passes, arguments or contexts other than said
    here.
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
    """The value of an argument with two names."""
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
    """`make_graphed_callables`, with one value for each module. `new_capture` records into a memory pool of its own."""
    what = "make_graphed_callables"
    lengths = {len(values) for values in (modules, sample_args, sample_kwargs, precisions)}
    if lengths != {len(modules)} or not modules:
        raise ValueError(
            f"{what}: for {len(modules)} modules there are {len(sample_args)} sample_args, {len(sample_kwargs)} "
            f"sample_kwargs and {len(precisions)} values of enabled; there must be one for each"
        )
    if warmup_passes < 1:
        raise ValueError(
            f"{what}: num_warmup_iters is {warmup_passes}; it must be at least 1, as a capture cannot compile"
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
            raise ValueError(f"{name} has tensors on {where}; all, one argument at least, must be on one GPU")
        if new_capture is CudaCapture and sample.tensors[0].device.type != "cuda":
            raise ValueError(f"{name} is on {devices.pop()}, and CUDA graphs are of a GPU; train without them there")
        graphed.append(GraphedModule(module, name, sample, precision))
        graphed[-1].takes_first_microbatch = FIRST_MICROBATCH in kwargs
    GraphedModules(graphed, warmup_passes, new_capture, allow_unused_input=allow_unused_input)


def _why_not(module: Any, args: Any) -> str:
    """Why there can be no graphs of `module`; empty where there can."""
    if not isinstance(module, nn.Module):
        return "is no nn.Module; make it one, so that its parameters are known"
    if not isinstance(args, tuple):
        return f"has sample_args {type(args).__name__}; they must be a tuple of its arguments"
    if isinstance(vars(module).get("forward"), GraphedModule):
        return "has graphs already"
    if any(not isinstance(linear, StandaloneLinear) for linear in linears_of(module)):
        return "has layers of experts, whose numbers of rows differ from step to step; leave these out"
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
    """The `autocast` that calls of a module are in."""

    enabled: bool
    calibrating: bool
    recipe: Fp8Recipe | None
    group: ProcessGroup | None

    @classmethod
    def from_settings(
        cls, enabled: bool, calibrating: bool, recipe: Fp8Recipe | None, group: ProcessGroup | None
    ) -> Precision:
        """Without what has no effect."""
        if not (enabled or calibrating):
            return cls(False, False, None, None)
        return cls(enabled, calibrating and not enabled, recipe, group)

    @classmethod
    def now(cls) -> Precision:
        context = current()
        return cls.from_settings(context.enabled, context.calibrating, context.recipe, context.group)

    def __str__(self) -> str:
        if not (self.enabled or self.calibrating):
            return "outside fp8.autocast"
        what = "enabled" if self.enabled else "calibrating"
        recipe = "the layers' own recipe" if self.recipe is None else self.recipe
        return f"in fp8.autocast, {what}, with {recipe} and {'all ranks' if self.group is None else self.group}"


class Arguments:
    """Arguments of a call: tensors, and the values of all others, which are constants of a graph."""

    def __init__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        leaves, self.spec = tree_flatten((args, {k: kwargs[k] for k in sorted(kwargs) if k != FIRST_MICROBATCH}))
        self.tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        self._kinds = [
            (tuple(x.shape), x.dtype, x.device, x.requires_grad) if isinstance(x, Tensor) else (type(x), x)
            for x in leaves
        ]
        self._leaves = leaves

    def check(self, given: Arguments, name: str) -> None:
        """ValueError unless `given` can take this sample's place."""
        if given.spec != self.spec:
            raise ValueError(f"{name}: it takes the arguments of its sample, {self.spec}, and was given {given.spec}")
        for kind, other in zip(self._kinds, given._kinds, strict=True):
            if kind is not other and kind != other:
                raise ValueError(
                    f"{name}: an argument is {_described(other)}, and that of its sample {_described(kind)}; CUDA "
                    "graphs take the sample's shapes, dtypes, device and requires_grad, and its values of what is no "
                    "tensor"
                )

    def with_tensors(self, tensors: Sequence[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The call with `tensors` instead of its own."""
        rest = iter(tensors)
        leaves = [next(rest) if isinstance(leaf, Tensor) else leaf for leaf in self._leaves]
        return tree_unflatten(leaves, self.spec)


def _described(kind: tuple[Any, ...]) -> str:
    if len(kind) == 2:
        return repr(kind[1])
    shape, dtype, device, requires_grad = kind
    return f"{str(dtype).removeprefix('torch.')} {list(shape)} on {device}{' with a gradient' * requires_grad}"


class GraphedModule:
    """The forward of `module`, in place of its own: eager at first and in evaluation, replayed in training."""

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
        raise ValueError(f"{self.name} cannot be copied or pickled after make_graphed_callables; copy it before")

    @opaque
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        arguments = Arguments(args, kwargs)
        trains = self.module.training and torch.is_grad_enabled()
        if not (trains and any(x.requires_grad for x in chain(arguments.tensors, self.parameters()))):
            return self.eager(*args, **kwargs)
        if torch._C._current_graph_task_id() != -1:
            raise ValueError(f"{self.name} is recomputed in backward, which a graph is not; checkpoint parts within it")
        self.sample.check(arguments, self.name)
        self._check_context()
        self.begin_forward()
        replays = self.together.replays_of(self) if self.settled else None
        if replays is None:
            return self._run_eagerly(args, kwargs)
        outputs = _Replay.apply(replays, kwargs.get(FIRST_MICROBATCH), *arguments.tensors, *replays.parameters)
        return tree_unflatten(list(outputs), replays.output_spec)

    def begin_forward(self) -> None:
        """End the FP8 step that is over, if one is, for the layers that are in training."""
        if self.precision.enabled:
            for layers in dict.fromkeys(linear.layers for module, linear in self.linears if module.training):
                layers.begin_forward(current())

    def _check_context(self) -> None:
        if Precision.now() != self.precision:
            raise ValueError(
                f"{self.name} is called {Precision.now()}, and make_graphed_callables was told that it would be "
                f"{self.precision}; give it the same enabled, calibrating, recipe and amax_reduction_group"
            )
        enabled = torch.is_autocast_enabled(self._device_type)
        if enabled and torch.is_autocast_cache_enabled():
            raise ValueError(
                f"{self.name} is called in torch.autocast with a cache, from which a graph would read parameters of "
                "older steps; use torch.autocast(..., cache_enabled=False)"
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
        """Of the layers in FP8, as far as they have run."""
        return [state for _, linear in self.linears for state in linear.fp8_states]

    def copies(self) -> list[FixedWeightCopies]:
        """New copies at fixed addresses for each weight that has been quantized since it changed."""
        return [
            FixedWeightCopies(state, state.weight_copies, records=module.training)
            for module, linear in self.linears
            for state in linear.fp8_states
            if state.weight_copies is not None
        ]

    @property
    def settled(self) -> bool:
        """Whether no scale is unknown and nothing calibrates, which the host would decide about."""
        quantizers = [quantizer for state in self.states for quantizer in state.own_quantizers]
        unsettled = any(isinstance(quantizer, RecipeQuantizer) and not quantizer.settled for quantizer in quantizers)
        return not (self.precision.calibrating or unsettled)

    def is_warm(self, passes: int) -> bool:
        """Whether so many eager passes went like those to be recorded."""
        return self.warm_passes >= passes and self.key() == self._warmed_with

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters of all modules in it; one that is shared, more than once."""
        return (p for module in self.modules for p in module._parameters.values() if p is not None)

    def key(self) -> Any:
        """What a recording depends on, besides arguments and `precision`."""
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
        """In which torch.autocast, if this is in one, has no effect."""
        return torch.autocast(self._device_type, enabled=False)

    @contextmanager
    def context(self) -> Iterator[None]:
        """What calls are in."""
        enabled, calibrating, recipe, group = self.precision
        dtype = self._autocast_dtype
        values = torch.autocast(self._device_type, dtype, enabled=dtype is not None, cache_enabled=False)
        with values, autocast(enabled, recipe, group, calibrating):
            yield


def _address(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


class _OwnForward(nn.Module):
    """A module's own forward, whose parameters `functional_call` can replace."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module, self.run = module, module.forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(*args, **kwargs)


class GraphedModules:
    """Modules that are recorded together. `new_capture` makes what records into a memory pool of its own."""

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
        """The graphs of `module`, recorded now if all modules are ready for it; None: it is to run eagerly."""
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
            for copies in weights:  # which nothing has written yet
                copies.forget()
        self._replays = dict(zip(self.modules, recorded, strict=True))
        seconds = time.perf_counter() - start
        logger.info(f"CUDA graphs: {len(recorded)} modules recorded in {seconds:.2f} s; replayed from here on")


class Replays:
    """The graphs of `module`.

    `under_way`: of each module recorded before it with `capture`, and then of itself, the forward whose activations are
    there, as an object of no other meaning; None where a later pass may have overwritten them.
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
        """Record what quantizes the weights."""

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
        """Begin a forward, and the outputs for arguments with these tensors."""
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
        """Those of this module and of later ones, whose memory its graphs use too."""
        self._under_way[self._index :] = [None] * (len(self._under_way) - self._index)

    def backward(self, begun: object, grad_outputs: Sequence[Tensor]) -> list[Tensor | None]:
        """The gradients of tensors and parameters, None where there is none. `begun`: the forward."""
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
    """Another leaf with the parameter's memory and attributes."""
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
