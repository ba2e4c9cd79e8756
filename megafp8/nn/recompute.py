"""`checkpoint`: keep a function's inputs only, and run it again in backward; random numbers of tensor-parallel regions.

The second run has the same bits: layers run again under the `fp8.autocast` of the first, whose scales have not changed
since, torch's generators are set back as `torch.utils.checkpoint` does it, and so are those of the tracker.
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
    """States of the default device's generator by name; `fork` draws from one of them.

    The device is the current GPU, and the CPU where there is none. A CUDA graph cannot be captured within a fork.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget all states."""
        self._states: dict[str, Tensor] = {}
        self._seeds: set[int] = set()

    def get_states(self) -> dict[str, Tensor]:
        """The states by name."""
        return dict(self._states)

    def set_states(self, states: dict[str, Tensor]) -> None:
        """Draw from what `get_states` returned."""
        self._states = dict(states)

    def add(self, name: str, seed: int) -> None:
        """A new state. ValueError if its name or seed is another's."""
        if seed in self._seeds:
            raise ValueError(f"seed: {seed} is that of another state; states must not draw the same numbers")
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
        """Context that draws from the state `name`, which goes on where it was left."""
        if name not in self._states:
            raise ValueError(f"fork: there is no state {name!r}, but {', '.join(self._states) or 'none'}; add it first")
        random = _generator()
        before = random.get_rng_state()
        random.set_rng_state(self._states[name])
        try:
            yield
        finally:
            self._states[name] = random.get_rng_state()
            random.set_rng_state(before)


def _generator() -> Any:
    """The module whose `get_rng_state`, `set_rng_state` and `manual_seed` are of the default device's generator."""
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
    """`function(*args, **kwargs)`, of which only the inputs are kept for backward.

    `get_rng_state_tracker`: returns what the function draws random numbers of tensor-parallel regions from.
    `use_reentrant` has no effect: gradients are the same. `distribute_saved_activations`, and `tp_group` with it, is
    refused: under sequence parallelism inputs are sharded anyway.
    """
    if distribute_saved_activations:
        raise ValueError(
            "checkpoint: distribute_saved_activations is True, which megafp8.nn does not offer: with sequence_parallel "
            "inputs are sharded anyway; False works"
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
    """Tensors, or generators' states, that are not drawn from."""
    return {name: x.clone() if isinstance(x, Tensor) else x.clone_state() for name, x in states.items()}
