"""Activation recomputation (`checkpoint`) and the random-number states of tensor-parallel regions.

`checkpoint` saves only the inputs of a function and runs the function again in backward. The second run computes the
same bits: layers run under the `fp8.autocast` of the first run, its scales have not changed in between, and the random
states of PyTorch's generators and of the tracker are restored, as in `torch.utils.checkpoint`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils import checkpoint as torch_checkpoint

from megafp8.nn.base import RngTracker


class CudaRNGStatesTracker:
    """Named states of the default device's random-number generator.

    The device is the current GPU, or the CPU if there is no GPU. A CUDA graph cannot be captured within a fork.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Delete all states."""
        self._states: dict[str, Tensor] = {}
        self._seeds: set[int] = set()

    def get_states(self) -> dict[str, Tensor]:
        """Return the states by name."""
        return dict(self._states)

    def set_states(self, states: dict[str, Tensor]) -> None:
        """Replace all states by `states`, which `get_states` returned."""
        self._states = dict(states)

    def add(self, name: str, seed: int) -> None:
        """Add a state that starts from `seed`.

        Raises:
            ValueError: Another state has the same name or seed.
        """
        if seed in self._seeds:
            raise ValueError(f"seed: another state has the seed {seed}; states must not draw the same numbers")
        if name in self._states:
            raise ValueError(f"name: there is a state {name!r} already")
        self._seeds.add(seed)
        random = _generator()
        before = random.get_rng_state()
        random.manual_seed(seed)
        self._states[name] = random.get_rng_state()
        random.set_rng_state(before)

    @contextmanager
    def fork(self, name: str = "model-parallel-rng") -> Iterator[None]:
        """Draw random numbers from the state `name` within the context, continuing where its last fork ended."""
        if name not in self._states:
            raise ValueError(
                f"fork: there is no state {name!r}, only {', '.join(self._states) or 'no states at all'}; add it first"
            )
        random = _generator()
        before = random.get_rng_state()
        random.set_rng_state(self._states[name])
        try:
            yield
        finally:
            self._states[name] = random.get_rng_state()
            random.set_rng_state(before)


def _generator() -> Any:
    """Return the module (`torch.cuda` or `torch`) that has the functions of the default device's generator."""
    return torch.cuda if torch.cuda.is_available() else torch


def checkpoint(
    function: Callable[..., Any],
    *args: Any,
    distribute_saved_activations: bool = False,
    get_rng_state_tracker: RngTracker | None = None,
    tp_group: ProcessGroup | None = None,
    use_reentrant: bool = True,
    **kwargs: Any,
) -> Any:
    """Call `function(*args, **kwargs)`, save only its inputs, and run it again in backward.

    Args:
        function: Function to recompute.
        *args: Its arguments.
        distribute_saved_activations: Must be False. Under sequence parallelism the inputs are sharded anyway.
        get_rng_state_tracker: Function that returns the random-number tracker used in tensor-parallel regions.
        tp_group: Has no effect, because `distribute_saved_activations` is refused.
        use_reentrant: Has no effect: the gradients are the same.
        **kwargs: Keyword arguments of `function`.

    Returns:
        The result of `function`.
    """
    if distribute_saved_activations:
        raise ValueError(
            "checkpoint: distribute_saved_activations is True, which megafp8.nn does not offer: with sequence_parallel "
            "the inputs are sharded anyway; False works"
        )
    if get_rng_state_tracker is None:
        return torch_checkpoint.checkpoint(function, *args, use_reentrant=False, **kwargs)
    tracker = get_rng_state_tracker()
    before = _copied(tracker.get_states())

    @contextmanager
    def as_before() -> Iterator[None]:
        now = _copied(tracker.get_states())
        tracker.set_states(_copied(before))
        try:
            yield
        finally:
            tracker.set_states(now)

    def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        return nullcontext(), as_before()

    return torch_checkpoint.checkpoint(function, *args, use_reentrant=False, context_fn=contexts, **kwargs)


def _copied(states: dict[str, Any]) -> dict[str, Any]:
    """Copy the states, so that drawing random numbers does not change the copies."""
    return {name: x.clone() if isinstance(x, Tensor) else x.clone_state() for name, x in states.items()}
